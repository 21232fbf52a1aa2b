"""The plain path between two nodes: the listeners, which echo data, and the test of a path.

A listener sends a mark made of the token, and a number for this connection. A node of the test
knows the token from its order, and answers with a greeting: that number, sealed with the token.
The listener then welcomes it. A stranger neither takes part nor learns the token.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import random
import secrets
import select
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nodeready.agent.proofs import mesh
from nodeready.agent.proofs.mesh import Try
from nodeready.agent.resolver import resolve
from nodeready.agent.smoke.orders import PairAnswer, PairOrder, SmokePeer

NONCE_SIZE, _GREETING_SIZE, WELCOME = 16, 16, b"+"
#: Maximum connections without a greeting.
_MAX_SILENT = 256
#: Bytes of one read.
_READ = 256 * 1024
#: Seconds without data after which an echo is closed.
_IDLE_S = 10.0


def listener_mark(token: str) -> bytes:
    """The text that a listener with this token sends first."""
    return hmac.new(token.encode(), b"listener", "sha256").hexdigest()[:16].encode()


def greeting(token: str, nonce: bytes) -> bytes:
    """The sealed number of a connection."""
    return hmac.new(token.encode(), nonce, "sha256").digest()[:_GREETING_SIZE]


@dataclass
class _Guest:
    """A connection in the listeners' thread."""

    socket: socket.socket
    nonce: bytes
    until: float
    received: bytes = b""  # bytes of its greeting; unsent: bytes of its echo
    is_greeted: bool = False
    unsent: bytes = b""


class SmokeListeners(mesh.MeshListeners):
    """Our listeners. One thread serves; other threads call `lend` and `take`."""

    def __init__(self, ports: Iterable[int]) -> None:
        super().__init__(ports)
        self._mark = listener_mark(self.token)
        self._selector = selectors.DefaultSelector()
        self._guests: dict[socket.socket, _Guest] = {}
        self._calls: queue.Queue[tuple[Callable[[], bool], queue.Queue[bool]]] = queue.Queue()
        self._bell, self._bell_end = socket.socketpair()
        self._is_serving = False
        # Shared by the threads.
        self._lock = threading.Lock()
        #: Open, while another program accepts the connections.
        self._lent: dict[int, socket.socket] = {}

    def descriptors(self) -> dict[int, int]:
        """Port -> its listener's descriptor; lent listeners are included."""
        sockets = {**self._lent, **self.sockets}
        return {port: listener.fileno() for port, listener in sockets.items()}

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports on which we listen now."""
        return tuple(sorted(self.sockets))

    # Calls of other threads.

    def lend(self, port: int, *, is_shared: bool = True) -> None:
        """Leave this port to another program. There may be no listener.
        is_shared: the program has the listener, too, so it stays open; else it is closed
        """

        def leave() -> bool:
            listener = self.sockets.pop(port, None)
            if listener is None:
                return True
            if self._is_serving:
                self._selector.unregister(listener)
            if is_shared:
                self._lent[port] = listener
            else:
                listener.close()
            return True

        self._call(leave)

    def take(self, port: int) -> bool:
        """Listen on this port again. Returns whether that was possible."""

        def listen() -> bool:
            if port in self._lent:
                self.sockets[port] = self._lent.pop(port)
                # The program that had it may have changed the flags, which both share.
                self.sockets[port].setblocking(False)
            elif port in self.sockets or self.listen([port]):
                return port in self.sockets
            if self._is_serving:
                self._selector.register(self.sockets[port], selectors.EVENT_READ, self._accept)
            return True

        return self._call(listen)

    def _call(self, function: Callable[[], bool]) -> bool:
        with self._lock:
            if not self._is_serving:
                return function()
        result: queue.Queue[bool] = queue.Queue()
        self._calls.put((function, result))
        self._bell_end.send(b".")
        return result.get(timeout=_IDLE_S)

    # The thread of the listeners.

    def serve(self) -> None:
        """Serve connections, until the process ends."""
        self._bell.setblocking(False)
        with self._lock:
            self._selector.register(self._bell, selectors.EVENT_READ, self._answer_calls)
            for listener in self.sockets.values():
                self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._is_serving = True
        swept_at = 0.0
        while True:
            listening = {listener.fileno() for listener in self.sockets.values()}
            # New connections last: they must not push out connections that send a greeting.
            ready = [key for key, _ in self._selector.select(1)]
            for key in sorted(ready, key=lambda key: key.fd in listening):
                connection = key.fileobj
                # An earlier event may have closed it.
                if isinstance(connection, socket.socket) and connection.fileno() >= 0:
                    try:
                        key.data(connection)
                    except OSError:
                        self._close(connection)
            now_s = time.monotonic()
            if now_s > swept_at + 0.25:
                swept_at = now_s
                for guest in [guest for guest in self._guests.values() if guest.until < now_s]:
                    self._close(guest.socket)

    def _answer_calls(self, bell: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            bell.recv(64)
        while not self._calls.empty():
            function, result = self._calls.get()
            result.put(function())

    def _close(self, connection: socket.socket) -> None:
        if self._guests.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        until = time.monotonic() + mesh.OPEN_S
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
            mesh.reset_on_close(connection)
            guest = _Guest(connection, secrets.token_bytes(NONCE_SIZE), until)
            self._guests[connection] = guest
            self._selector.register(connection, selectors.EVENT_READ, self._read_greeting)
            with contextlib.suppress(OSError):
                connection.send(self._mark + guest.nonce)
        self._close_silent(_MAX_SILENT)

    def _close_silent(self, limit: int) -> None:
        """Close the oldest connections without a greeting, down to this number."""
        silent = [guest for guest in self._guests.values() if not guest.is_greeted]
        for guest in silent[: max(0, len(silent) - limit)]:
            self._close(guest.socket)

    def _read_greeting(self, connection: socket.socket) -> None:
        guest = self._guests[connection]
        data = connection.recv(_GREETING_SIZE - len(guest.received))
        guest.received += data
        if data and len(guest.received) < _GREETING_SIZE:
            return
        if not hmac.compare_digest(greeting(self.token, guest.nonce), guest.received):
            self._close(connection)
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(WELCOME)
        guest.is_greeted, guest.until = True, time.monotonic() + _IDLE_S
        self._selector.modify(connection, selectors.EVENT_READ, self._echo)

    def _echo(self, connection: socket.socket) -> None:
        """Send data back. Nothing more is read until all of it is sent."""
        guest = self._guests[connection]
        if not guest.unsent:
            guest.unsent = connection.recv(_READ)
            if not guest.unsent:
                self._close(connection)
                return
        with contextlib.suppress(BlockingIOError):
            guest.unsent = guest.unsent[connection.send(guest.unsent) :]
        guest.until = time.monotonic() + _IDLE_S
        events = selectors.EVENT_WRITE if guest.unsent else selectors.EVENT_READ
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, self._echo)


# --- The path to one other node: its name, its ports, and data there and back.

#: Bytes of a small message, which fits into one packet for any MTU.
_SMALL = 1024
#: Bytes that are sent or received at once.
_BLOCK = 64 * 1024
#: A peer that sends no byte for these seconds is given up.
SILENT_S = 3.0
#: Minimum seconds before a path is called slow.
SLOW_S = 2.0
_ECHOES = 50
#: Seconds in which the large message is repeated: the best time counts.
_REPEAT_S = 0.05
#: Seconds for a connection: two lost packets of its handshake can be sent again.
_CONNECT_S = 3.5
#: Seconds until the end of a test from outside is noticed.
_SLICE_S = 0.2


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

    def pause(self, seconds: float) -> None:
        """Wait for these seconds."""
        self._stop.wait(seconds)
        self.check()

    def join(self, thread: threading.Thread, seconds: float) -> None:
        """Wait for the thread, at most these seconds."""
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
        deadline.pause(0.05)


def _is_welcome(connection: socket.socket, token: str, deadline: Deadline) -> bool:
    def read(count: int) -> bytes:
        data = b""
        while len(data) < count and deadline.ready(connection, select.POLLIN, mesh.TOKEN_S):
            chunk = connection.recv(count - len(data))
            if not chunk:
                break
            data += chunk
        return data

    answer = b""
    try:
        nonce = read(NONCE_SIZE)
        if len(nonce) == NONCE_SIZE:
            connection.send(greeting(token, nonce))
            answer = read(len(WELCOME))
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
    order: PairOrder,
    own_addresses: tuple[str, ...],
    listeners: SmokeListeners,
    stop: threading.Event,
) -> PairAnswer:
    """Test the path from this node, which has these addresses, to the order's target."""
    deadline = Deadline(order.limit_s, stop)
    peer = order.target
    resolved: tuple[str, ...] = ()
    error = address = outcome = ""
    ms = gbps = 0.0
    retransmits = -1
    tries: list[Try] = []
    # When the time is over, the answer has the results so far.
    with contextlib.suppress(TestOver, OSError):
        resolved, error = resolve(peer.name, deadline.join)
        address = mesh.peer_address(resolved, peer.addresses, own_addresses)
        # Half of the time is for the data.
        half = deadline.began + order.limit_s / 2
        ports = order.ports if address else ()
        for attempt in mesh.try_ports(
            address, ports, listener_mark(peer.token), half, deadline.ready
        ):
            tries.append(attempt)
        port = next((attempt.port for attempt in tries if attempt.outcome == mesh.OK), None)
        if port is not None:
            outcome = "small"
            connection = _greet(peer, (address, port), deadline)
            if connection is not None:
                echo = _Echo(connection, order, deadline)
                try:
                    echo.run()
                finally:
                    outcome, ms, gbps = echo.outcome, echo.ms, echo.gbps
                    retransmits = _lost_packets(connection)
                    connection.close()
    return PairAnswer(
        number=order.number, target=peer.name, resolved=resolved, error=error, address=address,
        tries=tuple(tries), outcome=outcome, ms=ms, gbps=gbps, retransmits=retransmits,
        accepted_count=listeners.accepted_count,
    )  # fmt: skip
