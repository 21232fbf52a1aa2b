"""Audits of nodes that do not exist: one per outcome, and fleets of any size."""

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from nodeready.agent.asking import INTERRUPT
from nodeready.agent.audit_document import Audit, NodeReport, Outlier
from nodeready.core.base import Unknown
from nodeready.core.outcome import SUDO, UNREACHABLE, Gap
from nodeready.core.policy import Policy
from nodeready.core.result import Result, waive
from nodeready.core.settings import Waiver
from nodeready.subjects.registry import page
from nodeready.subjects.snapshot import Snapshot
from tests.builders.results import fail, fixable, na, ok, unknown, warn

STARTED, FINISHED = "2030-01-02T03:04:05Z", "2030-01-02T03:04:17Z"
DIGEST = "0123456789abcdef"

#: What a node must not be able to do in a report.
HOSTILE = (
    "\x1b[31mred\x1b[0m <b>&\"'</b> [bold]x[/bold] a|b {c} \\ \u202eecho\r\n\x00\x9b2J \udcff"
    " \uffff ]]> nodeready_node_up 1 %s $(id) ;;;0"
)


@dataclass(frozen=True)
class Ptrace:
    """Facts of the kinds that observations have."""

    live: int | None = 0
    next_boot: int | None = None
    winner: str | None = "/etc/sysctl.d/60-nodeready.conf:1"
    temperature_c: float = 41.5
    modes: tuple[str, ...] = ("a", "b")
    limits: Any = field(default_factory=lambda: MappingProxyType({"core": (0, 1)}))


def good(extra: int = 0) -> list[Result]:
    """The results of a node that is well; ``extra`` of its checks do not apply."""
    passed = [
        ok("ptrace.scope", "0", "0", "/proc/sys/kernel/yama/ptrace_scope"),
        ok("limits.core", "unlimited"),
        ok("limits.memlock", "unlimited"),
        ok("pdsh.rcmd", "ssh"),
    ]
    apart = [na("iommu.args", "no AMD Instinct GPU"), na("pdsh.pdshrc", "no users named")]
    return [*passed, *apart[: 1 + extra % 2]]


def swap(results: list[Result], *others: Result) -> list[Result]:
    """``results`` with others in place of those of the same id."""
    new = {result.check: result for result in others}
    return [new.pop(result.check, result) for result in results] + list(new.values())


def rated(result: Result) -> Result:
    return page(result.check).rated(result)


SCOPE = rated(fixable("ptrace.scope", "0", "1", "/etc/sysctl.d/10-ptrace.conf:3"))
MEMLOCK = rated(warn("limits.memlock", "unlimited", "65536 KiB", "/etc/security/limits.conf:9",
               "delete that line"))  # fmt: skip
RCMD = rated(
    fail("pdsh.rcmd", "ssh", "rsh", "/etc/profile.d/site.sh:2", "set PDSH_RCMD_TYPE=ssh there")
)


def node(name: str, *others: Result, **more: Any) -> NodeReport:
    """A node that was looked at."""
    seen = Snapshot({"ptrace": Ptrace(), "limits": Unknown("timed out", "x")})
    results = swap(good(), *others)
    return NodeReport.of(name, results, snapshot=seen, seconds=0.25, groups=("gpu",), **more)


def lost(name: str, why: str = "") -> NodeReport:
    why = why or f"{name}: connection refused: is sshd running?"
    return NodeReport.of(name, gap=Gap(UNREACHABLE, why), groups=("gpu",))


def audit(*nodes: NodeReport, outliers: tuple[Outlier, ...] = (), complete: bool = True) -> Audit:
    return Audit(STARTED, FINISHED, DIGEST, nodes, outliers, complete)


def _waived(name: str) -> NodeReport:
    policy = replace(
        Policy(), waivers=(Waiver("pdsh.rcmd", "until the login node moves, ticket 4711"),)
    )
    results = waive(swap(good(), RCMD), policy, "2026-11-26")
    return NodeReport.of(name, results, snapshot=Snapshot({"ptrace": Ptrace()}), seconds=0.3)


_DRIVER = Outlier(
    "gpus.driver", "h100", "535.161.08", 61,
    {"gpu002": "535.129.03", "gpu003": "550.54.14", "gpu004": None},
)  # fmt: skip
_MTU = Outlier("nics.eth0.mtu", "gpu", 9000, 63, {"gpu002": 1500})


def _hostile() -> Audit:
    seen = Snapshot({"ptrace": Ptrace(winner=HOSTILE), "limits": Unknown(HOSTILE)})
    results = swap(
        good(),
        Result("ptrace.scope", "fail", HOSTILE, HOSTILE, HOSTILE, HOSTILE, "admin"),
        Result("limits.core", "unknown", actual=HOSTILE * 100),
    )
    return audit(
        NodeReport.of("gpu001", results, snapshot=seen, seconds=0.1),
        lost("gpu002", HOSTILE),
        outliers=(Outlier("gpus." + HOSTILE, "gpu", HOSTILE, 2, {"gpu001": HOSTILE * 9}),),
    )


def _mixed() -> Audit:
    """Every status of a node, every status of a check, outliers, hostile texts; interrupted."""
    hostile = _hostile()
    return audit(
        node("gpu003"),
        node("gpu004", MEMLOCK),
        node("gpu005", SCOPE, RCMD),
        node("gpu006", SCOPE, MEMLOCK),
        node("gpu007", unknown("limits.observed", "timed out")),
        _waived("gpu008"),
        lost("gpu009"),
        lost("gpu010"),
        NodeReport.of(
            "gpu011", gap=Gap(SUDO, "sudo wants a password: run on a terminal to be asked")
        ),
        NodeReport.of("gpu012", gap=INTERRUPT),
        *hostile.nodes,
        outliers=(_DRIVER, _MTU, *hostile.outliers),
        complete=False,
    )


def outcomes() -> dict[str, Audit]:
    """One audit per outcome, and `mixed`: all of them in one document."""
    well = [node(f"gpu{number:03}") for number in range(1, 4)]
    left = NodeReport.of("gpu004", gap=INTERRUPT)
    sudo = NodeReport.of(
        "gpu004", gap=Gap(SUDO, "sudo wants a password: run on a terminal to be asked")
    )
    return {
        "ok": audit(*well),
        "warn": audit(*well, node("gpu004", MEMLOCK)),
        "fail": audit(*well, node("gpu004", SCOPE, RCMD), node("gpu005", SCOPE, MEMLOCK)),
        "unknown": audit(*well, node("gpu004", unknown("limits.observed", "timed out"))),
        "waived": audit(*well, _waived("gpu004")),
        "unreachable": audit(*well, lost("gpu004"), lost("gpu005")),
        "failed": audit(*well, sudo),
        "partial": audit(*well, left, complete=False),
        "outliers": audit(*well, node("gpu004"), outliers=(_DRIVER, _MTU)),
        "hostile": _hostile(),
        "one": audit(node("@local", SCOPE)),
        "mixed": _mixed(),
    }


def fleet(count: int) -> Audit:
    """A fleet with what fleets have: some nodes down, some drift, one check with many texts."""
    nodes = []
    for number in range(1, count + 1):
        name, others = f"gpu{number:04}", list[Result]()
        if number % 97 == 5:
            nodes.append(lost(name, f"10.1.{number // 256}.{number % 256}: no answer in 15 s"))
            continue
        if number % 10 == 3:
            others.append(SCOPE)
        if number % 6 == 1:
            text = f"gpu {number % 8} (0000:{number % 99:02x}:00.0): {number} uncorrectable errors"
            others.append(fail("gpus.ecc_errors", "0", text, "nvidia-smi", "replace the GPU"))
        if number % 50 == 2:
            others.append(MEMLOCK)
        if number % 40 == 7:
            others.append(unknown("debug_tools.observed", "timed out"))
        nodes.append(node(name, *others) if number % 31 else _waived(name))
    apart = Outlier("gpus.driver", "h100", "535.161.08", count - 1, {"gpu0001": "535.129.03"})
    return audit(*nodes, outliers=(apart,) if count > 2 else ())


def crowd(findings: int, count: int = 1000) -> Audit:
    """Nodes with very many different findings."""
    nodes = [
        node(f"gpu{number:04}", *(
            fail(f"host.check_{i}", "on", f"off for {i} days", "/proc/x", f"turn on {i}")
            for i in range(findings) if (number + i) % 7 == 0
        ))
        for number in range(1, count + 1)
    ]  # fmt: skip
    return audit(*nodes)
