"""The engine of a run, the limit of its tests, and the idle GPUs of each node. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nodeready.agent.smoke.orders import NCCL_TESTS, PAIRS, TORCH, Engine, Hello
from nodeready.core.base import Unknown
from nodeready.core.outcome import Outcome
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise
from nodeready.subjects.gpus import findings
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.snapshot import Snapshot

#: An engine's name and its backend.
Kind = tuple[str, str]
_NCCL, _GLOO, _TESTS = (TORCH, "nccl"), (TORCH, "gloo"), (NCCL_TESTS, "nccl")
_PAIRS = (PAIRS, "tcp")
_TITLES = {TORCH: "PyTorch", NCCL_TESTS: "nccl-tests", PAIRS: "pairs"}
#: The beginning of the reason why a node has no engine.
MISSING_ENGINE = tuple(f"no {title}" for title in _TITLES.values())


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run."""

    engine: str = ""  # "": no node has an engine
    backend: str = ""  # likewise
    name: str = ""  # such as ``torch 2.13.0 over gloo``
    proves: str = ""  # what a pass proves
    single_node: Kind = ("", "")  # engine and backend of the tests of one node
    # engine and backend of the control tests; None: not all nodes have a second engine
    control: Kind | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)  # node -> why it cannot take part
    fallback_reason: str = ""  # why the best engine was not chosen; "": it was chosen

    @property
    def kind(self) -> Kind:
        """Engine and backend."""
        return self.engine, self.backend

    @property
    def uses_nccl(self) -> bool:
        """Whether the tests of several nodes, or of one, use NCCL."""
        return "nccl" in (self.backend, self.single_node[1])


def engine_name(engine: Engine) -> str:
    """``torch 2.13.0 over gloo``."""
    version = f" {sanitise(engine.version, 40)}" if engine.version else ""
    return f"{engine.name}{version} over {sanitise(engine.backend, 40)}"


def choose(
    hellos: Mapping[str, Hello], requested: str = "", has_gpus: bool = False
) -> EngineChoice:
    """The best engine that most nodes have, and the nodes without it.

    requested: ``torch``, ``torch:gloo``, ``nccl-tests``, ``pairs``; "": the best
    has_gpus:  GPUs are tested

    nccl-tests need MPI between nodes, so they test single nodes, and pairs test several nodes.
    """
    excluded = {
        name: sanitise(hello.reason, 200) for name, hello in hellos.items() if hello.reason
    }
    able = {name: hello for name, hello in hellos.items() if name not in excluded}
    name, _, backend = requested.partition(":")
    kinds = [_NCCL, _GLOO] if has_gpus else [_GLOO]
    if len(able) > 1:
        kinds.append(_PAIRS)
    if name == NCCL_TESTS or (has_gpus and len(hellos) == 1):
        kinds.insert(1, _TESTS)
    kinds = [kind for kind in kinds if name in ("", kind[0]) and backend in ("", kind[1])]
    if not kinds:
        reason = f"{requested} needs GPUs, and none takes part"
        if name == PAIRS:
            reason = f"{PAIRS} needs a second node"
        return EngineChoice(excluded={**dict.fromkeys(hellos, reason), **excluded})
    engines = {
        kind: {name: engine for name, hello in able.items() if (engine := _find(hello, kind))}
        for kind in kinds
    }
    by_majority = (kind for kind in kinds if 2 * len(engines[kind]) > len(able))
    kind = next(by_majority, None) or max(kinds, key=lambda kind: len(engines[kind]))
    usable, fallback_reason = engines[kind], ""
    if kind != kinds[0]:
        lacking = [hello for name, hello in able.items() if name not in engines[kinds[0]]]
        reasons = Counter(_missing_reason(hello, kinds[0]) for hello in lacking)
        fallback_reason = reasons.most_common(1)[0][0]
    excluded |= {n: _missing_reason(hello, kind) for n, hello in able.items() if n not in usable}
    excluded |= _other_versions(usable)
    chosen = [name for name in usable if name not in excluded]
    single_node = kind
    if kind == _TESTS and len(hellos) > 1:
        kind = _PAIRS
        excluded |= {n: _missing_reason(able[n], kind) for n in chosen if not _find(able[n], kind)}
        chosen = [name for name in chosen if name not in excluded]
    elif kind[1] != "nccl" and has_gpus and all(_find(able[name], _TESTS) for name in chosen):
        single_node = _TESTS
    if not chosen:
        return EngineChoice(excluded=excluded)
    engine = _find(able[chosen[0]], kind)
    assert engine is not None
    controls = (
        control
        for control in (_GLOO, _PAIRS)
        if control != kind and all(_find(able[name], control) for name in chosen)
    )
    return EngineChoice(
        *kind,
        name=engine_name(engine),
        proves=engine.proves,
        single_node=single_node,
        control=next(controls, None),
        excluded={name: excluded[name] for name in hellos if name in excluded},
        fallback_reason=fallback_reason,
    )


def _find(hello: Hello, kind: Kind, usable: bool = True) -> Engine | None:
    engines = (engine for engine in hello.engines if (engine.name, engine.backend) == kind)
    return next((engine for engine in engines if not (usable and engine.reason)), None)


def _missing_reason(hello: Hello, kind: Kind) -> str:
    engine = _find(hello, kind, usable=False)
    same_name = (engine.reason for engine in hello.engines if engine.name == kind[0])
    reason = engine.reason if engine else next(same_name, "")
    title = _TITLES[kind[0]] + ("" if kind[0] == PAIRS else f" over {kind[1]}")
    return f"no {title}: {sanitise(reason, 200) or 'it was not found'}"


def _other_versions(usable: Mapping[str, Engine]) -> dict[str, str]:
    """Node -> how its version differs from the most common one (of equal counts, the first
    node's). A job with two versions of PyTorch or NCCL fails at its start, or hangs.
    """
    versions = Counter((engine.version, engine.library) for engine in usable.values())
    if len(versions) < 2:
        return {}
    ((version, library), count), *_ = versions.most_common(1)
    reasons = {}
    for name, engine in usable.items():
        if (engine.version, engine.library) == (version, library):
            continue
        title, pair = f"{_TITLES[engine.name]} ", (engine.version, version)
        if engine.version == version:
            title, pair = "", (engine.library, library)
        own_version, usual = (sanitise(text, 60) or "of no version" for text in pair)
        reasons[name] = f"{title}{own_version} here, {usual} on {counted(count, 'node')}"
    return reasons


# --- The limit of a test.

#: Seconds of a start: for gloo, a fork, a store and a connection between every two ranks; for
#: NCCL, the driver's context on each GPU and the search for paths between the GPUs; nccl-tests
#: also load their libraries.
_START_S = {_GLOO: 20.0, _NCCL: 40.0, _TESTS: 60.0}
_MAX_START_S = 60.0
#: Seconds to read PyTorch's gigabyte over NFS at 30 MB/s.
_COLD_S = 40.0
#: Seconds for each additional rank: the store of rank 0 answers one rank at a time, and a small
#: collective around a ring takes two steps per rank.
_PER_RANK_S = 0.05
#: Repetitions of the all_reduce whose bandwidth counts.
_REPETITIONS = 6
#: The lowest Gbit/s that a test waits for: a tenth of the slowest port in use (1 Gbit/s), and of
#: the slowest between GPUs of several nodes (10 Gbit/s).
_MIN_GBPS = {"tcp": 0.1, "nccl": 1.0}


def limit_s(engine: str, backend: str, world: int, large: int, *, first: bool = False) -> float:
    """The seconds of one test: its start, the rendezvous of its ranks, and its data.

    world: the number of ranks
    large: bytes of the all_reduce whose bandwidth counts
    first: the node's first test with this engine, so libraries are read from a disk that may be
           cold
    """
    start_s = _START_S.get((engine, backend), _MAX_START_S) + (_COLD_S if first else 0.0)
    min_gbps = _MIN_GBPS["nccl" if backend == "nccl" else "tcp"]
    # Around a ring each byte leaves a rank twice (nccl-tests' PERFORMANCE.md).
    data_s = _REPETITIONS * 2 * large * 8 / (min_gbps * 1e9)
    return round(start_s + world * _PER_RANK_S + data_s, 1)


# --- The idle GPUs of each node, which a test may use.


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
        reason = _shortage_reason(observed, devices[name], expected, source)
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


def _shortage_reason(
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
