"""The plain path between nodes, with the standard library alone: a ring over TCP, and one pair.

The ring does what a collective does, step by step, with one connection to the next node and one
from the node before. Whoever gives up closes both, so that the others see at once that it is over;
whoever only waits says so to the next node, so that silence means that nothing comes through.
"""

from __future__ import annotations

import contextlib
import hmac
import math
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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from nodeready.node.proofs import mesh
from nodeready.node.proofs.mesh import Try
from nodeready.node.smoke.orders import PHASES, Collective, Pair, Paired, Peer, Rank

# --- The listeners, and how a connection begins.
#
# Whoever connects gets a mark made of the token, and a number for this connection. Whoever belongs
# to the test knows the token from its order, and answers with what it is here for, sealed with the
# token and that number; then it is told that it is welcome. So a stranger neither takes part nor
# learns the token.

_RING, _PAIR = range(2)
#: What a connection is for: the test, the rank that connects, its kind; and the seal.
_GREETING = struct.Struct("!QIB16s")
_NONCE, _WELCOME = 16, b"+"
#: Connections that have said nothing yet.
_MOST = 256


def _mark(token: str) -> bytes:
    return hmac.new(token.encode(), b"listener", "sha256").hexdigest()[:16].encode()


def _greeting(token: str, nonce: bytes, number: int, rank: int, kind: int) -> bytes:
    bare = _GREETING.pack(number, rank, kind, bytes(16))
    return bare[:-16] + hmac.new(token.encode(), nonce + bare, "sha256").digest()[:16]


#: Bytes of one read.
_READ = 256 * 1024
#: How long an echo may stand still, and how long a ring's connection waits for its order.
_IDLE_S, _EARLY_S = 10.0, 20.0
#: More connections than this in a second come from somebody who wants to disturb.
_CROWD = 2000
_OLD = 256


@dataclass
class _Guest:
    """A connection that came. kind: -1 until it has said what it is here for."""

    socket: socket.socket
    source: str
    nonce: bytes
    until: float
    heard: bytes = b""
    kind: int = -1
    left: bytes = b""


class _Expected:
    """The connection of the rank before, that comes in the listeners' thread.

    It is readable (`fileno`) once there is one.
    """

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._came: queue.Queue[socket.socket] = queue.Queue()

    def fileno(self) -> int:
        return self._here.fileno()

    def put(self, one: socket.socket) -> None:
        self._came.put(one)
        with contextlib.suppress(OSError):
            self._there.send(b".")

    def take(self) -> socket.socket | None:
        with contextlib.suppress(queue.Empty):
            return self._came.get_nowait()
        return None

    def close(self) -> None:
        while True:
            one = self.take()
            if one is None:
                break
            one.close()
        self._here.close()
        self._there.close()


class Listeners(mesh.MeshListeners):
    """Our listeners on the job's ports: they answer pairs, and hand a ring's connection over."""

    def __init__(self, ports: Iterable[int]) -> None:
        super().__init__(ports)
        self._mark = _mark(self.token)
        self._waiting = selectors.DefaultSelector()
        self._guests: dict[socket.socket, _Guest] = {}
        self._asked: queue.Queue[tuple[Callable[[], bool], queue.Queue[bool]]] = queue.Queue()
        self._bell, self._ring = socket.socketpair()
        self._serving = False
        # What both threads touch.
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, int], _Expected] = {}
        self._early: OrderedDict[tuple[int, int], tuple[socket.socket, float]] = OrderedDict()
        self._old: OrderedDict[int, None] = OrderedDict()
        self._second, self._crowd = 0, 0
        #: Open, and another program takes who connects.
        self._lent: dict[int, socket.socket] = {}

    def descriptors(self) -> dict[int, int]:
        """Port -> its listener's descriptor, also of those that are lent."""
        return {port: one.fileno() for port, one in {**self._lent, **self.sockets}.items()}

    @property
    def ports(self) -> tuple[int, ...]:
        """On which we listen now."""
        return tuple(sorted(self.sockets))

    # What other threads ask for.

    def release(self, port: int) -> None:
        """Close the listener of this port, for another program. There may be none."""

        def close() -> bool:
            one = self.sockets.pop(port, None)
            if one is not None:
                if self._serving:
                    self._waiting.unregister(one)
                one.close()
            return True

        self._tell(close)

    def lend(self, port: int) -> None:
        """Leave who connects to this port to another program, which has its listener, too."""

        def leave() -> bool:
            one = self._lent[port] = self.sockets.pop(port)
            if self._serving:
                self._waiting.unregister(one)
            return True

        self._tell(leave)

    def take(self, port: int) -> bool:
        """Listen on this port again. Whether that could be."""

        def listen() -> bool:
            if port in self._lent:
                self.sockets[port] = self._lent.pop(port)
                # Whoever had it may have changed what both share.
                self.sockets[port].setblocking(False)
            elif port in self.sockets or self.listen([port]):
                return port in self.sockets
            if self._serving:
                self._waiting.register(self.sockets[port], selectors.EVENT_READ, self._accept)
            return True

        return self._tell(listen)

    def _tell(self, what: Callable[[], bool]) -> bool:
        with self._lock:
            if not self._serving:
                return what()
        done: queue.Queue[bool] = queue.Queue()
        self._asked.put((what, done))
        self._ring.send(b".")
        return done.get(timeout=_IDLE_S)

    @contextlib.contextmanager
    def expected(self, number: int, rank: int) -> Iterator[_Expected]:
        """The connection of this rank in this test. At the end, what comes for it is closed."""
        made = _Expected()
        with self._lock:
            self._expected[number, rank] = made
            came = self._early.pop((number, rank), None)
        if came is not None:
            made.put(came[0])
        try:
            yield made
        finally:
            with self._lock:
                del self._expected[number, rank]
                self._old[number] = None
                while len(self._old) > _OLD:
                    self._old.popitem(last=False)
                for key in [key for key in self._early if key[0] in self._old]:
                    self._early.pop(key)[0].close()
                made.close()

    # The thread of the listeners.

    def serve(self) -> None:
        """Take whoever connects, until the process ends."""
        self._bell.setblocking(False)
        with self._lock:
            self._waiting.register(self._bell, selectors.EVENT_READ, self._hear)
            for listener in self.sockets.values():
                self._waiting.register(listener, selectors.EVENT_READ, self._accept)
            self._serving = True
        swept = 0.0
        while True:
            listening = {listener.fileno() for listener in self.sockets.values()}
            # Those that come after those that speak: their number must not push these out.
            ready = [key for key, _ in self._waiting.select(1)]
            for key in sorted(ready, key=lambda key: key.fd in listening):
                one = key.fileobj
                # An event may be of a socket that an earlier one's has closed.
                if isinstance(one, socket.socket) and one.fileno() >= 0:
                    try:
                        key.data(one)
                    except OSError:
                        self._close(one)
            now = time.monotonic()
            if now > swept + 0.25:
                swept = now
                self._sweep(now)

    def _hear(self, bell: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            bell.recv(64)
        while not self._asked.empty():
            what, done = self._asked.get()
            done.put(what())

    def _sweep(self, now: float) -> None:
        for guest in [one for one in self._guests.values() if one.until < now]:
            self._close(guest.socket)
        with self._lock:
            while self._early:
                (key, (one, until)) = next(iter(self._early.items()))
                if until > now and len(self._early) <= _MOST:
                    break
                del self._early[key]
                one.close()

    def _close(self, one: socket.socket) -> None:
        if self._guests.pop(one, None) is not None:
            self._waiting.unregister(one)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._crowd = int(now), 0
        for _ in range(32):
            try:
                one, source = listener.accept()
            except BlockingIOError:
                break
            except OSError:
                # Out of files: those that say nothing first. Without a pause it would be a loop.
                self._make_room(0)
                time.sleep(0.02)
                break
            self.came += 1
            self._crowd += 1
            one.setblocking(False)
            mesh.reset_on_close(one)
            guest = _Guest(one, source[0], secrets.token_bytes(_NONCE), now + mesh.OPEN_S)
            self._guests[one] = guest
            self._waiting.register(one, selectors.EVENT_READ, self._greeted)
            with contextlib.suppress(OSError):
                one.send(self._mark + guest.nonce)
        self._make_room(_MOST)
        if self._crowd > _CROWD:
            # The threads that test come first: Python runs one at a time.
            time.sleep(0.001)

    def _make_room(self, most: int) -> None:
        """Close those that have not greeted: the oldest of the address that has most of them."""
        silent = [one for one in self._guests.values() if one.kind < 0]
        sources = Counter(one.source for one in silent)
        for _ in range(len(silent) - most):
            source = sources.most_common(1)[0][0]
            sources[source] -= 1
            guest = next(one for one in silent if one.source == source)
            silent.remove(guest)
            self._close(guest.socket)

    def _greeted(self, one: socket.socket) -> None:
        guest = self._guests[one]
        piece = one.recv(_GREETING.size - len(guest.heard))
        guest.heard += piece
        if piece and len(guest.heard) < _GREETING.size:
            return
        if not piece:
            self._close(one)
            return
        number, rank, kind, _ = _GREETING.unpack(guest.heard)
        right = _greeting(self.token, guest.nonce, number, rank, kind)
        if not hmac.compare_digest(right, guest.heard) or kind not in (_RING, _PAIR):
            self._close(one)
            return
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.send(_WELCOME)
        if kind == _PAIR:
            guest.kind, guest.until = kind, time.monotonic() + _IDLE_S
            self._waiting.modify(one, selectors.EVENT_READ, self._echo)
            return
        self._waiting.unregister(one)
        del self._guests[one]
        self._hand(one, number, rank)

    def _hand(self, one: socket.socket, number: int, rank: int) -> None:
        with self._lock:
            expected = self._expected.get((number, rank))
            if expected is not None:
                expected.put(one)
            elif number in self._old:
                one.close()
            else:
                came = self._early.pop((number, rank), None)
                if came is not None:
                    came[0].close()
                self._early[number, rank] = (one, time.monotonic() + _EARLY_S)

    def _echo(self, one: socket.socket) -> None:
        """Send back what comes; nothing more is read until that is done."""
        guest = self._guests[one]
        if not guest.left:
            guest.left = one.recv(_READ)
            if not guest.left:
                self._close(one)
                return
        blocked = bool(guest.left)
        with contextlib.suppress(BlockingIOError):
            guest.left = guest.left[one.send(guest.left) :]
            blocked = bool(guest.left)
        guest.until = time.monotonic() + _IDLE_S
        wanted = selectors.EVENT_WRITE if blocked else selectors.EVENT_READ
        if self._waiting.get_key(one).events != wanted:
            self._waiting.modify(one, wanted, self._echo)


# --- What both kinds of test wait for, and send.


class _Failed(Exception):
    """waits_for: the rank whose data was waited for, -1: nobody knows
    told: by another rank, that it waits for that one: (for whom, by whom)
    """

    def __init__(self, said: str, waits_for: int, told: tuple[int, int] | None = None) -> None:
        super().__init__(said)
        self.said, self.waits_for, self.told = said, waits_for, told


class _Over(Exception):
    """The time is over, or the test is ended from outside."""


#: In this time two packets of a handshake can be lost, and sent again.
_CONNECT_S = 3.5
#: Within so many seconds the end of a test from outside is seen.
_SLICE_S = 0.2


class _Until:
    def __init__(self, limit_s: float, stop: threading.Event) -> None:
        self.began = time.monotonic()
        # What is left is for the answer.
        self.end = self.began + limit_s - min(0.3, limit_s / 10)
        self._stop = stop

    def check(self) -> float:
        """The time. Raises _Over."""
        now = time.monotonic()
        if now > self.end or self._stop.is_set():
            raise _Over
        return now

    def ready(self, one: socket.socket, events: int, seconds: float) -> bool:
        """As `mesh.ready`, and raises _Over."""
        until = time.monotonic() + seconds
        while True:
            left = until - self.check()
            if mesh.ready(one, events, min(left, _SLICE_S)):
                return True
            if left <= 0:
                return False

    def pause(self, seconds: float) -> None:
        """Raises _Over."""
        self._stop.wait(seconds)
        self.check()

    def join(self, thread: threading.Thread, seconds: float) -> None:
        until = time.monotonic() + seconds
        while thread.is_alive() and time.monotonic() < until:
            self.check()
            thread.join(_SLICE_S)


#: Of the kernel's struct tcp_info (linux/tcp.h): questions in a row whether there is room that
#: were not answered, packets that are not acknowledged, ms since the last acknowledgement, packets
#: sent again, bytes acknowledged, bytes not sent yet, packets that came twice. 0: the kernel is
#: too old.
_TCP_INFO = struct.Struct("=3xB20xI28xI40xI16xQ16xI68xI")


def _tcp(one: socket.socket) -> tuple[int, ...]:
    try:
        data = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return ()
    return _TCP_INFO.unpack(data.ljust(_TCP_INFO.size, b"\0"))


def _retransmits(sockets: Iterable[socket.socket]) -> int:
    """Packets that were lost. The kernel also sends some again to ask whether they were."""
    found = [seen for seen in map(_tcp, sockets) if seen]
    return sum(max(0, seen[3] - seen[-1]) for seen in found) if found else -1


def _greet(
    peer: Peer, to: tuple[str, int], until: _Until, what: tuple[int, int, int]
) -> tuple[Try, socket.socket | None]:
    """A connection to the peer's listener, at this address and port, that is welcome there.

    what: what it is for: number, rank, kind
    """
    end = time.monotonic() + _CONNECT_S
    while True:
        found, one = mesh.meet(*to, _mark(peer.token), until.ready, _CONNECT_S)
        # A crowd of strangers may push it out, by a reset.
        again = one is not None or (found.outcome == mesh.FOREIGN and found.said)
        if one is not None:
            if _welcome(one, peer.token, until, what):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return found, one
            found = replace(found, outcome=mesh.FOREIGN)
        if not again or time.monotonic() > end:
            return found, None
        until.pause(0.05)


def _welcome(one: socket.socket, token: str, until: _Until, what: tuple[int, int, int]) -> bool:
    def read(count: int) -> bytes:
        heard = b""
        while len(heard) < count and until.ready(one, select.POLLIN, mesh.TOKEN_S):
            piece = one.recv(count - len(heard))
            if not piece:
                break
            heard += piece
        return heard

    welcome = b""
    try:
        nonce = read(_NONCE)
        if len(nonce) == _NONCE:
            one.send(_greeting(token, nonce, *what))
            welcome = read(len(_WELCOME))
    except OSError:
        pass
    finally:
        if welcome != _WELCOME:
            one.close()
    return welcome == _WELCOME


_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        mesh.TIMEOUT: "timed out",
        mesh.REFUSED: "refused",
        mesh.FOREIGN: "another program answers",
        mesh.SILENT: "connected, then silence",
    }
)

#: Small messages fit into one packet of any network, so that they tell nothing of its MTU.
SMALL = 1024
#: One message of the large part.
BLOCK = 64 * 1024
#: Without a byte for so long, the other side is given up.
SILENT_S = 3.0
#: Nor is less than this taken for a rate, or a link for slow.
_RATE_S, _SLOW_S = 1.0, 2.0


def _random(number: int) -> bytes:
    """Twice a block, so that a block can begin anywhere in the first half. Equal on all nodes."""
    return random.Random(number).randbytes(2 * BLOCK)


def _rate(gbps: float) -> str:
    for unit, name in ((1, "Gbit/s"), (1e-3, "Mbit/s")):
        if gbps >= 0.1 * unit:
            return f"{gbps / unit:.1f} {name}"
    return f"{gbps * 1e6:.1f} kbit/s"


# --- The ring.

#: A message: its phase, step and number, the step at which the rounds end, bytes that follow.
_HEAD = struct.Struct("!BIIII")
#: The phase of a message that says: I wait, for the rank that stands in place of the step.
_BEAT, _BEAT_S, _FRESH_S = 0, 0.5, 1.5
#: Such a message with this at its end is the last one: I give up, for I wait for that rank; or for
#: the rank whose number it is, this rank waits. To the rank before it is the only one.
_GONE = 0x676F6E65
#: Who keeps us waiting for so long is named when the test is over.
_LONG_S = 1.5
#: For the rank before to have come.
_CAME_S = 15.0
_ROUNDS = 100
#: A node that did not run for so long stood still.
_STILL_S = 2.0
#: Without an acknowledgement for so long, the next one is given up: before it gives up itself, for
#: this side knows more.
_STUCK_S = 2.5


def _number(rank: int, at: int) -> int:
    """What this rank adds at this position: no two ranks are alike in it, nor two positions."""
    return (rank + 1) * (rank + 1 + at)


def _sum(world: int, at: int) -> int:
    ones = world * (world + 1) // 2
    return ones * (2 * world + 1) // 3 + ones * at


def _pack(numbers: Iterable[int]) -> bytes:
    found = [*numbers]
    return struct.pack(f"!{len(found)}Q", *found)


def _numbers(data: bytes) -> list[int]:
    return [*struct.unpack(f"!{len(data) // 8}Q", data)]


class _Ring:
    """One rank's way through the phases."""

    def __init__(self, order: Collective, listeners: Listeners, until: _Until) -> None:
        self._order, self._listeners, self._until = order, listeners, until
        alone = order.next is None
        self._world, self.rank = (1, 0) if alone else (order.world, order.first)
        self.before, self.after = ((self.rank + way) % self._world for way in (-1, 1))
        self._patience_s = 0.0
        self.phase, self.wrong = "init", ""
        self.ms = self.gbps = 0.0
        self.sockets: list[socket.socket] = []
        self._names = {"before": f"rank {self.before}", "after": f"rank {self.after}"}
        # Of what is sent and received now.
        self._frames: Iterator[bytes] = iter(())
        self._pending, self._cut = b"", False
        self._told: tuple[int, int] | None = None
        self._box = bytearray(_HEAD.size + BLOCK)
        self._have, self._index, self._step, self._last = 0, 0, 0, _ROUNDS
        self._waits = False
        # Times: of the last bytes from the rank before, of ours to the next, of its last beat.
        self._heard = self._said = self._beat = self._looked = 0.0
        # At which this process ran last, and for how long it did not.
        self._ticked, self.still = until.began, 0.0
        self._root = self.before
        # Of the way to the next one: since when no byte is acknowledged though some are to be (0:
        # none are), since when no packet is, the bytes that are, and those before large.
        self._stuck = self._dark = 0.0
        self._acknowledged = self._earlier = 0
        # Of the large part: its begin, bytes that are to come and came, and of the step that comes
        # in: when it began, its bytes, and all of them.
        self._began, self._to_come, self._came = 0.0, 0, 0
        self._since, self._part, self._whole = 0.0, 0, 0
        self.retransmits = -1

    def close(self, failed: _Failed | None) -> None:
        """End both connections, and say for whom all wait."""
        if failed is not None:
            self.retransmits = _retransmits(self.sockets)
            own = self.rank if failed.waits_for < 0 else failed.waits_for
            whom, by = failed.told or (own, self.rank)
            last = _HEAD.pack(_BEAT, whom, by, _GONE, 0)
            for one in self.sockets:
                # In the middle of a message it would be a part of it.
                if one is not self._out or not self._cut:
                    with contextlib.suppress(OSError):
                        one.send(last)
        for one in self.sockets:
            one.close()

    # Both connections.

    def connect(self) -> None:
        """Raises _Failed, _Over, OSError."""
        if self._order.next is None:
            self._alone()
        else:
            with self._listeners.expected(self._order.number, self.before) as expected:
                self._to(self._order.next)
                self._from(expected)

    def _alone(self) -> None:
        """Both ends are ours, over loopback."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(mesh.CONNECT_S)
            self._out = socket.create_connection(listener.getsockname(), mesh.CONNECT_S)
            self.sockets.append(self._out)
            self._in, _ = listener.accept()
            self.sockets.append(self._in)
        for one in self.sockets:
            mesh.reset_on_close(one)
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ticked = time.monotonic()
        self._patience_s = SILENT_S

    def _to(self, peer: Peer) -> None:
        self._names["after"] = peer.name
        resolved, error = mesh.resolve(peer.name, self._until.join)
        address = mesh.peer_address(resolved, peer.addresses, ())
        if not resolved:
            raise _Failed(f"{peer.name} does not resolve ({error or 'no address'})", self.after)
        if not address:
            said = f"{peer.name} resolves to {resolved[0]}, which is not {peer.name}'s"
            raise _Failed(said, self.after)
        if address != peer.name:
            self._names["after"] = f"{peer.name} ({address})"
        what = (self._order.number, self.rank, _RING)
        one, made = _greet(peer, (address, peer.port), self._until, what)
        if made is None:
            why = _CAUSES.get(one.outcome) or one.said or "failed"
            to = self._names["after"]
            raise _Failed(f"no connection to {to} port {peer.port}: {why}", self.after)
        self._out = made
        self.sockets.append(made)

    def _from(self, expected: _Expected) -> None:
        self._patience_s = min(_CAME_S, self._order.limit_s / 2)
        # Until here it did something else, with limits of its own.
        self._ticked = time.monotonic()
        self._heard, self._waits = self._until.began, True
        came = expected.take()
        while came is None:
            self._push()
            self._wait(expected)
            came = expected.take()
        self._patience_s = min(SILENT_S, 0.4 * self._order.limit_s)
        self._in = came
        self.sockets.append(came)
        with contextlib.suppress(OSError):
            address = came.getpeername()[0]
            self._names["before"] += f" ({address.removeprefix('::ffff:')})"

    # Sending and receiving at once.

    def _swap(
        self, step: int, frames: Iterable[bytes], count: int, take: Callable[[bytes], None]
    ) -> None:
        """Send these messages and take so many of the rank before, of this step."""
        self._step, self._index = step, 0
        self._frames = iter(frames)
        self._waits = count > 0
        self._heard = self._tick()
        while True:
            sent = self._push()
            body = self._pull() if self._index < count else None
            if body is not None:
                take(body)
                self._index += 1
            self._waits = self._index < count
            if sent and not self._waits:
                return
            if body is None:
                self._wait(self._in if self._waits else None)

    def _push(self) -> bool:
        """Send what the connection takes. Whether all is sent."""
        while True:
            if not self._pending:
                self._pending = next(self._frames, b"")
                if not self._pending:
                    return True
            try:
                sent = self._out.send(self._pending)
            except BlockingIOError:
                return False
            except OSError as problem:
                raise self._lost("after", problem) from None
            self._pending = self._pending[sent:]
            self._cut = bool(self._pending)
            self._said = self._tick()

    def _pull(self) -> bytes | None:
        """One message, when all of it has come. Beats are no messages."""
        view = memoryview(self._box)
        while True:
            want = _HEAD.size
            if self._have >= want:
                want += self._length
            try:
                count = self._in.recv_into(view[self._have : want])
            except BlockingIOError:
                return None
            except OSError as problem:
                raise self._lost("before", problem) from None
            if not count:
                raise self._lost("before", None)
            self._heard = self._tick()
            if not self._have and not self._index:
                self._since = self._heard
            self._have += count
            if self._have == _HEAD.size and not self._header():
                self._have = 0
                continue
            if self._have >= _HEAD.size and self._have == _HEAD.size + self._length:
                self._have = 0
                return bytes(view[_HEAD.size : _HEAD.size + self._length])

    def _header(self) -> bool:
        """Whether a message follows: a beat has none. Raises _Failed for what is not its turn."""
        phase, step, index, last, self._length = _HEAD.unpack_from(self._box)
        if phase == _BEAT and not self._length:
            self._root, self._beat = step, self._heard
            if last == _GONE:
                self._told = step, index
            return False
        expected = (PHASES.index(self.phase), self._step, self._index)
        if (phase, step, index) != expected or self._length > BLOCK:
            who = self._names["before"]
            raise _Failed(f"{who} sent something else than its {self.phase}", self.before)
        self._last = last
        return True

    def _head(self, step: int, index: int, length: int, last: int = _ROUNDS) -> bytes:
        return _HEAD.pack(PHASES.index(self.phase), step, index, last, length)

    def _small(self, step: int, data: bytes, expected: int, last: int = _ROUNDS) -> bytes:
        """Send this and receive so many bytes, in messages that fit into a packet."""
        starts = range(0, max(1, len(data)), SMALL)
        pieces = [data[at : at + SMALL] for at in starts]
        frames = (
            self._head(step, index, len(piece), last) + piece for index, piece in enumerate(pieces)
        )
        found: list[bytes] = []
        self._swap(step, frames, max(1, math.ceil(expected / SMALL)), found.append)
        came = b"".join(found)
        if len(came) != expected:
            who = self._names["before"]
            said = f"{who} sent {len(came)} bytes in {self.phase}, not {expected}"
            raise _Failed(said, self.before)
        return came

    # Waiting, and giving up.

    def _wait(self, source: socket.socket | _Expected | None) -> None:
        """Wait a little for the source and for room to send. Raises _Failed, _Over."""
        poll = select.poll()
        out = self._out.fileno()
        poll.register(out, select.POLLIN | (select.POLLOUT if self._pending else 0))
        if source is not None:
            poll.register(source.fileno(), select.POLLIN)
        else:
            # Only its end by a reset.
            poll.register(self._in.fileno(), 0)
        self._tick()
        found = dict(poll.poll(_SLICE_S * 1000))
        now = self._tick()
        self._until.check()
        if source is None and self._in.fileno() in found:
            raise self._lost("before", None)
        if found.get(out, 0) & ~select.POLLOUT:
            self._listen_to_next()
        patience_s = max(_SLOW_S, (self._until.end - self._began) / 3)
        said = self.slow() if now - self._began > patience_s else ""
        if said:
            raise _Failed(said, self.before)
        if source is None or source.fileno() not in found:
            said = self._silent(self._patience_s)
            if said:
                raise _Failed(said, self.before)
        if now > self._looked + _SLICE_S:
            self._look(now)
            said = self._nothing_acknowledged(_STUCK_S)
            if said:
                raise _Failed(said, self.after)
        if not self._pending and now > self._said + _BEAT_S:
            root = self.waits_for()
            self._pending = _HEAD.pack(_BEAT, self.rank if root < 0 else root, 0, 0, 0)
            self._push()

    def _tick(self) -> float:
        """The time. What passed while this process did not run is nobody else's silence."""
        now = time.monotonic()
        if now - self._ticked > _STILL_S:
            self.still += now - self._ticked
            self._heard, self._stuck = now, 0.0
        self._ticked = now
        return now

    def waits_for(self) -> int:
        """The rank whose data this one waits for, as far as it has been told; -1: its own."""
        if not self.sockets or (self._pending and not self._waits):
            return self.after
        # Whoever is told that it waits for itself does not know.
        fresh = time.monotonic() < self._beat + _FRESH_S
        root = self._root if fresh else self.before
        return -1 if root == self.rank else root

    def _listen_to_next(self) -> None:
        """The next one sends nothing on our connection but its last words, and ends it."""
        problem = self._hear_last(self._out)
        if not isinstance(problem, BlockingIOError):
            raise self._lost("after", problem)

    def _hear_last(self, one: socket.socket) -> OSError | None:
        """Take all that this connection still has: its last message may say for whom all wait."""
        tail = b""
        try:
            for _ in range(64):
                piece = one.recv(BLOCK)
                if not piece:
                    return None
                tail = (tail + piece)[-_HEAD.size :]
            return None
        except OSError as problem:
            return problem
        finally:
            if len(tail) == _HEAD.size:
                phase, whom, by, last, length = _HEAD.unpack(tail)
                if (phase, last, length) == (_BEAT, _GONE, 0):
                    self._told = whom, by

    def _lost(self, which: str, problem: OSError | None) -> _Failed:
        """Why the test is over: what we have waited for so far, or that this connection ended."""
        self._tick()
        why = self.why()
        if why is not None:
            return why
        who, rank = self._names[which], self.after if which == "after" else self.before
        self._hear_last(self._out if which == "after" else self._in)
        if self._told and max(self._told) < self._world:
            rank = self._told[self._told[0] == self.rank]
            said = f"{who} closed the connection in {self.phase}"
            return _Failed(said, -1 if rank == self.rank else rank, self._told)
        if problem is None or isinstance(problem, (ConnectionResetError, BrokenPipeError)):
            return _Failed(f"{who} closed the connection in {self.phase}", rank)
        return _Failed(f"connection to {who} in {self.phase}: {problem.strerror}", rank)

    def why(self) -> _Failed | None:
        """Which neighbour has kept us waiting so far; None: neither, for long."""
        for said, rank in (
            (self._nothing_acknowledged(), self.after),
            (self._silent(), self.before),
            (self._nothing_taken(), self.after),
        ):
            if said:
                return _Failed(said, rank)
        return None

    def _silent(self, least_s: float = _LONG_S) -> str:
        """In words, that the rank before has sent nothing for so long; "": it has."""
        who, seconds = self._names["before"], time.monotonic() - self._heard
        if not self._waits or seconds < least_s:
            return ""
        if self.phase == "init":
            return f"{who} did not connect in {seconds:.1f} s"
        return f"{who} sent nothing for {seconds:.1f} s in {self.phase}"

    def _look(self, now: float) -> None:
        """What the kernel knows of the way to the next one."""
        self._looked = now
        seen = _tcp(self._out)
        if not seen:
            return
        asked, on_the_way, last_ms, _, acknowledged, unsent, _ = seen
        waits = bool(on_the_way or unsent or self._pending)
        if not waits or not self._stuck or acknowledged != self._acknowledged:
            self._stuck = now if waits else 0.0
        # A node without room answers, seldom: it is no dark one.
        dark = on_the_way > 0 or asked > 1
        self._acknowledged, self._dark = acknowledged, now - (last_ms / 1000 if dark else 0)

    def _nothing_taken(self) -> str:
        """In words, that the next one takes nothing though its kernel answers; "": it does."""
        seconds = time.monotonic() - self._stuck
        if not self._stuck or seconds < _LONG_S:
            return ""
        return f"{self._names['after']} took nothing for {seconds:.1f} s in {self.phase}"

    def _nothing_acknowledged(self, least_s: float = _LONG_S) -> str:
        """In words, that not even the next one's kernel has answered for so long; "": it has."""
        who, seconds = self._names["after"], time.monotonic() - max(self._stuck, self._dark)
        if not self._stuck or seconds < least_s:
            return ""
        if self._whole and self._acknowledged - self._earlier < min(BLOCK, self._whole):
            return f"to {who} small messages pass, {BLOCK >> 10} KiB do not: MTU?"
        return f"{who} acknowledged nothing for {seconds:.1f} s in {self.phase}"

    def slow(self) -> str:
        """In words, the rate of the step that is coming in, when the rest cannot come in time; "":
        it can, or nothing is coming in, or not for long."""
        now, part = time.monotonic(), self._part + self._have
        if not 0 < part < self._whole or now - self._since < _RATE_S:
            return ""
        gbps = part * 8e-9 / (now - self._since)
        if (self._to_come - self._came) * 8e-9 / gbps < self._until.end - now:
            return ""
        self.gbps = round(gbps, 6)
        who, seconds = self._names["before"], now - self._began
        return f"{_rate(gbps)} from {who} after {seconds:.1f} s of large"

    def over(self, said: str) -> _Failed:
        """The time is over."""
        slow = self.slow()
        why = _Failed(slow, self.before) if slow else self.why()
        said = f"{said} {time.monotonic() - self._until.began:.1f} s"
        if why is None:
            return _Failed(said, self.waits_for())
        return _Failed(f"{said}: {why.said}", why.waits_for)

    # The phases.

    def run(self) -> None:
        """Raises _Failed, _Over."""
        for phase, go in (
            ("barrier", self._barrier),
            ("all_reduce", self._all_reduce),
            ("all_gather", self._all_gather),
            ("send_recv", self._send_recv),
            ("large", self._large),
        ):
            self.phase = phase
            go()
        self.phase = "done"
        self._goodbye()

    def _note(self, wrong: str) -> None:
        self.wrong = self.wrong or f"{self.phase}: {wrong}"

    def _barrier(self, step: int = 0) -> None:
        """Twice around: the first time says that all are here, the second that all know it."""
        for turn in (step, step + 1):
            if self.rank == 0:
                self._small(turn, b"", 0)
            else:
                self._swap(turn, (), 1, lambda body: None)
                self._swap(turn, [self._head(turn, 0, 0)], 0, lambda body: None)

    def _pieces(self) -> list[range]:
        """The positions of each rank's piece."""
        count = max(self._world, self._order.small // 8)
        ends = [count * rank // self._world for rank in range(self._world + 1)]
        return [range(*pair) for pair in zip(ends, ends[1:])]

    def _all_reduce(self) -> None:
        world, rank, pieces = self._world, self.rank, self._pieces()
        own = [[_number(rank, at) for at in piece] for piece in pieces]
        for step in range(world - 1):
            to, of = (rank - step) % world, (rank - step - 1) % world
            came = _numbers(self._small(step, _pack(own[to]), 8 * len(own[of])))
            own[of] = [(one + other) % (1 << 64) for one, other in zip(own[of], came)]
        for step in range(world - 1):
            to, of = (rank + 1 - step) % world, (rank - step) % world
            data = self._small(world + step, _pack(own[to]), 8 * len(own[of]))
            own[of] = _numbers(data)
        for piece, found in zip(pieces, own):
            for at, seen in zip(piece, found):
                if seen != _sum(world, at):
                    self._note(self._sum_wrong(at, seen))
                    return

    def _sum_wrong(self, at: int, seen: int) -> str:
        right = _sum(self._world, at)
        for rank in range(self._world):
            if abs(seen - right) == _number(rank, at):
                how = "is missing" if seen < right else "is there twice"
                return f"the sum at {at} is {seen}, not {right}: as if rank {rank} {how}"
        return f"the sum at {at} is {seen}, not {right}"

    def _all_gather(self) -> None:
        world, rank = self._world, self.rank
        count = max(1, min(SMALL, self._order.small // world) // 8)
        data = _pack(_number(rank, at) for at in range(count))
        for step in range(world - 1):
            data = self._small(step, data, len(data))
            of = (rank - step - 1) % world
            if data != _pack(_number(of, at) for at in range(count)):
                self._note(f"what came is not what rank {of} gave")

    def _send_recv(self) -> None:
        self._exchange(0, self._order.small)
        times: list[float] = []
        # Whoever finds that it takes too long says at which step all end, when all have heard it.
        end, until = _ROUNDS, time.monotonic() + 0.25 * (self._until.end - time.monotonic())
        while len(times) < end:
            began = time.monotonic()
            if began > until and end == _ROUNDS:
                end = min(end, len(times) + self._world)
            self._exchange(1 + len(times), min(SMALL, self._order.small), end)
            end = min(end, self._last)
            times.append(time.monotonic() - began)
        self.ms = round(1000 * statistics.median(times), 3)

    def _exchange(self, step: int, length: int, last: int = _ROUNDS) -> None:
        """Send as much to the next rank as comes from the one before."""
        count = max(1, length // 8)
        came = self._small(
            step, _pack(_number(self.rank, at) for at in range(count)), 8 * count, last
        )
        if came != _pack(_number(self.before, at) for at in range(count)):
            self._note(f"what came is not what rank {self.before} sent")

    def _large(self) -> None:
        """The traffic of a ring all_reduce: pieces that go around twice, less one step each."""
        world, order = self._world, self._order
        self._barrier()
        data = memoryview(_random(order.number))
        steps = max(1, 2 * (world - 1))
        self._whole = max(1, math.ceil(order.large / world))
        self._to_come, self._began = steps * self._whole, time.monotonic()
        self._look(self._began)
        self._earlier = self._acknowledged
        count = math.ceil(self._whole / BLOCK)

        def content(step: int, rank: int, index: int) -> memoryview:
            start = (step * 7919 + rank * 104729 + index * 1299709) % BLOCK
            return data[start : start + min(BLOCK, self._whole - index * BLOCK)]

        def frames(step: int) -> Iterator[bytes]:
            for index in range(count):
                body = content(step, self.rank, index)
                yield b"".join((self._head(step, index, len(body)), body))

        def take(body: bytes) -> None:
            self._part += len(body)
            self._came += len(body)
            if body != bytes(content(self._step, self.before, self._index)):
                self._note(f"message {self._index} of step {self._step} came damaged")

        for step in range(2, 2 + steps):
            self._part = 0
            self._swap(step, frames(step), count, take)
        seconds = time.monotonic() - self._began
        self.gbps = round(self._to_come * 8e-9 / seconds, 6)
        self._barrier(2 + steps)

    def _goodbye(self) -> None:
        """What we have sent arrives before we go: each waits until both neighbours have all."""
        self.retransmits = _retransmits(self.sockets)
        end = time.monotonic() + mesh.OPEN_S
        with contextlib.suppress(OSError, _Over):
            self._out.shutdown(socket.SHUT_WR)
            while self._until.ready(self._in, select.POLLIN, end - time.monotonic()):
                if not self._in.recv(BLOCK):
                    break
            self._in.close()
            self._until.ready(self._out, select.POLLIN, end - time.monotonic())


def run_ring(order: Collective, listeners: Listeners, stop: threading.Event) -> Rank:
    """This node's rank of the ring. Returns within the order's time, or when ``stop`` is set."""
    until = _Until(order.limit_s, stop)
    ring = _Ring(order, listeners, until)
    failed: _Failed | None = None
    try:
        ring.connect()
        ring.run()
    except _Failed as problem:
        failed = problem
    except _Over:
        if ring.phase != "done":
            how = "ended from outside" if stop.is_set() else "not through"
            failed = ring.over(f"{how} in {ring.phase} after")
    except OSError as problem:
        failed = _Failed(f"{problem.strerror or problem} in {ring.phase}", -1)
    if failed is not None and ring.still:
        # It is this node that the others waited for.
        failed = _Failed(f"this node stood still for {ring.still:.1f} s; {failed.said}", -1)
    ring.close(failed)
    return Rank(
        rank=ring.rank,
        gpu=-1,
        phase=ring.phase,
        wrong=ring.wrong,
        said=failed.said if failed else "",
        waits_for=failed.waits_for if failed else -1,
        ms=ring.ms,
        gbps=ring.gbps,
        retransmits=ring.retransmits,
        seconds=round(time.monotonic() - until.began, 3),
    )


# --- A pair.

_ECHOES = 50
#: Seconds in which the large message is repeated: the best time counts.
_REPEAT_S = 0.05


class _Echo:
    """The data of a pair: it goes to the target, and comes back."""

    def __init__(self, one: socket.socket, order: Pair, until: _Until) -> None:
        self._one, self._order, self._until = one, order, until
        self._data = memoryview(2 * _random(order.number)[:BLOCK])
        self.outcome, self.ms, self.gbps = "small", 0.0, 0.0

    def run(self) -> None:
        """Raises _Over, OSError."""
        times: list[float] = []
        until = time.monotonic() + 0.2 * (self._until.end - time.monotonic())
        while len(times) < _ECHOES and (len(times) < 3 or time.monotonic() < until):
            began = time.monotonic()
            if not self._there_and_back(min(SMALL, self._order.small)):
                return
            times.append(time.monotonic() - began)
            self.ms = round(1000 * statistics.median(times), 3)
        self.outcome = "large"
        began = time.monotonic()
        if not self._there_and_back(self._order.large, measure=True):
            return
        self.outcome, best = "ok", self.gbps
        # The first one alone shows how the connection began: the kernel remembers for each peer
        # how the last one went (tcp_no_metrics_save in tcp(7)).
        while time.monotonic() - began < _REPEAT_S:
            if not self._there_and_back(self._order.large, measure=True):
                break
            best = max(best, self.gbps)
        self.gbps = best

    def _there_and_back(self, size: int, *, measure: bool = False) -> bool:
        """Both ways at once. Whether all came back, and as it was."""
        began = heard = time.monotonic()
        sent = came = 0
        while came < size:
            events = select.POLLIN | (select.POLLOUT if sent < size else 0)
            left_s = heard + SILENT_S - time.monotonic()
            if left_s < 0 or not self._until.ready(self._one, events, left_s):
                return False
            now = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                if sent < size:
                    start = sent % BLOCK
                    sent += self._one.send(self._data[start : start + min(BLOCK, size - sent)])
            with contextlib.suppress(BlockingIOError):
                piece = self._one.recv(BLOCK)
                start = came % BLOCK
                if not piece or piece != bytes(self._data[start : start + len(piece)]):
                    return False
                came, heard = came + len(piece), now
            if measure and came:
                self.gbps = round(came * 8e-9 / max(1e-6, now - began), 6)
            if measure and self._too_slow(began, now, size - came):
                return False
        if measure:
            self.gbps = round(size * 8e-9 / max(1e-6, time.monotonic() - began), 6)
        return True

    def _too_slow(self, began: float, now: float, left: int) -> bool:
        """Whether the rest cannot come in time: then it need not be waited for."""
        waited, left_s = now - began, self._until.end - now
        if waited < max(_SLOW_S, (waited + left_s) / 3) or not self.gbps:
            return False
        return left * 8e-9 / self.gbps > left_s


def run_pair(
    order: Pair, own: tuple[str, ...], listeners: Listeners, stop: threading.Event
) -> Paired:
    """The plain path to another node: its name, its ports, and data there and back."""
    until = _Until(order.limit_s, stop)
    peer = order.target
    resolved: tuple[str, ...] = ()
    error = address = outcome = ""
    ms = gbps = 0.0
    retransmits = -1
    found: list[Try] = []
    try:
        resolved, error = mesh.resolve(peer.name, until.join)
        address = mesh.peer_address(resolved, peer.addresses, own)
        # Half of the time is for the data.
        half = until.began + order.limit_s / 2
        ports = order.ports if address else ()
        for one in mesh.tries(address, ports, _mark(peer.token), half, until.ready):
            found.append(one)
        port = next((one.port for one in found if one.outcome == mesh.OK), None)
        if port is not None:
            outcome = "small"
            what = (order.number, 0, _PAIR)
            _, made = _greet(peer, (address, port), until, what)
            if made is not None:
                echo = _Echo(made, order, until)
                try:
                    echo.run()
                finally:
                    outcome, ms, gbps = echo.outcome, echo.ms, echo.gbps
                    retransmits = _retransmits([made])
                    made.close()
    except (_Over, OSError):
        # What there is, is the answer.
        pass
    return Paired(
        number=order.number,
        target=peer.name,
        resolved=resolved,
        error=error,
        address=address,
        tries=tuple(found),
        outcome=outcome,
        ms=ms,
        gbps=gbps,
        retransmits=retransmits,
        came=listeners.came,
    )
