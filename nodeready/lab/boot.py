"""Starts nodes: the helper process of `nodeready lab up`.

`python -m nodeready.lab.boot DIRECTORY` reads a plan (one JSON object) from standard input:

    {"parent": pid, "interface": "nrlab0", "gateway": "10.213.0.1/23", "switch": pid or 0,
     "submounts": ["/usr"], "targets": ["/sys/bus/pci/devices"],
     "nodes": [{"name", "address": "10.213.0.2/23", "mac", "port": "n1", "generation": "g1",
                "files": {path: {"data": base64, "mode": int}}, "gone": [path]}]}

and answers with one JSON object per line: {"switch": pid}, then {"node": name, "pid": pid} or
{"node": name, "error": text} as each node is ready. It is a separate process because it forks, and
its caller may have threads. It dies with its caller.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nodeready.lab import host
from nodeready.lab.hardware import read_text
from nodeready.lab.host import ip, listening

# --- In the node's process and namespaces: its mounts, name and address, then its init.
#
# All nodes of a lab share one read-only layer, `base` (see nodeready.lab.image); a node's writes
# go to `nodes/NAME/GENERATION/upper0`.

# The shell of each init has this as argument 3, and the lab's directory as argument 4.
MARK = "nodeready-lab"

INIT = read_text("init.sh")  # process 1 of a node

# The switch holds the bridge of a lab in its own network namespace: the machine's firewall, which
# may filter bridges (Docker), and its udev never see the nodes.
SWITCH = "while :; do sleep 86400; done"

# The limits of a service on a fresh distribution; those of this process may differ.
_INFINITY = resource.RLIM_INFINITY
LIMITS = {
    resource.RLIMIT_CORE: (0, _INFINITY),
    resource.RLIMIT_NOFILE: (1024, 524288),
    resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20),
    resource.RLIMIT_STACK: (8 << 20, _INFINITY),
}

# The kernel unmounts for a dead node in the background, within milliseconds when idle.
RELEASE_S = 10.0

STASH = "/.lab"  # the directory of `base` with the files that are laid over /proc and /sys

# A second mount of the real /sys, for links from directories that replace its own.
REAL_SYS = f"{STASH}/sysfs"

_SAFE = host.NOSUID | host.NODEV | host.NOEXEC
Spec = dict[str, Any]


def become_switch(directory: str) -> NoReturn:
    """Turn the calling process, forked into a new PID namespace, into the lab's switch."""
    os.setsid()
    os.chdir("/")
    host.unshare(host.NEWNET)
    _exec_init(SWITCH, directory, "switch", os.open("/dev/null", os.O_RDWR))


def become_node(directory: str, spec: Spec, status: int, go: int) -> NoReturn:
    """Turn the calling process, forked into a new PID namespace, into the node `spec`.

    Writes one byte to `status` when its network namespace exists, and waits for one from `go`
    before it configures the network. Raises OSError.
    """
    os.setsid()
    fs = Path(directory, "fs")
    log = os.open(fs / "nodes" / spec["name"] / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    host.unshare(host.NEWNS | host.NEWNET | host.NEWUTS | host.NEWIPC)
    os.write(status, b"n")
    host.mount("", "/", flags=host.REC | host.PRIVATE)
    root = _mount_root(fs, spec)
    _mount_kernel(root)
    host.pivot_root(root)
    _overlay_kernel(spec["targets"])
    socket.sethostname(spec["name"])
    for path in spec["gone"]:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)
    for path, item in spec["files"].items():
        _write(Path(path), base64.b64decode(item["data"]), item["mode"])
    if os.read(go, 1) != b"g":
        raise OSError("the network of the node was not made")
    host.drop_machine_capabilities()
    _exec_init(INIT, directory, spec["name"], log, spec["address"])


def _exec_init(script: str, directory: str, name: str, log: int, *words: str) -> NoReturn:
    os.umask(0o022)
    for number, target in enumerate((os.open("/dev/null", os.O_RDWR), log, log)):
        os.dup2(target, number)
    # Python ignores SIGPIPE, and a script's shell ignores SIGINT and SIGQUIT in its background
    # jobs. The whole node would inherit an ignored signal.
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for limit, soft_hard in LIMITS.items():
        # Root without CAP_SYS_RESOURCE keeps the limits of this process.
        with contextlib.suppress(ValueError):
            resource.setrlimit(limit, soft_hard)
    host.die_with_parent(0)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    os.execve("/bin/sh", ["sh", "-c", script, MARK, directory, name, *words], environment)


def _mount_root(fs: Path, spec: Spec) -> str:
    """Mount the root: the node's writes over `base` over this machine's files."""
    home = fs / "nodes" / spec["name"]
    root = home / "root"
    root.mkdir(exist_ok=True)
    generation = home / spec["generation"]
    for number, directory in enumerate(["/", *spec["submounts"]]):
        # An overlay does not show other file systems that are mounted below its lower directory
        # (a separate /usr or /var): each of those gets its own overlay.
        upper = generation / f"upper{number}"
        work = generation / f"work{number}"
        for path in (upper, work):
            path.mkdir(parents=True, exist_ok=True)
        lower = [str(fs / "base") + directory.rstrip("/"), directory]
        layers = ":".join(path for path in lower if os.path.isdir(path))
        options = f"lowerdir={layers},upperdir={upper},workdir={work},redirect_dir=on"
        _mount_overlay(str(root) + directory.rstrip("/"), options)
    return str(root)


def _mount_overlay(target: str, options: str) -> None:
    """Mount it; after a restart the kernel may still hold the same directories."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            host.mount("overlay", target, "overlay", 0, options)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _mount_kernel(root: str) -> None:
    host.mount("proc", f"{root}/proc", "proc", _SAFE)
    host.mount("sysfs", f"{root}/sys", "sysfs", _SAFE | host.RDONLY)
    nosuid, pts = host.NOSUID, "newinstance,ptmxmode=0666,mode=0620,gid=5"
    host.mount("devpts", f"{root}/dev/pts", "devpts", nosuid | host.NOEXEC, pts)
    host.mount("tmpfs", f"{root}/dev/shm", "tmpfs", nosuid | host.NODEV, "mode=1777")


def _overlay_kernel(targets: list[str]) -> None:
    """Lay the node's /proc/sys and the profile's hardware over the real ones.

    Keys that belong to a namespace stay real: /proc/sys/net, the host name.
    """
    sys_dir = Path(STASH, "proc/sys")
    names = ("net", "kernel/hostname", "kernel/domainname", "kernel/random/uuid")
    keys = [name for name in names if (sys_dir / name).exists()]
    for key in keys:
        _bind(f"/proc/sys/{key}", str(sys_dir / key))
    (sys_dir / "kernel/random/boot_id").write_text(f"{uuid.uuid4()}\n")
    host.mount(str(sys_dir), "/proc/sys", flags=host.BIND | host.REC)
    for key in keys:
        host.umount(str(sys_dir / key), host.DETACH)
    _bind(f"{STASH}/proc/cmdline", "/proc/cmdline")
    # A crash by sysrq would be the machine's, not the node's.
    if os.path.exists("/proc/sysrq-trigger"):
        _bind("/dev/null", "/proc/sysrq-trigger")
    if os.path.isdir(REAL_SYS):
        host.mount("sysfs", REAL_SYS, "sysfs", _SAFE | host.RDONLY)
    for target in targets:
        _bind(STASH + target, target)


def _bind(source: str, target: str) -> None:
    host.mount(source, target, flags=host.BIND)


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(data)
        os.fchmod(out.fileno(), mode)


# --- In the helper's process: fork the nodes, connect them, report them.

# The number of nodes that start together. More is not faster on a few cores, and each node before
# its init costs the memory of a Python process.
BATCH = 32

# sshd needs some 10 ms of CPU; the rest is for a machine that is loaded or swapping.
READY_S = 60.0


@dataclass
class StartingNode:
    """A node between its fork and its init: its process and the two pipes to it."""

    name: str
    pid: int
    status: int
    go: int
    port: str
    mac: str

    def read_status(self) -> bytes:
        """The node's next report; empty when it runs its init."""
        return os.read(self.status, 4096)


def report(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def fork_in_pid_namespace(become: Callable[[], NoReturn], status: int) -> int:
    """Fork process 1 of a new PID namespace, which dies with this process and calls `become`.

    It writes an error of `become` to `status`, which this process closes.
    """
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        host.unshare(host.NEWPID)
        pid = os.fork()
        if pid == 0:
            try:
                host.die_with_parent(signal.SIGKILL)
                become()
            except Exception as error:  # noqa: BLE001 - the caller reports any error
                os.write(status, str(error).encode())
            finally:
                os._exit(1)
        host.setns(own_namespace, host.NEWPID)
    finally:
        os.close(own_namespace)
    os.close(status)
    return pid


def start_switch(directory: str, plan: Spec) -> int:
    """Start the lab's bridge, and the interface of the lab on this machine. Raises OSError."""
    status, child_status = os.pipe()
    pid = fork_in_pid_namespace(lambda: become_switch(directory), child_status)
    problem = os.read(status, 4096)
    os.close(status)
    if problem:
        raise OSError(problem.decode())
    report(switch=pid)
    name = plan["interface"]
    address = f"address add {plan['gateway']} dev {name}"
    ip([f"link add {name} type veth peer name uplink netns {pid}", address, f"link set {name} up"])
    bridge = "link add name bridge type bridge mcast_snooping 0"
    ip([bridge, "link set dev uplink master bridge up", "link set dev bridge up"], pid)
    return pid


def fork_node(directory: str, spec: Spec) -> StartingNode:
    """Fork a node; it stops before its network and waits for `go`."""
    status, child_status = os.pipe()
    child_go, go = os.pipe()

    def become() -> NoReturn:
        # With a copy of the caller's end, the child would not notice the caller's death.
        os.close(go)
        become_node(directory, spec, child_status, child_go)

    pid = fork_in_pid_namespace(become, child_status)
    os.close(child_go)
    return StartingNode(spec["name"], pid, status, go, spec["port"], spec["mac"])


def start_batch(directory: str, switch: int, specs: list[Spec]) -> dict[str, int]:
    """Start some nodes together; returns the pid by name of those that run their init."""
    nodes = [fork_node(directory, spec) for spec in specs]
    waiting: list[StartingNode] = []
    for node in nodes:
        status = node.read_status()
        if status == b"n":
            waiting.append(node)
        else:
            report(node=node.name, error=(status or b"its process ended").decode())
    # The kernel removes the wire of a dead node some time after its death.
    ip([f"link delete {node.port}" for node in waiting], switch, force=True)
    commands = []
    for node in waiting:
        peer = f"peer name eth0 address {node.mac} netns {node.pid}"
        commands += [f"link add {node.port} type veth {peer}"]
        commands += [f"link set {node.port} master bridge up"]
    ip(commands, switch)
    running: dict[str, int] = {}
    for node in waiting:
        with contextlib.suppress(BrokenPipeError):
            os.write(node.go, b"g")
    for node in waiting:
        if problem := node.read_status():
            report(node=node.name, error=problem.decode())
        else:
            running[node.name] = node.pid
    for node in nodes:
        os.close(node.status)
        os.close(node.go)
    return running


def await_ready(directory: str, pending: dict[str, int], deadline: float) -> dict[str, int]:
    """Report each node whose sshd listens; returns those that still do not at the deadline."""
    while pending:
        for name, pid in list(pending.items()):
            if listening(pid):
                report(node=name, pid=pid)
                del pending[name]
            elif os.waitpid(pid, os.WNOHANG)[0]:
                log = Path(directory, "fs", "nodes", name, "log").read_text(errors="replace")
                last_line = (log.strip() or "it said nothing").splitlines()[-1]
                report(node=name, error=f"its init ended: {last_line}")
                del pending[name]
        if not pending or time.monotonic() > deadline:
            break
        select.select([], [], [], 0.005)
    return pending


def main(directory: str) -> None:
    """Carry out the plan on standard input."""
    host.die_with_parent(signal.SIGKILL)
    plan: Spec = json.load(sys.stdin)
    if os.getppid() != plan["parent"]:
        return
    switch = plan["switch"] or start_switch(directory, plan)
    specs: list[Spec] = plan["nodes"]
    for spec in specs:
        spec.update(submounts=plan["submounts"], targets=plan["targets"])
    pending: dict[str, int] = {}
    for start in range(0, len(specs), BATCH):
        pending |= start_batch(directory, switch, specs[start : start + BATCH])
        await_ready(directory, pending, deadline=0.0)
    for name in await_ready(directory, pending, time.monotonic() + READY_S):
        report(node=name, error="sshd does not listen; see its log")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        report(error=str(error))
        sys.exit(1)
