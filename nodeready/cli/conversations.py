"""Conversations with many nodes: progress on the screen, one question for sudo's password."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nodeready.cli.targets import Targets
from nodeready.text import counted
from nodeready.transport.base import (
    INTERRUPTED,
    SUDO,
    UNREACHED,
    Answer,
    Asks,
    Conversation,
    Failure,
    Key,
    Request,
    ResultT,
    Transport,
    collect,
    node_of,
    once,
)
from nodeready.transport.snapshots import (
    PROBE_TIMEOUT_S,
    Read,
    SnapshotQuestion,
    SnapshotReply,
    take_snapshot,
)

if TYPE_CHECKING:
    from nodeready.cli.screen import Screen


def converse(
    transport: Transport,
    screen: Screen,
    activity: str,
    conversation: Callable[[str], Conversation[ResultT]],
    names: Iterable[str] | None = None,
    *,
    on_interrupt: str = "",
) -> dict[str, ResultT | Failure]:
    """Hold a conversation with each node, with progress; ask once for sudo's password.

    activity:     the word beside the progress
    names:        of the nodes; None: all
    on_interrupt: the line that is printed once after an interrupt
    """
    results: dict[str, ResultT | Failure] = {}
    is_announced = False

    def converse_with(chosen: list[str]) -> None:
        with screen.progress(activity, chosen) as done:

            def on_result(key: Key, result: ResultT | Failure) -> None:
                nonlocal is_announced
                if transport.interrupted and on_interrupt and not is_announced:
                    is_announced = True
                    screen.say(on_interrupt)
                has_failed = isinstance(result, Failure) or bool(getattr(result, "error", ""))
                done(node_of(key), has_failed)

            conversations: dict[Key, Conversation[ResultT]] = {
                name: conversation(name) for name in chosen
            }
            for key, result in collect(transport, conversations, on_result).items():
                results[node_of(key)] = result

    converse_with(list(transport.nodes if names is None else names))
    refused = [name for name, result in results.items() if getattr(result, "kind", "") == SUDO]
    if refused and not transport.interrupted and ask_password(transport, refused):
        converse_with(refused)
    return results


class NodeResult(Protocol):
    """The result of a conversation. error: "": the node answered; kind: of the failure"""

    @property
    def error(self) -> str: ...
    @property
    def kind(self) -> str: ...


class NodeErrors(NamedTuple):
    """Node -> why it gave no answer. unreachable: it could not be reached; failed: all others"""

    unreachable: dict[str, str]
    failed: dict[str, str]


def remember_errors(
    targets: Targets, screen: Screen, results: Mapping[str, NodeResult | Failure]
) -> NodeErrors:
    """The nodes without an answer, which ``--limit @last-failed`` then means."""
    errors = {name: result for name, result in results.items() if result.error}
    if targets.transport.interrupted:
        screen.say_partial(errors)
    names = [name for name, result in results.items() if result.kind != INTERRUPTED]
    targets.remember_failed([name for name in names if name in errors], lost=True, reached=names)
    unreachable = {name for name, result in errors.items() if result.kind in UNREACHED}
    return NodeErrors(
        {name: result.error for name, result in errors.items() if name in unreachable},
        {name: result.error for name, result in errors.items() if name not in unreachable},
    )


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
        return converse(transport, screen, activity, lambda name: once(requests[name]), requests)

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
) -> list[SnapshotReply]:
    """Probe the nodes.

    subjects:     to probe; None: all
    limit_s:      seconds for one node
    names, on_interrupt: as for `converse`
    read:         makes the snapshot of an answer
    """
    chosen = None if subjects is None else tuple(subjects)
    transport, policies = targets.transport, targets.policies

    def conversation(name: str) -> Conversation[SnapshotReply]:
        return take_snapshot(name, policies[name], chosen, limit_s, read, nonce=transport.nonce)

    results = converse(
        transport, screen, "probing", conversation, names, on_interrupt=on_interrupt
    )
    return [SnapshotReply.of(name, result) for name, result in results.items()]
