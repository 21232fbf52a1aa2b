"""What one run of tail on a node is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes at the end of a file that are read.
MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class Config:
    """What the program has to do.

    nonce:     random word with which its line begins
    tag:       ``nodeready:RUN``, by which an interrupt finds the process
    pattern:   an absolute path, or one that begins with ``~/``; with ``*``,
               ``?``, ``[...]`` and ``**``
    lines:     how many of each file
    grep:      a regular expression; then only lines in which it is found; "": all
    newer_s:   only files that were written in the last so many seconds; 0: all
    since_s:   only files that were written since then, in seconds since 1970; 0: all
    max_files: of more files, those that were written last
    limit_s:   seconds after which it must have ended
    """

    nonce: str
    tag: str
    pattern: str
    lines: int = 10
    grep: str = ""
    newer_s: int = 0
    since_s: float = 0
    max_files: int = 64
    limit_s: int = 30


@dataclass(frozen=True)
class File:
    """A file that was read. mtime_s: seconds since 1970; age_s: since then, by the node's clock.

    lines:   the oldest first
    matches: of the expression in the last `MAX_BYTES`; None: there is none
    """

    path: str
    size_bytes: int
    mtime_s: float
    age_s: float
    lines: tuple[str, ...]
    matches: int | None


@dataclass(frozen=True)
class Unread:
    """A path that was not read. fault: somebody has to look; else it is no file for us."""

    path: str
    why: str
    fault: bool


@dataclass(frozen=True)
class Tail:
    """What one node has.

    host:    its own name for itself
    left_out: files that match, too, of which max_files were newer
    older:   files that match, and were not written in the time that was asked for
    error:   why the whole answer is not what was asked for; ""
    """

    host: str
    files: tuple[File, ...]
    unread: tuple[Unread, ...]
    left_out: int
    older: int
    error: str
