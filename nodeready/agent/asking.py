"""Requests, answers, and the interface of a transport. Pure.

A command holds a conversation with every node: a generator that yields a `Request`, gets its
`Answer`, may ask again, and returns the result. Every request gets exactly one answer: after an
interrupt, or at the deadline, an `Outcome` with a `Gap`.

A node program is a module with ``main(config)``. Its configuration is a dataclass with at least
the fields ``nonce``, ``tag`` and ``limit_s`` (`nodeready.agent.payload`). `request` runs the
program, and `rows` reads its answer.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, Union

from nodeready.agent import payload
from nodeready.core import shell, wire
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import (
    FAILED,
    INTERRUPTED,
    INVALID,
    LATE,
    NO_PYTHON,
    UNREACHABLE,
    Gap,
    GapError,
    Outcome,
)

LATE_WORDS = "no answer in time"

ANSWER_BYTES = 16 << 20  # of an answer: a snapshot is 20 KB, and at most 8 MB unpacked
ERROR_BYTES = 64 << 10  # bytes of standard error that are kept; the rest is read and dropped

CONNECT_TIMEOUT_S = 15  # seconds: name, TCP, banner, authentication, channel
#: Seconds after which a node that dies in the middle is noticed, without an answer to keepalives;
#: TCP's own limit is 15 minutes.
DEAD_AFTER_S, KEEPALIVE_S = 25, 5

TIMED_OUT = (124, 137, None)  # rc of `timeout`: by TERM, by KILL, killed by its own KILL to all


class TransportUnavailable(Refused):
    """The transport cannot be used for any node; the reason in one line."""


@dataclass(frozen=True)
class Request:
    """What one node is asked to do."""

    node: str  # its name
    script: str  # a POSIX sh text
    limit_s: int  # seconds that the script has on the node, where `timeout -k` ends it
    payload: str | None = None  # what the script finds at its file descriptor 3; None: nothing
    mark: str = ""  # the text with which the answer begins, after a login's output; "": unknown
    max_bytes: int = ANSWER_BYTES  # of the answer; a node that prints more has failed
    reads: bool = False  # it only reads: it may be sent again after a lost connection


@dataclass(frozen=True)
class Answer:
    """A node's answer to one request."""

    stdout: str = ""  # decoded without loss; with a gap, the output until then
    stderr: str = ""  # likewise
    seconds: float = 0.0  # from the question to the answer, including a new connection
    rc: int | None = 0  # the script's exit status; None: a signal ended it
    gap: Gap | None = None  # why the script did not end; None: it ended by itself

    @property
    def ok(self) -> bool:
        """Whether the script ran and exited 0."""
        return self.gap is None and self.rc == 0

    def has_gap(self, *kinds: str) -> bool:
        """Whether the script did not end, for one of these reasons."""
        return self.gap is not None and self.gap.kind in kinds

    def reason(self) -> str:
        """Why it failed, in one line: nodeready's own last error, or the last line of stderr."""
        if self.gap is not None:
            return self.gap.reason
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        if own_lines := [line for line in lines if line.startswith("nodeready: ")]:
            return own_lines[-1].removeprefix("nodeready: ")
        if lines:
            return lines[-1]
        return "ended by a signal" if self.rc is None else f"exit status {self.rc}"


#: The gap of a node that was left out because of an interrupt.
INTERRUPT = Gap(INTERRUPTED, "no answer: interrupted")


def late(reached: bool = True) -> Gap:
    """The gap of a node for which the deadline came first. reached: it was connected"""
    return Gap(LATE if reached else UNREACHABLE, LATE_WORDS)


ResultT = TypeVar("ResultT")
Conversation = Generator[Request, Answer, ResultT]  # requests to one node; returns a result
#: A conversation's name: the node, or the node and a word when there are several with one node.
Key = Union[str, tuple[str, str]]
#: Asks every named node one question, and returns every answer. The first argument names the
#: work beside the progress.
Asks = Callable[[str, Mapping[str, Request]], Mapping[str, Answer]]


def node_of(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def once(request: Request) -> Conversation[Answer]:
    """A conversation of one question; its value is the answer, whose gap the outcome has, too."""
    return (yield request)


def answer_of(outcome: Outcome[Answer]) -> Answer:
    """The answer of a conversation of one question."""
    return outcome.value or Answer(seconds=outcome.seconds, gap=outcome.gap)


class Exchange(Generic[ResultT]):
    """The state of a conversation. A bug in its code becomes a gap of its node."""

    def __init__(self, key: Key, conversation: Conversation[ResultT]) -> None:
        self._conversation, self._has_begun = conversation, False
        self.request: Request | None = None  # the question that waits for its answer
        self.is_over = False  # the conversation has ended with ``outcome``
        self.outcome: Outcome[ResultT] = Outcome(node_of(key))

    def start(self) -> None:
        """Run the conversation to its first question."""
        self._has_begun = True
        self._step(lambda: next(self._conversation))

    def answer(self, answer: Answer) -> None:
        """Answer the question: the conversation asks the next one, or ends."""
        self.outcome = replace(self.outcome, seconds=self.outcome.seconds + answer.seconds)
        self._step(lambda: self._conversation.send(answer))

    def _step(self, advance: Callable[[], Request]) -> None:
        try:
            self.request = advance()
        except StopIteration as end:
            self._end(end.value, end.value.gap if isinstance(end.value, Answer) else None)
        except GapError as end:
            self._end(gap=end.gap)
        except Exception as error:  # noqa: BLE001 - our bug fails only this node
            from nodeready.agent.runtime import bug_text

            self._end(gap=Gap(FAILED, bug_text(error)))

    def _end(self, value: ResultT | None = None, gap: Gap | None = None) -> None:
        self.is_over, self.outcome = True, replace(self.outcome, value=value, gap=gap)

    def end(self, last: Answer) -> None:
        """Give the last answer, which has a gap; a conversation that has not begun is over."""
        if self._has_begun and not self.is_over:
            self.answer(last)
        if not self.is_over:
            self._conversation.close()
            self._end(gap=last.gap)


Outcomes = Iterator[tuple[Key, Outcome[ResultT]]]  # what `Transport.converse` yields


def exchanges_of(
    conversations: Mapping[Key, Conversation[ResultT]],
) -> dict[Key, Exchange[ResultT]]:
    return {key: Exchange(key, conversation) for key, conversation in conversations.items()}


def end_all(
    exchanges: dict[Key, Exchange[ResultT]], last: Callable[[Key], Gap]
) -> Outcomes[ResultT]:
    """Remove and yield these conversations; the last answer of each has this gap."""
    for key in list(exchanges):
        exchange = exchanges.pop(key)
        exchange.end(Answer(gap=last(key)))
        yield key, exchange.outcome


def append_up_to(buffer: bytearray, data: bytes, maximum: int) -> None:
    """Append as much of ``data`` as fits into ``maximum`` bytes; the rest is dropped."""
    buffer += data[: max(0, maximum - len(buffer))]


class NodeChannel(ABC):
    """Exchanges lines with a running script on a node; see `nodeready.agent.local.LineChannel`."""

    error: str  # what ended the script, one line; "" while it runs

    @abstractmethod
    def send_line(self, line: str) -> None: ...

    @abstractmethod
    def read_line(self, limit_s: float) -> str | None: ...

    @abstractmethod
    def close(self) -> None: ...


class SshPeer(NamedTuple):
    """A node's sshd, as a connection saw it."""

    address: str  # seen from the control machine; "": behind another machine or port
    key: str  # the host key that sshd proved to have, ``type base64``


class Transport(ABC):
    """Asks nodes. Use as a context manager: leaving it disconnects.

    run:         a word for this run; ``tag`` marks its processes on the nodes
    interrupted: the user has interrupted the run, and what ran on the nodes was ended
    one_text:    it sends one text to many nodes at once, so that they share a ``nonce``
    """

    nodes: tuple[str, ...]  # their names
    one_text = False
    _nonce = ""

    def __init__(self, nodes: Iterable[str], run: str = "") -> None:
        self.nodes = tuple(nodes)
        self.run = run or os.urandom(6).hex()
        self.interrupted = False

    @property
    def tag(self) -> str:
        return f"nodeready:{self.run}"

    @property
    def nonce(self) -> str:
        """A random word for the marks of an answer; one for all nodes where ``one_text`` is."""
        if not self.one_text:
            return os.urandom(8).hex()
        self._nonce = self._nonce or os.urandom(8).hex()
        return self._nonce

    @abstractmethod
    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Outcomes[ResultT]:
        """Hold these conversations in parallel, and yield the outcome of each, as it comes.

        deadline: of time.monotonic(): each node without an answer then gets a gap.
                  None: only the requests' own limits

        Never raises for a node's fault. An interrupt ends what runs on the nodes, and every
        conversation that is left ends with a gap of the kind INTERRUPTED.
        """

    def ask(
        self, requests: Iterable[Request], deadline: float | None = None
    ) -> Iterator[tuple[str, Answer]]:
        """Each request's node and answer, as they come; see `converse`."""
        conversations: dict[Key, Conversation[Answer]] = {
            (request.node, str(number)): once(request) for number, request in enumerate(requests)
        }
        for key, outcome in self.converse(conversations, deadline):
            yield node_of(key), answer_of(outcome)

    @abstractmethod
    def open(self, request: Request) -> NodeChannel:
        """Start an interactive script; a node's fault is in the channel's ``error``."""

    def end(self, limit_s: float = 5) -> None:
        """End this run's processes on the nodes, by its tag, within this many seconds."""
        return

    def ssh_peers(self) -> Mapping[str, SshPeer]:
        """Node -> its sshd, for the nodes that are connected by ssh."""
        return {}

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        """Use this password for sudo on these nodes, which wanted one."""
        return

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *problem: object) -> None:
        return


def collect(
    transport: Transport,
    conversations: Mapping[Key, Conversation[ResultT]],
    on_found: Callable[[Key, Outcome[ResultT]], object] = lambda key, outcome: None,
    deadline: float | None = None,
) -> dict[Key, Outcome[ResultT]]:
    """The outcomes of all conversations, also after an interrupt.
    on_found: gets each outcome as it comes, for the progress
    """
    outcomes: dict[Key, Outcome[ResultT]] = {}
    stream: Any = None
    stop: KeyboardInterrupt | None = None
    interrupt_is_ours = True
    while True:
        try:
            if stream is None:
                stream = transport.converse(conversations, deadline)
            interrupt_is_ours = False
            # An interrupt of our own code is raised in the stream, which ends the nodes' work.
            key, outcome = next(stream) if stop is None else stream.throw(stop)
            interrupt_is_ours, stop = True, None
            outcomes[key] = outcome
            on_found(key, outcome)
        except StopIteration:
            break
        except KeyboardInterrupt as interrupt:
            if not interrupt_is_ours:
                # The interrupt came before the stream began, or a second time: the stream may
                # not have seen it, and yields nothing more.
                transport.interrupted = True
                break
            stop = interrupt
    lost = {key: Outcome[ResultT](node_of(key), gap=INTERRUPT) for key in conversations}
    return {**lost, **outcomes}


def end_script(run: str) -> str:
    """The script that ends a run's processes on a node."""
    # In brackets, so that the search does not find its own command line.
    return f"{shell.library('end')}nr_end {shell.quote(f'[n]odeready:{run}')}"


def lock_holder() -> str:
    """USER@HOST of this process: the holder's line in a node's lock."""
    import getpass

    return f"{getpass.getuser()}@{os.uname().nodename}"


MARGIN_S = 2  # seconds that a command has on a node beyond the program's own limit


def new_nonce() -> str:
    """A random word with which each line of a program's answer begins."""
    return f"nodeready-{os.urandom(8).hex()}"


def request(
    node: str, main: str, config: Any, *, margin_s: int = MARGIN_S, mark: str = "", **how: Any
) -> Request:
    """The request that runs the module ``main`` on a node. how: as for `payload.program`"""
    program = payload.program(main, config, **how)
    return Request(node, program.script, config.limit_s + margin_s, program.text, mark)


def rows(
    answer: Answer, config: Any, kinds: Mapping[str, type[Any]], refused: list[str] | None = None
) -> list[Any]:
    """The rows of a node's program, as these dataclasses.
    refused: gets the reason of each invalid row, which is skipped
    Raises DecodeError for an answer that is too large and, without ``refused``, an invalid row.
    """
    decoded = []
    for name, data in wire.lines(answer.stdout, config.nonce):
        try:
            if name in kinds:
                decoded.append(wire.decode(kinds[name], data))
        except wire.DecodeError as problem:
            if refused is None:
                raise
            refused.append(problem.reason)
    return decoded


def packed_value(
    kind: type[ResultT], answer: Answer, config: Any, name: str, max_bytes: int
) -> ResultT:
    """The observation that a node's program printed as one packed line. Raises GapError."""
    try:
        value = wire.packed_answer(kind, answer.stdout, config.nonce, name, max_bytes)
    except wire.DecodeError as error:
        raise GapError(Gap(INVALID, str(error), error.evidence)) from None
    if value is None:
        raise GapError(no_answer(answer, config))
    return value


def no_answer(answer: Answer, config: Any) -> Gap:
    """The gap of a node whose program printed no valid row."""
    if f"{config.nonce} {wire.NO_PYTHON}" in answer.stdout:
        return Gap(NO_PYTHON, wire.PYTHON_MISSING)
    return answer.gap or Gap(INVALID, "no answer from the node's Python", answer.stderr[:200])
