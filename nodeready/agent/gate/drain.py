"""Drain this node in Slurm when it is not ready, and undrain it after a drain by nodeready.

`decide` and `excess` are pure; only `drain_or_undrain` calls `scontrol`. The prolog of a node that
is ready does not call `scontrol`, because a job of a thousand nodes would call slurmctld a
thousand times.

A policy that is wrong for all nodes must not drain all of them: at most `gate_drain_max` nodes of
a partition are drained by nodeready. Slurm has no lock, so a node drains itself in two steps.
First it drains with a pending reason. Then it looks again: a node that has `gate_drain_max`
drained nodes before it undrains itself; any other node gets the final reason.
Drains with a final reason come first, then the pending ones in the order of the time that
slurmctld gave their reasons, then of their names. slurmctld's times are whole seconds, and a node
looks again more than a second after its own drain, so it sees every node that comes before it.
Thus the first nodes stay drained, and no others. A run that ends between the steps leaves a
pending drain, which counts, and which the next health check concludes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
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

from nodeready.agent.secrets import redacted
from nodeready.core.shell import search_path
from nodeready.core.text import sanitise, utc_now
from nodeready.subjects.gate.facts import HELD, PENDING, PREFIX, Hold

if TYPE_CHECKING:
    from nodeready.agent.verdict import NodeVerdict
    from nodeready.core.result import Result

_REASON_LENGTH = 200  # maximum characters of a reason: sinfo -R and mails show it in one line
SCONTROL_S = 5.0  # seconds for one answer of slurmctld; Slurm's own MessageTimeout is 10
#: The beginnings of states in which a node gets no jobs already, for another reason.
_NO_JOBS_STATES = ("DOWN", "FAIL", "FUTURE", "POWER", "REBOOT", "UNKNOWN")
#: Maximum seconds of a random delay before a node asks for all nodes. Of nodes that fail in one
#: moment, the later ones see that the earlier ones have filled the share, and do not drain at all.
_SPREAD_S = 1.5
_SECOND_LOOK_S = 1.1  # seconds from the drain to the second look: over slurmctld's whole second
#: Seconds that must be left for a drain to begin: the second look, and two answers of slurmctld.
_CONCLUDE_S = _SECOND_LOOK_S + 1.5


class DrainError(Exception):
    """The node could not be drained or undrained; one line that says why.
    nodes: the number of nodes in the partition that has its share; 0: scontrol failed
    """

    def __init__(self, reason: str, nodes: int = 0) -> None:
        super().__init__(reason)
        self.nodes = nodes


@dataclass(frozen=True)
class SlurmNode:
    states: tuple[str, ...]  # the words of its state (IDLE, DRAIN)
    reason: str  # or ""
    since: str = ""  # the time that slurmctld gave the reason, 2026-11-21T01:00:00 in UTC, or ""
    name: str = ""
    partitions: tuple[str, ...] = ("",)  # those that it is in; a node in none is in ""
    author: str = ""  # the user who wrote the reason, or ""
    addresses: tuple[str, ...] = ()  # its address and its host name

    @property
    def is_drained(self) -> bool:
        return any(state.startswith("DRAIN") for state in self.states)

    @property
    def is_ours(self) -> bool:
        return self.reason.startswith(PREFIX)

    @property
    def is_pending(self) -> bool:
        """Whether it is drained by nodeready and has not looked a second time."""
        return self.is_drained and self.reason.startswith(PENDING)


def parse(text: str) -> SlurmNode:
    """The node in ``scontrol show node NAME``. Raises DrainError for a text without a state."""
    state = re.search(r"^ +State=(\S+)", text, re.M)
    if state is None:
        raise DrainError(f"scontrol show node makes no sense: {_line(text) or 'it said nothing'}")
    # Flags stand behind a word: DOWN*+DRAIN is DOWN and DRAIN.
    words = tuple(re.sub(r"[^A-Z_]", "", word) for word in state[1].upper().split("+"))
    reason = re.search(r"^ +Reason=(.*?)(?: \[([^\[\]]*)@([^\[\]@]*)\])? *$", text, re.M)
    name = (re.match(r"NodeName=(\S+)", text) or ["", ""])[1]
    partitions = re.search(r"^ +Partitions=(\S*)", text, re.M)
    texts = reason.groups() if reason else ("", "", "")
    reason_text, author, since = (text or "" for text in texts)
    members = tuple((partitions[1] if partitions else "").split(","))
    addresses = tuple(re.findall(r" Node(?:Addr|HostName)=(\S+)", text))
    return SlurmNode(words, reason_text, since, name, members, author, addresses)


def parse_all(text: str) -> dict[str, SlurmNode]:
    """Name -> node, of ``scontrol show node``. Raises DrainError as `parse`."""
    nodes = map(parse, re.split(r"\n(?=NodeName=)", text))
    return {node.name: node for node in nodes}


def reason_of(reasons: Sequence[str]) -> str:
    """The reason for these lines (`NodeVerdict.costed_reasons`), in one short line of ASCII."""
    suffix = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    text = sanitise(reasons[0]) if reasons else "not ready"
    text = "".join(char if " " <= char <= "~" else "?" for char in text)
    return f"{PREFIX} {text[: _REASON_LENGTH - len(PREFIX) - len(suffix) - 1]}{suffix}"


def _reason_key(reason: str) -> tuple[str, ...]:
    """The check that a reason of nodeready names, the words before it, and how many follow."""
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
    if node.is_drained and not node.is_pending:
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


def excess(this: SlurmNode, nodes: Iterable[SlurmNode], maximum: str) -> DrainError | None:
    """Why this node may not be drained beside those that nodeready has drained; None: it may.

    this:    not drained yet, or pending: then the pending nodes that come after it do not count
    maximum: `gate_drain_max`, which holds in each partition of the node
    """
    listed = list(nodes)
    turn = (this.since, this.name)
    for partition in this.partitions:
        members = [node for node in listed if partition in node.partitions]
        drained = sum(
            node.is_drained and node.is_ours and node.name != this.name
            and not (this.is_pending and node.is_pending and (node.since, node.name) > turn)
            for node in members
        )  # fmt: skip
        limit = _limit(maximum, len(members))
        if drained >= limit:
            # Not the number of now: some of these drains may be pending and undone in a second.
            reason = (
                f"{limit} or more of {len(members)} nodes of {partition or 'no partition'} are "
                f"drained by nodeready, and gate_drain_max is {maximum}"
            )
            return DrainError(sanitise(reason), len(members))
    return None


def _limit(maximum: str, nodes: int) -> int:
    """The maximum for this number of nodes. A share is rounded down, and is at least one node."""
    return max(1, nodes * int(maximum[:-1]) // 100) if maximum.endswith("%") else int(maximum)


def drain_or_undrain(
    reasons: Sequence[str],
    go: bool,
    maximum: str,
    deadline: float,
    before_drain: Callable[[], object] = lambda: None,
) -> str:
    """Drain or undrain the node in Slurm. Returns the change as a line for the log, or "".

    reasons:      why the node is not ready
    maximum:      `gate_drain_max`
    deadline:     time.monotonic() at which slurmctld must have answered
    before_drain: called before the node is drained for good; not if it is drained already

    Raises DrainError.
    """
    name = name_of(os.environ, os.uname().nodename)
    node = parse(_scontrol(["show", "node", name], deadline))
    words = decide(node, "" if go else reason_of(reasons))
    if "state=drain" in words and not _may_stay_drained(node, name, words, maximum, deadline):
        return ""
    if words:
        if "state=drain" in words:
            before_drain()
        _scontrol(["update", f"nodename={name}", *words], deadline)
    return " ".join((name, *words)) if words else ""


def _may_stay_drained(
    node: SlurmNode, name: str, words: Sequence[str], maximum: str, deadline: float
) -> bool:
    """Drain the node with a pending reason, and look again. Returns False if the drain is not
    pending any more: a person, or another run, has decided. Raises DrainError if the node may not
    be drained; then it is not.
    node:  as Slurm showed it
    words: of the final update
    """
    if not node.is_pending:
        time.sleep(random.uniform(0, _SPREAD_S))
        nodes = parse_all(_scontrol(["show", "node"], deadline))
        if problem := excess(nodes.get(name, node), nodes.values(), maximum):
            raise problem
        if deadline - time.monotonic() < _CONCLUDE_S:
            raise DrainError("no time left for scontrol update")
        state, reason = words
        pending = reason.replace(f"{PREFIX} ", PENDING, 1)
        _scontrol(["update", f"nodename={name}", state, pending], deadline)
    time.sleep(_SECOND_LOOK_S)
    nodes = parse_all(_scontrol(["show", "node"], deadline))
    this = nodes.get(name, node)
    if not this.is_pending:
        return False
    if problem := excess(this, nodes.values(), maximum):
        _scontrol(["update", f"nodename={name}", "state=undrain"], deadline)
        raise problem
    return True


def _scontrol(words: list[str], deadline: float) -> str:
    """Run scontrol; returns its output. Raises DrainError."""
    return ask_slurm(["scontrol", *words], deadline)


def ask_slurm(argv: list[str], deadline: float) -> str:
    """Run one of Slurm's tools; returns its output. Raises DrainError."""
    remaining_s, shown = min(SCONTROL_S, deadline - time.monotonic()), " ".join(argv[:2])
    if remaining_s <= 0:
        raise DrainError(f"no time left for {shown}")
    # Times that sort, also when the clocks go back.
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    try:
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=remaining_s, check=False,
            cwd="/", env={**environment, "PATH": search_path()},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DrainError(f"{shown} gave no answer in {remaining_s:.0f} s") from None
    except OSError as error:
        raise DrainError(f"{argv[0]}: {error.strerror}") from None
    output, errors = (text.decode("utf-8", "replace") for text in (process.stdout, process.stderr))
    if process.returncode:
        reason = _line(errors) or _line(output) or f"status {process.returncode}"
        raise DrainError(f"{shown}: {reason}")
    return output


def _line(text: str) -> str:
    """The first line that is not empty, safe to show."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sanitise(lines[0], 160) if lines else ""


def update_slurm(
    verdict: NodeVerdict,
    maximum: str,
    deadline: float,
    before_drain: Callable[[], object] = lambda: None,
    trusted_s: float = 0.0,
) -> str:
    """Drain or undrain this node by the verdict; log the change, and keep a hold, on the node.

    maximum, deadline, before_drain: as for `drain_or_undrain`
    trusted_s: minimum seconds for which the share that was filled then is not asked for again

    Returns why the node stays as it is, or "".
    """
    hold = None if verdict.go else read_hold()
    if hold is None or not hold.is_valid(time.time(), verdict.policy_digest, trusted_s):
        hold = None
        try:
            update = drain_or_undrain(
                verdict.costed_reasons, verdict.go, maximum, deadline, before_drain
            )
        except DrainError as error:
            hold = Hold(int(time.time()), error.nodes, verdict.policy_digest, str(error))
        else:
            if update:
                syslog.syslog(syslog.LOG_NOTICE, f"nodeready: scontrol update {update}")
        keep_hold(None if verdict.go else hold)
    if hold is None:
        return ""
    if verdict.go:
        syslog.syslog(syslog.LOG_WARNING, f"nodeready: {hold.reason}")
        return hold.reason
    words = f"not drained: {hold.reason}"
    first = reason_of(verdict.costed_reasons).replace(PREFIX, "not ready:", 1)
    syslog.syslog(syslog.LOG_ERR, f"nodeready: {words}; {first}")
    return words


# --- The hold: why the node stays in service although it is not ready. A boot removes it.


def read_hold() -> Hold | None:
    """The hold of this node; None: the node has no hold."""
    try:
        with open(HELD, encoding="utf-8", errors="replace") as file:
            return Hold.parse(file.readline())
    except OSError:
        return None


def keep_hold(hold: Hold | None) -> None:
    """Write the hold, or remove it. A full disk does not keep the node from being drained."""
    from nodeready.core.files import make_directory, write_atomically

    path = Path(HELD)
    with contextlib.suppress(OSError):
        if hold is None:
            path.unlink(missing_ok=True)
        else:
            make_directory(path.parent, 0o755)
            write_atomically(path, [hold.line()], 0o644, keep_mode=False)


# --- The evidence that a node keeps of itself before it is drained.

SCHEMA = "nodeready.agent-incident/1"
#: The incidents of this node. Each is a directory named by its time, so the oldest sorts first.
INCIDENTS = "/var/lib/nodeready/incidents"
MAX_INCIDENTS = 5  # incidents that are oldest_first
#: Seconds to keep an incident, and the part of them for the stacks. The job still runs: where it
#: uses every core, the lowest priority leaves a few hundredths of one.
LIMIT_S, STACKS_S = 40, 30
#: Maximum bytes of the trace, and maximum lines and bytes of the kernel's log.
_TRACE_BYTES, _KERNEL_LINES, _KERNEL_BYTES = 4 << 20, 200, 256 << 10
_RECORD_BYTES = 8192  # bytes of one record of /dev/kmsg (Linux: PRINTK_MESSAGE_MAX and its prefix)


def keep_evidence(reasons: Sequence[str], results: Iterable[Result]) -> None:
    """Start to keep an incident in a fork; returns at once, and nothing waits for the fork.

    reasons: why the node is drained
    results: of the audit
    """
    from nodeready.agent.runtime import ForkedWorker

    def work(send: object) -> None:
        os.setsid()
        os.nice(19)
        write_incident(reasons, results, Path(INCIDENTS))

    with contextlib.suppress(OSError):
        ForkedWorker(work, LIMIT_S)


def write_incident(
    reasons: Sequence[str],
    results: Iterable[Result],
    incidents: Path,
    leftovers: Sequence[Mapping[str, object]] = (),
) -> Path:
    """Write an incident in a new directory below ``incidents``; remove all but `MAX_INCIDENTS`.
    leftovers: of ended jobs, in the place of the stacks
    Returns the directory. Raises OSError; PermissionError if another user may write to it.
    """
    from nodeready.core.files import make_directory, write_atomically

    make_directory(incidents, 0o700)
    status = os.lstat(incidents)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(1, "another user may write to it", str(incidents))
    path = incidents / f"{utc_now().replace(':', '').replace('-', '')}-{os.getpid()}"
    make_directory(path, 0o700)
    names = ("check", "status", "severity", "actions", "actual", "expected", "source")
    bad = sorted((result for result in results if result.bad), key=lambda result: result.rank)
    failing = [{name: getattr(result, name) for name in names} for result in bad]
    identity = {"schema": SCHEMA, "node": os.uname().nodename, "taken": utc_now()}
    data: dict[str, Any] = {**identity, "reasons": list(reasons), "results": failing}
    data |= {"leftovers": list(leftovers)} if leftovers else {}
    text = json.dumps(redacted(data), indent=1)
    write_atomically(path / "incident.json", [text, "\n"], 0o600)
    write_atomically(path / "kernel.txt", (f"{row}\n" for row in _kernel_log()), 0o600)
    oldest_first = sorted(entry for entry in incidents.iterdir() if entry.is_dir())
    for incident in oldest_first[:-MAX_INCIDENTS]:
        shutil.rmtree(incident, ignore_errors=True)
    if leftovers:
        return path
    # The stacks are last, because they take seconds.
    name, trace_text = _stacks_file()
    write_atomically(path / name, trace_text, 0o600)
    return path


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
    from nodeready.agent import asking
    from nodeready.agent.local import Local
    from nodeready.agent.stacks import program
    from nodeready.core.base import ProbeError

    transport = Local()
    (node,) = transport.nodes
    config = program.StacksConfig(asking.new_nonce(), transport.tag, STACKS_S, samples=1)
    conversation = asking.once(asking.request(node, program.__name__, config))
    deadline = time.monotonic() + STACKS_S + 1
    outcomes = asking.collect(transport, {node: conversation}, deadline=deadline)
    answer = asking.answer_of(outcomes[node])
    try:
        trace = program.unpack(answer.stdout, config.nonce)
    except ProbeError as problem:
        return "no-stacks.txt", iter([f"{answer.gap.reason if answer.gap else problem.reason}\n"])
    text = json.dumps(redacted(trace), separators=(",", ":"))
    if len(text) > _TRACE_BYTES:
        return "no-stacks.txt", iter([f"the stacks are too large: {len(text)} bytes\n"])
    return "trace-this-node.json", iter([text, "\n"])
