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

import base64
import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nodeready.lab.network import ip, listening
from nodeready.lab.state import LabError, environment

# --- The freezer cgroups (v1) of a lab with Slurm: a group per node, below which Slurm puts jobs.
#
# The machine has one freezer, so the groups outlive the nodes: a lab's groups are below a group of
# its name, and go with it. Each command mounts the freezer in a mount namespace of its own.

# Where a node has its cgroups, the freezer among them (cgroup.conf(5), CgroupMountpoint).
CGROUP_ROOT = "/sys/fs/cgroup"

_PREFIX = "nodeready-lab-"

_MOUNT = "mount -t cgroup -o freezer freezer /mnt || exit 32\n"

# A frozen process does not even end when it is killed.
_THAW = """
find "/mnt$1" -name freezer.state -exec sh -c 'for f; do echo THAWED >"$f"; done' sh {} +
"""

# A process that has just ended may be in its group for a moment more.
_REMOVE = """
for i in $(seq 100); do
    [ -d "/mnt$1" ] || exit 0
    find "/mnt$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.05
done
exit 1
"""


def freezer_available() -> bool:
    """Can nodes have the v1 freezer here?"""
    return os.path.isdir(CGROUP_ROOT) and _freezer("", "").returncode == 0


def freezer_group(lab: str, node: str = "") -> str:
    """The group of a node, or the one above those of all the lab's nodes."""
    return f"/{_PREFIX}{lab}/{node}".rstrip("/")


def freezer_group_of(pid: int) -> str:
    """The group of the node whose process 1 this is; "" when it has none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "freezer" and path.startswith(f"/{_PREFIX}"):
            return path
    return ""


def join_group(path: str) -> None:
    """Put this process, which has a mount namespace of its own, into a new group.

    The group is the root of the freezer that it mounts and of what /proc says about its
    descendants (cgroup_namespaces(7)). Raises OSError.
    """
    mount(
        "cgroup",
        CGROUP_ROOT,
        "tmpfs",
        NOSUID | NODEV | NOEXEC,
        "mode=755",
    )
    freezer = f"{CGROUP_ROOT}/freezer"
    os.mkdir(freezer)
    mount("freezer", freezer, "cgroup", 0, "freezer")
    os.makedirs(freezer + path, exist_ok=True)
    Path(freezer + path, "cgroup.procs").write_text("0")
    unshare(NEWCGROUP)
    umount(freezer)
    mount("freezer", freezer, "cgroup", NOSUID | NODEV | NOEXEC, "freezer")


def thaw_group(path: str) -> None:
    """Let everything below this group go on, to whatever end."""
    _freezer(_THAW, path)


def remove_group(path: str) -> None:
    """Remove this group and all below it; nothing lives in them. Raises LabError."""
    if _freezer(_REMOVE, path).returncode == 1:
        raise LabError(f"the cgroup {path} (v1, freezer) cannot be removed: who is in it?")


def _freezer(script: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run a script that finds the freezer at /mnt; exit status 32: it could not be mounted."""
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", _MOUNT + script, "sh", path],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )


# --- In the node's process and namespaces: its mounts, name, address, then its init.
#
# All nodes of a lab share one read-only layer, `base` (see nodeready.lab.image); a node's writes
# go to `nodes/NAME/GENERATION/upper0`.

# How a process of the lab is recognised: argument 3 of its shell; 4 is the lab's directory.
MARK = "nodeready-lab"

# Process 1 of a node. It applies the persisted sysctls as a boot does, with the distribution's
# own reader, or procps' where there is no systemd; runs what the node's hardware, Slurm and its
# fault need; starts sshd; and stays to reap orphans, also when sshd is stopped.
INIT = """
for s in /usr/lib/systemd/systemd-sysctl /lib/systemd/systemd-sysctl /usr/sbin/sysctl; do
    case $s in */sysctl) set_all='--quiet --system' ;; *) set_all= ;; esac
    if [ -x "$s" ]; then "$s" $set_all; break; fi
done
for s in start slurm fault; do
    if [ -e /.lab/$s ]; then sh -e /.lab/$s || exit; fi
done
/usr/sbin/sshd -D -e &
while :; do sleep 86400 & wait; done
"""

# The switch holds the bridge of a lab in a network namespace of its own: the machine's
# firewall, which may filter bridges (Docker), and its udev never see the nodes.
SWITCH = "while :; do sleep 86400; done"

# What a service gets from systemd on a fresh distribution, whatever our own shell has.
_INFINITY = resource.RLIM_INFINITY
LIMITS = {
    resource.RLIMIT_CORE: (0, _INFINITY),
    resource.RLIMIT_NOFILE: (1024, 524288),
    resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20),
    resource.RLIMIT_STACK: (8 << 20, _INFINITY),
}

# The kernel unmounts for a dead node in the background, within milliseconds when idle.
RELEASE_S = 10.0

# Where `base` keeps what is laid over /proc and /sys.
STASH = "/.lab"

# The real /sys, once more, where a directory of it is replaced by one with links to the rest.
REAL_SYS = f"{STASH}/sysfs"


def become_switch(directory: str) -> NoReturn:
    """Turn the calling process, forked into a new PID namespace, into the lab's switch."""
    os.setsid()
    os.chdir("/")
    unshare(NEWNET)
    _exec_init(SWITCH, directory, "switch", os.open("/dev/null", os.O_RDWR))


def become_node(directory: str, spec: dict[str, Any], status: int, go: int) -> NoReturn:
    """Turn the calling process, forked into a new PID namespace, into the node `spec`.

    Writes one byte to `status` when its network namespace is there, and waits for one from
    `go` before it configures the network. Raises OSError.
    """
    os.setsid()
    fs = Path(directory, "fs")
    log = os.open(fs / "nodes" / spec["name"] / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    unshare(NEWNS | NEWNET | NEWUTS | NEWIPC)
    os.write(status, b"n")
    mount("", "/", flags=REC | PRIVATE)
    root = _mount_root(fs, spec)
    _mount_kernel(root)
    pivot_root(root)
    _overlay_kernel(spec["targets"])
    if spec["freezer"]:
        join_group(spec["freezer"])
    socket.sethostname(spec["name"])
    for path in spec["gone"]:
        _remove(path)
    for path, item in spec["files"].items():
        _write(Path(path), base64.b64decode(item["data"]), item["mode"])
    if os.read(go, 1) != b"g":
        raise OSError("the network of the node was not made")
    interface_up("lo")
    interface_up("eth0", ipaddress.IPv4Interface(spec["address"]))
    drop_machine_capabilities()
    _exec_init(INIT, directory, spec["name"], log)


def _exec_init(script: str, directory: str, name: str, log: int) -> NoReturn:
    os.umask(0o022)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Python ignores SIGPIPE, and a script's shell SIGINT and SIGQUIT of what it leaves in the
    # background. An ignored signal would be inherited by all of the node.
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for limit, soft_hard in LIMITS.items():
        # Refused to root without CAP_SYS_RESOURCE: then what we were given is all there is.
        with contextlib.suppress(ValueError):
            resource.setrlimit(limit, soft_hard)
    die_with_parent(0)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    os.execve("/bin/sh", ["sh", "-c", script, MARK, directory, name], environment)


def _mount_root(fs: Path, spec: dict[str, Any]) -> str:
    """The root: writes over `base` over this machine's own files."""
    home = fs / "nodes" / spec["name"]
    root = home / "root"
    root.mkdir(exist_ok=True)
    generation = home / spec["generation"]
    for number, under in enumerate(["/", *spec["submounts"]]):
        # An overlay does not look into other file systems mounted below its lower directory
        # (a separate /usr or /var): each of those is an overlay of its own.
        upper = generation / f"upper{number}"
        work = generation / f"work{number}"
        for path in (upper, work):
            path.mkdir(parents=True, exist_ok=True)
        lower = [str(fs / "base") + under.rstrip("/"), under]
        layers = ":".join(path for path in lower if os.path.isdir(path))
        options = f"lowerdir={layers},upperdir={upper},workdir={work},redirect_dir=on"
        _mount_overlay(str(root) + under.rstrip("/"), options)
    return str(root)


def _mount_overlay(target: str, options: str) -> None:
    """Mount it; after a restart the kernel may still be letting go of the same directories."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            mount("overlay", target, "overlay", 0, options)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _mount_kernel(root: str) -> None:
    safe = NOSUID | NODEV | NOEXEC
    mount("proc", f"{root}/proc", "proc", safe)
    mount("sysfs", f"{root}/sys", "sysfs", safe | RDONLY)
    pts = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    mount("devpts", f"{root}/dev/pts", "devpts", NOSUID | NOEXEC, pts)
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", NOSUID | NODEV, "mode=1777")


def _overlay_kernel(targets: list[str]) -> None:
    """Lay the node's own /proc/sys and the profile's hardware over the real ones.

    What belongs to a namespace stays real: /proc/sys/net, the host name.
    """
    sys_dir = Path(STASH, "proc/sys")
    real = ["net", "kernel/hostname", "kernel/domainname", "kernel/random/uuid"]
    real = [path for path in real if (sys_dir / path).exists()]
    for path in real:
        _bind(f"/proc/sys/{path}", str(sys_dir / path))
    (sys_dir / "kernel/random/boot_id").write_text(f"{uuid.uuid4()}\n")
    mount(str(sys_dir), "/proc/sys", flags=BIND | REC)
    for path in real:
        umount(str(sys_dir / path), DETACH)
    _bind(f"{STASH}/proc/cmdline", "/proc/cmdline")
    # A crash by sysrq would be the machine's, not the node's.
    if os.path.exists("/proc/sysrq-trigger"):
        _bind("/dev/null", "/proc/sysrq-trigger")
    if os.path.isdir(REAL_SYS):
        safe = NOSUID | NODEV | NOEXEC
        mount("sysfs", REAL_SYS, "sysfs", safe | RDONLY)
    for target in targets:
        _bind(STASH + target, target)


def _bind(source: str, target: str) -> None:
    mount(source, target, flags=BIND)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(data)
        os.fchmod(out.fileno(), mode)


# --- In the helper's process: fork the nodes, connect them, report them.

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

    def read_status(self) -> bytes:
        """The node's next report; empty when it runs its init."""
        return os.read(self.status, 4096)


def report(**line: Any) -> None:
    """Answer the caller."""
    print(json.dumps(line), flush=True)


def fork_in_pid_namespace() -> int:
    """Fork a child that is process 1 of a new PID namespace, and dies with this process."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(NEWPID)
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
        else:
            setns(own, NEWPID)
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
    report(switch=pid)
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
        status = node.read_status()
        if status == b"n":
            waiting.append(node)
        else:
            report(node=node.name, error=(status or b"its process ended").decode())
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
        problem = node.read_status()
        if problem:
            report(node=node.name, error=problem.decode())
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
                report(node=name, pid=pid)
                del pending[name]
            elif os.waitpid(pid, os.WNOHANG)[0]:
                report(node=name, error=f"its init ended: {last_words(directory, name)}")
                del pending[name]
        if not pending or time.monotonic() > deadline:
            break
        select.select([], [], [], 0.005)
    return pending


def main(directory: str) -> None:
    """Carry out the plan on standard input."""
    die_with_parent(signal.SIGKILL)
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
        report(node=name, error="sshd does not listen; see its log")


# <linux/sched.h>
NEWNS = 0x00020000
NEWCGROUP = 0x02000000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWPID = 0x20000000
NEWNET = 0x40000000

# <linux/mount.h>
RDONLY = 1
NOSUID = 2
NODEV = 4
NOEXEC = 8
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
DETACH = 2

# <linux/prctl.h> and <linux/capability.h>
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_CAP_SYS_MODULE = 16
_CAP_SYS_RAWIO = 17
_CAP_SYS_TIME = 25

# <linux/sockios.h>, <linux/if.h>
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_IFF_UP = 1

# pivot_root has no wrapper in libc. The generic table (41) serves aarch64, riscv64, loongarch64.
_PIVOT_ROOT = {"x86_64": 155, "ppc64le": 203, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Give this process namespaces of its own (NEWPID: its next children)."""
    _check(_libc.unshare(flags), "new namespaces")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that `fd` (a /proc/PID/ns file) stands for."""
    _check(_libc.setns(fd, kind), "enter a namespace")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(done, f"mount {kind or 'bind'} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), f"unmount {target}")


def pivot_root(new: str) -> None:
    """Make `new`, a mount point, the root of this mount namespace and let the old one go."""
    os.chdir(new)
    number = _PIVOT_ROOT.get(platform.machine(), 41)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), f"pivot_root to {new}")
    # Both are now stacked on "/": what is detached here is the old root.
    umount(".", DETACH)
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the parent ends; 0: no longer."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "follow the parent")


def drop_machine_capabilities() -> None:
    """Take away what would reach the whole machine from a node: modules, raw I/O, the clock."""
    for capability in (_CAP_SYS_MODULE, _CAP_SYS_RAWIO, _CAP_SYS_TIME):
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "drop a capability")


def interface_up(name: str, address: ipaddress.IPv4Interface | None = None) -> None:
    """Bring an interface of this network namespace up, with an IPv4 address if there is one."""

    def request(number: int, tail: bytes) -> None:
        fcntl.ioctl(sock, number, struct.pack("16s24s", name.encode(), tail))

    def inet(packed: bytes) -> bytes:
        return struct.pack("HH4s", socket.AF_INET, 0, packed)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if address:
            request(_SIOCSIFADDR, inet(address.packed))
            request(_SIOCSIFNETMASK, inet(address.network.netmask.packed))
        request(_SIOCSIFFLAGS, struct.pack("h", _IFF_UP))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        report(error=str(error))
        sys.exit(1)
