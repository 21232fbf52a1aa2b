"""The readers beside the control process: the same document, whoever read and judged the nodes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nodeready.audit import reading
from nodeready.audit import run as runs
from nodeready.cli import audit as command
from nodeready.policy import Policy
from nodeready.reports.registry import names
from nodeready.subjects import snapshot
from nodeready.subjects.context import COMPLETED
from nodeready.subjects.registry import SUBJECTS
from nodeready.transport.base import Answer, Reply, Request
from tests.builders.hostile import PIECES, look, recorded, shows
from tests.fake import Does, hangs, interrupts, says
from tests.unit.commands import AWAY, DIES, Done, run  # noqa: F401 - a fixture

EARLIER, NOW = 1_700_000_000.0, 1_700_003_600.0


def own(profile: str, number: int) -> dict[str, str]:
    """What a node of this profile prints: its own name, addresses, values and counters."""
    draw = random.Random(number)

    def changed(text: str) -> str:
        for pattern, made in (
            (r"gpu001", lambda at: f"gpu{number:03}"),
            (r"(10\.\d+\.\d+\.)\d+", lambda at: f"{at[1]}{number + 2}"),
            (r"(_temp>)\d+", lambda at: f"{at[1]}{draw.randrange(25, 60)}"),
            (r"(<power_draw>)\d+", lambda at: f"{at[1]}{draw.randrange(60, 600)}"),
            (r"(GPU-)[0-9a-f]{8}", lambda at: f"{at[1]}{number:08x}"),
            (r"(?m)(_errors:|dropped:)\d+$", lambda at: f"{at[1]}{draw.randrange(3)}"),
        ):
            text = re.sub(pattern, made, text)
        return text

    return {name: changed(text) for name, text in recorded(profile).items()}


def mad(number: int) -> dict[str, str]:
    """What a node prints of which one section is spoiled."""
    draw, found = random.Random(number), own("h100", number)
    name = draw.choice(sorted(found))
    text, at = found[name], 0
    for _ in range(3):
        at = draw.randrange(len(text) + 1)
        piece = draw.choice(PIECES) * draw.choice((1, 40))
        text = draw.choice((text[:at], text[:at] + piece + text[at:], text[at:] + text[:at]))
    return {**found, name: text}


def cut(number: int) -> Does:
    def does(request: Request) -> Answer:
        text = look(own("h100", number), request.mark.rpartition(" ")[2])
        return Reply(text[: len(text) // 2])

    return does


def fleet() -> dict[str, Does]:
    found = {f"gpu{number:03}": shows(own("h100", number)) for number in range(14)}
    found |= {f"amd{number:03}": shows(own("mi300x", number)) for number in range(3)}
    found |= {f"mad{number:03}": shows(mad(number)) for number in range(30)}
    return found | {"away": AWAY, "dead": DIES, "hung": hangs, "odd": says("hi"), "cut": cut(5)}


@pytest.fixture
def audited(
    run: Callable[..., Done],  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> Callable[..., Done]:
    """``audited(nodes, processes, form)``: the second audit of these nodes, an hour after the
    first; processes None: none, and no Reading.
    """
    count = 0

    def go(nodes: Mapping[str, Does], processes: int | None, form: str, **more: Any) -> Done:
        nonlocal count
        count += 1
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / str(count)))
        monkeypatch.setattr(command, "readers", lambda nodes: processes or 0)
        monkeypatch.setattr(reading, "readers", lambda nodes: processes or 0)
        for module in (command, runs, reading):
            monkeypatch.setattr(module, "now", lambda: "2026-01-01T00:00:00Z")
        for moment in (EARLIER, NOW):
            monkeypatch.setattr(runs.time, "time", lambda moment=moment: moment)
            done = run(nodes, "audit", "--format", form, **more)
        return done

    return go


@pytest.mark.parametrize("form", names("audit"))
def test_the_document_is_the_same_whoever_reads(audited, form):
    policy = Policy(port_range=(6000, 6100), gpu_count=8, gate=False)
    alone = audited(fleet(), None, form, policy=policy)
    assert alone.code == (2 if form == "nagios" else 4)
    for processes in (1, 3):
        beside = audited(fleet(), processes, form, policy=policy)
        assert (beside.code, beside.out) == (alone.code, alone.out)


def test_the_control_process_reads_what_no_reader_is_free_for(audited, monkeypatch):
    alone = audited(fleet(), None, "json")
    monkeypatch.setattr(reading.Reading, "_free", lambda self, ahead: None)
    assert audited(fleet(), 1, "json").out == alone.out


def test_no_earlier_node_changes_what_a_later_one_shows(audited, monkeypatch):
    everything = audited(fleet(), None, "json").out.splitlines()
    for name, does in fleet().items():
        if name.startswith("mad"):
            monkeypatch.setattr(snapshot, "_SHARED", {})
            monkeypatch.setattr(snapshot, "_shared_bytes", 0)
            (line,) = [
                row for row in audited({name: does}, None, "json").out.splitlines()
                if row.startswith('{"name"')
            ]  # fmt: skip
            (same,) = [row for row in everything if row.startswith(f'{{"name":"{name}"')]
            assert _alone(line) == _alone(same.rstrip(","))


def _alone(row: str) -> Any:
    """What a node shows of the subjects that no other node decides."""
    node = json.loads(row)
    return {
        "facts": {name: one for name, one in node["facts"].items() if name not in COMPLETED},
        "results": [
            one for one in node["results"] if one["check"].partition(".")[0] not in COMPLETED
        ],
    }


def _killing(name: str) -> Callable[..., Any]:
    """A parser that kills the process that reads this node."""
    real = snapshot.read

    def read(answer: str, *given: Any) -> Any:
        seen = real(answer, *given)
        if getattr(seen.subjects.get("host"), "hostname", "") == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return seen

    return read


def test_a_reader_that_is_killed_costs_the_node_whose_answer_it_read(audited, monkeypatch):
    nodes = {f"gpu{number:03}": shows(own("h100", number)) for number in range(24)}
    whole = json.loads(audited(nodes, None, "json").out)
    monkeypatch.setattr(reading.snapshot, "read", _killing("gpu005"))
    # What the control process reads itself must not end it.
    monkeypatch.setattr(reading, "_AHEAD", 1000)
    done = audited(nodes, 2, "json")
    found = json.loads(done.out)
    assert [node["name"] for node in found["nodes"]] == [node["name"] for node in whole["nodes"]]
    (failed,) = [node for node in found["nodes"] if node["status"] == "failed"]
    assert failed["name"] == "gpu005"
    assert failed["error"] == "the process that read its answer ended (SIGKILL)"
    for mine, theirs in zip(found["nodes"], whole["nodes"], strict=True):
        if mine["name"] != "gpu005":
            assert _alone(json.dumps(mine)) == _alone(json.dumps(theirs))
    assert done.code == 1


def test_a_parser_that_does_not_end_costs_its_subject_on_that_node(audited, monkeypatch):
    real = reading._PROBES["gate"]

    def parse(outputs: Mapping[str, Any], policy: Policy) -> Any:
        while "forever" in outputs["gate"].text:
            pass
        return real.parse(outputs, policy)

    monkeypatch.setitem(reading._PROBES, "gate", replace(real, parse=parse))
    monkeypatch.setattr(reading, "_SLOW_S", 0.2)
    nodes = {f"gpu{n:03}": shows(own("h100", n)) for n in range(4)}
    nodes["slow"] = shows({**own("h100", 7), "gate": "forever"})
    found = json.loads(audited(nodes, 1, "json").out)
    unknown = [
        (node["name"], one["actual"])
        for node in found["nodes"]
        for one in node["results"]
        if one["check"] == "gate.observed"
    ]
    assert unknown == [("slow", "makes no sense (TimeoutError: took longer than 0.2 s): forever")]


def test_an_interrupt_leaves_partial_results_and_no_process(audited, monkeypatch):
    made: list[int] = []
    real = reading.Reading._fork

    def fork(self: reading.Reading, reader: Any) -> Any:
        one = real(self, reader)
        made.append(one.pid)
        return one

    monkeypatch.setattr(reading.Reading, "_fork", fork)
    nodes: dict[str, Does] = {f"gpu{n:03}": shows(own("h100", n)) for n in range(8)}
    done = audited({**nodes, "stop": interrupts, "later": AWAY}, 2, "json")
    assert done.code == 130
    assert "interrupted: the results are partial; not later,stop" in done.err
    told = {node["name"]: node for node in json.loads(done.out)["nodes"]}
    assert told["gpu000"]["results"]
    assert told["later"]["error"] == "not looked at: interrupted"
    assert len(made) == 4
    for pid in made:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_many_nodes_share_nobody_can_change():
    outputs = [own("h100", number) for number in (1, 2, 3)]
    texts = [{**one, "host": outputs[0]["host"]} for one in outputs]
    policy = Policy()
    seen = [snapshot.read(look(one, "ab" * 8), snapshot.PROBES, policy, "ab" * 8) for one in texts]
    shared = [
        name
        for name in SUBJECTS
        if name in seen[1].subjects and seen[1].subjects[name] is seen[2].subjects[name]
    ]
    assert {"host", "core_dumps", "debug_tools"} <= {*shared}
    with pytest.raises(TypeError):
        seen[2]["host"].versions["kernel"] = "mine"


def test_the_store_of_shared_observations_is_bounded(monkeypatch):
    monkeypatch.setattr(snapshot, "_MOST_BYTES", 200_000)
    monkeypatch.setattr(snapshot, "_MOST_SHARED", 20)
    monkeypatch.setattr(snapshot, "_SHARED", {})
    monkeypatch.setattr(snapshot, "_shared_bytes", 0)
    policy = Policy()
    for number in range(24):
        answer = look(own("h100", number // 3), "ab" * 8)
        snapshot.read(answer, snapshot.PROBES, policy, "ab" * 8)
        held = sum(map(snapshot._size, snapshot._SHARED))
        assert held == snapshot._shared_bytes <= 200_000
        assert len(snapshot._SHARED) <= 20
    assert len(snapshot._SHARED) > 5
