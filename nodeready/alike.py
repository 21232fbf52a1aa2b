"""What differs trivially between the ranks' log lines, taken out so that equal lines are equal.

Pure. What tells something stays: steps, sequence numbers, losses, sizes, other nodes, other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.log_ranks import Ranks

_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)(?![A-Za-z]))?"

#: What is replaced by what, in this order; before it, what a line has in any case if it is there:
#: to look for that is much quicker.
_ROWS = tuple(
    (needle, re.compile(pattern), into)
    for needle, pattern, into in (
        # loguru, rich and others colour whole lines.
        ("\x1b", r"\x1b\[[0-9;]*m", ""),
        # glog, as c10d writes it: E0301 12:00:00.123456 4711 ProcessGroupNCCL.cpp:616]
        (
            ":",
            rf"(?<![A-Za-z0-9])([IWEFVD])\d{{4}} {_CLOCK}(?:\s+\d+(?= \S+:\d+\]))?",
            r"\1<time>",
        ),
        ("", rf"\b\d{{4}}[-/]\d\d[-/]\d\d(?:[T ]{_CLOCK}{_ZONE})?", "<time>"),
        (":", rf"\b\d{{8}}[T ]{_CLOCK}{_ZONE}", "<time>"),
        (
            ":",
            r"\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
            rf"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{{1,2}} {_CLOCK}"
            r"(?: \d{4})?",
            "<time>",
        ),
        # tqdm: [05:23<06:33,  1.40it/s]
        ("<", r"\[\d+:\d\d(?::\d\d)?<[^\]]*\]", "[<time>]"),
        (":", rf"\b{_CLOCK}{_ZONE}", "<time>"),
        # Seconds since 1970, from 2017 to 2033.
        ("1", r"(?<![\w.])1[5-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?(?![\w.])", "<time>"),
        (
            "",
            r"(?<![\w.])\d+(?:\.\d+)? ?"
            r"(?:ns|us|ms|s|secs?|seconds?|milliseconds?|microseconds?|minutes?)\b(?!/)",
            "<time>",
        ),
        # NCCL: host:pid:thread [device] NCCL INFO
        ("<host>:", r"<host>:\d+:\d+ \[\d+\]", "<host>:<pid>:<pid> [<rank>]"),
        # torchrun with several nodes: [host:rank]
        ("[<host>:", r"\[<host>:\d+\]", "[<host>:<rank>]"),
        ("", r"\b((?i:pid|tid|lwp|thread|process))([ =:#]{0,3})\d+\b", r"\1\2<pid>"),
        # syslog: python[4711]:
        ("]:", r"(?<=[\w)])\[\d{2,7}\](?=:)", "[<pid>]"),
        ("0x", r"\b0x[0-9a-fA-F]{4,}\b", "<address>"),
        ("cuda:", r"\bcuda:\d+\b", "cuda:<rank>"),
    )
)
# [rank7]: Rank 7, rank=7, local_rank 3, GLOBAL_RANK: 7
_RANK = re.compile(
    r"(?i)(?<![a-z])((?:(?:local|global|world)[_ -]?)?rank[ \t_:=#(\[]{0,3})(\d+)\b"
)
# At the beginning: [7]: and [default7]: of torchrun, 7: of srun -l
_FIRST = re.compile(r"^(\[(?:[a-z]+)?|\s*)(\d+)(?=\]:|: )")


def own_names(*names: str) -> re.Pattern[str]:
    """Finds a node's names, with a domain or without, in its own lines."""
    found = {name.partition(".")[0] for name in names if not _is_address(name)} | {*names}
    # A letter alone would be found in other words.
    wanted = sorted((re.escape(name) for name in found if len(name) > 1), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(wanted) or '(?!)'})(?:\.[\w.-]*\w)?(?![\w-])")


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdigit()


def shape(lines: Iterable[str], names: re.Pattern[str], ranks: Ranks) -> tuple[str, ...]:
    """The lines with placeholders for times, addresses, processes, the node and its own rank.

    names: of the node, from `own_names`
    ranks: of the file; where its path tells none, every number behind the word rank is replaced
    """
    own = {number for number in ranks if number is not None}

    def rank(match: re.Match[str]) -> str:
        mine = not own or int(match[2]) in own
        return f"{match[1]}<rank>" if mine else match[0]

    def first(match: re.Match[str]) -> str:
        # A bare number at the beginning may be a step.
        bracket = match[1].startswith("[")
        mine = int(match[2]) in own if own else bracket
        return ("[<rank>" if bracket else "<rank>") if mine else match[0]

    found = []
    for line in lines:
        text = names.sub("<host>", line)
        for needle, pattern, into in _ROWS:
            if needle in text:
                text = pattern.sub(into, text)
        text = _FIRST.sub(first, text)
        found.append(_RANK.sub(rank, text))
    return tuple(found)
