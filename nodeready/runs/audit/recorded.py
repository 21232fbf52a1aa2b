"""The nodes' own last verdicts, collected without a connection to any node.

`nodeready audit --recorded DIRECTORY` reads them (`agent/verdict.py`) from a directory that the
nodes share. A recent verdict is believed; a node without a verdict is unknown, never ok. The node
is identified by the name of the file.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from nodeready.agent.audit_document import STOPPING, NodeReport, Recorded
from nodeready.agent.verdict import NODE, NodeVerdict, Send, gather, parse, read_file
from nodeready.core.policy import Policy, digest
from nodeready.core.result import ADMIN, NODEREADY, Result, shared, waive
from nodeready.core.text import sanitise, span, utc_moment
from nodeready.subjects.gate import checks as gate
from nodeready.subjects.registry import SUBJECTS, CheckSelection, check_ids
from nodeready.subjects.ssh_client.facts import clean_address, clean_name
from nodeready.subjects.ssh_client.known_hosts import Names

# --- A directory: DIRECTORY/NODE.json, written by the node that has this host name.


class HostRecord(NamedTuple):
    host: str  # its name in the directory
    time: float = 0.0  # when the node was judged, in seconds since 1970
    policy_digest: str = ""
    version: str = ""
    results: tuple[Result, ...] = ()
    problem: str = ""  # why there is no verdict, in one line; "": there is one


#: Processes that read a directory with many files: a file server answers each in turn.
_READERS, _FEW = 8, 256


def _send_share(directory: str, number: int, total: int, send: Send) -> None:
    """Send (host, problem, text) for this one of ``total`` shares of the directory's files."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # The directory's owner may write any verdict. An NFS server that maps root to a user
    # (root_squash) makes that user the owner of the directory and the files.
    owners = frozenset({0, os.geteuid(), os.fstat(descriptor).st_uid})
    with os.scandir(descriptor) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".json")]
    for name in names:
        host = name.removesuffix(".json")
        if zlib.crc32(os.fsencode(name)) % total != number or not re.fullmatch(NODE, host):
            continue
        try:
            problem, text = read_file(descriptor, name, owners)
        except FileNotFoundError:
            continue
        except OSError as error:
            problem, text = error.strerror or str(error), b""
        send([host, problem, text.decode("latin-1")])


def _file_record(host: str, problem: str, text: bytes) -> HostRecord:
    if problem:
        return HostRecord(host, problem=f"its file is not read: {problem}")
    verdict = parse(text)
    if verdict is None:
        return HostRecord(host, problem="its file is no verdict that this nodeready can read")
    if verdict.node != host:
        owner_name = sanitise(verdict.node, 80) or "no node"
        return HostRecord(host, problem=f"its file is the verdict of {owner_name}")
    return verdict_record(host, verdict)


def verdict_record(host: str, verdict: NodeVerdict) -> HostRecord:
    if not verdict.version:
        return HostRecord(host, problem="an older nodeready wrote its verdict: deploy the gate")
    listed = map(Result.of, verdict.results)
    ok = (shared(check, "ok") for check in verdict.ok)
    results = (*listed, *ok, *(shared(check, "na") for check in verdict.na))
    if verdict.go is any(result.status in STOPPING for result in results):
        return HostRecord(host, problem="its verdict contradicts its results")
    return HostRecord(host, verdict.time, verdict.policy_digest, verdict.version, results)


def directory_records(directory: str, expected: int, limit_s: float) -> list[HostRecord]:
    """The verdicts in a directory. expected: their rough number. Raises SourceError."""
    total = _READERS if expected > _FEW else 1
    readers = [partial(_send_share, directory, number, total) for number in range(total)]
    rows = gather(readers, limit_s, directory)
    return [_file_record(host, problem, text.encode("latin-1")) for host, problem, text in rows]


# --- From the records of hosts to the reports of nodes.

SKEW_S = 30.0  # seconds by which a node's clock may be ahead of this one's
#: The checks of the verdict itself, of its policy, and of the program that wrote it.
VERDICT, POLICY, BUNDLE = OF_VERDICTS = ("gate.verdict", "gate.policy", "gate.bundle")
_FIX_STALE = "systemctl list-timers nodeready.timer, or is cron running? Then the log of nodeready"


def assign_to_nodes(
    records: Iterable[HostRecord], names: Names
) -> tuple[dict[str, HostRecord], list[str]]:
    """Node of the inventory -> its record, and the hosts that belong to no node.

    A name that the inventory declares for a node takes precedence over a similar name. The newest
    record of a host counts. Several hosts with names similar to one node's are ambiguous.
    """
    similar: dict[str, dict[str, list[HostRecord]]] = {}
    exact: dict[str, list[HostRecord]] = {}
    foreign_hosts = []
    for record in records:
        node, is_declared = owner(names, record.host)
        if is_declared:
            exact.setdefault(node, []).append(record)
        elif node:
            similar.setdefault(node, {}).setdefault(record.host, []).append(record)
        elif not record.problem:
            foreign_hosts.append(record.host)
    record_of = {}
    for node, hosts in similar.items():
        if len(hosts) > 1:
            host_names = ", ".join(sorted(sanitise(host, 80) for host in hosts)[:4])
            problem = f"several hosts may be this node: {host_names}"
            record_of[node] = HostRecord(node, problem=problem)
        else:
            record_of[node] = _newest(*hosts.values())
    record_of |= {node: _newest(candidates) for node, candidates in exact.items()}
    return record_of, sorted(foreign_hosts)


def owner(names: Names, host: str) -> tuple[str, bool]:
    """The only node with this name or address, or ""; whether the inventory declares it."""
    clean = clean_name(host) or clean_address(host)
    if host and host in names.of:
        return host, True
    node = names.owner(clean) if clean else ""
    return node, bool(node) and clean in names.owners


def _newest(records: list[HostRecord]) -> HostRecord:
    good = [record for record in records if not record.problem]
    return max(good, key=lambda record: record.time, default=records[0])


class RecordedQuestion(NamedTuple):
    policies: Mapping[str, Policy]  # node -> its declared policy
    # a declared policy -> the policy by which the node judges itself
    own_policy: Callable[[Policy], Policy]
    selection: CheckSelection
    version: str  # of this nodeready


def reports(
    records: Mapping[str, HostRecord],
    question: RecordedQuestion,
    groups: Callable[[str], Iterable[str]],
    directory: str,
    moment: float,
) -> tuple[tuple[NodeReport, ...], Recorded]:
    policies = {*question.policies.values()}
    digests = {policy: digest([question.own_policy(policy)]) for policy in policies}
    hidden, today = _hidden_checks(question), utc_moment(moment)[:10]
    nodes: list[NodeReport] = []
    ages: list[float] = []
    stale = missing = 0
    for name, policy in question.policies.items():
        record = records.get(name)
        age = None if record is None or record.problem else moment - record.time
        distrust = _distrust(record, age, policy)
        results: list[Result] = []
        if distrust is not None:
            results = [distrust]
            stale += age is not None
            missing += record is None
        elif record is not None and age is not None:
            ages.append(max(0.0, age))
            results = _results(record, policy, digests[policy], question, hidden, today=today)
        report = NodeReport.of(name, map(_rated, results), groups=groups(name))
        shown = None if age is None or not math.isfinite(age) else round(age, 1)
        nodes.append(replace(report, age_s=shown))
    newest_s, oldest_s = (round(min(ages), 1), round(max(ages), 1)) if ages else (None, None)
    counts = len(ages), stale, missing
    recorded = Recorded(directory, True, *counts, newest_s=newest_s, oldest_s=oldest_s)
    return tuple(nodes), recorded


def _distrust(record: HostRecord | None, age: float | None, policy: Policy) -> Result | None:
    """The result instead of a verdict that is not believed; None: it is believed."""
    max_age_s, fix = policy.gate_max_age_s, _FIX_STALE
    if record is None:
        reason = "no verdict is recorded"
        if not policy.gate:
            reason, fix = f"{reason}: its policy has no gate", "gate = True, then nodeready deploy"
        elif not policy.gate_directory:
            fix = "gate_directory in its policy, then nodeready deploy"
            reason = f"{reason}: its policy has no gate_directory"
    elif record.problem:
        reason = record.problem
        fix = "nodeready audit INVENTORY --limit @last-failed asks the node itself"
    elif age is None or not math.isfinite(age):
        reason = "the time of its verdict is none"
    elif age < -SKEW_S:
        reason = f"its verdict is {span(-age)} ahead of this machine's clock"
        fix = "compare the clocks of both"
    elif age > max_age_s:
        limit = f"{span(max_age_s)} (gate_max_age_s)"
        reason = f"its verdict is {span(age)} old: it is believed for {limit}"
    else:
        return None
    owner_word = NODEREADY if "deploy" in fix else ADMIN
    return Result(VERDICT, "unknown", "", reason, "", fix, owner_word)


_PAGES = {page.id: page for s in SUBJECTS.values() for page in (*s.checks, s.observed)}


def _rated(result: Result) -> Result:
    """The result with its severity, which older verdicts have not."""
    page = _PAGES.get(result.check)
    return result if result.severity or page is None else page.rated(result)


def _hidden_checks(question: RecordedQuestion) -> set[str]:
    """The checks whose results are not shown. Unknown checks are shown."""
    selection, ids = question.selection, check_ids(question.policies.values())
    hidden = {*ids, *(subject.observed.id for subject in SUBJECTS.values())}
    observed = (SUBJECTS[name].observed.id for name in selection.subjects)
    return hidden - {*selection.checks, *observed}


def _results(
    record: HostRecord,
    policy: Policy,
    own_digest: str,
    question: RecordedQuestion,
    hidden: set[str],
    *,
    today: str,
) -> list[Result]:
    """The results of a believed verdict, and a result for each difference of policy or version."""
    unshown = hidden.union(OF_VERDICTS)
    results = [result for result in record.results if result.check not in unshown]
    results.append(gate.verdict.ok(expected=f"at most {policy.gate_max_age_s} s old"))
    differences = []
    if record.policy_digest != own_digest:
        judged_by = sanitise(record.policy_digest, 40) or "none"
        row = gate.policy.fixable(f"judged by policy {judged_by}", expected=f"policy {own_digest}")
        differences.append(row)
    if record.version and record.version != question.version:
        judged_by = sanitise(record.version, 40)
        expected = f"nodeready {question.version}"
        row = gate.bundle.fixable(f"judged by nodeready {judged_by}", expected=expected)
        differences.append(row)
    return results + waive(differences, policy, today)
