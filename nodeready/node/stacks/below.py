"""The processes below a rank: what it has started, and may wait for.

A data loader's workers, compilers, shells and checkpoint writers, under fork, spawn and
forkserver, however deep; never another rank. Each is a `Target`, so all rules of a rank's look
hold for it: the state in which py-spy must not read it, the turns of the owners, the limits. Its
stack is taken once, with the last sample of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nodeready.node.runtime import ProcessSupervisor
from nodeready.node.stacks import processes, py_spy
from nodeready.node.stacks.processes import HANGS, Process, contents, each
from nodeready.node.stacks.py_spy import Dump
from nodeready.node.stacks.ranks import (
    Identity,
    Rank,
    StackTable,
    Target,
    noise,
    owner_of,
    program,
    trains,
)
from nodeready.node.witnesses import logs

#: At most so many of one rank are looked at.
MOST = 64

#: What they are for, the first that fits.
LOADER, COMPILER, SHELL, WRITER, OTHER = (
    "loader worker", "compiler", "shell", "checkpoint writer", "process",
)  # fmt: skip

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


# The libraries that a rank has mapped: of torch, and of JAX by its versions.
_LIBRARIES = re.compile(r"/(libtorch_cpu|libtorch|libjax_common|libjax_cuda\w*|xla_extension)\.")
#: Of /proc/PID/maps that is read: some 4,000 lines for torch with CUDA.
_MAPS_BYTES = 4 << 20
# Where a worker of Ray Train's writes its number (ray/train/_internal/logging.py), and what it
# writes there (_setup_torch_process_group of ray/train/torch/config.py).
_RAY_LOG = re.compile(r"/ray-train-sys-worker-[0-9a-f]+\.log")
_RAY_NUMBER = re.compile(
    rb"process group for: [^\[\n]{0,300}\[rank=(\d{1,9}), world_size=(\d{1,9})\]"
)
#: Of such a log that is read: that line is among its first.
_RAY_LOG_BYTES = 1 << 18
# A Python for a person, not for a job.
_NOT_RANKS = re.compile(r"ipykernel_launcher|jupyter|ipython|tensorboard|ray::|raylet|gcs_server")
#: Processes that are asked for how they were started, and seconds for all of them.
_MOST_ASKED, _ASK_S = 64, 6.0
#: How the job of such ranks is called: by the process that has started them.
JOB = r"pid ([0-9]{1,9})"
_ESTABLISHED = 1  # of /proc/net/tcp


def holders(seen: Sequence[Process], deadline: float) -> set[int]:
    """The Pythons among these that have torch or JAX in memory."""
    pythons = {p.pid: p.uid for p in seen if p.python or p.command.startswith("ray::")}
    found = each(_holds, list(pythons), deadline, pythons)
    return {pid for pid, holds in found.items() if holds is True}


def _holds(pid: int) -> bool:
    return bool(_LIBRARIES.search(contents(f"/proc/{pid}/maps", _MAPS_BYTES)))


def find_spawned(
    supervisor: ProcessSupervisor, path: str, seen: Sequence[Process], ours: Collection[int]
) -> list[Rank]:
    """The ranks of a node where no process has a number of its own; [] where nothing tells that
    there is more than one.

    path: py-spy's; seen: all processes; ours: processes that are no job's
    """
    theirs = [p for p in seen if p.pid not in ours]
    deadline = min(supervisor.deadline, time.monotonic() + _ASK_S)
    having = holders([p for p in theirs if not _NOT_RANKS.search(p.command)], deadline)
    parents = {p.pid: p.parent for p in seen}
    top = [p for p in theirs if p.pid in having and not having & _above(p.pid, parents)]
    found: list[Rank] = []
    alone: dict[tuple[int | None, str], list[Process]] = defaultdict(list)
    for process in top:
        of = started_by(supervisor, path, process, theirs)
        found += of
        if not of:
            alone[process.uid, program(process)].append(process)
    # One alone may be anything; some of the same program are what a person starts by hand.
    for same in alone.values():
        found += [_rank(process) for process in same] if len(same) > 1 else []
    return found


def numbered(found: Sequence[Rank], deadline: float) -> list[Rank]:
    """The same ranks, with their numbers those of Ray Train's of which Ray's log tells them.

    Where one of a job's says nothing, or two say the same, none of the job's has a number: some
    with and some without could not be counted.
    """
    asked: dict[int, Rank] = {}
    for rank in found:
        if trains(rank.process) and rank.identity.rank is None and not rank.stranger:
            asked[rank.process.pid] = rank
    if not asked:
        return list(found)
    uids = {pid: rank.process.uid or 0 for pid, rank in asked.items()}
    told = each(lambda pid: _number_in_ray(pid, uids[pid]), list(uids), deadline, uids)
    jobs: dict[tuple[str, str], list[int]] = defaultdict(list)
    for pid, rank in asked.items():
        jobs[rank.identity.owner, rank.identity.job].append(pid)
    for pids in jobs.values():
        said = [one for pid in pids if (one := told.get(pid)) not in (None, HANGS)]
        places, sizes = {one[0] for one in said}, {one[1] for one in said}
        if len(places) == len(pids) and len(sizes) == 1 and max(places) < min(sizes):
            for pid, (place, size) in zip(pids, said, strict=True):
                who = replace(asked[pid].identity, rank=place, world_size=size)
                asked[pid] = replace(asked[pid], identity=who)
    made = [asked.get(rank.process.pid, rank) for rank in found]
    return sorted(
        made, key=lambda one: (one.stranger, one.identity.rank is None, one.identity.rank or 0)
    )


def _number_in_ray(pid: int, uid: int) -> tuple[int, int] | None:
    """(rank, world size) of a worker of Ray Train's by the log that it writes; for a fork."""
    for number in logs.descriptors(pid):
        link = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError, logs.NoLogError):
            shown = os.readlink(link)
            if _RAY_LOG.fullmatch(shown[shown.rfind("/") :]):
                log = logs.open_written(link, shown, uid)
                try:
                    data = os.pread(log.number, _RAY_LOG_BYTES, 0)
                finally:
                    os.close(log.number)
                if rows := _RAY_NUMBER.findall(data):
                    return int(rows[-1][0]), int(rows[-1][1])
    return None


def _above(pid: int, parents: Mapping[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def started_by(
    supervisor: ProcessSupervisor, path: str, parent: Process, seen: Sequence[Process]
) -> list[Rank]:
    """The ranks that torch.multiprocessing has started from this process, by their places; [] for
    any other children: a loader's workers, say."""
    children = [p for p in seen if p.parent == parent.pid and p.python and not noise(p)]
    servers = [p for p in children if _FORK_SERVER.search(p.command)]
    children += [p for p in seen if p.python and p.parent in {s.pid for s in servers}]
    children = [p for p in children if p not in servers]
    children.sort(key=lambda process: (process.start_s, process.pid))
    until = min(supervisor.deadline, time.monotonic() + _ASK_S)
    places: dict[int, int] = {}
    for process in children[:_MOST_ASKED]:
        if time.monotonic() > until or not _readable(process):
            continue
        seen_ = py_spy.take(supervisor, path, process.pid, _left(until), py_spy.LOCALS)
        if seen_.spawned >= 0:
            places[process.pid] = seen_.spawned
        elif not places:
            # The others are of the same sort.
            break
    if not places:
        return []
    ranks = [p for p in children if p.pid in places]
    # On several nodes, each begins with 0.
    size = None
    if _talk_on_this_node([p.pid for p in ranks], until):
        spawns = py_spy.take(supervisor, path, parent.pid, _left(until), py_spy.LOCALS).spawns
        size = max(spawns, 1 + max(places.values()))
    return [
        _rank(process, places[process.pid], size, f"pid {parent.pid}" if size else "")
        for process in sorted(ranks, key=lambda process: places[process.pid])
    ]


def _left(until: float) -> float:
    return max(0.5, until - time.monotonic())


_FORK_SERVER = re.compile(r"from multiprocessing\.forkserver import main")


def _readable(process: Process) -> bool:
    """Whether py-spy may look: by the same rules as for a rank, as far as they are known here."""
    return not process.hangs and os.geteuid() in (0, process.uid)


def _talk_on_this_node(pids: Sequence[int], deadline: float) -> bool:
    """Whether all connections of these processes end on this node."""
    found = each(_ends_here, pids, deadline)
    return all(found.get(pid) not in (False, HANGS, None) for pid in pids)


def _ends_here(pid: int) -> bool:
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if link.startswith("socket:["):
                    inodes.add(link[len("socket:[") : -1])
    for table in ("tcp", "tcp6"):
        for row in contents(f"/proc/{pid}/net/{table}", _MAPS_BYTES).splitlines()[1:]:
            words = row.split()
            if len(words) > 9 and words[9] in inodes and int(words[3], 16) == _ESTABLISHED:
                own, peer = (word.partition(":")[0] for word in words[1:3])
                if own != peer:
                    return False
    return True


def _rank(
    process: Process, place: int | None = None, size: int | None = None, job: str = ""
) -> Rank:
    """place: its rank on the node. size: of the job, which is all on this node; None: nobody
    knows, and its rank in the job neither"""
    who = Identity(local_rank=place, owner=owner_of(process), job=job)
    return Rank(process, replace(who, rank=place, world_size=size) if size else who)
