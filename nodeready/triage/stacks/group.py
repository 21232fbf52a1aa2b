"""Group the ranks whose stacks are the same, from the raw traces of all nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.inventory.nodeset import natural
from nodeready.triage.stacks import advise, evidence, hints, verdict
from nodeready.triage.stacks.document import KINDS, Frame, Group, OtherJob, Rank, Stacks, Thread

# --- The stacks of all nodes: each different one once, known by a number.

#: Native frames without a symbol, and offsets into one: address randomisation makes them differ.
_ADDRESS = re.compile(r"\+?\b0x[0-9a-fA-F]+\b")


class StackNumbers:
    """Gives every stack a number; equal stacks of any nodes have one number.

    A stack's number tells its lines apart, a path's number does not: ranks that stand in the same
    functions are together, whatever line they are at.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], int] = {}
        self._seen: list[Frame] = []
        self._function_of: list[int] = []
        self._functions: dict[tuple[str, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._all: list[tuple[int, ...]] = []
        self._paths: dict[tuple[int, ...], int] = {}
        #: Stack -> its path.
        self.path_of: list[int] = []

    def _frame(self, frame: tuple[str, str, int]) -> int:
        number = self._frames.get(frame)
        if number is None:
            function, file, line = frame
            if "0x" in function:
                function = _ADDRESS.sub("", function).strip() or "?"
            number = self._frames[frame] = len(self._seen)
            self._seen.append(Frame(function, file, line))
            place = (function, file)
            self._function_of.append(self._functions.setdefault(place, len(self._functions)))
        return number

    def _stack(self, frames: tuple[int, ...]) -> int:
        number = self._stacks.get(frames)
        if number is None:
            number = self._stacks[frames] = len(self._all)
            self._all.append(frames)
            path = tuple(self._function_of[frame] for frame in frames)
            self.path_of.append(self._paths.setdefault(path, len(self._paths)))
        return number

    def numbers(self, trace: Mapping[str, Any]) -> list[int]:
        """The number of each of the trace's stacks."""
        frame, stack = self._frame, self._stack
        own = [frame(tuple(one)) for one in trace["frames"]]
        return [stack(tuple([own[index] for index in one])) for one in trace["stacks"]]

    def path(self, stack: int) -> tuple[int, ...]:
        """The functions of a stack by number, root to leaf."""
        return tuple(self._function_of[frame] for frame in self._all[stack])

    def same(self, one: int, other: int) -> bool:
        """Whether somebody who was at both has stayed: only the line of the last call may differ.

        A loop that waits is at different lines of its function; a program that goes on comes to
        different calls.
        """
        if one == other:
            return True
        if self.path_of[one] != self.path_of[other]:
            return False
        return self._all[one][:-1] == self._all[other][:-1]

    def frames(self, stacks: Iterable[int]) -> tuple[Frame, ...]:
        """The frames of stacks with the same path; the line is 0 where they differ."""
        rows: Sequence[Sequence[Frame]] = [
            [self._seen[frame] for frame in self._all[stack]] for stack in stacks
        ]
        return tuple(
            frame if all(other.line == frame.line for other in rest) else frame._replace(line=0)
            for frame, *rest in zip(*rows, strict=True)
        )


# --- The classification of one process: kind, verdict and reason, from its samples.

#: CPU seconds per second below which a process counts as waiting: the heartbeats, watchdogs and
#: loaders of a process that hangs use some; a loop that spins uses all of a core.
IDLE = 0.05
#: The kernel counts CPU time in ticks of 10 ms (USER_HZ): two of them say nothing.
_TICKS_S = 0.025
#: The words of `nodeready.node.stacks.py_spy` for a process that has ended.
_GONE = "it has ended"


class Classification(NamedTuple):
    """kind, verdict: as in `nodeready.triage.stacks.document`. why: where there is no stack to
    compare.

    stack: number of the main thread's last stack; None: there is none
    """

    kind: str
    verdict: str | None
    why: str
    stack: int | None
    cpu_s: float | None


def classify(
    process: Mapping[str, Any], stacks: Sequence[int], table: StackNumbers, interval_s: float
) -> Classification:
    """Classify one process by its samples.

    stacks: the numbers of the trace's stacks. The last sample with a stack gives the stack, all
    samples together tell whether the process moves: another stack is progress; the same one is
    waiting when it used less than 5 % of the time as CPU time, and spinning when it used more.
    """
    cpu = process["cpu_s"]
    used = round(max(0.0, cpu[-1] - cpu[0]), 2) if len(cpu) > 1 else None
    mains = [stacks[one["main"]] for one in process["samples"] if one["main"] is not None]
    stack = mains[-1] if mains else None
    state, note = process["state"][:1], process["note"]
    if state in ("Z", "X", "x") or note.startswith("ended"):
        return Classification("dead", None, _ended(state, note), stack, used)
    if state == "T":
        why = "stopped by a signal (SIGSTOP) or by the scheduler"
        return Classification("stopped", None, why, stack, used)
    if state == "t" or process["tracer"]:
        why = "another process traces it: a debugger, strace"
        return Classification("traced", None, why, stack, used)
    verdict = None
    if len(mains) > 1:
        if not (mains.count(stack) == len(mains) or _stayed(mains, table)):
            verdict = "progressing"
        elif used is not None:
            most = max(_TICKS_S, IDLE * interval_s * (len(cpu) - 1))
            verdict = "blocked" if used < most else "spinning"
    # A process that has gone on since was in state D for a moment only.
    if state == "D" and verdict in (None, "blocked"):
        return Classification("uninterruptible", None, _kernel(process), stack, used)
    if stack is None:
        why = _no_stack(process)
        return Classification("dead" if why == _GONE else "no-data", None, why, None, used)
    return Classification("stack", verdict, "", stack, used)


def _stayed(mains: Sequence[int], table: StackNumbers) -> bool:
    return all(table.same(mains[0], one) for one in mains[1:])


def _ended(state: str, note: str) -> str:
    if state == "Z":
        return "a zombie: it has ended, and whoever started it has not asked for its status"
    return note or _GONE


def _in_kernel(process: Mapping[str, Any]) -> str:
    """The innermost function in the kernel, or ""."""
    for text in (*process["kernel_stack"][:1], process["wait_channel"]):
        name: str = text.partition("+")[0].strip()
        if name not in ("", "0", "-"):
            return name
    return ""


def _kernel(process: Mapping[str, Any]) -> str:
    name = _in_kernel(process)
    return f"waits in the kernel (state D), in {name}" if name else "waits in the kernel (state D)"


def _no_stack(process: Mapping[str, Any]) -> str:
    """Why there is no stack. Its own pid in a message would make each one a group of its own."""
    errors = [one["error"] for one in process["samples"] if one["error"]]
    why: str = errors[-1] if errors else process["note"] or "no stack was taken"
    if "not python" in why.lower():
        name = _in_kernel(process)
        return (
            "not Python: it runs"
            if process["state"] == "R"
            else (f"not Python: it waits in {name}" if name else "not Python")
        )
    pid = str(process["pid"])
    return " ".join("PID" if word.strip("().,:;") == pid else word for word in why.split())


# --- What is kept of every trace until all are read: processes, by their classification.

_MAIN = "MainThread"
#: Kinds whose groups differ by their stacks; the others differ by their reason alone.
WITH_STACK = ("stack", "uninterruptible")


class Process(NamedTuple):
    """One process, with its `Rank.group` not known yet."""

    node: str
    pid: int
    rank: int | None
    local_rank: int | None
    state: str
    wait_channel: str
    cpu_s: float | None
    note: str


class Bucket:
    """Processes of one group. stacks: the different ones; None among them: one that has none."""

    __slots__ = ("kind", "native", "processes", "stacks", "threads", "verdict", "why")

    def __init__(self, kind: str, verdict: str | None, why: str) -> None:
        self.kind, self.verdict, self.why = kind, verdict, why
        self.processes: list[Process] = []
        self.stacks: set[int | None] = set()
        self.native: int | None = None
        self.threads: list[tuple[str, int]] = []


class Job:
    """The processes of one job.

    name:  by Slurm's cgroup where slurm says so, else as the processes say
    user:  whose processes they are; of a job of Slurm's, of the first one that was read
    """

    def __init__(self, name: str = "", user: str = "", slurm: bool = False) -> None:
        self.name, self.user, self.slurm = name, user, slurm
        #: The users of a job of Slurm's.
        self.users = {user}
        self.buckets: dict[tuple[Any, ...], Bucket] = {}
        self.world_sizes: dict[int, int] = {}
        self.count = 0

    def join(self, other: Job) -> None:
        """Take over the processes of the same user that are outside of the job's cgroup."""
        for key, bucket in other.buckets.items():
            own = self.buckets.setdefault(key, bucket)
            if own is not bucket:
                own.processes += bucket.processes
                own.stacks |= bucket.stacks
                own.native = bucket.native if own.native is None else own.native
        for size, count in other.world_sizes.items():
            self.world_sizes[size] = self.world_sizes.get(size, 0) + count
        self.count += other.count

    @property
    def _everybody(self) -> list[Process]:
        return [one for bucket in self.buckets.values() for one in bucket.processes]

    @property
    def nodes(self) -> set[str]:
        """The nodes that have processes of it."""
        return {one.node for one in self._everybody}

    @property
    def size(self) -> tuple[int, int]:
        """On how many nodes it is, and how many ranks it has.

        More processes with the same rank do not make it larger; and one node that claims any
        number of ranks has one voice.
        """
        everybody = self._everybody
        ranks = {one.rank for one in everybody}
        count = len(ranks - {None}) + sum(one.rank is None for one in everybody)
        return len(self.nodes), count


class TraceCollector:
    """Reads one trace after the other, and keeps of each only what the groups need."""

    def __init__(self, all_threads: bool) -> None:
        self.all_threads = all_threads
        self.stacks = StackNumbers()
        #: By Slurm's word for the job, else by the user and by what the processes say.
        self.jobs: dict[tuple[str, str, str], Job] = {}
        self.nodes: dict[str, None] = {}
        #: Nodes with processes, of whatever job.
        self.answered: set[str] = set()
        self.errors: dict[str, str] = {}
        self.instead: dict[str, Sequence[str]] = {}
        self.started: list[str] = []
        self._texts: dict[str, str] = {}
        self.evidence = evidence.Evidence()

    def read(self, trace: Mapping[str, Any]) -> None:
        node, interval = trace["node"], trace["interval_s"]
        self.nodes[node] = None
        self.started.append(trace["started"])
        if trace["error"]:
            self.errors[node] = trace["error"]
        if trace["processes"]:
            self.answered.add(node)
        elif trace["instead"]:
            self.instead[node] = trace["instead"]
        numbers = self.stacks.numbers(trace)
        self.evidence.read(trace)
        # Every trace has strings of its own, and most of them are the same.
        shared = self._texts.setdefault
        for process in trace["processes"]:
            slurm, user = process["slurm_job"], process["user"]
            whose = (slurm, "", "") if slurm else ("", user, process["job"])
            job = self.jobs.get(whose)
            if job is None:
                name = slurm or shared(process["job"], process["job"])
                job = self.jobs[whose] = Job(name, shared(user, user), bool(slurm))
            if slurm and user not in job.users:
                job.users.add(user)
            job.count += 1
            world = process["world_size"]
            if world is not None:
                job.world_sizes[world] = job.world_sizes.get(world, 0) + 1
            found = classify(process, numbers, self.stacks, interval)
            threads = self._threads(process, numbers) if self.all_threads else []
            path = None
            if found.stack is not None and found.kind in WITH_STACK:
                path = self.stacks.path_of[found.stack]
            others: tuple[int, ...] = ()
            if threads:
                others = tuple(sorted(self.stacks.path_of[stack] for _, stack in threads))
            key = (found.kind, found.why, path, others, found.verdict)
            bucket = job.buckets.get(key)
            if bucket is None:
                bucket = job.buckets[key] = Bucket(found.kind, found.verdict, found.why)
                bucket.threads = threads
            bucket.stacks.add(found.stack)
            if process["native"] is not None and bucket.native is None:
                bucket.native = numbers[process["native"]]
            state, wait, note = process["state"], process["wait_channel"], process["note"]
            if found.kind == "traced" and process["tracer"] and not note:
                note = f"traced by pid {process['tracer']}"
            bucket.processes.append(
                Process(
                    node,
                    process["pid"],
                    _rank(process["rank"]),
                    _rank(process["local_rank"]),
                    shared(state, state),
                    shared(wait, wait),
                    found.cpu_s,
                    shared(note, note),
                )
            )

    def each_job(self) -> list[Job]:
        """The jobs, the one to show first.

        Where half of the nodes know of a job of Slurm's, those come first, by their cgroups: no
        user can claim one, but a node can. Then the one on the most nodes, with the most ranks.
        What a job's user has outside of its cgroup is the job's, too; what others claim is not.
        """
        found = [job for job in self.jobs.values() if job.slurm]
        managed = {node for job in found for node in job.nodes}
        believed = 2 * len(managed) >= len(self.answered)
        by_name = {job.name: job for job in found}
        for job in self.jobs.values():
            if job.slurm:
                continue
            home = by_name.get(job.name)
            if home is not None and job.user in home.users:
                home.join(job)
            else:
                found.append(job)
        return sorted(
            found,
            key=lambda job: (
                not (believed and job.slurm),
                *(-count for count in job.size),
                natural(job.name),
                natural(job.user),
            ),
        )

    def _threads(self, process: Mapping[str, Any], numbers: list[int]) -> list[tuple[str, int]]:
        """The other threads at the last sample that has a stack."""
        for sample in reversed(process["samples"]):
            if sample["main"] is not None:
                pairs = sample["threads"]
                return [(name, numbers[at]) for name, at in pairs if name != _MAIN]
        return []


def _rank(value: int | None) -> int | None:
    """Launchers say -1 for "none", and what is beyond every job is no rank."""
    return value if value is not None and 0 <= value < advise.MAX_RANKS else None


# --- The groups.


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Traces hold no cycles, and looking for some at each of so many tuples costs a third."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _merge_without_verdict(buckets: Mapping[tuple[Any, ...], Bucket]) -> list[Bucket]:
    """The buckets; one without a verdict joins the largest that differs in nothing else."""
    largest: dict[tuple[Any, ...], Bucket] = {}
    for key, bucket in buckets.items():
        other = largest.get(key[:-1])
        if bucket.verdict and (other is None or len(bucket.processes) > len(other.processes)):
            largest[key[:-1]] = bucket
    kept = []
    for key, bucket in buckets.items():
        home = largest.get(key[:-1])
        if bucket.verdict is None and home is not None:
            home.processes += bucket.processes
            home.stacks |= bucket.stacks
            home.native = bucket.native if home.native is None else home.native
        else:
            kept.append(bucket)
    return kept


def _group(bucket: Bucket, table: StackNumbers, order: Mapping[str, int]) -> Group:
    stacks = sorted(stack for stack in bucket.stacks if stack is not None)
    # Other kinds show their stack only when all of their processes have the same.
    one_path = len({table.path_of[stack] for stack in stacks}) == 1
    frames = table.frames(stacks) if one_path and None not in bucket.stacks else ()
    native = () if bucket.native is None else table.frames([bucket.native])
    waits = bucket.kind in WITH_STACK and bucket.verdict != "progressing"
    hint = hints.find(frames, native) if waits else None
    nodes = {process.node for process in bucket.processes}
    return Group(
        bucket.kind,
        bucket.verdict,
        tuple(sorted({one.rank for one in bucket.processes if one.rank is not None})),
        tuple(sorted(nodes, key=order.__getitem__)),
        frames,
        hint.text if hint else "",
        bucket.why,
        len(frames),
        len(bucket.processes),
        native,
        tuple(Thread(name, table.frames([stack])) for name, stack in bucket.threads),
    )


def _silent(errors: Mapping[str, str]) -> list[Group]:
    """The nodes without an answer, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for node in sorted(errors, key=natural):
        reasons.setdefault(errors[node].replace(node, "NODE"), []).append(node)
    return [
        Group("no-data", None, (), tuple(nodes), why=why if len(nodes) > 1 else errors[nodes[0]])
        for why, nodes in reasons.items()
    ]


def _forks(groups: Sequence[Group]) -> list[int]:
    """For each group the index of the first frame that no larger one with a stack shares.

    Of two as large, the one with the lower rank counts as the larger.
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


def _with_fork(one: Group, fork: int) -> Group:
    return one if one.fork == fork else dataclasses.replace(one, fork=fork)


def _suspicion(group: Group, everything: int) -> tuple[int, int, int, int]:
    """The order: kinds without a stack, unless they are the most; then few before many."""
    size = max(group.processes, len(group.ranks), len(group.nodes))
    usual = group.kind != "stack" and 2 * size > everything
    kind = len(KINDS) if usual else KINDS.index(group.kind)
    return kind, size, group.ranks[0] if group.ranks else advise.MAX_RANKS, group.fork


def _heard(seen: evidence.Evidence, buckets: Iterable[Bucket], count: int) -> evidence.Testimony:
    """What the witnesses say of these processes. Counts of a moment say nothing of a job that
    goes on."""
    if not seen:
        return evidence.Testimony()
    whole = list(buckets)
    moving = sum(len(one.processes) for one in whole if one.verdict == "progressing")
    everybody = (process for bucket in whole for process in bucket.processes)
    return evidence.hear(seen, everybody, moving=2 * moving > count)


def _world(job: Job) -> int | None:
    """What all ranks that say it agree on."""
    return next(iter(job.world_sizes)) if len(job.world_sizes) == 1 else None


def group(
    traces: Iterable[Mapping[str, Any]],
    errors: Mapping[str, str],
    *,
    all_threads: bool = False,
    started: str = "",
    finished: str = "",
    complete: bool = True,
) -> Stacks:
    """All traces as one document, the most suspicious group first. No trace is kept.

    traces: as `trace.read` has checked them. Of several jobs the first of
        `TraceCollector.each_job` is grouped, and the advice names the others
    errors: node -> why it gave no answer; looked at after all traces (see `trace.load`)
    all_threads: ranks are together only when their other threads stand at the same places too
    started, finished: "": when the first and the last trace were taken
    complete: False: no rank counts as missing, because not all nodes were asked
    """
    with _garbage_collection_off():
        reader = TraceCollector(all_threads)
        for trace in traces:
            reader.read(trace)
        return _grouped(reader, errors, started, finished, complete)


def _grouped(
    reader: TraceCollector, errors: Mapping[str, str], started: str, finished: str, complete: bool
) -> Stacks:
    said = {**errors, **reader.errors}
    silent = {node: why for node, why in said.items() if node not in reader.answered}
    order = {node: at for at, node in enumerate(sorted(reader.nodes, key=natural))}
    jobs = reader.each_job()
    job = jobs[0] if jobs else Job()
    buckets = _merge_without_verdict(job.buckets)
    found: list[tuple[Group, Bucket | None]] = [
        (_group(bucket, reader.stacks, order), bucket) for bucket in buckets
    ]
    found += [(one, None) for one in _silent(silent)]
    by_node: dict[str, set[int]] = {}
    for bucket in buckets:
        for process in bucket.processes:
            if process.rank is not None:
                by_node.setdefault(process.node, set()).add(process.rank)
    without = [node for node in order if node not in by_node and node not in silent]
    lost = advise.missing_ranks(_world(job), by_node, silent, without) if complete else None
    if lost:
        found.append((lost, None))
    forks = _forks([one for one, _ in found])
    everything = job.count + len(silent) + len(lost.ranks if lost else ())
    found = [
        (_with_fork(one, fork), bucket) for (one, bucket), fork in zip(found, forks, strict=True)
    ]
    found.sort(key=lambda pair: _suspicion(pair[0], everything))
    heard = _heard(reader.evidence, buckets, job.count)
    decided = verdict.decide([one for one, _ in found], heard, _world(job))
    found = [(decided.groups[at], found[at][1]) for at in decided.order]
    ranks = [
        Rank(*process[:7], at, process.note)
        for at, (_, bucket) in enumerate(found)
        if bucket
        for process in bucket.processes
    ]
    ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, order[one.node], one.pid))
    times = [text for text in reader.started if text]
    made = Stacks(
        started or min(times, default=""),
        finished or max(times, default=""),
        job.name,
        _world(job),
        tuple(one for one, _ in found),
        tuple(ranks),
        said,
        (),
        complete,
        ", ".join(sorted(job.users - {""}, key=natural)),
        tuple(
            OtherJob(one.name, one.user, one.count, one.name == job.name and bool(one.name))
            for one in jobs[1:]
        ),
        decided.verdict if ranks else None,
        heard.witnesses,
    )
    return advise.with_advice(made, job.world_sizes, reader.instead)
