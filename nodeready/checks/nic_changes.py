"""Judge what happened to the network interfaces since the last look: lost links, broken packets.

The counters run from the start of the driver, so that a total says nothing about today.
"""

from __future__ import annotations

from nodeready.checks.declare import check
from nodeready.policy import Policy
from nodeready.probes.counters import Counters
from nodeready.probes.nics import Nics
from nodeready.results import Result, fail, na, ok, warn

#: Changes of the carrier within a day that one restart of a switch or of the network does not
#: explain: a link that went and came twice.
_FLAPPING = 4
_DAY_S = 86400
#: Broken packets in an hour above which a link is bad, as for symbol errors of InfiniBand: the
#: specified bit error rate of 1e-12 makes a few in an hour at 100 Gbit/s and more.
_ERRORS_PER_HOUR = 120
_HOUR_S = 3600
_NO_LOOK = "no earlier look to compare with"


def _since(seconds: float) -> str:
    """``in 25 minutes``."""
    for unit, size in (("days", _DAY_S), ("hours", _HOUR_S), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"in {seconds / size:.0f} {unit}"
    return f"in {seconds:.0f} seconds"


def _growth(seen: Nics, before: Counters, counter: str) -> dict[str, int]:
    """Interface -> by how much the counter grew; only those on which it did.

    A smaller value than before is that of a driver that began anew: all of it is new.
    """
    grown = {}
    judged = seen.configured()
    for name, one in seen.interfaces.items():
        now, then = getattr(one, counter), before.values.get(f"{name}.{counter}")
        if now is None or then is None or not (one.physical or name in judged):
            continue
        growth = now - then if now >= then else now
        if growth > 0:
            grown[name] = growth
    return grown


def _counted(seen: Nics, before: Counters, *counters: str) -> bool:
    """Whether there is anything to compare."""
    return any(
        f"{name}.{counter}" in before.values and getattr(one, counter) is not None
        for name, one in seen.interfaces.items()
        for counter in counters
    )


def _listed(texts: list[str]) -> str:
    return "; ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


@check(
    "nics.flaps",
    fix=("look into dmesg and the switch's log; replace cable or transceiver if it goes on",),
)
def flaps(seen: Nics, want: Policy) -> Result:
    """No link went away or came back since the last look (carrier_changes).

    One interruption may be a switch or a cable that somebody touched: a warning. Twice and more
    within a day is a cable, transceiver or port that is failing, and ends the jobs on it.
    """
    check, before = "nics.flaps", seen.before
    if before is None:
        return na(check, _NO_LOOK)
    if not _counted(seen, before, "carrier_changes"):
        return na(check, "the earlier look saw none of these interfaces")
    grown = _growth(seen, before, "carrier_changes")
    since = _since(before.seconds)
    if not grown:
        return ok(check, "no change of a link", f"none {since}")
    actual = f"{_listed([f'{name}: {count} changes' for name, count in grown.items()])} {since}"
    source = f"/sys/class/net/{next(iter(grown))}/carrier_changes"
    fix = "look into dmesg and the switch's log; replace cable or transceiver if it goes on"
    # A change per day is the measure also when the last look is long ago.
    days = max(before.seconds / _DAY_S, 1.0)
    judge = fail if max(grown.values()) / days >= _FLAPPING else warn
    return judge(check, "no change of a link", actual, source, fix)


@check(
    "nics.errors", fix=("ethtool -S NAMES names the kind; clean or replace cable and transceiver",)
)
def errors(seen: Nics, want: Policy) -> Result:
    """Few packets broke since the last look: rx_crc_errors, rx_errors and tx_errors.

    A packet with a wrong checksum was damaged on the wire: cable, transceiver or port. Above 120
    in an hour that is a failure. Other errors have other causes as well (oversized packets, full
    rings), so that they only warn.
    """
    check, before = "nics.errors", seen.before
    if before is None:
        return na(check, _NO_LOOK)
    if not _counted(seen, before, "rx_crc_errors", "rx_errors", "tx_errors"):
        return na(check, "the earlier look saw none of these interfaces")
    broken = _growth(seen, before, "rx_crc_errors")
    hours = max(before.seconds / _HOUR_S, 1.0)
    bad = any(count / hours > _ERRORS_PER_HOUR for count in broken.values())
    texts = [f"{name}: {count} CRC errors" for name, count in broken.items()]
    names = list(broken)
    for counter, word in (("rx_errors", "receive errors"), ("tx_errors", "send errors")):
        for name, count in _growth(seen, before, counter).items():
            # A CRC error is a receive error too.
            other = count - broken.get(name, 0) if counter == "rx_errors" else count
            if other / hours > _ERRORS_PER_HOUR:
                texts.append(f"{name}: {other} {word}")
                names.append(name)
    since = _since(before.seconds)
    expected = f"no CRC errors, at most {_ERRORS_PER_HOUR} others an hour"
    if not texts:
        return ok(check, expected, f"none that count {since}")
    source = f"/sys/class/net/{names[0]}/statistics"
    fix = f"ethtool -S {names[0]} names the kind; clean or replace cable and transceiver"
    judge = fail if bad else warn
    return judge(check, expected, f"{_listed(texts)} {since}", source, fix)
