"""The generated tables: checks, policy keys, exit codes, operations, rules of environments."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from nodeready.cli import cli
from nodeready.core.exit_codes import OK, exit_code
from nodeready.core.policy import Policy, reason, setting_kind
from nodeready.core.result import Check
from nodeready.core.severity import ACTIONS, SEVERITIES, words
from nodeready.operations import STEPS
from nodeready.subjects.environment_table import ANY, BAD_VALUES, RULES, VersionRange
from nodeready.subjects.registry import SUBJECTS

ROOT = Path(__file__).resolve().parents[1]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
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
#: Settings of tests.
_NOT_IN_EXAMPLE = frozenset({"lock_wait_s", "package_lock_wait_s"})


def policy_example() -> str:
    """The file of group_data with every setting, its meaning, and its default in a comment."""
    parts = [_EXAMPLE_HEAD]
    for field in fields(Policy):
        if field.name not in _NOT_IN_EXAMPLE:
            comment = textwrap.fill(
                reason(field.name),
                97,
                initial_indent="# ",
                subsequent_indent="# ",
                break_on_hyphens=False,
                break_long_words=False,
            )
            parts.append(f"\n{comment}\n# {field.name} = {value(field.default)}\n")
    return "".join(parts)


def exit_meanings() -> list[tuple[int, str]]:
    """(code, when) in the order of precedence, from `exit_code` itself."""
    text = inspect.getdoc(exit_code) or ""
    rows = re.findall(r"^\w+: +(\d+), (.*)$", text, re.M)
    return [*((int(code), when) for code, when in rows), (OK, "success")]


def exit_codes() -> str:
    """The exit codes in the order of precedence."""
    return markdown(("Code", "When"), ((str(code), when) for code, when in exit_meanings()))


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
    """Every operation in the order of a deploy: what it does, and its settings."""
    rows = []
    for step in STEPS:
        missing = [f"`{f.name}`" for f in fields(Policy) if f.name not in step.settings]
        names = ", ".join(f"`{name}`" for name in step.settings)
        if len(step.settings) > len(missing):
            names = f"all but {', '.join(missing)}"
        rows.append((f"`{step.name}`", plain(step.does), names))
    return markdown(("Operation", "What it does", "Settings"), rows)


def environment_rules() -> str:
    """What can be wrong with a job's environment, a row for the variables of a rule."""
    problems: dict[str, list[str]] = {}
    for rule in RULES:
        problems.setdefault(rule.variables, []).append(plain(rule.problem))
    for bad in BAD_VALUES:
        versions = (
            _versions("NCCL", bad.nccl),
            _versions("PyTorch", bad.torch),
            _versions("CUDA", bad.cuda),
            _versions("driver", bad.driver),
        )
        variable = f"`{bad.variable}`" if bad.variable else ""
        place = ", ".join(filter(None, (*versions, bad.machine)))
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
    """The versions in words; "": any."""
    first, fixed = (".".join(map(str, version)) for version in versions)
    return "" if versions == ANY else f"{name} {first} to before {fixed}"


def _meanings(title: str, meanings: Mapping[str, str]) -> str:
    rows = ((f"{words(name)} (`{name}`)", text) for name, text in meanings.items())
    return markdown((title, "Meaning"), rows)


def checks_page() -> str:
    """docs/checks.md: a row for what each check declares; `nodeready explain` has the rest."""
    head = (
        (ROOT / "scripts/checks_head.md")
        .read_text()
        .rstrip("\n")
        .replace("SEVERITIES", _meanings("Severity", SEVERITIES))
    )
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
