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
_DPKG = "/var/lib/dpkg/info"
_DIVERSIONS = "/var/lib/dpkg/diversions"
_PROGRAMS = "^(/usr)?(/local)?/s?bin/[^/]+$"
#: In the order of preference: Debian and openSUSE can have dnf installed as well.
MANAGERS = ("apt-get", "zypper", "dnf", "yum")


# Rows for the program and for each directory on the way to it, also on the way to a link's target:
# who can change them. The program's row is the last. The script runs the program only where root
# alone can change it, and where the digest does not reveal its version. A link to a link counts as
# changeable by others: the probe does not follow the links between.
def _py_spy(version: str) -> str:
    digests = "|".join(digest for (of, _), digest in DIGESTS.items() if of == version) or "none"
    return rf"""
    nr_line=
    {{ read -r nr_line </proc/sys/kernel/arch; }} 2>/dev/null
    printf 'machine=%s\n' "${{nr_line:-$(uname -m)}}"
    if [ -e {PY_SPY} ] && [ ! -f {PY_SPY} ]; then printf 'no_file={PY_SPY}\n'; fi
    nr_file={PY_SPY} nr_alone=1
    if [ -L {PY_SPY} ]; then
        nr_file=$(readlink -f {PY_SPY})
        if [ "$nr_file" != "$(readlink {PY_SPY})" ]; then
            nr_alone=
            printf 'hops=1\n'
        fi
        case $nr_file in *[!A-Za-z0-9/._+-]*) nr_file= ;; esac
        printf 'link=%s\n' "$nr_file"
    fi
    if [ -f "$nr_file" ]; then
        # The mode allows root to execute it, and the mount forbids it.
        if [ ! -x "$nr_file" ]; then printf 'noexec=1\n'; fi
        set -- {PY_SPY_NOTE} {_NOTE_DIRECTORY} /
        for nr_dir in {PY_SPY} "$nr_file"; do
            while nr_dir=${{nr_dir%/*}}; [ -n "$nr_dir" ]; do set -- "$@" "$nr_dir"; done
        done
        nr_out=$(stat -Lc '%i %s %.9Y %.9Z at=%u %g %a %n' -- {RUN} "$@" "$nr_file" 2>/dev/null)
        nr_known='' nr_sum=''
        IFS='
'
        for nr_row in $nr_out; do
            nr_id=${{nr_row%% at=*}}
            case ${{nr_row#* at=}} in
            *' {RUN}') nr_rank=${{nr_row#* at=}}; continue ;;
            '0 0 644 {PY_SPY_NOTE}') nr_known=$nr_known+ ;;
            '0 0 755 {_NOTE_DIRECTORY}') nr_known=$nr_known+ ;;
            *' {PY_SPY_NOTE}'|*' {_NOTE_DIRECTORY}') ;;
            *) printf 'at=%s\n' "${{nr_row#* at=}}" ;;
            esac
            case ${{nr_row#* at=}} in '0 '*[0145]' /'*) ;; *) nr_alone= ;; esac
        done
        unset IFS
        case ${{nr_row#* at=}} in '0 '*[0145][0145]' /'*) ;; *) nr_alone= ;; esac
        if [ "$nr_known" = ++ ]; then
            read -r nr_sum nr_noted <{PY_SPY_NOTE}
            if [ "$nr_noted" != "$nr_id" ]; then nr_sum=; fi
        fi
        if [ -z "$nr_sum" ]; then nr_sum=$(sha256sum <"$nr_file"); nr_sum=${{nr_sum%% *}}; fi
        printf 'sha256=%s\n' "$nr_sum"
        case $nr_sum in
        {digests}) ;;
        *)
            if [ -n "$nr_alone" ]; then
                nr_say version "$(timeout -k 1 2 "$nr_file" --version 2>/dev/null)"
            fi
            ;;
        esac
    fi
    """


_RANK_PROGRAM = rf"""
    if [ -f {RUN} ]; then
        nr_sum=$(sha256sum <{RUN})
        set -- ${{nr_rank:-$(stat -Lc '%u %g %a' {RUN})}}
        printf 'run=%s %s %s\n' "$1" "$3" "${{nr_sum%% *}}"
    elif [ -e {RUN} ]; then printf 'no_file={RUN}\n'
    fi
"""


def _script(policy: Policy) -> str:
    # A package counts as installed when a command of its name exists (built by hand, from a module
    # tree), or when the package manager has it: not every package has such a command. In the
    # second case the programs in the package manager's list must exist.
    names = " ".join(shell.quote(name) for name in policy.packages)
    packages = rf"""
    nr_lists=
    for nr_name in {names}; do
        nr_list={_DPKG}/$nr_name.list
        if [ ! -e {_DPKG}/"$nr_name".md5sums ]; then
            # Reading that directory takes longer than the rest of this script.
            nr_list=
            for nr_file in {_DPKG}/"$nr_name":*.md5sums; do
                if [ -e "$nr_file" ]; then nr_list=${{nr_file%.md5sums}}.list; fi
            done
        fi
        if [ -n "$nr_list" ]; then printf 'registered=%s\n' "$nr_name"; fi
        if command -v "$nr_name" >/dev/null 2>&1; then continue; fi
        if [ -n "$nr_list" ]; then
            nr_lists="$nr_lists $nr_list"
        elif [ ! -d {_DPKG} ] && command -v rpm >/dev/null &&
            rpm -q "$nr_name" >/dev/null 2>&1; then
            printf 'registered=%s\n' "$nr_name"
            for nr_file in $(rpm -ql "$nr_name" | grep -E '{_PROGRAMS}'); do
                nr_broken "$nr_name" "$nr_file"
            done
        else
            printf 'missing=%s\n' "$nr_name"
        fi
    done
    for nr_row in ${{nr_lists:+$(grep -asHE '{_PROGRAMS}' $nr_lists /dev/null)}}; do
        nr_name=${{nr_row%%.list:*}}
        nr_name=${{nr_name##*/}}
        nr_broken "${{nr_name%%:*}}" "${{nr_row#*.list:}}"
    done
    """
    broken = rf"""
    nr_broken() {{
        if [ -s "$2" ] && [ -x "$2" ]; then return; fi
        nr_word=mode
        if [ ! -s "$2" ]; then nr_word=empty; fi
        if [ ! -e "$2" ]; then
            # Another package has moved it on purpose.
            if grep -asqxF "$2" {_DIVERSIONS}; then return; fi
            nr_word=gone
        fi
        printf 'broken=%s %s %s\n' "$1" "$nr_word" "$2"
    }}
    """
    managers = f"nr_have {' '.join(MANAGERS)}\n"
    py_spy = _py_spy(policy.py_spy_version) if policy.py_spy_version else ""
    run = _RANK_PROGRAM if policy.nodeready_run else ""
    parts = [broken + packages if policy.packages else "", managers, PYTHONS_SCRIPT, py_spy, run]
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
