"""What a change keeps, and what an undo makes of it, under each shell and set of tools."""

import base64
import os
import stat
import subprocess

import pytest

from nodeready.core import shell
from tests.cases import read_table
from tests.lab.test_units_change_sh import TOOLS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="keeps files as root")

#: A command of an operation, and the commands of its undo.
COMMANDS = read_table(__file__, "COMMANDS")
_FAKE = """#!/bin/sh
case "$2 $1" in
*is-enabled) echo enabled ;;
*is-active) echo active ;;
*) printf "%s\\n" "${0##*/}${*:+ $*}" >>"$LOG" ;;
esac
"""


@pytest.fixture
def node(interpreter, tmp_path):
    """Runs lines of the library in a run that keeps, or `undo`s; returns its output."""
    words, path = interpreter(f"{TOOLS} cp grep sed cut wc tail diff rmdir sysctl")
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name in ("systemctl", "setsebool", "update-grub", "grub2-mkconfig", "grubby"):
        (fakes / name).write_text(_FAKE)
        (fakes / name).chmod(0o755)
    kept = tmp_path / "var" / "undo"

    def run(line: str, *, only_look: bool = False) -> str:
        text = "".join(map(shell.library, ("answer", "change", "undo")))
        text += f"nr_kept={kept}\n"
        if line == "undo":
            line = f"nr_undo '{'1' if only_look else ''}' x ''"
        else:
            line = f"nr_begin x.y\n{line}"
        env = {"PATH": f"{fakes}:{path}", "LOG": str(tmp_path / "log")}
        done = subprocess.run(
            [*words, "-c", f"umask 022\n{text}{line}\n"],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        return done.stdout

    run.log, run.kept = tmp_path / "log", kept
    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_an_operation_has_its_undo(node, command):
    node(f"nr_do '' {command}\nnr_do '' {command}")
    node.log.unlink()
    looked = node("undo", only_look=True)
    assert not node.log.exists()
    assert node("undo") == looked
    commands = node.log.read_text().splitlines() if looked else []
    assert commands == [*COMMANDS[command]]
    assert not node.kept.exists()


#: A line that only looks like an error.
NEWER = "nodeready: new\n"


def test_files_directories_and_modes_come_back(node, tmp_path):
    ours, theirs = tmp_path / "a.d" / "b.d" / "zz-nodeready.conf", tmp_path / "word"
    theirs.write_text("old\n")
    os.chown(theirs, 4001, 4002)
    theirs.chmod(0o640)
    os.utime(theirs, (1, 1))
    before = theirs.stat()
    folder = tmp_path / "cores"
    folder.mkdir(0o711)
    lines = [
        f"nr_write {ours} 0644 bmV3Cg== '*'",
        f"nr_write {theirs} 0644 bmV3Cg== '*'",
        f"nr_write {theirs} 0644 {base64.b64encode(NEWER.encode()).decode()} '*'",
        f"nr_do '' chmod 0755 {theirs}",
        f"nr_directory {folder} 1777",
    ]
    node("\n".join(lines))
    assert (ours.read_text(), theirs.read_text()) == ("new\n", NEWER)
    looked = node("undo", only_look=True)
    assert "x.y diff -nodeready: new\nx.y diff +old\n" in looked
    assert "failed" not in looked
    node("undo")
    after = theirs.stat()
    assert (theirs.read_text(), stat.S_IMODE(folder.stat().st_mode)) == ("old\n", 0o711)
    names = ("st_mode", "st_uid", "st_gid", "st_mtime")
    assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names]
    assert not (tmp_path / "a.d").exists()
    assert (node("undo"), node.kept.exists()) == ("", False)


BEGIN, END = "# >>> nodeready: managed block, do not edit >>>\n", "# <<< nodeready <<<\n"


@pytest.mark.parametrize(
    ("content", "result"),
    [
        (f"a\n{BEGIN}x\n{END}b\n", "a\nb\n"),
        (f"{BEGIN}x\n{END}", None),
        # No block, or not one: a person decides.
        (f"a\n{BEGIN}x\n", "changed"),
        (f"{END}a\n{BEGIN}x\n", "changed"),
        (f"{BEGIN}x\n{END}{BEGIN}x\n{END}", "changed"),
    ],
)
def test_of_a_file_that_changed_since_the_block_is_removed(node, tmp_path, content, result):
    path = tmp_path / "file"
    node(f"nr_write {path} 0644 bmV3Cg== '*'")
    path.write_text(content)
    said = node("undo")
    if result == "changed":
        assert said == node("undo") == f"x.y changed {path}\n"
        result = content
    assert (path.read_text() if path.exists() else None) == result


def test_what_fails_is_named_and_stays_to_be_undone(node, tmp_path):
    path = tmp_path / "file"
    path.write_text("old\n")
    node(f"nr_write {path} 0644 bmV3Cg== '*'\nnr_do '' setsebool -P deny_ptrace off")
    kept = node.kept / "1"
    kept.rename(node.kept / "away")
    assert f"x.y failed {path}: " in node("undo")
    (node.kept / "away").rename(kept)
    assert node("undo") == f"x.y restore {path}\n"
    assert path.read_text() == "old\n"
