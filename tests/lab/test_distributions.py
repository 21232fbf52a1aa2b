"""The tools of other distributions that Debian packages: what they do, we read and say.

dnf and zypper with a repository of tiny packages, firewalld, tuned. tests/lab/data has the rows;
those of test_debug_tools.py's stand-ins are held here against the real dnf and zypper.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeready.core.policy import Policy
from nodeready.core.sysctl import BootSetting
from nodeready.subjects.ports.facts import Ports
from tests.cases import cases, read_data, read_table
from tests.command import wait_for
from tests.helpers import observe, on
from tests.lab.looks import judged
from tests.lab.test_debug_tools import CALLS, FAILURES, deploy, refused, status, want
from tests.lab.tools_root import ToolsNode, build, lacking

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("tools_root")]


@pytest.fixture(scope="module")
def tree() -> Path:
    if reason := lacking():
        pytest.skip(reason)
    return build()


@pytest.fixture
def node(tree: Path, tmp_path: Path) -> Iterator[ToolsNode]:
    started = ToolsNode(tree, tmp_path)
    yield started
    started.end()


@pytest.fixture(params=["dnf", "zypper"])
def manager(request: pytest.FixtureRequest, node: ToolsNode) -> str:
    """The only one on the node."""
    node.run(f"rm /usr/bin/{'zypper' if request.param == 'dnf' else 'dnf'}")
    return str(request.param)


# --- Packages.

INDEX = "rm -r /srv/local/repodata; createrepo_c -q /srv/local; dnf clean metadata; zypper refresh"
#: Waits until the installation has its locks.
HELD = ">/dev/null 2>&1 & until [ -e /run/holds ]; do sleep .1; done"
#: A row's case -> what makes it so; the manager's own installation is `locked`.
SITUATIONS = read_table(__file__, "SITUATIONS")
ROWS = [
    pytest.param(name, row, id=f"{name}-{row['case']}")
    for name in ("dnf", "zypper")
    for row in FAILURES[name]
]


def same_pid(text: str) -> str:
    """With 1 as the number of each process."""
    return re.sub(r"\b(pid|by|PID) \d+", r"\1 1", text)


@pytest.mark.parametrize(("manager", "row"), ROWS, indirect=["manager"])
def test_a_failure_is_as_the_stand_in_has_it(node: ToolsNode, manager, row):
    yes = "-y" if manager == "dnf" else "-n"
    locked = f"touch /run/slow; {manager} {yes} install nr-slow {HELD}"
    node.run(SITUATIONS.get(row["case"], locked))
    words = CALLS[manager].partition(":")[2].replace(f"nr-{manager}", "pdsh")
    done = node.run(f"ZYPP_LOCK_TIMEOUT=1 {manager} {words} 2>&1", check=False)
    assert done.returncode == row["status"], done.stdout
    assert set(row["says"].splitlines()) <= set(same_pid(done.stdout).splitlines()), done.stdout
    message = refused(node, want("pdsh", wait_s=2))
    assert message.endswith(row["end"]), message
    assert ("locked by process " in message) == ("waited" in row["end"]), message


def test_packages_are_installed_repaired_and_waited_for(node: ToolsNode, manager):
    names = ("gdb", "strace", "pdsh", "pdsh-rcmd-ssh")
    assert status(node, want(*names)) == "fail"
    assert deploy(node, want(*names)) == 1
    assert node.run("gdb; strace; pdsh").stdout == "here\n" * 3
    assert status(node, want(*names)) == "ok"
    assert deploy(node, want(*names)) == 0

    # The package is there, and its program is not.
    node.run("rm /usr/bin/strace")
    assert status(node, want(*names)) == "fail"
    assert deploy(node, want(*names)) == 1
    assert node.run("strace").stdout == "here\n"

    # A package that nobody has keeps none of the others, nor does a mirror that is skipped.
    node.run("rpm -e pdsh gdb")
    message = refused(node, want("nr-nowhere", "pdsh"))
    assert "not installed: nr-nowhere: " in message
    for path in ("/etc/yum.repos.d/gone.repo", "/etc/zypp/repos.d/gone.repo"):
        node.write(
            path,
            "[gone]\nname=gone\nenabled=1\ngpgcheck=0\nskip_if_unavailable=1\nbaseurl=http://mirror.invalid\n",
        )
    message = refused(node, want("nr-nowhere", "gdb"))
    assert "not installed: nr-nowhere: " in message
    assert "mirror.invalid" in message
    assert node.run("gdb; pdsh").stdout == "here\n" * 2
    node.run("rm /etc/yum.repos.d/gone.repo /etc/zypp/repos.d/gone.repo")

    # Somebody's installation ends while we wait.
    node.run(f"rpm -e pdsh; {SITUATIONS['rpm']}; (sleep 3; rm /run/slow) >/dev/null 2>&1 &")
    assert deploy(node, want("pdsh", wait_s=60)) == 1
    assert node.run("pdsh").stdout == "here\n"

    # No repository has the package any more.
    node.run(f"rm /usr/bin/strace /srv/local/noarch/strace-1-1.*; {INDEX} || :")
    message = refused(node, want(*names))
    assert re.search(r"/usr/bin/strace is still gone: .*strace.* not available", message), message


# --- Packet filters.

DBUS = "dbus-daemon --system --fork"


def check_rules(node: ToolsNode, manager: str, case: dict[str, Any]) -> None:
    """No verdict is the opposite of what the kernel does with a connection."""
    node.run(f"({read_data(__file__, 'peer.sh')}) >/dev/null 2>&1 </dev/null")
    for command in case["commands"]:
        node.run(command)
    result = judged(node, Policy(), "ports")["ports.firewall"]
    assert (result.status, case["words"] in result.actual) == (case["status"], True), result
    assert f"({manager})" in result.actual
    assert node.run(read_data(__file__, "connect.sh")).stdout == case["meets"] + "\n"


@pytest.mark.parametrize("case", cases(__file__, "data/distributions.json", "firewalld"))
def test_the_rules_of_firewalld_are_read(node: ToolsNode, case):
    node.run(f"{DBUS}; firewalld --nopid >/dev/null 2>&1")
    wait_for(lambda: node.run("firewall-cmd --state", check=False).returncode == 0)
    check_rules(node, "firewalld", case)


@pytest.mark.parametrize("case", cases(__file__, "data/distributions.json", "ufw"))
def test_the_rules_and_sysctls_of_ufw_are_read(node: ToolsNode, case):
    node.write("/etc/ufw/sysctl.conf", f"{RANGE.replace('.', '/')}=20000 30000\n")
    check_rules(node, "ufw", case)
    boot = next_boot(node)
    assert node.run(f"sysctl -n {RANGE}").stdout.split() == ["20000", "30000"]
    assert (boot.source, boot.text("")) == ("/etc/ufw/sysctl.conf:1", ", next boot 20000 30000")


# --- tuned.

RANGE = "net.ipv4.ip_local_port_range"
SYSCTL = f"/lib/systemd/systemd-sysctl --prefix=/{RANGE.replace('.', '/')}"


def next_boot(node: ToolsNode) -> BootSetting:
    """What the files say of it."""
    ports: Ports = observe(on(node), Policy(), ("ports",))["ports"]
    return ports.ephemeral_boot


@pytest.mark.parametrize("case", cases(__file__, "data/distributions.json", "tuned"))
def test_what_tuned_sets_at_boot_is_what_we_say(node: ToolsNode, case):
    for path, text in case["files"].items():
        node.write(path, text.replace("RANGE", RANGE))
    node.write("/etc/tuned/active_profile", case.get("active", "nr-site") + "\n")
    node.write("/etc/tuned/profile_mode", "manual\n")
    boot = next_boot(node)
    # The boot: systemd-sysctl, then tuned.
    node.run(f"{SYSCTL}; {DBUS}; tuned -d -P /run/tuned.pid -l /run/tuned.log")
    wait_for(lambda: "applied" in node.run("cat /run/tuned.log", check=False).stdout)
    assert node.run(f"sysctl -n {RANGE}").stdout.split() == case["live"].split()
    assert boot.winner is not None
    assert (boot.winner.value, boot.source) == (case["live"], case["source"])
