"""The system calls of a process, counted by strace: which, on what, and how often.

strace stops a thread twice in each call, so only threads that run are traced, for a few thousand
calls at most. `timeout` ends strace even if no process of nodeready is left to do so, and the
kernel frees the threads of a tracer that has ended (ptrace(2)): none is left stopped or traced.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nodeready.agent.cores import gdb
from nodeready.agent.runtime import ProcessSupervisor, changeable_by_root_only
from nodeready.agent.stacks import waits
from nodeready.agent.stacks.processes import HANGS, contents, probe_each
from nodeready.core.wire import Count, Line

#: Calls of a process after which strace stops: fractions of a second of a process that spins.
MAX_CALLS = 5000
#: Seconds beyond the time of the count: strace starts, and the ends of connections are looked up.
MARGIN_S = 5.0
#: Maximum threads that are traced, different calls, and processes that may be peers.
_MAX_THREADS, _MAX_KEYS, _MAX_NEAR = 16, 64, 256
#: Seconds in which a thread shows that it runs; seconds for the ends of connections.
_LOOK_S, _ENDS_S = 0.3, 1.0
_MAX_LINE, _MEMORY_BYTES = 1 << 16, 1 << 30

_CALL = re.compile(r"(?:\[pid +(\d+)\] )?(\w+)\((.*)")
_RESUMED = re.compile(r"(?:\[pid +(\d+)\] )?<\.\.\. \w+ resumed>.*")
_ERROR = re.compile(r".*\) += -1 (E\w+)")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)(?:"|\\?$)')
# A descriptor as `strace -y` prints it: 5</data/shard>, fd=3<socket:[14655]>
_DESCRIPTOR = re.compile(r"\b(\d+)<((?:[^<>\\]|\\.)*)>")
_WRITES = re.compile("p?writev?|send|sendto|sendmsg|splice|tee")


@dataclass(frozen=True)
class CallCount:
    """How often a process has made a call on an object."""

    VERSIONED: ClassVar = True

    call: Line  # the system call, and its error: ``recvfrom EAGAIN``; "": it has made none
    object: Line  # the file, peer, pipe; "": the call names none
    count: Count
    # the peer of a connection: ``pid 55``, or the peer's address and the own address
    peer: Line = ""


#: Call, its error, its descriptors with their links, its path.
_Key = tuple[str, str, tuple[tuple[int, str], ...], str]


class CallCounter:
    """Counts the calls in strace's output; what a call reads or writes is not kept."""

    def __init__(self) -> None:
        self.counts: Counter[_Key] = Counter()
        self.total = 0
        self.error = ""  # the first message of strace itself
        self._partial = b""
        self._unfinished: dict[str, _Key] = {}  # thread -> the call that it is in

    def feed(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[:_MAX_LINE]
        for line in lines:
            self._read(line.decode("utf-8", "replace"))

    def _read(self, line: str) -> None:
        resumed, entered = _RESUMED.fullmatch(line), _CALL.fullmatch(line)
        if resumed and (key := self._unfinished.pop(resumed[1] or "", None)):
            self._add(key, line)
        elif entered:
            thread, call, arguments = entered[1] or "", entered[2], entered[3]
            named = _DESCRIPTOR.findall(_TEXT.sub('""', arguments))
            links = tuple((int(number[:9]), link) for number, link in dict.fromkeys(named))
            path = _TEXT.search(arguments) if not links else None
            key = call, "", links[:4], path[1] if path else ""
            if line.endswith("<unfinished ...>"):
                self._unfinished[thread] = key
            else:
                self._add(key, line)
        elif "strace: " in line[:200] and not self.error:
            self.error = line.partition("strace: ")[2][:200]

    def _add(self, key: _Key, line: str) -> None:
        error = _ERROR.match(line)
        key = key[0], error[1] if error else "", *key[2:]
        if key not in self.counts and len(self.counts) >= _MAX_KEYS:
            key = "further calls", "", (), ""
        self.counts[key] += 1
        self.total += 1

    def finish(self) -> None:
        for key in self._unfinished.values():
            self._add(key, "")


def _running_threads(pid: int) -> list[int]:
    """The threads that run now and then, those that run longest first."""

    def look() -> dict[str, int]:
        threads = os.listdir(f"/proc/{pid}/task")
        texts = {thread: contents(f"/proc/{pid}/task/{thread}/schedstat") for thread in threads}
        return {thread: int(text.split()[0]) for thread, text in texts.items() if text}

    with contextlib.suppress(OSError, ValueError, IndexError):
        before = look()
        time.sleep(_LOOK_S)
        ran = {int(thread): ns - before.get(thread, 0) for thread, ns in look().items()}
        return sorted(filter(ran.get, ran), key=ran.__getitem__, reverse=True)[:_MAX_THREADS]
    return []


def count(
    supervisor: ProcessSupervisor, pid: int, seconds: float, near: Sequence[int]
) -> tuple[list[CallCount], float, str]:
    """The calls of a process, the seconds in which it made them, and why there are none. near:
    processes that may hold the peer ends of its connections and pipes
    """
    strace, timeout = shutil.which("strace") or "", shutil.which("timeout") or ""
    if not (strace and timeout and changeable_by_root_only(strace)):
        return [], 0.0, "strace is not installed (nodeready deploy installs it)"
    threads = _running_threads(pid)
    if not threads:
        return [], 0.0, f"none of its threads has run for {_LOOK_S} s: it waits"
    counter, times = CallCounter(), [0.0, 0.0]

    def read(process: subprocess.Popen[bytes], stream: int, data: bytes) -> None:
        times[:] = times[0] or time.monotonic(), time.monotonic()
        if counter.total < MAX_CALLS:
            counter.feed(data)
            if counter.total >= MAX_CALLS:
                process.send_signal(signal.SIGINT)

    # -s 4: of a set of descriptors the first four; of data as many bytes, which are not kept.
    argv = [strace, "-q", "-y", "-s", "4", "-e", "signal=none"]
    for thread in threads:
        argv += ["-p", str(thread)]
    try:
        argv = gdb.memory_reader_command(pid, _MEMORY_BYTES, argv)
        # SIGINT: strace lets go of each thread before it ends.
        argv = [timeout, "-s", "INT", "-k", "2", f"{seconds:g}", *argv]
        supervisor.run(argv, seconds + MARGIN_S, read, env=gdb.environment())
    except (OSError, KeyError, ValueError, IndexError) as problem:
        return [], 0.0, f"strace: {getattr(problem, 'strerror', '') or 'it has ended'}"
    counter.finish()
    if not counter.total and counter.error:
        refused = "not permitted" in counter.error
        fix = "; `nodeready deploy --only ptrace`, or --sudo" if refused else ""
        return [], 0.0, f"strace: {counter.error}{fix}"
    if not counter.total:
        return [CallCount("", "", 0)], seconds, ""
    taken_s = times[1] - times[0] if counter.total >= MAX_CALLS else seconds
    return _rows(pid, counter.counts, near), max(taken_s, 0.001), ""


def _socket_owners(
    pids: Sequence[int], pairs: Iterable[tuple[str, str]], deadline: float
) -> dict[tuple[str, str], int]:
    """(Own address, peer's) of a connection of the first process -> the process at its end."""
    unix_peers = waits.unix_peers()
    other_ends = {
        (peer or unix_peers.get(address, ""), address): (address, peer) for address, peer in pairs
    }

    def probe(pid: int) -> list[tuple[str, str]]:
        with contextlib.suppress(OSError):
            # Another network namespace may have equal addresses.
            if os.path.samefile(f"/proc/{pid}/ns/net", f"/proc/{pids[0]}/ns/net"):
                return [pair for pair in waits.sockets(pid, unix_peers) if pair in other_ends]
        return []

    owners: dict[tuple[str, str], int] = {}
    for pid, ends in probe_each(probe, pids, deadline).items():
        for pair in ends if ends is not HANGS else ():
            owners.setdefault(other_ends[pair[0], pair[1]], pid)
    return owners


def _rows(pid: int, counts: Counter[_Key], near: Sequence[int]) -> list[CallCount]:
    """The calls with their objects, the most frequent first."""
    deadline = time.monotonic() + _ENDS_S
    keys = [key for key, _ in counts.most_common()]
    verbs = ["write" if _WRITES.fullmatch(key[0]) else "read" for key in keys]
    answers = probe_each(
        lambda at: waits.probe_links(pid, verbs[at], keys[at][2]), range(len(keys)), deadline
    )
    calls = {at: waits.WaitCall(*row) for at, row in answers.items() if row is not HANGS}
    # A fork's answer has lists.
    sockets = {
        at: [(address, peer) for address, peer in call.sockets] for at, call in calls.items()
    }
    inodes = [inode for call in calls.values() for _, inode, _ in call.pipes]
    pipe_ends = waits.find_pipe_ends(inodes, [pid, *near[:_MAX_NEAR]], deadline)
    pairs = {pair for row in sockets.values() for pair in row}
    owners = _socket_owners([pid, *near[:_MAX_NEAR]], pairs, deadline) if pairs else {}
    rows = []
    for at, (call, error, _, path) in enumerate(keys):
        wait = calls.get(at, waits.WaitCall(""))
        names, peer = [waits.object_names(pid, wait, pipe_ends) or path], ""
        for pair in sockets.get(at, ()):
            if owner := owners.get(pair):
                names.append("itself" if owner == pid else f"pid {waits.process_title(owner)}")
            # Only for a single peer is it known which rank the call concerns.
            if len(wait.sockets) == 1 and owner != pid:
                peer = f"pid {owner}" if owner else " ".join(reversed(pair)).strip()
        text = ", ".join(dict.fromkeys(filter(None, names)))
        rows.append(CallCount(f"{call} {error}".strip(), text[:400], counts[keys[at]], peer))
    return rows
