"""The bundle on this machine and on nodes.

bundle_file  the program with the default policy, as a file
pythons      the Pythons of this machine, by version: as many as there are
put          puts a bundle on a node: `put(node, gate_budget_s=5)` returns its runner
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import Node
from nodeready.policy.load import make_policy
from nodeready.transport import bundle

Done = subprocess.CompletedProcess[str]

#: Where the bundle is on a node.
PLACE = "/opt/site/nodeready.pyz"
#: What a lab's root can have, and what a lab does not have; a node is fine by it once deployed.
LAB: dict[str, Any] = {"limit_memlock": 4096, "limit_nofile": 16384, "clock": "any"}


@pytest.fixture(scope="session")
def bundle_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "nodeready.pyz"
    path.write_bytes(bundle.build())
    path.chmod(0o755)
    return path


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


@pytest.fixture
def put() -> Callable[..., Callable[..., Done]]:
    def on(node: Node, **settings: Any) -> Callable[..., Done]:
        node.write(PLACE, bundle.build(make_policy({**LAB, **settings})), 0o755)

        def run(*words: str, before: str = "", user: str = "root") -> Done:
            """before: shell text in front of the command, in its own shell."""
            line = f"{before}\nexec env -i /usr/bin/python3 -I {PLACE} {' '.join(words)}"
            argv = (
                ["sh", "-c", line] if user == "root" else ["su", user, "-s", "/bin/sh", "-c", line]
            )
            done = node.enter(argv, check=False, timeout=120)
            assert "Traceback" not in done.stdout + done.stderr, done
            return done

        return run

    return on
