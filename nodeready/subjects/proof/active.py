"""Judge the active tests of idle nodes: DCGM's diagnostics, nvbandwidth and ib_write_bw."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from nodeready.core.base import grouped
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, join_first, join_names
from nodeready.core.severity import GUIDELINES, VALIDATION, loses_job, slows_job
from nodeready.core.text import counted
from nodeready.subjects.proof import facts
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.session import proof_check

#: The checks that ``--active`` adds, and what it adds from level 2 on.
ACTIVE_CHECKS = ("proof.diagnostic", "proof.bandwidth", "proof.nvlink_errors")
NETWORK_CHECKS = ("proof.rdma_bandwidth",)

# --- DCGM's diagnostics.

_AGAIN_FIX = "on the idle node, dcgmi diag -r 3 again; if it fails again, act as DCGM's text says"
_SETTING_FIX = "change the setting that DCGM names; gpus.persistence has the persistence mode"


def _findings_text(findings: Iterable[facts.DiagnosticFinding]) -> str:
    texts = (
        f"{finding.test}{f' on {finding.gpu}' if finding.gpu else ''}: "
        f"{finding.text or 'no reason given'}"
        for finding in findings
    )
    return join_first(texts)


@proof_check("proof.diagnostic", loses_job("inspect", "reset_gpu", "replace", source=GUIDELINES),
             "diagnostic", opt_in=True, expects="no test of dcgmi diag fails",
             fix=(_AGAIN_FIX, _SETTING_FIX))  # fmt: skip
def diagnostic(check: Check, tested: facts.Diagnostic, observed: Proved, policy: Policy) -> Result:
    """DCGM's diagnostics (`dcgmi diag -r LEVEL`) find no fault in the node's idle GPUs.

    It runs only with ``--active LEVEL``, or by its full name at level 1. Level 1 takes seconds and
    looks at the software; 2 (two minutes) and 3 (up to half an hour) load memory, PCIe and the
    processors, and need a budget to match (docs.nvidia.com/datacenter/dcgm, DCGM Diagnostics). No
    test starts while a process has memory on a GPU: that is unknown, as is a missing `dcgmi`, or a
    host engine that does not answer. A failure that DCGM puts down to the node's configuration
    (error_severity 5) is a warning; so is a test that warns. Tests that DCGM skips on this model
    are named.
    """
    name = f"dcgmi diag -r {tested.level}"
    source = f"{name}, DCGM {tested.version}" if tested.version else name
    if faults := [finding for finding in tested.failed if not finding.is_setting]:
        return check.fail(_findings_text(faults), source, _AGAIN_FIX)
    if remarks := (*tested.failed, *tested.warned):
        fix = _SETTING_FIX if all(remark.is_setting for remark in remarks) else _AGAIN_FIX
        return check.warn(_findings_text(remarks), source, fix)
    skipped = f"; skipped: {join_first(tested.skipped, ', ')}" if tested.skipped else ""
    if not tested.passed:
        return check.unknown(f"{name}: no test ran{skipped}")
    return check.ok(f"{len(tested.passed)} tests passed{skipped}", source)


# --- nvbandwidth.

#: The fewest values whose median says what is usual, as half of them may be slow.
COMPARABLE = 3
#: The share of the median below which a rate is slow. A link that lost a generation of PCIe or
#: half of its lanes has half of its rate; healthy GPUs of one model differ by up to a tenth
#: (recorded: 53.6 to 56.6 GB/s to eight H100), and RDMA ports too (363 to 397 of 400 Gbit/s).
SLOW_SHARE = 0.75
#: Test -> its name in a result.
_COPY_NAMES = {
    "host_to_device_memcpy_ce": "from the host", "device_to_host_memcpy_ce": "to the host",
    "device_to_device_memcpy_read_ce": "from its peers",
}  # fmt: skip
_SLOW_FIX = (
    "gpus.pcie, gpus.nvlink and gpus.throttle tell why; else reseat the GPU or its riser, and "
    "compare the firmware's settings with a peer's"
)


#: Maximum rates of one node, so that no node makes the median alone: of 16 GPUs.
_MAX_RATES = 16 * len(_COPY_NAMES)


def with_medians(tested: Mapping[str, Proved]) -> dict[str, Proved]:
    """The nodes' tests; each rate with the median of all GPUs of its model in its test."""
    measured = {
        node: replace(proved.bandwidth, rates=proved.bandwidth.rates[:_MAX_RATES])
        for node, proved in tested.items()
        if isinstance(proved.bandwidth, facts.Bandwidth)
    }
    rates = chain.from_iterable(outcome.rates for outcome in measured.values())
    by_kind = grouped(((rate.test, rate.model), rate.gbps) for rate in rates)
    medians = {kind: (statistics.median(values), len(values)) for kind, values in by_kind.items()}

    def compare(rate: facts.CopyRate) -> facts.CopyRate:
        median_gbps, compared = medians[rate.test, rate.model]
        return replace(rate, median_gbps=median_gbps, compared=compared)

    compared = {
        node: replace(outcome, rates=tuple(map(compare, outcome.rates)))
        for node, outcome in measured.items()
    }
    return {n: replace(p, bandwidth=compared.get(n, p.bandwidth)) for n, p in tested.items()}


@proof_check("proof.bandwidth", slows_job("inspect", "reseat", "replace", source=VALIDATION),
             "bandwidth", opt_in=True, fix=_SLOW_FIX,
             expects="each GPU copies at 75 % of its model's median or more")  # fmt: skip
def bandwidth(check: Check, tested: facts.Bandwidth, observed: Proved, policy: Policy) -> Result:
    """No GPU copies slower than 75 % of the median of its model, where nvbandwidth is installed.

    It runs only with ``--active LEVEL`` or by its full name, on idle GPUs, for half a minute:
    copies from the host, to the host, and between the GPUs, by the copy engines
    (github.com/NVIDIA/nvbandwidth). The median is that of all GPUs of this model in this run, at
    least three: no vendor's table has the rate of this board in this server. A link that has lost
    a generation of PCIe or half of its lanes has half of the rate, while healthy GPUs of one model
    differ by up to a tenth: the limit lies between the two.
    """
    compared = [rate for rate in tested.rates if rate.compared >= COMPARABLE]
    slow = [
        f"GPU {rate.gpu} copies {_COPY_NAMES.get(rate.test, rate.test)} at {rate.gbps:.1f} GB/s: "
        f"the median of {rate.compared} {rate.model} is {rate.median_gbps:.1f}"
        for rate in compared
        if rate.median_gbps and rate.gbps < SLOW_SHARE * rate.median_gbps
    ]
    if slow:
        return check.fail(join_first(slow), "nvbandwidth")
    if not compared:
        return check.na("fewer than three GPUs of a model: there is no median to compare with")
    slowest = {rate.test: rate.gbps for rate in sorted(compared, key=lambda rate: -rate.gbps)}
    texts = (
        f"{_COPY_NAMES.get(test, test)} {slowest[test]:.1f} GB/s"
        for test in sorted(slowest, reverse=True)
    )
    return check.ok(", ".join(texts), "nvbandwidth")


_LINK_FIX = "reset the GPUs and test again; then reseat the board or the bridge; see gpus.nvlink"


@proof_check("proof.nvlink_errors",
             slows_job("inspect", "reset_gpu", "reseat", "replace", source=VALIDATION),
             "bandwidth", opt_in=True, expects="no new error", fix=_LINK_FIX)  # fmt: skip
def nvlink_errors(
    check: Check, tested: facts.Bandwidth, observed: Proved, policy: Policy
) -> Result:
    """No NVLink counts errors while nvbandwidth copies between the GPUs (`nvidia-smi nvlink -e`).

    It is part of that test, and takes no further time. The counters begin when the driver is
    loaded, so only what they gain meanwhile counts. A replay or a recovery fails; CRC errors,
    which the link repairs by itself, are a warning (DCGM's health watch has the same limits,
    DcgmHealthWatch.cpp, and fails from 100 CRC errors a second on). Blackwell's GPUs count under
    other names, which are not read.
    """
    if tested.link_errors:
        is_repaired = all(text.endswith(" CRC") for text in tested.link_errors)
        judge = check.warn if is_repaired else check.fail
        return judge(join_first(tested.link_errors), "nvidia-smi nvlink -e")
    if not tested.counted_links:
        return check.na("nvidia-smi nvlink -e counts no errors of these GPUs")
    return check.ok(f"{counted(tested.counted_links, 'link')} without new errors")


# --- ib_write_bw between the nodes.

_PORT_FIX = "see rdma.pcie, rdma.errors and rdma.rate; else the port's cable, then the slot"
_PATH_FIX = "test each of the two with other nodes; then the cables and switches between them"


def _low_text(row: facts.RdmaRate) -> str:
    rate = f"no rate ({row.error})" if row.gbps is None else f"{row.gbps:.1f} Gbit/s"
    pair_text = " alone" if row.is_pair else ""
    return (
        f"{row.port} to {join_names(row.peers)}{pair_text}: {rate}, the median of "
        f"{row.compared} nodes is {row.median_gbps:.1f}"
    )


@proof_check("proof.rdma_bandwidth", slows_job("inspect", "reseat", "replace", source=VALIDATION),
             facts.RDMA, opt_in=True, fix=(_PORT_FIX, _PATH_FIX),
             expects="each port writes at 75 % of its median or more")  # fmt: skip
def rdma_bandwidth(
    check: Check, tested: facts.RdmaBandwidth, observed: Proved, policy: Policy
) -> Result:
    """No RDMA port writes slower than 75 % of the median of that port, by ib_write_bw.

    It runs only with ``--active 2`` or 3, or by its full name, on idle nodes with perftest. Each
    node writes from each active port to the same port of the next node (port 1 of mlx5_0 to port
    1 of mlx5_0), in turn, for three seconds, in rings of at most 128 nodes. The median
    is that of all nodes with this port and link rate in the run, at least three, of each the rate
    with its better neighbour: what a port reaches depends on the adapter and its slot. A slot that
    has lost half of its lanes has half of the rate, and healthy ports differ by up to a tenth: the
    limit lies between the two. A port that is slow with both neighbours fails; one that has no
    rate with either is unknown; a single slow pair is a warning for both nodes. Where other
    ports are measured, a port that is not on three nodes counts for nothing: it may be in
    another network.
    """
    low = [row for row in tested.rates if row.peers]
    by_node = [row for row in low if not row.is_pair]
    if slow := [row for row in by_node if row.gbps is not None]:
        return check.fail(join_first(map(_low_text, slow)), "ib_write_bw", _PORT_FIX)
    if by_node:
        return check.unknown(join_first(map(_low_text, by_node)))
    if low:
        return check.warn(join_first(map(_low_text, low)), "ib_write_bw", _PATH_FIX)
    uncompared = [row for row in tested.rates if not row.compared]
    texts = (f"{row.port} ({row.error})".replace(" ()", "") for row in uncompared)
    uncompared_text = join_first(texts, ", ")
    rates = [row.gbps for row in tested.rates if row.compared and row.gbps is not None]
    if not rates:
        without_median = check.unknown if any(row.error for row in uncompared) else check.na
        return without_median(f"not measured on three nodes: {uncompared_text}")
    actual = f"{counted(len(rates), 'port')}, {min(rates):.1f} Gbit/s or more"
    actual += f"; not compared: {uncompared_text}" if uncompared else ""
    return check.ok(actual, "ib_write_bw")
