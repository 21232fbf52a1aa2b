"""The listeners on the job's ports, which echo the data of pairs.

A listener sends a mark made of the token, and a number for this connection. A node of the test
knows the token from its order, and answers with a greeting: that number, sealed with the token.
The listener then welcomes it. A stranger neither takes part nor learns the token.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nodeready.agent.proofs import mesh

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
                self._close_late(now_s)

    def _answer_calls(self, bell: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            bell.recv(64)
        while not self._calls.empty():
            function, result = self._calls.get()
            result.put(function())

    def _close_late(self, now_s: float) -> None:
        for guest in [guest for guest in self._guests.values() if guest.until < now_s]:
            self._close(guest.socket)

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
