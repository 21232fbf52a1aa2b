"""The lines of ssh_config files, in the order in which ssh takes them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nodeready.core.base import Line
from nodeready.subjects.ssh_client.config import directive


class SshLine(NamedTuple):
    """A line of ssh_config, and its conditions."""

    # criteria in the form of a Match line, which must all hold; () for all hosts
    when: tuple[str, ...]
    keyword: str  # in small letters
    text: str  # the line

    @property
    def value(self) -> str:
        parsed = directive(Line("", 0, self.text))
        return parsed.value if parsed else ""


#: ssh itself gives up at this depth of Include (READCONF_MAX_DEPTH).
_MAX_DEPTH = 16


def ssh_lines(
    path: str,
    folder: str,
    when: tuple[str, ...] = (),
    depth: int = 0,
    read: set[Path] | None = None,
) -> Iterator[SshLine]:
    """The lines of an ssh_config file in the order in which ssh takes them, without Host, Match
    and Include. An unreadable file has none.

    folder: the directory of relative names in Include
    read:   gets the paths of all files that were read
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    if read is not None:
        read.add(Path(path))
    criteria = when
    for text in lines:
        parsed = directive(Line(path, 0, text))
        if parsed is None:
            continue
        if parsed.keyword == "host":
            criteria = (*when, f"originalhost {','.join(parsed.value.split())}")
        elif parsed.keyword == "match":
            every = parsed.value.strip().lower() == "all"
            criteria = when if every else (*when, text.strip().partition(" ")[2].strip())
        elif parsed.keyword == "include":
            for word in parsed.value.split() if depth < _MAX_DEPTH else ():
                inside = os.path.join(os.path.expanduser(folder), os.path.expanduser(word))
                for name in sorted(glob.glob(inside)):
                    yield from ssh_lines(name, folder, criteria, depth + 1, read)
        else:
            yield SshLine(criteria, parsed.keyword, text.strip())
