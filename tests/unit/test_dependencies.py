"""Imported packages are declared, and the locks pin every file that is installed."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cases import tomllib
from tests.paths import DOCS, ROOT

_DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = _DECLARED["project"], _DECLARED["build-system"]
#: Of Python's own, by their version; those of the checkout.
OWN = {*sys.stdlib_module_names, "tomllib", "nodeready", "operations"}
#: Of the extra `dev`: nodes of the lab as a test looks at them.
FOR_TESTS = {"testinfra"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    return {_normal(Requirement(line).name) for line in PROJECT["dependencies"]}


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


def test_an_imported_package_is_declared():
    packages = imported()
    assert {"paramiko", "gevent", "pyinfra", "click"} <= {*packages}
    known = packages_distributions()
    for package, path in packages.items():
        distributions = {_normal(name) for name in known.get(package, [package])}
        assert distributions & declared(), f"{path} imports {package}"


#: The modules of pyinfra's documented API.
DOCUMENTED = {"pyinfra", "pyinfra.api", "pyinfra.api.exceptions"}


def imported_names(*libraries: str) -> list[tuple[str, str, str]]:
    """What our files import of these libraries: module, name, file."""
    return [
        (node.module, alias.name, str(path.relative_to(ROOT)))
        for path in [*(ROOT / "nodeready").rglob("*.py"), *(ROOT / "operations").glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in libraries
        for alias in node.names
    ]


def test_the_page_lists_the_internals_of_pyinfra_that_are_imported():
    text = (DOCS / "architecture.md").read_text()
    cells = "".join(re.findall(r"^\| (.*?) \|", text, re.M))
    names = imported_names("pyinfra", "pyinfra_cli")
    used = {f"{module}.{name}" for module, name, _ in names if module not in DOCUMENTED}
    assert used == {*re.findall(r"`(pyinfra\w*\.[\w.]+)`", cells)}


# --- The locks: one version of everything, and the sha256 of each of its files.

LOCKS = {
    "requirements.lock": "dev",
    "requirements-docs.lock": "docs",
    "requirements-dist.lock": "dist",
    "requirements-install.lock": "",
}
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(lock: str) -> dict[str, tuple[set[str], list[str]]]:
    """distribution -> its versions in the lock, and what pip is told of their files."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    text = re.sub(r"^ *#.*\n", "", (ROOT / lock).read_text(), flags=re.M)
    for line in text.replace("\\\n", " ").splitlines():
        match = re.match(r"([a-z0-9][a-z0-9.-]*)==(\S+)", line)
        assert match, f"{lock}: pip would not hold {line[:60]!r} to one version"
        words = re.findall(r"--\S+", line)
        versions, options = found.setdefault(_normal(match[1]), (set(), []))
        versions.add(match[2])
        assert words, f"{lock}: {match[0]} has no hash"
        options += words
    return found


#: For jobs that hang, and for another paramiko: in environments of their own.
APART = {"requirements-torch.lock": "torch", "requirements-paramiko.lock": "paramiko"}


@pytest.mark.parametrize("lock", [*LOCKS, *APART])
def test_every_file_of_a_lock_has_its_sha256(lock):
    distributions = locked(lock)
    for name, (_, options) in distributions.items():
        assert all(map(_HASH.fullmatch, options)), f"{lock}: {name}: {options}"
    assert distributions[APART.get(lock, "pyinfra")][0]


@pytest.mark.parametrize(("lock", "extra"), LOCKS.items())
def test_a_lock_has_what_the_project_declares(lock, extra):
    declared = [*PROJECT["dependencies"]]
    declared += PROJECT["optional-dependencies"][extra] if extra else BUILD["requires"]
    known = locked(lock)
    for line in declared:
        wanted = Requirement(line)
        versions, _ = known[_normal(wanted.name)]
        assert all(wanted.specifier.contains(one) for one in versions), (lock, line, versions)


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock != "requirements.lock"])
def test_all_locks_have_the_same_version_of_what_they_share(lock):
    """And the same files: they fit into one environment. (A lock may have one more version, for
    other Pythons of the tools of its extra.)
    """
    first, other = locked("requirements.lock"), locked(lock)
    both = [name for name in other if name in first]
    assert len(both) > 20
    for name in both:
        assert other[name][0] & first[name][0], name
        assert {*other[name][1]} & {*first[name][1]}, name


@pytest.mark.parametrize(
    "script", ["scripts/setup.sh", "scripts/fresh_install.sh", "scripts/deb.sh", "docs/install.md"]
)
def test_pip_must_check_the_hashes(script):
    """Nothing is built from a source, for which pip fetches tools by no lock."""
    text = (ROOT / script).read_text()
    for line in (line for line in text.splitlines() if re.search(r" -r \S", line)):
        assert "--require-hashes --only-binary :all:" in line, line
    for line in (line for line in text.splitlines() if re.search(r" (-e )?\.\s*$", line)):
        if "pip" in line or '"$@"' in line:
            assert "--no-deps --no-build-isolation" in line, line
    assert "--require-hashes" in text
