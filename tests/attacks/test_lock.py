"""No user holds a lock of ours, and no clock or file system makes us wait without an end."""

import re
import subprocess

import pytest

from nodeready.lab import state
from tests.attacks.conftest import become
from tests.attacks.links import MALLORY
from tests.cases import read_data, read_table
from tests.command import SHORT, hang, hangs, ours, wait_for
from tests.lab.rows import rows

LOCK = "/run/nodeready.lock"
SCOPE = "sysctl -n kernel.yama.ptrace_scope"


def deploy(where):
    return ("deploy", where, "--yes", "--only", "ptrace")


def test_a_user_holds_the_lock(fresh_node, mallory, fleet, tool):
    """Neither the file of a deploy, nor the one that an older version left readable."""
    where = fleet([fresh_node], lock_wait_s=1)
    fresh_node.enter(["sh", "-c", f"umask 022; : >{LOCK}"])
    holding = mallory.start("sh", "-c", f"exec flock {LOCK} sleep 600")
    wait_for(lambda: "FLOCK" in fresh_node.read("/proc/locks"))
    assert holding.poll() is None
    tool(*deploy(where), status=0)
    assert fresh_node.run(SCOPE).stdout == "0\n"
    assert fresh_node.run(f"stat -c '%a %U %F' {LOCK}").stdout == "600 root regular file\n"
    refused = mallory.run(f"flock -n {LOCK} true 2>&1", check=False)
    assert refused.returncode, refused
    assert "Permission denied" in refused.stdout


@pytest.mark.nightly
def test_the_lock_is_not_readable_even_while_it_is_made(fresh_node, mallory, fleet, tool):
    mallory.python(f"""
import os
while True:
    try: os.open({LOCK!r}, os.O_RDONLY)
    except OSError: continue
    open("/home/mallory/got", "w").close()
    break
""")
    tool(*deploy(fleet([fresh_node])), status=0)
    assert fresh_node.run("ls -A /home/mallory/got", check=False).returncode


def test_a_user_keeps_the_timer_from_looking(fresh_node, mallory, fleet, tool):
    tool("deploy", fleet([fresh_node], gate=True), "--yes", "--only", "gate", status=0)
    line = fresh_node.read("/etc/cron.d/nodeready").splitlines()[-1].split(" root ", 1)[1]
    fresh_node.enter(["sh", "-c", f"umask 022; {line}"], check=False)
    verdict = fresh_node.enter(["stat", "-c", "%a %U", "/run/nodeready/verdict.json"]).stdout
    assert verdict == "644 root\n"
    lock = line.partition("flock -n ")[2].split()[0]
    refused = mallory.run(f"flock -n {lock} true 2>&1", check=False)
    assert refused.returncode, refused
    assert "Permission denied" in refused.stdout


def test_others_can_write_to_run(fresh_node, mallory, fleet, tool):
    fresh_node.enter(["chmod", "1777", "/run"])
    mallory.run(f"ln -s /root/precious {LOCK}")
    done = tool(*deploy(fleet([fresh_node])), status=1)
    assert "ptrace.scope: /run: others than root can write there: no lock is safe" in done.out
    assert fresh_node.enter(["test", "-e", "/root/precious"], check=False).returncode


#: What somebody did on the node, and what a deploy says.
KEPT = read_table(__file__, "KEPT")


@pytest.mark.parametrize("why", rows(KEPT, "held"))
def test_what_keeps_us_from_the_lock_is_named(why, fresh_node, fleet, tool):
    script, says = KEPT[why]
    fresh_node.enter(["sh", "-c", script])
    done = tool(*deploy(fleet([fresh_node], lock_wait_s=1)), status=1)
    assert re.search(rf"{fresh_node.name}: ptrace\.scope: {says}$", done.out, re.M), done


#: A clock that goes back by an hour each time that somebody looks.
BACKWARDS = read_data(__file__, "backwards.sh")


@pytest.mark.nightly
def test_a_clock_that_runs_backwards_does_not_keep_us_waiting(fresh_node, fleet, tool):
    hang(fresh_node)
    fresh_node.write("/usr/local/bin/date", BACKWARDS, mode=0o755)
    where = fleet([fresh_node], lock_wait_s=1)
    tool.start(*deploy(where), first=SHORT.format(seconds=900))
    wait_for(lambda: hangs(fresh_node))
    second = tool(*deploy(where), first=SHORT.format(seconds=30), status=1)
    assert re.search(r"ptrace\.scope: locked by \S+ since \S+; waited 1 s$", second.out, re.M)
    fresh_node.enter(["sh", "-c", "rm /usr/local/sbin/sysctl; pkill -x sleep"])
    wait_for(lambda: not ours(fresh_node))


def test_a_user_of_this_machine_holds_a_lab(lab_machine, tmp_path):
    place = state.ROOT / f"test-lock-{tmp_path.name[-8:].strip('_')}"
    try:
        place.mkdir(parents=True)
        with state.locked(place):
            pass
        for directory in (state.ROOT, place):
            done = subprocess.run(
                [*become(MALLORY), "flock", "-n", str(directory), "true"],
                check=False,
                capture_output=True,
            )
            assert b"Permission denied" in done.stderr, done
    finally:
        place.rmdir()
