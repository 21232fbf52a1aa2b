"""`nodeready cores` on real nodes: real crashes, read by a real gdb."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable

import pytest

from nodeready.lab import Node
from tests.command import Terminal, ours, wait_for, written

PATTERN = "/var/crash/core.%e.%P.%h.%t"
#: It dies in the C library's strlen, which ctypes calls.
CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.fixture
def crash_nodes(fresh_nodes: Callable[..., list[Node]]) -> Callable[[int], list[Node]]:
    """A factory of pristine nodes whose cores go to /var/crash: `crash_nodes(2)`."""

    def take(count: int) -> list[Node]:
        nodes = fresh_nodes(count)
        for node in nodes:
            node.write("/proc/sys/kernel/core_pattern", f"{PATTERN}\n")
            node.enter(["install", "-d", "-m", "1777", "/var/crash"])
        return nodes

    return take


def crash(node: Node, rank: int, *, time: int, uid: int = 0) -> str:
    """Crash a Python of a job on the node; the path of its core.

    time: in its name
    The kernel of the lab is this machine's, and its core_pattern a plain ``core``: the file gets
    the name that the node's own pattern gives.
    """
    script = f"""
        set -eu
        mkdir -m 777 /var/crash/now
        cd /var/crash/now
        ulimit -c unlimited
        setpriv --reuid {uid} --regid {uid} --clear-groups env RANK={rank} SLURM_JOB_ID=88 \
            /usr/bin/python3 -c {shlex.quote(CRASH)} & pid=$!
        wait $pid || :
        path=/var/crash/core.python3.$pid.$(uname -n).{time}
        mv core* $path
        rmdir /var/crash/now
        echo $path
    """
    return node.enter(["sh", "-c", script]).stdout.strip().splitlines()[-1]


def groups(done):
    return json.loads(done.out)["groups"]


def test_equal_crashes_are_one_group_with_what_crashed_on_top(tool, fleet, crash_nodes):
    first, second = crash_nodes(2)
    paths = [crash(first, 0, time=1000), crash(first, 1, time=1001), crash(second, 2, time=999)]
    where = fleet([first, second])
    before = written(first)
    done = tool("cores", where, "--format", "json", "-o", tool.home / "crash")
    assert done.status == 0, done
    (group,) = groups(done)
    assert (group["signal_name"], group["program"][:6]) == ("SIGSEGV", "python")
    assert group["ranks"] == [0, 1, 2]
    assert sorted(group["nodes"]) == [first.name, second.name]
    assert re.match("__strlen", group["frames"][0]["function"]), group
    assert group["function"] == group["frames"][0]["function"]
    assert any("_ctypes" in frame["library"] for frame in group["frames"])
    found = json.loads(done.out)["cores"]
    assert sorted(core["path"] for core in found) == sorted(paths)
    for core in found:
        assert (core["job"], core["user"], core["unread"]) == ("88", "root", "")
        text = (tool.home / "crash" / core["text_file"]).read_text()
        assert "Program terminated with signal SIGSEGV" in text
        assert core["text_file"] == f"{core['node']}-{core['pid']}.txt"
    assert json.loads((tool.home / "crash" / "cores.json").read_text()) == json.loads(done.out)
    # Looking leaves nothing behind.
    assert (written(first), ours(first)) == (before, [])

    assert "no core found on 2 nodes" in tool("cores", where, "--job", "89").err


def test_what_only_looks_like_a_core_is_harmless(tool, fleet, crash_nodes):
    (node,) = crash_nodes(1)
    whole = crash(node, 0, time=5)
    node.enter(["sh", "-c", rf"""
        cd /var/crash
        mkfifo core.pipe.9007.x.5
        ln -s /etc/shadow core.link.9008.x.5
        mkdir core.directory.9009.x.5
        echo nothing >core.text.9010.x.5
        : >core.empty.9011.x.5
        cp {whole} "$(printf 'core.a\033[31m\n$(id).9012.x.5')"
        head -c 20000 {whole} >core.short.9013.x.5
        head -c 700 {whole} >core.shorter.9014.x.5
        gzip -c {whole} >core.python3.9015.x.5.zst
        touch core.python3.x.y.5 notes.txt
        """])  # fmt: skip
    done = tool("cores", fleet([node]), "--format", "json")
    assert done.status == 3, done
    cores = {core["pid"]: core for core in json.loads(done.out)["cores"]}
    assert set(cores) - {9010, 9011, 9012, 9013, 9014, 9015} == {int(whole.split(".")[2])}
    why = {pid: core["unread"] for pid, core in cores.items()}
    assert why[9010] == "it is no ELF file"
    assert why[9011] == "it is empty"
    assert why[9012] == ""
    assert "it is cut off at 20000 of " in why[9013]
    assert "it is cut off at 700 bytes" in why[9014]
    assert "coredumpctl dump" in why[9015]
    assert [cores[9013]["truncated"], cores[9012]["truncated"]] == [True, False]
    assert cores[9013]["rank"] is None
    table = tool("cores", fleet([node]))
    assert "\x1b" not in table.out
    assert r"\x1b[31m\x0a$(id)" in tool("cores", fleet([node]), "-v").out


def test_another_users_core_without_root_and_without_gdb(tool, fleet, crash_nodes):
    (node,) = crash_nodes(1)
    mine, root = crash(node, 0, time=5, uid=2000), crash(node, 3, time=6)
    where = fleet([node])
    done = tool("cores", where, "--ssh-user", "ml", "--format", "json")
    assert done.status == 3, done
    cores = {core["path"]: core for core in json.loads(done.out)["cores"]}
    assert cores[mine]["unread"] == ""
    assert "not permitted to read it" in cores[root]["unread"]
    # Root reads what a user can write with that user's rights, and root's own as nobody, who can
    # write nothing.
    log = "/var/crash/uids"
    node.write(
        "/usr/local/bin/gdb", f'#!/bin/sh\nid -u >>{log}\nexec /usr/bin/gdb "$@"\n', mode=0o755
    )
    node.enter(["sh", "-c", f": >{log}; chmod 666 {log}"])
    assert tool("cores", where).status == 0
    assert node.read(log).split() == ["2000"]
    # Without gdb, the core's notes are reported.
    node.enter(["sh", "-c", "rm /usr/local/bin/gdb; mv /usr/bin/gdb /usr/bin/gdb.away"])
    done = tool("cores", where, "--format", "json")
    assert done.status == 3
    core = next(core for core in json.loads(done.out)["cores"] if core["path"] == root)
    assert core["unread"] == "gdb is not installed (nodeready deploy installs it)"
    assert (core["rank"], core["signal"], core["threads"]) == (3, 11, 1)
    assert core["program"].startswith("/usr/bin/python3")
    assert "ctypes" in core["command"]


SLEEPER = "import time\ntime.sleep(3000)"


@pytest.fixture
def sleeper(crash_nodes):
    """A node, and a process of ml's on it."""
    (node,) = crash_nodes(1)
    script = (
        f"setsid setpriv --reuid 2000 --regid 2000 --clear-groups /usr/bin/python3 -c '{SLEEPER}'"
    )
    pid = node.enter(["sh", "-c", f"{script} </dev/null >/dev/null 2>&1 & echo $!"]).stdout.strip()
    wait_for(lambda: b"sleep" in node.enter(["cat", f"/proc/{pid}/wchan"]).stdout.encode())
    yield node, pid
    node.enter(["kill", "-9", pid], check=False)


def state(node, pid):
    text = node.read(f"/proc/{pid}/status")
    return [re.search(rf"^{name}:\s+(\S)", text, re.M)[1] for name in ("State", "TracerPid")]


def test_a_core_of_a_live_process_is_whole_and_the_process_goes_on(tool, fleet, sleeper):
    node, pid = sleeper
    where = fleet([node])
    refused = tool("cores", where, "--gcore", pid)
    assert (refused.status, refused.out) == (2, ""), refused
    assert "--yes" in refused.err
    terminal = Terminal(tool, "cores", where, "--gcore", pid, columns=200)
    terminal.expect("It is paused meanwhile. Take the core? [y/N]: ")
    terminal.send("n\n")
    assert terminal.end().status == 0
    assert node.enter(["ls", "-A", "/var/crash"]).stdout == ""
    done = tool("cores", where, "--gcore", pid, "--yes")
    assert done.status == 0, done
    assert f"pid {pid} goes on" in done.err
    path = done.out.strip()
    assert re.fullmatch(rf"/var/crash/core\.python3\.{pid}\.{node.name}\.[0-9]+", path)
    assert state(node, pid) == ["S", "0"]
    assert node.enter(["stat", "-c", "%a %u", path]).stdout == "600 2000\n"
    seen = tool("cores", where, "--format", "json")
    assert seen.status == 0, seen
    (group,) = groups(seen)
    assert group["signal_name"] == "live"
    assert "sleep" in group["function"], group
    assert ours(node) == []


#: What is broken and how it is mended -> why no core is taken.
REFUSED = {
    ("mount -t tmpfs -o size=8m,mode=1777 x /var/crash", "umount /var/crash"): (
        "MiB free, and the core needs"
    ),
    ("mount -t tmpfs -o ro x /var/crash", "umount /var/crash"): "is on a read-only file system",
    ("rmdir /var/crash", "install -d -m 1777 /var/crash"): "/var/crash: No such file or directory",
    (
        "kill -STOP {pid}; until grep -q '^State:.T' /proc/{pid}/status; do sleep 0.1; done",
        "kill -CONT {pid}; until grep -q '^State:.S' /proc/{pid}/status; do sleep 0.1; done",
    ): "is stopped by a signal",
    ("mv /usr/bin/gdb /usr/bin/gdb.away", "mv /usr/bin/gdb.away /usr/bin/gdb"): (
        "gdb is not installed"
    ),
}


def test_what_cannot_be_done_is_refused_before_anything(tool, fleet, sleeper):
    node, pid = sleeper
    where = fleet([node])
    for (broken, mended), words in REFUSED.items():
        node.enter(["sh", "-c", broken.format(pid=pid)])
        before = state(node, pid)
        done = tool("cores", where, "--gcore", pid, "--yes")
        assert (done.status, done.out) == (1, ""), done
        assert words in done.err
        assert state(node, pid) == before
        assert node.enter(["ls", "-A", "/var/crash"], check=False).stdout == ""
        node.enter(["sh", "-c", mended.format(pid=pid)])
    done = tool("cores", where, "--gcore", "4000000", "--yes")
    assert (done.status, done.out) == (1, ""), done
    assert "there is no process 4000000" in done.err


def test_a_gdb_that_hangs_does_not_leave_the_process_stopped(tool, fleet, sleeper):
    node, pid = sleeper
    hang = f'#!/bin/sh\ncase "$*" in *attach*) kill -STOP {pid}; sleep 600;; esac\n'
    node.write("/usr/local/bin/gdb", hang, mode=0o755)
    short = "from nodeready.triage.cores import Dumping\nask = Dumping._ask\n"
    short += "Dumping._ask = lambda self, s, *more: ask(self, min(s, 10), *more)\n"
    done = tool("cores", fleet([node]), "--gcore", pid, "--yes", first=short)
    assert done.status == 1, done
    assert "gdb had not finished after 4 s and was ended" in done.err
    assert "goes on (it had been left stopped, and was sent SIGCONT)" in done.err
    assert state(node, pid) == ["S", "0"]
    assert node.enter(["ls", "-A", "/var/crash"]).stdout == ""
    assert ours(node) == []


def test_an_interrupt_lets_the_process_go_on(tool, fleet, sleeper):
    node, pid = sleeper
    hang = f'#!/bin/sh\ncase "$*" in *attach*) kill -STOP {pid}; sleep 600;; esac\n'
    node.write("/usr/local/bin/gdb", hang, mode=0o755)
    running = tool.start("cores", fleet([node]), "--gcore", pid, "--yes")
    wait_for(lambda: state(node, pid)[0] == "T")
    running.send_signal(signal.SIGINT)
    done = tool.end(running)
    assert done.status == 130, done
    wait_for(lambda: state(node, pid) == ["S", "0"])
    wait_for(lambda: ours(node) == [])
    assert node.enter(["ls", "-A", "/var/crash"]).stdout == ""
    assert node.enter(["pgrep", "-f", "[s]leep 600"], check=False).stdout == ""
