"""What a probe is: sections of shell that read a node, and the parser of what they print.

Beside it, what several subjects share: names that sort last in a directory, counters that only
grow, and the probe that reads the files of ours.
"""

from __future__ import annotations

import base64
import binascii
import copyreg
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import wraps
from itertools import compress, count
from operator import ne
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Callable, Generic, TypeVar

if TYPE_CHECKING:
    # The proofs travel to the nodes with this module, and need no policy there.
    from nodeready.policy import Policy


Made = TypeVar("Made")


class ProbeError(Exception):
    """A section's output makes no sense. ``evidence`` holds the output's first bytes."""

    def __init__(self, reason: str, evidence: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.evidence = evidence[:200]


@dataclass(frozen=True)
class Unknown:
    """A subject that could not be observed on a node: why, and the first bytes of what came."""

    reason: str
    evidence: str = ""


@dataclass(frozen=True)
class Section:
    """One piece of the snapshot: a shell text that only reads, under limits of its own.

    script:    policy -> the POSIX sh text, which may call nr_value and the other helpers of
               nodeready/sh/probe.sh
    timeout_s: seconds after which the section is ended; reading /etc takes milliseconds, but a
               home directory or a mount can hang
    cap_bytes: output beyond this is cut off on the node
    beside:    the section starts a program that may be slow or hang for good (a vendor's tool, a
               mount): it runs beside the other sections, and a program that cannot be ended is
               left behind, not waited for
    quick:     of a section that runs beside: mostly it needs no longer than the other sections, so
               it is first tried in one shell with them, as one of the last
    first:     the section runs before all others that run together: they use what it has seen
    when:      for a section that runs beside: a shell command that says whether there is anything
               to run (``command -v nvidia-smi >/dev/null``); when not, the section is empty
    """

    name: str
    script: Callable[[Policy], str]
    timeout_s: int = 5
    cap_bytes: int = 262144
    beside: bool = False
    quick: bool = False
    first: bool = False
    when: str = ":"


_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
#: Characters of a path; more than the kernel takes (PATH_MAX).
_PATH = 8192


#: What ends a line for str.splitlines, beside a newline, of ASCII.
_OTHER_ENDS = ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e")


@dataclass(frozen=True)
class Output:
    """What one section printed.

    text:      the bytes as text (surrogateescape)
    rc:        the exit status; None: the section was ended by its limit
    truncated: the output reached the section's cap_bytes
    nonce:     the run's, which marks the lines of our own helpers
    """

    text: str
    rc: int | None
    truncated: bool = False
    nonce: str = ""

    def require(self) -> str:
        """The text of a section that ended well. Raises ProbeError for one that did not."""
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
        # A line is mostly another one.
        values, position = [], 0 if text.startswith(start) else text.find(f"\n{start}") + 1
        while position or text.startswith(start, position):
            begin = position + len(start)
            end = text.find("\n", begin)
            values.append(text[begin : end if end >= 0 else len(text)])
            position = text.find(f"\n{start}", end) + 1 if end >= 0 else 0
            if not position:
                break
        return values

    def files(self) -> dict[str, bytes]:
        """The files that nr_exact printed, path -> the bytes as they are on the node."""
        contents = dict[str, bytes]()
        for path, printed, _ in self._blocks():
            if path.startswith("/"):
                size = re.match(r"size=(\d{1,9})\n", printed)
                if size:
                    contents[path] = _of_size(path, int(size[1]), printed[size.end() :])
                else:
                    contents[path] = decoded(printed)
        return contents

    def lines(self) -> Iterator[Line]:
        """The lines that nr_lines printed, without those of the files of nr_exact."""
        text, position = f"\n{self.require()}\n", 0
        for _, _, (begin, end) in self._blocks():
            yield from file_lines(text[position:begin])
            position = end
        yield from file_lines(text[position:])

    def _blocks(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """Of each file of nr_exact its path, what was printed of it, and where in the text, which
        has a line's end before and after it."""
        begin, end = f"\n@{self.nonce} file ", f"\n@{self.nonce} eof\n"
        text, position = f"\n{self.require()}\n", 0
        while (first := text.find(begin, position)) >= 0:
            path, _, _ = text[first + len(begin) : first + len(begin) + _PATH].partition("\n")
            start = first + len(begin) + len(path)
            until = text.find(end, start)
            if until < 0:
                break
            position = until + len(end) - 1
            yield path, text[start + 1 : max(until, start + 1)], (first, position)


def _of_size(path: str, size: int, text: str) -> bytes:
    """The bytes of a file in its lines as nr_lines printed them. Raises ProbeError.

    The size tells whether the last line has an end.
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


def decoded(text: str) -> bytes:
    """The bytes that a node's base64 printed. Raises ProbeError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ProbeError("a file that is not whole", text) from None


@dataclass(frozen=True)
class Line:
    """One line of a file on the node. ``text`` has no line end; ``where`` is ``/path:number``."""

    path: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


# The first number between colons ends the path, unless it is part of a PCI address (0000:52:00.0).
_FILE_LINE = re.compile(
    r"(/[^:]*(?::[^:]*)*?)"
    r":(?!(?<=/[0-9a-f]{4}:)[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])([0-9]{1,12}):(.*)",
    re.S,
)


#: The numbers of most lines.
_NUMBERS = {str(number): number for number in range(1, 1000)}


def file_lines(text: str) -> Iterator[Line]:
    """The lines that nr_lines printed (``/path:number:text``); other lines are passed over.

    A PCI address in a path is told from a line's number. Another path with a number between
    colons (``/etc/a:1:b.conf``) is not: its lines pass for lines of ``/etc/a``.
    """
    for raw in text.split("\n"):
        if not raw.startswith("/"):
            continue
        # Mostly there is no colon in the path, and no PCI address: that is seen sooner.
        path, _, numbered = raw.partition(":")
        number, colon, line = numbered.partition(":")
        if colon and number in _NUMBERS and path[-5:-4] != "/":
            yield Line(path, _NUMBERS[number], line)
            continue
        match = _FILE_LINE.match(raw)
        if match:
            yield Line(match[1], int(match[2]), match[3])


def by_path(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Path -> the lines of that file, in order; the files in the order of their first lines."""
    lines_by_path: dict[str, list[Line]] = {}
    for line in lines:
        lines_by_path.setdefault(line.path, []).append(line)
    return lines_by_path


@dataclass(frozen=True)
class Probe:
    """How one subject is observed: its sections, and the parser of what they print."""

    subject: str
    sections: tuple[Section, ...]
    parse: Callable[[Mapping[str, Output], Policy], Any]


def number(text: str, noun: str) -> int:
    """``text`` as a whole number. Raises ProbeError, with the text, when it is none."""
    try:
        return int(text.strip())
    except ValueError:
        raise ProbeError(f"{noun} is no number", text) from None


def of_one_node(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """The function, made once of the observation that several checks give it one after another."""
    last: list[tuple[Any, Made]] = []

    @wraps(make)
    def made(observation: Any) -> Made:
        if not last or last[0][0] is not observation:
            last[:] = [(observation, make(observation))]
        return last[0][1]

    return made


def of_all_nodes(make: Callable[[tuple[str, ...]], Made]) -> Callable[[tuple[str, ...]], Made]:
    """The function, made once of the tuple that is given for every node of a run.

    By its identity: that of a large fleet takes milliseconds to be hashed, and has so for each
    node.
    """
    last: list[tuple[tuple[str, ...], Made]] = []

    def made(nodes: tuple[str, ...]) -> Made:
        if not last or last[0][0] is not nodes:
            last[:] = [(nodes, make(nodes))]
        return last[0][1]

    return made


def frozen(observation: Any) -> Any:
    """An observation, or a part of one, that many nodes may share: nobody can change it."""
    if isinstance(observation, Mapping):
        return MappingProxyType({key: frozen(value) for key, value in observation.items()})
    if isinstance(observation, tuple) and type(observation) is tuple:
        return tuple(map(frozen, observation))
    if isinstance(observation, (list, set)):
        return (
            tuple(map(frozen, observation))
            if isinstance(observation, list)
            else frozenset(observation)
        )
    if is_dataclass(observation):
        for name, value in vars(observation).items():
            frozen_value = frozen(value)
            if frozen_value is not value:
                object.__setattr__(observation, name, frozen_value)
    return observation


def _read_only(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


# So that another process can be given it.
copyreg.pickle(MappingProxyType, lambda shared: (_read_only, (dict(shared),)))  # type: ignore


# --- A text like one that was read before: thousands of nodes differ by a few values.


def changed(instance: Made, **fields: Any) -> Made:
    """The frozen dataclass with these fields. `dataclasses.replace` takes thirty times as long."""
    copy: Made = object.__new__(type(instance))
    vars(copy).update(vars(instance), **fields)
    return copy


def unequal(lines: Iterable[str], other_lines: Iterable[str]) -> list[int]:
    """The numbers of the lines, of as many, that are not the same."""
    return [*compress(count(), map(ne, lines, other_lines))]


@dataclass(frozen=True, eq=False)
class Alike(Generic[Made]):
    """A text of lines ``PATH:VALUE`` that was read in full.

    read:   what was read of it
    varies: number of a line -> what stands before its value, and the name of that value, where
            another value changes no more than what is made of it
    context: what else the reading depends on
    """

    lines: tuple[str, ...]
    read: Made
    varies: Mapping[int, tuple[str, str]]
    context: tuple[object, ...] = ()

    @classmethod
    def of(cls, lines: list[str], read: Made, varies: Callable[[str], bool]) -> Alike[Made]:
        """varies: whether the value of a path is such a one; one with several lines is none."""
        starts = [line[: line.find(":") + 1] for line in lines]
        counts = Counter(starts)
        varying = {
            index: (start, start[:-1])
            for index, start in enumerate(starts)
            if start and counts[start] == 1 and varies(start[:-1])
        }
        return cls(tuple(lines), read, varying)

    def differing(self, lines: list[str]) -> dict[str, str] | None:
        """Name -> the other value, of as many lines as here; None where more than this differs."""
        differing_values: dict[str, str] = {}
        for index in unequal(lines, self.lines):
            start, name = self.varies.get(index, ("", ""))
            if not start or not lines[index].startswith(start):
                return None
            differing_values[name] = lines[index][len(start) :]
        return differing_values


class Known(Generic[Made]):
    """The texts of one section that were read in full, the latest of each length."""

    #: Texts of one length, characters of a text that is kept.
    _EACH, _LONGEST = 4, 1 << 16

    def __init__(self, lengths: int = 64) -> None:
        self._lengths = lengths
        self._known: dict[tuple[object, ...], list[Alike[Made]]] = {}

    def of(self, lines: list[str], *context: object) -> tuple[Alike[Made], ...]:
        """Those of as many lines; the one that was of use last comes first."""
        return tuple(self._known.get((len(lines), lines[0], context), ()))

    def used(self, template: Alike[Made]) -> None:
        """This one was like a node's: what odd nodes print does not drive it out."""
        templates = self._known[len(template.lines), template.lines[0], template.context]
        if templates[0] is not template:
            templates.remove(template)
            templates.insert(0, template)

    def keep(self, template: Alike[Made]) -> None:
        if sum(map(len, template.lines)) > self._LONGEST:
            return
        key = len(template.lines), template.lines[0], template.context
        templates = self._known.pop(key, [])
        if len(self._known) >= self._lengths:
            del self._known[next(iter(self._known))]
        self._known[key] = [*templates[: self._EACH - 1], template]


#: Where PAM looks for a service's file, the first one counts (Linux-PAM's pam_handlers.c: its own
#: directory, the distribution's, the vendor's).
PAM_DIRECTORIES = ("/etc/pam.d", "/usr/lib/pam.d", "/usr/etc/pam.d")


def kernel_arguments(text: str) -> tuple[str, ...]:
    """The arguments that the kernel takes from a command line, in order, with their quotes.

    They are split at white space outside double quotes; what follows ``--`` is init's
    (kernel/params.c, parse_args).
    """
    arguments = re.findall(r"(?:[^\s\"]|\"[^\"]*(?:\"|$))+", text)
    return tuple(arguments[: arguments.index("--")] if "--" in arguments else arguments)


# --- Directories in which the last file by name wins: whether a file of ours can be the last.
#
# The name of such a file of ours begins with as many z's as it takes (nodeready.deploy.step,
# ``name_after``). A few names sort behind any number of z's.

#: A file name has at most 255 bytes (limits.h, NAME_MAX), and ours goes on behind its z's.
_MOST_ZS = 200


def beatable(name: str) -> bool:
    """Whether some number of z's sorts behind ``name``: not so for ``~x.conf``, ``zz{.conf``."""
    tail = name.lstrip("z")
    return len(name) - len(tail) < _MOST_ZS and tail[:1] <= "z"


# --- Counters that only ever grow: what an earlier look saw of them.


@dataclass(frozen=True)
class Counters:
    """The counters of one subject at an earlier look at the same boot of the same node.

    A counter of an adapter runs from the last reset or load of its driver, so that a total
    says nothing about today: only the change between two looks does.

    seconds: from the earlier look to the present one
    values:  counter -> its value then; the names are the subject's own ("mlx5_0/1.link_downed")
    """

    seconds: float
    values: Mapping[str, int]


# --- The files that we own outright: read for diffs, and so that a change knows what it replaces.


def is_own(name: str, default: str) -> bool:
    """Whether ``name`` is one under which a file of ours stands in its directory.

    default: the file's usual name. In front of its ``nodeready`` may stand what makes it sort
             elsewhere; a slash or a dot never does, whatever a node says.
    """
    suffix = re.escape(default[default.index("nodeready") :])
    return re.fullmatch(rf"[A-Za-z0-9_-]{{0,{_MOST_ZS}}}{suffix}", name) is not None


#: Why a deploy refuses to write: what it says of the path, and what a person does about that.
#: The rules are those of nr_write and nr_walk (nodeready/sh/change.sh).
_REFUSALS = {
    "null": ("a link to /dev/null", "remove {}"),
    "nowhere": ("a link that leads nowhere", "remove {}"),
    "directory": ("a directory", "remove {}"),
    "special": ("no regular file", "remove {}"),
    "nodir": ("no directory", "remove {}"),
    "fixed": (
        "read-only file system or immutable",
        "make {} writable (mount -o remount,rw; chattr -i)",
    ),
    "theirs": ("not root's", "chown root {}"),
    "loose": ("writable by others than root", "chmod go-w {}"),
}
#: login.defs(5), GID_MIN: a group of persons.
_FIRST_GROUP = 1000


@dataclass(frozen=True)
class Refusal:
    """Why a deploy would not write at a path, and what a person does about that."""

    why: str
    remedy: str


@dataclass(frozen=True)
class OwnFiles:
    """The files of ours on a node.

    files:   path -> its content
    refused: a file's or a directory's path -> why a deploy would not write there
    """

    files: Mapping[str, bytes]
    refused: Mapping[str, Refusal]


def _own_files_script(patterns: tuple[str, ...]) -> str:
    parents = dict.fromkeys(pattern.rpartition("/")[0] for pattern in patterns)
    return rf"""
    set --
    for nr_file in {" ".join(patterns)}; do
        if [ -L "$nr_file" ] && [ ! -e "$nr_file" ]; then printf 'nowhere=%s\n' "$nr_file"
        elif [ "$nr_file" -ef /dev/null ]; then printf 'null=%s\n' "$nr_file"
        elif [ -d "$nr_file" ]; then printf 'directory=%s\n' "$nr_file"
        elif [ -f "$nr_file" ]; then
            set -- "$@" "$nr_file"
            # Not even root: the file is immutable, or its file system is read-only.
            if [ ! -w "$nr_file" ]; then printf 'fixed=%s\n' "$nr_file"; fi
        elif [ -e "$nr_file" ]; then printf 'special=%s\n' "$nr_file"
        fi
    done
    if [ $# != 0 ]; then nr_lines all "$@"; fi
    set --
    for nr_file in {" ".join(parents)}; do
        # A pattern of directories that names none stands for its parent.
        case $nr_file in *\**) nr_file=${{nr_file%/*}} ;; esac
        if nr_writable "$nr_file"; then set -- "$@" "$nr_at"; fi
    done
    if nr_is_roots /proc/self; then printf 'root=1\n'; fi
    for nr_file in "$@"; do
        shift
        if nr_seen_at "$nr_file"; then
            printf 'mode=%s %s %o %s\n' "$nr_uid" "$nr_gid" "$nr_mode" "$nr_file"
        else
            set -- "$@" "$nr_file"
        fi
    done
    if [ $# != 0 ]; then stat -Lc 'mode=%u %g %a %n' "$@" 2>/dev/null; fi
    :
    """


def _parse_own_files(text: str, patterns: Iterable[str]) -> dict[str, bytes]:
    """Path -> the content of that file; every file of ours ends with a newline."""
    # A star stands for no slash: nothing that a node says leads out of the pattern's directory.
    path_pattern = re.compile("|".join(re.escape(p).replace(r"\*", r"[^/\n]*") for p in patterns))
    return {
        path: "".join(f"{line.text}\n" for line in lines).encode("utf-8", "surrogateescape")
        for path, lines in by_path(file_lines(text)).items()
        if path_pattern.fullmatch(path)
    }


def _refused(output: Output) -> dict[str, Refusal]:
    """Where a deploy would not write, and why. Only what root sees tells that."""
    if not output.all("root"):
        return {}
    kinds_of_refusal = [(path, kind) for kind in _REFUSALS for path in output.all(kind)]
    for text in output.all("mode"):
        match = re.fullmatch(r"(\d{1,10}) (\d{1,10}) ([0-7]{1,5}) (/.*)", text)
        if match is None:
            continue
        uid, gid, mode, path = match.groups()
        if path.endswith("/nodeready"):
            # A directory of ours, which a deploy makes root's again.
            continue
        if uid != "0":
            kinds_of_refusal.append((path, "theirs"))
        elif int(mode, 8) & 0o2 or (int(mode, 8) & 0o20 and int(gid) >= _FIRST_GROUP):
            kinds_of_refusal.append((path, "loose"))
    return {
        path: Refusal(_REFUSALS[kind][0], _REFUSALS[kind][1].format(path))
        for path, kind in kinds_of_refusal
    }


def own_files(patterns: Iterable[str]) -> Probe:
    """The probe ``ours``, which reads every file of these shell patterns.

    It also sees where a deploy would not write.
    """
    chosen = tuple(dict.fromkeys(patterns))
    text = _own_files_script(chosen)

    def parse(outputs: Mapping[str, Output], policy: Policy) -> OwnFiles:
        output = outputs["ours"]
        return OwnFiles(_parse_own_files(output.require(), chosen), _refused(output))

    return Probe("ours", (Section("ours", lambda policy: text),), parse)
