"""The processes of a lab, recognised by their command lines, and the helper that starts nodes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab import host, image, state
from nodeready.lab.boot import MARK
from nodeready.lab.host import Done, environment, run
from nodeready.lab.profiles import PROFILES
from nodeready.lab.state import LabError, LabState, NodeState

# A killed init takes its node along; the kernel needs milliseconds, a loaded machine more.
DEATH_S = 20.0


# --- The processes of a lab.


def detach() -> None:
    """Separate this process from its parent: session, terminal, streams, directory."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.chdir("/")


def started_at(pid: int) -> int | None:
    """When this process began, in clock ticks since boot; None when it is gone or a zombie.

    It identifies a process together with the pid, which another process may get later (proc(5),
    stat, field 22).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(node: NodeState) -> bool:
    """Whether its process 1 lives."""
    return node.pid > 0 and started_at(node.pid) == node.started


def of_lab(directory: Path, names: Collection[str] = ()) -> list[int]:
    """Every process that belongs to the lab in this directory: inits and half-started nodes.

    With `names`, the inits of these nodes alone.
    """
    pids = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", entry, "cmdline").read_bytes().decode(errors="replace")
            if _belongs(words.split("\0"), str(directory), names):
                pids.append(int(entry))
    return pids


def _belongs(words: list[str], directory: str, names: Collection[str]) -> bool:
    if words[:2] == ["sh", "-c"] and words[3:5] == [MARK, directory]:
        return not names or words[5] in names
    return not names and words[1:4] == ["-m", "nodeready.lab.boot", directory]


def end_all(directory: Path, names: Collection[str] = ()) -> None:
    """Kill every process of the lab (or of these nodes), and wait until none is left.

    A process may fork in the meantime, so the search is repeated until it finds none. Raises
    LabError when a process does not end.
    """
    deadline = time.monotonic() + DEATH_S
    while pids := [pid for pid in of_lab(directory, names) if started_at(pid) is not None]:
        if time.monotonic() > deadline:
            raise LabError(
                f"process {pids[0]} of the lab does not end; look at /proc/{pids[0]}/stack"
            )
        for pid in pids:
            end(pid, wait_s=0.0)
        time.sleep(0.01)


def end(pid: int, wait_s: float = DEATH_S) -> None:
    """Kill this process, and wait at most `wait_s` until it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        if wait_s:
            select.select([handle], [], [], wait_s)
    finally:
        os.close(handle)


# --- The helper (nodeready.lab.boot), and programs in a node's namespaces.

# The content of a file of a node: text, bytes, or either with its mode.
Content = str | bytes | tuple[str | bytes, int]
Files = Mapping[str, Content]
LOG = "boot.log"  # the helper's standard error, in the lab's directory


def spec(index: int, node: NodeState, files: Files, gone: Sequence[str] = ()) -> dict[str, Any]:
    """The helper's plan for a node of lab number `index`, with the files that it has and lacks."""
    contents = {path: encoded(item) for path, item in files.items()}
    return {
        "name": node.name,
        "address": str(host.address(index, node.number)),
        "mac": host.mac(index, node.number),
        "port": host.port(node.number),
        "generation": f"g{node.generation}",
        "files": {
            path: {"data": base64.b64encode(data).decode(), "mode": mode}
            for path, (data, mode) in contents.items()
        },
        "gone": list(gone),
    }


def nsenter(pid: int) -> list[str]:
    """The words before a command that runs as root on the node whose process 1 this is.

    Where the lab is in a chroot, the root of the node's mount namespace is the machine's: `-r`
    enters the node's root.
    """
    return ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"]


def enter(pid: int, argv: Sequence[str], data: str = "", timeout: float = 60) -> Done:
    """Run a program as root on the node whose process 1 this is."""
    return run([*nsenter(pid), *argv], data, timeout)


def module(name: str, *words: str) -> Done:
    """Run a module of this package here, as a program."""
    return run([sys.executable, "-m", name, *words], env=_module_environment(), cwd="/")


def _module_environment() -> dict[str, str]:
    env = environment()
    package = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    return env


def boot(lab: LabState, specs: list[dict[str, Any]]) -> Generator[dict[str, Any], None, None]:
    """Start the helper with these `spec`s; yields its answers. It ends with this process."""
    directory = state.directory(lab.name)
    plan = {
        "parent": os.getpid(),
        "interface": host.interface(lab.index),
        "gateway": str(host.gateway(lab.index)),
        "switch": lab.switch,
        "submounts": image.submounts(),
        "targets": image.targets(PROFILES[lab.profile]),
        "nodes": specs,
    }
    argv = [sys.executable, "-m", "nodeready.lab.boot", str(directory)]
    with (
        open(directory / LOG, "ab") as log,
        # In its own session: Ctrl-C reaches this process only.
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=_module_environment(), cwd="/", start_new_session=True,
        ) as process,
    ):  # fmt: skip
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


def encoded(item: Content) -> tuple[bytes, int]:
    content, mode = item if isinstance(item, tuple) else (item, 0o644)
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return data, mode
