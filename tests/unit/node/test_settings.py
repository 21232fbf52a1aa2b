"""The settings that a process has for a debugger: seen on processes of our own."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeready.agent.stacks import ask_witnesses as settings
from nodeready.agent.stacks.ask_witnesses import Settings
from tests.builders import ras_port
from tests.cases import with_table

# Takes a limit of its core, maps files, says so, and waits.
_HOLDS = """
import mmap, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (int(sys.argv[1]),) * 2)
files = [open(path, "rb") for path in sys.argv[2:]]
kept = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(*paths: Path, core: int = 0) -> Iterator[int]:
    argv = [sys.executable, "-c", _HOLDS, str(core), *map(str, paths)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, cwd="/tmp", **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


@pytest.fixture(scope="module")
def idle() -> Iterator[int]:
    with holding() as pid:
        yield pid


def observe(pid: int, rank: int | None = 3, **environment: str) -> Settings:
    return settings.read_settings(pid, os.getuid(), rank, environment)


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """The library of a PyTorch in `tmp_path`."""
    path = tmp_path / "torch/lib/libtorch_cpu.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF" * mmap.PAGESIZE)
    (tmp_path / "torch/version.py").write_text("__all__ = []\n__version__ = '2.15.0+cu132'\n")
    return path


def test_versions_of_the_mapped_libraries(tmp_path, torch):
    odd = tmp_path / "\udcff"
    odd.write_bytes(b"no text in its name")
    with holding(odd, torch, ras_port.library(tmp_path, "2.30.7"), core=4096) as pid:
        seen = observe(pid, HOME="/root", NCCL_DEBUG="INFO", SECRET="x")
        assert (seen.torch, seen.nccl, seen.cuda) == ("2.15.0+cu132", "2.30.7", False)
        assert seen.core_bytes == 4096
        # Only those of the list.
        assert seen.variables == (("NCCL_DEBUG", "INFO"),)
        version = tmp_path / "torch/version.py"
        for text in ("", "__version__ = 3\n", "__version__ = '$(reboot)'\n"):
            version.write_text(text)
            assert observe(pid).torch == ""
        version.unlink()
        # Nobody waits for one that writes it.
        os.mkfifo(version)
        assert observe(pid).torch == ""
    # It is gone.
    assert observe(pid) == Settings(core_place=observe(pid).core_place)


def test_where_the_recorder_writes(idle, tmp_path):
    own = observe(idle, TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/rank_")
    assert (own.dump_place, own.dump_wrong) == (f"{tmp_path}/rank_", "")
    assert (own.torch, own.nccl, own.cuda, own.core_bytes) == ("", None, False, 0)
    none = observe(idle, TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/none/rank_")
    assert none.dump_wrong == f"there is no directory {tmp_path}/none"
    default = observe(idle, HOME=str(tmp_path))
    assert default.dump_place.startswith(f"{tmp_path}/.cache/torch/")
    assert default.dump_wrong == ""
    without = observe(idle, None, HOME=str(tmp_path))
    assert (without.dump_place, without.dump_wrong) == ("", "")


@with_table("pattern, words")
def test_where_a_core_would_go(idle, pattern, words):
    problem = settings._core_problem(idle, os.getuid(), pattern)
    assert (words in problem, bool(problem)) == (True, bool(words))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_of_anothers_is_not_writable(tmp_path):
    tmp_path.chmod(0o755)
    environment = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
    with subprocess.Popen(["sleep", "60"], user=65534) as process:
        wrong = settings.read_settings(process.pid, 65534, 0, environment).dump_wrong
        process.kill()
    words = ("its user cannot write into", "there is no directory")
    assert wrong in [f"{begin} {tmp_path}" for begin in words]
