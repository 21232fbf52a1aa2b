"""Each format is what its readers expect, whatever a node says."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from pathlib import Path

import jsonschema
import pytest
import xmlschema
from prometheus_client.parser import text_string_to_metric_families

from nodeready.audit.document import Outlier, Ready
from nodeready.cli.screen import UNLIMITED
from nodeready.inventory.nodeset import expand
from nodeready.reports import json_report, junit, monitoring
from nodeready.reports.registry import Options, alike, reasons
from nodeready.reports.table import show_audit, show_ready
from nodeready.subjects.result import fail, unknown, warn
from tests.builders.fleets import (
    HOSTILE,
    MEMLOCK,
    RCMD,
    SCOPE,
    Ptrace,
    audit,
    crowd,
    fleet,
    lost,
    node,
    outcomes,
)
from tests.paths import schema
from tests.unit.reports.test_golden import FORMATS

SCHEMA = schema("audit")
JUNIT = xmlschema.XMLSchema(str(Path(__file__).parent / "data" / "junit-10.xsd"))
VALID = jsonschema.Draft202012Validator(SCHEMA)
AUDITS = {**outcomes(), "fleet": fleet(100)}
HURT = AUDITS["hostile"]


def document(made):
    return json.loads("".join(json_report.audit(made)))


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_that_a_node_says_can_steer_a_terminal(form):
    text = "".join(FORMATS[form](HURT))
    assert "\\x1b" in text
    assert "\\xff" in text
    assert not {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n"}
    assert not set("\u202e") & set(text)
    text.encode()


@pytest.mark.parametrize("name", AUDITS)
def test_json_is_as_its_schema_says(name):
    made = document(AUDITS[name])
    VALID.validate(made)
    assert [one["name"] for one in made["nodes"]] == [one.name for one in AUDITS[name].nodes]


def test_the_schema_is_strict():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    good = document(AUDITS["fail"])
    for spoil in (
        lambda doc: doc.update(more=1),
        lambda doc: doc["nodes"][0].update(more=1),
        lambda doc: doc["nodes"][0].update(status="unreachable"),
        lambda doc: doc["nodes"][0]["results"][0].update(status="green"),
        lambda doc: doc["nodes"][0]["results"][0].pop("source"),
        lambda doc: doc["summary"]["nodes"].pop("failed"),
        lambda doc: doc.update(started="yesterday"),
    ):
        bad = json.loads(json.dumps(good))
        spoil(bad)
        assert not VALID.is_valid(bad)


def test_json_keeps_what_is_no_danger():
    text = 'é ü 日本 😀 "quoted" back\\slash \\u001b tab\t'
    one = audit(node("gpu001"))
    one.nodes[0].snapshot.subjects["ptrace"] = Ptrace(winner=text)
    assert document(one)["nodes"][0]["facts"]["ptrace"]["winner"] == text


def test_json_is_written_a_node_at_a_time():
    pieces = json_report.audit(fleet(50))
    assert max(len(piece) for piece in pieces) < 3000


@pytest.mark.parametrize("name", AUDITS)
def test_junit_is_as_its_schema_says(name):
    made = AUDITS[name]
    text = "".join(junit.render(made))
    JUNIT.validate(text)
    suites = xmlschema.XMLResource(text).root
    summary = made.summary["results"]
    apart = sum(bool(one.error) for one in made.nodes)
    assert len(suites) == len(made.nodes)
    assert len(list(suites.iter("failure"))) == int(suites.get("failures")) == summary["fail"]
    errors = len(list(suites.iter("error")))
    assert errors == int(suites.get("errors")) == summary["unknown"] + apart
    assert len(list(suites.iter("testcase"))) == int(suites.get("tests"))


def test_what_fails_the_run_fails_in_junit_too():
    text = "".join(junit.render(AUDITS["outliers"], Options(fail_on="warn")))
    JUNIT.validate(text)
    root = xmlschema.XMLResource(text).root
    assert len(list(root.iter("failure"))) == int(root.get("failures")) == 4
    assert 'failures="0"' in "".join(junit.render(AUDITS["outliers"]))


def samples(made):
    found = {}
    for family in text_string_to_metric_families("".join(monitoring.prometheus(made))):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.mark.parametrize("name", AUDITS)
def test_prometheus_reads_it(name):
    made, found = AUDITS[name], samples(AUDITS[name])
    up = {key[1][0][1]: value for key, value in found.items() if key[0] == "nodeready_node_up"}
    assert up == {one.name: float(not one.error) for one in made.nodes}
    bad = sum(made.summary["results"][s] for s in ("fail", "warn", "unknown", "waived"))
    assert sum(key[0] == "nodeready_check_status" for key in found) == bad
    assert found["nodeready_audit_timestamp_seconds", ()] == 1893553457


def test_prometheus_gives_back_what_was_escaped():
    labels = dict(next(key for key in samples(HURT) if key[0] == "nodeready_outlier")[1])
    assert labels["majority"].startswith("\\x1b[31mred\\x1b[0m <b>&\"'</b>")
    assert "{c} \\ \\u202e" in labels["majority"]


@pytest.mark.parametrize("name", AUDITS)
def test_nagios_finds_its_performance_data_and_no_other(name):
    text = "".join(monitoring.nagios(AUDITS[name]))
    first, *below = text.splitlines()
    assert first.startswith("NODEREADY ")
    assert first.count("|") == 1
    assert not any("|" in line for line in below)
    for word in first.partition("|")[2].split():
        label, _, values = word.partition("=")
        assert label.isidentifier()
        assert values.split(";")[0].isdigit()


@pytest.mark.parametrize("made", [fleet(1000), crowd(300, 50), HURT], ids=["1000", "300", "hurt"])
def test_nagios_never_says_more_than_nagios_reads(made):
    text = "".join(monitoring.nagios(made))
    assert len(text.encode()) < 8192
    assert len(text.splitlines()) > 3


def lines(made, verbose=0):
    return [line.plain for line in show_audit(made, Options(verbose, 80))]


def test_a_thousand_nodes_with_different_numbers_are_one_finding():
    shown = lines(fleet(1000))
    assert len(shown) < 30
    assert sum("gpus.ecc_errors" in line for line in shown) == 1
    assert any(line.strip().startswith("e.g. gpu0001: gpu 1 (0000:01:00.0)") for line in shown)
    assert len(lines(fleet(1000), verbose=1)) > 300


def test_three_hundred_findings_are_cut_and_counted():
    shown = lines(crowd(300, 50))
    assert len(shown) < 110
    assert any("and 270 more" in line for line in shown)
    every = "\n".join(lines(crowd(300, 50), 1))
    assert all(f"host.check_{i}" in every for i in range(300))


def test_what_is_worst_stands_first():
    words = [line.split()[0] for line in lines(fleet(100)) if line and not line.startswith(" ")]
    order = ["unreachable", "fail", "fail", "warn", "unknown", "differs", "waived", "ok"]
    assert words[: len(order)] == order


def test_a_waiver_is_always_listed_with_its_reason():
    shown = "\n".join(lines(AUDITS["waived"]))
    assert "waived   pdsh.rcmd  gpu004" in shown
    assert "waived: until the login node moves, ticket 4711" in shown


def test_markup_of_a_node_is_text():
    (row,) = (line for line in show_audit(HURT, Options(0, 80)) if line.plain.startswith("fail"))
    assert "[bold]x[/bold]" in "\n".join(lines(HURT))
    assert ("x", "bold") not in row.parts
    assert HOSTILE not in "\n".join(lines(HURT))


# --- 10,000 nodes on one screen: whatever they say, however they are called.

COUNT = 10_000
LOST = "10.0.{}.{}: no answer in 15 s"


def gpus(each):
    """10,000 nodes; ``each(number)``: what is wrong with a node."""
    return [node(f"gpu{number:05}", *each(number)) for number in range(COUNT)]


def randomly(seed=3):
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    prefixes = ["".join(draw.choices(letters, k=6)) for _ in range(1177)]
    return [f"{draw.choice(prefixes)}{number}" for number in range(COUNT)]


def ways(number):
    """1 % of the nodes is bad, in five ways."""
    rows = [[SCOPE], [MEMLOCK], [RCMD], [unknown("limits.observed", "timed out")],
            [fail("gpus.count", "8", "7", "nvidia-smi", "look at dmesg")]]  # fmt: skip
    return rows[number // 100 % 5] if number % 100 == 7 else []


def numbers(number):
    return [
        warn("gpus.temperature", "60 °C", f"{60 + number % 24}.{number % 10} °C", "nvidia-smi"),
        fail(
            "gpus.ecc_errors", "0", f"{17 + number} corrected errors", "nvidia-smi", "replace it"
        ),
        fail("host.disk", "10 GB", f"{number / 1100:.2f} GB free on /scratch", "df"),
        fail("host.own", "", f"gpu{number:05}.example.org has load {number}"),
    ]


def everything(number):
    rows = [
        fail(f"host.check_{at}", "on", f"off since {number * at} s", "/proc/x", f"turn {at} on")
        for at in range(60)
        if (number + at) % 50 < at
    ]
    return [*rows, SCOPE, unknown("limits.observed", f"timed out {'x' * (number % 41)}")]


SHAPES = {
    "three": lambda: audit(*gpus(lambda n: [SCOPE] if n in (17, 231, 9998) else [])),
    "ways": lambda: audit(*gpus(ways)),
    "numbers": lambda: audit(*gpus(numbers)),
    "lost": lambda: audit(*(
        lost(f"gpu{n:05}", LOST.format(n // 256, n % 256)) for n in range(COUNT)
    )),
    "names": lambda: audit(*(
        lost(f"n{n}", f"host name n{n}.example.org does not resolve") for n in range(COUNT)
    )),
    "random": lambda: audit(*(
        node(name, *([SCOPE] if n % 3 else [])) for n, name in enumerate(randomly())
    )),
    "racks": lambda: audit(*(
        node(f"r{n // 156:02}n{n % 156:03}", *([SCOPE] if n * 7919 % 10 < 3 else []))
        for n in range(COUNT)
    )),
    "minority": lambda: audit(*gpus(
        lambda n: [RCMD] if n > COUNT - 4 else [SCOPE] if n < COUNT // 2 else []
    )),
    "outliers": lambda: audit(*gpus(lambda n: []), outliers=tuple(
        Outlier(f"host.fact{at}", "gpu", 17, COUNT - 400, {f"gpu{n:05}": n for n in range(400)})
        for at in range(50)
    )),
    "everything": lambda: audit(*gpus(everything)[: COUNT // 4], *(
        lost(f"x{n}", f"{'why ' * (n % 9)}{n}" if n % 2 else LOST.format(n // 256, n % 256))
        for n in range(500)
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def fleets():
    """``fleets(name)``: such an audit, made once."""
    return lru_cache(lambda name: SHAPES[name]())


def on_a_screen(shown, width):
    """Lines of a terminal on which a long line goes on below its own text."""
    return sum(1 if len(row) <= width else -(-len(row) // (width - 13)) for row in shown)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("shape", ["audit", "ready"])
def test_ten_thousand_nodes_fit_on_a_screen(name, shape, fleets):
    for width, room in ((80, 40), (200, 48)):
        options = Options(width=width, lines=room)
        made = fleets(name)
        rows = show_audit(made, options)
        if shape == "ready":
            rows = show_ready(Ready(made, 60), options)
        assert on_a_screen([row.plain for row in rows], width) <= room


#: A row of nodes that are not well, and how they are told.
ROW = re.compile(r"(unreachable|failed|fail|warn|unknown|differs) +(?:[a-z_]+\.[\w.]+ +)?(\S+)$")


@pytest.mark.parametrize("name", SHAPES)
def test_a_pipe_names_every_node_that_is_not_well(name, fleets):
    """And no other: the folded sets unfold to exactly these nodes."""
    made = fleets(name)
    told = set()
    for row in show_audit(made, Options(width=UNLIMITED, lines=0)):
        if match := ROW.match(row.plain):
            told.update(expand(match[2]))
        assert "more (-v" not in row.plain
    bad = {one.name for one in made.nodes if one.status not in ("ok", "na")}
    assert told == bad | {n for one in made.outliers for n in one.nodes}
    machine = {one["name"] for one in map(json.loads, _rows(made))}
    assert machine == {one.name for one in made.nodes}


def _rows(made):
    """The nodes of the document as JSON, a line each."""
    for row in "".join(json_report.audit(made)).splitlines():
        if row.lstrip().startswith('{"name"'):
            yield row.strip().rstrip(",")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numbers", "60.0 to 83.9 °C (want 60 °C)  [nvidia-smi]"),
        ("numbers", "17 to 10016 corrected errors (want 0)  [nvidia-smi]"),
        ("numbers", "0.00 to 9.09 GB free on /scratch (want 10 GB)  [df]"),
        ("numbers", "NODE has load 0 to 9999"),
        ("lost", "no answer in 15 s"),
        ("names", "host name NODE does not resolve"),
        ("minority", "fail     pdsh.rcmd     gpu[09997-09999]"),
        ("everything", "host.check_59"),
    ],
)
def test_what_differs_by_a_value_or_a_name_is_one_row(name, words, fleets):
    shown = [row.plain.strip() for row in show_audit(fleets(name), Options())]
    assert sum(words in row for row in shown) == 1
    assert len(shown) <= 40


def test_what_is_cut_on_a_screen_says_where_the_rest_is(fleets):
    (last,) = [row.plain for row in show_audit(fleets("random"), Options())][-1:]
    assert last.startswith("all of it: -v, | less, or --format json; ")
    assert last.endswith("--limit @last-failed")
    whole = [row.plain for row in show_audit(fleets("three"), Options())]
    assert not [row for row in whole if "--limit @last-failed" in row]


def test_the_most_nodes_stand_first_within_a_severity(fleets):
    rows = [row.plain.split()[:2] for row in show_audit(fleets("ways"), Options())]
    found = [tuple(row) for row in rows if row and row[0] in ("fail", "warn", "unknown")]
    assert [word for word, _ in found] == ["fail", "fail", "fail", "warn", "unknown"]
    rows = [row.plain for row in show_audit(fleets("minority"), Options())]
    assert rows[0].startswith("fail     ptrace.scope  gpu[00000-04999]")


@pytest.mark.parametrize(
    ("texts", "rows"),
    [
        # An address of each node's own makes no difference, however few the nodes are.
        (["10.0.0.1: refused", "10.0.0.2: refused"], ["refused"]),
        (["fd00::1: refused", "fd00::2: refused"], ["refused"]),
        (["no host key for a.example", "no host key for b.example"], ["no host key for ADDRESS"]),
        # That of one gateway does, and so does a file.
        (["10.0.0.1: refused"] * 2, ["10.0.0.1: refused"]),
        (["no file /etc/a.conf", "no file /etc/b.conf"], ["no file /etc/a.conf",
                                                          "no file /etc/b.conf"]),
        (["no answer in 15 s", "no route"], ["no answer in 15 s", "no route"]),
    ],
)  # fmt: skip
def test_reasons_that_differ_by_an_address_are_one(texts, rows):
    found = reasons((f"n{at}", text) for at, text in enumerate(texts))
    assert sorted(why for why, _ in found) == sorted(rows)
    assert sum(len(names) for _, names in found) == len(texts)


@pytest.mark.parametrize(
    ("texts", "rows"),
    [
        # Few are all told.
        (["a 1", "a 2", "a 3"], ["a 1", "a 2", "a 3"]),
        (["a 1", "a 2", "a 3", "a 14"], ["a 1 to 14"]),
        (["7 of 8", "6 of 8", "5 of 8", "0 of 8"], ["0 to 7 of 8"]),
        (["1,048,576 B", "17 B", "2,311 B", "9 B"], ["9 to 1,048,576 B"]),
        (["x 5"] * 9 + ["x 1", "x 2", "x 3"], ["x mostly 5 (1 to 5)"]),
        (["on eth0"] * 2 + ["on eth1", "on eth2", "on eth13"], ["on eth0 to eth13"]),
        (["v1.2.3", "v1.2.4", "v1.2.5", "v2.0.0"], ["v1.2.3, v1.2.4 and 2 more"]),
        # The node's own name makes no difference, another node's does.
        (["n0: off", "n1: off"], ["off"]),
        (["see n1", "see n0"], ["see n1", "see n0"]),
        # Of many shapes, the first ones and an example.
        ([f"{'x ' * n}{n}" for n in range(9)], ["0", "x 1", "e.g. n2: x x 2"]),
    ],
)
def test_texts_that_are_alike_are_one_row(texts, rows):
    found = alike(((text,), f"n{at}") for at, text in enumerate(texts))
    shown = [
        row.said[0] if row.said else f"e.g. {row.example}: {row.instance[0]}" for row in found
    ]
    assert sorted(shown) == sorted(rows)
    assert sorted(name for row in found for name in row.names) == sorted(
        f"n{at}" for at in range(len(texts))
    )
