"""Judge whether GPUs and fast RDMA adapters reach each other's memory without a detour.

A deploy changes nothing here: a repair takes isolation away, which a person has to decide.
"""

from __future__ import annotations

import re

from nodeready.core.policy import Policy
from nodeready.core.result import Result, by_value, check, join_names
from nodeready.core.severity import slows_job
from nodeready.subjects.gpus import findings
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.gpus.peers import FAST_GBPS

#: Bits of the ACS Control register (PCI Express Base Specification, 7.7.11.3).
_REQUESTS, _COMPLETIONS, _EGRESS, _TRANSLATED_DIRECT = 0x04, 0x08, 0x20, 0x40
_NO_ADAPTER = f"no RDMA adapter of {FAST_GBPS:g} Gb/s or more"


def _no_host_reason(observed: Gpus) -> str:
    """Why the isolation of this node's devices is not judged, or ""."""
    if any(gpu.virtual for gpu in observed.gpus):
        return "a virtual machine: its host sets ACS and the IOMMU"
    if any(map(findings.is_guest, observed.pci)):
        return "virtual machines use its GPUs, and need the isolation"
    return findings.no_gpu_reason(observed)


def _redirecting_bits(control: int, kind: str, peer: str) -> int:
    """The bits by which a port redirects the traffic between the device below it and a peer.

    An adapter reads and writes a GPU's memory: its port must pass requests, the GPU's port
    completions. Requests with a translated address (ATS) pass with Direct Translated P2P.
    """
    bits = _EGRESS | (_COMPLETIONS if kind == "gpu" else 0)
    if (kind != "gpu" or peer == "gpu") and not control & _TRANSLATED_DIRECT:
        bits |= _REQUESTS
    return control & bits


_RISK = "not with virtual machines: without ACS, a device reaches the memory of the others"
_ACS_FIX = f"disable ACS in the BIOS, or boot with pci=disable_acs_redir=pci:PORT ({_RISK})"
_DIRECT_FIX = f"run rdma_topo write-grub-acs (rdma-core), then reboot ({_RISK})"


@check("gpus.acs", slows_job("configure", "reboot"), fix=(_ACS_FIX, _DIRECT_FIX),
       expects="switches pass traffic between GPUs and adapters")  # fmt: skip
def acs(observed: Gpus, policy: Policy) -> Result:
    """No PCIe switch redirects traffic between a GPU and its peer to the processor (ACS).

    The BIOS, or the kernel when an IOMMU is on, sets Access Control Services on every port. Then
    the data of GPUDirect makes a detour through the root port: NCCL is slow or hangs (NCCL's user
    guide, PCI Access Control Services; AMD's GPU cluster networking guide). On two nodes with
    GB300, other bits raised the bus bandwidth from 360 to 426 GB/s (nodewright-packages#111).
    Judged are the ports at which the paths of a GPU and a peer meet: an adapter of at least 100
    Gb/s, or another GPU without NVLink. Only root can read them. In a virtual machine the host
    decides, and ATS is the way (mlxconfig, ATS_ENABLED).
    """
    peers, ports = observed.peers, {port.address: port for port in observed.peers.ports}
    if reason := _no_host_reason(observed) or peers.unread:
        return acs.na(reason)
    has_links = any(gpu.links or gpu.fabric_state for gpu in observed.gpus)
    judged, redirecting, fix = set[str](), dict[str, str](), ""
    for device in peers.devices:
        for peer in peers.devices:
            kinds = device.kind, peer.kind
            if "gpu" not in kinds or (has_links and kinds == ("gpu", "gpu")):
                continue
            steps = zip(device.bridges, peer.bridges)
            fork = next((fork for fork in steps if fork[0] != fork[1]), ("", ""))
            port = ports.get(fork[0])
            if port is None:
                continue
            judged.add(port.address)
            if _redirecting_bits(port.acs or 0, device.kind, peer.kind):
                redirecting[port.address] = f"ACS {port.acs:#06x}"
                fix = _DIRECT_FIX if "direct" in kinds else fix
    if redirecting:
        models = ";pci:".join(sorted({ports[address].model for address in redirecting}))
        path = f"/sys/bus/pci/devices/{next(iter(redirecting))}/config"
        return acs.warn(by_value(redirecting), path, fix or _ACS_FIX.replace("PORT", models))
    return acs.ok() if judged else acs.na("no GPU shares a PCIe switch with a peer")


@check("gpus.iommu", slows_job("configure", "reboot"),
       expects="the IOMMU passes the adapters' addresses through", fix=(
    "boot with iommu=pt (by hand, or policy iommu_args and a deploy), then reboot: the host's "
    "devices then reach all of its memory, those of virtual machines stay isolated"
))  # fmt: skip
def iommu(observed: Gpus, policy: Policy) -> Result:
    """The IOMMU does not translate the addresses of RDMA adapters on a node with NVIDIA GPUs.

    GPUDirect RDMA needs an IOMMU that is off or passes through (NVIDIA's GPUDirect RDMA
    documentation, supported systems). A translating IOMMU (the kernel's default with AMD
    processors) sends the data through the root port. For AMD Instincts, iommu.args judges the boot
    arguments; Grace translates for its GPU.
    """
    adapters = observed.peers.of_kind("rdma")
    if reason := _no_host_reason(observed):
        return iommu.na(reason)
    if "x86_64" not in observed.peers.driver or not adapters:
        return iommu.na("no NVIDIA driver for x86 is loaded" if adapters else _NO_ADAPTER)
    modes = {adapter.name: adapter.iommu for adapter in adapters if adapter.iommu}
    if translated := {name: mode for name, mode in modes.items() if mode.startswith("DMA")}:
        path = f"/sys/class/infiniband/{next(iter(translated))}/device/iommu_group/type"
        return iommu.warn(by_value(translated), path)
    return iommu.ok(by_value(modes) or "the IOMMU is off, or the kernel shows no mode")


@check("gpus.peermem", slows_job("configure", "install"), expects="nvidia-peermem or DMA-BUF")
def peermem(observed: Gpus, policy: Policy) -> Result:
    """How Mellanox adapters reach the memory of NVIDIA GPUs: by which way GPUDirect RDMA goes.

    The ways are the module nvidia-peermem (or nv_peer_mem), and DMA-BUF with NVIDIA's open kernel
    modules and Linux 5.12 or newer (NCCL's user guide, GPU-to-NIC communication). Without both,
    NCCL silently copies through the processor's memory. Not every job needs a way, so that no node
    is warned of having none; the comparison names nodes that differ from their group.
    """
    peers, reason = observed.peers, findings.no_gpu_reason(observed)
    adapters = [a.name for a in peers.of_kind("rdma") if a.driver == "mlx5_core"]
    if reason or not peers.driver or not adapters:
        return peermem.na(
            reason or (_NO_ADAPTER if peers.driver else "no NVIDIA driver is loaded")
        )
    if modules := [name for name in peers.modules if name != "gdrdrv"]:
        return peermem.ok(modules[0])
    version, is_open = re.match(r"(\d{1,3})\.(\d{1,3})", peers.kernel), "Open" in peers.driver
    if version is None or (is_open and ".el8" in peers.kernel):
        return peermem.na("whether this kernel has DMA-BUF for RDMA cannot be told")
    # ib_umem_dmabuf_get came with Linux 5.12; Red Hat has ported it back to 4.18.
    has_dmabuf = (int(version[1]), int(version[2])) >= (5, 12)
    if is_open and has_dmabuf:
        return peermem.ok("DMA-BUF")
    lacking = "no open kernel modules" if has_dmabuf else f"Linux {version[0]}"
    return peermem.na(
        f"nvidia-peermem is not loaded, and {lacking} for DMA-BUF ({join_names(adapters)})"
    )
