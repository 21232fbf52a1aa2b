"""What is told by a path, a line, or a word of the command line. Pure tables."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from nodeready.cli import options
from nodeready.cli.options import Refused, past
from nodeready.node import tail
from nodeready.triage import logs as document
from nodeready.triage.logs import Ranks


@pytest.mark.parametrize(
    ("path", "rank", "local"),
    [
        ("/var/log/train/rank_7.log", 7, None),
        ("/var/log/train/rank7", 7, None),
        ("/var/log/train/Rank-007.out", 7, None),
        ("/tmp/nccl_trace_rank_12", 12, None),
        ("/out/1/rank.03/stdout", 3, None),
        ("/log/train.7.out", 7, None),
        ("/log/local_rank3.err", None, 3),
        ("/log/rank_9/local_rank_1.err", 9, 1),
        ("/tmp/torchelastic_x/run_y/attempt_0/3/stderr.log", None, 3),
        ("/log/rank_1/node_rank_0/rank_5.log", 5, None),
        # They tell none.
        ("/log/node_rank_4.log", None, None),
        ("/log/dp_rank_4.log", None, None),
        ("/log/frank7.log", None, None),
        ("/log/train.20240301.log", None, None),
        ("/log/train.log", None, None),
        ("", None, None),
        # A number that is none of a rank, and what would stop a slow expression.
        ("/log/rank_123456789.log", None, None),
        ("/log/rank\n_3\x1b[0m", None, None),
        ("/" + "rank_" * 10_000, None, None),
    ],
)
def test_the_rank_that_a_path_tells(path, rank, local):
    assert document.ranks_of(path) == Ranks(rank, local)


SAME = [
    # The same words of ranks 3 and 5 on gpu001 and gpu002.
    ("[rank3]:[E1121 02:03:04.123456789 ProcessGroupNCCL.cpp:616] [Rank 3] ran for 600012"
     " milliseconds before timing out.",
     "[rank5]:[E1121 02:03:09.000000001 ProcessGroupNCCL.cpp:616] [Rank 5] ran for 600977"
     " milliseconds before timing out."),
    ("gpu001:4711:4890 [3] NCCL INFO comm 0x55d0c1a2f0 rank 3",
     "gpu002:99:100 [5] NCCL INFO comm 0x7ffd0012aa rank 5"),
    ("2026-03-01 12:00:00,123 INFO step 100", "2026-03-01T12:00:07.9Z INFO step 100"),
    ("Mar  1 12:00:00 gpu001 python[4711]: killed", "Mar  1 12:00:02 gpu002 python[12]: killed"),
    ("[default3]:loss 2.5", "[default5]:loss 2.5"),
    ("3: loss 2.5", "5: loss 2.5"),
    ("waiting, pid=4711 on cuda:3", "waiting, pid=4713 on cuda:5"),
    (" 45%|##  | 45/100 [05:23<06:33,  1.40it/s]", " 45%|##  | 45/100 [05:25<06:31,  1.41it/s]"),
    ("gpu001.cluster.example: 1772366400.25 up", "gpu002.cluster.example: 1772366401.5 up"),
    ("\x1b[32mINFO\x1b[0m saved in 3.2s", "INFO saved in 3.9s"),
]  # fmt: skip
DIFFERENT = [
    ("step 100", "step 101"),
    ("loss 2.5", "loss 2.6"),
    ("WorkNCCL(SeqNum=41, OpType=ALLREDUCE)", "WorkNCCL(SeqNum=42, OpType=ALLREDUCE)"),
    # Another rank, another node: that is what one looks for.
    ("rank 3 waits for rank 7", "rank 5 waits for rank 8"),
    ("waiting for gpu007", "waiting for gpu008"),
    ("read 4096 bytes", "read 0 bytes"),
]


def shape(line: str, node: str, rank: int | None) -> tuple[str, ...]:
    return document.normalised(
        [line], document.node_names(node, f"{node}.cluster"), Ranks(rank, None)
    )


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_differs_trivially_makes_no_difference(one, other):
    assert shape(one, "gpu001", 3) == shape(other, "gpu002", 5)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_tells_something_stays(one, other):
    assert shape(one, "gpu001", 3) != shape(other, "gpu002", 5)


def test_without_a_rank_in_the_path_every_rank_is_a_placeholder():
    assert shape("[rank3]: rank 3 of 8", "n1", None) == ("[<rank>]: rank <rank> of 8",)
    assert shape("100: loss", "n1", None) == ("100: loss",)
    assert shape("", "", None) == ("",)
    assert shape("10.0.0.1 is 10.0.0.1.", "10.0.0.1", None) == ("<host> is <host>.",)
    # Its name is no part of another's, and no expression.
    assert shape("gpu0011 my-gpu001", "gpu001", None) == ("gpu0011 my-gpu001",)
    assert shape("(a+)+ b", "(a+)+", None) == ("<host> b",)


@pytest.mark.parametrize("piece", ["1:", "0x", "[1:11", "2026-", "rank", "\x1b[", "12:00:00."])
def test_a_line_made_to_be_slow_is_not(piece):
    shape(piece * 700, "gpu001", 3)


BAR = b"start\n 10%|#   |\r 50%|##  |\r 99%|### |"


@pytest.mark.parametrize(
    ("data", "whole", "lines"),
    [
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
    ],
)
def test_the_last_lines_of_a_text(data, whole, lines):
    rows = tail.text_lines(data, whole=whole)
    assert tail.last_lines(rows, 2).lines == lines


def test_what_is_no_text_has_no_lines():
    for whole in (True, False):
        assert tail.text_lines(b"\x80\x04\x95\x00\x00\n", whole=whole) is None


def test_lines_that_match_are_counted_and_the_last_are_shown():
    import re

    rows = tail.text_lines(
        b"forward 1\nbackward 1\nforward 2\nbackward 2\nbackward 3\n", whole=True
    )
    assert tail.last_lines(rows, 2, re.compile("backward")) == (("backward 2", "backward 3"), 3)
    assert tail.last_lines(rows, 2, re.compile("optimizer")) == ((), 0)
    # Found behind what is cut off.
    assert tail.last_lines([b"x" * 3000 + b"end"], 1, re.compile("end$")).matches == 1


TABLE = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
30 22 0:24 / /proc rw - proc proc rw
41 22 0:57 / /mnt/na\\040s rw,nosuid - fuse.sshfs nas:/export rw,user_id=0
42 41 0:58 / /mnt/na\\040s/deep rw - nfs4 nas:/deep rw
broken
7 - x
43 22 0:59 / /mnt/na\\040s rw - nfs4 later:/export rw
"""


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("/", "259:1"),
        ("/var/log/x", "259:1"),
        ("/mnt/na s", "0:59"),
        ("/mnt/na s/x/y", "0:59"),
        ("/mnt/na s/deep/y", "0:58"),
        ("/mnt/na sx", "259:1"),
        ("/proc/1", "0:24"),
    ],
)
def test_the_mount_of_a_path_is_known_without_asking_it(path, device):
    assert tail.Mounts(tail.parse_mounts(TABLE)).of(path).device == device


def test_without_a_table_everything_is_on_one_mount():
    assert tail.Mounts(tail.parse_mounts("no table")).of("/a/b").path == "/"


NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("words", "then"),
    [
        ("2026-03-01T08:30:00Z", datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)),
        ("2026-03-01 10:30+02:00", datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)),
        ("2026-02-28", datetime(2026, 2, 28).astimezone()),
        ("2h", datetime(2026, 3, 1, 10, tzinfo=timezone.utc)),
        ("00:05", datetime(2026, 3, 1, 0, 5).astimezone()),
    ],
)
def test_a_moment(words, then):
    assert options.epoch_seconds(words, NOW) == then.timestamp()


@pytest.mark.parametrize("words", ["30m", "2h", "3d", "1w"])
def test_a_span_is_so_long_ago_and_no_part_of_a_second_longer(words):
    assert options.seconds_ago(words, NOW) == options.span(words)


@pytest.mark.parametrize(
    "words",
    ["", "yesterday", "25:00", "0s", "-1h", "2x", "2027-01-01", "9" * 30 + "d", "0001-01-01 0"],
)
def test_what_is_no_moment(words):
    with pytest.raises(ValueError, match=r"must be|not in the past"):
        options.seconds_ago(words, NOW)


def test_now_is_not_in_the_past():
    """Nothing is newer than now: a command takes 0 for everything."""
    with pytest.raises(ValueError, match="not in the past"):
        options.seconds_ago(NOW.isoformat(), NOW)


def test_a_span():
    assert [options.span(words) for words in ("90", "90s", "10m", "2h", "3d", "1w")] == [
        *(90, 90, 600, 7200, 259200, 604800)
    ]


@pytest.mark.parametrize("read", [options.seconds_ago, options.epoch_seconds])
def test_both_commands_refuse_the_same_words(read):
    assert past(None, read) == 0
    for words in ("yesterday", "0h", "2x", "2999-01-01"):
        with pytest.raises(Refused, match=rf"^--since {words}: "):
            past(words, read)


def test_a_number_without_end_is_no_rank_and_no_exception():
    digits = "9" * 8000
    lines = (f"rank {digits} is slow", f"[{digits}]: up", "rank 7 is up")
    names = document.node_names("gpu1")
    found = document.normalised(lines, names, Ranks(7, None))
    assert found == (*lines[:2], "rank <rank> is up")
