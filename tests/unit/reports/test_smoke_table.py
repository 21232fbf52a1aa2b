"""A smoke test in every form: one document for each of its ends."""

import itertools
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeready.core.outcome import LOST, Gap
from nodeready.fleet.inventory.nodeset import expand
from nodeready.reports.lines import STYLES
from nodeready.reports.registry import Options, find_format
from nodeready.reports.smoke_table import show
from nodeready.runs.smoke.document import (
    PASSED,
    SUSPECT,
    UNREACHABLE,
    UNTESTED,
    WARNED,
    LinkBandwidth,
    SmokeNode,
    SmokeReport,
    code,
)
from nodeready.runs.smoke.knowledge import SmokeSuspect
from tests.cases import read_table
from tests.paths import DOCS

#: A SmokeSuspect with its nodes folded.
SUSPECTS = {
    name: SmokeSuspect(kind, tuple(expand(nodes)), gpus, evidence)
    for name, (kind, nodes, gpus, evidence) in read_table(__file__, "SUSPECTS").items()
}
NODE, GPU, PAIR = (SUSPECTS[name] for name in ("node", "gpu", "pair"))
#: The fields of a SmokeReport.
FIGURES: dict[str, dict[str, Any]] = {
    name: {**row, "links": tuple(LinkBandwidth(*link) for link in row["links"])}
    for name, row in read_table(__file__, "FIGURES").items()
}


def names(count: int) -> list[str]:
    return [f"node{number:02d}" for number in range(1, count + 1)]


def made(count: int = 12, *suspects: SmokeSuspect, **more: Any) -> SmokeReport:
    """A test of so many nodes of two ranks, in which all but the suspects passed."""
    fields = {**FIGURES["made"], "suspects": suspects, **more}
    blamed = {name for one in suspects for name in one.blamed}
    nodes = tuple(
        SmokeNode(name, SUSPECT if name in blamed else PASSED, ranks=2, engine=fields["engine"])
        for name in names(count)
    )
    return SmokeReport(**{"nodes": nodes, **fields})


def other(smoke: SmokeReport, changed: dict[str, SmokeNode]) -> SmokeReport:
    return replace(smoke, nodes=tuple(changed.get(node.name, node) for node in smoke.nodes))


def mixed() -> SmokeReport:
    """Several suspects, a warning, and nodes that were not tested for two reasons."""
    suspects = (GPU, PAIR, SUSPECTS["pair of mixed"])
    report = made(16, *suspects, **FIGURES["mixed"])
    ports = tuple(f"mlx5_{n}:1/IB" for n in range(8))
    nodes = {
        node.name: replace(node, ranks=8, gpus=tuple(range(8)), slots=8, network="IB",
                           interface="eth0", hcas=ports, gdr=True)
        for node in report.nodes
    }  # fmt: skip
    warning = "GPU 2: 3 new corrected ECC errors during the test"
    socket = "NCCL uses Socket over eth0, most nodes IB: NCCL sees no InfiniBand or RoCE device"
    nodes["node04"] = replace(nodes["node04"], status=WARNED, warnings=(warning,))
    nodes["node05"] = replace(nodes["node05"], status=WARNED, warnings=(socket,),
                              network="Socket", hcas=(), gdr=False)  # fmt: skip
    for name in ("node10", "node11"):
        busy = "GPU 0 is busy (python, pid 4711); --busy tests beside them"
        nodes[name] = SmokeNode(name, UNTESTED, busy)
    away = "node12: connection refused: is sshd running?"
    nodes["node12"] = SmokeNode("node12", UNREACHABLE, gap=Gap(LOST, away))
    return other(report, nodes)


def gpus() -> SmokeReport:
    """64 nodes of eight GPUs each, with a floor for the bandwidth."""
    figures = FIGURES["gpu"]
    nodes = tuple(
        SmokeNode(f"node{number:03d}", PASSED, "", 8, tuple(range(8)), figures["engine"])
        for number in range(1, 65)
    )
    return made(0, replace(GPU, nodes=("node033",)), nodes=nodes, **figures)


def recorded(name: str, *suspects: SmokeSuspect) -> SmokeReport:
    """Twelve nodes of the lab, as a run on them was: docs/smoke.md shows it."""
    blamed = {name for suspect in suspects for name in suspect.blamed}
    nodes = tuple(
        SmokeNode(node, SUSPECT if node in blamed else PASSED, "", 2, (),
                  FIGURES[name]["engine"], network="gloo", interface="eth0")
        for node in expand("node[001-012]")
    )  # fmt: skip
    return made(0, *suspects, nodes=nodes, **FIGURES[name])


def nothing() -> SmokeReport:
    why = "no PyTorch in /usr/bin/python3, and no nccl-tests"
    nodes = tuple(SmokeNode(name, UNTESTED, why) for name in names(3))
    return made(0, nodes=nodes, **FIGURES["nothing"])


def partial() -> SmokeReport:
    found = made(12, NODE, complete=False, stopped="interrupted in round 6", tests=9, rounds=5)
    rest = ("node11", "node12")
    return other(found, {n: SmokeNode(n, UNTESTED, "interrupted in round 6") for n in rest})


#: The nodes of a switch, each by itself.
SWITCH = [replace(SUSPECTS["switch"], nodes=(name,)) for name in names(32)[17:]]
SMOKES = {
    "go": made(12, tests=8, rounds=4),
    "node": made(12, NODE),
    "gpu": gpus(),
    "pair": made(12, PAIR),
    "scale": made(64, SUSPECTS["scale"]),
    "switch": made(32, *SWITCH, tests=27, rounds=14),
    "mixed": mixed(),
    "interrupted": partial(),
    "budget": made(12, stopped="the budget of 30 s was over in round 12"),
    "nothing": nothing(),
    "lab-go": recorded("lab-go"),
    "lab-no-go": recorded("lab-no-go", SUSPECTS["lab"]),
}


def text(name: str, form: str = "table") -> str:
    return "".join(find_format("smoke", form).render(SMOKES[name]))


def test_the_page_shows_what_the_table_prints():
    """On a terminal of 80 columns, where a long line goes on four columns behind its text."""
    page = (DOCS / "smoke.md").read_text()
    shown = re.findall(r"^```console\n\$ .*\n((?:.*\n)*?)```$", page, re.M)
    tables = [re.sub(r"\n(?: {4}| {13})(?=\S)", " ", block) for block in shown]
    assert tables == [text(name) for name in ("lab-go", "lab-no-go", "mixed")]


def test_every_end_has_its_verdict_and_exit_code():
    codes = {"go": 0, "mixed": 4, "interrupted": 130}
    for name, smoke in SMOKES.items():
        if name != "lab-go":
            assert code(smoke) == codes.get(name, 3), name
            assert smoke.verdict == ("GO" if name == "go" else "NO-GO")
    # A test of no node is no pass.
    assert (code(made(0)), made(0).good) == (2, False)


def pairs(*found: str) -> SmokeReport:
    """A test of ten nodes, a to j, in which these pairs fail: ``ab``."""
    suspects = tuple(SmokeSuspect("pair", tuple(pair), (), ("",)) for pair in found)
    nodes = tuple(SmokeNode(name, PASSED) for name in "abcdefghij")
    return made(0, *suspects, nodes=nodes)


@pytest.mark.parametrize(
    ("broken", "out"), read_table(__file__, "few_nodes_are_excluded_for_many_pairs")
)
def test_few_nodes_are_excluded_for_many_pairs(broken, out):
    for order in itertools.islice(itertools.permutations(broken.split()), 24):
        assert "".join(pairs(*order).exclude) == out
    assert not {*out} & {*pairs(*broken.split()).go}


@given(st.sets(st.sampled_from(["".join(p) for p in itertools.combinations("abcdefgh", 2)])))
def test_no_pair_is_left_whatever_the_pairs(broken):
    out = {*pairs(*sorted(broken)).exclude}
    assert all(out & {*pair} for pair in broken)
    # No node is excluded for nothing.
    assert all(any(name in pair for pair in broken) for name in out)


def test_what_needs_no_further_node_excluded():
    """A pair with a node that is out anyway; a number of nodes."""
    assert made(9, NODE, replace(PAIR, nodes=("node02", "node07"))).exclude == ("node07",)
    lost = {"node09": SmokeNode("node09", UNREACHABLE, gap=Gap(LOST, "connection lost"))}
    assert other(made(9, PAIR), lost).exclude == ("node09",)
    number = made(8, replace(SUSPECTS["scale"], nodes=tuple(names(8))))
    assert (number.exclude, number.verdict, code(number)) == ((), "NO-GO", 3)


def lines(smoke: SmokeReport, **options: int) -> list[str]:
    return [line.plain for line in show(smoke, Options(**options))]


def test_what_is_folded_stands_whole_under_v():
    many = made(12, replace(NODE, evidence=tuple(f"reason {number}" for number in range(7))))
    assert "         and 3 more (-v shows them)" in lines(many)
    whole = lines(many, verbose=1)
    assert {"         reason 6", "control  pairs over tcp"} <= {*whole}
    assert "engine   node[01-12]  torch 2.13.0 over gloo" in whole
    assert not [line for line in whole if "more (-v" in line]


def test_two_versions_are_two_lines_also_when_all_pass():
    old = SmokeNode("node03", PASSED, ranks=2, engine="torch 2.1.0 over gloo")
    rows = lines(other(SMOKES["go"], {"node03": old}))
    assert "engine   node[01-02,04-12]  torch 2.13.0 over gloo" in rows
    assert "engine   node03  torch 2.1.0 over gloo" in rows


def test_two_hundred_suspects_are_thirty_rows_and_their_number():
    many = [replace(PAIR, nodes=(f"n{at}", f"n{at + 1}")) for at in range(0, 400, 2)]
    smoke = made(0, *many, nodes=tuple(SmokeNode(f"n{at}", SUSPECT) for at in range(400)))
    rows = lines(smoke)
    assert len([row for row in rows if row.startswith("pair")]) == 30
    assert "         and 170 more (-v shows them)" in rows
    # What is to be pasted is never cut.
    (without,) = [row for row in rows if row.startswith("without")]
    assert without.count(",") == len(smoke.exclude) - 1 == 199


def test_a_style_is_a_word_that_the_terminal_knows():
    for found in SMOKES.values():
        for line in show(found):
            assert {style for _, style in line.parts} <= {"", "bold", *STYLES.values()}


def test_the_case_of_all_has_what_no_node_is_to_blame_for():
    for name, tag, words in (
        ("scale", "failure", "could not be pinned down"),
        ("budget", "error", "the budget of 30 s was over"),
        ("interrupted", "error", "interrupted"),
    ):
        (inside,) = ElementTree.fromstring(text(name, "junit")).find("./testsuite[1]/testcase")
        assert inside.tag == tag
        assert words in inside.attrib["message"]
