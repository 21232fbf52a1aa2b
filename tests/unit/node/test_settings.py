"""What a process has for whoever debugs it: seen on processes of our own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeready.node.stacks import beside as settings
from nodeready.node.stacks.beside import Settings
from tests.builders import ras_port

# Takes a limit of its core, maps files, says so, and waits.
_HOLDS = """
import mmap, resource, sys
if sys.argv[1] != "None":
    resource.setrlimit(resource.RLIMIT_CORE, (int(sys.argv[1]),) * 2)
files = [open(path, "rb") for path in sys.argv[2:]]
kept = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(*paths: Path, core: int | None = None) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(core), *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/tmp",
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def torch(site: Path, version: str) -> Path:
    """The library of a PyTorch of this version."""
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    path = site / "torch/lib/libtorch_cpu.so"
    path.write_bytes(b"\x7fELF" * mmap.PAGESIZE)
    return path


def seen(pid: int, rank: int | None = 3, **environment: str) -> Settings:
    return settings.observe(pid, os.getuid(), rank, environment)


def test_versions_by_what_is_mapped(tmp_path):
    nccl = ras_port.library(tmp_path, "2.30.7")
    with holding(torch(tmp_path, "2.15.0+cu132"), nccl) as pid:
        found = seen(pid)
    assert (found.torch, found.nccl, found.cuda) == ("2.15.0+cu132", "2.30.7", False)


def test_a_process_without_any_of_them():
    with holding() as pid:
        found = seen(pid)
    assert (found.torch, found.nccl, found.cuda) == ("", None, False)


@pytest.mark.parametrize("text", ["", "__version__ = 3\n", "__version__ = '$(reboot)'\n"])
def test_a_version_that_is_none(tmp_path, text):
    library = torch(tmp_path, "1")
    (tmp_path / "torch/version.py").write_text(text)
    with holding(library) as pid:
        assert seen(pid).torch == ""


def test_a_pipe_in_the_place_of_the_version_is_not_waited_for(tmp_path):
    library = torch(tmp_path, "1")
    (tmp_path / "torch/version.py").unlink()
    os.mkfifo(tmp_path / "torch/version.py")
    with holding(library) as pid:
        assert seen(pid).torch == ""


@pytest.mark.parametrize(("core", "told"), [(0, 0), (4096, 4096)])
def test_the_limit_of_a_core(core, told):
    with holding(core=core) as pid:
        assert seen(pid).core_bytes == told


def test_where_the_recorder_writes(tmp_path):
    with holding() as pid:
        own = seen(pid, TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/rank_")
        none = seen(pid, TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/none/rank_")
        default = seen(pid, HOME=str(tmp_path))
        without = seen(pid, None, HOME=str(tmp_path))
    assert (own.dump_place, own.dump_wrong) == (f"{tmp_path}/rank_", "")
    assert none.dump_wrong == f"there is no directory {tmp_path}/none"
    assert default.dump_place.startswith(f"{tmp_path}/.cache/torch/")
    assert default.dump_wrong == ""
    assert (without.dump_place, without.dump_wrong) == ("", "")


def test_only_the_variables_of_the_list_are_told():
    with holding() as pid:
        found = seen(pid, HOME="/root", NCCL_DEBUG="INFO", SECRET="x")
    assert found.variables == (("NCCL_DEBUG", "INFO"),)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", "no pattern"),
        ("|/no/such/program %p", "there is no program /no/such/program"),
        ("|", "there is no program"),
        ("|/bin/false", "drops it"),
        ("/no/such/directory/core.%p", "there is no directory /no/such/directory"),
        ("/tmp/core.%p", ""),
        ("/tmp/%u/core", ""),
        ("core", ""),
    ],
)
def test_where_a_core_would_go(pattern, words):
    with holding() as pid:
        found = settings._core_wrong(pid, pattern)
    assert words in found
    assert bool(words) == bool(found)


def test_a_process_that_is_gone():
    with holding() as pid:
        pass
    assert seen(pid) == Settings(core_place=seen(pid).core_place)


def test_a_directory_of_anothers_is_not_writable(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    process = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        tmp_path.chmod(0o755)
        environment = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
        found = settings.observe(process.pid, 65534, 0, environment)
    finally:
        process.kill()
        process.wait()
    assert found.dump_wrong in (
        f"its user cannot write into {tmp_path}",
        f"there is no directory {tmp_path}",
    )
