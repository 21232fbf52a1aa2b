"""`record` and `prolog`: the timer keeps a verdict, and a job's prolog asks for it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodeready import exit_codes
from nodeready.policy import Policy
from nodeready.policy.load import digest
from nodeready.text import sanitise

# --- The last verdict about this node, kept until the next boot: a prolog has no time to look.

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


if TYPE_CHECKING:
    from nodeready.audit.document import Audit

#: Characters of all reasons together: a log has them on one line.
_LENGTH = 1000
#: Seconds of the prolog's budget that are for scontrol, at most a fourth of it.
_SLURM_S = 2.5
#: Seconds that scontrol may take beyond the budget; the prolog's program ends us 2 s after it.
_LATE_S = 1.0
#: When this process began to work, by time.monotonic(): the budget counts from here.
BEGAN = time.monotonic()


def arguments(parser: ArgumentParser) -> None:
    """No options of their own."""


def told(go: bool, reasons: Iterable[str]) -> str:
    """A verdict on one line."""

    return "nodeready: go" if go else sanitise(f"nodeready: no-go: {'; '.join(reasons)}", _LENGTH)


def judged(audit: Audit, policy: Policy) -> Verdict:
    """The verdict that an audit of this machine comes to."""
    from nodeready.audit import document as readiness

    (node,) = audit.nodes
    return Verdict(
        time.time(),
        boot_id(),
        digest([policy]),
        readiness.go(node.results),
        tuple(readiness.reasons(node.results)),
    )


def keep(audit: Audit, policy: Policy) -> tuple[Verdict, list[str]]:
    """Keep the verdict and the metrics of an audit. Returns it, and what could not be written."""
    from nodeready.healthcheck import audit as report

    found, problems = judged(audit, policy), []
    try:
        write(found)
    except OSError as error:
        problems.append(_problem(error, PATH))
    textfile = policy.gate_textfile
    if textfile and os.path.isdir(os.path.dirname(textfile)):
        try:
            report.write(report.of_audit(audit, "prometheus"), textfile)
        except OSError as error:
            problems.append(_problem(error, textfile))
    return found, problems


def _problem(error: OSError, path: str) -> str:
    return f"{error.strerror or error}: {error.filename or path}"


def record(policy: Policy, given: Namespace) -> int:
    """Audit, and keep the verdict and the Prometheus textfile. Returns the audit's exit code."""
    from nodeready.healthcheck import here
    from nodeready.subjects.selection import select

    audit = here.audit(policy, select(subjects=here.SEEN))
    found, problems = keep(audit, policy)
    print(told(found.go, found.reasons))
    for problem in problems:
        print(f"nodeready: {problem}", file=sys.stderr)
    return exit_codes.exit_code(failed=bool(problems), check=not found.go)


def prolog(policy: Policy, given: Namespace) -> int:
    """Answer from a fresh verdict, else from a look within the budget: 0 for go, 3 for no-go.

    A no-go is looked at again: the node may have been repaired since, and a job's failed prolog
    costs more than a look.
    """
    found = read(digest([policy]), policy.gate_max_age_s)
    if found is None or not found.go:
        from nodeready.healthcheck import here
        from nodeready.subjects.selection import select

        left = max(0.5, policy.gate_budget_s - (time.monotonic() - BEGAN))
        # What is left for Slurm when the look takes all the time that it has.
        slurm_s = min(_SLURM_S, left / 4) if policy.gate_drain else 0.0
        found = judged(here.audit(policy, select(subjects=here.SEEN), left - slurm_s), policy)
    if policy.gate_drain and not found.go:
        from nodeready.healthcheck.drain import tell

        pass

        # Slurm itself drains a node whose prolog fails, and the first reason stays: ours says why.
        # Never for a node that is ready: a large job would ask slurmctld once for every node.
        problem = tell(found, BEGAN + policy.gate_budget_s + _LATE_S)
        if problem:
            print(f"nodeready: {problem}", file=sys.stderr)
    print(told(found.go, found.reasons))
    return exit_codes.exit_code(check=not found.go)


def healthcheck(policy: Policy, given: Namespace) -> int:
    """Audit, keep the verdict, tell Slurm. Returns the audit's exit code, 1 when a part failed."""
    from nodeready.healthcheck import here
    from nodeready.healthcheck.drain import SCONTROL_S, tell
    from nodeready.subjects.selection import select

    left = max(0.5, policy.gate_budget_s - (time.monotonic() - BEGAN))
    found, problems = keep(here.audit(policy, select(subjects=here.SEEN), left), policy)
    if policy.gate_drain:
        # Slurm ends a health check after 60 s: all that it is asked and told has 10.
        problem = tell(found, time.monotonic() + 2 * SCONTROL_S)
        problems += [problem] if problem else []
    print(told(found.go, found.reasons))
    for problem in problems:
        print(f"nodeready: {problem}", file=sys.stderr)
    return exit_codes.exit_code(failed=bool(problems), check=not found.go)
