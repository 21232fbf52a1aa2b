"""The evidence on a dead job in a directory (``--from``): logs, and what was saved beside them.

``NODE/…`` are the files of a node; ``kernel/NODE.txt``, ``NODE.kernel.txt``, ``dmesg``,
``messages`` and the like its kernel's log; the output of ``sacct``, ``scontrol show job`` and
``seff`` is known by its lines; ``*.sh``, ``*.sbatch`` and ``*.slurm`` are the batch script. All
further files are logs, of any name, also compressed;
``*.json`` may be error files of torchelastic. The directory of an incident has its logs in
``logs/``, each with its node and path in the first line, and environments of ranks in ``stacks/``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from nodeready.agent import users_file
from nodeready.agent.log_bytes import UnreadableLogError, read_bytes
from nodeready.agent.log_lines import utc_calendar
from nodeready.agent.log_ranks import named_ranks
from nodeready.agent.postmortem import END_BYTES, HEAD_BYTES, file_failures
from nodeready.core.text import counted
from nodeready.runs.incident import DOCUMENT
from nodeready.runs.postmortem.evidence import JobEvidence, JobFile
from nodeready.runs.postmortem.kernel_files import (
    KernelFile,
    clock_steps,
    faults,
    has_kernel_lines,
    is_certain,
    is_of_process,
    named_node,
    read_kernel_file,
)
from nodeready.runs.postmortem.slurm_records import may_be_record, read_records
from nodeready.runs.stacks.evidence import Evidence, RankPlace
from nodeready.runs.stacks.trace import TraceError
from nodeready.runs.stacks.trace import read_directory as read_traces
from nodeready.runs.stacks.witness_reader import judge_environments
from nodeready.subjects.environment_rules import EnvironmentFinding

#: Maximum files, and maximum bytes of all logs; bytes of memory that an event of a rank, or the
#: state of a rank's lines, takes (measured: 300 to 900).
_MAX_FILES, _MAX_BYTES, _EVENT_BYTES = 20_000, 512 << 20, 1024
#: Names of directories that are no nodes.
_NO_NODES = re.compile(
    r"(?i)kernel|dmesg|journal|var|tmp|logs?|errors?|stacks|cores|audit|out|output|attempt_\d+|\d+|run\w*"
)
#: Files that are no logs.
_NO_LOGS = (".npy", ".npz", ".pt", ".pth", ".pkl", ".safetensors")
#: What a name ends with, if the file is compressed.
_PACKED = re.compile(r"\.(?:gz|xz|bz2|zst)$")
_SCRIPTS = (".sh", ".sbatch", ".slurm")
#: Seconds around the end of the logs in which the kernel's faults count.
_FAULT_S = 86400
#: The first line of an incident's log: ``gpu1:/var/log/train/rank_0.log (ranks 0)``.
_INCIDENT_HEAD = re.compile(r"([\w.-]+):(/\S+)(?: \(ranks? [\d,/-]+\))?$")
#: Seconds for unpacking logs and for counting their lines: of one, and of all.
_READ_S, _ALL_READ_S = 10.0, 60.0
#: Maximum bytes of a record of Slurm that is known by its lines.
_RECORD_BYTES = 1 << 18
#: Files that are named where none can be read.
_NAMED = 20


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
    deadline, kernels = time.monotonic() + _ALL_READ_S, list[KernelFile]()
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
            evidence.missing[name] = _reason(error)
            continue
        try:
            room -= min(status.st_size, HEAD_BYTES + END_BYTES)
            limit_s = max(0.0, min(_READ_S, deadline - time.monotonic()))
            _add_file(
                *(evidence, kernels, handle, name, status),
                rank_pattern=rank_pattern,
                limit_s=limit_s,
            )
        except UnreadableLogError as problem:
            evidence.missing[name] = str(problem)
        finally:
            os.close(handle)
        for failures in (file.failures for file in evidence.files[read:]):
            ranks = sum(max(1, len(event.ranks)) for event in failures.events)
            room -= _EVENT_BYTES * (ranks + len(failures.streams))
        read = len(evidence.files)
    logs = len(evidence.files)
    if kernels:
        _add_faults(evidence, kernels)
    if not (logs or evidence.steps or kernels):
        if evidence.missing.get(path.name) and not path.is_dir():
            raise NoEvidenceError(f"{path}: {evidence.missing[path.name]}")
        reasons = [f"\n  {name}: {reason}" for name, reason in evidence.missing.items()]
        if len(reasons) > _NAMED:
            reasons[_NAMED:] = [f"\n  and {len(reasons) - _NAMED} more"]
        raise NoEvidenceError(f"{path}: no log in it{''.join(reasons)}")
    nodes = {file.node for file in evidence.files if file.node}
    nodes_text = f" of {counted(len(nodes), 'node')}" if nodes else ""
    evidence.sources = {"logs": f"{counted(logs, 'file')}{nodes_text}", **evidence.sources}
    if not any(name.startswith("kernel") for name in evidence.sources):
        evidence.missing.setdefault("kernel's log", "none in the directory")
    return evidence


def _add_file(
    evidence: JobEvidence,
    kernels: list[KernelFile],
    handle: int,
    name: str,
    status: os.stat_result,
    *,
    rank_pattern: str,
    limit_s: float,
) -> None:
    """Add one open file. Raises OSError, UnreadableLogError."""

    def text() -> str:
        log = read_bytes(handle, HEAD_BYTES, END_BYTES, limit_s)
        return (log.head + log.end).decode("utf-8", "replace")

    plain_name = _PACKED.sub("", name)
    node = named_node(plain_name)
    if node is not None:
        lines = text()
        if is_certain(plain_name) or has_kernel_lines(lines):
            kernels.append(read_kernel_file(node or _node(name), lines, status.st_mtime))
            if not is_of_process(lines):
                return
    if name.endswith(_SCRIPTS):
        evidence.add_script(name, text())
        return
    is_named = os.path.basename(plain_name) in ("sacct.txt", "scontrol.txt")
    begin = os.pread(handle, 4096, 0)
    if is_named or (status.st_size <= _RECORD_BYTES and may_be_record(begin)):
        records = read_records(text(), is_certain=is_named)
        if records is not None:
            evidence.sources[records.tool] = records.summary
            evidence.steps += records.steps
            return
    room = HEAD_BYTES + END_BYTES
    failures = file_failures(
        *(handle, name, room, utc_calendar), rank_pattern=rank_pattern, limit_s=limit_s
    )
    head = begin.decode("utf-8", "replace").partition("\n")[0]
    origin = _INCIDENT_HEAD.match(head) if name.startswith("logs/") else None
    # A copy may have another time than its original.
    failures = replace(failures, mtime_s=0.0)
    evidence.files.append(JobFile(origin[1] if origin else _node(name), failures))


def _findings(stacks: Path) -> tuple[EnvironmentFinding, ...]:
    """What is wrong with the environment of the ranks of an incident, by its traces."""
    traces, places = Evidence(), []
    with contextlib.suppress(TraceError):
        for trace in read_traces(stacks)[0]:
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
        missing[os.path.relpath(error.filename, root)] = _reason(error)

    for directory, names, files in os.walk(root, onerror=unreadable):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            full = f"{directory}/{name}"
            is_hidden = name.startswith(".") and not name.endswith(".log")
            if is_hidden or name.endswith(_NO_LOGS):
                continue
            shown = os.path.relpath(full, root)
            kind = users_file.special_kind(os.lstat(full).st_mode)
            if kind:
                missing[shown] = _special_reason(full, kind)
            else:
                yield shown


def _reason(error: OSError) -> str:
    """Why a file cannot be read, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{reason}: run as its owner or as root"
    return reason


def _special_reason(path: str, kind: str) -> str:
    """Why a file that is not regular is not read, and what to do."""
    if kind != "a link":
        return f"is {kind}, not a file: save what it gives into a file"
    if not os.path.exists(path):
        return "is a link to a file that is missing"
    return "is a link: copy its target here"


def _node(name: str) -> str:
    """The node of a file: the first directory of its name, unless that is of a rank."""
    first, slash, _ = name.partition("/")
    is_of_rank = any(rank is not None for rank in named_ranks(first))
    return first if slash and not (_NO_NODES.fullmatch(first) or is_of_rank) else ""


def _add_faults(evidence: JobEvidence, kernels: list[KernelFile]) -> None:
    """Add the kernel's faults of the job's time, if its logs have times."""
    files = [file.failures for file in evidence.files]
    moments = [stream.last_s for file in files for stream in file.streams]
    moments += [event.time_s for file in files for event in file.events]
    end_s = max((moment for moment in moments if moment is not None), default=None)
    nodes = {file.node for file in evidence.files}
    evidence.kernel = [
        fault for fault in faults(kernels, nodes, end_s)
        if end_s is None or fault.time_s is None or abs(fault.time_s - end_s) < _FAULT_S
    ]  # fmt: skip
    evidence.sources["kernel's log"] = counted(len(evidence.kernel), "fault")
    for node, step in clock_steps(kernels, nodes, end_s):
        evidence.clock_steps.setdefault(node, []).append(step)
