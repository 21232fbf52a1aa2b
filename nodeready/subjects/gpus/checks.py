"""Judge a node's GPUs: all there, shown by their tool, and as the policy has them."""

from __future__ import annotations

import re

from nodeready.policy import Policy
from nodeready.subjects.gpus.amd import AmdGpu
from nodeready.subjects.gpus.facts import PROBE, compared, learned
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.health import (
    DRIVERS,
    device_access,
    each,
    ecc_errors,
    expected,
    few,
    guest,
    kernel_faults,
    listed,
    none,
    pcie,
    recovery,
    remapped_rows,
    retired_pages,
    temperature,
    throttle,
    unseen,
    untold,
    values,
    why_unseen,
    xgmi_errors,
)
from nodeready.subjects.gpus.health import tool as tool_of
from nodeready.subjects.gpus.nvidia import on_board, switched
from nodeready.subjects.result import Result, Subject, check, fail, na, ok, unknown, warn

_PCI = "/sys/bus/pci/devices"
_PACKAGES = {
    "nvidia": "install nvidia-smi with the driver's utilities",
    "amd": "install amd-smi or rocm-smi",
}


@check(
    "gpus.present", fix=("see the kernel's log; reset or reseat it", "install or load the driver")
)
def present(seen: Gpus, want: Policy) -> Result:
    """Each GPU on the PCI bus has its driver and is shown by its vendor's tool.

    The bus is the witness: one that is there and that the tool does not show has fallen off the
    bus, or its driver is broken. GPUs of guests (vfio-pci) and screens are not counted.
    """
    check, reason = "gpus.present", none(seen)
    if reason:
        return na(check, reason)
    gpus = expected(seen)
    lost = {gpu.address for gpu in unseen(seen)}
    loose = [gpu for gpu in gpus if gpu.driver != DRIVERS[gpu.vendor] and gpu.address in lost]
    gone = [gpu for gpu in gpus if gpu.address in lost and tool_of(seen, gpu.vendor).works]
    words = [
        f"{gpu.address}: driver {gpu.driver}" if gpu.driver else f"{gpu.address}: no driver"
        for gpu in loose
    ]
    words += [
        f"{gpu.address}: {tool_of(seen, gpu.vendor).name} does not show it"
        for gpu in gone
        if gpu not in loose
    ]
    wanted = "each GPU has its driver and is shown"
    if words:
        fix = "see the kernel's log; reset or reseat it" if gone else "install or load the driver"
        return fail(check, wanted, few(words), _PCI, fix)
    hidden = why_unseen(seen)
    if hidden:
        return unknown(check, hidden)
    return ok(check, wanted, f"{len(gpus) or len(seen.gpus)} GPUs", _PCI)


@check("gpus.tool", fix=("reboot the node: it cannot be ended", "run it by hand; see dmesg"))
def tool(seen: Gpus, want: Policy) -> Result:
    """The vendor's tool answers. What hangs here hangs in jobs too, and most of the rest rests on
    it. One that is not installed stops no job, but then its GPUs are not judged. Where it prints
    an error instead of a value that no other check reads, what it says is not the whole truth.
    """
    check, wanted = "gpus.tool", "the vendor's tool answers"
    reason = none(seen)
    if reason:
        return na(check, reason)
    vendors = [vendor for vendor in DRIVERS if expected(seen, vendor)]
    tools = [(vendor, tool_of(seen, vendor)) for vendor in vendors]
    broken = [one for _, one in tools if one.state in ("stuck", "timed out", "failed")]
    if broken:
        words = [f"{one.name} {one.state}: {one.detail}".rstrip(": ") for one in broken]
        stuck = any(one.state == "stuck" for one in broken)
        fix = "reboot the node: it cannot be ended" if stuck else "run it by hand; see dmesg"
        return fail(check, wanted, "; ".join(words), broken[0].name, fix)
    for vendor, one in tools:
        if one.state == "missing":
            text = f"{one.name} is not installed"
            return warn(check, wanted, text, one.name, _PACKAGES[vendor])
    for _, one in tools:
        if not one.works:
            return unknown(check, f"{one.name}: {one.state}: {one.detail}")
    stray = {field for gpu in seen.gpus for field, _ in gpu.unread if field.startswith("tool ")}
    dark = untold(seen, stray)
    if dark:
        return unknown(check, listed(dark))
    names = [f"{one.name} {one.detail}".strip() for _, one in tools]
    return ok(check, wanted, ", ".join(names))


@check(
    "gpus.count",
    settings=("gpu_count",),
    fix=("see the kernel's log and the BMC; reseat or replace it",),
)
def count(seen: Gpus, want: Policy) -> Result:
    """The PCI bus shows as many GPUs as the policy says.

    One that is there and does not work is what `gpus.present` tells.
    """
    check, wanted = "gpus.count", want.gpu_count
    if wanted is None:
        return na(check, none(seen) or "the policy sets no number")
    found = len(expected(seen)) or len({(gpu.vendor, gpu.pci_address) for gpu in seen.gpus})
    if found != wanted:
        guests = sum(guest(gpu) for gpu in seen.pci)
        more = f", and {guests} of virtual machines" if guests else ""
        fix = "see the kernel's log and the BMC; reseat or replace it"
        return fail(check, str(wanted), f"{found} on the PCI bus{more}", _PCI, fix)
    return ok(check, str(wanted), source=_PCI)


@check("gpus.model", settings=("gpu_model",))
def model(seen: Gpus, want: Policy) -> Result:
    """The GPUs are of the policy's model, by the name that their tool prints."""

    def wrong(gpu: Gpu) -> str:
        return "" if want.gpu_model in ("", gpu.model) else str(gpu.model)

    wanted = want.gpu_model or "any"
    return each("gpus.model", seen, wanted, "model", wrong, absent="no tool names a model")


@check(
    "gpus.driver",
    settings=("gpu_driver",),
    fix=("install or load NAME; see dmesg", "install that driver, then reboot"),
)
def driver(seen: Gpus, want: Policy) -> Result:
    """The kernel driver is loaded, in the policy's version where that names one."""
    check, reason = "gpus.driver", none(seen)
    if reason:
        return na(check, reason)
    versions = {"nvidia": seen.driver, "amd": seen.amd_driver}
    wanted, words = want.gpu_driver or "loaded", []
    for vendor, name in DRIVERS.items():
        bound = [gpu for gpu in expected(seen, vendor) if gpu.driver == name]
        version = versions[vendor]
        if not bound and expected(seen, vendor) and version is None:
            fix = f"install or load {name}; see dmesg"
            return fail(check, wanted, f"{name} is not loaded", _PCI, fix)
        if version is None and bound and want.gpu_driver:
            return unknown(check, f"{name} does not say its version")
        if version is not None or bound:
            words.append(f"{name} {version or 'loaded'}")
            if want.gpu_driver and version != want.gpu_driver:
                fix = "install that driver, then reboot"
                return fail(check, wanted, f"{name} {version}", f"/sys/module/{name}", fix)
    return ok(check, wanted, ", ".join(words) or "loaded")


@check(
    "gpus.vbios", settings=("gpu_vbios",), fix=("update the firmware with the vendor's package",)
)
def vbios(seen: Gpus, want: Policy) -> Result:
    """Each GPU's firmware is one of the policy's versions."""

    def wrong(gpu: Gpu) -> str:
        return str(gpu.vbios) if want.gpu_vbios and gpu.vbios not in want.gpu_vbios else ""

    wanted = " or ".join(want.gpu_vbios) or "any"
    fix = "update the firmware with the vendor's package"
    absent = "no tool shows a VBIOS version"
    return each("gpus.vbios", seen, wanted, "vbios", wrong, absent=absent, fix=fix)


def _not_kept(wanted: str, now: str | None, pending: str | None) -> str:
    """What a mode is now and after the next reset; "" when both are as wanted."""
    after = pending or now
    if (now, after) == (wanted, wanted):
        return ""
    return str(now) if now == after else f"{now}, {after} after a reset"


#: Memory errors are part of RAS, which the driver enables by itself (Linux' amdgpu_drv.c).
_AMD_ECC = "see amdgpu.ras_enable and ras_mask on the kernel's command line, then reboot"


#: Cards for workstations and games, whose memory has ECC and which are delivered without it.
_DELIVERED_WITHOUT_ECC = re.compile(r"\b(GeForce|Quadro|TITAN|RTX)\b(?!.*Server Edition)")


@check(
    "gpus.ecc_mode",
    settings=("gpu_ecc",),
    fix=("nvidia-smi -e INT, then reset the GPU or reboot", _AMD_ECC),
)
def ecc_mode(seen: Gpus, want: Policy) -> Result:
    """ECC is as the policy has it, now and after the next reset of the GPU."""
    check, wanted = "gpus.ecc_mode", want.gpu_ecc
    if wanted == "any":
        return na(check, "gpu_ecc is 'any'")
    by_default, wanted = wanted == "default", "on" if wanted == "default" else wanted

    def wrong(gpu: Gpu) -> str:
        if by_default and _DELIVERED_WITHOUT_ECC.search(gpu.model or ""):
            return ""
        return _not_kept(wanted, gpu.ecc, gpu.ecc_pending)

    amd = all(gpu.vendor == "amd" for gpu in seen.gpus if gpu.ecc is not None and wrong(gpu))
    fix = f"nvidia-smi -e {int(wanted == 'on')}, then reset the GPU or reboot"
    fix = _AMD_ECC if amd else fix
    absent = "these GPUs have no ECC"
    reads = ("ecc", "ecc_pending")
    return each(check, seen, wanted, "ecc", wrong, absent=absent, fix=fix, reads=reads)


@check(
    "gpus.persistence",
    settings=("gpu_persistence",),
    fix=("systemctl enable --now nvidia-persistenced, or nvidia-smi -pm INT",),
)
def persistence(seen: Gpus, want: Policy) -> Result:
    """NVIDIA's driver stays loaded between jobs, as the policy has it.

    Without it the first use of a GPU initialises it anew, which takes seconds, and settings such
    as power limits are lost (nvidia-persistenced(1)).
    """
    check, wanted = "gpus.persistence", want.gpu_persistence
    if wanted == "any":
        return na(check, "gpu_persistence is 'any'")

    def wrong(gpu: Gpu) -> str:
        return "" if gpu.persistence == wanted else str(gpu.persistence)

    turn = "enable" if wanted == "on" else "disable"
    fix = f"systemctl {turn} --now nvidia-persistenced, or nvidia-smi -pm {int(wanted == 'on')}"
    absent = "these GPUs have no such mode"
    return each(check, seen, wanted, "persistence", wrong, absent=absent, fix=fix)


_DIVIDE = "amd-smi set --compute-partition MODE and --memory-partition MODE, when no job runs"


@check(
    "gpus.mig",
    settings=("gpu_mig",),
    fix=("nvidia-smi -mig INT, when no job runs", _DIVIDE),
)
def mig(seen: Gpus, want: Policy) -> Result:
    """MIG is as the policy has it, now and after the next reset: it splits a GPU into several.

    AMD's GPUs are divided by modes of compute units and memory (SPX/NPS1 is one GPU): whatever
    the policy, GPUs of one model that are divided in different ways are a warning.
    """
    check, wanted = "gpus.mig", want.gpu_mig
    modes = {(gpu.model, gpu.partition) for gpu in seen.amd if isinstance(gpu, AmdGpu)}
    divided = [mode for mode in modes if mode[1] is not None]
    if len(divided) > len({model for model, _ in divided}):
        text = listed(
            (gpu, gpu.partition)
            for gpu in seen.amd
            if isinstance(gpu, AmdGpu) and gpu.partition is not None
        )
        return warn(check, "one mode on all GPUs", text, tool_of(seen, "amd").name, _DIVIDE)
    if wanted == "any":
        return na(check, "gpu_mig is 'any'")

    def wrong(gpu: Gpu) -> str:
        return _not_kept(wanted, gpu.mig, gpu.mig_pending)

    fix = f"nvidia-smi -mig {int(wanted == 'on')}, when no job runs"
    absent = "these GPUs have no MIG"
    reads = ("mig", "mig_pending")
    return each(check, seen, wanted, "mig", wrong, absent=absent, fix=fix, reads=reads)


@check(
    "gpus.processes",
    settings=("gpu_idle",),
    fix=("end them; a name like [Not Found] is a process of a container, or one that is dead",),
)
def processes(seen: Gpus, want: Policy) -> Result:
    """No process computes on a GPU of a node that has no job (policy gpu_idle).

    What a job left behind holds memory and time of the next one. An X server only draws.
    """
    check = "gpus.processes"
    if not want.gpu_idle:
        return na(check, "jobs may run: gpu_idle is off")

    def wrong(gpu: Gpu) -> str:
        left = [
            f"pid {one.pid} {one.name}"
            + ("" if one.memory_mb is None else f" {one.memory_mb} MiB")
            for one in gpu.processes
            if one.kind != "G"
        ]
        return few(left)

    fix = "end them; a name like [Not Found] is a process of a container, or one that is dead"
    return each(
        check,
        seen,
        "none",
        lambda gpu: True,
        wrong,
        absent="",
        fix=fix,
        shown="none",
        reads=("processes",),
    )


# --- The links between GPUs, and the manager of their switches.

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


def _soldered(seen: Gpus, gpu: Gpu) -> bool:
    """Whether all links of this GPU are connected by construction, and lead to what is here.

    They are on a board with NVSwitches, seen by the host or not, and on an SXM board. Between
    PCIe cards bridges are an option, and unused links are inactive by design (an H100 NVL uses 12
    of 18). A guest may have only some of a board's GPUs. In MIG mode a GPU uses no links.
    """
    if gpu.mig == "on":
        return False
    if seen.nvswitches or gpu.fabric_state in ("completed", "in progress"):
        return True
    several = len(seen.nvidia) > 1
    if several and switched(gpu):
        return True
    # A board of four P100 links each to the three others and leaves one link unused.
    return several and not gpu.virtual and on_board(gpu) and "P100" not in (gpu.model or "")


def _down(seen: Gpus, gpu: Gpu) -> str:
    down = [link.index for link in gpu.links if link.state == "inactive"]
    if gpu.vendor == "amd":
        return f"{len(down)} of {len(gpu.links)} links down" if down else ""
    if any(field == "links" for field, _ in gpu.unread):
        return ""
    if not _active(gpu) and gpu.mig != "on" and on_board(gpu):
        # Even a guest's part of a board has links between its GPUs.
        return "all links inactive" if _soldered(seen, gpu) or len(seen.nvidia) > 1 else ""
    if not _soldered(seen, gpu):
        return ""
    if not gpu.links:
        return "all links inactive"
    names = ", ".join(str(index) for index in down[:4])
    names += f" and {len(down) - 4} more" if len(down) > 4 else ""
    return f"link {names} inactive" if down else ""


def _nominal(seen: Gpus, gpu: Gpu) -> float:
    """The speed of each of the GPU's links, where its model says it, a little rounded; or 0.

    Where the GPUs of a node differ in their names, the names are the finding.
    """
    if len({one.model for one in seen.gpus}) > 1:
        return 0.0
    found = (speed for model, speed in _SPEEDS if model.search(gpu.model or ""))
    return next(found, 0.0) * _ROUNDED


# A GPU beside a Grace processor: their link is on where nothing is wrong (recorded GB200, GB300).
_GRACE = re.compile(r"\bG[HB][23]00\b")


def _apart(seen: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that reach their Grace processor by PCIe only."""
    return [
        (gpu, "NVLink-C2C to the processor off")
        for gpu in seen.nvidia
        if gpu.c2c == "off" and _GRACE.search(gpu.model or "")
    ]


def _speeds(seen: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs with a link that is slower than the model's, or the fastest of the model here."""
    found = []
    most: dict[str | None, float] = {}
    for gpu in seen.gpus:
        speeds = [link.speed_gbps or 0.0 for link in gpu.links]
        most[gpu.model] = max((*speeds, most.get(gpu.model, 0.0)))
    for gpu in seen.gpus:
        fastest = most[gpu.model]
        told = [(x, x.speed_gbps) for x in gpu.links if x.speed_gbps is not None]
        nominal = _nominal(seen, gpu)
        slow = [x for x, speed in told if speed < fastest or speed < nominal]
        if slow:
            fastest = max(fastest, round(nominal / _ROUNDED, 3))
            text = f"link {slow[0].index} at {slow[0].speed_gbps:g} of {fastest:g} GB/s"
            found.append((gpu, text))
    return found


def _bridge(seen: Gpus, gpu: Gpu) -> str:
    """What is odd about the bridges of a card, or ""."""
    model, active = gpu.model or "", _active(gpu)
    if gpu.mig == "on" or not _BRIDGED.search(model):
        return ""
    if active % _BRIDGE:
        return f"{active} active links, {_BRIDGE} to a bridge"
    pair = _PAIRED.search(model) and len(seen.nvidia) > 1
    return "all links inactive: a pair without its bridges" if pair and not active else ""


@check(
    "gpus.nvlink",
    fix=(
        "reset the GPUs; then reseat the board or the bridge; see dmesg for amdgpu",
        "look at the bridges",
    ),
)
def nvlink(seen: Gpus, want: Policy) -> Result:
    """All links between the GPUs (NVLink, XGMI) are active, at one speed.

    One link that is down makes every collective operation as slow as its GPU, and without the
    link to its Grace processor (NVLink-C2C) a GPU reaches that by PCIe. On PCIe cards only unequal
    numbers of active links, and a part of a bridge's, are a warning: which cards are bridged is
    the owner's choice.
    """
    check, wanted = "gpus.nvlink", "all links active at one speed"
    if none(seen):
        return na(check, none(seen))
    # An A10 and other cards without NVLink: the command prints nothing.
    empty = bool(seen.nvidia) and seen.nvlink_tool.state == "missing" and seen.nvidia_tool.works
    answered = seen.nvlink_tool.works or empty
    down = [(gpu, text) for gpu in seen.amd if (text := _down(seen, gpu))]
    if answered:
        down += [(gpu, text) for gpu in seen.nvidia if (text := _down(seen, gpu))]
    found = down + _speeds(seen) + _apart(seen)
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
    dark = untold(seen, _READS)
    if dark:
        return unknown(check, listed(dark))
    linked = [gpu for gpu in seen.gpus if _active(gpu)]
    partly = [(gpu, text) for gpu in seen.nvidia if (text := _bridge(seen, gpu))]
    if partly:
        return warn(check, wanted, listed(partly), seen.nvlink_tool.name, "look at the bridges")
    if not linked:
        return na(check, "these GPUs use no links")
    numbers = {(gpu.model, _active(gpu)) for gpu in linked}
    if len(numbers) > len({gpu.model for gpu in linked}):
        text = listed((gpu, f"{_active(gpu)} active links") for gpu in linked)
        return warn(check, wanted, text, seen.nvlink_tool.name, "look at the bridges")
    return ok(check, wanted, f"{values(linked, _active)} per GPU")


_START = "systemctl start nvidia-fabricmanager, of the driver's own version; see its log"
_HEAL = "see the logs of the fabric manager and of NVLSM; drain, then reset the node's GPUs"
_FABRIC_READS = ("fabric_state", "fabric_status", "fabric_faults", "fabric_clique")


def _unhealthy(seen: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs whose attachment to the fabric is not healthy, or differs from the others'."""
    found = [(gpu, f"fabric {', '.join(gpu.fabric_faults)}") for gpu in seen.nvidia]
    found = [(gpu, text) for gpu, text in found if gpu.fabric_faults]
    cliques = [gpu for gpu in seen.nvidia if gpu.fabric_clique]
    if len({gpu.fabric_clique for gpu in cliques}) > 1:
        # They reach each other by PCIe only (NVIDIA's Multi-Node NVLink guide, cliques).
        found += [(gpu, f"NVLink clique {gpu.fabric_clique}") for gpu in cliques]
    return found


def _unjoined(seen: Gpus) -> list[tuple[Gpu, str]]:
    """The GPUs that have not joined the fabric."""
    states = [gpu for gpu in seen.nvidia if gpu.fabric_state is not None]
    # GPUs of boards without switches may always say that the fabric manager was not started.
    needed = seen.nvswitches or (len(states) > 1 and all(switched(gpu) for gpu in states))
    if not needed and {gpu.fabric_state for gpu in states} == {"not started"}:
        return []
    return [
        (gpu, f"fabric {gpu.fabric_state}: {gpu.fabric_status}".replace(": None", ""))
        for gpu in states
        if gpu.fabric_state != "completed" or gpu.fabric_status not in (None, "success")
    ]


@check("gpus.fabric_manager", fix=(_START, _HEAL))
def fabric_manager(seen: Gpus, want: Policy) -> Result:
    """The fabric manager runs where NVSwitches are, and each GPU has joined a healthy fabric.

    Without it no CUDA program starts on such a board (NVIDIA's Fabric Manager user guide). Newer
    boards have switches that the host does not see: there the GPUs' own state counts. What the
    fabric says of a GPU's health (nvmlGpuFabricInfo_v3_t) counts wherever it says something, and
    all GPUs of a node are in one clique of it.
    """
    check, wanted = "gpus.fabric_manager", "running, and each GPU registered"
    if none(seen) or not (expected(seen, "nvidia") or seen.nvidia):
        return na(check, none(seen) or "no NVIDIA GPU")
    states = [gpu for gpu in seen.nvidia if gpu.fabric_state is not None]
    waiting, ill = _unjoined(seen), _unhealthy(seen)
    words = []
    if seen.nvswitches and seen.fabric_manager == "not running":
        words.append(f"{seen.nvswitches} NVSwitches, but nv-fabricmanager does not run")
    fix = _START if words or waiting else _HEAL
    words += [listed(waiting)] if waiting else []
    words += [listed(ill)] if ill else []
    if words:
        return fail(check, wanted, "; ".join(words), "nvidia-smi -q", fix)
    hidden = why_unseen(seen, "nvidia")
    dark = untold(seen, _FABRIC_READS)
    if dark:
        return unknown(check, listed(dark))
    if states and {gpu.fabric_state for gpu in states} == {"not started"} and not seen.nvswitches:
        states = []
    silent = [gpu for gpu in seen.nvidia if states and gpu.fabric_state is None]
    silent = [gpu for gpu in silent if gpu.model in {one.model for one in states}]
    if silent:
        return unknown(check, listed((gpu, "its tool does not say") for gpu in silent))
    if not seen.nvswitches and not states:
        return unknown(check, hidden) if hidden else na(check, "no NVSwitch")
    if seen.nvswitches and seen.fabric_manager != "running":
        said = tool_of(seen, "nvidia")
        return unknown(check, f"processes were not looked at: {said.name} {said.state}")
    if hidden:
        return unknown(check, hidden)
    actual = "running" if seen.nvswitches else "registered"
    return ok(check, wanted, actual)


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
)
