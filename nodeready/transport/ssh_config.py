"""What is said of the way to a node: by the inventory, and by ssh's configuration.

What ssh_config says is asked of `ssh -G`, so that it holds here as it does for ssh; what the
inventory says stands before it.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gevent.lock import BoundedSemaphore
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient.client import get_ssh_config

from nodeready import shell
from nodeready.inventory.ssh_config_lines import ssh_lines
from nodeready.subjects.ssh_client.config import matches

# --- What the inventory says.


@dataclass(frozen=True)
class Login:
    """How to log in to one sshd: what the inventory says, which goes before ssh_config.

    name:    as a person would give it to ssh
    config:  the file that stands for the user's and the system's; "": those
    user, port: "" and 0 for ssh_config's
    key:     the private key, alone; "": those of ssh_config and of the agent
    phrase:  of that key
    agent:   ask the agent; usual: try ~/.ssh/id_*
    known:   the known_hosts file, alone; "": ssh_config's
    further: a known_hosts file beside ssh_config's
    strict:  StrictHostKeyChecking; "": ssh_config's, where ``ask`` accepts a new one
    jumps:   ProxyJump; None: ssh_config's
    """

    name: str
    config: str = ""
    user: str = ""
    port: int = 0
    key: str = ""
    phrase: str = ""
    password: str = ""
    agent: bool = True
    usual: bool = True
    known: str = ""
    further: str = ""
    strict: str = ""
    jumps: str | None = None


# --- What ssh_config says, as ssh reads it.

#: Files of ssh_config, and where their Include lines look for relative names (ssh_config(5)).
_USERS = ("~/.ssh/config", "~/.ssh")
_SYSTEMS = ("/etc/ssh/ssh_config", "/etc/ssh")
#: `ssh -G` at once; each is one process of some milliseconds.
_ASKING = BoundedSemaphore(max(2, os.cpu_count() or 2))
_TOKEN = re.compile(r"%([a-zA-Z%])")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: What may stand where ssh takes a host: nothing that is an option, or that a shell reads.
_HOST = re.compile(r"(?!-)[^\s'\"`$\\;&<>|(){}\x00-\x1f\x7f]+")
#: The same of a user (valid_ruser of OpenSSH).
_USER = re.compile(r"(?!-)[^\s'\"`;&<>|(){}\x00-\x1f\x7f]+")


class SshConfigError(ConnectError):
    """There is no way to a node, for a reason that is told as it is."""


def _home() -> str:
    return os.path.expanduser("~")


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """A path or a command of ssh_config with its ``~``, ``%h`` and ``${NAME}`` filled in."""
    text = _TOKEN.sub(lambda match: tokens.get(match[1], match[0]), os.path.expanduser(text))
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), text)


@dataclass(frozen=True)
class SshSettings:
    """What ssh_config says about a name.

    values: keyword in small letters -> its lines; identities and agents with their tokens
    said:   the keywords that have another value than without any file
    """

    name: str
    hostname: str
    user: str
    port: int
    values: Mapping[str, tuple[str, ...]]
    said: frozenset[str] = frozenset()

    def first(self, key: str) -> str:
        """The first value; "" for none."""
        value = (self.values.get(key) or ("",))[0]
        return "" if value.lower() == "none" else value

    def files(self, key: str) -> tuple[str, ...]:
        """The values as paths."""
        tokens = self.tokens()
        return tuple(expand(one, tokens) for one in self.values.get(key, ()) if one != "none")

    def tokens(self, jump: bool = True) -> dict[str, str]:
        """ssh_config(5), TOKENS. jump: with the jump host in %C, as newer ssh has it"""
        local = socket.gethostname()
        first = {
            "h": self.hostname, "n": self.name, "p": str(self.port), "r": self.user,
            "u": pwd.getpwuid(os.getuid()).pw_name, "i": str(os.getuid()), "d": _home(),
            "l": local, "L": local.partition(".")[0], "%": "%",
            "k": self.first("hostkeyalias") or self.name, "j": self.first("proxyjump"),
        }  # fmt: skip
        told = local + self.hostname + str(self.port) + self.user + (first["j"] if jump else "")
        return {**first, "C": hashlib.sha1(told.encode()).hexdigest()}


class SshConfig:
    """ssh_config(5): the user's and the system's files, or the one that an inventory names.

    Names for which the same lines hold share one question to ssh: `ssh -G` takes some
    milliseconds, and there may be 10,000 nodes.
    """

    def __init__(self, file: str = "") -> None:
        self.file = os.path.abspath(os.path.expanduser(file)) if file else ""
        path = shell.search_path(os.environ.get("PATH", ""))
        self._env = {**os.environ, "PATH": path}
        self._ssh = shutil.which("ssh", path=path)
        sources = [(self.file, _USERS[1])] if file else [_USERS, _SYSTEMS]
        self._lines = [
            line for name, below in sources for line in ssh_lines(os.path.expanduser(name), below)
        ]
        # ssh knows the home of the user's account alone, and not $HOME.
        self._elsewhere = _home() != pwd.getpwuid(os.getuid()).pw_dir
        self._named: int | None = None
        self._rows: list[str] = []
        self._found: dict[Any, tuple[SshSettings, Mapping[str, str]] | None] = {}
        self._asking: dict[Any, BoundedSemaphore] = {}
        self._usual: Mapping[str, tuple[str, ...]] | None = None
        self._index()

    def _index(self) -> None:
        self._everywhere: list[int] = []
        #: Criterion -> the lines right below it; a literal name -> criteria; criteria with globs.
        self._below: dict[str, list[int]] = {}
        self._literal: dict[str, list[str]] = {}
        self._globs: list[tuple[str, list[str]]] = []
        #: Other criteria than names, each with those of names that must hold for it.
        self._strange: set[tuple[str, ...]] = set()
        known: set[str] = set()
        for at, line in enumerate(self._lines):
            plain = tuple(one for one in line.when if one.startswith("originalhost "))
            if len(plain) < len(line.when):
                self._strange.add(tuple(one for one in plain if _is_names(one)))
            elif line.when:
                self._below.setdefault(line.when[-1], []).append(at)
            else:
                self._everywhere.append(at)
            if line.keyword == "canonicalizehostname":
                self._strange.add(plain)
            for one in {*plain} - known:
                known.add(one)
                patterns = _patterns(one)
                if any(set(word) & set("*?!") for word in patterns):
                    self._globs.append((one, patterns))
                else:
                    for word in patterns:
                        self._literal.setdefault(word, []).append(one)

    def _active(self, name: str) -> list[int] | None:
        """The lines that hold for the name; None where only ssh can tell."""
        good = {*self._literal.get(name, ())}
        good |= {one for one, patterns in self._globs if matches(patterns, name)}
        if name != name.lower() or any(good.issuperset(one) for one in self._strange):
            return None
        found = [at for one in good for at in self._below.get(one, ())]
        found = [at for at in found if good.issuperset(self._lines[at].when)]
        return sorted([*self._everywhere, *found])

    def about(self, name: str, user: str = "", port: int = 0) -> SshSettings:
        """What holds for ``ssh [-l user] [-p port] name``. Raises Unusable."""
        if not _HOST.fullmatch(name):
            raise SshConfigError(f"{name!r} can be no host of ssh")
        if user and not _USER.fullmatch(user):
            raise SshConfigError(f"{user!r} can be no user of ssh")
        if self.file and not os.access(self.file, os.R_OK):
            raise SshConfigError(f"the ssh configuration here: {self.file} cannot be read")
        if self._ssh is None:
            return self._without_ssh(name, user, port)
        active = self._active(name)
        if active is not None:
            lines = [self._lines[at] for at in active]
            first = next((one.value for one in lines if one.keyword == "hostname"), "%h")
            texts = tuple(one.text for one in lines if one.keyword != "hostname")
            shared = self._once((texts, first == "%h", user, port), name, user, port, lines)
            if shared is not None:
                return _for(shared, name, first)
        found = self._once((name, user, port), name, user, port, [])
        assert found is not None
        return found[0]

    def _once(
        self, key: Any, name: str, user: str, port: int, lines: list[Any]
    ) -> tuple[SshSettings, Mapping[str, str]] | None:
        """The answer for this key, asked for once; None: it holds for this name alone."""
        if key not in self._found:
            with self._asking.setdefault(key, BoundedSemaphore()):
                if key not in self._found:
                    settings = self._settings(name, user, port)
                    self._found[key] = _templates(settings, lines)
        return self._found[key]

    def _settings(self, name: str, user: str, port: int) -> SshSettings:
        if self._usual is None:
            try:
                self._usual = self._ask("nodeready", "", 0, "/dev/null")
            except SshConfigError:
                # Another ssh than OpenSSH's, or one of before 6.8.
                self._ssh = None
                return self._without_ssh(name, user, port)
        values = dict(self._ask(name, user, port, self._file()))
        said = {key for key, value in values.items() if self._usual.get(key) != value}
        if "userknownhostsfile" not in said:
            # By $HOME, as all that is not told otherwise.
            values["userknownhostsfile"] = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
        return SshSettings(
            name,
            values.get("hostname", (name,))[0],
            values.get("user", ("",))[0],
            int(values.get("port", ("22",))[0]),
            values,
            frozenset(said),
        )

    def _file(self) -> str:
        """What ssh is told to read; "": what it reads by itself."""
        if not self._elsewhere:
            return self.file
        if self._named is None:
            rows = self._rows
            before = None
            for line in self._lines:
                if line.when != before:
                    before = line.when
                    rows.append("Match " + (" ".join(before) or "all"))
                rows.append(re.sub(r"(?<![^\s\"=,])~/", lambda _: f"{_home()}/", line.text))
            self._named = os.memfd_create("ssh_config", os.MFD_CLOEXEC)
            with open(self._named, "wb", closefd=False) as file:
                file.write("".join(f"{row}\n" for row in rows).encode("utf-8", "surrogateescape"))
        return f"/proc/{os.getpid()}/fd/{self._named}"

    def _ask(self, name: str, user: str, port: int, file: str) -> Mapping[str, tuple[str, ...]]:
        words = [self._ssh or "ssh", "-G", *(["-F", file] if file else [])]
        words += ["-l", user] if user else []
        words += ["-p", str(port)] if port else []
        with _ASKING:
            process = subprocess.Popen(
                [*words, "--", name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._env,
                cwd="/",
                start_new_session=True,
            )
            try:
                told, errors = process.communicate()
            except BaseException:
                # With what a Match exec has started.
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if process.returncode:
            said = errors.decode("utf-8", "replace").splitlines()
            said = [one for one in said if not one.startswith(("Pseudo", "terminating"))]
            why = said[0] if said else "ssh -G fails"
            if match := re.match(r"/proc/\d+/fd/\d+:? line (\d+): ", why):
                why = f"{self._rows[int(match[1]) - 1]}: {why[match.end() :]}"
            raise SshConfigError(f"the ssh configuration here: {why}")
        found: dict[str, list[str]] = {}
        for row in told.decode("utf-8", "surrogateescape").splitlines():
            key, _, value = row.partition(" ")
            found.setdefault(key, []).append(value)
        for key in ("userknownhostsfile", "globalknownhostsfile"):
            found[key] = _words(" ".join(found.get(key, [])))
        return {key: tuple(value) for key, value in found.items()}

    def _without_ssh(self, name: str, user: str, port: int) -> SshSettings:
        """The same by pyinfra's reader, which knows less: this machine has no ssh."""
        read = get_ssh_config(self.file or None)
        values: dict[str, tuple[str, ...]] = {
            "identityfile": tuple(f"~/.ssh/id_{one}" for one in ("rsa", "ecdsa", "ed25519")),
            "userknownhostsfile": ("~/.ssh/known_hosts",),
        }
        said = read.lookup(name) if read is not None else {}
        for key, value in said.items():
            values[key] = tuple(value) if isinstance(value, list) else (value,)
        values["userknownhostsfile"] = tuple(_words(" ".join(values["userknownhostsfile"])))
        return SshSettings(
            name,
            values.get("hostname", (name,))[0],
            user or values.get("user", (getpass.getuser(),))[0],
            port or int(values.get("port", ("22",))[0]),
            values,
            frozenset(said),
        )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _patterns(criterion: str) -> list[str]:
    return criterion.partition(" ")[2].split(",")


def _is_names(criterion: str) -> bool:
    return criterion.startswith("originalhost ")


def _templates(
    settings: SshSettings, lines: list[Any]
) -> tuple[SshSettings, Mapping[str, str]] | None:
    """The settings with what depends on the name in them; None where we cannot tell how."""
    first: dict[str, str] = {}
    for line in lines:
        first.setdefault(line.keyword, line.value)
    found = {}
    for key, raw in first.items():
        told = " ".join(settings.values.get(key, ()))
        if "%" not in raw or key == "hostname" or told == raw or key in _UNTOUCHED:
            continue
        ways = [jump for jump in (True, False) if expand(raw, settings.tokens(jump)) == told]
        if not ways:
            return None
        found[key] = raw if ways[0] else f"\0{raw}"
    made = expand(first.get("hostname", "%h"), {"h": settings.name, "n": settings.name, "%": "%"})
    return (settings, found) if not lines or made == settings.hostname else None


#: Printed by `ssh -G` with their tokens.
_UNTOUCHED = frozenset({"identityfile", "certificatefile", "proxycommand", "remotecommand"})


def _for(shared: tuple[SshSettings, Mapping[str, str]], name: str, hostname: str) -> SshSettings:
    """What was told about another name for which the same lines hold, for this one."""
    settings, templates = shared
    made = expand(hostname, {"h": name, "n": name, "%": "%"})
    found = replace(settings, name=name, hostname=made)
    if not templates:
        return found
    values = dict(found.values)
    for key, raw in templates.items():
        text = expand(raw.lstrip("\0"), found.tokens(not raw.startswith("\0")))
        values[key] = (text,) if len(values[key]) == 1 else tuple(_words(text))
    return replace(found, values=values)


# --- Jump hosts, as ssh writes them.


def place(text: str) -> tuple[str, str, int]:
    """User, host and port of ``[user@]host[:port]`` or ``ssh://…``. Raises Unusable."""
    rest = text.strip().removeprefix("ssh://").rstrip("/")
    user, _, rest = rest.rpartition("@")
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::(\d+))?|(.*:.*:.*)", rest)
    if match is None or user.startswith("-"):
        raise SshConfigError(f"jump host {text!r} is none")
    return user, match[1] or match[2] or match[4], int(match[3] or 0)


#: A ProxyCommand that is ssh's own way through a jump host, in the form of before ProxyJump.
_QUIET = frozenset({"-q", "-x", "-a", "-T", "-v", "-C", "-4", "-6"})


def jump_of(command: str) -> tuple[str, str]:
    """The jump host of a ProxyCommand ``ssh -W %h:%p HOST``, and the configuration that ssh is
    given there; "" for any other command."""
    words = _words(command)
    if not words or words[0].rpartition("/")[2] != "ssh":
        return "", ""
    told = {"-l": "", "-p": "", "-F": "", "-W": ""}
    host, rest = "", iter(words[1:])
    for word in rest:
        if word in told:
            told[word] = next(rest, "")
        elif (word.startswith("-") and word not in _QUIET) or (host and word not in _QUIET):
            return "", ""
        elif word not in _QUIET:
            host = word
    if not host or told["-W"] not in ("%h:%p", "[%h]:%p"):
        return "", ""
    user = f"{told['-l']}@" if told["-l"] else ""
    return f"{user}{host}{':' if told['-p'] else ''}{told['-p']}", told["-F"]
