"""A ring over TCP between all nodes, which needs only the standard library.

Each rank has one connection to the next rank and one from the previous rank. A rank that aborts
closes both connections, so its neighbours fail at once. A rank that only waits tells that to the
next rank, so silence means that no data arrives.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from nodeready.node.proofs import mesh
from nodeready.node.smoke.connections import (
    BLOCK,
    SILENT_S,
    SLICE_S,
    SLOW_S,
    SMALL,
    Deadline,
    TestOver,
    greet,
    random_blocks,
    tcp_info,
)
from nodeready.node.smoke.listeners import RING, ExpectedConnection, SmokeListeners
from nodeready.node.smoke.orders import PHASES, CollectiveOrder, RankResult, SmokePeer

#: A message: its phase, step and index, bytes that follow.
_HEAD = struct.Struct("!BIII")
#: In place of a phase, in a beat: the sender waits for the rank that stands in place of the step.
#: A beat is sent after the first number of seconds without a message, and counts for the second.
_BEAT, _BEAT_S, _FRESH_S = 0, 0.5, 1.5
#: In place of a phase, in the last message: the sender aborts. Step and index are replaced by the
#: awaited rank and the waiting rank. The previous rank receives no other message.
_ABORT = 255
#: A neighbour that keeps this rank waiting for these seconds is named when the test is over.
LONG_S = 1.5
#: Seconds for the previous rank to connect.
_CONNECT_S = 15.0
#: Exchanges whose median is the latency.
_ROUNDS = 20
#: A process that did not run for these seconds stood still.
_STOOD_STILL_S = 2.0
#: Seconds after which a next rank that acknowledges nothing has failed. The limit is shorter than
#: the next rank's own limit, because this side knows more.
_STUCK_S = 2.5
#: Minimum seconds before a rate is measured.
_RATE_S = 1.0

_CAUSES = {
    mesh.TIMEOUT: "timed out",
    mesh.REFUSED: "refused",
    mesh.FOREIGN: "another program answers",
    mesh.SILENT: "connected, then silence",
}


class RingFailure(Exception):
    """The failure of a rank.

    waits_for: the rank whose data it waited for, -1: unknown
    told_by:   (rank waited for, rank that reported it)
    """

    def __init__(
        self, message: str, waits_for: int, told_by: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.waits_for, self.told_by = message, waits_for, told_by


def pack_numbers(rank: int, count: int) -> bytes:
    """The numbers that a rank sends; they differ between ranks and between positions."""
    return struct.pack(f"!{count}Q", *((rank + 1) * (rank + 1 + n) for n in range(count)))


def _rate(gbps: float) -> str:
    for unit, name in ((1, "Gbit/s"), (1e-3, "Mbit/s")):
        if gbps >= 0.1 * unit:
            return f"{gbps / unit:.1f} {name}"
    return f"{gbps * 1e6:.1f} kbit/s"


class RingRank:
    """One rank in the phases of a ring."""

    def __init__(
        self, order: CollectiveOrder, listeners: SmokeListeners, deadline: Deadline
    ) -> None:
        self._order, self._listeners, self._deadline = order, listeners, deadline
        is_alone = order.next is None
        self._world, self.rank = (1, 0) if is_alone else (order.world, order.first)
        self.previous = (self.rank - 1) % self._world
        self.next = (self.rank + 1) % self._world
        self._previous_name, self._next_name = f"rank {self.previous}", f"rank {self.next}"
        self._patience_s = 0.0
        self.phase, self.mismatch = "init", ""
        self.ms = self.gbps = 0.0
        self.connections: list[socket.socket] = []
        # The messages to send, the unsent bytes of the current one, and whether a part is sent.
        self._frames: Iterator[bytes] = iter(())
        self._pending, self._is_cut = b"", False
        # The incoming message: its buffer, its bytes so far, its length, expected index and step.
        self._buffer = bytearray(_HEAD.size + BLOCK)
        self._have, self._length, self._index, self._step = 0, 0, 0, 0
        self._is_waiting = False
        self._told_by: tuple[int, int] | None = None
        # Times: of the last bytes received, of the last bytes sent, of the last beat received, of
        # the last look at the kernel's counters.
        self._received_at = self._sent_at = self._beat_at = self._counters_at = 0.0
        # When this process ran last, and the seconds for which it did not.
        self._ticked_at, self.still_s = deadline.began, 0.0
        self._awaited = self.previous
        # The path to the next rank: since when no byte is acknowledged though bytes are sent (0:
        # no bytes are sent), since when no packet is acknowledged, the acknowledged bytes, and the
        # bytes that were acknowledged before the large phase.
        self._stuck_since = self._dark_since = 0.0
        self._acknowledged = self._acknowledged_before = 0
        # The large phase: its begin, its total bytes, its received bytes; then the same of the
        # current step.
        self._began, self._total, self._received = 0.0, 0, 0
        self._step_began, self._step_received, self._step_total = 0.0, 0, 0

    def close(self, failure: RingFailure | None) -> None:
        """End both connections; after a failure, tell which rank is waited for."""
        if failure is not None:
            awaited_by_default = self.rank if failure.waits_for < 0 else failure.waits_for
            awaited, source = failure.told_by or (awaited_by_default, self.rank)
            message = _HEAD.pack(_ABORT, awaited, source, 0)
            for connection in self.connections:
                # In the middle of another message it would become a part of it.
                if connection is not self._out or not self._is_cut:
                    with contextlib.suppress(OSError):
                        connection.send(message)
        for connection in self.connections:
            connection.close()

    # Both connections.

    def connect(self) -> None:
        """Raises RingFailure, TestOver, OSError."""
        if self._order.next is None:
            self._connect_to_self()
        else:
            with self._listeners.expected(self._order.number, self.previous) as expected:
                self._connect_to_next(self._order.next)
                self._wait_for_previous(expected)

    def _connect_to_self(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(mesh.CONNECT_S)
            self._out = socket.create_connection(listener.getsockname(), mesh.CONNECT_S)
            self.connections.append(self._out)
            self._in, _ = listener.accept()
            self.connections.append(self._in)
        for connection in self.connections:
            mesh.reset_on_close(connection)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ticked_at = time.monotonic()
        self._patience_s = SILENT_S

    def _connect_to_next(self, peer: SmokePeer) -> None:
        self._next_name = peer.name
        resolved, error = mesh.resolve(peer.name, self._deadline.join)
        if not resolved:
            reason = f"{peer.name} does not resolve ({error or 'no address'})"
            raise RingFailure(reason, self.next)
        address = mesh.peer_address(resolved, peer.addresses, ())
        if not address:
            reason = f"{peer.name} resolves to {resolved[0]}, which is not {peer.name}'s"
            raise RingFailure(reason, self.next)
        if address != peer.name:
            self._next_name = f"{peer.name} ({address})"
        purpose = (self._order.number, self.rank, RING)
        attempt, connection = greet(peer, (address, peer.port), self._deadline, purpose)
        if connection is None:
            cause = _CAUSES.get(attempt.outcome) or attempt.error or "failed"
            message = f"no connection to {self._next_name} port {peer.port}: {cause}"
            raise RingFailure(message, self.next)
        self._out = connection
        self.connections.append(connection)

    def _wait_for_previous(self, expected: ExpectedConnection) -> None:
        self._patience_s = min(_CONNECT_S, self._order.limit_s / 2)
        # The earlier steps have their own limits.
        self._ticked_at = time.monotonic()
        self._received_at, self._is_waiting = self._deadline.began, True
        while (connection := expected.take()) is None:
            self._push()
            self._wait(expected)
        self._patience_s = min(SILENT_S, 0.4 * self._order.limit_s)
        self._in = connection
        self.connections.append(connection)
        with contextlib.suppress(OSError):
            address = connection.getpeername()[0]
            self._previous_name += f" ({address.removeprefix('::ffff:')})"

    # Sending and receiving at once.

    def _swap(
        self, step: int, frames: Iterable[bytes], count: int, take: Callable[[bytes], None]
    ) -> None:
        """Send these messages, and take this number of messages of the previous rank's step."""
        self._step, self._index = step, 0
        self._frames = iter(frames)
        self._is_waiting = count > 0
        self._received_at = self._tick()
        while True:
            is_sent = self._push()
            body = self._pull() if self._index < count else None
            if body is not None:
                take(body)
                self._index += 1
            self._is_waiting = self._index < count
            if is_sent and not self._is_waiting:
                return
            if body is None:
                self._wait(self._in if self._is_waiting else None)

    def _push(self) -> bool:
        """Send as much as the connection takes. Returns whether all is sent."""
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
                raise self._lost(self._out, problem) from None
            self._pending = self._pending[sent:]
            self._is_cut = bool(self._pending)
            self._sent_at = self._tick()

    def _pull(self) -> bytes | None:
        """The next complete message; None: it has not arrived. Beats are skipped."""
        view = memoryview(self._buffer)
        while True:
            size = _HEAD.size
            if self._have >= size:
                size += self._length
            try:
                count = self._in.recv_into(view[self._have : size])
            except BlockingIOError:
                return None
            except OSError as problem:
                raise self._lost(self._in, problem) from None
            if not count:
                raise self._lost(self._in, None)
            self._received_at = self._tick()
            if not self._have and not self._index:
                self._step_began = self._received_at
            self._have += count
            if self._have == _HEAD.size and not self._read_head():
                self._have = 0
                continue
            if self._have >= _HEAD.size and self._have == _HEAD.size + self._length:
                self._have = 0
                return bytes(view[_HEAD.size : _HEAD.size + self._length])

    def _read_head(self) -> bool:
        """Parse a message's head. Returns whether a body follows: a beat has none.

        Raises RingFailure for a message out of turn.
        """
        phase, step, index, self._length = _HEAD.unpack_from(self._buffer)
        if phase in (_BEAT, _ABORT) and not self._length:
            self._awaited, self._beat_at = step, self._received_at
            if phase == _ABORT:
                self._told_by = step, index
            return False
        expected = (PHASES.index(self.phase), self._step, self._index)
        if (phase, step, index) != expected or self._length > BLOCK:
            reason = f"{self._previous_name} sent something else than its {self.phase}"
            raise RingFailure(reason, self.previous)
        return True

    def _head(self, step: int, index: int, length: int) -> bytes:
        return _HEAD.pack(PHASES.index(self.phase), step, index, length)

    def _exchange(self, step: int, data: bytes) -> bytes:
        """Send this data and receive as much, in messages that fit into a packet."""
        bodies = [data[start : start + SMALL] for start in range(0, max(1, len(data)), SMALL)]
        frames = (self._head(step, index, len(part)) + part for index, part in enumerate(bodies))
        received: list[bytes] = []
        self._swap(step, frames, len(bodies), received.append)
        body = b"".join(received)
        if len(body) != len(data):
            sizes = f"{len(body)} bytes in {self.phase}, not {len(data)}"
            raise RingFailure(f"{self._previous_name} sent {sizes}", self.previous)
        return body

    # Waiting, and failing.

    def _wait(self, source: socket.socket | ExpectedConnection | None) -> None:
        """Wait a little for the source and for room to send. Raises RingFailure, TestOver."""
        poll = select.poll()
        out = self._out.fileno()
        poll.register(out, select.POLLIN | (select.POLLOUT if self._pending else 0))
        if source is not None:
            poll.register(source.fileno(), select.POLLIN)
        else:
            # Without events, poll(2) reports only the end by a reset.
            poll.register(self._in.fileno(), 0)
        self._tick()
        events = dict(poll.poll(SLICE_S * 1000))
        now_s = self._tick()
        self._deadline.check()
        if source is None and self._in.fileno() in events:
            raise self._lost(self._in, None)
        if events.get(out, 0) & ~select.POLLOUT:
            # The only message of the next rank is its last one.
            problem = self._read_last(self._out)
            if not isinstance(problem, BlockingIOError):
                raise self._lost(self._out, problem)
        patience_s = max(SLOW_S, (self._deadline.end - self._began) / 3)
        message = self._slow() if now_s - self._began > patience_s else ""
        if not message and (source is None or source.fileno() not in events):
            message = self._silence(self._patience_s)
        if message:
            raise RingFailure(message, self.previous)
        if now_s > self._counters_at + SLICE_S:
            self._read_counters(now_s)
            message = self._unacknowledged(_STUCK_S)
            if message:
                raise RingFailure(message, self.next)
        if not self._pending and now_s > self._sent_at + _BEAT_S:
            awaited = self.waits_for()
            self._pending = _HEAD.pack(_BEAT, self.rank if awaited < 0 else awaited, 0, 0)
            self._push()

    def _tick(self) -> float:
        """The time. A neighbour is not silent while this process does not run."""
        now_s = time.monotonic()
        if now_s - self._ticked_at > _STOOD_STILL_S:
            self.still_s += now_s - self._ticked_at
            self._received_at, self._stuck_since = now_s, 0.0
        self._ticked_at = now_s
        return now_s

    def waits_for(self) -> int:
        """The rank whose data this rank waits for, by the beats; -1: its own."""
        if not self.connections or (self._pending and not self._is_waiting):
            return self.next
        # A beat that names this rank itself tells nothing.
        is_fresh = time.monotonic() < self._beat_at + _FRESH_S
        awaited = self._awaited if is_fresh else self.previous
        return -1 if awaited == self.rank else awaited

    def _read_last(self, connection: socket.socket) -> OSError | None:
        """Read all that this connection still has: the last message may be an abort."""
        tail = b""
        try:
            for _ in range(64):
                data = connection.recv(BLOCK)
                if not data:
                    break
                tail = (tail + data)[-_HEAD.size :]
            return None
        except OSError as problem:
            return problem
        finally:
            if len(tail) == _HEAD.size:
                phase, awaited, source, length = _HEAD.unpack(tail)
                if (phase, length) == (_ABORT, 0):
                    self._told_by = awaited, source

    def _lost(self, connection: socket.socket, problem: OSError | None) -> RingFailure:
        """The failure after the end of a connection: a neighbour that kept this rank waiting, else
        the end itself."""
        self._tick()
        failure = self.waiting_failure()
        if failure is not None:
            return failure
        name, rank = self._previous_name, self.previous
        if connection is self._out:
            name, rank = self._next_name, self.next
        self._read_last(connection)
        closed = f"{name} closed the connection in {self.phase}"
        if self._told_by and max(self._told_by) < self._world:
            rank = self._told_by[self._told_by[0] == self.rank]
            return RingFailure(closed, -1 if rank == self.rank else rank, self._told_by)
        if problem is None or isinstance(problem, (ConnectionResetError, BrokenPipeError)):
            return RingFailure(closed, rank)
        return RingFailure(f"connection to {name} in {self.phase}: {problem.strerror}", rank)

    def waiting_failure(self) -> RingFailure | None:
        """The failure that names a neighbour which kept this rank waiting; None: neither did."""
        if reason := self._unacknowledged(LONG_S):
            return RingFailure(reason, self.next)
        if reason := self._silence(LONG_S):
            return RingFailure(reason, self.previous)
        stuck_s = time.monotonic() - self._stuck_since
        if self._stuck_since and stuck_s >= LONG_S:
            reason = f"{self._next_name} took nothing for {stuck_s:.1f} s in {self.phase}"
            return RingFailure(reason, self.next)
        return None

    def _silence(self, min_s: float) -> str:
        """A message, if the previous rank has sent nothing for these seconds."""
        seconds = time.monotonic() - self._received_at
        if not self._is_waiting or seconds < min_s:
            return ""
        if self.phase == "init":
            return f"{self._previous_name} did not connect in {seconds:.1f} s"
        return f"{self._previous_name} sent nothing for {seconds:.1f} s in {self.phase}"

    def _read_counters(self, now_s: float) -> None:
        """Read the kernel's counters of the path to the next rank."""
        self._counters_at = now_s
        info = tcp_info(self._out)
        if not info:
            return
        probes, unacknowledged, last_ms, _, acknowledged, unsent, _ = info
        is_sending = bool(unacknowledged or unsent or self._pending)
        if not is_sending or not self._stuck_since or acknowledged != self._acknowledged:
            self._stuck_since = now_s if is_sending else 0.0
        # A node whose buffers are full still answers the probes.
        is_dark = unacknowledged > 0 or probes > 1
        self._acknowledged = acknowledged
        self._dark_since = now_s - (last_ms / 1000 if is_dark else 0)

    def _unacknowledged(self, min_s: float) -> str:
        """A message, if the next rank's kernel has acknowledged nothing for these seconds."""
        seconds = time.monotonic() - max(self._stuck_since, self._dark_since)
        if not self._stuck_since or seconds < min_s:
            return ""
        large = self._acknowledged - self._acknowledged_before
        if self._step_total and large < min(BLOCK, self._step_total):
            return f"to {self._next_name} small messages pass, {BLOCK >> 10} KiB do not: MTU?"
        return f"{self._next_name} acknowledged nothing for {seconds:.1f} s in {self.phase}"

    def _slow(self) -> str:
        """A message with the rate of the current step, if the remaining data cannot come in time;
        "" if it can, or the rate is unknown."""
        now_s, received = time.monotonic(), self._step_received + self._have
        if not 0 < received < self._step_total or now_s - self._step_began < _RATE_S:
            return ""
        gbps = received * 8e-9 / (now_s - self._step_began)
        if (self._total - self._received) * 8e-9 / gbps < self._deadline.end - now_s:
            return ""
        self.gbps = round(gbps, 6)
        seconds = now_s - self._began
        return f"{_rate(gbps)} from {self._previous_name} after {seconds:.1f} s of large"

    def over(self, how: str) -> RingFailure:
        """The failure of a rank whose time is over.

        how: ``not through`` or ``ended from outside``
        """
        seconds = time.monotonic() - self._deadline.began
        message = f"{how} in {self.phase} after {seconds:.1f} s"
        slow = self._slow()
        failure = RingFailure(slow, self.previous) if slow else self.waiting_failure()
        if failure is None:
            return RingFailure(message, self.waits_for())
        return RingFailure(f"{message}: {failure.message}", failure.waits_for)

    # The phases.

    def run(self) -> None:
        """Raises RingFailure, TestOver."""
        self.phase = "barrier"
        self._barrier()
        self.phase = "send_recv"
        self._send_recv()
        self.phase = "large"
        self._large()
        self.phase = "done"
        self._wait_for_neighbours()

    def _note_mismatch(self, mismatch: str) -> None:
        self.mismatch = self.mismatch or f"{self.phase}: {mismatch}"

    def _barrier(self, step: int = 0) -> None:
        """Go around twice: first all ranks arrive, then all ranks know it."""
        for turn in (step, step + 1):
            if self.rank == 0:
                self._exchange(turn, b"")
            else:
                self._swap(turn, (), 1, lambda body: None)
                self._swap(turn, [self._head(turn, 0, 0)], 0, lambda body: None)

    def _send_recv(self) -> None:
        """Exchange numbers with the neighbours: all numbers once, then a packet many times."""
        times: list[float] = []
        for step in range(1 + _ROUNDS):
            began = time.monotonic()
            count = max(1, (min(SMALL, self._order.small) if step else self._order.small) // 8)
            body = self._exchange(step, pack_numbers(self.rank, count))
            if body != pack_numbers(self.previous, count):
                self._note_mismatch(f"what came is not what rank {self.previous} sent")
            if step:
                times.append(time.monotonic() - began)
        self.ms = round(1000 * statistics.median(times), 3)

    def _large(self) -> None:
        """The traffic of a ring all_reduce: each piece goes around twice."""
        world, order = self._world, self._order
        self._barrier()
        data = memoryview(random_blocks(order.number))
        steps = max(1, 2 * (world - 1))
        self._step_total = max(1, math.ceil(order.large / world))
        self._total, self._began = steps * self._step_total, time.monotonic()
        self._read_counters(self._began)
        self._acknowledged_before = self._acknowledged
        count = math.ceil(self._step_total / BLOCK)

        def content(step: int, rank: int, index: int) -> memoryview:
            start = (step * 7919 + rank * 104729 + index * 1299709) % BLOCK
            return data[start : start + min(BLOCK, self._step_total - index * BLOCK)]

        def frames(step: int) -> Iterator[bytes]:
            for index in range(count):
                body = content(step, self.rank, index)
                yield b"".join((self._head(step, index, len(body)), body))

        def take(body: bytes) -> None:
            self._step_received += len(body)
            self._received += len(body)
            if body != bytes(content(self._step, self.previous, self._index)):
                self._note_mismatch(f"message {self._index} of step {self._step} came damaged")

        for step in range(2, 2 + steps):
            self._step_received = 0
            self._swap(step, frames(step), count, take)
        seconds = time.monotonic() - self._began
        self.gbps = round(self._total * 8e-9 / seconds, 6)
        self._barrier(2 + steps)

    def _wait_for_neighbours(self) -> None:
        """Wait until both neighbours have received all data."""
        end = time.monotonic() + mesh.OPEN_S
        with contextlib.suppress(OSError, TestOver):
            self._out.shutdown(socket.SHUT_WR)
            while self._deadline.ready(self._in, select.POLLIN, end - time.monotonic()):
                if not self._in.recv(BLOCK):
                    break
            self._in.close()
            self._deadline.ready(self._out, select.POLLIN, end - time.monotonic())


def run_ring(
    order: CollectiveOrder, listeners: SmokeListeners, stop: threading.Event
) -> RankResult:
    """Run this node's rank. Returns within the order's time, or when ``stop`` is set."""
    deadline = Deadline(order.limit_s, stop)
    ring = RingRank(order, listeners, deadline)
    failure: RingFailure | None = None
    try:
        ring.connect()
        ring.run()
    except RingFailure as problem:
        failure = problem
    except TestOver:
        if ring.phase != "done":
            failure = ring.over("ended from outside" if stop.is_set() else "not through")
    except OSError as problem:
        failure = RingFailure(f"{problem.strerror or problem} in {ring.phase}", -1)
    if failure is not None and ring.still_s:
        # Its peers waited for this node.
        still = f"this node stood still for {ring.still_s:.1f} s"
        failure = RingFailure(f"{still}; {failure.message}", -1)
    ring.close(failure)
    return RankResult(
        rank=ring.rank, gpu=-1, phase=ring.phase, mismatch=ring.mismatch,
        error=failure.message if failure else "", waits_for=failure.waits_for if failure else -1,
        ms=ring.ms, gbps=ring.gbps, seconds=round(time.monotonic() - deadline.began, 3),
    )  # fmt: skip
