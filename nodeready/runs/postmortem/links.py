"""The network between nodes, by the errors of ranks that lost a peer. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nodeready.agent.failures.rules import FIRST_CALL, STOPS, signal_of
from nodeready.agent.witnesses import nccl_errors
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import natural
from nodeready.runs.postmortem.evidence import RankFailure
from nodeready.runs.postmortem.findings import Finding, lines_of, nodes_in, subject
from nodeready.runs.postmortem.rank_failures import (
    JobFailures,
    equal_failures,
    precedes,
    ranks_in,
)

#: Errors of NCCL that mean the network between nodes, if no rank has failed.
_FABRIC = ("ib-retry", "ib-rnr", "ib-completion", "ib-remote-operation", "connect-timeout",
           "connect-no-route", "gloo-connect")  # fmt: skip
#: Where NCCL's lines have the addresses of a connection (net_ib.cc, socket.cc).
_ADDRESS = re.compile(r"[0-9a-fA-F.:]+")
_LOCAL = re.compile(r"localGid:? ?(?:::ffff:)?([0-9a-fA-F.:]{2,45})")
_PEER = re.compile(
    r"remoteGids?:? ?(?:::ffff:)?([0-9a-fA-F.:]{2,45})"
    r"|(?:peer|[Cc]onnect to|[Cc]all to (?:send to|recv from)) \[?([\w.:-]{2,60}?)(?:\]:\d|<\d)"
)
#: Errors that a peer's end may have caused, too: they mean the network where several nodes have
#: them, each with another peer.
_MUTUAL = ("ib-flush", "connect-refused")
_NO_ROUTE = re.compile(
    r"No route to host|Network is unreachable|errno: (?:101|110|113)\b"
    r"|\bconnect\(\S.{0,80}\) failed: Connection timed out"
)
#: The function in which torchrun connects to the store before it starts a rank.
_NEW_STORE = "_create_tcp_store"


def fabric(job: JobFailures) -> Finding | None:
    """The network between nodes: a peer's port, or the store's address, does not answer."""
    rows = _errors(job, _FABRIC)
    witnesses = [] if rows else _mutual(job) + _errors(job, ("rank-twice", "connect-bridge"))
    rows = rows or witnesses
    rows = rows or [
        (f, "an address does not answer", "MASTER_ADDR and the route to it: nodeready ready")
        for f in job.lost
        if _NO_ROUTE.search(f.event.text) or _NEW_STORE in f.event.frame
    ]
    if not rows:
        return None
    first, meaning, step = rows[0]
    failures = [f for f, *_ in rows]
    # Both ends of a connection that never was, and who only reports, are no suspects.
    ranks = set[int]() if witnesses else ranks_in(failures)
    nodes, links = nodes_in(failures), _links(job, failures)
    # The only rank that its watchdog and its launcher say to have ended by it.
    ended_ranks = ranks_in(f for f in job.reports if signal_of(f.event.code) not in STOPS)
    is_only = len(ended_ranks) == 1 and ended_ranks == ranks_in(job.losses)
    if is_only and not ranks and nodes == job.nodes_of(ended_ranks):
        ranks = ended_ranks
    place = ""
    if links and (shared := set(links[0]).intersection(*links)):
        peers = sorted({end for link in links for end in link} - {min(shared)}, key=natural)
        place = f"{min(shared)} to {', '.join(peers[:8])}: "
    elif links:
        place = f"{counted(len(links), 'pair')} of nodes, such as {' to '.join(links[0])}: "
    error = f"{place}{meaning}: {first.event.text}"
    words = {"who": subject(ranks, nodes), "error": error}
    nodes |= {end for link in links for end in link if not _ADDRESS.fullmatch(end)}
    return Finding(ranks, nodes, lines_of(failures, 3), words=words, missing=(step,))


def lost_peers(job: JobFailures) -> Finding | None:
    """Every rank lost a peer."""
    missing = (*_refusals(job), "the log of the rank that ended first, its exit status")
    errors = job.losses or job.lost
    if not errors:
        return None
    peerless = [f for f in errors if f.event.has_phrase("no-peer")]
    is_told = bool(peerless) and all(
        f.event.has_phrase("no-peer") or precedes(peerless[0], f) for f in errors
    )
    # No rank has begun to work: the connections of the job itself failed. Of tracebacks that are
    # mixed, one has the calls.
    is_told |= all(
        {FIRST_CALL} == {f.event.call for f in group.failures} - {""}
        and not any(f.event.is_warning for f in group.failures)
        for group in equal_failures(errors)
    )
    # Who sees all ranks saw each end after a loss: none of them died without a word.
    ended_ranks = ranks_in(f for f in job.reports if f.is_by("of_all"))
    lost_ranks = {(f.rank, f.rank is None and f.event.line) for f in errors}
    is_told |= 1 < len(job.ranks) == len(ended_ranks) <= len(lost_ranks)
    # The opposite end was on the same node, and torchrun itself has ended all other ranks there.
    sent = ranks_in(f for f in job.ended if f.event.source == "torchrun")
    node_of = _node_of_address(job)
    is_near = any(_peer(f) for f in errors) and all(_peer(f) in ("", *node_of) for f in errors)
    is_near &= len({*node_of.values()}) == 1 and bool(sent)
    is_told |= is_near and sent | ranks_in(errors) == job.ranks
    words = {"error": (peerless or errors)[0].event.text}
    finding = Finding(for_=lines_of(errors), words=words, missing=missing)
    if is_told:
        sentence = "no rank is known to be first: {error}"
        finding = replace(finding, kind="network", sentence=sentence)
    # A launcher of all ranks says that these ended by it, and no further rank.
    ranks = ranks_in(peerless)
    # torchrun has ended further ones, whose ranks no line names.
    is_sent = any(f.event.source == "torchrun" for f in job.ended)
    is_part = set() < ranks < job.ranks or (len(ranks) == 1 and is_sent)
    is_whole = job.finder.is_one_node and is_part
    # torch.multiprocessing says which process failed first, and has its words alone.
    is_only = job.finder.is_one_node and not job.logged and len(errors) == len(ranks) == 1
    is_only &= errors[0].event.local_rank is not None
    # Who sees all ranks has seen none end before the only one that lost its link.
    reports = [f for f in job.reports if f.is_by("of_all")]
    is_first = len(ranks) == 1 and {f.rank for f in reports[:1]} == ranks
    is_whole &= ranks == ranks_in(job.reports)
    if errors == peerless and (is_whole or is_only or is_first):
        nodes = job.nodes_of(ranks)
        words |= {"who": subject(ranks, nodes)}
        sentence, kind = "{who}: {error}", finding.kind or "network" * is_first
        return replace(
            finding, ranks=ranks, nodes=nodes, words=words, kind=kind, sentence=sentence
        )
    return finding


def _errors(job: JobFailures, keys: Sequence[str]) -> list[tuple[RankFailure, str, str]]:
    """The lost peers by these rows of the table, each with its meaning and the next step."""
    errors = [(f, nccl_errors.meaning(f.event.text)) for f in job.lost]
    return [(f, e.meaning, e.step) for f, e in errors if e and e.key in keys]


def _peer(failure: RankFailure) -> str:
    """The address of the opposite end of the connection that an error is about; "": not known."""
    match = _PEER.search(failure.event.text)
    return (match[1] or match[2]) if match else ""


def _mutual(job: JobFailures) -> list[tuple[RankFailure, str, str]]:
    """The errors of connections that two nodes or more have, each with another peer."""
    rows = _errors(job, _MUTUAL)
    peers: dict[str, set[str]] = {}
    for failure, *_ in rows:
        if failure.node and (peer := _peer(failure)):
            peers.setdefault(failure.node, set()).add(peer)
    # One peer of all may have ended.
    is_mutual = len(peers) > 1 and not set.intersection(*peers.values())
    return rows if is_mutual else []


def _refusals(job: JobFailures) -> list[str]:
    """The nodes that refuse connections, most refusals first, with what leaves them out."""
    node_of, refused = _node_of_address(job), Counter[str]()
    for failure, *_ in _errors(job, ("connect-refused",)):
        if peer := _peer(failure):
            refused[peer] += 1
    texts = []
    for address, count in refused.most_common(3):
        node = node_of.get(address, "")
        fix = (
            f"without it: `srun --exclude={node}`"
            if node
            else f"its name: `getent hosts {address}`"
        )
        name = f"{node} ({address})" if node else address
        times = counted(count, "connection")
        texts.append(f"{name} refused {times}: see what has ended there; {fix}")
    return texts


def _node_of_address(job: JobFailures) -> dict[str, str]:
    """Address -> the node that has it, by the nodes' interfaces and by NCCL's lines."""
    node_of = {
        text.partition("/")[0]: node
        for node, facts in job.evidence.environment_facts.items()
        for interface in facts.interfaces
        for text in interface.addresses or ()
    }
    for file in job.evidence.files:
        for text in file.failures.facts.addresses:
            address, _, host = text.partition(" ")
            if name := file.node or host:
                node_of[address] = name
    return node_of


def _links(job: JobFailures, failures: Sequence[RankFailure]) -> list[tuple[str, str]]:
    """The pairs of nodes between which the errors are; a peer that is not known by address."""
    node_of = _node_of_address(job)
    ends = [(f, _LOCAL.search(f.event.text), _peer(f)) for f in failures]
    node_of |= {local[1]: f.node for f, local, _ in ends if local and f.node}
    links: dict[tuple[str, str], None] = {}
    for failure, _, peer in ends:
        if peer and failure.node:
            first, second = sorted((failure.node, node_of.get(peer, peer)))
            # Each node has the address of a bridge: it tells of no pair.
            if first != second:
                links[first, second] = None
    return list(links)
