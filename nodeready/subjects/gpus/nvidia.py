"""NVIDIA's GPUs as nvidia-smi shows them: ``-q -x`` (schemas v11, v12 and v13), and their NVLinks.

The schemas differ in names (clocks_throttle_reasons became clocks_event_reasons) and in what they
leave out. So each value is looked up under all of its names, and a value that is missing is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Section
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Link, Tool

if TYPE_CHECKING:
    from xml.etree import ElementTree

# --- nvidia-smi's XML: made safe to read, and its values, any of which may be missing.

#: The words for a missing value, with or without brackets.
NOTHING = (
    "",
    "n/a",
    "none",
    "not supported",
    "not found",
    "unknown error",
    "err!",
    "gpu is lost",
    "gpu requires reset",
    "requested functionality has been deprecated",
    "insufficient permissions",
)
_SWITCH = {"enabled": "on", "disabled": "off"}


class Element:
    """An element of the XML whose values may be missing, in any part of the path."""

    def __init__(self, node: ElementTree.Element) -> None:
        self.node = node

    def text(self, *paths: str) -> str | None:
        """The text of the first path with a value; None when there is none."""
        for path in paths:
            text = (self.node.findtext(path) or "").strip()
            if text.lower().strip("[]") not in NOTHING:
                return text[:200]
        return None

    def number(self, *paths: str) -> int | None:
        """The whole number with which the text begins, without its unit."""
        match = re.match(r"(-?[0-9]{1,15})(?![0-9])", self.text(*paths) or "")
        return int(match[1]) if match else None

    def switch(self, *paths: str) -> str | None:
        return _SWITCH.get((self.text(*paths) or "").lower())

    def flag(self, *paths: str) -> bool | None:
        """True when one of the paths says yes, False when one says no; else None."""
        said = [(self.text(path) or "").lower() for path in paths]
        return True if "yes" in said else False if "no" in said else None

    def total(self, path: str, word: str, old: str) -> int | None:
        """The sum of the counters below ``path`` with ``word`` in their name.

        Schemas before v11, and boards before Ampere, count below ``old`` with a total.
        """
        below = self.node.find(path)
        if below is None:
            return None
        here = Element(below)
        names = [child.tag for child in below if re.search(rf"(^|_){word}(_|$)", child.tag)]
        found = [value for name in names if (value := here.number(name)) is not None]
        total = here.number(f"{old}/total")
        found += [total] if total is not None else []
        return sum(found) if found else None


def _escaped(line: str) -> str:
    """The line with the process's name escaped: any name may be chosen, and break the XML."""
    start, end = line.find("<process_name>"), line.rfind("</process_name>")
    if start < 0 or end < start:
        return line
    import html

    start += len("<process_name>")
    return line[:start] + html.escape(html.unescape(line[start:end])) + line[end:]


def tree(text: str) -> ElementTree.Element | None:
    """The XML of the answer; None when the answer holds no whole XML.

    What stands before the root is left out, the DOCTYPE included: so no DTD is read and no entity
    can be declared, and an entity that is used is an error.
    """
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    body = text[start : end + len("</nvidia_smi_log>")]
    clean = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]", "\ufffd", body)
    lines = "\n".join(
        _escaped(line) if "<process_name>" in line else line for line in clean.split("\n")
    )
    # The parser takes long to import, and many nodes that audit themselves have no XML to read.
    from xml.etree import ElementTree

    try:
        return ElementTree.fromstring(lines)
    except (ElementTree.ParseError, ValueError):
        return None


# --- The GPUs: ``nvidia-smi -q -x``.

NAME = "nvidia-smi"
FABRIC_MANAGER = "nv-fabricmanager"
WHEN = "command -v nvidia-smi >/dev/null 2>&1"

#: A process in state D for longer than this is stuck: a healthy one waits there for moments.
STUCK_AFTER_S = 30

# Without the driver, nvidia-smi would make the kernel load it, and a look changes nothing. An
# nvidia-smi that hangs in the kernel holds a lock on which the next one would hang, too. Start
# times in /proc/PID/stat count hundredths of a second (USER_HZ of all Linux ports with such GPUs).
PREPARE = rf"""
    if [ ! -e /proc/driver/nvidia/version ] && [ ! -d /sys/module/nvidia ] &&
        [ ! -d /sys/bus/pci/drivers/nvidia ]; then
        printf 'nr_driver=none\n'
        exit 0
    fi
    nr_up=0
    {{ read -r nr_up nr_x </proc/uptime; }} 2>/dev/null
    nr_found=$(grep -lsxF -e nvidia-smi -e {FABRIC_MANAGER[:15]} /proc/[0-9]*/comm)
    # Above that the shell could not start it: too many processes for one command line.
    if [ $? -lt 126 ]; then printf 'nr_scanned=1\n'; fi
    for nr_file in $nr_found; do
        nr_stat=
        {{ IFS= read -r nr_stat <"${{nr_file%comm}}stat"; }} 2>/dev/null || continue
        nr_pid=${{nr_file#/proc/}}
        nr_pid=${{nr_pid%/comm}}
        # Any user can give a process these names, and have it wait in state D.
        nr_is_roots "${{nr_file%/comm}}" || continue
        case $nr_stat in
        *'({FABRIC_MANAGER[:15]})'*) printf 'nr_fabric_manager=%s\n' "$nr_pid" ;;
        *'(nvidia-smi) D '*)
            set -- ${{nr_stat##*) }}
            nr_age=$((${{nr_up%%.*}} - ${{20}} / 100))
            if [ "$nr_age" -gt {STUCK_AFTER_S} ]; then
                printf 'nr_stuck=%s %s\n' "$nr_pid" "$nr_age"
                exit 0
            fi
            ;;
        esac
    done
"""


def _script(policy: Policy) -> str:
    return f"{PREPARE}\n    nvidia-smi -q -x\n"


SECTION = Section("nvidia_smi", _script, 20, 1048576, beside=True, when=WHEN)

_REASONS = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)
_MAX_GPUS = 256
_MAX_PROCESSES = 1024


@dataclass(frozen=True)
class NvidiaSmi:
    """What nvidia-smi showed.

    fabric_manager: whether the fabric manager's process runs; None: not looked for
    """

    gpus: tuple[Gpu, ...]
    tool: Tool
    driver: str | None = None
    cuda: str | None = None
    fabric_manager: bool | None = None


def address(text: str) -> str | None:
    """A PCI address in sysfs' form, from NVIDIA's eight-digit domain; None for another text."""
    match = re.fullmatch(
        r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", text.strip().lower()
    )
    if match is None:
        return None
    domain, bus, device = (int(match[n] or "0", 16) for n in (1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4]}"


def message(text: str) -> str:
    """The first line of a tool's message, at most 160 characters, or ""."""
    for line in text.splitlines():
        words = line.strip()
        # Killed, Terminated: what the shell prints when the limit ends the tool.
        if words and not words.startswith(("<", "nr_")) and words not in ("Killed", "Terminated"):
            return words[:160]
    return ""


def _throttle(gpu: Element) -> tuple[tuple[str, ...], bool | None]:
    """The active reasons that slow hardware down, and whether the GPU is idle."""
    active = {}
    for kind in ("event", "throttle"):
        for child in gpu.node.iterfind(f"clocks_{kind}_reasons/*"):
            name = child.tag.replace(f"clocks_{kind}_reason_", "", 1)
            active[name] = (child.text or "").strip().lower() == "active"
    return tuple(name for name in _REASONS if active.get(name)), active.get("gpu_idle")


def _slowdown(gpu: Element) -> int | None:
    """The temperature at which the GPU slows down.

    Ada and later print no such temperature. They print how many degrees are left to the limit,
    and at how many degrees left the slow-down begins, usually -2 (T.Limit; nvidia-smi(1)).
    """
    slow = gpu.number("temperature/gpu_temp_slow_threshold")
    now, left, at = (
        gpu.number(f"temperature/{name}")
        for name in ("gpu_temp", "gpu_temp_tlimit", "gpu_temp_slow_tlimit_threshold")
    )
    if slow is not None or now is None or left is None or at is None:
        return slow
    return now + left - at


def _recovery(gpu: Element) -> str | None:
    """What the driver asks for: v13 names the action, v12 says whether a reset is needed."""
    raw = gpu.node.findtext("gpu_recovery_action")
    if raw is not None:
        said = raw.strip().lower()
        if said == "none":
            return said
        return None if said.strip("[]") in NOTHING else said.replace("gpu ", "")[:40]
    if gpu.flag("gpu_reset_status/reset_required"):
        return "reset"
    if gpu.flag("gpu_reset_status/drain_and_reset_recommended"):
        return "drain and reset"
    return None if gpu.flag("gpu_reset_status/reset_required") is None else "none"


def _lost(gpu: Element) -> str | None:
    """What a GPU needs that has an error in the place of its values (nvmlErrorString), or None."""
    said = {(node.text or "").strip().lower().strip("[]") for node in gpu.node.iter()}
    if "gpu is lost" in said:
        return "reboot"
    return "reset" if "gpu requires reset" in said else None


def _processes(gpu: Element) -> Iterator[GpuProcess]:
    for number, node in enumerate(gpu.node.iterfind("processes/process_info")):
        process = Element(node)
        pid = process.number("pid")
        if pid is not None and number < _MAX_PROCESSES:
            name = process.text("process_name") or "?"
            yield GpuProcess(
                pid, name, process.number("used_memory"), process.text("type", "process_type")
            )


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


def _gpu(index: int, gpu: Element) -> Gpu | None:
    """One ``<gpu>``; None when it has no PCI address."""
    where = address(gpu.node.get("id", "")) or address(gpu.text("pci/pci_bus_id") or "")
    if where is None:
        return None
    link = "pci/pci_gpu_link_info"
    throttle, idle = _throttle(gpu)
    virtual = (gpu.text("gpu_virtualization_mode/virtualization_mode") or "").lower()
    return Gpu(
        index=index,
        vendor="nvidia",
        pci_address=where,
        model=gpu.text("product_name"),
        uuid=gpu.text("uuid"),
        serial=gpu.text("serial"),
        vbios=gpu.text("vbios_version"),
        memory_total_mb=gpu.number("fb_memory_usage/total"),
        memory_used_mb=gpu.number("fb_memory_usage/used"),
        ecc=gpu.switch("ecc_mode/current_ecc"),
        ecc_pending=gpu.switch("ecc_mode/pending_ecc"),
        ecc_uncorrectable_volatile=gpu.total("ecc_errors/volatile", "uncorrectable", "double_bit"),
        ecc_uncorrectable_aggregate=gpu.total(
            "ecc_errors/aggregate", "uncorrectable", "double_bit"
        ),
        ecc_correctable_volatile=gpu.total("ecc_errors/volatile", "correctable", "single_bit"),
        remap_pending=gpu.flag("remapped_rows/remapped_row_pending"),
        remap_failed=gpu.flag("remapped_rows/remapped_row_failure"),
        remapped_uncorrectable=gpu.number("remapped_rows/remapped_row_unc"),
        retired_pending=gpu.flag(
            "retired_pages/pending_retirement", "retired_pages/pending_blacklist"
        ),
        pcie_generation=gpu.number(f"{link}/pcie_gen/current_link_gen"),
        pcie_generation_max=gpu.number(f"{link}/pcie_gen/max_link_gen"),
        pcie_width=gpu.number(f"{link}/link_widths/current_link_width"),
        pcie_width_max=gpu.number(f"{link}/link_widths/max_link_width"),
        throttle=throttle,
        temperature_c=gpu.number("temperature/gpu_temp"),
        temperature_slowdown_c=_slowdown(gpu),
        memory_temperature_c=gpu.number("temperature/memory_temp"),
        persistence=gpu.switch("persistence_mode"),
        mig=gpu.switch("mig_mode/current_mig"),
        processes=tuple(_processes(gpu)),
        performance_state=gpu.text("performance_state"),
        idle=idle,
        virtual=virtual not in ("", "n/a", "none", "host vgpu", "host vsga"),
        memory_temperature_max_c=gpu.number("temperature/gpu_temp_max_mem_threshold"),
        mig_pending=gpu.switch("mig_mode/pending_mig"),
        repair_pending=gpu.flag(
            "ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending"
        ),
        recovery=_lost(gpu) or _recovery(gpu),
        fabric_state=_lower(gpu.text("fabric/state")),
        fabric_status=_lower(gpu.text("fabric/status")),
    )


def parse(output: Output) -> NvidiaSmi:
    """The GPUs in what the section ``nvidia_smi`` printed; a tool that failed is a `Tool`."""
    text = output.text
    manager: bool | None = None
    if re.match("nr_scanned=1$", text, re.M):
        manager = re.search("^nr_fabric_manager=[0-9]", text, re.M) is not None
    if not text.strip() and output.rc == 0:
        return NvidiaSmi((), Tool(NAME, "missing"))
    if text.startswith("nr_driver=none"):
        return NvidiaSmi((), Tool(NAME, "failed", "the driver is not loaded"))
    stuck = re.search(r"^nr_stuck=([0-9]{1,9}) ([0-9]{1,9})$", text, re.M)
    if stuck:
        words = f"pid {stuck[1]} hangs in the kernel for {stuck[2]} s"
        return NvidiaSmi((), Tool(NAME, "stuck", words), fabric_manager=manager)
    root = tree(text)
    if root is None:
        # The values of an answer that was cut off are no message.
        said = message(re.split(r"<\?xml|<nvidia_smi_log", text, maxsplit=1)[0])
        if output.truncated:
            tool = Tool(NAME, "nonsense", "its answer was cut off")
        elif output.rc is None:
            tool = Tool(NAME, "timed out", said or f"after {SECTION.timeout_s} s")
        elif output.rc != 0 or said.startswith("No devices"):
            tool = Tool(NAME, "failed", said or f"exit status {output.rc}")
        else:
            tool = Tool(NAME, "nonsense", f"no whole XML: {text.strip()[:100]!r}")
        return NvidiaSmi((), tool, fabric_manager=manager)
    log = Element(root)
    nodes = root.findall("gpu")[:_MAX_GPUS]
    found = [_gpu(index, Element(node)) for index, node in enumerate(nodes)]
    gpus = tuple(gpu for gpu in found if gpu is not None)
    driver, cuda = log.text("driver_version"), log.text("cuda_version")
    tool = Tool(NAME, "ok", driver or "")
    if output.rc != 0 or len(gpus) < len(found):
        around = text[: text.find("<nvidia_smi_log")] + text[text.rfind("</nvidia_smi_log>") :]
        tool = Tool(NAME, "failed", message(around) or f"exit status {output.rc}")
        if output.rc is None:
            tool = Tool(NAME, "timed out", f"after {SECTION.timeout_s} s, its answer was whole")
    return NvidiaSmi(gpus, tool, driver, cuda, manager)


# --- The links between the GPUs: ``nvidia-smi nvlink --status``.

NVLINK = "nvidia-smi nvlink"

_MAX_LINKS = 64
_GPU = re.compile(r"GPU [0-9]{1,4}: [^(]{0,200}\(UUID: (\S{1,80})\)")
_LINK = re.compile(r"\s+Link ([0-9]{1,3}): (<inactive>|[0-9]{1,6}(?:\.[0-9]{1,6})? GB/s)")


def _nvlink_script(policy: Policy) -> str:
    return f"{PREPARE}\n    nvidia-smi nvlink --status\n"


# A section of its own: where the fabric is broken, this command hangs and ``-q`` does not.
NVLINK_SECTION = Section("nvlink", _nvlink_script, 20, 262144, beside=True, when=WHEN)


@dataclass(frozen=True)
class NvLinks:
    """What nvidia-smi nvlink showed; ``links``: UUID of a GPU -> its links."""

    tool: Tool
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict)


# The links of thousands of nodes are alike: each is kept once.
@lru_cache(maxsize=4096)
def _link(number: str, text: str) -> Link:
    speed = None if text == "<inactive>" else float(text.partition(" ")[0])
    return Link(int(number), "inactive" if speed is None else "active", speed)


def parse_nvlink(output: Output) -> NvLinks:
    """The links in what the section ``nvlink`` printed.

    A GPU whose links are all inactive has one line that says so. A GPU without NVLink has no line,
    or one that says that NVLink is not supported. Both have no links here.
    """
    text = output.text
    if not text.strip() and output.rc == 0:
        return NvLinks(Tool(NVLINK, "missing"))
    if text.startswith("nr_driver=none"):
        return NvLinks(Tool(NVLINK, "failed", "the driver is not loaded"))
    if re.search("^nr_stuck=", text, re.M):
        return NvLinks(Tool(NVLINK, "stuck", "an earlier nvidia-smi hangs in the kernel"))
    found: dict[str, list[Link]] = {}
    links: list[Link] = []
    for line in text.splitlines():
        link = _LINK.match(line)
        if link is None:
            gpu = _GPU.match(line)
            if gpu:
                links = found.setdefault(gpu[1], [])
        elif len(links) < _MAX_LINKS:
            links.append(_link(link[1], link[2]))
    tool = Tool(NVLINK, "ok")
    if output.truncated:
        tool = Tool(NVLINK, "nonsense", "its answer was cut off")
    elif output.rc is None:
        tool = Tool(NVLINK, "timed out", f"after {NVLINK_SECTION.timeout_s} s")
    elif not found:
        state = "nonsense" if output.rc == 0 else "failed"
        tool = Tool(NVLINK, state, message(text) or f"exit status {output.rc}")
    return NvLinks(tool, {uuid: tuple(links) for uuid, links in found.items()})
