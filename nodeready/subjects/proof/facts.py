"""All that the proofs of one node saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError, Unknown

# --- The job's ports between the nodes, as all nodes together saw them.


@dataclass(frozen=True)
class Busy:
    """A port on which we could not listen, and what the kernel said."""

    port: int
    error: str


@dataclass(frozen=True)
class Blocked:
    """One thing that is wrong with the connections of a node, named once for all of them.

    kind:  ``target``: others do not reach it; ``source``: it does not reach others; ``both``;
           ``pair``: it does not reach one peer, and neither is to blame for more
    ports: on which; (): it came to no connection, for the name already led astray
    peers: the others
    tried: how many others there were attempts with, in that direction
    cause: one line
    back:  whether the other direction works; None: nobody tried
    """

    kind: str
    ports: tuple[int, ...]
    peers: tuple[str, ...]
    tried: int
    cause: str
    back: bool | None


@dataclass(frozen=True)
class Mesh:
    """How a node's connections to others and from others went on the job's ports.

    nodes:     how many nodes took part; 1: it is alone
    first, last: the range
    listening: the ports of the range on which we listened here for a while
    busy:      those that we tried in vain
    to:        how many nodes it tried to reach
    by:        how many tried to reach it
    reached:   how many of the former it reached, on all ports that were tried
    reached_by: by how many of the latter it was
    blocked:   what is wrong, for which this node is to blame
    median_ms: of the handshakes of its own connections; None: none came about
    worst_ms:  the slowest of them
    worst_peer: to this node
    """

    nodes: int
    first: int
    last: int
    listening: tuple[int, ...]
    busy: tuple[Busy, ...]
    to: int
    by: int
    reached: int
    reached_by: int
    blocked: tuple[Blocked, ...]
    median_ms: float | None
    worst_ms: float | None
    worst_peer: str


# --- What the proofs of one node see: plain data, filled on the node and judged by the checks.

#: Seconds that the kernel may take to write the core of a shell, some 400 kB.
DUMP_S = 10


@dataclass(frozen=True)
class User:
    """Whose session the proofs ran in.

    uid:   -1: there is no such user
    named: somebody asked for this user
    error: why there is no session; "": there is one
    """

    name: str
    uid: int
    named: bool
    error: str


@dataclass(frozen=True)
class Limit:
    """In kernel units; -1: unlimited."""

    soft: int
    hard: int


@dataclass(frozen=True)
class SessionLimits:
    """The limits of the session.

    before:  those that su had from PAM, in the order of ITEMS, before the user's profile was read;
             () where the session is not su's
    ceiling: the hard limits that nobody on this node can exceed, in the order of ITEMS: its root
             may not raise any; () on every usual node
    nr_open: fs.nr_open: no process may have more open files; None: unreadable
    """

    core: Limit
    memlock: Limit
    nofile: Limit
    before: tuple[Limit, ...]
    ceiling: tuple[int, ...]
    nr_open: int | None


#: Exit status of a tool that is there and cannot be started, as a shell has it.
NO_START = 126


@dataclass(frozen=True)
class Attempt:
    """How a tool fared.

    tool:    its path; "": it is not installed, and nothing else here means anything
    rc:      its exit status, negative for a signal, NO_START; None: ended by its limit
    said:    what it complained about, on one line
    good:    it showed what it should
    refused: it was not permitted to look at its target
    limit_s: seconds that it had
    full:    these were all that it may have: not the end of the run cut them short
    state:   its target's afterwards, the letter of /proc; "": gone
    tracer:  who traces the target afterwards
    answers: the target went on: it did what it was told afterwards
    """

    tool: str
    rc: int | None = 0
    said: str = ""
    good: bool = False
    refused: bool = False
    limit_s: int = 0
    full: bool = True
    state: str = ""
    tracer: int = 0
    answers: bool = True


@dataclass(frozen=True)
class Guards:
    """What may keep this process from attaching to another one of its user.

    yama:        kernel.yama.ptrace_scope in force; None: no Yama in this kernel
    deny_ptrace: SELinux enforces and its boolean is on; None: no such boolean
    capable:     CAP_SYS_PTRACE is effective
    bounded:     CAP_SYS_PTRACE is not in the bounding set: nobody here can have it, root neither
    """

    yama: int | None
    deny_ptrace: bool | None
    capable: bool
    bounded: bool


@dataclass(frozen=True)
class Attach:
    """What py-spy made of a canary of the same user.

    guards: what may refuse it
    error:  why no canary came up; "": it did
    """

    guards: Guards
    error: str
    blocking: Attempt | None
    nonblocking: Attempt | None
    native: Attempt | None


@dataclass(frozen=True)
class Control:
    """What py-spy --nonblocking as root made of a canary of the job's user.

    Where it passes and the user's own attempt fails, it is Yama or the target is not dumpable;
    where both fail, it is a capability that root lacks, SELinux, Yama's scope 3 or py-spy itself.
    """

    guards: Guards
    error: str
    attempt: Attempt | None


@dataclass(frozen=True)
class Tracers:
    """What gdb and strace made of a canary each, of the same user.

    guards: what may refuse them
    error:  why no canary came up; "": it did
    """

    guards: Guards
    error: str
    gdb: Attempt | None
    strace: Attempt | None


#: Handlers that keep a report of their own and tell somebody of it, by their programs' names.
REPORTERS = ("apport", "abrt-hook-ccpp")


@dataclass(frozen=True)
class Directory:
    """Where the core was to be written.

    error:      why it cannot be used as a directory; "": it can
    mode:       permission bits
    writable:   for the user
    free_bytes: what the user may still write there
    free_files: files that can still be made there; None: the file system has no such number
    """

    path: str
    error: str = ""
    mode: int = 0
    writable: bool = False
    read_only: bool = False
    free_bytes: int = 0
    free_files: int | None = None


@dataclass(frozen=True)
class Core:
    """What the crash of a sleeping /bin/sh left.

    pattern:       kernel.core_pattern as this session sees it
    handler:       the program that the pattern pipes to; "": it names a file
    handler_there: that program exists
    skipped:       why nothing was crashed; "": something was
    dumped:        the kernel says that it wrote a core, whole or not, or piped it (WCOREDUMP);
                   None: it had not finished after ``dump_s`` seconds
    dumpable:      the canary was; False: its user may not read /bin/sh
    limit_bytes:   the session's soft core limit; None: unlimited
    expected:      the path that the pattern gives, ``*`` for what only the kernel knows
    path:          where the core was found; "": nowhere
    stray:         it lay in the working directory, where the pattern does not say
    size_bytes:    of the core found
    whole_bytes:   what its own headers say that it should have; None: it has none
    directory:     of ``expected``; None for a handler, or when only the kernel knows its name
    gdb:           gdb's path; "": not installed
    gdb_said:      what it, or coredumpctl, complained about
    frames:        of the backtrace that gdb read from it
    left:          what could not be removed, and why; "": nothing
    """

    pattern: str
    handler: str = ""
    handler_there: bool = True
    skipped: str = ""
    dumped: bool | None = False
    dump_s: int = DUMP_S
    dumpable: bool = True
    limit_bytes: int | None = None
    expected: str = ""
    path: str = ""
    stray: bool = False
    size_bytes: int = 0
    whole_bytes: int | None = None
    directory: Directory | None = None
    gdb: str = ""
    gdb_said: str = ""
    frames: int = 0
    left: str = ""


PROGRAM = "systemd-coredump"


@dataclass(frozen=True)
class SshTry:
    """One login by ssh.

    name:   the peer, as the inventory names it
    rc:     exit status of ssh: 255 for trouble of its own; None: ended by its time limit
    answer: last line of what came back: the peer's host name when all is well, whatever a login
            prints before it
    said:   the end of what ssh complained about; "" when it exited with 0
    """

    name: str
    rc: int | None
    answer: str
    said: str


@dataclass(frozen=True)
class Answer:
    """One line of pdsh's output, ``LABEL: text``."""

    label: str
    text: str


@dataclass(frozen=True)
class PdshRun:
    """One run of pdsh over the peers that ssh reaches: for the others, ssh's reason is pdsh's.

    asked:   the names that it was given
    answers: what came back
    rc:      its exit status, which says little (0 for a refused connection); None: ended by its
             time limit
    said:    the end of what it complained about
    """

    asked: tuple[str, ...]
    answers: tuple[Answer, ...]
    rc: int | None
    said: str


@dataclass(frozen=True)
class Peers:
    """ssh and pdsh from this node to its peers.

    host:           what this node calls itself
    ssh_installed:  the user's PATH has ssh
    ssh:            the logins, in the order of the names
    pdsh_installed: the user's PATH has pdsh
    pdsh:           None: not tried, for there was no peer to ask or no pdsh
    """

    host: str
    ssh_installed: bool
    ssh: tuple[SshTry, ...]
    pdsh_installed: bool
    pdsh: PdshRun | None


# --- The way from a node to others and back, as all nodes together saw it.


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong with a node's logins, told once however many attempts show it.

    kind:  ``target``: others cannot log in to it; ``source``: it cannot log in to others;
           ``both``; ``pair``: it cannot log in to one peer, and neither fails with others;
           ``namesake``: other nodes have the same host name
    peers: the others
    tried: how many others there were attempts with, in that direction
    cause: a key of `nodeready.subjects.ssh_client.checks.CAUSES`
    said:  the line of ssh that tells it, or the host name that answered
    back:  whether the other direction works; None: nobody tried
    """

    kind: str
    peers: tuple[str, ...]
    tried: int
    cause: str
    said: str = ""
    back: bool | None = None


@dataclass(frozen=True)
class Missing:
    """A peer that ssh reaches and pdsh does not; what pdsh said about it, one line or ""."""

    name: str
    said: str


@dataclass(frozen=True)
class Same:
    """Peers of which pdsh brought the same answer."""

    answer: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Reach:
    """How a node reaches others and is reached.

    to:        how many peers it tried to log in to
    by:        how many tried to log in to it
    ssh:       what is wrong with that, for which this node is to blame
    excused:   peers that it does not reach because of what is wrong with them
    asked:     how many peers pdsh was asked for, without those that ssh does not reach
    distinct:  how many different answers it brought
    missing:   those without an answer
    same:      those that cannot be told apart, for another reason than their own host names
    pdsh_said: what pdsh said when it brought no answer at all, one line
    """

    to: int = 0
    by: int = 0
    ssh: tuple[Trouble, ...] = ()
    excused: tuple[str, ...] = ()
    asked: int = 0
    distinct: int = 0
    missing: tuple[Missing, ...] = ()
    same: tuple[Same, ...] = ()
    pdsh_said: str = ""


#: The reason of a proof of which nothing came.
UNFINISHED = "did not finish in time"

#: The proofs that run in the job's user's session, in the order in which they start -> what each
#: saw: a field of `Proved`. What runs is a row of the program (node/proofs/program.py).
SESSION: dict[str, type[Any]] = {
    "limits": SessionLimits,
    "attach": Attach,
    "tracers": Tracers,
    "core": Core,
    "peers": Peers,
}
#: The proof that runs between the nodes.
MESH = "mesh"
_KINDS = {"user": User, "control": Control, **SESSION}


@dataclass(frozen=True)
class Proved:
    """What the proofs of one node saw. A field is None when nobody asked for it.

    user:    in whose session they ran
    control: what root's attempt to attach showed; None also where we were not root
    peers:   how ssh and pdsh from this node to others went, as this node saw it
    reach:   the same, as all nodes together saw it: what is wrong with this node
    mesh:    the job's ports between the nodes, as all nodes together saw them
    """

    user: User | Unknown
    limits: SessionLimits | Unknown | None = None
    attach: Attach | Unknown | None = None
    control: Control | Unknown | None = None
    tracers: Tracers | Unknown | None = None
    core: Core | Unknown | None = None
    peers: Peers | Unknown | None = None
    reach: Reach | Unknown | None = None
    mesh: Mesh | Unknown | None = None


class Asked(Protocol):
    """What of the request a reader of the answer has to know: its nonce, and what was wanted."""

    @property
    def nonce(self) -> str: ...
    @property
    def wanted(self) -> tuple[str, ...]: ...


def nothing(reason: str, asked: Asked) -> Proved:
    """The proofs of a node that gave no answer."""
    unknown: Any = Unknown(reason)
    return Proved(unknown, **dict.fromkeys(asked.wanted, unknown))


def read(text: str, asked: Asked) -> Proved:
    """The proofs that a node's answer holds. Never raises: what cannot be read is Unknown."""
    if f"{asked.nonce} {wire.NO_PYTHON}" in text:
        return nothing(f"{wire.NO_PYTHON} on the node: the proofs need it", asked)
    found: dict[str, Any] = {}
    for name, data in wire.lines(text, asked.nonce):
        if name not in _KINDS or name in found:
            continue
        try:
            found[name] = _one(name, data)
        except ProbeError as problem:
            found[name] = Unknown(problem.reason, problem.evidence)
    user = found.get("user", Unknown(UNFINISHED))
    if isinstance(user, User) and user.error:
        # One reason, told once: without a session there is nothing to prove.
        return Proved(user)
    for name in asked.wanted:
        found.setdefault(name, Unknown(UNFINISHED))
    return Proved(**{**found, "user": user})


def _one(name: str, data: Any) -> Any:
    if isinstance(data, dict) and set(data) == {"broken"}:
        return Unknown("ended with an error", str(data["broken"])[:300])
    return wire.decode(_KINDS[name], data)
