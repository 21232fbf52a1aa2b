"""The run of `nodeready undrain`: which drained nodes return, and why the rest stay."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, TypeVar

from nodeready.agent.asking import Conversation, new_nonce, packed_value, request
from nodeready.agent.gate import drain
from nodeready.agent.gate.drain import DrainError, SlurmNode
from nodeready.agent.gate.undrain import slurm_authors, stay_reason, undrain
from nodeready.agent.leftovers import Leftover, LeftoversConfig, NodeLeftovers, jobs_on, judged
from nodeready.core.exit_codes import FAILED, Refused
from nodeready.core.json_types import Moment, Name
from nodeready.core.outcome import INVALID, Gap, NodeGaps, gaps_code, node_gaps
from nodeready.core.shell import find_program, join
from nodeready.core.text import counted, utc_now
from nodeready.fleet.inventory.nodeset import folded
from nodeready.runs import targets
from nodeready.runs.options import ReadyOptions, UndrainOptions
from nodeready.runs.ready import command as ready
from nodeready.runs.targets import Targets, converse, keep_gaps
from nodeready.runs.tell import Tell

#: The outcomes of a node.
OUTCOMES = WOULD_RETURN, RETURNED, STAYS, REFUSED = "would_return", "returned", "stays", "refused"
AnswerT = TypeVar("AnswerT")
_SLURM_S = 30.0  # seconds for all answers of Slurm about one step
_MAX_UNPACKED = 4 << 20  # maximum bytes of a node's unpacked answer


@dataclass(frozen=True)
class DrainedNode:
    """A node that Slurm has drained."""

    name: Name  # its name in INVENTORY
    slurm_name: Name  # its name in Slurm
    reason: str  # of the drain, in Slurm's words
    since: str  # when the reason was written, by slurmctld's clock, UTC, or empty
    author: str  # the user who wrote the reason, or empty
    # would_return: --yes returns it; returned: by this run; stays: for its obstacle, or for its
    # leftovers; refused: Slurm refused its return
    outcome: Annotated[str, {"enum": OUTCOMES}] = WOULD_RETURN
    # undrain_reasons has the reason and Slurm or nodeready wrote it: only such a node is looked at
    is_listed: bool = True
    obstacle: str = ""  # why it stays, one line, or empty
    leftovers: tuple[Leftover, ...] = ()  # what holds it
    incident: str = ""  # the directory on the node with the evidence of what was ended, or empty
    must_reboot: bool = False  # the first action against what holds it is a reboot

    def stays(self, obstacle: str, *, must_reboot: bool = False) -> DrainedNode:
        return replace(self, outcome=STAYS, obstacle=obstacle, must_reboot=must_reboot)


@dataclass(frozen=True)
class Undrain:
    """The document of `nodeready undrain`. Control characters in texts are visible escapes."""

    SCHEMA: ClassVar = "undrain"
    VERSION: ClassVar = 1
    JSON: ClassVar = ("started", "finished", "complete", "nodes", "gaps")

    started: Moment  # when Slurm was asked, UTC
    finished: Moment  # when the last answer came, UTC
    nodes: tuple[DrainedNode, ...]  # the drained nodes, in the order of INVENTORY
    gaps: NodeGaps  # the nodes that gave no answer
    complete: bool = True  # False when it was interrupted


def undrain_code(document: Undrain) -> int:
    """The exit code: 3 if a node stays that was drained for a listed reason."""
    stays = any(node.outcome == STAYS and node.is_listed for node in document.nodes)
    refused = any(node.outcome == REFUSED for node in document.nodes)
    complete = document.complete
    return gaps_code(document.gaps, complete=complete, failed=refused, check=stays)


def next_commands(document: Undrain, inventory: str) -> Iterator[str]:
    """The commands that bring the nodes on."""
    command = " ".join(filter(None, ("nodeready undrain", inventory)))
    if any(row.can_end and not row.is_stuck for node in document.nodes for row in node.leftovers):
        yield f"{command} --end-leftovers"
    if any(node.outcome == WOULD_RETURN for node in document.nodes):
        yield f"{command} --yes"
    nodes_by_reason: dict[str, list[str]] = defaultdict(list)
    for node in document.nodes:
        if node.must_reboot:
            reason = "a process in state D" if node.leftovers else node.obstacle.partition(": ")[0]
            nodes_by_reason[f"nodeready: reboot: {reason}"].append(node.slurm_name)
    for reason, names in nodes_by_reason.items():
        words = ["scontrol", "reboot", "ASAP", "nextstate=RESUME", f"reason={reason}"]
        yield join([*words, folded(names)])


# --- Slurm's nodes, and those of the inventory.


def _ask(question: Callable[[float], AnswerT]) -> AnswerT:
    """What Slurm answers. Raises Refused."""
    try:
        return question(time.monotonic() + _SLURM_S)
    except DrainError as error:
        raise Refused(f"Slurm: {error}", FAILED) from None


def _drained_nodes(deadline: float) -> dict[str, SlurmNode]:
    """The drained nodes by their names in Slurm. Raises DrainError."""
    nodes = drain.parse_all(drain.ask_slurm(["scontrol", "show", "node"], deadline))
    return {name: node for name, node in nodes.items() if node.is_drained}


def slurm_nodes(names: Iterable[str], nodes: Mapping[str, SlurmNode]) -> dict[str, SlurmNode]:
    """Name in the inventory -> Slurm's only node of this name, host name or address."""
    by_alias: dict[str, set[str]] = defaultdict(set)
    for name, node in nodes.items():
        for alias in (name, *node.addresses):
            by_alias[alias.lower()].add(name)
    matched = {}
    for name in names:
        # An address has no domain.
        short = name if name.replace(".", "").isdecimal() else name.partition(".")[0]
        candidates = by_alias.get(name.lower()) or by_alias.get(short.lower(), set())
        if len(candidates) == 1:
            matched[name] = nodes[next(iter(candidates))]
    return matched


# --- The run.


def run(inventory: str | None, options: UndrainOptions, tell: Tell) -> Undrain:
    """Look at drained nodes; end leftovers; return nodes. inventory: None: all. Raises Refused."""
    if not find_program("scontrol"):
        raise Refused("no Slurm here: scontrol is not installed")
    started, drained = utc_now(), _ask(_drained_nodes)
    if not drained:
        return Undrain(started, utc_now(), (), ())
    word = folded(drained) if inventory is None else inventory
    nodes = targets.select_targets(word, options, job=None, tell=tell.note)
    matched = slurm_nodes(nodes.policies, drained)
    unmatched = drained.keys() - {node.name for node in matched.values()}
    if unmatched and options.limit is None:
        tell.note(f"drained in Slurm, and not in {word}: {folded(unmatched)}")
    return _Run(word, options, tell, nodes).document(started, matched)


class _Run:
    """One run. rows: node -> its row, as far as it is known"""

    def __init__(
        self, inventory: str, options: UndrainOptions, tell: Tell, nodes: Targets
    ) -> None:
        self.inventory, self.options, self.tell, self.nodes = inventory, options, tell, nodes
        self.rows: dict[str, DrainedNode] = {}
        self.gaps: dict[str, Gap] = {}
        self.complete = True

    def document(self, started: str, drained: Mapping[str, SlurmNode]) -> Undrain:
        """Judge these nodes. Raises Refused."""
        authors = _ask(slurm_authors) if drained else ()
        for name, node in drained.items():
            obstacle = stay_reason(node, self.nodes.policies[name].undrain_reasons, authors)
            row = DrainedNode(name, node.name, node.reason, node.since, node.author)
            self.rows[name] = replace(row.stays(obstacle), is_listed=False) if obstacle else row
        with self.nodes.transport:
            self._find(dict.fromkeys(self._candidates(), ()))
            if self.options.end_leftovers:
                self._end_leftovers()
            self.complete = not self.nodes.transport.interrupted
        if self.complete and self._candidates():
            self._prove()
        if self.complete and self.options.yes:
            for name in self._candidates():
                self._return(name, drained[name])
        for name in [] if self.complete else self._candidates():
            self.rows[name] = self.rows[name].stays("interrupted before ready proved it")
        keep_gaps(self.nodes, self.tell, node_gaps(self.gaps), complete=self.complete)
        rows = tuple(row for name, row in self.rows.items() if name not in self.gaps)
        return Undrain(started, utc_now(), rows, node_gaps(self.gaps), self.complete)

    def _candidates(self) -> list[str]:
        """The nodes that may still return."""
        rows = self.rows.items()
        return [n for n, row in rows if row.outcome == WOULD_RETURN and n not in self.gaps]

    def _find(self, targets_by_node: Mapping[str, tuple[tuple[int, float], ...]]) -> None:
        """What holds these nodes. targets_by_node: node -> the processes to end before"""
        transport = self.nodes.transport

        def conversation(name: str) -> Conversation[NodeLeftovers]:
            reason = f"nodeready undrain --end-leftovers: {self.rows[name].reason}"
            ends = targets_by_node[name]
            config = LeftoversConfig(new_nonce(), transport.tag, end=ends, reasons=(reason,))
            answer = yield request(name, "nodeready.agent.leftovers", config)
            return packed_value(NodeLeftovers, answer, config, "leftovers", _MAX_UNPACKED)

        if not targets_by_node:
            return
        outcomes = converse(transport, self.tell, "looking", conversation, targets_by_node)
        for name, outcome in outcomes.items():
            if outcome.gap or outcome.value is None:
                self.gaps[name] = outcome.gap or Gap(INVALID, "no answer")
                continue
            row, answer = self.rows[name], outcome.value
            holding = self._judged(row, answer.leftovers)
            is_free = not holding and not answer.error
            obstacle = f"not all was seen: {answer.error}" if answer.error else ""
            word, incident = WOULD_RETURN if is_free else STAYS, answer.incident or row.incident
            row = replace(row, outcome=word, obstacle=obstacle, incident=incident)
            must_reboot = any(leftover.is_stuck for leftover in holding)
            self.rows[name] = replace(row, leftovers=holding, must_reboot=must_reboot)

    @staticmethod
    def _judged(row: DrainedNode, rows: Iterable[Leftover]) -> tuple[Leftover, ...]:
        """What of these holds the node, as Slurm knows their jobs now. Raises Refused."""
        numbers = {leftover.job for leftover in rows if leftover.job}
        return judged(rows, _ask(partial(jobs_on, row.slurm_name, numbers)))

    def _end_leftovers(self) -> None:
        """End the processes of jobs that are over, as Slurm says now."""
        chosen = {}
        for name, row in self.rows.items():
            # Again, because a job can have been requeued since.
            if name not in self.gaps and any(leftover.can_end for leftover in row.leftovers):
                holding = self._judged(row, row.leftovers)
                chosen[name] = tuple((row.pid, row.start_s) for row in holding if row.can_end)
        count = sum(map(len, chosen.values()))
        if count:
            word = counted(count, "process", "processes")
            self.tell.note(f"ending {word} of ended jobs on {folded(chosen)}")
        self._find(chosen)

    def _prove(self) -> None:
        """Run `nodeready ready` on the candidates."""
        options = ReadyOptions(budget=self.options.budget, user=self.options.user)
        for key in ("sudo", "trust_inventory", "ssh_user", "ssh_key", "via", "topology"):
            setattr(options, key, getattr(self.options, key))
        names = self._candidates()
        options.limit = ",".join(names)
        with ready.run(self.inventory, options, self.tell) as look:
            document = look.document
            self.complete = document.audit.complete
            results = {node.name: node.results for node in document.audit.nodes}
            for gap in document.audit.gaps:
                self.gaps[gap.node] = gap.gap
            for name in names:
                reasons = document.no_go.get(name, ())
                if name not in document.go and name not in self.gaps:
                    suffix = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
                    obstacle = f"{reasons[0]}{suffix}" if reasons else "ready did not judge it"
                    failures = [row for row in results.get(name, ()) if row.status == "fail"]
                    # The first action against a failure is a reboot.
                    must_reboot = any(row.actions[:1] == ("reboot",) for row in failures)
                    self.rows[name] = self.rows[name].stays(obstacle, must_reboot=must_reboot)

    def _return(self, name: str, node: SlurmNode) -> None:
        """End the drain of a node, unless it has changed since."""
        row = self.rows[name]
        try:
            change = undrain(node.name, node, time.monotonic() + _SLURM_S)
        except DrainError as error:
            self.rows[name] = replace(row, outcome=REFUSED, obstacle=str(error))
        else:
            self.rows[name] = row.stays(change) if change else replace(row, outcome=RETURNED)
