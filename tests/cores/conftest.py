"""Nodes with crashes on them.

crash_node     a pristine node whose cores go to /var/crash
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from nodeready.lab import Node
from tests.command import fleet, tool

__all__ = ["crash", "crash_nodes", "fleet", "tool"]

PATTERN = "/var/crash/core.%e.%P.%h.%t"
#: It dies in the C library's strlen, which ctypes calls.
CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.fixture
def crash_nodes(fresh_nodes: Callable[..., list[Node]]) -> Callable[[int], list[Node]]:
    """A factory of pristine nodes whose cores go to /var/crash: `crash_nodes(2)`."""

    def take(count: int) -> list[Node]:
        nodes = fresh_nodes(count)
        for node in nodes:
            node.write("/proc/sys/kernel/core_pattern", f"{PATTERN}\n")
            node.enter(["install", "-d", "-m", "1777", "/var/crash"])
        return nodes

    return take


def crash(node: Node, rank: int, *, time: int, uid: int = 0) -> str:
    """Crash a Python of a job on the node; the path of its core.

    time: in its name
    The kernel of the lab is this machine's, and its core_pattern a plain ``core``: the file gets
    the name that the node's own pattern gives.
    """
    script = f"""
        set -eu
        mkdir -m 777 /var/crash/now
        cd /var/crash/now
        ulimit -c unlimited
        setpriv --reuid {uid} --regid {uid} --clear-groups env RANK={rank} SLURM_JOB_ID=88 \
            /usr/bin/python3 -c {shlex.quote(CRASH)} & pid=$!
        wait $pid || :
        path=/var/crash/core.python3.$pid.$(uname -n).{time}
        mv core* $path
        rmdir /var/crash/now
        echo $path
    """
    return node.enter(["sh", "-c", script]).stdout.strip().splitlines()[-1]
