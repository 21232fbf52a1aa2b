"""Drain this node in Slurm when it is not ready, and undrain it after a drain by nodeready.

`decide` is pure; only `drain_or_undrain` calls `scontrol`. The prolog of a node that is ready does
not call `scontrol`, because a job of a thousand nodes would call slurmctld a thousand times.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import syslog
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodeready.node.secrets import redacted
from nodeready.shell import search_path
from nodeready.text import sanitise, utc_now

if TYPE_CHECKING:
    from nodeready.audit.verdict import NodeVerdict
    from nodeready.subjects.result import Result

#: The first word of nodeready's reasons. A drain with another reason is never changed or ended.
PREFIX = "nodeready:"
#: Maximum characters of a reason: sinfo -R and mails show it in one line.
_REASON_LENGTH = 200
#: Seconds for one answer of slurmctld; Slurm's own MessageTimeout is 10 by default.
SCONTROL_S = 5.0
#: The beginnings of states in which a node gets no jobs already, for another reason.
_NO_JOBS_STATES = ("DOWN", "FAIL", "FUTURE", "POWER", "REBOOT", "UNKNOWN")


class DrainError(Exception):
    """scontrol failed; one line with its message."""


@dataclass(frozen=True)
class SlurmNode:
    """A node in Slurm: the words of its state (IDLE, DRAIN) and the reason, or ""."""

    states: tuple[str, ...]
    reason: str

    @property
    def is_drained(self) -> bool:
        return any(state.startswith("DRAIN") for state in self.states)

    @property
    def is_ours(self) -> bool:
        return self.reason.startswith(PREFIX)


def parse(text: str) -> SlurmNode:
    """The node in ``scontrol show node NAME``. Raises DrainError for a text without a state."""
    state = re.search(r"^ +State=(\S+)", text, re.M)
    if state is None:
        raise DrainError(f"scontrol show node makes no sense: {_line(text) or 'it said nothing'}")
    # Flags stand behind a word: DOWN*+DRAIN is DOWN and DRAIN.
    words = tuple(re.sub(r"[^A-Z_]", "", word) for word in state[1].upper().split("+"))
    reason = re.search(r"^ +Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])? *$", text, re.M)
    return SlurmNode(words, reason[1] if reason else "")


def reason_of(reasons: Sequence[str]) -> str:
    """The reason for these lines (`NodeVerdict.costed_reasons`), in one short line of ASCII."""
    suffix = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    text = sanitise(reasons[0]) if reasons else "not ready"
    text = "".join(char if " " <= char <= "~" else "?" for char in text)
    return f"{PREFIX} {text[: _REASON_LENGTH - len(PREFIX) - len(suffix) - 1]}{suffix}"


def _reason_key(reason: str) -> tuple[str, ...]:
    """The check that a reason of nodeready names, with the words before it, and the number of
    further reasons."""
    match = re.match(rf"{PREFIX} (.*?[a-z0-9_]\.[a-z0-9_]+):.*?(\(and \d+ more\))?$", reason)
    return (match[1], match[2] or "") if match else (reason,)


def decide(node: SlurmNode, reason: str) -> tuple[str, ...]:
    """The words of the ``scontrol update`` that the node needs; (): none.

    reason: why the node is not ready; "": it is ready

    ``undrain`` clears only the drain; ``resume`` would also return a node that is down.
    """
    if node.is_drained and not node.is_ours:
        return ()
    if not reason:
        return ("state=undrain",) if node.is_drained else ()
    if node.is_drained:
        # The text behind the check may hold a number that changes with every audit.
        same = _reason_key(node.reason) == _reason_key(reason)
        return () if same else (f"reason={reason}",)
    if any(state.startswith(_NO_JOBS_STATES) for state in node.states):
        return ()
    return ("state=drain", f"reason={reason}")


def name_of(environment: Mapping[str, str], hostname: str) -> str:
    """This node's name in Slurm. Raises DrainError for one that could mean other nodes too."""
    name = environment.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.upper() == "ALL":
        raise DrainError(f"{sanitise(name, 60)!r} is no name of one node in Slurm")
    return name


def drain_or_undrain(
    reasons: Sequence[str],
    go: bool,
    deadline: float,
    before_drain: Callable[[], object] = lambda: None,
) -> str:
    """Drain or undrain the node in Slurm. Returns the change as a line for the log, or "".

    reasons:      why the node is not ready
    deadline:     time.monotonic() at which slurmctld must have answered
    before_drain: called before the node is drained; not if it is drained already

    Raises DrainError.
    """
    name = name_of(os.environ, os.uname().nodename)
    node = parse(_scontrol(["show", "node", name], deadline))
    words = decide(node, "" if go else reason_of(reasons))
    if words:
        if "state=drain" in words:
            before_drain()
        _scontrol(["update", f"nodename={name}", *words], deadline)
    return " ".join((name, *words)) if words else ""


def _scontrol(words: list[str], deadline: float) -> str:
    """Run scontrol; returns its output. Raises DrainError."""
    remaining_s = min(SCONTROL_S, deadline - time.monotonic())
    if remaining_s <= 0:
        raise DrainError(f"no time left for scontrol {words[0]}")
    try:
        process = subprocess.run(
            ["scontrol", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=remaining_s,
            check=False,
            cwd="/",
            env={**os.environ, "PATH": search_path(os.environ.get("PATH", "")), "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise DrainError(f"scontrol {words[0]} gave no answer in {remaining_s:.0f} s") from None
    except OSError as error:
        raise DrainError(f"scontrol: {error.strerror}") from None
    output, errors = (text.decode("utf-8", "replace") for text in (process.stdout, process.stderr))
    if process.returncode:
        reason = _line(errors) or _line(output) or f"status {process.returncode}"
        raise DrainError(f"scontrol {words[0]}: {reason}")
    return output


def _line(text: str) -> str:
    """The first line that is not empty, safe to show."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sanitise(lines[0], 160) if lines else ""


def update_slurm(
    verdict: NodeVerdict, deadline: float, before_drain: Callable[[], object] = lambda: None
) -> str:
    """Drain or undrain this node by the verdict, and log the change on the node.

    deadline, before_drain: as for `drain_or_undrain`

    Returns the error of scontrol, or "".
    """
    try:
        update = drain_or_undrain(verdict.costed_reasons, verdict.go, deadline, before_drain)
    except DrainError as error:
        syslog.syslog(syslog.LOG_WARNING, f"nodeready: {error}")
        return str(error)
    if update:
        syslog.syslog(syslog.LOG_NOTICE, f"nodeready: scontrol update {update}")
    return ""


# --- The evidence that a node keeps of itself before it is drained.

SCHEMA = "nodeready.node-incident/1"
#: The incidents of this node. Each is a directory named by its time, so the oldest sorts first.
INCIDENTS = "/var/lib/nodeready/incidents"
#: Incidents that are oldest_first.
MAX_INCIDENTS = 5
#: Seconds to keep an incident, and the part of them for the stacks.
LIMIT_S, STACKS_S = 8, 5
#: Maximum bytes of the trace, and maximum lines and bytes of the kernel's log.
_TRACE_BYTES, _KERNEL_LINES, _KERNEL_BYTES = 4 << 20, 200, 256 << 10
#: Bytes of one record of /dev/kmsg (Linux: PRINTK_MESSAGE_MAX and its prefix).
_RECORD_BYTES = 8192


def keep_evidence(reasons: Sequence[str], results: Iterable[Result]) -> None:
    """Start to keep an incident in a fork; returns at once, and nothing waits for the fork.

    reasons: why the node is drained
    results: of the audit
    """
    from nodeready.node.runtime import ForkedWorker

    def work(send: object) -> None:
        os.setsid()
        os.nice(19)
        write_incident(reasons, results, Path(INCIDENTS))

    with contextlib.suppress(OSError):
        ForkedWorker(work, LIMIT_S)


def write_incident(reasons: Sequence[str], results: Iterable[Result], incidents: Path) -> Path:
    """Write an incident in a new directory below ``incidents``; remove all but `MAX_INCIDENTS`.

    Returns the directory. Raises OSError.
    """
    from nodeready.files import make_directory, write_atomically

    make_directory(incidents, 0o700)
    _refuse_shared(incidents)
    path = incidents / f"{utc_now().replace(':', '').replace('-', '')}-{os.getpid()}"
    make_directory(path, 0o700)
    names = ("check", "status", "severity", "actions", "actual", "expected", "source")
    failing = [
        {name: getattr(result, name) for name in names}
        for result in sorted(results, key=lambda result: result.rank)
        if result.bad
    ]
    data = {
        "schema": SCHEMA,
        "node": os.uname().nodename,
        "taken": utc_now(),
        "reasons": list(reasons),
        "results": failing,
    }
    text = json.dumps(redacted(data), indent=1)
    write_atomically(path / "incident.json", [text, "\n"], 0o600)
    write_atomically(path / "kernel.txt", (f"{row}\n" for row in _kernel_log()), 0o600)
    oldest_first = sorted(entry for entry in incidents.iterdir() if entry.is_dir())
    for incident in oldest_first[:-MAX_INCIDENTS]:
        shutil.rmtree(incident, ignore_errors=True)
    # The stacks are last, because they take seconds.
    name, trace_text = _stacks_file()
    write_atomically(path / name, trace_text, 0o600)
    return path


def _refuse_shared(directory: Path) -> None:
    """Raises OSError if another user may have created files in the directory."""
    status = os.lstat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(1, "another user may write to it", str(directory))


def _kernel_log() -> list[str]:
    """The last lines of the kernel's log, or why there are none."""
    rows: list[str] = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        return [f"the kernel's log cannot be read: {problem.strerror}"]
    try:
        deadline = time.monotonic() + 1
        with contextlib.suppress(BlockingIOError):
            while time.monotonic() < deadline:
                try:
                    record = os.read(descriptor, _RECORD_BYTES)
                except BrokenPipeError:
                    # A record was overwritten before it was read; the next one is there.
                    continue
                if not record:
                    break
                rows.append(_kernel_line(record.decode("utf-8", "replace")))
                del rows[:-_KERNEL_LINES]
    except OSError as problem:
        rows.append(f"the kernel's log ends here: {problem.strerror}")
    finally:
        os.close(descriptor)
    size, newest = 0, []
    for row in reversed(redacted(rows)):
        size += len(row)
        if size > _KERNEL_BYTES:
            break
        newest.append(row)
    return newest[::-1]


def _kernel_line(text: str) -> str:
    """``[12.345678] text`` of a record of /dev/kmsg (Linux, Documentation/ABI/testing/dev-kmsg)"""
    head, _, tail = text.partition(";")
    words = head.split(",")
    line = sanitise(tail.partition("\n")[0], 2000)
    if len(words) > 2 and words[2].isdigit():
        return f"[{int(words[2]) / 1e6:.6f}] {line}"
    return line


def _stacks_file() -> tuple[str, Iterator[str]]:
    """The name and the content of the file with the stacks of the ranks on this node."""
    from nodeready.node.stacks import program
    from nodeready.subjects.base import ProbeError
    from nodeready.transport.base import Conversation, Key, collect, new_nonce, once, request
    from nodeready.transport.local import Local

    transport = Local()
    (node,) = transport.nodes
    config = program.StacksConfig(new_nonce(), transport.tag, STACKS_S, samples=1)
    conversations: dict[Key, Conversation[Any]] = {
        node: once(request(node, program.__name__, config))
    }
    answer = collect(transport, conversations, deadline=time.monotonic() + STACKS_S + 1)[node]
    try:
        trace = program.unpack(answer.stdout, config.nonce)
    except ProbeError as problem:
        return "no-stacks.txt", iter([f"{answer.error or problem.reason}\n"])
    text = json.dumps(redacted(trace), separators=(",", ":"))
    if len(text) > _TRACE_BYTES:
        return "no-stacks.txt", iter([f"the stacks are too large: {len(text)} bytes\n"])
    return "trace-this-node.json", iter([text, "\n"])
