"""Judge whether jobs can rendezvous on the policy's ports."""

from __future__ import annotations

from collections.abc import Iterable

from nodeready.policy import Policy
from nodeready.subjects.fact_kinds import FactKinds
from nodeready.subjects.fleet import FleetFacts
from nodeready.subjects.ports.facts import (
    EPHEMERAL,
    PROBE,
    RESERVED,
    Ports,
    Socket,
    compared,
    derived,
    fleet_firewall,
    parse_range,
    ranges_text,
)
from nodeready.subjects.ports.firewall import Firewall
from nodeready.subjects.ports.port_ranges import (
    KERNEL_EPHEMERAL,
    join_ranges,
    overlap,
    parse_ranges,
    range_text,
    without,
)
from nodeready.subjects.result import Result, Subject, check, fail, join_first, ok, unknown, warn
from nodeready.subjects.severity import loses_job

#: Maximum of ranges of ports that are named.
_MOST_RANGES = 4
# The users of services: below the first user of login.defs(5), systemd's dynamic users
# (systemd.exec(5), DynamicUser=), and the user nobody.
_FIRST_USER = 1000
_DYNAMIC = (61184, 65519)
_NOBODY = 65534


def _port_range_text(policy: Policy) -> str:
    return range_text(*policy.port_range)


def _is_service(socket: Socket) -> bool:
    dynamic = _DYNAMIC[0] <= socket.uid <= _DYNAMIC[1]
    return socket.uid < _FIRST_USER or dynamic or socket.uid == _NOBODY


def _holder_text(socket: Socket) -> str:
    """``python3 (pid 4711, user ada, job 42)``."""
    user = socket.user or f"uid {socket.uid}"
    pid = f"pid {socket.pid}, " if socket.pid is not None else ""
    job = f", job {socket.job}" if socket.job else ""
    return f"{socket.process or 'a process'} ({pid}user {user}{job})"


def _holders_text(sockets: Iterable[Socket]) -> str:
    """``29500-29503 by python3 (...)``: the ports of each holder."""
    by_holder: dict[str, set[int]] = {}
    for socket in sockets:
        by_holder.setdefault(_holder_text(socket), set()).add(socket.port)
    texts = (f"{ports_text(ports)} by {holder}" for holder, ports in by_holder.items())
    return join_first(texts)


def ports_text(ports: Iterable[int]) -> str:
    """``29500-29502, 29507``."""
    runs = join_ranges((port, port) for port in ports)
    texts = [range_text(*run) for run in runs[:_MOST_RANGES]]
    return ", ".join(texts + ["..."] * (len(runs) > _MOST_RANGES))


@check(
    "ports.range",
    loses_job("clean_up", "configure"),
    settings=("port_range",),
    fix=(
        "stop the service or give it another port, or give jobs another port_range",
        "wait for the job, or ask its user",
        "wait for the connection to end; see ports.ephemeral",
    ),
)
def range(observed: Ports, policy: Policy) -> Result:
    """Every port of the range is free for the next job's rendezvous.

    A port is held where a process listens on any address: a job that listens on all addresses is
    refused (EADDRINUSE, bind(2)). A service does not give the port up, and a process of root or of
    a system user counts as a service: fail. Another user's process is probably a job, which ends:
    warn. The local port of a connection without a listener is held, too, but not in TIME_WAIT,
    since rendezvous listen with SO_REUSEADDR. A socket that is bound, and neither listens nor is
    connected, is invisible.
    """
    check, expected = "ports.range", f"{_port_range_text(policy)} free"
    if observed.listeners is None or observed.connections is None:
        return unknown(check, "/proc/net/tcp cannot be read")
    first, last = policy.port_range
    listeners = [socket for socket in observed.listeners if first <= socket.port <= last]
    services = [socket for socket in listeners if _is_service(socket)]
    if services:
        fix = "stop the service or give it another port, or give jobs another port_range"
        return fail(check, expected, _holders_text(services), "/proc/net/tcp", fix)
    if listeners:
        actual = f"{_holders_text(listeners)}: a job may be running"
        return warn(check, expected, actual, "/proc/net/tcp", "wait for the job, or ask its user")
    held_sockets = {socket.port: socket for socket in observed.connections}
    if held_sockets:
        texts = (
            f"{port} by {_holder_text(socket)}, {socket.state} to {socket.peer or 'nobody'}"
            for port, socket in sorted(held_sockets.items())
        )
        actual = join_first(texts)
        fix = "wait for the connection to end; see ports.ephemeral"
        return warn(check, expected, actual, "/proc/net/tcp", fix)
    return ok(check, expected)


@check(
    "ports.ephemeral",
    loses_job("configure"),
    settings=("port_range",),
    fix=(
        "net.ipv4.ip_local_reserved_ports = LINE in /etc/sysctl.d, and sysctl -w; "
        "or give jobs another port_range",
    ),
)
def ephemeral(observed: Ports, policy: Policy) -> Result:
    """The kernel gives no port of the range to outgoing connections.

    It takes their ports from ip_local_port_range, without ip_local_reserved_ports
    (Documentation/networking/ip-sysctl.rst): any program's connection could then hold the port of
    a job. The check judges the current values and those of the next boot: of the sysctl files, or
    the kernel's defaults.
    """
    check, ports = "ports.ephemeral", policy.port_range
    if observed.ephemeral is None:
        return unknown(check, f"{EPHEMERAL} cannot be read")
    expected = f"{_port_range_text(policy)} outside the ephemeral ports, or reserved"
    reserved = observed.reserved or ()
    live_ports = overlap(without(observed.ephemeral, reserved), *ports)
    range_line, reserved_line = observed.ephemeral_boot.winner, observed.reserved_boot.winner
    range_boot = (parse_range(range_line.value) if range_line else None) or KERNEL_EPHEMERAL
    reserved_boot = (parse_ranges(reserved_line.value) if reserved_line else None) or ()
    boot_ports = overlap(without(range_boot, reserved_boot), *ports)
    source = ", ".join(line.source for line in (range_line, reserved_line) if line)
    actual = (
        f"ephemeral {range_text(*observed.ephemeral)}, "
        f"reserved {ranges_text(reserved) or 'none'}; "
        f"next boot {range_text(*range_boot)}, reserved {ranges_text(reserved_boot) or 'none'}"
    )
    line = ranges_text(
        tuple(join_ranges((*(reserved if live_ports else reserved_boot or reserved), ports)))
    )
    fix = f"{RESERVED} = {line} in /etc/sysctl.d, and sysctl -w; or give jobs another port_range"
    if live_ports:
        return fail(check, expected, actual, source or f"sysctl {EPHEMERAL}", fix)
    if boot_ports and (range_line or reserved_line):
        return fail(check, expected, actual, source, fix)
    if boot_ports:
        return warn(check, expected, f"{actual}: no sysctl file keeps the values", source, fix)
    return ok(check, expected, f"ephemeral {range_text(*observed.ephemeral)}", source)


def _opening(observed: Firewall, ports: str) -> str:
    """How to open the ports to the cluster's network with the tool that made the rules."""
    first, _, last = ports.partition("-")
    colon_range, manager = f"{first}:{last or first}", observed.manager
    if observed.how != "dropped by":
        return f"take {ports} out of that rule, or give jobs another port_range"
    if any(word in observed.packets_text for word in ("answers", "later packets")):
        if manager == "iptables":
            chain = "OUTPUT" if observed.chain.endswith(" OUTPUT") else "INPUT"
            return f"iptables -I {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        return "in front of that rule: ct state established,related accept"
    if "connections" in observed.packets_text:
        if manager == "ufw":
            return f"ufw allow out proto tcp to CLUSTER_NETWORK port {colon_range}"
        if manager == "iptables":
            return f"iptables -I OUTPUT -p tcp -d CLUSTER_NETWORK --dport {colon_range} -j ACCEPT"
        return f"in front of that rule: ip daddr CLUSTER_NETWORK tcp dport {ports} accept"
    if manager == "firewalld":
        return f"firewall-cmd --permanent --add-port={ports}/tcp; firewall-cmd --reload"
    if manager == "ufw":
        return f"ufw allow proto tcp from CLUSTER_NETWORK to any port {colon_range}"
    if manager == "iptables":
        return f"iptables -I INPUT -p tcp -s CLUSTER_NETWORK --dport {colon_range} -j ACCEPT"
    return f"in front of that rule: ip saddr CLUSTER_NETWORK tcp dport {ports} accept"


@check(
    "ports.firewall",
    loses_job("configure"),
    settings=("port_range",),
    fleet=("addresses", "mesh_passed"),
    fix=(
        "in front of that rule: ip saddr CLUSTER_NETWORK tcp dport PORTS accept",
        "firewall-cmd --permanent --add-port=PORTS/tcp; firewall-cmd --reload",
        "ufw allow proto tcp from CLUSTER_NETWORK to any port BOTH",
        "iptables -I INPUT -p tcp -s CLUSTER_NETWORK --dport BOTH -j ACCEPT",
        "in front of that rule: ct state established,related accept",
        "iptables -I CHAIN -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        "in front of that rule: ip daddr CLUSTER_NETWORK tcp dport PORTS accept",
        "ufw allow out proto tcp to CLUSTER_NETWORK port BOTH",
        "iptables -I OUTPUT -p tcp -d CLUSTER_NETWORK --dport BOTH -j ACCEPT",
        "take PORTS out of that rule, or give jobs another port_range",
        "`nodeready ready` tries it (proof.mesh); where that fails: FIX",
    ),
)
def firewall(observed: Ports, policy: Policy, fleet: FleetFacts) -> Result:
    """The node's packet filter accepts peers' connections to the range, and the node's to theirs.

    The check follows the packets of such connections, first packets and answers, in and out,
    through the rules in force. A reject counts as a drop, and so does NAT that leads a port
    elsewhere. Connections come from ports of ip_local_port_range without ip_local_reserved_ports.
    The peers are the run's nodes; else the hosts of /etc/hosts in the node's networks; else all
    hosts in these networks.

    This is a warning where the rules alone do not decide: they accept one network of the node and
    not another; they drop a host of the network that may be no node; another program decides
    (queue, synproxy), or the time, a user or a counter does; old nft prints a service instead of
    its port; or they allow fewer than 20 new connections per second, or 16 at a time. Then `ready`
    decides: proof.mesh tries the connections. A rule that counts, measures or draws lots stays a
    warning: a few connections do not show the fate of many. Time to live, length, class of service
    and TCP options count as Linux sends them. The check does not cover XDP and other eBPF
    programs, filters of bridges and ARP, NAT of more than 64 KiB, and filters outside the node.

    Without nft the check asks the kernel whether it has rules. Where it has, this is unknown;
    where it has none, the range is open. Where the kernel cannot be asked, a sign of rules makes
    this unknown. Signs: the module nf_tables is loaded, connections are tracked
    (nf_conntrack_count), nftables, firewalld, iptables, netfilter-persistent, shorewall, ferm or
    ufw is enabled; and a table in /proc/net/ip_tables_names, without iptables-save.
    """
    check, rules = "ports.firewall", fleet_firewall(observed, fleet)
    expected = f"{_port_range_text(policy)} open to other nodes"
    if rules.verdict == "unknown":
        return unknown(check, rules.reason)
    source = f"{rules.chain} ({rules.manager})"
    fix = _opening(rules, _port_range_text(policy))
    ports = rules.packets_text.format(rules.ports)
    if rules.verdict == "dropped":
        peers = f" for {rules.peers} known nodes" if rules.peers else ""
        other_rule = f"; for others: {rules.other_rule}" if rules.other_rule else ""
        return fail(
            check, expected, f"{ports} {rules.how} {rules.rule}{peers}{other_rule}", source, fix
        )
    if rules.verdict == "cannot tell":
        open_networks = f", open to {', '.join(rules.networks)}" if rules.networks else ""
        actual = f"{ports} depends on {rules.rule}{open_networks}"
        if rules.varies:
            tried = "passed, but they do" if rules.tried else "do"
            actual += f": a few connections (proof.mesh) {tried} not show what it does to a job's"
        else:
            fix = f"`nodeready ready` tries it (proof.mesh); where that fails: {fix}"
        return warn(check, expected, actual, source, fix)
    if rules.tried:
        return ok(check, expected, f"open to all that tried (proof.mesh): {rules.rule}", source)
    by = rules.manager
    to = f" to {', '.join(rules.networks)}" if rules.networks else ""
    unseen = any(tool.state == "no sign of rules" for tool in rules.tools)
    none = "open, no sign of rules" if unseen else "open, no rules"
    return ok(check, expected, f"open{to} ({by})" if by else none)


@check(
    "ports.privileged",
    loses_job("configure"),
    settings=("port_range",),
    fix=("a port_range from START on, or sysctl net.ipv4.ip_unprivileged_port_start",),
)
def privileged(observed: Ports, policy: Policy) -> Result:
    """Ordinary users may listen on the range: below ip_unprivileged_port_start only root may
    (Documentation/networking/ip-sysctl.rst; 1024 by default)."""
    check, start = "ports.privileged", observed.privileged_below
    expected = f"{_port_range_text(policy)} from {start} on"
    if policy.port_range[0] < start:
        actual = f"ports below {start} are root's alone"
        fix = f"a port_range from {start} on, or sysctl net.ipv4.ip_unprivileged_port_start"
        return fail(check, expected, actual, "sysctl net.ipv4.ip_unprivileged_port_start", fix)
    return ok(check, expected, f"users may listen from {start} on")


SUBJECT = Subject(
    "ports",
    __doc__,
    checks=(range, ephemeral, firewall, privileged),
    probe=PROBE,
    compared=compared,
    derived=derived,
    kinds=FactKinds(
        # Programs come and go; the peers of a run decide a part of the firewall's verdict.
        volatile="""
            where last_name listeners connections more detail
            firewall.networks firewall.peers firewall.tried
        """,
        elements={"firewall.tools": "name"},
    ),
)
