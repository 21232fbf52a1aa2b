"""The variables that the nodes' facts suggest for a job's environment, each with its reason.

Pure: the snapshots of all nodes go in, completed by where the others are (auditing.with_peers).

NCCL_SOCKET_IFNAME  ``=eth1``: exactly this interface; without "=" it would be a prefix, so that
                    eth1 meant eth10 as well (NCCL user guide, environment variables)
GLOO_SOCKET_IFNAME  the same interface by its plain name: Gloo opens what stands between commas
                    (PyTorch, ProcessGroupGloo)
NCCL_IB_HCA         the RDMA devices that are not the management's: nodeready.nccl_hca
PDSH_RCMD_TYPE      ssh, where there is pdsh: its own default may be rsh; where ssh is the default
                    already, it changes nothing
MASTER_PORT         nodeready.rendezvous

What a node says is data: a name that no interface or device has is not taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nodeready import rendezvous
from nodeready.nccl import socket_ifname
from nodeready.nccl_hca import ib_hca, variable
from nodeready.policy import Policy
from nodeready.probes.base import Unknown
from nodeready.probes.nics import Nics
from nodeready.probes.pdsh import Pdsh
from nodeready.probes.ports import Ports
from nodeready.probes.rdma import Rdma
from nodeready.snapshot import Snapshot

#: What has to be looked at.
SUBJECTS = ("nics", "rdma", "ports", "pdsh")

# The kernel allows more in names (dev_valid_name), but no driver, udev rule or person uses it,
# and a comma, "=" or "^" would mean something to NCCL.
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(:[0-9]{1,3})?")

#: Value or reason with the names of the nodes that have it, the most common first.
Groups = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Variable:
    """A variable of a job's environment.

    value:          what to export; None: it is not exported
    reason:         why this value, or why none
    settled:        nobody has to look at it: no node differs, and all are known
    nodes_by_value: which nodes suggest which value; "" of those that need none
    unknown:        reason -> the nodes of which it could not be found out
    notes:          further lines about it
    """

    name: str
    value: str | None
    reason: str
    settled: bool
    nodes_by_value: Groups = ()
    unknown: Groups = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What `nodeready env` found.

    taken:     when the nodes were looked at, UTC
    nodes:     those that were
    missing:   error -> the nodes that could not be
    """

    taken: str
    nodes: tuple[str, ...]
    missing: Groups
    variables: tuple[Variable, ...]


@dataclass(frozen=True)
class _Said:
    """What one node suggests: a value, "" for none, or None when it cannot be told; and why."""

    value: str | None
    reason: str = field(default="", compare=False)


def grouped(pairs: Mapping[str, str]) -> Groups:
    """Node -> text, as text -> nodes, the most common first."""
    found: dict[str, list[str]] = {}
    for name, text in pairs.items():
        found.setdefault(text, []).append(name)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return tuple((text, tuple(names)) for text, names in ranked)


def _reason(seen: object, what: str) -> str:
    return f"{what}: {seen.reason if isinstance(seen, Unknown) else 'not looked at'}"


def _interface(snapshot: Snapshot) -> _Said:
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return _Said(None, _reason(nics, "its network"))
    name, why = socket_ifname(nics)
    if name is not None and not _INTERFACE.fullmatch(name):
        return _Said(None, f"{name!a} is no plausible name of an interface")
    return _Said(name, why)


def _exactly(snapshot: Snapshot) -> _Said:
    said = _interface(snapshot)
    return _Said(f"={said.value}", said.reason) if said.value else said


def _hca(snapshot: Snapshot) -> _Said:
    rdma, nics = snapshot.subjects.get("rdma"), snapshot.subjects.get("nics")
    if not isinstance(rdma, Rdma):
        return _Said(None, _reason(rdma, "its RDMA devices"))
    devices, why = ib_hca(rdma, nics if isinstance(nics, Nics) else None)
    if devices and not isinstance(nics, Nics):
        # Which of them are the management's is not known.
        return _Said(None, _reason(nics, "its network"))
    strange = [name for name in devices if not _DEVICE.fullmatch(name)]
    if strange:
        return _Said(None, f"{strange[0]!a} is no plausible name of an RDMA device")
    return _Said(variable(devices), why)


def _pdsh(snapshot: Snapshot) -> _Said:
    pdsh = snapshot.subjects.get("pdsh")
    if not isinstance(pdsh, Pdsh):
        return _Said(None, _reason(pdsh, "pdsh"))
    if not pdsh.installed:
        return _Said("", "pdsh is not installed")
    return _Said("ssh", "pdsh is installed, and its own default may be rsh")


def _variable(
    name: str,
    ask: Callable[[Snapshot], _Said],
    snapshots: Mapping[str, Snapshot],
    *,
    harmless: bool = False,
) -> Variable:
    """What the nodes suggest, when they agree.

    harmless: the variable means nothing where a node needs none
    """
    said = {node: ask(snapshot) for node, snapshot in snapshots.items()}
    values = grouped({node: one.value for node, one in said.items() if one.value is not None})
    unknown = grouped({node: one.reason for node, one in said.items() if one.value is None})
    needed = [value for value, _ in values if value or not harmless] or [""]
    if not values:
        return Variable(name, None, "no node tells", False, (), unknown)
    if len(needed) > 1:
        return Variable(name, None, "the nodes differ", False, values, unknown)
    reasons = Counter(one.reason for one in said.values() if one.value == needed[0])
    reason = reasons.most_common(1)[0][0]
    return Variable(name, needed[0] or None, reason, not unknown, values, unknown)


def _sockets(snapshots: Mapping[str, Snapshot]) -> Variable:
    found = _variable("NCCL_SOCKET_IFNAME", _exactly, snapshots)
    names = [value[1:] for value, _ in found.nodes_by_value]
    if found.value is not None or len(names) < 2:
        return found
    # NCCL takes what it finds of a list: where every node has one of them alone, that is the one.
    for _, nodes in found.nodes_by_value:
        for node in nodes:
            if len({*names} & snapshots[node]["nics"].interfaces.keys()) > 1:
                return found
    return replace(
        found, notes=(f"={','.join(names)} means the right one on each: no node has two of them",)
    )


def _port(snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]) -> Variable:
    seen: dict[str, Ports | Unknown] = {}
    for node, snapshot in snapshots.items():
        ports = snapshot.subjects.get("ports")
        seen[node] = ports if isinstance(ports, (Ports, Unknown)) else Unknown("not looked at")
    choice = rendezvous.choose(seen, {node: policies[node].port_range for node in snapshots})
    value = None if choice.port is None else str(choice.port)
    known = tuple(node for node in snapshots if node not in choice.unknown)
    return Variable(
        "MASTER_PORT",
        value,
        choice.reason,
        value is not None and not choice.unknown,
        ((value, known),) if value else (),
        grouped(choice.unknown),
        choice.notes,
    )


def variables(
    snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]
) -> tuple[Variable, ...]:
    """The variables, in the order of this module's list.

    snapshots: node -> what it showed, at least one
    policies:  node -> its policy
    """
    return (
        _sockets(snapshots),
        _variable("GLOO_SOCKET_IFNAME", _interface, snapshots),
        _variable("NCCL_IB_HCA", _hca, snapshots),
        _variable("PDSH_RCMD_TYPE", _pdsh, snapshots, harmless=True),
        _port(snapshots, policies),
    )
