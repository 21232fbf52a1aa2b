"""`nodeready cores` on real nodes: real crashes, read by a real gdb."""

import json
import re
from collections.abc import Callable

import pytest

from nodeready.lab import LabNode
from tests.cases import read_table
from tests.command import Terminal, ours, written
from tests.lab.targets import WAIT, start, status
from tests.lifecycle.test_job import crash


@pytest.fixture
def crash_nodes(fresh_nodes: Callable[..., list[LabNode]]) -> Callable[[int], list[LabNode]]:
    """A factory of pristine nodes whose cores go to /var/crash: `crash_nodes(2)`."""

    def take(count: int) -> list[LabNode]:
        nodes = fresh_nodes(count)
        for node in nodes:
            node.write("/proc/sys/kernel/core_pattern", "/var/crash/core.%e.%P.%h.%t\n")
            node.enter(["install", "-d", "-m", "1777", "/var/crash"])
        return nodes

    return take


def groups(done):
    return done.document["groups"]


@pytest.mark.nightly
def test_what_is_kept_of_each_crash_and_what_notes_tell_without_gdb(tool, fleet, crash_nodes):
    """Of equal crashes as one group, the lifecycle asks."""
    (node,) = crash_nodes(1)
    crash(node, 2)
    where, kept = fleet([node]), tool.home / "crash"
    before = written(node)
    done = tool("cores", where, "--format", "json", "-o", kept, status=0)
    assert re.match("__strlen", groups(done)[0]["frames"][0]["function"]), done
    (core,) = done.document["cores"]
    assert (core["rank"], core["job"], core["user"], core["unread"]) == (2, "88", "root", "")
    assert "terminated with signal SIGSEGV" in (kept / core["text_file"]).read_text()
    assert json.loads((kept / "cores.json").read_text()) == done.document
    # Looking leaves nothing behind.
    assert (written(node), ours(node)) == (before, [])
    assert "no core found on 1 node" in tool("cores", where, "--job", "89").err
    node.enter(["mv", "/usr/bin/gdb", "/usr/bin/gdb.away"])
    done = tool("cores", where, "--format", "json", status=3)
    (core,) = done.document["cores"]
    assert core["unread"] == "gdb is not installed (nodeready deploy installs it)"
    assert (core["rank"], core["signal"], core["threads"]) == (2, 11, 1)
    assert "ctypes" in core["command"]


@pytest.fixture
def sleeper(crash_nodes):
    """A node, and a process of ml's on it."""
    (node,) = crash_nodes(1)
    return node, start(node, "/usr/bin/python3", "-c", WAIT, user="ml")


#: A core has ten seconds.
SOON = """
from nodeready.runs.cores import CoreDumper
ask = CoreDumper._ask
CoreDumper._ask = lambda self, s, *more: ask(self, min(s, 10), *more)
"""


def test_a_core_of_a_live_process_is_whole_and_the_process_goes_on(tool, fleet, sleeper):
    node, pid = sleeper
    where = fleet([node])
    refused = tool("cores", where, "--gcore", pid)
    assert (refused.status, refused.out) == (2, ""), refused
    assert "--yes" in refused.err
    terminal = Terminal(tool, "cores", where, "--gcore", pid, columns=200)
    terminal.expect("The process is paused meanwhile. Take the core? [y/N]: ")
    terminal.send("n\n")
    assert terminal.end().status == 0
    assert node.enter(["ls", "-A", "/var/crash"]).stdout == ""
    done = tool("cores", where, "--gcore", pid, "--yes", status=0)
    assert f"pid {pid} goes on" in done.err
    path = done.out.strip()
    assert re.fullmatch(rf"/var/crash/core\.python3\.{pid}\.{node.name}\.[0-9]+", path)
    assert status(node, pid) == ("S", 0)
    assert node.enter(["stat", "-c", "%a %u", path]).stdout == "600 2000\n"
    seen = tool("cores", where, "--format", "json", status=0)
    (group,) = groups(seen)
    assert (group["signal_name"], "sleep" in group["function"]) == ("live", True), group
    # A gdb that hangs does not leave the process stopped.
    node.enter(["rm", path])
    hang = f'#!/bin/sh\ncase "$*" in *attach*) kill -STOP {pid}; sleep 600;; esac\n'
    node.write("/usr/local/bin/gdb", hang, mode=0o755)
    done = tool("cores", where, "--gcore", pid, "--yes", first=SOON, status=1)
    assert "gdb had not finished after 4 s and was ended" in done.err
    assert "goes on (it had been left stopped, and was sent SIGCONT)" in done.err
    assert status(node, pid) == ("S", 0)
    assert (node.enter(["ls", "-A", "/var/crash"]).stdout, ours(node)) == ("", [])


#: What is broken, how it is mended, why no core is taken. A full disk, tests/vm asks.
REFUSED = read_table(__file__, "REFUSED")


@pytest.mark.nightly
def test_what_cannot_be_done_is_refused_before_anything(tool, fleet, sleeper):
    node, pid = sleeper
    for broken, mended, words in REFUSED:
        node.enter(["sh", "-c", broken.replace("PID", str(pid))])
        before = status(node, pid)
        wanted = re.findall("[0-9]+$", words) or [pid]
        done = tool("cores", fleet([node]), "--gcore", *wanted, "--yes")
        assert (done.status, done.out, words in done.err) == (1, "", True), done
        assert status(node, pid) == before
        assert node.enter(["ls", "-A", "/var/crash"], check=False).stdout == ""
        node.enter(["sh", "-c", mended.replace("PID", str(pid))])


@pytest.mark.nightly
def test_postmortem_has_the_core_and_the_gates_no_go(tool, fleet, crash_nodes):
    (node,) = crash_nodes(1)
    crash(node, 3)
    node.write("/var/log/train/rank_3.log", "step 1\n")
    seconds = node.run("date +%s").stdout.strip()
    verdict = {"schema": "nodeready.verdict/1", "time": int(seconds), "boot_id": "", "go": False,
               "policy_digest": "", "reasons": ["gpus.xid: Xid 79"]}  # fmt: skip
    node.write("/run/nodeready/verdict.json", json.dumps(verdict))
    done = tool("postmortem", fleet([node]), "--logs", "/var/log/train/rank_*.log")
    assert re.match(r"segfault +rank 3 \(.*\) was ended by SIGSEGV", done.out), done
    assert re.search(
        r"core of .*python3\S* \(pid \d+\) ended by SIGSEGV: /var/crash/core", done.out
    ), done
    assert f"gate of {node.name}: no-go: gpus.xid: Xid 79" in " ".join(done.out.split()), done
