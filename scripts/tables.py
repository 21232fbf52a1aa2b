"""The generated tables: policy keys, exit codes, commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import click

from nodeready.cli import cli
from nodeready.cli.options import Option
from nodeready.exit_codes import OK, exit_code
from nodeready.lab.faults import FAULTS, GROUPS
from nodeready.lab.profiles import PROFILES
from nodeready.policy import Policy
from nodeready.policy.policy import reason, setting_kind
from nodeready.subjects.environment_table import ANY, BAD_VALUES, RULES, VersionRange


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
    """Every key of the policy with its default, its values and its reason."""
    rows = [
        (f"`{f.name}`", f"`{value(f.default)}`", setting_kind(f.name).takes, plain(reason(f.name)))
        for f in fields(Policy)
    ]
    return markdown(("Key", "Default", "Takes", "Meaning and reason"), rows)


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


def variables() -> str:
    """Every variable that several commands read, and the options that have no such variable."""
    readers: dict[str, list[str]] = {}
    for words, command in leaves():
        for option in command.params:
            if isinstance(option, Option) and not option.hidden:
                readers.setdefault(option.variables[-1], []).append(f"`{words[0]}`")
    commands_of = sorted(readers.items())
    return markdown(("Variable", "Commands"), ((f"`{v}`", ", ".join(c)) for v, c in commands_of))


def about(command: click.Command) -> str:
    """The first sentence of a command's help."""
    return re.split(r"(?<=\.)\s", (command.help or "").strip(), maxsplit=1)[0].replace("\n", " ")


def commands() -> str:
    """Every command and the first sentence of its help."""
    rows = ((f"`nodeready {' '.join(words)}`", about(command)) for words, command in leaves())
    return markdown(("Command", "What it does"), rows)


def faults() -> str:
    """The faults of the lab, a table for each group."""
    tables = []
    for group, (title, _) in GROUPS.items():
        rows = [
            (f"`{fault.name}`", profile_names(fault.profiles), plain(fault.about))
            for fault in FAULTS.values()
            if fault.group == group
        ]
        tables.append(f"{title}:\n\n{markdown(('Fault', 'Profiles', 'What is wrong'), rows)}")
    return "\n".join(tables)


def environment_rules() -> str:
    """The rules about a job's environment."""
    weights = {2: "cannot work", 1: "a sign", 0: "slow, a note"}
    rows = [
        (rule.variables, plain(rule.problem), weights[rule.weight], plain(rule.advice),
         plain(rule.source))
        for rule in RULES
    ]  # fmt: skip
    for bad in BAD_VALUES:
        variable = f"`{bad.variable}`" if bad.variable else ""
        versions = (
            _versions("NCCL", VersionRange(bad.first, bad.fixed)),
            _versions("PyTorch", bad.torch),
            _versions("CUDA", bad.cuda),
            _versions("driver", bad.driver),
        )
        place = ", ".join(filter(None, (variable, *versions, bad.machine)))
        rows.append(
            (place, plain(bad.problem), weights[bad.weight], plain(bad.advice),
             plain(bad.source))
        )  # fmt: skip
    return markdown(("Variable", "What is wrong", "Effect", "What to do", "Source"), rows)


def _versions(name: str, versions: VersionRange) -> str:
    """The versions in words; "": any."""
    first, fixed = (".".join(map(str, version)) for version in versions)
    if versions == ANY:
        return ""
    return f"{name} {first} to before {fixed}"


def profile_names(profiles: tuple[str, ...]) -> str:
    """The profiles in words."""
    return "all" if profiles == tuple(PROFILES) else ", ".join(profiles)
