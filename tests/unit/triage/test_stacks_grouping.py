"""Who stands with whom, what the groups say, in which order, and what the advice is."""

import json
import tracemalloc
from typing import Any

import jsonschema
import pytest

from nodeready.agent.asking import Answer
from nodeready.agent.stacks import program as answer
from nodeready.agent.stacks.ranks import claim_note
from nodeready.core import outcome
from nodeready.core.outcome import Gap, NodeGap, node_gaps, reasons_of
from nodeready.fleet.inventory.slurm import JobPlacement
from nodeready.reports import json_report
from nodeready.runs.stacks import collect
from nodeready.runs.stacks import group as grouping
from nodeready.runs.stacks.collect import capture, merged
from nodeready.runs.stacks.document import (
    Frame,
    Group,
    Rank,
    Stacks,
    fold_ranks,
    stacks_code,
    tree,
)
from nodeready.runs.stacks.trace import to_json
from tests.builders.traces import C10D, LOAD, REDUCE, TRAIN, document, process, trace
from tests.paths import schema
from tests.unit.commands import program

VALID = jsonschema.Draft202012Validator(schema("stacks"))
TWICE = (REDUCE, REDUCE)
WAIT = f"{TRAIN} > wait multiprocessing/popen_fork.py 43"
ELSEWHERE = "<module> serve.py 9 > work serve.py 5"


def fleet(*odd: dict[str, Any], ranks: int = 8, size: int = 4, **more: Any) -> list[Any]:
    """Ranks that all wait in one collective, but for the odd ones, four ranks per node."""
    every = {rank: process(rank, *TWICE) for rank in range(ranks)}
    every |= {row["rank"]: row for row in odd}
    rows = [{**row, "local_rank": rank % size, **more} for rank, row in every.items()]
    return [trace(f"gpu{at // size + 1}", *rows[at : at + size]) for at in range(0, ranks, size)]


def group(traces: Any, gaps: dict[str, Gap] | None = None, **more: Any) -> Stacks:
    """Grouped; what is promised of every document is checked each time."""
    made = grouping.group(traces, gaps or {}, **more)
    VALID.validate(json.loads("".join(json_report.render(made))))
    for index, one in enumerate(made.groups):
        mine = [process for process in made.processes if process.group == index]
        assert len(mine) == one.processes
        found = {process.rank for process in mine} - {None}
        assert one.kind == "missing" or found == set(one.ranks)
    return made


def brief(made: Stacks) -> list[tuple[str, str | None, str]]:
    return [(group.kind, group.verdict, fold_ranks(group.ranks)) for group in made.groups]


def advice(made: Stacks) -> str:
    return "\n".join(made.advice)


REST = ("stack", "blocked", "0-2,4-7")
ALL = [("stack", "blocked", "0-7")]


@pytest.mark.parametrize(("odd", "kind", "verdict", "reason"), [
    (process(3, LOAD, LOAD), "stack", "blocked", ""),
    (process(3, LOAD, LOAD, cpu=1.9), "stack", "spinning", ""),
    # It got data of another rank, or what only another can end has ended, and waits for more.
    (process(3, LOAD, LOAD, received=["MainThread"]), "stack", "progressing", ""),
    (process(3, LOAD, LOAD, received=["writer"]), "stack", "blocked", ""),
    (process(3, LOAD, LOAD, switches=[5, 6], untimed=True), "stack", "progressing", ""),
    (process(3, LOAD, LOAD, switches=[5, 6]), "stack", "unsure", ""),
    (process(3, LOAD, LOAD, switches=[5, 5], untimed=True), "stack", "blocked", ""),
    (process(3, REDUCE, LOAD), "stack", "progressing", ""),
    # Of a rank that has stayed only the last line may differ.
    (process(3, LOAD, LOAD.replace("359", "360")), "stack", "blocked", ""),
    (process(3, LOAD, LOAD.replace("1251", "1252")), "stack", "progressing", ""),
    # At the same place as the others.
    (process(3, *TWICE, cpu=2.0), "stack", "spinning", ""),
    (process(3, LOAD), "stack", None, ""),
    (process(3, None, LOAD, error="did not finish"), "stack", None, ""),
    (process(3, LOAD, LOAD, None), "stack", "blocked", ""),
    (process(3, LOAD, LOAD, cpu=0.09), "stack", "blocked", ""),
    (process(3, LOAD, LOAD, cpu=0.11), "stack", "spinning", ""),
    (process(3, LOAD, LOAD, state="D"), "uninterruptible", None, "in futex_wait_queue"),
    (process(3, None, state="D", kernel_stack=["rpc_wait_bit_killable+0x1a/0x30", "x"]),
     "uninterruptible", None, "in rpc_wait_bit_killable"),
    (process(3, REDUCE, LOAD, state="D"), "stack", "progressing", ""),
    (process(3, None, state="T"), "stopped", None, "by a signal"),
    (process(3, LOAD, LOAD, state="F"), "frozen", None, "its cgroup"),
    (process(3, LOAD, LOAD, state="t"), "traced", None, "a debugger"),
    (process(3, None, tracer=4711), "traced", None, "a debugger"),
    (process(3, LOAD, note="ended while it was looked at"), "dead", None, "ended while"),
    (process(3, None, state="Z"), "dead", None, "a zombie"),
    (process(3, None, error="it has ended"), "dead", None, "it has ended"),
    (process(3, None), "no-data", None, "not permitted"),
    (process(3, None, error="", note="another user's"), "no-data", None, "another user's"),
    (process(3), "no-data", None, "no stack was taken"),
    (process(3, None, error="not Python, or one that py-spy does not know"), "no-data", None,
     "not Python: it waits in futex_wait_queue"),
    (process(3, None, error="not Python", state="R"), "no-data", None, "not Python: it runs"),
])  # fmt: skip
def test_the_odd_rank_comes_first(odd, kind, verdict, reason):
    made = group(fleet(odd))
    assert brief(made) == [(kind, verdict, "3"), REST]
    assert reason in made.groups[0].no_stack_reason
    assert bool(made.groups[0].no_stack_reason) == (kind != "stack")
    assert made.groups[0].nodes == ("gpu1",)
    assert made.groups[1].nodes == ("gpu1", "gpu2")


def test_the_kinds_have_an_order():
    odd = [process(1, LOAD, LOAD), process(2, None), process(4, None, tracer=9)]
    odd += [process(rank, None, state=state) for rank, state in ((3, "D"), (5, "T"), (6, "Z"))]
    kinds = [one.kind for one in group(fleet(*odd, ranks=16, world_size=17)).groups]
    known = "missing dead stopped traced uninterruptible stack no-data stack"
    assert " ".join(kinds) == known
    # The usual one comes last.
    made = group([trace("a", *(process(rank, None) for rank in range(7)), process(7, *TWICE))])
    assert [one.kind for one in made.groups] == ["stack", "no-data"]
    assert "--only ptrace" in advice(made)
    # Slurm, and no kernel, refused this.
    denied = "srun: Unable to create step for job 1: Access/permission denied"
    assert "--only ptrace" not in advice(group([], {"a": Gap(outcome.LATE, denied)}))


C10D_LATER = REDUCE.replace(f"{C10D} 2806", f"{C10D} 2811")
CALLED_LATER = REDUCE.replace("step train.py 40", "step train.py 44")


def test_lines_of_a_library_are_equal_and_lines_of_the_user_are_not():
    assert brief(group(fleet(process(5, REDUCE)))) == ALL
    # Addresses make no difference.
    one, two = (f"{TRAIN} > {at} libc.so 0 > f+{at} x.so 0" for at in ("0x7f01", "0x7f02"))
    made = group([trace("a", process(0, one, one), process(1, two, two))])
    assert brief(made) == [("stack", "blocked", "0-1")]
    assert [frame.function for frame in made.groups[0].frames[-2:]] == ["?", "f"]
    made = group(fleet(process(3, C10D_LATER, C10D_LATER)))
    assert brief(made) == ALL
    assert [frame.line for frame in made.groups[0].frames] == [90, 70, 40, 0]
    made = group(fleet(process(3, CALLED_LATER, CALLED_LATER)))
    assert brief(made) == [("stack", "blocked", "3"), REST]
    assert "rank 3 in all_reduce at step train.py:44, ranks 0-2,4-7 in all_red" in advice(made)


def test_a_fork_is_where_a_group_leaves_all_larger_ones():
    short = "<module> train.py 90 > train train.py 70"
    odd = (process(1, LOAD, LOAD), process(2, short, short), process(5, *TWICE, cpu=2.0))
    made = group(fleet(*odd))
    forks = {fold_ranks(one.ranks): one.fork for one in made.groups}
    assert forks == {"1": 3, "2": 2, "5": 4, "0,3-4,6-7": 0}


def test_all_at_one_collective_points_at_the_network_and_a_job_that_moves_does_not():
    made = group(fleet(world_size=8), started="2026-01-01T00:00:00Z", finished="")
    assert "waits in a collective" in made.groups[0].hint
    assert "rdma.errors,nics.errors" in advice(made)
    assert "NCCL_DEBUG=INFO" in advice(made)
    assert (made.world_size, made.started) == (8, "2026-01-01T00:00:00Z")
    moves = group(fleet(*(process(rank, REDUCE, LOAD) for rank in range(6))))
    assert "6 of 8 ranks move" in advice(moves)
    assert all(not one.hint for one in moves.groups if one.verdict == "progressing")


def test_stages_of_a_pipeline_are_no_suspects():
    pipe = f"{TRAIN} > _step_microbatches torch/distributed/pipelining/schedules.py 700"
    stages = [f"{pipe} > stage_{at} pipe.py {at}" for at in range(4)]
    made = group(
        [trace(f"n{at}", *(process(4 * at + i, stages[at], stages[at], cpu=1) for i in range(4)))
         for at in range(4)]
    )  # fmt: skip
    assert [fold_ranks(one.ranks) for one in made.groups] == ["0-3", "4-7", "8-11", "12-15"]
    assert "stages of a pipeline" in advice(made)
    assert {one.role for one in made.groups} == {None}
    rows = [row.replace("torch/distributed/pipelining/", "my/") for row in stages]
    other = group([trace("a", *(process(at, row, row) for at, row in enumerate(rows)))])
    assert "pipeline" not in advice(other)


def test_different_collectives_are_a_mismatch_and_blame_no_rank():
    other = f"{TRAIN} > broadcast {C10D} 2000"
    made = group(fleet(process(3, other, other)))
    assert "all ranks wait for others, at 2 places (rank 3 in broadcast at step" in advice(made)
    assert "blame no rank" in advice(made)
    assert "suspect" not in advice(made)
    assert {one.role for one in made.groups} == {"victim"}


@pytest.mark.parametrize(("nodes", "errors", "more", "expected", "reason"), [
    ("0123", {}, {}, (), ""),
    ("012", {"n3": "timed out"}, {}, ("n3",), "expected on n3, without an answer"),
    ("023", {}, {}, (), "no node has them"),
    ("02", {"n1": "x", "n3": "y"}, {}, ("n1", "n3"), "expected on n[1,3], without an answer"),
    ("02", {"n1": "x"}, {}, (), "1 node gave no answer"),
    ("012", {"n3": "timed out"}, {"complete": False}, (), ""),
])  # fmt: skip
def test_missing_ranks_are_expected_where_they_should_be(nodes, errors, more, expected, reason):
    ranks = {int(node): (2 * int(node), 2 * int(node) + 1) for node in nodes}
    traces = [
        trace(f"n{node}", *(process(rank, *TWICE, world_size=8) for rank in pair))
        for node, pair in ranks.items()
    ]
    made = group(
        traces, {node: Gap(outcome.LATE, reason) for node, reason in errors.items()}, **more
    )
    missing = [one for one in made.groups if one.kind == "missing"]
    assert [one.kind for one in made.groups].count("no-data") == len(set(errors.values()))
    assert (reasons_of(made.gaps), made.world_size) == (errors, 8)
    assert bool(missing) == bool(reason)
    for one in missing:
        assert one.nodes == expected
        assert {*one.ranks} == {*range(8)} - {rank for pair in ranks.values() for rank in pair}
        assert reason in one.no_stack_reason
        assert ("gave no answer: see" if expected else "dmesg") in advice(made)


@pytest.mark.parametrize(("part", "kinds"), [("", ["missing", "stack"]), ("--pid", ["stack"])])
def test_a_rank_that_nobody_asked_for_is_not_missing(part, kinds):
    made = group([trace("n1", process(0, *TWICE, world_size=2), part=part)])
    assert [one.kind for one in made.groups] == kinds
    # As it is where the others of a node are.
    assert {one.nodes for one in made.groups} == {("n1",)}


@pytest.mark.parametrize(("sizes", "world", "words"), [
    ((8, 4), None, "disagree on WORLD_SIZE"),
    ((10**9, 10**9), 10**9, "which no job has"),
    ((-1, -1), -1, "which no job has"),
    ((1, 1), 1, "rank 1 is outside of WORLD_SIZE 1"),
    ((None, None), None, ""),
])  # fmt: skip
def test_a_world_size_that_cannot_be_is_not_believed(sizes, world, words):
    tracemalloc.start()
    rows = [process(rank, *TWICE, world_size=size) for rank, size in enumerate(sizes)]
    made = group([trace("a", *rows)])
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
    assert made.world_size == world
    assert [one.kind for one in made.groups] == ["stack"]
    assert words in advice(made)


def test_a_rank_that_two_processes_claim_is_there_twice():
    made = group([*fleet(), trace("gpu9", process(3, *TWICE, pid=77))])
    twice = [(row.node, row.pid) for row in made.processes if row.rank == 3]
    assert twice == [("gpu1", 1003), ("gpu9", 77)]
    assert made.groups[0].processes == 9
    assert "gpu1 pid 1003, gpu9 pid 77" in advice(made)


def fakes(count: int, **more: Any) -> list[Any]:
    more = {"user": "mallory", **more}
    return [trace("gpu9", *(process(n, LOAD, LOAD, pid=9000 + n, **more) for n in range(count)))]


def test_a_node_without_an_answer_is_no_suspect_where_every_rank_was_found():
    refused = {"gpu9": Gap(outcome.UNREACHABLE, "10.0.0.9 refused user root")}
    made, alone = (group(fleet(world_size=8), gaps) for gaps in (refused, {}))
    assert (brief(made), made.verdict) == (ALL, alone.verdict)
    assert made.gaps == node_gaps(refused)
    lacking = group(fleet(ranks=7, world_size=8), refused)
    assert "gpu9" in {node for one in lacking.groups for node in one.nodes}


EARLY = {"job": "ffffffff", "command": "ray::Rollout"}


@pytest.mark.parametrize(("jobs", "shown"), [(("01000000",), 2), (("01000000", "02000000"), 1)])
def test_a_worker_that_ray_has_started_before_its_job_is_of_the_only_job_of_its_user(jobs, shown):
    rows = [process(None, LOAD, pid=50 + n, **EARLY | {"job": job}) for n, job in enumerate(jobs)]
    made = grouping.group([trace("a", *rows), trace("b", process(None, LOAD, **EARLY))], {})
    assert (made.job, len(made.processes)) == (jobs[0], shown)


def test_a_process_for_which_no_other_one_waits_is_no_suspect():
    """A server waits for its engine, and a worker has nothing to do."""
    nap = {"wait_channel": "hrtimer_nanosleep", "switches": [0, 40], "main_cpu_s": [0.0, 0.001]}
    server = process(None, WAIT, WAIT, pid=1, waits_for=[["MainThread", "pid 2"]], command="api 1")
    engine = process(None, LOAD, LOAD, pid=2, command="VLLM::EngineCore_DP0")
    idle = process(None, ELSEWHERE, ELSEWHERE, pid=3, command="worker 1", **nap)
    made = grouping.group([trace("a", server, engine, idle)], {})
    assert any("it is VLLM::EngineCore_DP0 (engine core of vLLM)" in g.reason for g in made.groups)
    roles = {group.reason.partition("it is ")[2][:5]: group.role for group in made.groups}
    assert roles == {"api 1": "victim", "VLLM:": "suspect", "worke": None}
    assert made.verdict.kind == "loader"


def test_what_another_user_claims_is_no_rank_of_the_job():
    made = group([*fakes(3), *fleet()])
    assert (made.job, made.user, brief(made)) == ("88", "ada", ALL)
    assert {row.node for row in made.processes} == {"gpu1", "gpu2"}
    assert [tuple(other) for other in made.other_jobs] == [("88", "mallory", 3, True, ("gpu9",))]
    # Many processes of the same rank are no larger job.
    crowd = [process(n % 4, LOAD, LOAD, user="mallory", pid=9000 + n) for n in range(300)]
    assert group([trace("gpu9", *crowd), *fleet()]).user == "ada"
    assert made.advice[-2:] == (
        "shown is job 88 of ada; there are also 88 (3 processes of mallory): choose with "
        "--user NAME",
        "the owner of job 88 is unknown: ada, mallory claim it: choose with --user NAME",
    )
    # Where their node knows better, they are no job, however many they are.
    note = "claims job 88, which is another user's: not looked into"
    made = group([*fakes(40, world_size=40, note=note), *fleet()])
    assert (made.user, made.advice[-1]) == (
        "ada",
        "40 processes claim to be of job 88 and are not: of mallory on gpu9",
    )


@pytest.mark.parametrize("own", [{"slurm_job": "88"}, {}], ids=["cgroup", "no cgroup"])
def test_a_claim_on_another_node_is_no_rank_even_of_the_job_s_user(own):
    """The claims fill no gap and take no blame; they are listed although nobody else is there."""
    note = claim_note("88", is_elsewhere=True)
    claims = fakes(40, user="ada", world_size=40, note=note, **own)
    job = fleet(process(5, LOAD, LOAD), ranks=7, world_size=8, **own)
    made, alone = group([*claims, *job, trace("gpu3")]), group([*job, trace("gpu3")])
    assert (brief(made), made.verdict) == (brief(alone), alone.verdict)
    assert {row.node for row in made.processes} == {"gpu1", "gpu2"}
    assert [tuple(other) for other in made.other_jobs] == [("88", "ada", 40, True, ("gpu9",))]
    last = "40 processes claim to be of job 88 and are not: of ada on gpu9"
    assert made.advice[-1] == last
    made = group(claims)
    assert (made.job, made.groups, made.verdict, made.advice[-1]) == ("88", (), None, last)


def test_a_node_on_which_slurm_does_not_run_the_job_can_only_claim_it():
    """It is told so, and whatever it answers: here the ranks of the job's own cgroup."""
    config, asked = collect.program_config(60, job="88"), {}
    fake = trace("gpu9", *(process(n, LOAD, LOAD, slurm_job="88") for n in range(8)))
    texts = {row.node: to_json(row) for row in [*fleet(), fake, trace("gpu8")]}

    def ask(_: str, requests: Any) -> Any:
        asked.update(requests)
        return {
            name: Answer(stdout=f"{config.nonce} {answer.pack(json.loads(texts[name]))}\n")
            for name in requests
        }

    placement = JobPlacement("1000", ("n1", "n2"), frozenset({"gpu8", "gpu9"}))
    captured = capture(ask, texts, config, placement)
    told = {name: "'is_elsewhere': True" in request.payload for name, request in asked.items()}
    assert told == {"gpu1": False, "gpu2": False, "gpu8": True, "gpu9": True}
    made = group(captured.traces(), captured.gaps)
    assert (brief(made), {row.node for row in made.processes}) == (ALL, {"gpu1", "gpu2"})
    assert [tuple(other) for other in made.other_jobs] == [("88", "ada", 8, True, ("gpu9",))]
    words = "Slurm runs the job on n[1-2]. Processes on gpu9 claim the job"
    assert words in collect.no_ranks_reason(captured)


def test_the_job_of_slurms_own_cgroup_is_shown_whatever_others_claim():
    own = fleet(slurm_job="88")
    made = group([*fakes(40, world_size=40), *fakes(1, job="89"), *own])
    assert (made.job, made.user, len(made.processes)) == ("88", "ada", 8)
    # What its user runs outside of the cgroup is the job's; a cgroup is worth more than words.
    outside = trace("gpu8", process(8, *TWICE))
    made = group([*fakes(5, slurm_job="99", job="88"), outside, *own])
    assert (made.job, len(made.processes)) == ("88", 9)
    assert [tuple(other) for other in made.other_jobs] == [("99", "mallory", 5, False, ("gpu9",))]


@pytest.mark.parametrize("lie", [{"slurm_job": "99"}, {"job": "99"}, {"user": "mallory"}])
def test_a_node_that_makes_up_a_job_hides_no_other_node_s(lie):
    made = group([*fakes(300, **{"user": "ada", **lie}), *fleet()])
    assert (made.job, made.user, len(made.processes)) == ("88", "ada", 8)
    assert [other.processes for other in made.other_jobs] == [300]
    assert ("99 (300 processes): choose with --job" in advice(made)) == ("user" not in lie)


def test_nodes_without_an_answer_are_together_by_their_reason():
    reasons = {"gpu7": "gpu7: refused", "gpu10": "gpu10: refused", "gpu8": "timed out"}
    gaps = {node: Gap(outcome.LATE, reason) for node, reason in reasons.items()}
    part = trace("a", process(8, *TWICE), error="the native round: connection lost")
    made = group([*fleet(), part], gaps)
    # A node with a part of an answer is not silent.
    gaps["a"] = Gap(outcome.INCOMPLETE, "the native round: connection lost")
    assert made.gaps == node_gaps(gaps)
    assert "a: a part of the answer" in advice(made)
    lost = (one for one in made.groups if one.kind == "no-data")
    rows = [(one.ranks, one.nodes, one.no_stack_reason) for one in lost]
    assert rows == [((), ("gpu8",), "timed out"), ((), ("gpu7", "gpu10"), "NODE: refused")]


@pytest.mark.parametrize(("error", "is_there"), [
    ("py-spy does not know the version of its Python", True),
    ("py-spy cannot read it: a Python that it does not know, or more than 4096 calls deep", True),
    ("not Python, or one that py-spy does not know", False),
    ("not permitted", False),
])  # fmt: skip
def test_a_rank_whose_python_py_spy_does_not_know_can_be_attached_to(error, is_there):
    text = advice(group(fleet(process(3, None, error=error))))
    assert ("rank 3: if its Python is 3.14 or newer, `nodeready stacks INVENTORY --attach 3`" in
            text) is is_there  # fmt: skip


def test_without_a_rank_the_advice_is_what_runs_instead():
    made = group([trace("a", instead=["python3 serve.py (pid 77, user bob)"]), trace("b")])
    assert (made.groups, made.processes, made.world_size) == ((), (), None)
    assert "a runs python3 serve.py (pid 77, user bob)" in advice(made)
    assert group([]).advice == ()


def test_deep_stacks_that_all_differ_are_groups_of_their_own():
    deep = " > ".join(f"f{at} x.py {at + 1}" for at in range(1200))
    rows = [process(rank, *[f"{deep} > g{rank} y.py 1"] * 2) for rank in range(5)]
    assert len(grouping.group([trace("a", *rows)], {}).groups) == 5


def test_all_threads_split_what_the_main_threads_have_in_common():
    idle, busy = "run x.py 1 > wait threading.py 3", "run x.py 1 > read y.py 3"
    native = f"{TRAIN} > take_gil libpython3.so 0"
    odd = process(3, *TWICE, threads_at={"Thread-9": busy}, native_at=native)
    rows = [process(rank, *TWICE, threads_at={f"Thread-{rank}": idle}) for rank in range(3)]
    made = group([trace("a", *rows, odd)], all_threads=True)
    assert [one.ranks for one in made.groups] == [(3,), (0, 1, 2)]
    (thread,) = made.groups[0].threads
    assert (thread.name, thread.frames[-1].function) == ("Thread-9", "read")
    assert made.groups[0].native[-1].function == "take_gil"
    assert "global lock" in made.groups[0].hint
    again = [process(rank, *TWICE, threads_at={"t": busy}) for rank in range(4)]
    assert len(group([trace("a", *again)]).groups) == 1


FRAMES = (Frame("train", "train.py", 1),)


def bare(kind: str, size: int, frames: tuple[Frame, ...] = FRAMES) -> Group:
    return Group(kind, None, (), (), frames, processes=size)


def stacks(*groups: Group, state: str = "S", **more: Any) -> Stacks:
    """Each group's processes, two on a node."""
    indexes = [index for index, one in enumerate(groups) for _ in range(one.processes)]
    ranks = tuple(
        Rank(f"gpu{pid // 2}", pid, pid, None, state, "", None, index)
        for pid, index in enumerate(indexes)
    )
    return Stacks("", "", "", None, groups, ranks, **{"gaps": (), **more})


def test_a_process_of_each_group_gives_its_native_stack_and_all_odd_ones_do():
    some = stacks(bare("missing", 0), bare("stack", 3), bare("stopped", 1), bare("stack", 40))
    assert collect.choose_native(some) == {"gpu0": [0, 1], "gpu2": [4], "gpu1": [2]}
    many = stacks(*[bare("stack", 9)] * 30, bare("stack", 40))
    pids = [pid for numbers in collect.choose_native(many).values() for pid in numbers]
    assert pids == [9 * index for index in range(collect.MAX_UNWOUND)]
    assert collect.choose_native(stacks(bare("no-data", 3, ()))) == {}
    # Nobody is paused who would not come back.
    for state in ("D", "D (disk sleep)", "T", "t", "Z"):
        assert collect.choose_native(stacks(bare("stack", 3), state=state)) == {}


def test_native_stacks_go_into_the_first_trace_and_a_process_without_is_named():
    first = trace("gpu1", *(process(rank, "main a.py 1 > wait a.py 2") for rank in (1, 2, 3)))
    named = process(2, note="no native stack: not permitted")
    second = trace("gpu1", process(1, native_at="main a.py 1 > read libc.so.6 0"), named)
    whole, missing = merged(first, second, [1001, 1002, 1003])
    native = [whole.frames[index] for index in whole.stacks[whole.processes[0].native]]
    assert native == [("main", "a.py", 1), ("read", "libc.so.6", 0)]
    assert [process.native for process in whole.processes] == [1, None, None]
    assert missing == [(1002, "not permitted"), (1003, "it has ended")]
    assert first.stacks == ((0, 1),)


def silent(*kinds: str) -> dict[str, Any]:
    return {"gaps": tuple(NodeGap(f"gpu{n}", kind, "why") for n, kind in enumerate(kinds))}


@pytest.mark.parametrize(("document", "code"), [
    (stacks(bare("stack", 2), bare("stack", 1)), 0),
    (stacks(bare("uninterruptible", 1), bare("stack", 1)), 0),
    (stacks(bare("missing", 0, ()), bare("stack", 1)), 3),
    (stacks(bare("stopped", 1, ()), bare("stack", 1)), 3),
    (stacks(bare("stack", 1), **silent(outcome.NO_PYTHON)), 3),
    (stacks(bare("stack", 1), **silent(outcome.HUNG)), 3),
    (stacks(bare("no-data", 0, ()), **silent(outcome.UNREACHABLE)), 4),
    (stacks(bare("stack", 1), **silent(outcome.LOST, outcome.FAILED)), 1),
    (stacks(), 2),
    (stacks(complete=False), 130),
])  # fmt: skip
def test_the_exit_code(document, code):
    assert stacks_code(document) == code


@pytest.mark.parametrize(("ranks", "text"), [
    ([], ""),
    ([8, 7, 7], "7-8"),
    ([0, 2, 4], "0,2,4"),
    (range(1, 131_072, 8), "1-131065/8"),
    ([0, 4, 8, 12, 13, 14], "0-12/4,13-14"),
    ([0, 2, 3, 4, 5, 9, 10], "0,2-5,9-10"),
])  # fmt: skip
def test_ranks_are_folded(ranks, text):
    assert fold_ranks(ranks) == text


def test_the_schema_refuses_values_that_cannot_be():
    good = json.loads("".join(json_report.render(group(fleet(world_size=9)))))
    for at, name, value in ((0, "processes", 1), (1, "kind", "odd"), (1, "ranks", [-1])):
        groups = [*good["groups"]]
        groups[at] = {**groups[at], name: value}
        assert not VALID.is_valid({**good, "groups": groups})


@pytest.mark.parametrize(
    ("later", "words"), [(LOAD, ""), (REDUCE, "all 2 ranks wait in all_reduce")]
)
def test_quiet_prints_nothing_of_a_job_that_goes_on(run, later, words):
    ranks = [process(rank, REDUCE, later, world_size=2) for rank in range(2)]
    node = program(lambda nonce: f"{nonce} {answer.pack(document('gpu1', *ranks))}\n")
    done = run({"gpu1": node}, "stacks", "-q")
    assert done.code == 0
    assert words in done.out
    assert bool(done.out) == bool(words)


def test_what_is_common_is_in_the_tree_once():
    rows = [process(rank, REDUCE) for rank in (0, 1, 2)]
    rows += [process(3, LOAD.replace("90", "91")), process(4, TRAIN), process(5, None)]
    (module,) = (root := tree(group([trace("a", *rows)]))).children
    (train,) = module.children
    (step,) = train.children
    assert (root.frame, root.processes, root.ranks) == (None, 5, (0, 1, 2, 3, 4))
    assert (module.frame.line, step.frame.line, step.groups) == (0, 40, (0, 2, 3))
    assert [(one.frame.function, one.processes, one.ranks) for one in step.children] == [
        ("all_reduce", 3, (0, 1, 2)),
        ("_try_get_data", 1, (3,)),
    ]
    assert tree(group([trace("a", process(1, None))])).children == ()


def test_system_calls_are_folded_over_the_ranks_of_a_group():
    """Ports and pids differ between ranks, and the calls are the same."""

    def spinning(rank: int, rows: list[tuple[str, str, int]], traced_s: float) -> dict[str, Any]:
        calls = [
            dict(zip(("call", "object", "count", "peer"), (*row, ""), strict=True)) for row in rows
        ]
        return process(rank, *TWICE) | {"system_calls": calls, "traced_s": traced_s}

    peer = "10.0.0.1:{}, pid {} (python3)"
    first = spinning(0, [("recvfrom EAGAIN", peer.format(41, 7), 4000), ("futex", "", 1000)], 0.5)
    second = spinning(1, [("recvfrom EAGAIN", peer.format(52, 8), 100)], 5.0)
    (found,) = grouping.group([trace("a", first, second)], {}).groups
    assert [tuple(row) for row in found.system_calls] == [
        ("recvfrom EAGAIN", peer.format(41, 7), 4100, 5.5, (0, 1)),
        ("futex", "", 1000, 0.5, (0,)),
    ]
    assert "strace stopped after 5,000 system calls" in found.reason


def test_a_group_takes_over_for_whom_another_one_waits():
    group, joined = (grouping.Bucket("stack", verdict, "") for verdict in ("unsure", "blocked"))
    group.waits_for, group.numbers, group.commands = (3,), {1}, {"train"}
    joined.waits_for, joined.numbers, joined.commands = (0,), {2}, {"serve"}
    group.take(joined)
    assert (group.waits_for, group.numbers) == ((0, 3), {1, 2})
    assert group.commands == {"train", "serve"}
