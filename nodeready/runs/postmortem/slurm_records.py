"""What Slurm knows of a job that has ended: states, exit statuses, nodes, logs, times.

`sacct` needs accounting (slurmdbd); `scontrol` forgets a job after MinJobAge, mostly minutes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from glob import escape
from typing import Any, NamedTuple

from pyinfra.api.exceptions import InventoryError

from nodeready.core.shell import find_program
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import NodeSetError, expand
from nodeready.fleet.inventory.slurm import ask
from nodeready.runs.postmortem.evidence import SlurmRecords, SlurmStep

#: Its user chooses the last two, which may have any character.
_FIELDS = "JobID,User,UID,State,ExitCode,DerivedExitCode,NodeList,Start,End,WorkDir,JobName"
#: A field of `scontrol`, and those that the job's user chooses, up to the end of their line.
_FIELD = re.compile(r"(?:^|\s)([A-Za-z:/_]+)=(\S*(?:(?: (?![A-Za-z:/_]+=)\S+)*))")
_USERS_FIELD = re.compile(r"(?:^|\s)(JobName|\w*Comment|Command|WorkDir|Std(?:Err|In|Out))=(.*)")
_STATUS = re.compile(r"(\d{1,5}):(\d{1,3})")


#: The job's number, and any state, in a row of ``sacct --noheader --parsable2``.
_JOB, _WORD = re.compile(r"\d[\w.+\[\]%,-]*"), re.compile("[A-Z_]{6,}")
_STATE = re.compile(
    r"(?:COMPLETED|CANCELLED|FAILED|TIMEOUT|RUNNING|NODE_FAIL|PREEMPTED|OUT_OF_ME)"
)


def _column(at: int, cell: str) -> str:
    """The name of a column that has no header, by what stands in it; "": not known."""
    if at == 0:
        return "JobID"
    return "State" if _STATE.match(cell) else "ExitCode" if _STATUS.fullmatch(cell) else ""


def _is_headless(row: str) -> bool:
    """Whether a row has a job, a state and an exit status instead of names."""
    job, *cells = row.split("|")
    state = next((at for at, cell in enumerate(cells) if _WORD.match(cell)), len(cells))
    return bool(_JOB.fullmatch(job)) and any(map(_STATUS.fullmatch, cells[state + 1 :]))


def parse_sacct(text: str) -> list[dict[str, str]]:
    """The rows of ``sacct``, by the names in its first line: with delimiters (``--parsable2``,
    ``--parsable``, ``--delimiter``), or as a table.
    """
    head, *rows = text.strip("\n").splitlines() or [""]
    if (
        rows
        and (widths := [match.span() for match in re.finditer("-+", rows[0])])
        and not (rows[0].strip("- "))
    ):
        # Both forms of a table, with and without steps, cut a long value.
        cells = [[row[a:b].strip() for a, b in widths] for row in (head, *rows[1:])]
        if len(columns := head.split()) == len(widths):
            cells[0] = columns
    else:
        delimiter = re.search(r"[^\w%]+", head.strip())
        words = delimiter[0] if delimiter else "|"
        last = head.rstrip(words).count(words)
        cells = [row.split(words, last) for row in (head, *rows) if words in row]
        is_closed = head.endswith(words)
        cells = [[*row[:-1], row[-1].removesuffix(words)] if is_closed else row for row in cells]
    names, *values = cells or [[]]
    if _is_headless(head):
        values, names = cells, [_column(at, cell) for at, cell in enumerate(names)]
    names = ["JobID" if name == "JobIDRaw" and "JobID" not in names else name for name in names]
    if "JobID" not in names or "State" not in names:
        return []
    return [dict(zip(names, row, strict=False)) for row in values if row[0]]


def parse_scontrol(text: str) -> dict[str, str]:
    """``scontrol show job``: name -> value; only of the first job.

    A name that stands twice is left out: a user can write a line of it into the job's name.
    """
    fields: list[tuple[str, str]] = []
    for row in text.strip().partition("\n\n")[0].splitlines():
        users = _USERS_FIELD.search(row)
        fields += _FIELD.findall(row[: users.start()] if users else row)
        fields += [(users[1], users[2].strip())] if users else []
    counts = Counter(name for name, _ in fields)
    return {name: value.strip() for name, value in fields if counts[name] == 1}


def job_step(record: Mapping[str, str], job: str = "") -> SlurmStep:
    """The job, from a record of `parse_scontrol`. job: its name, where it is known"""
    state, nodes = record.get("JobState", ""), record.get("NodeList", "")
    return SlurmStep(job or record.get("JobId", ""), state, *_exit_status(record), nodes)


def _exit_status(record: Mapping[str, str]) -> tuple[int, int]:
    """The exit status, and the signal, of a record of `sacct` or `scontrol`."""
    status = _STATUS.match(record.get("ExitCode", ""))
    return (int(status[1]), int(status[2])) if status else (0, 0)


def steps_of(rows: list[dict[str, str]]) -> list[SlurmStep]:
    """The job and its steps, from the rows of `parse_sacct`."""
    return [
        SlurmStep(
            row["JobID"][:60], row["State"][:60], *_exit_status(row), row.get("NodeList", "")
        )
        for row in rows
    ]


# --- Records in a file beside the logs.


class FileRecords(NamedTuple):
    """What a file with the output of one of Slurm's tools says."""

    tool: str  # ``sacct``, ``scontrol``, ``seff``
    summary: str  # in words
    steps: list[SlurmStep]


#: How the lines of each tool's output begin, and the first one.
_SACCT_ROW = re.compile(r"\s*(?:JobID|-+|\d+(?:[_+.][\w\[\]%,+-]*)?)(?:\W|$)")
_SCONTROL_ROW = re.compile(r"\s*(?:[A-Za-z:/_]+=|$)")
_SEFF_ROW = re.compile(r"[A-Z][A-Za-z /-]*: |\s*$|WARNING|Efficiency not available|The task")
_SEFF_STATE = re.compile(r"(?m)^State: (\w+)(?: \(exit code (\d{1,5})\))?")
_FIRST = re.compile(
    rb"\s*(?:JobId=\d|Job ID: \d|JobID(?:Raw)?\W(?:.*\W)?State\b"
    rb"|\d+[^|\s]*\|(?:[^|\n]*\|)*[A-Z_]{6,}|\{\s*\"(?:jobs|meta)\")"
)


def may_be_record(begin: bytes) -> bool:
    """Whether a file with this beginning may be the output of one of Slurm's tools."""
    return _FIRST.match(begin) is not None


def read_records(text: str, *, is_certain: bool) -> FileRecords | None:
    """What the output of ``sacct``, ``scontrol show job`` or ``seff`` says, also with ``--json``;
    None: it is no such output, but perhaps a log that shows some of it.

    is_certain: the file's name says that it is
    """
    rows = text.rstrip().splitlines()
    begin = text.lstrip()[:8]
    if begin.startswith("{"):
        return _json_records(text)
    if begin.startswith("Job ID:"):
        state = _SEFF_STATE.search(text)
        if state and all(map(_SEFF_ROW.match, rows)):
            job = rows[0].partition(": ")[2]
            step = SlurmStep(job[:60], state[1][:60], int(state[2] or 0), 0, "")
            return FileRecords("seff", f"the job is {step.state}", [step])
        return None
    if "JobId=" in text[:100]:
        if is_certain or all(map(_SCONTROL_ROW.match, rows)):
            step = job_step(parse_scontrol(text))
            return FileRecords("scontrol", f"the job is {step.state}", [step])
        return None
    if is_certain or all(map(_SACCT_ROW.match, rows)):
        steps = steps_of(parse_sacct(text))
        return FileRecords("sacct", counted(len(steps), "record"), steps)
    return None


def _json_records(text: str) -> FileRecords | None:
    """What ``sacct --json`` or ``scontrol show job --json`` says."""
    try:
        jobs = json.loads(text)["jobs"]
        is_sacct = any("steps" in job for job in jobs)
        steps = []
        for job in jobs:
            steps.append(_json_step(str(_number(job["job_id"])), job))
            for row in job.get("steps", ()):
                named = row.get("step", {}).get("id", "")
                name = named.get("step_id", "") if isinstance(named, dict) else str(named)
                job_id, _, step = str(name).rpartition(".")
                steps.append(_json_step(f"{job_id or steps[0].step}.{step}", row))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if is_sacct:
        return FileRecords("sacct", counted(len(steps), "record"), steps)
    return FileRecords("scontrol", f"the job is {steps[0].state}", steps) if steps else None


def _json_step(step: str, row: Mapping[str, Any]) -> SlurmStep:
    """A job or a step. Raises what JSON of another form leads to."""
    state = row.get("job_state", row.get("state", ""))
    state = state.get("current", "") if isinstance(state, dict) else state
    words = state if isinstance(state, str) else " ".join(map(str, state))
    status = row.get("exit_code") or {}
    signal = status.get("signal") or {}
    number = _number(signal.get("id", signal.get("signal_id", 0)))
    nodes = row.get("nodes", "")
    nodes = nodes.get("range", "") if isinstance(nodes, dict) else nodes
    code = _number(status.get("return_code", 0))
    return SlurmStep(step[:60], words[:60], code, number, str(nodes or ""))


def _number(value: Any) -> int:
    """A number of Slurm's JSON: ``{"set": true, "number": 1}``, or a plain one."""
    return int(value.get("number", 0) if isinstance(value, dict) else value or 0)


def log_patterns(path: str, job: str, record: Mapping[str, str]) -> str:
    """The pattern of a file name of sbatch's or srun's --output (sbatch(1), filename pattern).

    ``%j`` is known; what only a step, a node or a task knows becomes ``*``.
    """
    number, _, task = job.partition("_")
    user = record.get("UserId", "").partition("(")[0]
    values = {
        "%": "%", "j": record.get("JobId", number), "A": record.get("ArrayJobId", number),
        "a": record.get("ArrayTaskId", task), "x": record.get("JobName", ""), "u": user,
    }  # fmt: skip
    # Every second part is the letter after a %.
    parts = re.split(r"%\d*([A-Za-z%])", path)
    texts = [values.get(part, "") if odd % 2 else part for odd, part in enumerate(parts)]
    path = "".join(escape(text) or "*" * (odd % 2) for odd, text in enumerate(texts))
    if path and not path.startswith("/"):
        path = f"{escape(record.get('WorkDir', '')).rstrip('/')}/{path}"
    return path if path.startswith("/") else ""


def slurm_records(job: str) -> SlurmRecords:
    """What `sacct` and `scontrol` know of this job; without Slurm, nothing."""
    records = SlurmRecords()
    if not re.fullmatch(r"\d{1,10}([_+.]\d{1,10})?", job):
        return records
    record: dict[str, str] = {}
    texts: dict[str, str] = {}
    for name, argv in (
        ("scontrol", ["scontrol", "show", "job", job]),
        ("sacct", ["sacct", "-j", job, "--parsable2", f"--format={_FIELDS}"]),
    ):
        if not find_program(name):
            records.missing[name] = "is not installed here"
            continue
        try:
            texts[name] = ask(argv)
        except InventoryError as error:
            records.missing[name] = str(error)
    if "scontrol" in texts:
        record = parse_scontrol(texts["scontrol"])
        step = job_step(record, job)
        if step.state:
            records.sources["scontrol"] = f"job {job} is {step.state}"
            records.is_running = step.state in ("RUNNING", "COMPLETING", "SUSPENDED", "PENDING")
            records.steps.append(step)
    if "sacct" in texts:
        rows = parse_sacct(texts["sacct"])
        if rows:
            records.sources["sacct"] = f"{len(rows)} records"
            records.steps += steps_of(rows)
            for name, column in (("StartTime", "Start"), ("NodeList", "NodeList"),
                                 ("WorkDir", "WorkDir"), ("JobName", "JobName")):  # fmt: skip
                record.setdefault(name, rows[0].get(column, ""))
            record.setdefault("UserId", f"{rows[0].get('User', '')}({rows[0].get('UID', '')})")
        else:
            records.missing["sacct"] = f"knows no job {job}"
    records.script = _batch_script(job, step_known="scontrol" in texts)
    records.since_s = _epoch(record.get("StartTime", ""))
    if user := re.search(r"\((\d{1,10})\)$", record.get("UserId", "")):
        records.uid = int(user[1])
    try:
        records.nodes = tuple(expand(record.get("NodeList", "")))
    except NodeSetError:
        records.nodes = ()
    for name in ("StdOut", "StdErr"):
        pattern = log_patterns(record.get(name, ""), job, record)
        is_new = pattern not in ("", "/dev/null", *records.logs)
        if is_new and records.uid is not None:
            records.logs.append(pattern)
    return records


def _batch_script(job: str, *, step_known: bool) -> str:
    """The batch script of a job; "": it has none, or it is not kept, or not shown to this user."""
    argv = ["scontrol", "write", "batch_script", job, "-"]
    if not step_known:
        # Only if AccountingStoreFlags has job_script.
        argv = ["sacct", "-j", job, "--batch-script"]
    if find_program(argv[0]):
        with contextlib.suppress(InventoryError):
            return ask(argv)
    return ""


def _epoch(text: str) -> float:
    """A time of Slurm, which is in this machine's time zone, in seconds since 1970; 0: none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0
