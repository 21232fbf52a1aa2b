"""Tables of large fleets: on a terminal one screen, in a pipe every node."""

import json
import random
import re
from dataclasses import replace
from functools import cache

import pytest

from nodeready.agent.audit_document import Outlier, Ready
from nodeready.agent.cores.program import CoreFile, CoreSummary
from nodeready.agent.tail import LogTail, NodeTail, UnreadFile
from nodeready.core.outcome import LOST, NO_PYTHON, Gap, node_gaps
from nodeready.fleet.inventory.nodeset import expand
from nodeready.reports import json_report
from nodeready.reports.audit_table import changes, findings_of
from nodeready.reports.lines import fold_similar, reasons
from nodeready.reports.monitoring import nagios
from nodeready.reports.registry import PLAIN, Options, find_format
from nodeready.runs.cores import Cores, Crash, CrashFile
from nodeready.runs.deploy.document import Deploy, DeployOutcome, PlannedAction, PlannedChange
from nodeready.runs.deploy.document import DeployedNode as DeployNode
from nodeready.runs.smoke.document import (
    PASSED,
    SUSPECT,
    UNREACHABLE,
    UNTESTED,
    WARNED,
    SmokeNode,
    SmokeReport,
)
from nodeready.runs.smoke.knowledge import SmokeSuspect
from nodeready.runs.stacks.document import Group
from nodeready.runs.tail import Grouping
from tests.builders import stack_fleets
from tests.builders.fleets import MEMLOCK, RCMD, SCOPE, audit, crowd, lost, node, outcomes, rated
from tests.builders.results import fail, fixable, unknown, warn
from tests.cases import cases, read_table

AUDITS = outcomes()
#: Nodes of a fleet; the larger one for `make test-all`.
COUNTS = pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.nightly)])
PIPE = Options(width=100_000, lines=0)


def lines(report, options=PLAIN, document="audit"):
    return [line.plain for line in find_format(document, "table").lines(report, options)]


# --- Findings of an audit.


def test_three_hundred_findings_are_cut_and_counted():
    shown = lines(crowd(300, 50))
    assert len(shown) < 110
    assert any("and 270 more" in line for line in shown)
    every = "\n".join(lines(crowd(300, 50), Options(verbose=1)))
    assert all(f"host.check_{i}" in every for i in range(300))


def test_markup_of_a_node_is_text():
    (row,) = (
        line
        for line in find_format("audit", "table").lines(AUDITS["hostile"])
        if line.plain.startswith("fail")
    )
    assert "[bold]x[/bold]" in "\n".join(lines(AUDITS["hostile"]))
    assert ("x", "bold") not in row.parts


@pytest.mark.parametrize("case", cases(__file__, "data/alike.json", "reasons"))
def test_reasons_that_differ_by_an_address_are_one(case):
    texts = case["texts"]
    rows = reasons((f"n{at}", text) for at, text in enumerate(texts))
    assert sorted(why for why, _ in rows) == sorted(case["rows"])
    assert sum(len(names) for _, names in rows) == len(texts)


@pytest.mark.parametrize("case", cases(__file__, "data/alike.json", "texts"))
def test_texts_that_are_alike_are_one_row(case):
    texts = case["texts"]
    rows = fold_similar(((text,), f"n{at}") for at, text in enumerate(texts))
    shown = [
        row.shared_texts[0] if row.shared_texts else f"e.g. {row.example}: {row.instance[0]}"
        for row in rows
    ]
    assert sorted(shown) == sorted(case["rows"])
    names = [name for row in rows for name in row.names]
    assert sorted(names) == sorted(f"n{at}" for at in range(len(texts)))


# --- Audits of a fleet in which the nodes differ in many ways.


def gpu(number):
    return f"gpu{number:05}"


def no_answer(number):
    return f"10.0.{number // 256}.{number % 256}: no answer in 15 s"


def random_names(count):
    draw = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    prefixes = ["".join(draw.choices(letters, k=6)) for _ in range(count // 9)]
    return [f"{draw.choice(prefixes)}{number}" for number in range(count)]


def five_faults(number):
    """1 % of the nodes is bad, in five ways."""
    rows = [[SCOPE], [MEMLOCK], [RCMD], [unknown("limits.observed", "timed out")],
            [fail("gpus.count", "8", "7", "nvidia-smi", "look at dmesg")]]  # fmt: skip
    return rows[number // 20 % 5] if number % 20 == 7 else []


def numbers(number):
    return [
        warn("gpus.temperature", "60 °C", f"{60 + number % 24}.{number % 10} °C", "nvidia-smi"),
        fail("gpus.ecc_errors", "0", f"{17 + number} corrected errors", "nvidia-smi", "replace"),
        fail("host.disk", "10 GB", f"{number / 1100:.2f} GB free on /scratch", "df"),
        fail("host.own", "", f"{gpu(number)}.example.org has load {number}"),
    ]


def everything(number):
    rows = [
        fail(f"host.check_{at}", "on", f"off since {number * at} s", "/proc/x", f"turn {at} on")
        for at in range(60)
        if (number + at) % 50 < at
    ]
    return [*rows, SCOPE, unknown("limits.observed", f"timed out {'x' * (number % 41)}")]


def each(count, results):
    return [node(gpu(number), *results(number)) for number in range(count)]


SHAPES = {
    "three": lambda n: audit(*each(n, lambda at: [SCOPE] if at in (17, 231, 398) else [])),
    "faults": lambda n: audit(*each(n, five_faults)),
    "numbers": lambda n: audit(*each(n, numbers)),
    "lost": lambda n: audit(*(lost(gpu(at), no_answer(at)) for at in range(n))),
    "names": lambda n: audit(*(
        lost(f"n{at}", f"host name n{at}.example.org does not resolve") for at in range(n)
    )),
    "random": lambda n: audit(*(
        node(name, *([SCOPE] if at % 3 else [])) for at, name in enumerate(random_names(n))
    )),
    "minority": lambda n: audit(*each(
        n, lambda at: [RCMD] if at > n - 4 else [SCOPE] if at < n // 2 else []
    )),
    "outliers": lambda n: audit(*each(n, lambda at: []), outliers=tuple(
        Outlier(f"host.fact{at}", "gpu", 17, n - 300, {gpu(n): n for n in range(300)})
        for at in range(50)
    )),
    "everything": lambda n: audit(*each(n // 4, everything), *(
        lost(f"x{at}", f"{'why ' * (at % 9)}{at}" if at % 2 else no_answer(at))
        for at in range(n // 20)
    )),
}  # fmt: skip
shaped = cache(lambda name, count: SHAPES[name](count))


def height(rows, width, indent=13):
    """Lines of a terminal on which a long line goes on below its own text."""
    return sum(1 if len(row) <= width else -(-len(row) // (width - indent)) for row in rows)


@COUNTS
@pytest.mark.parametrize("name", SHAPES)
def test_an_audit_fits_on_a_screen(name, count):
    report = shaped(name, count)
    for width, room in ((80, 40), (200, 48)):
        options = Options(width=width, lines=room)
        assert height(lines(report, options), width) <= room
        assert height(lines(Ready(report, 60), options, "ready"), width) <= room


#: A row of nodes that are not well, and their names.
ROW = re.compile(
    r"(unreachable|failed|fail|warn|unknown|differs) +(?:[a-z_]+\.[\w.]+ +)?(\S+)(  [a-z ]+\??)?$"
)


@COUNTS
@pytest.mark.parametrize("name", SHAPES)
def test_an_audit_in_a_pipe_names_exactly_the_bad_nodes(name, count):
    report = shaped(name, count)
    shown = lines(report, PIPE)
    named = {n for row in shown if (match := ROW.match(row)) for n in expand(match[2])}
    bad = {host.name for host in report.nodes if host.status not in ("ok", "na")}
    assert named == bad | {n for outlier in report.outliers for n in outlier.nodes}
    assert not any("more (-v" in row for row in shown)
    document = json.loads("".join(json_report.render(report)))
    assert [row["name"] for row in document["nodes"]] == [host.name for host in report.nodes]


@pytest.mark.parametrize(
    ("name", "words"), read_table(__file__, "texts_that_differ_by_a_value_or_a_name_are_one_row")
)
def test_texts_that_differ_by_a_value_or_a_name_are_one_row(name, words):
    assert sum(words in row for row in lines(shaped(name, 400))) == 1


def test_a_table_that_was_cut_names_where_the_rest_is():
    *_, last = lines(shaped("random", 400))
    assert last.startswith("all of it: -v, | less, or --format json; ")
    assert last.endswith("--limit @last-failed")
    assert not [row for row in lines(shaped("three", 400)) if "--limit @last-failed" in row]


MANY = rated(fixable("ptrace.selinux", "off", "on"))
UNKNOWN = rated(unknown("ptrace.sysctl_conf", "late"))
#: Fewer nodes for what ranks higher.
RANKED = audit(
    *(node(gpu(number), MANY, MEMLOCK, UNKNOWN) for number in range(6)),
    *(node(gpu(number), MEMLOCK, SCOPE) for number in range(6, 9)),
    node(gpu(9), RCMD),
    node(gpu(10), MEMLOCK),
)
ORDER = ["pdsh.rcmd", "ptrace.selinux", "ptrace.scope", "ptrace.sysctl_conf", "limits.memlock"]


def of_deploy(report):
    """The deploy of the same nodes, with all that is left for a person."""
    nodes = (
        DeployNode(host.name, for_a_person=tuple(row for row in host.results if row.bad))
        for host in report.nodes
    )
    return Deploy(report.started, report.finished, True, ("ptrace",), tuple(nodes))


@pytest.mark.parametrize(
    ("show", "order"),
    [
        (lines, ORDER),
        (lambda report: lines(report, PIPE), ORDER),
        (lambda report: lines(report, Options(verbose=1)), ORDER),
        (lambda report: lines(Ready(report, 60), document="ready"), ORDER),
        (lambda report: "".join(nagios(report)).splitlines(), ORDER),
        (lambda report: lines(of_deploy(report), document="deploy"), ORDER),
        # Changes of one moment have no severity: most nodes first within a status.
        (lambda report: [row.plain for row in changes({}, findings_of(report, {}), "now")],
         [*ORDER[1:3], ORDER[0], *ORDER[3:]]),
    ],
    ids=["table", "pipe", "verbose", "ready", "nagios", "deploy", "watch"],
)  # fmt: skip
def test_unknown_ranks_above_warn_and_the_severity_above_the_number_of_nodes(show, order):
    rows = [row for row in show(RANKED) if re.match(r" *(now +)?(fail|unknown|warn) ", row, re.I)]
    assert [check for row in rows for check in ORDER if check in row] == order


# --- The other documents.


def away(numbers):
    return {gpu(number): Gap(LOST, no_answer(number)) for number in numbers}


def deployed(count):
    """Plans, outcomes and errors that differ by a number on each node."""
    gaps = away(range(0, count, 50))
    nodes = []
    for n in range(count):
        left = fixable("limits.nofile", "1048576", str(n), "/etc/x.conf:3")
        change = PlannedChange(
            "limits.logins", (left,), (PlannedAction("change", f"change /etc/{n}"),)
        )
        hot = warn("gpus.temp", "60", f"gpu {n % 8}: {60 + n % 24} C", "nvidia-smi", "the fans")
        done = ("limits.logins",) if n % 3 else ()
        failed = {} if n % 3 else {"limits.logins": f"no space left on /etc: {n} bytes"}
        outcome = DeployOutcome(done, failed, "", (left,) if n % 7 == 1 else (), True)
        nodes.append(
            DeployNode(gpu(n), gaps.get(gpu(n)), (change,),
                       outcome=outcome, for_a_person=(hot,))
        )  # fmt: skip
    return Deploy("s", "f", False, ("limits",), tuple(nodes))


def planned(count):
    report = deployed(count)
    return replace(report, check=True, nodes=tuple(replace(n, outcome=None) for n in report.nodes))


def smoked(count):
    """Suspects, warnings, busy and unreachable nodes."""
    nodes, suspects = [], []
    for n in range(count):
        status, why, warnings, gap = PASSED, "", (), None
        if n % 40 == 0:
            status, gap = UNREACHABLE, Gap(LOST, no_answer(n))
        elif n % 41 == 0:
            status, why = UNTESTED, f"GPU {n % 8} is busy (python, pid {n})"
        elif n % 37 == 0:
            status, warnings = WARNED, (f"GPU {n % 8}: {n} new corrected ECC errors",)
        elif n * n % 7 in (1, 4):
            status = SUSPECT
            reasons = (
                f"fails with {gpu(n + 1)} [{n % 77}]: hangs in large",
                "without it [26] pass",
            )
            suspects.append(SmokeSuspect("node", (gpu(n),), (), reasons))
        nodes.append(SmokeNode(gpu(n), status, why, 8, (), "torch 2.1", warnings, gap=gap))
    return SmokeReport(
        started="2030-01-02T03:04:05Z", finished="2030-01-02T03:04:46Z", complete=True,
        engine="torch 2.1", proves="all_reduce", control="pairs over tcp", budget_s=300, tests=19,
        single_node_tests=12,
        rounds=11, nodes=tuple(nodes), suspects=tuple(suspects), links=(),
    )  # fmt: skip


def logs(count):
    """A line of its own in every tenth log, files that cannot be read, nodes without an answer."""
    grouping, good = Grouping(), count * 2 // 5
    for n in range(good):
        rows = tuple([f"step {n}" if n % 10 == 0 else "step 9"] * 10)
        file = LogTail(f"/log/rank_{n}.log", 100, 1_800_000_000.0, 2.0, rows, None)
        unread = (UnreadFile(f"/log/{n}.err", "permission denied", True),) if n % 17 == 0 else ()
        grouping.add(gpu(n), NodeTail("x", (file,), unread, 0, 0, ""))
    return grouping.document(
        pattern="/log/*", started="s", finished="f",
        gaps=node_gaps({
            **away(range(good, count * 9 // 10)),
            **{gpu(n): Gap(NO_PYTHON, f"no Python 3.9 on {gpu(n)}")
               for n in range(count * 9 // 10, count)},
        }),
    )  # fmt: skip


def crashed(count):
    """Many kinds of crashes, cores that cannot be read, notes, nodes without an answer."""
    good, crashes = count // 2, []
    for n in range(good):
        path = f"/var/core.{n}"
        file = CrashFile(CoreFile(path, 1, n, 5, 0, 0.5), gpu(n), (gpu(n),), gpu(n))
        unread = f"gdb: {path}: no such file" if n % 2 else ""
        text = f"== the thread of the signal\n#0 0x1 in f{n} (x=1) at a.c:{n}\n#1 0x2 in main ()"
        core = CoreSummary(0, signal=11, program="/usr/bin/python3", unread=unread)
        crashes.append(Crash(file, core, text))
    gaps = node_gaps(away(range(good, count)))
    return Cores(
        "2030-01-02T03:04:05Z", "2030-01-02T03:04:05Z", tuple(map(gpu, range(count))),
        tuple(crashes), gaps,
        {gpu(n): (f"{gpu(n)}: core_pattern is |/x {n}",) for n in range(count // 20)},
    )  # fmt: skip


def silent(count):
    """A hung job, and nodes without an answer, half of them in groups of their own."""
    hung, gaps = stack_fleets.FLEETS["hung"](), away(range(count))
    groups = tuple(
        Group("no-data", None, (), (gpu(n),), no_stack_reason=gaps[gpu(n)].reason)
        for n in range(count // 2)
    )
    processes = tuple(p._replace(group=p.group + len(groups)) for p in hung.processes)
    return replace(hung, groups=groups + hung.groups, processes=processes, gaps=node_gaps(gaps))


#: name -> document, how it is report, words of one row
TABLES = {
    "deploy --check": ("deploy", planned, "change /etc/0 to "),
    "deploy": ("deploy", deployed, "no space left on /etc: "),
    "smoke": ("smoke", smoked, "new corrected ECC errors"),
    "tail": ("tail", logs, "no Python 3.9 on NODE"),
    "cores": ("cores", crashed, "gdb: /var/core.1 to core."),
    "stacks": ("stacks", silent, "gpu[00000-0"),
}
tables = cache(lambda name, count: TABLES[name][1](count))


@COUNTS
@pytest.mark.parametrize("name", TABLES)
def test_every_table_fits_on_a_screen(name, count):
    document, _, words = TABLES[name]
    shown = lines(tables(name, count), document=document)
    assert height(shown, 80) <= 44
    assert len(shown) <= 40
    assert sum(words in row for row in shown) == 1


@COUNTS
@pytest.mark.parametrize("name", [name for name in TABLES if name != "stacks"])
def test_every_table_in_a_pipe_names_every_node(name, count):
    text = "\n".join(lines(tables(name, count), PIPE, TABLES[name][0]))
    named = set()
    for word in re.findall(r"gpu\[[0-9,-]+\]|gpu[0-9]{5}", text):
        named.update(expand(word))
    assert named >= {gpu(n) for n in range(count)}
    assert "(-v shows" not in text
    assert " nodes)" not in text
