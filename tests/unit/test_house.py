"""Which package may import which, and what runs on a node.

tests/rooms.py has the packages (rooms) in their order. Every import counts here, also one in a
function or for types.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import draw_house
import pytest

from nodeready.agent import payload
from nodeready.fleet.transport import bundle
from tests.paths import PACKAGE, ROOT
from tests.rooms import ROOMS

OPERATIONS = ROOT / "operations"
#: module (`core.settings`) -> its file.
FILES = draw_house.sources()
#: module -> the modules of the package that it imports.
IMPORTS = {
    module: {target for target, _ in draw_house.imported(path, FILES)}
    for module, path in FILES.items()
}
#: The program of a node does not import these: they fold the names of many nodes.
NEVER_ON_A_NODE = {"fleet.inventory.nodeset"}


house = cache(draw_house.read)


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
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found.add((node.module or "").partition(".")[0])
    return found


def reached(starts: set[str]) -> set[str]:
    """These modules, their packages, and their imports, transitively."""
    found: set[str] = set()
    todo = set(starts)
    while todo:
        found |= todo
        todo = {target for module in todo for target in IMPORTS[module]}
        todo |= {module.rpartition(".")[0] for module in found} & FILES.keys()
        todo -= found | NEVER_ON_A_NODE
    return found


ON_A_NODE = sorted(reached({name for name in FILES if room_of(name) == "agent"}))


def test_a_room_imports_only_rooms_above_it():
    rooms, _ = house()
    assert draw_house.order_problems(rooms, list(ROOMS)) == []
    assert set(rooms) == set(ROOMS)


def test_only_what_pyinfra_and_python_users_import_are_modules_at_the_root():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == {*list(ROOMS)[-4:]}
    assert not {target for _, target in crossings(*ROOMS) if room_of(target) in modules}


def test_no_modules_import_each_other_when_they_are_loaded():
    _, graph = house()
    assert draw_house.cycle(graph) == []


def test_only_its_command_imports_the_lab():
    assert {module for module, target in crossings(*ROOMS) if room_of(target) == "lab"} == {
        "cli.lab"
    }


def test_reports_ask_no_node():
    assert not {pair for pair in crossings("reports") if pair[1].startswith("fleet.transport")}
    for path in (PACKAGE / "reports").rglob("*.py"):
        assert not packages(path) & {"pyinfra", "paramiko", "gevent", "subprocess"}, path


def test_core_and_subjects_import_only_the_standard_library():
    for room in ("core", "subjects"):
        for path in (PACKAGE / room).rglob("*.py"):
            other = packages(path) - sys.stdlib_module_names - {"nodeready"}
            # On the control machine alone: a deploy's files.
            may = {"templates.py": {"jinja2"}}
            assert other <= may.get(path.name, set()), path


def test_what_judges_nodes_looks_up_no_name_of_this_machine():
    """The audit hook of tests/machine_reads.py does not see pwd, grp and locale."""
    names = {"socket", "pwd", "grp", "locale", "mimetypes", "platform", "zoneinfo"}
    for room in ("subjects", "runs", "reports"):
        for path in {*(PACKAGE / room).rglob("*.py")} - {*(PACKAGE / "runs/deploy").iterdir()}:
            assert not packages(path) & names, path


def test_a_run_knows_no_command_line_and_no_screen():
    for path in (PACKAGE / "runs").rglob("*.py"):
        assert not packages(path) & {"click", "rich"}, path


def test_an_operation_imports_only_checks_and_plans():
    may = {"core", "operations", "runs", "subjects"}
    for path in OPERATIONS.glob("*.py"):
        pairs = draw_house.imported(path, {**FILES, "operations": OPERATIONS})
        modules = {name for name, _ in pairs} - {"fleet.transport.bundle"}
        assert {room_of(name) for name in modules} <= may, path
        assert packages(path) <= {*sys.stdlib_module_names, "nodeready"}, path


def test_a_module_of_the_node_is_python_3_9_of_the_standard_library():
    # Reports are found by name.
    sent = {name.partition(".")[2] for name in bundle.modules()} & FILES.keys()
    reports = {name for name in sent if room_of(name) == "reports"}
    assert reports
    assert sent <= {*ON_A_NODE} | reached(reports)
    assert not sent & NEVER_ON_A_NODE
    for module in {*ON_A_NODE} | sent:
        ast.parse(FILES[module].read_text(), feature_version=(3, 9))
        # On a node the tables are a module.
        toml = {"tomli", "tomllib"} if module == "knowledge" else set()
        assert packages(FILES[module]) <= {*sys.stdlib_module_names, "nodeready", *toml}, module


def test_the_oldest_python_imports_every_module_of_the_node(pythons, tmp_path):
    """Without a site's packages; `X = int | None` passes every linter and ends Python 3.9."""
    oldest = min(version for version in pythons if version >= payload.OLDEST_PYTHON)
    if oldest != payload.OLDEST_PYTHON:
        pytest.skip(f"the oldest Python here is {'.'.join(map(str, oldest))}")
    starts = [*bundle.modules(), *(f"nodeready.{name}" for name in ON_A_NODE)]
    sources = payload.closure(starts, [f"nodeready.{name}" for name in NEVER_ON_A_NODE])
    for name, source in sources.items():
        path = tmp_path / name.replace(".", "/")
        path = path / "__init__.py" if payload.is_package(name) else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    code = "import importlib, sys; [*map(importlib.import_module, sys.argv[1:])]"
    words = [pythons[oldest], "-S", "-B", "-c", code, *sources]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_shell_is_started_with_a_string():
    """Only nodeready/core/shell.py quotes."""
    for path in [*PACKAGE.rglob("*.py"), *OPERATIONS.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
