"""Lines of the kernel's log, and the verdict that an expert gives; chosen by the node's own awk.

Every line of a table has a device of its own, and all of them stand in one log.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.gpus.gpu import Gpu, Gpus, PciGpu, Tool
from nodeready.subjects.gpus.health import kernel_faults
from tests import paths

POLICY = Policy()
BOOT = "[    0.000000] Linux version 6.8\n"
DATA = Path(__file__).parent / "data" / "gpus"


def rows(name: str) -> tuple[tuple[str, str, str], ...]:
    """The table's rows: verdict, source, lines."""
    text = (DATA / name).read_text(encoding="utf-8")
    found = (line.split(" | ", 2) for line in text.splitlines() if not line.startswith("#"))
    return tuple((one[0], one[1], one[2].replace("\\n", "\n")) for one in found)


LINES = rows("kernel_lines.txt")
#: Lines that name no GPU, each in a log of its own.
UNNAMED = rows("kernel_lines_unnamed.txt")


def device(index: int) -> str:
    return f"{index >> 8:04x}:{index & 255:02x}:00"


def read(log: str, tmp_path: Path, awk: str = "awk", journal: bool = False) -> Output:
    """What the section's own script makes of this log."""
    (tmp_path / "log").write_text(log)
    programs = {
        "dmesg": "exit 1" if journal else f"cat {tmp_path}/log",
        "journalctl": f"cat {tmp_path}/log" if journal else "exit 1",
    }
    if awk != "awk":
        programs["awk"] = 'exec /bin/busybox awk "$@"'
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", shell.minify(kernel_log.SECTION.script(POLICY))],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "NR": "a1b2", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return Output(done.stdout, done.returncode, nonce="a1b2")


def node(output: Output, addresses: list[str], **gpu: object) -> Gpus:
    faults, log = kernel_log.parse(output)
    pci = tuple(PciGpu(a, "amd", "74a1", "amdgpu", pci_class="120000") for a in addresses)
    return Gpus(
        pci=pci,
        amd=tuple(Gpu(n, "amd", a, **gpu) for n, a in enumerate(addresses)),
        amd_tool=Tool("amd-smi", "ok"),
        kernel_faults=kernel_log.of_gpus(faults, addresses),
        kernel_log=log,
    )


def verdict(seen: Gpus, address: str) -> str:
    """The verdict for what the log says of this device alone."""
    alone = tuple(f for f in seen.kernel_faults if f.pci_address == address)
    only = Gpus(
        pci=seen.pci,
        amd=seen.amd,
        amd_tool=seen.amd_tool,
        kernel_faults=alone,
        kernel_log=seen.kernel_log,
    )
    return kernel_faults(only, POLICY).status


def log_of_all() -> str:
    lines, at = [BOOT], 10.0
    for index, (_, _, text) in enumerate(LINES):
        for line in text.replace("DEVICE", device(index)).split("\n"):
            at += 0.5
            lines.append(f"[ {at:11.6f}] {line}\n")
    return "".join(lines)


@pytest.fixture(scope="module", params=["awk", "busybox awk"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    """The node in whose log the lines of the table stand."""
    if request.param != "awk" and not Path("/bin/busybox").exists():
        pytest.skip("no busybox here")
    output = read(log_of_all(), tmp_path_factory.mktemp("log"), request.param)
    return node(output, [f"{device(index)}.0" for index in range(len(LINES))])


@pytest.mark.parametrize("index", range(len(LINES)))
def test_a_line_gets_the_verdict_of_its_source(seen: Gpus, index: int) -> None:
    wanted, source, text = LINES[index]
    assert verdict(seen, f"{device(index)}.0") == wanted, f"{text} ({source})"


def test_no_line_of_the_table_counts_for_another_device(seen: Gpus) -> None:
    assert {fault.pci_address for fault in seen.kernel_faults} <= {gpu.address for gpu in seen.pci}


@pytest.mark.parametrize(("wanted", "source", "text"), UNNAMED)
def test_a_line_without_a_device_gets_its_verdict(
    tmp_path: Path, wanted: str, source: str, text: str
) -> None:
    seen = node(read(f"{BOOT}[   99.000001] {text}\n", tmp_path), ["0000:05:00.0"])
    assert kernel_faults(seen, POLICY).status == wanted, source


def test_a_port_tells_the_error_of_the_device_behind_it(tmp_path: Path) -> None:
    line = "pcieport 0000:3a:00.0: DPC: containment event, status:0x1f07 source:0x3b00"
    seen = node(read(f"{BOOT}[   99.000001] {line}\n", tmp_path), ["0000:3b:00.0"])
    result = kernel_faults(seen, POLICY)
    assert (result.status, "gpu 0 (0000:3b:00.0)" in result.actual) == ("fail", True)


def test_the_fix_is_that_of_the_fault(tmp_path: Path) -> None:
    for line, words in (
        ("NVRM: API mismatch: the client has the version 570.133.20, but", "load the driver's"),
        (
            "amdgpu 0000:05:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), x",
            "amd-smi reset",
        ),
        (
            "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
            "reboot",
        ),
        ("amdgpu 0000:05:00.0: amdgpu: RAS records:300 exceed threshold:256", "open a case"),
    ):
        seen = node(read(f"{BOOT}[   99.000001] {line}\n", tmp_path), ["0000:05:00.0"])
        assert words in kernel_faults(seen, POLICY).fix


FALLEN = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


@pytest.mark.parametrize("awk", ["awk", "busybox awk"])
def test_a_sentence_of_three_lines_names_its_device(tmp_path: Path, awk: str) -> None:
    """In the journal, the lines of one record are indented behind its first."""
    pad = "\n" + " " * 28
    record = f"[   99.000001] gpu1 kernel: {pad.join(FALLEN)}\n"
    boot = BOOT.replace("] ", "] gpu1 kernel: ")
    faults, _ = kernel_log.parse(read(boot + record, tmp_path, awk, journal=True))
    assert [(f.pci_address, f.action) for f in faults] == [("0000:b3:00.0", "REBOOT")]
    # Behind another's line, the same words are a user's.
    forged = record.replace("kernel: ", f"kernel: process '/x{pad}", 1)
    assert kernel_log.parse(read(boot + forged, tmp_path, awk, journal=True))[0] == ()


#: NVIDIA's Xid catalog: verdict -> codes, without a later word of the driver.
XIDS = {
    "ok": "8,11,13-14,25,31-32,39-41,43,45,60,68-72,75-77,80,82-86,88-89,96-108,126-135,137,139",
    "warn": "37-38,44,61,63,66-67,78,92-94,121,123,141-142,144-150,152-153,157,159-170,999",
    "fail": "46,48,54,62,64,74,79,95,109-110,119-120,136,140,143,151,155-156,158,171-172",
}
#: Those whose fault is over when the driver asks for nothing (column "Xid 154 linkage").
LINKED = {48, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 171, 172}


def codes(text: str) -> list[int]:
    """The numbers in ``8,11-14``."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [code for pair in ends for code in range(pair[0], pair[-1] + 1)]


CODES = [(code, wanted) for wanted, text in XIDS.items() for code in codes(text)]


def after(code: int, recovery: str | None, named: bool, driver: str | None = "575.57.08") -> str:
    """The verdict on a node whose log has this Xid."""
    fault = kernel_log.KernelFault(
        "xid", code, "0000:5e:00.0", "", kernel_log.action_of(code, "text")
    )
    seen = Gpus(
        pci=(PciGpu("0000:5e:00.0", "nvidia", "2330", "nvidia", pci_class="030200"),),
        nvidia=(Gpu(3, "nvidia", "0000:5e:00.0", recovery=recovery, recovery_named=named),),
        nvidia_tool=Tool("nvidia-smi", "ok"),
        driver=driver,
        kernel_faults=(fault,),
        kernel_log=Tool("kernel log", "ok", "dmesg"),
    )
    return kernel_faults(seen, POLICY).status


@pytest.mark.parametrize(("code", "wanted"), CODES)
def test_every_code_of_the_catalog(code: int, wanted: str) -> None:
    assert after(code, None, False) == wanted
    # Schema v12: `reset_required` says No.
    assert after(code, "none", False) == wanted
    # Schema v13: the driver names its action.
    answered = "warn" if code in LINKED else wanted
    assert after(code, "none", True) == answered


def test_the_table_has_every_known_code() -> None:
    assert {code for code, _ in CODES} >= set(kernel_log.XIDS) - {154}
    assert len(CODES) == len({code for code, _ in CODES}) > 100


@pytest.mark.parametrize(
    ("code", "driver", "wanted"),
    [
        (109, "565.57.01", "fail"),
        (109, "570.86.15", "warn"),
        (143, "570.86.15", "fail"),
        (143, "575.51.03", "warn"),
        (95, "550.54.15", "fail"),
        (95, "", "warn"),
    ],
)
def test_a_driver_answers_only_for_the_codes_that_it_links(
    code: int, driver: str, wanted: str
) -> None:
    assert after(code, "none", True, driver) == wanted


NAMES = st.text(st.characters(codec="ascii", exclude_characters="\n\0"), max_size=15)


@settings(max_examples=200, deadline=None)
@given(NAMES, st.sampled_from(("Fatal", "Nonfatal")))
def test_no_name_of_a_process_changes_the_severity(name: str, severity: str) -> None:
    text = (
        f"NVRM: Xid (PCI:0000:5e:00): 145, pid=7, name={name}, RLW_REMAP {severity} XC1 i0 Link 02"
        " (0x00000082 0x00000001)"
    )
    wanted = {"Fatal": "RESET", "Nonfatal": "MONITOR"}[severity]
    assert kernel_log.action_of(145, text) == wanted
    assert re.search(kernel_log._FATAL, text) is None or severity == "Fatal"


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_no_name_of_a_process_takes_the_drivers_demand_back(name: str) -> None:
    text = (
        f"NVRM: Xid (PCI:0000:5e:00): 154, pid=7, name={name}, GPU recovery action changed from"
        " 0x0 (None) to 0x2 (Node Reboot Required)"
    )
    assert kernel_log.action_of(154, text) == "REBOOT"


def test_the_lines_of_amds_own_scraper(tmp_path: Path) -> None:
    """Recorded with another format of the time."""
    sample = paths.SAMPLES / "kmsg" / "dmesg-amd-node-scraper.txt"
    text = (
        sample.read_text()
        if sample.exists()
        else (
            "kern  :info  : 2026-01-07T10:00:00,123456-06:00 Linux version 5.15.0\n"
            "kern  :err   : 2026-01-07T10:02:00,123456-06:00 amdgpu 0000:01:00.0: {14}poison is"
            " consumed by client 12, kick off gpu reset flow\n"
            "kern  :err   : 2026-01-07T10:02:01,345678-06:00 amdgpu 0000:02:00.0: amdgpu: Saved"
            " bad pages 150 reaches threshold value 128\n"
        )
    )
    faults, tool = kernel_log.parse(read(text, tmp_path))
    assert tool.works
    worst = {fault.pci_address: fault.action for fault in faults if fault.action != "MONITOR"}
    assert worst == {"0000:01:00.0": "RESET", "0000:02:00.0": "ISOLATE"}
