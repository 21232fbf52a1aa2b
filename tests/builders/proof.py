"""The program of the proofs on a lab node, and what it may leave there."""

import platform
import secrets

from nodeready.agent import payload
from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.runs.deploy import py_spy_binary
from nodeready.subjects.proof import checks as proof
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import (
    Attach,
    Control,
    DebuggerAttempt,
    Guards,
    Limit,
    Proved,
    SessionLimits,
    Tracers,
    User,
)
from tests.builders.judging import by_name

SPY = "/usr/local/bin/py-spy"
TAG = "nodeready:test"

#: What the lab's nodes give to a login, whatever the machine is.
ANY_LIMITS = Policy(limit_core="0", limit_memlock="0", limit_nofile=256)

GOOD = DebuggerAttempt("/usr/local/bin/py-spy", good=True, limit_s=10, state="S")
NO_GUARDS = Guards(None, None, capable=False, bounded=False)
AS_ROOT = Guards(None, None, capable=True, bounded=False)
LIMITS = SessionLimits(*[Limit(-1, -1)] * 2, Limit(1048576, 1048576), (), (), 1048576)

#: A node on which everything is as it should be.
WELL = Proved(
    User("ml", 2000, True, ""),
    limits=LIMITS,
    attach=Attach(NO_GUARDS, "", GOOD, GOOD, GOOD),
    control=Control(AS_ROOT, "", GOOD),
    tracers=Tracers(NO_GUARDS, "", GOOD, GOOD),
)


def put_py_spy(node: LabNode) -> None:
    """The real one, as a deploy puts it."""
    node.write(SPY, py_spy_binary.binary(Policy().py_spy_version, platform.machine()), mode=0o755)


def configured(
    user="ml", limit_s=40, wanted=("limits", "attach", "tracers")
) -> proved.ProofConfig:
    nonce = f"nodeready-{secrets.token_hex(8)}"
    return proved.ProofConfig(nonce, TAG, user=user, proofs=wanted, limit_s=limit_s)


def line(config: proved.ProofConfig) -> shell.ShellCommand:
    """The command as it travels."""
    made = payload.program("nodeready.agent.proofs.program", config)
    return shell.command(made.script, config.limit_s + 2, TAG, made.text)


def prove(node: LabNode, login="root", **how) -> Proved:
    """What the program sees there, in the session of the job's user; and it leaves nothing."""
    config = configured(**how)
    before = processes(node)
    command = line(config)
    done = node.run(command.line, user=login, input=command.stdin, check=False)
    assert not done.stderr, done.stderr
    assert processes(node) == before
    return proved.read(done.stdout, config)


def processes(node: LabNode) -> list[str]:
    """What runs on the node, but for the logins that just end."""
    rows = node.enter(["ps", "-eww", "-o", "pid,comm,args"]).stdout.splitlines()[1:]
    return [row[:90] for row in rows if row.split()[1] not in ("ps", "sshd")]


def judged(seen: Proved, want: Policy = ANY_LIMITS) -> dict[str, tuple[str, str]]:
    """Name of the check -> its status and what it found; those that nobody asked for left out."""
    results = by_name(proof, seen, want)
    return {n: (r.status, r.actual) for n, r in results.items() if r.actual != "not proved"}


def statuses(seen: Proved) -> dict[str, str]:
    return {name: status for name, (status, _) in judged(seen).items()}
