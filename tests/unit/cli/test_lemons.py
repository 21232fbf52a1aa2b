"""`nodeready lemons`, and what `ready` says of a lemon, from a memory with a bad node."""

from __future__ import annotations

import time
from pathlib import Path

import click
import pytest

from nodeready.cli import cli
from nodeready.cli.kept_looks import earlier_failures
from nodeready.cli.options import Refused
from nodeready.memory.lemons import find_lemons
from nodeready.memory.look import Look
from nodeready.memory.sections import PARTS, RESULTS, dump, node_sections, results_text
from nodeready.memory.store import Memory
from nodeready.policy import Policy
from nodeready.subjects.proof import checks
from nodeready.subjects.proof.facts import Proved, ProvedHistory
from nodeready.subjects.proof.session_facts import User
from nodeready.subjects.result import Result, fail, ok
from tests.builders.judging import by_name

CHECK = "rdma.errors"
DAY = 86400.0


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
    address, check = "0000:1b:00.0", "gpus.recovery"
    with Memory.open(path, make=True) as kept:
        for day in range(30):
            holder = "gpu1" if day < 15 else "gpu2"
            nodes = []
            for number in range(1, 9):
                name = f"gpu{number}"
                serial = "A" if name == holder else f"{number}-{day >= 15}"
                is_bad = serial == "A" and day in (4, 11, 21)
                result = fail(check, "none", f"reset on {address}") if is_bad else ok(check)
                texts = {
                    f"gpus{RESULTS}": results_text([result], {check}),
                    f"gpus{PARTS}": dump([["gpu", serial, "", address]]),
                }
                nodes.append(node_sections(name, texts))
            look = Look(0, now_s - (30 - day) * DAY, "audit", "prod.py", "", True, 3, {})
            kept.keep(look, nodes)
    assert lemons() == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 lemon among 8 nodes and ")
    assert lines[2:4] == [
        "GPU A: 3 days with incidents, 0.1 expected",
        "  now in gpu2, before in gpu1",
    ]
    assert earlier_failures(["gpu1", "gpu2"], 1) == {
        "gpu1": ProvedHistory(),
        "gpu2": ProvedHistory(("GPU A: 3 days with incidents, 0.1 expected",)),
    }


def test_a_limit_shows_some_nodes_and_compares_them_with_all(memory, capsys):
    assert lemons("gpu[0-9]", "--limit", "gpu1") == 3
    assert "gpu1: 3 days with incidents, 0.1 expected" in capsys.readouterr().out
    assert lemons("gpu[0-9]", "--limit", "gpu2") == 0
    assert "gpu1" not in capsys.readouterr().out
    assert lemons("gpu[0-99]", "--limit", "gpu70") == 2


def test_a_node_that_shows_the_gpu_of_another_node_makes_no_lemon_of_it(tmp_path):
    address = "0000:1b:00.0"
    with Memory.open(tmp_path / "state" / "memory.db", make=True) as kept:
        for day in range(1, 11):
            fault = fail("gpus.recovery", "none", f"reset needed on {address}")
            results = {0: ok("gpus.recovery"), 1: fault if day % 3 == 1 else ok("gpus.recovery")}
            nodes = [
                node_sections(
                    f"gpu{node}",
                    {
                        f"gpus{RESULTS}": results_text([result], {"gpus.recovery"}),
                        f"gpus{PARTS}": dump([["gpu", serial, "", address]]),
                    },
                )
                for node, result in results.items()
                # It has the GPU of gpu0, from the second day on.
                for serial in ("B" if node and day == 1 else "A",)
            ]
            kept.keep(Look(0, day * DAY, "audit", "prod.py", "", True, 3, {}), nodes)
        made = find_lemons(kept, {"gpu0", "gpu1"}, 0.0, 11 * DAY)
    assert [(unit.unit, unit.node, unit.days) for unit in made.units] == [
        ("gpu1", "gpu1", 4),
        ("B", "", 1),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--limit", "gpu1"), "--limit: needs an INVENTORY"),
        (("--since", "soon"), "--since soon: must be a moment or a span"),
    ],
)
def test_refused(memory, words, said):
    with pytest.raises(Refused, match=said):
        lemons(*words)


def test_no_memory_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(Refused, match="no look was kept yet"):
        lemons()


def test_ready_knows_the_lemons_among_its_nodes(memory):
    found = earlier_failures(["gpu1", "new"], 1)
    assert found == {
        "gpu1": ProvedHistory(("gpu1: 3 days with incidents, 0.1 expected",)),
        "new": ProvedHistory(),
    }


@pytest.mark.parametrize(
    ("lemon_nodes", "lemons", "status"),
    [
        ("warn", ("gpu1: 3 days",), "warn"),
        ("fail", ("gpu1: 3 days",), "fail"),
        ("ignore", ("gpu1: 3 days",), "na"),
        ("warn", (), "ok"),
        ("warn", None, "na"),
    ],
)
def test_a_lemon_is_judged_by_the_policy(lemon_nodes, lemons, status):
    history = None if lemons is None else ProvedHistory(lemons)
    observed = Proved(User("ml", 2000, True, ""), history=history)
    result = by_name(checks, observed, Policy(lemon_nodes=lemon_nodes))["history"]
    assert result.status == status
    assert status not in ("warn", "fail") or result.actual == "gpu1: 3 days"
