"""The network of real nodes: a wire to the lab's bridge, and what is done to it."""

from typing import Any

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.snapshot import judge
from tests.helpers import observe, on

GOOD = ("ok", "na")


def look(node: LabNode, **policy: Any) -> tuple[Nics, dict[str, str]]:
    """The node's network, and check -> status of what is neither ok nor na."""
    want = Policy(**policy)
    seen = observe(on(node), want, ("nics",))
    return seen["nics"], {r.check: r.status for r in judge(seen, want) if r.status not in GOOD}


def test_interfaces_of_containers_are_counted_and_cost_no_report(fresh_node):
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
    seen, bad = look(fresh_node, nics=(("veth00000001", (("mtu", 1500),)),))
    assert seen.interfaces["veth00000001"].master == "cni0"
    assert bad == {"nics.link": "fail"}


def test_no_tool_is_needed(fresh_node):
    before, _ = look(fresh_node)
    fresh_node.run("rm -f $(command -v ip ethtool)", check=False)
    after, bad = look(fresh_node)
    assert bad == {}
    assert after.interfaces["eth0"].addresses == before.interfaces["eth0"].addresses
