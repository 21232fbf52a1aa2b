"""The parts of a node and their faults as a page to print, for the vendor of the node.

The page has `PART_TABLES`, and the findings about these parts: it can leave the site.
"""

from __future__ import annotations

import calendar
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import compress, islice
from operator import attrgetter
from typing import Any

from nodeready import __version__
from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.core.result import COUNTER, HARDWARE, VERSION, fix_text
from nodeready.core.text import utc_moment
from nodeready.reports.html_page import HtmlPage
from nodeready.reports.lines import node_set
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.memory.changes import REBOOT, RESULT
from nodeready.runs.memory.history import PART, HistoryEntry

# --- The parts of a node as small tables: serial numbers, firmware, counters.
# The tables choose their facts, so that a page can go to a vendor: they have no address, path,
# user or program of the site.

_Fact = Mapping[str, Any]
#: The name of the process in a line about an Xid, which is the site's.
_PROGRAM = re.compile(r"\bname=[^,]*")
_HARDWARE = ("ethernet", "infiniband")


def _text(value: Any) -> str:
    """The value of a fact; "" where the node does not show it."""
    if type(value) is str:
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else str(value)


def observed_facts(facts: Mapping[str, Any], moment: str) -> Mapping[str, _Fact]:
    """The facts, with the moment of the boot in `host`. moment: of the observation"""
    uptime_s = facts.get("host", {}).get("uptime_s")
    if uptime_s is None:
        return facts
    observed_s = calendar.timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ"))
    return {**facts, "host": {**facts["host"], "boot_s": observed_s - uptime_s}}


@dataclass(frozen=True)
class PartTable:
    name: str
    # title -> the key of the fact, or the function that makes the text of a part
    columns: Mapping[str, str | Callable[[_Fact], Any]]
    # the facts of a node, by subject -> its parts
    rows_of: Callable[[Mapping[str, _Fact]], Iterable[_Fact]]

    def rows(self, facts: Mapping[str, _Fact]) -> list[tuple[str, ...]]:
        """The texts of the parts of one node. facts: as `observed_facts` returns them"""
        columns = self.columns.values()
        return [
            tuple([_text(part.get(c) if isinstance(c, str) else c(part)) for c in columns])
            for part in self.rows_of(facts)
        ]


def _moment(boot_s: int | None, seconds: int | None) -> str:
    """The moment some seconds after the boot; "": not known, or beyond what has a year."""
    if boot_s is None or seconds is None:
        return ""
    try:
        return utc_moment(boot_s + seconds)
    except (OSError, OverflowError):
        return ""


def _faults(facts: Mapping[str, _Fact]) -> Iterator[_Fact]:
    boot_s = facts.get("host", {}).get("boot_s")
    for fault in facts.get("gpus", {}).get("kernel_faults", ()):
        first, last = (_moment(boot_s, fault[name]) for name in ("first_s", "last_s"))
        yield {**fault, "first": first, "last": last}


def _system(facts: Mapping[str, _Fact]) -> Iterator[_Fact]:
    system = {**facts.get("gpus", {}), **facts.get("host", {})}
    if "driver" in system or "boot_id" in system:
        yield {**system, "boot": _moment(system.get("boot_s"), 0)}


def _gpus(facts: Mapping[str, _Fact]) -> list[_Fact]:
    gpus = facts.get("gpus", {})
    return [*gpus.get("nvidia", ()), *gpus.get("amd", ())]


def _bus_errors(facts: Mapping[str, _Fact]) -> Iterator[_Fact]:
    for gpu in facts.get("gpus", {}).get("pci", ()):
        for severity, name, count in gpu["aer"]:
            yield {"address": gpu["address"], "severity": severity, "name": name, "count": count}


def _ports(facts: Mapping[str, _Fact]) -> Iterator[_Fact]:
    for device in facts.get("rdma", {}).get("devices", {}).values():
        yield from ({**device, **port} for port in device["ports"])


def _interfaces(facts: Mapping[str, _Fact]) -> Iterator[_Fact]:
    for interface in facts.get("nics", {}).get("interfaces", {}).values():
        if interface["kind"] in _HARDWARE and interface["pci_address"]:
            yield interface


def _pcie(part: _Fact) -> str:
    """``5 x16``, and the maximum where it is another: ``5 x8 (max 5 x16)``."""
    keys = (("pcie_generation", "pcie_width"), ("pcie_generation_max", "pcie_width_max"))
    current, maximum = (f"{_text(part[speed])} x{_text(part[width])}" for speed, width in keys)
    if current == " x":
        return ""
    return current if maximum in (current, " x") else f"{current} (max {maximum})"


def _links(gpu: _Fact) -> str:
    active = sum(link["state"] == "active" for link in gpu["links"])
    return f"{active} of {len(gpu['links'])} active" if gpu["links"] else ""


def _counters(port: _Fact) -> str:
    """The counters that are not 0."""
    counters: Mapping[str, int | None] = port.get("counters", {})
    return ", ".join(f"{name} {value}" for name, value in counters.items() if value)


#: The tables, in the order of a page.
PART_TABLES: tuple[PartTable, ...] = (
    PartTable(
        "System",
        {
            "boot id": "boot_id", "boot": "boot", "kernel": "kernel_release",
            "system": "os_name", "processor": "cpu_model", "memory, MiB": "memory_total_mb",
            "NVIDIA driver": "driver", "AMD driver": "amd_driver", "CUDA": "cuda",
            "fabric manager": "fabric_manager",
        },
        _system,
    ),
    PartTable(
        "GPUs",
        {
            "GPU": "index", "model": "model", "serial": "serial", "UUID": "uuid",
            "PCI address": "pci_address", "VBIOS": "vbios", "memory, MiB": "memory_total_mb",
        },
        _gpus,
    ),
    PartTable(
        "State of the GPUs",
        {
            "GPU": "index",
            "ECC uncorrectable": "ecc_uncorrectable_volatile",
            "in its lifetime": "ecc_uncorrectable_aggregate",
            "corrected": "ecc_correctable_volatile",
            "remapped rows": "remapped_uncorrectable", "remap pending": "remap_pending",
            "remap failed": "remap_failed", "retired pages": "retired_pages",
            "PCIe": _pcie, "links": _links,
            "fabric": "fabric_state", "°C": "temperature_c", "throttle": "throttle",
            "recovery": "recovery",
        },
        _gpus,
    ),
    PartTable(
        "Faults in the kernel's log since the boot",
        {
            "source": "source", "code": "code", "PCI address": "pci_address", "lines": "count",
            "first": "first", "last": "last", "asks for": "action",
            "first line": lambda fault: _PROGRAM.sub("name=…", fault["text"]),
        },
        _faults,
    ),
    PartTable(
        "PCIe errors since the boot",
        {"PCI address": "address", "severity": "severity", "error": "name", "count": "count"},
        _bus_errors,
    ),
    PartTable(
        "RDMA adapters",
        {
            "device": "name", "model": "hca_type", "firmware": "firmware", "board": "board_id",
            "GUID": "node_guid", "PCI address": "pci_address", "port": "port", "state": "state",
            "link": "phys_state", "rate": "rate_text", "errors": _counters,
        },
        _ports,
    ),
    PartTable(
        "Network adapters",
        {
            "interface": "name", "driver": "driver", "firmware": "firmware", "MAC": "mac",
            "PCI address": "pci_address", "link": "operstate", "Mbit/s": "speed_mbps",
            "link changes": "carrier_changes", "rx errors": "rx_errors", "CRC": "rx_crc_errors",
            "tx errors": "tx_errors",
        },
        _interfaces,
    ),
)  # fmt: skip

# --- The page.

_SUBJECTS = ("gpus", "rdma", "nics")  # the subjects of parts that have a vendor
_PARTS = tuple(f"{subject}." for subject in _SUBJECTS)
#: The kinds of entries of a history that name no user, no job and no setting of the site.
_KINDS = (HARDWARE, VERSION, REBOOT, PART)
_NODES, _ENTRIES = 64, 200  # maximum nodes of a page, and entries of a node's history
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)")
#: Also a MAC or PCI address and a GUID, which stay.
_MAYBE_IPV6 = re.compile(r"(?<![\w.:])[0-9A-Fa-f]*:[0-9A-Fa-f:]+(?![\w:])")


def _history(entries: Iterable[HistoryEntry]) -> Iterator[tuple[str, str, str]]:
    """The entries about parts, versions and boots."""
    for entry in entries:
        is_about_part = bool(entry.serial) or entry.text.startswith(_PARTS)
        if entry.kind in _KINDS or (entry.kind == COUNTER and is_about_part):
            until = f", until {entry.until}" if entry.until else ""
            serial = f"{entry.serial}: " if entry.serial else ""
            yield entry.time, entry.kind, f"{serial}{entry.text}{until}"
        elif entry.kind == RESULT and entry.checks[0].partition(".")[0] in _SUBJECTS:
            yield entry.time, entry.kind, _shown(entry.text, entry.checks[0])


def _evidence(node: NodeReport, moment: str, entries: Iterable[HistoryEntry]) -> dict[str, object]:
    """What the page has of one node, for its template."""
    bad = sorted(filter(attrgetter("bad"), node.results), key=attrgetter("rank"))
    findings = [result for result in bad if result.check.partition(".")[0] in _SUBJECTS]
    facts, tables = observed_facts(node.facts, moment), []
    for table in PART_TABLES:
        rows = table.rows(facts)
        # A column without a value is left out.
        used = [any(column) for column in zip(*rows)]
        if rows:
            cells = [list(compress(row, used)) for row in rows]
            tables.append((table.name, list(compress(table.columns, used)), cells))
    # Hidden: findings that are not about a part. A table: its heading, columns and rows. History:
    # moment, kind and text of each change of a part or of software, the newest first.
    history = list(islice(_history(entries), _ENTRIES))
    page = {"node": node, "findings": findings, "hidden": len(bad) - len(findings)}
    return {**page, "tables": tables, "history": history}


def _shown(text: str, check: str) -> str:
    """A result's text without the site's addresses; a firmware's version may look like one."""
    if check.endswith(".firmware"):
        return text
    return _MAYBE_IPV6.sub(_without_ipv6, _IPV4.sub("ADDRESS", text))


def _without_ipv6(match: re.Match[str]) -> str:
    try:
        ipaddress.IPv6Address(match[0])
    except ValueError:
        return match[0]
    return "ADDRESS"


@cache
def page() -> HtmlPage:
    return HtmlPage("evidence_page", VERSION=__version__, fix=fix_text, shown=_shown)


def render(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The page, in pieces: each node begins a sheet of paper."""
    nodes = audit.nodes[:_NODES]
    yield from page().render(
        title=f"{node_set(node.name for node in nodes)}: evidence",
        audit=audit,
        nodes=(_evidence(node, audit.started, options.history(node.name)) for node in nodes),
        hidden=len(audit.nodes) - len(nodes),
    )
