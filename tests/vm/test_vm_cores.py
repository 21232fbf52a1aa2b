"""`nodeready cores` with the kernel's own core_pattern, as a deploy sets it."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import nodeready
from tests.vm.conftest import USER
from tests.vm.machine import Vm

#: Its symbol is exported: no debug information is needed to name it.
CRASH = "import ctypes; ctypes.pythonapi.Py_IncRef(1)"
SLEEP = "import time; time.sleep(3000)"
_LEFT = (
    "ps -eww -o args= | grep '[n]odeready:'; find / -xdev -newer /run/before -name '*nodeready*'"
)


@pytest.fixture(autouse=True)
def nothing_left(vm: Vm, where: Path) -> Iterator[None]:
    vm.run("touch /run/before; rm -f /var/crash/core.*")
    yield
    assert vm.run(_LEFT, check=False).stdout == ""
    vm.run("rm -f /var/crash/core.*")


def cores(where: Path, *words: object) -> dict[str, Any]:
    done = nodeready("cores", where, "--format", "json", *words, status=0)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def crash(vm: Vm, rank: int, before: str = ":") -> None:
    run = f"RANK={rank} SLURM_JOB_ID=7 python3 -c {shlex.quote(CRASH)}"
    assert vm.run(f"{before}; {run}; echo $?", user=USER).stdout == "139\n"


def test_crashes_are_found_where_the_kernel_puts_them(vm, where):
    crash(vm, 0)
    crash(vm, 1)
    found = cores(where)
    (group,) = found["groups"]
    assert (group["signal_name"], group["ranks"], group["nodes"]) == ("SIGSEGV", [0, 1], ["vm1"])
    assert group["function"] == group["frames"][0]["function"] == "Py_IncRef"
    for core in found["cores"]:
        assert (core["user"], core["job"], core["warning"]) == (USER, "7", "")
        assert core["whole_bytes"] == core["size_bytes"]
    assert len(cores(where, "--job", "7")["cores"]) == 2
    assert cores(where, "--job", "8")["cores"] == []


@pytest.mark.nightly
def test_a_core_that_the_limit_cut_off_says_so(vm, where):
    crash(vm, 0, "ulimit -c 400")
    (core,) = cores(where)["cores"]
    assert core["truncated"]
    cut_off = f"it is cut off at {core['size_bytes']} of {core['whole_bytes']} bytes"
    assert cut_off in core["warning"]
    # What stands in front is there: who it was, how it ended, and the innermost frame.
    assert (core["signal"], core["user"], core["unread"]) == (11, USER, "")


@pytest.mark.nightly
def test_a_live_process_leaves_a_core_and_goes_on(vm, where):
    vm.run(f"setsid python3 -c {shlex.quote(SLEEP)} </dev/null >/dev/null 2>&1 & sleep 1", USER)
    pid = vm.run(f"pgrep -u {USER} -f 'time.sleep.3000'").stdout.strip()
    try:
        # Where Yama lets no user attach, gdb has the user's rights and a capability.
        for scope in ("1", "2", "0"):
            vm.run(f"rm -f /var/crash/core.*; sysctl -qw kernel.yama.ptrace_scope={scope}")
            done = nodeready("cores", where, "--gcore", pid, "--yes", status=0)
        status = vm.run(f"grep -E '^(State|TracerPid)' /proc/{pid}/status").stdout
        assert re.search(r"State:\s+S[^T]*TracerPid:\s+0", status), status
        (core,) = cores(where)["cores"]
        assert (core["path"], core["signal"]) == (done.stdout.strip(), 0)
        assert core["whole_bytes"] <= core["size_bytes"]
    finally:
        vm.run(f"kill -9 {pid}")
