"""What nvidia-smi prints, in three schemas and in many broken ways, and what is made of it."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.lab import nvidia as nvidia_smi
from nodeready.subjects.gpus import nvidia
from nodeready.subjects.gpus.gpu import GpuProcess
from tests.builders.gpus import h100, node, trees_of
from tests.builders.sections import run_on
from tests.cases import cases, read_table

GOOD = nvidia_smi.query([{"address": "0000:1b:00.0"}, {"address": "0000:43:00.0"}])


def test_every_field_of_an_answer():
    """An A100 that says something in each place; the texts in which recordings differ are rows."""
    tree = trees_of("NVIDIA A100-SXM4-80GB", "535.183.06")[0]
    tree["processes"] = (
        "<process_info><pid>5762</pid><type>C</type><process_name>python</process_name>"
        "<used_memory>1005 MiB</used_memory></process_info>"
    )
    tree["fb_memory_usage"] = {"total": "15360 MiB", "used": "1032 MiB"}
    tree["ecc_mode"]["pending_ecc"] = "Disabled"
    tree["ecc_errors"]["volatile"] |= {"dram_uncorrectable": "7", "dram_correctable": "3"}
    tree["ecc_errors"]["aggregate"]["dram_uncorrectable"] = "8"
    answer = node("NVIDIA A100-SXM4-80GB", "535.183.06", [tree]).smi
    (gpu,) = nvidia.parse(answer).gpus
    fields = {name: value for name, value in vars(gpu).items() if value not in (None, ())}
    assert fields.pop("processes") == (GpuProcess(5762, "python", 1005, "C"),)
    assert fields == {**read_table(__file__, "A100"), "uuid": nvidia_smi.uuid(0)}


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/nvidia_fields.json"))
def test_a_value_is_what_it_says_or_nothing(case):
    assert case["old"] in GOOD or case["old"].startswith("id=")
    gpu = nvidia.parse(Output(GOOD.replace(case["old"], case["new"], 1), 0)).gpus[0]
    assert getattr(gpu, case["field"]) == case["value"]


BOMB = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


# tests/unit/subjects/test_gpus.py asks what a broken tool hides: one that hangs, is cut off, ...
@pytest.mark.parametrize(("text", "state", "detail"), [
    (GOOD[:9000], "nonsense", "no whole XML: "),
    ("nr_scanned=1\nNo devices were found\n", "failed", "No devices were found"),
    (GOOD.replace('id="00000000:1B:00.0"', "").replace("00000000:1B:00.0", "?"),
     "failed", "1 of 2 GPUs without a PCI address"),
    (BOMB + GOOD.replace("NVIDIA H100", "&b;"), "nonsense", "no whole XML: "),
    (GOOD.replace("NVIDIA H100", "&b;"), "nonsense", "no whole XML: "),
    (GOOD.replace("<serial>", "<![CDATA[<serial>"), "nonsense", "no whole XML: "),
    (f"<nvidia_smi_log>{'<gpu>' * 100000}{'</gpu>' * 100000}</nvidia_smi_log>", "failed", ""),
    ("<nvidia_smi_log>" * 60000 + "</nvidia_smi_log>", "nonsense", "no whole XML: "),
    ("\x1b[31m\udcff\x00", "nonsense", "no whole XML: "),
])  # fmt: skip
def test_a_text_that_is_no_whole_answer_is_a_result(text, state, detail):
    answer = nvidia.parse(Output(text, 0))
    assert (answer.tool.state, answer.tool.detail[: len(detail)]) == (state, detail)
    assert len(answer.tool.detail) <= 300
    shown = [gpu.pci_address for gpu in answer.gpus]
    assert shown == (["0000:43:00.0"] if "?" in text.partition("<pci>")[2] else [])


def test_nvlinks_that_are_all_down_or_not_supported():
    down = {(0, link) for link in range(18)}
    text = nvidia_smi.nvlink_status(1, "h100", down)
    for words in (text, text.replace("as all links are inActive", ": Not Supported")):
        answer = nvidia.parse_nvlink(Output(words, 0))
        assert answer.tool.works
        assert answer.links == {nvidia_smi.uuid(0): ()}


@pytest.mark.parametrize(("text", "rc", "truncated", "words"), [
    ("nr_scanned=1\nnr_stuck=77 3600\n", 0, False, "stuck: an earlier"),
    ("nr_hidden=6\n", 0, False, "hidden: 6 GPUs"),
    (nvidia_smi.nvlink_status(8)[:1500], None, False, "timed out: after 20 s"),
    (nvidia_smi.nvlink_status(8)[:1500], None, True, "nonsense: "),
    ("Failed to initialize NVML: Unknown Error\n", 255, False, "failed: Failed to"),
    ("GPU 0: x (UUID: )\n" + " Link 1: 9e99 GB/s\n" * 20000, 0, False, "nonsense: "),
    ("\x1b[2J\udcff", 0, False, "nonsense: "),
])  # fmt: skip
def test_a_status_of_nvlinks_that_fails_is_unknown(text, rc, truncated, words):
    result = h100(links=Output(text, rc, truncated)).judged()["nvlink"]
    assert (result.status, words in result.actual) == ("unknown", True), result.actual


# tests/lab/test_units_busybox.py asks the same of busybox.
in_each_shell = pytest.mark.parametrize("shell", [["sh"], ["bash", "--posix"]], ids=" ".join)


def stat(pid: int, name: str, state: str = "S", start: int = 100) -> str:
    return f"{pid} ({name}) {state} 1 10 10 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0\n"


@in_each_shell
def test_the_script_sees_what_runs(shell, tmp_path):
    files = {
        "proc/uptime": "5000.10 1.0\n",
        "sys/module/nvidia/version": "535.1\n",
        "bin/nvidia-smi": "#!/bin/sh\necho called $*\nexit 3\n",
        "proc/10/stat": stat(10, "nv-fabricmanage"),
        "proc/11/stat": stat(11, "nvidia-smi", "D", 499900),
        "proc/12/stat": stat(12, "nvidia-smi"),
        # An ordinary user's, by a link of that name to a setuid program.
        "proc/9/stat": stat(9, "nv-fabricmanage"),
    }
    for pid, name in ((9, "nv-fabricmanage"), (10, "nv-fabricmanage"), (11, "nvidia-smi")):
        files[f"proc/{pid}/comm"] = f"{name}\n"
        files[f"proc/{pid}/status"] = f"Name:\tx\nUid:\t{4001 if pid == 9 else 0}\t0\t0\t0\n"
    script = nvidia.SECTION.script(Policy())
    done = run_on(tmp_path, script, shell, files)
    assert done.stdout == "nr_scanned=1\nnr_fabric_manager=10\ncalled -q -x\n"
    assert done.returncode == 3
    done = run_on(tmp_path, script, shell, {"proc/11/stat": stat(11, "nvidia-smi", "D", 400000)})
    assert done.stdout == "nr_scanned=1\nnr_fabric_manager=10\nnr_stuck=11 1000\n"
    shutil.rmtree(tmp_path / "sys/module/nvidia")
    assert run_on(tmp_path, script, shell).stdout == "nr_driver=none\n"


@in_each_shell
def test_the_script_knows_what_a_step_of_slurms_may_not_open(shell):
    """A permission that is refused counts, and in a step alone: for root, that is a cgroup's."""
    files = {
        "proc/uptime": "5000.10 1.0\n",
        "proc/self/cgroup": "9:devices:/slurm_n1/uid_0/job_7\n1:name=systemd:/\n",
        "sys/module/nvidia/version": "535.1\n",
        **dict.fromkeys(("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), ""),
        "bin/nvidia-smi": "#!/bin/sh\necho called $*\n",
    }
    # Root may open what it likes, but for what a cgroup says.
    user = {"user": 65534} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="nr-gpus-") as directory:
        root = Path(directory)
        root.chmod(0o755)

        def run(**files: str) -> str:
            return run_on(root, nvidia.SECTION.script(Policy()), shell, files, **user).stdout

        assert run(**files).endswith("called -q -x\n")
        for name in ("nvidia1", "nvidiactl"):
            (root / "dev" / name).chmod(0)
        assert run() == "nr_hidden=1\n"
        assert run(**{"proc/self/cgroup": "0::/user.slice\n"}).endswith("called -q -x\n")
