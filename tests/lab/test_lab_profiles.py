"""What a shell on a node sees of its hardware, healthy and broken; what is real stays real."""

from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.lab import Lab, LabError, LabNode
from nodeready.lab.faults import FAULTS, find
from nodeready.lab.profiles import PROFILES
from tests.cases import read_data
from tests.command import Terminal
from tests.helpers import nodeready
from tests.paths import DOCS


def test_what_a_profile_does_not_have_stays_real(fresh_nodes):
    """That a healthy node of each profile passes the checks is asked with the faults."""
    node = fresh_nodes(1, profile="h100")[0]
    node.run("ip link set dev eth0 mtu 1480")
    assert node.run("cat /sys/class/net/eth0/mtu").stdout == "1480\n"
    assert node.run("echo x >/sys/class/net/eth0/mtu", check=False).returncode == 1
    classes = set(node.run("ls -L /sys/class 2>/dev/null || :").stdout.split())
    assert {path.name for path in Path("/sys/class").iterdir()} <= classes
    device = node.run("readlink -e /sys/class/infiniband/mlx5_0/device").stdout
    assert device.startswith("/sys/bus/pci/devices/")
    raw, dated = node.run("dmesg").stdout, node.run("dmesg -T").stdout
    assert raw.startswith("[    0.000000] Command line: BOOT_IMAGE=")
    assert dated.splitlines()[-1].partition("] ")[2] == raw.splitlines()[-1].partition("] ")[2]
    assert node.run("ls /dev/kmsg", check=False).returncode == 2
    assert node.run("nvidia-smi --nosuch", check=False).returncode == 6


def rates(node: LabNode) -> list[str]:
    text = node.run("cat /sys/class/infiniband/mlx5_[0-7]/ports/1/rate").stdout
    return [line.split()[0] for line in text.splitlines()]


def test_a_fault_is_on_the_last_node_until_it_is_taken_away(own_lab):
    def up(*words: str) -> str:
        done = nodeready("lab", "up", "--profile", "h100", "--name", own_lab, *words, status=0)
        return done.stdout

    said = up("--nodes", "2", "--fault", "ib-half-rate")
    healthy, broken = nodes = Lab.load(own_lab).nodes  # type: ignore[union-attr]
    assert f"fault on {broken.name}: ib-half-rate: {FAULTS['ib-half-rate'].about}" in said
    assert rates(healthy) == ["400"] * 8
    assert rates(broken) == ["400"] * 3 + ["200"] + ["400"] * 4
    assert f"{own_lab}: fault on {broken.name}: ib-half-rate" in nodeready("lab", "status").stdout

    pids = [node.pid for node in nodes]
    up("--nodes", "2", "--fault", "ib-half-rate")
    assert [node.pid for node in Lab.load(own_lab).nodes] == pids  # type: ignore[union-attr]

    broken.run("echo mine >/etc/kept")
    broken.kill()
    up("--nodes", "2")
    assert rates(broken)[3] == "200"  # what is broken is broken after a restart, too
    up("--nodes", "2", "--fault", "gpu-gone")
    broken = Lab.load(own_lab).nodes[1]  # type: ignore[union-attr]
    assert rates(broken) == ["400"] * 8
    assert broken.run("nvidia-smi -L | wc -l").stdout == "7\n"
    up("--nodes", "2", "--fault", "none")
    assert broken.run("nvidia-smi -L | wc -l; cat /etc/kept").stdout.split() == ["8", "mine"]
    assert f"{own_lab}: fault on" not in nodeready("lab", "status").stdout


def test_a_fault_that_cannot_be_is_said_before_anything_starts(own_lab):
    for fault, status, says in (
        ("nosuch", 2, "no fault 'nosuch'; see `nodeready lab up --fault list`"),
        ("ib-down", 1, "a node of profile cpu cannot have the fault ib-down"),
    ):
        done = nodeready("lab", "up", "--name", own_lab, "--fault", fault)
        assert (done.returncode, done.stdout, says in done.stderr) == (status, "", True), done
        assert Lab.load(own_lab) is None


def test_all_faults_are_listed(tool):
    page = (DOCS / "lab.md").read_text()
    for profile in PROFILES.values():
        assert f"| `{profile.name}` | {profile.about} |" in page
    text = Terminal(tool, "lab", "up", "--fault", "list", columns=80).end().out
    assert max(map(len, text.splitlines())) <= 80

    def shown(*words: str) -> dict[str, str]:
        done = nodeready("lab", "up", *words, "--fault", "list")
        found = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[0] == " "]
        return {name: about.strip() for name, about in found}

    about = shown()
    assert list(about) == list(FAULTS)
    assert all(about[name].startswith(fault.about) for name, fault in FAULTS.items())
    of_one = [name for name, fault in FAULTS.items() if "b200" in fault.profiles]
    assert list(shown("--profile", "b200")) == of_one


def test_a_program_that_a_fault_needs_is_named(monkeypatch):
    monkeypatch.setattr("nodeready.lab.faults.environment", lambda: {"PATH": "/nonexistent"})
    with pytest.raises(LabError, match="the fault firewall needs nft, which is not installed"):
        find("firewall", "cpu")


#: A fault's changes of a disk: a file changed, made, removed; a directory made and removed.
CHANGES = read_data(__file__, "changes.sh")


def disk(node: LabNode) -> str:
    look = "cat /etc/security/limits.conf; stat -c '%n %a %U %F' /etc/was /usr/bin/gdb /etc/mode"
    look += " /etc/mode/inside /etc/security/limits.d /etc/security/limits.d/*"
    return node.run(f"{look}; ls /etc/new /etc/broken", check=False).stdout


def test_what_a_fault_changes_on_the_disk_is_taken_back(fresh_node, monkeypatch):
    node = fresh_node
    node.run("echo 1 >/etc/was; mkdir -m 750 /etc/mode; echo 2 >/etc/mode/inside")
    node.run("echo '* - core 0' >/etc/security/limits.d/site.conf")
    before = disk(node)
    monkeypatch.setitem(FAULTS, "clock", replace(FAULTS["clock"], start=CHANGES))
    node.reboot(fault="clock")
    assert disk(node) != before
    assert node.run("ls /etc/was", check=False).returncode == 2
    node.reboot()
    assert node.run("cat /etc/new/file; stat -c %a /etc/mode").stdout == "x\n700\n"
    node.reboot(fault="")
    assert disk(node) == before
    assert node.run("gdb --version | head -1").stdout.startswith("GNU gdb")
    # What somebody has repaired or added in the meantime stays.
    node.reboot(fault="clock")
    node.run("echo repaired >/etc/was; echo more >/etc/new/mine; echo kept >/etc/kept")
    node.reboot(fault="")
    kept = node.run("cat /etc/was /etc/kept; ls /etc/new; ls /etc/broken", check=False)
    assert kept.stdout.split() == ["repaired", "kept", "mine"]
    # A new node's own files outlive its fault.
    node.reset(files={"/etc/was": ("mine\n", 0o600), "/etc/mode/inside": ""}, fault="clock")
    assert node.run("ls /etc/was", check=False).returncode == 2
    node.reboot(fault="")
    assert node.run("cat /etc/was; stat -c %a /etc/was").stdout == "mine\n600\n"


def test_a_fault_that_cannot_be_set_costs_no_other_node(own_lab, monkeypatch):
    broken = replace(FAULTS["clock"], start="echo no such device >&2\nexit 1\n")
    monkeypatch.setitem(FAULTS, "clock", broken)
    lab = Lab.up(own_lab, 2)
    with pytest.raises(LabError, match="its init ended: no such device"):
        Lab.up(own_lab, 2, fault="clock")
    assert [node.status for node in lab.nodes] == ["up", "dead"]
    found = Lab.up(own_lab, 2).nodes
    assert [(node.status, node.fault) for node in found] == [("up", "")] * 2
