"""Which variables the nodes' facts suggest, and which port is free on every node."""

from dataclasses import replace

import pytest

from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.runs.ready import job_env
from nodeready.runs.ready.job_env import JobVariable, PortChoice
from nodeready.subjects.pdsh.facts import Pdsh
from nodeready.subjects.ports import facts as sockets
from nodeready.subjects.ports.facts import Firewall, Ports
from nodeready.subjects.snapshot import Snapshot
from tests.builders.job_env import FLEET, POLICY, nics, node, ports, rdma, socket
from tests.cases import cases, read_table

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
NAMES = (*INTERFACES, "NCCL_IB_HCA", "PDSH_RCMD_TYPE", "MASTER_ADDR", "MASTER_PORT")
LOST = Unknown("timed out")


def of(*nodes: Snapshot, policy: Policy = POLICY) -> dict[str, JobVariable]:
    snapshots = {f"gpu{number}": node for number, node in enumerate(nodes, 1)}
    variables = job_env.variables(snapshots, dict.fromkeys(snapshots, policy), FLEET)
    assert tuple(variable.name for variable in variables) == NAMES
    return {variable.name: variable for variable in variables}


def values(variables: dict[str, JobVariable]) -> dict[str, str | None]:
    return {name: variable.value for name, variable in variables.items()}


def test_nodes_that_agree():
    variables = of(node(), node(), node())
    expected = ("=eth0", "eth0", "eth0", "=mlx5_0,mlx5_1", "ssh", "10.0.0.1", "29500")
    assert values(variables) == dict(zip(NAMES, expected, strict=True))
    assert all(variable.settled and variable.reason for variable in variables.values())
    for name, variable in variables.items():
        nodes = ("gpu1",) if name == "MASTER_ADDR" else ("gpu1", "gpu2", "gpu3")
        assert variable.nodes_by_value[0][1] == nodes
    assert variables["NCCL_SOCKET_IFNAME"].reason == "its routes lead to the other nodes"
    assert variables["NCCL_IB_HCA"].reason == "active InfiniBand ports at 400 Gb/s"


def test_a_variable_that_no_node_needs_is_settled():
    variables = of(*(node(rdma=rdma(), pdsh=Pdsh(installed=False)) for _ in range(2)))
    for name, reason in (
        ("NCCL_IB_HCA", "no active InfiniBand or RoCE port"),
        ("PDSH_RCMD_TYPE", "pdsh is not installed"),
    ):
        variable = variables[name]
        assert (variable.value, variable.reason, variable.settled) == (None, reason, True)
        assert variable.nodes_by_value == ((None, ("gpu1", "gpu2")),)
    # pdsh on some nodes is enough.
    variable = of(node(pdsh=Pdsh(installed=False)), node())["PDSH_RCMD_TYPE"]
    assert (variable.value, variable.settled) == ("ssh", True)


@pytest.mark.parametrize(("name", "odd", "by_value"), [
    ("NCCL_SOCKET_IFNAME", node(nics=nics("eth1")), ("=eth0", "=eth1")),
    ("GLOO_SOCKET_IFNAME", node(nics=nics("eth1")), ("eth0", "eth1")),
    ("OMPI_MCA_btl_tcp_if_include", node(nics=nics("eth1")), ("eth0", "eth1")),
    ("NCCL_IB_HCA", node(rdma=rdma("mlx5_0")), ("=mlx5_0,mlx5_1", "=mlx5_0")),
    ("NCCL_IB_HCA", node(rdma=rdma()), ("=mlx5_0,mlx5_1", None)),
])  # fmt: skip
def test_nodes_that_differ_set_nothing(name, odd, by_value):
    """The majority comes first, whatever the order of the nodes."""
    variable = of(odd, node(), node())[name]
    assert (variable.value, variable.reason, variable.settled) == (None, "the nodes differ", False)
    assert variable.nodes_by_value == ((by_value[0], ("gpu2", "gpu3")), (by_value[1], ("gpu1",)))


def test_a_list_of_interfaces_is_suggested_where_no_node_has_two_of_them():
    variable = of(node(), node(), node(nics=nics("eth1")))["NCCL_SOCKET_IFNAME"]
    assert variable.notes == ("=eth0,eth1 means the right one on each: no node has two of them",)
    variable = of(node(), node(nics=nics("eth1", "eth0")))["NCCL_SOCKET_IFNAME"]
    assert (variable.notes, variable.settled) == ((), False)


@pytest.mark.parametrize(("odd", "names", "why"), [
    (node(nics=LOST), (*INTERFACES, "NCCL_IB_HCA"), "its network: timed out"),
    (node(rdma=LOST), ("NCCL_IB_HCA",), "its RDMA devices: timed out"),
    (node(pdsh=LOST), ("PDSH_RCMD_TYPE",), "pdsh: timed out"),
    (node(ports=LOST), ("MASTER_PORT",), "timed out"),
    (node(ports=ports(listeners=None)), ("MASTER_PORT",), "/proc/net/tcp cannot be read"),
    (*(node(nics=nics(None, "eth0", "eth1")), INTERFACES),
     "nothing tells which of eth0, eth1 reaches the other nodes"),
    (Snapshot(), tuple({*NAMES} - {"MASTER_ADDR"}), "not looked at"),
])  # fmt: skip
def test_a_node_without_an_observation_is_named_and_outvotes_no_other(odd, names, why):
    variables = of(node(), odd)
    assert values(variables) == values(of(node()))
    for name, variable in variables.items():
        assert variable.settled is (name not in names)
        assert [nodes for _, nodes in variable.unknown] == ([("gpu2",)] if name in names else [])
        assert all(why in reason for reason, _ in variable.unknown)
    alone = of(odd)
    assert all(alone[name].value is None and not alone[name].settled for name in names)


HOSTILE = "eth0;reboot|$(id)|a'b|a b|=eth0|^eth0|eth0,eth1|-rf|\x1b[2J|é|eth0\n|" + "e" * 16


def test_a_name_that_no_device_has_is_not_taken():
    for name in HOSTILE.split("|"):
        variables = of(node(), node(nics=nics(name), rdma=rdma("mlx5_0", name * 5)))
        assert values(variables) == values(of(node()))
        devices = (*["an interface"] * 3, "an RDMA device")
        for variable, device in zip((*INTERFACES, "NCCL_IB_HCA"), devices, strict=True):
            ((reason, nodes),) = variables[variable].unknown
            assert nodes == ("gpu2",)
            assert reason.endswith(f"is no plausible name of {device}")
            assert reason.isascii()
            assert reason.isprintable()
    for name in ("enp1s0f0np0", "bond0.100", "br-ex", "e" * 15):
        assert of(node(nics=nics(name)))["NCCL_SOCKET_IFNAME"].value == f"={name}"


def test_the_first_nodes_address_is_the_masters():
    for addresses, value in read_table(__file__, "master_addresses"):
        network = nics("eth0")
        interface = replace(network.interfaces["eth0"], addresses=addresses)
        first = node(nics=replace(network, interfaces={"eth0": interface}))
        variable = of(first, node())["MASTER_ADDR"]
        assert (variable.value, variable.settled) == (value, value is not None)
    unknown = of(node(nics=LOST), node())["MASTER_ADDR"]
    assert (unknown.value, unknown.unknown) == (None, (("its network: timed out", ("gpu1",)),))


# --- MASTER_PORT.

SPAN = (29500, 29510)
FIRST = "the first of 29500-29510 that is free on all nodes"


def choose(*nodes: Ports | Unknown, span: tuple[int, int] = SPAN) -> PortChoice:
    by_name = {f"gpu{number}": node for number, node in enumerate(nodes, 1)}
    return job_env.choose(by_name, dict.fromkeys(by_name, span))


def test_the_port_is_a_variable():
    variable = of(node(ports=ports(socket(29500))), node())["MASTER_PORT"]
    assert (variable.value, variable.settled) == ("29501", True)
    assert variable.notes == ("not 29500 on gpu1: python3 of ada listens",)
    assert variable.nodes_by_value == (("29501", ("gpu1", "gpu2")),)


@pytest.mark.parametrize("case", cases(__file__, "data/ports.json"))
def test_the_first_port_that_is_free_everywhere(case):
    nodes = []
    for changes in case["nodes"]:
        observed = dict(changes)
        held = [socket(*row) for row in observed.pop("held", [])]
        if "firewall" in observed:
            observed["firewall"] = Firewall(**observed["firewall"])
        nodes.append(ports(*held, **observed))
    assert choose(*nodes) == PortChoice(case["port"], FIRST, tuple(case["notes"]), {})


def test_nothing_free_says_why():
    dropped = ports(firewall=Firewall("drop", ports="29505-29510"))
    choice = choose(ports(*map(socket, range(29500, 29506))), dropped)
    none = "no port of 29500-29510 is free on all nodes"
    assert (choice.port, choice.reason) == (None, none)
    assert choice.notes == (
        "not 29500-29505 on gpu1: python3 of ada listens",
        "not 29505-29510 on gpu2: a rule of the packet filter drops it",
    )
    span = range(29500, 29511)
    choice = choose(*(ports(*(socket(p, f"job{n}") for p in span)) for n in range(40)))
    assert choice.port is None
    assert len(choice.notes) == 7
    assert choice.notes[-1] == "and 34 more reasons against ports"


def test_the_range_is_common_to_all_policies():
    nodes = {"a": ports(socket(29505)), "b": ports()}
    choice = job_env.choose(nodes, {"a": (29500, 29510), "b": (29505, 29600)})
    reason = "the first of 29505-29510 that is free on all nodes"
    assert (choice.port, choice.reason) == (29506, reason)
    choice = job_env.choose(nodes, {"a": (29500, 29510), "b": (30000, 30010)})
    reason = "the nodes' policies have no port in common: --ports FIRST-LAST"
    assert (choice.port, choice.reason) == (None, reason)
    assert choice.notes == ("29500-29510 on a", "30000-30010 on b")


def test_nodes_whose_ports_are_unknown():
    unread = ports(connections=None, listeners=None)
    choice = choose(LOST, ports(socket(29500)), unread)
    assert choice.port == 29501
    assert choice.unknown == {"gpu1": "timed out", "gpu3": "/proc/net/tcp cannot be read"}
    assert choose(LOST, unread).port is None
    # Sockets of the range itself were cut off, or of others.
    held = [socket(port) for port in range(20000, 20000 + sockets.MOST_SOCKETS)]
    choice = choose(ports(*held, is_cut=True), span=(20000, 29999))
    assert "more sockets in the range than are looked at" in choice.unknown["gpu1"]
    choice = choose(ports(*held, is_cut=False), span=(20000, 29999))
    assert choice.port == 20000 + sockets.MOST_SOCKETS
