"""Whether the job's user can look into a process, by py-spy, gdb and strace, and into a core."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.subjects.proof import checks as proof_core
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import UNFINISHED, Config, Core
from tests.builders.proof import (
    SPY,
    configured,
    judged,
    line,
    processes,
    prove,
    put_py_spy,
    statuses,
)
from tests.command import wait_for, written
from tests.lab.rows import rows

FIVE = ("attach", "attach_nonblocking", "attach_native", "gdb", "strace")


@pytest.mark.parametrize(
    ("login", "user"),
    rows([("root", "ml"), ("ml", ""), ("ml", "ml"), ("root", "root")], ("root", "ml")),
)
def test_all_ways_in_lead_to_a_stack(fresh_node, login, user):
    put_py_spy(fresh_node)
    before = written(fresh_node)
    found = statuses(prove(fresh_node, login, user=user))
    assert found == dict.fromkeys(["user", "limits", *FIVE], "ok")
    assert written(fresh_node) == before


@pytest.mark.parametrize("tmp", ["ro", pytest.param("size=4k", marks=pytest.mark.nightly)])
def test_no_writable_place_is_needed(fresh_node, tmp):
    put_py_spy(fresh_node)
    for path in ("/tmp", "/var/tmp", "/home/ml", "/dev/shm"):
        fresh_node.enter(["mount", "-t", "tmpfs", "-o", tmp, "tmpfs", path])
        fresh_node.enter(["sh", "-c", f"cat /dev/zero >{path}/fill"], check=False)
    found = statuses(prove(fresh_node))
    assert found == dict.fromkeys(["user", "limits", *FIVE], "ok")


_LACK = "its stacks lack the target's function (root's too); its target "
_LAST = 'for last; do :; done; /bin/kill -{} "$last"; echo "[]"'
# Stand-ins for a py-spy that misbehaves: $4 and so on are the target's options.
STAND_INS = {
    "missing": (None, "fail", "py-spy is not installed"),
    "hangs": ("sleep 300 & exec sleep 301", "unknown", UNFINISHED),
    "prints 1 GB": ("head -c 1000000000 /dev/zero", "fail", "its output is no JSON of stacks"),
    "complains 1 GB": ("head -c 1000000000 /dev/zero >&2; exit 1", "fail", "\0" * 20),
    "deep": ("head -c 200000 /dev/zero | tr '\\0' '['", "fail", "its output is no JSON of stacks"),
    "crashes": ("kill -SEGV $$", "fail", "ended by signal 11"),
    "stops": (_LAST.format("STOP"), "fail", f"{_LACK}stays stopped (state T)"),
    "kills": (_LAST.format("KILL"), "fail", f"{_LACK}ended"),
}


@pytest.mark.parametrize("name", rows(STAND_INS, "missing", "hangs", "stops"))
def test_a_py_spy_that_misbehaves_costs_nothing_else(fresh_node, name):
    script, status, actual = STAND_INS[name]
    if script is not None:
        fresh_node.write(SPY, f"#!/bin/sh\n{script}\n", mode=0o755)
    before = written(fresh_node)
    found = judged(prove(fresh_node, limit_s=8 if name == "hangs" else 40))
    for check in FIVE[:3]:
        assert found[check][0] == status
        assert found[check][1].startswith(actual)
    assert {found[check][0] for check in ("user", "limits", "gdb", "strace")} == {"ok"}
    assert written(fresh_node) == before


def test_a_py_spy_that_only_root_may_run(fresh_node):
    put_py_spy(fresh_node)
    fresh_node.enter(["chmod", "700", SPY])
    found = judged(prove(fresh_node))
    assert found["attach"] == ("fail", f"{SPY} does not start: Permission denied")


@pytest.mark.parametrize(
    ("login", "number"),
    rows([("root", "KILL"), ("root", "HUP"), ("ml", "KILL"), ("ml", "TERM")], ("root", "KILL")),
)
def test_killed_in_the_middle_nothing_is_left(fresh_node, login, number):
    """By an administrator, or by what ends a run's remote commands."""
    fresh_node.write(SPY, "#!/bin/sh\ntouch /run/user/began\nexec sleep 300\n", mode=0o755)
    fresh_node.enter(["sh", "-c", "mkdir -p -m 1777 /run/user; chmod 1777 /run/user"])
    before = processes(fresh_node)
    command = line(configured(user="ml"))
    fresh_node.write("/run/user/in", command.stdin)
    fresh_node.run(f"({command.line}) >/run/user/out 2>&1 </run/user/in &", user=login)
    began = ["test", "-e", "/run/user/began"]
    wait_for(lambda: fresh_node.enter(began, check=False).returncode == 0)
    # The oldest is the program that the login started.
    ours = [row.split() for row in processes(fresh_node) if "import os, sys" in row]
    pid = next(pid for pid, name, *_ in ours if name.startswith("python"))
    fresh_node.enter(["kill", f"-{number}", pid])
    wait_for(lambda: processes(fresh_node) == before)
    assert "Traceback" not in fresh_node.read("/run/user/out")


def test_tools_that_hang_on_a_node(fresh_node):
    put_py_spy(fresh_node)
    for tool in ("gdb", "strace"):
        fresh_node.write(f"/usr/local/bin/{tool}", "#!/bin/sh\nexec sleep 300\n", mode=0o755)
    before = written(fresh_node)
    found = judged(prove(fresh_node, limit_s=8))
    assert found["gdb"] == found["strace"] == ("unknown", UNFINISHED)
    assert found["attach"][0] == "ok"
    assert written(fresh_node) == before


def test_gdb_reads_no_file_of_the_user(fresh_node):
    put_py_spy(fresh_node)
    line = "shell touch /tmp/read-by-gdb\n"
    fresh_node.write("/home/ml/.gdbinit", line)
    fresh_node.write("/home/ml/.config/gdb/gdbinit", line)
    assert statuses(prove(fresh_node))["gdb"] == "ok"
    assert fresh_node.enter(["test", "-e", "/tmp/read-by-gdb"], check=False).returncode == 1


def test_a_pattern_that_is_not_the_kernels_is_found_out(fresh_node) -> None:
    """A lab node has a /proc/sys of its own, as a container may; its crashes are the host's."""
    fresh_node.write("/etc/security/limits.d/zz.conf", "ml - core unlimited\n")
    want = Policy()
    fresh_node.run(f"sysctl -qw kernel.core_pattern={want.core_pattern}; mkdir -m 1777 /var/crash")
    config = Config("nodeready-0badcafe", "nodeready:test", "ml", ("core",))
    command = line(config)
    said = fresh_node.run(command.line, input=command.stdin).stdout
    seen = proved.read(said, config)
    assert isinstance(seen.core, Core)
    assert seen.core.dumped
    result = proof_core.core(seen, want)
    assert (result.status, "core_pattern" in result.actual, "host" in result.fix) == (
        "fail", True, True,
    )  # fmt: skip
    assert fresh_node.run("ls -A /var/crash; ls -d /tmp/nodeready-*", check=False).stdout == ""
