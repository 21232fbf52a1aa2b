"""The proofs on a real kernel: they pass after a deploy, and name what keeps them from it.

Each run is between two looks at everything that is not ours: whatever the fault, nothing of that
was touched, and nothing of ours is left.
"""

import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nodeready.agent import payload
from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import ProofConfig
from nodeready.subjects.snapshot import Snapshot, judge
from tests.cases import cases, read_data
from tests.helpers import nodeready
from tests.vm.conftest import USER
from tests.vm.machine import Vm

WANT = Policy(limit_nofile=65536)
SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
#: py-spy's native unwinding is slow under emulation.
LIMIT_S = 150
#: Where the program lies for a command that has a terminal for its input.
INPUT = "/tmp/nodeready-test-input"
ATTACH = ("attach", "attach_nonblocking", "attach_native", "gdb", "strace")

# Files with their inode, size and time, directories by name: theirs change with what we remove.
_LOOK = read_data(__file__, "look.sh")
_START = read_data(__file__, "bystanders.sh")
_PROCESSES = "ps -eo pid=,user=,stat=,args="


@contextmanager
def untouched(vm: Vm) -> Iterator[None]:
    """Look before and after: bystanders, files, and the processes that are left."""
    before = vm.run(_START + _LOOK).stdout
    pids = vm.run("cat /run/bystanders").stdout.split()
    assert before.count("bystander") == before.count("TracerPid:\t0") == 2, before
    try:
        yield
        left = _left(vm, pids)
        assert left == []
        assert vm.run(_LOOK).stdout == before
    finally:
        vm.run(f"kill -9 {' '.join(pids)}", check=False)


def _left(vm: Vm, pids: list[str]) -> list[str]:
    """Processes of ours, and any that is stopped; the last ones may need a moment to end."""
    for _ in range(5):
        rows = [row.split(None, 3) for row in vm.run(_PROCESSES).stdout.splitlines()]
        left = [
            " ".join(row)
            for row in rows
            if row[0] not in pids
            and (row[1] == USER or row[2][0] in "Tt" or "nodeready" in row[-1])
            and "sshd:" not in row[-1]
        ]
        if not left:
            break
        time.sleep(1)
    return left


def prove(
    vm: Vm, wanted: tuple[str, ...], login: str = "root", through_sudo: bool = False
) -> proved.Proved:
    """What the program sees in ml's session; through_sudo: it is started by sudo, on a terminal"""
    nonce = f"nodeready-{secrets.token_hex(8)}"
    config = ProofConfig(nonce, "nodeready:test-vm", user=USER, proofs=wanted, limit_s=LIMIT_S)
    made = payload.program("nodeready.agent.proofs.program", config)
    line, stdin = shell.command(made.script, LIMIT_S + 2, config.tag, made.text)
    if through_sudo:
        quoted = shlex.quote(f"sudo -n {line} <{INPUT}")
        line = f"cat >{INPUT}; script -qec {quoted} /dev/null </dev/null; rm {INPUT}"
    done = vm.run(line, user=login, input=stdin, check=False, timeout=LIMIT_S + 30)
    return proved.read(done.stdout, config)


def judged(seen: proved.Proved, want: Policy = WANT) -> dict[str, Result]:
    """The results by name, without those that nobody asked for."""
    results = judge(Snapshot({"proof": seen}), want)
    asked = [result for result in results if result.actual != "not proved"]
    return {result.check.partition(".")[2]: result for result in asked}


def test_after_a_deploy_everything_is_proven(vm, where):
    names = ("user", "limits", *ATTACH, "core", "backtrace")
    only = ",".join(f"proof.{name}" for name in names)
    with untouched(vm):
        ready = nodeready("ready", where, "--user", USER, "--only", only, "--budget", LIMIT_S)
    assert ready.returncode == 0, ready.stdout + ready.stderr


CHECKS = {
    "limits": ("limits",),
    "attach": ATTACH[:3],
    "tracers": ATTACH[3:],
    "core": ("core", "backtrace"),
}


@pytest.mark.parametrize("case", cases(__file__, "faults.json"))
def test_a_fault_fails_what_it_breaks_and_nothing_else(vm, where, case):
    """runs: the proofs; fails: check -> words of its cause; na: what then does not apply."""
    runs, inapplicable = case.get("runs", ("limits", "core")), case.get("na", ("backtrace",))
    vm.run(case["broken"])
    try:
        with untouched(vm):
            results = judged(prove(vm, tuple(runs)))
    finally:
        vm.run(case["mended"])
    expected = {"user": "ok"}
    for run in runs:
        expected |= dict.fromkeys(CHECKS[run], "ok")
    expected |= dict.fromkeys(case["fails"], "fail") | dict.fromkeys(inapplicable, "na")
    assert {name: result.status for name, result in results.items()} == expected, results
    for name, words in case["fails"].items():
        assert words in results[name].actual
        assert results[name].fix
    for name in inapplicable:
        assert ": see proof." in results[name].actual


#: Stand-ins that do what the two programs of systemd-coredump do, as their man pages have it.
HANDLER = read_data(__file__, "systemd-coredump.sh")
COREDUMPCTL = read_data(__file__, "coredumpctl.sh")


@pytest.mark.nightly
def test_a_core_in_systemds_store_is_found_by_coredumpctl(vm, where):
    program = "/usr/lib/systemd/systemd-coredump"
    files = {program: HANDLER, "/usr/local/bin/coredumpctl": COREDUMPCTL}
    for path, text in files.items():
        vm.run(f"printf %s {shlex.quote(text)} >{path}; chmod 755 {path}")
    value = shlex.quote(f"|{program} %P %u %g %s %t %c %h")
    vm.run(f"sysctl -qw kernel.core_pattern={value}")
    try:
        with untouched(vm):
            seen = prove(vm, ("core",))
    finally:
        vm.run(
            f"rm -r {' '.join(files)} /var/lib/systemd/coredump;"
            f" sysctl -qw kernel.core_pattern={shlex.quote(WANT.core_pattern)}"
        )
    results = judged(seen, Policy(core_handler="systemd-coredump"))
    assert {name: r.status for name, r in results.items()} == dict.fromkeys(
        ("user", "core", "backtrace"), "ok"
    ), results
    assert "core_pattern is |" in judged(seen)["core"].actual


# With a terminal, sudo has a monitor, another process called sudo.
@pytest.mark.nightly
def test_sudos_core_limit_is_not_the_jobs(vm, where):
    # Where PAM sets no limits, those of sshd count, and then sudo's 0.
    vm.run(
        "cp -a /etc/pam.d /root/pam.d; sed -i /pam_limits/d /etc/pam.d/su /etc/pam.d/sshd;"
        " prlimit --pid $(cat /run/sshd.pid) --core=unlimited;"
        " echo 'ml ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ml;"
        " echo 'Defaults use_pty' >/etc/sudoers.d/pty"
    )
    try:
        assert vm.run("ulimit -c", user=USER).stdout == "unlimited\n"
        assert vm.run("sudo -n su - ml -c 'ulimit -c'", user=USER).stdout == "0\n"
        with untouched(vm):
            results = judged(prove(vm, ("core",), USER, through_sudo=True))
    finally:
        vm.run(
            "cp -a /root/pam.d/. /etc/pam.d; rm -r /root/pam.d /etc/sudoers.d/ml"
            " /etc/sudoers.d/pty; prlimit --pid $(cat /run/sshd.pid) --core=0:unlimited"
        )
    assert {name: result.status for name, result in results.items()} == dict.fromkeys(
        ("user", "core", "backtrace"), "ok"
    ), results


@pytest.mark.nightly
def test_scope_3_stops_root_too_until_a_reboot(vm, where):
    vm.run(f"echo 3 >{SCOPE}")
    try:
        with untouched(vm):
            results = judged(prove(vm, ("attach", "tracers", "core")))
    finally:
        vm.reboot()
    bad = {name: result for name, result in results.items() if result.bad}
    assert set(bad) == set(ATTACH)
    for result in bad.values():
        assert "to root too: Yama's ptrace_scope is 3" in result.actual
        assert "reboot" in result.fix
