"""The witnesses beside the stacks (`nodeready.node.witnesses`), asked while the ranks go on.

Whatever a rank's user can have made is read in a fork (`processes.each`); tools run under the
`Supervisor`, each in a thread of ours with a limit of its own, so that the slowest of them takes
the time of the samples' interval and none of its own. A witness that fails or is late is absent,
with the reason, and costs nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from nodeready.node.runtime import ProcessSupervisor
from nodeready.node.stacks import processes
from nodeready.node.stacks.processes import HANGS
from nodeready.node.stacks.ranks import Target
from nodeready.node.users_file import held, with_rights
from nodeready.node.witnesses import devices, flight_recorder, logs, nccl_ras
from nodeready.subjects import wire

#: Seconds for the witnesses of all processes, and for each tool of the node.
_EACH_S, _TOOL_S = 3.0, 8.0
#: Seconds before the end of everything by which a tool has ended.
_SPARE_S = 1.5
#: Characters of one witness's answer as JSON, of one text in it, and of an error's.
_MOST, _MOST_TEXT, _MOST_ERROR = 128 << 10, 4000, 200
#: Processes of a node that are asked for a dump of their flight recorder.
_MOST_DUMPS = 64

Answer = dict[str, Any]


def _absent(why: str) -> Answer:
    return {"absent": why[:_MOST_ERROR]}


def _asked(observe: Callable[[], Any]) -> Answer:
    """A witness's answer as plain data that the node's own can hold."""
    try:
        found = _bounded(wire.plain(observe()))
    except Exception as problem:  # noqa: BLE001
        return _absent(f"{type(problem).__name__}: {_bounded(str(problem))}")
    if not isinstance(found, dict):
        return _absent("it gave no answer")
    if len(json.dumps(found)) > _MOST:
        return _absent("its answer is too large")
    return found


def _bounded(value: Any) -> Any:
    """The same with texts that JSON can hold, none of them too long."""
    if isinstance(value, str):
        return value[:_MOST_TEXT].encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_bounded(one) for one in value]
    if isinstance(value, dict):
        return {_bounded(key): _bounded(one) for key, one in value.items()}
    return value


class Witnesses:
    """One round of all witnesses of a node.

    targets: the ranks, which have been looked at once; strangers and the dead are not asked about
    ras:     ask NCCL's port also where asking is known to have crashed jobs
    dump:    have each rank write a dump of its flight recorder
    check:   look at what each rank has for whoever debugs it
    """

    def __init__(
        self,
        supervisor: ProcessSupervisor,
        targets: Sequence[Target],
        *,
        ras: bool,
        dump: bool,
        check: bool = False,
    ) -> None:
        self._supervisor, self._targets, self._ras, self._dump = supervisor, targets, ras, dump
        self._check = check
        self._tools: dict[str, tuple[Thread, float]] = {}
        self._found: dict[str, Answer] = {}
        self._before, self._began = self._counters(), time.monotonic()

    def _counters(self) -> Any:
        """What the ports have counted; None: that hangs, or fails."""
        until = min(self._supervisor.deadline, time.monotonic() + _EACH_S)
        found = processes.each(lambda _: _asked(devices.counters), [0], until).get(0)
        return None if found is HANGS else found

    @property
    def _live(self) -> list[Target]:
        return [one for one in self._targets if one.facts and not one.rank.stranger]

    def between(self) -> None:
        """Ask all but the ports, while the ranks go on: after the first sample."""
        live = self._live
        if not live:
            return
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        since_s = max(0.0, now - min(one.rank.process.start_s for one in live))
        limit_s = max(0.5, min(_TOOL_S, self._supervisor.left_s - _SPARE_S))
        pids = [one.pid for one in live]
        self._start(
            "gpus", lambda: devices.gpus(self._supervisor, pids, since_s, limit_s), limit_s
        )
        self._start("kernel", lambda: devices.kernel(self._supervisor, since_s, limit_s), limit_s)
        self._ask_ras(limit_s)
        if self._dump:
            self._ask_for_dumps(live)
        self._of_each("logs", lambda one: logs.observe(one.pid, one.facts[-1].uid))
        if self._check:
            self._of_each(
                "settings",
                lambda one: observe(
                    one.pid, one.facts[-1].uid, one.rank.identity.rank, _values(one)
                ),
            )
        if not self._dump:
            self._recordings()

    def _start(self, name: str, ask: Callable[[], Any], limit_s: float) -> None:
        self._found[name] = _absent(f"it gave no answer within {limit_s:.0f} s")

        def work() -> None:
            self._found[name] = _asked(ask)

        # One that never returns ends with us.
        thread = Thread(target=work, daemon=True)
        thread.start()
        self._tools[name] = thread, time.monotonic() + limit_s

    def _ask_ras(self, limit_s: float) -> None:
        """Ask NCCL's port on the node of the job's rank 0; of several jobs, the largest one's."""
        jobs: dict[tuple[str, str], list[Target]] = {}
        for one in self._live:
            who = one.rank.identity
            jobs.setdefault((who.owner, who.job), []).append(one)
        firsts = [job for job in jobs.values() if any(one.rank.identity.rank == 0 for one in job)]
        if not firsts:
            return
        job = max(firsts, key=len)
        asked = [(one.pid, one.facts[-1].uid, one.rank.identity.rank) for one in job]
        values = job[0].rank.process.environment or {}
        stacks = [one.dumps[-1].main or () for one in job if one.dumps]

        def ask() -> Any:
            making = any(
                nccl_ras.makes_communicator([(frame[0], frame[1]) for frame in stack])
                for stack in stacks
            )
            # What the ranks of other nodes do is not known here.
            known = True if making else None
            return nccl_ras.observe(
                self._supervisor, asked, values, self._ras, limit_s, initialising=known
            )

        self._start("nccl_ras", ask, limit_s)

    def _of_each(self, name: str, observe: Callable[[Target], Any]) -> None:
        """Ask a witness of each process, in a fork."""
        of = {one.pid: one for one in self._live}
        found = processes.each(
            lambda pid: _asked(lambda: observe(of[pid])),
            list(of),
            min(self._supervisor.deadline, time.monotonic() + _EACH_S),
            {pid: one.owner for pid, one in of.items()},
        )
        for pid, one in of.items():
            said = found.get(pid)
            if said is HANGS:
                said = _absent("it cannot be read: whoever tries waits")
            one.witnesses[name] = said or _absent("no time left")

    def _recordings(self) -> None:
        self._of_each("flight_recorder", _recording)

    def _ask_for_dumps(self, live: Sequence[Target]) -> None:
        """Have the ranks write their recorders; they go on meanwhile."""
        of = {one.pid: one for one in live[:_MOST_DUMPS]}

        def ask(pid: int) -> str:
            one, uid = of[pid], of[pid].facts[-1].uid
            return str(
                flight_recorder.ask_for_dump(pid, uid, one.rank.identity.rank, _values(one))
            )

        until = min(self._supervisor.deadline, time.monotonic() + _EACH_S)
        said = processes.each(ask, list(of), until, {pid: one.owner for pid, one in of.items()})
        for pid, one in of.items():
            why = said.get(pid, "no time left")
            if why is HANGS:
                why = "whoever asks for it waits"
            one.add_note(
                f"no dump of its flight recorder: {str(why)[:_MOST_ERROR]}" if why else ""
            )

    def end(self) -> dict[str, Answer]:
        """After the last sample: the ports again, and what has been found of the node."""
        after = self._counters()
        seconds = time.monotonic() - self._began
        before = self._before
        if before is None or after is None or "absent" in before or "absent" in after:
            why = (before or after or {}).get("absent", "its counters cannot be read")
            self._found["network"] = _absent(str(why))
        else:
            self._found["network"] = _asked(lambda: devices.network(before, after, seconds))
        if self._dump and self._live:
            self._recordings()
        last = self._supervisor.deadline - _SPARE_S / 2
        for thread, until in self._tools.values():
            thread.join(max(0.0, min(until, last) - time.monotonic()))
        return dict(self._found)


def _values(one: Target) -> Mapping[str, str]:
    return one.rank.process.environment or {}


def _recording(one: Target) -> flight_recorder.Recording:
    """What its flight recorder has left; of a PyTorch that has none, that."""
    uid = one.facts[-1].uid
    found = flight_recorder.observe(one.pid, uid, one.rank.identity.rank, _values(one))
    if found.absent.startswith(flight_recorder.NO_DUMP):
        with contextlib.suppress(OSError), with_rights(nccl_ras.rights(one.pid, uid)):
            version = _torch(one.pid, uid, list(_files(one.pid)))
            known = release(version)
            if known is not None and known < RECORDER:
                return flight_recorder.Recording(f"PyTorch {version} has none, 2.2 and newer have")
    return found


# --- PyTorch's versions: since when a variable has which name and default.
#
# Sources: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp of 2.2, 2.14 and
# 2.15; pytorch pull requests 152563 (names), 143446 (dumps) and 172843 (the same default of 2,000
# entries everywhere); NVIDIA/nvidia-resiliency-ext pull request 163.

#: The first version with a recorder; the first in which its variables are TORCH_FR_*; from when on
#: it is certainly on, and dumps on a timeout, without any variable.
RECORDER, RECORDER_RENAMED, RECORDER_ON = (2, 2), (2, 8), (2, 11)


def release(version: str) -> tuple[int, int] | None:
    """Major and minor number of ``2.15.0+cu132``; None: not known."""
    words = version.split(".")[:2]
    if len(words) == 2 and all(word.isdecimal() and len(word) < 5 for word in words):
        return int(words[0]), int(words[1])
    return None


def buffer_variable(torch: tuple[int, int] | None) -> str:
    """The name of the variable that has the recorder's size: the old one where nobody knows."""
    new = torch is not None and torch >= RECORDER_RENAMED
    return "TORCH_FR_BUFFER_SIZE" if new else "TORCH_NCCL_TRACE_BUFFER_SIZE"


# --- What one process has.

#: Variables that are told; no other leaves the node.
VARIABLES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "NCCL_RAS_ENABLE",
    "NCCL_DEBUG",
    "PYTHONFAULTHANDLER",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
)
#: Characters of a value that are told.
_MOST_VALUE = 200


@dataclass(frozen=True)
class Settings:
    """One process.

    torch:       its version; "": not loaded, or not known
    nccl:        its version; "": not known; None: not loaded
    cuda:        it has loaded the driver of NVIDIA's GPUs
    core_bytes:  its soft limit of a core; -1: none; None: not known
    core_place:  what the kernel does with a core (kernel.core_pattern)
    core_wrong:  why a core would not be written there; "": nothing is known against it
    dump_place:  where its flight recorder writes, without the rank; "": its rank is not known
    dump_wrong:  why it cannot write there; "": it can
    variables:   of VARIABLES that it has, (name, value)
    """

    torch: str = ""
    nccl: str | None = None
    cuda: bool = False
    core_bytes: int | None = None
    core_place: str = ""
    core_wrong: str = ""
    dump_place: str = ""
    dump_wrong: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def observe(pid: int, uid: int, rank: int | None, environment: Mapping[str, str]) -> Settings:
    """The settings of a process. environment: of the process, `processes.KEYS` alone.

    For a fork (`nodeready.node.stacks.processes.each`): a file system may never answer.
    """
    pattern = processes.contents("/proc/sys/kernel/core_pattern").strip()
    soft = _core_limit(processes.contents(f"/proc/{pid}/limits"))
    torch, nccl, cuda, place, wrong, core = "", None, False, "", "", ""
    with contextlib.suppress(OSError), with_rights(nccl_ras.rights(pid, uid)):
        maps = list(_files(pid))
        torch, nccl = _torch(pid, uid, maps), nccl_ras.library([pid], uid)
        cuda = any(re.search(r"/libcuda\.so(\.|$)", path) for path in maps)
        if rank is not None:
            place = flight_recorder.places(uid, rank, environment)[0].removesuffix(str(rank))
            given = place in environment.values()
            wrong = _unwritable(pid, uid, os.path.dirname(place) or ".", may_make=not given)
        core = _core_wrong(pid, uid, pattern)
    told = ((name, environment[name][:_MOST_VALUE]) for name in VARIABLES if name in environment)
    return Settings(
        torch,
        nccl,
        cuda,
        soft,
        pattern[:_MOST_VALUE],
        core,
        place[:_MOST_VALUE],
        wrong,
        tuple(told),
    )


def _files(pid: int) -> Iterator[str]:
    """The files that a process has mapped. Raises OSError."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for row in file.read(16 << 20).splitlines():
            words = row.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/"):
                yield words[5]


_TORCH = re.compile(r"(/.*/torch)/(?:_C\.[^/]*\.so|lib/libtorch[^/]*\.so[^/]*)$")
_VERSION = re.compile(r"^__version__ *= *['\"]([0-9][0-9A-Za-z.+]{0,40})['\"]", re.M)


def _torch(pid: int, uid: int, maps: list[str]) -> str:
    """The version of PyTorch, by the file that it keeps it in (torch/version.py)."""
    found = dict.fromkeys(match[1] for path in maps if (match := _TORCH.search(path)))
    for directory in found:
        with (
            contextlib.suppress(OSError),
            held(pid, uid, f"{directory}/version.py") as (file, known),
        ):
            if stat.S_ISREG(known.st_mode):
                match = _VERSION.search(processes.contents(f"/proc/self/fd/{file}", 4096))
                if match:
                    return match[1]
    return ""


def _core_limit(text: str) -> int | None:
    """The soft limit of a core in /proc/PID/limits (proc(5))."""
    row = re.search(r"^Max core file size +(\S+) ", text, re.M)
    if row is None:
        return None
    return -1 if row[1] == "unlimited" else int(row[1]) if row[1].isdecimal() else None


def _core_wrong(pid: int, uid: int, pattern: str) -> str:
    """Why a core would not land where the pattern sends it (core(5))."""
    if not pattern:
        return "kernel.core_pattern is empty"
    if pattern.startswith("|"):
        program = pattern[1:].split()[:1]
        if not program or not os.access(program[0], os.X_OK, effective_ids=True):
            return f"there is no program {' '.join(program)}"[:_MOST_VALUE]
        return f"{program[0]} drops it" if program[0].endswith("/false") else ""
    directory = os.path.dirname(pattern)
    if "%" in directory:
        return ""
    return _unwritable(pid, uid, directory or ".", may_make=False)


def _unwritable(pid: int, uid: int, directory: str, *, may_make: bool) -> str:
    """Why this process cannot write into a directory; "": it can. With its user's rights.

    may_make: whoever writes there makes the directory where it is missing
    """
    at = directory
    while True:
        try:
            with held(pid, uid, at) as (number, known):
                if not stat.S_ISDIR(known.st_mode):
                    break
                path = f"/proc/self/fd/{number}"
                if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                    return f"its user cannot write into {at}"[:_MOST_VALUE]
                return ""
        except OSError:
            if not may_make or at in ("/", "", "."):
                break
            at = os.path.dirname(at)
    return f"there is no directory {at}"[:_MOST_VALUE]
