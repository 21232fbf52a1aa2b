"""Whose memory a process has, and a core that has no name until it is complete."""

import os
import struct
import subprocess

import pytest

from nodeready.agent.cores import gcore
from nodeready.agent.runtime import Ended
from nodeready.agent.users_file import Rights
from nodeready.core import files
from tests.cases import with_table

OURS = Rights(os.geteuid(), os.getegid(), ())
USER = "\t4001" * 4


@with_table("rows, owner_and_auxv, why")
def test_why_memory_may_be_more_than_its_users(tmp_path, monkeypatch, rows, owner_and_auxv, why):
    owner, *auxv = owner_and_auxv

    class Status:
        st_uid = owner

    threads = {str(n): {"Uid": USER, "Gid": USER, **row} for n, row in enumerate(rows)}
    (tmp_path / "auxv").write_bytes(struct.pack("<4Q", *auxv, 0, 0))
    monkeypatch.setattr(gcore, "_threads", lambda pid: threads)
    monkeypatch.setattr(gcore.os, "stat", lambda path: Status)
    monkeypatch.setattr(gcore.os.path, "samefile", lambda *paths: True)
    monkeypatch.setattr(gcore, "open", lambda path, mode: (tmp_path / "auxv").open(mode), False)
    reason = gcore.privilege_problem(7)
    assert (why in reason, bool(reason)) == (True, bool(why))


def test_a_process_of_ours_is_a_target_and_we_and_an_ended_one_are_none():
    with subprocess.Popen(["sleep", "60"]) as sleep:
        target = gcore.check_target(sleep.pid)
        assert target.rights.uid == os.geteuid()
        assert target.mapped_bytes >= target.resident_bytes > 0
        assert not gcore.privilege_problem(sleep.pid)
        sleep.kill()
    for pid, words in ((os.getpid(), "hangs on"), (1, "hangs on"), (sleep.pid, "no process")):
        with pytest.raises(gcore.DumpRefused, match=words):
            gcore.check_target(pid)


@with_table("version, free_mib, why")
def test_a_disk_needs_what_this_gdb_writes(monkeypatch, version, free_mib, why):
    class Tools:
        def run(self, argv, limit_s, **how):
            return Ended(0, f"{version}\nCopyright\n", "", 0.1)

    class Disk:
        f_bavail, f_frsize = free_mib, 1 << 20

    target = gcore.DumpTarget(os.getpid(), 77, OURS, 10 << 20, 1 << 30)
    monkeypatch.setattr(gcore, "find_gdb", lambda: "/usr/bin/gdb")
    monkeypatch.setattr(gcore.os, "fstatvfs", lambda number: Disk)
    try:
        preview, refused = gcore._preview(Tools(), target, "/var/crash/core.1", 9), ""
        assert (preview.path, preview.size_bytes) == ("/var/crash/core.1", 1 << 30)
    except gcore.DumpRefused as problem:
        refused = str(problem)
    assert (why in refused, bool(refused)) == (True, bool(why))


@pytest.mark.parametrize("flag", [os.O_TMPFILE, os.O_DIRECTORY])
def test_a_core_has_only_a_hidden_name_until_it_is_complete(tmp_path, monkeypatch, flag):
    # An old kernel opens the directory, which is no file.
    monkeypatch.setattr(gcore.os, "O_TMPFILE", flag)
    directory = files.open_directory(tmp_path)
    number = gcore._create(directory, "core.1", ".hidden", OURS)
    status = os.fstat(number)
    assert (status.st_mode & 0o777, status.st_uid, status.st_size) == (0o600, OURS.uid, 0)
    hidden = [".hidden"] if flag == os.O_DIRECTORY else []
    assert os.listdir(tmp_path) == hidden
    (tmp_path / "core.2").symlink_to("elsewhere")
    with pytest.raises(FileExistsError):
        gcore._create(directory, "core.2", ".other", OURS)
    assert not (tmp_path / "elsewhere").exists()
    os.close(number)
    os.close(directory)
