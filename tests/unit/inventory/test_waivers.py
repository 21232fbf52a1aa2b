"""A waiver for some nodes: the others' policy is without it, and their digests stay."""

import pytest

from nodeready.core.policy import PolicyError, as_data, digest, make_policy
from nodeready.core.settings import Waiver
from nodeready.fleet.inventory.host_data import policies
from nodeready.fleet.inventory.load import load
from tests.cases import read_data

INVENTORY = "h100 = ['gpu001', 'gpu002', 'gpu003', 'gpu004']\n"
DATA = read_data(__file__, "waivers.txt")


def policies_of(directory, monkeypatch, data):
    monkeypatch.chdir(directory)
    (directory / "group_data").mkdir(exist_ok=True)
    (directory / "prod.py").write_text(INVENTORY)
    (directory / "group_data/h100.py").write_text(data)
    inventory = load("prod.py")
    return policies(inventory, list(inventory))


def test_a_node_has_the_waivers_of_its_node_sets(tmp_path, monkeypatch):
    by_node = policies_of(tmp_path, monkeypatch, DATA)
    for_all, cable = Waiver("ptrace.scope", "for all"), ("cable", "ana", "2027-01-31")
    assert [by_node[f"gpu00{number}"].waivers for number in (1, 3, 4)] == [
        (Waiver("nics.mtu", *cable), for_all),
        (Waiver("nics.mtu", "switch"), for_all),
        (for_all,),
    ]
    assert by_node["gpu001"] is by_node["gpu002"]
    assert make_policy(as_data(by_node["gpu001"])) == by_node["gpu001"]
    # A node set that grows changes the policy of the new node alone.
    wider = policies_of(tmp_path, monkeypatch, DATA.replace('"gpu003"', '"gpu[003-004]"'))
    changed = [node for node in by_node if digest([wider[node]]) != digest([by_node[node]])]
    assert changed == ["gpu004"]


@pytest.mark.parametrize("nodes", ["gpu[1-", "-x"])
def test_a_wrong_node_set_is_one_line_with_its_file(tmp_path, monkeypatch, nodes):
    with pytest.raises(PolicyError) as refused:
        policies_of(tmp_path, monkeypatch, DATA.replace("gpu003", nodes))
    (problem,) = refused.value.problems
    assert "group_data/h100.py: waivers: 'nics.mtu': nodes: " in problem
