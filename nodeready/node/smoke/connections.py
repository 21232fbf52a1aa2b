"""Connections to another node's listeners: their deadline, greeting, and kernel counters."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from dataclasses import replace

from nodeready.node.proofs import mesh
from nodeready.node.proofs.mesh import Try
from nodeready.node.smoke.listeners import NONCE_SIZE, WELCOME, greeting, listener_mark
from nodeready.node.smoke.orders import SmokePeer

#: Seconds for a connection: two lost packets of its handshake can be sent again.
_CONNECT_S = 3.5
#: Seconds until the end of a test from outside is noticed.
SLICE_S = 0.2
#: Bytes of a small message, which fits into one packet for any MTU.
SMALL = 1024
#: Bytes of one message of the large part.
BLOCK = 64 * 1024
#: A peer that sends no byte for these seconds is given up.
SILENT_S = 3.0
#: Minimum seconds before a link is called slow.
SLOW_S = 2.0


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
            if mesh.ready(connection, events, min(remaining_s, SLICE_S)):
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
            thread.join(SLICE_S)


#: Fields of the kernel's struct tcp_info (linux/tcp.h): unanswered zero window probes in a row,
#: packets that are not acknowledged, ms since the last acknowledgement, packets sent again, bytes
#: acknowledged, bytes not sent yet, packets that came twice. 0: the kernel is too old.
_TCP_INFO = struct.Struct("=3xB20xI28xI40xI16xQ16xI68xI")


def tcp_info(connection: socket.socket) -> tuple[int, ...]:
    """The kernel's counters of a connection; () if the kernel does not tell them."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return ()
    return _TCP_INFO.unpack(data.ljust(_TCP_INFO.size, b"\0"))


def greet(
    peer: SmokePeer, address: tuple[str, int], deadline: Deadline, purpose: tuple[int, int, int]
) -> tuple[Try, socket.socket | None]:
    """Connect to the peer's listener at this address and port, and wait for its welcome.

    purpose: number, rank, RING or PAIR
    """
    end = time.monotonic() + _CONNECT_S
    while True:
        attempt, connection = mesh.connect_to_listener(
            *address, listener_mark(peer.token), deadline.ready, _CONNECT_S
        )
        # The listener may reset this connection to make room, when many strangers connect.
        is_retried = connection is not None or (attempt.outcome == mesh.FOREIGN and attempt.error)
        if connection is not None:
            if _is_welcome(connection, peer.token, deadline, purpose):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return attempt, connection
            attempt = replace(attempt, outcome=mesh.FOREIGN)
        if not is_retried or time.monotonic() > end:
            return attempt, None
        deadline.pause(0.05)


def _is_welcome(
    connection: socket.socket, token: str, deadline: Deadline, purpose: tuple[int, int, int]
) -> bool:
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
            connection.send(greeting(token, nonce, *purpose))
            answer = read(len(WELCOME))
    except OSError:
        pass
    finally:
        if answer != WELCOME:
            connection.close()
    return answer == WELCOME


def random_blocks(number: int) -> bytes:
    """Two blocks, equal on all nodes; a block can begin anywhere in the first."""
    return random.Random(number).randbytes(2 * BLOCK)


def lost_packets(connection: socket.socket) -> int:
    """The number of lost packets; -1: unknown. Packets that came twice were not lost."""
    info = tcp_info(connection)
    return max(0, info[3] - info[-1]) if info else -1
