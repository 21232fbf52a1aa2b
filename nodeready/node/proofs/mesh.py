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
import os
import queue
import re
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nodeready.subjects import wire
from nodeready.subjects.proof.facts import Busy, Config

# --- Listeners on the job's ports. Their token tells them from other programs.
#
# Plain sockets, as the job would open them.

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
    """Let close() reset the connection: no TIME_WAIT stays on a port (socket(7), SO_LINGER)."""
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
    """

    token: wire.Name
    ports: tuple[wire.Port, ...]
    busy: tuple[Busy, ...]
    addresses: tuple[wire.Name, ...]


# wire.decode looks for the classes of a field in the module.
__all__ = ["Busy", "Listening", "Round", "Try", "main"]


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
class Round:
    """The result of one round: one target, its ports one after the other.

    resolved: the addresses of the target's name on this node, in the resolver's order
    error:    why the name has none
    address:  the one that was connected to: the first that is the target's own; "": none is
    tries:    fewer than ports when the round's time was over
    came:     how many connections our listeners have taken since they began
    """

    number: wire.Count
    target: wire.Name
    resolved: tuple[wire.Name, ...]
    error: wire.Line
    address: wire.Name
    tries: tuple[Try, ...]
    came: wire.Count


def own_addresses(fib_trie: str, if_inet6: str) -> tuple[str, ...]:
    """The node's addresses from the texts of the files of these names in /proc/net.

    Loopback and link-local addresses are left out: every node has them, so they tell nothing.
    """
    found = []
    last = ""
    for row in fib_trie.splitlines():
        text = row.strip()
        if text.startswith("|-- "):
            last = text[4:]
        elif text == "/32 host LOCAL":
            found.append(last)
    for row in if_inet6.splitlines():
        digits = row.partition(" ")[0]
        if re.fullmatch("[0-9a-f]{32}", digits):
            found.append(":".join(digits[at : at + 4] for at in range(0, 32, 4)))
    addresses = []
    for text in dict.fromkeys(found):
        with contextlib.suppress(ValueError):
            one = ipaddress.ip_address(text)
            if not (one.is_loopback or one.is_link_local):
                addresses.append(str(one))
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


def _resolve(name: str) -> tuple[tuple[str, ...], str]:
    """The addresses of a name, in the resolver's order, or why there are none. Bounded: a name
    service that hangs is left behind in its thread."""
    found: list[tuple[tuple[str, ...], str]] = []

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = (str(row[4][0]).partition("%")[0] for row in rows)
            found.append((tuple(dict.fromkeys(addresses)), ""))
        except (OSError, ValueError) as problem:
            found.append(((), getattr(problem, "strerror", None) or str(problem)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(RESOLVE_S)
    return found[0] if found else ((), f"no answer in {RESOLVE_S:.0f} s")


def _connect(address: str, port: int, token: bytes) -> Try:
    """One connection to a listener of ours, and whether it is one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(CONNECT_S)
        began = time.monotonic()
        try:
            one.connect((address, port))
        except socket.timeout:
            return Try(port, TIMEOUT, 0.0, "")
        except OSError as problem:
            return Try(port, _outcome(problem), 0.0, problem.strerror or str(problem))
        ms = round((time.monotonic() - began) * 1000, 3)
        one.settimeout(TOKEN_S)
        heard = b""
        try:
            while len(heard) < len(token) and token.startswith(heard):
                piece = one.recv(len(token) - len(heard))
                if not piece:
                    break
                heard += piece
        except socket.timeout:
            return Try(port, SILENT, ms, "")
        except OSError as problem:
            return Try(port, FOREIGN, ms, problem.strerror or str(problem))
        if heard != token:
            return Try(port, FOREIGN, ms, "")
        reset_on_close(one)
        return Try(port, OK, ms, "")


def _outcome(problem: OSError) -> str:
    if problem.errno == errno.ECONNREFUSED:
        return REFUSED
    if problem.errno == errno.ETIMEDOUT:
        return TIMEOUT
    if problem.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return UNREACHABLE
    return FAILED


def _tries(address: str, ports: Iterable[int], token: str, until: float) -> tuple[Try, ...]:
    """The ports one after the other: never more than one connection of ours at a time."""
    found: list[Try] = []
    for port in ports:
        if time.monotonic() > until:
            break
        if [one.outcome for one in found[:IN_A_ROW]] == [TIMEOUT] * IN_A_ROW:
            found.append(Try(port, SKIPPED, 0.0, ""))
            continue
        found.append(_connect(address, port, token.encode()))
    return tuple(found)


def _round(asked: dict[str, Any], own: tuple[str, ...], listeners: Listeners) -> Round:
    began = time.monotonic()
    name = asked["target"]
    resolved, error = _resolve(name)
    # An address that this node has, too (a container bridge's, say) leads back here.
    theirs = [one for one in resolved if one in asked["addresses"] and one not in own]
    address = theirs[0] if theirs else ""
    tries: tuple[Try, ...] = ()
    if address:
        tries = _tries(address, asked["ports"], asked["token"], began + asked["limit_s"])
    return Round(asked["round"], name, resolved, error, address, tries, listeners.came)


def main(config: Config, *, ports: tuple[int, ...]) -> None:
    """Listen on these ports, and connect as the lines of standard input say.

    A line is a JSON object: round (its number), target (a name), ports, addresses and token (what
    the target's program said), limit_s (seconds for this round).
    """
    signal.alarm(config.limit_s)
    listeners = Listeners(ports)
    own = addresses_here()
    threading.Thread(target=listeners.serve, daemon=True).start()
    asked: queue.Queue[str] = queue.Queue()

    def work() -> None:
        # Whatever goes wrong ends the process: the connection's end tells the other side.
        try:
            while True:
                seen = _round(json.loads(asked.get()), own, listeners)
                print(wire.line(config.nonce, "round", seen), flush=True)
        finally:
            os._exit(1)

    threading.Thread(target=work, daemon=True).start()
    first = Listening(listeners.token, tuple(sorted(listeners.sockets)), listeners.busy, own)
    print(wire.line(config.nonce, "listening", first), flush=True)
    # The end of the input is the end of everything, in the middle of a connection, too.
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)
