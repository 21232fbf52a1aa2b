"""Ansible's inventories as INVENTORY: the nodes, their groups, and what is said of the rest."""

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.fleet.inventory.load import load, names
from nodeready.fleet.inventory.nodeset import expand
from tests.cases import cases

KEYS = ("ssh_hostname", "ssh_port", "ssh_user", "ssh_key", "_sudo")


@pytest.mark.parametrize("row", cases(__file__, "data/ansible.toml"))
def test_an_inventory_of_ansible_is_read(row, tmp_path):
    file = tmp_path / row["file"]
    for name, text in {row["file"]: row["text"], **row.get("files", {})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if "error" in row:
        with pytest.raises(InventoryError) as caught:
            load(str(file), cwd=tmp_path)
        assert row["error"] in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    inventory = load(str(file), cwd=tmp_path)
    data = {
        host.name: {key: value for key in KEYS if (value := host.data.get(key)) is not None}
        for host in inventory
    }
    assert data == {name: each for text, each in row["nodes"].items() for name in expand(text)}
    groups = {name: names(hosts) for name, hosts in inventory.groups.items() if hosts}
    assert {name: sorted(each) for name, each in groups.items()} == {
        name: sorted(expand(text)) for name, text in row.get("groups", {}).items()
    }
    assert row.get("note", "") in inventory.note
    assert bool(inventory.note) == ("note" in row)


def test_a_file_of_another_user_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "nodeready.fleet.inventory.trust._entry_problem",
        lambda path, status, owners: "another user's" if "group_vars" in path else "",
    )
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("ansible_user: evil\n")
    (tmp_path / "hosts.yml").write_text("all: {hosts: {n1: }}\n")
    with pytest.raises(InventoryError, match="another user's"):
        load(str(tmp_path / "hosts.yml"), cwd=tmp_path)
    assert names(load(str(tmp_path / "hosts.yml"), cwd=tmp_path, trusted=True)) == ["n1"]
