"""This machine as the one node of an audit, or of a go or no-go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from nodeready.audit import Audit, NodeReport, now
from nodeready.local.alone import judge_alone
from nodeready.local.child import Child, gather
from nodeready.local.look import Look
from nodeready.policy import Policy
from nodeready.policy.load import digest
from nodeready.selection import Selection
from nodeready.subjects import LOOKED_AT, SUBJECTS

if TYPE_CHECKING:
    from nodeready.proofs.config import Config
    from nodeready.ready import Ready

#: The subjects that are looked at here.
SEEN = tuple(name for name in LOOKED_AT if SUBJECTS[name].alone)
#: Seconds for an audit of which nobody said how long it may take.
LIMIT_S = 60
#: Seconds at the end of a budget for judging and reporting, at most a fourth of it.
_RESERVE_S = 1.0


def audit(policy: Policy, selection: Selection, limit_s: float = LIMIT_S) -> Audit:
    """Look at this machine and judge it; done within ``limit_s`` seconds, whatever hangs."""
    return _judged(policy, selection, limit_s, proofs=False)


def ready(policy: Policy, selection: Selection, budget_s: int, proofs: bool = True) -> Ready:
    """The same, with the proofs beside the look under one budget."""
    from nodeready.ready import Ready

    return Ready(_judged(policy, selection, budget_s, proofs), budget_s)


def _judged(policy: Policy, selection: Selection, limit_s: float, proofs: bool) -> Audit:
    started, began = now(), time.monotonic()
    time_s = limit_s - min(_RESERVE_S, limit_s / 4)
    subjects = [name for name in selection.subjects if name in SEEN]
    look = Look(policy, subjects, time_s)
    with _ending(look.child):
        if proofs and "proof" in selection.subjects:
            from nodeready.proofs import proved

            config = _config(policy, time_s)
            proving = _prove(config)
            with _ending(proving):
                gather([look.child, proving], began + time_s)
            seen = proved.read(proving.text, config)
        else:
            seen = None
            gather([look.child], began + time_s)
    snapshot = look.snapshot()
    if seen is not None:
        snapshot = replace(snapshot, subjects={**snapshot.subjects, "proof": seen})
    report = NodeReport.of(
        os.uname().nodename,
        selection.of(judge_alone(snapshot, policy)),
        snapshot=snapshot,
        seconds=time.monotonic() - began,
    )
    return Audit(started, now(), digest([policy]), (report,))


def _config(policy: Policy, limit_s: float) -> Config:
    from nodeready.probes.debug_tools import PY_SPY
    from nodeready.proofs.config import Config
    from nodeready.proofs.seen import SESSION

    return Config(
        nonce=f"nodeready-{os.urandom(8).hex()}",
        tag=f"nodeready:{os.urandom(6).hex()}",
        user=policy.job_user,
        # There are no other nodes to reach.
        wanted=tuple(name for name in SESSION if name != "peers"),
        limit_s=max(1, int(limit_s) - 2),
        py_spy=PY_SPY if policy.py_spy_version else "",
    )


def _prove(config: Config) -> Child:
    from nodeready import shell
    from nodeready.proofs import source

    return Child(shell.command(source.script(config), config.limit_s + 2, config.tag))


@contextmanager
def _ending(child: Child) -> Iterator[None]:
    try:
        yield
    finally:
        child.end()
