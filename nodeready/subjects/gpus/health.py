"""Judge the health of GPUs: memory, bus, heat, device files, and the links between GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.core import severity
from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, join_names
from nodeready.core.severity import GUIDELINES, MEMORY_ERRORS, loses_job, slows_job
from nodeready.subjects.gpus.findings import (
    FaultSign,
    distinct_values,
    expected_gpus,
    findings_text,
    judge_each,
    judge_signs,
    no_gpu_reason,
    silent_text,
    unreadable_text,
    unshown_reason,
)
from nodeready.subjects.gpus.gpu import DeviceFile, Gpu, Gpus, PciGpu
from nodeready.subjects.gpus.nvidia import FABRIC_JOINED, is_on_board, is_switched

# --- Memory, bus and heat, and the driver's recovery action.


@check("gpus.recovery", loses_job("reset_gpu", "reboot", "replace", source=MEMORY_ERRORS),
       expects="no reset or reboot needed",
       fix="drain the node, then nvidia-smi --gpu-reset, or reboot")  # fmt: skip
def recovery(observed: Gpus, policy: Policy) -> Result:
    """The driver asks for no reset or reboot (nvmlDeviceGetGpuRecoveryAction, driver 535 on).

    After a fault the counters can be readable and 0 while no job can run any more.
    """
    must_reboot = any(gpu.recovery == "reboot" for gpu in observed.gpus)
    return judge_each(
        *(recovery, observed, "recovery"),
        lambda gpu: "" if gpu.recovery == "none" else f"asks for {gpu.recovery}",
        absent="the tool shows no recovery action",
        actions=("reboot", "replace") if must_reboot else (),
    )


_REPLACE = "replace the GPU"
_REPLACE_LATER = "replace the GPU at the next occasion"
_RESET = "drain, then reset the GPU or reboot"
_RESET_ECC = "drain, reset the GPU; replace it if they come back"
_BY_REPLACING = ("replace",)
_ECC_SIGNS = (
    FaultSign("ecc_uncorrectable_volatile", "{} uncorrectable ECC errors", _RESET_ECC),
    FaultSign("sram_exceeded", "SRAM error threshold exceeded", _REPLACE, _BY_REPLACING),
    FaultSign("ecc_deferred", "{} deferred ECC errors", _RESET_ECC, status="warn"),
)


@check("gpus.ecc_errors", loses_job("reset_gpu", "reboot", "replace", source=MEMORY_ERRORS),
       expects="0 uncorrectable", fix=(_RESET_ECC, _REPLACE))  # fmt: skip
def ecc_errors(observed: Gpus, policy: Policy) -> Result:
    """No uncorrectable ECC error since the driver was loaded (DeepOps, Meta's GCM).

    Corrected errors do not count. An uncorrectable error ended a job, and its memory stays in use
    until the next reset. Deferred errors (AMD) are in data that no program has read yet: a
    warning. Replace a GPU whose SRAM had more errors than NVIDIA allows
    (nvmlEccSramErrorStatus_t, bThresholdExceeded).
    """
    return judge_signs(
        *(ecc_errors, observed, _ECC_SIGNS),
        lambda gpu: gpu.ecc_uncorrectable_volatile,
        absent="these GPUs count no ECC errors",
        without=lambda gpu: gpu.ecc == "off",
    )


_ROW_SIGNS = (
    FaultSign("remap_failed", "remapping failed", _REPLACE, _BY_REPLACING),
    FaultSign("unrepairable", "unrepairable memory", _REPLACE, _BY_REPLACING),
    FaultSign("remap_pending", "remap pending", _RESET),
    FaultSign("repair_pending", "repair pending", _RESET),
    FaultSign(
        *("spareless_banks", "{} memory banks without a spare row", _REPLACE_LATER, _BY_REPLACING),
        status="warn",
    ),
)


@check("gpus.remapped_rows", loses_job("reset_gpu", "reboot", "replace", source=MEMORY_ERRORS),
       expects="none pending, none failed", fix=(_REPLACE, _RESET, _REPLACE_LATER))  # fmt: skip
def remapped_rows(observed: Gpus, policy: Policy) -> Result:
    """No row of memory waits to be remapped, and none could not be (Azure's health checks).

    A pending remap or repair takes effect at the next reset. After a failure the board has no
    spare row left: replace it (NVIDIA's GPU memory error management). Also replace a board with
    memory that no spare can replace (nvmlDeviceGetUnrepairableMemoryFlag). A bank without a spare
    row is a warning: the next error in that bank fails (nvmlRowRemapperHistogramValues_t).
    """
    return judge_signs(
        *(remapped_rows, observed, _ROW_SIGNS),
        lambda gpu: gpu.remap_failed if gpu.remap_pending is None else gpu.remap_pending,
        absent="these GPUs remap no rows, or do not say",
        shown="none",
        # In MIG mode nvidia-smi shows no rows.
        without=lambda gpu: gpu.mig == "on",
    )


_PAGE_SIGNS = (
    FaultSign("retired_pending", "page retirement pending", _RESET),
    # A board can retire 64 pages; NVIDIA replaces it at 60 (Dynamic Page Retirement).
    FaultSign("retired_pages", "{} pages retired", _REPLACE, _BY_REPLACING, least=60),
)


@check("gpus.retired_pages", expects="none pending", fix=(_RESET, _REPLACE),
       cost=loses_job("reset_gpu", "reboot", "replace", source=severity.RETIREMENT))  # fmt: skip
def retired_pages(observed: Gpus, policy: Policy) -> Result:
    """No page of memory waits to be retired by a reset (boards before Ampere).

    Replace a board with 60 retired pages or more (NVIDIA's Dynamic Page Retirement).
    """
    return judge_signs(
        *(retired_pages, observed, _PAGE_SIGNS),
        lambda gpu: gpu.retired_pending,
        absent="these GPUs retire no pages",
        shown="none",
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
    if (maximum := gpu.pcie_width_max) is None:
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
    words = []
    for gpu in gpus:
        widths = [peer.pcie_width or 0 for peer in gpus if peer.device == gpu.device]
        if gpu.pcie_width is not None and gpu.pcie_width < max(widths):
            words.append(f"{gpu.address}: x{gpu.pcie_width}, others x{max(widths)}")
    return words


_LOOK_AGAIN = "look again under load"
_RESEAT = "reseat the GPU or its riser; look at the slot's settings"
#: For a finding that no load explains.
_BY_RESEATING = ("reseat", "replace")
_PCIE_READS = (
    *("pcie_width", "pcie_width_max", "pcie_generation", "pcie_generation_max"),
    *("performance_state", "idle", "virtual"),
)


@check("gpus.pcie", slows_job("monitor", "reseat", "replace", source=GUIDELINES),
       expects="full width, and full speed under load", fix=(_LOOK_AGAIN, _RESEAT))  # fmt: skip
def pcie(observed: Gpus, policy: Policy) -> Result:
    """Each PCIe link has all lanes of board and slot, and under load its full generation.

    Half the lanes halve the speed of every copy to and from the host (DeepOps, GCM). Where no tool
    answers, peers on the bus are compared. An uncorrected error of the link since the boot is a
    warning. A fatal error, after which the link was set up anew, is a failure (the kernel's
    aer_stats).
    """
    if reason := no_gpu_reason(observed):
        return pcie.na(reason)
    bus_gpus, hidden = expected_gpus(observed), unshown_reason(observed)
    words = _narrow_on_bus(bus_gpus) if hidden else []
    errors = {
        gpu.address: join_names(f"{count} {error} ({kind})" for kind, error, count in gpu.aer)
        for gpu in bus_gpus
        if gpu.aer
    }
    fatal = any(kind == "fatal" for gpu in bus_gpus for kind, _, _ in gpu.aer)

    def find_problem(gpu: Gpu) -> str:
        words = _width_problem(observed, gpu), _speed_problem(gpu), errors.get(gpu.pci_address, "")
        return ", ".join(text for text in words if text)

    def value(gpu: Gpu) -> str | None:
        if gpu.pcie_width is None:
            return "?" if find_problem(gpu) else None
        if gpu.pcie_width == gpu.pcie_width_max:
            return f"x{gpu.pcie_width}"
        idle = " while idle" if _may_narrow(gpu) else ""
        return f"x{gpu.pcie_width}{' in a virtual machine' if gpu.virtual else idle}"

    findings = [gpu for gpu in observed.gpus if find_problem(gpu)]
    is_failure = fatal or any(
        _width_problem(observed, gpu) or (_speed_problem(gpu) and not gpu.idle) for gpu in findings
    )
    is_failure = is_failure or (bool(words) and not findings)
    words += [f"{address}: {text}" for address, text in errors.items()]
    status = "fail" if is_failure else "warn"
    if words and not findings:
        text = join_names(words)
        return pcie.fail(
            text, "/sys/bus/pci/devices", _RESEAT, actions=_BY_RESEATING, status=status
        )
    if hidden and not findings:
        return pcie.unknown(hidden)
    return judge_each(
        *(pcie, observed, value, find_problem),
        absent="the tool shows no PCIe link",
        reads=_PCIE_READS,
        fix=_RESEAT if is_failure or errors else _LOOK_AGAIN,
        actions=_BY_RESEATING if is_failure or errors else (),
        status=status,
    )


@check("gpus.throttle", slows_job("inspect", "reseat", "replace", source=GUIDELINES),
       expects="no slow-down",
       fix="look at fans, air flow, power supplies and cables")  # fmt: skip
def throttle(observed: Gpus, policy: Policy) -> Result:
    """No GPU is slowed down by its hardware: by heat, or by its power supply.

    A busy GPU works at its limit on power (sw_power_cap), which does not count. The driver's own
    thermal slow-down is a warning.
    """
    is_failure = any(name.startswith("hw_") for gpu in observed.gpus for name in gpu.throttle)
    return judge_each(
        *(throttle, observed),
        # AMD's tools do not show the absence of a reason.
        lambda gpu: gpu.throttle if gpu.throttle or gpu.throttled is not None else None,
        lambda gpu: ", ".join(gpu.throttle),
        absent="the tool shows no reasons for a slow-down",
        shown="none",
        reads=("throttle",),
        status="fail" if is_failure else "warn",
    )


@check("gpus.temperature", slows_job("inspect", "reseat", "replace", source=GUIDELINES),
       settings=("gpu_max_temperature_c",),
       fix="look at fans, air flow and heat sinks")  # fmt: skip
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

    def above_limit(gpu: Gpu) -> list[str]:
        own_limit = gpu.temperature_slowdown_c if limit is None else limit
        return [
            f"{name}{degrees} C, limit {maximum} C"
            for name, degrees, maximum in (
                ("", gpu.temperature_c, own_limit),
                ("memory ", gpu.memory_temperature_c, gpu.memory_temperature_max_c),
            )
            if degrees is not None and maximum is not None and degrees >= maximum
        ]

    def find_problem(gpu: Gpu) -> str:
        degrees_left = gpu.temperature_left_c
        is_at_limit = limit is None and degrees_left is not None and degrees_left <= 0
        at_limit = f"{degrees_left} C left to the limit" if is_at_limit else ""
        return ", ".join(above_limit(gpu)) or at_limit

    degrees = [gpu.temperature_c for gpu in observed.gpus if gpu.temperature_c is not None]
    slowdown = ("temperature_slowdown_c", "temperature_left_c") if limit is None else ()
    return judge_each(
        *(temperature, observed, value, find_problem),
        absent="the tool shows no temperature and threshold",
        expected="below the slow-down" if limit is None else f"below {limit} C",
        shown=f"at most {max(degrees)} C" if degrees else "",
        reads=("temperature_c", "memory_temperature_c", *slowdown),
        status="fail" if any(above_limit(gpu) for gpu in observed.gpus) else "warn",
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


def _inaccessible(files: Iterable[DeviceFile]) -> list[str]:
    """The files that neither all users nor a group other than root's can open for both."""
    return [
        f"{file.path} {file.mode} group {file.gid}"
        for file in files
        if file.mode[7:9] != "rw" and (file.mode[4:6] != "rw" or file.gid == 0)
    ]


@check("gpus.device_access", loses_job("configure", "reload_driver"),
       expects="readable and writable for jobs",
       fix=(_FIX_PART, _FIX_AMD, _FIX_NVIDIA, _FIX_MODE))  # fmt: skip
def device_access(observed: Gpus, policy: Policy) -> Result:
    """Jobs can open the GPUs' device files: all users, or the members of a group.

    ROCm opens /dev/kfd and /dev/dri/renderD*, which belong to the groups render and video unless a
    rule of udev opens them (ROCm's installation guide: configuring permissions for GPU access);
    CUDA opens /dev/nvidia*, 0666 by default (NVIDIA's driver README, "DeviceFileMode"). This check
    does not test whether a job's user is in that group. No program may compute on a GPU in the
    compute mode Prohibited (nvidia-smi(1)).
    """
    if reason := no_gpu_reason(observed):
        return device_access.na(reason)
    bound = {gpu.vendor for gpu in expected_gpus(observed) if gpu.driver in ("amdgpu", "nvidia")}
    bound |= {gpu.vendor for gpu in observed.gpus}
    if not bound:
        return device_access.na("no GPU has its driver")
    amd, lost = [], []
    if "amd" in bound:
        amd = [f for f in observed.device_files if f.path == _KFD or f.path.startswith(_RENDER)]
        lost += [] if any(f.path == _KFD for f in amd) else [_KFD]
        lost += [] if any(f.path != _KFD for f in amd) else [f"{_RENDER}*"]
    nvidia = [f for f in observed.device_files if "nvidia" in bound and _NVIDIA.fullmatch(f.path)]
    if lost and not observed.device_files:
        return device_access.unknown("no device file was seen")
    barred = [gpu for gpu in observed.nvidia if gpu.compute_mode == "prohibited"]
    closed_amd, closed_nvidia = _inaccessible(amd), _inaccessible(nvidia)
    fixes = {_FIX_PART: lost, _FIX_MODE: barred, _FIX_AMD: closed_amd, _FIX_NVIDIA: closed_nvidia}
    if any(fixes.values()):
        words = [f"{path} is missing" for path in lost] + closed_amd + closed_nvidia
        if barred:
            words.append(findings_text((gpu, "compute mode prohibited") for gpu in barred))
        fix = "; ".join(fix for fix, parts in fixes.items() if parts)
        return device_access.fail(join_names(words), "/dev", fix)
    if unreadable := unreadable_text(observed, ("compute_mode",)):
        return device_access.unknown(unreadable)
    if not amd and not nvidia:
        # nvidia-modprobe makes the files when the first program needs them.
        return device_access.na("no program has used a GPU since the boot")
    groups = sorted({file.gid for file in (*amd, *nvidia) if file.mode[7:9] != "rw"})
    numbers = join_names(map(str, groups))
    users = f"for members of group {numbers} only" if groups else "for everybody"
    return device_access.ok(users, "/dev")


# --- The links between GPUs, and the manager of their switches.

# Gigabytes per second of one link: V100, A100, Hopper, Blackwell (NVIDIA's Health Validation,
# nvlink_bandwidth_count_speed, and recorded output). A slower link has lost lanes.
_SPEEDS = (
    (re.compile(r"\bV100\b"), 25.781),
    (re.compile(r"\bA[138]00\b"), 25.0),
    (re.compile(r"\bH(?:20|20-3e|100|200|800)\b"), 26.562),
    (re.compile(r"\bG?B[123]00\b"), 53.125),
)

#: Part of the nominal speed below which a link is slow: tools round speeds.
_ROUNDED = 0.98
# A bridge between two cards carries four links of each (H100 NVL and PCIe, A100 PCIe product
# briefs: three bridges, twelve links).
_BRIDGED = re.compile(r"\b[AH]100\b.*\b(?:PCIe|NVL)\b")
_LINKS_PER_BRIDGE = 4
_PAIRED = re.compile(r"\bH100 NVL\b")
#: The fields of a GPU that `nvlink` judges.
_READS = ("links", "uuid", "virtual")


def _active_count(gpu: Gpu) -> int:
    return sum(link.state == "active" for link in gpu.links)


def _is_fully_linked(observed: Gpus, gpu: Gpu) -> bool:
    """Whether all links of this GPU are connected by construction, within this node.

    All links are connected on a board with NVSwitches (visible to the host or not) and on an SXM
    board. Bridges between PCIe cards are an option, and unused links are inactive by design (an
    H100 NVL uses 12 of 18). A virtual machine may have only some of a board's GPUs. In MIG mode a
    GPU uses no links.
    """
    if gpu.mig == "on":
        return False
    if observed.nvswitches or gpu.fabric_state in FABRIC_JOINED:
        return True
    if len(observed.nvidia) == 1:
        return False
    # A board of four P100 links each to the three others and leaves one link unused.
    is_full_board = not gpu.virtual and is_on_board(gpu) and "P100" not in (gpu.model or "")
    return is_switched(gpu) or is_full_board


def _down_text(observed: Gpus, gpu: Gpu) -> str:
    """The links of the GPU that are down and should be up, in words; "": none."""
    down = [link.index for link in gpu.links if link.state == "inactive"]
    if gpu.vendor == "amd":
        return f"{len(down)} of {len(gpu.links)} links down" if down else ""
    if any(field == "links" for field, _ in gpu.unread):
        return ""
    fully_linked = _is_fully_linked(observed, gpu)
    if not _active_count(gpu) and gpu.mig != "on" and is_on_board(gpu):
        # Even a part of a board in a virtual machine has links between its GPUs.
        return "all links inactive" if fully_linked or len(observed.nvidia) > 1 else ""
    if not fully_linked:
        return ""
    if not gpu.links:
        return "all links inactive"
    return f"link {join_names(map(str, down))} inactive" if down else ""


# A GPU beside a Grace processor: their link is on in a sound node (recorded GB200, GB300).
_GRACE = re.compile(r"\bG[HB][23]00\b")


def _slow_links(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with a link slower than the model's speed, or than its fastest link here."""
    findings = []
    fastest_by_model: dict[str | None, float] = {}
    for gpu in observed.gpus:
        speeds = [link.speed_gbps or 0.0 for link in gpu.links]
        fastest_by_model[gpu.model] = max((*speeds, fastest_by_model.get(gpu.model, 0.0)))
    for gpu in observed.gpus:
        fastest = fastest_by_model[gpu.model]
        nominals = (speed for model, speed in _SPEEDS if model.search(gpu.model or ""))
        # Where the GPUs of a node have different names, the names are the finding.
        nominal = next(nominals, 0.0) if len(fastest_by_model) == 1 else 0.0
        for link in gpu.links:
            speed = link.speed_gbps
            if speed is not None and speed < max(fastest, nominal * _ROUNDED):
                text = f"link {link.index} at {speed:g} of {max(fastest, nominal):g} GB/s"
                findings.append((gpu, text))
                break
    return findings


def _bridge_problem(observed: Gpus, gpu: Gpu) -> str:
    model, active = gpu.model or "", _active_count(gpu)
    if gpu.mig == "on" or not _BRIDGED.search(model):
        return ""
    if active % _LINKS_PER_BRIDGE:
        return f"{active} active links, {_LINKS_PER_BRIDGE} to a bridge"
    pair = _PAIRED.search(model) and len(observed.nvidia) > 1
    return "all links inactive: a pair without its bridges" if pair and not active else ""


_BRIDGES = "look at the bridges"


@check("gpus.nvlink",
       slows_job("reset_gpu", "reboot", "reseat", "replace", source=severity.VALIDATION),
       expects="all links active at one speed", fix=(
    "reset the GPUs; then reseat the board or the bridge; see dmesg for amdgpu",
    _BRIDGES,
))  # fmt: skip
def nvlink(observed: Gpus, policy: Policy) -> Result:
    """All links between the GPUs (NVLink, XGMI) are active, at one speed.

    One link that is down slows every collective operation down. A GPU without the link to its
    Grace processor (NVLink-C2C) reaches the processor by PCIe. On PCIe cards the owner chooses
    which cards a bridge joins: a warning where the numbers of active links differ, or where only
    a part of a bridge's links is active.
    """
    if reason := no_gpu_reason(observed):
        return nvlink.na(reason)
    nvlink_tool = observed.nvlink_tool
    # An A10 and other cards without NVLink: the command prints nothing.
    is_empty = nvlink_tool.state == "missing" and observed.nvidia_tool.works
    has_answered = nvlink_tool.works or (bool(observed.nvidia) and is_empty)
    shown_gpus = observed.amd + (observed.nvidia if has_answered else ())
    findings = [(gpu, text) for gpu in shown_gpus if (text := _down_text(observed, gpu))]
    findings += _slow_links(observed)
    findings += [
        (gpu, "NVLink-C2C to the processor off")
        for gpu in observed.nvidia
        if gpu.c2c == "off" and _GRACE.search(gpu.model or "")
    ]
    if findings:
        amd = all(gpu.vendor == "amd" for gpu, _ in findings)
        source = (observed.amd_tool if amd else nvlink_tool).name
        # Xid 74 is NVIDIA's code for a link.
        word = "amdgpu" if amd else "Xid 74"
        fix = f"reset the GPUs; then reseat the board or the bridge; see dmesg for {word}"
        return nvlink.fail(findings_text(findings), source, fix)
    if hidden := unshown_reason(observed):
        return nvlink.unknown(hidden)
    if observed.nvidia and not has_answered:
        return nvlink.unknown(nvlink_tool.state_text)
    if unreadable := unreadable_text(observed, _READS):
        return nvlink.unknown(unreadable)
    linked = [gpu for gpu in observed.gpus if _active_count(gpu)]
    numbers = {(gpu.model, _active_count(gpu)) for gpu in linked}
    partial = [(gpu, text) for gpu in observed.nvidia if (text := _bridge_problem(observed, gpu))]
    if not partial and len(numbers) > len({gpu.model for gpu in linked}):
        partial = [(gpu, f"{_active_count(gpu)} active links") for gpu in linked]
    if partial:
        text, actions = findings_text(partial), ("reseat",)
        return nvlink.warn(text, nvlink_tool.name, _BRIDGES, actions=actions)
    if not linked:
        return nvlink.na("these GPUs use no links")
    return nvlink.ok(f"{distinct_values(map(_active_count, linked))} per GPU")


_START = "systemctl start nvidia-fabricmanager, of the driver's own version; see its log"
_HEAL = "see the logs of the fabric manager and of NVLSM; drain, then reset the node's GPUs"
#: The fields of a GPU that `fabric_manager` judges.
_FABRIC_READS = ("fabric_state", "fabric_status", "fabric_faults", "fabric_clique")


def _unhealthy_gpus(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with an unhealthy attachment to the fabric, and those of different cliques."""
    faulty = [gpu for gpu in observed.nvidia if gpu.fabric_faults]
    findings = [(gpu, f"fabric {', '.join(gpu.fabric_faults)}") for gpu in faulty]
    cliques = [gpu for gpu in observed.nvidia if gpu.fabric_clique]
    if len({gpu.fabric_clique for gpu in cliques}) > 1:
        # Cliques reach each other only by PCIe (NVIDIA's Multi-Node NVLink guide, cliques).
        findings += [(gpu, f"NVLink clique {gpu.fabric_clique}") for gpu in cliques]
    return findings


def _gpus_outside_fabric(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that should have joined the fabric and have not, each with its state."""
    states = [gpu for gpu in observed.nvidia if gpu.fabric_state is not None]
    # On boards without switches the fabric manager may always be "not started".
    needed = observed.nvswitches or (len(states) > 1 and all(is_switched(gpu) for gpu in states))
    if not needed and {gpu.fabric_state for gpu in states} == {"not started"}:
        return []
    return [
        (gpu, f"fabric {gpu.fabric_state}: {gpu.fabric_status}".replace(": None", ""))
        for gpu in states
        if gpu.fabric_state != "completed" or gpu.fabric_status not in (None, "success")
    ]


@check("gpus.fabric_manager",
       loses_job("restart_service", "reset_gpu", "reboot", "replace", source=severity.FABRIC),
       expects="running, and each GPU registered", fix=(_START, _HEAL))  # fmt: skip
def fabric_manager(observed: Gpus, policy: Policy) -> Result:
    """The fabric manager runs where NVSwitches are, and each GPU has joined a healthy fabric.

    Without the manager no CUDA program starts on such a board (NVIDIA's Fabric Manager user
    guide). The host does not see the switches of newer boards: there the GPUs' own state counts.
    The fabric's report on a GPU's health (nvmlGpuFabricInfo_v3_t) counts wherever it exists, and
    all GPUs of a node are in one clique.
    """
    if no_gpu_reason(observed) or not (expected_gpus(observed, "nvidia") or observed.nvidia):
        return fabric_manager.na(no_gpu_reason(observed) or "no NVIDIA GPU")
    states = [gpu for gpu in observed.nvidia if gpu.fabric_state is not None]
    unjoined, unhealthy = _gpus_outside_fabric(observed), _unhealthy_gpus(observed)
    words = []
    if observed.nvswitches and observed.fabric_manager == "not running":
        words.append(f"{observed.nvswitches} NVSwitches, but nv-fabricmanager does not run")
    fix = _START if words or unjoined else _HEAL
    words += [findings_text(findings) for findings in (unjoined, unhealthy) if findings]
    if words:
        actions = ("reset_gpu", "reboot", "replace") if fix == _HEAL else ()
        return fabric_manager.fail("; ".join(words), "nvidia-smi -q", fix, actions=actions)
    hidden = unshown_reason(observed, "nvidia")
    if unreadable := unreadable_text(observed, _FABRIC_READS):
        return fabric_manager.unknown(unreadable)
    if not observed.nvswitches and {gpu.fabric_state for gpu in states} == {"not started"}:
        states = []
    models = {gpu.model for gpu in states}
    stateless = [gpu for gpu in observed.nvidia if gpu.fabric_state is None]
    if silent := silent_text(gpu for gpu in stateless if gpu.model in models):
        return fabric_manager.unknown(silent)
    if not observed.nvswitches and not states and not hidden:
        return fabric_manager.na("no NVSwitch")
    if observed.nvswitches and observed.fabric_manager != "running":
        tool = observed.nvidia_tool
        return fabric_manager.unknown(f"processes were not looked at: {tool.name} {tool.state}")
    if hidden:
        return fabric_manager.unknown(hidden)
    return fabric_manager.ok("running" if observed.nvswitches else "registered")


_RESET_LINKS = "drain, reset the GPUs; open a case with the vendor if they come back"
_XGMI_SIGNS = (FaultSign("xgmi_errors", "{} XGMI errors", _RESET_LINKS),)


@check("gpus.xgmi_errors", loses_job("reset_gpu", "reboot", "replace", source=severity.AMDGPU_RAS),
       expects="0 errors", fix=_RESET_LINKS)  # fmt: skip
def xgmi_errors(observed: Gpus, policy: Policy) -> Result:
    """No error on the links between AMD's GPUs (XGMI) since the driver was loaded.

    RAS counts them as block XGMI_WAFL. MI200 and older have a separate status, which amd-smi
    clears by reading it (Linux' amdgpu_xgmi.c): there, each audit shows the errors since the last.
    """
    if not observed.amd and not expected_gpus(observed, "amd"):
        return xgmi_errors.na(no_gpu_reason(observed) or "no AMD GPU")
    return judge_signs(
        *(xgmi_errors, observed, _XGMI_SIGNS),
        lambda gpu: getattr(gpu, "xgmi_errors", None),
        absent="these GPUs count none",
    )
