"""The program of the node, on this machine's own files: what a pattern finds, and its bounds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.node import path_pattern
from nodeready.node import tail as program
from nodeready.node.tail import MAX_ANSWER, NodeTail, TailConfig, answer_line, read_tail
from nodeready.triage.logs import parse_tail
from tests.cases import cases


def tail(pattern: object, **how: object) -> NodeTail:
    return read_tail(TailConfig("N", "nodeready:test", str(pattern), **how))


FILES = ("a/1.log", "a/b/2.log", "a/b/c/3.log", "a/.hidden/4.log", "x[1].log")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number, name in enumerate(FILES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
        os.utime(path, (1_800_000_000 + number,) * 2)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "a/b/loop").symlink_to("..")
    return tmp_path


@pytest.mark.parametrize("case", cases(__file__, "cases/patterns.json"))
def test_the_files_of_a_pattern(tree, case):
    seen = tail(f"{tree}/{case['name']}")
    assert sorted(file.path for file in seen.files) == [f"{tree}/{path}" for path in case["paths"]]
    assert (seen.unread, seen.error) == ((), "")
    assert parse_tail(answer_line(TailConfig("N", "t", ""), seen), "N") == seen


def test_of_many_files_those_that_were_written_last(tree):
    seen = tail(f"{tree}/**/*.log", max_files=2)
    names = [file.path.rpartition("/")[2] for file in seen.files]
    assert (names, seen.left_out) == (["x[1].log", "3.log"], 2)
    late = tail(f"{tree}/**/*.log", since_s=1_800_000_002)
    assert (len(late.files), late.older) == (2, 2)


def test_an_answer_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "MAX_ANSWER", MAX_ANSWER // 8)
    for number in range(8):
        (tmp_path / f"{number}.log").write_text("\n".join(["ü" * 1900] * 12))
    monkeypatch.setattr(path_pattern, "MAX_NAMES", 8)
    seen = tail(f"{tmp_path}/*", lines=12)
    assert len(seen.files) == 8
    assert "lines are missing" in seen.error
    assert sum(len(line) for file in seen.files for line in file.lines) < MAX_ANSWER // 8
    # No more is kept meanwhile than twice as much.
    kept = program._TailAnswer(TailConfig("N", "nodeready:test", ""))
    for file in seen.files * 3:
        kept.add_file(replace(file, path=f"{len(kept.files)}", lines=("x" * 30_000,)))
        assert sum(map(sum, kept.sizes.values())) <= 2 * program.MAX_ANSWER
    (tmp_path / "8.log").touch()
    assert "names: only some were looked at" in tail(f"{tmp_path}/*", lines=1).error
    # The kernel's own files are not walked through.
    assert tail("/proc/**/status").files == ()
    assert [file.path for file in tail("/proc/self/mountinfo").files] == ["/proc/self/mountinfo"]


def test_a_mistake_in_the_fork_is_an_error(tree, monkeypatch):
    monkeypatch.setattr("nodeready.node.tail.TailReader.read", lambda *_: 1 / 0)
    seen = tail(f"{tree}/a/*.log")
    assert seen.error == "its own reader broke off"
    assert [file.reason for file in seen.unread] == ["not read within 30 s"]
