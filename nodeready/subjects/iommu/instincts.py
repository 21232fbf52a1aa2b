"""AMD Instinct accelerators by PCI device id.

Sources: ROCm/gpu-operator internal/utils.go (AMD's lists of physical and virtual functions),
ROCm's Tensile (GFX_CHIP_IDS of gfx942 and gfx950), Linux'
drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c (Arcturus and Aldebaran), and pci.ids.
"""

from __future__ import annotations

from dataclasses import dataclass

#: AMD's graphics and accelerators (its CPUs and chipsets are 0x1022).
VENDOR = "0x1002"


@dataclass(frozen=True)
class Model:
    """One kind of accelerator."""

    name: str  # the product
    generation: int  # 1 for MI100 (CDNA), 2 for MI200, 3 for MI300, 4 for MI350
    virtual: bool = False  # an SR-IOV virtual function, as a guest sees it


MODELS: dict[str, Model] = {
    "0x7388": Model("MI100", 1),
    "0x738c": Model("MI100", 1),
    "0x738e": Model("MI100", 1),
    "0x7408": Model("MI250X", 2),
    "0x740c": Model("MI250", 2),
    "0x740f": Model("MI210", 2),
    "0x7410": Model("MI210 VF", 2, virtual=True),
    "0x74a0": Model("MI300A", 3),
    "0x74a1": Model("MI300X", 3),
    "0x74a2": Model("MI308X", 3),
    "0x74a3": Model("MI300 series", 3),
    "0x74a5": Model("MI325X", 3),
    "0x74a8": Model("MI308X HF", 3),
    "0x74a9": Model("MI300X HF", 3),
    "0x74b5": Model("MI300X VF", 3, virtual=True),
    "0x74b6": Model("MI308X", 3),
    "0x74b9": Model("MI325X VF", 3, virtual=True),
    "0x74bd": Model("MI300X HF", 3),
    "0x75a0": Model("MI350X", 4),
    "0x75a2": Model("MI350 series", 4),
    "0x75a3": Model("MI355X", 4),
    "0x75a8": Model("MI350 series", 4),
    "0x75b0": Model("MI350X VF", 4, virtual=True),
    "0x75b2": Model("MI350 series VF", 4, virtual=True),
    "0x75b3": Model("MI355X VF", 4, virtual=True),
    "0x75b8": Model("MI350 series VF", 4, virtual=True),
}
