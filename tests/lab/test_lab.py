"""The lab gives what a cluster has: nodes of their own, real ssh, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.lab import Lab, LabError, Node, image, network, processes, state
from nodeready.lab.keys import new_key
from nodeready.lab.profiles import PROFILES

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
Fresh = Callable[..., list[Node]]
Done = subprocess.CompletedProcess[str]


def nodeready(*words: str, **environment: str) -> Done:
    """The command itself."""
    argv = [sys.executable, "-m", "nodeready", *words]
    env = {**os.environ, **environment}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def traces(name: str, index: int | None) -> list[str]:
    """Whatever this machine still has of a lab."""
    directory = state.ROOT / name
    found = [f"process {pid}" for pid in processes.of_lab(directory)]
    if directory.exists():
        found.append(str(directory))
    if index is not None and Path("/sys/class/net", network.interface(index)).exists():
        found.append(network.interface(index))
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            if f"{directory}/" in mounts.read_text():
                found.append(f"mount in {mounts.parent}")
        except OSError:
            continue
    return found


@pytest.fixture
def name(own_lab: str) -> str:
    """The name of a lab that does not exist."""
    assert traces(own_lab, None) == []
    return own_lab


def index_of(name: str) -> int | None:
    known = state.load(name)
    return known.index if known else None


def test_life_of_a_lab(name: str) -> None:
    first = nodeready("lab", "up", "--nodes", "2", "--name", name)
    assert (first.returncode, first.stdout.splitlines()[0]) == (
        0,
        f"{name}: 2 nodes up: {name}[001-002]",
    )
    lab = Lab.load(name)
    index = index_of(name)
    assert lab is not None
    assert traces(name, index) != []
    pids = [node.pid for node in lab.nodes]

    again = nodeready("lab", "up", "--nodes", "2", "--name", name)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith(f"{name}: already up, 2 nodes")
    assert [node.pid for node in lab.nodes] == pids

    shown = nodeready("lab", "status").stdout
    row = next(line for line in shown.splitlines() if line.split()[0] == name)
    addresses = f"{lab.nodes[0].address}-{lab.nodes[1].address}"
    assert row.split() == [name, "cpu", "2/2", f"{name}[001-002]", addresses]
    login = next(line for line in shown.splitlines() if line.startswith(f"{name}: log in: "))
    command = [*login.partition("log in: ")[2].split(), "hostname"]
    assert subprocess.check_output(command, text=True) == f"{name}001\n"

    ended = nodeready("lab", "down", "--name", name)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{name}: ended\n", "")
    assert traces(name, index) == []

    nothing = nodeready("lab", "down", "--name", name)
    assert (nothing.returncode, nothing.stdout) == (0, f"{name}: no such lab runs\n")


def test_up_starts_what_is_dead_or_missing(name: str) -> None:
    lab = Lab.up(name, 2)
    healthy, dead = lab.nodes
    dead.run("echo mine > /etc/kept; echo gone > /run/gone")
    dead.kill()
    status = nodeready("lab", "status")
    assert status.returncode == 3
    assert f"{name}: dead: {dead.name}" in status.stdout
    pid = healthy.pid

    done = nodeready("lab", "up", "--nodes", "3", "--name", name)
    assert done.stdout.startswith(f"{name}: 2 of 3 nodes started")
    lab = Lab.load(name)
    assert lab is not None
    assert lab.nodes[0].pid == pid
    assert lab.nodes[1].run("cat /etc/kept; ls /run/gone", check=False).stdout == "mine\n"
    assert lab.nodes[0].run(f"getent hosts {lab.nodes[2].name}").stdout.split() == [
        lab.nodes[2].address,
        lab.nodes[2].name,
    ]


def test_up_replaces_a_dead_switch(name: str) -> None:
    Lab.up(name, 1)
    known = state.load(name)
    assert known is not None
    processes.end(known.switch)
    Lab.up(name, 1).nodes[0].run("true")


def test_two_ups_at_once_make_one_lab(name: str) -> None:
    answers: list[Done] = []
    threads = [
        threading.Thread(target=lambda: answers.append(nodeready("lab", "up", "--name", name)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.returncode for done in answers] == [0, 0]
    assert sorted("already" in done.stdout for done in answers) == [False, True]


def starting(name: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "nodeready", "lab", "up", "--nodes", "48", "--name", name]
    return subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


MOMENTS = {
    "as soon as it has a directory": lambda directory: directory.exists(),
    "before the first node": lambda directory: (directory / "fs" / "nodes").exists(),
    "with some nodes running": lambda directory: len(processes.of_lab(directory)) > 8,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_up_cut_short_leaves_nothing(name: str, moment: str, signum: signal.Signals) -> None:
    directory = state.directory(name)
    with starting(name) as process:
        while process.poll() is None and not MOMENTS[moment](directory):
            time.sleep(0.001)
        index = index_of(name)
        process.send_signal(signum)
        _, errors = process.communicate()
    if signum == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert Lab.load(name) is None
        unfinished = nodeready("lab", "status")
        assert (unfinished.returncode, f"{name}: unfinished" in unfinished.stdout) == (3, True)
        assert nodeready("lab", "down", "--name", name).returncode == 0
    else:
        assert process.returncode == 130
        assert "Traceback" not in errors
    assert traces(name, index) == []


def test_up_after_a_crash_begins_anew(name: str) -> None:
    directory = state.directory(name)
    with starting(name) as process:
        while process.poll() is None and not MOMENTS["with some nodes running"](directory):
            time.sleep(0.001)
        process.kill()
    done = nodeready("lab", "up", "--nodes", "1", "--name", name)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{name}: 1 nodes up: {name}001")
    assert len(processes.of_lab(directory)) == 2  # the switch and the node


def test_a_broken_state_file_is_named_and_cleaned_up(name: str) -> None:
    Lab.up(name, 1)
    index = index_of(name)
    (state.directory(name) / "state.json").write_text('{"name": ')
    for words in (["up", "--name", name], ["status"]):
        done = nodeready("lab", *words)
        assert done.returncode in (1, 3)
        assert f"clean up: nodeready lab down --name {name}" in done.stdout + done.stderr
    assert nodeready("lab", "down", "--name", name).returncode == 0
    deadline = time.monotonic() + 30
    while traces(name, index) and time.monotonic() < deadline:
        time.sleep(0.1)  # the kernel takes the interface away after its namespace
    assert traces(name, index) == []


def test_a_running_lab_survives_a_crash_while_it_grows(name: str) -> None:
    lab = Lab.up(name, 1)
    pid = lab.nodes[0].pid
    directory = state.directory(name)
    with starting(name) as process:
        while process.poll() is None and not MOMENTS["with some nodes running"](directory):
            time.sleep(0.001)
        process.kill()
    assert nodeready("lab", "up", "--nodes", "4", "--name", name).returncode == 0
    found = Lab.load(name)
    assert found is not None
    assert found.nodes[0].pid == pid
    assert [node.run("hostname").stdout.strip() for node in found.nodes[:4]] == [
        f"{name}{number:03d}" for number in range(1, 5)
    ]
    assert len(processes.of_lab(directory)) == 1 + len(found.nodes)


def test_ssh_as_root_and_as_the_user(lab: Lab) -> None:
    node = lab.nodes[1]
    assert node.run("id -un; hostname; pwd").stdout.split() == ["root", node.name, "/root"]
    as_user = node.run("id -u; pwd; sudo -n id -u", user="ml").stdout.split()
    assert as_user == ["2000", "/home/ml", "0"]
    refused = node.run("true", user="nobody", check=False)
    assert refused.returncode == 255
    assert "Permission denied" in refused.stderr
    seen = node.testinfra()
    assert seen.user("ml").shell == "/bin/bash"
    assert seen.file("/etc/hostname").content_string == f"{node.name}\n"
    assert seen.socket("tcp://0.0.0.0:22").is_listening


def test_nodes_know_names_but_no_host_keys(lab: Lab) -> None:
    here, there = lab.nodes[0], lab.nodes[2]
    for user in ("root", "ml"):
        asks = here.run(f"ssh -o BatchMode=yes {there.name} hostname", user=user, check=False)
        assert asks.returncode == 255
        assert "Host key verification failed" in asks.stderr
        quiet = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        there_is = here.run(f"ssh {quiet} {there.name} hostname", user=user)
        assert there_is.stdout == f"{there.name}\n"


def test_sysctls_are_the_nodes_own(fresh_nodes: Fresh) -> None:
    one, other = fresh_nodes(2)
    machine = [Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/fs/suid_dumpable")]
    before = [path.read_text() for path in machine]
    assert one.run("sysctl -n kernel.yama.ptrace_scope kernel.core_pattern").stdout == "1\ncore\n"
    one.run("sysctl -qw kernel.yama.ptrace_scope=0")
    one.run("echo '/tmp/core.%e' > /proc/sys/kernel/core_pattern")
    one.run("sysctl -qw kernel.numa_balancing=0 fs.suid_dumpable=2 net.ipv4.ip_forward=1")
    keys = "kernel.yama.ptrace_scope kernel.core_pattern fs.suid_dumpable net.ipv4.ip_forward"
    assert one.run(f"sysctl -n {keys}").stdout.split() == ["0", "/tmp/core.%e", "2", "1"]
    assert other.run(f"sysctl -n {keys}").stdout.split() == ["1", "core", "0", "0"]
    assert [path.read_text() for path in machine] == before
    assert one.run("cat /proc/sys/kernel/hostname").stdout == f"{one.name}\n"
    boots = {node.read("/proc/sys/kernel/random/boot_id") for node in (one, other)}
    assert len(boots | {state.boot_id() + "\n"}) == 3


def test_processes_and_files_are_the_nodes_own(lab: Lab) -> None:
    node = lab.nodes[0]
    with subprocess.Popen(["sleep", "98765"]) as outside:
        try:
            assert node.run("pgrep -f 'sleep 9876[5]'", check=False).returncode == 1
        finally:
            outside.kill()
    marker = f"/usr/local/{node.name}"
    node.run(f"touch {marker} /tmp/{node.name}")
    assert not Path(marker).exists()
    assert lab.nodes[1].run(f"ls {marker}", check=False).returncode == 2
    assert node.run("ls /home").stdout == "ml\n"
    assert node.run("ls /sys/class/net").stdout.split() == ["eth0", "lo"]
    assert node.run("echo x > /sys/kernel/profiling", check=False).returncode == 1


def test_orphans_are_reaped(fresh_node: Node) -> None:
    fresh_node.run("(setsid sh -c 'sleep 0.1 & sleep 0.1 & exit' >/dev/null 2>&1 &)")
    fresh_node.run("sleep 0.5")
    assert fresh_node.run("ps -eo state,ppid,comm").stdout.count("Z ") == 0
    fresh_node.stop_sshd()
    fresh_node.enter(["sh", "-c", "(setsid sleep 0.1 &)"])
    fresh_node.enter(["sleep", "0.5"])
    assert fresh_node.enter(["ps", "-eo", "state,ppid,comm"]).stdout.count("Z ") == 0


@pytest.mark.parametrize(("profile", "accelerators"), [("cpu", 0), ("mi300x", 8)])
def test_profiles_show_their_hardware(fresh_nodes: Fresh, profile: str, accelerators: int) -> None:
    assert profile in PROFILES
    node = fresh_nodes(1, profile=profile)[0]
    script = "cd /sys/bus/pci/devices && for d in *; do cat $d/vendor $d/device $d/class; done"
    seen = node.run(script).stdout
    assert seen.count("0x1002\n0x74a1\n0x120000\n") == accelerators
    assert node.run("ls /sys/class/infiniband", check=False).stdout == ""
    assert node.read("/proc/cmdline") == "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet\n"
    node.write("/proc/cmdline", "quiet iommu=pt\n")
    assert node.run("cat /proc/cmdline").stdout == "quiet iommu=pt\n"
    assert "iommu=pt\n" not in Path("/proc/cmdline").read_text()


def test_files_given_at_the_start(fresh_nodes: Fresh) -> None:
    latin = b"# caf\xe9\nkernel.yama.ptrace_scope = 2\n"
    files = {"/etc/sysctl.d/10-x.conf": latin, "/opt/tool/run": ("#!/bin/sh\necho hi\n", 0o755)}
    node = fresh_nodes(1, files=files)[0]
    assert node.read("/etc/sysctl.d/10-x.conf").encode("utf-8", "surrogateescape") == latin
    assert node.run("/opt/tool/run; stat -c %a /opt/tool/run").stdout == "hi\n755\n"


def test_reboot_keeps_the_disk_and_reads_sysctls_as_a_boot_does(fresh_node: Node) -> None:
    if not any(Path(p, "systemd/systemd-sysctl").exists() for p in ("/usr/lib", "/lib")):
        pytest.skip("this machine has no systemd-sysctl")
    fresh_node.write("/etc/sysctl.d/50-first.conf", "kernel.yama.ptrace_scope = 3\n")
    fresh_node.write("/etc/sysctl.d/60-last.conf", "kernel.yama.ptrace_scope = 2\n")
    fresh_node.run("sysctl -qw kernel.yama.ptrace_scope=0; touch /tmp/x /run/x /root/x")
    fresh_node.reboot()
    assert fresh_node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "2\n"
    assert fresh_node.run("ls /tmp /run/x /root", check=False).stdout.split() == [
        "/root:",
        "x",
        "/tmp:",
    ]


def test_a_reset_node_is_as_on_the_first_day(fresh_node: Node, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    shutil.copy(fresh_node.lab.known_hosts, known)
    fresh_node.run("rm -rf /etc/ssh/ssh_config.d /usr/bin/python3 && echo x > /etc/environment")
    fresh_node.reset()
    assert fresh_node.run("ls -d /etc/ssh/ssh_config.d; cat /etc/environment").stdout == (
        "/etc/ssh/ssh_config.d\n"
    )
    # Its host key is the same one: nobody has to be told.
    argv = ["ssh", "-F", str(fresh_node.lab.ssh_config), "-o", f"UserKnownHostsFile={known}"]
    assert subprocess.run([*argv, fresh_node.name, "true"], check=False).returncode == 0

    fresh_node.reset(new_host_key=True)
    fresh_node.run("true")
    refused = subprocess.run(
        [*argv, fresh_node.name, "true"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


def test_faults(fresh_node: Node) -> None:
    def try_ssh() -> str:
        argv = ["ssh", "-F", str(fresh_node.lab.ssh_config), "-o", "ConnectTimeout=2"]
        argv += [fresh_node.name, "echo fine"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    fresh_node.freeze()
    assert "timed out" in try_ssh()
    fresh_node.thaw()
    assert try_ssh() == "fine\n"
    fresh_node.pause_sshd()
    assert "banner" in try_ssh()
    fresh_node.resume_sshd()
    assert try_ssh() == "fine\n"
    fresh_node.stop_sshd()
    assert "refused" in try_ssh()
    assert fresh_node.status == "no sshd"
    fresh_node.resume_sshd()
    assert try_ssh() == "fine\n"
    fresh_node.kill()
    assert fresh_node.status == "dead"
    assert "fine" not in try_ssh()
    with pytest.raises(LabError, match="is dead"):
        fresh_node.enter(["true"])


def test_labs_do_not_meet(lab: Lab, fresh_node: Node) -> None:
    assert fresh_node.lab.subnet != lab.subnet
    there = lab.nodes[0].address
    tried = fresh_node.run(f"ssh -o ConnectTimeout=2 root@{there} true", check=False)
    assert tried.returncode == 255
    assert "unreachable" in tried.stderr


def test_what_is_ours_on_this_machine_does_not_reach_a_node(
    lab_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "etc" / "99-nodeready.conf"
    ours.parent.mkdir()
    ours.write_text("x")
    monkeypatch.setattr(image, "OURS", (str(tmp_path / "etc"),))
    image.build(tmp_path / "base", PROFILES["cpu"], new_key("test"))
    hidden = (tmp_path / "base" / str(ours).lstrip("/")).lstat()
    assert (hidden.st_mode & 0o170000, hidden.st_rdev) == (0o020000, 0)
    opaque = tmp_path / "base" / "etc" / "sysctl.d"
    assert os.getxattr(opaque, "trusted.overlay.opaque") == b"y"


def test_a_separate_file_system_of_the_machine_is_part_of_the_node(name: str) -> None:
    mounted = "mount -t tmpfs t /usr/local/share && echo here > /usr/local/share/x"
    script = f"{mounted} && exec {sys.executable} -m nodeready lab up --nodes 1 --name {name}"
    subprocess.run(["unshare", "--mount", "sh", "-c", script], cwd=ROOT, check=True)
    lab = Lab.load(name)
    assert lab is not None
    assert lab.nodes[0].run("cat /usr/local/share/x").stdout == "here\n"


def pyinfra(cwd: Path, *words: str, **environment: str) -> Done:
    argv = [str(Path(sys.executable).with_name("pyinfra")), *words]
    env = {**os.environ, **environment}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_inventory_finds_the_lab(lab: Lab, tmp_path: Path) -> None:
    inventory = str(ROOT / "inventories" / "lab.py")
    done = pyinfra(tmp_path, inventory, "-y", "exec", "--", "hostname", NODEREADY_LAB=lab.name)
    assert done.returncode == 0, done.stderr
    for node in lab.nodes:
        assert f"[{node.name}] {node.name}" in done.stdout + done.stderr


def test_the_inventory_without_a_lab_is_one_clear_line(tmp_path: Path) -> None:
    inventory = str(ROOT / "inventories" / "lab.py")
    done = pyinfra(tmp_path, inventory, "exec", "--", "hostname", NODEREADY_LAB="nosuch")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "the lab 'nosuch' does not run; start it: nodeready lab up --name nosuch" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("prefix", "environment", "says"),
    [
        (["unshare", "--user"], {}, "run it as root"),
        ([], {"PATH": "/nonexistent"}, "not installed: ssh, nsenter; install openssh-client"),
    ],
    ids=["not root", "programs missing"],
)
def test_a_machine_that_cannot_says_so_in_one_line(
    lab_machine: None, name: str, prefix: list[str], environment: dict[str, str], says: str
) -> None:
    argv = [*prefix, sys.executable, "-m", "nodeready", "lab", "up", "--name", name]
    env = {**os.environ, **environment}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert traces(name, None) == []


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--nodes", "0"],
        ["up", "--profile", "nosuch"],
        ["up", "--name", "../x"],
        ["up", "--name", "Upper"],
        ["down", "--all", "--name", "x"],
    ],
)
def test_wrong_arguments_are_usage_errors(words: list[str]) -> None:
    done = nodeready("lab", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
