"""The nodes' verdicts from Prometheus, or from a server with its HTTP API (Thanos, Mimir,
VictoriaMetrics).

One query gets the metrics of all textfiles (reports/monitoring.py), a second one the targets. A
node's textfile may have any label. Prometheus adds the target's labels, above all `instance`, and
renames labels of the textfile with the same names to `exported_…` (honor_labels, off by default).
The metric `up` has only the target's labels.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nodeready.audit.verdict import CHECK, LISTED, Send, SourceError, gather
from nodeready.audit.verdict_source import NO_TEXT, HostRecord, Source
from nodeready.audit.web_request import open_answer
from nodeready.subjects.result import Result
from nodeready.text import sanitise

_METRICS = (
    "audit_timestamp_seconds", "audit_info", "audit_complete", "build_info", "check_status",
)  # fmt: skip


def queries(labels: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The query for the metrics, and the query for the targets. labels: of the targets"""
    selector = "".join(
        f",{label}={json.dumps(text, ensure_ascii=False)}" for label, text in labels
    )
    named = f'__name__=~"nodeready_({"|".join(_METRICS)})"'
    return (
        f"{{{named}{selector}}} or (nodeready_node_results{{{selector[1:]}}} > 0)",
        f"up{{{selector[1:]}}} and on (job) "
        f"count by (job) (nodeready_audit_timestamp_seconds{{{selector[1:]}}})",
    )


#: The labels of a target that may name its node, where `instance` does not.
NAMING = ("nodename", "node", "hostname", "host")
#: Maximum bytes of an answer. About two kilobytes per node are usual.
MAX_ANSWER = 256 << 20
#: Maximum characters of a sample, and of the text before and after all samples.
_MAX_SAMPLE, _MAX_AROUND = 1 << 16, 1 << 20
#: Maximum results of a node that are not ok; there are fewer than a hundred checks.
_MAX_RESULTS = 1000
_VECTOR = r'"result"\s*:\s*\['
_INSTANCE = r"(?:[a-z]+://)?(?:\[([^]]+)\]|([^:/]+))(?::\d+)?(?:/.*)?"


def _send_answers(source: Source, limit_s: float, send: Send) -> None:
    """Make both queries, and send (index of the query, piece of its answer)."""
    from urllib.parse import urlencode
    from urllib.request import Request

    for index, query in enumerate(queries(source.labels)):
        parameters = urlencode({"query": query, "timeout": f"{limit_s:g}s"})
        request = Request(f"{source.url}/api/v1/query?{parameters}")
        request.add_header("Accept", "application/json")
        if source.header:
            request.add_unredirected_header("Authorization", source.header)
        with open_answer(request, source.shown, limit_s, partial(_refusal, source)) as answer:
            remaining_bytes = MAX_ANSWER
            while data := answer.read1(1 << 16):
                remaining_bytes -= len(data)
                if remaining_bytes < 0:
                    raise SourceError(f"{source.shown}: answers more than {MAX_ANSWER >> 20} MiB")
                send([index, data.decode("latin-1")])


def _refusal(source: Source, code: int, body: bytes) -> str:
    """The error for an HTTP status, with Prometheus's message where there is one."""
    try:
        message = sanitise(str(json.loads(body)["error"]), 300)
    except (ValueError, TypeError, KeyError, RecursionError):
        message = {
            401: "wants a user or a token (--token-file)",
            403: "refuses this user or token",
            404: "has no /api/v1/query: is there a prefix in its address?",
        }.get(code, "no Prometheus answers there")
    return f"{source.shown}: HTTP {code}: {message}"


#: The labels of a metric, with its value as text.
Sample = tuple[dict[str, str], str]


class _PrometheusAnswer:
    """Parses an answer piece by piece, so that no large answer is in memory.

    shown:        the source in errors
    has_warnings: the answer is partial, or has warnings
    """

    def __init__(self, shown: str) -> None:
        self.shown, self.has_warnings = shown, False
        #: The text that is not parsed yet, and the text before the samples.
        self._text = ""
        self._head: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._json = json.JSONDecoder()
        self._samples_ended = False

    def samples(self, data: bytes) -> Iterator[Sample]:
        """The samples that this piece completes. Raises SourceError for another answer."""
        self._text += self._decoder.decode(data)
        if self._head is None:
            match = re.search(_VECTOR, self._text)
            if match is None:
                self._limit_text(_MAX_AROUND)
                return
            self._head, self._text = self._text[: match.end()], self._text[match.end() :]
        start = 0
        while not self._samples_ended:
            while self._text[start : start + 1] in (" ", "\n", "\r", "\t", ","):
                start += 1
            if self._text[start : start + 1] == "]":
                self._samples_ended = True
                break
            try:
                sample, end = self._json.raw_decode(self._text, start)
            except (ValueError, RecursionError):
                break
            yield self._sample(sample)
            start = end
        self._text = self._text[start:]
        self._limit_text(_MAX_AROUND if self._samples_ended else _MAX_SAMPLE)

    def _limit_text(self, maximum: int) -> None:
        """Raise SourceError if the text that is not parsed yet has more characters."""
        if len(self._text) > maximum:
            raise SourceError(f"{self.shown}: the answer is not Prometheus's")

    def _sample(self, sample: Any) -> Sample:
        """Validate a sample. Raises SourceError."""
        try:
            labels, (_, value) = sample["metric"], sample["value"]
            if isinstance(value, str) and all(
                isinstance(text, str) for pair in labels.items() for text in pair
            ):
                return labels, value
        except (TypeError, KeyError, ValueError, AttributeError):
            pass
        raise SourceError(f"{self.shown}: the answer has a malformed sample")

    def end(self) -> None:
        """Parse the text around the samples. Raises SourceError for an answer that is cut off."""
        try:
            around: Any = json.loads((self._head or "") + self._text)
            is_valid = around["status"] == "success" and around["data"]["resultType"] == "vector"
            self.has_warnings = bool(around.get("warnings")) or around.get("isPartial") is True
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid or not self._samples_ended:
            raise SourceError(f"{self.shown}: the answer is not Prometheus's")


#: The labels of nodeready's metrics.
_METRIC_LABELS = frozenset({"check", "status", "severity", "node", "policy_digest", "version"})
#: The labels that do not distinguish two targets of one job and instance.
_COMMON_LABELS = frozenset(
    {"__name__", "job", "instance", *_METRIC_LABELS}
    | {f"exported_{label}" for label in _METRIC_LABELS}
)


def _metric_label(labels: Mapping[str, str], label: str) -> str:
    """The value of a label of nodeready, which Prometheus renames if the target has it."""
    return labels.get(f"exported_{label}", labels.get(label, ""))


@dataclass
class _PrometheusTarget:
    """The metrics of one target.

    time:     of the verdict, in seconds since 1970; None: no such metric
    nodes:    in the metrics; the textfile of a gate has one
    counts:   status -> number of results
    statuses: (check, status)
    """

    time: float | None = None
    policy_digest: str = ""
    version: str = ""
    complete: bool = True
    nodes: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    statuses: set[tuple[str, str]] = field(default_factory=set)

    def add(self, labels: Mapping[str, str], value: float) -> None:
        name = labels.get("__name__", "").partition("nodeready_")[2]
        if name == "audit_timestamp_seconds":
            self.time = value
        elif name == "audit_info":
            self.policy_digest = _metric_label(labels, "policy_digest")
        elif name == "build_info":
            self.version = _metric_label(labels, "version")
        elif name == "audit_complete":
            self.complete = value == 1
        elif name in ("check_status", "node_results"):
            self.nodes.add(_metric_label(labels, "node"))
            status = _metric_label(labels, "status")
            if name == "node_results":
                # A NaN counts as 0: it is not greater than 0.
                self.counts[status] = int(min(value, _MAX_RESULTS)) if value > 0 else 0
            elif len(self.statuses) < _MAX_RESULTS:
                self.statuses.add((_metric_label(labels, "check"), status))

    def record(self, host: str, labels: Iterable[tuple[str, str]]) -> HostRecord:
        """The verdict in the metrics. labels: of the target, without job and instance"""
        if self.time is None:
            return HostRecord(host, problem="its metrics have no time of a verdict")
        if len(self.nodes) > 1:
            problem = f"its metrics are of {len(self.nodes)} nodes: an audit's"
            return HostRecord(host, problem=problem)
        is_valid = all(
            CHECK.fullmatch(check) and status in LISTED for check, status in self.statuses
        )
        listed_counts = Counter(status for _, status in self.statuses)
        is_complete = all(self.counts.get(status, 0) == listed_counts[status] for status in LISTED)
        problem = "" if self.complete else "its audit was interrupted"
        if not (is_valid and is_complete and self.counts):
            problem = "its metrics are incomplete"
        results = tuple(
            Result(check, status, actual=NO_TEXT) for check, status in sorted(self.statuses)
        )
        counts = tuple((status, self.counts.get(status, 0)) for status in ("ok", "na"))
        # Replicas of Prometheus have the same targets, and differ in such a label.
        identity = tuple(pair for pair in labels if "replica" not in pair[0])
        values = (self.time, self.policy_digest, self.version, results)
        return HostRecord(host, *values, counts=counts, problem=problem, labels=identity)


def host_of(instance: str) -> str:
    """The host of an ``instance``: gpu001 of ``gpu001:9100``, fd00::1 of ``[fd00::1]:9100``."""
    match = re.fullmatch(_INSTANCE, instance)
    return (match[1] or match[2]) if match else instance


def prometheus_records(
    source: Source, node_of: Callable[[str], str], limit_s: float
) -> tuple[list[HostRecord], bool]:
    """The verdicts in Prometheus, and whether its answer is partial. Raises SourceError.

    node_of: returns the node of a host's name, or ""
    """
    answers = [_PrometheusAnswer(source.shown), _PrometheusAnswer(source.shown)]
    targets: dict[tuple[tuple[str, str], Any], _PrometheusTarget] = {}
    # (job, instance) of a target -> its host, and whether Prometheus reaches it.
    hosts: dict[tuple[str, str], tuple[str, bool]] = {}
    work = partial(_send_answers, source, limit_s)
    for number, data in gather([work], limit_s, source.shown, None):
        for labels, text in answers[number].samples(data.encode("latin-1")):
            key = (labels.get("job", ""), labels.get("instance", ""))
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if number == 0:
                target_labels = tuple(
                    sorted(pair for pair in labels.items() if pair[0] not in _COMMON_LABELS)
                )
                targets.setdefault((key, target_labels), _PrometheusTarget()).add(labels, value)
            else:
                names = [host_of(key[1]), *(labels.get(label, "") for label in NAMING)]
                host = next((name for name in names if name and node_of(name)), names[0])
                hosts[key] = (host, value == 1)
    for answer in answers:
        answer.end()
    records = [
        target.record(hosts[key][0] if key in hosts else host_of(key[1]), target_labels)
        for (key, target_labels), target in targets.items()
    ]
    hosts_with_metrics = {record.host for record in records}
    for (_, instance), (host, is_up) in hosts.items():
        if not is_up and host not in hosts_with_metrics:
            problem = f"Prometheus does not reach {sanitise(instance, 80)}"
            records.append(HostRecord(host, problem=problem))
    return records, any(answer.has_warnings for answer in answers)
