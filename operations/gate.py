"""Install the node's own check, its timer and the programs that Slurm runs; or remove them all."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.core.shell import PYTHONS
from nodeready.fleet.transport import bundle
from nodeready.runs.deploy import actions
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.gate import facts
from nodeready.subjects.gate.checks import required_programs, uncompiled
from nodeready.subjects.gate.files import contents, digests, document
from nodeready.subjects.snapshot import Snapshot

#: Seconds for a change that carries the bundle over a slow connection.
_TIMEOUT_S = 120
#: The settings in the scripts and in the timer's files.
_SCRIPTS = ("gate_interval_s", "gate_budget_s", "gate_undrain")
_RELOAD = actions.RunCommand(("systemctl", "daemon-reload"))


def _files(snapshot: Snapshot, policy: Policy, *paths: str) -> Iterator[actions.Action]:
    """Write those of our files that are not as they should be."""
    gate: facts.Gate = snapshot["gate"]
    for path in paths:
        content, old = contents(policy, bundle.program)[path], snapshot.files.get(path)
        program = path in facts.PROGRAMS
        if path in gate.existing and old == content:
            # An existing file keeps its mode when it is written.
            if program and path not in gate.runs:
                yield actions.RunCommand(("chmod", "0755", path))
            continue
        yield actions.WriteFile(path, content, old, mode="0755" if program else "0644", owned=True)
        if program and path in gate.existing:
            yield actions.RunCommand(("chmod", "0755", path))


@step(settings=("gate_textfile",))
def leftover(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Remove the node's own check, first the files that start it; never a program that slurm.conf
    names.
    """
    gate: facts.Gate = snapshot["gate"]
    staying = required_programs(gate)
    gone = [path for path in facts.FILES if path in gate.existing and path not in staying]
    if gate.systemd and facts.TIMER in gone:
        yield actions.RunCommand(("systemctl", "disable", "--now", "nodeready.timer"))
    for path in gone:
        yield actions.RemoveFile(path, snapshot.files.get(path, b""))
    for path in (facts.VERDICT, policy.gate_textfile):
        if path:
            yield actions.RemoveFile(path)
    if gate.systemd and (facts.TIMER in gone or facts.SERVICE in gone):
        yield _RELOAD
    if not staying:
        directories = f"{facts.DIRECTORY} {facts.POLICY.rpartition('/')[0]}"
        argv = ("sh", "-c", f"rmdir {directories} 2>/dev/null || :")
        yield actions.RunCommand(argv, f"remove {directories}")


@step(timeout_s=_TIMEOUT_S, settings=json.loads(document(Policy())))
def program(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Write nodeready as one file that the node's Python can run, compile it, write the policy.

    Raises PlanError for a Python that was not asked for.
    """
    gate: facts.Gate = snapshot["gate"]
    expected_digests = dict(digests(policy, bundle.program))
    if gate.python not in PYTHONS:
        raise actions.PlanError(f"{gate.python[:100]!r} is no Python that nodeready asks for")
    exposed = [path for path in facts.ROOTS if path in gate.exposed]
    if exposed:
        yield actions.RunCommand(("chown", "0:0", "--", *exposed))
        yield actions.RunCommand(("chmod", "go-w", "--", *exposed))
    new = (gate.digests or {}).get(facts.BUNDLE) != expected_digests[facts.BUNDLE]
    if new:
        test = '"$0" -I "$1" --version >/dev/null 2>&1 || { echo "it does not run"; exit 1; }'
        content = contents(policy, bundle.program)[facts.BUNDLE]
        old = b"" if facts.BUNDLE in gate.existing else None
        validator = ("sh", "-c", test, gate.python)
        yield actions.WriteFile(facts.BUNDLE, content, old, validator=validator, large=True)
    # Until the new program is compiled, the node runs the old program by the old policy.
    if new or exposed or uncompiled(gate):
        paths = (facts.BUNDLE, facts.COMPILED, facts.NOTE)
        words = ("nr_compile", gate.python, *paths, expected_digests[facts.BUNDLE])
        yield actions.Script("compile", words, f"compile {facts.BUNDLE} for {gate.python}")
    yield from _files(snapshot, policy, facts.POLICY)


@step(settings=_SCRIPTS)
def timer(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Make the node check itself: by a systemd timer, or by cron where systemd does not run."""
    gate: facts.Gate = snapshot["gate"]
    if gate.systemd:
        yield from _files(snapshot, policy, facts.RECORD, facts.SERVICE, facts.TIMER)
        yield _RELOAD
        yield actions.RunCommand(("systemctl", "enable", "nodeready.timer"))
        # Without a restart, a timer that runs keeps its old interval.
        yield actions.RunCommand(("systemctl", "restart", "nodeready.timer"))
        obsolete = [facts.CRON]
    else:
        yield from _files(snapshot, policy, facts.RECORD, facts.CRON)
        obsolete = [facts.WANTED, facts.TIMER, facts.SERVICE]
    for path in obsolete:
        if path in gate.existing:
            yield actions.RemoveFile(path, snapshot.files.get(path, b""))


@step(settings=_SCRIPTS)
def slurm(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Write the programs that slurm.conf can name. That file itself is the administrator's."""
    yield from _files(snapshot, policy, facts.PROLOG, facts.HEALTH_CHECK)


STEPS = (leftover, program, timer, slurm)
