"""Writes the generated documentation; with `--check`, only says what is out of date.

docs/checks.md, docs/nodeready.1 and the schemas are generated whole. In the remaining pages the
text between `<!-- begin NAME -->` and `<!-- end NAME -->` is generated: the names are in PIECES.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click
import jinja2

import nodeready
from nodeready.cli import cli
from nodeready.cli.options import options_in_groups
from nodeready.core.exit_codes import OK, exit_code
from nodeready.core.policy import Policy, reason, setting_kind
from nodeready.core.result import Check, no_facts
from nodeready.core.severity import ACTIONS, SEVERITIES, words
from nodeready.lab.hardware import tomllib
from nodeready.operations import STEPS
from nodeready.reports import schema
from nodeready.reports.schema import SchemaWriter
from nodeready.subjects.environment_table import ANY, BAD_VALUES, RULES, VersionRange
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS

# --- The generated tables: checks, policy keys, exit codes, operations, rules of environments.

ROOT = Path(__file__).resolve().parents[1]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(text: str) -> str:
    """``text`` with the characters that Markdown would take for markup, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*~<|])", r"\\\1", p) for p in parts)


def value(item: Any) -> str:
    """A default as a group_data file would spell it."""
    if isinstance(item, tuple):
        inner = ", ".join(value(part) for part in item)
        return f"({inner},)" if len(item) == 1 else f"({inner})"
    return f'"{item}"' if isinstance(item, str) else repr(item)


def policy_keys() -> str:
    """Every key of the policy with its default, its values and its meaning."""
    rows = []
    for field in fields(Policy):
        takes, meaning = setting_kind(field.name).takes, plain(reason(field.name))
        # What a range is, an error says.
        choices = f"{takes}. " if takes.count('`"') > 1 else ""
        rows.append((f"`{field.name}`", f"`{value(field.default)}`", choices + meaning))
    return markdown(("Key", "Default", "Meaning"), rows)


_EXAMPLE_HEAD = '''\
"""The policy of every node. The lines below are nodeready's defaults: uncomment what differs.

A file named after a group (`h100.py`) holds the values that differ for that group. nodeready
refuses misspelt keys and wrong values before it contacts a node.
"""

from __future__ import annotations
'''
_NOT_IN_EXAMPLE = frozenset({"lock_wait_s", "package_lock_wait_s"})  # settings of tests


def policy_example() -> str:
    """The file of group_data with every setting, its meaning, and its default in a comment."""
    parts = [_EXAMPLE_HEAD]
    fill = partial(textwrap.fill, width=97, break_on_hyphens=False, break_long_words=False)
    for field in fields(Policy):
        if field.name not in _NOT_IN_EXAMPLE:
            comment = fill(reason(field.name), initial_indent="# ", subsequent_indent="# ")
            parts.append(f"\n{comment}\n# {field.name} = {value(field.default)}\n")
    return "".join(parts)


def exit_meanings() -> list[tuple[int, str]]:
    """(code, when) in the order of precedence, from `exit_code` itself."""
    text = inspect.getdoc(exit_code) or ""
    rows = re.findall(r"^\w+: +(\d+), (.*)$", text, re.M)
    return [*((int(code), when) for code, when in rows), (OK, "success")]


def leaves(
    group: click.Group = cli, path: tuple[str, ...] = ()
) -> Iterable[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


def operations() -> str:
    """A table of all operations in the order of a deploy, with their settings."""
    rows = []
    for step in STEPS:
        missing = [f"`{f.name}`" for f in fields(Policy) if f.name not in step.settings]
        names = ", ".join(f"`{name}`" for name in step.settings)
        if len(step.settings) > len(missing):
            names = f"all but {', '.join(missing)}"
        rows.append((f"`{step.name}`", plain(step.does), names))
    return markdown(("Operation", "Effect", "Settings"), rows)


def environment_rules() -> str:
    """What can be wrong with a job's environment, a row for the variables of a rule."""
    problems: dict[str, list[str]] = {}
    for rule in RULES:
        problems.setdefault(rule.variables, []).append(plain(rule.problem))
    for bad in BAD_VALUES:
        versions = {"NCCL": bad.nccl, "PyTorch": bad.torch, "CUDA": bad.cuda, "driver": bad.driver}
        texts = [_versions(*row) for row in versions.items() if row[1] != ANY]
        variable = f"`{bad.variable}`" if bad.variable else ""
        place = ", ".join([*texts, *filter(None, [bad.machine])])
        key, place = (variable, f"{place}: ") if variable and place else (variable or place, "")
        problems.setdefault(key, []).append(place + plain(bad.problem))
    # Variables with the same problem share a row.
    rows: dict[str, list[str]] = {}
    for variables, texts in problems.items():
        rows.setdefault("; ".join(texts), []).append(variables)
    return markdown(
        ("Variable", "What can be wrong"), ((", ".join(v), t) for t, v in rows.items())
    )


def _versions(name: str, versions: VersionRange) -> str:
    first, fixed = (".".join(map(str, version)) for version in versions)
    return f"{name} {first} to before {fixed}"


def _meanings(title: str, meanings: Mapping[str, str]) -> str:
    rows = ((f"{words(name)} (`{name}`)", text) for name, text in meanings.items())
    return markdown((title, "Meaning"), rows)


def checks_page() -> str:
    """docs/checks.md: a row for what each check declares; `nodeready explain` has the rest."""
    head = (ROOT / "scripts/checks_head.md").read_text().rstrip("\n")
    head = head.replace("SEVERITIES", _meanings("Severity", SEVERITIES))
    parts = [head.replace("ACTIONS", _meanings("Action", ACTIONS))]
    for name, subject in SUBJECTS.items():
        parts.append(f"\n## {name}\n\n{plain(subject.about)}\n\n")
        rows = map(_row, subject.checks)
        table = markdown(("Check", "A failure", "Settings", "What must hold"), rows)
        parts.append(table if subject.checks else "See [checks of your own](site-checks.md).\n")
    return "".join(parts)


def _row(check: Check) -> tuple[str, ...]:
    settings = ", ".join(f"`{key}`" for key in check.settings)
    meaning = re.split(r"(?<=\.)\s", check.meaning.strip(), maxsplit=1)[0]
    meaning = re.sub(r"``(.+?)``", r"`\1`", " ".join(meaning.split()))
    return f"`{check.id}`", words(check.cost.severity), settings, plain(meaning)


# --- docs/nodeready.1, from the commands' own help: synopsis, options, variables, examples.


def escape(text: str) -> str:
    """``text`` for roff, without requests and escapes."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    text = text.replace("\u2026", "...")
    return re.sub(r"^\.", r"\\&.", text, flags=re.M)


def paragraphs(text: str) -> list[list[str]]:
    """The rows of each paragraph of a help text; where \\b is the first, they stay apart."""
    blocks = re.split(r"\n\s*\n", text.strip())
    return [[row.strip() for row in block.splitlines()] for block in blocks]


def option(parameter: click.Option) -> tuple[str, str]:
    """An option's names and its help, with its variable and default."""
    names = ", ".join(sorted(parameter.opts, key=len))
    if isinstance(parameter.type, click.Choice):
        names += " " + "|".join(map(str, parameter.type.choices))
    elif not parameter.is_flag and not parameter.count:
        names += f" {parameter.metavar or parameter.type.name.split()[0].upper()}"
    text = parameter.help or ""
    if isinstance(parameter.default, str | int) and not (parameter.is_flag or parameter.count):
        text += f" Default: {parameter.default}."
    if variables := parameter.envvar:
        names_of = [variables] if isinstance(variables, str) else variables
        text += f" Variable: {', else '.join(names_of)}."
    return names, text


def arguments(command: click.Command) -> str:
    """The arguments of a command, as its usage names them."""
    context = click.Context(command)
    parameters = (p for p in command.params if isinstance(p, click.Argument))
    return " ".join(parameter.make_metavar(context) for parameter in parameters)


def man_page() -> str:
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"roff": escape, "paragraphs": paragraphs, "option": option}
    environment.globals |= {"arguments": arguments, "options_in_groups": options_in_groups}
    page = environment.from_string((ROOT / "scripts/nodeready.1.j2").read_text(encoding="utf-8"))
    return page.render(
        version=nodeready.__version__,
        about=cli.help,
        commands=list(leaves()),
        exit_codes=exit_meanings(),
        **tomllib.loads((ROOT / "scripts/man_page.toml").read_text(encoding="utf-8")),
    )


# --- docs/schema/facts-1.json: each fact of each subject, its type and its meaning.

_ABOUT = (
    "What nodeready observes on a node, by subject: `facts` in the JSON of an audit. The unit of "
    "a number is in its key (`speed_mbps`) or its meaning. null: the node does not show a value."
)


def observations(subject: str) -> Iterator[Any]:
    """The class that the subject's parser returns, and that of the facts that need the fleet."""
    probe = SUBJECTS[subject].probe
    assert probe is not None
    parse: Any = inspect.unwrap(probe.parse)
    yield eval(parse.__annotations__["return"], parse.__globals__)
    derived: Any = SUBJECTS[subject].derived
    if derived is not no_facts:
        yield typing.get_type_hints(inspect.unwrap(derived))["return"]


def _subject(writer: SchemaWriter, subject: str) -> dict[str, Any]:
    """The schema of a subject's facts: those of the fleet are keys of the same object."""
    facts, *of_fleet = [writer.object(kind) for kind in observations(subject)]
    for fleet_facts in of_fleet:
        properties = fleet_facts["properties"]
        facts["properties"] |= properties
        facts["required"] = [key for key in facts["required"] if key not in properties]
    return {"anyOf": [facts, {"$ref": "#/$defs/unknown"}]}


def facts_schema() -> str:
    """The content of docs/schema/facts-1.json."""
    writer = SchemaWriter()
    subjects = {subject: _subject(writer, subject) for subject in LOOKED_AT}
    reason = {"type": "string", "description": "Why the subject could not be observed."}
    unknown = {"type": "object", "properties": {"unknown": reason}, "required": ["unknown"]}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:nodeready:facts:1",
        "title": "nodeready.facts/1",
        "description": _ABOUT,
        "type": "object",
        "properties": subjects,
        "$defs": {"unknown": unknown, **writer.parts},
    }
    return json.dumps(document, indent=1) + "\n"


# --- All files.

#: Files that are generated whole: path -> its text.
PAGES: dict[str, Callable[[], str]] = {
    "docs/checks.md": checks_page,
    "inventories/group_data/all.py": policy_example,
    "docs/nodeready.1": man_page,
    "docs/schema/facts-1.json": facts_schema,
    **{
        f"docs/schema/{schema.file_name(name)}": partial(schema.text, name)
        for name in schema.DOCUMENTS
    },
}
#: Generated pieces of other pages: the name between the marks -> its text.
PIECES: dict[str, Callable[[], str]] = {
    "policy-keys": policy_keys,
    "exit-codes": lambda: markdown(("Code", "When"), ((f"{c}", w) for c, w in exit_meanings())),
    "operations": operations,
    "environment-rules": environment_rules,
}

_PIECE = re.compile(r"(<!-- begin ([a-z-]+) -->\n).*?(<!-- end \2 -->)", re.S)


def with_pieces(text: str) -> str:
    """``text`` with its generated pieces. Raises KeyError for a name that is not in PIECES."""
    return _PIECE.sub(lambda match: f"{match[1]}{PIECES[match[2]]()}{match[3]}", text)


def generated_files() -> dict[Path, str]:
    """Every file with generated text, as it should be."""
    texts = {ROOT / name: page() for name, page in PAGES.items()}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path not in texts and path.is_file() and _PIECE.search(text := path.read_text()):
            texts[path] = with_pieces(text)
    return texts


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in generated_files().items():
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(text)
    for name in stale:
        print(f"{name}: {'out of date: run scripts/make_docs.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
