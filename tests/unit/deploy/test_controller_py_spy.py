"""Where the control machine takes the nodes' py-spy from, and what it says when it has none."""

from __future__ import annotations

import errno
import os
import platform
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nodeready.deploy import py_spy_binary
from nodeready.subjects.debug_tools.facts import DIGESTS
from tests.command import wait_for

HERE = platform.machine()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[HERE]
NUMBERS = {"x86_64": 62, "aarch64": 183}


def program(machine: str, *kinds: int) -> bytes:
    """The head of a 64-bit ELF program with these kinds of segments (elf.h)."""
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQI", 2, NUMBERS[machine], 1, 0, 64, 0, 0)
    )
    head += struct.pack("<HHHHHH", 64, 56, len(kinds), 0, 0, 0)
    return head + b"".join(struct.pack("<I", kind) + bytes(52) for kind in kinds)


def wheel(directory: Path, version: str, machine: str, content: bytes) -> Path:
    """A wheel as pip downloads it."""
    name = f"py_spy-{version}-py2.py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
    with zipfile.ZipFile(directory / name, "w") as archive:
        archive.writestr(f"py_spy-{version}.data/scripts/py-spy", content)
    return directory / name


#: A pip that finds what is in HERE/index, and says so in HERE/called.
PIP = """#!/bin/sh
echo "$*" >>HERE/called
while [ "$1" != --dest ]; do shift; done
cp HERE/index/*.whl "$2" 2>/dev/null && exit
echo 'WARNING: retrying' >&2
echo 'ERROR: No matching distribution' >&2
exit 1
"""


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Nothing found yet, a cache of our own, and a pip that leads nowhere and is counted."""
    monkeypatch.setattr(py_spy_binary, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NODEREADY_PY_SPY_DIR", raising=False)
    pip = tmp_path / "python"
    pip.write_text(PIP.replace("HERE", str(tmp_path)))
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))


def calls(tmp_path: Path) -> int:
    path = tmp_path / "called"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_the_pinned_version_of_this_machine_comes_from_the_environment(tmp_path):
    (version,) = {version for version, _ in DIGESTS}
    content = py_spy_binary.binary(version, HERE)
    assert py_spy_binary.wrong(content, version, HERE) == ""
    assert calls(tmp_path) == 0


def test_another_machine_s_is_downloaded_once_and_kept(tmp_path, monkeypatch):
    (tmp_path / "index").mkdir()
    content = program(OTHER, 1)
    wheel(tmp_path / "index", "9.1.0", OTHER, content)
    assert py_spy_binary.binary("9.1.0", OTHER) == content
    assert py_spy_binary.binary("9.1.0", OTHER) == content
    # Another process, later: the cache has it.
    monkeypatch.setattr(py_spy_binary, "_found", {})
    assert py_spy_binary.binary("9.1.0", OTHER) == content
    assert calls(tmp_path) == 1
    arguments = (tmp_path / "called").read_text()
    assert f"manylinux_2_17_{OTHER}" in arguments
    assert "--only-binary=:all:" in arguments
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [OTHER]


def test_no_way_to_get_it_is_one_line_that_says_what_to_do_and_is_found_out_once(tmp_path):
    for _ in range(3):
        with pytest.raises(py_spy_binary.PySpyError) as failed:
            py_spy_binary.binary("9.1.0", OTHER)
    assert str(failed.value) == (
        f"py-spy 9.1.0: No matching distribution; put its {OTHER} wheel into a directory "
        "and set NODEREADY_PY_SPY_DIR to it"
    )
    assert calls(tmp_path) == 1


def test_a_machine_without_a_static_py_spy():
    with pytest.raises(py_spy_binary.PySpyError, match="no static py-spy for riscv64"):
        py_spy_binary.binary("0.4.3", "riscv64")


def test_a_damaged_cache_is_passed_over(tmp_path):
    (tmp_path / "index").mkdir()
    content = program(OTHER, 1)
    wheel(tmp_path / "index", "9.1.0", OTHER, content)
    cached = tmp_path / "cache" / "nodeready" / "py-spy" / "9.1.0" / OTHER
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content[:30])
    assert py_spy_binary.binary("9.1.0", OTHER) == content
    assert cached.read_bytes() == content


def test_a_site_s_own_directory_is_the_only_source(tmp_path, monkeypatch):
    monkeypatch.setenv("NODEREADY_PY_SPY_DIR", str(tmp_path))
    with pytest.raises(
        py_spy_binary.PySpyError, match=r"no py_spy-9\.1\.0-…_aarch64\.whl in /.*: put the"
    ):
        py_spy_binary.binary("9.1.0", "aarch64")
    monkeypatch.setattr(py_spy_binary, "_found", {})
    content = program("aarch64", 1)
    wheel(tmp_path, "9.1.0", "aarch64", content)
    assert py_spy_binary.binary("9.1.0", "aarch64") == content
    assert calls(tmp_path) == 0


def test_what_is_not_the_pinned_program_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NODEREADY_PY_SPY_DIR", str(tmp_path))
    path = wheel(tmp_path, "0.4.3", "x86_64", program("x86_64", 1))
    with pytest.raises(py_spy_binary.PySpyError, match=f"{path.name} is not the expected sha256"):
        py_spy_binary.binary("0.4.3", "x86_64")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (program("x86_64", 1, 2), ""),
        (program("x86_64", 1, 3), "not statically linked"),
        (program("aarch64", 1), "not for x86_64"),
        (program("x86_64", 1)[:60], "a damaged program"),
        (b"\x7fELF\x02\x01" + b"\xff" * 58, "a damaged program"),
        (b"#!/usr/bin/python3\n", "no 64-bit program"),
        (b"", "no 64-bit program"),
    ],
)
def test_what_makes_a_program_unfit(content, reason):
    assert py_spy_binary.wrong(content, "9.1.0", "x86_64") == reason


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip"])
def test_a_damaged_wheel_is_an_error_of_one_line(tmp_path, monkeypatch, content):
    monkeypatch.setenv("NODEREADY_PY_SPY_DIR", str(tmp_path))
    wheel(tmp_path, "9.1.0", "x86_64", b"").write_bytes(content)
    with pytest.raises(py_spy_binary.PySpyError, match="no wheel of py-spy 9"):
        py_spy_binary.binary("9.1.0", "x86_64")


# Downloads by a pip that says what it has in its directory and then never ends.
_SLOW_PIP = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" != --dest ] || directory=$2; shift; done
: >"$directory/part.whl"
echo $$ >HERE/pip.new
mv HERE/pip.new HERE/pip
exec sleep 600
"""
_DOWNLOAD = """
import sys
from nodeready.deploy import py_spy_binary
sys.executable = sys.argv[1]
py_spy_binary._download("0.4.3", "x86_64")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_of_a_download_stays_when_the_program_is_killed(tmp_path, number):
    pip, python = tmp_path / "slow", os.path.realpath("/proc/self/exe")
    pip.write_text(_SLOW_PIP.replace("HERE", str(tmp_path)))
    pip.chmod(0o755)
    place = tmp_path / "tmp"
    place.mkdir()
    paths = {"TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [python, "-c", _DOWNLOAD, str(pip)],
        env={**os.environ, **paths},
        stderr=subprocess.DEVNULL,
    ) as program:
        wait_for((tmp_path / "pip").exists)
        assert [path.name for path in place.glob("*/*")] == ["part.whl"]
        program.send_signal(number)
    own = Path("/proc", (tmp_path / "pip").read_text().strip())
    wait_for(lambda: not own.exists() and not list(place.iterdir()))


def test_a_program_that_is_not_whole_has_no_name_in_the_cache(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "cache" / "x86_64"
    py_spy_binary._keep(path, b"one")
    monkeypatch.setattr(os, "link", full)
    py_spy_binary._keep(path.with_name("other"), b"other")
    assert [one.name for one in path.parent.iterdir()] == ["x86_64"]
    monkeypatch.undo()
    py_spy_binary._keep(path, b"two")
    assert path.read_bytes() == b"two"
