"""Judge whether the node's own check is installed, is used by Slurm, and does its work."""

from __future__ import annotations

from nodeready.policy import JudgingPolicy, Policy
from nodeready.shell import quote
from nodeready.subjects.gate.facts import (
    BUNDLE,
    COMPILED,
    CRON,
    HEALTH_CHECK,
    POLICY,
    PROBE,
    PROLOG,
    RECORD,
    SERVICE,
    TIMER,
    WANTED,
    Gate,
)
from nodeready.subjects.result import Result, Subject, check, fail, fixable, na, ok, warn

OFF = "gate is False"
#: A node that judges itself runs its own check, which therefore works well enough for a job.
_ALONE = "only the control machine knows what it should be"
_NO_PYTHON = "no Python for it: see gate.python"
#: Seconds behind its budget after which our prolog is ended for good.
GRACE_S = 4


def kept(seen: Gate) -> dict[str, str]:
    """The programs of ours that must stay on the node: path -> why.

    Slurm drains a node whose Prolog is named in slurm.conf and is not there.
    """
    found = {}
    for program in (PROLOG, HEALTH_CHECK):
        if program not in seen.there:
            continue
        if seen.slurm_conf is None and seen.slurm:
            found[program] = "no slurm.conf was found that could name it"
        elif seen.slurm_conf is not None and seen.slurm_conf.names(program):
            found[program] = f"{seen.slurm_conf.names(program)} names it"
    return found


@check(
    "gate.leftover",
    settings=("gate",),
    fixed_by="gate.leftover",
    fix=("take the lines out of slurm.conf, scontrol reconfigure, rm ' '",),
)
def leftover(seen: Gate, want: Policy) -> Result:
    """Nothing of the node's own check is left on a node whose policy does not want it.

    A timer that nobody asked for judges by a policy that is no more. What slurm.conf still names
    stays until a person has taken the line out: Slurm drains a node whose prolog is missing.
    """
    check, expected = "gate.leftover", "none of its files"
    if want.gate:
        return na(check, "gate is True")
    staying = kept(seen)
    gone = [path for path in seen.there if path not in staying]
    if gone:
        return fixable(check, expected, ", ".join(gone))
    if staying:
        actual = "; ".join(f"{path}: {why}" for path, why in staying.items())
        paths = " ".join(map(quote, staying))
        fix = f"take the lines out of slurm.conf, scontrol reconfigure, rm {paths}"
        return warn(check, expected, actual, "", fix)
    return na(check, OFF) if not seen.there else ok(check, expected)


@check(
    "gate.python",
    settings=("gate",),
    fix=("install one beside it: dnf install python3.11, zypper install python311",),
)
def python(seen: Gate, want: Policy) -> Result:
    """The node has a Python that can run its own check: 3.9 or newer, and nothing beside it.

    The interpreter of RHEL 8 and SLES 15 is older; both have a newer one beside it.
    """
    check, expected = "gate.python", "Python 3.9 or newer"
    if not want.gate:
        return na(check, OFF)
    if not isinstance(want, JudgingPolicy):
        return na(check, _ALONE)
    if seen.python:
        return ok(check, expected, seen.python)
    fix = "install one beside it: dnf install python3.11, zypper install python311"
    return fail(check, expected, seen.old or "none", "", fix)


def _installed(check: str, seen: Gate, want: Policy, paths: tuple[str, ...]) -> Result:
    """Whether these files are as the control machine would write them, and may be executed."""
    if not want.gate:
        return na(check, OFF)
    if not seen.python:
        return na(check, _NO_PYTHON)
    if not isinstance(want, JudgingPolicy):
        return na(check, _ALONE)
    expected = f"{', '.join(paths)} as this nodeready writes it"
    wanted, there = dict(want.gate_files), seen.digests or {}
    wrong = [f"no {path}" for path in paths if path not in there]
    wrong += [f"another {path}" for path in paths if path in there and there[path] != wanted[path]]
    programs = [path for path in paths if path in (RECORD, PROLOG, HEALTH_CHECK)]
    wrong += [f"{path} cannot be executed" for path in programs if path not in seen.runs]
    return fixable(check, expected, ", ".join(wrong)) if wrong else ok(check, expected)


def uncompiled(seen: Gate) -> list[str]:
    """Why the compiled program is not made of the node's bundle for the node's Python, or []."""
    digests = seen.digests or {}
    if COMPILED not in digests:
        return [f"no {COMPILED}"]
    if seen.note is None:
        return [f"nothing says of what {COMPILED} was made"]
    of, made, magic = seen.note
    wrong = [f"another {COMPILED} than was made here"] if made != digests[COMPILED] else []
    wrong += [f"{COMPILED} is of another nodeready"] if of != digests.get(BUNDLE) else []
    wrong += [f"{COMPILED} is for another Python"] if magic != seen.magic else []
    return wrong


@check("gate.bundle", settings=("gate",), fixed_by="gate.program")
def bundle(seen: Gate, want: Policy) -> Result:
    """The node has this version of nodeready as one file, to check itself by.

    The node and the control machine judge by the same rules, or they contradict each other. What
    its timer and Slurm run is that file compiled for the node's Python, which starts in half the
    time; only root can write either.
    """
    result = _installed("gate.bundle", seen, want, (BUNDLE,))
    if result.status != "ok":
        return result
    wrong = uncompiled(seen) + [f"{path} can be written by others" for path in seen.exposed]
    return fixable(result.check, result.expected, ", ".join(wrong)) if wrong else result


@check("gate.policy", settings=("gate",), fixed_by="gate.program")
def policy(seen: Gate, want: Policy) -> Result:
    """The node has the policy that it is judged by, so that it can judge itself."""
    return _installed("gate.policy", seen, want, (POLICY,))


@check(
    "gate.timer", settings=("gate",), fixed_by="gate.timer", fix=("install cron, or start record",)
)
def timer(seen: Gate, want: Policy) -> Result:
    """The node looks at itself again and again: by a systemd timer, or by cron.

    So Slurm's prolog finds a fresh verdict and costs a job no time, and Prometheus has its file.
    """
    check = "gate.timer"
    if seen.systemd:
        result = _installed(check, seen, want, (RECORD, SERVICE, TIMER))
        if result.status == "ok" and WANTED not in seen.there:
            return fixable(check, "enabled at boot", "nodeready.timer is not enabled", TIMER)
        others = [CRON]
    elif seen.cron or not want.gate or not isinstance(want, JudgingPolicy):
        result = _installed(check, seen, want, (RECORD, CRON))
        others = [WANTED, TIMER, SERVICE]
    else:
        expected = "a timer of systemd, or cron"
        return fail(check, expected, "neither runs here", "", "install cron, or start record")
    twice = [path for path in others if path in seen.there]
    if result.status == "ok" and twice:
        return fixable(check, "one timer", f"also {', '.join(twice)}")
    return result


@check("gate.slurm_scripts", settings=("gate",), fixed_by="gate.slurm")
def slurm_scripts(seen: Gate, want: Policy) -> Result:
    """The programs for Slurm's prolog and health check are there, where Slurm is."""
    check = "gate.slurm_scripts"
    if want.gate and not seen.slurm:
        return na(check, "no Slurm here")
    return _installed(check, seen, want, (PROLOG, HEALTH_CHECK))


@check(
    "gate.slurm_conf",
    settings=("gate", "gate_interval_s", "gate_budget_s"),
    fix=("in PATH: ' '; then scontrol reconfigure",),
)
def slurm_conf(seen: Gate, want: Policy) -> Result:
    """slurm.conf names our prolog and health check, and leaves them the time that they need.

    It is the administrator's file, and one for the whole cluster: nodeready never edits it. Slurm
    runs no health check without a HealthCheckInterval, and a prolog that PrologEpilogTimeout ends
    drains the node (slurm.conf(5)).
    """
    check, conf = "gate.slurm_conf", seen.slurm_conf
    if not want.gate:
        return na(check, OFF)
    if not seen.slurm:
        return na(check, "no Slurm here")
    if conf is None:
        return na(check, "no slurm.conf was found here")
    least = want.gate_budget_s + GRACE_S
    wrong, lines = [], []
    if not conf.names(PROLOG):
        wrong.append("Prolog is not ours")
        lines.append(f"Prolog={PROLOG}")
    elif conf.timeout is not None and conf.timeout.isdigit() and int(conf.timeout) < least:
        wrong.append(f"PrologEpilogTimeout is {conf.timeout} s")
        lines.append(f"PrologEpilogTimeout={max(60, least)}")
    if not conf.names(HEALTH_CHECK):
        wrong.append("HealthCheckProgram is not ours")
        lines.append(f"HealthCheckProgram={HEALTH_CHECK}")
    if conf.interval in (None, "0"):
        wrong.append("HealthCheckInterval is not set")
        lines.append(f"HealthCheckInterval={want.gate_interval_s}")
    if wrong:
        fix = f"in {conf.path}: {' '.join(lines)}; then scontrol reconfigure"
        return warn(check, "our prolog and health check", "; ".join(wrong), conf.path, fix)
    return ok(check, "our prolog and health check", source=conf.path)


@check(
    "gate.verdict",
    settings=("gate", "gate_interval_s", "gate_max_age_s"),
    fix=("systemctl list-timers nodeready.timer, or is cron running? Then the log of nodeready",),
)
def verdict(seen: Gate, want: Policy) -> Result:
    """The node's last verdict is young enough: its timer runs.

    Old is what the prolog does not believe any more (gate_max_age_s), and what three intervals of
    the timer should have renewed. Where the verdict itself is collected (audit --recorded), old is
    what the prolog does not believe, and then all of the node is unknown.
    """
    check = "gate.verdict"
    if not want.gate:
        return na(check, OFF)
    if seen.since_s is None:
        return na(check, "not installed: see gate.bundle")
    limit = max(want.gate_max_age_s, 3 * want.gate_interval_s)
    age = seen.since_s if seen.age_s is None else seen.age_s
    if seen.age_s is None and age <= limit:
        return na(check, f"installed {age} s ago: the first verdict is not due yet")
    expected = f"at most {limit} s old"
    if age <= limit:
        return ok(check, expected)
    actual = f"{age} s old" if seen.age_s is not None else "none"
    fix = "systemctl list-timers nodeready.timer, or is cron running? Then the log of nodeready"
    return warn(check, expected, actual, "", fix)


SUBJECT = Subject(
    "gate",
    __doc__,
    checks=(
        leftover,
        python,
        bundle,
        policy,
        timer,
        slurm_scripts,
        slurm_conf,
        verdict,
    ),
    probe=PROBE,
    # Without the bundle, which is no text.
    files=(
        "/etc/systemd/system/nodeready.*",
        "/etc/cron.d/nodeready",
        "/etc/nodeready/policy.json",
        "/usr/local/lib/nodeready/record",
        "/usr/local/lib/nodeready/slurm-*",
    ),
    # The control machine judges whether the node's own check is installed rightly.
    alone=False,
)
