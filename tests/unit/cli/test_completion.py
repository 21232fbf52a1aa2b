"""What Tab offers: the words come from texts, and no inventory is run."""

import json
import os

import click
import pytest

from nodeready.cli import candidates, cli
from nodeready.fleet.inventory import labs
from nodeready.lab.faults import FAULTS
from nodeready.runs.memory.look import Look, NodeSections
from nodeready.runs.memory.store import Memory
from nodeready.subjects.registry import SUBJECTS, check_ids
from tests.cases import with_table

FILE = """
import nosuch
from nodeready.nodesets import nodes

raise SystemExit("this file was run")
h100 = (nodes("gpu[001-064]") + ["gpu100"], {"ssh_user": "root"})
login = ["login1", ("login2", {"ssh_port": 22}), "--limit"]
_hidden = ["old1"]
number = 7
"""


NONE = click.Context(cli)


def words(items):
    return [item.value for item in items]


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "prod.py").write_text(FILE)
    (tmp_path / "hosts").write_text("gpu1 slots=8\ngpu2:4\n# old\n\n-x\n")
    (tmp_path / "bad.py").write_text("h100 = [\n")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NODEREADY_INVENTORY", "hosts")
    monkeypatch.setattr(labs, "ROOT", tmp_path / "labs")
    for name in ("lab", "two"):
        file = labs.file_of(name)
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({f"{name}001": {}}))


@pytest.mark.usefixtures("files")
@with_table("inventory, incomplete, offered")
def test_groups_and_nodes_are_read_from_the_text_of_the_inventory(inventory, incomplete, offered):
    context = click.Context(cli)
    context.args = [] if inventory is None else [inventory]
    assert words(candidates.nodes(context, incomplete)) == offered.split()


@pytest.mark.usefixtures("files")
def test_an_inventory_is_a_file_this_machine_or_a_lab():
    assert words(candidates.inventories(NONE, "@l")) == ["@local", "@lab", "@lab/lab", "@lab/two"]
    (item,) = candidates.inventories(NONE, "inv")
    assert (item.value, item.type) == ("inv", "file")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("inventory", [None, "fleet/prod.py"])
def test_the_sites_own_checks_are_read_from_the_files_here_and_beside_the_inventory(
    inventory, tmp_path
):
    for place, name in ((tmp_path, "here"), (tmp_path / "fleet", "beside")):
        (place / "checks.d").mkdir(parents=True)
        text = f'[[check]]\nid = "{name}"\nrun = "true"\n[[check]]\n  id=\'$(x)\'\n'
        (place / "checks.d/a.toml").write_text(text)
    context = click.Context(cli)
    context.args = [] if inventory is None else [inventory]
    beside = ["ptrace,site.beside"] * bool(inventory)
    assert words(candidates.checks(context, "ptrace,site.")) == ["ptrace,site.here", *beside]


def test_history_is_completed_with_the_nodes_of_the_memory(monkeypatch, tmp_path):
    file = tmp_path / "memory.db"
    monkeypatch.setenv("NODEREADY_MEMORY", str(file))
    (name,) = (param for param in cli.get_command(NONE, "history").params if param.name == "name")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert name.shell_complete(NONE, "gpu") == []
    with Memory.open(file, make=True) as memory:
        look = Look(0, 1.0, "audit", "", "", True, 0, {})
        memory.keep(look, [NodeSections(name, b"", (), tuple) for name in ("gpu001", "login1")])
    assert words(name.shell_complete(NONE, "gpu")) == ["gpu001"]
    assert words(name.shell_complete(NONE, "")) == ["gpu001", "login1"]


def test_every_check_and_subject_and_fault_is_offered():
    assert {*words(candidates.checks(NONE, ""))} == {*check_ids(), *SUBJECTS}
    assert words(candidates.checks(NONE, "limits,ptrace.sc")) == ["limits,ptrace.scope"]
    assert {*words(candidates.faults(NONE, ""))} == {"none", "list", *FAULTS}
