"""A mount that never answers: named, and whoever waits for it is, too."""

import subprocess
import sys

import pytest

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.subjects.host.facts import Host
from tests.builders.host import judged, wrong
from tests.helpers import observe, on

NAS = "/mnt/na s"
#: Ends the server of a dead mount.
END_MOUNT = "kill -9 $(grep -las '[d]ead_mount' /proc/[0-9]*/cmdline | cut -d/ -f3)"


def look(node: LabNode, policy: Policy | None = None) -> Host:
    seen: Host = observe(on(node), policy or Policy(), ("host",))["host"]
    assert isinstance(seen, Host), seen
    return seen


def dead_mount(node: LabNode) -> None:
    """Mount what never answers; its server is a process of the node."""
    argv = [sys.executable, "-m", "nodeready.lab.culprits", str(node.pid), "dead_mount", NAS]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)


def looks_in_state_d(node: LabNode) -> list[str]:
    """Our own looks that hang in the kernel on the node."""
    ours = "$(grep -las nr_fs= /proc/[0-9]*/cmdline)"
    look = f"for one in {ours}; do grep ') D ' ${{one%cmdline}}stat; done"
    return node.run(look, check=False).stdout.splitlines()


@pytest.mark.parametrize("sh", ["dash", pytest.param("busybox sh", marks=pytest.mark.nightly)])
def test_a_dead_mount_is_named_and_holds_nobody(fresh_node, sh):
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
    # The second look met the first, which still hangs there, and sent no other after it.
    assert len(looks_in_state_d(fresh_node)) == 1
    # A process that no signal ends.
    fresh_node.run(
        f"(cd / && exec setsid cat '{NAS}/checkpoint.pt' >/dev/null 2>&1) & "
        "until pid=$(pidof cat); do sleep 0.05; done; "
        "until grep -q request_wait /proc/$pid/wchan; do sleep 0.05; done; kill -9 $pid; "
        # What has waited for less than that may be a slow disk.
        "sleep 2"
    )
    seen = look(fresh_node, policy)
    assert wrong(seen, policy) == {"dead_mounts": "fail", "stuck": "warn"}
    assert [process.name for process in seen.stuck] == ["cat"]
    assert seen.stuck[0].seconds is not None
    assert seen.stuck[0].wchan.startswith("request_wait")

    fresh_node.run(END_MOUNT, check=False)
    assert "stale" in judged(look(fresh_node, policy), policy)["dead_mounts"].actual
    assert looks_in_state_d(fresh_node) == []
