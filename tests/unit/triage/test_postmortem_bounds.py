"""Hostile logs in the directory of a postmortem: without the bounds, each test would never end."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest

from nodeready.agent.failures.log_file import read_lines
from nodeready.agent.log_ranks import MAX_RANKS
from nodeready.core.text import utc_now
from nodeready.runs.postmortem.collect import postmortem_of
from nodeready.runs.postmortem.directory import read_directory


def test_a_report_of_more_ranks_than_exist_names_no_ranks_beyond_the_maximum():
    tasks = ",".join(["0-9999999"] * 400)
    found = read_lines([f"srun: error: gpu1: tasks {tasks}: Killed"] * 20, 2026)
    assert sum(len(event.ranks) for event in found.events) == MAX_RANKS


def test_a_long_line_in_a_kernel_log_and_what_is_no_log_leave_the_other_logs(tmp_path):
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "gpu1.txt").write_text("x 0: " + "TX" * 1_000_000)
    (tmp_path / "rank_0.log").write_bytes(b"step 1\nstep\0\0\0\0 2\n")
    (tmp_path / "rank_1.log").write_text("MemoryError\n")
    (tmp_path / "rank_2.log").symlink_to("/etc/passwd")
    (tmp_path / "rank_3.log.gz").write_bytes(b"\x1f\x8b")
    evidence = read_directory(tmp_path)
    assert [file.failures.path for file in evidence.files] == ["rank_1.log"]
    assert evidence.missing == {
        "rank_0.log": "is no text",
        "rank_2.log": "is a link: copy its target here",
        "rank_3.log.gz": "cannot be unpacked after 0 bytes: Compressed file ended before the "
        "end-of-stream marker was reached",
    }


#: A log of many ranks -> its n-th line.
MANY_RANKS: Mapping[str, Callable[[int], str]] = {
    "an error of each rank": lambda n: f"[rank{n}]: RuntimeError: bad",
    "an error that names no rank": lambda n: f"(W pid={n}, ip=10.0.0.1) RuntimeError: bad",
    "two collectives": lambda n: f"[rank{n}]: RuntimeError: Detected mismatch between collectives "
    f"on ranks. Rank {n} is running collective: CollectiveFingerPrint(SequenceNumber=1, "
    f"OpType=ALLREDUCE, TensorShape=[{n}]), but Rank {n + 1} is running collective: "
    f"CollectiveFingerPrint(SequenceNumber=1, OpType=BROADCAST, TensorShape=[{n}]).",
    "ranks without a word": lambda n: f"[rank{n}]: "
    + ("step 1", "RuntimeError: Broken pipe", "RuntimeError: Broken pipe")[n % 3],
    "errors, each another": lambda n: f"[rank{n}]: RuntimeError: "
    + "".join(chr(97 + n // 26**place % 26) for place in range(4)),
    "killed workers": lambda n: f"[rank{n}]: RuntimeError: DataLoader worker (pid {n}) is killed "
    "by signal: Killed.",
}  # fmt: skip


def executed_lines(function: Callable[[], object]) -> int:
    """The number of lines of Python that a call executes: its work, whatever the machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("line", MANY_RANKS.values(), ids=list(MANY_RANKS))
def test_ten_times_the_ranks_are_ten_times_the_work(tmp_path, line):
    work = []
    for count in (100, 1000):
        (tmp_path / "log").write_text("\n".join(map(line, range(count))))
        work.append(executed_lines(lambda: postmortem_of(
            read_directory(tmp_path), started=utc_now(), source="log"
        )))  # fmt: skip
    assert work[1] < 12 * work[0]


def test_the_answer_says_which_lines_and_failures_were_left_out(tmp_path):
    (tmp_path / "rank_0.log").write_text(f"{'x' * 1000}\n" * 5000)
    (tmp_path / "rank_1.log").write_text("RuntimeError: bad\nstep 1\n" * 30)
    document = postmortem_of(read_directory(tmp_path), started=utc_now(), source="logs")
    assert document.missing == {
        "kernel's log": "none in the directory",
        "the middle of 1 log": "810,696 bytes, beyond the first and the last lines",
        "6 failures in 1 log": "beyond the first and the last of a rank and of a log",
    }


def test_small_files_that_name_many_ranks_end_with_a_part_of_the_files(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.log").write_text("srun: error: gpu1: tasks 0-99999: Killed\n")
    evidence = read_directory(tmp_path)
    assert len(evidence.files) == 6
    assert evidence.missing["logs"] == "only 6 files read: the rest is too much"
