"""What the lines of a log show beside failures: the variables of the job's environment, the
processes of ranks, and that a job has ended well. Pure.

Lines with variables are NCCL's with NCCL_DEBUG=INFO (``NCCL_SOCKET_IFNAME set by environment to
lo``, its src/misc/param.cc), the output of ``env`` and of ``set -x``, torchrun's report of its
rendezvous, and those of PyTorch's TCPStore, which names MASTER_ADDR where it cannot connect
(socket.cpp).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from nodeready import knowledge
from nodeready.agent.failures.rules import PHRASES
from nodeready.agent.log_ranks import LineOrigin, host_node
from nodeready.agent.secrets import redact
from nodeready.agent.witnesses.environment import NAMES
from nodeready.core import wire

#: Maximum variables and addresses of a file, and characters of a value and of a line.
_MAX_VARIABLES, _MAX_ADDRESSES, _MAX_VALUE, _MAX_LINE = 1000, 256, 200, 2000
_NAME = rf"(?P<name>NCCL_[A-Z0-9_]{{1,48}}|{'|'.join(NAMES)})"
_SET = re.compile(rf"NCCL INFO {_NAME} set (?:by environment )?to (?P<value>.{{1,200}}?)\s*$")
_ASSIGNED = re.compile(
    rf"^(?:\++ )?(?:export |declare -x )?{_NAME}=([\"']?)(?P<value>[^\"'$`]*)\2\s*$"
)
_STORE = re.compile(
    r"connect(?:/validate)? to "
    r"(?:\(([\w.:-]{1,253}), |\[([\w.:-]{1,253})\]:|host ([\w.-]{1,253}):)(\d{1,5})\b"
)
_TORCHRUN = re.compile(r"^\s*master_(addr|port)=(\S{1,253})\s*$")
#: The address that NCCL tells its peers, with the name of the node before it.
_ADDRESS = re.compile(
    r"(?:([\w.-]{1,253}):\d{1,9}:\d{1,9} \[\d{1,3}\] NCCL INFO .{0,80})?"
    r"(?:Bootstrap ?: Using|OOB) \S{1,40}?:([0-9a-fA-F.:]{2,45})(?:%\w{1,32})?<"
)
_VERSION = re.compile(r"\bNCCL version ?:? ?(\d{1,3}\.\d{1,4}\.\d{1,4})")
#: ``pid 4711``, ``pid=4711``, ``PID: 4711``; of NCCL's lines, ``gpu1:4711:4720 [0] NCCL INFO``.
_PID = re.compile(
    r"\b[Pp][Ii][Dd](?::? |[=:(])'?(\d{1,9})\b|[\w.-]:(\d{1,9}):\d{1,9} \[\d{1,3}\] NCCL "
)
#: The number of a rank beside that of its process: ``rank 3 (pid 4711)``, ``rank 3: 4711``.
_RANK_PID = re.compile(
    r"(?<!ocal )(?<!ode )(?<!roup )\b[Rr]ank[ =:#]{0,2}(\d{1,7})\b\W{1,4}"
    r"(?:[Pp][Ii][Dd][ =:]{1,2})?(\d{2,9})\b(?![.:/])"
)
#: Of a report about a worker of a group, the number of its process, and in the next line its name
#: with the numbers of its node and on it: ``Worker_0:5``. The first node has the first ranks.
_WORKER_PID = re.compile(r"^\s*pid: (\d{2,9})\s*$")
_WORKER_NAME = re.compile(r"^\s*name: \w{0,200}_0:(\d{1,5})\s*$")
#: What tells of a process with its local rank: the command with which a launcher starts it, or a
#: list of processes, as ``ps`` writes it; and what names all of a node in the order of these.
_SPAWNED = re.compile(
    r"(?:\bprocess (\d{2,9}) spawned with command: .{0,1000}|"
    r"^ *(?:[a-z_]\S{0,31} +)?(\d{2,9}) .{0,400})--local[_-]rank[=\x27 ,]{1,4}(\d{1,4})\b"
)
_KILLING = re.compile(r"\bKilling subprocess (\d{2,9})\b")
#: Words of such lines, and the maximum of them in which a number is searched.
_PID_NEEDLES = "pid", "PID", "Pid", " NCCL ", "process ", "local_rank", "local-rank"
_MAX_PID_LINES = 5000
#: The phrases of a command that has ended well; the question of a shell whose answer is the next
#: line; lines at the end of a log that are searched for them.
_COMMAND_ENDS = "status-0", "program-done", "last-step", "server-stops"
_ASKED, _LAST_LINES = "echo $?", 1000
#: Words of a line that a server has been started, and how many requests it answers until it is
#: known to work.
_SERVER_NEEDLES, _ANSWERS = ("startup complete", "fired up and ready", "is listening on"), 5
_ENDS = knowledge.rows("job_ends").values()
#: Words, and the line that says with one of them that a job has ended well; those that a batch
#: script does not say.
ENDS, OWN_ENDS = (
    tuple(
        (tuple(row["needles"].split("|")), re.compile(row["pattern"]))
        for row in _ENDS if not (is_own and row.get("script"))
    )
    for is_own in (False, True)
)  # fmt: skip
#: Those of who starts again what fails.
MANAGERS_ENDS = tuple(end for end, row in zip(ENDS, _ENDS) if row.get("restarts"))
#: Each such line has one of these words; a search for words is ten times faster.
_NEEDLES = (
    *dict.fromkeys(word for words, _ in ENDS for word in words),
    "NCCL", "master_", "MASTER_", "client socket", "TCP client", "_IFNAME=", "_DEVICES=",
    "_include=", "_BLOCKING=", "_THREADS=", "FI_PROVIDER=",
    "to store for rank: ", "GLOBAL_RANK: ", "distributed init (", "world_size=",
    "pipeline for rank=", "total number of machines", "got rank ", "got new rank ", "RANK=",
    "process_index: ",
    "'RANK'", "PROCESS_ID=", "Final app status", "state: FAILED", "FAILED (", "Exiting because ",
    "esum", "ESUM", "estart from", "estarting from", "ontinuing ",
)  # fmt: skip


@dataclass(frozen=True)
class LogVariable:
    """A variable in the environment of a rank, by a line of its log."""

    name: wire.Name
    value: wire.Name
    line: wire.Number  # its number in the file
    rank: wire.Number | None  # as of a `LogStream`
    local_rank: wire.Number | None  # likewise
    host: wire.Name  # likewise


@dataclass(frozen=True)
class LogPid:
    """The number of a process that a rank names in its log: its own, or one that it started."""

    pid: wire.Number
    rank: wire.Number | None  # as of a `LogStream`
    local_rank: wire.Number | None  # likewise
    host: wire.Name  # likewise


@dataclass(frozen=True)
class LogFacts:
    """What the lines of a log show of the job's environment."""

    variables: tuple[LogVariable, ...] = ()  # the last value of each
    nccl: wire.Name = ""  # the version of NCCL; "": not known
    # those that NCCL tells its peers, each with the name of its node: ``10.0.0.4 gpu4``
    addresses: tuple[wire.Name, ...] = ()
    pids: tuple[LogPid, ...] = ()  # the first ones
    finished: wire.Number = 0  # the last line that says that the job has ended well; 0: none
    own_ranks: tuple[wire.Number, ...] = ()  # that lines without a prefix say of their writer
    command_ended: wire.Number = 0  # as finished, of a command; 0: none, or a command failed
    program_finished: wire.Number = 0  # as finished, in words that a batch script does not say
    manager_finished: wire.Number = 0  # as finished, by who starts again what fails
    # what the lines behind the lone number 0 of a launcher say instead; None: nothing, or several
    renamed_rank: wire.Number | None = None
    resumed: wire.Number = 0  # the last line that says that it continues an earlier job; 0: none
    served: wire.Number = 0  # the last start of a server that has answered requests since; 0: none
    server: wire.Name = ""  # the node of that server, as the line has it; ""


def read_facts(lines: Sequence[str], split: Callable[[str], LineOrigin]) -> LogFacts:
    """What these lines show of the job's environment. split: takes the prefix off a line"""
    variables: dict[tuple[object, str], LogVariable] = {}
    addresses: dict[str, None] = {}
    pids: dict[str, LogPid] = {}
    version, room, finished, own_ranks = "", _MAX_PID_LINES, 0, set[int]()
    program_finished = manager_finished = resumed = 0
    renamed, killed, of_nccl = dict[int, set[int]](), Counter[str](), dict[str, LogPid]()
    for number, line in enumerate(lines, 1):
        # A log may have a pid in each line.
        if "pid: " in line and "_0:" in (following := "".join(lines[number : number + 1])):
            _add_worker(pids, *(split(row[:_MAX_LINE]).text for row in (line, following)))
        if room and any(map(line.__contains__, _PID_NEEDLES)):
            room -= 1
            for rank, pid in _RANK_PID.findall(line[:_MAX_LINE]):
                pids.setdefault(pid, LogPid(int(pid), int(rank), None, ""))
            match = _PID.search(line[:_MAX_LINE])
            if match and ((pid := match[1] or match[2]) not in pids or match[2]):
                origin = split(line[:_MAX_LINE])
                writer = LogPid(int(pid), origin.rank, origin.local_rank, origin.host)
                known = pids.setdefault(pid, writer)
                first = of_nccl.setdefault(pid, writer) if match[2] else writer
                if known == first != writer and first.host == writer.host:
                    # A process with several GPUs has none of their ranks.
                    pids[pid] = replace(writer, rank=None, local_rank=None)
            _add_launched(pids, killed, line[:_MAX_LINE], split)
        if not any(map(line.__contains__, _NEEDLES)):
            continue
        origin = split(line[:_MAX_LINE])
        if PHRASES["ends-badly"].search(origin.text):
            finished = program_finished = manager_finished = 0
        elif ends_well(origin.text):
            finished = number
            is_own = ends_well(origin.text, OWN_ENDS)
            program_finished = number if is_own else program_finished
            is_managers = ends_well(origin.text, MANAGERS_ENDS)
            manager_finished = number if is_managers else manager_finished
        resumed = number if PHRASES["resumes"].search(origin.text) else resumed
        if match := PHRASES["own-rank"].search(origin.text):
            numbers = own_ranks if origin.rank is None else renamed.setdefault(origin.rank, set())
            numbers.add(int(match[1]))
        if not version and (match := _VERSION.search(origin.text)):
            version = match[1]
        if (match := _ADDRESS.search(origin.text)) and len(addresses) < _MAX_ADDRESSES:
            addresses.setdefault(f"{match[2]} {match[1] or ''}".strip()[:_MAX_VALUE])
        for name, value in _shown(origin.text):
            if len(variables) < _MAX_VARIABLES or (origin.key, name) in variables:
                host, rank, local_rank = origin.key
                variables[origin.key, name] = LogVariable(
                    name, redact(name, value[:_MAX_VALUE]), number, rank, local_rank, host
                )
    values = tuple(variables.values()), version, tuple(addresses), tuple(pids.values())
    ranks = tuple(sorted(own_ranks)[:_MAX_ADDRESSES])
    ends = _command_ended(lines, split), program_finished
    lone = renamed[0] if [*renamed] == [0] else set()
    rank = min(lone) if len(lone) == 1 else None
    served = _served(lines, split)
    return LogFacts(*values, finished, ranks, *ends, manager_finished, rank, resumed, *served)


def _served(lines: Sequence[str], split: Callable[[str], LineOrigin]) -> tuple[int, str]:
    """The last start of a server that has answered requests since, 0: none; and its node."""
    started = answers = served = 0
    server = ""
    for number, line in enumerate(lines, 1):
        if any(map(line.__contains__, _SERVER_NEEDLES)):
            origin = split(line[:_MAX_LINE])
            if PHRASES["serves"].search(origin.text):
                started, answers, server = number, 0, host_node(origin.host)
        elif started > served and "POST" in line:
            match = PHRASES["answers"].search(line[:_MAX_LINE])
            answers += match is not None and match[match.lastindex or 0] == "2"
            served = started if answers == _ANSWERS else served
    return served, server if served else ""


def _add_worker(pids: dict[str, LogPid], line: str, name: str) -> None:
    """Add the process that two lines of a report about a worker of a group name."""
    pid, worker = _WORKER_PID.match(line), _WORKER_NAME.match(name)
    if pid and worker and (pid[1] not in pids or pids[pid[1]].rank is None):
        pids[pid[1]] = LogPid(int(pid[1]), int(worker[1]), None, "")


def _add_launched(
    pids: dict[str, LogPid], killed: Counter[str], line: str, split: Callable[[str], LineOrigin]
) -> None:
    """Add the process that a launcher's line or a list of processes names, with its local rank.
    killed: a node -> how many the launcher has named there as it ends all of them
    """
    if not (match := _SPAWNED.search(line) or _KILLING.search(line)):
        return
    host = split(line[:_MAX_LINE]).host
    pid = match[1] or match[2]
    local = int(match[3]) if match.re is _SPAWNED else killed[host]
    killed[host] += match.re is _KILLING
    if pid not in pids or pids[pid].rank is pids[pid].local_rank is None:
        pids[pid] = LogPid(int(pid), None, local, host)


def _command_ended(lines: Sequence[str], split: Callable[[str], LineOrigin]) -> int:
    """The last line that says that a command has ended well; 0: none, or a command failed."""
    ended, before, last = 0, "", lines[-_LAST_LINES:]
    for number, line in enumerate(last, len(lines) - len(last) + 1):
        text = split(line[:_MAX_LINE]).text
        text = f"{_ASKED} {text}" if before.endswith(_ASKED) else text
        if PHRASES["other-status"].search(text):
            return 0
        is_end = any(PHRASES[name].search(text) for name in _COMMAND_ENDS)
        ended, before = number if is_end else ended, text
    return ended


def ends_well(text: str, ends: Sequence[tuple[tuple[str, ...], re.Pattern[str]]] = ENDS) -> bool:
    """Whether a line says that its job has ended well."""
    rows = (pattern for needles, pattern in ends if any(map(text.__contains__, needles)))
    return any(pattern.search(text) for pattern in rows)


def _shown(text: str) -> Iterator[tuple[str, str]]:
    """The variables of one line, without its prefix."""
    if match := _SET.search(text):
        value = match["value"]
        # NCCL ends a number with a full stop.
        yield match["name"], value[:-1] if value[:-1].lstrip("-").isdigit() else value
    elif "client" in text and (match := _STORE.search(text)):
        yield "MASTER_ADDR", match[1] or match[2] or match[3]
        yield "MASTER_PORT", match[4]
    elif match := _ASSIGNED.match(text):
        yield match["name"], match["value"]
    elif match := _TORCHRUN.match(text):
        yield f"MASTER_{match[1].upper()}", match[2]


_IN_SCRIPT = re.compile(
    rf"(?<![\w$]){_NAME}=(?P<value>\"[^\"$`]*\"|'[^']*'|[^\s\"'$`;&|]*)(?P<computed>[\"'$`]?)"
)


def script_variables(text: str) -> dict[str, str]:
    """The variables that a batch script sets, also by ``--export`` and mpirun's ``-x``. A value
    that the shell computes, and a variable that gets several values, are left out.
    """
    values: dict[str, set[str]] = {}
    for row in text.splitlines():
        if row.lstrip().startswith("#") and not row.startswith("#SBATCH"):
            continue
        words = row.replace(",", " ") if "--export" in row else row
        for match in _IN_SCRIPT.finditer(words[:_MAX_LINE]):
            value = "$" if match["computed"] else match["value"].strip("\"'")
            values.setdefault(match["name"], set()).add(redact(match["name"], value[:_MAX_VALUE]))
    fixed = {name: texts for name, texts in values.items() if "$" not in texts}
    return {name: min(texts) for name, texts in fixed.items() if len(texts) == 1}
