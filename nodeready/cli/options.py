"""The options of `runs.options` as click's, and the options of what a command shows.

Each option shows its default in --help, which lists the options in groups. Every option has a
variable per command, NODEREADY_COMMAND_OPTION, which overrides the general one, NODEREADY_OPTION.
A few options have no general variable: the manual has each option's.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from click.types import StringParamType

from nodeready.core.exit_codes import Refused
from nodeready.core.text import parse_span, span_words
from nodeready.runs import user_files
from nodeready.runs.options import ConnectionOptions, Opt, is_directory, opt, options_of

if TYPE_CHECKING:
    from nodeready.cli.screen import Outputs, Screen


#: Every value of ``--format``. A command ignores in NODEREADY_FORMAT those that it does not take.
FORMS = (*("table", "json", "junit", "csv", "prometheus", "nagios"), *("html", "evidence", "sh"))

#: Group of --help -> its options, by name, in order. All other options stand before the groups.
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
    options = {str(p.name): p for p in command.params if isinstance(p, click.Option)}
    titled = _GROUPS.items()
    groups = {title: [options[n] for n in names if n in options] for title, names in titled}
    grouped = {name for names in _GROUPS.values() for name in names}
    ungrouped = [option for name, option in options.items() if name not in grouped]
    return {title: params for title, params in {"Options": ungrouped, **groups}.items() if params}


class Command(click.Command):
    """A command whose --help has its options in groups. kind: the class of its options"""

    kind: type[Any]

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
            words = f"{prefix}OPTION, else NODEREADY_OPTION; man nodeready has them all."
            formatter.write_text(f"Variables of the options: {words}")


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
        items = super().get_help_extra(ctx).items()
        extra = {key: value for key, value in items if key != "envvars"}
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
                text = f"{max(self.opts, key=len)} is given {len(values)} times ({shown})"
                raise click.UsageError(f"{text}: give it once", ctx)
            value = ",".join(values) if self.joined else values[0]
            opts = {**opts, str(self.name): value}
        return super().handle_parse_result(ctx, opts, args)


class Span(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no argument
    """A span of time in these bounds, as `text.parse_span` reads it. is_whole: an int"""

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


class _OutputType(StringParamType):
    """A value of ``-o``. A variable has one: the name of a file may have spaces."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def candidates_of(kind: str) -> Callable[..., Any]:
    """The completion by this function of `candidates`."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        from nodeready.cli import candidates

        return getattr(candidates, kind)(ctx, incomplete)

    return complete


# --- Options from the fields of a class.


def _type_of(opt: Opt) -> click.ParamType | None:  # type: ignore[type-arg]
    """click's type; None: click's own choice, a text or a number."""
    if opt.choices:
        return click.Choice(opt.choices)
    if opt.bounds:
        return click.IntRange(*opt.bounds)
    if opt.span_s:
        return Span(*opt.span_s, is_whole=opt.is_whole)
    if opt.is_file:
        return click.Path(exists=True, dir_okay=False)
    return _OutputType() if opt.key == "output" and opt.multiple else None


def click_option(command: str, opt: Opt) -> click.Option:
    """The option as click has it, for the command of this name."""
    same = ("help", "default", "metavar", "multiple", "required", "hidden", "show_default")
    settings: dict[str, Any] = {name: getattr(opt, name) for name in same}
    if opt.required:
        del settings["default"]  # any default, None too, would do as its value
    settings |= {"type": _type_of(opt), "is_flag": opt.default is False, "count": opt.is_count}
    if opt.complete:
        settings["shell_complete"] = candidates_of(opt.complete)
    names = [*opt.names, opt.key]
    if not opt.variable:
        return click.Option(names, **settings)
    word = max((name for name in opt.names if name.startswith("--")), key=len)
    variable = word.lstrip("-").replace("-", "_").upper()
    variables = f"NODEREADY_{command.upper()}_{variable}", f"NODEREADY_{variable}"
    settings |= {"takes": opt.takes, "joined": opt.joined}
    return Option(names, variables=variables if opt.general else variables[:1], **settings)


def values_of(kind: type[Any], params: dict[str, Any], context: click.Context) -> Any:
    """The options of this class, from click's values, which are removed. Raises Refused."""
    values = {}
    for field, option in options_of(kind).items():
        value = params.pop(option.key)
        # Without a word, the field has its own default.
        if context.get_parameter_source(option.key) != ParameterSource.DEFAULT:
            values[field] = value if option.read is None or value is None else option.read(value)
    return kind(**values)


def command(kind: type[Any], **settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """A `Command` with the options of this class; its function gets them as its last argument."""

    def decorate(function: Callable[..., Any]) -> Command:
        @functools.wraps(function)
        def callback(**params: Any) -> Any:
            options = values_of(kind, params, click.get_current_context())
            return function(*params.values(), options)

        name = function.__name__
        arguments = list(reversed(getattr(function, "__click_params__", ())))
        options = [click_option(name, opt) for opt in options_of(kind).values()]
        parameters, help = [*arguments, *options], inspect.getdoc(function)
        command = Command(name, callback=callback, params=parameters, help=help, **settings)
        command.kind = kind
        return command

    return decorate


#: INVENTORY; without it, `defaults` finds one.
inventory_argument = click.argument(
    "inventory", required=False, shell_complete=candidates_of("inventories")
)

# --- Options of what a command shows.


def format_option(document: str, help: str = "Output format.", *, general: bool = True) -> Any:
    """``--format`` of this document. general: also of NODEREADY_FORMAT, if it has the format"""
    from nodeready.reports.registry import format_names

    forms = tuple(format_names(document))

    def takes(value: str) -> bool:
        return value in forms or value not in FORMS

    return opt("-f, --format", help, choices=forms, default=forms[0], general=general, takes=takes)


def output_file(help: str, **how: Any) -> Any:
    """``-o FILE``. NODEREADY_OUTPUT counts when it is no directory."""
    return opt("-o, --output FILE", help, takes=lambda path: not is_directory(path), **how)


def report_files() -> Any:
    """``-o`` of a command with `format_option`, for `outputs.read_outputs`."""
    return output_file(
        "Write the report to FILE, in the format of its ending. FORMAT:FILE: besides the "
        "screen; may be repeated.",
        multiple=True,
    )


def hostfile_out(nodes: str) -> Any:
    """``--hostfile-out FILE``, for `screen.write_hostfile`. nodes: the word for those written"""
    return opt("--hostfile-out FILE", f"Write the {nodes} nodes to FILE.")


def hostfile_format() -> Any:
    from nodeready.fleet.inventory.hostfile import FORMS as forms

    readers = "; ".join(f"{name}, for {reader}" for name, reader in forms.items())
    return opt("--hostfile-format", f"{readers}.", choices=tuple(forms), default="hostfile")


def color_option() -> Any:
    choices = "auto", "always", "never"
    return opt("--color", "Colours on the terminal.", choices=choices, default="auto")


def verbose_option(help: str) -> Any:
    return opt("-v, --verbose", help, is_count=True, default=0, show_default=False, variable=False)


@dataclass(kw_only=True)
class ScreenOptions:
    color: str = color_option()
    quiet: bool = opt("-q, --quiet", "Print nothing on success.", default=False, variable=False)
    verbose: int = verbose_option("More detail; progress also without a terminal.")

    def screen(self) -> Screen:
        from nodeready.cli.screen import Screen

        return Screen(self.color, self.quiet, self.verbose)


@dataclass(kw_only=True)
class ReportOptions(ScreenOptions):
    """The options of a command with a field ``format``, whose report goes also to files."""

    output: tuple[str, ...] = report_files()

    def outputs(self, kind: str) -> Outputs:
        """Where the report of this kind goes. Raises Refused."""
        from nodeready.cli.screen import read_outputs

        return read_outputs(kind, self)


# --- The defaults of a command line: options from files, and the inventory.

#: In the order of precedence: the variable, the key of config.toml, the file.
VARIABLE = "NODEREADY_INVENTORY"
KEY = "default_inventory"
FILE = "inventory.py"
_HERE = "of this directory"


class NodeOptions(Protocol):
    """What is read here of the options of a command that contacts nodes."""

    @property
    def trust_inventory(self) -> bool: ...
    @property
    def quiet(self) -> bool: ...


def find_inventory(
    inventory: str | None, options: NodeOptions, *, elsewhere: bool = False
) -> str | None:
    """INVENTORY, else the default inventory, whose name is then printed; None: neither is set.

    elsewhere: other words already name the nodes (``--local``, ``--from``)
    Raises Refused for an inventory.py that another user could have written.
    """
    if inventory is not None or elsewhere:
        return inventory
    default = default_inventory(click.get_current_context())
    if default is None:
        return None
    text, source = default
    if source == _HERE:
        user_files.refuse_strangers(FILE, trusted=options.trust_inventory)
    if not options.quiet:
        click.echo(f"nodeready: inventory: {text} ({source})", err=True)
    return text


def default_inventory(context: click.Context) -> tuple[str, str] | None:
    """The default inventory and its source; None: not set."""
    named = {VARIABLE: os.environ.get(VARIABLE), "config.toml": context.lookup_default(KEY)}
    for source, text in named.items():
        if text:
            return str(text), source
    return (FILE, _HERE) if os.path.lexists(FILE) else None


def require_inventory(inventory: str | None, options: NodeOptions) -> str:
    """As `find_inventory`. Raises UsageError if neither inventory is set."""
    word = find_inventory(inventory, options)
    if word is None:
        context = click.get_current_context()
        raise click.UsageError(f"Missing INVENTORY: name it, or set {VARIABLE}.", context)
    return word


# --- Options.


def defaults_of(command: click.Command, commands: Iterable[str]) -> dict[str, Any]:
    """The command's defaults from both files, for click's default map.

    A top-level key is an option that all commands share (``limit = "gpu[001-064]"``), or
    ``inventory``. A table has the options of one command (``[deploy]``).

    commands: names of all commands
    Raises Refused for a file that cannot be used, and for root if a variable names a directory
    that another user can change: the py-spy for the nodes, and the list of failed nodes are there.
    """
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        if directory := os.environ.get(variable):
            user_files.refuse_unsafe(directory, f"{variable}: ")
    options = {param.name: param for param in command.params if isinstance(param, click.Option)}
    options["inventory"] = click.Option(["--inventory"], callback=_checked_inventory)
    kinds = ConnectionOptions, ScreenOptions
    shared = ("inventory", *(option.key for kind in kinds for option in options_of(kind).values()))
    context = click.Context(command)
    defaults: dict[str, Any] = {}
    for path in user_files.paths():
        data = user_files.read(path)
        for key, value in data.items():
            if not isinstance(value, dict):
                name = user_files.option_name(path, key, shared)
                if name in options:
                    defaults[name] = _option_value(path, key, options[name], value, context)
            elif key not in (*commands, user_files.MEMORY):
                raise Refused(f"{path}: [{key}] is no command of nodeready")
        for key, value in data.get(str(command.name), {}).items():
            name = user_files.option_name(path, key, options)
            shown = f"[{command.name}] {key}"
            defaults[name] = _option_value(path, shown, options[name], value, context)
    if "inventory" in defaults:
        # Not the name of the argument: click would take it for a word of the command line.
        defaults[KEY] = defaults.pop("inventory")
    return defaults


def _option_value(
    path: Path, key: str, option: click.Option, value: Any, context: click.Context
) -> Any:
    """The value as click takes it. Raises Refused, with the file and the key, for a wrong one.

    A list gives an option that may be repeated its values, and another option its words, which are
    then separated by commas.
    """
    if option.multiple:
        value = tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    elif isinstance(value, list):
        value = ",".join(map(str, value))
    try:
        return option.process_value(context, value)
    except click.BadParameter as error:
        raise Refused(f"{path}: {key}: {error.message}") from None


def _checked_inventory(context: click.Context, option: click.Parameter, value: str) -> str:
    """Refuse a relative path: its file would depend on the current directory."""
    if value.startswith(("/", "~", "@")) or not ("/" in value or value.endswith(".py")):
        return os.path.expanduser(value)
    raise click.BadParameter(f"{value}: write the whole path")
