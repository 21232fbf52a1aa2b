"""Judge whether a job's processes on different nodes can meet on the policy's ports."""

from __future__ import annotations

from nodeready.checks.declare import check
from nodeready.checks.ports import folded
from nodeready.checks.proof_unseen import unseen
from nodeready.policy import Policy
from nodeready.probes.firewall import shown
from nodeready.proofs.mesh_seen import Blocked, Mesh
from nodeready.proofs.proved import Proved
from nodeready.results import Result, fail, na, ok, unknown, warn

#: Milliseconds; see `mesh`.
_SLOW_MS = 100
#: At most so many peers, errors and findings are named.
_MOST = 4


def _asked(seen: Mesh) -> str:
    """The ports that were tried: ``29500-29510``, ``32 ports of 20000-30000``."""
    span, tried = shown(seen.first, seen.last), len(seen.listening) + len(seen.busy)
    return span if tried == seen.last - seen.first + 1 else f"{tried} ports of {span}"


def _seen(check: str, seen: Proved) -> Mesh | Result:
    """What all nodes together saw of this one, or the result when there is nothing to judge."""
    missing = unseen(check, seen, "mesh")
    if missing is not None:
        return missing
    assert isinstance(seen.mesh, Mesh)
    return seen.mesh


@check(
    "proof.ports",
    fix=("ports.privileged says from where on users may listen; else it is a security module",),
)
def ports(seen: Proved, want: Policy) -> Result:
    """A program can listen on every port of the range, as torchrun's store would.

    Of a range of more than 32 ports, the first, the last and some between are tried. Who holds a
    port, ports.range tells: nothing here ever connects to a listener that is not ours.
    """
    check = "proof.ports"
    mesh = _seen(check, seen)
    if isinstance(mesh, Result):
        return mesh
    expected = f"{_asked(mesh)} can be listened on"
    if not mesh.busy:
        return ok(check, expected)
    errors: dict[str, list[int]] = {}
    for one in mesh.busy:
        errors.setdefault(one.error, []).append(one.port)
    texts = [f"{folded(numbers)}: {error}" for error, numbers in errors.items()]
    fix = "ports.range names who holds them; wait for that, or give jobs another port_range"
    if any(one.error == "Permission denied" for one in mesh.busy):
        fix = "ports.privileged says from where on users may listen; else it is a security module"
    return fail(check, expected, "; ".join(texts[:_MOST]), "", fix)


def _named(peers: tuple[str, ...]) -> str:
    more = f" and {len(peers) - _MOST} more" if len(peers) > _MOST else ""
    return ", ".join(peers[:_MOST]) + more


def _who(one: Blocked) -> str:
    """``all 5 peers that tried``, ``3 of 5 peers (gpu001, gpu002, gpu003)``."""
    if len(one.peers) == one.tried:
        return f"all {one.tried} peers"
    return f"{len(one.peers)} of {one.tried} peers ({_named(one.peers)})"


def _told(one: Blocked) -> str:
    """One finding as a person reads it."""
    if not one.ports:
        if one.kind == "pair":
            return f"to {one.peers[0]}: {one.cause}"
        if one.kind == "target":
            return f"on {_who(one)}: {one.cause}"
        return f"the names of {_who(one)} lead astray: {one.cause}"
    numbers = folded(one.ports)
    if one.kind == "pair":
        told = f"{numbers} of {one.peers[0]} not reached ({one.cause})"
        if one.back is None:
            return told
        return told + ("; the way back works: asymmetric" if one.back else "; nor the way back")
    if one.kind == "both":
        return f"{numbers} neither reached from nor reached at {_who(one)} ({one.cause})"
    if one.kind == "target":
        back = "; its own connections pass: inbound" if one.back else ""
        return f"{numbers} unreachable from {_who(one)} ({one.cause}){back}"
    back = "; it is reached itself: outbound" if one.back else ""
    return f"{numbers} not reached at {_who(one)} ({one.cause}){back}"


@check(
    "proof.mesh",
    fix=(
        "correct /etc/hosts or the name service",
        "look for lost packets (nics.*, nstat TcpRetransSegs) and for the route",
    ),
)
def mesh(seen: Proved, want: Policy) -> Result:
    """The node reaches other nodes, and they reach it, on every port of the range.

    Only listeners that we put there ourselves are connected to. A node is named when at least
    half of its peers fail in one direction; what fails beside that is between two nodes. Between
    nodes of one cluster a handshake takes less than 1 ms: a median above 100 ms is packets that
    are lost and sent again (after 1 s, tcp(7)), or a detour.
    """
    check = "proof.mesh"
    found = _seen(check, seen)
    if isinstance(found, Result):
        return found
    if found.nodes < 2:
        return na(check, "one node alone")
    expected = f"{_asked(found)} open between the nodes"
    if found.blocked:
        more = len(found.blocked) - _MOST
        texts = [_told(one) for one in found.blocked[:_MOST]]
        texts += [f"and {more} more"] if more > 0 else []
        fix = "packet filters here (ports.firewall), on the peers and between them"
        if not any(one.ports for one in found.blocked):
            fix = "correct /etc/hosts or the name service"
        return fail(check, expected, "; ".join(texts), "", fix)
    if not found.to and not found.by:
        return unknown(check, "no connection was tried in time")
    tried = (
        f"{found.reached} of {found.to} peers reached, reached by {found.reached_by} of {found.by}"
    )
    if not found.reached and not found.reached_by:
        # Of two nodes nobody can tell whose fault it is: neither of them is well.
        return unknown(check, f"{tried}: see what the other nodes say")
    if found.median_ms is not None and found.median_ms > _SLOW_MS:
        actual = (
            f"{tried}, but a handshake takes {found.median_ms:.0f} ms "
            f"(median; to {found.worst_peer} {found.worst_ms:.0f} ms)"
        )
        fix = "look for lost packets (nics.*, nstat TcpRetransSegs) and for the route"
        return warn(check, expected, actual, "", fix)
    return ok(check, expected, tried)
