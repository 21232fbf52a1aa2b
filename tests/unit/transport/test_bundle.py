"""The node's program: what is in it, that it is always the same, and where it runs."""

import io
import json
import os
import subprocess
import sys
import zipfile

import pytest

import nodeready
from nodeready.agent import payload
from nodeready.agent.gate import main as program
from nodeready.core.policy import make_policy
from nodeready.fleet.transport import bundle
from tests.cases import cases


def run(python, *words, **how):
    argv = [python, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **how)


def test_it_has_all_that_it_imports_and_nothing_of_the_control_machine(bundle_file):
    with zipfile.ZipFile(bundle_file) as zipped:
        names = zipped.namelist()
        sources = {name: zipped.read(name).decode() for name in names if name.endswith(".py")}
    assert names == sorted(names)
    inside = {name[:-3].replace("/", ".").removesuffix(".__init__") for name in sources}
    for name, source in sources.items():
        for module in payload.imports(source):
            first = module.partition(".")[0]
            if first != "nodeready":
                # On a node the tables are a module; a docstring has an example.
                other = {"nodeready/knowledge/__init__.py": "tomli"}.get(name, "nodeready_run")
                assert first in {*sys.stdlib_module_names, other}, f"{name} imports {module}"
            elif module not in bundle._LEFT_OUT and payload._source(module) is not None:
                assert module in inside, f"{name} imports {module}"
    outside = ("cli", "lab", "operations", "inventory", "nodesets")
    assert not {name for name in inside if name.split(".")[1:2] and name.split(".")[1] in outside}
    assert not {f"nodeready.fleet.transport.{name}" for name in ("ssh", "srun")} & inside
    assert {"nodeready/sh/probe.sh", "nodeready/sh/prologue.sh"} <= {*names}


def test_the_policy_of_an_inventory_is_in_it(tmp_path, tool):
    inventory, out = tmp_path / "inventory.py", tmp_path / "x.pyz"
    inventory.write_text("h100 = (['gpu1', 'gpu2'], {'gpu_count': 8})\nlogin = (['login1'], {})\n")
    done = tool("bundle", inventory, "-o", out)
    assert done.status == 2
    (line,) = done.lines
    assert "gpu_count (gpu[1-2]: 8, login1: None)" in line
    assert ("--limit" in line, out.exists()) == (True, False)
    done = tool("bundle", inventory, "--limit", "h100", "-o", out)
    assert done.status == 0, done
    assert os.access(out, os.X_OK)
    content, policy = out.read_bytes(), make_policy({"gpu_count": 8})
    assert content == bundle.build(policy) != bundle.program()
    assert content.startswith(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(io.BytesIO(content)) as zipped:
        data = json.loads(zipped.read("nodeready/agent/gate/policy.json"))
    assert make_policy(data) == policy


def test_an_old_python_gets_one_line(bundle_file):
    """Also where no old one is installed: this one pretends to be one."""
    begin = "import sys, runpy; sys.version_info = (3, 8, 20); sys.argv = ['x', 'audit']; "
    code = f"{begin}runpy.run_path({str(bundle_file)!r}, run_name='__main__')"
    done = run(sys.executable, "-c", code)
    line = f"nodeready needs Python 3.9 or newer; this is 3.8.20 ({sys.executable})\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_it_imports_no_installed_nodeready_and_ends_in_one_line(bundle_file, tmp_path):
    other = tmp_path / "nodeready"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, bundle_file, "--version", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, f"{nodeready.__version__}\n")
    done = run(sys.executable, bundle_file, "audit", "--only", "nosuch", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "no such check" in done.stderr


@pytest.mark.parametrize("case", cases(__file__, "data/mistakes.json"))
def test_a_mistake_is_one_line(case, monkeypatch, capsys):
    monkeypatch.setattr(program.exit_codes, "handle_signals", lambda handler: None)
    try:
        code = program.main(case["name"].split())
    except SystemExit as error:
        code = error.code
    stderr = capsys.readouterr().err
    lines = [row for row in stderr.splitlines() if not row.startswith("Try '")]
    assert (code, len(lines)) == (case["status"], bool(code)), stderr
    assert case["words"] in stderr
