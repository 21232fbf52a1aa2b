"""Raw traces to try things on: processes with stacks that are written as words."""

import json
import re
from typing import Any

from nodeready.agent.stacks.program import SCHEMA
from nodeready.runs.stacks import trace as traces
from nodeready.runs.stacks.trace import Trace

C10D = "torch/distributed/distributed_c10d.py"
TRAIN = "<module> train.py 90 > train train.py 70 > step train.py 40"
REDUCE = f"{TRAIN} > all_reduce {C10D} 2806"
LOAD = f"{TRAIN} > _try_get_data torch/utils/data/dataloader.py 1251 > wait threading.py 359"


def frames(text: str) -> list[list[Any]]:
    """``main train.py 9 > step train.py 4`` as frames, root to leaf."""
    rows = (_FRAME.fullmatch(part) for part in text.split(" > ") if part)
    return [[row[1], row[2], int(row[3])] for row in rows if row]


#: A frozen module has a space in its name.
_FRAME = re.compile(r"(.*?) (<frozen [^>]+>|\S*) (-?\d+)")


def process(rank: int | None, *stacks: str | None, **more: Any) -> dict[str, Any]:
    """A process with a sample per stack; None for one without. more: fields to replace.

    cpu: CPU seconds per interval. error: of the samples without a stack. threads_at: name -> stack
    of the other threads. native_at: the native stack.
    """
    cpu, error = more.pop("cpu", 0.0), more.pop("error", "not permitted")
    threads = list(more.pop("threads_at", {}).items())
    return {
        "pid": 1000 + (rank or 0), "rank": rank, "local_rank": None, "world_size": None,
        "job": "88", "master": "gpu1:29500", "user": "ada", "command": "python train.py",
        "state": "S", "wait_channel": "futex_wait_queue", "kernel_stack": [], "tracer": 0,
        "threads": 3, "start_s": 12345.6, "cpu_s": [10 + cpu * at for at in range(len(stacks))],
        "samples": [
            {"main": stack, "threads": [list(one) for one in threads] if stack else [],
             "gil": "", "error": "" if stack else error}
            for stack in stacks
        ],
        "native": more.pop("native_at", None), "note": "", **more,
    }  # fmt: skip


def trace(node: str, *processes: dict[str, Any], **more: Any) -> Trace:
    """The trace of a node, through JSON and the reader."""
    return traces.parse(json.dumps(document(node, *processes, **more)), node)


def checked(data: dict[str, Any], node: str = "n") -> dict[str, Any]:
    """The same as the reader takes it."""
    whole: dict[str, Any] = json.loads(traces.to_json(traces.read(data, node)))
    return whole


def document(node: str, *processes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The JSON of a node's trace."""
    table: dict[tuple[Any, ...], int] = {}
    stacks: dict[str, int] = {}
    rows: list[list[int]] = []

    def number(text: str | None) -> int | None:
        if text is None:
            return None
        if text not in stacks:
            stacks[text] = len(rows)
            rows.append([table.setdefault(tuple(one), len(table)) for one in frames(text)])
        return stacks[text]

    for one in processes:
        one["native"] = number(one["native"])
        for sample in one["samples"]:
            sample["main"] = number(sample["main"])
            sample["threads"] = [[name, number(stack)] for name, stack in sample["threads"]]
    return {
        "schema": SCHEMA,
        "node": node,
        "started": "2026-01-01T00:00:00Z",
        "interval_s": 2.0,
        "error": "",
        "frames": [list(one) for one in table],
        "stacks": rows,
        "processes": list(processes),
        "instead": [],
        **more,
    }
