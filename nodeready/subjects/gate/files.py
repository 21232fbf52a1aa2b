"""The files of the node's own check as a policy wants them, for the control machine alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

from nodeready.policy import JudgingPolicy, Policy
from nodeready.policy.policy import as_data
from nodeready.subjects.gate.facts import (
    BUNDLE,
    COMPILED,
    CRON,
    DIRECTORY,
    HEALTH_CHECK,
    NOTE,
    OLDEST,
    POLICY,
    PROLOG,
    PYTHONS,
    RECORD,
    SERVICE,
    TIMER,
)
from nodeready.subjects.templates import render

#: The settings that all nodes of a run complete, and that one node cannot judge by.
_FLEET = ("ssh_known_hosts",)
#: Seconds for a look of the timer, for which nobody waits: more than the look's own limit
#: (healthcheck/here.py) and that of a file server (audit/verdict.py).
RECORD_S = 85
#: Seconds of the health check for asking and telling Slurm.
SLURM_S = 10
#: Slurm ends a health check after 60 s, whatever HealthCheckTimeout says in newer ones.
MOST_S = 58


def complete(policy: Policy, declared: Policy, program: Callable[[], bytes]) -> Policy:
    """The policy of a node, with the digests of the files that its gate has to have.

    declared: the policy without the fleet's host keys: nodes share it, so that the files of each
              declared policy are made once
    program:  makes the node's own program, one for all nodes; not called without a gate
    """
    if not policy.gate:
        return policy
    return JudgingPolicy.completing(policy, gate_files=_digests(declared, program))


def contents(policy: Policy, program: Callable[[], bytes]) -> dict[str, bytes]:
    """Path -> the bytes of that file under this policy."""
    return _contents(node_policy(policy), program)


def node_policy(policy: Policy) -> Policy:
    """The policy by which the node judges itself: what is left of this one there."""
    return Policy(
        **{f.name: getattr(policy, f.name) for f in fields(Policy) if f.name not in _FLEET}
    )


@lru_cache(maxsize=256)
def _digests(declared: Policy, program: Callable[[], bytes]) -> tuple[tuple[str, str], ...]:
    files = contents(declared, program)
    return tuple((path, hashlib.sha256(data).hexdigest()) for path, data in files.items())


@lru_cache(maxsize=256)
def _contents(policy: Policy, program: Callable[[], bytes]) -> dict[str, bytes]:
    values = _values(policy)
    files = {
        BUNDLE: program(),
        POLICY: document(policy),
    }
    for path, template in (
        (RECORD, "record.j2"),
        (PROLOG, "slurm-prolog.j2"),
        (HEALTH_CHECK, "slurm-healthcheck.j2"),
        (SERVICE, "nodeready.service.j2"),
        (TIMER, "nodeready.timer.j2"),
        (CRON, "cron.j2"),
    ):
        files[path] = render(f"gate/{template}", **values)
    return files


def _values(policy: Policy) -> dict[str, Any]:
    limit_s = policy.gate_budget_s + 2
    return {
        "pythons": " ".join(PYTHONS),
        "oldest": str(OLDEST),
        "python_words": f"Python {OLDEST[0]}.{OLDEST[1]} or newer",
        "bundle": BUNDLE,
        "compiled": COMPILED,
        "note": NOTE,
        "directory": DIRECTORY,
        "record": RECORD,
        "limit_s": limit_s,
        "health_limit_s": min(limit_s + SLURM_S, MOST_S),
        "record_limit_s": RECORD_S,
        "interval_s": policy.gate_interval_s,
        "when": cron_times(policy.gate_interval_s),
    }


def cron_times(interval_s: int) -> str:
    """The five fields of crontab(5) for about this interval; cron's shortest is a minute.

    A step that does not divide an hour (a day) gives one shorter pause in each hour (day), never
    a longer one.
    """
    minutes = max(1, interval_s // 60)
    if minutes < 60:
        return f"*/{minutes} * * * *" if minutes > 1 else "* * * * *"
    hours = minutes // 60
    return f"7 */{hours} * * *" if 1 < hours < 24 else "7 * * * *" if hours == 1 else "7 0 * * *"


def document(policy: Policy) -> bytes:
    """The policy file of the node: every setting but those that all nodes of a run complete."""
    settings = {key: value for key, value in as_data(policy).items() if key not in _FLEET}
    return (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode()
