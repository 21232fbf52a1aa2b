"""What witnesses beside the stacks say, as a node's trace has it."""

from collections.abc import Sequence
from typing import Any

from nodeready.agent.witnesses.flight_recorder import ProcessGroup, RecorderEntry, Recording
from nodeready.agent.witnesses.gpus import WitnessedGpu, WitnessedGpus
from nodeready.agent.witnesses.kernel_log import KernelLog, KernelMessage
from nodeready.agent.witnesses.logs import RankLog, WatchdogReport
from nodeready.agent.witnesses.nccl_log import NcclRank
from nodeready.agent.witnesses.nccl_ras import Communicator, Member, Ras
from nodeready.agent.witnesses.ports import Network, WitnessedPort
from nodeready.core.wire import plain
from nodeready.subjects.environment_table import (
    EnvironmentFacts,
    NodeInterface,
    RankVariables,
    Rendezvous,
)

SITE = "train.py:88 step"


def entry(
    sequence: int, operation: str = "all_reduce", group: str = "0", **more: Any
) -> RecorderEntry:
    told = {
        "is_p2p": False, "state": "started", "sizes": "[[1024], [1024]]",
        "types": "[Float, Float]", "site": SITE, **more,
    }  # fmt: skip
    return RecorderEntry(group, sequence, operation=operation, **told)


def process_group(
    enqueued: int | None, completed: int | None, ranks: Sequence[int] = (), name: str = "0",
    desc: str = "default_pg",
) -> ProcessGroup:  # fmt: skip
    return ProcessGroup(name, desc, tuple(ranks), enqueued, completed, completed)


def recording(
    *groups: ProcessGroup, entries: Sequence[RecorderEntry] = (), age_s: int = 60, **more: Any
) -> dict[str, Any]:
    made = Recording(path="/tmp/fr_0", age_s=age_s, version="2.10", groups=groups,
                     entries=tuple(entries), **more)  # fmt: skip
    return {"flight_recorder": plain(made)}


def waits(sequence: int = 42, ranks: Sequence[int] = (), operation: str = "all_reduce", **more: Any
          ) -> dict[str, Any]:  # fmt: skip
    """A rank that waits in this collective of the default group."""
    age = more.pop("age_s", 60)
    own = process_group(sequence, sequence - 1, ranks)
    return recording(own, entries=[entry(sequence, operation, **more)], age_s=age)


def done(sequence: int = 41, ranks: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """A rank of which all that was called has completed."""
    return recording(process_group(sequence, sequence, ranks), **more)


def no_recording(why: str = "no dump: TORCH_FR_BUFFER_SIZE=0") -> dict[str, Any]:
    return {"flight_recorder": plain(Recording(why))}


def log(
    *lines: str, age_s: int = 5, path: str = "/logs/out", reports: Sequence[WatchdogReport] = (),
    nccl: NcclRank | None = None, is_own: bool = False,
) -> dict[str, Any]:  # fmt: skip
    log = RankLog("", path, age_s, lines, tuple(reports), nccl, is_own)
    return {"logs": plain(log)}


def status(
    rank: int | None, enqueued: int, completed: int, group: str = "default_pg"
) -> WatchdogReport:
    return WatchdogReport(rank, group, "status", None, "", enqueued, completed)


def timeout(rank: int | None, sequence: int, group: str = "default_pg") -> WatchdogReport:
    return WatchdogReport(rank, group, "timeout", sequence, "ALLREDUCE", None, None)


def ras(
    *members: tuple[str, int, int], missing: Sequence[tuple[str, int, str]] = ()
) -> dict[str, Any]:
    """members: (host, pid, AllReduce launched); missing: (host, pid, word)."""
    found = [
        Member(at, host, pid, (("AllReduce", count),))
        for at, (host, pid, count) in enumerate(members)
    ]  # fmt: skip
    found += [Member(90 + at, host, pid, (), word) for at, (host, pid, word) in enumerate(missing)]
    said = Ras("", "2.29.2", 0, (Communicator("0xabc", len(found), tuple(found)),))
    return {"nccl_ras": plain(said)}


def gpu(
    pid: int, sm: int, memory: int, power: int = 150, xids: Sequence[int] = (),
    *, throttle: Sequence[str] = (),
) -> WitnessedGpu:  # fmt: skip
    known = ("H200", "0000:01:00.0", sm, memory, power, 700)
    return WitnessedGpu(0, *known, tuple(xids), (pid,), tuple(throttle))


def gpus(*devices: WitnessedGpu, absent: str = "") -> dict[str, Any]:
    return {"gpus": plain(WitnessedGpus(absent, devices))}


def port(
    moved: int, name: str = "mlx5_0", state: str = "up", kind: str = "infiniband",
    *, errors: Sequence[tuple[str, int]] = (), gbps: float = 400,
) -> WitnessedPort:  # fmt: skip
    return WitnessedPort(name, kind, state, moved // 2, moved - moved // 2, tuple(errors), gbps)


def network(*ports: WitnessedPort, absent: str = "") -> dict[str, Any]:
    return {"network": plain(Network(absent, 2.0, ports))}


def kernel(*messages: tuple[str, int, int, str]) -> dict[str, Any]:
    """messages: (kind, seconds ago, pid, text)."""
    return {"kernel": plain(KernelLog("", tuple(KernelMessage(*one) for one in messages)))}


def variables(**values: str) -> dict[str, Any]:
    return {"variables": plain(RankVariables("", tuple(values.items()), 1))}


def port_facts(address: str, port: str, holder: str) -> dict[str, Any]:
    """A node on which this process listens on MASTER_PORT."""
    rendezvous = Rendezvous(address, port, ("10.0.0.1",), "", holder)
    interface = NodeInterface("eth0", "up", ("10.0.0.1/24",))
    return {"environment": plain(EnvironmentFacts("", (interface,), rendezvous=(rendezvous,)))}
