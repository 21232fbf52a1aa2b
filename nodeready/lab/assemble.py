"""From a forked process to the init of a node: its mounts, its name, its address, its init.

All of it runs in the node's own process and namespaces. What is shared with the other nodes of
the lab is one read-only layer, `base` (see nodeready.lab.image); the node's own writes go to
`nodes/NAME/upper.GENERATION`.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import ipaddress
import os
import resource
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

from nodeready.lab import freezer
from nodeready.lab import syscalls as k

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
    k.unshare(k.NEWNET)
    _exec_init(SWITCH, directory, "switch", os.open("/dev/null", os.O_RDWR))


def become_node(directory: str, spec: dict[str, Any], status: int, go: int) -> NoReturn:
    """Turn the calling process, forked into a new PID namespace, into the node `spec`.

    Writes one byte to `status` when its network namespace is there, and waits for one from
    `go` before it configures the network. Raises OSError.
    """
    os.setsid()
    fs = Path(directory, "fs")
    log = os.open(fs / "nodes" / spec["name"] / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    k.unshare(k.NEWNS | k.NEWNET | k.NEWUTS | k.NEWIPC)
    os.write(status, b"n")
    k.mount("", "/", flags=k.REC | k.PRIVATE)
    root = _mount_root(fs, spec)
    _mount_kernel(root)
    k.pivot_root(root)
    _overlay_kernel(spec["targets"])
    if spec["freezer"]:
        freezer.join(spec["freezer"])
    socket.sethostname(spec["name"])
    for path in spec["gone"]:
        _remove(path)
    for path, item in spec["files"].items():
        _write(Path(path), base64.b64decode(item["data"]), item["mode"])
    if os.read(go, 1) != b"g":
        raise OSError("the network of the node was not made")
    k.interface_up("lo")
    k.interface_up("eth0", ipaddress.IPv4Interface(spec["address"]))
    k.drop_machine_capabilities()
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
    k.die_with_parent(0)
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
            k.mount("overlay", target, "overlay", 0, options)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _mount_kernel(root: str) -> None:
    safe = k.NOSUID | k.NODEV | k.NOEXEC
    k.mount("proc", f"{root}/proc", "proc", safe)
    k.mount("sysfs", f"{root}/sys", "sysfs", safe | k.RDONLY)
    pts = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    k.mount("devpts", f"{root}/dev/pts", "devpts", k.NOSUID | k.NOEXEC, pts)
    k.mount("tmpfs", f"{root}/dev/shm", "tmpfs", k.NOSUID | k.NODEV, "mode=1777")


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
    k.mount(str(sys_dir), "/proc/sys", flags=k.BIND | k.REC)
    for path in real:
        k.umount(str(sys_dir / path), k.DETACH)
    _bind(f"{STASH}/proc/cmdline", "/proc/cmdline")
    # A crash by sysrq would be the machine's, not the node's.
    if os.path.exists("/proc/sysrq-trigger"):
        _bind("/dev/null", "/proc/sysrq-trigger")
    if os.path.isdir(REAL_SYS):
        safe = k.NOSUID | k.NODEV | k.NOEXEC
        k.mount("sysfs", REAL_SYS, "sysfs", safe | k.RDONLY)
    for target in targets:
        _bind(STASH + target, target)


def _bind(source: str, target: str) -> None:
    k.mount(source, target, flags=k.BIND)


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
