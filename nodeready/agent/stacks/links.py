"""The ranks that a rank waits for: its peers over sockets, pipes and shared memory.

A peer on this node is named by its process. A connection to another node is reported with both
addresses, by which the control machine finds the peer in the answers of all nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeready.agent.stacks import waits
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.processes import HANGS, contents, probe_each

#: What of a rank waits: its main thread (as in `threading`), all of it, or its descendants.
MAIN, WHOLE_PROCESS, DESCENDANTS = "MainThread", "(whole)", "(below)"
#: What a further thread at the job's store waits for: other ranks that set a key there.
STORE = "store"
#: Maximum rows and connections of a process: one with more is part of a full mesh.
_MAX_ROWS, _MAX_ENDS = 64, 64
_NEW_NET = 0x40000000  # CLONE_NEWNET of linux/sched.h
#: How often a thread of the store is looked for, and the seconds between.
_STORE_LOOKS, _STORE_PAUSE_S = 3, 0.005
_LOOPBACK = re.compile(r"127\.|\[::1\]")
_LOCAL = re.compile(r"\|-- ([0-9.]{7,15})\n\s+/32 host LOCAL")


@dataclass(frozen=True)
class _ProcessEnds:
    """The ends of connections that a process has; plain data from a fork."""

    space: int = 0  # number of its network namespace
    local: Sequence[str] = ()  # addresses of that namespace
    # its connections: (own address, peer's address); a peer of "": it listens
    sockets: Sequence[Sequence[str]] = ()
    # its shared memory files, among those in which a process waits for a lock
    maps: Sequence[str] = ()
    # the connections, among those for which a thread waits, by which data has come of late
    received: Sequence[Sequence[str]] = ()
    has_torch: bool = False  # in memory; read only if it has a socket at the port of the store
    serves_store: bool = False  # it has torch's store at that port


def _probe(
    pid: int, *, threads: Container[int], port: str, shared: frozenset[str],
    unix_peers: Mapping[str, str], awaited: Collection[tuple[str, str]],
    ages: Mapping[tuple[str, str], float], late_s: float,
) -> dict[str, Any]:  # fmt: skip
    """The fields of `_ProcessEnds`.
    threads: that Python knows; port: of the job's store; "": not known
    shared:  files of shared memory; awaited: the connections for which its threads wait
    ages:    see `waits.received_ages`; late_s: seconds ago from which on data came of late
    """
    if awaited and not os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
        ages = waits.received_ages() if enter_network(pid) else {}
    sockets = waits.sockets(pid, unix_peers)
    uses_port = any(_store_end(pair, port) for pair in sockets)
    needs_maps = shared or uses_port
    maps_text = contents(f"/proc/{pid}/maps", waits.MAPS_BYTES) if needs_maps else ""
    maps = waits.shared_maps(maps_text)
    has_torch = uses_port and "/libtorch" in maps_text
    return {
        "space": os.stat(f"/proc/{pid}/ns/net").st_ino,
        "local": _addresses(pid),
        "sockets": sockets,
        "maps": [file for file in shared if file in maps],
        "received": [pair for pair in awaited if ages.get(pair, late_s) < late_s],
        "has_torch": has_torch,
        "serves_store": has_torch and _serves_store(pid, threads, port),
    }


def enter_network(pid: int) -> bool:
    """Go into the network namespace of a process; False: the kernel refuses (setns(2))."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        return not ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NET)


def _store_end(pair: Sequence[str], port: str) -> str:
    return next((address for address in pair if port and address.endswith(f":{port}")), "")


def _serves_store(pid: int, threads: Container[int], port: str) -> bool:
    """Whether a thread unknown to Python serves this port (TCPStore*Backend.cpp of torch)."""
    numbers = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    numbers = [number for number in numbers if number != pid and number not in threads]
    for _ in range(_STORE_LOOKS):
        for number in numbers:
            row = waits.probe_thread(pid, number)
            objects = waits.WaitCall(*row).objects if row else ()
            name = contents(f"/proc/{pid}/task/{number}/comm")
            listeners = [text for text in objects if text.startswith("connections to ")]
            is_listening = any(text.endswith(f":{port}") for text in listeners)
            if is_listening or name.startswith("pt_tcpstore"):
                return True
        # It may have been at work for a client.
        time.sleep(_STORE_PAUSE_S)
    return False


def _addresses(pid: int) -> list[str]:
    """The node's own addresses, as the process sees them (fib_trie and if_inet6 of proc(5))."""
    addresses = set(_LOCAL.findall(contents(f"/proc/{pid}/net/fib_trie", 1 << 20)))
    for row in contents(f"/proc/{pid}/net/if_inet6").splitlines():
        with contextlib.suppress(ValueError, IndexError):
            words = bytes.fromhex(row.split()[0])
            addresses.add(f"[{socket.inet_ntop(socket.AF_INET6, words)}]")
    return sorted(addresses)


def observe(
    targets: Sequence[StackTarget],
    calls: Mapping[tuple[int, int], waits.WaitCall],
    began: float,
    deadline: float,
) -> None:
    """Set each target's `waits_for`, `received` and `ends`. calls: (process, thread) -> its call
    (`waits.observe`). began: time.monotonic() of the first sample
    """
    target_by_pid: dict[int, StackTarget] = {}
    names: dict[int, dict[int, str]] = {}
    listed: dict[int, set[int]] = {}
    for target in targets:
        if target.rank.stranger or not target.facts:
            continue
        rows_of_dump = target.dumps[-1].threads if target.dumps else ()
        listed[target.pid] = {row.number for row in rows_of_dump}
        names[target.pid] = {target.thread: MAIN, **target.thread_names}
        family = [target, *(child for child in target.descendants if child.facts)]
        target_by_pid.update((process.pid, target) for process in family)
    # A single rank waits for other ranks only if its job has some on other nodes.
    if len(names) < 2 and not any(target.rank.identity.world_size for target in targets):
        return
    shared = frozenset(call.shared for call in calls.values() if call.shared)
    owner_by_pid = {pid: target.owner for pid, target in target_by_pid.items()}
    # What a call connects to is not yet its peer.
    ends = (end for call in calls.values() for end in call.sockets)
    connecting = {address: peer for address, peer in ends if peer.startswith(waits.UNIX)}
    unix_peers = {**waits.unix_peers(), **connecting}
    calls_by_pid: dict[int, dict[int, waits.WaitCall]] = {}
    awaited: dict[int, set[tuple[str, str]]] = {}
    for (pid, thread), call in calls.items():
        calls_by_pid.setdefault(pid, {})[thread] = call
        with_peers = ((address, peer) for address, peer in call.sockets if peer)
        awaited.setdefault(pid, set()).update(with_peers)
    ages = waits.received_ages() if any(awaited.values()) else {}

    def probe(pid: int) -> dict[str, Any]:
        return _probe(
            pid, threads=listed.get(pid, ()), port=_port(target_by_pid[pid]), shared=shared,
            unix_peers=unix_peers, awaited=awaited.get(pid, ()), ages=ages,
            late_s=time.monotonic() - began,
        )  # fmt: skip

    answers = probe_each(probe, list(target_by_pid), deadline, owner_by_pid).items()
    process_ends = {pid: _ProcessEnds(**row) for pid, row in answers if row and row is not HANGS}
    node_ends = _NodeEnds(process_ends, target_by_pid, unix_peers)
    for target in (target_by_pid[pid] for pid in names):
        family_pids = [pid for pid in process_ends if target_by_pid[pid] is target]
        rows: list[tuple[str, str]] = []
        received: dict[str, None] = {}
        for pid in family_pids:
            received_pairs = set(map(tuple, process_ends[pid].received))
            for thread, call in calls_by_pid.get(pid, {}).items():
                name = names[pid].get(thread, str(thread)) if pid == target.pid else DESCENDANTS
                if (pid, thread) == (target.pid, target.thread):
                    target.has_store &= node_ends.may_be_store(pid, call)
                elif call.sockets and thread in listed.get(pid, ()):
                    is_store = all(node_ends.is_store(pid, pair) for pair in call.sockets)
                    rows += [(name, STORE)] if is_store else []
                rows += [(name, peer) for peer in node_ends.waits_of_call(pid, call)]
                if node_ends.peers(pid, received_pairs.intersection(map(tuple, call.sockets))):
                    received[name] = None
            pairs = [pair for pair in process_ends[pid].sockets if pair[1]]
            peers = node_ends.peers(pid, pairs)
            rows += [(WHOLE_PROCESS, peer) for peer in peers if peer.startswith("pid ")]
        target.waits_for = list(dict.fromkeys(rows))[:_MAX_ROWS]
        target.received = list(received)
        target.ends = node_ends.ends(family_pids)


def _port(target: StackTarget) -> str:
    """The port of the job's store; "": not known."""
    return target.rank.identity.master.rpartition(":")[2]


class _NodeEnds:
    """Which rank of this node has which end of a connection, pipe or shared memory."""

    def __init__(
        self, process_ends: Mapping[int, _ProcessEnds], target_by_pid: Mapping[int, StackTarget],
        unix_peers: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.process_ends, self.target_by_pid = process_ends, target_by_pid
        self.unix_peers = unix_peers
        self.pid_by_pair: dict[tuple[int, str, str], int] = {}
        for pid, process in process_ends.items():
            for local_address, peer in process.sockets:
                if peer:
                    self.pid_by_pair[self._space(pid, local_address), local_address, peer] = pid
                else:
                    for address in self._bound(process, local_address):
                        self.pid_by_pair.setdefault((self._space(pid, address), address, ""), pid)

    @staticmethod
    def _bound(process: _ProcessEnds, listener: str) -> list[str]:
        """The addresses at which a listener can be reached."""
        host, _, port = listener.rpartition(":")
        if host in ("0.0.0.0", "[::]"):
            return [f"{address}:{port}" for address in process.local]
        return [listener]

    def _space(self, pid: int, address: str) -> int:
        """The namespace of an address of loopback; 0 for an address that is the node's."""
        return self.process_ends[pid].space if _LOOPBACK.match(address) else 0

    def _is_remote(self, pid: int, address: str) -> bool:
        """Whether an address belongs to another node."""
        host = address.rpartition(":")[0]
        return bool(host) and host not in self.process_ends[pid].local

    def _server(self, pid: int, pair: Sequence[str]) -> int | None:
        """The process of this node's rank at the store's end of a connection."""
        end = _store_end(pair, _port(self.target_by_pid[pid]))
        if not end or end == pair[0]:
            return pid if end else None
        return self._owner(self._space(pid, end), end, pair[0])

    def _owner(self, space: int, address: str, peer: str) -> int | None:
        """The process that has this end of a connection, or that listens at this address."""
        listener_pid = self.pid_by_pair.get((space, address, ""))
        return self.pid_by_pair.get((space, address, peer), listener_pid)

    def is_store(self, pid: int, pair: Sequence[str]) -> bool:
        """Whether a connection is to the job's store, which a rank of this node serves in a thread
        of C++. The port alone proves nothing: a program may use it for its own connections.
        """
        server = self._server(pid, pair)
        return server is not None and self.process_ends[server].serves_store

    def may_be_store(self, pid: int, call: waits.WaitCall) -> bool:
        """Whether a call that waits at the port of the job's store may wait for the store. A
        process that is no rank, or on another node, serves it to processes that have torch.
        """
        port = _port(self.target_by_pid[pid])
        pairs = [pair for pair in call.sockets if _store_end(pair, port)]
        has_torch = not pairs or self.process_ends[pid].has_torch
        return has_torch and all(
            self._server(pid, pair) is None or self.is_store(pid, pair) for pair in pairs
        )

    def peers(self, pid: int, pairs: Iterable[Sequence[str]]) -> list[str]:
        """The peers of connections: ``pid 55``, or the peer's address and the own address.
        Processes that are no ranks are left out; a process may be connected to itself.
        """
        peers: dict[str, None] = {}
        for address, listed_peer in pairs:
            peer = listed_peer or self.unix_peers.get(address, "")
            if self.is_store(pid, (address, peer)):
                continue
            space = self._space(pid, peer)
            peer_pid = self._owner(space, peer, address)
            if peer_pid is None:
                if self._is_remote(pid, peer):
                    peers[f"{peer} {address}"] = None
            elif (
                self.target_by_pid[peer_pid] is not self.target_by_pid[pid]
                # Its forked children have this end, too.
                or (peer, address) in map(tuple, self.process_ends[pid].sockets)
                # It listens there itself, and has not accepted the connection.
                or (peer_pid == pid and (space, peer, address) not in self.pid_by_pair)
            ):
                peers[f"pid {self.target_by_pid[peer_pid].pid}"] = None
        return list(peers)

    def waits_of_call(self, pid: int, call: waits.WaitCall) -> list[str]:
        """The ranks that a call waits for, as in `peers`. ``may`` stands before a process that
        shares memory, and before all if the waiter or a process of no rank also holds the pipe.
        """
        peers = self.peers(pid, call.sockets)
        rank_pid = self.target_by_pid[pid].pid
        child = self.target_by_pid.get(call.child)
        peers += [f"pid {child.pid}"] if child and child.pid != rank_pid else []
        owners = map(self.target_by_pid.get, call.holders)
        holders = {owner.pid if owner else 0 for owner in owners}
        prefix = "may " if holders & {0, rank_pid} else ""
        peers += [f"{prefix}pid {holder}" for holder in sorted(holders - {0, rank_pid})]
        if call.owner:
            return peers
        sharing = (pid for pid, row in self.process_ends.items() if call.shared in row.maps)
        pids = {self.target_by_pid[pid].pid for pid in sharing} - {rank_pid}
        return peers + [f"may pid {sharing_pid}" for sharing_pid in sorted(pids)]

    def ends(self, pids: Iterable[int]) -> list[str]:
        """Own address and peer's of the connections to other nodes, as in
        ``10.1.0.2:5000 10.1.0.3:41234``; and listeners, as in ``10.1.0.2:5000``.
        """
        listens, remote = [], []
        for pid in pids:
            process = self.process_ends[pid]
            for address, peer in process.sockets:
                if self.is_store(pid, (address, peer)) or address.startswith(waits.UNIX):
                    continue
                if not peer:
                    bound = self._bound(process, address)
                    listens += [address for address in bound if not _LOOPBACK.match(address)]
                elif self._is_remote(pid, peer):
                    remote.append(f"{address} {peer}")
        return [*listens[:_MAX_ENDS], *(remote if len(remote) <= _MAX_ENDS else ())]
