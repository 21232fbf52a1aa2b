"""What `nodeready diff` does when it runs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from nodeready.agent.audit_document import audit_code
from nodeready.cli.default_inventory import require_inventory
from nodeready.cli.kept_looks import LookKeeper, open_memory
from nodeready.cli.options import Refused
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets, load_targets, select_targets
from nodeready.cli.values import epoch_seconds
from nodeready.core.outcome import NodeGaps, gaps_of
from nodeready.core.policy.site_checks import AUDIT
from nodeready.core.text import counted, utc_moment, utc_now
from nodeready.reports.lines import node_set
from nodeready.runs.memory.diff import (
    AuditFile,
    Diff,
    DocumentError,
    Side,
    compare,
    dated,
    diff_code,
    looks_since,
    looks_since_good,
    majority,
    peer_differences,
    setting_differences,
    since_changes,
)
from nodeready.runs.memory.look import Look
from nodeready.runs.memory.store import Memory, MemoryUnavailable

LAST_GOOD = "last-good"
_FOREVER = float("inf")


class _Asked(NamedTuple):
    """The outcome of asking the nodes: who gave no answer, and whether all were asked."""

    gaps: NodeGaps = ()
    complete: bool = True


@dataclass(frozen=True)
class _Nodes:
    """The nodes of one command, and how they are asked."""

    inventory: str
    options: TargetOptions
    screen: Screen
    job: str | None
    timeout_s: int

    def names(self, limit: str | None) -> list[str]:
        return [*load_targets(self.inventory, replace(self.options, limit=limit))[2]]

    def targets(self, limit: str | None) -> Targets:
        options = replace(self.options, limit=limit)
        return select_targets(self.inventory, options, job=self.job, tell=self.screen.note)

    def ask(self, limit: str | None) -> _Asked:
        """Look at the nodes as an audit does, and keep the look. Raises Refused."""
        from nodeready.cli.audit_run import look_at_nodes
        from nodeready.runs.audit.workers import AuditWorkers
        from nodeready.subjects.registry import select

        started_s = time.time()
        keeper = LookKeeper(self.screen, "diff", self.inventory)
        nodes = self.targets(limit).at(AUDIT)
        selection = select(nodes.policies.values())
        nodes = nodes.chosen(selection)
        writer = keeper.section_writer(select(nodes.gate_policies.values()).results)
        with AuditWorkers(nodes.policies, None, None, writer) as workers:
            audit = look_at_nodes(
                nodes, self.screen, selection, self.timeout_s, workers, keeper=keeper
            )
            keeper.keep_audit(audit, audit_code(audit), workers)
        with open_memory() as memory:
            if not memory.looks(started_s):
                raise Refused("the look at the nodes was not kept: there is nothing to compare")
        return _Asked(audit.gaps, audit.complete)


def _of_files(before: str, after: str) -> Diff:
    """The differences of two files. Raises Refused."""
    try:
        old, new = AuditFile.read(Path(before)), AuditFile.read(Path(after))
        old_names, new_names = {*old.names}, {*new.names}
        pairs = ((old.look(name), new.look(name)) for name in new.names if name in old_names)
        return compare(
            since_changes(pairs),
            Side(before, old.started),
            Side(after, new.started),
            only_before=tuple(name for name in old.names if name not in new_names),
            only_after=tuple(name for name in new.names if name not in old_names),
        )
    except DocumentError as error:
        raise Refused(str(error)) from None


def _moment(name: str, words: str, memory: Memory) -> float:
    """A moment of ``--since`` or ``--until`` in seconds since 1970. Raises Refused."""
    if words.isdecimal():
        times = [look.time_s for look in memory.looks() if look.id == int(words)]
        if not times:
            raise Refused(
                f"{name} {words}: the memory has no look of this number: history lists them"
            )
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
        looks = [
            str(look.id)
            for look in memory.looks()
            if _has_nodes(look) and look.inventory == inventory
        ]
    if len(looks) < 2:
        raise Refused(
            f"diff {inventory}: the memory has {counted(len(looks), 'look')} at it and compares "
            f"two: nodeready audit {inventory} keeps one"
        )
    return looks[1], looks[0]


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
        raise Refused(
            f"--since {since}: no node has such a look{was_good}: the memory begins at "
            f"{utc_moment(begin_s)}"
        )
    oldest_s = min((before.time_s for before, _ in looks if before is not None), default=since_s)
    diff = compare(
        since_changes(looks),
        Side(source, utc_moment(oldest_s)),
        after,
        only_before=(),
        only_after=tuple(look.node for before, look in looks if before is None),
    )
    return dated(diff, memory, oldest_s, until_s)


def _against_peers(
    memory: Memory, names: list[str], peers: list[str], until_s: float, after: Side
) -> Diff:
    """In what these nodes differ from a peer, or from most of several peers. Raises Refused."""
    looks = [*memory.nodes(peers, until_s)]
    model = looks[0] if len(peers) == len(looks) == 1 else majority(looks)
    if model.error:
        raise Refused(f"--against: {node_set(peers)}: {model.error}")
    nodes = (look for look in memory.nodes(names, until_s) if len(peers) > 1 or look is not model)
    source = node_set(peers) if len(peers) == 1 else f"most of {node_set(peers)}"
    return compare(
        peer_differences(model, nodes),
        Side(source, utc_moment(model.time_s)),
        after,
        only_before=(),
        only_after=(),
    )


def _of_memory(nodes: _Nodes, since: str | None, until: str | None, against: str | None) -> Diff:
    """The nodes against an earlier time, or against peers. Raises Refused."""
    limit = nodes.options.limit
    names, peers = nodes.names(limit), nodes.names(against) if against else []
    answers = _Asked()
    if until is None:
        if since:
            # A mistake is refused before any node is asked.
            with open_memory() as memory:
                if since != LAST_GOOD:
                    _moment("--since", since, memory)
        answers = nodes.ask(f"{limit},{against}" if limit and against else limit)
    try:
        with open_memory() as memory:
            until_s = _FOREVER if until is None else _moment("--until", until, memory)
            newest_s = memory.time_s(until_s)
            source = "the nodes now" if until is None else f"the memory, {until}"
            after = Side(source, utc_moment(newest_s))
            if against:
                document = _against_peers(memory, names, peers, until_s, after)
            else:
                document = _since(memory, names, str(since), until_s, after)
    except MemoryUnavailable as error:
        raise Refused(str(error)) from None
    return replace(document, gaps=answers.gaps, complete=answers.complete)


def _against_settings(nodes: _Nodes, path: Path) -> Diff:
    """In what the nodes differ from a file of `learn`. Raises Refused."""
    from nodeready.cli.conversations import probe_nodes
    from nodeready.runs.audit.learned import read_settings, settings_of
    from nodeready.subjects.registry import LEARNED

    try:
        settings = read_settings(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"--against {path}: {error}") from None
    started = utc_now()
    targets = nodes.targets(nodes.options.limit)
    with targets.transport:
        outcomes = probe_nodes(targets, nodes.screen, LEARNED, nodes.timeout_s)
    return compare(
        (
            setting_differences(probed.node, settings, settings_of(probed.value))
            for probed in outcomes
            if probed.value
        ),
        Side(str(path), ""),
        Side("the nodes now", started),
        only_before=(),
        only_after=(),
        gaps=gaps_of(outcomes),
        complete=not targets.transport.interrupted,
    )


def run_diff(
    sides: tuple[str, ...],
    *,
    since: str | None,
    until: str | None,
    against: str | None,
    format: str,
    output: tuple[str, ...],
    is_strict: bool,
    timeout: int,
    job: str | None,
    **shared: Any,
) -> int:
    """Run `nodeready diff`. Returns the exit code. Raises Refused."""
    options = TargetOptions(**shared)
    outputs = read_outputs("diff", format, output)
    screen = options.screen()
    if len(sides) == 2 and not (since or until or against):
        document = _of_files(*sides)
    elif len(sides) > 1:
        raise Refused(
            "compares one INVENTORY, or two files without --since, --until and --against: "
            "nodeready diff monday.json today.json"
        )
    elif since and against:
        raise Refused("--since and --against: compare with one of them: remove the other")
    else:
        inventory = require_inventory(sides[0] if sides else None, options)
        if until and not (since or against):
            raise Refused(
                f"--until {until}: needs --since: nodeready diff {options.words(inventory)} "
                f"--since yesterday --until {until}"
            )
        if not (since or against):
            since, until = _last_two(inventory)
        nodes = _Nodes(inventory, options, screen, job, timeout)
        if against and Path(against).is_file():
            if until:
                raise Refused(f"--against {against}: asks the nodes: remove --until")
            document = _against_settings(nodes, Path(against))
        else:
            document = _of_memory(nodes, since, until, against)
    outputs.show(document, screen, silent=screen.quiet and not document.changes)
    return diff_code(document, is_strict=is_strict)
