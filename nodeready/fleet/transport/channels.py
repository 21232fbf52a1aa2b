"""The channels to many nodes, used in parallel, and the nodes that were lost.

Apart from `nodeready.agent.local`, which also runs on a node, where there is no gevent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import gevent
from gevent.pool import Pool

from nodeready.agent.asking import NodeChannel, Request, Transport, new_nonce
from nodeready.core import wire
from nodeready.core.base import ProbeError, Unknown

Row = TypeVar("Row")
_CLOSE_S = 5  # seconds for closing the channels of all nodes


def join_all(jobs: Sequence[gevent.Greenlet[..., Any]]) -> None:
    """Wait for all of these; an interrupt ends them."""
    try:
        gevent.joinall(jobs)
    except BaseException:
        gevent.killall(jobs, block=False)
        raise


class Channels:
    """The channels to the same program on many nodes. A node that fails is lost alone.

    nonce: the beginning of each line of the nodes
    open:  node -> its channel, without the lost nodes
    lost:  node -> the first reason why it was lost
    """

    def __init__(self, transport: Transport, deadline: float) -> None:
        """deadline: of time.monotonic(), for all waits"""
        self.nonce = new_nonce()
        self.open: dict[str, NodeChannel] = {}
        self.lost: dict[str, Unknown] = {}
        self._transport, self._deadline = transport, deadline

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def start(self, request: Request) -> None:
        self.open[request.node] = self._transport.open(request)

    def for_each(self, work: Callable[[str], object], names: Iterable[str]) -> None:
        """Do the work for all of these nodes in parallel."""

        def run_work(name: str) -> None:
            try:
                work(name)
            except Exception as problem:  # noqa: BLE001 - our bug fails only this node
                self.lose(name, f"internal error: {type(problem).__name__}: {problem}")

        join_all([gevent.spawn(run_work, name) for name in names])

    def lose(self, name: str, reason: str, evidence: str = "") -> None:
        """Close the node's channel, and note why."""
        self.lost.setdefault(name, Unknown(reason, evidence))
        channel = self.open.pop(name, None)
        if channel is not None:
            channel.close()

    def lose_all(self, names: Iterable[str], reason: str) -> None:
        """Lose these in parallel: closing a channel can take seconds."""
        self.for_each(lambda name: self.lose(name, reason), names)

    def read(self, name: str, row_name: str, kind: type[Row], limit_s: float) -> Row | None:
        """The node's next row, of this name and kind. None: the node is lost, or the deadline
        came.
        """
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
        if line.startswith(f"{self.nonce} {wire.NO_PYTHON}"):
            self.lose(name, wire.PYTHON_MISSING)
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
        """End all programs in parallel: none connects to another any more."""
        closing = Pool(64)
        for channel in self.open.values():
            closing.spawn(channel.close)
        with contextlib.suppress(gevent.Timeout):
            closing.join(timeout=_CLOSE_S)
