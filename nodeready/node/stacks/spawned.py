"""Ranks that no launcher has given a number: what a Python has started, or people by hand.

torch.multiprocessing starts its processes from Python, Ray Train has its workers start them, and
jax.distributed takes a number as an argument: nothing of that is in an environment. So they are
known by what they have in memory (torch or JAX), by who has started them, and by their stacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nodeready.node.runtime import Supervisor
from nodeready.node.stacks import below, py_spy
from nodeready.node.stacks.processes import HANGS, Process, contents, each
from nodeready.node.stacks.ranks import Identity, Rank, owner_of, program

# The libraries that a rank has mapped: of torch, and of JAX by its versions.
_LIBRARIES = re.compile(r"/(libtorch_cpu|libtorch|libjax_common|libjax_cuda\w*|xla_extension)\.")
#: Of /proc/PID/maps that is read: some 4,000 lines for torch with CUDA.
_MAPS_BYTES = 4 << 20
# A worker of Ray Train's: Ray names its processes by the class of the actor, and its call.
_RAY_WORKER = re.compile(r"ray::\w*TrainWorker\b")
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


def find(
    supervisor: Supervisor, path: str, seen: Sequence[Process], ours: Collection[int]
) -> list[Rank]:
    """The ranks of a node where no process has a number of its own; [] where nothing tells that
    there is more than one.

    path: py-spy's; seen: all processes; ours: processes that are no job's
    """
    theirs = [p for p in seen if p.pid not in ours]
    workers = [p for p in theirs if _RAY_WORKER.match(p.command)]
    if workers:
        return [_rank(process) for process in workers]
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


def _above(pid: int, parents: Mapping[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def started_by(
    supervisor: Supervisor, path: str, parent: Process, seen: Sequence[Process]
) -> list[Rank]:
    """The ranks that torch.multiprocessing has started from this process, by their places; [] for
    any other children: a loader's workers, say."""
    children = [p for p in seen if p.parent == parent.pid and p.python and not below.noise(p)]
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
