"""Judge the RDMA ports: there, active, as fast and as set up as they should be.

Without a policy only what is wrong on any node is judged, and only on ports that are in use
(`rdma_ports.configured`): the second port of a card may be without a cable.
"""

from __future__ import annotations

from nodeready.checks.declare import Subject, check
from nodeready.checks.rdma_changes import errors
from nodeready.checks.rdma_ports import by_value, configured, hardware, some, source, wanted
from nodeready.policy import Policy
from nodeready.policy.fields import rows
from nodeready.probes.rdma import PROBE, Rdma, compared, counters, learned
from nodeready.probes.rdma_device import RdmaDevice, RdmaPort
from nodeready.results import Result, fail, na, ok, unknown, warn

_NONE = "no RDMA device"
_UNUSED = "no RDMA port is in use: all are switched off"


@check(
    "rdma.expected",
    settings=("rdma_ports",),
    fix=("look for the adapter in lspci and for its driver in dmesg",),
)
def expected(seen: Rdma, want: Policy) -> Result:
    """Every port of the policy's rdma_ports is there.

    A card that fell off the bus, or whose driver gave up on it, leaves no port at all: only a list
    of what should be there shows that.
    """
    check, named = "rdma.expected", rows(want.rdma_ports)
    if not named:
        return na(check, "the policy names no rdma_ports")
    missing = [name for name in named if name not in seen.ports]
    if missing:
        there = some(seen.ports, ", ") or "no RDMA port"
        return fail(
            check,
            f"{len(named)} ports",
            f"missing: {some(missing, ', ')} (there: {there})",
            "/sys/class/infiniband",
            "look for the adapter in lspci and for its driver in dmesg",
        )
    return ok(check, f"{len(named)} ports")


@check("rdma.devices", fix=("load the adapter's driver, see dmesg", "modprobe ib_uverbs"))
def devices(seen: Rdma, want: Policy) -> Result:
    """Every adapter has an RDMA device, and programs can open each device.

    What only RDMA uses (PCI classes 0x0207 and 0x0208, EFA, Slingshot) and has no device has lost
    its driver; functions given to virtual machines are passed over. Without ib_uverbs there is no
    /dev/infiniband/uverbs*, through which NCCL and MPI reach a device.
    """
    check = "rdma.devices"
    real = {n: d for n, d in seen.devices.items() if d.kind != "software"}
    if not real and not seen.without:
        return na(check, _NONE)
    lost = [
        f"adapter {one.pci_address} has "
        + ("a driver, but no RDMA device" if one.bound else "no driver")
        for one in seen.without
    ]
    closed = [name for name, d in real.items() if d.kind != "cxi" and not d.uverbs]
    wrong = lost + [f"{name} has no uverbs" for name in closed]
    if wrong:
        address = seen.without[0].pci_address if lost else ""
        where = f"/sys/bus/pci/devices/{address}" if lost else "/sys/class/infiniband_verbs"
        fix = "load the adapter's driver, see dmesg" if lost else "modprobe ib_uverbs"
        return fail(check, "an open RDMA device per adapter", some(wrong), where, fix)
    return ok(check, f"{len(real)} devices")


def _fault(device: RdmaDevice, port: RdmaPort) -> str:
    """What is wrong with the state of a port, or ""."""
    if device.kind == "efa":
        down = [one.name for one in device.netdevs if one.operstate == "down"]
        return f"{port.name}: {', '.join(down)} is down" if down else ""
    if port.state in ("INIT", "ARMED") and port.link_layer != "Ethernet":
        return f"{port.name}: {port.state}, no subnet manager has set it up"
    if port.active and port.phys_state in ("", "LinkUp"):
        return ""
    return f"{port.name}: {', '.join(text for text in (port.state, port.phys_state) if text)}"


@check(
    "rdma.state",
    settings=("rdma_ports",),
    fix=("check the fabric's subnet manager (sminfo; opensm or UFM)",),
)
def state(seen: Rdma, want: Policy) -> Result:
    """Every port in use is ACTIVE and LinkUp: any other state carries no traffic.

    INIT and ARMED have a link and wait for the subnet manager (InfiniBand Architecture
    Specification, 7.2.7). Amazon's EFA always says ACTIVE (drivers/infiniband/hw/efa), so that
    only the interface of its adapter is judged, where it has one.
    """
    check, wants = "rdma.state", "ACTIVE, LinkUp"
    if not hardware(seen):
        return na(check, _NONE)
    used = configured(seen, want)
    told = {n: (d, p) for n, (d, p) in used.items() if d.kind != "efa" or d.netdevs}
    if not told:
        return na(check, "EFA tells no state of its link" if used else _UNUSED)
    faults = {name: text for name, pair in told.items() if (text := _fault(*pair))}
    silent = [name for name in faults if not told[name][1].state]
    faulty = {name: text for name, text in faults.items() if name not in silent}
    if faulty:
        port = told[next(iter(faulty))][1]
        fix = f"check the cable and the switch port of {some(faulty, ', ')}"
        if all("subnet manager" in text for text in faulty.values()):
            fix = "check the fabric's subnet manager (sminfo; opensm or UFM)"
        return fail(check, wants, some(faulty.values()), source(port, "state"), fix)
    if silent:
        return unknown(check, f"no state of {some(silent, ', ')}")
    return ok(check, wants, f"{len(told)} ports ACTIVE, LinkUp")


@check(
    "rdma.rate",
    settings=("rdma_ports",),
    fix=("reseat or replace the cable of WRONG, or retrain the link",),
)
def rate(seen: Rdma, want: Policy) -> Result:
    """Every port runs at the policy's rate_gbps; without one, as fast as the fastest of its kind.

    A link that trained with fewer lanes or at a lower speed halves the speed of every collective
    of the job. Without a policy only InfiniBand ports of the same model and board are compared,
    active ones: on Ethernet different speeds on one node are usual.
    """
    check, asked = "rdma.rate", wanted(want, "rate_gbps")
    used = {n: (d, p) for n, (d, p) in configured(seen, want).items() if p.active}
    if not hardware(seen):
        return na(check, _NONE)
    slow: dict[str, float | None] = {}
    wants: dict[str, object] = {}
    if want.rdma_ports:
        if not asked:
            return na(check, "the policy names no rate_gbps")
        wants = {name: asked[name] for name in used if name in asked}
    else:
        kinds: dict[tuple[str, str], dict[str, float]] = {}
        for name, (device, port) in used.items():
            if port.link_layer == "InfiniBand" and port.rate_gbps is not None:
                kind = kinds.setdefault((device.hca_type, device.board_id), {})
                kind[name] = port.rate_gbps
        for kind in kinds.values():
            if len(kind) > 1:
                wants.update(dict.fromkeys(kind, max(kind.values())))
    slow = {n: used[n][1].rate_gbps for n in wants if used[n][1].rate_gbps != wants[n]}
    if not wants:
        return na(check, "no port to compare with, and the policy names no rate_gbps")
    expects = by_value({name: f"{value:g} Gb/s" for name, value in wants.items()})
    unread = [name for name, value in slow.items() if value is None]
    wrong = {name: used[name][1].rate_text for name in slow if name not in unread}
    if wrong:
        first = used[next(iter(wrong))][1]
        fix = f"reseat or replace the cable of {some(wrong, ', ')}, or retrain the link"
        return fail(check, expects, by_value(wrong), source(first, "rate"), fix)
    if unread:
        return unknown(check, f"no rate of {some(unread, ', ')}")
    return ok(check, expects)


@check(
    "rdma.link_layer",
    settings=("rdma_ports",),
    fix=("FIX, then reboot", "set the adapter's port type"),
)
def link_layer(seen: Rdma, want: Policy) -> Result:
    """Every port has the policy's link layer: an adapter that can be both may have been reset.

    ConnectX adapters keep the choice in their firmware (mlxconfig, LINK_TYPE_P1).
    """
    check, asked = "rdma.link_layer", wanted(want, "link_layer")
    if not asked:
        return na(check, "the policy names no link_layer")
    used = {name: pair for name, pair in configured(seen, want).items() if name in asked}
    if not used:
        return na(check, "none of the policy's ports is there")
    wrong = {n: p.link_layer for n, (_, p) in used.items() if p.link_layer != asked[n]}
    expects = by_value({name: asked[name] for name in used})
    unread = [name for name, layer in wrong.items() if not layer]
    if len(wrong) > len(unread):
        wrong = {name: layer for name, layer in wrong.items() if layer}
        device, port = used[next(iter(wrong))]
        fix = f"mlxconfig -d {device.pci_address} set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet)"
        fix = f"{fix}, then reboot" if device.kind == "mlx5" else "set the adapter's port type"
        return fail(check, expects, by_value(wrong), source(port, "link_layer"), fix)
    if unread:
        return unknown(check, f"no link layer of {some(unread, ', ')}")
    return ok(check, expects)


@check(
    "rdma.firmware",
    settings=("rdma_ports",),
    fix=("flash all to one version", "flash the adapters of WRONG"),
)
def firmware(seen: Rdma, want: Policy) -> Result:
    """The firmware is the policy's; without one, equal on all boards of the same kind.

    Adapters with different firmware differ in speed and in bugs; NVIDIA qualifies a cluster with
    one version. Different versions stop no job, so without a policy they are a warning.
    """
    check, asked = "rdma.firmware", wanted(want, "firmware")
    found = {name: device.firmware for name, (device, _) in hardware(seen).items()}
    path = "/sys/class/infiniband/{}/fw_ver"
    if asked:
        there = {name: found[name] for name in asked if name in found}
        wrong = {name: text for name, text in there.items() if text and text != asked[name]}
        expects = by_value({name: asked[name] for name in there})
        if wrong:
            where = path.format(next(iter(wrong)).partition("/")[0])
            fix = f"flash the adapters of {some(wrong, ', ')}"
            return fail(check, expects, by_value(wrong), where, fix)
        unread = [name for name, text in there.items() if not text]
        if unread:
            return unknown(check, f"no firmware version of {some(unread, ', ')}")
        return ok(check, expects) if there else na(check, "none of the policy's ports is there")
    if want.rdma_ports:
        return na(check, "the policy names no firmware")
    boards: dict[tuple[str, str], dict[str, str]] = {}
    for device in seen.devices.values():
        if device.firmware and device.kind != "software":
            boards.setdefault((device.hca_type, device.board_id), {})[device.name] = (
                device.firmware
            )
    if not boards:
        return na(check, "no firmware to compare" if seen.devices else _NONE)
    mixed = [board for board in boards.values() if len({*board.values()}) > 1]
    if mixed:
        where = path.format(next(iter(mixed[0])))
        fix = "flash all to one version"
        return warn(check, "equal on boards of a kind", some(map(by_value, mixed)), where, fix)
    texts = by_value({n: text for board in boards.values() for n, text in board.items()})
    return ok(check, "equal on boards of a kind", texts)


@check(
    "rdma.gids",
    settings=("rdma_ports",),
    fix=("give its interface an address, and see cma_roce_mode",),
)
def gids(seen: Rdma, want: Policy) -> Result:
    """Every active RoCE port has a RoCE v2 GID: v1 is not routed, and NCCL and MPI ask for v2.

    Linux makes GIDs from the interface's addresses, so one without any has none; the type is in
    gid_attrs/types (Documentation/ABI/stable/sysfs-class-infiniband). iWARP has no such GIDs.
    """
    check, wants = "rdma.gids", "a RoCE v2 GID"
    roce = {
        name: port
        for name, (device, port) in configured(seen, want).items()
        if port.active and port.link_layer == "Ethernet" and device.node_type != "RNIC"
    }
    if not roce:
        return na(check, "no active RoCE port")
    without = [n for n, port in roce.items() if all(g.type != "RoCE v2" for g in port.gids)]
    untold = [n for n in without if any(not gid.type for gid in roce[n].gids)]
    bare = [name for name in without if name not in untold]
    if bare:
        kinds = {n: ", ".join({g.type: 0 for g in roce[n].gids}) or "no GID" for n in bare}
        fix = "give its interface an address, and see cma_roce_mode"
        return fail(check, wants, by_value(kinds), source(roce[bare[0]], "gid_attrs/types"), fix)
    if untold:
        return unknown(check, f"no type of the GIDs of {some(untold, ', ')}")
    return ok(check, wants, f"{len(roce)} ports with a RoCE v2 GID")


SUBJECT = Subject(
    "rdma",
    __doc__,
    checks=(expected, devices, state, rate, link_layer, firmware, gids, errors),
    probe=PROBE,
    compared=compared,
    learned=learned,
    counters=counters,
)
