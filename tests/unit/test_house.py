"""The rooms of the house: who may import whom, and which code also runs on a node."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "nodeready"

#: room -> the rooms (and packages) that it may import beside the standard library.
ALLOWED = {
    "policy": {"policy"},
    "results.py": set(),
    "sanitise.py": set(),
    "shell.py": set(),
    "blocks.py": set(),
    "plain.py": {"probes"},
    "waivers.py": {"policy", "results"},
    "subjects.py": {"checks", "policy", "probes"},
    "audit.py": {"plain", "results", "snapshot", "subjects"},
    "probes": {"policy", "probes", "shell", "blocks"},
    "checks": {
        "policy", "probes", "results", "checks", "blocks", "known_hosts", "shell",
        "proofs",
    },
    "proofs": {"policy", "probes", "proofs", "shell", "carried"},
    "imports.py": set(),
    "carried.py": {"imports", "proofs", "shell"},
    "capture": {"policy", "probes", "proofs", "shell", "carried", "capture"},
    "reports": {
        "results", "reports", "sanitise", "nodesets", "actions", "planning", "execution",
        "fleet", "transport", "audit", "plain", "subjects", "ready", "environment", "shell",
        "stacks", "stack_tree", "hints", "cores", "backtraces", "tailing", "deploy",
        "jinja2", "markupsafe",  # the page of stacks alone: tests/reports/test_stacks_html.py
    },
    "environment.py": {"nccl", "nccl_hca", "policy", "probes", "rendezvous", "snapshot"},
    "rendezvous.py": {"nodesets", "probes"},
    "local": {
        "audit", "exit_codes", "files", "known_hosts", "local", "policy",
        "probes", "proofs", "readiness", "ready", "reports", "results", "sanitise",
        "selection", "shell", "snapshot", "subjects", "transport", "waivers",
        "nodeready",  # its version
    },
    "transport": {
        "carried", "nodesets", "policy", "probes", "proofs", "shell", "slurm", "snapshot",
        "transport", "gevent", "paramiko", "pyinfra",
    },
    "planning.py": {"actions", "operations", "policy", "results", "snapshot"},
}  # fmt: skip

#: Code that also runs on a node as one file: Python 3.9, the standard library alone.
NODE_SIDE = (
    "policy",
    "results.py",
    "probes",
    "checks",
    "proofs",
    "capture",
    "carried.py",
    "imports.py",
    "stacks.py",
    "stack_tree.py",
    "hints.py",
    "snapshot.py",
    "subjects.py",
    "shell.py",
    "plain.py",
    "waivers.py",
    "audit.py",
    "blocks.py",
    "exit_codes.py",
    "files.py",
    "known_hosts.py",
    "local",
    "readiness.py",
    "ready.py",
    "reports",
    "sanitise.py",
    "selection.py",
    "transport/base.py",
    "transport/dialogue.py",
    "transport/program.py",
    "transport/local.py",
    "transport/look.py",
    "transport/program.py",
)


def files(room: str) -> list[Path]:
    path = PACKAGE / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def imported(tree: ast.AST) -> set[str]:
    """What a module imports: packages by name, and our own rooms by their first word."""
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "nodeready":
                names = [f"nodeready.{alias.name}" for alias in node.names]
        for name in names:
            words = name.split(".")
            found.add(words[1] if words[0] == "nodeready" and len(words) > 1 else words[0])
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    for path in files(room):
        outside = imported(ast.parse(path.read_text())) - set(sys.stdlib_module_names)
        assert outside <= ALLOWED[room], f"{path.relative_to(ROOT)}: {outside - ALLOWED[room]}"


@pytest.mark.parametrize("room", NODE_SIDE)
def test_node_side_code_is_python_3_9(room):
    for path in files(room):
        ast.parse(path.read_text(), feature_version=(3, 9))


def test_no_shell_is_started_with_a_string():
    """One gate for quoting: nodeready/shell.py. Nothing else hands a string to a local shell."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "operations").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


def test_every_check_says_why():
    from nodeready import checks

    for path in sorted(Path(checks.__path__[0]).glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"
