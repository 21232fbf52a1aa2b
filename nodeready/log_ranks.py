"""Whose log a file is, by its path. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple


class Ranks(NamedTuple):
    """The ranks that a path tells; None: it does not."""

    rank: int | None
    local_rank: int | None


_NAMED = re.compile(r"(?i)(?<![a-z])(?:([a-z]+)[_-]|(local))?rank[._=-]?(\d{1,7})(?!\d)")
#: The word before "rank", where the number is another than the global rank.
_LOCAL, _OTHERS = "local", ("node", "group", "dp", "tp", "pp", "cp", "ep", "mp", "sp")
#: torchrun --log-dir: RUN/attempt_0/LOCAL_RANK/stdout.log
_TORCHRUN = re.compile(r"/attempt_\d+/(\d{1,7})/(?:stdout|stderr)\.log$")
#: train.7.out; more digits are a date or a job.
_LAST = re.compile(r"\.(\d{1,5})\.(?:out|err|log|txt)$")


def of(path: str) -> Ranks:
    """The ranks in ``rank_7.log``, ``nccl_trace_rank_7``, ``rank.07/stdout``, ``local_rank3.err``,
    ``attempt_0/3/stdout.log`` (torchrun) and ``train.7.out``; of several, the last.
    """
    rank = local = None
    for before, joined, number in _NAMED.findall(path):
        word = (before or joined).lower()
        if word == _LOCAL:
            local = int(number)
        elif word not in _OTHERS:
            rank = int(number)
    if match := _TORCHRUN.search(path):
        local = int(match[1])
    elif rank is None and local is None and (match := _LAST.search(path)):
        rank = int(match[1])
    return Ranks(rank, local)
