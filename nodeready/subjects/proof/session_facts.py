"""Sessions of the job's user on a node: how they are opened, their limits and resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nodeready.subjects import wire


@dataclass(frozen=True)
class User:
    """The user in whose session the proofs ran.

    uid:   -1: the node has no such user
    named: the command line or the policy names the user
    error: why there is no session; "": there is one
    """

    name: wire.Name
    uid: wire.Uid
    named: bool
    error: wire.Line


@dataclass(frozen=True)
class Limit:
    """A resource limit in kernel units; -1: unlimited."""

    soft: int
    hard: int


@dataclass(frozen=True)
class SessionLimits:
    """The limits of the session.

    before:  the limits that PAM gave to su, in the order of ITEMS, before the user's profile was
             read; () where the session is not su's
    ceiling: the hard limits that no process on this node can exceed, in the order of ITEMS,
             where root may raise none; () on every usual node
    nr_open: fs.nr_open: no process may have more open files; None: unreadable
    opener:  who opened the session: a key of `SESSION_NAMES`; "": unknown
    further: the soft limits in the order of OTHER_ITEMS, -1: unlimited; (): not seen
    """

    JSON_KEYS: ClassVar = {"further": "others", "opener": "way"}

    core: Limit
    memlock: Limit
    nofile: Limit
    before: tuple[Limit, ...]
    ceiling: tuple[int, ...]
    nr_open: int | None
    opener: wire.Name = ""
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
    """A line of a file of pam.d that calls one of the modules `LOGIN_MODULES`.

    module: without ``pam_`` and ``.so``
    words:  the module's arguments, with a blank between them
    source: the line, ``/path:number``
    """

    JSON_KEYS: ClassVar = {"source": "where"}

    module: wire.Name
    words: wire.Line
    source: wire.Line


@dataclass(frozen=True)
class Service:
    """The PAM stack of one service.

    name:  the service: ``ssh``, ``su`` or ``slurm``
    path:  its file; "": no file can be read
    is_complete: all files that it includes could be read
    lines: of its account and session stacks, with included files, in their order
    """

    JSON_KEYS: ClassVar = {"is_complete": "whole"}

    name: wire.Name
    path: wire.Path
    is_complete: bool
    lines: tuple[PamLine, ...]


@dataclass(frozen=True)
class LimitsLine:
    """A line of limits.conf or limits.d that sets a limit of the policy's for less than all."""

    path: wire.Path
    number: wire.Count
    text: wire.Line


@dataclass(frozen=True)
class Logins:
    """How this node opens sessions, for the causes of differences between them.

    services: the PAM stacks of the services that use PAM
    use_pam:  sshd asks PAM (UsePAM); None: only root can tell, or sshd's configuration is refused
    nologin:  the file that closes logins to all users but root; "": there is none
    notice:   the first line of that file
    shutdown: a shutdown is scheduled
    sshd:     the limits of sshd itself, in the order of ITEMS; (): sshd does not run
    slurmd:   the limits of slurmd, which its jobs inherit; (): slurmd does not run
    lines:    limits for some users and groups alone
    domains:  the words for the user in such a line: the name, ``@`` and each group's name, and
              ``:`` and ``@:`` with their numbers
    """

    JSON_KEYS: ClassVar = {"notice": "says"}

    services: tuple[Service, ...]
    use_pam: bool | None
    nologin: wire.Path
    notice: wire.Line
    shutdown: bool
    sshd: tuple[Limit, ...]
    slurmd: tuple[Limit, ...]
    lines: tuple[LimitsLine, ...]
    domains: tuple[wire.Name, ...]


#: The modules of PAM that decide whether there is a session, or which limits it has.
LOGIN_MODULES = ("limits", "access", "nologin", "time", "listfile", "succeed_if")


#: Where programs of one node share memory (shm_overview(7)).
SHM = "/dev/shm"


@dataclass(frozen=True)
class JobDirectory:
    """A directory that jobs write to.

    error:      why the user cannot write there; "": written, and mapped
    exec_error: why no code can be mapped from a file there; "": it can
    free_bytes: for the user, after that
    """

    path: wire.Path
    error: wire.Line = ""
    exec_error: wire.Line = ""
    free_bytes: wire.Number = 0


@dataclass(frozen=True)
class DeviceNode:
    """A device file that its mode keeps from the user. mode: ``0660 root:video``"""

    path: wire.Path
    mode: wire.Line


@dataclass(frozen=True)
class Resources:
    """The directories and devices of a job, as its user can use them.

    places:  /tmp, shared memory, the home
    devices: of GPUs and RDMA that the user cannot open
    memory_bytes: the most that shared memory can grow by, however large its file system; None:
             unreadable
    """

    places: tuple[JobDirectory, ...]
    devices: tuple[DeviceNode, ...]
    home: wire.Path
    memory_bytes: wire.Number | None = None
