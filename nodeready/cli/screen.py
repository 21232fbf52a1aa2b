"""A command's output: results to standard output or a file, all else to standard error.

rich is imported only when a line is shown, so that --help and completion are quick.
"""

from __future__ import annotations

import getpass
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from click.core import ParameterSource

from nodeready.cli.options import FORMS
from nodeready.core.exit_codes import Refused
from nodeready.core.files import NotFollowed, check, write_atomically
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import hostfile
from nodeready.fleet.inventory.nodeset import fold
from nodeready.reports import registry
from nodeready.reports.lines import StyledLine
from nodeready.reports.registry import FORMATS, PLAIN, SCREEN, Options, find_format
from nodeready.runs.tell import Tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


#: Seconds between two plain progress lines where there is no terminal (with -v).
PLAIN_EVERY_S = 5.0
REDRAWN_HZ = 5  # redraws of the progress line on a terminal per second
_MIN_NODES_FOR_RATE, _MIN_S_FOR_RATE = 64, 2.0  # minimum nodes and seconds before a rate is shown
_STALL_S = 10.0  # minimum seconds without a finished node before this time is shown
#: Nodes that are worked on at once: when fewer are pending, all of them have begun.
_PARALLEL_NODES = 256
UNLIMITED = 100_000  # columns of a result in a pipe, where no line wraps


def _console(stream: TextIO, color: str) -> Console:
    from rich.console import Console

    class PatientConsole(Console):
        """After its reader has ended (`| head -1`), prints nothing; the command continues."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            with open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), self.file.fileno())

    terminal = stream.isatty()
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    is_forced = os.environ.get("CLICOLOR_FORCE", "0") != "0"
    forced = color == "always" or (color == "auto" and is_forced and not plain)
    colored = forced or (color == "auto" and terminal and not plain)
    return PatientConsole(
        file=stream,
        force_terminal=terminal,
        color_system="standard" if colored else None,
        no_color=not colored,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if terminal else UNLIMITED,
        legacy_windows=False,
    )


def _text(line: StyledLine) -> Text:
    """A report's line with its styles. Brackets in its text are not rich's markup."""
    from rich.text import Text

    return Text.assemble(*line.parts)


class Screen(Tell):
    """The two output streams of one command.

    color:   auto, always or never
    quiet:   only problems
    verbose: plain progress lines without a terminal, if not 0
    """

    def __init__(self, color: str = "auto", quiet: bool = False, verbose: int = 0) -> None:
        self.out = _console(sys.stdout, color)
        self.err = _console(sys.stderr, color)
        self.quiet, self.verbose = quiet, verbose

    @property
    def width(self) -> int:
        """Columns for a result: the terminal's, at least 80; no limit in a pipe."""
        return max(80, self.out.width) if sys.stdout.isatty() else UNLIMITED

    @property
    def lines(self) -> int:
        """Lines for a result: the terminal's, at least 40; 0, which is no limit, in a pipe."""
        return max(SCREEN, self.out.height - 2) if sys.stdout.isatty() else 0

    def show(self, lines: Iterable[StyledLine]) -> None:
        """Print lines to standard output. On a terminal, long lines are wrapped and indented."""
        from rich.text import Text

        for line in map(_text, lines):
            plain = line.plain
            if not sys.stdout.isatty() or line.cell_len <= self.width:
                self.out.print(line, soft_wrap=True)
                continue
            indent = len(plain) - len(plain.lstrip()) + 4
            first, *parts = line.wrap(self.out, self.width - indent)
            self.out.print(first, soft_wrap=True)
            for part in parts:
                self.out.print(Text(" " * indent) + part, soft_wrap=True)

    def show_on_stderr(self, lines: Iterable[StyledLine]) -> None:
        for line in lines:
            self.err.print(_text(line), soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.err.print(Text(f"nodeready: {sanitise(text)}", style=style), soft_wrap=True)

    def without_progress(self) -> Screen:
        """A screen for lines about problems alone."""
        return Screen("never", quiet=True)

    def ask_password(self, prompt: str) -> str | None:
        """The password that the user types; None without a terminal."""
        return getpass.getpass(prompt) if sys.stdin.isatty() else None

    @contextmanager
    def progress(self, activity: str, names: Iterable[str]) -> Iterator[NodeProgress]:
        """Count nodes while they finish, and name the pending ones: on a line that is redrawn, or
        on a plain line every few seconds.
        """
        progress = NodeProgress(activity, set(names))

        def print_lines() -> None:
            while not progress.over.wait(PLAIN_EVERY_S):
                self.say(progress.sentence())

        can_redraw = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        if self.quiet or not progress.pending or not (can_redraw or self.verbose):
            yield progress
        elif not can_redraw:
            printer = threading.Thread(target=print_lines, daemon=True)
            printer.start()
            try:
                yield progress
            finally:
                progress.over.set()
                printer.join()
        else:
            from rich.live import Live
            from rich.text import Text

            def progress_line() -> Text:
                return Text(progress.line(self.err.width - 1), no_wrap=True, overflow="crop")

            with Live(
                get_renderable=progress_line,
                console=self.err,
                transient=True,
                refresh_per_second=REDRAWN_HZ,
            ):
                yield progress


class NodeProgress:
    """The pending nodes of one activity. clock: seconds, as `time.monotonic`"""

    def __init__(
        self, activity: str, pending: set[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.activity, self.pending, self.total = activity, pending, len(pending)
        self.failed = 0
        self.clock = clock
        self.started_s = self.last_done_s = clock()
        self.over = threading.Event()

    def __call__(self, name: str, failed: bool = False) -> None:
        """Record that the node is done. failed: it gave no answer"""
        if name in self.pending:
            self.pending.discard(name)
            self.failed += failed
            self.last_done_s = self.clock()

    @property
    def done(self) -> int:
        return self.total - len(self.pending)

    @property
    def all_have_begun(self) -> bool:
        """Whether all pending nodes have begun, so that they are the slow ones."""
        return 0 < len(self.pending) <= max(8, min(_PARALLEL_NODES, self.total // 10))

    def slow_nodes(self, width: int) -> str:
        """The slow nodes, and the time since a node finished; "" until all nodes have begun."""
        if not self.all_have_begun:
            return ""
        names = sorted(self.pending)
        stalled_s = self.clock() - self.last_done_s
        since = f", {stalled_s:.0f} s" if stalled_s >= _STALL_S else ""
        count = f"{len(names)}: " if len(names) > 1 else ""
        text = fold(names)
        room = width - len(f"waiting for {count}{since}")
        if len(text) > room:
            text = f"{text[: max(0, room - 3)]}..."
        return f"waiting for {count}{text}{since}"[:width]

    def _pace(self) -> tuple[str, str]:
        """Nodes per second, and the time for the pending nodes; "" while unknown."""
        elapsed_s = self.clock() - self.started_s
        if self.total < _MIN_NODES_FOR_RATE or elapsed_s < _MIN_S_FOR_RATE or not self.done:
            return "", ""
        rate = self.done / elapsed_s
        pace = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
        if self.all_have_begun or not self.pending:
            return pace, ""
        return pace, f"{_clock(len(self.pending) / rate)} left"

    def line(self, width: int) -> str:
        """The line for a terminal: the most important parts that fit into the width."""
        pace, remaining = self._pace()
        share = f"{100 * self.done // self.total} %" if self.total >= _MIN_NODES_FOR_RATE else ""
        parts = {
            "count": f"{self.activity:<8} {self.done}/{self.total}",
            "share": share,
            "pace": pace,
            "failed": f"{self.failed} failed" if self.failed else "",
            "time": ", ".join(filter(None, (_clock(self.clock() - self.started_s), remaining))),
        }
        reserved = sum(len(parts[key]) + 2 for key in ("count", "failed", "time"))
        parts["slow"] = self.slow_nodes(max(24, min(60, width - reserved)))
        fitting, room = {"count"}, width - len(parts["count"])
        for key in ("slow", "failed", "time", "share", "pace"):
            if parts[key] and len(parts[key]) + 2 <= room:
                fitting.add(key)
                room -= len(parts[key]) + 2
        return "  ".join(text for key, text in parts.items() if key in fitting)[:width]

    def sentence(self) -> str:
        """The line for a log."""
        failed = f"{self.failed} failed" if self.failed else ""
        details = ", ".join(filter(None, (failed, *self._pace())))
        text = f"{self.activity}: {self.done} of {self.total} nodes{details and f', {details}'}."
        return f"{text} {self.slow_nodes(200)}".rstrip()


def _clock(seconds: float) -> str:
    """``0:41``, ``12:05``, ``1:02:03``."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def refuse_unwritable(output: str | None, name: str = "-o") -> None:
    """Raises Refused for a file that cannot be written, before any node is contacted."""
    if output is None:
        return
    try:
        check(Path(output))
    except NotFollowed as problem:
        raise Refused(f"{name} {problem.filename}: {problem.strerror}") from None
    except OSError:
        pass  # the errors below say more
    path = Path(os.path.realpath(output))
    if path.is_dir():
        raise Refused(f"{name} {output}: is a directory")
    if not path.parent.is_dir():
        raise Refused(f"{name} {output}: no directory {path.parent}")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise Refused(f"{name} {output}: cannot write to {path.parent}")


def write_hostfile(
    path: str | None,
    form: str,
    ready: Mapping[str, int],
    rejected: Iterable[str],
    screen: Screen,
    *,
    complete: bool,
) -> None:
    """Write the file of ``--hostfile-out``, or print why it stays. path: None: no option"""
    if path is None:
        return
    if not ready:
        screen.say(f"no node is ready: {path} is left as it is")
    elif not complete:
        screen.say(f"interrupted: {path} is left as it is")
    else:
        write_atomically(Path(path), [hostfile.text(form, ready, rejected)])


def render_options(screen: Screen, options: Options) -> Options:
    """The options of a report that is no table on a terminal."""
    return replace(options, verbose=screen.verbose, width=PLAIN.width, lines=0)


def show(
    kind: str,
    form: str,
    document: Any,
    screen: Screen,
    *,
    silent: bool = False,
    options: Options = PLAIN,
) -> None:
    """Write a document in one of its formats to standard output.

    kind:    of the document, as in `registry.FORMATS`
    silent:  print no table (-q without a finding); machine formats are still written
    options: of the report; the screen's own override them
    """
    renderer = registry.find_format(kind, form)
    shown_options = render_options(screen, options)
    if not renderer.styled:
        for part in renderer.render(document, shown_options):
            click.echo(part, nl=False)
    elif not silent:
        fitted = replace(shown_options, width=screen.width, lines=screen.lines)
        screen.show(renderer.lines(document, fitted))


# --- Where a report goes: the screen and the files of ``-o``, each in its format.


@dataclass(frozen=True)
class Outputs:
    kind: str  # of the document, as in `registry.FORMATS`
    form: str  # the format on standard output, else of the first FILE
    files: dict[str, str]  # FILE -> its format
    on_screen: bool  # the report is shown on standard output

    @property
    def write_facts(self) -> Callable[[Any], str] | None:
        """The function that makes the text of an observation, where a format shows it."""
        formats = [find_format(self.kind, form) for form in (self.form, *self.files.values())]
        return next((form.write_facts for form in formats if form.facts), None)

    def show(
        self,
        document: Any,
        screen: Screen,
        *,
        silent: bool = False,
        options: Options = PLAIN,
        mode: int = 0o644,
    ) -> None:
        """Write the document to its files, and show it; see `screen.show`.

        mode: of a new FILE: 0600 for a job's data, which no other user may read
        Raises OSError when a FILE cannot be written.
        """
        for file, form in self.files.items():
            text = find_format(self.kind, form).render(document, render_options(screen, options))
            write_atomically(Path(file), text, mode)
        if self.on_screen:
            show(self.kind, self.form, document, screen, silent=silent, options=options)


def read_outputs(kind: str, options: Any) -> Outputs:
    """The outputs of the options ``format`` and ``output``.

    ``FILE`` replaces the report on standard output. Its format is that of ``--format`` on the
    command line, else that of its ending. ``FORMAT:FILE`` is written besides.

    Raises Refused for a file that cannot be written, and for a format that the command lacks.
    """
    form, words = options.format, options.output
    source = click.get_current_context().get_parameter_source("format")
    files: dict[str, str] = {}
    replacing: list[str] = []
    for word in words:
        prefix, colon, file = word.partition(":")
        if not colon or prefix not in FORMS:
            file, prefix = word, ""
            replacing.append(file)
        elif prefix not in FORMATS[kind]:
            forms = ", ".join(FORMATS[kind])
            raise Refused(f"-o {word}: no format {prefix} here: there are {forms}")
        if not file:
            raise Refused(f"-o {word}: names no file")
        refuse_unwritable(file)
        if file in files:
            raise Refused(f"-o {file}: is given twice")
        is_explicit = source == ParameterSource.COMMANDLINE
        files[file] = prefix or (form if is_explicit else _form_of(kind, file) or form)
    first_form = files[replacing[0]] if replacing else form
    return Outputs(kind, first_form, files, not replacing)


def _form_of(kind: str, file: str) -> str:
    """The machine format of a file's ending; "" for an ending of none, or of a table."""
    forms = FORMATS[kind].values()
    # Of two forms with one ending, the table or the later one counts.
    endings = {form.extension: form for form in sorted(forms, key=lambda form: form.styled)}
    named = (form for ending, form in endings.items() if file.endswith(ending))
    return next((form.name for form in named if not form.styled), "")
