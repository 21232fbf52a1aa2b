"""The core files that are there: by their names, in the few places where the kernel puts them.

A core directory is everybody's. Each place is listed in a fork, names are never opened, and of
more files than are kept every user's newest ones stay: who makes many hides nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from nodeready.node import users_file
from nodeready.node.cores import core_pattern
from nodeready.node.cores.core_pattern import Directory, Name, Place, printable
from nodeready.node.runtime import ForkedWorker, Send
from nodeready.node.users_file import by_turns
from nodeready.subjects import wire
from nodeready.subjects.proof.facts import PROGRAM

#: Files that are listed; beyond them only their number is told.
LISTED = 1000
# Files of which more is kept than their number, while a directory is looked through.
_KEPT = 20_000
# Seconds for the names of one place, and for their order; the fork's memory.
_LOOK_S, _SORT_S, _MEMORY = 6.0, 2.0, 1 << 30


@dataclass(frozen=True)
class File:
    """A file that is named like a core.

    path:        as the node names it; bytes that are no text as surrogates
    inode, modified_ns, size_bytes: with the path, what tells it from every other file
    owner:       user id of the file; of the ids for user namespaces, the first (`person`)
    age_s:       seconds since it was written, by the node's clock
    compressed:  its suffix (``.zst``); "": it is not compressed
    host:        the %h of its name; "": the name has none
    pid, signal: %P or %p, and %s, of its name; None: the name has none
    """

    path: wire.Path
    inode: wire.Number
    modified_ns: int
    size_bytes: wire.Number
    owner: wire.Uid
    age_s: float
    compressed: wire.Name = ""
    host: wire.Name = ""
    pid: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Listing:
    """The core files that one node sees, the newest first.

    places: where was looked: patterns with ``*`` for what the kernel fills in
    more:   how many older ones are not listed
    notes:  what kept us from looking somewhere, one line each
    """

    places: tuple[wire.Path, ...]
    files: tuple[File, ...]
    more: wire.Count = 0
    notes: tuple[wire.Line, ...] = ()


def places(patterns: Iterable[str]) -> tuple[list[Place], list[str]]:
    """The places to look in, and a note about each place where nobody can look.

    patterns: of the policy
    """
    found, notes = [], []
    live = core_pattern.live()
    if live.pattern.startswith("/"):
        found.append(live)
    elif not live.handler:
        notes.append(
            f"core_pattern is {live.shown or 'empty'}: cores lie in whatever directory each "
            "process worked in, which nobody can list (nodeready deploy sets a path)"
        )
    elif os.path.basename(live.handler) != PROGRAM:
        notes.append(
            f"core_pattern hands cores to {printable(live.handler)}, "
            "which alone knows where they are"
        )
    found += [Place(pattern) for pattern in patterns if pattern.startswith("/")]
    if os.path.isdir(core_pattern.STORE):
        found.append(Place(core_pattern.STORE_PATTERN))
    return list(dict.fromkeys(found)), notes


# --- One place, in a fork.


@dataclass(frozen=True)
class _Entry:
    """A regular file in one of a place's directories."""

    directory: int
    name: str
    device: int
    inode: int
    modified_ns: int
    size_bytes: int
    owner: int


def _entries(
    place: Place, directories: Sequence[Directory], until: float
) -> tuple[list[_Entry], int, list[str]]:
    """The regular files that may be the place's, of many each user's newest; how many there are;
    and a note about each directory that was not looked through."""
    kept: list[_Entry] = []
    count, notes = 0, []
    for at, directory in enumerate(directories):
        names = looked = 0
        try:
            with users_file.scan(directory.real) as found:
                for entry in found:
                    names += 1
                    now = time.monotonic()
                    if now > until:
                        # A moment more, to know how many there are.
                        if now > until + 1:
                            break
                        continue
                    looked += 1
                    # What cannot be a core is not even looked at.
                    if not entry.name.startswith(place.prefix):
                        continue
                    with contextlib.suppress(OSError):
                        one = _entry(at, entry)
                        count += one is not None
                        kept += [one] if one else []
                    if len(kept) >= 2 * _KEPT:
                        kept = by_turns(kept)[:_KEPT]
        except OSError as problem:
            notes.append(f"{printable(directory.shown)}: {problem.strerror or problem}")
        if looked < names:
            notes.append(
                f"{printable(directory.shown)}: {names:,} names or more, looked at {looked:,}: "
                "newer cores may be among the others"
            )
    return kept, count, notes


def _entry(at: int, entry: os.DirEntry[str]) -> _Entry | None:
    if not entry.is_file(follow_symlinks=False):
        return None
    seen = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(seen.st_mode):
        return None
    size, when = seen.st_size, users_file.modified_ns(seen)
    owner = users_file.person(seen.st_uid)
    return _Entry(at, entry.name, seen.st_dev, seen.st_ino, when, size, owner)


def _number(values: dict[str, str], letters: str) -> int | None:
    """The first of these specifiers that has a number in the name."""
    for letter in letters:
        # As long as a number of the kernel's, whatever the file is called.
        if 0 < len(values.get(letter, "")) < 20:
            return int(values[letter])
    return None


def _file(name: Name, entry: _Entry, now: float) -> File:
    return File(
        name.path,
        entry.inode,
        entry.modified_ns,
        entry.size_bytes,
        entry.owner,
        max(0.0, now - entry.modified_ns / 1e9),
        compressed=name.compressed,
        host=name.values.get("h", ""),
        pid=_number(name.values, "PpIi"),
        signal=_number(name.values, "s"),
    )


def _look(place: Place, since_s: float, send: Send) -> None:
    """The fork's work: it sends ``{"files": [...], "more": N, "notes": [...]}``."""
    users_file.confine(_MEMORY, int(_LOOK_S + _SORT_S) + 1)
    began, now = time.monotonic(), time.time()
    try:
        directories = place.directories()
    except OSError as problem:
        where = printable(str(problem.filename or place.directory))
        send({"files": [], "more": 0, "notes": [f"{where}: {problem.strerror or problem}"]})
        return
    entries, count, notes = _entries(place, directories, began + _LOOK_S)
    if since_s:
        recent = [one for one in entries if now - one.modified_ns / 1e9 <= since_s]
        # Of those that were not kept, nobody knows.
        count, entries = count - (len(entries) - len(recent)), recent
    files: list[File] = []
    seen: set[tuple[int, int]] = set()
    for at, entry in enumerate(by_turns(entries)):
        if time.monotonic() > began + _LOOK_S + _SORT_S:
            left = len(entries) - at
            notes.append(f"{place.shown}: {left:,} files, and no time to look at their names")
            break
        name = next(place.names(directories[entry.directory], [entry.name]), None)
        if name is None or (entry.device, entry.inode) in seen:
            count -= 1
            continue
        seen.add((entry.device, entry.inode))
        if len(files) < LISTED:
            files.append(_file(name, entry, now))
    more = max(0, count - len(files))
    send({"files": [asdict(file) for file in files], "more": more, "notes": notes})


# --- All places.


def listing(patterns: Iterable[str], since_s: float = 0) -> Listing:
    """The cores of this node, the newest first; of more than LISTED, those of each user by turns.

    patterns: the policy's, beside the one in force and systemd's store
    since_s:  only those that were written in the last so many seconds; 0: all
    """
    where, notes = places(patterns)
    found: dict[tuple[str, int], File] = {}
    more = 0
    for place in where:
        answer = _answer(place, since_s)
        if answer is None:
            notes.append(f"{place.shown}: no answer within {_LOOK_S + _SORT_S:.0f} s")
            continue
        before = len(found)
        listed = [File(**row) for row in answer["files"]]
        found |= {(file.path, file.inode): file for file in listed}
        # Two patterns may name the same directory: what both do not list is the same, too.
        more = max(more, answer["more"]) if len(found) == before else more + answer["more"]
        notes += answer["notes"]
    chosen = by_turns(found.values())[:LISTED]
    more += len(found) - len(chosen)
    shown = tuple(dict.fromkeys(place.shown for place in where))
    newest = tuple(sorted(chosen, key=lambda file: -file.modified_ns))
    return Listing(shown, newest, more, tuple(dict.fromkeys(notes)))


def _answer(place: Place, since_s: float) -> Any:
    """What the fork sends; None: it hangs, or broke off."""
    worker = ForkedWorker(partial(_look, place, since_s), 2 * (_LOOK_S + _SORT_S))
    try:
        until = time.monotonic() + _LOOK_S + _SORT_S + 1
        return next(worker.messages(_LOOK_S + _SORT_S + 1, until), None)
    finally:
        worker.end()
