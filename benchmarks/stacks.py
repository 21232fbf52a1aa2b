"""`benchmarks/run stacks`: reading, grouping and rendering a large fleet's stacks, on one core.

The fleet is simulated: 64 shapes of stacks of a training program, eight ranks per node with three
samples each and PyTorch's threads, most ranks in one collective. With witnesses, each rank has the
end of its log with a line of the watchdog, and a dump of the flight recorder with four process
groups; each node has eight GPUs, ten ports and the kernel's log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import Benchmark, BenchmarkReport, in_child
from nodeready.agent.stacks.program import SCHEMA
from nodeready.reports import json_report, stacks_table
from nodeready.reports.registry import Options
from nodeready.runs.stacks import document as stack_tree
from nodeready.runs.stacks import group as grouping
from nodeready.runs.stacks import trace as traces

RANKS_PER_NODE, SHAPES = 8, 64
WITNESSES = "witnesses"  # the mode in which the ranks and nodes have witnesses
_WIDTH = 120
_NOTE = (
    "Seconds are CPU time, user and system, of one process on one core, in the fastest run. Total "
    "is from the JSON texts to the table: reading with every check of the trace, grouping, "
    "rendering. Other formats need the tree and the JSON document."
)

_HEAD = [
    ["<module>", "train.py", 412], ["main", "train.py", 398],
    ["wrapper", "torch/distributed/elastic/multiprocessing/errors/__init__.py", 355],
    ["fit", "trainer/loop.py", 120], ["train_epoch", "trainer/loop.py", 188],
    ["train_step", "trainer/step.py", 77],
]  # fmt: skip
_WAIT = [
    ["wrapper", "torch/distributed/c10d_logger.py", 81],
    ["all_reduce", "torch/distributed/distributed_c10d.py", 2806],
]
_BOOTSTRAP = [["_bootstrap", "threading.py", 1030], ["_bootstrap_inner", "threading.py", 1073]]
_PIN_MEMORY = [
    *_BOOTSTRAP, ["run", "threading.py", 1010],
    ["_pin_memory_loop", "torch/utils/data/_utils/pin_memory.py", 53],
    ["do_one_step", "torch/utils/data/_utils/pin_memory.py", 30],
    ["get", "multiprocessing/queues.py", 113], ["poll", "multiprocessing/connection.py", 257],
    ["wait", "multiprocessing/connection.py", 1136], ["select", "selectors.py", 415],
]  # fmt: skip
_MONITOR = [*_BOOTSTRAP, ["run", "tqdm/_monitor.py", 60], ["wait", "threading.py", 359]]


@dataclass(frozen=True)
class StacksCost:
    """The cost of reading these traces in one process: seconds of CPU time, user and system."""

    mode: str
    nodes: int
    text_mb: float
    read_s: float
    group_s: float
    tree_s: float
    table_s: float
    json_s: float
    groups: int
    peak_mb: float

    @property
    def total_s(self) -> float:
        """From the texts to the table, as a user waits for it."""
        return self.read_s + self.group_s + self.table_s

    def row(self) -> tuple[str, ...]:
        times = (self.read_s, self.group_s, self.table_s, self.total_s, self.tree_s, self.json_s)
        size = f"{self.nodes:,} ({self.mode})", f"{self.nodes * RANKS_PER_NODE:,}"
        texts = (f"{seconds:.2f} s" for seconds in times)
        return *size, f"{self.text_mb:.0f} MB", *texts, f"{self.peak_mb:.0f} MB"


HEADER = (
    "Nodes", "Ranks", "Text", "Read", "Group", "Table", "Total", "Tree", "JSON", "Peak memory",
)  # fmt: skip


def _shape(number: int) -> list[list[object]]:
    """The frames of a shape, root to leaf; shapes differ from different depths on."""
    layers = [
        [f"layer_{number % 8}", f"model/block_{number // 8}.py", 100 + number],
        ["forward", "torch/nn/modules/module.py", 1553],
        [f"stage_{number}", "model/stages.py", 10 + number],
        ["_call_impl", "torch/nn/modules/module.py", 1562],
    ]
    return [*_HEAD[: 3 + number % 4], *layers * (1 + number % 4), *(_WAIT if number % 3 else [])]


def _rank_witnesses(rank: int, draw: random.Random, late: bool) -> dict[str, object]:
    """The witnesses of one rank: all wait in a collective; a late rank has not called it."""
    called = 4710 if late else 4711
    group = rank // RANKS_PER_NODE * RANKS_PER_NODE
    ranks = list(range(group, group + RANKS_PER_NODE))
    report = [rank, "default_pg", "status", None, "", called, 4710]
    groups = [
        ["0", "default_pg", [], called, called, 4710],
        ["1", "tp", ranks, 90_210, 90_210, 90_210],
        [f"{2 + rank % RANKS_PER_NODE}", "dp", [], 88_000, 88_000, 88_000],
        [f"{20 + group}", "ep", ranks[:4] if rank < group + 4 else ranks[4:], 512, 512, 512],
    ]
    entry = ["0", called, False, "all_reduce", "started", "[[16777216], [16777216]]",
             "[BFloat16, BFloat16]", "trainer/step.py:77 train_step"]  # fmt: skip
    return {
        "logs": {
            "absent": "", "path": f"/shared/logs/88/rank-{rank}.log",
            "age_s": draw.randrange(300, 330),
            "lines": [f"[rank{rank}]: step {4700 + at}, loss {draw.random():.6f}, "
                      "grad norm 0.8712, 412.7 samples/s, 61.2 GiB" for at in range(5)],
            "reports": [dict(zip(_REPORT, report, strict=True))],
        },
        "flight_recorder": {
            "absent": "", "path": f"/tmp/nccl_trace_rank_{rank}", "age_s": draw.randrange(60, 65),
            "version": "2.10", "partial": False,
            "groups": [dict(zip(_GROUP, group_values, strict=True)) for group_values in groups],
            "entries": [] if late else [dict(zip(_ENTRY, entry, strict=True))],
        },
    }  # fmt: skip


_REPORT = ("rank", "group", "kind", "sequence", "operation", "enqueued", "completed")
_GROUP = ("name", "desc", "ranks", "enqueued", "started", "completed")
_ENTRY = ("group", "sequence", "is_p2p", "operation", "state", "sizes", "types", "site")


def _node_witnesses(node: int, draw: random.Random, pids: list[int]) -> dict[str, object]:
    return {
        "gpus": {
            "absent": "",
            "devices": [
                {"index": at, "name": "NVIDIA H200", "bus_id": f"00000000:{at + 20:02x}:00.0",
                 "sm_percent": draw.randrange(95, 101), "memory_percent": draw.randrange(3),
                 "power_w": draw.randrange(140, 190), "limit_w": 700, "xids": [], "pids": [pid],
                 "throttle": []}
                for at, pid in enumerate(pids)
            ],
        },
        "network": {
            "absent": "", "seconds": 4.0 + draw.random() / 100,
            "ports": [
                {"name": f"mlx5_{at}", "kind": "infiniband" if at < 8 else "ethernet",
                 "state": "up", "received": draw.randrange(9000), "sent": draw.randrange(9000),
                 "errors": [], "gbps": 400.0 if at < 8 else 100.0}
                for at in range(10)
            ],
        },
        "kernel": {
            "absent": "",
            "messages": [] if node % 100 else [
                {"kind": "memory", "ago_s": draw.randrange(90_000), "pid": 0,
                 "text": "mce: [Hardware Error]: Machine check events logged"},
            ],
        },
    }  # fmt: skip


def trace(node: int, nodes: int, witnesses: bool = False) -> str:
    """The JSON text of one node's trace; the same number gives the same text."""
    draw = random.Random(node)
    frames: dict[tuple[object, ...], int] = {}
    stacks: dict[tuple[int, ...], int] = {}

    def stack(rows: list[list[object]]) -> int:
        numbers = tuple(frames.setdefault(tuple(row), len(frames)) for row in rows)
        return stacks.setdefault(numbers, len(stacks))

    processes: list[dict[str, Any]] = []
    for local in range(RANKS_PER_NODE):
        rank = node * RANKS_PER_NODE + local
        # Most ranks have one of two shapes; each 32nd rank has a random one.
        shape = rank % 2 if rank % 32 else draw.randrange(SHAPES)
        pin_memory = ["Thread-1 (_pin_memory_loop)", stack(_PIN_MEMORY)]
        threads = [pin_memory, ["Thread-2", stack(_MONITOR)]]
        sample = {"main": stack(_shape(shape)), "threads": threads, "gil": "", "error": ""}
        late = rank == nodes * RANKS_PER_NODE // 2
        processes.append({
            "pid": draw.randrange(2, 4_000_000), "rank": rank, "local_rank": local,
            "world_size": nodes * RANKS_PER_NODE, "job": "88", "slurm_job": "",
            "master": "gpu00000:29500", "user": "ada",
            "command": "/opt/venv/bin/python -u train.py --config configs/large.yaml",
            "state": "S", "wait_channel": "futex_wait_queue",
            "kernel_stack": ["futex_wait_queue", "__futex_wait", "futex_wait", "do_futex"],
            "tracer": 0, "threads": 212, "start_s": round(draw.uniform(1e4, 1e6), 2),
            "cpu_s": [1000.01, 1000.02, 1000.03], "main_cpu_s": [900.0, 900.01, 900.01],
            "switches": [5000, 5000, 5001], "samples": [sample] * 3, "native": None, "note": "",
            "waits_on": "", "below": [], "locals": [],
            "witnesses": _rank_witnesses(rank, draw, late) if witnesses else {},
        })  # fmt: skip
    pids = [process["pid"] for process in processes]
    return json.dumps({
        "schema": SCHEMA, "node": f"gpu{node:05}", "started": "2026-01-01T00:00:00Z",
        "interval_s": 2.0, "error": "", "frames": list(frames), "stacks": list(stacks),
        "processes": processes, "instead": [],
        "witnesses": _node_witnesses(node, draw, pids) if witnesses else {},
    })  # fmt: skip


def _cost(mode: str, nodes: int, directory: Path) -> StacksCost:
    """Read the traces; then read, group and render them. This process stays on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    witnesses = mode == WITNESSES
    texts = [] if mode == "files" else [trace(node, nodes, witnesses) for node in range(nodes)]
    size = sum(map(len, texts)) or sum(path.stat().st_size for path in directory.iterdir())

    def source() -> Iterator[traces.Trace]:
        if mode == "files":
            return traces.read_directory(directory)[0]
        return (traces.parse(text, "memory") for text in texts)

    start = time.process_time()
    for _ in source():
        pass
    read = time.process_time()
    stacks = grouping.group(source(), {})
    grouped = time.process_time()
    with open(os.devnull, "w", encoding="utf-8") as out:
        out.writelines(f"{line.plain}\n" for line in stacks_table.show(stacks, Options(0, _WIDTH)))
        shown = time.process_time()
        stack_tree.tree(stacks)
        merged = time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begun_json = time.process_time()
        out.writelines(json_report.render(stacks))
        written = time.process_time() - begun_json
    reading = read - start
    group_s = max(0.0, grouped - read - reading)
    times = reading, group_s, merged - shown, shown - grouped, written
    return StacksCost(mode, nodes, size / 1e6, *times, len(stacks.groups), peak)


def measure(mode: str, nodes: int) -> StacksCost:
    with tempfile.TemporaryDirectory(prefix="nodeready-benchmark-") as directory:
        if mode == "files":
            for node in range(nodes):
                Path(directory, f"trace-gpu{node:05}.json").write_text(trace(node, nodes))
        cost: StacksCost = in_child(_cost, mode, nodes, Path(directory))
        return cost


def _report(arguments: argparse.Namespace) -> BenchmarkReport:
    sizes = arguments.nodes
    plan = [("memory", size) for size in (sizes[0] // 4, *sizes)]
    plan += [(mode, sizes[-1]) for mode in ("files", WITNESSES)]
    runs = ([measure(*step) for _ in range(arguments.repeat)] for step in plan)
    costs = [min(step_costs, key=lambda cost: cost.total_s) for step_costs in runs]
    small, large = costs[0], costs[len(sizes)]
    remark = (
        f"One core used. {large.nodes / small.nodes:.0f} times the nodes cost "
        f"{large.total_s / small.total_s:.1f} times the time. "
        f"{large.groups} groups from {SHAPES} shapes of stacks."
    )
    rows = [HEADER, *(cost.row() for cost in costs)]
    return BenchmarkReport("Stacks of a large fleet", [("", rows)], remark, _NOTE)


BENCHMARK = Benchmark(_report, {"nodes": "16384", "repeat": 3}, has_lab=False)
