"""`deploy --batch` and `--undo`: the waves, when they stop, and what is said then."""

import json

import pytest

from nodeready.core.exit_codes import Refused
from nodeready.runs.deploy.command import make_waves, parse_undo
from nodeready.runs.values import read_batch
from tests.cases import read_table
from tests.fake import interrupts, one_by_one, says
from tests.unit.commands import AWAY, DIES

PLAN = says("ptrace.scope remove /etc/sysctl.d/99-zz-nodeready-ptrace.conf\n")
DONE = one_by_one(PLAN, PLAN)
FAILS = one_by_one(PLAN, says("ptrace.scope failed /etc/x: no space left on /etc\n"))
LOST = one_by_one(PLAN, DIES)
STOPS = one_by_one(PLAN, interrupts)
OK = says("")
DOES = {
    "DONE": DONE, "FAILS": FAILS, "LOST": LOST, "STOPS": STOPS, "OK": OK, "AWAY": AWAY,
}  # fmt: skip
WORDS = ("--undo", "--only", "ptrace", "--yes")


def nodes(*does):
    return {f"n{number}": one for number, one in enumerate(does, 1)}


@pytest.mark.parametrize(("count", "batch", "sizes"), read_table(__file__, "waves"))
def test_a_canary_comes_first_then_waves_of_a_number_or_a_share(count, batch, sizes):
    names = [f"n{number}" for number in range(count)]
    waves = make_waves(names, batch and read_batch(batch), count)
    assert [len(wave) for wave in waves] == list(sizes)
    assert [name for wave in waves for name in wave] == names


@pytest.mark.parametrize("words", ["", "0", "0%", "101%", "-1", "ten", "1.5", "10 %", "1000000"])
def test_a_wrong_size_is_refused(words):
    with pytest.raises(Refused, match="must be a number of nodes"):
        read_batch(words)


@pytest.mark.parametrize(("does", "words", "code", "expected"), read_table(__file__, "runs"))
def test_a_run_stops_when_too_many_have_failed(run, does, words, code, expected):
    changed, untouched = expected
    given = nodes(*(DOES[word] for word in does.split()))
    done = run(given, "deploy", *WORDS, *words.split(), "--format", "json")
    document = json.loads(done.out)
    states = {node["name"]: node["status"] for node in document["nodes"]}
    assert done.code == code
    assert [name[1] for name, status in states.items() if status == "changed"] == list(changed)
    assert [name[1] for name in document["untouched"]] == list(untouched)
    assert bool(document["stopped"]) == (bool(untouched) and code != 130)
    asked = [request.node for request in done.transport.asked]
    assert [asked.count(f"n{number}") for number in untouched] == [1] * len(untouched)


def test_the_last_lines_name_the_untouched_and_how_to_go_on(run):
    done = run(nodes(DONE, FAILS, DONE, DONE), "deploy", *WORDS, "--batch", "25%")
    assert done.out.splitlines()[-1].endswith("1 failed, 0 unreachable, 2 untouched")
    assert [row.removeprefix("nodeready: ") for row in done.err.splitlines()[-3:]] == [
        "stopped after wave 2 of 4: 1 node failed, --max-fail is 0",
        "untouched: n[3-4]; continue: nodeready deploy nodes --limit 'n[3-4]' --batch 25% --undo "
        "--only ptrace",
        "failed and untouched nodes: --limit @last-failed",
    ]


def test_an_undo_only_looks_with_check(run):
    done = run(nodes(DONE, OK, says("", 1, "nodeready: not root: add --sudo\n")), "deploy",
               "--undo", "--only", "ptrace", "--check")  # fmt: skip
    assert done.code == 1
    assert "remove /etc/sysctl.d/99-zz-nodeready-ptrace.conf" in done.out
    assert "not root: add --sudo" in done.out
    assert [request.node for request in done.transport.asked] == ["n1", "n2", "n3"]


def test_an_answer_of_a_node_is_only_text():
    answer = "x.y remove /a\x1b[2J\nno line\nx.y evil /b\nx.y changed /c\nx.y failed /d: full\n"
    undo = parse_undo(answer)
    texts = [action.text for change in undo.changes for action in change.actions]
    assert texts == ["remove /a\\x1b[2J"]
    assert undo.failed == {"x.y": "/d: full"}
    assert [result.source for result in undo.changed_since] == ["/c"]
