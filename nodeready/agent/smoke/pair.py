"""The plain path between two nodes: the listeners, which echo data, and the test of a path.

A listener sends a mark made of its token. A node of the test knows the token from its order, and
sends it; the listener then welcomes it. A stranger neither takes part nor learns the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import select
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from nodeready.agent.proofs import mesh
from nodeready.agent.proofs.mesh import Try
from nodeready.agent.resolver import resolve
from nodeready.agent.smoke.orders import PairAnswer, PairOrder, SmokePeer

WELCOME = b"+"
_READ = 256 * 1024  # bytes of one read
_IDLE_S = 10.0  # seconds without data after which an echo is closed


def listener_mark(token: str) -> bytes:
    """The text that a listener with this token sends first."""
    return hashlib.sha256(token.encode()).hexdigest()[:16].encode()


class SmokeListeners(mesh.MeshListeners):
    """Our listeners. One thread serves; other threads call `lend` and `take`."""

    max_silent = 256  # that have not sent the token

    def __init__(self, ports: Iterable[int]) -> None:
        super().__init__(ports)
        self.greeting = listener_mark(self.token)

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(sorted(self.sockets))

    def lend(self, port: int) -> None:
        """Close the listener of this port, if there is one, for another program."""
        with self._lock:
            if (listener := self.sockets.pop(port, None)) is not None:
                self._selector.unregister(listener)
                listener.close()

    def take(self, port: int) -> bool:
        """Listen on this port again. Returns whether that was possible."""
        with self._lock:
            return port in self.sockets or not self.listen([port])

    def answer(self, connection: socket.socket, guest: mesh.Guest) -> None:
        if guest.is_welcome:
            self._echo(connection, guest)
        else:
            self._read_token(connection, guest)

    def _read_token(self, connection: socket.socket, guest: mesh.Guest) -> None:
        token = self.token.encode()
        data = connection.recv(len(token) - len(guest.received))
        guest.received += data
        if data and len(guest.received) < len(token):
            return
        if not hmac.compare_digest(token, guest.received):
            self.close(connection)
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(WELCOME)
        guest.is_welcome, guest.until = True, time.monotonic() + _IDLE_S

    def _echo(self, connection: socket.socket, guest: mesh.Guest) -> None:
        """Send data back. Nothing more is read until all of it is sent."""
        if not guest.unsent:
            guest.unsent = connection.recv(_READ)
            if not guest.unsent:
                self.close(connection)
                return
        with contextlib.suppress(BlockingIOError):
            guest.unsent = guest.unsent[connection.send(guest.unsent) :]
        guest.until = time.monotonic() + _IDLE_S
        events = selectors.EVENT_WRITE if guest.unsent else selectors.EVENT_READ
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events)


# --- The path to one other node: its name, its ports, and data there and back.

_SMALL = 1024  # bytes of a small message, which fits into one packet for any MTU
_BLOCK = 64 * 1024  # bytes that are sent or received at once
SILENT_S = 3.0  # A peer that sends no byte for these seconds is given up
#: Minimum seconds before a path is called slow.
SLOW_S = 2.0
_ECHOES = 50
_REPEAT_S = 0.05  # seconds in which the large message is repeated: the best time counts
_CONNECT_S = 3.5  # seconds for a connection: two lost packets of its handshake can be sent again
_SLICE_S = 0.2  # seconds until the end of a test from outside is noticed


class TestOver(Exception):
    """The time is over, or the test is ended from outside."""


class Deadline:
    """The end of a test. Each wait raises TestOver when it has come."""

    def __init__(self, limit_s: float, stop: threading.Event) -> None:
        self.began = time.monotonic()
        # The rest of the time is for the answer.
        self.end = self.began + limit_s - min(0.3, limit_s / 10)
        self._stop = stop

    def check(self) -> float:
        """The time. Raises TestOver."""
        now_s = time.monotonic()
        if now_s > self.end or self._stop.is_set():
            raise TestOver
        return now_s

    def ready(self, connection: socket.socket, events: int, seconds: float) -> bool:
        """Whether the connection is ready for these events of poll(2) within these seconds."""
        until = time.monotonic() + seconds
        while True:
            remaining_s = until - self.check()
            if mesh.ready(connection, events, min(remaining_s, _SLICE_S)):
                return True
            if remaining_s <= 0:
                return False

    def join(self, thread: threading.Thread, seconds: float) -> None:
        until = time.monotonic() + seconds
        while thread.is_alive() and time.monotonic() < until:
            self.check()
            thread.join(_SLICE_S)


def _greet(peer: SmokePeer, address: tuple[str, int], deadline: Deadline) -> socket.socket | None:
    """Connect to the peer's listener at this address and port, and wait for its welcome."""
    end = time.monotonic() + _CONNECT_S
    while True:
        attempt, connection = mesh.connect_to_listener(
            *address, listener_mark(peer.token), deadline.ready, _CONNECT_S
        )
        # The listener may reset this connection to make room, when many strangers connect.
        is_retried = connection is not None or (attempt.outcome == mesh.FOREIGN and attempt.error)
        if connection is not None and _is_welcome(connection, peer.token, deadline):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        if not is_retried or time.monotonic() > end:
            return None
        time.sleep(0.05)
        deadline.check()


def _is_welcome(connection: socket.socket, token: str, deadline: Deadline) -> bool:
    answer = b""
    try:
        connection.send(token.encode())
        if deadline.ready(connection, select.POLLIN, mesh.TOKEN_S):
            answer = connection.recv(len(WELCOME))
    except OSError:
        pass
    finally:
        if answer != WELCOME:
            connection.close()
    return answer == WELCOME


#: Fields of the kernel's struct tcp_info (linux/tcp.h): packets sent again, packets that came
#: twice. 0: the kernel is too old.
_TCP_INFO = struct.Struct("=100xI112xI")


def _lost_packets(connection: socket.socket) -> int:
    """The number of lost packets; -1: unknown. Packets that came twice were not lost."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return -1
    sent_again, came_twice = _TCP_INFO.unpack(data.ljust(_TCP_INFO.size, b"\0"))
    return max(0, int(sent_again) - int(came_twice))


class _Echo:
    """The data of a pair, which goes to the target and comes back."""

    def __init__(self, connection: socket.socket, order: PairOrder, deadline: Deadline) -> None:
        self._connection, self._order, self._deadline = connection, order, deadline
        self._data = memoryview(2 * random.Random(order.number).randbytes(_BLOCK))
        self.outcome, self.ms, self.gbps = "small", 0.0, 0.0
        self._is_slow = False

    def run(self) -> None:
        """Raises TestOver, OSError."""
        times: list[float] = []
        until = time.monotonic() + 0.2 * (self._deadline.end - time.monotonic())
        while len(times) < _ECHOES and (len(times) < 3 or time.monotonic() < until):
            began = time.monotonic()
            if not self._exchange(min(_SMALL, self._order.small)):
                return
            times.append(time.monotonic() - began)
            self.ms = round(1000 * statistics.median(times), 3)
        self.outcome = "large"
        began = time.monotonic()
        if not self._exchange(self._order.large, measure=True):
            self.outcome = "slow" if self._is_slow else "large"
            return
        self.outcome, best = "ok", self.gbps
        # The first message shows the slow start only: the kernel keeps each peer's metrics of the
        # last connection (tcp_no_metrics_save in tcp(7)).
        while time.monotonic() - began < _REPEAT_S:
            if not self._exchange(self._order.large, measure=True):
                break
            best = max(best, self.gbps)
        self.gbps = best

    def _exchange(self, size: int, *, measure: bool = False) -> bool:
        """Send and receive at once. Returns whether all data came back undamaged."""
        began = received_at = time.monotonic()
        sent = received = 0
        while received < size:
            events = select.POLLIN | (select.POLLOUT if sent < size else 0)
            remaining_s = received_at + SILENT_S - time.monotonic()
            if remaining_s < 0 or not self._deadline.ready(self._connection, events, remaining_s):
                return False
            now_s = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                if sent < size:
                    start = sent % _BLOCK
                    end = start + min(_BLOCK, size - sent)
                    sent += self._connection.send(self._data[start:end])
            with contextlib.suppress(BlockingIOError):
                data = self._connection.recv(_BLOCK)
                start = received % _BLOCK
                if not data or data != bytes(self._data[start : start + len(data)]):
                    return False
                received, received_at = received + len(data), now_s
            if measure and received:
                self.gbps = round(received * 8e-9 / max(1e-6, now_s - began), 6)
            # A silent peer is not slow: silence has its own limit.
            is_receiving = received_at == now_s
            if measure and is_receiving and self._is_too_slow(began, now_s, size - received):
                self._is_slow = True
                return False
        if measure:
            self.gbps = round(size * 8e-9 / max(1e-6, time.monotonic() - began), 6)
        return True

    def _is_too_slow(self, began: float, now_s: float, remaining: int) -> bool:
        """Whether the remaining data cannot come in time."""
        waited_s, remaining_s = now_s - began, self._deadline.end - now_s
        if waited_s < max(SLOW_S, (waited_s + remaining_s) / 3) or not self.gbps:
            return False
        return remaining * 8e-9 / self.gbps > remaining_s


def run_pair(
    order: PairOrder, own_addresses: tuple[str, ...], stop: threading.Event
) -> PairAnswer:
    """Test the path from this node, which has these addresses, to the order's target."""
    deadline = Deadline(order.limit_s, stop)
    peer = order.target
    answer, tries = PairAnswer(order.number, peer.name), list[Try]()
    # When the time is over, the answer has the results so far.
    with contextlib.suppress(TestOver, OSError):
        resolved, error = resolve(peer.name, deadline.join)
        address = mesh.peer_address(resolved, peer.addresses, own_addresses)
        answer = replace(answer, resolved=resolved, error=error, address=address)
        # Half of the time is for the data.
        half = deadline.began + order.limit_s / 2
        ports = order.ports if address else ()
        mark = listener_mark(peer.token)
        tries.extend(mesh.try_ports(address, ports, mark, half, deadline.ready))
        port = next((attempt.port for attempt in tries if attempt.outcome == mesh.OK), None)
        if port is not None:
            answer = replace(answer, outcome="small")
            if (connection := _greet(peer, (address, port), deadline)) is not None:
                echo = _Echo(connection, order, deadline)
                try:
                    echo.run()
                finally:
                    answer = replace(answer, outcome=echo.outcome, ms=echo.ms, gbps=echo.gbps)
                    answer = replace(answer, retransmits=_lost_packets(connection))
                    connection.close()
    return replace(answer, tries=tuple(tries))
