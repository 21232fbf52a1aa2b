"""The observations of the proofs of one node: plain data from the node, for the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nodeready.core import wire
from nodeready.core.base import Unknown

# --- Logins by ssh and pdsh.


@dataclass(frozen=True)
class SshTry:
    """One login by ssh."""

    JSON_KEYS: ClassVar = {"messages": "said", "overrides": "own"}
    name: wire.Name  # the peer's name in the inventory
    rc: int | None  # exit status of ssh: 255 for an error of its own; None: ended by its limit
    answer: wire.Line  # the last line of the output: the peer's host name after a good login
    messages: str  # the end of ssh's messages; "" when ssh exited with 0
    # options of the user's own configuration (``user ada``) with which the login fails or reaches
    # another host, and without which it works
    overrides: tuple[wire.Line, ...] = ()
    forced: wire.Line = ""  # ``FILE:LINE`` of a peer's key whose command= replaces ours; "": none


@dataclass(frozen=True)
class PdshAnswer:
    """One line of pdsh's output, ``LABEL: text``."""

    label: wire.Name
    text: wire.Line


@dataclass(frozen=True)
class PdshRun:
    """One run of pdsh over the peers that ssh reaches; where ssh fails, pdsh fails as well."""

    JSON_KEYS: ClassVar = {"targets": "asked", "messages": "said"}
    targets: tuple[wire.Name, ...]  # the names that pdsh was given
    answers: tuple[PdshAnswer, ...]  # the lines of its output
    rc: int | None  # pdsh's exit status, 0 also for a refused connection; None: ended by its limit
    messages: str  # the end of pdsh's messages


@dataclass(frozen=True)
class RcmdDefault:
    """The default remote command of pdsh in one kind of shell."""

    JSON_KEYS: ClassVar = {"messages": "said"}
    kind: wire.Name  # of shell: ``login`` or ``interactive``
    rcmd: wire.Name  # as ``pdsh -q`` prints it; "": it prints none
    value: wire.Line | None  # PDSH_RCMD_TYPE; None: not set
    set_by: wire.Line  # ``FILE:LINE`` that sets it when the shell starts; "": none, or unknown
    works: bool  # it is ssh, or pdsh got an answer with it
    messages: wire.Line  # the end of pdsh's messages when there is no ``rcmd``


@dataclass(frozen=True)
class Peers:
    """ssh and pdsh from this node to its peers."""

    host: wire.Name  # this node's own host name
    ssh_installed: bool  # the user's PATH has ssh
    ssh: tuple[SshTry, ...]  # the logins, in the order of the names
    pdsh_installed: bool  # the user's PATH has pdsh
    pdsh: PdshRun | None  # None: not tried, for want of a peer or of pdsh
    defaults: tuple[RcmdDefault, ...] = ()  # remote command in the user's shells; (): not asked
    pdshrc: wire.Line = ""  # why a shell stops at ~/.pdshrc; "": it does not, or has no such file


@dataclass(frozen=True)
class Trouble:
    """One fault of a node's logins, reported once for all attempts that show it."""

    JSON_KEYS: ClassVar = {"message": "said"}
    # ``target``: peers cannot log in to the node; ``source``: the node cannot log in to peers;
    # ``both``; ``pair``: the node cannot log in to one peer, and neither has other trouble;
    # ``namesake``: other nodes have the same host name
    kind: str
    peers: tuple[str, ...]  # the peers with which the logins fail
    tried: int  # number of peers with which logins were tried, in that direction
    cause: str  # a key of `nodeready.subjects.ssh_client.checks.CAUSES`
    message: str = ""  # ssh's message with the cause, or the host name that answered
    back: bool | None = None  # whether the opposite direction works; None: it was not tried


@dataclass(frozen=True)
class Missing:
    """A peer that ssh reaches and pdsh does not. message: pdsh's message about it, or ""."""

    JSON_KEYS: ClassVar = {"message": "said"}
    name: str
    message: str


@dataclass(frozen=True)
class Same:
    """Peers from which pdsh got the same answer."""

    answer: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Reach:
    """The outcome of the logins between a node and its peers, by ssh and by pdsh."""

    JSON_KEYS: ClassVar = {"pdsh_targets": "asked"}
    to: int = 0  # number of peers to which this node tried to log in
    by: int = 0  # number of peers that tried to log in to this node
    ssh: tuple[Trouble, ...] = ()  # the faults of the logins that this node causes
    excused: tuple[str, ...] = ()  # peers that this node does not reach by a fault of the peers
    pdsh_targets: int = 0  # number of peers that pdsh was given: those that ssh reaches
    distinct: int = 0  # number of different answers that pdsh got
    missing: tuple[Missing, ...] = ()  # the peers without an answer
    same: tuple[Same, ...] = ()  # peers with one answer, not because of their host names
    pdsh_said: str = ""  # pdsh's message if it got no answer at all, one line
    pdsh_by: tuple[str, ...] = ()  # peers whose pdsh gets another host name from this node


# --- Connections on the job's ports.


@dataclass(frozen=True)
class Busy:
    """A port on which the proof could not listen, and the kernel's error."""

    port: wire.Port
    error: wire.Line


@dataclass(frozen=True)
class Blocked:
    """One fault of a node's connections, reported once for all connections that show it."""

    # ``target``: peers do not reach the node; ``source``: the node does not reach peers; ``both``;
    # ``pair``: the node does not reach one peer, and neither has other trouble
    kind: str
    ports: tuple[int, ...]  # those that fail; (): not tried, the name has a wrong address
    peers: tuple[str, ...]  # the peers with which the connections fail
    tried: int  # with how many peers connections were tried, in that direction
    cause: str  # one line
    back: bool | None  # whether the opposite direction works; None: it was not tried


@dataclass(frozen=True)
class Mesh:
    """The outcome of the connections between a node and its peers on the job's ports."""

    nodes: int  # how many nodes took part; 1: this one alone
    first: int  # the range of ports
    last: int  # likewise
    listening: tuple[int, ...]  # ports of the range on which the proof listened here for a while
    busy: tuple[Busy, ...]  # the ports on which it could not listen
    to: int  # how many peers this node tried to reach
    by: int  # how many peers tried to reach this node
    reached: int  # how many peers this node reached, on all ports that were tried
    reached_by: int  # how many peers reached this node, on all ports that were tried
    blocked: tuple[Blocked, ...]  # the faults that this node causes
    median_ms: float | None  # of the handshakes of this node's connections; None: there was none
    worst_ms: float | None  # the slowest of these handshakes
    worst_peer: str  # the peer of the slowest handshake
    crowd: int = 0  # connections to this node's listeners, if most were foreign and a peer failed
    own_name: str = ""  # why the node does not resolve its host name to its address; "": it does
    names: tuple[Blocked, ...] = ()  # the faults of host names between this node and its peers


# --- A session of the job's user: how it is opened, its limits and its resources.


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
    before: tuple[Limit, ...]  # PAM's for su before the profile, in ITEMS' order; () elsewhere
    # the hard limits that no process on this node can exceed, in the order of ITEMS, where root
    # may raise none; () on every usual node
    ceiling: tuple[int, ...]
    nr_open: int | None  # fs.nr_open: no process may have more open files; None: unreadable
    opener: wire.Name = ""  # who opened the session: a key of `SESSION_NAMES`; "": unknown
    further: tuple[int, ...] = ()  # soft, in the order of OTHER_ITEMS, -1: unlimited; (): not seen
    # the lines of shells' start-up files that set just these limits, as FILE:LINE, in the order
    # of ITEMS; "": none; (): none of them
    ulimits: tuple[str, ...] = ()


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
    lines: tuple[PamLine, ...]  # of its account and session stacks, with included files


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
    use_pam: bool | None  # UsePAM of sshd; None: only root sees it, or sshd refuses its files
    nologin: wire.Path  # the file that closes logins to all users but root; "": there is none
    notice: wire.Line  # the first line of that file
    shutdown: bool  # a shutdown is scheduled
    sshd: tuple[Limit, ...]  # limits of sshd itself, in the order of ITEMS; (): it does not run
    slurmd: tuple[Limit, ...]  # of slurmd, which its jobs inherit; (): slurmd does not run
    lines: tuple[LimitsLine, ...]  # limits for some users and groups alone
    domains: tuple[wire.Name, ...]  # the user's: name, ``@GROUP``, ``:`` and ``@:`` with numbers


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


# --- The attempts of py-spy, gdb and strace at canaries.

#: A shell's exit status for a program that is there and cannot be started.
NO_START = 126
#: Why a program does not start on a file system that is mounted so (mount(8)).
NOEXEC = "its file system is mounted noexec"


@dataclass(frozen=True)
class DebuggerAttempt:
    """A debugger's attempt at a target process."""

    JSON_KEYS: ClassVar = {"complaint": "said"}
    tool: wire.Path  # the tool's path; "": not installed, and no other field means anything
    rc: int | None = 0  # exit status, negative for a signal, NO_START; None: ended by its limit
    complaint: wire.Line = ""  # the tool's error message, on one line
    good: bool = False  # the tool's output is as expected
    refused: bool = False  # the tool was not permitted to look at the target
    limit_s: wire.Count = 0  # seconds that the tool had
    full: bool = True  # ``limit_s`` was the tool's whole limit, not cut by the end of the run
    state: wire.Name = ""  # the target's state afterwards, a letter of /proc; "": it is gone
    tracer: wire.Pid = 0  # the process that traces the target afterwards; 0: none
    answers: bool = True  # the target still answered afterwards


@dataclass(frozen=True)
class Guards:
    """The settings that can forbid a process to attach to another process of the same user."""

    yama: int | None  # kernel.yama.ptrace_scope in force; None: no Yama in this kernel
    deny_ptrace: bool | None  # SELinux enforces and its boolean is on; None: no such boolean
    capable: bool  # CAP_SYS_PTRACE is effective
    bounded: bool  # CAP_SYS_PTRACE is not in the bounding set: not even root can have it here


@dataclass(frozen=True)
class Attach:
    """py-spy's attempts at a canary, a process of the same user."""

    guards: Guards  # the settings that can refuse py-spy
    error: wire.Line  # why the canary did not start; "": it did
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
    """The attempts of gdb and strace, each at a canary of the same user."""

    guards: Guards  # the settings that can refuse them
    error: wire.Line  # why a canary did not start; "": both did
    gdb: DebuggerAttempt | None
    strace: DebuggerAttempt | None


# --- The core of a canary that crashed.

#: Seconds that the kernel may take to write the core of a shell, some 400 kB.
DUMP_S = 10
#: The program of core_pattern that keeps cores in its own store.
PROGRAM = "systemd-coredump"
#: The programs of core_pattern that store crash reports and notify a person.
REPORTERS = ("apport", "abrt-hook-ccpp")
#: Bytes of a core limit below which the kernel writes no core: most machines' ELF_EXEC_PAGESIZE.
MIN_CORE_LIMIT = 4096
#: Minimum bytes of a core of /bin/sh, where the core's headers do not give its size.
SHELL_CORE_BYTES = 65536


@dataclass(frozen=True)
class CoreDirectory:
    """The directory in which the core was to be written."""

    path: wire.Path
    error: wire.Line = ""  # why the path cannot be used as a directory; "": it can
    mode: wire.Count = 0  # permission bits
    writable: bool = False  # for the user
    read_only: bool = False
    free_bytes: wire.Number = 0  # bytes that the user may still write there
    free_files: wire.Number | None = None  # that can be made there; None: files are not counted


@dataclass(frozen=True)
class ProvedCore:
    """The core of a crashed canary, a sleeping /bin/sh."""

    JSON_KEYS: ClassVar = {"leftover": "left"}
    pattern: wire.Path  # kernel.core_pattern in the session
    handler: wire.Path = ""  # the program to which the pattern pipes; "": the pattern names a file
    handler_there: bool = True  # that program exists
    skipped: wire.Line = ""  # why the canary was not crashed; "": it was
    # the kernel says that it wrote a core, whole or not, or piped one (WCOREDUMP); None: it had
    # not finished after ``dump_s`` seconds
    dumped: bool | None = False
    dump_s: wire.Count = DUMP_S
    dumpable: bool = True  # the canary was dumpable; False: its user may not read /bin/sh
    limit_bytes: wire.Number | None = None  # the session's soft core limit; None: unlimited
    expected: wire.Path = ""  # path by the pattern, ``*`` for a part that only the kernel knows
    path: wire.Path = ""  # of the core that was found; "": none was found
    stray: bool = False  # it was in the working directory, which is not the pattern's directory
    size_bytes: wire.Number = 0  # of the core that was found
    whole_bytes: int | None = None  # the size by the core's own headers; None: they give none
    # of ``expected``; None for a handler, or when only the kernel knows its name
    directory: CoreDirectory | None = None
    gdb: wire.Path = ""  # gdb's path; "": not installed
    gdb_said: str = ""  # the error of gdb or coredumpctl
    frames: wire.Count = 0  # of the backtrace that gdb read from the core
    leftover: str = ""  # the files that could not be removed, and why; "": none

    @property
    def is_complete(self) -> bool:
        """Whether there is a core, and its headers name no missing part."""
        if self.whole_bytes is None:
            return bool(self.path) and self.handler != "" and not self.stray
        return bool(self.path) and self.size_bytes >= self.whole_bytes

    @property
    def is_cut_by_limit(self) -> bool:
        """Whether the session's core limit is the reason that there is no complete core.

        The kernel applies the limit when it writes a file, and not when it pipes a core.
        systemd-coredump applies it as upstream builds the program (RHEL, SLES).
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


# --- Further sessions, a collective over all nodes, and the history of a node.


@dataclass(frozen=True)
class SessionProof:
    """The observations of a further session beside the first one."""

    error: wire.Line  # why the session proves nothing, one line; "": it does
    closed: bool = False  # the login was begun, and the node refused or ended it
    ended: bool = False  # the user's shell was started, and ended before its command
    limits: SessionLimits | None = None
    attach: Attach | None = None  # only py-spy's blocking dump
    tracers: Tracers | None = None
    # without a backtrace; None also where two cores at once would have one name
    core: ProvedCore | None = None


@dataclass(frozen=True)
class ProvedCollective:
    """The outcome of a collective over all nodes (`nodeready smoke`) for one node."""

    nodes: int  # the number of nodes in the test; 1: this node alone
    engine: str = ""  # the program of the collective, ``torch 2.13.0 over nccl``; "": none
    proves: str = ""  # the meaning of a pass
    against: tuple[str, ...] = ()  # the evidence against this node, a sentence for each finding
    untested: str = ""  # why the node was not tested; "": it was
    lacking: bool = False  # the node was not tested because it has no engine
    warnings: tuple[str, ...] = ()  # counters that got worse on the node meanwhile, and slow links
    network: str = ""  # that NCCL chose on the node, ``IB, 8 ports, GPUDirect RDMA``; "": unknown


@dataclass(frozen=True)
class ProvedHistory:
    """The earlier failures of a node, beside those of its peers."""

    lemons: tuple[str, ...] = ()  # the node or a GPU in it that failed far more often; a line each


# --- The active tests of idle GPUs, by the vendor's tools.


@dataclass(frozen=True)
class DiagnosticFinding:
    """A test of DCGM that a GPU did not pass."""

    test: wire.Line
    gpu: wire.Name  # ``GPU 3``; "": the test names none
    text: wire.Line  # DCGM's reason
    is_setting: bool = False  # DCGM blames the node's configuration, not the hardware


@dataclass(frozen=True)
class Diagnostic:
    """The outcome of ``dcgmi diag``."""

    absent: wire.Line = ""  # why the test does not apply to the node; "": it does
    error: wire.Line = ""  # why there is no result, one line; "": there is one
    level: wire.Count = 1
    version: wire.Name = ""  # of DCGM
    passed: tuple[wire.Line, ...] = ()  # the tests that no GPU failed
    skipped: tuple[wire.Line, ...] = ()  # the tests that ran on no GPU
    failed: tuple[DiagnosticFinding, ...] = ()
    warned: tuple[DiagnosticFinding, ...] = ()


@dataclass(frozen=True)
class CopyRate:
    """How fast one GPU copied in one test of nvbandwidth."""

    test: wire.Name
    gpu: wire.Count  # its number in the order of the PCI bus
    model: wire.Line
    gbps: float  # GB/s; between GPUs: the median over the GPU's peers
    # the median of GPUs of this model in this test, on all nodes of the run; None: not compared
    median_gbps: float | None = None
    compared: wire.Count = 0  # the number of these GPUs


@dataclass(frozen=True)
class Bandwidth:
    """The outcome of nvbandwidth."""

    absent: wire.Line = ""  # why the test does not apply to the node; "": it does
    error: wire.Line = ""  # why there is no result, one line; "": there is one
    rates: tuple[CopyRate, ...] = ()
    counted_links: wire.Count = 0  # the number of NVLinks whose errors are counted
    # the errors that they counted meanwhile: ``GPU 1 link 0: 3 Replay``; also Recovery and CRC
    link_errors: tuple[wire.Line, ...] = ()


@dataclass(frozen=True)
class RdmaRate:
    """How fast one port wrote to, or was written by, the same port of a neighbour."""

    port: wire.Name  # ``mlx5_0/1``
    gbps: float | None = None  # Gbit/s; None: it has no rate
    error: wire.Line = ""  # why it has none
    peers: tuple[str, ...] = ()  # neighbours with a slow rate, or none, by a fault of this node
    is_pair: bool = False  # with this peer alone: either node may be the cause, or the way between
    # of this port and link rate on all nodes, each the better; None: not compared
    median_gbps: float | None = None
    compared: wire.Count = 0  # the number of these nodes


@dataclass(frozen=True)
class RdmaBandwidth:
    """The outcome of ib_write_bw between a node's RDMA ports and those of its neighbours."""

    absent: str = ""  # why the test does not apply to the node; "": it does
    error: str = ""  # why there is no result, one line; "": there is one
    # of each port the rate with its better neighbour, or the lowest of those with `peers`
    rates: tuple[RdmaRate, ...] = ()


#: The active tests, in the order of their start -> the class of the observation: a field of
#: `Proved`. agent/proofs/active.py runs them.
ACTIVE: dict[str, type[Any]] = {"bandwidth": Bandwidth, "diagnostic": Diagnostic}


# --- All proofs of one node, and the reader of its answer.

#: The reason of a proof without an answer.
UNFINISHED = "did not finish in time"

#: The proofs that run in the session of the job's user, in the order of their start -> the class
#: of the observation: a field of `Proved`. agent/proofs/program.py has the function of each.
SESSION: dict[str, type[Any]] = {
    "limits": SessionLimits, "attach": Attach, "tracers": Tracers, "core": ProvedCore,
    "resources": Resources, "peers": Peers,
}  # fmt: skip
#: The proofs that run between the nodes.
MESH, COLLECTIVE, RDMA = "mesh", "collective", "rdma_bandwidth"
#: What the memory proves: nothing runs.
HISTORY = "history"
#: The further sessions, opened when one of `IN_EACH_SESSION` is requested.
FURTHER_SESSIONS: dict[str, type[Any]] = {"ssh": SessionProof, "step": SessionProof}
#: The proofs that each session repeats.
IN_EACH_SESSION = ("limits", "attach", "tracers", "core")
_KINDS = {
    "user": User, "control": Control, "logins": Logins, **SESSION, **FURTHER_SESSIONS, **ACTIVE,
    "shell": SessionProof, "login": SessionProof,
}  # fmt: skip


@dataclass(frozen=True)
class ProofConfig:
    """The configuration of the program of the proofs."""

    nonce: str  # random word with which each of its lines begins
    # ``nodeready:RUN``, in the arguments of every process that it starts and leaves running for a
    # while, so that an interrupt finds it
    tag: str
    user: str = ""  # the job's user; "": the login's user
    proofs: tuple[str, ...] = tuple(SESSION)  # which of SESSION, or of ACTIVE
    peers: tuple[str, ...] = ()  # names of the nodes to which ssh and pdsh are tried
    limit_s: int = 50  # seconds after which it must have ended
    py_spy: str = "/usr/local/bin/py-spy"  # the path of py-spy; "": where the user's PATH finds it
    # this is a further session on the machine of this name (`session.identity`), with quick proofs
    # only; "": it is the first session
    machine: str = ""
    step: bool = False  # a step of Slurm may be asked for


@dataclass(frozen=True)
class Proved:
    """The observations of one node's proofs. None: the proof was not requested."""

    user: User | Unknown  # the user in whose session the proofs ran
    limits: SessionLimits | Unknown | None = None
    attach: Attach | Unknown | None = None
    control: Control | Unknown | None = None  # root's attempt to attach; None also without root
    logins: Logins | Unknown | None = None  # how this node opens sessions
    # a session by ssh, from the node to itself; None also where the first session is ssh's
    ssh: SessionProof | Unknown | None = None
    # the user's shell, started by root as sshd starts it; None also where ``ssh`` shows it
    shell: SessionProof | Unknown | None = None
    # a login shell of the user, in a session that ssh opened; None also elsewhere
    login: SessionProof | Unknown | None = None
    # a session by a step of Slurm; None also where slurmd's own limits suffice
    step: SessionProof | Unknown | None = None
    tracers: Tracers | Unknown | None = None
    core: ProvedCore | Unknown | None = None
    resources: Resources | Unknown | None = None
    peers: Peers | Unknown | None = None  # ssh and pdsh to its peers, as this node saw them
    reach: Reach | Unknown | None = None  # ssh and pdsh between the nodes, as all of them saw it
    mesh: Mesh | Unknown | None = None  # the job's ports between the nodes, as all of them saw it
    collective: ProvedCollective | Unknown | None = None  # of a collective over all nodes
    # its earlier failures; None also where there is no memory of earlier looks
    history: ProvedHistory | Unknown | None = None
    # the active tests of its GPUs; None also if they are not requested
    bandwidth: Bandwidth | Unknown | None = None
    diagnostic: Diagnostic | Unknown | None = None
    # RDMA between the nodes, as all nodes together saw it; None also if it is not requested
    rdma_bandwidth: RdmaBandwidth | Unknown | None = None

    @property
    def user_name(self) -> str:
        """The name of the session's user in a result."""
        return self.user.name if isinstance(self.user, User) else "the user"


def all_unknown(reason: str, config: ProofConfig) -> Proved:
    """The proofs of a node that gave no answer."""
    unknown: Any = Unknown(reason)
    return Proved(unknown, **dict.fromkeys(config.proofs, unknown))


def read(text: str, config: ProofConfig) -> Proved:
    """The proofs in a node's answer. Never raises: a proof that cannot be read is Unknown."""
    if f"{config.nonce} {wire.NO_PYTHON}" in text:
        return all_unknown(wire.PYTHON_MISSING, config)
    proofs: dict[str, Any] = {}
    try:
        for name, data in wire.lines(text, config.nonce):
            if name not in _KINDS or name in proofs:
                continue
            if isinstance(data, dict) and data.keys() == {"broken"}:
                proofs[name] = Unknown("ended with an error", str(data["broken"])[:300])
                continue
            try:
                proofs[name] = wire.decode(_KINDS[name], data)
            except wire.DecodeError as problem:
                proofs[name] = Unknown(problem.reason, problem.evidence)
    except wire.DecodeError as problem:
        return all_unknown(problem.reason, config)
    user = proofs.get("user", Unknown(UNFINISHED))
    if isinstance(user, User) and user.error:
        # Without a session there is nothing to prove: the reason is given once.
        return Proved(user, logins=proofs.get("logins"))
    for name in config.proofs:
        proofs.setdefault(name, Unknown(UNFINISHED))
    return Proved(**{**proofs, "user": user})
