"""Requests, answers, and the interface of a transport. Pure.

A command holds a conversation with every node: a generator that yields a `Request`, gets its
`Answer`, may ask again, and returns the result. Every request gets exactly one answer: after an
interrupt, or at the deadline, a `Failure`.

A node program is a module with ``main(config)``. Its configuration is a dataclass with at least
the fields ``nonce``, ``tag`` and ``limit_s`` (`nodeready.node.payload`). `request` runs the
program, and `rows` reads its answer.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, Union

from nodeready import shell
from nodeready.node import payload
from nodeready.subjects import wire

#: Kinds of failure beside the command's own: no connection; the connection was lost; no answer
#: within the limit; the limit ended the command; sudo wants a password; sudo refuses; the node
#: printed too much; an internal error.
UNREACHABLE, LOST, HUNG, TIMEOUT = "unreachable", "lost", "hung", "timeout"
SUDO, REFUSED, OUTPUT, FAILED = "sudo", "refused", "output", "failed"
#: The deadline of all requests came first; the user interrupted the run.
LATE, INTERRUPTED = "late", "interrupted"
LATE_WORDS = "no answer in time"

#: The node's own connection is the trouble: exit status 4.
UNREACHED = frozenset({UNREACHABLE, LOST})
#: After these, further questions to the node are useless.
OVER = frozenset({UNREACHABLE, LOST, HUNG, SUDO, REFUSED, LATE, INTERRUPTED})

#: Maximum of an answer: a snapshot is some 20 KB, and at most 8 MB before it is packed.
ANSWER_BYTES = 16 << 20
#: Bytes of standard error that are kept; the rest is read and dropped.
ERROR_BYTES = 64 << 10

#: Seconds for a connection: name resolution, TCP, banner, authentication and channel.
CONNECT_TIMEOUT_S = 15
#: Seconds after which a node that dies in the middle is noticed, without an answer to keepalives;
#: TCP's own limit is 15 minutes.
DEAD_AFTER_S, KEEPALIVE_S = 25, 5

#: How `timeout` ends: by TERM, by KILL, or killed by its own KILL to the whole group.
TIMED_OUT = (124, 137, None)


class TransportUnavailable(Exception):
    """The transport cannot be used for any node; the reason in one line."""


@dataclass(frozen=True)
class Request:
    """What one node is asked to do.

    node:    its name
    script:  a POSIX sh text
    limit_s: seconds that the script has on the node, where `timeout -k` ends it
    payload: what the script finds at its file descriptor 3; None: nothing
    mark:    the text with which the answer begins, after a login's output; "": unknown
    max_bytes: of the answer; a node that prints more has failed
    reads:   it only reads: it may be sent again after a lost connection
    """

    node: str
    script: str
    limit_s: int
    payload: str | None = None
    mark: str = ""
    max_bytes: int = ANSWER_BYTES
    reads: bool = False


@dataclass(frozen=True)
class Answer:
    """A node's answer: a `Reply` or a `Failure`.

    stdout, stderr: the script's output, decoded without loss; a failure has the output until then
    seconds: from the question to the answer, including a new connection
    """

    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0

    #: The error in one line when the script did not end by itself, and its kind.
    error = ""
    kind = ""

    @property
    def ok(self) -> bool:
        """Whether the script ran and exited 0."""
        return False

    def reason(self) -> str:
        """Why it failed, in one line."""
        return self.error


@dataclass(frozen=True)
class Reply(Answer):
    """The script came to its end. rc: its exit status; None: a signal ended it."""

    rc: int | None = 0

    @property
    def ok(self) -> bool:
        return self.rc == 0

    def reason(self) -> str:
        """Why it failed, in one line: nodeready's own last error, or the last line of stderr."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        own_lines = [line for line in lines if line.startswith("nodeready: ")]
        if own_lines:
            return own_lines[-1].removeprefix("nodeready: ")
        if lines:
            return lines[-1]
        return "ended by a signal" if self.rc is None else f"exit status {self.rc}"


@dataclass(frozen=True)
class Failure(Answer):
    """The script did not end, as far as is known. kind: one of the words above."""

    kind: str = FAILED
    error: str = ""


def interrupted() -> Failure:
    """The answer of a node that was left out because of an interrupt."""
    return Failure(kind=INTERRUPTED, error="interrupted")


def late(reached: bool = True) -> Failure:
    """The answer of a node for which the deadline came first. reached: it was connected"""
    return Failure(kind=LATE if reached else UNREACHABLE, error=LATE_WORDS)


ResultT = TypeVar("ResultT")
#: The requests to one node, step by step; it returns a result.
Conversation = Generator[Request, Answer, ResultT]
#: A conversation's name: the node, or the node and a word when there are several with one node.
Key = Union[str, tuple[str, str]]
#: Asks every named node one question, and returns every answer. The first argument names the
#: work beside the progress.
Asks = Callable[[str, Mapping[str, Request]], Mapping[str, Answer]]


def node_of(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def once(request: Request) -> Conversation[Answer]:
    """A conversation of one question."""
    return (yield request)


class Exchange(Generic[ResultT]):
    """The state of a conversation. A bug in its code becomes a Failure of its node.

    request: the question that waits for its answer
    is_over: the conversation has ended, and returned ``value``
    """

    def __init__(self, conversation: Conversation[ResultT]) -> None:
        self._conversation, self._has_begun = conversation, False
        self.request: Request | None = None
        self.is_over = False
        self.value: ResultT | Failure = Failure()

    def start(self) -> None:
        """Run the conversation to its first question."""
        self._has_begun = True
        self._step(lambda: next(self._conversation))

    def answer(self, answer: Answer) -> None:
        """Answer the question: the conversation asks the next one, or ends."""
        self._step(lambda: self._conversation.send(answer))

    def _step(self, advance: Callable[[], Request]) -> None:
        try:
            self.request = advance()
        except StopIteration as end:
            self.is_over, self.value = True, end.value
        except Exception as error:  # noqa: BLE001 - our bug fails only this node
            self.is_over, self.value = True, Failure(kind=FAILED, error=bug_text(error))

    def end(self, failure: Failure) -> None:
        """Give this failure as the last answer; a conversation that has not begun is over."""
        if self._has_begun and not self.is_over:
            self.answer(failure)
        if not self.is_over:
            self._conversation.close()
            self.is_over, self.value = True, failure


def end_all(
    exchanges: dict[Key, Exchange[ResultT]], failure: Callable[[Key], Failure]
) -> Iterator[tuple[Key, ResultT | Failure]]:
    """Remove and yield these conversations; the last answer of each is this failure."""
    for key in list(exchanges):
        exchange = exchanges.pop(key)
        exchange.end(failure(key))
        yield key, exchange.value


def append_up_to(buffer: bytearray, data: bytes, maximum: int) -> None:
    """Append as much of ``data`` as fits into ``maximum`` bytes; the rest is dropped."""
    buffer += data[: max(0, maximum - len(buffer))]


def bug_text(error: Exception) -> str:
    """An unexpected exception in one line, with its place in the code."""
    import traceback  # It takes long to load, and is not needed.

    place = traceback.extract_tb(error.__traceback__)[-1]
    position = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
    return f"internal error at {position}: {type(error).__name__}: {error}"


class NodeChannel(ABC):
    """Exchanges lines with a running script on a node; see `line_channel.LineChannel`.

    error: what ended the script, one line; "" while it runs
    """

    error: str

    @abstractmethod
    def send_line(self, line: str) -> None: ...

    @abstractmethod
    def read_line(self, limit_s: float) -> str | None: ...

    @abstractmethod
    def close(self) -> None: ...


class SshPeer(NamedTuple):
    """A node's sshd, as a connection saw it.

    address: the node's, as the control machine sees it; "": unknown, behind another machine or at
             another port
    key:     the host key that sshd proved to have, ``type base64``
    """

    address: str
    key: str


class Transport(ABC):
    """Asks nodes. Use as a context manager: leaving it disconnects.

    nodes:       their names
    run:         a word for this run; ``tag`` marks its processes on the nodes
    interrupted: the user has interrupted the run, and what ran on the nodes was ended
    one_text:    it sends one text to many nodes at once, so that they share a ``nonce``
    """

    nodes: tuple[str, ...]
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
    ) -> Iterator[tuple[Key, ResultT | Failure]]:
        """Hold these conversations in parallel, and yield the result of each, as it comes.

        deadline: of time.monotonic(): each node without an answer then gets a Failure.
                  None: only the requests' own limits

        Never raises for a node's fault. An interrupt ends what runs on the nodes, and every
        conversation that is left gets a Failure of the kind INTERRUPTED.
        """

    def ask(
        self, requests: Iterable[Request], deadline: float | None = None
    ) -> Iterator[tuple[str, Answer]]:
        """Each request's node and answer, as they come; see `converse`."""
        conversations: dict[Key, Conversation[Answer]] = {
            (request.node, str(number)): once(request) for number, request in enumerate(requests)
        }
        for key, answer in self.converse(conversations, deadline):
            yield node_of(key), answer

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
    on_found: Callable[[Key, ResultT | Failure], object] = lambda key, value: None,
    deadline: float | None = None,
) -> dict[Key, ResultT | Failure]:
    """The results of all conversations, also after an interrupt.

    on_found: gets each result as it comes, for the progress
    """
    values: dict[Key, ResultT | Failure] = {}
    stream: Any = None
    stop: KeyboardInterrupt | None = None
    interrupt_is_ours = True
    while True:
        try:
            if stream is None:
                stream = transport.converse(conversations, deadline)
            interrupt_is_ours = False
            # An interrupt of our own code is raised in the stream, which ends the nodes' work.
            key, value = next(stream) if stop is None else stream.throw(stop)
            interrupt_is_ours, stop = True, None
            values[key] = value
            on_found(key, value)
        except StopIteration:
            break
        except KeyboardInterrupt as interrupt:
            if not interrupt_is_ours:
                # The interrupt came before the stream began, or a second time: the stream may
                # not have seen it, and yields nothing more.
                transport.interrupted = True
                break
            stop = interrupt
    return {**dict.fromkeys(conversations, interrupted()), **values}


def end_script(run: str) -> str:
    """The script that ends a run's processes on a node."""
    # In brackets, so that the search does not find its own command line.
    return f"{shell.library('end')}nr_end {shell.quote(f'[n]odeready:{run}')}"


def lock_holder() -> str:
    """USER@HOST of this process: the holder's line in a node's lock."""
    import getpass

    return f"{getpass.getuser()}@{os.uname().nodename}"


#: Seconds that a command has on a node beyond the program's own limit.
MARGIN_S = 2


def new_nonce() -> str:
    """A random word with which each line of a program's answer begins."""
    return f"nodeready-{os.urandom(8).hex()}"


def request(
    node: str, main: str, config: Any, *, margin_s: int = MARGIN_S, mark: str = "", **how: Any
) -> Request:
    """The request that runs the module ``main`` with this config on a node.

    how: as for `payload.program`
    """
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


def no_answer_reason(answer: Answer, config: Any) -> str:
    """Why a node's program printed no valid row."""
    if f"{config.nonce} {payload.NO_PYTHON}" in answer.stdout:
        return wire.PYTHON_MISSING
    return answer.error or "no answer from the node's Python"


def has_failed(reasons: Iterable[str]) -> bool:
    """Whether one of these reasons is a failure of nodeready (exit status 1)."""
    return any(reason != wire.PYTHON_MISSING for reason in reasons)
