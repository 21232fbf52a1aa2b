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
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready import knowledge
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import processes, py_spy, threads, waits
from nodeready.agent.stacks.processes import HANGS, Facts, ScannedProcess, contents, probe_each
from nodeready.agent.stacks.py_spy import HUNG, Dump, Frame
from nodeready.agent.stacks.ranks import (
    ORPHANED,
    Computes,
    JobRank,
    RankIdentity,
    is_ray_trainer,
    only_tracks,
    owner_of,
    program,
)
from nodeready.agent.stacks.system_calls import CallCount
from nodeready.agent.witnesses import logs
from nodeready.agent.witnesses.progress import LOOP_CHANGES

# --- One process that is probed: its facts and dumps, and whether py-spy may read it now.


class StackTable:
    """Numbers of frames and stacks; equal ones share a number."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        #: Number of frames in all stacks.
        self.size = 0

    def add(self, frames: Sequence[Frame]) -> int:
        key = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in frames)
        if key not in self._stacks:
            self.size += len(key)
        return self._stacks.setdefault(key, len(self._stacks))

    @property
    def frames(self) -> list[Frame]:
        return list(self._frames)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        return list(self._stacks)


#: The beginning of `StackTarget.waits_on` for a thread that waits for the interpreter's lock.
INTERPRETER_LOCK = "the interpreter's lock"
# Minimum wake-ups a second of a thread that asks for the lock: 200 by default, fewer under load.
_WAKEUPS_PER_S = 40
ENDED = "ended while it was looked at"
EXITING = "is exiting: the kernel takes its memory and its files down"
NO_TIME = "no time left"
OTHERS_TOOK = "no time left: its owner's other processes took it"
_MAX_COMMAND = 200
#: Maximum of a process's threads that are probed.
_MAX_THREADS = 32


@dataclass
class StackTarget:
    """A process, its facts and its dumps, at each sample."""

    rank: JobRank
    facts: list[Facts] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    native: Dump | None = None
    notes: list[str] = field(default_factory=list)
    user: str = ""
    switches: list[int] = field(default_factory=list)  # of its main thread
    main_cpu_s: list[float] = field(default_factory=list)  # likewise
    # read and write calls of all its threads; None: not readable
    calls: list[int | None] = field(default_factory=list)
    waits_on: str = ""  # what its main thread waits for; "": not known
    timed_lock: bool = False  # `waits_on` is a lock, for a limited time
    is_untimed: bool = False  # `waits_on` ends by another's act alone
    descendants: list[StackTarget] = field(default_factory=list)
    has_store: bool = True  # its main thread may wait for the job's store at MASTER_PORT
    # (thread, rank that it waits for), from `links.observe`
    waits_for: list[tuple[str, str]] = field(default_factory=list)
    # threads that wait for data of other ranks, and got some since the first sample; likewise
    received: list[str] = field(default_factory=list)
    # connections and listeners that other nodes' ranks may wait for, from `links.observe`
    ends: list[str] = field(default_factory=list)
    witnesses: dict[str, Any] = field(default_factory=dict)
    thread_rows: list[threads.Row] = field(default_factory=list)  # of its further threads
    work: str = ""  # its own, or of its descendants, between the samples (`set_work`)
    system_calls: Sequence[CallCount] = ()  # on request
    traced_s: float = 0.0  # the seconds in which these calls were counted

    def __post_init__(self) -> None:
        self.add_note(self.rank.note)

    @property
    def pid(self) -> int:
        return self.rank.process.pid

    @property
    def thread(self) -> int:
        """The thread that is probed; 0: the main thread."""
        return next((dump.thread for dump in reversed(self.dumps) if dump.thread), 0)

    @property
    def thread_names(self) -> dict[int, str]:
        """Number -> name of its further threads by the last dump."""
        rows = self.dumps[-1].threads if self.dumps else ()
        main = (0, self.pid, self.thread)
        names = {row.number: row.name for row in rows if row.number not in main}
        return dict(list(names.items())[:_MAX_THREADS])

    @property
    def owner(self) -> str:
        return self.rank.turn

    def add_note(self, note: str) -> None:
        if note and note not in self.notes:
            # Readers expect this note at the beginning.
            self.notes.insert(0 if note == ENDED else len(self.notes), note)

    def add_facts(self, facts: Facts | None) -> None:
        if facts is None or facts.start_s != self.rank.process.start_s:
            self.add_note(ENDED)
            return
        self.facts.append(facts)
        if facts.state in "ZXx":
            self.add_note(ENDED)
        elif facts.exiting:
            self.add_note(EXITING)

    def note_interpreter_lock(self, seconds: float) -> None:
        """Set `waits_on` to the interpreter's lock and its holder if the main thread waits for it.
        Such a thread wakes up every 5 ms (`sys.setswitchinterval`, take_gil of ceval_gil.c) and
        uses hardly any CPU time. seconds: between the first and the last sample
        """
        holders = {dump.gil for dump in self.dumps}
        if len(self.dumps) < 2 or len(holders) != 1 or not self.timed_lock or seconds <= 0:
            return
        holder = holders.pop()
        wakeups = self.switches[-1] - self.switches[0]
        if holder and not self.dumps[-1].holds_gil and wakeups > _WAKEUPS_PER_S * seconds:
            self.waits_on = f"{INTERPRETER_LOCK}, which thread {holder} holds"

    def refusal(self, euid: int, native: bool = False) -> str:
        """Why py-spy must not read the process now; "": it may."""
        if ENDED in self.notes:
            return ENDED
        if self.rank.stranger or self.rank.note.startswith(ORPHANED):
            return self.rank.note
        if not self.facts:
            return NO_TIME
        facts = self.facts[-1]
        if facts.exiting:
            return EXITING
        if facts.tracer:
            return f"traced by process {facts.tracer}: not looked into"
        if facts.state in "Tt":
            return "stopped by a signal: not looked into"
        if native and facts.state == "D":
            return "in state D: a native look would wait with it"
        if native and facts.state == processes.FROZEN:
            return "frozen by its cgroup: a native look would wait with it"
        if euid not in (0, facts.uid):
            return "another user's: only that user and root may look into it"
        if any(dump.error == HUNG for dump in self.dumps):
            return "not tried again: py-spy did not finish"
        return ""

    @property
    def lasting_facts(self) -> Facts | None:
        """The latest facts of a lasting state; None: none were read. Every process is in state D
        for moments, and a rank that polls, such as the TCPStore's server, is often in state R.
        """
        if not self.facts:
            return None
        latest = self.facts[-1]
        for state in {"R": "S", "D": "SR"}.get(latest.state, ""):
            for facts in reversed(self.facts):
                if facts.state == state:
                    return facts
        return latest

    def plain(self, table: StackTable, main: bool, threads: bool) -> dict[str, Any]:
        """The rank's row in the trace. main, threads: include these stacks."""
        identity, process, facts = self.rank.identity, self.rank.process, self.lasting_facts
        return {
            "pid": process.pid,
            "rank": identity.rank,
            "local_rank": identity.local_rank,
            "world_size": identity.world_size,
            "job": identity.job,
            "master": identity.master if self.has_store else "",
            "user": self.user,
            "command": process.command[:_MAX_COMMAND] or process.name,
            "state": facts.state if facts else "",
            "wait_channel": facts.wait_channel if facts else "",
            "kernel_stack": facts.kernel_stack if facts else (),
            "tracer": facts.tracer if facts else 0,
            "threads": facts.threads if facts else 0,
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
            "received": self.received,
            "untimed": self.is_untimed,
            "ends": self.ends,
            "work": self.work,
            "system_calls": list(map(vars, self.system_calls)),
            "traced_s": self.traced_s,
        }


def _sample(dump: Dump, table: StackTable, main: bool, threads: bool) -> dict[str, Any]:
    shown = dump.main if main else None
    return {
        "main": None if shown is None else table.add(shown),
        "threads": [(t.name, table.add(t.frames)) for t in dump.threads] if threads else [],
        "gil": dump.gil,
        "error": dump.error or ("" if main else "its stack is too large"),
    }


# --- The descendants of a rank.

#: Minimum CPU seconds of a descendant that is at work, and their part of the time: the kernel
#: counts ticks of 10 ms, and a shell that polls uses some.
_MIN_CPU_S, _MIN_CPU_SHARE = 0.03, 0.05
#: Seconds in which an awaited descendant reads or writes: a slow copy writes a block of 64 KB now
#: and then.
_TRANSFER_S = 0.5
#: Minimum bytes that a rank at work writes: a line of a log counts as a page of 4 KB (proc(5),
#: write_bytes), and there are some logs.
_MIN_WRITTEN_BYTES = 100_000
#: Minimum bytes that a rank at work reads or writes, and of each call: a loop that polls a file or
#: /proc reads few bytes at a time, a log gets a line. Pages that are in memory already, as of a
#: checkpoint in /dev/shm, are no bytes written to files.
_MIN_TRANSFERRED, _MIN_BYTES_PER_CALL = 1_000_000, 4096
#: Maximum descendants of one rank that are probed.
MAX_DESCENDANTS = 64

#: Purposes of a process; the first match counts.
LOADER, COMPILER, SHELL, OTHER = "loader worker", "compiler", "shell", "process"

_WORDS = knowledge.rows("descendants")
_COMPILERS, _COMPILE, _SHELLS, _WORKERS = (
    re.compile("".join(_WORDS[name].split()))
    for name in ("compilers", "compile_workers", "shells", "loader_workers")
)


def kind(process: ScannedProcess, dump: Dump | None = None) -> str:
    """The purpose of a process: by its stack if there is one, else by its name and command."""
    frames = (dump.main if dump else None) or ()
    for function, file, kind_of_call in _WORDS["calls"]:
        if any(name == function and path.endswith(file) for name, path, _ in frames):
            return str(kind_of_call)
    if _WORKERS.match(process.name):
        return LOADER
    name = program(process)
    if _COMPILE.search(process.command) or _COMPILERS.fullmatch(name):
        return COMPILER
    return SHELL if _SHELLS.fullmatch(name) else OTHER


def find(
    targets: Sequence[StackTarget],
    scanned: Sequence[ScannedProcess],
    own_pids: Collection[int],
    deadline: float,
) -> None:
    """Set each target's descendants, as they are now. scanned: the processes of the first scan.
    own_pids: processes of nodeready, which belong to no job
    """
    children = processes.children()
    excluded = {target.pid for target in targets} | set(own_pids)
    own_targets = [target for target in targets if target.facts and not target.rank.stranger]
    families = [
        (target, list(processes.descendants(target.pid, children, excluded)))
        for target in own_targets
    ]
    process_by_pid = {process.pid: process for process in scanned}
    cpu_s_before = {process.pid: process.cpu_s for process in scanned}
    # A worker that was forked and has not called exec yet has its parent's command line.
    first_pids = [pid for _, pids in families for pid in pids[: 2 * MAX_DESCENDANTS]]
    new_pids = [pid for pid in first_pids if pid not in process_by_pid]
    new_processes, _ = processes.scan(deadline, new_pids)
    process_by_pid.update((process.pid, process) for process in new_processes)
    for target, pids in families:
        started = [process_by_pid[pid] for pid in pids if pid in process_by_pid]
        candidates = [process for process in started if not only_tracks(process)]
        target.descendants = [_target(process, target) for process in candidates[:MAX_DESCENDANTS]]
        for child in target.descendants:
            child.cpu_s.append(cpu_s_before.get(child.pid, 0.0))
        if len(candidates) > MAX_DESCENDANTS:
            count = len(candidates) - MAX_DESCENDANTS
            target.add_note(f"{count} more of its descendants are not looked at")


def _target(process: ScannedProcess, rank: StackTarget) -> StackTarget:
    return StackTarget(JobRank(process, RankIdentity(owner=rank.rank.identity.owner)))


def set_work(
    targets: Sequence[StackTarget],
    calls: Mapping[tuple[int, int], waits.WaitCall],
    seconds: float,
    deadline: float,
) -> None:
    """Set `work`, by the files that a target has written, as of a checkpoint, or the data that it
    has read or written; or by a descendant that has used CPU time: a compiler, or one for which
    the main thread waits and which reads or writes, as no endless loop does; or by a child for
    which it waits and which writes.
    calls: (process, thread) -> its call. seconds: since the first scan
    """
    rows = []
    for target in targets:
        target.work = _transferred(target, seconds)
        if not target.work:
            call = calls.get((target.pid, target.thread))
            rows += [(target, *row) for row in _candidates(target, call, seconds)]
    looks = _io_looks({child.pid: child.owner for _, child, _, compiles in rows if not compiles},
                      deadline)  # fmt: skip
    for target, child, used_s, compiles in rows:
        process, look = child.rank.process, looks.get(child.pid, ("", ""))
        moves = _transfers if used_s and not process.python else _writes
        if compiles or moves(*look):
            used = f"used {used_s:.1f} s of CPU in {seconds:.0f} s" if used_s else "writes"
            target.work = f"its {process.name} {used}"
    for target in targets:
        first, last = (target.dumps[at].numbers if target.dumps else {} for at in (0, -1))
        changed = [name for name, value in last.items() if first.get(name, value) != value]
        if changed and not target.work:
            target.work = LOOP_CHANGES + changed[0]


def _transferred(target: StackTarget, seconds: float) -> str:
    """The files that a target has written, or the data that it has read or written; ""."""
    looks = [facts.io for facts in (*target.facts[:1], *target.facts[-1:])]
    for changes in (map(int.__sub__, looks[1], looks[0]) for _ in looks[1:]):
        files, read, reads, written, writes = changes
        if files >= _MIN_WRITTEN_BYTES:
            return f"it wrote {files / 1e6:.1f} MB of files in {seconds:.0f} s"
        for verb, data, calls in (("read", read, reads), ("wrote", written, writes)):
            if data >= max(_MIN_TRANSFERRED, _MIN_BYTES_PER_CALL * calls):
                return f"it {verb} {data / 1e6:.1f} MB in {seconds:.0f} s"
    return ""


def _candidates(
    target: StackTarget, call: waits.WaitCall | None, seconds: float
) -> Iterator[tuple[StackTarget, float, bool]]:
    """The descendants that may be at work; the CPU seconds of each, 0: too few; whether it is a
    compiler at work. All others must read or write.
    """
    parents = {child.pid: child.rank.process.parent for child in target.descendants}
    child_pids = {call.child} if call else set()
    awaited_pids = {*child_pids, *call.holders} if call else set()
    for child in target.descendants:
        used_s, process = child.cpu_s[-1] - child.cpu_s[0], child.rank.process
        used_s = used_s if used_s >= max(_MIN_CPU_S, _MIN_CPU_SHARE * seconds) else 0.0
        # A loader's worker that hangs polls its pipes: of Python's, only one whose end is awaited.
        pids = child_pids if process.python else awaited_pids
        is_awaited = not pids.isdisjoint((child.pid, *_ancestors(child.pid, parents)))
        compiles = used_s > 0 and kind(process) == COMPILER
        if compiles or (used_s and is_awaited) or child.pid in child_pids:
            yield child, used_s, compiles


def _io_looks(owner_by_pid: Mapping[int, object], deadline: float) -> dict[int, tuple[str, str]]:
    """The counters of what processes read and write, at two moments; "": it has ended."""
    if not owner_by_pid:
        return {}

    def look() -> dict[int, Any]:
        return probe_each(
            lambda pid: contents(f"/proc/{pid}/io"), [*owner_by_pid], deadline, owner_by_pid
        )

    first = look()
    time.sleep(_TRANSFER_S)
    last = look()
    return {
        pid: (first[pid], last[pid]) for pid in last
        if pid in first and HANGS not in (first[pid], last[pid])
    }  # fmt: skip


def _transfers(first: str, last: str) -> bool:
    """Whether a process has read or written between two looks."""
    return last != first != ""


def _writes(first: str, last: str) -> bool:
    """Whether a process has written data between two looks."""
    counts = [processes.read_and_written(io, "wchar") for io in (first, last)]
    before, after = counts
    return before is not None and after is not None and after - before >= _MIN_BYTES_PER_CALL


def dump_order(targets: Sequence[StackTarget]) -> list[StackTarget]:
    """The descendants whose stacks are taken: first one of each sort of a rank's, in case time is
    short. Workers that wait in the same place for the same object are of one sort.
    """
    ranked: list[tuple[int, StackTarget]] = []
    for target in targets:
        count_by_sort: Counter[tuple[str, ...]] = Counter()
        for descendant in target.descendants:
            process = descendant.rank.process
            if not descendant.facts or not process.python:
                continue
            facts = descendant.facts[-1]
            # Pids, ports and inodes differ between processes of one sort.
            phrase = re.sub(r"\d+", "N", descendant.waits_on)
            sort = kind(process), facts.state, facts.wait_channel, phrase
            ranked.append((count_by_sort[sort], descendant))
            count_by_sort[sort] += 1
    return [descendant for _, descendant in sorted(ranked, key=lambda row: row[0])]


def plain(rank: StackTarget, table: StackTable) -> list[dict[str, Any]]:
    return [_row(child, table) for child in rank.descendants if not _is_fork_server(child)]


def _is_fork_server(descendant: StackTarget) -> bool:
    """Whether a process is an idle fork server; its workers are descendants as well."""
    stack = (descendant.dumps[-1].main if descendant.dumps else None) or ()
    return len(stack) > 1 and stack[-2][:2] == ("main", "multiprocessing/forkserver.py")


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


def _has_library(pid: int) -> bool:
    return bool(_LIBRARIES.search(contents(f"/proc/{pid}/maps", _MAPS_BYTES)))


def computes(deadline: float) -> Computes:
    """A function that tells whether a Python's child computes in its place: only the child has
    torch or JAX in memory; or both or neither have, and only the child has connections.
    """
    signs_by_pid: dict[int, list[bool]] = {}

    def child_computes(parent: ScannedProcess, child: ScannedProcess) -> bool:
        uids = {process.pid: process.uid for process in (parent, child)}
        new_pids = [pid for pid in uids if pid not in signs_by_pid]
        for pid, signs in probe_each(_signs, new_pids, deadline, uids).items():
            if signs is not HANGS:
                signs_by_pid[pid] = signs
        if parent.pid not in signs_by_pid or child.pid not in signs_by_pid:
            return False
        return signs_by_pid[child.pid] > signs_by_pid[parent.pid]

    return child_computes


def _signs(pid: int) -> list[bool]:
    """Whether a process has torch or JAX in memory, and whether it has connections."""
    return [_has_library(pid), any(peer for _, peer in waits.sockets(pid, {}))]


def find_spawned(
    supervisor: ProcessSupervisor,
    path: str,
    scanned: Sequence[ScannedProcess],
    own_pids: Collection[int],
) -> list[JobRank]:
    """The ranks without a launcher's numbers; []: no sign of several. path: of py-spy"""
    candidates = [p for p in scanned if p.pid not in own_pids]
    deadline = min(supervisor.deadline, time.monotonic() + _ASK_S)
    pythons = {p.pid: p.uid for p in candidates if p.python and not _NOT_RANKS.search(p.command)}
    answers = probe_each(_has_library, list(pythons), deadline, pythons)
    library_pids = {pid for pid, has_library in answers.items() if has_library is True}
    parents = {p.pid: p.parent for p in scanned}
    ranks: list[JobRank] = []
    single_by_program: dict[tuple[int | None, str], list[ScannedProcess]] = defaultdict(list)
    for process in candidates:
        if process.pid not in library_pids or library_pids & _ancestors(process.pid, parents):
            continue
        started = started_by(supervisor, path, process, candidates)
        ranks += started
        if not started:
            single_by_program[process.uid, program(process)].append(process)
    # A single process may be anything. Several of one program were started by hand.
    for siblings in single_by_program.values():
        ranks += [_rank(process) for process in siblings] if len(siblings) > 1 else []
    return ranks


def with_ray_ranks(ranks: Sequence[JobRank], deadline: float) -> list[JobRank]:
    """The ranks; ranks of Ray Train get the numbers in their Ray logs. If one of a job has none,
    or two have the same, no rank of the job gets one: numbers of some ranks are useless.
    """
    without = (rank for rank in ranks if rank.identity.rank is None and not rank.stranger)
    unnumbered = {rank.process.pid: rank for rank in without if is_ray_trainer(rank.process)}
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
        answers = [number_by_pid.get(pid) for pid in pids]
        rows = [answer for answer in answers if answer not in (None, HANGS)]
        numbers, sizes = {number for number, _ in rows}, {size for _, size in rows}
        if len(numbers) == len(pids) and len(sizes) == 1 and max(numbers) < min(sizes):
            for pid, (number, size) in zip(pids, rows):
                identity = replace(unnumbered[pid].identity, rank=number, world_size=size)
                unnumbered[pid] = replace(unnumbered[pid], identity=identity)

    def order(rank: JobRank) -> tuple[bool, bool, int]:
        return rank.stranger, rank.identity.rank is None, rank.identity.rank or 0

    return sorted((unnumbered.get(rank.process.pid, rank) for rank in ranks), key=order)


def _number_in_ray(pid: int, uid: int) -> tuple[int, int] | None:
    """(rank, world size) of a worker of Ray Train, from the log that it writes; for a fork."""
    for number in logs.descriptors(pid):
        link = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError, logs.NoLogError):
            shown = os.readlink(link)
            if _RAY_LOG.fullmatch(shown[shown.rfind("/") :]):
                data, _ = logs.written_part(link, shown, uid, _RAY_LOG_BYTES, from_end=False)
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
    """The ranks that torch.multiprocessing started from a process, in order; []: other children"""
    children = [p for p in scanned if p.parent == parent.pid and p.python and not only_tracks(p)]
    servers = [p for p in children if _FORK_SERVER.search(p.command)]
    children += [p for p in scanned if p.python and p.parent in {s.pid for s in servers}]
    children = [p for p in children if p not in servers]
    children.sort(key=lambda process: (process.start_s, process.pid))
    deadline = min(supervisor.deadline, time.monotonic() + _ASK_S)

    def dump(pid: int) -> Dump:
        limit_s = max(0.5, deadline - time.monotonic())
        return py_spy.take(supervisor, path, pid, limit_s, py_spy.LOCALS)

    local_rank_by_pid: dict[int, int] = {}
    for process in children[:_MAX_ASKED]:
        if time.monotonic() > deadline or not _readable(process):
            continue
        local_rank = dump(process.pid).spawned
        if local_rank >= 0:
            local_rank_by_pid[process.pid] = local_rank
        elif not local_rank_by_pid:
            # All further children are of the same sort.
            break
    if not local_rank_by_pid:
        return []
    # In a job of several nodes, each node counts from 0.
    size = None
    answers = probe_each(_ends_here, list(local_rank_by_pid), deadline)
    if all(answers.get(pid) is True for pid in local_rank_by_pid):
        size = max(dump(parent.pid).spawns, 1 + max(local_rank_by_pid.values()))
    ranks = [process for process in children if process.pid in local_rank_by_pid]
    return [
        _rank(process, local_rank_by_pid[process.pid], size, f"pid {parent.pid}" if size else "")
        for process in sorted(ranks, key=lambda process: local_rank_by_pid[process.pid])
    ]


_FORK_SERVER = re.compile(r"from multiprocessing\.forkserver import main")


def _readable(process: ScannedProcess) -> bool:
    return not process.hangs and os.geteuid() in (0, process.uid)


def _ends_here(pid: int) -> bool:
    """Whether both ends of each connection of a process have one address."""
    pairs = [pair for pair in waits.sockets(pid, {}) if pair[1]]
    return all(end.rpartition(":")[0] == peer.rpartition(":")[0] for end, peer in pairs)


def _rank(
    process: ScannedProcess, local_rank: int | None = None, size: int | None = None, job: str = ""
) -> JobRank:
    """A rank without a launcher's number. size: of a job that is all on this node; else None"""
    rank = local_rank if size else None
    identity = RankIdentity(rank, local_rank, size, job, owner=owner_of(process))
    return JobRank(process, identity)
