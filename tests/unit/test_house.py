"""The walls of the house: who may import whom, and what runs on a node.

tests/rooms.py has the rooms in their order. Every import counts here, also one inside a function
and one for types alone.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import draw_house
import pytest

from tests.paths import PACKAGE, ROOT
from tests.rooms import ROOMS

OPERATIONS = ROOT / "operations"
#: module (`policy.fields`) -> its file.
FILES = draw_house.sources()
#: module -> the modules of the package that it imports.
IMPORTS = {
    module: {target for target, _ in draw_house.imported(path, FILES)}
    for module, path in FILES.items()
}
#: A node asks only for what its own program has: these fold the names of many nodes.
NEVER_ON_A_NODE = {"inventory.nodeset"}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def crossings(*rooms: str) -> set[tuple[str, str]]:
    """The imports of modules of other rooms in these: (module, what it imports)."""
    return {
        (module, target)
        for module, targets in IMPORTS.items()
        for target in targets
        if room_of(module) in rooms and room_of(target) != room_of(module)
    }


def packages(path: Path) -> set[str]:
    """The first words of everything that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found.add((node.module or "").partition(".")[0])
    return found


def reached(starts: set[str]) -> set[str]:
    """These modules, their packages, and all that they import, and so on."""
    found: set[str] = set()
    todo = set(starts)
    while todo:
        found |= todo
        todo = {target for module in todo for target in IMPORTS[module]}
        todo |= {module.rpartition(".")[0] for module in found} & FILES.keys()
        todo -= found | NEVER_ON_A_NODE
    return found


ON_A_NODE = sorted(reached({name for name in FILES if room_of(name) in ("healthcheck", "node")}))


def test_a_room_imports_only_rooms_above_it():
    rooms, _ = draw_house.read()
    assert draw_house.against(rooms, list(ROOMS)) == []
    assert set(rooms) == set(ROOMS)


def test_only_the_four_gates_stand_at_the_root():
    gates = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert gates == {"shell", "text", "files", "exit_codes"}
    assert list(ROOMS)[: len(gates)] == ["shell", "text", "files", "exit_codes"]


def test_no_modules_import_each_other_when_they_are_loaded():
    _, graph = draw_house.read()
    leader = draw_house.circles(graph)
    assert {module: other for module, other in leader.items() if module != other} == {}


def test_the_lab_is_the_commands_alone():
    assert {module for module, target in crossings(*ROOMS) if room_of(target) == "lab"} == {
        "cli.lab"
    }


def test_audit_deploy_ready_and_triage_do_not_know_each_other():
    """But ready builds on the audit's document."""
    four = {"audit", "deploy", "ready", "triage"}
    found = {pair for pair in crossings(*four) if room_of(pair[1]) in four}
    assert {pair for pair in found if pair[0][:6] != "ready." or pair[1] != "audit.document"} == (
        set()
    )


def test_reports_carry_nothing():
    assert not {pair for pair in crossings("reports") if room_of(pair[1]) == "transport"}
    for path in (PACKAGE / "reports").rglob("*.py"):
        assert not packages(path) & {"pyinfra", "paramiko", "gevent", "subprocess"}, path


def test_what_is_observed_and_judged_knows_no_engine():
    """And neither does the policy: the standard library, and our own rooms above."""
    for room in ("policy", "subjects"):
        for path in (PACKAGE / room).rglob("*.py"):
            other = packages(path) - sys.stdlib_module_names - {"nodeready"}
            # A deploy's files are rendered on the machine that deploys.
            assert other <= ({"jinja2"} if path.name == "templates.py" else set()), path


@pytest.mark.parametrize("path", sorted(OPERATIONS.glob("*.py")), ids=lambda path: path.stem)
def test_an_operation_asks_the_checks_and_plans(path):
    may = {"deploy", "operations", "policy", "shell", "subjects"}
    found = {name for name, _ in draw_house.imported(path, {**FILES, "operations": OPERATIONS})}
    assert {room_of(name) for name in found - {"transport.bundle"}} <= may
    assert packages(path) <= {*sys.stdlib_module_names, "nodeready"}


@pytest.mark.parametrize("module", ON_A_NODE)
def test_what_runs_on_a_node_is_the_standard_librarys_and_python_3_9(module):
    path = FILES[module]
    ast.parse(path.read_text(), feature_version=(3, 9))
    assert packages(path) <= {*sys.stdlib_module_names, "nodeready"}


def test_what_is_sent_to_a_node_is_among_them():
    """Reports are found by name: those, too, keep to it."""
    from nodeready.transport import bundle

    sent = {name.partition(".")[2] for name in bundle.modules()} & FILES.keys()
    named = {name for name in sent if room_of(name) == "reports"}
    assert named
    assert sent <= {*ON_A_NODE} | reached(named)
    assert not sent & NEVER_ON_A_NODE
    for module in sent:
        ast.parse(FILES[module].read_text(), feature_version=(3, 9))
        assert packages(FILES[module]) <= {*sys.stdlib_module_names, "nodeready"}, module


def test_no_shell_is_started_with_a_string():
    """One gate for quoting: nodeready/shell.py. Nothing else hands a string to a local shell."""
    for path in [*PACKAGE.rglob("*.py"), *OPERATIONS.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


def test_every_check_says_why():
    """In its docstring, which is its page in `nodeready explain`."""
    paths = [*PACKAGE.glob("subjects/*/checks.py")]
    assert len(paths) > 10
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"
