"""The snapshot of a node: one request brings all subjects.

A node that cannot be asked has no snapshot; a subject that cannot be read is Unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nodeready.policy import Policy
from nodeready.subjects import probe_script, snapshot
from nodeready.subjects.base import Probe
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport.base import (
    HUNG,
    INTERRUPTED,
    LOST,
    OVER,
    UNREACHED,
    Answer,
    Conversation,
    Failure,
    Request,
)

#: Seconds for a whole snapshot on a node; each section has its own, smaller limit.
PROBE_TIMEOUT_S = 60
#: The error of a node that an interrupt left out.
NOT_PROBED = "not looked at: interrupted"


@dataclass(frozen=True)
class SnapshotReply:
    """The snapshot of one node, or the reason why it is missing.

    snapshot: None where the node could not be asked
    error:    one line when the node could not be probed, and its kind; "" after an interrupt
    seconds:  wall time, with the connection
    """

    name: str
    snapshot: Snapshot | None = None
    error: str = ""
    kind: str = ""
    seconds: float = 0.0

    @property
    def reached(self) -> bool:
        return self.snapshot is not None

    @property
    def unreachable(self) -> bool:
        return self.kind in UNREACHED

    @classmethod
    def of(cls, name: str, value: SnapshotReply | Failure) -> SnapshotReply:
        """The result of a conversation: its value, or the failure without a snapshot."""
        return cls.failed(name, value) if isinstance(value, Failure) else value

    @classmethod
    def failed(cls, name: str, failure: Failure) -> SnapshotReply:
        if failure.kind == INTERRUPTED:
            return cls(name, kind=INTERRUPTED)
        error = f"{failure.error} while looking" if failure.kind == LOST else failure.error
        return cls(name, error=error, kind=failure.kind)


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
        if answer.error:
            return self.all_unknown(answer.error)
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
) -> Conversation[SnapshotReply]:
    """The conversation that takes the snapshot of one node; see `snapshot_question`.

    read: makes the snapshot of the answer
    """
    question = snapshot_question(node, policy, subjects, limit_s, nonce=nonce)
    answer = yield question.request
    if isinstance(answer, Failure) and answer.kind in OVER - {HUNG}:
        return SnapshotReply.failed(node, answer)
    return SnapshotReply(node, read(question, answer), seconds=answer.seconds)
