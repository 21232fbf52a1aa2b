"""Verdicts that nodes gave themselves: whose they are, how old, and what is never believed."""

import json
import os
import time
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from nodeready import __version__
from nodeready.agent import verdict as verdicts
from nodeready.agent.verdict import NodeVerdict, gather, parse
from nodeready.core.policy import Policy, digest
from nodeready.core.result import Result
from nodeready.core.settings import Waiver
from nodeready.reports.schema import schema
from nodeready.runs.audit import recorded
from nodeready.runs.audit.recorded import HostRecord, RecordedQuestion
from nodeready.subjects.gate.files import node_policy
from nodeready.subjects.registry import page, select
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names
from tests.builders.fleets import HOSTILE
from tests.builders.results import fail, na, ok, unknown, warn
from tests.cases import with_table

POLICY = Policy(gate=True, gate_directory="/srv/nodeready")
DIGEST = digest([node_policy(POLICY)])
SCOPE = fail("ptrace.scope", "0", "1", "/etc/sysctl.d/10-ptrace.conf:3", "set it")
WELL = [ok("limits.core", "unlimited"), na("iommu.args", "no GPU")]
RESULTS = [*WELL, SCOPE]
NAMES = ("gpu001", "gpu002", "gpu003")
NOT_RECORDED = "no verdict is recorded"


def verdict(name: str = "gpu001", results: Any = RESULTS, age_s: float = 12.0) -> NodeVerdict:
    stop = tuple(f"{entry.check}: x" for entry in results if entry.status in ("fail", "unknown"))
    now = time.time() - age_s
    made = NodeVerdict(now, "boot", DIGEST, not stop, stop, node=name, version=__version__)
    return replace(made, **verdicts.listed_fields(results))


def question(policy: Policy = POLICY, only: str | None = None) -> RecordedQuestion:
    policies = dict.fromkeys(NAMES, policy)
    return RecordedQuestion(policies, node_policy, select((), only), __version__)


def judged(records: list[HostRecord], want: RecordedQuestion | None = None) -> Any:
    """node -> its report; and about all of them."""
    want = want or question()
    by_node, _ = recorded.assign_to_nodes(records, Names(dict.fromkeys(want.policies, Endpoint())))
    nodes, about = recorded.reports(by_node, want, lambda _: (), "/srv/nodeready", time.time())
    return {node.name: node for node in nodes}, about


def judged_verdict(made: NodeVerdict, want: RecordedQuestion | None = None) -> Any:
    node = judged([recorded.verdict_record("gpu001", made)], want)[0]["gpu001"]
    return node, {result.check: result for result in node.results}


def why(node: Any) -> str:
    """Why the node's verdict is not believed: it is unknown, and nothing else is reported."""
    (result,) = node.results
    assert (node.status, result.check, result.status) == ("unknown", "gate.verdict", "unknown")
    return str(result.actual)


# --- What a node writes.


def test_a_written_verdict_is_read_with_its_texts():
    written = verdict()
    read = parse(written.text().encode())
    assert read == replace(written, time=round(written.time, 3))
    records = [recorded.verdict_record("gpu001", read) for _ in range(2)]
    assert not records[0].problem
    results = sorted(records[0].results, key=lambda entry: entry.check)
    assert results == [Result("iommu.args", "na"), ok("limits.core"), SCOPE]
    # Of ten thousand healthy nodes, the results are few objects.
    pairs = list(zip(*(entry.results for entry in records), strict=True))
    assert all(a is b for a, b in pairs if a.status != "fail")
    old = recorded.verdict_record("gpu001", replace(read, version=""))
    assert "older nodeready" in old.problem


def test_no_status_is_lost_however_long_the_texts_are():
    results = [fail(f"a.b{n}", HOSTILE * 30, "\U0001f525" * 4000, "s", "f") for n in range(90)]
    results += [unknown("a.late", "hung"), warn("a.warned", "x", "y" * 5000)]
    text = verdict(results=results).text().encode()
    assert len(text) < verdicts.MAX_BYTES
    records = recorded.verdict_record("gpu001", parse(text))
    statuses = {entry.check: entry.status for entry in records.results}
    assert statuses == {entry.check: entry.status for entry in results}
    assert verdicts.LEFT_OUT in {entry.actual for entry in records.results}
    assert "\x1b" not in json.dumps(text.decode()) + str(records.results[0].expected)


def test_a_machine_of_the_same_name_is_noticed(tmp_path):
    path, now = tmp_path / "gpu001.json", time.time()
    ours = replace(verdict(), time=now, boot_id="ours")
    assert verdicts.twin(path, ours, 900, 1e6) is None
    for age, boot, uptime, is_twin in (
        (60, "another", 1e6, True),
        (60, "ours", 1e6, False),  # our own last one
        (60, "another", 30, False),  # from before our boot
        (1000, "another", 1e6, False),  # it is gone for long
    ):
        path.write_text(replace(verdict(), time=now - age, boot_id=boot).text())
        assert (verdicts.twin(path, ours, 900, uptime) is not None) is is_twin, (age, boot, uptime)


# --- A directory.

GOOD = verdict().text()
GO = GOOD.replace('"go": false', '"go": true').replace('["ptrace.scope: x"]', "[]")
FILES = {
    "another's": (verdict("gpu002").text(), "is the verdict of gpu002"),
    "nobody's": (GOOD.replace('"gpu001"', '""'), "is the verdict of no node"),
    "huge": (GOOD + " " * verdicts.MAX_BYTES, "larger than a verdict"),
    "go, with a failure": (GO, "contradicts"),
    "no verdict": (GOOD[:-9], "no verdict"),
    "others can write it": (GOOD, "others can write it"),
    "a link": (GOOD, "no regular file"),
    "a pipe": ("", "no regular file"),
    "a directory": ("", "no regular file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_verdict_makes_its_own_node_unknown(name, tmp_path):
    text, reason = FILES[name]
    path = tmp_path / "gpu001.json"
    path.write_text(text)
    if name == "others can write it":
        path.chmod(0o666)
    elif name == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif reason == "no regular file":
        path.unlink()
        (os.mkfifo if name == "a pipe" else os.mkdir)(path)
    (tmp_path / "gpu002.json").write_text(verdict("gpu002", WELL).text())
    nodes, about = judged(recorded.directory_records(str(tmp_path), 3, 60))
    assert reason in why(nodes["gpu001"])
    assert nodes["gpu001"].age_s is None
    assert nodes["gpu002"].status == "ok"
    assert why(nodes["gpu003"]) == NOT_RECORDED
    assert (about.believed, about.stale, about.missing) == (1, 0, 1)


SPOILED = (None, True, -1, 10**400, 1e308, "x" * 9000, [], {}, [[]] * 9, {"a": 1}, "\x1b[2J\n")


def test_no_poisoned_field_makes_a_node_well_or_costs_another(tmp_path):
    """Each field of a verdict and of its results; and JSON that is deep, doubled or none."""
    texts = ["[" * 60_000, '{"a":' * 9000, "null", "\0" * 500, GOOD[:-2] + ', "node": "gpu002"}']
    for value in SPOILED:
        texts += [json.dumps({**json.loads(GOOD), key: value}) for key in json.loads(GOOD)]
        for key in json.loads(GOOD)["results"][0]:
            poisoned = json.loads(GOOD)
            poisoned["results"][0][key] = value
            texts.append(json.dumps(poisoned))
    (tmp_path / "gpu002.json").write_text(verdict("gpu002", WELL).text())
    for text in texts:
        (tmp_path / "gpu001.json").write_text(text)
        nodes, _ = judged(recorded.directory_records(str(tmp_path), 3, 60))
        assert nodes["gpu001"].status != "ok", text[:2000]
        assert nodes["gpu002"].status == "ok", text[:2000]


def test_a_file_of_another_user_is_not_read(tmp_path):
    (tmp_path / "gpu001.json").write_text(GOOD)
    directory = os.open(tmp_path, os.O_RDONLY)
    problem, text = verdicts.read_file(directory, "gpu001.json", frozenset({os.geteuid() + 1}))
    os.close(directory)
    assert ("belongs to uid" in problem, text) == (True, b"")


def test_each_file_of_a_node_is_read_once_and_others_are_passed_over(tmp_path):
    for name in (".gpu001.json.0a1b2c3d", "-x.json", "gpu001.json.bak", "\x1b[31m.json", "README"):
        (tmp_path / name).write_text(GOOD)
    assert recorded.directory_records(str(tmp_path), 3, 60) == []
    names = [f"n{number:04d}" for number in range(600)]
    for name in names:
        (tmp_path / f"{name}.json").write_text(verdict(name).text())
    records = recorded.directory_records(str(tmp_path), 600, 60)
    assert sorted(entry.host for entry in records) == names


def test_a_directory_that_is_none_and_a_reader_that_hangs_or_dies_are_one_line(tmp_path):
    with pytest.raises(verdicts.SourceError, match=r"No such file or directory: .*nosuch"):
        recorded.directory_records(str(tmp_path / "nosuch"), 3, 60)
    with pytest.raises(verdicts.SourceError, match="Not a directory"):
        recorded.directory_records(__file__, 3, 60)
    with pytest.raises(verdicts.SourceError, match=r"^/srv/x: no answer within 0\.2 s$"):
        list(gather([lambda send: os.read(os.pipe()[0], 1), lambda send: None], 0.2, "/srv/x"))
    with pytest.raises(verdicts.SourceError, match="reader was ended"):
        list(gather([lambda send: os.kill(os.getpid(), 9)], 60, "/srv/x"))


# --- Ages, and by what it was judged.


def test_only_a_young_verdict_is_believed():
    ages = {"gpu001": 899, "gpu002": 3720, "gpu003": -300}
    verdicts = {name: verdict(name, age_s=age) for name, age in ages.items()}
    records = [*map(recorded.verdict_record, verdicts, verdicts.values())]
    nodes, about = judged(records)
    assert nodes["gpu001"].status == "fail"
    words = "its verdict is 1 h 2 min old: it is believed for 15 min (gate_max_age_s)"
    assert why(nodes["gpu002"]) == words
    assert "ahead of this machine's clock" in why(nodes["gpu003"])
    assert [round(node.age_s) for node in nodes.values()] == [*ages.values()]
    assert (about.believed, about.stale, about.missing) == (1, 2, 0)
    # The node's own policy has the maximum.
    nodes, _ = judged(records[:1], question(replace(POLICY, gate_max_age_s=60)))
    assert "believed for 1 min" in why(nodes["gpu001"])
    assert why(judged_verdict(verdict(age_s=901))[0])
    # Clocks may differ by seconds.
    nodes, about = judged([recorded.verdict_record("gpu001", verdict(age_s=5 - recorded.SKEW_S))])
    assert (nodes["gpu001"].status, about.newest_s) == ("fail", 0)
    assert why(judged_verdict(verdict(age_s=-recorded.SKEW_S - 1))[0])
    for moment in (float("nan"), float("inf"), float("-inf")):
        nodes, _ = judged([HostRecord("gpu001", moment, DIGEST)])
        assert why(nodes["gpu001"])
        assert nodes["gpu001"].age_s is None


def test_another_policy_or_version_fails_beside_the_results():
    other = replace(verdict(), policy_digest="0123456789abcdef", version="0.0.9")
    _, results = judged_verdict(other)
    # An older nodeready wrote it: the severity is this one's.
    assert results["ptrace.scope"] == page("ptrace.scope").rated(SCOPE)
    assert results["gate.policy"].actual == "judged by policy 0123456789abcdef"
    assert results["gate.bundle"].actual == "judged by nodeready 0.0.9"
    assert (results["gate.policy"].status, results["gate.policy"].owner) == ("fail", "nodeready")
    waived = replace(POLICY, waivers=(Waiver("gate.policy", "soon"),))
    assert judged_verdict(other, question(waived))[1]["gate.policy"].fix == "waived: soon"
    # The fleet's host keys make no other policy.
    keys = replace(POLICY, ssh_known_hosts=("login ssh-ed25519 AAAA",))
    assert "gate.policy" not in judged_verdict(verdict(), question(keys))[1]


def test_a_node_does_not_judge_the_age_and_policy_of_its_own_verdict():
    liar = verdict(results=[*WELL, ok("gate.policy"), warn("gate.verdict", "", "x")])
    _, results = judged_verdict(replace(liar, policy_digest="another"))
    assert (results["gate.verdict"].status, results["gate.policy"].status) == ("ok", "fail")


def test_only_leaves_out_other_checks_but_no_unknown_check():
    newer = fail("quantum.flux", "0", "1")
    _, results = judged_verdict(verdict(results=[*RESULTS, newer]), question(only="limits"))
    assert list(results) == ["quantum.flux", "limits.core", "gate.verdict"]
    nodes, _ = judged([], question(only="limits"))
    assert why(nodes["gpu001"]) == NOT_RECORDED


def test_a_node_without_a_verdict_says_what_is_missing():
    for policy, reason in (
        (Policy(), "its policy has no gate"),
        (Policy(gate=True), "its policy has no gate_directory"),
        (POLICY, "recorded"),
    ):
        nodes, _ = judged([], question(policy))
        assert why(nodes["gpu001"]).endswith(reason)


# --- The whole way, with the command.


def test_the_command_says_which_nodes_are_well_and_how_old_that_is(tool, tmp_path):
    ages = {"gpu001": 12, "gpu002": 250, "gpu003": 7200}
    for name, age in ages.items():
        text = verdict(name, RESULTS if name == "gpu002" else WELL, age).text()
        (tmp_path / f"{name}.json").write_text(text)
    inventory = tmp_path / "x.py"
    data = {"gate": True, "gate_directory": "/srv/nodeready"}
    inventory.write_text(f"gpu = ({[*ages, 'gpu004']!r}, {data!r})\n")
    words = ("audit", inventory, "--recorded", tmp_path)
    done = tool(*words)
    assert done.status == 3, done
    assert "recorded: 2 nodes of 4" in done.out
    assert "; 1 stale, 1 without a verdict" in done.out
    # The three that failed in the first run are still those that failed.
    assert "3 nodes: " in tool(*words, "--limit", "@last-failed").out
    quiet = tool(*words, "--limit", "gpu001", "-q")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", ""), quiet
    shown = json.loads(tool(*words, "--format", "json").out)
    jsonschema.Draft202012Validator(schema("audit")).validate(shown)
    assert [node.get("age_seconds") is None for node in shown["nodes"]] == [False] * 3 + [True]


@with_table("words, status, reason")
def test_a_bad_source_or_option_is_one_line(words, status, reason, tool, tmp_path):
    place = "http://u:secret@127.0.0.1:1" if not words else str(tmp_path)
    done = tool("audit", "gpu001", *words.split(), env={"NODEREADY_AUDIT_RECORDED": place})
    assert (done.status, done.out) == (status, ""), done
    assert reason in done.lines[0]
    assert status == 2 or len(done.lines) == 1
    assert "secret" not in done.err
