"""A report of root never goes through a link, a pipe or a file of another user."""

from __future__ import annotations

import os

import pytest

from nodeready.files import write_atomically
from tests.unit.test_files import mode, refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")

#: An ordinary user.
OTHER = 4001


def test_a_link_of_somebody_else_is_not_followed(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "dir").mkdir()
    for target, link in (("victim", "report"), ("dir", "reports")):
        (shared / link).symlink_to(tmp_path / target)
        os.chown(shared / link, OTHER, OTHER, follow_symlinks=False)
    refused(shared / "report", shared / "report")
    refused(shared / "reports" / "x", shared / "reports")
    assert not (tmp_path / "victim").exists()
    assert list((tmp_path / "dir").iterdir()) == []
    # Root's own link there cannot be replaced by others, and is followed.
    (shared / "mine").symlink_to(tmp_path / "victim")
    write_atomically(shared / "mine", ["x"])
    assert (tmp_path / "victim").read_text() == "x"
    # A second name for it may be anybody's.
    os.link(shared / "mine", shared / "second", follow_symlinks=False)
    refused(shared / "second", shared / "second")


def test_neither_a_pipe_nor_a_file_of_somebody_else_gets_what_we_write(tmp_path):
    tmp_path.chmod(0o1777)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("pipe", "file"):
        os.chown(tmp_path / name, OTHER, OTHER)
        refused(tmp_path / name, tmp_path / name)
    # In that user's own directory a new file takes the place of an old one, with our mode.
    (tmp_path / "hers").mkdir()
    os.chown(tmp_path / "hers", OTHER, OTHER)
    (tmp_path / "hers" / "file").touch(0o666)
    os.chown(tmp_path / "hers" / "file", OTHER, OTHER)
    write_atomically(tmp_path / "hers" / "file", ["x"], 0o600)
    assert mode(tmp_path / "hers" / "file") == 0o600
    assert (tmp_path / "hers" / "file").stat().st_uid == 0
