"""The idle GPUs of each node, which a test may use. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from nodeready.core.base import Unknown
from nodeready.core.outcome import Outcome
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise
from nodeready.subjects.gpus import findings
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.snapshot import Snapshot

#: Above this percentage of used memory without a visible process, a hidden process is assumed (a
#: container's). The driver of an idle data centre GPU uses less.
_OCCUPIED_PERCENT = 10
_REASON_LENGTH = 400

Numbers = tuple[int, ...]


def idle_gpus(
    snapshots: Mapping[str, Outcome[Snapshot]],
    gpus: Numbers | int | None = None,
    busy: bool = False,
    counts: Mapping[str, int | None] = MappingProxyType({}),
) -> tuple[dict[str, Numbers], dict[str, str]]:
    """Node -> the numbers of its GPUs that take part; node -> why none can.

    gpus:   their number, or which; None: all, and as many as on most nodes; 0 or (): none
    busy:   include GPUs with processes
    counts: node -> the number in its policy

    If most nodes have no GPU and need none, all nodes take part without GPUs.
    """
    observed_gpus: dict[str, Gpus] = {}
    reasons: dict[str, str] = {}
    for name, outcome in snapshots.items():
        observed = outcome.value.subjects.get("gpus") if outcome.value else None
        if isinstance(observed, Gpus):
            observed_gpus[name] = observed
        else:
            error = outcome.reason or "not probed"
            reason = observed.reason if isinstance(observed, Unknown) else error
            reasons[name] = f"its GPUs are not known: {sanitise(reason, 200)}"
    nodes_with_gpus = sum(
        bool(findings.expected_gpus(observed) or observed.gpus or counts.get(name))
        for name, observed in observed_gpus.items()
    )
    if gpus in (0, ()) or (gpus is None and 2 * nodes_with_gpus < max(1, len(observed_gpus))):
        return dict.fromkeys(snapshots, ()), {}
    devices = {name: _devices(observed, busy) for name, observed in observed_gpus.items()}
    usual, nodes = Counter(map(len, devices.values())).most_common(1)[0] if devices else (0, 0)
    idle: dict[str, Numbers] = {}
    for name, observed in observed_gpus.items():
        expected, source = counts.get(name), "in the policy"
        if expected is None and gpus is None and 2 * nodes > len(observed_gpus):
            expected, source = usual, f"on {counted(nodes, 'node')}"
        reason = _missing_reason(observed, devices[name], expected, source)
        if not reason:
            idle[name], reason = _select(devices[name], gpus, busy)
        if reason:
            reasons[name] = sanitise(reason, _REASON_LENGTH)
            idle.pop(name, None)
    return idle, {name: reasons[name] for name in snapshots if name in reasons}


def _devices(observed: Gpus, busy: bool) -> dict[int, Gpu]:
    """Number -> GPU for the jobs of this node, without a processor's own graphics.

    busy: include the GPUs on the bus if the vendor's tool, which shows the idle ones, is missing
    """
    bus = findings.expected_gpus(observed)
    graphics = {gpu.address for gpu in observed.pci} - {gpu.address for gpu in bus}
    gpus = [g for g in observed.nvidia or observed.amd if g.pci_address not in graphics]
    if (
        busy
        and not gpus
        and bus
        and findings.vendor_tool_of(observed, bus[0].vendor).state == "missing"
    ):
        gpus = [Gpu(index, gpu.vendor, gpu.address) for index, gpu in enumerate(bus)]
    return {gpu.index: gpu for gpu in gpus}


def _missing_reason(
    observed: Gpus, devices: Mapping[int, Gpu], expected: int | None, source: str
) -> str:
    """Why the node has too few GPUs; "": it has enough."""
    count = counted(len(devices), "GPU") if devices else "no GPU"
    shown = {gpu.pci_address for gpu in devices.values()}
    hidden = [gpu.address for gpu in findings.unshown_gpus(observed) if gpu.address not in shown]
    if hidden and not observed.gpus:
        return f"the idle GPUs cannot be determined: {findings.unshown_reason(observed)}"
    if hidden:
        return f"{count}: its tool does not show {join_first(hidden, ', ')}"
    if not devices or (expected is not None and len(devices) < expected):
        return f"{count}, {expected} {source}" if expected else count
    return ""


def _select(
    devices: Mapping[int, Gpu], gpus: Numbers | int | None, busy: bool
) -> tuple[Numbers, str]:
    """The GPUs of one node that take part, or why they are too few."""
    numbers = list(gpus) if isinstance(gpus, tuple) else sorted(devices)
    count = gpus if isinstance(gpus, int) else len(numbers)
    total = counted(len(devices), "GPU")
    missing = [number for number in numbers if number not in devices]
    if missing:
        return (), f"no GPU {list_numbers(missing)}: it has {total}"
    if len(numbers) < count:
        return (), f"{total}, {count} wanted"
    uses = {number: _use(devices[number], busy) for number in numbers}
    free = [number for number, (reason, _) in uses.items() if not reason]
    if len(free) >= count:
        return tuple(free[:count]), ""
    reasons = []
    for reason in dict.fromkeys(reason for reason, _ in uses.values() if reason):
        used = [number for number in numbers if uses[number][0] == reason]
        users = dict.fromkeys(user for number in used for user in uses[number][1])
        verb = "is" if len(used) == 1 else "are"
        by = f" ({join_first(users)})" if users else ""
        reasons.append(f"GPU {list_numbers(used)} {verb} {reason}{by}")
    is_busy = any(reason == _BUSY for reason, _ in uses.values())
    return (), "; ".join(reasons) + ("; --busy tests beside them" if is_busy else "")


def list_numbers(numbers: list[int]) -> str:
    """``0``, ``0 and 3``, ``0, 3 and 5``."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


_BUSY = "busy"


def _use(gpu: Gpu, busy: bool) -> tuple[str, tuple[str, ...]]:
    """Why the GPU cannot take part, and its users; "": it can."""
    if gpu.mig == "on":
        return "divided (MIG): a collective needs whole GPUs", ()
    if gpu.compute_mode == "prohibited":
        return "closed to programs (compute mode prohibited)", ()
    if busy:
        return "", ()
    processes = tuple(
        f"{process.name.rpartition('/')[2] or 'a process'}, pid {process.pid}"
        for process in gpu.processes
        if process.kind != "G"
    )
    if processes:
        return _BUSY, processes
    hidden = [reason for name, reason in gpu.unread if name == "processes"]
    if hidden or (gpu.vendor == "amd" and gpu.idle is None):
        return _BUSY, ("or not: its tool does not show its processes", *hidden)
    used, total = gpu.memory_used_mb or 0, gpu.memory_total_mb or 0
    if not gpu.processes and used * 100 > total * _OCCUPIED_PERCENT:
        return _BUSY, (f"{used} MiB in use, by no process that this node shows",)
    return "", ()
