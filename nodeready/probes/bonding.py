"""Bonds: what /sys/class/net/BOND/bonding says, and .../bonding_slave of each slave.

Rules: Documentation/networking/bonding.rst, drivers/net/bonding/bond_sysfs.c, bond_sysfs_slave.c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: The files of a bond, and those of a slave, in their interfaces' directories.
FILES = (
    "bonding/mode",
    "bonding/mii_status",
    "bonding/slaves",
    "bonding/active_slave",
    "bonding/ad_aggregator",
    "bonding/ad_partner_mac",
    "bonding_slave/mii_status",
    "bonding_slave/ad_aggregator_id",
    "bonding_slave/link_failure_count",
)


@dataclass(frozen=True)
class Slave:
    """One interface of a bond.

    mii:           what the bond thinks of its link: "up", "down", "going down", "going back";
                   None: unknown
    aggregator:    the LACP aggregator that it belongs to; None: no LACP
    link_failures: how often the bond saw it lose its link, since it joined
    """

    name: str
    mii: str | None = None
    aggregator: int | None = None
    link_failures: int | None = None


@dataclass(frozen=True)
class Bond:
    """One bond.

    mode:         "802.3ad", "active-backup", "balance-rr" and so on
    mii:          whether it has a link, as a slave's
    active_slave: the one in use, in the modes that use one at a time
    aggregator:   the LACP aggregator in use: a slave of another one carries nothing
    partner_mac:  the switch that LACP talks to; all zeros: none answers. None: no LACP, or hidden
                  from whoever is not root
    """

    name: str
    mode: str | None
    mii: str | None
    slaves: tuple[Slave, ...] = ()
    active_slave: str | None = None
    aggregator: int | None = None
    partner_mac: str | None = None

    @property
    def lacp(self) -> bool:
        """Whether the switch takes part in it."""
        return self.mode == "802.3ad"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def _slave(name: str, values: Mapping[str, str]) -> Slave:
    return Slave(
        name,
        values.get("bonding_slave/mii_status") or None,
        _number(values.get("bonding_slave/ad_aggregator_id")),
        _number(values.get("bonding_slave/link_failure_count")),
    )


def parse(attributes: Mapping[str, Mapping[str, str]]) -> dict[str, Bond]:
    """Name -> bond, of the attributes of all interfaces; what the kernel leaves empty is None."""
    found = {}
    for name, values in attributes.items():
        if not any(key.startswith("bonding/") for key in values):
            continue
        slaves = values.get("bonding/slaves", "").split()
        found[name] = Bond(
            name,
            values.get("bonding/mode", "").partition(" ")[0] or None,
            values.get("bonding/mii_status") or None,
            tuple(_slave(slave, attributes.get(slave, {})) for slave in slaves),
            values.get("bonding/active_slave") or None,
            _number(values.get("bonding/ad_aggregator")),
            values.get("bonding/ad_partner_mac") or None,
        )
    return found
