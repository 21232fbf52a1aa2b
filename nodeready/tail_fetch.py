"""The way to the last lines of all nodes' files: one connection and one command per node."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nodeready import carried, shell
from nodeready.capture.tail_seen import Config, Tail
from nodeready.probes.base import ProbeError
from nodeready.proofs import wire
from nodeready.transports.answer import FAILED

if TYPE_CHECKING:
    from nodeready.session import NodeRun, Session

#: Bytes of a node's answer, unpacked, that are looked at.
MAX_UNPACKED = 4 << 20
#: No time in seconds and no size in bytes is larger.
_MOST = 1 << 60

Found = Callable[[str, Tail], None]


def read(text: str, nonce: str) -> Tail:
    """What a node printed as its answer. Raises ProbeError, one line, when it is none."""
    for name, data in wire.lines(text, nonce):
        if name == "tail" and isinstance(data, str):
            tail = wire.decode(Tail, _unpacked(data))
            numbers = [n for f in tail.files for n in (f.size_bytes, f.mtime_s, f.age_s)]
            # Neither infinite nor no number at all, which JSON has not.
            if all(abs(number) < _MOST for number in [tail.left_out, tail.older, *numbers]):
                return tail
            raise ProbeError("the node's answer makes no sense")
    if f"{nonce} {carried.NO_PYTHON}" in text:
        raise ProbeError(carried.NO_PYTHON)
    raise ProbeError("the node gave no answer", text[:200])


def _unpacked(data: str) -> object:
    try:
        unpacking = zlib.decompressobj()
        found = unpacking.decompress(base64.b64decode(data, validate=True), MAX_UNPACKED)
        if unpacking.eof:
            return json.loads(found)
    except (ValueError, RecursionError, zlib.error, binascii.Error):
        pass
    raise ProbeError("the node's answer makes no sense", data[:80])


def fetch(session: Session, config: Config, found: Found) -> Callable[[NodeRun], None]:
    """The work on one node, for `Session.each`: what it has goes to ``found``.

    config: its nonce and tag are set here
    """

    def work(node: NodeRun) -> None:
        if not session.connect(node):
            return
        own = replace(config, nonce=f"nodeready-{secrets.token_hex(8)}", tag=session.tag)
        script = carried.script("nodeready.capture.tail", own)
        limit_s = own.limit_s + 2
        answer = session.carry(node, shell.command(script, limit_s, session.tag), limit_s)
        if answer.error:
            node.fail(answer)
            return
        try:
            tail = read(answer.stdout, own.nonce)
        except ProbeError as error:
            why = "" if answer.ok else f": {answer.reason()}"
            node.error, node.kind = f"{error}{why}", FAILED
            return
        found(node.name, tail)

    return work
