"""Whether a node's clock is synchronised, and by which service.

The kernel's own flag (STA_UNSYNC) needs adjtimex(2), a system call that no shell has. So the time
service is asked: systemd-timesyncd by its file (systemd-timesyncd.service(8)), chrony by ``chronyc
tracking``, ntpd by ``ntpq -c rv``. At last timedated is asked, which reads STA_UNSYNC and so knows
of other services (phc2sys), too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# timesyncd's directory, which goes when timesyncd stops; its file comes with the first answer.
TIMESYNC = "/run/systemd/timesync"
_CHRONY = "/run/chrony/chronyd.pid /run/chronyd.pid /run/chrony/chronyd.sock"
_NTPD = "/run/ntpd.pid /run/ntp.pid /run/ntpd/ntpd.pid /run/ntpsec/ntpd.pid /run/ntp/ntpd.pid"

# A line "clock=PROGRAM" begins what that program printed, "clock_rc=STATUS" ends it.
SCRIPT = rf"""
nr_ask() {{
    printf 'clock=%s\n' "$1"
    shift
    timeout -k 1 3 "$@" 2>&1
    printf '\nclock_rc=%s\n' "$?"
}}
nr_any() {{
    for nr_file in "$@"; do if [ -e "$nr_file" ]; then return 0; fi; done
    return 1
}}
if [ -e {TIMESYNC}/synchronized ]; then
    printf 'clock=timesyncd\nsynchronized\nclock_rc=0\n'
elif nr_any {_CHRONY} && command -v chronyc >/dev/null; then
    nr_ask chronyc chronyc -n tracking
elif nr_any {_NTPD} && command -v ntpq >/dev/null; then
    nr_ask ntpq ntpq -n -c rv
else
    if [ -d {TIMESYNC} ]; then printf 'clock=timesyncd\nwaiting\nclock_rc=0\n'; fi
    if [ -d /run/systemd/system ] && command -v timedatectl >/dev/null; then
        nr_ask timedatectl timedatectl show -p NTP -p NTPSynchronized
    fi
    printf 'clock=none\nclock_rc=0\n'
fi
"""

#: Characters of a program's output that are looked at.
_MOST = 8192


@dataclass(frozen=True)
class Clock:
    """A node's clock.

    synchronised: None: not known, ``detail`` says why
    source:       systemd-timesyncd, chrony, ntpd, none, or kernel: by the kernel's flag, some
                  other service
    offset_ms:    how far the clock was from its time server's, where the service tells
    error_ms:     by how much the clock may be off at most, as the service estimates it
    own:          the service follows the node's own clock, and no other
    detail:       what the service said, in short
    """

    synchronised: bool | None
    source: str = "none"
    offset_ms: float | None = None
    detail: str = ""
    error_ms: float | None = None
    own: bool = False


#: The reference of a service that follows the node's own clock: 7F7F0101 is 127.127.1.1
#: (chronyc(1), tracking), LOCAL and 127.127.1.N are ntpd's (refclock_local).
_OWN_CHRONY = re.compile(r"^Reference ID *: *(7F7F01[0-9A-F]{2}|127\.127\.1\.[0-9]{1,3})\b", re.M)
_OWN_NTPD = re.compile(r"\brefid=(LOCAL|LOCL|127\.127\.1\.[0-9]{1,3})\b|\bsync_local\b")


def _chrony(text: str, rc: int) -> Clock:
    if rc in (124, 137):
        return Clock(None, "chrony", detail="chronyc timed out")
    if "cannot talk to daemon" in text.lower():
        return Clock(False, "chrony", detail="chronyd does not answer")
    leap = re.search(r"^Leap status *:(.*)$", text, re.M)
    if rc != 0 or leap is None:
        return Clock(None, "chrony", detail=f"chronyc: {_first(text)}")
    status = leap[1].strip()[:100]
    if not status:
        return Clock(None, "chrony", detail="chronyc tells no leap status")
    offset = re.search(r"^System time *: ([0-9.]{1,20}) seconds (fast|slow)", text, re.M)
    offset_ms = None
    if offset:
        sign = -1 if offset[2] == "slow" else 1
        offset_ms = sign * _milliseconds(offset[1], 1000.0)
    # "An absolute bound on the computer's clock accuracy" (chronyc(1), tracking).
    parts = [
        re.search(rf"^Root {name} *: *([0-9.]{{1,20}}) seconds", text, re.M)
        for name in ("delay", "dispersion")
    ]
    bounds = [_milliseconds(part[1], 1000.0) if part else 0.0 for part in parts]
    synchronised = {"Normal": True, "Insert": True, "Delete": True, "Not": False}.get(
        status.split()[0]
    )
    error_ms = round(bounds[0] / 2 + bounds[1], 3) if all(parts) else None
    own = _OWN_CHRONY.search(text) is not None
    return Clock(synchronised, "chrony", offset_ms, status, error_ms, own)


def _ntpd(text: str, rc: int) -> Clock:
    if rc in (124, 137):
        return Clock(None, "ntpd", detail="ntpq timed out")
    if "Connection refused" in text or "timed out" in text:
        return Clock(False, "ntpd", detail="ntpd does not answer")
    leap = re.search(r"\bleap_(\w{1,20})", text)
    if rc != 0 or leap is None:
        return Clock(None, "ntpd", detail=f"ntpq: {_first(text)}")
    offset = re.search(r"\boffset=([-+]?[0-9.]{1,20})", text)
    offset_ms = _milliseconds(offset[1], 1.0) if offset else None
    synchronised = leap[1] != "alarm" and not re.search(r"\bsync_unspec\b|\bstratum=16\b", text)
    own = _OWN_NTPD.search(text) is not None
    return Clock(synchronised, "ntpd", offset_ms, f"leap_{leap[1]}", None, own)


def _milliseconds(text: str, factor: float) -> float:
    try:
        return round(float(text) * factor, 3)
    except ValueError:
        return 0.0


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[0][:100]


def parse(text: str) -> Clock:
    """The clock in what SCRIPT printed; never raises."""
    pieces = re.split(r"^clock=(\w+)$", text, flags=re.M)
    found: dict[str, tuple[str, int]] = {}
    for name, piece in zip(pieces[1::2], pieces[2::2]):
        said, end, rc = piece.partition("\nclock_rc=")
        status = re.match(r"\d{1,3}$", rc, re.M)
        if end and status:
            found.setdefault(name, (said[:_MOST], int(status[0])))
    if "chronyc" in found:
        return _chrony(*found["chronyc"])
    if "ntpq" in found:
        return _ntpd(*found["ntpq"])
    waiting = found.get("timesyncd")
    if waiting and waiting[0].strip() == "synchronized":
        return Clock(True, "systemd-timesyncd")
    source = "systemd-timesyncd" if waiting else "none"
    kernel, kernel_rc = found.get("timedatectl", ("", 0))
    answer = re.search(r"^NTPSynchronized=(yes|no)$", kernel, re.M)
    if answer and answer[1] == "yes":
        return Clock(True, "systemd-timesyncd" if waiting else "kernel")
    if waiting:
        return Clock(False, source, detail="no answer from a time server since it was started")
    if "none" in found:
        if kernel_rc in (124, 137):
            return Clock(None, source, detail="timedatectl timed out")
        return Clock(False, source, detail="nothing synchronises it")
    asked = pieces[1::2]
    return Clock(None, detail=f"{asked[-1]} did not end" if asked else "could not be looked at")
