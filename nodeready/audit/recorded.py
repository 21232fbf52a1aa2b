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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nodeready.audit.document import STOPPING, NodeReport, Recorded
from nodeready.audit.verdict import (
    CHECK,
    LISTED,
    NODE,
    Send,
    SourceError,
    Verdict,
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


class Heard(NamedTuple):
    """What a source holds of one host.

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
    """Reads each file of the directory that falls to this one of so many readers."""

    def read(send: Send) -> None:
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Whoever owns the directory decides what is in it anyway: an NFS server that takes root's
        # files as a user's own (root_squash) makes both that user's.
        owners = frozenset({0, os.geteuid(), os.fstat(at).st_uid})
        with os.scandir(at) as found:
            names = [one.name for one in found if one.name.endswith(".json")]
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


def _of_file(host: str, problem: str, text: bytes) -> Heard:
    """What a file says."""
    if problem:
        return Heard(host, problem=f"its file is not read: {problem}")
    found = parse(text)
    if found is None:
        return Heard(host, problem="its file is no verdict that this nodeready can read")
    if found.node != host:
        whose = sanitise(found.node, 80) or "no node"
        return Heard(host, problem=f"its file is the verdict of {whose}")
    return of_verdict(host, found)


def of_verdict(host: str, found: Verdict) -> Heard:
    """What a verdict says."""
    if not found.version:
        return Heard(host, problem="an older nodeready wrote its verdict: deploy the gate")
    # Healthy nodes say the same: equal results are one object.
    results = (*(Result(**row) for row in found.results), *map(ok, found.ok))
    results = (*results, *(na(check, "") for check in found.na))
    if found.go is any(result.status in STOPPING for result in results):
        return Heard(host, problem="its verdict contradicts its results")
    return Heard(host, found.time, found.policy_digest, found.version, results)


def of_directory(directory: str, expected: int, limit_s: float) -> list[Heard]:
    """The verdicts in a directory. expected: how many, about. Raises SourceError."""
    total = _READERS if expected > _FEW else 1
    works = [_reader(directory, number, total) for number in range(total)]
    found = []
    for host, problem, text in gather(works, limit_s, directory):
        found.append(_of_file(host, problem, text.encode("latin-1")))
    return found


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
    wanted = "".join(f",{label}={json.dumps(text, ensure_ascii=False)}" for label, text in labels)
    named = f'__name__=~"nodeready_({"|".join(_METRICS)})"'
    return (
        f"{{{named}{wanted}}} or (nodeready_node_results{{{wanted[1:]}}} > 0)",
        f"up{{{wanted[1:]}}} and on (job) "
        f"count by (job) (nodeready_audit_timestamp_seconds{{{wanted[1:]}}})",
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

            def redirect_request(self, req: Any, fp: Any, code: int, *more: Any) -> None:
                where = sanitise(redact("", str(more[-1])), 200).partition("?")[0]
                raise SourceError(f"{source.shown}: leads to {where}: name that, if it is right")

        opener = urllib.request.build_opener(Here)
        for number, query in enumerate(queries(source.labels)):
            words = urlencode({"query": query, "timeout": f"{limit_s:g}s"})
            request = urllib.request.Request(f"{source.url}/api/v1/query?{words}")
            request.add_header("Accept", "application/json")
            if source.header:
                request.add_unredirected_header("Authorization", source.header)
            try:
                with opener.open(request, timeout=limit_s) as answer:
                    left = MAX_ANSWER
                    while data := answer.read1(1 << 16):
                        left -= len(data)
                        if left < 0:
                            raise SourceError(
                                f"{source.shown}: answers more than {MAX_ANSWER >> 20} MiB"
                            )
                        send([number, data.decode("latin-1")])
            except urllib.error.HTTPError as error:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    raise SourceError(_refusal(source, error.code, error.read(4096))) from None
                raise SourceError(f"{source.shown}: HTTP {error.code}") from None
            except urllib.error.URLError as error:
                why = getattr(error.reason, "strerror", None) or error.reason
                raise SourceError(f"{source.shown}: {sanitise(str(why), 300)}") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise SourceError(f"{source.shown}: {sanitise(str(why), 300)}") from None

    return ask


def _refusal(source: Source, code: int, body: bytes) -> str:
    """A status of HTTP that is none of success, with Prometheus's own words where there are."""
    try:
        said = sanitise(str(json.loads(body)["error"]), 300)
    except (ValueError, TypeError, KeyError, RecursionError):
        said = {
            401: "wants a user or a token (--token-file)",
            403: "refuses this user or token",
            404: "has no /api/v1/query: is there a prefix in its address?",
        }.get(code, "no Prometheus answers there")
    return f"{source.shown}: HTTP {code}: {said}"


Sample = tuple[dict[str, str], str]


class _Answer:
    """The samples of an answer while it comes: a large one is never there as a whole."""

    def __init__(self, shown: str) -> None:
        self.shown, self.warnings = shown, False
        self._text = ""
        self._head: str | None = None
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._json = json.JSONDecoder()
        self._over = False

    def take(self, data: bytes) -> Iterator[Sample]:
        """The samples that are whole now. Raises SourceError for what is none."""
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
                found, end = self._json.raw_decode(self._text, at)
            except (ValueError, RecursionError):
                break
            yield self._sample(found)
            at = end
        self._text = self._text[at:]
        self._bounded(_AROUND if self._over else _SERIES)

    def _bounded(self, most: int) -> None:
        if len(self._text) > most:
            raise SourceError(f"{self.shown}: its answer is none of Prometheus's")

    def _sample(self, found: Any) -> Sample:
        try:
            labels, (_, value) = found["metric"], found["value"]
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


#: The labels that our metrics have of their own; the others are the target's.
_OURS = frozenset({"check", "status", "node", "policy_digest", "version"})
_NO_TARGET = frozenset(
    {"__name__", "job", "instance", *_OURS, *(f"exported_{label}" for label in _OURS)}
)


def _own(labels: Mapping[str, str], label: str) -> str:
    """A label of ours. Where the target has one of this name, Prometheus renames ours."""
    return labels.get(f"exported_{label}", labels.get(label, ""))


@dataclass
class _Target:
    """What the metrics of one target say.

    nodes:  of whom they speak: a textfile of a gate speaks of one
    found:  (check, status)
    """

    time: float | None = None
    policy_digest: str = ""
    version: str = ""
    complete: bool = True
    nodes: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    found: set[tuple[str, str]] = field(default_factory=set)

    def take(self, labels: Mapping[str, str], value: float) -> None:
        name = labels.get("__name__", "").partition("nodeready_")[2]
        if name == "audit_timestamp_seconds":
            self.time = value
        elif name == "audit_info":
            self.policy_digest = _own(labels, "policy_digest")
        elif name == "build_info":
            self.version = _own(labels, "version")
        elif name == "audit_complete":
            self.complete = value == 1
        elif name in ("check_status", "node_results"):
            self.nodes.add(_own(labels, "node"))
            status = _own(labels, "status")
            if name == "node_results":
                # No comparison holds for what is no number.
                self.counts[status] = int(min(value, _MOST_RESULTS)) if value > 0 else 0
            elif len(self.found) < _MOST_RESULTS:
                self.found.add((_own(labels, "check"), status))

    def heard(self, host: str, labels: Iterable[tuple[str, str]]) -> Heard:
        """What that says. labels: of the target, beside job and instance."""
        if self.time is None:
            return Heard(host, problem="its metrics have no time of a verdict")
        if len(self.nodes) > 1:
            return Heard(host, problem=f"its metrics are of {len(self.nodes)} nodes: an audit's")
        sound = all(CHECK.fullmatch(check) and status in LISTED for check, status in self.found)
        came = {status: sum(one == status for _, one in self.found) for status in LISTED}
        whole = all(self.counts.get(status, 0) == came[status] for status in LISTED)
        problem = "" if self.complete else "its look was interrupted"
        if not (sound and whole and self.counts):
            problem = "its metrics are not whole"
        results = tuple(
            Result(check, status, actual=NO_TEXT) for check, status in sorted(self.found)
        )
        counts = tuple((one, self.counts.get(one, 0)) for one in ("ok", "na"))
        # Two Prometheus that watch the same targets are replicas.
        apart = tuple(pair for pair in labels if "replica" not in pair[0])
        said = (self.time, self.policy_digest, self.version, results)
        return Heard(host, *said, counts=counts, problem=problem, labels=apart)


def host_of(instance: str) -> str:
    """The host of an ``instance``: ``gpu001:9100``, ``[fd00::1]:9100``, an address."""
    match = re.fullmatch(_INSTANCE, instance)
    return (match[1] or match[2]) if match else instance


def of_prometheus(
    source: Source, names: Callable[[str], str], limit_s: float
) -> tuple[list[Heard], bool]:
    """The verdicts that Prometheus has, and whether it says that its answer is partial.

    names: the node of a host's name, or ""
    Raises SourceError.
    """
    answers = [_Answer(source.shown), _Answer(source.shown)]
    targets: dict[tuple[tuple[str, str], Any], _Target] = {}
    named: dict[tuple[str, str], tuple[str, bool]] = {}
    for number, data in gather([_asker(source, limit_s)], limit_s, source.shown, None):
        for labels, text in answers[number].take(data.encode("latin-1")):
            key = (labels.get("job", ""), labels.get("instance", ""))
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if number == 0:
                more = tuple(sorted(pair for pair in labels.items() if pair[0] not in _NO_TARGET))
                targets.setdefault((key, more), _Target()).take(labels, value)
            else:
                hosts = [host_of(key[1]), *(labels.get(label, "") for label in NAMING)]
                host = next((one for one in hosts if one and names(one)), hosts[0])
                named[key] = (host, value == 1)
    for answer in answers:
        answer.end()
    found = [
        target.heard(named[key][0] if key in named else host_of(key[1]), more)
        for (key, more), target in targets.items()
    ]
    told = {one.host for one in found}
    for (_, instance), (host, up) in named.items():
        if not up and host not in told:
            problem = f"Prometheus does not reach {sanitise(instance, 80)}"
            found.append(Heard(host, problem=problem))
    return found, any(answer.warnings for answer in answers)


# --- From what was heard to the reports of the nodes.

#: Seconds by which a node's clock may be ahead of this one's.
SKEW_S = 30.0
#: The check that says whether there is a verdict, and those that say by what it was judged.
VERDICT, POLICY, BUNDLE = OF_VERDICTS = ("gate.verdict", "gate.policy", "gate.bundle")
_RUN = "systemctl list-timers nodeready.timer, or is cron running? Then the log of nodeready"


def sorted_out(heard: Iterable[Heard], names: Names) -> tuple[dict[str, Heard], list[str]]:
    """What was heard, by the node of the inventory, and the hosts that are none of its nodes.

    A name that the inventory itself gives to the node comes before one that only resembles it. Of
    what one host says, the newest counts; hosts that have several names and resemble one node are
    none of them.
    """
    alike: dict[str, dict[str, list[Heard]]] = {}
    exact: dict[str, list[Heard]] = {}
    strangers = []
    for one in heard:
        node, given = owner(names, one.host)
        if given:
            exact.setdefault(node, []).append(one)
        elif node:
            alike.setdefault(node, {}).setdefault(one.host, []).append(one)
        elif not one.problem:
            strangers.append(one.host)
    found = {}
    for node, hosts in alike.items():
        found[node] = _one_of(next(iter(hosts.values())))
        if len(hosts) > 1:
            told = ", ".join(sorted(sanitise(one, 80) for one in hosts)[:4])
            found[node] = Heard(node, problem=f"several hosts may be this node: {told}")
    return {**found, **{node: _one_of(said) for node, said in exact.items()}}, sorted(strangers)


def owner(names: Names, host: str) -> tuple[str, bool]:
    """The node that has this name or address, and whether the inventory itself says so.

    ("", False): none has it, or several have
    """
    clean = clean_name(host) or clean_address(host)
    if host and host in names.of:
        return host, True
    node = names.owner(clean) if clean else ""
    return node, bool(node) and clean in names.given


def _one_of(said: list[Heard]) -> Heard:
    """What one host says: its newest verdict, if there is one and they are one host's."""
    good = [one for one in said if not one.problem]
    if len({one.labels for one in good}) > 1:
        first, *rest = [{*one.labels} for one in good]
        apart = {label for label, _ in first.union(*rest) - first.intersection(*rest)}
        told = sanitise(", ".join(sorted(apart)), 200)
        return Heard(said[0].host, problem=f"several targets may be this node: {told} differs")
    return max(good, key=lambda one: one.time, default=said[0])


def collect(
    source: Source, names: Names, expected: int, limit_s: float
) -> tuple[list[Heard], bool]:
    """What the source holds, and whether it says itself that this is not all.

    expected: how many verdicts, about. Raises SourceError.
    """
    if source.directory:
        return of_directory(source.directory, expected, limit_s), False
    return of_prometheus(source, lambda host: owner(names, host)[0], limit_s)


class Asked(NamedTuple):
    """What verdicts are judged by.

    policies:   node -> its policy as it is declared
    own:        a declared policy -> the one by which the node judges itself
    selection:  the checks
    everything: the selection leaves no check out
    version:    of this nodeready
    """

    policies: Mapping[str, Policy]
    own: Callable[[Policy], Policy]
    selection: Selection
    everything: bool
    version: str


def reports(
    found: Mapping[str, Heard],
    asked: Asked,
    groups: Callable[[str], Iterable[str]],
    source: Source,
    now: float,
) -> tuple[tuple[NodeReport, ...], Recorded]:
    """The reports of the nodes by what was heard of them, and what is said about all of them."""
    digests = {policy: digest([asked.own(policy)]) for policy in {*asked.policies.values()}}
    chosen = _chosen(asked.selection)
    nodes: list[NodeReport] = []
    ages: list[float] = []
    stale = missing = 0
    for name, policy in asked.policies.items():
        one = found.get(name)
        age = None if one is None or one.problem else now - one.time
        why = _why_not(one, age, policy, source)
        counts: tuple[tuple[str, int], ...] = ()
        results: list[Result] = []
        if why is not None:
            results = [why]
            stale += age is not None
            missing += one is None
        elif one is not None and age is not None:
            ages.append(max(0.0, age))
            results = _results(one, policy, digests[policy], asked, chosen)
            counts = one.counts if asked.everything else ()
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
    one: Heard | None, age: float | None, policy: Policy, source: Source
) -> Result | None:
    """What stands in place of a verdict that cannot be believed; None: it can."""
    most, fix = policy.gate_max_age_s, _RUN
    if one is None:
        why = "no verdict is recorded"
        if not policy.gate:
            why, fix = f"{why}: its policy has no gate", "gate = True, then nodeready deploy"
        elif source.directory and not policy.gate_directory:
            fix = "gate_directory in its policy, then nodeready deploy"
            why = f"{why}: its policy has no gate_directory"
        elif not source.directory and not policy.gate_textfile:
            fix = "gate_textfile in its policy, then nodeready deploy"
            why = f"{why}: its policy has no gate_textfile"
    elif one.problem:
        why = one.problem
        fix = "nodeready audit INVENTORY --limit @last-failed asks the node itself"
    elif age is None or not math.isfinite(age):
        why = "the time of its verdict is none"
    elif age < -SKEW_S:
        why = f"its verdict is {span(-age)} ahead of this machine's clock"
        fix = "compare the clocks of both"
    elif age > most:
        why = f"its verdict is {span(age)} old: it is believed for {span(most)} (gate_max_age_s)"
    else:
        return None
    who = NODEREADY if "deploy" in fix else ADMIN
    return Result(VERDICT, "unknown", "", why, "", fix, who)


def _chosen(selection: Selection) -> Callable[[str], bool]:
    """Whether a result of this check is shown. What this nodeready does not know is."""
    hidden = {*check_ids(), *(subject.observed.id for subject in SUBJECTS.values())}
    hidden -= {*selection.checks, *(SUBJECTS[name].observed.id for name in selection.subjects)}
    return lambda check: check not in hidden


def _results(
    one: Heard, policy: Policy, own: str, asked: Asked, chosen: Callable[[str], bool]
) -> list[Result]:
    """The results of a verdict that is believed, and by what it was judged where that differs."""
    found = []
    for result in one.results:
        if result.check in OF_VERDICTS or not chosen(result.check):
            continue
        if result.status == "waived" and result.actual == NO_TEXT:
            (meant,) = waive([replace(result, status="warn")], policy)
            found.append(meant if meant.status == "waived" else replace(result, fix=_WAIVED))
        else:
            found.append(result)
    found.append(ok(VERDICT, f"at most {policy.gate_max_age_s} s old"))
    other = []
    if one.policy_digest != own:
        said = sanitise(one.policy_digest, 40) or "none"
        other.append(fixable(POLICY, f"policy {own}", f"judged by policy {said}"))
    if one.version and one.version != asked.version:
        said = sanitise(one.version, 40)
        other.append(fixable(BUNDLE, f"nodeready {asked.version}", f"judged by nodeready {said}"))
    return found + waive(other, policy)


#: In place of the reason of a waiver that this inventory does not have.
_WAIVED = "waived: the node's own policy says why"
