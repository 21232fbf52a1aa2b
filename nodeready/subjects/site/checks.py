"""Judge the site's own checks, which the files checks.d/*.toml beside the inventory declare."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from nodeready.core.policy import Policy, SiteCheck
from nodeready.core.result import PERSON, Check, FactKinds, Remedy, Result, Subject
from nodeready.core.severity import drifts, loses_job
from nodeready.subjects.site.facts import PROBE, Site, SiteOutput

#: CPU seconds for one regular expression on one output, which takes microseconds: the node chooses
#: the text, and a pattern such as ``(a+)+$`` can take years on some texts.
_MATCH_S = 0.2
#: Maximum characters of an output in a result.
_SHOWN = 200
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class _TooSlow(Exception):
    """The time for a regular expression is over."""


def _judge(check: SiteCheck, observed: Site) -> Result:
    this, source = _check_of(check), check.file or check.source
    output = observed.checks.get(check.name, SiteOutput(reason="was not made"))
    if output.missing:
        return this.fail(f"no such file: {check.file}", source, status=check.severity)
    if output.reason:
        return this.unknown(output.reason)
    try:
        is_good = _is_good(check, output)
    except _TooSlow:
        return this.unknown(f"matches takes more than {_MATCH_S} s of CPU on its output")
    except ValueError as problem:
        return this.unknown(str(problem))
    if not is_good:
        return this.fail(_actual(check, output), source, status=check.severity)
    if output.status and check.comparator != "status":
        return this.unknown(
            f"prints what it should, but exit status {output.status}: "
            f"{output.error or 'no message'}",
        )
    return this.ok(_actual(check, output), source)


def _is_good(check: SiteCheck, output: SiteOutput) -> bool:
    """Whether the output is as wanted. Raises ValueError for one that cannot be compared."""
    if check.comparator == "status":
        return bool(output.status == check.expected)
    if check.comparator == "equals":
        return bool(output.text == check.expected)
    if check.comparator == "matches":
        with _limited():
            return re.search(check.expected, output.text, re.MULTILINE) is not None
    if (match := _NUMBER.search(output.text)) is None:
        raise ValueError(f"prints no number: {_shortened(output.text) or 'nothing'}")
    low, high = check.expected
    return bool(low <= float(match[0]) <= high)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raises _TooSlow after _MATCH_S seconds of CPU: Python's `re` runs signal handlers."""

    def stop(*_: object) -> None:
        raise _TooSlow

    try:
        previous = signal.signal(signal.SIGVTALRM, stop)
    except ValueError:
        # Only the main thread can have a handler; every command judges there.
        yield
        return
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _MATCH_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _comparison(check: SiteCheck) -> str:
    if check.comparator == "status":
        return f"exit status {check.expected}"
    if check.comparator == "matches":
        words = f"matches {check.expected}"
    elif check.comparator == "range":
        words = "{} to {}".format(*check.expected)
    else:
        words = check.expected or "nothing"
    return f"{check.json}: {words}" if check.json else words


def _actual(check: SiteCheck, output: SiteOutput) -> str:
    if check.comparator == "status":
        text = _shortened(output.error or output.text)
        return f"exit status {output.status}{f': {text}' if text else ''}"
    if check.file and check.comparator == "matches" and not check.json:
        return f"{len(output.text.splitlines())} lines"
    return _shortened(output.text) or "nothing"


def _shortened(text: str) -> str:
    first, *further = text.splitlines() or [""]
    first = first if len(first) <= _SHOWN else f"{first[:_SHOWN]}..."
    return f"{first} (and {len(further)} more lines)" if further else first


@lru_cache(maxsize=4096)
def _check_of(check: SiteCheck) -> Check:
    def judged(observed: Any, policy: Policy) -> Result:
        return _judge(check, observed)

    remedies = (Remedy(PERSON, check.fix),) if check.fix else ()
    cost = loses_job("configure") if check.severity == "fail" else drifts("configure")
    expects = _shortened(_comparison(check)) + (f" ({check.reason})" if check.reason else "")
    return Check(check.id, cost, _meaning(check), (), "", remedies, judged, expects=expects)


def _meaning(check: SiteCheck) -> str:
    reason = check.reason or "A check of the site's own"
    reason = reason[:1].upper() + reason[1:]
    if check.file:
        reads = f"It reads {check.file} on the node."
    else:
        lines = "\n".join(f"    {line}" for line in check.run.strip("\n").split("\n"))
        reads = f"It runs on the node, for at most {check.timeout_s} s:\n\n{lines}"
    groups = f" of the groups {', '.join(check.groups)}" if check.groups else ""
    return (
        f"{reason.rstrip('.')}.\n\n{reads}\n\nWanted: {_shortened(_comparison(check))}. "
        f"Anything else is a {check.severity}. Made by {', '.join(check.moments)} "
        f"on all nodes{groups}. Declared in {check.source or 'the setting site_checks'}."
    )


SUBJECT = Subject(
    "site", __doc__, (), probe=PROBE,
    policy_checks=lambda policy: tuple(map(_check_of, policy.site_checks)),
    kinds=FactKinds(
        # A site's command may print anything, also the time: its result is compared.
        volatile="checks",
    ),
)  # fmt: skip
