"""Judge the faults of GPUs in the kernel's log of this boot."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check
from nodeready.core.severity import XID_CATALOG, loses_job
from nodeready.subjects.gpus import xids
from nodeready.subjects.gpus.findings import expected_gpus, first_few, no_gpu_reason
from nodeready.subjects.gpus.gpu import Gpus, KernelFault

#: The actions for faults of the node; the others need none, or are an application's.
_NODE_ACTIONS = (xids.ISOLATE, xids.REBOOT, xids.RESET)
_VENDOR = "open a case with the vendor if it comes back"
_RELOAD = "load the driver's module anew, or reboot: programs of another version asked for it"
_NO_ADDRESS = "set Above 4G Decoding in the firmware's setup, or pci=realloc=on, then reboot"
_KEEP_LOG = (
    "read the older lines by hand (/var/log/kern.log, a log server); from the next boot on: "
    "systemd-journald, or log_buf_len=16M on the kernel's command line"
)
_MAX_CHARACTERS = 70
_COST = loses_job(
    *("monitor", "configure", "reset_gpu", "reload_driver", "reboot", "replace"),
    source=f"{XID_CATALOG}; the messages of amdgpu",
)
#: The action of a fault -> the first rung of the ladder.
_RUNGS = {
    xids.ISOLATE: "replace",
    xids.REBOOT: "reboot",
    xids.RESET: "reset_gpu",
    xids.MONITOR: "monitor",
}


def _describe(fault: KernelFault) -> str:
    """``Xid 79 GPU has fallen off the bus``; for the rest, the line without its device."""
    if fault.source == "xid" and fault.code is not None:
        xid = xids.XIDS.get(fault.code)
        return f"Xid {fault.code} {xid.meaning}" if xid else f"unknown Xid {fault.code}"
    text = re.sub(
        r"^(NVRM:|nvidia-nvswitch\d+:|amdgpu:|kfd kfd:( amdgpu:)?|(amdgpu|nvidia|pcieport) \S+:"
        r"( amdgpu:)?)\s*",
        "",
        fault.text,
    )
    text = re.sub(r"^GPU [0-9a-f:.]+:\s*", "", text)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _device_name(observed: Gpus, fault: KernelFault) -> str:
    """``gpu 3 (0000:5e:00.0)``; the address alone when no tool shows the device."""
    for gpu in observed.gpus:
        if gpu.pci_address == fault.pci_address:
            return f"gpu {gpu.index} ({gpu.pci_address})"
    return fault.pci_address or "an unnamed device"


def _gravity(fault: KernelFault) -> int:
    return xids.ACTIONS.index(fault.action)


def faults_in_words(observed: Gpus, faults: Iterable[KernelFault]) -> str:
    """The faults in words: fault, devices and count; the gravest action first."""
    groups: dict[str, list[KernelFault]] = {}
    for fault in sorted(faults, key=_gravity):
        groups.setdefault(_describe(fault), []).append(fault)
    words = []
    for description, group in groups.items():
        times = sum(fault.count for fault in group)
        devices = first_few(list(dict.fromkeys(_device_name(observed, fault) for fault in group)))
        words.append(f"{description}: {devices}" + (f", {times} times" if times > 1 else ""))
    return first_few(words)


def _fix(observed: Gpus, worst: KernelFault) -> str:
    """The fix of the gravest fault."""
    device = _device_name(observed, worst)
    if worst.action == xids.ISOLATE:
        return f"drain the node and open a case with the vendor: {device}"
    if " is 0M @" in worst.text:
        return _NO_ADDRESS
    if worst.action == xids.REBOOT:
        return f"drain and reboot the node; {_VENDOR}: {device}"
    if worst.source == "sxid":
        return f"drain, then reset all GPUs and restart the fabric manager; {_VENDOR}"
    address = worst.pci_address or ""
    # Another function of the same card counts, and so does a GPU that the tool does not show.
    cards = {gpu.address[:10] for gpu in observed.pci if gpu.vendor == "amd"}
    if worst.source == "amdgpu" or address[:10] in cards:
        indexes = {(gpu.pci_address or "")[:10]: gpu.index for gpu in observed.amd}
        index = indexes.get(address[:10], "N")
        return f"drain, then amd-smi reset --gpureset --gpu {index}; {_VENDOR}"
    return f"drain, then nvidia-smi --gpu-reset -i {worst.pci_address or 'N'}; {_VENDOR}"


def _is_cleared(observed: Gpus, fault: KernelFault) -> bool:
    """Whether the driver reports that the device needs no reset any more.

    The log keeps a fault after the reset that repaired it, and NVIDIA's driver logs no reset. Only
    a driver that names its recovery action takes such faults into account (Xid 154). The
    ``reset_required`` of older drivers is about other faults.
    """
    return (
        fault.action == xids.RESET
        and xids.is_cleared_by_action(fault.code, observed.driver)
        and any(
            gpu.recovery_named and gpu.recovery == "none" and gpu.pci_address == fault.pci_address
            for gpu in observed.gpus
        )
    )


@check(
    "gpus.kernel_faults",
    _COST,
    settings=("xid_ignore",),
    fix=(
        f"drain, then nvidia-smi --gpu-reset -i PCI ADDRESS; {_VENDOR}",
        "drain the node and open a case with the vendor: WHERE",
        f"drain and reboot the node; {_VENDOR}: WHERE",
        f"drain, then reset all GPUs and restart the fabric manager; {_VENDOR}",
        f"drain, then amd-smi reset --gpureset --gpu INDEX; {_VENDOR}",
        _VENDOR,
        _RELOAD,
        _NO_ADDRESS,
        _KEEP_LOG,
    ),
    expects="no fault of a GPU since the boot",
)
def kernel_faults(observed: Gpus, policy: Policy) -> Result:
    """The kernel has reported no fault of a GPU since the boot (policy xid_ignore).

    A fault of the device fails, with the remedy of NVIDIA's Xid catalog or of amdgpu's message:
    isolate, reboot or reset. A fault to monitor, or from which the driver has recovered, warns. A
    fault that an application caused in itself (13, 31, 43, 45, a page fault) is not the node's. A
    ring buffer that begins after the boot may have lost a fault: without a journal, a warning.
    """
    if reason := no_gpu_reason(observed):
        return kernel_faults.na(reason)
    log = observed.kernel_log
    if not log.works:
        return kernel_faults.unknown(log.state_text)
    source = f"{log.name} ({log.detail})"
    # Screens, a processor's own graphics, and GPUs of guests.
    judged = {gpu.address for gpu in expected_gpus(observed)}
    judged |= {gpu.pci_address for gpu in observed.gpus}
    unjudged = {gpu.address for gpu in observed.pci} - judged
    faults = [
        fault
        for fault in observed.kernel_faults
        if not (fault.source == "xid" and fault.code in policy.xid_ignore)
        and fault.pci_address not in unjudged
    ]
    node_faults = [
        fault
        for fault in faults
        if fault.action in _NODE_ACTIONS and not _is_cleared(observed, fault)
    ]
    if node_faults:
        worst = min(node_faults, key=_gravity)
        fix, actions = _fix(observed, worst), _COST.since(_RUNGS[worst.action])
        if fix == _NO_ADDRESS:
            actions = ("configure",)
        text = faults_in_words(observed, node_faults)
        return kernel_faults.fail(text, source, fix, actions=actions)
    watched = [fault for fault in faults if fault.action != xids.APPLICATION]
    if watched:
        is_mismatch = all(fault.text.startswith("NVRM: API mismatch") for fault in watched)
        fix, actions = _VENDOR, ("monitor", "replace")
        if is_mismatch:
            fix, actions = _RELOAD, ("reload_driver", "reboot")
        return kernel_faults.warn(faults_in_words(observed, watched), source, fix, actions=actions)
    start = log.detail.partition(", which ")[2]
    start_text = f" in a log that {start}" if start else ""
    words = f"none{start_text}"
    if faults:
        words = f"only of applications{start_text}: {faults_in_words(observed, faults)}"
    if start_text and log.detail.startswith("dmesg"):
        return kernel_faults.warn(words, source, _KEEP_LOG, actions=("configure",))
    return kernel_faults.ok(words, source)
