"""`nodeready diff`: two files, an earlier look of the memory, a peer, a file of learn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nodeready.core.exit_codes import Refused
from nodeready.core.policy import Policy
from nodeready.runs import targets
from nodeready.runs.memory.command import diff_files
from tests.builders.hostile import recorded, shows
from tests.fake import one_by_one
from tests.unit.commands import AWAY, SOUND

MTU_LINE = "/sys/class/net/eth0/mtu:"
TEXTS = {n: t.replace(f"{MTU_LINE}1500", f"{MTU_LINE}9000") for n, t in recorded("h100").items()}
OTHER_MTU = shows(TEXTS)
MTU = ("setting", "nics.interfaces[eth0].mtu", 1500, 9000)


@pytest.fixture
def compared(run, monkeypatch, tmp_path):
    def go(nodes: dict[str, Any], *words: str) -> tuple[int, Any]:
        def names(inventory, options, note):
            chosen = options.limit.split(",") if options.limit else nodes
            return None, [], dict.fromkeys(chosen)

        monkeypatch.setattr(targets, "load_targets", names)
        done = run(nodes, "diff", *words, "--format", "json")
        return done.code, json.loads(done.out)

    return go


def rows(document):
    return [
        (change["kind"], change["key"], change["before"], change["after"], change["nodes"])
        for change in document["changes"]
    ]


def test_the_nodes_now_and_an_earlier_look(run, compared):
    nodes = {"gpu1": one_by_one(SOUND, SOUND, OTHER_MTU), "gpu2": SOUND, "off": AWAY}
    run(nodes, "audit")
    run(nodes, "audit")
    code, document = compared(nodes, "--since", "1")
    assert code == 4
    assert rows(document) == [(*MTU, ["gpu1"])]
    assert document["changes"][0]["since"] == document["after"]["time"]
    assert [gap["node"] for gap in document["gaps"]] == ["off"]
    # The look of the diff itself is the third one.
    assert rows(compared(nodes, "--since", "1", "--until", "2")[1]) == []
    document = compared(nodes, "--since", "2", "--until", "3", "--exit-code")[1]
    assert rows(document) == [(*MTU, ["gpu1"])]
    assert compared(nodes, "--since", "2", "--until", "3", "--exit-code")[0] == 3


def test_a_peer_and_most_of_a_group(compared):
    nodes = {"gpu1": SOUND, "gpu2": OTHER_MTU, "gpu3": SOUND}
    for words in (("--against", "gpu1"), ("--against", "gpu1,gpu2,gpu3")):
        code, document = compared(nodes, *words)
        assert (code, rows(document)) == (0, [(*MTU, ["gpu2"])])


def test_a_file_of_learn(compared, tmp_path):
    golden = tmp_path / "h100.py"
    policy = "gpu_driver = '570.1'\ngpu_vbios = ['96.00.89.00.01', '97']\ngpu_count = 8\n"
    golden.write_text(policy)
    code, document = compared({"gpu1": SOUND}, "--against", str(golden))
    assert code == 0
    assert rows(document) == [("setting", "gpu_driver", "570.1", "535.129.03", ["gpu1"])]


def test_two_files(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, answer in (("a.json", SOUND), ("b.json", OTHER_MTU)):
        run({"gpu1": answer, "gpu2": SOUND}, "audit", "--format", "json", "-o", name)
    whole = json.loads(Path("b.json").read_text())
    Path("c.json").write_text(json.dumps(whole, indent=2))
    for name in ("b.json", "c.json"):
        document = diff_files("a.json", name)
        changes = [(c.kind, c.key, c.before, c.after, c.nodes) for c in document.changes]
        assert changes == [(*MTU, ("gpu1",))]


HEAD = '"schema":"nodeready.audit/1","started":"2030-01-02T03:04:05Z"'


@pytest.mark.parametrize(("text", "message"), [
    ("", "no JSON"),
    ("[]", "no document of audit"),
    ('{"schema":"nodeready.stacks/1"}', "no document of audit"),
    ("{" * 100_000, "no JSON"),
    ("[" * 100_000, "deep"),
    (f'{{{HEAD},"nodes":[{{"name":"a"}}]}}', "node a"),
    (f'{{\n{HEAD},\n"nodes": [\n{{"name":"a",\n],\n"x":1}}', "no JSON"),
    ('{"schema":"nodeready.audit/1","started":"\x1b[31m","nodes":[]}', "no JSON"),
    ('{"schema":"nodeready.audit/1","started":"then","nodes":[]}', "started"),
])  # fmt: skip
def test_a_file_that_is_no_audit_is_one_line(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(Refused, match=re.escape(str(path))) as refused:
        diff_files(str(path), str(path))
    assert message in str(refused.value.message)
    assert "\n" not in refused.value.message


def test_what_is_no_file_of_learn_is_refused_before_a_node_is_asked(run, monkeypatch):
    monkeypatch.setattr(targets, "load_targets", lambda *given: (None, [], {"gpu1": None}))
    with pytest.raises(Refused, match="is no file of learn"):
        run({"gpu1": SOUND}, "diff", "--against", __file__)


def test_a_time_after_the_later_look_is_refused(run, compared):
    run({"gpu1": SOUND}, "audit")
    run({"gpu1": SOUND}, "audit")
    with pytest.raises(Refused, match="--since 2: is later than --until"):
        compared({"gpu1": SOUND}, "--since", "2", "--until", "1")


def test_without_an_option_the_last_two_looks_are_compared(run, compared):
    nodes = {"gpu1": one_by_one(SOUND, OTHER_MTU)}
    run(nodes, "audit")
    with pytest.raises(Refused, match="has 1 look at it and compares two: nodeready audit nodes"):
        compared(nodes)
    run(nodes, "audit")
    code, document = compared(nodes)
    assert (code, rows(document)) == (0, [(*MTU, ["gpu1"])])
    sources = document["before"]["source"], document["after"]["source"]
    assert sources == ("the memory, 1", "the memory, 2")


def test_a_time_before_the_memory_is_its_first_look(run, compared):
    nodes = {"gpu1": one_by_one(SOUND, OTHER_MTU)}
    run(nodes, "audit")
    code, document = compared(nodes, "--since", "2001-02-03")
    assert (code, rows(document)) == (0, [(*MTU, ["gpu1"])])
    assert document["before"]["source"] == "the first look that the memory has, after 2001-02-03"


def test_another_policy_alone_is_no_finding(run, compared):
    run({"gpu1": SOUND}, "audit")
    run({"gpu1": SOUND}, "audit", policy=Policy(gpu_count=7))
    code, document = compared({"gpu1": SOUND}, "--exit-code")
    assert code == 0
    (change,) = document["changes"]
    assert (change["kind"], change["key"]) == ("policy", "gpu_count")
    assert change["note"] == "1 result follows"


@pytest.mark.parametrize("since", ["last-good", "7"])
def test_a_look_that_the_memory_does_not_have_is_refused(run, compared, since):
    run({"gpu1": AWAY}, "audit")
    with pytest.raises(Refused, match=f"--since {since}: "):
        compared({"gpu1": AWAY}, "--since", since)
