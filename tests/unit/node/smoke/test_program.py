"""The program of a smoke test on this machine: the real one, as it travels to a node.

It is started as the transport starts it, and spoken with over pipes; a session is opened by the
real su, for a user who is made for the tests. Its listeners and its engines are stand-ins.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import queue
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready import shell
from nodeready.node import payload
from nodeready.node.smoke import orders
from nodeready.node.smoke.orders import Collective, Config, End, Hello, Pair, Paired, Peer, Ran
from nodeready.subjects import wire

MAIN = "nodeready.node.smoke.program"
KINDS = {"hello": Hello, "ran": Ran, "paired": Paired}

#: A ring whose nodes wait as long as ``small`` says in ms, and a pair that is told the same way.
RING = """
import socket, threading, time
from nodeready.node.smoke.orders import Busy, Paired, Rank
class Listeners:
    def __init__(self, ports):
        self.token, self.came, self.open, self.busy = "token", 0, {}, ()
        for port in ports:
            why = self._take(port)
            if why:
                self.busy += (Busy(port, why),)
    ports = property(lambda self: tuple(self.open))
    def _take(self, port):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("0.0.0.0", port))
            one.listen(8)
        except OSError as problem:
            one.close()
            return problem.strerror
        self.open[port] = one
        return ""
    def take(self, port):
        return port in self.open or not self._take(port)
    def release(self, port):
        self.open.pop(port).close()
    def serve(self):
        threading.Event().wait()
def run_ring(order, listeners, stop):
    began = time.monotonic()
    if order.small == 13:
        raise OSError("the ring is broken")
    if order.small == 666:
        time.sleep(300)
    stop.wait(min(order.small / 1000, order.limit_s))
    said = "ended" if stop.is_set() else ""
    return Rank(order.first, -1, "done", "", said, -1, 1.0, 2.0, 0, time.monotonic() - began)
def run_pair(order, own, listeners, stop):
    time.sleep(300 if order.small == 666 else 0)
    why = "its address is this node's own" if set(order.target.addresses) & set(own) else ""
    return Paired(order.number, order.target.name, (), why, "", (), "", 0.0, 0.0, -1, 0)
"""

#: An engine whose ranks are real processes.
ENGINES = """
import os, socket, time
from nodeready.node.smoke.orders import Engine, Rank
class Engines:
    engines, gpus = (Engine("torch", "gloo", "2", "", "/x", "", ""),), 0
    def __init__(self, supervisor):
        self.supervisor = supervisor
    def close(self):
        pass
    def run(self, order, addresses, stop):
        began = time.monotonic()
        argv = ["sh", "-c", "%s; :" % order.backend, self.supervisor.tag]
        process = self.supervisor.start(argv)
        held = None
        if order.small == 29:
            held = socket.create_server(("0.0.0.0", order.head.port))
        while process.poll() is None and not stop.is_set() or order.small == 666:
            if time.monotonic() > began + order.limit_s and order.small != 666:
                break
            time.sleep(0.02)
        said = "ended" if process.poll() is None else ""
        self.supervisor.stop(process)
        if held:
            held.close()
        return tuple(
            Rank(order.first + at, -1, "done", "", said, -1, 1.0, 2.0, 0, 0.0)
            for at in range(order.ranks)
        )
def find(supervisor, config):
    if config.python == "hangs":
        time.sleep(300)
    if config.python == "raises":
        raise ValueError("what is this")
    return Engines(supervisor)
"""


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[None]:
    """The program as it travels, with the stand-ins in it."""
    found = payload.closure([MAIN, "nodeready.node.payload"])
    found |= {"nodeready.node.smoke.ring": RING, "nodeready.node.smoke.engines": ENGINES}
    packed = base64.b85encode(zlib.compress(json.dumps(found).encode(), 1)).decode("ascii")
    packages = frozenset(name for name in found if payload.is_package(name))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(payload, "_modules", lambda main: (packed, packages))
        yield


def _full_cores() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)


class Node:
    """The running program: what it says comes in time, or the test fails."""

    def __init__(self, config: Config, login: str) -> None:
        self.config = config
        made = payload.program(MAIN, config, stdin=True)
        command = shell.command(made.script, config.limit_s + 2, config.tag, made.text)
        self.process = subprocess.Popen(
            ["su", login, "-s", "/bin/sh", "-c", command.line]
            if login
            else ["sh", "-c", command.line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_full_cores,  # noqa: PLW1509 - it calls nothing but the kernel
        )
        self.rows: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.seen: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self._write(command.stdin)

    def _read(self) -> None:
        for row in self.process.stdout:
            self.rows.put(row)
        self.rows.put("")

    def _write(self, text: str) -> None:
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def order(self, order: Collective | Pair | End) -> None:
        self._write(f"{orders.line(order)}\n")

    def says(self, limit_s: float = 20) -> Hello | Ran | Paired | None:
        """The next answer; None: the program has ended."""
        row = self.rows.get(timeout=limit_s)
        self.seen.append(row)
        if not row:
            return None
        ((name, data),) = wire.lines(row, self.config.nonce)
        return wire.decode(KINDS[name], data)

    def silent(self, limit_s: float) -> bool:
        with contextlib.suppress(queue.Empty):
            self.seen.append(self.rows.get(timeout=limit_s))
            return False
        return True

    def wait(self, limit_s: float = 10) -> tuple[int, str]:
        """Its exit status, and what it said of its end."""
        status = self.process.wait(limit_s)
        return status, self.process.stderr.read()

    def pids(self, *words: str) -> list[int]:
        """The processes of this run with these words in their command lines."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                said = Path(f"/proc/{name}/cmdline").read_text(errors="replace")
                if all(word in said for word in (self.config.tag, *words)):
                    found.append(int(name))
        return found

    def pythons(self) -> list[int]:
        """Our programs and their watchdogs, root's first."""
        return sorted(pid for pid in self.pids() if "python" in os.readlink(f"/proc/{pid}/exe"))

    def gone(self, limit_s: float = 5) -> bool:
        return within(limit_s, lambda: not self.pids())


def of(user: str, ended: bool = False) -> set[int]:
    """All processes of a user; ended: those, too, that nobody has waited for yet."""
    uid, found = pwd.getpwnam(user).pw_uid, set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            runs = Path(f"/proc/{name}/cmdline").read_bytes()
            if os.stat(f"/proc/{name}").st_uid == uid and (runs or ended):
                found.add(int(name))
    return found


def within(limit_s: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + limit_s
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return held


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture
def start(stand_ins, port) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def start(login: str = "", **how: object) -> Node:
        word = secrets.token_hex(8)
        config = Config(f"nodeready-{word}", f"nodeready:{word}", ports=(port,), limit_s=60)
        made.append(Node(replace(config, **how), login))
        return made[-1]

    yield start
    for one in made:
        one.process.stdin.close() if not one.process.stdin.closed else None
        for pid in one.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait(10)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A user of this machine, whose home holds nothing."""
    if os.geteuid() or not shutil.which("useradd"):
        pytest.skip("makes a user: needs root")
    name = f"smoke{os.getpid()}"
    home = Path(f"/tmp/{name}")
    subprocess.run(["useradd", "-m", "-d", home, "-s", "/bin/sh", name], check=True)
    try:
        asked = [
            "su",
            "-",
            name,
            "-c",
            "python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))'",
        ]
        if subprocess.run(asked, capture_output=True, check=False).returncode:
            pytest.skip("no Python that a user can run")
        yield name
    finally:
        subprocess.run(["pkill", "-KILL", "-u", name], check=False)
        subprocess.run(["userdel", "-r", name], check=True, capture_output=True)


@pytest.fixture
def profile(user) -> Iterator[Callable[[str], None]]:
    path = Path(pwd.getpwnam(user).pw_dir, ".profile")
    path.unlink(missing_ok=True)
    yield lambda text: path.write_text(text) and None
    path.unlink(missing_ok=True)


HERE = Peer("here", ("192.0.2.1",), 29500, "token")


def ring(number: int, ms: int = 0, limit_s: float = 10) -> Collective:
    return Collective(number, "ring", "tcp", 1, 0, 1, (), HERE, None, ms, 8, limit_s)


def torch(number: int, does: str = "true", limit_s: float = 10, **how: object) -> Collective:
    made = Collective(number, "torch", does, 4, 0, 2, (), HERE, None, 1, 8, limit_s)
    return replace(made, **how)


def pair(number: int, target: Peer = HERE, **how: object) -> Pair:
    return replace(Pair(number, target, (target.port,), 1, 8, 10), **how)


# --- As whoever logs in.


def test_from_hello_to_the_end(start, port):
    node = start()
    hello = node.says()
    assert hello == Hello(
        os.uname().nodename, pwd.getpwuid(os.geteuid()).pw_name, "token", (port,), (),
        hello.addresses, 0, hello.engines, "",
    )  # fmt: skip
    assert hello.engines[0].name == "torch"
    node.order(ring(1))
    assert [rank.ok for rank in node.says().ranks] == [True]
    node.order(torch(2, first=2))
    assert [rank.rank for rank in node.says().ranks] == [2, 3]
    node.order(pair(3, replace(HERE, addresses=hello.addresses)))
    assert "own" in node.says().error or not hello.addresses
    node.process.stdin.close()
    assert node.wait() == (0, "")
    assert node.gone()


def test_an_end_is_for_its_test(start):
    node = start()
    node.says()
    began = time.monotonic()
    node.order(ring(1, ms=9000))
    node.order(ring(2, ms=9000))
    node.order(End(7))
    assert node.silent(0.5)
    node.order(End(1))
    assert (node.says().number, node.seen[-1].count("ended")) == (1, 1)
    node.order(End(1))
    assert node.silent(0.5)
    node.order(End(2))
    assert node.says().ranks[0].said == "ended"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("line", [
    "{}", "x", "[]", "1", '"ring"', "null", '{"what":"collective"}', '{"what":"end"}',
    '{"what":"end","number":"1"}', '{"what":[],"number":1}', "[" * 100_000,
    orders.line(ring(1, limit_s=-1)), orders.line(ring(1, limit_s=float("nan"))),
    orders.line(ring(1, limit_s=float("inf"))), "",
])  # fmt: skip
def test_a_line_that_is_no_order_ends_the_program(start, line):
    node = start()
    node.says()
    node.order(torch(1, "sleep 300"))
    assert within(5, lambda: bool(node.pids("sleep 300")))
    node._write(f"{line}\n")
    status, said = node.wait()
    assert status == 1
    assert said.startswith("no order: ")
    assert said.count("\n") == 1
    assert node.gone()


def test_a_line_that_is_cut_off_is_no_order(start):
    node = start()
    node.says()
    node._write(orders.line(ring(1)))
    node.process.stdin.close()
    assert node.wait() == (0, "")
    assert node.says() is None


def test_what_breaks_costs_its_test(start):
    node = start()
    node.says()
    node.order(ring(1, ms=13))
    answer = node.says()
    assert answer.error.startswith("OSError: the ring is broken (")
    assert [(one.phase, one.ok) for one in answer.ranks] == [("start", False)]
    node.order(ring(2))
    assert node.says().ranks[0].ok


@pytest.mark.parametrize("order", [
    ring(1, 666, 1), torch(1, "sleep 300", 1, small=666, first=4), pair(1, small=666, limit_s=1),
], ids=["ring", "torch", "pair"])  # fmt: skip
def test_a_thread_that_hangs_is_answered_for(start, order):
    node = start()
    node.says()
    began = time.monotonic()
    node.order(order)
    answer = node.says()
    assert 1 <= time.monotonic() - began < 20
    if isinstance(answer, Paired):
        assert answer.error == "did not end in 1 s"
    else:
        rows = [(one.rank, one.phase, one.said) for one in answer.ranks]
        assert rows == [
            (order.first + at, "start", "did not end in 1 s") for at in range(order.ranks)
        ]
        assert not answer.error
    assert not node.pids("sleep 300")
    node.order(ring(2))
    assert node.says().ranks[0].ok


def test_the_rendezvous_has_its_port(start, port):
    """While rank 0 is on this node, our listener is not; afterwards it is."""
    node = start()
    node.says()
    head = replace(HERE, port=port)
    for number, limit_s in ((1, 10), (2, 0.3)):
        node.order(
            torch(number, "sleep 0.1" if number == 1 else "sleep 9", limit_s, head=head, small=29)
        )
        assert len(node.says().ranks) == 2
        with socket.create_connection(("127.0.0.1", port), 2):
            pass
    # Of another's rendezvous, the number alone is the same.
    node.order(torch(3, "sleep 9", first=2, head=head))
    assert within(5, lambda: bool(node.pids("sleep 9")))
    with socket.create_connection(("127.0.0.1", port), 2):
        pass


def test_no_port_is_free(start):
    with socket.create_server(("", 0)) as one:
        port = one.getsockname()[1]
        node = start(ports=(port,))
        hello = node.says()
        assert (hello.ports, [busy.port for busy in hello.busy]) == ((), [port])
        assert hello.why == f"no port of {port} is free ({port}: Address already in use)"
        assert node.says() is None
        assert node.wait() == (0, "")
    assert node.gone()


@pytest.mark.parametrize(("python", "why", "limit_s"), [
    ("raises", "ValueError: what is this (", 60),
    ("hangs", "the engines were not found in 3 s", 4),
])  # fmt: skip
def test_engines_that_are_not_found(start, python, why, limit_s):
    node = start(python=python, limit_s=limit_s)
    assert node.says().why.startswith(why)
    assert node.says() is None
    assert node.gone()


# --- Its end.

ENDS = ["stdin", "TERM", "INT", "HUP", "alarm", "KILL"]


def end(node: Node, how: str, pid: int) -> None:
    if how == "stdin":
        node.process.stdin.close()
    elif how != "alarm":
        os.kill(pid, getattr(signal, f"SIG{how}"))


@pytest.mark.parametrize("how", ENDS)
def test_everything_ends_in_the_middle_of_a_test(start, port, how):
    node = start(limit_s=3 if how == "alarm" else 60)
    node.says()
    node.order(torch(1, "trap '' TERM INT HUP; setsid sh -c 'sleep 300; :' $0 & sleep 301", 50))
    assert within(5, lambda: len(node.pids("sleep 30")) >= 2)
    began = time.monotonic()
    end(node, how, node.pythons()[0])
    assert node.says() is None
    assert node.gone()
    assert time.monotonic() - began < 20
    socket.create_server(("", port)).close()


# --- In a session of the job's user.


def test_a_session_of_the_user(start, user, port):
    node = start(user=user)
    hello = node.says()
    assert (hello.user, hello.ports, hello.why) == (user, (port,), "")
    uid = pwd.getpwnam(user).pw_uid
    node.order(torch(1, "sleep 300", 50, first=2))
    assert within(5, lambda: bool(node.pids("sleep 300")))
    (rank,) = (pid for pid in node.pids("sleep 300") if os.stat(f"/proc/{pid}").st_uid == uid)
    # A rank that crashes leaves no core.
    limits = Path(f"/proc/{rank}/limits").read_text()
    assert re.search(r"^Max core file size +[01] ", limits, re.M)
    assert os.readlink(f"/proc/{rank}/cwd") == "/"
    node.order(End(1))
    assert [(one.rank, one.said) for one in node.says().ranks] == [(2, "ended"), (3, "ended")]
    node.order(ring(2))
    assert node.says().ranks[0].ok
    node.order(pair(3))
    assert node.says().number == 3
    node.process.stdin.close()
    assert node.wait() == (0, "")
    assert node.gone()


@pytest.mark.parametrize(
    ("how", "stopped"),
    [*((how, False) for how in ENDS), ("stdin", True), ("TERM", True), ("KILL", True)],
)
def test_a_session_ends_in_the_middle_of_a_test(start, user, port, how, stopped):
    """Also one whose processes the user has stopped."""
    node = start(user=user, limit_s=6 if how == "alarm" else 60)
    node.says()
    node.order(torch(1, "trap '' TERM INT HUP; setsid sh -c 'sleep 300; :' $0 & sleep 301", 50))
    assert within(5, lambda: len(node.pids("sleep 30")) >= 2)
    outer = node.pythons()[0]
    uid = pwd.getpwnam(user).pw_uid
    for pid in node.pids() if stopped else ():
        if os.stat(f"/proc/{pid}").st_uid == uid:
            os.kill(pid, signal.SIGSTOP)
    end(node, how, outer)
    assert node.says() is None
    assert node.gone()
    assert not of(user)
    socket.create_server(("", port)).close()


def test_the_user_kills_his_own_part(start, user):
    node = start(user=user)
    node.says()
    node.order(torch(1, "sleep 300", 50))
    assert within(5, lambda: bool(node.pids("sleep 300")))
    inner = min(pid for pid in node.pythons() if pid in of(user))
    os.kill(inner, signal.SIGKILL)
    assert node.says() is None
    status, said = node.wait()
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith(f"the session of {user} ended (exit status 137)")
    assert node.gone()
    assert not of(user)


@pytest.mark.parametrize(("text", "why"), [
    ("echo go away; exit 3", "go away"),
    ("echo going; sleep 300 & setsid sleep 301 & exec sleep 302", "timed out; it said: going"),
    ("read x", "timed out"),
    ("exec 1>&-", "timed out"),
    ("yes", "timed out; it said: y"),
    ("ulimit -p 2", "can't start new thread"),
])  # fmt: skip
def test_no_session(start, user, profile, text, why):
    """The reason is one line, within the time, whatever the profile does."""
    profile(f"{text}\n")
    if "ulimit" in text:
        assert within(20, lambda: not of(user, ended=True))
    node = start(user=user, limit_s=5)
    began = time.monotonic()
    hello = node.says()
    assert hello.why.startswith("no session: ")
    assert why in hello.why
    assert (hello.user, hello.ports, hello.engines) == (user, (), ())
    assert time.monotonic() - began < 15
    assert node.says() is None
    assert node.wait() == (0, "")
    assert node.gone()
    assert within(2, lambda: not of(user))


def test_an_account_that_has_expired(start, user):
    subprocess.run(["usermod", "-e", "1970-01-02", user], check=True)
    try:
        why = start(user=user).says().why
    finally:
        subprocess.run(["usermod", "-e", "", user], check=True)
    assert why.startswith("no session: ")
    assert "expired" in why


def test_nobody_of_that_name(start, user):
    node = start(user="nobodysuch")
    assert node.says().why == "no such user: nobodysuch"
    assert node.says() is None


@pytest.mark.parametrize(("wanted", "why"), [
    ("nobodysuch", "no such user: nobodysuch"),
    ("daemon", "logged in as {}, who cannot become daemon: log in as root"),
    ("{}", ""),
    ("", ""),
])  # fmt: skip
def test_the_user_logs_in(start, user, wanted, why):
    node = start(login=user, user=wanted.format(user))
    hello = node.says()
    assert (hello.user, hello.why) == (user, why.format(user))
    node.process.stdin.close()
    assert node.says() is None
    assert node.gone()


@pytest.mark.parametrize("text", [
    "exec <&-; exec 2>&-; cd /nowhere; set -u; trap '' TERM",
    "exec </dev/null; echo noise; echo more >&2; printf 'half a line'",
    "head -c 300000000 /dev/zero; head -c 3000000 /dev/zero >&2",
    "PATH=/nowhere; LC_ALL=de_DE.ISO-8859-1; export PATH LC_ALL",
    "(sleep 300 >/dev/null 2>&1 & echo $! >sleeps)",
])  # fmt: skip
def test_an_odd_profile_is_no_trouble(start, user, profile, text):
    profile(f"{text}\n")
    node = start(user=user)
    assert not node.says().why
    node.order(ring(1))
    assert node.says().ranks[0].ok
    node.process.stdin.close()
    assert node.wait() == (0, "")
    assert node.gone()
    # Of what the profile has started, as of every login's, nobody knows whether it may end.
    subprocess.run(["pkill", "-KILL", "-u", user], check=False)


# --- The user attacks.

#: What stands in place of our program: it knows the nonce of its session. What it does first is
#: to be passed over, before the hello, before the answer, and after it.
EVIL = """
import json, os, re, select
pipes = [number for number in range(3, 64) if os.path.exists("/proc/self/fd/%d" % number)
         and os.readlink("/proc/self/fd/%d" % number).startswith("pipe:")]
text = b""
while select.select(pipes[:1], [], [], 0.5)[0]:
    text += os.read(pipes[0], 1 << 20)
nonce = re.search(rb"'nonce': '([^']+)'", text)[1].decode()
def say(name, nonce=nonce, **data):
    print(nonce, name, json.dumps(data, ensure_ascii=False), flush=True)
HELLO = dict(host="other", user="root", token="t", ports=[22, PORT], busy=[],
             addresses=["10.9.9.9"], gpus=0, engines=[], why="")
ENGINE = ("name", "backend", "version", "library", "where", "proves", "why")
RAN = dict(number=1, error="honest", ranks=[])
PAIRED = dict(number=1, target="x", resolved=[], error="", address="", tries=[], outcome="ok",
              ms=1, gbps=1, retransmits=0, came=0)
def attack():
    say('hello', **dict(HELLO, token='x' * (1 << 20)))
    say('hello', **dict(HELLO, why='ü' * 9000))
    say('hello', **dict(HELLO, busy=[dict(port=1, error='x' * 8000)] * 30))
    say('hello', **dict(HELLO, engines=[dict.fromkeys(ENGINE, 'ü' * 1000)] * 20))
    say('hello', **dict(HELLO, ports=[-1]))
    say('hello', **dict(HELLO, more=1))
    say('hello', **dict(HELLO, gpus=1e400))
    say('hello', nonce='nodeready-0123456789abcdef', **HELLO)
    print('x' * (1 << 20), end='')
    print()
    for at in range(10_000):
        say('ran', **dict(RAN, number=2))
        say('paired', **dict(PAIRED, number=2))
    for name in ('user', 'round', 'listening', 'x' * 99, 'hello hello'):
        say(name, **HELLO)
    print(nonce, 'hello', json.dumps(HELLO), nonce, 'hello', json.dumps(HELLO))
    print(nonce, 'hello', '[' * 100_000)
    print(nonce, 'hello', '{"host":"x","host":"y"}')
    print(nonce, 'hello', flush=True)
    os.write(1, bytes(range(256)) * 1000 + b'\\n')
    os.write(1, (nonce + ' ran {"number": 1, ').encode() + b'\\n')
say("begun")
attack()
say("ran", **RAN)
say("hello", **dict(HELLO, token="honest"))
os.read(pipes[0], 1 << 20)
attack()
say("hello", **HELLO)
say("paired", **PAIRED)
say("ran", **RAN)
attack()
say("ran", **RAN)
while os.read(pipes[0], 1 << 20):
    pass
"""


def test_only_what_was_asked_for_comes_out(start, user, profile, port):
    """One hello, one answer to the order; nothing of it says what root knows itself."""
    home = Path(pwd.getpwnam(user).pw_dir)
    (home / "evil.py").write_text(EVIL.replace("PORT", str(port)))
    profile(f"exec /usr/bin/python3 {home}/evil.py\n")
    node = start(user=user)
    hello = node.says()
    assert (hello.host, hello.user, hello.token) == (os.uname().nodename, user, "honest")
    assert "10.9.9.9" not in hello.addresses
    assert hello.ports == (port,)
    node.order(ring(1))
    assert node.says() == Ran(1, "honest", ())
    assert node.silent(3)
    node.process.stdin.close()
    assert node.wait() == (0, "")
    assert [row.count("\n") for row in node.seen] == [1, 1]
    assert node.gone()
    assert not of(user)


def test_a_flood_stops_nothing(start, user, profile):
    profile("yes & yes >&2 &\n")
    node = start(user=user)
    assert not node.says().why
    node.order(torch(1, "sleep 300", 1))
    assert len(node.says().ranks) == 2
    node.process.stdin.close()
    assert node.wait()[0] == 0
    assert node.gone()
