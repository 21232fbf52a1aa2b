"""The way back into service: which drains may be ended, and how this node ends its own.

`stay_reason` is pure. A drain is ended by the words that Slurm, or nodeready, wrote as its reason;
a drain by a person never is. Slurm's update has no condition: `undrain` reads the node once more,
right before the update, and a reason that was written within these milliseconds is lost.
"""

from __future__ import annotations

import os
import re
import syslog
import time
from collections.abc import Collection

from nodeready.agent import leftovers
from nodeready.agent.audit_document import reasons
from nodeready.agent.gate import drain
from nodeready.agent.gate.drain import DrainError, SlurmNode
from nodeready.agent.leftovers import Leftover
from nodeready.core.policy import READY, Policy
from nodeready.core.text import counted, sanitise
from nodeready.subjects.registry import select

#: The beginnings of states in which Slurm has more against the node than the drain.
_FURTHER_STATES = ("DOWN", "FAIL", "FUTURE", "NOT_RESPONDING", "POWER", "REBOOT", "UNKNOWN")


def stay_reason(node: SlurmNode, listed: Collection[str], authors: Collection[str]) -> str:
    """Why the drain must stay even if the node passes its checks; "": it may end.

    listed:  the policy's undrain_reasons
    authors: the names of root and of SlurmUser
    """
    if not node.is_drained:
        return "it is not drained"
    if states := [state for state in node.states if state.startswith(_FURTHER_STATES)]:
        return f"Slurm also says {', '.join(states)}"
    if node.is_pending:
        return "its health check is draining it"
    if not node.is_ours and node.reason not in listed:
        return "undrain_reasons does not list its reason"
    if node.author not in authors:
        return f"{sanitise(node.author, 40) or 'an unknown user'} wrote its reason"
    return ""


def slurm_authors(deadline: float) -> tuple[str, ...]:
    """The names, and the number, by which Slurm itself signs a reason. Raises DrainError."""
    text = drain.ask_slurm(["scontrol", "show", "config"], deadline)
    # SlurmUser = slurm(64030)
    match = re.search(r"^SlurmUser +=\s*(\S+)\((\d+)\)", text, re.M)
    return ("root", *(match.groups() if match else ()))


def leftover_text(row: Leftover) -> str:
    """One leftover in a line."""
    if row.kind == leftovers.JOB:
        return f"job {row.job} of {row.user} is {row.job_state}"
    job = f"job {row.job}, {row.job_state or 'which Slurm does not know'}" if row.job else "no job"
    channel = f" in {row.wait_channel}" if row.is_stuck and row.wait_channel else ""
    details = (
        f"{row.kind} {row.pid or ''}".rstrip(),
        f"of {row.user} ({job})",
        f"in state {row.state}{channel}" if row.state else "",
        "with a GPU" if row.has_gpu else "",
        f"of {row.size_bytes / 1e6:.1f} MB" if row.size_bytes else "",
    )
    return f"{' '.join(filter(None, details))}: {row.text}"


def undrain(name: str, before: SlurmNode, deadline: float) -> str:
    """End the drain of the node if it is still the same one. Returns why it was not ended, or "".
    Raises DrainError.
    before: the node as it was when it was judged
    """
    node = drain.parse(drain.ask_slurm(["scontrol", "show", "node", name], deadline))
    keys = ("reason", "since", "author", "is_drained")
    if any(getattr(node, key) != getattr(before, key) for key in keys):
        return f"its drain has changed: {sanitise(node.reason, 160) or 'no reason'}"
    # ``undrain`` clears only the drain; ``resume`` would also return a node that is down.
    drain.ask_slurm(["scontrol", "update", f"nodename={name}", "state=undrain"], deadline)
    return ""


# --- By the node itself (gate_undrain).

#: Seconds of the health check for the leftovers, for the proofs, and for Slurm's last two answers.
_FIND_S, _READY_S, _SLURM_S = 8.0, 20, 6.0


def undrain_own(policy: Policy, deadline: float) -> str:
    """End the drain of this node, which its health check has found ready, and log it. Returns why
    it stays though its reason is listed, or "". deadline: of time.monotonic()
    """
    try:
        name = drain.name_of(os.environ, os.uname().nodename)
        node = drain.parse(drain.ask_slurm(["scontrol", "show", "node", name], deadline))
        authors = slurm_authors(deadline) if node.is_drained else ()
        if stay_reason(node, policy.undrain_reasons, authors):
            return ""
        problem = _own_problem(policy, name, deadline) or undrain(name, node, deadline)
        if not problem:
            line = f"nodeready: {name}: undrained: {sanitise(node.reason, 160)}"
            syslog.syslog(syslog.LOG_NOTICE, line)
    except DrainError as error:
        problem = str(error)
    if problem:
        problem = sanitise(f"not undrained: {problem}", 1000)
        syslog.syslog(syslog.LOG_WARNING, f"nodeready: {problem}")
    return problem


def _own_problem(policy: Policy, name: str, deadline: float) -> str:
    """What still holds this node, or does not prove it. Raises DrainError."""
    from nodeready.agent.gate import here

    answer = leftovers.find(min(deadline, time.monotonic() + _FIND_S))
    numbers = {row.job for row in answer.leftovers if row.job}
    holding = leftovers.judged(answer.leftovers, leftovers.jobs_on(name, numbers, deadline))
    if holding or answer.error:
        suffix = f" (and {len(holding) - 1} more)" if len(holding) > 1 else ""
        return f"{leftover_text(holding[0])}{suffix}" if holding else answer.error
    budget_s = min(_READY_S, int(deadline - time.monotonic() - _SLURM_S))
    if budget_s < 1:
        return "no time left for the proofs"
    checks = select([policy.at(READY)], subjects=(*here.LOCAL_SUBJECTS, "proof"))
    (report,) = here.ready(policy, checks, budget_s).audit.nodes
    problems = reasons(report.results)
    return f"{counted(len(problems), 'check')}: {problems[0]}" if problems else ""
