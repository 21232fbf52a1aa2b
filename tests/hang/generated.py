"""Jobs that nobody has thought of: of a seed, a tree of waits with one fault at its root.

Each rank waits for one that was drawn before it, by a connection, a pipe, a lock of a file or a
collective of a group; it waits in its main thread or in another one, and has threads and children
beside. So the rank that was drawn first is the only one that waits for no other; or it waits for
one of the others, and nobody is the cause.
"""

from __future__ import annotations

import random
from typing import Any

from tests.hang.scenarios import Scenario

WAYS = ("tcp", "timeout", "select", "asyncio", "unix", "pipe", "flock", "collective")
WHERE = ("main", "main", "main", "thread", "future", "queue")
BESIDE = ("heartbeat", "pool", "helper", "writer")
#: What the first rank does, what of it the processor sees, and what the test does to it.
FAULTS: tuple[tuple[str, bool, str], ...] = (
    ("back_off", False, "none"), ("wait_for_lock", False, "none"), ("poll_queue", True, "none"),
    ("convert_images", False, "none"), ("tokenize", True, "none"), ("read_shard", False, "none"),
    ("save_checkpoint", False, "none"), ("hold_gil", False, "none"), ("in_pool", False, "none"),
    ("wait_condition", False, "none"), ("wait_event", False, "none"),
    ("join_process", False, "none"), ("prefetch", False, "none"), ("debug", False, "none"),
    ("map_in_processes", False, "none"), ("back_off", False, "stopped"),
    ("back_off", False, "traced"), ("exchange", False, "none"),
)  # fmt: skip


def generated(seed: str) -> tuple[Scenario, dict[str, Any]]:
    """The scenario of a seed, and its plan (`tests/hang/plans.py`)."""
    draw = random.Random(seed)
    world = draw.randint(3, 8)
    order = list(range(world))
    draw.shuffle(order)
    # One way between most, as in a program that somebody has written.
    ways = draw.sample(WAYS, draw.randint(1, 2))
    first, *others = order
    act, moves, fault = draw.choice(FAULTS)
    waits = {
        str(rank): [draw.choice(order[: at + 1]), draw.choice(ways)]
        for at, rank in enumerate(others)
    }
    is_cycle = act == "exchange"
    if is_cycle:
        waits[str(first)] = [draw.choice(others), "pipe"]
    plan = {
        "waits": waits,
        "where": [draw.choice(WHERE) for _ in order],
        "beside": [draw.sample(BESIDE, draw.choice((0, 0, 1, 2))) for _ in order],
    }
    return Scenario(
        name=f"seed-{seed}",
        what=f"{world} ranks wait by {' and '.join(ways)}, rank {first}: {act}, {fault}",
        acts={str(first): f"- set_up {act}!", "*": "- set_up exchange!"},
        kinds=("unclear", "disagree", "quiet") if is_cycle else ("late", "storage", "loader"),
        suspects=() if is_cycle else ((first,),),
        first=((first,),) if is_cycle else (),
        world=world,
        fault=(fault, (first,) if fault != "none" else ()),
        ends=False,
        moves=(first,) if moves else (),
    ), plan
