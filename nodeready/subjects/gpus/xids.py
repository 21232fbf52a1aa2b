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
    recurs: bool = False  # no application's fault where it comes back


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


@dataclass(frozen=True)
class LogRule:
    """What one kind of message means: a row of knowledge/driver_messages.toml."""

    key: str
    driver: str  # ``nvidia``, ``sxid`` (an NVSwitch), ``amdgpu`` or ``pcie``
    pattern: str  # of the kind that awk and Python share
    action: str  # the action for the fault
    source: str  # where this is documented
    after_reset: str = ""  # the action where a new load or a reset came after it; "": none
    least: int = 0  # the number of messages within within_s from which they count
    within_s: int = 86400
    fades: bool = False  # the message counts for a day
    ring_resets: bool = False  # the reset of one ring repairs the fault as well
    fix: str = ""  # what a person does, where the action does not say it
    rungs: tuple[str, ...] = ()  # of the ladder of that fix


#: The first rule that matches is the meaning of a message.
RULES = tuple(
    LogRule(key, **{**row, "rungs": tuple(row.get("rungs", ()))})
    for key, row in knowledge.rows("driver_messages").items()
)

#: How every message begins.
ORIGIN = (
    r"^(NVRM: |nvidia-nvswitch[0-9]*: |nvidia-modeset: |(module )?nvidia(_uvm)?( [0-9a-f]+)?:"
    r"|pcieport |(vfio-)?pci [0-9a-f]+:[0-9a-f]|nouveau |DMAR: "
    r"|amdgpu |amdgpu: |amdkcl: |amdttm: |xgpu_|kfd( kfd)?: |\[drm"
    r"|qcm fence wait|The cp might be in an unrecov"
    r"|last message was failed ret|failed to send message [0-9a-f]+ ret)"
)
#: Any of the patterns.
ANY = "|".join(rule.pattern for rule in RULES)
#: amdgpu's line after a reset, or a new load, that brought the device back.
RECOVERED = r"GPU reset[(0-9)]* succeeded|Initialized amdgpu [0-9.]+ .*on minor"
#: amdgpu's line after the reset of the ring that hung.
RING = r"Ring [^ ]+ reset succe"

BEGINNINGS = {
    "nvidia": (
        "NVRM: ", "nvidia ", "nvidia: ", "nvidia_uvm: ", "module nvidia", "nvidia-modeset: ",
        "nouveau ", "pci ",
    ),
    "sxid": ("nvidia-nvswitch",),
    # Older kernels print some messages of amdgpu and amdkfd without the driver's name.
    "amdgpu": (
        "amdgpu", "amdkcl: ", "amdttm: ", "xgpu_", "[drm", "kfd: ", "kfd kfd: ",
        "qcm fence wait", "The cp might be in an unrecov", "last message was failed ret",
        "failed to send message ",
    ),
    "pcie": ("nvidia ", "amdgpu ", "pcieport ", "pci ", "vfio-pci ", "DMAR: "),
}  # fmt: skip


def find_rule(text: str) -> LogRule | None:
    """The rule for a message without its time stamp."""
    for rule in RULES:
        if text.startswith(BEGINNINGS[rule.driver]) and re.search(rule.pattern, text):
            return rule
    return None


def sxid_code(text: str) -> int | None:
    match = re.search(r"SXid \([^)]*\): ([0-9]{1,9})\b", text)
    return int(match[1]) if match else None
