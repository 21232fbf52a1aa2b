"""The ranks that a rank waits for: its peers over sockets, pipes and shared memory.

A peer on this node is named by its process. A connection to another node is reported with both
addresses, by which the control machine finds the peer in the answers of all nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodeready.agent.stacks import waits
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.processes import HANGS, contents, probe_each

#: What of a rank waits: its main thread (named as in `threading`), the whole process, or its
#: descendants.
MAIN, WHOLE_PROCESS, DESCENDANTS = "MainThread", "(whole)", "(below)"
#: Maximum of a process's threads that are probed, of its rows, and of its connections that are
#: reported: a process with more is part of a full mesh.
_MAX_THREADS, _MAX_ROWS, _MAX_ENDS = 32, 64, 64
_LOOPBACK = re.compile(r"127\.|\[::1\]")
_LOCAL = re.compile(r"\|-- ([0-9.]{7,15})\n\s+/32 host LOCAL")


@dataclass(frozen=True)
class _ProcessEnds:
    """The ends of connections that a process has and waits for; plain data from a fork."""

    space: int = 0  # number of its network namespace
    local: Sequence[str] = ()  # addresses of that namespace
    # its connections: (own address, peer's address); a peer of "": it listens
    sockets: Sequence[Sequence[str]] = ()
    # its shared memory files, among those in which a process waits for a lock
    maps: Sequence[str] = ()
    # thread -> the connections that the thread waits for, as in `sockets`
    waits: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)


def _probe(
    pid: int, threads: Mapping[int, str], shared: frozenset[str], unix_peers: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of `_ProcessEnds`. threads: number -> name; shared: files of shared memory"""
    waits_by_thread: dict[str, list[Any]] = {}
    for thread, name in threads.items():
        row = waits.probe_thread(pid, thread)
        if row and (pairs := waits.WaitCall(*row).sockets):
            waits_by_thread.setdefault(name, []).extend(pairs)
    maps_text = contents(f"/proc/{pid}/maps", waits.MAPS_BYTES) if shared else ""
    maps = waits.shared_maps(maps_text)
    return {
        "space": os.stat(f"/proc/{pid}/ns/net").st_ino,
        "local": _addresses(pid),
        "sockets": waits.sockets(pid, unix_peers),
        "maps": [file for file in shared if file in maps],
        "waits": waits_by_thread,
    }


def _addresses(pid: int) -> list[str]:
    """The node's own addresses, as the process sees them (fib_trie and if_inet6 of proc(5))."""
    addresses = set(_LOCAL.findall(contents(f"/proc/{pid}/net/fib_trie", 1 << 20)))
    for row in contents(f"/proc/{pid}/net/if_inet6").splitlines():
        with contextlib.suppress(ValueError, IndexError):
            words = bytes.fromhex(row.split()[0])
            addresses.add(f"[{socket.inet_ntop(socket.AF_INET6, words)}]")
    return sorted(addresses)


def observe(
    targets: Sequence[StackTarget], calls: Mapping[int, waits.WaitCall], deadline: float
) -> None:
    """Set each target's `waits_for` and `ends`.
    calls: the calls of the targets and of their descendants (`waits.observe`)
    """
    target_by_pid: dict[int, StackTarget] = {}
    threads: dict[int, dict[int, str]] = {}
    for target in targets:
        if target.rank.stranger or not target.facts:
            continue
        listed_threads = target.dumps[-1].threads if target.dumps else ()
        thread_names = [(thread.number, thread.name) for thread in listed_threads if thread.number]
        threads[target.pid] = dict(thread_names[:_MAX_THREADS])
        family = [target, *(child for child in target.descendants if child.facts)]
        target_by_pid.update((process.pid, target) for process in family)
    # A single rank waits for other ranks only if its job has some on other nodes.
    if len(threads) < 2 and not any(target.rank.identity.world_size for target in targets):
        return
    shared = frozenset(call.shared for call in calls.values() if call.shared)
    owner_by_pid = {pid: target.owner for pid, target in target_by_pid.items()}
    unix_peers = waits.unix_peers()
    answers = probe_each(
        lambda pid: _probe(pid, threads.get(pid, {}), shared, unix_peers),
        list(target_by_pid),
        deadline,
        owner_by_pid,
    )
    process_ends = {
        pid: _ProcessEnds(**row) for pid, row in answers.items() if row and row is not HANGS
    }
    node_ends = _NodeEnds(process_ends, target_by_pid, unix_peers)
    for target in (target_by_pid[pid] for pid in threads):
        family_pids = [pid for pid in process_ends if target_by_pid[pid] is target]
        rows: list[tuple[str, str]] = []
        for pid in family_pids:
            if call := calls.get(pid):
                name = MAIN if pid == target.pid else DESCENDANTS
                rows += [(name, peer) for peer in node_ends.waits_of_call(pid, call)]
            for thread, pairs in process_ends[pid].waits.items():
                rows += [(thread, peer) for peer in node_ends.peers(pid, pairs)]
            pairs = [pair for pair in process_ends[pid].sockets if pair[1]]
            peers = node_ends.peers(pid, pairs)
            rows += [(WHOLE_PROCESS, peer) for peer in peers if peer.startswith("pid ")]
        target.waits_for = list(dict.fromkeys(rows))[:_MAX_ROWS]
        target.ends = node_ends.ends(family_pids)


class _NodeEnds:
    """Which rank of this node has which end of a connection, pipe or shared memory."""

    def __init__(
        self,
        process_ends: Mapping[int, _ProcessEnds],
        target_by_pid: Mapping[int, StackTarget],
        unix_peers: Mapping[str, str],
    ) -> None:
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

    def _is_store(self, pid: int, pair: Sequence[str]) -> bool:
        """Whether a connection is to the job's store, which its rank serves in another thread."""
        port = self.target_by_pid[pid].rank.identity.master.rpartition(":")[2]
        return bool(port) and any(address.endswith(f":{port}") for address in pair)

    def peers(self, pid: int, pairs: Iterable[Sequence[str]]) -> list[str]:
        """The peers of connections: ``pid 55``, or the peer's address and the own address.
        Processes that are no ranks are left out.
        """
        peers: dict[str, None] = {}
        for address, listed_peer in pairs:
            peer = listed_peer or self.unix_peers.get(address, "")
            if self._is_store(pid, (address, peer)):
                continue
            space = self._space(pid, peer)
            listener_pid = self.pid_by_pair.get((space, peer, ""))
            peer_pid = self.pid_by_pair.get((space, peer, address), listener_pid)
            if peer_pid is None:
                if self._is_remote(pid, peer):
                    peers[f"{peer} {address}"] = None
            elif self.target_by_pid[peer_pid] is not self.target_by_pid[pid]:
                peers[f"pid {self.target_by_pid[peer_pid].pid}"] = None
        return list(peers)

    def waits_of_call(self, pid: int, call: waits.WaitCall) -> list[str]:
        """The ranks that a call waits for, as in `peers`. ``may`` stands before a process that
        shares memory, and before all if the waiting process or a process of no rank also holds the
        pipe.
        """
        peers = self.peers(pid, call.sockets)
        rank_pid = self.target_by_pid[pid].pid
        child = self.target_by_pid.get(call.child)
        peers += [f"pid {child.pid}"] if child and child.pid != rank_pid else []
        holders = {
            self.target_by_pid[holder].pid if holder in self.target_by_pid else 0
            for holder in call.holders
        }
        prefix = "may " if holders & {0, rank_pid} else ""
        peers += [f"{prefix}pid {holder}" for holder in sorted(holders - {0, rank_pid})]
        sharing_pids = {
            self.target_by_pid[process_pid].pid
            for process_pid, process in self.process_ends.items()
            if call.shared in process.maps
        }
        return peers + [
            f"may pid {sharing_pid}" for sharing_pid in sorted(sharing_pids - {rank_pid})
        ]

    def ends(self, pids: Iterable[int]) -> list[str]:
        """Own address and peer's of the connections to other nodes, as in
        ``10.1.0.2:5000 10.1.0.3:41234``; and listeners, as in ``10.1.0.2:5000``.
        """
        listens, remote = [], []
        for pid in pids:
            process = self.process_ends[pid]
            for address, peer in process.sockets:
                if self._is_store(pid, (address, peer)) or address.startswith(waits.UNIX):
                    continue
                if not peer:
                    bound = self._bound(process, address)
                    listens += [address for address in bound if not _LOOPBACK.match(address)]
                elif self._is_remote(pid, peer):
                    remote.append(f"{address} {peer}")
        return [*listens[:_MAX_ENDS], *(remote if len(remote) <= _MAX_ENDS else ())]
