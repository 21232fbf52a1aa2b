"""Options that several commands share; each shows its default and its variable in --help."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from nodeready.cli.exits import Refused

Command = TypeVar("Command", bound=Callable[..., Any])


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """click.option, with the environment variable NODEREADY_NAME, shown in --help."""
    name = max((n.lstrip("-") for n in names if n.startswith("--")), key=len)
    variable = "NODEREADY_" + name.partition("/")[0].replace("-", "_").upper()
    settings.setdefault("envvar", variable)
    return click.option(*names, show_envvar=True, **settings)


def port_range(words: str) -> tuple[int, int]:
    """``29500-29510``, or one port, as ``--ports`` takes it. Raises Refused."""
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", words.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise Refused(f"--ports {words}: must be FIRST-LAST, two ports from 1 to 65535")
    return first, last


def common(command: Command) -> Command:
    """The options of every command that talks to nodes."""
    for decorate in reversed(
        (
            option(
                "--limit",
                metavar="NODES",
                help="Only these nodes: gpu[001-004], a group, a glob, @last-failed.",
            ),
            option("--sudo", is_flag=True, help="Become root with sudo on the nodes."),
            option("--ssh-user", metavar="NAME", help="Log in as this user."),
            option(
                "--ssh-key",
                metavar="FILE",
                type=click.Path(exists=True, dir_okay=False),
                help="Log in with this key.",
            ),
            option(
                "--color",
                type=click.Choice(["auto", "always", "never"]),
                default="auto",
                help="Colours on the terminal.",
            ),
            click.option("-q", "--quiet", is_flag=True, help="Say nothing when all is well."),
            click.option(
                "-v", "--verbose", count=True, help="Say more; progress without a terminal."
            ),
        )
    ):
        command = decorate(command)
    return command
