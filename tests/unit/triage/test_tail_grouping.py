"""Answers of nodes, grouped and shown. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, replace

import jsonschema
import pytest

from nodeready.node.tail import File, Tail, Unread
from nodeready.node.witnesses.logs import Report
from nodeready.reports import json_report, tail_table
from nodeready.reports.registry import Options
from nodeready.subjects.base import ProbeError
from nodeready.triage.logs import Grouping, read
from tests.paths import schema

SCHEMA = schema("tail")


def log(rank: object, *lines: str, age: float = 2.0) -> File:
    return File(f"/log/rank_{rank}.log", 100, 1_800_000_000.0, age, lines, None)


def node(*files: File, unread: tuple[Unread, ...] = (), **more: object) -> Tail:
    known = {"host": "x", "left_out": 0, "older": 0, "error": "", **more}
    return Tail(files=files, unread=unread, **known)


def grouped(nodes: dict[str, Tail], **more: object):
    grouping = Grouping()
    for name, seen in nodes.items():
        grouping.add(name, seen)
    how = {"pattern": "/log/*", "unreachable": {}, "failed": {}, "started": "s", "finished": "f"}
    return grouping.done(**{**how, **more})


def text(tail, verbose: int = 0) -> str:
    return "".join(f"{line.plain}\n" for line in tail_table.show(tail, Options(verbose)))


def checked(tail) -> dict:
    data = json.loads("".join(json_report.tail(tail)))
    jsonschema.validate(data, SCHEMA)
    return data


def test_the_odd_one_is_on_top_and_the_others_are_one_group():
    nodes = {
        f"gpu{at:03}": node(*(log(8 * at + n, f"[rank{8 * at + n}]: step 9") for n in range(8)))
        for at in range(4)
    }
    nodes["gpu002"] = node(log(16, "[rank16]: step 8"), *nodes["gpu002"].files[1:])
    tail = grouped(nodes)
    assert [(g.kind, len(g.files)) for g in tail.groups] == [("lines", 1), ("lines", 31)]
    assert tail.groups[0].files[0].rank == 16
    assert tail.whole
    shown = text(tail).splitlines()
    assert shown[0].split("  ")[-1] == "1 file, written 2 s ago"
    assert shown[0].split()[:6] == ["1", "of", "32", "gpu002", "rank", "16"]
    assert shown[1].strip() == "gpu002:/log/rank_16.log"
    assert shown[2].strip() == "| [rank16]: step 8"
    assert "gpu[000-003]  ranks 0-15,17-31  31 files" in shown[3]
    assert shown[-1] == "32 files on 4 nodes, 2 groups"
    assert checked(tail)["groups"][0]["lines"] == ["[rank16]: step 8"]


def test_who_stopped_before_the_others_stands_above_all():
    nodes = {
        "n1": node(log(0, "step 9"), log(1, "step 9"), log(2, "error")),
        "n2": node(log(3, "step 9", age=252.0), log(4, "step 9", age=61.0)),
    }
    tail = grouped(nodes)
    assert [(g.kind, [f.rank for f in g.files]) for g in tail.groups] == [
        ("stopped", [3]),
        ("lines", [2]),
        ("lines", [0, 1, 4]),
    ]
    assert tail.groups[0].example == "n2:/log/rank_3.log"
    assert "written 4 min 12 s ago, 4 min 10 s before the others" in text(tail)


def test_of_equally_many_whoever_fell_silent_first_stands_first():
    nodes = {
        "n1": node(log(0, "step 9"), log(1, "step 9"), log(2, "error", age=4.0)),
        "n2": node(log(3, "killed", age=9.0), log(4, "exit", age=7.0)),
    }
    groups = grouped(nodes).groups
    assert [[file.rank for file in group.files] for group in groups] == [[3], [4], [2], [0, 1]]


def test_what_watchdogs_say_is_shown_the_least_far_first():
    def said(rank, group, enqueued, completed, **more):
        known = {"kind": "status", "sequence": None, "operation": "", **more}
        return Report(rank, group, enqueued=enqueued, completed=completed, **known)

    def with_reports(rank, *reports):
        return replace(log(rank, "x"), reports=reports)

    timeout = {"kind": "timeout", "sequence": 7, "operation": "ALLREDUCE"}
    nodes = {
        "n1": node(
            with_reports(0, said(0, "default_pg", 9, 6, **timeout)),
            with_reports(1, said(1, "default_pg", 9, 6, **timeout)),
        ),
        # The line does not say whose it is: the path does.
        "n2": node(
            with_reports(2, said(None, "default_pg", 5, 5)),
            with_reports(
                3, said(None, "", None, None, kind="missing", operation="monitoredBarrier")
            ),
            with_reports(4, said(4, "default_pg", 9, 6, **timeout)),
        ),
    }
    tail = grouped(nodes)
    assert [one.rank for one in tail.reports] == [None, 2, 0, 1, 4]
    rows = text(tail).splitlines()
    at = next(number for number, row in enumerate(rows) if row.startswith("watchdog"))
    assert [row[13:] for row in rows[at : at + 3]] == [
        "a rank  has not come to monitoredBarrier",
        "rank 2  default_pg: 5 enqueued, 5 completed",
        "ranks 0-1,4  default_pg: ALLREDUCE 7 timed out, 9 enqueued, 6 completed",
    ]
    first = checked(tail)["reports"][1]
    assert (first["rank"], first["completed"], first["example"]) == (2, 5, "n2:/log/rank_2.log")


def test_what_is_missing_stands_by_itself():
    fault, pipe = Unread("/log/a", "permission denied", True), Unread("/log/p", "is a FIFO", False)
    tail = grouped(
        {
            "n1": node(log(0, "x")),
            "n2": node(),
            "n3": node(older=2),
            "n4": node(unread=(fault,)),
            "n5": node(unread=(pipe,)),
            "n6": node(error="not done within 30 s"),
            "n7": node(log(1), left_out=3),
        },
        unreachable={"n8": "no route to the node"},
    )
    assert [(g.kind, g.nodes) for g in tail.groups] == [
        ("no-file", ("n3",)),
        ("no-file", ("n2", "n5")),
        ("unreadable", ("n4",)),
        ("lines", ("n1",)),
        ("lines", ("n7",)),
        ("skipped", ("n5",)),
    ]
    assert not tail.whole
    assert tail.notes == {"n6": "not done within 30 s"}
    shown = text(tail)
    assert shown.startswith("unreachable  n8\n             no route to the node\n")
    for words in ("no file matches", "n4:/log/a: permission denied", "empty", "is a FIFO",
                  "the files that match were written before", "3 files match, too"):  # fmt: skip
        assert words in shown
    assert checked(tail)["left_out"] == 3


def test_many_groups_are_cut_but_never_the_largest():
    nodes = {"n1": node(*(log(at, f"loss {at}") for at in range(30)), log(30, "x"), log(31, "x"))}
    shown = text(grouped(nodes))
    assert "and 11 more groups (-v shows them)" in shown
    assert "2 of 32" in shown
    assert "-n 1 compares" in shown
    assert "more groups" not in text(grouped(nodes), 1)


def test_what_a_node_says_is_shown_as_text():
    evil = "\x1b[2J[red]\u202e\n$(reboot)"
    path = "/log/a\nrank_1\x1b.log\udcff"
    file = File(path, 1, 0.0, 0.0, (evil,), None)
    tail = grouped({"n1": node(file, unread=(Unread(path, evil, True),), host=evil, error=evil)})
    for shown in (text(tail), "".join(json_report.tail(tail))):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\udcff" not in shown
        assert "x1b[2J[red]" in shown
    assert "| \\x1b[2J[red]\\u202e\\x0a$(reboot)" in text(tail)
    checked(tail)


def packed(data: object) -> str:
    raw = zlib.compress(json.dumps(data).encode())
    return f'noise N tail "{base64.b64encode(raw).decode()}"\nmore'


GOOD = asdict(node(log(1, "x")))


def test_an_answer_is_read_back():
    assert read(packed(GOOD), "N") == node(log(1, "x"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "gave no answer"),
        ("N no Python 3.9 or newer", "no Python 3.9 or newer"),
        ('N tail "x"', "makes no sense"),
        ('N tail "!!"', "makes no sense"),
        ('N tail {"host":1}', "gave no answer"),
        (packed([]), "makes no sense"),
        (packed({**GOOD, "host": 1}), "makes no sense"),
        (packed({**GOOD, "more": 1}), "makes no sense"),
        (packed({**GOOD, "files": [{**GOOD["files"][0], "age_s": float("inf")}]}), "no sense"),
        (packed({**GOOD, "files": [{**GOOD["files"][0], "mtime_s": float("nan")}]}), "no sense"),
        (packed({**GOOD, "older": 10**400}), "makes no sense"),
        (packed({**GOOD, "host": "x" * (5 << 20)}), "makes no sense"),
        (packed(GOOD).replace("N tail", "M tail"), "gave no answer"),
    ],
)
def test_an_answer_that_is_none(answer, words):
    with pytest.raises(ProbeError, match=words):
        read(answer, "N")
