"""Bonds: /sys/class/net/BOND/bonding, and the bonding_slave of each slave.

Rules: Documentation/networking/bonding.rst, drivers/net/bonding/bond_sysfs.c,
bond_sysfs_slave.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.subjects.nics.nic import parse_count

#: The files of a bond and of a slave, below the interface's directory.
BOND_FILES = (
    "bonding/mode bonding/mii_status bonding/slaves bonding/active_slave bonding/ad_aggregator"
    " bonding/ad_partner_mac"
    " bonding_slave/mii_status bonding_slave/ad_aggregator_id bonding_slave/link_failure_count"
)

#: The mode of a bond in which the switch takes part.
LACP = "802.3ad"


@dataclass(frozen=True)
class Slave:
    """One interface of a bond."""

    name: str  # of the interface
    # the slave's link as the bond sees it: "up", "down", "going down", "going back"; None: unknown
    mii: str | None = None
    # the LACP aggregator of the slave; 0: none ("N/A" of the kernel); None: no LACP, or unknown
    aggregator: int | None = None
    link_failures: int | None = None  # count of lost links since the slave joined the bond


@dataclass(frozen=True)
class Bond:
    """One bond."""

    name: str  # of the interface
    mode: str | None  # "802.3ad", "active-backup", "balance-rr" and so on
    mii: str | None  # the bond's link, with the same words as a slave's
    slaves: tuple[Slave, ...] = ()  # its interfaces
    active_slave: str | None = None  # the slave in use, in the modes that use one at a time
    # the LACP aggregator in use: a slave of another aggregator carries no packets
    aggregator: int | None = None
    # the switch at the far end of LACP; all zeros: no switch answers; None: no LACP, or hidden
    # from users other than root
    partner_mac: str | None = None

    @property
    def lacp(self) -> bool:
        """Whether the bond uses LACP, so that the switch takes part."""
        return self.mode == LACP

    @property
    def one_at_a_time(self) -> bool:
        """Whether the bond has an active slave, without which it sends nothing."""
        return self.mode in ("active-backup", "balance-tlb", "balance-alb")


def _slave(name: str, values: Mapping[str, str], lacp: bool) -> Slave:
    aggregator, mii = values.get("bonding_slave/ad_aggregator_id"), "bonding_slave/mii_status"
    return Slave(
        name,
        None if values.get(mii) in ("", "unknown") else values.get(mii),
        0 if lacp and aggregator == "N/A" else parse_count(aggregator),
        parse_count(values.get("bonding_slave/link_failure_count")),
    )


def parse_bonding(attributes: Mapping[str, Mapping[str, str]]) -> dict[str, Bond]:
    """Name -> bond, from the attributes of all interfaces; an empty attribute is missing."""
    bonds = {}
    for name, values in attributes.items():
        if not any(key[:8] == "bonding/" for key in values):
            continue
        slaves = values.get("bonding/slaves", "").split()
        mode = values.get("bonding/mode", "").partition(" ")[0] or None
        lacp = mode == LACP
        bonds[name] = Bond(
            name,
            mode,
            values.get("bonding/mii_status") or None,
            tuple(_slave(slave, attributes.get(slave, {}), lacp) for slave in slaves),
            values.get("bonding/active_slave") or None,
            parse_count(values.get("bonding/ad_aggregator")),
            values.get("bonding/ad_partner_mac") or None,
        )
    return bonds
