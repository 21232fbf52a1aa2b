"""The errors of NCCL, RCCL and gloo: what a line means, and what to look at next.

>>> meaning("NET/IB : Got completion from peer 10.0.0.2<4711> with error 12, opcode 0").key
'ib-retry'
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nodeready import knowledge

CAUSE = "cause"  # the rank (its process, node, GPU or port) failed itself
#: The rank lost a peer, or does not reach it. Its own line says no more.
VICTIM = "victim"
FOLLOWS = "follows"  # the line repeats the error of another line of the same process
NOTE = "note"  # no failure: why NCCL chose what it uses

MAX_LINE = 2000  # characters of a line that are searched


class NcclMeaning(NamedTuple):
    """What a line of a log means: a row of knowledge/nccl_errors.toml."""

    key: str  # stable: ``ib-retry``
    needles: str  # one of these words is in the line, ``|`` between them
    role: str  # CAUSE, VICTIM, FOLLOWS or NOTE
    # of the failure: ``exception``, ``gpu``, ``network``, ``oom``, ``storage``, ``timeout``
    kind: str
    meaning: str  # in one line
    step: str  # what to look at next, in one line
    source: str  # where this is documented or was seen
    pattern: str = ""  # matches in the line; "": a needle is enough


#: The first row that matches is the meaning of a line; a general row stands below special rows.
ERRORS = tuple(NcclMeaning(key, **row) for key, row in knowledge.rows("nccl_errors").items())

#: Only that a peer is lost: the cause stands elsewhere.
LOST_PEER = (
    "watchdog", "gloo-timeout", "gloo-closed", "peer-closed", "peer-reset", "remote",
)  # fmt: skip
FALLBACKS = ("ib-open", "ib-none", "ib-library")  # why NCCL uses no InfiniBand or RoCE

_BY_KEY = {error.key: error for error in ERRORS}
_ROWS = tuple((error, tuple(error.needles.split("|"))) for error in ERRORS)
_NEEDLES = tuple(dict.fromkeys(needle for _, needles in _ROWS for needle in needles))


def meaning(line: str) -> NcclMeaning | None:
    """The meaning of a line of a log; None: no error of NCCL, RCCL or gloo."""
    line = line[:MAX_LINE]
    # Most lines of a log have none of them: a loop costs a third of an expression here.
    for needle in _NEEDLES:
        if needle in line:
            break
    else:
        return None
    for error, needles in _ROWS:
        if any(needle in line for needle in needles) and (
            not error.pattern or re.search(error.pattern, line)
        ):
            return error
    return None


def by_key(key: str) -> NcclMeaning:
    """The row with this key. Raises KeyError."""
    return _BY_KEY[key]
