"""core_dumps: the pattern, its directory, retention, and who would rewrite it."""

from __future__ import annotations

from functools import partial

from nodeready.operations import core_dumps as operation
from nodeready.policy import Policy
from nodeready.subjects.core_dumps import checks
from tests.builders import judging
from tests.helpers import apply, observe, on, plan

WANT = Policy()
STORE = Policy(core_handler="systemd-coredump")
PACKAGED = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
STEPS = [operation.rewriters, operation.directory, operation.pattern, operation.size]


wrong = partial(judging.wrong, checks)


DIRTY = {
    "/etc/sysctl.d/50-coredump.conf": "kernel.core_pattern=|/bin/false\n",
    "/etc/sysctl.d/zz-site.conf": "kernel.core_pattern = /tmp/core.%p",
    "/etc/tmpfiles.d/crash.conf": "d /var/crash 0755 root root 3d\n",
    "/usr/lib/systemd/system/apport.service": "[Unit]\nDescription=apport\n",
    "/etc/sysctl.conf": "kernel.core_pattern = core\n",
}


def test_on_a_dirty_node_cores_go_where_the_policy_says(fresh_nodes):
    (node,) = fresh_nodes(1, files=DIRTY)
    before = {path: node.run(f"sha256sum {path}").stdout for path in DIRTY}
    apply(on(node), plan(observe(on(node), WANT), WANT, STEPS))

    assert node.run("cat /proc/sys/kernel/core_pattern").stdout.strip() == WANT.core_pattern
    assert node.run("readlink /etc/systemd/system/apport.service").stdout == "/dev/null\n"
    node.run("touch /var/crash/core.x", user="ml")
    # systemd-tmpfiles itself takes our rule, not the other one.
    node.run("rm -r /var/crash; systemd-tmpfiles --create --prefix=/var/crash 2>/dev/null || :")
    assert node.run("stat -c '%F %a' /var/crash").stdout == "directory 1777\n"

    assert before == {path: node.run(f"sha256sum {path}").stdout for path in DIRTY}
    again = observe(on(node), WANT)
    assert plan(again, WANT, STEPS) == []
    assert wrong(again["core_dumps"]) == {"sysctl_conf": "warn"}


def test_changing_the_handler_takes_our_pattern_away_again(fresh_nodes):
    packaged = {
        "/usr/lib/sysctl.d/50-coredump.conf": f"kernel.core_pattern={PACKAGED}\n",
        "/usr/lib/systemd/systemd-coredump": "#!/bin/sh\n",
    }
    (node,) = fresh_nodes(1, files=packaged)
    apply(on(node), plan(observe(on(node), WANT), WANT, STEPS))
    apply(on(node), plan(observe(on(node), STORE), STORE, STEPS))
    assert node.run("cat /proc/sys/kernel/core_pattern").stdout.strip() == PACKAGED
    assert node.run("ls /etc/sysctl.d | grep -c nodeready", check=False).stdout == "0\n"
    limits = node.run("cat /etc/systemd/coredump.conf.d/zz-nodeready.conf").stdout
    assert "ProcessSizeMax=infinity" in limits
    assert plan(observe(on(node), STORE), STORE, STEPS) == []
