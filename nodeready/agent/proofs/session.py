"""The sessions of the job's user on the node, and their limits.

A session is opened by ``su -``, through PAM and with the user's own shell, as every login. From
there ssh goes to the node itself with the user's own key, because launchers (pdsh, mpirun, a loop
around torchrun) come by ssh, and sshd has its own file of PAM. Without such a key, the shell is
started as sshd starts it. A job of Slurm has the limits of slurmd.
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
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nodeready.agent import payload
from nodeready.agent.proc import file_text, first_number, stat_fields, status_fields
from nodeready.agent.runtime import KEPT_BYTES, Ended, ProcessSupervisor
from nodeready.core import wire
from nodeready.core.base import PAM_DIRECTORIES
from nodeready.core.shell import quote
from nodeready.subjects.proof import facts

# --- The limits of this session, and who opened it.

# The limits of `facts.SessionLimits` in /proc/PID/limits. prlimit() shows them only to a process
# that may trace PID.
_ITEMS = ("Max core file size", "Max locked memory", "Max open files")
_CAP_SYS_RESOURCE = 1 << 24  # CAP_SYS_RESOURCE (capabilities(7)): to raise a hard limit


def _parse_limits(text: str) -> tuple[tuple[facts.Limit, ...], tuple[int, ...]]:
    """The limits of ITEMS, and the soft ones of OTHER_ITEMS, in the text of /proc/PID/limits.
    Raises ValueError, KeyError.
    """
    rows = {
        row[:25].strip(): [-1 if v == "unlimited" else int(v) for v in row[25:].split()[:2]]
        for row in text.splitlines()[1:]
    }
    items = tuple(facts.Limit(*rows[name]) for name in _ITEMS)
    return items, tuple(rows[name][0] for name in facts.OTHER_ITEMS.values())


def _limits_text(pid: int | str) -> str:
    with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as file:
        return file.read()


def limits_of(pid: int | str) -> tuple[facts.Limit, ...]:
    """The limits of a process, in the order of ITEMS; (): it has ended, or they are unreadable."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _parse_limits(_limits_text(pid))[0]
    return ()


#: The program that opens a session -> the key of SESSION_NAMES. Since OpenSSH 9.8, sshd's part of
#: a session is named sshd-session.
_OPENERS = {
    "su": "su", "sshd": "ssh", "sshd-session": "ssh", "slurmstepd": "srun",
    "sudo": "", "runuser": "", "login": "", "sshd-auth": "ssh",
}  # fmt: skip


def _parents() -> Iterator[tuple[int, str]]:
    """The ancestors of this process, the nearest first, with their names."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _ in range(32):
            name, fields = stat_fields(f"/proc/{pid}/stat")
            yield pid, name
            pid = int(fields[1])


def opened_by() -> tuple[str, tuple[facts.Limit, ...]]:
    """How this session was opened (a key of SESSION_NAMES, or ""), and its first limits. PAM sets
    these limits before any profile runs; (): they cannot be read.
    """
    for pid, name in _parents():
        # slurmstepd sets its own name, such as "slurmstepd: [1234.batch]".
        opener = "srun" if name.startswith("slurmstepd") else _OPENERS.get(name)
        if opener is not None:
            # slurmstepd's own limits are not those of its task.
            return opener, () if opener in ("", "srun") else limits_of(pid)
    return "", ()


#: The start-up files of bash (bash(1), INVOCATION), sh and zsh, in which a ulimit may stand.
_START_FILES = (
    "/etc/profile", "/etc/profile.d/*.sh", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zsh/*",
    "/etc/zshenv", "/etc/zprofile", "/etc/ssh/sshrc", "~/.bash_profile", "~/.bash_login",
    "~/.profile", "~/.bashrc", "~/.zshenv", "~/.zprofile", "~/.ssh/rc",
)  # fmt: skip
# ``ulimit -Sn 1024`` and ``ulimit -H -n 1024`` set the limit of n; ``ulimit -n`` shows it.
_ULIMIT = re.compile(r"^[^#]*\bulimit\s+(?:-[HS]+\s+)?-[HS]*([cln])\s*([0-9]{1,18})\b")
# Option -> the sizes of its unit in bytes: bash counts cores by 1024, dash by 512.
_UNITS = {"c": (512, 1024), "l": (1024,), "n": (1,)}
_MAX_CHARACTERS = 1 << 20  # of a start-up file, and of a file of PAM, that are read


def _ulimits(limits: Iterable[facts.Limit]) -> tuple[str, ...]:
    """The start-up lines that set these limits, as in `facts.SessionLimits`."""
    has, lines = dict(zip("cln", limits)), dict.fromkeys("cln", "")
    for path in itertools.chain(*(sorted(glob.glob(os.path.expanduser(p))) for p in _START_FILES)):
        for number, line in enumerate(file_text(path, _MAX_CHARACTERS).splitlines(), 1):
            match = _ULIMIT.match(line[:1000])
            sizes = {int(match[2]) * unit for unit in _UNITS[match[1]]} if match else set()
            if match and sizes & {has[match[1]].soft, has[match[1]].hard}:
                lines[match[1]] = f"{path}:{number}"[:300]
    return tuple(lines.values()) if any(lines.values()) else ()


def _session_limits(
    text: str, before: tuple[facts.Limit, ...], opener: str
) -> facts.SessionLimits:
    """The limits in the text of /proc/PID/limits. Raises ValueError, KeyError."""
    (core, memlock, nofile), further = _parse_limits(text)
    nr_open, ulimits = first_number("/proc/sys/fs/nr_open"), _ulimits((core, memlock, nofile))
    ceiling: tuple[int, ...] = ()
    if not int(status_fields("/proc/self/status")["CapBnd"], 16) & _CAP_SYS_RESOURCE:
        # No process may raise the hard limits of sshd or process 1.
        parent_limits = limits_of(first_number("/run/sshd.pid") or 1)
        ceiling = tuple(limit.hard for limit in parent_limits)
    further_values = ceiling, nr_open, opener, further, ulimits
    return facts.SessionLimits(core, memlock, nofile, before, *further_values)


def prove(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.SessionLimits:
    """The limits of this session, after PAM and the user's profile. Nothing is changed."""
    opener, before = opened_by()
    return _session_limits(_limits_text("self"), before, opener)


def cannot_become(current_user: str, user: str) -> str:
    """Why a session of one user cannot become a session of another user."""
    return f"logged in as {current_user}, who cannot become {user}: log in as root"


@dataclass(frozen=True)
class BrokenProof:
    """In place of an observation: the exception in our code that ended the proof."""

    broken: str


# --- A new session, by su.

#: Shells that keep an open descriptor for their commands. csh and tcsh close it: they and unknown
#: shells get the program's text as their standard input.
_KEEPS_DESCRIPTORS = ("sh", "bash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh", "fish")
#: Shells that refuse every login. A batch system runs their users' jobs without a shell.
_NO_LOGIN = ("nologin", "false", "true")
# One line for any shell: it quotes in the way that all shells know, and finds its programs with
# any PATH of the start-up files.
_DECODED = '"$(PATH=$PATH:/usr/bin:/bin; echo {}|base64 -d)"'
# Variables that sshd sets in a session. With SSH_CLIENT, bash reads ~/.bashrc (Debian, Ubuntu,
# RHEL and SLES build it with SSH_SOURCE_BASHRC).
_SSHD_VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "SSH_CLIENT": "127.0.0.1 1023 22"}


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

    make_script:   gives the script and the program's text, which is read at the given file
                   descriptor. The descriptor becomes the program's input
                   (``payload.program(stdin=True)``), whose end tells the program that we ended
    line:          gets each line of the program's output as it comes
    further_input: lines after the text, each written when it is there, then the end; None: the
                   input ends when we end
    start:         as ``has_begun`` of `ProcessSupervisor.run`
    opener:        ``su``: a login shell; ``shell``: the shell as sshd starts it for a command;
                   ``login``: a login shell in this session, which is the user's own

    ``su -`` is used because sudo (since 1.9.9) sets the core limit of its command to 0, and
    setpriv sets no limits. If sudo started us, the earlier core limit is restored first.
    """
    caller = _caller_of_sudo() if "SUDO_UID" in os.environ else None
    for core in limits_of(caller)[:1] if caller is not None else ():
        # In place of sudo's 0. If it cannot be raised, the check of the limits reports that.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (core.soft, core.hard))
    name = shell_of(user)
    read, write = os.pipe()
    # A start-up file may read the standard input, which is empty there, as in a job.
    keeps = name in _KEEPS_DESCRIPTORS or not name
    how: dict[str, Any] = {"pass_fds": (read,)} if keeps else {"stdin": read}
    try:
        script, first_input = make_script(read if keeps else 0)
        chunks = itertools.chain([first_input], further_input or ())
        threading.Thread(target=_write_all, args=(os.dup(write), chunks), daemon=True).start()
        if further_input is not None:
            os.close(write)
            write = -1
        argv = ["su", *(["-"] if opener == "su" else []), user]
        argv += [] if name else ["-s", "/bin/sh"]
        if opener == "login":
            # A leading dash makes any shell a login shell.
            argv, how["executable"] = [f"-{name}"], pwd.getpwnam(user).pw_shell or "/bin/sh"
        text = _DECODED.format(base64.b64encode(script.encode()).decode())
        argv += ["-c", f"exec /bin/sh -c {quote(f'eval {text}')}"]
        if opener == "shell":
            how["env"] = _SSHD_VARIABLES
        # The last second is for ending a program that hangs, and for the report.
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
    """An output handler that gives each line of a program's output to ``line``."""
    buffer = bytearray()

    def on_output(_: object, stream: int, data: bytes) -> None:
        if stream == 1:
            *rows, remaining = bytes(buffer + data).split(b"\n")
            buffer[:] = remaining[-KEPT_BYTES:]
            for row in rows:
                line(row.decode("utf-8", "replace"))

    return on_output


def no_session(ended: Ended, user: str) -> str:
    """Why a session failed, in one line."""
    reason = ended.first or f"exit status {ended.rc}"
    if reason.startswith("Traceback"):
        # Our program raised it; the last line tells which limit of the user stopped it.
        reason = ended.err.strip().splitlines()[-1][:200]
    if python := next((row for row in ended.out.splitlines() if wire.NO_PYTHON in row), ""):
        reason = python.replace(wire.NO_PYTHON, f"{wire.NO_PYTHON} that {user} may run")[:300]
    elif ended.rc is None:
        reason = f"timed out; it said: {ended.first}" if ended.first else "timed out"
    return f"no session: {reason}"


def _write_all(number: int, chunks: Iterable[str]) -> None:
    """Write all chunks as fast as they are read. A reader that has ended is ignored."""
    with contextlib.suppress(OSError), os.fdopen(number, "wb") as file:
        for data in chunks:
            file.write(data.encode())
            file.flush()


def _caller_of_sudo() -> int | None:
    """The process that called sudo; None: sudo is not among our ancestors. With use_pty, sudo is
    two processes, and also sets its own core limit to 0.
    """
    is_below = False
    for pid, name in _parents():
        if is_below and name != "sudo":
            return pid
        is_below = is_below or name == "sudo"
    return None


# --- The same node by ssh, as the user.

_MAIN = "nodeready.agent.proofs.program"
_CONNECT_S, _BEGIN_S = 5, 12  # seconds for sshd to accept; from the login to our program
_SESSION_S = 40  # seconds for all proofs in one session: a login, a dump by py-spy, a core
# The user's key and name for this node are used. proof.ssh judges the host key. Only the node
# itself is contacted: without a proxy, another connection or a new known host.
_OPTIONS = (
    "BatchMode=yes", f"ConnectTimeout={_CONNECT_S}", "ConnectionAttempts=1", "LogLevel=INFO",
    "ControlMaster=no", "ControlPath=none", "ProxyCommand=none", "PermitLocalCommand=no",
    "ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no", "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null", "RequestTTY=no",
    "SendEnv=LC_IDENTIFICATION",
)  # fmt: skip
# One line for any shell: the input has the script first, then the program's text.
_READ = f"exec 3<&0; read -r nr && eval {_DECODED.format('$nr')}"
_NO_SSHD = re.compile(r"not resolve|not known|refused|No route|unreachable|n timed out", re.I)

# A variable that sshd takes from its client by default, and that no program uses (locale(7)). It
# marks the processes of our session, for the case that a start-up file of the shell hangs there.
_MARK = "LC_IDENTIFICATION"


def _end_marked(mark: str) -> None:
    """Kill the remaining processes of our session: killing ssh ends none of them."""
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_marked = f"{_MARK}={mark}".encode() in file.read(1 << 20).split(b"\0")
            if is_marked:
                os.kill(pid, signal.SIGKILL)


def identity() -> str:
    """The identity of this machine: its host name and its kernel's boot id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{os.uname().nodename} {file.read().strip()}"


def by_ssh(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.SessionProof:
    """The proofs in a session that ssh opens from the node to itself, as this user. If the user's
    key does not open the session, the result has the reason, and `by_shell` runs instead.
    """
    if not shutil.which("ssh"):
        return facts.SessionProof("ssh is not installed")
    proof = facts.SessionProof("no time left")
    # If the name resolves to an address without sshd, sshd listens on the loopback address.
    for host in (os.uname().nodename, "localhost"):
        if supervisor.left_s > _CONNECT_S:
            proof = _by_ssh(supervisor, config, host)
        if not _NO_SSHD.search(proof.error):
            break
    return proof


def _by_ssh(
    supervisor: ProcessSupervisor, config: facts.ProofConfig, host: str
) -> facts.SessionProof:
    limit_s = min(supervisor.left_s - 1, _SESSION_S)
    name = pwd.getpwuid(os.geteuid()).pw_name
    rows = _SessionRows(config, name, limit_s)
    program = payload.inner_program(_MAIN, rows.config)
    options = [word for option in _OPTIONS for word in ("-o", option)]
    argv = ["ssh", *options, "-l", name, "--", host, f"exec /bin/sh -c {quote(_READ)}"]
    text = f"{base64.b64encode(program.script.encode()).decode()}\n{program.text}"
    mark = f"nodeready-{os.urandom(8).hex()}"
    environment = {**os.environ, _MARK: mark}
    # The pipe's end tells the program in the session that we have ended.
    read, write = os.pipe()
    try:
        threading.Thread(target=_write_all, args=(os.dup(write), [text]), daemon=True).start()
        how: dict[str, Any] = {"stdin": read, "env": environment}
        ended = supervisor.run(argv, limit_s, _by_line(rows.add), rows.start, **how)
        if ended.rc is None:
            _end_marked(mark)
    except OSError as problem:
        return facts.SessionProof(f"ssh: {problem.strerror}")
    finally:
        os.close(read)
        os.close(write)
    # 255 is ssh's own failure; any other status is that of sshd's command.
    return rows.result(ended, starts=ended.rc not in (None, 255) and bool(shell_of(name)))


def by_shell(
    supervisor: ProcessSupervisor, config: facts.ProofConfig, user: str, opener: str
) -> facts.SessionProof:
    """The proofs in another session of the user's shell. opener: as for `run`"""
    rows = _SessionRows(config, user, min(supervisor.left_s - 1, _SESSION_S))
    make_program = partial(payload.inner_program, _MAIN, rows.config)
    ended = run(supervisor, user, make_program, rows.add, start=rows.start, opener=opener)
    proof = rows.result(ended, starts=ended.rc is not None)
    return replace(proof, limits=replace(proof.limits, opener=opener)) if proof.limits else proof


class _SessionRows:
    """The configuration of the program in another session, and its output.
    config: of the program there
    start:  as ``has_begun`` of `ProcessSupervisor.run`
    """

    def __init__(self, config: facts.ProofConfig, name: str, limit_s: float) -> None:
        repeated = tuple(name for name in facts.IN_EACH_SESSION if name in config.proofs)
        self.config = replace(
            config, user=name, proofs=repeated, peers=(), machine=identity(), step=False,
            limit_s=max(1, int(limit_s) - 1),
        )  # fmt: skip
        self._kinds: dict[str, type[Any]] = {name: facts.SESSION[name] for name in repeated}
        self._kinds["user"] = facts.User
        self._rows: dict[str, Any] = {}
        self.start = (_BEGIN_S, lambda: "user" in self._rows)

    def add(self, text: str) -> None:
        with contextlib.suppress(wire.DecodeError):
            for kind, data in wire.lines(f"{text}\n", self.config.nonce):
                if kind in self._kinds and kind not in self._rows:
                    self._rows[kind] = wire.decode(self._kinds[kind], data)

    def result(self, ended: Ended, *, starts: bool) -> facts.SessionProof:
        """The result of the session. starts: the user's shell was started, and ended by itself"""
        user = self._rows.pop("user", None)
        if user and not user.error:
            return facts.SessionProof("", **self._rows)
        rows = [row.strip() for row in f"{ended.out}\n{ended.err}".splitlines() if row.strip()]
        rows = [row for row in rows if not row.startswith("Warning: Permanently added")]
        message = "; ".join(rows[-2:]) or f"exit status {ended.rc}"
        reason = user.error if user else "timed out" if ended.rc is None else message
        closed = bool(re.search(r"\b(closed|reset) by\b", message))
        return facts.SessionProof(reason[:300], closed, ended=starts and user is None)


# --- A step of Slurm.

_IMMEDIATE_S, _STEP_S = 3, 15  # seconds for Slurm to give us the node; seconds for the step to end


def _is_lower(limit: facts.Limit, bound: facts.Limit) -> bool:
    pairs = ((limit.soft, bound.soft), (limit.hard, bound.hard))
    return any(value != -1 and (maximum == -1 or value < maximum) for value, maximum in pairs)


def step_matters(slurmd: tuple[facts.Limit, ...]) -> bool:
    """Whether only a step can show the limits of jobs.

    A step has slurmd's hard limits. Its soft limits are slurmd's, or, by PropagateResourceLimits,
    the lower limits of the submitting user (slurm.conf(5)). If slurmd's limits are not lower than
    this session's, a step has this session's limits, and no step is started.
    """
    is_lower = any(map(_is_lower, slurmd, limits_of("self")))
    return is_lower and "SLURM_JOB_ID" not in os.environ


def by_srun(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.SessionProof:
    """The limits of a step on this node, if Slurm can start a step at once."""
    if not shutil.which("srun"):
        return facts.SessionProof("srun is not installed")
    node = os.uname().nodename.partition(".")[0]
    argv = [
        "srun", f"--immediate={_IMMEDIATE_S}", f"--nodelist={node}", "--nodes=1", "--ntasks=1",
        "--time=1", "--job-name=nodeready", "--chdir=/", "--input=none", "--quiet",
        "cat", "/proc/self/limits",
    ]  # fmt: skip
    try:
        ended = supervisor.run(argv, _STEP_S)
    except OSError as problem:
        return facts.SessionProof(f"srun: {problem.strerror}")
    try:
        return facts.SessionProof("", limits=_session_limits(ended.out, (), "srun"))
    except (ValueError, KeyError):
        message = re.sub(r"^srun: (error: )?", "", ended.first) or f"exit status {ended.rc}"
        return facts.SessionProof("timed out" if ended.rc is None else message)


# --- How the node opens sessions.

_PAM_LINE = re.compile(r"-?(account|session)\s+(\[[^\]]*\]|\S+)\s+(\S+)\s*(.*)", re.I)
_NOLOGIN = ("/run/nologin", "/var/run/nologin", "/etc/nologin")
_SHUTDOWN = "/run/systemd/shutdown/scheduled"
_LIMITS_FILES = [
    f"{directory}/security/limits.{files}"
    for directory, files in itertools.product(
        ("/etc", "/usr/etc", "/usr/share"), ("conf", "d/*.conf")
    )
]
_LIMITS_LINE = re.compile(
    r"\s*[^\s#*]\S*\s+(-\s*(#.*)?$|(soft|hard|-)\s+(core|memlock|nofile)\s)", re.I
)
_MAX_LINES = 200


def _file_of(service: str) -> str:
    paths = (f"{directory}/{service}" for directory in PAM_DIRECTORIES)
    return next((path for path in paths if os.path.exists(path)), "")


def _stack(path: str, kinds: tuple[str, ...], depth: int = 0) -> Iterator[facts.PamLine | None]:
    """The lines for LOGIN_MODULES in this file and in the files that it includes (pam.conf(5)).
    None stands for a file that cannot be read.
    """
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
        if module in facts.LOGIN_MODULES and (module != "limits" or match[1].lower() == "session"):
            yield facts.PamLine(module, " ".join(match[4].split())[:300], f"{path}:{number}")


def _service(name: str, *files: str) -> facts.Service:
    """The lines of PAM for a service, from the first of these files that exists."""
    path = next(filter(None, map(_file_of, files)), "")
    lines = list(_stack(path, ("account", "session"))) if path else []
    readable = tuple(line for line in lines if line is not None)
    return facts.Service(name, path, len(readable) == len(lines), readable[:_MAX_LINES])


def limits_of_daemon(name: str) -> tuple[facts.Limit, ...]:
    """The limits of root's daemon, which its children inherit; (): the daemon does not run."""
    parents: dict[int, int] = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError, ValueError, IndexError):
            comm, fields = stat_fields(f"/proc/{pid}/stat")
            if comm == name and os.stat(f"/proc/{pid}").st_uid == 0:
                parents[pid] = int(fields[1])
    # Without its children of the same name.
    pid = min((pid for pid, parent in parents.items() if parent not in parents), default=0)
    return limits_of(pid) if pid else ()


def _use_pam(supervisor: ProcessSupervisor, name: str) -> bool | None:
    """Whether sshd uses PAM for this user; None: unknown."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() or not sshd:
        return None
    argv = [sshd, "-T", "-C", f"user={name},host=localhost,addr=127.0.0.1"]
    with contextlib.suppress(OSError):
        match = re.search(r"^usepam (yes|no)$", supervisor.run(argv, 5).out, re.M | re.I)
        return match[1].lower() == "yes" if match else None
    return None


def _domains(name: str) -> tuple[str, ...]:
    """The domains in limits.conf that match a user, besides ``*`` (limits.conf(5))."""
    account = pwd.getpwnam(name)
    domains = [name, f":{account.pw_uid}"]
    for gid in os.getgrouplist(name, account.pw_gid)[:_MAX_LINES]:
        domains.append(f"@:{gid}")
        with contextlib.suppress(KeyError):
            domains.append(f"@{grp.getgrgid(gid).gr_name}")
    return tuple(domains)


def _limits_lines() -> Iterator[facts.LimitsLine]:
    for path in itertools.chain(*(sorted(glob.glob(pattern)) for pattern in _LIMITS_FILES)):
        for number, row in enumerate(file_text(path, _MAX_CHARACTERS).splitlines(), 1):
            if _LIMITS_LINE.match(row):
                yield facts.LimitsLine(path, number, row[:300])


def logins(supervisor: ProcessSupervisor, name: str) -> facts.Logins:
    """How this node opens sessions for this user. Nothing is changed. It explains why a session is
    refused, or why its limits differ from another session's.
    """
    nologin = next(filter(os.path.exists, _NOLOGIN), "")
    text = file_text(nologin, 4096) if os.path.isfile(nologin) else ""
    notice = next(filter(None, map(str.strip, text.splitlines())), "")[:200]
    services = _service("ssh", "sshd"), _service("su", "su-l", "su"), _service("slurm", "slurm")
    return facts.Logins(
        services, _use_pam(supervisor, name), nologin, notice, os.path.exists(_SHUTDOWN),
        sshd=limits_of_daemon("sshd"), slurmd=limits_of_daemon("slurmd"),
        lines=tuple(_limits_lines())[:_MAX_LINES], domains=_domains(name),
    )  # fmt: skip
