"""The document of `nodeready stacks`, which the reports show, and its exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

from nodeready.core.json_types import MomentOrEmpty
from nodeready.core.outcome import FAILED, NodeGaps, gaps_code

#: Kinds of groups (see `Group`), in the order of their suspicion; all but `stack` have no stack.
KINDS = (
    "missing", "dead", "stopped", "frozen", "traced", "uninterruptible", "no-data", "stack",
)  # fmt: skip

#: Results of the samples of a stack group. `unsure`: the same place and hardly any CPU time, but
#: the thread has woken up meanwhile: a polling loop, or a slow job.
VERDICTS = ("blocked", "spinning", "unsure", "progressing")
_VERDICTS = (*VERDICTS, None)

#: The witnesses beside the stacks -> their names in reports.
WITNESSES = ("logs", "flight_recorder", "nccl_ras", "gpu", "network", "kernel", "environment")

#: Kinds of verdicts. `late`: ranks have not called the collective in which their peers wait;
#: `disagree`: they have called different ones; `gone`: a rank has ended or was never there;
#: `quiet`: all wait and nothing moves; `moving`: all wait and bytes move, or one rank works;
#: `slow-node`: one node is slower than its peers; `storage`: a file system, a device, a lock file;
#: `loader`: the data loader; `environment`: a variable of the job keeps its ranks apart;
#: `not-stuck`: the job progresses; `unclear`: none of these can be determined. With --slow:
#: `straggler`: the peers of a rank wait for it in every step; `even`: they wait for none.
VERDICT_KINDS = (
    "late", "disagree", "gone", "quiet", "moving", "slow-node", "storage", "loader", "environment",
    "not-stuck", "unclear", "straggler", "even",
)  # fmt: skip


class Frame(NamedTuple):
    """One call."""

    function: str
    file: str  # the short name from the profiler
    line: Annotated[int, {"minimum": 0}]  # 0 where the ranks differ


class StackThread(NamedTuple):
    """A thread beside the main one."""

    name: str
    frames: tuple[Frame, ...]  # root to leaf


ROLES = ("suspect", "victim", None)  # of a group in the hang: see `Group.role`


@dataclass(frozen=True)
class ChildProcess:
    """Equal processes that ranks have started: a loader's worker, a compiler, a shell."""

    JSON_KEYS: ClassVar = {"no_stack_reason": "why"}

    kind: str  # its purpose: `loader worker`, `compiler`, `shell`, `checkpoint writer`, `process`
    command: str
    processes: Annotated[int, {"minimum": 1}]  # how many
    ranks: tuple[int, ...]  # the ranks that have started them
    state: str  # as in /proc; F: its cgroup is frozen
    wait_channel: str  # likewise
    waits_on: str  # the file, pipe, socket or peer that it waits for; "": not known
    frames: tuple[Frame, ...] = ()  # root to leaf; () where it has no stack
    no_stack_reason: str = ""  # "": it has a stack
    hint: str = ""  # as a group's


class SystemCall(NamedTuple):
    """A system call that strace has seen ranks of a group make on one object, on request."""

    call: str  # with its error: `recvfrom EAGAIN`; "": they have made none
    object: str  # the file, pipe or peer; "": the call names none
    calls: Annotated[int, {"minimum": 0}]  # of all these ranks
    seconds: Annotated[float, {"minimum": 0}]  # of the count, of all these ranks together
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Ranks that stand at the same place, or have no stack for the same reason."""

    JSON_KEYS: ClassVar = {
        "no_stack_reason": "why", "children": "below", "activity": "about", "wakeups": "woke",
    }  # fmt: skip

    # missing: WORLD_SIZE counts them and no node has them; dead: ended during the capture;
    # stopped: by a signal; frozen: by its cgroup; traced: by another process; uninterruptible:
    # state D; no-data: no stack, or a node without an answer; stack: ranks with the same stack
    kind: Annotated[str, {"enum": KINDS}]
    # from all samples: the main thread stood still; it used CPU time at the same place; it woke up
    # there now and then; it has moved. None: one sample, or none
    verdict: Annotated[str | None, {"enum": _VERDICTS}]
    # sorted; () where they are not known (a node without an answer, a process without RANK)
    ranks: Annotated[tuple[Annotated[int, {"minimum": 0}], ...], {"uniqueItems": True}]
    # the nodes that they are on, each once
    nodes: Annotated[tuple[str, ...], {"uniqueItems": True}]
    frames: tuple[Frame, ...] = ()  # root to leaf; () where it has no stack
    hint: str = ""  # what a stack that ends there means, and what to look at; "": not known
    no_stack_reason: str = ""  # for a group without a stack, one line
    # index of the first frame that this group shares with no larger group (of two as large, that
    # with the lower rank counts as larger), where its path branches off; len(frames) if its path
    # is the beginning of another one, 0 for the largest
    fork: Annotated[int, {"minimum": 0}] = 0
    processes: Annotated[int, {"minimum": 0}] = 0  # how many
    # frames of a native unwinding of one of its ranks, root to leaf; () when not taken
    native: tuple[Frame, ...] = ()
    # further threads of one of its ranks; () unless all threads were compared
    threads: tuple[StackThread, ...] = ()
    # suspect: it does not wait for other ranks; victim: it does. None: not known
    role: Annotated[str | None, {"enum": ROLES}] = None
    reason: str = ""  # why it has that role, one line
    user_frame: Frame | None = None  # the innermost call of the user's code; None: not found
    # state and wait channel of its main threads with their counts, the most frequent first
    states: tuple[str, ...] = ()
    # what its main threads wait for: a file, a pipe, a socket, a peer, a lock's owner
    waits_on: tuple[str, ...] = ()
    # processes that its ranks have started and may wait for
    children: tuple[ChildProcess, ...] = ()
    # variables of the innermost calls, on request: `function: name = value`; after the ranks with
    # that value, where not all have it
    locals: tuple[str, ...] = ()
    system_calls: tuple[SystemCall, ...] = ()  # on request, the most frequent first
    # its place, or its last one, in one word: `collective`, `data`, `storage`, ...; "": not known
    activity: str = ""
    # minimum wakeups of each main thread between the samples; None: not known
    wakeups: int | None = None
    # of its ranks, or of what they have started: `its cc1plus used 1.9 s of CPU in 2 s`
    work: str = ""


class Rank(NamedTuple):
    """One process of the job. No dataclass: there can be 131,072 of them."""

    node: str
    pid: Annotated[int, {"minimum": 0}]
    rank: Annotated[int | None, {"minimum": 0}]
    local_rank: Annotated[int | None, {"minimum": 0}]
    state: str  # as in /proc/PID/stat; F: its cgroup is frozen
    wait_channel: str  # as in /proc/PID/wchan
    # CPU seconds between the first and the last sample; None: one sample
    cpu_s: Annotated[float | None, {"minimum": 0}]
    group: Annotated[int, {"minimum": 0}]  # index into the groups
    note: str = ""


class OtherJob(NamedTuple):
    """A job that is not shown."""

    job: str
    user: str  # owner of its processes; "": not known
    processes: Annotated[int, {"minimum": 1}]
    # it claims the shown job's name, but is another user's, or Slurm runs the job on other nodes
    stranger: bool
    nodes: tuple[str, ...] = ()  # the nodes of its processes


class Statement(NamedTuple):
    """What a witness reports about some ranks or nodes, one line."""

    text: str
    ranks: tuple[int, ...] = ()  # the subjects; () for both: the whole job
    nodes: tuple[str, ...] = ()  # likewise
    # 2: enough for a verdict; 1: supports one; 0: information
    weight: Annotated[int, {"minimum": 0, "maximum": 2}] = 0
    against: bool = False  # True: evidence that these are not the cause


@dataclass(frozen=True)
class Witness:
    """One witness beside the stacks, over all ranks."""

    JSON_KEYS: ClassVar = {"statements": "says"}

    name: Annotated[str, {"enum": WITNESSES}]  # see WITNESSES
    # why it has no answer, each different reason once; () where all answered
    absent: tuple[str, ...] = ()
    statements: tuple[Statement, ...] = ()  # equal statements once, the weightiest first


@dataclass(frozen=True)
class Suspect:
    """Ranks or nodes that may be the cause, with the evidence for and against."""

    JSON_KEYS: ClassVar = {"for_": "for"}

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    for_: tuple[str, ...]
    against: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The cause of the hang, from all witnesses together."""

    kind: Annotated[str, {"enum": VERDICT_KINDS}]  # see VERDICT_KINDS
    text: str  # one line: what is wrong, where, what to do
    suspects: tuple[Suspect, ...] = ()  # the most suspicious first
    missing: tuple[str, ...] = ()  # evidence that was missing and would help: one line each


class OddThread(NamedTuple):
    """A thread that waits differently on one rank than on all other ranks: a possible cause."""

    rank: Annotated[int | None, {"minimum": 0}]
    node: str
    pid: Annotated[int, {"minimum": 0}]
    name: str  # with N in place of each number
    thread: Annotated[int, {"minimum": 0}]  # its number; 0: the rank has no thread in that wait
    wait: str  # the wait that no other rank has; "": none
    peers: str  # the wait that each other rank has, and this one has not; "": none
    kernel_stack: tuple[str, ...] = ()  # leaf first; () when not permitted
    native: tuple[str, ...] = ()  # its native calls, leaf first; () when not taken


class RankPace(NamedTuple):
    """How often a rank waits for other ranks."""

    rank: Annotated[int, {"minimum": 0}]
    node: str
    looks: Annotated[int, {"minimum": 0}]  # stacks
    waiting: Annotated[int, {"minimum": 0}]  # stacks in which it waits for other ranks
    waits_percent: float  # of the time
    lag_percent: float  # of the time: how much longer its peers wait
    factor: float  # how many times as long as its peers it works


@dataclass(frozen=True)
class Stacks:
    """The document of `nodeready stacks`: the ranks in groups, the most suspicious group first."""

    SCHEMA: ClassVar = "stacks"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "job", "user", "world_size", "complete", "verdict"),
        *("groups", "witnesses", "processes", "gaps", "other_jobs", "advice"),
        *("odd_threads", "paces"),
    )
    JSON_KEYS: ClassVar = {"other_jobs": "others"}

    started: MomentOrEmpty  # UTC
    finished: MomentOrEmpty  # UTC
    job: str  # "": the processes name none
    world_size: int | None  # WORLD_SIZE of the ranks; None: missing, or different
    groups: tuple[Group, ...]
    processes: tuple[Rank, ...]
    gaps: NodeGaps  # the nodes that gave no answer, or only a part of it
    advice: tuple[str, ...] = ()  # what to look at next, one line each
    # False when it was interrupted; ranks that were not found do not count as missing
    complete: bool = True
    user: str = ""  # the owner of the job; "": not known
    other_jobs: tuple[OtherJob, ...] = ()  # the jobs that are not shown, the largest first
    verdict: Verdict | None = None  # None: no rank was found
    witnesses: tuple[Witness, ...] = ()  # the witnesses beside the stacks
    odd_threads: tuple[OddThread, ...] = ()  # threads that wait differently on one rank
    paces: tuple[RankPace, ...] = ()  # how often each rank waits, with --slow


def fold_ranks(ranks: Iterable[int]) -> str:
    """``0-6,8-511``; four and more at equal distances, as pipeline stages are: ``0-504/8``."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    first = 0
    while first < len(numbers):
        last, step = first, 1
        if first + 1 < len(numbers):
            step = numbers[first + 1] - numbers[first]
        while last + 1 < len(numbers) and numbers[last + 1] - numbers[last] == step:
            last += 1
        if last == first or (step > 1 and last - first < 3):
            parts.append(f"{numbers[first]}")
            first += 1
            continue
        parts.append(f"{numbers[first]}-{numbers[last]}" + (f"/{step}" if step > 1 else ""))
        first = last + 1
    return ",".join(parts)


#: Words for one, and for several, or the name of a word.
_CHOICE = re.compile(r"\{([\w ]+)(?:\|([\w ]+))?\}")


def say(template: str, number: int, **words: str) -> str:
    """The sentence with its verbs and nouns, ``{is|are}``, as the number asks, and its words.

    >>> say("{who} {was|were} killed", 1, who="rank 3")
    'rank 3 was killed'
    """

    def word(match: re.Match[str]) -> str:
        singular, plural = match.groups()
        if plural is None:
            return words[singular]
        return singular if number == 1 else plural

    return _CHOICE.sub(word, template)


#: A node without stacks is a finding about the job; only an internal error is a failure.
STACKS_FAILURES = frozenset({FAILED})


def stacks_code(stacks: Stacks) -> int:
    """The exit code of ``stacks``: success needs every rank's stack and every node's answer."""
    return gaps_code(
        stacks.gaps, complete=stacks.complete, usage=not stacks.groups and not stacks.gaps,
        check=not all(group.frames for group in stacks.groups), failures=STACKS_FAILURES,
    )  # fmt: skip


# --- The stacks of all groups as one tree, with their common calls once.


@dataclass(frozen=True)
class JobTree:
    """A call, with the calls made from it."""

    frame: Frame | None  # None at the root
    processes: int  # number of processes with it on their stack
    ranks: tuple[int, ...]  # their ranks, sorted
    groups: tuple[int, ...]  # indexes into `Stacks.groups`, of all groups with it
    children: tuple[JobTree, ...]  # the largest first


@dataclass
class _TreeNode:
    groups: list[int] = field(default_factory=list)
    lines: set[int] = field(default_factory=set)
    children: dict[tuple[str, str], _TreeNode] = field(default_factory=dict)


def tree(stacks: Stacks) -> JobTree:
    """The prefix tree of all groups that have frames; a frame's line is 0 where they differ."""
    root = _TreeNode()
    for index, group in enumerate(stacks.groups):
        if not group.frames:
            continue
        node = root
        node.groups.append(index)
        for frame in group.frames:
            node = node.children.setdefault((frame.function, frame.file), _TreeNode())
            node.groups.append(index)
            node.lines.add(frame.line)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}

    def build(node: _TreeNode, frame: Frame | None, children: tuple[JobTree, ...]) -> JobTree:
        groups = tuple(node.groups)
        if groups not in ranks:
            all_ranks = {rank for index in groups for rank in stacks.groups[index].ranks}
            ranks[groups] = tuple(sorted(all_ranks))
        processes = sum(stacks.groups[index].processes for index in groups)
        return JobTree(frame, processes, ranks[groups], groups, children)

    # Without recursion: a stack can be deeper than Python's limit.
    order: list[tuple[_TreeNode, Frame | None]] = [(root, None)]
    for node, _ in order:
        for (function, file), child in node.children.items():
            line = next(iter(child.lines)) if len(child.lines) == 1 else 0
            order.append((child, Frame(function, file, line)))
    done: dict[int, JobTree] = {}
    for node, node_frame in reversed(order):
        children = [done.pop(id(child)) for child in node.children.values()]
        children.sort(key=lambda child: (-child.processes, child.ranks[:1]))
        done[id(node)] = build(node, node_frame, tuple(children))
    return done[id(root)]
