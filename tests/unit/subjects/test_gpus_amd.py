"""What is made of amd-smi, rocm-smi and the kernel's own word of AMD's GPUs.

Each field with a wrong value: the rows are from ROCm/amdsmi, amdsmi_commands.py, where no other
source is named. No word in the place of a value may make a node look healthier.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.lab import amd as amd_smi
from nodeready.subjects.gpus import amd_gpu
from nodeready.subjects.gpus.amd_gpu import AmdGpu
from nodeready.subjects.gpus.gpu import DeviceFile, GpuProcess, Gpus, PciGpu, Tool
from nodeready.subjects.gpus.health import device_access, xgmi_errors
from tests import paths
from tests.builders.gpus import bad, pci
from tests.builders.gpus_amd import BEFORE, BUSES, DRIVER, PARTS, UNSUPPORTED, Answer, node_of, ran
from tests.builders.sections import NONCE, run_on
from tests.builders.verdicts import assert_says
from tests.cases import cases, read_table

DATA = Path(__file__).parent / "data" / "gpus"
SAMPLES = paths.SAMPLES / "rocm-smi"
POLICY = Policy()


def parse_gpus(printed: dict[str, str], before: str = BEFORE) -> tuple[AmdGpu, ...]:
    gpus, tool, _ = amd_gpu.parse(ran(printed, before))
    assert tool.works
    return gpus


def test_a_healthy_node_of_eight():
    gpus, tool, driver = amd_gpu.parse(ran(amd_smi.outputs()))
    assert (len(gpus), tool, driver) == (8, Tool("amd-smi", "ok"), "6.12.12")
    fields = {name: value for name, value in vars(gpus[0]).items() if value not in (None, ())}
    links = fields.pop("links")
    assert [link.state for link in links] == ["active"] * 7
    assert fields.items() >= read_table(__file__, "MI300X").items()
    assert fields.keys().isdisjoint(("throttle", "processes", "idle"))


def test_an_old_amd_smi_and_values_that_are_none():
    static, metric = (DATA / "amd_smi_23_mi210.json").read_text().split("\n]\n", 1)
    (gpu,) = parse_gpus({"static": f"{static}\n]", "metric": metric})
    assert (gpu.pci_address, gpu.ecc, gpu.vbios, gpu.serial) == ("0000:c1:00.0", "off", None, None)
    assert (gpu.pcie_width, gpu.pcie_generation, gpu.pcie_generation_max) == (8, 3, 4)
    assert (gpu.ecc_correctable_volatile, gpu.ecc_uncorrectable_volatile) == (4, 1)
    assert (gpu.memory_total_mb, gpu.memory_used_mb) == (65536, None)
    # 65535 degrees stand for no sensor: the edge's temperature, and its own limit.
    assert (gpu.temperature_c, gpu.temperature_slowdown_c) == (35, None)
    assert (gpu.xgmi_errors, gpu.links) == (2, ())


def test_the_partitions_of_a_gpu_are_one_gpu():
    printed = amd_smi.outputs(buses=("05",))
    static = json.loads(printed["static"])["gpu_data"]
    second = {**static[0], "gpu": 1, "bus": {"bdf": "0000:05:00.1"}}
    second["partition"] = {"partition_id": "1"}
    assert len(parse_gpus({**printed, "static": json.dumps([static[0], second])})) == 1


def test_rocm_smi_with_words_around_its_json():
    before = (
        "have=rocm-smi\n"
        "/sys/bus/pci/drivers/amdgpu/0000:c1:00.0/ras/umc_err_count:ue: 1\n"
        "/sys/bus/pci/drivers/amdgpu/0000:c1:00.0/ras/umc_err_count:ce: 5\n"
        "/sys/bus/pci/drivers/amdgpu/0000:c1:00.0/ras/gfx_err_count:ue: 1\n"
    )
    output = ran({"rocm": (DATA / "amd_rocm_smi.txt").read_text()}, before)
    gpus, tool, driver = amd_gpu.parse(output)
    assert (tool, driver) == (Tool("rocm-smi", "ok"), "in-tree")
    gpu, nothing = gpus
    assert (gpu.model, gpu.serial) == ("AMD INSTINCT MI210", "PCB052410-0034")
    assert (gpu.pci_address, gpu.pcie_generation, gpu.pcie_width) == ("0000:c1:00.0", 3, 16)
    assert (gpu.temperature_c, gpu.memory_temperature_c) == (36, None)
    assert (gpu.memory_total_mb, gpu.memory_used_mb) == (65520, 10)
    assert (gpu.ecc_uncorrectable_volatile, gpu.ecc_correctable_volatile) == (2, 5)
    assert nothing == AmdGpu(1, "amd", "")


def test_the_kernel_names_processes_and_bad_pages():
    gpus = parse_gpus(amd_smi.outputs(), (DATA / "amd_kfd.txt").read_text())
    assert gpus[0].processes == (GpuProcess(4711, "python3 train", 8192),)
    assert [gpu.idle for gpu in gpus[:3]] == [False, True, None]
    assert [gpu.retired_pending for gpu in gpus[:3]] == [False, True, None]


HALF = {"static": amd_smi.outputs()["static"]}


@pytest.mark.parametrize(("output", "state", "detail"), [
    (Output("", 0), "missing", ""),
    (Output("", None), "timed out", ""),
    (Output(ran(HALF).text + "\n@a1 run metric\n{", None, nonce="a1"), "timed out", "metric"),
    (Output(f"{BEFORE}\n@a1 run static\n[", None, True, "a1"), "nonsense", "too long"),
    (Output(f"{BEFORE}module=no\n", 0), "failed", "not loaded"),
    (Output(f"{BEFORE}stuck=77\n", 0), "stuck", "process 77"),
    (ran({"static": "Traceback\nError: no driver"}, status=255), "failed", "no driver"),
    (ran({"static": '{"gpu_data": [{"gpu": 0,'}), "nonsense", "gpu_data"),
    (ran({"static": "[]"}), "nonsense", "[]"),
    # Deep ones, and more beginnings than documents.
    (ran({"static": "[" * 100_000}), "nonsense", "[[["),
    (ran({"static": "[\n" * 50_000}), "nonsense", "["),
    (ran({"rocm": "WARNING: No JSON data to report"}, "have=rocm-smi\n"), "nonsense", "WARN"),
    # rocm-smi complains and shows all, or nothing.
    (ran({"rocm": '{"card0": {"PCI Bus": "0000:C1:00.0"}}'}, "have=rocm-smi\n", 1), "ok", ""),
    (ran({"rocm": "{}"}, "have=rocm-smi\n", 1), "failed", ""),
])  # fmt: skip
def test_a_tool_that_fails_is_named_with_its_reason(output, state, detail):
    _, tool, _ = amd_gpu.parse(output)
    assert (tool.state, detail in tool.detail) == (state, True)


def test_the_script_asks_the_tool_three_times_and_no_more(tmp_path):
    files = {
        "bin/amd-smi": amd_smi.stand_in(amd_smi.outputs()),
        "sys/module/amdgpu/version": "6\n",
    }
    done = run_on(tmp_path, amd_gpu.SECTION.script(POLICY), ["sh"], files)
    assert done.stdout.count(" run ") == 3
    gpus, tool, _ = amd_gpu.parse(Output(done.stdout, 0, nonce=NONCE))
    assert (len(gpus), tool.state) == (8, "ok")


def node(vendor: str = "amd") -> Gpus:
    driver = "amdgpu" if vendor == "amd" else "nvidia"
    pci = PciGpu("0000:05:00.0", vendor, "74a1", driver, pci_class="120000")
    return Gpus(pci=(pci,), amd_tool=Tool("amd-smi", "ok"))


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/device_files.json"))
def test_jobs_must_be_able_to_open_the_device_files(case):
    """files: path, mode and group of root's."""
    files = tuple(DeviceFile(path, mode, 0, gid) for path, mode, gid in case["files"])
    vendor = case.get("vendor", "amd")
    result = device_access(replace(node(vendor), device_files=files) if vendor else Gpus(), POLICY)
    assert_says(result, case["verdict"])


def test_errors_of_xgmi_fail_and_a_tool_that_hangs_is_no_zero():
    good = parse_gpus(amd_smi.outputs())
    counted = parse_gpus(amd_smi.outputs(changes={4: {"xgmi_uncorrectable": 2}}))
    silent = tuple(replace(gpu, xgmi_errors=None) for gpu in good)
    for gpus, tool, status in (
        (good, "ok", "ok"), (counted, "ok", "fail"), (silent, "ok", "na"), ((), "stuck", "unknown")
    ):  # fmt: skip
        observed = replace(node(), amd=gpus, amd_tool=Tool("amd-smi", tool))
        result = xgmi_errors(observed, POLICY)
        assert result.status == status
        assert gpus is not counted or result.actual == "gpu 4 (0000:85:00.0): 2 XGMI errors"
    assert xgmi_errors(Gpus(), POLICY).status == "na"


#: Words in the place of a value; those of `ABSENT` say that the device has no such value.
WORDS = read_table(__file__, "WORDS")
ABSENT = ("N/A", "Not supported", UNSUPPORTED)


VERSIONS = ("23", "24", "25", "rocm5", "rocm6")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("part", PARTS)
def test_a_healthy_node_is_wholly_well(part, version):
    name = PARTS[part].name
    results = Answer(part, version).judged(gpu_count=4, gpu_model=name)
    assert bad(results) == {}
    assert results["present"].status == results["count"].status == "ok"
    assert (results["model"].status, results["model"].actual) == ("ok", name)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no recorded outputs here")
def test_the_recorded_outputs_are_wholly_well():
    for path in sorted(SAMPLES.glob("*.json")):
        cards = {k: v for k, v in json.loads(path.read_text()).items() if k.startswith("card")}
        bus = "".join(
            pci(card["PCI Bus"].lower(), "0x1002", card.get("Device ID") or card["GPU ID"],
                "0x038000", driver="amdgpu")
            for card in cards.values()
        )  # fmt: skip
        output = ran({"rocm": path.read_text()}, "have=rocm-smi\n")
        assert bad(node_of(output, bus).judged()) == {}, path.name
        for gpu in parse_gpus({"rocm": path.read_text()}, "have=rocm-smi\n"):
            assert all((gpu.pci_address, gpu.model, gpu.temperature_c, gpu.memory_total_mb))


def test_the_graphics_of_a_processor_are_no_accelerator():
    answer = Answer("MI300X", "25")
    own = copy.deepcopy(answer.documents["static"][0])
    own |= {"gpu": 4, "bus": {"bdf": "0000:0e:00.0"}, "asic": {"device_id": "0x164e"}}
    answer.documents["static"].append(own)
    answer.documents["metric"].append({"gpu": 4, "temperature": "N/A", "ecc": "N/A"})
    bus = "".join(
        pci(f"0000:{bus}:00.0", "0x1002", "0x74a1", "0x120000", driver="amdgpu") for bus in BUSES
    ) + pci("0000:0e:00.0", "0x1002", "0x164e", "0x030000", driver="amdgpu")
    log = (
        "scan=dmesg\nstatus=0\nlines=9\nbegins=0\nfault=1 5 amdgpu 0000:0e:00.0: amdgpu: ring"
        " gfx_0.0.0 timeout, signaled seq=1, emitted seq=3\nend=dmesg\n"
    )
    results = node_of(answer.output(), bus, Output(log, 0)).judged(gpu_count=4)
    assert bad(results) == {}
    assert results["count"].status == "ok"
    # A GPU of the tool's that the bus does not show is kept.
    lost = node_of(answer.output(), bus.partition("/sys/bus/pci/devices/0000:65")[0])
    assert len(lost.observed().amd) == 5


LIMITS = "".join(
    f"{DRIVER}/0000:{bus}:00.0/hwmon/hwmon4/temp{number}_{kind}:{value}\n"
    for bus in BUSES
    for number, label, crit in ((1, "edge", 100000), (2, "junction", 105000), (3, "mem", 94000))
    for kind, value in (("label", label), ("crit", crit))
)


def answer_of(part: str, version: str) -> Answer:
    """With the kernel's own limits where rocm-smi has none."""
    answer = Answer(part, version)
    answer.before += LIMITS if version.startswith("rocm") else ""
    return answer


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/amd_values.json"))
def test_a_wrong_value_gets_the_verdict_of_its_source(case):
    """The name of a row is PART VERSION: PATH: what it is about."""
    form, path = case["name"].split(": ")[:2]
    part, version = form.rsplit(" ", 1)
    name, check = PARTS[part].name, case["check"]
    status, _, words = case["verdict"].partition(": ")
    policy = {"ecc_mode": {"gpu_ecc": "on"}, "vbios": {"gpu_vbios": ("113-M3000100-103",)},
              "model": {"gpu_model": name}}.get(check, {})  # fmt: skip
    assert not answer_of(part, version).judged(**policy)[check].bad
    for value in case["values"]:
        results = answer_of(part, version).set(path, value).judged(**policy)
        assert results[check].status == status, (value, results[check].actual)
        assert words in results[check].actual
        # No other GPU; and no other check, but of what is counted or missing twice.
        assert bad(results).keys() <= {check, "tool", "ecc_errors"}
        assert all("gpu 0 " in actual for actual in bad(results).values()), value
    for word in WORDS if status == "fail" and "ecc_block" not in path else ():
        results = answer_of(part, version).set(path, word).judged(**policy)
        assert results[check].status not in ("ok", "na"), word


@pytest.mark.parametrize("part", ["MI50", "MI100", "MI210"])
def test_rocm_smi_has_the_kernels_own_counts(part):
    answer = Answer(part, "rocm5")
    answer.before += f"{DRIVER}/0000:05:00.0/ras/umc_err_count:ue: 2\n"
    assert_says(answer.judged()["ecc_errors"], "fail: 2 uncorrectable")
    radeon = Answer("RX 7900", "rocm5")
    radeon.before += f"{DRIVER}/0000:05:00.0/ras/umc_err_count:ue: 1048560\n"
    assert radeon.judged()["ecc_errors"].status == "na"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bus_tells_lanes_that_the_tool_does_not(version):
    """The tool may show the link inside of the board."""
    assert_says(Answer("MI210", version).judged(lanes=(8, 16, 16, 16))["pcie"], "fail: x8 of x16")


def links_with(word: str) -> str:
    """All links are up but for this word at both ends of one."""
    rows = json.loads(Answer("MI300X", "25").xgmi)
    rows[0]["link_status"] = ["X", "U", "U", word]
    rows[3]["link_status"] = [word, "U", "U", "X"]
    return json.dumps(rows)


@pytest.mark.parametrize(("text", "status", "wanted"), [
    (links_with("U"), 0, "ok"),
    (links_with("D"), 0, "fail"),
    (links_with("ERR!"), 0, "unknown"),
    (links_with("None"), 0, "unknown"),
    # Unequal numbers of links are a warning of their own.
    (links_with("N/A"), 0, "warn"),
    ("AMDSMI_STATUS_NO_PERM - Permission Denied", 255, "unknown"),
    ('[{"gpu": 0, "bdf": "0000:05:00.0", "link_status": "ERR!"}]', 0, "unknown"),
    ("Traceback (most recent call last):\nValueError: x", 1, "unknown"),
    ("amd-smi: error: argument: invalid choice: 'xgmi'", 2, "na"),
    ("[]", 0, "na"),
])  # fmt: skip
def test_links_that_could_not_be_asked_are_not_up(text, status, wanted):
    answer = Answer("MI300X", "25")
    answer.xgmi, answer.status["xgmi"] = text, status
    assert answer.judged()["nvlink"].status == wanted


#: The statuses, the healthiest first; what does not apply is no better than what is well.
RANK = {"ok": 0, "na": 0, "warn": 1, "unknown": 1, "fail": 2}


def places(value: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict) and "value" not in value:
        return [place for name, inner in value.items() for place in places(inner, (*above, name))]
    return [above]


def part_of(version: str) -> str:
    return "MI300X" if version in ("24", "25") else "MI210"


FIELDS = {
    version: [
        "/".join((document, *place))
        for document, gpus in Answer(part_of(version), version).documents.items()
        for place in places(gpus[0])
        if place != ("gpu",)
    ]
    for version in VERSIONS
}
#: Faults of the second GPU, which no word on the first may hide.
FAULTS: dict[str, list[tuple[str, Any]]] = read_table(__file__, "FAULTS")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_word_in_the_place_of_a_value_makes_nothing_healthier(data):
    version = data.draw(st.sampled_from(VERSIONS))
    path = data.draw(st.sampled_from(FIELDS[version]))
    word = data.draw(st.sampled_from(WORDS + ABSENT))
    fault = data.draw(st.sampled_from([*FAULTS.get(version, []), None]))

    def judged(change: bool) -> dict[str, Result]:
        answer = answer_of(part_of(version), version)
        if fault:
            answer.set(*fault, gpu=1)
        if change:
            answer.set(path, word)
        return answer.judged(gpu_model=answer.part.name)

    before, after = judged(False), judged(True)
    for name, result in after.items():
        assert RANK[result.status] >= RANK[before[name].status], (name, path, word)
        if word in WORDS:
            # What was seen before and is not seen now is unknown, and never not applicable.
            assert (before[name].status, result.status) != ("ok", "na"), (name, path, word)
