"""What the proofs of one node see: plain data, filled on the node and judged by the checks."""

from __future__ import annotations

from dataclasses import dataclass

#: The proofs that run in the job's user's session, in the order in which they start. Each is a
#: module of the proofs with ``prove(own, config)``, and a field of `Proved`.
SESSION = ("limits", "attach", "tracers", "core", "peers")
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
