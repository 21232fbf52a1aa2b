"""NCCL's RAS port: the library's report of its communicators, fetched on one node of a job.

A query has crashed jobs. So nothing connects before these checks: the library and its version, no
rank that creates a communicator, and a listener that only the job's own processes hold. Files and
the port's answer are read in a fork that has only the rights of the job's user, under limits.

The port, its commands and both forms of its report: NCCL's src/ras/client.cc and
src/ras/client_support.cc (versions 2.24 to 2.32). Faults: NVIDIA/nccl issues 1669 and 1718 (crash
while a communicator is made, 2.26), 1762 (memory, fixed in 2.29.2), and 2346 (communicators that
are being made, reported for 2.29.7, open; the loop of rasCollCommsInit that causes it is the same
in the sources of 2.28 and of 2.31).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nodeready.agent.proc import Listener, all_listeners, all_pids, socket_inodes
from nodeready.agent.runtime import ForkedWorker, ProcessSupervisor, Send
from nodeready.agent.stacks.processes import FAMILIES
from nodeready.agent.users_file import confine, give_up, rights_of_job
from nodeready.agent.witnesses import software
from nodeready.core import wire

# --- The report of NCCL's RAS port, in both of its forms, as dataclasses. Pure.
#
# The forms: NCCL's src/ras/client_support.cc (versions 2.24 to 2.32).

_MAX_COST = 400 << 20  # maximum memory of a report's objects
#: Maximum members listed of all communicators; maximum communicators.
_MAX_MEMBERS, _MAX_COMMUNICATORS = 4096, 1024
#: Members that are listed of each communicator if not all can be; more if more deviate.
_MIN_SHOWN = 64
_MAX_COLLECTIVES = 16  # maximum kinds of collectives that are listed of a member


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
    hash: str
    size: int  # the number of ranks that it should have
    # members that are missing, have a problem or deviate from the usual counts come first; the
    # healthy members, and the report's older form, may be incomplete
    members: tuple[Member, ...]
    # the counts that most members have; (): the report has none
    usual: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Ras:
    absent: str = ""  # why there is no answer, one line; "": there is an answer
    version: str = ""  # of NCCL
    timeouts: int = 0  # peers that did not answer the port's own query
    communicators: tuple[Communicator, ...] = ()


def with_world_ranks(
    groups: Sequence[Communicator], rank_by_pid: Mapping[int, int | None], world: int | None
) -> tuple[Communicator, ...]:
    """The communicators, with each member's rank in the whole job. rank_by_pid: pid of each
    process of the job on this node, also in its container -> its rank. world: number of ranks of
    the job; None: not known. A communicator of all ranks has them in the job's order (PyTorch's
    default group, MPI's world), unless a process of this node has another number in it. It gives
    the rank of each host and pid, and thereby the ranks in all other communicators.
    """
    hosts: dict[str, set[int]] = {}
    for group in groups:
        for member in group.members:
            hosts.setdefault(member.host, set()).add(member.pid)
    # Another node may have the same pids. On this node, all pids are the job's.
    local_hosts = [host for host, pids in hosts.items() if host and pids <= rank_by_pid.keys()]
    rank_by_member: dict[tuple[str, int], int] = {}
    if len(local_hosts) == 1:
        numbered_pids = ((pid, rank) for pid, rank in rank_by_pid.items() if rank is not None)
        rank_by_member = {(local_hosts[0], pid): rank for pid, rank in numbered_pids}
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
    missing_ranks = _dicts(group.get("missing_ranks"))
    members += [replace(_member(rank), missing=_missing(rank)) for rank in missing_ranks]
    usual = Counter(member.counts for member in members if member.counts)
    counts = max(usual, key=lambda counts: usual[counts], default=())
    size = _whole_number(group.get("size"))
    return Communicator(_text(group.get("hash")), size, tuple(members), counts)


def _member(rank: Mapping[str, Any]) -> Member:
    number, pid = _whole_number(rank.get("rank"), -1), _whole_number(rank.get("pid"))
    return Member(number, _text(rank.get("host")), pid)


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
        self.kind = self.operation = self.several = ""
        self.members: dict[int, Member] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.usual: dict[str, tuple[int, int]] = {}

    def line(self, row: str, dead: set[tuple[str, int]]) -> None:
        if counts := _OPERATIONS.fullmatch(row):
            self.operation, self.several = counts[1].strip(), ""
        elif rank := _RANK.fullmatch(row):
            number = int(rank[1])
            member = self.members.get(number) or Member(number, rank[4] or "", int(rank[3] or 0))
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
        rows = ((m, self.counts.get(number, {})) for number, m in sorted(self.members.items()))
        members = tuple(replace(member, counts=tuple(counts.items())) for member, counts in rows)
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


# --- The query.

#: The first version in which a report does not corrupt the job's memory (NVIDIA/nccl#1762).
SAFE = (2, 29, 2)
_PORT = 28028  # the port, unless NCCL_RAS_ADDR names another address (NCCL user guide)
_MAX_BYTES = 32 << 20  # maximum bytes of an answer: some 50,000 members
_MEMORY, _CPU_S = 1 << 30, 20  # maximum memory and CPU seconds of the fork
_MAX_DESCRIPTORS = 65536  # maximum descriptors read of a process
#: Maximum seconds that the port waits for the job's other processes (RAS_COLLECTIVE_LEG_TIMEOUT).
_LEG_S = 5


class _Absent(Exception):
    """Why there is no report, one line."""


# --- A rank that creates a communicator.

#: Calls that create a communicator.
_CREATORS = frozenset((
    "init_process_group", "new_group", "_new_group_with_tag", "new_subgroups",
    "new_subgroups_by_enumeration", "split_group", "_new_process_group_helper",
    "init_device_mesh", "ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitAll",
    "ncclCommSplit",
))  # fmt: skip
#: A collective returns when it is enqueued. So a rank inside the call may create the communicator
#: of a group that is used for the first time (ProcessGroupNCCL::initNCCLComm).
_CALLS = re.compile(
    r"(all_reduce|broadcast|reduce|all_gather|gather|scatter|reduce_scatter|all_to_all|barrier"
    r"|send|recv|isend|irecv|batch_isend_irecv|monitored_barrier)\w*"
)
_C10D = "distributed_c10d.py"


def makes_communicator(frames: Sequence[tuple[str, str]]) -> bool:
    """Whether a main thread may create a communicator. frames: (function, file), root to leaf"""
    if any(function in _CREATORS for function, _ in frames):
        return True
    return any(file.endswith(_C10D) and _CALLS.fullmatch(name) for name, file in frames[-1:])


# --- The gate.

#: (pid, uid, global rank) of a process of the job.
RasRank = tuple[int, int, "int | None"]


def observe(
    supervisor: ProcessSupervisor, ranks: Sequence[RasRank], environment: Mapping[str, str],
    allow: bool, limit_s: float, *, makes_communicator: bool = False,
) -> Ras:  # fmt: skip
    """The report of a job's RAS port. ranks: its processes on this node
    environment: of the first of these
    allow: query the port even if a query is known to have crashed jobs
    makes_communicator: a rank of this node may create a communicator
    """
    try:
        address = _open_gate(ranks, environment)
    except _Absent as absent:
        return Ras(str(absent))
    uid = ranks[0][1]
    user_ranks = [rank for rank in ranks if rank[1] == uid]
    texts = (environment.get(name, "") for _, _, names in FAMILIES for name in names)
    world = next((int(text[:10]) for text in texts if text.isdecimal()), None)
    until = min(supervisor.deadline, time.monotonic() + limit_s)

    def query() -> Ras:
        """The report, after checks of the library and the listener. Raises _Absent, OSError."""
        pids = [pid for pid, _, _ in user_ranks]
        version = software.find_library(pids, uid)
        # Without a listener, a warning about a query makes no sense.
        listener = _listener_address(pids, uid, address)
        if makes_communicator:
            raise _Absent("a rank may be making a communicator: asking then has crashed jobs")
        if not allow and (danger := _danger(version, world == len(ranks))):
            raise _Absent(f"{danger}: --ras asks all the same")
        ras = _fetch_report(listener, until)
        rank_by_pid = {number: rank for pid, _, rank in user_ranks for number in all_pids(pid)}
        members = (member for group in ras.communicators for member in group.members)
        listed_pids = {member.pid for member in members if member.host}
        lists_all_members = all(group.hash.startswith("0x") for group in ras.communicators)
        if ras.communicators and lists_all_members and not listed_pids & rank_by_pid.keys():
            raise _Absent(f"another job has answered at {_shown(listener)}")
        groups = with_world_ranks(ras.communicators, rank_by_pid, world)
        return replace(ras, version=ras.version or version, communicators=within_limits(groups))

    def work(send: Send) -> None:
        try:
            give_up(rights_of_job(user_ranks[0][0], uid))
            confine(_MEMORY, _CPU_S)
            ras = query()
        except (_Absent, software.NoNccl) as absent:
            ras = Ras(str(absent))
        except (MemoryError, RecursionError):
            ras = Ras("its answer is too large")
        except OSError as problem:
            ras = Ras(f"its port cannot be asked: {problem.strerror or problem}"[:300])
        send(wire.plain(ras))

    # The fork keeps its own limit. If it hangs in the kernel, it is left behind.
    worker = ForkedWorker(work, max(0.2, until + 0.5 - time.monotonic()))
    try:
        for message in worker.messages(limit_s + 1.0, until + 0.5):
            if message is None:
                return Ras(f"nothing is known of its port after {limit_s:g} s")
            return wire.decode(Ras, message)
    finally:
        worker.end()
    return Ras("its answer could not be read")


def _danger(version: str, has_all_ranks: bool) -> str:
    """Why a query may crash the job; "": it is safe."""
    if (numbers := software.numbers(version)) is None:
        return "the version of the job's NCCL is not known, and old ones crash"
    if numbers < SAFE:
        safe = ".".join(map(str, SAFE))
        return f"NCCL {version}: asking versions before {safe} has crashed jobs"
    # The job may have ranks on other nodes, which were not checked.
    cause = "while a communicator is made, also on another node, has crashed jobs"
    return "" if has_all_ranks else f"NCCL {version}: asking {cause}"


def _open_gate(ranks: Sequence[RasRank], environment: Mapping[str, str]) -> tuple[str, int]:
    """The port's address, from the environment alone. Raises _Absent."""
    if not ranks:
        raise _Absent("no rank was found on this node")
    # As ncclParam reads it: strtoll with base 0.
    if re.fullmatch(r"\s*[+-]?0+(x0+)?", environment.get("NCCL_RAS_ENABLE", "1")):
        raise _Absent("the job has NCCL_RAS_ENABLE=0")
    return _address(environment.get("NCCL_RAS_ADDR", ""))


def _address(text: str) -> tuple[str, int]:
    """Host ("": localhost) and port of NCCL_RAS_ADDR (`ncclSocketGetAddrFromString`). A name is
    not resolved, because a name service may hang. Raises _Absent.
    """
    if not text:
        return "", _PORT
    match = re.fullmatch(
        r"\[([0-9a-fA-F:.]{2,45})(?:%\w+)?\]:(\d{1,5})|([^:\s]{1,80}):(\d{1,5})", text
    )
    if match:
        host, port = match[1] or match[3], int(match[2] or match[4])
        if host == "localhost":
            return "", port
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host)), port
    raise _Absent(f"NCCL_RAS_ADDR={ascii(text[:60])[1:-1]}: only a numeric address is asked")


# --- The listener, which must belong to the job.


def _matches(listener: Listener, host: str, port: int) -> bool:
    """Whether a connection to this host ("": localhost) and port may reach this listener."""
    if listener.port != port:
        return False
    address = ipaddress.ip_address(listener.address)
    mapped = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or mapped.is_unspecified:
        return True
    return mapped.is_loopback if not host else mapped == ipaddress.ip_address(host)


def _listener_address(pids: Sequence[int], uid: int, address: tuple[str, int]) -> tuple[str, int]:
    """The address to connect to, at which only processes of the job listen. Raises _Absent."""
    host, port = address
    own_namespace = os.readlink("/proc/self/ns/net")
    if any(os.readlink(f"/proc/{pid}/ns/net") != own_namespace for pid in pids):
        raise _Absent("the job has a network of its own (a container's): its port is not asked")
    matching = [listener for listener in all_listeners() if _matches(listener, host, port)]
    place = _shown((host or "localhost", port))
    if not matching:
        raise _Absent(f"nothing listens at {place}: no communicator of NCCL's, or no RAS")
    own_inodes = {inode for pid in pids for inode in socket_inodes(pid, _MAX_DESCRIPTORS)}
    for listener in matching:
        if listener.uid != uid or str(listener.inode) not in own_inodes:
            owner = "another user's" if listener.uid != uid else "not one of this job's"
            raise _Absent(f"a process that is {owner} listens at {place}: it is not asked")
    if host:
        return host, port
    chosen = ipaddress.ip_address(matching[0].address)
    if chosen.is_unspecified:
        return ("127.0.0.1" if chosen.version == 4 else "::1"), port
    return str(chosen), port


def _shown(listener: tuple[str, int]) -> str:
    host, port = listener
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- The dialogue: lines that end in a newline, then a report that ends with the connection.


def _fetch_report(listener: tuple[str, int], until: float) -> Ras:
    """The report of the port. Raises _Absent."""
    place = _shown(listener)
    try:
        # Without getaddrinfo: it imports a codec, which the user may not be able to read.
        family = socket.AF_INET6 if ":" in listener[0] else socket.AF_INET
        with socket.socket(family) as connection:
            connection.settimeout(_remaining_s(until))
            connection.connect(listener)
            dialogue = _RasDialogue(connection, until)
            first = dialogue.ask("CLIENT PROTOCOL 2")
            if not first.upper().startswith(b"SERVER PROTOCOL "):
                raise _Absent(f"what listens at {place} is no RAS port: {_beginning(first)}")
            leg_s = max(1, min(_LEG_S, int(_remaining_s(until) / 2)))
            if dialogue.ask(f"TIMEOUT {leg_s}").strip() != b"OK":
                raise _Absent(f"the RAS port at {place} takes no time limit")
            # Before 2.28.7 there is no such command, and the report is text.
            json = dialogue.ask("SET FORMAT json").strip() == b"OK"
            text = dialogue.report("VERBOSE STATUS").decode("utf-8", "replace")
    except socket.timeout:
        raise _Absent(f"the RAS port at {place} gave no whole answer in time") from None
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise _Absent(f"the RAS port at {place} broke off: {reason}") from None
    if (ras := read_json(text) if json else read_text(text)) is None:
        beginning = _beginning(text.encode())
        raise _Absent(f"the RAS port at {place} said what makes no sense: {beginning}")
    return ras


def _remaining_s(until: float) -> float:
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise socket.timeout
    return remaining_s


def _beginning(data: bytes) -> str:
    return ascii(data[:60].decode("utf-8", "replace"))[1:-1] or "nothing"


class _RasDialogue:
    """Commands and answers over one connection. until: a moment of time.monotonic()"""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection, self.until = connection, until
        self.received = bytearray()

    def _send(self, words: str) -> None:
        self.connection.settimeout(_remaining_s(self.until))
        self.connection.sendall(f"{words}\n".encode("ascii"))

    def _receive(self) -> bool:
        self.connection.settimeout(_remaining_s(self.until))
        chunk = self.connection.recv(1 << 16)
        self.received += chunk
        return bool(chunk)

    def ask(self, words: str) -> bytes:
        """Send a line and return the line that answers it."""
        self._send(words)
        while b"\n" not in self.received and len(self.received) < 4096:
            if not self._receive():
                raise ConnectionError("it has closed the connection")
        row, _, remaining = bytes(self.received).partition(b"\n")
        self.received = bytearray(remaining)
        return row

    def report(self, words: str) -> bytes:
        """Send a line and return everything that follows."""
        self._send(words)
        while self._receive():
            if len(self.received) > _MAX_BYTES:
                raise _Absent(f"the report of the RAS port is longer than {_MAX_BYTES >> 20} MiB")
        return bytes(self.received)
