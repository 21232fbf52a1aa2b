"""Reads the answers of nodes and judges the nodes, in a worker process or in the control process.

Observations, facts and the texts for the memory stay in a file of the judge. The control process
gets the part of an answer that the fleet needs, and later the results; repeated results are
numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready.agent.audit_document import Outlier
from nodeready.core.base import ProbeError, Unknown
from nodeready.core.policy import Policy
from nodeready.core.probe_script import parse_answer, unpack
from nodeready.core.result import ALONE, FleetFacts, Result
from nodeready.runs.audit.measures import JUDGED, Bounds, find_bounds
from nodeready.subjects import context, snapshot
from nodeready.subjects.registry import COUNTING, NEEDS_FLEET, PROBES, SUBJECTS
from nodeready.subjects.snapshot import SHARED_NONCE, Snapshot, judge, shown_facts

# --- Nodes that differ from the majority of their peers. Pure.

_MIN_PEERS = 3  # fewer nodes have no majority: of two that differ, either may be right
ALL = "all"  # the group of nodes without a group


def compared(
    snapshot: Snapshot, fleet: FleetFacts, subjects: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Subject -> its facts that peers should share; a subject that was not observed is missing."""
    facts: dict[str, dict[str, Any]] = {}
    for name in subjects:
        observed = snapshot.subjects.get(name)
        if observed is None or isinstance(observed, Unknown):
            continue
        try:
            facts[name] = dict(SUBJECTS[name].compared(observed, fleet))
        except Exception:  # noqa: BLE001 - a node's answer must never end the run
            continue
    return facts


#: Subject -> its facts. Equal facts of thousands of nodes are one object and are counted at once.
Facts = Mapping[str, Mapping[str, Any]]


def _in_group(group: str, facts: Mapping[str, Facts]) -> Iterator[Outlier]:
    """The outliers among these nodes, by name."""
    names = list(facts)
    for subject in SUBJECTS:
        kinds: dict[int, tuple[Mapping[str, Any], list[int]]] = {}
        for number, node_facts in enumerate(facts.values()):
            subject_facts = node_facts.get(subject)
            if subject_facts:
                kinds.setdefault(id(subject_facts), (subject_facts, []))[1].append(number)
        # An absent fact is not a difference: the checks judge absence.
        names_of_facts = (fact for subject_facts, _ in kinds.values() for fact in subject_facts)
        for fact in dict.fromkeys(names_of_facts):
            counts: Counter[Any] = Counter()
            for subject_facts, numbers in kinds.values():
                if fact in subject_facts:
                    counts[subject_facts[fact]] += len(numbers)
            (majority, count), *_ = counts.most_common(1)
            total = sum(counts.values())
            if total < _MIN_PEERS or count * 2 <= total:
                continue
            pairs = [(row[fact], numbers) for row, numbers in kinds.values() if fact in row]
            odd = [(value, numbers) for value, numbers in pairs if value != majority]
            differs = sorted((number, value) for value, numbers in odd for number in numbers)
            if differs:
                values = {names[number]: value for number, value in differs}
                yield Outlier(f"{subject}.{fact}", group, majority, count, values)


def find_outliers(peers: Mapping[str, Mapping[str, Facts]]) -> tuple[Outlier, ...]:
    """The facts in which nodes differ from the majority of their group; by group, then by name."""
    return tuple(outlier for group in peers for outlier in _in_group(group, peers[group]))


def key_of(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that equal facts share; True and 1 differ."""
    return (*facts.items(), *map(type, facts.values()))


# --- The judge.

_MAX_JUDGED = 512  # judged observations that a judge remembers
_MAX_NUMBERED = 1 << 15  # values of an interner that have a number

PROBE_OF = {probe.subject: probe for probe in PROBES}
SUBJECT_NAMES = tuple(SUBJECTS)
NUMBER_OF = {name: number for number, name in enumerate(SUBJECTS)}

#: Makes the text of one subject's observation for the run's format.
FactsText = Callable[[Any], str]

#: Makes the sections of a node's state that the memory keeps, of (subject, its observation, its
#: shown facts, its results, its policy): (name, digest, packed text; None: the memory has it).
SectionTexts = Callable[
    [str, Any, Any, list[Result], Policy], list[tuple[str, bytes, bytes | None]]
]


class FilePlace(NamedTuple):
    """The place of bytes in a judge's file."""

    file: int  # its index in the list of all judges' files
    start: int
    size: int


def read_place(files: Sequence[int], place: FilePlace) -> bytes:
    """The bytes. files: descriptors of all judges' files"""
    return os.pread(files[place.file], place.size, place.start)


_COUNTERS = ".counters"  # the end of the name of a section with counters


class AnswerSummary(NamedTuple):
    """The part of an answer that the fleet needs before any node is judged."""

    place: FilePlace  # of the record
    addresses: frozenset[str] | None  # of the node's interfaces; None: not observed
    has_counters: bool  # whether a subject with counters was observed
    identity: Any  # the node's names, addresses and keys, for the fleet's known hosts
    # in which a later answer gets the same verdict; until they are tried, the answer itself
    bounds: Bounds | FilePlace | None = None


class NodeOrder(NamedTuple):
    place: FilePlace  # of the record of its answer
    policy: int  # number of its policy
    addresses: int | None  # of `FleetFacts`, as numbers of values that all judges share
    known_hosts: int | None  # likewise
    gate_files: int | None  # likewise
    host_key: str  # of `FleetFacts`


class StateRecord(NamedTuple):
    digest: bytes  # of the sections
    counted: tuple[str, ...]  # the subjects whose counters were read
    place: FilePlace  # of a pickled list of `_KeptSection`


class NodeOutcome(NamedTuple):
    """A judged node. A code is a number in a table of its judge, or the value itself."""

    # (judge, number of the subject, codes), in no order
    results: list[tuple[int, int, tuple[Any, ...]]]
    # (judge, number of the subject, code) of the facts that peers should share
    compared: list[tuple[int, int, Any]]
    facts: FilePlace | None  # of their text
    state: StateRecord | None  # of the node for the memory; None: the run has no memory


#: A section of a node's state: name, digest, place of its packed text; None: the memory has it.
_KeptSection = tuple[str, bytes, FilePlace | None]


#: Of a node: the results, the facts to compare, the texts of facts, the sections of its state.
_Rows = tuple[list[Any], list[Any], list[tuple[int, str]], list[_KeptSection]]


class Interner:
    """Numbers for values: the control process gets a value once, and then its number. The values
    that most nodes share come early; without a number, one costs more.

    new: the values that got a number since `AnswerJudge.take_new`
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._by_id: dict[int, int] = {}
        self._values: list[Any] = []
        self.new: list[Any] = []

    def code(self, key: Any, value: Any) -> Any:
        """The value's number, or the value. key: equal for equal values"""
        number = self._by_id.get(id(value))
        if number is None:
            number = self._numbers.get(key)
        if number is None and len(self._values) < _MAX_NUMBERED:
            number = self._numbers[key] = self._by_id[id(value)] = len(self._values)
            self._values.append(value)
            self.new.append(value)
        return value if number is None else number


def _plain(answer: str, nonce: str) -> bytes:
    """The text of an answer with a shared nonce: equal answers are equal. Raises ProbeError."""
    return unpack(answer, nonce).replace(nonce.encode(), SHARED_NONCE.encode())


class _JudgedSubject(NamedTuple):
    """The judged observation of one subject."""

    codes: tuple[Any, ...]  # of its results
    compared: Any  # code of the facts that peers should share
    text: str  # its facts for the run's format
    sections: list[_KeptSection]  # of its node's state


class AnswerJudge:
    """Reads answers, judges nodes, and keeps what is large in a file.

    number:     of this judge and its file
    files:      descriptors of all judges' files
    facts_text: None: the run's format shows no facts
    section_texts: None: the run has no memory
    is_watch:   the nodes are looked at again
    """

    def __init__(
        self,
        number: int,
        files: list[int],
        policies: Sequence[Policy],
        facts_text: FactsText | None,
        section_texts: SectionTexts | None,
        *,
        is_watch: bool = False,
    ) -> None:
        self.number, self.files, self.policies = number, files, policies
        self.facts_text, self.section_texts = facts_text, section_texts
        self.is_watch = is_watch
        self.size = 0
        self.results, self.compared = Interner(), Interner()
        # (id of a shared observation, policy) -> the observation, and as it was judged alone.
        self._judged: dict[tuple[int, int], tuple[Any, _JudgedSubject]] = {}
        self.shared: list[Any] = []
        self.moment = 0.0

    def do(self, order: tuple[Any, ...]) -> Any:
        kind, *arguments = order
        if kind == "read":
            return self.read(*arguments)
        if kind == "keep":
            return self.keep(*arguments)
        if kind == "judge":
            return self.judge(*arguments)
        if kind == "share":
            self.shared += arguments
        else:
            (self.moment,) = arguments
        return None

    def take_new(self) -> tuple[list[Any], list[Any]]:
        """The results and facts that got a number since the last call."""
        new = self.results.new, self.compared.new
        self.results.new, self.compared.new = [], []
        return new

    # --- The answer.

    def read(
        self,
        policy: int,
        subjects: Sequence[str],
        bounds: Bounds | FilePlace | None,
        nonce: str,
        answer: str,
    ) -> AnswerSummary | Bounds | FilePlace:
        """Read an answer and judge what needs no fleet; only the bounds of the node's earlier
        answer where this one is within them.
        """
        probes = tuple([PROBE_OF[subject] for subject in subjects])
        settings = self.policies[policy]

        def statuses(text: bytes) -> list[str]:
            outputs = parse_answer(text, snapshot.sections(probes), SHARED_NONCE)
            judged = [probe for probe in probes if probe.subject in JUDGED]
            subjects = {p.subject: snapshot.observe(p, outputs, settings) for p in judged}
            return [result.status for result in judge(Snapshot(subjects), settings)]

        if bounds:
            with contextlib.suppress(ProbeError):
                text = _plain(answer, nonce)
                if isinstance(bounds, FilePlace):
                    judged_text = _plain(*pickle.loads(read_place(self.files, bounds)))
                    if text == judged_text:
                        return bounds
                    bounds = find_bounds(judged_text, text, statuses)
                if bounds and bounds.contain(text):
                    return bounds
        summary = self.keep(snapshot.read(answer, probes, settings, nonce), policy)
        if not self.is_watch:
            return summary
        return summary._replace(bounds=self._write(pickle.dumps((answer, nonce), 5)))

    def keep(self, observed: Snapshot, policy: int) -> AnswerSummary:
        """Judge what needs no fleet, and keep the rest for `judge`."""
        rows: _Rows = [], [], [], []
        unjudged: dict[str, Any] = {}
        for subject in observed.subjects:
            if subject in NEEDS_FLEET:
                unjudged[subject] = observed.subjects[subject]
            elif subject in NUMBER_OF:
                self._add(rows, subject, self._judge_alone(observed, subject, policy))
        record = (*rows, unjudged, dict(observed.refused), context.boot_id_of(observed))
        needs_identity = self.policies[policy].ssh_client_mode == "known_hosts"
        # Of 10,000 nodes, the observations would take 180 MB.
        place = self._write(zlib.compress(pickle.dumps(record, 5), 1))
        addresses = context.addresses_of(observed)
        has_counters = any(name in observed.subjects for name in COUNTING)
        identity = context.identity_of(observed) if needs_identity else None
        return AnswerSummary(place, addresses, has_counters, identity)

    def _judge_alone(self, observed: Snapshot, subject: str, policy: int) -> _JudgedSubject:
        """Judge a subject that needs no fleet; equal observations are judged once."""
        observation = observed.subjects[subject]
        key = (id(observation), policy)
        if key in self._judged and not observed.refused:
            return self._judged[key][1]
        judged = self._judge(observed, subject, policy, ALONE)
        if not observed.refused:
            if len(self._judged) >= _MAX_JUDGED:
                del self._judged[next(iter(self._judged))]
            self._judged[key] = observation, judged
        return judged

    def _judge(
        self, observed: Snapshot, subject: str, number: int, fleet: FleetFacts
    ) -> _JudgedSubject:
        """Judge one subject by the policy of this number. The sections' texts go into the file."""
        observation, policy = observed.subjects[subject], self.policies[number]
        results = judge(observed, policy, fleet, (subject,))
        facts = compared(observed, fleet, (subject,)).get(subject)
        shown, sections = None, list[_KeptSection]()
        if self.facts_text or self.section_texts:
            shown = shown_facts(subject, observation, fleet)
        if self.section_texts:
            for name, digest, text in self.section_texts(
                subject, observation, shown, results, policy
            ):
                sections.append((name, digest, None if text is None else self._write(text)))
        codes = tuple([self.results.code(result, result) for result in results])
        code = self.compared.code((subject, key_of(facts)), facts) if facts else None
        facts_text = self.facts_text(shown) if self.facts_text else ""
        return _JudgedSubject(codes, code, facts_text, sections)

    def _add(self, rows: _Rows, subject: str, judged: _JudgedSubject) -> None:
        results, facts, texts, sections = rows
        number = NUMBER_OF[subject]
        results.append((self.number, number, judged.codes))
        if judged.compared is not None:
            facts.append((self.number, number, judged.compared))
        texts.append((number, judged.text))
        sections += judged.sections

    def _state(self, sections: list[_KeptSection], boot_id: str) -> StateRecord:
        """Write the state of a node. Without the id of its boot, totals mean nothing."""
        sections = sorted(s for s in sections if boot_id or not s[0].endswith(_COUNTERS))
        joined = b"".join(name.encode() + digest for name, digest, _ in sections)
        digest = hashlib.blake2b(joined, digest_size=16).digest()
        counted = tuple(n[: -len(_COUNTERS)] for n, _, _ in sections if n.endswith(_COUNTERS))
        return StateRecord(digest, counted, self._write(pickle.dumps(sections, 5)))

    # --- The file.

    def _write(self, data: bytes) -> FilePlace:
        place, remaining = FilePlace(self.number, self.size, len(data)), memoryview(data)
        while remaining:
            written = os.pwrite(self.files[self.number], remaining, self.size)
            self.size += written
            remaining = remaining[written:]
        return place

    # --- The node.

    def judge(self, node: NodeOrder, earlier: str) -> NodeOutcome:
        """Judge what needs the fleet. earlier: counters as `CounterSample.parse` takes them"""
        data = read_place(self.files, node.place)
        *lists, unjudged, refused, boot_id = pickle.loads(zlib.decompress(data))
        rows: _Rows = tuple(lists)
        observed = Snapshot(unjudged, refused=refused)
        fleet = FleetFacts(
            addresses=None if node.addresses is None else self.shared[node.addresses],
            known_hosts=None if node.known_hosts is None else self.shared[node.known_hosts],
            host_key=node.host_key,
            gate_files=None if node.gate_files is None else self.shared[node.gate_files],
            counters=context.earlier_counters(
                context.CounterSample.parse(earlier), boot_id, self.moment
            ),
        )
        for subject in unjudged:
            self._add(rows, subject, self._judge(observed, subject, node.policy, fleet))
        results, facts, texts, sections = rows
        facts_place = None
        if self.facts_text:
            members = [f'"{SUBJECT_NAMES[number]}":{text}' for number, text in sorted(texts)]
            facts_place = self._write(f"{{{','.join(members)}}}".encode("ascii"))
        state = self._state(sections, boot_id) if self.section_texts else None
        return NodeOutcome(results, facts, facts_place, state)
