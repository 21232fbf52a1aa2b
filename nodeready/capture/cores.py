"""Find the core files of a node: by their names, in the few places where the kernel puts them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator

from nodeready.capture import core_names
from nodeready.capture.core_names import Name, Place
from nodeready.capture.core_seen import File, Listing
from nodeready.proofs import core_pattern
from nodeready.proofs.seen import PROGRAM

#: Files that are listed; beyond them only their number is told.
LISTED = 1000


def places(patterns: Iterable[str]) -> tuple[list[Place], list[str]]:
    """Where to look, and what to say about where we cannot.

    patterns: of the policy
    """
    found, notes = [], []
    live = core_names.live()
    if live.pattern.startswith("/"):
        found.append(live)
    elif not live.handler:
        notes.append(
            f"core_pattern is {live.shown or 'empty'}: cores lie in whatever directory each "
            "process worked in, which nobody can list (nodeready deploy sets a path)"
        )
    elif os.path.basename(live.handler) != PROGRAM:
        notes.append(
            f"core_pattern hands cores to {core_pattern.shown(live.handler)}, which alone knows "
            "where they are"
        )
    found += [Place(pattern) for pattern in patterns if pattern.startswith("/")]
    if os.path.isdir(core_names.STORE):
        found.append(Place(core_names.STORE_PATTERN))
    return list(dict.fromkeys(found)), notes


def _number(values: dict[str, str], letters: str) -> int | None:
    """The first of these that the name has."""
    for letter in letters:
        # As long as a number of the kernel's, whatever the file is called.
        if 0 < len(values.get(letter, "")) < 20:
            return int(values[letter])
    return None


def _file(name: Name, now: float) -> File | None:
    """The file of that name; None: it is none, or gone."""
    try:
        seen = os.lstat(name.path)
    except OSError:
        return None
    if not stat.S_ISREG(seen.st_mode):
        return None
    return File(
        name.path,
        seen.st_ino,
        seen.st_mtime_ns,
        seen.st_size,
        seen.st_uid,
        max(0.0, now - seen.st_mtime),
        compressed=name.compressed,
        host=name.values.get("h", ""),
        pid=_number(name.values, "PpIi"),
        signal=_number(name.values, "s"),
    )


def _names(place: Place, notes: list[str]) -> Iterator[Name]:
    try:
        yield from place.find()
    except OSError as problem:
        where = core_pattern.shown(str(problem.filename or place.directory))
        notes.append(f"{where}: {problem.strerror or problem}")


def listing(patterns: Iterable[str], since_s: float = 0) -> Listing:
    """The cores of this node, the newest first.

    patterns: the policy's, beside the one in force and systemd's store
    since_s:  only those that were written in the last so many seconds; 0: all
    """
    now = time.time()
    where, notes = places(patterns)
    found: dict[str, File] = {}
    for place in where:
        for name in _names(place, notes):
            file = None if name.path in found else _file(name, now)
            if file is not None and (not since_s or file.age_s <= since_s):
                found[name.path] = file
    newest = sorted(found.values(), key=lambda file: -file.modified_ns)
    shown = tuple(dict.fromkeys(place.shown for place in where))
    more = max(0, len(newest) - LISTED)
    return Listing(shown, tuple(newest[:LISTED]), more, tuple(dict.fromkeys(notes)))
