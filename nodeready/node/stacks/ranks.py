"""Which of a node's processes are ranks of a job, and what was seen of each of them.

An environment is its user's own word. So ranks are told apart by their owner first: the Slurm job
whose cgroup they are in, else the user. Who claims a job that is another owner's is a stranger to
the job: named, not looked into, and of no influence on the job's own ranks.

A rank is known by its environment, and is the topmost process of its (job, rank): data-loader
workers inherit all of it. Launchers have no rank, or the one of an outer step; a shell around a
rank has the rank's own. What a program sets after its start is not in /proc/PID/environ.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

from nodeready.node.stacks.processes import FAMILIES, Facts, Process
from nodeready.node.stacks.py_spy import HUNG, Dump, Frame

# Programs, and modules of Python, that start ranks and are none.
_LAUNCHERS = re.compile(
    r"torchrun|torch\.distributed\.(run|launch)|mpirun|mpiexec(\.\w+)?|orterun|orted|prted|prterun"
    r"|srun|slurmstepd|hydra_\w+|horovodrun|deepspeed|deepspeed\.launcher\.\w+"
    r"|accelerate(-launch)?|accelerate\.commands\.launch|ray"
)
# What Ray starts on a node: its workers, which it names by their actors, and its own services.
_RAY = re.compile(
    r"ray::|(\S*/)?(raylet|gcs_server)\b"
    r"|\S*python\S* (-u )?\S*/ray/(_private|autoscaler|dashboard)/"
)
# A worker of Ray Train's. What it forks, a loader's worker, has the same words.
_RAY_WORKER = re.compile(r"ray::\w*TrainWorker\b")
# Each hands its environment to what it starts, and waits for it.
_WRAPPERS = re.compile(
    r"-?(ba|da|z|k|tc|c|fi)?sh|busybox|timeout|time|env|nsys|ncu|rocprof\w*|strace|gdb|numactl"
    r"|taskset|catchsegv|stdbuf|singularity|apptainer|starter(-suid)?|enroot|pyxis|perf|sudo|su"
)
# What Python's multiprocessing starts anew (multiprocessing/spawn.py, forkserver.py).
_FORKED = re.compile(r"from multiprocessing\.(spawn|forkserver) import|--multiprocessing-fork")
# Processes of Python's multiprocessing that wait for the end of their parent, and do nothing else
# (multiprocessing/resource_tracker.py; semaphore_tracker.py before Python 3.8).
_NOISE = re.compile(
    r"from multiprocessing\.(resource|semaphore)_tracker import main|multiprocessing-fork-tracker"
)
#: A Python whose child has used so many times its own CPU time only runs that child; and the
#: seconds that any Python may have used.
_COMPUTES, _IMPORT_S = 2, 1.0
#: torchrun's run id where nobody gave one.
_NO_ID = "none"
# How a program of ours begins on a node: see nodeready.node.payload.
_OURS = "MAIN='nodeready."
#: How the note of a stranger begins.
CLAIMS = "claims job "
#: At most so many strangers of a node are named.
MOST_STRANGERS = 100
#: At most so many processes are named where no rank is found.
MOST_INSTEAD = 10


@dataclass(frozen=True)
class Selection:
    """What is asked for; nothing: every rank.

    job:   a Slurm job, torchrun's id of a run, MASTER_ADDR:MASTER_PORT, or Ray's job
    pids:  exactly these processes
    match: a regular expression that the command line contains
    uid:   only this user's
    owner: the user whose job this is; None: nothing tells. Whoever else claims it is a stranger
    """

    job: str = ""
    pids: tuple[int, ...] = ()
    match: str = ""
    uid: int | None = None
    owner: int | None = None


@dataclass(frozen=True)
class Identity:
    """A process's rank and job by its environment. family: index into FAMILIES.

    owner: the Slurm job whose cgroup it is in, or its user: nothing that it says itself
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    job: str = ""
    master: str = ""
    family: int = len(FAMILIES)
    owner: str = ""


@dataclass(frozen=True)
class Rank:
    """A process to look at, and its identity."""

    process: Process
    identity: Identity
    note: str = ""
    stranger: bool = False

    @property
    def turn(self) -> str:
        """With whom it takes turns: its job, or its user under whatever id."""
        job, who = self.process.cgroup_job, self.process.person
        return f"job {job}" if job else f"uid {self.process.uid if who is None else who}"


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,9}", text) else None


def jobs(process: Process) -> list[str]:
    """All names by which its job can be asked for; the first is shown."""
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


def identify(process: Process) -> Identity:
    """A process's identity; its rank is None where no launcher's variable gives one."""
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
        # The step or mpirun that has started Ray on the node has numbered the nodes, and Ray's
        # processes inherit that. RANK may be a worker's own, by the environment of its actor.
        if _RAY.match(process.command) and (family or not process.command.startswith("ray::")):
            continue
        sizes = [size for world in worlds if (size := _number(values.get(world))) is not None]
        size = sizes[0] if sizes else None
        return Identity(rank, _number(values.get(local)), size, job, master, family, owner)
    return Identity(job=job, master=master, owner=owner)


def owner_of(process: Process) -> str:
    """Whose it is, as root and the kernel say."""
    return f"job {process.cgroup_job}" if process.cgroup_job else f"uid {process.uid}"


def program(process: Process) -> str:
    """What it runs: the name of a program, of Python's script, or of its module."""
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
    """What Lightning's launcher has given to a process."""

    node_rank: int
    local_rank: int
    world_size: int
    local_size: int | None
    job: tuple[object, ...]


def _lightning(process: Process, who: Identity) -> _Lightning | None:
    values = process.environment or {}
    names = ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    node, local, world, size = (_number(values.get(name)) for name in names)
    # Who copies a task's numbers of Slurm's or mpirun's into these means the same ranks by both.
    if node is None or local is None or not world or "RANK" in values or who.world_size == world:
        return None
    job = (values.get("MASTER_ADDR"), values.get("MASTER_PORT"), node, world)
    return _Lightning(node, local, world, size, job)


def _at_least(least: int, world_size: int) -> int:
    """Ranks of a node: as few as there are, so that all nodes have the same number."""
    return next((n for n in range(least, min(world_size, 64) + 1) if world_size % n == 0), least)


def noise(process: Process) -> bool:
    """Whether a process does nothing but wait for the end of who started it."""
    return bool(_NOISE.search(process.command))


def trains(process: Process) -> bool:
    """Whether Ray Train has started a process for a training, or such a one has forked it."""
    return bool(_RAY_WORKER.match(process.command))


#: Whether a Python that another one has started is the one of both that computes.
Computes = Callable[[Process, Process], bool]


def _none_computes(above: Process, child: Process) -> bool:
    return False


class _Tree:
    """The processes of a node with their parents, children, identities and launchers."""

    def __init__(
        self, processes: Sequence[Process], own_pid: int, computes: Computes = _none_computes
    ) -> None:
        self.computes = computes
        self.known = {process.pid: process for process in processes}
        self.children: dict[int, list[int]] = defaultdict(list)
        for process in processes:
            self.children[process.parent].append(process.pid)
        self.ours = {own_pid, *self.above(own_pid), *self.below(own_pid)}
        self.ours |= {p.pid for p in processes if _OURS in p.command}
        self.who = {process.pid: identify(process) for process in processes}
        self.launchers: set[int] = set()
        #: Ranks that have started the other ranks of their node.
        self.leaders: set[int] = set()
        #: Workers of Ray Train's that nobody has numbered.
        self.trainers = set(_topmost((p.pid for p in processes if trains(p)), self.above))
        self.trainers = {pid for pid in self.trainers if self.who[pid].rank is None}
        self._find_lightning()
        self._find_launchers()

    def above(self, pid: int) -> Iterator[int]:
        """Its ancestors, the nearest first."""
        seen = {pid}
        while pid in self.known and (pid := self.known[pid].parent) not in seen:
            seen.add(pid)
            yield pid

    def below(self, pid: int) -> Iterator[int]:
        """Its descendants, each after its parent."""
        seen, todo = {pid}, [pid]
        while todo:
            for child in self.children.get(todo.pop(), ()):
                if child not in seen:
                    seen.add(child)
                    todo.append(child)
                    yield child

    def _find_launchers(self) -> None:
        under: dict[int, set[Identity]] = defaultdict(set)
        for pid, who in self.who.items():
            if who.rank is not None:
                for parent in self.above(pid):
                    under[parent].add(who)
        named = {pid for pid, p in self.known.items() if _LAUNCHERS.fullmatch(program(p))}
        for pid, found in under.items():
            if pid not in self.known or pid in named or pid in self.leaders:
                continue
            who = self.who[pid]
            if {other.rank for other in found} - {who.rank}:
                if who.rank is None and self._is_their_rank(pid, found):
                    self.who[pid] = next(iter(found))
                else:
                    self.launchers.add(pid)
        self.launchers |= named
        for pid in self.trainers:
            self.launchers.update(self.above(pid))

    def _find_lightning(self) -> None:
        """Lightning's own launcher gives NODE_RANK, LOCAL_RANK and WORLD_SIZE, and no RANK
        (fabric/strategies/launchers/subprocess_script.py): the rank is NODE_RANK times the ranks
        of a node, and LOCAL_RANK. What was started by hand is local rank 0, and has none of them
        in its environment."""
        given: dict[int, _Lightning] = {}
        for pid, process in self.known.items():
            if found := _lightning(process, self.who[pid]):
                given[pid] = found
        locals_: dict[tuple[str, tuple[object, ...]], set[int]] = defaultdict(set)
        for pid, found in given.items():
            locals_[self.who[pid].owner, found.job].add(found.local_rank)
        for pid, found in given.items():
            there = locals_[self.who[pid].owner, found.job]
            size = found.local_size or _at_least(max(there) + 1, found.world_size)
            rank = found.node_rank * size + found.local_rank
            mine = replace(
                self.who[pid],
                rank=rank,
                local_rank=found.local_rank,
                world_size=found.world_size,
                family=0,
            )
            self.who[pid] = mine
            parent = self.known.get(self.known[pid].parent)
            if parent is None or not parent.python or parent.pid in given or not found.local_rank:
                continue
            beside = [child for child in self.children[parent.pid] if child in given]
            firsts = [child for child in beside if not given[child].local_rank]
            if self.who[parent.pid].owner == mine.owner and all(
                _FORKED.search(self.known[child].command) for child in firsts
            ):
                self.who[parent.pid] = replace(mine, rank=rank - found.local_rank, local_rank=0)
                self.leaders.add(parent.pid)

    def _is_their_rank(self, pid: int, found: set[Identity]) -> bool:
        """Whether this is the rank: it has set its variables itself, and all its workers have the
        same. One that starts a single rank cannot be told from one with a single worker."""
        ranked = [child for child in self.children[pid] if self.who[child].rank is not None]
        return self.known[pid].python and len(found) == 1 and len(ranked) > 1

    def matches(self, pid: int, wanted: Sequence[int]) -> list[int]:
        """The topmost Pythons of these below a wrapper; else itself."""
        if self.known[pid].python or not _WRAPPERS.fullmatch(program(self.known[pid])):
            return [pid]
        below = set(self.below(pid))
        pythons = [one for one in wanted if one in below and self.known[one].python]
        return _topmost(pythons, self.above) or [pid]

    def _run_by(self, pid: int, wanted: Callable[[int], bool]) -> int | None:
        """The Python that this one has started as a program of its own, and which computes in its
        place: its script is among this one's words, it has used most of the time, or `computes`
        says so. None: a rank has helpers at most."""
        above = self.known[pid]
        inside = [
            child for child in self.below(pid)
            if wanted(child) and self.known[child].python and not noise(self.known[child])
            and self.known[child].command not in ("", above.command)
            and not _FORKED.search(self.known[child].command)
        ]  # fmt: skip
        words = above.command.split(" ")[2:]
        for child in sorted(_topmost(inside, self.above), key=lambda one: -self.known[one].cpu_s):
            name = program(self.known[child])
            given = any(os.path.basename(word) == name for word in words)
            if given or self.known[child].cpu_s > _COMPUTES * max(above.cpu_s, _IMPORT_S):
                return child
        inner = [child for child in inside if self.computes(above, self.known[child])]
        return next(iter(_topmost(inner, self.above)), None)

    def inner(self, pid: int, wanted: Callable[[int], bool]) -> int | None:
        """What runs inside a wrapper: its only topmost Python, or what it waits for; else itself.

        None: a shell around a launcher, or around nothing.
        """
        if self.known[pid].python:
            computes = self._run_by(pid, wanted)
            return pid if computes is None else self.inner(computes, wanted)
        inside = [child for child in self.below(pid) if wanted(child)]
        pythons = _topmost([child for child in inside if self.known[child].python], self.above)
        wraps = bool(_WRAPPERS.fullmatch(program(self.known[pid])))
        if len(pythons) == 1:
            return pythons[0]
        if pythons and wraps:
            return max(pythons, key=lambda child: (self.known[child].cpu_s, -child))
        if not wraps:
            return pid
        if any(child in self.launchers for child in self.below(pid)):
            return None
        children = [child for child in self.children[pid] if child in inside]
        return self.inner(children[0], wanted) if len(children) == 1 else pid


def _topmost(pids: Iterable[int], above: Callable[[int], Iterator[int]]) -> list[int]:
    """Those that have none of the others above them."""
    chosen = set(pids)
    return sorted(pid for pid in chosen if chosen.isdisjoint(above(pid)))


def _ranked(tree: _Tree, candidates: Sequence[int]) -> Iterator[int]:
    """The ranks among these: one for each (owner, job, rank) and each tree of processes."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for pid in candidates:
        who = tree.who[pid]
        if who.rank is not None and pid not in tree.launchers:
            groups[who.owner, who.job, who.rank].append(pid)
    for members in groups.values():
        wanted = set(members)
        found = [tree.inner(pid, wanted.__contains__) for pid in _topmost(members, tree.above)]
        chosen = sorted({pid for pid in found if pid is not None})
        # A person's shell in a step of its own has a rank of that step.
        real = [pid for pid in chosen if not _WRAPPERS.fullmatch(program(tree.known[pid]))]
        best = min((tree.who[pid].family for pid in real), default=0)
        yield from [pid for pid in real if tree.who[pid].family == best] or chosen


def _of_the_job(tree: _Tree, pids: Sequence[int]) -> list[int]:
    """These ranks, without what a person runs in another step beside a job of Pythons."""

    def job(pid: int) -> tuple[str, str]:
        return tree.who[pid].owner, tree.who[pid].job

    def step(pid: int) -> tuple[tuple[str, str], str]:
        return job(pid), (tree.known[pid].environment or {}).get("SLURM_STEP_ID", "")

    steps = {step(pid) for pid in pids if tree.known[pid].python}
    jobs_ = {of for of, _ in steps}
    return [pid for pid in pids if job(pid) not in jobs_ or step(pid) in steps]


def _strangers(tree: _Tree, pids: Sequence[int], wanted: Selection) -> set[int]:
    """Those of these that claim a job which is another user's: by its cgroup on this node, or by
    `Selection.owner`. Whom root starts for that user, as a container, is none."""
    users: dict[str, set[int | None]] = defaultdict(set)
    for process in tree.known.values():
        if process.cgroup_job:
            users[process.cgroup_job].add(process.uid)
    if wanted.owner is not None:
        users[wanted.job] |= {wanted.owner, 0}
    found = set()
    for pid in pids:
        process = tree.known[pid]
        allowed = [users[name] for name in {tree.who[pid].job, wanted.job} & users.keys()]
        if not process.cgroup_job and allowed:
            found |= {
                pid for theirs in allowed if theirs.isdisjoint((process.uid, process.person))
            }
    return found


def select(
    processes: Sequence[Process],
    wanted: Selection,
    own_pid: int,
    matched: Container[int] | None = None,
    computes: Computes = _none_computes,
) -> list[Rank]:
    """The ranks that are asked for, by rank and number, those that have none last.

    own_pid: our number; we, who started us and whom we started are no ranks, unless asked for
    matched: those in whose command lines the pattern was found; None: it is looked for here
    computes: asked of a rank's Python and one below it where their words and times do not tell
    Raises re.error for a pattern that is none.
    """
    tree = _Tree(processes, own_pid, computes)
    if wanted.pids:
        chosen = [pid for pid in wanted.pids if pid in tree.known]
        return [_rank(tree, pid) for pid in sorted(set(chosen))]
    if wanted.uid is not None:
        tree.known = {p: one for p, one in tree.known.items() if one.uid == wanted.uid}
    pattern = re.compile(wanted.match)
    candidates = [
        pid
        for pid, process in tree.known.items()
        if pid not in tree.ours
        and not noise(process)
        and (not wanted.job or wanted.job in jobs(process))
        and (pattern.search(process.command) if matched is None else pid in matched)
    ]
    chosen = _of_the_job(tree, list(_ranked(tree, candidates)))
    # Ray's driver is a task of a step beside the training at most.
    trainers = [pid for pid in candidates if pid in tree.trainers]
    theirs = {(tree.who[pid].owner, tree.who[pid].job) for pid in trainers}
    chosen = [
        pid
        for pid in chosen
        if not tree.who[pid].family or (tree.who[pid].owner, tree.who[pid].job) not in theirs
    ]
    chosen += trainers
    # What has no rank to know it by: asked for by its words; the job's whose words are lost (a
    # program may write its title over its environment); and one that hangs beside other ranks.
    rest = [pid for pid in candidates if tree.who[pid].rank is None and pid not in tree.launchers]
    if not wanted.match:
        parents = {tree.known[pid].parent for pid in chosen} - {1}
        lost = bool(wanted.job) and not set(chosen) - _strangers(tree, chosen, wanted)
        rest = [pid for pid in rest if tree.known[pid].python and lost]
        rest += [
            pid
            for pid, process in tree.known.items()
            if process.hangs and process.python and process.parent in parents
        ]
    covered = {*chosen, *(child for pid in chosen for child in tree.below(pid))}
    rest = [pid for pid in rest if pid not in covered]
    tops = _topmost(rest, tree.above)
    if wanted.match:
        # A shell may have started some that fit.
        tops = [match for pid in tops for match in tree.matches(pid, rest)]
    inner = {tree.inner(pid, set(rest).__contains__) for pid in tops}
    chosen += [pid for pid in inner if pid is not None and pid not in covered]

    def order(pid: int) -> tuple[bool, int, int]:
        rank = tree.who[pid].rank
        return rank is None, rank or 0, pid

    ordered = sorted(set(chosen), key=order)
    strangers = _strangers(tree, ordered, wanted)
    own = [_rank(tree, pid) for pid in ordered if pid not in strangers]
    others = [_rank(tree, pid, stranger=True) for pid in ordered if pid in strangers]
    return own + others[:MOST_STRANGERS]


def _rank(tree: _Tree, pid: int, stranger: bool = False) -> Rank:
    process = tree.known[pid]
    note = "its memory cannot be read: the kernel makes whoever tries wait"
    if stranger:
        note = f"{CLAIMS}{tree.who[pid].job}, which is another user's: not looked into"
    return Rank(process, tree.who[pid], note if process.hangs or stranger else "", stranger)


class Turns:
    """Gives out ranks to look at, to several at once: always one of the owner whose looks have
    taken the least time, so that nobody's many or slow ones take another's.

    limit_s: where there are several owners, none is given out after so many seconds of looks
    """

    def __init__(self, ranks: Sequence[Rank], limit_s: float) -> None:
        self._lock = Lock()
        self._waiting: dict[str, list[int]] = defaultdict(list)
        for place in reversed(range(len(ranks))):
            self._waiting[ranks[place].turn].append(place)
        self._limit_s = limit_s if len(self._waiting) > 1 else float("inf")
        self._used = dict.fromkeys(self._waiting, 0.0)
        self._looks = dict.fromkeys(self._waiting, 0)

    def take(self) -> tuple[int, str] | None:
        """The place of the next rank, and its owner; None: there is none to be looked at."""
        with self._lock:
            found = [owner for owner, places in self._waiting.items() if places]
            if not found or sum(self._used.values()) > self._limit_s:
                return None
            owner = min(found, key=lambda owner: (self._looks[owner], self._used[owner]))
            self._looks[owner] += 1
            return self._waiting[owner].pop(), owner

    def back(self, owner: str, seconds: float) -> None:
        """The look has ended, and took so long."""
        with self._lock:
            self._looks[owner] -= 1
            self._used[owner] += seconds


#: How the note of a launcher begins that is shown because there is no rank yet.
LAUNCHER = "a launcher that has started no rank"
# Those whose stack tells what they wait for: each is a Python.
_RENDEZVOUS = re.compile(
    r"torchrun|torch\.distributed\.(run|launch)|accelerate(-launch)?|accelerate\.commands\.launch"
    r"|deepspeed|deepspeed\.launcher\.\w+"
)
_RUN_ID = re.compile(r" --rdzv[_-]id[ =](\S{1,200})")
_NODES = re.compile(r" --(?:nnodes|num_nodes|num_machines)[ =](\d{1,6})(?::(\d{1,6}))?\b")
_WHERE = re.compile(r" --(?:rdzv[_-]endpoint|master[_-]addr|main_process_ip)[ =](\S{1,200})")


def launchers(processes: Sequence[Process], wanted: Selection, own_pid: int) -> list[Rank]:
    """The launchers of ranks that are not there yet: a rendezvous, say, waits for a node.

    To be asked where `select` finds nothing.
    """
    tree = _Tree(processes, own_pid)
    found = {
        pid
        for pid, process in tree.known.items()
        if process.python
        and pid not in tree.ours
        and _RENDEZVOUS.fullmatch(program(process))
        and wanted.uid in (None, process.uid)
    }
    made = []
    for pid in sorted(found):
        # One that has started another launcher waits for that.
        if found & set(tree.below(pid)):
            continue
        process = tree.known[pid]
        # accelerate gives no number to one that is alone (its simple_launcher).
        alone = [p for p in map(tree.known.get, tree.children[pid]) if p and p.python]
        alone = [p for p in alone if not noise(p) and not _FORKED.search(p.command)]
        run, where = _RUN_ID.search(process.command), _WHERE.search(process.command)
        nodes = _NODES.search(process.command)
        names = [*jobs(process), *([run[1]] if run else []), *([where[1]] if where else [])]
        if wanted.job and wanted.job not in names:
            continue
        note = f"{LAUNCHER}: it is to run on {nodes[1]} nodes" if nodes else LAUNCHER
        who = Identity(job=(names or [""])[0], owner=owner_of(process))
        if len(alone) == 1:
            process, note = alone[0], ""
        made.append(Rank(process, who, note))
    return made


def ours(processes: Sequence[Process], own_pid: int) -> set[int]:
    """We, who started us, whom we started, and other programs of ours."""
    return _Tree(processes, own_pid).ours


def instead(processes: Sequence[Process], own_pid: int) -> list[Process]:
    """The Pythons that have used the most CPU time: what may be meant where no rank is found."""
    tree = _Tree(processes, own_pid)
    pythons = [p for p in processes if p.python and p.pid not in tree.ours]
    return sorted(pythons, key=lambda p: (-p.cpu_s, p.pid))[:MOST_INSTEAD]


# --- The stacks of a node: each different frame and stack once, known by a number.


class StackTable:
    """Numbers for frames and stacks; equal ones have one number."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        #: Frames in all stacks together.
        self.size = 0

    def add(self, frames: Sequence[Frame]) -> int:
        """The number of a stack, root to leaf."""
        key = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in frames)
        if key not in self._stacks:
            self.size += len(key)
        return self._stacks.setdefault(key, len(self._stacks))

    @property
    def frames(self) -> list[Frame]:
        """All frames, by their numbers."""
        return list(self._frames)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """All stacks, by their numbers."""
        return list(self._stacks)


# --- One rank under observation: its facts and dumps, and whether py-spy may read it now.

#: How `Target.waits_on` begins for a thread that waits for the interpreter's lock.
INTERPRETER_LOCK = "the interpreter's lock"
# Waits a second of one that asks for it: 200 by default, fewer on a machine that is overloaded.
_ASKED_PER_S = 40
ENDED = "ended while it was looked at"
EXITING = "is exiting: the kernel takes its memory and its files down"
NO_TIME = "no time left"
OTHERS_TOOK = "no time left: the looks at its owner's other processes took it"
_MOST_COMMAND = 200


@dataclass
class Target:
    """A rank, its facts at each sample, and its dumps.

    switches, main_cpu_s: of its main thread, at each sample
    calls:    of read and write, of all its threads, at each sample; None: not told
    waits_on: what its main thread waits for; "": not known
    timed_lock: that is a lock, for a limited time
    below:    the processes that it has started
    waits_for: (thread, what it waits for at a rank), and `ends`, what ranks of other nodes may
               wait for, as `links.observe` tells them
    """

    rank: Rank
    facts: list[Facts] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    native: Dump | None = None
    notes: list[str] = field(default_factory=list)
    user: str = ""
    switches: list[int] = field(default_factory=list)
    main_cpu_s: list[float] = field(default_factory=list)
    calls: list[int | None] = field(default_factory=list)
    waits_on: str = ""
    timed_lock: bool = False
    below: list[Target] = field(default_factory=list)
    waits_for: list[tuple[str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    witnesses: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add_note(self.rank.note)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self.rank.process.pid

    @property
    def thread(self) -> int:
        """Its thread that is looked at; 0: the main one."""
        return next((dump.thread for dump in reversed(self.dumps) if dump.thread), 0)

    @property
    def owner(self) -> str:
        """With whom it takes turns."""
        return self.rank.turn

    def add_note(self, note: str) -> None:
        """Add a note about the rank, once."""
        if note and note not in self.notes:
            # Readers look for this note at the beginning.
            self.notes.insert(0 if note == ENDED else len(self.notes), note)

    def add_facts(self, seen: Facts | None) -> None:
        """Add the facts of this moment; None: the process is gone."""
        if seen is None or seen.start_s != self.rank.process.start_s:
            self.add_note(ENDED)
            return
        self.facts.append(seen)
        if seen.state in "ZXx":
            self.add_note(ENDED)
        elif seen.exiting:
            self.add_note(EXITING)

    def tell_interpreter_lock(self, seconds: float) -> None:
        """Say who holds the interpreter's lock where the main thread waits for nothing else.

        Who waits for it wakes up every 5 ms to ask for it (`sys.setswitchinterval`, take_gil of
        ceval_gil.c): so it looks as busy as one that moves, and does not come to use any time.
        seconds: between the first and the last sample
        """
        holders = {dump.gil for dump in self.dumps}
        if len(self.dumps) < 2 or len(holders) != 1 or not self.timed_lock or seconds <= 0:
            return
        asked = self.switches[-1] - self.switches[0]
        if holders != {""} and not self.dumps[-1].own and asked > _ASKED_PER_S * seconds:
            self.waits_on = f"{INTERPRETER_LOCK}, which thread {holders.pop()} holds"

    def refusal(self, euid: int, native: bool = False) -> str:
        """Why py-spy must not read the process now; "": it may."""
        if ENDED in self.notes:
            return ENDED
        if self.rank.stranger:
            return self.rank.note
        if not self.facts:
            return NO_TIME
        now = self.facts[-1]
        if now.exiting:
            return EXITING
        if now.tracer:
            return f"traced by process {now.tracer}: not looked into"
        if now.state in "Tt":
            return "stopped by a signal: not looked into"
        if native and now.state == "D":
            return "in state D: a native look would wait with it"
        if euid not in (0, now.uid):
            return "another user's: only that user and root may look into it"
        if any(dump.error == HUNG for dump in self.dumps):
            return "not tried again: py-spy did not finish"
        return ""

    @property
    def settled(self) -> Facts | None:
        """The latest facts that hold for longer than a moment: every process is in state D now and
        then, and one that looks every few ms for others, as TCPStore's first rank, in state R."""
        if not self.facts:
            return None
        latest = self.facts[-1]
        longer = {"R": "S", "D": "SR"}.get(latest.state, "")
        back = self.facts[::-1]
        return next((one for state in longer for one in back if one.state == state), latest)

    def plain(self, table: StackTable, main: bool, threads: bool) -> dict[str, Any]:
        """The rank's part of the trace. main, threads: with these stacks."""
        who, process, now = self.rank.identity, self.rank.process, self.settled
        return {
            "pid": process.pid,
            "rank": who.rank,
            "local_rank": who.local_rank,
            "world_size": who.world_size,
            "job": who.job,
            "master": who.master,
            "user": self.user,
            "command": process.command[:_MOST_COMMAND] or process.name,
            "state": now.state if now else "",
            "wait_channel": now.wait_channel if now else "",
            "kernel_stack": now.kernel_stack if now else (),
            "tracer": now.tracer if now else 0,
            "threads": now.threads if now else 0,
            "start_s": process.start_s,
            "cpu_s": self.cpu_s,
            "samples": [_sample(dump, table, main, threads) for dump in self.dumps],
            "native": table.add(self.native.main) if self.native and self.native.main else None,
            "note": "; ".join(self.notes),
            "slurm_job": process.cgroup_job,
            "switches": self.switches,
            "main_cpu_s": self.main_cpu_s,
            "calls": [] if None in self.calls else self.calls,
            "waits_on": self.waits_on,
            "waits_for": self.waits_for,
            "ends": self.ends,
        }


def _sample(dump: Dump, table: StackTable, main: bool, threads: bool) -> dict[str, Any]:
    shown = dump.main if main else None
    return {
        "main": None if shown is None else table.add(shown),
        "threads": [(t.name, table.add(t.frames)) for t in dump.threads] if threads else [],
        "gil": dump.gil,
        "error": dump.error or ("" if main else "its stack is too large"),
    }
