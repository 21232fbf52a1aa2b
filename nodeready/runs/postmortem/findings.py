"""What a rule about a dead job finds, and the words for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nodeready.agent.failures.rules import SIGNAL_NAMES, signal_of
from nodeready.core.text import excerpt, utc_moment
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.postmortem.document import FirstFailure
from nodeready.runs.postmortem.evidence import NodeFault, RankFailure, SlurmStep, reporter_of
from nodeready.runs.postmortem.rank_failures import JobFailures
from nodeready.runs.stacks.document import Suspect, say
from nodeready.runs.stacks.evidence import ranks_of
from nodeready.subjects.gpus import xids

#: Maximum characters of a failure in the first line; suspects in the document, and in that line.
_MAX_TEXT, MAX_SUSPECTS, _NAMED = 400, 32, 4
#: The sentences about an error, about a limit, and about pods that were taken away.
ERROR, ENDED_BY = "{who}: {error}", "{by} ended the job: {reason}"
ENDED_POD = "{by} ended {who}: {reason}"


#: The Xid in a line of the kernel.
XID = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,5})\b")


@dataclass
class Finding:
    """What a rule has found: the ranks and nodes of the cause, with the evidence."""

    ranks: Iterable[int] = ()
    nodes: Iterable[str] = ()
    for_: Iterable[str] = ()
    against: Iterable[str] = ()
    failures: Sequence[RankFailure] = ()  # the first time of these is that of the cause
    words: Mapping[str, str] = field(default_factory=dict)  # of the rule's sentence
    missing: tuple[str, ...] = ()
    frame: str = ""
    suspects: Sequence[Suspect] = ()  # all; (): the ranks and nodes are the only one
    kind: str = ""  # "": as of the rule
    sentence: str = ""  # likewise


class Rule(NamedTuple):
    """A kind of cause, what finds it, and its sentence (`say`); ``{who}``: its ranks and nodes."""

    kind: str
    evidence: Callable[[JobFailures], Finding | None]
    sentence: str

    def cause(self, finding: Finding) -> FirstFailure:
        """The cause of this rule, in words."""
        suspect = suspect_of(finding.ranks, finding.nodes, finding.for_, finding.against)
        words = {"who": subject(suspect.ranks, suspect.nodes), **finding.words}
        words = {name: excerpt(word, _MAX_TEXT) for name, word in words.items()}
        number = 2 if words["who"].startswith("all ") else max(1, len(suspect.ranks))
        text = say(finding.sentence or self.sentence, number, **words)
        moments = [f.time_s for f in finding.failures if f.time_s is not None]
        suspects = tuple(finding.suspects) or (suspect,) * (suspect != Suspect((), (), (), ()))
        return FirstFailure(
            *(finding.kind or self.kind, text, suspect.ranks, suspect.nodes, finding.frame),
            *(moment_text(min(moments, default=None)), suspects, finding.missing),
        )


def moment_text(seconds: float | None) -> str:
    """A time as the reports write it; "" for none."""
    return utc_moment(seconds) if seconds is not None and 0 < seconds < 1e11 else ""


def subject(ranks: Iterable[int], nodes: Iterable[str]) -> str:
    """The ranks and their nodes in words: ``rank 3 (gpu2)``, ``a rank on gpu2``, ``a rank``."""
    ranks, names = set(ranks), sorted(filter(None, set(nodes)), key=natural)
    place = fold(names) if names else ""
    if ranks:
        return f"{ranks_of(ranks)}{f' ({place})' if place and len(place) < 60 else ''}"
    return f"a rank on {place}" if place else "a rank"


def suspect_of(
    ranks: Iterable[int], nodes: Iterable[str], for_: Iterable[str], against: Iterable[str] = ()
) -> Suspect:
    names = tuple(sorted(filter(None, set(nodes)), key=natural))
    evidence = tuple(dict.fromkeys(for_)), tuple(dict.fromkeys(against))
    return Suspect(tuple(sorted(set(ranks))), names, *evidence)


def undecided(suspects: Sequence[Suspect], *missing: str) -> Finding:
    """The cause where the evidence does not tell which of the suspects failed first."""
    names = [subject(suspect.ranks, suspect.nodes) for suspect in suspects]
    if len({*names}) < len(names) == names.count("a rank"):
        names = [f"one of {len(names)} errors of unknown ranks"]
    names[_NAMED:] = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    ranks = {rank for suspect in suspects for rank in suspect.ranks}
    nodes = {node for suspect in suspects for node in suspect.nodes}
    return Finding(
        ranks, nodes, kind="unclear", sentence="{names}: which failed first is not known",
        words={"names": " or ".join(names)}, suspects=suspects[:MAX_SUSPECTS], missing=missing,
    )  # fmt: skip


def report_text(failure: RankFailure) -> str:
    """How a rank ended, as a launcher reports it."""
    event, number = failure.event, signal_of(failure.event.code)
    how = f"ended with exit code {event.code}"
    how = f"ended by {SIGNAL_NAMES.get(number, number)}" if number else how
    how = "ended" if failure.is_by("is_blind") else how
    how = "out of memory" if event.kind == "oom" else how
    name = f"process {event.pid}" if event.pid else "a process"
    name = name if event.local_rank is None else f"local rank {event.local_rank}"
    name = name if failure.rank is None else f"rank {failure.rank}"
    root = ", as its first observed failure" if event.source == "torchrun-root" else ""
    reporter = reporter_of(event.source).get("name", event.source)
    return f"{reporter} reports: {name} {how}{root}"


#: The words about an end's number, or in place of it: ``exitcode: -9``, ``return code = -7``,
#: ``EXIT CODE: 9``, ``Aborted``.
_NUMBERED_END = re.compile(
    r"(?:(?<=: )|(?<=exit signal ))"
    r"(?:Aborted|Killed|Segmentation fault|Bus error|Floating point exception)\b"
    r"|(?i:(?:\b(?:exit|return|status|error)\w*[ _])*\w*(?:code|status|signal)"
    r"\W{1,9}(?:-?\d{1,3}|0x[0-9a-f]{8})\b)"
)


def launcher_words(failure: RankFailure) -> str:
    """The words in which a launcher reports the number of an end; ""."""
    match = _NUMBERED_END.search(failure.event.text)
    return match[0] + ")" * match[0].count("(") if match else ""


def lines_of(failures: Sequence[RankFailure], maximum: int = 2) -> list[str]:
    return [f"{f.example}: {f.event.text}" for f in failures[:maximum]]


def kernel_lines(faults: Sequence[NodeFault]) -> list[str]:
    return [
        f"the kernel{f' of {fault.node}' if fault.node else ''}: {fault.text}"
        for fault in faults[:3]
    ]


def is_of_program(fault: NodeFault) -> bool:
    """Whether a fault of a GPU is one that any program can cause."""
    code, rule = XID.match(fault.text), xids.find_rule(fault.text)
    action = rule.action if rule else ""
    return (xids.action_of(int(code[1]), fault.text) if code else action) == xids.APPLICATION


def nodes_in(failures: Iterable[RankFailure]) -> set[str]:
    return {f.node for f in failures if f.node}


def slurm_steps(job: JobFailures, *states: str) -> tuple[list[SlurmStep], list[str]]:
    """Slurm's steps in states that begin like these, and the lines about them."""
    steps = [step for step in job.evidence.steps if step.state.startswith(states)]
    return steps, [f"sacct: {step.step} {step.state}" for step in steps[:2]]


def last_lines(job: JobFailures, ranks: set[int], maximum: int = 3) -> list[str]:
    """The last lines of some of the ranks that belong to no failure."""
    lines = [
        f"its last line: {stream.last}"
        for file in job.evidence.files
        for stream in file.failures.streams
        if stream.last and ranks & {job.finder.file_rank(file), stream.rank}
    ]  # fmt: skip
    return list(dict.fromkeys(lines))[:maximum]


def of_kernel(
    job: JobFailures, faults: Sequence[NodeFault], shown: Sequence[NodeFault]
) -> Finding | None:
    """The ranks and nodes of faults in the kernel's log. shown: the lines that are evidence"""
    by_pid, keys = job.finder.by_pid, [(fault.node, fault.pid) for fault in faults]
    ranks, nodes = {by_pid[key] for key in keys if key in by_pid}, {f.node for f in faults}
    words = {"error": faults[0].text if faults else ""}
    return Finding(ranks, nodes, kernel_lines(shown), words=words) if faults else None
