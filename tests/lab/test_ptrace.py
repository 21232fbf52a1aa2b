"""ptrace: which file wins at boot, for which reader, and what a deploy makes of it."""

from __future__ import annotations

from nodeready.operations import ptrace as operation
from nodeready.policy import Policy
from nodeready.subjects.ptrace import checks
from tests.builders.judging import by_id
from tests.helpers import apply, observe, on, plan

WANT = Policy()


DIRTY = {
    "/etc/sysctl.d/10-ptrace.conf": "kernel.yama.ptrace_scope = 1\n",
    "/etc/sysctl.d/99-zzz-cis.conf": "# hardening\n  kernel/yama/ptrace_scope=2",
    "/etc/sysctl.d/20-crlf.conf": "kernel.yama.ptrace_scope = 1\r\n",
    "/etc/sysctl.d/30-bytes.conf": b"# caf\xe9\nkernel.yama.ptrace_scope = 1\n",
    "/etc/sysctl.conf": "#kernel.yama.ptrace_scope=0\nkernel.yama.ptrace_scope=1\n",
}


def test_on_a_dirty_node_ours_wins_at_boot_and_no_other_file_changes(fresh_nodes):
    (node,) = fresh_nodes(1, files=DIRTY)
    before = {path: node.run(f"sha256sum {path}").stdout for path in DIRTY}
    steps = [operation.scope]
    apply(on(node), plan(observe(on(node), WANT), WANT, steps))

    # What the boot itself would set, as its own reader says it.
    reader = "/lib/systemd/systemd-sysctl"
    assert node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
    node.run("sysctl -qw kernel.yama.ptrace_scope=2")
    if node.run(f"test -x {reader}", check=False).returncode == 0:
        node.run(f"{reader} --prefix=/kernel/yama", check=False)
        assert node.testinfra().sysctl("kernel.yama.ptrace_scope") == 0
    node.run("sysctl -qw kernel.yama.ptrace_scope=0")

    assert before == {path: node.run(f"sha256sum {path}").stdout for path in DIRTY}
    again = observe(on(node), WANT)
    assert plan(again, WANT, steps) == []
    results = by_id(checks, again["ptrace"], WANT)
    assert results["ptrace.sysctl_conf"].source == "/etc/sysctl.conf:2"

    # A profile that comes back later, behind ours: ours moves behind it, and one file stays.
    node.write("/etc/sysctl.d/zzzz-again.conf", "kernel.yama.ptrace_scope = 2\n")
    apply(on(node), plan(observe(on(node), WANT), WANT, steps))
    ours = node.run("ls /etc/sysctl.d | grep nodeready").stdout.split()
    assert ours == ["zzzz-nodeready-ptrace.conf"]
    assert plan(observe(on(node), WANT), WANT, steps) == []
