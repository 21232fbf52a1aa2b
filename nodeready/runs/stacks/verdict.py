"""The verdict: the cause of a hang, from the waits between ranks and from all witnesses.

The rules, in their order. A job that progresses is not stuck. A rank that is gone is the cause. A
strong witness about a lagging rank outranks the stacks, unless that rank waits in turn for a
rank without a witness. Then come the ranks that wait for no rank while other ranks wait for them;
then, where all wait, the network. A single weak sign is reported, with the evidence that would
help, but is never blamed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nodeready.agent.stacks.descendants import EXITING
from nodeready.agent.stacks.processes import FROZEN
from nodeready.agent.stacks.py_spy import ENDED_INTERPRETER, NO_CALL
from nodeready.agent.witnesses.software import NO_NCCL
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.stacks import advise, hints, witness_reader
from nodeready.runs.stacks.classify import THREAD
from nodeready.runs.stacks.document import (
    ChildProcess,
    Frame,
    Group,
    Statement,
    Suspect,
    Verdict,
    fold_ranks,
    say,
)
from nodeready.runs.stacks.evidence import MAX_LINE, Lag, WitnessReport
from nodeready.subjects.environment_rules import EnvironmentFinding

#: Maximum characters of a set of ranks or nodes, and of a name from a process. Only what a node
#: names is cut, each name by itself, so that the line number and the advice behind it remain.
_MAX_SET, _MAX_NAME = 32, 60
#: Maximum statements for and against a suspect; and suspects.
_MAX_STATEMENTS, _MAX_SUSPECTS = 8, 8
#: Wait channels and files of file systems and block devices (Linux: fs/, net/sunrpc, block/; the
#: clients of Lustre, Ceph, GPFS, BeeGFS and WEKA).
_STORAGE = re.compile(
    r"nfs|rpc_wait|rpc_execute|fuse|request_wait_answer|lustre|\bll_|ptlrpc|cl_sync|ldlm|ceph|gpfs"
    r"|mmfs|beegfs|fhgfs|weka|cifs|smb2?_|io_schedule|folio_wait|wait_on_page|wait_on_buffer|jbd2"
    r"|xfs_|ext4_|btrfs|blk_|submit_bio|bit_wait_io|balance_dirty"
)
_RECEIVES = re.compile(r"^_?i?recv(?:_|$)")
#: Activities in which a rank sleeps, without polling, until its peers call.
_SLEEPING_ACTIVITIES = ("collective", "peer", "gpu", "backward")
#: Calls of one rank to another one.
_PAIRWISE = re.compile(r"^(?:_?i?send|_?i?recv|batch_isend_irecv|(?:send|recv)_\w+)$")


class Decision(NamedTuple):
    """The verdict on a job."""

    verdict: Verdict | None  # None: no group
    groups: tuple[Group, ...]  # with their final roles
    order: tuple[int, ...]  # indexes of the groups, those of the suspects first
    by_witness: bool = False  # a witness names other suspects than the order of the stacks


class OddRanks(NamedTuple):
    """Differences between the environments of the ranks."""

    ranks: tuple[int, ...] = ()  # few ranks with other values than most, and the values
    reason: str = ""
    unasked: tuple[int, ...] = ()  # ranks that the options in `part` left out
    part: str = ""


#: No differences.
NO_ODD_RANKS = OddRanks()
#: Beginning of the reason of missing ranks that run as another job.
OTHER_JOB_START = "started as part of"


class _RankCause(NamedTuple):
    """What a suspect does."""

    kind: str  # of the verdict; action: ``stands in load data.py:33``; advice: what to do
    action: str
    advice: str


def ranks_text(ranks: Collection[int], nodes: Sequence[str] = ()) -> str:
    """Ranks or nodes in words, as in ``rank 3 (gpu1)``, ``ranks 0-2``, ``300 ranks``, ``gpu1``."""
    names = fold(nodes) if nodes else ""
    if len(names) > _MAX_SET:
        names = counted(len(nodes), "node")
    if not ranks:
        return names or "a process"
    text = fold_ranks(ranks)
    text = (
        f"{len(ranks)} ranks" if len(text) > _MAX_SET else f"rank{'s' * (len(ranks) > 1)} {text}"
    )
    return f"{text} ({names})" if names else text


def _name(group: Group) -> str:
    return ranks_text(group.ranks, group.nodes)


def _further(indexes: Sequence[int]) -> str:
    """How many groups there are beside the first, in brackets."""
    return f" (and {counted(len(indexes) - 1, 'other group')})" if indexes[1:] else ""


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _place(frame: Frame) -> str:
    function = _cut(frame.function, _MAX_NAME)
    file = _cut(frame.file.rpartition("/")[2], _MAX_NAME)
    return f"{function} {file}:{frame.line}" if frame.line else function


def _position(group: Group) -> str:
    """The innermost call of the user, else of all, as in ``load data.py:33``; "": no call."""
    frame = group.user_frame or (group.frames[-1] if group.frames else None)
    return _place(frame) if frame else ""


def _held_child(group: Group) -> ChildProcess | None:
    """A descendant that a rank waits for and that has stopped or ended; None: no such process."""
    if group.activity not in ("child", "data"):
        return None
    return next((child for child in group.children if child.state[:1] in _HELD_STATES), None)


def _child_cause(group: Group, at: str) -> _RankCause | None:
    """The cause where a rank waits for a process that it started, such as a loader's worker.

    at: the innermost call of the rank, in words
    """
    activity = group.activity
    if stopped := _held_child(group):
        is_worker = stopped.kind == "loader worker"
        name = stopped.kind if is_worker else _cut(stopped.command, _MAX_NAME)
        action = f"waits for its child process that {_HELD_STATES[stopped.state[:1]]}: {name}"
        return _RankCause("late", action, "find the cause in its last output")
    inner = next((child for child in group.children if child.frames), None)
    if inner and activity == "child":
        place = _place(hints.user_frame(inner.frames) or inner.frames[-1])
        part = f" ({advise.few_ranks(inner.ranks)})" if set(inner.ranks) < set(group.ranks) else ""
        return _RankCause("late", f"waits for its child process in {place}{part}", "look there")
    # Workers that fetch ahead stand still as well while their rank is elsewhere.
    for child in group.children if activity == "data" or not group.frames else ():
        if child.kind == "loader worker" and not hints.is_idle_worker(child.hint):
            frame_text = _place(child.frames[-1]) if child.frames else ""
            channel = _cut(child.wait_channel, _MAX_NAME)
            held = f"state {child.state[:1]} in {channel}" if channel else ""
            fs = child.state.startswith("D") or _STORAGE.search(
                f"{child.wait_channel} {child.waits_on}"
            )
            place = held if fs and held else frame_text or held
            workers = counted(child.processes, "loader worker")
            action = f"waits for {workers}{f' ({place})' if place else ''}"
            kind, part = ("storage", "file system") if fs else ("loader", "stacks")
            return _RankCause(kind, action, f"look at the workers' {part}")
    if activity == "data":
        return _RankCause("loader", f"waits for its data loader at {at}", "look at its workers")
    return None


def _cause(group: Group) -> _RankCause:
    """The action of a group that waits for no rank, and the advice."""
    if of_kind := _KIND_CAUSES.get(group.kind):
        return of_kind._replace(action=say(of_kind.action, max(1, len(group.ranks))))
    kernel = " ".join((group.no_stack_reason, *group.states, *group.waits_on))
    at = _position(group)
    if group.kind == "uninterruptible":
        reason = group.no_stack_reason
        place = _cut(reason.rpartition(" in ")[2], _MAX_NAME) if ", in " in reason else ""
        action = f"state D{f' in {place}' if place else ''}{f' at {at}' if at else ''}"
        return _RankCause("storage", action, "look at its mounts, devices and dmesg")
    activity = group.activity
    if child_cause := _child_cause(group, at):
        return child_cause
    if _STORAGE.search(kernel):
        action = f"waits for a file system at {at}"
        return _RankCause("storage", action, "look at its mounts and dmesg")
    of_verdict = _VERDICT_TEXTS.get(group.verdict or "")
    if activity in _FILE_ACTIVITIES and not of_verdict:
        action = f"{_FILE_ACTIVITIES[activity]} at {at}"
        return _RankCause("storage", action, "look at its file system")
    if of_verdict:
        return _RankCause("late", f"{of_verdict[0]} {at}", of_verdict[1])
    action, advice = _ACTIVITY_TEXTS.get(activity, ("stands in", "look there"))
    held = _awaited_object(group)
    waits = f", waiting for {held}" if held else ""
    return _RankCause("late", f"{action} {at}{waits}", advice)


def _awaited_object(group: Group) -> str:
    """What all ranks of a group wait for in the kernel; "": nothing worth a word, or different
    objects.
    """
    held = _COUNT_SUFFIX.sub("", group.waits_on[0]) if len(group.waits_on) == 1 else ""
    return "" if held.startswith(_TRIVIAL_WAITS) else _cut(held, MAX_LINE)


_GONE = _RankCause("gone", "{is|are} gone", "see dmesg and `nodeready cores`")
#: Kind of a group without a stack -> its cause.
_KIND_CAUSES = {
    "missing": _GONE, "dead": _GONE,
    "stopped": _RankCause("late", "stopped by a signal", "find the sender, then `kill -CONT PID`"),
    "frozen": _RankCause("late", "frozen by its cgroup", "find who froze it, then thaw it"),
    "traced": _RankCause("late", "held by a tracer", "find the tracer: ps -p TRACER"),
}  # fmt: skip
#: Verdict of the samples -> (action, advice).
_VERDICT_TEXTS = {
    "progressing": ("still works, at", "may be slow, or in a loop: look again"),
    "spinning": ("computes or loops at", "look there, and look again"),
}
#: State of proc(5) in which a process does nothing -> its cause.
_HELD_STATES = {
    "T": "a signal has stopped", FROZEN: "its cgroup has frozen", "t": "a tracer holds",
    "Z": "has ended", "X": "has ended",
}  # fmt: skip
#: Waits that add nothing to the state.
_TRIVIAL_WAITS = ("futex", "sleep")
#: Number of processes behind a wait of a group.
_COUNT_SUFFIX = re.compile(r" \(\d+\)$")
#: Activities with files -> the action.
_FILE_ACTIVITIES = {
    "checkpoint": "saves or loads a checkpoint", "file": "reads or writes files",
    "core": "has crashed: the kernel writes its core",
}  # fmt: skip
#: Activity -> (action, advice).
_ACTIVITY_TEXTS = {
    "debugger": ("is in a debugger at", "remove the breakpoint"),
    "input": ("waits for keyboard input at", "remove the input()"),
    "sleep": ("sleeps at", "look what it waits for"),
    "child": ("waits for a process that it started at", "look at that process"),
    "lock": ("waits for a lock or a thread at", "try --all-threads"),
    "file-lock": ("waits for a lock file at", "find its holder"),
    "exit": ("is at its end, at", "look at its threads and children"),
    "output": ("writes output that no process reads, at", "find the reader of its output"),
    "pipe": ("waits for a pipe at", "find the writer of the pipe"),
    "network": ("waits for the network at", "find the peer that should answer"),
    "asyncio": ("waits in asyncio's loop at", "try --all-threads"),
    "gil": ("waits for Python's lock at", "try --all-threads"),
    "compile": ("compiles at", "look at its compilers and its cache"),
    "import": ("imports modules at", "look at the file system"),
    "native": ("stands in", "look there; --native tells more"),
}  # fmt: skip
#: Activities in which a rank waits for single ranks, whose calls need not agree.
_RANK_ACTIVITIES = ("rank",)
#: Activities that end only when a user acts.
_USER_ACTIVITIES = ("debugger", "input", "core")
#: Results of the samples for active ranks.
_ACTIVE_VERDICTS = ("unsure", "spinning", "progressing")


def _is_pausing(group: Group) -> bool:
    """Whether a group sleeps for a time, and waits for no rank."""
    return group.activity == "sleep" and not group.role


def _is_at_exit(group: Group) -> bool:
    """Whether the ranks of a group are at the ends of their programs."""
    main = group.frames[: group.frames.index(THREAD)] if THREAD in group.frames else group.frames
    return group.no_stack_reason in (ENDED_INTERPRETER, EXITING, NO_CALL) or hints.is_at_exit(main)


#: Activities that keep no rank waiting.
_NEUTRAL_ACTIVITIES = ("idle", "agent", "worker")


class _VerdictBuilder:
    """All evidence on one job, and the decision."""

    def __init__(
        self, groups: Sequence[Group], report: WitnessReport, places: Iterable[tuple[Any, ...]],
        odd: OddRanks,
        thread_calls: Sequence[frozenset[str]],
    ) -> None:  # fmt: skip
        self.report, self.places, self.odd, self.thread_calls = report, places, odd, thread_calls
        self.node_of: dict[int | None, str] = {}
        self.roles = [group.role for group in groups]
        self.original_groups = tuple(groups)
        self.groups = list(groups)
        self.at = {rank: at for at, group in enumerate(groups) for rank in group.ranks}
        self.nodes = {node for group in groups for node in group.nodes}
        self.total = self.size(range(len(groups)))
        self.moving = sum(group.processes for group in groups if group.verdict == "progressing")
        self.statements = [
            (witness.name, statement)
            for witness in report.witnesses
            for statement in witness.statements
            # A variable of all nodes is no sign for or against one of them.
            if witness.name != "environment" or not self.nodes <= {*statement.nodes}
        ]  # fmt: skip
        self.victims = [at for at, role in enumerate(self.roles) if role == "victim"]
        self.waiting = self.size(self.victims)
        self.notes: list[str] = []
        #: Whether a witness names other suspects than the order of the groups.
        self.reorder = False

    def size(self, indexes: Iterable[int]) -> int:
        """The number of processes of these groups."""
        return sum(self.groups[at].processes for at in indexes)

    # --- Suspects.

    def of_ranks(self, ranks: Iterable[int], *reasons: str) -> Suspect:
        """Ranks with their nodes as a suspect."""
        return self.suspect(ranks, self.nodes_of(ranks), *reasons)

    def suspect(self, ranks: Iterable[int], nodes: Iterable[str], *reasons: str) -> Suspect:
        """A suspect with all evidence for and against it."""
        rank_set, node_set = set(ranks), set(nodes)
        for_, against = list(dict.fromkeys(filter(None, reasons))), list(self.notes)
        for name, statement in self.statements:
            if not self._concerns(statement, rank_set, node_set):
                continue
            text = f"{name}: {statement.text}"
            if statement.against:
                against.append(text)
            elif statement.weight:
                for_.append(text)
        if len(rank_set) <= 2:
            for_ += [
                f'logs: last line of rank {rank}, unlike the others\': "{self.report.last[rank]}"'
                for rank in sorted(rank_set)
                if self.report.last.get(rank)
                and not any(self.report.last[rank] in text for text in for_)
            ]
        return Suspect(
            tuple(sorted(rank_set)),
            tuple(sorted(node_set, key=natural)),
            tuple(dict.fromkeys(for_))[:_MAX_STATEMENTS],
            tuple(dict.fromkeys(against))[:_MAX_STATEMENTS],
        )

    @staticmethod
    def _concerns(statement: Statement, ranks: set[int], nodes: set[str]) -> bool:
        """Whether a statement is about some of these ranks, or about their nodes."""
        if statement.ranks:
            return not ranks.isdisjoint(statement.ranks)
        return bool(statement.nodes) and not nodes.isdisjoint(statement.nodes)

    def of_group(self, at: int) -> Suspect:
        group = self.groups[at]
        cause = _cause(group)
        reason = group.reason or (cause.action if self.roles[at] == "suspect" else "")
        return self.suspect(group.ranks, group.nodes, reason)

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The nodes of ranks, in natural order."""
        if not self.node_of:
            self.node_of = {place[2]: place[0] for place in self.places}
        nodes = {self.node_of[rank] for rank in ranks if rank in self.node_of}
        return tuple(sorted(nodes, key=natural))

    # --- The decision.

    def decide(self) -> Verdict:
        if 2 * self.moving > self.total:
            return self.not_stuck()
        strayed = [group for group in self.groups
                   if group.no_stack_reason.startswith(OTHER_JOB_START)]  # fmt: skip
        if strayed:
            return self.odd_ones(strayed[0].ranks, strayed[0].no_stack_reason)
        if self.odd.ranks:
            reason = say(f"{{has|have}} {self.odd.reason}", len(self.odd.ranks))
            return self.odd_ones(self.odd.ranks, reason)
        gone = [
            at for at, group in enumerate(self.groups)
            if group.kind in ("missing", "dead") or self._is_silent(at)
        ]  # fmt: skip
        alive = [at for at, role in enumerate(self.roles) if role == "suspect" and at not in gone]
        lags = self._strongest()
        named = [at for at in gone if self.groups[at].nodes or self._why_gone(at)]
        raised = [rank for rank in self.report.raised if rank in self.at]
        unexplained = not any(map(self._why_gone, gone))
        if gone and raised and unexplained:
            return self.ended_others(raised[0], gone)
        if gone and unexplained and not self.victims and (ending := self._at_exit(gone)):
            return self.cannot_end(ending, gone)
        if not alive and not lags and unexplained and (findings := self._unworkable(gone)):
            return self.environment(findings)
        if named or (gone and not alive and not lags):
            return self.gone(named or gone, gone)
        lagging = {rank for lag in lags for rank in lag.ranks}
        exonerated = [at for at in alive if self._is_exonerated(at)]
        for at in exonerated:
            self._exonerate(at)
        alive = [at for at in alive if at not in exonerated]
        disputed = [at for at in alive if not lagging.isdisjoint(self.groups[at].ranks)]
        if lags and (disputed or not alive):
            return self.late(lags, disputed)
        if alive:
            unrecorded = set(self.report.without_recording)
            deeper = [at for at in alive if unrecorded & set(self.groups[at].ranks)]
            # A log may be of an earlier attempt: it does not prove that the peers have called.
            if lags and not deeper and lags[0].witness != "logs":
                self.notes.append("by its stack alone, another rank waits for no rank")
                return self.late(lags, [])
            if lags:
                self.notes.append(f"{lags[0].witness}: {ranks_text(lags[0].ranks)} is late, too")
            if gone:
                self.notes.append(f"no node has {ranks_text(self.groups[gone[0]].ranks)}")
                self.reorder = True
            return self.stands(alive)
        return self.all_wait()

    def _is_silent(self, at: int) -> bool:
        """Nodes without an answer, for any reason."""
        return self.groups[at].kind == "no-data" and not self.groups[at].processes

    def _strongest(self) -> list[Lag]:
        """The lags of the best witness; a witness that names other ranks is noted."""
        best: list[Lag] = []
        for name in ("flight_recorder", "nccl_ras", "logs"):
            strong = [lag for lag in self.report.lags if lag.witness == name and lag.weight > 1]
            free = [lag for lag in strong if not lag.chained]
            if not best:
                best = free
            elif free and {r for lag in best for r in lag.ranks}.isdisjoint(
                r for lag in free for r in lag.ranks
            ):
                self.notes.append(f"{name}: names {ranks_text(free[0].ranks)} instead")
        if best:
            return best
        # Two weak witnesses that agree about a rank are as good as a strong one.
        weak = [lag for lag in self.report.lags if lag.weight == 1 and not lag.chained]
        for lag in weak:
            for other in weak:
                if lag.witness != other.witness and set(lag.ranks) & set(other.ranks):
                    return [lag]
            signs = {
                name for name, statement in self.statements
                if statement.weight
                and not statement.against
                and name != "environment"
                and set(statement.ranks) & set(lag.ranks)
            }  # fmt: skip
            alive = [self.roles[self.at[rank]] for rank in lag.ranks if rank in self.at]
            if len(signs) > 1 or (alive and set(alive) == {"suspect"}):
                return [lag]
        return []

    def _is_exonerated(self, at: int) -> bool:
        """Whether, by the recorder, all of a group have called the awaited collective."""
        ranks, called = self.groups[at].ranks, self.report.called
        return self.groups[at].kind == "stack" and bool(ranks) and all(r in called for r in ranks)

    def _exonerate(self, at: int) -> None:
        call = self.report.called[self.groups[at].ranks[0]]
        self.set_role(at, None, f"the flight recorder says that it has called {call}")
        self.roles[at] = None

    def set_role(self, at: int, role: str | None, reason: str) -> None:
        self.groups[at] = replace(self.groups[at], role=role, reason=reason)

    def odd_ones(self, ranks: Sequence[int], reason: str) -> Verdict:
        """Ranks that were started as part of another job."""
        self.reorder = True
        nodes = next(
            (group.nodes for group in self.groups if group.no_stack_reason == reason),
            self.nodes_of(ranks),
        )
        wait = f"; {self.waits()}" if self.victims else ""
        text = f"{ranks_text(ranks, nodes)} {reason}{wait}: what they were started with must agree"
        return self.build("disagree", text, [self.suspect(ranks, nodes, reason)])

    def not_stuck(self) -> Verdict:
        text = f"not stuck: {self.moving} of {self.total} ranks go on between the samples"
        if self.moving < self.total:
            text += "; the others may wait for them: look again with a longer --interval"
        return Verdict("not-stuck", text)

    # --- A rank is gone.

    def _why_gone(self, at: int) -> Statement | None:
        """The gravest statement about the nodes or ranks of a group."""
        group = self.groups[at]
        ranks, nodes = set(group.ranks), set(group.nodes) or self.nodes
        errors = [
            statement
            for name, statement in self.statements
            if name in ("kernel", "nccl_ras", "gpu")
            and statement.weight > 1
            and not statement.against
            and (self._concerns(statement, ranks, nodes) or nodes & set(statement.nodes))
        ]
        return max(errors, key=lambda statement: statement.weight, default=None)

    def gone(self, named: Sequence[int], gone: Sequence[int]) -> Verdict:
        silent = [at for at in named if self._is_silent(at)]
        first = next((at for at in named if self._why_gone(at)), named[0])
        group, statement = self.groups[first], self._why_gone(first)
        ranks = sorted({rank for at in named for rank in self.groups[at].ranks})
        nodes = tuple(dict.fromkeys(node for at in named for node in self.groups[at].nodes))
        name, number = ranks_text(ranks, nodes), max(1, len(ranks))
        wait = f"; {self.waits()}" if self.victims else ""
        if statement:
            is_elsewhere = len(statement.nodes) == 1 and not nodes
            place = f" on {fold(statement.nodes)}" if is_elsewhere else ""
            text = f"{say('{is|are}', number)} gone: {statement.text}{place}{wait}"
        elif silent or group.no_stack_reason.endswith("without an answer"):
            reason = self.groups[silent[0]].no_stack_reason if silent else "no answer"
            reason = _cut(reason, MAX_LINE)
            text = f": no answer of the node ({reason}){wait}: see whether it is alive"
        elif len(gone) == len(self.groups):
            has = say("{has|have}", len(ranks))
            text = f"{has} ended: nodeready postmortem shows who failed first"
        elif group.kind == "dead":
            why_ended = _cut(group.no_stack_reason, MAX_LINE)
            text = f"has ended ({why_ended}){wait}: see `nodeready cores` and dmesg"
        else:
            advice = "see dmesg, `nodeready cores`, the launcher's output"
            text = f": no node has {say('{it|them}', number)}{wait}: {advice}"
        text = f"{name}{'' if text[0] == ':' else ' '}{text}"
        suspects = [
            self.suspect(group.ranks, group.nodes, group.no_stack_reason)
            for group in (self.groups[at] for at in gone)
        ]
        suspects += [
            self.of_group(at) for at, role in enumerate(self.roles)
            if role == "suspect" and at not in gone
        ]  # fmt: skip
        return self.build("gone", text, suspects, () if statement else ("kernel", "logs"))

    def ended_others(self, rank: int, gone: Sequence[int]) -> Verdict:
        """A rank has raised an error, and other ranks have ended: those are its victims."""
        self.reorder = True
        ended = sorted({rank for at in gone for rank in self.groups[at].ranks})
        error = self.report.raised[rank]
        at = self.at[rank]
        action = _cause(self.groups[at]).action
        for other in gone:
            self.set_role(other, "victim", f"has ended after rank {rank} raised")
        self.set_role(at, "suspect", f"raised {error}")
        text = f"{ranks_text([rank], self.nodes_of([rank]))} raised {error}; {ranks_text(ended)} "
        text += say("{has|have} ended since", len(ended))
        return self.build("gone", text, [self.of_ranks([rank], action)])

    def _at_exit(self, gone: Sequence[int]) -> list[int]:
        """The groups that are not gone, if all of them are at the ends of their programs."""
        alive = [at for at in range(len(self.groups)) if at not in gone]
        is_known = not any(map(self._is_silent, gone))
        return alive if is_known and all(_is_at_exit(self.groups[at]) for at in alive) else []

    def cannot_end(self, ending: Sequence[int], gone: Sequence[int]) -> Verdict:
        """Ranks have ended, and the others are at the ends of their programs, too."""
        self.reorder = True
        for at in gone:
            self.set_role(at, None, "has ended, as all ranks are about to")
        for at in ending:
            self.set_role(at, "suspect", "is at the end of its program, and does not end")
        group, ranks = self.groups[ending[0]], {r for at in gone for r in self.groups[at].ranks}
        child = (
            None if THREAD in group.frames else _child_cause(replace(group, activity="child"), "")
        )
        action = child.action if child else _cause(group).action
        if THREAD in group.frames:
            action = f"waits for its thread at {_position(group)}"
        elif not group.frames:
            action = group.no_stack_reason
        text = f"{_name(group)}{_further(ending)}: is at the end of its program, and {action}; "
        text += f"{ranks_text(ranks)} {say('{has|have}', len(ranks))} ended: look there"
        return self.build("late", text, [self.of_group(at) for at in ending])

    def waits(self) -> str:
        return f"{self.waiting} {say('{rank waits|ranks wait}', self.waiting)} for it"

    def slow(self, at: int) -> str:
        """``, or it may be slow``: a step that is longer than the samples stands still as well."""
        group = self.groups[at]
        is_certain = (
            group.kind != "stack"
            or group.activity in _USER_ACTIVITIES
            or group.verdict == "progressing"
            or _held_child(group) is not None
        )
        pronoun = say("{it|they}", max(1, len(group.ranks)))
        return "" if is_certain else f", or {pronoun} may be slow"

    # --- A rank is late, by a strong witness; or the calls differ.

    def late(self, lags: Sequence[Lag], groups: Sequence[int]) -> Verdict:
        lag = max(lags, key=lambda lag: (lag.weight, len(lag.waiting)))
        self.reorder = True
        ranks = lag.ranks
        standing = [at for at in groups if not set(ranks).isdisjoint(self.groups[at].ranks)]
        standing = standing or sorted({self.at[rank] for rank in ranks if rank in self.at})
        name = ranks_text(ranks, self.nodes_of(ranks))
        site = f" ({lag.site})" if lag.site else ""
        count, wait = counted(len(lag.waiting), "rank"), say("{waits|wait}", len(lag.waiting))
        # An unreadable process does not show where the rank stands.
        is_seen = bool(standing) and self.groups[standing[0]].kind != "no-data"
        cause = _cause(self.groups[standing[0]]) if is_seen else None
        is_suspect = bool(standing) and self.roles[standing[0]] == "suspect"
        if lag.elsewhere and not is_suspect:
            kind = "disagree"
            text = f"{name} {say('{waits|wait}', len(ranks))} in {lag.elsewhere}, {count} in "
            text += f"{lag.call}{site}: they must agree"
            self.notes.append(f"it waits itself, in {lag.elsewhere}")
        elif lag.other:
            kind = "disagree"
            text = f"{name} called {lag.other}, {count} {lag.call}{site}: the calls must agree"
        else:
            has = say("{has|have}", len(ranks))
            text = f"{name} {has} not called {lag.call}{site}, which {count} {wait} in"
            if lag.silent:
                text = f"{name}: no record of it, while {count} {wait} in {lag.call}{site}"
            kind = "late"
            if cause and self.roles[standing[0]] != "victim":
                kind = cause.kind if cause.kind in ("loader", "storage") else "late"
                text += f": {cause.action}"
                # A rank that has timed out has waited for long.
                text += self.slow(standing[0]) if lag.witness != "logs" else ""
            elif cause and _position(self.groups[standing[0]]):
                text += f": it is at {_position(self.groups[standing[0]])}"
                self.notes.append("its stack waits as the others' do")
        reason = cause.action if cause and is_suspect else ""
        suspects = [self.of_ranks(ranks, reason)]
        if lag.other:
            self.notes.append("the calls alone do not show which side is wrong")
            suspects = [self.of_ranks(side, reason) for side in (ranks, lag.waiting)]
        for other in lags:
            if other is not lag and set(other.ranks) - set(ranks):
                suspects.append(self.of_ranks(other.ranks))
        return self.build(kind, text, suspects)

    # --- A rank waits for no rank, and other ranks wait for it.

    def stands(self, alive: Sequence[int]) -> Verdict:
        suspects = [self.of_group(at) for at in alive]
        self.reorder |= bool(self.victims) and min(self.victims) < max(alive)
        first = self.groups[alive[0]]
        cause, name = _cause(first), _name(first)
        if not self.victims:
            return self.nobody_waits(alive)
        if first.kind == "traced" and first.verdict is None and self.total == first.processes:
            return self.build("unclear", f"{name}: {cause.action}: {cause.advice}", suspects)
        wait = f"{self.waits()}{self.slow(alive[0])}"
        text = f"{name}{_further(alive)}: {cause.action}; {wait}: {cause.advice}"
        return self.build(cause.kind, text, suspects, ("flight_recorder",))

    def nobody_waits(self, alive: Sequence[int]) -> Verdict:
        """No rank waits for another one."""
        first, cause = self.groups[alive[0]], _cause(self.groups[alive[0]])
        suspects = [self.of_group(at) for at in alive]
        kinds = {_cause(self.groups[at]).kind for at in alive}
        name, suffix = _name(first), _further(alive)
        if first.processes == self.total:
            name = f"all {self.total} ranks" if self.total > 1 else name
        is_all = self.size(alive) == self.total
        groups = [self.groups[at] for at in alive]
        awake = all(group.verdict in _ACTIVE_VERDICTS and not group.role for group in groups)
        # Two samples of a running loop can be equal by chance.
        doubt = "all are awake: slow, or hung" if awake else ""
        if not awake and all(map(_is_pausing, groups)):
            doubt = "a pause, or a wait without an end"
        if is_all and doubt:
            text = f"{name}{suffix}: {cause.action}; {doubt}: look again, longer (--interval)"
            return self.build("unclear", text, [], ("flight_recorder", "logs"))
        waits = "no rank waits for another"
        if self.roles[alive[0]] == "suspect":
            may = self.size(
                at
                for at, group in enumerate(self.groups)
                if at not in alive and group.kind == "stack" and self.roles[at] is None
            )
            # Below a call of the user there may be the wait() of an asynchronous collective.
            waits = f"{counted(may, 'rank')} may wait for it (--native tells)" if may else waits
        slow = self.slow(alive[0]) if cause.kind in ("late", "loader") else ""
        text = f"{name}{suffix}: {cause.action}{slow}; {waits}: {cause.advice}"
        everywhere = len(alive) > 1 and is_all
        if everywhere and not any(self.roles[at] for at in alive) and len(kinds) == 1:
            # Which rank comes first is chance.
            text = f"{len(alive)} groups, and no stack is known to wait for another rank"
            if cause.kind == "late":
                return self.build("unclear", text, [], ("flight_recorder", "logs"))
        if len(kinds) == 1 and (first.kind != "stack" or cause.kind in ("loader", "storage")):
            return self.build(cause.kind, text, suspects)
        return self.build("unclear", text, suspects, ("flight_recorder", "logs"))

    # --- All wait.

    def all_wait(self) -> Verdict:
        may_wait = [at for at, role in enumerate(self.roles)
                    if role is None and advise.may_wait(self.groups[at])]  # fmt: skip
        if may_wait and self.victims:
            return self.may_wait_too(may_wait)
        unknown = [
            at for at, role in enumerate(self.roles)
            if role is None and self.groups[at].processes and not self._is_exonerated(at)
        ]  # fmt: skip
        unknown = [
            at for at in unknown if self.groups[at].activity not in _NEUTRAL_ACTIVITIES
        ] or unknown
        if unknown and all(self.groups[at].activity == "idle" for at in unknown):
            return self.idle(unknown)
        if unknown and not self.victims and self.groups[unknown[0]].frames:
            return self.nobody_waits(unknown)
        if unknown:
            first = self.groups[unknown[0]]
            unread = _cut(first.no_stack_reason, MAX_LINE)
            position = unread or first.reason or f"stands in {_position(first)}"
            name = _name(first)
            text = f"{name}: {position}: its part is unclear"
            still = any(advise.stands_still(self.groups[at]) for at in self.victims)
            moves = first.verdict == "progressing" or (
                first.verdict in _ACTIVE_VERDICTS and not still
            )
            if moves and self.victims:
                # Between two samples a long iteration and an endless one look alike.
                text = (
                    f"{name} moves at {_position(first)}, {self.waits()}: slow, or in a loop: "
                    "look again, longer (--interval)"
                )
            few = 2 * self.size(unknown) <= self.total
            named = self.victims and few and (still or first.verdict == "progressing")
            suspects = [self.of_group(at) for at in unknown] if named else []
            return self.build("unclear", text, suspects, ("flight_recorder", "logs"))
        chained = [lag for lag in self.report.lags if lag.chained and lag.weight > 1]
        if len(chained) > 1:
            first_lag, other = chained[:2]
            text = (
                f"{ranks_text(first_lag.waiting)}: in {first_lag.call} for "
                f"{ranks_text(first_lag.ranks)}, and {ranks_text(other.waiting)} in {other.call} "
                f"for {ranks_text(other.ranks)}: the order differs"
            )
            return self.build("disagree", text, [self.of_ranks(lag.ranks) for lag in chained[:2]])
        if any(self.groups[at].activity in _RANK_ACTIVITIES for at in self.victims):
            return self.each_other()
        places: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for at in self.victims:
            places.setdefault(_place_of_call(self.groups[at]), []).append(at)
        if len(places) > 1 and not self.report.common:
            return self.disagree(places)
        return self.together()

    def idle(self, indexes: Sequence[int]) -> Verdict:
        """Ranks have nothing to do, and the others wait for them."""
        first = self.groups[indexes[0]]
        number = max(1, len(first.ranks))
        held = f" ({_awaited_object(first)})" if _awaited_object(first) else ""
        text = f"{_name(first)}{_further(indexes)} {say('{is|are}', number)} idle: "
        text += f"{say('{it|they}', number)} {first.hint.partition(':')[0]}{held}"
        wait = f"; {self.waits()}" if self.victims else ""
        return self.build("unclear", f"{text}{wait}: a hang only if there should be work")

    def may_wait_too(self, indexes: Sequence[int]) -> Verdict:
        """Ranks that may wait for those that wait: neither side is known to be late."""
        first, waiting = self.groups[indexes[0]], self.groups[self.victims[0]]
        text = f"{_name(first)}{_further(indexes)} {say('{stands|stand}', len(first.ranks))} in "
        text += f"{_position(first)}, and may wait there, as for an asynchronous collective; "
        text += f"{ranks_text(waiting.ranks)}{_further(self.victims)} "
        text += f"{say('{waits|wait}', len(waiting.ranks))} in {_called(waiting)}: --native tells"
        return self.build("unclear", text, [], ("flight_recorder", "logs"))

    def _unworkable(self, gone: Sequence[int]) -> list[EnvironmentFinding]:
        """The variables that may keep the ranks apart, where all that are alive wait.

        gone: the groups that have ended; where all have, the variables may have ended them

        The rendezvous and Gloo connect when a group is created, NCCL in its first collective.
        """
        # A rank that ended during the look has its last stack.
        last = [hints.find(self.groups[at].frames) for at in gone if not self.victims]
        activities = [self.groups[at].activity for at in self.victims]
        activities += [hint.activity for hint in last if hint]
        starts = not {"start", "store"}.isdisjoint(activities)
        without_nccl = self.report.of("nccl_ras").absent[:1] == (NO_NCCL,)
        return [
            finding
            for finding in self.report.environment
            if starts
            or not finding.variable
            or finding.variable.startswith(("NCCL_", "CUDA_", "OMPI_", "UCX_"))
            or (without_nccl and finding.variable == "GLOO_SOCKET_IFNAME")
        ]

    def environment(self, findings: Sequence[EnvironmentFinding]) -> Verdict:
        """All wait, and a variable is known to keep ranks from reaching their peers."""
        self.reorder = True
        name = ranks_text(findings[0].ranks, findings[0].nodes)
        text = f"{name}: {findings[0].text}; {findings[0].advice}"
        suspects = [
            self.suspect(row.ranks, row.nodes, f"environment: {row.text}; {row.advice}")
            for row in findings
        ]
        return self.build("environment", text, suspects)

    def each_other(self) -> Verdict:
        """Ranks wait for single ranks, which wait for ranks as well."""
        order = sorted(self.victims, key=lambda at: self.groups[at].processes)
        first = [self.groups[at] for at in order[:2]]
        text = "; ".join(f"{ranks_text(group.ranks)} in {_called(group)}" for group in first)
        text += f"{_further(order[1:])}: all wait for each other: look at what they asked"
        return self.build("unclear", text, [], ("flight_recorder", "nccl_ras"))

    def disagree(self, places: Mapping[tuple[str, tuple[int, ...]], Sequence[int]]) -> Verdict:
        """The ranks wait in different calls. How many wait in each is no evidence."""
        order = sorted(places.values(), key=self.size)
        few, many = self.groups[order[0][0]], self.groups[order[-1][0]]
        names = {name for name, _ in places}
        calls = self.thread_calls
        if calls and any(calls[at] & names for at in self.victims):
            text = (
                f"{ranks_text(few.ranks)} in {_called(few)}, "
                f"{ranks_text(many.ranks)} in {_called(many)}, "
                "threads in the same: another order of two communicators?"
            )
            return self.build("unclear", text, [], ("flight_recorder", "nccl_ras"))
        text = f"{_name(few)} {say('{waits|wait}', len(few.ranks))} in {_called(few)}, "
        text += f"{ranks_text(many.ranks)} in {_called(many)}"
        if any(map(_PAIRWISE.match, names)) or len(places) > 2:
            text += ": all wait; the flight recorder would show for which rank"
            return self.build("unclear", text, [], ("flight_recorder", "nccl_ras"))
        if _called(few) == _called(many):
            # One function makes the call for two callers.
            pairs = zip(few.frames, many.frames, strict=False)
            callers = next((pair for pair in pairs if pair[0] != pair[1]), None)
            if callers:
                text = f"{_name(few)} {say('{waits|wait}', len(few.ranks))} in {_called(few)} for "
                text += f"{_place(callers[0])}, {ranks_text(many.ranks)} for {_place(callers[1])}"
        order_too = ", or their order in several groups," if len(names) == 1 else ""
        text += f": the calls{order_too} must agree"
        return self.build("disagree", text, [], ("flight_recorder",))

    def together(self) -> Verdict:
        """All wait in the same call: evidence of network, GPUs and kernel about single nodes."""
        first = self.groups[self.victims[0]] if self.victims else self.groups[0]
        call = self.report.common or _called(first)
        summary = f"all {self.total} ranks wait in {call}"
        stuck = sum(rank_call == call for rank_call in self.report.called.values())
        if 0 < stuck < self.total:
            summary = f"all {self.total} ranks wait, {stuck} in {call} with all of it"
        rate = self.report.bytes_per_s
        moves = rate is not None and rate >= witness_reader.MOVING_BYTES_PER_S
        signs = self._signs()
        if signs:
            strength, ranks, nodes, (quoted, *_) = signs[0]
            self.reorder = strength > 1
            suspect, name = self.suspect(ranks, nodes), ranks_text(ranks, tuple(nodes))
            if strength < 2:
                suspect = replace(suspect, against=(*suspect.against, "this is one weak sign"))
                text = f"{summary}; the only sign: {name}: {quoted}"
                return self.build("unclear", text, [suspect], ("flight_recorder", "network"))
            kind = "storage" if "file system" in quoted else "slow-node" if moves else "quiet"
            text = f"{name}: {quoted}; {summary}"
            return self.build(kind, text, [suspect])
        if moves and rate is not None:
            text = f"{summary}, and {rate / 1e6:.0f} MB/s move: slow, or a very large one"
            return self.build("moving", f"{text}: look again")
        busy = {
            rank
            for name, statement in self.statements
            if name == "gpu" and statement.text == witness_reader.GPU_COMPUTES
            for rank in statement.ranks
        }  # fmt: skip
        if 2 * len(busy) > self.total:
            text = f"{summary}, and the GPUs of {len(busy)} compute: a long step, or a loop"
            return self.build("moving", f"{text}: look again, longer (--interval)")
        if any(self.groups[at].verdict is None for at in self.victims):
            text = f"{summary}: one look cannot tell whether it moves: try --samples 2"
            return self.build("unclear", text, missing=("flight_recorder", "network"))
        doubt = self.size(
            at
            for at in self.victims
            if self.groups[at].verdict == "unsure"
            and self.groups[at].activity in _SLEEPING_ACTIVITIES
        )
        if 2 * doubt > self.total and rate is None and not self.report.common:
            text = f"{summary}, and wake up there: slow, or hung: look again, longer (--interval)"
            return self.build("unclear", text, missing=("flight_recorder", "network"))
        if self.total == 1 and not self.report.common:
            text = f"the only rank that was found waits in {call}: find the others"
            return self.build("unclear", text, missing=("flight_recorder", "nccl_ras"))
        quiet = " and no bytes move" if rate is not None else ""
        if not self.report.common and all(_RECEIVES.match(_call(self.groups[at]))
                                         for at in self.victims):  # fmt: skip
            text = f"{summary}: no rank sends: the order of sends and receives must agree"
            return self.build("disagree", text, missing=("flight_recorder",))
        advice = "look at the network and its ports"
        if first.activity in ("start", "store"):
            advice = "look at MASTER_ADDR:MASTER_PORT, the launchers and the network"
        # Python's frames do not show how many process groups the job has.
        text = f"{summary}{quiet}: {advice}, and at the order of calls in several groups"
        return self.build("quiet", text, missing=("flight_recorder", "network", "nccl_ras"))

    def _signs(self) -> list[tuple[int, set[int], set[str], list[str]]]:
        """The statements about some nodes or ranks but not all: the strongest first.

        Two witnesses with a statement about one node are as good as a strong one.
        """
        rows_of: dict[str, tuple[int, set[str], set[int], list[str]]] = {}
        maximum = max(1, len(self.nodes) // 2)
        for name, statement in self.statements:
            if statement.against or not statement.weight:
                continue
            nodes = set(statement.nodes) & self.nodes or set(self.nodes_of(statement.ranks))
            if statement.ranks and 2 * len(statement.ranks) > self.total and self.total > 2:
                continue
            # A sign on all nodes comes from the job, not from a node.
            if not nodes or (len(nodes) > maximum and statement.weight < 2):
                continue
            for node in nodes:
                weight, names, ranks, texts = rows_of.get(node, (0, set(), set(), []))
                # The weightiest statement is first.
                texts.insert(0 if statement.weight > weight else len(texts), statement.text)
                weight = max(weight, statement.weight)
                rows_of[node] = (weight, names | {name}, ranks | set(statement.ranks), texts)
        merged: dict[tuple[int, str], tuple[set[int], set[str], list[str]]] = {}
        for node, (weight, names, ranks, texts) in rows_of.items():
            strength = 2 if weight > 1 or len(names) > 1 else 1
            row = merged.setdefault((strength, texts[0]), (set(), set(), texts))
            row[0].update(ranks)
            row[1].add(node)
        rows = [(strength, *columns) for (strength, _), columns in merged.items()]
        return sorted(rows, key=lambda row: (-row[0], len(row[2]), sorted(row[2])))

    # --- The document.

    def build(
        self, kind: str, text: str, suspects: Sequence[Suspect] = (), missing: Sequence[str] = ()
    ) -> Verdict:
        """The verdict. missing: the witnesses that would help."""
        ras = self.report.of("nccl_ras").absent
        # Only NCCL's groups dump on request, and only they have a port.
        useless = {"flight_recorder", "nccl_ras"} if ras[:1] == (NO_NCCL,) else set()
        absent = tuple(
            f"{name}: {reason}{'' if _SETTLED.search(reason) else _OPTION_HINTS.get(name, '')}"
            for name in missing
            if name not in useless
            for reason in self.report.of(name).absent[:1]
        )
        unasked = ""
        if self.odd.unasked:
            unasked = f"; {ranks_text(self.odd.unasked)} not looked at ({self.odd.part})"
        return Verdict(kind, f"{text}{unasked}", tuple(suspects)[:_MAX_SUSPECTS], absent)


#: A reason that names its remedy, or has none.
_SETTLED = re.compile(r"--| has none")
_OPTION_HINTS = {"flight_recorder": "; --dump asks for a live one", "nccl_ras": "; --ras asks it"}


def _called(group: Group) -> str:
    """A call with the user's line, as in ``all_gather at step train.py:40``."""
    if group.user_frame is None:
        return _call(group)
    place = _place(group.user_frame)
    return place if group.frames[-1] == group.user_frame else f"{_call(group)} at {place}"


def _place_of_call(group: Group) -> tuple[str, tuple[int, ...]]:
    """The call that a group waits in, and of a collective the lines of the user's calls that lead
    to it: one collective at two places is called twice. A send and its receive are at two places,
    and ranks may wait for their GPUs anywhere.
    """
    is_paired = group.activity != "collective" or hints.in_pipeline(group.frames)
    return _call(group), () if is_paired else hints.call_site(group.frames)


def _call(group: Group) -> str:
    """The collective that a group waits in."""
    return call_of(group.frames) or group.kind


def call_of(frames: Sequence[Frame]) -> str:
    """The collective that a stack waits in: the outermost call of a library, else its leaf."""
    for frame in frames:
        if frame.file.endswith(_LIBRARIES) and not frame.function.startswith("_"):
            return _cut(frame.function.rpartition(".")[2], _MAX_NAME)
    return _cut(frames[-1].function, _MAX_NAME) if frames else ""


_LIBRARIES = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
    "deepspeed/comm/comm.py", "horovod/torch/mpi_ops.py",
)  # fmt: skip


def _ordered(groups: Sequence[Group], verdict: Verdict) -> tuple[int, ...]:
    """The groups of the suspects first, in the suspects' order, groups of only suspects before
    mixed ones; further groups in their order.
    """

    def place(at: int) -> tuple[int, float]:
        group = groups[at]
        for number, suspect in enumerate(verdict.suspects):
            shared = len(set(group.ranks) & set(suspect.ranks))
            if shared:
                return number, 1 - shared / len(group.ranks)
            if not group.ranks and not suspect.ranks and set(group.nodes) & set(suspect.nodes):
                return number, 0.0
        return len(verdict.suspects), 0.0

    return tuple(sorted(range(len(groups)), key=place))


def _with_roles(groups: Sequence[Group], verdict: Verdict, by_witness: bool) -> Iterator[Group]:
    """The groups with their final roles: a group is a suspect if a witness names all its ranks."""
    odd = verdict.kind == "disagree" and by_witness and len(verdict.suspects) == 1
    blames = odd or verdict.kind in _BLAMING_KINDS
    first = verdict.suspects[0] if blames and verdict.suspects else None
    for group in groups:
        is_named = first and group.ranks and set(group.ranks) <= set(first.ranks)
        if first and is_named and group.role == "victim":
            yield replace(group, role="suspect", reason=next(iter(first.for_), group.reason))
        else:
            yield group


#: Verdicts that name a cause.
_BLAMING_KINDS = ("late", "gone", "storage", "loader")


def decide(
    groups: Sequence[Group],
    report: WitnessReport,
    places: Iterable[tuple[Any, ...]],
    odd: OddRanks = NO_ODD_RANKS,
    thread_calls: Sequence[frozenset[str]] = (),
) -> Decision:
    """The verdict on groups in their order of suspicion, from the reports of all witnesses.

    places: (node, pid, rank, ...) of the processes; read only where a rank's node is needed
    thread_calls: for each group the collectives in which further threads of its processes wait
    """
    if not groups:
        return Decision(None, (), ())
    builder = _VerdictBuilder(groups, report, places, odd, thread_calls)
    verdict = builder.decide()
    order = _ordered(builder.groups, verdict) if builder.reorder else tuple(range(len(groups)))
    groups = tuple(_with_roles(builder.groups, verdict, builder.reorder))
    return Decision(verdict, groups, order, builder.reorder or groups != builder.original_groups)
