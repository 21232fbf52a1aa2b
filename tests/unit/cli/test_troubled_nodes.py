"""Each command when nodes fail, hang, die half-way or answer nonsense, and after Ctrl-C.

A troubled node costs its own results, and its line says why.
"""

import base64
import json
import tarfile
import zlib
from dataclasses import asdict

import pytest

from nodeready.agent.asking import Answer
from nodeready.agent.cores.program import CoreFile
from nodeready.agent.stacks import program as stacks
from nodeready.agent.tail import NodeTail
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import TIMEOUT, Gap
from nodeready.core.policy import Policy
from nodeready.core.wire import PYTHON_MISSING
from tests.builders.traces import document, process
from tests.cases import cases
from tests.fake import Does, hangs, interrupts, one_by_one, says
from tests.unit.commands import AWAY, DIES, looks, program

SECRET = "hf_abcdefghijABCDEFGHIJ0123"
OLD = program(lambda nonce: f"{nonce} no Python 3.9 or newer\n")
MAD = says("\x1b[31mwelcome")
#: No machine has this limit, so that there is always a change to make.
POLICY = Policy(limit_nofile=16383)


def core(**changes: object) -> dict[str, object]:
    return {**asdict(CoreFile("/c/core.1", 1, 7, 5, 0, 0.0)), **changes}


def cores(*files: dict[str, object]) -> Does:
    row = {"places": ["/c/*"], "files": list(files), "unlisted_count": 0, "notes": []}
    return program(lambda nonce: f"{nonce} listing {json.dumps(row)}\n")


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


def tail() -> Does:
    row = asdict(NodeTail("x", (), (), 0, 0, ""))
    return program(lambda nonce: f'a motd\n{nonce} tail "{packed(json.dumps(row))}"\n')


def rank(number: int, main: str = "main train.py 9", **changes: object) -> Does:
    answer = document("itself", {**process(number, main), **changes})
    return program(lambda nonce: f"a motd\n{nonce} {stacks.pack(answer)}\n")


def late(request):
    """A node that has said all when its time is over."""
    return Answer(rank(1)(request).stdout, gap=Gap(TIMEOUT, "ended after 63 s"))


NODES: dict[str, Does] = {
    "away": AWAY,
    "dead": DIES,
    "hung": hangs,
    "mad": MAD,
    "old": OLD,
    "no cores": cores(),
    "lies about cores": program(lambda nonce: f'{nonce} listing {{"places": 1}}\n'),
    "dies reading": one_by_one(cores(core()), DIES),
    "nonsense reading": one_by_one(cores(core(path="/c/core.2", inode=2)), says("nonsense")),
    "changes": looks(says("")),
    "full": looks(says("", 1, "nodeready: no space left on /etc\n")),
    # A step that fails does not stop the others.
    "busy": looks(one_by_one(says("", 1, "nodeready: busy\n"), says(""))),
    "dies later": looks(DIES),
    "hangs later": looks(hangs),
    "mad later": looks(MAD),
    "mad look": looks(says(""), look=MAD),
    "rank 0": rank(0),
    "rank 1 late": late,
    "logs": tail(),
    "noise": program(lambda nonce: f'{nonce} tail "{"A" * 1000}"\n'),
}
DEPLOY = ("deploy", "--only", "limits", "--yes")
READY = ("ready", "--only", "proof.limits", "--format", "json")


@pytest.mark.parametrize("case", cases(__file__, "data/troubled_nodes.json"))
def test_a_troubled_node_costs_itself_and_is_explained(case, run):
    """`nodes`: name -> a node of NODES; `says`: what the output has."""
    nodes = {name: NODES[kind] for name, kind in case["nodes"].items()}
    done = run(nodes, *case["words"].split(), policy=POLICY)
    assert done.code == case["code"]
    assert [text for text in case["says"] if text not in done.out] == [], done.out
    assert "\x1b" not in done.out
    # Nothing is asked of a node after its connection was lost.
    assert [request.node for request in done.transport.asked].count("dead") <= 2


@pytest.mark.parametrize("words", [
    READY, ("jobs",), ("stacks",), ("stacks", "--check"), ("cores",), ("tail", "/log/*"),
    ("watch", "--job", "1"), ("incident", "--job", "1", "-o", "kept"),
], ids=" ".join)  # fmt: skip
def test_a_node_without_python_is_a_finding(words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run({"old": looks(OLD)}, *words)
    assert done.code == 3
    assert PYTHON_MISSING in done.out + done.err


def test_a_look_that_never_ends_costs_the_budget_of_its_node(run):
    done = run({"slow": looks(says(""), look=hangs), "mad": looks(says(""))}, *READY)
    nodes = {node["name"]: node for node in json.loads(done.out)["nodes"]}
    assert (done.code, nodes["slow"]["status"]) == (3, "unknown")
    # Whatever could not be observed is a fact, too: the document is the audit's.
    assert set(nodes["mad"]["facts"]) == {"proof"}


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (READY, looks(says(""))),
        (("stacks", "--format", "json"), rank(0)),
        (("tail", "/log/*", "--format", "json"), tail()),
        (("tail", "/log/*"), tail()),
    ],
    ids=["ready", "stacks", "tail", "tail as a table"],
)
def test_an_interrupt_leaves_partial_results(words, good, run):
    done = run({"a": good, "b": interrupts, "c": good}, *words)
    assert done.code == 130
    assert "interrupted: the results are partial; not b,c" in done.err
    assert done.transport.ended == 1
    if "json" not in words:
        assert "partial      interrupted: not all nodes answered" in done.out
        return
    document = json.loads(done.out)
    assert document["complete"] is False
    if words[0] == "stacks":
        assert [row["node"] for row in document["processes"]] == ["a"]


def test_an_interrupt_while_a_core_is_read_is_partial(run):
    nodes = {"a": one_by_one(cores(core()), interrupts), "b": cores()}
    done = run(nodes, "cores", "--format", "json")
    assert (done.code, done.transport.ended) == (130, 1)
    assert json.loads(done.out)["complete"] is False
    assert "interrupted" in done.out
    assert done.err.count("interrupted: the results are partial") == 1


def test_an_interrupted_deploy_says_what_was_done(run, tmp_path):
    nodes = {"a": looks(says("")), "b": looks(interrupts), "c": looks(says(""))}
    done = run(nodes, *DEPLOY, policy=POLICY)
    assert done.code == 130
    assert "nodeready: interrupted: ending what runs on the nodes" in done.err
    assert "partial     b: stopped in limits.logins\n" in done.out
    assert "changed     a: limits.logins" in done.out
    assert "1 of 3 nodes were completed; not b,c (--limit @last-failed)" in done.err
    assert done.transport.ended == 1
    assert "c" not in [request.node for request in done.transport.asked if not request.mark]
    kept = (tmp_path / "state/nodeready/last-failed").read_text().splitlines()
    assert {"b", "c"} <= {row.partition("\t")[0] for row in kept}


def test_a_deploy_that_is_interrupted_while_it_looks_changes_nothing(run):
    done = run({"a": looks(says("")), "b": interrupts}, *DEPLOY, policy=POLICY)
    assert (done.code, done.out) == (130, "")
    assert "nothing was changed" in done.err
    assert not [r for r in done.transport.asked if not r.mark and r.node == "a"]


def test_logs_that_no_node_has_are_a_mistake(run):
    with pytest.raises(Refused, match=r"/log/\*: no file matches, on a,b"):
        run({"a": tail(), "b": tail()}, "tail", "/log/*")


def test_a_check_of_stacks_says_what_the_next_hang_would_lack(run):
    settings = {"torch": "2.6.0", "nccl": "2.21.5", "cuda": False, "core_bytes": 0}
    settings |= {"core_place": "core", "core_wrong": "", "dump_wrong": "", "variables": []}
    node = rank(0, witnesses={"settings": {**settings, "dump_place": "/x"}})
    done = run({"n0": node}, "stacks", "--check")
    assert done.code == 3
    assert "fail     core         the limit of its cores is 0\n" in done.out
    document = json.loads(run({"n0": node}, "stacks", "--check", "--format", "json").out)
    assert document["schema"] == "nodeready.debuggable/2"
    assert {row["nodes"][0] for row in document["findings"]} == {"n0"}


# --- An incident keeps what there is.


@pytest.fixture
def incident(run, tmp_path):
    """``incident(nodes, job)``: how the command ended, and what it kept, as JSON."""

    def go(nodes: dict[str, Does], job: str = "4711"):
        done = run(nodes, "incident", "--job", job, "-o", str(tmp_path / "kept"))
        return done, json.loads((tmp_path / "kept" / "incident.json").read_text())

    return go


def test_an_incident_names_each_troubled_node(incident, tmp_path):
    nodes = {"n0": rank(0), "n1": rank(1), "away": AWAY, "dead": DIES, "hung": hangs}
    done, kept = incident(nodes)
    assert done.code == 4
    stacks_part, *others = kept["parts"]
    assert stacks_part["status"] == "partial"
    assert {gap["node"] for gap in stacks_part["gaps"]} == {"away", "dead", "hung"}
    names = [gap["node"] for gap in stacks_part["gaps"] if gap["kind"] != "hung"]
    assert names == ["away", "dead"]
    assert [part["name"] for part in others] == ["logs", "cores", "audit"]
    assert done.out.startswith("job 4711")
    readme = (tmp_path / "kept" / "README.txt").read_text()
    assert readme.splitlines()[0] == done.out.splitlines()[0]


def test_an_incident_of_a_job_that_nobody_knows_keeps_nothing(run, tmp_path):
    """A node that lists no core: it answers both programs at once, and each reads its own."""
    row = json.dumps({"places": ["/c/*"], "files": [], "unlisted_count": 0, "notes": []})
    stack = stacks.pack(document("itself"))
    idle = program(lambda nonce: f"{nonce} {stack}\n{nonce} listing {row}\n")
    words = ("incident", "--job", "99", "-o", str(tmp_path / "kept"))
    with pytest.raises(
        Refused, match=r"no ranks on a,b: .* belongs to job 99; .*: nothing is kept"
    ):
        run({"a": idle, "b": idle}, *words)
    assert not [*tmp_path.glob("kept*")]
    # Where a node is lost, nobody knows.
    assert run({"a": idle, "b": AWAY}, *words).code == 4
    assert (tmp_path / "kept.tar.gz").exists()


def test_an_interrupted_incident_packs_what_there_is(incident, tmp_path):
    done, kept = incident({"n0": rank(0), "n1": interrupts, "n2": rank(2)})
    assert (done.code, kept["complete"]) == (130, False)
    parts = [(part["status"], part["why"]) for part in kept["parts"]]
    assert parts == [("partial", "interrupted"), *[("missing", "interrupted")] * 3]
    with tarfile.open(tmp_path / "kept.tar.gz") as archive:
        assert "kept/stacks/trace-n0.json" in archive.getnames()


def test_an_incident_has_no_secret_no_path_and_no_escape_of_a_node(incident, tmp_path):
    logs = {"path": "/var/log/../../etc/\x1b[2Jx", "lines": [f"T={SECRET}\x1b[2J"]}
    command = f"train.py --token {SECRET} \x1b[31m"
    incident({"n0": rank(0, command=command, witnesses={"logs": logs})}, f"../{SECRET}")
    place = tmp_path / "kept"
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {path.parent.parent for path in files} <= {place, tmp_path}
    assert any(path.parent.name == "logs" for path in files)
    for path in files:
        text = path.read_text()
        assert SECRET not in text, path
        assert "\x1b" not in text, path


def test_an_incident_does_not_touch_a_directory_with_other_files(incident, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("mine")
    with pytest.raises(Refused, match=r"holds other files \(notes\) already"):
        incident({"n0": rank(0)})
    assert (tmp_path / "kept" / "notes").read_text() == "mine"
