"""Broken nodes: each trouble is named by the check that is about it, and by no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from nodeready.lab import Node
from nodeready.policy import Policy
from nodeready.subjects.host.facts import Host
from tests.builders.host import judged, wrong
from tests.helpers import observe, on

NAS = "/mnt/na s"


def look(node: Node, policy: Policy | None = None) -> Host:
    seen: Host = observe(on(node), policy or Policy(), ("host",))["host"]
    assert isinstance(seen, Host), seen
    return seen


def dead_mount(node: Node) -> None:
    """Mount what never answers; its server is a process of the node."""
    argv = [sys.executable, "-m", "nodeready.lab.culprits", str(node.pid), "dead_mount", NAS]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)


def looks_in_state_d(node: Node) -> list[str]:
    """The pids of our own looks that hang in the kernel on the node."""
    found = node.run("grep -las nr_fs= /proc/[0-9]*/cmdline", check=False).stdout.split()
    stats = (node.run(f"cat {path[:-8]}/stat", check=False).stdout for path in found)
    return [stat.split()[0] for stat in stats if ") D " in stat]


def test_a_fresh_node_fails_nothing(lab) -> None:
    assert wrong(look(lab.nodes[0])) == {}


@pytest.mark.parametrize("sh", ["dash", "busybox sh"])
def test_a_dead_mount_is_named_and_holds_nobody(fresh_node: Node, sh: str) -> None:
    if sh != "dash":
        fresh_node.run("command -v busybox && ln -sf $(command -v busybox) /bin/sh")
    fresh_node.run("mkdir /scratch; mount -t tmpfs -o size=1g scratch /scratch")
    dead_mount(fresh_node)
    policy = Policy(mounts=(NAS, "/scratch"))
    for _look in range(2):
        seen = look(fresh_node, policy)
        assert wrong(seen, policy) == {"dead_mounts": "fail"}
        sizes = {mount.path: mount.size_mb for mount in seen.mounts}
        assert (sizes["/scratch"], sizes[NAS]) == (1024, None)
        result = judged(seen, policy)["dead_mounts"]
        assert result.actual.startswith(f"{NAS} (nas:/export, fuse.sshfs): hung")
    # The second look found the first still hanging there, and sent no other after it.
    assert len(looks_in_state_d(fresh_node)) == 1

    fresh_node.run(
        "kill -9 $(grep -las '[d]ead_mount' /proc/[0-9]*/cmdline | cut -d/ -f3)", check=False
    )
    assert "stale" in judged(look(fresh_node, policy), policy)["dead_mounts"].actual
    assert looks_in_state_d(fresh_node) == []


def test_a_process_that_no_signal_ends_is_stuck(fresh_node: Node) -> None:
    dead_mount(fresh_node)
    fresh_node.run(
        f"(cd / && exec setsid cat '{NAS}/checkpoint.pt' >/dev/null 2>&1) & "
        "until pid=$(pidof cat); do sleep 0.05; done; "
        "until grep -q request_wait /proc/$pid/wchan; do sleep 0.05; done; kill -9 $pid; "
        # What has waited for less than that may be a slow disk.
        "sleep 2"
    )
    seen = look(fresh_node)
    assert wrong(seen) == {"dead_mounts": "fail", "stuck": "warn"}
    assert [process.name for process in seen.stuck] == ["cat"]
    assert seen.stuck[0].seconds is not None
    assert seen.stuck[0].wchan.startswith("request_wait")


FULL = "mount -t tmpfs -o size=1m full '{0}'; head -c 2m /dev/zero >'{0}/x' 2>/dev/null || :"
MANY = (
    "mount -t tmpfs -o size=9m,nr_inodes=9 m {0}; for n in 1 2 3 4 5 6 7 8 9; do : >{0}/$n; done"
)


@pytest.mark.parametrize(
    ("trouble", "check", "status", "words"),
    [
        (FULL.format("/a b"), "space", "fail", "/a b: 0 % free"),
        (MANY.format("/scratch") + " 2>/dev/null || :", "inodes", "fail", "/scratch: 0 % free"),
        ("umount /dev/shm", "shm", "fail", "not mounted"),
        (
            "mount -t tmpfs scratch /scratch; mount -o remount,ro /scratch; "
            "echo '/dev/sdb1 /scratch ext4 errors=remount-ro 0 2' >/etc/fstab",
            "read_only", "fail", "is read-only",
        ),
        ("echo 'nas:/x /scratch nfs defaults 0 0' >/etc/fstab", "mounts", "warn", "/scratch"),
        ("rm /run/systemd/timesync/synchronized", "clock", "fail", "systemd-timesyncd"),
        ("rm -r /run/systemd/timesync", "clock", "warn", "nothing synchronises it"),
    ],
)  # fmt: skip
def test_a_trouble_is_named_by_its_check(
    fresh_node: Node, trouble: str, check: str, status: str, words: str
) -> None:
    fresh_node.run("mkdir -p /scratch '/a b'")
    fresh_node.run(trouble)
    seen = look(fresh_node)
    assert wrong(seen) == {check: status}
    assert words in judged(seen)[check].actual


def test_many_zombies_of_one_parent(fresh_nodes: Callable[..., list[Node]]) -> None:
    node = fresh_nodes(1)[0]
    node.run(
        "setsid sh -c 'i=0; while [ $i -lt 60 ]; do sleep 1 & i=$((i + 1)); done; exec sleep 999' "
        ">/dev/null 2>&1 & sleep 2"
    )
    seen = look(node)
    assert wrong(seen) == {"zombies": "warn"}
    assert "60 of sleep" in judged(seen)["zombies"].actual
