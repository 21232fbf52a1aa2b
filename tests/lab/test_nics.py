"""The network of real nodes: a wire to the lab's bridge, and what is done to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nodeready.lab import Node
from nodeready.policy import Policy
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.snapshot import judge
from tests.helpers import observe, on


def look(node: Node, policy: Policy = Policy()) -> tuple[Nics, dict[str, str]]:  # noqa: B008
    """The node's network, and check -> status of what is neither ok nor na."""
    seen = observe(on(node), policy, ("nics",))
    bad = {r.check: r.status for r in judge(seen, policy) if r.status not in ("ok", "na")}
    network: Nics = seen["nics"]
    return network, bad


@pytest.mark.parametrize("profile", ["h100", pytest.param("mi300x", marks=pytest.mark.nightly)])
def test_a_gpu_node_is_well(fresh_nodes: Callable[..., list[Node]], profile: str) -> None:
    (node,) = fresh_nodes(1, profile=profile)
    seen, bad = look(node)
    assert bad == {}
    ports = [one for one in seen.interfaces.values() if one.physical]
    assert len(ports) >= 8
    assert {one.driver for one in ports} == {"mlx5_core"}
    assert all(one.pci_address and one.numa_node is not None for one in ports)
    bonds = {name: [slave.mii for slave in bond.slaves] for name, bond in seen.bonds.items()}
    assert bonds == ({"bond0": ["up", "up"]} if profile == "h100" else {})
    facts = nics.compared(seen)
    assert facts["eth0.mtu"] == 1500
    assert facts[f"{ports[0].name}.speed_mbps"] == ports[0].speed_mbps
    assert seen.nccl_socket_ifname == "eth0"
    eth0 = seen.interfaces["eth0"]
    assert eth0.carrier is True
    assert eth0.addresses is not None
    assert eth0.addresses[0].startswith(f"{node.address}/")
    assert nics.with_peers(seen, (node.lab.gateway,)).peers_via == ("eth0",)


def test_interfaces_of_containers_are_counted_and_cost_no_report(fresh_node: Node) -> None:
    pairs = [
        f"link add veth{at:08x} type veth peer name cali{at:011x}\nlink set veth{at:08x} up\n"
        for at in range(100)
    ]
    fresh_node.run("ip -batch -", input="".join(pairs))
    fresh_node.run(
        "ip link add cni0 type bridge; ip link set dev veth00000001 master cni0; "
        "ip addr add 10.250.0.1/24 dev cni0; ip link set cni0 up; "
        "ip link add spare type dummy; ip link add link eth0 name eth0.7 type vlan id 7",
        check=False,
    )
    seen, bad = look(fresh_node)
    assert bad == {}
    assert seen.container_ends == 200
    assert {"lo", "eth0", "cni0"} <= seen.interfaces.keys()
    assert not any(name.startswith(("veth", "cali")) for name in seen.interfaces)
    if "eth0.7" in seen.interfaces:
        assert seen.interfaces["eth0"].upper == ("eth0.7",)
    kept = Policy(nics=(("veth00000001", (("mtu", 1500),)),))
    seen, bad = look(fresh_node, kept)
    assert seen.interfaces["veth00000001"].master == "cni0"
    assert bad == {"nics.link": "fail"}


def test_no_tool_is_needed(fresh_node: Node) -> None:
    before, _ = look(fresh_node)
    fresh_node.run("rm -f $(command -v ip ethtool)", check=False)
    after, bad = look(fresh_node)
    assert bad == {}
    assert after.interfaces["eth0"].addresses == before.interfaces["eth0"].addresses
