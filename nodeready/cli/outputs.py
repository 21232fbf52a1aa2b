"""Where a report goes: the screen and the files of ``-o``, each in its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from nodeready.cli.options import FORMS
from nodeready.cli.screen import Screen, refuse_unwritable, render_options, show
from nodeready.core.exit_codes import Refused
from nodeready.core.files import write_atomically
from nodeready.reports.registry import FORMATS, PLAIN, Options, find_format


@dataclass(frozen=True)
class Outputs:
    """The outputs of one command."""

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
    endings = {form.extension: form.name for form in FORMATS[kind].values() if not form.styled}
    tables = {form.extension for form in FORMATS[kind].values() if form.styled}
    return next(
        (name for end, name in endings.items() if file.endswith(end) and end not in tables), ""
    )
