"""The faults of GPUs in the kernel's log: Xids and drivers' messages, and what each asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodeready import knowledge

#: The device or its slot needs hands: drain the node and open a case.
ISOLATE = "ISOLATE"
#: Only a reboot of the node repairs the fault.
REBOOT = "REBOOT"
#: A reset of the GPU repairs the fault.
RESET = "RESET"
#: Nothing to do yet; a fault that comes back is a case for the vendor.
MONITOR = "MONITOR"
#: The fault is an application's own, not the node's.
APPLICATION = "APPLICATION"
#: The actions, the gravest first.
ACTIONS = (ISOLATE, REBOOT, RESET, MONITOR, APPLICATION)


@dataclass(frozen=True)
class Xid:
    """One code: a row of knowledge/xids.toml."""

    code: int
    meaning: str
    action: str
    source: str  # where this is documented
    severity: bool = False  # its messages contain the severity
    linked: int | None = None  # the first branch of the driver whose recovery action counts it


#: Code -> the known Xid.
XIDS: dict[int, Xid] = {
    int(code): Xid(int(code), **row) for code, row in knowledge.rows("xids").items()
}


def is_cleared_by_action(code: int | None, driver: str | None = None) -> bool:
    """Whether the recovery action ``None`` of this driver means that this Xid is repaired.

    A driver of unknown version counts as new enough.
    """
    since = lookup(code or 0).linked
    branch = re.match(r"[0-9]{1,5}", driver or "")
    return since is not None and (branch is None or int(branch[0]) >= since)


def lookup(code: int) -> Xid:
    """The Xid of this code; the action of an unknown one is MONITOR."""
    return XIDS.get(code) or Xid(code, "unknown Xid", MONITOR, "")


# The severity follows the unit (``NETIR_LINK_EVT  Fatal   XC1 i0 Link 04 (…)``), and no comma
# follows the severity. The name of a process comes first, and can be any word: ``name=Fatal, ``.
FATAL = "[A-Z0-9_)] +Fatal( [^,]*)?$"
_DEMANDS = {"none": "", "reboot": REBOOT, "reset": RESET, "flr": RESET, "drain": RESET}


def action_of(code: int, text: str) -> str:
    """The action of an Xid with this message; "" when the driver takes its demand back.

    The message of 154 names the driver's demand ("… to 0x1 (GPU Reset Required)"), those of
    144 to 150 say whether the error was fatal.
    """
    if code == 154:
        # The last match counts: the name of a process may contain these words.
        demands = re.findall(r" to 0x[0-9a-fA-F]+ \(([^()]*)\)", text)
        words = demands[-1].lower() if demands else "unknown"
        # Drivers of 590 and later call a reset "PF FLR", and a reboot "OS Reboot".
        for word, action in _DEMANDS.items():
            if word in words:
                return action
    xid = lookup(code)
    return RESET if xid.severity and re.search(FATAL, text) else xid.action


# --- The messages of drivers in the kernel's log about faults of GPUs, and the action for each.
#
# The patterns are of the kind that awk and Python share: the same patterns choose the lines on the
# node and explain the lines here. A pattern has no slash and no apostrophe, which would end awk's
# program.
#
# Sources: Linux' drivers/gpu/drm/amd (amdgpu_device.c, amdgpu_job.c, amdgpu_ras.c, amdgpu_umc.c,
# amdgpu_ras_eeprom.c, amdgpu_xgmi.c, nbio_v7_9.c, mes_v12_0.c, smu_cmn.c, smu_v13_0_6_ppt.c,
# gmc_v9_0.c, amdkfd, ras/rascore) and AMD's node-scraper (dmesg_analyzer.py) for amdgpu; NVIDIA's
# open-gpu-kernel-modules (osinit.c, nv*.c, nv_gpu_ops.c, kernel_gsp.c, kernel_nvlink*.c), its
# Fabric Manager guide (SXids) and gpud (components/accelerator/nvidia/nvlink) for NVIDIA;
# Linux' drivers/base/dd.c for a driver that does not take its device; drivers/pci/pcie (aer.c,
# dpc.c), drivers/firmware/efi/cper.c and Documentation/PCI/pcieaer-howto.rst for the bus: after a
# fatal error the link is not reliable, after an error that is not fatal the link works and one
# transaction is lost.


@dataclass(frozen=True)
class LogRule:
    """What one kind of message means."""

    source: str  # ``nvidia``, ``sxid`` (an NVSwitch), ``amdgpu`` or ``pcie``
    pattern: str
    action: str  # the action for the fault
    # the action where the driver was loaded again, or the device was reset, after the message; "":
    # none
    after_reset: str = ""
    ring_resets: bool = False  # the reset of one ring repairs the fault as well


# A count of at least one, with or without the number of the event in front: ``{14}2
# uncorrectable …``. "0 uncorrectable hardware errors" and "no uncorrectable …" are all clear.
_COUNT = "[^0-9.][1-9][0-9]* (new )?"

RULES = (
    LogRule("nvidia", "fallen off the bus|GPU is lost", REBOOT, REBOOT),
    LogRule("nvidia", "RmInitAdapter failed|rm_init_adapter failed", REBOOT),
    # The firmware gave the GPU's memory no address.
    LogRule("nvidia", "BAR[0-9] is 0M @", REBOOT),
    LogRule("nvidia", "prob(e of [^ ]+|e with driver nvidia) failed with error", REBOOT),
    LogRule("nvidia", "GPU likely needs to be reset", RESET),
    LogRule("nvidia", "requiring os reboot to recover", REBOOT),
    # The driver repeats the discovery of links without end, and nvidia-smi hangs.
    LogRule(
        "nvidia",
        "knvlink[A-Za-z0-9_]+: .*(postRxDetLinkMask failed|Failed to update Rx Detect Link mask)",
        REBOOT,
    ),
    # Programs of another version than the module; a container may have its own.
    LogRule("nvidia", "API mismatch: the client has", MONITOR),
    LogRule("sxid", "SXid [(][^)]*[)]: [0-9]+, Fatal", RESET, RESET),
    LogRule("sxid", "SXid [(][^)]*[)]: [0-9]+, ", MONITOR, MONITOR),
    LogRule("pcie", "Uncorrect(ed|able) [(]Fatal[)]", RESET, MONITOR),
    LogRule("pcie", "DPC: containment event", RESET, MONITOR),
    LogRule("pcie", "Uncorrect(ed|able) [(]Non-Fatal[)]", MONITOR, MONITOR),
    LogRule("pcie", "to D0, device inaccessible", REBOOT, REBOOT),
    # Near the threshold: "RAS records:240 exceeds 90% of threshold:256".
    LogRule("amdgpu", "RAS records:? *[0-9]+ exceeds 90", MONITOR, MONITOR),
    # More pages than the board may lose: amdgpu refuses the device at the next load.
    LogRule("amdgpu", "RAS records:? *[0-9]+ exceed|bad pages [0-9]+ reaches threshold", ISOLATE,
            ISOLATE),
    LogRule("amdgpu", "GPU reset[(0-9)]* failed|GPU reset end with ret = -", REBOOT, MONITOR),
    LogRule("amdgpu", "GPU [Rr]ecovery [Ff]ailed|[Mm](ode|ODE) ?[0-9] reset failed", REBOOT,
            MONITOR),
    LogRule(
        "amdgpu",
        "Fatal error during GPU init|([sh]w|late)_init of IP block .* failed"
        "|resume of IP block .* failed|amdgpu_device_ip_init failed",
        REBOOT,
    ),
    LogRule("amdgpu", "prob(e of [^ ]+|e with driver amdgpu) failed with error", REBOOT),
    # What the firmware found at power-on.
    LogRule(
        "amdgpu",
        "aid: [0-9]+, .*(training failed|failed at boot|boot failed|bist test failed"
        "|data abort exception|boot time errors|Boot Controller Generic Error)",
        REBOOT,
        MONITOR,
    ),
    # The driver makes the topology when it starts, and then works without these links.
    LogRule("amdgpu", "XGMI: (Set|Get) topology failure", REBOOT, REBOOT),
    LogRule("amdgpu", "device lost from bus|SMU: response:0x[Ff]+ for index", REBOOT, REBOOT),
    LogRule("amdgpu", _COUNT + "uncorrectable (hardware )?errors .*detected", RESET, MONITOR),
    LogRule("amdgpu", "[Uu]ncorrectable hardware error ?[(]", RESET, MONITOR),
    LogRule(
        "amdgpu",
        "poison is consumed|poison consumption, fall ?back|RAS poison consumption is issued|"
        + _COUNT
        + "poison consumption detected",
        RESET,
        MONITOR,
    ),
    LogRule("amdgpu", "RAS controller interrupt triggered by NBIF error", RESET, MONITOR),
    LogRule("amdgpu", "(XGMI|XGMI3X16|WAFL) PCS [A-Za-z]+ detected", RESET, MONITOR),
    LogRule("amdgpu", "PCI error: detected callback", RESET, MONITOR),
    LogRule("amdgpu", "ring [^ ]+ timeout, signaled", RESET, MONITOR, ring_resets=True),
    LogRule("amdgpu", "[Rr]ing [^ ]+ (reset fail|test failed)|IB test failed on", RESET, MONITOR),
    LogRule("amdgpu", "HW Exception by GPU|GPU hang|SMU is in hanged state", RESET, MONITOR),
    LogRule("amdgpu", "SMU: (I.m not done with your|No response msg_reg)", RESET, MONITOR),
    LogRule("amdgpu", "unrecoverable state|qcm fence wait loop timeout", RESET, MONITOR),
    LogRule("amdgpu", "MES([(][0-9]+[)])? (failed to respon[ds]|ring buffer is full)", RESET,
            MONITOR),
    LogRule(
        "amdgpu",
        "Failed to (evict|restore|quiesce|suspend) [A-Za-z ]*(queue|KFD)"
        "|[Qq]ueue preemption (failed|time)",
        RESET,
        MONITOR,
    ),
    # A reset that began, without a line about its end.
    LogRule("amdgpu", "GPU reset begin", RESET),
    # No program has used the data so far, and the driver takes the pages out of use.
    LogRule("amdgpu", _COUNT + "deferred (hardware )?errors? .*detected", MONITOR, MONITOR),
    LogRule("amdgpu", "Poison is created|poison consumption, unmap queue flow", MONITOR, MONITOR),
    # PPT alone is the limit on power: a busy GPU works at that limit.
    LogRule(
        "amdgpu",
        "GPU is throttled, expect performance decrease[.] .*(Prochot|SOC|VR|HBM)"
        "|thermal throttling temperature reached",
        MONITOR,
        MONITOR,
    ),
    LogRule("amdgpu", "hub[0-9]*[]].*page fault", APPLICATION, APPLICATION),
)  # fmt: skip

#: How every message begins.
ORIGIN = (
    r"^(NVRM: |nvidia-nvswitch[0-9]+: |nvidia( [0-9a-f]+)?:|pcieport "
    r"|amdgpu |amdgpu: |kfd kfd: |\[drm)"
)
#: Any of the patterns.
ANY = "|".join(rule.pattern for rule in RULES)
#: amdgpu's line after a reset, or a new load, that brought the device back.
RECOVERED = r"GPU reset[(0-9)]* succeeded|Initialized amdgpu [0-9.]+ .*on minor"
#: amdgpu's line after the reset of the ring that hung.
RING = r"Ring [^ ]+ reset succe"

BEGINNINGS = {
    "nvidia": ("NVRM: ", "nvidia ", "nvidia: "),
    "sxid": ("nvidia-nvswitch",),
    "amdgpu": ("amdgpu", "[drm", "kfd kfd: "),
    "pcie": ("pcieport ", "nvidia ", "amdgpu "),
}


def find_rule(text: str) -> LogRule | None:
    """The rule for a message without its time stamp."""
    for rule in RULES:
        if text.startswith(BEGINNINGS[rule.source]) and re.search(rule.pattern, text):
            return rule
    return None


def sxid_code(text: str) -> int | None:
    """The code of an SXid line."""
    match = re.search(r"SXid \([^)]*\): ([0-9]{1,9})\b", text)
    return int(match[1]) if match else None
