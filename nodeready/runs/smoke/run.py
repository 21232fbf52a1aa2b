"""The smoke test of all nodes, until one deadline: the search, and tests with a second engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nodeready.agent.asking import INTERRUPT
from nodeready.agent.smoke.orders import PAIRS, RankNetwork
from nodeready.agent.witnesses import nccl_errors
from nodeready.agent.witnesses.nccl_errors import CAUSE, LOST_PEER, VICTIM
from nodeready.core.base import Unknown
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import LOST, Gap
from nodeready.core.result import ALONE as NO_PEERS
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise, utc_now
from nodeready.fleet.inventory.host_data import given_addresses
from nodeready.runs import targets
from nodeready.runs.memory.kept_looks import LookKeeper
from nodeready.runs.options import SmokeOptions
from nodeready.runs.smoke import document, knowledge, participants
from nodeready.runs.smoke.document import SmokeReport, below_floor, code, links
from nodeready.runs.smoke.knowledge import PAIR, Knowledge, SmokeSuspect, Test, join_names
from nodeready.runs.smoke.participants import Participants, Progress, SmokeTask
from nodeready.runs.smoke.rounds import OutOfTime, TestRounds
from nodeready.runs.smoke.search import search
from nodeready.runs.targets import ask_password
from nodeready.runs.tell import Tell
from nodeready.runs.values import policy_settings
from nodeready.subjects.gpus import checks, findings, xids
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.proof.facts import ProvedCollective
from nodeready.subjects.rdma.facts import Rdma
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot

# --- New errors of a node's GPUs and ports during the test. Pure.

#: Counters of a GPU -> the name of one increment.
_GPU_COUNTERS = {
    "ecc_uncorrectable_volatile": "new uncorrected ECC error",
    "ecc_correctable_volatile": "new corrected ECC error",
    "ecc_deferred": "new deferred ECC error",
    "xgmi_errors": "new XGMI error",
    "remapped_uncorrectable": "newly remapped memory row",
    "retired_pages": "newly retired memory page",
}
#: States of a GPU that begin during the test.
_GPU_STATES = {
    "remap_pending": "a row of its memory waits to be remapped",
    "remap_failed": "a row of its memory could not be remapped",
    "retired_pending": "a page of its memory waits to be retired",
    "repair_pending": "its memory waits to be repaired",
    "unrepairable": "its memory cannot be repaired",
    "sram_exceeded": "its SRAM had too many errors",
}
#: Temperatures of a GPU with their limits.
_GPU_TEMPERATURES = (
    ("", "temperature_c", "temperature_slowdown_c"),
    ("memory ", "memory_temperature_c", "memory_temperature_max_c"),
)
#: The counters of ports (`Subject.counters`) -> the name of one increment, and the maximum normal
#: increase: send errors, and receive errors other than CRC errors, do not only come from the wire.
_PORT_COUNTERS = {
    "symbol_error": ("new symbol error", 0),
    "link_downed": ("new link failure", 0),
    "local_link_integrity_errors": ("new local link integrity error", 0),
    "excessive_buffer_overrun_errors": ("new excessive buffer overrun error", 0),
    "rnr_nak_retry_err": ("new RNR NAK retry error", 0),
    "carrier_changes": ("link change", 0),
    "rx_crc_errors": ("new CRC error", 0),
    "rx_errors": ("new receive error", 120),
    "tx_errors": ("new send error", 120),
}


def increase(before: int | None, after: int | None) -> int:
    """The increase of a counter, which may have restarted at 0; 0 where it is unknown.

    >>> increase(3, 5), increase(3, 2), increase(None, 2)
    (2, 2, 0)
    """
    if before is None or after is None:
        return 0
    return after - before if after >= before else after


def regressions(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """The new errors between two snapshots of a node, a sentence each."""
    sentences: list[str] = []
    for subject in ("gpus", "rdma", "nics"):
        old: Any = before.subjects.get(subject)
        new: Any = after.subjects.get(subject)
        if any(observed is None or isinstance(observed, Unknown) for observed in (old, new)):
            continue
        counters = SUBJECTS[subject].counters
        if counters:
            sentences += _ports(counters(old, NO_PEERS), counters(new, NO_PEERS))
        else:
            sentences += _gpus(old, new)
    return tuple(sanitise(sentence) for sentence in sentences)


def _gpus(before: Gpus, after: Gpus) -> Iterator[str]:
    remaining = {(gpu.pci_address, gpu.uuid): gpu for gpu in after.gpus}
    for gpu in before.gpus:
        tool = findings.vendor_tool_of(after, gpu.vendor)
        if (after_gpu := remaining.get((gpu.pci_address, gpu.uuid))) is not None:
            yield from (f"GPU {gpu.index}: {text}" for text in _gpu(gpu, after_gpu))
        elif tool.works:
            yield f"GPU {gpu.index}: {tool.name} does not show it any more"
    for vendor in dict.fromkeys(gpu.vendor for gpu in before.gpus):
        tool = findings.vendor_tool_of(after, vendor)
        if not tool.works:
            yield f"{tool.name} {tool.state}, which answered before the test"
    errors = {gpu.address: gpu.aer for gpu in before.pci}
    for bus_gpu in after.pci:
        address = bus_gpu.address
        counts = {(kind, name): n for kind, name, n in errors.get(address, bus_gpu.aer)}
        for kind, name, count in bus_gpu.aer:
            if new := increase(counts.get((kind, name), 0), count):
                error = counted(new, "new uncorrected PCIe error")
                yield f"{address}: {error} ({name}, {kind}) during the test"
    yield from _kernel_faults(before, after)


def _gpu(before: Gpu, after: Gpu) -> Iterator[str]:
    for name, text in _GPU_COUNTERS.items():
        if new := increase(getattr(before, name, None), getattr(after, name, None)):
            yield f"{counted(new, text)} during the test"
    for name, text in _GPU_STATES.items():
        if getattr(after, name) and not getattr(before, name):
            yield text
    if throttle := [reason for reason in after.throttle if reason not in before.throttle]:
        yield f"slows down ({', '.join(throttle)})"
    for part, name, limit_name in _GPU_TEMPERATURES:
        limit, degrees = getattr(after, limit_name), getattr(after, name)
        if limit is None or degrees is None:
            continue
        if degrees >= limit > (getattr(before, name) or 0):
            yield f"{part}{degrees} C, its limit is {limit} C"
    if after.recovery not in (None, "none", before.recovery):
        yield f"its driver asks for {after.recovery}"


def _kernel_faults(before: Gpus, after: Gpus) -> Iterator[str]:
    """New faults in the kernel's log; the end of a test can cause those of applications."""
    if not (before.kernel_log.works and after.kernel_log.works):
        return
    old = Counter[tuple[object, ...]]()
    for fault in before.kernel_faults:
        old[fault.source, fault.code, fault.pci_address, fault.action] += fault.count
    new = []
    for fault in after.kernel_faults:
        key = fault.source, fault.code, fault.pci_address, fault.action
        count = fault.count - old[key]
        old[key] -= fault.count
        if count > 0 and fault.action != xids.APPLICATION:
            new.append(replace(fault, count=min(count, fault.count)))
    if new:
        yield f"in the kernel's log during the test: {checks.faults_in_words(after, new)}"


def _ports(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    for key, value in after.items():
        name, _, counter = key.rpartition(".")
        text, normal = _PORT_COUNTERS.get(counter, ("", 0))
        new = increase(before.get(key), value)
        if text and new > normal:
            yield f"{name.replace('/', ' port ')}: {counted(new, text)} during the test"


# --- The smoke test.

_MAX_CONTROLS = 5  # maximum suspects that are tested with another engine
#: The library that an engine proves.
_LIBRARIES = {"torch": "PyTorch or its library", "nccl-tests": "NCCL"}


def smoke(
    task: SmokeTask,
    tell: Callable[[str], object],
    progress: Progress,
    password: Callable[[list[str]], bool] = lambda names: False,
) -> document.SmokeReport:
    """Test all nodes together, and search for the cause of a failed test.

    tell:     gets the nodes and their engine before the first test, and failures, a line each
    progress: gets the title and the nodes of each round; what it returns gets each node that has
              answered
    password: asks for the sudo password of these nodes; whether there is one now

    Never raises for a node's fault. An interrupt, or the deadline, ends the programs on the nodes,
    and the document has what is known until then.
    """
    started, nodes = utc_now(), Participants(task, tell, progress)
    run = _SmokeRun(nodes)
    try:
        nodes.probe(password)
        nodes.join()
        run.search()
        run.control()
        nodes.close()
        nodes.probe_again()
    except KeyboardInterrupt:
        run.interrupt()
    finally:
        nodes.close()
    return run.report(started)


class _SmokeRun:
    """The search, the control tests, and the document of one run."""

    def __init__(self, nodes: Participants) -> None:
        self.nodes, self.task, self.channels = nodes, nodes.task, nodes.channels
        self.knowledge = Knowledge()
        self.rounds = TestRounds(nodes, self.knowledge)
        self.controls: dict[SmokeSuspect, str] = {}  # the result of another engine in a sentence
        # The result of another engine on all nodes, if no test passed.
        self.common_control = self.control_engine = self.stopped = ""
        self.networks: dict[str, RankNetwork] = {}
        self.slow_networks: dict[str, tuple[str, ...]] = {}
        self.tests_alone = True  # whether the engine can test a node by itself

    def search(self) -> None:
        names, task = self.nodes.names, self.task
        if not names:
            self.stopped = "no node could take part"
            return
        gpus = {name: self.nodes.gpus.get(name, ()) for name in names}
        self.tests_alone = self.nodes.choice.single_node[0] != PAIRS
        self._tell_start()
        steps = search(
            names, gpus, full=task.options.full, knowledge=self.knowledge,
            tests_alone=self.tests_alone,
        )  # fmt: skip
        try:
            tests = next(steps)
            while True:
                tests = steps.send(self.rounds.run(tests))
        except StopIteration:
            return
        except OutOfTime:
            number = self.rounds.count + 1
            self.stopped = f"the budget of {task.options.budget} s was over in round {number}"
            doubts, untested = len(self.knowledge.doubts), len(self.knowledge.result().untested)
            if doubts:
                self.stopped += (
                    f": {counted(doubts, 'suspect was', 'suspects were')} not confirmed"
                )
            elif untested:
                self.stopped += f": {counted(untested, 'node')} without a result"
            self.nodes.tell(self.stopped)

    def _tell_start(self) -> None:
        choice, names = self.nodes.choice, self.nodes.names
        ranks = sorted({self._rank_count(name) for name in names})
        ranks_text = f"{ranks[0]} to {ranks[-1]} ranks" if ranks[1:] else counted(ranks[0], "rank")
        if choice.fallback_reason:
            self.nodes.tell(f"engine {choice.name}: {choice.fallback_reason}")
        self.nodes.tell(
            f"{counted(len(names), 'node')} with {ranks_text} each, {choice.name}; "
            f"budget {self.task.options.budget} s"
        )

    def _rank_count(self, name: str) -> int:
        return self.rounds.ranks_of(Test(0, "alone", (name,)), self.nodes.choice.kind)[1]

    def control(self) -> None:
        """Repeat failed tests with another engine: is the library faulty, or the path?"""
        kind, lost = self.nodes.choice.control, {*self.channels.lost}
        if kind is None or self.stopped:
            return
        collectives = self.knowledge.collectives()
        waiting: dict[SmokeSuspect | None, tuple[str, ...]] = {}
        if collectives and not any(outcome.ok for _, outcome in collectives):
            waiting[None] = tuple(name for name in self.nodes.names if name not in lost)
        else:
            minimum = 2 if kind[0] == PAIRS else 1
            suspects = [s for s in self.knowledge.result().suspects if s.kind != knowledge.SCALE]
            waiting |= {s: self._failed_nodes(s, minimum) for s in suspects[:_MAX_CONTROLS]}
        waiting = {cause: names for cause, names in waiting.items() if names}
        while waiting:
            tests: dict[SmokeSuspect | None, Test] = {}
            for suspect, names in waiting.items():
                # A node has one order at a time.
                if not {*names} & {name for test in tests.values() for name in test.nodes}:
                    number = self.rounds.last + len(tests) + 1
                    tests[suspect] = Test(number, "control", names)
            try:
                outcomes = self.rounds.run([*tests.values()], kind)
            except OutOfTime:
                return
            for suspect, test in tests.items():
                del waiting[suspect]
                sentence = self._contrast(test, outcomes[test.number], kind)
                if suspect is None:
                    self.common_control = sentence
                elif sentence:
                    self.controls[suspect] = sentence

    def _failed_nodes(self, suspect: SmokeSuspect, minimum: int) -> tuple[str, ...]:
        """The nodes of the smallest failed test with the suspect, of at least this many nodes.
        Pairs of the sweep do not count: they have no engine.
        """
        tests = [
            test.nodes
            for test, outcome in self.knowledge.finished
            if not (outcome.ok or outcome.lost or test.purpose == "sweep")
            and len(test.nodes) >= minimum
            and {*suspect.nodes} <= {*test.nodes}
            and not self.channels.lost.keys() & {*test.nodes}
        ]
        return min(tests, key=len, default=())

    def _contrast(
        self, test: Test, outcome: knowledge.SmokeOutcome, kind: participants.Kind
    ) -> str:
        """What a test with another engine proves, in a sentence; "": nothing."""
        if outcome.lost:
            return ""
        self.control_engine = self.nodes.engine(test.nodes[0], kind)
        is_plain = kind[0] == PAIRS
        engine = "plain TCP" if is_plain else self.control_engine
        place = "on the same nodes" if len(test.nodes) > 1 else "on the same node"
        if not outcome.ok:
            return f"{engine} fails {place}, too: the path ({outcome.cause}) [{test.number}]"
        network = "NCCL or the network that it uses"
        library = _LIBRARIES[self.nodes.choice.kind[0]] if is_plain else network
        return f"{engine} passes {place}: the path is good, {library} is not [{test.number}]"

    # --- The end.

    def interrupt(self) -> None:
        transport = self.task.transport
        was_ended, transport.interrupted = transport.interrupted, True
        self.stopped = f"interrupted in round {self.rounds.count + 1}"
        self.nodes.close()
        if not was_ended:
            transport.end()

    def report(self, started: str) -> document.SmokeReport:
        task, choice, result = self.task, self.nodes.choice, self.knowledge.result()
        suspects = [replace(s, evidence=self._evidence(s)) for s in result.suspects]
        blamed = {name for suspect in suspects for name in suspect.blamed}
        slow = below_floor(self.knowledge.finished, task.policies, blamed)
        suspects += [
            SmokeSuspect(knowledge.NODE, (name,), (), evidence) for name, evidence in slow.items()
        ]
        blamed |= slow.keys()
        self.networks = document.network_of_nodes(self.knowledge.finished)
        for name, evidence in document.unexpected(self.networks, task.policies).items():
            suspects += (
                [] if name in blamed else [SmokeSuspect(knowledge.NODE, (name,), (), evidence)]
            )
            blamed.add(name)
        observed = {
            name: snapshots[0].subjects.get("rdma")
            for name in task.policies
            if (snapshots := self.nodes.snapshots(name))
        }
        hcas = {n: rdma.nccl_ib_hca for n, rdma in observed.items() if isinstance(rdma, Rdma)}
        self.slow_networks = document.warnings(self.networks, hcas)
        return document.SmokeReport(
            started, utc_now(), complete=not task.transport.interrupted, engine=choice.name,
            proves=choice.proves, control=self.control_engine, budget_s=task.options.budget,
            tests=result.tests, rounds=self.rounds.count, suspects=tuple(suspects),
            single_node_tests=sum(len(test.nodes) == 1 for test, _ in self.knowledge.finished),
            nodes=tuple(self._node(name, blamed, result) for name in task.policies),
            links=links(self.knowledge.finished, task.policies), stopped=self.stopped,
            environment=self.nodes.findings,
        )  # fmt: skip

    def _node(
        self, name: str, blamed: set[str], result: knowledge.SearchResult
    ) -> document.SmokeNode:
        nodes = self.nodes
        status, reason, gap = self._status(name, blamed, result)
        snapshots = nodes.snapshots(name)
        warnings = regressions(*snapshots) if len(snapshots) == 2 else ()
        if name not in blamed:
            warnings += self.slow_networks.get(name, ())
        network = self.networks.get(name, RankNetwork(""))
        if warnings and status == document.PASSED:
            status = document.WARNED
        takes_part = name in nodes.names
        return document.SmokeNode(
            name, status, reason,
            ranks=self._rank_count(name) if takes_part else 0,
            gpus=nodes.gpus.get(name, ()) if takes_part else (),
            engine=nodes.engine(name, nodes.choice.kind),
            warnings=warnings, slots=nodes.slots(name), network=network.name,
            interface=network.interface, hcas=network.hcas, gdr=network.gdr,
            gap=gap,
        )  # fmt: skip

    def _evidence(self, suspect: SmokeSuspect) -> tuple[str, ...]:
        """Lost connections, the job's variables, the evidence of the search with its meaning, and
        the result of another engine.
        """
        losses = [self.channels.lost[n] for n in suspect.nodes if n in self.channels.lost]
        controls = (self.controls.get(suspect, ""), self.common_control)
        lost = (f"lost: {loss.reason}" for loss in losses)
        variables = (
            f"environment: {finding.text}"
            for finding in self.nodes.findings
            if finding.weight > 1 and {*suspect.nodes} & {*finding.nodes}
        )
        errors = (error for error in map(nccl_errors.meaning, suspect.evidence) if error)
        meanings = dict.fromkeys(
            f"{error.meaning}; {error.step} [{error.key}]"
            for error in errors
            if error.role in (CAUSE, VICTIM) and error.key not in LOST_PEER
        )
        texts = (*lost, *variables, *suspect.evidence, *meanings, *controls)
        return tuple(filter(None, texts))

    def _status(
        self, name: str, blamed: set[str], result: knowledge.SearchResult
    ) -> tuple[str, str, Gap | None]:
        """A node's status; why it was not tested; its gap, if it gave no answer or was lost."""
        probed, lost = self.nodes.before.get(name), self.channels.lost.get(name)
        is_out = name in self.nodes.excluded
        takes_part = name in self.nodes.names
        if probed is None or not probed.value:
            gap = (probed and probed.gap) or INTERRUPT
            status = document.UNREACHABLE if gap.is_unreached else document.UNTESTED
            return status, "", gap
        if name in blamed:
            return document.SUSPECT, f"lost: {lost.reason}" if lost else "", None
        if takes_part and is_out:
            return document.UNTESTED, self.nodes.excluded[name], None
        if lost and (takes_part or lost.reason.startswith("connection lost")):
            return document.UNREACHABLE, "", Gap(LOST, f"lost: {lost.reason}", lost.evidence)
        if name in result.passed:
            return document.PASSED, "", None
        unknown = "its tests failed for an unknown reason"
        reason = self.nodes.excluded.get(name) or self.common_control or self.stopped or unknown
        return document.UNTESTED, reason, None


def collective_proofs(smoke_report: document.SmokeReport) -> dict[str, ProvedCollective]:
    """Node -> its proof for `nodeready ready`; a test that ended early proves nothing."""
    evidence: dict[str, list[str]] = {}
    for suspect in smoke_report.suspects:
        for name in suspect.nodes:
            peers = join_first((peer for peer in suspect.nodes if peer != name), ", ")
            start = {
                PAIR: f"with {peers}: ",
                knowledge.GPU: f"GPU {join_names(suspect.gpus, 99)}: " if suspect.gpus else "",
                knowledge.SCALE: f"only together with {peers}: ",
            }.get(suspect.kind, "")
            evidence.setdefault(name, []).append(start + "; ".join(suspect.evidence))
    rows = {}
    for node in smoke_report.nodes:
        is_out = node.status in (document.UNTESTED, document.UNREACHABLE)
        reason = (node.absence or "not tested") if is_out else smoke_report.stopped
        no_engine = not smoke_report.engine and reason.startswith(participants.MISSING_ENGINE)
        rows[node.name] = ProvedCollective(
            len(smoke_report.nodes), smoke_report.engine, smoke_report.proves,
            against=tuple(evidence.get(node.name, ())), untested=reason,
            lacking=is_out and no_engine, warnings=node.warnings,
            network=document.describe(node.network, node.interface, node.hcas, node.gdr),
        )  # fmt: skip
    return rows


# --- The run of `nodeready smoke`: the nodes of its options, and what the memory keeps of it.

_RESERVE_S = 3  # seconds of the budget to end what still runs on the nodes, and to report


def run(
    inventory: str | None, options: SmokeOptions, tell: Tell
) -> tuple[SmokeReport, dict[str, int]]:
    """The report, and the slots of good nodes. inventory: None: the job's. Raises Refused."""
    settings = policy_settings(options.ports, options.user)
    job, budget_s = options.job, options.budget
    if job is None and inventory is None:
        raise Refused("give an INVENTORY or --job ID")
    if job is not None and options.via == "ssh":
        if inventory is not None:
            raise Refused("--job: with an INVENTORY, add --via srun")
        options = replace(options, via="srun")
    how: dict[str, Any] = {"job": job, "tell": tell.note, "works": True}
    nodes = targets.select_targets(inventory, options, settings, **how)
    with nodes.transport as transport:
        deadline = time.monotonic() + budget_s - min(_RESERVE_S, budget_s / 4)
        addresses = given_addresses(nodes.inventory) if nodes.inventory else {}
        task = SmokeTask(transport, nodes.policies, deadline, addresses, options)
        report = smoke(
            task, tell.note, tell.progress, lambda names: ask_password(transport, names, tell)
        )
    LookKeeper(tell, "smoke", inventory or "").keep_smoke(report, code(report))
    nodes.remember_failed(report.exclude)
    # The slots that the inventory declares, else the node's own number, else its GPUs, else 1.
    declared, smoked = nodes.slots, {node.name: node for node in report.nodes}
    slots = {
        name: declared.get(name) or smoked[name].slots or len(smoked[name].gpus) or 1
        for name in report.go
    }
    return report, slots
