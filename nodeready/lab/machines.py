"""Starts, stops and removes the machines of a lab and their disks; the process has its lock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab import faults, host, processes, state
from nodeready.lab.boot import STASH
from nodeready.lab.hardware import read_text
from nodeready.lab.host import node_settings, run
from nodeready.lab.image import new_key
from nodeready.lab.processes import Files, encoded, is_alive
from nodeready.lab.state import LabError, LabState, NodeState

# The nodes with their data, for ``@lab``: `nodeready.fleet.inventory.labs` reads it.
INVENTORY = "inventory.json"

# Gets the number of nodes that are ready, and of all that start.
Progress = Callable[[int, int], None]


def kill(node: NodeState) -> None:
    """Cut its power: end its process 1, and with it all of its processes."""
    if is_alive(node):
        processes.end(node.pid)


def new_node(lab: LabState, number: int) -> NodeState:
    """Node `number` of the lab, not started yet."""
    # The default lab's nodes have the names of the examples. A name that ends in a digit needs a
    # dash before the number.
    prefix = "node" if lab.name == "lab" else lab.name
    dash = "-" if prefix[-1].isdigit() else ""
    name = f"{prefix}{dash}{number:03d}"
    key = new_key(f"root@{name}")
    address = str(host.address(lab.index, number).ip)
    return NodeState(name, number, address, key.private, key.public)


def grow(
    lab: LabState,
    count: int,
    files: Files | None,
    progress: Progress | None = None,
    fault: str | None = None,
) -> int:
    """Start dead nodes and those that are missing to `count`; returns their number.

    With a `fault` the last node has it, and is restarted if it ran without it; with "", no node
    has one. On an exception the missing nodes are missing again.
    """
    # A killed command has left those that the state does not name.
    known_pids = {lab.switch, *(node.pid for node in lab.nodes)}
    for pid in {*processes.of_lab(state.directory(lab.name))} - known_pids:
        processes.end(pid)
    host.make_room(count)
    if processes.started_at(lab.switch) != lab.switch_started:
        # Without its switch no node can be reached: they get a new switch, and new wires.
        lab.switch = 0
        host.delete_interface(lab.index)
        for node in lab.nodes:
            kill(node)
    old = list(lab.nodes)
    old_faults = [node.fault for node in old]
    if fault == "":
        _change_faults(old, fault)
    elif fault and count <= len(old):
        _change_faults(old[-1:], fault)
    dead = [node for node in old if not is_alive(node)]
    new = [new_node(lab, number) for number in range(len(old) + 1, count + 1)]
    if new and fault:
        new[-1].fault = fault
    try:
        start(lab, dead, None, progress, keep_disk=True)
        lab.nodes = old + new
        start(lab, new, files, progress)
        # Appended, so that a person's lines stay.
        for node in old if new else []:
            processes.enter(node.pid, ["sh", "-c", "cat >> /etc/hosts"], _host_lines(new))
    except BaseException:
        if new:
            processes.end_all(state.directory(lab.name), [node.name for node in new])
        for node in new:
            shutil.rmtree(NodeDisk(lab, node).home, ignore_errors=True)
        lab.nodes = old
        for node, old_fault in zip(old, old_faults, strict=True):
            node.fault = old_fault
        state.save(lab)
        raise
    return len(dead) + len(new)


def _change_faults(nodes: Sequence[NodeState], fault: str) -> None:
    for node in nodes:
        if node.fault != fault:
            kill(node)
            node.fault = fault


def start(
    lab: LabState,
    nodes: Sequence[NodeState],
    files: Files | None,
    progress: Progress | None = None,
    keep_disk: bool = False,
) -> None:
    """Start these nodes, all of them new or dead, and wait until each accepts logins.

    On an exception none of them runs.
    """
    if not nodes:
        return
    specs = []
    for node in nodes:
        disk = NodeDisk(lab, node)
        disk.prepare(keep_disk)
        content = {} if keep_disk else {**_node_files(lab, node), **(files or {})}
        missing: list[str] = []
        if node.fault:
            disk.copy(content)
            changes, missing = faults.changes(node.fault, lab.profile)
            content = {**content, **changes}
        specs.append(processes.spec(lab.index, node, content, missing))
    _write_ssh(lab)
    try:
        _boot(lab, {node.name: node for node in nodes}, specs, progress)
        for node in nodes:
            if node.fault:
                faults.start_programs(node.fault, node.pid)
                NodeDisk(lab, node).note_fault(is_new=not keep_disk)
    except BaseException:
        # Some may run that the helper has not reported yet.
        processes.end_all(state.directory(lab.name), [node.name for node in nodes])
        raise
    finally:
        state.save(lab)


def _boot(
    lab: LabState,
    nodes: Mapping[str, NodeState],
    specs: list[dict[str, Any]],
    progress: Progress | None,
) -> None:
    """Have the helper start them, and keep the pids that it reports."""
    problems: list[str] = []
    ready = 0
    with contextlib.closing(processes.boot(lab, specs)) as answers:
        for answer in answers:
            if "switch" in answer:
                lab.switch = answer["switch"]
                lab.switch_started = processes.started_at(lab.switch) or 0
            elif "error" in answer:
                problems.append(f"{answer.get('node', 'network')}: {answer['error']}")
            else:
                node = nodes[answer["node"]]
                node.pid = answer["pid"]
                node.started = processes.started_at(node.pid) or 0
                ready += 1
                if progress:
                    progress(ready, len(nodes))
    if ready < len(nodes):
        log = (state.directory(lab.name) / processes.LOG).read_text(errors="replace").split("\n")
        reasons = [*problems, *log[-2:], "their helper ended early"]
        reason = next(filter(None, reasons))
        raise LabError(f"{len(nodes) - ready} of {len(nodes)} nodes did not start: {reason}")


def _node_files(lab: LabState, node: NodeState) -> Files:
    local = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
    return {
        "/etc/hostname": f"{node.name}\n",
        "/etc/hosts": local + _host_lines(lab.nodes),
        "/etc/ssh/ssh_host_ed25519_key": (node.host_key, 0o600),
        "/etc/ssh/ssh_host_ed25519_key.pub": f"{node.host_key_public}\n",
    }


def _host_lines(nodes: Sequence[NodeState]) -> str:
    return "".join(f"{node.address} {node.name}\n" for node in nodes)


def _write_ssh(lab: LabState) -> None:
    """Write a client's files for logins: names, addresses and keys of all nodes."""
    ssh = state.directory(lab.name) / "ssh"
    known_hosts, hosts = "", ""
    for node in lab.nodes:
        kind, key = node.host_key_public.split()[:2]
        known_hosts += f"{node.name},{node.address} {kind} {key}\n"
        hosts += f"Host {node.name}\n    HostName {node.address}\n"
    state.write(ssh / "known_hosts", known_hosts)
    state.write(ssh / "ssh_config", hosts + read_text("ssh_config.txt").format(ssh=ssh))
    settings = node_settings()
    nodes = {node.name: {**login_data(lab, node), **settings} for node in lab.nodes}
    state.write(state.directory(lab.name) / INVENTORY, json.dumps(nodes, indent=1) + "\n")


def login_data(lab: LabState, node: NodeState) -> dict[str, Any]:
    """The data of a node, as pyinfra's host, for logins."""
    ssh = state.directory(lab.name) / "ssh"
    return {
        "ssh_hostname": node.address,
        "ssh_user": "root",
        "ssh_key": str(ssh / "id_ed25519"),
        "ssh_known_hosts_file": str(ssh / "known_hosts"),
        "ssh_strict_host_key_checking": "yes",
    }


# --- The disk of a node.


class NodeDisk:
    """The disk of a node, while the node is off or starting: the upper layers of its overlays.

    All writes of a node are in these layers, a few hundred files. Before a node starts with a
    fault, the layers are copied; when the fault is in place, its changes are noted. At the next
    start each path that is still as the fault made it gets its old content. So a fault may break
    any file, a deploy may repair it, and other writes in the meantime stay.
    """

    def __init__(self, lab: LabState, node: NodeState) -> None:
        self.node = node
        self.home = state.directory(lab.name) / "fs" / "nodes" / node.name
        self._copy, self._note = self.home / "before", self.home / "fault.json"

    @property
    def layers(self) -> Path:
        """The directory of its upper layers; `generation` counts the disks."""
        return self.home / f"g{self.node.generation}"

    def prepare(self, keep: bool) -> None:
        """Make it empty, or remove what does not survive a power cycle."""
        if keep:
            self._undo_fault()
            for directory in (STASH, "/run", "/tmp", "/dev"):
                shutil.rmtree(self.layers / f"upper0{directory}", ignore_errors=True)
        elif self.layers.exists():
            # The kernel may still hold the old one: never use it again.
            shutil.rmtree(self.layers, ignore_errors=True)
            self.node.generation += 1
        self.home.mkdir(exist_ok=True)
        shutil.rmtree(self._copy, ignore_errors=True)

    def copy(self, files: Files) -> None:
        """Copy it before a fault, with the files that the node gets at its start."""
        self._copy.mkdir()
        for layer in self.layers.glob("upper*"):
            _copy(layer, self._copy / layer.name)
        for name, item in files.items():
            path = self._copy / "upper0" / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            data, mode = encoded(item)
            path.write_bytes(data)
            path.chmod(mode)

    def note_fault(self, is_new: bool) -> None:
        """Note how the fault has left the paths that it changed. is_new: the disk was empty."""
        if is_new:
            for directory in self._copy.glob("upper*/**/"):
                if (target := self.layers / directory.relative_to(self._copy)).is_dir():
                    _copy_owner(directory, target)
        before, after = _states(self._copy), _states(self.layers)
        changes = {
            path: after.get(path)
            for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)
        }
        state.write(self._note, json.dumps(changes))

    def _undo_fault(self) -> None:
        """Undo what the fault of the last start has changed, where nothing else has since."""
        if not self._note.exists():
            return
        states, noted = _states(self.layers), json.loads(self._note.read_text())
        paths = sorted(path for path, entry in noted.items() if states.get(path) == entry)
        # The deepest first: a directory that the fault made goes when it is empty.
        for path in reversed(paths):
            current, old = self.layers / path, self._copy / path
            if current.is_dir() and not current.is_symlink():
                with contextlib.suppress(OSError):
                    current.rmdir()
            else:
                # Another file may have the place of a removed directory.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    current.unlink()
                if os.path.lexists(old) and current.parent.is_dir() and not old.is_dir():
                    _copy(old, current)
        for path in paths:
            current, old = self.layers / path, self._copy / path
            if not os.path.lexists(current) and os.path.lexists(old):
                _copy(old, current)
            elif current.is_dir() and old.is_dir():
                _copy_owner(old, current)
        self._note.unlink()


def _states(disk: Path) -> dict[str, list[Any]]:
    """Each path of the disk's upper layers, with the values that differ after a change."""
    states = {}
    for layer in disk.glob("upper*"):
        for path in layer.rglob("*"):
            status = path.lstat()
            entry: list[Any] = [status.st_mode, status.st_uid, status.st_gid]
            if stat.S_ISDIR(status.st_mode):
                entry.append("trusted.overlay.opaque" in os.listxattr(path))
            else:
                entry += [status.st_rdev, status.st_size, status.st_mtime_ns]
            states[str(path.relative_to(disk))] = entry
    return states


def _copy(source: Path, target: Path) -> None:
    """Copy with all attributes: some say what of the layers below is hidden (overlayfs)."""
    run(["cp", "-a", "-T", str(source), str(target)]).check_returncode()


def _copy_owner(source: Path, target: Path) -> None:
    shutil.copystat(source, target)
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)


# --- The end of a lab in any state: whole, half made, or left by a killed command.


def down(name: str) -> bool:
    """End the lab of this name, or what remains of one; returns whether anything existed.

    Raises LabError when a part of it cannot be ended.
    """
    directory = state.directory(name)
    if not directory.exists():
        return False
    with state.locked(directory):
        remove(directory)
    return True


def remove(directory: Path) -> None:
    """Remove everything of the lab; this process holds its lock."""
    clean(directory)
    shutil.rmtree(directory)
    remove_empty(directory)


def remove_empty(directory: Path) -> None:
    """Remove the lab's directory if it is empty, and those above if it was the last."""
    with contextlib.suppress(OSError):
        directory.rmdir()
    if not state.names():
        host.restore_neighbour_limit()
    for path in (state.ROOT, state.ROOT.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def clean(directory: Path) -> None:
    """End all processes of the lab, and empty its directory."""
    with contextlib.suppress(LabError):
        if lab := state.load(directory.name):
            host.delete_interface(lab.index)
    processes.end_all(directory)
    fs = directory / "fs"
    while os.path.ismount(fs):
        _unmount(fs)
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _unmount(fs: Path) -> None:
    """Unmount, when the kernel has released dead nodes; an open file only delays the end."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            host.umount(str(fs))
            return
        time.sleep(0.01)
    host.umount(str(fs), host.DETACH)
