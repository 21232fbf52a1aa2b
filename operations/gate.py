"""Install the node's own check, its timer and the programs that Slurm runs; or remove them all."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.deploy.actions import Action, PlanError, RemoveFile, Run, Script, WriteFile
from nodeready.deploy.step import step
from nodeready.policy import Policy
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
    PYTHONS,
    RECORD,
    ROOTS,
    SERVICE,
    TIMER,
    VERDICT,
    WANTED,
    Gate,
)
from nodeready.subjects.gate.files import contents
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport import bundle

#: Seconds for a change that carries the bundle over a slow connection.
_TIMEOUT_S = 120
_RELOAD = Run(("systemctl", "daemon-reload"))


def _files(seen: Snapshot, want: Policy, *paths: str) -> Iterator[Action]:
    """Write those of our files that are not as they should be."""
    there: Gate = seen["gate"]
    for path in paths:
        content, old = contents(want, bundle.program)[path], seen.files.get(path)
        program = path in PROGRAMS
        if path in there.there and old == content:
            # An existing file keeps its mode when it is written.
            if program and path not in there.runs:
                yield Run(("chmod", "0755", path))
            continue
        yield WriteFile(path, content, old, mode="0755" if program else "0644", owned=True)
        if program and path in there.there:
            yield Run(("chmod", "0755", path))


@step()
def leftover(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Take the node's own check away, what starts it first; never what slurm.conf still names."""
    there: Gate = seen["gate"]
    staying = required_programs(there)
    gone = [path for path in FILES if path in there.there and path not in staying]
    if there.systemd and TIMER in gone:
        yield Run(("systemctl", "disable", "--now", "nodeready.timer"))
    for path in gone:
        yield RemoveFile(path, seen.files.get(path, b""))
    for path in (VERDICT, want.gate_textfile):
        if path:
            yield RemoveFile(path)
    if there.systemd and (TIMER in gone or SERVICE in gone):
        yield _RELOAD
    if not staying:
        yield Run(("sh", "-c", f"rmdir {DIRECTORY} 2>/dev/null || :"), f"remove {DIRECTORY}")


@step(timeout_s=_TIMEOUT_S)
def program(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Write nodeready as one file that the node's Python can run, compile it, write the policy.

    Raises PlanError for a Python that was not asked for.
    """
    there: Gate = seen["gate"]
    wanted = dict(getattr(want, "gate_files", ()))
    if there.python not in PYTHONS:
        raise PlanError(f"{there.python[:100]!r} is no Python that nodeready asks for")
    exposed = [path for path in ROOTS if path in there.exposed]
    if exposed:
        yield Run(("chown", "0:0", "--", *exposed))
        yield Run(("chmod", "go-w", "--", *exposed))
    new = (there.digests or {}).get(BUNDLE) != wanted.get(BUNDLE)
    if new:
        test = '"$0" -I "$1" --version >/dev/null 2>&1 || { echo "it does not run"; exit 1; }'
        yield WriteFile(
            BUNDLE,
            contents(want, bundle.program)[BUNDLE],
            b"" if BUNDLE in there.there else None,
            validator=("sh", "-c", test, there.python),
            large=True,
        )
    # Until the new program is compiled, the node runs the old program by the old policy.
    if new or exposed or uncompiled(there):
        words = ("nr_compile", there.python, BUNDLE, COMPILED, NOTE, wanted[BUNDLE])
        yield Script("compile", words, f"compile {BUNDLE} for {there.python}")
    yield from _files(seen, want, POLICY)


@step()
def timer(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Have the node look at itself: by a systemd timer, or by cron where systemd does not run."""
    there: Gate = seen["gate"]
    if there.systemd:
        yield from _files(seen, want, RECORD, SERVICE, TIMER)
        yield _RELOAD
        yield Run(("systemctl", "enable", "nodeready.timer"))
        # Without a restart, a timer that runs keeps its old interval.
        yield Run(("systemctl", "restart", "nodeready.timer"))
        others = [CRON]
    else:
        yield from _files(seen, want, RECORD, CRON)
        others = [WANTED, TIMER, SERVICE]
    for path in others:
        if path in there.there:
            yield RemoveFile(path, seen.files.get(path, b""))


@step()
def slurm(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Write the programs that slurm.conf can name. That file itself is the administrator's."""
    yield from _files(seen, want, PROLOG, HEALTH_CHECK)


STEPS = (leftover, program, timer, slurm)
