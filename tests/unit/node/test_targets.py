"""The answer about one rank from all looks at it, and about a node when that is too much."""

from dataclasses import replace

import pytest

from nodeready.agent.stacks import processes
from nodeready.agent.stacks import program as answer
from nodeready.agent.stacks.descendants import ENDED, EXITING, NO_TIME, StackTable, StackTarget
from nodeready.agent.stacks.processes import FROZEN, Facts, ScannedProcess, is_frozen
from nodeready.agent.stacks.py_spy import HUNG, Dump, PySpyThread
from nodeready.agent.stacks.ranks import JobRank, RankIdentity
from nodeready.runs.stacks.classify import StackNumbers, classify
from nodeready.runs.stacks.trace import read
from tests.builders.traces import checked

FACTS = Facts("S", "futex_wait_queue", ("futex_wait_queue",), 1.0, 5.0, 3, 0, 1000)
ASLEEP = replace(FACTS, state="D", wait_channel="nfs_wait", kernel_stack=("nfs_wait",))
WAITS = "a native look would wait with it"
MAIN = (("main", "t.py", 1), ("wait", "t.py", 2))
DUMP = Dump(MAIN, tuple(PySpyThread(f"t{n}", (("f", "t.py", n),)) for n in range(20)))
HEAD = {"schema": answer.SCHEMA, "node": "n", "started": "", "interval_s": 2.0, "error": ""}
HEAD |= dict.fromkeys(("frames", "stacks", "processes", "instead"), ())


def target(*facts, dumps=(), note="") -> StackTarget:
    process = ScannedProcess(7, 1, "python3", start_s=5.0, command="python3 " + "x" * 300)
    rank = StackTarget(
        JobRank(process, RankIdentity(3, 1, 8, "88", "a:1"), note), dumps=list(dumps)
    )
    for sample in facts:
        rank.add_facts(sample)
    rank.cpu_s = [sample.cpu_s for sample in rank.facts]
    return rank


def trace_of(*targets):
    line = answer._pack_within_limits(HEAD, list(targets), [])
    return line, checked(answer.unpack(f"N {line}", "N"))


@pytest.mark.parametrize(("facts", "native", "euid", "why"), [
    ([replace(FACTS, exiting=True)], False, 0, EXITING),
    ([FACTS], False, 0, ""),
    ([FACTS], True, 1000, ""),
    ([ASLEEP], False, 0, ""),
    ([ASLEEP], True, 0, f"in state D: {WAITS}"),
    ([FACTS], False, 1001, "another user's: only that user and root may look into it"),
    ([replace(FACTS, state=FROZEN)], False, 0, ""),
    ([replace(FACTS, state=FROZEN)], True, 0, f"frozen by its cgroup: {WAITS}"),
    ([replace(FACTS, state="T")], False, 0, "stopped by a signal: not looked into"),
    ([replace(FACTS, tracer=9)], False, 0, "traced by process 9: not looked into"),
    ([replace(FACTS, state="t", tracer=9)], False, 0, "traced by process 9: not looked into"),
    ([FACTS, None], False, 0, ENDED),
    ([FACTS, replace(FACTS, state="Z")], False, 0, ENDED),
    # Its number is another's now.
    ([FACTS, replace(FACTS, start_s=6.0)], False, 0, ENDED),
    ([], False, 0, NO_TIME),
])  # fmt: skip
def test_why_a_process_is_not_looked_into(facts, native, euid, why):
    assert target(*facts).refusal(euid, native) == why


def test_py_spy_is_not_left_hanging_twice_and_that_it_ended_comes_first():
    rank = target(FACTS, dumps=[Dump(error=HUNG)], note="its memory cannot be read")
    assert rank.refusal(0) == "not tried again: py-spy did not finish"
    rank.add_note("traced by process 9: not looked into")
    rank.add_facts(None)
    rank.add_facts(None)
    words = f"{ENDED}; its memory cannot be read; traced by process 9: not looked into"
    assert rank.plain(StackTable(), main=True, threads=True)["note"] == words


RUNS = replace(FACTS, state="R", wait_channel="", kernel_stack=())
STOPPED = replace(FACTS, state="T", wait_channel="do_signal_stop")


@pytest.mark.parametrize(("facts", "settled"), [
    ((), None),
    ((FACTS, RUNS), FACTS),
    ((RUNS, FACTS, ASLEEP), FACTS),
    ((FACTS, RUNS, ASLEEP), FACTS),
    ((RUNS, ASLEEP), RUNS),
    ((ASLEEP, ASLEEP), ASLEEP),
    ((FACTS, STOPPED), STOPPED),
    # Somebody has sent SIGCONT since.
    ((STOPPED, RUNS), RUNS),
    ((STOPPED, ASLEEP), ASLEEP),
])  # fmt: skip
def test_a_state_of_a_moment_counts_only_where_there_is_no_other(facts, settled):
    assert target(*facts).lasting_facts is settled


@pytest.mark.parametrize(("facts", "state", "kind"), [
    ([FACTS, FACTS], "S", "stack"),
    # Every process waits for a disk now and then.
    ([FACTS, ASLEEP], "S", "stack"),
    ([ASLEEP, ASLEEP], "D", "uninterruptible"),
    ([FACTS, replace(FACTS, state="T")], "T", "stopped"),
    ([FACTS, replace(FACTS, state=FROZEN)], FROZEN, "frozen"),
    ([FACTS, replace(FACTS, tracer=9)], "S", "traced"),
    ([FACTS, replace(FACTS, state="Z")], "Z", "dead"),
    ([FACTS, None], "S", "dead"),
    ([], "", "stack"),
])  # fmt: skip
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


@pytest.mark.parametrize(("cgroups", "files", "channel", "frozen"), [
    ("6:freezer:/docker/1\n0::/\n", {"freezer/docker/1/freezer.state": "FROZEN\n"}, "", True),
    ("6:freezer:/docker/1\n", {"freezer/docker/1/freezer.state": "FREEZING\n"}, "", True),
    ("6:freezer:/docker/1\n", {"freezer/docker/1/freezer.state": "THAWED\n"}, "", False),
    ("0::/a.slice/b\n", {"a.slice/b/cgroup.events": "populated 1\nfrozen 1\n"}, "", True),
    ("9:cpu:/x\n0::/b\n", {"unified/b/cgroup.events": "populated 1\nfrozen 1\n"}, "", True),
    ("0::/b\n", {"b/cgroup.events": "populated 1\nfrozen 0\n"}, "futex_wait_queue", False),
    # The node's files are not those of the container that this runs in.
    ("0::/../b\n", {}, "do_freezer_trap", True),
    ("", {}, "__refrigerator", True),
])  # fmt: skip
def test_whether_the_cgroup_of_a_process_is_frozen(monkeypatch, cgroups, files, channel, frozen):
    texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    monkeypatch.setattr(processes, "contents", lambda path: texts.get(path, ""))
    assert is_frozen(cgroups, channel) == frozen


@pytest.mark.parametrize(
    ("most", "threads", "error"), [(1000, 20, ""), (10, 0, ""), (1, 0, "its stack is too large")]
)
def test_too_much_for_an_answer(monkeypatch, most, threads, error):
    monkeypatch.setattr(answer, "_MAX_FRAMES", most)
    _, trace = trace_of(target(FACTS, dumps=[DUMP]))
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
        hers.append(target(FACTS, dumps=[Dump(main, rest)] * 2))
        process = replace(hers[-1].rank.process, uid=100_000 + number, main_uid=100_000)
        hers[-1].rank = replace(hers[-1].rank, process=process)
    line, trace = trace_of(*hers, target(FACTS, dumps=[DUMP]))
    assert len(line) <= answer._MAX_ANSWER
    assert len(trace["processes"]) == 5
    (sample,) = trace["processes"][-1]["samples"]
    assert (len(sample["threads"]), sample["error"]) == (20, "")
    assert trace["processes"][-1]["note"] == ""
    assert trace["processes"][0]["note"]
