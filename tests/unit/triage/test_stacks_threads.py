"""The thread that waits on one rank as on no other: named as possible, and blamed for nothing.

odd_threads.json has the recorded waits of the ranks: `name call channel state count` of each, with
commas between; `*` are all other ranks.
"""

import dataclasses

import pytest

from nodeready.runs.stacks import collect
from nodeready.runs.stacks import group as grouping
from tests.builders.traces import LOAD, REDUCE, process, trace
from tests.cases import cases


def traced(tables, size, stacks=(REDUCE, REDUCE), per_node=2):
    """The traces of ranks with these waits of their threads."""
    traces = []
    for first in range(0, size, per_node):
        waits, ranks = {}, []
        for rank in range(first, first + per_node):
            rows = []
            for text in tables.get(str(rank), tables["*"]).split(", "):
                *fields, count = text.split(" ") if text else ("x", "", "", "", "0")
                key = tuple("" if field == "-" else field for field in fields)
                rows += [(waits.setdefault(key, (len(waits), rank)), int(count))] * bool(text)
            more = {"thread_rows": [(at, count) for (at, _), count in rows]}
            ranks.append(process(rank, *stacks, world_size=size, **more))
        table = [
            {"name": name, "call": call, "wait_channel": channel, "state": state,
             "number": 5000 + rank, "kernel_stack": [channel, "do_it", "leave_it"], "native": []}
            for (name, call, channel, state), (_, rank) in waits.items()
        ]  # fmt: skip
        traces.append(trace(f"gpu{first // per_node}", *ranks, thread_waits=table))
    return traces


@pytest.mark.parametrize("case", cases(__file__, "odd_threads.json"))
def test_the_odd_thread_is_named_as_possible(case):
    made = grouping.group(traced(case["ranks"], case.get("size", 4)), {})
    odd = [(row.rank, row.name, row.wait, row.peers) for row in made.odd_threads]
    assert odd == [tuple(row) for row in case.get("odd", [])], case["why"]
    said = [text for text in made.advice if text.startswith("possible: ")]
    assert len(said) == len(odd)
    assert made.verdict.kind == "quiet"
    assert not made.verdict.suspects


USUAL = "nccl futex futex_do_wait S 2, cuda-EvtHandlr poll do_poll S 1"
ODD = "nccl futex futex_do_wait S 1, nccl ioctl nv_ioctl D 1, cuda-EvtHandlr poll do_poll S 1"


def possible(made):
    return [text for text in made.advice if text.startswith("possible: ")]


def test_the_sentence_has_the_thread_its_wait_and_what_to_do_next():
    (text,) = possible(grouping.group(traced({"*": USUAL, "3": ODD}, 4), {}))
    assert text == (
        "possible: rank 3 (gpu1): a thread nccl waits in ioctl (nv_ioctl, state D), as on no "
        "other rank; kernel: nv_ioctl < do_it < leave_it; `gdb -p 5003 -batch -ex bt` there "
        "pauses this thread alone"
    )


def test_what_a_rank_lacks_has_the_command_for_that_rank_alone():
    lacks = "nccl futex futex_do_wait S 2"
    (text,) = possible(grouping.group(traced({"*": USUAL, "0": lacks}, 4), {}))
    assert "rank 0 (gpu0): no thread cuda-EvtHandlr waits in poll (do_poll), as on" in text
    assert text.endswith("`nodeready stacks INVENTORY --pid 1000 --native` shows its calls")


def first_rank(one):
    return dataclasses.replace(one, node="gpu2", processes=one.processes[:1])


def test_a_rank_that_the_stacks_blame_or_a_job_that_moves_gets_no_such_sentence():
    moves = traced({"*": USUAL, "3": ODD}, 4, stacks=(LOAD, REDUCE))
    (first, last) = traced({"*": USUAL, "3": ODD}, 4)
    (_, other) = traced({"*": USUAL, "3": ODD}, 4, stacks=(LOAD, LOAD))
    late = dataclasses.replace(other, processes=other.processes[1:])
    for kind, traces in (("not-stuck", moves), ("loader", [first, first_rank(last), late])):
        made = grouping.group(traces, {})
        assert (made.verdict.kind, len(made.odd_threads)) == (kind, 1)
        assert not possible(made)


def test_the_odd_rank_is_unwound_first_and_its_thread_with_it():
    traces = traced({"*": USUAL, "3": ODD}, 4)
    made = grouping.group(traces, {})
    assert collect.choose_native(made, 1) == {"gpu1": [1003]}
    thread = {"name": "5003", "number": 5003, "native": ["ioctl", "nv_call"]}
    second = trace("gpu1", process(3, REDUCE, native_at=REDUCE), thread_waits=[thread])
    whole, missing = collect.merged(traces[1], second, [1003])
    made = grouping.group([traces[0], whole], {})
    assert not missing
    assert made.odd_threads[0].native == ("ioctl", "nv_call")
    (text,) = possible(made)
    assert text.endswith("native: ioctl < nv_call")
