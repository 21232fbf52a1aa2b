"""What is made of amd-smi, rocm-smi and the kernel's own word of AMD's GPUs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready import shell
from nodeready.lab import amd as amd_smi
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import amd
from nodeready.subjects.gpus.amd import AmdGpu
from nodeready.subjects.gpus.gpu import DeviceFile, GpuProcess, Gpus, PciGpu, Tool
from nodeready.subjects.gpus.health import device_access, xgmi_errors
from tests import paths

DATA = Path(__file__).parent / "data" / "gpus"
SAMPLES = paths.SAMPLES / "rocm-smi"
POLICY = Policy()
BEFORE = "have=amd-smi\nhave=rocm-smi\nversion=6.12.12\n"


def ran(printed: dict[str, str], before: str = BEFORE, status: int = 0) -> Output:
    """The section's output when the tool printed this for each of its calls."""
    runs = [f"\n@a1 run {name}\n{text}\n@a1 ran {status}\n" for name, text in printed.items()]
    return Output(before + "".join(runs), 0, nonce="a1")


def seen(printed: dict[str, str], before: str = BEFORE) -> tuple[AmdGpu, ...]:
    gpus, tool, _ = amd.parse(ran(printed, before))
    assert tool.works
    return gpus


def test_a_healthy_node_of_eight() -> None:
    gpus, tool, driver = amd.parse(ran(amd_smi.outputs()))
    assert (len(gpus), tool, driver) == (8, Tool("amd-smi", "ok"), "6.12.12")
    assert [gpu.pci_address for gpu in gpus][:2] == ["0000:05:00.0", "0000:29:00.0"]
    gpu = gpus[0]
    assert (gpu.model, gpu.vbios) == ("AMD Instinct MI300X", "113-M3000100-103")
    assert (gpu.memory_total_mb, gpu.memory_used_mb) == (196592, 283)
    assert (gpu.pcie_generation, gpu.pcie_generation_max) == (5, 5)
    assert (gpu.pcie_width, gpu.pcie_width_max) == (16, 16)
    assert (gpu.temperature_c, gpu.temperature_slowdown_c) == (45, 100)
    assert (gpu.ecc, gpu.ecc_uncorrectable_volatile, gpu.xgmi_errors) == ("on", 0, 0)
    assert (gpu.throttle, gpu.processes, gpu.idle) == ((), (), None)
    assert [link.state for link in gpu.links] == ["active"] * 7


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"uncorrectable": 2}, "ecc_uncorrectable_volatile", 2),
        ({"correctable": 7}, "ecc_correctable_volatile", 7),
        ({"deferred": 1}, "ecc_deferred", 1),
        ({"ecc": "DISABLED"}, "ecc", "off"),
        ({"pcie_width": 8}, "pcie_width", 8),
        ({"pcie_speed": 16}, "pcie_generation", 4),
        ({"xgmi_uncorrectable": 3}, "xgmi_errors", 3),
        ({"violation": "prochot"}, "throttle", ("hw_slowdown",)),
        ({"violation": "hbm_thermal"}, "throttle", ("hw_thermal_slowdown",)),
        ({"violation": "ppt"}, "throttle", ()),
        ({"hotspot": 101}, "temperature_c", 101),
        ({"vbios": "113-OLD"}, "vbios", "113-OLD"),
    ],
)
def test_a_fault_shows_on_its_gpu_alone(change: dict, field: str, value: object) -> None:
    gpus = seen(amd_smi.outputs(changes={3: change}))
    healthy = seen(amd_smi.outputs())
    assert getattr(gpus[3], field) == value
    assert (*gpus[:3], *gpus[4:]) == (*healthy[:3], *healthy[4:])


def test_a_link_that_is_down_and_a_gpu_that_is_gone() -> None:
    gpus = seen(amd_smi.outputs(changes={0: {"down": (2,)}}, missing=(7,)))
    assert len(gpus) == 7
    assert [link.index for link in gpus[0].links if link.state == "inactive"] == [2]


def test_an_old_amd_smi_and_values_that_are_none() -> None:
    static, metric = (DATA / "amd_smi_23_mi210.json").read_text().split("\n]\n", 1)
    (gpu,) = seen({"static": f"{static}\n]", "metric": metric})
    assert (gpu.pci_address, gpu.ecc, gpu.vbios, gpu.serial) == ("0000:c1:00.0", "off", None, None)
    assert (gpu.pcie_width, gpu.pcie_generation, gpu.pcie_generation_max) == (8, 3, 4)
    assert (gpu.ecc_correctable_volatile, gpu.ecc_uncorrectable_volatile) == (4, 1)
    assert (gpu.memory_total_mb, gpu.memory_used_mb) == (65536, None)
    # 65535 degrees stand for no sensor: the edge's temperature, and its own limit.
    assert (gpu.temperature_c, gpu.temperature_slowdown_c) == (35, None)
    assert (gpu.xgmi_errors, gpu.links) == (2, ())


def test_the_partitions_of_a_gpu_are_one_gpu() -> None:
    printed = amd_smi.outputs(buses=("05",))
    static = json.loads(printed["static"])["gpu_data"]
    second = {**static[0], "gpu": 1, "bus": {"bdf": "0000:05:00.1"}}
    second["partition"] = {"partition_id": "1"}
    assert len(seen({**printed, "static": json.dumps([static[0], second])})) == 1


def test_rocm_smi_with_words_around_its_json() -> None:
    before = (
        "have=rocm-smi\n"
        "/sys/bus/pci/drivers/amdgpu/0000:c1:00.0/ras/umc_err_count:ue: 1\n"
        "/sys/bus/pci/drivers/amdgpu/0000:c1:00.0/ras/umc_err_count:ce: 5\n"
        "/sys/bus/pci/drivers/amdgpu/0000:c1:00.0/ras/gfx_err_count:ue: 1\n"
    )
    output = ran({"rocm": (DATA / "amd_rocm_smi.txt").read_text()}, before)
    gpus, tool, driver = amd.parse(output)
    assert (tool, driver) == (Tool("rocm-smi", "ok"), "in-tree")
    gpu, nothing = gpus
    assert (gpu.model, gpu.serial) == ("AMD INSTINCT MI210", "PCB052410-0034")
    assert (gpu.pci_address, gpu.pcie_generation, gpu.pcie_width) == ("0000:c1:00.0", 3, 16)
    assert (gpu.temperature_c, gpu.memory_temperature_c) == (36, None)
    assert (gpu.memory_total_mb, gpu.memory_used_mb) == (65520, 10)
    assert (gpu.ecc_uncorrectable_volatile, gpu.ecc_correctable_volatile) == (2, 5)
    assert nothing == AmdGpu(1, "amd", "")


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.json")), ids=lambda path: path.name)
def test_every_recorded_output_is_read(path: Path) -> None:
    for gpu in seen({"rocm": path.read_text()}, "have=rocm-smi\n"):
        assert gpu.pci_address
        assert gpu.model
        assert gpu.temperature_c
        assert gpu.memory_total_mb


def test_the_kernel_names_processes_and_bad_pages() -> None:
    gpus = seen(amd_smi.outputs(), (DATA / "amd_kfd.txt").read_text())
    assert gpus[0].processes == (GpuProcess(4711, "python3 train", 8192),)
    assert [gpu.idle for gpu in gpus[:3]] == [False, True, None]
    assert [gpu.retired_pending for gpu in gpus[:3]] == [False, True, None]


HALF = {"static": amd_smi.outputs()["static"]}


@pytest.mark.parametrize(
    ("output", "state", "detail"),
    [
        (Output("", 0), "missing", ""),
        (Output("", None), "timed out", ""),
        (Output(BEFORE, None), "timed out", "static"),
        (Output(ran(HALF).text + "\n@a1 run metric\n{", None, nonce="a1"), "timed out", "metric"),
        (Output(f"{BEFORE}\n@a1 run static\n[", None, True, "a1"), "nonsense", "too long"),
        (Output(f"{BEFORE}module=no\n", 0), "failed", "not loaded"),
        (Output(f"{BEFORE}stuck=77\n", 0), "stuck", "process 77"),
        (ran({"static": "Traceback\nError: no driver"}, status=255), "failed", "no driver"),
        (ran({"static": "ERROR:root:Unable to detect any GPU devices"}), "nonsense", "Unable"),
        (ran({"static": '{"gpu_data": [{"gpu": 0,'}), "nonsense", "gpu_data"),
        (ran({"static": "[]"}), "nonsense", "[]"),
        (ran({"rocm": "WARNING: No JSON data to report"}, "have=rocm-smi\n"), "nonsense", "WARN"),
    ],
)  # fmt: skip
def test_a_tool_that_fails_is_named_with_its_reason(
    output: Output, state: str, detail: str
) -> None:
    _, tool, _ = amd.parse(output)
    assert (tool.state, detail in tool.detail) == (state, True)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[\n" * 50_000,
        '{"gpu_data": [{"gpu": 0, "bus": {"bdf": "\x1b[31m[red]../../x\udcff"}, "asic": []}]}',
        '[{"gpu": 0, "bus": "N/A", "limit": 7, "vram": {"size": {"value": [], "unit": {}}}}]',
        '[{"gpu": 1e999, "asic": NaN}, {"gpu": 0, "bus": {"max_pcie_width": 1e308}}]',
        '[{"gpu": 0, "bus": {"max_pcie_width": ' + "9" * 100_000 + "}}]",
        '[{"gpu": {"gpu": {}}}, null, [[]], {"gpu": true}, {"gpu": -1}]',
    ],
)
@pytest.mark.parametrize("call", ["static", "metric", "xgmi", "rocm"])
def test_hostile_output_harms_nothing(text: str, call: str) -> None:
    gpus, _, _ = amd.parse(ran({**amd_smi.outputs(), call: text}))
    assert all(gpu.pci_address == gpu.pci_address.strip("\x1b") for gpu in gpus)


def test_the_script_asks_the_tool_three_times_and_no_more(tmp_path: Path) -> None:
    tool = tmp_path / "amd-smi"
    tool.write_text(amd_smi.stand_in(amd_smi.outputs()))
    tool.chmod(0o755)
    script = amd.SECTION.script(POLICY).replace("/sys/module/amdgpu ]", "/sys/module ]")
    text = f"PATH={tmp_path}:$PATH NR=a1\n{shell.library('probe')}\n{shell.minify(script)}"
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.count("@a1 run ") == 3
    gpus, tool_seen, _ = amd.parse(Output(done.stdout, 0, nonce="a1"))
    assert (len(gpus), tool_seen.state) == (8, "ok")


def node(*files: DeviceFile, vendor: str = "amd", device: str = "74a1") -> Gpus:
    driver = "amdgpu" if vendor == "amd" else "nvidia"
    pci = PciGpu("0000:05:00.0", vendor, device, driver, pci_class="120000")
    return Gpus(pci=(pci,), amd_tool=Tool("amd-smi", "ok"), device_files=files)


def file(path: str, mode: str, gid: int = 109) -> DeviceFile:
    return DeviceFile(path, mode, 0, gid)


OPEN, GROUP, ROOT = "crw-rw-rw-", "crw-rw----", "crw-------"
RENDER = "/dev/dri/renderD128"


@pytest.mark.parametrize(
    ("seen", "status", "actual"),
    [
        (node(file("/dev/kfd", OPEN), file(RENDER, OPEN)), "ok", "for everybody"),
        (node(file("/dev/kfd", GROUP), file(RENDER, OPEN)), "ok", "group 109 only"),
        (node(file("/dev/kfd", GROUP, 0), file(RENDER, OPEN)), "fail", f"/dev/kfd {GROUP}"),
        (node(file("/dev/kfd", OPEN), file(RENDER, ROOT)), "fail", f"{RENDER} {ROOT}"),
        (node(file(RENDER, OPEN)), "fail", "/dev/kfd is missing"),
        (node(file("/dev/kfd", OPEN)), "fail", "/dev/dri/renderD* is missing"),
        (node(), "unknown", "no device file"),
        (node(file("/dev/nvidia0", OPEN), vendor="nvidia"), "ok", "for everybody"),
        (node(file("/dev/nvidia0", ROOT, 0), vendor="nvidia"), "fail", "/dev/nvidia0"),
        (node(file("/dev/nvidia-caps", ROOT, 0), vendor="nvidia"), "na", "no program"),
        (node(file(RENDER, ROOT), vendor="nvidia"), "na", "no program"),
        (Gpus(), "na", "no GPU"),
    ],
)  # fmt: skip
def test_jobs_must_be_able_to_open_the_device_files(seen: Gpus, status: str, actual: str) -> None:
    result = device_access(seen, POLICY)
    assert (result.status, actual in result.actual) == (status, True)


def test_errors_of_xgmi_fail_and_a_tool_that_hangs_is_no_zero() -> None:
    def on(gpus: tuple[AmdGpu, ...], tool: str = "ok") -> Gpus:
        pci = tuple(
            PciGpu(f"0000:{bus}:00.0", "amd", "74a1", "amdgpu", pci_class="120000")
            for bus in amd_smi.BUSES
        )
        return Gpus(pci=pci, amd=gpus, amd_tool=Tool("amd-smi", tool))

    good = seen(amd_smi.outputs())
    bad = seen(amd_smi.outputs(changes={4: {"xgmi_uncorrectable": 2}}))
    silent = tuple(replace(gpu, xgmi_errors=None) for gpu in good)
    assert xgmi_errors(on(good), POLICY).status == "ok"
    result = xgmi_errors(on(bad), POLICY)
    assert (result.status, result.actual) == ("fail", "gpu 4 (0000:85:00.0): 2 XGMI errors")
    assert xgmi_errors(on(silent), POLICY).status == "na"
    assert xgmi_errors(on((), "stuck"), POLICY).status == "unknown"
    assert xgmi_errors(Gpus(), POLICY).status == "na"
