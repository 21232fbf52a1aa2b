"""The result of a smoke test as a proof of `nodeready ready`. Pure."""

from __future__ import annotations

from nodeready.core.result import join_first
from nodeready.runs.smoke.document import UNREACHABLE, UNTESTED, SmokeReport
from nodeready.runs.smoke.engine_choice import MISSING_ENGINE
from nodeready.runs.smoke.idle_gpus import list_numbers
from nodeready.runs.smoke.knowledge import GPU, PAIR, SCALE
from nodeready.runs.smoke.networks import describe
from nodeready.subjects.proof.facts import ProvedCollective


def collective_proofs(smoke: SmokeReport) -> dict[str, ProvedCollective]:
    """Node -> its proof for `nodeready ready`; a test that ended early proves nothing."""
    evidence: dict[str, list[str]] = {}
    for suspect in smoke.suspects:
        for name in suspect.nodes:
            peers = join_first((peer for peer in suspect.nodes if peer != name), ", ")
            start = {
                PAIR: f"with {peers}: ",
                GPU: f"GPU {list_numbers([*suspect.gpus])}: " if suspect.gpus else "",
                SCALE: f"only together with {peers}: ",
            }.get(suspect.kind, "")
            evidence.setdefault(name, []).append(start + "; ".join(suspect.evidence))
    rows = {}
    for node in smoke.nodes:
        is_out = node.status in (UNTESTED, UNREACHABLE)
        reason = (node.absence or "not tested") if is_out else smoke.stopped
        rows[node.name] = ProvedCollective(
            nodes=len(smoke.nodes),
            engine=smoke.engine,
            proves=smoke.proves,
            against=tuple(evidence.get(node.name, ())),
            untested=reason,
            lacking=is_out and not smoke.engine and reason.startswith(MISSING_ENGINE),
            warnings=node.warnings,
            network=describe(node.network, node.interface, node.hcas, node.gdr),
        )
    return rows
