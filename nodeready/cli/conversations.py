"""Conversations with many nodes: progress on the screen, one question for sudo's password."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
from nodeready.cli.targets import Targets
from nodeready.core.outcome import (
    SUDO,
    Gap,
    NodeGaps,
    Outcome,
    failed_nodes,
    interrupted_nodes,
    node_gaps,
)
from nodeready.core.text import counted
from nodeready.subjects.snapshot import Snapshot

if TYPE_CHECKING:
    from nodeready.cli.screen import Screen

#: No gaps beside those of the outcomes.
NO_GAPS: Mapping[str, Gap] = MappingProxyType({})


def converse(
    transport: Transport,
    screen: Screen,
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
        with screen.progress(activity, chosen) as done:

            def on_outcome(key: Key, outcome: Outcome[ResultT]) -> None:
                nonlocal is_announced
                if transport.interrupted and on_interrupt and not is_announced:
                    is_announced = True
                    screen.say(on_interrupt)
                done(node_of(key), gap_of(outcome) is not None)

            conversations: dict[Key, Conversation[ResultT]] = {
                name: conversation(name) for name in chosen
            }
            for key, outcome in collect(transport, conversations, on_outcome).items():
                outcomes[node_of(key)] = outcome

    converse_with(list(transport.nodes if names is None else names))
    gaps = {name: gap_of(outcome) for name, outcome in outcomes.items()}
    refused = [name for name, gap in gaps.items() if gap and gap.kind == SUDO]
    if refused and not transport.interrupted and ask_password(transport, refused):
        converse_with(refused)
    return outcomes


def gap_of(outcome: Outcome[Any]) -> Gap | None:
    """The gap of a conversation, or of the answer that is its value."""
    return outcome.value.gap if isinstance(outcome.value, Answer) else outcome.gap


def remember_gaps(
    targets: Targets,
    screen: Screen,
    outcomes: Iterable[Outcome[ResultT]],
    further: Mapping[str, Gap] = NO_GAPS,
) -> NodeGaps:
    """The gaps of a run that only collects; see `keep_gaps`.

    further: gaps that were found in the nodes' values
    """
    outcomes = list(outcomes)
    gaps = {outcome.node: outcome.gap for outcome in outcomes if outcome.gap}
    rows = node_gaps({**further, **gaps})
    keep_gaps(targets, screen, rows, complete=not targets.transport.interrupted)
    return rows


def keep_gaps(
    targets: Targets,
    screen: Screen,
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
        screen.say_partial(interrupted)
    reached = [name for name in targets.policies if name not in interrupted]
    targets.remember_failed([*failed_nodes(gaps), *further], lost=True, reached=reached)


def ask_password(transport: Transport, names: list[str]) -> bool:
    """Ask the user for sudo's password on these nodes; False without a terminal."""
    if not sys.stdin.isatty():
        return False
    prompt = f"sudo password ({counted(len(names), 'node')}): "
    transport.use_password(getpass.getpass(prompt), names)
    return True


def ask_with_progress(transport: Transport, screen: Screen) -> Asks:
    """The function that asks each node one question, with progress and sudo's password."""

    def ask(activity: str, requests: Mapping[str, Request]) -> Mapping[str, Answer]:
        outcomes = converse(
            transport, screen, activity, lambda name: once(requests[name]), requests
        )
        return {name: answer_of(outcome) for name, outcome in outcomes.items()}

    return ask


def probe_nodes(
    targets: Targets,
    screen: Screen,
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

    outcomes = converse(
        transport, screen, "probing", conversation, names, on_interrupt=on_interrupt
    )
    return list(outcomes.values())
