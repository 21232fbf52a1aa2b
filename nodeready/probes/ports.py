"""Whether jobs can rendezvous on a node's ports: who holds them, who may take them, what drops."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nodeready.policy import Policy
from nodeready.probes import firewall, rule_tools, sockets, sysctl
from nodeready.probes.base import Output, Probe, ProbeError, Section, number
from nodeready.probes.firewall import Firewall
from nodeready.probes.packet import is_virtual
from nodeready.probes.sockets import Socket

EPHEMERAL = "net.ipv4.ip_local_port_range"
RESERVED = "net.ipv4.ip_local_reserved_ports"
#: The kernel's own value of ip_local_port_range (Documentation/networking/ip-sysctl.rst).
KERNEL_EPHEMERAL = (32768, 60999)

Range = tuple[int, int]


@dataclass(frozen=True)
class Ports:
    """The TCP ports of a node.

    listeners:       every socket that listens; owners only for the policy's ports
    connections:     connections whose local port is one of the policy's, TIME_WAIT aside
    more:            there were more sockets than were carried
    ephemeral:       first and last port that the kernel gives to outgoing connections, now; None:
                     unreadable
    reserved:        ports that it leaves out there, now; None: unreadable
    ephemeral_boot:  what the sysctl files set at the next boot
    reserved_boot:   the same of the reserved ports
    privileged_below: the first port that any user may listen on (1024 before Linux 4.11)
    firewall:        what happens to connections from other nodes
    """

    listeners: tuple[Socket, ...] | None
    connections: tuple[Socket, ...] | None
    more: bool
    ephemeral: Range | None
    reserved: tuple[Range, ...] | None
    ephemeral_boot: sysctl.Boot
    reserved_boot: sysctl.Boot
    privileged_below: int
    firewall: Firewall


def parse_range(text: str) -> Range | None:
    """``32768 60999`` as the kernel writes and reads it; None when it makes no sense."""
    match = re.fullmatch(r"(\d{1,5})\s+(\d{1,5})", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def parse_ranges(text: str) -> tuple[Range, ...] | None:
    """``8080,29500-29510`` as ranges; () for none, None when it makes no sense."""
    found = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return None
        found.append((int(match[1]), int(match[2] or match[1])))
    return tuple(found)


def text_of(ranges: tuple[Range, ...]) -> str:
    """Ranges as sysctl takes them: ``8080,29500-29510``."""
    return ",".join(firewall.shown(*one) for one in ranges)


def _addresses(output: Output) -> tuple[str, ...]:
    """The node's addresses, those of its loopback aside. IPv6 comes as 32 digits."""
    found = []
    for text in dict.fromkeys(output.all("local")):
        try:
            raw = bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{32}", text) else text
            address = ipaddress.ip_address(raw)
        except ValueError:
            continue
        if not address.is_loopback:
            found.append(str(address))
    return tuple(found)


def _networks(output: Output) -> tuple[tuple[str, str], ...]:
    """The IPv4 networks that the node is connected to: (interface, network); those of its own
    containers aside. /proc/net/route has them in the order of the host's bytes."""
    found = []
    for text in dict.fromkeys(output.all("network")):
        match = re.fullmatch(r"(\S{1,15}) ([0-9A-F]{8}) ([0-9A-F]{8})", text)
        if match and not is_virtual(match[1]):
            network, mask = (
                ipaddress.IPv4Address(bytes.fromhex(match[part])[::-1]) for part in (2, 3)
            )
            try:
                found.append((match[1], str(ipaddress.IPv4Network(f"{network}/{mask}"))))
            except ValueError:
                continue
    return tuple(found)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Ports:
    """Raises ProbeError when a number of the kernel is none."""
    output = outputs["ports"]
    values = output.values()
    seen = sockets.parse(output)
    first, last = policy.port_range
    ephemeral = parse_range(values["ephemeral"]) if "ephemeral" in values else None
    reserved = parse_ranges(values["reserved"]) if "reserved" in values else None
    if "ephemeral" in values and ephemeral is None:
        raise ProbeError(f"{EPHEMERAL} makes no sense", values["ephemeral"])
    if "reserved" in values and reserved is None:
        raise ProbeError(f"{RESERVED} makes no sense", values["reserved"])
    files = sysctl.parse(outputs["sysctl"])
    listeners = connections = None
    if seen is not None:
        listeners = tuple(one for one in seen if one.state == "listening")
        connections = tuple(
            one for one in seen if one.state != "listening" and first <= one.port <= last
        )
    return Ports(
        listeners=listeners,
        connections=connections,
        more="more" in values,
        ephemeral=ephemeral,
        reserved=reserved,
        ephemeral_boot=sysctl.boot_value(files, EPHEMERAL),
        reserved_boot=sysctl.boot_value(files, RESERVED),
        privileged_below=number(values.get("privileged", "1024"), "ip_unprivileged_port_start"),
        firewall=firewall.parse(
            outputs["firewall"], policy, _addresses(output), _networks(output)
        ),
    )


def compared(seen: Ports) -> dict[str, Any]:
    """What the nodes of a group should have in common."""
    found: dict[str, Any] = {}
    if seen.ephemeral is not None:
        found["ephemeral"] = firewall.shown(*seen.ephemeral)
    if seen.reserved is not None:
        found["reserved"] = text_of(seen.reserved) or "none"
    if seen.firewall.verdict != "unknown":
        found["firewall"] = seen.firewall.verdict
    return found


PROBE = Probe(
    "ports", (Section("ports", sockets.script), sysctl.SECTION, rule_tools.SECTION), parse
)
