"""The files of the node's own check as a policy wants them, for the control machine alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nodeready.core.policy import Policy, as_data
from nodeready.core.shell import OLDEST, PYTHONS
from nodeready.core.templates import render
from nodeready.subjects.gate import facts

#: Maximum seconds of a timer's run, which delays no job: more than the probe's own limit
#: (agent/gate/here.py) and that of a file server (agent/verdict.py).
RECORD_S = 85
#: Seconds of the health check for Slurm's commands.
SLURM_S = 20
#: Slurm ends a health check after 60 s, also with a longer HealthCheckTimeout in newer versions.
MOST_S = 58


@lru_cache(maxsize=256)
def digests(policy: Policy, program: Callable[[], bytes]) -> tuple[tuple[str, str], ...]:
    """(path, sha256) of every file that the node's gate has to have under this policy.

    program: makes the node's own program, one for all nodes
    """
    files = contents(policy, program)
    return tuple((path, hashlib.sha256(data).hexdigest()) for path, data in files.items())


def node_policy(policy: Policy) -> Policy:
    """The policy by which the node judges itself: it does not know the fleet's host keys."""
    return replace(policy, ssh_known_hosts=())


@lru_cache(maxsize=256)
def contents(policy: Policy, program: Callable[[], bytes]) -> dict[str, bytes]:
    """Path -> the bytes of that file under this policy."""
    limit_s = policy.gate_budget_s + 5
    values: dict[str, Any] = {
        "pythons": " ".join(PYTHONS), "oldest": str(OLDEST),
        "python_words": f"Python {OLDEST[0]}.{OLDEST[1]} or newer",
        "bundle": facts.BUNDLE, "compiled": facts.COMPILED, "note": facts.NOTE,
        "directory": facts.DIRECTORY, "record": facts.RECORD, "limit_s": limit_s,
        "health_limit_s": MOST_S if policy.gate_undrain else min(limit_s + SLURM_S, MOST_S),
        "record_limit_s": RECORD_S, "interval_s": policy.gate_interval_s,
        "when": cron_times(policy.gate_interval_s),
    }  # fmt: skip
    files = {facts.BUNDLE: program(), facts.POLICY: document(policy)}
    for path, template in (
        (facts.RECORD, "record.j2"),
        (facts.PROLOG, "slurm-prolog.j2"),
        (facts.HEALTH_CHECK, "slurm-healthcheck.j2"),
        (facts.SERVICE, "nodeready.service.j2"),
        (facts.TIMER, "nodeready.timer.j2"),
        (facts.CRON, "cron.j2"),
    ):
        files[path] = render(f"gate/{template}", **values)
    return files


def cron_times(interval_s: int) -> str:
    """The five fields of crontab(5) for about this interval; cron's shortest is a minute.

    A step that does not divide an hour (a day) gives one shorter pause in each, never a longer.
    """
    minutes = max(1, interval_s // 60)
    if minutes < 60:
        return f"*/{minutes} * * * *" if minutes > 1 else "* * * * *"
    hours = minutes // 60
    return f"7 */{hours} * * *" if 1 < hours < 24 else "7 * * * *" if hours == 1 else "7 0 * * *"


def document(policy: Policy) -> bytes:
    """The policy file of the node: every setting but the lines of host keys."""
    settings = as_data(policy)
    del settings["ssh_known_hosts"]
    return (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode()
