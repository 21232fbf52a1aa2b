"""The node's part in the mesh: listen on the job's ports, and connect to the given targets.

The program is one process, which writes no file. It ends with its standard input and by its own
alarm. It connects only to the same program on other nodes: to a port on which the target's program
listens, at an address that the target reports as its own. The target's token must arrive there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import math
import os
import queue
import re
import secrets
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nodeready.agent.proc import file_text
from nodeready.agent.resolver import resolve
from nodeready.core import wire
from nodeready.subjects.proof.facts import Busy, ProofConfig

# --- Listeners on the job's ports, which are plain sockets as the job opens them. Their token
# distinguishes them from other programs.

_AGAIN_S = 0.5  # seconds until a busy port is tried again: an ending connection may hold it
OPEN_S = 5.0  # maximum seconds of a connection that is not welcome
#: The queue of a listener. A connection that finds it full tries again after a second, and looks
#: slow.
_BACKLOG = 1024


def listener(port: int) -> socket.socket:
    """Listen as torchrun's TCPStore does: on all IPv4, and IPv6 if enabled. Raises OSError."""
    try:
        return _listening_socket(socket.AF_INET6, "::", port)
    except OSError as problem:
        if problem.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
    return _listening_socket(socket.AF_INET, "0.0.0.0", port)


def _listening_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A TIME_WAIT of the last job must not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def reset_on_close(connection: socket.socket) -> None:
    """Let close() reset the connection: no TIME_WAIT stays on a port (socket(7), SO_LINGER)."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@dataclass
class Guest:
    """A connection to our listeners."""

    until: float
    received: bytes = b""  # of the token
    is_welcome: bool = False
    unsent: bytes = b""  # of what it gets back


class MeshListeners:
    """Our listeners. Each connection gets the greeting: the token."""

    max_silent = 64  # connections that are not welcome

    def __init__(self, ports: Iterable[int]) -> None:
        self.token = secrets.token_hex(8)
        self.greeting = self.token.encode()
        self.accepted_count = 0
        self.sockets: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._guests: dict[socket.socket, Guest] = {}
        self._lock = threading.Lock()  # held to change listeners, or to use a connection
        if errors := self.listen(ports):
            time.sleep(_AGAIN_S)
            errors = self.listen(errors)
        self.busy = tuple(Busy(port, error) for port, error in sorted(errors.items()))

    def listen(self, ports: Iterable[int]) -> dict[int, str]:
        """Listen on these ports. Returns the ports that failed, with the kernel's error."""
        errors = {}
        for port in ports:
            try:
                self.sockets[port] = listener(port)
                self._selector.register(self.sockets[port], selectors.EVENT_READ)
            except OSError as problem:
                errors[port] = problem.strerror or str(problem)
        return errors

    def serve(self) -> None:
        """Serve connections, until the process ends."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(0.25)]
            with self._lock:
                # New connections last: they must not push out connections that send the token.
                for connection in sorted(ready, key=lambda opened: opened not in self._guests):
                    assert isinstance(connection, socket.socket)
                    # Closed meanwhile: lent, or pushed out.
                    if connection.fileno() >= 0:
                        self._serve(connection)
                now_s = time.monotonic()
                for connection in [c for c, guest in self._guests.items() if guest.until < now_s]:
                    self.close(connection)

    def _serve(self, connection: socket.socket) -> None:
        guest = self._guests.get(connection)
        try:
            if guest is None:
                self._accept(connection)
            else:
                self.answer(connection, guest)
        except OSError:
            self.close(connection)

    def answer(self, connection: socket.socket, guest: Guest) -> None:
        """Act on a guest's data or end: it has the token. Raises OSError."""
        self.close(connection)

    def close(self, connection: socket.socket) -> None:
        if self._guests.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        until = time.monotonic() + OPEN_S
        for _ in range(32):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                break
            except OSError:
                # No descriptors are left: close the silent ones. The pause prevents a busy loop.
                self._close_silent(0)
                time.sleep(0.02)
                break
            self.accepted_count += 1
            connection.setblocking(False)
            reset_on_close(connection)
            self._guests[connection] = Guest(until)
            self._selector.register(connection, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                connection.send(self.greeting)
        self._close_silent(self.max_silent)

    def _close_silent(self, limit: int) -> None:
        """Close the oldest connections without a token, down to this number."""
        silent = [connection for connection, guest in self._guests.items() if not guest.is_welcome]
        for connection in silent[: max(0, len(silent) - limit)]:
            self.close(connection)


# --- Connections to other nodes, and the program's answers.

OK, REFUSED, TIMEOUT, UNREACHABLE = "ok", "refused", "timeout", "unreachable"
FOREIGN, SILENT, FAILED, SKIPPED = "foreign", "silent", "failed", "skipped"

CONNECT_S = 1.5  # a lost SYN is no time-out: it is sent again after 1 s (RFC 6298, section 2)
#: Seconds for the token; longer, because the target's program may be busy after its kernel
#: answered.
TOKEN_S = 3.0
MAX_TIMEOUTS = 3  # after these time-outs in a row from the first port on, no port is tried


@dataclass(frozen=True)
class Listening:
    """The program's first line."""

    token: wire.Name  # the token that its listeners send to each connection
    ports: tuple[wire.Port, ...]
    busy: tuple[Busy, ...]
    addresses: tuple[wire.Name, ...]  # the node's own, without loopback and link-local addresses
    host: wire.Name = ""  # the node's host name
    resolved: tuple[wire.Name, ...] = ()  # the host name's on the node itself, in order
    error: wire.Line = ""  # why the host name has no address


@dataclass(frozen=True)
class Try:
    """One connection."""

    port: wire.Port
    # ``ok``; ``refused``; ``timeout``; ``unreachable``; ``foreign``: other data than the token
    # came, or the end; ``silent``: none came; ``failed``; ``skipped``: not tried after time-outs
    outcome: wire.Name
    ms: float  # the handshake; 0: there was none
    error: wire.Line  # the kernel's; "" if the outcome is enough


@dataclass(frozen=True)
class MeshRound:
    """The result of one round: one target, and its ports in their order."""

    number: wire.Count
    target: wire.Name
    # the addresses of the target's name on this node, in the resolver's order
    resolved: tuple[wire.Name, ...]
    error: wire.Line  # why the name has no address
    address: wire.Name  # the first resolved one that is the target's own; "": none is
    tries: tuple[Try, ...]  # fewer than ports when the round's time was over
    accepted_count: wire.Count  # connections that our listeners have accepted since their start
    host_resolved: tuple[wire.Name, ...] = ()  # as resolved and error, of the target's host name
    host_error: wire.Line = ""  # likewise


def addresses_in(fib_trie: str, if_inet6: str) -> tuple[str, ...]:
    """The node's addresses, from the contents of these two files in /proc/net. Loopback and
    link-local addresses are left out, because every node has them.
    """
    texts = []
    last = ""
    for row in fib_trie.splitlines():
        text = row.strip()
        if text.startswith("|-- "):
            last = text[4:]
        elif text == "/32 host LOCAL":
            texts.append(last)
    for row in if_inet6.splitlines():
        digits = row.partition(" ")[0]
        if re.fullmatch("[0-9a-f]{32}", digits):
            texts.append(":".join(digits[start : start + 4] for start in range(0, 32, 4)))
    addresses = []
    for text in dict.fromkeys(texts):
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(text)
            if not (address.is_loopback or address.is_link_local):
                addresses.append(str(address))
    return tuple(addresses)


def local_addresses() -> tuple[str, ...]:
    return addresses_in(file_text("/proc/net/fib_trie"), file_text("/proc/net/if_inet6"))


#: Tells whether a socket is ready for these events of poll(2) within these seconds. It may raise
#: an exception, which ends the connection.
Ready = Callable[[socket.socket, int, float], bool]


def ready(connection: socket.socket, events: int, seconds: float) -> bool:
    """Whether the socket is ready for these events of poll(2) within these seconds."""
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(max(0, math.ceil(seconds * 1000))))


def connect_to_listener(
    address: str, port: int, token: bytes, ready: Ready = ready, connect_s: float = CONNECT_S
) -> tuple[Try, socket.socket | None]:
    """Connect to a listener. Returns the open connection if it is nodeready's listener. The
    connection does not block, and close() resets it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        attempt = _handshake(connection, address, port, ready, connect_s)
        if attempt.outcome == OK:
            attempt = _receive_token(connection, attempt, token, ready)
    except BaseException:
        connection.close()
        raise
    if attempt.outcome != OK:
        connection.close()
        return attempt, None
    reset_on_close(connection)
    return attempt, connection


def _handshake(
    connection: socket.socket, address: str, port: int, ready: Ready, connect_s: float
) -> Try:
    began = time.monotonic()
    problem = connection.connect_ex((address, port))
    if problem == errno.EINPROGRESS:
        if not ready(connection, select.POLLOUT, connect_s):
            return Try(port, TIMEOUT, 0.0, "")
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        return Try(port, _OUTCOMES.get(problem, FAILED), 0.0, os.strerror(problem))
    return Try(port, OK, round((time.monotonic() - began) * 1000, 3), "")


def _receive_token(connection: socket.socket, attempt: Try, token: bytes, ready: Ready) -> Try:
    """The attempt, with the outcome of the wait for the token."""
    until = time.monotonic() + TOKEN_S
    received = b""
    while len(received) < len(token):
        if not ready(connection, select.POLLIN, until - time.monotonic()):
            return replace(attempt, outcome=SILENT)
        try:
            data = connection.recv(len(token) - len(received))
        except BlockingIOError:
            continue
        except OSError as error:
            return replace(attempt, outcome=FOREIGN, error=error.strerror or str(error))
        received += data
        if not data or not token.startswith(received):
            return replace(attempt, outcome=FOREIGN)
    return attempt


_OUTCOMES = {
    errno.ECONNREFUSED: REFUSED, errno.ETIMEDOUT: TIMEOUT, errno.EHOSTUNREACH: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
}  # fmt: skip


def try_ports(
    address: str, ports: Iterable[int], token: bytes, until: float, ready: Ready = ready
) -> Iterator[Try]:
    """Try the ports, with at most one connection at a time."""
    timeouts = 0
    for number, port in enumerate(ports):
        if time.monotonic() > until:
            return
        if timeouts == MAX_TIMEOUTS:
            yield Try(port, SKIPPED, 0.0, "")
            continue
        attempt, connection = connect_to_listener(address, port, token, ready)
        if connection is not None:
            connection.close()
        timeouts += attempt.outcome == TIMEOUT and timeouts == number
        yield attempt


def peer_address(
    resolved: Iterable[str], addresses: Iterable[str], local_addresses: Iterable[str]
) -> str:
    """The first resolved address that is the target's own; "": none is. An address that this node
    has, too, such as a container bridge's, leads back here.
    """
    peer_only = {*addresses}.difference(local_addresses)
    return next((address for address in resolved if address in peer_only), "")


def _round(
    request: dict[str, Any], addresses: tuple[str, ...], listeners: MeshListeners
) -> MeshRound:
    began = time.monotonic()
    name = request["target"]
    resolved, error = resolve(name)
    address = peer_address(resolved, request["addresses"], addresses)
    attempts: tuple[Try, ...] = ()
    if address:
        token = request["token"].encode()
        attempts = tuple(try_ports(address, request["ports"], token, began + request["limit_s"]))
    host = (resolved, error) if request["host"] == name else resolve(request["host"])
    head = request["round"], name, resolved, error, address
    return MeshRound(*head, attempts, listeners.accepted_count, *host)


def main(config: ProofConfig, *, ports: tuple[int, ...]) -> None:
    """Listen on these ports, and connect to the targets in the lines of the standard input.

    A line is a JSON object: round (its number), target (a name), limit_s (seconds for this round),
    and ports, addresses, token and host as the target's program reports them.
    """
    signal.alarm(config.limit_s)
    listeners, addresses, host = MeshListeners(ports), local_addresses(), os.uname().nodename
    threading.Thread(target=listeners.serve, daemon=True).start()
    ports = tuple(sorted(listeners.sockets))
    first = Listening(listeners.token, ports, listeners.busy, addresses, host, *resolve(host))
    print(wire.line(config.nonce, "listening", first), flush=True)
    answer_requests(config.nonce, "round", None, lambda row: _round(row, addresses, listeners))


def answer_requests(
    nonce: str,
    name: str,
    start: Callable[[], Any] | None,
    answer: Callable[[dict[str, Any]], Any],
    end: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Print an answer to each line of the standard input, a JSON object, under this name; first
    what ``start`` returns. The input's end calls ``end`` and ends the process, even in an answer.
    """
    requests: queue.Queue[str] = queue.Queue()

    def work() -> None:
        # Any error ends the process, and the end of the connection tells the control machine.
        try:
            if start is not None:
                print(wire.line(nonce, name, start()), flush=True)
            while True:
                print(wire.line(nonce, name, answer(json.loads(requests.get()))), flush=True)
        finally:
            end()
            os._exit(1)

    threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        requests.put(line)
    end()
    os._exit(0)
