"""What is made of the kernel's log: on the node by its own awk, and here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.gpus.gpu import Gpu, Gpus, KernelFault, PciGpu, Tool
from nodeready.subjects.gpus.health import kernel_faults
from tests import paths

DATA = Path(__file__).parent / "data" / "gpus"
SAMPLES = paths.SAMPLES / "kmsg"
BOOT = "[    0.000000] Linux version 6.8\n"
POLICY = Policy()


@pytest.fixture(params=["awk", "busybox awk"])
def scan(request: pytest.FixtureRequest, tmp_path: Path):
    """Run the section's own script; dmesg and journalctl print what the test says."""
    if request.param != "awk" and not Path("/bin/busybox").exists():
        pytest.skip("no busybox here")

    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(dmesg: str = "", status: int = 0, journal: str | None = None) -> Output:
        (tmp_path / "log").write_text(dmesg)
        program("dmesg", f"#!/bin/sh\ncat {tmp_path}/log\nexit {status}\n")
        program("journalctl", "#!/bin/sh\nexit 1\n")
        if journal is not None:
            (tmp_path / "journal").write_text(journal)
            program("journalctl", f"#!/bin/sh\ncat {tmp_path}/journal\n")
        if request.param != "awk":
            program("awk", '#!/bin/sh\nexec /bin/busybox awk "$@"\n')
        done = subprocess.run(
            ["sh", "-c", shell.minify(kernel_log.SECTION.script(POLICY))],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "NR": "a1b2", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
        assert done.stderr == ""
        return Output(done.stdout, done.returncode, nonce="a1b2")

    return run


def actions(output: Output) -> dict[tuple[str, int | None, str | None], str]:
    """The worst action of each device and code."""
    faults, _ = kernel_log.parse(output)
    worst_last = sorted(faults, key=lambda f: -kernel_log.ACTIONS.index(f.action))
    return {(f.source, f.code, f.pci_address): f.action for f in worst_last}


def test_each_line_gets_the_action_that_its_text_asks_for(scan) -> None:
    output = scan((DATA / "kmsg_faults.txt").read_text())
    assert actions(output) == {
        ("xid", 79, "0000:5e:00.0"): "REBOOT",
        ("nvidia", None, "0000:5e:00.0"): "REBOOT",
        ("xid", 31, "0000:3b:00.0"): "APPLICATION",
        ("xid", 999, "0000:af:00.0"): "MONITOR",
        ("xid", 149, "0000:d8:00.0"): "MONITOR",
        ("xid", 149, "0000:d9:00.0"): "RESET",
        ("xid", 154, "0000:da:00.0"): "REBOOT",
        ("sxid", 28006, "0000:c1:00.0"): "MONITOR",
        ("sxid", 12028, "0000:c1:00.0"): "RESET",
        ("amdgpu", None, "0000:05:00.0"): "MONITOR",  # its reset succeeded
        ("amdgpu", None, None): "MONITOR",  # before it
        ("amdgpu", None, "0000:c5:00.0"): "MONITOR",  # its ring was reset
        ("amdgpu", None, "0000:29:00.0"): "REBOOT",  # its reset failed
        ("amdgpu", None, "0000:49:00.0"): "RESET",
        ("amdgpu", None, "0000:85:00.0"): "ISOLATE",
        ("amdgpu", None, "0000:a5:00.0"): "APPLICATION",
    }
    faults, tool = kernel_log.parse(output)
    assert tool == Tool("kernel log", "ok", "dmesg")
    assert {f.count for f in faults if f.code == 31} == {2}


def test_a_storm_is_counted_and_hides_nothing(scan) -> None:
    line = "[   10.000000] amdgpu 0000:05:00.0: amdgpu: [gfxhub0] no-retry page fault (pasid:{})\n"
    storm = "".join(line.format(number) for number in range(20_000))
    fatal = "[   11.000000] NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n"
    output = scan(BOOT + fatal + storm)
    assert len(output.text) < 2000
    faults, _ = kernel_log.parse(output)
    assert {f.source: f.count for f in faults} == {"amdgpu": 20_000, "xid": 1}


def test_a_new_load_of_the_driver_ends_what_a_reset_would_have(scan) -> None:
    load = "[  300.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.133.20\n"
    lines = "".join(
        f"[  {at}.000000] NVRM: Xid (PCI:0000:5e:00): {code}, pid=1\n"
        for at, code in ((100, 119), (101, 79), (102, 95))
    )
    after = "[  301.000000] NVRM: Xid (PCI:0000:5e:00): 95, pid=1\n"
    assert {code for _, code, _ in actions(scan(BOOT + lines + load))} == {79}
    assert {code for _, code, _ in actions(scan(BOOT + lines + load + after))} == {79, 95}


def test_what_the_ring_has_lost_comes_from_the_journal(scan) -> None:
    journal = "[    0.000000] node7 kernel: Linux version\n" + (
        "[   10.000000] node7 kernel: NVRM: Xid (PCI:0000:5e:00): 79, pid=1\n"
    )
    late = "[ 9000.000000] bridge: port 2 entered disabled state\n"
    assert {code for _, code, _ in actions(scan(late, journal=journal))} == {79}
    _, tool = kernel_log.parse(scan(late))
    assert tool == Tool("kernel log", "ok", "dmesg, which begins 9000 s after the boot")
    refused = "dmesg: read kernel buffer failed: Operation not permitted\n"
    assert {code for _, code, _ in actions(scan(refused, 1, journal))} == {79}


@pytest.mark.parametrize("journal", [None, ""])
def test_a_log_that_may_not_be_read_is_not_an_empty_one(scan, journal: str | None) -> None:
    refused = "dmesg: read kernel buffer failed: Operation not permitted\n"
    faults, tool = kernel_log.parse(scan(refused, 1, journal))
    assert (faults, tool) == ((), Tool("kernel log", "failed", "needs root"))
    _, tool = kernel_log.parse(scan("", 0, journal))
    assert tool.state == "failed"


@pytest.mark.parametrize(
    ("output", "state"),
    [
        (Output("", None), "timed out"),
        (Output("scan=dmesg\nstatus=0\nlines=9\nfault=1 1 NVRM: Xid", None), "timed out"),
        (Output("x" * 99, None, truncated=True), "nonsense"),
        # Without a GPU the section does not run at all.
        (Output("", 0), "missing"),
        (Output("awk: not found", 127), "nonsense"),
        (Output("scan=dmesg\nstatus=\nlines=\nend=dmesg\n", 0), "failed"),
        (Output("scan=dmesg\nstatus=0\nlines=" + "9" * 5000 + "\nend=dmesg\n", 0), "failed"),
    ],
)
def test_half_an_answer_is_no_clean_log(output: Output, state: str) -> None:
    faults, tool = kernel_log.parse(output)
    assert (faults, tool.state) == ((), state)


def test_hostile_lines_cost_nothing_else() -> None:
    lines = [
        "fault=1 1 NVRM: Xid (" + "(" * 5000,
        "fault=99999999999999999999 1 NVRM: Xid (PCI:0000:5e:00): 79, x",
        "fault=1 1 NVRM: Xid (PCI:[red]\x1b[31m): " + "9" * 5000,
        "recovered=",
        "fault=2 7 NVRM: Xid (PCI:0000:5E:00): 48, \udcff[b]\x1b[2J",
    ]
    body = "\n".join(lines)
    output = Output(f"scan=dmesg\nstatus=0\nlines=9\nbegins=0\n{body}\nend=dmesg\n", 0)
    faults, tool = kernel_log.parse(output)
    assert tool.works
    assert [(f.code, f.pci_address, f.count) for f in faults] == [(48, "0000:5e:00.0", 2)]


def test_a_log_that_begins_again_and_again_is_read_once() -> None:
    # Looking for the end of each beginning would take minutes.
    text = "scan=journal\n" * 80_000 + "scan=dmesg\nstatus=0\nlines=1\nbegins=0\nend=dmesg\n"
    faults, tool = kernel_log.parse(Output(text, 0))
    assert (faults, tool.state, tool.detail) == ((), "ok", "dmesg")


def test_every_recorded_log_is_read(scan) -> None:
    if not SAMPLES.is_dir():
        pytest.skip("no recorded logs here")
    log = (SAMPLES / "dmesg-xid-119.txt").read_text()
    assert actions(scan(log)) == {("xid", 119, "0000:9b:00.0"): "RESET"}


def test_the_table_has_an_action_and_a_source_for_each_code() -> None:
    assert {xid.action for xid in kernel_log.XIDS.values()} == set(kernel_log.ACTIONS)
    assert all(xid.code == code and xid.source for code, xid in kernel_log.XIDS.items())
    assert kernel_log.lookup(77777).action == "MONITOR"


def node(*faults: KernelFault, log: str = "ok", detail: str = "dmesg", recovery: str = "") -> Gpus:
    return Gpus(
        pci=(PciGpu("0000:5e:00.0", "nvidia", "2330", "nvidia", pci_class="030200"),),
        nvidia=(Gpu(3, "nvidia", "0000:5e:00.0", recovery=recovery or None, recovery_named=True),),
        nvidia_tool=Tool("nvidia-smi", "ok"),
        kernel_faults=faults,
        kernel_log=Tool("kernel log", log, detail),
    )


def fault(code: int, address: str = "0000:5e:00.0", count: int = 1) -> KernelFault:
    return KernelFault("xid", code, address, "", kernel_log.lookup(code).action, count)


@pytest.mark.parametrize(
    ("seen", "status", "actual", "fix"),
    [
        (node(), "ok", "none", ""),
        (node(fault(31, count=4)), "ok", "only of applications: Xid 31 GPU memory page fault", ""),
        (node(fault(63)), "warn", "Xid 63 GPU memory remapping event: gpu 3", "open a case"),
        (node(fault(400)), "warn", "unknown Xid 400: gpu 3 (0000:5e:00.0)", "open a case"),
        (node(fault(54)), "fail", "Xid 54 auxiliary power is not connected", "open a case"),
        (
            node(fault(63), fault(119, count=2), fault(79, "0000:9b:00.0")),
            "fail",
            "Xid 79 GPU has fallen off the bus: 0000:9b:00.0, "
            "Xid 119 GSP RPC timeout: gpu 3 (0000:5e:00.0), 2 times",
            "drain and reboot",
        ),
        (node(fault(119)), "fail", "Xid 119", "nvidia-smi --gpu-reset -i 0000:5e:00.0"),
        (node(fault(119), recovery="reset"), "fail", "Xid 119", "nvidia-smi --gpu-reset"),
        (node(fault(119), recovery="none"), "warn", "Xid 119", "open a case"),
        (node(fault(79), recovery="none"), "fail", "Xid 79", "reboot"),
        (node(log="failed", detail="needs root"), "unknown", "kernel log failed: needs root", ""),
        (node(log="timed out", detail=""), "unknown", "kernel log timed out", ""),
        (Gpus(kernel_log=Tool("kernel log", "failed")), "na", "no GPU on the PCI bus", ""),
    ],
)
def test_the_worst_fault_decides(seen: Gpus, status: str, actual: str, fix: str) -> None:
    result = kernel_faults(seen, POLICY)
    assert result.status == status
    assert result.actual.startswith(actual)
    assert fix in result.fix


def test_a_code_that_the_policy_ignores_is_not_reported() -> None:
    seen = node(fault(119), fault(63))
    assert kernel_faults(seen, Policy(xid_ignore=(119,))).status == "warn"
    assert kernel_faults(seen, Policy(xid_ignore=(63, 119))).status == "ok"


FORGED = "0000:3b:00): 79, pid=1, GPU has fallen off the bus."
FAULT = "segfault at 0 ip 000055d0 sp 00007ffd error 4 in"


@pytest.mark.parametrize(
    "line",
    [
        # A program of this name, run from a file of that name, that dies.
        f"NVRM: Xid (PCI:[4711]: {FAULT} {FORGED}[55d0+1000]",
        f"NVRM: x[4711]: {FAULT} GPU is lost[55d0+1000]",
        f"amdgpu: [drm[4711]: {FAULT} device lost from bus[55d0+1000]",
        f"nvidia-nvswitch[4711]: {FAULT} SXid (PCI:0): 1, Fatal[55d0+1000]",
        f"pcieport 0000:3[4711]: {FAULT} Uncorrected (Fatal) from 0000:3b:00.0[55d0+1000]",
        f"nvidia 0000:3b:[4711]: {FAULT} 00.0: Uncorrected (Fatal)[55d0+1000]",
        f"kfd kfd: amdgpu[4711]: {FAULT} GPU hang[55d0+1000]",
        # Behind what looks like the level of a line.
        f"a:b: NVRM: Xid [4711]: {FAULT} {FORGED}[55d0+1000]",
        f"a:b: NVRM: GPU [4711]: {FAULT} GPU is lost[55d0+1000]",
        "amdgpu GPU hang invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0",
        "amdgpu GPU hang: page allocation failure: order:4, mode:0x40cc0",
        # The file's name has a newline: each line of a record has the record's time.
        f"sh[4711]: {FAULT} x\n[   99.000001] NVRM: Xid (PCI:{FORGED}\n[   99.000001] [55d0]",
        # So has what she mounts in a namespace of her own, and a file that she runs.
        f"overlayfs: failed to resolve '/x\n[   99.000001] NVRM: Xid (PCI:{FORGED}': -2",
        f"process '/x\n[   99.000001] NVRM: Xid (PCI:{FORGED}' started with executable stack",
    ],
)
def test_a_process_whose_name_is_a_message_is_no_fault(scan, line: str) -> None:
    assert actions(scan(f"{BOOT}[   99.000001] {line}\n")) == {}
    journal = f"[   99.000001] gpu1 kernel: {line}\n"
    journal = journal.replace("\n[   99.000001] ", "\n" + " " * 28).rstrip(" ")
    assert actions(scan("", 1, f"{BOOT}{journal}")) == {}


def test_a_fault_beside_such_a_process_counts(scan) -> None:
    real = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=x[1]: segfault at , GPU has fallen off"
    log = f"[   99.000001] x[1]: {FAULT} x\n[   99.000002] {real}\n"
    assert actions(scan(BOOT + log)) == {("xid", 79, "0000:3b:00.0"): "REBOOT"}


@pytest.mark.parametrize(
    "first",
    [
        "NVRM: GPU at PCI:0",
        # Of another CPU, in the same moment.
        "pcieport 0000:3a:00.0: AER: Uncorrectable (Fatal) error message received",
        "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0",
    ],
)
def test_a_fault_in_the_same_moment_as_a_devices_line_counts(scan, first: str) -> None:
    log = f"[   99.000001] {first}\n[   99.000001] NVRM: Xid (PCI:{FORGED}\n"
    assert actions(scan(BOOT + log))[("xid", 79, "0000:3b:00.0")] == "REBOOT"
