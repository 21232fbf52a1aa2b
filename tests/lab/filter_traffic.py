"""A node and a peer in network namespaces: what connects, beside what the filter's rules say.

The node has two networks, eth0 (IPv4 and IPv6) and ib0 (IPv4); the peer has an address in each,
and a second one on eth0. Sockets of both are made by this process, which enters a namespace for
the moment that it takes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import socketserver
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from nodeready.policy import Policy
from nodeready.shell import library
from nodeready.subjects.base import Output
from nodeready.subjects.ports import firewall, rule_listing
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


class _Echo(socketserver.BaseRequestHandler):
    """Says on which port it was reached: NAT may have led to another one."""

    def handle(self) -> None:
        self.request.settimeout(2)
        with suppress(OSError):
            self.request.recv(1)
            self.request.send(struct.pack("!H", self.server.server_address[1]))


class _Server(socketserver.ThreadingTCPServer):
    address_family, request_queue_size, daemon_threads = socket.AF_INET6, 64, True


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
        self.servers = []
        for space in (self.node, self.peer):
            for port in PORTS:
                with space.inside():
                    server = _Server(("::", port), _Echo)
                self.servers.append(server)
                threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def end(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()
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
        text = self.node.run(
            "sh", "-c", f"NR={NONCE}\n{library('answer')}{rule_listing.SECTION.script(POLICY)}"
        )
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
        with ThreadPoolExecutor(len(ways)) as pool:
            return dict(zip(ways, pool.map(partial(self._works, limit_s), ways), strict=True))

    def _works(self, limit_s: float, way: Way) -> bool:
        space, here, there = self.peer, way.peer, way.own
        if not way.inbound:
            space, here, there = self.node, way.own, way.peer
        with space.inside():
            one = socket.socket(socket.AF_INET6 if ":" in way.own else socket.AF_INET)
        with one, suppress(OSError):
            one.settimeout(limit_s)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.bind((here, 0))
            one.connect((there, way.port))
            one.send(b"x")
            return one.recv(2) == struct.pack("!H", way.port)
        return False


_CHAINS = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "raw": ("PREROUTING", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "security": ("INPUT", "FORWARD", "OUTPUT"),
}


def have_one_answer(tried: dict[Way, bool]) -> bool:
    """Whether whoever knows no peer can tell: all is open, or every peer of IPv4 is shut out."""
    shut = {(way.own, way.peer) for way, worked in tried.items() if not worked}
    return not shut or {(way.own, way.peer) for way in tried if ":" not in way.own} <= shut


def ports_of(text: str) -> set[int]:
    """The tried ports that ``29500, 29502-29510`` has."""
    spans = [part.partition("-") for part in text.removesuffix(" over IPv6").split(", ")]
    return {
        port
        for port in PORTS
        for first, _, last in spans
        if int(first) <= port <= int(last or first)
    }


def agrees(seen: Firewall, tried: dict[Way, bool]) -> bool:
    """Whether nothing that was tried contradicts the verdict."""
    four = {way: worked for way, worked in tried.items() if ":" not in way.own}
    if seen.verdict == "dropped":
        # On each of these ports, no peer has both ways.
        shut = {(way.peer, way.port) for way, worked in four.items() if not worked}
        some = ports_of(seen.ports)
        return {(way.peer, way.port) for way in four if way.port in some} <= shut
    return seen.verdict == "cannot tell" or (seen.verdict == "open" and all(four.values()))
