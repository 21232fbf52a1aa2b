"""What names nodes on a command line, what is refused, and what --limit selects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ClusterShell.NodeSet
import pytest
from ClusterShell.NodeUtils import GroupResolverConfig
from pyinfra.api import Config, Inventory, State

from nodeready.inventory import nodeset
from nodeready.inventory.load import (
    InventoryError,
    NodeInventory,
    endpoint,
    limit,
    load,
    names,
    policies,
)
from nodeready.policy.policy import PolicyError
from nodeready.subjects.ssh_client.known_hosts import Endpoint

CLUSTER = """
from nodeready.inventory.nodeset import nodes
import os
_hidden = ["nobody"]
number = 3
login = ["login1", ("login2", {"rack": "r1"})]
h100 = (nodes("gpu[001-004]"), {"gpus": 8})
amd = ["amd1", "gpu004"]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """An inventory file with groups, and group data beside it and in the current directory."""
    (tmp_path / "inventories/group_data").mkdir(parents=True)
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data/all.py").write_text(
        "import os\nport_range = (1, 2)\nptrace_scope = 1\n"
    )
    (tmp_path / "group_data/nowhere.py").write_text("x = 1\n")
    beside = tmp_path / "inventories/group_data"
    (beside / "all.py").write_text(
        "from pyinfra import inventory\nptrace_scope = 0\n_private = 1\n"
    )
    (beside / "h100.py").write_text("gpus = 4\n__all__ = ['gpus']\nother = 2\n")
    path = tmp_path / "inventories/prod.py"
    path.write_text(CLUSTER)
    return path


@pytest.mark.parametrize(
    ("argument", "nodes"),
    [
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("login1,gpu2,gpu1,gpu2", ["login1", "gpu2", "gpu1"]),
        ("gpu1", ["gpu1"]),
        ("gpu1,", ["gpu1"]),
        ("@local", ["@local"]),
        ("@local,gpu[1-2]", ["@local", "gpu1", "gpu2"]),
        ("@ssh/gpu1,@chroot/srv/image", ["@ssh/gpu1", "@chroot/srv/image"]),
        ("n[1-7/2]", ["n1", "n3", "n5", "n7"]),
        ("10.0.0.[1-2],::1", ["10.0.0.1", "10.0.0.2", "::1"]),
    ],
)
def test_a_list_names_its_nodes_in_its_order(
    argument: str, nodes: list[str], tmp_path: Path
) -> None:
    assert names(load(argument, cwd=tmp_path)) == nodes


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("", "names no node: name a file, @local"),
        (" , ", "names no node"),
        ("gpu[64-1]", "is no range"),
        ("gpu[1-9999999]", "the most is 65,536"),
        ("-oProxyCommand=reboot", "begins with a dash"),
        ("gpu1;reboot", "is no host name"),
        ("gpu1,$(reboot)", "is no host name"),
        ("gpu1\nreboot", r"'gpu1\nreboot' is no host name"),
        ("gpu\x1b[2J", r"\x1b"),
        ("a\0b", r"\x00"),
        ("two words", "is no host name"),
        ("alice@gpu1", "ssh_user"),
        ("@nosuch/x", "nosuch"),
        ("@local/x", "more than one @local"),
        ("inventories/prdo.py", "no such inventory file: inventories/prdo.py; did you mean inven"),
        ("nosuch.txt", "no such inventory file: nosuch.txt"),
        ("./hosts", "no such inventory file: ./hosts"),
        ("/dev/null", "no regular file"),
        ("inventories", "is a directory"),
        ("inventories/prod.py,gpu1", "is a file: name one inventory file"),
        ("x" * 5000, "is no host name"),
    ],
)
def test_what_names_no_nodes_is_refused_in_one_line(
    argument: str, why: str, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cluster.parent.parent)
    with pytest.raises(InventoryError) as caught:
        load(argument)
    message = str(caught.value)
    assert why in message
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


def test_a_file_loads_as_under_pyinfra(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = cluster.parent.parent
    monkeypatch.chdir(root)
    ours = load("inventories/prod.py", data={"rack": "r9"})
    said = subprocess.run(
        [sys.executable, "-c", AS_PYINFRA, "inventories/prod.py"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = {host.name: [sorted(set(host.groups)), host.data.dict()] for host in ours}
    assert json.loads(json.dumps(found)) == json.loads(said)
    assert list(found) == list(json.loads(said))
    assert found["gpu004"][0] == ["amd", "h100", "prod"]
    assert found["gpu001"][1]["gpus"] == 4
    assert ours.group_files["all"] == [
        root / "group_data/all.py",
        (root / "inventories/group_data/all.py").resolve(),
    ]


def test_the_file_can_stand_anywhere(
    cluster: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    loaded = load(str(cluster), cwd=elsewhere)
    assert len(loaded) == 7
    assert loaded.get_host("gpu001").data.get("ptrace_scope") == 0


def test_data_of_the_command_line_wins(cluster: Path) -> None:
    loaded = load(str(cluster), data={"ssh_user": "root", "gpus": 1})
    assert {host.data.gpus for host in loaded} == {1}
    assert {host.data.ssh_user for host in loaded} == {"root"}


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("import os\nx = undefined\n", 2, "NameError: name 'undefined' is not defined"),
        ("a = 1\nb = (\n", 2, "never closed"),
        ("\n\nraise SystemExit('bye')\n", 3, "SystemExit: bye"),
        ("import sys\nsys.exit()\n", 2, "SystemExit"),
        ("raise ValueError('one\\ntwo\\x1b[31m')\n", 1, r"ValueError: one two\x1b[31m"),
        ("def f():\n    return 1 / 0\nhosts = f()\n", 2, "ZeroDivisionError"),
        ("import nosuchmodule\n", 1, "nosuchmodule"),
        (
            "from nodeready.inventory.nodeset import nodes\nh = nodes('gpu[9-1]')\n",
            2,
            "is no range",
        ),
        ("hosts = ['\xff']\n".encode("latin-1"), 1, "utf-8"),
        ("h = ['a']\0\n", None, "null bytes"),
        ("h = ['gpu1;reboot']\n", None, "group h: 'gpu1;reboot' is no host name"),
        ("h = ['-oX']\n", None, "group h: '-oX' is no host name: it begins with a dash"),
        ("h = ['gpu[1-4]']\n", None, "expand a node set with nodeready.inventory.nodeset.nodes"),
        ("h = ['']\n", None, "group h: '' is no host name"),
        ("h = ('a', 'b')\n", None, "h must be a list of hosts, or (hosts, data)"),
        ("h = ['a', 3]\n", None, "names no node"),
        ("h = []\n", None, "names no node"),
        ("", None, "names no node"),
    ],
)
def test_a_broken_file_is_one_line_with_its_place(
    text: str | bytes, line: int | None, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InventoryError) as caught:
        load(str(path), cwd=tmp_path)
    message = str(caught.value)
    assert (f"{path}:{line}: " if line else str(path)) in message
    assert why in message
    assert message.isprintable()


def test_an_error_in_group_data_names_its_file(cluster: Path) -> None:
    broken = cluster.parent / "group_data/amd.py"
    broken.write_text("x = 1\ny = x.nothing\n")
    with pytest.raises(InventoryError, match=rf"{broken}:2: AttributeError: "):
        load(str(cluster))


def test_what_a_file_prints_stays_out_of_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loud.py"
    path.write_text("print('hello')\nhosts = ['a']\n")
    load(str(path), cwd=tmp_path)
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(
    ("expression", "nodes"),
    [
        ("gpu001", ["gpu001"]),
        ("gpu[003-004],login1", ["login1", "gpu003", "gpu004"]),
        ("h100", ["gpu001", "gpu002", "gpu003", "gpu004"]),
        ("@amd", ["gpu004", "amd1"]),
        ("gpu*", ["gpu001", "gpu002", "gpu003", "gpu004"]),
        ("*1,gpu002", ["login1", "gpu001", "gpu002", "amd1"]),
        ("login?", ["login1", "login2"]),
        ("all", ["login1", "login2", "gpu001", "gpu002", "gpu003", "gpu004", "amd1"]),
        ("prod", ["login1", "login2", "gpu001", "gpu002", "gpu003", "gpu004", "amd1"]),
        ("@last-failed", ["gpu002"]),
        ("@last-failed,login1", ["login1", "gpu002"]),
    ],
)
def test_limit_selects_in_the_order_of_the_inventory(
    expression: str, nodes: list[str], cluster: Path
) -> None:
    loaded = load(str(cluster))
    failed = {"@last-failed": ["gpu002", "retired7"]}
    assert names(limit(loaded, expression, failed)) == nodes


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("gpu005", "no node or group gpu005 in the inventory; did you mean gpu00"),
        ("h10", "did you mean h100?"),
        ("gpu[003-008]", r"no node or group gpu\[005-008\] in"),
        ("zzz", r"its nodes are amd1,gpu\[001-004\],login\[1-2\]; its groups are login, prod, "),
        ("zz*", r"no node or group zz\* in"),
        ("nowhere", "no node or group nowhere"),
        ("", "selects no node"),
        ("@last-failed", "selects no node"),
        ("gpu001;reboot", "is no host name"),
        ("-x", "begins with a dash"),
        ("gpu\x1b[2J", r"\\x1b"),
    ],
)
def test_limit_refuses_what_is_not_there(expression: str, why: str, cluster: Path) -> None:
    with pytest.raises(InventoryError, match=why) as caught:
        limit(load(str(cluster)), expression, {"@last-failed": []})
    assert str(caught.value).isprintable()


def test_a_node_wins_over_a_group_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("a = ['b', 'c']\nb = ['c']\n")
    assert names(limit(load(str(path), cwd=tmp_path), "b")) == ["b"]


def test_local_is_selected_by_its_name(tmp_path: Path) -> None:
    assert names(limit(load("@local,gpu1", cwd=tmp_path), "@local")) == ["@local"]


def test_ten_thousand_nodes_have_their_groups_and_a_state(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(
        "from nodeready.inventory.nodeset import nodes\n"
        "h100 = nodes('gpu[00001-10000]')\nodd = nodes('gpu[00001-10000/2]')\n"
    )
    loaded = load(str(path), cwd=tmp_path)
    assert isinstance(loaded, Inventory)
    assert [len(loaded.get_group(group)) for group in ("h100", "odd", "large")] == [
        10_000,
        5_000,
        10_000,
    ]
    state = State(loaded, Config())
    assert loaded.get_host("gpu09999").state is state
    assert len(limit(loaded, "gpu[00001-10000]")) == 10_000


def test_hosts_are_what_pyinfra_makes_them(tmp_path: Path) -> None:
    """Our short way to the padding of the names gives what pyinfra's gives."""
    ours = load("a,longest-name,@local", cwd=tmp_path)
    stock = Inventory((["a", "longest-name", "@local"], {}))
    State(ours, Config())
    State(stock, Config())
    assert isinstance(ours, NodeInventory)
    for name in names(stock):
        assert ours.get_host(name).print_prefix == stock.get_host(name).print_prefix
        assert type(ours.get_host(name).connector) is type(stock.get_host(name).connector)


def test_loading_leaves_the_process_unpatched(tmp_path: Path) -> None:
    code = (
        "from nodeready.inventory.load import load; load('gpu1')\n"
        "import gevent.monkey, sys\n"
        "sys.exit(gevent.monkey.is_module_patched('socket') or 'pyinfra_cli' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("ssh_port", value) for value in ("x", "22", 0, -1, 70000, 2.5, True, [22])),
        *(("ssh_user", value) for value in (7, "-oProxyCommand=x", "a b", "a\n", ["root"])),
        *(("ssh_key", value) for value in (7, True, "a\0b", ["a"])),
        *(("ssh_hostname", value) for value in (7, "-x", "a b", "@local", "$(id)")),
        *(("ssh_names", value) for value in ("gpu1-ib", [7], ["a,b"], ["*"], {"a": 1})),
    ],
)
def test_nonsense_in_connection_data_is_one_line_that_names_the_node(key, value):
    made = _made([("gpu001", {key: value}), "gpu002"])
    with pytest.raises(PolicyError) as refused:
        policies(made, list(made))
    (problem,) = refused.value.problems
    assert problem.startswith(f"host gpu001: {key} = "), problem
    # And where nothing has looked at it before, under pyinfra's own command.
    assert endpoint(made.get_host("gpu001")) == Endpoint()


def test_good_connection_data_is_the_nodes_endpoint():
    data = {"ssh_port": 2222, "ssh_hostname": "10.0.0.1", "ssh_names": ["gpu1-ib", "fd00::1"]}
    more = {"ssh_user": "DOM\\al.ice", "ssh_key": Path("/root/.ssh/id")}
    empty = {"ssh_port": None, "ssh_hostname": "", "ssh_user": "", "ssh_key": None}
    made = _made([("gpu001", data | more), ("gpu002", empty), ("@local", {})])
    policies(made, list(made))
    assert endpoint(made.get_host("gpu001")) == Endpoint("10.0.0.1", 2222, ("gpu1-ib", "fd00::1"))
    assert endpoint(made.get_host("gpu002")) == Endpoint()
    assert endpoint(made.get_host("@local")) == Endpoint(local=True)


def _made(hosts):
    return NodeInventory((hosts, {}), {})


@pytest.mark.parametrize("word", ["gpu001", "gpu[001-002]", "job.hosts"])
def test_a_file_called_like_a_node_is_read_and_said(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).write_text("login1\n")
    loaded = load(word)
    assert names(loaded) == ["login1"]
    assert loaded.note.startswith(f"{word}: read as the hostfile ./{word}; ")
    assert load(f"./{word}").note == ""
    assert "login1" not in names(load(f"{word},"))


def test_a_file_with_a_files_name_is_no_surprise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hostfile", "hosts.txt"):
        (tmp_path / name).write_text("login1\n")
        assert load(name).note == ""
    assert load("gpu001").note == ""


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ClusterShell's groups: one source, of two groups, as a file of this machine's says."""
    text = '[Main]\ndefault: racks\n[racks]\nmap: grep "^$GROUP " GROUPS | cut -d" " -f2\n'
    (tmp_path / "groups").write_text("rack1 gpu[1-3]\nrack9 far[1-2]\nbad -oProxyCommand=x\n")
    (tmp_path / "groups.conf").write_text(text.replace("GROUPS", str(tmp_path / "groups")))
    monkeypatch.setattr(nodeset, "config_paths", lambda name: [str(tmp_path / name)])
    resolver = GroupResolverConfig([str(tmp_path / "groups.conf")])
    monkeypatch.setattr(ClusterShell.NodeSet, "RESOLVER_STD_GROUP", resolver)
    return tmp_path


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ("@rack1", ["gpu1", "gpu2", "gpu3"]),
        ("@racks:rack1,x", ["gpu1", "gpu2", "gpu3", "x"]),
        ("@local", ["@local"]),
        ("@ssh/host", ["@ssh/host"]),
    ],
)
def test_a_group_of_clustershells_is_its_nodes(
    groups: Path, argument: str, found: list[str]
) -> None:
    assert names(load(argument, cwd=groups)) == found


def test_a_group_of_clustershells_selects_what_the_inventory_has(groups: Path) -> None:
    inventory = load("gpu[2-5]", cwd=groups)
    assert names(limit(inventory, "@rack1")) == ["gpu2", "gpu3"]
    assert names(limit(inventory, "@racks:rack1,gpu5")) == ["gpu2", "gpu3", "gpu5"]
    for words in ("@rack9", "@nosuch"):
        with pytest.raises(InventoryError, match=f"no node or group {words} in the inventory"):
            limit(inventory, words)


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("@nosuch", "no group '@nosuch' in ClusterShell's sources"),
        ("@other:rack1", "no group '@other:rack1' in ClusterShell's sources"),
        ("@bad", "is no host name"),
    ],
)
def test_a_group_that_names_no_nodes_is_told(groups: Path, argument: str, why: str) -> None:
    with pytest.raises(InventoryError, match=why):
        load(argument, cwd=groups)
