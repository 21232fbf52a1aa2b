"""How GPUs and RDMA adapters reach each other: ACS of the switches above them, IOMMU, peermem.

No recording has the configuration space of a switch: the bytes are written by the layout of the
PCI Express Base Specification (7.5.1 header, 7.5.3 PCI Express capability, 7.6.3 extended
capabilities, 7.7.11 ACS).
"""

import struct
from dataclasses import replace
from typing import Any

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.subjects.gpus import facts as pci_bus
from nodeready.subjects.gpus import peers
from nodeready.subjects.gpus.gpu import Gpus
from tests.builders.gpus import ADDRESSES, DEVICES, a100, h100, judged, pci
from tests.builders.sections import run_on
from tests.cases import cases

GPU, NIC = ADDRESSES[0], "0000:18:00.0"
ROOT, UPSTREAM = "0000:15:01.0", "0000:16:00.0"
GPU_PORT, NIC_PORT = "0000:17:00.0", "0000:17:01.0"


def config(acs: int, port_type: int = 6, size: int = 4096) -> bytes:
    """A bridge's configuration; ``acs`` -1: without ACS. An AER capability is before it."""
    data = bytearray(4096)
    struct.pack_into("<HH", data, 0, 0x1000, 0xC030)
    data[0x0E], data[0x34] = 1, 0x40
    data[0x40:0x42] = 0x05, 0x60  # MSI, then the PCI Express capability
    struct.pack_into("<BBH", data, 0x60, 0x10, 0, port_type << 4 | 2)
    struct.pack_into("<I", data, 0x100, 0x0001 | 2 << 16 | (0x148 if acs >= 0 else 0) << 20)
    if acs >= 0:
        struct.pack_into("<IHH", data, 0x148, 0x000D | 1 << 16, 0x007F, acs)
    return bytes(data[:size])


def dumped(data: bytes) -> str:
    """What `od -Ax -tx1` prints, without its ``*``."""
    rows = [
        f"{offset:06x} {data[offset : offset + 16].hex(' ')}" for offset in range(0, len(data), 16)
    ]
    return "\n".join([*rows, f"{len(data):06x}\n"])


def section(
    *, acs: tuple[int, int] = (0, 0), port_type: int = 6, size: int = 4096, fill: int = -1,
    nic_root: str = ROOT, rate: str = "400 Gb/sec (4X NDR)", iommu: str = "identity",
    modules: str = "nvidia_peermem gdrdrv", driver: str = "x86_64 Kernel Module  535.129.03",
    kernel: str = "5.15.0-91-generic", nic_driver: str = "mlx5_core", guest: bool = False,
    peer: str = "rdma mlx5_0",
) -> str:  # fmt: skip
    """What the section prints of a node whose first GPU shares a switch with mlx5_0."""
    bus = "".join(pci(address) for address in ADDRESSES[: -1 if guest else None])
    bus += pci(ADDRESSES[-1], driver="vfio-pci") if guest else ""
    above, root = f"/sys/devices/pci0000:15/{ROOT}/{UPSTREAM}", "/sys/class/infiniband/mlx5_0"
    upstream = UPSTREAM if nic_root == ROOT else "0000:21:00.0"
    files = [
        f"/proc/driver/nvidia/version:NVRM version: NVIDIA UNIX {driver}  Thu Oct 19 2023",
        f"/proc/sys/kernel/osrelease:{kernel}",
        f"{root}/ports/1/rate:{rate}",
        f"{root}/device/uevent:DRIVER={nic_driver}",
        *([f"{root}/device/iommu_group/type:{iommu}"] if iommu else []),
        *(f"/sys/module/{name}/initstate:live" for name in modules.split()),
        f"peer=gpu {GPU} {above}/{GPU_PORT}/{GPU}",
        f"port={GPU_PORT}",
        f"peer={peer} /sys/devices/pci0000:15/{nic_root}/{upstream}/{NIC_PORT}/{NIC}",
        f"port={NIC_PORT}",
    ]
    data = b"".join(config(value, port_type, size) for value in acs)
    if fill >= 0:
        data = bytes([fill]) * len(data)
    return bus + DEVICES + "\n" + "\n".join(files) + "\n" + dumped(data)


def observed(text: str) -> Gpus:
    return h100(bus=text).observed()


@pytest.mark.parametrize("case", cases(__file__, "data/peers.toml"))
def test_verdicts(case: dict[str, Any]) -> None:
    fields = {key: value for key, value in case.items() if key not in ("name", "verdicts", "says")}
    results = judged(observed(section(**fields)))
    chosen = [results[name] for name in ("acs", "iommu", "peermem")]
    assert [result.status for result in chosen] == case["verdicts"]
    assert case.get("says", "") in " ".join(f"{result.actual} {result.fix}" for result in chosen)


def test_nodes_of_a_group_share_how_many_gpus_are_beside_an_adapter():
    facts = pci_bus.compared(observed(section()))
    assert facts["gpus_beside_adapter"] == 1
    assert facts["peer_modules"] == "nvidia_peermem gdrdrv"
    apart = pci_bus.compared(observed(section(nic_root="0000:20:01.0")))
    assert apart["gpus_beside_adapter"] == 0


def test_in_a_virtual_machine_the_host_decides():
    node = observed(section(acs=(0x1D, 0x1D), iommu="DMA"))
    results = judged(replace(node, nvidia=(replace(node.nvidia[0], virtual=True),)))
    assert {results[name].status for name in ("acs", "iommu")} == {"na"}


@pytest.mark.parametrize(("links", "status"), [(None, "na"), ("", "warn")])
def test_gpus_are_peers_of_each_other_where_they_have_no_links(links, status):
    other = f"peer=gpu {ADDRESSES[1]} /sys/devices/pci0000:15/{ROOT}/{UPSTREAM}/{NIC_PORT}"
    text = section(acs=(0x04, 0), rate="10 Gb/sec (4X SDR)") + f"{other}/{ADDRESSES[1]}\n"
    node = replace(a100(), bus=text)
    node = node if links is None else replace(node, links=Output(links, 0))
    result = judged(node.observed())["acs"]
    assert (result.status, GPU_PORT in result.actual) == (status, status == "warn")


@pytest.mark.parametrize("damage", [
    pytest.param(lambda c: c[:0x34] + b"\x40" + c[0x35:0x41] + b"\x40" + c[0x42:], id="loop"),
    pytest.param(lambda c: c[:0x34] + b"\xfc" + c[0x35:0xfd] + b"\xfc" + c[0xfe:], id="last byte"),
    pytest.param(lambda c: bytes(4096), id="zeros"),
    pytest.param(lambda c: b"\xff" * 4096, id="ones"),
])  # fmt: skip
def test_a_capability_list_that_makes_no_sense_is_no_switch(damage):
    assert peers.switch_port(GPU_PORT, damage(config(0x1D))) is None


@pytest.mark.parametrize("link", [0x100, 0x104, 0xFFC, 0x0FC])
def test_an_extended_list_that_loops_or_leaves_the_space_ends(link):
    data = bytearray(config(-1))
    struct.pack_into("<I", data, 0x100, 0x0001 | 2 << 16 | link << 20)
    assert peers.switch_port(GPU_PORT, bytes(data)).acs is None


@pytest.mark.parametrize(("old", "new"), [
    ("\n000010 ", "\n000020 "), ("\n000010 ", "\n*\nffffff "), ("000000 ", "00000 "),
    ("\n000ff0 ", "\n"), (f"port={NIC_PORT}", "port=../../etc"), (f"port={NIC_PORT}\n", ""),
    ("\n002000\n", "\n*\nfffffff0\n"),
])  # fmt: skip
def test_a_dump_that_is_not_whole_is_no_finding(old, new):
    text = section(acs=(0x1D, 0x1D))
    assert old in text
    result = judged(observed(text.replace(old, new)))["acs"]
    # A port without a usable name stands above nothing; the other is judged.
    assert result.status == "na" or ("etc" in new and NIC_PORT not in result.actual)


@pytest.mark.parametrize("line", [
    "peer=", "peer=gpu", "peer=gpu x /", "peer=other x /0000:17:00.0", "port=",
    "/sys/module/evil/initstate:live",
    "peer=rdma \x1b[31m /0000:17:00.0", "/sys/class/infiniband/x/ports/1/rate:9e9999 Gb/sec",
    "/proc/sys/kernel/osrelease:" + "9" * 9999, "peer=gpu a " + "/0000:17:00.0" * 9999,
])  # fmt: skip
def test_lines_that_make_no_sense_are_passed_over(line):
    access = peers.parse(line)
    assert all(len(device.bridges) <= 16 for device in access.devices)
    assert {device.kind for device in access.devices} <= {"gpu"}
    assert (access.ports, access.modules, len(access.kernel) <= 80) == ((), (), True)
    assert judged(observed(f"{section()}{line}\n"))["acs"].status in ("ok", "na")


# tests/lab/test_units_busybox.py asks the same of busybox.
@pytest.mark.parametrize("shell", [["sh"], ["bash", "--posix"]], ids=" ".join)
def test_the_script_reads_the_ports_above_gpus_and_adapters(shell, tmp_path):
    """Three functions below nested switches, each port once; od shortens equal lines to ``*``."""
    above = f"devices/pci0000:15/{ROOT}/{UPSTREAM}"
    direct = "0000:19:00.0"
    places = {
        GPU: f"{above}/{GPU_PORT}/{GPU}",
        NIC: f"{above}/{NIC_PORT}/{NIC}",
        direct: f"{above}/{NIC_PORT}/0000:18:01.0/0000:19:08.0/{direct}",
    }
    for line in pci(GPU).splitlines():
        path, _, text = line.partition(f"{GPU}/")[2].partition(":")
        (tmp_path / "sys" / places[GPU]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / places[GPU] / path).write_text(f"{text}\n")
    for address, device in ((NIC, "0x1021"), (direct, "0x2100")):
        (tmp_path / "sys" / places[address]).mkdir(parents=True)
        (tmp_path / "sys" / places[address] / "vendor").write_text("0x15b3\n")
        (tmp_path / "sys" / places[address] / "device").write_text(f"{device}\n")
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for address, place in places.items():
        (bus / address).symlink_to(tmp_path / "sys" / place)
    ports = (GPU_PORT, NIC_PORT, f"{NIC_PORT}/0000:18:01.0/0000:19:08.0")
    files = [tmp_path / "sys" / above / port / "config" for port in ports]
    for file in files:
        file.write_bytes(config(0x1D))
    ib = tmp_path / "sys/class/infiniband/mlx5_0"
    (ib / "ports/1").mkdir(parents=True)
    (ib / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    (ib / "device").symlink_to(bus / NIC)
    (tmp_path / "sys/module/gdrdrv").mkdir(parents=True)
    (tmp_path / "sys/module/gdrdrv/initstate").write_text("live\n")
    done = run_on(tmp_path, pci_bus.SECTION.script(Policy()), shell)
    assert done.returncode == 0
    access = pci_bus.parse_pci(done.stdout).peers
    assert [(d.kind, d.address) for d in access.devices] == [
        ("gpu", GPU), ("direct", direct), ("rdma", NIC),
    ]  # fmt: skip
    assert access.devices[0].bridges == (ROOT, UPSTREAM, GPU_PORT)
    assert access.modules == ("gdrdrv",)
    assert [(p.address, p.acs) for p in access.ports] == [
        (GPU_PORT, 0x1D), ("0000:19:08.0", 0x1D), (NIC_PORT, 0x1D),
    ]  # fmt: skip
    assert len(done.stdout) < 5000
    # Without root, the kernel shows 64 bytes.
    for file in files:
        file.write_bytes(config(0x1D, size=64))
    done = run_on(tmp_path, pci_bus.SECTION.script(Policy()), shell)
    access = pci_bus.parse_pci(done.stdout).peers
    assert (access.ports, "only root" in access.unread) == ((), True)
