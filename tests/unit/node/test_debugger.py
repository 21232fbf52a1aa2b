"""`nodeready run --debug-rank` with real processes: a rank waits, and the job goes on."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodeready.agent import payload, runtime
from nodeready.agent.debugger import DebuggerConfig
from tests.cases import with_table
from tests.command import wait_for
from tests.unit.node.test_run import children, environment, script, started, until

__all__ = ["script"]

OPTIONS = ("--debug-rank", "3")


@pytest.fixture
def python() -> str:
    """The Python of the job; tests/lab/test_units_pythons.py has others."""
    return sys.executable


@pytest.fixture
def job(tmp_path, script, python):
    """`job(text, **how)`: this program as rank 3 under a supervisor."""
    directory = tmp_path / "tmp"
    directory.mkdir()

    @contextlib.contextmanager
    def start(text, *words, options=OPTIONS, **variables):
        env = environment(TMPDIR=str(directory), **variables)
        with started(python, script(text), *words, options=options, env=env, python=python) as one:
            one.directory = directory
            yield one
        # Only a killed supervisor leaves its directory; the next run removes it.

    return start


def path_of(job) -> Path:
    wait_for(lambda: any(job.directory.glob("*/socket")))
    (path,) = job.directory.glob("*/socket")
    return path


class Session:
    def __init__(self, path: Path) -> None:
        self.client = socket.socket(socket.AF_UNIX)
        self.client.settimeout(20)
        # As nodeready does it: the path of a test is longer than a socket's.
        with there(path.parent):
            self.client.connect(path.name)

    def read(self, words: str = "(Pdb) ") -> str:
        """The text up to these words; or up to the end of the session."""
        text = ""
        while not text.endswith(words) and (data := self.client.recv(4096)):
            text += data.decode()
        return text

    def ask(self, line: str) -> str:
        self.client.sendall(f"{line}\n".encode())
        return self.read()


@contextlib.contextmanager
def there(directory):
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


STEPS = """
    import os, sys, time
    def step(number):
        value = number * 2
        breakpoint()
        return value + 1
    print("sum", step(1) + step(20), flush=True)
    print("end", flush=True)
"""
LOOP = """
    import sys, time
    def loop():
        turns = 0
        while True:
            turns += 1
            print(f"turn {turns};", flush=True)
            time.sleep(0.01)
    loop()
"""


def test_a_breakpoint_waits_and_steps_and_the_job_goes_on(job):
    with job(STEPS) as rank:
        text = until(rank.stdout, b"--attach 3)")
        assert b"rank 3 waits for a debugger: breakpoint() at train.py:5" in text
        path = path_of(rank)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        first = Session(path)
        assert "train.py(5)step()" in first.read()
        assert first.ask("p value") == "2\n(Pdb) "
        assert "train.py(6)step()" in first.ask("n")
        # It stays connected until the next breakpoint.
        assert "breakpoint() at train.py:5" in first.ask("c")
        assert first.ask("p number") == "20\n(Pdb) "
        assert first.ask("q") == ""
        until(rank.stdout, b"sum 44\n")
        assert rank.wait(20) == 0
        assert [*rank.directory.iterdir()] == []


def test_an_exception_is_examined_before_the_program_ends(job):
    with job("def divide(a):\n    return a / 0\ndivide(7)\n") as rank:
        text = until(rank.stdout, b"--attach 3)")
        assert b"ZeroDivisionError: division by zero" in text
        session = Session(path_of(rank))
        assert "train.py(2)divide()" in session.read()
        assert session.ask("p a") == "7\n(Pdb) "
        assert session.ask("c") == ""
        assert rank.wait(20) == 1


def test_a_rank_that_runs_is_interrupted_and_a_killed_user_changes_nothing(job):
    with job(LOOP) as rank:
        until(rank.stdout, b"turn")
        path = path_of(rank)
        user = subprocess.Popen(
            [sys.executable, "-c", KILLED, path.name], cwd=path.parent, stdout=subprocess.PIPE
        )
        until(user.stdout, b"Breakpoint")
        user.kill()
        user.wait()
        user.stdout.close()
        # It had a breakpoint, at which the next user does not stop.
        session = Session(path)
        assert "interrupted" in session.read()
        assert session.ask("b") == "(Pdb) "
        assert "train.py" in session.ask("n")
        turns = int(session.ask("p turns").split()[0])
        assert session.ask("q") == ""
        until(rank.stdout, b"turn %d;" % (turns + 3))


KILLED = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
client.sendall(b"tbreak nosuch\\nb 7\\nc\\n")
while data := client.recv(4096):
    sys.stdout.write(data.decode())
    sys.stdout.flush()
"""


def test_a_second_user_is_refused_while_the_first_is_there(job):
    with job(STEPS) as rank:
        until(rank.stdout, b"--attach 3)")
        first, second = Session(path_of(rank)), Session(path_of(rank))
        first.read()
        assert second.read().startswith("busy")
        first.client.close()
        # The first breakpoint has passed without an answer, and the second one waits again.
        until(rank.stdout, b"--attach 3)")
        third = Session(path_of(rank))
        third.read()
        assert third.ask("p number") == "20\n(Pdb) "


def test_a_rank_in_c_shows_its_variables_and_cannot_be_stepped(job):
    wait = """
    import ctypes
    def wait(shards):
        print("in C", flush=True)
        library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        library.pthread_mutex_lock(lock)
        library.pthread_mutex_lock(lock)
    wait(4711)
    """
    with job(wait) as rank:
        until(rank.stdout, b"in C")
        program = children(rank.pid)[0]
        wait_for(lambda: runtime.status(program).state == "S")
        session = Session(path_of(rank))
        assert "its main thread is in C" in session.read()
        assert session.ask("p shards") == "4711\n(Pdb) "
        assert session.ask("n") == ""
        assert rank.poll() is None


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("another rank", "import os; breakpoint(); print('end', flush=True)"),
        ("a fork", "import os, sys\nif os.fork() == 0:\n    breakpoint()\n    os._exit(0)\n"
                   "os.wait()\nprint('end', flush=True)"),
        ("a program of the rank", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', "
                                  "'breakpoint(); 1/0'])\nprint('end', flush=True)"),
        ("an end by Ctrl-C", "print('end', flush=True)\nraise KeyboardInterrupt"),
        ("a launcher", "import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', ''], "
                       "env={**os.environ, 'RANK': '8'})\nprint('end', flush=True)\n1/0"),
    ],
)  # fmt: skip
def test_nobody_else_waits(job, what, text):
    variables = {"another rank": {"RANK": "2"}}.get(what, {})
    if what == "a launcher":
        variables = {"RANK": "", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}
    with job(text, **variables) as rank:
        assert b"waits for" not in until(rank.stdout, b"end")
        assert rank.wait(20) in (0, 1, 130)
        assert b"waits for" not in rank.stdout.read()


def test_a_signal_that_ends_a_waiting_rank_ends_it(job):
    with job(STEPS) as rank:
        until(rank.stdout, b"--attach 3)")
        rank.terminate()
        assert rank.wait(20) == 128 + signal.SIGTERM
        assert [*rank.directory.iterdir()] == []


# --- The program on the node.


def look(pid: int, typed: bytes = b"", rank: int = 3) -> str:
    """What the node's program prints in a session with these lines."""
    config = DebuggerConfig("NONCE", "nodeready:test", rank, pid, 30)
    source = payload.text("nodeready.agent.debugger", config)
    words = [sys.executable, "-I", "-S", "-c", source]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        program.stdin.write(typed)
        program.stdin.flush()
        text = program.stdout.read().decode()
    return text


def test_the_program_on_the_node_copies_lines(job):
    with job(STEPS) as rank:
        until(rank.stdout, b"--attach 3)")
        text = look(children(rank.pid)[0], b"p 'caf\xc3\xa9' * value\nq\n")
        assert "caf\\u00e9caf\\u00e9" in text
        assert text.endswith('NONCE debugger {"text":"","is_last":true}\n')
        until(rank.stdout, b"--attach 3)")


@with_table("options, words, reason")
def test_why_a_rank_cannot_be_debugged(tmp_path, options, words, reason):
    """Of this Python, which is older than 3.14; tests/lab/test_debugger.py has a newer one."""
    command = ["sleep", "60"] if words is None else [sys.executable, *words, "-c", "input()"]
    if sys.version_info >= (3, 14) and "older" in reason:
        pytest.skip("this Python is 3.14 or newer")
    with started(*command, options=options, stdin=subprocess.PIPE) as rank:
        wait_for(lambda: len(children(rank.pid)) == 2)
        program = children(rank.pid)[0]
        wait_for(lambda: runtime.status(program).state == "S")
        time.sleep(0.2)
        assert f'"text":"{reason}' in look(program)
        assert rank.poll() is None
