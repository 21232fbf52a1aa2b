"""Which files root takes: owners, modes, links and directories on the way."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeready import files
from nodeready.inventory import hostfile
from nodeready.inventory.load import InventoryError, load


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests counts as root, and owns every place above them."""
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.setenv("SUDO_UID", str(os.getuid()))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "x.py"
    path.parent.mkdir(mode=0o755)
    path.write_text("gpu = ['gpu001']\n")
    path.chmod(0o644)
    return path


def seen_as(monkeypatch: pytest.MonkeyPatch, path: Path, **values: int) -> None:
    """lstat shows these instead of what the path has."""
    real = os.lstat

    def lstat(place: str) -> object:
        found = real(place)
        if str(place) != str(path):
            return found
        shown = {name: getattr(found, name) for name in ("st_uid", "st_gid", "st_mode")}
        return SimpleNamespace(**{**shown, **values})

    monkeypatch.setattr(os, "lstat", lstat)


def test_what_is_roots_alone_is_taken(file: Path) -> None:
    assert (
        files.distrust(file) == files.distrust("a/x.py") == files.distrust("./a/../a/x.py") == ""
    )
    assert files.distrust("no/such/file") == ""


def test_a_strangers_file_directory_and_link_are_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = file.parent.parent / "link.py"
    link.symlink_to("a/x.py")
    assert files.distrust(link) == ""
    for place in (file, file.parent, link):
        with monkeypatch.context() as patch:
            seen_as(patch, place, st_uid=54321)
            said = files.distrust(link)
            assert f"link.py is not taken by root: {place} belongs to uid 54321; chown" in said
            assert "--trust-inventory" in said
            patch.setattr(files, "_owners", lambda: frozenset({0, os.getuid(), 54321}))
            assert files.distrust(link) == ""


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o646, "everybody may write to"),
        (0o664, "may write to"),
        (0o644, ""),
        (0o600, ""),
    ],
)
def test_the_mode_of_a_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, mode: int, said: str
) -> None:
    seen_as(monkeypatch, file, st_mode=0o100000 | mode, st_gid=54321)
    found = files.distrust(file)
    assert said in found
    assert bool(found) == bool(said)


def test_a_directory_of_all_needs_the_sticky_bit(file: Path) -> None:
    file.parent.chmod(0o777)
    assert "everybody may write to" in files.distrust(file)
    file.parent.chmod(0o1777)
    assert files.distrust(file) == ""


def test_the_owners_private_group_may_write(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    owner, group = SimpleNamespace(pw_name="alice", pw_gid=7), SimpleNamespace(gr_name="alice")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: owner)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    seen_as(monkeypatch, file, st_mode=0o100664, st_gid=7)
    for members, taken in (([], True), (["alice"], True), (["alice", "bob"], False)):
        group.gr_mem = members
        assert (files.distrust(file) == "") is taken
    group.gr_mem = []
    monkeypatch.setattr(os, "getxattr", lambda place, name: b"a list of who may write")
    assert "group alice may write to" in files.distrust(file)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").symlink_to("c")
    (tmp_path / "c").symlink_to("b")
    assert "Too many levels" in files.distrust("b")


def test_whoever_asks_gets_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o666)
    hosts = file.with_name("hosts")
    hosts.write_text("gpu001\n")
    hosts.chmod(0o666)
    for path in (file, hosts):
        with pytest.raises(InventoryError, match="everybody may write"):
            load(str(path))
        assert len(load(str(path), trusted=True)) == 1
    with pytest.raises(InventoryError, match="everybody may write"):
        hostfile.read(hosts)
    monkeypatch.setenv(files.VARIABLE, "1")
    assert len(load(str(file))) == 1
    monkeypatch.setenv(files.VARIABLE, "0")
    with pytest.raises(InventoryError):
        load(str(file))
    # Another user's rights are no more than those of the file's owner.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert files.distrust(file) == ""
