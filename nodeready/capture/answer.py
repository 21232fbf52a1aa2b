"""A node's trace as one line: ``NONCE trace BASE64``, gzipped JSON, and back."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from typing import Any

#: The most that a node's answer may be when it is unpacked.
MOST_BYTES = 64 * 1024 * 1024
_GZIP = 31  # wbits of zlib for a gzip header and trailer


class AnswerError(ValueError):
    """What a node said is no trace; one line."""


def pack(trace: Mapping[str, Any]) -> str:
    """The trace, without the nonce: ``trace BASE64``."""
    text = json.dumps(trace, separators=(",", ":")).encode("ascii")
    squeeze = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    data = squeeze.compress(text) + squeeze.flush()
    return f"trace {base64.b64encode(data).decode('ascii')}"


def unpack(text: str, nonce: str) -> dict[str, Any]:
    """The trace in what a node printed, whatever else it printed.

    Raises AnswerError when there is none, or what is there is damaged or too large.
    """
    mark = f"{nonce} trace "
    _, found, rest = text.rpartition(mark)
    if not found:
        raise AnswerError("no answer")
    word = rest.partition("\n")[0].strip()
    try:
        data = base64.b64decode(word, validate=True)
        squeezed = zlib.decompressobj(_GZIP)
        plain = squeezed.decompress(data, MOST_BYTES)
        if squeezed.unconsumed_tail:
            raise AnswerError(f"its answer is more than {MOST_BYTES >> 20} MB")
        if not squeezed.eof:
            raise AnswerError("its answer is cut off")
        trace = json.loads(plain)
    except (binascii.Error, zlib.error, ValueError, RecursionError) as problem:
        if isinstance(problem, AnswerError):
            raise
        raise AnswerError("its answer is damaged") from None
    if not isinstance(trace, dict):
        raise AnswerError("its answer is damaged")
    return trace
