"""The addresses of a name, within seconds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

RESOLVE_S = 3.0


def resolve(
    name: str, wait: Callable[[threading.Thread, float], None] = threading.Thread.join
) -> tuple[tuple[str, ...], str]:
    """The addresses of a name, in the resolver's order, or why it has none.

    A name service that hangs is left behind in its thread.

    wait: waits for a thread, at most these seconds; it may raise an exception
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
