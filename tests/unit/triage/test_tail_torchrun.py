"""Logs of two nodes with two ranks each, as torchrun 2.15 --log-dir wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeready.node.tail import Config, read_tail
from nodeready.reports import tail_table
from nodeready.reports.registry import Options
from nodeready.triage.logs import Grouping, Ranks, node_names, normalised, ranks_in

LOGS = Path(__file__).parent / "logs" / "torchrun"


def seen(mode, name="stderr.log", lines=10):
    """The document of a run's logs."""
    grouping = Grouping()
    for node in ("node0", "node1"):
        pattern = f"{LOGS}/{mode}/{node}/*/attempt_0/*/{name}"
        grouping.add(node, read_tail(Config("N", "T", pattern, lines)))
    return grouping.done(started="", finished="", pattern="", unreachable={}, failed={})


def shown(document):
    return "".join(f"{line.plain}\n" for line in tail_table.show(document, Options(0)))


def test_the_global_ranks_are_told_by_the_lines():
    document = seen("barrier")
    assert sorted(file.rank for group in document.groups for file in group.files) == [0, 1, 2, 3]


def test_what_all_but_one_raise_is_one_group():
    """The ports of the peers differ, and each line has its own rank."""
    document = seen("raise")
    groups = [sorted(file.rank for file in group.files) for group in document.groups]
    assert groups == [[2], [0, 1, 3]]
    assert "ValueError: loss is nan" in document.groups[0].lines[-1]


def test_the_prints_of_all_ranks_are_one_group():
    document = seen("timeout", "stdout.log")
    (group,) = document.groups
    assert len(group.files) == 4
    assert {file.local_rank for file in group.files} == {0, 1}


def test_the_reports_say_who_has_not_come():
    document = seen("barrier")
    found = {(one.rank, one.kind) for one in document.reports}
    assert {(2, "missing"), (1, "reached"), (0, "timeout"), (3, "lost")} <= found
    text = shown(document)
    assert "rank 2  has not come to monitoredBarrier" in text
    assert "watchdog" in text


def test_a_timeout_of_gloo_is_reported_of_every_rank_that_waited():
    found = {one.rank for one in seen("timeout").reports if one.kind == "timeout"}
    assert 3 not in found
    assert found == {0, 1, 2}


@pytest.mark.parametrize(
    ("path", "lines", "expected"),
    [
        ("/r/attempt_0/1/stderr.log", ["[rank3]: Traceback"], Ranks(3, 1)),
        ("/r/attempt_0/1/stderr.log", ["[default1]:[rank3]: Traceback"], Ranks(3, 1)),
        # All ranks of a node in one file.
        ("/r/console.log", ["[rank0]: a", "[rank1]: a"], Ranks(None, None)),
        ("/r/attempt_0/1/stderr.log", ["[rank3]: a", "[rank0]: quoted"], Ranks(None, 1)),
        # rank_0.log on each node is the local one.
        ("/log/rank_0.log", ["[rank2]: a"], Ranks(2, 0)),
        ("/log/rank_2.log", ["[rank2]: a"], Ranks(2, None)),
        ("/log/rank_2.log", ["step 7 rank3 [rank 4]"], Ranks(2, None)),
    ],
)
def test_the_line_has_the_global_rank_and_the_path_may_have_the_local_one(path, lines, expected):
    assert ranks_in(path, lines) == expected


def shape(ranks, *lines):
    return normalised(lines, node_names("gpu001"), ranks)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Connection closed by peer [127.0.0.1]:47301. GLHF", "Connection closed by peer "
         "[127.0.0.1]:5270. GLHF"),
        ("connect [2401:db00:eef0:1100:3560:0:1c05:25d]:8594", "connect [fe80::1%eth0]:8595"),
        ("peer [::ffff:10.0.0.7]:51432", "peer [::ffff:10.0.0.8]:51433"),
        ("SocketImpl(fd=58, addr=[gpu009]:45678, remote=[gpu009]:29500)",
         "SocketImpl(fd=61, addr=[gpu009]:45690, remote=[gpu009]:29500)"),
        ("lost 10.0.0.7:41000", "lost 10.0.0.9:42000"),
    ],
)  # fmt: skip
def test_addresses_with_their_ports_make_no_difference(one, other):
    assert shape(Ranks(0, None), one) == shape(Ranks(1, None), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("10.0.0.7 is down", "10.0.0.8 is down"),
        ("[Rank 0]: Rank 2 failed to pass", "[Rank 0]: Rank 3 failed to pass"),
        ("step 12:30", "step 12:31"),
        ("train.py:88 step", "train.py:89 step"),
    ],
)
def test_what_tells_something_stays(one, other):
    assert shape(Ranks(0, 0), one) != shape(Ranks(0, 0), other)


def test_a_global_rank_that_is_another_ranks_local_one_is_no_placeholder():
    assert shape(Ranks(2, 0), "rank 0 is late", "local_rank 0 is here", "rank 2 waits") == (
        "rank 0 is late",
        "local_rank <rank> is here",
        "rank <rank> waits",
    )
