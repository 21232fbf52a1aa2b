"""The same hang under every launcher: each rank is found, by its number, and the culprit is first.

Each runs in process and mount namespaces of its own: what is found is its, and all ends with it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import cases
from tests.command import Tool, wait_for
from tests.hang.play import HERE, PATH, free_port
from tests.hang.pythons import missing, needed

pytestmark = pytest.mark.nightly

LAUNCHED = HERE / "launched"


@dataclass(frozen=True)
class Launcher:
    """A row of `launchers.json`."""

    name: str
    command: list[str]  # for a shell, in the directory of the launched programs; pieces of it
    ranks: int = 2  # how many; the last one reads
    program: str = ""  # what must be on this machine


LAUNCHERS = tuple(Launcher(**row) for row in cases.read(HERE / "launchers.json"))


class Box:
    """Namespaces for processes and mounts: the job and the command see nobody else."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["unshare", "-p", "-f", "-m", "--mount-proc", "--kill-child", "sleep", "infinity"],
            start_new_session=True,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_for(lambda: bool(children.read_text().split()))
        self.pid = children.read_text().split()[0]
        comm = Path(f"/proc/{self.pid}/comm")
        wait_for(lambda: comm.read_text() == "sleep\n")

    def argv(self, *words: str) -> list[str]:
        return ["nsenter", "-t", self.pid, "-p", "-m", "-r", "--wd=" + os.getcwd(), "--", *words]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def box(lab_machine: None) -> Iterator[Box]:
    box = Box()
    yield box
    box.end()


def look(box: Box, tool: Tool) -> tuple[dict[str, Any], str]:
    directory = tool.home / "kept"
    words = ["-m", "nodeready", "stacks", "--local", "-v", "-o", str(directory)]
    done = subprocess.run(
        box.argv(sys.executable, *words),
        env=tool.environment(PATH=PATH),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done
    assert done.returncode in (0, 3), done
    return json.loads((directory / "stacks.json").read_text()), done.stdout


def start(box: Box, command: str, place: Path, home: Path) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with open(place / "log", "w") as log:
        return subprocess.Popen(
            box.argv("sh", "-c", f"cd {LAUNCHED} && {command}"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def mistakes(launcher: Launcher, document: dict[str, Any], pids: dict[int, int]) -> list[str]:
    """What the document says wrongly. pids: rank -> its pid"""
    wrong = []
    processes = {process["pid"]: process for process in document["processes"]}
    ranks = {process["rank"]: pid for pid, process in processes.items()}
    if {*processes} != {*pids.values()}:
        wrong.append(f"processes are {sorted(processes)}, not {pids}")
    if ranks != pids or document["world_size"] != launcher.ranks:
        wrong.append(f"ranks are {ranks} of {document['world_size']}, not {pids}")
    first = [pid for pid, process in processes.items() if process["group"] == 0]
    if first != [pids[launcher.ranks - 1]] or document["groups"][0]["role"] != "suspect":
        wrong.append(f"first is {first} ({document['groups'][0]['role']})")
    if (document["verdict"] or {}).get("kind") not in ("late", "storage"):
        wrong.append(f"the verdict is {document['verdict']}")
    return wrong


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_every_rank_is_found_and_the_last_is_the_culprit(launcher, box, tool, tmp_path):
    python = needed()
    if launcher.program and not shutil.which(launcher.program):
        missing(f"no {launcher.program} here (scripts/setup.sh all)", in_ci=True)
    place = tmp_path / "job"
    place.mkdir()
    os.mkfifo(place / "fifo")
    command = " ".join(launcher.command).format(
        python=python.path, port=free_port(), directory=place
    )
    path = f"PATH={Path(python.path).parent}:$PATH; "
    job = start(box, path + command, place, tmp_path)
    ranks = range(launcher.ranks)

    def there() -> bool:
        assert job.poll() is None, (place / "log").read_text()[-3000:]
        return all((place / f"stand-{rank}").exists() for rank in ranks)

    try:
        for _ in range(3):
            # Some import for a minute on a busy machine.
            with contextlib.suppress(AssertionError):
                wait_for(there)
        assert there(), (place / "log").read_text()[-3000:]
        document, table = look(box, tool)
        with open(place / "fifo", "w") as fifo:
            fifo.write("go")
        wait_for(lambda: all((place / f"done-{rank}").exists() for rank in ranks))
    finally:
        job.kill()
        job.wait()
    pids = {rank: int((place / f"stand-{rank}").read_text()) for rank in ranks}
    assert not mistakes(launcher, document, pids), table
    assert "read_shard" in table
