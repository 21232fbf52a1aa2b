"""`nodeready lemons`, and what `ready` says of a lemon, from a memory with a bad node."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import click
import pytest

from nodeready.cli import cli
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.runs.memory.kept_looks import earlier_failures
from nodeready.runs.memory.lemons import find_lemons
from nodeready.runs.memory.look import PARTS, RESULTS, Look, dump, node_sections, results_text
from nodeready.runs.memory.store import Memory
from nodeready.subjects.proof import checks
from nodeready.subjects.proof.facts import Proved, ProvedHistory, User
from tests.builders.judging import by_name
from tests.builders.results import fail, ok
from tests.cases import with_table

CHECK = "rdma.errors"
DAY = 86400.0


def keep_look(
    kept: Memory, time_s: float, gpus: Mapping[str, Sequence[str]], failing: Collection[str] = ()
) -> None:
    """Keep a look at these nodes.

    gpus:    node -> the serial numbers that it shows
    failing: serial numbers of GPUs, or ``node/serial``, that need a reset
    """
    check, nodes = "gpus.recovery", []
    for name, serials in gpus.items():
        parts = [("gpu", serial, "", f"0000:{n:02x}:00.0") for n, serial in enumerate(serials)]
        bad = [slot for _, serial, _, slot in parts if {serial, f"{name}/{serial}"} & {*failing}]
        result = fail(check, "none", f"reset needed on {', '.join(bad)}") if bad else ok(check)
        texts = {f"gpus{RESULTS}": results_text([result], {check}), f"gpus{PARTS}": dump(parts)}
        nodes.append(node_sections(name, texts))
    kept.keep(Look(0, time_s, "audit", "prod.py", "", True, 3, {}), nodes)


def lemons_in(kept: Memory) -> set[tuple[str, str]]:
    """(unit, node) of each lemon of 90 days."""
    document = find_lemons(kept, {*kept.names()}, 0.0, 90 * DAY)
    return {(lemon.unit, lemon.node) for lemon in document.lemons}


def lemons(*words: str) -> int:
    command = cli.get_command(click.Context(cli), "lemons")
    assert command is not None
    return command.main([*words], standalone_mode=False)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten nodes for ten days; gpu1 fails on every third day."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path, now_s = tmp_path / "state" / "nodeready" / "memory.db", time.time()
    with Memory.open(path, make=True) as kept:
        for day in range(10):

            def result(node: int, day: int = day) -> Result:
                is_bad = node == 1 and day % 3 == 1
                return fail(CHECK, "none", "link_downed +3") if is_bad else ok(CHECK)

            nodes = [
                node_sections(
                    f"gpu{node}", {f"rdma{RESULTS}": results_text([result(node)], {CHECK})}
                )
                for node in range(10)
            ]
            moment_s = now_s - (10 - day) * DAY
            kept.keep(Look(0, moment_s, "audit", "prod.py", "", True, 3, {}), nodes)
    return path


def test_the_lemon_is_named_with_its_evidence(memory, capsys):
    assert lemons() == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 lemon among 10 nodes and 0 GPUs from ")
    assert lines[2] == "gpu1: 3 days with incidents, 0.1 expected"
    assert [line.split("  ")[-2:] for line in lines[3:6]] == [[CHECK, "link_downed +3"]] * 3
    assert lemons("gpu[2-9]") == 0
    assert lemons("--since", "2d") == 0


def test_a_gpu_that_was_moved_is_still_the_lemon(tmp_path, monkeypatch, capsys):
    """A month: the GPU A fails in gpu1, is moved to gpu2 on the 15th day, and fails there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path, now_s = tmp_path / "state" / "nodeready" / "memory.db", time.time()
    with Memory.open(path, make=True) as kept:
        for day in range(30):
            gpus = {f"gpu{number}": [f"{number}-{day >= 15}"] for number in range(1, 9)}
            gpus["gpu1" if day < 15 else "gpu2"] = ["A"]
            failing = {"A"} if day in (4, 11, 21) else set()
            keep_look(kept, now_s - (30 - day) * DAY, gpus, failing)
    assert lemons() == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 lemon among 8 nodes and ")
    assert lines[2] == "GPU A: 3 days with incidents, 0.1 expected"
    assert lines[3] == "  now in gpu2, before in gpu1"
    assert earlier_failures(["gpu1", "gpu2", "new"]) == {
        "gpu1": ProvedHistory(),
        "new": ProvedHistory(),
        "gpu2": ProvedHistory(("GPU A: 3 days with incidents, 0.1 expected",)),
    }


def test_a_limit_shows_some_nodes_and_compares_them_with_all(memory, capsys):
    assert lemons("gpu[0-9]", "--limit", "gpu1") == 3
    assert "gpu1: 3 days with incidents, 0.1 expected" in capsys.readouterr().out
    assert lemons("gpu[0-9]", "--limit", "gpu2") == 0
    assert "gpu1" not in capsys.readouterr().out
    assert lemons("gpu[0-99]", "--limit", "gpu70") == 2


@pytest.mark.parametrize("invented", [
    pytest.param({"silent": 256}, id="silent GPUs"),
    pytest.param({"loud": 256}, id="GPUs that fail on every second day"),
    pytest.param({"silent": 200, "loud": 56}, id="both"),
])  # fmt: skip
@pytest.mark.parametrize("size", [2, 3, 4, 10])
def test_no_node_sets_the_rate_of_the_gpus_of_others(tmp_path, size, invented):
    """Every good GPU fails on 3 of 30 days, the nodes on different days; one node invents GPUs.

    A GPU that fails on every second day is a lemon beside nine nodes.
    """
    good = [f"good{number}" for number in range(size - 1)]
    gpus = {name: [f"{name}-{n}" for n in range(8)] for name in good}
    gpus["liar"] = [f"{kind}-{n}" for kind, count in invented.items() for n in range(count)]
    bad = {"good0-0"} if size == 10 else set()
    with Memory.open(tmp_path / "memory.db", make=True) as kept:
        for day in range(30):
            failed = [name for number, name in enumerate(good) if day % 10 == number]
            failing = {serial for name in failed for serial in gpus[name]}
            failing |= bad if day % 2 else set()
            failing |= {
                serial for serial in gpus["liar"] if serial.startswith("loud") and not day % 2
            }
            keep_look(kept, day * DAY, gpus, failing)
        assert {unit for unit, node in lemons_in(kept) if node.startswith("good")} == bad


@pytest.mark.parametrize(("claimed", "there", "fails_there", "is_lemon"), [
    pytest.param(range(10), range(10, 30), (), False, id="before the first look at its node"),
    pytest.param(range(10, 20), (*range(10), *range(20, 30)), (), False,
     id="while it was out for repair"),
    pytest.param(range(10), range(10, 30), (25,), True, id="it fails in its node, too"),
    pytest.param(range(5, 20), range(30), (21, 25), False, id="while its node has it"),
    pytest.param((), range(30), (21, 25, 27), True, id="its node saw it alone"),
    pytest.param(range(22, 30), range(30), (21, 25, 27), True,
     id="a claim does not hide a bad GPU"),
])  # fmt: skip
def test_the_history_of_a_gpu_moves_along_when_it_fails_in_its_new_node(
    tmp_path, claimed, there, fails_there, is_lemon
):
    """A node says on every second day that its GPU fails, while it claims to have the GPU A."""
    others = {f"n{number}": [f"G{number}"] for number in range(8)}
    with Memory.open(tmp_path / "memory.db", make=True) as kept:
        for day in range(30):
            liar, good = "A" if day in claimed else "L", "A" if day in there else "B"
            failing = {f"liar/{liar}"} if day % 2 else set()
            failing |= {"good/A"} if day in fails_there else set()
            keep_look(kept, day * DAY, {**others, "liar": [liar], "good": [good]}, failing)
        assert (("A", "good") in lemons_in(kept)) == is_lemon


@with_table("lemon_nodes, lemons, status")
def test_a_lemon_is_judged_by_the_policy(lemon_nodes, lemons, status):
    history = None if lemons is None else ProvedHistory(lemons)
    observed = Proved(User("ml", 2000, True, ""), history=history)
    result = by_name(checks, observed, Policy(lemon_nodes=lemon_nodes))["history"]
    assert result.status == status
    assert status not in ("warn", "fail") or result.actual == "gpu1: 3 days"
