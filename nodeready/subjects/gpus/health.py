"""Judge the health of GPUs: memory, bus, heat and device files."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, fail, na, ok, unknown, warn
from nodeready.core.severity import GUIDELINES, MEMORY_ERRORS, RETIREMENT, loses_job, slows_job
from nodeready.subjects.gpus.amd_gpu import AmdGpu
from nodeready.subjects.gpus.findings import (
    expected_gpus,
    findings_text,
    first_few,
    judge_each,
    no_gpu_reason,
    unreadable_gpus,
    unshown_reason,
)
from nodeready.subjects.gpus.gpu import DeviceFile, Gpu, Gpus, PciGpu

# --- Memory, bus and heat, and the driver's recovery action.


@check(
    "gpus.recovery",
    loses_job("reset_gpu", "reboot", "replace", source=MEMORY_ERRORS),
    fix=("drain the node, then nvidia-smi --gpu-reset, or reboot",),
)
def recovery(observed: Gpus, policy: Policy) -> Result:
    """The driver asks for no reset or reboot (nvmlDeviceGetGpuRecoveryAction, driver 535 on).

    After a fault the counters can be readable and 0 while no job can run any more.
    """

    def find_problem(gpu: Gpu) -> str:
        return "" if gpu.recovery == "none" else f"asks for {gpu.recovery}"

    fix = "drain the node, then nvidia-smi --gpu-reset, or reboot"
    absent, expectation = "the tool shows no recovery action", "no reset or reboot needed"
    must_reboot = any(gpu.recovery == "reboot" for gpu in observed.gpus)
    return judge_each(
        *("gpus.recovery", observed, expectation, "recovery", find_problem),
        absent=absent,
        fix=fix,
        actions=("reboot", "replace") if must_reboot else (),
    )


_REPLACE = "replace the GPU"
_RESET = "drain, then reset the GPU or reboot"


@check(
    "gpus.ecc_errors",
    loses_job("reset_gpu", "reboot", "replace", source=MEMORY_ERRORS),
    fix=("drain, reset the GPU; replace it if they come back", _REPLACE),
)
def ecc_errors(observed: Gpus, policy: Policy) -> Result:
    """No uncorrectable ECC error since the driver was loaded (DeepOps, Meta's GCM).

    Corrected errors do not count. An uncorrectable error ended a job, and its memory stays in use
    until the next reset. Deferred errors (AMD) are in data that no program has read yet: a
    warning. Replace a GPU whose SRAM had more errors than NVIDIA allows
    (nvmlEccSramErrorStatus_t, bThresholdExceeded).
    """

    def find_problem(gpu: Gpu) -> str:
        errors = gpu.ecc_uncorrectable_volatile
        words = [f"{errors} uncorrectable ECC errors"] if errors else []
        words += ["SRAM error threshold exceeded"] if gpu.sram_exceeded else []
        deferred = gpu.ecc_deferred if isinstance(gpu, AmdGpu) else None
        words += [f"{deferred} deferred ECC errors"] if deferred else []
        return ", ".join(words)

    def has_failed(gpu: Gpu) -> bool:
        return bool(gpu.ecc_uncorrectable_volatile or gpu.sram_exceeded)

    def value(gpu: Gpu) -> int | None:
        errors = gpu.ecc_uncorrectable_volatile
        return 0 if errors is None and find_problem(gpu) else errors

    fix = "drain, reset the GPU; replace it if they come back"
    is_worn = any(gpu.sram_exceeded for gpu in observed.gpus)
    return judge_each(
        "gpus.ecc_errors",
        observed,
        "0 uncorrectable",
        value,
        find_problem,
        absent="these GPUs count no ECC errors",
        fix=_REPLACE if is_worn else fix,
        actions=("replace",) if is_worn else (),
        reads=("ecc_uncorrectable_volatile", "sram_exceeded", "ecc_deferred"),
        without=lambda gpu: gpu.ecc == "off",
        make_result=fail if any(has_failed(gpu) for gpu in observed.gpus) else warn,
    )


@check(
    "gpus.remapped_rows",
    loses_job("reset_gpu", "reboot", "replace", source=MEMORY_ERRORS),
    fix=(_REPLACE, _RESET, "replace the GPU at the next occasion"),
)
def remapped_rows(observed: Gpus, policy: Policy) -> Result:
    """No row of memory waits to be remapped, and none could not be (Azure's health checks).

    A pending remap or repair takes effect at the next reset. After a failure the board has no
    spare row left: replace it (NVIDIA's GPU memory error management). Also replace a board with
    memory that no spare can replace (nvmlDeviceGetUnrepairableMemoryFlag). A bank without a spare
    row is a warning: the next error in that bank fails (nvmlRowRemapperHistogramValues_t).
    """

    def failures(gpu: Gpu) -> list[str]:
        words = ["remapping failed"] if gpu.remap_failed else []
        return words + (["unrepairable memory"] if gpu.unrepairable else [])

    def pending(gpu: Gpu) -> list[str]:
        words = ["remap pending"] if gpu.remap_pending else []
        return words + (["repair pending"] if gpu.repair_pending else [])

    def exhausted(gpu: Gpu) -> list[str]:
        banks = gpu.spareless_banks
        return [f"{banks} memory banks without a spare row"] if banks else []

    def find_problem(gpu: Gpu) -> str:
        return ", ".join([*failures(gpu), *pending(gpu), *exhausted(gpu)])

    def value(gpu: Gpu) -> bool | None:
        is_pending = gpu.remap_failed if gpu.remap_pending is None else gpu.remap_pending
        return True if is_pending is None and find_problem(gpu) else is_pending

    failed = any(failures(gpu) for gpu in observed.gpus)
    is_failure = failed or any(pending(gpu) for gpu in observed.gpus)
    fix = _REPLACE if failed else _RESET if is_failure else "replace the GPU at the next occasion"
    return judge_each(
        "gpus.remapped_rows",
        observed,
        "none pending, none failed",
        value,
        find_problem,
        absent="these GPUs remap no rows, or do not say",
        fix=fix,
        actions=() if is_failure and not failed else ("replace",),
        shown="none",
        reads=(
            "remap_pending",
            "remap_failed",
            "repair_pending",
            "unrepairable",
            "spareless_banks",
        ),
        # In MIG mode nvidia-smi shows no rows.
        without=lambda gpu: gpu.mig == "on",
        make_result=fail if is_failure else warn,
    )


#: A board can retire 64 pages; NVIDIA replaces it at 60 (Dynamic Page Retirement).
_MOST_PAGES = 60


@check(
    "gpus.retired_pages",
    loses_job("reset_gpu", "reboot", "replace", source=RETIREMENT),
    fix=(_RESET, _REPLACE),
)
def retired_pages(observed: Gpus, policy: Policy) -> Result:
    """No page of memory waits to be retired by a reset (boards before Ampere).

    Replace a board with 60 retired pages or more (NVIDIA's Dynamic Page Retirement).
    """

    def find_problem(gpu: Gpu) -> str:
        words = ["page retirement pending"] if gpu.retired_pending else []
        is_worn = (gpu.retired_pages or 0) >= _MOST_PAGES
        return ", ".join(words + ([f"{gpu.retired_pages} pages retired"] if is_worn else []))

    def value(gpu: Gpu) -> bool | None:
        return True if gpu.retired_pending is None and find_problem(gpu) else gpu.retired_pending

    is_worn = any((gpu.retired_pages or 0) >= _MOST_PAGES for gpu in observed.gpus)
    return judge_each(
        "gpus.retired_pages",
        observed,
        "none pending",
        value,
        find_problem,
        absent="these GPUs retire no pages",
        fix=_REPLACE if is_worn else _RESET,
        actions=("replace",) if is_worn else (),
        shown="none",
        reads=("retired_pending", "retired_pages"),
    )


#: From this generation on an idle link uses fewer lanes, and all lanes again when data comes
#: (state L0p; PCI Express base specification 6.0): an idle Rubin shows x2.
_LANES_ON_DEMAND = 6


def _may_narrow(gpu: Gpu) -> bool:
    """Whether the GPU may use fewer lanes than it has because it is idle."""
    generation = max(gpu.pcie_generation or 0, gpu.pcie_generation_max or 0)
    return generation >= _LANES_ON_DEMAND and gpu.performance_state != "P0"


def _lanes(observed: Gpus, gpu: Gpu) -> int | None:
    """The lanes that the GPU and its slot have together.

    Where a card has fewer lanes than its chip (a GTX 1650, an A2), nvidia-smi shows the chip's and
    sysfs the card's. A slot with fewer lanes than most of at least three peers is a fault.
    """
    maximum = gpu.pcie_width_max
    if maximum is None:
        return None
    for bus_gpu in observed.pci:
        if bus_gpu.address == gpu.pci_address and bus_gpu.pcie_width_max:
            maximum = min(maximum, bus_gpu.pcie_width_max)
    peers = [peer.pcie_width_max for peer in observed.gpus if peer.model == gpu.model]
    peer_lanes = [lanes for lanes in peers if lanes is not None]
    usual = max(set(peer_lanes), key=peer_lanes.count, default=0)
    most_agree = len(peer_lanes) >= 3 and peer_lanes.count(usual) * 2 > len(peer_lanes)
    return max(maximum, usual) if most_agree and gpu.pcie_width_max != usual else maximum


def _width_problem(observed: Gpus, gpu: Gpu) -> str:
    """The problem with the width of the GPU's link, or "".

    In a virtual machine the slot is unknown: only a link narrower than its peers' is a problem.
    """
    width, maximum = gpu.pcie_width, _lanes(observed, gpu)
    if width is None or maximum is None or width >= maximum or _may_narrow(gpu):
        return ""
    peers = [peer.pcie_width or 0 for peer in observed.gpus if peer.model == gpu.model]
    if gpu.virtual and width == max(peers):
        return ""
    return f"x{width} of x{maximum}"


def _speed_problem(gpu: Gpu) -> str:
    """The problem with the link's generation, or ""; idle GPUs (not P0) lower it themselves."""
    current, maximum = gpu.pcie_generation, gpu.pcie_generation_max
    if current is None or maximum is None or current >= maximum or gpu.virtual:
        return ""
    return f"generation {current} of {maximum}" if gpu.performance_state == "P0" else ""


def _narrow_on_bus(gpus: list[PciGpu]) -> list[str]:
    """The GPUs on the bus whose link is narrower than that of a peer, in words."""
    words = []
    for gpu in gpus:
        widths = [peer.pcie_width or 0 for peer in gpus if peer.device == gpu.device]
        if gpu.pcie_width is not None and gpu.pcie_width < max(widths):
            words.append(f"{gpu.address}: x{gpu.pcie_width}, others x{max(widths)}")
    return words


def _aer(gpu: PciGpu) -> str:
    """The uncorrected errors on the GPU's link, in words."""
    return first_few(f"{count} {error} ({kind})" for kind, error, count in gpu.aer)


#: A finding that no load explains.
_RESEAT = ("reseat", "replace")


@check(
    "gpus.pcie",
    slows_job("monitor", "reseat", "replace", source=GUIDELINES),
    fix=("look again under load", "reseat the GPU or its riser; look at the slot's settings"),
)
def pcie(observed: Gpus, policy: Policy) -> Result:
    """Each PCIe link has all lanes of board and slot, and under load its full generation.

    Half the lanes halve the speed of every copy to and from the host (DeepOps, GCM). Where no tool
    answers, peers on the bus are compared. An uncorrected error of the link since the boot is a
    warning. A fatal error, after which the link was set up anew, is a failure (the kernel's
    aer_stats).
    """
    check, expectation = "gpus.pcie", "full width, and full speed under load"
    if reason := no_gpu_reason(observed):
        return na(check, reason)
    hidden = unshown_reason(observed)
    words = _narrow_on_bus(expected_gpus(observed)) if hidden else []
    fix = "reseat the GPU or its riser; look at the slot's settings"
    errors = {gpu.address: _aer(gpu) for gpu in expected_gpus(observed) if gpu.aer}
    fatal = any(kind == "fatal" for gpu in expected_gpus(observed) for kind, _, _ in gpu.aer)

    def find_problem(gpu: Gpu) -> str:
        words = _width_problem(observed, gpu), _speed_problem(gpu), errors.get(gpu.pci_address, "")
        return ", ".join(text for text in words if text)

    def value(gpu: Gpu) -> str | None:
        if gpu.pcie_width is None:
            return "?" if find_problem(gpu) else None
        if gpu.pcie_width == gpu.pcie_width_max:
            return f"x{gpu.pcie_width}"
        if gpu.virtual:
            return f"x{gpu.pcie_width} in a virtual machine"
        return f"x{gpu.pcie_width} while idle" if _may_narrow(gpu) else f"x{gpu.pcie_width}"

    findings = [gpu for gpu in observed.gpus if find_problem(gpu)]
    is_failure = fatal or any(
        _width_problem(observed, gpu) or (_speed_problem(gpu) and not gpu.idle) for gpu in findings
    )
    words += [f"{address}: {text}" for address, text in errors.items()]
    if words and not findings:
        make_result = fail if is_failure or len(words) > len(errors) else warn
        return make_result(
            *(check, expectation, first_few(words), "/sys/bus/pci/devices", fix), actions=_RESEAT
        )
    if hidden and not findings:
        return unknown(check, hidden)
    return judge_each(
        check,
        observed,
        expectation,
        value,
        find_problem,
        absent="the tool shows no PCIe link",
        reads=(
            "pcie_width",
            "pcie_width_max",
            "pcie_generation",
            "pcie_generation_max",
            "performance_state",
            "idle",
            "virtual",
        ),
        fix=fix if is_failure or errors else "look again under load",
        actions=_RESEAT if is_failure or errors else (),
        make_result=fail if is_failure else warn,
    )


@check(
    "gpus.throttle",
    slows_job("inspect", "reseat", "replace", source=GUIDELINES),
    fix=("look at fans, air flow, power supplies and cables",),
)
def throttle(observed: Gpus, policy: Policy) -> Result:
    """No GPU is slowed down by its hardware: by heat, or by its power supply.

    A busy GPU works at its limit on power (sw_power_cap), which does not count. The driver's own
    thermal slow-down is a warning.
    """

    def find_problem(gpu: Gpu) -> str:
        return ", ".join(gpu.throttle)

    def value(gpu: Gpu) -> tuple[str, ...] | None:
        # AMD's tools do not show the absence of a reason.
        return gpu.throttle if gpu.throttle or gpu.throttled is not None else None

    is_failure = any(name.startswith("hw_") for gpu in observed.gpus for name in gpu.throttle)
    return judge_each(
        "gpus.throttle",
        observed,
        "no slow-down",
        value,
        find_problem,
        absent="the tool shows no reasons for a slow-down",
        fix="look at fans, air flow, power supplies and cables",
        shown="none",
        reads=("throttle",),
        make_result=fail if is_failure else warn,
    )


@check(
    "gpus.temperature",
    slows_job("inspect", "reseat", "replace", source=GUIDELINES),
    settings=("gpu_max_temperature_c",),
    fix=("look at fans, air flow and heat sinks",),
)
def temperature(observed: Gpus, policy: Policy) -> Result:
    """Each GPU is cooler than the policy's limit, or than its own slow-down temperature.

    NVIDIA's Ada and later boards print the degrees that are left instead (T.Limit, higher is
    cooler); the threshold is computed from them. With no degree left the driver may lower the
    clock: a warning (nvidia-smi(1), GPU Max Operating T.Limit).
    """
    limit = policy.gpu_max_temperature_c

    def value(gpu: Gpu) -> int | None:
        if find_problem(gpu):
            return gpu.temperature_c or 0
        return None if limit is None and gpu.temperature_slowdown_c is None else gpu.temperature_c

    def is_at_limit(gpu: Gpu) -> bool:
        return limit is None and gpu.temperature_left_c is not None and gpu.temperature_left_c <= 0

    def above_limit(gpu: Gpu) -> list[str]:
        maximum = gpu.temperature_slowdown_c if limit is None else limit
        words = []
        if gpu.temperature_c is not None and maximum is not None and gpu.temperature_c >= maximum:
            words.append(f"{gpu.temperature_c} C, limit {maximum} C")
        memory, maximum = gpu.memory_temperature_c, gpu.memory_temperature_max_c
        if memory is not None and maximum is not None and memory >= maximum:
            words.append(f"memory {memory} C, limit {maximum} C")
        return words

    def find_problem(gpu: Gpu) -> str:
        if words := above_limit(gpu):
            return ", ".join(words)
        return f"{gpu.temperature_left_c} C left to the limit" if is_at_limit(gpu) else ""

    degrees = [gpu.temperature_c for gpu in observed.gpus if gpu.temperature_c is not None]
    expectation = "below the slow-down" if limit is None else f"below {limit} C"
    return judge_each(
        "gpus.temperature",
        observed,
        expectation,
        value,
        find_problem,
        absent="the tool shows no temperature and threshold",
        fix="look at fans, air flow and heat sinks",
        shown=f"at most {max(degrees)} C" if degrees else "",
        reads=(
            "temperature_c",
            "memory_temperature_c",
            *(("temperature_slowdown_c", "temperature_left_c") if limit is None else ()),
        ),
        make_result=fail if any(above_limit(gpu) for gpu in observed.gpus) else warn,
    )


# --- The device files that jobs open.

_KFD = "/dev/kfd"
_RENDER = "/dev/dri/renderD"
#: The files that CUDA opens; those of MIG's capabilities and of modeset have other owners.
_NVIDIA = re.compile(r"/dev/nvidia([0-9]+|ctl|-uvm)")
_FIX_PART = "load amdgpu with its compute part (ROCm)"
_FIX_AMD = 'udev rule: KERNEL=="kfd" and "renderD*", GROUP="render", MODE="0666"'
_FIX_NVIDIA = "NVreg_DeviceFileMode=0666 for the module nvidia"
_FIX_MODE = "nvidia-smi --compute-mode=DEFAULT"


def _is_open_to_group(file: DeviceFile) -> bool:
    """Whether a group other than root's may use the file."""
    return file.mode[4:6] == "rw" and file.gid != 0


def _inaccessible(files: Iterable[DeviceFile]) -> list[str]:
    """The files that no user but root can open for reading and writing."""
    return [
        f"{file.path} {file.mode} group {file.gid}"
        for file in files
        if file.mode[7:9] != "rw" and not _is_open_to_group(file)
    ]


@check(
    "gpus.device_access",
    loses_job("configure", "reload_driver"),
    fix=(_FIX_PART, _FIX_AMD, _FIX_NVIDIA, _FIX_MODE),
)
def device_access(observed: Gpus, policy: Policy) -> Result:
    """Jobs can open the GPUs' device files: all users, or the members of a group.

    ROCm opens /dev/kfd and /dev/dri/renderD*, which belong to the groups render and video unless a
    rule of udev opens them (ROCm's installation guide: configuring permissions for GPU access);
    CUDA opens /dev/nvidia*, 0666 by default (NVIDIA's driver README, "DeviceFileMode"). This check
    does not test whether a job's user is in that group. No program may compute on a GPU in the
    compute mode Prohibited (nvidia-smi(1)).
    """
    check, expectation = "gpus.device_access", "readable and writable for jobs"
    if reason := no_gpu_reason(observed):
        return na(check, reason)
    bound = {gpu.vendor for gpu in expected_gpus(observed) if gpu.driver in ("amdgpu", "nvidia")}
    bound |= {gpu.vendor for gpu in observed.gpus}
    if not bound:
        return na(check, "no GPU has its driver")
    amd, lost = [], []
    if "amd" in bound:
        amd = [f for f in observed.device_files if f.path == _KFD or f.path.startswith(_RENDER)]
        lost += [] if any(f.path == _KFD for f in amd) else [_KFD]
        lost += [] if any(f.path != _KFD for f in amd) else [f"{_RENDER}*"]
    nvidia = [f for f in observed.device_files if "nvidia" in bound and _NVIDIA.fullmatch(f.path)]
    if lost and not observed.device_files:
        return unknown(check, "no device file was seen")
    barred = [gpu for gpu in observed.nvidia if gpu.compute_mode == "prohibited"]
    closed = _inaccessible([*amd, *nvidia])
    if lost or closed or barred:
        fixes = [_FIX_PART] if lost else []
        fixes += [_FIX_MODE] if barred else []
        fixes += [_FIX_AMD] if _inaccessible(amd) else []
        fixes += [_FIX_NVIDIA] if _inaccessible(nvidia) else []
        words = [f"{path} is missing" for path in lost] + closed
        if barred:
            words.append(findings_text((gpu, "compute mode prohibited") for gpu in barred))
        return fail(check, expectation, first_few(words), "/dev", "; ".join(fixes))
    if unreadable := unreadable_gpus(observed, ("compute_mode",)):
        return unknown(check, findings_text(unreadable))
    if not amd and not nvidia:
        # nvidia-modprobe makes the files when the first program needs them.
        return na(check, "no program has used a GPU since the boot")
    groups = sorted({file.gid for file in (*amd, *nvidia) if file.mode[7:9] != "rw"})
    if groups:
        numbers = first_few(map(str, groups))
        return ok(check, expectation, f"for members of group {numbers} only", "/dev")
    return ok(check, expectation, "for everybody", "/dev")
