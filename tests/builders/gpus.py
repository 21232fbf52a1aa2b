"""A node with GPUs as its probe prints it: what is good stands here, a test says what differs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.lab import nvidia
from nodeready.subjects.gpus import checks
from nodeready.subjects.gpus import facts as gpus
from nodeready.subjects.gpus.gpu import Gpus
from tests.builders.judging import by_name

ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
POLICY = Policy()
SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (7, 8, 9, 10))
PREFIX = "nr_scanned=1\nnr_fabric_manager=4711\n"
DEVICES = "\n".join(
    f"crw-rw-rw- 1 0 0 195, {minor} Jan  6 09:00 /dev/nvidia{name}"
    for minor, name in ((0, "0"), (1, "1"), (255, "ctl"))
)
VERSION = (
    "/proc/driver/nvidia/version:NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
    "535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "/proc/driver/nvidia/version:GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


def pci(
    address: str, vendor="0x10de", device="0x2330", kind="0x030200", *,
    driver="nvidia", width=16, most=16,
) -> str:  # fmt: skip
    """What the section prints of one device."""
    uevent = [f"DRIVER={driver}"] if driver else []
    files = {
        "vendor": [vendor], "class": [kind], "device": [device],
        "uevent": [*uevent, f"PCI_CLASS={kind[2:].upper()}", f"PCI_SLOT_NAME={address}"],
        "numa_node": ["0"], "current_link_width": [str(width)], "max_link_width": [str(most)],
        "current_link_speed": ["32.0 GT/s PCIe"],
    }  # fmt: skip
    root = f"/sys/bus/pci/devices/{address}"
    return "".join(f"{root}/{name}:{line}\n" for name, lines in files.items() for line in lines)


def switch(address: str) -> str:
    return pci(address, device="0x22a3", kind="0x068000", width=2)


BUS = "".join(map(pci, ADDRESSES))
SERVER = pci("0000:03:00.0", "0x1a03", "0x2000", "0x030000", driver="ast")


@dataclass(frozen=True)
class Node:
    """The answers of the sections; the default is a healthy HGX with eight H100."""

    bus: str = VERSION + "".join(map(pci, ADDRESSES)) + "".join(map(switch, SWITCHES)) + DEVICES
    smi: Output = Output(PREFIX + nvidia.query({"address": address} for address in ADDRESSES), 0)
    links: Output = Output(PREFIX + nvidia.nvlink_status(8), 0)
    amd: Output = Output("", 0)
    kernel_log: Output = Output("", 0)

    def observed(self, policy: Policy = POLICY) -> Gpus:
        outputs = {
            "pci_gpus": Output(self.bus, 0), "nvidia_smi": self.smi, "nvlink": self.links,
            "amd": self.amd, "kernel_log": self.kernel_log,
        }  # fmt: skip
        observed: Gpus = gpus.PROBE.parse(outputs, policy)
        return observed

    def judged(self, **settings: Any) -> dict[str, Result]:
        policy = Policy(**settings)
        return by_name(checks, self.observed(policy), policy)


def h100(changes: Mapping[int, Mapping[str, Any]] | None = None, **more: Any) -> Node:
    """An HGX of which the GPUs of ``changes`` differ; ``more``: other answers of it."""
    return replace(Node(), **{"smi": smi(ADDRESSES, changes or {}), **more})


def a100(changes: Mapping[int, Mapping[str, Any]] | None = None) -> Node:
    """The same with A100: Ampere has no fabric state and prints thresholds of temperature."""
    links = Output(PREFIX + nvidia.nvlink_status(8, "a100"), 0)
    return replace(Node(), smi=smi(ADDRESSES, changes or {}, "a100"), links=links)


def smi(
    addresses: Iterable[str], changes: Mapping[int, Mapping[str, Any]], model: str = "h100"
) -> Output:
    shown = [{"address": a, **changes.get(n, {})} for n, a in enumerate(addresses)]
    return Output(PREFIX + nvidia.query(shown, model), 0)


def statuses(results: Mapping[str, Result], status: str) -> set[str]:
    return {name for name, result in results.items() if result.status == status}


def verdict_of(results: Mapping[str, Result], name: str) -> tuple[str, str]:
    return results[name].status, results[name].actual


def judged(observed: Gpus, **settings: Any) -> dict[str, Result]:
    return by_name(checks, observed, Policy(**settings))


def bad(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.actual for name, result in results.items() if result.bad}


# --- Other parts and drivers: what nvidia-smi prints of a healthy node, composed for each.
#
# The form of each generation of the driver is that of recordings: 470 (GT 1030), 515 (A10G, T4),
# 535 (A100), 550 and 580 (H100, B200, GB200), 595 (L40S, RTX 3080), 615 (Rubin).

Tree = Mapping[str, Any]


def _table(name: str) -> Any:
    return json.loads(Path(__file__).with_name(f"gpus_nvidia{name}.json").read_text())


#: Driver -> the name of its schema.
DRIVERS: dict[str, str] = _table("_drivers")


@dataclass(frozen=True)
class Part:
    """What the GPUs of one product have in common, and the node that they are in."""

    name: str
    device: str
    since: int  # the first major version of the driver for it
    generation: int
    architecture: str = "Hopper"
    count: int = 8  # how many a node has
    # active and inactive NVLinks; None: the command prints nothing of it
    links: tuple[int, int] | None = (0, 0)
    gbps: str = "26.562"  # of a link
    memory: str = "rows"  # are remapped; `pages` are retired; `none`: no ECC
    tlimit: bool = True
    mig: bool = True
    fabric: bool = False
    peer: str = "N/A"
    switches: int = 0
    bank: bool = False
    state: str = "P0"
    lanes: int = 16
    card: int = 16
    virtual: str = "None"
    c2c: str = "N/A"


def _parts() -> dict[str, Part]:
    rows = _table("")
    for row in rows:
        row["links"] = tuple(row["links"]) if row.get("links") else row.get("links", (0, 0))
    return {row["name"]: Part(**row) for row in rows}


PARTS = _parts()


def combinations() -> list[tuple[str, str]]:
    """Each part with each driver that it can have."""
    return [
        (name, driver)
        for name, part in PARTS.items()
        for driver in DRIVERS
        if int(driver.partition(".")[0]) >= part.since
    ]


_ELEMENTS = _table("_elements")


def _texts(part: Part, major: int) -> tuple[dict[str, object], dict[str, bool]]:
    """What the rows of elements name: words, and conditions."""
    kind = "event" if major >= 535 else "throttle"
    words = {
        **asdict(part), "moved": "Requested functionality has been deprecated",
        "idle": "Not Active" if part.state == "P2" else "Active",
        "speed": part.generation if part.state == "P0" or part.bank else 1,
        "reasons": f"clocks_{kind}_reasons/clocks_{kind}_reason", "retired": "retired_pages",
        "histogram": "remapped_rows/row_remapper_histogram/row_remapper_histogram",
        "health": "fabric/health",
    }  # fmt: skip
    rows, pages = part.memory == "rows", part.memory == "pages"
    conditions = {
        "mig": part.mig, "bank": part.bank, "tlimit": part.tlimit, "fabric": part.fabric,
        "rows": rows, "pages": pages, "ecc": part.memory != "none",
        "cells": pages and part.architecture != "Turing", "known": part.name != "NVIDIA Thor",
        "degrees": not part.tlimit or major < 535, "sensor": rows and not part.bank,
        "healthy": part.fabric and part.architecture != "Hopper",
        "assigned": part.fabric and part.bank,
    }  # fmt: skip
    return words, conditions


@cache
def _elements(part: Part, driver: str) -> list[tuple[list[str], str]]:
    """The paths of a GPU's elements, and their texts but for the GPU's own words.

    A row: paths; since-until of the driver's major version, +condition or -condition of the
    element, and the condition without which its text is N/A; the text.
    """
    major = int(driver.partition(".")[0])
    words, conditions = _texts(part, major)
    words |= {name: f"{{{name}}}" for name in ("index", "uuid", "bus")}
    found = []
    for paths, terms, text in _ELEMENTS:
        shown = text
        for term in terms.split():
            since, dash, until = term.partition("-")
            if dash and (since + until).isdigit():
                there = int(since or 0) <= major < int(until or 10**6)
            elif term[0] in "+-":
                there = conditions[term[1:]] is (term[0] == "+")
            else:
                there, shown = True, shown if conditions[term] else "N/A"
            if not there:
                break
        else:
            for counts in ("ecc_errors/volatile", "ecc_errors/aggregate"):
                for path in paths.format(counts=counts, **words).split():
                    found.append((path.split("/"), shown.format(**words)))
    return found


def tree(part: Part, driver: str, index: int, address: str) -> dict[str, Any]:
    """One ``<gpu>``: element -> its text, or the elements in it."""
    words = {"index": index, "uuid": nvidia.uuid(index), "bus": f"0000{address.upper()}"}
    made: dict[str, Any] = {}
    for (*above, last), text in _elements(part, driver):
        place = made
        for name in above:
            place = place.setdefault(name, {})
        place[last] = text.format(**words)
    return made


def _xml(inside: Tree) -> str:
    return "".join(
        f"<{name}>{_xml(value) if isinstance(value, Mapping) else value}</{name}>\n"
        for name, value in inside.items()
    )


def answer(trees: Iterable[Tree], driver: str) -> str:
    """``nvidia-smi -q -x`` of these GPUs."""
    shown = [
        f'<gpu id="0000{address.upper()}">\n{_xml(gpu)}</gpu>\n'
        for address, gpu in zip(ADDRESSES, trees, strict=False)
    ]
    major = int(driver.partition(".")[0])
    newer = f"<kmd_version>{driver}</kmd_version>\n" if major >= 615 else ""
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "{DRIVERS[driver]}">\n'
        f"<nvidia_smi_log>\n<driver_version>{driver}</driver_version>\n"
        "<!-- driver_version will be removed -->\n"
        f"<cuda_version>12.4</cuda_version>\n{newer}<attached_gpus>{len(shown)}</attached_gpus>\n"
        f"{''.join(shown)}</nvidia_smi_log>\n"
    )


def nvlinks(part: Part, inactive: Mapping[int, Iterable[int]] | None = None) -> str:
    """``nvidia-smi nvlink --status`` of a node with this part; ``inactive``: what is down, too."""
    if part.links is None:
        return ""
    active, unused = part.links
    lines = []
    for index in range(part.count):
        down = {*range(active, active + unused), *(inactive or {}).get(index, ())}
        lines.append(f"GPU {index}: {part.name} (UUID: {nvidia.uuid(index)})")
        numbers = range(active + unused)
        if active + unused and len(down) == active + unused:
            lines.append(
                "\t NVML: Unable to retrieve NVLink information as all links are inActive"
            )
            continue
        lines += [
            f"\t Link {n}: " + ("<inactive>" if n in down else f"{part.gbps} GB/s")
            for n in numbers
        ]
    return "\n".join(lines) + "\n" if lines else ""


def trees_of(name: str, driver: str) -> list[dict[str, Any]]:
    part = PARTS[name]
    return [tree(part, driver, n, place) for n, place in enumerate(ADDRESSES[: part.count])]


def node(name: str, driver: str, trees: Sequence[Tree] | None = None, **more: Any) -> Node:
    """A node with this part and driver; ``trees``: of its GPUs, instead of healthy ones."""
    part = PARTS[name]
    trees = trees_of(name, driver) if trees is None else trees
    part = replace(part, count=len(trees))
    places = ADDRESSES[: part.count]
    bus = VERSION.replace("535.129.03", driver) + "".join(
        pci(place, device=f"0x{part.device}", width=part.lanes, most=part.card) for place in places
    )
    bus += "".join(map(switch, SWITCHES[: part.switches])) + DEVICES
    composed = Node(
        bus,
        smi=Output(PREFIX + answer(trees, driver), 0),
        links=Output("nr_scanned=1\n" + nvlinks(part), 0),
    )
    return replace(composed, **more)
