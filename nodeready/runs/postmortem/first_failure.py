"""Who failed first, by the events of all ranks, the kernel and Slurm. Pure.

An error of a rank's own outranks every lost peer; a kill outranks a timeout; a timeout outranks a
lost connection. Times decide between own errors only beyond the uncertainty of the clocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nodeready.agent.failure_events import FailureEvent
from nodeready.agent.failure_rules import (
    CONSEQUENCE,
    ENDED,
    FAILED,
    LOST,
    REPORT,
    SIGNAL_NAMES,
    WAITED,
    kind_of_code,
    signal_of,
)
from nodeready.agent.witnesses import nccl_errors
from nodeready.core.text import counted, utc_moment
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.postmortem.document import KERNEL, LOG, FailureGroup, FirstFailure, NodeEvent
from nodeready.runs.postmortem.environment import explaining_faults
from nodeready.runs.postmortem.evidence import (
    JobEvidence,
    NodeFault,
    NodeRecord,
    RankFailure,
    RankFinder,
    SlurmStep,
)
from nodeready.runs.postmortem.rank_failures import (
    ASSERT,
    FINAL_LINES,
    EqualFailures,
    deadly,
    equal_failures,
    is_clear_root,
    last_attempt,
    once_per_rank,
    with_reported_ranks,
)
from nodeready.runs.stacks.document import Suspect, say
from nodeready.runs.stacks.evidence import Evidence, RankPlace, ranks_of
from nodeready.runs.stacks.witness_reader import read_witnesses
from nodeready.subjects.gpus import xids

#: Maximum characters of a failure in the first line.
_TEXT = 240
#: Maximum suspects in the document, and in its first line.
_MAX_SUSPECTS, _NAMED = 32, 4
#: Maximum records of nodes beside a suspect.
_MAX_RECORDS = 4
#: Errors of NCCL that mean the network between nodes, if no rank has failed.
_FABRIC = ("ib-retry", "ib-rnr", "ib-completion", "ib-remote-operation", "connect-timeout",
           "connect-no-route", "gloo-connect")  # fmt: skip
#: Kind of a kernel's fault of hardware -> the kind of its cause.
HARDWARE = {"xid": "gpu", "link": "network"}
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,5})\b")
#: Errors of CUDA that a later call reports.
_ASYNCHRONOUS = re.compile(
    r"CUDA.*(?:illegal|assert|misaligned|unspecified|launch|ECC|unknown error)"
)
#: Word of Slurm -> why it ended a job.
_LIMITS = {
    "TIME": "its time limit was reached", "PREEMPT": "it was preempted",
    "DEADLINE": "its deadline was reached", "REQUEUE": "it was requeued",
}  # fmt: skip
#: Errors of ranks that call different collectives: of ProcessGroupWrapper.cpp, gloo's pair.cc, and
#: NCCL's and MPI's transports. The ranks that see it are not always those that differ.
_MISMATCH = re.compile(
    r"mismatch between collectives|op\.preamble\.length|[Mm]essage truncated|ismatched collective"
)
#: The text that `nodeready.agent.failure_events` makes of the first.
_TWO_CALLS = re.compile(r": rank (\d{1,7}) calls (.{1,120}), rank (\d{1,7}) calls (.{1,120})$")
#: Functions of torch.distributed in which the ranks of a group rightly differ.
_PAIRWISE = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv"))
#: Where NCCL's lines have the addresses of a connection (net_ib.cc, socket.cc).
_ADDRESS = re.compile(r"[0-9a-fA-F.:]+")
_LOCAL = re.compile(r"localGid:? ?(?:::ffff:)?([0-9a-fA-F.:]{2,45})")
_PEER = re.compile(
    r"remoteGids?:? ?(?:::ffff:)?([0-9a-fA-F.:]{2,45})"
    r"|(?:peer|[Cc]onnect to) \[?([\w.:-]{2,60}?)(?:\]:\d|<\d)"
)
_NO_ROUTE = re.compile(r"No route to host|Network is unreachable|errno: (?:101|110|113)\b")
#: Order of the groups of failures.
_ROLE_ORDER = {
    role: order for order, role in enumerate((FAILED, WAITED, LOST, CONSEQUENCE, ENDED, REPORT))
}
_JOINED = re.compile(r"(\d{1,5})/(\d{1,5}) clients joined")
#: The words of an error about a worker of a data loader.
_KILLED_WORKER = "is killed by signal: Killed"
#: Python's own errors of a connection, which no library of collectives raised.
_OWN_CONNECTION = re.compile(
    r"^(?:ConnectionResetError|ConnectionRefusedError|BrokenPipeError|ConnectionAbortedError)\b"
)
#: Source of an event -> its name in reports.
_LAUNCHERS = {
    "torchrun": "torchrun", "torchrun-root": "torchrun", "srun": "srun", "mpirun": "mpirun",
    "deepspeed": "DeepSpeed's launcher", "shell": "the shell", "spawn": "torch.multiprocessing",
    "slurm": "Slurm", "slurm-job": "Slurm", "agent": "the launcher",
    "error-file": "its error file", "core": "a core file",
}  # fmt: skip


class FirstFailureFinder:
    """Finds the first failure in the evidence on one job."""

    def __init__(self, evidence: JobEvidence) -> None:
        self.evidence = evidence
        finder = RankFinder(evidence)
        self.rank_by_pid = finder.by_pid
        self.all = with_reported_ranks(list(finder.failures())) + self._core_reports()
        self.finder = finder
        self.ranks = finder.ranks(f.rank for f in self.all if f.rank is not None)
        self.node_of: dict[int, str] = {}
        for failure in self.all:
            if failure.rank is not None and failure.node:
                self.node_of.setdefault(failure.rank, failure.node)
        for file in evidence.files:
            for rank in (finder.file_rank(file), *(s.rank for s in file.failures.streams)):
                if rank is not None and file.node:
                    self.node_of.setdefault(rank, file.node)
        #: (index of a file, rank; None: any) -> its first line with a lost peer or a timeout.
        self.lost_at: dict[tuple[int, int | None], int] = {}
        for failure in self.all:
            event = failure.event
            # c10d warns of connections that it tries again.
            is_final = event.lines_after <= FINAL_LINES and event.source != "warning"
            if event.role in (LOST, WAITED) and is_final:
                for key in ((failure.file, failure.rank), (failure.file, None)):
                    self.lost_at[key] = min(event.line, self.lost_at.get(key, event.line))
        self.own_errors = [
            f for f in self.all if f.event.role == FAILED and not self._is_victim(f)
        ]
        # An error of an earlier attempt counts where the last attempt has none.
        self.last_files = last_attempt(evidence)
        last_errors = [f for f in self.own_errors if f.file in self.last_files]
        self.own_errors = last_errors or self.own_errors
        self.reports = [f for f in self.all if f.event.role == REPORT and f.event.code]
        self.roots = [f for f in self.reports if f.event.source == "torchrun-root"]
        self.lost = [f for f in self.all if f.event.role == LOST]
        self.waited = [f for f in self.all if f.event.role == WAITED]
        own_errors = [f for f in self.own_errors if _is_final(f)]
        self.final = deadly(own_errors, (*self.lost, *self.waited))
        self.ended = [f for f in self.all if f.event.role == ENDED]
        self.missing: list[str] = []

    def _core_reports(self) -> list[RankFailure]:
        """The ends of ranks that cores report."""
        reports = []
        for number, (record, rank) in enumerate(self._ranked_records()):
            if rank is not None and record.signal:
                code, place = -record.signal, (record.node, -1 - number, record.path)
                event = FailureEvent(
                    *(kind_of_code(code), REPORT, "core", record.text, "", (rank,), None),
                    *(record.node, record.pid or 0, code, record.time_s, None, 0, 0),
                )
                reports.append(RankFailure(rank, *place, event, record.time_s, 0.0))
        return reports

    def _ranked_records(self) -> Iterator[tuple[NodeRecord, int | None]]:
        for record in self.evidence.records:
            rank = self.rank_by_pid.get((record.node, record.pid or 0))
            yield record, rank if record.rank is None else record.rank

    def node_events(self) -> tuple[NodeEvent, ...]:
        """What the nodes keep beside the logs."""
        return tuple(
            NodeEvent(record.node, record.kind, () if rank is None else (rank,),
                      moment_text(record.time_s), record.text)
            for record, rank in self._ranked_records()
        )  # fmt: skip

    def witnesses(self, cause: FirstFailure) -> dict[str, str]:
        """Who saw the fault on each node of the cause itself: `Postmortem.witnesses`."""
        files, sources_of = self.evidence.files, dict[str, str]()
        for failure in self.all:
            is_own_log = failure.file >= 0 and failure.node == files[failure.file].node
            if failure.event.kind == cause.kind and is_own_log:
                sources_of[failure.node] = LOG
        for fault in self.evidence.kernel:
            if HARDWARE.get(fault.kind) == cause.kind and not _is_of_application(fault):
                sources_of[fault.node] = KERNEL
        return {node: by for node, by in sources_of.items() if node in cause.nodes}

    def _is_victim(self, failure: RankFailure) -> bool:
        """Whether an error follows a lost peer or a timeout of the same rank."""
        event = failure.event
        if failure.rank is not None:
            return self.lost_at.get((failure.file, failure.rank), event.line) < event.line
        # A shared log may have the lines of several ranks: only a crash follows there.
        return not event.frame and self.lost_at.get((failure.file, None), event.line) < event.line

    # --- The verdict.

    def find(self) -> FirstFailure:
        """The first failure."""
        rules = (
            self._out_of_memory, self._own_error, self._mismatch, self._scheduler, self._killed,
            self._gpu, self._earlier_error, self._own_connection, self._timeout, self._kernel,
            self._silent, self._ended_from_outside, self._fabric, self._unclear,
        )  # fmt: skip
        cause = next(filter(None, (rule() for rule in rules)))
        cause = self._by_environment(cause) or replace(cause, missing=tuple(self.missing))
        ranks, nodes = set(cause.ranks), set(cause.nodes)
        records = [
            f"{record.kind} of {record.node}: {record.text}"
            for record, rank in self._ranked_records()
            if (rank in ranks if rank is not None else record.node in nodes)
        ]
        if not records or not cause.suspects:
            return cause
        first, *further = cause.suspects
        first = replace(first, for_=(*first.for_, *records[:_MAX_RECORDS]))
        return replace(cause, suspects=(first, *further))

    def _by_environment(self, cause: FirstFailure) -> FirstFailure | None:
        """The fault of the job's environment that explains the cause."""
        texts = [cause.text]
        if cause.kind == "unclear":
            texts += [f"{f.event.text} {f.event.frame}" for f in (*self.lost, *self.waited)]
        faults = [*explaining_faults(self.evidence, self.finder, self.node_of, cause.kind, texts)]
        if not faults:
            return None
        suspects = [
            Suspect(finding.ranks, finding.nodes, (finding.text, *places), ())
            for finding, places in faults[:_MAX_SUSPECTS]
        ]
        (finding, places), *_ = faults
        suspects[0] = replace(suspects[0], for_=(*places, f"it explains: {cause.text}"))
        text = f"{self._subject(finding.ranks, finding.nodes)}: {finding.text}; {finding.advice}"
        return replace(
            cause, kind="environment", text=text, suspects=tuple(suspects),
            ranks=finding.ranks, nodes=finding.nodes,
        )  # fmt: skip

    def _out_of_memory(self) -> FirstFailure | None:
        """The kernel or Slurm killed a process of the job for its memory."""
        faults = [fault for fault in self.evidence.kernel if fault.kind == "oom"]
        slurm_events = [
            f for f in self.own_errors if f.event.kind == "oom" and f.event.source == "slurm"
        ]
        steps = self._steps("OUT_OF_ME")
        srun = [f for f in self.reports if f.event.kind == "oom"]
        if not (faults or slurm_events or steps or srun):
            return None
        killed = [f for f in self.reports if signal_of(f.event.code) == 9]
        workers = [f for f in self.own_errors if _KILLED_WORKER in f.event.text]
        nodes = {fault.node for fault in faults if fault.node} | _nodes(slurm_events)
        ranks, against = _ranks(srun), list[str]()
        ended_ranks = {
            pid: f.rank
            for f in (*killed, *workers)
            for pid in (f.event.pid, _worker(f.event.text))
        }
        for fault in faults:
            rank = self.rank_by_pid.get((fault.node, fault.pid))
            task = re.search(r"/step_\S*?/task_(\d{1,6})", fault.text)
            if rank is None and task and not srun:
                # Slurm counts the tasks of its cgroups on each node.
                rank = self.finder.global_rank(fault.node, int(task[1]))
            if fault.pid:
                rank = ended_ranks.get(fault.pid, rank)
            ranks |= {rank} if rank is not None else set()
        if not ranks:
            # A rank that SIGKILL ended there, or whose log just ends.
            ended = [f.rank for f in (*workers, *killed) if not nodes or f.node in nodes][:1]
            if not (ended or self.final):
                at = {"", *nodes}
                ended = [r for r in self._silent_ranks() if self.node_of.get(r, "") in at]
            ranks = {rank for rank in ended if rank is not None}
            if faults and not (slurm_events or steps):
                against.append("no log has the number of the process that the kernel killed")
        other_errors = [
            f for f in self.final if f.event.kind != "oom" and _KILLED_WORKER not in f.event.text
        ]
        # Otherwise the kernel may have killed a process of another job.
        if not ranks and (other_errors or not (slurm_events or steps or srun)):
            return None
        evidence = [*_kernel_lines(faults), *(f"Slurm: {f.event.text}" for f in slurm_events[:2])]
        evidence += _sacct_lines(steps)
        evidence += [self._report_text(f) for f in srun[:2]]
        evidence += [self._report_text(f) for f in killed[:1] if f.rank in ranks]
        place = "a worker of its data loader" if workers else "it"
        return self._cause(
            "oom", f"{{who}}: the kernel killed {place} for memory", ranks,
            nodes | self._nodes_of(ranks), evidence, against=against,
            failures=(workers or killed)[:1],
        )  # fmt: skip

    def _own_error(self) -> FirstFailure | None:
        """An error that no other rank's end has caused."""
        return self._of_errors([f for f in self.final if not _MISMATCH.search(f.event.text)])

    def _mismatch(self) -> FirstFailure | None:
        """Ranks that call different collectives: those unlike most, if the errors name them."""
        failures = [f for f in self.final if _MISMATCH.search(f.event.text)]
        if not failures:
            return None
        calls: dict[int, str] = {}
        peers: dict[int, str] = {}
        for failure in failures:
            if match := _TWO_CALLS.search(failure.event.text):
                calls[int(match[1])], peers[int(match[3])] = match[2], match[4]
        # A rank whose call has another form reads its peers' wrongly.
        if cause := self._odd_call({**peers, **calls}, "exception", failures):
            return cause
        words = failures[0].event.text.rpartition("] ")[2][:_TEXT]
        self.missing.append("TORCH_DISTRIBUTED_DEBUG=DETAIL names the rank and its call")
        return self._cause(
            "unclear", f"{{who}} or a peer called with another size: {words}", _ranks(failures),
            _nodes(failures), [f"in {f.example}" for f in failures[:3]], failures=failures,
        )  # fmt: skip

    def _odd_call(
        self, calls: Mapping[int, str], kind: str, failures: Sequence[RankFailure]
    ) -> FirstFailure | None:
        """The ranks that call another collective than most; None: all call the same.

        calls: rank -> its call
        """
        sides: dict[str, set[int]] = {}
        for rank, call in calls.items():
            sides.setdefault(call, set()).add(rank)
        if len(sides) < 2:
            return None
        usual = max(sides, key=lambda call: len(sides[call]))
        by_rank = {f.rank: f for f in reversed(failures) if f.rank in calls}
        suspects = []
        for call, ranks in sides.items():
            if call != usual or 2 * len(ranks) <= len(calls):
                first = min(
                    (by_rank[rank] for rank in ranks if rank in by_rank),
                    key=lambda f: (f.file, f.event.line),
                    default=None,
                )
                places = (f"in {first.example}",) if first else ()
                evidence = f"{ranks_of(ranks)} called {call}", *places
                suspects.append(_suspect(ranks, self._nodes_of(ranks), evidence))
        if 2 * len(sides[usual]) <= len(calls):
            return self._undecided(suspects)
        odd = {rank for suspect in suspects for rank in suspect.ranks}
        nodes = {node for suspect in suspects for node in suspect.nodes}
        words = " and ".join(call for call in sides if call != usual)[:_TEXT]
        text = f"{{who}} called {words}, {ranks_of(sides[usual])} {usual}"
        cause = self._cause(kind, f"{text}: the calls must agree", odd, nodes, failures=failures)
        frame = next((f.event.frame for f in failures if f.rank in odd), "")
        return replace(cause, suspects=tuple(suspects), frame=frame)

    def _earlier_error(self) -> FirstFailure | None:
        """An error after which its rank went on, such as that of a thread."""
        died_later = {
            (f.file, f.rank)
            for f in self.lost
            if f.event.call and f.event.lines_after <= FINAL_LINES
        }
        later = [
            f for f in self.own_errors if not _is_final(f) and (f.file, f.rank) not in died_later
        ]
        groups = equal_failures(later)
        few = [f for g in groups if 2 * len(g.ranks) <= len(self.ranks) for f in g.failures]
        return self._went_on(self._of_errors(few) if self.lost or self.waited else None)

    @staticmethod
    def _went_on(cause: FirstFailure | None) -> FirstFailure | None:
        """A cause with a note that its rank went on."""
        if cause is None:
            return None
        note = "its rank wrote further lines after it"
        suspects = [replace(s, against=(*s.against, note)) for s in cause.suspects]
        return replace(cause, suspects=tuple(suspects))

    def _own_connection(self) -> FirstFailure | None:
        """A connection of the user's own code, where its peers lost a rank of the job."""
        own_errors = [
            f for f in self.lost if _OWN_CONNECTION.match(f.event.text) and not f.event.went_on
        ]
        ranks = {f.rank for f in own_errors}
        if not own_errors or 2 * len(ranks) > len(self.ranks) or len(own_errors) == len(self.lost):
            return None
        return self._of_errors(own_errors)

    def _fabric(self) -> FirstFailure | None:
        """The network between nodes: a peer's port, or the store's address, does not answer."""
        errors = [(f, nccl_errors.meaning(f.event.text)) for f in self.lost]
        rows = [(f, e.meaning, e.step) for f, e in errors if e and e.key in _FABRIC]
        rows = rows or [
            (f, "an address does not answer", "MASTER_ADDR and the route to it: nodeready ready")
            for f in self.lost
            if _NO_ROUTE.search(f.event.text)
        ]
        if not rows:
            return None
        first, meaning, step = rows[0]
        failures = [f for f, *_ in rows]
        ranks, nodes, links = _ranks(failures), _nodes(failures), self._links(failures)
        text = f"{self._subject(ranks, nodes)}: {_link_text(links)}{meaning}: "
        self.missing.append(step)
        nodes |= {end for link in links for end in link if not _ADDRESS.fullmatch(end)}
        text += first.event.text[-_TEXT:]
        return self._cause("network", text, ranks, nodes, _lines(failures, 3))

    def _links(self, failures: Iterable[RankFailure]) -> list[tuple[str, str]]:
        """The pairs of nodes between which the errors are; a peer that is not known by address."""
        node_of = {
            text.partition("/")[0]: node
            for node, facts in self.evidence.environment_facts.items()
            for interface in facts.interfaces
            for text in interface.addresses or ()
        }
        for file in self.evidence.files:
            node_of |= dict.fromkeys(file.failures.facts.addresses if file.node else (), file.node)
        ends = [(f, _LOCAL.search(f.event.text), _PEER.search(f.event.text)) for f in failures]
        node_of |= {local[1]: f.node for f, local, _ in ends if local and f.node}
        links: dict[tuple[str, str], None] = {}
        for failure, _, peer in ends:
            if peer and failure.node:
                address = peer[1] or peer[2]
                first, second = sorted((failure.node, node_of.get(address, address)))
                links[first, second] = None
        return list(links)

    def _of_errors(self, failures: Sequence[RankFailure]) -> FirstFailure | None:
        groups = equal_failures(once_per_rank(failures))
        if not groups:
            return None
        groups, reason = self._in_order(groups)
        if not reason:
            self.missing.append("times in the logs would tell which error was first")
            return self._undecided([self._error_suspect(group) for group in groups])
        first = groups[0]
        ranks, event = set(first.ranks), first.first.event
        nodes = {*first.nodes} | self._nodes_of(ranks)
        if not event.frame:
            event = next((f.event for f in first.failures if f.event.frame), event)
        kind, for_ = event.kind, self._error_evidence(first, reason)
        is_all = len(self.ranks) > 1 and ranks == self.ranks
        subject = f"all {len(ranks)} ranks" if is_all else self._subject(ranks, nodes)
        if not ranks and len(first.failures) > 1:
            subject = f"{len(first.failures)} ranks"
        if is_all:
            for_.append("every rank raised it: a mistake that all share, not one rank's")
        against = self._contrary_reports(ranks)
        if first.first.file not in self.last_files:
            against.append("torchrun started the ranks again after it")
        if kind == "gpu" and _ASYNCHRONOUS.search(event.text):
            against.append(
                "CUDA reports errors late: the frame may be wrong; CUDA_LAUNCH_BLOCKING=1 "
                "shows the call"
            )
        text = f"{subject}: {event.text[:_TEXT]}"
        places, failures = (ranks, nodes, for_), first.failures
        cause = self._cause(kind, text, *places, against=against, failures=failures)
        other_errors = map(self._error_suspect, groups[1:4])
        return replace(cause, suspects=(*cause.suspects, *other_errors), frame=event.frame)

    def _error_suspect(self, group: EqualFailures) -> Suspect:
        """The ranks with this error, as one of several suspects."""
        event, nodes = group.first.event, {*group.nodes} | self._nodes_of(group.ranks)
        frame = (f"at {event.frame}",) if event.frame else ()
        return _suspect(group.ranks, nodes, (event.text, *frame, f"in {group.first.example}"))

    def _error_evidence(self, group: EqualFailures, reason: str) -> list[str]:
        """Why this error is the first."""
        evidence = [f"in {group.first.example}", *filter(None, [reason])]
        asserts = [f for f in self.own_errors if f.event.text.startswith(ASSERT)]
        evidence += [f.event.text for f in asserts[:1] if f is not group.first]
        evidence += map(self._report_text, self._roots(set(group.ranks)))
        is_gpu = group.first.event.kind == "gpu"
        return evidence + (_kernel_lines(self._xids(set(group.nodes))) if is_gpu else [])

    def _contrary_reports(self, ranks: set[int]) -> list[str]:
        """Launchers that name another rank as the first."""
        roots = [f for f in self.roots if f.rank is not None]
        return [
            f"torchrun names rank {f.rank} as its first observed failure, which only says that "
            "its end was seen first"
            for f in roots[:1]
            if ranks and all(other.rank not in ranks for other in roots)
        ]

    def _in_order(self, groups: list[EqualFailures]) -> tuple[list[EqualFailures], str]:
        """The groups, the first failure first, and how that is known; "": it is not known."""
        if len(groups) == 1:
            lost = _ranks(self.lost) - {*groups[0].ranks}
            return groups, f"{ranks_of(lost)} only lost a peer" if lost else "no other error"
        timed = [(earliest, group) for group in groups if (earliest := group.earliest)]
        if len(timed) == len(groups):
            timed.sort(key=lambda row: row[0].time_s or 0.0)
            (earlier, group), (two, _) = timed[:2]
            gap_s = (two.time_s or 0.0) - (earlier.time_s or 0.0)
            if gap_s > earlier.slack_s + two.slack_s:
                ordered = [row[1] for row in timed]
                return ordered, f"{gap_s:.1f} s before the next error"
        # Of several torchruns, each sees only its node's ranks.
        root = self.roots[0] if len(self.roots) == 1 else None
        if root is not None and root.rank is not None and is_clear_root(root, self.reports):
            for group in groups:
                if root.rank in group.ranks:
                    remaining = [other for other in groups if other is not group]
                    return [group, *remaining], "torchrun saw its end first"
        paths = {f.file for group in groups for f in group.failures}
        if len(paths) == 1:
            groups = sorted(groups, key=lambda group: group.first.event.line)
            return groups, "its lines come first in the log"
        by_size = sorted(groups, key=lambda group: len(group.ranks) or 1)
        few, many = len(by_size[0].ranks), len(by_size[-1].ranks)
        if few < len(by_size[1].ranks) and 2 * many > len(self.ranks):
            return by_size, f"{counted(many, 'other rank')} share one error, as victims do"
        return by_size, ""

    def _scheduler(self) -> FirstFailure | None:
        """Slurm ended the job by its limit."""
        slurm_events = [f for f in self.ended if f.event.kind == "limit"]
        steps, lost = self._steps("TIMEOUT", "PREEMPTED", "DEADLINE"), self._steps("NODE_FAIL")
        if lost:
            text = f"Slurm lost a node of the job ({lost[0].nodes})"
            return self._cause("network", text, for_=_sacct_lines(lost))
        if not (slurm_events or steps):
            return None
        word = slurm_events[0].event.text if slurm_events else steps[0].state
        reason = next((reason for key, reason in _LIMITS.items() if key in word), word)
        evidence = _lines(slurm_events) + _sacct_lines(steps)
        return self._cause("limit", f"Slurm ended the job: {reason}", for_=evidence)

    def _killed(self) -> FirstFailure | None:
        """A rank that ended by a signal or with a status, without an error in its log."""
        excused = _ranks((*self.lost, *self.waited))
        agent_pids = {(f.node, f.event.pid) for f in self.ended if f.event.source == "torchrun"}
        order: list[RankFailure] = []
        for failure in self.reports:
            number = signal_of(failure.event.code)
            is_ended = (failure.node, failure.event.pid) in agent_pids
            # A signal that torchrun did not send came from outside.
            is_torchrun = failure.event.source.startswith("torchrun") and bool(agent_pids)
            is_ended = is_ended or (number in (1, 2, 15) and not is_torchrun)
            if not is_ended and failure.rank not in excused:
                order.append(failure)
        if not order:
            return None
        has_signals = any(signal_of(f.event.code) for f in order)
        order.sort(key=lambda f: self._report_key(f, has_signals))
        first = order[0]
        same = [
            f
            for f in order
            if f.event.code == first.event.code
            and f.event.source in (first.event.source, "torchrun-root")
            and (f.file, f.event.line) == (first.file, first.event.line)
        ]
        ranks, nodes = _ranks(same or [first]), _nodes(same or [first])
        number = signal_of(first.event.code)
        rivals = [
            f for f in order
            if f.rank not in (None, *ranks) and bool(signal_of(f.event.code)) == bool(number)
            and _may_precede(f, first)
        ]  # fmt: skip
        if rivals:
            self.missing.append("times of their ends would tell which was first")
            ended = {f.rank: f for f in (*rivals, first)}
            return self._undecided([
                _suspect((rank,), (f.node,), (self._report_text(f),))
                for rank, f in ended.items() if rank is not None
            ])  # fmt: skip
        if not number and (errors := [f for f in self.own_errors if f.rank in ranks]):
            return self._went_on(self._of_errors(errors))
        against: list[str] = []
        if number:
            name = SIGNAL_NAMES.get(number, f"signal {number}")
            text = (
                f"{{who}} {{was}} ended by {name} (signal {number}), without an error in its log"
            )
            against += [self._no_oom_text()] if number == 9 else []
        else:
            text = f"{{who}} ended with exit code {first.event.code}, without an error in its log"
            self.missing.append("why it exited: its log does not say")
        reports = first, *self._roots(ranks, first)
        evidence = [self._report_text(f) for f in reports]
        evidence += self._last_lines(ranks)[:1] if len(ranks) == 1 else []
        evidence += _lines([first]) if first.event.text else []
        if number in (4, 6, 7, 8, 11):
            self.missing.append("where it crashed: nodeready cores")
        kind = kind_of_code(first.event.code) if number else "unclear"
        places = ranks, nodes, evidence
        return self._cause(kind, text, *places, against=against, failures=[first])

    def _report_key(self, failure: RankFailure, has_signals: bool) -> tuple[object, ...]:
        event = failure.event
        return (
            has_signals and not signal_of(event.code) and event.source != "srun",
            failure.rank is None,
            failure.time_s or 0.0,
            event.source not in ("torchrun-root", "srun", "mpirun"),
            event.line,
        )

    def _roots(self, ranks: set[int], first: RankFailure | None = None) -> list[RankFailure]:
        return [f for f in self.roots if f.rank in ranks and f is not first][:1]

    def _no_oom_text(self) -> str:
        reasons = [reason for name, reason in self.evidence.missing.items() if "kernel" in name]
        if reasons:
            self.missing.append("the kernel's log would tell whether it was killed for memory")
            return f"a person, or the kernel for memory: {reasons[0]}"
        if any("kernel" in name for name in self.evidence.sources):
            return "not for memory by the kernel: its log has no such line"
        self.missing.append("the kernel's log would tell whether it was killed for memory")
        return "a person may have killed it, or the kernel for memory: its log was not read"

    def _xids(self, nodes: set[str]) -> list[NodeFault]:
        return [
            fault for fault in self.evidence.kernel
            if fault.kind == "xid" and (not nodes or fault.node in nodes)
        ][:3]  # fmt: skip

    def _gpu(self) -> FirstFailure | None:
        """A GPU's fault in the kernel's log, where no rank has an own error."""
        xids = self._xids(set())
        if not xids:
            return None
        keys = [(fault.node, fault.pid) for fault in xids]
        ranks = {self.rank_by_pid[key] for key in keys if key in self.rank_by_pid}
        text = f"{{who}}: {xids[0].text[:_TEXT]}"
        return self._cause("gpu", text, ranks, {f.node for f in xids}, _kernel_lines(xids))

    def _timeout(self) -> FirstFailure | None:
        """A hang that a watchdog ended: the rank that lags behind is the suspect."""
        lags = self._lags()
        if not self.waited and not lags:
            return None
        waiting = _ranks(self.waited)
        evidence = []
        if lags:
            (ranks, _), *_ = lags
            evidence += [reason for _, reason in lags[:3]]
        elif cause := self._odd_call(self._collectives(), "timeout", self.waited):
            return cause
        elif late := self._late_ranks(waiting):
            ranks = late
            evidence.append(f"{ranks_of(late)} lost a peer only after the timeout of the others")
        elif absent := self._absent_ranks():
            ranks = set(absent)
            evidence.append(f"no log names {ranks_of(ranks)}, and only the others had come")
        elif silent := self._silent_ranks():
            ranks = set(silent)
            evidence.append(f"{ranks_of(waiting)} waited; the log of {ranks_of(ranks)} just ends")
        elif cause := self._kernel():
            return cause
        else:
            ranks = set()
            self.missing.append("which rank was late: the flight recorder's dumps would tell")
        # The lagging rank's own words, if it has some.
        waited = sorted(self.waited, key=lambda f: (f.rank not in ranks, f.file, f.event.line))[:1]
        evidence += _lines(waited)
        words = (waited[0].event.text if waited else lags[0][1])[:_TEXT]
        text = f"a timeout, and no rank is known to be late: {words}"
        if ranks:
            text = f"{{who}} did not come until a timeout: {words}"
        return self._cause(
            "timeout", text, ranks, self._nodes_of(ranks), evidence, failures=waited
        )

    def _late_ranks(self, waiting: set[int]) -> set[int]:
        """The few ranks that came when the timeout of the others was over."""
        ends = [f.time_s + f.slack_s for f in self.waited if f.time_s is not None]
        end_s = max(ends, default=math.inf)
        late = {
            f.rank for f in self.lost
            if f.rank is not None and f.rank not in waiting and f.time_s is not None
            and f.time_s - f.slack_s > end_s
        }  # fmt: skip
        return late if len(late) < len(waiting) else set()

    def _collectives(self) -> dict[int, str]:
        """Rank -> the collective in which it waited or lost a peer; {}: of fewer than most."""
        failures = (*self.lost, *self.waited)
        calls = {f.rank: f.event.call for f in failures if f.rank is not None and f.event.call}
        is_known = 2 * len(calls) > len(self.ranks) and not _PAIRWISE.intersection(calls.values())
        return calls if is_known else {}

    def _absent_ranks(self) -> list[int]:
        """The ranks without a log, where the store names the size of the job."""
        for failure in self.waited:
            if match := _JOINED.search(failure.event.text):
                joined, size = int(match[1]), int(match[2])
                absent = sorted(set(range(size)) - self.ranks)
                return absent if len(absent) == size - joined else []
        return []

    def _lags(self) -> list[tuple[set[int], str]]:
        """The ranks that lag behind by the watchdogs' reports and the flight recorder's dumps."""
        evidence, places = Evidence(), list[RankPlace]()
        for number, file in enumerate(self.evidence.files, 1):
            failures = file.failures
            if not failures.reports and failures.recording is None:
                continue
            reports, rank = failures.reports, self.finder.file_rank(file)
            if rank is None and self.waited:
                # In a log of many ranks, a report has its own. Alone, it is no sign of a failure.
                reports = tuple(report for report in reports if report.rank is not None)
                rank = next((report.rank for report in reports), None)
            place = RankPlace(file.node or "node", number, rank)
            evidence.keep_log(place[:2], failures.path, reports, failures.recording)
            places.append(place)
        named = {place.rank for place in places}
        places += [RankPlace("node", -rank - 1, rank) for rank in sorted(self.ranks - named)]
        report = read_witnesses(evidence, places, False)
        lags = [lag for lag in report.lags if lag.ranks and not lag.chained]
        lags.sort(key=lambda lag: -lag.weight)
        rows = [
            (set(lag.ranks), f"{ranks_of(lag.ranks)} has not called {lag.call}") for lag in lags
        ]
        for witness in report.witnesses:
            for statement in witness.statements:
                # What most ranks say of themselves is no sign that one of them is late.
                is_few = 0 < 2 * len(statement.ranks) <= max(2, len(self.ranks))
                if statement.weight and not statement.against and is_few and not rows:
                    rows.append((set(statement.ranks), statement.text))
        return rows

    def _ended_from_outside(self) -> FirstFailure | None:
        """A signal ended the launcher or the ranks."""
        job = [f for f in self.ended if f.event.source in ("slurm-job", "agent")]
        # Slurm also says CANCELLED of a batch script that crashed (22.05): 0:11.
        cancelled = [
            step
            for step in self._steps("CANCELLED")
            if not step.signal or kind_of_code(-step.signal) == "signal"
        ]
        own_errors = [f for f in self.ended if f.event.source in ("", "error-file", "shell")]
        ended = [f for f in self.reports if signal_of(f.event.code) in (1, 2, 15)]
        if job or cancelled:
            text = "the job was cancelled"
            if sent := {signal_of(f.event.code) for f in self.reports} & {10, 12}:
                text = f"{SIGNAL_NAMES[min(sent)]} of Slurm ended the ranks"
            if not (cancelled or job[0].event.source == "slurm-job"):
                name = SIGNAL_NAMES.get(abs(job[0].event.code), "a signal (Ctrl-C)")
                text = f"{name} ended the launcher, from outside"
            return self._cause("signal", text, for_=_lines(job) + _sacct_lines(cancelled))
        failures = own_errors or ended[:1]
        if not failures:
            return None
        first = min(own_errors or ended, key=lambda f: (f.time_s or 0.0, f.event.line))
        ranks, nodes = _ranks(failures), _nodes(failures)
        is_all = len(self.ranks) > 1 and ranks == self.ranks
        name = "SIGINT (Ctrl-C)" if "KeyboardInterrupt" in first.event.text else "SIGTERM"
        text = f"{'all ranks were' if is_all else '{who} was'} ended by {name}, from outside"
        return self._cause("signal", text, ranks, nodes, _lines([first]), failures=[first])

    def _kernel(self) -> FirstFailure | None:
        """A fault of a node in the kernel's log, where the ranks only lost a peer."""
        kinds = {"link": "network", "filesystem": "storage", "segfault": "segfault",
                 "oom": "oom", "memory": "signal"}  # fmt: skip
        faults = [fault for fault in self.evidence.kernel if fault.kind in kinds]
        if not faults:
            return None
        fault = min(faults, key=lambda fault: list(kinds).index(fault.kind))
        rank = self.rank_by_pid.get((fault.node, fault.pid))
        ranks = {rank} if rank is not None else set[int]()
        text = f"{{who}}: {fault.text[:_TEXT]}"
        return self._cause(kinds[fault.kind], text, ranks, {fault.node}, _kernel_lines(faults))

    def _silent_ranks(self) -> list[int]:
        """The ranks without any failure, where their peers have one; [] for more than half."""
        failed = {f.rank for f in self.all if f.rank is not None and f.event.role != REPORT}
        silent = sorted(self.ranks - failed)
        nodes = {self.node_of.get(rank, "") for rank in silent}
        # A node that was lost takes all of its ranks.
        on_nodes = [rank for rank in self.ranks if self.node_of.get(rank, "") in nodes]
        is_node = len(nodes) == 1 and "" not in nodes and silent == sorted(on_nodes)
        is_few = 2 * len(silent) < len(self.ranks) or (is_node and len(silent) < len(self.ranks))
        return silent if is_few else []

    def _last_lines(self, ranks: set[int]) -> list[str]:
        """The last lines of some of the ranks that belong to no failure."""
        lines = [
            f"its last line: {stream.last}"
            for file in self.evidence.files
            for stream in file.failures.streams
            if stream.last and ranks & {self.finder.file_rank(file), stream.rank}
        ]  # fmt: skip
        return list(dict.fromkeys(lines))[:3]

    def _silent(self) -> FirstFailure | None:
        """The rank whose log ends without a failure, while its peers lost a rank."""
        silent = set(self._silent_ranks())
        if not silent or not self.lost:
            return None
        text = f"{{who}} ended without a word; {ranks_of(_ranks(self.lost))} lost a peer"
        self.missing.append("its exit status: sacct, the launcher's output or the kernel's log")
        evidence = self._last_lines(silent) + _lines(self.lost, 1)
        return self._cause("unclear", text, silent, self._nodes_of(silent), evidence)

    def _unclear(self) -> FirstFailure:
        if self.lost:
            text = "every failure is a lost peer: the rank that failed first left no trace"
            self.missing.append("the log of the rank that ended first, its exit status")
            return self._cause("unclear", text, for_=_lines(self.lost))
        steps = [step for step in self.evidence.steps if step.code or step.signal]
        if steps and not self.reports:
            step, how = steps[-1], f"exit code {steps[-1].code}"
            if step.signal:
                how = SIGNAL_NAMES.get(step.signal, f"signal {step.signal}")
            kind = kind_of_code(-step.signal) if step.signal else "unclear"
            text = f"Slurm: {step.step} {step.state} with {how}, and no log says why"
            self.missing.append("the logs of the ranks")
            evidence = [f"Slurm: {s.step} {s.state} {s.code}:{s.signal}" for s in steps[:3]]
            return self._cause(kind, text, for_=evidence)
        if self.reports:
            text = "; ".join(dict.fromkeys(self._report_text(f) for f in self.reports[:3]))
            return self._cause("unclear", text)
        return FirstFailure("unclear", "no failure in the evidence", missing=tuple(self.missing))

    # --- Words.

    def _subject(self, ranks: Iterable[int], nodes: Iterable[str]) -> str:
        ranks, names = set(ranks), sorted(filter(None, set(nodes)), key=natural)
        place = fold(names) if names else ""
        if ranks:
            return f"{ranks_of(ranks)}{f' ({place})' if place and len(place) < 60 else ''}"
        return f"a rank on {place}" if place else "a rank"

    def _report_text(self, failure: RankFailure) -> str:
        event = failure.event
        how = f"ended with exit code {event.code}"
        if event.kind == "oom":
            how = "out of memory"
        elif number := signal_of(event.code):
            how = f"ended by {SIGNAL_NAMES.get(number, number)}"
        subject = f"process {event.pid}" if event.pid else "a process"
        if failure.rank is not None:
            subject = f"rank {failure.rank}"
        elif event.local_rank is not None:
            subject = f"local rank {event.local_rank}"
        root = ", as its first observed failure" if event.source == "torchrun-root" else ""
        return f"{_LAUNCHERS.get(event.source, event.source)} reports: {subject} {how}{root}"

    def _cause(
        self, kind: str, text: str, ranks: Iterable[int] = (), nodes: Iterable[str] = (),
        for_: Iterable[str] = (), *, against: Iterable[str] = (),
        failures: Sequence[RankFailure] = (),
    ) -> FirstFailure:  # fmt: skip
        """The cause. text: ``{who}`` stands for its ranks and nodes, ``{was}`` for their verb"""
        suspect = _suspect(ranks, nodes, for_, against)
        if "{who}" in text:
            text = text.replace("{who}", self._subject(suspect.ranks, suspect.nodes), 1)
            verb = say("{was|were}", max(1, len(suspect.ranks)))
            text = text.replace("{was}", verb, 1)
        moments = [f.time_s for f in failures if f.time_s is not None]
        time = moment_text(min(moments)) if moments else ""
        subjects = suspect.ranks, suspect.nodes
        return FirstFailure(kind, text, *subjects, time=time, suspects=(suspect,))

    def _nodes_of(self, ranks: Iterable[int]) -> set[str]:
        return {self.node_of[rank] for rank in ranks if rank in self.node_of}

    def _steps(self, *states: str) -> list[SlurmStep]:
        """The steps in states that begin like these."""
        return [step for step in self.evidence.steps if step.state.startswith(states)]

    def _undecided(self, suspects: Sequence[Suspect]) -> FirstFailure:
        """The cause where the evidence does not tell which of the suspects failed first."""
        names = [self._subject(suspect.ranks, suspect.nodes) for suspect in suspects]
        names[_NAMED:] = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
        text = f"{' or '.join(names)}: which failed first is not known"
        ranks = {rank for suspect in suspects for rank in suspect.ranks}
        nodes = {node for suspect in suspects for node in suspect.nodes}
        cause = self._cause("unclear", text, ranks, nodes)
        return replace(cause, suspects=tuple(suspects[:_MAX_SUSPECTS]))

    # --- All failures, for the report.

    def groups(self, cause: FirstFailure) -> tuple[FailureGroup, ...]:
        """All failures, equal ones once: the cause first, victims after it."""
        groups = [
            FailureGroup(
                *(group.first.event.role, group.first.event.kind, group.first.event.text),
                *(len({(f.rank, f.file, f.event.line) for f in group.failures}), group.ranks),
                *(group.nodes, group.first.example),
                time=moment_text(group.earliest.time_s) if group.earliest else "",
            )
            for group in equal_failures(self.all)
        ]

        cause_ranks = set(cause.ranks)

        def order(group: FailureGroup) -> tuple[object, ...]:
            is_cause = group.role == FAILED and cause_ranks.issuperset(group.ranks)
            return _ROLE_ORDER[group.role], not is_cause, len(group.ranks)

        return tuple(sorted(groups, key=order))


def _suspect(
    ranks: Iterable[int], nodes: Iterable[str], for_: Iterable[str], against: Iterable[str] = ()
) -> Suspect:
    names = tuple(sorted(filter(None, nodes), key=natural))
    evidence = tuple(dict.fromkeys(for_)), tuple(dict.fromkeys(against))
    return Suspect(tuple(sorted(ranks)), names, *evidence)


def _ranks(failures: Iterable[RankFailure]) -> set[int]:
    return {f.rank for f in failures if f.rank is not None}


def _nodes(failures: Iterable[RankFailure]) -> set[str]:
    return {f.node for f in failures if f.node}


def _lines(failures: Sequence[RankFailure], maximum: int = 2) -> list[str]:
    return [f"{f.example}: {f.event.text}" for f in failures[:maximum]]


def _kernel_lines(faults: Sequence[NodeFault]) -> list[str]:
    return [
        f"the kernel{f' of {fault.node}' if fault.node else ''}: {fault.text}"
        for fault in faults[:3]
    ]


def _sacct_lines(steps: Sequence[SlurmStep]) -> list[str]:
    return [f"sacct: {step.step} {step.state}" for step in steps[:2]]


def _is_of_application(fault: NodeFault) -> bool:
    """Whether a fault of a GPU is one that any program causes."""
    code = _XID.match(fault.text)
    return code is not None and xids.action_of(int(code[1]), fault.text) == xids.APPLICATION


#: Seconds by which the ends that two launchers see may be in another order: torchrun reports whole
#: seconds, and looks every 0.1 s.
_SEEN_S = 1.1


def _may_precede(failure: RankFailure, first: RankFailure) -> bool:
    """Whether a report of another launcher may be of an earlier end."""
    if failure.file == first.file:
        return False
    if failure.time_s is None or first.time_s is None:
        return True
    return failure.time_s - first.time_s <= _SEEN_S + failure.slack_s + first.slack_s


def _link_text(links: Sequence[tuple[str, str]]) -> str:
    """``gpu2 to gpu5: ``; the node that all links share comes first; "": no link is known."""
    if not links:
        return ""
    shared = set(links[0]).intersection(*links)
    if not shared:
        return f"{counted(len(links), 'pair')} of nodes, such as {' to '.join(links[0])}: "
    node = min(shared)
    peers = sorted({name for link in links for name in link} - {node}, key=natural)
    return f"{node} to {', '.join(peers[:8])}: "


def _is_final(failure: RankFailure) -> bool:
    """Whether an error may have ended its rank."""
    return failure.event.lines_after <= FINAL_LINES and not failure.event.went_on


def _worker(text: str) -> int:
    """The process of a data loader's worker that an exception names; 0: none."""
    match = re.search(r"DataLoader worker \(pid(?:\(s\))? (\d{1,10})", text)
    return int(match[1]) if match else 0


def moment_text(seconds: float | None) -> str:
    """A time as the reports write it; "" for none."""
    if seconds is None or not 0 < seconds < 1e11:
        return ""
    return utc_moment(seconds)
