"""Listeners of our own on the job's ports, for seconds, and the token that tells them from others.

Plain sockets, as the job would open them; nothing here connects to anybody.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable

from nodeready.proofs.mesh_seen import Busy

#: A busy port is tried once more: what holds it may be a connection that is just ending.
_AGAIN_S = 0.5
#: Connections that are open at once, and how long each may be.
_MOST, _OPEN_S = 64, 5.0


def _listener(port: int) -> socket.socket:
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
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A TIME_WAIT of the last job is no obstacle.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, port))
        made.listen(_MOST)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def reset_on_close(one: socket.socket) -> None:
    """Its end is a reset: no TIME_WAIT is left on a port of the job's (socket(7), SO_LINGER)."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Listeners:
    """Our listeners. Each connection gets the token."""

    def __init__(self, ports: Iterable[int]) -> None:
        self.token = secrets.token_hex(8)
        self.came = 0
        self.sockets: dict[int, socket.socket] = {}
        errors = self._listen(ports)
        if errors:
            time.sleep(_AGAIN_S)
            errors = self._listen(errors)
        self.busy = tuple(Busy(port, error) for port, error in sorted(errors.items()))

    def _listen(self, ports: Iterable[int]) -> dict[int, str]:
        errors = {}
        for port in ports:
            try:
                self.sockets[port] = _listener(port)
            except OSError as problem:
                errors[port] = problem.strerror or str(problem)
        return errors

    def serve(self) -> None:
        """Send the token to whoever connects, until the process ends."""
        waiting = selectors.DefaultSelector()
        opened: dict[socket.socket, float] = {}

        def close(one: socket.socket) -> None:
            waiting.unregister(one)
            del opened[one]
            one.close()

        def accept(listener: socket.socket) -> None:
            one, _ = listener.accept()
            self.came += 1
            one.setblocking(False)
            reset_on_close(one)
            opened[one] = time.monotonic() + _OPEN_S
            waiting.register(one, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                one.send(self.token.encode())

        listeners = set(self.sockets.values())
        for listener in listeners:
            waiting.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select(1):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one in listeners:
                    with contextlib.suppress(OSError):
                        accept(one)
                elif one in opened:
                    # Whatever it says, it has its token.
                    close(one)
            now = time.monotonic()
            late = [one for one, until in opened.items() if until < now]
            for one in late + [*opened][: max(0, len(opened) - _MOST)]:
                if one in opened:
                    close(one)
