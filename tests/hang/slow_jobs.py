"""Jobs with a slow rank, and even ones, of a seed; and what the test does to the slow rank."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hang.play import Play
from tests.hang.scenarios import Scenario

WAYS = ("gloo", "star", "ring")
KINDS = ("forward", "burn", "throttled", "loader", "storage", "network")
#: A cycle of slowness that passes: as long as the look.
CYCLE_S = 60
_SHARD_BYTES, _CHUNK = 256 << 18, 1 << 18


def slow_job(seed: str, is_slow: bool, passing: bool = False) -> tuple[Scenario, dict[str, Any]]:
    """The scenario of a seed, and its plan (`tests/hang/slowness.py`)."""
    draw = random.Random(seed)
    world = draw.randint(4, 8)
    kind = draw.choice(KINDS if is_slow else ("forward", "burn", "loader", "storage"))
    factor = draw.choice((1.2, 1.3, 1.5, 2, 3, 5, 10)) if is_slow or passing else 1
    slow = draw.randrange(1, world) if is_slow or passing else -1
    begin = draw.uniform(0, CYCLE_S)
    step_s = draw.choice((0.15, 0.3, 0.6) if kind in ("throttled", "burn") else
                         (0.1, 0.2, 0.5, 1.0))  # fmt: skip
    plan = {
        "seed": seed,
        "way": "star" if kind == "network" else draw.choice(WAYS),
        "kind": "forward" if passing and kind == "storage" else kind,
        "step_s": step_s,
        "jitter": draw.choice((0.0, 0.05, 0.15)),
        "slow": slow,
        "factor": factor,
        "passing": [begin, begin + draw.uniform(8, 18), CYCLE_S] if passing else [0, 0, 0],
        "began": time.time(),
        "bytes": draw.choice((1000, 100_000)) if kind != "network" else 500_000,
        "burn_s": 0.02,
        "logs": draw.random() < 0.5,
    }
    what = f"{plan['way']}, {world} ranks, {plan['kind']} of {step_s} s, jitter {plan['jitter']}"
    what += f", rank {slow} {factor} times" if slow >= 0 else ", even"
    what += f", passing {plan['passing'][1] - begin:.0f} s" if passing else ""
    kinds = ("straggler",) if is_slow else ("even",)
    scenario = Scenario(
        name=f"slow-{seed}", what=what, acts={"*": "- slow_steps!"}, kinds=kinds, suspects=(),
        world=world, ends=False,
    )  # fmt: skip
    return scenario, plan


def prepare(place: Path, plan: dict[str, Any], world: int) -> None:
    if plan["kind"] == "storage":
        for rank in range(world):
            with open(place / f"shard-{rank}", "wb") as file:
                file.truncate(_SHARD_BYTES)
                # Blocks on the disk, which a hole has not.
                for _ in range(_SHARD_BYTES >> 20):
                    file.write(os.urandom(1024) * 1024)


@contextlib.contextmanager
def slowed(play: Play, plan: dict[str, Any]) -> Iterator[None]:
    """The slow rank is throttled, or its network shaped."""
    extra_s = plan["step_s"] * (plan["factor"] - 1)
    with contextlib.ExitStack() as undo:
        if plan["slow"] >= 0 and plan["kind"] == "throttled":
            quota = plan["burn_s"] / (extra_s + plan["burn_s"])
            settings = {
                "cpu.cfs_period_us": "20000",
                "cpu.cfs_quota_us": f"{max(1000, 20000 * quota):.0f}",
            }
            _in_cgroup(play, "cpu", plan["slow"], settings, undo)
        if plan["slow"] >= 0 and plan["kind"] == "storage":
            device = os.stat(play.place).st_dev
            limit = (
                f"{os.major(device)}:{os.minor(device)} {_CHUNK / (plan['step_s'] + extra_s):.0f}"
            )
            settings = {"blkio.throttle.read_bps_device": limit}
            _in_cgroup(play, "blkio", plan["slow"], settings, undo)
        yield


def _in_cgroup(
    play: Play, controller: str, rank: int, settings: dict[str, str], undo: contextlib.ExitStack
) -> None:
    pid = play.pids()[rank]
    cgroup = Path(f"/sys/fs/cgroup/{controller}/nodeready-slow-{pid}")
    cgroup.mkdir()
    undo.callback(cgroup.rmdir)
    for name, value in settings.items():
        (cgroup / name).write_text(value)
    (cgroup / "cgroup.procs").write_text(str(pid))
    undo.callback((cgroup.parent / "cgroup.procs").write_text, str(pid))


@contextlib.contextmanager
def shaped(plan: dict[str, Any]) -> Iterator[None]:
    """A class of the loopback's traffic that is slower than the rest."""
    if plan["kind"] != "network":
        yield
        return
    rate = 8 * plan["bytes"] / (plan["step_s"] * (plan["factor"] - 1))
    commands = (
        "tc qdisc add dev lo root handle 1: htb default 1",
        "tc class add dev lo parent 1: classid 1:1 htb rate 10gbit",
        f"tc class add dev lo parent 1: classid 1:40 htb rate {rate:.0f}bit burst 15k",
    )
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False)
