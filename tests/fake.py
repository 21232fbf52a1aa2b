"""A transport for tests: nodes that answer as they are told, and need neither root nor a network.

``Fake({"n1": says("..."), "n2": fails(LOST, "connection lost")})``: what a node does is a function
from a request to an answer. It may ask the machine that the test runs on (`really`), and it may
raise KeyboardInterrupt, which is an interrupt in the middle of everything.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from nodeready.agent.asking import (
    INTERRUPT,
    LATE_WORDS,
    Answer,
    Conversation,
    Exchange,
    Key,
    NodeChannel,
    Outcomes,
    Request,
    ResultT,
    Transport,
    exchanges_of,
    node_of,
)
from nodeready.agent.local import run
from nodeready.core import shell
from nodeready.core.outcome import HUNG, LATE, Gap

#: What a node does when it is asked; None: it never answers.
Does = Callable[[Request], "Answer | None"]


def says(text: str, rc: int = 0, stderr: str = "") -> Does:
    return lambda request: Answer(text, stderr, rc=rc)


def fails(kind: str, error: str, stdout: str = "") -> Does:
    """A node that gives no answer, and why; stdout: what it had said until then."""
    return lambda request: Answer(stdout, gap=Gap(kind, error))


def hangs(request: Request) -> Answer | None:
    """A node that never answers: at its limit, or at the deadline, that is a failure."""
    return None


def interrupts(request: Request) -> Answer | None:
    """Ctrl-C while this node is asked: raises KeyboardInterrupt."""
    raise KeyboardInterrupt


def really(request: Request) -> Answer:
    """What this machine answers: the script runs here, as whoever runs the test."""
    command = shell.command(request.script, request.limit_s, "nodeready:fake", request.payload)
    return run(command, request.limit_s, request.max_bytes)


def one_by_one(*steps: Does) -> Does:
    """A node that does this first, then that; the last of them for good."""
    left = list(steps)

    def does(request: Request) -> Answer | None:
        now = left.pop(0) if len(left) > 1 else left[0]
        return now(request)

    return does


class Fake(Transport):
    """Nodes that answer in the order in which they stand here.

    asked: every request, as it came
    ended: how often what ran on the nodes was ended
    said:  node -> the channel that `open` gives
    """

    def __init__(
        self, nodes: Mapping[str, Does], channels: Mapping[str, NodeChannel] | None = None
    ) -> None:
        super().__init__(nodes)
        self._does = dict(nodes)
        self._channels = dict(channels or {})
        self.asked: list[Request] = []
        self.passwords: dict[str, str] = {}
        self.ended = 0

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Outcomes[ResultT]:
        exchanges = exchanges_of(conversations)
        order: Sequence[str] = self.nodes
        stopped = False
        try:
            for key in sorted(exchanges, key=lambda key: order.index(node_of(key))):
                one = exchanges[key]
                one.start()
                while not one.is_over:
                    assert one.request is not None
                    self._answer(one, one.request, deadline)
                yield key, exchanges.pop(key).outcome
        except KeyboardInterrupt:
            self.interrupted = stopped = True
            for key, one in exchanges.items():
                one.end(Answer(gap=INTERRUPT))
                yield key, one.outcome
        finally:
            if stopped:
                self.end()

    def _answer(self, one: Exchange[ResultT], request: Request, deadline: float | None) -> None:
        self.asked.append(request)
        answer = self._does[request.node](request)
        if answer is not None:
            one.answer(answer)
        elif deadline is not None:
            one.end(Answer(gap=Gap(LATE, LATE_WORDS)))
        else:
            one.answer(Answer(gap=Gap(HUNG, f"no answer in {request.limit_s} s")))

    def open(self, request: Request) -> NodeChannel:
        self.asked.append(request)
        return self._channels[request.node]

    def end(self, limit_s: float = 5) -> None:
        self.ended += 1

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        self.passwords.update(dict.fromkeys(nodes, password))
