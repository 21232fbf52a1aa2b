"""A probe: sections of shell that read a node, and the parser of their output."""

from __future__ import annotations

import base64
import binascii
import copyreg
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import wraps
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Callable, TypeVar

if TYPE_CHECKING:
    # The proofs travel to the nodes with this module, and need no policy there.
    from nodeready.core.policy import Policy


K = TypeVar("K")
T = TypeVar("T")


class ProbeError(Exception):
    """A section's output cannot be parsed. evidence: the output's first bytes"""

    def __init__(self, reason: str, evidence: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.evidence = evidence[:200]


@dataclass(frozen=True)
class Unknown:
    """A subject that could not be observed: the reason, and the output's first bytes."""

    reason: str
    evidence: str = ""


@dataclass(frozen=True)
class Section:
    """One section of the snapshot: a shell text that only reads, with its limits."""

    name: str
    script: Callable[[Policy], str]  # POSIX sh, which may call helpers of nodeready/sh/probe.sh
    timeout_s: int = 5  # seconds after which it is ended: a home directory or a mount can hang
    cap_bytes: int = 262144  # output beyond this is cut off on the node
    # the section starts a program that may be slow or hang for good (a vendor's tool, a mount): it
    # runs in parallel, and a program that cannot be ended is left behind
    parallel: bool = False
    quick: bool = False  # parallel, but mostly fast: first tried at the end of the shared shell
    # policy -> the shell text that calls nr_seek for the lines that the section reads from nr_hits
    seeks: Callable[[Policy], str] | None = None
    first: bool = False  # it runs first in the shared shell: later sections use its results
    # the shell command that decides whether a parallel section runs (``command -v nvidia-smi
    # >/dev/null``); where it fails, the section is empty
    when: str = ":"


_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")

#: The ASCII characters beside a newline that end a line for str.splitlines.
_OTHER_ENDS = ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e")


@dataclass(frozen=True)
class Output:
    """What one section printed."""

    text: str  # the bytes as text (surrogateescape)
    rc: int | None  # the exit status; None: the section was ended by its limit
    truncated: bool = False  # the output reached the section's cap_bytes
    nonce: str = ""  # the run's, which marks the lines of probe.sh's helpers

    def require(self) -> str:
        """The text of a section that succeeded. Raises ProbeError for a failed section."""
        if self.truncated:
            raise ProbeError("output truncated", self.text)
        if self.rc is None:
            raise ProbeError("timed out", self.text)
        if self.rc != 0:
            raise ProbeError(f"failed with exit status {self.rc}", self.text)
        return self.text

    def values(self) -> dict[str, str]:
        """The ``NAME=VALUE`` lines; of several with one name the first counts."""
        values: dict[str, str] = {}
        for line in self.require().splitlines():
            name, equals, value = line.partition("=")
            if equals and name not in values and _NAME.match(name):
                values[name] = value
        return values

    def all(self, name: str) -> list[str]:
        """Every VALUE of the ``NAME=VALUE`` lines of this name, in order."""
        start, text = f"{name}=", self.require()
        if not text.isascii() or any(ending in text for ending in _OTHER_ENDS):
            return [line[len(start) :] for line in text.splitlines() if line.startswith(start)]
        # Most lines have another name: this is faster than a list of all lines.
        return [part.partition("\n")[0] for part in f"\n{text}".split(f"\n{start}")[1:]]

    def files(self) -> dict[str, bytes]:
        """The files that nr_exact printed, path -> the bytes as they are on the node."""
        contents = dict[str, bytes]()
        for path, printed, _ in self._parts():
            if path.startswith("/"):
                if size := re.match(r"size=(\d{1,9})\n", printed):
                    contents[path] = _file_of_size(path, int(size[1]), printed[size.end() :])
                else:
                    contents[path] = decode_base64(printed)
        return contents

    def lines(self) -> Iterator[Line]:
        """The lines that nr_lines printed, without those of the files of nr_exact."""
        for _, _, after in self._parts():
            yield from file_lines(after)

    def _parts(self) -> Iterator[tuple[str, str, str]]:
        """Path and printed text of each file of nr_exact, and the text after it; first no file."""
        first, *blocks = f"\n{self.require()}".split(f"\n@{self.nonce} file ")
        yield "", "", first
        for block in blocks:
            file, _, after = block.partition(f"\n@{self.nonce} eof")
            path, _, printed = file.partition("\n")
            yield path, printed, after


def _file_of_size(path: str, size: int, text: str) -> bytes:
    """The bytes of a file from its lines as nr_lines printed them. Raises ProbeError.

    The size shows whether the last line ends with a newline.
    """
    count, lines = 0, []
    for line in text.split("\n"):
        front = f"{path}:{count + 1}:"
        if line.startswith(front):
            count += 1
            lines.append(line[len(front) :])
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    if len(data) == size + 1:
        return data[:-1]
    if len(data) != size:
        raise ProbeError("a file that is not whole", text)
    return data


def decode_base64(text: str) -> bytes:
    """The bytes that a node's base64 printed. Raises ProbeError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ProbeError("a file that is not whole", text) from None


@dataclass(frozen=True)
class Line:
    """One line of a file on the node. Its property ``source`` is ``/path:number``."""

    path: str  # of the file
    number: int  # of the line, from 1
    text: str  # without the line's end

    @property
    def source(self) -> str:
        return f"{self.path}:{self.number}"


# The first number between colons ends the path, unless it is part of a PCI address (0000:52:00.0).
_FILE_LINE = re.compile(
    r"(/[^:]*(?::[^:]*)*?)"
    r":(?!(?<=/[0-9a-f]{4}:)[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])([0-9]{1,12}):(.*)",
    re.S,
)

#: The numbers of most lines.
_NUMBERS = {str(number): number for number in range(1, 1000)}


def files_by_name(directories: Iterable[str], paths: Iterable[str]) -> dict[str, str]:
    """Base name -> its file of the first directory that has one, in byte order of the names."""
    first: dict[str, str] = {}
    for directory in directories:
        for path in paths:
            parent, _, name = path.rpartition("/")
            if parent == directory:
                first.setdefault(name, path)
    return dict(sorted(first.items(), key=lambda item: item[0].encode("utf-8", "surrogateescape")))


def file_lines(text: str) -> Iterator[Line]:
    """The lines that nr_lines printed (``/path:number:text``); other lines are skipped.

    A PCI address in a path is not mistaken for a line's number. Another path with a number between
    colons (``/etc/a:1:b.conf``) is: its lines count as lines of ``/etc/a``.
    """
    for raw in text.split("\n"):
        if not raw.startswith("/"):
            continue
        # Most paths have no colon and no PCI address: a quick way for these.
        path, _, numbered = raw.partition(":")
        number, colon, line = numbered.partition(":")
        if colon and number in _NUMBERS and path[-5:-4] != "/":
            yield Line(path, _NUMBERS[number], line)
            continue
        if match := _FILE_LINE.match(raw):
            yield Line(match[1], int(match[2]), match[3])


def by_path(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Path -> the lines of that file, in order; the files in the order of their first lines."""
    return grouped((line.path, line) for line in lines)


@dataclass(frozen=True)
class Probe:
    """The observation of one subject: its sections, and the parser of their output."""

    subject: str
    sections: tuple[Section, ...]
    parse: Callable[[Mapping[str, Output], Policy], Any]


def number(text: str, noun: str) -> int:
    """``text`` as a whole number. Raises ProbeError, with the text, for any other text."""
    try:
        return int(text.strip())
    except ValueError:
        raise ProbeError(f"{noun} is no number", text) from None


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Key -> its values; both in the order in which they come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def cached_last(make: Callable[..., T]) -> Callable[..., T]:
    """Cache the last results: the checks of a node, or the nodes of a run, pass the same, or
    those of a handful of groups. They are compared by identity: hashing a large fleet's takes
    milliseconds per node.
    """
    last: list[tuple[tuple[Any, ...], T]] = []

    @wraps(make)
    def cached(*arguments: Any) -> T:
        for known_arguments, result in last:
            if all(map(is_, known_arguments, arguments)):
                return result
        last[7:], result = [], make(*arguments)
        last.insert(0, (arguments, result))
        return result

    return cached


def frozen(observation: Any) -> Any:
    """The observation, or a part of one, made read-only so that nodes can share it."""
    if isinstance(observation, Mapping):
        return MappingProxyType({key: frozen(value) for key, value in observation.items()})
    if isinstance(observation, list) or type(observation) is tuple:
        return tuple(map(frozen, observation))
    if isinstance(observation, set):
        return frozenset(observation)
    if is_dataclass(observation):
        for name, value in vars(observation).items():
            frozen_value = frozen(value)
            if frozen_value is not value:
                object.__setattr__(observation, name, frozen_value)
    return observation


def _read_only(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


# So that it can be sent to another process.
copyreg.pickle(MappingProxyType, lambda shared: (_read_only, (dict(shared),)))  # type: ignore


#: PAM's directories of service files; the first file counts (Linux-PAM's pam_handlers.c: the
#: administrator's directory, the distribution's, the vendor's).
PAM_DIRECTORIES = ("/etc/pam.d", "/usr/lib/pam.d", "/usr/etc/pam.d")


def kernel_arguments(text: str) -> tuple[str, ...]:
    """The arguments that the kernel takes from a command line, in order, with their quotes.

    They are split at white space outside double quotes; what follows ``--`` is init's
    (kernel/params.c, parse_args).
    """
    arguments = re.findall(r"(?:[^\s\"]|\"[^\"]*(?:\"|$))+", text)
    return tuple(arguments[: arguments.index("--")] if "--" in arguments else arguments)
