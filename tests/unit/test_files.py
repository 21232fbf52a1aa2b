"""A report's file: whole or not at all. Links of other users: tests/lab/test_units_files.py."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeready.core import files
from nodeready.core.files import check, make_directory, remove, write_atomically


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


def refused(path: Path, component: Path) -> None:
    for call in (check, lambda where: write_atomically(where, ["x"])):
        with pytest.raises(files.NotFollowed) as problem:
            call(path)
        assert problem.value.filename == str(component)


@pytest.mark.parametrize("bits", [0o757, 0o775])
def test_no_link_is_followed_below_a_directory_that_others_can_change(bits, tmp_path):
    below = tmp_path / "open" / "below"
    below.mkdir(parents=True)
    (below / "link").symlink_to(tmp_path / "target")
    (tmp_path / "open").chmod(bits)
    if bits == 0o775 and os.geteuid() != 0:
        # The group is the user's own.
        check(below / "link")
        return
    refused(below / "link", below / "link")
    with pytest.raises(files.NotFollowed):
        make_directory(below / "link" / "new")
    with pytest.raises(files.NotFollowed):
        remove(below / "link" / "x")
    # A directory is no link: a file goes there.
    write_atomically(below / "file", ["x"])
    remove(below / "file")
    assert not (below / "file").exists()
    # Where the others can only add to the directory, its links stay the user's.
    (tmp_path / "open").chmod(0o1777)
    check(below / "link")


def test_the_mode_of_another_name_is_not_kept(tmp_path):
    secret = tmp_path / "readable"
    secret.touch(0o644)
    os.link(secret, tmp_path / "report")
    write_atomically(tmp_path / "report", ["x"], 0o600)
    assert (mode(tmp_path / "report"), secret.read_text()) == (0o600, "")


def test_descriptors_that_were_handed_to_us_are_written_to(tmp_path):
    reading, writing = os.pipe()
    write_atomically(Path(f"/dev/fd/{writing}"), ["a"])
    write_atomically(Path(f"/proc/self/fd/{writing}"), ["b"])
    check(Path(f"/dev/fd/{writing}"))
    os.close(writing)
    assert os.read(reading, 10) == b"ab"
    os.close(reading)
    code = (
        "import sys; from pathlib import Path; from nodeready.core.files import write_atomically\n"
    )
    code += "write_atomically(Path('/dev/stdout'), ['x'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"x"
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_atomically(Path("/dev/fd/1022"), ["x"])


def test_directories_are_made_and_loops_are_no_end(tmp_path):
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    make_directory(tmp_path / "link" / ".." / "link" / "a" / "b", 0o700)
    assert mode(tmp_path / "real" / "a" / "b") == 0o700
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels") as problem:
        write_atomically(tmp_path / "loop", ["x"])
    assert problem.value.filename == str(tmp_path / "loop")
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, ["x"])
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "x", ["x"])
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_directory(tmp_path / "file" / "x")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o644)])
def test_a_new_file_has_no_more_rights_than_the_umask_leaves(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new", ["x"])
        write_atomically(tmp_path / "exact", ["x"], 0o644, keep_mode=False)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == mode
    assert (tmp_path / "exact").stat().st_mode & 0o777 == 0o644


def test_what_a_killed_run_left_goes_with_a_later_one(tmp_path):
    left, young, other = (tmp_path / name for name in (".r.00ff00ff", ".r.00ff00aa", ".r.old"))
    for path in (left, young, other):
        path.write_text("whole")
    for path in (left, other):
        os.utime(path, (0, 0))
    write_atomically(tmp_path / "r", ["x"])
    # The young one may be another run's, which is about to rename it.
    assert sorted(one.name for one in tmp_path.iterdir()) == [young.name, other.name, "r"]


def test_a_directory_that_another_process_makes_meanwhile_is_entered(tmp_path, monkeypatch):
    opened = os.open

    def open_late(name: str, *flags: Any, **how: Any) -> int:
        """The other process makes it between two attempts to open it."""
        try:
            return opened(name, *flags, **how)
        except FileNotFoundError:
            (tmp_path / "made").mkdir(exist_ok=True)
            raise

    monkeypatch.setattr(os, "open", open_late)
    make_directory(tmp_path / "made" / "below")
    assert (tmp_path / "made" / "below").is_dir()


def test_only_regular_files_and_descriptors_that_were_handed_to_us_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, reason in (("pipe", "regular file"), ("device", "regular file"), (".", "directory")):
        with pytest.raises(OSError, match=reason):
            files.read_regular(tmp_path / name)
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    assert files.read_regular(f"/dev/fd/{reader}") == b"text"
    os.close(reader)
