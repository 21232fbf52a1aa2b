"""The state of a lab, in /run/nodeready/lab/NAME.

    state.json    this module
    ssh/          key, known_hosts and ssh_config for logins
    fs/           a tmpfs: base (the shared layer), nodes/NAME (each node's writes, its log)

The directory itself is locked (flock) while a command changes the lab, so that no lock file can
remain.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nodeready.core.files import make_directory, write_atomically


class LabError(Exception):
    """One line for a person: what happened, where, what to do. Never a traceback."""


class LabUnavailable(LabError):
    """This machine cannot run a lab: not root, a program missing, or namespaces refused."""


ROOT = Path("/run/nodeready/lab")

# A lab's name begins its nodes' names; with three digits and a dash it stays a host name.
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")

# A user who can read a directory could hold its lock; its files have their own modes.
_MODE = 0o711

LOCK_S = 120.0  # 256 nodes start in this time on a slow machine


@dataclass
class NodeState:
    """One node. `pid` and `started` identify its init; `generation` counts its disks.

    `host_key` is the private half of its key pair: a node keeps its key over a reset.
    `fault` is the name of its fault, or "".
    """

    name: str
    number: int
    address: str
    host_key: str
    host_key_public: str
    pid: int = 0
    started: int = 0
    generation: int = 1
    fault: str = ""


@dataclass
class LabState:
    """One lab. `complete` is false from the first write until `up` has made all of it."""

    name: str
    profile: str
    index: int
    boot_id: str
    complete: bool = False
    switch: int = 0
    switch_started: int = 0
    nodes: list[NodeState] = field(default_factory=list)


def directory(name: str) -> Path:
    """The lab's directory. Raises LabError for a bad name."""
    if not _NAME.fullmatch(name) or name.endswith("-"):
        raise LabError(
            f"{name!r} is no name for a lab: small letters, digits and '-', "
            "beginning with a letter, 40 at most"
        )
    return ROOT / name


def names() -> list[str]:
    """Every lab that has a directory, also a half-made one."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in ROOT.iterdir() if _NAME.fullmatch(path.name))
    return []


def load(name: str) -> LabState | None:
    """The state that was last saved; None without one. Raises LabError for a damaged file."""
    path = directory(name) / "state.json"
    try:
        data = json.loads(path.read_text())
        data["nodes"] = [NodeState(**node) for node in data["nodes"]]
        return LabState(**data)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        # A full disk has cut it off, or another version wrote it.
        raise LabError(
            f"{path} cannot be understood; clean up: nodeready lab down --name {name}"
        ) from None


def taken() -> list[int]:
    """The numbers of all labs, also of those that another version started."""
    numbers = []
    for name in names():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            numbers.append(int(json.loads((directory(name) / "state.json").read_text())["index"]))
    return numbers


def save(state: LabState) -> None:
    """Replace state.json in one step."""
    write(directory(state.name) / "state.json", json.dumps(asdict(state), indent=1) + "\n", 0o600)


def write(path: Path, content: str, mode: int = 0o644) -> None:
    """Replace a file in one step."""
    make_directory(path.parent, 0o755)
    write_atomically(path, [content], mode, keep_mode=False)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_locked(path: Path) -> bool:
    """Whether a command is changing the lab in this directory."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Make the directory, and hold its lock. Raises LabError when another command keeps it.

    `down` removes the directory while it holds the lock: a waiting command then makes a new one.
    """
    deadline = time.monotonic() + LOCK_S
    while True:
        path.mkdir(mode=_MODE, parents=True, exist_ok=True)
        try:
            for directory in (ROOT, path):
                if directory.exists() and directory.stat().st_mode & 0o044:
                    directory.chmod(_MODE)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise LabError(
                    f"another command has been changing the lab {path.name} for {LOCK_S:.0f} s; "
                    f"see who with `fuser -v {path}`"
                ) from None
            time.sleep(0.05)
        except FileNotFoundError:
            pass
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)
