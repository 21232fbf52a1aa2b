"""Environments of a job, as `nodeready env` shows them: one per outcome."""

from collections.abc import Iterable

from nodeready.core.base import Unknown
from nodeready.core.outcome import INVALID, UNREACHABLE, NodeGap
from nodeready.runs.ready import environment as debug_variables
from nodeready.runs.ready import job_env
from nodeready.runs.ready.job_env import Environment
from nodeready.subjects.snapshot import Snapshot
from tests.builders.job_env import FLEET, POLICY, nics, node, ports, rdma, socket

WHEN = "2026-03-01T12:00:00Z"
#: What a node must not be able to run or to show.
EVIL = "x'; touch pwned; $(touch pwned)`touch pwned`\ntouch pwned\r\x85\u2028touch pwned\x1b[2J"


def environment(nodes: Iterable[Snapshot], gaps: tuple[NodeGap, ...] = ()) -> Environment:
    snapshots = {f"gpu{number:03}": each for number, each in enumerate(nodes, 1)}
    variables = job_env.variables(snapshots, dict.fromkeys(snapshots, POLICY), FLEET)
    return Environment(WHEN, tuple(snapshots), gaps, variables)


ENVIRONMENTS = {
    "good": environment([node()] * 64),
    "one": environment([node(rdma=rdma())]),
    "differs": environment(
        [*[node()] * 63, node(nics=nics("eth1"), rdma=rdma(), ports=ports(socket(29500)))],
        (
            NodeGap("gpu065", UNREACHABLE, "no answer in 15 s"),
            NodeGap("gpu066", INVALID, EVIL),
        ),
    ),
    "halves": environment([node(), node(nics=nics("eth1", "eth0"))]),
    "unknown": environment([node(), node(), node(ports=Unknown("timed out"))]),
    "blind": environment([Snapshot()]),
    "hostile": environment(
        [
            node(nics=nics("$(reboot)"), ports=ports(socket(29500, EVIL))),
            node(rdma=rdma("mlx5_0;id")),
            node(ports=ports(socket(29501, EVIL))),
            node(nics=Unknown(EVIL), ports=Unknown(EVIL)),
        ]
    ),
    "debug": Environment(
        WHEN,
        ("gpu001",),
        (),
        debug_variables.debug_variables(
            {"gpu001": debug_variables.InstalledTorch(reason=EVIL)}, "/share/fr", "0a1b"
        ),
    ),
    "taken": environment([node(ports=ports(*(socket(p, f"j{p}") for p in range(29500, 29511))))]),
}
