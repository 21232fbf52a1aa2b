"""The snapshot of a node: one request brings all subjects.

A node that cannot be asked has no snapshot; a subject that cannot be read is Unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nodeready.agent.asking import Answer, Conversation, Request
from nodeready.core import probe_script
from nodeready.core.base import Probe
from nodeready.core.outcome import HUNG, LOST, OVER, GapError
from nodeready.core.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.snapshot import Snapshot

PROBE_TIMEOUT_S = 60  # seconds for a snapshot on a node; each section has a smaller limit


@dataclass(frozen=True)
class SnapshotQuestion:
    """The request for a snapshot, and what is needed to read its answer."""

    request: Request
    policy: Policy
    probes: tuple[Probe, ...]
    nonce: str

    def all_unknown(self, reason: str, evidence: str = "") -> Snapshot:
        """The snapshot of a node that cannot be asked: everything is Unknown."""
        return snapshot.unknown_snapshot(reason, self.probes, evidence)

    def read(self, answer: Answer) -> Snapshot:
        """The snapshot in the answer; everything is Unknown in an answer without one."""
        if answer.gap:
            return self.all_unknown(answer.gap.reason)
        if probe_script.mark(self.nonce) not in answer.stdout:
            text = f"{answer.stderr}\n{answer.stdout}".strip()
            return self.all_unknown("no answer from the node's shell", text)
        return snapshot.read(answer.stdout, self.probes, self.policy, self.nonce)


Read = Callable[[SnapshotQuestion, Answer], Snapshot]


def snapshot_question(
    node: str,
    policy: Policy,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
    margin_s: int = probe_script.MARGIN_S,
    *,
    nonce: str = "",
) -> SnapshotQuestion:
    """subjects: subjects to probe; None: all
    limit_s:  seconds after which the probe is ended on the node
    margin_s: of these, for the sections after a slow one
    nonce:    a random word (`Transport.nonce`); "": a new one
    """
    chosen, nonce = snapshot.probes(subjects), nonce or os.urandom(8).hex()
    text = probe_script.make_script(snapshot.sections(chosen), policy, nonce, limit_s, margin_s)
    request = Request(node, text, limit_s, mark=probe_script.mark(nonce), reads=True)
    return SnapshotQuestion(request, policy, chosen, nonce)


def take_snapshot(
    node: str,
    policy: Policy,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
    read: Read = SnapshotQuestion.read,
    *,
    nonce: str = "",
) -> Conversation[Snapshot]:
    """The conversation that takes the snapshot of one node; see `snapshot_question`.

    read: makes the snapshot of the answer

    Raises GapError.
    """
    question = snapshot_question(node, policy, subjects, limit_s, nonce=nonce)
    answer = yield question.request
    if answer.gap and answer.gap.kind in OVER - {HUNG}:
        is_lost = answer.gap.kind == LOST
        reason = f"{answer.gap.reason} while looking" if is_lost else answer.gap.reason
        raise GapError(answer.gap._replace(reason=reason))
    return read(question, answer)
