"""A report's file: whole or not at all."""

from __future__ import annotations

import subprocess

import pytest

from nodeready.files import write_atomically


def test_a_full_disk_leaves_the_old_file(tmp_path, lab_machine):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        path = tmp_path / "report"
        path.write_text("old")
        with pytest.raises(OSError, match="No space left on device") as problem:
            write_atomically(path, ["x" * 100_000])
        assert problem.value.filename == str(path)
        assert path.read_text() == "old"
        assert [one.name for one in tmp_path.iterdir()] == ["report"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
