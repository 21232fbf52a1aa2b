"""AMD's GPUs as amd-smi shows them, or rocm-smi where the node has no amd-smi.

In this order: the values of both tools' JSON, the kernel's own counts, amd-smi, rocm-smi, and the
section that asks one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Section
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Link, Tool
from nodeready.subjects.iommu.facts import MODELS

# --- The values in amd-smi's and rocm-smi's JSON: plain, "N/A", or with a unit.

Json = dict[str, Any]

#: GT/s of each generation of PCI Express.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_MEGABYTES = {"B": 1 / (1 << 20), "KB": 1 / 1024, "MB": 1.0, "GB": 1024.0, "TB": 1024.0 * 1024}
#: A tool prints one or two documents; of other text that begins like one, so much is tried.
_MOST_DOCUMENTS = 40


def _whole(digits: str) -> int | None:
    """A whole number of at most 20 digits: no counter has more, and a million take minutes."""
    return int(digits) if len(digits) <= 20 else None


def documents(printed: str) -> Iterator[Any]:
    """The JSON documents in ``printed``, each from the start of a line; other text is skipped."""
    decoder = json.JSONDecoder(parse_int=_whole)
    position, tries = 0, 0
    for start in re.finditer(r"^[\[{]", printed, re.M):
        if start.start() < position:
            continue
        tries += 1
        if tries > _MOST_DOCUMENTS:
            return
        try:
            document, position = decoder.raw_decode(printed, start.start())
        except (ValueError, RecursionError):
            continue
        yield document


def entries(printed: str) -> Iterator[Json]:
    """The devices that amd-smi printed: the dictionaries that name a ``gpu``."""
    for document in documents(printed):
        lists = [document] if isinstance(document, list) else []
        if isinstance(document, dict):
            lists = [[document], *(item for item in document.values() if isinstance(item, list))]
        for items in lists:
            for item in items:
                if isinstance(item, dict) and whole(item.get("gpu")) is not None:
                    yield item


def table(entry: Json, name: str) -> Json:
    """The dictionary of this name; an empty one where the tool prints "N/A"."""
    found = entry.get(name)
    return found if isinstance(found, dict) else {}


def at(entry: Json, *path: str) -> Any:
    """The value at the end of ``path``; None where there is none."""
    found: Any = entry
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def text(value: Any) -> str | None:
    """A word or a number as text; None for "N/A", nothing and lists."""
    if isinstance(value, dict):
        value = value.get("value")
    if value is None or isinstance(value, (list, dict)):
        return None
    found = str(value).strip()
    return None if found in ("", "N/A", "n/a", "None", "unknown", "0x0") else found


def number(value: Any) -> float | None:
    """A number, with or without its unit; None for anything else."""
    found = text(value)
    match = re.match(r"-?[0-9]{1,20}(\.[0-9]{1,9})?(?![0-9xa-fA-F])", found) if found else None
    result = float(match[0]) if match else None
    return result if result is not None and math.isfinite(result) else None


def whole(value: Any) -> int | None:
    """A count; None for anything else, and for less than nothing."""
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def degrees(value: Any) -> int | None:
    """Degrees Celsius; None for 0 and 65535, which stand for no sensor, and beyond 200."""
    found = whole(value)
    return found if found is not None and 0 < found < 200 else None


def megabytes(value: Any) -> int | None:
    """An amount of memory in MiB: the tool's MB and GB are powers of 1024."""
    found = number(value)
    unit = value.get("unit") if isinstance(value, dict) else "MB"
    factor = _MEGABYTES.get(unit) if isinstance(unit, str) else None
    return None if found is None or factor is None else int(found * factor)


def generation(value: Any) -> int | None:
    """The generation of PCI Express that has this speed in GT/s."""
    found = number(value)
    return None if found is None else _GENERATIONS.get(found)


def pci_address(value: Any) -> str:
    """A PCI address in lower case with a domain of four digits; "" for anything else."""
    match = re.fullmatch(
        r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", text(value) or ""
    )
    return f"{(match[1] or '0000')[-4:]}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


# --- What the kernel counts of AMD's GPUs: their processes, bad pages and RAS errors.
#
# ``/sys/class/kfd/kfd/proc/PID/vram_ID`` holds the bytes that a process has on the GPU with that
# id, and the topology gives the PCI address of each id (Linux' drivers/gpu/drm/amd/amdkfd).
# ``ras/gpu_vram_bad_pages`` lists bad pages as ``ADDRESS : SIZE : FLAG``: R is retired, P waits
# for its retirement, F could not be retired (Linux' amdgpu_ras.c).

_ROOT = "/sys/class/kfd/kfd"
_DRIVER = "/sys/bus/pci/drivers/amdgpu"

#: The script starts two programs, whatever the number of GPUs and processes.
_KFD_SCRIPT = rf"""
    if [ -d {_ROOT} ]; then
        grep -asHE '^([0-9]+|(location_id|domain) [0-9]+)$' {_ROOT}/topology/nodes/*/gpu_id \
            {_ROOT}/topology/nodes/*/properties {_ROOT}/proc/[0-9]*/vram_*
        grep -asHc ' : [PF]' {_DRIVER}/*/ras/gpu_vram_bad_pages
        for nr_file in {_ROOT}/proc/[0-9]*; do
            nr_pid=${{nr_file##*/}} nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            printf 'process=%s %s\n' "$nr_pid" "$nr_comm"
        done
    fi
"""


@dataclass(frozen=True)
class Kfd:
    """What the kernel counts, by the PCI address of the GPU (kfd: amdgpu's part for computing).

    devices:    the addresses of the GPUs that can compute
    processes:  address -> the processes with memory on the GPU
    unreserved: address -> whether a bad page is still in use
    ras:        address -> uncorrectable and correctable errors of all blocks
    """

    devices: tuple[str, ...] = ()
    processes: Mapping[str, tuple[GpuProcess, ...]] = field(default_factory=dict)
    unreserved: Mapping[str, bool] = field(default_factory=dict)
    ras: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def _addresses(printed: str) -> dict[str, str]:
    """A GPU's id -> its PCI address; a node of the topology with id 0 is a processor."""
    nodes: dict[str, dict[str, str]] = {}
    for node, name, value in re.findall(
        rf"^{_ROOT}/topology/nodes/([0-9]+)/(?:gpu_id:|properties:(location_id|domain) )"
        r"([0-9]{1,10})$",
        printed,
        re.M,
    ):
        nodes.setdefault(node, {}).setdefault(name or "gpu_id", value)
    found = {}
    for node in nodes.values():
        if node.get("gpu_id", "0") != "0" and "location_id" in node:
            place, domain = int(node["location_id"]), int(node.get("domain", "0"))
            found[node["gpu_id"]] = (
                f"{domain & 0xFFFF:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 31:02x}.{place & 7}"
            )
    return found


def parse_kfd(printed: str) -> Kfd:
    """The GPUs in what _KFD_SCRIPT printed; other lines are passed over."""
    addresses = _addresses(printed)
    names = dict(re.findall(r"^process=([0-9]{1,9}) (.*)$", printed, re.M))
    processes: dict[str, list[GpuProcess]] = {}
    for pid, gpu, size in re.findall(
        rf"^{_ROOT}/proc/([0-9]{{1,9}})/vram_([0-9]+):([0-9]{{1,18}})$", printed, re.M
    ):
        # A process that opens the driver has a file for each GPU, with 0 for an unused one.
        if int(size) and gpu in addresses:
            process = GpuProcess(int(pid), names.get(pid, ""), int(size) >> 20)
            processes.setdefault(addresses[gpu], []).append(process)
    pages = re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/ras/gpu_vram_bad_pages:([0-9]{{1,9}})$", printed, re.M
    )
    ras: dict[str, tuple[int, int]] = {}
    for address, kind, count in re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/ras/[a-z0-9_]+_err_count:(ue|ce): ([0-9]{{1,18}})$",
        printed,
        re.M,
    ):
        bad, healed = ras.get(address, (0, 0))
        ras[address] = (bad + int(count), healed) if kind == "ue" else (bad, healed + int(count))
    return Kfd(
        tuple(addresses.values()),
        {address: tuple(found) for address, found in processes.items()},
        {address: int(count) > 0 for address, count in pages},
        ras,
    )


def idle(seen: Kfd, address: str) -> bool | None:
    """Whether no process has memory on this GPU; None where the driver does not list the GPU."""
    return address not in seen.processes if address in seen.devices else None


# --- amd-smi's JSON: ``static``, ``metric`` and ``xgmi``.
#
# Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py, versions 23 to 26. The first two print a
# list of devices, or since ROCm 6.4 ``{"gpu_data": […]}``; ``xgmi`` prints two documents one after
# the other.

# amd-smi's violation -> the reason for a lower clock, as `Gpu.throttle` names it. Power (ppt) is
# left out: under load, a GPU is meant to run at its power limit.
_THROTTLE = (
    ("prochot_violation_status", "hw_slowdown"),
    ("socket_thermal_violation_status", "hw_thermal_slowdown"),
    ("vr_thermal_violation_status", "hw_thermal_slowdown"),
    ("hbm_thermal_violation_status", "hw_thermal_slowdown"),
)
_XGMI = {"NO_ERRORS": 0, "ERROR": 1, "MULTIPLE_ERRORS": 2}


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """One AMD device, with the values that only AMD's tools have.

    xgmi_errors:  errors of the links between GPUs: the uncorrectable ones that RAS counts, or
                  the status of the links (1: an error, 2: several), which MI300 does not have
    ecc_deferred: uncorrectable errors in data that no program has used so far
    """

    xgmi_errors: int | None = None
    ecc_deferred: int | None = None


def _throttle(metric: Json) -> tuple[str, ...]:
    """The hardware's reasons for a lower clock that are active now."""
    seen = metric.get("throttle")
    if not isinstance(seen, dict):
        return ()
    active = [reason for key, reason in _THROTTLE if text(seen.get(key)) in ("ACTIVE", "True")]
    return tuple(dict.fromkeys(active))


def _ecc(static: Json, instinct: bool) -> str | None:
    """Whether memory has ECC, by the RAS of the memory controller; None: a board without RAS."""
    state = at(static, "ras", "ecc_block_state")
    if not isinstance(state, dict) or "UMC" not in state:
        return None
    if text(state["UMC"]) == "ENABLED":
        return "on"
    any_block = any(text(value) == "ENABLED" for value in state.values())
    return "off" if any_block or instinct else None


def _xgmi_errors(metric: Json) -> int | None:
    """Errors of the device's links; None where neither RAS nor the status counts them."""
    counted = whole(at(metric, "ecc_blocks", "XGMI_WAFL", "uncorrectable_count"))
    said = (text(metric.get("xgmi_err")) or "").replace("AMDSMI_XGMI_STATUS_", "")
    status = _XGMI.get(said)
    known = [count for count in (counted, status) if count is not None]
    return max(known) if known else None


def _links(printed: str) -> dict[str, tuple[Link, ...]]:
    """PCI address -> the links of that device. X (a device to itself) is no link."""
    states = {"U": "active", "D": "inactive"}
    found = {}
    for entry in entries(printed):
        status = entry.get("link_status")
        if isinstance(status, list):
            found[pci_address(entry.get("bdf"))] = tuple(
                Link(index, states[word])
                for index, word in enumerate(status[:64])
                if isinstance(word, str) and word in states
            )
    return found


def _temperature(limits: Json, metric: Json, kind: str) -> tuple[int | None, int | None]:
    """The degrees of one sensor, and the degrees at which the GPU slows down."""
    seen = degrees(at(metric, "temperature", kind))
    return seen, degrees(limits.get(f"slowdown_{kind}_temperature"))


def _gpu(static: Json, metric: Json, more: Kfd, links: Mapping[str, Any]) -> AmdGpu:
    """One device of amd-smi."""
    asic, bus = table(static, "asic"), table(static, "bus")
    vbios = table(static, "vbios") or table(static, "ifwi")
    limits, ecc = table(static, "limit"), table(metric, "ecc")
    pcie, memory = table(metric, "pcie"), table(metric, "mem_usage")
    address = pci_address(bus.get("bdf"))
    temperature, slowdown = _temperature(limits, metric, "hotspot")
    if temperature is None:
        temperature, slowdown = _temperature(limits, metric, "edge")
    total = megabytes(memory.get("total_vram"))
    if total is None:
        total = megabytes(at(static, "vram", "size"))
    device = (text(asic.get("device_id")) or "").lower()
    return AmdGpu(
        index=whole(static.get("gpu")) or 0,
        vendor="amd",
        pci_address=address,
        model=text(asic.get("market_name")),
        uuid=text(asic.get("asic_serial")),
        serial=text(at(static, "board", "product_serial")),
        vbios=text(vbios.get("part_number")) or text(vbios.get("version")),
        memory_total_mb=total,
        memory_used_mb=megabytes(memory.get("used_vram")),
        ecc=_ecc(static, device in MODELS),
        ecc_uncorrectable_volatile=whole(
            ecc.get("total_uncorrectable_count", ecc.get("total_uncorrectable"))
        ),
        ecc_correctable_volatile=whole(
            ecc.get("total_correctable_count", ecc.get("total_correctable"))
        ),
        ecc_deferred=whole(ecc.get("total_deferred_count", ecc.get("total_deferred"))),
        retired_pending=more.unreserved.get(address),
        pcie_generation=generation(pcie.get("speed", pcie.get("current_speed"))),
        pcie_generation_max=generation(bus.get("max_pcie_speed")),
        pcie_width=whole(pcie.get("width", pcie.get("current_lanes"))) or None,
        pcie_width_max=whole(bus.get("max_pcie_width")) or None,
        throttle=_throttle(metric),
        temperature_c=temperature,
        temperature_slowdown_c=slowdown,
        memory_temperature_c=degrees(at(metric, "temperature", "mem")),
        processes=more.processes.get(address, ()),
        idle=idle(more, address),
        links=links.get(address, ()),
        xgmi_errors=_xgmi_errors(metric),
        virtual=device in MODELS and MODELS[device].virtual,
    )


def parse_amd_smi(static: str, metric: str, xgmi: str, more: Kfd) -> Iterator[AmdGpu]:
    """The devices; of a partitioned GPU the first partition stands for the whole."""
    metrics = {whole(entry.get("gpu")): entry for entry in entries(metric)}
    links = _links(xgmi)
    seen = set()
    for entry in entries(static):
        gpu = _gpu(entry, metrics.get(whole(entry.get("gpu")), {}), more, links)
        if gpu.pci_address in seen or whole(at(entry, "partition", "partition_id")):
            continue
        seen.add(gpu.pci_address)
        yield gpu


# --- rocm-smi's JSON (ROCm/rocm_smi_lib).
#
# The keys differ in case between versions, and warnings stand before and after the JSON. Counts of
# RAS come from sysfs: rocm-smi prints them only without ``--json``.


def cards(printed: str) -> dict[int, dict[str, Any]]:
    """Number -> that card of rocm-smi, with its keys in lower case."""
    found: dict[int, dict[str, Any]] = {}
    for document in documents(printed):
        for name, card in document.items() if isinstance(document, dict) else ():
            match = re.fullmatch(r"card([0-9]{1,3})", name)
            if match and isinstance(card, dict):
                found[int(match[1])] = {key.lower(): value for key, value in card.items()}
    return found


def parse_rocm_smi(printed: str, more: Kfd) -> Iterator[AmdGpu]:
    """The devices in what rocm-smi printed."""
    for index, card in sorted(cards(printed).items()):
        address = pci_address(card.get("pci bus"))
        link = re.search(r"\(([0-9.]+)GT/s x([0-9]+)\)", text(card.get("pcie clock level")) or "")
        total = number(card.get("vram total memory (b)"))
        used = number(card.get("vram total used memory (b)"))
        device = (text(card.get("device id")) or "").lower()
        # Radeon boards count errors that never were, by the million.
        ras = more.ras.get(address) if device in MODELS else None
        junction = degrees(card.get("temperature (sensor junction) (c)"))
        edge = degrees(card.get("temperature (sensor edge) (c)"))
        yield AmdGpu(
            index=index,
            vendor="amd",
            pci_address=address,
            model=text(card.get("card series")) or text(card.get("device name")),
            uuid=text(card.get("unique id")),
            serial=text(card.get("serial number")),
            vbios=text(card.get("vbios version")),
            memory_total_mb=None if total is None else int(total) >> 20,
            memory_used_mb=None if used is None else int(used) >> 20,
            ecc_uncorrectable_volatile=ras[0] if ras else None,
            ecc_correctable_volatile=ras[1] if ras else None,
            retired_pending=more.unreserved.get(address),
            pcie_generation=generation(link[1]) if link else None,
            pcie_width=whole(link[2]) if link else None,
            temperature_c=edge if junction is None else junction,
            memory_temperature_c=degrees(card.get("temperature (sensor memory) (c)")),
            processes=more.processes.get(address, ()),
            idle=idle(more, address),
        )


# --- The section: one of the tools is asked, and how it fared.

_BIN = "/opt/rocm/bin"


def _script(policy: Policy) -> str:
    """Print the kernel's counts, then ask the tool, unless an earlier one hangs.

    A tool is a Python script, whose process has the name python3 when env started it.
    """
    return rf"""
    PATH=$PATH:{_BIN}
    nr_have amd-smi rocm-smi
    if [ ! -d /sys/module/amdgpu ]; then echo module=no; exit 0; fi
    nr_value version /sys/module/amdgpu/version
    {_KFD_SCRIPT}
    for nr_file in $(grep -alsE '\((amd-smi|rocm-smi|python[0-9.]*)\) D ' /proc/[0-9]*/stat); do
        # Any user can give a process such a name, and have it wait there.
        nr_is_roots "${{nr_file%/stat}}" || continue
        if grep -aqsE '/?(amd|rocm)[-_]smi' "${{nr_file%stat}}cmdline"; then
            nr_file=${{nr_file%/stat}}
            printf 'stuck=%s\n' "${{nr_file##*/}}"
            exit 0
        fi
    done
    nr_run() {{
        printf '\n@%s run %s\n' "$NR" "$1"
        shift
        "$@" 2>&1
        nr_status=$?
        printf '\n@%s ran %s\n' "$NR" "$nr_status"
        return $nr_status
    }}
    if command -v amd-smi >/dev/null; then
        nr_run static amd-smi static --json && nr_run metric amd-smi metric --json &&
            nr_run xgmi amd-smi xgmi --json
    else
        grep -asH '' /sys/bus/pci/drivers/amdgpu/*/ras/*_err_count
        nr_run rocm rocm-smi -a --json
    fi
    exit 0
    """


# 64 devices of 8 partitioned GPUs print about 30 kB each.
SECTION = Section(
    "amd",
    _script,
    timeout_s=20,
    cap_bytes=3 << 20,
    beside=True,
    when="command -v amd-smi >/dev/null || command -v rocm-smi >/dev/null"
    f" || [ -x {_BIN}/amd-smi ] || [ -x {_BIN}/rocm-smi ]",
)


@dataclass(frozen=True)
class _Run:
    """What one call of the tool printed; ``status`` is None when it did not end."""

    printed: str
    status: int | None


def _runs(output: Output) -> dict[str, _Run]:
    """The calls of the tool, by name."""
    mark = re.escape(f"@{output.nonce}")
    runs = {}
    for piece in re.split(rf"^{mark} run ", output.text, flags=re.M)[1:]:
        name, _, rest = piece.partition("\n")
        ended = re.search(rf"^{mark} ran ([0-9]{{1,3}})\s*\Z", rest, re.M)
        printed = rest[: ended.start()] if ended else rest
        runs[name] = _Run(printed, int(ended[1]) if ended else None)
    return runs


def _call(name: str, call: str, run: _Run | None, output: Output) -> Tool | None:
    """What is wrong with one call of the tool; None: nothing."""
    if run is None or run.status is None:
        if output.truncated:
            return Tool(name, "nonsense", "its output is too long")
        return Tool(name, "timed out", call)
    if run.status != 0:
        said = [line.strip() for line in run.printed.splitlines() if line.strip()]
        detail = f"exit status {run.status}: {said[-1] if said else ''}"
        return Tool(name, "failed", detail[:160])
    devices = cards(run.printed) if call == "rocm" else list(entries(run.printed))
    return None if devices else Tool(name, "nonsense", run.printed.strip()[:160])


def _tool(output: Output, before: str, runs: Mapping[str, _Run]) -> Tool:
    """How the tool fared; a fault of ``xgmi`` alone does not count."""
    have = re.findall(r"^have=(amd-smi|rocm-smi)$", before, re.M)
    if not have:
        # Without its first line, the section was ended before it looked for a tool.
        unseen = output.rc is None and not output.truncated
        return Tool("amd-smi", "timed out" if unseen else "missing")
    name = have[0]
    stuck = re.search(r"^stuck=([0-9]+)$", before, re.M)
    if stuck:
        return Tool(name, "stuck", f"process {stuck[1]} hangs in the kernel")
    if re.search(r"^module=no$", before, re.M):
        return Tool(name, "failed", "the kernel module amdgpu is not loaded")
    for call in ("static", "metric") if name == "amd-smi" else ("rocm",):
        wrong = _call(name, call, runs.get(call), output)
        if wrong:
            return wrong
    return Tool(name, "ok")


def _driver(before: str) -> str | None:
    """The version of amdgpu when it comes from ROCm; "in-tree" when it is the kernel's own."""
    version = re.search(r"^version=(.+)$", before, re.M)
    if version:
        return version[1].strip()
    loaded = before.startswith("have=") and not re.search(r"^module=no$", before, re.M)
    return "in-tree" if loaded else None


def parse(output: Output) -> tuple[tuple[AmdGpu, ...], Tool, str | None]:
    """The devices, how the tool fared, and the driver's version."""
    before = re.split(rf"^@{re.escape(output.nonce)} run ", output.text, maxsplit=1, flags=re.M)[0]
    runs = _runs(output)
    tool = _tool(output, before, runs)
    more = parse_kfd(before)
    if "rocm" in runs:
        gpus = tuple(parse_rocm_smi(runs["rocm"].printed, more))
    else:
        static, metric, xgmi = (
            runs[call].printed if call in runs else "" for call in ("static", "metric", "xgmi")
        )
        gpus = tuple(parse_amd_smi(static, metric, xgmi, more))
    return gpus, tool, _driver(before)
