"""The capture program on all nodes at once, and what it said: each node's answer, unread.

An answer is unpacked when it is grouped and not kept as objects, so that the traces of 16,384
nodes fit in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nodeready import carried, shell
from nodeready.capture import answer as answers
from nodeready.capture.program import Config
from nodeready.local.child import Child, gather
from nodeready.traces import Trace, TraceError, read
from nodeready.transports.answer import FAILED, HUNG, SUDO, TIMEOUT, UNREACHED, Answer

if TYPE_CHECKING:
    from nodeready.session import NodeRun, Progress, Session
    from nodeready.transports.srun import Srun

#: The program on the node.
MAIN = "nodeready.capture.program"
#: Processes that are named where no rank was found.
MOST_INSTEAD = 10
#: Seconds that a command has on a node beyond the program's own limit.
MARGIN_S = 3

Heard = Callable[[str, Answer], None]


class Carrier(Protocol):
    """A way to the nodes: the scripts go there side by side, the answers come one by one."""

    @property
    def nodes(self) -> list[str]: ...

    def carry(self, scripts: Mapping[str, str], limit_s: int, heard: Heard) -> None:
        """Run each node's script there. heard: gets every node's answer, once.

        limit_s: seconds for a script on its node. Raises KeyboardInterrupt, with nothing of ours
        left on the nodes; never for a node's fault.
        """


class OverSsh:
    """Over the connections of a session, which are made here when there is none."""

    def __init__(self, session: Session) -> None:
        self.session, self.tag = session, session.tag
        self.nodes = [node.name for node in session.nodes]

    def carry(self, scripts: Mapping[str, str], limit_s: int, heard: Heard) -> None:
        line: dict[str, str] = {}

        def one(node: NodeRun) -> None:
            if not self.session.connect(node):
                answer = Answer(False, error=node.error, kind=node.kind)
            else:
                script = scripts[node.name]
                if script not in line:
                    line[script] = shell.command(script, limit_s, self.tag)
                answer = self.session.carry(node, line[script], limit_s)
                node.error, node.kind = answer.error, answer.kind
            said[node.name] = answer

        def done(name: str) -> None:
            # Without an answer there was a mistake of ours, which `each` has caught.
            node = by_name[name]
            heard(name, said.get(name) or Answer(False, error=node.error, kind=node.kind))

        said: dict[str, Answer] = {}
        chosen = [node for node in self.session.nodes if node.name in scripts]
        by_name = {node.name: node for node in chosen}
        try:
            self.session.each(one, chosen, done)
        except KeyboardInterrupt:
            self.session.interrupted = True
            self.session.end_remote()
            raise


class OverSrun:
    """As steps of a Slurm job: one for all nodes that get the same script."""

    def __init__(self, srun: Srun) -> None:
        self.srun = srun
        self.nodes = list(srun.job.nodes)

    def carry(self, scripts: Mapping[str, str], limit_s: int, heard: Heard) -> None:
        by_script: dict[str, list[str]] = {}
        for name, script in scripts.items():
            by_script.setdefault(script, []).append(name)
        for script, nodes in by_script.items():
            self.srun.carry(script, limit_s, heard, nodes)


class Here:
    """This machine, without any connection."""

    def __init__(self, tag: str) -> None:
        self.nodes = [os.uname().nodename]
        self.tag = tag

    def carry(self, scripts: Mapping[str, str], limit_s: int, heard: Heard) -> None:
        for name, script in scripts.items():
            child = Child(shell.command(script, limit_s, self.tag))
            try:
                gather([child], time.monotonic() + limit_s + shell.KILL_AFTER_S)
            finally:
                child.end()
            if child.whole:
                heard(name, Answer(True, child.text))
            else:
                late = f"no answer in {limit_s} s"
                heard(name, Answer(False, child.text, error=late, kind=TIMEOUT))


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

    @property
    def asking(self) -> list[str]:
        """Nodes whose sudo wants a password."""
        return [name for name, answer in self.answers.items() if answer.kind == SUDO]

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


def capture(carrier: Carrier, config: Config, done: Progress) -> Captured:
    """Run the program on all nodes at once. An interrupt ends it, and is in the result."""
    found = Captured(config, list(carrier.nodes))
    script = carried.script(MAIN, config)
    return more(found, carrier, dict.fromkeys(carrier.nodes, script), done)


def more(
    found: Captured, carrier: Carrier, scripts: Mapping[str, str], done: Progress
) -> Captured:
    """The answers of these nodes, into what was found of the others."""

    def heard(name: str, answer: Answer) -> None:
        found.answers[name] = answer
        done(name)

    try:
        carrier.carry(scripts, found.config.limit_s + MARGIN_S, heard)
    except KeyboardInterrupt:
        found.complete = False
    return found
