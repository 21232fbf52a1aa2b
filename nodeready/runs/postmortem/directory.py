"""The evidence on a dead job in a directory (``--from``): logs, and what was saved beside them.

``NODE/…`` are the files of a node; ``kernel/NODE.txt`` and ``NODE.kernel.txt`` its kernel's log;
``sacct.txt`` the output of ``sacct --parsable2``, ``scontrol.txt`` of ``scontrol show job``;
``*.sh``, ``*.sbatch`` and ``*.slurm`` the batch script. All further files are logs, of any name;
``*.json`` may be error files of torchelastic. The directory of an incident has its logs in
``logs/``, each with its node and path in the first line, and environments of ranks in ``stacks/``.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from nodeready.agent import users_file
from nodeready.agent.log_lines import stamp, utc_calendar
from nodeready.agent.postmortem import END_BYTES, HEAD_BYTES, file_failures
from nodeready.agent.witnesses.kernel_log import message_of
from nodeready.core.text import counted
from nodeready.runs.incident import DOCUMENT
from nodeready.runs.postmortem.clocks import ClockStep, clock_step
from nodeready.runs.postmortem.evidence import JobEvidence, JobFile, NodeFault
from nodeready.runs.postmortem.slurm_records import job_step, parse_sacct, parse_scontrol, steps_of
from nodeready.runs.stacks.evidence import Evidence
from nodeready.runs.stacks.statements import RankPlace
from nodeready.runs.stacks.trace import TraceError, load
from nodeready.runs.stacks.witness_reader import judge_environments
from nodeready.subjects.environment_rules import EnvironmentFinding

#: Maximum files, and maximum bytes of all logs; bytes of memory that an event of a rank, or the
#: state of a rank's lines, takes (measured: 300 to 900).
_MAX_FILES, _MAX_BYTES, _EVENT_BYTES = 20_000, 512 << 20, 1024
#: Names of directories that are no nodes.
_NO_NODES = re.compile(
    r"(?i)kernel|logs?|errors?|stacks|cores|audit|out|output|attempt_\d+|\d+|run\w*"
)
_KERNEL = re.compile(
    r"(?:^|/)kernel/([\w.-]+?)(?:\.(?:txt|log))?$|(?:^|/)([\w.-]+?)\.kernel\.(?:txt|log)$"
)
#: Files that are no logs, and those that may have logs in them.
_NO_LOGS, _PACKED = (".npy", ".pt", ".pkl"), (".gz", ".xz", ".bz2", ".zst", ".tar", ".tgz", ".zip")
_SCRIPTS = (".sh", ".sbatch", ".slurm")
#: Seconds around the end of the logs in which the kernel's faults count.
_FAULT_S = 86400
#: The first line of an incident's log: ``gpu1:/var/log/train/rank_0.log (ranks 0)``.
_INCIDENT_HEAD = re.compile(r"([\w.-]+):(/\S+)(?: \(ranks? [\d,/-]+\))?$")
#: Before the text of a kernel's line: its time, the host and the word kernel.
_KERNEL_HEAD = re.compile(
    r"(?:<\d+>)?(?:\[[^\]]{1,40}\] ?|\w{3} +\d+ \d\d:\d\d:\d\d |\d{4}-\d\d-\d\dT\S+ )?"
    r"(?:[\w.-]+ kernel: )?(?:\[ *\d+\.\d+\] ?)?"
)


class NoEvidenceError(Exception):
    """The directory has no evidence: why, one line."""


def read_directory(path: Path, rank_pattern: str = "") -> JobEvidence:
    """The evidence in this directory, or in one file. Raises NoEvidenceError, OSError.

    Where a user's link leads to it, root reads it with the rights of that user.

    rank_pattern: as of `nodeready.agent.tail.TailConfig`
    """
    try:
        place = users_file.follow(users_file.ROOT, os.path.join(os.getcwd(), path))
    except FileNotFoundError:
        raise NoEvidenceError(f"{path}: does not exist") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NoEvidenceError(f"{error.filename or path}: {reason}") from None
    rights = None if place.owner is None else users_file.rights_of(place.owner)
    with users_file.with_rights(rights):
        return _read(path, place.path, rank_pattern)


def _read(path: Path, root: str, rank_pattern: str) -> JobEvidence:
    """As `read_directory`. root: the path without links"""
    evidence, room, read = JobEvidence(), _MAX_BYTES, 0
    names: Iterable[str] = _files(root, evidence.missing)
    if not os.path.isdir(root):
        root, name = os.path.split(root)
        names = [name]
    elif os.path.exists(f"{root}/{DOCUMENT}"):
        names = (name for name in names if name.startswith("logs/"))
        evidence.environment_findings = _findings(Path(root, "stacks"))
    for number, name in enumerate(names):
        if number >= _MAX_FILES or room <= 0:
            text = f"only {counted(len(evidence.files), 'file')} read: the rest is too much"
            evidence.missing["logs"] = text
            break
        full = f"{root}/{name}"
        try:
            handle, status = users_file.open_regular(full)
        except OSError as error:
            evidence.missing[name] = error.strerror or str(error)
            continue
        try:
            room -= min(status.st_size, HEAD_BYTES + END_BYTES)
            _add_file(evidence, handle, name, status, rank_pattern)
        finally:
            os.close(handle)
        for failures in (file.failures for file in evidence.files[read:]):
            ranks = sum(max(1, len(event.ranks)) for event in failures.events)
            room -= _EVENT_BYTES * (ranks + len(failures.streams))
        read = len(evidence.files)
    logs = len(evidence.files)
    if not (logs or evidence.steps or evidence.kernel):
        raise NoEvidenceError(f"{path}: no log in it")
    _drop_old_faults(evidence)
    nodes = {file.node for file in evidence.files if file.node}
    nodes_text = f" of {counted(len(nodes), 'node')}" if nodes else ""
    evidence.sources = {"logs": f"{counted(logs, 'file')}{nodes_text}", **evidence.sources}
    if not any(name.startswith("kernel") for name in evidence.sources):
        evidence.missing.setdefault("kernel's log", "none in the directory")
    return evidence


def _add_file(
    evidence: JobEvidence, handle: int, name: str, status: os.stat_result, rank_pattern: str
) -> None:
    """Add one open file. Raises OSError."""

    def text(start: int, size: int) -> str:
        return os.pread(handle, size, start).decode("utf-8", "replace")

    if match := _KERNEL.search(name):
        end = text(max(0, status.st_size - END_BYTES), END_BYTES)
        _add_kernel(evidence, match[1] or match[2], end, status.st_mtime)
    elif name.endswith(_SCRIPTS):
        evidence.add_script(name, text(0, HEAD_BYTES))
    elif os.path.basename(name) in ("sacct.txt", "scontrol.txt"):
        _add_slurm(evidence, name, text(0, END_BYTES))
    else:
        room = HEAD_BYTES + END_BYTES
        failures = file_failures(handle, name, room, utc_calendar, rank_pattern=rank_pattern)
        if failures is None:
            evidence.missing[name] = "is no text"
            return
        head = text(0, 4096).partition("\n")[0]
        origin = _INCIDENT_HEAD.match(head) if name.startswith("logs/") else None
        # A copy may have another time than its original.
        failures = replace(failures, mtime_s=0.0)
        evidence.files.append(JobFile(origin[1] if origin else _node(name), failures))


def _findings(stacks: Path) -> tuple[EnvironmentFinding, ...]:
    """What is wrong with the environment of the ranks of an incident, by its traces."""
    traces, places = Evidence(), []
    with contextlib.suppress(TraceError):
        for trace in load(stacks)[0]:
            traces.read(trace)
            places += [
                RankPlace(trace.node, process.pid, process.rank, process.local_rank)
                for process in trace.processes
            ]
    return judge_environments(traces, places)


def _files(root: str, missing: dict[str, str]) -> Iterator[str]:
    """The names of the files below the directory, sorted; links are not followed.

    missing: gets what cannot be read as a log
    """

    def unreadable(error: OSError) -> None:
        missing[os.path.relpath(error.filename, root)] = error.strerror or str(error)

    for directory, names, files in os.walk(root, onerror=unreadable):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            full = f"{directory}/{name}"
            if name.startswith(".") or name.endswith(_NO_LOGS):
                continue
            shown = os.path.relpath(full, root)
            kind = users_file.special_kind(os.lstat(full).st_mode)
            if kind or name.endswith(_PACKED):
                missing[shown] = f"is {kind or 'compressed'}"
            else:
                yield shown


def _node(name: str) -> str:
    """The node of a file: the first directory of its name."""
    first, slash, _ = name.partition("/")
    return first if slash and not _NO_NODES.fullmatch(first) else ""


def _add_kernel(evidence: JobEvidence, node: str, text: str, mtime_s: float) -> None:
    year, cgroup = time.gmtime(mtime_s).tm_year, ""
    for row in text.splitlines():
        words = _KERNEL_HEAD.sub("", row, count=1)
        if words.startswith("oom-kill:"):
            # Its cgroup may have the number of Slurm's task; the line of the kill follows.
            cgroup = words
        if (step_s := clock_step(words)) is not None:
            step = ClockStep(stamp(row, year, utc_calendar), step_s)
            evidence.clock_steps.setdefault(node, []).append(step)
        message = message_of(words, 0)
        if message is not None:
            moment = stamp(row, year, utc_calendar)
            text, cgroup = (f"{message.text} {cgroup}"[:600], "") if message.kind == "oom" else (
                message.text, cgroup
            )  # fmt: skip
            evidence.kernel.append(NodeFault(node, message.kind, moment, message.pid, text))
    evidence.sources["kernel's log"] = counted(len(evidence.kernel), "fault")


def _drop_old_faults(evidence: JobEvidence) -> None:
    """Leave out the kernel's faults that are not of the job's time, if its logs have times."""
    files = [file.failures for file in evidence.files]
    moments = [stream.last_s for file in files for stream in file.streams]
    moments += [event.time_s for file in files for event in file.events]
    end_s = max((moment for moment in moments if moment is not None), default=None)
    if end_s is not None and evidence.kernel:
        evidence.kernel = [
            fault for fault in evidence.kernel
            if fault.time_s is None or abs(fault.time_s - end_s) < _FAULT_S
        ]  # fmt: skip
        evidence.sources["kernel's log"] = counted(len(evidence.kernel), "fault")


def _add_slurm(evidence: JobEvidence, name: str, text: str) -> None:
    if os.path.basename(name) == "sacct.txt":
        steps = steps_of(parse_sacct(text))
        evidence.sources["sacct"] = counted(len(steps), "record")
    else:
        steps = [job_step(parse_scontrol(text))]
        evidence.sources["scontrol"] = f"the job is {steps[0].state}"
    evidence.steps += steps
