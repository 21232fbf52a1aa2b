"""Starts nodes: the one helper process of `nodeready lab up`.

`python -m nodeready.lab.boot DIRECTORY` reads a plan (one JSON object) from standard input:

    {"parent": pid, "interface": "nrlab0", "gateway": "10.213.0.1/23", "switch": pid or 0,
     "submounts": ["/usr"], "targets": ["/sys/bus/pci/devices"],
     "nodes": [{"name", "address": "10.213.0.2/23", "mac", "port": "n1", "generation": "g1",
                "files": {path: {"data": base64, "mode": int}}, "gone": [path],
                "freezer": "/nodeready-lab-lab/node001" or ""}]}

and answers with one JSON object per line: {"switch": pid}, then {"node": name, "pid": pid} or
{"node": name, "error": text} as each node is ready. It is a process of its own because it
forks, and its caller may have threads. It dies with its caller, so that nothing starts nodes
that nobody wants any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeready.lab import syscalls as k
from nodeready.lab.assemble import become_node, become_switch
from nodeready.lab.network import ip, listening

# What is started together. More is not faster on a few cores, and each that is not yet under
# its own init costs the memory of a Python process.
BATCH = 32

# sshd needs some 10 ms of CPU; the rest is for a machine that is loaded or swapping.
READY_S = 60.0

Spec = dict[str, Any]


@dataclass
class Starting:
    """A node between its fork and its init: its process and the two pipes to it."""

    name: str
    pid: int
    status: int
    go: int
    port: str
    mac: str

    def hear(self) -> bytes:
        """What the node says next; empty when it runs its init."""
        return os.read(self.status, 4096)


def say(**line: Any) -> None:
    """Answer the caller."""
    print(json.dumps(line), flush=True)


def fork_in_pid_namespace() -> int:
    """Fork a child that is process 1 of a new PID namespace, and dies with this process."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        k.unshare(k.NEWPID)
        pid = os.fork()
        if pid == 0:
            k.die_with_parent(signal.SIGKILL)
        else:
            k.setns(own, k.NEWPID)
        return pid
    finally:
        os.close(own)


def start_switch(directory: str, plan: Spec) -> int:
    """The lab's bridge, and the one interface that this machine sees of the lab.

    Raises OSError.
    """
    status, child = os.pipe()
    pid = fork_in_pid_namespace()
    if pid == 0:
        try:
            become_switch(directory)
        except Exception as error:  # noqa: BLE001 - its last words, whatever they are
            os.write(child, str(error).encode())
        finally:
            os._exit(1)
    os.close(child)
    problem = os.read(status, 4096)
    os.close(status)
    if problem:
        raise OSError(problem.decode())
    say(switch=pid)
    name = plan["interface"]
    ip(
        [
            f"link add {name} type veth peer name uplink netns {pid}",
            f"address add {plan['gateway']} dev {name}",
            f"link set {name} up",
        ]
    )
    ip(
        [
            "link add name bridge type bridge mcast_snooping 0",
            "link set dev uplink master bridge up",
            "link set dev bridge up",
        ],
        pid,
    )
    return pid


def fork_node(directory: str, spec: Spec) -> Starting:
    """Begin a node; it stops before its network and waits for `go`."""
    status, child_status = os.pipe()
    child_go, go = os.pipe()
    pid = fork_in_pid_namespace()
    if pid == 0:
        try:
            # Kept open here, the caller's end would hide its death from the child.
            os.close(go)
            become_node(directory, spec, child_status, child_go)
        except Exception as error:  # noqa: BLE001 - its last words, whatever they are
            os.write(child_status, str(error).encode())
        finally:
            os._exit(1)
    os.close(child_status)
    os.close(child_go)
    return Starting(spec["name"], pid, status, go, spec["port"], spec["mac"])


def start_batch(directory: str, switch: int, specs: list[Spec]) -> dict[str, int]:
    """Start some nodes together; the pid by name of those that run their init."""
    started = [fork_node(directory, spec) for spec in specs]
    waiting: list[Starting] = []
    for node in started:
        heard = node.hear()
        if heard == b"n":
            waiting.append(node)
        else:
            say(node=node.name, error=(heard or b"its process ended").decode())
    # A node that ran before and died takes its wire along only when the kernel comes to it.
    ip([f"link delete {node.port}" for node in waiting], switch, force=True)
    wires: list[str] = []
    for node in waiting:
        peer = f"peer name eth0 address {node.mac} netns {node.pid}"
        wires.append(f"link add {node.port} type veth {peer}")
        wires.append(f"link set {node.port} master bridge up")
    ip(wires, switch)
    running: dict[str, int] = {}
    for node in waiting:
        with contextlib.suppress(BrokenPipeError):
            os.write(node.go, b"g")
    for node in waiting:
        problem = node.hear()
        if problem:
            say(node=node.name, error=problem.decode())
        else:
            running[node.name] = node.pid
    for node in started:
        os.close(node.status)
        os.close(node.go)
    return running


def last_words(directory: str, name: str) -> str:
    """The last line of a node's log."""
    log = Path(directory, "fs", "nodes", name, "log").read_text(errors="replace")
    return (log.strip() or "it said nothing").splitlines()[-1]


def await_ready(directory: str, pending: dict[str, int], deadline: float) -> dict[str, int]:
    """Report each node whose sshd listens; those that still do not at the deadline."""
    while pending:
        for name, pid in list(pending.items()):
            if listening(pid):
                say(node=name, pid=pid)
                del pending[name]
            elif os.waitpid(pid, os.WNOHANG)[0]:
                say(node=name, error=f"its init ended: {last_words(directory, name)}")
                del pending[name]
        if not pending or time.monotonic() > deadline:
            break
        select.select([], [], [], 0.005)
    return pending


def main(directory: str) -> None:
    """Carry out the plan on standard input."""
    k.die_with_parent(signal.SIGKILL)
    plan: Spec = json.load(sys.stdin)
    if os.getppid() != plan["parent"]:
        return
    switch = plan["switch"] or start_switch(directory, plan)
    nodes: list[Spec] = plan["nodes"]
    for spec in nodes:
        spec.update(submounts=plan["submounts"], targets=plan["targets"])
    pending: dict[str, int] = {}
    for at in range(0, len(nodes), BATCH):
        pending |= start_batch(directory, switch, nodes[at : at + BATCH])
        await_ready(directory, pending, deadline=0.0)
    for name in await_ready(directory, pending, time.monotonic() + READY_S):
        say(node=name, error="sshd does not listen; see its log")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        say(error=str(error))
        sys.exit(1)
