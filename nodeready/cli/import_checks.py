"""`nodeready import`: checks of another tool as a site's own."""

from __future__ import annotations

from pathlib import Path

import click

from nodeready.cli.options import Refused, output_file
from nodeready.cli.screen import refuse_unwritable
from nodeready.exit_codes import OK
from nodeready.files import only_regular, write_atomically
from nodeready.inventory.imports import goss, nhc
from nodeready.inventory.imports.converted import (
    CONVERTED,
    COVERED,
    ImportFileError,
    counts,
    write_toml,
)
from nodeready.text import sanitise

_READERS = {"nhc": nhc.read, "goss": goss.read}
#: Maximum bytes of a file.
_MAX_BYTES = 1 << 20
#: Maximum characters of a line of the file in a message.
_MAX_LINE = 200


@click.command(name="import")
@click.argument("tool", type=click.Choice(sorted(_READERS)))
@click.argument("file")
@output_file("File of the checks; - is standard output.", default="-")
def import_checks(tool: str, file: str, output: str) -> int:
    """Convert the checks of NHC or goss in FILE into checks of the site's own.

    Standard error says what became of each line: converted (the new check's id), covered (the
    check of nodeready that has it), cannot (why), setting (of the other tool). A check for some
    nodes only is written as a comment: put these nodes into a group, and name the group in the
    check. Nothing is run, and no node is contacted.

    \b
    Examples:
      nodeready import nhc /etc/nhc/nhc.conf -o checks.d/nhc.toml
      nodeready import goss goss.yaml -o checks.d/goss.toml
    """
    if output != "-":
        refuse_unwritable(output)
    try:
        with open(file, "rb", opener=only_regular) as source:
            data = source.read(_MAX_BYTES + 1)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise Refused(f"{file}: is larger than {_MAX_BYTES} bytes")
    try:
        lines = _READERS[tool](data.decode("utf-8", "replace"), Path(file).name)
    except ImportFileError as error:
        raise Refused(str(error)) from None
    for line in lines:
        nodes = f" (only nodes {line.nodes}: commented out)" if line.nodes and line.checks else ""
        origin = f"{line.place}: {sanitise(line.text, _MAX_LINE)}"
        click.echo(sanitise(f"{line.outcome:9} {origin}: {line.detail}{nodes}"), err=True)
    numbers = counts(lines)
    if not numbers[CONVERTED] + numbers[COVERED]:
        raise Refused(f"{file}: no check of {tool} could be imported")
    total = ", ".join(f"{number} {outcome}" for outcome, number in numbers.items())
    click.echo(f"{len(lines)} lines: {total}", err=True)
    text = "\n".join(write_toml(lines, Path(file).name)) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_atomically(Path(output), [text])
    return OK
