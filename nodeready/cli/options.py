"""Options that several commands share, the values that a person writes, and defaults from files.

Each option shows its default and its variables in --help. Every option has a variable of its
command's, NODEREADY_COMMAND_OPTION, and most have a general one, NODEREADY_OPTION. The command's
beats the general one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from nodeready.exit_codes import USAGE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Command = TypeVar("Command", bound=Callable[..., Any])


class Refused(click.ClickException):
    """An inventory, policy or file of the user's that cannot be used: its words, and exit 2.

    Unlike click.UsageError, no advice to read the command's --help follows.
    """

    exit_code = USAGE


#: Every value of ``--format`` that some command takes. A general variable with such a word is no
#: mistake where another command is run.
FORMS = ("table", "json", "junit", "prometheus", "nagios", "html", "speedscope", "sh")


class Option(click.Option):
    """An option with two variables: the command's own, and a general one behind it. One with a
    value is given once: click would take the last of several and drop the others in silence.

    variables: their names, the command's first
    takes:     which values of the general variable count here; None: all. One that does not count
               is as if it were not set
    """

    def __init__(
        self,
        *names: Any,
        variables: tuple[str, ...],
        takes: Callable[[str], bool] | None = None,
        **settings: Any,
    ) -> None:
        self.variables, self.takes = variables, takes
        # In --help the general one is enough where every command takes the same values.
        shown = variables if takes else variables[-1]
        super().__init__(*names, **{"envvar": shown, "show_envvar": True, **settings})

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The value of the first variable that is set and counts here."""
        own, *general = self.variables
        if value := os.environ.get(own):
            return value
        for name in general:
            value = os.environ.get(name)
            if value and (self.takes is None or self.takes(value)):
                return value
        return None

    @property
    def _single(self) -> bool:
        return not (self.is_flag or self.multiple or self.count)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the parser keep every value that is given."""
        if self._single:
            parser.add_option(self, self.opts, self.name, action="append")
        else:
            super().add_to_parser(parser, ctx)

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Raises UsageError when it was given more than once."""
        values = opts.get(self.name or "")
        if self._single and values:
            if len(values) > 1:
                shown = ", ".join(map(str, values))
                several = self.metavar is not None and self.metavar.endswith((",...", "NODES"))
                how = ", with commas between the values" if several else ""
                raise click.UsageError(
                    f"{max(self.opts, key=len)} is given {len(values)} times ({shown}): "
                    f"give it once{how}",
                    ctx,
                )
            opts = {**opts, str(self.name): values[0]}
        return super().handle_parse_result(ctx, opts, args)


def option(*names: str, general: bool = True, **settings: Any) -> Callable[[Command], Command]:
    """click.option, as an Option of the function's command.

    general: whether it has a general variable beside the command's own
    """
    word = max((n.lstrip("-") for n in names if n.startswith("--")), key=len)
    word = word.partition("/")[0].replace("-", "_").upper()

    def decorate(command: Command) -> Command:
        own = f"NODEREADY_{command.__name__.upper()}_{word}"
        variables = (own, f"NODEREADY_{word}") if general else (own,)
        return click.option(*names, cls=Option, variables=variables, **settings)(command)

    return decorate


def format_option(
    *forms: str,
    help: str = "A table for people, or a form for machines.",
    general: bool = True,
) -> Callable[[Command], Command]:
    """``--format``, the first of ``forms`` by default.

    general: whether NODEREADY_FORMAT counts, as far as it is one of ``forms``
    """

    def takes(value: str) -> bool:
        # What no command knows is a mistake, and click says so.
        return value in forms or value not in FORMS

    return option(
        "--format",
        type=click.Choice(forms),
        default=forms[0],
        help=help,
        general=general,
        takes=takes,
    )


def _is_directory(path: str) -> bool:
    return path.endswith("/") or os.path.isdir(path)


def output_file(
    help: str = "Write the report to FILE, whole or not at all.", **settings: Any
) -> Callable[[Command], Command]:
    """``-o FILE``. NODEREADY_OUTPUT counts when it is no directory."""
    return option(
        *("-o", "--output"),
        metavar="FILE",
        help=help,
        takes=lambda path: not _is_directory(path),
        **settings,
    )


def output_directory(help: str, *, general: bool = True) -> Callable[[Command], Command]:
    """``-o DIR``. NODEREADY_OUTPUT counts when it is a directory, or ends with a slash."""
    return option(
        *("-o", "--output"), metavar="DIR", help=help, general=general, takes=_is_directory
    )


def report(
    *forms: str, help: str = "A table for people, or a form for machines.", general: bool = True
) -> Callable[[Command], Command]:
    """The options of a command that makes a report: ``--format``, and ``-o FILE``.

    general: whether NODEREADY_FORMAT counts
    """
    form, output = format_option(*forms, help=help, general=general), output_file()
    return lambda command: form(output(command))


def hostfile_options(what: str) -> Callable[[Command], Command]:
    """``--hostfile-out FILE`` and ``--hostfile-format``, for `screen.write_hostfile`.

    what: the nodes that are written
    """
    from nodeready.inventory.launcher_files import FORMS as forms

    out = option("--hostfile-out", metavar="FILE", help=f"Write the {what} nodes to FILE.")
    form = option(
        "--hostfile-format",
        type=click.Choice(list(forms)),
        default="hostfile",
        help="; ".join(f"{name}, for {who}" for name, who in forms.items()) + ".",
    )
    return lambda command: out(form(command))


def since_option(what: str) -> Callable[[Command], Command]:
    """``--since WHEN``, which ``past`` reads.

    what: what is newer than that
    """
    return option(
        "--since",
        metavar="WHEN",
        help=f"Only {what} since then: 2h, 3d, 08:30, 2026-03-01, 2026-03-01 08:30.",
    )


def policy_settings(ports: str | None, user: str | None) -> dict[str, Any]:
    """The settings of the policy that ``--ports`` and ``--user`` give. Raises Refused."""
    given: dict[str, Any] = {}
    if ports is not None:
        given["port_range"] = read_ports(ports)
    if user is not None:
        from nodeready.policy.fields import USER_NAME

        if not re.fullmatch(USER_NAME, user):
            raise Refused(f"--user {user}: is no user name")
        given["job_user"] = user
    return given


def trust_option(command: Command) -> Command:
    """``--trust-inventory``."""
    return option(
        "--trust-inventory",
        is_flag=True,
        help="As root, run inventories and group_data that others can write.",
    )(command)


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
            trust_option,
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


#: Ways to the nodes of an INVENTORY, or of a job.
WAYS = ("ssh", "srun", "clush", "auto")


def asking(command: Command) -> Command:
    """The options of every command that asks nodes and changes none: `common`, and the ways."""
    for decorate in reversed(
        (
            option(
                "--via",
                type=click.Choice(WAYS),
                default="ssh",
                help="The way to the nodes: ssh; srun, Slurm's steps; clush, ClusterShell; auto.",
            ),
            option(
                "--salloc",
                metavar="'WORDS'",
                help="With --via srun: more options for salloc: '--reservation=maint -A ops'.",
            ),
            option(
                "--topology",
                metavar="FILE",
                help="With --via clush: its topology.conf, where it is not in its place.",
            ),
            option(
                "--ssh-processes",
                type=click.IntRange(1, 64),
                metavar="N",
                help="With --via ssh: share the nodes between so many processes.",
            ),
            common,
        )
    ):
        command = decorate(command)
    return command


def steps_option(command: Command) -> Command:
    """``--job`` of a command that is not about a job."""
    return option("--job", metavar="ID", help="With --via srun: in this running job.")(command)


# --- What a person writes for a span of time, a moment, or ports, and its value.

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Longer ago than this nothing was written that anybody looks for.
_MOST_S = 100 * 366 * 86400


def span(words: str) -> int:
    """``90``, ``90s``, ``10m``, ``2h``, ``3d``, ``1w``; in seconds.

    Raises ValueError with what it should be.
    """
    match = re.fullmatch(r"([0-9]{1,12})([smhdw]?)", words.strip())
    found = int(match[1]) * _UNITS[match[2] or "s"] if match else 0
    if not 0 < found <= _MOST_S:
        raise ValueError("must be a span of time, such as 90s, 10m, 2h, 3d or 1w")
    return found


def seconds_ago(words: str, now: datetime) -> float:
    """How many seconds before now a moment was: a span such as ``2h``, ``08:30`` of today,
    ``2026-03-01``, ``2026-03-01 08:30``, ``2026-03-01T08:30:00Z``; without a zone, of this
    machine's.

    now: with its zone. Raises ValueError with what it should be.
    """
    text = words.strip()
    try:
        if re.fullmatch(r"[0-9]+[smhdw]", text):
            return span(text)
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            text = f"{now.date().isoformat()} {text:0>5}"
        # Before Python 3.11, fromisoformat does not know the Z.
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        found = (moment if moment.tzinfo else moment.astimezone()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            "must be a moment or a span, such as 08:30, 2026-03-01 08:30 or 2h"
        ) from None
    if found >= now.timestamp():
        raise ValueError("is not in the past")
    return now.timestamp() - found


def epoch_seconds(words: str, now: datetime) -> float:
    """The same moment in seconds since 1970. Raises ValueError with what it should be."""
    return now.timestamp() - seconds_ago(words, now)


def past(since: str | None, read: Callable[[str, datetime], float]) -> float:
    """``--since`` as `seconds_ago` or `epoch_seconds` reads it; 0 for None. Raises Refused."""
    try:
        return read(since, datetime.now().astimezone()) if since is not None else 0
    except ValueError as error:
        raise Refused(f"--since {since}: {error}") from None


def read_ports(words: str) -> tuple[int, int]:
    """``--ports FIRST-LAST``. Raises Refused."""
    # The policy takes a fifth of the time of --help, which has no use for it.
    from nodeready.policy.fields import port_range

    try:
        return port_range(words)
    except ValueError as error:
        raise Refused(f"--ports {words}: {error}") from None


# --- Defaults from files: the user's file wins over the system's, a flag or variable over both.

SYSTEM = Path("/etc/nodeready/config.toml")

_COMMON = ("limit", "sudo", "trust_inventory", "ssh_user", "ssh_key", "color", "quiet", "verbose")
_ASKING = (*_COMMON, "via", "salloc", "topology", "ssh_processes")
#: command -> the options that a file may set
OPTIONS: dict[str, tuple[str, ...]] = {
    "audit": (
        *_ASKING,
        *("job", "format", "output", "only", "skip", "fail_on", "timeout", "recorded"),
        "token_file",
    ),
    "ready": (
        *_ASKING,
        *("local", "job", "format", "output", "only", "skip", "budget", "user", "ports", "gpus"),
        *("nodes_needed", "hostfile_out", "hostfile_format", "full_mesh"),
    ),
    "smoke": (
        *_ASKING,
        *("job", "format", "output", "budget", "user", "ports", "gpus", "ranks", "engine"),
        *("python", "prefix", "env", "busy", "full"),
        *("exclude_out", "hostfile_out", "hostfile_format"),
    ),
    "stacks": (
        *_ASKING,
        *("local", "source", "job", "user", "pids", "match", "native", "all_threads"),
        *("locals", "dump", "ras", "check"),
        "samples",
        *("interval", "timeout", "output", "format"),
    ),
    "cores": (*_ASKING, "local", "format", "output", "since", "job", "pid", "yes"),
    "incident": (*_ASKING, "local", "job", "user", "timeout", "output", "format"),
    "watch": (
        *_ASKING,
        *("local", "job", "user", "timeout", "output", "every", "confirm", "then", "once"),
    ),
    "bundle": ("limit", "trust_inventory", "output"),
    "env": (*_ASKING, "job", "format", "output", "ports", "debug", "python", "directory"),
    "tail": (
        *_ASKING,
        *("local", "job", "format", "output", "lines", "grep", "newer", "since", "max_files"),
    ),
    "learn": (*_ASKING, "job", "output", "force"),
    "deploy": (*_COMMON, "format", "only", "check", "diff", "yes"),
}
#: Options that may be given several times: in a file, a list, whose words may have commas.
_SEVERAL = ("pids", "env")


def user_file() -> Path:
    """``$XDG_CONFIG_HOME/nodeready/config.toml``, or under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "nodeready" / "config.toml"


def defaults() -> dict[str, dict[str, Any]]:
    """click's default map: per command the option values of both files.

    Top-level keys are options of all commands (``limit = "gpu[001-064]"``), a table is one
    command's (``[deploy]``). Raises Refused for a file that cannot be used.
    """
    _refuse_strange_directories()
    found: dict[str, dict[str, Any]] = {name: {} for name in OPTIONS}
    for path in (SYSTEM, user_file()):
        data = _read(path)
        tables = {key: value for key, value in data.items() if isinstance(value, dict)}
        for key, value in data.items():
            if key not in tables:
                name = _name(path, key, _COMMON)
                for options in found.values():
                    options[name] = _value(name, value)
        for command, table in tables.items():
            if command not in OPTIONS:
                raise Refused(f"{path}: [{command}] is no command of nodeready")
            for key, value in table.items():
                name = _name(path, key, OPTIONS[command])
                found[command][name] = _value(name, value)
    return found


def _refuse_stranger(place: str | Path, whose: str = "") -> None:
    """Raises Refused, ``whose`` in front of it, for what others than root could have written."""
    from nodeready.inventory import trust

    why = trust.distrust(place, remedy=trust.SET_VARIABLE)
    if why:
        raise Refused(f"{whose}{why}")


def _refuse_strange_directories() -> None:
    """Raises Refused where root's variables lead into a directory that others can change.

    What was kept there is read again: a py-spy for the nodes, the nodes that failed.
    """
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        if place := os.environ.get(name):
            _refuse_stranger(place, f"{name}: ")


def _read(path: Path) -> dict[str, Any]:
    _refuse_stranger(path)
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return data
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{path}: {error}") from None


def _name(path: Path, key: str, known: tuple[str, ...]) -> str:
    name = key.replace("-", "_")
    if name not in known:
        from nodeready.policy.fields import closest_word

        close = closest_word(name, known)
        advice = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
        raise Refused(f"{path}: unknown option {key}: {advice}")
    return name


def _value(name: str, value: Any) -> Any:
    """A list stands for the comma-separated words of the command line."""
    if name in _SEVERAL:
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    return ",".join(map(str, value)) if isinstance(value, list) else value
