"""How often each rank waits, over a minute: glances at the system calls of the main threads.

A stack costs a process that reads memory, so a minute has some fifteen of each rank. A glance is
one read of /proc/PID/task/TID/syscall (proc(5)): the number of the call, its first argument if
that is a descriptor, the stack pointer and the program counter. Equal glances are equal places, so
a stack or a connection that is read at such a place tells what hundreds of glances mean
(`nodeready.runs.stacks.slow`). Nothing is stopped. Beside them stand the kernel's counters of the
minute.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread, get_native_id
from typing import Any, Union

from nodeready.agent.proc import first_number, socket_inodes
from nodeready.agent.stacks import links, waits
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.processes import HANGS, contents, pids, probe_each, stat
from nodeready.core.wire import Count, Line, Number, Seconds


@dataclass(frozen=True)
class RankGlances:
    """The glances at one rank, in turn, and the kernel's counters of that time."""

    seconds: Seconds
    places: str  # one character a glance: a place, RUNS or UNREADABLE
    # by stack: the place of the main thread before and after it; "": it moved
    stack_places: tuple[Line, ...]
    ends: tuple[tuple[Line, Line], ...]  # a place, and an end that it waits for (`links`)
    # what a place is in words: `read of /data/shard-5 (nfs4)`
    phrases: tuple[tuple[Line, Line], ...]
    sent: tuple[Number, ...]  # by look: bytes that its connections have delivered so far
    unsent: str  # one character a look at the connections: `1` where data was on its way
    cpu_s: Seconds  # of its main thread
    queued_s: Seconds  # its main thread was ready to run, and had no CPU
    throttled_s: Seconds  # its cgroup had used up its CPU time
    faults: Count  # pages that came from a disk


@dataclass(frozen=True)
class NodeGlances:
    """The counters of a node over the glances."""

    seconds: Seconds
    steal: Seconds  # parts of all CPUs' time that a hypervisor gave to others
    frequency: Seconds  # of the CPUs, as a part of their maximum; 0: not known
    memory_stall: Seconds  # part of the time in which a process waited for memory
    retransmits: Seconds  # parts of the TCP segments that were sent again
    beside: Line  # the process that used most CPU and is no rank's; "": none of importance
    beside_cpus: Seconds  # CPUs that it used


#: Characters of `RankGlances.places`: the thread runs; its call cannot be read. Other places
#: follow, and after `_LAST` all have one.
UNREADABLE, RUNS, _FIRST, _LAST = "!", "#", ord("%"), "~"
#: Seconds between two glances on average, the maximum number of glances, and the maximum part of
#: the time in which the connections are read.
_PAUSE_S, _MAX_GLANCES, _CONNECTIONS_SHARE = 0.1, 1200, 0.005
_MAX_DESCRIPTOR, _MAX_SOCKETS = 1 << 20, 4096
#: Maximum ends of a rank; minimum CPUs of a process that is reported beside the ranks.
_MAX_ENDS, _MIN_CPUS = 64, 0.3

_Place = Union[str, tuple[str, ...]]


def _call_place(line: str) -> _Place:
    """The place in a line of /proc/PID/task/TID/syscall."""
    words = line.split()
    if len(words) < 3:
        return RUNS if words == ["running"] else UNREADABLE
    # An address of a buffer or a lock differs from step to step.
    first = words[1] if len(words) > 3 and int(words[1], 16) < _MAX_DESCRIPTOR else ""
    return words[0], first, words[-2], words[-1]


def _is_network_of(pid: int) -> bool:
    """Whether this thread is, or now goes, into the network namespace of a process."""
    try:
        own = f"/proc/self/task/{get_native_id()}/ns/net"
        return os.path.samefile(f"/proc/{pid}/ns/net", own) or links.enter_network(pid)
    except OSError:
        return False


class Glances:
    """Glances at the ranks of a node, until `finish`.

    seconds: how long
    """

    def __init__(self, targets: Sequence[StackTarget], seconds: float) -> None:
        self._targets = [target for target in targets if not target.rank.stranger]
        self._pause_s = max(_PAUSE_S, seconds / _MAX_GLANCES)
        self._numbers: dict[int, dict[_Place, str]] = {target.pid: {} for target in self._targets}
        self._places: dict[int, list[str]] = {target.pid: [] for target in self._targets}
        self._stack_places: dict[int, list[str]] = {target.pid: [] for target in self._targets}
        self._ends: dict[int, dict[str, dict[str, None]]] = {
            target.pid: {} for target in self._targets
        }
        self._phrases: dict[int, dict[str, str]] = {target.pid: {} for target in self._targets}
        self._sent: dict[int, list[int]] = {target.pid: [] for target in self._targets}
        self._unsent: dict[int, list[str]] = {target.pid: [] for target in self._targets}
        self._inodes: dict[str, int] = {}
        self._lock, self._over = Lock(), Event()
        self._began = time.monotonic()
        self._first = self._counters()
        # A read that hangs ends with this program.
        self._thread = Thread(target=self._glance, daemon=True)
        self._thread.start()

    def _glance(self) -> None:
        # The ranks of a container see its connections alone; this thread goes there.
        spaces = self._spaces()
        is_visible = len(spaces) == 1 and _is_network_of(next(iter(spaces.values())))
        read_s = 0.0
        # The pauses differ, so that they are in step with no program.
        while not self._over.wait(self._pause_s * random.uniform(0.5, 1.5)):
            for target in self._targets:
                self._places[target.pid].append(self.place(target))
            began = time.monotonic()
            if is_visible and read_s <= _CONNECTIONS_SHARE * (began - self._began):
                rows = waits.sent_data().items()
                sending = {self._inodes.get(inode) for inode, (_, unsent) in rows if unsent}
                for pid, marks in self._unsent.items():
                    marks.append("1" if pid in sending else "0")
                read_s += time.monotonic() - began

    def place(self, target: StackTarget) -> str:
        """The place of a rank's main thread now."""
        thread = target.thread or target.pid
        return self._number(target.pid, contents(f"/proc/{target.pid}/task/{thread}/syscall"))

    def _number(self, pid: int, line: str) -> str:
        place = _call_place(line)
        if isinstance(place, str):
            return place
        with self._lock:
            numbers = self._numbers[pid]
            return numbers.setdefault(place, min(chr(_FIRST + len(numbers)), _LAST))

    def _look_at_connections(self, deadline: float) -> None:
        """Add what the ranks have sent so far."""
        rows: dict[str, Any] = {}
        for answer in probe_each(
            lambda pid: waits.sent_data() if _is_network_of(pid) else {},
            list(self._spaces().values()),
            deadline,
        ).values():
            rows.update({} if answer is HANGS else answer)
        for target in self._targets:
            inodes = socket_inodes(target.pid, _MAX_SOCKETS)
            self._inodes.update(dict.fromkeys(inodes, target.pid))
            sent = sum(rows[inode][0] for inode in inodes if inode in rows)
            self._sent[target.pid].append(sent)

    def _spaces(self) -> dict[int, int]:
        """Network namespace -> a rank in it."""
        spaces: dict[int, int] = {}
        for target in self._targets:
            with contextlib.suppress(OSError):
                spaces.setdefault(os.stat(f"/proc/{target.pid}/ns/net").st_ino, target.pid)
        return spaces

    def look(self, began: float, deadline: float) -> None:
        """Read which ranks the main threads wait for, by their connections."""
        self._look_at_connections(deadline)
        threads = {target.pid: target.thread or target.pid for target in self._targets}

        def probe(pid: int) -> list[Any]:
            """The line of the current call with its row; calls of descriptors with theirs."""
            path = f"/proc/{pid}/task/{threads[pid]}/syscall"
            line, row = contents(path), waits.probe_thread(pid, threads[pid])
            current = [[line, row]] if row and line == contents(path) else []
            return current + [
                [number, waits.probe_descriptor(pid, int(place[0]), int(place[1], 16))]
                for place, number in list(self._numbers[pid].items())
                if place[1] and number not in self._ends[pid]
            ]

        calls: dict[tuple[int, int], waits.WaitCall] = {}
        for pid, answer in probe_each(probe, list(threads), deadline).items():
            for text, row in [] if answer is HANGS else answer:
                number = text if len(text) == 1 else self._number(pid, text)
                if row:
                    # As a thread of its own.
                    call = calls[pid, -ord(number)] = waits.WaitCall(*row)
                    words = f"{call.verb} of {call.objects[0]}" if call.objects else call.verb
                    self._phrases[pid].setdefault(number, words)
        links.observe(self._targets, calls, began, deadline)
        for target in self._targets:
            ends = self._ends[target.pid]
            for pid, thread in calls:
                if pid == target.pid and len(ends) < _MAX_ENDS:
                    ends.setdefault(chr(-thread), {})
            for name, end in target.waits_for:
                if name.startswith("-"):
                    ends.setdefault(chr(int(name[1:])), {})[end] = None

    def add_stack(self, target: StackTarget, before: str) -> None:
        """Note where a rank was while its stack was read. before: `place` before that"""
        place = self.place(target)
        self._stack_places[target.pid].append(place if place == before else "")

    def finish(self) -> dict[str, Any]:
        """End; give each rank its glances, and return those of the node."""
        self._over.set()
        self._thread.join(2 * self._pause_s)
        seconds = time.monotonic() - self._began
        (ranks_before, node_before), (ranks_after, node_after) = self._first, self._counters()
        names = waits.calls(os.uname().machine)
        for target in self._targets:
            pid = target.pid
            old, new = ranks_before[pid], ranks_after[pid]
            deltas = {name: max(0, new[name] - old.get(name, new[name])) for name in new}
            count = min(map(len, self._places.values()))
            verbs = {
                number: names.get(int(place[0]), ("",))[0]
                for place, number in self._numbers[pid].items() if place[0].isdigit()
            }  # fmt: skip
            target.witnesses["glances"] = {
                "seconds": round(seconds, 2),
                "places": "".join(self._places[pid][:count]),
                "stack_places": self._stack_places[pid],
                "ends": [(place, end) for place, ends in self._ends[pid].items() for end in ends],
                "phrases": list({**verbs, **self._phrases[pid]}.items()),
                "sent": self._sent[pid],
                "unsent": "".join(self._unsent[pid]),
                **deltas,
            }
        return _node_row(node_before, node_after, seconds)

    def _counters(self) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
        """The counters of each rank, and of the node."""
        rank_pids = {target.pid for target in self._targets}
        ranks = {
            target.pid: _rank_counters(target.pid, target.thread or target.pid)
            for target in self._targets
        }
        return ranks, _node_counters(rank_pids)


#: The files of the time for which a cgroup was throttled: the controller in /proc/PID/cgroup, the
#: directory, the row, and how many of its units are a second.
_CPU_STATS = (
    (re.compile(r"^\d+:(?:[^:]*,)?cpu(?:,[^:]*)?:(/.*)$", re.M), ("cpu", "cpu,cpuacct"),
     re.compile(r"^throttled_time (\d+)$", re.M), 1e9),
    (re.compile(r"^0::(/.*)$", re.M), ("", "unified"),
     re.compile(r"^throttled_usec (\d+)$", re.M), 1e6),
)  # fmt: skip


def _throttled_s(pid: int) -> float:
    """Seconds for which the cgroup of a process, or one above it, had no CPU time left."""
    text, throttled = contents(f"/proc/{pid}/cgroup"), 0.0
    for row, mounts, words, units in _CPU_STATS:
        for path in row.findall(text):
            # With the cgroups above it.
            above = [path[: match.start()] for match in re.finditer("/", path)]
            for mount, cgroup in itertools.product(mounts, (path, *above)):
                stats = contents(f"/sys/fs/cgroup/{mount}{cgroup}/cpu.stat")
                throttled = max([throttled, *(int(n) / units for n in words.findall(stats))])
    return throttled


def _rank_counters(pid: int, thread: int) -> dict[str, float]:
    words = contents(f"/proc/{pid}/task/{thread}/schedstat").split()
    cpu_s, queued_s = (int(word) / 1e9 for word in words[:2]) if len(words) == 3 else (0.0, 0.0)
    fields = contents(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return {
        "cpu_s": round(cpu_s, 3),
        "queued_s": round(queued_s, 3),
        "throttled_s": round(_throttled_s(pid), 3),
        "faults": int(fields[9]) if len(fields) > 9 else 0,
    }


def _node_counters(rank_pids: set[int]) -> dict[str, Any]:
    """The counters of the node; of each process that is no rank's and not ours its CPU time."""
    rows = [stat(contents(f"/proc/{pid}/stat")) for pid in pids()]
    family = rank_pids | {os.getpid()}
    parents = {row.pid: row.parent for row in rows if row}

    def is_ours(pid: int) -> bool:
        for _ in range(32):
            if pid in family:
                return True
            pid = parents.get(pid, 0)
        return False

    others = {
        (row.pid, row.start_s): (row.name, row.cpu_s)
        for row in rows if row and not is_ours(row.pid)
    }  # fmt: skip
    segments = [0, 0]
    for pid in list(rank_pids)[:1]:
        tcp = [row.split() for row in contents(f"/proc/{pid}/net/snmp").splitlines()
               if row.startswith("Tcp:")]  # fmt: skip
        values = dict(zip(*tcp)) if len(tcp) == 2 else {}
        segments = [int(values.get(name, 0)) for name in ("RetransSegs", "OutSegs")]
    clocks = []
    for number in range(min(os.cpu_count() or 1, 256)):
        path = f"/sys/devices/system/cpu/cpu{number}/cpufreq"
        now, most = (first_number(f"{path}/{name}") for name in ("scaling_cur_freq",
                                                                 "cpuinfo_max_freq"))  # fmt: skip
        clocks += [now / most] if now and most else []
    cpu = contents("/proc/stat", 4096).partition("\n")[0].split()[1:9]
    return {
        "others": others,
        "segments": segments,
        "frequency": sum(clocks) / len(clocks) if clocks else 0.0,
        "cpu": [int(word) for word in cpu],
        "memory_stall_s": _stall_s("/proc/pressure/memory"),
    }


def _stall_s(path: str) -> float:
    """Seconds in which a process waited for this resource (psi.rst of Linux)."""
    match = re.search(r"^some .*total=(\d+)", contents(path), re.M)
    return int(match[1]) / 1e6 if match else 0.0


def _node_row(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """The fields of `NodeGlances`."""
    used = {
        key: (cpu_s - before["others"].get(key, ("", cpu_s))[1], name)
        for key, (name, cpu_s) in after["others"].items()
    }
    (pid, _), (cpu_s, name) = max(
        used.items(), key=lambda row: row[1][0], default=((0, 0.0), (0.0, ""))
    )
    cpus = cpu_s / seconds if seconds else 0.0
    again, sent = (new - old for new, old in zip(after["segments"], before["segments"]))
    ticks = [new - old for new, old in zip(after["cpu"], before["cpu"])]
    stalled_s = after["memory_stall_s"] - before["memory_stall_s"]
    return {
        "seconds": round(seconds, 2),
        "steal": max(0.0, ticks[7] / max(1, sum(ticks))) if len(ticks) == 8 else 0.0,
        "frequency": (before["frequency"] + after["frequency"]) / 2,
        "memory_stall": max(0.0, stalled_s / seconds),
        "retransmits": max(0.0, again / sent) if sent > 0 else 0.0,
        "beside": f"{name} (pid {pid})" if cpus >= _MIN_CPUS else "",
        "beside_cpus": max(0.0, cpus),
    }
