"""What a thread waits for: system calls and what is behind them, on live processes of ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from nodeready.node.stacks import waits
from nodeready.node.stacks.waits import Call, Ends, address, calls, lock_holder, phrase, tcp_row

if os.uname().machine not in ("x86_64", "aarch64"):
    pytest.skip("system calls of this machine have no table", allow_module_level=True)


@contextlib.contextmanager
def waiting(code, *words, **how):
    """A Python that waits in this code, once it has said so."""
    text = f"import os, sys; os.write(2, b'x')\n{code}"
    argv = [sys.executable, "-S", "-c", text, *map(str, words)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, **how) as process:
        try:
            assert process.stderr is not None
            process.stderr.read(1)
            yield process
        finally:
            process.kill()


def told(pid, verb, near=()):
    """The phrase, once the process has come to the call."""
    until = time.monotonic() + 20
    said = ""
    while time.monotonic() < until:
        found = waits.observe({pid: 0}, {pid: near or [os.getpid(), pid]}, time.monotonic() + 9)
        said = found[pid][1] if pid in found else ""
        if said.startswith(verb):
            return said
        time.sleep(0.05)
    pytest.fail(f"{said!r} does not begin with {verb!r}")


ME = f"pid {os.getpid()} ("


def test_a_pipe_that_somebody_writes():
    with waiting("os.read(0, 1)", stdin=subprocess.PIPE) as process:
        said = told(process.pid, "read")
        assert said.startswith(f"read of a pipe that {ME}")
        assert said.endswith(") writes")


def test_a_full_pipe_whose_reader_is_stopped():
    with subprocess.Popen(["sleep", "100"], stdin=subprocess.PIPE) as reader:
        os.kill(reader.pid, signal.SIGSTOP)
        try:
            code = "os.write(1, b'x' * 300000)"
            with waiting(code, stdout=reader.stdin) as process:
                said = told(process.pid, "write", [reader.pid])
                assert said == f"write to a pipe that pid {reader.pid} (sleep, stopped) reads"
        finally:
            reader.kill()


def test_a_pipe_that_only_it_has():
    with waiting("r, w = os.pipe(); os.read(r, 1)") as process:
        assert told(process.pid, "read") == "read of a pipe that only it writes itself"


def test_poll_and_select_of_a_pipe():
    poll = "import select; p = select.poll(); p.register(0, select.POLLIN); p.poll()"
    for code, verb in ((poll, "poll"), ("import select; select.select([0], [], [])", "select")):
        with waiting(code, stdin=subprocess.PIPE) as process:
            assert told(process.pid, verb).startswith(f"{verb} of a pipe that {ME}")


def test_an_epoll_of_a_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = (
            "import select; e = select.epoll(); n = int(sys.argv[1]); e.register(n, 1); e.poll()"
        )
        number = theirs.fileno()
        with waiting(code, number, pass_fds=[number]) as process:
            assert told(process.pid, "epoll") == "epoll of a socket of this machine"


def test_a_peer_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = "import socket as s; s.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
        with waiting(code, port) as process:
            connection, _ = server.accept()
            with connection:
                assert told(process.pid, "recv") == f"recv from 127.0.0.1:{port}"


def test_who_waits_for_a_connection():
    code = "import socket; socket.create_server(('127.0.0.1', 0)).accept()"
    with waiting(code) as process:
        assert told(process.pid, "accept").startswith("accept of connections to 127.0.0.1:")


def test_a_connection_to_who_does_not_answer():
    """A listener whose queue is full answers nobody."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        full = []
        for _ in range(3):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            full.append(one)
        code = "import socket; socket.socket().connect(('127.0.0.1', int(sys.argv[1])))"
        with waiting(code, port) as process:
            assert told(process.pid, "connect") == f"connect to 127.0.0.1:{port}"
        for one in full:
            one.close()


def test_a_lock_of_a_file_and_who_holds_it(tmp_path):
    path = tmp_path / "x.lock"
    code = "import fcntl; f = open(sys.argv[1], 'r+'); fcntl.{}(f, fcntl.LOCK_EX)"
    for name in ("flock", "lockf"):
        with open(path, "w") as held:
            getattr(fcntl, name)(held, fcntl.LOCK_EX)
            with waiting(code.format(name), path) as process:
                said = told(process.pid, "flock" if name == "flock" else "lock")
                assert f" of {path} (" in said
                assert f", held by {ME}" in said


def test_a_path_that_is_opened(tmp_path):
    path = tmp_path / "a fifo"
    os.mkfifo(path)
    with waiting("open(sys.argv[1])", path) as process:
        assert told(process.pid, "open").startswith(f"open of {path} (")
    with waiting("open('a fifo')", cwd=tmp_path) as process:
        assert told(process.pid, "open").startswith(f"open of {path} (")


def test_a_name_that_is_no_text(tmp_path):
    """It is one that an answer can hold."""
    path = os.path.join(os.fsencode(tmp_path), b"\xff\x1b[31m\n")
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code = "import fcntl; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX)"
        with waiting(code, os.fsdecode(path)) as process:
            said = told(process.pid, "flock")
            assert "\ufffd" in said
            assert said.encode("utf-8")


def test_a_child_that_is_waited_for():
    with waiting("import subprocess; subprocess.run(['sleep', '100'])") as process:
        said = told(process.pid, "wait for child")
        assert said.endswith(" (sleep)")
        os.kill(int(said.split()[3]), signal.SIGKILL)


def test_a_lock_and_a_sleep():
    lock = "import _thread; n = _thread.allocate_lock(); n.acquire(); n.acquire()"
    with waiting(lock) as process:
        assert told(process.pid, "futex") == "futex"
    with waiting("import time; time.sleep(100)") as process:
        told(process.pid, "s")  # select(2) before Python 3.11, which then names nothing


def test_who_runs_waits_for_nothing():
    with waiting("while True: pass") as process:
        assert waits.look(process.pid) is None
    assert waits.look(process.pid) is None


def test_looking_is_no_wait_of_the_process():
    """Reading what a process waits for wakes it up not once."""
    with waiting("os.read(0, 1)", stdin=subprocess.PIPE) as process:
        told(process.pid, "read")
        before = _switches(process.pid)
        for _ in range(20):
            waits.observe({process.pid: 0}, {process.pid: [os.getpid()]}, time.monotonic() + 9)
        assert _switches(process.pid) == before


def _switches(pid):
    with open(f"/proc/{pid}/status") as file:
        rows = dict(row.split(":", 1) for row in file)
    return int(rows["voluntary_ctxt_switches"])


def test_every_machine_has_each_number_once():
    for machine in ("x86_64", "aarch64"):
        table = calls(machine)
        assert table[{"x86_64": 202, "aarch64": 98}[machine]] == ("futex", "")
    assert calls("riscv64") == {}
    numbers = [row[2] for row in waits._CALLS if row[2] >= 0]
    assert len(numbers) == len(set(numbers))
    numbers = [row[3] for row in waits._CALLS if row[3] >= 0]
    assert len(numbers) == len(set(numbers))


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:733C 0100007F:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 99 1 0
"""
TCP6 = (
    "   0: 0000000000000000FFFF00000200000A:733C 0000000000000000FFFF00000100000A:0035 02 "
    "00000000:00000000 00:00000000 00000000     0        0 5 1 0\n"
)


@pytest.mark.skipif(sys.byteorder != "little", reason="recorded on a little-endian machine")
@pytest.mark.parametrize(
    ("text", "inode", "found"),
    [
        (TCP, 4711, ("127.0.0.1:29500", "127.0.0.1:41394", 1)),
        (TCP, 99, ("0.0.0.0:22", "0.0.0.0:0", 10)),
        (TCP, 7, None),
        (TCP6, 5, ("10.0.0.2:29500", "10.0.0.1:53", 2)),
        ("", 5, None),
        ("   0: 01:0000 02:0000 01 x 5 1 \n", 5, None),
    ],
)
def test_a_row_of_the_sockets(text, inode, found):
    assert tcp_row(text, inode) == found


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("=H", socket.AF_INET) + b"\x73\x3c\x0a\0\0\x02" + bytes(8), "10.0.0.2:29500"),
        (
            struct.pack("=H", socket.AF_INET6) + b"\0\x35" + bytes(4) + bytes(15) + b"\x01",
            "[::1]:53",
        ),
        (struct.pack("=H", socket.AF_UNIX) + b"/run/x\0y", "the socket /run/x"),
        (struct.pack("=H", socket.AF_UNIX) + b"\0abstract", "the socket abstract"),
        (b"", ""),
        (b"\xff\xff\xff", ""),
        (struct.pack("=H", socket.AF_INET) + b"\0", ""),
    ],
)
def test_an_address(data, said):
    assert address(data) == said


LOCKS = """\
1: POSIX  ADVISORY  WRITE 55 fe:00:1234 0 EOF
1: -> POSIX  ADVISORY  WRITE 77 fe:00:1234 0 EOF
2: FLOCK  ADVISORY  WRITE 66 fe:00:9 0 EOF
2: -> FLOCK  ADVISORY  WRITE 88 fe:00:9 0 EOF
3: OFDLCK ADVISORY  READ -1 00:06:1028 0 EOF
3: -> OFDLCK ADVISORY  WRITE 99 00:06:1028 0 EOF
"""


@pytest.mark.parametrize(("pid", "holder"), [(77, 55), (88, 66), (99, 0), (55, 0), (1, 0)])
def test_who_holds_a_lock(pid, holder):
    assert lock_holder(LOCKS, pid) == holder


def test_a_pipe_with_many_at_its_other_end():
    ends = Ends({(7, "w"): [9, 2**22 - 1, 2**22 - 2, 2**22 - 3, 2**22 - 4]})
    call = Call("read", ("a pipe",), ((0, 7, "w"),))
    said = phrase(9, call, ends, "")
    assert said == "read of a pipe that pids 4194303, 4194302, 4194301 and 1 more write"
    # Not all that may have it were looked at: nothing is said of who has not.
    assert phrase(9, call, Ends({(7, "w"): [9]}, whole=False), "") == "read of a pipe"
    assert phrase(9, call, Ends(), "") == "read of a pipe"


@pytest.mark.parametrize(
    "text", ["", "running\n", "-1 0x0 0x0\n", "x y z a b c d e", "99999 " * 9]
)
def test_what_the_kernel_does_not_tell(text, monkeypatch):
    monkeypatch.setattr(waits, "contents", lambda path, most=0: text)
    assert waits.look(1) is None
