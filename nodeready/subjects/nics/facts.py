"""A node's network interfaces, their states, and the interfaces that reach other nodes.

Two greps read everything from /sys and /proc. The probe needs no tool, and never waits for the
kernel's network lock, which a driver in trouble may hold for good against ``ip`` and ``ethtool``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from nodeready.core import base, shell
from nodeready.core.base import Output, Probe, ProbeError, Section, cached_last, frozen, number
from nodeready.core.parsed_template import ParsedTemplate, TemplateCache, fast_replace
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, Counters, FleetFacts
from nodeready.core.settings import rows
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.hardware_log import HardwareLog
from nodeready.subjects.nics import nic
from nodeready.subjects.nics.nic import Bond, Nic, Route, parse_bonding

# --- The probe of all interfaces.

#: The counters whose change since an earlier audit is judged.
COUNTED = ("carrier_changes", "rx_errors", "tx_errors", "rx_crc_errors")
#: Names of interfaces that never carry traffic between nodes, even with routes.
_NOT_FOR_PEERS = re.compile(
    r"lo$|docker|virbr|br-[0-9a-f]{12}|veth|cni|cali|cilium|flannel|kube|lxc|nodelocal|podman"
    r"|tailscale|tunl|vxlan|weave"
)


def _script(policy: Policy) -> str:
    named = "|".join(shell.quote(name) for name in rows(policy.nics)) or "''"
    return shell.script("nics", NET=nic.NET, NAMED=named)


@dataclass(frozen=True)
class Nics:
    """The network of a node."""

    interfaces: Mapping[str, Nic]  # name -> interface, without the ends of containers'
    bonds: Mapping[str, Bond]  # name -> bond
    container_ends: int  # count of the interfaces that were left out
    routes: tuple[Route, ...]  # of the main tables, the widest first
    routes_cut: bool  # there are more routes than were read
    default_interface: str | None  # the interface of the default route
    kernel_log: HardwareLog = HardwareLog()  # faults of adapters
    # file -> the variables of NCCL, Gloo and Open MPI that it sets for every job
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def configured(self, fleet: FleetFacts = ALONE, also: Iterable[str] = ()) -> dict[str, Nic]:
        """The interfaces in use on this node, which must work:

        - a port or bond with an address (not only a link-local one) or a route, or below a bond, a
          bridge or a VLAN;
        - an interface with an address on top of such a port; a bond with slaves;
        - the interface of the default route, the interfaces to peers, and the names in ``also``;
        - where no port or bond has an address, as in a container, a virtual interface with one.
        """
        named = {*also, *peer_interfaces(self, fleet), *_interfaces_in_use(self)}
        return {name: interface for name, interface in self.interfaces.items() if name in named}


@cached_last
def _interfaces_in_use(observed: Nics) -> frozenset[str | None]:
    """The names of the configured interfaces, without those of a policy and those to peers."""
    named = {observed.default_interface}
    named |= {name for name, bond in observed.bonds.items() if bond.slaves}
    named |= {slave.name for bond in observed.bonds.values() for slave in bond.slaves}
    interfaces = observed.interfaces
    ports = {n: port for n, port in interfaces.items() if port.physical or port.kind == "bond"}
    if not (addressed := {name for name, port in ports.items() if port.addressed}):
        virtual = {n: nic for n, nic in interfaces.items() if nic.kind == "virtual"}
        named |= {n for n, nic in virtual.items() if nic.addressed and not _NOT_FOR_PEERS.match(n)}
    named |= addressed | {name for name, port in ports.items() if port.upper}
    on_top = {name for port in ports.values() for name in port.upper}
    named |= {name for name in on_top if name in interfaces and interfaces[name].addressed}
    return frozenset(named)


def _pairs(values: Iterable[str]) -> dict[str, list[str]]:
    """First word -> the rest, of each "WORD REST"."""
    parts = (value.partition(" ") for value in values)
    return base.grouped((name, other) for name, space, other in parts if space)


#: The content of the section ``nics``: the interfaces without their addresses, the bonds, and the
#: count of the ends of containers' interfaces.
_BareInterfaces = tuple[Mapping[str, Nic], Mapping[str, Bond], int]
_TEMPLATES: TemplateCache[_BareInterfaces] = TemplateCache()


def _parse_interfaces(output: Output) -> _BareInterfaces:
    """Raises ProbeError without any interface: every node has lo."""
    text = output.require()
    lines = text.split("\n")
    adapted = _TEMPLATES.adapted(
        lambda read, differing: (nic.with_values(read[0], differing), read[1], read[2]), lines
    )
    if adapted is not None:
        return adapted
    if not (attributes := nic.attributes(text)):
        raise ProbeError(f"no interface in {nic.NET}", text.strip())
    uppers, masters = _pairs(output.all("upper")), _pairs(output.all("master"))
    nics = {
        name: nic.parse(name, values, masters.get(name, ()), uppers.get(name, ()))
        for name, values in attributes.items()
    }
    ends = number((*output.all("ends"), "0")[0], "a number of interfaces")
    parsed: _BareInterfaces = frozen((nics, parse_bonding(attributes), ends))
    _TEMPLATES.keep(ParsedTemplate.of(lines, parsed, nic.find_varying(lines)))
    return parsed


def parse(outputs: Mapping[str, Output], policy: Policy) -> Nics:
    """The observation. Raises ProbeError without any interface: every node has lo."""
    output, table = outputs["nics"], outputs[nic.SECTION.name]
    output.require()
    if not table.truncated:
        table.require()
    bare_nics, bonds, ends = _parse_interfaces(output)
    all_routes, own_addresses = nic.parse_section(table)
    addresses_by_interface = nic.addresses(own_addresses)
    used = {route.interface for route in all_routes if not nic.link_local(route.destination)}
    interfaces = {}
    for name, bare_nic in bare_nics.items():
        listed = addresses_by_interface.get(name, [])
        addresses = None if listed is None else tuple(listed)
        interfaces[name] = fast_replace(bare_nic, addresses=addresses, routed=name in used)
    return Nics(
        interfaces=interfaces,
        bonds=bonds,
        container_ends=ends,
        routes=all_routes,
        routes_cut=table.truncated,
        default_interface=nic.default_interface(all_routes),
        kernel_log=kernel_log.hardware(outputs, "nics"),
        variables=_variables(outputs.get(_VARIABLES.name, Output("", 0))),
    )


# --- The variables that the node sets for every job: NCCL reads its file (initEnv of its
# src/misc/param.cc), pam_env the environment, which outranks NCCL's file.

ENVIRONMENT, NCCL_CONF = "/etc/environment", "/etc/nccl.conf"
_VARIABLES = Section("job_variables", lambda policy: f"nr_lines set {ENVIRONMENT} {NCCL_CONF}")
_VARIABLE = re.compile(
    r"\s*(?:export\s+)?((?:NCCL|GLOO|TP|OMPI_MCA)_\w{1,60})=[\"']?([^\"'\s]{1,200})"
)


def _variables(output: Output) -> dict[str, dict[str, str]]:
    matches = ((line.path, _VARIABLE.match(line.text)) for line in output.lines())
    by_path = base.grouped((path, (match[1], match[2])) for path, match in matches if match)
    return {path: dict(pairs) for path, pairs in by_path.items()}


_SECTIONS = (Section("nics", _script), nic.SECTION, kernel_log.SECTION, _VARIABLES)
PROBE = Probe("nics", _SECTIONS, parse)

# --- The interface to peers.


def reaching(observed: Nics, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """The interfaces by which this node reaches these addresses, by falling count of addresses.

    Names, loopback addresses, the node's own addresses and the networks of containers are
    ignored. Pass the same tuple for all nodes: it is sorted once.
    """
    counts = nic.count_reached(observed.routes, addresses)
    addresses_known = nic.address_set(addresses)
    listed = [
        text for interface in observed.interfaces.values() for text in interface.addresses or ()
    ]
    own_addresses = tuple(text for text in listed if text.partition("/")[0] in addresses_known)
    for name, count in nic.count_reached(observed.routes, own_addresses, is_own=True).items():
        counts[name] = counts.get(name, 0) - count
    names = [
        name
        for name, count in counts.items()
        if count > 0 and name in observed.interfaces and not _NOT_FOR_PEERS.match(name)
    ]
    return tuple(sorted(names, key=lambda name: (-counts[name], name)))


@cached_last
def peer_interfaces(observed: Nics, fleet: FleetFacts) -> tuple[str, ...]:
    """The interfaces that reach other nodes of the run, by falling count of nodes."""
    return () if fleet.addresses is None else reaching(observed, fleet.addresses)


def socket_interface(observed: Nics, fleet: FleetFacts) -> tuple[str | None, str]:
    """The interface for NCCL's sockets, and the reason; None: not known.

    By default NCCL uses an interface whose name begins with ``ib``, else the first that is neither
    loopback nor Docker's (NCCL user guide, NCCL_SOCKET_IFNAME). On a node with a management
    network, a virtual bridge or an unused port that is often an interface that reaches no other
    node, and the job hangs in its first collective.

    This function prefers the interface whose routes lead to the most other nodes, then that of the
    default route, then the only configured one. It ignores loopback, the bridges and wires of
    containers and virtual machines, interfaces without a link, and the slaves of a bond, which has
    the routes.
    """

    def usable(name: str | None) -> bool:
        interface = observed.interfaces.get(name or "")
        if interface is None or interface.carrier is False or interface.admin_up is False:
            return False
        return not _NOT_FOR_PEERS.match(interface.name)

    peers_via = peer_interfaces(observed, fleet)
    for name in filter(usable, peers_via):
        return name, "its routes lead to the other nodes"
    if peers_via:
        return None, f"{', '.join(peers_via)} leads to the other nodes, but cannot be used"
    if usable(observed.default_interface):
        return observed.default_interface, "the default route leads through it"
    # A bond carries the traffic of its slaves; a port for RDMA alone has no address.
    named = [
        name
        for name, interface in observed.configured(fleet).items()
        if usable(name) and interface.addressed and interface.master is None
    ]
    if len(named) == 1:
        return named[0], "no other interface is configured"
    if named:
        return None, f"nothing tells which of {', '.join(sorted(named))} reaches the other nodes"
    return None, "no interface with a link is configured"


# --- The values for documents, the next audit, the comparison with peers, and a learnt policy.


class NicsInFleet(TypedDict):
    """The result of `derived`."""

    peers_via: tuple[str, ...]  # the interfaces through which the node reaches its peers
    nccl_socket_ifname: str | None  # the interface for NCCL_SOCKET_IFNAME; None: not known
    before: Counters | None  # the counters of an earlier audit; None: there was none


def derived(observed: Nics, fleet: FleetFacts) -> NicsInFleet:
    return {
        "peers_via": peer_interfaces(observed, fleet),
        "nccl_socket_ifname": socket_interface(observed, fleet)[0],
        "before": fleet.counters.get("nics"),
    }


def counters(observed: Nics, fleet: FleetFacts = ALONE) -> dict[str, int]:
    """The counters for the next audit: "eth0.rx_crc_errors" -> value."""
    values = {}
    configured = observed.configured(fleet)
    for name, interface in observed.interfaces.items():
        if interface.physical or name in configured:
            for counter in COUNTED:
                if (value := getattr(interface, counter)) is not None:
                    values[f"{name}.{counter}"] = value
    return values


def compared(observed: Nics, fleet: FleetFacts = ALONE) -> dict[str, str | int]:
    """The values that a group's nodes should share: ports, and the settings of those in use."""
    configured = observed.configured(fleet)
    ports = sorted(n for n, interface in observed.interfaces.items() if interface.physical)
    facts_by_name: dict[str, str | int] = {"interfaces": ",".join(ports)}
    for name, interface in observed.interfaces.items():
        facts = ["driver", "firmware"] if interface.physical else []
        if name in configured or (interface.physical and interface.carrier):
            facts += ["mtu"] if interface.kind == "virtual" else ["mtu", "speed_mbps"]
        for fact in facts:
            if (value := getattr(interface, fact)) is not None:
                facts_by_name[f"{name}.{fact}"] = value
    return facts_by_name


def learned(observed: Nics) -> dict[str, dict[str, dict[str, str | int]]]:
    """The policy that this node would fit: its configured interfaces, as they are now."""
    table = {}
    for name, interface in observed.configured().items():
        columns = ("mtu",) if interface.kind == "virtual" else ("speed_mbps", "mtu", "driver")
        values = {column: getattr(interface, column) for column in columns}
        table[name] = {column: value for column, value in values.items() if value is not None}
    return {"nics": table} if table else {}
