"""The `nodeready` command: its subcommands, and its errors as a line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

import nodeready
from nodeready.core.exit_codes import Refused, exit_code, handle_signals, leave
from nodeready.core.shell import search_path

_MAX_WIDTH = 100
#: Subcommand -> its line in the help. Its module is imported only when the command is used, so
#: that --help is quick.
_COMMANDS = {
    "completion": "Completion for bash, zsh or fish.",
    "audit": "What differs from the policy, on every node.",
    "ready": "Go or no-go for every node, proven, before a job.",
    "smoke": "A collective over all nodes; names the faulty node, GPU or link.",
    "run": "Start one rank of a job so that its hang can be debugged.",
    "deploy": "Make every node conform to the policy.",
    "cores": "Where each core file's program crashed, on every node.",
    "bundle": "The node's own program as one file, with a policy.",
    "undrain": "Which nodes that Slurm drained would return, and why the rest stay.",
    "env": "Environment variables for a job, from the nodes' facts.",
    "learn": "The majority of the nodes' facts, as a policy to review.",
    "lemons": "Nodes and GPUs that fail far more often than their peers.",
    "jobs": "What runs where: jobs, their users, ranks and nodes.",
    "waivers": "The accepted findings: their owners, their ends, what they hide.",
    "stacks": "The stack of every rank of a hung job; the odd rank out first.",
    "incident": "The evidence of a hung job, in one archive.",
    "postmortem": "Who failed first in a job that has died, and of what.",
    "watch": "Watch a job, and keep the evidence when it hangs.",
    "diff": "What changed on the nodes; the failing nodes' own changes first.",
    "history": "The life of a node or a GPU: what earlier looks have shown.",
    "explain": "What a check means, and what repairs it.",
    "tail": "The last lines of every rank's log, over all nodes, grouped.",
    "lab": "A cluster of real SSH nodes on this machine.",
}
#: Subcommand -> its module, where that has another name.
_MODULES = {
    "waivers": "audit", "learn": "audit", "env": "ready", "smoke": "ready", "bundle": "deploy",
    "undrain": "ready",
    "jobs": "stacks", "tail": "stacks", "watch": "incident", "cores": "postmortem",
    "diff": "memory", "history": "memory", "lemons": "memory",
}  # fmt: skip
#: The commands that contact nodes.
_CONTACT_NODES = frozenset(_COMMANDS) - {
    *("completion", "run", "bundle", "history", "explain", "lab")
}


@functools.cache
def patch() -> None:
    """Have gevent patch the standard library, as pyinfra's own command does.

    Call it before anything opens a socket.
    """
    import logging

    from gevent import monkey

    monkey.patch_all()
    # nodeready itself reports each error that pyinfra and paramiko log.
    for name in ("pyinfra", "paramiko"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        logger.setLevel(logging.CRITICAL + 1)


def interrupt_on_signals() -> None:
    """From here on, a signal interrupts the calling greenlet; a second one ends the process.

    Python runs a signal's handler in the current greenlet, which may be the work on a node, or
    gevent's loop, which would print a traceback. So the handler raises the exception in the
    command's greenlet. Before, while a command is imported and reads its arguments, a signal ends
    the process at once (exit_codes.leave).
    """
    import gevent
    from gevent import hub

    command = gevent.getcurrent()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        handle_signals(leave)
        if gevent.getcurrent() is command:
            raise KeyboardInterrupt
        hub.get_hub().loop.run_callback(command.throw, KeyboardInterrupt())

    handle_signals(interrupt)


def _patched(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The callback of a command that contacts nodes, with `patch` before it; signals interrupt it.

    `resolve_command` does not patch if a word of the command line is ``--help``. That word may be
    the value of another option, and then the command runs.
    """

    @functools.wraps(callback)
    def patched(*args: Any, **kwargs: Any) -> Any:
        patch()
        interrupt_on_signals()
        return callback(*args, **kwargs)

    return patched


def _refuse_unknown_command(ctx: click.Context, word: str) -> None:
    """Raises UsageError, with the most similar command. click knows only imported commands."""
    if word in _COMMANDS or word.startswith("-") or ctx.resilient_parsing:
        return
    import difflib

    close = difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else "nodeready --help lists them"
    raise click.UsageError(f"No such command {word!r}: {hint}", ctx)


class _Commands(click.Group):
    """A group that imports a subcommand when the subcommand is used."""

    #: This process is the `nodeready` command, not another program that has imported this module.
    #: Only then may the standard library be patched.
    is_the_command = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "completion":
            return completion
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"nodeready.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but patch before the import of a command that contacts nodes.

        --help and completion contact no node, and need no patch.
        """
        is_named = args[0] in _CONTACT_NODES
        contacts_nodes = self.is_the_command and is_named and not ctx.resilient_parsing
        if contacts_nodes and not {"-h", "--help"} & {*args[1:]}:
            patch()
        _refuse_unknown_command(ctx, args[0])
        name, command, arguments = super().resolve_command(ctx, args)
        if self.is_the_command and not contacts_nodes:
            handle_signals(signal.default_int_handler)
        if self.is_the_command and command is not None:
            # A late import: the list of commands needs no options.
            from nodeready.cli.options import defaults_of

            ctx.default_map = {str(command.name): defaults_of(command, _COMMANDS)}
        if contacts_nodes and command is not None and command.callback is not None:
            command.callback = _patched(command.callback)
        return name, command, arguments

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click does, but with the help lines of _COMMANDS, so that no command is imported."""
        commands = sorted(item for item in _COMMANDS.items() if item[0].startswith(incomplete))
        names = [CompletionItem(name, help=about) for name, about in commands]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "NODEREADY",
        "show_default": True,
        "max_content_width": _MAX_WIDTH,
    },
)
@click.version_option(nodeready.__version__, prog_name="nodeready")
def cli() -> None:
    """Makes every node of a GPU cluster debuggable before the job starts, and proves it.

    INVENTORY is a pyinfra inventory file, @local, a node set such as gpu[001-064], names
    separated by commas, or a hostfile. Without it: NODEREADY_INVENTORY, or ./inventory.py.

    \b
    Exit status:
      0    all good
      1    the tool or an operation failed
      2    usage, a bad policy, or nothing selected
      3    a check failed, or --check found changes to make
      4    a node could not be reached
      130  interrupted
    """


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash: nodeready completion bash >/etc/bash_completion.d/nodeready
    zsh:  nodeready completion zsh >"${fpath[1]}/_nodeready"
    fish: nodeready completion fish >~/.config/fish/completions/nodeready.fish
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    script = completion_class(cli, {}, "nodeready", "_NODEREADY_COMPLETE")
    # Not script.source(): for bash, it runs bash first, which may not be installed here.
    text = script.source_template % script.source_vars()
    if shell == "bash":
        # Without this, bash takes @ for the beginning of a word: @lab could not be completed.
        text += "COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}\n"
    click.echo(text)


def complain(text: str) -> None:
    """Print each line of the text to standard error as a problem."""
    from nodeready.core.text import sanitise

    for line in text.split("\n"):
        click.echo(f"nodeready: {sanitise(line)}", err=True)


def _help_width() -> int:
    """The width of --help, as click reads it from shutil, whose import takes 3 ms."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if not width:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            width = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore
    return max(min(width or 80, _MAX_WIDTH) - 2, 50)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; ends the process with the documented exit code."""
    # Programs are found in the system's directories, never in the current one. `run` starts the
    # user's program with the original PATH.
    original_path = os.environ.get("PATH")
    os.environ["PATH"] = search_path()
    _Commands.is_the_command = True
    try:
        status = cli.main(
            arguments,
            prog_name="nodeready",
            standalone_mode=False,
            obj=original_path,
            terminal_width=_help_width(),
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
    except (Refused, click.ClickException) as error:
        complain(error.message if isinstance(error, Refused) else error.format_message())
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(exit_code(interrupted=True))
    except BrokenPipeError:
        # The reader of standard output has ended. Without this, Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exit_code(failed=True))
    except OSError as error:
        complain(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
        sys.exit(exit_code(failed=True))
