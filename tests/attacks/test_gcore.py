"""`nodeready cores --gcore` as root gives nobody what is not theirs.

Mallory's process makes itself something else while it is looked at, her directories lead
elsewhere, and what runs is killed at any moment.
"""

import os
import random
import re
import signal
import time

import pytest

from nodeready.lab import LabNode
from tests.attacks.opens import opened
from tests.cases import read_table
from tests.command import ours, wait_for

CRASH = "/var/crash"
#: In root's line of /etc/shadow, and nowhere else.
SECRET = "N0b0dyReadsThisHash"
HASH = f"$6$saltsalt${SECRET}{'x' * (86 - len(SECRET))}"

#: Waits until it is looked at, by whatever an ordinary user can see of that, and then becomes su,
#: which reads root's hash and waits a while after the wrong password.
BECOMES_SU = """
import os, sys, time
delay_s, own = float(sys.argv[1]), os.getpid()
os.chdir(os.environ["HOME"])
read, write = os.pipe()
os.write(write, b"wrong\\n")
os.dup2(read, 0)
before = os.listdir("/var/crash")
with open("pid.new", "w") as file:
    file.write(str(own))
os.rename("pid.new", "pid")
def looked_at():
    if os.listdir("/var/crash") != before:
        return True
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if f"attach {own}".encode() in file.read():
                    return True
        except OSError:
            pass
while not looked_at():
    pass
time.sleep(delay_s)
os.execv("/usr/bin/su", ["su", "root", "-c", "true"])
"""


@pytest.fixture
def node(fresh_node: LabNode) -> LabNode:
    """A node where cores go to a directory in which everybody may write."""
    fresh_node.write("/proc/sys/kernel/core_pattern", f"{CRASH}/core.%e.%P.%h.%t\n")
    fresh_node.enter(["install", "-d", "-m", "1777", CRASH])
    fresh_node.enter(["usermod", "-p", HASH, "root"])
    return fresh_node


def pid_of(person) -> str:
    """Of the process that has just written its number."""
    wait_for(lambda: person.run("test -s pid", check=False).returncode == 0)
    return person.run("cat pid; rm pid").stdout.strip()


def left(node: LabNode) -> str:
    """Everything in the core directory, with its mode and its owner."""
    return node.enter(["find", CRASH, "-mindepth", "1", "-printf", "%p %m %U\\n"]).stdout


def readable(person, secret: str = SECRET) -> str:
    script = f'find {CRASH} -type f -exec grep -a -l -F -e "$1" {{}} + 2>/dev/null'
    return person.run(script, secret, check=False).stdout


@pytest.mark.parametrize("scope", ["1", pytest.param("0", marks=pytest.mark.nightly)])
def test_a_process_that_becomes_su_leaves_root_memory_with_nobody(
    tool, fleet, node, mallory, scope
):
    # Yama's scope 1 is the distributions': gdb needs a capability then, and the kernel lets it in.
    node.write("/proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    where, refused = fleet([node]), 0
    for attempt in range(3):
        mallory.python(BECOMES_SU, str(attempt * 0.02))
        pid = pid_of(mallory)
        done = tool("cores", where, "--gcore", pid, "--yes")
        assert readable(mallory) == "", done
        assert "goes on" in done.err
        if done.status:
            refused += 1
            assert (done.status, done.out) == (1, ""), done
            changed = f"process {pid} changed while it was looked at: it runs with the rights"
            assert changed in done.err
        else:
            # It became su too late: the core is of her own Python.
            core = done.out.strip()
            absent = node.enter(["grep", "-c", "-a", "-F", "-e", SECRET, core], check=False)
            assert absent.stdout == "0\n", done
            node.enter(["rm", core])
        assert [ours(node), left(node)] == [[], ""]
        mallory.end()
    assert refused


#: A program of root's that mallory starts: it knows what only root may read, and then goes on with
#: fewer rights. ``UP`` tells that it is there.
SETUID = """
import ctypes, os, sys, threading, time
secret = open("/root/secret").read()
libc, uid = ctypes.CDLL(None), int(sys.argv[1])
def one_thread():
    libc.syscall(117, uid, uid, uid)    # setresuid(2), of this thread alone
    time.sleep(600)
if sys.argv[2] == "saved":
    os.setresuid(uid, uid, 0)
elif sys.argv[2] == "effective":
    os.setresuid(0, uid, 0)
elif sys.argv[2] == "thread":
    os.setresuid(uid, uid, 0)
    threading.Thread(target=one_thread).start()
elif sys.argv[2] == "dropped":
    os.setresuid(uid, uid, uid)
elif sys.argv[2] == "opened":
    os.setresuid(uid, uid, uid)
    libc.prctl(4, 1, 0, 0, 0)    # PR_SET_DUMPABLE
os.chdir(f"/home/{sys.argv[3]}")
with open("pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(600)
"""


def test_a_setuid_program_leaves_no_core_whatever_it_gave_up(tool, fleet, node, mallory):
    node.write("/root/secret", f"{SECRET}\n", mode=0o600)
    node.enter(["install", "-m", "4755", "/usr/bin/python3", "/usr/local/bin/elevated"])
    where = fleet([node])
    for kind, why in read_table(__file__, "GAVE_UP").items():
        mallory.start(
            "/usr/local/bin/elevated", "-c", SETUID, str(mallory.uid), kind, mallory.name
        )
        pid = pid_of(mallory)
        done = tool("cores", where, "--gcore", pid, "--yes")
        assert readable(mallory) == "", done
        assert (done.status, done.out) == (1, ""), done
        assert f"process {pid} {why}" in done.err, done
        assert left(node) == ""
        node.enter(["kill", "-9", pid])


#: Waits for nothing, under a name that its user chose.
WAITS = """
import os, time
os.chdir(os.environ["HOME"])
with open("pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(100_000)
"""


def test_gdb_opens_nothing_that_the_processs_user_made(tool, fleet, node, mallory):
    """No program, library, script or library of threads: root's gdb would read or run it."""
    mallory.run("""
        cp /usr/bin/sleep hers
        echo 'shell touch /home/mallory/ran' >hers-gdb.gdb
        cp hers-gdb.gdb .gdbinit
        ./hers 600 >/dev/null 2>&1 & echo $! >pid
        """)
    pid = pid_of(mallory)
    for scope in ("0", "1"):
        node.write("/proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
        with opened(node, mallory.home) as names:
            done = tool("cores", fleet([node]), "--gcore", pid, "--yes")
        assert (done.status, names) == (0, set()), done
    assert mallory.run("test -e ran", check=False).returncode
    assert node.enter(["sh", "-c", f"grep State /proc/{pid}/status"]).stdout.split()[1] == "S"


def test_a_link_on_the_way_leads_no_core_elsewhere(tool, fleet, node, mallory):
    """The pattern has directories of users: core(5), %u."""
    node.write("/proc/sys/kernel/core_pattern", f"{CRASH}/%u/core.%e\n")
    mallory.run(f"ln -s /etc/profile.d {CRASH}/{mallory.uid}")
    mallory.python(WAITS)
    pid = pid_of(mallory)
    before = node.enter(["ls", "-A", "/etc/profile.d"]).stdout
    done = tool("cores", fleet([node]), "--gcore", pid, "--yes")
    assert node.enter(["ls", "-A", "/etc/profile.d"]).stdout == before
    assert (done.status, done.out) == (1, ""), done
    assert f"{CRASH}/{mallory.uid}: a link of mallory: not followed" in done.err
    # Root's own link is followed, and what lies there already is no core's.
    mallory.run(f"rm {CRASH}/{mallory.uid}")
    node.enter(["sh", "-c", f"mv {CRASH} /var/cores; ln -s /var/cores {CRASH}"])
    mallory.run(
        f"mkdir {CRASH}/{mallory.uid}; ln -s /etc/passwd {CRASH}/{mallory.uid}/core.python3"
    )
    passwd = node.read("/etc/passwd")
    taken = tool("cores", fleet([node]), "--gcore", pid, "--yes")
    assert (taken.status, node.read("/etc/passwd")) == (1, passwd), taken
    assert "File exists" in taken.err
    mallory.run(f"rm {CRASH}/{mallory.uid}/core.python3")
    taken = tool("cores", fleet([node]), "--gcore", pid, "--yes", status=0)
    assert node.enter(["stat", "-c", "%a %u", taken.out.strip()]).stdout == "600 4001\n"


#: Says what an old kernel says to open(2) with O_TMPFILE: it is a directory.
NO_TMPFILE = """
from nodeready.agent import payload
real = payload.closure
def closure(names):
    found, name = real(names), "nodeready.agent.cores.gcore"
    assert "flags | os.O_TMPFILE" in found[name]
    found[name] = found[name].replace("flags | os.O_TMPFILE", "flags | os.O_DIRECTORY")
    return found
payload.closure = closure
"""


@pytest.mark.nightly
def test_without_files_that_have_no_name_a_core_is_hidden_until_it_is_whole(
    tool, fleet, node, mallory
):
    # gdb tells what others see while it writes.
    spied = f"""#!/bin/sh
case "$*" in *attach*) ls -lA {CRASH} >/tmp/spied;; esac
exec /usr/bin/gdb "$@"
"""
    node.write("/usr/local/bin/gdb", spied, mode=0o755)
    mallory.python(WAITS)
    pid = pid_of(mallory)
    done = tool("cores", fleet([node]), "--gcore", pid, "--yes", first=NO_TMPFILE, status=0)
    assert re.search(r"^-rw------- .* \.nodeready\.core\.\w+$", node.read("/tmp/spied"), re.M)
    path = done.out.strip()
    assert left(node) == f"{path} 600 4001\n"
    assert node.enter(["gdb", "-batch", "-nx", "--core", path, "-ex", "info threads"]).stdout
    assert ours(node) == []


# --- Killed and interrupted at any moment.

#: Runs; the default fits into the suite, and 200 are 100 kills and 100 interrupts.
RUNS = int(os.environ.get("GCORE_KILLS", "12"))
SEED = 20260131

#: On the node: wait until a process is there, a moment longer, and kill it (or not: ``look``).
KILL = """
import os, signal, sys, time
def find(kind):
    for name in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        try:
            words = open(f"/proc/{name}/cmdline", "rb").read()
            program = os.path.basename(os.readlink(f"/proc/{name}/exe"))
            pid = int(name)
            watchdog = os.getsid(pid) == pid
        except OSError:
            continue
        if kind == "gdb" and program == "gdb" and b"attach" in words:
            yield pid
        if kind == "program" and program.startswith("python") and b"nodeready:" in words:
            if not watchdog:
                yield pid
kind, wait_s = sys.argv[1], float(sys.argv[2])
until = time.monotonic() + 10
while not list(find(kind)) and time.monotonic() < until:
    time.sleep(0.002)
time.sleep(wait_s)
for pid in find(kind) if sys.argv[3:] != ["look"] else ():
    os.kill(pid, signal.SIGKILL)
"""


def whole(node: LabNode, path: str) -> bool:
    """Whether the file has all that its program headers promise, by readelf's words."""
    said = node.enter(["sh", "-c", f"readelf -lW {path} 2>/dev/null; stat -c %s {path}"]).stdout
    parts = re.findall(r"^ +(?:LOAD|NOTE) +0x(\w+) 0x\w+ 0x\w+ 0x(\w+)", said, re.M)
    ends = [int(offset, 16) + int(size, 16) for offset, size in parts]
    return bool(ends) and max(ends) <= int(said.splitlines()[-1])


def state(node: LabNode, pid: str) -> list[str]:
    """The letter of the process's state, and its tracer."""
    text = node.read(f"/proc/{pid}/status")
    return [re.findall(rf"^{name}:\s+(\S)", text, re.M)[0] for name in ("State", "TracerPid")]


def test_a_killed_program_leaves_the_process_running(tool, fleet, node, bob):
    """gdb that is killed while it attaches leaves a process stopped: it gets SIGCONT."""
    bob.python(WAITS)
    pid = pid_of(bob)
    hang = f'#!/bin/sh\ncase "$*" in *attach*) kill -STOP {pid}; sleep 600;; esac\n'
    node.write("/usr/local/bin/gdb", hang, mode=0o755)
    running = tool.start("cores", fleet([node]), "--gcore", pid, "--yes", first=NO_TMPFILE)
    wait_for(lambda: state(node, pid)[0] == "T")
    assert ".nodeready.core." in left(node)
    node.enter(["python3", "-I", "-c", KILL, "program", "0"])
    assert tool.end(running).status == 1
    wait_for(lambda: state(node, pid) == ["S", "0"])
    wait_for(lambda: (left(node), ours(node)) == ("", []))
    assert node.enter(["pgrep", "-f", "[s]leep 600"], check=False).stdout == ""


@pytest.mark.nightly
def test_kills_and_interrupts_at_any_moment_leave_nothing_half(tool, fleet, node, bob):
    chance = random.Random(SEED)
    where = fleet([node])
    bob.python(WAITS)
    pid = pid_of(bob)
    assert tool("cores", where, "--gcore", pid, "--yes").status == 0

    def clean() -> bool:
        gdb = node.enter(["pgrep", "-x", "gdb"], check=False).stdout
        return (state(node, pid), gdb, ours(node)) == (["S", "0"], "", [])

    for number in range(RUNS):
        kinds = ("program", "gdb", "controller")
        kind = "interrupt" if number % 2 else kinds[number // 2 % len(kinds)]
        running = tool.start("cores", where, "--gcore", pid, "--yes")
        if kind in ("program", "gdb"):
            wait_s = str(chance.uniform(0, 0.6 if kind == "program" else 0.3))
            node.enter(["python3", "-I", "-c", KILL, kind, wait_s])
        elif kind == "interrupt":
            wait_s = str(chance.uniform(0, 1.5))
            node.enter(["python3", "-I", "-c", KILL, "program", wait_s, "look"])
            running.send_signal(signal.SIGINT)
        else:
            time.sleep(chance.uniform(0, 2.5))
            running.send_signal(signal.SIGKILL)
        running.communicate(timeout=90)
        wait_for(clean)
        for row in left(node).splitlines():
            path, *rights = row.split()
            assert rights == ["600", str(bob.uid)], (kind, row)
            assert whole(node, path), (kind, row)
            node.enter(["rm", path])
    assert tool("cores", where, "--gcore", pid, "--yes").status == 0
