"""How to reach a node: the settings of the inventory, and of ssh's configuration.

`ssh -G` prints the settings of ssh_config, so that nodeready uses the same settings as ssh. The
inventory overrides them.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import hashlib
import os
import pwd
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gevent.lock import BoundedSemaphore
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient.client import get_ssh_config

from nodeready.core import shell
from nodeready.core.base import Line
from nodeready.subjects.ssh_client.config import directive, matches

# --- The lines of ssh_config files, in the order in which ssh takes them.


class SshLine(NamedTuple):
    """A line of ssh_config, and its conditions."""

    # criteria in the form of a Match line, which must all hold; () for all hosts
    when: tuple[str, ...]
    keyword: str  # in small letters
    text: str  # the line

    @property
    def value(self) -> str:
        parsed = directive(Line("", 0, self.text))
        return parsed.value if parsed else ""


_MAX_DEPTH = 16  # ssh itself gives up at this depth of Include (READCONF_MAX_DEPTH)


def ssh_lines(
    path: str,
    folder: str,
    when: tuple[str, ...] = (),
    depth: int = 0,
    read: set[Path] | None = None,
) -> Iterator[SshLine]:
    """The lines of an ssh_config file in the order in which ssh takes them, without Host, Match
    and Include. An unreadable file has none.

    folder: the directory of relative names in Include
    read:   gets the paths of all files that were read
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    if read is not None:
        read.add(Path(path))
    criteria = when
    for text in lines:
        parsed = directive(Line(path, 0, text))
        if parsed is None:
            continue
        if parsed.keyword == "host":
            criteria = (*when, f"originalhost {','.join(parsed.value.split())}")
        elif parsed.keyword == "match":
            every = parsed.value.strip().lower() == "all"
            criteria = when if every else (*when, text.strip().partition(" ")[2].strip())
        elif parsed.keyword == "include":
            for word in parsed.value.split() if depth < _MAX_DEPTH else ():
                inside = os.path.join(os.path.expanduser(folder), os.path.expanduser(word))
                for name in sorted(glob.glob(inside)):
                    yield from ssh_lines(name, folder, criteria, depth + 1, read)
        else:
            yield SshLine(criteria, parsed.keyword, text.strip())


# --- The settings of the inventory.


@dataclass(frozen=True)
class Login:
    """The inventory's settings of one login. They override ssh_config."""

    name: str  # as the argument of ssh
    config: str = ""  # the only configuration file; "": the user's and the system's
    user: str = ""  # "" and 0: ssh_config's
    port: int = 0  # likewise
    key: str = ""  # the only private key; "": the keys of ssh_config and of the agent
    passphrase: str = ""  # of that key
    password: str = ""
    uses_agent: bool = True
    uses_default_keys: bool = True  # try ~/.ssh/id_*
    known_hosts: str = ""  # the only known_hosts file; "": ssh_config's
    extra_known_hosts: str = ""  # a known_hosts file beside ssh_config's
    # StrictHostKeyChecking; "": ssh_config's, where ``ask`` accepts a new key
    host_key_checking: str = ""
    jumps: str | None = None  # ProxyJump; None: ssh_config's


# --- The settings of ssh_config, as ssh reads it.

#: Files of ssh_config, and the directories for relative names in Include (ssh_config(5)).
_USER_CONFIG = ("~/.ssh/config", "~/.ssh")
_SYSTEM_CONFIG = ("/etc/ssh/ssh_config", "/etc/ssh")
#: Processes of `ssh -G` at once; each takes some milliseconds of a core.
_SSH_G_SLOTS = BoundedSemaphore(max(2, os.cpu_count() or 2))
_TOKEN = re.compile(r"%([a-zA-Z%])")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: A host for ssh: not an option, and without characters that a shell interprets.
_HOST = re.compile(r"(?!-)[^\s'\"`$\\;&<>|(){}\x00-\x1f\x7f]+")
#: A user for ssh (valid_ruser of OpenSSH).
_USER = re.compile(r"(?!-)[^\s'\"`;&<>|(){}\x00-\x1f\x7f]+")


class SshConfigError(ConnectError):
    """A node cannot be reached, for the reason in the message."""


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """A path or a command of ssh_config, with ``~``, ``%h`` and ``${NAME}`` expanded."""
    text = _TOKEN.sub(lambda match: tokens.get(match[1], match[0]), os.path.expanduser(text))
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), text)


#: Keyword in lower case -> its values.
SshValues = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SshSettings:
    """The settings of ssh_config for a name."""

    name: str
    hostname: str
    user: str
    port: int
    # the tokens of identities and agents are not expanded
    values: SshValues
    # the keywords whose values differ from ssh's defaults
    changed_keys: frozenset[str] = frozenset()

    def value(self, key: str) -> str:
        """The first value; "": none."""
        value = (self.values.get(key) or ("",))[0]
        return "" if value.lower() == "none" else value

    def paths(self, key: str) -> tuple[str, ...]:
        tokens = self.tokens()
        values = self.values.get(key, ())
        return tuple(expand(value, tokens) for value in values if value != "none")

    def tokens(self, jump: bool = True) -> dict[str, str]:
        """ssh_config(5), TOKENS. jump: %C includes the jump host, as in newer ssh"""
        local = socket.gethostname()
        values = {
            "h": self.hostname, "n": self.name, "p": str(self.port), "r": self.user,
            "u": pwd.getpwuid(os.getuid()).pw_name, "i": str(os.getuid()),
            "d": os.path.expanduser("~"),
            "l": local, "L": local.partition(".")[0], "%": "%",
            "k": self.value("hostkeyalias") or self.name, "j": self.value("proxyjump"),
        }  # fmt: skip
        parts = local + self.hostname + str(self.port) + self.user + (values["j"] if jump else "")
        return {**values, "C": hashlib.sha1(parts.encode()).hexdigest()}


#: Settings of one name, and the template of each value that depends on the name.
SharedSettings = tuple[SshSettings, Mapping[str, str]]


class SshConfig:
    """ssh_config(5): the user's and the system's files, or the file that an inventory names.

    Names to which the same lines apply share one `ssh -G`: it takes some milliseconds, and there
    may be 10,000 nodes.
    """

    def __init__(self, file: str = "") -> None:
        self.file = os.path.abspath(os.path.expanduser(file)) if file else ""
        self._env = {**os.environ, "PATH": shell.search_path()}
        self._ssh = shell.find_program("ssh")
        sources = [(self.file, _USER_CONFIG[1])] if file else [_USER_CONFIG, _SYSTEM_CONFIG]
        paths = [(os.path.expanduser(name), base) for name, base in sources]
        self._lines = [line for path, base in paths for line in ssh_lines(path, base)]
        # ssh uses the home of the user's account, not $HOME.
        self._has_other_home = os.path.expanduser("~") != pwd.getpwuid(os.getuid()).pw_dir
        self._config_number: int | None = None
        self._config_rows: list[str] = []
        self._settings_by_key: dict[Any, SharedSettings | None] = {}
        self._locks: dict[Any, BoundedSemaphore] = {}
        self._defaults: SshValues | None = None
        self._index()

    def _index(self) -> None:
        self._unconditional: list[int] = []
        #: Criterion -> the lines directly under it; literal name -> criteria; criteria with globs.
        self._lines_by_criterion: dict[str, list[int]] = {}
        self._criteria_by_name: dict[str, list[str]] = {}
        self._glob_criteria: list[tuple[str, list[str]]] = []
        #: For each line that only ssh can judge: the criteria of names that must hold for it.
        self._other_criteria: set[tuple[str, ...]] = set()
        indexed: set[str] = set()
        for index, line in enumerate(self._lines):
            name_criteria = tuple(text for text in line.when if text.startswith("originalhost "))
            if len(name_criteria) < len(line.when):
                self._other_criteria.add(name_criteria)
            elif line.when:
                self._lines_by_criterion.setdefault(line.when[-1], []).append(index)
            else:
                self._unconditional.append(index)
            if line.keyword == "canonicalizehostname":
                self._other_criteria.add(name_criteria)
            for criterion in {*name_criteria} - indexed:
                indexed.add(criterion)
                patterns = criterion.partition(" ")[2].split(",")
                if any(set(word) & set("*?!") for word in patterns):
                    self._glob_criteria.append((criterion, patterns))
                else:
                    for word in patterns:
                        self._criteria_by_name.setdefault(word, []).append(criterion)

    def _active(self, name: str) -> list[int] | None:
        """The lines that apply to the name; None: only ssh can tell."""
        matching = {*self._criteria_by_name.get(name, ())}
        matching |= {name_of for name_of, globs in self._glob_criteria if matches(globs, name)}
        if name != name.lower() or any(
            matching.issuperset(criteria) for criteria in self._other_criteria
        ):
            return None
        lines_of = self._lines_by_criterion
        indexes = [index for criterion in matching for index in lines_of.get(criterion, ())]
        indexes = [index for index in indexes if matching.issuperset(self._lines[index].when)]
        return sorted([*self._unconditional, *indexes])

    def settings_of(self, name: str, user: str = "", port: int = 0) -> SshSettings:
        """The settings of ``ssh [-l user] [-p port] name``. Raises SshConfigError."""
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
            lines = [self._lines[index] for index in active]
            first = next((line.value for line in lines if line.keyword == "hostname"), "%h")
            texts = tuple(line.text for line in lines if line.keyword != "hostname")
            key = (texts, first == "%h", user, port)
            shared = self._cached_settings(key, name, user, port, lines)
            if shared is not None:
                return _settings_for(shared, name, first)
        answer = self._cached_settings((name, user, port), name, user, port, [])
        assert answer is not None
        return answer[0]

    def _cached_settings(
        self, key: Any, name: str, user: str, port: int, lines: list[Any]
    ) -> SharedSettings | None:
        """The settings for this key, asked for once; None: they apply only to this name."""
        if key not in self._settings_by_key:
            with self._locks.setdefault(key, BoundedSemaphore()):
                if key not in self._settings_by_key:
                    settings = self._settings(name, user, port)
                    self._settings_by_key[key] = _name_templates(settings, lines)
        return self._settings_by_key[key]

    def _settings(self, name: str, user: str, port: int) -> SshSettings:
        if self._defaults is None:
            try:
                self._defaults = self._run_ssh_g("nodeready", "", 0, "/dev/null")
            except SshConfigError:
                # Not OpenSSH, or older than 6.8.
                self._ssh = None
                return self._without_ssh(name, user, port)
        values = dict(self._run_ssh_g(name, user, port, self._config_path()))
        changed = {key for key, value in values.items() if self._defaults.get(key) != value}
        if "userknownhostsfile" not in changed:
            # From $HOME, as all other defaults.
            values["userknownhostsfile"] = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
        hostname, user = values.get("hostname", (name,))[0], values.get("user", ("",))[0]
        port = int(values.get("port", ("22",))[0])
        return SshSettings(name, hostname, user, port, values, frozenset(changed))

    def _config_path(self) -> str:
        """The file for `ssh -F`; "": ssh's default files."""
        if not self._has_other_home:
            return self.file
        if self._config_number is None:
            rows, criteria, home = self._config_rows, None, os.path.expanduser("~/")
            for line in self._lines:
                if line.when != criteria:
                    criteria = line.when
                    rows.append("Match " + (" ".join(criteria) or "all"))
                rows.append(re.sub(r"(?<![^\s\"=,])~/", lambda _: home, line.text))
            self._config_number = os.memfd_create("ssh_config", os.MFD_CLOEXEC)
            with open(self._config_number, "wb", closefd=False) as file:
                file.write("".join(f"{row}\n" for row in rows).encode("utf-8", "surrogateescape"))
        return f"/proc/{os.getpid()}/fd/{self._config_number}"

    def _run_ssh_g(self, name: str, user: str, port: int, file: str) -> SshValues:
        words = [self._ssh or "ssh", "-G", *(["-F", file] if file else [])]
        words += ["-l", user] if user else []
        words += ["-p", str(port)] if port else []
        with _SSH_G_SLOTS:
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
                output, errors = process.communicate()
            except BaseException:
                # Also the processes of a Match exec.
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if process.returncode:
            lines = errors.decode("utf-8", "replace").splitlines()
            lines = [line for line in lines if not line.startswith(("Pseudo", "terminating"))]
            reason = lines[0] if lines else "ssh -G fails"
            if match := re.match(r"/proc/\d+/fd/\d+:? line (\d+): ", reason):
                reason = f"{self._config_rows[int(match[1]) - 1]}: {reason[match.end() :]}"
            raise SshConfigError(f"the ssh configuration here: {reason}")
        values: dict[str, list[str]] = {}
        for row in output.decode("utf-8", "surrogateescape").splitlines():
            key, _, value = row.partition(" ")
            values.setdefault(key, []).append(value)
        for key in ("userknownhostsfile", "globalknownhostsfile"):
            values[key] = _words(" ".join(values.get(key, [])))
        return {key: tuple(value) for key, value in values.items()}

    def _without_ssh(self, name: str, user: str, port: int) -> SshSettings:
        """The settings by pyinfra's simpler parser: this machine has no ssh."""
        read = get_ssh_config(self.file or None)
        keys = tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519"))
        values: dict[str, tuple[str, ...]] = {"identityfile": keys}
        values["userknownhostsfile"] = ("~/.ssh/known_hosts",)
        config = read.lookup(name) if read is not None else {}
        for key, value in config.items():
            values[key] = tuple(value) if isinstance(value, list) else (value,)
        values["userknownhostsfile"] = tuple(_words(" ".join(values["userknownhostsfile"])))
        hostname = values.get("hostname", (name,))[0]
        user = user or values.get("user", (getpass.getuser(),))[0]
        port = port or int(values.get("port", ("22",))[0])
        return SshSettings(name, hostname, user, port, values, frozenset(config))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _name_templates(settings: SshSettings, lines: list[Any]) -> SharedSettings | None:
    """The settings, and a template for each value that depends on the name; None: unknown."""
    first: dict[str, str] = {}
    for line in lines:
        first.setdefault(line.keyword, line.value)
    templates = {}
    for key, raw in first.items():
        printed = " ".join(settings.values.get(key, ()))
        if "%" not in raw or key == "hostname" or printed == raw or key in _UNEXPANDED:
            continue
        expanded = {jump: expand(raw, settings.tokens(jump)) for jump in (True, False)}
        matching = [jump for jump, text in expanded.items() if text == printed]
        if not matching:
            return None
        templates[key] = raw if matching[0] else f"\0{raw}"
    tokens = {"h": settings.name, "n": settings.name, "%": "%"}
    hostname = expand(first.get("hostname", "%h"), tokens)
    return (settings, templates) if not lines or hostname == settings.hostname else None


#: Printed by `ssh -G` without expanding their tokens.
_UNEXPANDED = frozenset({"identityfile", "certificatefile", "proxycommand", "remotecommand"})


def _settings_for(shared: SharedSettings, name: str, hostname: str) -> SshSettings:
    """The settings for this name, from those of another name to which the same lines apply."""
    settings, templates = shared
    host = expand(hostname, {"h": name, "n": name, "%": "%"})
    changed = replace(settings, name=name, hostname=host)
    if not templates:
        return changed
    values = dict(changed.values)
    for key, raw in templates.items():
        text = expand(raw.lstrip("\0"), changed.tokens(not raw.startswith("\0")))
        values[key] = (text,) if len(values[key]) == 1 else tuple(_words(text))
    return replace(changed, values=values)


# --- Jump hosts.


def parse_jump_host(text: str) -> tuple[str, str, int]:
    """User, host and port of ``[user@]host[:port]`` or ``ssh://…``. Raises SshConfigError."""
    address = text.strip().removeprefix("ssh://").rstrip("/")
    user, _, address = address.rpartition("@")
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::(\d+))?|(.*:.*:.*)", address)
    if match is None or user.startswith("-"):
        raise SshConfigError(f"jump host {text!r} is none")
    return user, match[1] or match[2] or match[4], int(match[3] or 0)


#: Options of ssh without influence on where a ProxyCommand connects.
_HARMLESS_OPTIONS = frozenset({"-q", "-x", "-a", "-T", "-v", "-C", "-4", "-6"})


def jump_of(command: str) -> tuple[str, str]:
    """The jump host of a ProxyCommand ``ssh -W %h:%p HOST``, the older form of ProxyJump, and its
    configuration file; "" for any other command.
    """
    words = _words(command)
    if not words or words[0].rpartition("/")[2] != "ssh":
        return "", ""
    options = {"-l": "", "-p": "", "-F": "", "-W": ""}
    host, remaining = "", iter(words[1:])
    for word in remaining:
        if word in options:
            options[word] = next(remaining, "")
        elif word in _HARMLESS_OPTIONS:
            continue
        elif word.startswith("-") or host:
            return "", ""
        else:
            host = word
    if not host or options["-W"] not in ("%h:%p", "[%h]:%p"):
        return "", ""
    user = f"{options['-l']}@" if options["-l"] else ""
    return f"{user}{host}{':' if options['-p'] else ''}{options['-p']}", options["-F"]
