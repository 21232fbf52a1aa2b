"""A program of ours on a node: the request that runs it, and its answer, read within bounds.

A program is a module with ``main(config)`` and a dataclass ``Config``, which has at least a
``nonce``, a ``tag`` and ``limit_s``; see `nodeready.node.payload`.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

from nodeready.node import payload
from nodeready.subjects import wire
from nodeready.transport.base import Answer, Request

#: Seconds that a command has on a node beyond the program's own limit.
MARGIN_S = 2


def new_nonce() -> str:
    """A random word with which each line of a program's answer begins."""
    return f"nodeready-{os.urandom(8).hex()}"


def request(
    node: str, main: str, config: Any, *, margin_s: int = MARGIN_S, mark: str = "", **how: Any
) -> Request:
    """What runs the module ``main`` with this config on a node.

    how: as for `payload.program`
    """
    made = payload.program(main, config, **how)
    return Request(node, made.script, config.limit_s + margin_s, made.text, mark)


def rows(answer: Answer, config: Any, kinds: Mapping[str, type[Any]]) -> list[Any]:
    """What a node's program printed, as these dataclasses. Raises ProbeError when it makes no
    sense.
    """
    return [
        wire.decode(kinds[name], data)
        for name, data in wire.lines(answer.stdout, config.nonce)
        if name in kinds
    ]


def no_answer_reason(answer: Answer, config: Any, what: str) -> str:
    """Why a node's program printed no row that we know.

    what: what is not done without a Python, such as "cores cannot be looked at"
    """
    if f"{config.nonce} {payload.NO_PYTHON}" in answer.stdout:
        return f"{payload.NO_PYTHON}: {what}"
    return answer.error or "no answer from the node's Python"


# --- A packed answer, unpacked within bounds: bytes, depth, items, text, finite numbers.
#
# A node's answer is a stranger's data: it must not cost more memory and time here than a sound
# answer would.

#: Nothing of ours is nested deeper, has more members, or a longer text.
MAX_DEPTH, MAX_ITEMS, MAX_TEXT = 32, 4_000_000, 8 << 20
#: No time in seconds and no size in bytes is larger.
MAX_NUMBER = 1 << 64


class DecodeError(ValueError):
    """An answer that is not one of ours; one line."""


def unpack(text: str, max_bytes: int) -> bytes:
    """The bytes of base64 text that zlib packed. Raises DecodeError, also for more than that."""
    try:
        opening = zlib.decompressobj()
        found = opening.decompress(base64.b64decode(text, validate=True), max_bytes)
    except (ValueError, zlib.error, binascii.Error) as error:
        raise DecodeError("the answer is damaged") from error
    if not opening.eof:
        raise DecodeError("the answer is cut off, or too large")
    return found


def load_json(text: str | bytes) -> object:
    """A JSON text as plain data within the bounds. Raises DecodeError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError("the answer makes no sense") from error
    check_bounds(found)
    return found


def check_bounds(found: object) -> None:
    """Raise DecodeError for what is nested too deep, too large, or has a number that is none."""
    left, level = MAX_ITEMS, [found]
    for _ in range(MAX_DEPTH):
        left -= len(level)
        if left < 0:
            raise DecodeError("the answer has too many members")
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.keys()
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str) and len(one) > MAX_TEXT:
                raise DecodeError("the answer has a text that is too long")
            elif isinstance(one, (int, float)) and not _in_range(one):
                raise DecodeError("the answer has a number that is none")
        if not inner:
            return
        level = inner
    raise DecodeError("the answer is nested too deep")


def _in_range(number: float) -> bool:
    # Infinity and NaN, which JSON has not, are in no order with it.
    return -MAX_NUMBER < number < MAX_NUMBER
