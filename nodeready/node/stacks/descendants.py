"""The descendants of a rank: the processes that it has started, and may wait for.

They are a data loader's workers, compilers, shells and checkpoint writers, under fork, spawn and
forkserver, at any depth; never another rank. Each is a `StackTarget`, so the rules for a rank
hold for it too: the state in which py-spy must not read it, the turns of the owners, the limits.
Its stack is taken once, with the last sample of the ranks.
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
from nodeready.node.stacks import processes, py_spy, waits
from nodeready.node.stacks.processes import HANGS, ScannedProcess, contents, probe_each
from nodeready.node.stacks.py_spy import Dump
from nodeready.node.stacks.ranks import (
    Computes,
    JobRank,
    RankIdentity,
    is_ray_trainer,
    only_tracks,
    owner_of,
    program,
)
from nodeready.node.stacks.targets import StackTable, StackTarget
from nodeready.node.witnesses import logs

#: Maximum descendants of one rank that are probed.
MAX_DESCENDANTS = 64

#: Purposes of a process; the first match counts.
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
#: (function, end of the file's name) on a stack -> the purpose of the process.
_STACKS = (
    ("_worker_loop", "worker.py", LOADER),
    # tf.data, grain and webdataset name no worker; only torch's loader does.
    ("_fetch_and_run", "", COMPILER),
    # torch/distributed/checkpoint/_async_process_executor.py
    ("_checkpointing_subprocess", "", WRITER),
    ("_execute_save", "", WRITER),
    # torch/_inductor/compile_worker/subproc_pool.py
    ("do_job", "subproc_pool.py", COMPILER),
    ("_worker_compile_triton", "", COMPILER),
)  # fmt: skip


def kind(process: ScannedProcess, dump: Dump | None = None) -> str:
    """The purpose of a process: by its stack if there is one, else by its name and command."""
    calls = [(frame[0], frame[1]) for frame in (dump.main if dump else None) or ()]
    for function, file, kind_of_call in _STACKS:
        if any(name == function and place.endswith(file) for name, place in calls):
            return kind_of_call
    if _WORKERS.match(process.name):
        return LOADER
    name = program(process)
    if _COMPILE.search(process.command) or _COMPILERS.fullmatch(name):
        return COMPILER
    return SHELL if _SHELLS.fullmatch(name) else OTHER


def _descendants(
    pid: int, children: Mapping[int, Sequence[int]], excluded: Collection[int]
) -> Iterator[int]:
    """The descendants of a process, the nearest first; an excluded process ends its branch."""
    visited, level = {pid}, [pid]
    while level:
        started = [
            child for parent in level for child in children.get(parent, ()) if child not in visited
        ]
        level = [child for child in dict.fromkeys(started) if child not in excluded]
        visited.update(level)
        yield from level


def find(
    targets: Sequence[StackTarget],
    scanned: Sequence[ScannedProcess],
    own_pids: Collection[int],
    deadline: float,
) -> None:
    """Set each target's descendants, as they are now.

    scanned:  the processes of the first scan; newer ones are scanned here
    own_pids: processes of nodeready, which belong to no job
    """
    children = processes.children()
    excluded = {target.pid for target in targets} | set(own_pids)
    pids_by_place: dict[int, list[int]] = {}
    for place, target in enumerate(targets):
        if not target.rank.stranger and target.facts:
            pids_by_place[place] = list(_descendants(target.pid, children, excluded))
    process_by_pid = {process.pid: process for process in scanned}
    # A worker that was forked and has not called exec yet has its parent's command line.
    new = [
        pid
        for pids in pids_by_place.values()
        for pid in pids[: 2 * MAX_DESCENDANTS]
        if pid not in process_by_pid
    ]
    new_processes, _ = processes.scan(deadline, new)
    process_by_pid.update((process.pid, process) for process in new_processes)
    for place, pids in pids_by_place.items():
        target = targets[place]
        candidates = [
            process_by_pid[pid]
            for pid in pids
            if pid in process_by_pid and not only_tracks(process_by_pid[pid])
        ]
        target.descendants = [_target(process, target) for process in candidates[:MAX_DESCENDANTS]]
        if len(candidates) > MAX_DESCENDANTS:
            target.add_note(
                f"{len(candidates) - MAX_DESCENDANTS} more of its descendants are not looked at"
            )


def _target(process: ScannedProcess, rank: StackTarget) -> StackTarget:
    """The target of a descendant, which takes its turn with the rank's owner."""
    target = StackTarget(JobRank(process, RankIdentity(owner=rank.rank.identity.owner)))
    target.cpu_s.append(process.cpu_s)
    return target


def dump_order(targets: Sequence[StackTarget]) -> list[StackTarget]:
    """The descendants whose stacks are taken; each sort of a rank's descendants comes once first.

    Workers that wait in the same place for the same object are of one sort. So if time is short,
    one process of each sort has been probed.
    """
    ranked: list[tuple[int, int, StackTarget]] = []
    for target in targets:
        count: dict[tuple[str, ...], int] = {}
        for descendant in target.descendants:
            facts = descendant.facts[-1] if descendant.facts else None
            if facts is None or not descendant.rank.process.python:
                continue
            sort = (
                kind(descendant.rank.process),
                facts.state,
                facts.wait_channel,
                _without_numbers(descendant.waits_on),
            )
            nth = count[sort] = count.get(sort, -1) + 1
            ranked.append((nth, len(ranked), descendant))
    return [descendant for _, _, descendant in sorted(ranked, key=lambda row: row[:2])]


def _without_numbers(phrase: str) -> str:
    """A phrase without its numbers: pids, ports and inodes differ between processes."""
    return re.sub(r"\d+", "N", phrase)


def plain(rank: StackTarget, table: StackTable) -> list[dict[str, Any]]:
    """The rows of a rank's descendants in the trace."""
    return [
        _row(descendant, table)
        for descendant in rank.descendants
        if not _is_fork_server(descendant)
    ]


def _is_fork_server(descendant: StackTarget) -> bool:
    """Whether a process is an idle fork server; its workers are descendants as well."""
    stack = (descendant.dumps[-1].main if descendant.dumps else None) or ()
    callers = [(frame[0], frame[1]) for frame in stack[-2:-1]]
    return callers == [("main", "multiprocessing/forkserver.py")]


def _row(descendant: StackTarget, table: StackTable) -> dict[str, Any]:
    process, facts = descendant.rank.process, descendant.lasting_facts
    dump = descendant.dumps[-1] if descendant.dumps else Dump()
    reason = dump.error if process.python else "not Python"
    return {
        "pid": process.pid,
        "parent": process.parent,
        "kind": kind(process, dump),
        "command": process.command[:200] or process.name,
        "state": facts.state if facts else "",
        "wait_channel": facts.wait_channel if facts else "",
        "cpu_s": descendant.cpu_s,
        "waits_on": descendant.waits_on,
        "main": None if dump.main is None else table.add(dump.main),
        "error": ("; ".join(descendant.notes) or reason) if dump.main is None else "",
    }


# Libraries that a rank has mapped: of torch, and of the versions of JAX.
_LIBRARIES = re.compile(r"/(libtorch_cpu|libtorch|libjax_common|libjax_cuda\w*|xla_extension)\.")
#: Maximum bytes of /proc/PID/maps that are read: torch with CUDA has some 4,000 lines.
_MAPS_BYTES = 4 << 20
# The log in which a worker of Ray Train writes its number (ray/train/_internal/logging.py), and
# the line (_setup_torch_process_group of ray/train/torch/config.py).
_RAY_LOG = re.compile(r"/ray-train-sys-worker-[0-9a-f]+\.log")
_RAY_NUMBER = re.compile(
    rb"process group for: [^\[\n]{0,300}\[rank=(\d{1,9}), world_size=(\d{1,9})\]"
)
#: Bytes at the beginning of such a log that are read: that line is among the first.
_RAY_LOG_BYTES = 1 << 18
# A Python that serves a person, not a job.
_NOT_RANKS = re.compile(r"ipykernel_launcher|jupyter|ipython|tensorboard|ray::|raylet|gcs_server")
#: Maximum processes whose variables of torch.multiprocessing are read, and seconds for all.
_MAX_ASKED, _ASK_S = 64, 6.0
#: The name of the job of such ranks: the process that has started them.
JOB = r"pid ([0-9]{1,9})"


def library_holders(processes_to_check: Sequence[ScannedProcess], deadline: float) -> set[int]:
    """The Pythons among these that have torch or JAX in memory."""
    pythons = {
        p.pid: p.uid for p in processes_to_check if p.python or p.command.startswith("ray::")
    }
    answers = probe_each(_has_library, list(pythons), deadline, pythons)
    return {pid for pid, holds in answers.items() if holds is True}


def _has_library(pid: int) -> bool:
    return bool(_LIBRARIES.search(contents(f"/proc/{pid}/maps", _MAPS_BYTES)))


def computes(deadline: float) -> Computes:
    """A function that tells whether the child of a Python computes in its place.

    It does if only the child has torch or JAX in memory; or if both or neither have, and only the
    child has connections.
    """
    signs_by_pid: dict[int, tuple[bool, bool]] = {}

    def is_lower(parent: ScannedProcess, child: ScannedProcess) -> bool:
        owner_by_pid = {
            process.pid: process.uid
            for process in (parent, child)
            if process.pid not in signs_by_pid
        }
        for pid, signs in probe_each(_signs, list(owner_by_pid), deadline, owner_by_pid).items():
            if signs is not HANGS:
                signs_by_pid[pid] = signs[0], signs[1]
        if parent.pid not in signs_by_pid or child.pid not in signs_by_pid:
            return False
        parent_signs, child_signs = signs_by_pid[parent.pid], signs_by_pid[child.pid]
        return child_signs[0] > parent_signs[0] or (
            child_signs[0] == parent_signs[0] and child_signs[1] > parent_signs[1]
        )

    return is_lower


def _signs(pid: int) -> tuple[bool, bool]:
    """Whether a process has torch or JAX in memory, and whether it has connections."""
    return _has_library(pid), any(peer for _, peer in waits.sockets(pid, {}))


def find_spawned(
    supervisor: ProcessSupervisor,
    path: str,
    scanned: Sequence[ScannedProcess],
    own_pids: Collection[int],
) -> list[JobRank]:
    """The ranks of a node without a launcher's numbers; []: there is no sign of several ranks.

    path: path of py-spy; scanned: all processes; own_pids: processes of nodeready
    """
    candidates = [p for p in scanned if p.pid not in own_pids]
    deadline = min(supervisor.deadline, time.monotonic() + _ASK_S)
    library_pids = library_holders(
        [p for p in candidates if not _NOT_RANKS.search(p.command)], deadline
    )
    parents = {p.pid: p.parent for p in scanned}
    top = [
        p
        for p in candidates
        if p.pid in library_pids and not library_pids & _ancestors(p.pid, parents)
    ]
    ranks: list[JobRank] = []
    single_by_program: dict[tuple[int | None, str], list[ScannedProcess]] = defaultdict(list)
    for process in top:
        started = started_by(supervisor, path, process, candidates)
        ranks += started
        if not started:
            single_by_program[process.uid, program(process)].append(process)
    # A single process may be anything. Several of one program were started by hand.
    for siblings in single_by_program.values():
        ranks += [_rank(process) for process in siblings] if len(siblings) > 1 else []
    return ranks


def with_ray_ranks(ranks: Sequence[JobRank], deadline: float) -> list[JobRank]:
    """The ranks; ranks of Ray Train get the numbers in their Ray logs.

    If a rank of a job has no number in its log, or two have the same, no rank of the job gets a
    number, because numbers of only some ranks are useless.
    """
    unnumbered: dict[int, JobRank] = {}
    for rank in ranks:
        if is_ray_trainer(rank.process) and rank.identity.rank is None and not rank.stranger:
            unnumbered[rank.process.pid] = rank
    if not unnumbered:
        return list(ranks)
    uids = {pid: rank.process.uid or 0 for pid, rank in unnumbered.items()}
    number_by_pid = probe_each(
        lambda pid: _number_in_ray(pid, uids[pid]), list(uids), deadline, uids
    )
    jobs: dict[tuple[str, str], list[int]] = defaultdict(list)
    for pid, rank in unnumbered.items():
        jobs[rank.identity.owner, rank.identity.job].append(pid)
    for pids in jobs.values():
        numbers = [
            number for pid in pids if (number := number_by_pid.get(pid)) not in (None, HANGS)
        ]
        places, sizes = {number[0] for number in numbers}, {number[1] for number in numbers}
        if len(places) == len(pids) and len(sizes) == 1 and max(places) < min(sizes):
            for pid, (rank_number, size) in zip(pids, numbers):
                identity = replace(unnumbered[pid].identity, rank=rank_number, world_size=size)
                unnumbered[pid] = replace(unnumbered[pid], identity=identity)
    renumbered = [unnumbered.get(rank.process.pid, rank) for rank in ranks]
    return sorted(
        renumbered,
        key=lambda rank: (rank.stranger, rank.identity.rank is None, rank.identity.rank or 0),
    )


def _number_in_ray(pid: int, uid: int) -> tuple[int, int] | None:
    """(rank, world size) of a worker of Ray Train, from the log that it writes; for a fork."""
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


def _ancestors(pid: int, parents: Mapping[int, int]) -> set[int]:
    ancestors: set[int] = set()
    while (pid := parents.get(pid, 0)) and pid not in ancestors:
        ancestors.add(pid)
    return ancestors


def started_by(
    supervisor: ProcessSupervisor,
    path: str,
    parent: ScannedProcess,
    scanned: Sequence[ScannedProcess],
) -> list[JobRank]:
    """The ranks that torch.multiprocessing started from this process, in their order.

    []: the children are other processes, such as a loader's workers.
    """
    children = [p for p in scanned if p.parent == parent.pid and p.python and not only_tracks(p)]
    servers = [p for p in children if _FORK_SERVER.search(p.command)]
    children += [p for p in scanned if p.python and p.parent in {s.pid for s in servers}]
    children = [p for p in children if p not in servers]
    children.sort(key=lambda process: (process.start_s, process.pid))
    deadline = min(supervisor.deadline, time.monotonic() + _ASK_S)
    places: dict[int, int] = {}
    for process in children[:_MAX_ASKED]:
        if time.monotonic() > deadline or not _readable(process):
            continue
        dump = py_spy.take(supervisor, path, process.pid, _seconds_left(deadline), py_spy.LOCALS)
        if dump.spawned >= 0:
            places[process.pid] = dump.spawned
        elif not places:
            # All further children are of the same sort.
            break
    if not places:
        return []
    ranks = [p for p in children if p.pid in places]
    # In a job of several nodes, each node counts from 0.
    size = None
    if _talk_on_this_node([p.pid for p in ranks], deadline):
        spawns = py_spy.take(
            supervisor, path, parent.pid, _seconds_left(deadline), py_spy.LOCALS
        ).spawns
        size = max(spawns, 1 + max(places.values()))
    return [
        _rank(process, places[process.pid], size, f"pid {parent.pid}" if size else "")
        for process in sorted(ranks, key=lambda process: places[process.pid])
    ]


def _seconds_left(deadline: float) -> float:
    return max(0.5, deadline - time.monotonic())


_FORK_SERVER = re.compile(r"from multiprocessing\.forkserver import main")


def _readable(process: ScannedProcess) -> bool:
    """Whether py-spy may read the process, by the rules that are known here."""
    return not process.hangs and os.geteuid() in (0, process.uid)


def _talk_on_this_node(pids: Sequence[int], deadline: float) -> bool:
    """Whether all connections of these processes stay on this node."""
    answers = probe_each(_ends_here, pids, deadline)
    return all(answers.get(pid) not in (False, HANGS, None) for pid in pids)


def _ends_here(pid: int) -> bool:
    """Whether both ends of each connection of a process have one address."""
    return all(
        address.rpartition(":")[0] == peer.rpartition(":")[0]
        for address, peer in waits.sockets(pid, {})
        if peer
    )


def _rank(
    process: ScannedProcess, place: int | None = None, size: int | None = None, job: str = ""
) -> JobRank:
    """A rank without a launcher's number.

    place: its rank on the node
    size:  world size of a job that is all on this node; None: not known, nor is its rank
    """
    identity = RankIdentity(local_rank=place, owner=owner_of(process), job=job)
    return JobRank(process, replace(identity, rank=place, world_size=size) if size else identity)
