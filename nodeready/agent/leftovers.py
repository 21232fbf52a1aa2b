"""What ended jobs have left on this node: processes, mounts, files; and the end of such processes.

Slurm drains a node with "Kill task failed" when a job's process is not ended by SIGKILL in
UnkillableStepTimeout. `find` names what may still hold the node, `judged` says what Slurm knows of
its job. As a program on the node (`main`), it also ends the processes in its arguments.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nodeready.agent.gate.drain import INCIDENTS, DrainError, ask_slurm, write_incident
from nodeready.agent.proc import has_open, list_directory, parse_mounts, user_name
from nodeready.agent.runtime import send_signal
from nodeready.agent.secrets import redacted
from nodeready.agent.stacks import processes
from nodeready.agent.stacks.processes import ScannedProcess
from nodeready.core import wire
from nodeready.core.text import sanitise

PROCESS, MOUNT, FILES, JOB = KINDS = ("process", "mount", "files", "job")

# --- What is found.


@dataclass(frozen=True)
class LeftoversConfig:
    nonce: str  # random word with which its line begins
    tag: str  # ``nodeready:RUN``, by which an interrupt finds the process
    limit_s: int = 40  # seconds after which it must have ended
    # (pid, seconds since boot at its start) of the processes to end, after their evidence is kept
    end: tuple[tuple[int, float], ...] = ()
    reasons: tuple[str, ...] = ()  # why: a line each for the evidence


@dataclass(frozen=True)
class Leftover:
    """Something on a node that may be of an ended job."""

    kind: wire.Name  # process, mount, files, or job: one that Slurm has not ended yet
    # the command line of a process, a mount, the first of some files with their number
    text: wire.Line
    uid: wire.Uid  # of its owner
    user: wire.Name  # its owner's name
    # Slurm's number of the job; empty: none is named. A mount has the numbers in its path instead
    job: wire.Name = ""
    # the job's number is that of the cgroup, which only root chooses; else the environment says it
    in_cgroup: bool = False
    pid: wire.Pid = 0  # of a process; 0: it is none
    start_s: wire.Seconds = 0.0  # of a process: when it began, in seconds since boot
    state: wire.Name = ""  # of a process, or of its thread that waits in the kernel: D, S, Z
    wait_channel: wire.Line = ""  # the kernel function in which that thread waits, or empty
    kernel_stack: tuple[wire.Line, ...] = ()  # of that thread, leaf first
    has_gpu: bool = False  # the process has opened a GPU
    size_bytes: wire.Number = 0  # of files together
    numbers: tuple[wire.Name, ...] = ()  # of a mount's path: one may be that of a job
    # what Slurm says of the job: CANCELLED, or empty: it does not know the job, or none is named
    job_state: wire.Name = ""
    can_end: bool = False  # ``--end-leftovers`` ends the process: Slurm says that its job is over

    @property
    def is_stuck(self) -> bool:
        """Whether it is a process that no signal ends while it waits."""
        return self.state == "D"


@dataclass(frozen=True)
class NodeLeftovers:
    """The answer of a node."""

    leftovers: tuple[Leftover, ...]
    error: wire.Line  # why something may be missing in it; ""
    incident: wire.Line = ""  # the directory of the evidence; "": none was kept


_MAX_FOUND, _MAX_TEXT = 1000, 400  # maximum leftovers in an answer, and characters of one text
_MAX_THREADS, _MAX_FILES = 1024, 65536  # maximum threads of a process, files of a directory
_GPU = re.compile(r"/dev/(nvidia\d+|kfd|dri/renderD\d+)")  # device files of NVIDIA, ROCm
#: File systems that a user's program serves say whose they are (mount.fuse3(8)).
_FUSE_USER = re.compile(r"(?:^|,)user_id=(\d{1,10})\b")
#: A number that stands alone in a path, as in /tmp/4711, job_4711 and ada.4711.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?:job|slurm)?(\d{1,10})(?![A-Za-z0-9])")
#: Mounts of logins, containers and packages, whose numbers are no jobs'.
_NO_JOBS = ("/run/user/", "/snap/", "/proc/", "/sys/")
#: Directory -> the names of files there that jobs leave: shared memory, and torchrun's logs.
_FILES = {"/dev/shm": re.compile(r".+"), "/tmp": re.compile(r"torchelastic_.+")}
#: uids of login.defs(5) and of systemd's DynamicUser (systemd's UIDS-GIDS).
_FIRST_USER, _SYSTEMS = 1000, range(61184, 65536)


def _is_person(uid: int | None) -> bool:
    return uid is not None and uid >= _FIRST_USER and uid not in _SYSTEMS


def find(deadline: float) -> NodeLeftovers:
    """What may hold this node; also what is of running jobs. deadline: of time.monotonic()"""
    if os.geteuid():
        return NodeLeftovers((), "only root sees the processes of all users: --sudo")
    errors = []
    scanned, missed_count = processes.scan(deadline)
    rows = list(_processes(scanned, deadline))
    if missed_count:
        errors.append(f"{missed_count} processes were not looked at in time")
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            rows += find_mounts(file.read())
        for directory, pattern in _FILES.items():
            rows += _files(directory, pattern)
    except OSError as error:
        errors.append(f"{error.filename}: {error.strerror}")
    if len(rows) > _MAX_FOUND:
        errors.append(f"{len(rows) - _MAX_FOUND} more were found")
    return NodeLeftovers(tuple(rows[:_MAX_FOUND]), "; ".join(errors))


def _processes(scanned: Iterable[ScannedProcess], deadline: float) -> Iterator[Leftover]:
    """The processes that name a job, and those of persons in state D or with a GPU."""
    cgroup_jobs, jobs, threads = {}, {}, {}
    candidates = {process.pid: process for process in scanned}
    for pid, process in candidates.items():
        cgroups = processes.contents(f"/proc/{pid}/cgroup") if process.hangs else ""
        cgroup_jobs[pid] = process.cgroup_job or processes.slurm_job(cgroups)
        claim = (process.environment or {}).get("SLURM_JOB_ID", "")
        is_claim = _is_person(process.uid) and re.fullmatch(r"\d{1,10}", claim)
        jobs[pid] = cgroup_jobs[pid] or (claim if is_claim else "")
        if jobs[pid] or _is_person(process.uid):
            threads[pid] = _waiting_thread(pid)
    if any(thread and not jobs[pid] for pid, thread in threads.items()):
        time.sleep(1)  # Each read of a disk passes through state D.
    chosen = [
        pid
        for pid, thread in threads.items()
        if jobs[pid] or _has_gpu(pid) or (thread and _waiting_thread(pid) == thread)
    ]
    facts = processes.observe(chosen, deadline, threads)
    for pid in chosen:
        process, fact = candidates[pid], facts.get(pid)
        is_zombie = fact is not None and fact.state == "Z" and fact.threads < 2
        if process.uid is None or (pid in facts and fact is None) or is_zombie:
            continue
        # Without an answer, the process hangs.
        waits = (fact.state, fact.wait_channel, fact.kernel_stack) if fact else ("D", "", ())
        owner = process.uid, user_name(process.uid), jobs[pid], bool(cgroup_jobs[pid])
        text = _text(process.command or process.name)
        yield Leftover(PROCESS, text, *owner, pid, process.start_s, *waits, _has_gpu(pid))


def _text(text: str) -> str:
    return sanitise(redacted(text), _MAX_TEXT)


def _waiting_thread(pid: int) -> int:
    """The first thread in state D; 0: none."""
    threads = list_directory(f"/proc/{pid}/task", _MAX_THREADS)
    stats = (processes.stat(processes.contents(f"/proc/{pid}/task/{tid}/stat")) for tid in threads)
    return next((stat.pid for stat in stats if stat and stat.state == "D"), 0)


def _has_gpu(pid: int) -> bool:
    return has_open(pid, _GPU.fullmatch)


def find_mounts(mountinfo: str) -> Iterator[Leftover]:
    """The mounts of persons' programs (FUSE), and those with a number in their path, of this text
    of /proc/self/mountinfo. No mount is touched: its server may be gone.
    """
    for row in mountinfo.splitlines():
        for mount in parse_mounts(row):
            served_by = _FUSE_USER.search(row.rpartition(" ")[2]) if "fuse" in mount.kind else None
            uid = int(served_by[1]) if served_by else 0
            path = mount.path
            numbers = () if path.startswith(_NO_JOBS) else tuple(_NUMBER.findall(path))
            if numbers or _is_person(uid):
                user = user_name(uid)
                yield Leftover(MOUNT, _text(str(mount)), uid, user, numbers=numbers[:16])


def _files(directory: str, pattern: re.Pattern[str]) -> Iterator[Leftover]:
    """The files of each person in this directory. Raises OSError."""
    sizes: dict[int, list[tuple[int, str]]] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count == _MAX_FILES:
                raise OSError(0, f"more than {_MAX_FILES} files", directory)
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if pattern.fullmatch(entry.name) and _is_person(status.st_uid):
                    sizes.setdefault(status.st_uid, []).append((status.st_size, entry.path))
    for uid, files in sizes.items():
        size, suffix = sum(size for size, _ in files), f" and {len(files) - 1} more"
        text = _text(max(files)[1]) + (suffix if len(files) > 1 else "")
        yield Leftover(FILES, text, uid, user_name(uid), size_bytes=size)


# --- What Slurm knows of the jobs.

#: The states in which a job is over (squeue(1), JOB STATE CODES).
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip
_ENDING = "COMPLETING"  # Slurm waits for the last processes and the epilog of a job


@dataclass(frozen=True)
class SlurmJob:
    """A job in Slurm's records."""

    state: str  # CANCELLED
    uid: int  # of its user
    is_here: bool  # the node is one of its nodes

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def is_running(self) -> bool:
        """Whether it uses the node."""
        return self.is_here and not self.is_over and self.state != _ENDING


def jobs_on(node: str, numbers: Collection[str], deadline: float) -> dict[str, SlurmJob]:
    """The jobs of a node (its name in Slurm), and those with these numbers, as far as Slurm knows
    them: slurmctld forgets an ended job after MinJobAge, the accounting does not.
    Raises DrainError.
    """
    squeue = ["squeue", "-h", "-a", "-t", "all", "-o", "%A|%T|%U"]
    jobs = _jobs(ask_slurm([*squeue, "-w", node], deadline), is_here=True)
    if missing := sorted({*numbers} - jobs.keys()):
        with contextlib.suppress(DrainError):  # Slurm knows none of them.
            jobs |= _jobs(ask_slurm([*squeue, "-j", ",".join(missing)], deadline), False)
    if missing := sorted({*numbers} - jobs.keys()):
        sacct = ["sacct", "-n", "-P", "-X", "-o", "JobIDRaw,State,UID", "-j", ",".join(missing)]
        with contextlib.suppress(DrainError):  # There is no accounting.
            jobs |= _jobs(ask_slurm(sacct, deadline), False)
    return jobs


def _jobs(text: str, is_here: bool) -> dict[str, SlurmJob]:
    """The jobs of these lines. CANCELLED has its canceller's uid behind it in sacct."""
    rows = (row.split("|") for row in text.splitlines())
    return {
        row[0]: SlurmJob(row[1].partition(" ")[0], int(row[2]), is_here)
        for row in rows
        if len(row) == 3 and row[0].isdecimal() and row[2].isdecimal()
    }


def judged(rows: Iterable[Leftover], jobs: Mapping[str, SlurmJob]) -> tuple[Leftover, ...]:
    """What holds the node, with its job's state: without what is of running jobs, and with the
    jobs that Slurm has not ended yet.
    """
    running_users = {job.uid for job in jobs.values() if job.is_running}
    living_users = {job.uid for job in jobs.values() if job.is_here and not job.is_over}
    holding = []
    for row in rows:
        number = _believed_job(row, jobs)
        job = jobs.get(number)
        is_running = job is not None and job.is_running
        is_nobodys = job is None and row.kind != PROCESS and not _is_person(row.uid)
        is_in_use = job is None and row.kind != PROCESS and row.uid in running_users
        if is_running or is_nobodys or is_in_use:
            continue
        can_end = (
            row.kind == PROCESS
            and job is not None
            and job.is_over
            and row.uid == job.uid
            # Only root chooses a cgroup. A process of a running job may have the environment of
            # another job of its user.
            and (row.in_cgroup or row.uid not in living_users)
            and "slurmstepd" not in row.text.partition(" ")[0]
        )
        uid = job.uid if job and row.kind == MOUNT else row.uid
        user = row.user if uid == row.uid else user_name(uid)
        held = replace(row, uid=uid, user=user, job=number, can_end=can_end)
        holding.append(replace(held, job_state=job.state if job else ""))
    for number, job in jobs.items():
        if job.is_here and job.state == _ENDING:
            user = user_name(job.uid)
            holding.append(Leftover(JOB, "", job.uid, user, number, job_state=job.state))
    return tuple(holding)


def _believed_job(row: Leftover, jobs: Mapping[str, SlurmJob]) -> str:
    """The number of the job that a leftover is of; "": not known."""
    if row.kind == MOUNT:
        return next((n for n in row.numbers[::-1] if n in jobs and jobs[n].is_here), "")
    job = jobs.get(row.job)
    # A user's environment may name another user's job.
    is_foreign = job is not None and not row.in_cgroup and job.uid != row.uid
    return "" if is_foreign else row.job


# --- The end of processes.

_TERM_S, _KILL_S = 8.0, 4.0  # seconds between TERM and KILL, and from KILL on


def end(targets: Collection[tuple[int, float]]) -> None:
    """End these processes, (pid, seconds since boot at its start), by TERM, then by KILL."""
    for number, wait_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        remaining = [target for target in targets if _is_running(*target)]
        for pid, start_s in remaining:
            with contextlib.suppress(OSError):
                send_signal(pid, round(start_s * os.sysconf("SC_CLK_TCK")), number)
        deadline = time.monotonic() + wait_s
        while any(_is_running(*target) for target in remaining) and time.monotonic() < deadline:
            time.sleep(0.1)


def _is_running(pid: int, start_s: float) -> bool:
    stat = processes.stat(processes.contents(f"/proc/{pid}/stat"))
    if stat is None or stat.start_s != start_s:
        return False
    return stat.state != "Z" or stat.threads > 1


def main(config: LeftoversConfig) -> None:
    """Print what is found; before, end the processes of the configuration."""
    answer, chosen = find(time.monotonic() + config.limit_s / 2), {*map(tuple, config.end)}
    if targets := [row for row in answer.leftovers if (row.pid, row.start_s) in chosen]:
        try:
            rows = [asdict(row) for row in targets]
            incident = str(write_incident(config.reasons, (), Path(INCIDENTS), rows))
        except OSError as error:
            problem = f"nothing was ended: no evidence: {error.filename}: {error.strerror}"
            answer = replace(answer, error="; ".join(filter(None, (answer.error, problem))))
        else:
            end(tuple((row.pid, row.start_s) for row in targets))
            answer = replace(find(time.monotonic() + 5), incident=incident)
    print(wire.packed_line(config.nonce, "leftovers", answer), flush=True)
