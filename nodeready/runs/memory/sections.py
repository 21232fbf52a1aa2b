"""The sections of a node's state: texts, which the memory keeps once for all nodes.

A section is JSON. Its name is ``SUBJECT.facts``, ``SUBJECT.results``, ``SUBJECT.counters``,
``SUBJECT.parts``, or one of the names below. The result of a check that a policy declares has a
section of its own, ``CHECK.results``: a look may make one of them alone.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.core.result import STATUSES, Result
from nodeready.core.wire import plain
from nodeready.runs.memory.facts import compared_facts
from nodeready.runs.memory.look import Value
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.host.facts import Host
from nodeready.subjects.rdma.facts import Rdma
from nodeready.subjects.registry import SUBJECTS

#: The id of the node's boot.
BOOT = "boot"
#: Why the node gave no answer.
ERROR = "error"
#: The results of the node's own gate.
GATE = "gate"
#: Owner of results -> the number of looks at the node that did not make them.
MISSED = "missed"
#: The next look at the node ends these: a proof is an act of its moment, and an older nodeready
#: kept the results of the site's checks together.
ENDED_BY_LOOK = (ERROR, GATE, "proof.results", "site.results")
FACTS, RESULTS, COUNTERS, PARTS = ".facts", ".results", ".counters", ".parts"

#: Ends the line of a fact; a text in JSON has no such end.
FACTS_END = b",\n"
#: Maximum bytes of a section: the facts of a node with 8 GPUs have 20,000. The facts of a node
#: that sends more are not kept, so that one node cannot fill the memory.
MAX_BYTES = 256 << 10
#: Maximum characters of a serial number or UUID, which have at most 40.
_MAX_SERIAL = 100
_BRIEF = ("ok", "na")
#: Not a check's id: the key of the words of the policy among results.
POLICY = "@policy"
#: The setting that changes results of any check.
WAIVERS = "waivers"
#: The word of the policy for the text of the probe.
ASKED = "asked"


class SectionText(NamedTuple):
    """A section of a node's state."""

    name: str
    digest: bytes  # of its text
    # returns its text, packed; None: the memory had it when the look began
    read: Callable[[], bytes | None]


class NodeSections(NamedTuple):
    """What one look shows of a node."""

    name: str
    digest: bytes  # equal digests, equal sections
    counted: tuple[str, ...]  # the subjects whose counters were read
    read: Callable[[], Iterable[SectionText]]  # returns the sections


def digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def facts_text(stable: Mapping[str, Value]) -> bytes:
    """The facts of a subject, a line each: two texts differ in the lines of the changed facts."""
    return json.dumps(stable, separators=(FACTS_END.decode(), ":")).encode("ascii")


def node_sections(
    name: str, texts: Mapping[str, bytes], counted: tuple[str, ...] = ()
) -> NodeSections:
    """The state of these sections."""
    sections = [
        SectionText(section, digest(text), partial(zlib.compress, text))
        for section, text in texts.items()
    ]
    state = digest(b"".join(section.name.encode() + section.digest for section in sections))
    return NodeSections(name, state, counted, lambda: sections)


def error_text(error: str, unreachable: bool) -> bytes:
    return dump([error, unreachable])


def policy_words(subject: str, policy: Policy) -> dict[str, str]:
    """Owner of results -> the settings that decide them, and the probe, each with its digest.

    A setting with its default value has no word: ``gate=5f1e0c2a asked=77c0aa12``.
    """
    values, defaults = asdict(policy), asdict(Policy())

    def words(settings: Mapping[str, Any]) -> str:
        return " ".join(
            f"{key}={digest(json.dumps(value, sort_keys=True).encode())[:4].hex()}"
            for key, value in settings.items()
        )

    declared = SUBJECTS[subject]
    if not declared.checks:
        checks = {check.id: check.table() for check in policy.site_checks}
        return {check: words({check: table}) for check, table in checks.items()}
    keys = dict.fromkeys(key for check in declared.checks for key in check.settings)
    settings = {key: values[key] for key in (*keys, WAIVERS) if values[key] != defaults[key]}
    probe = declared.probe
    scripts = [section.script(policy) for section in probe.sections] if probe else []
    return {subject: words({**settings, ASKED: scripts})}


def changed_words(before: str, after: str) -> set[str]:
    """The settings that differ between two texts of `policy_words`."""
    old, new = ({*text.split()} for text in (before, after))
    return {word.partition("=")[0] for word in old ^ new}


def results_text(results: Iterable[Result], checks: Collection[str], words: str = "") -> bytes:
    """The results of these checks: ok and na only as a word. words: of `policy_words`"""
    data: dict[str, Any] = {POLICY: words} if words else {}
    for result in results:
        if result.check in checks:
            data[result.check] = result.status
            if result.status not in _BRIEF:
                fields = {key: value for key, value in vars(result).items() if value}
                del fields["check"]
                data[result.check] = fields
    return dump(data)


def parse_results(data: Mapping[str, Any]) -> dict[str, Result]:
    """The results of a section's JSON. A field that this version does not know is left out."""
    return {
        check: Result(check, value)
        if isinstance(value, str)
        else Result.of({"check": check, **value})
        for check, value in data.items()
        if (value if isinstance(value, str) else value["status"]) in STATUSES
    }


def _parts(observation: Any) -> list[tuple[str, str, str, str]]:
    """The (kind, serial, uuid, slot) of the parts that can move to another node."""
    if isinstance(observation, Gpus):
        return [
            ("gpu", serial[:_MAX_SERIAL], (gpu.uuid or "")[:_MAX_SERIAL], gpu.pci_address)
            for gpu in observation.gpus
            if (serial := gpu.serial or gpu.uuid)
        ]
    if isinstance(observation, Rdma):
        return [
            ("adapter", device.node_guid, "", device.pci_address or name)
            for name, device in observation.devices.items()
            if device.node_guid and not device.virtual
        ]
    return []


def _subject_texts(
    subject: str,
    observation: Any,
    shown: Any,
    results: Iterable[Result],
    *,
    checks: Collection[str],
    words: Mapping[str, str],
) -> dict[str, bytes]:
    """Section -> its text, of one subject of a node; of an Unknown, only the results."""
    by_owner = {subject: [*results]}
    if not SUBJECTS[subject].checks:
        by_owner = {row.check: [row] for row in by_owner[subject] if row.check in checks}
    texts = {
        f"{owner}{RESULTS}": results_text(owned, checks, words.get(owner, ""))
        for owner, owned in by_owner.items()
    }
    if not isinstance(observation, Unknown):
        stable, totals = compared_facts(subject, plain(shown))
        texts[f"{subject}{FACTS}"] = facts_text(stable)
        if totals:
            start = len(subject) + 1
            named = {name[start:]: total for name, total in totals.items()}
            texts[f"{subject}{COUNTERS}"] = dump(named)
        if parts := _parts(observation):
            texts[f"{subject}{PARTS}"] = dump(parts)
        if isinstance(observation, Host) and observation.boot_id:
            texts[BOOT] = dump(observation.boot_id)
    return {name: text for name, text in texts.items() if len(text) <= MAX_BYTES}


class SectionWriter:
    """Makes the sections of one subject of a node, where the node is judged.

    checks: the ids of the results to keep
    digests: of the texts that the memory has: they are not packed again
    """

    def __init__(self, checks: Collection[str], digests: Collection[bytes]) -> None:
        self._checks, self._digests = checks, digests
        self._words: dict[tuple[str, int], tuple[Policy, dict[str, str]]] = {}

    def __call__(
        self,
        subject: str,
        observation: Any,
        shown: Any,
        results: Iterable[Result],
        policy: Policy,
    ) -> list[tuple[str, bytes, bytes | None]]:
        """(name, digest, packed text or None) of each section.

        shown: the observation as the documents show it (`snapshot.shown_facts`)
        """
        key = subject, id(policy)
        if key not in self._words:
            self._words[key] = policy, policy_words(subject, policy)
        words = self._words[key][1]
        sections = []
        for name, text in _subject_texts(
            subject, observation, shown, results, checks=self._checks, words=words
        ).items():
            text_digest = digest(text)
            packed = None if text_digest in self._digests else zlib.compress(text)
            sections.append((name, text_digest, packed))
        return sections
