"""Mallory hides nobody's ranks, cores or logs from root, and says nothing in another's name.

What one user of a node makes may be as large, as slow and as odd as the kernel lets it be: the
others' rows are there all the same.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from tests.attacks.conftest import Person
from tests.attacks.opens import opened_here
from tests.attacks.test_cores import CORES, PATTERN, cores_of, name, names_program
from tests.builders.proof import put_py_spy
from tests.builders.traces import document, process
from tests.command import Done, Tool, ours, wait_for
from tests.lab.targets import WAIT
from tests.lifecycle.test_job import crash

LOGS = "/var/log/train"


@pytest.fixture
def node(fresh_node: LabNode, mallory: Person, bob: Person) -> LabNode:
    """A node with a core and a log directory that everybody may write to."""
    fresh_node.write("/proc/sys/kernel/core_pattern", f"{PATTERN}\n")
    fresh_node.enter(["install", "-d", "-m", "1777", CORES, LOGS])
    return fresh_node


@pytest.fixture
def look(node: LabNode, tool: Tool, fleet: Callable[..., Path]) -> Callable[..., Done]:
    """A command over the node; what it says is JSON."""
    where = fleet([node])
    return lambda command, *words: tool(command, where, "--format", "json", *words)


# --- Ranks.


def ranks(person: Person, count: int) -> None:
    """So many ranks of a job of that person's, each of which has come up."""
    for rank in range(count):
        values = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "a", "MASTER_PORT": 29500}
        words = [f"{key}={value}" for key, value in values.items()]
        person.start("env", *words, f"UP={person.home}/up-{rank}", "python3", "-S", "-c", WAIT)
    wait_for(lambda: len(person.run("ls up-* 2>/dev/null || :").stdout.split()) == count)


def seen(done: Done, user: str) -> list[tuple[int, list[str], str]]:
    """Rank, functions of its stack (the innermost last) and why there is none, of this user."""
    document = done.document
    if document["user"] != user:
        return []
    groups = document["groups"]
    return [
        (
            one["rank"],
            [frame["function"] for frame in groups[one["group"]]["frames"]],
            groups[one["group"]]["why"],
        )
        for one in document["processes"]
    ]


@pytest.mark.nightly
def test_ranks_of_hers_that_take_time_take_none_of_bobs(node, mallory, bob, tool, fleet):
    put_py_spy(node)
    # What py-spy runs as is hers: she stops it as soon as it is there.
    mallory.python("""
import os, signal
while True:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                if open(f"/proc/{name}/comm").read() == "py-spy\\n":
                    os.kill(int(name), signal.SIGSTOP)
        except OSError:
            pass
""")
    ranks(mallory, 8)
    ranks(bob, 9)
    done = tool(
        "stacks", fleet([node]), "--samples", 2, "--format", "json", "--timeout", 45,
        "-o", tool.home / "out",
    )  # fmt: skip
    found = seen(done, "bob")
    assert [rank for rank, _, _ in found] == [*range(9)], done.err
    assert {functions[-1] for _, functions, _ in found if functions} == {"waits_here"}, found
    (trace,) = (tool.home / "out").glob("trace-*.json")
    samples = {one["user"]: one["samples"] for one in json.loads(trace.read_text())["processes"]}
    assert [sample["error"] for sample in samples["bob"]] == ["", ""]
    assert ours(node) == []


#: Hundreds of processes, each with hundreds of thousands of variables.
MANY_VARIABLES = """
import ctypes, resource
libc, hard = ctypes.CDLL(None), resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
words = [b"a"] * 500_000
forks = b"import os, time; [os.fork() or time.sleep(600) for _ in range(300)]; time.sleep(600)"
argv = (ctypes.c_char_p * 5)(b"python3", b"-S", b"-c", forks, None)
libc.execve(b"/usr/bin/python3", argv, (ctypes.c_char_p * (len(words) + 1))(*words, None))
"""


def many_variables(mallory: Person) -> None:
    mallory.python(MANY_VARIABLES)
    there = ["pgrep", "-c", "-u", str(mallory.uid), "python3"]
    wait_for(lambda: mallory.node.enter(there, check=False).stdout.strip() == "301")


def slow_command_lines(mallory: Person) -> None:
    """An expression of root's takes seconds for the words that she chose."""
    for _ in range(12):
        mallory.start("python3", "-S", "-c", "import time; time.sleep(600)", "train" * 800)


@pytest.mark.parametrize(("begin", "words"), [
    pytest.param(many_variables, ("--timeout", 16), marks=pytest.mark.nightly),
    (slow_command_lines, ("--match", r".*train.*\.yaml|waits_here", "--timeout", 30)),
])  # fmt: skip
def test_what_is_slow_to_look_at_takes_no_time_from_bobs(begin, words, mallory, bob, look):
    put_py_spy(mallory.node)
    begin(mallory)
    ranks(bob, 2)
    done = look("stacks", "--samples", 1, *words)
    assert [rank for rank, _, _ in seen(done, "bob")] == [0, 1], done
    assert ours(mallory.node) == []


# --- Cores.


def test_the_time_of_a_file_of_hers_hides_no_core(node, mallory, bob, look):
    """A file system of 64-bit seconds keeps what no number of nanoseconds can hold."""
    good = crash(node, 7, time=1_700_000_000, uid=bob.uid)
    for number, moment in ((9051, 2**63 - 1), (9052, -(2**63))):
        mallory.run(
            f"cd {CORES}; cp /bin/true {name(number)}; touch -d @$1 {name(number)}", str(moment)
        )
    done = look("cores")
    found = cores_of(done)
    assert found[good.rpartition("/")[2]]["unread"] == "", done
    assert found[name(9051)]["unread"] == "it is an ELF file, but no core"
    assert set(found) == {good.rpartition("/")[2], name(9051), name(9052)}
    assert done.status == 3


def test_a_core_of_hers_is_nobody_elses_crash(node, mallory, bob, look):
    """The notes of a core are words of whoever wrote it; whose the file is, the kernel says."""
    for number, uid in ((9061, bob.uid), (9062, 0), (9063, mallory.uid)):
        content = names_program(b"/usr/bin/python3", uid)
        node.write(f"{CORES}/{name(number)}", content, mode=0o600)
        node.enter(["chown", "mallory:", f"{CORES}/{name(number)}"])
    found = cores_of(look("cores"))
    assert {core["user"] for core in found.values()} == {"mallory"}
    assert {core["uid"] for core in found.values()} == {mallory.uid}


@pytest.mark.nightly
def test_directories_of_hers_hide_nobodys_core(node, mallory, bob, look):
    """Where the pattern has a directory for each user, anybody may have made one (core(5), %u)."""
    node.write("/proc/sys/kernel/core_pattern", f"{CORES}/%u/core.%e.%P.%h.%t\n")
    good = crash(node, 7, time=1_700_000_000, uid=bob.uid)
    mine = f"{CORES}/{bob.uid}"
    mallory.run(f"cd {CORES}; seq 100000 102000 | xargs mkdir")
    bob.run(f"mkdir {mine}")
    node.enter(["mv", good, mine])
    mallory.run(f"cd {CORES}; seq 200000 202000 | xargs mkdir")
    done = look("cores")
    assert cores_of(done)[good.rpartition("/")[2]]["unread"] == "", done


# --- Logs.


def lines_of(done: Done) -> dict[str, list[str]]:
    """Name -> its lines."""
    groups = (group for group in done.document["groups"] if not group["why"])
    return {f["path"].rpartition("/")[2]: g["lines"] for g in groups for f in g["files"]}


@pytest.mark.parametrize(
    ("hers", "words"),
    [
        ('for _ in range(200): print("\\033" * 1999)', ()),
        pytest.param(
            'print("error" * 50000)', ("--grep", ".*error.*step"), marks=pytest.mark.nightly
        ),
    ],
    ids=["long", "slow to search"],
)
def test_lines_of_hers_leave_out_none_of_bobs(hers, words, mallory, bob, look):
    mallory.run(f"""
        python3 -c '{hers}' >{LOGS}/rank_100.log
        for number in $(seq 101 131); do cp {LOGS}/rank_100.log {LOGS}/rank_$number.log; done
        """)
    bob.run(f"for n in $(seq 0 31); do echo error on step 4711 of $n >{LOGS}/rank_$n.log; done")
    mallory.run(f"touch {LOGS}/rank_1??.log")
    done = look("tail", f"{LOGS}/rank_*.log", *words)
    found = lines_of(done)
    assert [found.get(f"rank_{n}.log") for n in range(32)] == [
        [f"error on step 4711 of {n}"] for n in range(32)
    ], done.err


@pytest.mark.nightly
def test_names_of_hers_hide_nobodys_log(mallory, bob, look):
    """More names than are looked at: of everybody's, some."""
    bob.run(f"echo step 4711 >{LOGS}/rank_0.log")
    mallory.run(f"""
        cd {LOGS}
        python3 - <<'END'
for at in range(1000, 121_000):
    open(f"rank_{{at}}.log", "w").close()
END
        """)
    done = look("tail", f"{LOGS}/rank_*.log")
    assert lines_of(done).get("rank_0.log") == ["step 4711"], done.err


# --- The ids that she has for user namespaces.


@pytest.mark.nightly
def test_her_many_ids_hide_nobodys_core_and_log(node, mallory, bob, look):
    """She has the ids that useradd(8) gives, and newuidmap(1) lets her write under each: newer
    cores and logs than all others.
    """
    good = crash(node, 7, time=1_700_000_000, uid=bob.uid)
    bob.run(f"echo step 4711 >{LOGS}/rank_0.log")
    node.write("/etc/subuid", "mallory:100000:65536\n")
    make = f"""
import os
for number in range(3000):
    for path in (f"{CORES}/core.x.{{number}}.h.1", f"{LOGS}/rank_1{{number}}.log"):
        open(path, "w").write("step 1\\n")
        os.chown(path, 100000 + number, 4001)
"""
    node.enter(["python3", "-c", make])
    done = look("cores")
    assert cores_of(done)[good.rpartition("/")[2]]["unread"] == "", done
    done = look("tail", f"{LOGS}/rank_*.log")
    assert lines_of(done).get("rank_0.log") == ["step 4711"], done.err


# --- What others collected, on the machine where root is.


def test_nothing_but_files_of_a_directory_of_dumps_is_opened(tool, tmp_path, lab_machine):
    devices, dumps = tmp_path / "devices", tmp_path / "dumps"
    devices.mkdir()
    dumps.mkdir()
    os.mknod(devices / "watchdog", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.mkfifo(devices / "fifo")
    for kind in ("watchdog", "fifo"):
        (dumps / f"trace-{kind}.json").symlink_to(devices / kind)
        (dumps / f"{kind}.txt").symlink_to(devices / kind)
    good = document("good", process(0, "main train.py 9 > waits_here train.py 4"))
    (dumps / "trace-good.json").write_text(json.dumps(good))
    with opened_here(devices) as names:
        done = tool("stacks", "--from", dumps, "--format", "json")
    assert names == set()
    found = done.document
    assert (done.status, [one["rank"] for one in found["processes"]]) == (3, [0]), done
    assert done.reasons["fifo"] == "trace-fifo.json: is no regular file"
