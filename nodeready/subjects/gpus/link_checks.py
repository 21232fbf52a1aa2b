"""Judge the links between GPUs, and the manager of their switches."""

from __future__ import annotations

import re

from nodeready.policy import Policy
from nodeready.subjects.gpus.amd_gpu import AmdGpu
from nodeready.subjects.gpus.findings import (
    distinct_values,
    expected_gpus,
    findings_text,
    judge_each,
    no_gpu_reason,
    unreadable_gpus,
    unshown_reason,
    vendor_tool_of,
)
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.nvlink import is_on_board, is_switched
from nodeready.subjects.result import Result, check, fail, na, ok, unknown, warn

# Gigabytes per second of one link: V100, A100, Hopper, Blackwell (NVIDIA's Health Validation,
# nvlink_bandwidth_count_speed, and recorded output). A slower link has lost lanes.
_SPEEDS = (
    (re.compile(r"\bV100\b"), 25.781),
    (re.compile(r"\bA[138]00\b"), 25.0),
    (re.compile(r"\bH(?:20|20-3e|100|200|800)\b"), 26.562),
    (re.compile(r"\bG?B[123]00\b"), 53.125),
)

_ROUNDED = 0.98
# A bridge between two cards carries four links of each (H100 NVL and PCIe, A100 PCIe product
# briefs: three bridges, twelve links).
_BRIDGED = re.compile(r"\b[AH]100\b.*\b(?:PCIe|NVL)\b")
_BRIDGE = 4
_PAIRED = re.compile(r"\bH100 NVL\b")
_READS = ("links", "uuid", "virtual")


def _active(gpu: Gpu) -> int:
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
    if observed.nvswitches or gpu.fabric_state in ("completed", "in progress"):
        return True
    several = len(observed.nvidia) > 1
    if several and is_switched(gpu):
        return True
    # A board of four P100 links each to the three others and leaves one link unused.
    return several and not gpu.virtual and is_on_board(gpu) and "P100" not in (gpu.model or "")


def _down(observed: Gpus, gpu: Gpu) -> str:
    down = [link.index for link in gpu.links if link.state == "inactive"]
    if gpu.vendor == "amd":
        return f"{len(down)} of {len(gpu.links)} links down" if down else ""
    if any(field == "links" for field, _ in gpu.unread):
        return ""
    if not _active(gpu) and gpu.mig != "on" and is_on_board(gpu):
        # Even a part of a board in a virtual machine has links between its GPUs.
        return (
            "all links inactive"
            if _is_fully_linked(observed, gpu) or len(observed.nvidia) > 1
            else ""
        )
    if not _is_fully_linked(observed, gpu):
        return ""
    if not gpu.links:
        return "all links inactive"
    names = ", ".join(str(index) for index in down[:4])
    names += f" and {len(down) - 4} more" if len(down) > 4 else ""
    return f"link {names} inactive" if down else ""


def _nominal_speed(observed: Gpus, gpu: Gpu) -> float:
    """The nominal speed of the model's links, rounded down a little; 0 where it is unknown.

    Where the GPUs of a node have different names, the names are the finding.
    """
    if len({peer.model for peer in observed.gpus}) > 1:
        return 0.0
    speeds = (speed for model, speed in _SPEEDS if model.search(gpu.model or ""))
    return next(speeds, 0.0) * _ROUNDED


# A GPU beside a Grace processor: the link between them is on in a sound node (recorded GB200,
# GB300).
_GRACE = re.compile(r"\bG[HB][23]00\b")


def _gpus_without_c2c(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that reach their Grace processor only by PCIe."""
    return [
        (gpu, "NVLink-C2C to the processor off")
        for gpu in observed.nvidia
        if gpu.c2c == "off" and _GRACE.search(gpu.model or "")
    ]


def _slow_links(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with a link slower than the model's speed, or than its fastest link here."""
    findings = []
    fastest_by_model: dict[str | None, float] = {}
    for gpu in observed.gpus:
        speeds = [link.speed_gbps or 0.0 for link in gpu.links]
        fastest_by_model[gpu.model] = max((*speeds, fastest_by_model.get(gpu.model, 0.0)))
    for gpu in observed.gpus:
        fastest = fastest_by_model[gpu.model]
        link_speeds = [(x, x.speed_gbps) for x in gpu.links if x.speed_gbps is not None]
        nominal = _nominal_speed(observed, gpu)
        slow = [x for x, speed in link_speeds if speed < fastest or speed < nominal]
        if slow:
            fastest = max(fastest, round(nominal / _ROUNDED, 3))
            text = f"link {slow[0].index} at {slow[0].speed_gbps:g} of {fastest:g} GB/s"
            findings.append((gpu, text))
    return findings


def _bridge_problem(observed: Gpus, gpu: Gpu) -> str:
    """The problem with the bridges of a card, or ""."""
    model, active = gpu.model or "", _active(gpu)
    if gpu.mig == "on" or not _BRIDGED.search(model):
        return ""
    if active % _BRIDGE:
        return f"{active} active links, {_BRIDGE} to a bridge"
    pair = _PAIRED.search(model) and len(observed.nvidia) > 1
    return "all links inactive: a pair without its bridges" if pair and not active else ""


@check(
    "gpus.nvlink",
    fix=(
        "reset the GPUs; then reseat the board or the bridge; see dmesg for amdgpu",
        "look at the bridges",
    ),
)
def nvlink(observed: Gpus, policy: Policy) -> Result:
    """All links between the GPUs (NVLink, XGMI) are active, at one speed.

    One link that is down slows every collective operation down. A GPU without the link to its
    Grace processor (NVLink-C2C) reaches the processor by PCIe. On PCIe cards the owner chooses
    which cards a bridge joins: a warning where the numbers of active links differ, or where only
    a part of a bridge's links is active.
    """
    check, expectation = "gpus.nvlink", "all links active at one speed"
    if no_gpu_reason(observed):
        return na(check, no_gpu_reason(observed))
    # An A10 and other cards without NVLink: the command prints nothing.
    empty = (
        bool(observed.nvidia)
        and observed.nvlink_tool.state == "missing"
        and observed.nvidia_tool.works
    )
    has_answered = observed.nvlink_tool.works or empty
    down = [(gpu, text) for gpu in observed.amd if (text := _down(observed, gpu))]
    if has_answered:
        down += [(gpu, text) for gpu in observed.nvidia if (text := _down(observed, gpu))]
    findings = down + _slow_links(observed) + _gpus_without_c2c(observed)
    if findings:
        # Xid 74 is NVIDIA's code for a link.
        amd = all(gpu.vendor == "amd" for gpu, _ in findings)
        source = (observed.amd_tool if amd else observed.nvlink_tool).name
        word = "amdgpu" if amd else "Xid 74"
        fix = f"reset the GPUs; then reseat the board or the bridge; see dmesg for {word}"
        return fail(check, expectation, findings_text(findings), source, fix)
    hidden = unshown_reason(observed)
    if hidden:
        return unknown(check, hidden)
    if observed.nvidia and not has_answered:
        vendor_tool = observed.nvlink_tool
        return unknown(
            check, f"{vendor_tool.name} {vendor_tool.state}: {vendor_tool.detail}".rstrip(": ")
        )
    unreadable = unreadable_gpus(observed, _READS)
    if unreadable:
        return unknown(check, findings_text(unreadable))
    linked = [gpu for gpu in observed.gpus if _active(gpu)]
    partial = [(gpu, text) for gpu in observed.nvidia if (text := _bridge_problem(observed, gpu))]
    if partial:
        return warn(
            check,
            expectation,
            findings_text(partial),
            observed.nvlink_tool.name,
            "look at the bridges",
        )
    if not linked:
        return na(check, "these GPUs use no links")
    numbers = {(gpu.model, _active(gpu)) for gpu in linked}
    if len(numbers) > len({gpu.model for gpu in linked}):
        text = findings_text((gpu, f"{_active(gpu)} active links") for gpu in linked)
        return warn(check, expectation, text, observed.nvlink_tool.name, "look at the bridges")
    return ok(check, expectation, f"{distinct_values(linked, _active)} per GPU")


_START = "systemctl start nvidia-fabricmanager, of the driver's own version; see its log"
_HEAL = "see the logs of the fabric manager and of NVLSM; drain, then reset the node's GPUs"
_FABRIC_READS = ("fabric_state", "fabric_status", "fabric_faults", "fabric_clique")


def _unhealthy_gpus(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with an unhealthy attachment to the fabric, and those of different cliques."""
    findings = [(gpu, f"fabric {', '.join(gpu.fabric_faults)}") for gpu in observed.nvidia]
    findings = [(gpu, text) for gpu, text in findings if gpu.fabric_faults]
    cliques = [gpu for gpu in observed.nvidia if gpu.fabric_clique]
    if len({gpu.fabric_clique for gpu in cliques}) > 1:
        # Cliques reach each other only by PCIe (NVIDIA's Multi-Node NVLink guide, cliques).
        findings += [(gpu, f"NVLink clique {gpu.fabric_clique}") for gpu in cliques]
    return findings


def _gpus_outside_fabric(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that have not joined the fabric."""
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


@check("gpus.fabric_manager", fix=(_START, _HEAL))
def fabric_manager(observed: Gpus, policy: Policy) -> Result:
    """The fabric manager runs where NVSwitches are, and each GPU has joined a healthy fabric.

    Without the manager no CUDA program starts on such a board (NVIDIA's Fabric Manager user
    guide). The host does not see the switches of newer boards: there the GPUs' own state counts.
    The fabric's report on a GPU's health (nvmlGpuFabricInfo_v3_t) counts wherever it exists, and
    all GPUs of a node are in one clique.
    """
    check, expectation = "gpus.fabric_manager", "running, and each GPU registered"
    if no_gpu_reason(observed) or not (expected_gpus(observed, "nvidia") or observed.nvidia):
        return na(check, no_gpu_reason(observed) or "no NVIDIA GPU")
    states = [gpu for gpu in observed.nvidia if gpu.fabric_state is not None]
    unjoined, unhealthy = _gpus_outside_fabric(observed), _unhealthy_gpus(observed)
    words = []
    if observed.nvswitches and observed.fabric_manager == "not running":
        words.append(f"{observed.nvswitches} NVSwitches, but nv-fabricmanager does not run")
    fix = _START if words or unjoined else _HEAL
    words += [findings_text(unjoined)] if unjoined else []
    words += [findings_text(unhealthy)] if unhealthy else []
    if words:
        return fail(check, expectation, "; ".join(words), "nvidia-smi -q", fix)
    hidden = unshown_reason(observed, "nvidia")
    unreadable = unreadable_gpus(observed, _FABRIC_READS)
    if unreadable:
        return unknown(check, findings_text(unreadable))
    if (
        states
        and {gpu.fabric_state for gpu in states} == {"not started"}
        and not observed.nvswitches
    ):
        states = []
    silent = [gpu for gpu in observed.nvidia if states and gpu.fabric_state is None]
    silent = [gpu for gpu in silent if gpu.model in {peer.model for peer in states}]
    if silent:
        return unknown(check, findings_text((gpu, "its tool does not say") for gpu in silent))
    if not observed.nvswitches and not states:
        return unknown(check, hidden) if hidden else na(check, "no NVSwitch")
    if observed.nvswitches and observed.fabric_manager != "running":
        vendor_tool = vendor_tool_of(observed, "nvidia")
        return unknown(
            check, f"processes were not looked at: {vendor_tool.name} {vendor_tool.state}"
        )
    if hidden:
        return unknown(check, hidden)
    actual = "running" if observed.nvswitches else "registered"
    return ok(check, expectation, actual)


@check(
    "gpus.xgmi_errors",
    fix=("drain, reset the GPUs; open a case with the vendor if they come back",),
)
def xgmi_errors(observed: Gpus, policy: Policy) -> Result:
    """No error on the links between AMD's GPUs (XGMI) since the driver was loaded.

    RAS counts them as block XGMI_WAFL. MI200 and older have a separate status, which amd-smi
    clears by reading it (Linux' amdgpu_xgmi.c): there, each audit shows the errors since the last.
    """
    check = "gpus.xgmi_errors"
    if not observed.amd and not expected_gpus(observed, "amd"):
        return na(check, no_gpu_reason(observed) or "no AMD GPU")

    def value(gpu: Gpu) -> int | None:
        return gpu.xgmi_errors if isinstance(gpu, AmdGpu) else None

    def find_problem(gpu: Gpu) -> str:
        errors = value(gpu)
        return f"{errors} XGMI errors" if errors else ""

    fix = "drain, reset the GPUs; open a case with the vendor if they come back"
    return judge_each(
        check,
        observed,
        "0 errors",
        value,
        find_problem,
        absent="these GPUs count none",
        fix=fix,
        reads=("xgmi_errors",),
    )
