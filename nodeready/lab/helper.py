"""Run other programs: the helper that starts nodes (nodeready.lab.boot), nsenter, any command."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab import image, network, state
from nodeready.lab.profiles import PROFILES
from nodeready.lab.state import LabState, NodeState, environment

# What a file of a node may be given as: text, bytes, or either with its mode.
Content = str | bytes | tuple[str | bytes, int]
# What the helper says when it breaks, in the lab's directory.
LOG = "boot.log"
Done = subprocess.CompletedProcess[str]


def spec(
    index: int,
    one: NodeState,
    files: Mapping[str, Content],
    gone: Sequence[str] = (),
    freezer: str = "",
) -> dict[str, Any]:
    """What the helper must know about a node of lab number `index`: what it has, and has not."""
    return {
        "name": one.name,
        "address": str(network.address(index, one.number)),
        "mac": network.mac(index, one.number),
        "port": network.port(one.number),
        "generation": f"g{one.generation}",
        "files": {path: _encoded(item) for path, item in files.items()},
        "gone": list(gone),
        "freezer": freezer,
    }


def enter(pid: int, argv: Sequence[str], data: str = "", timeout: float = 60) -> Done:
    """Run a program as root in the namespaces of the node whose process 1 this is."""
    into = ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-w", "--"]
    return run([*into, *argv], data, timeout)


def run(
    argv: Sequence[str],
    data: str = "",
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Done:
    """Run a program here; what it says as text, and bytes that are none as surrogates."""
    return subprocess.run(
        argv,
        input=data,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=timeout,
        check=False,
        env=env or environment(),
        cwd=cwd,
    )


def module(name: str, *words: str) -> Done:
    """Run a module of this package here, as a program."""
    return run([sys.executable, "-m", name, *words], env=_module_environment(), cwd="/")


def _module_environment() -> dict[str, str]:
    env = environment()
    package = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    return env


def boot(lab: LabState, specs: list[dict[str, Any]]) -> Generator[dict[str, Any], None, None]:
    """Start the nodes of these `spec`s; its answers as they come. It ends with us."""
    directory = state.directory(lab.name)
    plan = {
        "parent": os.getpid(),
        "interface": network.interface(lab.index),
        "gateway": str(network.gateway(lab.index)),
        "switch": lab.switch,
        "submounts": image.submounts(),
        "targets": image.targets(PROFILES[lab.profile]),
        "nodes": specs,
    }
    argv = [sys.executable, "-m", "nodeready.lab.boot", str(directory)]
    with (
        open(directory / LOG, "ab") as log,
        # A session of its own: Ctrl-C reaches us, and we decide.
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_module_environment(),
            cwd="/",
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(plan))
                process.stdin.close()
            for line in process.stdout:
                yield json.loads(line)
        finally:
            process.kill()


def _encoded(item: Content) -> dict[str, Any]:
    content, mode = item if isinstance(item, tuple) else (item, 0o644)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return {"data": base64.b64encode(data).decode(), "mode": mode}
