"""All witnesses of a job are heard: beside the calls, its GPUs, ports, kernel logs and logs' ends.

Sources of the rules: the catalogue of Xids in `nodeready.subjects.gpus.kernel_log`; a kernel that
spins in a collective keeps the SMs busy and the memory idle, at low power (vllm-project/vllm issue
46097).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nodeready.node.witnesses.devices import Message
from nodeready.subjects.gpus import kernel_log
from nodeready.text import counted
from nodeready.triage.stacks.calls import Calls
from nodeready.triage.stacks.evidence import LINE, Evidence, KeptLog
from nodeready.triage.stacks.testimony import NAME, Place, Testimony, ranks_of


class _Court(Calls):
    """Hears all witnesses."""

    def own_logs(self, own: Mapping[int, KeptLog]) -> None:
        """Errors at the end of a rank's own log; few logs that ended long before the others."""
        for rank, log in own.items():
            if any(word in log.last for word in _HINTS) and _ERROR.search(log.last):
                self.say("logs", f"its log ends in an error: {log.last}", [rank], weight=1)
        if len(own) < 4 or self.moving:
            return
        order = sorted(own, key=lambda rank: -own[rank].age_s)
        few = max(1, len(order) // 8)
        gaps = [
            own[one].age_s - own[after].age_s
            for one, after in itertools.pairwise(order[: few + 1])
        ]
        at = max(range(len(gaps)), key=gaps.__getitem__)
        rest = [own[rank].age_s for rank in order[at + 1 :]]
        # The others have to stop together: else ranks simply write when they like.
        if gaps[at] >= _SILENT_S and rest[0] - rest[-1] <= gaps[at] / 2:
            text = f"wrote last {gaps[at]} s before the others"
            self.say("logs", text, order[: at + 1], weight=1)

    # --- GPUs, ports, the kernel.

    def gpus(self) -> None:
        heads = self.seen.gpu_heads.all
        spins: list[int] = []
        works: dict[int, str] = {}
        idle: list[int] = []
        for node in self.nodes:
            absent, devices = self.seen.gpus.get(node, ("", ()))
            if absent:
                self.absent["gpu"].setdefault(absent, []).append(node)
            for one in devices:
                head = heads[one.head]
                ranks = [
                    rank for pid in one.pids if (rank := self.rank_of.get((node, pid))) is not None
                ]
                for xid in head.xids:
                    self._xid("gpu", xid, node, ranks)
                if one.sm is None or not ranks:
                    continue
                low = one.power is None or not head.limit_w or one.power <= 0.6 * head.limit_w
                if one.sm >= 90 and (one.memory or 0) <= 5 and low:
                    spins += ranks
                elif one.sm <= 5:
                    idle += ranks
                elif one.sm >= 50:
                    works |= dict.fromkeys(ranks, f"SM {one.sm} %, memory {one.memory or 0} %")
        if spins:
            text = "SM busy, memory idle, low power: a kernel that spins in a collective"
            self.say("gpu", text, spins, weight=1, against=True)
        few = max(1, len(spins) // 3)
        if idle and len(idle) <= few and spins:
            text = f"its GPU is idle while those of {ranks_of(spins)} spin in a collective"
            self.say("gpu", text, idle, weight=1)
        elif idle:
            self.say("gpu", "its GPU is idle", idle)
        if works and len(works) <= few and spins:
            text = f"its GPU computes while those of {ranks_of(spins)} spin in a collective"
            self.say("gpu", text, works, weight=1)
        elif works:
            self.say("gpu", "its GPU computes", works)

    def _xid(self, name: str, code: int, node: str, ranks: Sequence[int], when: str = "") -> None:
        known = kernel_log.XIDS.get(code)
        meaning = known.meaning if known else "unknown"
        action = known.action if known else kernel_log.MONITOR
        grave = action in (kernel_log.ISOLATE, kernel_log.REBOOT, kernel_log.RESET)
        weight = 2 if grave else 1 if action == kernel_log.APPLICATION else 0
        text = f"Xid {code} {meaning}{when} ({action})"
        self.say(name, text, ranks, [node], weight=weight)

    def network(self) -> None:
        ports = self.seen.ports.all
        total, known = 0.0, False
        quiet: dict[str, list[str]] = defaultdict(list)
        states: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for node in self.nodes:
            found = self.seen.networks.get(node)
            if found is None:
                continue
            if found.absent:
                self.absent["network"].setdefault(found.absent, []).append(node)
                continue
            rdma = any(ports[at].kind in _RDMA for at, _ in found.ports)
            carry, silent = 0, []
            for at, moved in found.ports:
                port = ports[at]
                states[port.name[:NAME]][port.state[:NAME]].append(node)
                if port.errors:
                    rose = ", ".join(f"{name[:NAME]} +{by}" for name, by in port.errors[:4])
                    fatal = any("link_downed" in name for name, _ in port.errors)
                    text = f"errors of {port.name[:NAME]} rise: {rose}"
                    self.say("network", text, nodes=[node], weight=2 if fatal else 1)
                if port.state != "up" or (rdma and port.kind not in _RDMA):
                    continue
                carry += moved
                silent += [port.name[:NAME]] if not moved else []
            if found.seconds > 0 and found.ports:
                known = True
                total += carry / found.seconds
                if silent:
                    names = ", ".join(silent[:8])
                    quiet[f"no bytes on {names} in {found.seconds:.0f} s"].append(node)
                elif carry / found.seconds >= MOVING_BYTES_PER_S:
                    self.say("network", f"bytes move on its {'RDMA ' if rdma else ''}ports",
                              nodes=[node])  # fmt: skip
        for text, nodes in quiet.items():
            self.say("network", text, nodes=nodes)
        for name, by_state in states.items():
            up = len(by_state.pop("up", []))
            for state, nodes in by_state.items():
                # A port that is down nearly everywhere is one that nobody has connected.
                if up > len(nodes):
                    text = f"port {name} is {state}, and up on {counted(up, 'other node')}"
                    self.say("network", text, nodes=nodes, weight=1)
        # Ranks of one node speak through its memory, and its ports are somebody else's.
        if known and len(self.nodes) > 1:
            self.found.bytes_per_s = total

    def kernel(self) -> None:
        logs = self.seen.kernel_logs.all
        for node, number in self.seen.kernels.items():
            found = logs[number]
            if found.absent and node in self.of_node:
                self.absent["kernel"].setdefault(found.absent, []).append(node)
            for message in found.messages:
                self._message(message, node)

    def _message(self, message: Message, node: str) -> None:
        rank = self.rank_of.get((node, message.pid)) if message.pid else None
        ranks = [rank] if rank is not None else []
        when = f" {ago(message.ago_s)} ago"
        code = _XID.search(message.text) if message.kind == "xid" else None
        if code:
            self._xid("kernel", int(code[1]), node, ranks, when)
            return
        words = _MESSAGES.get(message.kind, message.kind[:NAME])
        named = f" (pid {message.pid})" if message.pid else ""
        weight = 2 if message.kind == "oom" or ranks else 1
        if message.kind == "memory" and not ranks:
            weight = 0
        text = f"{words}{named}{when}: {message.text[:LINE]}"
        self.say("kernel", text, ranks, [node], weight=weight)


#: Seconds that a log must have ended before the others' to be told.
_SILENT_S = 60
#: Bytes per second of all ports above which something moves: heartbeats and ssh are below.
MOVING_BYTES_PER_S = 1e6
_RDMA = ("infiniband", "roce")
#: Words of which one stands in every error, and the errors.
_HINTS = ("rror", "xception", "out of memory", "Segmentation")
_ERROR = re.compile(
    r"^\S*(?:Error|Exception)\b|\bCUDA error|\b\w+Error: |out of memory|Segmentation fault"
)
_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?:\s*(\d{1,4})\b")
_MESSAGES = {
    "oom": "killed for memory", "xid": "Xid", "link": "link",
    "filesystem": "file system", "hung": "hung in the kernel", "memory": "memory error",
    "segfault": "crashed",
}  # fmt: skip


def ago(seconds: int) -> str:
    """``40 s``, ``12 min``, ``3 h``."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def hear(evidence: Evidence, places: Iterable[Any], moving: bool) -> Testimony:
    """All that the witnesses say of the job with these processes (node, pid, rank)."""
    if not evidence:
        return Testimony()
    court = _Court(evidence, [Place(*one[:3]) for one in places], moving)
    for listen in (court.recorder, court.logs, court.ras, court.gpus, court.network, court.kernel):
        listen()
    answers = {
        "logs": evidence.logs, "flight_recorder": evidence.recordings, "nccl_ras": evidence.ras,
        "gpu": evidence.gpus, "network": evidence.networks, "kernel": evidence.kernels,
    }  # fmt: skip
    court.found.witnesses = court.witnesses(name for name, said in answers.items() if said)
    return court.found
