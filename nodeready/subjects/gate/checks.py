"""Judge whether the node's own check is installed, is used by Slurm, and does its work."""

from __future__ import annotations

from functools import partial

from nodeready.core.policy import Policy
from nodeready.core.result import Check, FactKinds, FleetFacts, Result, Subject, check
from nodeready.core.severity import drifts, loses_job
from nodeready.core.shell import quote
from nodeready.subjects.gate import facts
from nodeready.subjects.gate.facts import HEALTH_CHECK, PROLOG, Gate

OFF = "gate is False"
#: The reason on a node that judges itself: its own check runs, so it works well enough for a job.
_ALONE = "only the control machine knows what it should be"
_NO_PYTHON = "no Python for it: see gate.python"
#: Seconds after the end of its budget at which our prolog is killed.
GRACE_S = 7

#: A check of the files that the control machine knows.
_check_of_files = partial(check, settings=("gate",), fleet=("gate_files",))


def required_programs(observed: Gate) -> dict[str, str]:
    """The programs that must stay on the node: path -> reason.

    Slurm drains a node whose Prolog is named in slurm.conf and is not there.
    """
    programs, conf = {}, observed.slurm_conf
    for program in (path for path in (PROLOG, HEALTH_CHECK) if path in observed.existing):
        if conf is None and observed.slurm:
            programs[program] = "no slurm.conf was found that could name it"
        elif conf is not None and conf.names(program):
            programs[program] = f"{conf.names(program)} names it"
    return programs


@check("gate.leftover", drifts("deploy", "configure"), settings=("gate",),
       fixed_by="gate.leftover", expects="none of its files",
       fix="take the lines out of slurm.conf, scontrol reconfigure, rm ' '")  # fmt: skip
def leftover(observed: Gate, policy: Policy) -> Result:
    """Nothing of the node's own check is left on a node whose policy does not want it.

    A leftover timer judges by an obsolete policy. A program that slurm.conf names stays until a
    person has removed that line: Slurm drains a node whose prolog is missing.
    """
    if policy.gate:
        return leftover.na("gate is True")
    staying = required_programs(observed)
    if gone := [path for path in observed.existing if path not in staying]:
        return leftover.fixable(", ".join(gone))
    if staying:
        actual = "; ".join(f"{path}: {reason}" for path, reason in staying.items())
        quoted = " ".join(map(quote, staying))
        fix = f"take the lines out of slurm.conf, scontrol reconfigure, rm {quoted}"
        return leftover.warn(actual, "", fix)
    return leftover.na(OFF) if not observed.existing else leftover.ok()


@_check_of_files("gate.python", drifts("install"),
                 fix="install one beside it: dnf install python3.11, zypper install python311",
                 expects="Python 3.9 or newer")  # fmt: skip
def python(observed: Gate, policy: Policy, fleet: FleetFacts) -> Result:
    """The node has a Python that can run its own check: 3.9 or newer, without further packages.

    The default interpreter of RHEL 8 and SLES 15 is older; both have packages of a newer one.
    """
    if not policy.gate:
        return python.na(OFF)
    if fleet.gate_files is None:
        return python.na(_ALONE)
    if observed.python:
        return python.ok(observed.python)
    return python.fail(observed.old or "none")


def _installed(
    check: Check, observed: Gate, policy: Policy, fleet: FleetFacts, paths: tuple[str, ...]
) -> Result:
    """Whether these files are as the control machine would write them, and may be executed."""
    if not policy.gate:
        return check.na(OFF)
    if not observed.python:
        return check.na(_NO_PYTHON)
    if fleet.gate_files is None:
        return check.na(_ALONE)
    expected = f"{', '.join(paths)} as this nodeready writes it"
    expected_digests, digests = dict(fleet.gate_files), observed.digests or {}
    differences = [f"no {path}" for path in paths if path not in digests]
    changed = [path for path in paths if digests.get(path) not in (None, expected_digests[path])]
    differences += [f"{path} has other content" for path in changed]
    programs = [path for path in paths if path in facts.PROGRAMS]
    differences += [f"{path} cannot be executed" for path in programs if path not in observed.runs]
    if differences:
        return check.fixable(", ".join(differences), expected=expected)
    return check.ok(expected=expected)


def uncompiled(observed: Gate) -> list[str]:
    """Why the compiled program is not that of the node's bundle and Python; []: it is."""
    digests = observed.digests or {}
    if facts.COMPILED not in digests:
        return [f"no {facts.COMPILED}"]
    if observed.note is None:
        return [f"{facts.COMPILED} has no note of its origin"]
    bundle_digest, compiled_digest, magic = observed.note
    reasons = (
        (compiled_digest != digests[facts.COMPILED], "was changed after it was compiled"),
        (bundle_digest != digests.get(facts.BUNDLE), "was compiled from another bundle"),
        (magic != observed.magic, "was compiled for another Python"),
    )
    return [f"{facts.COMPILED} {reason}" for is_true, reason in reasons if is_true]


@_check_of_files("gate.bundle", drifts("deploy"), fixed_by="gate.program")
def bundle(observed: Gate, policy: Policy, fleet: FleetFacts) -> Result:
    """The node has this version of nodeready as one file, and a compiled copy of it.

    With other rules, the node would contradict the control machine. The timer and Slurm run the
    copy that is compiled for the node's Python, which starts in half the time. Only root may write
    either file.
    """
    result = _installed(bundle, observed, policy, fleet, (facts.BUNDLE,))
    if result.status != "ok":
        return result
    reasons = [f"{path} can be written by others" for path in observed.exposed]
    reasons = [*uncompiled(observed), *reasons]
    return bundle.fixable(", ".join(reasons), expected=result.expected) if reasons else result


@_check_of_files("gate.policy", drifts("deploy"), fixed_by="gate.program")
def policy(observed: Gate, node_policy: Policy, fleet: FleetFacts) -> Result:
    """The node has the policy that it is judged by, so that it can judge itself."""
    return _installed(policy, observed, node_policy, fleet, (facts.POLICY,))


@_check_of_files("gate.timer", drifts("deploy", "install"), fixed_by="gate.timer",
                 fix="install cron, or start record")  # fmt: skip
def timer(observed: Gate, policy: Policy, fleet: FleetFacts) -> Result:
    """The node checks itself at intervals: by a systemd timer, or by cron.

    So Slurm's prolog finds a fresh verdict and does not delay a job, and Prometheus has its file.
    """
    if observed.systemd:
        paths = (facts.RECORD, facts.SERVICE, facts.TIMER)
        result = _installed(timer, observed, policy, fleet, paths)
        if result.status == "ok" and facts.WANTED not in observed.existing:
            return timer.fixable(
                "nodeready.timer is not enabled", facts.TIMER, expected="enabled at boot"
            )
        unused = [facts.CRON]
    elif observed.cron or not policy.gate or fleet.gate_files is None:
        result = _installed(timer, observed, policy, fleet, (facts.RECORD, facts.CRON))
        unused = [facts.WANTED, facts.TIMER, facts.SERVICE]
    else:
        return timer.fail("neither runs here", expected="a timer of systemd, or cron")
    twice = [path for path in unused if path in observed.existing]
    if result.status == "ok" and twice:
        return timer.fixable(f"also {', '.join(twice)}", expected="one timer")
    return result


@_check_of_files("gate.slurm_scripts", drifts("deploy"), fixed_by="gate.slurm")
def slurm_scripts(observed: Gate, policy: Policy, fleet: FleetFacts) -> Result:
    """A node with Slurm has the programs for its prolog and health check."""
    if policy.gate and not observed.slurm:
        return slurm_scripts.na("no Slurm here")
    return _installed(slurm_scripts, observed, policy, fleet, (PROLOG, HEALTH_CHECK))


@check("gate.slurm_conf", drifts("configure"),
       settings=("gate", "gate_interval_s", "gate_budget_s"),
       expects="our prolog and health check",
       fix="in PATH: ' '; then scontrol reconfigure")  # fmt: skip
def slurm_conf(observed: Gate, policy: Policy) -> Result:
    """slurm.conf names our prolog and health check, and leaves them the time that they need.

    It is the administrator's file, and one for the whole cluster: nodeready never edits it. Slurm
    runs no health check without a HealthCheckInterval, and a prolog that PrologEpilogTimeout ends
    drains the node (slurm.conf(5)).
    """
    conf = observed.slurm_conf
    if not policy.gate:
        return slurm_conf.na(OFF)
    if not observed.slurm:
        return slurm_conf.na("no Slurm here")
    if conf is None:
        return slurm_conf.na("no slurm.conf was found here")
    least = policy.gate_budget_s + GRACE_S
    differences, lines = [], []
    if not conf.names(PROLOG):
        differences.append("Prolog is not ours")
        lines.append(f"Prolog={PROLOG}")
    elif conf.timeout is not None and conf.timeout.isdigit() and int(conf.timeout) < least:
        differences.append(f"PrologEpilogTimeout is {conf.timeout} s")
        lines.append(f"PrologEpilogTimeout={max(60, least)}")
    if not conf.names(HEALTH_CHECK):
        differences.append("HealthCheckProgram is not ours")
        lines.append(f"HealthCheckProgram={HEALTH_CHECK}")
    if conf.interval in (None, "0"):
        differences.append("HealthCheckInterval is not set")
        lines.append(f"HealthCheckInterval={policy.gate_interval_s}")
    if differences:
        fix = f"in {conf.path}: {' '.join(lines)}; then scontrol reconfigure"
        return slurm_conf.warn("; ".join(differences), conf.path, fix)
    return slurm_conf.ok(source=conf.path)


@check(
    "gate.verdict",
    drifts("inspect", "restart_service"),
    settings=("gate", "gate_interval_s", "gate_max_age_s"),
    fix="systemctl list-timers nodeready.timer, or is cron running? Then the log of nodeready",
)
def verdict(observed: Gate, policy: Policy) -> Result:
    """The node's last verdict is recent: its timer runs.

    A verdict is too old when it is older than gate_max_age_s, after which the prolog ignores it,
    and older than three intervals of the timer. In `audit --recorded`, gate_max_age_s alone
    counts, and every check of a node with an older verdict is unknown.
    """
    if not policy.gate:
        return verdict.na(OFF)
    if observed.since_s is None:
        return verdict.na("not installed: see gate.bundle")
    limit = max(policy.gate_max_age_s, 3 * policy.gate_interval_s)
    age = observed.since_s if observed.age_s is None else observed.age_s
    if observed.age_s is None and age <= limit:
        return verdict.na(f"installed {age} s ago: the first verdict is not due yet")
    check = verdict.expecting(f"at most {limit} s old")
    if age <= limit:
        return check.ok()
    actual = f"{age} s old" if observed.age_s is not None else "none"
    return check.warn(actual)


@check(
    "gate.drain",
    loses_job("inspect", "configure"),
    settings=("gate", "gate_drain", "gate_drain_max"),
    fix="compare the policy with the nodes that fail; correct it and deploy, or repair the nodes, "
    "or raise gate_drain_max",
)
def drain(observed: Gate, policy: Policy) -> Result:
    """A node that is not ready is drained, and not kept in service by gate_drain_max.

    When many nodes fail at once, the policy is often wrong, and not the nodes. So nodeready drains
    at most gate_drain_max nodes of a partition; further nodes stay in service and get jobs. A node
    also stays in service if Slurm does not answer.
    """
    if not (policy.gate and policy.gate_drain):
        return drain.na("gate_drain is False" if policy.gate else OFF)
    check = drain.expecting(
        f"drained when not ready, at most {policy.gate_drain_max} of a partition"
    )
    if observed.held:
        return check.fail(f"not ready, and not drained: {observed.held}")
    return check.ok()


SUBJECT = Subject(
    "gate", __doc__,
    checks=(leftover, python, bundle, policy, timer, slurm_scripts, slurm_conf, verdict, drain),
    probe=facts.PROBE,
    # Without the bundle, which is no text.
    files=(
        "/etc/systemd/system/nodeready.*", "/etc/cron.d/nodeready", "/etc/nodeready/policy.json",
        "/usr/local/lib/nodeready/record", "/usr/local/lib/nodeready/slurm-*",
    ),
    # The control machine judges whether the node's own check is installed rightly.
    judged_on_node=False,
    kinds=FactKinds(
        volatile="age_s since_s held",
        versions="digests python old magic note",
        # Each node has a copy of its policy, which may differ from its peers'.
        unique="digests",
        elements={"digests": ""},
    ),
)  # fmt: skip
