"""Which RDMA ports of a node are to be judged, and how findings name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodeready.policy import Policy
from nodeready.policy.fields import rows
from nodeready.probes.rdma import Rdma
from nodeready.probes.rdma_device import RdmaDevice, RdmaPort

Ports = dict[str, tuple[RdmaDevice, RdmaPort]]

#: Physical states of a port that has somebody on the other side.
_CONNECTED = ("LinkUp", "LinkErrorRecovery", "PortConfigurationTraining")


def some(texts: Iterable[str], joint: str = "; ", most: int = 4) -> str:
    """The first findings in full and how many there are beyond: ``a; b; c; d and 3 more``."""
    listed = list(texts)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return joint.join(listed[:most]) + more


def by_value(values: Mapping[str, object]) -> str:
    """``200 Gb/s on mlx5_3/1; 400 Gb/s on mlx5_0/1, mlx5_1/1``: equal ones together."""
    names: dict[object, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return some(f"{value} on {some(listed, ', ')}" for value, listed in names.items())


def source(port: RdmaPort, file: str) -> str:
    """The path of a port's file."""
    if port.link_layer == "Slingshot":
        return f"/sys/class/cxi/{port.device}/device/port/{file}"
    return f"/sys/class/infiniband/{port.device}/ports/{port.port}/{file}"


def wanted(want: Policy, column: str) -> dict[str, object]:
    """Port -> what the policy says about it in this column."""
    return {
        name: columns[column]
        for name, columns in rows(want.rdma_ports).items()
        if column in columns
    }


def hardware(seen: Rdma) -> Ports:
    """The ports of adapters of this node: without software's, and virtual functions that idle.

    A virtual function beside its physical one waits for a virtual machine, without a link.
    """
    return {
        port.name: (device, port)
        for device in seen.devices.values()
        for port in device.ports
        if device.kind != "software" and (port.active or not device.virtual)
    }


def _switched_off(device: RdmaDevice, port: RdmaPort) -> bool:
    """Whether somebody took the port out of use.

    An Ethernet port says "Disabled" without a cable too; there, its interface tells: it has a
    carrier, be it 0, only when it is switched on. None here: it was given to a container.
    """
    if port.link_layer == "Ethernet":
        return not any(one.carrier is False for one in device.netdevs)
    return port.phys_state == "Disabled"


def configured(seen: Rdma, want: Policy) -> Ports:
    """The ports that must work.

    Those of the policy; without one, each card has at least one port in use. Of a card with an
    active port the other may be without a cable, unless it sees somebody there. A card whose
    ports are all switched off is not in use.
    """
    known = hardware(seen)
    if want.rdma_ports:
        named = rows(want.rdma_ports)
        # A virtual function that idles is judged when it is named.
        every = {p.name: (d, p) for d in seen.devices.values() for p in d.ports}
        return {name: every[name] for name in named if name in every}
    cards: dict[str, Ports] = {}
    for name, (device, port) in known.items():
        cards.setdefault(device.slot, {})[name] = (device, port)
    found: Ports = {}
    for card in cards.values():
        some_active = any(port.active for _, port in card.values())
        for name, (device, port) in card.items():
            waiting = port.state in ("INIT", "ARMED")
            if some_active:
                used = port.active or waiting or port.phys_state in _CONNECTED
            else:
                used = waiting or not _switched_off(device, port)
            if used:
                found[name] = (device, port)
    return found
