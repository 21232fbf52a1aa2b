"""The second round: who is chosen, and where their native stacks go; the exit codes."""

from __future__ import annotations

from typing import Any

import pytest

from nodeready.triage.stacks.archive import empty_trace
from nodeready.triage.stacks.collect import MOST, choose_native, merged
from nodeready.triage.stacks.document import Frame, Group, Rank, Stacks, stacks_code

FRAMES = (Frame("train", "train.py", 1),)


def group(kind: str, size: int, frames: tuple[Frame, ...] = FRAMES) -> Group:
    return Group(kind, None, (), (), frames, processes=size)


def stacks(*groups: Group, states: str = "S", errors: dict[str, str] | None = None) -> Stacks:
    """Each group's processes, two on a node."""
    ranks = [
        Rank(f"gpu{pid // 2}", pid, pid, None, states, "", None, index)
        for pid, index in enumerate(
            index for index, one in enumerate(groups) for _ in range(one.processes)
        )
    ]
    return Stacks("", "", "", None, groups, tuple(ranks), errors or {})


def test_one_of_each_group_and_all_of_the_odd_ones_at_most_so_many() -> None:
    some = stacks(group("missing", 0), group("stack", 3), group("stopped", 1), group("stack", 40))
    assert choose_native(some) == {"gpu0": [0, 1], "gpu2": [4], "gpu1": [2]}
    many = stacks(*[group("stack", 9)] * 30, group("stack", 40))
    pids = [pid for numbers in choose_native(many).values() for pid in numbers]
    assert pids == [9 * index for index in range(MOST)]
    assert choose_native(stacks(group("no-data", 3, ()))) == {}


@pytest.mark.parametrize("state", ["D", "D (disk sleep)", "T", "t", "Z"])
def test_nobody_is_paused_who_would_not_come_back(state: str) -> None:
    assert choose_native(stacks(group("stack", 3), states=state)) == {}


def process(pid: int, native: int | None, note: str = "") -> dict[str, Any]:
    return {"pid": pid, "native": native, "note": note, "samples": []}


def test_native_stacks_go_into_the_first_trace_and_who_has_none_is_named() -> None:
    first = {
        **empty_trace("gpu1", "", ""),
        "frames": [["main", "a.py", 1], ["wait", "a.py", 2]],
        "stacks": [[0, 1]],
        "processes": [process(1, None), process(2, None), process(3, None)],
    }
    second = {
        **empty_trace("gpu1", "", ""),
        "frames": [["read", "libc.so.6", 0], ["main", "a.py", 1]],
        "stacks": [[1, 0]],
        "processes": [process(1, 0), process(2, None, "no native stack: not permitted")],
    }
    whole, missing = merged(first, second, [1, 2, 3])
    native = [whole["frames"][index] for index in whole["stacks"][whole["processes"][0]["native"]]]
    assert native == [["main", "a.py", 1], ["read", "libc.so.6", 0]]
    assert [one["native"] for one in whole["processes"]] == [1, None, None]
    assert missing == [(2, "not permitted"), (3, "it has ended")]
    assert first["stacks"] == [[0, 1]]


@pytest.mark.parametrize(
    ("found", "how", "code"),
    [
        (stacks(group("stack", 2), group("stack", 1)), {}, 0),
        (stacks(group("uninterruptible", 1), group("stack", 1)), {}, 0),
        (stacks(group("missing", 0, ()), group("stack", 1)), {}, 3),
        (stacks(group("no-data", 1, ()), group("stack", 1)), {}, 3),
        (stacks(group("stopped", 1, ()), group("stack", 1)), {}, 3),
        (stacks(group("stack", 1), errors={"gpu1": "no Python"}), {}, 3),
        (stacks(group("no-data", 0, ()), errors={"gpu1": "away"}), {"unreachable": True}, 4),
        (stacks(group("stack", 1)), {"unreachable": True, "failed": True}, 1),
        (stacks(), {}, 2),
    ],
)
def test_the_exit_code(found: Stacks, how: dict[str, bool], code: int) -> None:
    assert stacks_code(found, **how) == code


def test_the_exit_code_of_an_interrupt_is_before_all_others() -> None:
    assert stacks_code(Stacks("", "", "", None, (), (), {}, complete=False)) == 130
