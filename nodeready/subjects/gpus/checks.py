"""Judge a node's GPUs: all there, shown by their tool, and as the policy has them."""

from __future__ import annotations

import re

from nodeready.core.fact_kinds import FactKinds
from nodeready.core.policy import Policy
from nodeready.core.result import Result, Subject, check, fail, na, ok, unknown, warn
from nodeready.core.severity import GUIDELINES, drifts, loses_job, slows_job
from nodeready.subjects.gpus.amd_gpu import AmdGpu
from nodeready.subjects.gpus.facts import PROBE, compared, learned
from nodeready.subjects.gpus.fault_checks import kernel_faults
from nodeready.subjects.gpus.findings import (
    DRIVERS,
    expected_gpus,
    findings_text,
    first_few,
    is_guest,
    judge_each,
    no_gpu_reason,
    unreadable_gpus,
    unshown_gpus,
    unshown_reason,
    vendor_tool_of,
)
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.health import (
    device_access,
    ecc_errors,
    pcie,
    recovery,
    remapped_rows,
    retired_pages,
    temperature,
    throttle,
)
from nodeready.subjects.gpus.link_checks import fabric_manager, nvlink, xgmi_errors

_PCI = "/sys/bus/pci/devices"
_PACKAGES = {
    "nvidia": "install nvidia-smi with the driver's utilities",
    "amd": "install amd-smi or rocm-smi",
}


_COST_ABSENT = loses_job(
    *("install", "reset_gpu", "reboot", "power_cycle", "reseat", "replace"), source=GUIDELINES
)


@check(
    "gpus.present",
    _COST_ABSENT,
    fix=("see the kernel's log; reset or reseat it", "install or load the driver"),
)
def present(observed: Gpus, policy: Policy) -> Result:
    """Each GPU on the PCI bus has its driver and is shown by its vendor's tool.

    A GPU that the bus shows and its tool does not show has fallen off the bus, or its driver is
    broken. GPUs of virtual machines (vfio-pci) and of screens do not count.
    """
    check, reason = "gpus.present", no_gpu_reason(observed)
    if reason:
        return na(check, reason)
    gpus = expected_gpus(observed)
    lost = {gpu.address for gpu in unshown_gpus(observed)}
    without_driver = [
        gpu for gpu in gpus if gpu.driver != DRIVERS[gpu.vendor] and gpu.address in lost
    ]
    not_shown = [
        gpu for gpu in gpus if gpu.address in lost and vendor_tool_of(observed, gpu.vendor).works
    ]
    words = [
        f"{gpu.address}: driver {gpu.driver}" if gpu.driver else f"{gpu.address}: no driver"
        for gpu in without_driver
    ]
    words += [
        f"{gpu.address}: {vendor_tool_of(observed, gpu.vendor).name} does not show it"
        for gpu in not_shown
        if gpu not in without_driver
    ]
    expectation = "each GPU has its driver and is shown"
    if words:
        fix = (
            "see the kernel's log; reset or reseat it"
            if not_shown
            else "install or load the driver"
        )
        actions = _COST_ABSENT.since("reset_gpu") if not_shown else ()
        return fail(check, expectation, first_few(words), _PCI, fix, actions=actions)
    if hidden := unshown_reason(observed):
        return unknown(check, hidden)
    return ok(check, expectation, f"{len(gpus) or len(observed.gpus)} GPUs", _PCI)


@check(
    "gpus.tool",
    loses_job("inspect", "install", "reboot"),
    fix=("reboot the node: it cannot be ended", "run it by hand; see dmesg"),
)
def tool(observed: Gpus, policy: Policy) -> Result:
    """The vendor's tool answers: most other checks need its answer.

    A tool that hangs here hangs in jobs, too. A tool that is not installed stops no job, but its
    GPUs are not judged. An error in the place of a value that no other check reads is unknown
    here.
    """
    check, expectation = "gpus.tool", "the vendor's tool answers"
    if reason := no_gpu_reason(observed):
        return na(check, reason)
    vendors = [vendor for vendor in DRIVERS if expected_gpus(observed, vendor)]
    tools = {vendor: vendor_tool_of(observed, vendor) for vendor in vendors}
    broken = [tool for tool in tools.values() if tool.state in ("stuck", "timed out", "failed")]
    if broken:
        text = "; ".join(tool.state_text for tool in broken)
        stuck = any(tool.state == "stuck" for tool in broken)
        fix = "reboot the node: it cannot be ended" if stuck else "run it by hand; see dmesg"
        actions = ("reboot",) if stuck else ("inspect", "reboot")
        return fail(check, expectation, text, broken[0].name, fix, actions=actions)
    for vendor, vendor_tool in tools.items():
        if vendor_tool.state == "missing":
            text = f"{vendor_tool.name} is not installed"
            fix = _PACKAGES[vendor]
            return warn(check, expectation, text, vendor_tool.name, fix, actions=("install",))
    for vendor_tool in tools.values():
        if not vendor_tool.works:
            return unknown(check, f"{vendor_tool.name}: {vendor_tool.state}: {vendor_tool.detail}")
    stray_fields = {
        field for gpu in observed.gpus for field, _ in gpu.unread if field.startswith("tool ")
    }
    if unreadable := unreadable_gpus(observed, stray_fields):
        return unknown(check, findings_text(unreadable))
    names = [f"{tool.name} {tool.detail}".strip() for tool in tools.values()]
    return ok(check, expectation, ", ".join(names))


@check(
    "gpus.count",
    loses_job("reboot", "power_cycle", "reseat", "replace", source=GUIDELINES),
    settings=("gpu_count",),
    fix=("see the kernel's log and the BMC; reseat or replace it",),
)
def count(observed: Gpus, policy: Policy) -> Result:
    """The PCI bus shows as many GPUs as the policy says.

    `gpus.present` judges whether each of them works.
    """
    check, expectation = "gpus.count", policy.gpu_count
    if expectation is None:
        return na(check, no_gpu_reason(observed) or "the policy sets no number")
    gpu_count = len(expected_gpus(observed)) or len(
        {(gpu.vendor, gpu.pci_address) for gpu in observed.gpus}
    )
    if gpu_count != expectation:
        guests = sum(is_guest(gpu) for gpu in observed.pci)
        guests_text = f", and {guests} of virtual machines" if guests else ""
        fix = "see the kernel's log and the BMC; reseat or replace it"
        return fail(check, str(expectation), f"{gpu_count} on the PCI bus{guests_text}", _PCI, fix)
    return ok(check, str(expectation), source=_PCI)


@check("gpus.model", drifts("configure"), settings=("gpu_model",))
def model(observed: Gpus, policy: Policy) -> Result:
    """The GPUs are of the policy's model, by the name that their tool prints."""

    def find_problem(gpu: Gpu) -> str:
        return "" if policy.gpu_model in ("", gpu.model) else str(gpu.model)

    expectation, absent = policy.gpu_model or "any", "no tool names a model"
    return judge_each("gpus.model", observed, expectation, "model", find_problem, absent=absent)


@check(
    "gpus.driver",
    loses_job("install", "reboot"),
    settings=("gpu_driver",),
    fix=("install or load NAME; see dmesg", "install that driver, then reboot"),
)
def driver(observed: Gpus, policy: Policy) -> Result:
    """The kernel driver is loaded, in the policy's version where that names one."""
    check, reason = "gpus.driver", no_gpu_reason(observed)
    if reason:
        return na(check, reason)
    versions = {"nvidia": observed.driver, "amd": observed.amd_driver}
    expectation, words = policy.gpu_driver or "loaded", []
    for vendor, name in DRIVERS.items():
        bound = [gpu for gpu in expected_gpus(observed, vendor) if gpu.driver == name]
        version = versions[vendor]
        if not bound and expected_gpus(observed, vendor) and version is None:
            fix = f"install or load {name}; see dmesg"
            return fail(check, expectation, f"{name} is not loaded", _PCI, fix)
        if version is None and bound and policy.gpu_driver:
            return unknown(check, f"{name} does not say its version")
        if version is not None or bound:
            words.append(f"{name} {version or 'loaded'}")
            if policy.gpu_driver and version != policy.gpu_driver:
                fix = "install that driver, then reboot"
                return fail(check, expectation, f"{name} {version}", f"/sys/module/{name}", fix)
    return ok(check, expectation, ", ".join(words) or "loaded")


@check(
    "gpus.vbios",
    drifts("install"),
    settings=("gpu_vbios",),
    fix=("update the firmware with the vendor's package",),
)
def vbios(observed: Gpus, policy: Policy) -> Result:
    """Each GPU's firmware is one of the policy's versions."""

    def find_problem(gpu: Gpu) -> str:
        return str(gpu.vbios) if policy.gpu_vbios and gpu.vbios not in policy.gpu_vbios else ""

    expectation = " or ".join(policy.gpu_vbios) or "any"
    fix = "update the firmware with the vendor's package"
    absent = "no tool shows a VBIOS version"
    return judge_each(
        "gpus.vbios", observed, expectation, "vbios", find_problem, absent=absent, fix=fix
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


@check(
    "gpus.ecc_mode",
    loses_job("configure", "reset_gpu", "reboot", source="nvidia-smi(1), --ecc-config"),
    settings=("gpu_ecc",),
    fix=("nvidia-smi -e INT, then reset the GPU or reboot", _AMD_ECC),
)
def ecc_mode(observed: Gpus, policy: Policy) -> Result:
    """ECC is as the policy has it, now and after the next reset of the GPU."""
    check, expectation = "gpus.ecc_mode", policy.gpu_ecc
    if expectation == "any":
        return na(check, "gpu_ecc is 'any'")
    by_default = expectation == "default"
    if by_default:
        expectation = "on"

    def find_problem(gpu: Gpu) -> str:
        if by_default and _DELIVERED_WITHOUT_ECC.search(gpu.model or ""):
            return ""
        return _not_kept(expectation, gpu.ecc, gpu.ecc_pending)

    faulty = [gpu for gpu in observed.gpus if gpu.ecc is not None and find_problem(gpu)]
    fix = f"nvidia-smi -e {int(expectation == 'on')}, then reset the GPU or reboot"
    fix = _AMD_ECC if all(gpu.vendor == "amd" for gpu in faulty) else fix
    absent = "these GPUs have no ECC"
    reads = ("ecc", "ecc_pending")
    return judge_each(
        check, observed, expectation, "ecc", find_problem, absent=absent, fix=fix, reads=reads
    )


@check(
    "gpus.persistence",
    slows_job("configure"),
    settings=("gpu_persistence",),
    fix=("systemctl enable --now nvidia-persistenced, or nvidia-smi -pm INT",),
)
def persistence(observed: Gpus, policy: Policy) -> Result:
    """NVIDIA's driver stays loaded between jobs, as the policy has it.

    Otherwise the first use of a GPU initialises it anew, which takes seconds, and settings such as
    power limits are lost (nvidia-persistenced(1)).
    """
    check, expectation = "gpus.persistence", policy.gpu_persistence
    if expectation == "any":
        return na(check, "gpu_persistence is 'any'")

    def find_problem(gpu: Gpu) -> str:
        return "" if gpu.persistence == expectation else str(gpu.persistence)

    action, flag = ("enable", 1) if expectation == "on" else ("disable", 0)
    fix = f"systemctl {action} --now nvidia-persistenced, or nvidia-smi -pm {flag}"
    absent = "these GPUs have no such mode"
    return judge_each(
        check, observed, expectation, "persistence", find_problem, absent=absent, fix=fix
    )


_DIVIDE = "amd-smi set --compute-partition MODE and --memory-partition MODE, when no job runs"


@check(
    "gpus.mig",
    loses_job("configure"),
    settings=("gpu_mig",),
    fix=("nvidia-smi -mig INT, when no job runs", _DIVIDE),
)
def mig(observed: Gpus, policy: Policy) -> Result:
    """MIG is as the policy has it, now and after the next reset: it splits a GPU into several.

    Modes of compute units and memory divide AMD's GPUs (SPX/NPS1 is one GPU). GPUs of one model in
    different modes are a warning under every policy.
    """
    check, expectation = "gpus.mig", policy.gpu_mig
    modes = {(gpu.model, gpu.partition) for gpu in observed.amd if isinstance(gpu, AmdGpu)}
    divided = [mode for mode in modes if mode[1] is not None]
    if len(divided) > len({model for model, _ in divided}):
        text = findings_text(
            (gpu, gpu.partition)
            for gpu in observed.amd
            if isinstance(gpu, AmdGpu) and gpu.partition is not None
        )
        return warn(check, "one mode on all GPUs", text, observed.amd_tool.name, _DIVIDE)
    if expectation == "any":
        return na(check, "gpu_mig is 'any'")

    def find_problem(gpu: Gpu) -> str:
        return _not_kept(expectation, gpu.mig, gpu.mig_pending)

    fix = f"nvidia-smi -mig {int(expectation == 'on')}, when no job runs"
    absent = "these GPUs have no MIG"
    reads = ("mig", "mig_pending")
    return judge_each(
        check, observed, expectation, "mig", find_problem, absent=absent, fix=fix, reads=reads
    )


@check(
    "gpus.processes",
    loses_job("clean_up"),
    settings=("gpu_idle",),
    fix=("end them; a name like [Not Found] is a process of a container, or one that is dead",),
)
def processes(observed: Gpus, policy: Policy) -> Result:
    """No process computes on a GPU of a node that has no job (policy gpu_idle).

    A process that a job left behind takes memory and time from the next job. An X server only
    draws, and does not count.
    """
    check = "gpus.processes"
    if not policy.gpu_idle:
        return na(check, "jobs may run: gpu_idle is off")

    def find_problem(gpu: Gpu) -> str:
        remaining = [
            f"pid {process.pid} {process.name}"
            + ("" if process.memory_mb is None else f" {process.memory_mb} MiB")
            for process in gpu.processes
            if process.kind != "G"
        ]
        return first_few(remaining)

    fix = "end them; a name like [Not Found] is a process of a container, or one that is dead"
    return judge_each(
        check,
        observed,
        "none",
        lambda gpu: True,
        find_problem,
        absent="",
        fix=fix,
        shown="none",
        reads=("processes",),
    )


SUBJECT = Subject(
    "gpus",
    __doc__,
    checks=(
        present,
        tool,
        count,
        model,
        driver,
        vbios,
        recovery,
        ecc_mode,
        ecc_errors,
        remapped_rows,
        retired_pages,
        pcie,
        throttle,
        temperature,
        persistence,
        mig,
        processes,
        nvlink,
        xgmi_errors,
        fabric_manager,
        device_access,
        kernel_faults,
    ),
    probe=PROBE,
    compared=compared,
    learned=learned,
    kinds=FactKinds(
        volatile="""
            detail aer
            kernel_faults.source kernel_faults.code kernel_faults.pci_address kernel_faults.text
            kernel_faults.action kernel_faults.first_s kernel_faults.last_s
            memory_used_mb processes performance_state idle throttle throttled temperature_c
            temperature_slowdown_c
            memory_temperature_c memory_temperature_max_c temperature_left_c
            pcie_generation pcie_speed
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
        """,
        versions="driver amd_driver cuda vbios",
        unique="serial uuid fabric_clique",
        elements={
            "pci": "address",
            "nvidia": "pci_address",
            "nvidia.links": "index",
            "amd": "pci_address",
            "amd.links": "index",
            "device_files": "path",
            "kernel_faults": "source code pci_address",
        },
    ),
)
