"""The answer about one rank from all looks at it, and about a node when that is too much."""

from dataclasses import replace

import pytest

from nodeready.agent.stacks import processes
from nodeready.agent.stacks import program as answer
from nodeready.agent.stacks.descendants import ENDED, StackTable, StackTarget
from nodeready.agent.stacks.processes import FROZEN, Facts, ScannedProcess, is_frozen
from nodeready.agent.stacks.py_spy import HUNG, Dump, PySpyThread
from nodeready.agent.stacks.ranks import JobRank, RankIdentity
from nodeready.runs.stacks.classify import StackNumbers, classify
from nodeready.runs.stacks.trace import read
from tests.builders.traces import checked
from tests.cases import with_table

FACTS = Facts("S", "futex_wait_queue", ("futex_wait_queue",), 1.0, 5.0, 3, 0, 1000)
#: What a row calls a look at a process.
LOOKS = {
    "S": FACTS,
    "D": replace(FACTS, state="D", wait_channel="nfs_wait", kernel_stack=("nfs_wait",)),
    "R": replace(FACTS, state="R", wait_channel="", kernel_stack=()),
    "T": replace(FACTS, state="T", wait_channel="do_signal_stop"),
    "T in a futex": replace(FACTS, state="T"),
    "Z": replace(FACTS, state="Z"),
    "frozen": replace(FACTS, state=FROZEN),
    "traced": replace(FACTS, tracer=9),
    "traced stop": replace(FACTS, state="t", tracer=9),
    "exiting": replace(FACTS, exiting=True),
    "another": replace(FACTS, start_s=6.0),
    "gone": None,
}
MAIN = (("main", "t.py", 1), ("wait", "t.py", 2))
DUMP = Dump(MAIN, tuple(PySpyThread(f"t{n}", (("f", "t.py", n),)) for n in range(20)))
HEAD = {"schema": answer.SCHEMA, "node": "n", "started": "", "interval_s": 2.0, "error": ""}
HEAD |= dict.fromkeys(("frames", "stacks", "processes", "instead"), ())


def target(*facts, dumps=(), note="") -> StackTarget:
    process = ScannedProcess(7, 1, "python3", start_s=5.0, command="python3 " + "x" * 300)
    rank = StackTarget(
        JobRank(process, RankIdentity(3, 1, 8, "88", "a:1"), note), dumps=list(dumps)
    )
    for look in facts:
        rank.add_facts(LOOKS[look])
    rank.cpu_s = [sample.cpu_s for sample in rank.facts]
    return rank


def trace_of(*targets):
    line = answer._pack_within_limits(HEAD, list(targets), [])
    return line, checked(answer.unpack(f"N {line}", "N"))


@with_table("facts, native, euid, why")
def test_why_a_process_is_not_looked_into(facts, native, euid, why):
    assert target(*facts).refusal(euid, native) == why


def test_py_spy_is_not_left_hanging_twice_and_that_it_ended_comes_first():
    rank = target("S", dumps=[Dump(error=HUNG)], note="its memory cannot be read")
    assert rank.refusal(0) == "not tried again: py-spy did not finish"
    rank.add_note("traced by process 9: not looked into")
    rank.add_facts(None)
    rank.add_facts(None)
    words = f"{ENDED}; its memory cannot be read; traced by process 9: not looked into"
    assert rank.plain(StackTable(), main=True, threads=True)["note"] == words


@with_table("facts, settled")
def test_a_state_of_a_moment_counts_only_where_there_is_no_other(facts, settled):
    assert target(*facts).lasting_facts is LOOKS[settled or "gone"]


@with_table("facts, state, kind")
def test_the_kind_of_a_rank(facts, state, kind):
    table, places = StackTable(), StackNumbers()
    data = target(*facts, dumps=[DUMP, DUMP]).plain(table, main=True, threads=True)
    trace = {**HEAD, "frames": table.frames, "stacks": table.stacks, "processes": [data]}
    trace = read(answer.unpack(f"N {answer.pack(trace)}", "N"), "n")
    (process,) = trace.processes
    assert process.state == state
    assert process.wait_channel == {"D": "nfs_wait", "": ""}.get(state, "futex_wait_queue")
    assert len(process.command) == 200
    assert classify(process, places.numbers(trace), places, 2.0).kind == kind


@with_table("cgroups, files, channel, frozen")
def test_whether_the_cgroup_of_a_process_is_frozen(monkeypatch, cgroups, files, channel, frozen):
    texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    monkeypatch.setattr(processes, "contents", lambda path: texts.get(path, ""))
    assert is_frozen(cgroups, channel) == frozen


@pytest.mark.parametrize(
    ("most", "threads", "error"), [(1000, 20, ""), (10, 0, ""), (1, 0, "its stack is too large")]
)
def test_too_much_for_an_answer(monkeypatch, most, threads, error):
    monkeypatch.setattr(answer, "_MAX_FRAMES", most)
    _, trace = trace_of(target("S", dumps=[DUMP]))
    (sample,) = trace["processes"][0]["samples"]
    assert (len(sample["threads"]), sample["error"]) == (threads, error)
    assert (sample["main"] is None) == bool(error)
    assert ("other threads are left out" in trace["processes"][0]["note"]) == (most < 1000)


@pytest.mark.parametrize(("letter", "threads"), [("f", 0), ("\U0001f600", 0), ("\U0001f600", 900)])
def test_too_much_of_one_owner_leaves_out_nothing_of_anothers(monkeypatch, letter, threads):
    """As much as py-spy may tell of a process, and what the nodes' reader would refuse."""
    for name in ("_MAX_FRAMES", "_MAX_TEXT", "_MAX_ANSWER"):
        monkeypatch.setattr(answer, name, getattr(answer, name) // 16)
    frames = [(f"{letter * 290}{n}", letter * 290, n) for n in range(400 if threads else 1000)]
    rest = tuple(PySpyThread(f"{letter * 90}{n}", tuple(frames[:1])) for n in range(threads))
    hers = []
    for number in range(4):
        main = tuple((f"{name}{number}", file, line) for name, file, line in frames)
        hers.append(target("S", dumps=[Dump(main, rest)] * 2))
        process = replace(hers[-1].rank.process, uid=100_000 + number, main_uid=100_000)
        hers[-1].rank = replace(hers[-1].rank, process=process)
    line, trace = trace_of(*hers, target("S", dumps=[DUMP]))
    assert len(line) <= answer._MAX_ANSWER
    assert len(trace["processes"]) == 5
    (sample,) = trace["processes"][-1]["samples"]
    assert (len(sample["threads"]), sample["error"]) == (20, "")
    assert trace["processes"][-1]["note"] == ""
    assert trace["processes"][0]["note"]
