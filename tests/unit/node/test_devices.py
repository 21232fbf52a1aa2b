"""GPUs, ports and the kernel's log as a job's witnesses: recorded answers, broken ones, none."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import processes
from nodeready.agent.witnesses import gpus as gpu_witness
from nodeready.agent.witnesses import kernel_log, ports
from nodeready.agent.witnesses.gpus import WitnessedGpu, WitnessedGpus
from nodeready.agent.witnesses.kernel_log import KernelLog, message_of
from nodeready.agent.witnesses.ports import WitnessedPort, counters, network
from nodeready.lab import amd as lab_amd
from nodeready.lab import nvidia as lab_nvidia
from tests.cases import cases, read_table, with_table
from tests.helpers import executable


def write(root: Path, files: Mapping[str, str | None]) -> None:
    """None: a directory in the place of the file. A driver that refuses fails as that does."""
    for path, text in ((root / name, text) for name, text in files.items()):
        (path if text is None else path.parent).mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Name of a tool -> the shell text that stands in for it; no other tool is there."""
    paths: dict[str, str] = {}

    def add(name: str, text: str) -> None:
        paths[name] = executable(tmp_path / name, text)

    monkeypatch.setattr(kernel_log, "tool_path", lambda name: paths.get(name, ""))
    monkeypatch.setattr(gpu_witness, "_is_loaded", lambda name: name == "nvidia")
    monkeypatch.setattr(kernel_log, "uptime_s", lambda: 1000.0)
    return add


#: Where a port is, its files, and what it is where nothing moves.
PORTS = {
    kind: (place, files, WitnessedPort(*port))
    for kind, (place, files, port) in read_table(__file__, "PORTS").items()
}
#: Interfaces that are no port of the node's.
OTHERS = read_table(__file__, "OTHERS")


def below(place: str, files: Mapping[str, str | None]) -> dict[str, str | None]:
    return {f"{place}/{name}": text for name, text in files.items()}


def moved(root: Path, then: Mapping[str, str | None]) -> tuple[WitnessedPort, ...]:
    before = counters(str(root))
    assert json.loads(json.dumps(before)) == before
    write(root, then)
    result = network(before, counters(str(root)), 2.0)
    assert result.seconds == 2.0
    return result.ports


@pytest.mark.parametrize("case", cases(__file__, "cases/ports.json"))
def test_a_port_between_two_looks(tmp_path, case):
    place, files, port = PORTS[case["at"]]
    write(tmp_path, {**OTHERS, **below(place, {**files, **case.get("first", {})})})
    expected = dict(case.get("port", {}))
    if expected.get("state") == "UNREADABLE":
        expected["state"] = ports.UNREADABLE
    expected["errors"] = tuple(map(tuple, expected.get("errors", ())))
    rows = [row for row in moved(tmp_path, below(place, case["then"])) if row.name == port.name]
    assert rows == [replace(port, **expected)]


def test_of_interfaces_the_physical_ones_that_are_up(tmp_path):
    place, files, port = PORTS["eth"]
    write(tmp_path, {**OTHERS, **below(place, files)})
    write(tmp_path, below("net/eth1", {**files, "operstate": "down\n"}))
    assert moved(tmp_path, {}) == (port,)
    before = counters(str(tmp_path))
    before["ports"]["eth9"] = before["ports"]["eth0"]
    gone = network(before, counters(str(tmp_path)), 1.0).ports[-1]
    assert gone == WitnessedPort("eth9", "ethernet", "gone", 0, 0)
    # In a container what is up.
    shutil.rmtree(tmp_path / "net/eth0/device")
    shutil.rmtree(tmp_path / "net/eth1")
    assert sorted(port.name for port in moved(tmp_path, {})) == ["docker0", "eth0"]


def test_a_node_without_counters_or_with_such_that_hang(tmp_path, monkeypatch):
    empty = counters(str(tmp_path))
    assert network(empty, empty, 1.0).absent == "no network port is up"
    assert network({"absent": "why"}, {}, 1.0).absent == "why"
    assert network({}, {}, 1.0).absent
    write(tmp_path, {"net/eth0/operstate": "up\n"})
    os.mkfifo(tmp_path / "net/eth0/type")
    monkeypatch.setattr(ports, "_COUNTERS_S", 0.2)
    assert "hangs" in counters(str(tmp_path))["absent"]


@pytest.mark.parametrize("case", cases(__file__, "cases/kernel_messages.json"))
def test_lines_of_the_kernels_that_a_job_dies_or_hangs_of(case):
    """The name of a case is the kind of its lines; a line has the pid that it names, or 0."""
    for line, pid in case["lines"].items():
        message = message_of(line, 61.9)
        expected = (case["name"], pid, 61, line) if pid is not None else None
        fields = message and (message.kind, message.pid, message.ago_s, message.text)
        assert fields == expected, line


def prints(*lines: str) -> str:
    return "\n".join(["cat <<'END'", *lines, "END"])


def log(*rows: tuple[float, str]) -> str:
    return prints(*(f"[{stamp:12.6f}] {words}" for stamp, words in rows))


def read(since_s: float = 1e9, limit_s: float = 5.0) -> KernelLog:
    with ProcessSupervisor("nodeready:test", 30) as supervisor:
        return kernel_log.witness_log(supervisor, since_s, limit_s)


OOM = "Out of memory: Killed process 4711 (python) total-vm:1kB"


@pytest.mark.parametrize("case", cases(__file__, "cases/kernel_logs.json"))
def test_messages_of_the_kernels_log(tools, case):
    """A message: its kind, its pid, its age; the machine has run for 1000 s."""
    for name in ("dmesg", "journalctl"):
        if name in case:
            tools(name, prints(*case[name]))
    if "script" in case:
        tools("dmesg", case["script"])
    kernel = read(case.get("since_s", 1e9), case.get("limit_s", 5.0))
    messages = [[message.kind, message.pid, message.ago_s] for message in kernel.messages]
    assert messages == case.get("messages", [])
    assert case.get("absent", "") in kernel.absent


def test_a_flood_of_one_line_hides_no_other(tools):
    flood = [(20.0 + n / 10, f"nfs: server nas{n} not responding") for n in range(500)]
    tools("dmesg", log((0.0, "Linux"), (10.0, OOM), *flood))
    messages = read().messages
    assert [message.kind for message in messages] == ["oom"] + ["filesystem"] * 5
    assert messages[-1].text.startswith("nfs: server nas499 ")
    many = [(30.0 + n, f"nfs: server {'n' * (n + 1)} not responding") for n in range(200)]
    tools("dmesg", log((0.0, "Linux"), (10.0, OOM), *many))
    assert len(read().messages) == 50


def gpus(*pids: int, since_s: float = 1e9, limit_s: float = 5.0) -> WitnessedGpus:
    with ProcessSupervisor("nodeready:test", 30) as supervisor:
        return gpu_witness.witness_gpus(supervisor, pids, since_s, limit_s)


def spinning(changes: Mapping[str, Any] | None = None) -> str:
    """Two GPUs: the first spins in a collective."""
    text = lab_nvidia.query(
        [{"address": "0000:1b:00.0", **(changes or {})}, {"address": "0000:43:00.0"}]
    )
    busy = (
        "<utilization><gpu_util>96 %</gpu_util><memory_util>0 %</memory_util></utilization>"
        "<processes><process_info><pid>4711</pid><type>C</type><process_name>python"
        "</process_name><used_memory>9 MiB</used_memory></process_info><process_info><pid>9</pid>"
        "<type>G</type><process_name>X</process_name><used_memory>1 MiB</used_memory>"
        "</process_info></processes>"
    )
    first, end, rest = text.partition("</gpu>")
    head, _, tail = first.partition("<processes>")
    return prints(head + busy + tail.partition("</processes>")[2] + end + rest)


def test_gpus_with_the_xids_since_the_job_began(tools):
    tools("nvidia-smi", spinning())
    assert len(gpus().devices) == 2  # Without the kernel's log, too.
    rows = (
        (0.0, "Linux"),
        (10.0, "NVRM: Xid (PCI:0000:1b:00): 48, pid=1, old"),
        (900.0, "NVRM: Xid (PCI:0000:43:00): 79, pid=4711, name=python, off the bus"),
        (901.0, "NVRM: Xid (PCI:0000:43:00): 154, GPU recovery action changed"),
        (902.0, "NVRM: Xid (PCI:0000:43:00): 154, GPU recovery action changed"),
    )
    tools("dmesg", log(*rows))
    first, second = gpus(4711, since_s=500.0).devices
    known = ("NVIDIA H100 80GB HBM3", "0000:1b:00.0", 96, 0, 69, 700)
    assert first == WitnessedGpu(0, *known, xids=(), pids=(4711,))
    assert (second.sm_percent, second.pids, second.xids) == (None, (), (79, 154))


def test_a_gpu_that_the_hardware_slows_down(tools, monkeypatch):
    tools("nvidia-smi", spinning({"throttle": ("hw_slowdown", "hw_thermal_slowdown")}))
    first, second = gpus().devices
    assert (first.throttle, second.throttle) == (("hw_slowdown", "hw_thermal_slowdown"), ())
    monkeypatch.setattr(gpu_witness, "_is_loaded", lambda name: name == "amdgpu")
    hot = {"throttle": {"socket_thermal_violation_status": "ACTIVE"}}
    slow = {"perf_level": "AMDSMI_DEV_PERF_LEVEL_LOW"}
    tools("amd-smi", lab_amd.stand_in(lab_amd.outputs({1: {"metric": hot}, 2: {"metric": slow}})))
    throttles = [gpu.throttle for gpu in gpus().devices[:3]]
    assert throttles == [(), ("hw_thermal_slowdown",), ("performance level low",)]


@with_table("script, words")
def test_a_tool_that_fails(tools, script, words):
    if script:
        tools("nvidia-smi", script)
    absent = gpus(limit_s=0.7 if script == "exec sleep 60" else 5.0).absent
    assert words in absent
    assert "\n" not in absent


def test_where_an_earlier_tool_hangs_or_no_driver_is_loaded_none_is_started(
    tools, tmp_path, monkeypatch
):
    tools("nvidia-smi", f"touch {tmp_path}/started")
    monkeypatch.setattr(gpu_witness, "_hung_process", lambda words, until: 815)
    assert "nvidia-smi (pid 815) hangs in the kernel" in gpus().absent
    monkeypatch.setattr(gpu_witness, "_is_loaded", lambda name: False)
    assert gpus().absent == "no driver of a GPU is loaded"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("state", "started_s", "owner", "stuck"),
    [("D", 10.0, 0, 815), ("S", 10.0, 0, 0), ("D", 990.0, 0, 0), ("D", 10.0, 12345, 0)],
)
def test_which_process_is_a_stuck_tool(monkeypatch, state, started_s, owner, stuck):
    process = processes.Stat(815, "nvidia-smi", state, 1, False, 0.0, 1, started_s)
    monkeypatch.setattr(kernel_log, "uptime_s", lambda: 1000.0)
    monkeypatch.setattr(processes, "pids", lambda: [815])
    monkeypatch.setattr(processes, "stat", lambda text: process)
    monkeypatch.setattr(processes, "owners", lambda pids: dict.fromkeys(pids, owner))
    monkeypatch.setattr(
        processes, "probe_each", lambda look, pids, until: dict.fromkeys(pids, "nvidia-smi ")
    )
    assert gpu_witness._hung_process(re.compile("nvidia-smi"), 1e18) == stuck


def test_the_tools_of_amd(tools, monkeypatch):
    monkeypatch.setattr(gpu_witness, "_is_loaded", lambda name: name == "amdgpu")
    card = {
        "Device ID": "0x738c", "Card series": "Arcturus GL-XL [Instinct MI100]",
        "PCI Bus": "0000:83:00.0", "GPU use (%)": "99",
        "Average Graphics Package Power (W)": "36.0", "Max Graphics Package Power (W)": "290.0",
    }  # fmt: skip
    tools("rocm-smi", prints(json.dumps({"card0": card}, indent=1)))
    (gpu,) = gpus().devices
    assert (gpu.bus_id, gpu.sm_percent, gpu.power_w, gpu.limit_w) == ("0000:83:00.0", 99, 36, 290)
    assert gpu.name == "Arcturus GL-XL [Instinct MI100]"
    busy = {"usage": {"gfx_activity": {"value": 98, "unit": "%"}}}
    tools("amd-smi", lab_amd.stand_in(lab_amd.outputs({1: {"metric": busy}})))
    rows = gpus().devices
    assert len(rows) == 8
    assert (rows[1].sm_percent, rows[1].power_w, rows[1].limit_w) == (98, 138, 750)
    assert rows[0].bus_id.endswith(":00.0")
    assert rows[0].sm_percent == 0
