"""The ways into the node for the job's user, and the limits that a session has in each of them.

A session is opened by ``su -``, through PAM and with the user's own shell, as every login. From
there ssh goes to the node itself with the user's own key, for launchers (pdsh, mpirun, a loop
around torchrun) come in by ssh, and sshd has a file of PAM of its own; without such a key, the
shell is started as sshd starts it. A job of Slurm's has the limits of slurmd.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import grp
import itertools
import os
import pwd
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nodeready.node import payload
from nodeready.node.proofs.attach import first_number
from nodeready.node.runtime import KEPT_BYTES, Ended, ProcessSupervisor
from nodeready.shell import quote
from nodeready.subjects import wire
from nodeready.subjects.base import PAM_DIRECTORIES
from nodeready.subjects.proof.facts import (
    IN_EACH_SESSION,
    LOGIN_MODULES,
    OTHER_ITEMS,
    SESSION,
    Limit,
    LimitsLine,
    Logins,
    PamLine,
    ProofConfig,
    Service,
    SessionLimits,
    SessionProof,
    User,
)

# --- The limits of this session, and who opened it.

ITEMS = {
    "core": resource.RLIMIT_CORE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
}
KINDS = ("soft", "hard")
# Bit of CAP_SYS_RESOURCE (capabilities(7)): without it nobody may raise a hard limit.
_CAP_SYS_RESOURCE = 1 << 24


def limits_of(pid: int) -> tuple[Limit, ...]:
    """The limits of a process, in the order of ITEMS. Raises OSError, ValueError, KeyError.

    From /proc, which everybody may read: prlimit() asks for the right to trace the process.
    """
    with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as file:
        return _limits_in(file.read())


def _limits_in(text: str) -> tuple[Limit, ...]:
    """The limits in the words of /proc/PID/limits. Raises ValueError, KeyError."""
    names = {"core": "Max core file size", "memlock": "Max locked memory"}
    names["nofile"] = "Max open files"
    rows = _limit_rows(text)
    return tuple(Limit(*rows[names[item]]) for item in ITEMS)


def _limit_rows(text: str) -> dict[str, list[int]]:
    """Name -> the soft and the hard limit, in the words of /proc/PID/limits. Raises ValueError."""
    return {
        row[:25].strip(): [-1 if v == "unlimited" else int(v) for v in row[25:].split()[:2]]
        for row in text.splitlines()[1:]
    }


def _others_in(text: str) -> tuple[int, ...]:
    """The soft limits of OTHER_ITEMS. Raises ValueError, KeyError."""
    rows = _limit_rows(text)
    return tuple(rows[name][0] for name in OTHER_ITEMS.values())


#: The program that opens a session -> that way in; sshd's part of a session has its own name
#: since OpenSSH 9.8.
_OPENERS = {
    "su": "su", "sshd": "ssh", "sshd-session": "ssh", "slurmstepd": "srun",
    "sudo": "", "runuser": "", "login": "", "sshd-auth": "ssh",
}  # fmt: skip


def _parents() -> Iterator[tuple[int, str]]:
    """The ancestors of this process, the nearest first, with their names."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _up in range(32):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, remaining = file.read().partition("(")[2].rpartition(")")
            yield pid, name
            pid = int(remaining.split()[1])


def opened_by() -> tuple[str, tuple[Limit, ...]]:
    """A key of SESSION_NAMES (who opened it) or "", and the limits that PAM set before any
    profile; () where they cannot be read."""
    for pid, name in _parents():
        # slurmstepd: [1234.batch], as the process calls itself
        opener = "srun" if name.startswith("slurmstepd") else _OPENERS.get(name)
        if opener is not None:
            try:
                # slurmstepd gives its task other limits than it has itself.
                return opener, () if opener in ("", "srun") else limits_of(pid)
            except (OSError, ValueError, KeyError):
                return opener, ()
    return "", ()


def _ceiling() -> tuple[int, ...]:
    """sshd's hard limits, or process 1's, where nobody may raise them."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        sets = dict(row.split(":", 1) for row in file if row.startswith("Cap"))
    if int(sets["CapBnd"], 16) & _CAP_SYS_RESOURCE:
        return ()
    try:
        return tuple(limit.hard for limit in limits_of(first_number("/run/sshd.pid") or 1))
    except (OSError, ValueError, KeyError):
        return ()


def prove(supervisor: ProcessSupervisor, config: ProofConfig) -> SessionLimits:
    """The limits of this session, after PAM and the user's profile. It only looks."""
    core, memlock, nofile = (Limit(*resource.getrlimit(number)) for number in ITEMS.values())
    nr_open = first_number("/proc/sys/fs/nr_open")
    opener, before = opened_by()
    with open("/proc/self/limits", encoding="ascii", errors="replace") as file:
        further = _others_in(file.read())
    return SessionLimits(core, memlock, nofile, before, _ceiling(), nr_open, opener, further)


def name_of(uid: int) -> str:
    """The user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def cannot_become(current_user: str, user: str) -> str:
    """Why a session as one user cannot be one as another."""
    return f"logged in as {current_user}, who cannot become {user}: log in as root"


@dataclass(frozen=True)
class BrokenProof:
    """In place of an observation: the exception of ours that ended the proof."""

    broken: str


# --- A new session, by su.

#: Shells that hand an open descriptor on to what they run. csh and tcsh close it: they get the
#: program's text as their standard input, and so does a shell that nobody knows.
_KEEPING = ("sh", "bash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh", "fish")
#: Shells that refuse every login. A batch system runs their users' jobs without a shell.
_NO_LOGIN = ("nologin", "false", "true")
# One line for whatever shell the user has, which quotes as every shell does, and which finds its
# programs whatever the start-up files did to PATH.
_DECODED = '"$(PATH=$PATH:/usr/bin:/bin; echo {}|base64 -d)"'
# What sshd puts into a session's environment. By SSH_CLIENT, bash knows that sshd started it, and
# reads ~/.bashrc (Debian, Ubuntu, RHEL and SLES build it with SSH_SOURCE_BASHRC).
_OF_SSHD = {"PATH": "/usr/local/bin:/usr/bin:/bin", "SSH_CLIENT": "127.0.0.1 1023 22"}


def run(
    supervisor: ProcessSupervisor,
    user: str,
    make_script: Callable[[int], tuple[str, str]],
    line: Callable[[str], None],
    *,
    further_input: Iterable[str] | None = None,
    start: tuple[float, Callable[[], bool]] | None = None,
    opener: str = "su",
) -> Ended:
    """Run a program below the user's own shell: in a new session of this user, as root.

    made:  gives the script, and the program's text, which is read at the given file descriptor;
           that becomes the program's input (``payload.program(stdin=True)``), and its end tells
           the program that we are gone
    line:  gets each line of its output as it comes
    more:  lines that follow the text, each written when it is there; then comes the end. None:
           the end comes with ours
    begun: as for `ProcessSupervisor.run`
    way:   ``su``: the shell is a login shell; ``shell``: it is started as sshd starts it for a
           command; ``login``: a login shell in this session, which is the user's own

    Through ``su -``: sudo sets the core limit of what it runs to 0 (since 1.9.9), and setpriv
    gives no limits at all. When we came through sudo ourselves, the limit goes back to what it was
    before.
    """
    _undo_sudo()
    name = shell_of(user)
    read, write = os.pipe()
    # A start-up file may read the standard input: it finds nothing there, as in a job.
    keeps = name in _KEEPING or not name
    how: dict[str, Any] = {"pass_fds": (read,)} if keeps else {"stdin": read}
    try:
        script, first_input = make_script(read if keeps else 0)
        chunks = itertools.chain([first_input], further_input or ())
        threading.Thread(target=_tell, args=(os.dup(write), chunks), daemon=True).start()
        if further_input is not None:
            os.close(write)
            write = -1
        argv = ["su", *(["-"] if opener == "su" else []), user]
        argv += [] if name else ["-s", "/bin/sh"]
        if opener == "login":
            # By the dash, every shell knows that it is a login shell.
            argv, how["executable"] = [f"-{name}"], pwd.getpwnam(user).pw_shell or "/bin/sh"
        text = _DECODED.format(base64.b64encode(script.encode()).decode())
        argv += ["-c", f"exec /bin/sh -c {quote(f'eval {text}')}"]
        if opener == "shell":
            how["env"] = _OF_SSHD
        # A second is left to end what hangs, and to say so.
        limit_s = supervisor.left_s - 1
        return supervisor.run(argv, limit_s, _by_line(line), start, **how)
    except OSError as problem:
        return Ended(127, "", f"{argv[0]}: {problem.strerror}", 0.0)
    finally:
        for number in (read, write):
            if number != -1:
                os.close(number)


def shell_of(user: str) -> str:
    """The name of the user's shell; "": it refuses every login."""
    name = os.path.basename(pwd.getpwnam(user).pw_shell or "sh")
    return "" if name in _NO_LOGIN else name


def _by_line(line: Callable[[str], None]) -> Callable[[object, int, bytes], None]:
    """What hears a program's output, and gives each line of it to ``line``."""
    buffer = bytearray()

    def on_output(_: object, stream: int, data: bytes) -> None:
        if stream == 1:
            *rows, remaining = bytes(buffer + data).split(b"\n")
            buffer[:] = remaining[-KEPT_BYTES:]
            for row in rows:
                line(row.decode("utf-8", "replace"))

    return on_output


def no_session(ended: Ended, user: str) -> str:
    """Why a session came to nothing, in one line."""
    reason = ended.first or f"exit status {ended.rc}"
    if reason.startswith("Traceback"):
        # A program of ours: what it cannot do in the user's limits stands in the last line.
        reason = ended.err.strip().splitlines()[-1][:200]
    python = next((row for row in ended.out.splitlines() if payload.NO_PYTHON in row), "")
    if python:
        named = f"{payload.NO_PYTHON} that {user} may run"
        reason = python.replace(payload.NO_PYTHON, named)[:300]
    elif ended.rc is None:
        reason = f"timed out; it said: {ended.first}" if ended.first else "timed out"
    return f"no session: {reason}"


def _tell(number: int, chunks: Iterable[str]) -> None:
    """Write all of it, as fast as it is read; a reader that is gone is its own trouble."""
    with contextlib.suppress(OSError), os.fdopen(number, "wb") as file:
        for data in chunks:
            file.write(data.encode())
            file.flush()


def _undo_sudo() -> None:
    """Give ourselves the core limit of whoever called sudo, in place of sudo's 0."""
    caller = _above_sudo() if "SUDO_UID" in os.environ else None
    if caller is not None:
        # Where it cannot be raised, the check of the limits tells.
        with contextlib.suppress(OSError, ValueError, KeyError):
            core = limits_of(caller)[0]
            resource.setrlimit(resource.RLIMIT_CORE, (core.soft, core.hard))


def _above_sudo() -> int | None:
    """The first of our ancestors that sudo did not start; None: there is none.

    With use_pty, sudo is two processes, and sets its own core limit to 0, too.
    """
    is_below = False
    for pid, name in _parents():
        if is_below and name != "sudo":
            return pid
        is_below = is_below or name == "sudo"
    return None


# --- The same node by ssh, as the user.

_MAIN = "nodeready.node.proofs.program"
#: Seconds for sshd to take the connection, and for the login to come as far as our program.
_CONNECT_S, _BEGIN_S = 5, 12
#: Seconds for all that is proved there: a login, a dump by py-spy, a core.
_WAY_S = 40
# The user's key and name for this node count; whose host key it has is proof.ssh's to tell, and
# nothing but the node itself is asked: no proxy, no other connection, no known host is made.
_OPTIONS = (
    "BatchMode=yes", f"ConnectTimeout={_CONNECT_S}", "ConnectionAttempts=1", "LogLevel=INFO",
    "ControlMaster=no", "ControlPath=none", "ProxyCommand=none", "PermitLocalCommand=no",
    "ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no", "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null", "RequestTTY=no",
    "SendEnv=LC_IDENTIFICATION",
)  # fmt: skip
# One line for whatever shell the user has: the script comes first, then the program's text.
_READ = f"exec 3<&0; read -r nr && eval {_DECODED.format('$nr')}"
_NO_SSHD = re.compile(r"not resolve|not known|refused|No route|unreachable|n timed out", re.I)


# What sshd takes from its client by default, and nothing heeds (locale(7)): it tells the processes
# of our session from others of the user's, when a start-up file of the shell hangs there.
_MARK = "LC_IDENTIFICATION"


def _end_marked(mark: str) -> None:
    """End what is left of a session that was given up: killing ssh ends no process behind it."""
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_marked = f"{_MARK}={mark}".encode() in file.read(1 << 20).split(b"\0")
            if is_marked:
                os.kill(pid, signal.SIGKILL)


def identity() -> str:
    """What tells this machine from others: its host name and the boot of its kernel."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{os.uname().nodename} {file.read().strip()}"


def by_ssh(supervisor: ProcessSupervisor, config: ProofConfig) -> SessionProof:
    """What the proofs see in a session that ssh opens from the node to itself, as this user.

    The user's key may not open it: then nothing is proved that way, and the reason is told
    (`by_shell` is in its place then).
    """
    if not shutil.which("ssh"):
        return SessionProof("ssh is not installed")
    proof = SessionProof("no time left")
    # Where the name leads to an address without sshd, there is one behind the loopback.
    for host in (os.uname().nodename, "localhost"):
        if supervisor.left_s > _CONNECT_S:
            proof = _by_ssh(supervisor, config, host)
        if not _NO_SSHD.search(proof.error):
            break
    return proof


def _by_ssh(supervisor: ProcessSupervisor, config: ProofConfig, host: str) -> SessionProof:
    limit_s = min(supervisor.left_s - 1, _WAY_S)
    name = pwd.getpwuid(os.geteuid()).pw_name
    rows = _SessionRows(config, name, limit_s)
    program = payload.program(_MAIN, rows.config, stdin=True, first=sys.executable, inside=True)
    options = [word for option in _OPTIONS for word in ("-o", option)]
    argv = ["ssh", *options, "-l", name, "--", host, f"exec /bin/sh -c {quote(_READ)}"]
    text = f"{base64.b64encode(program.script.encode()).decode()}\n{program.text}"
    mark = f"nodeready-{os.urandom(8).hex()}"
    environment = {**os.environ, _MARK: mark}
    # Its end tells the program there that we are gone.
    read, write = os.pipe()
    try:
        threading.Thread(target=_tell, args=(os.dup(write), [text]), daemon=True).start()
        how: dict[str, Any] = {"stdin": read, "env": environment}
        ended = supervisor.run(argv, limit_s, _by_line(rows.add), rows.begun, **how)
        if ended.rc is None:
            _end_marked(mark)
    except OSError as problem:
        return SessionProof(f"ssh: {problem.strerror}")
    finally:
        os.close(read)
        os.close(write)
    # ssh gives 255 for trouble of its own, else the status of what sshd started.
    return rows.way(ended, starts=ended.rc not in (None, 255) and bool(shell_of(name)))


def by_shell(
    supervisor: ProcessSupervisor, config: ProofConfig, user: str, opener: str
) -> SessionProof:
    """What the proofs see below the user's shell in another way than the first; see `run`."""
    rows = _SessionRows(config, user, min(supervisor.left_s - 1, _WAY_S))

    def made(descriptor: int) -> tuple[str, str]:
        how = {"stdin": True, "first": sys.executable, "descriptor": descriptor}
        return payload.program(_MAIN, rows.config, inside=True, **how)  # type: ignore[arg-type]

    ended = run(supervisor, user, made, rows.add, start=rows.begun, opener=opener)
    proof = rows.way(ended, starts=ended.rc is not None)
    return replace(proof, limits=replace(proof.limits, opener=opener)) if proof.limits else proof


class _SessionRows:
    """What the program inside another way in is told, and what it tells.

    config: of the program there
    begun:  as for `ProcessSupervisor.run`
    """

    def __init__(self, config: ProofConfig, name: str, limit_s: float) -> None:
        repeated = tuple(name for name in IN_EACH_SESSION if name in config.proofs)
        self.config = replace(
            config, user=name, proofs=repeated, peers=(), machine=identity(), step=False,
            limit_s=max(1, int(limit_s) - 1),
        )  # fmt: skip
        self._kinds: dict[str, type[Any]] = {
            "user": User,
            **{name: SESSION[name] for name in repeated},
        }
        self._rows: dict[str, Any] = {}
        self.begun = (_BEGIN_S, lambda: "user" in self._rows)

    def add(self, text: str) -> None:
        """Take a line of its output."""
        with contextlib.suppress(wire.DecodeError):
            for kind, data in wire.lines(f"{text}\n", self.config.nonce):
                if kind in self._kinds and kind not in self._rows:
                    self._rows[kind] = wire.decode(self._kinds[kind], data)

    def way(self, ended: Ended, *, starts: bool) -> SessionProof:
        """What came of it. starts: the user's shell was started, and ended by itself"""
        user = self._rows.pop("user", None)
        if user and not user.error:
            return SessionProof("", **self._rows)
        rows = [row.strip() for row in f"{ended.out}\n{ended.err}".splitlines() if row.strip()]
        rows = [row for row in rows if not row.startswith("Warning: Permanently added")]
        message = "; ".join(rows[-2:]) or f"exit status {ended.rc}"
        reason = user.error if user else "timed out" if ended.rc is None else message
        closed = bool(re.search(r"\b(closed|reset) by\b", message))
        return SessionProof(reason[:300], closed, ended=starts and user is None)


# --- A step of Slurm.

#: Seconds for Slurm to have the node for us, and for the step to end.
_IMMEDIATE_S, _STEP_S = 3, 15


def _lower(these: tuple[Limit, ...], than: tuple[Limit, ...]) -> bool:
    """Whether one of these limits is lower than the other one of the same item."""
    values = [(getattr(a, kind), getattr(b, kind)) for a, b in zip(these, than) for kind in KINDS]
    return any(limit != -1 and (other == -1 or limit < other) for limit, other in values)


def step_matters(slurmd: tuple[Limit, ...]) -> bool:
    """Whether only a step can tell the limits of jobs.

    A step's hard limits are slurmd's; its soft ones are slurmd's, or, by PropagateResourceLimits,
    those of whoever submits, below that (slurm.conf(5)). Where slurmd has no lower ones than this
    session, a step would show nothing else, and none is started.
    """
    own_limits = tuple(Limit(*resource.getrlimit(number)) for number in ITEMS.values())
    return _lower(slurmd, own_limits) and "SLURM_JOB_ID" not in os.environ


def by_srun(supervisor: ProcessSupervisor, config: ProofConfig) -> SessionProof:
    """The limits of a step on this node, when Slurm can start one at once."""
    if not shutil.which("srun"):
        return SessionProof("srun is not installed")
    node = os.uname().nodename.partition(".")[0]
    argv = [
        "srun", f"--immediate={_IMMEDIATE_S}", f"--nodelist={node}", "--nodes=1", "--ntasks=1",
        "--time=1", "--job-name=nodeready", "--chdir=/", "--input=none", "--quiet",
        "cat", "/proc/self/limits",
    ]  # fmt: skip
    try:
        ended = supervisor.run(argv, _STEP_S)
    except OSError as problem:
        return SessionProof(f"srun: {problem.strerror}")
    try:
        core, memlock, nofile = _limits_in(ended.out)
        further = _others_in(ended.out)
    except (ValueError, KeyError):
        message = re.sub(r"^srun: (error: )?", "", ended.first) or f"exit status {ended.rc}"
        return SessionProof("timed out" if ended.rc is None else message)
    nr_open = first_number("/proc/sys/fs/nr_open")
    limits = SessionLimits(core, memlock, nofile, (), _ceiling(), nr_open, "srun", further)
    return SessionProof("", limits=limits)


# --- How the node opens sessions.

_PAM_LINE = re.compile(r"-?(account|session)\s+(\[[^\]]*\]|\S+)\s+(\S+)\s*(.*)", re.I)
_NOLOGIN = ("/run/nologin", "/var/run/nologin", "/etc/nologin")
_SHUTDOWN = "/run/systemd/shutdown/scheduled"
_LIMITS_FILES = tuple(
    f"{directory}/security/{files}"
    for directory in ("/etc", "/usr/etc", "/usr/share")
    for files in ("limits.conf", "limits.d/*.conf")
)
_LIMITS_LINE = re.compile(
    r"\s*[^\s#*]\S*\s+(-\s*(#.*)?$|(soft|hard|-)\s+(core|memlock|nofile)\s)", re.I
)
_MOST_LINES = 200


def _file_of(service: str) -> str:
    paths = (f"{directory}/{service}" for directory in PAM_DIRECTORIES)
    return next((path for path in paths if os.path.exists(path)), "")


def _stack(path: str, kinds: tuple[str, ...], depth: int = 0) -> Iterator[PamLine | None]:
    """The lines of this file and of those that it includes that ask for LOGIN_MODULES; None for a
    file that cannot be read (pam.conf(5))."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = file.read(1 << 20).replace("\\\n", "  ").splitlines()
    except OSError:
        rows, depth = [], 99
    if depth > 8:
        yield None
        return
    for number, row in enumerate(rows, 1):
        text = row.partition("#")[0].strip()
        if text.startswith("@include"):
            yield from _stack(_file_of(text[8:].strip()) or "?", kinds, depth + 1)
        match = _PAM_LINE.fullmatch(text)
        if not match or match[1].lower() not in kinds:
            continue
        if match[2].lower() in ("include", "substack"):
            yield from _stack(_file_of(match[3]) or "?", (match[1].lower(),), depth + 1)
        module = re.sub(r"^pam_|\.so$", "", os.path.basename(match[3]))
        if module in LOGIN_MODULES and (module != "limits" or match[1].lower() == "session"):
            yield PamLine(module, " ".join(match[4].split())[:300], f"{path}:{number}")


def _service(name: str, *files: str) -> Service:
    """What PAM asks for a service, by the first of these names that has a file."""
    path = next(filter(None, map(_file_of, files)), "")
    lines = list(_stack(path, ("account", "session"))) if path else []
    readable = tuple(line for line in lines if line is not None)
    return Service(name, path, len(readable) == len(lines), readable[:_MOST_LINES])


def _running(name: str) -> int | None:
    """The process of root's that has this name and was not started by one of the same name."""
    counts: dict[int, int] = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                comm, _, remaining = file.read().partition("(")[2].rpartition(")")
            if comm == name and os.stat(f"/proc/{pid}").st_uid == 0:
                counts[pid] = int(remaining.split()[1])
    return min((pid for pid, parent in counts.items() if parent not in counts), default=None)


def limits_of_daemon(name: str) -> tuple[Limit, ...]:
    """The limits of a daemon of root's, which what it starts inherits; (): it does not run."""
    pid = _running(name)
    with contextlib.suppress(OSError, ValueError, KeyError):
        return limits_of(pid) if pid else ()
    return ()


def _use_pam(supervisor: ProcessSupervisor, name: str) -> bool | None:
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() or not sshd:
        return None
    argv = [sshd, "-T", "-C", f"user={name},host=localhost,addr=127.0.0.1"]
    with contextlib.suppress(OSError):
        match = re.search(r"^usepam (yes|no)$", supervisor.run(argv, 5).out, re.M | re.I)
        return match[1].lower() == "yes" if match else None
    return None


def _domains(name: str) -> tuple[str, ...]:
    """What stands for a user in limits.conf, beside ``*``: limits.conf(5)."""
    account = pwd.getpwnam(name)
    domains = [name, f":{account.pw_uid}"]
    for gid in os.getgrouplist(name, account.pw_gid)[:_MOST_LINES]:
        domains.append(f"@:{gid}")
        with contextlib.suppress(KeyError):
            domains.append(f"@{grp.getgrgid(gid).gr_name}")
    return tuple(domains)


def _limits_lines() -> Iterator[LimitsLine]:
    for pattern in _LIMITS_FILES:
        for path in sorted(glob.glob(pattern)):
            with contextlib.suppress(OSError):
                with open(path, encoding="utf-8", errors="replace") as file:
                    rows = file.read(1 << 20).splitlines()
                for number, row in enumerate(rows, 1):
                    if _LIMITS_LINE.match(row):
                        yield LimitsLine(path, number, row[:300])


def logins(supervisor: ProcessSupervisor, name: str) -> Logins:
    """How this node opens sessions for this user: what to look at when one is refused, or gets
    other limits than another. It only looks."""
    nologin = next(filter(os.path.exists, _NOLOGIN), "")
    notice = ""
    with contextlib.suppress(OSError, StopIteration):
        if nologin and os.path.isfile(nologin):
            with open(nologin, encoding="utf-8", errors="replace") as file:
                notice = next(row.strip() for row in file.read(4096).splitlines() if row.strip())
    return Logins(
        services=(
            _service("ssh", "sshd"),
            _service("su", "su-l", "su"),
            _service("slurm", "slurm"),
        ),
        use_pam=_use_pam(supervisor, name),
        nologin=nologin,
        notice=notice[:200],
        shutdown=os.path.exists(_SHUTDOWN),
        sshd=limits_of_daemon("sshd"),
        slurmd=limits_of_daemon("slurmd"),
        lines=tuple(_limits_lines())[:_MOST_LINES],
        domains=_domains(name),
    )
