"""What a node tells of its core files; the same dataclasses here and there (`proofs/wire.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A file that is named like a core.

    path:        as the node names it; bytes that are no text as surrogates
    inode, modified_ns, size_bytes: with the path, what tells it from every other file
    owner:       user id of the file
    age_s:       seconds since it was written, by the node's clock
    compressed:  its suffix (``.zst``); "": it is not compressed
    host:        the %h of its name; "": the name has none
    pid, signal: %P or %p, and %s, of its name; None: the name has none
    """

    path: str
    inode: int
    modified_ns: int
    size_bytes: int
    owner: int
    age_s: float
    compressed: str = ""
    host: str = ""
    pid: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Listing:
    """The core files that one node sees, the newest first.

    places: where was looked: patterns with ``*`` for what the kernel fills in
    more:   how many older ones are not listed
    notes:  what kept us from looking somewhere, one line each
    """

    places: tuple[str, ...]
    files: tuple[File, ...]
    more: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Core:
    """What one core tells, and the backtrace that gdb took from it.

    number:      which of the files that were asked for
    unread:      why there is no backtrace, and what to do, one line; "": there is one
    warning:     what is doubtful about it, one line
    whole_bytes: the size that its own program headers give; None: not known
    pid:         as the process itself saw it; None here and below: the core does not say
    signal:      that ended it; 0: none, it is a copy of a live process
    uid, user:   whose it was
    comm:        the first 15 characters of its name
    program:     path of the executable; "": not known
    command:     the first 80 characters of its command line
    threads:     how many it had; 0: not known
    rank, job:   by the environment that it was started with, where the core has that
    text:        gdb's words, zlib and base64
    cut:         the words were more
    """

    number: int
    unread: str = ""
    warning: str = ""
    whole_bytes: int | None = None
    pid: int | None = None
    signal: int | None = None
    uid: int | None = None
    user: str = ""
    comm: str = ""
    program: str = ""
    command: str = ""
    threads: int = 0
    rank: int | None = None
    job: str = ""
    text: str = ""
    cut: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Done:
    """The last line.

    read:    how many cores were looked at in full
    left:    how many were not looked at, because that was enough
    unknown: how many were passed over because they do not tell their job
    """

    read: int
    left: int
    unknown: int = 0
