"""Install the node's own check, its timer and the programs that Slurm runs; or remove them all."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.core.shell import PYTHONS
from nodeready.fleet.transport import bundle
from nodeready.runs.deploy.actions import (
    Action,
    PlanError,
    RemoveFile,
    RunCommand,
    Script,
    WriteFile,
)
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.gate.checks import required_programs, uncompiled
from nodeready.subjects.gate.facts import (
    BUNDLE,
    COMPILED,
    CRON,
    DIRECTORY,
    FILES,
    HEALTH_CHECK,
    NOTE,
    POLICY,
    PROGRAMS,
    PROLOG,
    RECORD,
    ROOTS,
    SERVICE,
    TIMER,
    VERDICT,
    WANTED,
    Gate,
)
from nodeready.subjects.gate.files import contents, digests, document
from nodeready.subjects.snapshot import Snapshot

#: Seconds for a change that carries the bundle over a slow connection.
_TIMEOUT_S = 120
#: The settings in the scripts and in the timer's files.
_SCRIPTS = ("gate_interval_s", "gate_budget_s")
_RELOAD = RunCommand(("systemctl", "daemon-reload"))


def _files(snapshot: Snapshot, policy: Policy, *paths: str) -> Iterator[Action]:
    """Write those of our files that are not as they should be."""
    gate: Gate = snapshot["gate"]
    for path in paths:
        content, old = contents(policy, bundle.program)[path], snapshot.files.get(path)
        program = path in PROGRAMS
        if path in gate.existing and old == content:
            # An existing file keeps its mode when it is written.
            if program and path not in gate.runs:
                yield RunCommand(("chmod", "0755", path))
            continue
        yield WriteFile(path, content, old, mode="0755" if program else "0644", owned=True)
        if program and path in gate.existing:
            yield RunCommand(("chmod", "0755", path))


@step(settings=("gate_textfile",))
def leftover(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Remove the node's own check, first the files that start it; never a program that slurm.conf
    names.
    """
    gate: Gate = snapshot["gate"]
    staying = required_programs(gate)
    gone = [path for path in FILES if path in gate.existing and path not in staying]
    if gate.systemd and TIMER in gone:
        yield RunCommand(("systemctl", "disable", "--now", "nodeready.timer"))
    for path in gone:
        yield RemoveFile(path, snapshot.files.get(path, b""))
    for path in (VERDICT, policy.gate_textfile):
        if path:
            yield RemoveFile(path)
    if gate.systemd and (TIMER in gone or SERVICE in gone):
        yield _RELOAD
    if not staying:
        yield RunCommand(
            ("sh", "-c", f"rmdir {DIRECTORY} 2>/dev/null || :"), f"remove {DIRECTORY}"
        )


@step(timeout_s=_TIMEOUT_S, settings=json.loads(document(Policy())))
def program(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Write nodeready as one file that the node's Python can run, compile it, write the policy.

    Raises PlanError for a Python that was not asked for.
    """
    gate: Gate = snapshot["gate"]
    expected_digests = dict(digests(policy, bundle.program))
    if gate.python not in PYTHONS:
        raise PlanError(f"{gate.python[:100]!r} is no Python that nodeready asks for")
    exposed = [path for path in ROOTS if path in gate.exposed]
    if exposed:
        yield RunCommand(("chown", "0:0", "--", *exposed))
        yield RunCommand(("chmod", "go-w", "--", *exposed))
    new = (gate.digests or {}).get(BUNDLE) != expected_digests[BUNDLE]
    if new:
        test = '"$0" -I "$1" --version >/dev/null 2>&1 || { echo "it does not run"; exit 1; }'
        yield WriteFile(
            BUNDLE,
            contents(policy, bundle.program)[BUNDLE],
            b"" if BUNDLE in gate.existing else None,
            validator=("sh", "-c", test, gate.python),
            large=True,
        )
    # Until the new program is compiled, the node runs the old program by the old policy.
    if new or exposed or uncompiled(gate):
        words = ("nr_compile", gate.python, BUNDLE, COMPILED, NOTE, expected_digests[BUNDLE])
        yield Script("compile", words, f"compile {BUNDLE} for {gate.python}")
    yield from _files(snapshot, policy, POLICY)


@step(settings=_SCRIPTS)
def timer(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Make the node check itself: by a systemd timer, or by cron where systemd does not run."""
    gate: Gate = snapshot["gate"]
    if gate.systemd:
        yield from _files(snapshot, policy, RECORD, SERVICE, TIMER)
        yield _RELOAD
        yield RunCommand(("systemctl", "enable", "nodeready.timer"))
        # Without a restart, a timer that runs keeps its old interval.
        yield RunCommand(("systemctl", "restart", "nodeready.timer"))
        obsolete = [CRON]
    else:
        yield from _files(snapshot, policy, RECORD, CRON)
        obsolete = [WANTED, TIMER, SERVICE]
    for path in obsolete:
        if path in gate.existing:
            yield RemoveFile(path, snapshot.files.get(path, b""))


@step(settings=_SCRIPTS)
def slurm(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Write the programs that slurm.conf can name. That file itself is the administrator's."""
    yield from _files(snapshot, policy, PROLOG, HEALTH_CHECK)


STEPS = (leftover, program, timer, slurm)
