"""The program of a smoke test in a session of the job's user, which the real su opens."""

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeready.agent.smoke.orders import CollectiveAnswer, EndOrder
from nodeready.core import wire
from nodeready.subjects.environment_table import EnvironmentFacts
from tests.unit.node.smoke.running_program import pair, port, start, stubborn, torch, within

__all__ = ["port", "start"]


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    """A user of this machine, whose home holds nothing."""
    if os.geteuid() or not shutil.which("useradd"):
        pytest.skip("makes a user: needs root")
    name = f"smoke{os.getpid()}"
    subprocess.run(["useradd", "-m", "-d", f"/tmp/{name}", "-s", "/bin/sh", name], check=True)
    try:
        ask = "python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))'"
        if subprocess.run(["su", "-", name, "-c", ask], check=False).returncode:
            pytest.skip("no Python that a user can run")
        yield name
    finally:
        kill_all(name)
        subprocess.run(["userdel", "-r", name], check=True, capture_output=True)


@pytest.fixture
def profile(user) -> Iterator[Callable[[str], object]]:
    path = Path(pwd.getpwnam(user).pw_dir, ".profile")
    path.unlink(missing_ok=True)
    yield path.write_text
    path.unlink(missing_ok=True)


def of(user: str, ended: bool = False) -> set[int]:
    """All processes of a user; ended: zombies, too."""
    uid, pids = pwd.getpwnam(user).pw_uid, set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            runs = Path(f"/proc/{name}/cmdline").read_bytes()
            if os.stat(f"/proc/{name}").st_uid == uid and (runs or ended):
                pids.add(int(name))
    return pids


def kill_all(user: str) -> None:
    for pid in of(user):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def test_a_session_of_the_user(start, user, port):
    node = start(user=user)
    hello = node.answer()
    assert (hello.ports, hello.reason) == ((port,), "")
    node.order(torch(1, "sleep 300", 50, first=2))
    node.wait_for_ranks()
    (rank,) = of(user) & {*node.pids("sleep 300")}
    # A rank that crashes leaves no core.
    limits = Path(f"/proc/{rank}/limits").read_text()
    assert re.search(r"^Max core file size +[01] ", limits, re.M)
    assert os.readlink(f"/proc/{rank}/cwd") == "/"
    node.order(EndOrder(1))
    ranks = [(rank.rank, rank.error) for rank in node.answer().ranks]
    assert ranks == [(2, "ended"), (3, "ended")]
    assert node.close() == (0, "")
    assert node.is_gone()


@pytest.mark.parametrize(
    ("how", "stopped"), [("stdin", False), ("alarm", False), ("TERM", True), ("KILL", True)]
)
def test_a_session_ends_in_the_middle_of_a_test(start, user, port, how, stopped):
    node = start(user=user, limit_s=8 if how == "alarm" else 60)
    node.answer()
    node.order(torch(1, stubborn("python3"), 50))
    node.wait_for_ranks("sleep", 2)
    for pid in of(user) & {*node.pids()} if stopped else ():
        os.kill(pid, signal.SIGSTOP)
    node.end(how)
    assert node.answer() is None
    assert node.is_gone()
    assert within(5, lambda: not of(user))
    socket.create_server(("", port)).close()


def test_the_user_kills_his_own_part(start, user):
    node = start(user=user)
    node.answer()
    node.order(torch(1, "sleep 300", 50))
    node.wait_for_ranks()
    os.kill(min(of(user) & {*node.pythons()}), signal.SIGKILL)
    assert node.answer() is None
    status, error = node.wait()
    assert (status, error.count("\n")) == (1, 1)
    assert error.startswith(f"the session of {user} ended (exit status 137)")
    assert node.is_gone()
    assert not of(user)


@pytest.mark.parametrize(
    ("text", "why"), [("yes", "timed out; it said: y"), ("ulimit -p 2", "Cannot fork")]
)
def test_no_session(start, user, profile, text, why):
    """The reason is one line, within the time. What else a profile does: test_proof."""
    profile(f"{text}\n")
    assert within(20, lambda: not of(user, ended=True))
    node = start(user=user, limit_s=15)
    hello = node.answer()
    assert hello.reason.startswith("no session: ")
    assert why in hello.reason
    assert (hello.ports, hello.engines) == ((), ())
    assert node.answer() is None
    assert node.wait() == (0, "")
    assert node.is_gone()
    assert within(5, lambda: not of(user))


@pytest.mark.parametrize("wanted", ["{}", ""])
def test_a_user_logs_in_without_root(start, user, wanted):
    node = start(login=user, user=wanted.format(user))
    hello = node.answer()
    assert hello.reason == ""
    node.process.stdin.close()
    assert node.answer() is None
    assert node.is_gone()


@pytest.mark.parametrize("text", [
    "LC_ALL=de_DE.ISO-8859-1; export LC_ALL; (sleep 300 >/dev/null 2>&1 &); printf 'half a line'",
    "yes & yes >&2 &",
])  # fmt: skip
def test_an_odd_profile_is_no_trouble(start, user, profile, text):
    profile(f"{text}\n")
    node = start(user=user)
    assert not node.answer().reason
    node.order(pair(1))
    assert node.answer().error == ""
    status, error = node.close()
    assert (status, error if "yes" not in text else "") == (0, "")
    assert node.is_gone()
    # Of what the profile has started, as of every login's, nobody knows whether it may end.
    kill_all(user)


# --- The user attacks.

#: What stands in place of our program: it knows the nonce of its session. What it does first is
#: to be passed over, before the hello, before the answer, and after it. What is no line at all is
#: asked of tests/unit.
EVIL = """
import json, os, re, select
pipes = [number for number in range(3, 64) if os.path.exists("/proc/self/fd/%d" % number)
         and os.readlink("/proc/self/fd/%d" % number).startswith("pipe:")]
text = b""
while select.select(pipes[:1], [], [], 0.5)[0]:
    text += os.read(pipes[0], 1 << 20)
nonce = re.search(rb"'nonce': '([^']+)'", text)[1].decode()
def say(name, **data):
    print(nonce, name, json.dumps(data, ensure_ascii=False), flush=True)
HELLO = dict(token="t", ports=[22, PORT], addresses=["10.9.9.9"], engines=[], reason="",
             variables=[], facts=FACTS)
ENGINE = ("name", "backend", "version", "library", "proves", "reason")
RAN = dict(number=1, error="honest", ranks=[], port_holder="")
PAIRED = dict(number=1, target="x", resolved=[], error="", address="", tries=[], outcome="ok",
              ms=1, gbps=1, retransmits=0)
def attack():
    say('hello', **dict(HELLO, engines=[dict.fromkeys(ENGINE, 'ü' * 1000)] * 20))
    say('hello', **{**HELLO, 'ports': [-1]})
    print('x' * (1 << 20))
    for at in range(10_000):
        say('ran', **dict(RAN, number=2))
        say('paired', **dict(PAIRED, number=2))
    say('user', **HELLO)
    os.write(1, bytes(range(256)) * 1000 + b'\\n' + (nonce + ' ran {"number": 1, \\n').encode())
say("begun")
attack()
say("collective", **RAN)
say("hello", **dict(HELLO, token="honest"))
os.read(pipes[0], 1 << 20)
attack()
say("hello", **HELLO)
say("pair", **PAIRED)
say("collective", **RAN)
attack()
say("collective", **RAN)
while os.read(pipes[0], 1 << 20):
    pass
"""


def test_only_what_was_asked_for_comes_out(start, user, profile, port):
    """One hello, one answer to the order; nothing of it says what root knows itself."""
    home = Path(pwd.getpwnam(user).pw_dir)
    facts = repr(wire.plain(EnvironmentFacts("not probed")))
    (home / "evil.py").write_text(EVIL.replace("PORT", str(port)).replace("FACTS", facts))
    profile(f"exec /usr/bin/python3 {home}/evil.py\n")
    node = start(user=user)
    hello = node.answer()
    assert hello.token == "honest"
    assert "10.9.9.9" not in hello.addresses
    assert hello.ports == (port,)
    node.order(torch(1))
    assert node.answer() == CollectiveAnswer(1, "honest", ())
    assert not within(3, lambda: not node.rows.empty())
    assert node.close() == (0, "")
    assert [row.count("\n") for row in node.printed] == [1, 1]
    assert node.is_gone()
    assert not of(user)
