"""proof.collective: what a smoke test showed of the nodes, as one check of each."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nodeready.agent.asking import Key
from nodeready.core.base import Unknown
from nodeready.core.outcome import UNREACHABLE, Gap, Outcome
from nodeready.core.policy import Policy
from nodeready.runs.ready import command
from nodeready.runs.ready import run as ready
from nodeready.runs.smoke import document, run
from nodeready.runs.smoke.document import SmokeNode, SmokeReport
from nodeready.runs.smoke.knowledge import SmokeSuspect
from nodeready.subjects.proof import checks, facts
from nodeready.subjects.proof.facts import Proved, ProvedCollective, User
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import by_name
from tests.cases import cases

USER = User("ml", 2000, True, "")
GOOD = ProvedCollective(12, "torch 2.13.0 over gloo", "sums of the job's PyTorch")
SILENT = Unknown(facts.UNFINISHED)
LEFT_OUT = "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"


@pytest.mark.parametrize("case", cases(__file__, "data/collective.json"))
def test_what_is_judged_of_a_node(case):
    """Evidence counts more than what was not tested, and than warnings."""
    found = case["collective"]
    if found:
        told = {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}
        found = SILENT if "silent" in told else ProvedCollective(**told)
    result = by_name(checks, Proved(USER, collective=found), Policy())["collective"]
    assert f"{result.status}: {result.actual}" == case["name"]
    assert (result.fix == LEFT_OUT) == (result.status == "fail")


def smoke(*nodes: SmokeNode, suspects: tuple[SmokeSuspect, ...] = (), **more: Any) -> SmokeReport:
    values: dict[str, Any] = {
        "started": "", "finished": "", "complete": True, "engine": "torch 2.13.0 over nccl",
        "proves": "NCCL", "control": "", "budget_s": 300, "tests": 9, "single_node_tests": 4,
        "rounds": 3,
        "nodes": nodes, "suspects": suspects, "links": (),
    }  # fmt: skip
    return SmokeReport(**{**values, **more})


def test_the_test_as_a_proof_of_each_node():
    suspects = (
        SmokeSuspect("node", ("a",), (), ("fails beside all others [3]", "its ranks die [2]")),
        SmokeSuspect("gpu", ("b",), (3, 5), ("wrong product [4]",)),
        SmokeSuspect("pair", ("c", "d"), (), ("no way [7]",)),
        SmokeSuspect("scale", ("e", "f"), (), ("fails above 4 nodes [8]",)),
    )
    nodes = [SmokeNode(name, document.SUSPECT) for name in "abcdef"]
    nodes += [
        SmokeNode("g", document.WARNED, warnings=("hot",)),
        SmokeNode("h", document.UNTESTED, "GPU 0 is busy"),
    ]
    nodes += [
        SmokeNode("i", document.UNREACHABLE, "lost: connection"),
        SmokeNode("j", document.PASSED),
    ]
    proofs = run.collective_proofs(smoke(*nodes, suspects=suspects))
    assert {name: proofs[name].against for name in "abcdefg"} == {
        "a": ("fails beside all others [3]; its ranks die [2]",),
        "b": ("GPU 3 and 5: wrong product [4]",),
        "c": ("with d: no way [7]",),
        "d": ("with c: no way [7]",),
        "e": ("only together with f: fails above 4 nodes [8]",),
        "f": ("only together with e: fails above 4 nodes [8]",),
        "g": (),
    }
    assert proofs["g"].warnings == ("hot",)
    assert (proofs["h"].untested, proofs["h"].lacking) == ("GPU 0 is busy", False)
    assert proofs["i"].untested == "lost: connection"
    assert proofs["j"] == ProvedCollective(10, "torch 2.13.0 over nccl", "NCCL")


TORCH = "no PyTorch over gloo: No module named 'torch'"


@pytest.mark.parametrize(("node", "more", "untested", "lacking"), [
    (SmokeNode("a", document.PASSED), {"stopped": "the budget"}, "the budget", False),
    (SmokeNode("a", document.UNTESTED, TORCH), {"engine": ""}, TORCH, True),
    # Others have one: this node cannot take part in the job.
    (SmokeNode("a", document.UNTESTED, TORCH), {}, TORCH, False),
    (SmokeNode("a", document.UNTESTED, "no GPU"), {"engine": ""}, "no GPU", False),
])  # fmt: skip
def test_a_test_that_ended_early_is_no_proof_and_one_without_an_engine_does_not_apply(
    node, more, untested, lacking
):
    proof = run.collective_proofs(smoke(node, SmokeNode("b", document.PASSED), **more))["a"]
    assert (proof.untested, proof.lacking) == (untested, lacking)


ONLY = ready.WantedProofs.of(["proof.collective"])


def task(
    asked: list[tuple[str, ...]],
    wanted: ready.WantedProofs = ONLY,
    names: str = "abc",
    **more: Any,
) -> ready.ReadyTask:
    def together(members: tuple[str, ...]) -> dict[str, ProvedCollective]:
        asked.append(members)
        return dict.fromkeys(members, GOOD)

    transport: Any = SimpleNamespace(interrupted=False, tag="t")
    policies = dict.fromkeys(names, Policy())
    made = ready.ReadyTask(transport, policies, (), wanted, 60, 0.0, {}, together)
    return replace(made, **more)


def replies(names: str) -> dict[Key, Any]:
    found: dict[Key, Any] = {(name, "snapshot"): Outcome(name, Snapshot({})) for name in names}
    return {**found, **{(name, "proofs"): Outcome(name, Proved(USER)) for name in names}}


def proving(of: ready.ReadyTask, observed: dict[Key, Any]) -> Any:
    made = ready._Proving(of, lambda name, part: None)
    made.results = observed
    return made


def proofs_of(of: ready.ReadyTask, observed: dict[Key, Any]) -> dict[str, Any]:
    of_job = proving(of, observed)
    proved = of_job.with_proofs(of_job.collectives(), {}, {})
    return {node.node: node.value["proof"].collective for node in proved if node.value}


def test_it_is_made_over_the_nodes_that_were_reached_and_only_when_it_is_wanted():
    asked: list[tuple[str, ...]] = []
    observed = {**replies("ab"), ("c", "snapshot"): Outcome("c", gap=Gap(UNREACHABLE, "refused"))}
    assert proofs_of(task(asked), observed) == {"a": GOOD, "b": GOOD}
    assert proofs_of(task(asked, ready.WantedProofs()), observed) == {"a": None, "b": None}
    assert asked == [("a", "b")]
    # A node of which the test says nothing is unknown.
    silent = task([], collective=lambda names: {"a": GOOD})
    assert proofs_of(silent, replies("abc")) == {"a": GOOD, "b": SILENT, "c": SILENT}


def test_one_node_alone_is_not_tested_and_an_interrupt_asks_for_nothing_more():
    asked: list[tuple[str, ...]] = []
    assert proofs_of(task(asked, names="a"), replies("a")) == {"a": ProvedCollective(1)}
    interrupted = task(asked)
    interrupted.transport.interrupted = True
    assert proving(interrupted, replies("abc")).collectives() == {}
    assert asked == []


def test_the_command_hands_its_nodes_time_and_screen_to_the_smoke_test(monkeypatch):
    asked: list[Any] = []

    def test(wanted: Any, tell: Any, progress: Any) -> SmokeReport:
        asked.extend([wanted, tell, progress])
        return smoke(*(SmokeNode(name, document.PASSED) for name in wanted.policies))

    monkeypatch.setattr(run, "smoke", test)
    screen: Any = SimpleNamespace(note="note", progress="progress")
    given = task([], deadline=7.0, budget_s=90, inventory_addresses={"10.0.0.1": "a"})
    assert set(command._prove_collective(given, ("a", "c"), screen)) == {"a", "c"}
    wanted, *told = asked
    assert (wanted.transport, wanted.deadline) == (given.transport, 7.0)
    assert wanted.options.budget == 90
    assert (list(wanted.policies), wanted.inventory_addresses) == (["a", "c"], {"10.0.0.1": "a"})
    assert told == ["note", "progress"]
