"""The program on the node: become the job's user, run the canaries, print their results.

Started by root, the program opens a session for the user (``su -``, through PAM as every login)
and runs there once more; root's part observes what only root can see. Started by the user, it runs
as it is. From the user's session it goes by ssh to the node itself, and repeats the quick proofs
there. Each observation is printed as a line (`nodeready.core.wire`) when it is complete, so a
proof that hangs costs only its own observation.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import grp
import json
import mmap
import os
import pwd
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nodeready.agent import payload
from nodeready.agent.proc import file_text, user_name
from nodeready.agent.proofs import attach, core, session
from nodeready.agent.runtime import Ended, ProcessSupervisor, bug_text, hold_streams
from nodeready.core import wire
from nodeready.core.shell import quote
from nodeready.subjects.proof import facts

# --- The proof that ssh and pdsh work from this node to its peers, in the user's own session.

CONNECT_S = 5  # seconds for a connection, up to the banner of the peer's sshd
_COMMAND_S = 10  # seconds for a login and its command: PAM, a name service, an NFS home
AT_ONCE = 4  # maximum handshakes at once: each costs both nodes about 100 ms of CPU
_COMMAND = "uname -n"  # not `hostname`, which prints the same: minimal images lack it
# A shared connection proves nothing about the next connection, and its master would stay.
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ControlPath=none")
# pdsh gives brackets, commas, colons and a leading - / ^ @ a special meaning.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KEPT = 2000  # characters of an error that are kept
#: The system's configuration of ssh; with -F, ssh does not read the user's configuration.
_SYSTEM = "/etc/ssh/ssh_config" if os.path.exists("/etc/ssh/ssh_config") else "none"
_MAX_OPTIONS = 8
# With -v, sshd prints the options of the user's key (auth2-pubkeyfile.c).
_FORCED = re.compile(r"^debug1: Remote: (/\S+:\d+): key options: (?:.* )?command\b", re.M)


def prove(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.Peers:
    """Log in to every peer as a person would. The user's configuration, keys and known hosts are
    used, and no prompt is answered.
    """
    has_ssh, has_pdsh = bool(shutil.which("ssh")), bool(shutil.which("pdsh"))
    shells: dict[str, _Shell] = {}
    arguments = [(supervisor, kind, shells) for kind in _SHELLS if has_pdsh and config.peers]
    threads = [threading.Thread(target=_ask, args=row, daemon=True) for row in arguments]
    for thread in threads:
        thread.start()
    tries = _logins(supervisor, config.peers) if has_ssh else ()
    answering = (peer.name for peer in tries if peer.rc == 0 and peer.answer)
    reached = tuple(filter(_PLAIN_NAME.fullmatch, answering))
    for thread in threads:
        thread.join()
    shells = {kind: shells[kind] for kind in _SHELLS if kind in shells}
    if not (reached and has_pdsh):
        return facts.Peers(os.uname().nodename, has_ssh, tries, has_pdsh, None)
    login = shells.get("login", _Shell("", dict(os.environ), ""))
    runs: dict[str, facts.PdshRun] = {}
    for shell in shells.values():
        # rshd is obsolete, and root's rsh waits for a minute.
        if shell.rcmd not in ("", "ssh", "rsh") and shell.rcmd not in runs:
            runs[shell.rcmd] = _pdsh(supervisor, reached, shell.rcmd, shell.environment)
    run = runs.get(login.rcmd)
    if run is None or not run.answers:
        run = _pdsh(supervisor, reached, "ssh", login.environment)
    defaults = []
    for kind, shell in shells.items():
        set_by = "" if shell.rcmd == "ssh" else _set_by(supervisor, kind)
        works = shell.rcmd == "ssh" or (shell.rcmd in runs and bool(runs[shell.rcmd].answers))
        value = shell.environment.get(_VARIABLE)
        value = None if value is None else value[:80]
        row = kind, shell.rcmd[:80], value, set_by, works, shell.messages
        defaults.append(facts.RcmdDefault(*row))
    further = tuple(defaults), _pdshrc(supervisor)
    return facts.Peers(os.uname().nodename, has_ssh, tries, has_pdsh, run, *further)


def _logins(supervisor: ProcessSupervisor, names: tuple[str, ...]) -> tuple[facts.SshTry, ...]:
    """Log in to the peers, AT_ONCE in parallel, so that a peer that hangs delays no other peer.
    Peers for which no time is left are not tried.
    """
    tries: dict[str, facts.SshTry] = {}
    waiting = list(reversed(names))

    def work() -> None:
        # pop() ends the worker by an IndexError: another one may have the last name.
        with contextlib.suppress(IndexError):
            while time.monotonic() < supervisor.deadline:
                name = waiting.pop()
                tries[name] = _login(supervisor, name)

    workers = [threading.Thread(target=work, daemon=True) for _ in names[:AT_ONCE]]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tuple(tries[name] for name in names if name in tries)


def _login(supervisor: ProcessSupervisor, name: str) -> facts.SshTry:
    try:
        ended = _ssh(supervisor, name)
        answer = _answer(ended)
        if ended.rc == 0 and answer.partition(".")[0] == name.partition(".")[0]:
            return facts.SshTry(name, 0, answer, "")
        overrides, forced = _own_options(supervisor, name), ""
        if overrides:
            again = _ssh(supervisor, name, "-F", _SYSTEM)
            if again.rc != 0 or _answer(again) == answer:
                overrides = ()
        if ended.rc not in (255, None):
            match = _FORCED.search(_ssh(supervisor, name, "-v").err)
            forced = match[1][:200] if match else ""
    except OSError as problem:
        return facts.SshTry(name, 255, "", f"ssh: {problem.strerror}")
    messages = ended.err.strip()[-_KEPT:] if ended.rc != 0 else ""
    return facts.SshTry(name, ended.rc, answer, messages, overrides, forced)


def _ssh(supervisor: ProcessSupervisor, name: str, *words: str) -> Ended:
    """The end of one login. Raises OSError."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    argv = ["ssh", *words, *options, "-n", "--", name, _COMMAND]
    return supervisor.run(argv, CONNECT_S + _COMMAND_S)


def _answer(ended: Ended) -> str:
    """The last line of the output."""
    rows = [row.strip() for row in ended.out.splitlines() if row.strip()]
    return rows[-1][:200] if rows else ""


def _own_options(supervisor: ProcessSupervisor, name: str) -> tuple[str, ...]:
    """The options for this peer that the user's configuration changes. Raises OSError."""
    with_own, system = (
        supervisor.run(["ssh", *words, "-G", "--", name], CONNECT_S).out.splitlines()
        for words in ([], ["-F", _SYSTEM])
    )
    changed = [row.strip()[:200] for row in with_own if row not in system]
    return tuple(changed[:_MAX_OPTIONS]) if system else ()


def _pdsh(
    supervisor: ProcessSupervisor, names: tuple[str, ...], rcmd: str, variables: Mapping[str, str]
) -> facts.PdshRun:
    """Ask all peers in one run of pdsh, by this remote command, in this environment. -S appends
    ``;echo …$?`` to the command, which fish and the BSD csh refuse. If no peer answers, pdsh runs
    once more without -S.
    """
    # ConnectTimeout is -t; with -u, pdsh ends its own processes.
    limits = ["-t", str(CONNECT_S), "-u", str(_COMMAND_S), "-f", str(AT_ONCE)]
    options = " ".join(f"-o{option}" for option in _OPTIONS)
    append = f"{variables.get('PDSH_SSH_ARGS_APPEND', '')} {options}".strip()
    environment = {**variables, "PDSH_SSH_ARGS_APPEND": append}
    program = shutil.which("pdsh", path=variables.get("PATH")) or "pdsh"
    run = facts.PdshRun(names, (), None, "")
    for status in (["-S"], []):
        argv = [program, *status, "-R", rcmd, *limits, "-w", ",".join(names), _COMMAND]
        try:
            ended = supervisor.run(argv, CONNECT_S + _COMMAND_S, env=environment)
        except OSError as problem:
            return facts.PdshRun(names, (), 127, f"pdsh: {problem.strerror}")
        parts = (row.partition(": ") for row in ended.out.splitlines())
        rows = ((label[:200], text[:200]) for label, colon, text in parts if colon)
        answers = tuple(facts.PdshAnswer(*row) for row in rows)
        # pdsh exits with 0 even after errors.
        run = facts.PdshRun(names, answers, ended.rc, ended.err.strip()[-_KEPT:])
        if answers or ended.rc is None or "command timeout" in ended.err:
            break
    return run


# --- The remote command of pdsh in a person's shell.

_SHELL_S = 6  # seconds for a shell to start, with the user's start-up files
#: Kind of shell -> its option. csh does not accept -l with -c.
_SHELLS = {"login": "-l", "interactive": "-i"}
_POSIX = ("sh", "bash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh")
_CSH = ("csh", "tcsh")
_VARIABLE = "PDSH_RCMD_TYPE"
_RCMD = re.compile(r"^Rcmd type\s+(\S+)", re.M)
_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
# The start-up files of bash (bash(1), INVOCATION), then those of other shells; the files of the
# environment are last, for variables that no shell sets.
_STARTS = {
    "login": ("/etc/profile", "~/.bash_profile ~/.bash_login ~/.profile"),
    "interactive": ("/etc/bash.bashrc", "/etc/bashrc", "~/.bashrc"),
}
_FILES = (
    "~/.zshrc", "~/.zprofile", "~/.zshenv", "~/.cshrc", "~/.tcshrc", "~/.login", "~/.kshrc",
    "~/.config/fish/config.fish", "/etc/zsh/zshrc", "/etc/zsh/zprofile", "/etc/zsh/zshenv",
    "/etc/zshrc", "/etc/csh.cshrc", "/etc/csh.login", "~/.pam_environment", "~/.ssh/environment",
    "/etc/environment", "/etc/security/pam_env.conf", "/etc/default/locale",
)  # fmt: skip
_SETS = re.compile(
    rf"(?:^|[\s;&|({{]){_VARIABLE}\s*=|\bset(?:env)?\s.*\b{_VARIABLE}\b|\bunset\s.*{_VARIABLE}"
    rf"|^{_VARIABLE}\s|\balias\s+'?pdsh\b|\bpdsh\s*\(\)"
)
_TRACED = re.compile(r"^\++nodeready:(/[^\n]*?:[0-9]+): ([^\n]*)", re.M)


@dataclass(frozen=True)
class _Shell:
    """pdsh in one kind of shell: its remote command, its environment, its messages."""

    rcmd: str
    environment: dict[str, str]
    messages: str


def _ask(supervisor: ProcessSupervisor, kind: str, shells: dict[str, _Shell]) -> None:
    """Ask pdsh in the user's own shell for its remote command, without a connection. A shell that
    hangs or does not print its environment is left out.
    """
    path = pwd.getpwuid(os.geteuid()).pw_shell or "/bin/sh"
    name, mark = os.path.basename(path), f"nodeready-{os.urandom(8).hex()}"
    if name not in (*_POSIX, *_CSH, "fish"):
        path, name = "/bin/sh", "sh"
    option = [] if name in _CSH else [_SHELLS[kind]]
    python = f"{sys.executable} -I -S -B -c '{_ENVIRONMENT}'"
    script = f"echo {mark}; pdsh -q -w localhost; echo {mark}; exec {python}"
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        ended = supervisor.run([path, *option, "-c", script], _SHELL_S)
        _, shown, environment = ended.out.split(f"{mark}\n", 2)
        match = _RCMD.search(shown)
        variables = {str(key): str(value) for key, value in json.loads(environment).items()}
        complaints = [row for row in ended.err.splitlines() if "rcmd" in row or "pdsh" in row]
        shells[kind] = _Shell(match[1] if match else "", variables, "; ".join(complaints)[-200:])


def _pdshrc(supervisor: ProcessSupervisor) -> str:
    """Why a command after ``. ~/.pdshrc`` does not run; "": it runs, or there is no such file."""
    path = os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".pdshrc")
    if not os.path.isfile(path):
        return ""
    mark = f"nodeready-{os.urandom(8).hex()}"
    try:
        ended = supervisor.run(["/bin/sh", "-c", f". {quote(path)}; echo {mark}"], _SHELL_S)
    except OSError:
        return ""
    if mark in ended.out:
        return ""
    return "timed out" if ended.rc is None else ended.first or f"exit status {ended.rc}"


def _set_by(supervisor: ProcessSupervisor, kind: str) -> str:
    """The last start-up line that sets pdsh's remote command, as ``FILE:LINE``."""
    bash = shutil.which("bash")
    # An interactive shell also has the environment of its login shell.
    for start in dict.fromkeys((kind, "login")) if bash else ():
        reads = []
        for choice in _STARTS[start]:
            # Of each choice, bash reads the first file that exists.
            tests = (f"[ -r {path} ]; then . {path}" for path in choice.split())
            reads.append(f"if {'; elif '.join(tests)}; fi")
        script = "PS4='+nodeready:${BASH_SOURCE}:${LINENO}: '; set -x; " + "; ".join(reads)
        option = ["--noprofile"] if start == "login" else ["--norc", "-i"]
        with contextlib.suppress(OSError):
            traced = supervisor.run([str(bash), *option, "-c", script], _SHELL_S).err
            if lines := [m[1] for m in _TRACED.finditer(traced) if _SETS.search(m[2])]:
                return lines[-1][:300]
    for path in filter(os.path.isfile, map(os.path.expanduser, _FILES)):
        for number, row in reversed([*enumerate(file_text(path, 1 << 20).splitlines(), 1)]):
            if _SETS.search(row) and not row.lstrip().startswith("#"):
                return f"{path}:{number}"[:300]
    return ""


# --- The proof that the user can use directories, shared memory and device files as a job does.
#
# Each directory is tried with a file of 1 MiB that has no name.

#: The files that CUDA, ROCm, NCCL and MPI open.
_DEVICES = (
    "/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd",
    "/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm",
)  # fmt: skip
_BYTES = 1 << 20  # bytes that are written, more than a file system reserves for a small file


def prove_resources(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.Resources:
    """Write to the directories, map the files, and try to open the device files."""
    home = pwd.getpwuid(os.geteuid()).pw_dir
    places = filter(os.path.isabs, dict.fromkeys(("/tmp", facts.SHM, home)))
    devices = sorted(path for pattern in _DEVICES for path in glob.glob(pattern))
    if os.path.exists("/dev/kfd"):
        devices += sorted(glob.glob("/dev/dri/renderD*"))
    excluding = tuple(filter(None, map(_device, devices)))
    return facts.Resources(tuple(map(_place, places)), excluding, home, _memory_bytes("/"))


def _place(path: str) -> facts.JobDirectory:
    """Whether files in a directory can be written, mapped and executed."""
    number = -1
    try:
        # A file without a name leaves nothing behind, even if this process is killed.
        number = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o700)
    except OSError as problem:
        # Network file systems do not support files without a name.
        if isinstance(problem, (PermissionError, FileNotFoundError, NotADirectoryError)):
            return facts.JobDirectory(path, _words(problem))
    try:
        if number < 0:
            number, name = tempfile.mkstemp(prefix=".nodeready-", dir=path)
            os.unlink(name)
        os.posix_fallocate(number, 0, _BYTES)
        with mmap.mmap(number, _BYTES) as shared:
            shared[:1] = b"x"
        free = os.fstatvfs(number)
    except OSError as problem:
        return facts.JobDirectory(path, _words(problem))
    else:
        return facts.JobDirectory(path, "", _executes(number), free.f_bavail * free.f_frsize)
    finally:
        if number >= 0:
            os.close(number)


def _memory_bytes(root: str) -> int | None:
    """The free memory and swap, at most the lowest memory.max of this session's cgroups (v2). A
    cgroup's current use is ignored, because it counts files that the kernel can drop. None:
    /proc/meminfo cannot be read.
    root: the directory of /proc and /sys
    """
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        names = ("MemAvailable", "SwapFree")
        memory_bytes = sum(int(fields[name].split()[0]) << 10 for name in names)
    except (OSError, ValueError, KeyError):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            groups = [line[3:].strip() for line in file if line.startswith("0::/")]
        for group in groups:
            parts = group.strip("/").split("/")
            for depth in range(len(parts)):
                path = Path(root, "sys/fs/cgroup", *parts[: depth + 1], "memory.max")
                # There is no limit if the file is missing or has "max".
                with contextlib.suppress(OSError, ValueError):
                    memory_bytes = min(memory_bytes, int(path.read_text(encoding="ascii")))
    return memory_bytes


def _executes(number: int) -> str:
    """Why the loader cannot map code from a file; "": it can."""
    try:
        mmap.mmap(number, _BYTES, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as problem:
        return _words(problem)
    return ""


def _words(problem: OSError) -> str:
    return problem.strerror or str(problem)


def _device(path: str) -> facts.DeviceNode | None:
    """A device file whose mode or ACL excludes the user; None: the user may open it. A cgroup that
    reserves a device for other jobs gives EPERM, which is no fault of the file.
    """
    if os.access(path, os.R_OK | os.W_OK):
        return None
    try:
        # The kernel refuses before it calls the driver, so the device is not opened.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError as problem:
        if problem.errno != errno.EACCES:
            return None
        status = os.stat(path)
        group = str(status.st_gid)
        with contextlib.suppress(KeyError):
            group = grp.getgrgid(status.st_gid).gr_name
        owner = f"{user_name(status.st_uid)}:{group}"
        return facts.DeviceNode(path, f"{stat.S_IMODE(status.st_mode):04o} {owner}")
    except OSError:
        return None
    return None


# --- The program.

_PROVE: dict[str, Callable[[ProcessSupervisor, facts.ProofConfig], Any]] = {
    "limits": session.prove, "attach": attach.prove, "tracers": attach.prove_tracers,
    "core": core.prove, "resources": prove_resources, "peers": prove,
}  # fmt: skip

_LOGIN_S = 5  # minimum time limit for a login: a shorter one would count slow logins as hangs


class _ProofRun:
    """The proofs of one session. Each observation is a line, printed when it is complete."""

    def __init__(self, config: facts.ProofConfig) -> None:
        self._config = config
        self._supervisor = ProcessSupervisor(config.tag, config.limit_s)
        self._printing = threading.Lock()
        # Whether a proof is requested whose result depends on how the session was opened.
        self._depends_on_session = not {*facts.IN_EACH_SESSION}.isdisjoint(config.proofs)

    def run(self, *, inside: bool) -> None:
        """Run all proofs. inside: as of `main`"""
        # Nothing more is printed: the output of a killed tool is no observation. This thread may
        # already hold the lock.
        self._supervisor.end_on_signals(lambda: self._printing.acquire(blocking=False))
        with self._supervisor:
            if inside:
                threading.Thread(target=self._end_with_parent, daemon=True).start()
            if not inside and os.geteuid() == 0 and self._config.user not in ("", "root"):
                self._as_user()
            else:
                self._in_own_session(inside=inside)
            self._printing.acquire()

    def _end_with_parent(self) -> None:
        """End everything when our parent has ended: our standard input is a pipe of the parent."""
        while os.read(0, 4096):
            pass
        self._supervisor.end()
        os._exit(1)

    def _print(self, line: str) -> None:
        with self._printing:
            print(line, flush=True)

    def _say_user(self, name: str, uid: int, error: str, *, is_named: bool = True) -> None:
        user = facts.User(name, uid, is_named, error)
        self._print(wire.line(self._config.nonce, "user", user))

    def _start(self, name: str, observe: Callable[..., Any], *further: Any) -> threading.Thread:
        """Make and print one observation, in a thread. An exception is printed as an observation,
        so it costs no other proof.
        """

        def work() -> None:
            try:
                observed = observe(self._supervisor, *further)
            except Exception as problem:  # noqa: BLE001
                observed = session.BrokenProof(bug_text(problem))
            self._print(wire.line(self._config.nonce, name, observed))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def _in_own_session(self, *, inside: bool) -> None:
        """The proofs in this session.
        inside: another nodeready program opened it, and observes how the node opens sessions
        """
        config, uid = self._config, os.geteuid()
        login, error = user_name(uid), ""
        if config.user and login != config.user:
            login, error = config.user, session.cannot_become(login, config.user)
        elif config.machine and session.identity() != config.machine:
            error = f"{os.uname().nodename} answers"
        self._say_user(login, uid, error, is_named=bool(config.user or error))
        if error:
            return
        threads = []
        if uid == 0 and not inside and "attach" in config.proofs:
            threads.append(self._start("control", attach.control, config))
        if self._depends_on_session and not inside:
            threads.append(self._start("logins", session.logins, login))
        if self._depends_on_session and not config.machine:
            threads += self._in_other_sessions(login)
        # In parallel: py-spy's native unwinding alone takes seconds.
        threads += [self._start(name, _PROVE[name], config) for name in config.proofs]
        for thread in threads:
            # A little longer, because a proof reports by itself that its time is over.
            thread.join(self._supervisor.left_s + 0.5)

    def _in_other_sessions(self, name: str) -> Iterator[threading.Thread]:
        """The proofs in further sessions that this session can open."""
        config = self._config
        if session.opened_by()[0] != "ssh":
            yield self._start("ssh", session.by_ssh, config)
        elif session.shell_of(name):
            yield self._start("login", session.by_shell, config, name, "login")
        is_step_wanted = config.step and "limits" in config.proofs
        if is_step_wanted and session.step_matters(session.limits_of_daemon("slurmd")):
            yield self._start("step", session.by_srun, config)

    def _as_user(self) -> None:
        """Run the user's session, and root's control in parallel."""
        config, supervisor = self._config, self._supervisor
        try:
            uid = pwd.getpwnam(config.user).pw_uid
        except KeyError:
            self._say_user(config.user, -1, f"no such user: {config.user}")
            return
        threads = []
        if "attach" in config.proofs:
            threads.append(self._start("control", attach.control, config, uid))
        threads.append(self._start("logins", session.logins, config.user))
        # Inside a job of Slurm, there may be no room for another job.
        step = config.step and "SLURM_JOB_ID" not in os.environ
        inner = replace(config, limit_s=max(1, int(supervisor.left_s) - 2), step=step)
        has_begun = by_shell = False

        def relay(text: str) -> None:
            # The user can learn the nonce in the session and print observations of the session,
            # but none of root's observations.
            nonlocal has_begun, by_shell
            by_ssh = facts.SessionProof("")
            try:
                rows = dict(wire.lines(text, config.nonce))
                if "ssh" in rows:
                    by_ssh = wire.decode(facts.SessionProof, rows["ssh"])
            except wire.DecodeError:
                return
            if not rows or not {*rows} <= {"user", *inner.proofs, *facts.FURTHER_SESSIONS}:
                return
            has_begun = has_begun or "user" in rows
            if by_ssh.error and not by_ssh.ended and not by_shell:
                by_shell, further = True, (config, config.user, "shell")
                threads.append(self._start("shell", session.by_shell, *further))
            # A profile's output may stand before the line.
            self._print(text[text.index(f"{config.nonce} ") :])

        make_program = partial(payload.inner_program, __name__, inner)
        ended = session.run(supervisor, config.user, make_program, relay)
        if not has_begun and not (ended.rc is None and config.limit_s < _LOGIN_S):
            self._say_user(config.user, uid, session.no_session(ended, config.user))
        for thread in threads:
            thread.join(supervisor.left_s)


def main(config: facts.ProofConfig, *, inside: bool = False) -> None:
    """Run all proofs. inside: this is the session that root opened for the user"""
    hold_streams()
    _ProofRun(config).run(inside=inside)
