"""The newest release of pyinfra that PyPI has, whatever it is, on nodes of the lab.

pyproject.toml keeps pyinfra below a version (docs/architecture.md, "pyinfra, gevent and asyncio").
Here that bound is left out: the release, with the newest of what it needs, stands in front of the
locked packages. These are the only tests that run code which no lock names.

NODEREADY_PYINFRA   another version, which may be a pre-release (4.0b1); empty: none is tried
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.command import Tool
from tests.helpers import Done
from tests.lab.releases import install, put_in_front, run, unit_tests, versions
from tests.lab.test_manners import test_progress_on_a_terminal_names_the_slowest  # noqa: F401
from tests.lab.test_pyinfra import (  # noqa: F401
    test_a_fact_shows_what_an_operation_of_the_run_has_changed,
    test_an_operation_on_the_command_line_shows_what_it_would_write,
    test_every_operation_changes_a_node_once_or_is_refused,
    test_the_deploy_file_of_the_page_stands_beside_ones_own_operations,
)
from tests.paths import DOCS, ROOT
from tests.unit.test_dependencies import PROJECT, imported_names

# One worker installs it, once.
pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("newest_pyinfra")]

SECTION, ARCHITECTURE = "pyinfra, gevent and asyncio", DOCS / "architecture.md"
#: The libraries whose newest releases are tried, and of which we use more than their commands.
LIBRARIES = ("pyinfra", "paramiko", "gevent")

#: What we use of pyinfra and paramiko. None of what is called may be a coroutine, and what is
#: overridden here has to be called so by the library.
#:
#: calls       module -> calls as we write them, with all that we give
#: attributes  what we read or set of a library's objects when pyinfra has tried to connect
#: data        the data of a host that we set, or read ourselves
USED = json.loads((Path(__file__).parent / "data/newest_pyinfra.json").read_text())

#: Says what is not there, or is another way, one line each. Runs on the newest release.
_PROBE = """
import ast, importlib, inspect, json, socket, sys

asked, wrong = json.load(sys.stdin), []


def found(name):
    module, _, path = name.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


for module, name, file in asked["imports"]:
    try:
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        wrong.append(f"{file}: from {module} import {name}: {error}")

for name, call in (
    (f"{module}:{path}", "(" + arguments)
    for module, calls in asked["calls"].items()
    for path, _, arguments in (text.partition("(") for text in calls)
):
    made = ast.parse("f" + call, mode="eval").body
    given = [None] * len(made.args), {word.arg: None for word in made.keywords}
    try:
        value = found(name)
        inspect.signature(value).bind(*given[0], **given[1])
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        wrong.append(f"{name}{call}: {error}")
        continue
    if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
        wrong.append(f"{name}{call}: it has to be awaited")


def reached():
    import paramiko
    from pyinfra.api import Config, Inventory, State
    from pyinfra.api.exceptions import ConnectError

    # Nobody listens there.
    data = {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "ssh_config_file": "/dev/null"}
    inventory, config = Inventory(([("node", data)], {})), Config()
    state = State(inventory, config, check_for_changes=False)
    host = inventory.get_host("node")
    try:
        host.connect(show_errors=False, raise_exceptions=True)
    except ConnectError:
        pass
    connector = host.connector
    transport = paramiko.Transport(socket.socketpair()[0])
    known = {**locals(), "client": connector.client}
    for name, attributes in asked["attributes"].items():
        for one in attributes.split():
            if not hasattr(known[name], one):
                wrong.append(f"{name}.{one} ({type(known[name]).__name__}) is not there")
    for key in asked["data"]:
        if key not in connector.data_meta:
            wrong.append(f"{key} is no data of {type(connector).__name__}")


try:
    reached()
except Exception as error:
    wrong.append(f"a connection: {type(error).__name__}: {error}")
import pyinfra
json.dump({"file": pyinfra.__file__, "wrong": wrong}, sys.stdout)
"""


def wanted() -> list[str]:
    """What is installed: pyinfra without our bound, the others within our ranges."""
    version = os.environ.get("NODEREADY_PYINFRA")
    if version == "":
        pytest.skip("NODEREADY_PYINFRA is empty: no other pyinfra is tried")
    declared = PROJECT["dependencies"]
    others = [line for line in declared if Requirement(line).name in LIBRARIES[1:]]
    assert len(others) == len(LIBRARIES) - 1
    return [f"pyinfra=={version}" if version else "pyinfra", *others]


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("newest") / "packages", "--upgrade", *wanted())


@pytest.fixture
def tool(tool: Tool, newest: Path) -> Tool:
    """The command over the release. A test that fails shows what is printed here."""
    found = versions(newest)
    print({name: found.get(name) for name in LIBRARIES}, f'see "{SECTION}" in {ARCHITECTURE}')
    return put_in_front(tool, newest)


@pytest.fixture
def pyinfra(newest: Path, tool: Tool) -> Callable[..., Done]:
    """Its own command in the checkout, as `pyinfra INVENTORY deploy.py` is run."""

    def ask(*words: object) -> Done:
        argv = [sys.executable, str(newest / "bin/pyinfra"), *map(str, words)]
        done = run(argv, env=tool.environment(), cwd=ROOT, stdin=-3)
        assert done.returncode == 0, done.stderr
        return done

    return ask


def test_all_that_we_use_of_it_is_there(newest, tool):
    assert f"\n## {SECTION}\n" in ARCHITECTURE.read_text()
    asked = json.dumps({"imports": imported_names(*LIBRARIES), **USED})
    done = run([sys.executable, "-c", _PROBE], input=asked, env=tool.environment())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert Path(told["file"]).is_relative_to(newest)
    assert not told["wrong"], "\n".join(told["wrong"])


#: The nodes that an operation changed, as pyinfra's own command says it.
_CHANGED = re.compile(r"^ +\[(.*)\] +Success", re.M)


def test_settings_come_from_where_they_come_from_today(newest):
    unit_tests(newest, "tests/unit/deploy/test_pyinfra.py")


def test_both_ways_in_make_nodes_ready_and_agree(pyinfra, fresh_nodes, fleet, tool):
    nodes = fresh_nodes(2)
    where = fleet(nodes)
    deployed = tool("deploy", where, "--yes", status=0)
    assert re.search(r"^2 changed .* 0 failed, 0 unreachable$", deployed.out, re.M), deployed
    assert not _CHANGED.findall(pyinfra("-y", where, "deploy.py").stderr)

    # What is broken by hand, an audit finds and pyinfra's own command repairs.
    nodes[1].enter(["sysctl", "-qw", "kernel.yama.ptrace_scope=1"])
    audit = tool("audit", where)
    assert (audit.status, "ptrace.scope" in audit.out) == (3, True), audit
    assert _CHANGED.findall(pyinfra("-y", where, "deploy.py").stderr) == [nodes[1].name]
    check = tool("deploy", where, "--check", status=0)
    assert check.out.splitlines()[-1] == "0 to change, 2 ok, 0 unknown, 0 unreachable"


def test_an_unreachable_node_costs_itself(fresh_node, fleet, tool):
    gone = {"gone": {"ssh_hostname": "127.0.0.1", "ssh_port": 1}}
    # pyinfra puts the environment around our commands.
    where = fleet([fresh_node], gone, _env={"LC_ALL": "C"})
    done = tool("deploy", where, "--yes", "--only", "ptrace", status=4)
    assert "1 changed (1 change), 0 ok, 0 failed, 1 unreachable" in done.out, done
    assert "[127.0.0.1]:1: connection refused: is sshd running?" in done.out, done
