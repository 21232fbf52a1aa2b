"""Bonds: what /proc/net/bonding says about each and about its slaves.

Rules: Documentation/networking/bonding.rst; the text is that of drivers/net/bonding/bond_procfs.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slave:
    """One interface of a bond.

    mii:           what the bond thinks of its link: "up", "down", "going down", "going back"
    aggregator:    the LACP aggregator that it belongs to; None: no LACP
    link_failures: how often the bond saw it lose its link, since it was made
    """

    name: str
    mii: str
    aggregator: int | None = None
    link_failures: int | None = None


@dataclass(frozen=True)
class Bond:
    """One bond.

    mode:         in the kernel's words ("IEEE 802.3ad Dynamic link aggregation")
    mii:          whether it has a link, as a slave's
    active_slave: the one in use, in the modes that use one at a time
    aggregator:   the LACP aggregator in use: a slave of another one carries nothing
    partner_mac:  the switch that LACP talks to; all zeros: none answers. None: no LACP, or hidden
                  from whoever is not root
    """

    name: str
    mode: str
    mii: str
    slaves: tuple[Slave, ...] = ()
    active_slave: str | None = None
    aggregator: int | None = None
    partner_mac: str | None = None

    @property
    def lacp(self) -> bool:
        """Whether the switch takes part in it."""
        return "802.3ad" in self.mode


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def parse(name: str, lines: Iterable[str]) -> Bond:
    """The bond of a file's lines; what is missing there is "" or None."""
    blocks: list[dict[str, str]] = [{}]
    for line in lines:
        key, colon, value = line.partition(":")
        if not colon:
            continue
        if key.strip() == "Slave Interface":
            blocks.append({})
        # The first of a name counts: the details of LACP repeat some of them, further in.
        blocks[-1].setdefault(key.strip(), value.strip())
    own, *rest = blocks
    slaves = tuple(
        Slave(
            block["Slave Interface"],
            block.get("MII Status", ""),
            _number(block.get("Aggregator ID")),
            _number(block.get("Link Failure Count")),
        )
        for block in rest
    )
    active = own.get("Currently Active Slave", "None")
    return Bond(
        name,
        own.get("Bonding Mode", ""),
        own.get("MII Status", ""),
        slaves,
        None if active == "None" else active,
        _number(own.get("Aggregator ID")),
        own.get("Partner Mac Address"),
    )
