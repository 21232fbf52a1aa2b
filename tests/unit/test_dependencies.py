"""What the code imports is declared, so that no other package's requirement has to bring it."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Of Python's own, by their version; those of the checkout.
OWN = {*sys.stdlib_module_names, "tomllib", "nodeready", "operations"}
#: Of the extra `dev`: nodes of the lab as a test looks at them.
FOR_TESTS = {"testinfra"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> dict[str, str]:
    """distribution -> its requirement"""
    words = [re.match(r"[A-Za-z0-9_.-]+", line) for line in PROJECT["dependencies"]]
    return {
        _normal(word[0]): line
        for word, line in zip(words, PROJECT["dependencies"], strict=True)
        if word
    }


def imported() -> dict[str, Path]:
    """Package of somebody else's -> a file that imports it."""
    found: dict[str, Path] = {}
    for path in [*(ROOT / "nodeready").rglob("*.py"), *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                if name.partition(".")[0] not in OWN | FOR_TESTS:
                    found.setdefault(name.partition(".")[0], path)
    return found


IMPORTED = imported()


@pytest.mark.parametrize("package", IMPORTED)
def test_what_is_imported_is_declared(package):
    distributions = {_normal(name) for name in packages_distributions().get(package, [package])}
    assert distributions & {*declared()}, f"{IMPORTED[package]} imports {package}"


def test_the_libraries_under_pyinfra_are_among_them():
    assert {"paramiko", "gevent", "pyinfra", "click"} <= {*IMPORTED}
