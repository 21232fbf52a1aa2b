"""Snapshots of nodes, as `nodeready env` gets them."""

from typing import Any

from nodeready.core import sysctl
from nodeready.core.policy import Policy
from nodeready.core.result import FleetFacts
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.nics.nic import Nic, Route
from nodeready.subjects.pdsh.facts import Pdsh
from nodeready.subjects.ports.facts import Firewall, Ports, Socket
from nodeready.subjects.rdma.facts import Rdma, RdmaDevice, RdmaPort
from nodeready.subjects.snapshot import Snapshot

POLICY = Policy()
#: What the fleet tells: the addresses of other nodes.
FLEET = FleetFacts(addresses=("10.0.0.2", "10.0.0.3"))


def nics(via: str | None = "eth0", *others: str) -> Nics:
    """A network in which the other nodes are reached by ``via``; None: by no interface at all."""
    names = (via, *others) if via else others
    interfaces = {
        name: Nic(name, "ethernet", carrier=True, admin_up=True, addresses=("10.0.0.1/24",))
        for name in names
    }
    routes = (Route("10.0.0.0/24", via, None, 0),) if via else ()
    return Nics(interfaces, {}, 0, routes, False, None)


def rdma(*names: str) -> Rdma:
    """InfiniBand devices with one active port each."""
    devices = {}
    for name in names:
        port = RdmaPort(
            name, 1, state="ACTIVE", phys_state="LinkUp", rate_gbps=400.0,
            link_layer="InfiniBand",
        )  # fmt: skip
        devices[name] = RdmaDevice(name, "mlx5", ports=(port,))
    return Rdma(devices)


def socket(port: int, process: str = "python3", state: str = "listening", uid: int = 7) -> Socket:
    return Socket("tcp", "0.0.0.0", port, state, "", uid, "ada", process, 4711)


def ports(*held: Socket, **values: Any) -> Ports:
    boot = sysctl.BootSetting(None)
    known = {
        "listeners": tuple(one for one in held if one.state == "listening"),
        "connections": tuple(one for one in held if one.state != "listening"),
        "is_cut": False,
        "ephemeral": (32768, 60999),
        "reserved": (),
        "ephemeral_boot": boot,
        "reserved_boot": boot,
        "privileged_below": 1024,
        "firewall": Firewall("no drop"),
    }
    return Ports(**{**known, **values})


def node(**subjects: Any) -> Snapshot:
    """A node that is like most; an argument is another observation of that subject."""
    usual = {
        "nics": nics(),
        "rdma": rdma("mlx5_0", "mlx5_1"),
        "ports": ports(),
        "pdsh": Pdsh(installed=True, module="/usr/lib/pdsh/sshcmd.so"),
    }
    return Snapshot({**usual, **subjects})
