"""Lines of the kernel's log, chosen by the node's own awk, and the verdict of an expert."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.subjects.gpus import kernel_log, xids
from nodeready.subjects.gpus.checks import kernel_faults
from nodeready.subjects.gpus.gpu import Gpu, Gpus, KernelFault, PciGpu, Tool
from tests.builders.sections import NONCE, run_on
from tests.builders.verdicts import assert_says
from tests.cases import cases, read_table

POLICY = Policy()
BOOT = "[    0.000000] Linux version 6.8\n"
DATA = Path(__file__).parent / "data" / "gpus"
Scan = Callable[..., Output]


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    """Run the section's own script; dmesg and journalctl print what the test says."""
    return scanner(tmp_path)


def scanner(root: Path, awk: str = "") -> Scan:
    """awk: the program in its place; tests/lab/test_units_busybox.py asks the same of busybox."""

    def run(
        dmesg: str = "", status: int = 0, journal: str | None = None, driver: str = "nvidia"
    ) -> Output:
        files = {"log": dmesg, "journal": journal or "", f"sys/module/{driver}/refcnt": "1\n"}
        files["bin/dmesg"] = f"#!/bin/sh\ncat {root}/log\nexit {status}\n"
        files["bin/journalctl"] = f"#!/bin/sh\ncat {root}/journal\n"
        if journal is None:
            files["bin/journalctl"] = "#!/bin/sh\nexit 1\n"
        if awk:
            files["bin/awk"] = f'#!/bin/sh\nexec {awk} "$@"\n'
        done = run_on(root, kernel_log.SECTION.script(POLICY), ["sh"], files)
        return Output(done.stdout, done.returncode, nonce=NONCE)

    return run


def at_99_s(*lines: str) -> str:
    return BOOT + "".join(f"[   99.000001] {line}\n" for line in lines)


def rows(name: str) -> tuple[tuple[str, str, str], ...]:
    text = (DATA / name).read_text(encoding="utf-8")
    cells = (line.split(" | ", 2) for line in text.splitlines() if not line.startswith("#"))
    return tuple((row[0], row[1], row[2].replace("\\n", "\n")) for row in cells)


LINES = rows("kernel_lines.txt")
#: Lines that name no GPU, each in a log of its own.
UNNAMED = rows("kernel_lines_unnamed.txt")


def device(index: int) -> str:
    return f"{index >> 8:04x}:{index & 255:02x}:00"


def node(output: Output, addresses: list[str]) -> Gpus:
    """A node with GPUs of both vendors: no line is of a driver without a GPU."""
    faults, log = kernel_log.parse(output)
    pci = tuple(PciGpu(a, "amd", "74a1", "amdgpu", pci_class="120000") for a in addresses)
    return Gpus(
        pci=pci,
        amd=tuple(Gpu(n, "amd", a) for n, a in enumerate(addresses)),
        amd_tool=Tool("amd-smi", "ok"),
        nvidia=(Gpu(0, "nvidia", "ffff:ff:00.0"),),
        kernel_faults=kernel_log.faults_of_gpus(faults, addresses),
        kernel_log=log,
    )


def log_of_all() -> str:
    lines, at = [BOOT], 10.0
    for index, (_, _, text) in enumerate(LINES):
        for line in text.replace("DEVICE", device(index)).split("\n"):
            at += 0.5
            lines.append(f"[ {at:11.6f}] {line}\n")
    return "".join(lines)


def test_each_line_gets_the_verdict_of_its_source(scan):
    addresses = [f"{device(index)}.0" for index in range(len(LINES))]
    observed = node(scan(log_of_all()), addresses)
    wrong = []
    for address, (wanted, source, text) in zip(addresses, LINES, strict=True):
        alone = tuple(fault for fault in observed.kernel_faults if fault.pci_address == address)
        status = kernel_faults(replace(observed, kernel_faults=alone), POLICY).status
        if status != wanted:
            wrong.append(f"{status}, not {wanted}: {text} ({source})")
    assert wrong == []
    # No line counts for another device.
    assert {fault.pci_address for fault in observed.kernel_faults} <= {*addresses}


def test_each_line_without_a_device_gets_its_verdict(scan):
    for wanted, source, text in UNNAMED:
        observed = node(scan(at_99_s(text)), ["0000:05:00.0"])
        assert kernel_faults(observed, POLICY).status == wanted, f"{text} ({source})"


def test_the_fix_is_that_of_the_fault(scan):
    for line, words, action in read_table(__file__, "fixes"):
        observed = node(scan(at_99_s(line)), ["0000:05:00.0"])
        # The tool need not show the device, nor the line its first function.
        moved = [replace(fault, pci_address="0000:05:00.1") for fault in observed.kernel_faults]
        untold = replace(observed, amd=(), kernel_faults=tuple(moved))
        for one in (observed, untold):
            result = kernel_faults(one, POLICY)
            assert words in result.fix
            # Its first rung, or its whole ladder.
            assert action in (result.actions[0], result.actions)


#: NVIDIA's Xid catalog: verdict -> codes, without a later word of the driver.
XIDS = {
    "ok": "8,11,13-14,25,31-32,39-41,43,45,60,68-72,75-77,80,82-86,88-89,96-108,126-135,137,139",
    "warn": "37-38,44,61,63,66-67,78,92-94,121,123,141-142,144-150,152-153,157,159-170,999",
    "fail": "46,48,54,62,64,74,79,95,109-110,119-120,136,140,143,151,155-156,158,171-172",
}
#: Those whose fault is over when the driver asks for nothing (column "Xid 154 linkage").
LINKED = {48, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 171, 172}


def codes(text: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [code for pair in ends for code in range(pair[0], pair[-1] + 1)]


CODES = [(code, wanted) for wanted, text in XIDS.items() for code in codes(text)]


def after(code: int, recovery: str | None, named: bool, driver: str | None = "575.57.08") -> str:
    fault = KernelFault("xid", code, "0000:5e:00.0", "", xids.action_of(code, "text"))
    gpu = Gpu(3, "nvidia", "0000:5e:00.0", recovery=recovery, recovery_named=named)
    return kernel_faults(replace(gpus(fault), nvidia=(gpu,), driver=driver), POLICY).status


def test_every_code_of_the_catalog():
    for code, wanted in CODES:
        assert after(code, None, False) == wanted, code
        # Schema v12: `reset_required` says No.
        assert after(code, "none", False) == wanted, code
        # Schema v13: the driver names its action.
        answered = "warn" if code in LINKED else wanted
        assert after(code, "none", True) == answered, code
    assert {code for code, _ in CODES} >= set(xids.XIDS) - {154}
    assert len(CODES) == len({code for code, _ in CODES}) > 100


@pytest.mark.parametrize(("code", "driver", "wanted"), read_table(__file__, "linked_codes"))
def test_a_driver_answers_only_for_the_codes_that_it_links(code, driver, wanted):
    assert after(code, "none", True, driver) == wanted


NAMES = st.text(st.characters(codec="ascii", exclude_characters="\n\0"), max_size=15)


@settings(max_examples=60, deadline=None)
@given(NAMES, st.sampled_from(("Fatal", "Nonfatal")))
def test_no_name_of_a_process_changes_the_severity_or_takes_a_demand_back(name, severity):
    pid = f"pid=7, name={name}"
    text = (
        f"NVRM: Xid (PCI:0000:5e:00): 145, {pid}, RLW_REMAP {severity} XC1 i0 Link 02 (0x00 0x1)"
    )
    wanted = {"Fatal": "RESET", "Nonfatal": "MONITOR"}[severity]
    assert xids.action_of(145, text) == wanted
    changed = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    text = f"NVRM: Xid (PCI:0000:5e:00): 154, {pid}, {changed}"
    assert xids.action_of(154, text) == "REBOOT"


def actions(output: Output) -> dict[tuple[str, int | None, str | None], str]:
    """The worst action of each device and code."""
    faults, _ = kernel_log.parse(output)
    worst_last = sorted(faults, key=lambda f: -xids.ACTIONS.index(f.action))
    return {(f.source, f.code, f.pci_address): f.action for f in worst_last}


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/logs.toml"))
def test_what_a_log_tells(scan, case):
    output = scan("", 1, case["log"]) if "journal" in case else scan(case["log"])
    if "verdict" in case:
        assert_says(kernel_faults(node(output, [case["gpu"]]), POLICY), case["verdict"])
        return
    faults = {
        f"{source} {code or '-'} {address} {action}"
        for (source, code, address), action in actions(output).items()
    }
    assert faults == {*case["faults"]}


def test_sources_codes_and_counts(scan):
    xid = "NVRM: Xid (PCI:0000:3b:00): 31, pid={}, name=python3, Ch 00000008, intr 00000000"
    lines = (
        f"[ T1234] {xid.format(4711)}",
        xid.format(4712),
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress PRIV error",
        "NVRM: GPU 0000:5e:00.0: GPU has fallen off the bus.",
        "amdgpu: qcm fence wait loop timeout expired",
        "INFO: task nvidia-smi:4711 blocked for more than 120 seconds.",
        'audit: type=1400 comm="NVRM: Xid (PCI:0000:01:00): 79, amdgpu 0000:01:00.0: GPU hang"',
    )
    output = scan(at_99_s(*lines))
    assert actions(output) == {
        ("xid", 31, "0000:3b:00.0"): "APPLICATION", ("sxid", 28006, "0000:c1:00.0"): "MONITOR",
        ("sxid", 12028, "0000:c1:00.0"): "RESET", ("nvidia", None, "0000:5e:00.0"): "REBOOT",
        ("amdgpu", None, None): "RESET",
    }  # fmt: skip
    faults, tool = kernel_log.parse(output)
    assert tool == Tool("kernel log", "ok", "dmesg")
    assert {fault.count for fault in faults if fault.code == 31} == {2}


def test_a_storm_is_counted_and_hides_nothing(scan):
    line = "[   10.000000] amdgpu 0000:05:00.0: amdgpu: [gfxhub0] no-retry page fault (pasid:{})\n"
    storm = "".join(line.format(number) for number in range(20_000))
    fatal = "[   11.000000] NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n"
    output = scan(BOOT + fatal + storm)
    assert len(output.text) < 2000
    faults, _ = kernel_log.parse(output)
    assert {f.source: f.count for f in faults} == {"amdgpu": 20_000, "xid": 1}


GPU = "0000:05:00.0"
AGAIN = "NVRM: Xid (PCI:0000:05:00): 32, pid=7, name=lmp, Channel ID 00000004"
REFUSED = f"amdgpu {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x27 address=0x7f3a]"
INTEL = (
    "DMAR: [DMA Write NO_PASID] Request device [{}] fault addr 0xffd3c000 [fault reason 0x05] PTE"
)
REPLAYED = f"amdgpu {GPU}: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)"
LATE = f"amdgpu {GPU}: amdgpu: Fence fallback timer expired on ring sdma0"


@pytest.mark.parametrize(
    ("lines", "every_s", "status"),
    [
        ((AGAIN, AGAIN), 60, "ok"),
        ((AGAIN, AGAIN), 3600, "warn"),
        ((LATE,) * 9, 60, "ok"),
        ((LATE,) * 10, 60, "warn"),
        ((LATE,) * 10, 86400, "ok"),
        ((REFUSED,) * 9, 60, "ok"),
        ((REFUSED, "amd_iommu_report_page_fault: 2211 callbacks suppressed"), 60, "warn"),
        ((INTEL.format("05:00.0"),) * 9, 60, "ok"),
        ((INTEL.format("05:00.0"), "dmar_fault: 312 callbacks suppressed"), 60, "warn"),
        ((INTEL.format("06:00.0"), "dmar_fault: 312 callbacks suppressed"), 60, "ok"),
        ((REPLAYED,) * 10, 27, "warn"),
        ((REPLAYED,) * 10, 270, "ok"),
    ],
)
def test_what_one_message_does_not_say_many_do(scan, lines, every_s, status):
    text = "".join(f"[ {99 + at * every_s}.000001] {line}\n" for at, line in enumerate(lines))
    assert kernel_faults(node(scan(BOOT + text), [GPU]), POLICY).status == status


def test_a_driver_without_a_gpu_of_its_vendor_has_no_fault(scan):
    observed = node(scan(at_99_s("NVRM: No NVIDIA GPU found.")), [GPU])
    assert kernel_faults(observed, POLICY).status == "fail"
    assert kernel_faults(replace(observed, nvidia=()), POLICY).status == "ok"


def test_what_the_ring_has_lost_comes_from_the_journal(scan):
    journal = "[    0.000000] node7 kernel: Linux version\n" + (
        "[   10.000000] node7 kernel: NVRM: Xid (PCI:0000:5e:00): 79, pid=1\n"
    )
    late = "[ 9000.000000] bridge: port 2 entered disabled state\n"
    # The journal is for a node with a GPU.
    assert actions(scan(late, journal=journal, driver="nf_tables")) == {}
    assert {code for _, code, _ in actions(scan(late, journal=journal))} == {79}
    _, tool = kernel_log.parse(scan(late))
    assert tool == Tool("kernel log", "ok", "dmesg, which begins 9000 s after the boot")
    words = "none in a log that begins 9000 s after the boot"
    result = kernel_faults(replace(gpus(), kernel_log=tool), POLICY)
    assert (result.status, result.actual) == ("ok", words)
    refused = "dmesg: read kernel buffer failed: Operation not permitted\n"
    assert {code for _, code, _ in actions(scan(refused, 1, journal))} == {79}


@pytest.mark.parametrize("journal", [None, ""])
def test_a_log_that_may_not_be_read_is_not_an_empty_one(scan, journal):
    refused = "dmesg: read kernel buffer failed: Operation not permitted\n"
    faults, tool = kernel_log.parse(scan(refused, 1, journal))
    assert (faults, tool) == ((), Tool("kernel log", "failed", "needs root"))
    _, tool = kernel_log.parse(scan("", 0, journal))
    assert tool.state == "failed"


@pytest.mark.parametrize(("output", "state"), [
    (Output("", None), "timed out"),
    (Output("scan=dmesg\nstatus=0\nlines=9\nfault=1 1 NVRM: Xid", None), "timed out"),
    (Output("x" * 99, None, truncated=True), "nonsense"),
    # Without a GPU the section does not run at all.
    (Output("", 0), "missing"),
    (Output("awk: not found", 127), "nonsense"),
    (Output("scan=dmesg\nstatus=\nlines=\nend=dmesg\n", 0), "failed"),
    (Output("scan=dmesg\nstatus=0\nlines=" + "9" * 5000 + "\nend=dmesg\n", 0), "failed"),
])  # fmt: skip
def test_half_an_answer_is_no_clean_log(output, state):
    faults, tool = kernel_log.parse(output)
    assert (faults, tool.state) == ((), state)


def test_hostile_lines_cost_nothing_else():
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


def test_a_log_that_begins_again_and_again_is_read_once():
    # Looking for the end of each beginning would take minutes.
    text = "scan=journal\n" * 80_000 + "scan=dmesg\nstatus=0\nlines=1\nbegins=0\nend=dmesg\n"
    faults, tool = kernel_log.parse(Output(text, 0))
    assert (faults, tool.state, tool.detail) == ((), "ok", "dmesg")


def gpus(*faults: KernelFault, log: Any = ("ok", "dmesg"), recovery: str | None = None) -> Gpus:
    return Gpus(
        pci=(PciGpu("0000:5e:00.0", "nvidia", "2330", "nvidia", pci_class="030200"),),
        nvidia=(Gpu(3, "nvidia", "0000:5e:00.0", recovery=recovery, recovery_named=True),),
        nvidia_tool=Tool("nvidia-smi", "ok"),
        kernel_faults=faults,
        kernel_log=Tool("kernel log", *log),
    )


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/faults.json"))
def test_the_worst_fault_decides(case):
    """faults: Xid, device and count; verdict: how the actual value begins."""
    faults = [
        KernelFault("xid", code, address, "", xids.lookup(code).action, count)
        for code, address, count in case.get("faults", ())
    ]
    observed = gpus(*faults, log=case.get("log", ("ok",)), recovery=case.get("recovery"))
    if "bare" in case:
        observed = replace(observed, pci=(), nvidia=())
    result = kernel_faults(observed, POLICY)
    status, _, actual = case["verdict"].partition(": ")
    assert result.status == status
    assert result.actual.startswith(actual)
    assert case.get("fix", "") in result.fix
    if status == "fail":
        # The ladder begins with what the gravest fault asks for.
        gravest = min((fault.action for fault in faults), key=xids.ACTIONS.index)
        rungs = {"ISOLATE": "replace", "REBOOT": "reboot", "RESET": "reset_gpu"}
        assert result.actions[0] == rungs[gravest]
    elif status == "warn":
        assert result.actions[0] == "monitor"
    ignored = kernel_faults(observed, Policy(xid_ignore=(63, 119)))
    assert (ignored.status == "ok") == (status == "ok" or actual[:7] in ("Xid 63 ", "Xid 119"))


XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(("stamps", "seconds"), [
    (("[   99.000001]", "[  100.9]"), (99, 100)),
    (("<4>[1234567.000001]", "<4>[12345678.500000]"), (1234567, 12345678)),
    (("[Thu Nov 26 17:00:00 2026]", "[Thu Nov 26 18:00:00 2026]"), (None, None)),
])  # fmt: skip
def test_a_fault_has_the_stamps_of_its_first_and_last_line(scan, stamps, seconds):
    first, last = stamps
    output = scan(f"{BOOT}{first} {XID}\n{last} {XID}\n{last} another line\n")
    ((fault,), _) = kernel_log.parse(output)
    assert (fault.first_s, fault.last_s, fault.count) == (*seconds, 2)


@pytest.mark.parametrize("case", cases(__file__, "data/gpus/forged_lines.json"))
def test_a_process_whose_name_is_a_message_is_no_fault(scan, case):
    assert actions(scan(f"{BOOT}[   99.000001] {case['line']}\n")) == {}
    journal = f"[   99.000001] gpu1 kernel: {case['line']}\n"
    journal = journal.replace("\n[   99.000001] ", "\n" + " " * 28).rstrip(" ")
    assert actions(scan("", 1, f"{BOOT}{journal}")) == {}
