"""A gateway of ClusterShell's topology.conf: our end of the connection to it, and its program.

A node behind a gateway is asked by the gateway's own ssh, with the gateway's configuration, keys
and known hosts. The gateway needs a Python: it runs `GatewayProgram`, whose source is its command
line. Orders go there as lines of JSON; a line of an answer is the number of a command, the kind of
the data (output, error, exit status), and base64.
"""

from __future__ import annotations

import asyncio
import base64
import configparser
import contextlib
import getpass
import inspect
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import gevent
from ClusterShell.Defaults import config_paths
from ClusterShell.NodeSet import NodeSet
from ClusterShell.Topology import TopologyError, TopologyGraph
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.queue import Empty, Queue

from nodeready.agent import asking
from nodeready.core.shell import quote
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.nodeset import split, unique
from nodeready.fleet.transport.connection import connect_error
from nodeready.fleet.transport.connectors import NOISE_BYTES, SSH_FAILED, OutputTooLarge

if TYPE_CHECKING:
    from pyinfra.api import Host


# --- The nodes as targets of ssh: the inventory's settings as options of ssh.

LOGIN_S = 10  # seconds for the rest of a login, after ConnectTimeout: TCP, banner and key exchange


@dataclass(frozen=True)
class SshTarget:
    """The target of ssh for a node, from the inventory."""

    name: str
    destination: str  # the argument of ssh: an address, or the name
    options: tuple[str, ...] = ()
    user: str = ""  # also for the ssh of a gateway; "": ssh's configuration has it
    key: str = ""  # the private key; "": ssh's configuration has it
    direct_reason: str = ""  # why no gateway is used; "": gateways may be used
    sudo: bool = False  # run scripts as root
    password: str = ""  # sudo's; "": none
    refused: str = ""  # why ClusterShell cannot ask the node; "": it can
    display_address: str = ""  # for error messages
    known_hosts: str = "~/.ssh/known_hosts"  # likewise

    def failure_text(self, errors: str, gateway: str = "") -> str:
        """Why ssh failed on this machine, or on the gateway of this name."""
        place = f" of gateway {gateway}" if gateway else ""
        return connect_error(
            connect_error_words(errors),
            self.name if gateway else self.display_address or self.destination,
            user=self.user or ("its own" if gateway else getpass.getuser()),
            key=f"any key{place}" if gateway else self.key or "any key of the agent or ~/.ssh",
            known_hosts=f"~/.ssh/known_hosts{place}" if gateway else self.known_hosts,
            limit_s=asking.CONNECT_TIMEOUT_S,
        )


#: OpenSSH's errors, and paramiko's words for them, which `connection.connect_error` knows. The
#: first match counts.
SSH_ERRORS = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        (r"host identification has changed|host key for .* has changed", "host key error"),
        (r"no \S+ host key is known for", "no host key for it in known_hosts"),
        (r"host key verification failed", "no host key for it in known_hosts"),
        (r"could not resolve hostname", "could not resolve"),
        (r"(stdio forwarding failed|connection closed by unknown|proxy)", "proxycommand"),
        (r"too many authentication failures", "too many authentication failures"),
        (r"no matching \S+( \S+)* found|unable to negotiate", "no acceptable algorithm"),
        (r"permission denied \(", "authentication failed"),
        (r"connection refused", "connection refused"),
        (r"no route to host|network is unreachable|host is down", "no route to host"),
        (r"during banner exchange|banner exchange: |invalid format", "banner"),
        (r"exceeded maxstartups", "exceeded maxstartups"),
        (r"not allowed at this time", "not allowed at this time"),
        (r"kex_exchange_identification: .*(closed|reset)", "hung up before its banner"),
        (r"timed? ?out|not responding", "timed out"),
        (r"load key|invalid private key", "private key file"),
        (r"reset by peer|broken pipe", "reset by peer"),
        (r"connection closed by|closed by remote host", "saw eof"),
    )
)


def connect_error_words(errors: str) -> str:
    """ssh's standard error in the words that `connect_error` knows."""
    rows = ["timed out", *(row.strip() for row in errors.splitlines() if row.strip())]
    known_words = (words for pattern, words in SSH_ERRORS if pattern.search(errors))
    return next(known_words, sanitise(rows[-1][:200]))


#: pyinfra's arguments that change a command, which only pyinfra supports.
_PYINFRA_ARGUMENTS = (
    "_su_user", "_doas", "_dzdo", "_sudo_user", "_env", "_chdir", "_use_su_login",
    "_use_sudo_login", "_preserve_sudo_env",
)  # fmt: skip


def ssh_target(host: Host, sudo: bool = False) -> SshTarget:
    """How to reach a host of an inventory. sudo: the default from pyinfra's configuration"""
    data: Any = host.data
    name = str(host.name)

    def text_of(key: str) -> str:
        value = data.get(key)
        return "" if value is None else str(value)

    user, key, port = text_of("ssh_user"), text_of("ssh_key"), text_of("ssh_port")
    destination = text_of("ssh_hostname") or name
    has_own_port = port not in ("", "22")
    known_hosts = text_of("ssh_known_hosts_file")
    # Never accept a changed key, and never ask.
    is_strict = text_of("ssh_strict_host_key_checking") in ("yes", "ask")
    options = [*COMMON, f"-oStrictHostKeyChecking={'yes' if is_strict else 'accept-new'}"]
    if file := text_of("ssh_config_file"):
        options = [f"-F{absolute(file)}", *options]
    if known_hosts:
        options.append(f"-oUserKnownHostsFile={absolute(known_hosts)}")
    if key:
        options += [f"-oIdentityFile={absolute(key)}", "-oIdentitiesOnly=yes"]
    if port:
        options.append(f"-oPort={port}")
    if user:
        options.append(f"-oUser={user}")
    sudo_value = data.get("_sudo")
    refused = ""
    if name.startswith("@"):
        refused = f"{name} is a connector of pyinfra's: ask with --via ssh"
    elif keys := [key for key in ("ssh_password", "ssh_key_password") if text_of(key)]:
        refused = f"{keys[0]} is for pyinfra's own ssh: ask with --via ssh"
    elif keys := [key for key in _PYINFRA_ARGUMENTS if data.get(key)]:
        refused = f"{keys[0]} is pyinfra's: ask with --via ssh"
    return SshTarget(
        name=name,
        destination=destination,
        options=tuple(options),
        user=user,
        key=absolute(key) if key else "",
        direct_reason="a port of its own" if has_own_port else "",
        sudo=bool(sudo if sudo_value is None else sudo_value),
        password=text_of("_sudo_password"),
        refused=refused,
        display_address=f"[{destination}]:{port}" if has_own_port else destination,
        known_hosts=known_hosts or "~/.ssh/known_hosts",
    )


#: Options of every ssh here.
COMMON = (
    "-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no", "-oForwardAgent=no",
    "-oForwardX11=no", "-oClearAllForwardings=yes", "-oRequestTTY=no",
    f"-oConnectTimeout={asking.CONNECT_TIMEOUT_S}", f"-oServerAliveInterval={asking.KEEPALIVE_S}",
    f"-oServerAliveCountMax={asking.DEAD_AFTER_S // asking.KEEPALIVE_S}",
)  # fmt: skip


def absolute(path: str) -> str:
    """The path from the home or the current directory."""
    return os.path.join(os.getcwd(), os.path.expanduser(path))


def without_own_keys(targets: Iterable[SshTarget]) -> list[SshTarget]:
    """The targets; one with another key than most uses no gateway, which lacks that key."""
    targets = list(targets)
    usual_keys = Counter(target.key for target in targets).most_common(1)
    return [
        target
        if target.direct_reason or target.key == usual_keys[0][0]
        else replace(target, direct_reason="a key of its own")
        for target in targets
    ]


# --- The gateways in topology.conf.


def topology_file() -> str:
    """The topology.conf that ClusterShell finds; "": none."""
    paths = [path for path in config_paths("topology.conf") if os.path.exists(path)]
    return str(paths[-1]) if paths else ""


def gateways_by_node(path: str) -> dict[str, tuple[str, ...]]:
    """Node behind gateways -> the gateways before it, by a topology.conf, seen from this machine.
    A gateway may itself be behind gateways. Raises TopologyError, or what the parsers raise.
    """
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore
    with open(path, encoding="utf-8") as file:
        parser.read_file(file)
    # ClusterShell compares names with several numbers pairwise: 1,000 names of a cloud took 3 s.
    # It gets names with one number.
    root, graph = socket.gethostname().split(".")[0], TopologyGraph()
    numbers = {root: 0}
    for words in parser.items("routes" if parser.has_section("routes") else "Main"):
        sides = [[numbers.setdefault(n, len(numbers)) for n in _names(text)] for text in words]
        if not all(sides):
            continue  # a group may be empty
        try:
            graph.add_route(*(NodeSet(f"n[{','.join(map(str, side))}]") for side in sides))
        except TopologyError as error:
            reason = str(error).partition("!")[0]
            raise TopologyError(f"{reason}: {': '.join(words)}") from None
    try:
        groups = list(graph.to_tree("n0").root.children())
    except TopologyError:
        raise TopologyError(f"no route begins at {root}") from None
    names = dict(zip((f"n{number}" for number in numbers.values()), numbers, strict=True))
    gateways_of: dict[str, tuple[str, ...]] = {}
    while groups:
        row = groups.pop()
        gateways = tuple(names[gateway] for gateway in row.nodeset)
        for group in row.children():
            gateways_of.update((names[node], gateways) for node in group.nodeset)
            groups.append(group)
    return gateways_of


def _names(text: str) -> list[str]:
    """The names of a node set of ClusterShell's."""
    parts = [text] if re.search("[@!&^]", text) else split(text)
    return unique(name for part in parts for name in NodeSet(part))


def has_gateways(names: Iterable[str], topology: str | None = None) -> bool:
    """Whether the tree has gateways between this machine and most of these nodes.

    topology: as for `Clush`, which reports a file that cannot be read; here it has none
    """
    path, selected = topology or topology_file(), {*names}
    if not path:
        return False
    try:
        behind_gateways = selected & gateways_by_node(path).keys()
    except Exception:  # noqa: BLE001 - ClusterShell's parser raises many kinds
        return False
    return 2 * len(behind_gateways) > len(selected)


# --- The gateway.

PROGRAM = "CLUSTERSHELL_GW_PYTHON_EXECUTABLE"  # the variable that names the Python of the gateways
#: Maximum lines of a gateway about commands that do not run. Some are usual: an ended ssh may
#: still have sent some.
STRAY_LINES = 100_000
_MAX_TEXTS = 8  # texts that a gateway keeps, because further commands may have the same input


class GatewayProgram:
    """The program on a gateway, under Python 3.6 and newer: runs commands, until its input ends.

    Its source is sent there, so it uses nothing else of this module.
    """

    def __init__(self) -> None:
        # By number. Python 3.6 evaluates annotations, so these are simple.
        self.running: Any = {}
        self.followers: Any = {}
        self.texts: Any = {}

    def send(self, number: int, kind: bytes, data: bytes) -> None:
        sys.stdout.buffer.write(b"%d %s %s\n" % (number, kind, base64.b64encode(data)))
        sys.stdout.buffer.flush()

    async def copy(self, number: int, kind: bytes, stream: Any) -> None:
        data = await stream.read(65536)
        while data:
            self.send(number, kind, data)
            data = await stream.read(65536)

    async def follow(self, number: int, process: Any) -> None:
        output, errors = process.stdout, process.stderr
        await asyncio.gather(self.copy(number, b"out", output), self.copy(number, b"err", errors))
        status = await process.wait()
        del self.running[number], self.followers[number]
        self.send(number, b"end", b"%d" % status)

    async def start(self, number: int, argv: Any, text: Any) -> None:
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            process = await asyncio.create_subprocess_exec(*argv, start_new_session=True, **pipes)
        except OSError as problem:
            self.send(number, b"err", str(problem).encode())
            self.send(number, b"end", b"127")
            return
        self.running[number] = process
        stdin: Any = process.stdin
        if text is not None:
            stdin.write(self.texts[text])
            stdin.close()
        self.followers[number] = asyncio.ensure_future(self.follow(number, process))

    async def do(self, order: Any) -> None:
        process: Any = self.running.get(order.get("number", -1))
        if "keep" in order:
            self.texts[order["keep"]] = base64.b64decode(order["data"])
        elif "forget" in order:
            del self.texts[order["forget"]]
        elif "argv" in order:
            await self.start(order["number"], order["argv"], order["text"])
        elif process is None:
            pass
        elif "input" in order:
            process.stdin.write(base64.b64decode(order["input"]))
        elif "eof" in order:
            process.stdin.close()
        else:
            self.kill(process)

    def kill(self, process: Any) -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    async def serve(self, hello: bytes) -> None:
        reader = asyncio.StreamReader(limit=1 << 30)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_event_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
        sys.stdout.buffer.write(b"\n" + hello + b"\n")
        sys.stdout.buffer.flush()
        line = await reader.readline()
        while line:
            await self.do(json.loads(line.decode()))
            line = await reader.readline()
        for process in self.running.values():
            self.kill(process)

    def main(self, hello: bytes) -> None:
        """hello: its first line"""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(self.serve(hello))
        # asyncio would wait for what was killed.
        os._exit(0)


def gateway_command(environ: Mapping[str, str], hello: bytes) -> str:
    """The line that runs a `GatewayProgram`."""
    modules = "asyncio, base64, contextlib, json, os, resource, signal, subprocess, sys"
    source = f"import {modules}\nAny = None\n{inspect.getsource(GatewayProgram)}"
    source += f"GatewayProgram().main({hello!r})\n"
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode("ascii")
    code = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'
    return f"{environ.get(PROGRAM) or 'python3'} -c {quote(code)}"


class GatewayCommand:
    """A command on a gateway, as a Stream and as a `RunningCommand`.

    max_bytes: of its output and its errors; more is dropped, and read as OutputTooLarge
    has_errors_apart: its errors are not among its output
    """

    def __init__(
        self, gateway: Gateway, number: int, max_bytes: int, has_errors_apart: bool
    ) -> None:
        self._gateway, self._number, self._room = gateway, number, max_bytes
        self._output: Queue[bytes | Exception] = Queue()
        self._errors: Queue[bytes | Exception] = Queue() if has_errors_apart else self._output
        self._status = 0
        self._has_ended = Event()

    def receive(self, kind: bytes, data: bytes) -> None:
        """Take a line of the gateway about this command. Raises ValueError."""
        if kind == b"end":
            self._status = int(data[:9])
            self.end(b"")
        elif kind not in (b"out", b"err"):
            raise ValueError("a line of no kind")
        elif self._room >= 0:
            self._room -= len(data)
            queue = self._output if kind == b"out" else self._errors
            queue.put(data if self._room >= 0 else OutputTooLarge(data))

    def end(self, last: bytes | Exception) -> None:
        """Note the command's end. last: what its readers get now"""
        self._has_ended.set()
        self._gateway.commands.pop(self._number, None)
        self._errors.put(b"")
        self._output.put(last)

    def _read(self, queue: Queue[bytes | Exception], limit_s: float | None) -> bytes:
        try:
            data = queue.get(timeout=limit_s)
        except Empty:
            raise TimeoutError from None
        if isinstance(data, Exception):
            raise data
        return data

    def read(self, limit_s: float | None) -> bytes:
        """See Stream. Raises TimeoutError, OutputTooLarge, EOFError when the gateway is lost."""
        return self._read(self._output, limit_s)

    def read_output(self) -> bytes:
        return self.read(None)

    def read_errors(self) -> bytes:
        try:
            return self._read(self._errors, None)
        except OutputTooLarge as problem:
            self._output.put(problem)
            return b""

    def write(self, data: bytes, limit_s: float | None) -> None:
        self._order(input=base64.b64encode(data).decode("ascii"))

    def send_input(self, data: bytes) -> None:
        """Nothing: the gateway has the input."""

    def status(self, errors: str) -> int:
        self._has_ended.wait()
        return self._status

    def close(self) -> None:
        """End the command's input, and a second later the command."""
        self._order(eof=True)
        if not self._has_ended.wait(1):
            self._order(kill=True)
            self.end(b"")

    def _order(self, **order: Any) -> None:
        if not self._has_ended.is_set():
            self._gateway.send({"number": self._number, **order})


class Gateway:
    """The connection to one gateway.

    slots:       commands at once
    asked_count: number of nodes that are asked through it now
    judged:      set when it is known whether it is fit
    on_close:    gets the gateway, and whether it was fit, when it is not used any more
    """

    def __init__(
        self, target: SshTarget, fanout: int, on_close: Callable[[Gateway, bool], None]
    ) -> None:
        self.target, self.name = target, target.name
        self.slots, self.asked_count = BoundedSemaphore(fanout), 0
        self.is_fit, self.unfit_reason, self.judged = False, "", Event()
        self.commands: dict[int, GatewayCommand] = {}
        self.hello = f"{asking.new_nonce()} gateway".encode()
        self._on_close, self._numbers, self._strays = on_close, itertools.count(), 0
        self._texts: dict[bytes, int] = {}
        self._orders: Queue[dict[str, Any]] = Queue()

    @property
    def is_over(self) -> bool:
        return self.judged.is_set() and not self.is_fit

    def send(self, order: dict[str, Any]) -> None:
        self._orders.put(order)

    def start(
        self, argv: Sequence[str], stdin: bytes | None, max_bytes: int, has_errors_apart: bool
    ) -> GatewayCommand:
        """Start a command there. Raises EOFError if the gateway has ended.

        stdin: all of its input; None: `GatewayCommand.write` sends it
        """
        if self.is_over:
            raise EOFError(self.error())
        if stdin is not None and stdin not in self._texts:
            self._texts[stdin] = next(self._numbers)
            data = base64.b64encode(stdin).decode("ascii")
            self.send({"keep": self._texts[stdin], "data": data})
            if len(self._texts) > _MAX_TEXTS:
                self.send({"forget": self._texts.pop(next(iter(self._texts)))})
        number = next(self._numbers)
        text = None if stdin is None else self._texts[stdin]
        self.send({"number": number, "argv": [*argv], "text": text})
        command = GatewayCommand(self, number, max_bytes, has_errors_apart)
        self.commands[number] = command
        return command

    def serve(self, connect: Callable[[], Any]) -> None:
        """Use the gateway until it ends. connect: starts its program, a `RunningCommand`"""
        errors, reason, program = bytearray(), "", cast("Any", None)

        def read_errors() -> None:
            while data := program.read_errors():
                asking.append_up_to(errors, data, asking.ERROR_BYTES)

        def write() -> None:
            # Its reader sees the end of the connection.
            with contextlib.suppress(OSError):
                while True:
                    program.write(json.dumps(self._orders.get()).encode() + b"\n", None)

        helpers: list[Any] = []
        limit_s = asking.CONNECT_TIMEOUT_S + LOGIN_S
        timer = gevent.Timeout.start_new(limit_s)
        try:
            program = connect()
            helpers += [gevent.spawn(read_errors), gevent.spawn(write)]
            self._read(program, timer)
            helpers[0].join(1)
        except gevent.Timeout:
            reason = f"no answer in {limit_s} s"
        except ValueError as problem:
            reason = f"its answer makes no sense: {problem}"
        except (OSError, EOFError, OutputTooLarge) as problem:
            reason = str(problem)
        finally:
            timer.close()
            was_fit, self.is_fit = self.is_fit, False
            gevent.killall(helpers, block=False)
            if not reason and was_fit:
                reason = "connection lost"
            if program is not None:
                program.close()
            if not reason:
                text = errors.decode("utf-8", "replace")
                reason = self._end_reason(text, program.status(text))
            self.unfit_reason = sanitise(reason, 200)
            self.judged.set()
            for command in list(self.commands.values()):
                command.end(EOFError(self.error()))
            self._on_close(self, was_fit)

    def _read(self, program: Any, timer: gevent.Timeout) -> None:
        """Read the program's lines. Raises ValueError for one that makes no sense."""
        unread = b""
        while data := program.read_output():
            *rows, unread = (unread + data).split(b"\n")
            for row in rows:
                if self.is_fit:
                    self._receive(row)
                elif row.rstrip(b"\r") == self.hello:
                    timer.close()
                    self.is_fit = True
                    self.judged.set()
            if len(unread) > NOISE_BYTES:
                raise ValueError("a line without an end")

    def _receive(self, row: bytes) -> None:
        number, kind, data = row.split(b" ")
        command = self.commands.get(int(number[:9]))
        if command is not None:
            command.receive(kind, base64.b64decode(data, validate=True))
            return
        self._strays += 1
        if self._strays > STRAY_LINES:
            raise ValueError("answers of other commands")

    def _end_reason(self, text: str, status: int) -> str:
        """Why the gateway's program did not begin."""
        if status == SSH_FAILED:
            return self.target.failure_text(text)
        rows = [row.strip() for row in text.splitlines() if row.strip()]
        return rows[-1] if rows else f"its program ended ({status})"

    def error(self) -> str:
        """The error of a node whose gateway has gone."""
        return f"gateway {self.name}: {self.unfit_reason or 'connection lost'}"

    def remedy(self) -> str:
        """The remedy, if it was never fit."""
        if "not found" in self.unfit_reason:
            return f"install python3 there, or set {PROGRAM}"
        return "repair it, or take it out of topology.conf"
