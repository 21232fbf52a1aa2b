"""Look at a node and change it with plain commands, without the command line around it.

`run` runs one command on a node as root and returns what it said, whatever its exit status:
`on(node)` of a lab node, or any function like it.
"""

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from nodeready.core import probe_script, shell
from nodeready.core.policy import Policy
from nodeready.runs.deploy.actions import StepChange
from nodeready.runs.deploy.pyinfra import DeployStep
from nodeready.subjects import snapshot
from nodeready.subjects.snapshot import Snapshot
from tests.paths import ROOT

Done = subprocess.CompletedProcess[str]
Runner = Callable[..., Done]


class _Node(Protocol):
    def run(self, command: str, *, input: str | None = ..., check: bool = ...) -> Done: ...


def on(node: _Node) -> Runner:
    """The runner of a lab node: over ssh, as root."""

    def run(command: str, stdin: str = "") -> Done:
        return node.run(command, input=stdin, check=False)

    return run


def here(command: str, stdin: str = "") -> Done:
    """The runner of this machine: only to look."""
    return subprocess.run(
        ["sh", "-c", command], input=stdin, capture_output=True, text=True, check=False
    )


def observe(run: Runner, policy: Policy, subjects: Iterable[str] | None = None) -> Snapshot:
    """What the probes of these subjects (None: all) see on the node."""
    chosen, nonce = snapshot.probes(subjects), secrets.token_hex(6)
    text = probe_script.make_script(snapshot.sections(chosen), policy, nonce)
    done = run(*shell.command(text, 60, "nodeready:test"))
    return snapshot.read(done.stdout, chosen, policy, nonce)


def plan(seen: Snapshot, policy: Policy, steps: Iterable[DeployStep]) -> list[StepChange]:
    """What these steps would do."""
    return [change for step in steps if (change := step.plan(seen, policy)) is not None]


def apply(run: Runner, changes: Iterable[StepChange]) -> None:
    """Carry the changes out. Raises AssertionError with the step's own words when one fails."""
    for change in changes:
        text = change.script("test", "root@test", 5)
        payload = change.stdin() or None
        done = run(*shell.command(text, change.timeout_s, "nodeready:test", payload))
        assert done.returncode == 0, f"{change.step}: {done.stderr.strip()}"


def executable(path: Path, text: str) -> str:
    """A program at this path: of sh, unless it names its interpreter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def project(*words: object, status: int | None = None) -> Done:
    """Run a program in the checkout, without a terminal. status: the only one that is right"""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    assert status in (None, done.returncode), done
    return done


def nodeready(*words: object, status: int | None = None) -> Done:
    """Run this project's command, as a user would from the checkout."""
    return project(sys.executable, "-m", "nodeready", *words, status=status)
