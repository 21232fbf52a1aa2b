"""A pattern of paths, expanded within bounds and never into a mount that does not answer."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nodeready.agent import users_file
from nodeready.agent.users_file import Resolved, follow

#: Maximum names that are read, maximum matching names, and maximum depth of ``**``.
MAX_NAMES, MAX_HITS, MAX_DEPTH = 1_000_000, 100_000, 16
_WILDCARD = re.compile(r"[*?[]")


@dataclass(frozen=True)
class PathMatch:
    shown: str  # in the pattern's spelling
    real: str  # without links
    owner: int | None = None  # of the links that are not root's; its rights are used

    @property
    def resolved(self) -> Resolved:
        return Resolved(self.real, self.owner)

    def child_path(self, name: str) -> str:
        return f"{self.shown.rstrip('/')}/{name}"


@dataclass(frozen=True)
class _OwnedName:
    name: str
    owner: int
    modified_ns: int


@dataclass
class PatternWalk:
    """Expands one pattern. A user's link leads only to directories that the user may enter."""

    # called with each path without links before it is used; raises OSError if it must not be used
    touch: Callable[[str], None]
    blocked: Callable[[str], bool]  # whether ``**`` does not enter this directory
    on_error: Callable[[str, OSError], None]  # gets each unreadable path, and the error
    too_many: int = 0  # MAX_NAMES or MAX_HITS, whichever was exceeded; 0: neither was
    _names: int = 0
    _hits: int = 0

    def expand(self, pattern: str) -> Iterator[PathMatch]:
        """The paths that match an absolute pattern of ``*``, ``?``, ``[...]`` and ``**``."""
        components = [component for component in pattern.split("/") if component]
        yield from self._expand_words([PathMatch("/", "/")], components)

    def _expand_words(
        self, parents: list[PathMatch], components: list[str]
    ) -> Iterator[PathMatch]:
        if not components:
            yield from parents
            return
        component, *remaining = components
        if component == "**":
            for parent in parents:
                for child in self._subdirectories(parent, MAX_DEPTH):
                    yield from self._expand_words([child], remaining or ["*"])
        elif _WILDCARD.search(component):
            expression = re.compile(fnmatch.translate(component))
            for parent in parents:
                hits = [
                    match
                    for name in self._list(parent, expression)
                    if component[0] == "." or name[0] != "."
                    for match in self._enter(parent, name, last=not remaining)
                ]
                yield from self._expand_words(hits, remaining)
        else:
            for parent in parents:
                hits = list(self._enter(parent, component, last=not remaining))
                yield from self._expand_words(hits, remaining)

    def _enter(self, parent: PathMatch, name: str, *, last: bool) -> Iterator[PathMatch]:
        """The name in this directory, if it exists; unless it is last, it must be a directory."""
        shown = parent.child_path(name)
        try:
            target = follow(parent.resolved, name, self.touch)
            if last or stat.S_ISDIR(users_file.linked_status(target).st_mode):
                yield PathMatch(shown, target.path, target.owner)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.on_error(shown, error)

    def _list(self, parent: PathMatch, expression: re.Pattern[str] | None = None) -> list[str]:
        """The matching names in this directory, sorted; of too many names, only some."""
        names: list[str] = []
        try:
            self.touch(parent.real)
            with users_file.scan(parent.resolved) as entries:
                for entry in entries:
                    self._names += 1
                    if expression is None or expression.match(entry.name):
                        names.append(entry.name)
                    if self._names > MAX_NAMES:
                        self.too_many = MAX_NAMES
                        break
            room = MAX_HITS - self._hits
            if len(names) > room:
                self.too_many = self.too_many or MAX_HITS
                names = self._newest(parent, names)[:room]
            self._hits += len(names)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.on_error(parent.shown, error)
        return sorted(names)

    def _newest(self, parent: PathMatch, names: list[str]) -> list[str]:
        """The names, with each owner's newest names first (`by_turns`)."""
        matches = []
        for name in names:
            place = Resolved(f"{parent.real.rstrip('/')}/{name}", parent.owner)
            self.touch(place.path)
            with contextlib.suppress(FileNotFoundError):
                status = users_file.linked_status(place)
                owner = users_file.main_uid(status.st_uid)
                matches.append(_OwnedName(name, owner, users_file.modified_ns(status)))
        return [entry.name for entry in users_file.by_turns(matches)]

    def _subdirectories(self, parent: PathMatch, depth: int) -> Iterator[PathMatch]:
        """The directory and all its subdirectories. Links are not followed, for they may loop."""
        yield parent
        if depth == 0:
            return
        for name in self._list(parent):
            real = f"{parent.real.rstrip('/')}/{name}"
            child = PathMatch(parent.child_path(name), real, parent.owner)
            if name[0] == "." or self.blocked(child.real):
                continue
            try:
                self.touch(child.real)
                is_directory = stat.S_ISDIR(users_file.linked_status(child.resolved).st_mode)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.on_error(child.shown, error)
                continue
            if is_directory:
                yield from self._subdirectories(child, depth - 1)


def absolute_pattern(pattern: str) -> str:
    """The pattern with ``~`` replaced by the literal home of who logged in, also under sudo."""
    if pattern != "~" and not pattern.startswith("~/"):
        return pattern
    home = os.environ.get("HOME", "/")
    with contextlib.suppress(KeyError):
        home = pwd.getpwuid(os.getuid()).pw_dir
    with contextlib.suppress(KeyError):
        home = pwd.getpwnam(os.environ["SUDO_USER"]).pw_dir
    return re.sub(r"([*?[])", r"[\1]", home) + pattern[1:]
