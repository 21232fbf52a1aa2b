"""The directory of a capture: names that are no paths, other people's files, what is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nodeready.triage.stacks import archive
from nodeready.triage.stacks.archive import empty_trace, file_name
from nodeready.triage.stacks.trace import TraceError
from tests.builders.traces import LOAD, REDUCE, process, trace
from tests.command import Tool

NAMES = (
    "gpu001", "gpu001.hall-2", "../../etc/passwd", "/etc/passwd", "..", "", "a/b", "a_b", "a b",
    "fe80::1%eth0", "@docker/ubuntu:22.04", "-rf", "x" * 253, "x" * 252, "knoten-ä", "a\n",
    "\x1b[1m",
)  # fmt: skip


def test_a_nodes_name_is_never_a_path_and_no_two_share_a_file(tmp_path: Path) -> None:
    files = [file_name(name) for name in NAMES]
    assert len(set(files)) == len(NAMES)
    assert file_name("gpu001") == "trace-gpu001.json"
    for file in files:
        assert (tmp_path / file).parent == tmp_path
        assert len(file) < 255
        assert file.isascii()
        assert file.isprintable()
        assert "/" not in file
    archive.prepare(tmp_path / "new")
    for name in filter(None, NAMES):
        list(archive.keep_traces(tmp_path / "new", [empty_trace(name, "away", "")]))


def test_only_a_directory_of_ours_is_written_to_again(tmp_path: Path) -> None:
    archive.prepare(tmp_path / "new")
    for name in ("trace-gpu1.json", "stacks.json", "stacks.html", "stacks.speedscope.json"):
        (tmp_path / "new" / name).write_text("")
    archive.prepare(tmp_path / "new")
    (tmp_path / "new" / "thesis.tex").write_text("")
    with pytest.raises(archive.ForeignDirectory, match=r"holds other files \(thesis.tex\)"):
        archive.prepare(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        archive.prepare(tmp_path / "no" / "such")


def test_what_is_kept_is_read_back_and_what_is_broken_is_named(tmp_path: Path) -> None:
    list(archive.keep_traces(tmp_path, [empty_trace(name, "", "") for name in ("gpu1", "gpu2")]))
    (tmp_path / file_name("gpu3")).write_text(json.dumps(empty_trace("gpu3", "no route", "")))
    (tmp_path / file_name("gpu4")).write_text('{"schema": "nodeready.tr')
    (tmp_path / "notes.txt").write_text("hello")
    found, errors = archive.read(tmp_path)
    assert [trace["node"] for trace in found] == ["gpu1", "gpu2"]
    assert errors["gpu3"] == "no route"
    assert "half-written" in errors["gpu4"]


def test_texts_of_py_spy_are_read_one_node_each_and_a_bad_one_is_named(tmp_path: Path) -> None:
    text = 'Process 7: python train.py\n\nThread 7 (idle): "MainThread"\n    wait (a.py:3)\n'
    for name in ("gpu1.txt", "gpu2.out"):
        (tmp_path / name).write_text(text)
    (tmp_path / "gpu3.txt").write_text("Segmentation fault\n")
    found, errors = archive.read(tmp_path)
    traces = list(found)
    assert [trace["node"] for trace in traces] == ["gpu1", "gpu2"]
    assert traces[0]["frames"] == [["wait", "a.py", 3]]
    assert list(errors) == ["gpu3"]
    single, _ = archive.read(tmp_path / "gpu1.txt")
    assert len(list(single)) == 1
    with pytest.raises(TraceError, match="gpu3"):
        list(archive.read(tmp_path / "gpu3.txt")[0])
    for missing in ("nosuch", "nosuch.txt"):
        with pytest.raises(TraceError, match="No such file"):
            list(archive.read(tmp_path / missing)[0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no text of py-spy dump"):
        archive.read(tmp_path / "empty")


def test_quiet_says_nothing_of_a_job_that_goes_on_and_all_of_one_that_hangs(
    tool: Tool, tmp_path: Path
) -> None:
    for name, later in (("moves", LOAD), ("hangs", REDUCE)):
        (tmp_path / name).mkdir()
        ranks = [process(rank, REDUCE, later, world_size=2) for rank in range(2)]
        list(archive.keep_traces(tmp_path / name, [trace("gpu1", *ranks)]))
    moves = tool("stacks", "--from", tmp_path / "moves", "-q")
    assert (moves.status, moves.out) == (0, "")
    hangs = tool("stacks", "--from", tmp_path / "hangs", "-q")
    assert hangs.status == 0
    assert "all 2 ranks wait in all_reduce" in hangs.out
