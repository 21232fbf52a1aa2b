"""Ask the witnesses (`nodeready.agent.witnesses`) while the ranks run.

A file that a rank's user may have made is read in a fork (`processes.probe_each`). Tools run under
the `ProcessSupervisor`, each in its own thread with its own limit, so that they cost no more time
than the interval between the samples. A witness that fails or is late is absent, with the reason,
and delays no other.

`read_settings` reads the settings that decide whether a rank can be debugged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import processes
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.processes import HANGS
from nodeready.agent.users_file import held_path, rights_of_job, with_rights
from nodeready.agent.witnesses import (
    environment,
    flight_recorder,
    gpus,
    kernel_log,
    logs,
    nccl_ras,
    ports,
    progress,
    software,
)
from nodeready.core import wire
from nodeready.subjects.environment_table import EnvironmentFacts

#: Seconds for one witness to read all processes, and for each tool of the node.
_PROCESSES_S, _TOOL_S = 3.0, 8.0
#: Seconds before the deadline of the run by which a tool has ended.
_SPARE_S = 1.5
#: Maximum characters of one witness's answer as JSON, of a text in it, and of an error.
_MAX_ANSWER, _MAX_TEXT, _MAX_ERROR = 128 << 10, 4000, 200
#: Maximum processes of a node that are asked for a dump of their flight recorder.
_MAX_DUMPS = 64

Answer = dict[str, Any]


def _absent(reason: str) -> Answer:
    return {"absent": reason[:_MAX_ERROR]}


def _answer_of(observe: Callable[[], Any]) -> Answer:
    """A witness's answer as plain data that fits into the node's answer."""
    try:
        answer = _bounded(wire.plain(observe()))
    except Exception as problem:  # noqa: BLE001
        return _absent(f"{type(problem).__name__}: {_bounded(str(problem))}")
    if not isinstance(answer, dict):
        return _absent("it gave no answer")
    if len(json.dumps(answer)) > _MAX_ANSWER:
        return _absent("its answer is too large")
    return answer


def _bounded(value: Any) -> Any:
    """The value with each text cut to `_MAX_TEXT` and encodable as JSON."""
    if isinstance(value, str):
        return value[:_MAX_TEXT].encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    if isinstance(value, dict):
        return {_bounded(key): _bounded(item) for key, item in value.items()}
    return value


class Witnesses:
    """One round of all witnesses of a node. targets: after their first sample; strangers and ended
    processes are left out. ras: ask NCCL's port also where that has crashed jobs. dump: have each
    rank write its flight recorder. check: read the settings for debugging
    """

    def __init__(
        self, supervisor: ProcessSupervisor, targets: Sequence[StackTarget], *, ras: bool,
        dump: bool, check: bool = False,
    ) -> None:  # fmt: skip
        self._supervisor, self._targets = supervisor, targets
        self._ras, self._dump, self._check = ras, dump, check
        # By witness of the node: its thread and deadline, and its answer.
        self._tools: dict[str, tuple[Thread, float]] = {}
        self._answers: dict[str, Answer] = {}
        # The counters of the ports before the samples, and when they were read.
        self._first_counters, self._first_read_s = self._counters(), time.monotonic()
        self._first_counts: dict[object, Any] = {}

    @property
    def _processes_deadline(self) -> float:
        return min(self._supervisor.deadline, time.monotonic() + _PROCESSES_S)

    def _counters(self) -> Any:
        """The counters of the ports; None: reading them hangs."""
        counters = processes.probe_each(
            lambda _: _answer_of(ports.counters), [0], self._processes_deadline
        ).get(0)
        return None if counters is HANGS else counters

    @property
    def _live(self) -> list[StackTarget]:
        return [target for target in self._targets if target.facts and not target.rank.stranger]

    def ask(self) -> None:
        """Ask all witnesses but the ports, after the first sample, while the ranks run."""
        live = self._live
        if not live:
            return
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        since_s = max(0.0, now_s - min(target.rank.process.start_s for target in live))
        limit_s = max(0.5, min(_TOOL_S, self._supervisor.left_s - _SPARE_S))
        pids = [target.pid for target in live]
        times, supervisor = (since_s, limit_s), self._supervisor
        self._start("gpus", lambda: gpus.witness_gpus(supervisor, pids, *times), limit_s)
        self._start("kernel", lambda: kernel_log.witness_log(supervisor, *times), limit_s)
        self._ask_environment(limit_s)
        self._ask_ras(limit_s)
        if self._dump:
            self._ask_for_dumps()
        self._ask_each("logs", _rank_log)
        self._first_counts = self._counters_of_logs()
        if self._check:
            self._ask_each("settings", lambda target: read_settings(*_rank_values(target)))
        if not self._dump:
            self._ask_each("flight_recorder", _recording)

    def _ask_environment(self, limit_s: float) -> None:
        """Ask for the variables of each rank, and for the facts that decide about them."""
        target_by_pid = {target.pid: target for target in self._live}
        owners = {pid: target.owner for pid, target in target_by_pid.items()}
        pids = processes.by_owner(target_by_pid, owners)
        network = environment.network_pid(pids)
        masters: dict[tuple[str, str], list[int]] = {}
        for pid in pids:
            values = _values(target_by_pid[pid])
            if values.get("MASTER_ADDR"):
                key = values["MASTER_ADDR"], values.get("MASTER_PORT", "")
                masters.setdefault(key, []).append(pid)
        deadline = self._processes_deadline
        first = target_by_pid[pids[0]]

        def observe() -> EnvironmentFacts:
            facts = environment.observe_node(network, masters, deadline)
            return replace(facts, **_software(first, deadline))

        self._start("environment", observe, limit_s)
        self._ask_each("variables", lambda target: environment.observe_rank(target.pid, network))

    def _start(self, name: str, ask: Callable[[], Any], limit_s: float) -> None:
        self._answers[name] = _absent(f"it gave no answer within {limit_s:.0f} s")

        def work() -> None:
            self._answers[name] = _answer_of(ask)

        # A thread that never returns ends with this program.
        thread = Thread(target=work, daemon=True)
        thread.start()
        self._tools[name] = thread, time.monotonic() + limit_s

    def _ask_ras(self, limit_s: float) -> None:
        """Ask NCCL's port on the node of the job's rank 0; of several jobs, the largest."""
        jobs: dict[tuple[str, str], list[StackTarget]] = {}
        for target in self._live:
            identity = target.rank.identity
            jobs.setdefault((identity.owner, identity.job), []).append(target)
        jobs_with_rank_0 = [
            job for job in jobs.values() if any(t.rank.identity.rank == 0 for t in job)
        ]
        if not jobs_with_rank_0:
            return
        job = max(jobs_with_rank_0, key=len)
        processes_of_job = [_rank_values(target)[:3] for target in job]
        stacks = [target.dumps[-1].main or () for target in job if target.dumps]

        def ask() -> Any:
            calls = ([(function, file) for function, file, _ in stack] for stack in stacks)
            return nccl_ras.observe(
                self._supervisor, processes_of_job, _values(job[0]), self._ras, limit_s,
                makes_communicator=any(map(nccl_ras.makes_communicator, calls)),
            )  # fmt: skip

        self._start("nccl_ras", ask, limit_s)

    def _probe(
        self, targets: Sequence[StackTarget], probe: Callable[[StackTarget], Any]
    ) -> Iterator[tuple[StackTarget, Any]]:
        """Each target with the result of its probe in a fork; HANGS, or None: no time was left."""
        target_by_pid = {target.pid: target for target in targets}
        results = processes.probe_each(
            lambda pid: probe(target_by_pid[pid]),
            list(target_by_pid),
            self._processes_deadline,
            {pid: target.owner for pid, target in target_by_pid.items()},
        )
        return ((target, results.get(pid)) for pid, target in target_by_pid.items())

    def _ask_each(self, name: str, observe: Callable[[StackTarget], Any]) -> None:
        answers = self._probe(self._live, lambda target: _answer_of(lambda: observe(target)))
        for target, answer in answers:
            if answer is HANGS:
                target.witnesses[name] = _absent("it cannot be read: reading it hangs")
            else:
                target.witnesses[name] = answer or _absent("no time left")

    def _counters_of_logs(self) -> dict[object, Any]:
        """The counters of progress in each log; many ranks may write one."""
        writers = {_log(target): target for target in self._live}

        def observe(target: StackTarget) -> dict[str, list[float]]:
            has_log = _log(target) != target.pid
            return progress.observe(target.pid, target.facts[-1].uid, has_log=has_log)

        answers = self._probe(list(writers.values()), observe)
        return {_log(target): row for target, row in answers if isinstance(row, dict)}

    def _ask_for_dumps(self) -> None:
        """Have the ranks write their flight recorders; the ranks run meanwhile."""
        ask = flight_recorder.ask_for_dump
        errors = self._probe(self._live[:_MAX_DUMPS], lambda target: ask(*_rank_values(target)))
        for target, error in errors:
            reason = "asking for it hangs" if error is HANGS else error
            reason = "no time left" if reason is None else reason[:_MAX_ERROR]
            target.add_note(f"no dump of its flight recorder: {reason}" if reason else "")

    def finish(self) -> dict[str, Answer]:
        """Read the ports again, after the last sample; returns the answers about the node."""
        after = self._counters()
        seconds = time.monotonic() - self._first_read_s
        before = self._first_counters
        if before is None or after is None or "absent" in before or "absent" in after:
            reason = (before or after or {}).get("absent", "its counters cannot be read")
            self._answers["network"] = _absent(str(reason))
        else:
            self._answers["network"] = _answer_of(lambda: ports.network(before, after, seconds))
        if self._dump:
            self._ask_each("flight_recorder", _recording)
        looks = self._first_counts, self._counters_of_logs()
        for target in self._live:
            before, after = (look.get(_log(target), {}) for look in looks)
            target.work = progress.difference(before, after) or target.work
        last_deadline = self._supervisor.deadline - _SPARE_S / 2
        for thread, deadline in self._tools.values():
            thread.join(max(0.0, min(deadline, last_deadline) - time.monotonic()))
        return dict(self._answers)


def _values(target: StackTarget) -> Mapping[str, str]:
    return target.rank.process.environment or {}


def _log(target: StackTarget) -> object:
    """The file to which its output goes; the pid: not known."""
    return target.witnesses.get("logs", {}).get("path") or target.pid


def _rank_log(target: StackTarget) -> logs.RankLog:
    identity = target.rank.identity
    return logs.observe(target.pid, target.facts[-1].uid, identity.rank, identity.local_rank)


def _rank_values(target: StackTarget) -> tuple[int, int, int | None, Mapping[str, str]]:
    """Pid, uid, rank and variables of a target, as the witnesses of a rank take them."""
    return target.pid, target.facts[-1].uid, target.rank.identity.rank, _values(target)


def _software(target: StackTarget, deadline: float) -> dict[str, Any]:
    """The fields of the facts that tell a rank's software; {}: not known."""
    pid, uid, _, _ = _rank_values(target)
    observe = software.observe
    answers = processes.probe_each(lambda pid: observe(pid, uid)._asdict(), [pid], deadline)
    answer: Any = answers.get(pid, HANGS)
    return {} if answer is HANGS else answer


def _recording(target: StackTarget) -> flight_recorder.Recording:
    """The dump of a rank's flight recorder, or why it is missing (a PyTorch without one)."""
    pid, uid, _, _ = _rank_values(target)
    recording = flight_recorder.observe(*_rank_values(target))
    if recording.absent.startswith(flight_recorder.NO_DUMP):
        with contextlib.suppress(OSError), with_rights(rights_of_job(pid, uid)):
            maps = [path for path, _ in software.mapped_files(pid)]
            version = software.torch_version(pid, uid, maps)
            numbers = release(version)
            if numbers is not None and numbers < RECORDER:
                return flight_recorder.Recording(f"PyTorch {version} has none, 2.2 and newer have")
    return recording


# --- PyTorch's versions: names and defaults of the variables.
#
# Sources: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp of 2.2, 2.14 and
# 2.15; pytorch pull requests 152563 (names), 143446 (dumps) and 172843 (the same default of 2,000
# entries everywhere); NVIDIA/nvidia-resiliency-ext pull request 163.

#: The first version with a recorder; the first in which its variables are TORCH_FR_*; the first in
#: which it is on and dumps on a timeout by default.
RECORDER, RECORDER_RENAMED, RECORDER_ON = (2, 2), (2, 8), (2, 11)


def release(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version; None: not known.

    >>> release("2.15.0+cu132")
    (2, 15)
    """
    words = version.split(".")[:2]
    if len(words) == 2 and all(word.isdecimal() and len(word) < 5 for word in words):
        return int(words[0]), int(words[1])
    return None


def buffer_variable(torch: tuple[int, int] | None) -> str:
    """The variable with the recorder's size; its old name if the version is not known."""
    is_renamed = torch is not None and torch >= RECORDER_RENAMED
    return "TORCH_FR_BUFFER_SIZE" if is_renamed else "TORCH_NCCL_TRACE_BUFFER_SIZE"


# --- The settings of one process.

#: Variables that are reported; no other leaves the node.
VARIABLES = (
    "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_RAS_ENABLE", "NCCL_DEBUG", "PYTHONFAULTHANDLER",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
)  # fmt: skip
#: Maximum characters of a value that is reported.
_MAX_VALUE = 200


@dataclass(frozen=True)
class Settings:
    """The settings that decide whether one process can be debugged."""

    torch: str = ""  # version of PyTorch; "": not loaded, or not known
    nccl: str | None = None  # version of NCCL; "": not known; None: not loaded
    cuda: bool = False  # it has loaded the driver of NVIDIA's GPUs
    core_bytes: int | None = None  # its soft limit of a core; -1: unlimited; None: not known
    core_place: str = ""  # kernel.core_pattern
    core_wrong: str = ""  # why a core would not be written there; "": no obstacle is known
    # the path of its flight recorder's dump, without the rank; "": rank not known
    dump_place: str = ""
    dump_wrong: str = ""  # why it cannot write there; "": it can
    variables: tuple[tuple[str, str], ...] = ()  # (name, value) of its variables among VARIABLES


def read_settings(
    pid: int, uid: int, rank: int | None, environment: Mapping[str, str]
) -> Settings:
    """The settings of a process; for a fork. environment: its variables among `processes.KEYS`"""
    pattern = processes.contents("/proc/sys/kernel/core_pattern").strip()
    soft_limit = _core_limit(processes.contents(f"/proc/{pid}/limits"))
    torch, nccl, cuda, dump_place, dump_problem, core_problem = "", None, False, "", "", ""
    with contextlib.suppress(OSError), with_rights(rights_of_job(pid, uid)):
        maps = [path for path, _ in software.mapped_files(pid)]
        torch, nccl = software.torch_version(pid, uid, maps), software.library([pid], uid)
        cuda = any(re.search(r"/libcuda\.so(\.|$)", path) for path in maps)
        if rank is not None:
            dump_path = flight_recorder.dump_paths(uid, rank, environment)[0]
            dump_place = dump_path.removesuffix(str(rank))
            is_default = dump_place not in environment.values()
            directory = os.path.dirname(dump_place) or "."
            dump_problem = _write_problem(pid, uid, directory, creates_missing=is_default)
        core_problem = _core_problem(pid, uid, pattern)
    variables = ((name, environment[name][:_MAX_VALUE]) for name in VARIABLES
                 if name in environment)  # fmt: skip
    return Settings(
        torch, nccl, cuda, soft_limit, pattern[:_MAX_VALUE], core_problem,
        dump_place[:_MAX_VALUE], dump_problem, tuple(variables),
    )  # fmt: skip


def _core_limit(text: str) -> int | None:
    """The soft limit of a core in /proc/PID/limits (proc(5))."""
    row = re.search(r"^Max core file size +(\S+) ", text, re.M)
    if row is None:
        return None
    return -1 if row[1] == "unlimited" else int(row[1]) if row[1].isdecimal() else None


def _core_problem(pid: int, uid: int, pattern: str) -> str:
    """Why a core would not be written by this pattern (core(5)); "": no obstacle."""
    if not pattern:
        return "kernel.core_pattern is empty"
    if pattern.startswith("|"):
        program = pattern[1:].split()[:1]
        if not program or not os.access(program[0], os.X_OK, effective_ids=True):
            return f"there is no program {' '.join(program)}"[:_MAX_VALUE]
        return f"{program[0]} drops it" if program[0].endswith("/false") else ""
    directory = os.path.dirname(pattern)
    if "%" in directory:
        return ""
    return _write_problem(pid, uid, directory or ".", creates_missing=False)


def _write_problem(pid: int, uid: int, directory: str, *, creates_missing: bool) -> str:
    """Why a user cannot write into a directory; "": can. creates_missing: the writer makes it"""
    while True:
        try:
            with held_path(pid, uid, directory) as (number, status):
                if not stat.S_ISDIR(status.st_mode):
                    break
                path = f"/proc/self/fd/{number}"
                if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                    return f"its user cannot write into {directory}"[:_MAX_VALUE]
                return ""
        except OSError:
            if not creates_missing or directory in ("/", "", "."):
                break
            directory = os.path.dirname(directory)
    return f"there is no directory {directory}"[:_MAX_VALUE]
