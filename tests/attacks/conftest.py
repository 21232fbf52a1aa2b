"""An ordinary user of a node, who means ill.

mallory   that user on a fresh node: no group but her own, no sudo, a home and a login shell
bob       another ordinary user there, whose files and processes are none of hers

The attacks run against root's real commands (`tool`, `fleet`); what must not happen is read back
with plain commands (`node.enter`, testinfra). A test is named by what must not happen.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from nodeready.lab.processes import nsenter

Done = subprocess.CompletedProcess[str]


def become(uid: int) -> list[str]:
    """The words that start a program with this user's rights, and no group but the user's own."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


@contextmanager
def reached_by_all(mode: int) -> Iterator[Path]:
    """A directory of root's on this machine, to which others come: pytest's own is closed to them.

    mode: 0o777: everybody may write there
    """
    if os.geteuid():
        pytest.skip("only root has something to lose")
    with tempfile.TemporaryDirectory(prefix="nodeready-attack-", dir="/tmp") as name:
        os.chmod(name, mode)
        yield Path(name)


@dataclass
class Person:
    """An ordinary user of a node; what she started ends with the test."""

    node: LabNode
    name: str
    uid: int
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def home(self) -> str:
        return f"/home/{self.name}"

    def _argv(self, words: tuple[str, ...]) -> list[str]:
        environment = ["env", "-i", f"HOME={self.home}", f"USER={self.name}", f"PATH={_PATH}"]
        return [*become(self.uid), *environment, *words]

    def run(self, script: str, *words: str, check: bool = True, input: str | None = None) -> Done:
        """A shell script with her rights, to its end. ``words`` are its $1 and so on.

        Raises LabError with the script's own message when ``check`` and it fails.
        """
        inner = f'cd "$HOME"\n{script}'
        return self.node.enter(self._argv(("sh", "-c", inner, "sh", *words)), input, check)

    def python(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a Python program with her rights; it runs on until the test ends."""
        return self.start("python3", "-c", program, *words)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        argv = [*nsenter(self.node.pid), *self._argv(words)]
        started = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        self.running.append(started)
        return started

    def end(self) -> None:
        if self.node.alive:
            for _ in range(20):
                done = self.node.enter(["pkill", "-KILL", "-u", str(self.uid)], check=False)
                if done.returncode:
                    break
                time.sleep(0.05)
        for process in self.running:
            process.kill()
            process.wait()


_PATH = "/usr/local/bin:/usr/bin:/bin"


def person(node: LabNode, name: str, uid: int) -> Person:
    add = f"""
        groupadd -g {uid} {name} && useradd -m -u {uid} -g {uid} -s /bin/bash {name}
    """
    node.enter(["sh", "-c", add])
    return Person(node, name, uid)


@pytest.fixture
def mallory(fresh_node: LabNode) -> Iterator[Person]:
    one = person(fresh_node, "mallory", 4001)
    yield one
    one.end()


@pytest.fixture
def bob(fresh_node: LabNode) -> Iterator[Person]:
    one = person(fresh_node, "bob", 4002)
    yield one
    one.end()
