"""Eight AMD Instinct MI300X per node, jobs through Slurm and containers."""

from __future__ import annotations

limit_services = ("slurmd", "containerd")

ssh_client_hosts = ("amd*",)

# AMD's guide for MI300X: the IOMMU stays on, in pass-through mode. None, the default, chooses the
# same by the hardware that is there; () leaves the kernel's command line alone.
iommu_args = ("iommu=pt",)
