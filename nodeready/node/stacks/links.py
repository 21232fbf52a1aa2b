"""Which ranks a rank waits for: those at the other ends of its sockets, pipes and shared memory.

What a rank of this node has at the other end is told by its process. A connection to another node
is told by both its addresses: whoever has all nodes' answers knows which rank has the other end.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodeready.node.stacks import waits
from nodeready.node.stacks.processes import HANGS, contents, each
from nodeready.node.stacks.ranks import Target

#: The name of the main thread, which is threading's; of a process as a whole; and of the processes
#: below a rank.
MAIN, WHOLE, BELOW = "MainThread", "(whole)", "(below)"
#: Threads of a process that are looked at; rows of a process; connections of a process that are
#: told: a process with more is one of a mesh, in which everybody is connected to everybody.
_MOST_THREADS, _MOST_ROWS, _MOST_ENDS = 32, 64, 64
_LOOPBACK = re.compile(r"127\.|\[::1\]")
_LOCAL = re.compile(r"\|-- ([0-9.]{7,15})\n\s+/32 host LOCAL")


@dataclass(frozen=True)
class _Process:
    """What one process has and waits for; plain data comes from a fork.

    space:     number of its network namespace
    local:     the addresses of that
    sockets:   (own address, peer's): its connections; a peer of "": it listens
    maps:      files that it shares memory by, of those that somebody waits at
    waits:     thread -> the same of the connections that it waits for
    """

    space: int = 0
    local: Sequence[str] = ()
    sockets: Sequence[Sequence[str]] = ()
    maps: Sequence[str] = ()
    waits: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)


def _look(
    pid: int, threads: Mapping[int, str], shared: frozenset[str], local: Mapping[str, str]
) -> dict[str, Any]:
    waited: dict[str, list[Any]] = {}
    for thread, name in threads.items():
        row = waits.look(pid, thread)
        if row and (pairs := waits.Call(*row).sockets):
            waited.setdefault(name, []).extend(pairs)
    maps = contents(f"/proc/{pid}/maps", waits.MAPS_BYTES) if shared else ""
    return {
        "space": os.stat(f"/proc/{pid}/ns/net").st_ino,
        "local": _addresses(pid),
        "sockets": waits.sockets(pid, local),
        "maps": [one for one in shared if one in waits.shared_maps(maps)],
        "waits": waited,
    }


def _addresses(pid: int) -> list[str]:
    """The node's own addresses, as the process sees them (fib_trie and if_inet6 of proc(5))."""
    found = set(_LOCAL.findall(contents(f"/proc/{pid}/net/fib_trie", 1 << 20)))
    for row in contents(f"/proc/{pid}/net/if_inet6").splitlines():
        with contextlib.suppress(ValueError, IndexError):
            words = bytes.fromhex(row.split()[0])
            found.add(f"[{socket.inet_ntop(socket.AF_INET6, words)}]")
    return sorted(found)


def observe(targets: Sequence[Target], calls: Mapping[int, waits.Call], deadline: float) -> None:
    """Give each target what it waits for, and what others may wait for.

    calls: what the targets and the processes below them wait for (`waits.observe`)
    """
    family: dict[int, Target] = {}
    threads: dict[int, dict[int, str]] = {}
    for target in targets:
        if target.rank.stranger or not target.facts:
            continue
        dump = target.dumps[-1] if target.dumps else None
        shown = dump.threads if dump else ()
        others = {thread.number: thread.name for thread in shown if thread.number}
        threads[target.pid] = dict(list(others.items())[:_MOST_THREADS])
        family[target.pid] = target
        family.update((one.pid, target) for one in target.below if one.facts)
    if len(threads) < 2 and not any(target.rank.identity.world_size for target in targets):
        return
    shared = frozenset(call.shared for call in calls.values() if call.shared)
    owned = {pid: target.owner for pid, target in family.items()}
    local = waits.unix_peers()
    seen = each(
        lambda pid: _look(pid, threads.get(pid, {}), shared, local), list(family), deadline, owned
    )
    known = {pid: _Process(**row) for pid, row in seen.items() if row and row is not HANGS}
    node = _Node(known, family, local)
    for target in (family[pid] for pid in threads):
        mine = [pid for pid, above in family.items() if above is target and pid in known]
        rows: dict[tuple[str, str], None] = {}
        for pid in mine:
            own = pid == target.pid
            call = calls.get(pid)
            name = MAIN if own else BELOW
            if call:
                rows.update(dict.fromkeys((name, text) for text in node.waited(pid, call)))
            for thread, pairs in known[pid].waits.items():
                rows.update(dict.fromkeys((thread, text) for text in node.peers(pid, pairs)))
            pairs = [pair for pair in known[pid].sockets if pair[1]]
            near = (text for text in node.peers(pid, pairs) if text.startswith("pid "))
            rows.update(dict.fromkeys((WHOLE, text) for text in near))
        target.waits_for = list(rows)[:_MOST_ROWS]
        target.ends = node.ends(mine)


class _Node:
    """Who of this node's ranks has which end."""

    def __init__(
        self, known: Mapping[int, _Process], family: Mapping[int, Target], local: Mapping[str, str]
    ) -> None:
        self.known, self.family, self.local = known, family, local
        self.of_pair: dict[tuple[int, str, str], int] = {}
        for pid, process in known.items():
            for own, peer in process.sockets:
                if peer:
                    self.of_pair[self._space(pid, own), own, peer] = pid
                else:
                    for address in self._bound(process, own):
                        self.of_pair.setdefault((self._space(pid, address), address, ""), pid)

    @staticmethod
    def _bound(process: _Process, own: str) -> list[str]:
        """The addresses at which a listener can be reached."""
        host, _, port = own.rpartition(":")
        if host in ("0.0.0.0", "[::]"):
            return [f"{address}:{port}" for address in process.local]
        return [own]

    def _space(self, pid: int, address: str) -> int:
        """Loopback's addresses are everybody's own."""
        return self.known[pid].space if _LOOPBACK.match(address) else 0

    def _is_far(self, pid: int, address: str) -> bool:
        """Whether an address is another node's."""
        host = address.rpartition(":")[0]
        return bool(host) and host not in self.known[pid].local

    def _is_store(self, pid: int, pair: Sequence[str]) -> bool:
        """Whether a connection is one of the job's store: whoever has it serves it aside."""
        port = self.family[pid].rank.identity.master.rpartition(":")[2]
        return bool(port) and any(address.endswith(f":{port}") for address in pair)

    def peers(self, pid: int, pairs: Iterable[Sequence[str]]) -> list[str]:
        """``pid 55``, or the addresses of the other end and of this one: the ranks at the other
        ends of connections; the others are left out."""
        found: dict[str, None] = {}
        for own, shown in pairs:
            peer = shown or self.local.get(own, "")
            if self._is_store(pid, (own, peer)):
                continue
            space = self._space(pid, peer)
            there = self.of_pair.get((space, peer, own)) or self.of_pair.get((space, peer, ""))
            if there is not None and self.family[there] is not self.family[pid]:
                found[f"pid {self.family[there].pid}"] = None
            elif there is None and self._is_far(pid, peer):
                found[f"{peer} {own}"] = None
        return list(found)

    def waited(self, pid: int, call: waits.Call) -> list[str]:
        """The same of what one call waits for; ``may`` before a process that shares memory, or a
        pipe that the waiting process or one that is no rank's has as well."""
        found = self.peers(pid, call.sockets)
        own = self.family[pid].pid
        holders = {
            self.family[holder].pid if holder in self.family else 0 for holder in call.holders
        }
        may = "may " if holders & {0, own} else ""
        found += [f"{may}pid {holder}" for holder in sorted(holders - {0, own})]
        sharing = {self.family[p].pid for p, row in self.known.items() if call.shared in row.maps}
        return found + [f"may pid {one}" for one in sorted(sharing - {own})]

    def ends(self, pids: Iterable[int]) -> list[str]:
        """``10.1.0.2:5000 10.1.0.3:41234``: own address and peer's of the connections to other
        nodes; ``10.1.0.2:5000``: where it listens."""
        listens, far = [], []
        for pid in pids:
            process = self.known[pid]
            for own, peer in process.sockets:
                if self._is_store(pid, (own, peer)) or own.startswith(waits.UNIX):
                    continue
                if not peer:
                    bound = self._bound(process, own)
                    listens += [one for one in bound if not _LOOPBACK.match(one)]
                elif self._is_far(pid, peer):
                    far.append(f"{own} {peer}")
        return [*listens[:_MOST_ENDS], *(far if len(far) <= _MOST_ENDS else ())]
