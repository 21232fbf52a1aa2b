"""Jobs that nobody has thought of: of a seed, a tree of waits with one fault at its root.

Each rank waits for one that was drawn before it, by a connection, a pipe, a lock of a file or a
collective of a group; it waits in its main thread or in another one, and has threads and children
beside. So the rank that was drawn first is the only one that waits for no other; or it waits for
one of the others, and nobody is the cause; or all make steps.
"""

from __future__ import annotations

import random
from typing import Any

from tests.cases import read_table
from tests.hang.scenarios import Scenario

WAYS = ("tcp", "timeout", "select", "asyncio", "unix", "pipe", "flock", "collective")
#: Those by which a word comes again and again.
WORDS = ("tcp", "timeout", "select", "asyncio", "unix")
WHERE = ("main", "main", "main", "thread", "future", "queue")
BESIDE = ("heartbeat", "pool", "helper", "writer", "watchdog", "monitor")
#: Those that the processor sees.
AWAKE = {"watchdog", "monitor"}
#: What the first rank does in a step of a job that is well; all but the first are seen.
WORK = ("nap", "bar", "lines", "own_file", "read", "write", "child", "compute")
#: What the first rank does, what of it the processor sees, and what the test does to it.
FAULTS = read_table(__file__, "FAULTS")


def generated(seed: str) -> tuple[Scenario, dict[str, Any]]:
    """The scenario of a seed, and its plan (`tests/hang/plans.py`)."""
    draw = random.Random(seed)
    world = draw.randint(3, 8)
    order = list(range(world))
    draw.shuffle(order)
    first, *others = order
    act, moves, fault = draw.choice(FAULTS)
    is_cycle, is_well = act == "exchange", act == "drawn_steps"
    # Few ways, as in a program that somebody has written.
    ways = draw.sample(WORDS if is_well else WAYS, draw.randint(1, 2))
    waits = {
        str(rank): [draw.choice(order[: at + 1]), draw.choice(ways)]
        for at, rank in enumerate(others)
    }
    if is_cycle:
        waits[str(first)] = [draw.choice(others), "pipe"]
    work = draw.choice(WORK)
    plan = {
        "waits": waits,
        "work": work,
        "step_s": draw.choice((0.01, 0.2, 1, 4, 9) if work == "nap" else (1, 9, 20)),
        "where": [draw.choice(WHERE) for _ in order],
        "beside": [draw.sample(BESIDE, draw.choice((0, 0, 1, 2))) for _ in order],
    }
    awake = [rank for rank in range(world) if AWAKE.intersection(plan["beside"][rank])]
    causes = () if is_cycle or is_well else ((first,),)
    kinds = ("late", "storage", "loader") if causes else ("unclear", "disagree", "quiet")
    return Scenario(
        name=f"seed-{seed}",
        what=f"{world} ranks wait by {' and '.join(ways)}, rank {first}: {act}, {fault}"
        + f", {work} of {plan['step_s']} s" * is_well,
        acts={"*": "- set_up drawn_steps!"} if is_well
        else {str(first): f"- set_up {act}!", "*": "- set_up exchange!"},
        kinds=("not-stuck", "moving") if is_well else kinds,
        suspects=causes,
        first=((first,),) if is_cycle else (),
        world=world,
        fault=(fault, (first,) if fault != "none" else ()),
        # A rank that is stopped or traced shows no stack.
        status=0 if fault == "none" else 3,
        ends=False,
        moves=tuple({*awake, first} if moves else awake),
    ), plan  # fmt: skip
