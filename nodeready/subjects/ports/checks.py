"""Judge whether jobs can rendezvous on the policy's ports."""

from __future__ import annotations

from collections.abc import Iterable

from nodeready.core.base import grouped
from nodeready.core.policy import Policy
from nodeready.core.result import FactKinds, Result, Subject, check, join_first
from nodeready.core.severity import loses_job
from nodeready.core.text import join_ranges, range_text
from nodeready.subjects.ports import facts

#: Maximum of ranges of ports that are named.
_MOST_RANGES = 4
# The users of services: below the first user of login.defs(5), systemd's dynamic users
# (systemd.exec(5), DynamicUser=), and the user nobody.
_FIRST_USER = 1000
_DYNAMIC = (61184, 65519)
_NOBODY = 65534

_SERVICE_FIX = "stop the service or give it another port, or give jobs another port_range"
_JOB_FIX = "wait for the job, or ask its user"
_CONNECTION_FIX = "wait for the connection to end; see ports.ephemeral"


def _holder_text(socket: facts.Socket) -> str:
    """``python3 (pid 4711, user ada, job 42)``."""
    user = socket.user or f"uid {socket.uid}"
    pid = f"pid {socket.pid}, " if socket.pid is not None else ""
    job = f", job {socket.job}" if socket.job else ""
    return f"{socket.process or 'a process'} ({pid}user {user}{job})"


def _holders_text(sockets: Iterable[facts.Socket]) -> str:
    """``29500-29503 by python3 (...)``: the ports of each holder."""
    by_holder = grouped((_holder_text(socket), socket.port) for socket in sockets)
    return join_first(f"{ports_text(ports)} by {holder}" for holder, ports in by_holder.items())


def ports_text(ports: Iterable[int]) -> str:
    """``29500-29502, 29507``."""
    runs = join_ranges((port, port) for port in ports)
    texts = [range_text(*run) for run in runs[:_MOST_RANGES]]
    return ", ".join(texts + ["..."] * (len(runs) > _MOST_RANGES))


@check("ports.range", loses_job("clean_up", "configure"), settings=("port_range",),
       fix=(_SERVICE_FIX, _JOB_FIX, _CONNECTION_FIX))  # fmt: skip
def range(observed: facts.Ports, policy: Policy) -> Result:
    """Every port of the range is free for the next job's rendezvous.

    A port is held where a process listens on any address: a job that listens on all addresses is
    refused (EADDRINUSE, bind(2)). A service does not give the port up, and a process of root or of
    a system user counts as a service: fail. Another user's process is probably a job, which ends:
    warn. The local port of a connection without a listener is held, too, but not in TIME_WAIT,
    since rendezvous listen with SO_REUSEADDR. A socket that is bound, and neither listens nor is
    connected, is invisible.
    """
    check = range.expecting(f"{range_text(*policy.port_range)} free")
    if observed.listeners is None or observed.connections is None:
        return range.unknown("/proc/net/tcp cannot be read")
    first, last = policy.port_range
    listeners = [socket for socket in observed.listeners if first <= socket.port <= last]
    services = [
        socket
        for socket in listeners
        if socket.uid < _FIRST_USER
        or _DYNAMIC[0] <= socket.uid <= _DYNAMIC[1]
        or socket.uid == _NOBODY
    ]
    if services:
        return check.fail(_holders_text(services), "/proc/net/tcp", _SERVICE_FIX)
    if listeners:
        actual = f"{_holders_text(listeners)}: a job may be running"
        return check.warn(actual, "/proc/net/tcp", _JOB_FIX)
    if held_sockets := {socket.port: socket for socket in observed.connections}:
        texts = (
            f"{port} by {_holder_text(socket)}, {socket.state} to {socket.peer or 'nobody'}"
            for port, socket in sorted(held_sockets.items())
        )
        return check.warn(join_first(texts), "/proc/net/tcp", _CONNECTION_FIX)
    return check.ok()


@check("ports.ephemeral", loses_job("configure"), settings=("port_range",), fix=(
    "net.ipv4.ip_local_reserved_ports = LINE in /etc/sysctl.d, and sysctl -w; "
    "or give jobs another port_range",
))  # fmt: skip
def ephemeral(observed: facts.Ports, policy: Policy) -> Result:
    """The kernel gives no port of the range to outgoing connections.

    It takes their ports from ip_local_port_range, without ip_local_reserved_ports
    (Documentation/networking/ip-sysctl.rst): any program's connection could then hold the port of
    a job. The check judges the current values and those of the next boot: of the sysctl files, or
    the kernel's defaults.
    """
    ports = policy.port_range
    if observed.ephemeral is None:
        return ephemeral.unknown(f"{facts.EPHEMERAL} cannot be read")
    check = ephemeral.expecting(f"{range_text(*ports)} outside the ephemeral ports, or reserved")
    reserved = observed.reserved or ()
    live_ports = facts.overlap(facts.without(observed.ephemeral, reserved), *ports)
    range_line, reserved_line = observed.ephemeral_boot.winner, observed.reserved_boot.winner
    range_boot = facts.parse_range(range_line.value if range_line else "")
    range_boot = range_boot or facts.KERNEL_EPHEMERAL
    reserved_boot = facts.parse_ranges(reserved_line.value if reserved_line else "") or ()
    boot_ports = facts.overlap(facts.without(range_boot, reserved_boot), *ports)
    source = ", ".join(line.source for line in (range_line, reserved_line) if line)
    actual = (
        f"ephemeral {range_text(*observed.ephemeral)}, "
        f"reserved {facts.ranges_text(reserved) or 'none'}; next boot {range_text(*range_boot)}, "
        f"reserved {facts.ranges_text(reserved_boot) or 'none'}"
    )
    kept_ranges = reserved if live_ports else reserved_boot or reserved
    line = facts.ranges_text(tuple(join_ranges((*kept_ranges, ports))))
    setting = f"{facts.RESERVED} = {line}"
    fix = f"{setting} in /etc/sysctl.d, and sysctl -w; or give jobs another port_range"
    if live_ports or (boot_ports and source):
        return check.fail(actual, source or f"sysctl {facts.EPHEMERAL}", fix)
    if boot_ports:
        return check.warn(f"{actual}: no sysctl file keeps the values", source, fix)
    return check.ok(f"ephemeral {range_text(*observed.ephemeral)}", source)


@check(
    "ports.firewall",
    loses_job("configure"),
    settings=("port_range",),
    fix="take the range out of that rule (nft list ruleset, iptables-save), or give jobs another "
    "port_range; `nodeready ready` proves the ports",
)
def firewall(observed: facts.Ports, policy: Policy) -> Result:
    """No rule of the node's packet filter drops the range by its text.

    Rules with a drop or reject, or such a policy of a chain, can drop a job's connections. The
    check reads each rule's text alone, and says nothing about what the rules together do: a rule
    may stand behind one that accepts, or in a chain that a job's packets do not reach. It is:

    - ok where nothing drops or rejects, chains of forwarded packets aside; and where rules accept
      all ports of the range, without another condition than TCP and a new connection;
    - a warning where a rule drops or rejects a port of the range, without another condition, and
      no rule accepts one;
    - na otherwise: not known. `nodeready ready` proves the ports by connections (proof.mesh).
    """
    rules = observed.firewall
    check = firewall.expecting(f"no rule that drops {range_text(*policy.port_range)}")
    if rules.verdict == "unknown":
        return firewall.unknown(rules.reason)
    if rules.verdict == "no drop":
        return check.ok("no rule drops or rejects")
    made_by = f" ({rules.manager})" if rules.manager else ""
    texts = f"{join_first(rules.rules)}{made_by}"
    if rules.verdict == "accept":
        return check.ok(f"accepted by the text of {texts}")
    if rules.verdict == "drop":
        return check.warn(f"{rules.ports} dropped by the text of {texts}")
    reason = rules.reason or f"{rules.drop}{made_by}"
    if rules.rules:
        reason += f"; the range is named by {texts}"
    return firewall.na(f"not known: {reason}; `nodeready ready` proves it (proof.mesh)")


@check("ports.privileged", loses_job("configure"), settings=("port_range",), fix=(
    "a port_range from START on, or sysctl net.ipv4.ip_unprivileged_port_start",
))  # fmt: skip
def privileged(observed: facts.Ports, policy: Policy) -> Result:
    """Ordinary users may listen on the range: below ip_unprivileged_port_start only root may
    (Documentation/networking/ip-sysctl.rst; 1024 by default).
    """
    start = observed.privileged_below
    check = privileged.expecting(f"{range_text(*policy.port_range)} from {start} on")
    if policy.port_range[0] < start:
        actual = f"ports below {start} are root's alone"
        fix = f"a port_range from {start} on, or sysctl net.ipv4.ip_unprivileged_port_start"
        return check.fail(actual, "sysctl net.ipv4.ip_unprivileged_port_start", fix)
    return check.ok(f"users may listen from {start} on")


SUBJECT = Subject(
    "ports", __doc__, checks=(range, ephemeral, firewall, privileged), probe=facts.PROBE,
    compared=facts.compared,
    # Programs come and go.
    kinds=FactKinds(volatile="where last_name listeners connections more"),
)  # fmt: skip
