"""docs/nodeready.1, from the commands' own help: synopsis, options, variables, examples."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click
from tables import ROOT, exit_meanings, leaves

import nodeready
from nodeready.cli import cli
from nodeready.cli.options import options_in_groups
from nodeready.lab.hardware import tomllib

#: The sections that no command's help has.
_SECTIONS = tomllib.loads((ROOT / "scripts/man_page.toml").read_text(encoding="utf-8"))


def escape(text: str) -> str:
    """``text`` for roff, without requests and escapes."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    text = text.replace("\u2026", "...")
    return re.sub(r"^\.", r"\\&.", text, flags=re.M)


def tagged(items: Iterable[tuple[str, str]], font: str = "B") -> list[str]:
    """A list of terms and what they mean."""
    lines = []
    for term, text in items:
        lines += [".TP", f".{font} {escape(term)}" if font else escape(term), escape(text)]
    return lines


def paragraphs(text: str) -> list[str]:
    """Help text as roff; a paragraph that begins with \\b keeps its lines, as in click."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        rows = [row.strip() for row in block.splitlines()]
        if rows[0] == "\b":
            lines += [".PP", ".nf", *(escape(row) for row in rows[1:]), ".fi"]
        else:
            lines += [".PP", escape(" ".join(rows))]
    return lines


def without_examples(text: str) -> str:
    """Help text without its examples, which have their own section."""
    return "\n\n".join(block for block in re.split(r"\n\s*\n", text) if "Examples:" not in block)


def examples(text: str) -> list[str]:
    """The lines of a help text's examples."""
    for block in re.split(r"\n\s*\n", text):
        if "Examples:" in block:
            return [row.strip() for row in block.split("Examples:")[1].splitlines() if row.strip()]
    return []


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
    variables = parameter.envvar or ()
    if isinstance(variables, str):
        variables = (variables,)
    if variables:
        text += f" Variable: {', else '.join(variables)}."
    return names, text


def page() -> str:
    """The whole manual page."""
    head = (cli.help or "").split("\n\n")
    title = head[0].strip().rstrip(".")
    lines = [
        f'.TH NODEREADY 1 "" "nodeready {nodeready.__version__}" "User Commands"',
        ".SH NAME",
        f"nodeready \\- {escape(title[:1].lower() + title[1:])}",
        ".SH SYNOPSIS",
    ]
    commands = list(leaves())
    for words, command in commands:
        arguments = " ".join(
            p.make_metavar(click.Context(command))
            for p in command.params
            if isinstance(p, click.Argument)
        )
        usage = f".B nodeready {' '.join(words)}\n[options] {escape(arguments)}".rstrip()
        lines += [usage, ".br"]
    lines.append(".SH DESCRIPTION")
    lines += paragraphs("\n\n".join(part for part in head if "Exit status" not in part))
    shown: list[str] = []
    for words, command in commands:
        lines.append(f".SH NODEREADY {' '.join(words).upper()}")
        lines += paragraphs(without_examples(command.help or ""))
        for group, options in options_in_groups(command).items():
            lines += [] if group == "Options" else [f".SS {group}"]
            lines += tagged(map(option, options))
        shown += examples(command.help or "")
    lines.append(".SH EXIT STATUS")
    lines += tagged((str(code), f"{when}.") for code, when in exit_meanings())
    lines += [".PP", "The first of these that holds is the exit status."]
    lines.append(".SH ENVIRONMENT")
    lines += [
        ".PP",
        escape(
            "An option is taken from the command line, else from its variable, else from the "
            "user's configuration file, else from the system's, else it has its default."
        ),
    ]
    lines += tagged(_SECTIONS["environment"].items())
    lines.append(".SH FILES")
    lines += tagged(_SECTIONS["files"].items(), "I")
    lines += [".SH EXAMPLES", ".nf", *(escape(row) for row in shown), ".fi"]
    lines += [".SH SEE ALSO", ".BR pyinfra (1),", ".BR pdsh (1),", ".BR ssh (1),"]
    lines += [".BR core (5),", ".BR sysctl.d (5),", ".BR limits.conf (5)"]
    return "\n".join(lines) + "\n"
