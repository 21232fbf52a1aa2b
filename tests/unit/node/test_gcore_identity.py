"""Whose memory a process has, and a file that has no name until it is whole."""

from __future__ import annotations

import os
import struct
import subprocess
from dataclasses import replace

import pytest

from nodeready.node.cores import identity as identities
from nodeready.node.cores.identity import (
    Credentials,
    NewFile,
    ProcessIdentity,
    auxv,
    identity,
    namespace,
    open_directory,
    remove_leftovers,
)

OURS = (4, 4026531837)
USER = Credentials((4001,) * 4, (4001,) * 4, 0)
PLAIN = ProcessIdentity(77, frozenset({USER}), OURS, 4001, (8, 15), ((23, 0), (9, 0x401000)))
ROOT = replace(
    PLAIN, credentials=frozenset({Credentials((0,) * 4, (0,) * 4, 0x1FFFFFFFFFF)}), owner=0
)


def changed(**how) -> ProcessIdentity:
    return replace(PLAIN, credentials=frozenset({replace(USER, **how)}))


@pytest.mark.parametrize(("seen", "why"), [
    (PLAIN, ""),
    (ROOT, ""),
    # In a namespace of the user's own, capabilities are none here.
    (replace(changed(capabilities=0x1FFFFFFFFFF), namespace=(4, 9)), ""),
    (changed(users=(4001, 4001, 0, 4001)), "more than one user"),
    (changed(users=(4001, 4001, 4001, 0)), "more than one user"),
    (changed(groups=(4001, 4001, 42, 4001)), "more than one user or group"),
    (changed(capabilities=1 << 19), "has capabilities"),
    (replace(PLAIN, credentials=frozenset({USER, replace(USER, users=(1,) * 4)})), "threads"),
    (replace(PLAIN, owner=0), "not dumpable"),
    (replace(PLAIN, auxv=((23, 1),)), "started with more rights"),
    (replace(ROOT, auxv=((23, 1),)), "started with more rights"),
    (replace(PLAIN, auxv=()), "no 64-bit program"),
])  # fmt: skip
def test_why_memory_may_be_more_than_its_users(seen, why):
    mixed = seen.privilege_problem(OURS)
    assert (why in mixed, bool(mixed)) == (True, bool(why))


@pytest.mark.parametrize(("now", "words"), [
    (PLAIN, ""),
    (replace(PLAIN, started=78), "another one has its number"),
    (changed(users=(4001, 0, 0, 0)), "it runs with the rights of more than one user"),
    (replace(PLAIN, executable=(8, 16)), "it runs another program"),
    (replace(PLAIN, auxv=((23, 0), (9, 0x501000))), "it runs another program"),
    (ROOT, "it has another user or group"),
])  # fmt: skip
def test_the_change_of_a_process(now, words):
    change = PLAIN.describe_change(now, OURS)
    assert (words in change, bool(change)) == (True, bool(words))


def test_the_pairs_of_the_kernel_end_with_the_null():
    raw = struct.pack("<6Q", 23, 0, 0, 0, 23, 1)
    assert (auxv(raw), auxv(raw[:8]), auxv(b"")) == (((23, 0),), (), ())


def test_a_process_has_another_identity_after_every_exec():
    argv = ["sh", "-c", "echo; read go; exec sh -c 'echo; read go'"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes) as shell:
        # Popen returns before the kernel has the new program's memory in place.
        shell.stdout.readline()
        first = identity(shell.pid)
        assert first == identity(shell.pid)
        shell.stdin.write(b"\n")
        shell.stdin.flush()
        shell.stdout.readline()
        then = identity(shell.pid)
        shell.kill()
    assert first.privilege_problem(namespace("self")) == ""
    assert (first.started, first.uid) == (then.started, os.geteuid())
    assert first.describe_change(then, namespace("self")).endswith("runs another program")


@pytest.fixture(params=["unnamed", "hidden"])
def directory(request, tmp_path, monkeypatch):
    """A directory for cores; on the second file system there are no files without a name."""
    if request.param == "hidden":
        # As an old kernel: it opens the directory, which is no file.
        monkeypatch.setattr(identities.os, "O_TMPFILE", os.O_DIRECTORY)
    number = open_directory(str(tmp_path))
    yield number
    os.close(number)


def test_a_file_has_no_name_until_it_is_published(directory, tmp_path):
    new = NewFile(directory)
    with open(f"/proc/self/fd/{new.number}", "wb") as file:
        file.write(b"memory")
    assert not list(tmp_path.glob("**/core.1"))
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o700
    new.publish("core.1", os.geteuid(), os.getegid())
    new.clean_up()
    new.clean_up()
    # What has the name already stays.
    with pytest.raises(FileExistsError):
        (other := NewFile(directory)).publish("core.1", os.geteuid(), os.getegid())
    other.clean_up()
    (core,) = tmp_path.iterdir()
    assert (core.name, core.read_bytes()) == ("core.1", b"memory")
    assert core.stat().st_mode & 0o777 == 0o600
    os.close(new.number)
    os.close(other.number)


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_has_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(identities.os, "O_TMPFILE", os.O_DIRECTORY)
    number = open_directory(str(tmp_path))
    alive = NewFile(number)
    dead, other = (tmp_path / f".nodeready.core.{name}" for name in ("dead", "other"))
    dead.mkdir(0o700)
    (dead / "core").write_text("half")
    other.mkdir(0o755)
    remove_leftovers(number)
    assert (dead.exists(), other.exists(), len(list(tmp_path.iterdir()))) == (False, True, 2)
    alive.clean_up()
    assert list(tmp_path.iterdir()) == [other]
    os.close(number)


def test_a_link_where_others_may_write_is_refused_by_its_name(tmp_path):
    (tmp_path / "real" / "cores").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    tmp_path.chmod(0o777)
    os.close(open_directory(str(tmp_path / "real" / "cores")))
    (tmp_path / "file").touch()
    for name, error, words in (
        ("link", OSError, "is a link that another user may have made"),
        ("none", FileNotFoundError, "No such file"),
        ("file", NotADirectoryError, "Not a dir"),
    ):
        with pytest.raises(error, match=words) as refused:
            open_directory(str(tmp_path / name / "cores"))
        assert refused.value.filename == str(tmp_path / name)
