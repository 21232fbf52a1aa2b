"""Judge the network interfaces: their presence, link, speed and settings.

Without a policy, the checks find only faults that are faults on every node, and only on interfaces
in use (`Nics.configured`): an unused port may be unplugged, and containers start and end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodeready.core import result
from nodeready.core.policy import Policy
from nodeready.core.result import FleetFacts, Result, by_value, check, join_first, join_names
from nodeready.core.settings import rows
from nodeready.core.severity import CABLES, Cost, drifts, loses_job, slows_job
from nodeready.core.shell import quote
from nodeready.subjects.hardware_log import faults_check
from nodeready.subjects.nics import facts
from nodeready.subjects.nics.facts import ENVIRONMENT, NCCL_CONF, Nics
from nodeready.subjects.nics.nic import NET, Bond, Nic

# --- Since the last audit: lost links and broken packets.
#
# Counters run from the start of the driver, so that a total shows nothing about today.

#: Minimum changes of the carrier within a day (a link that was lost twice) for a failure: one
#: restart of a switch or of the network makes fewer.
_FLAPPING = 4
_DAY_S = 86400
#: Broken packets in an hour above which a link is bad, as for symbol errors of InfiniBand: the
#: specified bit error rate of 1e-12 makes a few in an hour at 100 Gbit/s and more.
_ERRORS_PER_HOUR = 120
_HOUR_S = 3600


def _span_text(seconds: float) -> str:
    """``in 25 minutes``."""
    for unit, size in (("days", _DAY_S), ("hours", _HOUR_S), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"in {seconds / size:.0f} {unit}"
    return f"in {seconds:.0f} seconds"


def _growth(
    observed: Nics, fleet: FleetFacts, before: result.Counters, counter: str
) -> dict[str, int]:
    """Interface -> growth of its counter, for the interfaces whose counter grew.

    A counter below its earlier value was reset with its driver: its whole value is growth.
    """
    growths = {}
    judged = observed.configured(fleet)
    for name, nic in observed.interfaces.items():
        current, earlier = getattr(nic, counter), before.values.get(f"{name}.{counter}")
        if current is None or earlier is None or not (nic.physical or name in judged):
            continue
        growth = current - earlier if current >= earlier else current
        if growth > 0:
            growths[name] = growth
    return growths


def _earlier(observed: Nics, fleet: FleetFacts, *counters: str) -> result.Counters | str:
    """The earlier audit that read one of these counters that is readable now, or why none did."""
    if (before := fleet.counters.get("nics")) is None:
        return "no earlier look to compare with"
    is_comparable = any(
        f"{name}.{counter}" in before.values and getattr(nic, counter) is not None
        for name, nic in observed.interfaces.items()
        for counter in counters
    )
    return before if is_comparable else "the earlier look saw none of these interfaces"


@check("nics.flaps", loses_job("monitor", "inspect", "reseat", "replace", source=CABLES),
       fleet=("addresses", "counters"),
       fix="look into dmesg and the switch's log; replace cable or transceiver if it goes on",
       expects="no change of a link")  # fmt: skip
def flaps(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """No link was lost or came back since the last audit (carrier_changes).

    One interruption may be maintenance of a switch or cable: a warning. Two and more within a day
    are a sign of a failing cable, transceiver or port, and end the jobs that use it.
    """
    before = _earlier(observed, fleet, "carrier_changes")
    if isinstance(before, str):
        return flaps.na(before)
    changes = _growth(observed, fleet, before, "carrier_changes")
    span = _span_text(before.seconds)
    if not changes:
        return flaps.ok(f"none {span}")
    actual = f"{join_first(f'{name}: {count} changes' for name, count in changes.items())} {span}"
    # The rate per day counts also when the last audit was long ago.
    days = max(before.seconds / _DAY_S, 1.0)
    status = "fail" if max(changes.values()) / days >= _FLAPPING else "warn"
    return flaps.fail(actual, _source(changes, "carrier_changes"), status=status)


@check("nics.errors", slows_job("inspect", "reseat", "replace", source=CABLES),
       fleet=("addresses", "counters"),
       expects=f"no CRC errors, at most {_ERRORS_PER_HOUR} others an hour",
       fix="ethtool -S NAMES names the kind; clean or replace cable and transceiver")  # fmt: skip
def errors(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """Few packets had errors since the last audit: rx_crc_errors, rx_errors and tx_errors.

    A packet with a wrong checksum was damaged by cable, transceiver or port: above 120 in an hour
    a failure. Other errors have other causes as well (oversized packets, full rings), so that they
    only warn.
    """
    before = _earlier(observed, fleet, "rx_crc_errors", "rx_errors", "tx_errors")
    if isinstance(before, str):
        return errors.na(before)
    broken = _growth(observed, fleet, before, "rx_crc_errors")
    hours = max(before.seconds / _HOUR_S, 1.0)
    bad = any(count / hours > _ERRORS_PER_HOUR for count in broken.values())
    texts = [f"{name}: {count} CRC errors" for name, count in broken.items()]
    names = list(broken)
    for counter, word in (("rx_errors", "receive errors"), ("tx_errors", "send errors")):
        for name, count in _growth(observed, fleet, before, counter).items():
            # A CRC error is a receive error too.
            other = count - broken.get(name, 0) if counter == "rx_errors" else count
            if other / hours > _ERRORS_PER_HOUR:
                texts.append(f"{name}: {other} {word}")
                names.append(name)
    span = _span_text(before.seconds)
    if not texts:
        return errors.ok(f"none that count {span}")
    actual, source = f"{join_first(texts)} {span}", _source(names, "statistics")
    fix = f"ethtool -S {quote(names[0])} names the kind; clean or replace cable and transceiver"
    return errors.fail(actual, source, fix, status="fail" if bad else "warn")


# --- The interfaces as they are now.

#: Mbit/s; a server's port is slower only with a bad cable or after a failed negotiation.
_SLOWEST_MBPS = 1000


def _policy_values(observed: Nics, policy: Policy, column: str) -> dict[str, str | int]:
    """Interface -> the policy's value in this column; `expected` judges missing interfaces."""
    return {
        name: values[column]
        for name, values in rows(policy.nics).items()
        if column in values and name in observed.interfaces
    }


def _source(names: Iterable[str], attribute: str) -> str:
    return f"{NET}/{next(iter(names))}/{attribute}"


def _slaves(observed: Nics) -> dict[str, list[Nic]]:
    """Bond -> its slaves that were read."""
    return {
        name: [observed.interfaces[s.name] for s in bond.slaves if s.name in observed.interfaces]
        for name, bond in observed.bonds.items()
    }


@check("nics.expected",
       loses_job("inspect", "configure", "reboot", "reseat", "replace", source=CABLES),
       settings=("nics",),
       fix="look for the adapter in lspci and dmesg; a renamed interface needs its udev rule or "
           "the new name in the policy")  # fmt: skip
def expected(observed: Nics, policy: Policy) -> Result:
    """The interfaces of the policy exist: a dead or renamed adapter is missing."""
    if not (names := list(rows(policy.nics))):
        return expected.na("the policy names no interface")
    if not (missing := [name for name in names if name not in observed.interfaces]):
        return expected.ok(expected=join_names(names))
    ports = [name for name, nic in observed.interfaces.items() if nic.physical]
    actual = f"no {join_names(missing)}; there: {join_names(ports) or 'no hardware port'}"
    return expected.fail(actual, NET, expected=join_names(names))


@check("nics.link", loses_job("configure", "reseat", "replace", source=CABLES), settings=("nics",),
       fleet=("addresses",), fix=(
    "check cable, transceiver and switch port of CUT",
    "ip link set NAME up",
    "see why the switch does not let NAME in (802.1X)",
))  # fmt: skip
def link(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """Every interface in use is switched on and has a link.

    The adapter sets `carrier` (Documentation/ABI/testing/sysfs-class-net); operstate may be
    "unknown" on an interface that works. In the states "dormant" (802.1X has not admitted the
    port) and "testing" (a cable test) an interface has a carrier and passes no packets
    (operstates.rst). Without lo, the processes of a node cannot reach each other.
    """
    judged = observed.configured(fleet, rows(policy.nics))
    loopback = {n: nic for n, nic in observed.interfaces.items() if nic.kind == "loopback"}
    switched_off = [name for name, nic in {**judged, **loopback}.items() if nic.admin_up is False]
    if not judged and not switched_off:
        return link.na("no interface is configured")
    no_link = [
        name for name, nic in judged.items() if nic.carrier is False and name not in switched_off
    ]
    not_admitted = [
        name
        for name, nic in judged.items()
        if nic.operstate in ("dormant", "testing") and name not in (*switched_off, *no_link)
    ]
    if switched_off or no_link or not_admitted:
        texts, fixes = [f"{name}: no link" for name in no_link], []
        if no_link:
            fixes.append(f"check cable, transceiver and switch port of {join_names(no_link)}")
        for name in switched_off:
            texts.append(f"{name}: switched off")
            fixes.append(f"ip link set {quote(name)} up")
        for name in not_admitted:
            texts.append(f"{name}: {judged[name].operstate}")
            fixes.append(f"see why the switch does not let {quote(name)} in (802.1X)")
        return link.fail(
            join_first(texts),
            _source(no_link or switched_off or not_admitted, "carrier"),
            join_first(fixes),
            expected=f"a link on {join_names(judged or switched_off)}",
            actions=("reseat", "replace") if no_link else (),
        )
    if silent := [name for name, nic in judged.items() if nic.carrier is None]:
        return link.unknown(f"the kernel does not say whether {join_names(silent)} has a link")
    return link.ok(join_names(judged), expected="a link")


def _judge_policy_values(
    check: result.Check, observed: Nics, policy: Policy, column: str, attribute: str
) -> Result | None:
    """Judge the policy's values in one column; None when all are right, or the policy has none."""
    unit = " Mbit/s" if column == "speed_mbps" else ""
    policy_values = _policy_values(observed, policy, column)
    actual = {name: getattr(observed.interfaces[name], column) for name in policy_values}
    if column == "driver":
        actual = {name: "none" if value is None else value for name, value in actual.items()}
    if deviating := {n: v for n, v in actual.items() if v is not None and v != policy_values[n]}:
        expected = by_value({name: policy_values[name] for name in deviating}, unit)
        source = _source(deviating, attribute)
        return check.fail(by_value(deviating, unit), source, expected=expected)
    silent = [name for name, value in actual.items() if value is None]
    if column == "speed_mbps":
        # Without a link there is no speed: `link` judges that.
        silent = [name for name in silent if observed.interfaces[name].carrier is True]
    if silent:
        return check.unknown(f"{join_names(silent)} does not tell its {column.partition('_')[0]}")
    return None


def _connected_ports(observed: Nics, policy: Policy, fleet: FleetFacts) -> dict[str, Nic]:
    """The configured hardware ports with a link: only a link has a speed."""
    judged = observed.configured(fleet, rows(policy.nics))
    return {name: nic for name, nic in judged.items() if nic.physical and nic.carrier}


def _without_value(ports: Mapping[str, Nic], fact: str) -> list[str]:
    """The ports without this value, where another port with the same driver has it.

    A driver without speeds (virtio, Xen) has none for all ports.
    """
    drivers = {nic.driver for nic in ports.values() if getattr(nic, fact) is not None}
    return [n for n, nic in ports.items() if getattr(nic, fact) is None and nic.driver in drivers]


@check("nics.speed", slows_job("configure", "reseat", "replace", source=CABLES),
       settings=("nics",), fleet=("addresses",),
       fix="check cable, transceiver, and the speed set on the switch port")  # fmt: skip
def speed(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """Links have the policy's speed; without one, at least 1 Gbit/s, and one speed within a bond.

    A server's port that negotiated 10 or 100 Mbit/s has a bad cable or switch port. LACP leaves a
    slave of another speed out of the aggregate (IEEE 802.1AX, bonding.rst ``ad_select``).
    """
    verdict = _judge_policy_values(speed, observed, policy, "speed_mbps", "speed")
    if verdict is not None and verdict.status == "fail":
        return verdict
    policy_speeds = _policy_values(observed, policy, "speed_mbps")
    ports = _connected_ports(observed, policy, fleet)
    speeds = {name: nic.speed_mbps for name, nic in ports.items() if nic.speed_mbps}
    # On InfiniBand the checks of rdma judge the rate; the IP interface only repeats it.
    slow = {
        name: value
        for name, value in speeds.items()
        if value < _SLOWEST_MBPS
        and name not in policy_speeds
        and observed.interfaces[name].kind == "ethernet"
    }
    if slow:
        actual = by_value(slow, " Mbit/s")
        return speed.fail(actual, _source(slow, "speed"), expected="at least 1000 Mbit/s")
    for bond, slaves in _slaves(observed).items():
        slave_speeds = {slave.name: speeds[slave.name] for slave in slaves if slave.name in speeds}
        if len(set(slave_speeds.values())) > 1:
            return speed.fail(
                by_value(slave_speeds, " Mbit/s"),
                _source(slave_speeds, "speed"),
                expected=f"one speed in {bond}",
                status="fail" if observed.bonds[bond].lacp else "warn",
            )
    if verdict is not None:
        return verdict
    if silent := _without_value(ports, "speed_mbps"):
        return speed.unknown(f"{join_names(silent)} does not tell its speed, as its equals do")
    for name in policy_speeds:
        if value := observed.interfaces[name].speed_mbps:
            speeds[name] = value
    if not speeds:
        return speed.na("no hardware port with a link tells its speed")
    return speed.ok(source=_source(speeds, "speed"), expected=by_value(speeds, " Mbit/s"))


@check("nics.duplex", slows_job("configure"), settings=("nics",), fleet=("addresses",),
       fix="set autonegotiation on both ends of the link (ethtool -s DEVICE autoneg on)",
       expects="full")  # fmt: skip
def duplex(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """Links of hardware ports are full duplex: half is a failed negotiation, and drops packets."""
    linked = _connected_ports(observed, policy, fleet)
    ports = {name: nic for name, nic in linked.items() if nic.kind == "ethernet"}
    modes = {name: nic.duplex for name, nic in ports.items() if nic.duplex is not None}
    if half := [name for name, value in modes.items() if value == "half"]:
        return duplex.fail(f"half on {join_names(half)}", _source(half, "duplex"))
    if silent := _without_value(ports, "duplex"):
        return duplex.unknown(
            f"{join_names(silent)} does not tell its duplex mode, as its equals do"
        )
    if not modes:
        return duplex.na("no hardware port with a link tells its duplex mode")
    return duplex.ok()


@check(
    "nics.mtu",
    loses_job("configure"),
    settings=("nics",),
    fleet=("addresses",),
    fix="set it in the node's network configuration; at once: ip link set DEVICE mtu N",
)
def mtu(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """The MTU is the policy's, a bond's slaves have the bond's, a bridge's ports no smaller one.

    Packets larger than a peer's or a switch's MTU are lost silently: connections open, and hang
    with the first large message. A bond sets the MTU of its slaves (bonding.rst); a slave whose
    MTU was changed later drops the bond's large packets. A port of a bridge with a larger MTU
    drops them, too (net/bridge/br_forward.c, is_skb_forwardable).
    """
    judged = observed.configured(fleet, rows(policy.nics))
    verdict = _judge_policy_values(mtu, observed, policy, "mtu", "mtu")
    if verdict is not None and verdict.status == "fail":
        return verdict
    for bond, slaves in _slaves(observed).items():
        bond_mtu = observed.interfaces[bond].mtu if bond in observed.interfaces else None
        deviating = {s.name: s.mtu or 0 for s in slaves if s.mtu not in (None, bond_mtu)}
        if bond_mtu is not None and deviating:
            expected, source = f"{bond_mtu}, as {bond}", _source(deviating, "mtu")
            return mtu.fail(by_value(deviating), source, expected=expected)
    for name, nic in judged.items():
        bridge = observed.interfaces.get(nic.master or "")
        if bridge is None or bridge.kind != "bridge" or not bridge.addressed:
            continue
        if None not in (nic.mtu, bridge.mtu) and (nic.mtu or 0) < (bridge.mtu or 0):
            actual, expected = f"{nic.mtu} on {name}", f"{bridge.mtu}, as {bridge.name}"
            return mtu.fail(actual, _source([name], "mtu"), expected=expected)
    if verdict is not None:
        return verdict
    unread = [
        name
        for bond, slaves in _slaves(observed).items()
        for name in (bond, *(slave.name for slave in slaves))
        if name in observed.interfaces and observed.interfaces[name].mtu is None
    ]
    if unread:
        return mtu.unknown(f"{join_names(unread)} does not tell its mtu")
    names = _policy_values(observed, policy, "mtu")
    if names or observed.bonds:
        values = {name: observed.interfaces[name].mtu or 0 for name in names}
        return mtu.ok(expected=by_value(values) or "a bond's slaves as the bond")
    return mtu.na("the policy sets no MTU and there is no bond")


def _policy_check(noun: str, attribute: str, cost: Cost, fix: str, meaning: str) -> result.Check:
    """The check of a column that is only judged where the policy has values for it."""

    @check(f"nics.{noun}", cost, settings=("nics",), fix=fix, meaning=meaning)
    def judged(observed: Nics, policy: Policy) -> Result:
        if verdict := _judge_policy_values(judged, observed, policy, noun, attribute):
            return verdict
        if not (values := _policy_values(observed, policy, noun)):
            return judged.na(f"the policy names no {noun}")
        return judged.ok(expected=by_value(values))

    return judged


driver = _policy_check(
    "driver", "device/driver", drifts("inspect", "install"), "check which module is loaded",
    "The policy's interfaces have the policy's driver.",
)  # fmt: skip
firmware = _policy_check(
    "firmware", "device/infiniband", drifts("install"),
    "update the adapter's firmware with its vendor's tool",
    """The policy's interfaces have its firmware, where the adapter's RDMA device shows it.

    ``ethtool -i`` would also read adapters without RDMA. It can hang with the driver, so it is not
    run.
    """,
)  # fmt: skip


def _bond_problems(bond: Bond) -> list[str]:
    if not bond.slaves:
        return [f"{bond.name}: no slave"]
    down = [slave.name for slave in bond.slaves if slave.mii not in ("up", None)]
    texts = [f"{bond.name}: {join_names(down)} down"] if down else []
    if silent := bond.lacp and bond.partner_mac == "00:00:00:00:00:00":
        texts.append(f"{bond.name}: the switch does not answer LACP")
    if bond.one_at_a_time and bond.active_slave is None and len(down) < len(bond.slaves):
        texts.append(f"{bond.name}: no slave is active")
    # LACP leaves them out of the aggregate in use, so that they carry no packets.
    elsewhere = [
        slave.name
        for slave in bond.slaves
        if bond.lacp and slave.name not in down and slave.aggregator is not None
        if slave.aggregator == 0 or bond.aggregator not in (None, slave.aggregator)
    ]
    if elsewhere and not silent:
        texts.append(f"{bond.name}: {join_names(elsewhere)} outside the aggregate in use")
    return texts


@check("nics.bond", slows_job("configure", "reseat", "replace", source=CABLES), settings=("nics",),
       fleet=("addresses",), expects="all slaves in use",
       fix="check cables and switch ports of the slaves, and LACP on the switch")  # fmt: skip
def bond(observed: Nics, policy: Policy, fleet: FleetFacts) -> Result:
    """Every bond is complete: all slaves up, and with LACP all in one aggregate with the switch.

    A degraded bond still works, with a part of its speed and without redundancy: jobs become slow
    on one node only (Documentation/networking/bonding.rst, 802.3ad).
    """
    # The module makes a bond0 when it is loaded: unused, this bond has no slave.
    used = {
        *observed.configured(fleet, rows(policy.nics)),
        *(nic.master for nic in observed.interfaces.values()),
    }
    bonds = [bond for name, bond in observed.bonds.items() if bond.slaves or name in used]
    if not bonds:
        return bond.na("no bond")
    if problems := [(bond.name, text) for bond in bonds for text in _bond_problems(bond)]:
        actual = join_first(text for _, text in problems)
        return bond.fail(actual, f"/proc/net/bonding/{problems[0][0]}")
    if silent := [slave.name for bond in bonds for slave in bond.slaves if slave.mii is None]:
        return bond.unknown(f"the kernel does not say whether {join_names(silent)} is in use")
    return bond.ok(join_names(bond.name for bond in bonds))


@check("nics.variables", loses_job("configure"), expects="interfaces that work",
       fix="mend or remove VARIABLE in FILE; nodeready env prints the right ones")  # fmt: skip
def variables(observed: Nics, policy: Policy) -> Result:
    """The variables that /etc/environment and /etc/nccl.conf set for every job fit this node.

    A file that was copied from another model of node names an interface that is not here, is down
    or has no address, and every job with ranks on several nodes fails or hangs on this node alone.
    The rules are those of a job's environment (docs/env.md) that make it fail.
    """
    if not observed.variables:
        return variables.na("no variable of NCCL, Gloo or Open MPI in the node's files")
    # Few nodes need these rules.
    from nodeready.subjects.environment_rules import RankEnvironment, judge
    from nodeready.subjects.environment_table import EnvironmentFacts, NcclFile, NodeInterface

    environment, of_nccl = (observed.variables.get(path, {}) for path in (ENVIRONMENT, NCCL_CONF))
    # Of a job on several nodes. The devices of NCCL_IB_HCA are another subject's.
    of_job = {**environment, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "NCCL_IB_HCA": ""}
    interfaces = tuple(
        NodeInterface(n, nic.operstate or "", ("127.0.0.1/8",) if n == "lo" else nic.addresses)
        for n, nic in observed.interfaces.items()
    )
    files = (NcclFile(NCCL_CONF, tuple(of_nccl.items())),)
    of_node = {"node": EnvironmentFacts(interfaces=interfaces, nccl_conf=files)}
    findings = judge([RankEnvironment("node", of_job)], of_node, nccl=None)
    if failures := [finding for finding in findings if finding.weight > 1]:
        name, text = failures[0].variable, join_first(finding.text for finding in failures)
        source = ENVIRONMENT if name in environment else NCCL_CONF
        fix = f"mend or remove {name} in {source}; nodeready env prints the right ones"
        return variables.fail(text, source, fix)
    return variables.ok(join_names(sorted({*environment, *of_nccl})))


kernel_faults = faults_check("nics.kernel_faults", "a network adapter")

_ELEMENTS = {
    "interfaces": "", "bonds": "", "bonds.slaves": "name", "routes": "destination interface",
    "kernel_log.faults": "kind text",
}  # fmt: skip
SUBJECT = result.Subject(
    "nics", __doc__,
    checks=(
        expected, link, speed, duplex, mtu, driver, firmware, bond, flaps, errors, variables,
        kernel_faults,
    ),
    probe=facts.PROBE, compared=facts.compared, derived=facts.derived, learned=facts.learned,
    counters=facts.counters,
    kinds=result.FactKinds(
        # The peers of a run decide what the run derives; packets are dropped on healthy nodes.
        volatile="""
            before peers_via nccl_socket_ifname container_ends rx_dropped tx_dropped
            kernel_log.source kernel_log.absent kernel_log.begins_s kernel_log.faults.kind
            kernel_log.faults.text kernel_log.faults.last_s
        """,
        counters="""
            carrier_changes rx_errors tx_errors rx_crc_errors link_failures kernel_log.faults.count
        """,
        hardware="kind mac driver pci_address numa_node",
        versions="firmware",
        unique="mac addresses partner_mac aggregator routes",
        elements=_ELEMENTS,
    ),
)  # fmt: skip
