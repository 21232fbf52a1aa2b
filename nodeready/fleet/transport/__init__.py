"""TRANSPORT: a script to many nodes, one answer back from each. It neither parses nor judges.

`nodeready.agent.asking` has the interface: a `Transport` answers each `Request` once, with an
`Answer`, in the order in which answers come; `asking.request` makes the request for a node
program. The transports here are `ssh` (pyinfra's connectors), `srun` (a step of a Slurm job),
`clush` (ClusterShell's workers and gateways) and `processes` (children of this process, each with
its own nodes). This machine alone is `nodeready.agent.local`.
"""

from collections.abc import Callable

Note = Callable[[str], object]  # shows the user a line


def ignore(line: str) -> None:
    """Show the user nothing."""
