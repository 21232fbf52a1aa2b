"""The last verdict about this node, kept until the next boot: a prolog has no time to look."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from dataclasses import dataclass
from typing import Any

SCHEMA = "nodeready.verdict/1"
PATH = "/run/nodeready/verdict.json"
#: A larger file is none of ours.
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """Whether the node may get a job.

    time:    when it was reached, in seconds since 1970
    boot_id: the boot for which it holds
    reasons: why not, a short line each
    """

    time: float
    boot_id: str
    policy_digest: str
    go: bool
    reasons: tuple[str, ...] = ()

    def text(self) -> str:
        """It as a JSON object on one line."""
        data = {"schema": SCHEMA, **vars(self), "time": round(self.time, 3)}
        return json.dumps(data) + "\n"


def parse(text: bytes) -> Verdict | None:
    """The verdict that a file holds; None when it holds none of this schema."""
    try:
        data: Any = json.loads(text)
        if data.pop("schema") != SCHEMA:
            return None
        found = Verdict(**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    sound = (
        type(found.time) in (int, float)
        and isinstance(found.boot_id, str)
        and isinstance(found.policy_digest, str)
        and isinstance(found.go, bool)
        and isinstance(found.reasons, list)
        and all(isinstance(reason, str) for reason in found.reasons)
        # A no-go says why.
        and found.go is not bool(found.reasons)
    )
    return Verdict(**{**data, "reasons": tuple(found.reasons)}) if sound else None


def fresh(
    found: Verdict | None, *, now: float, boot_id: str, policy_digest: str, max_age_s: float
) -> Verdict | None:
    """The verdict, when it may be believed: of this boot, by this policy, and not too old.

    One from the future says that a clock was set: nobody knows how old it is.
    """
    if found is None or not boot_id or found.boot_id != boot_id:
        return None
    if found.policy_digest != policy_digest or not 0 <= now - found.time <= max_age_s:
        return None
    return found


def boot_id() -> str:
    """The kernel's name for this boot; "" when it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def read(policy_digest: str, max_age_s: float, path: str = PATH) -> Verdict | None:
    """The verdict that may be believed; None when there is none. Never raises, never waits.

    Only root may have written it: whoever could write it could give himself a node.
    """
    try:
        if not _roots(os.stat(os.path.dirname(path))):
            return None
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not (stat.S_ISREG(status.st_mode) and _roots(status)):
                return None
            text = file.read(MAX_BYTES)
    except OSError:
        return None
    return fresh(
        parse(text),
        now=time.time(),
        boot_id=boot_id(),
        policy_digest=policy_digest,
        max_age_s=max_age_s,
    )


def _roots(status: os.stat_result) -> bool:
    return status.st_uid == 0 and not status.st_mode & 0o022


def write(verdict: Verdict, path: str = PATH) -> None:
    """Keep a verdict; the old one is there until the new one is. Raises OSError."""
    from pathlib import Path

    from nodeready.files import write_atomically

    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with contextlib.suppress(OSError):
        # The file keeps its mode; with another one nobody would believe it.
        os.chmod(path, 0o644)
    write_atomically(Path(path), [verdict.text()], 0o644)
