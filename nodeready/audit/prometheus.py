"""The nodes' verdicts in Prometheus, or in what speaks its HTTP API (Thanos, Mimir,
VictoriaMetrics): a query for the metrics of all textfiles (reports/monitoring.py), and one for the
targets.

A node's textfile may have any label. Prometheus sets the target's labels, above all `instance`,
and renames the textfile's labels of the same names (honor_labels, off by default). `up` has the
target's labels alone.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.audit.verdict import CHECK, LISTED, Send, SourceError, gather
from nodeready.audit.verdict_source import NO_TEXT, HostRecord, Source
from nodeready.node.secrets import redact
from nodeready.subjects.result import Result
from nodeready.text import sanitise

_METRICS = (
    "audit_timestamp_seconds", "audit_info", "audit_complete", "build_info", "check_status",
)  # fmt: skip


def queries(labels: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The queries for the metrics and for the targets. labels: that a target must have."""
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
#: Bytes of an answer: some two kilobytes a node are usual.
MAX_ANSWER = 256 << 20
#: Characters of one series, and of what stands around all of them.
_SERIES, _AROUND = 1 << 16, 1 << 20
#: Results of one node that are not well; we have not a hundred checks.
_MOST_RESULTS = 1000
_VECTOR = r'"result"\s*:\s*\['
_INSTANCE = r"(?:[a-z]+://)?(?:\[([^]]+)\]|([^:/]+))(?::\d+)?(?:/.*)?"


def _asker(source: Source, limit_s: float) -> Callable[[Send], None]:
    """What asks both queries: it sends the number of the query and a piece of its answer."""

    def ask(send: Send) -> None:
        import http.client
        import urllib.error
        import urllib.request
        from urllib.parse import urlencode

        class Here(urllib.request.HTTPRedirectHandler):
            """What another address answers was not asked for, and it would get our password."""

            def redirect_request(self, req: Any, fp: Any, code: int, *details: Any) -> None:
                address = sanitise(redact("", str(details[-1])), 200).partition("?")[0]
                raise SourceError(f"{source.shown}: leads to {address}: name that, if it is right")

        opener = urllib.request.build_opener(Here)
        for number, query in enumerate(queries(source.labels)):
            words = urlencode({"query": query, "timeout": f"{limit_s:g}s"})
            request = urllib.request.Request(f"{source.url}/api/v1/query?{words}")
            request.add_header("Accept", "application/json")
            if source.header:
                request.add_unredirected_header("Authorization", source.header)
            try:
                with opener.open(request, timeout=limit_s) as answer:
                    remaining_bytes = MAX_ANSWER
                    while data := answer.read1(1 << 16):
                        remaining_bytes -= len(data)
                        if remaining_bytes < 0:
                            raise SourceError(
                                f"{source.shown}: answers more than {MAX_ANSWER >> 20} MiB"
                            )
                        send([number, data.decode("latin-1")])
            except urllib.error.HTTPError as error:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    raise SourceError(_refusal(source, error.code, error.read(4096))) from None
                raise SourceError(f"{source.shown}: HTTP {error.code}") from None
            except urllib.error.URLError as error:
                reason = getattr(error.reason, "strerror", None) or error.reason
                raise SourceError(f"{source.shown}: {sanitise(str(reason), 300)}") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise SourceError(f"{source.shown}: {sanitise(str(reason), 300)}") from None

    return ask


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


Sample = tuple[dict[str, str], str]


class _PrometheusAnswer:
    """The samples of an answer while it comes: a large one is never there as a whole."""

    def __init__(self, shown: str) -> None:
        self.shown, self.warnings = shown, False
        self._text = ""
        self._head: str | None = None
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._json = json.JSONDecoder()
        self._over = False

    def take(self, data: bytes) -> Iterator[Sample]:
        """The samples that have come whole. Raises SourceError for anything else."""
        self._text += self._characters.decode(data)
        if self._head is None:
            match = re.search(_VECTOR, self._text)
            if match is None:
                self._bounded(_AROUND)
                return
            self._head, self._text = self._text[: match.end()], self._text[match.end() :]
        at = 0
        while not self._over:
            while self._text[at : at + 1] in (" ", "\n", "\r", "\t", ","):
                at += 1
            if self._text[at : at + 1] == "]":
                self._over = True
                break
            try:
                sample, end = self._json.raw_decode(self._text, at)
            except (ValueError, RecursionError):
                break
            yield self._sample(sample)
            at = end
        self._text = self._text[at:]
        self._bounded(_AROUND if self._over else _SERIES)

    def _bounded(self, maximum: int) -> None:
        if len(self._text) > maximum:
            raise SourceError(f"{self.shown}: its answer is none of Prometheus's")

    def _sample(self, sample: Any) -> Sample:
        try:
            labels, (_, value) = sample["metric"], sample["value"]
            if isinstance(value, str) and all(
                isinstance(text, str) for pair in labels.items() for text in pair
            ):
                return labels, value
        except (TypeError, KeyError, ValueError, AttributeError):
            pass
        raise SourceError(f"{self.shown}: a sample in its answer is none")

    def end(self) -> None:
        """What stands around the samples. Raises SourceError for an answer that is cut off."""
        try:
            around: Any = json.loads((self._head or "") + self._text)
            good = around["status"] == "success" and around["data"]["resultType"] == "vector"
            self.warnings = bool(around.get("warnings")) or around.get("isPartial") is True
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            good = False
        if not good or not self._over:
            raise SourceError(f"{self.shown}: its answer is none of Prometheus's")


#: The labels of our metrics; all other labels are the target's.
_OURS = frozenset({"check", "status", "node", "policy_digest", "version"})
_NO_TARGET = frozenset(
    {"__name__", "job", "instance", *_OURS, *(f"exported_{label}" for label in _OURS)}
)


def _own_label(labels: Mapping[str, str], label: str) -> str:
    """The value of one of our labels, which Prometheus renames where the target has the same."""
    return labels.get(f"exported_{label}", labels.get(label, ""))


@dataclass
class _PrometheusTarget:
    """What the metrics of one target say.

    nodes:    the nodes in its metrics: one, in the textfile of a gate
    statuses: (check, status)
    """

    time: float | None = None
    policy_digest: str = ""
    version: str = ""
    complete: bool = True
    nodes: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    statuses: set[tuple[str, str]] = field(default_factory=set)

    def take(self, labels: Mapping[str, str], value: float) -> None:
        name = labels.get("__name__", "").partition("nodeready_")[2]
        if name == "audit_timestamp_seconds":
            self.time = value
        elif name == "audit_info":
            self.policy_digest = _own_label(labels, "policy_digest")
        elif name == "build_info":
            self.version = _own_label(labels, "version")
        elif name == "audit_complete":
            self.complete = value == 1
        elif name in ("check_status", "node_results"):
            self.nodes.add(_own_label(labels, "node"))
            status = _own_label(labels, "status")
            if name == "node_results":
                # No comparison holds for what is no number.
                self.counts[status] = int(min(value, _MOST_RESULTS)) if value > 0 else 0
            elif len(self.statuses) < _MOST_RESULTS:
                self.statuses.add((_own_label(labels, "check"), status))

    def record(self, host: str, labels: Iterable[tuple[str, str]]) -> HostRecord:
        """What that says. labels: of the target, beside job and instance."""
        if self.time is None:
            return HostRecord(host, problem="its metrics have no time of a verdict")
        if len(self.nodes) > 1:
            return HostRecord(
                host, problem=f"its metrics are of {len(self.nodes)} nodes: an audit's"
            )
        sound = all(CHECK.fullmatch(check) and status in LISTED for check, status in self.statuses)
        seen_counts = Counter(status for _, status in self.statuses)
        is_whole = all(self.counts.get(status, 0) == seen_counts[status] for status in LISTED)
        problem = "" if self.complete else "its look was interrupted"
        if not (sound and is_whole and self.counts):
            problem = "its metrics are not whole"
        results = tuple(
            Result(check, status, actual=NO_TEXT) for check, status in sorted(self.statuses)
        )
        counts = tuple((status, self.counts.get(status, 0)) for status in ("ok", "na"))
        # Two Prometheus that watch the same targets are replicas.
        identity = tuple(pair for pair in labels if "replica" not in pair[0])
        values = (self.time, self.policy_digest, self.version, results)
        return HostRecord(host, *values, counts=counts, problem=problem, labels=identity)


def host_of(instance: str) -> str:
    """The host of an ``instance``: ``gpu001:9100``, ``[fd00::1]:9100``, an address."""
    match = re.fullmatch(_INSTANCE, instance)
    return (match[1] or match[2]) if match else instance


def of_prometheus(
    source: Source, names: Callable[[str], str], limit_s: float
) -> tuple[list[HostRecord], bool]:
    """The verdicts that Prometheus has, and whether it says that its answer is partial.

    names: the node of a host's name, or ""
    Raises SourceError.
    """
    answers = [_PrometheusAnswer(source.shown), _PrometheusAnswer(source.shown)]
    targets: dict[tuple[tuple[str, str], Any], _PrometheusTarget] = {}
    named: dict[tuple[str, str], tuple[str, bool]] = {}
    for number, data in gather([_asker(source, limit_s)], limit_s, source.shown, None):
        for labels, text in answers[number].take(data.encode("latin-1")):
            key = (labels.get("job", ""), labels.get("instance", ""))
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if number == 0:
                target_labels = tuple(
                    sorted(pair for pair in labels.items() if pair[0] not in _NO_TARGET)
                )
                targets.setdefault((key, target_labels), _PrometheusTarget()).take(labels, value)
            else:
                hosts = [host_of(key[1]), *(labels.get(label, "") for label in NAMING)]
                host = next((name for name in hosts if name and names(name)), hosts[0])
                named[key] = (host, value == 1)
    for answer in answers:
        answer.end()
    records = [
        target.record(named[key][0] if key in named else host_of(key[1]), target_labels)
        for (key, target_labels), target in targets.items()
    ]
    hosts_heard = {record.host for record in records}
    for (_, instance), (host, up) in named.items():
        if not up and host not in hosts_heard:
            problem = f"Prometheus does not reach {sanitise(instance, 80)}"
            records.append(HostRecord(host, problem=problem))
    return records, any(answer.warnings for answer in answers)
