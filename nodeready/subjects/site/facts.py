"""Observe what the site's own checks print on a node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.core import shell
from nodeready.core.base import Output, Probe, ProbeError, Section, decode_base64
from nodeready.core.policy import Policy, SiteCheck

#: Maximum concurrent checks on one node: more would take cores from a job.
_WORKERS = 8
#: Maximum bytes of one check's output; nodeready/sh/site.sh prints one more, as the sign of a cut.
MAX_OUTPUT_BYTES = 16384
#: Exit statuses for a file that is no regular file.
_NO_FILE = 3
#: Seconds and bytes for all checks of a node together.
TOTAL_S, MAX_BYTES = 60, 1 << 20


@dataclass(frozen=True)
class SiteOutput:
    """What one check read."""

    text: str = ""  # the output, or the value at the check's ``json`` in it, stripped
    status: int | None = None  # the command's exit status; None: it did not end
    reason: str = ""  # why there is nothing to judge; "": there is
    error: str = ""  # the first line of the command's messages (standard error)
    missing: bool = False  # there is no such file


@dataclass(frozen=True)
class Site:
    """The outputs of the site's own checks."""

    checks: Mapping[str, SiteOutput] = field(default_factory=dict)  # check's name -> what it read


def command(check: SiteCheck) -> str:
    """The shell text that prints what is judged."""
    if not check.file:
        return check.run
    file = shell.quote(check.file)
    # A directory, a device or a FIFO is not read: that could wait, or never end.
    return f"if [ -e {file} ] && [ ! -f {file} ]; then exit {_NO_FILE}; fi; exec cat -- {file}"


def script_size(checks: tuple[SiteCheck, ...]) -> int:
    return len(_script(checks).encode("utf-8"))


def _script(checks: tuple[SiteCheck, ...]) -> str:
    if not checks:
        return ":"
    # Each check is one quoted word, so that its lines keep their indentation.
    words = [
        '"$nr_newline"'.join(map(shell.quote, command(check).split("\n"))) for check in checks
    ]
    calls = [f"nr_site {n} {checks[n].timeout_s} {words[n]}" for n in range(len(checks))]
    workers = [calls[first::_WORKERS] for first in range(min(_WORKERS, len(calls)))]
    lines = [f"{{\n{chr(10).join(worker)}\n}} &" for worker in workers]
    return f"{shell.library('limit')}{shell.library('site')}{chr(10).join(lines)}\nwait\n"


_LINE = re.compile(r"(\d{1,4}) ([oer]) (.*)")


def _parse(outputs: Mapping[str, Output], policy: Policy) -> Site:
    output = outputs["site"]
    parts: dict[tuple[int, str], list[str]] = {}
    for match in map(_LINE.fullmatch, output.text.splitlines()):
        if match:
            parts.setdefault((int(match[1]), match[2]), []).append(match[3])
    if not parts and policy.site_checks and output.rc is not None:
        output.require()
        raise ProbeError("no check ran", output.text)
    return Site(dict(_outputs(parts, policy.site_checks)))


def _outputs(
    parts: Mapping[tuple[int, str], list[str]], checks: tuple[SiteCheck, ...]
) -> Iterator[tuple[str, SiteOutput]]:
    for number, check in enumerate(checks):
        (ended,) = parts.get((number, "r"), [""])[:1]
        data, messages = (
            decode_base64("".join(parts.get((number, stream), []))) for stream in "oe"
        )
        status = int(ended) if ended.isdecimal() else None
        yield check.name, _read(check, status, data, _first_line(messages))


def _first_line(data: bytes) -> str:
    lines = data.decode("utf-8", "surrogateescape").strip().splitlines()
    return lines[0] if lines else ""


def _read(check: SiteCheck, status: int | None, data: bytes, error: str) -> SiteOutput:
    text = data[:MAX_OUTPUT_BYTES].decode("utf-8", "surrogateescape").strip().strip("\0")
    if check.file and status == 1 and error.endswith("No such file or directory"):
        return SiteOutput(status=status, error=error, missing=True)
    reason = _status_reason(check, status, text, error)
    if not reason and len(data) > MAX_OUTPUT_BYTES and check.comparator != "status":
        reason = f"prints more than {MAX_OUTPUT_BYTES} bytes"
    if check.json and not reason and text:
        try:
            text = _json_value(text, check.json_steps)
        except ValueError as problem:
            reason = str(problem)
    return SiteOutput(text, status, reason, error)


def _status_reason(check: SiteCheck, status: int | None, text: str, error: str) -> str:
    """Why the command's end leaves nothing to judge; "": it does."""
    after = f": {error or text[:200]}" if error or text else ""
    if status is None:
        return (
            f"did not end within {check.timeout_s} s, or a process that it left keeps its output "
            "open"
        )
    if status == 124:
        return f"did not end within {check.timeout_s} s"
    if status > 128:
        return f"was ended by signal {status - 128}{after}"
    if check.comparator == "status" and status == check.expected:
        return ""
    if status == 127:
        return f"command not found{after}"
    if status == 126:
        return f"cannot be executed{after}"
    if check.file and status:
        reason = "is no regular file" if status == _NO_FILE else "cannot be read"
        return f"{check.file} {reason}{after}"
    if check.comparator != "status" and not text and (status or error):
        return f"prints nothing, exit status {status}{after}"
    return ""


def _json_value(text: str, steps: tuple[str | int, ...]) -> str:
    """The value at these steps as text. Raises ValueError: no JSON, or nothing there."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"prints no JSON: {text[:80]}") from None
    place = ""
    for step in steps:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else step
        try:
            if isinstance(step, int) != isinstance(value, list):
                raise KeyError
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"its JSON has no {place}") from None
    return value.strip() if isinstance(value, str) else json.dumps(value)


SECTION = Section(
    *("site", lambda policy: _script(policy.site_checks), TOTAL_S, MAX_BYTES), parallel=True
)
PROBE = Probe("site", (SECTION,), _parse)
