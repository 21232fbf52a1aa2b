"""A report's file: through root's own links, whole or not at all."""

import os

import pytest

from nodeready.core.files import write_atomically
from tests.unit.test_files import mode, refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def test_roots_own_link_is_followed_where_it_has_no_second_name(tmp_path):
    """Others cannot replace it, but the second name may be anybody's."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "mine").symlink_to(tmp_path / "victim")
    write_atomically(shared / "mine", ["x"])
    assert (tmp_path / "victim").read_text() == "x"
    os.link(shared / "mine", shared / "second", follow_symlinks=False)
    refused(shared / "second", shared / "second")


def test_neither_a_pipe_nor_a_file_of_somebody_else_gets_what_we_write(tmp_path):
    tmp_path.chmod(0o1777)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for path in (tmp_path / "pipe", tmp_path / "file"):
        os.chown(path, 4001, 4001)
        refused(path, path)


def test_in_another_users_directory_a_new_file_takes_the_place_of_an_old_one(tmp_path):
    path = tmp_path / "file"
    path.touch(0o666)
    for one in (tmp_path, path):
        os.chown(one, 4001, 4001)
    write_atomically(path, ["x"], 0o600)
    assert (mode(path), path.stat().st_uid) == (0o600, 0)
