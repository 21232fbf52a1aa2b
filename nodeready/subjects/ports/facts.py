"""A node's TCP ports: their sockets, the kernel's ranges for source ports, the packet filter.

What the filter's rules together do to a connection is not evaluated: `nodeready ready` proves it.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nodeready.core import shell, sysctl
from nodeready.core.base import Output, Probe, ProbeError, Section, by_path, number
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.core.text import join_ranges, range_text

# --- Ranges of ports: how they are written, and how they are joined and cut.

#: The first and the last port.
Range = tuple[int, int]

#: The kernel's own value of ip_local_port_range (Documentation/networking/ip-sysctl.rst).
KERNEL_EPHEMERAL = (32768, 60999)


def parse_ranges(text: str) -> tuple[Range, ...] | None:
    """``8080,29500-29510`` as ranges; () for none, None when it makes no sense."""
    ranges = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        if (match := re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)) is None:
            return None
        ranges.append((int(match[1]), int(match[2] or match[1])))
    return tuple(ranges)


def overlap(ranges: Iterable[Range], first: int, last: int) -> tuple[Range, ...]:
    """The parts of the ranges from ``first`` to ``last``.

    >>> overlap([(1, 4), (6, 6), (8, 9)], 3, 8)
    ((3, 4), (6, 6), (8, 8))
    """
    parts = ((max(first, low), min(last, high)) for low, high in ranges)
    return tuple(part for part in parts if part[0] <= part[1])


def without(ports: Range, removed: Iterable[Range]) -> tuple[Range, ...]:
    """The parts of a range that are in none of the removed ranges.

    >>> without((1, 9), [(3, 4), (9, 12)])
    ((1, 2), (5, 8))
    """
    start, parts = ports[0], []
    for first, last in join_ranges(removed):
        parts.append((start, first - 1))
        start = max(start, last + 1)
    return overlap((*parts, (start, ports[1])), *ports)


#: Maximum of rules that are printed.
_MOST_RULES = 20


def firewall_script(policy: Policy) -> str:
    """The shell text that lists the rules, where the kernel can have some and shows them."""
    first, last = policy.port_range
    return shell.script("firewall", FIRST=first, LAST=last, RULES=_MOST_RULES)


#: This section runs in parallel: nft waits for its lock, and a node can have many rules.
_FIREWALL_SECTION = Section(
    "firewall", firewall_script, cap_bytes=1 << 16, parallel=True, quick=True
)


@dataclass(frozen=True)
class Firewall:
    """What the text of a node's packet filter says of the policy's ports."""

    # "no drop": no rule drops or rejects; "accept" and "drop": ``rules`` accept all ports, or drop
    # ``ports``, without another condition; "not known"; "unknown": ``reason``
    verdict: str
    drop: str = ""  # the first rule or policy that drops or rejects, with its table and chain
    rules: tuple[str, ...] = ()  # those that name a port, with table and chain, as the tool prints
    ports: str = ""  # the ports that the rules of the verdict name, ``29500-29510``
    manager: str = ""  # the program that made the rules: firewalld or ufw; "": another one
    reason: str = ""  # why the rules are not known


@dataclass(frozen=True)
class _PortRule:
    accepts: bool  # otherwise it drops or rejects
    is_plain: bool  # it has no other condition than TCP, the ports and a new connection
    is_to: bool  # the ports are those to which a peer connects
    ports: tuple[Range, ...]


#: The ports of a rule; not in a set with a name, and not of other ports ("!=", ">=").
_NAMED_PORTS = re.compile(
    r" (?:(?:tcp|th) ([sd])port|--([sd]?)ports?) (\{[\d, -]+\}|[\d:,-]+)(?= )"
)
#: What adds no condition to a rule about ports of TCP.
_NEUTRAL = re.compile(
    r" (?:-p tcp|-m (?:tcp|multiport|conntrack|state|comment)|--comment \S*|-j \S+"
    r"|--(?:ct)?state NEW(?:,UNTRACKED)?|--reject-with \S+|(?:meta l4proto|ip protocol) tcp"
    r"|ct state (?:\{ )?new(?:, ?untracked)?(?: \})?|counter|log(?: prefix)?|comment"
    r"|accept|drop|reject(?: with [a-z0-9 -]+)?)(?= )"
)


def _port_rule(rule: str, ports: Range) -> _PortRule | None:
    """``inet filter input: tcp dport 29500 drop``; None: it names no port of the policy."""
    text = re.sub(r'"[^"]*"', "", f" {rule.partition(': ')[2]} ")
    if " -p " in text and " -p tcp " not in text:
        return None
    clauses = [*_NAMED_PORTS.finditer(text)]
    spans = [
        (int(first), int(last or first))
        for clause in clauses
        for first, last in re.findall(r"(\d{1,5})(?:[-:](\d{1,5}))?", clause[3])
    ]
    if not (named := overlap(spans, *ports)):
        return None
    bare = _NEUTRAL.sub("", _NAMED_PORTS.sub("", text))
    return _PortRule(
        accepts=bool(re.search(r" (?:accept|-j ACCEPT) ", text)),
        is_plain=len(clauses) == 1 and not bare.strip(),
        is_to="d" in (clauses[0][1], clauses[0][2]),
        ports=named,
    )


def _judge(drop: str, rules: tuple[str, ...], ports: Range) -> tuple[str, str]:
    if not drop:
        return "no drop", ""
    port_rules = [port_rule for rule in rules if (port_rule := _port_rule(rule, ports))]
    accepting = [rule for rule in port_rules if rule.accepts]
    dropping = [rule for rule in port_rules if not rule.accepts]
    plain = [rule for rule in dropping if rule.is_plain]
    if plain and not accepting:
        named = join_ranges(span for rule in plain for span in rule.ports)
        return "drop", ", ".join(range_text(*span) for span in named)
    plain = [rule for rule in accepting if rule.is_plain and rule.is_to]
    if join_ranges(span for rule in plain for span in rule.ports) == [ports] and not dropping:
        return "accept", range_text(*ports)
    return "not known", ""


def parse_firewall(output: Output, policy: Policy) -> Firewall:
    """The node's rules; never raises."""
    try:
        values = output.values()
    except ProbeError as error:
        return Firewall("unknown", reason=f"listing the rules {error.reason}")
    if "root" in values:
        return Firewall("unknown", reason="the rules can be seen by root alone (CAP_NET_ADMIN)")
    for failure in output.all("failed"):
        # A kernel without nf_tables has no rules in it.
        if not re.match(r"nft: .*(Protocol|Operation) not supported", failure):
            return Firewall("unknown", reason=f"listing the rules failed: {failure}")
    rules = tuple(output.all("rule"))
    drop, manager = values.get("drop", ""), values.get("manager", "")
    verdict, ports = _judge(drop, rules, policy.port_range)
    if "missing" in values and verdict != "drop":
        reason = f"{values['missing']} is not installed"
        return Firewall("not known", drop, rules, "", manager, reason)
    return Firewall(verdict, drop, rules, ports, manager)


# --- The sockets: all that listen, and those that hold one of the policy's ports.
#
# The probe reads /proc and never connects to a socket: a connection would take a bootstrap slot of
# NCCL, and the job would hang.
# /proc/net/tcp shows the listening and connected sockets of the probe's network namespace
# (proc(5), Documentation/networking/proc_net_tcp.rst). No kernel before 6.8 shows a socket that is
# bound and neither listens nor is connected.

#: Maximum of sockets of each kind that are printed; further ones are counted.
MOST_SOCKETS = 500

#: TCP states of the kernel (include/net/tcp_states.h). TIME_WAIT (06) is left out: with
#: SO_REUSEADDR, which every rendezvous uses, a program can listen on such a port.
_STATES = {
    "01": "established", "02": "syn sent", "03": "syn received", "04": "fin wait 1",
    "05": "fin wait 2", "07": "closed", "08": "close wait", "09": "last ack", "0A": "listening",
    "0B": "closing", "0C": "syn received",
}  # fmt: skip


def script(policy: Policy) -> str:
    """The shell text about the sockets, and the kernel's port settings."""
    first, last = policy.port_range
    return shell.script(
        "ports", FIRST=first, LAST=last, FIRST_HEX=f"{first:04X}", LAST_HEX=f"{last:04X}",
        MOST=MOST_SOCKETS, SETTINGS=" ".join(_SETTINGS.values()),
    )  # fmt: skip


@dataclass(frozen=True)
class Socket:
    """A TCP socket of the node."""

    protocol: str  # "tcp" or "tcp6"; a "tcp6" socket on :: usually takes IPv4's port too
    address: str  # the local address; 0.0.0.0 and :: stand for all addresses
    port: int  # the local port
    state: str  # "listening", "established" ...
    peer: str  # the far end of a connection, or ""
    uid: int  # the user who made the socket; 0 also for a socket without an owner
    user: str | None = None  # that user's name in /etc/passwd; None: not there, or not read
    process: str | None = None  # of the socket's process, at most 15 characters; None: unknown
    pid: int | None = None  # of that process; the lowest when several processes share the socket
    job: str = ""  # the Slurm job in whose cgroup the process runs, or ""


def _parse_endpoint(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` as ("127.0.0.1", 8080): 32-bit words in the order of the host's bytes."""
    address, _, port = text.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    raw = b"".join(struct.pack("<I", word) for word in words)
    return str(ipaddress.ip_address(raw)), int(port, 16)


def _parse_owners(output: Output) -> dict[str, tuple[int, str, str]]:
    """Inode -> (pid, job, process name): the lowest pid, usually the parent."""
    owners: dict[str, tuple[int, str, str]] = {}
    for text in output.all("owner"):
        if match := re.fullmatch(r"(\d{1,20}) (\d{1,10}) (\d{0,20})[^:]{0,64}: (.{0,64})", text):
            owner = (int(match[2]), match[3], match[4])
            owners[match[1]] = min(owner, owners.get(match[1], owner))
    return owners


def parse_sockets(output: Output) -> tuple[Socket, ...] | None:
    """The sockets, those in the range first; None when the kernel's list could not be read.

    Raises ProbeError for a line that makes no sense.
    """
    if not output.all("read"):
        return None
    owners = _parse_owners(output)
    users = dict(text.partition(" ")[::2] for text in output.all("user"))
    sockets = []
    for text in (*output.all("held"), *output.all("socket")):
        match = re.fullmatch(
            r"(tcp6?) ((?:[0-9A-F]{8}){1,4}:[0-9A-F]{4}) ((?:[0-9A-F]{8}){1,4}:[0-9A-F]{4}) "
            r"([0-9A-F]{2}) (\d{1,10}) (\d{1,20})",
            text,
        )
        if match is None:
            raise ProbeError("a socket that makes no sense", text)
        try:
            address, port = _parse_endpoint(match[2])
            peer_address, peer_port = _parse_endpoint(match[3])
        except ValueError:
            raise ProbeError("an address that makes no sense", text) from None
        pid, job, process = owners.get(match[6], (None, "", None))
        sockets.append(
            Socket(
                protocol=match[1],
                address=address,
                port=port,
                state=_STATES.get(match[4], match[4]),
                peer=f"{peer_address} port {peer_port}" if peer_port else "",
                uid=int(match[5]),
                user=users.get(match[5]),
                process=process,
                pid=pid,
                job=job,
            )
        )
    return tuple(sockets)


# --- The kernel's port settings, and all of a node's ports.

EPHEMERAL = "net.ipv4.ip_local_port_range"
RESERVED = "net.ipv4.ip_local_reserved_ports"
_PRIVILEGED = "net.ipv4.ip_unprivileged_port_start"
#: Setting -> its file.
_SETTINGS = {
    name: f"/proc/sys/{name.replace('.', '/')}" for name in (EPHEMERAL, RESERVED, _PRIVILEGED)
}


@dataclass(frozen=True)
class Ports:
    """The TCP ports of a node."""

    JSON_KEYS: ClassVar = {"is_cut": "more"}
    listeners: tuple[Socket, ...] | None  # all; with their processes only for the policy's ports
    connections: tuple[Socket, ...] | None  # with a local port of the policy's, without TIME_WAIT
    is_cut: bool  # the probe did not print all sockets
    ephemeral: Range | None  # first and last port of outgoing connections, now; None: unreadable
    reserved: tuple[Range, ...] | None  # never for outgoing connections, now; None: unreadable
    ephemeral_boot: sysctl.BootSetting  # ``ephemeral`` in the sysctl files, for the next boot
    reserved_boot: sysctl.BootSetting  # ``reserved`` in the sysctl files, for the next boot
    privileged_below: int  # the first port that any user may listen on (1024 before Linux 4.11)
    firewall: Firewall  # the packet filter's rules about the policy's ports


def parse_range(text: str) -> Range | None:
    """``32768 60999`` as the kernel writes and reads it; None when it makes no sense."""
    match = re.fullmatch(r"(\d{1,5})\s+(\d{1,5})", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def ranges_text(ranges: tuple[Range, ...]) -> str:
    """Ranges as sysctl takes them: ``8080,29500-29510``."""
    return ",".join(range_text(*ports) for ports in ranges)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Ports:
    """The observation. Raises ProbeError when a value of the kernel is no number."""
    output = outputs["ports"]
    files = {path: lines[0].text for path, lines in by_path(output.lines()).items()}
    values = {name: files[path] for name, path in _SETTINGS.items() if path in files}
    sockets = parse_sockets(output)
    first, last = policy.port_range
    ephemeral, reserved = parse_range(values.get(EPHEMERAL, "")), None
    if EPHEMERAL in values and ephemeral is None:
        raise ProbeError(f"{EPHEMERAL} makes no sense", values[EPHEMERAL])
    if RESERVED in values:
        reserved = parse_ranges(values[RESERVED])
        if reserved is None:
            raise ProbeError(f"{RESERVED} makes no sense", values[RESERVED])
    boot = sysctl.parse(outputs["sysctl"])
    listeners = connections = None
    if sockets is not None:
        listeners = tuple(socket for socket in sockets if socket.state == "listening")
        in_range = (socket for socket in sockets if first <= socket.port <= last)
        connections = tuple(socket for socket in in_range if socket.state != "listening")
    return Ports(
        listeners=listeners,
        connections=connections,
        is_cut=bool(output.all("more")),
        ephemeral=ephemeral,
        reserved=reserved,
        ephemeral_boot=sysctl.boot_value(boot, EPHEMERAL),
        reserved_boot=sysctl.boot_value(boot, RESERVED),
        privileged_below=number(values.get(_PRIVILEGED, "1024"), _PRIVILEGED),
        firewall=parse_firewall(outputs["firewall"], policy),
    )


def compared(observed: Ports, fleet: FleetFacts = ALONE) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if observed.ephemeral is not None:
        values["ephemeral"] = range_text(*observed.ephemeral)
    if observed.reserved is not None:
        values["reserved"] = ranges_text(observed.reserved) or "none"
    if not observed.firewall.reason:
        values["firewall"] = "; ".join(observed.firewall.rules) or observed.firewall.verdict
    return values


PROBE = Probe("ports", (Section("ports", script), sysctl.SECTION, _FIREWALL_SECTION), parse)
