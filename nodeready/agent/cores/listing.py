"""List the core files of a node, by their names in the few directories of the kernel.

Any user may write to a core directory. Each directory is listed in a fork, and no file is opened.
If there are too many files, each user's newest files are listed, so no user can hide another's.
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

from nodeready.agent import users_file
from nodeready.agent.cores import core_pattern
from nodeready.agent.cores.core_pattern import CorePlace, PatternDirectory, printable
from nodeready.agent.runtime import ForkedWorker, Send
from nodeready.agent.users_file import by_turns
from nodeready.core import wire
from nodeready.subjects.proof.facts import PROGRAM

#: Maximum files that are listed; any further files are only counted.
LISTED = 1000
# Maximum files that are kept while a directory is read.
_KEPT = 20_000
# Seconds to read the names of one place, and to sort them; the fork's memory.
_LOOK_S, _SORT_S, _MEMORY = 6.0, 2.0, 1 << 30


@dataclass(frozen=True)
class CoreFile:
    """A file that is named like a core."""

    path: wire.Path  # on the node; bytes that are no text are surrogates
    inode: wire.Number  # with the path, they identify the file
    modified_ns: int  # likewise
    size_bytes: wire.Number  # likewise
    owner: wire.Uid  # user id of the file; the first id of a range for user namespaces (`person`)
    age_s: float  # seconds since it was written, by the node's clock
    compressed: wire.Name = ""  # its suffix (``.zst``); "": it is not compressed
    host: wire.Name = ""  # the %h of its name; "": the name has none
    pid: int | None = None  # %P or %p, and %s, of its name; None: the name has none
    signal: int | None = None  # likewise


@dataclass(frozen=True)
class Listing:
    """The core files of a node, the newest first."""

    places: tuple[wire.Path, ...]  # that were read: patterns with ``*`` for the kernel's values
    files: tuple[CoreFile, ...]
    unlisted_count: wire.Count = 0  # older files that are not listed
    notes: tuple[wire.Line, ...] = ()  # why a place could not be read, one line each


def core_places(patterns: Iterable[str]) -> tuple[list[CorePlace], list[str]]:
    """The places that may have cores, and a note about each place that cannot be read.
    patterns: of the policy
    """
    places, notes = [], []
    live = core_pattern.live_place()
    if live.pattern.startswith("/"):
        places.append(live)
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
    places += [CorePlace(pattern) for pattern in patterns if pattern.startswith("/")]
    if os.path.isdir(core_pattern.STORE):
        places.append(CorePlace(core_pattern.STORE_PATTERN))
    return list(dict.fromkeys(places)), notes


# --- One place, in a fork.


@dataclass(frozen=True)
class _CoreEntry:
    """A regular file in a directory of a place."""

    directory: int  # its index in the place's directories
    name: str
    device: int
    inode: int
    modified_ns: int
    size_bytes: int
    owner: int


def _entries(
    place: CorePlace, directories: Sequence[PatternDirectory], until: float
) -> tuple[list[_CoreEntry], int, list[str]]:
    """The regular files of the place, the number of them, and a note about each unread directory.
    Of too many files, each user's newest are kept.
    """
    entries: list[_CoreEntry] = []
    count, notes = 0, []
    for index, directory in enumerate(directories):
        names = read_names = 0
        try:
            with users_file.scan(directory.real) as directory_entries:
                for entry in directory_entries:
                    names += 1
                    now_s = time.monotonic()
                    if now_s > until:
                        # One more second, to count the names.
                        if now_s > until + 1:
                            break
                        continue
                    read_names += 1
                    # A file with another prefix cannot be a core.
                    if not entry.name.startswith(place.prefix):
                        continue
                    with contextlib.suppress(OSError):
                        if kept_entry := _entry(index, entry):
                            count += 1
                            entries.append(kept_entry)
                    if len(entries) >= 2 * _KEPT:
                        entries = by_turns(entries)[:_KEPT]
        except OSError as problem:
            notes.append(f"{printable(directory.shown)}: {problem.strerror or problem}")
        if read_names < names:
            notes.append(
                f"{printable(directory.shown)}: {names:,} names or more, "
                f"looked at {read_names:,}: "
                "newer cores may be among the others"
            )
    return entries, count, notes


def _entry(directory: int, entry: os.DirEntry[str]) -> _CoreEntry | None:
    if not entry.is_file(follow_symlinks=False):
        return None
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        return None
    size_bytes, modified_ns = status.st_size, users_file.modified_ns(status)
    owner = users_file.main_uid(status.st_uid)
    return _CoreEntry(
        directory, entry.name, status.st_dev, status.st_ino, modified_ns, size_bytes, owner
    )


def _number(values: dict[str, str], letters: str) -> int | None:
    """The first of these specifiers that has a number in the name."""
    for letter in letters:
        # A longer number is not the kernel's.
        if 0 < len(values.get(letter, "")) < 20:
            return int(values[letter])
    return None


def _list(place: CorePlace, since_s: float, send: Send) -> None:
    """The fork's work: it sends ``{"files": [...], "unlisted": N, "notes": [...]}``."""
    users_file.confine(_MEMORY, int(_LOOK_S + _SORT_S) + 1)
    began, now_s = time.monotonic(), time.time()
    try:
        directories = place.directories()
    except OSError as problem:
        source = printable(str(problem.filename or place.directory))
        send({"files": [], "unlisted": 0, "notes": [f"{source}: {problem.strerror or problem}"]})
        return
    entries, count, notes = _entries(place, directories, began + _LOOK_S)
    if since_s:
        recent = [entry for entry in entries if now_s - entry.modified_ns / 1e9 <= since_s]
        # The times of files that were not kept are unknown, so those files stay counted.
        count, entries = count - (len(entries) - len(recent)), recent
    files: list[CoreFile] = []
    visited: set[tuple[int, int]] = set()
    for index, entry in enumerate(by_turns(entries)):
        if time.monotonic() > began + _LOOK_S + _SORT_S:
            count_left = f"{len(entries) - index:,}"
            notes.append(f"{place.shown}: {count_left} files, and no time to look at their names")
            break
        name = next(place.names(directories[entry.directory], [entry.name]), None)
        if name is None or (entry.device, entry.inode) in visited:
            count -= 1
            continue
        visited.add((entry.device, entry.inode))
        if len(files) < LISTED:
            age_s = max(0.0, now_s - entry.modified_ns / 1e9)
            files.append(CoreFile(
                name.path, entry.inode, entry.modified_ns, entry.size_bytes, entry.owner, age_s,
                name.compressed, name.values.get("h", ""),
                pid=_number(name.values, "PpIi"), signal=_number(name.values, "s"),
            ))  # fmt: skip
    unlisted = max(0, count - len(files))
    send({"files": [asdict(file) for file in files], "unlisted": unlisted, "notes": notes})


# --- All places.


def listing(patterns: Iterable[str], since_s: float = 0) -> Listing:
    """The cores of this node, the newest first.

    Of more than LISTED, each user's newest cores are listed.

    patterns: of the policy; the pattern in force and systemd's store are added
    since_s:  maximum age of a core in seconds; 0: any age
    """
    places, notes = core_places(patterns)
    files_by_inode: dict[tuple[str, int], CoreFile] = {}
    unlisted = 0
    for place in places:
        answer = _answer(place, since_s)
        if answer is None:
            notes.append(f"{place.shown}: no answer within {_LOOK_S + _SORT_S:.0f} s")
            continue
        before = len(files_by_inode)
        listed = [CoreFile(**row) for row in answer["files"]]
        files_by_inode |= {(file.path, file.inode): file for file in listed}
        # Two patterns may name the same directory, and then leave out the same files.
        is_same_directory = len(files_by_inode) == before
        remaining = answer["unlisted"]
        unlisted = max(unlisted, remaining) if is_same_directory else unlisted + remaining
        notes += answer["notes"]
    chosen = by_turns(files_by_inode.values())[:LISTED]
    unlisted += len(files_by_inode) - len(chosen)
    shown = tuple(dict.fromkeys(place.shown for place in places))
    newest = tuple(sorted(chosen, key=lambda file: -file.modified_ns))
    return Listing(shown, newest, unlisted, tuple(dict.fromkeys(notes)))


def _answer(place: CorePlace, since_s: float) -> Any:
    """The fork's message; None: the fork hangs, or ended early."""
    worker = ForkedWorker(partial(_list, place, since_s), 2 * (_LOOK_S + _SORT_S))
    try:
        until = time.monotonic() + _LOOK_S + _SORT_S + 1
        return next(worker.messages(_LOOK_S + _SORT_S + 1, until), None)
    finally:
        worker.end()
