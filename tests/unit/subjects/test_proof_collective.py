"""proof.collective: what a smoke test showed of the nodes, as one check of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeready.cli import ready as command
from nodeready.policy import Policy
from nodeready.ready import run as ready
from nodeready.smoke import judge, run
from nodeready.smoke.document import (
    PASSED,
    SUSPECT,
    UNREACHABLE,
    UNTESTED,
    WARNED,
    Node,
    Smoke,
    Suspect,
)
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import checks, facts
from nodeready.subjects.proof.facts import Collective, Proved, User
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport.base import UNREACHABLE as UNREACHED
from nodeready.transport.base import Failure, Key
from nodeready.transport.look import Look
from tests.builders.judging import by_name

USER = User("ml", 2000, True, "")
WELL = Collective(12, "torch 2.13.0 over gloo", "sums of the job's PyTorch")
LEFT_OUT = "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"


@pytest.mark.parametrize(
    ("seen", "status", "actual"),
    [
        (WELL, "ok", "torch 2.13.0 over gloo: sums of the job's PyTorch"),
        (Collective(1), "na", "one node alone"),
        (None, "na", "not proved"),
        (Unknown(facts.UNFINISHED), "unknown", "did not finish in time"),
        (
            Collective(12, "torch", against=("fails in all groups [3]", "dies alone [1]")),
            "fail",
            "fails in all groups [3]; dies alone [1]",
        ),
        # Evidence counts more than what was not tested, and than warnings.
        (Collective(12, against=("dies [1]",), untested="stopped"), "fail", "dies [1]"),
        (Collective(12, untested="7 GPUs, 8 on 11 nodes"), "unknown", "7 GPUs, 8 on 11 nodes"),
        (Collective(12, untested="no PyTorch", lacking=True), "na", "no PyTorch"),
        (
            Collective(12, "torch", warnings=("GPU 3: 2 new uncorrected ECC errors",)),
            "warn",
            "GPU 3: 2 new uncorrected ECC errors",
        ),
    ],
)
def test_what_is_judged_of_a_node(seen, status, actual):
    found = by_name(checks, Proved(USER, collective=seen), Policy())["collective"]
    assert (found.status, found.actual) == (status, actual)
    assert (found.fix == LEFT_OUT) == (status == "fail")


def smoke(*nodes: Node, suspects: tuple[Suspect, ...] = (), **more: Any) -> Smoke:
    made: dict[str, Any] = {
        "started": "", "finished": "", "complete": True, "engine": "torch 2.13.0 over nccl",
        "proves": "NCCL", "control": "", "budget_s": 300, "tests": 9, "alone": 4, "rounds": 3,
        "nodes": nodes, "suspects": suspects, "links": (),
    }  # fmt: skip
    return Smoke(**{**made, **more})


SUSPECTS = (
    Suspect("node", ("a",), (), ("fails beside all others [3]", "its ranks die [2]")),
    Suspect("gpu", ("b",), (3, 5), ("wrong product [4]",)),
    Suspect("pair", ("c", "d"), (), ("no way [7]",)),
    Suspect("scale", ("e", "f"), (), ("fails above 4 nodes [8]",)),
)


def test_the_test_as_a_proof_of_each_node():
    nodes = [Node(name, SUSPECT) for name in "abcdef"]
    nodes += [Node("g", WARNED, warnings=("hot",)), Node("h", UNTESTED, "GPU 0 is busy")]
    nodes += [Node("i", UNREACHABLE, "lost: connection"), Node("j", PASSED)]
    found = judge.proved(smoke(*nodes, suspects=SUSPECTS))
    assert {name: found[name].against for name in "abcdefg"} == {
        "a": ("fails beside all others [3]; its ranks die [2]",),
        "b": ("GPU 3 and 5: wrong product [4]",),
        "c": ("with d: no way [7]",),
        "d": ("with c: no way [7]",),
        "e": ("only together with f: fails above 4 nodes [8]",),
        "f": ("only together with e: fails above 4 nodes [8]",),
        "g": (),
    }
    assert found["g"].warnings == ("hot",)
    assert (found["h"].untested, found["h"].lacking) == ("GPU 0 is busy", False)
    assert found["i"].untested == "lost: connection"
    assert found["j"] == Collective(10, "torch 2.13.0 over nccl", "NCCL")


def test_a_test_that_ended_early_is_no_proof_and_one_without_an_engine_does_not_apply():
    early = judge.proved(smoke(Node("a", PASSED), Node("b", PASSED), stopped="the budget"))
    assert early["a"].untested == "the budget"
    why = "no PyTorch over gloo: No module named 'torch'"
    lacking = judge.proved(smoke(Node("a", UNTESTED, why), engine=""))
    assert (lacking["a"].untested, lacking["a"].lacking) == (why, True)
    # Others have one: this node cannot take part in the job.
    assert not judge.proved(smoke(Node("a", UNTESTED, why)))["a"].lacking
    assert not judge.proved(smoke(Node("a", UNTESTED, "no GPU"), engine=""))["a"].lacking


# --- When it is made.


def task(asked: list[tuple[str, ...]], wanted: ready.Wanted, names: str = "abc") -> ready.Task:
    def together(given: tuple[str, ...]) -> dict[str, Collective]:
        asked.append(given)
        return dict.fromkeys(given, WELL)

    carrier = cast("Any", SimpleNamespace(interrupted=False, tag="t"))
    policies = dict.fromkeys(names, Policy())
    return ready.Task(carrier, policies, (), wanted, 60, 0.0, {}, together)


def found(names: str) -> dict[Key, Any]:
    there: dict[Key, Any] = {(name, "look"): Look(name, Snapshot({})) for name in names}
    return {**there, **{(name, "proofs"): Proved(USER) for name in names}}


ONLY = ready.Wanted.of(["proof.collective"])


def proofs(of: ready.Task, seen: dict[Key, Any]) -> dict[str, Any]:
    looks = ready._with_proofs(of, seen, {}, ready._together(of, seen))
    return {look.name: look.snapshot["proof"].collective for look in looks if look.snapshot}


def test_it_is_made_over_the_nodes_that_were_reached_and_only_when_it_is_wanted():
    asked: list[tuple[str, ...]] = []
    seen = {**found("ab"), ("c", "look"): Failure(kind=UNREACHED, error="refused")}
    assert proofs(task(asked, ONLY), seen) == {"a": WELL, "b": WELL}
    assert asked == [("a", "b")]
    assert proofs(task(asked, ready.Wanted()), seen) == {"a": None, "b": None}
    assert len(asked) == 1


def test_one_node_alone_is_not_tested_and_an_interrupt_asks_for_nothing_more():
    asked: list[tuple[str, ...]] = []
    assert proofs(task(asked, ONLY, "a"), found("a")) == {"a": Collective(1)}
    interrupted = task(asked, ONLY)
    interrupted.carrier.interrupted = True
    assert ready._together(interrupted, found("abc")) == {}
    assert asked == []


def test_a_node_of_which_the_test_says_nothing_is_unknown():
    one = task([], ONLY)
    silent = ready.Task(**{**vars(one), "together": lambda names: {"a": WELL}})
    assert proofs(silent, found("abc")) == {
        "a": WELL,
        "b": Unknown(facts.UNFINISHED),
        "c": Unknown(facts.UNFINISHED),
    }


def test_the_command_hands_its_nodes_time_and_screen_to_the_smoke_test(monkeypatch):
    asked: list[Any] = []

    def made(wanted: Any, tell: Any, progress: Any) -> Smoke:
        asked.extend([wanted, tell, progress])
        return smoke(*(Node(name, PASSED) for name in wanted.policies))

    monkeypatch.setattr(run, "Task", lambda *args, **more: SimpleNamespace(
        **dict(zip(("carrier", "policies", "deadline", "budget_s"), args, strict=True)), **more
    ), raising=False)  # fmt: skip
    monkeypatch.setattr(run, "smoke", made, raising=False)
    screen = cast("Any", SimpleNamespace(note="note", progress="progress"))
    given = replace(task([], ONLY), deadline=7.0, budget_s=90, given={"10.0.0.1": "a"})
    assert set(command._collective(given, ("a", "c"), screen)) == {"a", "c"}
    wanted, *told = asked
    assert (wanted.carrier, wanted.deadline, wanted.budget_s) == (given.carrier, 7.0, 90)
    assert (list(wanted.policies), wanted.given) == (["a", "c"], {"10.0.0.1": "a"})
    assert told == ["note", "progress"]
