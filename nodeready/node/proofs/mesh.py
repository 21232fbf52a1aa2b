"""The node's part in the mesh: listen on the job's ports for seconds, connect where it is told.

One process that writes nothing. It ends with its standard input, and by an alarm of its own. It
connects to the same program on other nodes alone: to a port on which the target's program said
that it listens, at an address that the target said is its own; and there its token must come.
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
from typing import Any

from nodeready.subjects import wire
from nodeready.subjects.proof.facts import Busy, ProofConfig

#: The name by which `payload.program` finds the class.
Config = ProofConfig

# --- Listeners on the job's ports. Their token tells them from other programs.
#
# Plain sockets, as the job would open them.

#: A busy port is tried once more: what holds it may be a connection that is just ending.
_AGAIN_S = 0.5
#: Connections that are open at once, and how long each may be.
MOST, OPEN_S = 64, 5.0
#: That wait to be taken: one that finds no room comes again after a second, which looks slow.
_WAITING = 1024


def listener(port: int) -> socket.socket:
    """Listen as torchrun's TCPStore does: on all addresses, of both families where there are two.

    Raises OSError.
    """
    try:
        return _bound(socket.AF_INET6, "::", port)
    except OSError as problem:
        if problem.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
    return _bound(socket.AF_INET, "0.0.0.0", port)


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A TIME_WAIT of the last job is no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_WAITING)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def reset_on_close(connection: socket.socket) -> None:
    """Let close() reset the connection: no TIME_WAIT stays on a port (socket(7), SO_LINGER)."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class MeshListeners:
    """Our listeners. Each connection gets the token."""

    def __init__(self, ports: Iterable[int]) -> None:
        self.token = secrets.token_hex(8)
        self.came = 0
        self.sockets: dict[int, socket.socket] = {}
        errors = self.listen(ports)
        if errors:
            time.sleep(_AGAIN_S)
            errors = self.listen(errors)
        self.busy = tuple(Busy(port, error) for port, error in sorted(errors.items()))

    def listen(self, ports: Iterable[int]) -> dict[int, str]:
        """Open these; those that could not be opened, with the kernel's words."""
        errors = {}
        for port in ports:
            try:
                self.sockets[port] = listener(port)
            except OSError as problem:
                errors[port] = problem.strerror or str(problem)
        return errors

    def serve(self) -> None:
        """Send the token to whoever connects, until the process ends."""
        waiting = selectors.DefaultSelector()
        opened: dict[socket.socket, float] = {}

        def close(connection: socket.socket) -> None:
            waiting.unregister(connection)
            del opened[connection]
            connection.close()

        def accept(listener: socket.socket) -> None:
            connection, _ = listener.accept()
            self.came += 1
            connection.setblocking(False)
            reset_on_close(connection)
            opened[connection] = time.monotonic() + OPEN_S
            waiting.register(connection, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                connection.send(self.token.encode())

        listeners = set(self.sockets.values())
        for listener in listeners:
            waiting.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select(1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection in listeners:
                    with contextlib.suppress(OSError):
                        accept(connection)
                elif connection in opened:
                    # Whatever it says, it has its token.
                    close(connection)
            now_s = time.monotonic()
            late = [connection for connection, until in opened.items() if until < now_s]
            for connection in late + [*opened][: max(0, len(opened) - MOST)]:
                if connection in opened:
                    close(connection)


# --- Connections to other nodes, and what the program is told and answers.

OK, REFUSED, TIMEOUT, UNREACHABLE = "ok", "refused", "timeout", "unreachable"
FOREIGN, SILENT, FAILED, SKIPPED = "foreign", "silent", "failed", "skipped"

#: A SYN is sent again after 1 s (RFC 6298, section 2): in this time two are lost, not one.
CONNECT_S = 1.5
#: For the token; longer, for the target may be busy where the kernel has answered already.
TOKEN_S = 3.0
RESOLVE_S = 3.0
#: After so many time-outs in a row, from the first port on, the others are not waited for.
IN_A_ROW = 3


@dataclass(frozen=True)
class Listening:
    """The program's first line.

    token:     what its listeners send to whoever connects
    addresses: the node's own, without those that every node has (loopback, link-local)
    host:      the node's host name; resolved: its addresses on the node itself, in the resolver's
               order; error: why it has none
    """

    token: wire.Name
    ports: tuple[wire.Port, ...]
    busy: tuple[Busy, ...]
    addresses: tuple[wire.Name, ...]
    host: wire.Name = ""
    resolved: tuple[wire.Name, ...] = ()
    error: wire.Line = ""


# wire.decode looks for the classes of a field in the module.
__all__ = ["Busy", "Listening", "MeshRound", "Try", "main"]


@dataclass(frozen=True)
class Try:
    """One connection.

    outcome: ``ok``; ``refused``; ``timeout``; ``unreachable``; ``foreign``: something else than
             the token came, or the end; ``silent``: nothing came; ``failed``; ``skipped``: not
             tried after time-outs
    ms:      the handshake, 0 when there was none
    said:    the kernel's words, "" when the outcome says it all
    """

    port: wire.Port
    outcome: wire.Name
    ms: float
    said: wire.Line


@dataclass(frozen=True)
class MeshRound:
    """The result of one round: one target, its ports one after the other.

    resolved: the addresses of the target's name on this node, in the resolver's order
    error:    why the name has none
    address:  the one that was connected to: the first that is the target's own; "": none is
    tries:    fewer than ports when the round's time was over
    came:     how many connections our listeners have taken since they began
    host_resolved, host_error: the same as resolved and error, of the target's host name
    """

    number: wire.Count
    target: wire.Name
    resolved: tuple[wire.Name, ...]
    error: wire.Line
    address: wire.Name
    tries: tuple[Try, ...]
    came: wire.Count
    host_resolved: tuple[wire.Name, ...] = ()
    host_error: wire.Line = ""


def own_addresses(fib_trie: str, if_inet6: str) -> tuple[str, ...]:
    """The node's addresses from the texts of the files of these names in /proc/net.

    Loopback and link-local addresses are left out: every node has them, so they tell nothing.
    """
    peers = []
    last = ""
    for row in fib_trie.splitlines():
        text = row.strip()
        if text.startswith("|-- "):
            last = text[4:]
        elif text == "/32 host LOCAL":
            peers.append(last)
    for row in if_inet6.splitlines():
        digits = row.partition(" ")[0]
        if re.fullmatch("[0-9a-f]{32}", digits):
            peers.append(":".join(digits[at : at + 4] for at in range(0, 32, 4)))
    addresses = []
    for text in dict.fromkeys(peers):
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(text)
            if not (address.is_loopback or address.is_link_local):
                addresses.append(str(address))
    return tuple(addresses)


def addresses_here() -> tuple[str, ...]:
    """This node's addresses."""
    return own_addresses(_read("/proc/net/fib_trie"), _read("/proc/net/if_inet6"))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


#: Whether a socket is ready for these events of poll(2) within so many seconds. It may raise, to
#: end what waits.
Ready = Callable[[socket.socket, int, float], bool]


def ready(connection: socket.socket, events: int, seconds: float) -> bool:
    """Wait for the socket, and for nothing else."""
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(max(0, math.ceil(seconds * 1000))))


def resolve(
    name: str, wait: Callable[[threading.Thread, float], None] = threading.Thread.join
) -> tuple[tuple[str, ...], str]:
    """The addresses of a name, in the resolver's order, or why there are none. Bounded: a name
    service that hangs is left behind in its thread.

    wait: waits for the thread, so many seconds; it may raise
    """
    resolutions: list[tuple[tuple[str, ...], str]] = []

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = (str(row[4][0]).partition("%")[0] for row in rows)
            resolutions.append((tuple(dict.fromkeys(addresses)), ""))
        except (OSError, ValueError) as problem:
            resolutions.append(((), getattr(problem, "strerror", None) or str(problem)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait(asking, RESOLVE_S)
    return resolutions[0] if resolutions else ((), f"no answer in {RESOLVE_S:.0f} s")


def meet(
    address: str, port: int, token: bytes, ready: Ready = ready, connect_s: float = CONNECT_S
) -> tuple[Try, socket.socket | None]:
    """One connection to a listener of ours, and whether it is one: then the open connection, too.

    It does not block, and close() resets it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        attempt = _handshake(connection, address, port, ready, connect_s)
        if attempt.outcome == OK:
            attempt = _shake_hands(connection, attempt, token, ready)
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


def _shake_hands(connection: socket.socket, attempt: Try, token: bytes, ready: Ready) -> Try:
    """What became of a connection that was made: whether the token comes."""
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
            return replace(attempt, outcome=FOREIGN, said=error.strerror or str(error))
        received += data
        if not data or not token.startswith(received):
            return replace(attempt, outcome=FOREIGN)
    return attempt


_OUTCOMES = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: TIMEOUT,
    errno.EHOSTUNREACH: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
}


def tries(
    address: str, ports: Iterable[int], token: bytes, until: float, ready: Ready = ready
) -> Iterator[Try]:
    """The ports one after the other: never more than one connection of ours at a time."""
    timeouts = 0
    for number, port in enumerate(ports):
        if time.monotonic() > until:
            return
        if timeouts == IN_A_ROW:
            yield Try(port, SKIPPED, 0.0, "")
            continue
        attempt, peer = meet(address, port, token, ready)
        if peer is not None:
            peer.close()
        timeouts += attempt.outcome == TIMEOUT and timeouts == number
        yield attempt


def peer_address(resolved: Iterable[str], addresses: Iterable[str], own: Iterable[str]) -> str:
    """The first that is the target's own; "": none is.

    An address that this node has, too (a container bridge's, say) leads back here.
    """
    return next(
        (address for address in resolved if address in addresses and address not in own), ""
    )


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
        attempts = tuple(tries(address, request["ports"], token, began + request["limit_s"]))
    host = (resolved, error) if request["host"] == name else resolve(request["host"])
    return MeshRound(
        request["round"], name, resolved, error, address, attempts, listeners.came, *host
    )


def main(config: ProofConfig, *, ports: tuple[int, ...]) -> None:
    """Listen on these ports, and connect as the lines of standard input say.

    A line is a JSON object: round (its number), target (a name), ports, addresses, token and host
    (what the target's program said), limit_s (seconds for this round).
    """
    signal.alarm(config.limit_s)
    listeners = MeshListeners(ports)
    addresses = addresses_here()
    threading.Thread(target=listeners.serve, daemon=True).start()
    requests: queue.Queue[str] = queue.Queue()

    def work() -> None:
        # Whatever goes wrong ends the process: the connection's end tells the other side.
        try:
            while True:
                answer = _round(json.loads(requests.get()), addresses, listeners)
                print(wire.line(config.nonce, "round", answer), flush=True)
        finally:
            os._exit(1)

    threading.Thread(target=work, daemon=True).start()
    host = os.uname().nodename
    first = Listening(
        listeners.token,
        tuple(sorted(listeners.sockets)),
        listeners.busy,
        addresses,
        host,
        *resolve(host),
    )
    print(wire.line(config.nonce, "listening", first), flush=True)
    # The end of the input is the end of everything, in the middle of a connection, too.
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)
