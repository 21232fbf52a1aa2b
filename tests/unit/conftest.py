"""What unit tests share.

tool         the command, without the time that its imports take: tests/unit/warm.py
run          a whole command on fake nodes: tests/unit/commands.py
bundle_file  the program of the node with the default policy, as a file
stand_ins    programs of sh that are found in PATH before the system's
pythons      the Pythons of this machine, by version: as many as there are
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.fleet.transport import bundle
from tests.helpers import executable
from tests.unit.commands import run
from tests.unit.warm import tool, warm

__all__ = ["run", "tool", "warm"]


@pytest.fixture(scope="session")
def bundle_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "nodeready.pyz"
    path.write_bytes(bundle.build())
    path.chmod(0o755)
    return path


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``stand_ins(squeue="echo x")``: their directory."""
    directory = tmp_path / "stand-ins"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")

    def put(**scripts: str) -> Path:
        for name, script in scripts.items():
            executable(directory / name, script)
        return directory

    return put


@pytest.fixture(scope="session")
def pythons() -> dict[tuple[int, int], str]:
    """(3, 9) -> its path; this test's own Python, those of pyenv, those in PATH."""
    places = [sys.executable, *map(str, Path.home().glob(".pyenv/versions/*/bin/python"))]
    places += [str(path) for path in Path("/usr/bin").glob("python[23].*") if path.name[-1] != "g"]
    found: dict[tuple[int, int], str] = {}
    ask = "import sys; sys.stdout.write('%d %d' % sys.version_info[:2])"
    for place in places:
        done = subprocess.run([place, "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            major, minor = map(int, done.stdout.split())
            found.setdefault((major, minor), place)
    return found
