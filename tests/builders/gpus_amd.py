"""AMD's parts as their tools of several versions show them.

Composed in the form of amd-smi 23 (ROCm 5.7), 24 (ROCm 6.0) and 25 (ROCm 6.4), and of rocm-smi of
ROCm 5 and 6: ROCm/amdsmi, amdsmi_commands.py; rocm_smi_lib, rocm_smi.py; telegraf's recordings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeready.core.base import Output
from nodeready.core.result import Result
from nodeready.lab import amd
from tests.builders.gpus import Node, pci

BUSES = ("05", "29", "49", "65")
DRIVER = "/sys/bus/pci/drivers/amdgpu"
FILES = "\n".join(
    f"crw-rw-rw- 1 0 0 226, {n} Jan  6 09:00 /dev/{name}"
    for n, name in enumerate(("kfd", "dri/renderD128"))
)
LOG = Output("scan=dmesg\nstatus=0\nlines=9\nbegins=0\nend=dmesg\n", 0)

BEFORE = "have=amd-smi\nhave=rocm-smi\nversion=6.12.12\n"

Json = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One kind of GPU."""

    device: str  # PCI device id
    name: str
    kind: str = "0x120000"  # PCI class
    speed: int = 32  # GT/s of PCIe
    width: int = 16
    ras: bool = True
    gigabytes: int = 64  # of memory
    edge: bool = False  # it has a temperature of its edge
    links: bool = True


_PARTS = Path(__file__).with_name("gpus_amd_parts.json")
PARTS = {name: Part(**row) for name, row in json.loads(_PARTS.read_text()).items()}
UNSUPPORTED = "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
BLOCKS = ("UMC", "SDMA", "GFX", "MMHUB", "PCIE_BIF", "HDP", "XGMI_WAFL")


def unit(value: float | str, word: str) -> Any:
    return {"value": value, "unit": word} if not isinstance(value, str) else value


def documents_25(part: Part) -> dict[str, list[Json]]:
    """amd-smi 25 as the lab's stand-in prints it, with what this part has of it."""
    na = "N/A"
    static: Json = {
        "asic": {"market_name": part.name, "device_id": part.device},
        "bus": {"max_pcie_width": max(part.width, 16) if part.width else 0,
                "max_pcie_speed": unit(part.speed, "GT/s")},
        "limit": {"slowdown_edge_temperature": unit(100, "C") if part.edge else na},
        "vram": {"size": unit(part.gigabytes * 1024, "MB")},
    }  # fmt: skip
    metric: Json = {
        "temperature": {"edge": unit(44, "C") if part.edge else na},
        "pcie": {"width": part.width, "speed": unit(part.speed if part.ras else 2.5, "GT/s")},
        "mem_usage": {"total_vram": unit(part.gigabytes * 1024, "MB")},
    }
    if not part.ras:
        static["ras"] = {"ecc_block_state": na}
        totals = (f"total_{kind}_count" for kind in ("correctable", "uncorrectable", "deferred"))
        metric |= {"ecc": dict.fromkeys(totals, na), "ecc_blocks": na}
    if part.speed < 32:
        static["partition"] = {"accelerator_partition": na, "memory_partition": na}
        metric["throttle"] = na
    changes = {index: {"static": static, "metric": metric} for index in range(len(BUSES))}
    printed = amd.outputs(changes, buses=BUSES)
    return {call: json.loads(printed[call])["gpu_data"] for call in ("static", "metric")}


_FORMS: Json = json.loads(Path(__file__).with_suffix(".json").read_text())


def document(form: str, part: Part, version: str, index: int) -> Json:
    """A GPU in a form of `_FORMS`: amd-smi 23.1 has plain numbers, errors in place of sections.

    A row: path; +condition or -condition of the element, or the condition without which it is N/A;
    the value, a text, or $ and the name of one.
    """
    words = {
        **vars(part), "index": index, "bus": BUSES[index], "upper": BUSES[index].upper(),
        "slot": 16 if part.width else 0, "mega": part.speed * 1000, "unsupported": UNSUPPORTED,
        "megabytes": part.gigabytes * 1024, "bytes": part.gigabytes << 30,
        "blocks": [{"block": name, "status": "ENABLED"} for name in BLOCKS],
        "counts": {name: {"correctable": 0, "uncorrectable": 0} for name in BLOCKS},
        "rocm5": version == "rocm5", "cdna3": part.speed == 32,
    }  # fmt: skip
    made: Json = {}
    for path, term, value in _FORMS[form]:
        if term[:1] in ("+", "-") and bool(words[term[1:]]) is (term[0] == "-"):
            continue
        place = made
        *above, last = path.split("/")
        for name in above:
            place = place.setdefault(name, {})
        text = isinstance(value, str)
        found = words[value[1:]] if text and value[0] == "$" else value
        found = found.format(**words) if text and found is value else found
        place[last] = found if term[:1] in ("", "+", "-") or words[term] else "N/A"
    return made


def link_status(count: int) -> str:
    """`amd-smi xgmi --link-status`: X is the GPU itself, U a link that is up."""
    return json.dumps([
        {"gpu": gpu, "bdf": f"0000:{BUSES[gpu]}:00.0",
         "link_status": ["X" if peer == gpu else "U" for peer in range(count)]}
        for gpu in range(count)
    ])  # fmt: skip


class Answer:
    """What the tool of one version prints of four GPUs.

    before: what the section prints before the tool runs; documents: of each call, the GPUs.
    """

    def __init__(self, part: str, version: str) -> None:
        self.part, self.version = PARTS[part], version
        self.before = "version=6.12.12\n"
        self.status = {"static": 0, "metric": 0, "xgmi": 0, "rocm": 0}
        self.xgmi = link_status(len(BUSES))
        if not self.part.links:
            self.xgmi, self.status["xgmi"] = "Error: Feature not supported", 2
        forms = ["rocm"] if version.startswith("rocm") else ["static_23", "metric_23"]
        self.documents: dict[str, list[Json]] = {
            form.removesuffix("_23"): [document(form, self.part, version, n) for n in range(4)]
            for form in forms
        }
        if version in ("24", "25"):
            self.documents = documents_25(self.part)
        if version == "24":
            for gpu in self.documents["static"]:
                gpu["partition"]["compute_partition"] = gpu["partition"].pop(
                    "accelerator_partition"
                )

    def place(self, path: str, gpu: int = 0) -> tuple[Json, str]:
        """The object, and its key, of ``metric/ecc/correctable`` or ``rocm/NAME``."""
        document, _, rest = path.partition("/")
        value: Any = self.documents[document][gpu]
        *names, last = rest.split("/") if document != "rocm" else [rest]
        for name in names:
            value = value[name]
        assert last in value, path
        return value, last

    def set(self, path: str, value: Any, gpu: int = 0) -> Answer:
        """Set this value; a number gets the unit of the value that was there."""
        place, last = self.place(path, gpu)
        old = place[last]
        if isinstance(old, dict) and "unit" in old and isinstance(value, int):
            value = {**old, "value": value}
        place[last] = value
        return self

    def output(self) -> Output:
        texts = {}
        for name, gpus in self.documents.items():
            shown: Any = {"gpu_data": gpus} if self.version == "25" else gpus
            texts[name] = json.dumps(shown)
            if name == "rocm":
                cards = {f"card{index}": gpu for index, gpu in enumerate(gpus)}
                texts[name] = "WARNING: One or more commands failed\n" + json.dumps(cards)
        have = "have=rocm-smi\n"
        if "rocm" not in texts:
            texts["xgmi"] = self.xgmi
            have = "have=amd-smi\nhave=rocm-smi\n"
        return ran(texts, have + self.before, self.status)

    def judged(self, lanes: tuple[int, ...] = (), **policy: Any) -> dict[str, Result]:
        widths = lanes or (max(self.part.width, 16),) * len(BUSES)
        bus = "".join(
            pci(f"0000:{bus}:00.0", "0x1002", self.part.device, self.part.kind, driver="amdgpu",
                width=width)
            for bus, width in zip(BUSES, widths, strict=True)
        )  # fmt: skip
        return node_of(self.output(), bus).judged(**policy)


def ran(texts: dict[str, str], before: str = BEFORE, status: dict[str, int] | int = 0) -> Output:
    """The section's output when the tool printed this for each of its calls."""
    runs = [
        f"\n@a1 run {name}\n{text}\n@a1 ran "
        f"{status[name] if isinstance(status, dict) else status}\n"
        for name, text in texts.items()
    ]
    return Output(before + "".join(runs), 0, nonce="a1")


def node_of(answer: Output, bus: str, kernel_log: Output = LOG) -> Node:
    """A node with AMD's GPUs alone."""
    none = Output("", 0)
    return Node(bus=bus + FILES, smi=none, links=none, amd=answer, kernel_log=kernel_log)
