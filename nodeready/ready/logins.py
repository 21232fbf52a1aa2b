"""What is wrong with the logins between nodes, from what each of them saw. Pure.

A node that nobody gets into would fail at every node that tried: `nodeready.ready.localize` names
it once, and the others are excused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from nodeready.ready import localize
from nodeready.subjects.proof.facts import Missing, PdshRun, Peers, Reach, Same, SshTry, Trouble
from nodeready.subjects.ssh_client.checks import cause_of

#: (source, target) -> (key of the cause, what was said); ("", "") for a login that worked.
_Logins = Mapping["tuple[str, str]", "tuple[str, str]"]
_WORKED = ("", "")


def reach(seen: Mapping[str, Peers], unreachable: Collection[str] = ()) -> dict[str, Reach]:
    """Each node's Reach, of those that tried and of those that were tried.

    seen:        what each node saw; one whose proofs ended without an answer is missing
    unreachable: nodes that nobody can be expected to reach: attempts to them do not count
    """
    logins = {
        (source, one.name): _judged(one, seen.get(one.name))
        for source, peers in seen.items()
        for one in peers.ssh
        if one.name not in unreachable
    }
    troubles = _troubles(logins)
    for name, others in _namesakes(seen).items():
        troubles[name].insert(0, Trouble("namesake", others, len(others), "namesake"))
    to, by = _counted(source for source, _ in logins), _counted(target for _, target in logins)
    excused: dict[str, list[str]] = defaultdict(list)
    for (source, target), (cause, _) in logins.items():
        if cause and not any(target in one.peers for one in troubles.get(source, ())):
            excused[source].append(target)
    blamed = _blamed_for_pdsh(seen, logins)
    return {
        name: replace(
            _pdsh(name, seen, logins, blamed),
            pdsh_by=blamed.get(name, ()),
            to=to[name],
            by=by[name],
            ssh=tuple(troubles.get(name, ())),
            excused=tuple(excused.get(name, ())),
        )
        for name in dict.fromkeys([*seen, *(target for _, target in logins)])
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for name in names:
        found[name] += 1
    return found


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _judged(one: SshTry, peer: Peers | None) -> tuple[str, str]:
    """The cause and what tells it."""
    if one.rc == 0 and one.answer:
        if peer is not None and _short(peer.host) != _short(one.answer):
            return "other_host", one.answer
        return _WORKED
    # A login shell that lets nobody in says so on its standard output.
    cause, line = cause_of(one.said or one.answer)
    if one.rc is None and cause == "other":
        return "timeout", "timed out"
    if one.rc == 0 or (cause == "other" and one.rc != 255):
        return "shell", line if one.said or one.answer else f"exit status {one.rc}"
    return cause, line


def _namesakes(seen: Mapping[str, Peers]) -> dict[str, tuple[str, ...]]:
    """The nodes that call themselves as others do, with these others. Whom the inventory calls so
    is not among them: another node that takes its name costs itself."""
    by_host: dict[str, list[str]] = defaultdict(list)
    for name, peers in seen.items():
        by_host[_short(peers.host)].append(name)
    found: dict[str, tuple[str, ...]] = {}
    for host, names in by_host.items():
        rightly = [name for name in names if _short(name) == host]
        for name in names:
            if len(names) > 1 and rightly != [name]:
                found[name] = tuple(other for other in names if other != name)
    return found


def _troubles(logins: _Logins) -> defaultdict[str, list[Trouble]]:
    """Each node's troubles, of those that it is to blame for."""
    found: defaultdict[str, list[Trouble]] = defaultdict(list)
    attempts = [
        localize.Attempt(source, target, "ssh", not cause, cause)
        for (source, target), (cause, _) in logins.items()
    ]
    findings = localize.attribute(attempts)
    for one in findings:
        found[one.node].append(_trouble(one, logins))
    alone = {one.node for one in findings if one.kind != localize.PAIR}
    for one in findings:
        if one.kind == localize.PAIR and one.back is False and not {one.node, *one.peers} & alone:
            # blame tells such a pair once; here each end has its own keys and configuration.
            (other,) = one.peers
            cause, said = logins[other, one.node]
            found[other].append(Trouble("pair", (one.node,), 1, cause, said, False))
    _nothing_proved(logins, found)
    return found


def _trouble(one: localize.Finding, logins: _Logins) -> Trouble:
    edges = [edge for peer in one.peers for edge in ((peer, one.node), (one.node, peer))]
    said = (logins[edge][1] for edge in edges if edge in logins and logins[edge][0] == one.cause)
    return Trouble(one.kind, one.peers, one.tried, one.cause, next(said, ""), one.back)


def _nothing_proved(logins: _Logins, found: defaultdict[str, list[Trouble]]) -> None:
    """A node between which and all others nothing works is not excused: where everything fails
    (no key is known anywhere), the others' troubles explain its own, but nobody saw it work."""
    failed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    works = {name for edge, result in logins.items() if result == _WORKED for name in edge}
    for edge in logins:
        failed[edge[0]].append(edge)
    for source, edges in failed.items():
        if source not in works and source not in found:
            cause, said = logins[edges[0]]
            peers = tuple(target for _, target in edges)
            found[source].append(Trouble("source", peers, len(peers), cause, said))


def _answers(name: str, seen: Mapping[str, Peers], logins: _Logins) -> dict[str, str]:
    """What pdsh on this node brought from each of the peers that ssh reaches; "": nothing."""
    run = seen[name].pdsh if name in seen else None
    if run is None:
        return {}
    asked = [peer for peer in run.asked if logins.get((name, peer), _WORKED) == _WORKED]
    texts = {answer.label: answer.text for answer in run.answers if answer.text}
    # pdsh leaves out the domain when all names have the same.
    return {peer: texts.get(peer, texts.get(peer.partition(".")[0], "")) for peer in asked}


def _blamed_for_pdsh(seen: Mapping[str, Peers], logins: _Logins) -> dict[str, tuple[str, ...]]:
    """The nodes that answer ssh and not the pdsh of several others, or call themselves something
    else there, with these others: a node must not fail all that ask it. Of a node that gets a
    good answer from nobody, nothing is known of the others."""
    attempts = []
    for source in seen:
        good = {
            peer: bool(text) and (peer not in seen or _short(text) == _short(seen[peer].host))
            for peer, text in _answers(source, seen, logins).items()
        }
        if any(good.values()):
            attempts += [localize.Attempt(source, p, "pdsh", ok) for p, ok in good.items()]
    return {
        one.node: one.peers
        for one in localize.attribute(attempts)
        if one.kind == localize.TARGET and len(one.peers) > 1
    }


def _pdsh(
    name: str,
    seen: Mapping[str, Peers],
    logins: _Logins,
    blamed: Mapping[str, tuple[str, ...]],
) -> Reach:
    """The part of a node's Reach that pdsh shows, of the peers that ssh reaches.

    blamed: node -> those whose pdsh it does not answer; these are excused
    """
    run = seen[name].pdsh if name in seen else None
    if run is None:
        return Reach()
    everyone = _answers(name, seen, logins)
    answers = {p: text for p, text in everyone.items() if name not in blamed.get(p, ())}
    asked = list(answers)
    by_answer: dict[str, list[str]] = defaultdict(list)
    for peer, answer in answers.items():
        if answer:
            by_answer[answer].append(peer)
    same = tuple(
        Same(answer, tuple(names))
        for answer, names in by_answer.items()
        if len(names) > 1 and not _one_host(names, seen)
    )
    missing = tuple(Missing(peer, _line(run, peer)) for peer in asked if not answers[peer])
    lines = [line for line in run.said.splitlines() if line.strip()]
    nothing = lines[0].strip() if lines and not run.answers else ""
    return Reach(
        asked=len(asked),
        distinct=len(by_answer),
        missing=missing,
        same=same,
        pdsh_said=nothing,
    )


def _one_host(names: Iterable[str], seen: Mapping[str, Peers]) -> bool:
    """Whether these nodes call themselves the same: that is their own trouble."""
    hosts = {_short(seen[name].host) if name in seen else name for name in names}
    return len(hosts) == 1


def _line(run: PdshRun, peer: str) -> str:
    """What pdsh said of this peer."""
    marks = (f"{peer}: ", f"{peer.partition('.')[0]}: ")
    for line in run.said.splitlines():
        for mark in marks:
            _, found, rest = line.partition(mark)
            if found and rest.strip():
                return rest.strip()
    return "timed out" if run.rc is None else ""
