"""Whether the job's user can look into a process and into a core, and what his session is like.

By py-spy, gdb and strace; the session is opened as a login is, with the limits that it really has.
"""

import pytest

from nodeready.agent import payload
from nodeready.core.policy import Policy
from nodeready.core.shell import quote
from nodeready.subjects.proof import checks, debugging
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import ProofConfig, ProvedCore
from tests.builders.judging import by_name
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
from tests.cases import read_table
from tests.command import kernel_cores, wait_for, written
from tests.lab.rows import rows
from tests.lab.targets import put_python

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


#: A tool that misbehaves: the tools, what they do instead ("": nothing is installed), the status
#: of their proofs, and its first words. py-spy's $4 and so on are the target's options.
STAND_INS = read_table(__file__, "STAND_INS")
USUAL = ("missing", "hangs", "gdb and strace hang", "stops")


@pytest.mark.parametrize("name", rows(STAND_INS, *USUAL))
def test_a_tool_that_misbehaves_costs_nothing_else(fresh_node, name):
    tools, script, status, actual = STAND_INS[name]
    put_py_spy(fresh_node)
    for tool in tools.split():
        fresh_node.write(f"/usr/local/bin/{tool}", f"#!/bin/sh\n{script}\n", mode=0o755)
        if not script:
            fresh_node.enter(["rm", f"/usr/local/bin/{tool}"])
    before = written(fresh_node)
    found = judged(prove(fresh_node, limit_s=8 if "hang" in name else 40))
    broken, sound = (FIVE[:3], FIVE[3:]) if tools == "py-spy" else (FIVE[3:], FIVE[:1])
    for check in broken:
        assert found[check][0] == status
        assert found[check][1].startswith(actual)
    assert {found[check][0] for check in ("user", "limits", *sound)} == {"ok"}
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


def test_what_is_asked_for_where_a_tool_does_not_start_is_enough(fresh_node):
    """The text of each fix, up to what is no command, is run; then the proof passes."""
    fresh_node.enter(["mount", "-t", "tmpfs", "-o", "noexec,mode=755", "tmpfs", "/usr/local/bin"])
    put_py_spy(fresh_node)
    fresh_node.write("/opt/tools/gdb", "", mode=0o755)
    fresh_node.write("/home/ml/.profile", "PATH=/opt/tools:$PATH\n")
    results = by_name(checks, prove(fresh_node), Policy())
    for name, why in (("attach", "mounted noexec"), ("gdb", "Exec format error")):
        assert f"does not start: {why}" in results[name].actual.replace("its file system is ", "")
        fresh_node.run(results[name].fix.partition(", ")[0].replace("remove ", "rm "))
    assert set(statuses(prove(fresh_node)).values()) == {"ok"}


def test_gdb_reads_no_file_of_the_user(fresh_node):
    put_py_spy(fresh_node)
    line = "shell touch /tmp/read-by-gdb\n"
    fresh_node.write("/home/ml/.gdbinit", line)
    fresh_node.write("/home/ml/.config/gdb/gdbinit", line)
    assert statuses(prove(fresh_node))["gdb"] == "ok"
    assert fresh_node.enter(["test", "-e", "/tmp/read-by-gdb"], check=False).returncode == 1


def test_a_pattern_that_is_not_the_kernels_is_found_out(fresh_node):
    """A lab node has a /proc/sys of its own, as a container may; its crashes are the host's."""
    fresh_node.write("/etc/security/limits.d/zz.conf", "ml - core unlimited\n")
    kernel_cores(fresh_node, "/tmp")
    want = Policy(core_pattern="/var/crash/of-this-node.%P")
    fresh_node.run(f"sysctl -qw kernel.core_pattern={want.core_pattern}; mkdir -m 1777 /var/crash")
    config = ProofConfig("nodeready-0badcafe", "nodeready:test", "ml", ("core",))
    command = line(config)
    said = fresh_node.run(command.line, input=command.stdin).stdout
    seen = proved.read(said, config)
    assert isinstance(seen.core, ProvedCore)
    assert seen.core.dumped
    result = debugging.core(seen, want)
    assert (result.status, "core_pattern" in result.actual, "host" in result.fix) == (
        "fail", True, True,
    )  # fmt: skip
    assert fresh_node.run("ls -A /var/crash; ls -d /tmp/nodeready-*", check=False).stdout == ""


# --- The session of the job's user.

PROFILE = "/home/ml/.profile"


#: What ml's profile does -> the statuses of proof.user and proof.limits, and words of either.
PROFILES = read_table(__file__, "PROFILES")


def test_whatever_the_profile_does(fresh_node):
    for profile, (user, limits, words) in PROFILES.items():
        fresh_node.write(PROFILE, f"{profile}\n")
        limit_s = 6 if "sleep" in profile else 40
        found = judged(prove(fresh_node, limit_s=limit_s, wanted=("limits",)))
        assert (found["user"][0], found["limits"][0]) == (user, limits), found
        assert words in found["user"][1] + found["limits"][1]


#: A shell, a start-up file and its text -> the check, its status, and words of it. No key opens
#: ssh, so that the shell is started as sshd starts it.
STARTS = read_table(__file__, "STARTS")


@pytest.mark.parametrize(
    ("start", "expected"),
    rows([(row[:3], row[3:]) for row in STARTS], *(STARTS[at][:3] for at in (0, 3, 7))),
)
def test_the_users_own_shell_starts_each_session(fresh_node, start, expected):
    (shell, name, text), (check, status, words) = start, expected
    path = name if name.startswith("/") else f"/home/ml/{name}"
    fresh_node.run(f"usermod -s $(command -v {shell}) ml; rm -rf /home/ml/.ssh; mkdir /opt/bad")
    fresh_node.run("echo >/opt/bad/libmpfr.so.6")
    fresh_node.write(path, f"{text}\n")
    fresh_node.run("chown -R ml: /home/ml")
    found = judged(prove(fresh_node, wanted=("limits", "tracers")))
    assert (found[check][0], words in found[check][1]) == (status, True), found
    wrong = {one for one, (judgement, _) in found.items() if judgement not in ("ok", "na")}
    assert wrong <= {check}, found


def test_the_users_own_login_tries_a_login_shell(fresh_node):
    fresh_node.write(PROFILE, "ulimit -n 200\n")
    found = judged(prove(fresh_node, "ml", wanted=("limits",)))
    assert found["user"][0] == "ok"
    words = "nofile 200 by a login shell: the profile lowers nofile"
    assert (found["limits"][0], found["limits"][1].startswith(words)) == ("fail", True), found


#: What keeps ml from something -> the check, its status and words of it. Others: tests/unit.
BARRED = read_table(__file__, "BARRED")


@pytest.mark.parametrize(
    ("script", "expected"), rows(BARRED.items(), *[*BARRED][:1], *[*BARRED][3:4])
)
def test_what_a_job_uses_is_tried_as_its_user(fresh_node, script, expected):
    check, status, words = expected
    fresh_node.run(f"mknod -m 666 /dev/nvidiactl c 1 3; mkdir -p /etc/gdb; {script}")
    wanted = ("limits", "tracers", "resources") if check == "gdb" else (check,)
    found = judged(prove(fresh_node, wanted=wanted))
    assert (found[check][0], words in found[check][1]) == (status, True), found
    assert {name for name in found if found[name][0] != "ok"} == {check}
    assert fresh_node.run("ls -A /tmp /dev/shm /home/ml | grep nodeready; :").stdout == ""


#: An account, what makes it, and why it opens no session.
ACCOUNTS = read_table(__file__, "ACCOUNTS")


@pytest.mark.nightly
def test_accounts(fresh_node):
    """Whose shell is nologin runs jobs all the same: a batch system asks for no shell."""
    for name, (script, error) in ACCOUNTS.items():
        fresh_node.enter(["sh", "-c", script])
        found = judged(prove(fresh_node, user=name, wanted=("limits",), limit_s=6))
        assert found["user"][0] == ("fail" if error else "ok")
        assert error in found["user"][1]
        assert found["limits"][0] == ("na" if error else "ok")


@pytest.mark.parametrize(
    "options", ["!use_pty", pytest.param("use_pty", marks=pytest.mark.nightly)]
)
def test_who_called_sudo_is_found(fresh_node, options):
    """sudo takes the core limit away from what it runs: the session shall have the caller's."""
    fresh_node.write("/etc/sudoers.d/zz-test", f"Defaults {options}\n", mode=0o440)
    for name, source in payload.closure(["nodeready.agent.proofs.session"]).items():
        file = "/__init__.py" if payload.is_package(name) else ".py"
        fresh_node.write(f"/opt/test/{name.replace('.', '/')}{file}", source)
    code = (
        "import sys; sys.path.insert(0, '/opt/test'); from nodeready.agent.proofs import session; "
        "print(session._caller_of_sudo())"
    )
    script = f"echo $$; sudo -n sh -c {quote(f'timeout 9 python3 -B -c {quote(code)}; :')}; :"
    words = fresh_node.run(f"sh -c {quote(script)}", user="ml").stdout.split()
    assert words[0] == words[1]


def test_a_python_that_only_root_may_run(fresh_node):
    fresh_node.enter(["sh", "-c", 'chmod o-x "$(readlink -f /usr/bin/python3)"'])
    found = judged(prove(fresh_node, wanted=("limits", "attach")))
    words = "no session: no Python 3.9 or newer that ml may run: "
    assert (found["user"][0], found["user"][1].startswith(words)) == ("fail", True)


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["3.9", "3.13"])
@pytest.mark.parametrize(("login", "user"), [("root", "ml"), ("ml", "ml")])
def test_the_oldest_and_the_newest_python(fresh_node, version, login, user):
    where = put_python(fresh_node, version)
    if not where:
        pytest.skip(f"no Python {version} in ~/.pyenv")
    put_py_spy(fresh_node)
    fresh_node.enter(["ln", "-s", f"{where}/bin/python3", "/usr/local/bin/python3"])
    fresh_node.write("/etc/ld.so.conf.d/test.conf", f"{where}/lib\n")
    fresh_node.enter(["ldconfig"])
    assert f" {version}." in fresh_node.run("python3 --version", user=login).stdout
    before = written(fresh_node)
    statuses = {status for status, _ in judged(prove(fresh_node, login, user=user)).values()}
    assert statuses == {"ok"}
    assert written(fresh_node) == before


def test_root_without_a_name_is_told_so(fresh_node):
    found = judged(prove(fresh_node, user="", wanted=("limits",)))
    assert (found["user"][0], found["limits"][0]) == ("warn", "ok")


#: What a login is given here, by the files: less than any machine of the lab's own has.
WANTED = Policy(limit_core="0", limit_memlock="0", limit_nofile=200)
LIMITS = "".join(f"{who} - {what}\n" for who in ("*", "root") for what in ("core 0", "nofile 200"))
SSHD, OTHER = "/etc/pam.d/sshd", "/etc/security/other.conf"
#: What is wrong: shell text that makes it so -> the check, and its words. Others: tests/unit.
WAYS = read_table(__file__, "WAYS")
TOUCHED = (SSHD, "/etc/hosts", "/etc/security")


def test_every_way_in_is_proved(fresh_node):
    node, wrong = fresh_node, {}
    node.write("/etc/security/limits.d/zz.conf", LIMITS)
    node.write(OTHER, "* - nofile 100\n")
    node.run(f"tar cPf /srv/as.tar {' '.join(TOUCHED)}")
    for script, (check, words) in WAYS.items():
        node.run(f"{script}; chown ml: /home/ml/.[a-z]*rc /home/ml/.profile 2>/dev/null; :")
        found = judged(prove(node, wanted=("limits",)), WANTED)
        if words not in found[check][1]:
            wrong[script] = found
        node.run(
            "rm -f /home/ml/.bashrc /home/ml/.profile /etc/nologin; "
            "rm -rf /etc/security; tar xPf /srv/as.tar"
        )
    assert wrong == {}


@pytest.mark.nightly
def test_an_ssh_that_hangs_costs_nothing_else_and_leaves_nothing(fresh_node):
    # Debian's ~/.profile reads ~/.bashrc, too.
    hang = '[ -z "$SSH_CLIENT" ] || exec sleep 1000'
    fresh_node.run(f"echo '{hang}' >~/.bashrc", user="ml")
    found = judged(prove(fresh_node, wanted=("limits",)))
    assert found["limits"] == ("ok", "core 0, memlock 0, nofile 256; not proved by ssh: timed out")
    assert "sleep 1000" not in fresh_node.run("ps -eo args=").stdout
