"""The second round: native stacks, which cost their processes a pause, of a few chosen ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nodeready.capture.py_spy import NATIVE_LIMIT_S
from nodeready.capturing import Captured, more, requested, trace_of
from nodeready.stacks import Stacks
from nodeready.traces import Trace
from nodeready.transport.base import Asks

if TYPE_CHECKING:
    pass

#: Processes of which a native stack is taken.
MOST = 16
#: States in which py-spy's blocking mode would hang, or wake nobody (proc(5)).
_NOT_TO_BE_PAUSED = frozenset("DTtZX")


def chosen(stacks: Stacks, most: int = MOST) -> dict[str, list[int]]:
    """Node -> the processes to unwind: one of each group with a stack, then all of those groups
    that are not the largest; the most suspicious first, at most so many.
    """
    groups = [index for index, group in enumerate(stacks.groups) if group.kind == "stack"]
    if not groups:
        return {}
    largest = max(groups, key=lambda index: stacks.groups[index].processes)
    members = {
        index: [
            one
            for one in stacks.processes
            if one.group == index and one.state[:1] not in _NOT_TO_BE_PAUSED
        ]
        for index in groups
    }
    wanted = [one for index in groups for one in members[index][:1]]
    wanted += [one for index in groups if index != largest for one in members[index][1:]]
    found: dict[str, list[int]] = {}
    for one in wanted[:most]:
        found.setdefault(one.node, []).append(one.pid)
    return found


def unwind(found: Captured, ask: Asks, stacks: Stacks) -> list[str]:
    """Take the native stacks, one at a time on each node, and put them into the traces.

    Returns why there are none of some, one line each.
    """
    pids = chosen(stacks)
    longest = max(map(len, pids.values()), default=0)
    config = replace(
        found.config,
        nonce=f"nodeready-{secrets.token_hex(8)}",
        limit_s=(NATIVE_LIMIT_S + 2) * longest,
    )
    second = Captured(config, list(pids))
    asked = {
        name: requested(name, replace(config, native=tuple(numbers)))
        for name, numbers in pids.items()
    }
    more(second, ask, "native", asked)
    found.complete = second.complete
    problems = []
    for trace in second.traces():
        name = trace["node"]
        first = trace_of(name, found.answers[name], found.config.nonce)
        found.corrected[name], missing = merged(first, trace, pids[name])
        problems += [f"{name}: no native stack of process {pid}: {why}" for pid, why in missing]
    problems += [f"{name}: no native stacks: {why}" for name, why in second.errors.items()]
    return problems


def merged(
    trace: Trace, native: Trace, pids: Iterable[int]
) -> tuple[Trace, list[tuple[int, str]]]:
    """The trace with the native stacks of another of the same node, and who has none and why."""
    frames, stacks = list(trace["frames"]), list(trace["stacks"])
    places = {tuple(frame): index for index, frame in enumerate(frames)}
    by_pid = {process["pid"]: process for process in native["processes"]}
    found: dict[int, int] = {}
    missing = []
    for pid in pids:
        process = by_pid.get(pid)
        if process is None or process["native"] is None:
            missing.append((pid, _why(process)))
            continue
        path = []
        for index in native["stacks"][process["native"]]:
            frame = native["frames"][index]
            if tuple(frame) not in places:
                places[tuple(frame)] = len(frames)
                frames.append(frame)
            path.append(places[tuple(frame)])
        found[pid] = len(stacks)
        stacks.append(path)
    processes = [
        {**process, "native": found.get(process["pid"], process["native"])}
        for process in trace["processes"]
    ]
    return {**trace, "frames": frames, "stacks": stacks, "processes": processes}, missing


def _why(process: Mapping[str, Any] | None) -> str:
    if process is None:
        return "it has ended"
    return str(process["note"]).removeprefix("no native stack: ") or "py-spy gave none"
