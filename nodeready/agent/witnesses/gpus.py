"""The node's GPUs: their utilisation, processes and Xids since the job began.

A faulty driver blocks its callers: a tool runs under a limit and is left behind when it cannot be
ended, and no tool is started while an earlier one hangs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodeready.agent.proc import list_directory
from nodeready.agent.runtime import Ended, ProcessSupervisor
from nodeready.agent.stacks import processes
from nodeready.agent.witnesses import kernel_log


@dataclass(frozen=True)
class WitnessedGpu:
    """One GPU. None: the tool does not report the value."""

    index: int
    name: str
    bus_id: str
    sm_percent: int | None  # utilisation; power_w, limit_w: watts; xids: since the job began
    memory_percent: int | None  # likewise
    power_w: int | None
    limit_w: int | None
    xids: tuple[int, ...]
    pids: tuple[int, ...]  # the processes that compute on it, as this node's kernel numbers them
    # the hardware's reasons for a lower clock: see `nodeready.subjects.gpus.gpu.Gpu`
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class WitnessedGpus:
    """All GPUs of the node. absent: why there are none, one line."""

    absent: str = ""
    devices: tuple[WitnessedGpu, ...] = ()


def witness_gpus(
    supervisor: ProcessSupervisor, pids: Iterable[int], since_s: float, limit_s: float
) -> WitnessedGpus:
    """The node's GPUs, with the Xids since the job began. pids: of the job, listed first of many.
    since_s: seconds ago that it began. limit_s: seconds for everything
    """
    until = kernel_log.tool_deadline(supervisor, limit_s)
    job_pids = frozenset(pids)
    try:
        if _is_loaded("nvidia"):
            gpus = _nvidia(supervisor, job_pids, until)
        elif _is_loaded("amdgpu"):
            gpus = _amd(supervisor, job_pids, until)
        else:
            return WitnessedGpus("no driver of a GPU is loaded")
    except _NoAnswer as absent:
        return WitnessedGpus(str(absent))
    # A message has the address without the function.
    xids: dict[str, dict[int, None]] = defaultdict(dict)
    with contextlib.suppress(kernel_log.LogUnreadable):
        limit_s = max(0.5, until - time.monotonic())
        for address, code in kernel_log.xids(kernel_log.read_log(supervisor, since_s, limit_s)):
            xids[address[:10]][code] = None
    devices = (replace(gpu, xids=tuple(xids[gpu.bus_id[:10]])[:32]) for gpu in gpus)
    return WitnessedGpus("", tuple(devices))


class _NoAnswer(Exception):
    """Why the tool shows no GPU, one line."""


def _is_loaded(name: str) -> bool:
    """Whether this kernel module is loaded: the tool would load a missing one."""
    paths = f"/sys/module/{name}", f"/proc/driver/{name}/version", f"/sys/bus/pci/drivers/{name}"
    return any(map(os.path.exists, paths))


def _hung_process(words: re.Pattern[str], until: float) -> int:
    """The process of such a tool that hangs in the kernel; 0: none. Only root's and this user's
    count: any user can start one of that name. words: that its name or command line contains
    """
    from nodeready.subjects.gpus.nvidia import STUCK_AFTER_S

    uptime_s = kernel_log.uptime_s()
    waiting = []
    for pid in processes.pids():
        process = processes.stat(processes.contents(f"/proc/{pid}/stat", 4096))
        if process is None or process.state != "D" or uptime_s - process.start_s <= STUCK_AFTER_S:
            continue
        # amd-smi is a script of Python's.
        if words.search(process.name) or process.name.startswith("python"):
            waiting.append(pid)
    owners = processes.owners(waiting)
    trusted = [pid for pid in waiting if owners.get(pid) in (0, os.geteuid())]

    def look(pid: int) -> str:
        # The read may hang, too: the process may hang on its own memory.
        paths = (f"/proc/{pid}/comm", f"/proc/{pid}/cmdline")
        return " ".join(processes.contents(path, 512) for path in paths)

    texts = processes.probe_each(look, trusted, until).items()
    return next((pid for pid, text in texts if text is processes.HANGS or words.search(text)), 0)


def _run_tool(
    supervisor: ProcessSupervisor, name: str, arguments: Sequence[str], limit_s: float
) -> tuple[Ended, str]:
    """How a tool ended, and its output. Raises _NoAnswer."""
    try:
        argv = [kernel_log.tool_path(name), *arguments]
        return kernel_log.run_tool(supervisor, argv, limit_s)
    except OSError as problem:
        raise _NoAnswer(f"{name}: {problem.strerror or problem}") from None


def _nvidia(
    supervisor: ProcessSupervisor, job_pids: frozenset[int], until: float
) -> Sequence[WitnessedGpu]:
    """The GPUs by ``nvidia-smi -q -x``. Raises _NoAnswer."""
    from nodeready.core.base import Output
    from nodeready.subjects.gpus import nvidia, nvidia_gpu
    from nodeready.subjects.gpus.gpu import pci_address

    if not kernel_log.tool_path(nvidia.NAME):
        raise _NoAnswer("nvidia-smi is not installed")
    if stuck := _hung_process(re.compile("nvidia-smi"), until):
        raise _NoAnswer(f"an earlier nvidia-smi (pid {stuck}) hangs in the kernel: not asked")
    limit_s = until - time.monotonic()
    ended, text = _run_tool(supervisor, nvidia.NAME, ["-q", "-x"], limit_s)
    smi = nvidia.parse(Output(text or ended.err or " ", ended.rc))
    if not smi.gpus:
        reason = f"gave no answer in {limit_s:.0f} s" if ended.rc is None else smi.tool.detail
        raise _NoAnswer(f"nvidia-smi: {reason or smi.tool.state}")
    nodes: dict[str, Any] = {}
    root = nvidia_gpu.tree(text)
    for node in () if root is None else root.iterfind("gpu"):
        address = pci_address(node.get("id", ""))
        # A process's name can contain a forged GPU: the forged one is shorter.
        if address and (address not in nodes or len(node) > len(nodes[address])):
            nodes[address] = node
    gpus = []
    for gpu in smi.gpus:
        smi_node = nodes.get(gpu.pci_address)
        pids = (process.pid for process in gpu.processes if "C" in (process.kind or "C"))
        sm, memory = (_percent(smi_node, f"utilization/{name}_util") for name in ("gpu", "memory"))
        gpus.append(WitnessedGpu(
            gpu.index, gpu.model or "", gpu.pci_address, sm, memory, _watts(smi_node),
            gpu.power_limit_w, (), _pick_pids(pids, job_pids), gpu.throttle,
        ))  # fmt: skip
    return gpus


_MAX_PIDS = 64  # maximum processes listed of one GPU


def _pick_pids(pids: Iterable[int], job_pids: frozenset[int]) -> tuple[int, ...]:
    unique = dict.fromkeys(pids)
    return tuple(sorted(sorted(unique, key=lambda pid: pid not in job_pids)[:_MAX_PIDS]))


def _percent(node: Any, path: str) -> int | None:
    text = (node.findtext(path) or "") if node is not None else ""
    match = re.fullmatch(r"\s*(\d{1,3}) ?%\s*", text)
    return int(match[1]) if match and int(match[1]) <= 100 else None


#: The power of a GPU, by the names of several schemas.
_POWER_PATHS = (
    "gpu_power_readings/instant_power_draw", "gpu_power_readings/average_power_draw",
    "gpu_power_readings/power_draw", "power_readings/power_draw",
)  # fmt: skip


def _watts(node: Any) -> int | None:
    for path in _POWER_PATHS if node is not None else ():
        match = re.fullmatch(r"\s*(\d{1,5})(?:\.\d+)? W\s*", node.findtext(path) or "")
        if match:
            return int(match[1])
    return None


# --- AMD's GPUs: amd-smi, else rocm-smi; the processes come from the kernel.

_KFD = "/sys/class/kfd/kfd"
_MAX_KFD_ENTRIES = 4096  # maximum GPUs, and maximum processes, whose files there are read


def _amd(
    supervisor: ProcessSupervisor, job_pids: frozenset[int], until: float
) -> Sequence[WitnessedGpu]:
    """The GPUs by the first of the tools that is installed. Raises _NoAnswer."""
    name = next((tool for tool in ("amd-smi", "rocm-smi") if kernel_log.tool_path(tool)), "")
    if not name:
        raise _NoAnswer("neither amd-smi nor rocm-smi is installed")
    if stuck := _hung_process(re.compile("(amd|rocm)[-_]smi"), until):
        raise _NoAnswer(f"an earlier {name} (pid {stuck}) hangs in the kernel: not asked")
    printed = []
    for command in ("metric", "static") if name == "amd-smi" else ("-a",):
        limit_s = until - time.monotonic()
        ended, text = _run_tool(supervisor, name, [command, "--json"], limit_s)
        if ended.rc is None:
            raise _NoAnswer(f"{name} {command} gave no answer in time")
        printed.append(text)
    pids = _kfd_processes(until)
    gpus = list(_amd_smi(*printed) if name == "amd-smi" else _rocm_smi(*printed))
    if not gpus:
        raise _NoAnswer(f"{name}: {printed[0].strip()[:100] or 'it shows no GPU'}")
    return [replace(gpu, pids=_pick_pids(pids.get(gpu.bus_id, ()), job_pids)) for gpu in gpus]


def _amd_smi(metric: str, static: str) -> Iterator[WitnessedGpu]:
    from nodeready.subjects.gpus import amd_gpu, amd_json

    fixed = {amd_json.whole_number(entry.get("gpu")): entry for entry in amd_json.entries(static)}
    for entry in amd_json.entries(metric):
        index = amd_json.whole_number(entry.get("gpu")) or 0
        about = fixed.get(index, {})
        yield WitnessedGpu(
            index, amd_json.text(amd_json.value_at(about, "asic", "market_name")) or "",
            amd_json.address(amd_json.value_at(about, "bus", "bdf")),
            amd_json.whole_number(amd_json.value_at(entry, "usage", "gfx_activity")),
            amd_json.whole_number(amd_json.value_at(entry, "usage", "umc_activity")),
            _truncated(amd_json.number(amd_json.value_at(entry, "power", "socket_power"))),
            _truncated(amd_json.number(amd_json.value_at(about, "limit", "max_power"))), (), (),
            amd_gpu.throttle_reasons(entry),
        )  # fmt: skip


def _truncated(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rocm_smi(printed: str) -> Iterator[WitnessedGpu]:
    from nodeready.subjects.gpus import amd_gpu, amd_json

    for index, card in sorted(amd_gpu.cards(printed).items()):
        # ROCm 5 and 6 have different names for the power.
        watts = next((value for key, value in card.items() if _POWER_KEY.fullmatch(key)), None)
        yield WitnessedGpu(
            index, amd_json.text(card.get("card series")) or "",
            amd_json.address(card.get("pci bus")), amd_json.whole_number(card.get("gpu use (%)")),
            amd_json.whole_number(card.get("gpu memory read/write activity (%)")),
            _truncated(amd_json.number(watts)),
            _truncated(amd_json.number(card.get("max graphics package power (w)"))), (), (),
        )  # fmt: skip


_POWER_KEY = re.compile(r"(average|current) (socket )?graphics package power \(w\)")


def _kfd_processes(until: float) -> dict[str, list[int]]:
    """Address -> the processes with memory on that GPU (amdgpu's part for computing)."""
    from nodeready.subjects.gpus import amd_json

    rows = list[str]()
    for folder in (f"{_KFD}/topology/nodes", f"{_KFD}/proc"):
        for entry in list_directory(folder)[:_MAX_KFD_ENTRIES]:
            for name in list_directory(f"{folder}/{entry}"):
                if name in ("gpu_id", "properties") or name.startswith("vram_"):
                    path = f"{folder}/{entry}/{name}"
                    rows += (
                        f"{path}:{row}" for row in processes.contents(path, 4096).splitlines()
                    )
            if time.monotonic() > until:
                return {}
    users = amd_json.parse_kfd("\n".join(rows)).processes
    return {address: [process.pid for process in users[address]] for address in users}
