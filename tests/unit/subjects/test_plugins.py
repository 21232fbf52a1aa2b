"""Subjects of other packages: they work like ours, and a broken one is a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

from nodeready.subjects import plugins
from nodeready.subjects.registry import SUBJECTS
from tests.builders.plugins import EXAMPLE, install, install_example
from tests.cases import cases, tomllib
from tests.paths import ROOT

CHECKS = """
from nodeready.subjects.base import Probe, Section
from nodeready.subjects.result import Subject, check, ok

@check("{check}"{declares})
def noun(observed, policy):
    "Something holds."
    return ok("{check}")

PROBE = Probe("{subject}", (Section("{section}", lambda policy: "true"),), lambda *_: 1)
SUBJECT = Subject("{subject}", __doc__, (noun,), PROBE{options})
"""


def run(site, *words):
    """Run Python as a user who has installed the plugins of a directory."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{site}"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=site,
    )


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example") / "site")


STEP = """
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects.registry import CHANGED, SUBJECTS
from nodeready.subjects.snapshot import Snapshot
from nodeready_scratch.facts import Scratch
print([*SUBJECTS][-1], CHANGED[-2:], STEPS[-5].name)
step = next(step for step in STEPS if step.subject == "scratch")
change = step.plan(Snapshot({"scratch": Scratch("755", 1)}), Policy())
print(*(action.describe() for action in change.actions), sep="\\n")
print(change.actions[0].content.decode())
"""


def test_the_example_is_a_subject_with_an_operation_before_the_gate(example):
    done = run(example, "-c", STEP)
    assert done.stdout.splitlines() == [
        "scratch ('scratch', 'gate') scratch.directory",
        "create /etc/tmpfiles.d/nodeready-scratch.conf",
        "run install -d -m 1777 /scratch",
        "# Written by nodeready (plugin nodeready-scratch).",
        "d /scratch 1777 root root -",
        "",
    ], done
    done = run(example, "-m", "nodeready", "explain", "scratch.directory")
    assert "Repaired by the operation scratch.directory" in done.stdout, done


def test_the_examples_own_tests_pass(example):
    done = run(example, "-m", "pytest", "-q", "-p", "no:cacheprovider", EXAMPLE / "tests")
    assert done.returncode == 0, done.stdout


def test_a_nodes_own_program_has_the_plugin_and_needs_no_installation(example, tmp_path):
    done = run(example, "-m", "nodeready", "bundle", "-o", tmp_path / "x.pyz")
    assert done.returncode == 0, done
    done = run("/", "-I", tmp_path / "x.pyz", "audit", "--only", "scratch", "--format", "json")
    assert '"scratch.directory"' in done.stdout, done


COPIED = """
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.snapshot import Snapshot
from nodeready_yama.facts import parse
printed = {"yama": Output("proc=1\\nlive=1\\n", 0), "sysctl": Output("reader=systemd\\n", 0)}
snapshot = Snapshot({"yama": parse(printed, Policy())})
steps = [step for step in STEPS if step.subject == "yama"]
(change,) = [change for step in steps if (change := step.plan(snapshot, Policy()))]
print(*(action.describe() for action in change.actions), sep="\\n")
"""


def test_the_folder_of_ptrace_copied_and_renamed_as_the_page_says_is_a_plugin(tmp_path):
    page = (ROOT / "docs/plugins.md").read_text()
    commands = re.search(r"```sh\n(mkdir .*?)```", page, re.S)[1]
    commands = re.sub(r"(?<= )(nodeready|operations|templates)/", rf"{ROOT}/\1/", commands)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True)
    project = tomllib.loads(re.search(r"```toml\n(.*?)```", page, re.S)[1])["project"]
    groups = {key.partition(".")[2]: rows for key, rows in project["entry-points"].items()}
    install(tmp_path / "yama", project["name"], {}, groups, *project["dependencies"])
    done = run(tmp_path / "yama", "-c", COPIED)
    assert done.stdout.splitlines() == [
        "create /etc/sysctl.d/99-zz-nodeready-yama.conf",
        "run sysctl -w kernel.yama.ptrace_scope=0",
    ], done.stderr


def test_the_names_for_plugins_in_the_page_are_there():
    page = (ROOT / "docs/plugins.md").read_text()
    rows = re.findall(r"^\| `(nodeready\.[\w.]+)` \| (.*) \|$", page, re.M)
    assert len(rows) > 9
    for module, names in rows:
        assert [
            n for n in re.findall(r"`(\w+)`", names) if not hasattr(import_module(module), n)
        ] == []


@pytest.mark.parametrize("case", cases(__file__, "data/plugins.toml"))
def test_a_broken_plugin_is_a_line_that_names_its_distribution(case, tmp_path, monkeypatch):
    package = f"nodeready_{re.sub('[^a-z]', '_', case['name'])}"
    row = {"subject": "thing", "check": "thing.noun", "section": "thing", **case}
    row = {"options": "", "declares": "", **row}
    place = f"{package}.{case.get('place', 'checks:SUBJECT')}"
    entry_points = {"subjects": {case.get("entry", "thing"): place}}
    if "operations" in case:
        entry_points["operations"] = {case["operations"]: f"{package}.operations"}
    files = {f"{package}/__init__.py": "", f"{package}/checks.py": CHECKS.format(**row)}
    install(tmp_path, "nodeready-thing", files, entry_points, case.get("requires", "nodeready"))
    monkeypatch.syspath_prepend(tmp_path)
    plugins.installed.cache_clear()
    try:
        with pytest.raises(plugins.PluginError) as raised:
            plugins.load(SUBJECTS)
    finally:
        plugins.installed.cache_clear()
    message = str(raised.value)
    assert case["error"] in message
    assert "nodeready-thing 1.0" in message
    assert "\n" not in message


def test_a_command_with_a_broken_plugin_ends_with_2_and_version_works(tmp_path):
    place = {"subjects": {"thing": "nodeready_missing.checks:SUBJECT"}}
    install(tmp_path, "nodeready-thing", {}, place)
    done = run(tmp_path, "-m", "nodeready", "audit", "@local")
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.splitlines() == [
        "nodeready: plugin thing (nodeready-thing 1.0): nodeready_missing.checks:SUBJECT: "
        "ModuleNotFoundError: No module named 'nodeready_missing': "
        "repair it, or pip uninstall nodeready-thing"
    ]
    assert run(tmp_path, "-m", "nodeready", "--version").returncode == 0
    done = run(tmp_path, "-m", "pyinfra", "-y", "@local", ROOT / "deploy.py")
    assert done.returncode == 1
    assert "plugin thing (nodeready-thing 1.0): " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("from .parts import yaml_reader", "nodeready_thing.parts imports yaml"),
        ("def f(x):\n    match x:\n        case 1: pass", "no Python 3.9"),
    ],
)
def test_a_module_that_a_node_cannot_run_is_refused(tmp_path, source, error):
    row = {"subject": "thing", "check": "thing.noun", "section": "thing"}
    text = CHECKS.format(options="", declares="", **row)
    # Never run here, so that no yaml needs to be installed.
    source = "\n".join(f"    {line}" for line in source.splitlines())
    files = {
        "nodeready_thing/__init__.py": "",
        "nodeready_thing/parts.py": "def read():\n    import yaml as yaml_reader\n",
        "nodeready_thing/checks.py": f"{text}\ndef unused():\n{source}\n",
    }
    install(
        *(tmp_path, "nodeready-thing", files),
        {"subjects": {"thing": "nodeready_thing.checks:SUBJECT"}},
    )
    done = run(tmp_path, "-m", "nodeready", "bundle", "-o", tmp_path / "x.pyz")
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert error in line
    assert "judged_on_node=False" in line
