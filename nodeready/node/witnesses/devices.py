"""GPUs, network ports and the kernel's log: what the node's hardware did since the job began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: not told.

    sm_percent, memory_percent: utilisation; power_w, limit_w: watts; xids: since the job began
    pids: the processes that compute on it, as this node's kernel numbers them
    """

    index: int
    name: str
    bus_id: str
    sm_percent: int | None
    memory_percent: int | None
    power_w: int | None
    limit_w: int | None
    xids: tuple[int, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Gpus:
    """All GPUs of the node. absent: why none is told, one line."""

    absent: str = ""
    devices: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Port:
    """One network or RDMA port between two samples.

    kind:   ``ethernet``, ``infiniband`` or ``roce``
    state:  ``up``, or what it is instead
    received, sent: bytes between the samples
    errors: counters that rose, and by how much: ((``symbol_error``, 3), ...)
    """

    name: str
    kind: str
    state: str
    received: int
    sent: int
    errors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Network:
    """All ports of the node. seconds: between the two samples. absent: why none is told."""

    absent: str = ""
    seconds: float = 0.0
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Message:
    """A line of the kernel's log that a job dies or hangs of.

    kind:  ``oom``, ``xid``, ``link``, ``filesystem``, ``hung``, ``memory``, ``segfault``
    ago_s: whole seconds before the look
    pid:   the process that it names; 0: none
    text:  the line, at most 200 characters
    """

    kind: str
    ago_s: int
    pid: int
    text: str


@dataclass(frozen=True)
class Kernel:
    """The kernel's log since the job began. absent: why it is not told, one line."""

    absent: str = ""
    messages: tuple[Message, ...] = ()
