"""AMD's GPUs, as amd-smi shows them, or rocm-smi where the node has no amd-smi."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodeready.core import shell
from nodeready.core.base import Output, Section
from nodeready.subjects.gpus import amd_json
from nodeready.subjects.gpus.amd_json import Json, Kfd, Reader, degrees, limit
from nodeready.subjects.gpus.gpu import Gpu, GpuLink, PciGpu, Tool
from nodeready.subjects.iommu.facts import MODELS, is_integrated, is_server_board


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """One AMD device, with the values that only AMD's tools print."""

    # errors of the links between GPUs: the uncorrectable ones that RAS counts, or the status of
    # the links (1: an error, 2: several), which MI300 does not have
    xgmi_errors: int | None = None
    ecc_deferred: int | None = None  # uncorrectable errors in data that no program has read yet
    partition: str | None = None  # how it is divided: ``SPX/NPS1`` is one GPU with one memory


#: Performance levels at which the GPU stays at its lowest clocks (Linux' amdgpu_pm.c).
_LOW = ("LOW", "PROFILE_MIN_SCLK", "PROFILE_MIN_MCLK", "STABLE_MIN_SCLK", "STABLE_MIN_MCLK")


def performance_level(value: Any) -> tuple[str, ...]:
    """The reason for a lower clock that an administrator has set, or none."""
    name = (amd_json.text(value) or "").upper().replace("AMDSMI_DEV_PERF_LEVEL_", "")
    return (f"performance level {name.lower()}",) if name in _LOW else ()


def hottest_sensor(
    sensors: Iterable[tuple[int | None, int | None]],
) -> tuple[int | None, int | None]:
    """The degrees of one sensor, and the degrees at which the GPU slows down for that sensor.

    The first sensor at its limit; else the first with a limit; else the first with a reading.
    """
    readings = [(degrees, limit) for degrees, limit in sensors if degrees is not None]
    limited = [(degrees, limit) for degrees, limit in readings if limit is not None]
    hot = [(degrees, limit) for degrees, limit in limited if degrees >= limit]
    return next(iter(hot or limited or readings), (None, None))


def partition_modes(reader: Reader) -> str | None:
    """``SPX/NPS1``: how compute units and memory are divided."""
    compute = reader.raw(
        "partition/accelerator_partition", "partition/compute_partition", "compute partition"
    )
    memory = reader.raw("partition/memory_partition", "memory partition")
    words = [amd_json.text(value) or "" for value in (compute, memory)]
    return "/".join(word for word in words if re.fullmatch("[A-Z]{2,4}[0-9]?", word)) or None


#: Name of a value that is read -> the field of `Gpu` whose verdict it decides.
_FIELDS = {
    "ecc_uncorrectable": "ecc_uncorrectable_volatile", "ecc_correctable": "tool correctable",
    "memory_total_mb": "tool memory", "memory_used_mb": "tool memory",
    "power_limit_w": "tool power limit", "temperature_limit": "temperature_slowdown_c",
    "memory_temperature_limit": "memory_temperature_c",
}  # fmt: skip


def unread_fields(reader: Reader) -> tuple[tuple[str, str], ...]:
    """The values that the tool could not read, by the fields of `Gpu`."""
    return tuple(dict.fromkeys((_FIELDS.get(name, name), words) for name, words in reader.unread))


def accelerators(gpus: Iterable[AmdGpu], bus: Iterable[PciGpu]) -> tuple[AmdGpu, ...]:
    """The accelerators among the GPUs, with the lanes that the PCI bus shows.

    The graphics of a processor are no accelerator. rocm-smi prints no maximum of lanes, and no
    tool shows a link behind the GPU that has lost lanes: the smaller number of bus and tool
    counts. A Radeon lowers its lanes when it is idle, and has a link inside of the board: its
    numbers of lanes are not judged.
    """
    bus_gpus = {bus_gpu.address: bus_gpu for bus_gpu in bus}
    pairs = ((gpu, bus_gpus.get(gpu.pci_address)) for gpu in gpus)
    return tuple(
        gpu if bus_gpu is None else _with_bus_width(gpu, bus_gpu)
        for gpu, bus_gpu in pairs
        if bus_gpu is None or not is_integrated(bus_gpu.device)
    )


def _with_bus_width(gpu: AmdGpu, bus_gpu: PciGpu) -> AmdGpu:
    if not is_server_board(f"0x{bus_gpu.device}"):
        return replace(gpu, pcie_width_max=None, pcie_generation_max=None)
    width_max = gpu.pcie_width_max or bus_gpu.pcie_width_max
    widths = [width for width in (gpu.pcie_width, bus_gpu.pcie_width) if width is not None]
    return replace(gpu, pcie_width=min(widths, default=None), pcie_width_max=width_max)


# --- amd-smi: ``static``, ``metric`` and ``xgmi``.
#
# Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py, versions 23 to 26. The first two print a
# list of devices, or since ROCm 6.4 ``{"gpu_data": […]}``; ``xgmi`` prints two documents.

# amd-smi's violation -> the reason for a lower clock, as `Gpu.throttle` names it. Power (ppt) is
# left out: under load, a GPU is meant to run at its power limit.
_THROTTLE = (
    ("prochot_violation_status", "hw_slowdown"),
    ("socket_thermal_violation_status", "hw_thermal_slowdown"),
    ("vr_thermal_violation_status", "hw_thermal_slowdown"),
    ("hbm_thermal_violation_status", "hw_thermal_slowdown"),
)

_XGMI = {"NO_ERRORS": 0, "ERROR": 1, "MULTIPLE_ERRORS": 2}


def throttle_reasons(entry: Json) -> tuple[str, ...]:
    """The active reasons for a lower clock, of one device's ``metric``."""
    return _throttle(Reader(entry))[0] + performance_level(entry.get("perf_level"))


def _throttle(reader: Reader) -> tuple[tuple[str, ...], bool | None]:
    """The active reasons for a lower clock, and whether there is one; None: not all are shown."""
    active, readable_count = [], 0
    for key, reason in _THROTTLE:
        value = reader.raw(f"throttle/{key}")
        word = (amd_json.text(value) or "").upper().replace("_", " ")
        if word in ("ACTIVE", "TRUE", "1", "NOT ACTIVE", "FALSE", "0"):
            readable_count += 1
            active += [reason] if word in ("ACTIVE", "TRUE", "1") else []
            continue
        reader.note_error("throttle", value)
        # The part of the last moments in which the reason was active.
        share = amd_json.number(reader.raw(f"throttle/{key.replace('_status', '_activity')}"))
        readable_count += share is not None
        active += [reason] if share else []
    reasons = tuple(dict.fromkeys(active))
    return reasons, bool(reasons) if readable_count == len(_THROTTLE) or reasons else None


#: Enabled, or the kind of error that the block has counted: amdsmi_ras_err_state_t.
_ON = ("ENABLED", "PARITY", "SING_C", "MULT_UC", "POISON")


def _ecc(reader: Reader, instinct: bool) -> str | None:
    """Whether memory has ECC, by the RAS of the memory controller; None: a board without RAS.

    The blocks are a dictionary, or in version 23 a list of ``{"block": …, "status": …}``.
    """
    state: Json | None = None
    for path in (("ras", "ecc_block_state"), ("ras",)):
        blocks = amd_json.value_at(reader.entries[0], *path)
        if isinstance(blocks, list):
            blocks = {
                str(item.get("block")): item.get("status")
                for item in blocks
                if isinstance(item, dict)
            }
        if isinstance(blocks, dict) and "UMC" in blocks:
            state = blocks
            break
        if isinstance(blocks, str):
            reader.note_error("ecc", blocks)
    if state is None:
        return None
    word = amd_json.text(state["UMC"])
    if word in _ON:
        return "on"
    if word != "DISABLED":
        reader.note_error("ecc", state["UMC"])
        return None
    any_block = any(amd_json.text(value) == "ENABLED" for value in state.values())
    return "off" if any_block or instinct else None


def _blocks(metric: Json, word: str) -> int | None:
    """The sum of the counts of the device's blocks; None where no block counts."""
    tables = (metric.get(name) for name in ("ecc_blocks", "ecc_block"))
    blocks: Json = next((table for table in tables if isinstance(table, dict) and table), {})
    counts = [
        error_count
        for block in blocks.values()
        if isinstance(block, dict)
        and (error_count := amd_json.count(block.get(f"{word}_count", block.get(word))))
        is not None
    ]
    return sum(counts) if counts else None


def _errors(reader: Reader, metric: Json, word: str, instinct: bool) -> int | None:
    """The errors of this kind: the device's total, or the sum of its blocks where it is higher.

    Radeon boards count errors that never were: all ones in registers of 16 bits.
    """
    paths = (f"total_{word}_count", f"total_{word}", f"{word}_count", word)
    total = reader.get(f"ecc_{word}", amd_json.count, *(f"ecc/{path}" for path in paths))
    blocks = _blocks(metric, word)
    counts = [error_count for error_count in (total, blocks) if error_count is not None]
    error_count = max(counts) if counts else None
    return None if error_count and not instinct and error_count % 65535 == 0 else error_count


def _xgmi_errors(reader: Reader) -> int | None:
    """Errors of the device's links; None where neither RAS nor the status counts them."""
    paths = "ecc_blocks/XGMI_WAFL/uncorrectable_count", "ecc_block/XGMI_WAFL/uncorrectable"
    error_count = reader.get("xgmi_errors", amd_json.count, *paths)
    raw = reader.raw("xgmi_err")
    word = (amd_json.text(raw) or "").replace("AMDSMI_XGMI_STATUS_", "")
    status = _XGMI.get(word)
    if status is None and amd_json.number(raw) in (0, 1, 2):
        status = amd_json.whole_number(raw)
    if status is None:
        reader.note_error("xgmi_errors", raw)
    counts = [errors for errors in (error_count, status) if errors is not None]
    return max(counts) if counts else None


def _links(printed: str) -> dict[str, tuple[GpuLink, ...]]:
    """PCI address -> the links of that device. X (a device to itself) is no link.

    The state of a link with an error's text is unknown.
    """
    states = {"U": "active", "D": "inactive"}
    links_by_address = {}
    for entry in amd_json.entries(printed):
        status = entry.get("link_status")
        if isinstance(status, list):
            links_by_address[amd_json.address(entry.get("bdf"))] = tuple(
                GpuLink(index, states.get(word, "unknown"))
                for index, word in enumerate(status[:64])
                if isinstance(word, str)
                and word != "X"
                and (word in states or amd_json.error(word))
            )
        elif amd_json.error(status):
            links_by_address[amd_json.address(entry.get("bdf"))] = (GpuLink(0, "unknown"),)
    return links_by_address


def _sensor(reader: Reader, kind: str, old: str) -> tuple[int | None, int | None]:
    """The degrees of one sensor of amd-smi, and the degrees at which it slows the GPU down.

    old: the sensor's name in the limits of version 23
    """
    field = "memory_temperature_c" if kind == "mem" else "temperature_c"
    name = "vram" if kind == "mem" else kind
    limits = f"limit/slowdown_{name}_temperature", f"limit/temperature_{old}"
    return (
        reader.get(field, degrees, f"temperature/{kind}", f"temperature/{kind}_temperature"),
        reader.get(field.replace("_c", "_limit"), limit, *limits),
    )


#: Field -> its reader, and the value's paths in the versions of amd-smi.
_AMD_SMI: Mapping[str, tuple[Any, ...]] = {
    "pcie_width": (amd_json.lanes, "pcie/width", "pcie/current_lanes", "pcie/pcie_lanes"),
    "pcie_generation": (
        amd_json.generation, "pcie/speed", "pcie/current_speed", "pcie/pcie_speed",
    ),
    "model": (amd_json.parse_name, "asic/market_name"),
    "vbios": (
        amd_json.parse_name, "vbios/part_number", "vbios/version", "ifwi/part_number",
        "ifwi/version",
    ),
    "memory_total_mb": (amd_json.megabytes, "mem_usage/total_vram", "mem_usage/vram", "vram/size"),
    "memory_used_mb": (amd_json.megabytes, "mem_usage/used_vram"),
}  # fmt: skip
#: Likewise, of those that are read after the errors of memory.
_AMD_SMI_MAXIMA: Mapping[str, tuple[Any, ...]] = {
    "pcie_generation_max": (amd_json.generation, "bus/max_pcie_speed", "bus/pcie_speed"),
    "pcie_width_max": (
        amd_json.lanes, "bus/max_pcie_width", "bus/max_pcie_lanes", "bus/pcie_lanes",
    ),
}  # fmt: skip
_POWER_LIMITS = ("limit/socket_power", "limit/current_power", "limit/power")


def _gpu(static: Json, metric: Json, kfd: Kfd, links: Mapping[str, Any]) -> AmdGpu:
    reader = Reader(static, metric)
    pci_address = amd_json.address(reader.raw("bus/bdf"))
    device = (amd_json.text(reader.raw("asic/device_id")) or "").lower()
    instinct = is_server_board(device)
    temperature, slowdown = hottest_sensor(
        (_sensor(reader, "hotspot", "junction"), _sensor(reader, "edge", "edge"))
    )
    memory, memory_max = _sensor(reader, "mem", "vram")
    throttle, throttled = _throttle(reader)
    level = performance_level(reader.raw("perf_level"))
    fields: dict[str, Any] = {field: reader.get(field, *row) for field, row in _AMD_SMI.items()}
    ecc = _ecc(reader, instinct)
    uncorrectable, correctable, deferred = (
        _errors(reader, metric, word, instinct)
        for word in ("uncorrectable", "correctable", "deferred")
    )
    fields.update((field, reader.get(field, *row)) for field, row in _AMD_SMI_MAXIMA.items())
    return AmdGpu(
        **fields,
        index=amd_json.whole_number(static.get("gpu")) or 0,
        vendor="amd",
        pci_address=pci_address,
        uuid=amd_json.text(reader.raw("asic/asic_serial")),
        serial=amd_json.text(reader.raw("board/product_serial")),
        ecc=ecc,
        ecc_uncorrectable_volatile=uncorrectable,
        ecc_correctable_volatile=correctable,
        ecc_deferred=deferred,
        retired_pending=kfd.unreserved.get(pci_address),
        throttle=throttle + level,
        throttled=True if level else throttled,
        temperature_c=temperature,
        temperature_slowdown_c=slowdown,
        memory_temperature_c=memory,
        memory_temperature_max_c=memory_max,
        processes=kfd.processes.get(pci_address, ()),
        idle=amd_json.idle(kfd, pci_address),
        links=links.get(pci_address, ()),
        xgmi_errors=_xgmi_errors(reader),
        partition=partition_modes(reader),
        power_limit_w=reader.get("power_limit_w", amd_json.whole_number, *_POWER_LIMITS),
        virtual=device in MODELS and MODELS[device].virtual,
        unread=unread_fields(reader),
    )


def parse_amd_smi(
    static: str, metric: str, xgmi: str, kfd: Kfd, links_error: str = ""
) -> Iterator[AmdGpu]:
    """The devices; the first partition represents a partitioned GPU.

    links_error: why the tool could not read the links
    """
    metrics = {amd_json.whole_number(row.get("gpu")): row for row in amd_json.entries(metric)}
    links = _links(xgmi)
    addresses = set()
    for entry in amd_json.entries(static):
        gpu = _gpu(entry, metrics.get(amd_json.whole_number(entry.get("gpu")), {}), kfd, links)
        partition = amd_json.whole_number(amd_json.value_at(entry, "partition", "partition_id"))
        if gpu.pci_address in addresses or partition:
            continue
        addresses.add(gpu.pci_address)
        unread = ", ".join(str(link.index) for link in gpu.links if link.state == "unknown")
        if reason := links_error or (f"no state of the links {unread}" if unread else ""):
            gpu = replace(gpu, unread=(*gpu.unread, ("links", reason)))
        yield gpu


# --- rocm-smi.
#
# The keys differ in case between versions, and warnings stand before and after the JSON. Counts of
# RAS come from sysfs: rocm-smi prints them only without ``--json``.


def cards(printed: str) -> dict[int, dict[str, Any]]:
    """Number -> that card of rocm-smi, with its keys in lower case."""
    cards_by_index: dict[int, dict[str, Any]] = {}
    for document in amd_json.documents(printed):
        for name, card in document.items() if isinstance(document, dict) else ():
            match = re.fullmatch(r"card([0-9]{1,3})", name)
            if match and isinstance(card, dict):
                cards_by_index[int(match[1])] = {key.lower(): value for key, value in card.items()}
    return cards_by_index


def parse_rocm_smi(printed: str, kfd: Kfd) -> Iterator[AmdGpu]:
    for index, card in sorted(cards(printed).items()):
        reader = Reader(card)
        pci_address = amd_json.address(card.get("pci bus"))
        link_text = reader.raw("pcie clock level")
        link = re.search(r"\(([0-9.]+)GT/s x([0-9]+)\)", amd_json.text(link_text) or "")
        speed, width = (link[1], link[2]) if link else (None, None)
        if link is None:
            reader.note_error("pcie_width", link_text)
        else:
            if amd_json.generation(speed) is None:
                reader.note_unreadable("pcie_generation", amd_json.generation, speed)
            if amd_json.lanes(width) is None:
                reader.note_unreadable("pcie_width", amd_json.lanes, width)
        total = reader.get("memory_total_mb", amd_json.number, "vram total memory (b)")
        used = reader.get("memory_used_mb", amd_json.number, "vram total used memory (b)")
        # ROCm 5 calls the device's id "GPU ID"; since ROCm 6 this is another number.
        device = (amd_json.text(reader.raw("device id", "gpu id")) or "").lower()
        instinct = is_server_board(device)
        # Radeon boards count millions of errors that never happened.
        ras = kfd.ras.get(pci_address) if instinct else None
        limits = kfd.limits.get(pci_address, {})
        junction, edge, memory = (
            reader.get(field, degrees, f"temperature (sensor {kind}) (c)")
            for field, kind in (
                ("temperature_c", "junction"),
                ("temperature_c", "edge"),
                ("memory_temperature_c", "memory"),
            )
        )
        temperature, slowdown = hottest_sensor(
            ((junction, limits.get("junction")), (edge, limits.get("edge")))
        )
        level = performance_level(reader.raw("performance level"))
        yield AmdGpu(
            index=index,
            vendor="amd",
            pci_address=pci_address,
            model=reader.get("model", amd_json.parse_name, "card series", "device name"),
            uuid=amd_json.text(card.get("unique id")),
            serial=amd_json.text(card.get("serial number")),
            vbios=reader.get("vbios", amd_json.parse_name, "vbios version"),
            memory_total_mb=None if total is None else int(total) >> 20,
            memory_used_mb=None if used is None else int(used) >> 20,
            ecc_uncorrectable_volatile=ras[0] if ras else None,
            ecc_correctable_volatile=ras[1] if ras else None,
            retired_pending=kfd.unreserved.get(pci_address),
            pcie_generation=amd_json.generation(speed),
            pcie_width=amd_json.lanes(width),
            throttle=level,
            throttled=True if level else None,
            temperature_c=temperature,
            temperature_slowdown_c=slowdown,
            memory_temperature_c=memory,
            memory_temperature_max_c=limits.get("mem"),
            processes=kfd.processes.get(pci_address, ()),
            idle=amd_json.idle(kfd, pci_address),
            partition=partition_modes(reader),
            power_limit_w=reader.get(
                "power_limit_w", amd_json.whole_number, "max graphics package power (w)"
            ),
            unread=unread_fields(reader),
        )


# --- The section that runs the tools, and its answer.

_BIN = "/opt/rocm/bin"

# 64 devices of 8 partitioned GPUs print about 30 kB each.
SECTION = Section(
    "amd",
    lambda policy: shell.script("amd_smi"),
    timeout_s=20,
    cap_bytes=3 << 20,
    parallel=True,
    when="command -v amd-smi >/dev/null || command -v rocm-smi >/dev/null"
    f" || [ -x {_BIN}/amd-smi ] || [ -x {_BIN}/rocm-smi ]",
)


@dataclass(frozen=True)
class _ToolCall:
    """The output of one call of the tool. status: None: the call did not end"""

    printed: str
    status: int | None

    @property
    def last_line(self) -> str:
        return (self.printed.strip().splitlines() or [""])[-1].strip()


def _tool_calls(output: Output) -> dict[str, _ToolCall]:
    mark = re.escape(f"@{output.nonce}")
    calls = {}
    for section in re.split(rf"^{mark} run ", output.text, flags=re.M)[1:]:
        name, _, body = section.partition("\n")
        end = re.search(rf"^{mark} ran ([0-9]{{1,3}})\s*\Z", body, re.M)
        printed = body[: end.start()] if end else body
        calls[name] = _ToolCall(printed, int(end[1]) if end else None)
    return calls


def _call_failure(tool: str, name: str, call: _ToolCall | None, output: Output) -> Tool | None:
    """The tool's failure, where the call of this name failed; else None."""
    if call is None or call.status is None:
        if output.truncated:
            return Tool(tool, "nonsense", "its output is too long")
        return Tool(tool, "timed out", name)
    devices = cards(call.printed) if name == "rocm" else list(amd_json.entries(call.printed))
    # For each value that a board lacks, rocm-smi sets its exit status and continues.
    if call.status != 0 and not (name == "rocm" and call.status in (1, 2) and devices):
        return Tool(tool, "failed", f"exit status {call.status}: {call.last_line}"[:160])
    return None if devices else Tool(tool, "nonsense", call.printed.strip()[:160])


#: The answer of a version without this command, and of a board without such links.
_NO_LINKS = re.compile(r"not supported|not_supported|invalid choice|unrecognized|usage:|N/A", re.I)


def _links_error(call: _ToolCall | None) -> str:
    """Why ``amd-smi xgmi`` could not read the links; "": it could, or there are none."""
    if call is None or call.status == 0:
        return ""
    if call.status is None:
        return "" if list(amd_json.entries(call.printed)) else "amd-smi xgmi timed out"
    if _NO_LINKS.search(call.printed):
        return ""
    return f"amd-smi xgmi: {call.last_line or f'exit status {call.status}'}"[:80]


def _tool(output: Output, before: str, calls: Mapping[str, _ToolCall]) -> Tool:
    """The tool and its state; a failure of ``xgmi`` alone does not count."""
    if not (installed := re.findall(r"^have=(amd-smi|rocm-smi)$", before, re.M)):
        # Without its first line, the section ended before its search for a tool.
        timed_out = output.rc is None and not output.truncated
        return Tool("amd-smi", "timed out" if timed_out else "missing")
    name = installed[0]
    if stuck := re.search(r"^stuck=([0-9]+)$", before, re.M):
        return Tool(name, "stuck", f"process {stuck[1]} hangs in the kernel")
    if re.search(r"^module=no$", before, re.M):
        return Tool(name, "failed", "the kernel module amdgpu is not loaded")
    for call in ("static", "metric") if name == "amd-smi" else ("rocm",):
        if failure := _call_failure(name, call, calls.get(call), output):
            return failure
    return Tool(name, "ok")


def _driver(before: str) -> str | None:
    """The version of amdgpu when it comes from ROCm; "in-tree" when it is the kernel's own."""
    if version := re.search(r"^version=(.+)$", before, re.M):
        return version[1].strip()
    loaded = before.startswith("have=") and not re.search(r"^module=no$", before, re.M)
    return "in-tree" if loaded else None


def parse(output: Output) -> tuple[tuple[AmdGpu, ...], Tool, str | None]:
    """The devices, the tool with its state, and the driver's version."""
    before = re.split(rf"^@{re.escape(output.nonce)} run ", output.text, maxsplit=1, flags=re.M)[0]
    calls = _tool_calls(output)
    tool = _tool(output, before, calls)
    kfd = amd_json.parse_kfd(before)
    if "rocm" in calls:
        gpus = tuple(parse_rocm_smi(calls["rocm"].printed, kfd))
    else:
        static, metric, xgmi = (
            calls[name].printed if name in calls else "" for name in ("static", "metric", "xgmi")
        )
        links_error = _links_error(calls.get("xgmi"))
        gpus = tuple(parse_amd_smi(static, metric, xgmi, kfd, links_error))
    return gpus, tool, _driver(before)
