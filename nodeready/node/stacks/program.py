"""The program on the node: find the ranks, and the stack and state of each; touch none.

The kernel's facts come first; then py-spy, which reads a process's memory and stops nothing. A
stack that is not there in time is the error of its sample. The answer is one line (`pack`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import re
import signal
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nodeready.node.cores import gdb
from nodeready.node.runtime import ProcessSupervisor
from nodeready.node.stacks import below, beside, links, processes, py_spy, ranks, waits
from nodeready.node.stacks.ranks import NO_TIME, OTHERS_TOOK, Identity, Rank, StackTable, Target
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError

# --- The answer: the trace as one line, ``NONCE trace BASE64`` (gzipped JSON), and back.

#: The most that a node's answer may be when it is unpacked, and what it may take as objects.
MOST_BYTES, MOST_COST = 64 << 20, 192 << 20
_GZIP = 31  # wbits of zlib for a gzip header and trailer


class NoTrace(ProbeError):
    """A node printed no trace; one line."""


def pack(trace: Mapping[str, Any]) -> str:
    """The trace, without the nonce: ``trace BASE64``."""
    text = json.dumps(trace, separators=(",", ":")).encode("ascii")
    squeeze = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    data = squeeze.compress(text) + squeeze.flush()
    return f"trace {base64.b64encode(data).decode('ascii')}"


def unpack(text: str, nonce: str) -> Any:
    """The trace in what a node printed, whatever else it printed, still to be checked.

    Raises NoTrace when there is none, and DecodeError.
    """
    mark = f"{nonce} trace "
    at = text.rfind(mark)
    if at < 0:
        raise NoTrace("no answer")
    word = text[at + len(mark) :].partition("\n")[0].strip()
    return wire.load_json(wire.unpack(word, MOST_BYTES), MOST_COST)


# --- The program.

SCHEMA = "nodeready.trace/1"
#: Of the run's time this is kept for the answer.
_ANSWER_S = 1.0
#: One py-spy at a time for so many cores: a node that computes has other work.
_CORES_PER_LOOK = 8
#: The most that an answer is on its way, in characters; the most frames in all its stacks, and
#: characters in all its frames. More than that, and less is told of whoever has most of it.
_MOST_ANSWER, _MOST_FRAMES, _MOST_TEXT = 4 * 1024 * 1024, 1_000_000, 8 << 20
#: Bytes of an answer beside what `_parts` counts.
_HEAD = 1 << 20
#: Samples of all processes of a node that an answer can have.
_MOST_SAMPLES = 8000
#: What is told of a process: its main stack, those of its other threads, and what is beside them
#: (the processes below it, its variables, its witnesses); and what is said of a level.
_LEVELS = (
    (True, True, True, ""),
    (True, True, False, "what is below and beside it is left out: there is too much"),
    (True, False, False, "the stacks of its other threads are left out: there are too many"),
    (False, False, False, ""),
)
#: Seconds for the stacks of all processes below the ranks, at least; else as long as the ranks'.
_BELOW_S = 1.0
_NO_TIME_BELOW = "no time left: the looks at others below the ranks took it"
#: Characters of all frames of one owner's that are kept until the answer is made.
_MOST_KEPT = 64 << 20
_TOO_LARGE = "the stacks of its owner's processes are too large"


@dataclass(frozen=True)
class Config:
    """What to look at, and how.

    nonce, tag, limit_s: as of every program of ours that travels (`nodeready.node.payload`)
    job, pids, match:    see `ranks.Selection`
    user:                only this user's processes; "": everybody's
    owner:               the user whose job it is, whoever else claims it; "": nothing tells
    locals:              take variables of the ranks' innermost calls
    dump:                have the ranks write their flight recorders
    ras:                 ask NCCL's RAS port also where asking is known to have crashed jobs
    part:                why not all of a job is asked for, one line; "": all is
    check:               tell what each rank has for whoever debugs it
    samples, interval_s: how often to look, and how many seconds from one to the next
    longer_s:            seconds to one more sample where the others cannot tell a job that is
                         slow from one that hangs; 0: none
    native:              only take the native stacks of these processes, one after the other
    py_spy:              its path; where it is not, whichever the session has
    """

    nonce: str
    tag: str
    limit_s: int
    job: str = ""
    pids: tuple[int, ...] = ()
    match: str = ""
    samples: int = 2
    interval_s: float = 2.0
    native: tuple[int, ...] = ()
    py_spy: str = "/usr/local/bin/py-spy"
    user: str = ""
    locals: bool = False
    dump: bool = False
    ras: bool = False
    part: str = ""
    check: bool = False
    owner: str = ""
    longer_s: float = 0.0


def main(config: Config) -> None:
    """Print the trace of this node."""
    supervisor = ProcessSupervisor(config.tag, max(1.0, config.limit_s - _ANSWER_S))
    supervisor.end_on_signals()
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    trace: dict[str, Any] = {
        "schema": SCHEMA,
        "node": os.uname().nodename,
        "started": began,
        "interval_s": config.interval_s,
        "error": "",
        "frames": [],
        "stacks": [],
        "processes": [],
        "instead": [],
        "witnesses": {},
        "part": config.part,
    }
    with supervisor:
        try:
            targets, instead, trace["error"] = _look(supervisor, config, trace)
            line = _packed(trace, targets, instead)
        except re.error as problem:
            line = pack({**trace, "error": f"no regular expression: {problem}"})
        except Exception as problem:  # noqa: BLE001
            place = traceback.extract_tb(problem.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            error = f"{type(problem).__name__}: {problem} ({where})"[:300]
            line = pack({**trace, "error": error})
        print(f"{config.nonce} {line}", flush=True)


def _packed(trace: dict[str, Any], targets: Sequence[Target], instead: Sequence[str]) -> str:
    """The answer, with as much as fits: less is told of the owner of whose processes most is."""
    levels = dict.fromkeys((target.owner for target in targets), 0)
    sizes: dict[str, tuple[float, ...]] = {}
    while True:
        line = ""
        if len(levels) > 1:
            of = {owner: [one for one in targets if one.owner == owner] for owner in levels}
            sizes |= {o: _sizes(trace, of[o], levels[o]) for o in levels if o not in sizes}
        if all(sum(column) <= 1 for column in zip(*sizes.values())):
            stacks = _stacks(targets, levels)
            if max(_parts(stacks)) <= 1:
                line = pack({**trace, **stacks, "instead": instead})
        if line and len(line) <= _MOST_ANSWER:
            return line
        more = [owner for owner, level in levels.items() if level + 1 < len(_LEVELS)]
        if not more:
            return line or pack({**trace, **_stacks(targets, levels), "instead": instead})
        largest = max(more, key=lambda owner: max(sizes.get(owner, (0.0,))))
        levels[largest] += 1
        sizes.pop(largest, None)
        for target in targets:
            if target.owner == largest:
                target.add_note(_LEVELS[levels[largest]][-1])


def _stacks(targets: Sequence[Target], levels: Mapping[str, int]) -> dict[str, Any]:
    """The part of the trace that these processes make."""
    table = StackTable()
    found = []
    for target in targets:
        main, threads, beside, _ = _LEVELS[levels[target.owner]]
        row = target.plain(table, main, threads)
        if beside:
            row["below"] = below.plain(target, table)
            row["locals"] = target.dumps[-1].locals if target.dumps else ()
            row["witnesses"] = target.witnesses
        found.append(row)
    return {"frames": table.frames, "stacks": table.stacks, "processes": found}


def _parts(stacks: Mapping[str, Any]) -> tuple[float, ...]:
    """How much of what an answer can have these are: frames, characters, and, where that is not
    too much already, the text, and what it takes as objects (`wire.cost`)."""
    names = sum(len(function) + len(file) for function, file, _ in stacks["frames"])
    rows = [
        row
        for one in stacks["processes"]
        for sample in one["samples"]
        for row in sample["threads"]
    ]
    names += sum(len(name) for name, _ in rows)
    # The text of what is beside the stacks is bounded where it is made, and counted below.
    frames = sum(map(len, stacks["stacks"])) + len(rows)
    parts = (frames / _MOST_FRAMES, names / _MOST_TEXT)
    if max(parts) > 1:
        return (*parts, *parts)
    text = json.dumps(stacks, separators=(",", ":"))
    return (*parts, len(text) / (MOST_BYTES - _HEAD), wire.cost(text) / (MOST_COST - _HEAD))


def _sizes(trace: dict[str, Any], targets: Sequence[Target], level: int) -> tuple[float, ...]:
    """How much of an answer one owner's processes are: by `_parts`, and its length."""
    stacks = _stacks(targets, {targets[0].owner: level})
    parts = _parts(stacks)
    length = len(pack({**trace, **stacks})) if max(parts) <= 1 else _MOST_ANSWER
    return (*parts, length / _MOST_ANSWER)


def _look(
    supervisor: ProcessSupervisor, config: Config, told: dict[str, Any]
) -> tuple[list[Target], list[str], str]:
    """The ranks with what was seen of them; where there is none, the processes to show instead;
    and why that is not all.

    told: of the trace; gets the witnesses of the node, and the seconds between samples
    """
    # Finding the ranks must leave time for looking at them.
    seen, left_out = processes.scan(_until(supervisor, supervisor.left_s / 2))
    problem = f"{left_out} processes were not looked at: no time left" if left_out else ""
    selection = ranks.Selection(
        config.job,
        config.native or config.pids,
        config.match,
        _uid(supervisor, config.user, {process.uid for process in seen}),
        _uid(supervisor, config.owner, {process.uid for process in seen}),
    )
    matched: set[int] | None = None
    if config.match and not selection.pids:
        matched, slow = _matched(supervisor, seen, re.compile(config.match))
        problem = "; ".join(filter(None, (problem, slow)))
    found = ranks.select(seen, selection, os.getpid(), matched)
    if not selection.pids:
        found = _with_spawned(supervisor, config, seen, found)
    if not (found or selection.pids or config.match):
        found = ranks.launchers(seen, selection, os.getpid())
    most = _MOST_SAMPLES // max(1, config.samples)
    if len(found) > most:
        problem = "; ".join(filter(None, (problem, f"{len(found) - most} ranks are left out")))
        turns = processes.by_owner(
            range(len(found)), {at: rank.turn for at, rank in enumerate(found)}
        )
        found = [found[at] for at in sorted(turns[:most])]
    targets = [Target(rank) for rank in found]
    if not targets:
        return [], _instead(supervisor, ranks.instead(seen, os.getpid())), problem
    if config.native:
        _native(supervisor, py_spy.find(config.py_spy), targets)
    else:
        told["witnesses"], told["interval_s"] = _capture(supervisor, config, targets, seen)
    _observe(supervisor, targets)
    uids = {target.rank.process.uid for target in targets}
    names = _names(supervisor, {uid for uid in uids if uid is not None})
    for target in targets:
        uid = target.rank.process.uid
        target.user = "" if uid is None else names[uid]
    return targets, [], problem


def _with_spawned(
    supervisor: ProcessSupervisor,
    config: Config,
    seen: Sequence[processes.Process],
    found: list[Rank],
) -> list[Rank]:
    """The ranks with those that no launcher has numbered, in place of who has started them."""
    ours, path = ranks.ours(seen, os.getpid()), py_spy.find(config.py_spy)
    if not found and not (config.job or config.match):
        theirs = seen
        if config.user:
            uid = _uid(supervisor, config.user, {process.uid for process in seen})
            theirs = [process for process in seen if process.uid == uid]
        found = below.find_spawned(supervisor, path, theirs, ours)
    if not found and (parent := re.fullmatch(below.JOB, config.job)):
        found = [Rank(one, Identity()) for one in seen if str(one.pid) == parent[1]]
    made: list[Rank] = []
    for rank in below.numbered(found, _until(supervisor, supervisor.left_s / 4)):
        of = []
        if rank.identity.rank is None and not (rank.stranger or ranks.trains(rank.process)):
            of = below.started_by(supervisor, path, rank.process, seen)
        made += of or [rank]
    return made


def _capture(
    supervisor: ProcessSupervisor,
    config: Config,
    targets: Sequence[Target],
    seen: Sequence[processes.Process],
) -> tuple[dict[str, Any], float]:
    """Take all samples of the targets, with what is below and beside them; the node's witnesses,
    and the seconds from one sample to the next, on average.

    seen: all processes, as they were found
    """
    path = py_spy.find(config.py_spy)
    asked = beside.Witnesses(
        supervisor, targets, ras=config.ras, dump=config.dump, check=config.check
    )
    due = time.monotonic()
    began, samples, number = due, max(1, config.samples), 0
    kept: Counter[str] = Counter()
    while True:
        time.sleep(max(0.0, min(due - time.monotonic(), supervisor.left_s)))
        _observe_sample(supervisor, targets)
        last = number >= samples - 1
        how = py_spy.LOCALS if last and config.locals else py_spy.PLAIN
        limit_s = supervisor.left_s / max(1, samples - number)
        dumped_s = _dump(supervisor, targets, _Looks(path, kept, limit_s, how=how))
        if number == 0:
            _observe_threads(supervisor, targets)
            asked.between()
        longer = number == samples - 1 and 0 < 2 * config.longer_s < supervisor.left_s
        if last and not (longer and _may_be_slow(targets)):
            break
        due += config.longer_s if last else config.interval_s
        number += 1
    seconds = due - began
    calls = _observe_below(supervisor, targets, seen, ranks.ours(seen, os.getpid()))
    links.observe(targets, calls, _until(supervisor, supervisor.left_s / 2))
    for target in targets:
        target.tell_interpreter_lock(seconds)
    until = time.monotonic() + max(_BELOW_S, dumped_s)
    looks = _Looks(path, kept, supervisor.left_s / 2, until)
    _dump(supervisor, below.in_order(targets), looks)
    return asked.end(), seconds / number if number else config.interval_s


def _may_be_slow(targets: Sequence[Target]) -> bool:
    """Whether a longer look could tell more: all stand where they stood, and nothing holds one.

    A job whose step is longer than the look stands still as well.
    """
    live = [target for target in targets if target.facts and not target.rank.stranger]
    if any(target.refusal(0) or target.facts[-1].state == "D" for target in live):
        return False
    pythons = [target for target in live if target.rank.process.python]
    stacks = [[dump.main for dump in target.dumps] for target in pythons]
    still = [len(mains) > 1 and mains[0] is not None and len({*mains}) == 1 for mains in stacks]
    return bool(still) and all(still)


def _matched(
    supervisor: ProcessSupervisor, seen: Sequence[processes.Process], pattern: re.Pattern[str]
) -> tuple[set[int], str]:
    """The processes in whose command lines the expression is found, and how many were not asked.

    A command line is its user's choice, and an expression may take hours for some: a fork asks.
    """
    commands = {process.pid: process.command for process in seen}
    found = processes.each(
        lambda pid: pattern.search(commands[pid]) is not None,
        list(commands),
        _until(supervisor, supervisor.left_s / 2),
        {process.pid: process.uid for process in seen},
    )
    slow = sum(found.get(pid, processes.HANGS) is processes.HANGS for pid in commands)
    why = f"--match takes too long for {slow} command lines" if slow else ""
    return {pid for pid, hit in found.items() if hit is True}, why


def _uid(supervisor: ProcessSupervisor, user: str, uids: set[int | None]) -> int | None:
    """The number of this user, whose name a process with one of these numbers has; None: nobody's
    in particular, -1: no process is the user's."""
    if not user:
        return None
    names = _names(supervisor, {uid for uid in uids if uid is not None})
    return next((uid for uid, name in names.items() if user in (name, str(uid))), -1)


def _until(supervisor: ProcessSupervisor, seconds: float) -> float:
    return min(supervisor.deadline, time.monotonic() + seconds)


def _observe(supervisor: ProcessSupervisor, targets: Sequence[Target]) -> None:
    """Add the present facts of all targets."""
    seen = processes.observe(
        [target.pid for target in targets],
        _until(supervisor, supervisor.left_s / 2),
        {target.pid: target.thread for target in targets},
    )
    for target in targets:
        if target.pid in seen:
            target.add_facts(seen[target.pid])


def _observe_sample(supervisor: ProcessSupervisor, targets: Sequence[Target]) -> None:
    """The kernel's facts of one sample, before any look that could change them."""
    _observe(supervisor, targets)
    for target in targets:
        now = target.facts[-1] if target.facts else None
        target.cpu_s.append(now.cpu_s if now else target.rank.process.cpu_s)
        target.switches.append(now.switches if now else 0)
        target.main_cpu_s.append(now.main_cpu_s if now else 0.0)
        target.calls.append(now.calls if now else None)


def _observe_threads(supervisor: ProcessSupervisor, targets: Sequence[Target]) -> None:
    """Take the first facts again of those whose dump has told that another thread counts."""
    others = [target for target in targets if target.thread]
    _observe(supervisor, others)
    for target in others:
        if target.facts:
            target.switches[-1] = target.facts[-1].switches
            target.main_cpu_s[-1] = target.facts[-1].main_cpu_s


def _observe_below(
    supervisor: ProcessSupervisor,
    targets: Sequence[Target],
    seen: Sequence[processes.Process],
    ours: set[int],
) -> dict[int, waits.Call]:
    """The processes below the targets, their facts, and what everybody waits for; their calls."""
    below.find(targets, seen, ours, _until(supervisor, supervisor.left_s / 2))
    others = [one for target in targets for one in target.below]
    _observe(supervisor, others)
    for one in others:
        if one.facts:
            one.cpu_s.append(one.facts[-1].cpu_s)
    whose: dict[int | None, list[int]] = {}
    for process in seen:
        whose.setdefault(process.uid, []).append(process.pid)
    near: dict[int, Sequence[int]] = {}
    calls: dict[int, waits.Call] = {}
    for target in targets:
        family = [target.pid, *[one.pid for one in target.below], target.rank.process.parent]
        mates = [*family, *whose.get(target.rank.process.uid, ())]
        near.update(dict.fromkeys(family[:-1], mates))
    looked_at = [*targets, *others]
    may = {one.pid: one.thread for one in looked_at if one.facts and not one.rank.stranger}
    found = waits.observe(may, near, _until(supervisor, supervisor.left_s / 2))
    for one in looked_at:
        if one.pid in found:
            call, one.waits_on = found[one.pid]
            calls[one.pid] = call
            one.timed_lock = call.verb == "futex" and call.timed
    return calls


@dataclass(frozen=True)
class _Looks:
    """How py-spy looks at some processes.

    path:    py-spy's
    kept:    owner -> characters of all frames of the owner's processes so far; it is counted on
    limit_s: seconds for all of them, where they are of several owners
    until:   a moment of time.monotonic() after which no look is begun
    how:     see `py_spy.take`
    """

    path: str
    kept: Counter[str]
    limit_s: float
    until: float = float("inf")
    how: str = py_spy.PLAIN


def _dump(supervisor: ProcessSupervisor, targets: Sequence[Target], looks: _Looks) -> float:
    """py-spy's dump of each target, some side by side; the seconds that it took."""
    began = time.monotonic()

    def dump(target: Target) -> py_spy.Dump:
        why = target.refusal(os.geteuid())
        target.add_note(why)
        if not why and looks.until < time.monotonic():
            why = _NO_TIME_BELOW
        if why or supervisor.deadline < time.monotonic():
            return py_spy.Dump(error=why or NO_TIME)
        return py_spy.take(supervisor, looks.path, target.pid, supervisor.left_s, looks.how)

    workers = max(1, (os.cpu_count() or 1) // _CORES_PER_LOOK)
    # The last look may take all of its own time.
    given_s = max(looks.limit_s / 2, looks.limit_s - py_spy.LIMIT_S)
    turns = ranks.Turns([target.rank for target in targets], given_s * workers)
    found: dict[int, py_spy.Dump] = {}

    def work() -> None:
        while next_ := turns.take():
            place, owner = next_
            started = time.monotonic()
            dumped = dump(targets[place])
            looks.kept[owner] += dumped.characters
            large = looks.kept[owner] > _MOST_KEPT
            found[place] = py_spy.Dump(error=_TOO_LARGE) if large else dumped
            turns.back(owner, time.monotonic() - started)

    with ThreadPoolExecutor(workers) as pool:
        for one in [pool.submit(work) for _ in range(workers)]:
            one.result()
    for place, target in enumerate(targets):
        target.dumps.append(found.get(place, py_spy.Dump(error=OTHERS_TOOK)))
    return time.monotonic() - began


def _native(supervisor: ProcessSupervisor, path: str, targets: Sequence[Target]) -> None:
    """The native stacks, one after the other: each reads the symbols of all libraries."""
    for target in targets:
        _observe(supervisor, [target])
        target.cpu_s.append(target.facts[-1].cpu_s if target.facts else 0.0)
        why = target.refusal(os.geteuid(), native=True)
        if not why and supervisor.deadline < time.monotonic():
            why = NO_TIME
        if not why:
            target.native = py_spy.take(
                supervisor, path, target.pid, supervisor.left_s, py_spy.NATIVE
            )
            why = target.native.error
            stopped = why == py_spy.HUNG
            if why in (py_spy.ENDED_INTERPRETER, py_spy.NOT_PYTHON):
                # A second tool, one after the other: both stop the process.
                found, why, stopped = gdb.live_stack(supervisor, target.pid, supervisor.left_s)
                target.native = py_spy.Dump(tuple(found) or None, error=why)
            if stopped:
                _set_going(supervisor, target)
        target.add_note(f"no native stack: {why}" if why else "")


def _set_going(supervisor: ProcessSupervisor, target: Target) -> None:
    """Send SIGCONT to a target that a killed py-spy may have left a pending SIGSTOP.

    That signal comes only when the target leaves the kernel. A target that was stopped before is
    never unwound.
    """
    _observe(supervisor, [target])
    if not target.refusal(0).startswith(("ended", "traced")):
        with contextlib.suppress(OSError):
            os.kill(target.pid, signal.SIGCONT)


def _names(supervisor: ProcessSupervisor, uids: Sequence[int] | set[int]) -> dict[int, str]:
    """The names of users, asked in a fork: the name service may be a server that hangs."""

    def name(uid: int) -> str:
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    found = processes.each(name, sorted(uids), _until(supervisor, supervisor.left_s / 2))
    return {u: str(u) if found.get(u) in (None, processes.HANGS) else found[u] for u in uids}


def _instead(supervisor: ProcessSupervisor, found: Sequence[processes.Process]) -> list[str]:
    """The processes to show where no rank was found."""
    seen = processes.observe([process.pid for process in found], supervisor.deadline)
    facts = {pid: now for pid, now in seen.items() if now}
    names = _names(supervisor, {now.uid for now in facts.values()})
    return [
        f"{p.command[:100] or p.name} (pid {p.pid}, user {names.get(facts[p.pid].uid, '?')})"
        for p in found
        if p.pid in facts
    ]
