"""Networks of nodes, as /sys and /proc print them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nodeready.policy import Policy
from nodeready.subjects.base import Counters, Output
from nodeready.subjects.nics import checks
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.nics.facts import Nics
from tests.builders.judging import by_name

POLICY = Policy()
UP: dict[str, object] = {
    "flags": "0x1003", "carrier": 1, "operstate": "up", "mtu": 1500, "type": 1,
    "carrier_changes": 2, "address": "b8:3f:d2:00:00:01",
    "statistics/rx_errors": 0, "statistics/tx_errors": 0, "statistics/rx_crc_errors": 0,
}  # fmt: skip
PORT = {
    **UP, "speed": 400000, "duplex": "full", "device/numa_node": 1,
    "device/uevent": "DRIVER=mlx5_core\nPCI_CLASS=20000\nPCI_SLOT_NAME=0000:5e:00.0",
    "device/infiniband/mlx5_0/fw_ver": "28.39.1002",
}  # fmt: skip
# The kernel refuses carrier, speed and duplex with EINVAL while a port is switched off.
OFF = {"flags": "0x1002", "operstate": "down", "mtu": 1500, "type": 1, "carrier_changes": 0,
       "device/uevent": "DRIVER=igb\nPCI_SLOT_NAME=0000:01:00.0"}  # fmt: skip
LO = {"flags": "0x9", "type": 772, "carrier": 1, "operstate": "unknown", "mtu": 65536}
# The BMC's own wire to its host: an address of its own making, and a speed that means nothing.
BMC = {**UP, "speed": 10, "duplex": "half",
       "device/uevent": "DEVTYPE=usb_interface\nDRIVER=cdc_ether"}  # fmt: skip
CNI = {**UP, "uevent": "DEVTYPE=bridge\nINTERFACE=docker0", "carrier": 0}
SLAVE = {
    **PORT, "speed": 25000, "mtu": 9000, "bonding_slave/mii_status": "up",
    "bonding_slave/ad_aggregator_id": 1, "bonding_slave/link_failure_count": 3,
}  # fmt: skip
BOND = {
    **UP, "speed": 50000, "mtu": 9000, "uevent": "DEVTYPE=bond\nINTERFACE=bond0",
    "bonding/mode": "802.3ad 4", "bonding/mii_status": "up", "bonding/slaves": "eth0 eth1 ",
    "bonding/active_slave": "", "bonding/ad_aggregator": 1,
    "bonding/ad_partner_mac": "44:38:39:00:00:01",
}  # fmt: skip


def v4(interface: str, network: str, gateway: str = "", metric: int = 0, flags: int = 1) -> str:
    """A line of /proc/net/route: numbers in the byte order of the machine."""

    def number(text: str) -> str:
        return ipaddress.IPv4Address(text).packed[::-1].hex().upper()

    net = ipaddress.IPv4Network(network)
    words = (
        interface, number(str(net.network_address)), number(gateway or "0.0.0.0"),
        f"{flags:04X}", 0, 0, metric, number(str(net.netmask)), 0, 0, 0,
    )  # fmt: skip
    return "\t".join(map(str, words)) + "   "


def v6(interface: str, network: str, metric: int = 256, flags: int = 1) -> str:
    """A line of /proc/net/ipv6_route."""
    net = ipaddress.IPv6Network(network)
    return (
        f"{int(net.network_address):032x} {net.prefixlen:02x} {0:032x} 00 {0:032x} "
        f"{metric:08x} 00000001 00000000 {flags:08x} {interface:>8}"
    )


def text(
    interfaces: dict[str, dict[str, object]],
    printed: tuple[str, ...] = (),
) -> str:
    """What the section prints of these interfaces."""
    files = {f"/sys/class/net/{n}/{a}": str(v) for n, one in interfaces.items()
             for a, v in one.items()}  # fmt: skip
    lines = [f"{path}:{line}" for path, value in files.items() for line in value.split("\n")]
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
    before: Counters | None = None,
) -> Nics:
    """The observation of a node with these interfaces, routes and addresses."""
    outputs = {
        "nics": Output(text({"lo": LO, **interfaces}, printed), 0),
        "nic_routes": Output(proc(routes, own), 0),
    }
    return replace(nics.parse(outputs, POLICY), before=before)


def gpu_node(
    changed: dict[str, dict[str, object]] | None = None,
    before: Counters | None = None,
) -> Nics:
    """Two bonded ports to the nodes, one InfiniBand port, an unused one, and the usual company."""
    interfaces = {
        "eth0": SLAVE,
        "eth1": SLAVE,
        "bond0": BOND,
        "ib0": {**PORT, "type": 32, "mtu": 2044},
        "eno4": OFF,
        "usb0": BMC,
        "docker0": CNI,
    }
    for name, attributes in (changed or {}).items():
        interfaces[name] = {**interfaces.get(name, {}), **attributes}
    return node(
        interfaces,
        *(f"{key}={name} bond0" for name in ("eth0", "eth1") for key in ("upper", "master")),
        routes=(
            v4("bond0", "0.0.0.0/0", "10.1.0.1"),
            v4("bond0", "10.1.0.0/16"),
            v4("ib0", "10.9.0.0/16"),
            v4("docker0", "172.17.0.0/16"),
            v4("usb0", "169.254.0.0/16"),
        ),
        own=("10.1.0.7", "10.9.0.7", "172.17.0.1", "169.254.3.1", "10.1.0.7"),
        before=before,
    )


def judged(seen: Nics, **policy: Any) -> dict[str, tuple[str, str]]:
    """Check -> (status, actual)."""
    found = by_name(checks, seen, Policy(**policy))
    return {name: (result.status, result.actual) for name, result in found.items()}


def wrong(seen: Nics, **policy: Any) -> dict[str, tuple[str, str]]:
    """The checks that say something is wrong or unknown."""
    return {c: r for c, r in judged(seen, **policy).items() if r[0] not in ("ok", "na")}


def table(**interfaces: Mapping[str, object]) -> Any:
    """Policy.nics as its settings make it."""
    return tuple((name, tuple(columns.items())) for name, columns in interfaces.items())
