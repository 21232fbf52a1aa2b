"""A connection to another node's listeners: its deadline, greeting, and lost packets."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time

from nodeready.node.proofs import mesh
from nodeready.node.smoke.listeners import NONCE_SIZE, WELCOME, greeting, listener_mark
from nodeready.node.smoke.orders import SmokePeer

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


def greet(peer: SmokePeer, address: tuple[str, int], deadline: Deadline) -> socket.socket | None:
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


def lost_packets(connection: socket.socket) -> int:
    """The number of lost packets; -1: unknown. Packets that came twice were not lost."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return -1
    sent_again, came_twice = _TCP_INFO.unpack(data.ljust(_TCP_INFO.size, b"\0"))
    return max(0, int(sent_again) - int(came_twice))
