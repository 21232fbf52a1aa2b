"""Judge the links between GPUs, and the manager of their switches."""

from __future__ import annotations

import re

from nodeready.policy import Policy
from nodeready.subjects.declare import check
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.health import expected, listed, none, tool, values, why_unseen
from nodeready.subjects.result import Result, fail, na, ok, unknown, warn

_FABRIC = ("completed", "in progress")


def _active(gpu: Gpu) -> int:
    return sum(link.state == "active" for link in gpu.links)


def _soldered(seen: Gpus, gpu: Gpu) -> bool:
    """Whether all links of this GPU are connected by construction.

    They are on a board with NVSwitches and on an SXM board. Between PCIe cards bridges are an
    option, and unused links are inactive by design (an H100 NVL uses 12 of 18). A guest may
    have only some of a board's GPUs. In MIG mode a GPU uses no links.
    """
    if gpu.mig == "on":
        return False
    if seen.nvswitches or gpu.fabric_state in _FABRIC:
        return True
    model = gpu.model or ""
    # A board of four P100 links each to the three others and leaves one link unused.
    several = len(seen.nvidia) > 1 and not gpu.virtual and "P100" not in model
    return several and re.search(r"\bSXM|\bHBM3\b", model) is not None


def _down(seen: Gpus, gpu: Gpu) -> str:
    down = [link.index for link in gpu.links if link.state != "active"]
    if gpu.vendor == "amd":
        return f"{len(down)} of {len(gpu.links)} links down" if down else ""
    if not _soldered(seen, gpu):
        return ""
    if not gpu.links:
        return "all links inactive"
    names = ", ".join(str(index) for index in down[:4])
    names += f" and {len(down) - 4} more" if len(down) > 4 else ""
    return f"link {names} inactive" if down else ""


def _speeds(seen: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with a link that is slower than the fastest link of the same model here."""
    found = []
    for gpu in seen.gpus:
        peers = [peer for peer in seen.gpus if peer.model == gpu.model]
        fastest = max((x.speed_gbps or 0.0 for peer in peers for x in peer.links), default=0.0)
        slow = [x for x in gpu.links if x.speed_gbps is not None and x.speed_gbps < fastest]
        if slow:
            text = f"link {slow[0].index} at {slow[0].speed_gbps:g} of {fastest:g} GB/s"
            found.append((gpu, text))
    return found


@check(
    "gpus.nvlink",
    fix=(
        "reset the GPUs; then reseat the board or the bridge; see dmesg for amdgpu",
        "look at the bridges",
    ),
)
def nvlink(seen: Gpus, want: Policy) -> Result:
    """All links between the GPUs (NVLink, XGMI) are active, at one speed.

    One link that is down makes every collective operation as slow as its GPU. On PCIe cards only
    unequal numbers of active links are a warning: which ones are bridged is the owner's choice.
    """
    check, wanted = "gpus.nvlink", "all links active at one speed"
    if none(seen):
        return na(check, none(seen))
    answered = seen.nvlink_tool.works
    down = [(gpu, text) for gpu in seen.amd if (text := _down(seen, gpu))]
    if answered:
        down += [(gpu, text) for gpu in seen.nvidia if (text := _down(seen, gpu))]
    found = down + _speeds(seen)
    if found:
        # Xid 74 is NVIDIA's code for a link.
        amd = all(gpu.vendor == "amd" for gpu, _ in found)
        source = (seen.amd_tool if amd else seen.nvlink_tool).name
        word = "amdgpu" if amd else "Xid 74"
        fix = f"reset the GPUs; then reseat the board or the bridge; see dmesg for {word}"
        return fail(check, wanted, listed(found), source, fix)
    hidden = why_unseen(seen)
    if hidden:
        return unknown(check, hidden)
    if seen.nvidia and not answered:
        said = seen.nvlink_tool
        return unknown(check, f"{said.name} {said.state}: {said.detail}".rstrip(": "))
    linked = [gpu for gpu in seen.gpus if _active(gpu)]
    if not linked:
        return na(check, "these GPUs use no links")
    numbers = {(gpu.model, _active(gpu)) for gpu in linked}
    if len(numbers) > len({gpu.model for gpu in linked}):
        text = listed((gpu, f"{_active(gpu)} active links") for gpu in linked)
        return warn(check, wanted, text, seen.nvlink_tool.name, "look at the bridges")
    return ok(check, wanted, f"{values(linked, _active)} per GPU")


@check(
    "gpus.fabric_manager",
    fix=("systemctl start nvidia-fabricmanager, of the driver's own version; see its log",),
)
def fabric_manager(seen: Gpus, want: Policy) -> Result:
    """The fabric manager runs where NVSwitches are, and each GPU has joined the fabric.

    Without it no CUDA program starts on such a board (NVIDIA's Fabric Manager user guide). Newer
    boards have switches that the host does not see: there the GPUs' own state counts.
    """
    check, wanted = "gpus.fabric_manager", "running, and each GPU registered"
    if none(seen) or not (expected(seen, "nvidia") or seen.nvidia):
        return na(check, none(seen) or "no NVIDIA GPU")
    states = [gpu for gpu in seen.nvidia if gpu.fabric_state not in (None, "not supported")]
    waiting = [
        (gpu, f"fabric {gpu.fabric_state}: {gpu.fabric_status}".replace(": None", ""))
        for gpu in states
        if gpu.fabric_state != "completed" or gpu.fabric_status not in (None, "success")
    ]
    # GPUs of boards without switches may always say that the fabric manager was not started.
    if not seen.nvswitches and {gpu.fabric_state for gpu in states} == {"not started"}:
        states, waiting = [], []
    words = []
    if seen.nvswitches and seen.fabric_manager == "not running":
        words.append(f"{seen.nvswitches} NVSwitches, but nv-fabricmanager does not run")
    words += [listed(waiting)] if waiting else []
    if words:
        fix = "systemctl start nvidia-fabricmanager, of the driver's own version; see its log"
        return fail(check, wanted, "; ".join(words), "nvidia-smi -q", fix)
    hidden = why_unseen(seen, "nvidia")
    if not seen.nvswitches and not states:
        return unknown(check, hidden) if hidden else na(check, "no NVSwitch")
    if seen.nvswitches and seen.fabric_manager != "running":
        said = tool(seen, "nvidia")
        return unknown(check, f"processes were not looked at: {said.name} {said.state}")
    if hidden:
        return unknown(check, hidden)
    actual = "running" if seen.nvswitches else "registered"
    return ok(check, wanted, actual)
