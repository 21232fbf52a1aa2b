"""Slurm's nodes, through stand-ins for scontrol and sinfo that print recorded output (22.05)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.fleet.inventory import slurm
from nodeready.fleet.inventory.nodeset import folded
from nodeready.fleet.inventory.slurm import JobPlacement
from tests.cases import cases, read_data
from tests.command import wait_for
from tests.helpers import executable

# sinfo -a -h -N -o "%N %R": one line per node and partition, in an order that varies.
SINFO = read_data(__file__, "sinfo.txt")
JOB = {"SLURM_JOB_NODELIST": "gpu[001-002],login1"}


class Tools:
    """A directory of programs; the environment finds these and the system's shell, no others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in ("sh", "cat", "sleep"):
            (directory / name).symlink_to(f"/bin/{name}")

    def put(self, name: str, body: str) -> None:
        """A program that notes its arguments and its standard input, then runs the body."""
        calls = shlex.quote(str(self.directory / f"{name}.calls"))
        note = f'for a; do echo "$a"; done >>{calls}\ncat >>{calls}'
        executable(self.directory / name, f"{note}\n{body}")

    def prints(self, name: str, text: str) -> None:
        self.put(name, f"cat <<'END'\n{text.rstrip()}\nEND")

    def calls(self, name: str) -> list[str]:
        return (self.directory / f"{name}.calls").read_text().splitlines()

    def ask(self, environ: dict[str, str]) -> dict[str, list[str]]:
        own = [name for name in os.environ if name.startswith(("SLURM_", "NODEREADY_"))]
        with pytest.MonkeyPatch.context() as patch:
            for name in own:
                patch.delenv(name)
            for name, value in {"PATH": str(self.directory), **environ}.items():
                patch.setenv(name, value)
            return slurm.inventory()


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path / "bin")


def test_all_nodes_with_a_group_for_each_partition(tools):
    tools.prints("sinfo", SINFO)
    groups = [
        ("all", ["gpu001", "gpu002", "gpu010", "login1"]),
        ("debug", ["gpu001"]),
        ("h100", ["gpu001", "gpu002", "gpu010"]),
        ("secret", ["gpu002"]),
    ]
    assert list(tools.ask({}).items()) == groups
    assert tools.calls("sinfo") == ["-a", "-h", "-N", "-o", "%N %R"]


def test_the_nodes_of_the_partition_that_is_named(tools):
    tools.prints("sinfo", SINFO)
    alone = ["gpu001"]
    groups = tools.ask({"NODEREADY_PARTITION": "debug"})
    assert groups == {"all": alone, "debug": alone, "h100": alone}
    with pytest.raises(InventoryError, match="no partition h10; did you mean h100"):
        tools.ask({"NODEREADY_PARTITION": "h10"})
    with pytest.raises(InventoryError, match="there are all, debug, h100, secret"):
        tools.ask({"NODEREADY_PARTITION": "xyz"})


def test_the_nodes_of_the_job_come_from_scontrol_without_a_shell(tools):
    tools.prints("scontrol", "gpu001\ngpu002\nlogin1\n")
    tools.prints("sinfo", SINFO)
    h100 = {"h100": ["gpu001", "gpu002"], "secret": ["gpu002"]}
    groups = {"all": ["gpu001", "gpu002", "login1"], "debug": ["gpu001"], **h100}
    assert tools.ask({**JOB, "NODEREADY_PARTITION": "ignored"}) == groups
    assert tools.calls("scontrol") == ["show", "hostnames", "gpu[001-002],login1"]


def test_without_scontrol_the_list_is_expanded_here(tools):
    nodes = ["gpu001", "gpu002", "login1"]
    for variable in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        groups = tools.ask({variable: "gpu[001-002],login1", "SLURM_JOB_PARTITION": "h100"})
        assert groups == {"all": nodes, "h100": nodes}
    with pytest.raises(InventoryError, match="missing bracket"):
        tools.ask({"SLURM_JOB_NODELIST": "gpu[1-2"})
    # As scontrol 22.05 answers, with code 0.
    tools.prints("scontrol", "gpu]")
    with pytest.raises(InventoryError, match="'gpu]' is no host name"):
        tools.ask({"SLURM_JOB_NODELIST": "gpu[1-2"})


def test_neither_job_nor_sinfo_is_one_clear_line(tools):
    for _ in range(2):
        with pytest.raises(InventoryError, match="no Slurm here: run inside a job"):
            tools.ask({})
        tools.prints("sinfo", "")


@pytest.mark.parametrize(
    ("words", "why"), [("", "is slurmctld up"), ("retrying in 1sec", "retrying in 1sec")]
)
def test_a_tool_that_hangs_is_ended_with_its_children(words, why, tools, monkeypatch):
    pid, communicate = tools.directory / "pid", subprocess.Popen.communicate

    def begun(child, timeout):
        wait_for(lambda: pid.exists() and pid.read_text())
        return communicate(child, timeout=0.01)

    monkeypatch.setattr(subprocess.Popen, "communicate", begun)
    tools.put("sinfo", f"echo {words} >&2; sleep 600 & echo $! >{pid}; wait")
    with pytest.raises(InventoryError, match=rf"sinfo .* gave no answer in 15 s: {why}"):
        tools.ask(JOB)
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    # A process that nobody waits for yet is a zombie.
    wait_for(lambda: not status.exists() or status.read_text().split()[2] == "Z")


@pytest.mark.parametrize("case", cases(__file__, "data/sinfo_errors.json"))
def test_an_error_of_sinfo_is_one_line(case, tools):
    tools.put("sinfo", case["body"])
    with pytest.raises(InventoryError) as caught:
        tools.ask({})
    assert case["why"] in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_job_list_that_is_none_never_reaches_scontrol(tools):
    tools.prints("scontrol", "gpu1")
    for text in ("-V", "gpu1;reboot", "gpu 1", "gpu1\n", "\x1b[2J", "@local"):
        with pytest.raises(InventoryError, match="_NODELIST is no list of nodes") as caught:
            tools.ask({"SLURM_JOB_NODELIST": text})
        assert str(caught.value).isprintable()
    assert not (tools.directory / "scontrol.calls").exists()


#: sinfo -h -a -N -o "%N|%n|%o": the names of Slurm, of the machines, and their addresses.
NAMES = read_data(__file__, "sinfo_names.txt")


@pytest.mark.parametrize("case", cases(__file__, "data/squeue_jobs.json"))
def test_whose_a_job_is_and_where_it_does_not_run(tools, case, monkeypatch):
    """squeue's rows are those of 22.05 for `-t all -o %A|%i|%U|%N`."""
    monkeypatch.setenv("PATH", str(tools.directory))
    inventory = case.get("inventory", ["n1", "n2", "n3"])
    assert slurm.job_placement(case["job"], inventory) == JobPlacement()
    tools.put("squeue", case["squeue"])
    tools.put("sinfo", case.get("sinfo", f"cat <<'END'\n{NAMES}END"))
    placement = slurm.job_placement(case["job"], inventory)
    assert placement.user == case["user"]
    assert folded(placement.nodes) == case.get("nodes", "")
    assert sorted(placement.other_nodes) == case.get("others", [])
    assert [*placement.parts] == case.get("parts", [])
