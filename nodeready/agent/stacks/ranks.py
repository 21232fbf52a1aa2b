"""Select the processes of a node that are ranks of a job.

A user writes the environment of a process, so it proves nothing. Ranks are therefore separated by
their owner first: the Slurm job whose cgroup they are in, else the user. A process that claims the
job of another owner is a stranger, and so is one that claims a job on a node where Slurm does not
run it. A stranger is named, not probed, and does not affect the job's ranks.

A rank is recognised by its environment, and is the topmost process of its (job, rank): data-loader
workers inherit the environment, and may outlive a rank that is killed (`_orphans`). A launcher has
no rank, or that of an outer step; a shell around a rank has the same rank. A variable set after
the start of a program is not in /proc/PID/environ.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import NamedTuple

from nodeready.agent.stacks.processes import FAMILIES, ScannedProcess, descendants

# Programs and Python modules that start ranks and are no ranks themselves.
_LAUNCHERS = re.compile(
    r"torchrun|torch\.distributed\.(run|launch)|mpirun|mpiexec(\.\w+)?|orterun|orted|prted|prterun"
    r"|srun|slurmstepd|hydra_\w+|horovodrun|deepspeed|deepspeed\.launcher\.\w+"
    r"|accelerate(-launch)?|accelerate\.commands\.launch|ray"
)
# Processes of Ray on a node: its workers, which it names by their actors, and its services.
_RAY = re.compile(
    r"ray::|(\S*/)?(raylet|gcs_server)\b"
    r"|\S*python\S* (-u )?\S*/ray/(_private|autoscaler|dashboard)/"
)
#: Beginning of the title of a worker of Ray, and its RAY_JOB_ID if it was started before its job.
RAY_WORKER, NO_RAY_JOB = "ray::", "ffffffff"
# A worker of Ray Train. Its forks, such as a loader's workers, have the same command line.
_RAY_WORKER = re.compile(r"ray::\w*TrainWorker\b")
# Programs that pass their environment to one child, and wait for it.
_WRAPPERS = re.compile(
    r"-?(ba|da|z|k|tc|c|fi)?sh|busybox|timeout|time|env|nsys|ncu|rocprof\w*|strace|gdb|numactl"
    r"|taskset|catchsegv|stdbuf|singularity|apptainer|starter(-suid)?|enroot|pyxis|perf|sudo|su"
)
# Programs that Python's multiprocessing starts (multiprocessing/spawn.py, forkserver.py).
_FORKED = re.compile(r"from multiprocessing\.(spawn|forkserver) import|--multiprocessing-fork")
# Processes of Python's multiprocessing that only wait for the end of their parent
# (multiprocessing/resource_tracker.py; semaphore_tracker.py before Python 3.8).
_NOISE = re.compile(
    r"from multiprocessing\.(resource|semaphore)_tracker import main|multiprocessing-fork-tracker"
)
#: A Python is a wrapper of its child if the child has used more than this many times the parent's
#: CPU time; and the minimum seconds that count as the parent's CPU time.
_CHILD_CPU_FACTOR, _IMPORT_S = 2, 1.0
#: torchrun's run id where none was given.
_NO_ID = "none"
# How the command line of nodeready's programs on a node begins: see nodeready.agent.payload.
_NODEREADY_PROGRAM = "MAIN='nodeready."
#: Beginning of the note of an ended rank.
ORPHANED = "ended, and has left"
#: How the note of a stranger begins, and how it ends where Slurm does not run the job on the node.
CLAIMS, ELSEWHERE = "claims job ", ", which Slurm runs on other nodes: not looked into"
#: Maximum strangers of a node that are named.
MAX_STRANGERS = 100
#: Maximum processes that are named if no rank is found.
MAX_UNRANKED = 10


@dataclass(frozen=True)
class Selection:
    """Which ranks to select; without a condition, every rank."""

    job: str = ""  # a Slurm job, torchrun's id of a run, MASTER_ADDR:MASTER_PORT, or Ray's job
    pids: tuple[int, ...] = ()  # exactly these processes
    match: str = ""  # a regular expression that the command line contains
    uid: int | None = None  # only this user's processes
    # uid of the job's owner; other users' processes that claim it are strangers; None: not known
    owner: int | None = None
    # Slurm does not run the job on this node: all that claim it are strangers
    is_elsewhere: bool = False


@dataclass(frozen=True)
class RankIdentity:
    """A process's rank and job by its environment. family: index into FAMILIES."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    job: str = ""
    master: str = ""
    family: int = len(FAMILIES)
    owner: str = ""  # the Slurm job whose cgroup it is in, or its user; never from its environment


@dataclass(frozen=True)
class JobRank:
    """A process to probe, and its identity."""

    process: ScannedProcess
    identity: RankIdentity
    note: str = ""  # a fault of the process, or why it is a stranger; "": none
    stranger: bool = False  # it claims a job that is not its own

    @property
    def turn(self) -> str:
        """The owner in `Turns`: its job, or its user, the same for all ids of that user."""
        job, main_uid = self.process.cgroup_job, self.process.main_uid
        return f"job {job}" if job else f"uid {self.process.uid if main_uid is None else main_uid}"


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,9}", text) else None


def jobs(process: ScannedProcess) -> list[str]:
    """All names by which its job can be selected; the first is shown."""
    values = process.environment or {}
    address, port = values.get("MASTER_ADDR", ""), values.get("MASTER_PORT", "")
    run = values.get("TORCHELASTIC_RUN_ID", "")
    names = [
        process.cgroup_job or values.get("SLURM_JOB_ID", ""),
        "" if run == _NO_ID else run,
        f"{address}:{port}" if address and port else "",
        values.get("RAY_JOB_ID", ""),
    ]
    return [name for name in names if name]


def identify(process: ScannedProcess) -> RankIdentity:
    """A process's identity; it has no rank without a launcher's variable."""
    values: Mapping[str, str] = process.environment or {}
    job = (jobs(process) or [""])[0]
    address, port = values.get("MASTER_ADDR", ""), values.get("MASTER_PORT", "")
    master = f"{address}:{port}" if address and port else address
    owner = owner_of(process)
    for family, (name, local, worlds) in enumerate(FAMILIES):
        rank = _number(values.get(name))
        # A batch script has SLURM_PROCID 0, and is no task of a step.
        if rank is None or (name == "SLURM_PROCID" and not values.get("SLURM_STEP_ID")):
            continue
        # The step or mpirun that started Ray has numbered the nodes, and Ray's processes inherit
        # that number. Only RANK may be the worker's, from the environment of its actor.
        if _RAY.match(process.command) and (family or not process.command.startswith(RAY_WORKER)):
            continue
        sizes = [size for world in worlds if (size := _number(values.get(world))) is not None]
        size = sizes[0] if sizes else None
        return RankIdentity(rank, _number(values.get(local)), size, job, master, family, owner)
    return RankIdentity(job=job, master=master, owner=owner)


def with_parts(
    processes: Sequence[ScannedProcess], job: str, parts: Container[str]
) -> Sequence[ScannedProcess]:
    """The processes; those of a heterogeneous job's further parts are in the job itself. Slurm
    numbers each part's cgroup separately, but gives all ranks the first part's number.
    """
    if not parts:
        return processes
    return [replace(p, cgroup_job=job) if p.cgroup_job in parts else p for p in processes]


def with_ray_jobs(processes: Sequence[ScannedProcess]) -> list[ScannedProcess]:
    """The processes; workers that Ray has started before their job was known are in the only job
    that their user's other workers have here.
    """
    jobs_by_uid: dict[int | None, set[str]] = defaultdict(set)
    for process in processes:
        jobs_by_uid[process.uid].add(_ray_job(process))

    def named(process: ScannedProcess) -> ScannedProcess:
        names = jobs_by_uid[process.uid] - {"", NO_RAY_JOB}
        if _ray_job(process) != NO_RAY_JOB or len(names) != 1:
            return process
        environment = {**(process.environment or {}), "RAY_JOB_ID": names.pop()}
        return replace(process, environment=environment)

    return list(map(named, processes))


def _ray_job(process: ScannedProcess) -> str:
    """The job in the environment of a worker of Ray; "": another process."""
    is_worker = process.command.startswith(RAY_WORKER)
    return (process.environment or {}).get("RAY_JOB_ID", "") if is_worker else ""


def owner_of(process: ScannedProcess) -> str:
    """The owner of a process, from its cgroup or uid: a user cannot forge these."""
    return f"job {process.cgroup_job}" if process.cgroup_job else f"uid {process.uid}"


def program(process: ScannedProcess) -> str:
    """The name of the program, Python script or Python module that a process runs."""
    words = process.command.split(" ")
    name = os.path.basename(words[0]) or process.name
    if not name.startswith(("python", "pypy")):
        return name
    for number, word in enumerate(words[1:], 1):
        if word == "-m":
            return words[number + 1] if number + 1 < len(words) else name
        if word == "-c":
            return name
        if not word.startswith("-") and words[number - 1] not in ("-X", "-W"):
            return os.path.basename(word)
    return name


class _Lightning(NamedTuple):
    """The numbers that Lightning's launcher has given to a process."""

    node_rank: int
    local_rank: int
    world_size: int
    local_size: int | None
    job: tuple[object, ...]


def _lightning(process: ScannedProcess, identity: RankIdentity) -> _Lightning | None:
    values = process.environment or {}
    names = ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    node, local, world, size = (_number(values.get(name)) for name in names)
    if node is None or local is None or not world or "RANK" in values:
        return None
    # If a user copies the numbers of Slurm or mpirun into these, both name the same ranks.
    if identity.world_size == world:
        return None
    job = (values.get("MASTER_ADDR"), values.get("MASTER_PORT"), node, world)
    return _Lightning(node, local, world, size, job)


def _ranks_per_node(least: int, world_size: int) -> int:
    """Ranks of a node: the least number with which all nodes have the same number."""
    return next((n for n in range(least, min(world_size, 64) + 1) if world_size % n == 0), least)


def has_title(process: ScannedProcess) -> bool:
    """Whether a Python has written a title over its command line, as the parts of a server do."""
    word = os.path.basename(process.command.split(" ", 1)[0])
    return process.python and bool(word) and not word.startswith(("python", "pypy"))


def only_tracks(process: ScannedProcess) -> bool:
    return bool(_NOISE.search(process.command))


def is_ray_trainer(process: ScannedProcess) -> bool:
    """Whether a process is a training worker of Ray Train, or a fork of one."""
    return bool(_RAY_WORKER.match(process.command))


#: Whether the child of a Python (parent, child) computes in the parent's place.
Computes = Callable[[ScannedProcess, ScannedProcess], bool]


def _never_computes(parent: ScannedProcess, child: ScannedProcess) -> bool:
    return False


class _Tree:
    """The processes of a node with their parents, children, identities and launchers."""

    def __init__(
        self,
        processes: Sequence[ScannedProcess],
        own_pid: int,
        computes: Computes = _never_computes,
    ) -> None:
        self.computes = computes
        self.processes = {process.pid: process for process in processes}
        self.children: dict[int, list[int]] = defaultdict(list)
        for process in processes:
            self.children[process.parent].append(process.pid)
        self.own_pids = {own_pid, *self.ancestors(own_pid), *self.descendants(own_pid)}
        self.own_pids |= {p.pid for p in processes if _NODEREADY_PROGRAM in p.command}
        self.identities = {process.pid: identify(process) for process in processes}
        self.launchers: set[int] = set()
        #: Ranks that have started all further ranks of their node.
        self.leaders: set[int] = set()
        ray_trainers = self.topmost(p.pid for p in processes if is_ray_trainer(p))
        #: Workers of Ray Train without a rank number.
        self.trainers = {pid for pid in ray_trainers if self.identities[pid].rank is None}
        self._find_lightning()
        self._find_launchers()

    def ancestors(self, pid: int) -> Iterator[int]:
        """Its ancestors, the nearest first."""
        visited = {pid}
        while pid in self.processes and (pid := self.processes[pid].parent) not in visited:
            visited.add(pid)
            yield pid

    def descendants(self, pid: int) -> Iterator[int]:
        return descendants(pid, self.children)

    def job(self, pid: int) -> tuple[str, str]:
        return self.identities[pid].owner, self.identities[pid].job

    def topmost(self, pids: Iterable[int]) -> list[int]:
        """The processes without an ancestor among these."""
        chosen = set(pids)
        return sorted(pid for pid in chosen if chosen.isdisjoint(self.ancestors(pid)))

    def _find_launchers(self) -> None:
        """Set `launchers`: by their names, or because ranks of several numbers are below them."""
        under: dict[int, set[RankIdentity]] = defaultdict(set)
        for pid, identity in self.identities.items():
            if identity.rank is not None:
                for parent in self.ancestors(pid):
                    under[parent].add(identity)
        named = {pid for pid, p in self.processes.items() if _LAUNCHERS.fullmatch(program(p))}
        for pid, identities in under.items():
            if pid not in self.processes or pid in named or pid in self.leaders:
                continue
            identity = self.identities[pid]
            if {other.rank for other in identities} - {identity.rank}:
                if identity.rank is None and self._is_parent_rank(pid, identities):
                    self.identities[pid] = next(iter(identities))
                else:
                    self.launchers.add(pid)
        self.launchers |= named
        for pid in self.trainers:
            self.launchers.update(self.ancestors(pid))

    def _find_lightning(self) -> None:
        """Number the ranks of Lightning's own launcher, which sets no RANK. It sets NODE_RANK,
        LOCAL_RANK and WORLD_SIZE (fabric/strategies/launchers/ subprocess_script.py). The rank is
        NODE_RANK times the ranks of a node, plus LOCAL_RANK. The process that was started by hand
        is local rank 0, and has none of these variables.
        """
        launches: dict[int, _Lightning] = {}
        ranks_by_job: dict[tuple[str, tuple[object, ...]], set[int]] = defaultdict(set)
        for pid, process in self.processes.items():
            if launch := _lightning(process, self.identities[pid]):
                launches[pid] = launch
                ranks_by_job[self.identities[pid].owner, launch.job].add(launch.local_rank)
        for pid, launch in launches.items():
            local_ranks = ranks_by_job[self.identities[pid].owner, launch.job]
            size = launch.local_size or _ranks_per_node(max(local_ranks) + 1, launch.world_size)
            rank = launch.node_rank * size + launch.local_rank
            local_rank, world_size = launch.local_rank, launch.world_size
            identity = replace(self.identities[pid], rank=rank, local_rank=local_rank, family=0)
            identity = self.identities[pid] = replace(identity, world_size=world_size)
            parent = self.processes.get(self.processes[pid].parent)
            if parent is None or not parent.python or parent.pid in launches or not local_rank:
                continue
            siblings = [child for child in self.children[parent.pid] if child in launches]
            first_siblings = [child for child in siblings if not launches[child].local_rank]
            are_forked = all(_FORKED.search(self.processes[pid].command) for pid in first_siblings)
            if self.identities[parent.pid].owner == identity.owner and are_forked:
                identity = replace(identity, rank=rank - local_rank, local_rank=0)
                self.identities[parent.pid] = identity
                self.leaders.add(parent.pid)

    def _is_parent_rank(self, pid: int, identities: set[RankIdentity]) -> bool:
        """Whether this Python is the rank of these identities, whose variables it has set: all its
        workers have them. With a single worker, it may be a launcher of one rank.
        """
        ranked = [child for child in self.children[pid] if self.identities[child].rank is not None]
        return self.processes[pid].python and len(identities) == 1 and len(ranked) > 1

    def matches(self, pid: int, candidates: Container[int]) -> list[int]:
        """The topmost Pythons among these below a wrapper; else the process itself."""
        if self.processes[pid].python or not _WRAPPERS.fullmatch(program(self.processes[pid])):
            return [pid]
        children = (child for child in self.descendants(pid) if child in candidates)
        return self.topmost(child for child in children if self.processes[child].python) or [pid]

    def _computing_child(self, pid: int, is_candidate: Callable[[int], bool]) -> int | None:
        """The Python child that computes in place of this Python; None: none. Its script is in
        this one's command line, or it has used most of the CPU time, or `computes` decides.
        """
        parent = self.processes[pid]
        children = [
            child for child in self.descendants(pid)
            if is_candidate(child) and self.processes[child].python
            and not only_tracks(self.processes[child])
            and self.processes[child].command not in ("", parent.command)
            and not (has_title(parent) and has_title(self.processes[child]))
            and not _FORKED.search(self.processes[child].command)
        ]  # fmt: skip
        words = parent.command.split(" ")[2:]
        min_cpu_s = _CHILD_CPU_FACTOR * max(parent.cpu_s, _IMPORT_S)
        for child in sorted(self.topmost(children), key=lambda pid: -self.processes[pid].cpu_s):
            name = program(self.processes[child])
            is_named = any(os.path.basename(word) == name for word in words)
            if is_named or self.processes[child].cpu_s > min_cpu_s:
                return child
        inner = [child for child in children if self.computes(parent, self.processes[child])]
        return next(iter(self.topmost(inner)), None)

    def inner(self, pid: int, is_candidate: Callable[[int], bool]) -> int | None:
        """The process inside a wrapper: its only topmost Python, or its child; else itself. None:
        a shell around a launcher, or without a child.
        """
        if self.processes[pid].python:
            computes = self._computing_child(pid, is_candidate)
            return pid if computes is None else self.inner(computes, is_candidate)
        inside = [child for child in self.descendants(pid) if is_candidate(child)]
        pythons = self.topmost(child for child in inside if self.processes[child].python)
        wraps = bool(_WRAPPERS.fullmatch(program(self.processes[pid])))
        if len(pythons) == 1:
            return pythons[0]
        if pythons and wraps:
            return max(pythons, key=lambda child: (self.processes[child].cpu_s, -child))
        if not wraps:
            return pid
        if any(child in self.launchers for child in self.descendants(pid)):
            return None
        children = [child for child in self.children[pid] if child in inside]
        return self.inner(children[0], is_candidate) if len(children) == 1 else pid


def _select_ranked(tree: _Tree, candidates: Sequence[int]) -> Iterator[int]:
    """The ranks among these: one for each (owner, job, rank) and each process tree."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for pid in candidates:
        identity = tree.identities[pid]
        if identity.rank is not None and pid not in tree.launchers:
            groups[identity.owner, identity.job, identity.rank].append(pid)
    for members in groups.values():
        members_set = set(members)
        inner_pids = {tree.inner(pid, members_set.__contains__) for pid in tree.topmost(members)}
        chosen = sorted(pid for pid in inner_pids if pid is not None)
        # A person's shell in another step has a rank of that step.
        real = [pid for pid in chosen if not _WRAPPERS.fullmatch(program(tree.processes[pid]))]
        best = min((tree.identities[pid].family for pid in real), default=0)
        yield from [pid for pid in real if tree.identities[pid].family == best] or chosen


def _orphans(tree: _Tree, pids: Iterable[int]) -> dict[int, bool]:
    """The processes that an ended rank has left behind with its environment; and whether each is
    shown for its rank: the first one is if the rank has no other process. An orphan has lost the
    leader of its process group or session, as a rank has whose launcher has ended. But it was
    forked from a rank, or runs another program than the ranks that have their leaders; and it is
    younger than these, or its rank has another process.
    """
    orphans: dict[int, bool] = {}
    job_pids: dict[tuple[str, str], list[int]] = defaultdict(list)
    for pid in pids:
        job_pids[tree.job(pid)].append(pid)
    for members in job_pids.values():
        processes = [tree.processes[pid] for pid in sorted(members)]
        peers = [process for process in processes if not process.lost_leader]
        ranks = {tree.identities[peer.pid].rank for peer in peers}
        programs = set(map(program, peers))
        last_start_s = max((peer.start_s for peer in peers), default=float("inf"))
        for process in processes:
            rank = tree.identities[process.pid].rank
            is_odd = process.is_forked or program(process) not in programs
            is_late = process.start_s > last_start_s or rank in ranks
            if process.lost_leader and is_odd and is_late:
                orphans[process.pid] = rank not in ranks
                ranks.add(rank)
    return orphans


def _without_other_steps(tree: _Tree, pids: Sequence[int]) -> list[int]:
    """These ranks without a person's programs in another step of a job of Pythons."""

    def step(pid: int) -> tuple[tuple[str, str], str]:
        environment = tree.processes[pid].environment or {}
        return tree.job(pid), environment.get("SLURM_STEP_ID", "")

    steps = {step(pid) for pid in pids if tree.processes[pid].python}
    jobs_of_pythons = {job for job, _ in steps}
    return [pid for pid in pids if tree.job(pid) not in jobs_of_pythons or step(pid) in steps]


def _strangers(tree: _Tree, pids: Sequence[int], selection: Selection) -> set[int]:
    """The processes that claim another user's job, by its cgroup or by `Selection.owner`. All are
    strangers if the job is elsewhere. A process that root starts for the job's user, such as a
    container, is no stranger.
    """
    if selection.is_elsewhere:
        return set(pids)
    users: dict[str, set[int | None]] = defaultdict(set)
    for process in tree.processes.values():
        if process.cgroup_job:
            users[process.cgroup_job].add(process.uid)
    if selection.owner is not None:
        users[selection.job] |= {selection.owner, 0}
    strangers = set()
    for pid in pids:
        process = tree.processes[pid]
        if process.cgroup_job and selection.job in ("", process.cgroup_job):
            continue
        # The cgroup of another job shows nothing about the user of this job.
        names = {tree.identities[pid].job, selection.job} - {process.cgroup_job}
        own_uids = {process.uid, process.main_uid}
        if any(users[name].isdisjoint(own_uids) for name in names & users.keys()):
            strangers.add(pid)
    return strangers


def _select_unranked(
    tree: _Tree, candidates: Sequence[int], ranked: Sequence[int], selection: Selection
) -> list[int]:
    """The processes without a rank to show beside these ranks. They are selected by their command
    lines; they are of the job, and its environment is lost (a program may write its title over
    it); or they hang beside other ranks.
    """
    unranked = [pid for pid in candidates if tree.identities[pid].rank is None]
    unranked = [pid for pid in unranked if pid not in tree.launchers]
    if not selection.match:
        parents = {tree.processes[pid].parent for pid in ranked} - {1}
        is_lost = bool(selection.job) and not set(ranked) - _strangers(tree, ranked, selection)
        unranked = [pid for pid in unranked if tree.processes[pid].python and is_lost]
        hanging = [process for process in tree.processes.values() if process.hangs]
        unranked += [p.pid for p in hanging if p.python and p.parent in parents]
    covered = {*ranked, *(child for pid in ranked for child in tree.descendants(pid))}
    uncovered = set(unranked) - covered
    tops = tree.topmost(uncovered)
    if selection.match:
        # A shell may have started several that match.
        tops = [match for pid in tops for match in tree.matches(pid, uncovered)]
    inner = {tree.inner(pid, uncovered.__contains__) for pid in tops}
    return [pid for pid in inner if pid is not None and pid not in covered]


def _select_titled(tree: _Tree, candidates: Sequence[int]) -> Iterator[int]:
    """The candidates with a title that no ancestor shares: they do not hide each other."""
    for pid in candidates:
        process = tree.processes[pid]
        ancestors = filter(None, map(tree.processes.get, tree.ancestors(pid)))
        if has_title(process) and process.command not in {row.command for row in ancestors}:
            yield pid


def select(
    processes: Sequence[ScannedProcess],
    selection: Selection,
    own_pid: int,
    matched: Container[int] | None = None,
    computes: Computes = _never_computes,
) -> list[JobRank]:
    """The selected ranks, by rank and pid, processes without a rank last. Raises re.error.
    own_pid:  this process; it, its ancestors and its descendants are ranks only if named by pid
    matched:  processes whose command lines contain the pattern; None: search here
    computes: decides between a rank's Python and its child if command and CPU time do not
    """
    tree = _Tree(processes, own_pid, computes)
    if selection.pids:
        return [_rank(tree, pid) for pid in sorted(set(selection.pids) & tree.processes.keys())]
    if selection.uid is not None:
        own_processes = (p for p in tree.processes.values() if p.uid == selection.uid)
        tree.processes = {process.pid: process for process in own_processes}
    pattern = re.compile(selection.match)
    candidates = [
        pid for pid, process in tree.processes.items()
        if pid not in tree.own_pids and not only_tracks(process)
        and (not selection.job or selection.job in jobs(process))
        and (pattern.search(process.command) if matched is None else pid in matched)
    ]  # fmt: skip
    trainers = [pid for pid in candidates if pid in tree.trainers]
    trainer_jobs = {tree.job(pid) for pid in trainers}
    # A step's rank in the job of Ray's workers is Ray's driver.
    ranked = list(_select_ranked(tree, candidates))
    orphans = _orphans(tree, ranked)
    ranked = [pid for pid in ranked if orphans.get(pid, True)]
    chosen = _without_other_steps(tree, ranked)
    drivers = {pid for pid in chosen if tree.identities[pid].family}
    drivers = {pid for pid in drivers if tree.job(pid) in trainer_jobs}
    chosen = [pid for pid in chosen if pid not in drivers] + trainers
    chosen += _select_unranked(tree, candidates, chosen, selection)
    if selection.match:
        for pid in set(_select_titled(tree, candidates)).difference(chosen, tree.launchers):
            # The number is that of the process which it is below.
            tree.identities[pid] = replace(tree.identities[pid], rank=None, local_rank=None)
            chosen.append(pid)

    def order(pid: int) -> tuple[bool, int, int]:
        rank = tree.identities[pid].rank
        return rank is None, rank or 0, pid

    ordered = sorted(set(chosen), key=order)
    strangers = _strangers(tree, ordered, selection)
    own_ranks = [_rank(tree, pid, pid in orphans) for pid in ordered if pid not in strangers]
    stranger_ranks = []
    for pid in [pid for pid in ordered if pid in strangers][:MAX_STRANGERS]:
        identity = tree.identities[pid]
        note = claim_note(selection.job or identity.job, selection.is_elsewhere)
        stranger_ranks.append(JobRank(tree.processes[pid], identity, note, stranger=True))
    return own_ranks + stranger_ranks


def _rank(tree: _Tree, pid: int, is_orphan: bool = False) -> JobRank:
    process = tree.processes[pid]
    note = "its memory cannot be read: the read hangs in the kernel" if process.hangs else ""
    if is_orphan:
        note = f"{ORPHANED} pid {pid}, which may hold its connections"
    return JobRank(process, tree.identities[pid], note)


def claim_note(job: str, is_elsewhere: bool) -> str:
    """The note of a process that claims the job and does not belong to it."""
    reason = ELSEWHERE if is_elsewhere else ", which is another user's: not looked into"
    return f"{CLAIMS}{job}{reason}"


def claimed_job(note: str) -> str:
    """The job that a process with this note claims; "": none.

    >>> claimed_job("claims job 4711, which is another user's: not looked into")
    '4711'
    """
    return note.removeprefix(CLAIMS).rpartition(", which ")[0] if note.startswith(CLAIMS) else ""


class Turns:
    """Hands out ranks to threads that dump them, next of the owner whose dumps took the least
    time: many or slow ranks of one owner do not use up the time of another. limit_s: with several
    owners, none is handed out after dumps of this many seconds
    """

    def __init__(self, ranks: Sequence[JobRank], limit_s: float) -> None:
        self._lock = Lock()
        # By owner: indexes of the ranks, the next one last; seconds of the dumps; running dumps.
        self._waiting: dict[str, list[int]] = defaultdict(list)
        for index in reversed(range(len(ranks))):
            self._waiting[ranks[index].turn].append(index)
        self._limit_s = limit_s if len(self._waiting) > 1 else float("inf")
        self._used_s = dict.fromkeys(self._waiting, 0.0)
        self._running = dict.fromkeys(self._waiting, 0)

    def take(self) -> tuple[int, str] | None:
        """The index of the next rank, and its owner; None: no rank is left."""
        with self._lock:
            waiting_owners = [owner for owner, indexes in self._waiting.items() if indexes]
            if not waiting_owners or sum(self._used_s.values()) > self._limit_s:
                return None
            costs = {
                owner: (self._running[owner], self._used_s[owner]) for owner in waiting_owners
            }
            owner = min(costs, key=costs.__getitem__)
            self._running[owner] += 1
            return self._waiting[owner].pop(), owner

    def give_back(self, owner: str, seconds: float) -> None:
        with self._lock:
            self._running[owner] -= 1
            self._used_s[owner] += seconds


#: Beginning of the note of a launcher that is shown because no rank exists yet.
LAUNCHER = "a launcher that has started no rank"
# Launchers in Python: their stack shows what they wait for.
_RENDEZVOUS = re.compile(
    r"torchrun|torch\.distributed\.(run|launch)|accelerate(-launch)?|accelerate\.commands\.launch"
    r"|deepspeed|deepspeed\.launcher\.\w+"
)
_RUN_ID = re.compile(r" --rdzv[_-]id[ =](\S{1,200})")
_NODES = re.compile(r" --(?:nnodes|num_nodes|num_machines)[ =](\d{1,6})(?::(\d{1,6}))?\b")
_ENDPOINT = re.compile(r" --(?:rdzv[_-]endpoint|master[_-]addr|main_process_ip)[ =](\S{1,200})")


def launchers(
    processes: Sequence[ScannedProcess], selection: Selection, own_pid: int
) -> list[JobRank]:
    """The launchers of ranks that do not exist yet, as while a rendezvous waits for a node."""
    tree = _Tree(processes, own_pid)
    launcher_pids = {
        pid for pid, process in tree.processes.items()
        if process.python and pid not in tree.own_pids and selection.uid in (None, process.uid)
        and _RENDEZVOUS.fullmatch(program(process))
    }  # fmt: skip
    launcher_ranks = []
    for pid in sorted(launcher_pids):
        # A launcher that has started another launcher waits for it.
        if launcher_pids & set(tree.descendants(pid)):
            continue
        process = tree.processes[pid]
        # accelerate numbers no single process (its simple_launcher).
        workers = [p for p in map(tree.processes.get, tree.children[pid]) if p and p.python]
        workers = [p for p in workers if not only_tracks(p) and not _FORKED.search(p.command)]
        run, endpoint = _RUN_ID.search(process.command), _ENDPOINT.search(process.command)
        nodes = _NODES.search(process.command)
        names = [*jobs(process), *([run[1]] if run else []), *([endpoint[1]] if endpoint else [])]
        if selection.job and selection.job not in names:
            continue
        note = f"{LAUNCHER}: it is to run on {nodes[1]} nodes" if nodes else LAUNCHER
        identity = RankIdentity(job=(names or [""])[0], owner=owner_of(process))
        if len(workers) == 1:
            process, note = workers[0], ""
        launcher_ranks.append(JobRank(process, identity, note))
    return launcher_ranks


def own_processes(processes: Sequence[ScannedProcess], own_pid: int) -> set[int]:
    """This process, its ancestors and descendants, and other programs of nodeready."""
    return _Tree(processes, own_pid).own_pids


def busiest_pythons(processes: Sequence[ScannedProcess], own_pid: int) -> list[ScannedProcess]:
    """The Pythons with the most CPU time: likely ranks where none is found."""
    tree = _Tree(processes, own_pid)
    pythons = [p for p in processes if p.python and p.pid not in tree.own_pids]
    return sorted(pythons, key=lambda p: (-p.cpu_s, p.pid))[:MAX_UNRANKED]
