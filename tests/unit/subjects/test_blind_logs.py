"""Kernel logs of strangers' nodes, after public threads: the answers were written before the run.

Each file of data/blind/ is a draw: its ``logs`` by name, each with its source, the node and the
statuses that an expert accepts; ``first_run``: the names that were not right then; ``wrong`` has
those that still are.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeready.core.policy import Policy
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.gpus.checks import kernel_faults
from nodeready.subjects.gpus.gpu import Gpu, Gpus, PciGpu, Tool
from nodeready.subjects.host.checks import kernel_faults as of_host
from nodeready.subjects.nics.checks import kernel_faults as of_nics
from tests.unit.subjects.test_gpus_kernel_log import scanner

DRAWS = [json.loads(path.read_text()) for path in (Path(__file__).parent / "data/blind").iterdir()]
#: Vendor -> the bus numbers of its GPUs, their driver, device and class, and their tool.
NODES = {
    "nvidia": ("53 64 75 86 97 a8 b9 ca", "nvidia", "2330", "030200", "nvidia-smi"),
    "amd": ("05 29 49 65 85 a5 c5 e5", "amdgpu", "74a1", "120000", "amd-smi"),
}


def statuses(log, root):
    (root / "proc").mkdir()
    (root / "proc/uptime").write_text(f"{log['uptime_s']}.00 1.00\n")
    output = scanner(root)("".join(f"{line}\n" for line in log["log"]))
    found = {"gpus.kernel_faults": "na"}
    for subject, check in (("host", of_host), ("nics", of_nics)):
        kept = kernel_log.hardware({kernel_log.SECTION.name: output}, subject)
        found[check.id] = check(SimpleNamespace(kernel_log=kept), Policy()).status
    if vendor := log["gpu"]:
        buses, driver, device, pci_class, tool = NODES[vendor]
        addresses = [f"0000:{bus}:00.0" for bus in buses.split()]
        faults, kept = kernel_log.parse(output)
        observed = Gpus(
            pci=tuple(PciGpu(a, vendor, device, driver, pci_class=pci_class) for a in addresses),
            kernel_faults=kernel_log.faults_of_gpus(faults, addresses),
            kernel_log=kept,
            **{
                vendor: tuple(Gpu(n, vendor, a) for n, a in enumerate(addresses)),
                f"{vendor}_tool": Tool(tool, "ok"),
            },
        )
        found[kernel_faults.id] = kernel_faults(observed, Policy()).status
    return found


@pytest.mark.parametrize(
    ("draw", "name"), [pytest.param(d, name, id=name) for d in DRAWS for name in d["logs"]]
)
def test_a_log_of_a_stranger_is_judged_as_an_expert_does(draw, name, tmp_path):
    log = draw["logs"][name]
    found = statuses(log, tmp_path)
    differences = {c: found[c] for c, right in log["answer"].items() if found[c] not in right}
    assert bool(differences) == (name in draw["wrong"]), (differences, log["note"])
