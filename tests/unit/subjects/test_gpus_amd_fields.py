"""AMD's parts as their tools of several versions show them, and each field with a wrong value.

Composed in the form of amd-smi 23 (ROCm 5.7), 24 (ROCm 6.0) and 25 (ROCm 6.4), and of rocm-smi of
ROCm 5 and 6: ROCm/amdsmi, amdsmi_commands.py; rocm_smi_lib, rocm_smi.py; telegraf's recordings.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready.subjects.base import Output
from nodeready.subjects.result import Result
from tests import paths
from tests.builders.gpus import Node, bad, pci

BUSES = ("05", "29", "49", "65")
DRIVER = "/sys/bus/pci/drivers/amdgpu"
FILES = "\n".join(
    f"crw-rw-rw- 1 0 0 226, {n} Jan  6 09:00 /dev/{name}"
    for n, name in enumerate(("kfd", "dri/renderD128"))
)
LOG = Output("scan=dmesg\nstatus=0\nlines=9\nbegins=0\nend=dmesg\n", 0)

Json = dict[str, Any]


class Part:
    """One kind of GPU: PCI device id, name, class, generation of PCIe, RAS, memory in GB."""

    def __init__(self, device: str, name: str, **more: Any) -> None:
        self.device, self.name = device, name
        self.kind: str = more.get("kind", "0x120000")
        self.speed: int = more.get("speed", 32)
        self.width: int = more.get("width", 16)
        self.ras: bool = more.get("ras", True)
        self.gigabytes: int = more.get("gigabytes", 64)
        self.edge: bool = more.get("edge", False)
        self.links: bool = more.get("links", True)


#: A board with a display, a chip of its memory beside it, and no RAS.
RADEON: Json = {"kind": "0x030000", "speed": 16, "ras": False, "edge": True, "links": False}
OLDER: Json = {"speed": 16, "edge": True}
VEGA: Json = {**OLDER, "kind": "0x038000", "gigabytes": 32}
PARTS = {
    "MI50": Part("0x66a1", "AMD Instinct MI50", **VEGA),
    "MI60": Part("0x66a0", "AMD Instinct MI60", **VEGA),
    "MI100": Part("0x738c", "AMD Instinct MI100", **VEGA),
    "MI210": Part("0x740f", "AMD Instinct MI210", **OLDER),
    "MI250": Part("0x740c", "AMD Instinct MI250", **OLDER),
    "MI250X": Part("0x7408", "AMD Instinct MI250X", **OLDER),
    "MI300A": Part("0x74a0", "AMD Instinct MI300A", width=0, gigabytes=128),
    "MI300X": Part("0x74a1", "AMD Instinct MI300X", gigabytes=192),
    "MI308X": Part("0x74a2", "AMD Instinct MI308X", gigabytes=192),
    "MI325X": Part("0x74a5", "AMD Instinct MI325X", gigabytes=256),
    "MI350X": Part("0x75a0", "AMD Instinct MI350X", gigabytes=288),
    "MI355X": Part("0x75a3", "AMD Instinct MI355X", gigabytes=288),
    "MI300X VF": Part("0x74b5", "AMD Instinct MI300X VF", gigabytes=192),
    "RX 6700": Part("0x73df", "AMD Radeon RX 6700 XT", **RADEON, width=1, gigabytes=12),
    "RX 7600": Part("0x7480", "AMD Radeon RX 7600", **RADEON, width=8, gigabytes=8),
    "RX 7900": Part("0x744c", "AMD Radeon RX 7900 XTX", **RADEON, gigabytes=24),
    "W7900": Part("0x7448", "AMD Radeon PRO W7900", **RADEON, gigabytes=48),
}
UNSUPPORTED = "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
BLOCKS = ("UMC", "SDMA", "GFX", "MMHUB", "PCIE_BIF", "HDP", "XGMI_WAFL")


def unit(value: float | str, word: str) -> Any:
    return {"value": value, "unit": word} if not isinstance(value, str) else value


def static_25(part: Part, index: int) -> Json:
    na = "N/A"
    return {
        "gpu": index,
        "asic": {
            "market_name": part.name,
            "vendor_id": "0x1002",
            "device_id": part.device,
            "asic_serial": f"0x5F1CC6AB32BB1B8{index}",
        },
        "bus": {
            "bdf": f"0000:{BUSES[index]}:00.0",
            "max_pcie_width": max(part.width, 16) if part.width else 0,
            "max_pcie_speed": unit(part.speed, "GT/s"),
            "pcie_interface_version": "Gen 5",
            "slot_type": "OAM",
        },
        "vbios": {"name": na, "build_date": na, "part_number": "113-M3000100-103", "version": na},
        "limit": {
            "max_power": unit(750, "W"),
            "min_power": unit(0, "W"),
            "socket_power": unit(750, "W"),
            "slowdown_edge_temperature": unit(100, "C") if part.edge else na,
            "slowdown_hotspot_temperature": unit(100, "C"),
            "slowdown_vram_temperature": unit(105, "C"),
            "shutdown_hotspot_temperature": unit(110, "C"),
        },
        "driver": {"name": "amdgpu", "version": "6.12.12"},
        "board": {"product_serial": f"69232000{index:04}", "product_name": part.name},
        "ras": {
            "eeprom_version": "0x30000" if part.ras else na,
            "bad_page_threshold": 256 if part.ras else na,
            "ecc_block_state": dict.fromkeys(BLOCKS, "ENABLED") if part.ras else na,
        },
        "partition": {
            "compute_partition": "SPX" if part.speed == 32 else na,
            "memory_partition": "NPS1" if part.speed == 32 else na,
            "partition_id": 0,
        },
        "numa": {"node": 0, "affinity": 0},
        "vram": {"type": "HBM", "size": unit(part.gigabytes * 1024, "MB")},
    }


def metric_25(part: Part, index: int) -> Json:
    na = "N/A"
    none = {"correctable_count": 0, "uncorrectable_count": 0, "deferred_count": 0}
    violations = ("prochot", "ppt", "socket_thermal", "vr_thermal", "hbm_thermal")
    return {
        "gpu": index,
        "usage": {"gfx_activity": unit(0, "%"), "umc_activity": unit(0, "%")},
        "power": {"socket_power": unit(138, "W"), "throttle_status": na},
        "temperature": {
            "edge": unit(44, "C") if part.edge else na,
            "hotspot": unit(45, "C"),
            "mem": unit(38, "C"),
        },
        "pcie": {
            "width": part.width,
            "speed": unit(2.5 if not part.ras else part.speed, "GT/s"),
            "replay_count": 0,
        },
        "ecc": {
            "total_correctable_count": 0 if part.ras else na,
            "total_uncorrectable_count": 0 if part.ras else na,
            "total_deferred_count": 0 if part.ras else na,
            "cache_correctable_count": 0 if part.ras else na,
            "cache_uncorrectable_count": 0 if part.ras else na,
        },
        "ecc_blocks": {name: dict(none) for name in BLOCKS} if part.ras else na,
        "perf_level": "AMDSMI_DEV_PERF_LEVEL_AUTO",
        "xgmi_err": na,
        "mem_usage": {
            "total_vram": unit(part.gigabytes * 1024, "MB"),
            "used_vram": unit(283, "MB"),
        },
        "throttle": {
            f"{kind}_violation_{word}": value
            for kind in violations
            for word, value in (
                ("status", "NOT ACTIVE" if part.speed == 32 else na),
                ("activity", unit(0, "%") if part.speed == 32 else na),
            )
        },
    }


def static_23(part: Part, index: int) -> Json:
    """amd-smi 23.1: plain numbers, errors in the place of whole sections."""
    return {
        "gpu": index,
        "asic": {
            "market_name": part.name,
            "device_id": part.device,
            "asic_serial": f"0x5F1CC6AB32BB1B8{index}",
        },
        "bus": {
            "bdf": f"0000:{BUSES[index]}:00.0",
            "pcie_lanes": 16 if part.width else 0,
            "pcie_speed": part.speed * 1000,
        },
        "vbios": {"name": "NAVI", "part_number": "113-D67301-059", "version": "020.001"},
        "board": {"serial_number": "0x0", "product_serial": "0x", "product_name": part.name},
        "limit": {
            "power": 300,
            "temperature_edge": 100 if part.edge else UNSUPPORTED,
            "temperature_junction": 105,
            "temperature_vram": 105,
        },
        "driver": {"driver_version": "6.2.4"},
        "ras": [{"block": name, "status": "ENABLED"} for name in BLOCKS] if part.ras else "N/A",
        "numa": {"node": 0, "affinity": 0},
    }  # fmt: skip


def metric_23(part: Part, index: int) -> Json:
    no = UNSUPPORTED
    return {
        "gpu": index,
        "usage": {"gfx_activity": 0, "umc_activity": 0, "mm_activity": 0},
        "fb_usage": {"vram_total": part.gigabytes * 1024, "vram_used": 10},
        "power": {
            "average_socket_power": 40,
            "gfx_voltage": 800,
            "soc_voltage": "AMDSMI_STATUS_NOT_YET_IMPLEMENTED - Feature not yet implemented",
        },
        "temperature": {"edge": 35 if part.edge else 0, "hotspot": 36, "mem": 38},
        "ecc": {"correctable": 0, "uncorrectable": 0}
        if part.ras
        else {"correctable": "N/A", "uncorrectable": "N/A"},
        "ecc_block": {
            name: {"correctable": 0, "uncorrectable": 0} for name in BLOCKS
        } if part.ras else {"correctable_per_block": "N/A", "uncorrectable_per_block": "N/A"},
        "pcie": {"pcie_lanes": part.width, "pcie_speed": part.speed * 1000},
        "fan": {"speed": no, "max": no, "rpm": no, "usage": "Unable to detect fan speed"},
        "perf_level": "AMDSMI_DEV_PERF_LEVEL_AUTO",
        "replay_count": 0,
        "xgmi_err": "N/A",
        "mem_usage": {"vram": part.gigabytes * 1024, "used_vram": 10},
    }  # fmt: skip


def card(part: Part, index: int, rocm: int) -> Json:
    names = {5: ("GPU ID", "Card series"), 6: ("Device ID", "Card Series")}[rocm]
    return {
        names[0]: part.device,
        **({"GUID": "55069"} if rocm == 6 else {}),
        "Unique ID": f"0x79ccd55167a2124{index}",
        "VBIOS version": "113-D3430400-037",
        "Temperature (Sensor edge) (C)": "31.0" if part.edge else "N/A",
        "Temperature (Sensor junction) (C)": "34.0",
        "Temperature (Sensor memory) (C)": "30.0",
        "pcie clock level": f"0 ({part.speed:.1f}GT/s x{part.width})" if part.width else "N/A",
        "Performance Level": "auto",
        "Max Graphics Package Power (W)": "290.0",
        "PCIe Replay Count": "0",
        "Serial Number": "N/A",
        "PCI Bus": f"0000:{BUSES[index].upper()}:00.0",
        "VRAM Total Memory (B)": str(part.gigabytes << 30),
        "VRAM Total Used Memory (B)": "6782976",
        names[1]: part.name,
        "Compute Partition": "SPX" if part.speed == 32 else "N/A",
        "Memory Partition": "NPS1" if part.speed == 32 else "N/A",
        "(Topology) Numa Node": "0",
    }


def status(count: int) -> str:
    rows = [["X" if peer == at else "U" for peer in range(count)] for at in range(count)]
    found = [
        {"gpu": at, "bdf": f"0000:{BUSES[at]}:00.0", "link_status": rows[at]}
        for at in range(count)
    ]
    return json.dumps(found)


class Answer:
    """What the tool of one version prints of four GPUs; `edit` changes the first."""

    def __init__(self, part: Part, version: str) -> None:
        self.part, self.version = part, version
        self.before = "version=6.12.12\n"
        self.status = {"static": 0, "metric": 0, "xgmi": 0, "rocm": 0}
        self.xgmi = status(len(BUSES)) if part.links else "Error: Feature not supported"
        if version.startswith("rocm"):
            self.documents: dict[str, list[Json]] = {
                "rocm": [card(part, n, int(version[-1])) for n in range(len(BUSES))]
            }
        else:
            made = {"23": (static_23, metric_23)}.get(version, (static_25, metric_25))
            self.documents = {
                name: [make(part, n) for n in range(len(BUSES))]
                for name, make in zip(("static", "metric"), made, strict=True)
            }

    def set(self, path: str, value: Any, gpus: tuple[int, ...] = (0,)) -> Answer:
        """Set ``metric/ecc/total_uncorrectable_count``, or a name of a card, in these GPUs."""
        document, _, rest = path.partition("/")
        for index in gpus:
            at: Any = self.documents[document][index]
            *way, last = rest.split("/") if document != "rocm" else [rest]
            for name in way:
                at = at[name]
            assert last in at, path
            at[last] = value
        return self

    def output(self) -> Output:
        texts = {}
        for name, found in self.documents.items():
            if name == "rocm":
                cards = {f"card{n}": one for n, one in enumerate(found)}
                texts[name] = "WARNING: One or more commands failed\n" + json.dumps(cards)
            elif self.version == "25":
                texts[name] = json.dumps({"gpu_data": found})
            else:
                texts[name] = json.dumps(found)
        if "rocm" not in texts:
            texts["xgmi"] = self.xgmi
            if not self.part.links:
                self.status["xgmi"] = 2
        have = "have=rocm-smi\n" if "rocm" in texts else "have=amd-smi\nhave=rocm-smi\n"
        runs = "".join(
            f"\n@a1 run {name}\n{text}\n@a1 ran {self.status[name]}\n"
            for name, text in texts.items()
        )
        return Output(have + self.before + runs, 0, nonce="a1")

    def judged(self, lanes: tuple[int, ...] = (), **policy: Any) -> dict[str, Result]:
        widths = lanes or (max(self.part.width, 16),) * len(BUSES)
        bus = "".join(
            pci(
                f"0000:{at}:00.0",
                "0x1002",
                self.part.device,
                self.part.kind,
                driver="amdgpu",
                width=width,
            )
            for at, width in zip(BUSES, widths, strict=True)
        )
        node = Node(
            bus=bus + FILES,
            smi=Output("", 0),
            links=Output("", 0),
            amd=self.output(),
            kernel_log=LOG,
        )
        return node.judged(**policy)


VERSIONS = ("23", "24", "25", "rocm5", "rocm6")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", PARTS)
def test_a_healthy_node_is_wholly_well(name: str, version: str) -> None:
    answer = Answer(PARTS[name], version)
    results = answer.judged()
    assert bad(results) == {}
    assert results["present"].status == "ok"
    assert answer.judged(gpu_count=4)["count"].status == "ok"
    model = answer.judged(gpu_model=PARTS[name].name)["model"]
    assert (model.status, model.actual) == ("ok", PARTS[name].name)


def test_the_recorded_outputs_are_wholly_well() -> None:
    folder = paths.SAMPLES / "rocm-smi"
    if not folder.is_dir():
        pytest.skip("no recorded outputs here")
    for path in sorted(folder.glob("*.json")):
        cards = {k: v for k, v in json.loads(path.read_text()).items() if k.startswith("card")}
        bus = "".join(
            pci(
                one["PCI Bus"].lower(),
                "0x1002",
                one.get("Device ID") or one["GPU ID"],
                "0x038000",
                driver="amdgpu",
            )
            for one in cards.values()
        )
        text = f"have=rocm-smi\n\n@a1 run rocm\n{path.read_text()}\n@a1 ran 0\n"
        node = Node(
            bus=bus + FILES,
            smi=Output("", 0),
            links=Output("", 0),
            amd=Output(text, 0, nonce="a1"),
            kernel_log=LOG,
        )
        assert bad(node.judged()) == {}, path.name


def test_the_graphics_of_a_processor_are_no_accelerator() -> None:
    answer = Answer(PARTS["MI300X"], "25")
    own = copy.deepcopy(answer.documents["static"][0])
    own |= {"gpu": 4, "bus": {"bdf": "0000:0e:00.0"}, "asic": {"device_id": "0x164e"}}
    answer.documents["static"].append(own)
    answer.documents["metric"].append({"gpu": 4, "temperature": "N/A", "ecc": "N/A"})
    bus = "".join(
        pci(f"0000:{at}:00.0", "0x1002", device, kind, driver="amdgpu")
        for at, device, kind in (
            *((at, "0x74a1", "0x120000") for at in BUSES),
            ("0e", "0x164e", "0x030000"),
        )
    )
    node = Node(
        bus=bus + FILES,
        smi=Output("", 0),
        links=Output("", 0),
        amd=answer.output(),
        kernel_log=Output(
            "scan=dmesg\nstatus=0\nlines=9\nbegins=0\nfault=1 5 amdgpu 0000:0e:00.0: amdgpu: ring"
            " gfx_0.0.0 timeout, signaled seq=1, emitted seq=3\nend=dmesg\n",
            0,
        ),
    )
    results = node.judged(gpu_count=4)
    assert bad(results) == {}
    assert results["count"].status == "ok"


DATA = Path(__file__).parent / "data" / "gpus"


def wrong_values() -> list[tuple[str, ...]]:
    """The table's rows: part, version, field, value, check, verdict, a word of it, source."""
    text = (DATA / "amd_fields.txt").read_text(encoding="utf-8")
    return [tuple(line.split(" | ")) for line in text.splitlines() if not line.startswith("#")]


WRONG = wrong_values()


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row[0]} {row[1]} {row[2]} {row[3]}"[:90])
def test_a_wrong_value_gets_the_verdict_of_its_source(row: tuple[str, ...]) -> None:
    part, version, path, value, check, wanted, word, source = row
    answer = Answer(PARTS[part], version)
    name = "113-M3000100-103" if version in ("24", "25") else ""
    policy = {"gpu_ecc": "on"} if check == "ecc_mode" else {}
    policy |= {"gpu_vbios": (name,)} if check == "vbios" else {}
    policy |= {"gpu_model": PARTS[part].name} if check == "model" else {}
    if version.startswith("rocm"):
        answer.before += LIMITS
    before = answer.judged(**policy)[check]
    assert not before.bad
    result = answer.set(path, json.loads(value)).judged(**policy)[check]
    assert result.status == wanted, f"{result.actual} ({source})"
    assert word in result.actual


LIMITS = "".join(
    f"{DRIVER}/0000:{bus}:00.0/hwmon/hwmon4/temp{number}_{kind}:{value}\n"
    for bus in BUSES
    for number, label, crit in ((1, "edge", 100000), (2, "junction", 105000), (3, "mem", 94000))
    for kind, value in (("label", label), ("crit", crit))
)


def test_rocm_smi_has_the_kernels_own_limits_and_counts() -> None:
    def hot(sensor: str, value: str) -> Result:
        answer = Answer(PARTS["MI100"], "rocm5")
        answer.before += LIMITS
        answer.set(f"rocm/Temperature (Sensor {sensor}) (C)", value)
        return answer.judged()["temperature"]

    assert hot("memory", "93.0").status == "ok"
    assert hot("memory", "95.0").actual == "gpu 0 (0000:05:00.0): memory 95 C, limit 94 C"
    assert hot("junction", "104.0").status == "ok"
    assert hot("junction", "105.0").status == "fail"
    assert hot("edge", "101.0").status == "fail"
    for part in ("MI50", "MI100", "MI210"):
        answer = Answer(PARTS[part], "rocm5")
        answer.before += f"{DRIVER}/0000:05:00.0/ras/umc_err_count:ue: 2\n"
        result = answer.judged()["ecc_errors"]
        assert (result.status, "2 uncorrectable" in result.actual) == ("fail", True)
    answer = Answer(PARTS["RX 7900"], "rocm5")
    answer.before += f"{DRIVER}/0000:05:00.0/ras/umc_err_count:ue: 1048560\n"
    assert answer.judged()["ecc_errors"].status == "na"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bus_tells_lanes_that_the_tool_does_not(version: str) -> None:
    """The tool may show the link inside of the board."""
    results = Answer(PARTS["MI210"], version).judged(lanes=(8, 16, 16, 16))
    assert results["pcie"].status == "fail"
    assert "x8 of x16" in results["pcie"].actual


@pytest.mark.parametrize(
    ("text", "status", "wanted"),
    [
        ("AMDSMI_STATUS_NO_PERM - Permission Denied", 255, "unknown"),
        ("Traceback (most recent call last):\nValueError: x", 1, "unknown"),
        ("amd-smi: error: argument: invalid choice: 'xgmi'", 2, "na"),
        ("AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported", 2, "na"),
        ("[]", 0, "na"),
    ],
)
def test_links_that_could_not_be_asked_are_not_up(text: str, status: int, wanted: str) -> None:
    answer = Answer(PARTS["MI300X"], "25")
    answer.xgmi, answer.status["xgmi"] = text, status
    assert answer.judged()["nvlink"].status == wanted


@pytest.mark.parametrize(
    ("word", "wanted"),
    [("U", "ok"), ("N/A", "ok"), ("X", "ok"), ("D", "fail"), ("ERR!", "fail"), ("None", "fail")],
)
def test_a_link_of_which_the_tool_says_something_else_is_not_up(word: str, wanted: str) -> None:
    answer = Answer(PARTS["MI300X"], "25")
    rows = json.loads(answer.xgmi)
    rows[0]["link_status"] = ["X", "U", "U", word]
    # The other end says the same.
    rows[3]["link_status"] = [word, "U", "U", "X"]
    answer.xgmi = json.dumps(rows)
    result = answer.judged()["nvlink"]
    # Unequal numbers of links are a warning of their own.
    assert result.status == (wanted if word in ("U", "D") or wanted == "fail" else "warn")


def test_rocm_smi_complains_and_shows_all() -> None:
    answer = Answer(PARTS["MI100"], "rocm5")
    answer.status["rocm"] = 1
    assert answer.judged()["tool"].status == "ok"
    answer.documents["rocm"] = []
    assert answer.judged()["tool"].status == "fail"


#: Words in the place of a value; those of `ABSENT` say that the device has no such value.
WORDS = (
    "Failed to retrieve value",
    "Unknown Error",
    "ERR!",
    "None",
    "AMDSMI_STATUS_NO_PERM - Permission Denied",
    "AMDSMI_STATUS_INTERNAL_EXCEPTION -  Internal error",
    "AMDSMI_STATUS_UNKNOWN_ERROR - An unknown error occurred",
    "AMDSMI_STATUS_TIMEOUT - Timeout in API call",
    "RSMI_STATUS_UNKNOWN_ERROR: An unknown error occurred",
    "Unable to get value",
    "Insufficient Permissions",
)
ABSENT = ("N/A", "Not supported", UNSUPPORTED)
#: The statuses, the healthiest first; what does not apply is no better than what is well.
RANK = {"ok": 0, "na": 0, "warn": 1, "unknown": 1, "fail": 2}


def leaves(found: Any, way: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(found, dict) and "value" not in found:
        return [one for name, inner in found.items() for one in leaves(inner, (*way, name))]
    return [way]


def every_field(version: str) -> list[tuple[str, tuple[str, ...]]]:
    answer = Answer(PARTS["MI300X" if version == "25" else "MI210"], version)
    return [
        (document, way)
        for document, found in answer.documents.items()
        for way in leaves(found[0])
        if way != ("gpu",)
    ]


FIELDS = {version: every_field(version) for version in VERSIONS}


def put(answer: Answer, document: str, way: tuple[str, ...], value: Any) -> None:
    at: Any = answer.documents[document][0]
    for name in way[:-1]:
        at = at[name]
    at[way[-1]] = value


FAULTS: tuple[tuple[str, Callable[[Answer], Any]], ...] = (
    ("25", lambda a: a.set("metric/ecc/total_uncorrectable_count", 2, (1,))),
    ("25", lambda a: a.set("metric/pcie/width", 8, (1,))),
    ("25", lambda a: a.set("metric/temperature/mem", {"value": 110, "unit": "C"}, (1,))),
    ("25", lambda a: a.set("metric/throttle/prochot_violation_status", "ACTIVE", (1,))),
    ("23", lambda a: a.set("metric/ecc/uncorrectable", 2, (1,))),
    ("rocm5", lambda a: a.set("rocm/pcie clock level", "0 (8.0GT/s x8)", (1,))),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_word_in_the_place_of_a_value_makes_nothing_healthier(data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(VERSIONS))
    document, way = data.draw(st.sampled_from(FIELDS[version]))
    word = data.draw(st.sampled_from(WORDS + ABSENT))
    part = PARTS["MI300X" if version == "25" else "MI210"]
    faults = [fault for of, fault in FAULTS if of == version]
    fault = data.draw(st.sampled_from([*faults, lambda a: None]))

    def judged(change: bool) -> dict[str, Result]:
        answer = Answer(part, version)
        answer.before += LIMITS if version.startswith("rocm") else ""
        fault(answer)
        if change:
            put(answer, document, way, word)
        return answer.judged(gpu_model=part.name)

    before, after = judged(False), judged(True)
    for name, result in after.items():
        assert RANK[result.status] >= RANK[before[name].status], (name, way, word)
        if word in WORDS:
            # What was seen before and is not seen now is unknown, and never not applicable.
            assert (before[name].status, result.status) != ("ok", "na"), (name, way, word)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_judged_field_with_an_error_in_its_place_is_unknown(version: str, word: str) -> None:
    judged = {
        "25": (
            ("metric", ("ecc", "total_uncorrectable_count"), "ecc_errors"),
            ("metric", ("temperature", "hotspot"), "temperature"),
            ("metric", ("temperature", "mem"), "temperature"),
            ("static", ("limit", "slowdown_hotspot_temperature"), "temperature"),
            ("metric", ("pcie", "width"), "pcie"),
            ("static", ("bus", "max_pcie_width"), "pcie"),
            ("metric", ("throttle", "socket_thermal_violation_status"), "throttle"),
            ("metric", ("xgmi_err",), "xgmi_errors"),
            ("static", ("asic", "market_name"), "model"),
        ),
        "23": (
            ("metric", ("ecc", "uncorrectable"), "ecc_errors"),
            ("metric", ("ecc",), "ecc_errors"),
            ("metric", ("temperature", "hotspot"), "temperature"),
            ("metric", ("pcie",), "pcie"),
            ("static", ("asic", "market_name"), "model"),
        ),
        "rocm6": (
            ("rocm", ("pcie clock level",), "pcie"),
            ("rocm", ("Temperature (Sensor junction) (C)",), "temperature"),
            ("rocm", ("Card Series",), "model"),
        ),
    }
    rows = judged.get({"24": "25", "rocm5": "rocm6"}.get(version, version), ())
    for document, way, check in rows:
        answer = Answer(PARTS["MI300X" if version in ("24", "25") else "MI210"], version)
        answer.before += LIMITS if version.startswith("rocm") else ""
        name = tuple(
            "Card series" if w == "Card Series" and version == "rocm5" else w for w in way
        )
        put(answer, document, name, word)
        result = answer.judged(gpu_model=answer.part.name)[check]
        assert result.status == "unknown", (way, word, result.actual)
