"""The inventories that come with nodeready, by `pyinfra` itself and by our loader."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.core.policy import Policy, check_settings
from nodeready.fleet.inventory.load import load, names
from nodeready.fleet.inventory.nodeset import nodes
from tests.cases import read_table
from tests.paths import ROOT
from tests.unit.commands import pyinfra

INVENTORIES = ROOT / "inventories"
GROUP_FILES = sorted((INVENTORIES / "group_data").glob("*.py"))
# VIRTUAL_ENV: pyinfra warns about another active one.
_LEFT_OUT = ("SLURM_", "NODEREADY_", "VIRTUAL_ENV")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No job, and no program in PATH."""
    for name in [name for name in os.environ if name.startswith(_LEFT_OUT)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "no-tools").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "no-tools"))


@pytest.mark.parametrize(("name", "environ", "some"), [
    ("local", {}, ["@local"]),
    ("example", {}, ["login1", "gpu001", "gpu064", "amd32"]),
    ("slurm", {"SLURM_JOB_NODELIST": "gpu[7-9]"}, ["gpu7", "gpu8", "gpu9"]),
    ("hostfile", {"NODEREADY_HOSTFILE": "hosts"}, ["gpu1", "gpu2"]),
])  # fmt: skip
def test_a_copy_loads_under_pyinfra_and_under_nodeready(
    name, environ, some, tmp_path, monkeypatch
):
    shutil.copytree(INVENTORIES, tmp_path / "inventories")
    (tmp_path / "hosts").write_text("gpu1 slots=8\ngpu2:8\n")
    for key, value in environ.items():
        monkeypatch.setenv(key, value.replace("hosts", str(tmp_path / "hosts")))
    done = pyinfra(f"inventories/{name}.py", "debug-inventory", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = load(str(tmp_path / "inventories" / f"{name}.py"), cwd=tmp_path)
    shown = re.findall(r"^\[(\S+?)\]", done.stdout + done.stderr, re.MULTILINE)
    assert shown == names(loaded)
    assert set(some) <= set(shown)
    if name == "example":
        sizes = {group: len(loaded.get_group(group)) for group in ("login", "h100", "mi300x")}
        assert sizes == {"login": 2, "h100": 64, "mi300x": 32}


def test_a_failure_is_one_line_without_a_traceback(tmp_path, monkeypatch):
    for name, environ, why in read_table(__file__, "a_failure_is_one_line_without_a_traceback"):
        for key, value in environ.items():
            monkeypatch.setenv(key, value)
        path = INVENTORIES / f"{name}.py"
        with pytest.raises(InventoryError, match=re.escape(why)) as caught:
            load(str(path), cwd=tmp_path)
        assert str(caught.value).startswith(f"{path}:")


def test_it_is_one_line_under_pyinfra_too(tmp_path):
    shutil.copytree(INVENTORIES, tmp_path / "inventories")
    done = pyinfra("inventories/slurm.py", "debug-inventory", cwd=tmp_path)
    *lines, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert lines == ["--> Loading config...", "--> Loading inventory..."]
    assert "no Slurm here" in last


def test_nodes_raises_the_error_that_pyinfra_shows():
    for text, why in (("g[2-1]", "is no range"), ("", "names no node")):
        with pytest.raises(InventoryError, match=why):
            nodes(text)


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: path.stem)
def test_group_data_is_a_valid_policy(path):
    """Every setting is one of ours, also those that are commented out as examples."""
    text = re.sub(r"^# (?=[a-z_]+ = )", "", path.read_text(), flags=re.MULTILINE)
    settings: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), settings)
    ours = {k: v for k, v in settings.items() if not k.startswith("__") and k != "annotations"}
    checked = check_settings(ours, str(path))
    assert set(checked) == set(ours) <= {field.name for field in dataclasses.fields(Policy)}
    if path.stem == "all":
        assert checked == {k: v for k, v in dataclasses.asdict(Policy()).items() if k in checked}


def test_the_names_that_inventories_and_pyinfra_facts_use_stay():
    text = (
        "from nodeready.nodesets import nodes; assert nodes('g[1-2]') == ['g1', 'g2']\n"
        "from nodeready.fleet.inventory.nodeset import nodes\n"
        "from nodeready.facts import Gpus, NodeFacts; assert issubclass(Gpus, NodeFacts)\n"
    )
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True)
