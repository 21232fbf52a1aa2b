"""The values of options: spans of time, moments, ranks, patterns and ports."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from datetime import datetime
from typing import Any

from nodeready.core.exit_codes import Refused
from nodeready.core.text import parse_span

MAX_SPAN_S = 100 * 366 * 86400  # maximum span of time: 100 years
_PATH_MAX = 4096  # characters of a path on Linux (PATH_MAX)
_MAX_GPUS = 64  # more GPUs than any node has
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def seconds_ago(words: str, present: datetime) -> float:
    """The seconds between a moment and ``present``, which has a time zone.

    The moment is a span such as ``2h``, ``08:30`` of today, ``2026-03-01``, ``2026-03-01 08:30``
    or ``2026-03-01T08:30:00Z``; without a zone, it is in this machine's.

    Raises ValueError with the expected forms.
    """
    text = words.strip()
    try:
        if re.fullmatch(r"[0-9]+[smhdw]", text):
            seconds = parse_span(text)
            if not 0 < seconds <= MAX_SPAN_S:
                raise ValueError
            return seconds
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            text = f"{present.date().isoformat()} {text:0>5}"
        # Before Python 3.11, fromisoformat does not know the Z.
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        timestamp = (moment if moment.tzinfo else moment.astimezone()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            "must be a moment or a span, such as 08:30, 2026-03-01 08:30 or 2h"
        ) from None
    if timestamp >= present.timestamp():
        raise ValueError("is not in the past")
    return present.timestamp() - timestamp


def epoch_seconds(words: str, present: datetime) -> float:
    """The moment of `seconds_ago` in seconds since 1970. Raises ValueError."""
    return present.timestamp() - seconds_ago(words, present)


def past(since: str | None, read: Callable[[str, datetime], float]) -> float:
    """``--since`` as `seconds_ago` or `epoch_seconds` reads it; 0 for None. Raises Refused."""
    try:
        return read(since, datetime.now().astimezone()) if since is not None else 0
    except ValueError as error:
        raise Refused(f"--since {since}: {error}") from None


def read_ranks(words: str | None) -> tuple[tuple[int, int, int], ...]:
    """``--rank 3,5-7,0-504/8`` as (first, last, step); (): None. Raises Refused."""
    spans = []
    for word in (words or "").split(",") if words is not None else ():
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7})(?:/([0-9]{1,7}))?)?", word.strip())
        first, last, step = match.groups() if match else ("1", "0", None)
        spans.append((int(first), int(last or first), int(step or 1)))
        if spans[-1][0] > spans[-1][1] or not spans[-1][2]:
            raise Refused(f"--rank {words}: must be ranks, such as 3, 5-7 or 0-504/8")
    return tuple(spans)


def checked_pattern(pattern: str) -> str:
    """The PATTERN. Raises Refused if the nodes could not expand it."""
    if not pattern.startswith(("/", "~/")):
        raise Refused(f"PATTERN {pattern}: must be absolute, such as '/var/log/train/rank_*.log'")
    if "\0" in pattern or len(os.fsencode(pattern)) >= _PATH_MAX:
        raise Refused("PATTERN: is no valid path")
    return pattern


def checked_regex(name: str, regex: str | None) -> str:
    """The value of an option, or "". Raises Refused if it is no regular expression."""
    try:
        compiled = re.compile(regex or "")
    except re.error as error:
        raise Refused(f"{name} {regex}: is no regular expression: {error}") from None
    if name == "--rank-pattern" and regex and not compiled.groups:
        raise Refused(f"{name} {regex}: has no group for the rank, such as '^<(\\d+)>'")
    return regex or ""


def read_ports(words: str) -> tuple[int, int]:
    """``--ports FIRST-LAST``. Raises Refused."""
    # Imported only here: it takes a fifth of the time of --help, which does not need it.
    from nodeready.core.settings import port_range

    try:
        return port_range(words)
    except ValueError as error:
        raise Refused(f"--ports {words}: {error}") from None


def policy_settings(ports: str | None, user: str | None) -> dict[str, Any]:
    """The settings of the policy that ``--ports`` and ``--user`` give. Raises Refused."""
    settings: dict[str, Any] = {}
    if ports is not None:
        settings["port_range"] = read_ports(ports)
    if user is not None:
        from nodeready.core.settings import USER_NAME

        if not re.fullmatch(USER_NAME, user):
            raise Refused(f"--user {user}: is no user name")
        settings["job_user"] = user
    return settings


def read_gpus(words: str) -> tuple[int, ...] | int | None:
    """``--gpus``: None for all, a number of GPUs, or their indices. Raises Refused."""
    if words == "all":
        return None
    if re.fullmatch(r"[0-9]{1,3}", words) and int(words) <= _MAX_GPUS:
        return int(words)
    ranks: list[int] = []
    for part in words.split(",") if "," in words or "-" in words else ():
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MAX_GPUS:
            break
        ranks += range(first, last + 1)
    else:
        if ranks and len({*ranks}) == len(ranks):
            return tuple(ranks)
    forms = "all, a number of GPUs (4), or at least two different indices (0,3 or 0-3)"
    raise Refused(f"--gpus {words}: must be {forms}")


def read_batch(words: str) -> int | float:
    """``--batch``: a number of nodes, or the share of ``10%`` as 0.1. Raises Refused."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})(%?)", words)
    if match is None or (match[2] and int(match[1]) > 100):
        raise Refused(f"--batch {words}: must be a number of nodes (8), or 1% to 100%")
    return int(match[1]) / 100 if match[2] else int(match[1])


def read_prefix(words: str) -> tuple[str, ...]:
    """``--prefix``, as a shell splits it. Raises Refused."""
    try:
        parts = tuple(shlex.split(words))
    except ValueError as error:
        raise Refused(f"--prefix {words}: {str(error).lower()}") from None
    if not parts:
        raise Refused("--prefix: names no command, such as 'apptainer exec --nv job.sif'")
    return parts


def read_environment(rows: tuple[str, ...]) -> tuple[str, ...]:
    """The values of ``--env``. Raises Refused."""
    variables: dict[str, str] = {}
    for row in rows:
        name, equals, _ = row.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise Refused(f"--env {row}: must be NAME=VALUE")
        if "\n" in row or "\0" in row:
            raise Refused(f"--env {name}: its value must be one line")
        if name in variables:
            raise Refused(f"--env {name}: is given twice")
        variables[name] = row
    return tuple(variables.values())


def read_python(path: str) -> str:
    """``--python``. Raises Refused."""
    if not re.fullmatch(r"/[^\x00-\x1f\x7f]*[^/\x00-\x1f\x7f]", path):
        raise Refused(
            f"--python {path}: must be an absolute path: it is started on the nodes, not here"
        )
    return path


def read_directory(path: str) -> str:
    """``--directory`` of env. Raises Refused."""
    if path and not re.fullmatch(r"/[A-Za-z0-9_.,:=/%-]{1,200}", path):
        raise Refused(f"--directory {path}: must be an absolute path of plain characters")
    return path
