"""The time at the beginning of a log's line."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_STAMPS = (
    # 2026-03-01T12:00:00.123Z, 2026-03-01 12:00:00,123, torchrun's 2026-03-01_12:00:00
    re.compile(rf"(\d{{4}})[-/](\d\d)[-/](\d\d)[T _]{_CLOCK}(Z|[+-]\d\d:?\d\d)?"),
    # glog: E0301 12:00:00.123456, E20260301 12:00:00.123456
    re.compile(rf"\b[IWEFDV](\d{{4}})?(\d\d)(\d\d) {_CLOCK}"),
    # syslog, and dmesg -T with a year: Mar  1 12:00:00
    re.compile(rf"\b({'|'.join(_MONTHS)}) +(\d{{1,2}}) {_CLOCK}(?: (\d{{4}}))?"),
)
#: Characters at the beginning of a line in which its time stands.
STAMP_CHARACTERS = 80
TIMED = re.compile(r"\d\d:\d\d:\d\d")
#: Makes seconds since 1970 of year, month, day, hour, minute and second in a log's time zone.
Calendar = Callable[[tuple[int, int, int, int, int, int]], float]


def node_calendar(moment: tuple[int, int, int, int, int, int]) -> float:
    """The seconds since 1970 of a moment in this machine's time zone."""
    return time.mktime((*moment, 0, 0, -1))


def stamp(text: str, year: int, calendar: Calendar) -> float | None:
    """The time at the beginning of a line, in seconds since 1970; None: it has none.

    year: of a line that has none
    """
    head = text[:STAMP_CHARACTERS]
    iso, glog, syslog = (pattern.search(head) for pattern in _STAMPS)
    try:
        if iso:
            *words, fraction, zone = iso.groups()
            moment = tuple(map(int, words))
        elif glog:
            own_year, *words, fraction = glog.groups()
            moment, zone = (int(own_year or year), *map(int, words)), None
        elif syslog:
            month, *words, fraction, own_year = syslog.groups()
            moment = (int(own_year or year), _MONTHS.index(month) + 1, *map(int, words))
            zone = None
        else:
            return None
        if not (1970 <= moment[0] < 2200 and moment[1] <= 12 and moment[2] <= 31):
            return None
        seconds = _zoned(moment, zone) if zone else calendar(moment)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)


def utc_calendar(moment: tuple[int, int, int, int, int, int]) -> float:
    """The seconds since 1970 of a moment in UTC."""
    import calendar

    return float(calendar.timegm((*moment, 0, 0, 0)))


def _zoned(moment: tuple[int, int, int, int, int, int], zone: str) -> float:
    digits = zone.replace(":", "")
    minutes = 0 if zone == "Z" else int(digits[1:3]) * 60 + int(digits[3:5])
    return utc_calendar(moment) - (-60 if digits.startswith("-") else 60) * minutes
