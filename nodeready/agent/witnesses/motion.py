"""Does the job move? Counters of its ranks, read from /proc alone, and of the node's ports.

The probe of `nodeready watch`. It is a separate program, because it runs every minute during a
healthy job. It takes no stack, runs no tool, and keeps nothing. Almost every value is a counter
that only grows, so two snapshots show the change between them. proc(5) describes the files.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nodeready import knowledge
from nodeready.agent.proc import has_open, list_directory
from nodeready.agent.stacks import processes, ranks
from nodeready.agent.witnesses import logs
from nodeready.core import wire

_TICKS = os.sysconf("SC_CLK_TCK")
_PORTS_S = 2.0  # seconds for the ports: a faulty card answers late
#: Maximum descendants of one rank, and maximum ranks of a node.
_MAX_DESCENDANTS, MAX_RANKS = 256, 1024
#: Bytes at the end of a log, some minutes, that are searched for the watchdog, and for progress.
_LOG_BYTES, _PROGRESS_BYTES = 16 << 10, 256 << 10
# ProcessGroupNCCL.cpp (checkTimeout, the heartbeat monitor) and ProcessGroupGloo's timeouts:
# "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=..."; "Heartbeat monitor timed
# out"; "Timed out waiting 1800000ms for recv operation to complete".
_WATCHDOG = re.compile(
    rb"[Ww]atchdog caught collective operation timeout|Heartbeat monitor timed out"
    rb"|Timed out waiting \d+ms for (?:recv|send) operation"
)
_TIMEOUTS = {key: (re.compile(row["pattern"]), row["unit_s"])
             for key, row in knowledge.rows("job_timeouts").items()}  # fmt: skip
#: Devices for which CUDA, ROCm, NCCL or UCX may poll.
_POLLED = (
    "/dev/nvidia", "/dev/kfd", "/dev/infiniband/", "/dev/dri/render", "/dev/hl", "/dev/accel",
)  # fmt: skip
#: The indexes of MPI's launchers in `processes.FAMILIES`.
_MPI = (1, 2)
_MAX_DESCRIPTORS = 1024
_SYSFS_IB = "/sys/class/infiniband"


@dataclass(frozen=True)
class MotionConfig:
    nonce: str  # as of every program that is sent to a node (`nodeready.agent.payload`)
    tag: str  # likewise
    limit_s: int  # likewise
    job: str = ""  # as of `nodeready.agent.stacks.program.StacksConfig`
    match: str = ""  # likewise
    user: str = ""  # likewise
    owner: str = ""  # likewise
    parts: tuple[str, ...] = ()  # likewise
    progress: str = ""  # the lines of a log that show progress match it; "": no line is asked for


@dataclass(frozen=True)
class Motion:
    """The counters of one rank since its start. None: unknown."""

    pid: int
    rank: int | None
    start: float  # of the process, in seconds since boot
    state: str  # the letter of /proc/PID/stat
    main_cpu_s: float  # of its main thread
    cpu_s: float  # of all its threads and all its descendants, ended processes too
    switches: int  # voluntary context switches of the main thread
    faults: int  # page faults of the process and its descendants
    # bytes that it and its descendants have read and written, by read(2) and write(2)
    moved_bytes: int | None
    descendant_count: int  # its descendants that run
    log_bytes: int | None  # size of the files of its standard output and error; None: no file
    log_age_s: int | None  # whole seconds since they were last written
    watchdog: bool  # the end of the log has a timeout of PyTorch's watchdog
    # it uses a GPU, an RDMA device or MPI, which wait by polling. Any other CPU time is work
    may_poll: bool
    # of its user, the same for all ids of the user (`users_file.main_uid`)
    uid: wire.Count | None = None
    in_cgroup: bool = False  # it is in the Slurm job's cgroup
    # offset of the end of the last line of its log that shows progress; None: no such line
    progress: int | None = None
    # seconds after which a collective that waits ends the job, by its arguments and variables
    timeout_s: wire.Count | None = None


@dataclass(frozen=True)
class PortBytes:
    """Received and sent bytes since boot; None: there is no such port."""

    network: int | None  # of all network interfaces without the loopback interface
    rdma: int | None  # of all RDMA ports


@dataclass(frozen=True)
class MotionEnd:
    """The last row."""

    ranks: int  # number of ranks
    error: str = ""  # which ranks were not read, one line


def main(config: MotionConfig) -> None:
    """Print a line for each rank, one for the ports, and one for the end."""
    # A healthy job needs the CPU.
    os.nice(19)
    deadline = time.monotonic() + max(1.0, config.limit_s - 1)
    motions, error = probe(config, deadline)
    ports_deadline = min(deadline, time.monotonic() + _PORTS_S)
    port_bytes = processes.probe_each(lambda _: _ports(), [0], ports_deadline).get(0)
    ports = PortBytes(*(port_bytes if isinstance(port_bytes, list) else (None, None)))
    for motion in motions:
        print(wire.line(config.nonce, "motion", motion))
    print(wire.line(config.nonce, "ports", ports))
    print(wire.line(config.nonce, "found", MotionEnd(len(motions), error)), flush=True)


def probe(config: MotionConfig, deadline: float) -> tuple[list[Motion], str]:
    """Every rank of the job, and what was left out, one line."""
    every_process, left_out = processes.scan(deadline)
    job_processes = ranks.with_parts(every_process, config.job, config.parts)
    error = f"{left_out} processes were not looked at: no time left" if left_out else ""
    uid, owner = _uid(config.user, deadline), _uid(config.owner, deadline)
    selection = ranks.Selection(config.job, (), config.match, uid, owner)
    try:
        chosen = ranks.select(job_processes, selection, os.getpid())
    except re.error as problem:
        return [], f"no regular expression: {problem}"
    # A process that claims another user's job is no rank of it.
    own_ranks = {rank.process.pid: rank for rank in chosen if not rank.stranger}
    if len(own_ranks) > MAX_RANKS:
        error = f"{len(own_ranks) - MAX_RANKS} ranks are left out"
    turns = processes.by_owner(own_ranks, {pid: rank.turn for pid, rank in own_ranks.items()})
    rank_by_pid = {pid: own_ranks[pid] for pid in turns[:MAX_RANKS]}
    descendants = _descendants(job_processes, rank_by_pid)
    owners, motions = processes.owners(rank_by_pid), []

    def look(pid: int) -> dict[str, Any] | None:
        return _motion(pid, descendants[pid], config.progress)

    values_by_pid = processes.probe_each(look, list(rank_by_pid), deadline, owners)

    for pid, values in values_by_pid.items():
        if values and values is not processes.HANGS:
            process, identity = rank_by_pid[pid].process, rank_by_pid[pid].identity
            values["may_poll"] |= identity.family in _MPI
            values |= {"uid": process.main_uid, "in_cgroup": bool(process.cgroup_job)}
            motions.append(Motion(pid=pid, rank=identity.rank, **values))
    hung = sum(values is processes.HANGS for values in values_by_pid.values())
    if hung:
        error = f"{hung} ranks could not be looked at: reading them hangs"
    return motions, error


def _uid(user: str, deadline: float) -> int | None:
    """The uid of this user; None: no user is given; -1: there is no such user."""
    if not user:
        return None
    if user.isdigit():
        return int(user)

    def number(_: int) -> int:
        import pwd

        try:
            return pwd.getpwnam(user).pw_uid
        except KeyError:
            return -1

    uid = processes.probe_each(number, [0], deadline).get(0)
    return uid if isinstance(uid, int) else -1


def _descendants(
    job_processes: Sequence[processes.ScannedProcess], pids: Iterable[int]
) -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for process in job_processes:
        children[process.parent].append(process.pid)
    families = {pid: processes.descendants(pid, children) for pid in pids}
    return {pid: sorted(islice(row, _MAX_DESCENDANTS)) for pid, row in families.items()}


def _numbers(path: str) -> tuple[str, list[int]] | None:
    """The state and the numbers after it in a stat file; None: the process has ended."""
    state, _, numbers_text = processes.contents(path).rpartition(")")[2].strip().partition(" ")
    words = numbers_text.split()
    try:
        return (state, [int(word) for word in words]) if len(words) > 20 else None
    except ValueError:
        return None


# Indexes after the state in /proc/PID/stat: faults and CPU of the process and its ended children.
_FAULTS, _CPU, _START = (6, 7, 8, 9), (10, 11, 12, 13), 18


def _motion(pid: int, descendants: Sequence[int], progress: str) -> dict[str, Any] | None:
    process_stat = _numbers(f"/proc/{pid}/stat")
    thread = _numbers(f"/proc/{pid}/task/{pid}/stat")
    if process_stat is None or thread is None:
        return None
    state, numbers = process_stat
    children = filter(None, (_numbers(f"/proc/{child}/stat") for child in descendants))
    rows = [numbers, *(child_numbers for _, child_numbers in children)]
    io_texts = (processes.contents(f"/proc/{number}/io") for number in (pid, *descendants))
    moved = (processes.read_and_written(text, "rchar", "wchar") for text in io_texts)
    moved_bytes = [count for count in moved if count is not None]
    size, age_s, watchdog = _log(pid)
    status = processes.contents(f"/proc/{pid}/status")
    switches = re.search(r"^voluntary_ctxt_switches:\s+(\d{1,18})", status, re.M)
    return {
        "start": round(numbers[_START] / _TICKS, 2), "state": state[:1],
        "main_cpu_s": round((thread[1][10] + thread[1][11]) / _TICKS, 2),
        "cpu_s": round(sum(row[place] for row in rows for place in _CPU) / _TICKS, 2),
        "switches": int(switches[1]) if switches else 0,
        "faults": sum(row[place] for row in rows for place in _FAULTS),
        "moved_bytes": sum(moved_bytes) if moved_bytes else None,
        "descendant_count": len(rows) - 1, "log_bytes": size, "log_age_s": age_s,
        "watchdog": watchdog,
        "may_poll": has_open(pid, lambda path: path.startswith(_POLLED), _MAX_DESCRIPTORS),
        "progress": _last_match(pid, progress) if progress else None,
        "timeout_s": min(timeouts(_settings(pid)).values(), default=None),
    }  # fmt: skip


def timeouts(settings: str) -> dict[str, int]:
    """Row -> seconds of the timeout in a process's settings (`_settings`)."""
    rows = ((key, pattern.search(settings), s) for key, (pattern, s) in _TIMEOUTS.items())
    return {key: int(match[1]) * unit_s for key, match, unit_s in rows if match}


def _settings(pid: int) -> str:
    """The arguments of a process, joined by spaces, and its environment, a variable per line."""
    variables = (processes.environment_bytes(pid) or b"").decode("utf-8", "replace")
    command = processes.contents(f"/proc/{pid}/cmdline")
    return "\n".join((command.replace("\0", " "), *variables.split("\0")))


def _log(pid: int) -> tuple[int | None, int | None, bool]:
    """Size and age of the files of standard output and error, and whether the watchdog fired."""
    watchdog, files = False, _log_files(pid)
    if not files:
        return None, None, False
    with contextlib.suppress(OSError):
        owner = os.stat(f"/proc/{pid}").st_uid
        for link in files:
            with contextlib.suppress(logs.NoLogError):
                end = logs.written_part(link, link, owner, _LOG_BYTES)[0]
                watchdog = watchdog or bool(_WATCHDOG.search(end))
    latest = max(file_stat.st_mtime for file_stat in files.values())
    age_s = max(0, min(int(time.time() - latest), 2**31 - 1))
    return sum(file_stat.st_size for file_stat in files.values()), age_s, watchdog


def _log_files(pid: int) -> dict[str, os.stat_result]:
    """The descriptors of standard output and error that lead to regular files; one of a file."""
    files: dict[str, os.stat_result] = {}
    for link in (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2"):
        with contextlib.suppress(OSError):
            file_stat = os.stat(link)
            is_new = not any(os.path.samestat(file_stat, other) for other in files.values())
            if is_new and stat.S_ISREG(file_stat.st_mode):
                files[link] = file_stat
    return files


def _last_match(pid: int, pattern: str) -> int | None:
    """Where the last line ends that matches, in the file of standard output or error."""
    ends = []
    for link in _log_files(pid):
        with contextlib.suppress(logs.NoLogError, OSError):
            owner = os.stat(f"/proc/{pid}").st_uid
            text, start = logs.written_part(link, link, owner, _PROGRESS_BYTES)
            # Not the size of the file, which may have grown since.
            end = start + len(text)
            # A progress bar writes its lines over each other.
            for line in reversed(re.split(rb"[\r\n]", text)):
                if re.search(pattern, line.decode("utf-8", "replace")):
                    ends.append(end)
                    break
                end -= len(line) + 1
    return max(ends, default=None)


def _ports() -> list[int | None]:
    """The bytes of the network interfaces, and of the RDMA ports. RDMA counters count 4 bytes
    (PortXmitData and PortRcvData of the InfiniBand specification).
    """
    network = None
    for row in processes.contents("/proc/net/dev").splitlines():
        name, colon, numbers = row.partition(":")
        words = numbers.split()
        if colon and name.strip() != "lo" and len(words) > 8:
            network = (network or 0) + int(words[0]) + int(words[8])
    rdma = None
    for device in list_directory(_SYSFS_IB):
        for port in list_directory(f"{_SYSFS_IB}/{device}/ports"):
            counters = f"{_SYSFS_IB}/{device}/ports/{port}/counters"
            for name in ("port_rcv_data", "port_xmit_data"):
                value = processes.contents(f"{counters}/{name}").strip()
                if value.isdigit():
                    rdma = (rdma or 0) + 4 * int(value[:19])
    return [network, rdma]


def kinds() -> Mapping[str, type]:
    return {"motion": Motion, "ports": PortBytes, "found": MotionEnd}
