"""A lab's network: its subnet, interface and addresses follow from its number."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from nodeready.lab.programs import run
from nodeready.lab.state import ROOT, LabError, locked, write

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
    """The subnet of lab number `index`."""
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
    """Restore the limit of neighbours from before the first lab."""
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
