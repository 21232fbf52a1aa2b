"""The workers of an audit: processes that read answers and judge nodes.

The control process contacts the nodes and gives each answer to a worker. The worker parses the
answer, judges the checks that need no fleet, and writes the observations to its file. It returns
only an `AnswerSummary`. When all nodes have answered, the workers judge the checks that need the
fleet, and return the results. So neither the time of one core nor the memory of one process limits
the number of nodes.

A worker is a fork of the control process before any connection: it has the policies and the code,
but no key, thread or socket of a connection. If a worker dies, only the node whose answer it was
reading fails. The control process does the orders for which no worker has time. For few nodes
there are no workers, and it does all orders.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from nodeready.agent.asking import Answer, SshPeer
from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.agent.snapshots import SnapshotQuestion
from nodeready.core import probe_script
from nodeready.core.outcome import FAILED, Gap, Outcome
from nodeready.core.policy import Policy, digest
from nodeready.core.result import Result, worst
from nodeready.core.text import utc_now
from nodeready.fleet.transport.processes import Child, Frames, Pool, fork
from nodeready.runs.audit import answer_judge
from nodeready.runs.memory.look import NodeSections, SectionText
from nodeready.subjects.context import FleetContext, unique_addresses
from nodeready.subjects.registry import COUNTING, CheckSelection
from nodeready.subjects.snapshot import Snapshot

MIN_NODES = 64  # fewer nodes need no worker: to start one takes longer than to read their answers
_MAX_CPU_S = 10.0  # CPU seconds for the parsing of each subject; usually none takes one second
_SILENT_S = 60  # seconds without an answer after which a worker that has orders is killed
#: Orders that a worker may have at once, so that it never waits for the next one. The control
#: process does further ones itself.
_MAX_ORDERS = 4
#: Maximum characters of an answer that the control process reads while other nodes wait for it; a
#: node with eight GPUs sends 32,000.
_MAX_LOCAL = 128 << 10
_COLLECT_EVERY = 1000  # orders of a worker between two garbage collections

WORKER_HAS_SNAPSHOT = Snapshot()  # stands in an Outcome for the snapshot that a worker has

_RATED = tuple(f"{subject}." for subject in COUNTING)  # the checks of the subjects with counters
_ANSWERED = ("read", "keep", "judge")  # the kinds of orders that get an answer


def worker_count(nodes: int) -> int:
    """One worker per core beside the control process's, or none for few nodes."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if nodes >= MIN_NODES else 0


def _failure(error: BaseException) -> str:
    """Why an order failed: its answer, in place of a summary or an outcome."""
    if isinstance(error, OSError) and error.strerror:
        return f"its answer could not be kept in {tempfile.gettempdir()}: {error.strerror}"
    return f"its answer could not be read ({type(error).__name__}: {error})"


def _do(judge: answer_judge.AnswerJudge, order: tuple[Any, ...]) -> Any:
    """The answer to an order; a parser that does not end costs its subject."""
    try:
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S, _MAX_CPU_S)
        return judge.do(order)
    except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
        return _failure(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_late(signum: int, frame: object) -> None:
    raise TimeoutError(f"took longer than {_MAX_CPU_S:g} s")


# --- The process of a worker.


def _serve(judge: answer_judge.AnswerJudge, sock: Any) -> None:
    """Do the orders of the control process until it closes its end."""
    # Observations have no cycles, and the collector would take as long as the parsing.
    gc.freeze()
    gc.disable()
    frames, count = Frames(sock, threading.Lock()), 0
    while (order := frames.receive()) is not None:
        answer = _do(judge, order)
        if order[0] in _ANSWERED:
            frames.send(answer, *judge.take_new())
        count += 1
        if count % _COLLECT_EVERY == 0:
            gc.collect()


# --- The control process.


class _Worker:
    """A worker process, and its orders.

    pending: the orders without an answer, the oldest first
    active:  time.monotonic() of the last order or answer
    """

    def __init__(self, number: int, child: Child) -> None:
        self.number, self.child = number, child
        self.pending: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.sending = BoundedSemaphore()
        self.active = time.monotonic()


def _interned(result: Result) -> Result:
    """The result, whose texts are those of equal ones."""
    pairs = vars(result).items()
    fields: dict[str, Any] = {n: sys.intern(v) if isinstance(v, str) else v for n, v in pairs}
    return Result(**fields)


class AuditWorkers:
    """The workers of one audit. A context manager: the document reads their files.

    policies:   by node
    facts_text: makes the text of a subject's facts; None: the run's format shows no facts
    section_texts: makes the sections for the memory; None: the run has no memory
    count:      of the workers; None: `worker_count`; 0: the control process does all orders
    is_watch:   the nodes are looked at again: `begin_look`
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        facts_text: answer_judge.FactsText | None = None,
        count: int | None = None,
        section_texts: answer_judge.SectionTexts | None = None,
        is_watch: bool = False,
    ) -> None:
        self._declared = policies
        unique = {id(policy): policy for policy in policies.values()}
        numbers = {key: number for number, key in enumerate(unique)}
        self._policies = {name: numbers[id(policy)] for name, policy in policies.items()}
        self.count = worker_count(len(policies)) if count is None else count
        # The files have no names, so the kernel removes them however this process ends.
        self._open: list[IO[bytes]] = [
            tempfile.TemporaryFile(buffering=0, prefix="nodeready-")  # noqa: SIM115 - until close
            for _ in range(self.count + 1)
        ]
        self._files = [file.fileno() for file in self._open]
        texts = facts_text, section_texts
        judges = [
            answer_judge.AnswerJudge(
                number, self._files, [*unique.values()], *texts, is_watch=is_watch
            )
            for number in range(self.count + 1)
        ]
        #: The judge in the control process itself.
        self._local_judge = judges[-1]
        # By node: the answer of its judge, or why the order failed.
        self._summaries: dict[str, answer_judge.AnswerSummary] = {}
        # Of a watch: those of the look before, and the order by which a node was judged.
        self._earlier: dict[str, answer_judge.AnswerSummary] = {}
        self._last_orders: dict[str, answer_judge.NodeOrder] = {}
        self._outcomes: dict[str, answer_judge.NodeOutcome] = {}
        self._failures: dict[str, str] = {}
        self._states: dict[str, answer_judge.StateRecord] = {}
        #: When all nodes had answered, seconds since 1970.
        self.moment_s = 0.0
        # By judge: the results and the facts that it has numbered.
        self._tables: list[tuple[list[Result], list[Any]]] = [([], []) for _ in judges]
        # A value that all judges share -> its number; the same of its id, in one look.
        self._shared: dict[Any, int] = {}
        self._shared_ids: dict[int, int] = {}
        self._open_orders = 0
        self._is_idle = Event()
        self._workers: dict[Child, _Worker] = {}
        self._pool: Pool | None = None
        self._killer: Any = None
        # Observations have no cycles, and the collector would take a third of the time.
        self._gc_threshold = gc.get_threshold()
        gc.set_threshold(100_000, 50, 100)
        self._sigprof = signal.signal(signal.SIGPROF, _raise_late)
        try:
            self._start(judges[:-1])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> AuditWorkers:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _start(self, judges: Sequence[answer_judge.AnswerJudge]) -> None:
        children = [fork(partial(_serve, judge)) for judge in judges]
        pairs = zip(judges, children, strict=True)
        self._workers = {child: _Worker(judge.number, child) for judge, child in pairs}
        self._pool = Pool(children, self._receive)
        self._killer = gevent.spawn(self._kill_silent) if judges else None

    def close(self) -> None:
        gc.set_threshold(*self._gc_threshold)
        signal.signal(signal.SIGPROF, self._sigprof)
        gevent.killall([self._killer] if self._killer else [])
        if self._pool is not None:
            self._pool.end()
        for file in self._open:
            file.close()

    # --- Orders and answers.

    def _submit(self, name: str, order: tuple[Any, ...]) -> None:
        """Give an order about a node to the worker with the fewest orders. The control process
        does it at once where each has enough; only a large answer waits for a worker.
        """
        self._open_orders += 1
        self._is_idle.clear()
        is_large = order[0] == "read" and len(order[-1]) > _MAX_LOCAL
        live = [worker for worker in self._workers.values() if not worker.child.gone_reason]
        worker = min(live, key=lambda worker: len(worker.pending), default=None)
        if worker is None:
            self._do_locally(name, order)
        elif is_large or len(worker.pending) < _MAX_ORDERS:
            with worker.sending:
                if not worker.child.gone_reason:
                    worker.pending.append((name, order))
                    worker.active = time.monotonic()
                    # If the worker is gone, `_receive` submits the order again.
                    worker.child.send(*order)
                    return
            self._open_orders -= 1
            self._submit(name, order)
        else:
            self._do_locally(name, order)
            # Now the answers are received. After sleep(0), no socket would be read.
            gevent.sleep(0.0001)

    def _receive(self, child: Child, frame: tuple[Any, ...] | None) -> None:
        """Keep an answer of a worker; None: it has ended, and others do its orders."""
        worker = self._workers[child]
        if frame is not None:
            name, order = worker.pending.popleft()
            worker.active = time.monotonic()
            answer, *new = frame
            self._keep_answer(worker.number, name, order[0], answer, new)
            return
        pending, worker.pending = worker.pending, deque()
        if pending:
            # The worker was doing the oldest order.
            name, order = pending.popleft()
            work = "judged it" if order[0] == "judge" else "read its answer"
            cause = f" ({signal.Signals(child.signal).name})" if child.signal else ""
            failure = f"the process that {work} ended{cause}"
            self._keep_answer(worker.number, name, order[0], failure)
        for name, order in pending:
            self._open_orders -= 1
            self._submit(name, order)

    def _kill_silent(self) -> None:
        while True:
            gevent.sleep(1)
            for worker in self._workers.values():
                if worker.pending and time.monotonic() - worker.active > _SILENT_S:
                    worker.child.kill()

    def _do_locally(self, name: str, order: tuple[Any, ...]) -> None:
        judge = self._local_judge
        answer = _do(judge, order)
        self._keep_answer(judge.number, name, order[0], answer, judge.take_new())

    def _keep_answer(
        self, judge: int, name: str, kind: str, answer: Any, new: Sequence[list[Any]] = ([], [])
    ) -> None:
        """Keep an answer of this judge; new: what the judge has numbered since its last one"""
        new_results, new_facts = new
        results, facts = self._tables[judge]
        results += map(_interned, new_results)
        facts += new_facts
        if isinstance(answer, str):
            self._failures[name] = answer
        elif kind == "judge":
            self._outcomes[name] = answer
        elif isinstance(answer, answer_judge.AnswerSummary):
            self._summaries[name] = answer
        else:
            self._summaries[name] = self._earlier[name]._replace(bounds=answer)
        self._open_orders -= 1
        if not self._open_orders:
            self._is_idle.set()

    def _finish(self) -> None:
        """Wait until all orders are answered."""
        if self._open_orders:
            self._is_idle.wait()

    # --- While the nodes answer.

    def begin_look(self) -> None:
        """Begin a further look: what was judged counts for the nodes that show nothing else."""
        self._earlier, self._summaries = self._summaries, {}
        self._failures.clear()

    def read(self, question: SnapshotQuestion, answer: Answer) -> Snapshot:
        """Submit an answer to the workers; returns `WORKER_HAS_SNAPSHOT`."""
        name = question.request.node
        policy = self._policies[name]
        if answer.gap or probe_script.mark(question.nonce) not in answer.stdout:
            self._open_orders += 1
            self._do_locally(name, ("keep", question.read(answer), policy))
        else:
            subjects = tuple(probe.subject for probe in question.probes)
            bounds = self._earlier[name].bounds if name in self._earlier else None
            self._submit(name, ("read", policy, subjects, bounds, question.nonce, answer.stdout))
        return WORKER_HAS_SNAPSHOT

    def settle(self, outcomes: Iterable[Outcome[Snapshot]]) -> list[Outcome[Snapshot]]:
        """Wait for all answers. A snapshot then has only the subject that the fleet needs."""
        outcomes = list(outcomes)
        for outcome in outcomes:
            name, snapshot = outcome.node, outcome.value
            if snapshot is not None and snapshot is not WORKER_HAS_SNAPSHOT:
                self._open_orders += 1
                self._do_locally(name, ("keep", snapshot, self._policies[name]))
        self._finish()
        settled = []
        for outcome in outcomes:
            if outcome.value is None:
                settled.append(outcome)
            elif outcome.node in self._failures:
                gap = Gap(FAILED, self._failures.pop(outcome.node))
                settled.append(replace(outcome, value=None, gap=gap))
            else:
                identity = self._summaries[outcome.node].identity
                subjects = {} if identity is None else {"ssh_client": identity}
                settled.append(replace(outcome, value=Snapshot(subjects)))
        return settled

    def complete(self, context: FleetContext, peers: Mapping[str, SshPeer]) -> FleetContext:
        """The context with the nodes' addresses."""
        addresses = (summary.addresses for summary in self._summaries.values())
        claimed = [claim for claim in addresses if claim is not None]
        reached = {peer.address for peer in peers.values()}
        return replace(context, addresses=unique_addresses(claimed, reached))

    # --- When all nodes have answered.

    def _share(self, value: Any) -> int | None:
        """Give a value to all judges; returns its number. None for None."""
        if value is None:
            return None
        number = self._shared_ids.get(id(value))
        if number is None:
            number = self._shared.setdefault(value, len(self._shared))
            self._shared_ids[id(value)] = number
            if number == len(self._local_judge.shared):
                self._broadcast(("share", value))
        return number

    def _broadcast(self, order: tuple[Any, ...]) -> None:
        """Send an order that has no answer to every judge."""
        self._local_judge.do(order)
        for child in self._workers:
            child.send(*order)

    def audit(
        self,
        outcomes: Sequence[Outcome[Snapshot]],
        context: FleetContext,
        selection: CheckSelection,
        started: str,
        groups: Callable[[str], tuple[str, ...]],
        *,
        complete: bool = True,
        earlier_counters: Callable[[str], str] = lambda name: "",
    ) -> Audit:
        """The audit of settled outcomes. earlier_counters: for `CounterSample.parse`"""
        self.moment_s = time.time()
        # The context keeps its values for this look.
        self._shared_ids.clear()
        self._broadcast(("moment", self.moment_s))
        for probed in outcomes:
            if probed.value is not None:
                name = probed.node
                summary = self._summaries[name]
                about = context.about(name)
                facts = about.addresses, about.known_hosts, about.gate_files
                addresses, hosts, files = map(self._share, facts)
                shared = self._policies[name], addresses, hosts, files
                order = answer_judge.NodeOrder(summary.place, *shared, about.host_key)
                if self._last_orders.get(name) != order:
                    self._last_orders[name] = order
                    self._outcomes.pop(name, None)
                    earlier = earlier_counters(name) if summary.has_counters else ""
                    self._submit(name, ("judge", order, earlier))
        self._finish()
        rows, peers = [], dict[str, dict[str, Any]]()
        checks = {*selection.results}
        subjects = {answer_judge.NUMBER_OF[name] for name in selection.subjects}
        for probed in outcomes:
            row, facts = self._row(probed, groups(probed.node), checks, subjects)
            rows.append(row)
            if facts is not None:
                peers.setdefault(",".join(row.groups) or answer_judge.ALL, {})[probed.node] = facts
        outliers = answer_judge.find_outliers(peers)
        policies = digest(self._declared.values())
        return Audit(started, utc_now(), policies, tuple(rows), outliers, complete)

    def _row(
        self,
        probed: Outcome[Snapshot],
        groups: tuple[str, ...],
        checks: set[str],
        subjects: set[int],
    ) -> tuple[NodeReport, Any]:
        """The node's report, and its facts to compare with peers; None: it was not judged."""
        name, gap, seconds = probed.node, probed.gap, round(probed.seconds, 3)
        outcome = None if probed.value is None else self._outcomes.get(name)
        if outcome is None:
            self._last_orders.pop(name, None)
            gap = gap or Gap(FAILED, self._failures.get(name, "it was not judged"))
            return NodeReport(name, gap.word, seconds, gap, groups), None
        if outcome.state is not None:
            self._states[name] = outcome.state
        by_subject = sorted(outcome.results, key=lambda result: result[1])
        all_results = (
            self._tables[numbered_by][0][code] if type(code) is int else _interned(code)
            for numbered_by, _, codes in by_subject for code in codes
        )  # fmt: skip
        results = tuple(result for result in all_results if result.check in checks)
        facts = {
            answer_judge.SUBJECT_NAMES[subject]:
                self._tables[numbered_by][1][code] if type(code) is int else code
            for numbered_by, subject, code in outcome.compared if subject in subjects
        }  # fmt: skip
        read_facts = outcome.facts and partial(self._text, outcome.facts)
        status = gap.word if gap else worst(results)
        rated = (result.status for result in results if result.check.startswith(_RATED))
        # A rate since an earlier look falls as time passes.
        if not self._local_judge.is_watch or not {*rated} <= {"ok", "na"}:
            del self._outcomes[name], self._last_orders[name]
        about = name, status, seconds, gap, groups, results
        return NodeReport(*about, read_facts=read_facts), facts

    def _text(self, place: answer_judge.FilePlace) -> str:
        return answer_judge.read_place(self._files, place).decode("ascii")

    def state(self, name: str) -> NodeSections | None:
        """The state of a node for the memory; None: it was not judged, or there is no memory."""
        record = self._states.get(name)
        if record is None:
            return None
        read_place = partial(answer_judge.read_place, self._files)

        def read() -> Iterator[SectionText]:
            for section, text_digest, place in pickle.loads(read_place(record.place)):
                text = partial(read_place, place) if place else lambda: None
                yield SectionText(section, text_digest, text)

        return NodeSections(name, record.digest, record.counted, read)
