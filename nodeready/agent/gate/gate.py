"""`record`, `prolog` and `healthcheck`: the verdict about this node, kept between audits.

The timer runs `record`, which writes a verdict. A job's `prolog` reads it. Slurm's `healthcheck`
writes a verdict, too, and drains or undrains the node by it. A node that is not ready and that
`gate_drain_max` keeps in service has the check `gate.drain` in its verdict and metrics.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from nodeready import __version__
from nodeready.agent import audit_document as document
from nodeready.agent.audit_document import Audit
from nodeready.agent.gate import here
from nodeready.agent.verdict import NodeVerdict, SourceError, keep, listed_fields, parse, read_file
from nodeready.core import exit_codes
from nodeready.core.policy import GATE, Policy, digest
from nodeready.core.result import worst
from nodeready.core.text import sanitise
from nodeready.subjects.gate import checks
from nodeready.subjects.gate.facts import Gate
from nodeready.subjects.registry import select

#: When this process began to work, by time.monotonic(): the prolog's budget counts from here.
BEGAN = time.monotonic()

# --- The verdict and its file, because a prolog has no time for a whole audit. A boot removes it.

PATH = "/run/nodeready/verdict.json"


def valid_verdict(
    verdict: NodeVerdict | None,
    *,
    now_s: float,
    boot_id: str,
    policy_digest: str,
    max_age_s: float,
) -> NodeVerdict | None:
    """The verdict if it is of this boot, by this policy, and not too old; else None. None, too,
    for a verdict from the future: the clock was set, so the verdict's age is unknown.
    """
    if verdict is None or not boot_id or verdict.boot_id != boot_id:
        return None
    if verdict.policy_digest != policy_digest or not 0 <= now_s - verdict.time <= max_age_s:
        return None
    return verdict


def boot_id() -> str:
    """The kernel's name for this boot; "" when it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def read(policy_digest: str, max_age_s: float, path: str = PATH) -> NodeVerdict | None:
    """The verdict in the file if it is valid, else None. Never raises, never waits. Only root may
    have written the file, because the verdict decides which node gets a job.
    """
    try:
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(directory)
            if status.st_uid or status.st_mode & 0o022:
                return None
            _, text = read_file(directory, os.path.basename(path), frozenset({0}))
        finally:
            os.close(directory)
    except OSError:
        return None
    return valid_verdict(
        parse(text), now_s=time.time(), boot_id=boot_id(), policy_digest=policy_digest,
        max_age_s=max_age_s,
    )  # fmt: skip


def write(verdict: NodeVerdict, path: str = PATH) -> None:
    """Replace the verdict in the file, atomically. Raises OSError."""
    from pathlib import Path

    from nodeready.core.files import make_directory, write_atomically

    make_directory(Path(path).parent, 0o755)
    # Not the mode of an older file: `read` rejects a file that others may write.
    write_atomically(Path(path), [verdict.text()], 0o644, keep_mode=False)


# --- The commands.

#: Characters of one reason, and of all together: Slurm and a log show them on one line.
_REASON, _LENGTH = 160, 1000
_SLURM_S = 2.5  # seconds of the prolog's budget for scontrol, at most a fourth of it
#: Seconds that scontrol may take beyond the budget; slurm-prolog ends this program 5 s after the
#: budget.
_LATE_S = 4.0
#: Seconds of the health check for scontrol: four answers, the delay and the second look, if each
#: answer takes 4 s. Slurm ends a health check after 60 s.
_HEALTH_SLURM_S, _HEALTH_S = 19.0, 56.0


def verdict_line(go: bool, reasons: Iterable[str]) -> str:
    """A verdict on one line."""
    return "nodeready: go" if go else sanitise(f"nodeready: no-go: {'; '.join(reasons)}", _LENGTH)


def node_verdict(audit: Audit, policy: Policy) -> NodeVerdict:
    """The verdict of an audit of this machine."""
    (node,) = audit.nodes
    reasons = tuple(sanitise(reason, _REASON) for reason in document.reasons(node.results))
    boot, is_go, lists = boot_id(), document.go(node.results), listed_fields(node.results)
    head = time.time(), boot, digest([policy]), is_go, reasons, node.name, __version__
    return NodeVerdict(*head, **lists)


def write_files(audit: Audit, policy: Policy) -> tuple[NodeVerdict, list[str]]:
    """Write the files of the verdict and of the metrics of an audit, with the check `gate.drain`.
    Returns the verdict, and a line for each file that could not be written.
    """
    from nodeready.agent.gate.drain import keep_hold, read_hold

    (node,) = audit.nodes
    if not policy.gate_drain or document.go(node.results):
        keep_hold(None)
    hold = read_hold()
    drain = checks.drain(Gate(held=hold.reason if hold else ""), policy)
    results = (*node.results, drain)
    audit = replace(audit, nodes=(replace(node, results=results, status=worst(results)),))
    verdict, problems = node_verdict(audit, policy), []
    try:
        write(verdict)
    except OSError as error:
        problems.append(_problem(error, PATH))
    textfile = policy.gate_textfile
    if textfile and os.path.isdir(os.path.dirname(textfile)):
        try:
            here.write(here.rendered("audit", audit, "prometheus"), textfile)
        except OSError as error:
            problems.append(_problem(error, textfile))
    return verdict, problems


def share(verdict: NodeVerdict, policy: Policy) -> list[str]:
    """Write the timer's verdict into the directory that all nodes share. Called last, because the
    directory's server may hang. Returns a line per problem.
    """
    directory = policy.gate_directory
    try:
        if directory:
            keep(verdict, directory, policy.gate_max_age_s)
    except SourceError as error:
        return [str(error)]
    except OSError as error:
        return [_problem(error, directory)]
    return []


def _problem(error: OSError, path: str) -> str:
    return f"{error.strerror or error}: {error.filename or path}"


def _audit(policy: Policy, limit_s: float) -> Audit:
    selection = select([policy.at(GATE)], subjects=here.LOCAL_SUBJECTS)
    return here.audit(policy, selection, limit_s, GATE)


def current(
    policy: Policy, began_s: float, *, is_draining: bool = False
) -> tuple[NodeVerdict, Audit | None]:
    """The kept verdict if it is "go", else that of an audit within the budget, and the audit.

    A kept no-go is not used: the node may have been repaired since, and a failed prolog costs a
    job more than an audit.

    began_s:     time.monotonic() from which the budget counts
    is_draining: reserve time for Slurm, in case the audit uses all of its time
    """
    verdict = read(digest([policy]), policy.gate_max_age_s)
    if verdict is not None and verdict.go:
        return verdict, None
    remaining_s = max(0.5, policy.gate_budget_s - (time.monotonic() - began_s))
    slurm_s = min(_SLURM_S, remaining_s / 4) if is_draining else 0.0
    audit = _audit(policy, remaining_s - slurm_s)
    return node_verdict(audit, policy), audit


def record(policy: Policy, arguments: Namespace) -> int:
    """`record`: audit, and keep the verdict and the Prometheus textfile. Returns the exit code."""
    audit = _audit(policy, here.LIMIT_S)
    verdict, problems = write_files(audit, policy)
    print(verdict_line(verdict.go, verdict.costed_reasons))
    problems += share(verdict, policy)
    for problem in problems:
        print(f"nodeready: {problem}", file=sys.stderr)
    return exit_codes.exit_code(failed=bool(problems), check=not verdict.go)


def prolog(policy: Policy, arguments: Namespace) -> int:
    """`prolog`: the kept verdict, else an audit's within the budget. Returns 0: go, 3: no-go."""
    verdict, audit = current(policy, BEGAN, is_draining=policy.gate_drain)
    if policy.gate_drain and audit is not None and not verdict.go:
        from nodeready.agent.gate.drain import update_slurm

        # Slurm itself drains a node whose prolog fails, but keeps the first reason: this one names
        # the failed check. A node that is ready does not call slurmctld, because a large job would
        # call it once for every node.
        # Nor does a node that the share kept in service: until its health check asks again, or for
        # as long as a verdict is accepted.
        before_drain = partial(_keep_evidence, verdict, audit)
        deadline = BEGAN + policy.gate_budget_s + _LATE_S
        problem = update_slurm(
            verdict, policy.gate_drain_max, deadline, before_drain, policy.gate_max_age_s
        )
        if problem:
            # Slurm would drain the node if its prolog failed: slurm-prolog lets the job start.
            # Without the reasons: a user's text in them could be "nodeready: no-go".
            print(sanitise(f"nodeready: held: {problem}", _LENGTH))
            return exit_codes.exit_code(check=True)
    print(verdict_line(verdict.go, verdict.costed_reasons))
    return exit_codes.exit_code(check=not verdict.go)


def _keep_evidence(verdict: NodeVerdict, audit: Audit) -> None:
    """Start to keep the evidence of this node, before a drain, which no failure here prevents."""
    with contextlib.suppress(Exception):
        from nodeready.agent.gate.drain import keep_evidence

        keep_evidence(verdict.reasons, audit.nodes[0].results)


def healthcheck(policy: Policy, arguments: Namespace) -> int:
    """`healthcheck`: `record`, and drain or undrain the node in Slurm. Returns the exit code."""
    from nodeready.agent.gate.drain import update_slurm

    remaining_s = max(0.5, policy.gate_budget_s - (time.monotonic() - BEGAN))
    audit = _audit(policy, remaining_s)
    verdict, problems = write_files(audit, policy)
    if policy.gate_drain:
        deadline = min(time.monotonic() + _HEALTH_SLURM_S, BEGAN + _HEALTH_S)
        # Without the check gate.drain, which is no reason for a drain.
        judged, before_drain = node_verdict(audit, policy), partial(_keep_evidence, verdict, audit)
        problem = update_slurm(judged, policy.gate_drain_max, deadline, before_drain)
        verdict, problems = write_files(audit, policy)
        problems += [problem] if problem else []
    if policy.gate_undrain and verdict.go:
        from nodeready.agent.gate.undrain import undrain_own

        problem = undrain_own(policy, BEGAN + _HEALTH_S)
        problems += [problem] if problem else []
    print(verdict_line(verdict.go, verdict.costed_reasons))
    for problem in problems:
        print(f"nodeready: {problem}", file=sys.stderr)
    return exit_codes.exit_code(failed=bool(problems), check=not verdict.go)
