"""Judge whether GPUs and fast RDMA adapters reach each other's memory without a detour.

A deploy changes nothing here: each repair takes isolation away, which a person has to decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.core.result import Result, by_value, check, join_names
from nodeready.core.severity import slows_job
from nodeready.subjects.gpus import findings
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.gpus.peers import FAST_GBPS, PeerDevice

#: Bits of the ACS Control register that redirect traffic between peers to the root port (PCI
#: Express Base Specification, 7.7.11.3; Linux's include/uapi/linux/pci_regs.h).
_REQUESTS, _COMPLETIONS, _EGRESS, _TRANSLATED_DIRECT = 0x04, 0x08, 0x20, 0x40

_NO_ADAPTER = f"no RDMA adapter of {FAST_GBPS:g} Gb/s or more"


def _unsuitable(observed: Gpus) -> str:
    """Why peer access is not this node's to judge, or ""."""
    if reason := findings.no_gpu_reason(observed):
        return reason
    if any(gpu.virtual for gpu in observed.gpus):
        return "a virtual machine: its host sets ACS and the IOMMU"
    if any(map(findings.is_guest, observed.pci)):
        return "virtual machines use its GPUs, and need the isolation"
    return ""


def _pairs(observed: Gpus) -> Iterator[tuple[PeerDevice, PeerDevice]]:
    """A GPU, and an adapter or another GPU without links between GPUs."""
    devices, gpus = observed.peers.devices, observed.peers.of_kind("gpu")
    has_links = any(gpu.links or gpu.fabric_state for gpu in observed.gpus)
    for index, gpu in enumerate(gpus):
        yield from ((gpu, device) for device in devices if device.kind != "gpu")
        if not has_links:
            yield from ((gpu, other) for other in gpus[index + 1 :])


def _redirects(control: int, kind: str, peer_kind: str) -> bool:
    """Whether a port redirects the traffic of the device below it to this peer.

    An adapter reads and writes a GPU's memory: its port passes the requests, the GPU's port the
    completions. With Direct Translated P2P requests with a translated address (ATS) pass.
    """
    bits = _EGRESS
    if kind != "gpu" or peer_kind == "gpu":
        bits |= 0 if control & _TRANSLATED_DIRECT else _REQUESTS
    if kind == "gpu":
        bits |= _COMPLETIONS
    return bool(control & bits)


_RISK = (
    "not where virtual machines use devices below these switches: without ACS, a device reaches "
    "the memory of the others"
)
_ACS_FIX = (
    "disable ACS in the BIOS, or boot with pci=disable_acs_redir=pci:PORT (setpci lasts until the "
    f"reboot); {_RISK}"
)
_DIRECT_FIX = f"run rdma_topo write-grub-acs (rdma-core), then reboot; {_RISK}"


@check("gpus.acs", slows_job("configure", "reboot"), fix=(_ACS_FIX, _DIRECT_FIX),
       expects="switches pass traffic between GPUs and adapters")  # fmt: skip
def acs(observed: Gpus, policy: Policy) -> Result:
    """No PCIe switch redirects traffic between a GPU and its peer to the processor (ACS).

    The BIOS sets Access Control Services, and the kernel sets them on every port when an IOMMU is
    on. Then the data of GPUDirect makes a detour through the root port: NCCL is slow or hangs
    (NCCL's user guide, troubleshooting, PCI Access Control Services; AMD's GPU cluster networking
    guide: "Disable ACS"). On two nodes with GB300, the right bits raised the bus bandwidth of
    all_reduce from 360 to 426 GB/s (NVIDIA/nodewright-packages#111). Judged are the two ports at
    which the paths of a GPU and of a peer meet: an RDMA adapter of at least 100 Gb/s, or another
    GPU if there is no NVLink. Only root can read these registers. A path over two root ports has
    no such switch. In a virtual machine the host decides, where ATS is the way (ATS_ENABLED of
    mlxconfig, NVIDIA AI Enterprise).
    """
    peers, by_address = observed.peers, {port.address: port for port in observed.peers.ports}
    if reason := _unsuitable(observed):
        return acs.na(reason)
    if not peers.devices:
        return acs.na("no PCI path is shown")
    judged, findings_by_port, direct = set[str](), dict[str, str](), False
    for pair in _pairs(observed):
        common = next(
            (i for i, (a, b) in enumerate(zip(*(d.bridges for d in pair))) if a != b), None
        )
        for device, peer in (pair, pair[::-1]):
            port = by_address.get(device.bridges[common]) if common else None
            if port is None:
                continue
            judged.add(port.address)
            if port.acs is not None and _redirects(port.acs, device.kind, peer.kind):
                findings_by_port[port.address] = f"ACS {port.acs:#06x}"
                direct = direct or "direct" in (device.kind, peer.kind)
    if findings_by_port:
        models = {by_address[address].model for address in findings_by_port}
        fix = _DIRECT_FIX if direct else _ACS_FIX.replace("PORT", ";pci:".join(sorted(models)))
        path = f"/sys/bus/pci/devices/{next(iter(findings_by_port))}/config"
        return acs.warn(by_value(findings_by_port), path, fix)
    if peers.unread:
        return acs.na(peers.unread)
    return acs.ok() if judged else acs.na("no GPU shares a PCIe switch with a peer")


@check("gpus.iommu", slows_job("configure", "reboot"),
       expects="the IOMMU passes the adapters' addresses through", fix=(
    "boot with iommu=pt (policy iommu_args and a deploy, or by hand), then reboot: the host's "
    "devices then reach all of its memory, those of virtual machines stay isolated"
))  # fmt: skip
def iommu(observed: Gpus, policy: Policy) -> Result:
    """The IOMMU does not translate the addresses of RDMA adapters on a node with NVIDIA GPUs.

    GPUDirect RDMA needs the same physical addresses on every device: the IOMMU must be off or
    pass through (NVIDIA's GPUDirect RDMA documentation, supported systems). A translating IOMMU
    (the kernel's default with AMD processors) sends the data through the root port. The kernel
    shows the mode of a device in iommu_group/type. For AMD Instincts, iommu.args judges the boot
    arguments; Grace translates for its GPU.
    """
    adapters = observed.peers.of_kind("rdma")
    if reason := _unsuitable(observed):
        return iommu.na(reason)
    if not observed.peers.x86:
        return iommu.na("no NVIDIA driver for x86 is loaded")
    if not adapters:
        return iommu.na(_NO_ADAPTER)
    modes = {adapter.name: adapter.iommu for adapter in adapters if adapter.iommu}
    wrong = {name: mode for name, mode in modes.items() if mode.startswith("DMA")}
    if wrong:
        path = f"/sys/class/infiniband/{next(iter(wrong))}/device/iommu_group/type"
        return iommu.warn(by_value(wrong), path)
    return iommu.ok(by_value(modes) or "the IOMMU is off, or the kernel shows no mode")


#: Of the kernel: RDMA devices take a DMA-BUF (Linux 5.12, ib_umem_dmabuf_get).
_DMABUF = (5, 12)


@check("gpus.peermem", slows_job("configure", "install"),
       expects="nvidia-peermem or DMA-BUF", fix=(
    "modprobe nvidia-peermem, at each boot by /etc/modules-load.d (it needs DOCA-OFED or "
    "MLNX_OFED), or install NVIDIA's open kernel modules on a kernel from 5.12 on"
))  # fmt: skip
def peermem(observed: Gpus, policy: Policy) -> Result:
    """Mellanox adapters can reach the memory of NVIDIA GPUs: GPUDirect RDMA has a way.

    The ways are the module nvidia-peermem (or nv_peer_mem), and DMA-BUF with NVIDIA's open kernel
    modules and Linux 5.12 or newer (NCCL's user guide, troubleshooting, GPU-to-NIC communication).
    Without both, NCCL copies through the processor's memory without a warning. Adapters of other
    makers have modules of their own, and are not judged.
    """
    peers = observed.peers
    adapters = [a.name for a in peers.of_kind("rdma") if a.driver == "mlx5_core"]
    if reason := findings.no_gpu_reason(observed):
        return peermem.na(reason)
    if peers.open_driver is None:
        return peermem.na("no NVIDIA driver is loaded")
    if not adapters:
        return peermem.na(_NO_ADAPTER)
    if modules := [name for name in peers.modules if name != "gdrdrv"]:
        return peermem.ok(modules[0])
    version = re.match(r"(\d{1,3})\.(\d{1,3})", peers.kernel)
    if version is None or (peers.open_driver and ".el8" in peers.kernel):
        return peermem.na("whether this kernel has DMA-BUF for RDMA cannot be told")
    new_enough = (int(version[1]), int(version[2])) >= _DMABUF
    if peers.open_driver and new_enough:
        return peermem.ok("DMA-BUF")
    lacking = "no open kernel modules" if new_enough else f"Linux {version[0]}"
    actual = f"nvidia-peermem is not loaded, and {lacking} for DMA-BUF ({join_names(adapters)})"
    return peermem.warn(actual, "/sys/module/nvidia_peermem")
