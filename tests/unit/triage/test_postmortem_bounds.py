"""Hostile logs in the directory of a postmortem: without the bounds, each test would never end."""

from __future__ import annotations

from pathlib import Path

from nodeready.node.failure_events import read_lines
from nodeready.node.failure_rules import MAX_RANKS
from nodeready.triage.postmortem.directory import read_directory


def test_a_report_of_more_ranks_than_exist_names_no_ranks_beyond_the_maximum():
    tasks = ",".join(["0-9999999"] * 400)
    found = read_lines([f"srun: error: gpu1: tasks {tasks}: Killed"] * 20, 2026)
    assert sum(len(event.ranks) for event in found.events) == MAX_RANKS


def test_a_long_line_in_a_kernel_log_and_what_is_no_log_leave_the_other_logs(
    tmp_path: Path,
):
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "gpu1.txt").write_text("x 0: " + "TX" * 1_000_000)
    (tmp_path / "rank_0.log").write_bytes(b"step 1\nstep\0\0\0\0 2\n")
    (tmp_path / "rank_1.log").write_text("MemoryError\n")
    (tmp_path / "rank_2.log").symlink_to("/etc/passwd")
    (tmp_path / "rank_3.log.gz").write_bytes(b"\x1f\x8b")
    evidence = read_directory(tmp_path)
    assert [file.failures.path for file in evidence.files] == ["rank_1.log"]
    assert evidence.missing == {
        "rank_0.log": "is no text", "rank_2.log": "is a link", "rank_3.log.gz": "is compressed"
    }  # fmt: skip
