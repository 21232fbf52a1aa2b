"""`nodeready run` with real processes: lines, logs, signals, ends, stacks, the last lines."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time
from itertools import chain
from pathlib import Path

import pytest

from nodeready.node import run as supervisor
from nodeready.node.stacks import processes, ranks
from tests.command import wait_for

FILE = Path(supervisor.__file__)
#: Our own Python, and where this machine has them the oldest that a node has, and one with
#: sys.monitoring.
OTHERS = [
    next(chain(Path("/usr/bin").glob(f"python{version}"),
               Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), None)
    for version in ("3.9", "3.13")
]  # fmt: skip
PYTHONS = [sys.executable, *(str(one) for one in OTHERS if one)]
NODE = supervisor.node_name({})


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name}
    return {**kept, "RANK": "3", **more}


def words(*command: str, python: str = sys.executable, options: tuple[str, ...] = ()):
    return [python, "-I", "-S", str(FILE), *options, "--", *command]


def run(*command: str, python=sys.executable, options=(), env=None, **more):
    return subprocess.run(
        words(*command, python=python, options=options),
        env=env or environment(),
        capture_output=True,
        timeout=60,
        check=False,
        **more,
    )


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@contextlib.contextmanager
def started(*command: str, options=(), env=None, python=sys.executable, **more):
    """A supervisor in a group of its own, as torchrun starts it; ended with all of its own."""
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more}
    job = subprocess.Popen(
        words(*command, options=options, python=python),
        env=env or environment(),
        start_new_session=True,
        **more,
    )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        if job.stdout:
            job.stdout.close()


def until(stream, word: bytes, limit_s: float = 20) -> bytes:
    """What the stream says until it says the word."""
    seen = b""
    end = time.monotonic() + limit_s
    while word not in seen:
        ready, _, _ = select.select([stream], [], [], max(0, end - time.monotonic()))
        assert ready, f"no {word!r} in {seen!r}"
        data = os.read(stream.fileno(), 65536)
        assert data, f"ended without {word!r}: {seen!r}"
        seen += data
    return seen


def child_of(pid: int) -> int:
    """The program under a supervisor: not its bystander."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(one)
        for one in children
        if b"sleep\0002147" not in Path(f"/proc/{one}/cmdline").read_bytes()
    )


# --- Who and where.


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({"RANK": "3", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "3"),
        ({"OMPI_COMM_WORLD_RANK": "12"}, "12"),
        ({"PMI_RANK": "7"}, "7"),
        ({"SLURM_PROCID": "5", "SLURM_STEP_ID": "0"}, "5"),
        ({"SLURM_PROCID": "0"}, ""),
        ({"LOCAL_RANK": "1", "NODE_RANK": "2"}, "local1"),
        ({"RANK": "../../etc"}, ""),
        ({"RANK": "٣"}, ""),
        ({}, ""),
    ],
)
def test_the_rank_is_the_launchers(given, rank):
    assert supervisor.rank_of(given) == rank


def test_the_launchers_variables_are_those_that_stacks_knows():
    assert tuple(rank for rank, _, _ in processes.FAMILIES) == supervisor.RANKS


# --- Lines.


def lines_of(*parts: bytes, terminal: bool = False) -> bytes:
    lines = supervisor.Lines(b"[n:0] ", terminal)
    found = b"".join(line for part in parts for line in lines.add(part, 100.0))
    return found + b"".join(lines.rest(101.0))


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ((b"one\ntw", b"o\n"), b"[n:0] one\n[n:0] two\n"),
        ((b"no end",), b"[n:0] no end\n"),
        ((b"\n\n",), b"[n:0] \n[n:0] \n"),
        ((b"\xff\x00\x1b[31mred\n",), b"[n:0] \xff\x00\x1b[31mred\n"),
        ((b"dos\r\n",), b"[n:0] dos\r\n"),
        ((b"\r 10%\r 20%", b"\r100%\n"), b"[n:0] 100%\n"),
        ((b" 10%\r 20%\r",), b"[n:0]  20%\n"),
        ((), b""),
    ],
)
def test_output_becomes_whole_lines(parts, shown):
    assert lines_of(*parts) == shown


def test_a_terminal_sees_bars_and_prompts_at_once():
    lines = supervisor.Lines(b"[n:0] ", True)
    assert b"".join(lines.add(b"name: ", 0.0)) == b"[n:0] name: "
    assert b"".join(lines.add(b"ada\n\r 10%", 0.0)) == b"ada\n\r[n:0]  10%"
    assert b"".join(lines.add(b"\r 20%\n", 0.0)) == b"\r[n:0]  20%\n"


def test_a_line_beyond_the_limit_is_several_lines():
    shown = lines_of(b"x" * (supervisor.LONGEST + 5) + b"\n")
    assert [len(line) for line in shown.split(b"\n")] == [supervisor.LONGEST + 6, 5 + 6, 0]


def test_an_unfinished_line_is_written_after_a_while_and_a_bar_now_and_then():
    lines = supervisor.Lines(b"> ", False)
    assert lines.add(b"(Pdb) ", 10.0) == []
    assert lines.waiting(11.0) == []
    assert lines.waiting(13.0) == [b"> (Pdb) \n"]
    assert lines.add(b"\r 1%\r 2%", 14.0) == []
    assert lines.add(b"\r 3%", 25.0) == [b">  3%\n"]
    assert lines.add(b"\r 4%", 26.0) == []


def test_both_streams_go_where_they_went(script):
    done = run(sys.executable, script("import sys; print('a'); print('b', file=sys.stderr)"))
    assert (done.stdout, done.stderr) == (f"[{NODE}:3] a\n".encode(), f"[{NODE}:3] b\n".encode())


def test_sixteen_ranks_in_one_pipe_tear_no_line(script):
    path = script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(60):
            size = 20000 if number % 7 == 0 else 50
            os.write(1, (rank * size)[:size].encode() + b"|%d\\n" % number)
        """
    )
    read, write = os.pipe()
    jobs = [
        subprocess.Popen(
            words(sys.executable, path), stdout=write, env=environment(RANK=format(rank, "02"))
        )
        for rank in range(16)
    ]
    os.close(write)
    with open(read, "rb") as pipe:
        seen = pipe.read()
    assert {job.wait() for job in jobs} == {0}
    rows = seen.decode().splitlines()
    assert len(rows) == 16 * 60
    for row in rows:
        match = re.fullmatch(rf"\[{NODE}:(\d\d)\] ([0-9]+)\|(\d+)", row)
        assert match, row[:100]
        size = 20000 if int(match[3]) % 7 == 0 else 50
        assert match[2] == (match[1] * size)[:size]


def test_nothing_of_a_crash_is_lost_when_the_reader_is_slow(script):
    path = script("import os; os.write(1, b'x' * 60000 + b'\\nlast\\n'); os.abort()")
    with started(sys.executable, path, env=environment(PYTHONFAULTHANDLER="")) as job:
        time.sleep(3.0)
        seen = job.stdout.read()
        assert job.wait() == 128 + signal.SIGABRT
    assert b"x" * 60000 in seen
    assert seen.endswith(f"[{NODE}:3] last\n".encode())


def test_a_grandchild_that_keeps_the_pipe_does_not_keep_us():
    begun = time.monotonic()
    done = run("sh", "-c", "sleep 50 & echo $!; exit 4")
    assert done.returncode == 4
    assert time.monotonic() - begun < 30
    os.kill(int(done.stdout.split()[-1]), signal.SIGKILL)


def test_a_terminal_stays_one_and_a_file_is_none(script):
    path = script("import sys; print(sys.stdout.isatty(), sys.stderr.isatty())")
    master, slave = pty.openpty()
    with started(sys.executable, path, stdout=slave, stderr=subprocess.DEVNULL) as job:
        assert job.wait(20) == 0
    os.close(slave)
    assert b"True False" in os.read(master, 1000)
    os.close(master)


def test_standard_input_is_the_programs(script):
    path = script("import sys; print(sys.stdin.read().upper())")
    assert run(sys.executable, path, input=b"hello").stdout == f"[{NODE}:3] HELLO\n".encode()


def test_who_writes_to_nobody_learns_of_it(script):
    path = script("while True: print('x' * 100)")
    with started(sys.executable, path) as job:
        until(job.stdout, b"xxx")
        job.stdout.close()
        job.stdout = None
        assert job.wait(20) == 1  # BrokenPipeError, as without us.


# --- Logs.


def test_a_restart_gets_a_log_of_its_own(tmp_path):
    logs = tmp_path / "logs"
    for restart in ("0", "0", "2"):
        env = environment(TORCHELASTIC_RESTART_COUNT=restart)
        done = run(
            "sh", "-c", "printf 'a\\rb'; echo e >&2", options=("--log-dir", str(logs)), env=env
        )
        assert done.returncode == 0
    found = sorted(logs.iterdir())
    assert [one.name for one in found] == [f"{NODE}-rank3.{number}.log" for number in (0, 1, 2)]
    assert {one.read_bytes() for one in found} <= {b"a\rbe\n", b"e\na\rb"}


def test_a_log_that_cannot_be_costs_a_line_and_not_the_job(tmp_path):
    (tmp_path / "file").touch()
    done = run("echo", "done", options=("--log-dir", str(tmp_path / "file")))
    assert (done.returncode, done.stdout) == (0, f"[{NODE}:3] done\n".encode())
    assert done.stderr == (
        f"[{NODE}:3] nodeready run: no log: {tmp_path}/file: File exists\n".encode()
    )


def test_a_full_disk_ends_the_log_alone():
    complaints = []
    log = supervisor.Log(complaints.append)
    log._fd, log.path = os.open("/dev/full", os.O_WRONLY), "/logs/x.log"
    log.write(b"a\n")
    log.write(b"b\n")
    assert complaints == ["the log stops here: /logs/x.log: No space left on device"]


# --- Ends and signals.


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 41"], 41),
        (["sh", "-c", "kill -SEGV $$"], 128 + signal.SIGSEGV),
        (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL),
        (["/nonexistent/python", "train.py"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_the_status_is_the_programs(command, status, tmp_path):
    # A core goes where the program works.
    done = run(*command, cwd=tmp_path)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr


COUNTS = """
import os, signal, sys, time
seen = []
def on(number, frame):
    seen.append(number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, on)
print("ready", flush=True)
end = time.monotonic() + 20
while not seen and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.5)
print("got", *map(int, seen), flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("whom", ["us", "group", "each"])
def test_a_signal_arrives_once_whomever_it_was_sent_to(script, name, whom):
    """torchrun signals the group, Slurm each process of the step, a person us."""
    number = getattr(signal, name)
    with started(sys.executable, script(COUNTS)) as job:
        until(job.stdout, b"ready")
        child = child_of(job.pid)
        if whom == "group":
            os.killpg(job.pid, number)
        else:
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            for pid in [job.pid, *(map(int, children) if whom == "each" else ())]:
                os.kill(pid, number)
        assert f"got {int(number)}\n".encode() in until(job.stdout, b"\n")
        assert job.wait(20) == 0
    assert not Path(f"/proc/{child}").exists()


def test_who_is_to_ignore_a_hangup_ignores_it():
    path = f"trap '' HUP; exec {sys.executable} {FILE} -- sh -c 'kill -HUP $$; echo on'"
    done = subprocess.run(["sh", "-c", path], capture_output=True, check=False, env=environment())
    assert done.stdout == f"[{NODE}:3] on\n".encode()


def test_there_is_no_orphan_after_sigkill(script):
    with started(
        sys.executable, script("print('on', flush=True); import time; time.sleep(60)")
    ) as job:
        until(job.stdout, b"on")
        child = child_of(job.pid)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        end = time.monotonic() + 10
        while Path(f"/proc/{child}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()


def test_nothing_is_left_behind(tmp_path):
    env = environment(TMPDIR=str(tmp_path))
    assert run("sh", "-c", 'ls "$TMPDIR"; exit 1', env=env).stdout.count(b"nodeready-run-") == 1
    assert list(tmp_path.iterdir()) == []


# --- In the job.


@pytest.mark.parametrize("python", PYTHONS)
def test_all_stacks_on_a_signal_also_in_c_with_the_lock(script, python):
    """A lock of C's, taken twice with the interpreter's own lock held: no Python runs any more."""
    path = script(
        """
        import ctypes, threading, time
        def loads():
            time.sleep(60)
        threading.Thread(target=loads, daemon=True).start()
        def stuck():
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
            library.pthread_mutex_lock(mutex)
            print("stuck", flush=True)
            library.pthread_mutex_lock(mutex)
        stuck()
        """
    )
    with started(python, path, python=python) as job:
        until(job.stdout, b"stuck")
        time.sleep(0.5)  # From the print to the lock.
        os.killpg(job.pid, signal.SIGURG)
        seen = until(job.stdout, b"in <module>").decode()
        assert f'[{NODE}:3]   File "{path}", line 10 in stuck\n' in seen
        assert "in loads" in seen
        assert job.poll() is None
        os.kill(child_of(job.pid), signal.SIGKILL)
        assert job.wait(20) == 128 + signal.SIGKILL


@pytest.mark.parametrize("python", PYTHONS)
def test_the_users_own_path_and_sitecustomize_stay(tmp_path, script, python):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("print('my site')\n")
    (tmp_path / "mine" / "helper.py").write_text("word = 'help'\n")
    path = script("import helper, sitecustomize; print(helper.word, sitecustomize.__file__)")
    done = run(python, path, python=python, env=environment(PYTHONPATH=str(tmp_path / "mine")))
    assert done.stderr == b""
    assert done.stdout.decode().splitlines() == [
        f"[{NODE}:3] my site",
        f"[{NODE}:3] help {tmp_path}/mine/sitecustomize.py",
    ]


def test_limits_and_variables_are_set_where_they_are_not(tmp_path, script):
    header = tmp_path / "torch/include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
    header.parent.mkdir(parents=True)
    header.write_text(
        "{TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE} TORCH_FR_DUMP_TEMP_FILE"
    )
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.15.0'\n")
    path = script(
        """
        import os, resource
        soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
        print(soft == hard)
        for name in sorted(os.environ):
            if name.startswith(("TORCH_", "PYTHONUN", "PYTHONFAULT")):
                print(name + "=" + os.environ[name])
        """
    )
    env = environment(PYTHONPATH=str(tmp_path), PYTHONUNBUFFERED="x")
    done = run(
        sys.executable,
        path,
        env=env,
        options=("--log-dir", str(tmp_path / "logs")),
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        ),
    )
    dumps = f"{tmp_path}/logs/recorder.0/comm_lib_trace_rank_"
    assert [row.partition("] ")[2] for row in done.stdout.decode().splitlines()] == [
        "True",
        "PYTHONFAULTHANDLER=1",
        "PYTHONUNBUFFERED=x",
        "TORCH_FR_BUFFER_SIZE=2000",
        f"TORCH_FR_DUMP_TEMP_FILE={dumps}",
    ]
    old = header.with_name("NCCLUtils.hpp")
    header.rename(old)
    old.write_text("TORCH_NCCL_TRACE_BUFFER_SIZE")
    torch = str(tmp_path / "torch")
    assert supervisor.recorder(torch, {}, "") == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    given = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert supervisor.recorder(torch, given, "") == {}
    assert supervisor.recorder(str(tmp_path), {}, "/x") == {}


TRACED = """
import json, os, sys, threading, time
def step(number):
    value = json.loads("1")
    return value + number
def other():
    for number in range(3):
        step(number)
thread = threading.Thread(target=other, name="loader")
thread.start()
thread.join()
step(9)
if "hang" in sys.argv:
    print("hangs", flush=True)
    time.sleep(60)
if "kill" in sys.argv:
    os.kill(os.getpid(), 9)
raise SystemExit("gone" if "fail" in sys.argv else 0)
"""


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("word", "status"), [("fail", 1), ("kill", 128 + 9), ("fine", 0)])
def test_the_last_lines_are_told_when_it_fails(script, python, word, status):
    path = script(TRACED)
    done = run(python, path, word, python=python, options=("--trace-lines", "4"))
    assert done.returncode == status
    told = [row.partition("] ")[2] for row in done.stderr.decode().splitlines()]
    if not status:
        assert told == []
        return
    titles = [row for row in told if row.startswith("trace of process")]
    assert [re.sub(r"\d+", "N", row) for row in titles] == [
        "trace of process N, thread N (MainThread), the last N lines:",
        "trace of process N, thread N (loader), the last N lines:",
    ] or len(titles) == 2
    assert any(
        re.fullmatch(r"\S+ train.py:5 (step) \|     return value \+ number", r) for r in told
    )
    assert not [row for row in told if "json" in row and "train.py" not in row]
    assert "(loader)" in "".join(titles)


@pytest.mark.parametrize("number", [signal.SIGURG, signal.SIGTERM])
def test_the_last_lines_are_told_on_a_signal(script, number):
    with started(sys.executable, script(TRACED), "hang", options=("--trace-lines", "50")) as job:
        until(job.stdout, b"hangs")
        # It says so before it hangs.
        wait_for(lambda: "sleep" in Path(f"/proc/{child_of(job.pid)}/wchan").read_text())
        os.killpg(job.pid, number)
        seen = until(job.stdout, b"time.sleep(60)\n").decode()
        assert seen.count("trace of process") == 2


def test_forked_and_spawned_processes_are_traced_apart(script):
    path = script(
        """
        import multiprocessing as mp, os, sys
        def work():
            number = 1
            number += 1
        if __name__ == "__main__":
            for way in ("fork", "spawn"):
                one = mp.get_context(way).Process(target=work)
                one.start()
                one.join()
            sys.exit(1)
        """
    )
    done = run(sys.executable, path, options=("--trace-lines", "3"))
    told = done.stderr.decode()
    assert told.count("train.py:5 work") == 2
    assert len(set(re.findall(r"trace of process (\d+)", told))) >= 3


def test_a_package_that_is_asked_for_is_traced():
    ring = supervisor.Ring("/nonexistent", 4, ("mine",))
    own, other = (
        compile("pass", f"/v/site-packages/{name}/x.py", "exec") for name in ("mine", "torch")
    )
    assert [ring.is_mine(own), ring.is_mine(other)] == [True, False]
    assert ring.is_mine(compile("pass", "/home/ada/train.py", "exec"))
    assert not ring.is_mine(compile("pass", os.__file__, "exec"))
    assert not ring.is_mine(compile("pass", "<frozen importlib>", "exec"))


def test_printflock_keeps_lines_together(script):
    path = script(
        """
        from nodeready_run import printflock as print
        for _ in range(20):
            print("a" * 3000 + "\\n" + "b" * 3000, end="\\n\\n")
        """
    )
    read, write = os.pipe()
    jobs = [
        subprocess.Popen(words(sys.executable, path), stdout=write, env=environment())
        for _ in "12"
    ]
    os.close(write)
    with open(read, "rb") as pipe:
        rows = [row.partition(b"] ")[2][:1] for row in pipe.read().splitlines()]
    assert [job.wait() for job in jobs] == [0, 0]
    assert rows == [b"a", b"b", b""] * 40


def test_stacks_finds_the_program_and_not_its_supervisor(script):
    path = script("print('on', flush=True); import time; time.sleep(60)")
    with started(sys.executable, path) as job:
        until(job.stdout, b"on")
        child = child_of(job.pid)
        pids = [
            job.pid,
            *map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()),
        ]
        every, _ = processes.scan(time.monotonic() + 20)
        seen = [one for one in every if one.pid in pids]
        found = ranks.select(seen, ranks.Selection(), 1)
        assert [(one.process.pid, one.identity.rank) for one in found] == [(child, 3)]


# --- The command line.


@pytest.mark.parametrize(
    "given",
    [(), ("--",), ("--nosuch", "--", "true"), ("--signal", "KILL", "--", "true"),
     ("--signal", "nosuch", "--", "true"), ("--trace-lines", "-1", "--", "true")],
)  # fmt: skip
def test_a_mistake_is_a_line_and_status_2(given):
    done = subprocess.run([sys.executable, FILE, *given], capture_output=True, check=False)
    assert done.returncode == supervisor.USAGE
    assert done.stderr.count(b"error:") == 1


def test_the_command_is_the_file_and_imports_no_engine(tmp_path, script):
    path = script("import os; print(os.environ['PATH'], 'pyinfra' in os.environ)")
    odd = "relative:" + os.environ["PATH"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nodeready", "run", "--", sys.executable, path],
        env=environment(PATH=odd),
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode() == f"[{NODE}:3] {odd} False\n"
    assert b"pyinfra" not in done.stderr
    assert b"gevent" not in done.stderr
    assert b"nodeready.node.run" in done.stderr


def test_the_command_has_the_options_of_the_file():
    from nodeready.cli.run import run as command

    text = subprocess.run([sys.executable, FILE, "--help"], capture_output=True, check=True).stdout
    ours = {name for one in command.params for name in one.opts if name.startswith("--")}
    assert ours == set(re.findall(r"--[a-z-]+", text.decode())) - {"--help", "--"}


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([b"a\n\x1enodeready-block 4\nb\nc\n", b"d\n"], [b"a\n", b"b\nc\n", b"d\n"]),
        ([b"a\n\x1enodere", b"ady-block 4", b"\nb\n", b"c\nd\n"], [b"a\n", b"b\nc\n", b"d\n"]),
        ([b"\x1e", b"a\n"], [b"\x1ea\n"]),
        ([b"\x1enodeready-block x\n"], [b"\x1enodeready-block ", b"x\n"]),
        ([b"\x1enodeready-block \n"], [b"\x1enodeready-block ", b"\n"]),
        ([b"\x1enodeready-block 99999999\n"], [b"\x1enodeready-block ", b"99999999\n"]),
        ([b"\x1enodeready-block 2\na\n\x1enodeready-block 2\nb\n"], [b"a\n", b"b\n"]),
    ],
)
def test_a_block_is_told_in_one_piece(pieces, whole):
    blocks = supervisor.Blocks()
    assert [one for piece in pieces for one in blocks.add(piece, 0.0)] == whole
    assert not blocks.unfinished


def test_a_block_whose_end_never_comes_is_told_in_the_end():
    blocks = supervisor.Blocks()
    assert list(blocks.add(b"\x1enodeready-block 9\nab", 1.0)) == []
    assert blocks.waiting(1.5) == b""
    assert blocks.waiting(1.0 + supervisor.STOOD_S) == b"ab"
    assert not blocks.unfinished
