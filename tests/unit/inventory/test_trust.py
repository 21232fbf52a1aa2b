"""Which files root takes: owners, modes, links and directories on the way."""

import errno
import grp
import os
import pwd
from types import SimpleNamespace

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.fleet.inventory import hostfile, trust
from nodeready.fleet.inventory.load import load


@pytest.fixture(autouse=True)
def as_root(monkeypatch, tmp_path):
    """Whoever runs the tests counts as root, and owns every place above them."""
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setenv("SUDO_UID", str(os.getuid()))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a" / "x.py"
    path.parent.mkdir(mode=0o755)
    path.write_text("gpu = ['gpu001']\n")
    path.chmod(0o644)
    return path


def shows(monkeypatch, path, **values):
    """lstat shows these values instead of the path's own."""
    real = os.lstat

    def lstat(place):
        status = real(place)
        if str(place) != str(path):
            return status
        shown = {name: getattr(status, name) for name in ("st_uid", "st_gid", "st_mode")}
        return SimpleNamespace(**{**shown, **values})

    monkeypatch.setattr(os, "lstat", lstat)


def test_a_file_of_changeable_by_root_only_is_taken(file):
    for path in (file, "a/x.py", "./a/../a/x.py", "no/such/file"):
        assert trust.distrust(path) == ""
    for name, target in (("b", "c"), ("c", "b")):
        file.parent.with_name(name).symlink_to(target)
    assert "Too many levels" in trust.distrust("b")


def test_a_strangers_file_directory_and_link_are_named(file, monkeypatch):
    link = file.parent.parent / "link.py"
    link.symlink_to("a/x.py")
    assert trust.distrust(link) == ""
    for place in (file, file.parent, link):
        with monkeypatch.context() as patch:
            shows(patch, place, st_uid=54321)
            reason = trust.distrust(link)
            assert f"link.py is not taken by root: {place} belongs to uid 54321; chown" in reason
            assert "--trust-inventory" in reason
            patch.setenv("SUDO_UID", "54321")
            assert "54321" not in trust.distrust(link)


def test_the_mode_of_a_file_or_directory(file, monkeypatch):
    for mode, why in (
        (0o100646, "is world-writable"),
        (0o100664, "may write to"),
        (0o100644, ""),
        (0o040777, "is world-writable"),
        (0o041777, ""),
    ):
        with monkeypatch.context() as patch:
            shows(patch, file, st_mode=mode, st_gid=54321)
            reason = trust.distrust(file)
            assert why in reason
            assert bool(reason) == bool(why)


def test_the_owners_private_group_may_write(file, monkeypatch):
    owner, group = SimpleNamespace(pw_name="alice", pw_gid=7), SimpleNamespace(gr_name="alice")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: owner)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    shows(monkeypatch, file, st_mode=0o100664, st_gid=7)
    for members, taken in (([], True), (["alice"], True), (["alice", "bob"], False)):
        group.gr_mem = members
        assert (trust.distrust(file) == "") is taken
    group.gr_mem = []
    monkeypatch.setattr(os, "getxattr", lambda place, name: b"an access list")
    assert "group alice may write to" in trust.distrust(file)


def test_a_user_may_take_the_file_nevertheless(file, monkeypatch):
    hosts = file.with_name("hosts")
    hosts.write_text("gpu001\n")
    for path in (file, hosts):
        path.chmod(0o666)
        with pytest.raises(InventoryError, match="is world-writable"):
            load(str(path))
        assert len(load(str(path), trusted=True)) == 1
    with pytest.raises(InventoryError, match="is world-writable"):
        hostfile.read(hosts)
    monkeypatch.setenv(trust.VARIABLE, "1")
    assert len(load(str(file))) == 1
    monkeypatch.setenv(trust.VARIABLE, "0")
    with pytest.raises(InventoryError):
        load(str(file))
    # Another user names a file, and takes it.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert trust.distrust(file) == ""


def test_an_ordinary_user_takes_what_the_author_of_the_named_inventory_has_written(
    file, monkeypatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    above = {os.getuid()}
    for owner, authors, is_taken in (
        (54321, above, True),
        (54322, above, False),
        (54322, {*above, 54322}, True),
        (54322, None, True),
    ):
        with monkeypatch.context() as patch:
            shows(patch, file, st_uid=owner)
            reason = trust.distrust(file, authors=authors)
            assert reason == "" if is_taken else "uid 54322; copy it, or use" in reason


def test_a_directory_that_the_user_may_not_walk_is_not_taken(file, monkeypatch):
    def lstat(place):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)

    monkeypatch.setattr(os, "lstat", lstat)
    assert trust.distrust(file) == ""
    assert "Permission denied" in trust.distrust(file, authors=())
