"""Judge the health of GPUs: memory, bus, heat, device files, and what the kernel's log says.

First the helpers of every check of GPUs: which GPUs count, and how findings name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.policy import Policy
from nodeready.subjects.gpus.amd_gpu import AmdGpu
from nodeready.subjects.gpus.findings import (
    expected,
    few,
    judge_each,
    listed,
    none,
    untold,
    why_unseen,
)
from nodeready.subjects.gpus.gpu import DeviceFile, Gpu, Gpus, PciGpu
from nodeready.subjects.result import Result, check, fail, na, ok, unknown, warn

# --- Memory, bus and heat, and what the driver asks for.

#: How the reasons of the hardware for a lower clock begin.
_HARDWARE = "hw_"


@check("gpus.recovery", fix=("drain the node, then nvidia-smi --gpu-reset, or reboot",))
def recovery(observed: Gpus, policy: Policy) -> Result:
    """The driver asks for no reset or reboot (nvmlDeviceGetGpuRecoveryAction, driver 535 on).

    After a fault the counters can be readable and 0 while no job can run any more.
    """

    def find_problem(gpu: Gpu) -> str:
        return "" if gpu.recovery == "none" else f"asks for {gpu.recovery}"

    fix = "drain the node, then nvidia-smi --gpu-reset, or reboot"
    absent, expectation = "the tool shows no recovery action", "no reset or reboot needed"
    return judge_each(
        "gpus.recovery", observed, expectation, "recovery", find_problem, absent=absent, fix=fix
    )


_REPLACE = "replace the GPU"
_RESET = "drain, then reset the GPU or reboot"


@check(
    "gpus.ecc_errors",
    fix=("drain, reset the GPU; replace it if they come back", _REPLACE),
)
def ecc_errors(observed: Gpus, policy: Policy) -> Result:
    """No uncorrectable ECC error since the driver was loaded (DeepOps, Meta's GCM).

    Corrected ones are what ECC is for; an uncorrectable one ended a job, and its memory is still
    in use until the next reset. Deferred ones (AMD) are in data that no program has used so far: a
    warning. A GPU whose SRAM had more errors than NVIDIA lets it have
    (nvmlEccSramErrorStatus_t, bThresholdExceeded) is to be replaced.
    """

    def find_problem(gpu: Gpu) -> str:
        errors = gpu.ecc_uncorrectable_volatile
        words = [f"{errors} uncorrectable ECC errors"] if errors else []
        words += ["SRAM error threshold exceeded"] if gpu.sram_exceeded else []
        deferred = gpu.ecc_deferred if isinstance(gpu, AmdGpu) else None
        words += [f"{deferred} deferred ECC errors"] if deferred else []
        return ", ".join(words)

    def hard(gpu: Gpu) -> bool:
        return bool(gpu.ecc_uncorrectable_volatile or gpu.sram_exceeded)

    def value(gpu: Gpu) -> int | None:
        errors = gpu.ecc_uncorrectable_volatile
        return 0 if errors is None and find_problem(gpu) else errors

    fix = "drain, reset the GPU; replace it if they come back"
    absent = "these GPUs count no ECC errors"
    return judge_each(
        "gpus.ecc_errors",
        observed,
        "0 uncorrectable",
        value,
        find_problem,
        absent=absent,
        fix=_REPLACE if any(gpu.sram_exceeded for gpu in observed.gpus) else fix,
        reads=("ecc_uncorrectable_volatile", "sram_exceeded", "ecc_deferred"),
        without=lambda gpu: gpu.ecc == "off",
        bad=fail if any(hard(gpu) for gpu in observed.gpus) else warn,
    )


_MEMORY = ("remap_pending", "remap_failed", "repair_pending", "unrepairable", "spareless_banks")


@check("gpus.remapped_rows", fix=(_REPLACE, _RESET, "replace the GPU at the next occasion"))
def remapped_rows(observed: Gpus, policy: Policy) -> Result:
    """No row of memory waits to be remapped, and none could not be (Azure's health checks).

    A pending remap or repair takes effect at the next reset; after a failure the board's spare
    rows are used up: replace it (NVIDIA's GPU memory error management). So is memory that no spare
    can replace (nvmlDeviceGetUnrepairableMemoryFlag). A bank without a spare row is a warning: the
    next error in it fails (nvmlRowRemapperHistogramValues_t).
    """

    def gone(gpu: Gpu) -> list[str]:
        words = ["remapping failed"] if gpu.remap_failed else []
        return words + (["unrepairable memory"] if gpu.unrepairable else [])

    def waits(gpu: Gpu) -> list[str]:
        words = ["remap pending"] if gpu.remap_pending else []
        return words + (["repair pending"] if gpu.repair_pending else [])

    def spent(gpu: Gpu) -> list[str]:
        banks = gpu.spareless_banks
        return [f"{banks} memory banks without a spare row"] if banks else []

    def find_problem(gpu: Gpu) -> str:
        return ", ".join([*gone(gpu), *waits(gpu), *spent(gpu)])

    def value(gpu: Gpu) -> bool | None:
        is_pending = gpu.remap_failed if gpu.remap_pending is None else gpu.remap_pending
        return True if is_pending is None and find_problem(gpu) else is_pending

    failed = any(gone(gpu) for gpu in observed.gpus)
    hard = failed or any(waits(gpu) for gpu in observed.gpus)
    fix = _REPLACE if failed else _RESET if hard else "replace the GPU at the next occasion"
    absent = "these GPUs remap no rows, or do not say"
    check, expectation = "gpus.remapped_rows", "none pending, none failed"
    return judge_each(
        check,
        observed,
        expectation,
        value,
        find_problem,
        absent=absent,
        fix=fix,
        shown="none",
        reads=_MEMORY,
        # In MIG mode nvidia-smi shows no rows.
        without=lambda gpu: gpu.mig == "on",
        bad=fail if hard else warn,
    )


#: A board can retire 64 pages, and is to be replaced at 60 (NVIDIA's Dynamic Page Retirement).
_MOST_PAGES = 60


@check("gpus.retired_pages", fix=(_RESET, _REPLACE))
def retired_pages(observed: Gpus, policy: Policy) -> Result:
    """No page of memory waits to be retired (boards before Ampere): a reset does it.

    A board with 60 retired pages or more is to be replaced (NVIDIA's Dynamic Page Retirement).
    """

    def find_problem(gpu: Gpu) -> str:
        words = ["page retirement pending"] if gpu.retired_pending else []
        many = (gpu.retired_pages or 0) >= _MOST_PAGES
        return ", ".join(words + ([f"{gpu.retired_pages} pages retired"] if many else []))

    def value(gpu: Gpu) -> bool | None:
        return True if gpu.retired_pending is None and find_problem(gpu) else gpu.retired_pending

    many = any((gpu.retired_pages or 0) >= _MOST_PAGES for gpu in observed.gpus)
    return judge_each(
        "gpus.retired_pages",
        observed,
        "none pending",
        value,
        find_problem,
        absent="these GPUs retire no pages",
        fix=_REPLACE if many else _RESET,
        shown="none",
        reads=("retired_pending", "retired_pages"),
    )


#: From this generation on a link that is idle uses fewer lanes, and all of them at once when data
#: comes (state L0p; PCI Express base specification 6.0): an idle Rubin shows x2.
_LANES_ON_DEMAND = 6


def _rests(gpu: Gpu) -> bool:
    """Whether the GPU may use fewer lanes than it has because it is idle."""
    generation = max(gpu.pcie_generation or 0, gpu.pcie_generation_max or 0)
    return generation >= _LANES_ON_DEMAND and gpu.performance_state != "P0"


def _lanes(observed: Gpus, gpu: Gpu) -> int | None:
    """The lanes that the GPU and its slot have together.

    Where a card has fewer than its chip (a GTX 1650, an A2), nvidia-smi shows the chip's and sysfs
    the card's. A slot with fewer lanes than those of most of at least three peers is no slot that
    anybody chose.
    """
    maximum = gpu.pcie_width_max
    for bus_gpu in observed.pci:
        if bus_gpu.address == gpu.pci_address and bus_gpu.pcie_width_max and maximum is not None:
            maximum = min(maximum, bus_gpu.pcie_width_max)
    peers = [peer.pcie_width_max for peer in observed.gpus if peer.model == gpu.model]
    peer_lanes = [lanes for lanes in peers if lanes is not None]
    usual = max(set(peer_lanes), key=peer_lanes.count) if peer_lanes else 0
    if (
        maximum is not None
        and len(peer_lanes) > _FEW_PEERS
        and peer_lanes.count(usual) * 2 > len(peer_lanes)
    ):
        maximum = max(maximum, usual) if gpu.pcie_width_max != usual else maximum
    return maximum


_FEW_PEERS = 2


def _narrow(observed: Gpus, gpu: Gpu) -> str:
    """What is wrong with the width of the GPU's link, or "".

    A guest does not know the slot: there, only a link that is narrower than its peers' is wrong.
    """
    width, maximum = gpu.pcie_width, _lanes(observed, gpu)
    if width is None or maximum is None or width >= maximum or _rests(gpu):
        return ""
    peers = [peer.pcie_width or 0 for peer in observed.gpus if peer.model == gpu.model]
    if gpu.virtual and width == max(peers):
        return ""
    return f"x{width} of x{maximum}"


def _slow(gpu: Gpu) -> str:
    """What is wrong with the link's generation, or ""; idle GPUs (not P0) lower it themselves."""
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
    return few(f"{count} {error} ({kind})" for kind, error, count in gpu.aer)


@check(
    "gpus.pcie",
    fix=("look again under load", "reseat the GPU or its riser; look at the slot's settings"),
)
def pcie(observed: Gpus, policy: Policy) -> Result:
    """Each PCIe link has all the lanes that board and slot have, and under load its generation.

    Half the lanes halve every copy to and from the host (DeepOps, GCM). Where no tool answers,
    peers on the bus are compared. An error of the link that was not corrected since the boot is a
    warning, and a fatal one, after which the link began anew, a failure (the kernel's aer_stats).
    """
    check, expectation = "gpus.pcie", "full width, and full speed under load"
    if none(observed):
        return na(check, none(observed))
    hidden = why_unseen(observed)
    words = _narrow_on_bus(expected(observed)) if hidden else []
    fix = "reseat the GPU or its riser; look at the slot's settings"

    errors = {gpu.address: _aer(gpu) for gpu in expected(observed) if gpu.aer}
    fatal = any(kind == "fatal" for gpu in expected(observed) for kind, _, _ in gpu.aer)

    def find_problem(gpu: Gpu) -> str:
        words = _narrow(observed, gpu), _slow(gpu), errors.get(gpu.pci_address, "")
        return ", ".join(text for text in words if text)

    def value(gpu: Gpu) -> str | None:
        if gpu.pcie_width is None:
            return "?" if find_problem(gpu) else None
        if gpu.pcie_width == gpu.pcie_width_max:
            return f"x{gpu.pcie_width}"
        reason = " in a virtual machine" if gpu.virtual else " while idle" if _rests(gpu) else ""
        return f"x{gpu.pcie_width}{reason}"

    findings = [gpu for gpu in observed.gpus if find_problem(gpu)]
    hard = fatal or any(
        _narrow(observed, gpu) or (_slow(gpu) and not gpu.idle) for gpu in findings
    )
    only_idle = not hard and not errors
    words += [f"{address}: {text}" for address, text in errors.items()]
    if words and not findings:
        bad = fail if hard or len(words) > len(errors) else warn
        return bad(check, expectation, few(words), "/sys/bus/pci/devices", fix)
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
        fix="look again under load" if only_idle else fix,
        bad=fail if hard else warn,
    )


@check("gpus.throttle", fix=("look at fans, air flow, power supplies and cables",))
def throttle(observed: Gpus, policy: Policy) -> Result:
    """No GPU is slowed down by its hardware: too hot, or its power supply asked for it.

    A limit on power alone (sw_power_cap) is how a busy GPU works. The driver's own thermal
    slow-down is a warning.
    """

    def find_problem(gpu: Gpu) -> str:
        return ", ".join(gpu.throttle)

    def value(gpu: Gpu) -> tuple[str, ...] | None:
        # AMD's tools do not say that there is no reason.
        return gpu.throttle if gpu.throttle or gpu.throttled is not None else None

    hard = any(name.startswith(_HARDWARE) for gpu in observed.gpus for name in gpu.throttle)
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
        bad=fail if hard else warn,
    )


@check(
    "gpus.temperature",
    settings=("gpu_max_temperature_c",),
    fix=("look at fans, air flow and heat sinks",),
)
def temperature(observed: Gpus, policy: Policy) -> Result:
    """Each GPU is cooler than the policy's limit, or than where it slows itself down.

    NVIDIA's Ada and later boards print how many degrees are left instead (T.Limit, higher is
    cooler): the threshold here is computed from it. With none left, above the threshold, the
    driver may lower the clock: a warning (nvidia-smi(1), GPU Max Operating T.Limit).
    """
    limit = policy.gpu_max_temperature_c

    def value(gpu: Gpu) -> int | None:
        if find_problem(gpu):
            return gpu.temperature_c or 0
        return None if limit is None and gpu.temperature_slowdown_c is None else gpu.temperature_c

    def warm(gpu: Gpu) -> bool:
        return limit is None and gpu.temperature_left_c is not None and gpu.temperature_left_c <= 0

    def hot(gpu: Gpu) -> list[str]:
        maximum = gpu.temperature_slowdown_c if limit is None else limit
        words = []
        if gpu.temperature_c is not None and maximum is not None and gpu.temperature_c >= maximum:
            words.append(f"{gpu.temperature_c} C, limit {maximum} C")
        memory, maximum = gpu.memory_temperature_c, gpu.memory_temperature_max_c
        if memory is not None and maximum is not None and memory >= maximum:
            words.append(f"memory {memory} C, limit {maximum} C")
        return words

    def find_problem(gpu: Gpu) -> str:
        degrees_left = [f"{gpu.temperature_left_c} C left to the limit"] if warm(gpu) else []
        return ", ".join(hot(gpu) or degrees_left)

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
        bad=fail if any(hot(gpu) for gpu in observed.gpus) else warn,
    )


# --- The device files that jobs open, and AMD's links.

_KFD = "/dev/kfd"
_RENDER = "/dev/dri/renderD"
#: The files that CUDA opens; those of MIG's capabilities and of modeset have other owners.
_NVIDIA = re.compile(r"/dev/nvidia([0-9]+|ctl|-uvm)")
_FIX_PART = "load amdgpu with its compute part (ROCm)"
_FIX_AMD = 'udev rule: KERNEL=="kfd" and "renderD*", GROUP="render", MODE="0666"'
_FIX_NVIDIA = "NVreg_DeviceFileMode=0666 for the module nvidia"
_FIX_MODE = "nvidia-smi --compute-mode=DEFAULT"


def _by_group(file: DeviceFile) -> bool:
    """Whether a group other than root's may use the file."""
    return file.mode[4:6] == "rw" and file.gid != 0


def _closed(files: Iterable[DeviceFile]) -> list[str]:
    """The files that no user but root can open for reading and writing."""
    return [
        f"{file.path} {file.mode} group {file.gid}"
        for file in files
        if file.mode[7:9] != "rw" and not _by_group(file)
    ]


@check("gpus.device_access", fix=(_FIX_PART, _FIX_AMD, _FIX_NVIDIA, _FIX_MODE))
def device_access(observed: Gpus, policy: Policy) -> Result:
    """Jobs can open the GPUs' device files: everybody, or the members of a group.

    ROCm opens /dev/kfd and /dev/dri/renderD*, which belong to the groups render and video unless a
    rule of udev opens them (ROCm's installation guide: configuring permissions for GPU access);
    CUDA opens /dev/nvidia*, 0666 by default (NVIDIA's driver README, "DeviceFileMode"). Whether a
    job's user is in that group is not looked at here. No program may compute on a GPU in the
    compute mode Prohibited (nvidia-smi(1)).
    """
    check, expectation = "gpus.device_access", "readable and writable for jobs"
    reason = none(observed)
    if reason:
        return na(check, reason)
    bound = {gpu.vendor for gpu in expected(observed) if gpu.driver in ("amdgpu", "nvidia")}
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
    closed, fixes = _closed([*amd, *nvidia]), []
    if lost or closed or barred:
        fixes += [_FIX_PART] if lost else []
        fixes += [_FIX_MODE] if barred else []
        fixes += [_FIX_AMD] if _closed(amd) else []
        fixes += [_FIX_NVIDIA] if _closed(nvidia) else []
        words = [f"{path} is missing" for path in lost] + closed
        words += [listed((gpu, "compute mode prohibited") for gpu in barred)] if barred else []
        return fail(check, expectation, few(words), "/dev", "; ".join(fixes))
    dark = untold(observed, ("compute_mode",))
    if dark:
        return unknown(check, listed(dark))
    if not amd and not nvidia:
        # nvidia-modprobe makes them when the first program asks for them.
        return na(check, "no program has used a GPU since the boot")
    groups = sorted({file.gid for file in (*amd, *nvidia) if file.mode[7:9] != "rw"})
    if groups:
        names = few([str(group) for group in groups])
        return ok(check, expectation, f"for members of group {names} only", "/dev")
    return ok(check, expectation, "for everybody", "/dev")
