"""Group the ranks whose stacks are the same, from the raw traces of all nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodeready.agent.stacks.links import STORE
from nodeready.agent.stacks.ranks import CLAIMS, ELSEWHERE, NO_RAY_JOB, RAY_WORKER, claimed_job
from nodeready.agent.stacks.system_calls import MAX_CALLS
from nodeready.core.outcome import INCOMPLETE, Gap, node_gaps
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.nodeset import natural
from nodeready.runs.stacks import advise, document, evidence, hints, slow, verdict, witness_reader
from nodeready.runs.stacks import classify as links
from nodeready.runs.stacks.causes import call_of
from nodeready.runs.stacks.classify import MAIN, Classification, StackNumbers, classify, in_kernel
from nodeready.runs.stacks.document import ChildProcess, Frame, Group, Rank, Stacks, SystemCall
from nodeready.runs.stacks.hung_job import GroupLinks, OddRanks
from nodeready.runs.stacks.odd_threads import ThreadTable
from nodeready.runs.stacks.trace import Descendant, Trace, TracedProcess

# --- The processes of all traces, kept by their classification until all are read.

#: Kinds whose groups differ by their stacks; groups of further kinds differ by their reason.
WITH_STACK = ("stack", "uninterruptible")


@dataclass
class _ProcessRow:
    """Equal descendants of the ranks of a group."""

    child: Descendant  # the first
    words: Mapping[str, str]  # its texts, without numbers of processes and descriptors
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    stacks: set[int] = field(default_factory=set)  # the different stacks, of one path
    waits_on: set[str] = field(default_factory=set)


#: Pids and descriptors, which differ between processes.
_NUMBERS = re.compile(r"\d+")
_PIDS = re.compile(r"\b(pids?|child) \d+(, \d+)*")
#: Maximum different values of a field that are kept of a group.
_MAX_TEXTS, _MAX_ROWS = 64, 64
#: Maximum different values of a variable that are kept of a group; the words for all further ones.
_MAX_VALUES, OTHER_VALUES = 8, "other values"
#: Maximum characters of a command line in a reason.
_MAX_COMMAND = 60
#: Fields of a bucket that are sets.
_SETS = (
    "stacks", "natives", "thread_stacks", "awaited_threads", "holders", "commands", "numbers",
)  # fmt: skip


@dataclass
class Bucket:
    """Processes of one group."""

    kind: str  # as of a `document.Group`
    verdict: str | None  # likewise
    no_stack_reason: str  # likewise
    threads: list[tuple[str, int]] = field(default_factory=list)
    processes: list[Rank] = field(default_factory=list)  # their `Rank.group` is not yet known
    # the different stacks; None: of a process without a stack
    stacks: set[int | None] = field(default_factory=set)
    by_node: dict[str, set[int]] = field(default_factory=dict)  # node -> stacks of its processes
    native: int | None = None  # native frames of one process
    natives: set[int | None] = field(default_factory=set)  # the ranks with native frames
    wakeups: tuple[int, int] | None = None  # minimum and maximum wakeups of their main threads
    kernel: str = ""  # the function of the kernel that those in state D wait in
    master: str = ""
    # the number of processes with each, and the first with its numbers
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits_on: dict[str, tuple[int, str]] = field(default_factory=dict)
    children: dict[tuple[Any, ...], _ProcessRow] = field(default_factory=dict)  # of the ranks
    # a variable -> its value, `OTHER_VALUES` beyond the maximum -> the ranks with that value
    locals: dict[str, dict[str, list[int | None]]] = field(default_factory=dict)
    # connections and pipes to other ranks for which they wait
    ends: dict[links.Place, links.LinkEnds] = field(default_factory=dict)
    # the ranks for which all of them wait; a process without a rank has a negative number
    waits_for: tuple[int, ...] = ()
    clients: dict[int, str] = field(default_factory=dict)  # as of `GroupLinks`
    numbers: set[int] = field(default_factory=set)  # its own processes, likewise
    # the stacks of further threads that wait for ranks
    thread_stacks: set[int] = field(default_factory=set)
    # the command lines of its processes without a rank
    commands: set[str] = field(default_factory=set)
    # the threads that may have the locks for which the main threads wait, in words
    holders: set[str] = field(default_factory=set)
    # the threads for which the main threads wait
    awaited_threads: set[str] = field(default_factory=set)
    work: str = ""  # of the first process with any
    # (call, object without numbers) -> the call
    system_calls: dict[tuple[str, str], SystemCall] = field(default_factory=dict)
    is_count_stopped: bool = False  # strace has stopped early

    def _add_wakeups(self, wakeups: tuple[int, int] | None) -> None:
        if wakeups and self.wakeups:
            wakeups = min(self.wakeups[0], wakeups[0]), max(self.wakeups[1], wakeups[1])
        self.wakeups = wakeups or self.wakeups

    def add(self, process: TracedProcess, node: str, classification: Classification) -> None:
        stack, wakeups = classification.stack, classification.wakeups
        self.stacks.add(stack)
        if stack is not None:
            self.by_node.setdefault(node, set()).add(stack)
        if wakeups is not None:
            self._add_wakeups((wakeups, wakeups))
        if process.rank is None and len(self.commands) < _MAX_TEXTS:
            self.commands.add(process.command[:_MAX_COMMAND])
        self.work = self.work or classification.work
        if classification.thread != MAIN:
            self.awaited_threads.add(classification.thread)
        channel = process.wait_channel
        self.states[process.state[:1], "" if channel in ("0", "-") else channel] += 1
        waits_on = process.waits_on
        text = _PIDS.sub(r"\1 N", waits_on) if waits_on else waits_on
        count, first = self.waits_on.get(text, (0, waits_on))
        if count or len(self.waits_on) < _MAX_TEXTS:
            self.waits_on[text] = (count + 1, first)
        for text in process.locals:
            name, _, value = text.partition(" = ")
            if name in self.locals or len(self.locals) < _MAX_TEXTS:
                self._add_local(name, value, [process.rank])
        ranks = () if process.rank is None else (process.rank,)
        for call in process.system_calls:
            row = SystemCall(call.call, call.object, call.count, process.traced_s, ranks)
            self._add_system_call(row)
        if sum(call.count for call in process.system_calls) >= MAX_CALLS:
            self.is_count_stopped = True
        if not self.master:
            self.kernel, self.master = in_kernel(process), process.master

    def _add_local(self, name: str, value: str, ranks: Iterable[int | None]) -> None:
        values = self.locals.setdefault(name, {})
        is_kept = value in values or len(values) < _MAX_VALUES
        values.setdefault(value if is_kept else OTHER_VALUES, []).extend(ranks)

    def _add_system_call(self, call: SystemCall) -> None:
        key = call.call, _NUMBERS.sub("N", call.object)
        if earlier := self.system_calls.get(key):
            counts = earlier.calls + call.calls, earlier.seconds + call.seconds
            ranks = tuple(sorted({*earlier.ranks, *call.ranks}))
            call = SystemCall(call.call, earlier.object, *counts, ranks)
        self.system_calls[key] = call

    def add_below(
        self, rows: Iterable[Descendant], rank: int | None, numbers: Sequence[int],
        table: StackNumbers,
    ) -> None:  # fmt: skip
        """Count the descendants of one rank; equal ones of all ranks are one row."""
        for child in rows:
            stack = None if child.main is None else numbers[child.main]
            names = "command", "waits_on", "error"
            words = {name: _NUMBERS.sub("N", getattr(child, name)) for name in names}
            if stack is not None:
                # Rows differ by the awaited object; their place is the same.
                words["waits_on"] = ""
            path = None if stack is None else table.path_of[stack]
            key = child.kind, child.state[:1], child.wait_channel, *words.values(), path
            if key not in self.children and len(self.children) >= _MAX_ROWS:
                continue
            row = self.children.setdefault(key, _ProcessRow(child, words))
            row.count += 1
            row.waits_on.add(_NUMBERS.sub("N", child.waits_on))
            if rank is not None:
                row.ranks.add(rank)
            if stack is not None:
                row.stacks.add(stack)

    def take(self, other: Bucket) -> None:
        """Take over the processes of another group."""
        self.processes += other.processes
        for name in _SETS:
            getattr(self, name).update(getattr(other, name))
        for node, stacks in other.by_node.items():
            self.by_node.setdefault(node, set()).update(stacks)
        self.native = other.native if self.native is None else self.native
        self._add_wakeups(other.wakeups)
        self.states.update(other.states)
        for text, (count, first) in other.waits_on.items():
            self.waits_on[text] = (self.waits_on.get(text, (0, ""))[0] + count, first)
        for key, row in other.children.items():
            if (own_row := self.children.setdefault(key, row)) is not row:
                own_row.count += row.count
                own_row.ranks |= row.ranks
                own_row.stacks |= row.stacks
                own_row.waits_on |= row.waits_on
        for name, values in other.locals.items():
            for value, ranks in values.items():
                self._add_local(name, value, ranks)
        self.work = self.work or other.work
        self.ends.update(other.ends)
        self.clients.update(other.clients)
        self.waits_for = tuple(sorted({*self.waits_for, *other.waits_for}))
        self.is_count_stopped |= other.is_count_stopped
        for call in other.system_calls.values():
            self._add_system_call(call)


@dataclass
class TracedJob:
    """The processes of one job."""

    name: str = ""  # from Slurm's cgroup, else from the processes' environments
    user: str = ""  # owner of its processes; of a Slurm job, owner of the first that was read
    slurm: bool = False
    # its processes only claim the job: it is another user's, or runs on other nodes
    is_claim: bool = False
    ray: bool = False  # it has workers of Ray
    buckets: dict[tuple[Any, ...], Bucket] = field(default_factory=dict)
    # WORLD_SIZE -> the rank of each process with it; None: it has no number
    worlds: dict[int, list[int | None]] = field(default_factory=dict)
    count: int = 0
    threads: ThreadTable = field(default_factory=ThreadTable)

    def __post_init__(self) -> None:
        #: The users of a Slurm job.
        self.users = {self.user}

    def join(self, other: TracedJob) -> None:
        """Take over processes of the same user outside of the job's cgroup."""
        for key, bucket in other.buckets.items():
            if (own_bucket := self.buckets.setdefault(key, bucket)) is not bucket:
                own_bucket.take(bucket)
        for size, ranks in other.worlds.items():
            self.worlds.setdefault(size, []).extend(ranks)
        self.count += other.count
        self.threads.join(other.threads)

    @property
    def _all_processes(self) -> list[Rank]:
        return [process for bucket in self.buckets.values() for process in bucket.processes]

    @property
    def ranks(self) -> set[int]:
        return {process.rank for process in self._all_processes if process.rank is not None}

    @property
    def nodes(self) -> set[str]:
        return {process.node for process in self._all_processes}

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of its nodes, and of its ranks: processes with one rank count once."""
        processes = self._all_processes
        ranks = {process.rank for process in processes}
        count = len(ranks - {None}) + sum(process.rank is None for process in processes)
        return len(self.nodes), count


class TraceCollector:
    """Reads the traces one at a time, and keeps only what the groups need."""

    def __init__(self, all_threads: bool) -> None:
        self.all_threads = all_threads
        self.stacks = StackNumbers()
        #: Jobs by Slurm's cgroup, else by the user and the processes' environments; claims apart.
        self.jobs: dict[tuple[str, str, str, bool], TracedJob] = {}
        self.nodes: dict[str, None] = {}
        #: Nodes with processes of any job.
        self.answered: set[str] = set()
        #: Nodes on which Slurm does not run the job, and that have processes which claim it.
        self.elsewhere: set[str] = set()
        self.gaps: dict[str, Gap] = {}
        self.instead: dict[str, Sequence[str]] = {}
        self.started: list[str] = []
        #: Why only a part of the job was requested.
        self.part = ""
        self._texts: dict[str, str] = {}
        self.evidence = evidence.Evidence()
        self.links = links.Links()
        self.paces = slow.PaceReader()

    def read(self, trace: Trace) -> None:
        node, interval = trace.node, trace.interval_s
        self.nodes[node] = None
        self.started.append(trace.started)
        self.part = self.part or trace.part
        if trace.error:
            self.gaps[node] = Gap(INCOMPLETE, trace.error)
        if trace.processes:
            self.answered.add(node)
        elif trace.instead:
            self.instead[node] = trace.instead
        numbers = self.stacks.numbers(trace)
        self.paces.read(trace, numbers, self.stacks)
        # Each trace brings new string objects, and most of them are equal.
        shared = self._texts.setdefault
        for process in trace.processes:
            job = self._job_of(process, node)
            job.count += 1
            job.ray |= process.command.startswith(RAY_WORKER)
            rank, world_size = _rank(process.rank), process.world_size
            if world_size is not None:
                job.worlds.setdefault(world_size, []).append(rank)
            job.threads.read((rank, node, process.pid), process.thread_rows, trace.thread_waits)
            classification = classify(process, numbers, self.stacks, interval)
            threads = self._threads(process, numbers) if self.all_threads else []
            is_stack = classification.kind == "stack"
            ends = links.ends(process, classification.thread) if is_stack else None
            if process.ends:
                self.links.read(node, process)
            native = None if process.native is None else numbers[process.native]
            activity = None if native is None else self.stacks.native_activity(native)
            key = (links.hosts(ends), activity, *self._key(classification, threads))
            bucket = job.buckets.get(key)
            if bucket is None:
                kind = classification.kind, classification.verdict, classification.reason
                bucket = job.buckets[key] = Bucket(*kind, threads)
            bucket.add(process, node, classification)
            if ends:
                bucket.ends[node, process.pid] = ends
            if native is not None:
                bucket.natives.add(rank)
                bucket.native = native if bucket.native is None else bucket.native
            if classification.thread == MAIN:
                bucket.holders.add(links.possible_holder(process, numbers, self.stacks))
            bucket.thread_stacks |= self._waiting_threads(process, numbers, classification.thread)
            if process.below:
                bucket.add_below(process.below, rank, numbers, self.stacks)
            state, wait, note = process.state, process.wait_channel, process.note
            if classification.kind == "traced" and process.tracer and not note:
                note = f"traced by pid {process.tracer}"
            identity = node, process.pid, rank, _rank(process.local_rank)
            waits = shared(state, state), shared(wait, wait), classification.cpu_s
            bucket.processes.append(Rank(*identity, *waits, 0, shared(note, note)))

    def _job_of(self, process: TracedProcess, node: str) -> TracedJob:
        """The job of a process, or the claim to it."""
        user, note = process.user, process.note
        is_claim = note.startswith(CLAIMS)
        slurm = "" if is_claim else process.slurm_job
        if is_claim and note.endswith(ELSEWHERE):
            self.elsewhere.add(node)
        name = claimed_job(note) if is_claim else process.job
        job_key = (slurm, "", "", False) if slurm else ("", user, name, is_claim)
        job = self.jobs.get(job_key)
        if job is None:
            name = slurm or self._texts.setdefault(name, name)
            user = self._texts.setdefault(user, user)
            job = self.jobs[job_key] = TracedJob(name, user, bool(slurm), is_claim)
        if slurm:
            job.users.add(user)
        return job

    def _key(
        self, classification: Classification, threads: list[tuple[str, int]]
    ) -> tuple[Any, ...]:
        """The key of a process's group; its last item is the verdict."""
        path = None
        site: tuple[int, ...] = ()
        if classification.stack is not None and classification.kind in WITH_STACK:
            path = self.stacks.path_of[classification.stack]
            reading = self.stacks.reading(classification.stack)
            # A computing loop may be at any line; a waiting rank stands at one.
            waits = classification.verdict in ("blocked", "unsure", None)
            waits |= reading.for_ranks and classification.verdict == "spinning"
            if classification.kind == "stack" and waits:
                site = reading.site
        other_stacks = tuple(sorted(self.stacks.path_of[stack] for _, stack in threads))
        place = path, site, other_stacks
        return (classification.kind, classification.reason, *place, classification.verdict)

    def each_job(self) -> list[TracedJob]:
        """The jobs, beginning with the job to show; those that processes only claim are last.
        Where half of the nodes have a Slurm job, Slurm jobs come first, by their cgroups: a node
        can fake one, but no user can. Then the job on the most nodes, with the most ranks.
        Processes of a job's user outside of its cgroup belong to it; those of other users do not.
        """
        jobs = [job for job in self.jobs.values() if job.slurm]
        managed = {node for job in jobs for node in job.nodes}
        with_ranks = {node for job in self.jobs.values() if not job.is_claim for node in job.nodes}
        believed = 2 * len(managed) >= len(with_ranks)
        by_name = {job.name: job for job in jobs}
        for job in self.jobs.values():
            if job.slurm:
                continue
            if home := self._home(job, by_name):
                home.join(job)
            else:
                jobs.append(job)

        def order(job: TracedJob) -> tuple[Any, ...]:
            names = natural(job.name), natural(job.user)
            is_believed = believed and job.slurm
            return job.is_claim, not is_believed, *(-count for count in job.size), *names

        return sorted(jobs, key=order)

    def _home(self, job: TracedJob, slurm_jobs: Mapping[str, TracedJob]) -> TracedJob | None:
        """The job to which a user's processes outside of its cgroup belong, or to which workers do
        that Ray has started before their job was known; None: they are a job themselves.
        """
        if job.is_claim:
            return None
        if job.ray and job.name == NO_RAY_JOB:
            ray_jobs = [other for other in self.jobs.values() if other.ray and not other.is_claim]
            ray_jobs = [row for row in ray_jobs if row.user == job.user and row is not job]
            return ray_jobs[0] if len(ray_jobs) == 1 else None
        home = slurm_jobs.get(job.name)
        return home if home and job.user in home.users else None

    def _waiting_threads(
        self, process: TracedProcess, numbers: Sequence[int], thread: str
    ) -> set[int]:
        """The stacks of further threads that wait for ranks, beside the classified thread."""
        rows = process.samples[-1].threads if process.samples else ()
        stacks = {numbers[at] for name, at in rows if name not in (MAIN, thread)}
        return {stack for stack in stacks if self.stacks.reading(stack).for_ranks}

    def _threads(self, process: TracedProcess, numbers: Sequence[int]) -> list[tuple[str, int]]:
        """The further threads at the last sample with a stack."""
        threads = (row.threads for row in reversed(process.samples) if row.main is not None)
        return [(name, numbers[at]) for name, at in next(threads, ()) if name != MAIN]


def _rank(value: int | None) -> int | None:
    """A valid rank, else None: launchers write -1 for "none", and no job is larger."""
    return value if value is not None and 0 <= value < advise.MAX_RANKS else None


# --- The groups.


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Without garbage collection: traces have no cycles, and the search would cost a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _merged(buckets: Mapping[tuple[Any, ...], Bucket]) -> list[Bucket]:
    """The buckets; one without a verdict joins the largest that is equal otherwise: where only
    some ranks at one place woke up, it is unknown which of them stand still.
    """
    places: dict[tuple[Any, ...], dict[str | None, Bucket]] = {}
    natives_of: dict[tuple[Any, ...], set[str]] = {}
    for key in buckets:
        natives_of.setdefault(key[2:-1], set()).update(() if key[1] is None else (key[1],))
    for key, bucket in buckets.items():
        # Ranks that wait for ranks are joined at any place. Ranks without native frames join those
        # with native frames if these are all at one place.
        natives = natives_of[key[2:-1]]
        native = min(natives) if key[1] is None and len(natives) == 1 else key[1]
        place = places.setdefault((bool(bucket.waits_for), native, *key[2:-1]), {})
        if bucket.verdict in place:
            place[bucket.verdict].take(bucket)
        else:
            place[bucket.verdict] = bucket
    merged = []
    for place in places.values():
        if "unsure" in place and "blocked" in place:
            place["unsure"].take(place.pop("blocked"))
        unseen = place.pop(None, None)
        if unseen and place:
            max(place.values(), key=lambda bucket: len(bucket.processes)).take(unseen)
        elif unseen:
            merged.append(unseen)
        merged += place.values()
    return merged


def _frames(bucket: Bucket, table: StackNumbers) -> tuple[Frame, ...]:
    """The stack of a kind without one, shown only if all its processes have the same."""
    stacks = sorted(stack for stack in bucket.stacks if stack is not None)
    one_path = len({table.path_of[stack] for stack in stacks}) == 1
    return table.frames(stacks) if one_path and None not in bucket.stacks else ()


def _set_awaited_ranks(job: TracedJob, reader: TraceCollector) -> None:
    if not any(bucket.ends for bucket in job.buckets.values()):
        return
    rank_of: dict[links.Place, int] = {}
    groups = []
    for bucket in job.buckets.values():
        ranks: dict[links.Place, int] = {}
        for p in bucket.processes:
            number = -1 - len(rank_of) - len(ranks) if p.rank is None else p.rank
            ranks[p.node, p.pid] = number
        rank_of |= ranks
        bucket.numbers = {*ranks.values()}
        hint = _hint(bucket, _frames(bucket, reader.stacks), ())
        activity = hint.activity if hint else ""
        if activity == "sleep" and bucket.verdict != "unsure":
            # It does not poll.
            activity = ""
        awake = bucket.verdict in ("unsure", "progressing")
        wait = frozenset(ranks.values()), activity, bucket.ends, len(bucket.processes), awake
        groups.append(links.LinkWait(*wait))
    waiting_for = links.waited_for(groups, reader.links, rank_of, hints.FOR_RANKS)
    for bucket, waited_ranks in zip(job.buckets.values(), waiting_for, strict=True):
        bucket.waits_for = waited_ranks if bucket.verdict != "progressing" else ()
        for (node, _), row in bucket.ends.items():
            owners = ((reader.links.owner(node, end), name) for name, end in row.side_ends)
            bucket.clients |= {rank_of[owner]: name for owner, name in owners if owner in rank_of}


def _awaited(pairs: Sequence[tuple[Group, Bucket | None]]) -> set[int] | None:
    """Indexes of the groups for which others wait, by what the kernel shows; None: not known."""
    waiting = [bucket for group, bucket in pairs if bucket and advise.is_waiting(group)]
    if not waiting or not all(bucket.waits_for for bucket in waiting):
        return None
    numbers = {number for bucket in waiting for number in bucket.waits_for}
    return {at for at, (_, bucket) in enumerate(pairs) if bucket and bucket.numbers & numbers}


def _group(bucket: Bucket, table: StackNumbers, order: Mapping[str, int]) -> Group:
    reasons = [_place_text(bucket), _switches_text(bucket), _native_coverage(bucket)]
    reasons += [_COUNT_STOPPED] if bucket.is_count_stopped else []
    frames = _frames(bucket, table)
    native = () if bucket.native is None else table.frames([bucket.native])
    hint = _hint(bucket, frames, native)
    if bucket.waits_for:
        ranks = [number for number in bucket.waits_for if number >= 0]
        hint = hints.for_rank(advise.few_ranks(ranks) if ranks else "another process")
    nodes = {process.node for process in bucket.processes}
    return Group(
        bucket.kind, bucket.verdict,
        tuple(sorted({process.rank for process in bucket.processes if process.rank is not None})),
        tuple(sorted(nodes, key=order.__getitem__)), frames,
        # A moving rank waits for nothing.
        hint.text if hint and bucket.verdict != "progressing" else "",
        bucket.no_stack_reason, len(frames), len(bucket.processes), native,
        tuple(document.StackThread(name, table.frames([stack])) for name, stack in bucket.threads),
        reason="; ".join(filter(None, reasons)), user_frame=hints.user_frame(frames),
        states=_states(bucket), waits_on=_waits_on(bucket), children=_child_rows(bucket, table),
        locals=_locals(bucket),
        system_calls=tuple(sorted(bucket.system_calls.values(), key=lambda row: -row.calls)),
        activity=hint.activity if hint else "",
        wakeups=bucket.wakeups[0] if bucket.wakeups else None,
        work=bucket.work if bucket.verdict in ("progressing", "spinning") else "",
    )  # fmt: skip


def _hint(
    bucket: Bucket, frames: tuple[Frame, ...], native: tuple[Frame, ...]
) -> hints.Hint | None:
    if bucket.kind == "uninterruptible":
        return hints.in_kernel(bucket.kernel) or hints.find(frames, native)
    if bucket.kind != "stack":
        return None
    for mark in (links.THREAD, links.HOLDER):
        if mark in frames:
            # The kernel's facts are those of the main thread, which only waits for this one.
            at, is_lock = frames.index(mark), mark == links.HOLDER
            hint = hints.of_thread(frames[:at], frames[at + 1 :], native, lock=is_lock)
            is_store = bucket.ends and all(e.direct == (STORE,) for e in bucket.ends.values())
            return hints.STORE if hint is None and is_store else hint
    channels = {channel for _, channel in bucket.states}
    waits = {text.partition(" ")[0]: text for text in bucket.waits_on}
    channel = channels.pop() if len(channels) == 1 else ""
    waits_on = next(iter(waits.values())) if len(waits) == 1 else ""
    hint = hints.find(frames, native, channel=channel, waits_on=waits_on, master=bucket.master)
    # A thread that waits for ranks may hold the lock.
    return hints.NATIVE if hint and hint.activity == "lock" and bucket.thread_stacks else hint


def _place_text(bucket: Bucket) -> str:
    """The program of processes without a rank, the thread whose stack follows that of the main
    thread, and the thread that may have its lock: each if all have the same.
    """
    commands = bucket.commands
    if len(commands) > 1:
        commands = {_NUMBERS.sub("N", command) for command in commands}
    (command, *other_commands) = commands or ("",)
    (thread, *other_threads) = bucket.awaited_threads or ("",)
    command += f" ({role})" if (role := hints.role_of(command)) else ""
    texts = [f"it is {command}" if command and not other_commands else ""]
    texts += [f"it stands in thread {thread}" if thread and not other_threads else ""]
    texts += bucket.holders if len(bucket.holders) == 1 else ()
    return "; ".join(filter(None, texts))


def _switches_text(bucket: Bucket) -> str:
    if bucket.verdict != "unsure" or not bucket.wakeups:
        return ""
    least, highest = bucket.wakeups
    times = f"{least}" if least == highest else f"{least} to {highest}"
    times = "once" if times == "1" else f"{times} times"
    return f"woke up {times} between the samples: it polls, or is slow"


def _native_coverage(bucket: Bucket) -> str:
    """Which ranks have native frames, where only some were unwound."""
    if not bucket.natives or len(bucket.natives) == len(bucket.processes):
        return ""
    ranks = [rank for rank in bucket.natives if rank is not None]
    owner = advise.few_ranks(sorted(ranks)) if ranks else "one process"
    return f"native frames are of {owner} alone"


#: Why the rates of system calls are those of less than the time that was asked for.
_COUNT_STOPPED = f"strace stopped after {MAX_CALLS:,} system calls"


def _locals(bucket: Bucket) -> tuple[str, ...]:
    """The variables, as in ``i = 7``; where they differ, ``i = 4 (ranks 1-2), 7 (rank 3)``."""
    texts = []
    for name, values in bucket.locals.items():
        sets = [(v, {rank for rank in ranks if rank is not None}) for v, ranks in values.items()]
        rows = [(value == OTHER_VALUES, sorted(ranks), value) for value, ranks in sets]
        is_equal = len(rows) == 1 and len(next(iter(values.values()))) == len(bucket.processes)
        parts = [
            value if is_equal or not ranks else f"{value} ({advise.few_ranks(ranks)})"
            for _, ranks, value in sorted(rows)
        ]
        texts.append(f"{name} = {', '.join(parts)}")
    return tuple(texts)


def _states(bucket: Bucket) -> tuple[str, ...]:
    """State and wait channel with their count, as in ``S futex_wait_queue (7)``."""
    rows = [(" ".join(filter(None, key)), n) for key, n in bucket.states.most_common() if key[0]]
    return _counted(rows, len(bucket.processes))


def _waits_on(bucket: Bucket) -> tuple[str, ...]:
    waits = ((text, *row) for text, row in bucket.waits_on.items() if text)
    rows = [(first if count == 1 else text, count) for text, count, first in waits]
    return _counted(sorted(rows, key=lambda row: -row[1]), len(bucket.processes))


#: Maximum texts of a field that a group shows.
_MAX_SHOWN = 8


def _counted(rows: Sequence[tuple[str, int]], total: int) -> tuple[str, ...]:
    """Each text with its count, where there are several processes."""
    texts = [f"{text} ({count})" if total > 1 else text for text, count in rows]
    further = [f"{len(texts) - _MAX_SHOWN} more"] if texts[_MAX_SHOWN:] else []
    return (*texts[:_MAX_SHOWN], *further)


def _child_rows(bucket: Bucket, table: StackNumbers) -> tuple[ChildProcess, ...]:
    """The descendants of the ranks, the active ones first, the fewest first."""
    ordered = []
    for row in bucket.children.values():
        waits_on = row.child.waits_on if row.count == 1 else ""
        if row.count > 1 and len(row.waits_on) == 1:
            (waits_on,) = row.waits_on
        words: Mapping[str, str] = row.words
        if row.count == 1:
            words = {"command": row.child.command, "error": row.child.error}
        frames = table.frames(sorted(row.stacks)) if row.stacks else ()
        channel = row.child.wait_channel
        hint = hints.in_kernel(channel) if row.child.state[:1] == "D" else None
        hint = hint or hints.find(frames, channel=channel, waits_on=row.child.waits_on)
        child = ChildProcess(
            row.child.kind, words["command"], row.count, tuple(sorted(row.ranks)),
            row.child.state, channel, waits_on, frames, words["error"], hint.text if hint else "",
        )  # fmt: skip
        waits = hint is not None and hint.activity == "worker" and not hints.user_frame(frames)
        ordered.append(((waits, row.count, child.ranks[:1]), child))
    return tuple(child for _, child in sorted(ordered, key=lambda pair: pair[0]))


def _silent_groups(gaps: Mapping[str, Gap]) -> Iterator[Group]:
    """The nodes without an answer, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for node in sorted(gaps, key=natural):
        reasons.setdefault(gaps[node].reason.replace(node, "NODE"), []).append(node)
    for reason, nodes in reasons.items():
        text = reason if len(nodes) > 1 else gaps[nodes[0]].reason
        yield Group("no-data", None, (), tuple(nodes), no_stack_reason=text)


def _forks(groups: Sequence[Group]) -> list[int]:
    """For each group the index of the first frame that it shares with no larger group. Of two of
    one size, that with the lower rank counts as larger.
    """
    tree: dict[tuple[int, str, str], int] = {}
    forks = [0] * len(groups)
    for at in sorted(range(len(groups)), key=lambda at: _largest_first(groups[at])):
        place = depth = 0
        for frame in groups[at].frames:
            place = tree.get((place, frame.function, frame.file), 0)
            if not place:
                break
            depth += 1
        forks[at] = depth
        place = 0
        for frame in groups[at].frames if groups[at].kind == "stack" else ():
            place = tree.setdefault((place, frame.function, frame.file), len(tree) + 1)
    return forks


def _largest_first(group: Group) -> tuple[bool, int, tuple[int, ...]]:
    return group.kind != "stack", -group.processes, group.ranks[:1]


def _different_code(buckets: Iterable[Bucket], table: StackNumbers) -> list[advise.DifferentCode]:
    """The files whose lines differ by node in equal calls: see `advise.DifferentCode`."""
    paths: dict[int, dict[str, set[int]]] = {}
    ranks: Counter[tuple[int, str]] = Counter()
    for bucket in buckets:
        if bucket.kind != "stack" or bucket.verdict == "progressing":
            continue
        for node, stacks in bucket.by_node.items():
            for stack in stacks:
                paths.setdefault(table.path_of[stack], {}).setdefault(node, set()).add(stack)
        for process in bucket.processes:
            ranks[id(bucket), process.node] += 1
    different: dict[str, advise.DifferentCode] = {}
    least = min(ranks.values(), default=0)
    for nodes in paths.values():
        for difference in advise.different_code(nodes, table.calls, least):
            different.setdefault(difference.file, difference)
    return list(different.values())


_ROLE_ORDER = {"suspect": 0, None: 1, "victim": 2}


def _suspicion(group: Group, everything: int) -> tuple[int, ...]:
    """The order: suspects before victims; kinds without a stack, unless they are the most;
    standing before moving groups; then few before many.
    """
    size = max(group.processes, len(group.ranks), len(group.nodes))
    usual = group.kind != "stack" and 2 * size > everything and group.role != "suspect"
    role = len(_ROLE_ORDER) if usual else _ROLE_ORDER[group.role]
    # The holder of the lock may be another suspect; a rank that waits in C may wait for one.
    waits = group.activity in ("native", "file-lock")
    kind = document.KINDS.index(group.kind), waits, group.verdict == "progressing"
    return role, *kind, size, group.ranks[0] if group.ranks else advise.MAX_RANKS, group.fork


def _read_witnesses(
    observed: evidence.Evidence, buckets: Sequence[Bucket], count: int
) -> evidence.WitnessReport:
    """The statements of the witnesses. Of a job that progresses, momentary counts say nothing."""
    if not observed:
        return evidence.WitnessReport()
    moving = sum(len(bucket.processes) for bucket in buckets if bucket.verdict == "progressing")
    processes = (process for bucket in buckets for process in bucket.processes)
    return witness_reader.read_witnesses(observed, processes, moving=2 * moving > count)


def _links_of(bucket: Bucket | None, table: StackNumbers) -> GroupLinks:
    if bucket is None:
        return GroupLinks()
    calls = frozenset(call_of(table.calls(stack)) for stack in bucket.thread_stacks)
    return GroupLinks(calls, bucket.waits_for, bucket.clients)


def _with_stray_reason(lost: Group, job: TracedJob, jobs: Iterable[TracedJob]) -> Group:
    """The missing ranks, with the reason if they are all of another job of the same user."""
    for other in jobs:
        if other is job or other.is_claim or other.ranks != set(lost.ranks):
            continue
        if other.users & job.users and other.worlds.keys() == job.worlds.keys():
            nodes = tuple(sorted(other.nodes, key=natural))
            names = (other.name or "another job", job.name)
            texts = ", not ".join(sanitise(name, evidence.MAX_LINE) for name in names)
            reason = f"{verdict.OTHER_JOB_START} {texts}"
            return dataclasses.replace(lost, nodes=nodes, no_stack_reason=reason)
    return lost


def _odd_world(job: TracedJob) -> tuple[tuple[int, ...], str]:
    """The few ranks with another WORLD_SIZE than most ranks, and that WORLD_SIZE."""
    if len(job.worlds) < 2:
        return (), ""
    by_world = {size: {r for r in ranks if r is not None} for size, ranks in job.worlds.items()}
    usual = max(by_world, key=lambda size: len(by_world[size]))
    few = {size: ranks for size, ranks in by_world.items() if size != usual}
    ranks = set().union(*few.values())
    if 2 * len(ranks) >= len(job.ranks) or ranks & by_world[usual]:
        return (), ""
    sizes = ", ".join(map(str, sorted(few)))
    return tuple(sorted(ranks)), f"WORLD_SIZE {sizes}, not {usual} as the others"


def _with_pace(decided: verdict.Decision, paced: document.Verdict) -> verdict.Decision:
    """The decision on a job that may be slow: where the ranks stood at the end proves nothing."""
    slow_ranks = {rank for suspect in paced.suspects for rank in suspect.ranks}
    role = {True: "suspect", False: None}
    groups = tuple(
        dataclasses.replace(group, role=role[not slow_ranks.isdisjoint(group.ranks)], reason="")
        for group in decided.groups
    )
    order = sorted(decided.order, key=lambda at: groups[at].role is None)
    return verdict.Decision(paced, groups, tuple(order), by_witness=True)


def _other_job(other: TracedJob, job: TracedJob) -> document.OtherJob:
    is_stranger = other.name == job.name != ""
    nodes = tuple(sorted(other.nodes, key=natural))
    return document.OtherJob(other.name, other.user, other.count, is_stranger, nodes)


def group(
    traces: Iterable[Trace], gaps: Mapping[str, Gap], *, all_threads: bool = False,
    started: str = "", finished: str = "", complete: bool = True,
) -> Stacks:  # fmt: skip
    """All traces as one document, the most suspicious group first. No trace is kept.
    traces: checked by `trace.read`; of several jobs the first of `TraceCollector.each_job` is
            grouped, and the advice names the rest
    gaps:   node -> why it gave no answer; read after all traces (`trace.read_directory`)
    all_threads: group ranks only if their further threads stand at the same places too
    complete: False: no rank counts as missing, because not all nodes were asked
    """
    with _garbage_collection_off():
        reader = TraceCollector(all_threads)
        for trace in traces:
            reader.read(trace)
            reader.evidence.read(trace)
        return _grouped(reader, gaps, started, finished, complete)


def _grouped(
    reader: TraceCollector, gaps: Mapping[str, Gap], started: str, finished: str, complete: bool
) -> Stacks:
    all_gaps = {**gaps, **reader.gaps}
    order = {node: at for at, node in enumerate(sorted(reader.nodes, key=natural))}
    jobs = reader.each_job()
    if not jobs or jobs[0].is_claim:
        # A process that only claims the job is no rank of it, even where the job has no rank.
        jobs = [TracedJob(jobs[0].name if jobs else ""), *jobs]
    job = jobs[0]
    _set_awaited_ranks(job, reader)
    buckets = _merged(job.buckets)
    pairs: list[tuple[Group, Bucket | None]]
    pairs = [(_group(bucket, reader.stacks, order), bucket) for bucket in buckets]
    silent = {node: gap for node, gap in all_gaps.items() if node not in reader.answered}
    # The WORLD_SIZE of all ranks that have one; None: none, or different ones.
    world = next(iter(job.worlds)) if len(job.worlds) == 1 else None
    if world is not None and len(job.ranks) == world:
        # Every rank was found, so no rank is on these nodes. The gaps name them.
        silent = {}
    pairs += [(silent_group, None) for silent_group in _silent_groups(silent)]
    by_node: dict[str, set[int]] = {}
    for process in (process for bucket in buckets for process in bucket.processes):
        if process.rank is not None:
            by_node.setdefault(process.node, set()).add(process.rank)
    empty = order.keys() - by_node.keys() - silent.keys() - reader.elsewhere
    without = [node for node in order if node in empty]
    is_complete = complete and not reader.part
    lost = advise.missing_ranks(world, by_node, silent, without)
    unasked = lost.ranks if lost and reader.part else ()
    lost = _with_stray_reason(lost, job, jobs) if lost and is_complete else None
    if lost:
        pairs.append((lost, None))
    forks = _forks([member for member, _ in pairs])
    everything = job.count + len(silent) + len(lost.ranks if lost else ())
    judged = advise.with_roles([member for member, _ in pairs], everything, _awaited(pairs))
    forked = [dataclasses.replace(g, fork=fork) for g, fork in zip(judged, forks, strict=True)]
    pairs = [(member, bucket) for member, (_, bucket) in zip(forked, pairs, strict=True)]
    pairs.sort(key=lambda pair: _suspicion(pair[0], everything))
    report = _read_witnesses(reader.evidence, buckets, job.count)
    places = (process for bucket in buckets for process in bucket.processes)
    decided = verdict.decide(
        [member for member, _ in pairs], report, places,
        OddRanks(*_odd_world(job), unasked, reader.part),
        [_links_of(bucket, reader.stacks) for _, bucket in pairs],
    )  # fmt: skip
    paces: list[slow.Pace] = []
    if reader.paces.nodes:
        paces = reader.paces.paces(buckets, reader.links)
        decided = _with_pace(decided, slow.judge(paces, reader.paces.nodes, report))
    pairs = [(decided.groups[at], pairs[at][1]) for at in decided.order]
    placed = ((at, bucket.processes) for at, (_, bucket) in enumerate(pairs) if bucket)
    ranks = [process._replace(group=at) for at, members in placed for process in members]
    ranks.sort(key=lambda rank: (rank.rank is None, rank.rank or 0, order[rank.node], rank.pid))
    times = [text for text in reader.started if text]
    stacks = Stacks(
        started or min(times, default=""), finished or max(times, default=""), job.name, world,
        tuple(member for member, _ in pairs), tuple(ranks), node_gaps(all_gaps), (), complete,
        ", ".join(sorted(job.users - {""}, key=natural)),
        tuple(_other_job(other, job) for other in jobs[1:]),
        decided.verdict if ranks else None, report.witnesses,
        job.threads.odd_threads() if ranks else (), slow.pace_rows(paces),
    )  # fmt: skip
    rivals = [other for other in jobs[1:] if other.name == job.name and not other.is_claim]
    return advise.with_advice(
        stacks, {size: len(ranks) for size, ranks in job.worlds.items()}, reader.instead,
        _different_code(buckets, reader.stacks), by_witness=decided.by_witness,
        disputed=not job.slurm and bool(rivals),
    )  # fmt: skip
