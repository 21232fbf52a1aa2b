"""A look at a node as the memory keeps it: its types, its facts, and its sections of text."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

from nodeready.core.base import Unknown
from nodeready.core.json_types import Moment
from nodeready.core.policy import Policy
from nodeready.core.result import COUNTER, STATUSES, VOLATILE, FactKinds, Result
from nodeready.core.text import utc_moment
from nodeready.core.wire import plain
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.host.facts import Host
from nodeready.subjects.limits.limit_files import UNLIMITED
from nodeready.subjects.rdma.facts import Rdma
from nodeready.subjects.registry import SUBJECTS

Value = str | int | float | bool | None


@dataclass(frozen=True)
class NodeLook:
    node: str
    time_s: float  # of the look, seconds since 1970
    boot_id: str  # of the boot that the node was in; "": not observed
    look: int  # id of the look; 0: of no look of the memory, but of a JSON file
    error: str  # why the node gave no answer; "": it answered. The rest is of its last answer
    # ``SUBJECT.path.to[identity].key`` -> its value; the stable facts alone
    facts: Mapping[str, Value]
    # ``SUBJECT.PART.NAME`` -> its total in this boot: ``nics.eth0.rx_errors``
    counters: Mapping[str, int]
    results: Mapping[str, Result]  # check id -> its result; ok and na have no texts
    unreachable: bool = False  # the error is that the node was not reached
    # of the node's newest change or look, among the looks at it; 0: of a JSON file
    number: int = 0
    # owner of results (a subject, or a check of a policy) -> what decided them (`policy_words`)
    policies: Mapping[str, str] = field(default_factory=dict)
    # owner of results -> the number of earlier looks at the node that did not make them
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    id: int  # 0: not yet kept
    time_s: float  # when its nodes had answered, seconds since 1970
    command: str
    inventory: str  # as the command line named it
    policy_digest: str  # of the nodes' policies: equal digests, equal expectations
    complete: bool  # False: it was interrupted
    code: int  # its exit code
    # as `Audit.summary`: nodes by status, results by status
    summary: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Event:
    """What happened to a node or a part at one moment: a check that began to fail, a node that was
    lost, a suspect of a smoke test, a cause of a dead job, or a drain.
    """

    JSON: ClassVar = ("time", "node", "serial", "kind", "text")

    time_s: float  # when it was first seen, in seconds since 1970
    node: str  # where it was seen
    serial: str  # of the GPU that it names; "": it is the node's
    kind: str  # the id of the check, or the kind of the event
    text: str  # the actual value, or the event in words
    user: str = ""  # of the job in whose log it is, by Slurm; "": another source

    @property
    def time(self) -> Moment:
        """`time_s` as UTC."""
        return utc_moment(self.time_s)


@dataclass(frozen=True)
class PartSpan:
    """A part in one place, from the first look that saw it there."""

    kind: str  # ``gpu``, ``adapter``
    serial: str  # of the part, or its uuid where it has no serial
    uuid: str  # "": it has none
    node: str
    slot: str  # its place in the node: the PCI address
    first_s: float  # time of the first look that saw it there, seconds since 1970
    # of the last look that saw it there; where it is gone: of the first look without it
    last_s: float
    is_there: bool  # it was there at the last look at the node

    def was_there(self, time_s: float) -> bool:
        """Whether a look at this time may have seen the part there."""
        is_before = time_s < self.last_s or (self.is_there and time_s == self.last_s)
        return self.first_s <= time_s and is_before


# --- The facts of a node that stay the same until something changes, by unique names.

#: Maximum characters of a value, of an element's name; a longer text ends with its digest.
_LONGEST_VALUE, _LONGEST_NAME = 400, 120

_NO_KINDS = FactKinds()
_ELEMENT = re.compile(r"\[[^\]]*\]")
_BRACKETS = str.maketrans("[]", "()")


class ComparedFacts(NamedTuple):
    # key -> value. An element of a list or mapping stands in brackets. A list without names of its
    # elements is one text. A fact that the node does not show has no key
    stable: dict[str, Value]
    counters: dict[str, int]  # ``SUBJECT.ELEMENTS.NAME`` -> total in this boot


def compared_facts(subject: str, facts: Any) -> ComparedFacts:
    """The facts of one subject that are compared; a subject that was not observed has none.

    facts: as in `NodeReport.facts`, plain data

    >>> compared_facts("nics", {"interfaces": {"eth0": {"mtu": 9000, "rx_errors": 7}}})
    ComparedFacts(stable={'nics.interfaces[eth0].mtu': 9000}, counters={'nics.eth0.rx_errors': 7})
    """
    stable: dict[str, Value] = {}
    counters: dict[str, int] = {}

    def take(path: str, value: Any, key: str, elements: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for name, inner, member in _members(subject, path, value):
                inner_key = f"{key}.{_bounded(name, _LONGEST_NAME)}"
                if isinstance(member, (dict, list)) and _place(subject, inner).has_names:
                    for element, data in _elements(subject, inner, member):
                        take(inner, data, f"{inner_key}[{element}]", (*elements, element))
                else:
                    take(inner, member, inner_key, elements)
            return
        place = _place(subject, path)
        if place.kind == COUNTER:
            if type(value) is int:
                name = f"{subject}.{'/'.join(elements)}.{key.rpartition('.')[2]}"
                counters[name] = counters.get(name, 0) + value
        elif not isinstance(value, (list, str)):
            stable[key] = value
        elif place.is_counted:
            digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
            stable[key] = f"{len(value)} ({digest})"
        elif value:
            stable[key] = _bounded(_text(subject, path, value), _LONGEST_VALUE)

    if isinstance(facts, dict) and "unknown" not in facts:
        take("", facts, subject, ())
    return ComparedFacts(stable, counters)


def kind_of(key: str) -> str:
    """``hardware``, ``version`` or ``setting``, of a key of `ComparedFacts.stable`."""
    subject, _, path = _ELEMENT.sub("", key).partition(".")
    return _kinds_of(subject).kind(path)


def is_unique(key: str) -> bool:
    """Whether healthy peers differ in the fact with this key (serial numbers, addresses)."""
    subject, _, path = _ELEMENT.sub("", key).partition(".")
    return _kinds_of(subject).is_unique(path)


def shown_value(key: str, value: Value) -> str:
    """The value of a fact in words: a mode in octal, no limit as a word.

    >>> shown_value("core_dumps.directory_mode", 0o1777)
    '1777'
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("mode"):
        return f"{value & 0o7777:04o}"
    return str(value).replace(str(UNLIMITED), "unlimited")


def _kinds_of(subject: str) -> FactKinds:
    return SUBJECTS[subject].kinds if subject in SUBJECTS else _NO_KINDS


class _Place(NamedTuple):
    kind: str
    is_counted: bool
    has_names: bool  # the elements of the list or mapping here have names
    identity: tuple[str, ...]  # the keys whose values name an element of the list


@lru_cache(1 << 14)  # A node can choose the names of a mapping.
def _place(subject: str, path: str) -> _Place:
    kinds = _kinds_of(subject)
    identity = tuple(kinds.elements.get(path, "").split())
    return _Place(kinds.kind(path), kinds.is_counted(path), path in kinds.elements, identity)


def _members(subject: str, path: str, data: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The name, path and value of each member of an object that is known and not volatile."""
    for name, value in data.items():
        inner = f"{path}.{name}" if path else name
        if value is not None and value != "" and _place(subject, inner).kind != VOLATILE:
            yield name, inner, value


def _elements(subject: str, path: str, data: Any) -> Iterator[tuple[str, Any]]:
    """The elements with their names: equal ones once, others of one name numbered."""
    if isinstance(data, dict):
        for name, element in data.items():
            yield _element_name(name), element
        return
    identity = _place(subject, path).identity
    same_name: dict[str, list[Any]] = {}
    for element in data:
        if isinstance(element, dict):
            values = [element.get(key) for key in identity]
            name = " ".join([str(value) for value in values if value is not None])
            same_name.setdefault(_element_name(name), []).append(element)
    for name, elements in same_name.items():
        yield name, elements[0]
        if len(elements) > 1:
            different = {_text(subject, path, element): element for element in reversed(elements)}
            different.pop(_text(subject, path, elements[0]))
            for number, element in enumerate(reversed(different.values()), 2):
                yield f"{name}#{number}", element


def _element_name(name: str) -> str:
    if "[" in name or "]" in name:
        name = name.translate(_BRACKETS)
    return _bounded(name, _LONGEST_NAME)


def _text(subject: str, path: str, value: Any) -> str:
    """A value as one text, without its volatile members."""
    if isinstance(value, dict):
        members = _members(subject, path, value)
        shown = {name: _text(subject, inner, member) for name, inner, member in members}
        if len(shown) == 1:
            return next(iter(shown.values()))
        return " ".join(f"{name}={text}" for name, text in shown.items())
    if isinstance(value, list):
        joint = "; " if value and isinstance(value[0], (dict, list)) else ", "
        return joint.join([_text(subject, path, member) for member in value])
    return value if isinstance(value, str) else json.dumps(value)


def _bounded(text: str, maximum: int) -> str:
    if len(text) <= maximum:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[: maximum - 20]}...{digest}"


# --- The sections of a node's state: texts, which the memory keeps once for all nodes.
# A section is JSON. Its name is ``SUBJECT.facts``, ``SUBJECT.results``, ``SUBJECT.counters``,
# ``SUBJECT.parts``, or one of the names below. The result of a check that a policy declares has a
# separate section, ``CHECK.results``: a look may make a single such check.

BOOT = "boot"  # the id of the node's boot
ERROR = "error"  # why the node gave no answer
GATE = "gate"  # the results of the node's own gate
MISSED = "missed"  # owner of results -> the number of looks at the node that did not make them
#: The next look at the node ends these: a proof is an act of its moment, and an older nodeready
#: kept the results of the site's checks together.
ENDED_BY_LOOK = (ERROR, GATE, "proof.results", "site.results")
FACTS, RESULTS, COUNTERS, PARTS = ".facts", ".results", ".counters", ".parts"

FACTS_END = b",\n"  # ends the line of a fact; a text in JSON has no such end
#: Maximum bytes of a section: the facts of a node with 8 GPUs have 20,000. Larger facts are not
#: kept, so that a single node cannot fill the memory.
MAX_BYTES = 256 << 10
_MAX_SERIAL = 100  # maximum characters of a serial number or UUID, which have at most 40
_BRIEF = ("ok", "na")
POLICY = "@policy"  # not a check's id: the key of the words of the policy among results
WAIVERS = "waivers"  # the setting that changes results of any check
ASKED = "asked"  # the word of the policy for the text of the probe


class SectionText(NamedTuple):
    name: str
    digest: bytes  # of its text
    # returns its text, packed; None: the memory had it when the look began
    read: Callable[[], bytes | None]


class NodeSections(NamedTuple):
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
    sections = [
        SectionText(section, digest(text), partial(zlib.compress, text))
        for section, text in texts.items()
    ]
    state = digest(b"".join(section.name.encode() + section.digest for section in sections))
    return NodeSections(name, state, counted, lambda: sections)


def policy_words(subject: str, policy: Policy) -> dict[str, str]:
    """Owner of results -> the settings that decide them, and the probe, each with its digest.

    A setting with its default value has no word: ``gate=5f1e0c2a asked=77c0aa12``.
    """
    values, defaults = asdict(policy), asdict(Policy())

    def words(settings: Mapping[str, Any]) -> str:
        texts = {key: json.dumps(value, sort_keys=True) for key, value in settings.items()}
        return " ".join(f"{k}={digest(text.encode())[:4].hex()}" for k, text in texts.items())

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
    rows = ((c, {"status": v} if isinstance(v, str) else v) for c, v in data.items())
    return {c: Result.of({"check": c, **row}) for c, row in rows if row["status"] in STATUSES}


def _parts(observation: Any) -> list[tuple[str, str, str, str]]:
    """The (kind, serial, uuid, slot) of the parts that can move to another node."""
    parts = []
    for gpu in observation.gpus if isinstance(observation, Gpus) else ():
        if serial := gpu.serial or gpu.uuid:
            ids = serial[:_MAX_SERIAL], (gpu.uuid or "")[:_MAX_SERIAL]
            parts.append(("gpu", *ids, gpu.pci_address))
    for name, device in observation.devices.items() if isinstance(observation, Rdma) else ():
        if device.node_guid and not device.virtual:
            parts.append(("adapter", device.node_guid, "", device.pci_address or name))
    return parts


def _observed_texts(subject: str, observation: Any, shown: Any) -> Iterator[tuple[str, bytes]]:
    """Section and text of what was observed of one subject of a node."""
    stable, totals = compared_facts(subject, plain(shown))
    yield f"{subject}{FACTS}", facts_text(stable)
    if totals:
        start = len(subject) + 1
        yield f"{subject}{COUNTERS}", dump({name[start:]: n for name, n in totals.items()})
    if parts := _parts(observation):
        yield f"{subject}{PARTS}", dump(parts)
    if isinstance(observation, Host) and observation.boot_id:
        yield BOOT, dump(observation.boot_id)


class SectionWriter:
    """Makes the sections of one subject of a node, where the node is judged. checks: the ids of
    the results to keep. digests: of the texts that the memory has: they are not packed again
    """

    def __init__(self, checks: Collection[str], digests: Collection[bytes]) -> None:
        self._checks, self._digests = checks, digests
        self._words: dict[tuple[str, int], tuple[Policy, dict[str, str]]] = {}

    def __call__(
        self, subject: str, observation: Any, shown: Any, results: Iterable[Result], policy: Policy
    ) -> list[tuple[str, bytes, bytes | None]]:
        """(name, digest, packed text or None) of each section. shown: by `shown_facts`"""
        key = subject, id(policy)
        if key not in self._words:
            self._words[key] = policy, policy_words(subject, policy)
        words = self._words[key][1]
        by_owner = {subject: [*results]}
        if not SUBJECTS[subject].checks:
            by_owner = {row.check: [row] for row in by_owner[subject] if row.check in self._checks}
        texts = [
            (f"{owner}{RESULTS}", results_text(owned, self._checks, words.get(owner, "")))
            for owner, owned in by_owner.items()
        ]
        if not isinstance(observation, Unknown):
            texts += _observed_texts(subject, observation, shown)
        sections = []
        for name, text in texts:
            if len(text) <= MAX_BYTES:
                text_digest = digest(text)
                packed = None if text_digest in self._digests else zlib.compress(text)
                sections.append((name, text_digest, packed))
        return sections
