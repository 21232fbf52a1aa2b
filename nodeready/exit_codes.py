"""The exit codes, decided in one place, here and on the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodeready.audit.document import Audit, Ready
    from nodeready.deploy.document import Deploy
    from nodeready.triage.stacks.document import Stacks

OK, FAILED, USAGE, CHECK, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130


def exit_code(
    *,
    interrupted: bool = False,
    usage: bool = False,
    failed: bool = False,
    unreachable: bool = False,
    check: bool = False,
) -> int:
    """The exit code of a run, by what happened in it; the first of these that holds.

    interrupted: 130, Ctrl-C or SIGTERM
    usage:       2, a wrong argument, a bad policy, zero nodes or zero checks selected
    failed:      1, the tool or an operation failed
    unreachable: 4, a node could not be reached
    check:       3, a check failed or could not be observed, or --check found changes to make
    """
    for happened, code in (
        (interrupted, INTERRUPTED),
        (usage, USAGE),
        (failed, FAILED),
        (unreachable, UNREACHABLE),
        (check, CHECK),
    ):
        if happened:
            return code
    return OK


def audit_code(audit: Audit, fail_on: str = "fail") -> int:
    """The exit code of an audit; ``fail_on="warn"``: a warning or an outlier fails too."""
    have, results = audit.summary["nodes"], audit.summary["results"]
    bad = results["fail"] + results["unknown"]
    if fail_on == "warn":
        bad += results["warn"] + len(audit.outliers)
    return exit_code(
        interrupted=not audit.complete,
        usage=not audit.nodes,
        failed=have["failed"] > 0,
        unreachable=have["unreachable"] > 0,
        check=bad > 0,
    )


def ready_code(ready: Ready) -> int:
    """The exit code of ``ready``: with ``--nodes-needed``, enough ready nodes are all good."""
    have = ready.audit.summary["nodes"]
    return exit_code(
        interrupted=not ready.audit.complete,
        usage=not ready.audit.nodes,
        failed=have["failed"] > 0 and not ready.enough,
        unreachable=have["unreachable"] > 0 and not ready.enough,
        check=not ready.enough,
    )


def deploy_code(deploy: Deploy) -> int:
    """The exit code of ``deploy``: all good is nothing left to change and nothing left to do."""
    nodes = deploy.nodes
    planned = any(node.planned and node.outcome is None for node in nodes)
    bad = any(node.results.get(status) for node in nodes for status in ("fail", "unknown"))
    return exit_code(
        interrupted=not deploy.complete,
        failed=any(node.failed for node in nodes),
        unreachable=any(node.unreachable for node in nodes),
        check=planned or bad,
    )


def stacks_code(stacks: Stacks, *, unreachable: bool = False, failed: bool = False) -> int:
    """The exit code of ``stacks``: all good are stacks of all ranks, and an answer of every node.

    unreachable: a node was not reached, or got lost; failed: a mistake of ours cost a node
    """
    return exit_code(
        interrupted=not stacks.complete,
        usage=not stacks.groups and not stacks.errors,
        failed=failed,
        unreachable=unreachable,
        check=bool(stacks.errors) or not all(group.frames for group in stacks.groups),
    )


def nagios_code(audit: Audit) -> int:
    """The exit code of ``--format nagios``: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN."""
    from nodeready.reports import nagios

    return nagios.state(audit)
