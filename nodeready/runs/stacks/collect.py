"""Run the capture program on all nodes at once, and keep each node's answer packed.

An answer is unpacked only while it is grouped, so that the traces of 16,384 nodes fit in memory.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from nodeready.agent.asking import INTERRUPT, Answer, Asks, Request, new_nonce, request
from nodeready.agent.stacks import program, system_calls
from nodeready.agent.stacks.processes import FAMILIES
from nodeready.agent.stacks.program import StacksConfig
from nodeready.agent.stacks.py_spy import ENDED_INTERPRETER, NATIVE_LIMIT_S, NO_CALL, NOT_PYTHON
from nodeready.agent.stacks.ranks import CLAIMS, LAUNCHER, claim_note
from nodeready.agent.stacks.system_calls import CallCount
from nodeready.core import outcome, wire
from nodeready.core.base import ProbeError
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import FAILED, INTERRUPTED, INVALID, TIMEOUT, Gap, GapError
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import folded
from nodeready.fleet.inventory.slurm import JobPlacement
from nodeready.runs.stacks.classify import Links, Place
from nodeready.runs.stacks.document import Group, Rank, Stacks, say
from nodeready.runs.stacks.trace import Trace, TracedProcess, TraceError, read

#: Maximum processes that are named where no rank was found.
MAX_LISTED_PROCESSES = 10
#: Seconds that a command has on a node beyond the program's own limit.
MARGIN_S = 3


@dataclass
class Captured:
    """The nodes' answers."""

    config: StacksConfig
    nodes: list[str]  # all nodes to which the request went
    answers: dict[str, Answer] = field(default_factory=dict)  # node -> its answer, unparsed
    # node -> why there is no trace of it; complete after `traces`
    gaps: dict[str, Gap] = field(default_factory=dict)
    # node -> its trace with additions, such as native stacks
    corrected: dict[str, Trace] = field(default_factory=dict)
    # (node, program) of processes on nodes without a rank; after `traces`
    instead: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = True  # False when it was interrupted
    placement: JobPlacement = field(default_factory=JobPlacement)  # Slurm's record of the job
    # nodes with processes that claim the job and are no ranks of it; after `traces`
    claimants: list[str] = field(default_factory=list)

    def first_trace(self, name: str) -> Trace:
        """The trace of a node with its additions. Raises GapError if it has none."""
        return self.corrected.get(name) or trace_of(name, self.answers[name], self.config.nonce)

    def traces(self) -> Iterator[Trace]:
        """Every node's trace, one at a time, under its name in the inventory."""
        self.gaps.clear()
        self.instead.clear()
        self.claimants.clear()
        for name in self.nodes:
            if name not in self.answers:
                self.gaps[name] = Gap(FAILED, "no answer") if self.complete else INTERRUPT
                continue
            try:
                trace = self.first_trace(name)
            except GapError as end:
                self.gaps[name] = end.gap
                continue
            if not trace.processes:
                if trace.error:
                    self.gaps[name] = Gap(outcome.INCOMPLETE, trace.error)
                    continue
                room = MAX_LISTED_PROCESSES - len(self.instead)
                self.instead += [(name, words) for words in trace.instead[:room]]
            if name in self.placement.other_nodes:
                if not trace.processes:
                    continue
                trace = _with_claims(trace, self.config.job)
            if any(process.note.startswith(CLAIMS) for process in trace.processes):
                self.claimants.append(name)
            yield trace


def _with_claims(trace: Trace, job: str) -> Trace:
    """The trace of a node on which Slurm does not run the job. Its processes only claim the job,
    so their stacks and witnesses are removed.
    """
    names = "samples", "below", "ends", "waits_for", "received", "locals", "thread_rows"
    bare: dict[str, Any] = dict.fromkeys(names, ())
    bare |= {"native": None, "witnesses": {}, "note": claim_note(job, True)}
    processes = tuple(replace(process, **bare) for process in trace.processes)
    return replace(trace, witnesses={}, processes=processes)


def trace_of(name: str, answer: Answer, nonce: str) -> Trace:
    """The trace in a node's answer. Raises GapError if it has none."""
    if answer.gap and answer.gap.kind not in (TIMEOUT, outcome.HUNG):
        raise GapError(answer.gap)
    if f"{nonce} {wire.NO_PYTHON}" in answer.stdout:
        raise GapError(Gap(outcome.NO_PYTHON, wire.PYTHON_MISSING))
    try:
        data = program.unpack(answer.stdout, nonce)
        # The name of a node comes from the inventory, not from its answer.
        return read({**data, "node": name} if isinstance(data, dict) else data, name)
    except ProbeError as problem:
        reason = problem.reason if answer.ok else answer.reason()
        raise GapError(answer.gap or Gap(INVALID, reason, answer.stdout[:200])) from None
    except TraceError as problem:
        raise GapError(Gap(INVALID, str(problem))) from None


def capture(
    ask: Asks, nodes: Iterable[str], config: StacksConfig, placement: JobPlacement | None = None
) -> Captured:
    """Run the program on all nodes at once. An interrupt makes the result incomplete."""
    placement = placement or JobPlacement()
    config = replace(config, owner=placement.user, parts=placement.parts)
    captured = Captured(config, list(nodes), placement=placement)
    configs = dict.fromkeys(captured.nodes, config)
    other_nodes = placement.other_nodes & configs.keys()
    configs |= dict.fromkeys(other_nodes, replace(config, is_elsewhere=True))
    requests = {name: request_for(name, config) for name, config in configs.items()}
    return add_answers(captured, ask, "stacks", requests)


def request_for(name: str, config: StacksConfig) -> Request:
    return request(name, program.__name__, config, margin_s=MARGIN_S)


def add_answers(
    captured: Captured, ask: Asks, activity: str, requests: Mapping[str, Request]
) -> Captured:
    for name, answer in ask(activity, requests).items():
        if answer.has_gap(INTERRUPTED):
            captured.complete = False
        else:
            captured.answers[name] = answer
    return captured


# --- A job without a rank: its launchers wait for each other.


def with_launchers(stacks: Stacks, captured: Captured) -> Stacks:
    """The document with advice, in first place, on a job that has only launchers: a rendezvous
    waits for every node, and the missing node shows no process.
    """
    notes = [process.note for process in stacks.processes if process.note.startswith(LAUNCHER)]
    if not notes or len(notes) < len(stacks.processes):
        return stacks
    nodes = {process.node for process in stacks.processes}
    without = [name for name in captured.nodes if name not in nodes and name not in captured.gaps]
    names = f"{counted(len(nodes), 'node')} ({folded(sorted(nodes))})"
    text = f"no rank has been started: {names} {say('{has|have}', len(nodes))} a launcher"
    match = re.search(r"to run on ([0-9]+) nodes", notes[0])
    if match and len(nodes) < int(match[1]):
        text += f", and the job is to run on {match[1]}"
    if without:
        advice = "start it there, or see why it has ended (`nodeready tail INVENTORY`)"
        text += f"; {folded(without)} {say('{has|have}', len(without))} none: {advice}"
    return replace(stacks, advice=(text, *stacks.advice))


# --- The second round: native stacks of a few processes, which are paused for it.

#: Maximum processes whose native stacks are taken.
MAX_UNWOUND = 16
#: States in which py-spy's blocking mode would hang, or stop nothing (proc(5)).
_UNPAUSABLE_STATES = frozenset("DTtZX")


def _has_native(group: Group) -> bool:
    """Whether native stacks of a group may show more than its Python calls."""
    is_in_c = group.no_stack_reason.startswith((ENDED_INTERPRETER, NOT_PYTHON, NO_CALL))
    return group.kind == "stack" or is_in_c


def choose_native(stacks: Stacks, maximum: int = MAX_UNWOUND) -> dict[str, list[int]]:
    """Node -> the pids of the processes to unwind, at most ``maximum``: those with odd threads,
    then one of each group with native calls, the most suspicious first, then their others without
    the largest group.
    """
    groups = [index for index, group in enumerate(stacks.groups) if _has_native(group)]
    if not groups:
        return {}
    largest = max(groups, key=lambda index: stacks.groups[index].processes)
    members: dict[int, list[Rank]] = {index: [] for index in groups}
    for process in stacks.processes:
        if process.group in members and process.state[:1] not in _UNPAUSABLE_STATES:
            members[process.group].append(process)
    odd = {(thread.node, thread.pid) for thread in stacks.odd_threads}
    chosen = [row for rows in members.values() for row in rows if (row.node, row.pid) in odd]
    chosen += [member for index in groups for member in members[index][:1]]
    chosen += [member for index in groups if index != largest for member in members[index][1:]]
    pids_of: dict[str, list[int]] = {}
    for process in list(dict.fromkeys(chosen))[:maximum]:
        pids_of.setdefault(process.node, []).append(process.pid)
    return pids_of


def unwind(captured: Captured, ask: Asks, stacks: Stacks) -> list[str]:
    """Put native stacks into the traces, one at a time on each node; why some are missing."""
    pids = choose_native(stacks)
    longest = max(map(len, pids.values()), default=0)
    config = replace(captured.config, limit_s=2 * (NATIVE_LIMIT_S + 2) * longest)
    configs = {}
    for name, numbers in pids.items():
        odd = tuple(row.thread for row in stacks.odd_threads if row.node == name and row.thread)
        configs[name] = replace(config, native=tuple(numbers), native_threads=odd)
    second = _second_round(captured, ask, "native", configs)
    problems = []
    for trace in second.traces():
        name = trace.node
        first = captured.first_trace(name)
        captured.corrected[name], missing = merged(first, trace, pids[name])
        text = f"{name}: no native stack of process"
        problems += [f"{text} {pid}: {reason}" for pid, reason in missing]
    problems += [f"{name}: no native stacks: {gap.reason}" for name, gap in second.gaps.items()]
    return problems


def _second_round(
    captured: Captured, ask: Asks, activity: str, configs: Mapping[str, StacksConfig]
) -> Captured:
    nonce = new_nonce()
    second = Captured(replace(captured.config, nonce=nonce), list(configs))
    rows = ((name, replace(config, nonce=nonce)) for name, config in configs.items())
    add_answers(second, ask, activity, {name: request_for(name, config) for name, config in rows})
    captured.complete = second.complete
    return second


def merged(
    trace: Trace, native: Trace, pids: Iterable[int]
) -> tuple[Trace, list[tuple[int, str]]]:
    """The trace with the native stacks of a second one; (pid, reason) of each without."""
    frames, stacks = list(trace.frames), list(trace.stacks)
    frame_indexes = {frame: index for index, frame in enumerate(frames)}
    by_pid = {process.pid: process for process in native.processes}
    index_of: dict[int, int] = {}
    missing = []
    for pid in pids:
        process = by_pid.get(pid)
        if process is None or process.native is None:
            missing.append((pid, _native_error(process)))
            continue
        path = []
        for index in native.stacks[process.native]:
            frame = native.frames[index]
            if frame not in frame_indexes:
                frame_indexes[frame] = len(frames)
                frames.append(frame)
            path.append(frame_indexes[frame])
        index_of[pid] = len(stacks)
        stacks.append(tuple(path))
    calls = {wait.number: wait.native for wait in native.thread_waits}
    waits = (replace(wait, native=calls.get(wait.number, ())) for wait in trace.thread_waits)
    processes = (replace(p, native=index_of.get(p.pid, p.native)) for p in trace.processes)
    complete = replace(
        trace, frames=tuple(frames), stacks=tuple(stacks), processes=tuple(processes),
        thread_waits=tuple(waits),
    )  # fmt: skip
    return complete, missing


def _native_error(process: TracedProcess | None) -> str:
    if process is None:
        return "it has ended"
    return process.note.removeprefix("no native stack: ") or "py-spy gave none"


# --- A further round: the system calls of the suspects, which strace slows down meanwhile.

#: Maximum processes whose system calls are counted.
MAX_COUNTED = 8


def count_system_calls(
    captured: Captured, ask: Asks, stacks: Stacks, seconds: float
) -> Iterator[str]:
    """Count the system calls of the suspects, else of the processes that spin, or of those of
    --pid, and put them into the traces. Yields why counts are missing, one line each.
    """
    suspects = stacks.verdict.suspects if stacks.verdict else ()
    ranks = {rank for suspect in suspects for rank in suspect.ranks}
    chosen = list(stacks.processes)
    if ranks and not captured.config.pids:
        chosen = [row for row in chosen if row.rank in ranks]
    elif not captured.config.pids:
        chosen = [row for row in chosen if stacks.groups[row.group].verdict == "spinning"]
    if not chosen:
        yield "--syscalls: the verdict names no rank, and none spins; choose one with --pid"
    elif len(chosen) > MAX_COUNTED:
        yield f"--syscalls: of {MAX_COUNTED} of {len(chosen)} processes"
    pids_of: dict[str, list[int]] = {}
    for row in chosen[:MAX_COUNTED]:
        pids_of.setdefault(row.node, []).append(row.pid)
    each_s = ceil(seconds + 2 * system_calls.MARGIN_S)
    config = replace(captured.config, syscalls_s=seconds)
    configs = {
        name: replace(config, pids=tuple(pids), limit_s=each_s * (len(pids) + 1))
        for name, pids in pids_of.items()
    }
    second = _second_round(captured, ask, "system calls", configs)
    links, rank_of = Links(), {(row.node, row.pid): row.rank for row in stacks.processes}
    for trace in captured.traces():
        for process in trace.processes:
            links.read(trace.node, process)
    for trace in second.traces():
        name, by_pid = trace.node, {process.pid: process for process in trace.processes}
        for pid in pids_of[name]:
            if pid not in by_pid or not by_pid[pid].system_calls:
                note = by_pid[pid].note if pid in by_pid else "it has ended"
                reason = note.rpartition(program.NO_SYSTEM_CALLS)[2]
                yield f"{name}: no system calls of process {pid}: {reason}"
        for process in by_pid.values():
            calls = (_with_rank(call, name, links, rank_of) for call in process.system_calls)
            process.system_calls = tuple(calls)
        first = captured.first_trace(name)
        for process in first.processes:
            if counted_process := by_pid.get(process.pid):
                process.system_calls = counted_process.system_calls
                process.traced_s = counted_process.traced_s
        captured.corrected[name] = first
    for name, gap in second.gaps.items():
        yield f"{name}: no system calls: {gap.reason}"


def _with_rank(
    call: CallCount, node: str, links: Links, rank_of: Mapping[Place, int | None]
) -> CallCount:
    place = links.owner(node, call.peer) if call.peer else None
    rank = rank_of.get(place) if place else None
    if place is None or rank is None:
        return call
    return replace(call, object=f"{call.object}, rank {rank} on {place[0]}")


# --- The search: conditions on a process, and the message where none was found.

#: Seconds before a third sample, which is taken if two samples cannot distinguish a slow job from
#: a hung one. Most steps take less than both intervals together.
LONGER_S = 8.0
#: Seconds of the limit of a node for the search of processes, and for the last dumps.
_DUMPS_S = 10


def program_config(timeout_s: int, **options: Any) -> StacksConfig:
    """The configuration of the program on the nodes, with a new nonce and tag. Raises Refused.
    timeout_s: for one node. options: further fields of `StacksConfig`
    """
    tag = f"nodeready:{secrets.token_hex(6)}"
    config = StacksConfig(new_nonce(), tag, timeout_s, **{"longer_s": LONGER_S, **options})
    try:
        re.compile(config.match)
    except re.error as problem:
        raise Refused(f"--match {config.match}: no regular expression: {problem}") from None
    needed = (config.samples - 1) * config.interval_s + _DUMPS_S
    if timeout_s < needed:
        samples = f"{counted(config.samples, 'sample')} every {config.interval_s:g} s"
        raise Refused(f"--timeout {timeout_s}: {samples} need {needed:.0f} s at least")
    return config


def _unmet_condition(config: StacksConfig) -> str:
    if config.pids:
        return f"there is no process {', '.join(map(str, config.pids))}"
    if config.match:
        words = f"no process has {config.match!r} in its command line"
    else:
        names = ", ".join(family[0] for family in FAMILIES)
        words = f"no process has one of {names} in its environment"
    words += f" and belongs to job {config.job}" if config.job else ""
    return f"{words}, of user {config.user}" if config.user else words


def no_ranks_reason(captured: Captured) -> str:
    """The message where no node has a rank: the conditions, and the programs that run."""
    answered = [name for name in captured.nodes if name not in captured.gaps]
    text = f"no ranks on {folded(answered)}: {_unmet_condition(captured.config)}"
    if captured.placement.nodes:
        text += f". Slurm runs the job on {folded(captured.placement.nodes)}"
    if captured.claimants:
        text += f". Processes on {folded(captured.claimants)} claim the job and are no ranks of it"
    if captured.instead:
        shown = "; ".join(f"{words} on {name}" for name, words in captured.instead)
        text += f". What runs instead: {shown}. Choose with --pid or --match; "
        text += "another user's ranks are seen as that user, or with --sudo"
    return text
