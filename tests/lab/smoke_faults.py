"""What spoils a collective, put on nodes of the lab: who must be named for it, and its undoing.

A fault is a function ``(nodes, choose) -> Placed``: `choose` says where, so a seed is a place. It
touches neither ssh nor what a node says to itself, and `Placed.undo` leaves nothing of it.
"""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from nodeready.lab import LabNode

#: The job's ports: the policy's default.
FIRST, LAST = 29500, 29510
#: The directions in which a node's packets can be dropped.
WAYS = IN, OUT = ("in", "out")
#: ssh is not dropped. Two rules: Debian 12's nft makes one wrong comparison of "sport != 22 tcp
#: dport != 22".
_SPARED = "tcp sport 22 accept; tcp dport 22 accept;"
#: Where the patches of the job's Python lie, which its PYTHONPATH names on every node.
PATCHES = "/opt/smoke"


Suspects = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Placed:
    """A fault that is there."""

    suspects: Suspects  # (kind, names) of all that must be named, and nobody else may be
    where: str  # in words, for whoever reads that a test failed
    undo: Callable[[], object]  # takes it back
    says: str = ""  # a pattern of the evidence; "": the words are free
    meanwhile: Callable[[], object] = lambda: None  # called when the tests begin


Fault = Callable[[Sequence[LabNode], Random], Placed]


def _filtered(node: LabNode, way: str, rule: str = "") -> Callable[[], object]:
    """Drop this of the node's TCP on its way in or out, by one table of a packet filter.

    rule: what; "": all

    What goes out is dropped at the other end of the wire: a kernel that drops its own packets
    knows it, sends them again at once and loses nothing.
    """
    if way == IN:
        kind, spared = "inet", f'iifname "lo" accept; {_SPARED}'
        where, pid = "type filter hook input priority 0;", node.pid
    else:
        kind, spared, pid = "netdev", _SPARED, node.lab.state.switch
        where = f'type filter hook ingress device "n{node.number}" priority 0;'
    chain = f"{where} {spared} ip protocol tcp {rule} drop;"
    _nft(pid, f"table {kind} smoke {{ chain one {{ {chain} }}; }}")
    return lambda: _nft(pid, f"delete table {kind} smoke")


def _nft(pid: int, words: str) -> None:
    """A line for the packet filter of a process's network."""
    argv = ["nsenter", "-t", str(pid), "-n", "nft", words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def _node(node: LabNode) -> Suspects:
    return (("node", (node.name,)),)


def _pair(one: LabNode, other: LabNode) -> Suspects:
    return (("pair", tuple(sorted((one.name, other.name)))),)


def one_direction(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """Everything that comes to the node, or everything that goes out, is dropped."""
    node, way = choose.choice(nodes), choose.choice(WAYS)
    return Placed(_node(node), f"{way} of {node.name}", _filtered(node, way))


def one_port(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """One of the job's ports is dropped on the way in."""
    node, port = choose.choice(nodes), choose.randint(FIRST, LAST)
    undo = _filtered(node, IN, f"tcp dport {port}")
    return Placed(_node(node), f"{port} of {node.name}", undo, says=str(port))


def a_pair(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """Two nodes do not hear each other, and all others do."""
    one, other = choose.sample(nodes, 2)
    undo = _filtered(one, IN, f"ip saddr {other.address}")
    return Placed(_pair(one, other), f"{one.name} and {other.name}", undo)


def black_hole(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """Full packets are dropped, and no ICMP says so: an MTU that is too large."""
    node, way = choose.choice(nodes), choose.choice(WAYS)
    undo = _filtered(node, way, "ip length > 1000")
    return Placed(_node(node), f"{way} of {node.name}", undo)


def loss(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """5 % of the packets are lost."""
    node, way = choose.choice(nodes), choose.choice(WAYS)
    undo = _filtered(node, way, "numgen random mod 100 < 5")
    return Placed(_node(node), f"{way} of {node.name}", undo, says="TCP segments sent again")


def slow(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """1 Mbit/s on the way out; ssh goes there, too, and needs little."""
    node = choose.choice(nodes)
    words = "root tbf rate 1mbit burst 32k latency 400ms"
    node.enter(["sh", "-c", f"tc qdisc replace dev eth0 {words}"])
    undo = ["tc", "qdisc", "del", "dev", "eth0", "root"]
    says = r" (0\.[1-9]\d*|1(\.\d)?) Mbit/s there and back"
    return Placed(_node(node), node.name, lambda: node.enter(undo), says)


def wrong_name(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """On one node, the name of a second leads to a third."""
    one, other, third = choose.sample(nodes, 3)
    old = one.read("/etc/hosts")
    kept = [row for row in old.splitlines() if other.name not in row.split()]
    one.write("/etc/hosts", "\n".join([*kept, f"{third.address} {other.name}", ""]))
    where = f"on {one.name}, {other.name} is {third.name}"
    undo = lambda: one.write("/etc/hosts", old)  # noqa: E731
    return Placed(_pair(one, other), where, undo, says=third.address)


def freezes(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """In the middle of the tests, everything of the run on one node stops."""
    node, after_s = choose.choice(nodes), choose.uniform(0.0, 3.0)

    def signal(name: str) -> None:
        look = f"for pid in $(pgrep -f 'nodeready[:]'); do kill -{name} $pid; done"
        node.enter(["sh", "-c", look], check=False)

    def stop() -> None:
        time.sleep(after_s)
        signal("STOP")

    where = f"{node.name} after {after_s:.1f} s"
    return Placed(_node(node), where, lambda: signal("CONT"), meanwhile=stop)


# --- What is wrong with the job's own Python, on one node.

#: Every process that PyTorch's ranks fork ends at once.
_DIES = """
import os, sys
os.register_at_fork(after_in_child=lambda: "torch" in sys.modules and os._exit(3))
"""
#: Every sum of the node's ranks is one too large.
_WRONG = """
import os, sys

def spoil():
    module = sys.modules.get("torch.distributed")
    right = getattr(module, "all_reduce", None)
    def wrong(tensor, *words, **given):
        work = right(tensor, *words, **given)
        tensor.add_(1)
        return work
    if right:
        module.all_reduce = wrong

os.register_at_fork(after_in_child=spoil)
"""


def _patched(nodes: Sequence[LabNode], choose: Random, code: str) -> Placed:
    node = choose.choice(nodes)
    node.write(f"{PATCHES}/sitecustomize.py", code)
    undo = ["rm", "-rf", PATCHES]
    return Placed(_node(node), node.name, lambda: node.enter(undo))


def rank_dies(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """Each rank of the node dies at its start."""
    return _patched(nodes, choose, _DIES)


def wrong_sum(nodes: Sequence[LabNode], choose: Random) -> Placed:
    """The sums of the node's ranks are wrong, and nothing else is."""
    return _patched(nodes, choose, _WRONG)


#: What any engine finds, and what only the job's own PyTorch does.
PATHS: tuple[Fault, ...] = (
    *(slow, loss, a_pair, freezes),
    *(one_direction, one_port, black_hole, wrong_name),
)
LIBRARY: tuple[Fault, ...] = (rank_dies, wrong_sum)
#: One of each mechanism: those of `make test-lab`.
SHORT: tuple[Fault, ...] = (slow, freezes, black_hole, rank_dies)
