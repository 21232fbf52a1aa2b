"""Fetch the last lines of a node's files: the request, and the answer as a `Tail`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nodeready.node import payload
from nodeready.node.logs.tail import Config, Tail
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError
from nodeready.transport.base import FAILED, INTERRUPTED, UNREACHED, Conversation, Failure
from nodeready.transport.program import new_nonce, request

#: Bytes of a node's answer, unpacked, that are looked at.
MAX_UNPACKED = 4 << 20


def read(text: str, nonce: str) -> Tail:
    """The tail in what a node printed. Raises ProbeError, one line, when there is none."""
    for name, data in wire.lines(text, nonce):
        if name == "tail" and isinstance(data, str):
            return wire.decode(Tail, wire.load_json(wire.unpack(data, MAX_UNPACKED)))
    if f"{nonce} {payload.NO_PYTHON}" in text:
        raise ProbeError(payload.NO_PYTHON)
    raise ProbeError("the node gave no answer", text[:200])


@dataclass(frozen=True)
class Fetched:
    """The result of one node. error: one line when there is no tail, and its kind."""

    tail: Tail | None = None
    error: str = ""
    kind: str = ""

    @property
    def unreachable(self) -> bool:
        return self.kind in UNREACHED


def fetch_tail(node: str, config: Config, tag: str) -> Conversation[Fetched]:
    """The conversation with one node. config: its nonce and tag are set here; tag: of the run"""
    own = replace(config, nonce=new_nonce(), tag=tag)
    answer = yield request(node, "nodeready.node.logs.tail", own)
    if answer.error:
        return Fetched(error=answer.error, kind=answer.kind)
    try:
        return Fetched(read(answer.stdout, own.nonce))
    except ProbeError as error:
        why = "" if answer.ok else f": {answer.reason()}"
        return Fetched(error=f"{error}{why}", kind=FAILED)


def fetched(found: Fetched | Failure) -> Fetched:
    """The result of a conversation, also of a failed one; an interrupt is no error."""
    if isinstance(found, Failure) or found.kind == INTERRUPTED:
        error = "" if found.kind == INTERRUPTED else found.error
        return Fetched(error=error, kind=found.kind)
    return found
