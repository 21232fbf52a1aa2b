"""A node's own last verdict: its format, and the directory into which the node writes it.

The node writes its `NodeVerdict` where its prolog reads it, into a directory that the nodes share,
and as metrics for node_exporter (reports/monitoring.py). Root on a node can change that node's
verdict. `runs/audit/recorded.py` collects the verdicts.

This module runs on nodes: the standard library, Python 3.9, and quick to import.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nodeready.core.severity import ACTIONS, SEVERITIES, severity_rank, words
from nodeready.core.text import sanitise, span

if TYPE_CHECKING:
    from pathlib import Path

    from nodeready.core.result import Result

# --- The verdict.

SCHEMA = "nodeready.verdict/1"
#: Statuses whose results a verdict has with texts, the worst first. Of others it has the ids.
LISTED = ("fail", "unknown", "warn", "waived")
#: Maximum characters of one text but a fix, and bytes of all results with their texts.
_TEXT, _MAX_RESULT_BYTES = 400, 40 << 10
LEFT_OUT = "(left out: the verdict is full)"  # replaces the texts that exceed the maximum
#: A host name that can be a file name. Not compiled: a prolog does not use it.
NODE = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,248}"
CHECK = re.compile(r"[a-z0-9_]{1,80}\.[a-z0-9_]{1,80}")
_ROW = ("check", "status", "expected", "actual", "source", "fix", "owner", "severity")
_SHORT = ("check", "status", "owner", "severity", "actions")  # without the texts
_LATEST_S = 1e11  # the latest time of a verdict that makes sense, in seconds since 1970

Row = Mapping[str, Any]  # the fields of a Result that are not empty; `actions` is a list


@dataclass(frozen=True)
class NodeVerdict:
    """Whether the node may get a job, and the results of its checks."""

    time: float  # when the node was judged, in seconds since 1970
    boot_id: str  # the boot for which the verdict is valid
    policy_digest: str
    go: bool
    reasons: tuple[str, ...] = ()  # why the node may get no job, a short line each
    node: str = ""  # the node's own host name
    version: str = ""  # of the nodeready that judged; "": a version that wrote no results
    results: tuple[Row, ...] = ()  # those of LISTED, without empty fields
    ok: tuple[str, ...] = ()  # the ids of the checks that passed, and of those that do not apply
    na: tuple[str, ...] = ()  # likewise

    @property
    def costed_reasons(self) -> tuple[str, ...]:
        """The reasons, after what the worst one costs a job, and the first action against it:
        ``loses job, reset GPU: gpus.ecc_errors: 2 uncorrectable``; if unknown ``loses job? …``.
        """
        stopping = [row for row in self.results if row["status"] in ("fail", "unknown")]
        if self.go or not stopping:
            return self.reasons
        worst = min(stopping, key=lambda row: severity_rank(row.get("severity", "")))
        parts = [worst.get("severity", ""), *worst.get("actions", ())[:1]]
        joint = "? " if worst["status"] == "unknown" else ", "
        head = joint.join(words(part) for part in parts if part)
        first, *further = self.reasons
        return (f"{head}: {first}" if head else first, *further)

    def text(self) -> str:
        data = {"schema": SCHEMA, **vars(self), "time": round(self.time, 3)}
        return json.dumps(data) + "\n"


def parse(text: bytes) -> NodeVerdict | None:
    """The verdict in a file; None: it is not a valid verdict."""
    try:
        data: Any = json.loads(text)
        if data.pop("schema") != SCHEMA:
            return None
        verdict = NodeVerdict(**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    lists = (verdict.reasons, verdict.ok, verdict.na)
    words = (verdict.boot_id, verdict.policy_digest, verdict.node, verdict.version)
    is_valid = (
        type(verdict.time) in (int, float)
        and 0 <= verdict.time < _LATEST_S
        and isinstance(verdict.go, bool)
        and all(isinstance(values, (list, tuple)) for values in (*lists, verdict.results))
        and all(isinstance(text, str) for values in (words, *lists) for text in values)
        and all(CHECK.fullmatch(check) for check in (*verdict.ok, *verdict.na))
        and all(map(_is_valid_row, verdict.results))
        # There are reasons exactly if it is a no-go.
        and verdict.go is not bool(verdict.reasons)
    )
    if not is_valid:
        return None
    values = ((key, tuple(v) if isinstance(v, list) else v) for key, v in data.items())
    fields: dict[str, Any] = dict(values)
    return NodeVerdict(**fields)


def _is_valid_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    actions = row.get("actions", [])
    return (
        row.keys() <= {*_ROW, "actions"}
        and all(isinstance(row[key], str) for key in row.keys() - {"actions"})
        and isinstance(actions, list)
        and all(isinstance(action, str) and action in ACTIONS for action in actions)
        and row.get("status") in LISTED
        and row.get("severity", "") in (*SEVERITIES, "")
        and bool(CHECK.fullmatch(row.get("check", "")))
    )


def listed_fields(results: Iterable[Result]) -> dict[str, Any]:
    """The fields `results`, `ok` and `na` of a verdict. Texts may be left out, never a status."""
    fields: dict[str, list[Any]] = {"results": [], "ok": [], "na": []}
    remaining_bytes = _MAX_RESULT_BYTES
    for result in sorted(results, key=lambda result_: result_.rank):
        if result.status not in LISTED:
            fields[result.status].append(result.check)
            continue
        row: dict[str, Any] = {
            key: sanitise(text) if key == "fix" else sanitise(text, _TEXT)
            for key in _ROW
            if (text := getattr(result, key))
        }
        row |= {"actions": list(result.actions)} if result.actions else {}
        size = len(json.dumps(row))
        if size > remaining_bytes:
            row = {key: row[key] for key in _SHORT if key in row}
            row["actual"] = LEFT_OUT
        else:
            remaining_bytes -= size
        fields["results"].append(row)
    return {key: tuple(values) for key, values in fields.items()}


# --- Work that may hang for ever, because a file server is down.


class SourceError(Exception):
    """A verdict could not be kept, or the verdicts could not be collected; one line."""


Send = Callable[[Any], None]  # sends plain data from the process that does the work


def _reported(work: Callable[[Send], None], send: Send) -> None:
    """Do the work. Sends [None, data] for each message, and at the end [error or "", None]."""
    try:
        work(lambda data: send([None, data]))
        send(["", None])
    except SourceError as error:
        send([str(error), None])
    except OSError as error:
        path = f": {error.filename}" if error.filename else ""
        send([f"{error.strerror or error}{path}", None])


def gather(
    works: Iterable[Callable[[Send], None]], limit_s: float, source: str, keep: Iterable[int] = ()
) -> Iterator[Any]:
    """The data that these functions send, each from its own fork (`runtime.ForkedWorker`).

    source: begins the errors
    keep:   file descriptors that stay open in the forks
    Raises SourceError if one fails, or has not ended after limit_s.
    """
    from nodeready.agent.runtime import ForkedWorker

    deadline = time.monotonic() + limit_s
    workers: list[ForkedWorker] = []
    try:
        workers += [ForkedWorker(partial(_reported, work), limit_s + 1, keep) for work in works]
        running = {worker.pipe: worker for worker in workers}
        while running:
            wait_s = deadline - time.monotonic()
            ready = select.select([*running], [], [], wait_s)[0] if wait_s > 0 else []
            if not ready:
                raise SourceError(f"{source}: no answer within {limit_s:g} s")
            for pipe in ready:
                messages = running[pipe].read()
                if messages is None:
                    raise SourceError(f"{source}: its reader was ended")
                for outcome, data in messages:
                    if outcome:
                        raise SourceError(outcome)
                    if outcome == "":
                        del running[pipe]
                    else:
                        yield data
    finally:
        for worker in workers:
            worker.end()


def _close(number: int) -> None:
    """Close a descriptor. gevent's os.close needs its hub, which a fork does not have."""
    os.closerange(number, number + 1)


# --- Its file in a directory that the nodes share: DIRECTORY/NODE.json.

MAX_BYTES = 64 << 10  # maximum bytes of a verdict's file; `listed_fields` stays below
WRITE_S = 10.0  # seconds that a node waits for its file server
LOCK = "/run/nodeready"  # a hanging write keeps it locked, so that later writes fail at once


def keep(verdict: NodeVerdict, directory: str, max_age_s: float) -> None:
    """Write the verdict into the directory, within WRITE_S even if the file server hangs.
    max_age_s: an older verdict of another machine is replaced
    Raises SourceError, OSError.
    """
    from pathlib import Path

    from nodeready.core.files import make_directory, write_atomically

    if not re.fullmatch(NODE, verdict.node):
        raise SourceError(f"{directory}: no file of the host name {verdict.node!a} can be there")
    path = Path(directory, f"{verdict.node}.json")

    def write(send: Send) -> None:
        other = twin(path, verdict, max_age_s, time.clock_gettime(time.CLOCK_BOOTTIME))
        if other is not None:
            age = span(max(0.0, verdict.time - other.time))
            reason = f"another machine wrote it {age} ago: two have this host name"
            raise SourceError(f"{path}: {reason}")
        write_atomically(path, [verdict.text()], 0o644, keep_mode=False)

    import fcntl

    make_directory(Path(LOCK), 0o755)
    lock = os.open(LOCK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SourceError(f"{directory}: an earlier write still waits for it") from None
    else:
        # The fork also keeps the lock, until it ends.
        for _ in gather([write], WRITE_S, directory, [lock]):
            pass
    finally:
        _close(lock)


def twin(
    path: Path, verdict: NodeVerdict, max_age_s: float, uptime_s: float
) -> NodeVerdict | None:
    """The recent verdict of another machine with the same host name, or None. A verdict from after
    our boot with another boot's id is not ours.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _, text = read_file(directory, path.name)
    except OSError:
        return None
    finally:
        _close(directory)
    other = parse(text)
    if other is None or other.boot_id == verdict.boot_id:
        return None
    age = verdict.time - other.time
    return other if abs(age) <= max_age_s and age < uptime_s else None


def read_file(
    directory: int, name: str, owners: frozenset[int] | None = None
) -> tuple[str, bytes]:
    """Why a file of this open directory is refused, or "", and its content. Raises OSError."""
    path_descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        status = os.fstat(path_descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "no regular file", b""
        if owners is not None and status.st_uid not in owners:
            problem = f"belongs to uid {status.st_uid}, which is neither root nor the directory's"
            return problem, b""
        if owners is not None and status.st_mode & 0o022:
            return "others can write it", b""
        path = f"/proc/self/fd/{path_descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        _close(path_descriptor)
    try:
        text = bytearray()
        while len(text) <= MAX_BYTES and (data := os.read(descriptor, MAX_BYTES + 1 - len(text))):
            text += data
    finally:
        _close(descriptor)
    return ("larger than a verdict", b"") if len(text) > MAX_BYTES else ("", bytes(text))
