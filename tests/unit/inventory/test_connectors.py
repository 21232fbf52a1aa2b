"""`@slurm/4711`, `@nodeset/gpu[1-3]`, `@hostfile/PATH`: by `pyinfra` itself and by our loader."""

import json
import os
import re
import shutil

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.fleet.inventory import labs
from nodeready.fleet.inventory.load import load, names, select_hosts
from nodeready.lab import machines, state
from tests.cases import read_data, read_table, tomllib
from tests.helpers import executable
from tests.paths import ROOT
from tests.unit.commands import pyinfra

# squeue -h -a -t all -j ID -o "%T|%P|%N" (22.05).
SQUEUE = read_data(__file__, "squeue.sh")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A directory with the package's entry points in sys.path, a hostfile, and squeue."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "nodeready-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nodeready\nVersion: 0\n")
    points = project["entry-points"]["pyinfra.connectors"]
    rows = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[pyinfra.connectors]\n{rows}")
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setenv("PYTHONPATH", f"{info.parent}:{ROOT}")
    tools = tmp_path / "tools"
    executable(tools / "squeue", SQUEUE)
    (tools / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    (tmp_path / "job.hosts").write_text("gpu1 slots=8\ngpu2:4\nlogin1\n")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "VIRTUAL_ENV"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "nodes"), read_table(__file__, "the_same_nodes"))
def test_pyinfra_and_nodeready_reach_the_same_nodes_by_ssh(words, nodes):
    done = pyinfra(words, "debug-inventory")
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^\[(\S+?)\]", done.stdout + done.stderr, re.MULTILINE)
    loaded = load(words)
    assert shown == names(loaded) == nodes.split()
    assert {host.connector_cls.__name__ for host in loaded} == {"SSHConnector"}


def test_they_have_the_slots_and_the_partitions():
    slots = {host.name: host.data.get("slots") for host in load("@hostfile/job.hosts")}
    assert slots == {"gpu1": 8, "gpu2": 4, "login1": None}
    assert dict(load("@slurm/12").groups).keys() == {"h100"}
    assert names(load("@slurm/4711").get_group("h100")) == ["gpu001", "gpu002"]


def test_a_lab_is_found_by_its_name_or_as_the_usual_one(place, monkeypatch):
    assert (labs.ROOT, labs.INVENTORY) == (state.ROOT, machines.INVENTORY)
    monkeypatch.setattr(labs, "ROOT", place / "labs")
    monkeypatch.delenv("NODEREADY_LAB", raising=False)
    with pytest.raises(InventoryError, match=r"'lab' does not run; start it: nodeready lab up$"):
        load("@lab")
    for name in ("a", "b-1"):
        file = place / "labs" / name / machines.INVENTORY
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({f"{name}-n1": {"ssh_hostname": "10.0.0.1"}}))
        assert names(load(f"@lab/{name}")) == [f"{name}-n1"]
        assert load(f"@lab/{name}").get_host(f"{name}-n1").data.ssh_hostname == "10.0.0.1"
        if name == "a":
            assert names(load("@lab").get_group("lab")) == ["a-n1"]
    with pytest.raises(InventoryError, match="several labs run: @lab/a, @lab/b-1"):
        load("@lab")
    monkeypatch.setenv("NODEREADY_LAB", "b-1")
    assert names(load("@lab")) == ["b-1-n1"]
    with pytest.raises(InventoryError, match="is no name of a lab"):
        load("@lab/../a")
    (place / "labs" / "a" / machines.INVENTORY).write_text("{")
    with pytest.raises(InventoryError, match="the lab a cannot be read"):
        load("@lab/a")


def test_nodeready_takes_a_comma_within_the_brackets_and_a_limit(place):
    assert names(load("@nodeset/gpu[1-2,7]")) == ["gpu1", "gpu2", "gpu7"]
    nodes = load("login1,gpu[000-009]")
    chosen = select_hosts(nodes, "@slurm/4711,@hostfile/job.hosts,gpu009")
    assert names(chosen) == ["login1", "gpu001", "gpu002", "gpu009"]
    file = place / "inventory.py"
    file.write_text('h100 = ["@nodeset/gpu[1-2,7]"]\n')
    assert names(load(str(file)).get_group("h100")) == ["gpu1", "gpu2", "gpu7"]


@pytest.mark.parametrize(("words", "why"), read_table(__file__, "an_error_is_one_line"))
def test_an_error_is_one_line(words, why):
    done = pyinfra(words, "debug-inventory")
    *_, last = done.stderr.splitlines()
    assert (done.returncode, why in last, "Traceback" in done.stderr) == (1, True, False), last
    if "no comma" not in why:
        with pytest.raises(InventoryError, match=re.escape(why)) as caught:
            load(words)
        assert "\n" not in str(caught.value)
