"""Judge the links between GPUs, and the manager of their switches."""

from __future__ import annotations

import re

from nodeready.policy import Policy
from nodeready.subjects.gpus.amd_gpu import AmdGpu
from nodeready.subjects.gpus.findings import (
    expected,
    judge_each,
    listed,
    none,
    untold,
    values,
    why_unseen,
)
from nodeready.subjects.gpus.findings import tool as tool_of
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.nvlink import on_board, switched
from nodeready.subjects.result import Result, check, fail, na, ok, unknown, warn

# Gigabytes per second of one link: V100, A100, Hopper, Blackwell (NVIDIA's Health Validation,
# nvlink_bandwidth_count_speed, and recorded output). A link that is slower has fewer lanes.
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


def _soldered(observed: Gpus, gpu: Gpu) -> bool:
    """Whether all links of this GPU are connected by construction, and lead to what is here.

    They are on a board with NVSwitches, seen by the host or not, and on an SXM board. Between
    PCIe cards bridges are an option, and unused links are inactive by design (an H100 NVL uses 12
    of 18). A guest may have only some of a board's GPUs. In MIG mode a GPU uses no links.
    """
    if gpu.mig == "on":
        return False
    if observed.nvswitches or gpu.fabric_state in ("completed", "in progress"):
        return True
    several = len(observed.nvidia) > 1
    if several and switched(gpu):
        return True
    # A board of four P100 links each to the three others and leaves one link unused.
    return several and not gpu.virtual and on_board(gpu) and "P100" not in (gpu.model or "")


def _down(observed: Gpus, gpu: Gpu) -> str:
    down = [link.index for link in gpu.links if link.state == "inactive"]
    if gpu.vendor == "amd":
        return f"{len(down)} of {len(gpu.links)} links down" if down else ""
    if any(field == "links" for field, _ in gpu.unread):
        return ""
    if not _active(gpu) and gpu.mig != "on" and on_board(gpu):
        # Even a guest's part of a board has links between its GPUs.
        return "all links inactive" if _soldered(observed, gpu) or len(observed.nvidia) > 1 else ""
    if not _soldered(observed, gpu):
        return ""
    if not gpu.links:
        return "all links inactive"
    names = ", ".join(str(index) for index in down[:4])
    names += f" and {len(down) - 4} more" if len(down) > 4 else ""
    return f"link {names} inactive" if down else ""


def _nominal(observed: Gpus, gpu: Gpu) -> float:
    """The speed of each of the GPU's links, where its model says it, a little rounded; or 0.

    Where the GPUs of a node differ in their names, the names are the finding.
    """
    if len({peer.model for peer in observed.gpus}) > 1:
        return 0.0
    speeds = (speed for model, speed in _SPEEDS if model.search(gpu.model or ""))
    return next(speeds, 0.0) * _ROUNDED


# A GPU beside a Grace processor: their link is on where nothing is wrong (recorded GB200, GB300).
_GRACE = re.compile(r"\bG[HB][23]00\b")


def _without_c2c(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that reach their Grace processor by PCIe only."""
    return [
        (gpu, "NVLink-C2C to the processor off")
        for gpu in observed.nvidia
        if gpu.c2c == "off" and _GRACE.search(gpu.model or "")
    ]


def _speeds(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with a link that is slower than the model's, or the fastest of the model here."""
    findings = []
    fastest_by_model: dict[str | None, float] = {}
    for gpu in observed.gpus:
        speeds = [link.speed_gbps or 0.0 for link in gpu.links]
        fastest_by_model[gpu.model] = max((*speeds, fastest_by_model.get(gpu.model, 0.0)))
    for gpu in observed.gpus:
        fastest = fastest_by_model[gpu.model]
        link_speeds = [(x, x.speed_gbps) for x in gpu.links if x.speed_gbps is not None]
        nominal = _nominal(observed, gpu)
        slow = [x for x, speed in link_speeds if speed < fastest or speed < nominal]
        if slow:
            fastest = max(fastest, round(nominal / _ROUNDED, 3))
            text = f"link {slow[0].index} at {slow[0].speed_gbps:g} of {fastest:g} GB/s"
            findings.append((gpu, text))
    return findings


def _bridge(observed: Gpus, gpu: Gpu) -> str:
    """What is odd about the bridges of a card, or ""."""
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

    One link that is down makes every collective operation as slow as its GPU, and without the
    link to its Grace processor (NVLink-C2C) a GPU reaches that by PCIe. On PCIe cards only unequal
    numbers of active links, and a part of a bridge's, are a warning: which cards are bridged is
    the owner's choice.
    """
    check, expectation = "gpus.nvlink", "all links active at one speed"
    if none(observed):
        return na(check, none(observed))
    # An A10 and other cards without NVLink: the command prints nothing.
    empty = (
        bool(observed.nvidia)
        and observed.nvlink_tool.state == "missing"
        and observed.nvidia_tool.works
    )
    answered = observed.nvlink_tool.works or empty
    down = [(gpu, text) for gpu in observed.amd if (text := _down(observed, gpu))]
    if answered:
        down += [(gpu, text) for gpu in observed.nvidia if (text := _down(observed, gpu))]
    findings = down + _speeds(observed) + _without_c2c(observed)
    if findings:
        # Xid 74 is NVIDIA's code for a link.
        amd = all(gpu.vendor == "amd" for gpu, _ in findings)
        source = (observed.amd_tool if amd else observed.nvlink_tool).name
        word = "amdgpu" if amd else "Xid 74"
        fix = f"reset the GPUs; then reseat the board or the bridge; see dmesg for {word}"
        return fail(check, expectation, listed(findings), source, fix)
    hidden = why_unseen(observed)
    if hidden:
        return unknown(check, hidden)
    if observed.nvidia and not answered:
        vendor_tool = observed.nvlink_tool
        return unknown(
            check, f"{vendor_tool.name} {vendor_tool.state}: {vendor_tool.detail}".rstrip(": ")
        )
    dark = untold(observed, _READS)
    if dark:
        return unknown(check, listed(dark))
    linked = [gpu for gpu in observed.gpus if _active(gpu)]
    partly = [(gpu, text) for gpu in observed.nvidia if (text := _bridge(observed, gpu))]
    if partly:
        return warn(
            check, expectation, listed(partly), observed.nvlink_tool.name, "look at the bridges"
        )
    if not linked:
        return na(check, "these GPUs use no links")
    numbers = {(gpu.model, _active(gpu)) for gpu in linked}
    if len(numbers) > len({gpu.model for gpu in linked}):
        text = listed((gpu, f"{_active(gpu)} active links") for gpu in linked)
        return warn(check, expectation, text, observed.nvlink_tool.name, "look at the bridges")
    return ok(check, expectation, f"{values(linked, _active)} per GPU")


_START = "systemctl start nvidia-fabricmanager, of the driver's own version; see its log"
_HEAL = "see the logs of the fabric manager and of NVLSM; drain, then reset the node's GPUs"
_FABRIC_READS = ("fabric_state", "fabric_status", "fabric_faults", "fabric_clique")


def _unhealthy(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs whose attachment to the fabric is not healthy, or differs from the others'."""
    findings = [(gpu, f"fabric {', '.join(gpu.fabric_faults)}") for gpu in observed.nvidia]
    findings = [(gpu, text) for gpu, text in findings if gpu.fabric_faults]
    cliques = [gpu for gpu in observed.nvidia if gpu.fabric_clique]
    if len({gpu.fabric_clique for gpu in cliques}) > 1:
        # They reach each other by PCIe only (NVIDIA's Multi-Node NVLink guide, cliques).
        findings += [(gpu, f"NVLink clique {gpu.fabric_clique}") for gpu in cliques]
    return findings


def _unjoined(observed: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that have not joined the fabric."""
    states = [gpu for gpu in observed.nvidia if gpu.fabric_state is not None]
    # GPUs of boards without switches may always say that the fabric manager was not started.
    needed = observed.nvswitches or (len(states) > 1 and all(switched(gpu) for gpu in states))
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

    Without it no CUDA program starts on such a board (NVIDIA's Fabric Manager user guide). Newer
    boards have switches that the host does not see: there the GPUs' own state counts. What the
    fabric says of a GPU's health (nvmlGpuFabricInfo_v3_t) counts wherever it says something, and
    all GPUs of a node are in one clique of it.
    """
    check, expectation = "gpus.fabric_manager", "running, and each GPU registered"
    if none(observed) or not (expected(observed, "nvidia") or observed.nvidia):
        return na(check, none(observed) or "no NVIDIA GPU")
    states = [gpu for gpu in observed.nvidia if gpu.fabric_state is not None]
    waiting, ill = _unjoined(observed), _unhealthy(observed)
    words = []
    if observed.nvswitches and observed.fabric_manager == "not running":
        words.append(f"{observed.nvswitches} NVSwitches, but nv-fabricmanager does not run")
    fix = _START if words or waiting else _HEAL
    words += [listed(waiting)] if waiting else []
    words += [listed(ill)] if ill else []
    if words:
        return fail(check, expectation, "; ".join(words), "nvidia-smi -q", fix)
    hidden = why_unseen(observed, "nvidia")
    dark = untold(observed, _FABRIC_READS)
    if dark:
        return unknown(check, listed(dark))
    if (
        states
        and {gpu.fabric_state for gpu in states} == {"not started"}
        and not observed.nvswitches
    ):
        states = []
    silent = [gpu for gpu in observed.nvidia if states and gpu.fabric_state is None]
    silent = [gpu for gpu in silent if gpu.model in {peer.model for peer in states}]
    if silent:
        return unknown(check, listed((gpu, "its tool does not say") for gpu in silent))
    if not observed.nvswitches and not states:
        return unknown(check, hidden) if hidden else na(check, "no NVSwitch")
    if observed.nvswitches and observed.fabric_manager != "running":
        vendor_tool = tool_of(observed, "nvidia")
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

    RAS counts them as block XGMI_WAFL; MI200 and older have a status of their own, which amd-smi
    clears when it reads it (Linux' amdgpu_xgmi.c): there, each look shows what is new.
    """
    check = "gpus.xgmi_errors"
    if not observed.amd and not expected(observed, "amd"):
        return na(check, none(observed) or "no AMD GPU")

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
