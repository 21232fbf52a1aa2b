"""The file itself: what is in it, that it is always the same, and where it runs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile

import pytest

from nodeready.node import payload
from nodeready.policy import Policy
from nodeready.policy.policy import make_policy
from nodeready.transport import bundle
from tests.helpers import nodeready
from tests.paths import ROOT

_BUILD = (
    "import sys, hashlib; sys.path.insert(0, sys.argv[1]); "
    "from nodeready.transport import bundle; "
    "from nodeready.policy.policy import make_policy; "
    "made = bundle.build(make_policy({'mounts': ('/a', '/b'), 'waivers': {'nics.mtu': 'x'}})); "
    "print(hashlib.sha256(made).hexdigest())"
)


def run(python: str, *words: object, **how: object) -> subprocess.CompletedProcess[str]:
    argv = [python, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload,no-any-return]


def test_the_same_content_makes_the_same_bytes_in_every_python(pythons):
    made = set()
    for seed, (version, python) in enumerate(pythons.items()):
        if version >= (3, 9):
            env = {"PYTHONHASHSEED": str(seed)}
            made.add(run(python, "-B", "-c", _BUILD, ROOT, env=env).stdout)
    assert len(made) == 1
    assert len(made.pop().strip()) == 64


def test_nothing_is_missing_and_nothing_of_the_control_machine_is_in_it(bundle_file):
    with zipfile.ZipFile(bundle_file) as zipped:
        names = zipped.namelist()
        sources = {name: zipped.read(name).decode() for name in names if name.endswith(".py")}
    assert names == sorted(names)
    inside = {name[:-3].replace("/", ".").removesuffix(".__init__") for name in sources}
    for name, source in sources.items():
        for found in payload.imports(source):
            first = found.partition(".")[0]
            if first != "nodeready":
                assert first in sys.stdlib_module_names, f"{name} imports {found}"
            elif found not in bundle._LEFT_OUT and payload._source(found) is not None:
                assert found in inside, f"{name} imports {found}"
    outside = ("cli", "lab", "operations", "inventory", "nodesets")
    assert not {name for name in inside if name.split(".")[1:2] and name.split(".")[1] in outside}
    assert not {f"nodeready.transport.{name}" for name in ("ssh", "srun", "fake")} & inside
    assert {"nodeready/sh/probe.sh", "nodeready/sh/prologue.sh"} <= {*names}


def test_a_policy_comes_along_and_another_one_makes_another_file():
    policy = make_policy({"ptrace_scope": 1, "limit_core": 4096, "nics": {"eth0": {"mtu": 9000}}})
    made = bundle.build(policy)
    with zipfile.ZipFile(io.BytesIO(made)) as zipped:
        data = json.loads(zipped.read("nodeready/healthcheck/policy.json"))
    assert make_policy(data) == policy
    assert made != bundle.build(Policy())
    assert made.startswith(b"#!/usr/bin/env python3\n")


def test_it_runs_in_every_python_from_3_9_on_and_no_older_one_shows_a_traceback(
    pythons, bundle_file
):
    for version, python in pythons.items():
        done = run(python, "-I" if version > (3, 3) else "-E", bundle_file, "--version", cwd="/")
        assert "Traceback" not in done.stderr, version
        if version >= (3, 9):
            assert (done.returncode, done.stdout) == (0, "0.1.0\n"), (version, done)
        else:
            assert done.returncode == 1
            (line,) = done.stderr.splitlines()
            assert line.startswith("nodeready needs Python 3.9 or newer; this is ")
            assert line.endswith(f"({python})")


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 6, 8), (3, 8, 20)])
def test_an_old_python_gets_one_line(version, bundle_file):
    """Also where none of the old ones is installed: this one says that it is one."""
    code = (
        f"import sys, runpy; sys.version_info = {version}; sys.argv = ['x', 'audit']; "
        f"runpy.run_path({str(bundle_file)!r}, run_name='__main__')"
    )
    done = run(sys.executable, "-c", code)
    said = ".".join(map(str, version))
    line = f"nodeready needs Python 3.9 or newer; this is {said} ({sys.executable})\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_an_installed_nodeready_of_another_version_is_not_asked(bundle_file, tmp_path):
    other = tmp_path / "nodeready"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, bundle_file, "--version", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "0.1.0\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "COMMAND"),
        (["--help"], 0, ""),
        (["nosuch"], 2, "nosuch"),
        (["audit", "--help"], 0, ""),
        (["audit", "--nosuch"], 2, "--nosuch"),
        (["audit", "--only", "nosuch"], 2, "no such check"),
        (["audit", "--only", "gate"], 2, "no such check"),
        (["audit", "--only", "proof.core"], 2, "is proved, by nodeready ready"),
        (["audit", "--policy", "/nosuch"], 2, "/nosuch: there is no such file"),
        (["ready", "--ports", "x"], 2, "--ports x: must be FIRST-LAST"),
        (["ready", "--gpus", "99"], 2, "must be between 0 and 64"),
        (["ready", "--user", "a b"], 2, "no user name"),
    ],
)
def test_a_mistake_is_told_in_one_line(words, status, said, bundle_file):
    done = run(sys.executable, "-I", bundle_file, *words)
    assert done.returncode == status, done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Try '")]
    assert len(lines) == (1 if status else 0), done.stderr
    assert said in done.stderr


def test_the_command_takes_the_policy_of_an_inventory(tmp_path):
    inventory, out = tmp_path / "inventory.py", tmp_path / "x.pyz"
    inventory.write_text("h100 = (['gpu1', 'gpu2'], {'gpu_count': 8})\nlogin = (['login1'], {})\n")
    done = nodeready("bundle", inventory, "-o", out)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "gpu_count (gpu[1-2]: 8, login1: None)" in line
    assert "--limit" in line
    assert not out.exists()
    done = nodeready("bundle", inventory, "--limit", "h100", "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == bundle.build(make_policy({"gpu_count": 8}))
    assert os.access(out, os.X_OK)
