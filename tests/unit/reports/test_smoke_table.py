"""A smoke test in every form: one document for each of its ends."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeready.core.outcome import LOST, Gap
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

ENGINE = "torch 2.13.0 over gloo"
PROVES = (
    "init, all_reduce, all_gather, send/recv and barrier of the job's own PyTorch over gloo, and "
    "the sums; no GPU"
)
NCCL = (
    "init, all_reduce, all_gather, send/recv and barrier of the job's own PyTorch over NCCL "
    "2.28.3, the sums, and each GPU's products and memory"
)
BETWEEN = LinkBandwidth("between", 14, 1.34, 1.02, ("node02", "node05"))
INSIDE = LinkBandwidth("inside", 12, 14.21, 11.8, ("node04",))


def names(count: int) -> list[str]:
    return [f"node{number:02d}" for number in range(1, count + 1)]


def made(count: int = 12, *suspects: SmokeSuspect, **more: object) -> SmokeReport:
    """A test of so many nodes of two ranks, in which all but the suspects passed."""
    blamed = {name for one in suspects for name in one.blamed}
    given: dict[str, object] = {
        "started": "2030-01-02T03:04:05Z",
        "finished": "2030-01-02T03:04:46Z",
        "complete": True,
        "engine": ENGINE,
        "proves": PROVES,
        "control": "pairs over tcp",
        "budget_s": 300,
        "tests": 19,
        "single_node_tests": 12,
        "rounds": 11,
        "nodes": tuple(
            SmokeNode(name, SUSPECT if name in blamed else PASSED, ranks=2, engine=ENGINE)
            for name in names(count)
        ),
        "suspects": suspects,
        "links": (BETWEEN, INSIDE),
    }
    return SmokeReport(**{**given, **more})  # type: ignore[arg-type]


def other(smoke: SmokeReport, changed: dict[str, SmokeNode]) -> SmokeReport:
    """The same with other nodes."""
    return replace(smoke, nodes=tuple(changed.get(node.name, node) for node in smoke.nodes))


def suspect(
    kind: str, nodes: Iterable[str], *evidence: str, gpus: Sequence[int] = ()
) -> SmokeSuspect:
    return SmokeSuspect(kind, tuple(nodes), tuple(gpus), evidence)


NODE = suspect(
    "node", ["node07"],
    "fails with node05 [23]: hangs in large, and with node01 [25]: hangs in large",
    "without it these pass together [26]",
    "plain TCP fails on the same nodes, too: the path (node05: 0.94 Mbit/s there and back) [31]",
)  # fmt: skip
WRONG = "the product of matrices: 1 of 65536 numbers are wrong, number 17 is 211, not 212"
WRONG_ON_5 = f"GPU 5 of node03 fails alone [7]: node03 GPU 5: {WRONG}"
GPU = suspect("gpu", ["node03"], WRONG_ON_5, gpus=[5])
MTU = (
    "small messages come back and large ones do not: full packets are dropped on the way "
    "(a smaller MTU there, and no ICMP that says so)"
)
PAIR = suspect(
    "pair", ["node02", "node09"],
    f"fail together [31]: node09: {MTU}", "each passes with others [28, 29 and 30]",
)  # fmt: skip
SCALE = suspect(
    "scale", names(49),
    "what failed [41 and 43]: hangs in init, could not be pinned down: among node01, node02, "
    "node03 and 46 more",
)  # fmt: skip
#: The nodes of a switch, each by itself.
SWITCH = [
    suspect("node", [name], "neither reaches nor is reached by 16 of 31 others [20 and 21]")
    for name in names(32)[17:]
]


def mixed() -> SmokeReport:
    """Several suspects, a warning, and nodes that were not tested for two reasons."""
    engine, every = "torch 2.13.0+cu130 over nccl", tuple(range(8))
    pair = suspect(
        "pair", ["node02", "node13"],
        "fail together [34]: hangs in large", "each passes with others [28, 29, 32 and 33]",
    )  # fmt: skip
    blamed = ("node02", "node03", "node09", "node13")
    nodes = {
        name: SmokeNode(name, SUSPECT if name in blamed else PASSED, "", 8, every, engine, (), 8,
                        "IB", "eth0", tuple(f"mlx5_{n}:1/IB" for n in range(8)), gdr=True)
        for name in names(16)
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
    return made(
        0, GPU, PAIR, pair, engine=engine, proves=NCCL,
        links=(LinkBandwidth("between", 16, 371.2, 344.0, ("node05", "node06"), 300.0),),
        nodes=tuple(nodes.values()), tests=23, single_node_tests=13, rounds=12,
    )  # fmt: skip


def gpus() -> SmokeReport:
    """64 nodes of eight GPUs each, with a floor for the bandwidth."""
    engine = "torch 2.13.0+cu130 over nccl (NCCL 2.28.3)"
    fast = LinkBandwidth("between", 9, 381.4, 312.25, ("node033",), 350.0)
    nodes = [
        SmokeNode(f"node{number:03d}", PASSED, "", 8, tuple(range(8)), engine)
        for number in range(1, 65)
    ]
    return made(
        0, replace(GPU, nodes=("node033",)), engine=engine, nodes=tuple(nodes), links=(fast,),
        tests=31, rounds=17, single_node_tests=512,
    )  # fmt: skip


def recorded(
    links: tuple[LinkBandwidth, ...], *suspects: SmokeSuspect, **figures: object
) -> SmokeReport:
    """Twelve nodes of the lab, as a run on them was: docs/smoke.md shows it."""
    blamed = {name for suspect in suspects for name in suspect.blamed}
    engine = "torch 1.13.0a0 over gloo"
    nodes = tuple(
        SmokeNode(name, SUSPECT if name in blamed else PASSED, "", 2, (), engine,
                  network="gloo", interface="eth0")
        for name in LAB
    )  # fmt: skip
    return made(0, *suspects, engine=engine, nodes=nodes, links=links, **figures)


LAB = [f"node{number:03d}" for number in range(1, 13)]
LAB_GO = recorded(
    (
        LinkBandwidth("inside", 12, 1.22, 0.82, ("node004",)),
        LinkBandwidth("between", 5, 1.09, 0.63, tuple(LAB)),
    ),
    tests=5, rounds=58, finished="2030-01-02T03:04:33Z",
)  # fmt: skip
#: A packet filter on node007 drops what is large on its way out.
LAB_NO_GO = recorded(
    (
        LinkBandwidth("inside", 12, 0.78, 0.603, ("node006",)),
        LinkBandwidth("between", 6, 0.923, 0.673, (*LAB[:6], *LAB[7:])),
    ),
    suspect(
        "node", ["node007"],
        "fails with node009 [19]: hangs in all_gather, and with node004 [21]: hangs in all_gather",
        "without it these pass together [22]",
        f"plain TCP fails on the same nodes, too: the path (node009: {MTU}) [163]",
    ),
    tests=11, rounds=35, finished="2030-01-02T03:05:29Z",
)  # fmt: skip


def nothing() -> SmokeReport:
    why = "no PyTorch in /usr/bin/python3, and no nccl-tests"
    nodes = tuple(SmokeNode(name, UNTESTED, why) for name in names(3))
    return made(
        0,
        nodes=nodes,
        engine="",
        proves="",
        control="",
        tests=0,
        single_node_tests=0,
        rounds=0,
        links=(),
    )


def partial() -> SmokeReport:
    found = made(12, NODE, complete=False, stopped="interrupted in round 6", tests=9, rounds=5)
    unknown = {
        name: SmokeNode(name, UNTESTED, "interrupted in round 6") for name in ("node11", "node12")
    }
    return other(found, unknown)


SMOKES = {
    "go": made(12, tests=8, rounds=4),
    "node": made(12, NODE),
    "gpu": gpus(),
    "pair": made(12, PAIR),
    "scale": made(64, SCALE),
    "switch": made(32, *SWITCH, tests=27, rounds=14),
    "mixed": mixed(),
    "interrupted": partial(),
    "budget": made(12, stopped="the budget of 30 s was over in round 12"),
    "nothing": nothing(),
    "lab-go": LAB_GO,
    "lab-no-go": LAB_NO_GO,
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
    number = made(8, replace(SCALE, nodes=tuple(names(8))))
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


def test_nodes_with_the_same_evidence_are_one_row():
    rows = lines(made(12, *(replace(NODE, nodes=(name,)) for name in ("node02", "node05"))))
    assert rows.count("node     node[02,05]  2 nodes") == 1
    assert rows[0].startswith("NO-GO    2 suspects among 12 nodes")


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
