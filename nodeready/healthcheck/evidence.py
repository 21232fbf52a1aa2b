"""A small incident of this node, kept before it is drained: what a repair or a reboot takes away.

The failing results, the last lines of the kernel, and the stacks of whatever ranks run here, as
raw traces: `nodeready stacks --from DIR` reads them on the control machine. A process of its own
takes it, in a session of its own and with the lowest priority. The drain waits for nothing of it,
and nothing of it can fail the drain.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodeready.node.redact import redacted
from nodeready.text import now, sanitise

if TYPE_CHECKING:
    from nodeready.subjects.result import Result

SCHEMA = "nodeready.node-incident/1"
#: Where they are kept: a directory each, named by its moment, so that the oldest sorts first.
PLACE = "/var/lib/nodeready/incidents"
#: How many are kept.
MOST = 5
#: Seconds for all of it, and of these for the stacks.
LIMIT_S, STACKS_S = 8, 5
#: Bytes of the trace, and lines and bytes of the kernel's log.
_TRACE_BYTES, _KERNEL_LINES, _KERNEL_BYTES = 4 << 20, 200, 256 << 10
#: Bytes of one record of /dev/kmsg (Linux: PRINTK_MESSAGE_MAX and its prefix).
_RECORD_BYTES = 8192


def begin(reasons: Sequence[str], results: Iterable[Result]) -> None:
    """Start to keep an incident; returns at once, and never raises.

    reasons: why the node is drained
    results: of the look
    """
    try:
        pid = os.fork()
    except OSError:
        return
    if pid:
        return
    try:
        _leave_the_caller()
        keep(reasons, results, Path(PLACE))
    except BaseException:  # noqa: BLE001 - nobody is there to hear of it
        pass
    finally:
        os._exit(0)


def _leave_the_caller() -> None:
    """Hold nothing that somebody waits for, take nobody's time, and end for certain."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, 1024)
    os.nice(19)


def keep(reasons: Sequence[str], results: Iterable[Result], place: Path) -> Path:
    """Keep an incident in a new directory below ``place``, and no more than `MOST`.

    Returns the directory. Raises OSError.
    """
    from nodeready.files import make_directory, write_atomically

    make_directory(place, 0o700)
    _refuse_others(place)
    path = place / f"{now().replace(':', '').replace('-', '')}-{os.getpid()}"
    make_directory(path, 0o700)
    failing = [
        {name: getattr(one, name) for name in ("check", "status", "actual", "expected", "source")}
        for one in results
        if one.status not in ("ok", "na", "waived")
    ]
    data = {
        "schema": SCHEMA,
        "node": os.uname().nodename,
        "taken": now(),
        "reasons": list(reasons),
        "results": failing,
    }
    # First what is there already; the stacks take seconds.
    text = json.dumps(redacted(data), indent=1)
    write_atomically(path / "incident.json", [text, "\n"], 0o600)
    write_atomically(path / "kernel.txt", (f"{row}\n" for row in _kernel()), 0o600)
    for old in sorted(one for one in place.iterdir() if one.is_dir())[:-MOST]:
        shutil.rmtree(old, ignore_errors=True)
    name, pieces = _trace()
    write_atomically(path / name, pieces, 0o600)
    return path


def _refuse_others(place: Path) -> None:
    """Raises OSError where somebody else could have put what is removed there."""
    known = os.lstat(place)
    if known.st_uid != os.geteuid() or known.st_mode & 0o022 or not stat.S_ISDIR(known.st_mode):
        raise PermissionError(1, "is not this user's alone", str(place))


def _kernel() -> list[str]:
    """The last lines of the kernel's log, or why there are none."""
    rows: list[str] = []
    try:
        number = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        return [f"the kernel's log cannot be read: {problem.strerror}"]
    try:
        until = time.monotonic() + 1
        with contextlib.suppress(BlockingIOError):
            while time.monotonic() < until:
                try:
                    record = os.read(number, _RECORD_BYTES)
                except BrokenPipeError:
                    # A record was overwritten before it was read; the next one is there.
                    continue
                if not record:
                    break
                rows.append(_record(record.decode("utf-8", "replace")))
                del rows[:-_KERNEL_LINES]
    except OSError as problem:
        rows.append(f"the kernel's log ends here: {problem.strerror}")
    finally:
        os.close(number)
    size, kept = 0, []
    for row in reversed(redacted(rows)):
        size += len(row)
        if size > _KERNEL_BYTES:
            break
        kept.append(row)
    return kept[::-1]


def _record(text: str) -> str:
    """``[12.345678] text`` of a record of /dev/kmsg (Linux, Documentation/ABI/testing/dev-kmsg)"""
    head, _, rest = text.partition(";")
    words = head.split(",")
    line = sanitise(rest.partition("\n")[0], 2000)
    if len(words) > 2 and words[2].isdigit():
        return f"[{int(words[2]) / 1e6:.6f}] {line}"
    return line


def _trace() -> tuple[str, Iterator[str]]:
    """The file of the stacks of the ranks on this node, and what is in it."""
    from nodeready.node.stacks import program
    from nodeready.subjects.base import ProbeError
    from nodeready.transport.base import Conversation, Key, collect, new_nonce, once, request
    from nodeready.transport.local import Local

    carrier = Local()
    (node,) = carrier.nodes
    config = program.Config(new_nonce(), carrier.tag, STACKS_S, samples=1)
    asked: dict[Key, Conversation[Any]] = {node: once(request(node, program.__name__, config))}
    answer = collect(carrier, asked, deadline=time.monotonic() + STACKS_S + 1)[node]
    try:
        trace = program.unpack(answer.stdout, config.nonce)
    except ProbeError as problem:
        return "no-stacks.txt", iter([f"{answer.error or problem.reason}\n"])
    text = json.dumps(redacted(trace), separators=(",", ":"))
    if len(text) > _TRACE_BYTES:
        return "no-stacks.txt", iter([f"the stacks are too large: {len(text)} bytes\n"])
    return "trace-this-node.json", iter([text, "\n"])
