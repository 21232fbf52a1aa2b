"""Verdicts that nodes gave themselves: whose they are, how old, and what is never believed."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import pytest

from nodeready import __version__
from nodeready.audit import recorded
from nodeready.audit.recorded import Asked, Heard, source
from nodeready.audit.verdict import (
    LEFT_OUT,
    MAX_BYTES,
    Say,
    SourceError,
    Verdict,
    beside,
    content,
    parse,
    told,
    twin,
)
from nodeready.policy import Policy
from nodeready.policy.policy import digest
from nodeready.reports.monitoring import prometheus
from nodeready.reports.schema import schema
from nodeready.subjects.gate.files import own
from nodeready.subjects.registry import select
from nodeready.subjects.result import Result, fail, na, ok, unknown, warn
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names
from tests.builders.fleets import HOSTILE, fleet, outcomes

POLICY = Policy(gate=True, gate_directory="/srv/nodeready")
SCOPE = fail("ptrace.scope", "0", "1", "/etc/sysctl.d/10-ptrace.conf:3", "set it")
RESULTS = [ok("limits.core", "unlimited"), na("iommu.args", "no GPU"), SCOPE]
NAMES = ("gpu001", "gpu002", "gpu003")


def verdict(name: str = "gpu001", results: Any = RESULTS, age_s: float = 12.0) -> Verdict:
    stop = [f"{one.check}: x" for one in results if one.status in ("fail", "unknown")]
    return Verdict(
        *(time.time() - age_s, "boot", digest([own(POLICY)]), not stop, tuple(stop)),
        node=name,
        version=__version__,
        **told(results),
    )


def asked(policy: Policy = POLICY, names: Any = NAMES, only: str | None = None) -> Asked:
    return Asked(dict.fromkeys(names, policy), own, select(only), only is None, __version__)


def judged(heard: list[Heard], want: Asked | None = None, at: str = "/srv/nodeready") -> Any:
    """node -> its report; and about all of them."""
    want = want or asked()
    found, _ = recorded.sorted_out(heard, Names(dict.fromkeys(want.policies, Endpoint())))
    nodes, about = recorded.reports(found, want, lambda _: (), source(at), time.time())
    return {node.name: node for node in nodes}, about


def why(node: Any) -> str:
    """Why the node's verdict is not believed: it is unknown, and says nothing else."""
    (result,) = node.results
    assert (node.status, result.check, result.status) == ("unknown", "gate.verdict", "unknown")
    return str(result.actual)


# --- What a node writes.


def test_what_is_written_is_heard_with_its_texts():
    written = verdict()
    read = parse(written.text().encode())
    assert read == replace(written, time=round(written.time, 3))
    heard = recorded.of_verdict("gpu001", read)
    assert not heard.problem
    assert sorted(heard.results, key=lambda one: one.check) == [
        Result("iommu.args", "na"),
        ok("limits.core"),
        SCOPE,
    ]


def test_no_status_is_lost_however_long_the_texts_are():
    results = [fail(f"a.b{n}", HOSTILE * 30, "\U0001f525" * 4000, "s", "f") for n in range(90)]
    results += [unknown("a.late", "hung"), warn("a.warned", "x", "y" * 5000)]
    text = verdict(results=results).text().encode()
    assert len(text) < MAX_BYTES
    heard = recorded.of_verdict("gpu001", parse(text))
    statuses = {one.check: one.status for one in heard.results}
    assert statuses == {one.check: one.status for one in results}
    assert LEFT_OUT in {one.actual for one in heard.results}
    assert "\x1b" not in json.dumps(text.decode()) + str(heard.results[0].expected)


def test_one_without_results_is_that_of_an_older_nodeready():
    old = Verdict(time.time(), "boot", digest([own(POLICY)]), True)
    assert parse(old.text().encode()) == replace(old, time=round(old.time, 3))
    assert "older nodeready" in recorded.of_verdict("gpu001", old).problem


def test_a_machine_of_the_same_name_is_noticed_and_a_reboot_is_none(tmp_path):
    path, now = tmp_path / "gpu001.json", time.time()
    ours = replace(verdict(), time=now, boot_id="ours")
    assert twin(path, ours, 900, 1e6) is None
    for age, boot, uptime, twins in (
        (60, "another", 1e6, True),
        (60, "ours", 1e6, False),  # our own last one
        (60, "another", 30, False),  # from before our boot
        (1000, "another", 1e6, False),  # it is gone for long
    ):
        path.write_text(replace(verdict(), time=now - age, boot_id=boot).text())
        assert (twin(path, ours, 900, uptime) is not None) is twins, (age, boot, uptime)


# --- A directory.


def place(directory: Path, what: str) -> None:
    """Make gpu001.json what it must not be."""
    path, good = directory / "gpu001.json", verdict().text()
    (directory / "elsewhere").write_text(good)
    path.unlink(missing_ok=True)
    if what == "a link":
        path.symlink_to(directory / "elsewhere")
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    else:
        path.write_text(
            {
                "nothing": "",
                "no JSON": good[:-9],
                "another's": verdict("gpu002").text(),
                "nobody's": good.replace('"gpu001"', '""'),
                "huge": good + " " * MAX_BYTES,
                "deep": "[" * 60_000,
                "another schema": good.replace("verdict/1", "verdict/2"),
                "a number without end": good.replace('"time": ', '"time": 1' + "0" * 400),
                "no time": good.replace('"time": ', '"time": -'),
                "a status that is none": good.replace('"fail"', '"good"'),
                "go, and why not": good.replace('"go": false', '"go": true'),
                "go, without a reason": good.replace('"go": false', '"go": true').replace(
                    '["ptrace.scope: x"]', "[]"
                ),
                "others can write it": good,
            }[what]
        )
        if what.startswith("others"):
            path.chmod(0o666)


HOSTILES = {
    "a link": "no regular file",
    "a pipe": "no regular file",
    "a directory": "no regular file",
    "nothing": "no verdict",
    "no JSON": "no verdict",
    "another's": "is the verdict of gpu002",
    "nobody's": "is the verdict of no node",
    "huge": "larger than a verdict",
    "deep": "no verdict",
    "another schema": "no verdict",
    "a number without end": "no verdict",
    "no time": "no verdict",
    "a status that is none": "no verdict",
    "go, and why not": "no verdict",
    "go, without a reason": "contradicts",
    "others can write it": "others can write it",
}


@pytest.mark.parametrize("what", HOSTILES)
def test_a_file_that_is_no_verdict_makes_its_own_node_unknown(what, tmp_path):
    place(tmp_path, what)
    (tmp_path / "gpu002.json").write_text(verdict("gpu002", RESULTS[:2]).text())
    nodes, about = judged(recorded.of_directory(str(tmp_path), 3, 20))
    assert HOSTILES[what] in why(nodes["gpu001"])
    assert nodes["gpu001"].age_s is None
    assert nodes["gpu002"].status == "ok"
    assert why(nodes["gpu003"]) == "no verdict is recorded"
    assert (about.believed, about.stale, about.missing) == (1, 0, 1)


def test_a_file_of_somebody_elses_is_not_read(tmp_path):
    (tmp_path / "gpu001.json").write_text(verdict().text())
    at = os.open(tmp_path, os.O_RDONLY)
    try:
        problem, text = content(at, "gpu001.json", frozenset({os.geteuid() + 1}))
    finally:
        os.close(at)
    assert "belongs to uid" in problem
    assert text == b""


def test_names_that_are_no_nodes_are_passed_over(tmp_path):
    for name in (".gpu001.json.0a1b2c3d", "-x.json", "gpu001.json.bak", "\x1b[31m.json", "README"):
        (tmp_path / name).write_text(verdict().text())
    assert recorded.of_directory(str(tmp_path), 3, 20) == []


def test_many_files_are_read_by_several_and_each_once(tmp_path):
    names = [f"n{number:04d}" for number in range(600)]
    for name in names:
        (tmp_path / f"{name}.json").write_text(verdict(name).text())
    assert sorted(one.host for one in recorded.of_directory(str(tmp_path), 600, 30)) == names


def test_a_directory_that_is_none_is_one_line(tmp_path):
    with pytest.raises(SourceError, match=r"No such file or directory: .*nosuch"):
        recorded.of_directory(str(tmp_path / "nosuch"), 3, 20)
    with pytest.raises(SourceError, match="Not a directory"):
        recorded.of_directory(__file__, 3, 20)


def test_what_hangs_is_left_behind_in_its_time():
    def hang(say: Say) -> None:
        say(b"f", b"one")
        os.read(os.pipe()[0], 1)

    got = []
    with pytest.raises(SourceError, match=r"^/srv/x: no answer within 0\.5 s$"):
        got.extend(beside([hang, lambda say: None], 0.5, "/srv/x"))


def test_a_reader_that_is_killed_is_no_empty_directory():
    with pytest.raises(SourceError, match="reader was ended"):
        list(beside([lambda say: os.kill(os.getpid(), 9)], 20, "/srv/x"))


# --- Ages, and by what it was judged.


def test_only_a_young_one_is_believed():
    heard = [
        recorded.of_verdict("gpu001", verdict("gpu001", age_s=899)),
        recorded.of_verdict("gpu002", verdict("gpu002", age_s=3720)),
        recorded.of_verdict("gpu003", verdict("gpu003", age_s=-300)),
    ]
    nodes, about = judged(heard)
    assert nodes["gpu001"].status == "fail"
    assert why(nodes["gpu002"]) == (
        "its verdict is 1 h 2 min old: it is believed for 15 min (gate_max_age_s)"
    )
    assert "ahead of this machine's clock" in why(nodes["gpu003"])
    assert [round(node.age_s) for node in nodes.values()] == [899, 3720, -300]
    assert (about.believed, about.stale, about.missing) == (1, 2, 0)
    # The node's own policy says for how long.
    nodes, _ = judged(heard[:1], asked(replace(POLICY, gate_max_age_s=60)))
    assert "believed for 1 min" in why(nodes["gpu001"])


def test_clocks_may_differ_by_seconds():
    nodes, about = judged([recorded.of_verdict("gpu001", verdict(age_s=-3))])
    assert nodes["gpu001"].status == "fail"
    assert about.newest_s == 0


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_none_is_never_believed(moment):
    nodes, _ = judged([Heard("gpu001", moment, digest([own(POLICY)]))])
    assert why(nodes["gpu001"])
    assert nodes["gpu001"].age_s is None


def test_another_policy_or_version_fails_once_beside_the_results():
    other = replace(verdict(), policy_digest="0123456789abcdef", version="0.0.9")
    nodes, _ = judged([recorded.of_verdict("gpu001", other)])
    found = {one.check: one for one in nodes["gpu001"].results}
    assert found["ptrace.scope"] == SCOPE
    assert found["gate.policy"].actual == "judged by policy 0123456789abcdef"
    assert found["gate.bundle"].actual == "judged by nodeready 0.0.9"
    assert (found["gate.policy"].status, found["gate.policy"].owner) == ("fail", "nodeready")
    waived = replace(POLICY, waivers=(("gate.policy", "soon"),))
    nodes, _ = judged([recorded.of_verdict("gpu001", other)], asked(waived))
    found = {one.check: one for one in nodes["gpu001"].results}
    assert found["gate.policy"].fix == "waived: soon"


def test_the_fleets_host_keys_make_no_other_policy():
    policy = replace(POLICY, ssh_known_hosts=("login ssh-ed25519 AAAA",))
    nodes, _ = judged([recorded.of_verdict("gpu001", verdict())], asked(policy))
    assert "gate.policy" not in {one.check for one in nodes["gpu001"].results}


def test_a_node_says_nothing_of_its_own_verdicts_age():
    liar = verdict(results=[*RESULTS[:2], ok("gate.policy"), warn("gate.verdict", "", "x")])
    liar = replace(liar, policy_digest="another")
    nodes, _ = judged([recorded.of_verdict("gpu001", liar)])
    found = [(one.check, one.status) for one in nodes["gpu001"].results if "gate." in one.check]
    assert found == [("gate.verdict", "ok"), ("gate.policy", "fail")]


def test_only_leaves_out_what_it_does_not_name_but_nothing_that_nobody_knows():
    newer = fail("quantum.flux", "0", "1")
    heard = [recorded.of_verdict("gpu001", verdict(results=[*RESULTS, newer]))]
    nodes, _ = judged(heard, asked(only="limits"))
    checks = [one.check for one in nodes["gpu001"].results]
    assert checks == ["quantum.flux", "limits.core", "gate.verdict"]
    nodes, _ = judged([], asked(only="limits"))
    assert why(nodes["gpu001"]) == "no verdict is recorded"


@pytest.mark.parametrize(
    ("policy", "at", "said"),
    [
        (Policy(), "/srv/x", "its policy has no gate"),
        (Policy(gate=True), "/srv/x", "its policy has no gate_directory"),
        (Policy(gate=True, gate_textfile=""), "http://x", "its policy has no gate_textfile"),
        (Policy(gate=True), "http://x", "recorded"),
    ],
)
def test_a_node_without_a_verdict_says_what_is_missing(policy, at, said):
    nodes, _ = judged([], asked(policy), at)
    assert why(nodes["gpu001"]).endswith(said)


# --- Whose it is.

GIVEN = Names(
    {
        "gpu001": Endpoint("10.1.0.1"),
        "gpu002": Endpoint("10.1.0.2", names=("GPU002-ib",)),
        "gpu003.a.example": Endpoint(),
        "gpu004.a.example": Endpoint(),
        "gpu004.b.example": Endpoint(),
        "Mixed": Endpoint(),
    }
)


@pytest.mark.parametrize(
    ("host", "node", "exact"),
    [
        ("gpu001", "gpu001", True),
        ("GPU001", "gpu001", True),
        ("10.1.0.1", "gpu001", True),
        ("gpu002-ib", "gpu002", True),
        ("gpu001.a.example", "gpu001", False),
        ("gpu003", "gpu003.a.example", False),
        ("gpu003.b.example", "", False),
        ("gpu004", "", False),
        ("mixed", "Mixed", True),
        ("localhost", "", False),
        ("", "", False),
        ("\x1b[31m", "", False),
    ],
)
def test_a_host_is_the_node_that_the_inventory_says(host, node, exact):
    assert recorded.owner(GIVEN, host) == (node, exact)


def test_a_name_that_is_given_comes_first_and_two_that_resemble_are_nobodys():
    def said(host: str, moment: float = 1.0, problem: str = "") -> Heard:
        return Heard(host, moment, problem=problem)

    found, strangers = recorded.sorted_out(
        [
            said("gpu001", 1),
            said("gpu001.x.example", 9),
            said("gpu002.x.example"),
            said("gpu002.y.example"),
            said("10.1.0.9"),
            said("10.1.0.8", problem="down"),
            said("gpu003", 4),
            said("gpu003", 5),
            said("gpu003", 7, "down"),
        ],
        GIVEN,
    )
    assert found["gpu001"].time == 1
    assert "gpu002.x.example, gpu002.y.example" in found["gpu002"].problem
    assert (found["gpu003.a.example"].time, found["gpu003.a.example"].problem) == (5, "")
    assert strangers == ["10.1.0.9"]


@pytest.mark.parametrize(
    ("instance", "host"),
    [
        ("gpu001:9100", "gpu001"),
        ("gpu001", "gpu001"),
        ("10.1.0.1:9100", "10.1.0.1"),
        ("[fd00::1]:9100", "fd00::1"),
        ("http://gpu001:9100/metrics", "gpu001"),
        ("fd00::1", "fd00::1"),
    ],
)
def test_the_host_of_an_instance(instance, host):
    assert recorded.host_of(instance) == host


# --- Prometheus: what a peer may answer. A real one is asked in tests/lab.


def sample(name: str, value: object, **labels: str) -> dict[str, Any]:
    known = {"job": "node", "instance": "gpu001:9100", **labels}
    return {"metric": {"__name__": name, **known}, "value": [1.5, str(value)]}


def series(**more: str) -> list[dict[str, Any]]:
    """The metrics of a node with one failure."""
    known = {"node": "gpu001", **more}
    target = {key: text for key, text in more.items() if key != "node"}
    return [
        sample("nodeready_audit_timestamp_seconds", int(time.time()) - 30, **target),
        sample("nodeready_audit_complete", 1, **target),
        sample("nodeready_audit_info", 1, policy_digest=digest([own(POLICY)]), **target),
        sample("nodeready_build_info", 1, version=__version__, **target),
        sample("nodeready_check_status", 1, check="ptrace.scope", status="fail", **known),
        sample("nodeready_node_results", 1, status="fail", **known),
        sample("nodeready_node_results", 40, status="ok", **known),
        sample("nodeready_node_results", 9, status="na", **known),
    ]


def up(value: int = 1, **labels: str) -> dict[str, Any]:
    return sample("up", value, **labels)


def answer(result: Any, **more: Any) -> bytes:
    data = {"resultType": "vector", "result": result}
    return json.dumps({"status": "success", "data": data, **more}).encode()


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A peer that answers the two queries with these bytes; its address."""
    servers = []

    def start(
        metrics: bytes, targets: bytes = answer([]), status: int = 200, **headers: str
    ) -> str:
        class Peer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)["query"][0]
                server.seen.append((self.path, self.headers.get("Authorization")))
                body = targets if query.startswith("up") else metrics
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Peer)
        server.seen = []
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start.seen = server.seen
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def heard(url: str) -> list[Heard]:
    def named(host: str) -> str:
        return recorded.owner(Names(dict.fromkeys(NAMES, Endpoint())), host)[0]

    return recorded.of_prometheus(source(url), named, 20)[0]


def test_what_the_metrics_say_is_the_nodes_row(serve):
    nodes, about = judged(heard(serve(answer(series()), answer([up()]))), at="http://x")
    node = nodes["gpu001"]
    assert (node.status, dict(node.counts)) == ("fail", {"ok": 40, "na": 9})
    assert [(one.check, one.status) for one in node.results] == [
        ("ptrace.scope", "fail"),
        ("gate.verdict", "ok"),
    ]
    assert 25 < node.age_s < 60
    assert about.texts is False
    assert node.statuses["ok"] == 41
    nodes, _ = judged(heard(serve(answer(series()))), asked(only="limits"), "http://x")
    assert (nodes["gpu001"].status, nodes["gpu001"].counts) == ("ok", ())


def test_what_our_own_textfile_says_is_heard_so():
    """The names of the metrics are those of the report that the gate writes."""
    audit = outcomes()["fail"]
    names = {line.split("{")[0].split()[0] for line in prometheus(audit) if line[0] != "#"}
    assert {f"nodeready_{name}" for name in (*recorded._METRICS, "node_results")} <= names


def without(name: str, **labels: str) -> list[dict[str, Any]]:
    def is_it(one: dict[str, Any]) -> bool:
        known = one["metric"]
        return known["__name__"] == f"nodeready_{name}" and labels.items() <= known.items()

    found = [one for one in series() if not is_it(one)]
    assert len(found) < len(series())
    return found


BROKEN = {
    "a failure's series is missing": without("check_status"),
    "the counts are missing": without("node_results"),
    "a count is missing": without("node_results", status="fail"),
    "the time is missing": without("audit_timestamp_seconds"),
    "it was interrupted": [
        *without("audit_complete"),
        sample("nodeready_audit_complete", 0),
    ],
    "the time is no number": [
        *without("audit_timestamp_seconds"),
        sample("nodeready_audit_timestamp_seconds", "NaN"),
    ],
    "a count is no number": [
        *without("node_results", status="fail"),
        sample("nodeready_node_results", "NaN", node="gpu001", status="fail"),
    ],
    "a status that is none": [
        *series(),
        sample("nodeready_check_status", 1, node="gpu001", check="a.b", status="ok"),
    ],
    "a check that is none": [
        *series(),
        sample("nodeready_check_status", 1, node="gpu001", check="\x1b[31m", status="fail"),
    ],
    "those of a whole audit": [
        *series(),
        sample("nodeready_node_results", 50, node="gpu002", status="ok"),
    ],
    "all findings hidden": [
        one for one in series() if one["metric"].get("status") not in ("fail", "ok")
    ][:-1],
}


@pytest.mark.parametrize("what", BROKEN)
def test_metrics_that_are_not_whole_are_unknown_never_ok(what, serve):
    nodes, _ = judged(heard(serve(answer(BROKEN[what]), answer([up()]))), at="http://x")
    assert why(nodes["gpu001"])


def test_a_node_has_its_own_row_whatever_its_textfile_says(serve):
    """`instance` is Prometheus's own, and what else names a node counts only for the target."""
    liar = [
        {**one, "metric": {**one["metric"], "nodename": "gpu002", "exported_node": "gpu002"}}
        for one in series(node="gpu002")
    ]
    nodes, _ = judged(heard(serve(answer(liar), answer([up()]))), at="http://x")
    assert nodes["gpu001"].status == "fail"
    assert why(nodes["gpu002"]) == "no verdict is recorded"
    # Even where its instance is no node of the inventory.
    stranger = [{**one, "metric": {**one["metric"], "instance": "evil:9100"}} for one in liar]
    nodes, _ = judged(heard(serve(answer(stranger), answer([up(instance="evil:9100")]))))
    assert why(nodes["gpu002"]) == "no verdict is recorded"


def test_a_label_of_the_target_names_the_node_where_the_instance_does_not(serve):
    found = series(instance="10.9.9.9:9100", node="gpu003")
    for one in found:
        if "check" in one["metric"] or "status" in one["metric"]:
            one["metric"]["exported_node"] = "whatever"
    targets = [up(instance="10.9.9.9:9100", node="gpu003")]
    nodes, _ = judged(heard(serve(answer(found), answer(targets))), at="http://x")
    assert nodes["gpu003"].status == "fail"


def test_a_target_that_is_down_says_so(serve):
    targets = [up(), up(0, instance="gpu002:9100"), up(0, instance="other:9100")]
    nodes, _ = judged(heard(serve(answer(series()), answer(targets))), at="http://x")
    assert why(nodes["gpu002"]) == "Prometheus does not reach gpu002:9100"


def test_two_prometheus_that_watch_a_node_are_no_two_nodes(serve):
    older = series(replica="a")
    older[0]["value"][1] = str(int(time.time()) - 400)
    nodes, _ = judged(heard(serve(answer([*older, *series(replica="b")]))), at="http://x")
    assert nodes["gpu001"].status == "fail"
    assert nodes["gpu001"].age_s < 60


def test_nodes_of_the_same_name_in_several_clusters_are_nobodys_until_one_is_named(serve):
    both = [*series(cluster="a"), *series(cluster="b"), *series(cluster="c")]
    nodes, _ = judged(heard(serve(answer(both))), at="http://x")
    assert why(nodes["gpu001"]) == "several targets may be this node: cluster differs"
    heard(serve(answer([])) + "/x?cluster=a%22b&job=node")
    (path, _), (targets, _) = serve.seen
    query = parse_qs(urlsplit(path).query)["query"][0]
    labels = r'cluster="a\"b",job="node"'
    assert query.endswith(f"}} or (nodeready_node_results{{{labels}}} > 0)")
    assert f",{labels}}} or" in query
    assert parse_qs(urlsplit(targets).query)["query"][0].startswith(f"up{{{labels}}} and on")


def test_an_answer_is_the_same_however_it_is_cut():
    text = answer(series(), warnings=["partial"]).replace(b"gpu001", "gpüú001".encode())
    whole = recorded._Answer("x")
    wanted = list(whole.take(text))
    whole.end()
    assert len(wanted) == len(series())
    assert whole.warnings
    for at in range(0, len(text), 7):
        cut = recorded._Answer("x")
        found = [*cut.take(text[:at]), *cut.take(text[at:])]
        cut.end()
        assert found == wanted


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>no</html>",
        b"[" * 100_000,
        answer(series())[:-40],
        answer(series())[:-2],
        answer([1]),
        answer([{"metric": {"a": 1}, "value": [1, "1"]}]),
        answer([{"metric": {}, "value": [1]}]),
        answer([{"metric": {}, "value": [1, 1]}]),
        answer({}),
        answer(series()).replace(b"vector", b"matrix"),
        answer(series()).replace(b"success", b"error"),
        b'{"result":[' + b"1" * 70_000,
        b'{"result":[' + b'{"a":"' + b"x" * 70_000,
        b"x" * (recorded._AROUND + 1),
        answer([]) + b"x" * (recorded._AROUND + 1),
    ],
    ids=lambda text: text[:30].decode(),
)
def test_an_answer_that_is_none_is_one_line(text, serve):
    with pytest.raises(SourceError) as error:
        heard(serve(text))
    assert str(error.value).startswith("http://127.0.0.1")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"no", "--token-file"),
        (404, b"<html>", "prefix"),
        (422, b'{"status":"error","error":"too \\u001b[31mmany"}', r"too \\x1b[31mmany"),
        (503, b"", "503"),
    ],
)
def test_a_refusal_says_why(status, body, said, serve):
    with pytest.raises(SourceError) as error:
        heard(serve(body, status=status))
    assert said in str(error.value).replace("\\x1b", r"\\x1b")
    assert "\x1b" not in str(error.value)


def test_nobody_else_is_asked_and_no_password_is_told(serve):
    url = serve(b"", status=302, Location="http://u:secret@127.0.0.1:1/x?token=secret")
    asked = source(url.replace("//", "//me:pa%24s@"))
    with pytest.raises(SourceError) as error:
        recorded.of_prometheus(asked, str, 20)
    assert "leads to http://" in str(error.value)
    assert [one for _, one in serve.seen] == ["Basic bWU6cGEkcw=="]
    for text in (str(error.value), repr(asked)):
        assert not [word for word in ("secret", "pa$s", "pa%24s", "bWU6") if word in text]


def test_a_token_is_sent_as_it_is(serve):
    recorded.of_prometheus(source(serve(answer([])) + "/prefix/", "abc"), str, 20)
    (path, token), _ = serve.seen
    assert token == "Bearer abc"
    assert path.startswith("/prefix/api/v1/query?query=")


def test_nobody_there_is_one_line():
    with pytest.raises(SourceError, match=r"^http://127\.0\.0\.1:1: Connection refused$"):
        heard("http://127.0.0.1:1")


@pytest.mark.parametrize(
    "words",
    ["ftp://x", "http://", "http://x:port", "http://x?1=q", "http://x/#a", "http://a b", "://"],
)
def test_an_address_that_is_none_is_refused(words):
    if words == "://":
        assert source(words).directory == words
        return
    with pytest.raises(ValueError, match=r"must|has a character"):
        source(words)


# --- The whole way, with the command.


def test_the_command_says_who_is_well_and_how_old_that_is(tool, tmp_path):
    for name, results, age in (
        ("gpu001", RESULTS[:2], 12),
        ("gpu002", RESULTS, 250),
        ("gpu003", RESULTS[:2], 7200),
    ):
        (tmp_path / f"{name}.json").write_text(verdict(name, results, age).text())
    inventory = tmp_path / "x.py"
    data = {"gate": True, "gate_directory": "/srv/nodeready"}
    inventory.write_text(f"gpu = (['gpu001', 'gpu002', 'gpu003', 'gpu004'], {data!r})\n")
    done = tool("audit", inventory, "--recorded", tmp_path)
    assert done.status == 3, done
    assert "recorded: 2 nodes of 4" in done.out
    assert "; 1 stale, 1 without a verdict" in done.out
    assert "1 (want 0)" in done.out
    assert "its verdict is 2 h old" in done.out
    # Well, and so nothing to say.
    quiet = tool("audit", inventory, "--limit", "gpu001", "--recorded", tmp_path, "-q")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", ""), quiet
    # The three that failed in the first run are still those that failed.
    words = ("--limit", "@last-failed", "--recorded", tmp_path)
    assert "3 nodes: " in tool("audit", inventory, *words).out
    shown = json.loads(tool("audit", inventory, "--recorded", tmp_path, "--format", "json").out)
    assert shown["recorded"]["stale"] == 1
    jsonschema.Draft202012Validator(schema("audit")).validate(shown)
    ages = {node["name"]: node.get("age_seconds") for node in shown["nodes"]}
    assert ages["gpu004"] is None
    assert 7200 <= ages["gpu003"] < 7300
    every = tool("audit", inventory, "--recorded", tmp_path, "-v").out
    assert "age " in every
    metrics = tool("audit", inventory, "--recorded", tmp_path, "--format", "prometheus").out
    assert 'nodeready_verdict_age_seconds{node="gpu003"}' in metrics


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--sudo"], "--sudo: no node is asked with --recorded"),
        (["--ssh-user", "x"], "--ssh-user: no node is asked with --recorded"),
        (["--only", "gate.timer"], "no node judges its own gate"),
        (["--recorded", "http://u:secret@x:9090"], "a password on the command line"),
        (["--recorded", "ftp://x"], "must be a directory"),
        (["--token-file", "nosuch"], "nosuch"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(words, pattern, tool, tmp_path):
    done = tool("audit", "gpu001", "--recorded", tmp_path, *words)
    assert (done.status, done.out) == (2, ""), done
    assert pattern in done.lines[0]
    assert "secret" not in done.err


def test_a_source_that_does_not_answer_is_our_failure_in_one_line(tool):
    done = tool("audit", "gpu001", "--recorded", "/nosuch/place")
    assert (done.status, done.out, len(done.lines)) == (1, "", 1), done
    done = tool("audit", "gpu001", env={"NODEREADY_AUDIT_RECORDED": "http://u:secret@127.0.0.1:1"})
    assert (done.status, done.out, len(done.lines)) == (1, "", 1), done
    assert "secret" not in done.err


def test_ten_thousand_healthy_nodes_are_few_objects():
    text = verdict(results=RESULTS[:2]).text().encode()
    first, second = (recorded.of_verdict("gpu001", parse(text)) for _ in range(2))
    assert [a is b for a, b in zip(first.results, second.results, strict=True)] == [True, True]
    assert fleet(4).recorded is None
