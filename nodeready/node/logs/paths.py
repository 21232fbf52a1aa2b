"""A pattern of paths, expanded within bounds and never into a mount that does not answer."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nodeready.node import users_file
from nodeready.node.users_file import Resolved, follow

#: Names that are read, those of them that are looked at, and directories below each other that
#: ``**`` goes down.
MAX_NAMES, MAX_HITS, MAX_DEPTH = 1_000_000, 100_000, 16
_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class Match:
    """A path that matches.

    shown: as the pattern spells it
    real:  without links
    owner: of links on the way that are not root's, with whose rights alone it is asked for
    """

    shown: str
    real: str
    owner: int | None = None

    @property
    def resolved(self) -> Resolved:
        return Resolved(self.real, self.owner)

    def at(self, name: str) -> str:
        return f"{self.shown.rstrip('/')}/{name}"


@dataclass(frozen=True)
class _Named:
    name: str
    owner: int
    modified_ns: int


@dataclass
class Walk:
    """One way through the node's directories. A user's link leads nowhere that the user could
    not go.

    touch:   called with each path without links before it is asked for; raises OSError when it
             must not be
    blocked: whether ``**`` stays out of this directory
    trouble: called with what could not be looked at, and why
    too_many: MAX_NAMES or MAX_HITS, where there are more; 0: there are not
    """

    touch: Callable[[str], None]
    blocked: Callable[[str], bool]
    trouble: Callable[[str, OSError], None]
    too_many: int = 0
    _names: int = 0
    _hits: int = 0

    def expand(self, pattern: str) -> Iterator[Match]:
        """What matches an absolute pattern of ``*``, ``?``, ``[...]`` and ``**``."""
        words = [word for word in pattern.split("/") if word]
        yield from self._below([Match("/", "/")], words)

    def _below(self, parents: list[Match], words: list[str]) -> Iterator[Match]:
        if not words:
            yield from parents
            return
        word, *rest = words
        if word == "**":
            for parent in parents:
                for below in self._deep(parent, MAX_DEPTH):
                    yield from self._below([below], rest or ["*"])
        elif _MAGIC.search(word):
            like = re.compile(fnmatch.translate(word))
            for parent in parents:
                hits = [
                    found
                    for name in self._list(parent, like)
                    if word[0] == "." or name[0] != "."
                    for found in self._one(parent, name, last=not rest)
                ]
                yield from self._below(hits, rest)
        else:
            for parent in parents:
                yield from self._below(list(self._one(parent, word, last=not rest)), rest)

    def _one(self, parent: Match, name: str, *, last: bool) -> Iterator[Match]:
        """The name in this directory, if it is there and, unless it is the last one, leads on."""
        shown = parent.at(name)
        try:
            found = follow(parent.resolved, name, self.touch)
            if last or stat.S_ISDIR(users_file.known(found).st_mode):
                yield Match(shown, found.path, found.owner)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.trouble(shown, error)

    def _list(self, parent: Match, like: re.Pattern[str] | None = None) -> list[str]:
        """The names in this directory, in order; of more than we look at, some."""
        names: list[str] = []
        try:
            self.touch(parent.real)
            with users_file.scan(parent.resolved) as entries:
                for entry in entries:
                    self._names += 1
                    if like is None or like.match(entry.name):
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
            self.trouble(parent.shown, error)
        return sorted(names)

    def _newest(self, parent: Match, names: list[str]) -> list[str]:
        """The names in this directory, each owner's newest by turns."""
        found = []
        for name in names:
            one = Resolved(f"{parent.real.rstrip('/')}/{name}", parent.owner)
            self.touch(one.path)
            with contextlib.suppress(FileNotFoundError):
                known = users_file.known(one)
                found.append(
                    _Named(name, users_file.person(known.st_uid), users_file.modified_ns(known))
                )
        return [one.name for one in users_file.by_turns(found)]

    def _deep(self, parent: Match, depth: int) -> Iterator[Match]:
        """The directory and all below it, without following links: those may go round."""
        yield parent
        if depth == 0:
            return
        for name in self._list(parent):
            real = f"{parent.real.rstrip('/')}/{name}"
            below = Match(parent.at(name), real, parent.owner)
            if name[0] == "." or self.blocked(below.real):
                continue
            try:
                self.touch(below.real)
                directory = stat.S_ISDIR(users_file.known(below.resolved).st_mode)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.trouble(below.shown, error)
                continue
            if directory:
                yield from self._deep(below, depth - 1)


def home() -> str:
    """The home directory of whoever has logged in, sudo or not."""
    user = os.environ.get("SUDO_USER")
    if user:
        try:
            return pwd.getpwnam(user).pw_dir
        except KeyError:
            pass
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.environ.get("HOME", "/")


def absolute(pattern: str) -> str:
    """The pattern with ``~`` replaced by the home of whoever has logged in, taken literally."""
    if pattern == "~" or pattern.startswith("~/"):
        return re.sub(r"([*?[])", r"[\1]", home()) + pattern[1:]
    return pattern


# --- The mounts of this node, and those whose server does not answer.
#
# A process that asks such a mount hangs in the kernel for good.

TABLE = "/proc/self/mountinfo"
#: File systems that hold the kernel's own things, and no file of a job.
KERNEL_FILE_SYSTEMS = frozenset(
    (
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs"),
        *("securityfs", "bpf", "pstore", "configfs", "fusectl", "mqueue", "efivarfs"),
        *("binfmt_misc", "rpc_pipefs", "hugetlbfs", "selinuxfs", "nsfs"),
    )
)
#: A process of ours that asks a mount is named: this, and the mount's device. The kernel keeps
#: 15 characters of it (proc(5), /proc/PID/comm).
_NAME = "nr-"
#: The bit of SIGKILL among a process's pending signals (proc(5), SigPnd).
_KILLED = 1 << 8


@dataclass(frozen=True)
class Mount:
    """A row of `TABLE`. device: ``MAJOR:MINOR``; kind: ``nfs4``; source: ``nas:/export``"""

    path: str
    device: str
    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.path} ({self.source}, {self.kind})"


def parse(text: str) -> list[Mount]:
    """The rows of `TABLE` (proc(5)); what is no row of it is passed over."""
    found = []
    for row in text.splitlines():
        before, _, after = row.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 6 and len(right) >= 2:
            found.append(Mount(_plain(left[4]), left[2], right[0], _plain(right[1])))
    return found


def _plain(word: str) -> str:
    """White space and backslashes stand in the table as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


class Mounts:
    """Which mount a path without links is on, found without asking the path."""

    def __init__(self, rows: Iterable[Mount]) -> None:
        # Of two at the same place, the later one is seen.
        self._rows = {row.path: row for row in rows}

    def of(self, path: str) -> Mount:
        """The mount that holds this absolute path without links."""
        here = path
        while here not in self._rows and here != "/":
            here = os.path.dirname(here)
        return self._rows.get(here, Mount("/", "", "", ""))


def own_mounts() -> Mounts:
    """The mounts that this process sees."""
    with open(TABLE, encoding="utf-8", errors="surrogateescape") as file:
        return Mounts(parse(file.read()))


def own_name() -> int:
    """The open name of this process (proc(5), /proc/PID/comm); -1: there is none."""
    try:
        return os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def name_after(device: str, name: int) -> None:
    """Name this process after the device, by which `unresponsive` finds it when it hangs.

    name: from `own_name`
    """
    with contextlib.suppress(OSError):
        os.write(name, f"{_NAME}{device}".encode())


def unresponsive() -> set[str]:
    """The devices for which a killed process of an earlier run still waits in the kernel."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
            match = re.match(rf"Name:\t{_NAME}(\d+:\d+)\n", text)
            pending = re.search(r"^SigPnd:\t([0-9a-f]+)$", text, re.MULTILINE)
            if match and pending and int(pending[1], 16) & _KILLED:
                found.add(match[1])
    return found
