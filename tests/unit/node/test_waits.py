"""What a thread waits for: system calls and what is behind them, on live processes of ours."""

import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodeready import knowledge
from nodeready.agent.stacks import lock_files, processes, waits
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.py_spy import Dump
from nodeready.agent.stacks.ranks import JobRank, RankIdentity
from nodeready.agent.stacks.waits import calls
from tests.cases import read_data, with_table
from tests.command import wait_for

if os.uname().machine not in ("x86_64", "aarch64"):
    pytest.skip("system calls of this machine have no table", allow_module_level=True)


@contextlib.contextmanager
def waiting(code, *words, **how):
    argv = [sys.executable, "-S", "-c", f"import os, sys, socket\n{code}", *map(str, words)]
    with subprocess.Popen(argv, **{"stdin": subprocess.PIPE, **how}) as process:
        try:
            yield process
        finally:
            process.kill()


def phrase_of(pid, near=()):
    """What the process waits for, now; "": nothing."""
    near = near or [os.getpid(), pid]
    return waits.observe({pid: [0]}, {pid: near}, time.monotonic() + 9).get((pid, 0), ("", ""))[1]


def is_told(pid, pattern, near=()):
    """Wait until the phrase is this; the test fails with the last one."""
    phrases = [""]

    def fits():
        phrases[:] = [phrase_of(pid, near)]
        assert phrases[0].encode("utf-8") or not phrases[0]
        return re.fullmatch(pattern, phrases[0])

    with contextlib.suppress(AssertionError):
        wait_for(fits)
    assert re.fullmatch(pattern, phrases[0])


ME = rf"pid {os.getpid()} \([^)]*\)"
POLL = "import select; p = select.poll(); p.register(0, select.POLLIN); p.poll()"
EPOLL = "a, b = socket.socketpair(); e = select.epoll(); e.register(a.fileno(), 1); e.poll()"
MUTEX = (
    "import ctypes; c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64); "
    "c.pthread_mutex_lock(m)"
)
#: The child takes a mutex that it shares with its parent, and ends with it.
SHARED_MUTEX = """
import ctypes, mmap, os, time
c, m = ctypes.CDLL(None), (ctypes.c_char * 64).from_buffer(mmap.mmap(-1, 4096))
shared = ctypes.create_string_buffer(64)
c.pthread_mutexattr_init(shared), c.pthread_mutexattr_setpshared(shared, 1)
c.pthread_mutex_init(m, shared)
ends, taken = os.pipe(), os.pipe()
if not os.fork():
    os.close(ends[1]), c.pthread_mutex_lock(m), os.write(taken[1], b"1"), os.read(ends[0], 1)
else:
    os.read(taken[0], 1), c.pthread_mutex_lock(m)
"""
OWN_LOCK = "futex of a lock of its own process"
# Python 3.13 and newer keep no semaphore for each lock.
PYTHON_LOCK = OWN_LOCK if sys.version_info < (3, 13) else "futex.*"
LOCK = "import fcntl; f = open('locked', 'r+'); fcntl.{}(f, fcntl.LOCK_EX)"
#: A listener whose queue is full answers nobody.
CONNECT = """
address = ('127.0.0.1', 0)
server = socket.create_server(address, backlog=0)
sockets = [socket.socket() for _ in range(4)]
for client in sockets[:3]:
    client.setblocking(False)
    client.connect_ex(server.getsockname())
sockets[3].connect(server.getsockname())
"""
#: What a process runs, in a directory with the files `locked` and `a fifo` -> the phrase.
PHRASES = {
    "os.read(0, 1)": f"read of a pipe that {ME} writes",
    "r, w = os.pipe(); os.read(r, 1)": "read of a pipe that only it writes itself",
    POLL: f"poll of a pipe that {ME} writes",
    "import select; select.select([0], [], [])": f"select of a pipe that {ME} writes",
    f"import select; {EPOLL}": "epoll of a socket of this machine",
    "socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)": "recv from {peer}",
    "socket.create_server(('127.0.0.1', 0)).accept()": r"accept of connections to 127.0.0.1:\d+",
    "s = socket.socket(1); s.bind('x'); s.listen(); s.accept()": "accept of connections to x",
    CONNECT: r"connect to 127.0.0.1:\d+",
    LOCK.format("flock"): rf"flock of {{at}}/locked \(.*\), held by {ME}",
    LOCK.format("lockf"): rf"lock of {{at}}/locked \(.*\), held by {ME}",
    "open('a fifo')": r"open of {at}/a fifo \(.*",
    # A name that is no text is one that an answer can hold.
    "os.mkfifo(b'\\xff\\x1b'); open(os.path.abspath(b'\\xff\\x1b'))": "open of {at}/\ufffd\x1b .*",
    "import subprocess; subprocess.run(['cat'])": r"wait for child .*\d+ \(cat\)",
    "import _thread; n = _thread.allocate_lock(); n.acquire(); n.acquire()": PYTHON_LOCK,
    f"{MUTEX}; c.pthread_mutex_lock(m)": OWN_LOCK,
    "import multiprocessing; multiprocessing.Semaphore(0).acquire()": "futex of shared memory",
    SHARED_MUTEX: r"mutex of shared memory, held by pid \d+ \(python.*\)",
    f"{MUTEX}; c.pthread_cond_wait(ctypes.create_string_buffer(64), m)": "futex",
    # select(2) before Python 3.11, which then names nothing
    "import time; time.sleep(100)": "s.*",
}


@pytest.mark.parametrize("code", PHRASES, ids=lambda code: code.strip()[:30])
def test_the_phrase_of_a_wait(tmp_path, code):
    os.mkfifo(tmp_path / "a fifo")
    with open(tmp_path / "locked", "w") as held, socket.create_server(("127.0.0.1", 0)) as server:
        (fcntl.flock if "flock" in code else fcntl.lockf)(held, fcntl.LOCK_EX)
        port = server.getsockname()[1]
        with waiting(code, port, cwd=tmp_path) as process:
            peer = f"127.0.0.1:{port}"
            is_told(process.pid, PHRASES[code].replace("{at}", str(tmp_path)).format(peer=peer))


#: What a process runs -> whether its wait may end by itself.
TIMED = {
    "import time; time.sleep(100)": True,
    "import select; select.select([0], [], [], 100)": True,
    "import select; select.select([0], [], [])": False,
    "import select; p = select.poll(); p.register(0, 1); p.poll(99999)": True,
    POLL: False,
    f"import select; {EPOLL}": False,
    "a, b = socket.socketpair(); a.settimeout(100); a.recv(1)": True,
    "a, b = socket.socketpair(); a.recv(1)": False,
    "import threading; threading.Event().wait(100)": True,
    "import threading; threading.Event().wait()": False,
}


@pytest.mark.parametrize("code", TIMED, ids=lambda code: code[-40:])
def test_a_wait_that_may_end_by_itself(code):
    with waiting(code) as process:
        verbs = "sleep", "select", "poll", "epoll", "recv", "futex"
        wait_for(lambda: (waits.probe_thread(process.pid) or [""])[0] in verbs)
        assert waits.WaitCall(*waits.probe_thread(process.pid)).timed == TIMED[code]


def test_the_age_of_what_came_by_a_connection():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        theirs.sendall(b"x")
        ours.recv(1)
        time.sleep(0.3)
        names = ["{}:{}".format(*end) for end in (ours.getsockname(), ours.getpeername())]
        assert 0.25 < waits.received_ages()[names[0], names[1]] < 5


def test_a_full_pipe_whose_reader_is_stopped():
    with subprocess.Popen(["sleep", "100"], stdin=subprocess.PIPE) as reader:
        os.kill(reader.pid, signal.SIGSTOP)
        try:
            with waiting("os.write(1, b'x' * 300000)", stdout=reader.stdin) as process:
                expected = rf"write to a pipe that pid {reader.pid} \(sleep, stopped\) reads"
                is_told(process.pid, expected, [reader.pid])
        finally:
            reader.kill()


def test_a_process_that_runs_waits_for_nothing_and_the_kernel_may_tell_none(monkeypatch):
    code = "os.write(1, b'x')\nwhile True: pass"
    with waiting(code, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        assert waits.probe_thread(process.pid) is None
    assert waits.probe_thread(process.pid) is None
    for text in ("", "running\n", "-1 0x0 0x0\n", "x y z a b c d e", "99999 " * 9):
        monkeypatch.setattr(waits, "contents", lambda path, most=0, text=text: text)
        assert waits.probe_thread(1) is None


def test_looking_is_no_wait_of_the_process():
    def switches():
        return re.findall(
            r"\nvoluntary\S+\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()
        )

    with waiting("os.read(0, 1)") as process:
        is_told(process.pid, "read .*")
        before = switches()
        for _ in range(3):
            phrase_of(process.pid)
        assert switches() == before


def test_every_machine_has_each_number_once():
    for machine, futex, column in (("x86_64", 202, 2), ("aarch64", 98, 3)):
        assert calls(machine)[futex] == ("futex", "")
        rows = knowledge.rows("system_calls")["calls"]
        numbers = [row[column] for row in rows if row[column] >= 0]
        assert len(numbers) == len(set(numbers))
    assert calls("riscv64") == {}


@pytest.mark.skipif(sys.byteorder != "little", reason="recorded on a little-endian machine")
@with_table("inode, row")
def test_a_row_of_the_sockets(inode, row):
    assert waits.tcp_row(read_data(__file__, "proc_net_tcp.txt"), inode) == row
    assert waits.tcp_row("", inode) is None


INET, INET6, UNIX = (
    struct.pack("=H", family) for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
)


@pytest.mark.parametrize(("data", "text"), [
    (INET + b"\x73\x3c\x0a\0\0\x02" + bytes(8), "10.0.0.2:29500"),
    (INET6 + b"\0\x35" + bytes(4) + bytes(15) + b"\x01", "[::1]:53"),
    (UNIX + b"/run/x\0y", "the socket /run/x"),
    (UNIX + b"\0abstract", "the socket abstract"),
    (b"", ""),
    (b"\xff\xff\xff", ""),
    (INET + b"\0", ""),
])  # fmt: skip
def test_an_address(data, text):
    assert waits.address(data) == text


LOCKS = read_data(__file__, "proc_locks.txt")


@with_table("pid, holder")
def test_who_holds_a_lock(pid, holder):
    assert waits.lock_holder(LOCKS, pid) == holder


def test_the_other_ends_of_what_two_processes_share(tmp_path):
    """Of a socket of this machine, a connection, a lock, and a listener that is full."""
    code = """
import fcntl
name, port, number, kind = sys.argv[1:5]
def connect():
    for _ in range(2):
        full = socket.socket(socket.AF_UNIX)
        full.connect("\\0" + port)
kinds = [
    lambda: socket.socket(fileno=int(number)).recv(1),
    lambda: socket.create_connection(("127.0.0.1", int(port))).recv(1),
    lambda: fcntl.flock(open(name, "w"), fcntl.LOCK_EX),
    connect,
]
kinds[int(kind)]()
"""
    name = tmp_path / "locked"
    ours, theirs = socket.socketpair()
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    asker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with datagrams, asker:
        datagrams.bind(f"{tmp_path}/datagrams")
        asker.connect(f"{tmp_path}/datagrams")
        bound = f"{waits.UNIX}{os.fstat(datagrams.fileno()).st_ino}"
        assert (bound, "") in waits.sockets(os.getpid(), waits.unix_peers())
    with contextlib.ExitStack() as stack:
        held, full = stack.enter_context(open(name, "w")), socket.socket(socket.AF_UNIX)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for one in (full, ours, theirs):
            stack.enter_context(one)
        full.bind(f"\0{server.getsockname()[1]}")
        full.listen(0)
        listener = f"{waits.UNIX}{os.fstat(full.fileno()).st_ino}"
        fcntl.flock(held, fcntl.LOCK_EX)
        port = server.getsockname()[1]
        local = waits.unix_peers()
        own = {f"{waits.UNIX}{os.fstat(one.fileno()).st_ino}" for one in (ours, theirs)}
        assert {name: local[name] for name in own} == dict(zip(own, [*own][::-1], strict=True))
        for kind in range(4):
            words = (name, port, theirs.fileno(), kind)
            with waiting(code, *words, pass_fds=[theirs.fileno()]) as process:
                is_told(process.pid, ".*(a socket of this machine|127.0.0.1|flock|connect).*")
                seen = waits.observe({process.pid: [0]}, {}, time.monotonic() + 9)
                call = seen[process.pid, 0][0]
                if kind == 0:
                    assert call.sockets[0][0] in own
                elif kind == 1:
                    mine, peer = call.sockets[0]
                    assert peer == f"127.0.0.1:{port}"
                    assert (mine, peer) in waits.sockets(process.pid, local)
                elif kind == 2:
                    assert call.holders == (os.getpid(),)
                else:
                    mine, peer = call.sockets[0]
                    assert peer == listener
                    assert (peer, "") in waits.sockets(os.getpid(), {mine: peer})
        assert (f"127.0.0.1:{port}", "") in waits.sockets(os.getpid(), local)


@pytest.mark.parametrize("kind", ["left", "new", "open", "locked", "polled", "read"])
def test_who_has_a_lock_file(kind, tmp_path):
    """Nobody, though it is older or newer than who waits; who has it open; who has locked it, also
    without a variable; a file that is open at both, but locked for reading alone.
    """
    lock, pid = tmp_path / "lock", os.getpid()
    lock.touch()
    os.utime(lock, (1, 1) if kind == "left" else (time.time() + 60,) * 2)
    (own,), _ = processes.scan(time.monotonic() + 9, [pid])
    code = "import sys, time; file = open(sys.argv[1]); time.sleep(99)"
    is_open = kind in ("polled", "read")
    path = lock if is_open else os.devnull
    with contextlib.ExitStack() as stack, waiting(code, path) as process:
        is_told(process.pid, "sleep")
        if kind not in ("left", "new"):
            file = stack.enter_context(open(lock))
            if kind != "open":
                fcntl.flock(file, fcntl.LOCK_SH if kind == "read" else fcntl.LOCK_EX)
        rank = StackTarget(
            JobRank(dataclasses.replace(own, pid=process.pid), RankIdentity(0)),
            [processes.observe([process.pid], time.monotonic() + 9)[process.pid]],
            dumps=[Dump(lock_file="" if is_open else str(lock))],
        )
        calls = {(process.pid, 0): (waits.WaitCall("sleep"), "sleep")}
        lock_files.observe([rank], calls, time.monotonic() + 9)
    ((call, text),) = calls.values()
    held = f"lock of {lock}, held by pid {pid} ("
    ends = {"left": f"lock of {lock}{lock_files.LEFT}", "new": f"lock of {lock}", "read": "sleep"}
    assert text == ends[kind] if kind in ends else text.startswith(held)
    assert call.holders == (() if kind in ends else (pid,))


def test_a_pipe_with_many_at_its_other_end():
    ends = waits.PipeEnds({(7, "w"): [9, 2**22 - 1, 2**22 - 2, 2**22 - 3, 2**22 - 4]})
    call = waits.WaitCall("read", ("a pipe",), ((0, 7, "w"),))
    several = "read of a pipe that pids 4194303, 4194302, 4194301 and 1 more write"
    assert waits.phrase(9, call, ends, "") == several
    # Not all that may have it were looked at: nothing is said of who has not.
    assert (
        waits.phrase(9, call, waits.PipeEnds({(7, "w"): [9]}, is_complete=False), "")
        == "read of a pipe"
    )
    assert waits.phrase(9, call, waits.PipeEnds(), "") == "read of a pipe"
