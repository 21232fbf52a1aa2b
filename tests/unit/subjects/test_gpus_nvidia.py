"""What nvidia-smi prints, in three schemas and in many broken ways, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from nodeready import shell
from nodeready.lab import nvidia as nvidia_smi
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import nvidia
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess
from tests import paths

DATA = Path(__file__).parent / "data" / "gpus"
SAMPLES = paths.SAMPLES / "nvidia-smi"
GOOD = nvidia_smi.query([{"address": "0000:1b:00.0"}, {"address": "0000:43:00.0"}])


def gpus(name: str) -> tuple[Gpu, ...]:
    found = nvidia.parse(Output((DATA / name).read_text(), 0))
    assert found.tool.works
    return found.gpus


def test_v11_of_a_t4() -> None:
    busy, idle = gpus("nvidia-t4-v11.xml")
    assert busy == Gpu(
        index=0,
        vendor="nvidia",
        pci_address="0000:3b:00.0",
        model="Tesla T4",
        uuid="GPU-d37e67a5-91dd-3774-a5cb-990962496010",
        serial="1320220000000",
        vbios="90.04.84.00.06",
        memory_total_mb=15360,
        memory_used_mb=1032,
        ecc="on",
        ecc_pending="on",
        ecc_uncorrectable_volatile=0,
        ecc_uncorrectable_aggregate=1,
        ecc_correctable_volatile=3,
        retired_pending=False,
        pcie_generation=3,
        pcie_generation_max=3,
        pcie_width=16,
        pcie_width_max=16,
        temperature_c=40,
        temperature_slowdown_c=93,
        persistence="on",
        processes=(
            GpuProcess(675, "/usr/lib/xorg/Xorg", 22, "G"),
            GpuProcess(5762, "python", 1005, "C"),
        ),
        performance_state="P0",
        idle=False,
        throttled=False,
        retired_pages=0,
    )
    assert (idle.idle, idle.performance_state, idle.pcie_generation) == (True, "P8", 1)


def test_v13_of_an_rtx() -> None:
    (gpu,) = gpus("nvidia-rtx-v13.xml")
    assert (gpu.ecc, gpu.ecc_pending) == ("on", "off")
    assert (gpu.ecc_uncorrectable_volatile, gpu.ecc_uncorrectable_aggregate) == (7, 8)
    assert gpu.temperature_slowdown_c == 41 + 46 + 2
    assert (gpu.remap_pending, gpu.repair_pending, gpu.recovery) == (False, False, "none")
    assert (gpu.retired_pending, gpu.mig, gpu.serial, gpu.fabric_state) == (None,) * 4


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("<reset_required>No", "<reset_required>Yes", "recovery", "reset"),
        ("<drain_and_reset_recommended>No", "<drain_and_reset_recommended>Yes", "recovery",
         "drain and reset"),
        ("<reset_required>No", "<reset_required>N/A", "recovery", None),
        ("<gpu_temp>31 C", "<gpu_temp>GPU requires reset", "recovery", "reset"),
        ("<gpu_temp>31 C", "<gpu_temp>[GPU is lost]", "recovery", "reboot"),
        ("<gpu_temp>31 C", "<gpu_temp>[GPU is lost]", "temperature_c", None),
        ("<gpu_temp>31 C", f"<gpu_temp>{'9' * 5000} C", "temperature_c", None),
        ("<gpu_temp>31 C", "<gpu_temp>[Not Supported]", "temperature_c", None),
        ("<current_ecc>Enabled", "<current_ecc>N/A", "ecc", None),
        ("<current_ecc>Enabled", "<current_ecc>Activé", "ecc", None),
        ("<virtualization_mode>None", "<virtualization_mode>Pass-Through", "virtual", True),
        ("<virtualization_mode>None", "<virtualization_mode>Host VGPU", "virtual", False),
        ("hw_slowdown>Not Active", "hw_slowdown>Active", "throttle", ("hw_slowdown",)),
        ("sw_power_cap>Not Active", "sw_power_cap>Active", "throttle", ()),
        ('id="0000', 'id="12340000', "pci_address", "0000:1b:00.0"),
        ('id="00000000:1B', 'id="00010000:1B', "pci_address", "10000:1b:00.0"),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>N/A", "ecc_uncorrectable_volatile", 0),
    ],
)  # fmt: skip
def test_a_value_is_what_it_says_or_nothing(old: str, new: str, field: str, value: object) -> None:
    assert old in GOOD or old.startswith("id=")
    gpu = nvidia.parse(Output(GOOD.replace(old, new, 1), 0)).gpus[0]
    assert getattr(gpu, field) == value


def test_counters_with_totals_as_old_boards_have_them() -> None:
    counts = (
        "<volatile><single_bit><device_memory>5</device_memory><total>5</total></single_bit>"
        "<double_bit><device_memory>2</device_memory><total>2</total></double_bit></volatile>"
    )
    start, end = GOOD.index("<volatile>"), GOOD.index("</volatile>") + len("</volatile>")
    gpu = nvidia.parse(Output(GOOD[:start] + counts + GOOD[end:], 0)).gpus[0]
    assert (gpu.ecc_uncorrectable_volatile, gpu.ecc_correctable_volatile) == (2, 5)


BOMB = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("text", "rc", "truncated", "state", "detail"),
    [
        ("", 0, False, "missing", ""),
        ("nr_driver=none\n", 0, False, "failed", "the driver is not loaded"),
        ("nr_scanned=1\nnr_stuck=77 3600\n", 0, False, "stuck",
         "pid 77 hangs in the kernel for 3600 s"),
        ("nr_hidden=6\n", 0, False, "hidden",
         "6 GPUs were not given to the step of Slurm's that looks (ConstrainDevices)"),
        ("nr_scanned=1\n", None, False, "timed out", "after 20 s"),
        (GOOD[:9000], None, True, "nonsense", "its answer was cut off"),
        (GOOD[:9000], 0, False, "nonsense", "no whole XML: "),
        ("nr_scanned=1\nFailed to initialize NVML: Driver/library version mismatch\n", 18, False,
         "failed", "Failed to initialize NVML: Driver/library version mismatch"),
        ("nr_scanned=1\nNo devices were found\n", 0, False, "failed", "No devices were found"),
        ("Unable to determine the device handle for GPU0: 0000:1B:00.0: GPU is lost.\n", 15, False,
         "failed", "Unable to determine the device handle for GPU0: 0000:1B:00.0: GPU is lost."),
        (f"{GOOD}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n", 14, False, "failed",
         "WARNING: infoROM is corrupted at gpu 0000:1B:00.0"),
        (GOOD.replace('id="00000000:1B:00.0"', "").replace("00000000:1B:00.0", "?"), 0, False,
         "failed", "1 of 2 GPUs without a PCI address"),
        (BOMB + GOOD.replace("NVIDIA H100", "&b;"), 0, False, "nonsense", "no whole XML: "),
        (GOOD.replace("NVIDIA H100", "&b;"), 0, False, "nonsense", "no whole XML: "),
        (GOOD.replace("<serial>", "<![CDATA[<serial>"), 0, False, "nonsense", "no whole XML: "),
        ("<nvidia_smi_log>" * 60000 + "</nvidia_smi_log>", 0, False, "nonsense", "no whole XML: "),
        ("\x1b[31m\udcff\x00", 0, False, "nonsense", "no whole XML: "),
    ],
)  # fmt: skip
def test_a_tool_that_fails_is_a_result(
    text: str, rc: int | None, truncated: bool, state: str, detail: str
) -> None:
    found = nvidia.parse(Output(text, rc, truncated))
    assert (found.tool.state, found.tool.detail[: len(detail)]) == (state, detail)
    assert len(found.tool.detail) <= 300
    assert bool(found.gpus) == ("infoROM" in text or "?" in text.partition("<pci>")[2])


def test_what_it_shows_counts_although_it_complains() -> None:
    found = nvidia.parse(Output(f"{GOOD}WARNING: infoROM is corrupted\n", 14))
    assert [gpu.pci_address for gpu in found.gpus] == ["0000:1b:00.0", "0000:43:00.0"]


def test_deep_nesting_ends() -> None:
    deep = f"<nvidia_smi_log>{'<gpu>' * 100000}{'</gpu>' * 100000}</nvidia_smi_log>"
    found = nvidia.parse(Output(deep, 0))
    assert (found.gpus, found.tool.state) == ((), "failed")


@pytest.mark.parametrize(
    "name", ["a&b", "<x>", "</process_name><pid>1</pid>", "\x1b]0;", "\udcff", "<!ENTITY"]
)
def test_a_process_can_name_itself_what_it_likes(name: str) -> None:
    text = nvidia_smi.query([{"address": "0000:1b:00.0", "processes": [(5, "PYTHON", 9)]}])
    found = nvidia.parse(Output(text.replace("PYTHON", name), 0))
    ((process,),) = (gpu.processes for gpu in found.gpus)
    assert (process.pid, process.memory_mb) == (5, 9)
    assert process.name[-3:] == name.replace("\x1b", "\ufffd").replace("\udcff", "\ufffd")[-3:]


def test_nvlinks_by_gpu() -> None:
    found = nvidia.parse_nvlink(
        Output("nr_scanned=1\n" + nvidia_smi.nvlink_status(2, "a100", {(1, 3)}), 0)
    )
    assert found.tool.works
    first, second = (found.links[nvidia_smi.uuid(index)] for index in (0, 1))
    assert len(first) == len(second) == 12
    assert {(link.state, link.speed_gbps) for link in first} == {("active", 25.0)}
    assert [link.index for link in second if link.state == "inactive"] == [3]


def test_nvlinks_that_are_all_down_or_not_supported() -> None:
    down = {(0, link) for link in range(18)}
    text = nvidia_smi.nvlink_status(1, "h100", down)
    for words in (text, text.replace("as all links are inActive", ": Not Supported")):
        found = nvidia.parse_nvlink(Output(words, 0))
        assert found.tool.works
        assert found.links == {nvidia_smi.uuid(0): ()}


@pytest.mark.parametrize(
    ("text", "rc", "truncated", "state"),
    [
        ("", 0, False, "missing"),
        ("nr_driver=none\n", 0, False, "failed"),
        ("nr_scanned=1\nnr_stuck=77 3600\n", 0, False, "stuck"),
        ("nr_hidden=6\n", 0, False, "hidden"),
        (nvidia_smi.nvlink_status(8)[:1500], None, False, "timed out"),
        (nvidia_smi.nvlink_status(8)[:1500], None, True, "nonsense"),
        ("Failed to initialize NVML: Unknown Error\n", 255, False, "failed"),
        ("GPU 0: x (UUID: )\n" + " Link 1: 9e99 GB/s\n" * 20000, 0, False, "nonsense"),
        ("\x1b[2J\udcff", 0, False, "nonsense"),
    ],
)
def test_a_status_of_nvlinks_that_fails(
    text: str, rc: int | None, truncated: bool, state: str
) -> None:
    assert nvidia.parse_nvlink(Output(text, rc, truncated)).tool.state == state


@pytest.mark.parametrize("shell_name", ["dash", "busybox ash", "bash --posix"])
def test_the_script_sees_what_runs(shell_name: str, tmp_path: Path) -> None:
    # On a tree of its own: the same text with other roots.
    for path, text in {
        "proc/uptime": "5000.10 1.0\n",
        "proc/10/comm": "nv-fabricmanage\n",
        "proc/10/stat": "10 (nv-fabricmanage) S 1 10 10 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0\n",
        "proc/11/comm": "nvidia-smi\n",
        "proc/11/stat": "11 (nvidia-smi) D 1 10 10 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 499900 0\n",
        # One of an ordinary user's, by a link of that name to a setuid program.
        "proc/9/comm": "nv-fabricmanage\n",
        "proc/9/stat": "9 (nv-fabricmanage) S 1 10 10 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0\n",
        "proc/9/status": "Name:\tnv-fabricmanage\nUid:\t4001\t0\t0\t0\n",
        **{f"proc/{pid}/status": "Name:\tx\nUid:\t0\t0\t0\t0\n" for pid in (10, 11, 12)},
        "proc/12/comm": "nvidia-smi\n",
        "proc/12/stat": "12 (nvidia-smi) S 1 10 10 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0\n",
        "sys/module/nvidia/version": "535.1\n",
        "bin/nvidia-smi": "#!/bin/sh\necho called $*\nexit 3\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)

    def run() -> subprocess.CompletedProcess[str]:
        script = nvidia.SECTION.script(Policy())
        script = script.replace("/proc/", f"{tmp_path}/proc/").replace("/sys/", f"{tmp_path}/sys/")
        text = f"{shell.library('probe')}\nPATH={tmp_path}/bin:$PATH\n{shell.minify(script)}"
        return subprocess.run(
            [*shell_name.split(), "-c", text], capture_output=True, text=True, check=False
        )

    done = run()
    assert done.stdout == "nr_scanned=1\nnr_fabric_manager=10\ncalled -q -x\n"
    assert (done.returncode, done.stderr) == (3, "")
    stat = tmp_path / "proc/11/stat"
    stat.write_text(stat.read_text().replace("499900", "400000"))
    done = run()
    assert done.stdout == "nr_scanned=1\nnr_fabric_manager=10\nnr_stuck=11 1000\n"
    (tmp_path / "sys/module/nvidia/version").unlink()
    (tmp_path / "sys/module/nvidia").rmdir()
    assert run().stdout == "nr_driver=none\n"


@pytest.mark.parametrize("shell_name", ["dash", "busybox ash", "bash --posix"])
def test_the_script_knows_what_a_step_of_slurms_may_not_open(shell_name: str) -> None:
    """A permission that is refused counts, and in a step alone: for root, that is a cgroup's."""
    with tempfile.TemporaryDirectory(prefix="nr-gpus-") as made:
        root = Path(made)
        root.chmod(0o755)
        for path, text in {
            "proc/uptime": "5000.10 1.0\n",
            "proc/self/cgroup": "9:devices:/slurm_n1/uid_0/job_7\n1:name=systemd:/\n",
            "sys/module/nvidia/version": "535.1\n",
            "dev/nvidia0": "",
            "dev/nvidia1": "",
            "dev/nvidiactl": "",
            "bin/nvidia-smi": "#!/bin/sh\necho called $*\n",
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        (root / "bin/nvidia-smi").chmod(0o755)
        script = nvidia.SECTION.script(Policy())
        for name in ("proc", "sys", "dev/nvidia["):
            script = script.replace(f"/{name}", f"{root}/{name}")
        text = f"{shell.library('probe')}\nPATH={root}/bin:$PATH\n{shell.minify(script)}"

        def run() -> str:
            argv = [*shell_name.split(), "-c", text]
            # Root may open what it likes, but for what a cgroup says.
            user = {"user": 65534} if os.geteuid() == 0 else {}
            done = subprocess.run(argv, capture_output=True, text=True, check=False, **user)
            assert done.stderr == ""
            return done.stdout

        assert run().endswith("called -q -x\n")
        for name in ("nvidia1", "nvidiactl"):
            (root / "dev" / name).chmod(0)
        assert run() == "nr_hidden=1\n"
        (root / "proc/self/cgroup").write_text("0::/user.slice\n")
        assert run().endswith("called -q -x\n")


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no recorded samples beside the checkout")
def test_recorded_answers_of_real_machines() -> None:
    found = {
        path.name: nvidia.parse(Output(path.read_text(), 0)) for path in SAMPLES.glob("*.xml")
    }
    seen = {name: (one.tool.state, one.driver, len(one.gpus)) for name, one in found.items()}
    # Whoever adds a recording adds a row: one that is not named here is read all the same.
    assert seen == {
        **seen,
        "a100-sxm4-v12.xml": ("ok", "535.54.03", 1),
        "rtx-3080-v13.xml": ("ok", "595.58.03", 1),
        "tesla-t4.xml": ("ok", "515.105.01", 1),
    }
    assert all(state == "ok" and count for state, _, count in seen.values())
    (a100,) = found["a100-sxm4-v12.xml"].gpus
    assert (a100.mig, a100.ecc, a100.temperature_slowdown_c, a100.recovery) == (
        "on", "on", 89, "none",
    )  # fmt: skip
    (t4,) = found["tesla-t4.xml"].gpus
    assert (t4.virtual, t4.pcie_width, t4.pcie_width_max) == (True, 8, 16)
    (rtx,) = found["rtx-3080-v13.xml"].gpus
    assert (rtx.ecc, rtx.temperature_slowdown_c, rtx.performance_state) == (None, 95, "P2")
    links = nvidia.parse_nvlink(Output((SAMPLES / "nvlink-status-a100.txt").read_text(), 0)).links
    assert {len(one) for one in links.values()} == {12}
    assert len(links) == 8
