"""This machine as the host of a lab: its programs, its system calls, its limits, its network."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeready.lab.hardware import read_text
from nodeready.lab.state import ROOT, LabError, LabUnavailable, locked, write

Done = subprocess.CompletedProcess[str]


def environment() -> dict[str, str]:
    """The environment, with the administrator's programs on the path also after a plain `su`."""
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C"}


def run(
    argv: Sequence[str],
    data: str = "",
    timeout: float | None = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Done:
    """Run a program; its output is text, with surrogates for invalid bytes."""
    return subprocess.run(
        argv,
        input=data,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=timeout,
        check=False,
        env=env or environment(),
        cwd=cwd,
    )


# --- The system calls for namespaces, mounts and processes, by libc.

# <linux/sched.h>
NEWNS = 0x00020000
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

# pivot_root has no wrapper in libc. The generic table (41) serves aarch64, riscv64, loongarch64.
_PIVOT_ROOT = {"x86_64": 155, "ppc64le": 203, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces (NEWPID: its next children)."""
    _check(_libc.unshare(flags), "new namespaces")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that `fd` (a /proc/PID/ns file) stands for."""
    _check(_libc.setns(fd, kind), "enter a namespace")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(done, f"mount {kind or 'bind'} on {target}")


def umount(target: str, flags: int = 0) -> None:
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


# --- What a machine needs for a lab: programs, parts of the kernel, limits that root may raise.

# Program: its package on Debian and Ubuntu, on Fedora and RHEL, on SUSE.
_PROGRAMS = {
    "ip": ("iproute2", "iproute", "iproute2"),
    "sshd": ("openssh-server", "openssh-server", "openssh-server"),
    "ssh": ("openssh-client", "openssh-clients", "openssh-clients"),
    "nsenter": ("util-linux", "util-linux-core", "util-linux"),
}
_INSTALLERS = (("apt-get", 0), ("dnf", 1), ("zypper", 2))

# <linux/capability.h>
_CAP_SYS_RESOURCE = 24


def check_needs() -> None:
    """Raise LabUnavailable, in one line, unless this machine can run a lab."""
    if os.geteuid() != 0:
        raise LabUnavailable("the lab makes namespaces and mounts: run it as root (sudo)")
    path = environment()["PATH"]
    if missing := [name for name in _PROGRAMS if not shutil.which(name, path=path)]:
        installed = (item for item in _INSTALLERS if shutil.which(item[0], path=path))
        installer, column = next(installed, ("", 0))
        packages = sorted({_PROGRAMS[name][column] for name in missing})
        how = f"{installer} install" if installer else "install"
        raise LabUnavailable(f"not installed: {', '.join(missing)}; {how} {' '.join(packages)}")


def check_kernel() -> None:
    """Raise LabUnavailable unless the kernel allows all parts of a node."""
    flags = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork"]
    done = run(["unshare", *flags, "sh", "-c", read_text("trial.sh")], timeout=None)
    if done.returncode:
        refusal = done.stdout.strip() or "make namespaces"
        errors = done.stderr.strip().splitlines()
        reason = errors[-1] if errors else "no reason given"
        raise LabUnavailable(
            f"this machine does not let root {refusal} ({reason}); a lab needs a real or virtual"
            " machine, a privileged container, or a chroot that is a mount point (mount --bind)"
        )


def can_raise_limits() -> bool:
    """Whether root may raise a hard limit here: it needs CAP_SYS_RESOURCE.

    Without it the sessions of a node cannot exceed this machine's hard limits.
    """
    words = Path("/proc/self/status").read_text().split()
    return bool(int(words[words.index("CapEff:") + 1], 16) >> _CAP_SYS_RESOURCE & 1)


def node_settings() -> dict[str, Any]:
    """The policy of lab nodes on this machine: it requires only what they can reach.

    The nodes are processes of this machine. Its kernel writes cores by its own core_pattern, not
    by the core_pattern that a node shows and changes.
    """
    waivers = {
        "proof.core": "lab nodes share this machine's kernel and its core_pattern",
        "proof.backtrace": "see proof.core",
    }
    return {**reachable_limits(), "waivers": waivers}


def reachable_limits() -> dict[str, int]:
    """The policy's limits that the nodes of a lab here can reach; {} if root may raise limits.

    They are this machine's hard limits, where those are lower than the policy's defaults.
    """
    if can_raise_limits():
        return {}
    limits: dict[str, int] = {}
    _, nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if nofile != resource.RLIM_INFINITY:
        limits["limit_nofile"] = min(nofile, 1048576)
    if memlock != resource.RLIM_INFINITY:
        limits["limit_memlock"] = memlock // 1024
    return limits


# --- A lab's network: its subnet, interface and addresses follow from its number.

# Private (RFC 1918), and none that Docker, libvirt and home routers use by default.
_RANGE = ipaddress.IPv4Network("10.213.0.0/16")

# 510 addresses for at most 500 nodes.
_PREFIX = 23
_SUBNETS = list(_RANGE.subnets(new_prefix=_PREFIX))

MAX_NODES = 500

# A route with a prefix of at most this length is a VPN's for all private addresses (10.0.0.0/8);
# the lab's narrower route wins for its own addresses. A narrower route is a network in use.
_BROAD = 12

# The hard limit of the kernel's table of neighbours, which a container may not see; its old value.
_NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
_NEIGHBOURS_BEFORE = ROOT / ".neighbours"


def subnet(index: int) -> ipaddress.IPv4Network:
    return _SUBNETS[index]


def interface(index: int) -> str:
    """The interface of the lab on this machine (at most 15 characters)."""
    return f"nrlab{index}"


def gateway(index: int) -> ipaddress.IPv4Interface:
    """This machine's address in the lab."""
    return ipaddress.IPv4Interface(f"{_SUBNETS[index][1]}/{_PREFIX}")


def address(index: int, number: int) -> ipaddress.IPv4Interface:
    """The address of node `number`, counted from 1."""
    return ipaddress.IPv4Interface(f"{_SUBNETS[index][number + 1]}/{_PREFIX}")


def port(number: int) -> str:
    """The end of the node's wire at the lab's bridge."""
    return f"n{number}"


def mac(index: int, number: int) -> str:
    """The node's Ethernet address, the same after a restart: caches of neighbours stay right."""
    # 02 marks a locally administered address.
    return f"02:6e:72:{index:02x}:{number >> 8:02x}:{number & 0xFF:02x}"


def free_index(taken: Collection[int]) -> int:
    """A number whose subnet and interface nothing on this machine uses. Raises LabError.

    Containers that share a network, but no files, do not see which labs their peers are about to
    start: each begins its search at a number that depends on its host name.
    """
    start = zlib.crc32(socket.gethostname().encode()) % len(_SUBNETS)
    interfaces = {link["ifname"] for link in _ip("link", "show")}
    used = []
    for route in _ip("route", "show", "table", "all"):
        if route.get("dst", "default") != "default":
            network = ipaddress.IPv4Network(route["dst"], strict=False)
            if network.prefixlen > _BROAD:
                used.append(network)
    indexes: list[int] = [*range(start, len(_SUBNETS)), *range(start)]
    for index in indexes:
        if index in taken or interface(index) in interfaces:
            continue
        if not any(_SUBNETS[index].overlaps(network) for network in used):
            return index
    raise LabError(f"no free subnet in {_RANGE}; `nodeready lab down --all` ends all labs")


def make_room(nodes: int) -> None:
    """Raise the kernel's limit of neighbours (ARP) so that each node can know all others.

    All network namespaces share this table, with 1,024 entries by default: a lab of more than 32
    nodes would lose packets. The end of the last lab restores the limit.
    """
    with locked(ROOT), contextlib.suppress(OSError):
        limit = int(_NEIGHBOURS.read_text())
        # Half of it is for other labs and for the machine itself.
        needed = 2 * nodes * nodes
        if limit < needed:
            if not _NEIGHBOURS_BEFORE.exists():
                write(_NEIGHBOURS_BEFORE, f"{limit}\n")
            _NEIGHBOURS.write_text(f"{needed}\n")


def restore_neighbour_limit() -> None:
    with contextlib.suppress(FileNotFoundError):
        before = _NEIGHBOURS_BEFORE.read_text()
        with contextlib.suppress(OSError):
            _NEIGHBOURS.write_text(before)
        _NEIGHBOURS_BEFORE.unlink()


def delete_interface(index: int) -> None:
    """Remove the lab's interface from this machine; no error when it is not there."""
    run(["ip", "link", "delete", interface(index)], timeout=None)


def ip(commands: Iterable[str], namespace_of: int = 0, force: bool = False) -> None:
    """Run `ip` commands as one batch, in a process's network namespace or the caller's.

    With `force`, a command that fails does not stop the next ones and is no error; without it, it
    raises OSError.
    """
    argv = ["ip", *(["-force"] if force else []), "-batch", "-"]
    if namespace_of:
        argv = ["nsenter", "-t", str(namespace_of), "-n", *argv]
    done = run(argv, "\n".join(commands) + "\n", timeout=None)
    if done.returncode and not force:
        raise OSError(f"ip: {done.stderr.strip().splitlines()[0]}")


def listening(pid: int) -> bool:
    """Whether a server listens on port 22 in the network namespace of this process."""
    try:
        sockets = Path(f"/proc/{pid}/net/tcp").read_text()
    except OSError:
        return False
    # local_address, rem_address, st: port 22 is 0016, LISTEN is 0A.
    return ":0016 00000000:0000 0A" in sockets


def _ip(*words: str) -> list[dict[str, str]]:
    """What `ip` shows of IPv4. Raises LabError."""
    done = run(["ip", "-4", "-json", *words], timeout=None)
    if done.returncode:
        raise LabError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    answer: list[dict[str, str]] = json.loads(done.stdout or "[]")
    return answer
