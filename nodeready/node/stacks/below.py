"""The processes below a rank: what it has started, and may wait for.

A data loader's workers, compilers, shells and checkpoint writers, under fork, spawn and
forkserver, however deep; never another rank. Each is a `Target`, so all rules of a rank's look
hold for it: the state in which py-spy must not read it, the turns of the owners, the limits. Its
stack is taken once, with the last sample of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nodeready.node.stacks import processes
from nodeready.node.stacks.processes import Process
from nodeready.node.stacks.py_spy import Dump
from nodeready.node.stacks.ranks import Identity, Rank, StackTable, Target, program

#: At most so many of one rank are looked at.
MOST = 64

#: What they are for, the first that fits.
LOADER, COMPILER, SHELL, WRITER, OTHER = (
    "loader worker", "compiler", "shell", "checkpoint writer", "process",
)  # fmt: skip

# Processes of Python's multiprocessing that wait for the end of their parent, and do nothing else
# (multiprocessing/resource_tracker.py; semaphore_tracker.py before Python 3.8).
_NOISE = re.compile(
    r"from multiprocessing\.(resource|semaphore)_tracker import main|multiprocessing-fork-tracker"
)
_COMPILERS = re.compile(
    r"ninja|make|cmake|gcc|g\+\+|cc|c\+\+|cc1|cc1plus|collect2|ld(\.\w+)?|as|clang(\+\+)?(-\d+)?"
    r"|nvcc|cicc|ptxas|cudafe\+\+|fatbinary|nvlink|hipcc|lld|ccache|x86_64-linux-gnu-\S+"
)
# Modules of torch that start compilers (torch/_inductor/compile_worker/__main__.py).
_COMPILE = re.compile(r"torch[./]_inductor[./]compile_worker")
_SHELLS = re.compile(r"-?(ba|da|z|k|tc|c|fi)?sh|busybox")
# torch/utils/data/_utils/worker.py names its workers since 2.6; the name is of 15 characters.
_WORKERS = re.compile(r"pt_data_worker")
#: (function, beginning of the file) on a stack -> what the process is for.
_STACKS = (
    ("_worker_loop", "worker.py", LOADER),
    # tf.data, grain and webdataset have no worker of their own name: torch's loader alone.
    ("_fetch_and_run", "", COMPILER),
    # torch/distributed/checkpoint/_async_process_executor.py
    ("_checkpointing_subprocess", "", WRITER),
    ("_execute_save", "", WRITER),
    # torch/_inductor/compile_worker/subproc_pool.py
    ("do_job", "subproc_pool.py", COMPILER),
    ("_worker_compile_triton", "", COMPILER),
)  # fmt: skip


def noise(process: Process) -> bool:
    """Whether a process does nothing but wait for the end of who started it."""
    return bool(_NOISE.search(process.command))


def kind(process: Process, dump: Dump | None = None) -> str:
    """What a process is for: by its stack, where there is one, else by its name and words."""
    calls = [(frame[0], frame[1]) for frame in (dump.main if dump else None) or ()]
    for function, file, found in _STACKS:
        if any(name == function and place.endswith(file) for name, place in calls):
            return found
    if _WORKERS.match(process.name):
        return LOADER
    name = program(process)
    if _COMPILE.search(process.command) or _COMPILERS.fullmatch(name):
        return COMPILER
    return SHELL if _SHELLS.fullmatch(name) else OTHER


def _descendants(
    pid: int, children: Mapping[int, Sequence[int]], apart: Collection[int]
) -> Iterator[int]:
    """What a process has started, the nearest first, without these and what they have started."""
    seen, level = {pid}, [pid]
    while level:
        found = [child for one in level for child in children.get(one, ()) if child not in seen]
        level = [child for child in dict.fromkeys(found) if child not in apart]
        seen.update(level)
        yield from level


def find(
    targets: Sequence[Target], known: Sequence[Process], ours: Collection[int], deadline: float
) -> None:
    """Give each target the processes below it as they are now.

    known: the processes as they were found first; what has come since is looked at
    ours:  processes that are no job's
    """
    children = processes.children()
    apart = {target.pid for target in targets} | set(ours)
    of: dict[int, list[int]] = {}
    for place, target in enumerate(targets):
        if not target.rank.stranger and target.facts:
            of[place] = list(_descendants(target.pid, children, apart))
    before = {process.pid: process for process in known}
    # A worker that was forked and has not called exec yet has the words of who forked it.
    new = [pid for pids in of.values() for pid in pids[: 2 * MOST] if pid not in before]
    found, _ = processes.scan(deadline, new)
    before.update((process.pid, process) for process in found)
    for place, pids in of.items():
        target = targets[place]
        wanted = [before[pid] for pid in pids if pid in before and not noise(before[pid])]
        target.below = [_target(process, target) for process in wanted[:MOST]]
        if len(wanted) > MOST:
            target.add_note(f"{len(wanted) - MOST} more processes below it are not looked at")


def _target(process: Process, above: Target) -> Target:
    """A process below a rank takes its turn with the rank's owner."""
    found = Target(Rank(process, Identity(owner=above.rank.identity.owner)))
    found.cpu_s.append(process.cpu_s)
    return found


def in_order(targets: Sequence[Target]) -> list[Target]:
    """Those whose stacks are wanted, one of each sort of a rank before the second of any.

    Workers that wait at the same place for the same are of one sort: where time is short, what
    differs has been looked at.
    """
    ranked: list[tuple[int, int, Target]] = []
    for target in targets:
        count: dict[tuple[str, ...], int] = {}
        for one in target.below:
            now = one.facts[-1] if one.facts else None
            if now is None or not one.rank.process.python:
                continue
            sort = (kind(one.rank.process), now.state, now.wait_channel, _words(one.waits_on))
            nth = count[sort] = count.get(sort, -1) + 1
            ranked.append((nth, len(ranked), one))
    return [one for _, _, one in sorted(ranked, key=lambda row: row[:2])]


def _words(phrase: str) -> str:
    """A phrase without its numbers: pids, ports and inodes are everybody's own."""
    return re.sub(r"\d+", "N", phrase)


def plain(above: Target, table: StackTable) -> list[dict[str, Any]]:
    """The part of the trace."""
    return [_row(one, table) for one in above.below if not _serves(one)]


def _serves(one: Target) -> bool:
    """Whether a process is an idle fork server: its workers are processes below, as well."""
    stack = (one.dumps[-1].main if one.dumps else None) or ()
    above = [(frame[0], frame[1]) for frame in stack[-2:-1]]
    return above == [("main", "multiprocessing/forkserver.py")]


def _row(one: Target, table: StackTable) -> dict[str, Any]:
    process, now = one.rank.process, one.settled
    dump = one.dumps[-1] if one.dumps else Dump()
    why = dump.error if process.python else "not Python"
    return {
        "pid": process.pid,
        "parent": process.parent,
        "kind": kind(process, dump),
        "command": process.command[:200] or process.name,
        "state": now.state if now else "",
        "wait_channel": now.wait_channel if now else "",
        "cpu_s": one.cpu_s,
        "waits_on": one.waits_on,
        "main": None if dump.main is None else table.add(dump.main),
        "error": ("; ".join(one.notes) or why) if dump.main is None else "",
    }
