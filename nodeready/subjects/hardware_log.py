"""The faults of hardware and file systems in the kernel's log: what each asks for.

The rows of knowledge/kernel_lines.toml that name a subject are findings of an audit. The node's
awk sends each kind of line that may be one (`WORDS`), with its count; a row's pattern decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nodeready import knowledge
from nodeready.core.base import grouped
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, check, join_first
from nodeready.core.severity import VALIDATION, loses_job

#: Seconds after which a message that `fades` counts no more.
_DAY_S = 86400
_HOUR_S = 3600


@dataclass(frozen=True)
class _HardwareRow:
    """One kind of message: the columns of knowledge/kernel_lines.toml."""

    pattern: re.Pattern[str]
    subject: str
    words: str
    status: str
    fix: str
    cured: re.Pattern[str] | None
    fades: bool
    least: int
    within_s: int
    hourly: int
    returns_at: int
    returns_after_s: int
    lost: bool
    fails_at: int | None
    past_at_boot: bool


ROWS = {
    key: _HardwareRow(
        re.compile(row["pattern"]), row["subject"], row["words"], row["status"], row["fix"],
        re.compile(row["cured"]) if "cured" in row else None,
        row.get("fades", False), row.get("least", 0), row.get("within_s", _DAY_S),
        row.get("hourly", 0), row.get("returns_at", 0), row.get("returns_after_s", 0),
        row.get("lost", False), row.get("fails_at"), row.get("past_at_boot", False),
    )
    for key, row in knowledge.rows("kernel_lines").items() if "subject" in row
}  # fmt: skip

#: What the node's awk looks for, for each subject: mawk reads at most 8190 bytes of a pattern.
WORDS = tuple(
    "|".join(dict.fromkeys(row.words for row in ROWS.values() if row.subject == subject))
    for subject in dict.fromkeys(row.subject for row in ROWS.values())
)
#: Seconds after the boot in which a record of the time before is read.
_BOOT_S = 5
_TEXT = 160


@dataclass(frozen=True)
class KernelLines:
    """Equal lines of the kernel's log."""

    count: int  # of the errors, where each line counts them
    last: int  # number of the last line
    text: str  # of the first line
    first_s: int | None  # their stamps, seconds since the boot; None: stamps of another form
    last_s: int | None  # likewise


@dataclass(frozen=True)
class HardwareFault:
    """One kind of fault of a device in the kernel's log since the boot."""

    kind: str  # the row of knowledge/kernel_lines.toml
    text: str  # the first such line, at most 160 characters
    count: int  # of such lines
    last_s: int | None  # when the last one was written, seconds since the boot; None: not known


@dataclass(frozen=True)
class HardwareLog:
    """What the kernel's log of this boot says of one subject."""

    faults: tuple[HardwareFault, ...] = ()  # that stand, in the order of the rows
    source: str = ""  # ``dmesg`` or ``journalctl``; "": the log was not read
    absent: str = ""  # why it could not be read
    begins_s: int = 0  # when it begins, seconds since the boot


def _device(match: re.Match[str]) -> str:
    return match.groupdict().get("device") or ""


def duration_s(lines: list[KernelLines]) -> int:
    """The seconds from the first to the last of these lines."""
    stamps = [s for line in lines for s in (line.first_s, line.last_s) if s is not None]
    return max(stamps, default=0) - min(stamps, default=0)


def _come_often(row: _HardwareRow, lines: list[KernelLines], least: int) -> bool:
    """Whether ``least`` messages came per ``row.within_s``, or ten times as many in total."""
    count = sum(line.count for line in lines)
    seconds = duration_s(lines)
    at_rate = count * row.within_s / max(seconds, row.within_s)
    in_an_hour = count * _HOUR_S / max(seconds, _HOUR_S)
    return at_rate >= least or count >= 10 * least or (row.hourly > 0 and in_an_hour >= row.hourly)


def faults_of(lines: Iterable[KernelLines], subject: str, uptime_s: int) -> list[HardwareFault]:
    """The faults that stand, each row and device once. A line is of the first row that matches.

    uptime_s: of the node; 0: not known
    """
    lines, faults = tuple(lines), []
    rows = {kind: row for kind, row in ROWS.items() if row.subject == subject}
    by_row: dict[str, list[tuple[str, KernelLines]]] = {kind: [] for kind in rows}
    for line in lines:
        for kind, row in rows.items():
            if match := row.pattern.match(line.text):
                by_row[kind].append((_device(match), line))
                break
    for kind, row in rows.items():
        cures: dict[str, int] = {}
        times_cured: Counter[str] = Counter()
        for line in lines:
            if cure := row.cured.match(line.text) if row.cured else None:
                cures[_device(cure)] = max(line.last, cures.get(_device(cure), 0))
                times_cured[_device(cure)] += line.count
        for device, device_lines in grouped(by_row[kind]).items():
            recent = [
                line
                for line in device_lines
                if line.last_s is None or line.last_s >= uptime_s - _DAY_S
            ]
            standing = recent if row.fades else device_lines
            standing = [line for line in standing if line.last > cures.get(device, 0)]
            if row.lost and device not in cures:
                continue
            comes_back = row.returns_at and (
                duration_s(recent) >= row.returns_after_s or times_cured[device] > row.returns_at
            )
            if comes_back and _come_often(row, recent, row.returns_at):
                standing = recent
            if standing and _come_often(row, standing, row.least):
                count = sum(line.count for line in standing)
                stamps = [line.last_s for line in standing if line.last_s is not None]
                text = standing[0].text[:_TEXT]
                faults.append(HardwareFault(kind, text, count, max(stamps, default=None)))
    return faults


def _status(fault: HardwareFault) -> str:
    row = ROWS[fault.kind]
    if row.past_at_boot and fault.last_s is not None and fault.last_s < _BOOT_S:
        return "warn"
    return "fail" if row.fails_at is not None and fault.count >= row.fails_at else row.status


def _text(fault: HardwareFault) -> str:
    return fault.text + (f", {fault.count} times" if fault.count > 1 else "")


def faults_check(check_id: str, devices: str) -> Check:
    """The check of the faults of a subject's devices: ``Host`` and ``Nics`` have a kernel_log."""
    subject = check_id.partition(".")[0]
    fixes = dict.fromkeys(row.fix for row in ROWS.values() if row.subject == subject)

    @check(
        check_id,
        loses_job("monitor", "inspect", "reboot", "reseat", "replace", source=VALIDATION),
        expects="none since the boot",
        fix=tuple(fixes),
        meaning=f"""The kernel has reported no fault of {devices} since the boot.

        A fault after which its driver has started the device anew is cured. Faults that can pass,
        such as a timeout, count for a day. The rows, each with its source, are in
        nodeready/knowledge/kernel_lines.toml.
        """,
    )
    def kernel_faults(observed: object, policy: Policy) -> Result:
        log: HardwareLog = observed.kernel_log  # type: ignore[attr-defined]
        if log.absent:
            return kernel_faults.unknown(log.absent)
        if not log.source:
            return kernel_faults.na("the kernel's log was not asked for")
        source = f"kernel log ({log.source})"
        if not log.faults:
            start = f" in a log that begins {log.begins_s} s after the boot" * bool(log.begins_s)
            return kernel_faults.ok(f"none{start}", source)
        faults = sorted(log.faults, key=lambda fault: _status(fault) != "fail")
        return kernel_faults.fail(
            join_first(map(_text, faults)), source, ROWS[faults[0].kind].fix,
            status=_status(faults[0]),
        )  # fmt: skip

    return kernel_faults
