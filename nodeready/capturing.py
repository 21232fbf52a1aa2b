"""The capture program on all nodes at once, and what it said: each node's answer, unread.

An answer is unpacked when it is grouped and not kept as objects, so that the traces of 16,384
nodes fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready import carried
from nodeready.capture import answer as answers
from nodeready.capture.program import Config
from nodeready.traces import Trace, TraceError, read
from nodeready.transport.base import (
    FAILED,
    HUNG,
    INTERRUPTED,
    TIMEOUT,
    UNREACHED,
    Answer,
    Asks,
    Request,
)
from nodeready.transport.program import request

#: The program on the node.
MAIN = "nodeready.capture.program"
#: Processes that are named where no rank was found.
MOST_INSTEAD = 10
#: Seconds that a command has on a node beyond the program's own limit.
MARGIN_S = 3


@dataclass
class Captured:
    """What the nodes answered.

    asked:     all nodes
    answers:   node -> its answer, as it came
    errors:    node -> why there is no trace of it, one line; complete after `traces`
    corrected: node -> its trace, where more is known than its answer says
    complete:  False when it was interrupted
    """

    config: Config
    asked: list[str]
    answers: dict[str, Answer] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    corrected: dict[str, Trace] = field(default_factory=dict)
    instead: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = True

    @property
    def unreached(self) -> list[str]:
        """Nodes to which there was no way, or that were lost."""
        return [name for name, answer in self.answers.items() if answer.kind in UNREACHED]

    @property
    def mistaken(self) -> list[str]:
        """Nodes that a mistake of ours has cost."""
        return [name for name, answer in self.answers.items() if answer.kind == FAILED]

    def traces(self) -> Iterator[Trace]:
        """Every node's trace, one at a time, under the name that the inventory has for it."""
        self.errors.clear()
        self.instead.clear()
        for name in self.asked:
            if name not in self.answers:
                self.errors[name] = "no answer: interrupted" if not self.complete else "no answer"
                continue
            try:
                trace = self.corrected.get(name) or trace_of(
                    name, self.answers[name], self.config.nonce
                )
            except TraceError as problem:
                self.errors[name] = str(problem)
                continue
            if not trace["processes"]:
                if trace["error"]:
                    self.errors[name] = trace["error"]
                    continue
                room = MOST_INSTEAD - len(self.instead)
                self.instead += [(name, words) for words in trace["instead"][:room]]
            yield trace


def trace_of(name: str, said: Answer, nonce: str) -> Trace:
    """The trace in a node's answer. Raises TraceError with the reason when there is none."""
    if said.error and said.kind not in (TIMEOUT, HUNG):
        raise TraceError(said.error)
    if f"{nonce} {carried.NO_PYTHON}" in said.stdout:
        raise TraceError(carried.NO_PYTHON)
    try:
        data: dict[str, Any] = answers.unpack(said.stdout, nonce)
    except ValueError as problem:
        raise TraceError(str(problem) if said.ok else said.reason()) from None
    # A node's own word for its name is only that.
    return read({**data, "node": name}, name)


def capture(ask: Asks, nodes: Iterable[str], config: Config) -> Captured:
    """Run the program on all nodes at once. An interrupt ends it, and is in the result."""
    found = Captured(config, list(nodes))
    return more(found, ask, "stacks", {name: requested(name, config) for name in found.asked})


def requested(name: str, config: Config) -> Request:
    """What runs the program on a node."""
    return request(name, MAIN, config, margin_s=MARGIN_S)


def more(found: Captured, ask: Asks, what: str, asked: Mapping[str, Request]) -> Captured:
    """The answers of these nodes, into what was found of the others."""
    for name, answer in ask(what, asked).items():
        if answer.kind == INTERRUPTED:
            found.complete = False
        else:
            found.answers[name] = answer
    return found
