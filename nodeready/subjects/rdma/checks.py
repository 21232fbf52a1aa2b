"""Judge the RDMA ports: their presence, state, rate and settings.

Without a policy the checks judge faults that are faults on every node, and only on ports in use
(`configured`): the second port of a card may be without a cable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from nodeready.core import result
from nodeready.core.base import cached_last
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, by_value, check, join_first, join_names
from nodeready.core.settings import rows
from nodeready.core.severity import LINK_ERRORS, drifts, loses_job, slows_job
from nodeready.core.shell import quote
from nodeready.subjects.rdma import facts
from nodeready.subjects.rdma.facts import PcieLink, Rdma, RdmaDevice, RdmaPort

# --- The RDMA ports that are judged, and their names in findings.

Ports = dict[str, tuple[RdmaDevice, RdmaPort]]

#: Physical states of a port that sees another port at the end of its cable.
_CONNECTED = ("LinkUp", "LinkErrorRecovery", "PortConfigurationTraining")


def _source(port: RdmaPort, file: str) -> str:
    if port.link_layer == "Slingshot":
        return f"/sys/class/cxi/{port.device}/device/port/{file}"
    return f"/sys/class/infiniband/{port.device}/ports/{port.port}/{file}"


def policy_column(policy: Policy, column: str) -> dict[str, object]:
    """Port -> the policy's value in this column."""
    return {
        name: columns[column]
        for name, columns in rows(policy.rdma_ports).items()
        if column in columns
    }


@cached_last
def adapter_ports(observed: Rdma) -> Ports:
    """The ports of this node's adapters, without software devices and idle virtual functions.

    An unused virtual function on its host has no link.
    """
    return {
        port.name: (device, port)
        for device in observed.devices.values()
        for port in device.ports
        if device.kind != "software" and (port.active or not device.virtual)
    }


def _switched_off(device: RdmaDevice, port: RdmaPort) -> bool:
    """Whether the port was taken out of use on purpose.

    An Ethernet port is also "Disabled" without a cable. There the interface decides: its carrier
    is 0 or 1 only when the interface is administratively up. One without belongs to a container.
    """
    if port.link_layer == "Ethernet":
        return all(netdev.carrier is None for netdev in device.netdevs)
    return port.phys_state == "Disabled"


def _disabled_ports(observed: Rdma) -> Ports:
    """The InfiniBand ports that are Disabled where nearly all ports of the same board are active.

    Such a port was switched off by hand (ibportstate), or has no cable: ConnectX adapters show
    both as Disabled. More than a quarter of the equal ports are spare ports, and not returned.
    """
    boards: dict[tuple[str, str], Ports] = {}
    for name, (device, port) in adapter_ports(observed).items():
        if port.link_layer == "InfiniBand" and device.board_id:
            boards.setdefault(device.board, {})[name] = (device, port)
    ports: Ports = {}
    for board in boards.values():
        busy = {device.slot for device, port in board.values() if port.active}
        off = {
            name: (device, port)
            for name, (device, port) in board.items()
            if device.slot not in busy and port.phys_state == "Disabled"
        }
        if 4 * len(off) <= len(board):
            ports.update(off)
    return ports


def configured(observed: Rdma, policy: Policy) -> Ports:
    """The ports that must work.

    With a policy, its ports. Without a policy, at least one port of each card: beside an active
    port, another port may be without a cable, unless it detects a port at the far end. A card
    whose ports are all switched off is not in use.
    """
    if policy.rdma_ports:
        # The policy may name an idle virtual function.
        ports = {port.name: (d, port) for d in observed.devices.values() for port in d.ports}
        return {name: ports[name] for name in rows(policy.rdma_ports) if name in ports}
    return _in_use(observed)


@cached_last
def _in_use(observed: Rdma) -> Ports:
    cards: dict[str, Ports] = {}
    for name, (device, port) in adapter_ports(observed).items():
        cards.setdefault(device.slot, {})[name] = (device, port)
    ports: Ports = {}
    for card in cards.values():
        some_active = any(port.active for _, port in card.values())
        for name, (device, port) in card.items():
            waiting = port.state in ("INIT", "ARMED")
            if some_active:
                used = port.active or waiting or port.phys_state in _CONNECTED
            else:
                used = waiting or not _switched_off(device, port)
            if used:
                ports[name] = (device, port)
    return ports


# --- Since the last audit: lost links and errors.

#: Maximum of symbol errors an hour within InfiniBand's bit error rate of 1e-12.
SYMBOL_ERRORS_PER_HOUR = 120


def _duration(seconds: float) -> str:
    """``40 s``, ``55 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_CABLE = "check the cable and the transceiver, and the switch port's own counters"
_CLEAR = "reset the counters with perfquery -R, then look"


@check("rdma.errors", loses_job("monitor", "inspect", "reseat", "replace", source=LINK_ERRORS),
       settings=("rdma_ports",), fleet=("counters",), expects="no new errors",
       fix=(_CABLE, _CLEAR))  # fmt: skip
def errors(observed: Rdma, policy: Policy, fleet: result.FleetFacts) -> Result:
    """Since the last audit no link went down and no counter of fatal errors grew.

    A job ends when link_downed, local_link_integrity_errors, excessive_buffer_overrun_errors or
    rnr_nak_retry_err grows, or with more than 120 symbol errors an hour, the limit of the
    InfiniBand specification (NVSentinel's NIC health monitor uses the same counters). Totals since
    the driver was loaded show nothing about today. A counter below its earlier value was reset:
    its whole value is new. A full counter of 4 or 8 bits stays full. A full link_downed is a
    warning on InfiniBand, where counters can be reset.
    """
    before, ports = fleet.counters.get("rdma"), configured(observed, policy)
    if not adapter_ports(observed):
        return errors.na("no RDMA device")
    if not any(port.counters for _, port in ports.values()):
        return errors.na("no port in use has error counters")
    if before is None or not before.values or before.seconds <= 0:
        return errors.na("no earlier look at this boot to compare with")
    allowed_symbol_errors = SYMBOL_ERRORS_PER_HOUR * max(1.0, before.seconds / 3600)
    grown, full, flapping, unread = [], [], [], []
    first = None
    for name, (_, port) in ports.items():
        for counter, value in port.counters.items():
            earlier = before.values.get(f"{name}.{counter}")
            full_at = facts.PMA_COUNTERS.get(counter)
            if value is None:
                unread.append(f"{name} {counter}")
            elif earlier is None:
                continue
            elif value == full_at and value == earlier:
                full.append(f"{name} {counter}")
                if counter == "link_downed" and port.link_layer == "InfiniBand":
                    flapping.append(f"{name} {counter} {value}")
            else:
                change = value if value < earlier else value - earlier
                if change > (allowed_symbol_errors if counter == "symbol_error" else 0):
                    least = "at least " if value == full_at else ""
                    grown.append(f"{name} {counter} +{least}{change}")
                    first = first or _source(port, "counters")
    span = _duration(before.seconds)
    if grown:
        return errors.fail(f"in {span}: {join_first(grown)}", first or "", _CABLE)
    if unread:
        return errors.unknown(f"cannot be read: {join_names(unread)}")
    if flapping:
        return errors.warn(f"full, so that no more shows: {join_names(flapping)}", "", _CLEAR)
    silent = f" (full before: {join_names(full)})" if full else ""
    return errors.ok(f"none in {span}{silent}")


# --- The devices and ports as they are now.

_NONE = "no RDMA device"
_UNUSED = "no RDMA port is in use: all are switched off"


@check("rdma.expected", loses_job("inspect", "reboot", "reseat", "replace", source=LINK_ERRORS),
       settings=("rdma_ports",),
       fix="look for the adapter in lspci and for its driver in dmesg")  # fmt: skip
def expected(observed: Rdma, policy: Policy) -> Result:
    """Every port of the policy's rdma_ports is there.

    A card that fell off the bus, or that its driver has given up, has no port at all: only a list
    of the expected ports reveals it.
    """
    if not (named := rows(policy.rdma_ports)):
        return expected.na("the policy names no rdma_ports")
    if missing := [name for name in named if name not in observed.ports]:
        present = join_names(observed.ports) or "no RDMA port"
        actual = f"missing: {join_names(missing)} (there: {present})"
        return expected.fail(actual, "/sys/class/infiniband", expected=f"{len(named)} ports")
    return expected.ok(expected=f"{len(named)} ports")


_LOAD, _OPEN = "load the adapter's driver, see dmesg", "modprobe ib_uverbs"
_RULE = "install rdma-core, whose udev rules give the files mode 0666"
_NAME = "give it a GUID: mlxconfig, or the hypervisor (ip link set … vf N node_guid)"


@check("rdma.devices", loses_job("configure", "reload_driver"),
       expects="an open RDMA device per adapter", fix=(_LOAD, _OPEN, _RULE, _NAME))  # fmt: skip
def devices(observed: Rdma, policy: Policy) -> Result:
    """Every adapter has an RDMA device, and programs can open each device.

    An adapter for RDMA alone (PCI classes 0x0207 and 0x0208, EFA, Slingshot) without a device has
    lost its driver; functions of virtual machines do not count. Without ib_uverbs there is no
    /dev/infiniband/uverbs*, through which NCCL and MPI use a device; they belong to all users, or
    to a group. The subnet manager ignores an InfiniBand device without a GUID.
    """
    real = {n: d for n, d in observed.devices.items() if d.kind != "software"}
    if not real and not observed.without:
        return devices.na(_NONE)
    lost = [
        f"adapter {adapter.pci_address} has "
        + ("a driver, but no RDMA device" if adapter.bound else "no driver")
        for adapter in observed.without
    ]
    closed = [name for name, d in real.items() if d.kind != "cxi" and not d.uverbs]
    nameless = [
        name
        for name, d in real.items()
        if any(p.link_layer == "InfiniBand" for p in d.ports)
        and not d.virtual
        and re.fullmatch("[0:]+", d.node_guid)
    ]
    problems = lost + [f"{name} has no uverbs" for name in closed]
    if observed.closed:
        files = join_names(path.rpartition("/")[2] for path in observed.closed)
        problems.append(f"{files}: for root alone")
    problems += [f"{name} has no GUID" for name in nameless]
    if problems:
        if lost:
            path, fix = f"/sys/bus/pci/devices/{observed.without[0].pci_address}", _LOAD
        elif closed:
            path, fix = "/sys/class/infiniband_verbs", _OPEN
        elif observed.closed:
            path, fix = "/dev/infiniband", _RULE
        else:
            path, fix = f"/sys/class/infiniband/{nameless[0]}/node_guid", _NAME
        return devices.fail(join_first(problems), path, fix)
    return devices.ok(expected=f"{len(real)} devices")


#: Local identifiers of single ports, without 0 (unset), multicast identifiers and the permissive
#: identifier (InfiniBand Architecture Specification, 4.1.3).
_UNICAST = range(1, 0xC000)


def _address_problem(device: RdmaDevice, port: RdmaPort) -> str:
    """The address that an active InfiniBand port lacks from its subnet manager, or ""."""
    if port.link_layer != "InfiniBand" or device.kind == "hfi1" or device.virtual:
        return ""
    for lid_name, lid in (("LID", port.lid), ("subnet manager's LID", port.sm_lid)):
        if lid is not None and lid not in _UNICAST:
            return f"{port.name}: {lid_name} {lid:#x}, no subnet manager has set it up"
    return ""


def _unreadable_state(device: RdmaDevice, port: RdmaPort) -> str:
    """The state that the kernel does not show of a port that may work, or ""."""
    if port.state in ("", "NOP", "UNKNOWN"):
        return f"no state of {port.name}"
    if not port.active or device.kind in ("efa", "cxi"):
        return ""
    # An iWARP driver of an older kernel shows no physical state.
    if port.phys_state == "" or (port.phys_state == "<unknown>" and device.node_type != "RNIC"):
        return f"no physical state of {port.name}"
    return ""


def _state_problem(device: RdmaDevice, port: RdmaPort) -> str:
    if device.kind == "efa":
        down = [netdev.name for netdev in device.netdevs if netdev.operstate == "down"]
        return f"{port.name}: {', '.join(down)} is down" if down else ""
    if port.state in ("INIT", "ARMED") and port.link_layer != "Ethernet":
        return f"{port.name}: {port.state}, no subnet manager has set it up"
    if port.active and port.phys_state in ("", "<unknown>", "LinkUp"):
        return _address_problem(device, port)
    return f"{port.name}: {', '.join(text for text in (port.state, port.phys_state) if text)}"


_SUBNET_MANAGER = "check the fabric's subnet manager (sminfo; opensm or UFM)"


@check("rdma.state",
       loses_job("configure", "restart_service", "reseat", "replace", source=LINK_ERRORS),
       settings=("rdma_ports",),
       fix=(_SUBNET_MANAGER, "plug or enable SPARE, or name the ports in use in rdma_ports"),
       expects="ACTIVE, LinkUp")  # fmt: skip
def state(observed: Rdma, policy: Policy) -> Result:
    """Every port in use is ACTIVE and LinkUp: any other state carries no traffic.

    Ports in INIT and ARMED have a link and wait for the subnet manager (InfiniBand Architecture
    Specification, 7.2.7). An ACTIVE port without its own LID, or without that of the subnet
    manager, cannot reach any port. Amazon's EFA always shows ACTIVE (drivers/infiniband/hw/efa),
    so that only the interface of its adapter is judged, where it has one. A Disabled port beside
    active ports of the same board is a warning: it may be intended, or the cable is lost.
    """
    if not adapter_ports(observed):
        return state.na(_NONE)
    used = configured(observed, policy)
    judged = {n: (d, p) for n, (d, p) in used.items() if d.kind != "efa" or d.netdevs}
    if not judged:
        return state.na("EFA tells no state of its link" if used else _UNUSED)
    silent = {name: text for name, pair in judged.items() if (text := _unreadable_state(*pair))}
    faulty = {
        name: text
        for name, pair in judged.items()
        if name not in silent and (text := _state_problem(*pair))
    }
    if faulty:
        port = judged[next(iter(faulty))][1]
        fix = f"check the cable and the switch port of {join_names(faulty)}"
        if all("subnet manager" in text for text in faulty.values()):
            fix = _SUBNET_MANAGER
        return state.fail(join_first(faulty.values()), _source(port, "state"), fix)
    if silent:
        return state.unknown(join_first(silent.values()))
    if spare := {} if policy.rdma_ports else _disabled_ports(observed):
        words = join_first(f"{name}: {port.state}, Disabled" for name, (_, port) in spare.items())
        fix = f"plug or enable {join_names(spare)}, or name the ports in use in rdma_ports"
        path = _source(next(iter(spare.values()))[1], "phys_state")
        return state.warn(words, path, fix, expected="ACTIVE, as the others of its board")
    return state.ok(f"{len(judged)} ports ACTIVE, LinkUp")


#: A single lane, of a generation with 4 or 2 lanes per link: "25 Gb/sec (1X EDR)".
_ONE_LANE = re.compile(r"\(1X (DDR|QDR|FDR10|FDR|EDR|HDR)\)")


def _peer_rates(ports: Ports) -> tuple[dict[str, object], list[str]]:
    """The rate in Gb/s of each InfiniBand port's fastest equal port; and the ports with an
    unreadable model or board that are slower than a port that may be of the same board.
    """
    expectation: dict[str, object] = {}
    boardless: list[str] = []
    rates_by_board: dict[tuple[str, str], dict[str, float]] = {}
    for name, (device, port) in ports.items():
        if port.link_layer == "InfiniBand":
            rates_by_board.setdefault(device.board, {})[name] = port.rate_gbps or 0.0
    for (model, board), rates in rates_by_board.items():
        fastest = max(rates.values())
        if len(rates) > 1 and fastest:
            expectation.update(dict.fromkeys(rates, fastest))
        if model and board:
            continue
        fastest = max(
            max(other_rates.values())
            for other, other_rates in rates_by_board.items()
            if model in ("", other[0]) and board in ("", other[1])
        )
        boardless += [name for name, rate in rates.items() if rate < fastest]
    for name, (_, port) in ports.items():
        if port.link_layer == "InfiniBand" and _ONE_LANE.search(port.rate_text):
            expectation[name] = 4 * (port.rate_gbps or 0.0)
    return expectation, boardless


@check("rdma.rate", slows_job("reseat", "replace", source=LINK_ERRORS), settings=("rdma_ports",),
       fix="reseat or replace the cable of WRONG, or retrain the link")  # fmt: skip
def rate(observed: Rdma, policy: Policy) -> Result:
    """Every port has the policy's rate_gbps; without one, the rate of the fastest equal port.

    A link that trained with fewer lanes or at a lower speed halves the speed of every collective
    of the job. Without a policy only active InfiniBand ports of the same model and board are
    compared: on Ethernet different speeds on one node are usual. A slower port whose board cannot
    be read is unknown. An InfiniBand link up to HDR has 4 lanes, or 2 behind a splitter: a link
    with a single lane is broken.
    """
    policy_values = policy_column(policy, "rate_gbps")
    used = {n: (d, p) for n, (d, p) in configured(observed, policy).items() if p.active}
    if not adapter_ports(observed):
        return rate.na(_NONE)
    if policy.rdma_ports:
        if not policy_values:
            return rate.na("the policy names no rate_gbps")
        expectation = {name: policy_values[name] for name in used if name in policy_values}
        boardless: list[str] = []
    else:
        expectation, boardless = _peer_rates(used)
    slow = {n: used[n][1].rate_gbps for n in expectation if used[n][1].rate_gbps != expectation[n]}
    if not expectation and not boardless:
        return rate.na("no port to compare with, and the policy names no rate_gbps")
    expects = by_value({name: f"{value:g} Gb/s" for name, value in expectation.items()})
    unread = [name for name, value in slow.items() if value is None]
    if deviating := {name: used[name][1].rate_text for name in slow if name not in unread}:
        first = used[next(iter(deviating))][1]
        fix = f"reseat or replace the cable of {join_names(deviating)}, or retrain the link"
        return rate.fail(by_value(deviating), _source(first, "rate"), fix, expected=expects)
    if unread:
        return rate.unknown(f"no rate of {join_names(unread)}")
    if boardless:
        named = join_names(boardless)
        return rate.unknown(f"the model or board of {named} cannot be read: no rate to compare")
    return rate.ok(expected=expects)


#: From this speed in GT/s on, an idle link may use fewer lanes (L0p; PCI Express Base 6.0).
_LANES_ON_DEMAND = 64.0
#: Adapters with an integrated PCIe switch and a GPU behind it: ConnectX-8 and -9. The data does
#: not use the link to the processor.
_WITH_PCIE_SWITCH = ("MT4131", "MT4133")


def _bandwidth(lanes: int, speed: float) -> float:
    """Gb/s of data in one direction: 8 of 10 bits up to 5 GT/s, then 128 of 130, then FLITs."""
    coding = 0.8 if speed < 8 else 128 / 130 if speed < 64 else 242 / 256
    return lanes * speed * coding


def _usable_lanes(link: PcieLink) -> int:
    may_narrow = (link.speed or 0.0) >= _LANES_ON_DEMAND
    return link.lanes if may_narrow else link.width or 0


def _slot_problem(observed: Rdma, device: RdmaDevice, link: PcieLink) -> str:
    """The problem of a card that is fast enough for its port, in a slot that is not, or "".

    An adapter may use two slots, whose bandwidths add up (NVIDIA's Socket Direct).
    """
    rates = [port.rate_gbps or 0.0 for port in device.ports if port.active]
    if device.hca_type in _WITH_PCIE_SWITCH or not rates or not link.speed or not link.speed_max:
        return ""
    slots = {
        other.slot: other.pcie
        for other in observed.devices.values()
        if other.image_guid and other.image_guid == device.image_guid and not other.virtual
    }
    slots[device.slot] = link
    links = [link for link in slots.values() if link is not None and link.width and link.speed]
    bandwidth = sum(_bandwidth(_usable_lanes(link), link.speed or 0.0) for link in links)
    best = sum(_bandwidth(link.width_max or 0, link.speed_max or 0.0) for link in links)
    if bandwidth >= max(rates) or best < max(rates):
        return ""
    return (
        f"{device.name}: {link.text} carry {bandwidth:.0f} Gb/s of its port's {max(rates):g} Gb/s"
    )


_FASTER_SLOT = "set the slot's link speed in the BIOS to Auto, or move the card to a faster slot"


@check("rdma.pcie", slows_job("configure", "reseat", "replace", source=LINK_ERRORS),
       settings=("rdma_ports",), expects="the lanes and the speed of card and slot", fix=(
    "reseat the card of DEVICE at ADDRESS, then look with lspci -vv (LnkSta)",
    _FASTER_SLOT,
))  # fmt: skip
def pcie(observed: Rdma, policy: Policy) -> Result:
    """The PCIe link of each adapter has all lanes and the full speed of card and slot.

    A badly seated card, a bad riser or a damaged lane makes the link train with fewer lanes or at
    a lower speed: everything works, at half the bandwidth. Unlike a GPU, an idle adapter keeps its
    speed. A lower speed fails beside an equal card that is faster. Otherwise a lower speed is a
    warning, since the BIOS may have set it. A link that is slower than its port is a warning, too.
    A slot with fewer lanes than its card is intended.
    """
    if not adapter_ports(observed):
        return pcie.na(_NONE)
    # Amazon's hypervisor writes the registers of EFA, which describe no slot.
    devices = {
        device.name: device
        for device, _ in configured(observed, policy).values()
        if device.pcie is not None
        and device.kind not in ("software", "efa")
        and not device.virtual
    }
    links = {name: device.pcie for name, device in devices.items() if device.pcie is not None}
    readable = {name: link for name, link in links.items() if link.is_readable}
    broken: dict[str, str] = {}
    doubtful: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for name, link in readable.items():
        device = devices[name]
        equal = [
            equal_link.speed or 0.0
            for other, equal_link in readable.items()
            if devices[other].board == device.board
        ]
        able_text = f"{name}: {link.text}, able to do"
        if _usable_lanes(link) < link.lanes:
            broken[name] = f"{able_text} {link.lanes} lanes"
            attributes[name] = "current_link_width"
        elif link.speed and link.speed < link.possible:
            attributes[name] = "current_link_speed"
            if max(equal) > link.speed:
                broken[name] = f"{able_text} {link.possible:g} GT/s as equal cards do"
            elif link.slot_speed_max:
                doubtful[name] = f"{able_text} {link.possible:g} GT/s"
        slow = "" if name in broken or name in doubtful else _slot_problem(observed, device, link)
        if slow:
            doubtful[name], attributes[name] = slow, "current_link_speed"
    if findings := broken or doubtful:
        first = devices[next(iter(findings))]
        root = "cxi" if first.kind == "cxi" else "infiniband"
        path = f"/sys/class/{root}/{first.name}/device/{attributes[first.name]}"
        if broken:
            card = f"{first.name} at {first.pci_address}" if first.pci_address else first.name
            fix = f"reseat the card of {card}, then look with lspci -vv (LnkSta)"
            text, actions = join_first(broken.values()), ("reseat", "replace")
            return pcie.fail(text, path, fix, actions=actions)
        return pcie.warn(join_first(doubtful.values()), path, _FASTER_SLOT)
    if unread := [f"{name}: {link.unread}" for name, link in links.items() if link.unread]:
        return pcie.unknown(join_first(unread))
    if not readable:
        return pcie.na("no adapter in use tells of its PCIe link")
    return pcie.ok(by_value({name: link.text for name, link in readable.items()}))


def _by_policy(
    check: Check,
    policy_values: Mapping[str, object],
    texts: Mapping[str, str],
    noun: str,
    remedy: Callable[[str, Iterable[str]], tuple[str, str]],
) -> Result:
    """Judge a text of each port by the policy's; "" could not be read.

    remedy: (the first port with another text, all of them) -> the source, and the fix
    """
    actual = {name: texts[name] for name in policy_values if name in texts}
    if not actual:
        return check.na("none of the policy's ports is there")
    expects = by_value({name: policy_values[name] for name in actual})
    if deviating := {n: text for n, text in actual.items() if text and text != policy_values[n]}:
        source, fix = remedy(next(iter(deviating)), deviating)
        return check.fail(by_value(deviating), source, fix, expected=expects)
    if unread := [name for name, text in actual.items() if not text]:
        return check.unknown(f"no {noun} of {join_names(unread)}")
    return check.ok(expected=expects)


_PORT_TYPE = "set the adapter's port type"


@check("rdma.link_layer", loses_job("configure", "reboot"), settings=("rdma_ports",),
       fix=("FIX, then reboot", _PORT_TYPE))  # fmt: skip
def link_layer(observed: Rdma, policy: Policy) -> Result:
    """Every port has the policy's link layer: a reset may change an adapter that supports both.

    ConnectX adapters store the choice in their firmware (mlxconfig, LINK_TYPE_P1).
    """
    if not (policy_values := policy_column(policy, "link_layer")):
        return link_layer.na("the policy names no link_layer")
    used = configured(observed, policy)

    def remedy(name: str, deviating: Iterable[str]) -> tuple[str, str]:
        device, port = used[name]
        set_types = "set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet), then reboot"
        fix = f"mlxconfig -d {quote(device.pci_address or '')} {set_types}"
        return _source(port, "link_layer"), fix if device.kind == "mlx5" else _PORT_TYPE

    layers = {name: port.link_layer for name, (_, port) in used.items()}
    return _by_policy(link_layer, policy_values, layers, "link layer", remedy)


_FLASH_ALL = "flash all to one version"


@check("rdma.firmware", drifts("install"), settings=("rdma_ports",),
       fix=(_FLASH_ALL, "flash the adapters of WRONG"))  # fmt: skip
def firmware(observed: Rdma, policy: Policy) -> Result:
    """The firmware is the policy's; without one, equal on all boards of the same kind.

    Adapters with different firmware differ in speed and in bugs; NVIDIA qualifies a cluster with
    one version. Different versions stop no job, so without a policy they are a warning.
    """
    versions = {name: device.firmware for name, (device, _) in adapter_ports(observed).items()}
    path = "/sys/class/infiniband/{}/fw_ver"

    def remedy(name: str, deviating: Iterable[str]) -> tuple[str, str]:
        fix = f"flash the adapters of {join_names(deviating)}"
        return path.format(name.partition("/")[0]), fix

    if policy_values := policy_column(policy, "firmware"):
        return _by_policy(firmware, policy_values, versions, "firmware version", remedy)
    if policy.rdma_ports:
        return firmware.na("the policy names no firmware")
    firmware_by_board: dict[tuple[str, str], dict[str, str]] = {}
    for device in observed.devices.values():
        if device.kind != "software":
            board = firmware_by_board.setdefault(device.board, {})
            board[device.name] = device.firmware
    boards = [board for board in firmware_by_board.values() if any(board.values())]
    if not boards:
        return firmware.na("no firmware to compare" if observed.devices else _NONE)
    equal = "equal on boards of a kind"
    readable = [{name: text for name, text in board.items() if text} for board in boards]
    if mixed := [board for board in readable if len({*board.values()}) > 1]:
        text, source_path = join_first(map(by_value, mixed)), path.format(next(iter(mixed[0])))
        return firmware.warn(text, source_path, _FLASH_ALL, expected=equal)
    if unread := [name for board in boards for name, text in board.items() if not text]:
        return firmware.unknown(f"no firmware version of {join_names(unread)}")
    texts = by_value({name: text for board in readable for name, text in board.items()})
    return firmware.ok(texts, expected=equal)


#: The words of drivers/infiniband/core/sysfs.c, without "Unknown".
_LAYERS = ("InfiniBand", "Ethernet")


@check("rdma.gids", loses_job("configure"), settings=("rdma_ports",), expects="a RoCE v2 GID",
       fix="give its interface an address, and see cma_roce_mode")  # fmt: skip
def gids(observed: Rdma, policy: Policy) -> Result:
    """Every active RoCE port has a RoCE v2 GID: v1 is not routed, and NCCL and MPI use v2.

    Linux makes GIDs from the interface's addresses, so an interface without addresses has no GID;
    the type is in gid_attrs/types (Documentation/ABI/stable/sysfs-class-infiniband). iWARP has no
    such GIDs.
    """
    active = {n: (d, p) for n, (d, p) in configured(observed, policy).items() if p.active}
    roce = {
        name: port
        for name, (device, port) in active.items()
        if port.link_layer == "Ethernet" and device.node_type != "RNIC"
    }
    layerless = [
        name
        for name, (device, port) in active.items()
        if port.link_layer not in _LAYERS and device.kind not in ("efa", "cxi")
    ]
    if layerless:
        return gids.unknown(f"no link layer of {join_names(layerless)}")
    if not roce:
        return gids.na("no active RoCE port")
    without = [n for n, port in roce.items() if all(g.type != "RoCE v2" for g in port.gids)]
    untyped = [n for n in without if any(not gid.type for gid in roce[n].gids)]
    if without_v2 := [name for name in without if name not in untyped]:
        kinds = {n: ", ".join({g.type: 0 for g in roce[n].gids}) or "no GID" for n in without_v2}
        return gids.fail(by_value(kinds), _source(roce[without_v2[0]], "gid_attrs/types"))
    if untyped:
        return gids.unknown(f"no type of the GIDs of {join_names(untyped)}")
    return gids.ok(f"{len(roce)} ports with a RoCE v2 GID")


@check(
    "rdma.pkeys",
    loses_job("configure"),
    expects="one table of partitions",
    fix="give all ports of the node one partition: the subnet manager's partitions.conf, or UFM",
)
def pkeys(observed: Rdma, policy: Policy) -> Result:
    """The InfiniBand ports for NCCL have the same PKeys in the same places.

    NCCL uses the PKey at one index (NCCL_IB_PKEY, by default 0) on all ports, and ports connect
    only within a partition, so that a rail with a different PKey reaches no peer (InfiniBand
    Architecture Specification, 10.9). The first eight entries are read.
    """
    tables = {
        port.name: " ".join(port.pkeys)
        for device in observed.devices.values()
        for port in device.ports
        if {device.name, f"{device.name}:{port.port}"} & {*observed.nccl_ib_hca} and port.pkeys
    }
    if len(tables) < 2:
        return pkeys.na("no two InfiniBand ports for NCCL that show their PKeys")
    if len({*tables.values()}) > 1:
        return pkeys.warn(by_value(tables), _source(observed.ports[next(iter(tables))], "pkeys"))
    return pkeys.ok(next(iter(tables.values())))


_ELEMENTS = {
    "devices": "", "devices.netdevs": "name", "devices.ports": "port",
    "devices.ports.gids": "index", "without": "pci_address",
}  # fmt: skip
SUBJECT = result.Subject(
    "rdma", __doc__,
    checks=(expected, devices, state, rate, pcie, link_layer, firmware, gids, pkeys, errors),
    probe=facts.PROBE,
    compared=facts.compared, derived=facts.derived, learned=facts.learned, counters=facts.counters,
    kinds=result.FactKinds(
        volatile="before",
        counters="devices.ports.counters",
        hardware="""
            kind hca_type board_id node_type node_guid driver pci_address numa_node virtual
            image_guid pcie without
        """,
        versions="firmware",
        unique="node_guid image_guid node_desc lid gids",
        elements=_ELEMENTS,
    ),
)  # fmt: skip
