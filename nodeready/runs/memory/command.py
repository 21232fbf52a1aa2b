"""The run of `nodeready diff`: two looks of the memory, or the nodes now and one of them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nodeready.agent.audit_document import audit_code
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import gaps_of
from nodeready.core.policy import AUDIT
from nodeready.core.text import counted, utc_moment, utc_now
from nodeready.fleet.inventory.nodeset import folded
from nodeready.runs import targets
from nodeready.runs.audit.command import look_at_nodes
from nodeready.runs.audit.learned import read_settings, settings_of
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.runs.memory.diff import (
    AuditFile,
    Diff,
    Side,
    compare,
    dated,
    looks_since,
    looks_since_good,
    majority,
    peer_differences,
    setting_differences,
    since_changes,
)
from nodeready.runs.memory.kept_looks import LookKeeper, open_memory
from nodeready.runs.memory.look import Look
from nodeready.runs.memory.store import Memory
from nodeready.runs.options import DiffOptions
from nodeready.runs.targets import Targets, probe_nodes
from nodeready.runs.tell import Tell
from nodeready.runs.values import epoch_seconds
from nodeready.subjects.registry import LEARNED, select

LAST_GOOD = "last-good"
_FOREVER = float("inf")


@dataclass(frozen=True)
class _Nodes:
    inventory: str
    options: DiffOptions
    tell: Tell

    def names(self, limit: str | None) -> list[str]:
        options = replace(self.options, limit=limit)
        return [*targets.load_targets(self.inventory, options, self.tell.note)[2]]

    def targets(self, limit: str | None) -> Targets:
        options, note = replace(self.options, limit=limit), self.tell.note
        return targets.select_targets(self.inventory, options, job=options.job, tell=note)

    def ask(self, limit: str | None) -> dict[str, Any]:
        """Look at the nodes as an audit does, and keep the look: the fields of `Diff` that say who
        gave no answer. Raises Refused.
        """
        started_s = time.time()
        keeper = LookKeeper(self.tell, "diff", self.inventory)
        nodes = self.targets(limit).at(AUDIT)
        selection = select(nodes.policies.values())
        nodes = nodes.chosen(selection)
        writer = keeper.section_writer(select(nodes.gate_policies.values()).results)
        with AuditWorkers(nodes.policies, None, None, writer) as workers, nodes.transport:
            timeout_s = self.options.timeout
            audit = look_at_nodes(nodes, self.tell, selection, timeout_s, workers, keeper=keeper)
            keeper.keep_audit(audit, audit_code(audit), workers)
        with open_memory() as memory:
            if not memory.looks(started_s):
                raise Refused("the look at the nodes was not kept: there is nothing to compare")
        return {"gaps": audit.gaps, "complete": audit.complete}


def run(inventory: str, options: DiffOptions, tell: Tell) -> Diff:
    """What changed on the nodes, or in what they differ from others. Raises Refused."""
    since, until, against = options.since, options.until, options.against
    if since and against:
        raise Refused("--since and --against: compare with one of them: remove the other")
    if until and not (since or against):
        command = f"nodeready diff {options.words(inventory)} --since yesterday --until {until}"
        raise Refused(f"--until {until}: needs --since: {command}")
    if not (since or against):
        since, until = _last_two(inventory)
    nodes = _Nodes(inventory, options, tell)
    if not (against and Path(against).is_file()):
        return _of_memory(nodes, since, until, against)
    if until:
        raise Refused(f"--against {against}: asks the nodes: remove --until")
    return _against_settings(nodes, Path(against))


def diff_files(before: str, after: str) -> Diff:
    """The differences of two files. Raises Refused."""
    old, new = AuditFile.read(Path(before)), AuditFile.read(Path(after))
    old_names, new_names = {*old.names}, {*new.names}
    pairs = ((old.look(name), new.look(name)) for name in new.names if name in old_names)
    sides = Side(before, old.started), Side(after, new.started)
    only_before = tuple(name for name in old.names if name not in new_names)
    only_after = tuple(name for name in new.names if name not in old_names)
    changes = since_changes(pairs)
    return compare(changes, *sides, only_before=only_before, only_after=only_after)


def _moment(name: str, words: str, memory: Memory) -> float:
    """A moment of ``--since`` or ``--until`` in seconds since 1970. Raises Refused."""
    if words.isdecimal():
        times = [look.time_s for look in memory.looks() if look.id == int(words)]
        if not times:
            problem = "the memory has no look of this number: history lists them"
            raise Refused(f"{name} {words}: {problem}")
        return times[0]
    spans = re.fullmatch(r"(\d+) *(minute|hour|day|week)s?( ago)?", words)
    if words == "yesterday":
        words = "1d"
    elif spans:
        words = f"{spans[1]}{spans[2][0]}"
    try:
        return epoch_seconds(words, datetime.now().astimezone())
    except ValueError as error:
        raise Refused(f"{name} {words}: {error}") from None


def _has_nodes(look: Look) -> bool:
    """Whether the look was one at nodes, and not of events alone."""
    return any(look.summary.get("nodes", {}).values())


def _last_two(inventory: str) -> tuple[str, str]:
    """The numbers of the last two looks at this inventory. Raises Refused."""
    with open_memory() as memory:
        looks = [look for look in memory.looks() if _has_nodes(look)]
        looks = [look for look in looks if look.inventory == inventory]
    if len(looks) < 2:
        raise Refused(
            f"diff {inventory}: the memory has {counted(len(looks), 'look')} at it and compares "
            f"two: nodeready audit {inventory} keeps one"
        )
    return str(looks[1].id), str(looks[0].id)


def _since(memory: Memory, names: list[str], since: str, until_s: float, after: Side) -> Diff:
    """What changed on these nodes since a time. Raises Refused."""
    spans = memory.spans()
    begin_s = max(
        min((look.time_s for look in memory.looks() if _has_nodes(look)), default=0.0),
        min((spans[name][0] for name in names if name in spans), default=0.0),
    )
    source = f"the memory, {since}"
    if since == LAST_GOOD:
        since_s = begin_s
        looks = [*looks_since_good(memory, names, until_s)]
    else:
        since_s = _moment("--since", since, memory)
        if since_s > until_s:
            raise Refused(f"--since {since}: is later than --until")
        if since_s < begin_s:
            since_s, source = begin_s, f"the first look that the memory has, after {since}"
        looks = [*looks_since(memory, names, since_s, until_s)]
    if looks and all(before is None for before, _ in looks):
        was_good = " without a failure" if since == LAST_GOOD else ""
        begin = f"the memory begins at {utc_moment(begin_s)}"
        raise Refused(f"--since {since}: no node has such a look{was_good}: {begin}")
    oldest_s = min((before.time_s for before, _ in looks if before is not None), default=since_s)
    new = tuple(look.node for before, look in looks if before is None)
    side = Side(source, utc_moment(oldest_s))
    diff = compare(since_changes(looks), side, after, only_after=new)
    return dated(diff, memory, oldest_s, until_s)


def _against_peers(
    memory: Memory, names: list[str], peers: list[str], until_s: float, after: Side
) -> Diff:
    """In what these nodes differ from a peer, or from most of several peers. Raises Refused."""
    looks = [*memory.nodes(peers, until_s)]
    model = looks[0] if len(peers) == len(looks) == 1 else majority(looks)
    if model.error:
        raise Refused(f"--against: {folded(peers)}: {model.error}")
    nodes = (look for look in memory.nodes(names, until_s) if len(peers) > 1 or look is not model)
    source = folded(peers) if len(peers) == 1 else f"most of {folded(peers)}"
    return compare(peer_differences(model, nodes), Side(source, utc_moment(model.time_s)), after)


def _of_memory(nodes: _Nodes, since: str | None, until: str | None, against: str | None) -> Diff:
    """The nodes against an earlier time, or against peers. Raises Refused."""
    limit = nodes.options.limit
    names, peers = nodes.names(limit), nodes.names(against) if against else []
    answers = {}
    if until is None:
        if since:
            # A mistake is refused before any node is asked.
            with open_memory() as memory:
                if since != LAST_GOOD:
                    _moment("--since", since, memory)
        answers = nodes.ask(f"{limit},{against}" if limit and against else limit)
    with open_memory() as memory:
        until_s = _FOREVER if until is None else _moment("--until", until, memory)
        newest_s = memory.time_s(until_s)
        source = "the nodes now" if until is None else f"the memory, {until}"
        after = Side(source, utc_moment(newest_s))
        if against:
            document = _against_peers(memory, names, peers, until_s, after)
        else:
            document = _since(memory, names, str(since), until_s, after)
    return replace(document, **answers)


def _against_settings(nodes: _Nodes, path: Path) -> Diff:
    """In what the nodes differ from a file of `learn`. Raises Refused."""
    try:
        settings = read_settings(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"--against {path}: {error}") from None
    started = utc_now()
    targeted = nodes.targets(nodes.options.limit)
    with targeted.transport:
        outcomes = probe_nodes(targeted, nodes.tell, LEARNED, nodes.options.timeout)
    learned = ((probed.node, settings_of(probed.value)) for probed in outcomes if probed.value)
    differing = (setting_differences(node, settings, fitting) for node, fitting in learned)
    sides = Side(str(path), ""), Side("the nodes now", started)
    complete = not targeted.transport.interrupted
    return compare(differing, *sides, gaps=gaps_of(outcomes), complete=complete)
