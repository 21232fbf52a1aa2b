"""A node's processes as /proc shows them: proc(5), and the pages of its files.

Only the values of `KEYS` are kept of an environment; no other leaves the fork that read it
(`nodeready.agent.witnesses.environment` keeps different ones).
A process that vanishes is no error. A read may wait forever for a lock of its target's memory:
`probe_each` reads in a fork, and continues without the process that hangs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeready.agent.runtime import ForkedWorker, Send
from nodeready.agent.users_file import main_uid

#: Launchers' variables (rank, rank on the node, number of ranks), the most reliable first: a Slurm
#: step may start mpirun, and both may start torchrun.
FAMILIES = (
    ("RANK", "LOCAL_RANK", ("WORLD_SIZE",)),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("PMI_RANK", "MPI_LOCALRANKID", ("PMI_SIZE",)),
    ("SLURM_PROCID", "SLURM_LOCALID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
#: The only variables that are read.
KEYS = frozenset(
    [name for rank, local, worlds in FAMILIES for name in (rank, local, *worlds)]
    + ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"]
    # Lightning's launcher gives these, and no RANK.
    + ["LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    # Ray gives its workers this, and no rank.
    + ["RAY_JOB_ID"]
    # The sources of a rank's witnesses.
    + ["HOME", "XDG_CACHE_HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    + ["NCCL_RAS_ADDR", "NCCL_RAS_ENABLE", "NCCL_DEBUG", "NCCL_DEBUG_FILE"]
    + ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    + ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"]
    + ["TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_CPP_LOG_LEVEL"]
    + ["CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "CUDA_COREDUMP_PIPE", "PYTHONFAULTHANDLER"]
)

# Maximum bytes of a command line and of an environment that are read; a list of nodes is long.
_COMMAND_BYTES, _ENVIRONMENT_BYTES = 4096, 1 << 20
#: Maximum bytes of a value that are kept.
_VALUE_BYTES = 256
#: Seconds for the reads of one process, and the same after one has hung: more will hang.
_PATIENCE_S, _NEXT_PATIENCE_S = 1.0, 0.3
# PF_EXITING, PF_FORKNOEXEC and PF_KTHREAD of linux/sched.h.
_EXITING, _FORKED, _KERNEL_THREAD = 0x4, 0x40, 0x00200000
_TICKS = os.sysconf("SC_CLK_TCK")
_STAT = re.compile(r"(\d+) \((.*)\) (\S)((?: -?\d+){19,})", re.S)
# The cgroups that slurmd makes for a job (Slurm's cgroup.conf(5)), below slurmd's, v1 or v2. Users
# can create cgroups only below that of their login, user@UID.service of systemd.
_JOB = re.compile(
    r"(?m)^\d+:[^:\n]*:((?:/[^/\n]*)*?)/(?:slurm[^/\n]*/uid_\d+|[^/\n]*slurmstepd\.scope)"
    r"/job_(\d{1,10})(?:/|$)"
)
_LOGIN = re.compile(r"/(user\.slice|user@)")
#: State of a process that its cgroup has frozen; the kernel shows D (cgroup v1) or S (v2) instead.
FROZEN = "F"
# Where a frozen process waits (kernel/freezer.c before Linux 6.1; do_freezer_trap() of
# kernel/signal.c, which the compiler may put into get_signal()).
_FREEZER_TRAPS = ("__refrigerator", "do_freezer_trap", "get_signal")
# Controllers and path in /proc/PID/cgroup; cgroup v2 has no controllers there.
_CGROUP = re.compile(r"^\d+:(freezer)?:(/.*)$", re.M)
# By controller: the file of a cgroup, below the usual mounts, and the text of a frozen cgroup.
# Both files of a cgroup count the cgroups above it.
_FREEZERS = {
    "freezer": (("/sys/fs/cgroup/freezer{}/freezer.state",), re.compile(r"FROZEN|FREEZING")),
    "": (
        ("/sys/fs/cgroup{}/cgroup.events", "/sys/fs/cgroup/unified{}/cgroup.events"),
        re.compile(r"^frozen 1$", re.M),
    ),
}

#: In place of a result: the process gave no answer.
HANGS: Any = "hangs"


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    kernel: bool
    cpu_s: float  # user and system time of all threads
    threads: int
    start_s: float  # seconds since boot
    exiting: bool = False  # the main thread has left the program
    group: int = 0  # pid of the leader of its process group; 0: of another namespace
    session: int = 0  # likewise, of its session
    is_forked: bool = False  # it runs the program of its parent: it has not called execve(2)


@dataclass(frozen=True)
class ScannedProcess:
    """The properties of a process by which ranks are found."""

    pid: int
    parent: int
    name: str = ""
    start_s: float = 0.0
    cpu_s: float = 0.0
    command: str = ""  # its arguments, joined by spaces
    program: str = ""  # the name of the file that it runs; "": not permitted
    environment: Mapping[str, str] | None = None  # of KEYS; None: not permitted, or it hangs
    # the Slurm job whose cgroup it is in, which only root can choose; "": none
    cgroup_job: str = ""
    hangs: bool = False  # its memory cannot be read: the read hangs in the kernel
    uid: int | None = None  # the user who started it (an environment proves nothing); None: unread
    main_uid: int | None = None  # the same for all ids of that user (`users_file.main_uid`)
    # the pid of the leader of its process group or session, which has ended; 0: neither has
    lost_leader: int = 0
    is_forked: bool = False  # as of a Stat

    @property
    def python(self) -> bool:
        """Whether it is a Python: by the file that it runs, else by its name."""
        # A wrapper may have linked it under another name, and torch renames the main thread.
        words = self.program or os.path.basename(self.command.split(" ", 1)[0]) or self.name
        return words.startswith(("python", "pypy", "pt_main_thread"))


@dataclass(frozen=True)
class Facts:
    """A process's state, which the kernel shows without touching the process."""

    state: str  # as in /proc/PID/stat, or FROZEN
    wait_channel: str  # the kernel function in which it waits; "": in none, or not shown
    kernel_stack: tuple[str, ...]  # leaf first; () when not permitted
    cpu_s: float
    start_s: float
    threads: int
    tracer: int  # pid of its tracer; 0: none
    uid: int  # of its owner
    switches: int = 0  # voluntary context switches of its main thread: how often it has waited
    main_cpu_s: float = 0.0  # CPU time of its main thread alone
    calls: int | None = None  # of read(2), write(2) and the like, of all threads; None: unread
    # its main thread has left the program; the kernel frees its memory and files
    exiting: bool = False
    # bytes written to files by all its threads; bytes and calls of read(2) and the like of its
    # main thread, then those of write(2); 0: not readable, as `calls`
    io: tuple[int, ...] = (0, 0, 0, 0, 0)


def stat(text: str) -> Stat | None:
    """The fields of /proc/PID/stat; None for other text. A name may contain any character."""
    match = _STAT.match(text)
    if not match:
        return None
    numbers = [int(word) for word in match[4].split()]
    ticks = numbers[10] + numbers[11]
    return Stat(
        pid=int(match[1]),
        name=match[2],
        state=match[3],
        parent=numbers[0],
        kernel=bool(numbers[5] & _KERNEL_THREAD),
        cpu_s=round(ticks / _TICKS, 2),
        threads=numbers[16],
        start_s=round(numbers[18] / _TICKS, 2),
        exiting=bool(numbers[5] & _EXITING),
        group=numbers[1],
        session=numbers[2],
        is_forked=bool(numbers[5] & _FORKED),
    )


def environment(data: bytes) -> dict[str, str]:
    """The values of KEYS in /proc/PID/environ; of a repeated variable the first, like getenv."""
    values: dict[str, str] = {}
    data = b"\0" + data
    for key in KEYS:
        # Other variables are not read: there may be hundreds of thousands.
        name = b"\0%b=" % key.encode("ascii")
        if (index := data.find(name)) >= 0:
            begin = index + len(name)
            end = data.find(b"\0", begin, begin + _VALUE_BYTES)
            value = data[begin : begin + _VALUE_BYTES if end < 0 else end]
            values[key] = value.decode("utf-8", "replace")
    return values


def slurm_job(text: str) -> str:
    """The Slurm job in /proc/PID/cgroup; "": the process is in no job's cgroup."""
    for prefix, job in _JOB.findall(text):
        if not _LOGIN.search(prefix):
            return str(job)
    return ""


def is_frozen(cgroups: str, wait_channel: str) -> bool:
    """Whether a cgroup in /proc/PID/cgroup is frozen, or its process waits as if it were."""
    if wait_channel.partition("+")[0] in _FREEZER_TRAPS:
        return True
    return any(
        pattern.search(contents(file.format(path)))
        for controller, path in _CGROUP.findall(cgroups)
        for files, pattern in [_FREEZERS[controller]]
        for file in files
    )


def kernel_stack(text: str) -> tuple[str, ...]:
    """The functions of /proc/PID/stack, without addresses and offsets, at most 64."""
    rows = (line.rpartition("] ")[2].partition("+")[0].strip() for line in text.splitlines())
    return tuple(row[:100] for row in rows if row and not row.startswith("0x"))[:64]


def main_cpu_s(schedstat: str, task_stat: str) -> float:
    """CPU seconds of a thread: of schedstat (ns; Linux' sched-stats.rst), else of stat (ticks)."""
    words = schedstat.split()
    if len(words) == 3 and words[0].isdigit():
        return round(int(words[0]) / 1e9, 4)
    parsed = stat(task_stat)
    return parsed.cpu_s if parsed else 0.0


def read_and_written(io: str, *names: str) -> int | None:
    """The sum of these counters of /proc/PID/io; None: it has none of them."""
    counters = re.findall(rf"^(?:{'|'.join(names)}): (\d{{1,19}})$", io, re.M)
    return sum(map(int, counters)) if counters else None


#: Counters of /proc/PID/io: bytes and calls of reads, and of writes.
_TRANSFERS = ("rchar", "syscr", "wchar", "syscw")


def facts(
    stat_text: str, status: str, wchan: str, stack: str, task: tuple[str, str] = ("", ""), *,
    io: str = "", task_io: str = "",
) -> Facts | None:  # fmt: skip
    """The facts of one process, from the texts of its files; None: it has ended. task: schedstat
    and stat of its main thread. io, task_io: of the process and of its main thread
    """
    parsed = stat(stat_text)
    if parsed is None:
        return None
    # The first number of each row; the switches are those of one thread.
    numbers = dict(re.findall(r"^(TracerPid|Uid|voluntary_ctxt_switches):\s+(\d+)", status, re.M))
    tracer, uid, switches = (
        int(numbers.get(name, 0)) for name in ("TracerPid", "Uid", "voluntary_ctxt_switches")
    )
    written = read_and_written(io, "write_bytes") or 0
    transfers = (read_and_written(task_io, name) or 0 for name in _TRANSFERS)
    return Facts(
        parsed.state, "" if wchan.strip() == "0" else wchan.strip()[:100], kernel_stack(stack),
        parsed.cpu_s, parsed.start_s, parsed.threads, tracer, uid, switches, main_cpu_s(*task),
        read_and_written(io, "syscr", "syscw"), parsed.exiting, (written, *transfers),
    )  # fmt: skip


def _read(path: str, max_bytes: int = 65536) -> bytes | None:
    """The beginning of a file of /proc; None: it is missing, or not permitted."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        data = b""
        while len(data) < max_bytes and (chunk := os.read(number, max_bytes - len(data))):
            data += chunk
        return data
    except OSError:
        return None
    finally:
        os.close(number)


def contents(path: str, max_bytes: int = 65536) -> str:
    """The beginning of a file of /proc; "": it is missing, or not permitted."""
    return (_read(path, max_bytes) or b"").decode("utf-8", "replace")


def environment_bytes(pid: int) -> bytes | None:
    """The beginning of /proc/PID/environ; None: not permitted, or it has ended."""
    return _read(f"/proc/{pid}/environ", _ENVIRONMENT_BYTES)


def environment_of(pid: int) -> dict[str, str] | None:
    """`environment` of a process; None: not permitted, or it has ended."""
    data = environment_bytes(pid)
    return None if data is None else environment(data)


def pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _outer_fields(pid: int) -> dict[str, Any] | None:
    """The fields that are read without a lock of its memory; None: ended, or a kernel's thread."""
    parsed = stat(contents(f"/proc/{pid}/stat"))
    if parsed is None or parsed.kernel:
        return None
    # The real user, who has started even a setuid program.
    uid = re.search(r"^Uid:\s+(\d{1,10})\b", contents(f"/proc/{pid}/status"), re.M)
    program = ""
    with contextlib.suppress(OSError):
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    leaders = (leader for leader in (parsed.group, parsed.session) if leader != pid)
    return {
        "pid": pid,
        "parent": parsed.parent,
        "name": parsed.name,
        "start_s": parsed.start_s,
        "cpu_s": parsed.cpu_s,
        "program": program,
        "uid": int(uid[1]) if uid else None,
        "is_forked": parsed.is_forked,
        "lost_leader": next(filter(_has_ended, leaders), 0),
    }


def _has_ended(pid: int) -> bool:
    """Whether no process has this number, or a zombie. A number of 0 is of no process."""
    parsed = stat(contents(f"/proc/{pid}/stat")) if pid else None
    return pid > 0 and (parsed is None or parsed.state in "ZXx")


def _scan_one(pid: int) -> dict[str, Any] | None:
    fields = _outer_fields(pid)
    if fields is None:
        return None
    fields["environment"] = environment_of(pid)
    words = contents(f"/proc/{pid}/cmdline", _COMMAND_BYTES)
    fields["command"] = words.rstrip("\0").replace("\0", " ")
    fields["main_uid"] = None if fields["uid"] is None else main_uid(fields["uid"])
    fields["cgroup_job"] = slurm_job(contents(f"/proc/{pid}/cgroup"))
    return fields


def _facts(pid: int, locked: bool = True, thread: int = 0) -> dict[str, Any] | None:
    """The fields of `Facts`. locked: also the kernel stack and io, which are under a lock that a
    process in execve(2) holds (lock_trace() and do_io_accounting(), fs/proc/base.c). thread: whose
    state, wait, switches and time are read; 0: the main thread
    """
    task = f"/proc/{pid}/task/{thread or pid}"
    if thread and not os.path.exists(task):
        task, thread = f"/proc/{pid}/task/{pid}", 0
    status, wchan, task_stat = (contents(f"{task}/{name}") for name in ("status", "wchan", "stat"))
    locked_files = (f"{task}/stack", f"/proc/{pid}/io", f"{task}/io")
    stack, io, task_io = (contents(path) if locked else "" for path in locked_files)
    process_stat, times = contents(f"/proc/{pid}/stat"), (contents(f"{task}/schedstat"), task_stat)
    process_facts = facts(process_stat, status, wchan, stack, times, io=io, task_io=task_io)
    if process_facts is None:
        return None
    thread_stat = stat(task_stat) if thread else None
    state = thread_stat.state if thread_stat else process_facts.state
    if state in "DS" and is_frozen(contents(f"/proc/{pid}/cgroup"), process_facts.wait_channel):
        state = FROZEN
    return {**vars(process_facts), "state": state}


def owners(numbers: Iterable[int]) -> dict[int, int]:
    """The owner of each process, which the kernel shows without reading the process."""
    uids = {}
    for pid in numbers:
        with contextlib.suppress(OSError):
            uids[pid] = os.stat(f"/proc/{pid}").st_uid
    return uids


def probe_each(
    probe: Callable[[int], Any],
    numbers: Sequence[int],
    deadline: float,
    owner_by_number: Mapping[int, object] | None = None,
) -> dict[int, Any]:
    """The result of ``probe(number)`` for each number, in a fork; HANGS: no answer in time.
    deadline: of time.monotonic(); numbers not reached by then are left out. owner_by_number: the
    owners take turns, and after a hang the owner's further numbers are last
    """
    answers: dict[int, Any] = {}
    owner_of = (owner_by_number or {}).get
    waiting, patience_s = by_owner(numbers, owner_by_number or {}), _PATIENCE_S
    hung: Counter[object] = Counter()
    while waiting and time.monotonic() < deadline:

        def work(send: Send, todo: Sequence[int] = tuple(waiting)) -> None:
            for number in todo:
                send([probe(number)])

        worker = ForkedWorker(work, max(0.2, deadline - time.monotonic()))
        for message in worker.messages(patience_s, deadline):
            if message is None:
                break
            answers[waiting.pop(0)] = message[0]
        worker.end()
        if waiting and time.monotonic() < deadline:
            number = waiting.pop(0)
            answers[number] = HANGS
            patience_s = _NEXT_PATIENCE_S
            hung[owner_of(number)] += 1
            waiting.sort(key=lambda number: hung[owner_of(number)])
    return {number: answers[number] for number in numbers if number in answers}


def by_owner(numbers: Iterable[int], owner_by_number: Mapping[int, object]) -> list[int]:
    """The numbers in turns: the first of each owner, then the second of each, and so on.

    >>> by_owner([1, 2, 3], {1: "ann", 2: "ann", 3: "bob"})
    [1, 3, 2]
    """
    count_by_owner: Counter[object] = Counter()
    turn_by_number = {}
    for number in numbers:
        owner = owner_by_number.get(number)
        turn_by_number[number] = count_by_owner[owner]
        count_by_owner[owner] += 1
    return sorted(turn_by_number, key=turn_by_number.__getitem__)


def scan(
    deadline: float, numbers: Sequence[int] | None = None
) -> tuple[list[ScannedProcess], int]:
    """All processes (or these) but kernel threads, and how many were not probed in time."""
    numbers = pids() if numbers is None else numbers
    answers = probe_each(_scan_one, numbers, deadline, owners(numbers))
    scanned = []
    for pid, answer in answers.items():
        fields = _outer_fields(pid) if answer is HANGS else answer
        if fields:
            scanned.append(ScannedProcess(**fields, hangs=answer is HANGS))
    return scanned, len(numbers) - len(answers)


def children() -> dict[int, list[int]]:
    """Process -> its children, the oldest first, of all processes that exist now."""
    # /proc/PID/stat never waits for the process.
    parsed_stats = (stat(contents(f"/proc/{pid}/stat")) for pid in pids())
    user_processes = [parsed for parsed in parsed_stats if parsed and not parsed.kernel]
    children_by_parent: dict[int, list[int]] = {}
    for process in sorted(user_processes, key=lambda process: (process.start_s, process.pid)):
        children_by_parent.setdefault(process.parent, []).append(process.pid)
    return children_by_parent


def descendants(
    pid: int, children_of: Mapping[int, Sequence[int]], excluded: Collection[int] = ()
) -> Iterator[int]:
    """The descendants of a process, the nearest first; an excluded process ends its branch."""
    visited, level = {pid}, [pid]
    while level:
        started = dict.fromkeys(child for parent in level for child in children_of.get(parent, ()))
        level = [child for child in started if child not in visited and child not in excluded]
        visited.update(level)
        yield from level


def observe(
    numbers: Sequence[int], deadline: float, threads: Mapping[int, int] | None = None
) -> dict[int, Facts | None]:
    """The facts; None: ended; late ones are left out. threads: process -> its thread to probe"""
    thread_by_pid = threads or {}

    def probe(pid: int, locked: bool = True) -> dict[str, Any] | None:
        return _facts(pid, locked, thread_by_pid.get(pid, 0))

    facts_by_pid: dict[int, Facts | None] = {}
    for pid, answer in probe_each(probe, numbers, deadline, owners(numbers)).items():
        fields = probe(pid, locked=False) if answer is HANGS else answer
        # The fork's answer is JSON, which has no tuples.
        stack = tuple(fields["kernel_stack"]) if fields else ()
        facts_by_pid[pid] = Facts(**{**fields, "kernel_stack": stack}) if fields else None
    return facts_by_pid
