"""A report's file: whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.files import write_atomically


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_and_replaced(tmp_path):
    path = tmp_path / "report"
    write_atomically(path, ["a", "b\n"])
    assert (path.read_text(), mode(path)) == ("ab\n", 0o644)
    path.chmod(0o600)
    write_atomically(path, ["c\udcff\n"])
    assert (path.read_text(), mode(path)) == ("c\\udcff\n", 0o600)
    assert [one.name for one in tmp_path.iterdir()] == ["report"]


def test_a_link_stays(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", ["x"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "x"


def test_what_is_no_regular_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        write_atomically(pipe, ["x"])
        assert reader.communicate()[0] == "x"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_report_that_breaks_off_leaves_the_old_file(tmp_path):
    path = tmp_path / "report"
    path.write_text("old")

    def pieces() -> Iterator[str]:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, pieces())
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report"]
