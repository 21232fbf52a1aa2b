"""Judge a node's GPUs: all there, shown by their tool, and as the policy has them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.core.base import grouped
from nodeready.core.policy import Policy
from nodeready.core.result import FactKinds, Result, Subject, by_value, check, join_names
from nodeready.core.severity import GUIDELINES, XID_CATALOG, drifts, loses_job, slows_job
from nodeready.subjects.gpus import findings, health, xids
from nodeready.subjects.gpus.facts import PROBE, compared, learned
from nodeready.subjects.gpus.gpu import Gpu, Gpus, KernelFault
from nodeready.subjects.gpus.peers import FAST_GBPS

# --- The faults of GPUs in the kernel's log of this boot.

#: The actions for faults of the node. Any further Xid needs no action, or is an application's.
_NODE_ACTIONS = (xids.ISOLATE, xids.REBOOT, xids.RESET)
_VENDOR = "open a case with the vendor if it comes back"
_MAX_CHARACTERS = 70
_COST = loses_job(
    *("monitor", "configure", "reset_gpu", "reload_driver", "reboot", "replace"),
    source=f"{XID_CATALOG}; the messages of amdgpu",
)
#: The action of a fault -> the first rung of the ladder.
_RUNGS = {
    xids.ISOLATE: "replace", xids.REBOOT: "reboot", xids.RESET: "reset_gpu",
    xids.MONITOR: "monitor",
}  # fmt: skip


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
    groups = grouped((_describe(fault), fault) for fault in sorted(faults, key=_gravity))
    words = []
    for description, group in groups.items():
        times = sum(fault.count for fault in group)
        devices = join_names(list(dict.fromkeys(_device_name(observed, fault) for fault in group)))
        words.append(f"{description}: {devices}" + (f", {times} times" if times > 1 else ""))
    return join_names(words)


def _own_remedy(fault: KernelFault) -> tuple[str, tuple[str, ...]] | None:
    """The remedy that the fault's row has: what a person does, and the rungs of the ladder."""
    rule = None if fault.source == "xid" else xids.find_rule(fault.text)
    return (rule.fix, rule.rungs) if rule is not None and rule.fix else None


def _fix(observed: Gpus, worst: KernelFault) -> str:
    device = _device_name(observed, worst)
    if worst.action == xids.ISOLATE:
        return f"drain the node and open a case with the vendor: {device}"
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


@check("gpus.kernel_faults", _COST, settings=("xid_ignore",),
       expects="no fault of a GPU since the boot", fix=(
    f"drain, then nvidia-smi --gpu-reset -i PCI ADDRESS; {_VENDOR}",
    "drain the node and open a case with the vendor: WHERE",
    f"drain and reboot the node; {_VENDOR}: WHERE",
    f"drain, then reset all GPUs and restart the fabric manager; {_VENDOR}",
    f"drain, then amd-smi reset --gpureset --gpu INDEX; {_VENDOR}",
    _VENDOR,
    *(rule.fix for rule in xids.RULES if rule.fix),
))  # fmt: skip
def kernel_faults(observed: Gpus, policy: Policy) -> Result:
    """The kernel has reported no fault of a GPU since the boot (policy xid_ignore).

    A fault of the device fails, with the remedy of NVIDIA's Xid catalog or of amdgpu's message:
    isolate, reboot or reset. A fault to monitor, or from which the driver has recovered, warns. A
    fault that an application caused in itself (13, 31, 43, 45, a page fault) is not the node's. A
    log that begins after the boot may have lost a fault: the answer says when the log begins.
    """
    if reason := findings.no_gpu_reason(observed):
        return kernel_faults.na(reason)
    log = observed.kernel_log
    if not log.works:
        return kernel_faults.unknown(log.state_text)
    source = f"{log.name} ({log.detail})"
    # Screens, a processor's own graphics, and GPUs of guests.
    expected = findings.expected_gpus(observed)
    vendors = {gpu.vendor for gpu in expected} | {gpu.vendor for gpu in observed.gpus}
    judged = {gpu.address for gpu in expected}
    judged |= {gpu.pci_address for gpu in observed.gpus}
    unjudged = {gpu.address for gpu in observed.pci} - judged
    faults = [
        fault
        for fault in observed.kernel_faults
        if not (fault.source == "xid" and fault.code in policy.xid_ignore)
        and fault.pci_address not in unjudged
        and {"amdgpu": "amd", "nvidia": "nvidia"}.get(fault.source) in (None, *vendors)
    ]
    node_faults = [
        fault
        for fault in faults
        if fault.action in _NODE_ACTIONS and not _is_cleared(observed, fault)
    ]
    if node_faults:
        worst = min(node_faults, key=_gravity)
        by_action = _fix(observed, worst), _COST.since(_RUNGS[worst.action])
        fix, actions = _own_remedy(worst) or by_action
        text = faults_in_words(observed, node_faults)
        return kernel_faults.fail(text, source, fix, actions=actions)
    if watched := [fault for fault in faults if fault.action != xids.APPLICATION]:
        remedies = list(map(_own_remedy, watched))
        remedy = remedies[0] if all(remedies) else None
        fix, actions = remedy or (_VENDOR, ("monitor", "replace"))
        return kernel_faults.warn(faults_in_words(observed, watched), source, fix, actions=actions)
    start = log.detail.partition(", which ")[2]
    start_text = f" in a log that {start}" if start else ""
    words = f"none{start_text}"
    if faults:
        words = f"only of applications{start_text}: {faults_in_words(observed, faults)}"
    return kernel_faults.ok(words, source)


_PCI = "/sys/bus/pci/devices"
_COST_ABSENT = loses_job(
    *("install", "reset_gpu", "reboot", "power_cycle", "reseat", "replace"), source=GUIDELINES
)
_SEE_LOG, _LOAD = "see the kernel's log; reset or reseat it", "install or load the driver"


@check("gpus.present", _COST_ABSENT, expects="each GPU has its driver and is shown",
       fix=(_SEE_LOG, _LOAD))  # fmt: skip
def present(observed: Gpus, policy: Policy) -> Result:
    """Each GPU on the PCI bus has its driver and is shown by its vendor's tool.

    A GPU that the bus shows and its tool does not show has fallen off the bus, or its driver is
    broken. GPUs of virtual machines (vfio-pci) and of screens do not count.
    """
    if reason := findings.no_gpu_reason(observed):
        return present.na(reason)
    gpus = findings.expected_gpus(observed)
    shown = {gpu.pci_address for gpu in observed.gpus}
    lost = [gpu for gpu in gpus if gpu.address not in shown]
    without_driver = [gpu for gpu in lost if gpu.driver != findings.DRIVERS[gpu.vendor]]
    not_shown = [gpu for gpu in lost if findings.vendor_tool_of(observed, gpu.vendor).works]
    words = [
        f"{gpu.address}: driver {gpu.driver}" if gpu.driver else f"{gpu.address}: no driver"
        for gpu in without_driver
    ]
    words += [
        f"{gpu.address}: {findings.vendor_tool_of(observed, gpu.vendor).name} does not show it"
        for gpu in not_shown
        if gpu not in without_driver
    ]
    if words:
        actions = _COST_ABSENT.since("reset_gpu") if not_shown else ()
        fix = _SEE_LOG if not_shown else _LOAD
        return present.fail(join_names(words), _PCI, fix, actions=actions)
    if hidden := findings.unshown_reason(observed):
        return present.unknown(hidden)
    return present.ok(f"{len(gpus) or len(observed.gpus)} GPUs", _PCI)


_PACKAGES = {
    "nvidia": "install nvidia-smi with the driver's utilities",
    "amd": "install amd-smi or rocm-smi",
}
_REBOOT, _TRY = "reboot the node: it cannot be ended", "run it by hand; see dmesg"


@check("gpus.tool", loses_job("inspect", "install", "reboot"), expects="the vendor's tool answers",
       fix=(_REBOOT, _TRY))  # fmt: skip
def tool(observed: Gpus, policy: Policy) -> Result:
    """The vendor's tool answers: most other checks need its answer.

    A tool that hangs here hangs in jobs, too. A tool that is not installed stops no job, but its
    GPUs are not judged. An error in the place of a value that no other check reads is unknown
    here.
    """
    if reason := findings.no_gpu_reason(observed):
        return tool.na(reason)
    vendors = [vendor for vendor in findings.DRIVERS if findings.expected_gpus(observed, vendor)]
    tools = {vendor: findings.vendor_tool_of(observed, vendor) for vendor in vendors}
    broken = [tool for tool in tools.values() if tool.state in ("stuck", "timed out", "failed")]
    if broken:
        text = "; ".join(tool.state_text for tool in broken)
        stuck = any(tool.state == "stuck" for tool in broken)
        fix, actions = (_REBOOT, ("reboot",)) if stuck else (_TRY, ("inspect", "reboot"))
        return tool.fail(text, broken[0].name, fix, actions=actions)
    for vendor, vendor_tool in tools.items():
        if vendor_tool.state == "missing":
            name, actions = vendor_tool.name, ("install",)
            return tool.warn(f"{name} is not installed", name, _PACKAGES[vendor], actions=actions)
    for vendor_tool in tools.values():
        if not vendor_tool.works:
            return tool.unknown(f"{vendor_tool.name}: {vendor_tool.state}: {vendor_tool.detail}")
    unread = {field for gpu in observed.gpus for field, _ in gpu.unread}
    stray_fields = {field for field in unread if field.startswith("tool ")}
    if unreadable := findings.unreadable_text(observed, stray_fields):
        return tool.unknown(unreadable)
    return tool.ok(", ".join(f"{tool.name} {tool.detail}".strip() for tool in tools.values()))


@check("gpus.count", loses_job("reboot", "power_cycle", "reseat", "replace", source=GUIDELINES),
       settings=("gpu_count",),
       fix="see the kernel's log and the BMC; reseat or replace it")  # fmt: skip
def count(observed: Gpus, policy: Policy) -> Result:
    """The PCI bus shows as many GPUs as the policy says.

    `gpus.present` judges whether each of them works.
    """
    if policy.gpu_count is None:
        return count.na(findings.no_gpu_reason(observed) or "the policy sets no number")
    check = count.expecting(str(policy.gpu_count))
    gpu_count = len(findings.expected_gpus(observed)) or len(
        {(gpu.vendor, gpu.pci_address) for gpu in observed.gpus}
    )
    if gpu_count != policy.gpu_count:
        guests = sum(findings.is_guest(gpu) for gpu in observed.pci)
        guests_text = f", and {guests} of virtual machines" if guests else ""
        return check.fail(f"{gpu_count} on the PCI bus{guests_text}", _PCI)
    return check.ok(source=_PCI)


_MIXED = "set gpu_model in the policy, and replace the GPU of another variant"


@check("gpus.model", drifts("configure"), settings=("gpu_model",), fix=_MIXED)
def model(observed: Gpus, policy: Policy) -> Result:
    """The GPUs are of the policy's model, by the name that their tool prints.

    Without a policy, variants of one model (H20 and H20-3e, A100 with 40 and 80 GB) are a warning:
    a job runs at the pace and in the memory of the smallest. Different models may be meant.
    """
    models = sorted({gpu.model for gpu in observed.gpus if gpu.model})
    variants = {name.partition("-")[0] for name in models}
    if not policy.gpu_model and len(variants) < len(models):
        return model.warn(", ".join(models), expected="one variant of a model")
    return findings.judge_each(
        *(model, observed, "model"),
        lambda gpu: "" if policy.gpu_model in ("", gpu.model) else str(gpu.model),
        absent="no tool names a model",
        expected=policy.gpu_model or "any",
    )


_INSTALL = "install that driver, then reboot"


@check("gpus.driver", loses_job("install", "reboot"), settings=("gpu_driver",),
       fix=("install or load NAME; see dmesg", _INSTALL))  # fmt: skip
def driver(observed: Gpus, policy: Policy) -> Result:
    """The kernel driver is loaded, in the policy's version where that names one."""
    if reason := findings.no_gpu_reason(observed):
        return driver.na(reason)
    versions = {"nvidia": observed.driver, "amd": observed.amd_driver}
    check, words = driver.expecting(policy.gpu_driver or "loaded"), list[str]()
    for vendor, name in findings.DRIVERS.items():
        gpus = findings.expected_gpus(observed, vendor)
        bound, version = any(gpu.driver == name for gpu in gpus), versions[vendor]
        if gpus and not bound and version is None:
            return check.fail(f"{name} is not loaded", _PCI, f"install or load {name}; see dmesg")
        if version is None and bound and policy.gpu_driver:
            return driver.unknown(f"{name} does not say its version")
        if version is not None or bound:
            words.append(f"{name} {version or 'loaded'}")
            if policy.gpu_driver and version != policy.gpu_driver:
                return check.fail(f"{name} {version}", f"/sys/module/{name}", _INSTALL)
    return check.ok(", ".join(words) or "loaded")


@check("gpus.vbios", drifts("install"), settings=("gpu_vbios",),
       fix="update the firmware with the vendor's package")  # fmt: skip
def vbios(observed: Gpus, policy: Policy) -> Result:
    """Each GPU's firmware is one of the policy's versions."""
    versions = policy.gpu_vbios
    return findings.judge_each(
        *(vbios, observed, "vbios"),
        lambda gpu: str(gpu.vbios) if versions and gpu.vbios not in versions else "",
        absent="no tool shows a VBIOS version",
        expected=" or ".join(versions) or "any",
    )


def _not_kept(expectation: str, current: str | None, pending: str | None) -> str:
    """The mode now and after the next reset; "" when both are as expected."""
    after = pending or current
    if (current, after) == (expectation, expectation):
        return ""
    return str(current) if current == after else f"{current}, {after} after a reset"


#: Memory errors are part of RAS, which the driver enables by itself (Linux' amdgpu_drv.c).
_AMD_ECC = "see amdgpu.ras_enable and ras_mask on the kernel's command line, then reboot"
#: Cards for workstations and games, whose memory has ECC and which are delivered without it.
_DELIVERED_WITHOUT_ECC = re.compile(r"\b(GeForce|Quadro|TITAN|RTX)\b(?!.*Server Edition)")


@check("gpus.ecc_mode",
       loses_job("configure", "reset_gpu", "reboot", source="nvidia-smi(1), --ecc-config"),
       settings=("gpu_ecc",),
       fix=("nvidia-smi -e INT, then reset the GPU or reboot", _AMD_ECC))  # fmt: skip
def ecc_mode(observed: Gpus, policy: Policy) -> Result:
    """ECC is as the policy has it, now and after the next reset of the GPU."""
    if policy.gpu_ecc == "any":
        return ecc_mode.na("gpu_ecc is 'any'")
    by_default = policy.gpu_ecc == "default"
    expected = "on" if by_default else policy.gpu_ecc

    def find_problem(gpu: Gpu) -> str:
        if by_default and _DELIVERED_WITHOUT_ECC.search(gpu.model or ""):
            return ""
        return _not_kept(expected, gpu.ecc, gpu.ecc_pending)

    faulty = [gpu for gpu in observed.gpus if gpu.ecc is not None and find_problem(gpu)]
    fix = f"nvidia-smi -e {int(expected == 'on')}, then reset the GPU or reboot"
    return findings.judge_each(
        *(ecc_mode, observed, "ecc", find_problem),
        absent="these GPUs have no ECC",
        expected=expected,
        fix=_AMD_ECC if all(gpu.vendor == "amd" for gpu in faulty) else fix,
        reads=("ecc", "ecc_pending"),
    )


@check("gpus.persistence", slows_job("configure"), settings=("gpu_persistence",),
       fix="systemctl enable --now nvidia-persistenced, or nvidia-smi -pm INT")  # fmt: skip
def persistence(observed: Gpus, policy: Policy) -> Result:
    """NVIDIA's driver stays loaded between jobs, as the policy has it.

    Otherwise the first use of a GPU initialises it anew, which takes seconds, and settings such as
    power limits are lost (nvidia-persistenced(1)).
    """
    expected = policy.gpu_persistence
    if expected == "any":
        return persistence.na("gpu_persistence is 'any'")
    action, flag = ("enable", 1) if expected == "on" else ("disable", 0)
    return findings.judge_each(
        *(persistence, observed, "persistence"),
        lambda gpu: "" if gpu.persistence == expected else str(gpu.persistence),
        absent="these GPUs have no such mode",
        expected=expected,
        fix=f"systemctl {action} --now nvidia-persistenced, or nvidia-smi -pm {flag}",
    )


_DIVIDE = "amd-smi set --compute-partition MODE and --memory-partition MODE, when no job runs"


@check("gpus.mig", loses_job("configure"), settings=("gpu_mig",),
       fix=("nvidia-smi -mig INT, when no job runs", _DIVIDE))  # fmt: skip
def mig(observed: Gpus, policy: Policy) -> Result:
    """MIG is as the policy has it, now and after the next reset: it splits a GPU into several.

    Modes of compute units and memory divide AMD's GPUs (SPX/NPS1 is one GPU). GPUs of one model in
    different modes are a warning under every policy.
    """
    expected = policy.gpu_mig
    partitions = [(gpu, getattr(gpu, "partition", None)) for gpu in observed.amd]
    divided = [(gpu, mode) for gpu, mode in partitions if mode is not None]
    if len({(gpu.model, mode) for gpu, mode in divided}) > len({gpu.model for gpu, _ in divided}):
        text, name = findings.findings_text(divided), observed.amd_tool.name
        return mig.warn(text, name, _DIVIDE, expected="one mode on all GPUs")
    if expected == "any":
        return mig.na("gpu_mig is 'any'")
    return findings.judge_each(
        *(mig, observed, "mig"),
        lambda gpu: _not_kept(expected, gpu.mig, gpu.mig_pending),
        absent="these GPUs have no MIG",
        expected=expected,
        fix=f"nvidia-smi -mig {int(expected == 'on')}, when no job runs",
        reads=("mig", "mig_pending"),
    )


#: Above this share of used memory without a process something holds it: the driver of an idle data
#: centre GPU uses less than a hundredth (103 of 16384 MiB of a P100: wookayin/gpustat issue 130).
_OCCUPIED_SHARE = 0.1


@check(
    "gpus.processes",
    loses_job("clean_up"),
    settings=("gpu_idle",),
    fix="end them; a name like [Not Found] is a process of a container, or one that is dead; if "
    "memory stays taken, reset the GPU",
    expects="none",
)
def processes(observed: Gpus, policy: Policy) -> Result:
    """No process computes on a GPU of a node that has no job (policy gpu_idle).

    A process that a job left behind takes memory and time from the next job. An X server only
    draws, and does not count. Where no process is shown and more than a tenth of an NVIDIA GPU's
    memory is taken, a hidden process has it (a container's), or one that died in the driver. A GPU
    beside a Grace processor is left out: the kernel keeps its own pages there.
    """
    if not policy.gpu_idle:
        return processes.na("jobs may run: gpu_idle is off")

    def find_problem(gpu: Gpu) -> str:
        used_mb, total_mb = gpu.memory_used_mb or 0, gpu.memory_total_mb or 0
        is_counted = gpu.vendor == "nvidia" and gpu.mig != "on" and gpu.c2c != "on"
        if is_counted and not gpu.processes and used_mb > _OCCUPIED_SHARE * total_mb > 0:
            return f"{used_mb} of {total_mb} MiB taken without a process"
        return join_names(
            f"pid {process.pid} {process.name}"
            + ("" if process.memory_mb is None else f" {process.memory_mb} MiB")
            for process in gpu.processes
            if process.kind != "G"
        )

    return findings.judge_each(
        *(processes, observed, lambda gpu: True, find_problem),
        absent="",
        shown="none",
        reads=("processes",),
    )


# --- Whether GPUs and fast RDMA adapters reach each other's memory without a detour.
#
# A deploy changes nothing here: a repair takes isolation away, which a person has to decide.

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


_ELEMENTS = {
    "pci": "address", "nvidia": "pci_address", "nvidia.links": "index", "amd": "pci_address",
    "amd.links": "index", "peers.devices": "kind name", "peers.ports": "address",
    "device_files": "path", "kernel_faults": "source code pci_address",
}  # fmt: skip
#: In the order of the reports.
_CHECKS = (
    present, tool, count, model, driver, vbios, health.recovery, ecc_mode, health.ecc_errors,
    health.remapped_rows, health.retired_pages, health.pcie, health.throttle, health.temperature,
    persistence, mig, processes, health.nvlink, health.xgmi_errors,
    health.fabric_manager, health.device_access, acs, iommu, peermem, kernel_faults,
)  # fmt: skip
SUBJECT = Subject(
    "gpus", __doc__, checks=_CHECKS, probe=PROBE, compared=compared, learned=learned,
    kinds=FactKinds(
        volatile="""
            detail aer
            kernel_faults.source kernel_faults.code kernel_faults.pci_address kernel_faults.text
            kernel_faults.action kernel_faults.first_s kernel_faults.last_s
            memory_used_mb processes performance_state idle throttle throttled temperature_c
            temperature_slowdown_c
            memory_temperature_c memory_temperature_max_c temperature_left_c
            pcie_generation pcie_speed peers.unread peers.kernel peers.devices
        """,
        counters="""
            kernel_faults.count
            ecc_uncorrectable_volatile ecc_correctable_volatile
        """,
        hardware="""
            pci pci.driver nvswitches index vendor pci_address model serial uuid memory_total_mb
            ecc_uncorrectable_aggregate remap_pending remap_failed remapped_uncorrectable
            retired_pending retired_pages repair_pending spareless_banks sram_exceeded unrepairable
            pcie_generation_max pcie_width pcie_width_max links virtual peer c2c
            peers.ports.address peers.ports.model
        """,
        versions="driver amd_driver cuda vbios",
        unique="serial uuid fabric_clique",
        elements=_ELEMENTS,
    ),
)  # fmt: skip
