"""Real ranks on a node: every Python, every user, every state; none is stopped or touched."""

import pytest

from tests.builders.proof import processes, put_py_spy
from tests.command import wait_for, written
from tests.lab import targets
from tests.lab.rows import rows
from tests.lab.targets import SPY, WAIT, by_rank, capture, errors, functions, start, status

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
JOB = {"WORLD_SIZE": 8, "MASTER_ADDR": "gpu001", "MASTER_PORT": 29500, "API_KEY": "s3cr3t"}


@pytest.fixture
def node(fresh_node):
    put_py_spy(fresh_node)
    return fresh_node


def leaf(trace, process, sample=-1) -> str:
    return functions(trace, process["samples"][sample]["main"])[-1]


@pytest.mark.parametrize("user", rows(["ml", "root"], "ml"))
def test_every_python_as_its_user_and_as_root(node, user):
    homes = [home for version in VERSIONS if (home := targets.put_python(node, version))]
    if not homes:
        pytest.skip("no Python in ~/.pyenv")
    pids = []
    for number, home in enumerate(homes):
        values = {"RANK": number, "LD_LIBRARY_PATH": f"{home}/lib", **JOB}
        pids.append(start(node, f"{home}/bin/python3", "-c", WAIT, user=user, **values))
    before = written(node)
    trace = capture(node, user)
    ranks = by_rank(trace)
    assert sorted(ranks) == list(range(len(homes)))
    for number, process in ranks.items():
        assert process["pid"] == pids[number]
        assert [leaf(trace, process, n) for n in (0, 1)] == ["waits_here"] * 2
        assert errors(process) == ["", ""]
        told = [process[key] for key in ("state", "tracer", "note", "user", "job", "world_size")]
        assert told == ["S", 0, "", user, "gpu001:29500", 8]
        assert len(process["cpu_s"]) == 2
        assert bool(process["kernel_stack"]) == (user == "root")
        assert status(node, process["pid"]) == ("S", 0)
    assert "s3cr3t" not in str(trace)
    assert written(node) == before


def test_ranks_that_are_wrapped_have_workers_or_live_in_a_container(node):
    forks = targets.WAITS + "import os\nos.fork() and os.fork()\nwaits_here()"
    start(node, "python3", "-c", forks, RANK=0, **JOB)
    start(node, "bash", "-c", 'python3 -c "$0"; exit 1', WAIT, RANK=1, **JOB)
    inside = ["unshare", "-pf", "--mount-proc", "python3", "-c", WAIT]
    start(node, *inside, RANK=2, **JOB)
    start(node, "sleep", "600", up=False, RANK=3, **JOB)
    start(node, "python3", "-c", WAIT)
    trace = capture(node)
    ranks = by_rank(trace)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [leaf(trace, ranks[n]) for n in range(3)] == ["waits_here"] * 3
    assert ranks[1]["command"].startswith("python3 -c")
    assert errors(ranks[3]) == ["not Python, or one that py-spy does not know"] * 2
    assert "nanosleep" in ranks[3]["wait_channel"] + str(ranks[3]["kernel_stack"])
    assert {status(node, process["pid"]) for process in ranks.values()} == {("S", 0)}


#: Root $1 of directories of the node's, for a Python $2 in it.
CHROOT = """
    mkdir -p "$1" && mount -t tmpfs none "$1" && cd "$1"
    for name in usr bin lib lib64 proc tmp opt; do mkdir $name; mount --rbind /$name $name; done
    exec $3 chroot . $4 "$2" -c "$0"
"""


def test_a_rank_in_a_chroot_is_read_and_lives(node):
    """Its maps name libpython by a path that is none below /proc/PID/root: chroot, apptainer."""
    home = targets.put_python(node, "3.11")
    if not home:
        pytest.skip("no Python in ~/.pyenv")
    python = ("sh", "-c", CHROOT, WAIT)
    become = "setpriv --reuid=4001 --regid=4001 --clear-groups"
    alone, own = ["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]
    program = f"{home}/bin/python3"
    start(node, *python, "/srv/0", program, RANK=0, **JOB)
    start(node, *python, "/srv/1", program, "", become, RANK=1, **JOB)
    start(node, *alone, *python, "/srv/2", program, RANK=2, **JOB)
    start(node, *own, *python, "/home", program, user="ml", RANK=3, **JOB)
    before = written(node)
    trace = capture(node)
    ranks = by_rank(trace)
    assert [errors(ranks[rank]) for rank in range(4)] == [["", ""]] * 4
    assert {leaf(trace, process) for process in ranks.values()} == {"waits_here"}
    assert written(node) == before


def test_who_is_stopped_or_traced_is_not_looked_into(node):
    # A user's: for a process of root's, py-spy can write no file.
    how = {"user": "ml", **JOB}
    stopped, traced = (start(node, "python3", "-c", WAIT, RANK=n, **how) for n in range(2))
    node.enter(["kill", "-STOP", str(stopped)])
    strace = start(node, "strace", "-p", str(traced), up=False)
    wait_for(lambda: status(node, stopped)[0] == "T" and status(node, traced)[1] == strace)
    # Whoever looked all the same would be told.
    node.write(SPY, "#!/bin/sh\ntouch /tmp/looked\n", mode=0o755)
    for how in ({}, {"native": (stopped, traced)}):
        ranks = by_rank(capture(node, **how))
        assert (ranks[0]["state"], ranks[1]["tracer"]) == ("T", strace)
        assert "stopped by a signal: not looked into" in ranks[0]["note"]
        assert f"traced by process {strace}: not looked into" in ranks[1]["note"]
    assert node.enter(["test", "-e", "/tmp/looked"], check=False).returncode == 1
    assert status(node, stopped)[0] == "T"
    assert status(node, traced)[1] == strace


def test_a_rank_that_ends_between_finding_and_looking(node):
    for number in range(2):
        start(node, "python3", "-c", WAIT, user="ml", RANK=number, **JOB)
    node.enter(["mv", SPY, "/usr/local/bin/real"])
    # The last argument is the pid.
    once = '[ -e /tmp/k ] || { touch /tmp/k; for pid; do :; done; kill -9 "$pid"; sleep 0.2; }'
    node.write(SPY, f'#!/bin/sh\n{once}\nexec /usr/local/bin/real "$@"\n', mode=0o755)
    ranks = by_rank(trace := capture(node))
    ended = [process for process in ranks.values() if process["note"]]
    assert [process["note"] for process in ended] == ["ended while it was looked at"]
    assert errors(ended[0]) == ["it has ended", "ended while it was looked at"]
    (other,) = [process for process in ranks.values() if not process["note"]]
    assert leaf(trace, other) == "waits_here"


def test_a_native_stack_and_one_that_hangs_leaves_nobody_stopped(node):
    pid = start(node, "python3", "-c", WAIT, RANK=0, **JOB)
    process = (trace := capture(node, native=(pid,)))["processes"][0]
    names = functions(trace, process["native"])
    assert "waits_here" in names
    assert "sleep" in names[-1]
    assert not [name for name in names if name.startswith("0x")]
    assert (process["samples"], process["note"]) == ([], "")
    assert status(node, pid) == ("S", 0)
    node.write(SPY, '#!/bin/sh\nkill -STOP "$5"\nsleep 600\n', mode=0o755)
    process = capture(node, native=(pid,), limit_s=4)["processes"][0]
    assert process["native"] is None
    assert process["note"] == "no native stack: py-spy did not finish in time"
    wait_for(lambda: status(node, pid) == ("S", 0))
    # What is too much costs the stacks alone.
    start(node, "python3", "-c", WAIT, user="ml", RANK=1, **JOB)
    node.write(SPY, "#!/bin/sh\nhead -c 40000000 /dev/zero\n", mode=0o755)
    process = by_rank(capture(node))[1]
    assert {error[:30] for error in errors(process)} == {"its stacks are more than 32 MB"}
    assert (process["state"], process["wait_channel"]) == ("S", "hrtimer_nanosleep")


def test_a_program_that_is_killed_leaves_nothing(node):
    pid = start(node, "python3", "-c", WAIT, user="ml", RANK=0, **JOB)
    node.write(SPY, "#!/bin/sh\ntouch /tmp/began\nexec sleep 300\n", mode=0o755)
    before = processes(node)
    command = targets.line(targets.configured())
    node.write("/tmp/in", command.stdin)
    node.run(f"({command.line}) >/tmp/out 2>&1 </tmp/in &", user="ml")
    wait_for(lambda: node.enter(["test", "-e", "/tmp/began"], check=False).returncode == 0)
    found = [row.split() for row in processes(node) if "import os, sys" in row]
    program = next(pid for pid, name, *_ in found if name.startswith("python"))
    node.enter(["kill", "-KILL", program])
    wait_for(lambda: processes(node) == before)
    assert "Traceback" not in node.read("/tmp/out")
    assert targets.TAG not in node.enter(["ps", "-eww", "-o", "args"]).stdout
    assert status(node, pid) == ("S", 0)
