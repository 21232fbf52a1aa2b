"""Lines of the kernel's log that name a fault of a GPU, other than Xids, and what is to be done.

The patterns are of the kind that awk and Python share: the same ones choose the lines on the node
and say here what they mean.

Sources: Linux' drivers/gpu/drm/amd (amdgpu_device.c, amdgpu_job.c, amdgpu_ras.c,
amdgpu_ras_eeprom.c, gmc_v9_0.c, amdkfd) and AMD's node-scraper (dmesg_analyzer.py) for amdgpu;
NVIDIA's open-gpu-kernel-modules (osinit.c, nv.c) and its Fabric Manager guide (SXids) for NVIDIA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodeready.probes.xids import APPLICATION, ISOLATE, MONITOR, REBOOT, RESET


@dataclass(frozen=True)
class Kind:
    """One kind of line.

    source: ``nvidia``, ``sxid`` (an NVSwitch) or ``amdgpu``
    healed: the action when the driver was loaded again, or its reset of the device succeeded,
            after the line; "" when nothing is left of it
    """

    source: str
    pattern: str
    action: str
    healed: str = ""


KINDS = (
    Kind("nvidia", "fallen off the bus|GPU is lost", REBOOT, REBOOT),
    Kind("nvidia", "RmInitAdapter failed|rm_init_adapter failed", REBOOT),
    Kind("sxid", "SXid [(][^)]*[)]: [0-9]+, Fatal", RESET, RESET),
    Kind("sxid", "SXid [(][^)]*[)]: [0-9]+, ", MONITOR, MONITOR),
    # More pages than the board may lose: amdgpu refuses the device at the next load.
    Kind(
        "amdgpu",
        "RAS records:? *[0-9]+ exceed|bad pages [0-9]+ reaches threshold",
        ISOLATE,
        ISOLATE,
    ),
    Kind("amdgpu", "GPU reset[(0-9)]* failed|GPU reset end with ret = -", REBOOT, MONITOR),
    Kind("amdgpu", "GPU [Rr]ecovery [Ff]ailed|Mode[12] reset failed", REBOOT, MONITOR),
    Kind("amdgpu", "Fatal error during GPU init|[sh]w_init of IP block .* failed", REBOOT),
    Kind("amdgpu", "prob(e of [^ ]+|e with driver amdgpu) failed with error", REBOOT),
    Kind("amdgpu", "device lost from bus", REBOOT, REBOOT),
    # The count matters: "0 uncorrectable hardware errors" and "no uncorrectable …" are all clear.
    Kind(
        "amdgpu",
        "[ :(][1-9][0-9]* (new )?uncorrectable hardware errors detected in [A-Za-z0-9_]+ block",
        RESET,
        MONITOR,
    ),
    Kind("amdgpu", "Uncorrectable hardware error[(]", RESET, MONITOR),
    Kind("amdgpu", "PCI error: detected callback", RESET, MONITOR),
    Kind("amdgpu", "ring [^ ]+ timeout, signaled", RESET, MONITOR),
    Kind("amdgpu", "HW Exception by GPU|GPU hang|SMU is in hanged state", RESET, MONITOR),
    Kind("amdgpu", "unrecoverable state due to|qcm fence wait loop timeout", RESET, MONITOR),
    # A reset that began and of which no end is known.
    Kind("amdgpu", "GPU reset begin", RESET),
    Kind(
        "amdgpu",
        "[ :(][1-9][0-9]* (new )?deferred hardware errors detected in [A-Za-z0-9_]+ block",
        MONITOR,
        MONITOR,
    ),
    Kind("amdgpu", "hub[0-9]*[]].*page fault", APPLICATION, APPLICATION),
)

#: How a line begins that may be one of them.
ORIGIN = r"^(NVRM: |nvidia-nvswitch[0-9]+: |amdgpu |amdgpu: |\[drm)"
#: Any of the patterns.
ANY = "|".join(kind.pattern for kind in KINDS)
#: What amdgpu says when a reset brought the device, or the one ring that hung, back.
RECOVERED = r"GPU reset[(0-9)]* succeeded|Ring [^ ]+ reset succe"

_ORIGINS = {
    "nvidia": ("NVRM: ",),
    "sxid": ("nvidia-nvswitch",),
    "amdgpu": ("amdgpu", "[drm"),
}


def find(text: str) -> Kind | None:
    """The kind of a line without its time stamp."""
    for kind in KINDS:
        if text.startswith(_ORIGINS[kind.source]) and re.search(kind.pattern, text):
            return kind
    return None


def kind_of(text: str) -> str:
    """What lines of one kind have in common, "" for none."""
    kind = find(text)
    return kind.pattern if kind else ""


def sxid(text: str) -> int | None:
    """The code of an SXid line."""
    match = re.search(r"SXid \([^)]*\): ([0-9]{1,9})\b", text)
    return int(match[1]) if match else None
