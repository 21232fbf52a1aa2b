"""The formats: one registry, one signature, and nothing imported before it is asked for."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import click
import pytest

import nodeready.cli
from nodeready.cli import cli
from nodeready.deploy.document import Action, Change, Deploy, Outcome
from nodeready.deploy.document import Node as DeployNode
from nodeready.inventory.nodeset import expand
from nodeready.node.tail import File, Unread
from nodeready.node.tail import Tail as NodeTail
from nodeready.reports.registry import FORMATS, Format, Options, find, names
from nodeready.smoke.document import PASSED, SUSPECT, UNREACHABLE, UNTESTED, WARNED, Suspect
from nodeready.smoke.document import Node as SmokeNode
from nodeready.subjects.result import fixable, warn
from nodeready.transport import bundle
from nodeready.triage.cores import Cores
from nodeready.triage.logs import Grouping
from nodeready.triage.stacks.document import Group as StackGroup
from tests.builders import stack_fleets
from tests.builders.fleets import outcomes
from tests.unit.reports.test_smoke_table import made as smoke_made
from tests.unit.triage.test_cores import crash

ROWS = [row for rows in FORMATS.values() for row in rows.values()]
IDS = [f"{row.document}-{row.name}" for row in ROWS]
CLI = Path(nodeready.cli.__path__[0])


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_renderer_has_the_one_signature(row):
    function = getattr(importlib.import_module(row.module), row.renderer.partition(":")[2])
    (_, options) = inspect.signature(function).parameters.values()
    assert (options.name, options.annotation, options.default) == ("options", "Options", Options())
    returned = "Iterator[Line]" if row.styled else "Iterator[str]"
    assert inspect.signature(function).return_annotation == returned


def test_what_stacks_shows_of_a_check_it_offers():
    assert set(names("debuggable")) <= set(names("stacks"))


@pytest.mark.parametrize("document", [name for name in FORMATS if name != "debuggable"])
def test_a_command_offers_what_the_registry_has(document):
    command = cli.get_command(click.Context(cli), document)
    assert command is not None
    (option,) = [one for one in command.params if one.name == "format"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == names(document)
    assert option.default == names(document)[0]


def test_no_command_names_a_renderer_of_its_own():
    """What a command still imports of the reports is words, and lines beside a document."""
    renderers = {row.module for row in ROWS}
    functions = {row.renderer.partition(":")[2] for row in ROWS}
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in renderers:
                assert not functions & {alias.name for alias in node.names}, path.name


def test_the_node_carries_its_formats_and_no_other():
    carried = {name for name in bundle.modules() if name.startswith("nodeready.reports.")}
    wanted = {row.module for row in ROWS if row.on_node}
    shared = {"nodeready.reports.registry"}
    assert carried == wanted | shared


def test_help_imports_no_renderer():
    code = (
        "import sys, nodeready.cli.audit, nodeready.cli.stacks\n"
        "print(*[name for name in sys.modules if name.startswith('nodeready.reports')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert "nodeready.reports.registry" in ran.stdout
    heavy = ("junit", "stacks_html", "exports")
    assert not [name for name in ran.stdout.split() if name.endswith(heavy)]


def test_a_file_of_a_table_is_its_lines_without_their_styles():
    made = outcomes()["fail"]
    table = find("audit", "table")
    lines = [line.plain for line in table.lines(made)]
    assert "".join(table.render(made)) == "".join(f"{line}\n" for line in lines)
    with pytest.raises(ValueError, match="audit as json"):
        find("audit", "json").lines(made)


def test_a_format_can_show_a_part():
    stacks = stack_fleets.FLEETS["one"]()

    class Whole:
        inside = stacks

    row = Format("stacks", "json", "json_report:stacks", ".json", part="inside")
    assert list(row.render(Whole())) == list(find("stacks", "json").render(stacks))


# --- Every table of 10,000 nodes fits on a screen, and in a pipe nothing is left out.

COUNT = 10_000
#: A terminal of 80 columns, a pipe, and -v.
SCREEN, PIPE = Options(), Options(width=100_000, lines=0)


def gpu(number):
    return f"gpu{number:05}"


def away(numbers):
    return {gpu(n): f"10.0.{n // 256}.{n % 256}: no answer in 15 s" for n in numbers}


def deployed():
    """Plans, outcomes and errors that differ by a number on each node."""
    lost = away(range(0, COUNT, 50))
    nodes = []
    for n in range(COUNT):
        left = fixable("limits.nofile", "1048576", str(n), "/etc/x.conf:3")
        change = Change("limits.logins", (left,), (Action("change", f"change /etc/{n}"),))
        hot = warn("gpus.temp", "60", f"gpu {n % 8}: {60 + n % 24} C", "nvidia-smi", "the fans")
        done = ("limits.logins",) if n % 3 else ()
        failed = {} if n % 3 else {"limits.logins": f"no space left on /etc: {n} bytes"}
        kept = (left,) if n % 7 == 1 else ()
        nodes.append(DeployNode(
            gpu(n), lost.get(gpu(n), ""), gpu(n) in lost, (change,),
            outcome=Outcome(done, failed, "", kept, True), for_a_person=(hot,),
        ))  # fmt: skip
    return tuple(nodes)


def spoiled():
    """Suspects, warnings, busy and lost nodes."""
    nodes, suspects = [], []
    for n in range(COUNT):
        status, why, warnings = PASSED, "", ()
        if n % 40 == 0:
            status, why = UNREACHABLE, away([n])[gpu(n)]
        elif n % 41 == 0:
            status, why = UNTESTED, f"GPU {n % 8} is busy (python, pid {n})"
        elif n % 37 == 0:
            status, warnings = WARNED, (f"GPU {n % 8}: {n} new corrected ECC errors",)
        elif n % 33 == 0:
            status = SUSPECT
            why_ = (f"fails with {gpu(n + 1)} [{n % 77}]: hangs in large", "without it [26] pass")
            suspects.append(Suspect("node", (gpu(n),), (), why_))
        nodes.append(SmokeNode(gpu(n), status, why, 8, (), "torch 2.1", warnings))
    return smoke_made(0, *suspects, nodes=tuple(nodes))


def logs():
    """A line of its own in every tenth log, files that cannot be read, nodes without an answer."""
    grouping = Grouping()
    for n in range(4000):
        lines = tuple([f"step {n}" if n % 10 == 0 else "step 9"] * 10)
        file = File(f"/log/rank_{n}.log", 100, 1_800_000_000.0, 2.0, lines, None)
        unread = (Unread(f"/log/{n}.err", "permission denied", True),) if n % 17 == 0 else ()
        grouping.add(gpu(n), NodeTail("x", (file,), unread, 0, 0, ""))
    return grouping.done(
        pattern="/log/*", started="s", finished="f", unreachable=away(range(4000, 9000)),
        failed={gpu(n): f"no Python 3.9 on {gpu(n)}" for n in range(9000, COUNT)},
    )  # fmt: skip


def crashed():
    """1,000 kinds of crashes, cores that cannot be read, notes, nodes without an answer."""
    crashes = [
        crash(gpu(n), 11, f"#0 0x1 in f{n} (x=1) at a.c:{n}\n#1 0x2 in main () at m.c:3")
        for n in range(2000)
    ]
    crashes = [
        replace(one, core=replace(one.core, unread=f"gdb: /var/core.{at}: no such file"))
        if at % 2 else one
        for at, one in enumerate(crashes)
    ]  # fmt: skip
    lost = away(range(4000, COUNT))
    return Cores(
        "2030-01-02T03:04:05Z", "2030-01-02T03:04:05Z", tuple(map(gpu, range(COUNT))),
        tuple(crashes), lost, frozenset(lost),
        {gpu(n): (f"{gpu(n)}: core_pattern is |/x {n}",) for n in range(500)},
    )  # fmt: skip


def silent():
    """A hung job, and 10,000 nodes without an answer, half of them in groups of their own."""
    hung, lost = stack_fleets.FLEETS["hung"](), away(range(COUNT))
    groups = tuple(
        StackGroup("no-data", None, (), (gpu(n),), why=lost[gpu(n)]) for n in range(5000)
    )
    processes = tuple(one._replace(group=one.group + len(groups)) for one in hung.processes)
    return replace(hung, groups=groups + hung.groups, processes=processes, errors=lost)


#: The document, its nodes, and words that are there once.
TABLES = {
    "deploy --check": lambda: ("deploy", Deploy("s", "f", True, ("limits",), tuple(
        replace(one, outcome=None) for one in deployed()
    )), range(COUNT), "change /etc/0 to 9999"),
    "deploy": lambda: ("deploy", Deploy("s", "f", False, ("limits",), deployed()),
                       range(COUNT), "no space left on /etc: "),
    "smoke": lambda: ("smoke", spoiled(), range(COUNT), "new corrected ECC errors"),
    "tail": lambda: ("tail", logs(), range(COUNT), "no Python 3.9 on NODE"),
    "cores": lambda: ("cores", crashed(), [*range(2000), *range(4000, COUNT)],
                      "gdb: /var/core.1 to core.1999: no such file"),
    "stacks": lambda: ("stacks", silent(), range(COUNT), "gpu[00000-04999]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tables():
    return lru_cache(lambda name: TABLES[name]())


@pytest.mark.parametrize("name", TABLES)
def test_ten_thousand_nodes_are_one_screen(name, tables):
    document, made, _, words = tables(name)
    shown = [line.plain for line in find(document, "table").lines(made, SCREEN)]
    height = sum(1 if len(row) <= 80 else -(-len(row) // 67) for row in shown)
    assert height <= 44
    assert len(shown) <= 40
    assert sum(words in row for row in shown) == 1


@pytest.mark.parametrize("name", [name for name in TABLES if name != "stacks"])
def test_a_pipe_has_every_node(name, tables):
    document, made, numbers, _ = tables(name)
    text = "".join(f"{line.plain}\n" for line in find(document, "table").lines(made, PIPE))
    named = set()
    for word in re.findall(r"gpu\[[0-9,-]+\]|gpu[0-9]{5}", text):
        named.update(expand(word))
    assert named >= {gpu(n) for n in numbers}
    assert "(-v shows" not in text
    assert " nodes)" not in text
