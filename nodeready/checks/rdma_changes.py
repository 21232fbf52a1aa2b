"""Judge what happened on the RDMA links since an earlier look."""

from __future__ import annotations

from nodeready.checks.declare import check
from nodeready.checks.rdma_ports import configured, hardware, some, source
from nodeready.policy import Policy
from nodeready.probes.rdma import Rdma
from nodeready.probes.rdma_device import PMA_COUNTERS
from nodeready.results import Result, fail, na, ok, unknown, warn

#: Symbol errors an hour up to which a link keeps InfiniBand's bit error rate of 1e-12.
SYMBOL_ERRORS_PER_HOUR = 120


def _duration(seconds: float) -> str:
    """``40 s``, ``55 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _allowed(counter: str, seconds: float) -> float:
    """How much the counter may grow: an hour's worth at least, however short the time."""
    if counter != "symbol_error":
        return 0
    return SYMBOL_ERRORS_PER_HOUR * max(1.0, seconds / 3600)


@check(
    "rdma.errors",
    settings=("rdma_ports",),
    fix=(
        "check the cable and the transceiver, and the switch port's own counters",
        "reset the counters with perfquery -R, then look",
    ),
)
def errors(seen: Rdma, want: Policy) -> Result:
    """Since the last look no link went down and no counter of fatal errors grew.

    Any change of link_downed, local_link_integrity_errors, excessive_buffer_overrun_errors or
    rnr_nak_retry_err ends a job, and so do more than 120 symbol errors an hour, the limit of the
    InfiniBand specification (NVSentinel's NIC health monitor takes the same ones). Totals since
    the driver was loaded say nothing about today. One that is lower than before was reset: what it
    shows is new. One of 4 or 8 bits that is full stays there: of link_downed on InfiniBand, whose
    counters can be reset, that is a warning.
    """
    check, wants = "rdma.errors", "no new errors"
    before, ports = seen.before, configured(seen, want)
    if not hardware(seen):
        return na(check, "no RDMA device")
    if not any(port.counters for _, port in ports.values()):
        return na(check, "no port in use has error counters")
    if before is None or not before.values or before.seconds <= 0:
        return na(check, "no earlier look at this boot to compare with")
    grown, full, flapping, unread = [], [], [], []
    first = None
    for name, (_, port) in ports.items():
        for counter, value in port.counters.items():
            earlier = before.values.get(f"{name}.{counter}")
            most = PMA_COUNTERS.get(counter)
            if value is None:
                unread.append(f"{name} {counter}")
            elif earlier is None:
                continue
            elif value == most and value == earlier:
                full.append(f"{name} {counter}")
                if counter == "link_downed" and port.link_layer == "InfiniBand":
                    flapping.append(f"{name} {counter} {value}")
            else:
                change = value if value < earlier else value - earlier
                if change > _allowed(counter, before.seconds):
                    least = "at least " if value == most else ""
                    grown.append(f"{name} {counter} +{least}{change}")
                    first = first or source(port, "counters")
    span = _duration(before.seconds)
    if grown:
        fix = "check the cable and the transceiver, and the switch port's own counters"
        return fail(check, wants, f"in {span}: {some(grown)}", first or "", fix)
    if unread:
        return unknown(check, f"cannot be read: {some(unread, ', ')}")
    if flapping:
        actual = f"full, so that no more shows: {some(flapping, ', ')}"
        return warn(check, wants, actual, "", "reset the counters with perfquery -R, then look")
    silent = f" (full before: {some(full, ', ')})" if full else ""
    return ok(check, wants, f"none in {span}{silent}")
