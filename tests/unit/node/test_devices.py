"""GPUs, ports and the kernel's log as a job's witnesses: recorded answers, broken ones, none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import amd as lab_amd
from nodeready.lab import nvidia as lab_nvidia
from nodeready.lab.hardware import h100, ib_tree
from nodeready.node.runtime import Supervisor
from nodeready.node.witnesses import devices
from nodeready.node.witnesses.devices import Gpus, Kernel, Port, counters, message_of, network


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def tool(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Name of a tool -> the shell text that stands in for it; no other tool is there."""
    found: dict[str, str] = {}

    def add(name: str, text: str) -> None:
        found[name] = tool(tmp_path, name, text)

    monkeypatch.setattr(devices, "_tool", lambda name: found.get(name, ""))
    monkeypatch.setattr(devices, "_driver", lambda name: name == "nvidia")
    return add


# --- Ports.

ETH = {
    "net/eth0/device/": "",
    "net/eth0/type": "1\n",
    "net/eth0/operstate": "up\n",
    "net/eth0/carrier_changes": "2\n",
    "net/eth0/statistics/rx_bytes": "1000\n",
    "net/eth0/statistics/tx_bytes": "5000\n",
    "net/eth0/statistics/rx_errors": "7\n",
    "net/lo/operstate": "unknown\n",
    "net/lo/statistics/rx_bytes": "9\n",
    "net/docker0/operstate": "up\n",
    "net/docker0/statistics/rx_bytes": "9\n",
    "net/docker0/statistics/tx_bytes": "9\n",
}
PORT = "infiniband/mlx5_0/ports/1"
IB = {
    f"{PORT}/link_layer": "InfiniBand\n",
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/counters/port_rcv_data": "100\n",
    f"{PORT}/counters/port_xmit_data": "200\n",
    f"{PORT}/counters/symbol_error": "3\n",
    f"{PORT}/hw_counters/local_ack_timeout_err": "0\n",
}


def moved(root: Path, first: Mapping[str, str], then: Mapping[str, str]) -> dict[str, Port]:
    write(root, first)
    before = counters(str(root))
    write(root, then)
    seen = network(before, counters(str(root)), 2.0)
    assert seen.seconds == 2.0
    return {port.name: port for port in seen.ports}


@pytest.mark.parametrize(
    ("then", "port"),
    [
        ({}, Port("mlx5_0/1", "infiniband", "up", 0, 0)),
        (
            {f"{PORT}/counters/port_rcv_data": "110", f"{PORT}/counters/port_xmit_data": "225"},
            Port("mlx5_0/1", "infiniband", "up", 40, 100),
        ),
        (
            {
                f"{PORT}/counters/symbol_error": "8",
                f"{PORT}/hw_counters/local_ack_timeout_err": "2",
            },
            Port(
                "mlx5_0/1", "infiniband", "up", 0, 0,
                (("symbol_error", 5), ("local_ack_timeout_err", 2)),
            ),
        ),
        # A port that has gone down stays in the list, and says so.
        ({f"{PORT}/state": "1: DOWN\n"}, Port("mlx5_0/1", "infiniband", "down", 0, 0)),
        # What begins again below its first value is unknown, not quiet.
        (
            {f"{PORT}/counters/port_rcv_data": "5"},
            Port("mlx5_0/1", "infiniband", devices.UNREADABLE, 0, 0),
        ),
        ({f"{PORT}/link_layer": "Ethernet\n"}, Port("mlx5_0/1", "roce", "up", 0, 0)),
    ],
)  # fmt: skip
def test_an_rdma_port_between_two_looks(tmp_path, then, port):
    assert moved(tmp_path, IB, then)["mlx5_0/1"] == port


def test_a_counter_of_32_bits_begins_again(tmp_path):
    first = {**IB, f"{PORT}/counters/port_rcv_data": str((1 << 32) - 10)}
    then = {f"{PORT}/counters/port_rcv_data": "15"}
    assert moved(tmp_path, first, then)["mlx5_0/1"].received == 25 * 4


def test_a_counter_that_is_full_tells_nothing(tmp_path):
    first = {**IB, f"{PORT}/counters/port_rcv_data": str(0xFFFFFFFF)}
    assert moved(tmp_path, first, {})["mlx5_0/1"].state == devices.UNREADABLE


def test_a_counter_that_cannot_be_read_costs_itself_alone(tmp_path):
    """Where a driver refuses one with EINVAL, reading raises as it does of a directory."""
    first = {name: text for name, text in IB.items() if not name.endswith("symbol_error")}
    first[f"{PORT}/counters/symbol_error/"] = ""
    then = {
        f"{PORT}/hw_counters/local_ack_timeout_err": "4",
        f"{PORT}/counters/port_rcv_data": "101",
    }
    port = moved(tmp_path, first, then)["mlx5_0/1"]
    assert (port.received, port.errors) == (4, (("local_ack_timeout_err", 4),))


def test_bytes_that_cannot_be_read_are_no_quiet_port(tmp_path):
    first = {name: text for name, text in IB.items() if "port_rcv_data" not in name}
    first[f"{PORT}/counters/port_rcv_data/"] = ""
    assert moved(tmp_path, first, {})["mlx5_0/1"].state == devices.UNREADABLE


def test_a_device_that_counts_bytes_of_its_own(tmp_path):
    """EFA: hw_counters alone, and a link layer that is none."""
    at = "infiniband/efa_0/ports/1"
    names = ("rx_bytes", "tx_bytes", "rdma_read_bytes", "rdma_read_resp_bytes")
    first = {f"{at}/hw_counters/{name}": "10" for name in names}
    first |= {f"{at}/state": "4: ACTIVE\n", f"{at}/link_layer": "Unspecified\n"}
    then = {f"{at}/hw_counters/rdma_read_bytes": "1010", f"{at}/hw_counters/tx_bytes": "20"}
    port = moved(tmp_path, first, then)["efa_0/1"]
    assert (port.state, port.received, port.sent) == ("up", 1000, 10)


def test_of_interfaces_the_physical_ones_that_are_up(tmp_path):
    then = {
        "net/eth0/statistics/rx_bytes": "1500",
        "net/eth0/statistics/rx_errors": "9",
        "net/eth0/carrier_changes": "4",
        "net/eth1/device/": "",
        "net/eth1/operstate": "down\n",
    }
    found = moved(tmp_path, {**ETH, **then, **ETH}, then)
    assert found == {
        "eth0": Port("eth0", "ethernet", "up", 500, 0, (("rx_errors", 2), ("carrier_changes", 2)))
    }


def test_in_a_container_what_is_up(tmp_path):
    files = {name: text for name, text in ETH.items() if not name.startswith("net/eth0/device")}
    assert sorted(moved(tmp_path, files, {})) == ["docker0", "eth0"]


def test_an_interface_that_goes_down_or_away_between_the_looks(tmp_path):
    assert moved(tmp_path, ETH, {"net/eth0/operstate": "down\n"})["eth0"].state == "down"
    before = counters(str(tmp_path))
    before["ports"]["eth9"] = before["ports"]["eth0"]
    assert network(before, counters(str(tmp_path)), 1.0).ports[-1] == Port(
        "eth9", "ethernet", "gone", 0, 0
    )


def test_the_recorded_tree_of_an_h100_node(tmp_path):
    files = {f"infiniband/{name}": text for name, text in ib_tree(h100()).items()}
    files = {name: text for name, text in files.items() if isinstance(text, str)}
    found = moved(tmp_path, files, {})
    assert found["mlx5_0/1"] == Port("mlx5_0/1", "infiniband", "up", 0, 0, gbps=400.0)
    assert {port.kind for port in found.values()} <= {"infiniband", "roce"}


@pytest.mark.parametrize(
    ("rate", "gbps"),
    [("200 Gb/sec (2X NDR)", 200.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("Polling", 0.0), ("", 0.0)],
)
def test_the_rate_of_a_port(tmp_path, rate, gbps):
    assert moved(tmp_path, {**IB, f"{PORT}/rate": rate}, {})["mlx5_0/1"].gbps == gbps


@pytest.mark.parametrize(("speed", "gbps"), [("100000\n", 100.0), ("-1\n", 0.0), ("", 0.0)])
def test_the_rate_of_an_interface(tmp_path, speed, gbps):
    assert moved(tmp_path, {**ETH, "net/eth0/speed": speed}, {})["eth0"].gbps == gbps


def test_no_port_and_no_look_are_absent(tmp_path):
    assert network(counters(str(tmp_path)), counters(str(tmp_path)), 1.0).absent == (
        "no network port is up"
    )
    assert network({"absent": "why"}, {}, 1.0).absent == "why"
    assert network({}, {}, 1.0).absent


def test_counters_that_hang_are_absent(tmp_path, monkeypatch):
    write(tmp_path, {"net/eth0/operstate": "up"})
    os.mkfifo(tmp_path / "net/eth0/type")
    monkeypatch.setattr(devices, "_COUNTERS_S", 0.5)
    assert "hangs" in counters(str(tmp_path))["absent"]


def test_the_counters_can_travel_as_json(tmp_path):
    write(tmp_path, {**ETH, **IB})
    seen = counters(str(tmp_path))
    assert json.loads(json.dumps(seen)) == seen


# --- The kernel's log.


@pytest.mark.parametrize(
    ("kind", "pid", "text"),
    [
        ("oom", 4711, "Out of memory: Killed process 4711 (python3) total-vm:9kB, anon-rss:8kB"),
        ("oom", 4711, "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB"),
        ("oom", 12, "Memory cgroup out of memory: Kill process 12 (a (b)) score 9"),
        ("xid", 998, "NVRM: Xid (PCI:0000:3b:00): 79, pid=998, name=python, off the bus"),
        ("xid", 0, "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE"),
        ("xid", 0, "NVRM: Xid (PCI:0000:0a:00): 31, Ch 00000010"),
        ("xid", 0, "NVRM: GPU at PCI:0000:3b:00: GPU-5 has fallen off the bus."),
        ("xid", 0, "amdgpu 0000:05:00.0: amdgpu: GPU reset(4) failed"),
        ("xid", 0, "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 12028, Fatal, Link 38 egress"),
        ("link", 0, "pcieport 0000:d7:01.0: AER: Uncorrected (Fatal) error: 0000:d8:00.0"),
        ("link", 0, "mlx5_core 0000:5e:00.0 ib0: Link down"),
        ("link", 0, "mlx5_core 0000:9f:00.0: mlx5_fw_fatal: Fatal error 1 detected"),
        ("link", 0, "bnxt_en 0000:01:00.0 eth0: NIC Link is Down"),
        ("link", 0, "ixgbe 0000:01:00.0 eth2: NIC Link is Down"),
        ("link", 0, "igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down"),
        ("link", 0, "bond0: link status definitely down for interface eth1, disabling it"),
        ("link", 0, "NETDEV WATCHDOG: eth0 (ena): transmit queue 3 timed out"),
        ("filesystem", 0, "nfs: server nas7 not responding, still trying"),
        ("filesystem", 0, "nfs: server nas7 not responding, timed out"),
        ("filesystem", 0, "LustreError: 11-0: work-OST0003-osc: ost_read failed: rc = -107"),
        ("filesystem", 0, "Lustre: work-OST0001: Connection to OST1 (at 10.0.0.9@o2ib) was lost"),
        ("filesystem", 0, "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls"),
        ("filesystem", 0, "EXT4-fs (sda1): Remounting filesystem read-only"),
        ("filesystem", 0, "XFS (nvme0n1p1): log I/O error -5"),
        ("filesystem", 0, "I/O error, dev nvme1n1, sector 2048 op 0x0:(READ) flags 0x0"),
        ("filesystem", 0, "blk_update_request: I/O error, dev sda, sector 8"),
        ("filesystem", 0, "nvme nvme0: I/O 12 QID 3 timeout, aborting"),
        ("filesystem", 0, "libceph: osd3 (1)10.0.0.3:6801 socket closed, down"),
        ("filesystem", 0, "ceph: mds0 hung"),
        ("hung", 4711, "INFO: task python:4711 blocked for more than 120 seconds."),
        ("hung", 55, "INFO: task pt_main_thread:55 blocked for more than 241 seconds."),
        ("hung", 7, "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:7]"),
        ("hung", 0, "rcu: INFO: rcu_sched detected stalls on CPUs/tasks:"),
        ("memory", 0, "Memory failure: 0x1234: recovery action for dirty LRU page: Recovered"),
        ("memory", 0, "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0 (channel:0)"),
        ("memory", 0, "{1}[Hardware Error]: event severity: fatal"),
        ("memory", 0, "python3: page allocation failure: order:4, mode:0xcc0"),
        ("segfault", 812, "python3[812]: segfault at 8 ip 00007f in libnccl.so.2[7f]"),
        ("segfault", 9, "traps: python[9] general protection fault ip:7f sp:7f error:0"),
    ],
)  # fmt: skip
def test_lines_that_a_job_dies_or_hangs_of(kind, pid, text):
    message = message_of(text, 61.9)
    assert message is not None, text
    assert (message.kind, message.pid, message.ago_s) == (kind, pid, 61)
    assert message.text == text


@pytest.mark.parametrize(
    "text",
    [
        "EXT4-fs (sda1): mounted filesystem ro with ordered data mode.",
        "bnxt_en 0000:01:00.0 eth0: NIC Link is Up, 25000 Mbps full duplex",
        "nfs: server nas7 OK",
        "mlx5_core 0000:5e:00.0 ib0: Link up",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0",
        "Command line: BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet",
        "python invoked oom-killer: gfp_mask=0x100cca, order=0",
        "amdgpu 0000:05:00.0: amdgpu: GPU reset(4) succeeded!",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54",
        'audit: type=1400 apparmor="DENIED" comm="nfs: server x not responding"',
        # A process may bear such a name; what the kernel says of it begins with it.
        "NVRM: Xid (PCI:: not a line of the driver",
        "x Out of memory: Killed process 1 (a)",
    ],
)
def test_lines_that_tell_nothing_of_a_job(text):
    assert message_of(text, 1.0) is None


def test_the_name_of_a_process_is_no_message_of_the_driver():
    message = message_of("Out of memory: [812]: segfault at 0 ip 00 sp 00 error 4", 1.0)
    assert message is not None
    assert message.kind == "segfault"


def log(*rows: tuple[float, str]) -> str:
    text = "".join(f"[{at:12.6f}] {words}\n" for at, words in rows)
    return f"#!/bin/sh\ncat <<'END'\n{text}END\n"


def read(since_s: float = 1e9) -> Kernel:
    with Supervisor("nodeready:test", 30) as supervisor:
        return devices.kernel(supervisor, since_s, 5.0)


OOM = "Out of memory: Killed process 4711 (python) total-vm:1kB"


def test_the_log_since_the_job_began(tools, monkeypatch):
    monkeypatch.setattr(devices, "_uptime_s", lambda: 1000.0)
    tools("dmesg", log((0.0, "Linux version 6"), (100.0, OOM), (990.5, OOM.replace("4711", "12"))))
    (one,) = read(600.0).messages
    assert (one.kind, one.pid, one.ago_s) == ("oom", 12, 9)
    assert len(read(950.0).messages) == 2


def test_a_flood_of_one_line_hides_no_other(tools, monkeypatch):
    monkeypatch.setattr(devices, "_uptime_s", lambda: 100000.0)
    flood = [
        (2000.0 + at, f"nfs: server nas{at} not responding, still trying") for at in range(5000)
    ]
    tools("dmesg", log((0.0, "Linux"), (1000.0, OOM), *flood))
    seen = read().messages
    assert [one.kind for one in seen] == ["oom"] + ["filesystem"] * 5
    assert seen[-1].text.startswith("nfs: server nas4999 ")
    many = [(3000.0 + at, f"nfs: server {'n' * (at + 1)} not responding") for at in range(200)]
    tools("dmesg", log((0.0, "Linux"), (1000.0, OOM), *many))
    assert len(read().messages) == 50


def test_a_users_newline_begins_no_line_of_the_kernels(tools, monkeypatch):
    monkeypatch.setattr(devices, "_uptime_s", lambda: 100.0)
    rows = (
        (0.0, "Linux"),
        (50.0, "overlayfs: upper fs does not support /home/ada/x"),
        (50.0, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
        (51.0, "NVRM: Xid (PCI:0000:3c:00): 79, GPU has fallen off the bus."),
        (51.0, "NVRM: Xid (PCI:0000:3d:00): 79, GPU has fallen off the bus."),
    )
    tools("dmesg", log(*rows))
    assert [one.text[20:25] for one in read().messages] == ["3c:00", "3d:00"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1",
            "permitted",
        ),
        ("exit 0", "dmesg shows nothing"),
        ("echo rubbish", "dmesg shows nothing"),
        ("sleep 60", "dmesg shows nothing"),
        ("while :; do echo rubbish; done", "dmesg shows nothing"),
    ],
)
def test_a_log_that_cannot_be_read(tools, text, words):
    tools("dmesg", f"#!/bin/sh\n{text}\n")
    with Supervisor("nodeready:test", 30) as supervisor:
        seen = devices.kernel(supervisor, 100.0, 1.0)
    assert words in seen.absent
    assert seen.messages == ()


def test_without_dmesg_the_log_is_absent(tools):
    assert "there is no dmesg" in read().absent


def test_what_the_ring_has_forgotten_the_journal_tells(tools, monkeypatch):
    monkeypatch.setattr(devices, "_uptime_s", lambda: 1000.0)
    tools("dmesg", log((900.0, "late")))
    row = "[  400.000001] gpu001 kernel: " + OOM
    tools("journalctl", f"#!/bin/sh\necho '{row}'\n")
    (one,) = read(700.0).messages
    assert (one.kind, one.ago_s) == ("oom", 599)


def test_stamps_of_other_kernels(tools, monkeypatch):
    monkeypatch.setattr(devices, "_uptime_s", lambda: 1000.0)
    rows = ("<6>[    0.000000][    T0] Linux", f"[  990.000000] [ T4711] {OOM}")
    tools("dmesg", "#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    assert [one.pid for one in read().messages] == [4711]


# --- GPUs.


def asked(*pids: int, since_s: float = 1e9, limit_s: float = 5.0) -> Gpus:
    with Supervisor("nodeready:test", 30) as supervisor:
        return devices.gpus(supervisor, pids, since_s, limit_s)


def smi(text: str, before: str = "") -> str:
    return f"#!/bin/sh\n{before}\ncat <<'END'\n{text}\nEND\n"


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
    return head + busy + tail.partition("</processes>")[2] + end + rest


def test_gpus_with_the_xids_since_the_job_began(tools, monkeypatch):
    monkeypatch.setattr(devices, "_uptime_s", lambda: 1000.0)
    tools("nvidia-smi", smi(spinning()))
    rows = (
        (0.0, "Linux"),
        (10.0, "NVRM: Xid (PCI:0000:1b:00): 48, pid=1, old"),
        (900.0, "NVRM: Xid (PCI:0000:43:00): 79, pid=4711, name=python, off the bus"),
        (901.0, "NVRM: Xid (PCI:0000:43:00): 154, GPU recovery action changed"),
        (902.0, "NVRM: Xid (PCI:0000:43:00): 154, GPU recovery action changed"),
    )
    tools("dmesg", log(*rows))
    first, second = asked(4711, since_s=500.0).devices
    assert (first.index, first.bus_id, first.name) == (0, "0000:1b:00.0", "NVIDIA H100 80GB HBM3")
    assert (first.sm_percent, first.memory_percent, first.power_w, first.limit_w) == (
        96,
        0,
        69,
        700,
    )
    assert (first.pids, first.xids) == ((4711,), ())
    assert (second.sm_percent, second.pids, second.xids) == (None, (), (79, 154))


def test_a_gpu_that_the_hardware_slows_down(tools, monkeypatch):
    tools("nvidia-smi", smi(spinning({"throttle": ("hw_slowdown", "hw_thermal_slowdown")})))
    first, second = asked().devices
    assert (first.throttle, second.throttle) == (("hw_slowdown", "hw_thermal_slowdown"), ())
    monkeypatch.setattr(devices, "_driver", lambda name: name == "amdgpu")
    hot = {"throttle": {"socket_thermal_violation_status": "ACTIVE"}}
    slow = {"perf_level": "AMDSMI_DEV_PERF_LEVEL_LOW"}
    printed = lab_amd.outputs({1: {"metric": hot}, 2: {"metric": slow}})
    tools("amd-smi", lab_amd.stand_in(printed))
    found = [gpu.throttle for gpu in asked().devices[:3]]
    assert found == [(), ("hw_thermal_slowdown",), ("performance level low",)]


def test_without_the_kernels_log_the_gpus_are_told(tools):
    tools("nvidia-smi", smi(spinning()))
    assert len(asked().devices) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "mismatch"),
        ("echo 'NVIDIA-SMI has failed because ...' >&2; exit 9", "NVIDIA-SMI has failed"),
        ("exec sleep 600", "gave no answer in"),
        ("echo '<nvidia_smi_log><gpu'", "nvidia-smi: "),
        ("exit 0", "nvidia-smi: "),
    ],
)
def test_a_tool_that_fails(tools, text, words):
    tools("nvidia-smi", f"#!/bin/sh\n{text}\n")
    seen = asked(limit_s=1.5)
    assert words in seen.absent
    assert "\n" not in seen.absent


def test_no_driver_and_no_tool(tools, monkeypatch):
    assert asked().absent == "nvidia-smi is not installed"
    monkeypatch.setattr(devices, "_driver", lambda name: False)
    assert asked().absent == "no driver of a GPU is loaded"


def test_where_an_earlier_one_hangs_none_is_started(tools, tmp_path, monkeypatch):
    tools("nvidia-smi", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    monkeypatch.setattr(devices, "_stuck", lambda words, until: 815)
    assert "nvidia-smi (pid 815) hangs in the kernel" in asked().absent
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("state", "started_s", "owner", "stuck"),
    [("D", 10.0, 0, 815), ("S", 10.0, 0, 0), ("D", 990.0, 0, 0), ("D", 10.0, 12345, 0)],
)
def test_which_process_is_a_stuck_tool(monkeypatch, state, started_s, owner, stuck):
    known = devices.processes.Stat(815, "nvidia-smi", state, 1, False, 0.0, 1, started_s)
    monkeypatch.setattr(devices, "_uptime_s", lambda: 1000.0)
    monkeypatch.setattr(devices.processes, "pids", lambda: [815])
    monkeypatch.setattr(devices.processes, "stat", lambda text: known)
    monkeypatch.setattr(devices.processes, "owners", lambda pids: dict.fromkeys(pids, owner))
    monkeypatch.setattr(
        devices.processes, "each", lambda look, pids, until: dict.fromkeys(pids, "nvidia-smi ")
    )
    assert devices._stuck(devices.re.compile("nvidia-smi"), 1e18) == stuck


def test_amd_smi(tools, monkeypatch):
    monkeypatch.setattr(devices, "_driver", lambda name: name == "amdgpu")
    printed = lab_amd.outputs(
        {1: {"metric": {"usage": {"gfx_activity": {"value": 98, "unit": "%"}}}}}
    )
    tools("amd-smi", lab_amd.stand_in(printed))
    found = asked().devices
    assert len(found) == 8
    assert (found[1].sm_percent, found[1].power_w, found[1].limit_w) == (98, 138, 750)
    assert found[0].bus_id.endswith(":00.0")
    assert found[0].sm_percent == 0


def test_rocm_smi(tools, monkeypatch):
    monkeypatch.setattr(devices, "_driver", lambda name: name == "amdgpu")
    card = {
        "Device ID": "0x738c",
        "Card series": "Arcturus GL-XL [Instinct MI100]",
        "PCI Bus": "0000:83:00.0",
        "GPU use (%)": "99",
        "Average Graphics Package Power (W)": "36.0",
        "Max Graphics Package Power (W)": "290.0",
    }
    tools("rocm-smi", smi(json.dumps({"card0": card}, indent=1)))
    (one,) = asked().devices
    assert (one.bus_id, one.sm_percent, one.power_w, one.limit_w) == ("0000:83:00.0", 99, 36, 290)
    assert one.name == "Arcturus GL-XL [Instinct MI100]"
