"""A node and a peer in network namespaces: what connects, beside what the filter's rules say.

The node has two networks, eth0 (IPv4 and IPv6) and ib0 (IPv4); the peer has an address in each,
and a second one on eth0. Sockets of both are made by this process, which enters a namespace for
the moment that it takes.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.ports import firewall
from nodeready.subjects.ports.firewall import Firewall

POLICY = Policy()
PORTS = (29500, 29505, 29510)
NETWORKS = (("eth0", "10.1.0.0/16"), ("ib0", "192.168.7.0/24"))
#: The node's address -> those of the peer in the same network.
PEERS = {"10.1.0.5": ("10.1.0.9", "10.1.3.9"), "192.168.7.5": ("192.168.7.9",)}
PEERS6 = {"2001:db8:1::5": ("2001:db8:1::9",)}
NONCE = "0123456789abcdef"
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNET = 0x40000000
_TIMEOUT_S = 0.25


def _enter(fd: int) -> None:
    if _LIBC.setns(fd, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Space:
    """A network namespace, for as long as its process lives."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self.process.pid}/ns/net") == mine:
            time.sleep(0.005)
        self.fd = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)

    @contextmanager
    def inside(self) -> Iterator[None]:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self.fd)
            yield
        finally:
            _enter(home)
            os.close(home)

    def run(self, *argv: str, text: str = "", check: bool = True) -> str:
        with self.inside():
            done = subprocess.run(
                argv, input=text, capture_output=True, text=True, check=False, timeout=20
            )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr or done.stdout}")
        return done.stdout

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@dataclass(frozen=True)
class Way:
    """A connection that was tried: from the peer to the node, or back."""

    own: str
    peer: str
    port: int
    inbound: bool


class Pair:
    """The node, the peer, and listeners on both."""

    def __init__(self, ipv6: bool = False) -> None:
        self.node, self.peer = Space(), Space()
        self.ways = PEERS | (PEERS6 if ipv6 else {})
        self.addresses = tuple(self.ways)
        self.networks = (*NETWORKS, *([("eth0", "2001:db8:1::/64")] if ipv6 else []))
        lines = [
            f"link add {name} type veth peer name {name} netns {self.peer.process.pid}\n"
            for name, _ in NETWORKS
        ]
        self.node.run("ip", "-batch", "-", text="".join(lines))
        for space, last in ((self.node, "5"), (self.peer, "9")):
            lines = [
                f"addr add 10.1.0.{last}/16 dev eth0", f"addr add 192.168.7.{last}/24 dev ib0",
                *[f"addr add 2001:db8:1::{last}/64 dev eth0 nodad"] * ipv6,
                *(f"link set {name} up" for name in ("lo", "eth0", "ib0")),
            ]  # fmt: skip
            space.run("ip", "-batch", "-", text="\n".join(lines) + "\n")
        self.peer.run("ip", "addr", "add", "10.1.3.9/16", "dev", "eth0")
        self.chooser = selectors.DefaultSelector()
        self.listeners = []
        how = {"family": socket.AF_INET6, "dualstack_ipv6": True, "backlog": 64}
        for space in (self.node, self.peer):
            for port in PORTS:
                with space.inside():
                    one = socket.create_server(("::", port), **how)
                one.setblocking(False)
                self.listeners.append(one)
                self.chooser.register(one, selectors.EVENT_READ, None)

    def end(self) -> None:
        self.chooser.close()
        for one in self.listeners:
            one.close()
        self.node.end()
        self.peer.end()

    def clear(self) -> None:
        """No rules of any kind."""
        self.node.run("nft", "flush", "ruleset")
        for ip in ("ip", "ip6"):
            for table in self.node.run("cat", f"/proc/net/{ip}_tables_names", check=False).split():
                chains = "".join(f":{chain} ACCEPT [0:0]\n" for chain in _CHAINS[table])
                self.node.run(f"{ip}tables-legacy-restore", text=f"*{table}\n{chains}COMMIT\n")

    def looked(self, peers: bool) -> Firewall:
        """What the look tells of the rules."""
        text = self.node.run("sh", "-c", f"NR={NONCE}\n{firewall.SECTION.script(POLICY)}")
        known = tuple(one for some in self.ways.values() for one in some) if peers else ()
        output = Output(text, 0, nonce=NONCE)
        return firewall.parse(output, POLICY, self.addresses, self.networks, peers=known)

    def tried(self, limit_s: float = _TIMEOUT_S) -> dict[Way, bool]:
        """Which connections come about in time, and carry a byte there and back."""
        ways = [
            Way(own, peer, port, inbound)
            for own, peers in self.ways.items()
            for peer in peers
            for port in PORTS
            for inbound in (True, False)
        ]
        found = dict.fromkeys(ways, False)
        sockets = [self._connect(way) for way in ways]
        opened: list[socket.socket] = []
        until, left = time.monotonic() + limit_s, len(ways)
        for way, one in zip(ways, sockets, strict=True):
            self.chooser.register(one, selectors.EVENT_WRITE, way)
        while left and (rest := until - time.monotonic()) > 0:
            for key, events in self.chooser.select(rest):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    if key.data is None:
                        far, _ = one.accept()
                        far.setblocking(False)
                        opened.append(far)
                        self.chooser.register(far, selectors.EVENT_READ, "echo")
                    elif key.data == "echo":
                        if one.recv(1):
                            one.send(struct.pack("!H", one.getsockname()[1]))
                        self.chooser.unregister(one)
                    elif events & selectors.EVENT_WRITE:
                        one.send(b"x")
                        self.chooser.modify(one, selectors.EVENT_READ, key.data)
                    else:
                        # NAT may have led to another port.
                        found[key.data] = one.recv(2) == struct.pack("!H", key.data.port)
                        self.chooser.unregister(one)
                        left -= 1
                except OSError:
                    self.chooser.unregister(one)
                    left -= isinstance(key.data, Way)
        for key in list(self.chooser.get_map().values()):
            if key.data is not None:
                self.chooser.unregister(key.fileobj)
        for one in (*sockets, *opened):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        return found

    def _connect(self, way: Way) -> socket.socket:
        family = socket.AF_INET6 if ":" in way.own else socket.AF_INET
        space, here, there = self.peer, way.peer, way.own
        if not way.inbound:
            space, here, there = self.node, way.own, way.peer
        with space.inside():
            one = socket.socket(family)
        one.setblocking(False)
        one.bind((here, 0))
        one.connect_ex((there, way.port))
        return one


_CHAINS = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "raw": ("PREROUTING", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "security": ("INPUT", "FORWARD", "OUTPUT"),
}


def expected(tried: dict[Way, bool]) -> set[str]:
    """The verdicts that are true of what was tried, when nobody knows who the peers are.

    All of IPv4 open, all of its networks shut on some port, or something between.
    """
    nets: dict[str, bool] = {}
    hosts: dict[tuple[str, str], bool] = {}
    for way, worked in tried.items():
        nets[way.own] = nets.get(way.own, True) and worked
        hosts[way.own, way.peer] = hosts.get((way.own, way.peer), True) and worked
    four = {own: ok for own, ok in nets.items() if ":" not in own}
    if all(four.values()):
        return {"open"} if all(nets.values()) else {"cannot tell"}
    if not any(ok for (own, _), ok in hosts.items() if ":" not in own):
        return {"dropped"}
    return {"cannot tell"}


def ports_of(text: str) -> set[int]:
    """The tried ports that ``29500, 29502-29510`` has."""
    found = set()
    for part in text.removesuffix(" over IPv6").split(", "):
        first, _, last = part.partition("-")
        found |= {port for port in PORTS if int(first) <= port <= int(last or first)}
    return found


def agrees(seen: Firewall, tried: dict[Way, bool]) -> bool:
    """Whether nothing that was tried contradicts the verdict."""
    if seen.verdict == "open":
        return all(worked for way, worked in tried.items() if ":" not in way.own)
    if seen.verdict == "dropped":
        # On each of these ports, no peer has both ways.
        some = ports_of(seen.ports)
        shut: dict[tuple[str, int], bool] = {}
        for way, worked in tried.items():
            if way.port in some and ":" not in way.own:
                key = (way.peer, way.port)
                shut[key] = shut.get(key, False) or not worked
        return all(shut.values())
    return seen.verdict == "cannot tell"
