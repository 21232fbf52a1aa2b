"""`stacks --syscalls`: strace counts the calls of a process that spins, and lets it go on."""

import json
import threading
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from tests.builders.proof import processes, put_py_spy
from tests.command import wait_for
from tests.lab.targets import WAIT, by_rank, capture, configured, line, start, status

JOB = {"WORLD_SIZE": 2, "MASTER_ADDR": "gpu001", "MASTER_PORT": 29500}
#: A rank that asks a socket without end, whose other end its child has.
SPINS = """
import os, signal, socket, time
own, other = socket.socketpair()
own.setblocking(False)
child = os.fork()
if not child:
    own.close()
    signal.pause()
other.close()
open(os.environ["UP"], "w").close()
def spins():
    while True:
        try:
            own.recv(1)
        except BlockingIOError:
            pass
        os.pread(0, 9, 0)
spins()
"""


@pytest.fixture
def node(fresh_node):
    put_py_spy(fresh_node)
    return fresh_node


def stat(node: LabNode, pid: int) -> list[str]:
    """The fields of /proc/PID/stat from its state on."""
    return node.enter(["cat", f"/proc/{pid}/stat"]).stdout.rpartition(")")[2].split()


def used_ticks(node: LabNode, pid: int) -> int:
    return sum(map(int, stat(node, pid)[11:13]))


def goes_on(node: LabNode, pid: int) -> None:
    """The process becomes untraced, and runs."""
    wait_for(lambda: status(node, pid)[1] == 0)
    assert status(node, pid)[0] in "RS"
    before = used_ticks(node, pid)
    wait_for(lambda: used_ticks(node, pid) > before + 20)


@pytest.mark.parametrize("user", ["ml", "root"])
def test_a_spinner_is_counted_with_the_other_end_until_there_are_enough(node, user):
    pid = start(node, "python3", "-c", SPINS, user=user, RANK=0, **JOB)
    process = by_rank(capture(node, user, pids=(pid,), syscalls_s=5.0))[0]
    first, second = process["system_calls"][:2]
    assert {first["call"], second["call"]} == {"recvfrom EAGAIN", "pread64"}
    received = next(row for row in (first, second) if row["call"] == "recvfrom EAGAIN")
    child = node.enter(["cat", f"/proc/{pid}/task/{pid}/children"]).stdout.strip()
    assert received["object"] == f"a socket of this machine, pid {child} (python3)"
    assert received["peer"] == f"pid {child}"
    # What strace had written before it stopped counts too.
    assert 5000 <= sum(row["count"] for row in process["system_calls"]) < 10000
    assert 0 < process["traced_s"] < 5
    goes_on(node, pid)


SECRETIVE = SPINS.replace("own, other", "__import__('ctypes').CDLL(None).prctl(4, 0)\nown, other")


@pytest.mark.parametrize(("program", "user", "reason"), [
    (WAIT, "ml", "none of its threads has run for 0.3 s"),
    (SPINS, "root", "another user's: only that user"),
    (SECRETIVE, "ml", "not permitted; `nodeready deploy --only"),
], ids=["it waits", "another user's", "not permitted"])  # fmt: skip
def test_a_process_that_is_not_traced_says_why(node, program, user, reason):
    pid = start(node, "python3", "-c", program, user=user, RANK=0, **JOB)
    process = capture(node, "ml", pids=(pid,), syscalls_s=1.0)["processes"][0]
    assert process["system_calls"] == []
    assert reason in process["note"]
    assert status(node, pid)[1] == 0


def test_without_strace_the_note_says_what_installs_it(node):
    pid = start(node, "python3", "-c", SPINS, user="ml", RANK=0, **JOB)
    node.enter(["rm", "/usr/bin/strace"])
    process = capture(node, pids=(pid,), syscalls_s=1.0)["processes"][0]
    assert "strace is not installed (nodeready deploy installs it)" in process["note"]


#: Polls so rarely that strace stays for all of the time.
POLLS = SPINS.replace("os.pread(0, 9, 0)", "time.sleep(0.01)")


@pytest.mark.parametrize("killed", ["strace", "program", "program and watchdog", "by SIGTERM"])
def test_whoever_is_killed_the_process_goes_on(node, killed):
    pid = start(node, "python3", "-c", POLLS, RANK=0, **JOB)
    before = processes(node)
    config = configured(pids=(pid,), syscalls_s=5.0, limit_s=30)
    command = line(config)
    run = threading.Thread(
        target=lambda: node.run(command.line, user="root", input=command.stdin, check=False)
    )
    run.start()
    wait_for(lambda: status(node, pid)[1])
    strace = status(node, pid)[1]
    parent = int(stat(node, strace)[1])
    program = int(stat(node, parent)[1])
    watchdog = int(node.enter(["pgrep", "-o", "-P", str(program)]).stdout)
    assert watchdog != parent
    targets = {"strace": [strace], "program and watchdog": [watchdog, program]}
    signal = "-TERM" if killed == "by SIGTERM" else "-KILL"
    node.enter(["kill", signal, *map(str, targets.get(killed, [program]))])
    wait_for(lambda: status(node, pid)[1] == 0)
    assert status(node, pid)[0] in "RS"
    switches = ["grep", "voluntary", f"/proc/{pid}/status"]
    counted = node.enter(switches).stdout
    wait_for(lambda: node.enter(switches).stdout != counted)
    run.join()
    wait_for(lambda: set(processes(node)) <= set(before))


def test_the_suspects_alone_are_traced_and_the_calls_stand_in_its_group(
    node, tool, fleet, tmp_path: Path
):
    pids = [start(node, "python3", "-c", WAIT, RANK=rank, **{**JOB, "WORLD_SIZE": 4})
            for rank in (0, 1, 3)]  # fmt: skip
    spinner = start(node, "python3", "-c", SPINS, RANK=2, **{**JOB, "WORLD_SIZE": 4})
    words = ("stacks", fleet([node]), "--syscalls", "3s", "--interval", "0.3")
    table = tool(*words, "-o", tmp_path / "kept")
    assert f"pid {spinner}" in table.out
    assert "/s  recvfrom EAGAIN  a socket of this machine, pid " in table.out
    assert "strace stopped after 5,000 system calls" in table.out
    found = json.loads((tmp_path / "kept/stacks.json").read_text())
    traced = {tuple(one["ranks"]): bool(one["system_calls"]) for one in found["groups"]}
    assert traced == {(2,): True, (0, 1, 3): False}
    again = tool("stacks", "--from", tmp_path / "kept", "--format", "json")
    assert again.document["groups"] == found["groups"]
    assert {status(node, pid)[1] for pid in (*pids, spinner)} == {0}
