"""Slurm's nodes, through stand-ins for scontrol and sinfo that print recorded output (22.05)."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.inventory import slurm

# sinfo -a -h -N -o "%N %R": one line per node and partition, in an order that varies.
SINFO = """\
gpu001 debug
gpu001 h100
gpu010 h100
gpu002 h100
gpu002 secret
login1 all
gpu001 all
"""
JOB = {"SLURM_JOB_NODELIST": "gpu[001-002],login1"}


class Tools:
    """A directory of programs; the environment finds these and the system's shell, no others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in ("sh", "cat", "sleep"):
            (directory / name).symlink_to(f"/bin/{name}")

    def put(self, name: str, body: str) -> None:
        """A program that notes its arguments and its standard input, then does ``body``."""
        path = self.directory / name
        calls = shlex.quote(str(self.directory / f"{name}.calls"))
        path.write_text(f'#!/bin/sh\nfor a; do echo "$a"; done >>{calls}\ncat >>{calls}\n{body}\n')
        path.chmod(0o755)

    def prints(self, name: str, text: str) -> None:
        self.put(name, f"cat <<'END'\n{text.rstrip()}\nEND")

    def calls(self, name: str) -> list[str]:
        return (self.directory / f"{name}.calls").read_text().splitlines()

    def ask(self, environ: dict[str, str], timeout_s: float = 60) -> dict[str, list[str]]:
        return slurm.inventory({"PATH": str(self.directory), **environ}, timeout_s)


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path / "bin")


def test_all_nodes_with_a_group_for_each_partition(tools: Tools) -> None:
    tools.prints("sinfo", SINFO)
    found = tools.ask({})
    assert list(found.items()) == [
        ("all", ["gpu001", "gpu002", "gpu010", "login1"]),
        ("debug", ["gpu001"]),
        ("h100", ["gpu001", "gpu002", "gpu010"]),
        ("secret", ["gpu002"]),
    ]
    assert tools.calls("sinfo") == ["-a", "-h", "-N", "-o", "%N %R"]


def test_the_nodes_of_the_partition_that_is_named(tools: Tools) -> None:
    tools.prints("sinfo", SINFO)
    assert tools.ask({"NODEREADY_PARTITION": "debug"}) == {
        "all": ["gpu001"],
        "debug": ["gpu001"],
        "h100": ["gpu001"],
    }
    with pytest.raises(InventoryError, match="no partition h10; did you mean h100"):
        tools.ask({"NODEREADY_PARTITION": "h10"})
    with pytest.raises(InventoryError, match="there are all, debug, h100, secret"):
        tools.ask({"NODEREADY_PARTITION": "xyz"})


def test_the_nodes_of_the_job_come_from_scontrol_without_a_shell(tools: Tools) -> None:
    tools.prints("scontrol", "gpu001\ngpu002\nlogin1\n")
    tools.prints("sinfo", SINFO)
    found = tools.ask({**JOB, "NODEREADY_PARTITION": "ignored"})
    assert found == {
        "all": ["gpu001", "gpu002", "login1"],
        "debug": ["gpu001"],
        "h100": ["gpu001", "gpu002"],
        "secret": ["gpu002"],
    }
    assert tools.calls("scontrol") == ["show", "hostnames", "gpu[001-002],login1"]


@pytest.mark.parametrize("variable", ["SLURM_JOB_NODELIST", "SLURM_NODELIST"])
def test_without_scontrol_the_list_is_expanded_here(variable: str, tools: Tools) -> None:
    found = tools.ask({variable: "gpu[001-002],login1", "SLURM_JOB_PARTITION": "h100"})
    nodes = ["gpu001", "gpu002", "login1"]
    assert found == {"all": nodes, "h100": nodes}


def test_neither_job_nor_sinfo_is_one_clear_line(tools: Tools) -> None:
    with pytest.raises(InventoryError, match="no Slurm here: run inside a job"):
        tools.ask({})
    tools.prints("sinfo", "")
    with pytest.raises(InventoryError, match="no Slurm here"):
        tools.ask({})


@pytest.mark.parametrize("name", ["scontrol", "sinfo"])
def test_a_tool_that_hangs_is_ended_and_said(name: str, tools: Tools) -> None:
    pid = tools.directory / "pid"
    tools.prints("sinfo", SINFO)
    tools.put(name, f"sleep 600 & echo $! >{pid}; wait")
    with pytest.raises(InventoryError, match=rf"{name} .* gave no answer in 2 s: is slurmctld up"):
        tools.ask(JOB, timeout_s=2)
    # The child of the tool was ended with it; a process that nobody waits for yet is a zombie.
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    for _ in range(100):
        # The signal was sent; on a busy machine the process may not have died of it yet.
        if _state(status) in ("", "Z"):
            break
        time.sleep(0.1)
    assert _state(status) in ("", "Z")


def _state(status: Path) -> str:
    """A process's state by its /proc/PID/stat; "" when it is gone."""
    try:
        return status.read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' "
            ">&2; exit 1",
            "sinfo -a -h failed: slurm_load_partitions: Unable to contact slurm controller",
        ),
        ("printf 'noise\\n\\033[31mred\\n' >&2; exit 1", r"failed: \\x1b\[31mred"),
        ("exit 3", "failed: exit code 3"),
        ("echo retrying in 1sec up to 60sec >&2; sleep 600", "no answer in 2 s: retrying in 1sec"),
        ("echo 'gpu1'", "is no node: 'gpu1'"),
        ("echo '-oProxyCommand=x h100'", "is no node: '-oProxyCommand=x h100'"),
        ("printf 'gpu\\033[2J h100\\n'", r"is no node: 'gpu\\x1b\[2J h100'"),
        ("printf 'gpu\\377 h100\\n'", "is no node"),
        ("echo '$(reboot) h100'", "is no node"),
    ],
)
def test_what_sinfo_says_wrong_is_one_line(body: str, why: str, tools: Tools) -> None:
    tools.put("sinfo", body)
    with pytest.raises(InventoryError, match=why) as caught:
        tools.ask({}, timeout_s=2 if "sleep" in body else 60)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text", ["-V", "gpu1;reboot", "$(reboot)", "gpu 1", "gpu1\n", "\x1b[2J", "@local", "gpu/1"]
)
def test_a_job_list_that_is_none_never_reaches_scontrol(text: str, tools: Tools) -> None:
    tools.prints("scontrol", "gpu1")
    with pytest.raises(InventoryError, match="SLURM_JOB_NODELIST is no list of nodes") as caught:
        tools.ask({"SLURM_JOB_NODELIST": text})
    assert str(caught.value).isprintable()
    assert not (tools.directory / "scontrol.calls").exists()


@pytest.mark.parametrize(
    ("text", "printed", "why"),
    [
        ("gpu[1-2", "gpu]", "'gpu]' is no host name"),  # as scontrol 22.05 answers, with code 0
        ("gpu[1-2]", "gpu1\ngpu;2", "'gpu;2' is no host name"),
        ("gpu[1-2", None, "missing bracket"),
        ("gpu[1-9999999]", None, "the most is 65,536"),
    ],
)
def test_a_broken_job_list_is_one_line(
    text: str, printed: str | None, why: str, tools: Tools
) -> None:
    if printed:
        tools.prints("scontrol", printed)
    with pytest.raises(InventoryError, match=why):
        tools.ask({"SLURM_JOB_NODELIST": text})


def test_ten_thousand_nodes_in_four_partitions(tools: Tools) -> None:
    lines = [f"gpu{n:05d} p{part}" for part in range(4) for n in range(10_000)]
    tools.prints("sinfo", "\n".join(lines))
    found = tools.ask({})
    assert [len(members) for members in found.values()] == [10_000] * 5


def test_the_system_is_asked_when_nothing_is_given(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.prints("sinfo", "gpu1 p\n")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "NODEREADY_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tools.directory))
    assert slurm.inventory() == {"all": ["gpu1"], "p": ["gpu1"]}
