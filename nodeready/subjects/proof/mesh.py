"""Judge whether a job's processes on different nodes can connect on the job's ports."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, fail, join_first, na, ok, unknown, warn
from nodeready.core.severity import loses_job
from nodeready.subjects.ports.checks import ports_text
from nodeready.subjects.ports.port_ranges import range_text
from nodeready.subjects.proof.facts import MESH, Proved
from nodeready.subjects.proof.mesh_facts import Blocked, Mesh
from nodeready.subjects.proof.preconditions import observation

#: Milliseconds of a median handshake above which it is slow; see `mesh`.
_SLOW_MS = 100
#: EADDRINUSE, in glibc's words and in musl's: another socket has the port.
_HELD = {"Address already in use", "Address in use"}

_PERMISSION_FIX = (
    "ports.privileged says from where on users may listen; else it is a security module"
)
_ADDRESS_FIX = "correct /etc/hosts or the name service"
_CROWD_FIX = "see who connects to them: ss -tnp, and run again"
_SLOW_FIX = "look for lost packets (nics.*, nstat TcpRetransSegs) and for the route"
_OWN_NAME_FIX = (
    "the node's address for its name in /etc/hosts, or the GLOO_SOCKET_IFNAME of `nodeready env`"
)
_NAMES_FIX = (
    "host names in /etc/hosts or the name service of all nodes, or a MASTER_ADDR that is an "
    "address"
)


def _tried_ports(observed: Mesh) -> str:
    """The ports that were tried: ``29500-29510``, ``32 ports of 20000-30000``."""
    span = range_text(observed.first, observed.last)
    tried = len(observed.listening) + len(observed.busy)
    return span if tried == observed.last - observed.first + 1 else f"{tried} ports of {span}"


@check("proof.ports", loses_job("configure"), proof=MESH, fix=(_PERMISSION_FIX,))
def ports(observed: Proved, policy: Policy) -> Result:
    """A program can listen on every port of the range, as torchrun's store would.

    In a range of more than 32 ports, the first, the last and some between are tried. ports.range
    names who holds a port: nothing here ever connects to a listener that is not ours. Held ports
    fail only when all are held: else one user could stop every other user's job, and
    `nodeready env` gives a job a free port.
    """
    check = "proof.ports"
    mesh = observation(check, observed, "mesh", Mesh)
    if isinstance(mesh, Result):
        return mesh
    expected = f"{_tried_ports(mesh)} can be listened on"
    if not mesh.busy:
        return ok(check, expected)
    errors: dict[str, list[int]] = {}
    for port in mesh.busy:
        errors.setdefault(port.error, []).append(port.port)
    texts = [f"{ports_text(numbers)}: {error}" for error, numbers in errors.items()]
    fix = "ports.range names who holds them; wait for that, or give jobs another port_range"
    if any(port.error == "Permission denied" for port in mesh.busy):
        fix = _PERMISSION_FIX
    judged = warn if _HELD.issuperset(errors) and mesh.listening else fail
    return judged(check, expected, "; ".join(texts[:4]), "", fix)


def _peers_text(blocked: Blocked) -> str:
    """``all 5 peers that tried``, ``3 of 5 peers (gpu001, gpu002, gpu003)``."""
    if len(blocked.peers) == blocked.tried:
        return f"all {blocked.tried} peers"
    return f"{len(blocked.peers)} of {blocked.tried} peers ({join_first(blocked.peers, ', ')})"


def _blocked_text(blocked: Blocked) -> str:
    """One finding in words."""
    if not blocked.ports:
        if blocked.kind == "pair":
            return f"to {blocked.peers[0]}: {blocked.cause}"
        if blocked.kind == "target":
            return f"on {_peers_text(blocked)}: {blocked.cause}"
        return f"the names of {_peers_text(blocked)} lead astray: {blocked.cause}"
    numbers = ports_text(blocked.ports)
    if blocked.kind == "pair":
        text = f"{numbers} of {blocked.peers[0]} not reached ({blocked.cause})"
        if blocked.back is None:
            return text
        return text + (
            "; the way back works: asymmetric" if blocked.back else "; nor the way back"
        )
    if blocked.kind == "both":
        peers = _peers_text(blocked)
        return f"{numbers} neither reached from nor reached at {peers} ({blocked.cause})"
    if blocked.kind == "target":
        back = "; its own connections pass: inbound" if blocked.back else ""
        return f"{numbers} unreachable from {_peers_text(blocked)} ({blocked.cause}){back}"
    back = "; it is reached itself: outbound" if blocked.back else ""
    return f"{numbers} not reached at {_peers_text(blocked)} ({blocked.cause}){back}"


@check(
    "proof.mesh",
    loses_job("inspect", "clean_up", "configure"),
    proof=MESH,
    fix=(_ADDRESS_FIX, _CROWD_FIX, _SLOW_FIX, _OWN_NAME_FIX, _NAMES_FIX),
)
def mesh(observed: Proved, policy: Policy) -> Result:
    """The node reaches other nodes, and they reach it, on every port of the range.

    Only nodeready's own listeners are connected to. A node is named when at least half of its
    peers fail in one direction; any other failure is between two nodes. Between nodes of one
    cluster a handshake takes less than 1 ms: a median above 100 ms means lost packets that are
    sent again (after 1 s, tcp(7)), or a detour. A program that connects to our listeners in a loop
    can keep peers from them: then the peers' attempts prove nothing. A host name with a wrong
    address is a warning: on the node itself, where gloo takes the address at which its peers find
    it (Debian's 127.0.1.1), and on its peers, to which torchrun gives it as MASTER_ADDR.
    """
    check = "proof.mesh"
    reach = observation(check, observed, "mesh", Mesh)
    if isinstance(reach, Result):
        return reach
    if reach.nodes < 2:
        return na(check, "one node alone")
    expected = f"{_tried_ports(reach)} open between the nodes"
    if reach.blocked:
        fix = "packet filters here (nft list ruleset), on the peers and between them"
        if not any(blocked.ports for blocked in reach.blocked):
            fix = _ADDRESS_FIX
        return fail(check, expected, join_first(map(_blocked_text, reach.blocked)), "", fix)
    if reach.crowd:
        actual = f"cannot tell who reaches it: {reach.crowd} foreign connections came meanwhile"
        return warn(check, expected, actual, "", _CROWD_FIX)
    if not reach.to and not reach.by:
        return unknown(check, "no connection was tried in time")
    tried = f"{reach.reached} of {reach.to} peers reached"
    tried += f", reached by {reach.reached_by} of {reach.by}"
    if not reach.reached and not reach.reached_by:
        # With two nodes, either can be at fault.
        return unknown(check, f"{tried}: see what the other nodes say")
    if reach.median_ms is not None and reach.median_ms > _SLOW_MS:
        actual = (
            f"{tried}, but a handshake takes {reach.median_ms:.0f} ms "
            f"(median; to {reach.worst_peer} {reach.worst_ms:.0f} ms)"
        )
        return warn(check, expected, actual, "", _SLOW_FIX)
    return _wrong_names(check, expected, reach) or ok(check, expected, tried)


def _wrong_names(check: str, expected: str, reach: Mesh) -> Result | None:
    """The warning where a host name would lead a job astray."""
    if reach.own_name:
        actual = f"on the node itself, {reach.own_name}: gloo would wait there for its peers"
        return warn(check, expected, actual, "", _OWN_NAME_FIX)
    if reach.names:
        actual = "; ".join(_blocked_text(blocked) for blocked in reach.names[:4])
        return warn(check, expected, actual, "", _NAMES_FIX)
    return None
