"""The `nodeready` command: its subcommands, and the one way from an error to a line and a code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import Any

import click

import nodeready
from nodeready.cli.config import defaults
from nodeready.cli.exits import exit_code
from nodeready.sanitise import sanitise

#: subcommand -> the module that holds it; imported when it is used, so that --help is quick.
_COMMANDS = {
    "completion": "Completion for bash, zsh or fish.",
    "audit": "What differs from the policy, on every node.",
    "ready": "Go or no-go for every node, proven, before a job.",
    "deploy": "Make every node as the policy wants it.",
    "cores": "Where each core file's program crashed, on every node.",
    "bundle": "The node's own program as one file, with a policy.",
    "env": "The exports for a job that the nodes' facts suggest.",
    "learn": "What most nodes have in common, as a policy to review.",
    "stacks": "Where every rank of a hung job stands, the odd one first.",
    "explain": "What a check means, and what repairs it.",
    "tail": "The last lines of every rank's log, over all nodes, grouped.",
    "lab": "A cluster of real SSH nodes on this machine.",
}
#: Those that talk to nodes.
_TALKING = ("audit", "ready", "deploy", "env", "learn", "tail", "stacks", "cores")


class _Commands(click.Group):
    """A group that imports a subcommand when it is asked for."""

    #: Whether this process is the command, and no program that has imported it: only then may the
    #: standard library be patched.
    is_the_command = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        if self.is_the_command and cmd_name in _TALKING:
            importlib.import_module("nodeready.transport.patch")
        module = importlib.import_module(f"nodeready.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "NODEREADY",
        "show_default": True,
        "max_content_width": 100,
    },
)
@click.version_option(nodeready.__version__, prog_name="nodeready")
def cli() -> None:
    """Makes every node of a GPU cluster debuggable before the job starts, and proves it.

    INVENTORY is a pyinfra inventory file, @local, a node set such as gpu[001-064], names
    separated by commas, or a hostfile.

    \b
    Exit status:
      0    all good
      1    the tool or an operation failed
      2    usage, a bad policy, or nothing selected
      3    a check failed, or --check found changes to make
      4    a node could not be reached
      130  interrupted
    """


def complain(text: str) -> None:
    """On standard error, a line for each of the problems."""
    for line in text.split("\n"):
        click.echo(f"nodeready: {sanitise(line)}", err=True)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; ends the process with the documented exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    _Commands.is_the_command = True
    try:
        status = cli.main(
            arguments,
            prog_name="nodeready",
            standalone_mode=False,
            default_map=defaults(),
        )
        sys.exit(status or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(exit_code(usage=True))
    except click.UsageError as error:
        complain(error.format_message())
        if error.ctx is not None:
            click.echo(f"Try '{error.ctx.command_path} --help'.", err=True)
        sys.exit(exit_code(usage=True))
    except click.ClickException as error:
        complain(error.format_message())
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(exit_code(interrupted=True))
    except BrokenPipeError:
        # The reader of our output went away; Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exit_code(failed=True))
    except OSError as error:
        complain(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
        sys.exit(exit_code(failed=True))
