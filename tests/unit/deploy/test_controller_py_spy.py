"""Where the control machine takes the nodes' py-spy from, and its error when it has none."""

import errno
import os
import platform
import signal
import struct
import subprocess
import sys
import zipfile

import pytest

from nodeready.runs.deploy import py_spy_binary
from nodeready.runs.deploy.py_spy_binary import PySpyError, binary, binary_problem
from nodeready.subjects.debug_tools.facts import DIGESTS
from tests.cases import read_data
from tests.command import wait_for
from tests.helpers import executable

HERE = platform.machine()
NUMBERS = {"x86_64": 62, "aarch64": 183}
(OTHER,) = {*NUMBERS} - {HERE}


def program(machine, *kinds):
    """The head of a 64-bit ELF program with these kinds of segments (elf.h)."""
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<HHIQQQI", 2, NUMBERS[machine], 1, 0, 64, 0, 0)
    rest = struct.pack("<HHHHHH", 64, 56, len(kinds), 0, 0, 0)
    return ident + head + rest + b"".join(struct.pack("<I", kind) + bytes(52) for kind in kinds)


def wheel(directory, version, machine, content):
    name = f"py_spy-{version}-py2.py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / name, "w") as archive:
        archive.writestr(f"py_spy-{version}.data/scripts/py-spy", content)
    return directory / name


#: A pip that has the wheels of HERE/index, and writes its arguments to HERE/called.
PIP = read_data(__file__, "pip.sh")


def write_pip(path, text):
    return executable(path, text.replace("HERE", str(path.parent)))


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """An empty cache of our own, and a pip without a network that counts its calls."""
    monkeypatch.setattr(py_spy_binary, "_binaries", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NODEREADY_PY_SPY_DIR", raising=False)
    monkeypatch.setattr(sys, "executable", write_pip(tmp_path / "python", PIP))


def calls(tmp_path):
    path = tmp_path / "called"
    return path.read_text().splitlines() if path.exists() else []


def test_another_machines_is_downloaded_once_and_kept(tmp_path, monkeypatch):
    # The pinned version of this machine comes from the environment.
    (version,) = {version for version, _ in DIGESTS}
    assert binary_problem(binary(version, HERE), version, HERE) == ""
    assert calls(tmp_path) == []
    content = program(OTHER, 1)
    wheel(tmp_path / "index", "9.1.0", OTHER, content)
    assert binary("9.1.0", OTHER) == binary("9.1.0", OTHER) == content
    # The cache has it for the next process.
    monkeypatch.setattr(py_spy_binary, "_binaries", {})
    assert binary("9.1.0", OTHER) == content
    (arguments,) = calls(tmp_path)
    assert f"manylinux_2_17_{OTHER}" in arguments
    assert "--only-binary=:all:" in arguments
    (cached,) = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert cached == tmp_path / "cache" / "nodeready" / "py-spy" / "9.1.0" / OTHER
    # A damaged cache is passed over.
    cached.write_bytes(content[:30])
    monkeypatch.setattr(py_spy_binary, "_binaries", {})
    assert binary("9.1.0", OTHER) == cached.read_bytes() == content


def test_without_a_download_the_error_is_a_line_with_a_remedy_and_pip_runs_once(tmp_path):
    for _ in range(3):
        with pytest.raises(PySpyError) as caught:
            binary("9.1.0", OTHER)
    assert str(caught.value) == (
        f"py-spy 9.1.0: No matching distribution; put its {OTHER} wheel into a directory "
        "and set NODEREADY_PY_SPY_DIR to it"
    )
    assert len(calls(tmp_path)) == 1
    with pytest.raises(PySpyError, match="no static py-spy for riscv64"):
        binary("0.4.3", "riscv64")


def test_a_sites_own_directory_is_the_only_source(tmp_path, monkeypatch):
    monkeypatch.setenv("NODEREADY_PY_SPY_DIR", str(tmp_path))
    with pytest.raises(PySpyError, match=r"no py_spy-9\.1\.0-…_aarch64\.whl in /.*: put the"):
        binary("9.1.0", "aarch64")
    monkeypatch.setattr(py_spy_binary, "_binaries", {})
    content = program("aarch64", 1)
    wheel(tmp_path, "9.1.0", "aarch64", content)
    assert binary("9.1.0", "aarch64") == content
    assert calls(tmp_path) == []
    path = wheel(tmp_path, "0.4.3", "x86_64", program("x86_64", 1))
    with pytest.raises(PySpyError, match=f"{path.name} is not the expected sha256"):
        binary("0.4.3", "x86_64")
    for content in (b"", b"PK\x03\x04 no zip"):
        wheel(tmp_path, "9.1.0", "x86_64", b"").write_bytes(content)
        with pytest.raises(PySpyError, match="no wheel of py-spy 9"):
            binary("9.1.0", "x86_64")


def test_an_unfit_program_has_a_reason():
    for content, reason in (
        (program("x86_64", 1, 2), ""),
        (program("x86_64", 1, 3), "not statically linked"),
        (program("aarch64", 1), "not for x86_64"),
        (program("x86_64", 1)[:60], "a damaged program"),
        (b"\x7fELF\x02\x01" + b"\xff" * 58, "a damaged program"),
        (b"#!/usr/bin/python3\n", "no 64-bit program"),
        (b"", "no 64-bit program"),
    ):
        assert binary_problem(content, "9.1.0", "x86_64") == reason


_DOWNLOAD = """
import sys
from nodeready.runs.deploy import py_spy_binary
sys.executable = sys.argv[1]
py_spy_binary._download("0.4.3", "x86_64")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_of_a_download_stays_when_the_program_is_killed(tmp_path, number):
    pip = write_pip(tmp_path / "slow", read_data(__file__, "slow_pip.sh"))
    place = tmp_path / "tmp"
    place.mkdir()
    paths = {"TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [os.path.realpath("/proc/self/exe"), "-c", _DOWNLOAD, pip],
        env={**os.environ, **paths},
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for((tmp_path / "pip").exists)
        assert [path.name for path in place.glob("*/*")] == ["part.whl"]
        process.send_signal(number)
    own = f"/proc/{(tmp_path / 'pip').read_text().strip()}"
    wait_for(lambda: not os.path.exists(own) and not list(place.iterdir()))


def test_an_incomplete_program_has_no_name_in_the_cache(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "cache" / "x86_64"
    py_spy_binary._write_cache(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        py_spy_binary._write_cache(path.with_name("other"), b"other")
    assert [file.name for file in path.parent.iterdir()] == ["x86_64"]
    py_spy_binary._write_cache(path, b"new")
    assert path.read_bytes() == b"new"
