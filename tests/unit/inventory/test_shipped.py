"""The inventories that come with nodeready, by `pyinfra` itself and by our loader."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nodeready.inventory.load import InventoryError, load, names
from nodeready.policy import Policy
from nodeready.policy.policy import check_settings
from tests.paths import ROOT

INVENTORIES = ROOT / "inventories"
GROUP_FILES = sorted((INVENTORIES / "group_data").glob("*.py"))
# VIRTUAL_ENV: pyinfra has a word about another one that is active.
_LEFT_OUT = ("SLURM_", "NODEREADY_", "VIRTUAL_ENV")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)},
    "NO_COLOR": "1",
}


def pyinfra(directory: Path, inventory: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`pyinfra INVENTORY debug-inventory` as a person runs it."""
    return subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), inventory, "debug-inventory"],
        cwd=directory,
        env={**ENVIRONMENT, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(params=["checkout", "copied"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the directory `inventories` stands: in the checkout, or copied elsewhere."""
    if request.param == "checkout":
        return ROOT
    shutil.copytree(INVENTORIES, tmp_path / "inventories")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "environ", "nodes"),
    [
        ("local", {}, ["@local"]),
        ("example", {}, ["login1", "gpu001", "gpu064", "amd32"]),
        ("slurm", {"SLURM_JOB_NODELIST": "gpu[7-9]"}, ["gpu7", "gpu8", "gpu9"]),
        ("hostfile", {"NODEREADY_HOSTFILE": "HOSTFILE"}, ["gpu1", "gpu2"]),
    ],
)
def test_each_loads_under_pyinfra_and_under_nodeready(
    *,
    name: str,
    environ: dict[str, str],
    nodes: list[str],
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = tmp_path / "no-tools"
    bare.mkdir()
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu1 slots=8\ngpu2:8\n")
    environ = {k: v.replace("HOSTFILE", str(hosts)) for k, v in environ.items()}
    said = pyinfra(place, f"inventories/{name}.py", PATH=str(bare), **environ)
    assert said.returncode == 0, said.stderr
    for variable in ("SLURM_NODELIST", "NODEREADY_PARTITION"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {**environ, "PATH": str(bare)}.items():
        monkeypatch.setenv(variable, value)
    loaded = load(str(place / "inventories" / f"{name}.py"), cwd=place)
    shown = re.findall(r"^\[(\S+?)\]", said.stdout + said.stderr, re.MULTILINE)
    assert shown == names(loaded)
    assert set(nodes) <= set(shown)


@pytest.mark.parametrize(
    ("name", "environ", "why"),
    [
        ("slurm", {}, "no Slurm here"),
        ("slurm", {"SLURM_JOB_NODELIST": "$(reboot)"}, "no list of nodes"),
        ("hostfile", {"NODEREADY_HOSTFILE": "/no/such"}, "cannot read the hostfile /no/such"),
    ],
)
def test_a_failure_is_one_line_without_a_traceback(
    name: str, environ: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = INVENTORIES / f"{name}.py"
    said = pyinfra(tmp_path, str(path), PATH=str(tmp_path), **environ)
    lines = said.stderr.splitlines()
    assert said.returncode == 1
    assert why in lines[-1]
    assert lines[:-1] == ["--> Loading config...", "--> Loading inventory..."]
    assert said.stdout == ""
    for variable in [k for k in os.environ if k.startswith(("SLURM_", "NODEREADY_"))]:
        monkeypatch.delenv(variable)
    for variable, value in {**environ, "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InventoryError, match=re.escape(why)) as caught:
        load(str(path), cwd=tmp_path)
    assert str(caught.value).startswith(f"{path}:")


def test_a_bad_node_set_in_an_inventory_is_one_line_under_pyinfra(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "from nodeready.inventory.nodeset import nodes\nh = nodes('g[2-1]')\n"
    )
    said = pyinfra(tmp_path, "x.py")
    assert said.returncode == 1
    assert said.stderr.splitlines()[-1].endswith(
        "node set 'g[2-1]': '2-1' is no range like 001-064"
    )
    assert "Traceback" not in said.stderr


def test_the_example_has_its_groups() -> None:
    loaded = load(str(INVENTORIES / "example.py"), cwd=ROOT)
    sizes = {group: len(loaded.get_group(group)) for group in ("login", "h100", "mi300x")}
    assert sizes == {"login": 2, "h100": 64, "mi300x": 32}


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: path.stem)
def test_group_data_is_a_valid_policy(path: Path) -> None:
    """Every setting is one of ours, also those that are commented out as examples."""
    text = re.sub(r"^# (?=[a-z_]+ = )", "", path.read_text(), flags=re.MULTILINE)
    settings: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), settings)
    ours = {k: v for k, v in settings.items() if not k.startswith("__") and k != "annotations"}
    assert set(ours) <= {field.name for field in dataclasses.fields(Policy)}
    checked = check_settings(ours, str(path))
    assert set(checked) == set(ours)
    if path.stem == "all":
        assert checked == {k: v for k, v in dataclasses.asdict(Policy()).items() if k in checked}


def test_the_names_that_inventories_and_pyinfra_facts_use_stay() -> None:
    """In a Python that has not imported the modules by their own names."""
    text = (
        "from nodeready.nodesets import nodes; assert nodes('g[1-2]') == ['g1', 'g2']\n"
        "from nodeready.facts import NodeFacts; assert NodeFacts.__name__ == 'NodeFacts'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
