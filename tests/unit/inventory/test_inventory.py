"""What names nodes on a command line, what is refused, and what --limit selects."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ClusterShell.NodeSet
import pytest
from ClusterShell.NodeUtils import GroupResolverConfig
from pyinfra.api import Config, Inventory, State
from pyinfra.api.exceptions import InventoryError

from nodeready.core.policy import PolicyError
from nodeready.fleet.inventory import nodeset
from nodeready.fleet.inventory.host_data import endpoint, policies
from nodeready.fleet.inventory.load import NodeInventory, load, names, select_hosts
from nodeready.subjects.ssh_client.known_hosts import Endpoint
from tests.cases import cases, read_table

#: inventories/prod.py, group data beside it, and group data in the current directory.
FILES = {
    "inventories/prod.py": """
from nodeready.fleet.inventory.nodeset import nodes
import os
_hidden = ["nobody"]
number = 3
login = ["login1", ("login2", {"rack": "r1"})]
h100 = (nodes("gpu[001-004]"), {"gpus": 8})
amd = ["amd1", "gpu004"]
""",
    "inventories/group_data/all.py": "import os\nptrace_scope = 0\n_private = 1\n",
    "inventories/group_data/h100.py": "gpus = 4\n__all__ = ['gpus']\nother = 2\n",
    "group_data/all.py": "import os\nport_range = (1, 2)\nptrace_scope = 1\n",
    "inventories/other.py": "elsewhere = ['x1']\n",
    "group_data/elsewhere.py": "x = 1\n",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "inventories/prod.py"


@pytest.mark.parametrize("case", cases(__file__, "data/arguments.json"))
def test_a_list_names_its_nodes_in_its_order(case, tmp_path):
    assert names(load(case["argument"], cwd=tmp_path)) == case["nodes"]


@pytest.mark.parametrize("case", cases(__file__, "data/argument_errors.json"))
def test_an_argument_without_nodes_is_refused_in_one_line(case, cluster, monkeypatch):
    monkeypatch.chdir(cluster.parent.parent)
    with pytest.raises(InventoryError) as caught:
        load(case["argument"])
    message = str(caught.value)
    assert case["why"] in message
    assert message.isprintable()
    assert len(message) < 300


# Run by a python of its own: importing pyinfra's command patches the whole process.
AS_PYINFRA = """
import json, os, sys
from pyinfra_cli.inventory import make_inventory_from_files
from pyinfra.api import State
from pyinfra.context import ctx_state
ctx_state.set(State())
inventory = make_inventory_from_files(sys.argv[1], cwd=os.getcwd(), override_data={"rack": "r9"})
print(json.dumps({host.name: [sorted(set(host.groups)), host.data.dict()] for host in inventory}))
"""


#: Each kind of inventory, with five nodes.
FIVE = read_table(__file__, "FIVE")


@pytest.mark.parametrize("argument", FIVE)
def test_every_kind_of_inventory_has_the_same_bound(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in {argument, "hosts"}:
        if FIVE[name]:
            (tmp_path / name).write_text(FIVE[name])
    monkeypatch.setattr(nodeset, "MAX_NODES", 5)
    assert len(load(argument)) == 5
    monkeypatch.setattr(nodeset, "MAX_NODES", 4)
    with pytest.raises(InventoryError, match="has more than 4 nodes"):
        load(argument)


def test_a_file_loads_as_under_pyinfra(cluster, monkeypatch):
    root = cluster.parent.parent
    monkeypatch.chdir(root)
    ours = load("inventories/prod.py", data={"rack": "r9"})
    done = subprocess.run(
        [sys.executable, "-c", AS_PYINFRA, "inventories/prod.py"], check=True, capture_output=True
    )
    nodes = {host.name: [sorted(set(host.groups)), host.data.dict()] for host in ours}
    assert json.loads(json.dumps(nodes)) == json.loads(done.stdout)
    assert list(nodes) == list(json.loads(done.stdout))
    assert nodes["gpu004"][0] == ["amd", "h100", "prod"]
    assert nodes["gpu001"][1]["gpus"] == 4
    beside = (root / "inventories/group_data/all.py").resolve()
    assert ours.group_files["all"] == [root / "group_data/all.py", beside]


@pytest.mark.parametrize(("inventory", "group", "why"), read_table(__file__, "unused_group_data"))
def test_group_data_that_no_group_uses_is_no_silence(inventory, group, why, cluster, monkeypatch):
    """For another inventory beside it, it is no mistake: elsewhere.py."""
    monkeypatch.chdir(cluster.parent.parent)
    computed = "globals().update(part=['x1'])\n"
    cluster.with_name("computed.py").write_text(computed)
    cluster.with_name("job.hosts").write_text("gpu001 slots=8\n")
    folder = cluster.parent.parent if why == "note" else cluster.parent
    (folder / "group_data" / f"{group}.py").write_text("ptrace_scope = 1\n")
    if why and why != "note":
        with pytest.raises(InventoryError, match=re.escape(why)):
            load(inventory)
        return
    note = load(inventory).note
    assert (f"group_data/{group}.py" in note) == (why == "note"), note


def test_the_file_can_stand_anywhere_and_data_of_the_command_line_win(cluster, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    loaded = load(str(cluster), data={"ssh_user": "root", "gpus": 1}, cwd=elsewhere)
    data = [(host.data.ptrace_scope, host.data.gpus, host.data.ssh_user) for host in loaded]
    assert data == [(0, 1, "root")] * 7


@pytest.mark.parametrize("case", cases(__file__, "data/broken_files.json"))
def test_a_broken_file_is_one_line_with_its_place(case, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(case["text"], errors="surrogateescape")
    with pytest.raises(InventoryError) as caught:
        load(str(path), cwd=tmp_path)
    message = str(caught.value)
    assert (f"{path}:{case['line']}: " if case["line"] else str(path)) in message
    assert case["why"] in message
    assert message.isprintable()


def test_an_error_in_group_data_names_its_file_and_prints_stay_out_of_the_results(cluster, capsys):
    broken = cluster.parent / "group_data/amd.py"
    broken.write_text("print('hello')\nx = 1\ny = x.nothing\n")
    with pytest.raises(InventoryError, match=rf"{broken}:3: AttributeError: "):
        load(str(cluster))
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize("case", cases(__file__, "data/limits.json"))
def test_limit_selects_in_the_order_of_the_inventory(case, cluster):
    failed = {"@last-failed": ["gpu002", "retired7"]}
    assert names(select_hosts(load(str(cluster)), case["expression"], failed)) == case["nodes"]


@pytest.mark.parametrize("case", cases(__file__, "data/limit_errors.json"))
def test_limit_refuses_a_missing_node_or_group(case, cluster):
    with pytest.raises(InventoryError) as caught:
        select_hosts(load(str(cluster)), case["expression"], {"@last-failed": []})
    assert case["why"] in str(caught.value)
    assert str(caught.value).isprintable()


def test_limit_takes_a_node_before_a_group_of_its_name_and_local_by_its_name(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("a = ['b', 'c']\nb = ['c']\n")
    assert names(select_hosts(load(str(path), cwd=tmp_path), "b")) == ["b"]
    assert names(select_hosts(load("@local,gpu1", cwd=tmp_path), "@local")) == ["@local"]


def test_hosts_are_what_pyinfra_makes_them(tmp_path):
    """Our short way to the padding of the names gives the same as pyinfra's."""
    ours = load("a,longest-name,@local", cwd=tmp_path)
    stock = Inventory((["a", "longest-name", "@local"], {}))
    state = State(ours, Config())
    State(stock, Config())
    for name in names(stock):
        host = ours.get_host(name)
        assert host.state is state
        assert host.print_prefix == stock.get_host(name).print_prefix
        assert type(host.connector) is type(stock.get_host(name).connector)


def test_loading_leaves_the_process_unpatched(tmp_path):
    code = (
        "from nodeready.fleet.inventory.load import load; load('gpu1')\n"
        "import gevent.monkey, sys\n"
        "sys.exit(gevent.monkey.is_module_patched('socket') or 'pyinfra_cli' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


NONSENSE = {
    "ssh_port": ("x", "22", 0, 65536, 2.5, True, [22]),
    "ssh_user": (7, "-oProxyCommand=x", "a b", "a\n", ["root"]),
    "ssh_key": (7, True, "a\0b", ["a"]),
    "ssh_hostname": (7, "-x", "a b", "@local", "$(id)"),
    "ssh_names": ("gpu1-ib", [7], ["a,b"], ["*"], {"a": 1}),
}


@pytest.mark.parametrize("key", NONSENSE)
def test_nonsense_in_connection_data_is_one_line_that_names_the_node(key):
    for value in NONSENSE[key]:
        hosts = NodeInventory(([("gpu001", {key: value}), "gpu002"], {}), {})
        with pytest.raises(PolicyError) as caught:
            policies(hosts, list(hosts))
        (problem,) = caught.value.problems
        assert problem.startswith(f"host gpu001: {key} = "), problem
        # pyinfra's own command has not refused it.
        assert endpoint(hosts.get_host("gpu001")) == Endpoint()


def test_good_connection_data_is_the_nodes_endpoint():
    address = {"ssh_port": 65535, "ssh_hostname": "10.0.0.1", "ssh_names": ["gpu1-ib", "fd00::1"]}
    user = {"ssh_user": "DOM\\al.ice", "ssh_key": Path("/root/.ssh/id")}
    empty = {"ssh_port": None, "ssh_hostname": "", "ssh_user": "", "ssh_key": None}
    endpoints = {
        "gpu001": (address | user, Endpoint("10.0.0.1", 65535, ("gpu1-ib", "fd00::1"))),
        "gpu002": (empty, Endpoint()),
        "gpu003": ({"ssh_port": 1}, Endpoint("", 1)),
        "@local": ({}, Endpoint(local=True)),
    }
    hosts = NodeInventory(([(name, data) for name, (data, _) in endpoints.items()], {}), {})
    policies(hosts, list(hosts))
    for name, (_, expected) in endpoints.items():
        assert endpoint(hosts.get_host(name)) == expected


def test_a_file_called_like_a_node_is_read_with_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("gpu001", "gpu[001-002]", "job.hosts", "hostfile", "hosts.txt"):
        assert "." in word or word == "hostfile" or load(word).note == ""
        (tmp_path / word).write_text("login1\n")
        loaded = load(word)
        assert names(loaded) == ["login1"]
        if word in ("hostfile", "hosts.txt"):
            assert loaded.note == ""
        else:
            assert loaded.note.startswith(f"{word}: read as the hostfile ./{word}; ")
            assert load(f"./{word}").note == ""
            assert "login1" not in names(load(f"{word},"))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ClusterShell's groups: one source with three groups, from a file of this machine."""
    text = '[Main]\ndefault: racks\n[racks]\nmap: grep "^$GROUP " GROUPS | cut -d" " -f2\n'
    (tmp_path / "groups").write_text("rack1 gpu[1-3]\nrack9 far[1-2]\nbad -oProxyCommand=x\n")
    (tmp_path / "groups.conf").write_text(text.replace("GROUPS", str(tmp_path / "groups")))
    monkeypatch.setattr(nodeset, "config_paths", lambda name: [str(tmp_path / name)])
    resolver = GroupResolverConfig([str(tmp_path / "groups.conf")])
    monkeypatch.setattr(ClusterShell.NodeSet, "RESOLVER_STD_GROUP", resolver)
    return tmp_path


def test_a_group_of_clustershells_is_its_nodes(groups, monkeypatch):
    rack = ["gpu1", "gpu2", "gpu3"]
    for argument, nodes in (
        ("@rack1", rack),
        ("@racks:rack1,x", [*rack, "x"]),
        ("@local", ["@local"]),
        ("@ssh/host", ["@ssh/host"]),
    ):
        assert names(load(argument, cwd=groups)) == nodes
    monkeypatch.setattr(nodeset, "MAX_NODES", 3)
    assert names(load("@rack1", cwd=groups)) == rack
    monkeypatch.setattr(nodeset, "MAX_NODES", 2)
    with pytest.raises(InventoryError, match="has more than 2 nodes"):
        load("@rack1", cwd=groups)


def test_a_group_of_clustershells_selects_nodes_of_the_inventory(groups):
    inventory = load("gpu[2-5]", cwd=groups)
    assert names(select_hosts(inventory, "@racks:rack1,gpu5")) == ["gpu2", "gpu3", "gpu5"]
    for words in ("@rack9", "@nosuch"):
        with pytest.raises(InventoryError, match=f"no node or group {words} in the inventory"):
            select_hosts(inventory, words)
    for words, why in (
        ("@nosuch", "no group '@nosuch' in ClusterShell's sources"),
        ("@other:rack1", "no group '@other:rack1' in ClusterShell's sources"),
        ("@bad", "is no host name"),
    ):
        with pytest.raises(InventoryError, match=why):
            load(words, cwd=groups)
