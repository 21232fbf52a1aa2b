"""The memory as the commands use it: where it is, and what they keep in it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.core.exit_codes import Refused
from nodeready.core.files import state_directory
from nodeready.core.outcome import INTERRUPTED
from nodeready.core.result import OBSERVED
from nodeready.core.text import span
from nodeready.runs.audit.recorded import VERDICT
from nodeready.runs.memory.history import HistoryEntry, read_parts_history
from nodeready.runs.memory.lemons import WITNESSES, Lemons, find_lemons, lemons_of_nodes
from nodeready.runs.memory.look import (
    ERROR,
    GATE,
    Event,
    Look,
    NodeSections,
    PartSpan,
    SectionWriter,
    dump,
    node_sections,
    results_text,
)
from nodeready.runs.memory.store import ControlClock, Memory, MemoryUnavailable
from nodeready.runs.options import ConnectionOptions, LemonsOptions
from nodeready.runs.targets import load_targets
from nodeready.runs.tell import Tell
from nodeready.runs.user_files import memory_settings
from nodeready.subjects.proof.facts import ProvedHistory

if TYPE_CHECKING:
    from nodeready.runs.audit.workers import AuditWorkers
    from nodeready.runs.postmortem.document import Postmortem
    from nodeready.runs.smoke.document import SmokeReport

ReadT = TypeVar("ReadT")
OFF = "off"  # the value of NODEREADY_MEMORY with which nothing is kept
#: Days and megabytes after which the oldest looks are removed; docs/history.md has their size.
DAYS, MEGABYTES = 90, 2000


@dataclass(frozen=True)
class MemorySettings:
    path: Path | None  # None: nothing is kept
    days: int = DAYS  # after which a look is removed
    megabytes: int = MEGABYTES  # of the file, after which the oldest looks are removed

    @classmethod
    def load(cls) -> MemorySettings:
        """The settings of the files and of the environment. Raises Refused."""
        words = memory_settings()
        numbers = {}
        for key, default in (("days", DAYS), ("megabytes", MEGABYTES)):
            word = words.get(key, str(default))
            if not word.isdecimal() or not 1 <= int(word) <= 10**7:
                raise Refused(f"memory: {key} {word}: must be a number from 1")
            numbers[key] = int(word)
        file = os.path.expanduser(words.get("file", ""))
        if file == OFF:
            return cls(None, **numbers)
        if file and not file.startswith("/"):
            raise Refused(f"memory: file {file}: write the whole path, or off")
        return cls(Path(file) if file else state_directory() / "memory.db", **numbers)


def _is_missing(path: Path) -> bool:
    """Whether there is no file; what else keeps it from being read, `Memory.open` says."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


@contextlib.contextmanager
def open_memory() -> Iterator[Memory]:
    """The memory, to read. Raises Refused if it is missing or unreadable."""
    path = MemorySettings.load().path
    if path is None:
        raise Refused(f"the memory is {OFF}: NODEREADY_MEMORY names its file")
    if _is_missing(path):
        raise Refused(f"{path}: no look was kept yet: nodeready audit keeps one")
    with Memory.open(path) as memory:
        yield memory


def _open_earlier(path: Path | None) -> Memory | None:
    """The memory as it was before this look; None: missing, or unreadable for a reason that
    `LookKeeper` reports when it keeps the look.
    """
    if path is not None and not _is_missing(path):
        with contextlib.suppress(MemoryUnavailable):
            return Memory.open(path)
    return None


class LookKeeper:
    """Keeps the looks of one command. A problem of the memory is a line on standard error."""

    def __init__(self, tell: Tell, command: str = "", inventory: str = "") -> None:
        self._tell, self._command, self._inventory = tell, command, inventory
        self._settings = MemorySettings.load()
        self._checks: frozenset[str] = frozenset()

    @cached_property
    def _earlier(self) -> Memory | None:
        return _open_earlier(self._settings.path)

    def section_writer(self, checks: Iterable[str]) -> SectionWriter | None:
        """Makes the nodes' sections; None: nothing is kept. checks: ids of results to keep"""
        self._checks = frozenset(checks)
        if self._settings.path is None:
            return None
        digests: frozenset[bytes] = frozenset()
        # Closed before the workers are forked: SQLite's connections do not survive a fork.
        if memory := _open_earlier(self._settings.path):
            with contextlib.suppress(MemoryUnavailable), memory:
                digests = memory.digests()
        return SectionWriter(self._checks, digests)

    def _read(self, read: Callable[[Memory], ReadT], missing: ReadT) -> ReadT:
        """What the memory has; ``missing`` where it cannot be read."""
        with contextlib.suppress(MemoryUnavailable):
            return read(self._earlier) if self._earlier else missing
        return missing

    def earlier_counters(self, name: str) -> str:
        """The counters of the last look at the node, as JSON; "": there are none."""
        return self._read(lambda memory: memory.earlier_counters(name), "")

    def looks(self) -> list[Look]:
        """The kept looks of this command at its inventory, the oldest first."""
        looks: list[Look] = self._read(lambda memory: memory.looks(), [])
        run = self._command, self._inventory
        return [look for look in reversed(looks) if (look.command, look.inventory) == run]

    def history(self, node: str) -> list[HistoryEntry]:
        """The kept history of a node and of its parts, the newest first."""
        return self._read(lambda memory: read_parts_history(memory, node), [])

    def keep_audit(self, audit: Audit, code: int, workers: AuditWorkers | None) -> None:
        """Keep an audit. workers: that have judged it; None: it is one of recorded verdicts"""
        nodes = _recorded(audit.nodes) if workers is None else _judged(audit.nodes, workers)
        moment_s = time.time() if workers is None else workers.moment_s
        place = moment_s, self._command, self._inventory, audit.policy_digest, audit.complete
        self._keep(Look(0, *place, code, audit.summary), nodes)  # type: ignore[arg-type]

    def keep_smoke(self, report: SmokeReport, code: int) -> None:
        """Keep a smoke test, and each suspect as an event of its nodes and GPUs."""
        # Imported only here, because an audit does not need it, and must be quick.
        from nodeready.runs.smoke.knowledge import PAIR

        now_s = time.time()
        events = []
        for suspect in report.suspects:
            kind = "smoke-pair" if suspect.kind == PAIR else "smoke-suspect"
            text = f"{suspect.kind}: {'; '.join(suspect.evidence[:1])}"
            for node, gpu in product(suspect.blamed, suspect.gpus or (None,)):
                events.append(Event(now_s, node, self._serial(node, gpu), kind, text))
        self._keep_events(now_s, events, code, complete=report.complete)

    def keep_postmortem(
        self, report: Postmortem, code: int, nodes: Collection[str], uid: int | None
    ) -> None:
        """Keep the cause of a job's end as an event of its nodes. nodes: that were asked: a log
        may name any node. uid: of the job's user, by Slurm; None: not known
        """
        # Imported only here, because an audit does not need it, and must be quick.
        from nodeready.runs.postmortem.document import KERNEL, LOG

        now_s, cause, events = time.time(), report.cause, []
        for node in (name for name in cause.nodes if name in nodes):
            witness = report.witnesses.get(node)
            kind = f"{'confirmed' if witness == KERNEL else 'postmortem'}-{cause.kind}"
            user = str(uid) if witness == LOG and uid is not None else ""
            text = f"job {report.job}: {cause.text}"
            events.append(Event(now_s, node, "", kind, text, user))
        self._keep_events(now_s, events, code, complete=report.complete)

    def _keep_events(
        self, now_s: float, events: Collection[Event], code: int, *, complete: bool
    ) -> None:
        """Keep a look that only has events."""
        assert {event.kind for event in events} <= WITNESSES.keys()
        look = Look(0, now_s, self._command, self._inventory, "", complete, code, {})
        self._keep(look, (), events)

    def _serial(self, node: str, gpu: int | None) -> str:
        """The serial number of the GPU with this number of a node; "": not known.

        The vendors' tools number GPUs in the order of their PCI addresses.
        """
        if gpu is None:
            return ""
        parts: list[PartSpan] = self._read(lambda memory: memory.parts_of(node), [])
        gpus = [part for part in parts if part.kind == "gpu" and part.is_there]
        serials = [serial for _, serial in sorted((part.slot, part.serial) for part in gpus)]
        return serials[gpu] if gpu < len(serials) else ""

    def _keep(
        self, look: Look, nodes: Iterable[NodeSections], events: Iterable[Event] = ()
    ) -> None:
        settings = self._settings
        if settings.path is None:
            return
        try:
            with Memory.open(settings.path, make=True) as memory:
                declared = {check for check in self._checks if not check.endswith(f".{OBSERVED}")}
                memory.keep(look, nodes, events, declared)
                max_bytes = settings.megabytes * 1_000_000
                jump_s = memory.trim(ControlClock.read(), settings.days, max_bytes)
            if jump_s:
                place = f"{span(abs(jump_s))} {'ahead of' if jump_s > 0 else 'behind'}"
                self._tell.say(
                    f"this machine's clock is {place} that of the last look: is it right? "
                    f"(timedatectl) No look is removed in the next {settings.days} days"
                )
        except MemoryUnavailable as error:
            self._tell.say(f"this look was not kept: {error}")


def earlier_failures(nodes: Collection[str]) -> dict[str, ProvedHistory] | None:
    """The lemons among these nodes and their GPUs, in the whole memory; None: no memory."""
    memory, now_s = _open_earlier(MemorySettings.load().path), time.time()
    if memory is not None:
        with contextlib.suppress(MemoryUnavailable), memory:
            document = find_lemons(memory, {*memory.names()}, now_s - DAYS * 86400, now_s)
            lines = lemons_of_nodes(document)
            return {node: ProvedHistory(lines.get(node, ())) for node in nodes}
    return None


def kept_lemons(inventory: str | None, options: LemonsOptions, tell: Tell) -> Lemons:
    """The lemons among the nodes of an inventory, or of the memory. Raises Refused."""
    now_s = time.time()
    if inventory is None and options.limit is not None:
        raise Refused("--limit: needs an INVENTORY")
    with open_memory() as memory:
        peers = shown = set(memory.names())
        if inventory is not None:
            trusted = ConnectionOptions(trust_inventory=options.trust_inventory)
            peers = shown = peers & load_targets(inventory, trusted, tell.note)[2].keys()
            if options.limit is not None:
                limited = replace(trusted, limit=options.limit)
                shown = peers & load_targets(inventory, limited, tell.note)[2].keys()
        since_s = options.since_s or now_s - DAYS * 86400
        # Without a node there is no fleet.
        document = find_lemons(memory, peers if shown else (), since_s, now_s)
    units = (unit for unit in document.units if not shown.isdisjoint((unit.node, *unit.nodes)))
    return replace(document, units=tuple(units))


def _judged(reports: Iterable[NodeReport], workers: AuditWorkers) -> Iterator[NodeSections]:
    """The states of the nodes that were probed."""
    for report in reports:
        if report.gap and report.gap.kind != INTERRUPTED:
            error = dump([report.gap.reason, report.gap.is_unreached])
            yield node_sections(report.name, {ERROR: error})
        elif report.gap is None and (state := workers.state(report.name)):
            yield state


def _recorded(reports: Iterable[NodeReport]) -> Iterator[NodeSections]:
    """The states of the nodes whose own verdict is trusted."""
    for report in reports:
        if any(result.check == VERDICT and result.status == "ok" for result in report.results):
            checks = {result.check for result in report.results}
            yield node_sections(report.name, {GATE: results_text(report.results, checks)})
