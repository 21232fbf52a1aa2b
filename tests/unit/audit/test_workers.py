"""The workers of an audit: the same document, whichever process read a node."""

import json
import os
import random
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from nodeready.agent.asking import Answer, Request
from nodeready.core.policy import Policy
from nodeready.reports.registry import format_names
from nodeready.runs.audit import answer_judge, command, workers
from nodeready.subjects import snapshot
from nodeready.subjects.registry import NEEDS_FLEET
from tests.builders.hostile import PIECES, look, recorded, shows
from tests.fake import Does, hangs, interrupts, says
from tests.unit.commands import AWAY, DIES

EARLIER, NOW = 1_700_000_000.0, 1_700_003_600.0
POLICY = Policy(port_range=(6000, 6100), gpu_count=8, gate=False)


@cache
def own(profile: str, number: int) -> dict[str, str]:
    """What a node of this profile prints: its own name, addresses, values and counters."""
    draw = random.Random(number)

    def changed(text: str) -> str:
        for pattern, replace_match in (
            (r"gpu001", lambda match: f"gpu{number:03}"),
            (r"(10\.\d+\.\d+\.)\d+", lambda match: f"{match[1]}{number + 2}"),
            (r"(_temp>)\d+", lambda match: f"{match[1]}{draw.randrange(25, 60)}"),
            (r"(<power_draw>)\d+", lambda match: f"{match[1]}{draw.randrange(60, 600)}"),
            (r"(GPU-)[0-9a-f]{8}", lambda match: f"{match[1]}{number:08x}"),
            (r"(?m)(_errors:|dropped:)\d+$", lambda match: f"{match[1]}{draw.randrange(3)}"),
        ):
            text = re.sub(pattern, replace_match, text)
        return text

    return {name: changed(text) for name, text in recorded(profile).items()}


def mad(number: int) -> dict[str, str]:
    draw, sections = random.Random(number), own("h100", number)
    name = draw.choice(sorted(sections))
    text = sections[name]
    for _ in range(3):
        cut = draw.randrange(len(text) + 1)
        piece = draw.choice(PIECES) * draw.choice((1, 40))
        text = draw.choice((text[:cut], text[:cut] + piece + text[cut:], text[cut:] + text[:cut]))
    return {**sections, name: text}


def half(request: Request) -> Answer:
    text = look(own("h100", 5), request.mark.rpartition(" ")[2])
    return Answer(text[: len(text) // 2])


def healthy(count: int) -> dict[str, Does]:
    return {f"gpu{number:03}": shows(own("h100", number)) for number in range(count)}


def nodes_of(size: int = 6) -> dict[str, Does]:
    mads = {f"mad{number:03}": shows(mad(number)) for number in range(size)}
    amds = {f"amd{number:03}": shows(own("mi300x", number)) for number in range(3)}
    others = {"away": AWAY, "dead": DIES, "hung": hangs, "odd": says("hi"), "cut": half}
    return {**healthy(4), **amds, **mads, **others}


@pytest.fixture
def audited(run, monkeypatch, tmp_path):
    """``audited(nodes, count, form)``: the second audit of these nodes, an hour after the first,
    with so many workers.
    """
    count = 0

    def go(nodes: Mapping[str, Does], workers_count: int, form: str, **more: Any) -> Any:
        nonlocal count
        count += 1
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / str(count)))
        monkeypatch.setattr(workers, "worker_count", lambda nodes: workers_count)
        for module in (command, workers):
            monkeypatch.setattr(module, "utc_now", lambda: "2026-01-01T00:00:00Z")
        for moment in (EARLIER, NOW):
            monkeypatch.setattr(workers.time, "time", lambda moment=moment: moment)
            done = run(nodes, "audit", "--format", form, **more)
        return done

    return go


@pytest.mark.parametrize(("form", "counts", "size"), [
    *((form, (1, 3) if form == "json" else (2,), 3) for form in format_names("audit")),
    pytest.param("json", (1, 3), 40, marks=pytest.mark.nightly),
])  # fmt: skip
def test_the_document_is_the_same_whichever_process_reads(audited, form, counts, size):
    alone = audited(nodes_of(size), 0, form, policy=POLICY)
    assert alone.code == (2 if form == "nagios" else 4)
    for processes in counts:
        beside = audited(nodes_of(size), processes, form, policy=POLICY)
        assert (beside.code, beside.out) == (alone.code, alone.out)


def test_the_control_process_does_orders_while_the_worker_is_busy(audited, monkeypatch):
    kinds: list[str] = []
    real = workers.AuditWorkers._do_locally

    def do_locally(self: Any, name: str, order: tuple[Any, ...]) -> None:
        kinds.append(order[0])
        real(self, name, order)

    nodes = healthy(12)
    alone = audited(nodes, 0, "json")
    monkeypatch.setattr(workers.AuditWorkers, "_do_locally", do_locally)
    monkeypatch.setattr(workers, "_MAX_ORDERS", 1)
    assert audited(nodes, 1, "json").out == alone.out
    assert {*kinds} == {"read", "judge"}
    kinds.clear()
    monkeypatch.setattr(workers, "_MAX_LOCAL", 0)
    assert audited(nodes, 1, "json").out == alone.out
    assert {*kinds} == {"judge"}


@pytest.mark.parametrize("size", [6, pytest.param(40, marks=pytest.mark.nightly)])
def test_no_earlier_node_changes_a_later_one(audited, monkeypatch, size):
    together = rows(audited(nodes_of(size), 0, "json"))
    for name, does in nodes_of(size).items():
        if name.startswith("mad"):
            monkeypatch.setattr(snapshot, "_SHARED", {})
            monkeypatch.setattr(snapshot, "_shared_bytes", 0)
            assert rows(audited({name: does}, 0, "json"))[name] == together[name]


def rows(done: Any) -> dict[str, Any]:
    """Each node's facts and results of the subjects that no other node decides."""
    return {
        node["name"]: (
            {name: facts for name, facts in node["facts"].items() if name not in NEEDS_FLEET},
            [
                result
                for result in node["results"]
                if result["check"].partition(".")[0] not in NEEDS_FLEET
            ],
        )
        for node in json.loads(done.out)["nodes"]
    }


def test_a_worker_that_is_killed_costs_the_node_whose_answer_it_read(audited, monkeypatch):
    real = snapshot.read

    def read(answer: str, *more: Any) -> Any:
        observed = real(answer, *more)
        if getattr(observed.subjects.get("host"), "hostname", "") == "gpu005":
            os.kill(os.getpid(), signal.SIGKILL)
        return observed

    nodes = healthy(12)
    whole = rows(audited(nodes, 0, "json"))
    monkeypatch.setattr(answer_judge.snapshot, "read", read)
    done = audited(nodes, 2, "json")
    (gap,) = json.loads(done.out)["gaps"]
    assert (gap["node"], gap["kind"]) == ("gpu005", "failed")
    assert gap["reason"] == "the process that read its answer ended (SIGKILL)"
    partial = rows(done)
    assert list(partial) == list(whole)
    assert {name for name in whole if partial[name] != whole[name]} == {"gpu005"}
    assert done.code == 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_parser_that_does_not_end_costs_its_subject_on_that_node(audited, monkeypatch, count):
    real = answer_judge.PROBE_OF["gate"]

    def parse(outputs: Mapping[str, Any], policy: Policy) -> Any:
        while "forever" in outputs["gate"].text:
            pass
        return real.parse(outputs, policy)

    monkeypatch.setitem(answer_judge.PROBE_OF, "gate", replace(real, parse=parse))
    monkeypatch.setattr(workers, "_MAX_CPU_S", 0.2)
    nodes = {**healthy(2), "slow": shows({**own("h100", 7), "gate": "forever"})}
    nodes = json.loads(audited(nodes, count, "json").out)["nodes"]
    results = [(node["name"], result) for node in nodes for result in node["results"]]
    unknown = [(name, r["actual"]) for name, r in results if r["check"] == "gate.observed"]
    assert unknown == [("slow", "makes no sense (TimeoutError: took longer than 0.2 s): forever")]


def test_an_interrupt_leaves_partial_results_and_no_process(audited, monkeypatch):
    pids: list[int] = []
    real = workers.Child.__init__

    def init(self: Any, pid: int, *more: Any) -> None:
        pids.append(pid)
        real(self, pid, *more)

    monkeypatch.setattr(workers.Child, "__init__", init)
    done = audited({**healthy(4), "stop": interrupts, "later": AWAY}, 2, "json")
    assert done.code == 130
    assert "interrupted: the results are partial; not later,stop" in done.err
    document = json.loads(done.out)
    assert document["nodes"][0]["results"]
    gaps = {(gap["node"], gap["kind"]) for gap in document["gaps"]}
    assert gaps == {("later", "interrupted"), ("stop", "interrupted")}
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_observations_that_nodes_share_cannot_be_changed(monkeypatch):
    mark, policy = "ab" * 8, Policy()
    outputs = [{**own("h100", number), "host": own("h100", 1)["host"]} for number in (1, 2, 3)]
    looks = [look(result, mark) for result in outputs]
    _, first, second = (snapshot.read(text, snapshot.PROBES, policy, mark) for text in looks)
    shared = {name for name in first.subjects if first.subjects[name] is second.subjects[name]}
    assert {"host", "core_dumps", "debug_tools"} <= shared
    with pytest.raises(TypeError):
        second["host"].versions["kernel"] = "mine"


def test_the_store_of_shared_observations_is_bounded(monkeypatch):
    monkeypatch.setattr(snapshot, "_MOST_BYTES", 200_000)
    monkeypatch.setattr(snapshot, "_MOST_SHARED", 20)
    monkeypatch.setattr(snapshot, "_SHARED", {})
    monkeypatch.setattr(snapshot, "_shared_bytes", 0)
    # Observations are shared within one policy.
    policy = Policy()
    for number in range(24):
        answer = look(own("h100", number // 3), "ab" * 8)
        snapshot.read(answer, snapshot.PROBES, policy, "ab" * 8)
        held = sum(map(snapshot._size, snapshot._SHARED))
        assert held == snapshot._shared_bytes <= 200_000
        assert len(snapshot._SHARED) <= 20
    assert len(snapshot._SHARED) > 5
