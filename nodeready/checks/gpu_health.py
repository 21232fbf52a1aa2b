"""Judge the health of GPUs: memory, bus, heat, and what the driver itself asks for."""

from __future__ import annotations

from nodeready.checks.declare import check
from nodeready.checks.each_gpu import each, expected, few, none, why_unseen
from nodeready.policy import Policy
from nodeready.probes.gpu import Gpu, Gpus, PciGpu
from nodeready.results import Result, fail, na, unknown, warn

_HARDWARE = "hw_"


@check("gpus.recovery", fix=("drain the node, then nvidia-smi --gpu-reset, or reboot",))
def recovery(seen: Gpus, want: Policy) -> Result:
    """The driver asks for no reset or reboot (nvmlDeviceGetGpuRecoveryAction, driver 535 on).

    After a fault the counters can be readable and 0 while no job can run any more.
    """

    def wrong(gpu: Gpu) -> str:
        return "" if gpu.recovery == "none" else f"asks for {gpu.recovery}"

    fix = "drain the node, then nvidia-smi --gpu-reset, or reboot"
    absent = "the tool shows no recovery action"
    wanted = "no reset or reboot needed"
    return each(
        "gpus.recovery", seen, wanted, lambda gpu: gpu.recovery, wrong, absent=absent, fix=fix
    )


@check("gpus.ecc_errors", fix=("drain, reset the GPU; replace it if they come back",))
def ecc_errors(seen: Gpus, want: Policy) -> Result:
    """No uncorrectable ECC error since the driver was loaded (DeepOps, Meta's GCM).

    Corrected ones are what ECC is for; an uncorrectable one ended a job, and its memory is still
    in use until the next reset.
    """

    def wrong(gpu: Gpu) -> str:
        errors = gpu.ecc_uncorrectable_volatile
        return f"{errors} uncorrectable ECC errors" if errors else ""

    fix = "drain, reset the GPU; replace it if they come back"
    absent = "these GPUs count no ECC errors"
    return each(
        "gpus.ecc_errors",
        seen,
        "0 uncorrectable",
        lambda gpu: gpu.ecc_uncorrectable_volatile,
        wrong,
        absent=absent,
        fix=fix,
        without=lambda gpu: gpu.ecc == "off",
    )


@check("gpus.remapped_rows", fix=("replace the GPU", "drain, then reset the GPU or reboot"))
def remapped_rows(seen: Gpus, want: Policy) -> Result:
    """No row of memory waits to be remapped, and none could not be (Azure's health checks).

    A pending remap or repair takes effect at the next reset; after a failure the board's spare
    rows are used up: replace it (NVIDIA's GPU memory error management).
    """

    def wrong(gpu: Gpu) -> str:
        words = ["remapping failed"] if gpu.remap_failed else []
        words += ["remap pending"] if gpu.remap_pending else []
        words += ["repair pending"] if gpu.repair_pending else []
        return ", ".join(words)

    def value(gpu: Gpu) -> bool | None:
        return gpu.remap_failed if gpu.remap_pending is None else gpu.remap_pending

    failed = any(gpu.remap_failed for gpu in seen.gpus)
    fix = "replace the GPU" if failed else "drain, then reset the GPU or reboot"
    absent = "these GPUs remap no rows, or do not say"
    check, wanted = "gpus.remapped_rows", "none pending, none failed"
    return each(
        check,
        seen,
        wanted,
        value,
        wrong,
        absent=absent,
        fix=fix,
        shown="none",
        # In MIG mode nvidia-smi shows no rows.
        without=lambda gpu: gpu.mig == "on",
    )


@check("gpus.retired_pages", fix=("drain, then reset the GPU or reboot",))
def retired_pages(seen: Gpus, want: Policy) -> Result:
    """No page of memory waits to be retired (boards before Ampere): a reset does it."""

    def wrong(gpu: Gpu) -> str:
        return "page retirement pending" if gpu.retired_pending else ""

    fix, absent = "drain, then reset the GPU or reboot", "these GPUs retire no pages"
    return each(
        "gpus.retired_pages",
        seen,
        "none pending",
        lambda gpu: gpu.retired_pending,
        wrong,
        absent=absent,
        fix=fix,
        shown="none",
    )


def _narrow(seen: Gpus, gpu: Gpu) -> str:
    """What is wrong with the width of its link.

    A guest does not know the slot: there only one that is narrower than its peers is.
    """
    width, most = gpu.pcie_width, gpu.pcie_width_max
    if width is None or most is None or width >= most:
        return ""
    peers = [peer.pcie_width or 0 for peer in seen.gpus if peer.model == gpu.model]
    if gpu.virtual and width == max(peers):
        return ""
    return f"x{width} of x{most}"


def _slow(gpu: Gpu) -> str:
    """An idle GPU lowers its link's generation to save power: only P0 says something."""
    now, most = gpu.pcie_generation, gpu.pcie_generation_max
    if now is None or most is None or now >= most or gpu.virtual:
        return ""
    return f"generation {now} of {most}" if gpu.performance_state == "P0" else ""


def _narrow_on_bus(gpus: list[PciGpu]) -> list[str]:
    """The GPUs without a tool whose link is narrower than that of a peer."""
    words = []
    for gpu in gpus:
        widths = [peer.pcie_width or 0 for peer in gpus if peer.device == gpu.device]
        if gpu.pcie_width is not None and gpu.pcie_width < max(widths):
            words.append(f"{gpu.address}: x{gpu.pcie_width}, others x{max(widths)}")
    return words


@check(
    "gpus.pcie",
    fix=("look again under load", "reseat the GPU or its riser; look at the slot's settings"),
)
def pcie(seen: Gpus, want: Policy) -> Result:
    """Each PCIe link has all the lanes that board and slot have, and under load its generation.

    Half the lanes halve every copy to and from the host (DeepOps, GCM). Where no tool answers,
    peers on the bus are compared.
    """
    check, wanted = "gpus.pcie", "full width, and full speed under load"
    if none(seen):
        return na(check, none(seen))
    hidden = why_unseen(seen)
    words = _narrow_on_bus(expected(seen)) if hidden else []
    fix = "reseat the GPU or its riser; look at the slot's settings"

    def wrong(gpu: Gpu) -> str:
        return ", ".join(text for text in (_narrow(seen, gpu), _slow(gpu)) if text)

    def value(gpu: Gpu) -> str | None:
        if gpu.pcie_width is None:
            return None
        virtual = gpu.virtual and gpu.pcie_width != gpu.pcie_width_max
        return f"x{gpu.pcie_width}" + (" in a virtual machine" if virtual else "")

    idle = [gpu for gpu in seen.gpus if wrong(gpu)]
    only_idle = all(gpu.idle and not _narrow(seen, gpu) for gpu in idle)
    if words and not idle:
        return fail(check, wanted, few(words), "/sys/bus/pci/devices", fix)
    if hidden and not idle:
        return unknown(check, hidden)
    return each(
        check,
        seen,
        wanted,
        value,
        wrong,
        absent="the tool shows no PCIe link",
        fix="look again under load" if only_idle else fix,
        bad=warn if only_idle else fail,
    )


@check("gpus.throttle", fix=("look at fans, air flow, power supplies and cables",))
def throttle(seen: Gpus, want: Policy) -> Result:
    """No GPU is slowed down by its hardware: too hot, or its power supply asked for it.

    A limit on power alone (sw_power_cap) is how a busy GPU works. The driver's own thermal
    slow-down is a warning.
    """

    def wrong(gpu: Gpu) -> str:
        return ", ".join(gpu.throttle)

    def value(gpu: Gpu) -> tuple[str, ...] | None:
        # AMD's tools do not say that there is no reason.
        return gpu.throttle if gpu.throttle or gpu.vendor == "nvidia" else None

    hard = any(name.startswith(_HARDWARE) for gpu in seen.gpus for name in gpu.throttle)
    return each(
        "gpus.throttle",
        seen,
        "no slow-down",
        value,
        wrong,
        absent="the tool shows no reasons for a slow-down",
        fix="look at fans, air flow, power supplies and cables",
        shown="none",
        bad=fail if hard else warn,
    )


@check(
    "gpus.temperature",
    settings=("gpu_max_temperature_c",),
    fix=("look at fans, air flow and heat sinks",),
)
def temperature(seen: Gpus, want: Policy) -> Result:
    """Each GPU is cooler than the policy's limit, or than where it slows itself down.

    NVIDIA's Ada and later boards print how many degrees are left instead (T.Limit, higher is
    cooler): the threshold here is computed from it.
    """
    limit = want.gpu_max_temperature_c

    def value(gpu: Gpu) -> int | None:
        return None if limit is None and gpu.temperature_slowdown_c is None else gpu.temperature_c

    def wrong(gpu: Gpu) -> str:
        most = gpu.temperature_slowdown_c if limit is None else limit
        words = []
        if gpu.temperature_c is not None and most is not None and gpu.temperature_c >= most:
            words.append(f"{gpu.temperature_c} C, limit {most} C")
        memory, most = gpu.memory_temperature_c, gpu.memory_temperature_max_c
        if memory is not None and most is not None and memory >= most:
            words.append(f"memory {memory} C, limit {most} C")
        return ", ".join(words)

    degrees = [gpu.temperature_c for gpu in seen.gpus if gpu.temperature_c is not None]
    wanted = "below the slow-down" if limit is None else f"below {limit} C"
    return each(
        "gpus.temperature",
        seen,
        wanted,
        value,
        wrong,
        absent="the tool shows no temperature and threshold",
        fix="look at fans, air flow and heat sinks",
        shown=f"at most {max(degrees)} C" if degrees else "",
    )
