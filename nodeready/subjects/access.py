"""The files that an ordinary user of a node may read and run, by their modes.

A probe runs as root, and root may read everything. So the probe reads the mode of each file that
users' programs read, of each program that users run, and of every directory above them. The bits
for others apply to a user who is neither the owner nor in the group (path_resolution(7)).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from nodeready.core import shell
from nodeready.core.base import Output, Section, frozen

if TYPE_CHECKING:
    from nodeready.core.policy import Policy
    from nodeready.core.result import Check, Result

#: The directories in the PATH of every node; a deploy changes no program elsewhere.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

#: Files that ssh and the shells of every user read; shell patterns, with stars only.
OPEN_FILES = (
    "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_config", "/usr/etc/ssh/ssh_config",
    "/etc/ssh/ssh_config.d/*.conf", "/usr/etc/ssh/ssh_config.d/*.conf",
    "/etc/profile.d/*nodeready*", "/etc/pdsh/rcmd_default", "/etc/environment",
    *(f"{parent}/pdsh/sshcmd.so" for parent in ("/usr/lib", "/usr/lib64", "/usr/lib/*-linux-*")),
)  # fmt: skip
#: The directories of the files that a deploy writes, beside the policy's directory of cores;
#: shell patterns. They are read here once, so that no later section starts a process for them.
WRITTEN_FOLDERS = (
    "/etc/sysctl.d", "/etc/tmpfiles.d", "/etc/systemd/coredump.conf.d",
    "/etc/security/limits.d", "/etc/systemd/system/*.service.d", "/etc/ssh/ssh_config.d",
    "/etc/profile.d", "/etc/default/grub.d", "/etc/systemd/system", "/etc/cron.d",
    "/etc/nodeready", "/usr/local/lib/nodeready",
)  # fmt: skip
#: Program -> the programs that it cannot do without: Debian's pdsh is a script around pdsh.bin.
COMPANIONS = {"pdsh": ("pdsh.bin",)}
#: Maximum programs whose libraries are checked: each costs a process.
MAX_LOADED = 8
#: The dynamic loader's message about a missing library; the library's name follows.
UNLOADED = "error while loading shared libraries: "

#: Permission bits of others.
READ, EXECUTE = 0o4, 0o1
#: Bits of a mode: others may write; in a directory only owners rename and remove.
OTHERS_WRITE, STICKY = 0o2, 0o1000


def _access_script(policy: Policy) -> str:
    names = ("ssh", *(name for name in policy.packages if name != "ssh"))
    programs = tuple(dict.fromkeys(n for name in names for n in (name, *COMPANIONS.get(name, ()))))
    plain = " ".join(name for name in programs if _PROGRAM_NAME.fullmatch(name))
    folders = (*WRITTEN_FOLDERS, policy.core_pattern.rpartition("/")[0])
    paths = (path for folder in folders for path in (*parents(folder)[1:], folder))
    directories = [path for path in dict.fromkeys(paths) if _FOLDER.fullmatch(path)]
    return shell.script(
        "access", OPEN_FILES=" ".join(OPEN_FILES), UNLOADED=UNLOADED,
        PROGRAMS=plain, MAX_LOADED=MAX_LOADED, FOLDERS=" ".join(directories),
    )  # fmt: skip


_FOLDER = re.compile(r"/[A-Za-z0-9/._+*-]+")
_PROGRAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,80}")
_AT = re.compile(r"([0-9a-f]{1,8}) (\d{1,10}) (\d{1,10}) (\d{1,20}) (/.*)")


@dataclass(frozen=True)
class Inode:
    """A file or directory."""

    mode: int  # with the type (stat(2), st_mode)
    uid: int  # numbers of owner and group
    gid: int  # likewise
    size_bytes: int  # of a file's content

    @property
    def is_directory(self) -> bool:
        return self.mode & 0o170000 == 0o040000


@dataclass(frozen=True)
class Barrier:
    """The reason why ordinary users cannot use a file."""

    path: str  # the file, or the directory on the way to it
    words: str  # the problem, with the path
    members: bool = False  # members of a group, not root's, may use it: an administrator's choice
    is_roots: bool = True  # root owns the path, and only the mode is wrong
    dangling: bool = False  # the path is a link that leads nowhere


@dataclass(frozen=True)
class Access:
    """The modes of what users read and run."""

    JSON_KEYS: ClassVar = {"inodes": "seen"}
    inodes: Mapping[str, Inode] = field(default_factory=dict)  # path -> inode, links followed
    links: Mapping[str, str] = field(default_factory=dict)  # path -> real path of a link; "": none
    unloaded: Mapping[str, str] = field(default_factory=dict)  # program -> why it does not start

    def barrier(self, path: str, bits: int = READ) -> Barrier | None:
        """The first of `barriers`; None without one."""
        return next(self.barriers(path, bits), None)

    def barriers(self, path: str, bits: int = READ) -> Iterator[Barrier]:
        """Every reason why ordinary users cannot use this file, in the order of its path.

        bits: READ, EXECUTE or both
        """
        real = self.links.get(path)
        if real == "":
            words = f"{path} is a link that leads nowhere"
            yield Barrier(path, words, is_roots=False, dangling=True)
            return
        for directory in (*parents(path), *(parents(real) if real else ())):
            inode = self.inodes.get(directory)
            if inode is not None and not inode.mode & EXECUTE:
                yield _closed(directory, inode, EXECUTE, "enter")
        inode = self.inodes.get(path)
        if inode is not None and not inode.is_directory and inode.mode & bits != bits:
            yield _closed(path, inode, bits, "run" if bits & EXECUTE else "read")

    def insecure(self, path: str, owners: Collection[int]) -> tuple[str, Inode] | None:
        """The first of a file and the directories above it that others could have changed, with
        its inode: another user owns it, or all may write to it and it is not sticky.

        owners: user numbers that are trusted
        """
        real = self.links.get(path) or path
        for place in dict.fromkeys((*parents(path), *parents(real), path)):
            inode = self.inodes.get(place)
            sticky = inode is not None and inode.is_directory and inode.mode & STICKY
            if inode is not None and (
                inode.uid not in owners or (inode.mode & OTHERS_WRITE and not sticky)
            ):
                return place, inode
        return None

    def programs(self, name: str) -> list[str]:
        """The programs of this name in the order of PATH, and then the links that lead nowhere."""
        paths = dict.fromkeys((*self.inodes, *self.links))
        directories = {path for path, inode in self.inodes.items() if inode.is_directory}
        return [path for path in paths if path.endswith(f"/{name}") and path not in directories]


def parents(path: str) -> list[str]:
    """The directories on the way to a path, from the root."""
    words = path.split("/")[1:-1]
    return ["/", *("/" + "/".join(words[: count + 1]) for count in range(len(words)))]


def _closed(path: str, inode: Inode, bits: int, verb: str) -> Barrier:
    group = inode.mode >> 3
    members = inode.gid != 0 and group & bits == bits
    owner = f" of uid {inode.uid}" if inode.uid else ""
    only = f": only members of gid {inode.gid} can {verb} it" if members else ""
    words = f"{path}{owner} has mode {inode.mode & 0o7777:o}{only or f': users cannot {verb} it'}"
    return Barrier(path, words, members, inode.uid == 0)


def chmod_mends(barrier: Barrier, path: str) -> bool:
    """Whether a deploy may open the barrier: ``path`` itself or a directory above it, root's.

    path: a path that this program chose, never one that only the node named
    """
    is_on_path = barrier.path == path or barrier.path in parents(path)
    return is_on_path and barrier.is_roots and not barrier.members


def closed_result(check: Check, access: Access, path: str) -> Result | None:
    """The result for a file that users cannot read; None: they can. path: as of `chmod_mends`"""
    if (barrier := access.barrier(path)) is None:
        return None
    if barrier.path == path or chmod_mends(barrier, path):
        return check.fixable(barrier.words, barrier.path)
    return check.fail(barrier.words, barrier.path, f"let users read {barrier.path}")


#: Where packages put their programs; a program elsewhere was put there by a person.
PACKAGED = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
#: A smaller file is a script, a larger one a program.
SCRIPT_BYTES = 4096

#: The remedy for a program on a file system that is mounted noexec.
MAY_EXECUTE = (
    "mount -o remount,exec $(findmnt -nT {} -o TARGET), and take noexec out of its line in "
    "/etc/fstab"
)


@dataclass(frozen=True)
class UnusableProgram:
    """A program that ordinary users cannot run."""

    path: str  # of the program, or of the directory on the way to it
    words: str  # the problem
    repair: str = ""  # ``chmod`` the path; ``reinstall`` the file's package; "": a person's work
    chosen: bool = False  # only the members of a group may run it: an administrator's choice


def unusable_program(access: Access, program: str) -> UnusableProgram | None:
    """Why ordinary users cannot run the program that their shell finds; None: they can.

    A shell takes the first file of PATH that its user may run, with any content (execvp(3)).
    """
    first, closed = None, ""
    for path in access.programs(program):
        inode = access.inodes.get(path)
        # The shell must be able to read a script.
        script = inode is not None and inode.size_bytes < SCRIPT_BYTES
        barrier = access.barrier(path, EXECUTE | READ if script else EXECUTE)
        if barrier is not None:
            first, closed = (first, closed) if first else (barrier, path)
            continue
        repair = "reinstall" if path.rpartition("/")[0] in PACKAGED else ""
        if inode is not None and not inode.size_bytes:
            return UnusableProgram(path, f"{path} is empty", repair)
        if path in access.unloaded:
            return UnusableProgram(path, f"{path} does not start: {access.unloaded[path]}", repair)
        return None
    if first is None:
        return None
    folder = closed.rpartition("/")[0]
    if first.dangling:
        return UnusableProgram(first.path, first.words, "reinstall" if folder in PACKAGED else "")
    repair = "chmod" if folder in FOLDERS and chmod_mends(first, closed) else ""
    return UnusableProgram(first.path, first.words, repair, first.members)


def parse_access(outputs: Mapping[str, Output]) -> Access:
    """The modes; none without the section. Raises ProbeError for a section that failed."""
    output = outputs.get(ACCESS.name)
    return Access() if output is None else _access(output)


@lru_cache(maxsize=64)
def _access(output: Output) -> Access:
    # Three subjects read the section, and thousands of nodes print the same.
    inodes, links = dict[str, Inode](), dict[str, str]()
    for row in output.all("at"):
        if match := _AT.fullmatch(row):
            mode, uid, gid, size = int(match[1], 16), int(match[2]), int(match[3]), int(match[4])
            inodes[match[5]] = Inode(mode, uid, gid, size)
    for row in output.all("link"):
        path, _, real = row.partition(" ")
        links[path] = real
    reasons = dict(row.partition(" ")[::2] for row in output.all("unloaded"))
    # For a script, the loader reports that the script itself is no ELF file.
    unloaded = {
        path: reason for path, reason in reasons.items() if not reason.startswith(f"{path}:")
    }
    access: Access = frozen(Access(inodes, links, unloaded))
    return access


ACCESS = Section("access", _access_script, first=True)
