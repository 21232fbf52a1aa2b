"""The debugging tools of a node: the installed packages, the package manager, and py-spy."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import nodeready
from nodeready.core import shell
from nodeready.core.base import Output, Probe, ProbeError, Section
from nodeready.core.policy import Policy
from nodeready.core.shell import OLDEST, PYTHONS, parse_pythons
from nodeready.core.shell import SCRIPT as PYTHONS_SCRIPT
from nodeready.subjects import access
from nodeready.subjects.access import Access, UnusableProgram

# --- /usr/local/bin/nodeready-run: `nodeready run` as one file that needs only a node's Python.

RUN = "/usr/local/bin/nodeready-run"

# For sh, these lines start the first new enough Python; for Python, they are a docstring.
_HEAD = f'''#!/bin/sh
""":"
# Written by nodeready; the next deploy overwrites it.
for name in {" ".join(PYTHONS)}; do
    if "$name" -I -S -c 'import sys; sys.exit(sys.version_info < {OLDEST})' 2>/dev/null; then
        exec "$name" -I -S "$0" "$@"
    fi
done
echo 'nodeready run: no Python {OLDEST[0]}.{OLDEST[1]} or newer' >&2
exit 127
""" \\
'''


@lru_cache(maxsize=1)
def content() -> bytes:
    """The file's bytes, on the control machine and in a node's own program."""
    assert nodeready.__file__ is not None
    path = os.path.join(os.path.dirname(nodeready.__file__), "agent", "run.py")
    # The loader also reads from a zip file.
    loader: Any = nodeready.__loader__
    data: bytes = loader.get_data(path)
    return _HEAD.encode() + data


@lru_cache(maxsize=1)
def digest() -> str:
    return hashlib.sha256(content()).hexdigest()


PY_SPY = "/usr/local/bin/py-spy"
#: A deploy's note about the program: its sha256, and inode, size and times of the file, so that a
#: probe does not read 8 MB again.
_NOTE_DIRECTORY = "/var/lib/nodeready"
PY_SPY_NOTE = f"{_NOTE_DIRECTORY}/py-spy.sha256"
#: sha256 of the program inside the manylinux wheels, per (version, machine).
DIGESTS = {
    ("0.4.3", "x86_64"): "a41205d4925beafd108e1ace85e66c0a1a7adbfcbebcd4441f07848b608886c0",
    ("0.4.3", "aarch64"): "ad6e22882e8dcaced4f0a76fef10d372645cc7b94c48a289ebe1bedb754774ed",
}
#: In the order of preference: Debian and openSUSE can have dnf installed as well.
MANAGERS = ("apt-get", "zypper", "dnf", "yum")


def _script(policy: Policy) -> str:
    parts = [f"nr_have {' '.join(MANAGERS)}", PYTHONS_SCRIPT]
    if policy.packages:
        names = " ".join(shell.quote(name) for name in policy.packages)
        parts.insert(0, shell.script("installed", NAMES=names))
    paths = {"PY_SPY": PY_SPY, "NOTE": PY_SPY_NOTE, "NOTE_DIRECTORY": _NOTE_DIRECTORY, "RUN": RUN}
    if version := policy.py_spy_version:
        digests = "|".join(digest for (of, _), digest in DIGESTS.items() if of == version)
        parts.append(shell.script("py_spy", DIGESTS=digests or "none", **paths))
    if policy.nodeready_run:
        parts.append(shell.script("rank_program", **paths))
    return "\n".join([*parts, ":"])


@dataclass(frozen=True)
class BrokenProgram:
    """A program of a package that no user can run."""

    package: str  # that brings it
    how: str  # ``gone``; ``empty``; ``mode``: not executable at all
    path: str  # of the program


@dataclass(frozen=True)
class RankProgram:
    """/usr/local/bin/nodeready-run on the node."""

    owner: int  # its uid
    mode: int  # its permission bits
    sha256: str  # hexadecimal; "" where it cannot be read


@dataclass(frozen=True)
class DebugTools:
    """The tools of a debugging session on the node."""

    missing: tuple[str, ...] = ()  # the policy's packages that are missing, in the policy's order
    manager: str = ""  # apt-get, zypper, dnf or yum; "" when the node has none of them
    machine: str = ""  # ``uname -m``; "" when the policy leaves py-spy alone
    # the version of /usr/local/bin/py-spy, by its digest, else by its own output; "" when it does
    # not run, or when root must not run it; None: no such file
    py_spy: str | None = None
    mode: int = 0  # permission bits of that file
    sha256: str = ""  # of that file, hexadecimal
    linked: bool = False  # the file is a link
    noexec: bool = False  # the mount forbids to start it
    exposed: tuple[str, ...] = ()  # its file and directories that others than root can change
    closed: tuple[str, ...] = ()  # the directories on the way to it that users cannot enter
    registered: tuple[str, ...] = ()  # the policy's packages that the package manager has
    # broken programs of such packages without a command of the package's name
    broken: tuple[BrokenProgram, ...] = ()
    access: Access = field(default_factory=Access)  # the modes of the programs
    python: str = ""  # the Python for nodeready's programs, of 3.9 or newer; "": there is none
    old_python: str = ""  # without it: the first older one, with its version; "": none
    run: RankProgram | None = None  # the file that starts a rank; None: missing, or not managed
    no_files: tuple[str, ...] = ()  # of py-spy and that file: where a directory or device stands

    @property
    def lost(self) -> tuple[str, ...]:
        """The exposed directories: any user who can change one can replace the program."""
        return tuple(path for path in self.exposed if PY_SPY.startswith(f"{path.rstrip('/')}/"))


_BROKEN = re.compile(r"(\S+) (gone|empty|mode) ((?:/usr)?(?:/local)?/s?bin/[^/\s]+)")


def parse(outputs: Mapping[str, Output], policy: Policy) -> DebugTools:
    """The observation. Raises ProbeError for a machine or mode that makes no sense."""
    output = outputs["debug_tools"]
    values = output.values()
    machine = values.get("machine", "")
    if policy.py_spy_version and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", machine):
        raise ProbeError("uname -m makes no sense", machine)
    rows = [_rights(row) for row in output.all("at")]
    # Not exposed: owned by root, and writable by root alone. A group of the distribution may write
    # to a directory (staff in Debian).
    exposed = [
        path
        for owner, group, mode, path in rows
        if owner or mode & 0o002 or (mode & 0o020 and (group >= _GROUPS or path == rows[-1][3]))
    ]
    if "hops" in values:
        exposed.append(PY_SPY)
    sha256 = values.get("sha256", "")
    # Without root, a file may be unreadable.
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ProbeError(f"the sha256 of {PY_SPY} is none", sha256)
    have = output.all("have")
    printed = re.fullmatch(r"py-spy (\d[\w.+-]*)", values.get("version", ""))
    python = parse_pythons(output.all("python"))
    run = None
    for row in output.all("run")[:1]:
        if (match := re.fullmatch(r"(\d{1,10}) ([0-7]{1,5}) ([0-9a-f]{64})?", row)) is None:
            raise ProbeError(f"the mode of {RUN} is no mode", row)
        run = RankProgram(int(match[1]), int(match[2], 8), match[3] or "")
    versions = {(of, digest): version for (version, of), digest in DIGESTS.items()}
    py_spy = versions.get((machine, sha256)) or (printed[1] if printed else "")
    return DebugTools(
        missing=tuple(name for name in policy.packages if name in output.all("missing")),
        manager=next((name for name in MANAGERS if name in have), ""),
        machine=machine,
        py_spy=py_spy if rows or "link" in values else None,
        mode=rows[-1][2] if rows else 0,
        sha256=sha256,
        linked="link" in values,
        noexec="noexec" in values,
        exposed=tuple(dict.fromkeys(exposed)),
        closed=tuple(
            dict.fromkeys(path for _, _, mode, path in rows[:-1] if not mode & access.EXECUTE)
        ),
        registered=tuple(name for name in policy.packages if name in output.all("registered")),
        broken=tuple(
            BrokenProgram(match[1], match[2], match[3])
            for match in filter(None, map(_BROKEN.fullmatch, output.all("broken")))
            if match[1] in policy.packages
        ),
        access=access.parse_access(outputs),
        python=python.name,
        old_python=python.old,
        run=run,
        no_files=tuple(path for path in (PY_SPY, RUN) if path in output.all("no_file")),
    )


# --- The programs of the policy's packages, from the view of an ordinary user.


def unusable(observed: DebugTools, policy: Policy) -> Iterator[tuple[str, UnusableProgram]]:
    """The policy's installed packages with a program that users cannot run, and that program."""
    for name in policy.packages:
        if name in observed.missing:
            continue
        reported = set[str]()
        for program in (name, *access.COMPANIONS.get(name, ())):
            problem = access.unusable_program(observed.access, program)
            problem = problem or _missing_companion(observed, name, program)
            if problem is not None:
                reported.add(problem.path)
                yield name, problem
        for broken in observed.broken:
            if broken.package == name and broken.path not in reported:
                how = "is not executable" if broken.how == "mode" else f"is {broken.how}"
                words = f"{broken.path} {how}"
                yield name, UnusableProgram(broken.path, words, _repair(broken))


def _missing_companion(observed: DebugTools, package: str, program: str) -> UnusableProgram | None:
    """The missing companion of Debian's script; another program of that name needs none."""
    if program == package or observed.access.programs(program):
        return None
    script = next(iter(observed.access.programs(package)), "")
    inode = observed.access.inodes.get(script)
    is_debians = package in observed.registered and script == f"/usr/bin/{package}"
    if not is_debians or inode is None or inode.size_bytes >= access.SCRIPT_BYTES:
        return None
    return UnusableProgram(f"/usr/bin/{program}", f"/usr/bin/{program} is gone", "reinstall")


def _repair(broken: BrokenProgram) -> str:
    """The repair of a program that no user can run; "": a file in /usr/local has no package."""
    folder, _, name = broken.path.rpartition("/")
    if broken.how == "mode" and folder in access.FOLDERS and name == broken.package:
        return "chmod"
    return "reinstall" if folder in access.PACKAGED else ""


#: Numbers of groups below this are the distribution's (login.defs(5), GID_MIN).
_GROUPS = 1000


def _rights(row: str) -> tuple[int, int, int, str]:
    """(owner, group, mode, path) of a row of stat's. Raises ProbeError."""
    if (match := re.fullmatch(r"(\d{1,10}) (\d{1,10}) ([0-7]{1,5}) (/\S*)", row)) is None:
        raise ProbeError(f"the mode of {PY_SPY} is no mode", row)
    return int(match[1]), int(match[2]), int(match[3], 8), match[4]


PROBE = Probe("debug_tools", (Section("debug_tools", _script), access.ACCESS), parse)
