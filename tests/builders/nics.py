"""Networks of nodes, as /sys and /proc print them."""

import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.subjects.nics import checks
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.nics.facts import Nics
from tests.builders.judging import by_name

POLICY = Policy()
#: Attributes of interfaces by a name, also for rows of cases. OFF: the kernel refuses carrier,
#: speed and duplex with EINVAL while a port is switched off. BMC: its own wire to its host.
BASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
LO, UP, PORT, OFF = (BASES[name] for name in ("LO", "UP", "PORT", "OFF"))
BMC, CNI, SLAVE, BOND = (BASES[name] for name in ("BMC", "CNI", "SLAVE", "BOND"))


def attributes(row: Any) -> dict[str, object]:
    """The attributes of an interface in a row: `["PORT", {"speed": 10}]`, later ones win."""
    result: dict[str, object] = {}
    for part in row if isinstance(row, list) else [row]:
        result |= BASES[part] if isinstance(part, str) else part
    return result


def route(text: str) -> str:
    """A line of /proc/net/route or ipv6_route for "NETWORK INTERFACE [METRIC [FLAGS]]"."""
    network, interface, *numbers = text.split()
    metric, flags = (*numbers, *("0", "1")[len(numbers) :])
    if ":" in network:
        v6 = ipaddress.IPv6Network(network)
        return (
            f"{int(v6.network_address):032x} {v6.prefixlen:02x} {0:032x} 00 {0:032x} "
            f"{int(metric):08x} 00000001 00000000 {int(flags, 0):08x} {interface:>8}"
        )
    net = ipaddress.IPv4Network(network)
    gateway = ipaddress.IPv4Address("0.0.0.0" if net.prefixlen else "10.1.0.1")
    # Numbers in the byte order of the machine.
    start, via, mask = (
        address.packed[::-1].hex().upper()
        for address in (net.network_address, gateway, net.netmask)
    )
    return f"{interface}\t{start}\t{via}\t{int(flags, 0):04X}\t0\t0\t{metric}\t{mask}\t0\t0\t0   "


def text(interfaces: dict[str, dict[str, object]], printed: tuple[str, ...] = ()) -> str:
    lines = [
        f"/sys/class/net/{name}/{attribute}:{line}"
        for name, attributes in interfaces.items()
        for attribute, value in attributes.items()
        for line in str(value).split("\n")
    ]
    return "\n".join([*printed, "ends=0", *lines]) + "\n"


def proc(routes: tuple[str, ...] = (), own: tuple[str, ...] = ()) -> str:
    """What the section prints of the routes and of the node's IPv4 addresses."""
    lines = [
        f"/proc/net/{'ipv6_route' if re.match('[0-9a-f]{32} ', line) else 'route'}:{line}"
        for line in routes
    ]
    for address in own:
        lines += [f"/proc/net/fib_trie:           |-- {address}",
                  "/proc/net/fib_trie:              /32 host LOCAL"]  # fmt: skip
    return "\n".join(lines) + "\n"


def node(
    interfaces: dict[str, dict[str, object]],
    *printed: str,
    routes: tuple[str, ...] = (),
    own: tuple[str, ...] = (),
    variables: str = "",
) -> Nics:
    """The observation of a node with these interfaces, routes (see `route`) and addresses."""
    outputs = {
        "nics": Output(text({"lo": LO, **interfaces}, printed), 0),
        "nic_routes": Output(proc(tuple(map(route, routes)), own), 0),
        "job_variables": Output(variables, 0),
    }
    return nics.parse(outputs, POLICY)


def gpu_node(changed: dict[str, dict[str, object]] | None = None, variables: str = "") -> Nics:
    """Two bonded ports to the nodes, one InfiniBand port, an unused one, and the usual company."""
    interfaces = {
        "eth0": SLAVE, "eth1": SLAVE, "bond0": BOND, "ib0": {**PORT, "type": 32, "mtu": 2044},
        "eno4": OFF, "usb0": BMC, "docker0": CNI,
    }  # fmt: skip
    for name, attributes in (changed or {}).items():
        interfaces[name] = {**interfaces.get(name, {}), **attributes}
    return node(
        interfaces,
        *(f"{key}={name} bond0" for name in ("eth0", "eth1") for key in ("upper", "master")),
        routes=("0.0.0.0/0 bond0", "10.1.0.0/16 bond0", "10.9.0.0/16 ib0",
                "172.17.0.0/16 docker0", "169.254.0.0/16 usb0"),
        own=("10.1.0.7", "10.9.0.7", "172.17.0.1", "169.254.3.1", "10.1.0.7"),
        variables=variables,
    )  # fmt: skip


def judged(observed: Nics, fleet: FleetFacts = ALONE, **policy: Any) -> dict[str, tuple[str, str]]:
    """Check -> (status, actual)."""
    results = by_name(checks, observed, Policy(**policy), fleet)
    return {name: (result.status, result.actual) for name, result in results.items()}


def wrong(observed: Nics, fleet: FleetFacts = ALONE, **policy: Any) -> dict[str, tuple[str, str]]:
    return {c: r for c, r in judged(observed, fleet, **policy).items() if r[0] not in ("ok", "na")}


def table(**interfaces: Mapping[str, object]) -> Any:
    """Policy.nics as its settings make it."""
    return tuple((name, tuple(columns.items())) for name, columns in interfaces.items())
