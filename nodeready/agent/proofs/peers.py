"""Prove that ssh and pdsh work from this node to its peers, in the user's own session."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.agent.runtime import Ended, ProcessSupervisor
from nodeready.core.shell import quote
from nodeready.subjects.proof.facts import (
    PdshAnswer,
    PdshRun,
    Peers,
    ProofConfig,
    RcmdDefault,
    SshTry,
)

#: Seconds for a connection, up to the banner of the peer's sshd.
CONNECT_S = 5
#: Seconds for a login and its command: PAM, a name service, a home directory on the network.
_COMMAND_S = 10
#: Maximum handshakes at once: each costs both nodes about 100 ms of CPU.
AT_ONCE = 4
# Not `hostname`, which prints the same: minimal images lack it.
_COMMAND = "uname -n"
# A shared connection proves nothing about the next connection, and its master would stay.
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ControlPath=none")
# pdsh gives brackets, commas, colons and a leading - / ^ @ a special meaning.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: Characters of an error that are kept.
_KEPT = 2000
#: The system's configuration of ssh; with -F, ssh does not read the user's configuration.
_SYSTEM = "/etc/ssh/ssh_config" if os.path.exists("/etc/ssh/ssh_config") else "none"
_MAX_OPTIONS = 8
# With -v, sshd prints the options of the user's key (auth2-pubkeyfile.c).
_FORCED = re.compile(r"^debug1: Remote: (/\S+:\d+): key options: (?:.* )?command\b", re.M)


def prove(supervisor: ProcessSupervisor, config: ProofConfig) -> Peers:
    """Log in to every peer as a person would. The user's configuration, keys and known hosts are
    used, and no prompt is answered.
    """
    has_ssh, has_pdsh = bool(shutil.which("ssh")), bool(shutil.which("pdsh"))
    shells: dict[str, _Shell] = {}
    threads = [
        threading.Thread(target=_ask, args=(supervisor, kind, shells), daemon=True)
        for kind in _SHELLS
        if has_pdsh and config.peers
    ]
    for thread in threads:
        thread.start()
    tries = _logins(supervisor, config.peers) if has_ssh else ()
    reached = tuple(
        peer.name
        for peer in tries
        if peer.rc == 0 and peer.answer and _PLAIN_NAME.fullmatch(peer.name)
    )
    for thread in threads:
        thread.join()
    shells = {kind: shells[kind] for kind in _SHELLS if kind in shells}
    if not (reached and has_pdsh):
        return Peers(os.uname().nodename, has_ssh, tries, has_pdsh, None)
    login = shells.get("login", _Shell("", dict(os.environ), ""))
    runs: dict[str, PdshRun] = {}
    for shell in shells.values():
        # rshd is obsolete, and root's rsh waits for a minute.
        if shell.rcmd not in ("", "ssh", "rsh") and shell.rcmd not in runs:
            runs[shell.rcmd] = _pdsh(supervisor, reached, shell.rcmd, shell.environment)
    run = runs.get(login.rcmd)
    if run is None or not run.answers:
        run = _pdsh(supervisor, reached, "ssh", login.environment)
    defaults = tuple(
        RcmdDefault(
            kind=kind,
            rcmd=shell.rcmd[:80],
            value=shell.value,
            set_by="" if shell.rcmd == "ssh" else _set_by(supervisor, kind, shell),
            works=shell.rcmd == "ssh" or (shell.rcmd in runs and bool(runs[shell.rcmd].answers)),
            messages=shell.messages,
        )
        for kind, shell in shells.items()
    )
    pdshrc = _pdshrc(supervisor)
    return Peers(os.uname().nodename, has_ssh, tries, has_pdsh, run, defaults, pdshrc)


def _logins(supervisor: ProcessSupervisor, names: tuple[str, ...]) -> tuple[SshTry, ...]:
    """Log in to the peers, AT_ONCE in parallel, so that a peer that hangs delays no other peer.
    Peers for which no time is left are not tried.
    """
    tries: dict[str, SshTry] = {}
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


def _login(supervisor: ProcessSupervisor, name: str) -> SshTry:
    try:
        ended = _ssh(supervisor, name)
        answer = _answer(ended)
        if ended.rc == 0 and answer.partition(".")[0] == name.partition(".")[0]:
            return SshTry(name, 0, answer, "")
        overrides, forced = _own_options(supervisor, name), ""
        if overrides:
            again = _ssh(supervisor, name, "-F", _SYSTEM)
            if again.rc != 0 or _answer(again) == answer:
                overrides = ()
        if ended.rc not in (255, None):
            match = _FORCED.search(_ssh(supervisor, name, "-v").err)
            forced = match[1][:200] if match else ""
    except OSError as problem:
        return SshTry(name, 255, "", f"ssh: {problem.strerror}")
    return SshTry(name, ended.rc, answer, _messages(ended), overrides, forced)


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


def _messages(ended: Ended) -> str:
    return ended.err.strip()[-_KEPT:] if ended.rc != 0 else ""


def _pdsh(
    supervisor: ProcessSupervisor, names: tuple[str, ...], rcmd: str, variables: Mapping[str, str]
) -> PdshRun:
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
    run = PdshRun(names, (), None, "")
    for status in (["-S"], []):
        argv = [program, *status, "-R", rcmd, *limits, "-w", ",".join(names), _COMMAND]
        try:
            ended = supervisor.run(argv, CONNECT_S + _COMMAND_S, env=environment)
        except OSError as problem:
            return PdshRun(names, (), 127, f"pdsh: {problem.strerror}")
        parts = (row.partition(": ") for row in ended.out.splitlines())
        answers = tuple(
            PdshAnswer(label[:200], text[:200]) for label, colon, text in parts if colon
        )
        # Not `_messages`: pdsh exits with 0 even after errors.
        run = PdshRun(names, answers, ended.rc, ended.err.strip()[-_KEPT:])
        if answers or ended.rc is None or "command timeout" in ended.err:
            break
    return run


# --- The remote command of pdsh in a person's shell.

#: Seconds for a shell to start, with the user's start-up files.
_SHELL_S = 6
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

    @property
    def value(self) -> str | None:
        """PDSH_RCMD_TYPE; None: not set."""
        value = self.environment.get(_VARIABLE)
        return None if value is None else value[:80]


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


def _set_by(supervisor: ProcessSupervisor, kind: str, shell: _Shell) -> str:
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
            lines = [m[1] for m in _TRACED.finditer(traced) if _SETS.search(m[2])]
            if lines:
                return lines[-1][:300]
    for path in filter(os.path.isfile, map(os.path.expanduser, _FILES)):
        with contextlib.suppress(OSError):
            with open(path, encoding="utf-8", errors="replace") as file:
                rows = list(enumerate(file.read(1 << 20).splitlines(), 1))
            for number, row in reversed(rows):
                if _SETS.search(row) and not row.lstrip().startswith("#"):
                    return f"{path}:{number}"[:300]
    return ""
