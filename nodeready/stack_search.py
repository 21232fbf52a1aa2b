"""What is looked for on the nodes, and the words for having found nothing."""

from __future__ import annotations

import re
import secrets

from nodeready.capture.processes import FAMILIES
from nodeready.capture.program import Config
from nodeready.capturing import MOST_INSTEAD, Captured
from nodeready.reports.text import counted, nodes

#: Seconds of the time on a node for finding the processes, and for the last dumps.
_DUMPS_S = 10


class SearchError(ValueError):
    """Options that cannot be; one line."""


def program_config(
    timeout_s: int,
    *,
    job: str = "",
    pids: tuple[int, ...] = (),
    match: str = "",
    samples: int = 2,
    interval_s: float = 2.0,
) -> Config:
    """What the program on the nodes has to do, with a nonce and a tag of its own.

    timeout_s: seconds for one node. Raises SearchError.
    """
    try:
        re.compile(match)
    except re.error as problem:
        raise SearchError(f"--match {match}: no regular expression: {problem}") from None
    needed = (samples - 1) * interval_s + _DUMPS_S
    if timeout_s < needed:
        raise SearchError(
            f"--timeout {timeout_s}: {counted(samples, 'sample')} every {interval_s:g} s "
            f"need {needed:.0f} s at least"
        )
    return Config(
        nonce=f"nodeready-{secrets.token_hex(8)}",
        tag=f"nodeready:{secrets.token_hex(6)}",
        limit_s=timeout_s,
        job=job,
        pids=pids,
        match=match,
        samples=samples,
        interval_s=interval_s,
    )


def _looked_for(config: Config) -> str:
    """What a process must have to be found."""
    if config.pids:
        return f"there is no process {', '.join(map(str, config.pids))}"
    if config.match:
        words = f"no process has {config.match!r} in its command line"
    else:
        names = ", ".join(family[0] for family in FAMILIES)
        words = f"no process has one of {names} in its environment"
    return f"{words} and belongs to job {config.job}" if config.job else words


def nothing(found: Captured) -> str:
    """No rank anywhere: what was looked for, and what runs instead."""
    answered = [name for name in found.asked if name not in found.errors]
    text = f"no ranks on {nodes(answered)}: {_looked_for(found.config)}"
    if found.instead:
        shown = "; ".join(f"{words} on {name}" for name, words in found.instead[:MOST_INSTEAD])
        text += f". What runs instead: {shown}. Choose with --pid or --match; "
        text += "another user's ranks are seen as that user, or with --sudo"
    return text
