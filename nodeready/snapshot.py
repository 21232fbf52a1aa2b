"""Snapshot: everything that was observed on one node in one round trip.

A subject whose section failed, timed out or made no sense is Unknown there, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.policy import Policy
from nodeready.probes import script as wire
from nodeready.probes.base import Output, Probe, ProbeError, Section, Unknown
from nodeready.results import Result, unknown
from nodeready.subjects import OBSERVED, PROBES, SUBJECTS
from nodeready.waivers import waive


@dataclass(frozen=True)
class Snapshot:
    """What one node showed: per subject its observation, or Unknown with the reason.

    files: the content of the files of ours, by path
    """

    subjects: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __getitem__(self, subject: str) -> Any:
        """The observation of a subject. Raises KeyError when it was not observed at all."""
        return self.subjects[subject]

    def merged(self, newer: Snapshot) -> Snapshot:
        """This snapshot with the subjects of a newer, smaller one in place of its own."""
        files = newer.files if "ours" in newer.subjects else self.files
        return Snapshot({**self.subjects, **newer.subjects}, files)


def probes(subjects: Iterable[str] | None = None) -> tuple[Probe, ...]:
    """The probes of these subjects (None: all) and the one that reads our own files."""
    if subjects is None:
        return PROBES
    wanted = {*subjects, "ours"}
    return tuple(probe for probe in PROBES if probe.subject in wanted)


def sections(chosen: Iterable[Probe]) -> tuple[Section, ...]:
    """Their sections, each once, in order."""
    return tuple({s.name: s for probe in chosen for s in probe.sections}.values())


def _observe(probe: Probe, outputs: Mapping[str, Output], policy: Policy) -> Any:
    try:
        return probe.parse(outputs, policy)
    except ProbeError as error:
        return Unknown(error.reason, error.evidence)
    except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
        evidence = "".join(outputs[section.name].text[:200] for section in probe.sections[:1])
        return Unknown(_nonsense(error), evidence)


def _nonsense(error: Exception) -> str:
    return f"makes no sense ({type(error).__name__}: {error})"


def read(answer: str, chosen: tuple[Probe, ...], policy: Policy, nonce: str) -> Snapshot:
    """The snapshot that a node's answer holds. Never raises: what cannot be read is Unknown."""
    seen: dict[str, Any] = {}
    try:
        outputs = wire.parse_answer(answer, sections(chosen), nonce)
    except ProbeError as error:
        return nothing(error.reason, chosen, error.evidence)
    for probe in chosen:
        seen[probe.subject] = _observe(probe, outputs, policy)
    files: Mapping[str, bytes] | Unknown = seen.get("ours", {})
    return Snapshot(seen, {} if isinstance(files, Unknown) else files)


def nothing(reason: str, chosen: tuple[Probe, ...] = PROBES, evidence: str = "") -> Snapshot:
    """A node that gave no answer: every subject is Unknown for this reason."""
    return Snapshot({probe.subject: Unknown(reason, evidence) for probe in chosen})


def judge(
    snapshot: Snapshot, policy: Policy, subjects: Iterable[str] | None = None
) -> list[Result]:
    """The results of all checks of these subjects (None: all that were observed), after waivers.

    A subject that is Unknown gives one ``unknown`` result, with the reason and the evidence.
    """
    results: list[Result] = []
    for name, subject in SUBJECTS.items():
        if name not in snapshot.subjects or (subjects is not None and name not in subjects):
            continue
        seen = snapshot[name]
        if isinstance(seen, Unknown):
            shown = f"{seen.reason}: {seen.evidence}" if seen.evidence else seen.reason
            results.append(unknown(f"{name}.{OBSERVED}", shown))
            continue
        for given in subject.checks:
            try:
                results.append(given(seen, policy))
            except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
                results.append(unknown(given.id, _nonsense(error)))
    return waive(results, policy)
