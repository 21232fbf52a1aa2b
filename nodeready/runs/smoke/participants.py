"""The nodes of a smoke test: their snapshots, the program on them, and which nodes take part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import gevent

from nodeready.agent.asking import Conversation, Key, Transport, collect, node_of, request
from nodeready.agent.smoke import orders
from nodeready.agent.smoke.orders import PAIRS, TORCH, Engine, Hello
from nodeready.agent.snapshots import take_snapshot
from nodeready.core.base import Unknown
from nodeready.core.outcome import SUDO, Outcome
from nodeready.core.policy import Policy
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise
from nodeready.fleet.inventory.nodeset import folded
from nodeready.fleet.transport.channels import Channels
from nodeready.runs.options import SmokeOptions
from nodeready.runs.ready import mesh
from nodeready.runs.smoke.knowledge import join_names
from nodeready.subjects.environment_rules import EnvironmentFinding, RankEnvironment, judge
from nodeready.subjects.gpus import findings
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.snapshot import Snapshot

# --- The engine of a run, the limit of its tests, and the idle GPUs of each node. Pure.

Kind = tuple[str, str]  # an engine's name and its backend
_NCCL, _GLOO, _TESTS = (TORCH, "nccl"), (TORCH, "gloo"), (orders.NCCL_TESTS, "nccl")
_PAIRS = (PAIRS, "tcp")
_TITLES = {TORCH: "PyTorch", orders.NCCL_TESTS: "nccl-tests", PAIRS: "pairs"}
#: The beginning of the reason why a node has no engine.
MISSING_ENGINE = tuple(f"no {title}" for title in _TITLES.values())


@dataclass(frozen=True)
class EngineChoice:
    kind: Kind = ("", "")  # engine and backend; ("", ""): no node has an engine
    name: str = ""  # such as ``torch 2.13.0 over gloo``
    proves: str = ""  # what a pass proves
    single_node: Kind = ("", "")  # engine and backend of the tests of one node
    control: Kind | None = None  # of the control tests; None: not all nodes have a second one
    excluded: Mapping[str, str] = field(default_factory=dict)  # node -> why it cannot take part
    fallback_reason: str = ""  # why the best engine was not chosen; "": it was chosen

    @property
    def uses_nccl(self) -> bool:
        """Whether the tests of several nodes, or of one, use NCCL."""
        return "nccl" in (self.kind[1], self.single_node[1])


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
    excluded = {n: sanitise(hello.reason, 200) for n, hello in hellos.items() if hello.reason}
    able = {name: hello for name, hello in hellos.items() if name not in excluded}
    name, _, backend = requested.partition(":")
    kinds = [_NCCL, _GLOO] if has_gpus else [_GLOO]
    if len(able) > 1:
        kinds.append(_PAIRS)
    if name == orders.NCCL_TESTS or (has_gpus and len(hellos) == 1):
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
    excluded = {name: excluded[name] for name in hellos if name in excluded}
    return EngineChoice(
        *(kind, engine_name(engine), engine.proves, single_node, next(controls, None)),
        *(excluded, fallback_reason),
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
    reasons = {}
    for (version, library), count in versions.most_common(1):
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

#: Seconds of a start. gloo: a fork, a store and a connection between every two ranks. NCCL: the
#: driver's contexts and the search for paths between GPUs; nccl-tests also load their libraries.
_ENGINE_START_S = {_GLOO: 20.0, _NCCL: 40.0, _TESTS: 60.0}
_MAX_START_S = 60.0
_COLD_S = 40.0  # seconds to read PyTorch's gigabyte over NFS at 30 MB/s
#: Seconds for each additional rank: the store of rank 0 answers one rank at a time, and a small
#: collective around a ring takes two steps per rank.
_PER_RANK_S = 0.05
_REPETITIONS = 6  # repetitions of the all_reduce whose bandwidth counts
#: The lowest Gbit/s that a test waits for: a tenth of the slowest port in use (1 Gbit/s), and of
#: the slowest between GPUs of several nodes (10 Gbit/s).
_MIN_GBPS = {"tcp": 0.1, "nccl": 1.0}


def limit_s(engine: str, backend: str, world: int, large: int, *, first: bool = False) -> float:
    """The seconds of one test: its start, the rendezvous of its ranks, and its data.

    world: the number of ranks
    large: bytes of the all_reduce whose bandwidth counts
    first: the node's first test with this engine: libraries are read, perhaps from a cold disk
    """
    start_s = _ENGINE_START_S.get((engine, backend), _MAX_START_S) + (_COLD_S if first else 0.0)
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
    has_no_tool = bus and findings.vendor_tool_of(observed, bus[0].vendor).state == "missing"
    if busy and not gpus and has_no_tool:
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
    if missing := [number for number in numbers if number not in devices]:
        return (), f"no GPU {join_names(missing, 99)}: it has {total}"
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
        reasons.append(f"GPU {join_names(used, 99)} {verb} {reason}{by}")
    is_busy = any(reason == _BUSY for reason, _ in uses.values())
    return (), "; ".join(reasons) + ("; --busy tests beside them" if is_busy else "")


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


# --- The nodes.

#: The subjects that show idle GPUs and error counters; probed before and after the tests.
_SUBJECTS = ("gpus", "rdma", "nics", "host")
#: Seconds to probe a node, each time. A driver that hangs must not cost the whole budget.
_PROBE_S = 20
_MIN_LEFT_S = 3.0  # the nodes are probed again only if these seconds remain

_MAIN = "nodeready.agent.smoke.program"
_START_S = 85.0  # seconds until the program's first line: a login, PyTorch from a cold disk
#: The last nodes to start get this multiple of the slowest start, and at least these seconds.
_START_TIMES, _MIN_START_S = 4, 20.0
_TICK_S = 0.2  # seconds between two checks for nodes that have started
_LONGER_S = 5  # seconds after the deadline at which all ends, even if the connection does not

Progress = Callable[[str, Iterable[str]], AbstractContextManager[Callable[[str], object]]]


@dataclass(frozen=True)
class SmokeTask:
    transport: Transport
    policies: Mapping[str, Policy]  # node -> its policy, in the inventory's order
    deadline: float  # the moment of time.monotonic() at which everything has ended
    # address -> its node by the inventory
    inventory_addresses: Mapping[str, str] = field(default_factory=dict)
    options: SmokeOptions = field(default_factory=SmokeOptions)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def engine(self) -> str:
        """``torch``, ``torch:gloo``, ``nccl-tests``, ``pairs``; "": the best available."""
        return "" if self.options.engine == "auto" else self.options.engine


class Participants:
    """The nodes, from the first snapshot to the last."""

    def __init__(self, task: SmokeTask, tell: Callable[[str], object], progress: Progress) -> None:
        self.task, self.tell, self.progress = task, tell, progress
        self.channels = Channels(task.transport, task.deadline)
        self.before: dict[str, Outcome[Snapshot]] = {}
        self.after: dict[str, Outcome[Snapshot]] = {}
        self.hellos: dict[str, Hello] = {}
        self.excluded: dict[str, str] = {}  # node -> why it takes no part
        self.names: tuple[str, ...] = ()  # that take part, in the inventory's order
        self.choice = EngineChoice()
        self.gpus: dict[str, Numbers] = {}  # node -> its tested GPUs; {} without GPUs
        self.ports: dict[str, Numbers] = {}  # node -> the ports on which it listens
        self.addresses: dict[str, tuple[str, ...]] = {}  # node -> those that only it has
        self.owners = mesh.Owners({}, {})
        self.findings: tuple[EnvironmentFinding, ...] = ()  # about the variables of the ranks
        self._starting: dict[str, tuple[float, Any]] = {}
        self._reported: set[str] = set()

    def probe(self, password: Callable[[list[str]], bool]) -> None:
        """Probe every node, and start the program on each node that is reached."""

        def start(name: str) -> None:
            # It starts while other nodes are still probed.
            job = gevent.spawn(self.channels.for_each, self._start, [name])
            self._starting[name] = time.monotonic(), job

        self._probe(self.task.policies, self.before, start)
        gaps = {name: probed.gap for name, probed in self.before.items() if probed.gap}
        refused = [name for name, gap in gaps.items() if gap.kind == SUDO]
        if refused and password(refused):
            self._probe(refused, self.before, start)

    def probe_again(self) -> None:
        """Probe the tested nodes once more, when there is time."""
        names = [name for name in self.names if name not in self.channels.lost]
        if names and self.task.left_s > _MIN_LEFT_S:
            self._probe(names, self.after, lambda name: None)

    def _probe(
        self,
        nodes: Iterable[str],
        results: dict[str, Outcome[Snapshot]],
        reached: Callable[[str], None],
    ) -> None:
        task, names = self.task, list(nodes)
        limit_s = max(1, int(min(_PROBE_S, task.left_s / 2)))
        probes: dict[Key, Conversation[Snapshot]] = {
            name: take_snapshot(
                name, task.policies[name], _SUBJECTS, limit_s, nonce=task.transport.nonce
            )
            for name in names
        }
        with self.progress("looking", names) as done:

            def receive(key: Key, outcome: Outcome[Snapshot]) -> None:
                results[name := node_of(key)] = outcome
                done(name)
                if outcome.value:
                    reached(name)

            collect(task.transport, probes, receive, task.deadline)
        if task.transport.interrupted:
            raise KeyboardInterrupt

    def _start(self, name: str) -> None:
        task, policy, options = self.task, self.task.policies[name], self.task.options
        engine = task.engine.partition(":")[0]
        # Pairs are also the engine of control tests.
        engines = tuple(name for name in orders.ENGINES if not engine or name in (engine, PAIRS))
        config = orders.SmokeConfig(
            nonce=self.channels.nonce, tag=task.transport.tag, user=policy.job_user,
            limit_s=max(1, int(task.left_s)) + _LONGER_S,
            ports=mesh.chosen_ports(*policy.port_range), engines=engines,
            python=options.python or policy.smoke_python,
            prefix=options.prefix or policy.smoke_prefix,
            environment=options.env or policy.smoke_environment,
        )  # fmt: skip
        self.channels.start(request(name, _MAIN, config, mark=config.nonce, stdin=True))
        if (hello := self.channels.read(name, "hello", Hello, _START_S)) is not None:
            self.hellos[name] = hello

    def _wait_for_hellos(self) -> None:
        """Wait for the first line of each node; kill stragglers after most nodes have started."""
        limit_s, total = min(_START_S, self.task.left_s / 2), len(self._starting)
        durations: list[float] = []
        with self.progress("starting", [*self._starting]) as done:
            while self._starting:
                if 2 * len(durations) > total:
                    straggler_s = max(_MIN_START_S, _START_TIMES * max(durations))
                    limit_s = min(limit_s, straggler_s)
                for name, (began, job) in [*self._starting.items()]:
                    age_s = time.monotonic() - began
                    if job.dead and name in self.hellos:
                        durations.append(age_s)
                    elif not job.dead and age_s > limit_s:
                        job.kill(block=False)
                        self.channels.lose(name, f"did not start in {age_s:.0f} s")
                    if job.dead or name in self.channels.lost:
                        done(name)
                        del self._starting[name]
                gevent.wait([job for _, job in self._starting.values()], _TICK_S, count=1)

    def join(self) -> None:
        """Decide which nodes take part, with which engine and which GPUs."""
        self._wait_for_hellos()
        task, lost = self.task, self.channels.lost
        hellos = {name: self.hellos[name] for name in task.policies if name in self.hellos}
        for name, probed in self.before.items():
            if not probed.value:
                self.excluded[name] = probed.reason
            elif name not in hellos:
                self.excluded[name] = (
                    lost[name].reason if name in lost else "did not start in time"
                )
        self._assign_addresses(hellos)
        present = {name: self.before[name] for name in hellos if name not in self.excluded}
        counts = {name: task.policies[name].gpu_count for name in present}
        self.gpus, without_gpus = idle_gpus(present, task.options.gpus, task.options.busy, counts)
        self.excluded |= without_gpus
        if able := {name: hellos[name] for name in present if name not in without_gpus}:
            self.choice = choose(able, task.engine, any(self.gpus.values()))
            self.excluded |= self.choice.excluded
        self.names = tuple(name for name in able if name not in self.excluded)
        if not self.choice.uses_nccl:
            self.gpus = {}
        self.report_excluded()
        self._judge_environment()

    def _judge_environment(self) -> None:
        """Report the variables of the ranks that keep them apart, before any rank starts."""
        hellos = {name: self.hellos[name] for name in self.names}
        ranks = [RankEnvironment(name, dict(hello.variables)) for name, hello in hellos.items()]
        libraries = (engine.library for hello in hellos.values() for engine in hello.engines)
        versions = (text[5:] for text in libraries if text.startswith("NCCL "))
        uses_nccl = self.choice.uses_nccl
        nccl = next(versions, "") if uses_nccl else None
        # A GPU that PyTorch uses proves its driver.
        proved: dict[str, Any] = {"driver": ""} if uses_nccl else {"nccl": "", "nccl_by": ""}
        facts = {name: replace(hello.facts, **proved) for name, hello in hellos.items()}
        self.findings = judge(ranks, facts, nccl=nccl)
        for finding in self.findings:
            self.tell(f"{folded(finding.nodes)}: {finding.text}: {finding.advice}")

    def _assign_addresses(self, hellos: Mapping[str, Hello]) -> None:
        claimed = {name: hello.addresses for name, hello in hellos.items()}
        peers = self.task.transport.ssh_peers()
        known_owners = mesh.known_owners(self.task.inventory_addresses, peers)
        self.owners = mesh.Owners(claimed, known_owners)
        for name, hello in hellos.items():
            ordered = mesh.chosen_ports(*self.task.policies[name].port_range)
            self.ports[name] = tuple(port for port in ordered if port in {*hello.ports})
            self.addresses[name] = self.owners.addresses_of(name)
            if hello.reason:
                self.excluded[name] = hello.reason
            elif not self.ports[name]:
                self.excluded[name] = "it listens on none of its ports"
            elif not self.addresses[name] and len(hellos) > 1:
                self.excluded[name] = "it has no address of its own"
                for text in self.owners.claimed[name][:1]:
                    self.excluded[name] += f" ({text}: {self.owners.claimers(text)})"

    def close(self) -> None:
        """End the programs on the nodes, and the jobs that wait for them."""
        gevent.killall([job for _, job in self._starting.values()], block=False)
        self._starting.clear()
        self.channels.close()

    def report_excluded(self) -> None:
        """Report the nodes that newly take no part: a line for each reason."""
        lost = {name: loss.reason for name, loss in self.channels.lost.items()}
        by_reason: dict[str, list[str]] = {}
        for name, reason in {**lost, **self.excluded}.items():
            if name not in self._reported:
                by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            self._reported.update(names)
            self.tell(f"{folded(names)}: {reason}")

    def engine(self, name: str, kind: Kind) -> str:
        """The node's engine of this kind in words; "": it has none."""
        engines = self.hellos[name].engines if name in self.hellos else ()
        return next((engine_name(e) for e in engines if (e.name, e.backend) == kind), "")

    def slots(self, name: str) -> int:
        """The number of GPUs in a node's first snapshot."""
        first = [snapshot.subjects.get("gpus") for snapshot in self.snapshots(name)[:1]]
        return sum(len(observed.gpus) for observed in first if isinstance(observed, Gpus))

    def snapshots(self, name: str) -> list[Snapshot]:
        """The snapshots of a node, the earlier one first."""
        outcomes = (self.before.get(name), self.after.get(name))
        return [outcome.value for outcome in outcomes if outcome and outcome.value]
