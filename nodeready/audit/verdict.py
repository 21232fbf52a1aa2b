"""A node's own last verdict: its form, and the directory into which the node writes it.

The node writes its `Verdict` where its prolog reads it, into a directory that the nodes share, and
as metrics for node_exporter (reports/prometheus.py). Whoever is root on a node decides what that
node's verdict says. `audit/recorded.py` collects them.

This module is the node's: the standard library, Python 3.9, and quick to import.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodeready.exit_codes import SIGNALS
from nodeready.text import sanitise, span

if TYPE_CHECKING:
    from pathlib import Path

    from nodeready.subjects.result import Result

# --- The verdict: what the node writes.

SCHEMA = "nodeready.verdict/1"
#: The statuses that a verdict tells with their texts, the worst first; of the others the ids.
LISTED = ("fail", "unknown", "warn", "waived")
#: Characters of one text, and bytes of all results with their texts.
_TEXT, _ROOM = 400, 40 << 10
#: What stands in place of the texts for which there was no room.
LEFT_OUT = "(left out: the verdict is full)"
#: A host name that is the name of a file, too. A prolog compiles no pattern that it does not use.
NODE = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,248}"
CHECK = re.compile(r"[a-z0-9_]{1,80}\.[a-z0-9_]{1,80}")
_ROW = ("check", "status", "expected", "actual", "source", "fix", "owner")
#: No verdict was given before, or will be after (seconds since 1970).
_LATEST_S = 1e11

Row = Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """Whether the node may get a job, and what its checks found.

    time:    when the node was judged, in seconds since 1970
    boot_id: the boot for which the verdict holds
    reasons: why the node may get no job, a short line each
    node:    the node's own host name
    version: of the nodeready that judged; "": of one that wrote no results
    results: of LISTED, with the fields of a Result that are not empty
    ok, na:  the ids of the other checks
    """

    time: float
    boot_id: str
    policy_digest: str
    go: bool
    reasons: tuple[str, ...] = ()
    node: str = ""
    version: str = ""
    results: tuple[Row, ...] = ()
    ok: tuple[str, ...] = ()
    na: tuple[str, ...] = ()

    def text(self) -> str:
        """The verdict as a JSON object on one line."""
        data = {"schema": SCHEMA, **vars(self), "time": round(self.time, 3)}
        return json.dumps(data) + "\n"


def parse(text: bytes) -> Verdict | None:
    """The verdict that a file holds; None for a file of another schema."""
    try:
        data: Any = json.loads(text)
        if data.pop("schema") != SCHEMA:
            return None
        found = Verdict(**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    lists = (found.reasons, found.ok, found.na)
    sound = (
        type(found.time) in (int, float)
        and 0 <= found.time < _LATEST_S
        and all(
            isinstance(text, str)
            for text in (found.boot_id, found.policy_digest, found.node, found.version)
        )
        and isinstance(found.go, bool)
        and all(isinstance(one, (list, tuple)) for one in (*lists, found.results))
        and all(isinstance(text, str) for one in lists for text in one)
        and all(CHECK.fullmatch(check) for check in (*found.ok, *found.na))
        and all(map(_sound, found.results))
        # A no-go says why.
        and found.go is not bool(found.reasons)
    )
    if not sound:
        return None
    fields: dict[str, Any] = {}
    for key, value in data.items():
        fields[key] = tuple(value) if isinstance(value, list) else value
    return Verdict(**fields)


def _sound(row: Any) -> bool:
    """Whether this is a result of a verdict."""
    return (
        isinstance(row, dict)
        and all(key in _ROW and isinstance(value, str) for key, value in row.items())
        and row.get("status") in LISTED
        and bool(CHECK.fullmatch(row.get("check", "")))
    )


def told(results: Iterable[Result]) -> dict[str, tuple[Any, ...]]:
    """The fields `results`, `ok` and `na` of a verdict, within their bounds; no status is lost."""
    found: dict[str, list[Any]] = {"results": [], "ok": [], "na": []}
    left = _ROOM
    for result in sorted(results, key=lambda one: (*LISTED, "ok", "na").index(one.status)):
        if result.status not in LISTED:
            found[result.status].append(result.check)
            continue
        row = {key: sanitise(text, _TEXT) for key in _ROW if (text := getattr(result, key))}
        size = len(json.dumps(row))
        if size > left:
            row = {key: row[key] for key in ("check", "status", "owner") if key in row}
            row["actual"] = LEFT_OUT
        else:
            left -= size
        found["results"].append(row)
    return {key: tuple(values) for key, values in found.items()}


# --- Work that may hang for ever (a file server that is gone): in a process beside this one,
# which is left behind when its time is over. A thread that hangs in the kernel would keep this
# process from ending.


class SourceError(Exception):
    """A verdict could not be kept, or the nodes' could not be collected: why, in one line."""


#: What such a process may say: a piece of its kind, a letter, and bytes.
Say = Callable[[bytes, bytes], None]
#: Kinds: the work is done; it failed, with one line why.
_DONE, _FAILED = b".", b"!"


def _close(number: int) -> None:
    """Close a descriptor. gevent's os.close asks its hub first, which is not there in a child."""
    os.closerange(number, number + 1)


def _start(work: Callable[[Say], None], kept: Iterable[int] | None) -> tuple[int, int]:
    """Begin this work in a process of its own: (its pid, the pipe from which its pieces come).

    What it holds open stays open for as long as it hangs: neither who reads our output nor who
    waits for a lock that we were given (cron's) may wait for it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        _close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        if kept is not None:
            needed = {0, 1, 2, writing, *kept}
            for number in {int(name) for name in os.listdir("/proc/self/fd")} - needed:
                _close(number)
        for name in SIGNALS:
            if signal.getsignal(name) is not signal.SIG_IGN:
                signal.signal(name, signal.SIG_DFL)
        with open(writing, "wb") as out:

            def say(kind: bytes, data: bytes) -> None:
                out.write(kind + len(data).to_bytes(4, "big") + data)

            try:
                work(say)
                say(_DONE, b"")
            except SourceError as error:
                say(_FAILED, str(error).encode("utf-8", "backslashreplace"))
            except OSError as error:
                where = f": {error.filename}" if error.filename else ""
                say(_FAILED, f"{error.strerror or error}{where}".encode("utf-8", "replace"))
        status = 0
    finally:
        os._exit(status)


def beside(
    works: Iterable[Callable[[Say], None]],
    limit_s: float,
    what: str,
    kept: Iterable[int] | None = (),
) -> Iterator[tuple[bytes, bytes]]:
    """The pieces (kind, data) of these works, each in a process of its own, as they come.

    what: whom we wait for, in the error
    kept: descriptors that they hold open; None: all, for work that a signal ends
    Raises SourceError for a work that failed, and for one that has not ended after limit_s.
    """
    deadline = time.monotonic() + limit_s
    pids: dict[int, int] = {}
    try:
        for work in works:
            pid, pipe = _start(work, kept)
            pids[pipe] = pid
        yield from _pieces(pids, deadline, f"{what}: no answer within {limit_s:g} s", what)
    finally:
        for pipe, pid in pids.items():
            os.close(pipe)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)


def _reap(pid: int) -> None:
    """Take the end of a process that was killed; one that hangs in the kernel is left."""
    for _ in range(20):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
                continue
        return


def _pieces(
    pids: Mapping[int, int], deadline: float, late: str, what: str
) -> Iterator[tuple[bytes, bytes]]:
    poll = select.poll()
    buffers = {pipe: bytearray() for pipe in pids}
    for pipe in pids:
        poll.register(pipe, select.POLLIN)
    while buffers:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0, int(left * 1000) + 1)) if left > 0 else []
        if not ready:
            if left > 0:
                continue
            raise SourceError(late)
        for pipe, _ in ready:
            data = os.read(pipe, 1 << 16)
            if not data:
                raise SourceError(f"{what}: its reader was ended")
            buffer = buffers[pipe]
            buffer += data
            while len(buffer) >= 5:
                size = int.from_bytes(buffer[1:5], "big")
                if len(buffer) < 5 + size:
                    break
                kind, piece = bytes(buffer[:1]), bytes(buffer[5 : 5 + size])
                del buffer[: 5 + size]
                if kind == _FAILED:
                    raise SourceError(piece.decode("utf-8", "replace"))
                if kind == _DONE:
                    poll.unregister(pipe)
                    del buffers[pipe]
                    break
                yield kind, piece


# --- Its file in a directory that the nodes share: DIRECTORY/NODE.json.

#: Bytes of a file of a verdict; `told` stays below it.
MAX_BYTES = 64 << 10
#: Seconds that a node waits for its file server.
WRITE_S = 10.0
#: A write that hangs has this directory locked: no second one begins to hang beside it.
LOCK = "/run/nodeready"


def keep(verdict: Verdict, directory: str, max_age_s: float) -> None:
    """Write the verdict into the directory, within WRITE_S, whatever hangs.

    max_age_s: a verdict of another machine that is older than that is replaced
    Raises SourceError, one line, and OSError.
    """
    from pathlib import Path

    from nodeready.files import make_directory, write_atomically

    if not re.fullmatch(NODE, verdict.node):
        raise SourceError(f"{directory}: no file of the host name {verdict.node!a} can be there")
    path = Path(directory, f"{verdict.node}.json")

    def write(say: Say) -> None:
        there = twin(path, verdict, max_age_s, time.clock_gettime(time.CLOCK_BOOTTIME))
        if there is not None:
            raise SourceError(
                f"{path}: another machine wrote it {span(max(0.0, verdict.time - there.time))} "
                "ago: two have this host name"
            )
        write_atomically(path, [verdict.text()], 0o644, keep_mode=False)

    import fcntl

    make_directory(Path(LOCK), 0o755)
    lock = os.open(LOCK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SourceError(f"{directory}: an earlier write still waits for it") from None
    else:
        # The process beside us has the lock, too, as long as it lives.
        for _ in beside([write], WRITE_S, directory, [lock]):
            pass
    finally:
        _close(lock)


def twin(path: Path, verdict: Verdict, max_age_s: float, uptime_s: float) -> Verdict | None:
    """What another machine of the same host name has lately written there.

    Since our boot, our own verdicts have our boot's id.
    """
    at = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _, text = content(at, path.name)
    except OSError:
        return None
    finally:
        _close(at)
    there = parse(text)
    if there is None or there.boot_id == verdict.boot_id:
        return None
    age = verdict.time - there.time
    return there if abs(age) <= max_age_s and age < uptime_s else None


def content(at: int, name: str, owners: frozenset[int] | None = None) -> tuple[str, bytes]:
    """(why the file is not read or "", its content). at: its directory. Raises OSError."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            return "no regular file", b""
        if owners is not None and status.st_uid not in owners:
            return (
                f"belongs to uid {status.st_uid}, which is neither root nor the directory's",
                b"",
            )
        if owners is not None and status.st_mode & 0o022:
            return "others can write it", b""
        handle = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        _close(place)
    try:
        text = bytearray()
        while len(text) <= MAX_BYTES and (more := os.read(handle, MAX_BYTES + 1 - len(text))):
            text += more
    finally:
        _close(handle)
    return ("larger than a verdict", b"") if len(text) > MAX_BYTES else ("", bytes(text))
