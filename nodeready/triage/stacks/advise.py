"""What to look at next, from the groups of ranks; and the ranks that are missing."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from nodeready.inventory.nodeset import fold, natural
from nodeready.triage.stacks import hints
from nodeready.triage.stacks.document import Group, Rank, Stacks, fold_ranks

# --- Missing ranks, which WORLD_SIZE counts and nobody found, and the nodes that should have them.

#: More ranks than any job has had: such a number is a mistake, and nothing is made of it.
MAX_RANKS = 1 << 20
#: How the reason ends when all of them are on nodes without an answer.
SILENT = ", without an answer"


def missing_ranks(
    world_size: int | None,
    by_node: Mapping[str, Collection[int]],
    silent: Collection[str],
    without: Collection[str],
) -> Group | None:
    """The group of missing ranks; None when there are none, or nobody knows.

    by_node: node -> the ranks that were found there
    silent:  nodes that gave no answer
    without: nodes that answered and have no rank of this job
    """
    found = {rank for ranks in by_node.values() for rank in ranks}
    if not world_size or not 0 < world_size <= MAX_RANKS or max(found, default=0) >= world_size:
        return None
    if len(found) == world_size or not found:
        return None
    ranks = tuple(rank for rank in range(world_size) if rank not in found)
    nodes = expected_nodes(world_size, ranks, by_node, [*silent, *without])
    why = f"WORLD_SIZE {world_size} counts them, and nobody found them"
    if nodes:
        why += f"; expected on {fold(nodes)}"
        if set(nodes) <= set(silent):
            why += SILENT
    elif silent:
        why += f"; {len(silent)} node{'s' if len(silent) > 1 else ''} gave no answer"
    return Group("missing", None, ranks, nodes, why=why)


def expected_nodes(
    world_size: int,
    ranks: Collection[int],
    by_node: Mapping[str, Collection[int]],
    others: Collection[str],
) -> tuple[str, ...]:
    """The nodes that should have these ranks; () when the ranks found follow no rule.

    The rule is that of torchrun and of Slurm's block distribution: each node has the same number
    of ranks, one after the other.
    """
    if len(by_node) == 1 and not others:
        return tuple(by_node)
    sizes = Counter(len(set(found)) for found in by_node.values())
    size = max(sizes, key=lambda one: (sizes[one], one))
    if world_size % size:
        return ()
    home: dict[int, str] = {}
    for node, found in by_node.items():
        blocks = {rank // size for rank in found}
        block = blocks.pop()
        if blocks or block in home:
            return ()
        home[block] = node
    blocks = {rank // size for rank in ranks}
    nodes = [home[block] for block in sorted(blocks & home.keys())]
    away = blocks - home.keys()
    if not away:
        return tuple(nodes)
    return (*nodes, *others) if len(away) == len(others) else ()


# --- The advice, a line each.

#: Processes, jobs and programs that are named one by one.
_MOST = 5
#: A group with fewer than this part of the ranks is a minority; when the smallest has this part of
#: the largest, the groups are alike.
_MINORITY, _ALIKE = 0.25, 0.5
#: Characters of a rank set.
_WIDE = 60


def _ranks(group: Group) -> str:
    if not group.ranks:
        return _count(group.processes, "process", "processes") if group.processes else "nodes"
    text = fold_ranks(group.ranks)
    if len(text) > _WIDE:
        text = text[: text.rfind(",", 0, _WIDE)] + ",..."
    return f"rank{'s' if len(group.ranks) > 1 else ''} {text}"


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _few(items: Sequence[str]) -> str:
    """The first items, and how many more there are."""
    text = ", ".join(items[:_MOST])
    return f"{text} and {len(items) - _MOST} more" if len(items) > _MOST else text


def _world(sizes: Mapping[int, int], stacks: Stacks) -> Iterator[str]:
    if len(sizes) > 1:
        said = [
            f"{size} ({_count(count, 'process', 'processes')})"
            for size, count in sorted(sizes.items(), key=lambda item: -item[1])
        ]
        yield (
            f"the ranks disagree on WORLD_SIZE: {_few(said)}: two runs at once, or a launcher "
            "that sets it wrongly"
        )
    highest = max((one.rank for one in stacks.processes if one.rank is not None), default=-1)
    size = stacks.world_size
    if size is not None and not 0 < size <= MAX_RANKS:
        yield f"WORLD_SIZE is {size}, which no job has: missing ranks cannot be counted"
    elif size is not None and highest >= size:
        yield f"rank {highest} is outside of WORLD_SIZE {size}: missing ranks cannot be counted"


def _twice(processes: Sequence[Rank]) -> Iterator[str]:
    """The processes are sorted by rank."""
    found: dict[int, list[Rank]] = {}
    for before, process in itertools.pairwise(processes):
        if process.rank is not None and process.rank == before.rank:
            found.setdefault(process.rank, [before]).append(process)
    if found:
        rank, claims = next(iter(found.items()))
        who = _few([f"{one.node} pid {one.pid}" for one in claims])
        more = f", and {len(found) - 1} more ranks are claimed twice" if len(found) > 1 else ""
        yield (
            f"rank {rank} is claimed by {len(claims)} processes ({who}){more}: an earlier run "
            "may not have ended, or a helper inherits RANK; name the right one with --pid"
        )


_OF_KINDS = {
    "missing": (
        "{ranks}: nobody found them: they ended or never started. Look at dmesg there (out of "
        "memory, Xid), `nodeready cores INVENTORY`, `nodeready tail INVENTORY` and the launcher's "
        "output"
    ),
    "dead": (
        "{ranks}: look for a core (`nodeready cores INVENTORY`) and at dmesg; the others wait "
        "for them in vain"
    ),
    "stopped": (
        "{ranks}: `kill -CONT PID` lets them go on, once it is known who stopped them: a "
        "suspended job, a debugger, Ctrl-Z"
    ),
    "traced": "{ranks}: a process that is traced stands still: see who holds it (ps -p TRACER)",
    "uninterruptible": (
        "{ranks}: state D waits in the kernel, for storage or for a driver: look at dmesg and at "
        "the mounts there (`nodeready audit INVENTORY --only host`)"
    ),
}


_UNASKED = (
    "{ranks}: the nodes that should have them gave no answer: see whether those are alive, and "
    "look at them first"
)


def _kinds(groups: Sequence[Group]) -> Iterator[str]:
    for kind, text in _OF_KINDS.items():
        found = [group for group in groups if group.kind == kind]
        if found:
            ranks = sorted({rank for group in found for rank in group.ranks})
            whole = dataclasses.replace(
                found[0], ranks=tuple(ranks), processes=sum(group.processes for group in found)
            )
            silent = kind == "missing" and found[0].why.endswith(SILENT)
            yield (_UNASKED if silent else text).format(ranks=_ranks(whole))
    why = [group.why.lower() for group in groups if group.kind == "no-data"]
    if any("permi" in text or "ptrace" in text for text in why):
        yield (
            "py-spy was refused: `nodeready audit INVENTORY --only ptrace` tells by what, and "
            "`nodeready deploy INVENTORY --only ptrace` repairs it"
        )


def _stuck(group: Group) -> str:
    """What a group waits for, in one word, or ""."""
    found = hints.find(group.frames, group.native) if group.verdict != "progressing" else None
    return found.about if found else ""


def _all_here(group: Group, several: bool) -> Iterator[str]:
    """There is one group, of all ranks."""
    about = _stuck(group)
    if about in ("collective", "backward", "gpu", "start") and several:
        yield (
            f"all {group.processes} ranks stand in the same {_WORDS[about]}: nobody is elsewhere, "
            "so look at the network: `nodeready audit INVENTORY --only rdma.errors,nics.errors`, "
            "`nodeready ready INVENTORY --ports FIRST-LAST`"
        )
        yield (
            "start the job again with NCCL_DEBUG=INFO and PyTorch's flight recorder "
            "(TORCH_NCCL_TRACE_BUFFER_SIZE=2000, in newer versions TORCH_FR_BUFFER_SIZE; "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1): it names the collective that each rank is in"
        )
    elif group.verdict == "progressing":
        yield "all ranks move: between the samples each of them has come to another place"
    elif several:
        yield f"all {group.processes} ranks stand at the same place: no rank is the odd one"


_WORDS = {
    "collective": "collective",
    "backward": "backward pass",
    "gpu": "wait for the GPU",
    "start": "start-up",
}


def _apart(groups: Sequence[Group]) -> Iterator[str]:
    """There are several groups with a stack, the smallest first."""
    sizes = [group.processes for group in groups]
    moving = sum(group.processes for group in groups if group.verdict == "progressing")
    if 2 * moving > sum(sizes):
        yield (
            f"{moving} of {sum(sizes)} ranks move: the job is slow or was looked at in the middle "
            "of its work; look again, with a longer --interval"
        )
        return
    if min(sizes) >= _ALIKE * max(sizes):
        yield (
            f"the {len(groups)} groups are of similar size: the stages of a pipeline stand at "
            "different places legitimately; compare the ranks within a stage"
        )
    elif min(sizes) <= _MINORITY * sum(sizes):
        few = min(groups, key=lambda group: group.processes)
        yield (
            f"{_ranks(few)}: few are where the others are not: a suspect, not guilty: rank 0 and "
            "the stages of a pipeline differ legitimately"
        )
    if all(_stuck(group) == "collective" for group in groups):
        yield (
            "all ranks wait, in different collectives: a rank has called another one or has left "
            "one out; TORCH_DISTRIBUTED_DEBUG=DETAIL names the mismatch"
        )
    if any(group.verdict == "spinning" for group in groups) and any(
        group.verdict == "blocked" for group in groups
    ):
        spin = next(group for group in groups if group.verdict == "spinning")
        yield f"{_ranks(spin)}: uses CPU time where it stands while others wait: a loop, or slow"


def _elsewhere(stacks: Stacks) -> Iterator[str]:
    jobs = {one.job for one in stacks.others} - {stacks.job}
    users = {one.user for one in stacks.others} - {stacks.user}
    if stacks.others:
        said = [
            f"{one.job or 'without a job'} ({_count(one.processes, 'process', 'processes')}"
            f"{f' of {one.user}' if users and one.user else ''})"
            for one in stacks.others
        ]
        whose = f" of {stacks.user}" if users and stacks.user else ""
        options = [*(["--job ID"] if jobs else []), *(["--user NAME"] if users else [])]
        yield (
            f"shown is job {stacks.job or '(none)'}{whose}; there are also {_few(said)}: choose "
            f"with {' or '.join(options) or '--pid'}"
        )
    strangers = [one for one in stacks.others if one.stranger]
    if strangers:
        count = sum(one.processes for one in strangers)
        yield (
            f"{_count(count, 'process claims', 'processes claim')} to be of job {stacks.job} and "
            f"{'is' if count == 1 else 'are'} not: of {_few(sorted({s.user for s in strangers}))}"
        )
    silent = {node for one in stacks.groups if one.kind == "no-data" for node in one.nodes}
    alone = {node: why for node, why in stacks.errors.items() if node not in silent}
    if alone:
        node = min(alone, key=natural)
        yield f"{fold(alone)}: a part of the answer is missing: {alone[node]}"


def with_advice(
    stacks: Stacks,
    world_sizes: Mapping[int, int],
    instead: Mapping[str, Sequence[str]],
) -> Stacks:
    """The document with its advice.

    world_sizes: WORLD_SIZE -> how many processes say so
    instead:     node -> what runs there, where no rank was found
    """
    groups = [group for group in stacks.groups if group.kind == "stack"]
    lines = [*_kinds(stacks.groups), *_world(world_sizes, stacks), *_twice(stacks.processes)]
    if len(groups) == 1 and groups[0].processes == len(stacks.processes):
        alone = len(stacks.groups) == 1
        lines += _all_here(groups[0], len(stacks.processes) > 1) if alone else []
    elif len(groups) > 1:
        lines += _apart(groups)
    lines += _elsewhere(stacks)
    if not stacks.processes and instead:
        node = min(instead, key=natural)
        lines.append(
            f"no process has a rank; {node} runs {_few(list(instead[node]))}: name one with "
            "--pid, or many with --match"
        )
    return dataclasses.replace(stacks, advice=tuple(lines))
