"""Documents of deploys: one per outcome."""

from dataclasses import replace

from nodeready.core.outcome import FAILED, LOST, SUDO, UNREACHABLE, Gap
from nodeready.core.result import Result
from nodeready.runs.deploy.actions import (
    MakeDirectory,
    RemoveFile,
    RunCommand,
    Script,
    StepChange,
    WriteFile,
)
from nodeready.runs.deploy.command import NodePlan
from nodeready.runs.deploy.document import Deploy, DeployedNode, DeployOutcome
from tests.builders.fleets import FINISHED, HOSTILE, SCOPE, STARTED
from tests.builders.results import fail, ok, unknown

NOTHING = NodePlan()
FILE = WriteFile("/etc/sysctl.d/60-nodeready.conf", b"kernel.yama.ptrace_scope = 0\n", b"# ours\n")
SYSCTL = StepChange(
    "ptrace.sysctl", ("ptrace.scope",), (FILE, RunCommand(("sysctl", "-w", "x=0"))), ("ptrace",)
)
INSTALL = (
    MakeDirectory("/opt/nodeready", "0755"),
    WriteFile("/opt/nodeready/py-spy", b"\x7fELF", None, large=True),
    RemoveFile("/usr/local/bin/py-spy", b"old\n"),
    Script("packages", ("nr_install", "gdb"), "install gdb"),
)
NO_USER = {"pdsh.pdshrc": "user ml: no such user on this node"}
PTRACE = NodePlan((SYSCTL,))
MANY = NodePlan(
    (SYSCTL, StepChange("debug_tools.py_spy", ("debug_tools.py_spy",), INSTALL, ("debug_tools",))),
    NO_USER,
)
PY_SPY = replace(SCOPE, check="debug_tools.py_spy", expected="0.4.3", actual="missing")
IOMMU = fail("iommu.args", "iommu=pt", "not set", "/proc/cmdline", "add it and reboot")
MUTE = unknown("limits.core", "timed out")


def node(name: str, plan: NodePlan = NOTHING, *results: Result) -> DeployedNode:
    return DeployedNode.of(name, plan, results or (ok("ptrace.scope", "0"),))


def planned() -> tuple[DeployedNode, ...]:
    """Every kind of node that a plan has."""
    return (
        node("gpu001", PTRACE, SCOPE, IOMMU),
        node("gpu002", PTRACE, SCOPE, IOMMU),
        node("gpu003", MANY, SCOPE, PY_SPY),
        node("gpu004"),
        node("gpu005", NodePlan(), MUTE),
        node("gpu006", NodePlan(), IOMMU),
        DeployedNode("gpu007", Gap(UNREACHABLE, "10.1.0.7: no answer in 15 s")),
        DeployedNode("gpu008", Gap(SUDO, "sudo wants a password")),
    )


def check() -> Deploy:
    return Deploy(STARTED, FINISHED, True, ("ptrace", "debug_tools"), planned())


def result() -> Deploy:
    """The same after it ran: done, failed, lost, not fixed."""
    done, lost, failed, *others = planned()
    left = (replace(PY_SPY, actual="0.3.0"),)
    cut = DeployOutcome(interrupted_step="ptrace.sysctl")
    some = DeployOutcome(("ptrace.sysctl",), NO_USER, unrepaired=left, complete=True)
    not_fixed = DeployOutcome(unrepaired=(SCOPE,), complete=True)
    nodes = (
        replace(done, outcome=DeployOutcome(("ptrace.sysctl",), complete=True)).judged([IOMMU]),
        replace(lost, gap=Gap(LOST, "lost in ptrace.sysctl"), outcome=cut),
        replace(failed, outcome=some).judged([*left]),
        *others,
        replace(node("gpu009", PTRACE, SCOPE), outcome=not_fixed).judged([SCOPE]),
    )
    return Deploy(STARTED, FINISHED, False, ("ptrace", "debug_tools"), nodes)


def well() -> Deploy:
    return Deploy(STARTED, FINISHED, False, ("ptrace",), (node("gpu001"), node("gpu002")))


def interrupted() -> Deploy:
    one, two, *others = planned()
    one = replace(one, outcome=DeployOutcome(("ptrace.sysctl",), complete=True)).judged([])
    two = replace(two, outcome=DeployOutcome(interrupted_step="ptrace.sysctl"))
    return Deploy(STARTED, FINISHED, False, ("ptrace",), (one, two, *others), False)


def hostile() -> Deploy:
    """Everything that a node may say is bad."""
    bad = replace(SCOPE, actual=HOSTILE, source=HOSTILE, fix=HOSTILE)
    file = replace(FILE, old=HOSTILE.encode("utf-8", "replace"))
    plan = NodePlan((StepChange(HOSTILE, ("ptrace.scope",), (file,)),), {HOSTILE: HOSTILE})
    one = replace(
        node(HOSTILE, plan, bad),
        outcome=DeployOutcome((HOSTILE,), {HOSTILE: HOSTILE}, HOSTILE, (bad,), True),
        for_a_person=(replace(bad, owner="admin"),),
    )
    return Deploy(
        STARTED, FINISHED, False, ("ptrace",), (one, DeployedNode(HOSTILE, Gap(FAILED, HOSTILE)))
    )


DEPLOYS = {
    "check": check, "result": result, "well": well, "interrupted": interrupted, "hostile": hostile,
}  # fmt: skip
