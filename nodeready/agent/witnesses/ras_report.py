"""The report of NCCL's RAS port, in both of its forms, as dataclasses. Pure.

The forms: NCCL's src/ras/client_support.cc (versions 2.24 to 2.32).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nodeready.core import wire

#: Maximum memory of a report's objects.
_MAX_COST = 400 << 20
#: Maximum members listed of all communicators; maximum communicators.
_MAX_MEMBERS, _MAX_COMMUNICATORS = 4096, 1024
#: Members that are listed of each communicator if not all can be; more if more deviate.
_MIN_SHOWN = 64
#: Maximum kinds of collectives that are listed of a member.
_MAX_COLLECTIVES = 16


@dataclass(frozen=True)
class Member:
    """A process in a communicator."""

    rank: int  # in the communicator
    host: str  # an address of its node in NCCL's form, which may differ from the node's name
    pid: int  # in its own container
    # launches of each collective: ((``AllReduce``, 41), ...)
    counts: tuple[tuple[str, int], ...] = ()
    missing: str = ""  # "": it is present; ``unresponsive``, ``dead`` or ``missing``
    # an asynchronous error, an abort, or a state such as initialisation; "": none
    problem: str = ""
    world_rank: int = -1  # its rank in the whole job; -1: not known


@dataclass(frozen=True)
class Communicator:
    """One communicator."""

    hash: str
    size: int  # the number of ranks that it should have
    # members that are missing, have a problem or deviate from the usual counts come first; the
    # healthy members, and the report's older form, may be incomplete
    members: tuple[Member, ...]
    # the counts that most members have; (): the report has none
    usual: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Ras:
    """The answer of the port."""

    absent: str = ""  # why there is no answer, one line; "": there is an answer
    version: str = ""  # of NCCL
    timeouts: int = 0  # peers that did not answer the port's own query
    communicators: tuple[Communicator, ...] = ()


def with_world_ranks(
    groups: Sequence[Communicator], rank_by_pid: Mapping[int, int | None], world: int | None
) -> tuple[Communicator, ...]:
    """The communicators, with each member's rank in the whole job.

    rank_by_pid: pid of each process of the job on this node, also in its container -> its rank
    world:       number of ranks of the job; None: not known

    A communicator of all ranks has them in the job's order (PyTorch's default group, MPI's world),
    unless a process of this node has another number in it than in the job. It gives the rank of
    each host and pid, and thereby the ranks in all other communicators.
    """
    hosts: dict[str, set[int]] = {}
    for group in groups:
        for member in group.members:
            hosts.setdefault(member.host, set()).add(member.pid)
    # Another node may have the same pids. On this node, all pids are the job's.
    local_hosts = [host for host, pids in hosts.items() if host and pids <= rank_by_pid.keys()]
    rank_by_member: dict[tuple[str, int], int] = {}
    if len(local_hosts) == 1:
        rank_by_member = {
            (local_hosts[0], pid): rank for pid, rank in rank_by_pid.items() if rank is not None
        }
    for group in groups:
        has_job_order = group.size == world and all(
            rank_by_member.get((member.host, member.pid), member.rank) == member.rank
            for member in group.members
        )
        for member in group.members if has_job_order else ():
            if member.pid:
                rank_by_member.setdefault((member.host, member.pid), member.rank)

    def numbered(member: Member) -> Member:
        return replace(member, world_rank=rank_by_member.get((member.host, member.pid), -1))

    return tuple(replace(group, members=tuple(map(numbered, group.members))) for group in groups)


def lists_all_members(ras: Ras) -> bool:
    """Whether the report lists all members."""
    return all(group.hash.startswith("0x") for group in ras.communicators)


# --- The report as JSON (2.28.7 and newer).

#: A value at the end of a line before a key or an object in the next: version 2.28.7 leaves the
#: comma out after `nvml_dev` of a missing rank.
_NO_COMMA = re.compile(r'([0-9"}\]el])([ \t\r]*\n\s*)(?=["{])')

#: ncclResult_t of nccl.h.
_RESULTS = {
    1: "unhandled CUDA error", 2: "system error", 3: "internal error", 4: "invalid argument",
    5: "invalid usage", 6: "remote process error",
}  # fmt: skip
_IN_PROGRESS = 7


def read_json(text: str) -> Ras | None:
    """The report in JSON; None for any other text."""
    document: Any = None
    for candidate in (text, _NO_COMMA.sub(r"\1,\2", text)):
        with contextlib.suppress(wire.DecodeError):
            document = wire.load_json(candidate, _MAX_COST)
            break
    if not isinstance(document, dict) or not isinstance(document.get("communicators"), list):
        return None
    return Ras(
        version=_text(document.get("nccl_version")),
        timeouts=_whole_number(_dict(document.get("ras")).get("timeouts_count")),
        communicators=tuple(map(_communicator, _dicts(document["communicators"]))),
    )


def _whole_number(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else otherwise


def _text(value: Any) -> str:
    return value[:80] if isinstance(value, str) else ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _communicator(group: Mapping[str, Any]) -> Communicator:
    members = [
        replace(_member(rank), counts=_counts(rank), problem=_problem(_dict(rank.get("status"))))
        for rank in _dicts(group.get("ranks"))
    ]
    members += [
        replace(_member(rank), missing=_missing(rank))
        for rank in _dicts(group.get("missing_ranks"))
    ]
    usual = Counter(member.counts for member in members if member.counts)
    return Communicator(
        _text(group.get("hash")),
        _whole_number(group.get("size")),
        tuple(members),
        max(usual, key=lambda counts: usual[counts], default=()),
    )


def _member(rank: Mapping[str, Any]) -> Member:
    return Member(
        _whole_number(rank.get("rank"), -1),
        _text(rank.get("host")),
        _whole_number(rank.get("pid")),
    )


def _counts(rank: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The launches of each collective, as in `Member.counts`."""
    counts = list(_dict(rank.get("collective_counts")).items())[:_MAX_COLLECTIVES]
    return tuple((_text(name), _whole_number(count)) for name, count in counts)


def _problem(status: Mapping[str, Any]) -> str:
    init_state = _whole_number(status.get("init_state"))
    error = _whole_number(status.get("async_error"))
    if status.get("abort_flag") is True:
        return "aborted"
    if error not in (0, _IN_PROGRESS):
        return f"asynchronous error: {_RESULTS.get(error, error)}"
    if init_state == _IN_PROGRESS:
        return "in initialisation"
    if init_state:
        return f"initialisation failed: {_RESULTS.get(init_state, init_state)}"
    if status.get("destroy_flag") is True or status.get("finalize_called") is True:
        return "being destroyed"
    return ""


def _missing(rank: Mapping[str, Any]) -> str:
    """Why a member is missing, as in `Member.missing`."""
    status = _dict(rank.get("status"))
    if status.get("considered_dead") is True:
        return "dead"
    return "unresponsive" if status.get("unresponsive") is True else "missing"


def within_limits(groups: Sequence[Communicator]) -> tuple[Communicator, ...]:
    """The communicators, with deviating members first, and within the maximum of both."""

    def plain(group: Communicator, member: Member) -> bool:
        return not member.missing and not member.problem and member.counts == group.usual

    odd = [sum(not plain(group, member) for member in group.members) for group in groups]
    order = sorted(range(len(groups)), key=lambda index: (not odd[index], -groups[index].size))
    shown: dict[int, Communicator] = {}
    remaining = _MAX_MEMBERS
    has_room = sum(len(group.members) for group in groups) <= _MAX_MEMBERS
    for index in order[:_MAX_COMMUNICATORS]:
        group = groups[index]
        members = sorted(group.members, key=partial(plain, group))
        if not has_room:
            members = members[: min(remaining, max(odd[index], _MIN_SHOWN))]
        remaining -= len(members)
        shown[index] = replace(group, members=tuple(members))
    return tuple(shown[index] for index in sorted(shown))


# --- The report as text (before 2.28.7): a table of groups of communicators, then errors.

_GROUP = re.compile(
    r" *(\d{1,9}) +(\d{1,9}) +(\d{1,9}) +(\d{1,9}(?:-\d{1,9})?) +(\d{1,9}) +(\d{1,9}) +"
    r"([A-Z]+) +([A-Z,]+) *"
)
_COMMUNICATOR = re.compile(r"#(\d{1,9})-(\d{1,9}) \(([0-9a-f]{1,16})\) ([A-Z]+) *")
_AT = r"GPUs? [^\n]{0,200}? managed by process (\d{1,9}) on node (\S{1,80})"
_RANK = re.compile(rf" *Rank (\d{{1,9}})(?: (\S.{{0,200}}?))? -- (?:{_AT}|\[.{{0,80}}\]) *")
_PROCESS = re.compile(r" *Process (\d{1,9}) on node (\S{1,80}) managing GPU.{0,300}")
_OPERATIONS = re.compile(r" *Communicator ranks have different (.{1,40}?) ?operation counts *")
_SEVERAL = re.compile(r" *(\d{1,9}) ranks (have|reported) (.{1,120}?) *")
_LAUNCHED = re.compile(r"(?:has |have )?launched up to operation (\d{1,19})")
_NONE_LAUNCHED = re.compile(r"(?:has |have )?not launched any operations")
_STATUS = re.compile(r"(?:has |have )?status ([A-Z]+)")
_REPORTED = re.compile(r"reported (.{1,80})")
_TIMEOUTS = re.compile(r" *Encountered (\d{1,9}) communication timeouts? while gathering.*")
_STATES = {"INIT": "in initialisation", "FINALIZE": "being destroyed", "ABORT": "aborted"}


class _RasSection:
    """One communicator, collected from the report line by line."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.kind = ""
        self.operation = ""
        self.several = ""
        self.members: dict[int, Member] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.usual: dict[str, tuple[int, int]] = {}

    def line(self, row: str, dead: set[tuple[str, int]]) -> None:
        """Take one more line."""
        if counts := _OPERATIONS.fullmatch(row):
            self.operation, self.several = counts[1].strip(), ""
        elif rank := _RANK.fullmatch(row):
            pid, host = int(rank[3] or 0), rank[4] or ""
            number = int(rank[1])
            member = self.members.get(number) or Member(number, host, pid)
            self.members[number] = self._with_status(member, rank[2] or self.several, dead)
        elif many := _SEVERAL.fullmatch(row):
            self.several = f"{many[2]} {many[3]}"
            if (number_ := _operations(self.several)) is not None and self.operation:
                before = self.usual.get(self.operation, (0, 0))
                self.usual[self.operation] = max(before, (int(many[1]), number_))

    def _with_status(self, member: Member, words: str, dead: set[tuple[str, int]]) -> Member:
        if self.kind == "INCOMPLETE":
            gone = (member.host, member.pid) in dead
            return replace(member, missing="dead" if gone else "unresponsive")
        launched = _operations(words)
        if launched is not None and self.operation:
            self.counts.setdefault(member.rank, {})[self.operation] = launched
        elif status := _STATUS.fullmatch(words):
            if status[1] == "NOCOMM":
                return replace(member, missing="missing")
            return replace(member, problem=_STATES.get(status[1], member.problem))
        elif error := _REPORTED.fullmatch(words):
            return replace(member, problem=f"error: {error[1].strip().lower()}")
        return member

    def communicator(self) -> Communicator:
        members = tuple(
            replace(member, counts=tuple(self.counts.get(number, {}).items()))
            for number, member in sorted(self.members.items())
        )
        usual = tuple((name, count) for name, (_, count) in self.usual.items())
        return Communicator(self.name, self.size, members, usual)


def _operations(words: str) -> int | None:
    """The number of launched operations; None: the text has no such number."""
    if _NONE_LAUNCHED.fullmatch(words):
        return 0
    match = _LAUNCHED.fullmatch(words)
    return min(int(match[1]), (1 << 63) - 1) if match else None


def read_text(text: str) -> Ras | None:
    """The report in its older form, which names only deviating members; None: another text."""
    version = re.search(r"^[NR]CCL version (\S{1,60}) compiled with", text, re.M)
    if version is None:
        return None
    sizes: dict[str, int] = {}
    quiet: list[Communicator] = []
    sections: dict[str, _RasSection] = {}
    dead: set[tuple[str, int]] = set()
    section: _RasSection | None = None
    killed, timeouts = False, 0
    for row in text.splitlines():
        if group := _GROUP.fullmatch(row):
            sizes[group[1]] = int(group[5])
            if group[8] == "OK":
                quiet.append(Communicator(f"group {group[1]}", int(group[5]), ()))
        elif head := _COMMUNICATOR.fullmatch(row):
            section = sections.setdefault(head[3], _RasSection(head[3], sizes.get(head[1], 0)))
            section.kind, section.operation, section.several = head[4], "", ""
        elif row in ("DEAD", "INCOMPLETE", "TIMEOUT", "Warnings", "Errors"):
            section, killed = None, row == "DEAD"
        elif process := _PROCESS.fullmatch(row):
            if killed:
                dead.add((process[2], int(process[1])))
        elif late := _TIMEOUTS.fullmatch(row):
            timeouts = int(late[1])
        elif section is not None:
            section.line(row, dead)
    if not sizes and "No communicator data collected" not in text:
        return None
    groups = [section.communicator() for section in sections.values()] + quiet
    return Ras("", version[1], timeouts, tuple(groups))
