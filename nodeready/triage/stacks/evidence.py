"""What the witnesses beside the stacks have said, kept small while traces are read.

A trace's witnesses are the dataclasses of `nodeready.node.witnesses` as plain data. Ranks of a
hung job say nearly the same, so equal values are decoded once and known by a number.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any, NamedTuple

from nodeready.node.witnesses.devices import Gpu, Gpus, Kernel, Network, Port
from nodeready.node.witnesses.flight_recorder import Entry, ProcessGroup, Recording
from nodeready.node.witnesses.logs import Log, Report
from nodeready.node.witnesses.nccl_ras import Ras
from nodeready.subjects import wire

#: Characters of a line that a process or a node said.
LINE = 160


class Known:
    """Decoded values of one dataclass, each different one once, known by its number.

    A value is known by its bytes: comparing those costs a tenth of decoding it again.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.all: list[Any] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Any) -> int:
        """Raises DecodeError. Version 2 of marshal: equal values have equal bytes."""
        key = marshal.dumps(value, 2)
        number = self._numbers.get(key)
        if number is None:
            made = wire.decode(self.kind, value)
            number = self._numbers[key] = len(self.all)
            self.all.append(made)
        return number


class KeptLog(NamedTuple):
    """The log of one rank.

    head:    number of the log without what differs from rank to rank
    reports: number of the tuple of (rank, number of the report without its rank)
    last:    its last line
    """

    head: int
    reports: int
    path: str
    age_s: int
    last: str


class KeptRecording(NamedTuple):
    """The recording of one rank.

    head:  number of the recording without what differs from rank to rank
    calls: number of the pair (numbers of its groups, numbers of its entries)
    """

    head: int
    age_s: int
    calls: int


class KeptGpu(NamedTuple):
    """One GPU. head: number of the GPU without what changes all the time"""

    head: int
    sm: int | None
    memory: int | None
    power: int | None
    pids: tuple[int, ...]


class KeptNetwork(NamedTuple):
    """The ports of one node. ports: (number of the port without its bytes, bytes both ways)"""

    absent: str
    seconds: float
    ports: tuple[tuple[int, int], ...]


class Evidence:
    """Reads the witnesses of one trace after the other, and keeps of each only what is needed."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], KeptLog] = {}
        self.recordings: dict[tuple[str, int], KeptRecording] = {}
        self.gpus: dict[str, tuple[str, tuple[KeptGpu, ...]]] = {}
        self.networks: dict[str, KeptNetwork] = {}
        self.kernels: dict[str, int] = {}
        self.ras: dict[str, Ras] = {}
        self.log_heads, self.recording_heads = Known(Log), Known(Recording)
        self.groups, self.entries = Known(ProcessGroup), Known(Entry)
        self.calls: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.reports = Known(Report)
        self.report_lists: dict[tuple[tuple[int | None, int], ...], int] = {(): 0}
        self._report_keys: dict[bytes, int] = {}
        self.gpu_heads, self.gpus_heads = Known(Gpu), Known(Gpus)
        self.ports, self.network_heads, self.kernel_logs = (
            Known(Port), Known(Network), Known(Kernel)
        )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(
            self.logs or self.recordings or self.gpus or self.networks or self.kernels or self.ras
        )

    def read(self, trace: Mapping[str, Any]) -> None:
        """Keep what the witnesses of one trace say; what makes no sense is an absent witness."""
        node, beside = trace["node"], trace.get("witnesses")
        if beside:
            self._read_node(node, beside)
        for process in trace["processes"]:
            said = process.get("witnesses")
            if not said:
                continue
            key = (node, process["pid"])
            if "logs" in said:
                self.logs[key] = self._log(said["logs"])
            if "flight_recorder" in said:
                self.recordings[key] = self._recording(said["flight_recorder"])

    def _log(self, value: Any) -> KeptLog:
        try:
            lines, path, age = value["lines"], value["path"], value["age_s"]
            empty = {**value, "path": "", "age_s": 0, "lines": [], "reports": []}
            last = lines[-1] if lines else ""
            if type(path) is not str or type(age) is not int or type(last) is not str:
                raise wire.DecodeError("no Log")
            reports = self._reports(value["reports"])
            return KeptLog(self.log_heads.number(empty), reports, path[:LINE], age, last[:LINE])
        except _UNREAD as problem:
            head = self.log_heads.number(wire.plain(Log(_senseless(problem))))
            return KeptLog(head, self.report_lists.setdefault((), 0), "", 0, "")

    def _reports(self, values: list[Any]) -> int:
        """The number of the reports. Ranks that write one file have the same ones."""
        if not values:
            return 0
        key = marshal.dumps(values, 2)
        number = self._report_keys.get(key)
        if number is None:
            made = []
            for one in values:
                rank = one["rank"]
                if rank is not None and type(rank) is not int:
                    raise wire.DecodeError("no Report")
                made.append((rank, self.reports.number({**one, "rank": None})))
            number = self.report_lists.setdefault(tuple(made), len(self.report_lists))
            self._report_keys[key] = number
        return number

    def _recording(self, value: Any) -> KeptRecording:
        try:
            age = value["age_s"]
            if type(age) is not int:
                raise wire.DecodeError("no Recording")
            head = self.recording_heads.number(
                {**value, "path": "", "age_s": 0, "groups": [], "entries": []}
            )
            groups = tuple([self.groups.number(one) for one in value["groups"]])
            entries = tuple([self.entries.number(one) for one in value["entries"]])
            calls = self.calls.setdefault((groups, entries), len(self.calls))
            return KeptRecording(head, age, calls)
        except _UNREAD as problem:
            head = self.recording_heads.number(wire.plain(Recording(_senseless(problem))))
            return KeptRecording(head, 0, self.calls.setdefault(((), ()), len(self.calls)))

    def _read_node(self, node: str, beside: Mapping[str, Any]) -> None:
        if "gpus" in beside:
            self.gpus[node] = self._gpus(beside["gpus"])
        if "network" in beside:
            self.networks[node] = self._network(beside["network"])
        if "kernel" in beside:
            try:
                self.kernels[node] = self.kernel_logs.number(beside["kernel"])
            except _UNREAD as problem:
                absent = {"absent": _senseless(problem), "messages": []}
                self.kernels[node] = self.kernel_logs.number(absent)
        if "nccl_ras" in beside:
            try:
                self.ras[node] = wire.decode(Ras, beside["nccl_ras"])
            except wire.DecodeError as problem:
                self.ras[node] = Ras(_senseless(problem))

    def _gpus(self, value: Any) -> tuple[str, tuple[KeptGpu, ...]]:
        try:
            head = self.gpus_heads.all[self.gpus_heads.number({**value, "devices": []})]
            return head.absent, tuple(map(self._gpu, value["devices"]))
        except _UNREAD as problem:
            return _senseless(problem), ()

    def _gpu(self, value: Mapping[str, Any]) -> KeptGpu:
        now = (value["sm_percent"], value["memory_percent"], value["power_w"])
        pids = value["pids"]
        if not {*map(type, now)} <= {int, type(None)} or not {*map(type, pids)} <= {int}:
            raise wire.DecodeError("no Gpu")
        head = {**value, "sm_percent": None, "memory_percent": None, "power_w": None, "pids": []}
        return KeptGpu(self.gpu_heads.number(head), *now, tuple(pids))

    def _network(self, value: Any) -> KeptNetwork:
        try:
            head = self.network_heads.all[
                self.network_heads.number({**value, "seconds": 0.0, "ports": []})
            ]
            seconds, ports = value["seconds"], []
            if type(seconds) not in (int, float) or not 0 <= seconds < 1e6:
                raise wire.DecodeError("no Network")
            for port in value["ports"]:
                received, sent = port["received"], port["sent"]
                if type(received) is not int or type(sent) is not int:
                    raise wire.DecodeError("no Port")
                number = self.ports.number({**port, "received": 0, "sent": 0})
                ports.append((number, max(0, received) + max(0, sent)))
            return KeptNetwork(head.absent, seconds, tuple(ports))
        except _UNREAD as problem:
            return KeptNetwork(_senseless(problem), 0.0, ())


#: What reading an answer of another form raises.
_UNREAD = (wire.DecodeError, TypeError, KeyError, AttributeError, ValueError)


def _senseless(problem: Exception) -> str:
    what = problem.what if isinstance(problem, wire.DecodeError) else "of another form"
    return f"its answer makes no sense ({what[:LINE]})"
