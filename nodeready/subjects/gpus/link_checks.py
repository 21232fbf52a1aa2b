"""Judge the links between GPUs, and the manager of their switches."""

from __future__ import annotations

import re

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, join_names
from nodeready.core.severity import AMDGPU_RAS, FABRIC, VALIDATION, loses_job, slows_job
from nodeready.subjects.gpus.findings import (
    FaultSign,
    distinct_values,
    expected_gpus,
    findings_text,
    judge_signs,
    no_gpu_reason,
    silent_text,
    unreadable_text,
    unshown_reason,
)
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.nvidia import FABRIC_JOINED, is_on_board, is_switched

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
    """The number of the GPU's active links."""
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


# A GPU beside a Grace processor: the link between them is on in a sound node (recorded GB200,
# GB300).
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
    """The problem with the bridges of a card, or ""."""
    model, active = gpu.model or "", _active_count(gpu)
    if gpu.mig == "on" or not _BRIDGED.search(model):
        return ""
    if active % _LINKS_PER_BRIDGE:
        return f"{active} active links, {_LINKS_PER_BRIDGE} to a bridge"
    pair = _PAIRED.search(model) and len(observed.nvidia) > 1
    return "all links inactive: a pair without its bridges" if pair and not active else ""


_BRIDGES = "look at the bridges"


@check("gpus.nvlink", slows_job("reset_gpu", "reboot", "reseat", "replace", source=VALIDATION),
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
       loses_job("restart_service", "reset_gpu", "reboot", "replace", source=FABRIC),
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


@check("gpus.xgmi_errors", loses_job("reset_gpu", "reboot", "replace", source=AMDGPU_RAS),
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
