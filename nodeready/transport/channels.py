"""Many nodes that are spoken with line by line, side by side: their channels, and the lost nodes.

Beside `line_channel`, which runs on a node, too: there is no gevent there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import gevent
from gevent.pool import Pool

from nodeready.node import payload
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError, Unknown
from nodeready.transport.base import NodeChannel, Request, Transport

Row = TypeVar("Row")
#: Seconds for closing the channels of all nodes.
_CLOSE_S = 5


def join_all(jobs: Sequence[gevent.Greenlet[..., Any]]) -> None:
    """Wait for all of them; an interrupt ends them first."""
    try:
        gevent.joinall(jobs)
    except BaseException:
        gevent.killall(jobs, block=False)
        raise


class Channels:
    """The channels of many nodes, on which the same program answers. A node costs itself alone.

    nonce: with which each of the nodes' lines begins
    open:  node -> its channel, of those that take part
    lost:  node -> why it takes no part any more: the first reason stays
    """

    def __init__(self, transport: Transport, deadline: float, purpose: str) -> None:
        """deadline: on the monotonic clock; nothing waits longer
        purpose:  of the program, for a node without a Python: ``the mesh``
        """
        self.nonce = f"nodeready-{secrets.token_hex(8)}"
        self.open: dict[str, NodeChannel] = {}
        self.lost: dict[str, Unknown] = {}
        self._transport, self._deadline, self._purpose = transport, deadline, purpose

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def start(self, request: Request) -> None:
        """Run the program on a node: its first row is still to be read."""
        self.open[request.node] = self._transport.open(request)

    def for_each(self, work: Callable[[str], object], names: Iterable[str]) -> None:
        """Do it for all of these nodes at once. Our own mistake costs the node alone."""

        def run_work(name: str) -> None:
            try:
                work(name)
            except Exception as problem:  # noqa: BLE001 - as everywhere
                self.lose(name, f"internal error: {type(problem).__name__}: {problem}")

        join_all([gevent.spawn(run_work, name) for name in names])

    def lose(self, name: str, reason: str, evidence: str = "") -> None:
        """The node takes no part any more. It costs itself, not those that tried it."""
        self.lost.setdefault(name, Unknown(reason, evidence))
        channel = self.open.pop(name, None)
        if channel is not None:
            channel.close()

    def lose_all(self, names: Iterable[str], reason: str) -> None:
        """Lose these, side by side: closing a channel can take its time."""
        self.for_each(lambda name: self.lose(name, reason), names)

    def read(self, name: str, row_name: str, kind: type[Row], limit_s: float) -> Row | None:
        """The node's next row, which must be of this name and kind. None: the node is lost, or the
        deadline came."""
        data = self._data(name, row_name, limit_s)
        if data is None:
            return None
        try:
            return wire.decode(kind, data)
        except ProbeError as problem:
            self.lose(name, problem.reason, problem.evidence)
            return None

    def _data(self, name: str, row_name: str, limit_s: float) -> Any:
        channel = self.open[name]
        line = channel.read_line(min(limit_s, max(0.1, self.left_s)))
        if line is None:
            if channel.error:
                self.lose(name, channel.error)
            elif self.left_s > 0:
                self.lose(name, f"no answer in {limit_s:.0f} s")
            return None
        if line.startswith(f"{self.nonce} {payload.NO_PYTHON}"):
            self.lose(name, f"{payload.NO_PYTHON} on the node: {self._purpose} needs it")
            return None
        try:
            row = dict(wire.lines(f"{line}\n", self.nonce))
        except ProbeError as problem:
            self.lose(name, problem.reason)
            return None
        if set(row) != {row_name} or row[row_name] is None:
            self.lose(name, "the answer makes no sense (another row)", line[:200])
            return None
        return row[row_name]

    def drop_dead(self) -> None:
        """Lose the nodes whose connection ended between two reads."""

        def check(name: str) -> None:
            channel = self.open[name]
            channel.read_line(0.05)
            if channel.error:
                self.lose(name, channel.error)

        self.for_each(check, list(self.open))

    def close(self) -> None:
        """End the programs: all at once, for none connects to another any more."""
        closing = Pool(64)
        for channel in self.open.values():
            closing.spawn(channel.close)
        with contextlib.suppress(gevent.Timeout):
            closing.join(timeout=_CLOSE_S)
