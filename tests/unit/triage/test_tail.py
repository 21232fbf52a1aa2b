"""The last lines of logs: what is told by a path or a line, groups, the table, nodes' answers."""

import base64
import json
import re
import zlib
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import jsonschema
import pytest

from nodeready.agent import tail as node_tail
from nodeready.agent.log_ranks import FileRanks, file_ranks, path_ranks, ranks_of_names
from nodeready.agent.proc import MountTable, parse_mounts
from nodeready.agent.tail import LogTail, NodeTail, TailConfig, UnreadFile, read_tail
from nodeready.agent.witnesses.logs import WatchdogReport
from nodeready.core.base import ProbeError
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import UNREACHABLE, NodeGap, node_gaps
from nodeready.core.text import parse_span
from nodeready.reports import json_report, triage_tables
from nodeready.reports.registry import Options
from nodeready.runs import values
from nodeready.runs.tail import Grouping, node_names, normalise, parse_tail
from nodeready.runs.values import past
from tests.cases import cases, read_data
from tests.paths import schema

SCHEMA = schema("tail")


@pytest.mark.parametrize("case", cases(__file__, "tail.json", "path"))
def test_the_rank_that_a_path_tells(case):
    assert path_ranks(case["name"]) == FileRanks(*case["ranks"])


@pytest.mark.parametrize("case", cases(__file__, "tail.json", "line"))
def test_the_line_has_the_global_rank_and_the_path_may_have_the_local_rank(case):
    path, *lines = case["name"].split(" | ")
    assert file_ranks(path_ranks(path), lines) == FileRanks(*case["ranks"])


def test_a_lone_number_is_no_rank_unless_it_is_padded():
    names = ["/log/job.2213.err", "/log/train.0.out", "/log/train.1.out", "/log/rsl.error.0007"]
    ranks = ranks_of_names([*names, "/log/rank_3.log"])
    assert [ranks[name].rank for name in names] == [None, 0, 1, 7]
    assert ranks["/log/rank_3.log"].rank == 3


def shape(line: str, node: str, rank: int | None, local: int | None = None) -> str:
    """The line without what differs between nodes and ranks."""
    (normal,) = normalise([line], node_names(node, f"{node}.cluster"), FileRanks(rank, local))
    return normal


SHAPES = [one for name in ("same", "different") for one in cases(__file__, "tail.json", name)]


@pytest.mark.parametrize("case", SHAPES)
def test_what_differs_trivially_makes_no_difference_and_what_tells_something_stays(case):
    is_same = shape(case["name"], "gpu001", 3) == shape(case["other"], "gpu002", 5)
    assert is_same == (case["section"] == "same")


ENDLESS = "9" * 8000


@pytest.mark.parametrize(("node", "ranks", "line", "normal"), [
    # Without a rank in the path every rank is a placeholder.
    ("n1", (None,), "[rank3]: rank 3 of 8", "[<rank>]: rank <rank> of 8"),
    ("n1", (None,), "100: loss", "100: loss"),
    ("", (None,), "", ""),
    ("10.0.0.1", (None,), "10.0.0.1 is 10.0.0.1.", "<host> is <host>."),
    # Its name is no part of another's, and no expression.
    ("gpu001", (None,), "gpu0011 my-gpu001", "gpu0011 my-gpu001"),
    ("(a+)+", (None,), "(a+)+ b", "<host> b"),
    # A global rank that is another rank's local rank is no placeholder.
    ("n1", (2, 0), "rank 0 is late", "rank 0 is late"),
    ("n1", (2, 0), "local_rank 0 of rank 2", "local_rank <rank> of rank <rank>"),
    # A number without end is no rank and no exception.
    ("n1", (7,), f"rank {ENDLESS} is slow", f"rank {ENDLESS} is slow"),
    ("n1", (7,), f"[{ENDLESS}]: up", f"[{ENDLESS}]: up"),
])  # fmt: skip
def test_a_line_without_its_ranks_and_hosts(node, ranks, line, normal):
    assert shape(line, node, *ranks) == normal


BAR = b"start\n 10%|#   |\r 50%|##  |\r 99%|### |"


@pytest.mark.parametrize(("data", "is_whole", "lines"), [
    (b"one\ntwo\nthree\n", True, ("two", "three")),
    (b"one\r\ntwo\r\n", True, ("one", "two")),
    (b"one\n\n  \ntwo\n\n", True, ("one", "two")),
    (b"", True, ()),
    (b"\n\n", True, ()),
    (b"lf the line\ntwo\nthree", False, ("two", "three")),
    (b"only a part", False, ("only a part",)),
    (b"only a part\n", False, ("only a part",)),
    (b"\0" * 9000 + b"end\n", False, ("end",)),
    (BAR, True, ("start", " 99%|### |")),
    (BAR + b"\r              \r", True, ("start", " 99%|### |")),
    (b"caf\xe9 \xff", True, ("caf\ufffd \ufffd",)),
    ("héé".encode()[1:], True, ("éé",)),
    (b"\0" * 5000 + b"after copytruncate\n", True, ("after copytruncate",)),
    (b"x" * 5000, True, ("x" * 2000 + "...",)),
    ("é".encode() * 2000, True, ("é" * 2000,)),
    (b"\x1b]0;title\x07\x1b[2J\n", True, ("\x1b]0;title\x07\x1b[2J",)),
])  # fmt: skip
def test_the_last_lines_of_a_text(data, is_whole, lines):
    rows = node_tail.text_lines(data, is_whole=is_whole)
    assert node_tail.last_lines(rows, 2).lines == lines
    assert node_tail.text_lines(b"\x80\x04\x95\x00\x00\n", is_whole=is_whole) is None


def test_lines_that_match_are_counted_and_the_last_are_shown():
    text = b"forward 1\nbackward 1\nforward 2\nbackward 2\nbackward 3\n"
    rows, last = node_tail.text_lines(text, is_whole=True), node_tail.last_lines
    assert last(rows, 2, re.compile("backward")) == (("backward 2", "backward 3"), 3)
    assert last(rows, 2, re.compile("optimizer")) == ((), 0)
    # Found behind what is cut off.
    assert last([b"x" * 3000 + b"end"], 1, re.compile("end$")).matches == 1


TABLE = read_data(__file__, "mountinfo.txt")


@pytest.mark.parametrize("case", cases(__file__, "tail.json", "mount"))
def test_the_mount_of_a_path_is_known_without_asking_it(case):
    assert MountTable(parse_mounts(TABLE)).mount_of(case["path"]).device == case["device"]
    assert MountTable(parse_mounts("no table")).mount_of("/a/b").path == "/"


NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(("words", "moment"), [
    ("2026-03-01T08:30:00Z", datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)),
    ("2026-03-01 10:30+02:00", datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)),
    ("2026-02-28", datetime(2026, 2, 28).astimezone()),
    ("2h", datetime(2026, 3, 1, 10, tzinfo=timezone.utc)),
    ("00:05", datetime(2026, 3, 1, 0, 5).astimezone()),
])  # fmt: skip
def test_a_moment(words, moment):
    assert values.epoch_seconds(words, NOW) == moment.timestamp()


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("3d", 259200), ("1w", 604800)],
)
def test_a_span_is_so_long_ago_and_no_part_of_a_second_longer(words, seconds):
    assert parse_span(words) == seconds
    if not words.isdecimal():
        assert values.seconds_ago(words, NOW) == seconds


@pytest.mark.parametrize(
    "words",
    ["", "yesterday", "25:00", "0s", "-1h", "2x", "2027-01-01", "9" * 30 + "d", "0001-01-01 0",
     # A command takes 0 for everything, and nothing is newer than now.
     NOW.isoformat()],
)  # fmt: skip
def test_what_is_no_moment_in_the_past(words):
    with pytest.raises(ValueError, match=r"must be|not in the past"):
        values.seconds_ago(words, NOW)
    for how in (values.seconds_ago, values.epoch_seconds):
        assert past(None, how) == 0
        with pytest.raises(Refused, match=r"^--since 2x: "):
            past("2x", how)


def log(rank: object, *lines: str, age: float = 2.0) -> LogTail:
    return LogTail(f"/log/rank_{rank}.log", 100, 1_800_000_000.0, age, lines, None)


def node(*files: LogTail, unread: tuple[UnreadFile, ...] = (), **more: object) -> NodeTail:
    known = {"host": "x", "left_out": 0, "older": 0, "error": "", **more}
    return NodeTail(files=files, unread=unread, **known)


def grouped(nodes: dict[str, NodeTail], **more: object):
    grouping = Grouping()
    for name, answer in nodes.items():
        grouping.add(name, answer)
    how = {"pattern": "/log/*", "gaps": (), "started": "s", "finished": "f", **more}
    how["gaps"] += node_gaps(grouping.gaps)
    return grouping.document(**how)


def table(tail, verbose: int = 0) -> str:
    return "".join(f"{line.plain}\n" for line in triage_tables.tail_lines(tail, Options(verbose)))


def checked(tail) -> dict:
    data = json.loads("".join(json_report.render(tail)))
    jsonschema.validate(data, SCHEMA)
    return data


def ranks(tail) -> list[list[int | None]]:
    return [[file.rank for file in group.files] for group in tail.groups]


def test_the_odd_rank_is_on_top_and_the_others_are_a_group():
    nodes = {
        f"gpu{at:03}": node(*(log(8 * at + n, f"[rank{8 * at + n}]: step 9") for n in range(8)))
        for at in range(4)
    }
    nodes["gpu002"] = node(log(16, "[rank16]: step 8"), *nodes["gpu002"].files[1:])
    tail = grouped(nodes)
    assert tail.has_all_files
    assert ranks(tail)[0] == [16]
    assert len(ranks(tail)[1]) == 31
    rows = [" ".join(row.split()) for row in table(tail).splitlines()]
    assert rows[:3] == [
        "1 of 32 gpu002 rank 16 1 file, written 2 s ago",
        "gpu002:/log/rank_16.log",
        "| [rank16]: step 8",
    ]
    assert "gpu[000-003] ranks 0-15,17-31 31 files" in rows[3]
    assert rows[-1] == "32 files on 4 nodes, 2 groups"
    assert checked(tail)["groups"][0]["lines"] == ["[rank16]: step 8"]


def test_a_rank_that_stopped_before_the_others_stands_above_all():
    nodes = {
        "n1": node(log(0, "step 9"), log(1, "step 9"), log(2, "error"), log(5, "exit", age=7.0)),
        "n2": node(log(3, "step 9", age=252.0), log(4, "step 9", age=61.0)),
    }
    tail = grouped(nodes)
    assert [group.kind for group in tail.groups] == ["stopped", "lines", "lines", "lines"]
    # Of equally many the one that fell silent first.
    assert ranks(tail) == [[3], [5], [2], [0, 1, 4]]
    assert tail.groups[0].example == "n2:/log/rank_3.log"
    assert "written 4 min 12 s ago, 4 min 10 s before most files" in table(tail)


def test_the_reports_of_watchdogs_are_shown_the_least_far_first():
    def file(at, *reported):
        return replace(log(at, "x"), reports=(WatchdogReport(*reported),))

    timeout = ("default_pg", "timeout", 7, "ALLREDUCE", 9, 6)
    # The line does not say whose it is: the path does.
    silent = file(2, None, "default_pg", "status", None, "", 5, 5)
    missing = file(3, None, "", "missing", None, "monitoredBarrier", None, None)
    nodes = {"n1": node(*(file(rank, rank, *timeout) for rank in (0, 1)))}
    nodes["n2"] = node(silent, missing, file(4, 4, *timeout))
    tail = grouped(nodes)
    assert [report.rank for report in tail.reports] == [None, 2, 0, 1, 4]
    rows = table(tail).splitlines()
    first = next(number for number, row in enumerate(rows) if row.startswith("watchdog"))
    assert [row[13:] for row in rows[first : first + 3]] == [
        "a rank  has not called monitoredBarrier",
        "rank 2  default_pg: 5 enqueued, 5 completed",
        "ranks 0-1,4  default_pg: ALLREDUCE 7 timed out, 9 enqueued, 6 completed",
    ]
    second = checked(tail)["reports"][1]
    assert (second["rank"], second["completed"], second["example"]) == (2, 5, "n2:/log/rank_2.log")


def test_what_is_missing_stands_by_itself():
    fault, pipe = (
        UnreadFile("/log/a", "permission denied", True),
        UnreadFile("/log/p", "is a FIFO", False),
    )
    late = node(error="not done within 30 s")
    told = (node(log(0, "x")), node(), node(older=2), node(unread=(fault,)), node(unread=(pipe,)))
    nodes = {f"n{at}": one for at, one in enumerate((*told, late, node(log(1), left_out=3)), 1)}
    tail = grouped(nodes, gaps=(NodeGap("n8", UNREACHABLE, "no route to the node"),))
    assert [(group.kind, group.nodes) for group in tail.groups] == [
        ("no-file", ("n3",)),
        ("no-file", ("n2", "n5")),
        ("unreadable", ("n4",)),
        ("lines", ("n1",)),
        ("lines", ("n7",)),
        ("skipped", ("n5",)),
    ]
    assert not tail.has_all_files
    assert [gap[:3] for gap in tail.gaps] == [
        ("n8", "unreachable", "no route to the node"),
        ("n6", "incomplete", "not done within 30 s"),
    ]
    text = table(tail)
    assert text.startswith("unreachable  n8\n             no route to the node\n")
    for words in ("no file matches", "n4:/log/a: permission denied", "empty", "is a FIFO",
                  "the files that match were written before", "3 files match, too"):  # fmt: skip
        assert words in text
    assert checked(tail)["left_out"] == 3


def test_many_groups_are_cut_but_never_the_largest():
    nodes = {"n1": node(*(log(at, f"loss {at}") for at in range(30)), log(30, "x"), log(31, "x"))}
    text = table(grouped(nodes))
    for words in ("and 11 more groups (-v shows them)", "2 of 32", "-n 1 compares"):
        assert words in text
    assert "more groups" not in table(grouped(nodes), 1)


def own(rank: int | None, *lines: str, after: int = 3, host: str = "") -> LogTail:
    """The lines of one rank in a mixed log."""
    one = replace(log("", *lines), path="/log/slurm.out", is_mixed=True)
    return replace(one, rank=rank, host=host, lines_after=after)


def test_the_ranks_of_a_mixed_log_are_grouped_as_files_are():
    logs = [own(rank, f"rank {rank} on gpu{rank}: step 9", host=f"gpu{rank}") for rank in range(8)]
    logs[3] = own(3, "step 8", after=200, host="gpu3")
    logs[6] = own(6, "step 7", after=9, host="gpu6")
    tail = grouped({"login": node(own(None, "srun: error: task 3"), *logs)})
    assert [(group.kind, [file.rank for file in group.files]) for group in tail.groups] == [
        ("stopped", [3]),
        ("lines", [None]),
        ("lines", [6]),
        ("lines", [0, 1, 2, 4, 5, 7]),
    ]
    rows = [" ".join(row.split()) for row in table(tail).splitlines()]
    assert rows[0] == (
        "stopped login rank 3 of gpu3 in 1 file, written 2 s ago, 200 lines of other ranks since"
    )
    assert rows[3] == "no rank login in 1 file, written 2 s ago"
    assert "6 of 8 login ranks 0-2,4-5,7 of gpu[0-2,4-5,7] in 1 file, written 2 s ago" in rows
    assert rows[-1] == "8 ranks in 1 file on 1 node, 4 groups"
    (file,) = checked(tail)["groups"][0]["files"]
    assert (file["rank"], file["host"], file["lines_after"]) == (3, "gpu3", 200)
    # A whole mixed log that is older than the others.
    old = [replace(own(rank, "step 1", after=rank), age_s=99.0) for rank in range(2)]
    others = {f"n{index}": node(log(index, "x")) for index in range(4)}
    text = table(grouped({"login": node(*old), **others}))
    assert "1 min 37 s before most files" in text
    # Where only one rank writes, the others are not silent.
    quiet = [own(rank, "step 1", after=900 * (rank > 0)) for rank in range(8)]
    assert [group.kind for group in grouped({"login": node(*quiet)}).groups] == ["lines"]


def test_a_node_without_the_chosen_ranks_is_no_trouble():
    nodes = {"n1": node(log(0, "x")), "n2": node(other_ranks=2)}
    assert [group.kind for group in grouped(nodes).groups] == ["lines"]
    (group,) = grouped({"n2": nodes["n2"]}).groups
    assert (group.kind, group.reason) == ("no-file", "no file has lines of these ranks")


@pytest.mark.parametrize(("words", "spans"), [
    ("3", ((3, 3, 1),)), ("3, 5-7,0-504/8", ((3, 3, 1), (5, 7, 1), (0, 504, 8))), (None, ()),
])  # fmt: skip
def test_ranks(words, spans):
    assert values.read_ranks(words) == spans


@pytest.mark.parametrize("words", ["", "x", "7-5", "1,", "0-8/0", "-1", "3/2", "1" * 9])
def test_what_are_no_ranks(words):
    with pytest.raises(Refused, match=r"^--rank .*must be ranks"):
        values.read_ranks(words)


LOGS = Path(__file__).parent / "logs" / "torchrun"


@pytest.fixture
def torchrun(monkeypatch):
    """`torchrun(mode)`: the document of a run's logs."""
    # No file system here is dead, however busy the machine is.
    monkeypatch.setattr(node_tail, "PATIENCE_S", 25)

    def read_logs(mode: str, name: str = "stderr.log"):
        pattern = f"{LOGS}/{mode}/{{}}/*/attempt_0/*/{name}"
        nodes = ("node0", "node1")
        return grouped(
            {node: read_tail(TailConfig("N", "T", pattern.format(node))) for node in nodes}
        )

    return read_logs


def test_what_all_ranks_but_the_culprit_raise_is_a_group(torchrun):
    """The ports of the peers differ, and each line has its own rank."""
    tail = torchrun("raise")
    assert list(map(sorted, ranks(tail))) == [[2], [0, 1, 3]]
    assert "ValueError: loss is nan" in tail.groups[0].lines[-1]


def test_the_reports_name_the_rank_that_has_not_come(torchrun):
    tail = torchrun("barrier")
    assert sorted(rank for group in ranks(tail) for rank in group) == [0, 1, 2, 3]
    reports = {(report.rank, report.kind) for report in tail.reports}
    assert {(2, "missing"), (1, "reached"), (0, "timeout"), (3, "lost")} <= reports
    timeouts = [report.rank for report in torchrun("timeout").reports if report.kind == "timeout"]
    assert set(timeouts) == {0, 1, 2}
    (group,) = torchrun("timeout", "stdout.log").groups
    assert sorted(file.local_rank for file in group.files) == [0, 0, 1, 1]


def packed(data: object) -> str:
    raw = zlib.compress(json.dumps(data).encode())
    return f'noise N tail "{base64.b64encode(raw).decode()}"\nmore'


GOOD = asdict(node(log(1, "x")))


@pytest.mark.parametrize(("answer", "words"), [
    ("", "gave no answer"),
    ("N no Python 3.9 or newer", "no Python 3.9 or newer"),
    ('N tail "x"', "makes no sense"),
    ('N tail "!!"', "makes no sense"),
    ('N tail {"host":1}', "gave no answer"),
    (packed([]), "makes no sense"),
    (packed({**GOOD, "host": 1}), "makes no sense"),
    (packed({**GOOD, "more": 1}), "makes no sense"),
    (packed({**GOOD, "files": [{**GOOD["files"][0], "age_s": float("inf")}]}), "no sense"),
    (packed({**GOOD, "older": 10**400}), "makes no sense"),
    (packed({**GOOD, "host": "x" * (5 << 20)}), "makes no sense"),
    (packed(GOOD).replace("N tail", "M tail"), "gave no answer"),
])  # fmt: skip
def test_an_answer_that_is_none(answer, words):
    with pytest.raises(ProbeError, match=words):
        parse_tail(answer, "N")
    assert parse_tail(packed(GOOD), "N") == node(log(1, "x"))
