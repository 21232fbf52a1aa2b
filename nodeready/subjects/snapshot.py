"""Snapshot: all observations of one node in one round trip.

The sections of all subjects become one script (`probe_script`), and its answer
becomes a Snapshot, which `judge` turns into Results. A subject is Unknown when its
section failed, timed out or cannot be parsed, and no other subject is affected.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready.core.base import Output, Probe, ProbeError, Section, Unknown, frozen
from nodeready.core.own_files import OwnFiles, Refusal
from nodeready.core.policy import Policy
from nodeready.core.probe_script import parse_answer
from nodeready.core.result import ADMIN, ALONE, FleetFacts, Result, no_facts, waive
from nodeready.core.text import utc_now
from nodeready.core.wire import shown_keys
from nodeready.subjects.registry import PROBES, SUBJECTS


@dataclass(frozen=True)
class Snapshot:
    """The observations of one node."""

    subjects: Mapping[str, Any] = field(default_factory=dict)  # subject -> observation or Unknown
    files: Mapping[str, bytes] = field(default_factory=dict)  # path -> content of our own file
    refused: Mapping[str, Refusal] = field(default_factory=dict)  # path -> why no deploy may write

    def __getitem__(self, subject: str) -> Any:
        """The observation of a subject. Raises KeyError when it was not observed at all."""
        return self.subjects[subject]

    def merged(self, newer: Snapshot) -> Snapshot:
        """This snapshot, updated by the subjects of a newer, smaller snapshot."""
        newest = newer if "ours" in newer.subjects else self
        return Snapshot({**self.subjects, **newer.subjects}, newest.files, newest.refused)


def shown_facts(subject: str, observation: Any, fleet: FleetFacts = ALONE) -> Any:
    """A subject's observation as the documents show it: with the facts that need the fleet."""
    derived = SUBJECTS[subject].derived
    if derived is no_facts or isinstance(observation, Unknown):
        return observation
    keys = shown_keys(type(observation))
    shown = {key: getattr(observation, name) for name, key in keys.items()}
    return {**shown, **derived(observation, fleet)}


def probes(subjects: Iterable[str] | None = None) -> tuple[Probe, ...]:
    """The probes of these subjects (None: all), and the probe of nodeready's own files."""
    if subjects is None:
        return PROBES
    names = {*subjects, "ours"}
    return tuple(probe for probe in PROBES if probe.subject in names)


def sections(chosen: Iterable[Probe]) -> tuple[Section, ...]:
    """The sections of these probes, each once, in order; sections with ``first`` lead."""
    unique = {s.name: s for probe in chosen for s in probe.sections}.values()
    return tuple(sorted(unique, key=lambda section: not section.first))


def differently_probed(
    old: Policy, new: Policy, subjects: Iterable[str] | None = None
) -> frozenset[str]:
    """The subjects that are probed in another way under the new policy.

    Any other observation is the same under both: no parser reads further settings.
    """
    return frozenset(
        probe.subject
        for probe in probes(subjects)
        if any(section.script(old) != section.script(new) for section in probe.sections)
    )


def observe(probe: Probe, outputs: Mapping[str, Output], policy: Policy) -> Any:
    try:
        return probe.parse(outputs, policy)
    except ProbeError as error:
        return Unknown(error.reason, error.evidence)
    except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
        evidence = "".join(outputs[section.name].text[:200] for section in probe.sections[:1])
        return Unknown(unparsable(error), evidence)


# Most nodes of a fleet print the same text in most sections, so that it is parsed once for all.
# A shared observation is read-only. A node cannot influence another node's observation: its output
# is compared in full, and it cannot know the word that replaces each run's nonce.

SHARED_NONCE = os.urandom(8).hex()
#: Hashes of texts that were seen once: most belong to one node, and are not kept.
_HASHES: dict[int, None] = {}
_MAX_HASHES = 8192
_Key = tuple[Any, ...]
#: (Output, policy) -> the observation, and that policy.
_SHARED: dict[_Key, tuple[Any, Policy]] = {}
_MOST_SHARED, _MOST_BYTES = 1024, 16 << 20
_shared_bytes = 0


def _without_nonce(output: Output) -> Output:
    if not output.nonce or output.nonce == SHARED_NONCE:
        return output
    text = output.text.replace(output.nonce, SHARED_NONCE)
    return Output(text, output.rc, output.truncated, SHARED_NONCE)


def _size(key: _Key) -> int:
    return sum(len(text) for text, _, _ in key[2:])


def _shared_observation(probe: Probe, outputs: Mapping[str, Output], policy: Policy) -> Any:
    """The observation; a shared one where the same output was parsed before."""
    global _shared_bytes  # noqa: PLW0603 - one store for the process
    printed = [outputs[section.name] for section in probe.sections]
    texts = ((output.text, output.rc, output.truncated) for output in printed)
    key = (probe.subject, id(policy), *texts)
    if (shared := _SHARED.get(key)) is not None:
        return shared[0]
    observation = observe(probe, outputs, policy)
    digest = hash(key)
    if digest not in _HASHES:
        _HASHES[digest] = None
        if len(_HASHES) > _MAX_HASHES:
            del _HASHES[next(iter(_HASHES))]
        return observation
    size = _size(key)
    if size <= _MOST_BYTES >> 3:
        _SHARED[key] = (observation := frozen(observation)), policy
        _shared_bytes += size
        while len(_SHARED) > _MOST_SHARED or _shared_bytes > _MOST_BYTES:
            oldest = next(iter(_SHARED))
            del _SHARED[oldest]
            _shared_bytes -= _size(oldest)
    return observation


def unparsable(error: Exception) -> str:
    return f"makes no sense ({type(error).__name__}: {error})"


def read(answer: str, chosen: tuple[Probe, ...], policy: Policy, nonce: str) -> Snapshot:
    """The snapshot in a node's answer. Never raises: a subject that cannot be read is Unknown."""
    try:
        printed = parse_answer(answer, sections(chosen), nonce)
    except ProbeError as error:
        return unknown_snapshot(error.reason, chosen, error.evidence)
    outputs = {name: _without_nonce(output) for name, output in printed.items()}
    observations = {probe.subject: _shared_observation(probe, outputs, policy) for probe in chosen}
    own_files = observations.get("ours")
    if isinstance(own_files, OwnFiles):
        return Snapshot(observations, own_files.files, own_files.refused)
    return Snapshot(observations)


def unknown_snapshot(
    reason: str, chosen: tuple[Probe, ...] = PROBES, evidence: str = ""
) -> Snapshot:
    """The snapshot of a node that gave no answer: every subject is Unknown for this reason."""
    return Snapshot({probe.subject: Unknown(reason, evidence) for probe in chosen})


# --- The results of a snapshot's checks.


def judge(
    snapshot: Snapshot,
    policy: Policy,
    fleet: FleetFacts = ALONE,
    subjects: Iterable[str] | None = None,
) -> list[Result]:
    """The results of all checks of these subjects (None: all that were observed), after waivers.

    A subject that is Unknown gives one ``unknown`` result, with the reason and the evidence.
    """
    results: list[Result] = []
    for name, subject in SUBJECTS.items():
        if name not in snapshot.subjects or (subjects is not None and name not in subjects):
            continue
        observation = snapshot[name]
        if isinstance(observation, Unknown):
            reason, evidence = observation.reason, observation.evidence
            reason += f": {evidence}" if evidence else ""
            page = subject.observed
            results.append(page.rated(Result(page.id, "unknown", actual=reason)))
            continue
        for check in (*subject.checks, *subject.policy_checks(policy)):
            try:
                result = check(observation, policy, fleet)
                if result.fixable:
                    writes = check.writes
                    patterns = subject.files if writes is None else writes(observation, policy)
                    result = _with_refusal(result, snapshot.refused, patterns)
                results.append(result)
            except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
                results.append(check.rated(check.unknown(unparsable(error))))
    return waive(results, policy, utc_now()[:10])


def _with_refusal(
    result: Result, refused: Mapping[str, Refusal], patterns: Iterable[str]
) -> Result:
    """The fixable result, or an administrator's task where a deploy may not write the files."""
    for path, refusal in refused.items():
        for pattern in patterns:
            parent = pattern.rpartition("/")[0]
            if fnmatch.fnmatchcase(path, pattern) or _holds(path, parent):
                actual = f"{result.actual}; {path}: {refusal.reason}"
                fix = f"{refusal.remedy}, then {result.fix}"
                actions = ("configure", *result.actions)
                return replace(result, actual=actual, fix=fix, owner=ADMIN, actions=actions)
    return result


def _holds(directory: str, parent: str) -> bool:
    """Whether a directory matches the pattern ``parent``, or contains it."""
    depth = directory.rstrip("/").count("/")
    start = "/".join(parent.split("/")[: depth + 1])
    return directory == "/" or fnmatch.fnmatchcase(directory, start)
