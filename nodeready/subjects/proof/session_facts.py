"""Sessions of the job's user on a node: how they are opened, their limits and resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.core import wire


@dataclass(frozen=True)
class User:
    """The user in whose session the proofs ran."""

    name: wire.Name
    uid: wire.Uid  # -1: the node has no such user
    named: bool  # the command line or the policy names the user
    error: wire.Line  # why there is no session; "": there is one


@dataclass(frozen=True)
class Limit:
    """A resource limit in kernel units; -1: unlimited."""

    soft: int
    hard: int


@dataclass(frozen=True)
class SessionLimits:
    """The limits of the session."""

    JSON_KEYS: ClassVar = {"further": "others", "opener": "way"}

    core: Limit
    memlock: Limit
    nofile: Limit
    # the limits that PAM gave to su, in the order of ITEMS, before the user's profile was read; ()
    # where the session is not su's
    before: tuple[Limit, ...]
    # the hard limits that no process on this node can exceed, in the order of ITEMS, where root
    # may raise none; () on every usual node
    ceiling: tuple[int, ...]
    nr_open: int | None  # fs.nr_open: no process may have more open files; None: unreadable
    opener: wire.Name = ""  # who opened the session: a key of `SESSION_NAMES`; "": unknown
    # the soft limits in the order of OTHER_ITEMS, -1: unlimited; (): not seen
    further: tuple[int, ...] = ()


#: Limits that no policy names and that can end a job -> their names in /proc/PID/limits.
OTHER_ITEMS = {
    "as": "Max address space", "data": "Max data size", "fsize": "Max file size",
    "cpu": "Max cpu time", "stack": "Max stack size", "nproc": "Max processes",
    "rttime": "Max realtime timeout",
}  # fmt: skip
#: The kinds of sessions in which a job's processes start -> their names in results.
SESSION_NAMES = {
    "ssh": "ssh", "su": "su -", "shell": "a shell as sshd starts it", "login": "a login shell",
    "srun": "srun", "slurmd": "slurmd",
}  # fmt: skip


@dataclass(frozen=True)
class PamLine:
    """A line of a file of pam.d that calls one of the modules `LOGIN_MODULES`."""

    JSON_KEYS: ClassVar = {"source": "where"}

    module: wire.Name  # without ``pam_`` and ``.so``
    words: wire.Line  # the module's arguments, with a blank between them
    source: wire.Line  # the line, ``/path:number``


@dataclass(frozen=True)
class Service:
    """The PAM stack of one service."""

    JSON_KEYS: ClassVar = {"is_complete": "whole"}

    name: wire.Name  # the service: ``ssh``, ``su`` or ``slurm``
    path: wire.Path  # its file; "": no file can be read
    is_complete: bool  # all files that it includes could be read
    # of its account and session stacks, with included files, in their order
    lines: tuple[PamLine, ...]


@dataclass(frozen=True)
class LimitsLine:
    """A line of limits.conf or limits.d that sets a limit of the policy's for less than all."""

    path: wire.Path
    number: wire.Count
    text: wire.Line


@dataclass(frozen=True)
class Logins:
    """How this node opens sessions, for the causes of differences between them."""

    JSON_KEYS: ClassVar = {"notice": "says"}

    services: tuple[Service, ...]  # the PAM stacks of the services that use PAM
    # sshd asks PAM (UsePAM); None: only root can tell, or sshd's configuration is refused
    use_pam: bool | None
    nologin: wire.Path  # the file that closes logins to all users but root; "": there is none
    notice: wire.Line  # the first line of that file
    shutdown: bool  # a shutdown is scheduled
    # the limits of sshd itself, in the order of ITEMS; (): sshd does not run
    sshd: tuple[Limit, ...]
    # the limits of slurmd, which its jobs inherit; (): slurmd does not run
    slurmd: tuple[Limit, ...]
    lines: tuple[LimitsLine, ...]  # limits for some users and groups alone
    # the words for the user in such a line: the name, ``@`` and each group's name, and ``:`` and
    # ``@:`` with their numbers
    domains: tuple[wire.Name, ...]


#: The modules of PAM that decide whether there is a session, or which limits it has.
LOGIN_MODULES = ("limits", "access", "nologin", "time", "listfile", "succeed_if")


#: Where programs of one node share memory (shm_overview(7)).
SHM = "/dev/shm"


@dataclass(frozen=True)
class JobDirectory:
    """A directory that jobs write to."""

    path: wire.Path
    error: wire.Line = ""  # why the user cannot write there; "": written, and mapped
    exec_error: wire.Line = ""  # why no code can be mapped from a file there; "": it can
    free_bytes: wire.Number = 0  # for the user, after that


@dataclass(frozen=True)
class DeviceNode:
    """A device file that its mode keeps from the user. mode: ``0660 root:video``"""

    path: wire.Path
    mode: wire.Line


@dataclass(frozen=True)
class Resources:
    """The directories and devices of a job, as its user can use them."""

    places: tuple[JobDirectory, ...]  # /tmp, shared memory, the home
    devices: tuple[DeviceNode, ...]  # of GPUs and RDMA that the user cannot open
    home: wire.Path
    # the most that shared memory can grow by, however large its file system; None: unreadable
    memory_bytes: wire.Number | None = None
