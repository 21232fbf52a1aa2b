"""What to look at next, from the groups of ranks; and the ranks that are missing."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.stacks import hints, odd_threads
from nodeready.runs.stacks.causes import called
from nodeready.runs.stacks.document import Frame, Group, Rank, Stacks, fold_ranks, say

# --- Missing ranks, which WORLD_SIZE counts but no node has, and the nodes that should have them.

#: More ranks than any job has had: a larger WORLD_SIZE is a mistake, and is ignored.
MAX_RANKS = 1 << 20
#: End of the reason when all missing ranks are on nodes without an answer.
SILENT = ", without an answer"


def missing_ranks(
    world_size: int | None,
    by_node: Mapping[str, Collection[int]],
    silent: Collection[str],
    without: Collection[str],
) -> Group | None:
    """The group of missing ranks; None: none is known to be missing. by_node: node -> the ranks
    found there; silent: nodes without an answer; without: nodes that answered, without its ranks
    """
    numbered = {rank for ranks in by_node.values() for rank in ranks}
    if not world_size or not 0 < world_size <= MAX_RANKS or max(numbered, default=0) >= world_size:
        return None
    if len(numbered) == world_size or not numbered:
        return None
    ranks = tuple(rank for rank in range(world_size) if rank not in numbered)
    nodes = expected_nodes(world_size, ranks, by_node, [*silent, *without])
    reason = f"WORLD_SIZE {world_size} counts them, but no node has them"
    if nodes:
        reason += f"; expected on {fold(nodes)}"
        if set(nodes) <= set(silent):
            reason += SILENT
    elif silent:
        reason += f"; {counted(len(silent), 'node')} gave no answer"
    return Group("missing", None, ranks, nodes, no_stack_reason=reason)


def expected_nodes(
    world_size: int,
    ranks: Collection[int],
    by_node: Mapping[str, Collection[int]],
    expected: Collection[str],
) -> tuple[str, ...]:
    """The nodes that should have these ranks, by the rule of torchrun and of Slurm's block
    distribution: each node has as many consecutive ranks. (): the ranks found follow no rule
    """
    if len(by_node) == 1 and not expected:
        return tuple(by_node)
    sizes = Counter(len(set(ranks)) for ranks in by_node.values())
    size = max(sizes, key=lambda ranks_count: (sizes[ranks_count], ranks_count))
    if world_size % size:
        return ()
    home: dict[int, str] = {}
    for node, node_ranks in by_node.items():
        blocks = {rank // size for rank in node_ranks}
        block = blocks.pop()
        if blocks or block in home:
            return ()
        home[block] = node
    blocks = {rank // size for rank in ranks}
    nodes = [home[block] for block in sorted(blocks & home.keys())]
    away = blocks - home.keys()
    if not away:
        return tuple(nodes)
    return (*nodes, *expected) if len(away) == len(expected) else ()


# --- Which group waits for which.

#: Words in reasons of `no-data` that concern nodeready, not the process.
_OWN_FAILURE_WORDS = (
    "permi", "ptrace", "py-spy", "another user", "no time", "others took", "too large",
    "no stack was taken", "makes no sense",
)  # fmt: skip
#: Groups about these wait for no other rank, and no rank waits for them.
_NEUTRAL_ACTIVITIES = frozenset({"idle", "agent", "worker"})


def is_waiting(group: Group) -> bool:
    """Whether a group waits for other ranks where it stands. It may spin there: MPI, NCCL and CUDA
    poll. A backward pass whose thread computes does not wait.
    """
    if group.kind != "stack" or group.verdict == "progressing":
        return False
    computes = group.activity == "backward" and group.verdict == "spinning"
    return group.activity in hints.FOR_RANKS and not computes


def stands_still(group: Group) -> bool:
    """Whether some ranks of a waiting group have not moved at all between the samples. The end of
    a collective wakes up all its ranks: where each has woken up, the job may progress.
    """
    return group.verdict != "unsure" or not group.wakeups


class _WaitingJob(NamedTuple):
    """How many processes of a job wait for other ranks."""

    waiting: int  # those that wait
    # those that may wait, in a call of C: the wait() of an asynchronous collective
    maybe: int
    # some of the waiting processes do not move at all, though a step would wake up all
    standing: bool
    moving: bool  # some of the job's processes move
    everything: int  # number of processes, and of ranks and nodes without one
    certain: bool  # of each waiting process it is known for which processes it waits

    def waits(self, and_maybe: bool = False) -> str:
        """``3 ranks wait``."""
        number = self.waiting + self.maybe * and_maybe
        return f"{number} {say('{rank waits|ranks wait}', number)}"


def _size(groups: Iterable[Group]) -> int:
    return sum(group.processes for group in groups)


def with_roles(
    groups: Sequence[Group], everything: int, awaited: Collection[int] | None = None
) -> list[Group]:
    """The groups, each with its role in the hang, and why. everything: number of processes, and of
    ranks and nodes without one. awaited: indexes of the groups for which others wait; None: any,
    because it is not known of each waiting process for which it waits
    """
    job = _WaitingJob(
        _size(filter(is_waiting, groups)),
        _size(filter(may_wait, groups)),
        any(is_waiting(group) and stands_still(group) for group in groups),
        any(group.verdict == "progressing" for group in groups),
        everything,
        awaited is not None,
    )
    with_role = []
    moves = any(groups[at].verdict == "progressing" for at in awaited or ())
    for at, group in enumerate(groups):
        role, reason = _role(group, job)
        polls = group.kind == "stack" and group.verdict == "unsure"
        if role == "suspect" and (polls or moves) and awaited is not None and at not in awaited:
            role, reason = None, "no other process waits for it"
            reason = f"wakes up again and again, and {reason}" if polls else reason
        reason = "; ".join(filter(None, (reason, group.reason)))
        with_role.append(dataclasses.replace(group, role=role, reason=reason))
    return with_role


def may_wait(group: Group) -> bool:
    """Whether a group stands in a call of C below the user's code, which may wait for ranks."""
    stands = group.verdict in ("blocked", "unsure", None)
    return group.kind == "stack" and group.activity == "native" and stands


def _role(group: Group, job: _WaitingJob) -> tuple[str | None, str]:
    waiting, maybe = job.waiting, job.maybe
    if job.everything < 2:
        return None, ""
    if group.kind != "stack":
        return _without_stack(group, job)
    if is_waiting(group):
        all_wait = waiting == job.everything
        return "victim", "waits for other ranks" + (", as all do" if all_wait else "")
    if group.activity in _NEUTRAL_ACTIVITIES or not waiting + maybe:
        return None, ""
    if group.verdict == "progressing":
        if group.activity in hints.FOR_RANKS or not job.standing:
            return None, ""
        return "suspect", f"moves while {job.waits()} for others: slow, or in a loop"
    if waiting and group.verdict in ("spinning", "unsure") and not job.standing:
        wake = say("{it wakes|all of them wake} up", waiting)
        return None, f"awake, and {job.waits()} for others, and {wake}: slow, or hung"
    if may_wait(group) and not job.certain:
        return None, "may wait for other ranks below its own code: --native tells"
    wait_text = f", and {job.waits()}"
    if not waiting:
        wait_text = f"; {counted(maybe, 'rank')} may (--native tells)"
    return "suspect", f"does not wait for other ranks{wait_text}"


def _without_stack(group: Group, job: _WaitingJob) -> tuple[str | None, str]:
    waiting = job.waiting + job.maybe
    size = max(group.processes, len(group.ranks), len(group.nodes))
    reason = group.no_stack_reason.lower()
    is_ours = 2 * size > job.everything or any(word in reason for word in _OWN_FAILURE_WORDS)
    if group.kind == "no-data" and is_ours:
        return None, ""
    if job.moving and not waiting:
        # Other ranks progress: no rank waits for this one.
        return None, ""
    wait_text = f"; {job.waits(and_maybe=True)} for others" if waiting else ""
    return "suspect", hints.STANDING[group.kind][0] + wait_text


# --- Equal calls on all nodes, at different lines.


class DifferentCode(NamedTuple):
    """A file of the user's whose lines differ by node in equal calls."""

    file: str
    function: str
    lines: Mapping[int, tuple[str, ...]]  # line -> the nodes at that line
    # several calls of the file differ by the same number of lines, so that the versions differ;
    # else the nodes may be at different calls of one version
    sure: bool


def different_code(
    nodes: Mapping[str, Collection[int]], calls: Callable[[int], Sequence[Frame]], least: int
) -> list[DifferentCode]:
    """Files whose versions differ between nodes, from the stacks of one path. nodes: node -> its
    stacks. calls: the frames of a stack. least: minimum ranks of a node
    """
    if len(nodes) < 2:
        return []
    # Most of many nodes have the same stacks.
    equal_paths: dict[frozenset[int], list[str]] = {}
    for node, stacks in nodes.items():
        equal_paths.setdefault(frozenset(stacks), []).append(node)
    rows = [([calls(stack) for stack in stacks], names) for stacks, names in equal_paths.items()]
    first = rows[0][0][0]
    differ: dict[str, list[tuple[int, dict[int, list[str]]]]] = {}
    for at, frame in enumerate(first[:-1]):
        lines: dict[int, list[str]] = {}
        for paths, names in rows:
            own_lines = {path[at].line for path in paths}
            if len(own_lines) != 1 or 0 in own_lines:
                break
            lines.setdefault(own_lines.pop(), []).extend(names)
        else:
            if len(lines) > 1:
                differ.setdefault(frame.file, []).append((at, lines))
    differences = []
    for file, places in differ.items():
        sure = len(places) > 1 and len({_shifts(lines) for _, lines in places}) == 1
        # The only rank of a node is always where all ranks of the node are.
        if sure or least > 1:
            at, lines = places[-1]
            nodes_of = {line: tuple(sorted(lines[line], key=natural)) for line in sorted(lines)}
            differences.append(DifferentCode(file, first[at].function, nodes_of, sure))
    return differences


def _shifts(lines: Mapping[int, Sequence[str]]) -> tuple[tuple[str, int], ...]:
    of = {node: line for line, line_nodes in lines.items() for node in line_nodes}
    names = sorted(of)
    return tuple((node, of[node] - of[names[0]]) for node in names)


def _different_code_advice(differences: Sequence[DifferentCode]) -> Iterator[str]:
    for difference in differences[:_MAX_NAMED]:
        lines = difference.lines.items()
        places = _few([f"{difference.file}:{line} on {fold(nodes)}" for line, nodes in lines])
        place, head = f"{difference.function} is at {places}", "different code on different nodes"
        if difference.sure:
            yield f"{head}: {place}: compare the file (`sha256sum`) on all nodes"
        else:
            words = "another call there, or another version of the file (`sha256sum` tells)"
            yield f"{place}: {words}"


# --- The advice, a line each.

#: Maximum processes, jobs and programs that are named.
_MAX_NAMED = 5
#: A group with at most this fraction of the ranks is a minority.
_MINORITY = 0.25
#: Maximum characters of a rank set.
_MAX_SET = 60


def _ranks(*groups: Group) -> str:
    ranks, size = {rank for group in groups for rank in group.ranks}, _size(groups)
    return few_ranks(ranks) if ranks else _processes(size) if size else "nodes"


def few_ranks(ranks: Collection[int]) -> str:
    """A few ranks in words, as in ``rank 3``, ``ranks 0-2``; of very many, the first."""
    text = fold_ranks(ranks)
    if len(text) > _MAX_SET:
        text = text[: text.rfind(",", 0, _MAX_SET)] + ",..."
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _processes(number: int) -> str:
    return counted(number, "process", "processes")


def _few(items: Sequence[str]) -> str:
    text = ", ".join(items[:_MAX_NAMED])
    return f"{text} and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else text


def _world_size_advice(sizes: Mapping[int, int], stacks: Stacks) -> Iterator[str]:
    if len(sizes) > 1:
        rows = sorted(sizes.items(), key=lambda item: -item[1])
        sizes_text = _few([f"{size} ({_processes(count)})" for size, count in rows])
        cause = "two runs at once, or a launcher that sets it wrongly"
        yield f"the ranks disagree on WORLD_SIZE: {sizes_text}: {cause}"
    ranks = [process.rank for process in stacks.processes if process.rank is not None]
    highest = max(ranks, default=-1)
    size = stacks.world_size
    if size is not None and not 0 < size <= MAX_RANKS:
        yield f"WORLD_SIZE is {size}, which no job has: missing ranks cannot be counted"
    elif size is not None and highest >= size:
        yield f"rank {highest} is outside of WORLD_SIZE {size}: missing ranks cannot be counted"


def _repeated_ranks_advice(processes: Sequence[Rank]) -> Iterator[str]:
    """Advice on ranks that occur more than once. The processes are sorted by rank."""
    claims_of: dict[int, list[Rank]] = {}
    for before, process in itertools.pairwise(processes):
        if process.rank is not None and process.rank == before.rank:
            claims_of.setdefault(process.rank, [before]).append(process)
    if claims_of:
        rank, claims = next(iter(claims_of.items()))
        claimants = _few([f"{claim.node} pid {claim.pid}" for claim in claims])
        count = len(claims_of) - 1
        suffix = f", and {count} more ranks are claimed twice" if count else ""
        words = {"rank": rank, "count": len(claims), "claimants": claimants, "suffix": suffix}
        yield hints.ADVICE["twice"].format(**words)


_REFUSALS = ("permi", "ptrace")
#: In py_spy's reasons for a version, and for a free-threaded Python.
_UNKNOWN_PYTHON = "does not know"


def _kind_advice(groups: Sequence[Group]) -> Iterator[str]:
    for kind, (_, text) in hints.STANDING.items():
        # A group that has a reason but no role needs no advice.
        kind_groups = [g for g in groups if g.kind == kind and (g.role or not g.reason)]
        if kind_groups and text:
            silent = kind == "missing" and kind_groups[0].no_stack_reason.endswith(SILENT)
            yield (hints.ADVICE["silent"] if silent else text).format(ranks=_ranks(*kind_groups))
    # Only processes: a refusal by a node or Slurm does not concern py-spy.
    unread = [group for group in groups if group.kind == "no-data" and group.processes]
    if any(word in group.no_stack_reason.lower() for group in unread for word in _REFUSALS):
        yield hints.ADVICE["refused"]
    unknown = [g for g in unread if g.ranks and _UNKNOWN_PYTHON in g.no_stack_reason]
    if unknown:
        yield hints.ADVICE["unread"].format(ranks=_ranks(*unknown), rank=unknown[0].ranks[0])


def _same_place_advice(group: Group, several: bool) -> Iterator[str]:
    activity = group.activity
    if is_waiting(group) and several:
        noun = hints.NOUNS.get(activity, "collective")
        yield hints.ADVICE["network"].format(count=group.processes, noun=noun)
        if activity in ("collective", "backward", "gpu", "peer"):
            yield hints.ADVICE["recorder"]
    elif group.verdict == "progressing":
        yield "all ranks move: between the samples each of them has come to another place"
    elif several:
        yield f"all {group.processes} ranks stand at the same place: no main thread is the odd one"


def _several_groups_advice(stacks: Stacks) -> Iterator[str]:
    groups = [group for group in stacks.groups if group.kind == "stack"]
    suspects = [group for group in groups if group.role == "suspect"]
    victims = [group for group in groups if group.role == "victim"]
    total = _size(groups)
    moving = _size(group for group in groups if group.verdict == "progressing")
    if 2 * moving > total:
        yield hints.ADVICE["moving"].format(moving=moving, count=total)
        if not victims:
            return
    suspected = [group for group in stacks.groups if group.role == "suspect"]
    if suspects:
        waiting, first = _size(victims), suspects[0]
        lone = "they wait for" if first.processes > 1 else "it waits for"
        wait_text = "and others may"
        if waiting:
            waits = f"{waiting} {say('{rank waits|ranks wait}', waiting)}"
            wait_text = f"as far as Python's calls tell, and {waits} for others"
        yield f"{_ranks(first)}: begin there: {lone} no other rank, {wait_text}"
    elif victims and len(victims) == len(groups) and not suspected:
        yield from _all_victims_advice(victims)
    elif not suspected:
        yield from _no_waiting_advice(groups, total)
    spinning = [group for group in groups if group.verdict == "spinning" and not is_waiting(group)]
    if spinning and any(group.verdict == "blocked" for group in groups):
        text = "uses CPU time where it stands while others wait: a loop, or slow"
        yield f"{_ranks(spinning[0])}: {text}"


def _all_victims_advice(groups: Sequence[Group]) -> Iterator[str]:
    """Advice where all ranks wait for each other, at different places: there is no suspect."""
    calls = {group.activity for group in groups} <= {"peer", "collective"}
    if calls and all(hints.in_pipeline(group.frames) for group in groups):
        yield hints.ADVICE["pipeline"]
        return
    places = _few([f"{_ranks(group)} in {called(group)}" for group in groups])
    yield hints.ADVICE["places"].format(count=len(groups), places=places)


def _no_waiting_advice(groups: Sequence[Group], total: int) -> Iterator[str]:
    idle = [group for group in groups if group.activity == "idle"]
    if idle:
        yield f"{_ranks(*idle)}: idle: look whether a client or a task should have come"
        return
    sizes = [group.processes for group in groups]
    if all(hints.in_pipeline(group.frames) for group in groups):
        yield hints.ADVICE["stages"].format(count=len(groups))
        return
    few = min(groups, key=lambda group: group.processes)
    if any(map(is_waiting, groups)):
        yield hints.ADVICE["awake"]
    elif few.processes <= _MINORITY * total and max(sizes) > few.processes:
        yield hints.ADVICE["few"].format(ranks=_ranks(few))
    else:
        yield hints.ADVICE["alone"]


def _other_processes_advice(stacks: Stacks, disputed: bool) -> Iterator[str]:
    jobs = {other.job for other in stacks.other_jobs} - {stacks.job}
    users = {other.user for other in stacks.other_jobs} - {stacks.user}
    if stacks.other_jobs:
        texts = [
            f"{other.job or 'without a job'} ({_processes(other.processes)}"
            f"{f' of {other.user}' if users and other.user else ''})"
            for other in stacks.other_jobs
        ]
        owner = f" of {stacks.user}" if users and stacks.user else ""
        options = ["--job ID"] * bool(jobs) + ["--user NAME"] * bool(users)
        text = f"shown is job {stacks.job or '(none)'}{owner}; there are also {_few(texts)}"
        yield f"{text}: choose with {' or '.join(options) or '--pid'}"
    strangers = [other for other in stacks.other_jobs if other.stranger]
    if strangers and disputed:
        names = _few(sorted({stacks.user, *(stranger.user for stranger in strangers)}))
        text = f"the owner of job {stacks.job} is unknown: {names} claim it"
        yield f"{text}: choose with --user NAME"
    elif strangers:
        count = sum(stranger.processes for stranger in strangers)
        nodes = {node for stranger in strangers for node in stranger.nodes}
        names = _few(sorted({stranger.user for stranger in strangers}))
        text = "{count} {process claims|processes claim} to be of job {job} and {is|are} not"
        text = say(text, count, count=str(count), job=stacks.job)
        yield f"{text}: of {names} on {fold(nodes)}"
    silent = {node for group in stacks.groups if group.kind == "no-data" for node in group.nodes}
    failed_nodes = {gap.node: gap.reason for gap in stacks.gaps if gap.node not in silent}
    if failed_nodes:
        node = min(failed_nodes, key=natural)
        yield f"{fold(failed_nodes)}: a part of the answer is missing: {failed_nodes[node]}"


def with_advice(
    stacks: Stacks,
    world_sizes: Mapping[int, int],
    instead: Mapping[str, Sequence[str]],
    differences: Sequence[DifferentCode] = (),
    *,
    by_witness: bool = False,
    disputed: bool = False,
) -> Stacks:
    """The document with its advice.
    world_sizes: WORLD_SIZE -> number of processes with it
    instead:     node -> its programs, where no rank was found
    differences: files whose versions differ between nodes
    by_witness:  the verdict is a witness's: the suspects of the stacks are not named again
    disputed:    several users claim the job, and neither Slurm nor a cgroup names its owner
    """
    groups = [group for group in stacks.groups if group.kind == "stack"]
    lines = [*_kind_advice(stacks.groups), *_world_size_advice(world_sizes, stacks)]
    lines += _repeated_ranks_advice(stacks.processes)
    if stacks.paces:
        # The verdict says it all: where ranks stood at the end proves nothing.
        pass
    elif len(groups) == 1 and groups[0].processes == len(stacks.processes):
        is_single = len(stacks.groups) == 1
        lines += _same_place_advice(groups[0], len(stacks.processes) > 1) if is_single else []
    elif len(groups) > 1 and not by_witness:
        lines += _several_groups_advice(stacks)
    lines += odd_threads.sentences(stacks)
    lines += _different_code_advice(differences)
    lines += _other_processes_advice(stacks, disputed)
    if not stacks.processes and instead:
        node = min(instead, key=natural)
        text = f"no process has a rank; {node} runs {_few(list(instead[node]))}"
        lines.append(f"{text}: name one with --pid, or many with --match")
    return dataclasses.replace(stacks, advice=tuple(lines))
