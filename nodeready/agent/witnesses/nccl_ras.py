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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nodeready.agent.proc import Listener, all_pids, listeners, socket_inodes
from nodeready.agent.runtime import ForkedWorker, ProcessSupervisor, Send
from nodeready.agent.stacks.processes import FAMILIES
from nodeready.agent.users_file import confine, give_up, rights_of_job
from nodeready.agent.witnesses import software
from nodeready.agent.witnesses.ras_report import (
    Ras,
    lists_all_members,
    read_json,
    read_text,
    with_world_ranks,
    within_limits,
)
from nodeready.core import wire

#: The first version in which a report does not corrupt the job's memory (NVIDIA/nccl#1762).
SAFE = (2, 29, 2)
#: The port, unless NCCL_RAS_ADDR names another address (NCCL user guide).
_PORT = 28028
#: Maximum bytes of an answer: some 50,000 members.
_MAX_BYTES = 32 << 20
#: Maximum memory and CPU seconds of the fork.
_MEMORY, _CPU_S = 1 << 30, 20
#: Maximum bytes of a list of sockets; maximum descriptors read of a process.
_MAX_SOCKETS, _MAX_DESCRIPTORS = 16 << 20, 65536
#: Maximum seconds that the port waits for the job's other processes (RAS_COLLECTIVE_LEG_TIMEOUT).
_LEG_S = 5
_ALLOW = "--ras asks all the same"


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
    """Whether a main thread with these Python frames may create a communicator.
    frames: (function, file), root to leaf
    """
    if any(function in _CREATORS for function, _ in frames):
        return True
    return any(file.endswith(_C10D) and _CALLS.fullmatch(name) for name, file in frames[-1:])


# --- The gate.


def observe(
    supervisor: ProcessSupervisor,
    ranks: Sequence[tuple[int, int, int | None]],
    environment: Mapping[str, str],
    allow: bool,
    limit_s: float,
    *,
    makes_communicator: bool = False,
) -> Ras:
    """The report of a job's RAS port.

    ranks:       its processes on this node: (pid, uid, global rank)
    environment: of the first of these processes
    allow:       query the port even if a query is known to have crashed jobs
    limit_s:     seconds for everything
    makes_communicator: a rank of this node may create a communicator
    """
    try:
        address = _open_gate(ranks, environment)
    except _Absent as absent:
        return Ras(str(absent))
    uid = ranks[0][1]
    user_ranks = [rank for rank in ranks if rank[1] == uid]
    world = _world(environment)
    until = min(supervisor.deadline, time.monotonic() + limit_s)

    def work(send: Send) -> None:
        try:
            give_up(rights_of_job(user_ranks[0][0], uid))
            confine(_MEMORY, _CPU_S)
            ras = _query(
                user_ranks,
                address,
                until,
                world=world,
                allow=allow,
                has_other_nodes=world != len(ranks),
                makes_communicator=makes_communicator,
            )
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


def _open_gate(
    ranks: Sequence[tuple[int, int, int | None]], environment: Mapping[str, str]
) -> tuple[str, int]:
    """The port's address, from the environment alone. Raises _Absent."""
    if not ranks:
        raise _Absent("no rank was found on this node")
    # As ncclParam reads it: strtoll with base 0.
    if re.fullmatch(r"\s*[+-]?0+(x0+)?", environment.get("NCCL_RAS_ENABLE", "1")):
        raise _Absent("the job has NCCL_RAS_ENABLE=0")
    return _address(environment.get("NCCL_RAS_ADDR", ""))


def _world(environment: Mapping[str, str]) -> int | None:
    """The number of ranks of the job, by its environment; None: not known."""
    texts = (environment.get(name, "") for _, _, names in FAMILIES for name in names)
    return next((int(text[:10]) for text in texts if text.isdecimal()), None)


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


def _query(
    ranks: Sequence[tuple[int, int, int | None]],
    address: tuple[str, int],
    until: float,
    *,
    world: int | None,
    allow: bool,
    has_other_nodes: bool,
    makes_communicator: bool,
) -> Ras:
    """Check the library and the listener, then fetch the report; with the user's rights. Raises
    _Absent, OSError.
    ranks: of one user
    world: number of ranks of the whole job; None: not known
    allow, makes_communicator: as for `observe`
    has_other_nodes: the job may have ranks on other nodes, which were not checked
    """
    uid, pids = ranks[0][1], [pid for pid, _, _ in ranks]
    version = software.find_library(pids, uid)
    # Without a listener, a warning about a query makes no sense.
    listener = _listener_address(pids, uid, address)
    version_numbers = software.numbers(version)
    if makes_communicator:
        raise _Absent("a rank may be making a communicator: asking then has crashed jobs")
    if not allow and version_numbers is None:
        raise _Absent(f"the version of the job's NCCL is not known, and old ones crash: {_ALLOW}")
    if not allow and version_numbers is not None and version_numbers < SAFE:
        raise _Absent(
            f"NCCL {version}: asking versions before {'.'.join(map(str, SAFE))} has crashed jobs: "
            f"{_ALLOW}"
        )
    if not allow and has_other_nodes:
        raise _Absent(
            f"NCCL {version}: asking while a communicator is made, also on another node, has "
            f"crashed jobs: {_ALLOW}"
        )
    ras = _fetch_report(listener, until)
    rank_by_pid = {number: rank for pid, _, rank in ranks for number in all_pids(pid)}
    listed_pids = {
        member.pid for group in ras.communicators for member in group.members if member.host
    }
    if ras.communicators and lists_all_members(ras) and not listed_pids & rank_by_pid.keys():
        raise _Absent(f"another job has answered at {_shown(listener)}")
    groups = with_world_ranks(ras.communicators, rank_by_pid, world)
    return replace(ras, version=ras.version or version, communicators=within_limits(groups))


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
    matching = [listener for listener in _listeners() if _matches(listener, host, port)]
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


def _listeners() -> Iterator[Listener]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}", "rb") as file:
            yield from listeners(file.read(_MAX_SOCKETS).decode("ascii", "replace"))


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
    ras = read_json(text) if json else read_text(text)
    if ras is None:
        raise _Absent(
            f"the RAS port at {place} said what makes no sense: {_beginning(text.encode())}"
        )
    return ras


def _remaining_s(until: float) -> float:
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise socket.timeout
    return remaining_s


def _beginning(data: bytes) -> str:
    return ascii(data[:60].decode("utf-8", "replace"))[1:-1] or "nothing"


class _RasDialogue:
    """Commands and answers over one connection.
    until: a moment of time.monotonic()
    """

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
