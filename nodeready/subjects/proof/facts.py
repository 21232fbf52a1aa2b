"""The observations of the proofs of one node: plain data from the node, for the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from nodeready.subjects import wire
from nodeready.subjects.base import Unknown

# --- What the session of the job's user shows on the node itself.

#: Seconds that the kernel may take to write the core of a shell, some 400 kB.
DUMP_S = 10


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


#: Limits that no policy names, and that end a job all the same -> as /proc/PID/limits calls them.
OTHER_ITEMS = {
    "as": "Max address space", "data": "Max data size", "fsize": "Max file size",
    "cpu": "Max cpu time", "stack": "Max stack size", "nproc": "Max processes",
    "rttime": "Max realtime timeout",
}  # fmt: skip


#: The ways in which a job's processes come to a node -> how a result names that way.
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
    """What PAM asks for one service.

    name:  the way in, ``ssh`` or ``su``, or ``slurm``
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
    """How this node opens sessions: where to look when one way gets what another does not.

    services: what PAM asks, for each way that goes through PAM
    use_pam:  sshd asks PAM (UsePAM); None: only root can tell, or sshd's configuration is refused
    nologin:  the file that keeps all users but root from logging in; "": no file does
    notice:   the first line of that file
    shutdown: a shutdown is scheduled
    sshd:     the limits of sshd itself, in the order of ITEMS; (): sshd does not run
    slurmd:   the limits of slurmd, which its jobs inherit; (): slurmd does not run
    lines:    limits for some users and groups alone
    domains:  what stands for the user in such a line: the name, ``@`` and each group's, and
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


#: A shell's exit status for a program that is there and cannot be started.
NO_START = 126
#: Why a program does not start on a file system that is mounted so (mount(8)).
NOEXEC = "its file system is mounted noexec"


@dataclass(frozen=True)
class DebuggerAttempt:
    """A debugger's attempt at a target process.

    tool:    the tool's path; "": not installed, and no other field means anything
    rc:      the tool's exit status, negative for a signal, NO_START; None: ended by its limit
    complaint: the tool's error message, on one line
    good:    the tool showed what it should
    refused: the tool was not permitted to look at the target
    limit_s: seconds that the tool had
    full:    ``limit_s`` was the tool's whole limit, not cut short by the end of the run
    state:   the target's state afterwards, the letter of /proc; "": the target is gone
    tracer:  the process that traces the target afterwards; 0: none
    answers: the target still answered afterwards
    """

    JSON_KEYS: ClassVar = {"complaint": "said"}

    tool: wire.Path
    rc: int | None = 0
    complaint: wire.Line = ""
    good: bool = False
    refused: bool = False
    limit_s: wire.Count = 0
    full: bool = True
    state: wire.Name = ""
    tracer: wire.Pid = 0
    answers: bool = True


@dataclass(frozen=True)
class Guards:
    """What may keep a process from attaching to another one of the same user.

    yama:        kernel.yama.ptrace_scope in force; None: no Yama in this kernel
    deny_ptrace: SELinux enforces and its boolean is on; None: no such boolean
    capable:     CAP_SYS_PTRACE is effective
    bounded:     CAP_SYS_PTRACE is not in the bounding set: not even root can have it here
    """

    yama: int | None
    deny_ptrace: bool | None
    capable: bool
    bounded: bool


@dataclass(frozen=True)
class Attach:
    """py-spy's attempts at a canary, a process of the same user.

    guards: what may refuse py-spy
    error:  why the canary did not start; "": it did
    """

    guards: Guards
    error: wire.Line
    blocking: DebuggerAttempt | None
    nonblocking: DebuggerAttempt | None
    native: DebuggerAttempt | None


@dataclass(frozen=True)
class Control:
    """The attempt of py-spy --nonblocking, as root, at a canary of the job's user.

    Where root passes and the user fails, the cause is Yama, or the target is not dumpable. Where
    both fail, it is a capability that root lacks, SELinux, Yama's scope 3 or py-spy itself.
    """

    guards: Guards
    error: wire.Line
    attempt: DebuggerAttempt | None


@dataclass(frozen=True)
class Tracers:
    """The attempts of gdb and strace, each at a canary of the same user.

    guards: what may refuse them
    error:  why a canary did not start; "": both did
    """

    guards: Guards
    error: wire.Line
    gdb: DebuggerAttempt | None
    strace: DebuggerAttempt | None


#: The programs of core_pattern that store crash reports and notify a person.
REPORTERS = ("apport", "abrt-hook-ccpp")


@dataclass(frozen=True)
class CoreDirectory:
    """The directory in which the core was to be written.

    error:      why the path cannot be used as a directory; "": it can
    mode:       permission bits
    writable:   for the user
    free_bytes: bytes that the user may still write there
    free_files: files that can still be made there; None: the file system does not count files
    """

    path: wire.Path
    error: wire.Line = ""
    mode: wire.Count = 0
    writable: bool = False
    read_only: bool = False
    free_bytes: wire.Number = 0
    free_files: wire.Number | None = None


@dataclass(frozen=True)
class ProvedCore:
    """What the crash of a canary, a sleeping /bin/sh, left.

    pattern:       kernel.core_pattern as the session sees it
    handler:       the program to which the pattern pipes; "": the pattern names a file
    handler_there: that program exists
    skipped:       why the canary was not crashed; "": it was
    dumped:        the kernel says that it wrote a core, whole or not, or piped one (WCOREDUMP);
                   None: it had not finished after ``dump_s`` seconds
    dumpable:      the canary was dumpable; False: its user may not read /bin/sh
    limit_bytes:   the session's soft core limit; None: unlimited
    expected:      the path that the pattern gives, ``*`` for what only the kernel knows
    path:          where the core was found; "": nowhere
    stray:         the core lay in the working directory, where the pattern does not say
    size_bytes:    of the core that was found
    whole_bytes:   the size that the core's own headers give; None: they give none
    directory:     of ``expected``; None for a handler, or when only the kernel knows its name
    gdb:           gdb's path; "": not installed
    gdb_said:      the complaint of gdb or coredumpctl
    frames:        of the backtrace that gdb read from the core
    leftover:      what could not be removed, and why; "": nothing
    """

    JSON_KEYS: ClassVar = {"leftover": "left"}

    pattern: wire.Path
    handler: wire.Path = ""
    handler_there: bool = True
    skipped: wire.Line = ""
    dumped: bool | None = False
    dump_s: wire.Count = DUMP_S
    dumpable: bool = True
    limit_bytes: wire.Number | None = None
    expected: wire.Path = ""
    path: wire.Path = ""
    stray: bool = False
    size_bytes: wire.Number = 0
    whole_bytes: int | None = None
    directory: CoreDirectory | None = None
    gdb: wire.Path = ""
    gdb_said: str = ""
    frames: wire.Count = 0
    leftover: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether there is a core, and its headers name no missing part."""
        if self.whole_bytes is None:
            return bool(self.path) and self.handler != "" and not self.stray
        return bool(self.path) and self.size_bytes >= self.whole_bytes

    @property
    def is_cut_by_limit(self) -> bool:
        """Whether the session's core limit is the reason that there is no complete core.

        The kernel heeds the limit when it writes a file and not when it pipes a core.
        systemd-coredump heeds it as upstream builds the program (RHEL, SLES).
        """
        limit = self.limit_bytes
        if limit is None or self.skipped or self.dumped is None or self.is_complete:
            return False
        if self.handler and self.dumped:
            by_systemd = self.handler.endswith(f"/{PROGRAM}")
            return by_systemd and not self.path and limit < MIN_CORE_LIMIT
        if not self.dumped:
            return not self.handler and limit < MIN_CORE_LIMIT
        return bool(self.path) and limit < (self.whole_bytes or SHELL_CORE_BYTES)


#: The program of core_pattern that keeps cores in its own store.
PROGRAM = "systemd-coredump"
#: Bytes of a core limit below which the kernel writes no core: most machines' ELF_EXEC_PAGESIZE.
MIN_CORE_LIMIT = 4096
#: Minimum bytes of a core of /bin/sh, where the core's headers do not give its size.
SHELL_CORE_BYTES = 65536


@dataclass(frozen=True)
class SessionProof:
    """The observations of a further session beside the first one.

    error:  why nothing is proved in it, one line; "": something is
    closed: the login was begun, and the node refused or ended it
    ended:  the user's shell was started, and ended before its command
    attach: py-spy's blocking dump alone
    core:   without a backtrace; None also where two cores at once would have one name
    """

    error: wire.Line
    closed: bool = False
    ended: bool = False
    limits: SessionLimits | None = None
    attach: Attach | None = None
    tracers: Tracers | None = None
    core: ProvedCore | None = None


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
    """What a job uses, as its user can use it.

    places:  /tmp, shared memory, the home
    devices: of GPUs and RDMA that the user cannot open
    memory_bytes: the most that shared memory can grow by, however large its file system; None:
             unreadable
    """

    places: tuple[JobDirectory, ...]
    devices: tuple[DeviceNode, ...]
    home: wire.Path
    memory_bytes: wire.Number | None = None


@dataclass(frozen=True)
class SshTry:
    """One login by ssh.

    name:   the peer's name in the inventory
    rc:     exit status of ssh: 255 for an error of ssh itself; None: ended by its time limit
    answer: the last line that came back: the peer's host name after a good login
    messages:  the end of ssh's messages; "" when ssh exited with 0
    overrides: options as the user's own configuration sets them (``user ada``), where the login
            fails or ends elsewhere with them, and works by the system's alone
    forced: ``FILE:LINE`` of the authorized key there whose command= replaces ours; "": none
    """

    JSON_KEYS: ClassVar = {"messages": "said", "overrides": "own"}

    name: wire.Name
    rc: int | None
    answer: wire.Line
    messages: str
    overrides: tuple[wire.Line, ...] = ()
    forced: wire.Line = ""


@dataclass(frozen=True)
class PdshAnswer:
    """One line of pdsh's output, ``LABEL: text``."""

    label: wire.Name
    text: wire.Line


@dataclass(frozen=True)
class PdshRun:
    """One run of pdsh over the peers that ssh reaches; where ssh fails, pdsh fails as well.

    targets: the names that pdsh was given
    answers: the lines that came back
    rc:      pdsh's exit status, which says little (0 for a refused connection); None: ended by
             its time limit
    messages: the end of pdsh's messages
    """

    JSON_KEYS: ClassVar = {"targets": "asked", "messages": "said"}

    targets: tuple[wire.Name, ...]
    answers: tuple[PdshAnswer, ...]
    rc: int | None
    messages: str


@dataclass(frozen=True)
class RcmdDefault:
    """The remote command that pdsh takes in one kind of shell, without being asked for one.

    kind:   of shell: ``login`` or ``interactive``
    rcmd:   as ``pdsh -q`` prints it; "": it prints none
    value:  PDSH_RCMD_TYPE; None: not set
    set_by: the line that the shell read at its start and that decides, ``/path:number``; "": none,
            or it is unknown
    works:  it is ssh, or brought an answer
    messages: the end of pdsh's messages when there is no ``rcmd``
    """

    JSON_KEYS: ClassVar = {"messages": "said"}

    kind: wire.Name
    rcmd: wire.Name
    value: wire.Line | None
    set_by: wire.Line
    works: bool
    messages: wire.Line


@dataclass(frozen=True)
class Peers:
    """ssh and pdsh from this node to its peers.

    host:           this node's own host name
    ssh_installed:  the user's PATH has ssh
    ssh:            the logins, in the order of the names
    pdsh_installed: the user's PATH has pdsh
    pdsh:           None: not tried, for want of a peer or of pdsh
    defaults:       pdsh's remote command in the user's shells; (): not asked
    pdshrc:         why a shell that reads ~/.pdshrc runs no later command; "": it does, or
                    there is no such file
    """

    host: wire.Name
    ssh_installed: bool
    ssh: tuple[SshTry, ...]
    pdsh_installed: bool
    pdsh: PdshRun | None
    defaults: tuple[RcmdDefault, ...] = ()
    pdshrc: wire.Line = ""


# --- ssh and pdsh between the nodes, as all nodes together saw them.


@dataclass(frozen=True)
class Trouble:
    """One fault of a node's logins, reported once for all attempts that show it.

    kind:  ``target``: peers cannot log in to the node; ``source``: the node cannot log in to
           peers; ``both``; ``pair``: the node cannot log in to one peer, and neither has other
           trouble; ``namesake``: other nodes have the same host name
    peers: the peers with which the logins fail
    tried: with how many peers logins were tried, in that direction
    cause: a key of `nodeready.subjects.ssh_client.checks.CAUSES`
    message: ssh's message with the cause, or the host name that answered
    back:  whether the opposite direction works; None: it was not tried
    """

    JSON_KEYS: ClassVar = {"message": "said"}

    kind: str
    peers: tuple[str, ...]
    tried: int
    cause: str
    message: str = ""
    back: bool | None = None


@dataclass(frozen=True)
class Missing:
    """A peer that ssh reaches and pdsh does not. message: pdsh's words about it, or ""."""

    JSON_KEYS: ClassVar = {"message": "said"}

    name: str
    message: str


@dataclass(frozen=True)
class Same:
    """Peers for which pdsh brought the same answer."""

    answer: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Reach:
    """How the logins between a node and its peers went, by ssh and by pdsh.

    to:        to how many peers this node tried to log in
    by:        how many peers tried to log in to this node
    ssh:       what is wrong with the logins, for which this node is to blame
    excused:   peers that this node does not reach, and that are to blame themselves
    pdsh_targets: how many peers pdsh was given: those that ssh reaches
    distinct:  how many different answers pdsh brought
    missing:   the peers without an answer
    same:      peers with the same answer, for another reason than their host names
    pdsh_said: pdsh's message when it brought no answer at all, one line
    pdsh_by:   peers whose pdsh this node does not answer as itself; these are excused
    """

    JSON_KEYS: ClassVar = {"pdsh_targets": "asked"}

    to: int = 0
    by: int = 0
    ssh: tuple[Trouble, ...] = ()
    excused: tuple[str, ...] = ()
    pdsh_targets: int = 0
    distinct: int = 0
    missing: tuple[Missing, ...] = ()
    same: tuple[Same, ...] = ()
    pdsh_said: str = ""
    pdsh_by: tuple[str, ...] = ()


# --- The job's ports between the nodes, as all nodes together saw them.


@dataclass(frozen=True)
class Busy:
    """A port on which the proof could not listen, and the kernel's error."""

    port: wire.Port
    error: wire.Line


@dataclass(frozen=True)
class Blocked:
    """One fault of a node's connections, reported once for all connections that show it.

    kind:  ``target``: peers do not reach the node; ``source``: the node does not reach peers;
           ``both``; ``pair``: the node does not reach one peer, and neither has other trouble
    ports: the ports that fail; (): no connection was tried, for the name led astray
    peers: the peers with which the connections fail
    tried: with how many peers connections were tried, in that direction
    cause: one line
    back:  whether the opposite direction works; None: it was not tried
    """

    kind: str
    ports: tuple[int, ...]
    peers: tuple[str, ...]
    tried: int
    cause: str
    back: bool | None


@dataclass(frozen=True)
class Mesh:
    """How the connections between a node and its peers went on the job's ports.

    nodes:     how many nodes took part; 1: this one alone
    first, last: the range of ports
    listening: the ports of the range on which the proof listened here for a while
    busy:      the ports on which it could not listen
    to:        how many peers this node tried to reach
    by:        how many peers tried to reach this node
    reached:   how many peers this node reached, on all ports that were tried
    reached_by: how many peers reached this node, on all ports that were tried
    blocked:   what is wrong, for which this node is to blame
    median_ms: of the handshakes of this node's own connections; None: there was none
    worst_ms:  the slowest of these handshakes
    worst_peer: the peer of the slowest handshake
    crowd:     connections that came to this node's listeners, when most were no peer's and a peer
               did not come through; else 0
    own_name:  why the node's host name does not resolve to the node's address on the node; "": it
               does
    names:     what is wrong with host names between this node and its peers
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
    crowd: int = 0
    own_name: str = ""
    names: tuple[Blocked, ...] = ()


# --- A collective over all nodes (`nodeready smoke`).


@dataclass(frozen=True)
class ProvedCollective:
    """What a collective over all nodes showed of one.

    nodes:    how many were to take part; 1: this one alone
    engine:   that made the collective, ``torch 2.13.0 over nccl``; "": none
    proves:   what its pass proves
    against:  the evidence against this node, a sentence for each finding; (): no evidence
    untested: why the node was not tested; "": it was
    lacking:  that is because it has no engine
    warnings: what got worse on the node meanwhile, or is slow
    """

    nodes: int
    engine: str = ""
    proves: str = ""
    against: tuple[str, ...] = ()
    untested: str = ""
    lacking: bool = False
    warnings: tuple[str, ...] = ()


# --- All proofs of one node, and the reader of its answer.

#: The reason of a proof without an answer.
UNFINISHED = "did not finish in time"

#: The proofs that run in the job's user's session, in the order in which they start -> what each
#: saw: a field of `Proved`. What runs is a row of the program (node/proofs/program.py).
SESSION: dict[str, type[Any]] = {
    "limits": SessionLimits,
    "attach": Attach,
    "tracers": Tracers,
    "core": ProvedCore,
    "resources": Resources,
    "peers": Peers,
}
#: The proofs that run between the nodes.
MESH, COLLECTIVE = "mesh", "collective"
#: The further sessions, opened when one of `IN_EACH_SESSION` is asked for.
FURTHER_SESSIONS: dict[str, type[Any]] = {"ssh": SessionProof, "step": SessionProof}
#: The proofs that each session repeats.
IN_EACH_SESSION = ("limits", "attach", "tracers", "core")
_KINDS = {
    "user": User, "control": Control, "logins": Logins, **SESSION, **FURTHER_SESSIONS,
    "shell": SessionProof, "login": SessionProof,
}  # fmt: skip


@dataclass(frozen=True)
class ProofConfig:
    """The orders to the program of the proofs.

    nonce:     random word with which each of its lines begins
    tag:       ``nodeready:RUN``, in the arguments of every process that it starts and leaves
               running for a while, so that an interrupt finds it
    user:      the job's user; "": the login's user
    proofs:    which of SESSION
    peers:     the nodes to which ssh and pdsh are tried, by the names of the inventory
    limit_s:   seconds after which it must have ended
    py_spy:    the path of py-spy; "": where the user's PATH finds it
    machine:   this is a further session on the machine of this name (`session.identity`), with
               quick proofs only; "": it is the first session
    step:      a step of Slurm may be asked for
    """

    nonce: str
    tag: str
    user: str = ""
    proofs: tuple[str, ...] = tuple(SESSION)
    peers: tuple[str, ...] = ()
    limit_s: int = 50
    py_spy: str = "/usr/local/bin/py-spy"
    machine: str = ""
    step: bool = False


@dataclass(frozen=True)
class Proved:
    """What the proofs of one node saw. None: the proof was not asked for.

    user:    in whose session the proofs ran
    control: root's attempt to attach; None also where the login was not root's
    logins:  how this node opens sessions
    ssh:     the way in by ssh, from the node to itself; None also where the session is ssh's
    shell:   the user's shell, started by root as sshd starts it; None also where ssh's tells it
    login:   a login shell of the user's, in a session that ssh opened; None also elsewhere
    step:    the way in by a step of Slurm; None also where slurmd's own limits tell enough
    peers:   ssh and pdsh from this node to its peers, as this node saw them
    reach:   ssh and pdsh between the nodes, as all nodes together saw them
    mesh:    the job's ports between the nodes, as all nodes together saw them
    collective: what a collective over all nodes showed of this one
    """

    user: User | Unknown
    limits: SessionLimits | Unknown | None = None
    attach: Attach | Unknown | None = None
    control: Control | Unknown | None = None
    logins: Logins | Unknown | None = None
    ssh: SessionProof | Unknown | None = None
    shell: SessionProof | Unknown | None = None
    login: SessionProof | Unknown | None = None
    step: SessionProof | Unknown | None = None
    tracers: Tracers | Unknown | None = None
    core: ProvedCore | Unknown | None = None
    resources: Resources | Unknown | None = None
    peers: Peers | Unknown | None = None
    reach: Reach | Unknown | None = None
    mesh: Mesh | Unknown | None = None
    collective: ProvedCollective | Unknown | None = None

    @property
    def user_name(self) -> str:
        """The name of the session's user in a result."""
        return self.user.name if isinstance(self.user, User) else "the user"


class ProofRequest(Protocol):
    """The part of a request that a reader of the answer has to know."""

    @property
    def nonce(self) -> str: ...
    @property
    def proofs(self) -> tuple[str, ...]: ...


def all_unknown(reason: str, request: ProofRequest) -> Proved:
    """The proofs of a node that gave no answer."""
    unknown: Any = Unknown(reason)
    return Proved(unknown, **dict.fromkeys(request.proofs, unknown))


def read(text: str, request: ProofRequest) -> Proved:
    """The proofs in a node's answer. Never raises: a proof that cannot be read is Unknown."""
    if f"{request.nonce} {wire.NO_PYTHON}" in text:
        return all_unknown(f"{wire.NO_PYTHON} on the node: the proofs need it", request)
    proofs: dict[str, Any] = {}
    try:
        for name, data in wire.lines(text, request.nonce):
            if name in _KINDS and name not in proofs:
                proofs[name] = _decode(name, data)
    except wire.DecodeError as problem:
        return all_unknown(problem.reason, request)
    user = proofs.get("user", Unknown(UNFINISHED))
    if isinstance(user, User) and user.error:
        # Without a session there is nothing to prove: the reason is given once.
        return Proved(user, logins=proofs.get("logins"))
    for name in request.proofs:
        proofs.setdefault(name, Unknown(UNFINISHED))
    return Proved(**{**proofs, "user": user})


def _decode(name: str, data: Any) -> Any:
    if isinstance(data, dict) and set(data) == {"broken"}:
        return Unknown("ended with an error", str(data["broken"])[:300])
    try:
        return wire.decode(_KINDS[name], data)
    except wire.DecodeError as problem:
        return Unknown(problem.reason, problem.evidence)
