"""Options that several commands share.

Each option shows its default in --help, where the options stand in groups. Every option has a
variable of its own command, NODEREADY_COMMAND_OPTION, which overrides the general one,
NODEREADY_OPTION. A few options have no general variable: the manual has each option's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from nodeready.core.exit_codes import USAGE
from nodeready.core.text import parse_span, span_words

Callback = TypeVar("Callback", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Refused(click.ClickException):
    """The command cannot run as it was given; exit status 2.

    Unlike after a click.UsageError, no advice to read the command's --help is printed.
    """

    exit_code = USAGE


#: Every value of ``--format`` that some command takes. NODEREADY_FORMAT may have any of them: a
#: command ignores those that it does not take.
FORMS = (
    *("table", "json", "junit", "csv", "prometheus", "nagios"),
    *("html", "evidence", "sh"),
)


#: Group of --help -> its options, by name, in their order. The remaining options of a command
#: stand before the groups.
_GROUPS = {
    "Select": ("limit", "only", "skip", "local", "job", "user", "pids", "match", "since"),
    "Policy": ("ports", "gpus", "nodes_needed", "fail_on", "trust_inventory"),
    "Connection": (
        *("via", "salloc", "topology", "ssh_processes"),
        *("ssh_user", "ssh_key", "sudo", "timeout", "budget"),
    ),
    "Output": (
        *("format", "output", "hostfile_out", "hostfile_format", "exclude_out"),
        *("diff", "color", "quiet", "verbose"),
    ),
}


def options_in_groups(command: click.Command) -> dict[str, list[click.Option]]:
    """Title of the group -> its options. The command's own options come first, as "Options"."""
    options = {
        str(param.name): param for param in command.params if isinstance(param, click.Option)
    }
    groups = {
        title: [options[name] for name in names if name in options]
        for title, names in _GROUPS.items()
    }
    grouped = {name for names in _GROUPS.values() for name in names}
    ungrouped = [option for name, option in options.items() if name not in grouped]
    return {title: params for title, params in {"Options": ungrouped, **groups}.items() if params}


class Command(click.Command):
    """A command whose --help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, and how the variables of the options are called."""
        groups = {"Options": [], **options_in_groups(self)}
        if help_option := self.get_help_option(ctx):
            groups["Options"].append(help_option)
        for title, options in groups.items():
            records = [option.get_help_record(ctx) for option in options]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])
        if any(isinstance(option, Option) for options in groups.values() for option in options):
            prefix = f"NODEREADY_{str(self.name).upper()}_"
            formatter.write_paragraph()
            formatter.write_text(
                f"Variables of the options: {prefix}OPTION, else NODEREADY_OPTION; man nodeready "
                "has them all."
            )


def command(**settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """click.command, as a Command."""
    return click.command(cls=Command, **settings)


class Option(click.Option):
    """An option with environment variables: the command's own, then a general one.

    An option with a value may be given only once: click would silently take the last of several.

    variables: their names, the command's first
    takes:     whether a value of the general variable counts here, or is ignored; None: all count
    joined:    the option may be repeated; its values are joined by commas
    """

    def __init__(
        self,
        *names: Any,
        variables: tuple[str, ...],
        takes: Callable[[str], bool] | None = None,
        joined: bool = False,
        **settings: Any,
    ) -> None:
        self.variables, self.takes, self.joined = variables, takes, joined
        # Where every command takes the same values, the manual names only the general variable.
        shown = variables if takes else variables[-1]
        super().__init__(*names, **{"envvar": shown, "show_envvar": True, **settings})

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The value of the first variable that is set and counts here."""
        command_variable, *general = self.variables
        if value := os.environ.get(command_variable):
            return value
        for name in general:
            value = os.environ.get(name)
            if value and (self.takes is None or self.takes(value)):
                return value
        return None

    def get_help_extra(self, ctx: click.Context) -> Any:
        """What stands in brackets behind the help: the default, without the variables."""
        extra = {
            key: value for key, value in super().get_help_extra(ctx).items() if key != "envvars"
        }
        return {**extra, "range": self.type.range} if isinstance(self.type, Span) else extra

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
        """Raises UsageError when it was given more than once and its values cannot be joined."""
        values = opts.get(self.name or "")
        if self._single and values:
            if len(values) > 1 and not self.joined:
                shown = ", ".join(map(str, values))
                raise click.UsageError(
                    f"{max(self.opts, key=len)} is given {len(values)} times ({shown}): "
                    "give it once",
                    ctx,
                )
            value = ",".join(values) if self.joined else values[0]
            opts = {**opts, str(self.name): value}
        return super().handle_parse_result(ctx, opts, args)


def option(*names: str, general: bool = True, **settings: Any) -> Callable[[Callback], Callback]:
    """click.option, as an Option of the function's command.

    general: also read the general variable NODEREADY_OPTION
    """
    word = max((n.lstrip("-") for n in names if n.startswith("--")), key=len)
    word = word.partition("/")[0].replace("-", "_").upper()

    def decorate(command: Callback) -> Callback:
        command_variable = f"NODEREADY_{command.__name__.upper()}_{word}"
        variables = (command_variable, f"NODEREADY_{word}") if general else (command_variable,)
        return click.option(*names, cls=Option, variables=variables, **settings)(command)

    return decorate


def format_option(
    document: str, help: str = "Output format.", *, general: bool = True
) -> Callable[[Callback], Callback]:
    """``--format``, with the formats of this document in `reports.registry`.

    general: also read NODEREADY_FORMAT, where it has one of these formats
    """
    from nodeready.reports.registry import format_names

    forms = format_names(document)
    return option(
        *("-f", "--format"),
        type=click.Choice(forms),
        default=forms[0],
        help=help,
        general=general,
        # A word that no command knows is a mistake, which click reports.
        takes=lambda value: value in forms or value not in FORMS,
    )


#: Maximum span of time: 100 years.
MAX_SPAN_S = 100 * 366 * 86400


class Span(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no argument
    """A span of time within these seconds, as `text.parse_span` reads it; seconds without a unit.

    is_whole: the value is an int
    """

    name = "span"

    def __init__(self, minimum_s: float, maximum_s: float, *, is_whole: bool = False) -> None:
        self.minimum_s, self.maximum_s, self.is_whole = minimum_s, maximum_s, is_whole
        self.range = f"{span_words(minimum_s)} to {span_words(maximum_s)}"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = parse_span(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self.minimum_s <= seconds <= self.maximum_s:
            self.fail(f"{value} is not in the range {self.range}", param, ctx)
        if not self.is_whole:
            return seconds
        if seconds % 1:
            self.fail(f"{value} is no whole number of seconds", param, ctx)
        return int(seconds)


def span_option(
    *names: str,
    help: str,
    minimum_s: float,
    maximum_s: float,
    is_whole: bool = False,
    **settings: Any,
) -> Callable[[Callback], Callback]:
    """An option that takes a span of time; see `Span`."""
    kind = Span(minimum_s, maximum_s, is_whole=is_whole)
    return option(*names, type=kind, metavar="TIME", help=help, **settings)


def _is_directory(path: str) -> bool:
    return path.endswith("/") or os.path.isdir(path)


class _OutputType(StringParamType):
    """A value of ``-o``. A variable has one: the name of a file may have spaces."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def output_file(
    help: str = "Write the report to FILE, atomically.", **settings: Any
) -> Callable[[Callback], Callback]:
    """``-o FILE``. NODEREADY_OUTPUT counts when it is no directory."""
    return option(
        *("-o", "--output"),
        metavar="FILE",
        help=help,
        takes=lambda path: not _is_directory(path),
        **settings,
    )


def output_directory(help: str, *, general: bool = True) -> Callable[[Callback], Callback]:
    """``-o DIR``. NODEREADY_OUTPUT counts when it is a directory, or ends with a slash."""
    return option(
        *("-o", "--output"), metavar="DIR", help=help, general=general, takes=_is_directory
    )


def _combined(*decorators: Decorator) -> Decorator:
    """One decorator for the options of all of these, in this order in --help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def report_options(document: str, *, general: bool = True) -> Decorator:
    """``--format`` and ``-o``, for `outputs.read_outputs`; see `format_option`."""
    return _combined(
        format_option(document, general=general),
        output_file(
            "Write the report to FILE, in the format of its ending. FORMAT:FILE: besides the "
            "screen; may be repeated.",
            multiple=True,
            type=_OutputType(),
        ),
    )


def hostfile_options(nodes: str) -> Decorator:
    """``--hostfile-out FILE`` and ``--hostfile-format``, for `screen.write_hostfile`.

    nodes: the word for the nodes that are written
    """
    from nodeready.fleet.inventory.launcher_files import FORMS as forms

    return _combined(
        option("--hostfile-out", metavar="FILE", help=f"Write the {nodes} nodes to FILE."),
        option(
            "--hostfile-format",
            type=click.Choice(list(forms)),
            default="hostfile",
            help="; ".join(f"{name}, for {reader}" for name, reader in forms.items()) + ".",
        ),
    )


def since_option(noun: str) -> Callable[[Callback], Callback]:
    """``--since WHEN``, for `values.past`. noun: what the option selects"""
    return option(
        "--since",
        metavar="WHEN",
        help=f"Only {noun} since then: 2h, 3d, 08:30, 2026-03-01, 2026-03-01 08:30.",
    )


rank_pattern_option = option(
    "--rank-pattern",
    metavar="REGEX",
    help="Its group is the rank of a line, if the lines of many ranks are in one file. [learned]",
)


def timeout_option(
    help: str = "Maximum time per node, after it is connected.",
) -> Callable[[Callback], Callback]:
    """``--timeout TIME``, one minute by default."""
    return span_option(
        "--timeout", minimum_s=1, maximum_s=3600, is_whole=True, default="60s", help=help
    )


def candidates_of(kind: str) -> Callable[..., Any]:
    """The completion by this function of `candidates`."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        from nodeready.cli import candidates

        return getattr(candidates, kind)(ctx, incomplete)

    return complete


#: INVENTORY; without it, `default_inventory` finds one.
inventory_argument = click.argument(
    "inventory", required=False, shell_complete=candidates_of("inventories")
)


def limit_option(help: str) -> Callable[[Callback], Callback]:
    """``--limit NODES``."""
    return option(
        *("-l", "--limit"),
        metavar="NODES",
        joined=True,
        help=help,
        shell_complete=candidates_of("nodes"),
    )


def only_option(help: str, metavar: str = "CHECK,...") -> Callable[[Callback], Callback]:
    """``--only``: the checks or subjects of a command."""
    return option(
        "--only", metavar=metavar, joined=True, help=help, shell_complete=candidates_of("checks")
    )


skip_option = option(
    "--skip",
    metavar="CHECK,...",
    joined=True,
    help="Checks or subjects to skip.",
    shell_complete=candidates_of("checks"),
)
local_option = option("--local", is_flag=True, help="This machine, without any connection.")
#: ``--job`` of a command that is not about a job.
srun_job_option = option("--job", metavar="ID", help="With --via srun: run inside this job.")
trust_option = option(
    "--trust-inventory",
    is_flag=True,
    help="Run inventories and group_data that other users can write.",
)
color_option = option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours on the terminal.",
)
#: What a command shows: the options of `Screen`.
screen_options = _combined(
    color_option,
    click.option("-q", "--quiet", is_flag=True, help="Print nothing on success."),
    click.option(
        *("-v", "--verbose"),
        count=True,
        show_default=False,
        help="More detail; progress also without a terminal.",
    ),
)
#: The options of every command that contacts nodes.
shared_options = _combined(
    limit_option("Only these nodes: gpu[001-004], a group, a glob, @last-failed."),
    option("--sudo", is_flag=True, help="Become root with sudo on the nodes."),
    trust_option,
    option("-u", "--ssh-user", metavar="NAME", help="Log in as this user."),
    option(
        "--ssh-key",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="Log in with this key.",
    ),
    screen_options,
)
#: The options of a command that only reads from nodes: the transport, and `shared_options`.
transport_options = _combined(
    option(
        "--via",
        type=click.Choice(["ssh", "srun", "clush", "auto"]),
        default="ssh",
        help="Transport: ssh; srun (Slurm steps); clush (ClusterShell); auto.",
    ),
    option(
        "--salloc",
        metavar="'WORDS'",
        help="With --via srun: further options for salloc: '--reservation=maint -A ops'.",
    ),
    option(
        "--topology",
        metavar="FILE",
        help="With --via clush: path of topology.conf, if not the default.",
    ),
    option(
        "--ssh-processes",
        type=click.IntRange(1, 64),
        metavar="N",
        help="With --via ssh: number of processes that share the connections.",
    ),
    shared_options,
)


def shared_option_names() -> tuple[str, ...]:
    """The names of the options of `shared_options`."""

    @shared_options
    def command() -> None: ...

    params: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]
    return tuple(str(param.name) for param in reversed(params))
