"""New errors of a node's GPUs and ports during the test. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nodeready.core.base import Unknown
from nodeready.core.result import ALONE
from nodeready.core.text import counted, sanitise
from nodeready.subjects.gpus import checks, findings, xids
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot

#: Counters of a GPU -> the name of one increment.
_GPU_COUNTERS = {
    "ecc_uncorrectable_volatile": "new uncorrected ECC error",
    "ecc_correctable_volatile": "new corrected ECC error",
    "ecc_deferred": "new deferred ECC error",
    "xgmi_errors": "new XGMI error",
    "remapped_uncorrectable": "newly remapped memory row",
    "retired_pages": "newly retired memory page",
}
#: States of a GPU that begin during the test.
_GPU_STATES = {
    "remap_pending": "a row of its memory waits to be remapped",
    "remap_failed": "a row of its memory could not be remapped",
    "retired_pending": "a page of its memory waits to be retired",
    "repair_pending": "its memory waits to be repaired",
    "unrepairable": "its memory cannot be repaired",
    "sram_exceeded": "its SRAM had too many errors",
}
#: Temperatures of a GPU with their limits.
_GPU_TEMPERATURES = (
    ("", "temperature_c", "temperature_slowdown_c"),
    ("memory ", "memory_temperature_c", "memory_temperature_max_c"),
)
#: The counters of ports (`Subject.counters`) -> the name of one increment, and the maximum normal
#: increase: send errors, and receive errors other than CRC errors, do not only come from the wire.
_PORT_COUNTERS = {
    "symbol_error": ("new symbol error", 0),
    "link_downed": ("new link failure", 0),
    "local_link_integrity_errors": ("new local link integrity error", 0),
    "excessive_buffer_overrun_errors": ("new excessive buffer overrun error", 0),
    "rnr_nak_retry_err": ("new RNR NAK retry error", 0),
    "carrier_changes": ("link change", 0),
    "rx_crc_errors": ("new CRC error", 0),
    "rx_errors": ("new receive error", 120),
    "tx_errors": ("new send error", 120),
}


def increase(before: int | None, after: int | None) -> int:
    """The increase of a counter, which may have restarted at 0; 0 where it is unknown.

    >>> increase(3, 5), increase(3, 2), increase(None, 2)
    (2, 2, 0)
    """
    if before is None or after is None:
        return 0
    return after - before if after >= before else after


def regressions(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """The new errors between two snapshots of a node, a sentence each."""
    sentences: list[str] = []
    for subject in ("gpus", "rdma", "nics"):
        old: Any = before.subjects.get(subject)
        new: Any = after.subjects.get(subject)
        if any(observed is None or isinstance(observed, Unknown) for observed in (old, new)):
            continue
        counters = SUBJECTS[subject].counters
        if counters:
            sentences += _ports(counters(old, ALONE), counters(new, ALONE))
        else:
            sentences += _gpus(old, new)
    return tuple(sanitise(sentence) for sentence in sentences)


def _gpus(before: Gpus, after: Gpus) -> Iterator[str]:
    remaining = {(gpu.pci_address, gpu.uuid): gpu for gpu in after.gpus}
    for gpu in before.gpus:
        tool = findings.vendor_tool_of(after, gpu.vendor)
        after_gpu = remaining.get((gpu.pci_address, gpu.uuid))
        if after_gpu is not None:
            yield from (f"GPU {gpu.index}: {text}" for text in _gpu(gpu, after_gpu))
        elif tool.works:
            yield f"GPU {gpu.index}: {tool.name} does not show it any more"
    for vendor in dict.fromkeys(gpu.vendor for gpu in before.gpus):
        tool = findings.vendor_tool_of(after, vendor)
        if not tool.works:
            yield f"{tool.name} {tool.state}, which answered before the test"
    errors = {gpu.address: gpu.aer for gpu in before.pci}
    for bus_gpu in after.pci:
        address = bus_gpu.address
        counts = {(kind, name): n for kind, name, n in errors.get(address, bus_gpu.aer)}
        for kind, name, count in bus_gpu.aer:
            new = increase(counts.get((kind, name), 0), count)
            if new:
                error = counted(new, "new uncorrected PCIe error")
                yield f"{address}: {error} ({name}, {kind}) during the test"
    yield from _kernel_faults(before, after)


def _gpu(before: Gpu, after: Gpu) -> Iterator[str]:
    for name, text in _GPU_COUNTERS.items():
        new = increase(getattr(before, name, None), getattr(after, name, None))
        if new:
            yield f"{counted(new, text)} during the test"
    for name, text in _GPU_STATES.items():
        if getattr(after, name) and not getattr(before, name):
            yield text
    throttle = [reason for reason in after.throttle if reason not in before.throttle]
    if throttle:
        yield f"slows down ({', '.join(throttle)})"
    for part, name, limit_name in _GPU_TEMPERATURES:
        limit, degrees = getattr(after, limit_name), getattr(after, name)
        if limit is None or degrees is None:
            continue
        if degrees >= limit > (getattr(before, name) or 0):
            yield f"{part}{degrees} C, its limit is {limit} C"
    if after.recovery not in (None, "none", before.recovery):
        yield f"its driver asks for {after.recovery}"


def _kernel_faults(before: Gpus, after: Gpus) -> Iterator[str]:
    """New faults in the kernel's log; the end of a test can cause those of applications."""
    if not (before.kernel_log.works and after.kernel_log.works):
        return
    old = Counter[tuple[object, ...]]()
    for fault in before.kernel_faults:
        old[fault.source, fault.code, fault.pci_address, fault.action] += fault.count
    new = []
    for fault in after.kernel_faults:
        key = fault.source, fault.code, fault.pci_address, fault.action
        count = fault.count - old[key]
        old[key] -= fault.count
        if count > 0 and fault.action != xids.APPLICATION:
            new.append(replace(fault, count=min(count, fault.count)))
    if new:
        yield f"in the kernel's log during the test: {checks.faults_in_words(after, new)}"


def _ports(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    for key, value in after.items():
        name, _, counter = key.rpartition(".")
        text, normal = _PORT_COUNTERS.get(counter, ("", 0))
        new = increase(before.get(key), value)
        if text and new > normal:
            yield f"{name.replace('/', ' port ')}: {counted(new, text)} during the test"
