"""A report of this machine, written where it is wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nodeready.reports.registry import Options, find, names

if TYPE_CHECKING:
    from nodeready.audit import Audit
    from nodeready.ready import Ready

#: The forms of an audit, and those of a go or no-go.
AUDIT, READY = names("audit", on_node=True), names("ready", on_node=True)


def of_audit(audit: Audit, form: str, verbose: int = 0) -> Iterator[str]:
    """The report in pieces, the same as from outside."""
    return find("audit", form).render(audit, Options(verbose))


def of_ready(ready: Ready, form: str, verbose: int = 0) -> Iterator[str]:
    """The same for a go or no-go."""
    return find("ready", form).render(ready, Options(verbose))


def write(pieces: Iterable[str], output: str | None) -> None:
    """To a file, whole or not at all, or to standard output. Raises OSError."""
    if output is None:
        sys.stdout.writelines(pieces)
        return
    from pathlib import Path

    from nodeready.files import write_atomically

    write_atomically(Path(output), pieces)
