"""Conversations with many nodes: progress for the user, one question for sudo's password."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nodeready.agent.asking import (
    Answer,
    Asks,
    Conversation,
    Key,
    Request,
    ResultT,
    Transport,
    answer_of,
    collect,
    node_of,
    once,
)
from nodeready.agent.snapshots import PROBE_TIMEOUT_S, Read, SnapshotQuestion, take_snapshot
from nodeready.core.outcome import SUDO, NodeGaps, Outcome, failed_nodes, interrupted_nodes
from nodeready.core.text import counted
from nodeready.runs.targets import Targets
from nodeready.runs.tell import Tell
from nodeready.subjects.snapshot import Snapshot


def converse(
    transport: Transport,
    tell: Tell,
    activity: str,
    conversation: Callable[[str], Conversation[ResultT]],
    names: Iterable[str] | None = None,
    *,
    on_interrupt: str = "",
) -> dict[str, Outcome[ResultT]]:
    """Hold a conversation with each node, with progress; ask once for sudo's password.

    activity:     the word beside the progress
    names:        of the nodes; None: all
    on_interrupt: the line that is printed once after an interrupt
    """
    outcomes: dict[str, Outcome[ResultT]] = {}
    is_announced = False

    def converse_with(chosen: list[str]) -> None:
        with tell.progress(activity, chosen) as done:

            def on_outcome(key: Key, outcome: Outcome[ResultT]) -> None:
                nonlocal is_announced
                if transport.interrupted and on_interrupt and not is_announced:
                    is_announced = True
                    tell.say(on_interrupt)
                done(node_of(key), outcome.gap is not None)

            conversations: dict[Key, Conversation[ResultT]] = {
                name: conversation(name) for name in chosen
            }
            for key, outcome in collect(transport, conversations, on_outcome).items():
                outcomes[node_of(key)] = outcome

    converse_with(list(transport.nodes if names is None else names))
    gaps = {name: outcome.gap for name, outcome in outcomes.items() if outcome.gap}
    refused = [name for name, gap in gaps.items() if gap.kind == SUDO]
    if refused and not transport.interrupted and ask_password(transport, refused, tell):
        converse_with(refused)
    return outcomes


def keep_gaps(
    targets: Targets,
    tell: Tell,
    gaps: NodeGaps,
    *,
    complete: bool = True,
    further: Iterable[str] = (),
) -> None:
    """Keep the nodes without an answer for ``--limit @last-failed``; name those of an interrupt.

    complete: False when the run was interrupted
    further:  more nodes to keep
    """
    interrupted = dict.fromkeys(interrupted_nodes(gaps))
    if not complete:
        tell.say_partial(interrupted)
    reached = [name for name in targets.policies if name not in interrupted]
    targets.remember_failed([*failed_nodes(gaps), *further], lost=True, reached=reached)


def ask_password(transport: Transport, names: list[str], tell: Tell) -> bool:
    """Ask the user for sudo's password on these nodes; False where nobody can be asked."""
    password = tell.ask_password(f"sudo password ({counted(len(names), 'node')}): ")
    if password is None:
        return False
    transport.use_password(password, names)
    return True


def ask_with_progress(transport: Transport, tell: Tell) -> Asks:
    """The function that asks each node one question, with progress and sudo's password."""

    def ask(activity: str, requests: Mapping[str, Request]) -> Mapping[str, Answer]:
        outcomes = converse(transport, tell, activity, lambda name: once(requests[name]), requests)
        return {name: answer_of(outcome) for name, outcome in outcomes.items()}

    return ask


def probe_nodes(
    targets: Targets,
    tell: Tell,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
    on_interrupt: str = "",
    *,
    names: Iterable[str] | None = None,
    read: Read = SnapshotQuestion.read,
) -> list[Outcome[Snapshot]]:
    """Probe the nodes.

    subjects:     to probe; None: all
    limit_s:      seconds for one node
    names, on_interrupt: as for `converse`
    read:         makes the snapshot of an answer
    """
    chosen = None if subjects is None else tuple(subjects)
    transport, policies = targets.transport, targets.policies

    def conversation(name: str) -> Conversation[Snapshot]:
        return take_snapshot(name, policies[name], chosen, limit_s, read, nonce=transport.nonce)

    outcomes = converse(transport, tell, "probing", conversation, names, on_interrupt=on_interrupt)
    return list(outcomes.values())
