"""The shell library that changes a node, under each shell and with each set of tools."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from nodeready.core import shell

TOOLS = "stat readlink mkdir mktemp rm mv chmod chown base64 sync sha256sum id cat gzip head tr"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to somebody else")


@pytest.fixture
def change(interpreter, tmp_path):
    """Runs a line of the library; returns what it said on standard error."""
    words, path = interpreter(TOOLS)

    def run(line: str) -> str:
        text = f"umask 022\n{shell.library('answer')}{shell.library('change')}{line}\n"
        how = {"env": {"PATH": path}, "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run([*words, "-c", text], check=False, **how)
        assert bool(done.returncode) == bool(done.stderr), done
        return done.stderr.removeprefix("nodeready: ").strip()

    return run


@pytest.fixture
def grounds(tmp_path: Path) -> Path:
    """real/ and links of root's to it, a sticky directory with a link of somebody else."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("./real//deep/..")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "mine").symlink_to("../link")
    (shared / "hers").symlink_to(tmp_path / "real")
    os.chown(shared / "hers", 4001, 4001, follow_symlinks=False)
    (shared / "dir").mkdir()
    (shared / "her dir").mkdir(0o700)
    os.chown(shared / "her dir", 4001, 4001)
    return tmp_path


def write(path: Path, old: str = "'*'") -> str:
    return f"nr_write '{path}' 0640 {'bmV3Cg=='} {old}"


def test_a_file_is_written_through_links_of_roots(change, grounds):
    real = grounds / "real"
    assert change(write(grounds / "link" / "a b" / "c" / "file", "-")) == ""
    made = real / "a b" / "c" / "file"
    assert (made.read_text(), stat.S_IMODE(made.stat().st_mode)) == ("new\n", 0o640)
    assert change(write(grounds / "shared" / "mine" / "file")) == ""
    assert (real / "file").read_text() == "new\n"
    (real / "deep").mkdir()
    assert change(write(grounds / "relative" / "other")) == ""
    assert (real / "other").read_text() == "new\n"
    (grounds / "to-file").symlink_to("link/file")
    (real / "file").write_text("old\n")
    (real / "file").chmod(0o4600)
    assert change(write(grounds / "to-file")) == ""
    assert (real / "file").read_text() == "new\n"
    assert stat.S_IMODE((real / "file").stat().st_mode) == 0o600
    assert (grounds / "to-file").is_symlink()
    assert change(f"nr_remove '{grounds}/link/file'") == ""
    assert change(f"nr_remove '{grounds}/missing/file'") == ""
    assert not (real / "file").exists()
    assert change(f"nr_directory '{grounds}/shared/mine/cores' 1777") == ""
    assert stat.S_IMODE((real / "cores").stat().st_mode) == 0o1777
    assert not list(grounds.rglob(".nodeready.*"))


def test_what_is_refused_is_named(change, grounds):
    shared = grounds / "shared"
    hers = "a link of uid 4001: not followed"
    assert change(write(shared / "hers" / "x")) == f"{shared}/hers/x: {shared}/hers: {hers}"
    said = f"{shared}/her dir: a directory of uid 4001: not changed"
    assert change(f"nr_directory '{shared}/her dir' 1777") == said
    said = f"{shared}/x: {shared}, a directory of root: others can write there"
    assert change(write(shared / "x")) == said
    assert change(write(grounds / "link")) == f"{grounds}/link: is a directory"
    for link, target, path in (("loop", "loop", "loop"), ("gone", "no/directory", "gone/file")):
        (grounds / link).symlink_to(target)
        assert change(write(grounds / path)) == f"{grounds / path}: a link that leads nowhere"
    assert list((grounds / "real").iterdir()) == []
