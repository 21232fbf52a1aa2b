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
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
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
    ends: tuple[tuple[Line, Line], ...]  # a place, and an end that it waits for; "": none
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
    stranger: Line  # the process that used most CPU and is no rank's; "": none of importance
    stranger_cpus: Seconds  # CPUs that it used


#: Characters of `RankGlances.places`: the thread runs; its call cannot be read. Other places
#: follow, and after `_LAST` all have one.
UNREADABLE, RUNS, _FIRST, _LAST = "!", "#", ord("%"), "~"
#: Seconds between two glances on average, the maximum number of glances, and the maximum part of
#: the time in which the connections are read.
_PAUSE_S, _MAX_GLANCES, _CONNECTIONS_SHARE = 0.1, 1200, 0.005
_MAX_SOCKETS = 4096
#: Maximum ends of a rank; minimum CPUs of a process that is reported beside the ranks.
_MAX_ENDS, _MIN_CPUS = 64, 0.3

_CALLS = waits.calls(os.uname().machine)

_Place = Union[str, tuple[str, ...]]


def _call_place(line: str) -> _Place:
    """The place in a line of /proc/PID/task/TID/syscall."""
    words = line.split()
    if len(words) < 3:
        return RUNS if words == ["running"] else UNREADABLE
    kind = _CALLS.get(int(words[0]), ("", ""))[1] if words[0].isdigit() else ""
    return words[0], words[1] if kind == "fd" else "", words[-2], words[-1]


def _is_network_of(pid: int) -> bool:
    """Whether this thread is, or now goes, into the network namespace of a process."""
    try:
        own_network = f"/proc/self/task/{get_native_id()}/ns/net"
        return os.path.samefile(f"/proc/{pid}/ns/net", own_network) or links.enter_network(pid)
    except OSError:
        return False


@dataclass
class _GlancedRank:
    """A rank, and what was seen of it."""

    target: StackTarget
    numbers: dict[_Place, str] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    stack_places: list[str] = field(default_factory=list)
    ends: dict[str, dict[str, None]] = field(default_factory=dict)
    phrases: dict[str, str] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    unsent: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._first_counters = _rank_counters(self.target.pid, self.thread)

    @property
    def thread(self) -> int:
        return self.target.thread or self.target.pid

    def line(self) -> str:
        return contents(f"/proc/{self.target.pid}/task/{self.thread}/syscall")

    def number(self, line: str) -> str:
        place = _call_place(line)
        if isinstance(place, str):
            return place
        with self.lock:
            new = min(chr(_FIRST + len(self.numbers)), _LAST)
            return self.numbers.setdefault(place, new)

    def calls(self) -> list[Any]:
        """The line of its current call, and the character of each other call with a descriptor
        that was not read before; each with its row (`waits`). For a fork.
        """
        pid, line = self.target.pid, self.line()
        row, place = waits.probe_thread(pid, self.thread), _call_place(line)
        # Reading a set of sockets takes longer than many waits, so the call may be over by now.
        is_same = row and place[0].isdigit() and _CALLS.get(int(place[0]), ("",))[0] == row[0]
        rows = [[line, row]] if is_same else []
        return rows + [
            [number, waits.probe_descriptor(pid, int(place[0]), int(place[1], 16))]
            for place, number in self.numbers.items()
            if place[1] and number not in self.ends
        ]

    def add_call(self, number: str, call: waits.WaitCall) -> None:
        words = f"{call.verb} of {call.objects[0]}" if call.objects else call.verb
        self.phrases.setdefault(number, words)
        self.ends.setdefault(number, {})

    def plain(self, seconds: float) -> dict[str, Any]:
        """The fields of `RankGlances`."""
        counters = _rank_counters(self.target.pid, self.thread)
        verbs = {
            number: _CALLS.get(int(place[0]), ("",))[0]
            for place, number in self.numbers.items() if place[0].isdigit()
        }  # fmt: skip
        return {
            "seconds": seconds,
            "places": "".join(self.places),
            "stack_places": self.stack_places,
            "ends": [(place, end) for place, ends in self.ends.items() for end in ends or [""]],
            "phrases": list({**verbs, **self.phrases}.items()),
            "sent": self.sent,
            "unsent": "".join(self.unsent),
            **{name: max(0, counters[name] - old) for name, old in self._first_counters.items()},
        }


class Glances:
    """Glances at the ranks of a node for some seconds, until `finish`."""

    def __init__(self, targets: Sequence[StackTarget], seconds: float) -> None:
        readable = (t for t in targets if not (t.rank.stranger or t.rank.process.hangs))
        self._ranks = {target.pid: _GlancedRank(target) for target in readable}
        self._pause_s = max(_PAUSE_S, seconds / _MAX_GLANCES)
        self._owner_by_inode: dict[str, int] = {}
        self._over, self._began = Event(), time.monotonic()
        self._first = _node_counters(self._ranks)
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
            for rank in self._ranks.values():
                rank.places.append(rank.number(rank.line()))
            began = time.monotonic()
            if is_visible and read_s <= _CONNECTIONS_SHARE * (began - self._began):
                rows = waits.sent_data().items()
                inodes = [inode for inode, (_, is_sending) in rows if is_sending]
                sending = set(map(self._owner_by_inode.get, inodes))
                for pid, rank in self._ranks.items():
                    rank.unsent.append("1" if pid in sending else "0")
                read_s += time.monotonic() - began

    def _spaces(self) -> dict[int, int]:
        """Network namespace -> a rank in it."""
        spaces: dict[int, int] = {}
        for pid in self._ranks:
            with contextlib.suppress(OSError):
                spaces.setdefault(os.stat(f"/proc/{pid}/ns/net").st_ino, pid)
        return spaces

    def place(self, target: StackTarget) -> str:
        """The place of a rank's main thread now; "": it is not glanced at."""
        rank = self._ranks.get(target.pid)
        return rank.number(rank.line()) if rank else ""

    def add_stack(self, target: StackTarget, before: str) -> None:
        """Note where a rank was while its stack was read. before: `place` before that"""
        if rank := self._ranks.get(target.pid):
            # A dump that was refused has no place.
            rank.stack_places += [""] * (len(target.dumps) - len(rank.stack_places))
            rank.stack_places.append(before if self.place(target) == before else "")

    def look(self, began: float, deadline: float) -> None:
        """Read what the ranks have sent, and which ranks they wait for by their connections."""
        rows: dict[str, Any] = {}

        def sent(pid: int) -> dict[str, tuple[int, bool]]:
            return waits.sent_data() if _is_network_of(pid) else {}

        for answer in probe_each(sent, list(self._spaces().values()), deadline).values():
            rows.update({} if answer is HANGS else answer)
        for pid, rank in self._ranks.items():
            inodes = socket_inodes(pid, _MAX_SOCKETS)
            self._owner_by_inode.update(dict.fromkeys(inodes, pid))
            rank.sent.append(sum(rows[inode][0] for inode in inodes if inode in rows))
        calls: dict[tuple[int, int], waits.WaitCall] = {}
        answers = probe_each(lambda pid: self._ranks[pid].calls(), list(self._ranks), deadline)
        for pid, answer in answers.items():
            rank = self._ranks[pid]
            for text, row in [] if answer is HANGS else answer:
                number = text if len(text) == 1 else rank.number(text)
                if row and len(rank.ends) < _MAX_ENDS:
                    # `links` takes one call per thread, so each call gets a thread number.
                    call = calls[pid, -ord(number)] = waits.WaitCall(*row)
                    rank.add_call(number, call)
        links.observe([rank.target for rank in self._ranks.values()], calls, began, deadline)
        for rank in self._ranks.values():
            for name, end in rank.target.waits_for:
                if name.startswith("-"):
                    rank.ends[chr(int(name[1:]))][end] = None

    def finish(self) -> dict[str, Any]:
        """End; give each rank its glances, and return those of the node."""
        self._over.set()
        self._thread.join(2 * self._pause_s)
        seconds = round(time.monotonic() - self._began, 2)
        for rank in self._ranks.values():
            rank.target.witnesses["glances"] = rank.plain(seconds)
        return _node_row(self._first, _node_counters(self._ranks), seconds)


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
            parents = [path[: match.start()] for match in re.finditer("/", path)]
            for mount, cgroup in itertools.product(mounts, (path, *parents)):
                stats = contents(f"/sys/fs/cgroup/{mount}{cgroup}/cpu.stat")
                throttled = max([throttled, *(int(n) / units for n in words.findall(stats))])
    return throttled


def _rank_counters(pid: int, thread: int) -> dict[str, float]:
    words = contents(f"/proc/{pid}/task/{thread}/schedstat").split()
    cpu_s, queued_s = (int(word) / 1e9 for word in words[:2]) if len(words) == 3 else (0.0, 0.0)
    fields = contents(f"/proc/{pid}/stat").rpartition(")")[2].split()
    faults, throttled_s = int(fields[9]) if len(fields) > 9 else 0, _throttled_s(pid)
    times = {"cpu_s": cpu_s, "queued_s": queued_s, "throttled_s": throttled_s}
    return {**times, "faults": faults}


def _node_counters(ranks: Container[int]) -> tuple[dict[str, float], dict[Any, Any]]:
    """Counters of the node; CPU time and name of each process that is no rank's and not ours."""
    rows = [stat(contents(f"/proc/{pid}/stat")) for pid in pids()]
    parents = {row.pid: row.parent for row in rows if row}

    def is_ours(pid: int) -> bool:
        for _ in range(32):
            if pid in ranks or pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    other_processes = {
        (row.pid, row.start_s): (row.cpu_s, row.name)
        for row in rows if row and not is_ours(row.pid)
    }  # fmt: skip
    clocks = [0.0]
    for number in range(min(os.cpu_count() or 1, 256)):
        path = f"/sys/devices/system/cpu/cpu{number}/cpufreq"
        clock = first_number(f"{path}/scaling_cur_freq")
        clocks += [(clock or 0) / (first_number(f"{path}/cpuinfo_max_freq") or 1)]
    ticks = [int(word) for word in contents("/proc/stat", 4096).partition("\n")[0].split()[1:9]]
    stalled = re.search(r"^some .*total=(\d+)", contents("/proc/pressure/memory"), re.M)
    tcp = re.findall(r"^Tcp:(.*)", contents("/proc/net/snmp"), re.M)
    values = dict(zip(*map(str.split, tcp))) if len(tcp) == 2 else {}
    return {
        "clock": sum(clocks) / max(1, len(clocks) - 1),
        "ticks": sum(ticks),
        "stolen": ticks[7] if len(ticks) == 8 else 0,
        "stalled_s": int(stalled[1]) / 1e6 if stalled else 0,
        "again": int(values.get("RetransSegs", 0)),
        "sent": int(values.get("OutSegs", 0)),
    }, other_processes


def _node_row(before: Any, after: Any, seconds: float) -> dict[str, Any]:
    (old, old_processes), (new, new_processes) = before, after
    delta = {name: max(0.0, new[name] - old[name]) for name in new}
    used = [
        ((cpu_s - old_processes.get(key, (cpu_s,))[0]) / seconds, f"{name} (pid {key[0]})")
        for key, (cpu_s, name) in new_processes.items()
    ]
    cpus, name = max(used, default=(0.0, ""))
    return {
        "seconds": seconds,
        "steal": delta["stolen"] / max(1, delta["ticks"]),
        "frequency": (old["clock"] + new["clock"]) / 2,
        "memory_stall": delta["stalled_s"] / seconds,
        "retransmits": delta["again"] / max(1, delta["sent"]),
        "stranger": name if cpus >= _MIN_CPUS else "",
        "stranger_cpus": max(0.0, cpus),
    }
