"""The fleet's known_hosts: one list of lines for every node, from what all nodes showed.

What a node says about itself is trusted as far as no other node's name is concerned. A name or an
address belongs to the node to which the inventory gives it, else to the one node that claims it;
a name that several nodes claim (the address of a bridge that every node has) belongs to none. A
name of the policy's own lines cannot be claimed with another key.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from nodeready.subjects import managed_block
from nodeready.subjects.ssh_client.facts import (
    KNOWN_HOSTS,
    Identity,
    SshClient,
    block_digest,
    clean_address,
    clean_key,
    clean_name,
)

if TYPE_CHECKING:
    from nodeready.subjects.snapshot import Snapshot

#: Stands between the nodes' lines and the policy's: lines behind it go when the policy drops them.
FURTHER = "# Further lines, from the policy:"

#: At most so many different large blocks are fetched, the commonest first.
MAX_FETCHED = 4

_BEGIN, _END = managed_block.BEGIN.decode(), managed_block.END.decode()
#: The shell text that prints a node's block with its marks; it only reads.
READ_BLOCK = f"sed -n '/^{_BEGIN}$/,/^{_END}$/p' {KNOWN_HOSTS}\n"

Endpoint = tuple[str, int]


class Entry(NamedTuple):
    """One line: its names (``host`` or ``[host]:port``), and its key, ``type base64``."""

    names: tuple[str, ...]
    key: str


def parse_line(line: str) -> Entry | None:
    """A line in the form that we write; None for any other form (hashed, marked, a pattern)."""
    names, _, key = line.partition(" ")
    words = names.split(",")
    if not key or clean_key(key) != key or not all(map(_is_target, words)):
        return None
    return Entry(tuple(words), key)


def _is_target(word: str) -> bool:
    match = re.fullmatch(r"\[([^]]+)\]:([1-9]\d{0,4})", word)
    bare = match[1] if match else word
    return bare in (clean_name(bare), clean_address(bare))


def fleet_lines(
    snapshots: Mapping[str, Snapshot],
    extra: Iterable[str] = (),
    endpoints: Mapping[str, Endpoint] | None = None,
    blocks: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[str, ...]:
    """The known_hosts lines that every node of the fleet shall have, sorted.

    snapshots: name in the inventory -> what that node showed
    extra:     the policy's own lines
    endpoints: name in the inventory -> the address and port that the inventory gives
    blocks:    digest -> the lines of a block that was too large to come along (see `unsent`)

    Lines about nodes that were not observed in this run (a --limit, a node that is down) come from
    the blocks that the other nodes have. An old line goes when one of its names now belongs to an
    observed node with another key: that node was re-imaged.
    """
    observed = {
        name: seen
        for name, snapshot in snapshots.items()
        if isinstance(seen := snapshot.subjects.get("ssh_client"), SshClient)
    }
    # Without a key that could be read, a node keeps the lines that others have about it.
    nodes = {name: seen for name, seen in observed.items() if seen.identity.keys}
    further = [line for line in extra if line != FURTHER]
    owners, nobodys = _owners(nodes, further, endpoints or {})
    names: dict[str, set[str]] = {node: set() for node in nodes}
    for name, node in owners.items():
        names[node].add(name)
    keys = {node: set(seen.identity.keys) for node, seen in nodes.items()}
    found: dict[tuple[str, str], set[str]] = {
        (node, key): set(names[node]) for node in nodes for key in keys[node] if names[node]
    }
    kept: list[Entry] = []
    for entry in _old(observed.values(), blocks or {}):
        belongs = {owners[name] for name in entry.names if name in owners}
        if any(entry.key not in keys[node] for node in belongs):
            continue
        rest = {name for name in entry.names if name not in owners and name not in nobodys}
        if len(belongs) == 1:
            # The same key: a name that the node had before, such as that of a port that is down.
            found[belongs.pop(), entry.key] |= rest
        elif not belongs and rest:
            kept.append(Entry(tuple(sorted(rest, key=_order)), entry.key))
    lines = {_line(targets, key) for (_, key), targets in found.items()}
    lines.update(_line(entry.names, entry.key) for entry in kept)
    others = sorted({line for line in further if line not in lines})
    return (*sorted(lines), *((FURTHER, *others) if others else ()))


def unsent(snapshots: Mapping[str, Snapshot], lines: tuple[str, ...]) -> dict[str, str]:
    """The blocks that have to be fetched before ``lines`` may replace them: digest -> a node.

    Empty unless blocks were too large to come along and are not what ``lines`` would make: then
    some hold keys of nodes that this run did not see. READ_BLOCK on that node prints the block.
    """
    wanted = block_digest("".join(f"{line}\n" for line in lines).encode())
    holders: dict[str, str] = {}
    held: Counter[str] = Counter()
    for name, snapshot in snapshots.items():
        seen = snapshot.subjects.get("ssh_client")
        if isinstance(seen, SshClient) and not seen.known_hosts.sent:
            holders.setdefault(seen.known_hosts.digest, name)
            held[seen.known_hosts.digest] += 1
    for known in ("", wanted):
        del held[known]
    return {digest: holders[digest] for digest, _ in held.most_common(MAX_FETCHED)}


def read_block(text: str, digest: str) -> tuple[str, ...]:
    """The lines of a block that READ_BLOCK printed. Raises ValueError when it is another one."""
    inner = managed_block.find(text.encode("utf-8", "surrogateescape"))
    if inner is None or block_digest(inner) != digest:
        raise ValueError(f"{KNOWN_HOSTS} changed since it was looked at")
    return tuple(inner.decode("utf-8", "surrogateescape").splitlines())


def _line(names: Iterable[str], key: str) -> str:
    return f"{','.join(sorted(names, key=_order))} {key}"


def _order(target: str) -> tuple[bool, bool, str]:
    """Host names first, then addresses, forms with a port behind."""
    bare = target.startswith("[")
    name = target[1:].partition("]")[0] if bare else target
    return (bool(clean_address(name)), bare, target)


def _targets(seen: Identity, name: str, endpoint: Endpoint) -> tuple[set[str], set[str]]:
    """What the inventory calls the node, and what the node calls itself."""
    address, port = endpoint
    given = {clean_name(text) or clean_address(text) for text in (name, address)} - {""}
    own = {*seen.names, *seen.addresses}
    if port == 22:
        return given, own - given
    # Through a forwarded port the address may be many nodes' own: only with its port.
    with_port = {f"[{target}]:{port}" for target in given | own}
    plain = {clean_name(name) or clean_address(name)} - {""}
    return with_port | plain, own - plain


def _owners(
    nodes: Mapping[str, SshClient], further: Iterable[str], endpoints: Mapping[str, Endpoint]
) -> tuple[dict[str, str], set[str]]:
    """Name -> the node that it belongs to, and the names that several nodes claim."""
    given: dict[str, list[str]] = {}
    own: dict[str, list[str]] = {}
    for node, seen in nodes.items():
        inventory, claimed = _targets(seen.identity, node, endpoints.get(node, ("", 22)))
        for target in inventory:
            given.setdefault(target, []).append(node)
        for target in claimed:
            own.setdefault(target, []).append(node)
    reserved = _reserved(further)
    owners: dict[str, str] = {}
    nobodys: set[str] = set()
    for target in {*given, *own}:
        claims = given.get(target) or own[target]
        if len(claims) > 1:
            nobodys.add(target)
            continue
        keys = reserved.get(target)
        if target in given or keys is None or keys & set(nodes[claims[0]].identity.keys):
            owners[target] = claims[0]
    return owners, nobodys


def _reserved(further: Iterable[str]) -> dict[str, set[str]]:
    """Name -> its keys in the policy's own lines."""
    found: dict[str, set[str]] = {}
    for line in further:
        entry = parse_line(line)
        if entry is not None:
            for name in entry.names:
                found.setdefault(name, set()).add(entry.key)
    return found


def _old(nodes: Iterable[SshClient], fetched: Mapping[str, tuple[str, ...]]) -> list[Entry]:
    """The entries of the blocks that the nodes have now.

    Where blocks disagree about a name's key of one type, the key of the most nodes is taken: a
    node that was down for long has old lines.
    """
    held: Counter[int] = Counter()
    lines_of: dict[int, tuple[str, ...]] = {}
    for seen in nodes:
        lines = seen.known_hosts.lines or fetched.get(seen.known_hosts.digest)
        if lines:
            held[id(lines)] += 1
            lines_of[id(lines)] = lines
    entries: Counter[Entry] = Counter()
    votes: Counter[tuple[str, str]] = Counter()
    for block, count in held.items():
        for line in itertools.takewhile(lambda line: line != FURTHER, lines_of[block]):
            entry = parse_line(line)
            if entry is not None:
                entries[entry] += count
                votes.update({(name, entry.key): count for name in entry.names})
    most: dict[tuple[str, str], int] = {}
    for (name, key), count in votes.items():
        slot = (name, key.partition(" ")[0])
        most[slot] = max(most.get(slot, 0), count)
    kept: list[Entry] = []
    for entry, _ in sorted(entries.items(), key=lambda item: (-item[1], item[0])):
        kind = entry.key.partition(" ")[0]
        # Of several lines about one key, the commonest line has the name.
        names = tuple(
            name for name in entry.names if votes.pop((name, entry.key), 0) == most[name, kind]
        )
        if names:
            kept.append(Entry(names, entry.key))
    return kept
