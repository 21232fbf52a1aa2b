"""Ready: which nodes may get the job. The document that the reports of `nodeready ready` show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from nodeready import readiness
from nodeready.audit import FAILED, UNREACHABLE, Audit, NodeReport
from nodeready.probes.gpu import Gpus


@dataclass(frozen=True)
class Ready:
    """The audit with the proofs among its results, and what follows from it.

    budget_s: seconds that it was allowed to take
    needed:   nodes that have to be ready; None: all of them
    """

    audit: Audit
    budget_s: int
    needed: int | None = None

    @cached_property
    def go(self) -> tuple[str, ...]:
        """The nodes that are ready, in the inventory's order."""
        return tuple(node.name for node in self.audit.nodes if _ready(node))

    @cached_property
    def no_go(self) -> Mapping[str, tuple[str, ...]]:
        """The others, each with its reasons: ``CHECK: what is``, ``unreachable: why``."""
        return {node.name: _reasons(node) for node in self.audit.nodes if not _ready(node)}

    @property
    def enough(self) -> bool:
        """Whether the job can start."""
        wanted = len(self.audit.nodes) if self.needed is None else self.needed
        return self.audit.complete and len(self.go) >= max(1, wanted)


def _ready(node: NodeReport) -> bool:
    return node.status not in (UNREACHABLE, FAILED) and readiness.go(node.results)


def _reasons(node: NodeReport) -> tuple[str, ...]:
    if node.error:
        return (f"{node.status}: {node.error}",)
    return tuple(readiness.reasons(node.results))


def slots(node: NodeReport) -> int:
    """The job's processes that a node holds: its GPUs; 1 where there is none."""
    gpus = node.snapshot.subjects.get("gpus") if node.snapshot else None
    return max(1, len(gpus.gpus)) if isinstance(gpus, Gpus) else 1
