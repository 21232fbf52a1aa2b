"""The nodes' own last verdicts, collected without asking one of them.

`nodeready audit --recorded SOURCE` reads them (`audit/verdict.py`) from a directory that the nodes
share, or from Prometheus. A verdict is believed while it is young; a node without one is unknown,
never ok. Whose verdict it is tells the file's name, or the label that Prometheus itself gives to
the target.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nodeready.audit.document import STOPPING, NodeReport, Recorded
from nodeready.audit.verdict import (
    CHECK,
    LISTED,
    NODE,
    NodeVerdict,
    Send,
    SourceError,
    content,
    gather,
    parse,
)
from nodeready.policy import Policy
from nodeready.policy.policy import digest
from nodeready.subjects.registry import SUBJECTS, Selection, check_ids
from nodeready.subjects.result import ADMIN, NODEREADY, Result, fixable, na, ok
from nodeready.subjects.snapshot import waive
from nodeready.subjects.ssh_client.facts import clean_address, clean_name
from nodeready.subjects.ssh_client.known_hosts import Names
from nodeready.text import redact, sanitise, span

# --- What a source holds, whichever it is.


class HostRecord(NamedTuple):
    """One host's record in a source.

    host:    as the source calls it
    time:    when the node was judged, in seconds since 1970
    results: without those that are known by their number alone
    counts:  status -> how many results are known by their number alone
    problem: why there is no verdict, in one line; "": there is one
    labels:  of its target, beside those that name the host: two hosts with other ones are two
    """

    host: str
    time: float = 0.0
    policy_digest: str = ""
    version: str = ""
    results: tuple[Result, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    problem: str = ""
    labels: tuple[tuple[str, str], ...] = ()


# --- A directory: DIRECTORY/NODE.json, written by the node that has this host name.

#: Processes that read a directory, where it has many files: a file server answers each in turn.
_READERS, _FEW = 8, 256


def _reader(directory: str, number: int, total: int) -> Callable[[Send], None]:
    """What reads this reader's share of the directory's files. total: the number of readers"""

    def read(send: Send) -> None:
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # The directory's owner decides about its content. An NFS server that maps root to a user
        # (root_squash) makes the directory and the files that user's.
        owners = frozenset({0, os.geteuid(), os.fstat(at).st_uid})
        with os.scandir(at) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".json")]
        for name in names:
            host = name[: -len(".json")]
            raw = os.fsencode(name)
            if zlib.crc32(raw) % total != number or not re.fullmatch(NODE, host):
                continue
            try:
                problem, text = content(at, name, owners)
            except FileNotFoundError:
                continue
            except OSError as error:
                problem, text = error.strerror or str(error), b""
            send([host, problem, text.decode("latin-1")])

    return read


def _of_file(host: str, problem: str, text: bytes) -> HostRecord:
    """What a file says."""
    if problem:
        return HostRecord(host, problem=f"its file is not read: {problem}")
    verdict = parse(text)
    if verdict is None:
        return HostRecord(host, problem="its file is no verdict that this nodeready can read")
    if verdict.node != host:
        owner_name = sanitise(verdict.node, 80) or "no node"
        return HostRecord(host, problem=f"its file is the verdict of {owner_name}")
    return of_verdict(host, verdict)


def of_verdict(host: str, verdict: NodeVerdict) -> HostRecord:
    """What a verdict says."""
    if not verdict.version:
        return HostRecord(host, problem="an older nodeready wrote its verdict: deploy the gate")
    # Healthy nodes say the same: equal results are one object.
    results = (*(Result(**row) for row in verdict.results), *map(ok, verdict.ok))
    results = (*results, *(na(check, "") for check in verdict.na))
    if verdict.go is any(result.status in STOPPING for result in results):
        return HostRecord(host, problem="its verdict contradicts its results")
    return HostRecord(host, verdict.time, verdict.policy_digest, verdict.version, results)


def of_directory(directory: str, expected: int, limit_s: float) -> list[HostRecord]:
    """The verdicts in a directory. expected: how many, about. Raises SourceError."""
    total = _READERS if expected > _FEW else 1
    works = [_reader(directory, number, total) for number in range(total)]
    records = []
    for host, problem, text in gather(works, limit_s, directory):
        records.append(_of_file(host, problem, text.encode("latin-1")))
    return records


# --- Prometheus, and what speaks its HTTP API (Thanos, Mimir, VictoriaMetrics): one query for the
# metrics of all nodes' textfiles (reports/monitoring.py), one for the targets themselves.
#
# A node's textfile may have any label. That of the target, `instance` above all, is Prometheus's
# own: it renames what a textfile has under such a name (honor_labels, off by default). `up` has
# the target's labels alone.

_METRICS = (
    "audit_timestamp_seconds", "audit_info", "audit_complete", "build_info", "check_status",
)  # fmt: skip
_LABEL = r"[A-Za-z_][A-Za-z0-9_]*"


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
#: What is shown of a result that is known by a metric alone.
NO_TEXT = "told by a metric, which has no text"


@dataclass(frozen=True)
class Source:
    """Where verdicts are collected.

    shown:     for people: without a user
    url:       of Prometheus, without a user; "": a directory
    labels:    that its targets must have
    directory: "": Prometheus
    header:    for Authorization; never shown
    """

    shown: str
    url: str = ""
    directory: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    header: str = field(default="", repr=False)


def source(words: str, token: str = "") -> Source:
    """What ``--recorded`` names. Raises ValueError.

    token: for ``Authorization: Bearer``; a directory has no use for it
    """
    from urllib.parse import parse_qsl, unquote, urlsplit

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", words):
        return Source(sanitise(words, 200), directory=words)
    if re.search(r"[^\x21-\x7e]", words):
        raise ValueError("has a character that no address has")
    try:
        parts = urlsplit(words)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or parts.scheme not in ("http", "https") or parts.fragment:
        raise ValueError("must be a directory, or the address of a Prometheus: http://HOST:9090")
    try:
        labels = tuple(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        labels = (("", ""),) if parts.query else ()
    if not all(re.fullmatch(_LABEL, label) for label, _ in labels):
        raise ValueError("must have labels of targets behind its ?: http://HOST:9090?cluster=a")
    user, at, place = parts.netloc.rpartition("@")
    if at and token:
        raise ValueError("has a user, and there is a token: only one of them can be sent")
    header = f"Bearer {token}" if token else ""
    if at:
        name, _, password = user.partition(":")
        pair = f"{unquote(name)}:{unquote(password)}".encode()
        header = f"Basic {base64.b64encode(pair).decode()}"
    url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}"
    shown = f"{url}?{parts.query}" if labels else url
    return Source(shown, url=url, labels=labels, header=header)


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


# --- From the records of hosts to the reports of nodes.

#: Seconds by which a node's clock may be ahead of this one's.
SKEW_S = 30.0
#: The check of the verdict itself, and the checks of the policy and the program behind it.
VERDICT, POLICY, BUNDLE = OF_VERDICTS = ("gate.verdict", "gate.policy", "gate.bundle")
_RUN = "systemctl list-timers nodeready.timer, or is cron running? Then the log of nodeready"


def assign_to_nodes(
    records: Iterable[HostRecord], names: Names
) -> tuple[dict[str, HostRecord], list[str]]:
    """Node of the inventory -> its record, and the hosts that belong to no node.

    A name that the inventory declares for a node wins over a similar name. The newest record of a
    host counts. Several hosts with names similar to one node's are ambiguous.
    """
    similar: dict[str, dict[str, list[HostRecord]]] = {}
    exact: dict[str, list[HostRecord]] = {}
    strangers = []
    for record in records:
        node, is_declared = owner(names, record.host)
        if is_declared:
            exact.setdefault(node, []).append(record)
        elif node:
            similar.setdefault(node, {}).setdefault(record.host, []).append(record)
        elif not record.problem:
            strangers.append(record.host)
    record_of = {}
    for node, hosts in similar.items():
        record_of[node] = _one_of(next(iter(hosts.values())))
        if len(hosts) > 1:
            host_names = ", ".join(sorted(sanitise(host, 80) for host in hosts)[:4])
            record_of[node] = HostRecord(
                node, problem=f"several hosts may be this node: {host_names}"
            )
    return {
        **record_of,
        **{node: _one_of(candidates) for node, candidates in exact.items()},
    }, sorted(strangers)


def owner(names: Names, host: str) -> tuple[str, bool]:
    """The node that has this name or address, and whether the inventory itself says so.

    ("", False): none has it, or several have
    """
    clean = clean_name(host) or clean_address(host)
    if host and host in names.of:
        return host, True
    node = names.owner(clean) if clean else ""
    return node, bool(node) and clean in names.given


def _one_of(records: list[HostRecord]) -> HostRecord:
    """The newest verdict in these records; a problem where two targets sent them."""
    good = [record for record in records if not record.problem]
    if len({record.labels for record in good}) > 1:
        first, *other_labels = [{*record.labels} for record in good]
        differing = {
            label for label, _ in first.union(*other_labels) - first.intersection(*other_labels)
        }
        label_names = sanitise(", ".join(sorted(differing)), 200)
        return HostRecord(
            records[0].host, problem=f"several targets may be this node: {label_names} differs"
        )
    return max(good, key=lambda record: record.time, default=records[0])


def collect(
    source: Source, names: Names, expected: int, limit_s: float
) -> tuple[list[HostRecord], bool]:
    """The records in the source, and whether the source calls them partial.

    expected: how many verdicts, about. Raises SourceError.
    """
    if source.directory:
        return of_directory(source.directory, expected, limit_s), False
    return of_prometheus(source, lambda host: owner(names, host)[0], limit_s)


class RecordedQuestion(NamedTuple):
    """What verdicts are judged by.

    policies:   node -> its policy as it is declared
    own_policy: a declared policy -> the policy by which the node judges itself
    selection:  the checks
    everything: the selection leaves no check out
    version:    of this nodeready
    """

    policies: Mapping[str, Policy]
    own_policy: Callable[[Policy], Policy]
    selection: Selection
    everything: bool
    version: str


def reports(
    records: Mapping[str, HostRecord],
    question: RecordedQuestion,
    groups: Callable[[str], Iterable[str]],
    source: Source,
    now: float,
) -> tuple[tuple[NodeReport, ...], Recorded]:
    """The reports of the nodes, and the summary of their verdicts."""
    digests = {
        policy: digest([question.own_policy(policy)]) for policy in {*question.policies.values()}
    }
    chosen = _chosen(question.selection)
    nodes: list[NodeReport] = []
    ages: list[float] = []
    stale = missing = 0
    for name, policy in question.policies.items():
        record = records.get(name)
        age = None if record is None or record.problem else now - record.time
        distrust = _why_not(record, age, policy, source)
        counts: tuple[tuple[str, int], ...] = ()
        results: list[Result] = []
        if distrust is not None:
            results = [distrust]
            stale += age is not None
            missing += record is None
        elif record is not None and age is not None:
            ages.append(max(0.0, age))
            results = _results(record, policy, digests[policy], question, chosen)
            counts = record.counts if question.everything else ()
        report = NodeReport.of(name, results, groups=groups(name))
        shown = None if age is None or not math.isfinite(age) else round(age, 1)
        nodes.append(replace(report, age_s=shown, counts=counts))
    recorded = Recorded(
        source.shown,
        texts=bool(source.directory),
        believed=len(ages),
        stale=stale,
        missing=missing,
        newest_s=round(min(ages), 1) if ages else None,
        oldest_s=round(max(ages), 1) if ages else None,
    )
    return tuple(nodes), recorded


def _why_not(
    record: HostRecord | None, age: float | None, policy: Policy, source: Source
) -> Result | None:
    """The result in place of a verdict that cannot be believed; None: it can be."""
    max_age_s, fix = policy.gate_max_age_s, _RUN
    if record is None:
        reason = "no verdict is recorded"
        if not policy.gate:
            reason, fix = f"{reason}: its policy has no gate", "gate = True, then nodeready deploy"
        elif source.directory and not policy.gate_directory:
            fix = "gate_directory in its policy, then nodeready deploy"
            reason = f"{reason}: its policy has no gate_directory"
        elif not source.directory and not policy.gate_textfile:
            fix = "gate_textfile in its policy, then nodeready deploy"
            reason = f"{reason}: its policy has no gate_textfile"
    elif record.problem:
        reason = record.problem
        fix = "nodeready audit INVENTORY --limit @last-failed asks the node itself"
    elif age is None or not math.isfinite(age):
        reason = "the time of its verdict is none"
    elif age < -SKEW_S:
        reason = f"its verdict is {span(-age)} ahead of this machine's clock"
        fix = "compare the clocks of both"
    elif age > max_age_s:
        reason = f"its verdict is {span(age)} old: "
        reason += f"it is believed for {span(max_age_s)} (gate_max_age_s)"
    else:
        return None
    owner_word = NODEREADY if "deploy" in fix else ADMIN
    return Result(VERDICT, "unknown", "", reason, "", fix, owner_word)


def _chosen(selection: Selection) -> Callable[[str], bool]:
    """Whether a result of this check is shown; unknown checks are."""
    hidden = {*check_ids(), *(subject.observed.id for subject in SUBJECTS.values())}
    hidden -= {*selection.checks, *(SUBJECTS[name].observed.id for name in selection.subjects)}
    return lambda check: check not in hidden


def _results(
    record: HostRecord,
    policy: Policy,
    own_digest: str,
    question: RecordedQuestion,
    chosen: Callable[[str], bool],
) -> list[Result]:
    """The results of a believed verdict, and a result for each difference of policy or version."""
    results = []
    for result in record.results:
        if result.check in OF_VERDICTS or not chosen(result.check):
            continue
        if result.status == "waived" and result.actual == NO_TEXT:
            (meant,) = waive([replace(result, status="warn")], policy)
            results.append(meant if meant.status == "waived" else replace(result, fix=_WAIVED))
        else:
            results.append(result)
    results.append(ok(VERDICT, f"at most {policy.gate_max_age_s} s old"))
    other = []
    if record.policy_digest != own_digest:
        judged_by = sanitise(record.policy_digest, 40) or "none"
        other.append(fixable(POLICY, f"policy {own_digest}", f"judged by policy {judged_by}"))
    if record.version and record.version != question.version:
        judged_by = sanitise(record.version, 40)
        other.append(
            fixable(BUNDLE, f"nodeready {question.version}", f"judged by nodeready {judged_by}")
        )
    return results + waive(other, policy)


#: In place of the reason of a waiver that this inventory does not have.
_WAIVED = "waived: the node's own policy says why"
