"""The program on the node: find the ranks, and the stack and state of each; touch none.

The kernel's facts come first, then py-spy, which reads a process's memory without a stop. If a
stack is late, its sample has an error. The answer is one line (`pack`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import random
import re
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nodeready.agent.cores import gdb
from nodeready.agent.runtime import ProcessSupervisor, bug_text
from nodeready.agent.stacks import (
    ask_witnesses,
    descendants,
    glances,
    links,
    lock_files,
    processes,
    py_spy,
    ranks,
    system_calls,
    threads,
    waits,
)
from nodeready.agent.stacks.descendants import NO_TIME, OTHERS_TOOK, StackTable, StackTarget
from nodeready.agent.stacks.ranks import JobRank, RankIdentity
from nodeready.core import wire
from nodeready.core.base import ProbeError

# --- The answer: the trace as one line, ``NONCE trace BASE64`` (gzipped JSON), and back.

#: Maximum bytes of a node's unpacked answer, and of its objects in memory.
MAX_BYTES, MAX_COST = 64 << 20, 192 << 20
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
    """The unchecked trace among a node's lines. Raises NoTrace without one, and DecodeError."""
    mark = f"{nonce} trace "
    index = text.rfind(mark)
    if index < 0:
        raise NoTrace("no answer")
    word = text[index + len(mark) :].partition("\n")[0].strip()
    return wire.load_json(wire.unpack(word, MAX_BYTES), MAX_COST)


# --- The program.

Targets = Sequence[StackTarget]
Scan = Sequence[processes.ScannedProcess]
SCHEMA = "nodeready.trace/1"
#: Seconds of the run that are reserved for the answer.
_ANSWER_S = 1.0
#: Cores per running py-spy, because the node also computes.
_CORES_PER_DUMP = 8
#: Maximum characters of an answer; frames in all its stacks; characters in all its frames. Above
#: these, the owner with the largest part of the answer gets less detail.
_MAX_ANSWER, _MAX_FRAMES, _MAX_TEXT = 4 * 1024 * 1024, 1_000_000, 8 << 20
#: Bytes of an answer that `_shares` does not count.
_HEAD = 1 << 20
#: Maximum samples in an answer, over all processes of a node.
_MAX_SAMPLES = 8000
#: Levels of detail: whether the main stack is included; the stacks of other threads; descendants,
#: variables and witnesses; the note of a process at that level.
_LEVELS = (
    (True, True, True, ""),
    (True, True, False, "its descendants and witnesses are left out: the answer is too large"),
    (True, False, False, "the stacks of its other threads are left out: there are too many"),
    (False, False, False, ""),
)
#: Minimum seconds for the stacks of all descendants; they get as many as the ranks' stacks took.
_DESCENDANTS_S = 1.0
#: Seconds without a step after which one more sample tells nothing: few jobs have longer steps.
_STOOD_S = 60.0
#: The beginning of the note on a process whose system calls were not counted.
NO_SYSTEM_CALLS = "no system calls: "
_NO_TIME_LEFT = "no time left: the stacks of other descendants took it"
#: Maximum characters of all frames of one owner that are kept for the answer.
_MAX_CHARACTERS = 64 << 20
_TOO_LARGE = "the stacks of its owner's processes are too large"


@dataclass(frozen=True)
class StacksConfig:
    """Which processes to probe, and how."""

    nonce: str  # as of every program that is sent to a node (`nodeready.agent.payload`)
    tag: str  # likewise
    limit_s: int  # likewise
    job: str = ""  # see `ranks.Selection`
    pids: tuple[int, ...] = ()  # likewise
    match: str = ""  # likewise
    # number of samples, and seconds from one to the next; 0 samples: only find the ranks
    samples: int = 2
    interval_s: float = 2.0  # likewise
    native: tuple[int, ...] = ()  # only take the native stacks of these processes, one at a time
    native_threads: tuple[int, ...] = ()  # and those of these threads of theirs
    # only count the system calls of the processes `pids`, for these seconds each; 0: do not
    syscalls_s: float = 0.0
    # its path; if that is missing, the session's py-spy is used
    py_spy: str = "/usr/local/bin/py-spy"
    user: str = ""  # only this user's processes; "": those of all users
    locals: bool = False  # take variables of the ranks' innermost calls
    dump: bool = False  # have the ranks write their flight recorders
    ras: bool = False  # query NCCL's RAS port even if a query is known to have crashed jobs
    part: str = ""  # why only a part of the job is requested, one line; "": all of it is
    check: bool = False  # read each rank's settings for debugging
    owner: str = ""  # see `ranks.Selection`
    is_elsewhere: bool = False  # likewise
    parts: tuple[str, ...] = ()  # numbers of the further parts of a heterogeneous job
    # seconds to one more sample, if the first ones cannot tell a slow job from a hung one; 0: none
    longer_s: float = 0.0
    # the samples lie this many seconds apart altogether, and glances between them (`glances`) tell
    # how often each rank waits; 0: none
    slow_s: float = 0.0


def main(config: StacksConfig) -> None:
    """Print the trace of this node."""
    supervisor = ProcessSupervisor(config.tag, max(1.0, config.limit_s - _ANSWER_S))
    supervisor.end_on_signals()
    if config.slow_s:
        # The job's own processes go first.
        os.nice(19)
    trace: dict[str, Any] = {
        "schema": SCHEMA,
        "node": os.uname().nodename,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "interval_s": config.interval_s,
        "error": "",
        "frames": [],
        "stacks": [],
        "processes": [],
        "instead": [],
        "witnesses": {},
        "part": config.part,
        "uptime_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 2),
    }
    with supervisor:
        try:
            targets, instead, trace["error"] = _snapshot(supervisor, config, trace)
            line = _pack_within_limits(trace, targets, instead)
        except re.error as problem:
            line = pack({**trace, "error": f"no regular expression: {problem}"})
        except Exception as problem:  # noqa: BLE001
            line = pack({**trace, "error": bug_text(problem)})
        print(f"{config.nonce} {line}", flush=True)


def _pack_within_limits(trace: dict[str, Any], targets: Targets, instead: Sequence[str]) -> str:
    """The answer with as much detail as fits; the owner with the largest part loses some first."""
    levels = dict.fromkeys((target.owner for target in targets), 0)
    sizes: dict[str, tuple[float, ...]] = {}
    while True:
        line = ""
        if len(levels) > 1:
            for owner in [owner for owner in levels if owner not in sizes]:
                targets_of_owner = [target for target in targets if target.owner == owner]
                sizes[owner] = _owner_shares(trace, targets_of_owner, levels[owner])
        if all(sum(column) <= 1 for column in zip(*sizes.values())):
            stacks = _stacks(targets, levels)
            if max(_shares(stacks)) <= 1:
                line = pack({**trace, **stacks, "instead": instead})
        if line and len(line) <= _MAX_ANSWER:
            return line
        reducible = [owner for owner, level in levels.items() if level + 1 < len(_LEVELS)]
        if not reducible:
            return line or pack({**trace, **_stacks(targets, levels), "instead": instead})
        largest = max(reducible, key=lambda owner: max(sizes.get(owner, (0.0,))))
        levels[largest] += 1
        sizes.pop(largest, None)
        for target in targets:
            if target.owner == largest:
                target.add_note(_LEVELS[levels[largest]][-1])


def _stacks(targets: Targets, levels: Mapping[str, int]) -> dict[str, Any]:
    """The frames, stacks and processes of these targets in the trace."""
    table = StackTable()
    thread_waits: dict[threads.ThreadWait, int] = {}
    rows = []
    for target in targets:
        main, with_threads, with_details, _ = _LEVELS[levels[target.owner]]
        row = target.plain(table, main, with_threads)
        if with_details:
            row["below"] = descendants.plain(target, table)
            row["locals"] = target.dumps[-1].locals if target.dumps else ()
            row["witnesses"] = target.witnesses
            number = thread_waits.setdefault
            rows_of_threads = target.thread_rows
            row["thread_rows"] = [(number(w, len(thread_waits)), n) for w, n in rows_of_threads]
        rows.append(row)
    waits_of_threads = list(map(vars, thread_waits))
    stacks = {"frames": table.frames, "stacks": table.stacks, "processes": rows}
    return {**stacks, "thread_waits": waits_of_threads}


def _shares(stacks: Mapping[str, Any]) -> tuple[float, ...]:
    """The used shares of the maxima: of frames, characters, text, and memory (`wire.cost`). If a
    share of frames or characters is above 1, text and memory are not measured.
    """
    samples = [sample for process in stacks["processes"] for sample in process["samples"]]
    threads = [thread for sample in samples for thread in sample["threads"]]
    names = sum(len(function) + len(file) for function, file, _ in stacks["frames"])
    names += sum(len(name) for name, _ in threads)
    # The texts of the witnesses are limited where they are made, and counted below.
    frames = sum(map(len, stacks["stacks"])) + len(threads)
    parts = (frames / _MAX_FRAMES, names / _MAX_TEXT)
    if max(parts) > 1:
        return (*parts, *parts)
    text = json.dumps(stacks, separators=(",", ":"))
    return (*parts, len(text) / (MAX_BYTES - _HEAD), wire.cost(text) / (MAX_COST - _HEAD))


def _owner_shares(trace: dict[str, Any], targets: Targets, level: int) -> tuple[float, ...]:
    """The shares of an answer that an owner's processes use: `_shares`, then of its length."""
    stacks = _stacks(targets, {targets[0].owner: level})
    parts = _shares(stacks)
    length = len(pack({**trace, **stacks})) if max(parts) <= 1 else _MAX_ANSWER
    return (*parts, length / _MAX_ANSWER)


def _snapshot(
    supervisor: ProcessSupervisor, config: StacksConfig, trace: dict[str, Any]
) -> tuple[list[StackTarget], list[str], str]:
    """The ranks with their observations, the processes to show without ranks, and why the result
    is incomplete. trace: gets the witnesses of the node, and the seconds between samples
    """
    # The search for the ranks must leave time to probe them.
    every_process, left_out = processes.scan(_deadline(supervisor, 2))
    scanned = ranks.with_parts(ranks.with_ray_jobs(every_process), config.job, config.parts)
    problems = [f"{left_out} processes were not looked at: no time left"] if left_out else []
    selection = ranks.Selection(
        config.job,
        config.native or config.pids,
        config.match,
        _uid(supervisor, config.user, scanned),
        _uid(supervisor, config.owner, scanned),
        config.is_elsewhere,
    )
    matched: set[int] | None = None
    if config.match and not selection.pids:
        matched, unmatched = _match_commands(supervisor, scanned, re.compile(config.match))
        if unmatched:
            problems.append(f"--match takes too long for {unmatched} command lines")
    computes = descendants.computes(_deadline(supervisor, 4))
    found_ranks = ranks.select(scanned, selection, os.getpid(), matched, computes)
    if not selection.pids:
        found_ranks = _with_spawned(supervisor, config, scanned, found_ranks)
    if not (found_ranks or selection.pids or config.match or config.is_elsewhere):
        found_ranks = ranks.launchers(scanned, selection, os.getpid())
    max_ranks = _MAX_SAMPLES // max(1, config.samples)
    if len(found_ranks) > max_ranks:
        problems.append(f"{len(found_ranks) - max_ranks} ranks are left out")
        owners = {index: rank.turn for index, rank in enumerate(found_ranks)}
        turns = processes.by_owner(owners, owners)
        found_ranks = [found_ranks[index] for index in sorted(turns[:max_ranks])]
    problem = "; ".join(problems)
    targets = [StackTarget(rank) for rank in found_ranks]
    if not targets:
        return [], _describe(supervisor, ranks.busiest_pythons(scanned, os.getpid())), problem
    if config.native:
        path = py_spy.find(config.py_spy)
        _take_native_stacks(supervisor, path, targets, config.native_threads)
    elif config.syscalls_s:
        _count_system_calls(supervisor, config.syscalls_s, targets, scanned)
    elif config.samples:
        trace["witnesses"], trace["interval_s"] = _capture(supervisor, config, targets, scanned)
    _observe(supervisor, targets)
    names = _user_names(supervisor, {target.rank.process.uid for target in targets})
    for target in targets:
        target.user = names.get(target.rank.process.uid, "")
    return targets, [], problem


def _with_spawned(
    supervisor: ProcessSupervisor, config: StacksConfig, scanned: Scan, found_ranks: list[JobRank]
) -> list[JobRank]:
    """The ranks, with unnumbered ranks in place of the parent that started them."""
    own_pids, path = ranks.own_processes(scanned, os.getpid()), py_spy.find(config.py_spy)
    if not found_ranks and not (config.job or config.match):
        candidates = scanned
        if config.user:
            uid = _uid(supervisor, config.user, scanned)
            candidates = [process for process in scanned if process.uid == uid]
        found_ranks = descendants.find_spawned(supervisor, path, candidates, own_pids)
    if not found_ranks and (parent := re.fullmatch(descendants.JOB, config.job)):
        parents = [process for process in scanned if str(process.pid) == parent[1]]
        found_ranks = [JobRank(process, RankIdentity()) for process in parents]
    deadline = _deadline(supervisor, 4)
    numbered_ranks: list[JobRank] = []
    for rank in descendants.with_ray_ranks(found_ranks, deadline):
        is_unnumbered = rank.identity.rank is None and not rank.stranger
        started = []
        if is_unnumbered and not ranks.is_ray_trainer(rank.process):
            started = descendants.started_by(supervisor, path, rank.process, scanned)
        numbered_ranks += started or [rank]
    return numbered_ranks


def _capture(
    supervisor: ProcessSupervisor, config: StacksConfig, targets: Targets, scanned: Scan
) -> tuple[dict[str, Any], float]:
    """Take all samples of the targets and of their descendants; the node's witnesses, and the
    average seconds between samples. scanned: all processes of the scan
    """
    path = py_spy.find(config.py_spy)
    options = {"ras": config.ras, "dump": config.dump, "check": config.check}
    witnesses = ask_witnesses.Witnesses(supervisor, targets, **options)
    began = since = next_sample = time.monotonic()
    observer = glances.Glances(targets, config.slow_s) if config.slow_s else None
    samples, number = max(1, config.samples), 0
    kept_characters: Counter[str] = Counter()
    thread_calls: dict[int, dict[str, str]] = {}
    while True:
        time.sleep(max(0.0, min(next_sample - time.monotonic(), supervisor.left_s)))
        _observe_sample(supervisor, targets)
        is_last = number >= samples - 1
        mode = py_spy.LOCALS if is_last and config.locals else py_spy.PLAIN
        limit_s = supervisor.left_s / max(1, samples - number)
        if observer:
            observer.look(since, _deadline(supervisor, 4 * max(1, samples - number)))
            is_last |= time.monotonic() - began > config.slow_s
        dumped_s = _take_dumps(
            supervisor, targets, path, kept_characters, limit_s, mode=mode, observer=observer
        )
        if number == 0:
            _observe_threads(supervisor, targets)
            witnesses.ask()
            pids = [target.pid for target in targets if target.facts and not target.rank.stranger]
            thread_calls = threads.first_look(pids, _deadline(supervisor, 4))
        is_extendable = number == samples - 1 and 0 < 2 * config.longer_s < supervisor.left_s
        if is_last and not (is_extendable and _may_be_slow(targets)):
            break
        if is_last and _have_stood(targets, _deadline(supervisor, 4)):
            # The kernel tells already what one more sample would.
            since -= config.longer_s
            break
        next_sample += config.longer_s if is_last else config.interval_s
        if observer:
            # The pauses differ, so that they are in step with no program.
            late_s = random.uniform(-0.4, 0.4) * config.interval_s
            next_sample = max(began + (number + 1) * config.interval_s + late_s, time.monotonic())
        number += 1
    seconds = next_sample - began
    of_node = observer.finish() if observer else None
    calls = _observe_descendants(supervisor, targets, scanned, seconds)
    links.observe(targets, calls, since, _deadline(supervisor, 2))
    mains = {target.pid: target.thread or target.pid for target in targets}
    mains = {pid: mains[pid] for pid in thread_calls}
    thread_rows = threads.observe(mains, thread_calls, _deadline(supervisor, 4))
    for target in targets:
        target.thread_rows = thread_rows.get(target.pid, [])
        target.note_interpreter_lock(seconds)
    deadline = time.monotonic() + max(_DESCENDANTS_S, dumped_s)
    started, limit_s = descendants.dump_order(targets), supervisor.left_s / 2
    _take_dumps(supervisor, started, path, kept_characters, limit_s, until=deadline)
    answers = witnesses.finish()
    if of_node:
        answers["glances"] = of_node
    return answers, seconds / number if number else config.interval_s


def _may_be_slow(targets: Targets) -> bool:
    """Whether one more sample may help: most ranks stand still, and no rank is blocked. A job also
    stands still if its step takes longer than the samples.
    """
    live = [target for target in targets if target.facts and not target.rank.stranger]
    if any(t.refusal(0) or t.facts[-1].state in ("D", processes.FROZEN) for t in live):
        return False
    pythons = [target for target in live if target.rank.process.python]
    return bool(pythons) and 2 * sum(map(_stands, pythons)) >= len(pythons)


def _stands(target: StackTarget) -> bool:
    """Whether a rank of Python has had one stack in all samples, of two at least."""
    mains = [dump.main for dump in target.dumps if target.rank.process.python]
    return len(mains) > 1 and mains[0] is not None and len({*mains}) == 1


def _have_stood(targets: Targets, deadline: float) -> bool:
    """Whether no thread of Python has run for `_STOOD_S` on any rank that stands still."""
    numbers = {
        target.pid: [target.pid, *(row.number for row in target.dumps[-1].threads if row.number)]
        for target in targets
        if target.facts and not target.rank.stranger and _stands(target)
    }
    answers = processes.probe_each(
        lambda pid: all(threads.stood_s(pid, number) >= _STOOD_S for number in numbers[pid]),
        list(numbers),
        deadline,
    )
    return all(answers.get(pid) is True for pid in numbers)


def _match_commands(
    supervisor: ProcessSupervisor, scanned: Scan, pattern: re.Pattern[str]
) -> tuple[set[int], int]:
    """The processes whose command lines contain the expression, and how many were not searched. A
    user chooses the command line, on which an expression may take hours. So a fork searches it.
    """
    commands = {process.pid: process.command for process in scanned}
    answers = processes.probe_each(
        lambda pid: pattern.search(commands[pid]) is not None,
        list(commands),
        _deadline(supervisor, 2),
        {process.pid: process.uid for process in scanned},
    )
    unmatched = sum(answers.get(pid, processes.HANGS) is processes.HANGS for pid in commands)
    return {pid for pid, hit in answers.items() if hit is True}, unmatched


def _uid(supervisor: ProcessSupervisor, user: str, scanned: Scan) -> int | None:
    """The user's uid among these processes; None: no user given; -1: the user has no process."""
    if not user:
        return None
    names = _user_names(supervisor, {process.uid for process in scanned})
    return next((uid for uid, name in names.items() if user in (name, str(uid))), -1)


def _deadline(supervisor: ProcessSupervisor, parts: int) -> float:
    """The moment at which a part of the remaining time has passed: a half, a quarter."""
    return min(supervisor.deadline, time.monotonic() + supervisor.left_s / parts)


def _observe(supervisor: ProcessSupervisor, targets: Targets) -> None:
    facts_by_pid = processes.observe(
        [target.pid for target in targets],
        _deadline(supervisor, 2),
        {target.pid: target.thread for target in targets},
    )
    for target in targets:
        if target.pid in facts_by_pid:
            target.add_facts(facts_by_pid[target.pid])


def _observe_sample(supervisor: ProcessSupervisor, targets: Targets) -> None:
    """The kernel's facts of one sample, before a probe that could change them."""
    _observe(supervisor, targets)
    for target in targets:
        facts = target.facts[-1] if target.facts else None
        target.cpu_s.append(facts.cpu_s if facts else target.rank.process.cpu_s)
        target.switches.append(facts.switches if facts else 0)
        target.main_cpu_s.append(facts.main_cpu_s if facts else 0.0)
        target.calls.append(facts.calls if facts else None)


def _observe_threads(supervisor: ProcessSupervisor, targets: Targets) -> None:
    """Take the first facts again of targets whose dump names another thread as the main one."""
    threaded = [target for target in targets if target.thread]
    _observe(supervisor, threaded)
    for target in threaded:
        if target.facts:
            target.switches[-1] = target.facts[-1].switches
            target.main_cpu_s[-1] = target.facts[-1].main_cpu_s


def _observe_descendants(
    supervisor: ProcessSupervisor, targets: Targets, scanned: Scan, seconds: float
) -> dict[tuple[int, int], waits.WaitCall]:
    """Observe the descendants, and set `waits_on` and `work` of all targets. Returns the
    calls of all threads, by process and thread. seconds: since the first sample
    """
    own_pids = ranks.own_processes(scanned, os.getpid())
    descendants.find(targets, scanned, own_pids, _deadline(supervisor, 2))
    started = [descendant for target in targets for descendant in target.descendants]
    _observe(supervisor, started)
    for descendant in started:
        if descendant.facts:
            descendant.cpu_s.append(descendant.facts[-1].cpu_s)
    pids_by_uid: dict[int | None, list[int]] = {}
    for process in scanned:
        pids_by_uid.setdefault(process.uid, []).append(process.pid)
    likely_holders: dict[int, Sequence[int]] = {}
    for target in targets:
        process = target.rank.process
        family = [target.pid, *(descendant.pid for descendant in target.descendants)]
        holders = [*family, process.parent, *pids_by_uid.get(process.uid, ())]
        likely_holders.update(dict.fromkeys(family, holders))
    probed = [*targets, *started]
    threads = {
        target.pid: (target.thread, *target.thread_names)
        for target in probed if target.facts and not target.rank.stranger
    }  # fmt: skip
    deadline = _deadline(supervisor, 2)
    call_and_phrase = waits.observe(threads, likely_holders, deadline)
    lock_files.observe(targets, call_and_phrase, deadline)
    for target in probed:
        if (target.pid, target.thread) in call_and_phrase:
            call, target.waits_on = call_and_phrase[target.pid, target.thread]
            target.timed_lock = call.verb == "futex" and call.timed
            target.is_untimed = not call.timed
    calls = {key: call for key, (call, _) in call_and_phrase.items()}
    descendants.set_work(targets, calls, seconds, deadline)
    return calls


def _take_dumps(
    supervisor: ProcessSupervisor, targets: Targets, path: str, kept_characters: Counter[str],
    limit_s: float, *, until: float = float("inf"), mode: str = py_spy.PLAIN,
    observer: glances.Glances | None = None,
) -> float:  # fmt: skip
    """Add py-spy's dump of each target, several at a time; returns the seconds that this took.
    kept_characters: owner -> characters of all frames of the owner's processes so far; updated
    limit_s:  seconds for all processes, if they belong to several owners
    until:    a moment of time.monotonic() after which no dump is begun
    observer: notes where each target is before and after its dump
    """
    began = time.monotonic()

    def dump(target: StackTarget) -> py_spy.Dump:
        reason = target.refusal(os.geteuid())
        target.add_note(reason)
        if not reason and until < time.monotonic():
            reason = _NO_TIME_LEFT
        if reason or supervisor.deadline < time.monotonic():
            return py_spy.Dump(error=reason or NO_TIME)
        if observer:
            place = observer.place(target)
            dumped = py_spy.take(supervisor, path, target.pid, supervisor.left_s, mode)
            observer.add_stack(target, place)
            return dumped
        facts = target.facts[-1]
        loops = mode == py_spy.PLAIN and (facts.state == "R" or "nanosleep" in facts.wait_channel)
        for own_mode in (py_spy.LOCK, mode) if loops else (mode,):
            # The variables of many threads may be too large.
            dumped = py_spy.take(supervisor, path, target.pid, supervisor.left_s, own_mode)
            if dumped.error in ("", py_spy.HUNG):
                break
        return dumped

    workers = max(1, (os.cpu_count() or 1) // _CORES_PER_DUMP)
    # The last dump may take all of its limit.
    available_s = max(limit_s / 2, limit_s - py_spy.LIMIT_S)
    turns = ranks.Turns([target.rank for target in targets], available_s * workers)
    dump_by_index: dict[int, py_spy.Dump] = {}

    def work() -> None:
        while turn := turns.take():
            index, owner = turn
            started = time.monotonic()
            dumped = dump(targets[index])
            kept_characters[owner] += dumped.characters
            is_too_large = kept_characters[owner] > _MAX_CHARACTERS
            dump_by_index[index] = py_spy.Dump(error=_TOO_LARGE) if is_too_large else dumped
            turns.give_back(owner, time.monotonic() - started)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    for index, target in enumerate(targets):
        target.dumps.append(dump_by_index.get(index, py_spy.Dump(error=OTHERS_TOOK)))
    return time.monotonic() - began


def _take_native_stacks(
    supervisor: ProcessSupervisor, path: str, targets: Targets, native_threads: Sequence[int]
) -> None:
    """Take the native stacks, one at a time: each dump reads the symbols of all libraries."""
    for target in targets:
        _observe(supervisor, [target])
        target.cpu_s.append(target.facts[-1].cpu_s if target.facts else 0.0)
        reason = target.refusal(os.geteuid(), native=True)
        if not reason and supervisor.deadline < time.monotonic():
            reason = NO_TIME
        if not reason:
            limit_s = supervisor.left_s
            target.native = py_spy.take(supervisor, path, target.pid, limit_s, py_spy.NATIVE)
            reason = target.native.error
            may_be_stopped = reason == py_spy.HUNG
            if reason in (py_spy.ENDED_INTERPRETER, py_spy.NOT_PYTHON):
                # The second tool runs after the first: both stop the process.
                limit_s = supervisor.left_s
                frames, reason, may_be_stopped = gdb.live_stack(supervisor, target.pid, limit_s)
                target.native = py_spy.Dump(tuple(frames) or None, error=reason)
            if may_be_stopped:
                _resume(supervisor, target)
            _take_native_threads(supervisor, target, native_threads)
        target.add_note(f"no native stack: {reason}" if reason else "")


def _take_native_threads(
    supervisor: ProcessSupervisor, target: StackTarget, numbers: Iterable[int]
) -> None:
    """Take the native calls of those threads that the target has; gdb stops each alone."""
    for number in numbers:
        state = threads.state_of(target.pid, number)
        if state and state in "RS" and supervisor.left_s > 1:
            frames, _, may_be_stopped = gdb.live_stack(supervisor, number, supervisor.left_s)
            names = tuple(function for function, _, _ in reversed(frames))
            wait = threads.ThreadWait(str(number), number=number, native=names)
            target.thread_rows.append((wait, 1))
            if may_be_stopped:
                _resume(supervisor, target)


def _count_system_calls(
    supervisor: ProcessSupervisor, seconds: float, targets: Targets, scanned: Scan
) -> None:
    for target in targets:
        _observe(supervisor, [target])
        reason = target.refusal(os.geteuid(), native=True)
        if not reason and supervisor.left_s < seconds + system_calls.MARGIN_S:
            reason = NO_TIME
        if not reason:
            uid = target.rank.process.uid
            near = [process.pid for process in scanned if process.uid == uid]
            target.system_calls, target.traced_s, reason = system_calls.count(
                supervisor, target.pid, seconds, near
            )
        target.add_note(reason and f"{NO_SYSTEM_CALLS}{reason}")


def _resume(supervisor: ProcessSupervisor, target: StackTarget) -> None:
    """Continue a target to which a killed py-spy may have left a pending SIGSTOP, which arrives
    when it leaves the kernel. A target that was already stopped is never unwound.
    """
    _observe(supervisor, [target])
    if not target.refusal(0).startswith(("ended", "traced")):
        with contextlib.suppress(OSError):
            os.kill(target.pid, signal.SIGCONT)


def _user_names(
    supervisor: ProcessSupervisor, uids: Iterable[int | None]
) -> dict[int | None, str]:
    """The names of users, looked up in a fork: the name service may be a server that hangs."""
    known_uids = sorted(uid for uid in uids if uid is not None)

    def name(uid: int) -> str:
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    deadline = _deadline(supervisor, 2)
    names = processes.probe_each(name, known_uids, deadline)
    unknown = (None, processes.HANGS)
    return {uid: str(uid) if names.get(uid) in unknown else names[uid] for uid in known_uids}


def _describe(supervisor: ProcessSupervisor, pythons: Scan) -> list[str]:
    """The processes to show if no rank was found, one line each."""
    facts_by_pid = processes.observe([process.pid for process in pythons], supervisor.deadline)
    uids = {pid: facts.uid for pid, facts in facts_by_pid.items() if facts}
    names = _user_names(supervisor, set(uids.values()))
    rows = [p for p in pythons if p.pid in uids]
    return [f"{p.command[:100] or p.name} (pid {p.pid}, user {names[uids[p.pid]]})" for p in rows]
