"""Run a program of ours on several nodes at once, or on this machine, and get what it printed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nodeready import carried, shell
from nodeready.local.child import Child, gather
from nodeready.policy import Policy
from nodeready.proofs import wire
from nodeready.transports.answer import SUDO

if TYPE_CHECKING:
    from nodeready.session import NodeRun, Session


@dataclass(frozen=True)
class Said:
    """What one node's program printed, and why it printed no more; "": it came to its end."""

    text: str
    error: str = ""
    unreachable: bool = False


Progress = Callable[[str, Iterable[str]], AbstractContextManager[Callable[[str], None]]]


class Nodes(Protocol):
    """Where the programs run: other machines, or this one."""

    interrupted: bool

    @property
    def tag(self) -> str:
        """What marks this run's processes."""

    def policies(self) -> Mapping[str, Policy]:
        """Of every node, by name."""

    def ask(self, what: str, asked: Mapping[str, tuple[str, Any]]) -> Mapping[str, Said]:
        """Run a program on each of these nodes: name -> (module, its Config).

        what: for the progress. After an interrupt, what came until then.
        """


@dataclass
class Fleet:
    """The nodes of a session.

    password: asks for sudo's password, for these nodes, when somebody is there to answer
    """

    session: Session
    progress: Progress
    password: Callable[[list[str]], bool]
    interrupted: bool = False

    @property
    def tag(self) -> str:
        return self.session.tag

    def policies(self) -> Mapping[str, Policy]:
        return {node.name: node.policy for node in self.session.nodes}

    def ask(self, what: str, asked: Mapping[str, tuple[str, Any]]) -> Mapping[str, Said]:
        said: dict[str, Said] = {}

        def one(node: NodeRun) -> None:
            main, config = asked[node.name]
            if not self.session.connect(node):
                said[node.name] = Said("", node.error, node.unreachable)
                return
            limit_s = config.limit_s + 2
            line = shell.command(carried.script(main, config), limit_s, config.tag)
            answer = self.session.carry(node, line, limit_s)
            if answer.error:
                node.fail(answer)
            said[node.name] = Said(answer.stdout, answer.error, node.unreachable)

        chosen = [node for node in self.session.nodes if node.name in asked]
        self._each(one, chosen, what)
        wanting = [node for node in chosen if node.kind == SUDO]
        if wanting and not self.interrupted and self.password([node.name for node in wanting]):
            self._each(one, wanting, what)
        for node in chosen:
            if node.error and node.name not in said:
                said[node.name] = Said("", node.error, node.unreachable)
        return said

    def _each(self, work: Callable[[NodeRun], None], chosen: list[NodeRun], what: str) -> None:
        with self.progress(what, [node.name for node in chosen]) as done:
            try:
                self.session.each(work, chosen, done)
            except KeyboardInterrupt:
                self.interrupted = self.session.interrupted = True
                self.session.end_remote()


@dataclass
class Here:
    """This machine, without any connection."""

    policy: Policy
    interrupted: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def tag(self) -> str:
        return f"nodeready:{self.run}"

    def policies(self) -> Mapping[str, Policy]:
        return {os.uname().nodename: self.policy}

    def ask(self, what: str, asked: Mapping[str, tuple[str, Any]]) -> Mapping[str, Said]:
        said = {}
        for name, (main, config) in asked.items():
            limit_s = config.limit_s + 2
            child = Child(shell.command(carried.script(main, config), limit_s, config.tag))
            try:
                gather([child], time.monotonic() + limit_s + 2 * shell.KILL_AFTER_S)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                child.end()
            over = self.interrupted or child.whole
            said[name] = Said(child.text, "" if over else f"ended after {limit_s} s")
        return said


def nonce() -> str:
    return f"nodeready-{secrets.token_hex(8)}"


def rows_of(said: Said, config: Any, kinds: Mapping[str, type[Any]]) -> list[Any]:
    """What a node printed, as these dataclasses. Raises ProbeError when it makes no sense."""
    return [
        wire.decode(kinds[name], data)
        for name, data in wire.lines(said.text, config.nonce)
        if name in kinds
    ]


def nothing(said: Said, config: Any) -> str:
    """Why a node's program printed nothing that we know."""
    if f"{config.nonce} {carried.NO_PYTHON}" in said.text:
        return f"{carried.NO_PYTHON}: cores cannot be looked at"
    return said.error or "no answer from the node's Python"
