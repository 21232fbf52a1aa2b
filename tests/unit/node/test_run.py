"""`nodeready run` with real processes: lines, logs, signals, ends, stacks."""

import contextlib
import os
import pty
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nodeready import knowledge
from nodeready.agent import run as supervisor
from nodeready.agent import runtime
from nodeready.agent.stacks import processes, ranks
from nodeready.fleet.transport import bundle
from nodeready.subjects.debug_tools import facts
from tests.cases import cases, with_table
from tests.command import wait_for
from tests.helpers import executable
from tests.paths import DOCS

FILE = Path(supervisor.__file__)
NODE = supervisor.node_name({})


@pytest.fixture
def python() -> str:
    """The Python of both processes; tests/lab/test_units_pythons.py has others."""
    return sys.executable


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name}
    return {**kept, "RANK": "3", **more}


def words(*command: str, python: str = sys.executable, options: tuple[str, ...] = ()):
    return [python, "-I", "-S", str(FILE), *options, *command]


def run(*command: str, python=sys.executable, options=(), env=None, **more):
    how = {"env": env or environment(), "capture_output": True, "timeout": 60, **more}
    return subprocess.run(words(*command, python=python, options=options), check=False, **how)


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@contextlib.contextmanager
def started(*command: str, options=(), env=None, python=sys.executable, **more):
    """A supervisor in a group of its own, as torchrun starts it; ended with all of its own."""
    job = subprocess.Popen(
        words(*command, options=options, python=python), env=env or environment(),
        start_new_session=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more},
    )  # fmt: skip
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        if job.stdout:
            job.stdout.close()


def until(stream, word: bytes, limit_s: float = 20) -> bytes:
    """The output of the stream up to the word and a little beyond."""
    text = b""
    end = time.monotonic() + limit_s
    while word not in text:
        ready, _, _ = select.select([stream], [], [], max(0, end - time.monotonic()))
        assert ready, f"no {word!r} in {text!r}"
        data = os.read(stream.fileno(), 65536)
        assert data, f"ended without {word!r}: {text!r}"
        text += data
    return text


def children(pid: int) -> list[int]:
    """The children of a supervisor: the program, and after it the bystander."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def bystander(pid: int) -> int:
    """The bystander of a supervisor; 0 while it is started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        last = children(pid)[-1]
        if b"sleep\0" in Path(f"/proc/{last}/cmdline").read_bytes():
            return last
    return 0


@with_table("variables, rank")
def test_the_rank_is_the_launchers(variables, rank):
    assert supervisor.rank_of(variables) == rank


def test_the_launchers_variables_are_those_that_stacks_knows():
    assert tuple(rank for rank, _, _ in processes.FAMILIES) == supervisor.RANKS


def test_stacks_finds_the_program_and_not_its_supervisor(script):
    path = script("print('on', flush=True); import time; time.sleep(60)")
    with started(sys.executable, path) as job:
        until(job.stdout, b"on")
        program, *_ = pids = children(job.pid)
        rows, _ = processes.scan(time.monotonic() + 20)
        rows = [row for row in rows if row.pid in (job.pid, *pids)]
        found = ranks.select(rows, ranks.Selection(), 1)
        assert [(rank.process.pid, rank.identity.rank) for rank in found] == [(program, 3)]


def lines_of(*parts: bytes) -> bytes:
    lines = supervisor.LineCutter(b"[n:0] ", terminal=False)
    shown = b"".join(line for part in parts for line in lines.add(part, 100.0))
    return shown + b"".join(lines.flush(101.0))


@pytest.mark.parametrize(("parts", "shown"), [
    ((b"one\ntw", b"o\n"), b"[n:0] one\n[n:0] two\n"),
    ((b"no end",), b"[n:0] no end\n"),
    ((b"\n\n",), b"[n:0] \n[n:0] \n"),
    ((b"\xff\x00\x1b[31mred\n",), b"[n:0] \xff\x00\x1b[31mred\n"),
    ((b"dos\r\n",), b"[n:0] dos\r\n"),
    ((b"\r 10%\r 20%", b"\r100%\n"), b"[n:0] 100%\n"),
    ((b" 10%\r 20%\r",), b"[n:0]  20%\n"),
    ((), b""),
    ((b"x" * supervisor.MAX_LINE_BYTES + b"\n",),
     b"[n:0] " + b"x" * supervisor.MAX_LINE_BYTES + b"\n"),
    # A line beyond the limit is several lines.
    ((b"x" * supervisor.MAX_LINE_BYTES + b"y\n",),
     b"[n:0] " + b"x" * supervisor.MAX_LINE_BYTES + b"\n[n:0] y\n"),
])  # fmt: skip
def test_output_becomes_whole_lines(parts, shown):
    assert lines_of(*parts) == shown


def test_an_unfinished_line_is_written_after_a_while_and_a_bar_now_and_then():
    terminal = supervisor.LineCutter(b"[n:0] ", True)
    assert b"".join(terminal.add(b"name: ", 0.0)) == b"[n:0] name: "
    assert b"".join(terminal.add(b"ada\n\r 10%", 0.0)) == b"ada\n\r[n:0]  10%"
    assert b"".join(terminal.add(b"\r 20%\n", 0.0)) == b"\r[n:0]  20%\n"
    lines = supervisor.LineCutter(b"> ", False)
    assert lines.add(b"(Pdb) ", 10.0) == []
    assert lines.overdue(9.9 + supervisor.UNFINISHED_S) == []
    assert lines.overdue(10.0 + supervisor.UNFINISHED_S) == [b"> (Pdb) \n"]
    assert lines.add(b"\r 1%\r 2%", 14.0) == []
    assert lines.add(b"\r 3%", 25.0) == [b">  3%\n"]
    assert lines.add(b"\r 4%", 26.0) == []
    first = supervisor.LineCutter(b"> ", False)
    assert first.add(b"\r 1%", 1.0) == []
    assert first.add(b"\r 2%", 30.0) == [b">  2%\n"]


def test_lines_are_written_in_pieces_that_a_pipe_takes_at_once():
    lines = [b"a" * 96, b"b" * 4000, b"c", b"d" * 5000, b"e"]
    assert list(supervisor._batches(lines)) == [lines[0] + lines[1], *lines[2:]]


@pytest.mark.parametrize(("pieces", "whole"), [
    ([b"a\n\x1enodeready-block 4\nb\nc\n", b"d\n"], [b"a\n", b"b\nc\n", b"d\n"]),
    ([b"a\n\x1enodere", b"ady-block 4", b"\nb\n", b"c\nd\n"], [b"a\n", b"b\nc\n", b"d\n"]),
    ([b"\x1e", b"a\n"], [b"\x1ea\n"]),
    ([b"\x1enodeready-block x\n"], [b"\x1enodeready-block ", b"x\n"]),
    ([b"\x1enodeready-block \n"], [b"\x1enodeready-block ", b"\n"]),
    ([b"\x1enodeready-block 99999999\n"], [b"\x1enodeready-block ", b"99999999\n"]),
    ([b"\x1enodeready-block 2\na\n\x1enodeready-block 2\nb\n"], [b"a\n", b"b\n"]),
])  # fmt: skip
def test_a_block_is_written_in_one_piece(pieces, whole):
    blocks = supervisor.BlockCutter()
    assert [block for piece in pieces for block in blocks.add(piece, 0.0)] == whole
    assert not blocks.held
    # One without its end is written after a while.
    assert list(blocks.add(b"\x1enodeready-block 9\nab", 1.0)) == []
    assert blocks.overdue(0.9 + supervisor.UNFINISHED_S) == b""
    assert blocks.overdue(1.0 + supervisor.UNFINISHED_S) == b"ab"
    assert not blocks.held


def test_ranks_that_share_a_pipe_tear_neither_lines_nor_blocks(script):
    path = script(
        """
        import os
        from nodeready_run import printflock
        rank = os.environ["RANK"]
        for _ in range(8):
            os.write(1, (rank * 10000).encode() + b"\\n")
            printflock(rank * 1500 + "\\n" + rank * 1500, end="\\n\\n")
        """
    )
    read, write = os.pipe()
    envs = [environment(RANK=f"{rank}1") for rank in range(4)]
    jobs = [subprocess.Popen(words(sys.executable, path), stdout=write, env=env) for env in envs]
    os.close(write)
    with open(read, "rb") as pipe:
        rows = pipe.read().decode().splitlines()
    assert [job.wait() for job in jobs] == [0] * 4
    shown = [re.fullmatch(rf"\[{NODE}:(\d\d)\] ((?:\1)*)", row) for row in rows]
    assert all(shown), [row[:100] for row in rows]
    sizes = [(match[1], len(match[2])) for match in shown]
    assert sorted(size for _, size in sizes) == sorted([20000, 3000, 3000, 0] * 8 * 4)
    ends = [place for place, (_, size) in enumerate(sizes) if not size]
    assert all(sizes[at - 2 : at] == [(sizes[at][0], 3000)] * 2 for at in ends)


def test_nothing_of_a_crash_is_lost_when_the_reader_is_slow(script):
    """More than a pipe holds: the supervisor cannot write on, before the end or after it."""
    path = script("import os; os.write(1, b'x' * 100_000 + b'\\nlast\\n'); os.abort()")
    with started(sys.executable, path, env=environment(PYTHONFAULTHANDLER="")) as job:
        wait_for(lambda: children(job.pid) != [])
        program = children(job.pid)[0]
        wait_for(lambda: runtime.status(program).state in ("Z", ""))
        text = job.stdout.read()
        assert job.wait() == 128 + signal.SIGABRT
    assert b"x" * 100_000 in text
    assert text.endswith(f"[{NODE}:3] last\n".encode())


def test_a_grandchild_that_keeps_the_pipe_does_not_keep_us_and_nothing_is_left(tmp_path):
    begun = time.monotonic()
    env = environment(TMPDIR=str(tmp_path))
    done = run("sh", "-c", 'ls "$TMPDIR"; sleep 50 & echo $!; exit 4', env=env)
    assert (done.returncode, done.stdout.count(b"nodeready-run-")) == (4, 1)
    assert time.monotonic() - begun < 30
    os.kill(int(done.stdout.split()[-1]), signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_has_left_goes_with_the_next(tmp_path):
    """Not what a run still uses, however old it is, and nothing of others."""
    env = environment(TMPDIR=str(tmp_path))
    (tmp_path / "nodeready-run-file").touch()
    with started("sleep", "9", env=env) as killed, started("sleep", "9", env=env) as alive:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 3)
        killed.kill()
        killed.wait()
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        assert run("true", env=env).returncode == 0
        names = {path.name for path in tmp_path.iterdir()}
        assert (len(names), "nodeready-run-file" in names) == (2, True)
        alive.terminate()
        alive.wait()


def test_a_terminal_stays_one_and_a_file_is_none(script):
    path = script("import sys; print(sys.stdout.isatty(), sys.stderr.isatty())")
    master, slave = pty.openpty()
    with started(sys.executable, path, stdout=slave, stderr=subprocess.DEVNULL) as job:
        assert job.wait(20) == 0
    os.close(slave)
    assert b"True False" in os.read(master, 1000)
    os.close(master)


def test_a_program_whose_output_nobody_reads_fails_as_without_us(script):
    with started(sys.executable, script("while True: print('x' * 100)")) as job:
        until(job.stdout, b"xxx")
        job.stdout.close()
        job.stdout = None
        assert job.wait(20) == 1  # BrokenPipeError


def test_a_restart_gets_a_log_of_its_own(tmp_path):
    logs = tmp_path / "logs"
    for restart in ("0", "0", "2"):
        env = environment(TORCHELASTIC_RESTART_COUNT=restart)
        command = ("sh", "-c", "printf 'a\\rb'; echo e >&2")
        assert run(*command, options=("--log-dir", str(logs)), env=env).returncode == 0
    texts = {path.name: path.read_bytes() for path in logs.iterdir()}
    assert texts.keys() == {f"{NODE}-rank3.{number}.log" for number in (0, 1, 2)}
    assert {*texts.values()} <= {b"a\rbe\n", b"e\na\rb"}


def test_a_full_disk_ends_the_log_alone():
    complaints = []
    log = supervisor.RankLogFile(complaints.append)
    log._fd, log.path = os.open("/dev/full", os.O_WRONLY), "/logs/x.log"
    log.write(b"a\n")
    log.write(b"b\n")
    assert complaints == ["the log stops here: /logs/x.log: No space left on device"]


@pytest.mark.parametrize("case", cases(__file__, "cases/run.json"))
def test_the_status_and_the_streams_are_the_programs(case, tmp_path):
    # A core goes where the program works.
    stdin = case.get("stdin", "").encode()
    done = run(*case["command"], options=case.get("options", ()), input=stdin, cwd=tmp_path)
    assert done.returncode == case.get("status", 0)
    for stream, text in (("out", done.stdout), ("err", done.stderr)):
        assert text.decode() == (f"[{NODE}:3] {case[stream]}" if stream in case else "")


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
COUNTS = f"""
import os, signal, sys
for number in {tuple(map(int, SIGNALS))}:
    signal.signal(number, lambda number, frame: os.write(1, b"got %d.\\n" % number))
os.write(1, b"ready\\n")
sys.stdin.readline()
"""


@pytest.mark.parametrize("whom", ["us", "group", "each"])
def test_a_signal_arrives_once_whomever_it_was_sent_to(script, whom):
    """torchrun signals the group, Slurm each process of the step, a person us."""
    with started(sys.executable, script(COUNTS), stdin=subprocess.PIPE) as job:
        text = until(job.stdout, b"ready")
        for number in SIGNALS:
            wait_for(lambda: bystander(job.pid) > 0)
            before = bystander(job.pid)
            if whom == "group":
                os.killpg(job.pid, number)
            for pid in {"us": [job.pid], "each": [*children(job.pid), job.pid]}.get(whom, []):
                os.kill(pid, number)
            text += until(job.stdout, b"got %d." % number)
            if whom != "us":
                # The supervisor has noticed that the program has it already.
                wait_for(lambda: bystander(job.pid) not in (0, before))  # noqa: B023
        text += job.communicate(b"end\n", timeout=20)[0]
        assert job.returncode == 0
    assert re.findall(rb"got (\d+)", text) == [b"%d" % number for number in SIGNALS]


def test_a_hangup_that_our_starter_ignores_is_ignored_and_there_is_no_orphan_after_sigkill():
    text = "kill -HUP $$; echo on; exec sleep 60"
    ignores = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    with started("sh", "-c", text, **ignores) as job:
        until(job.stdout, b"on")
        program = children(job.pid)[0]
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        wait_for(lambda: runtime.status(program).state in ("", "Z"))


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
        program = children(job.pid)[0]
        wait_for(lambda: runtime.status(program).state == "S")
        os.killpg(job.pid, signal.SIGURG)
        text = until(job.stdout, b"in <module>").decode()
        assert f'[{NODE}:3]   File "{path}", line 10 in stuck\n' in text
        assert "in loads" in text
        assert job.poll() is None
        os.kill(program, signal.SIGKILL)
        assert job.wait(20) == 128 + signal.SIGKILL


def test_the_users_own_path_and_sitecustomize_stay(tmp_path, script, python):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("print('my site')\n")
    (tmp_path / "mine" / "helper.py").write_text("word = 'help'\n")
    path = script("import helper, sitecustomize; print(helper.word, sitecustomize.__file__)")
    done = run(python, path, python=python, env=environment(PYTHONPATH=str(tmp_path / "mine")))
    assert done.stderr == b""
    shown = ("my site", f"help {tmp_path}/mine/sitecustomize.py")
    assert done.stdout.decode().splitlines() == [f"[{NODE}:3] {line}" for line in shown]


@pytest.fixture
def header(tmp_path):
    """FlightRecorder.hpp of a PyTorch in `tmp_path`."""
    path = tmp_path / "torch/include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
    path.parent.mkdir(parents=True)
    path.write_text("{TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE} TORCH_FR_DUMP_TEMP_FILE")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.15.0'\n")
    return path


def test_limits_and_variables_are_set_where_they_are_not(tmp_path, script, header):
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
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    done = run(
        *(sys.executable, path),
        env=environment(PYTHONPATH=str(tmp_path), PYTHONUNBUFFERED="x"),
        options=("--log-dir", str(tmp_path / "logs")),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, hard)),
    )
    assert [row.partition("] ")[2] for row in done.stdout.decode().splitlines()] == [
        "True",
        "PYTHONFAULTHANDLER=1",
        "PYTHONUNBUFFERED=x",
        "TORCH_FR_BUFFER_SIZE=2000",
        f"TORCH_FR_DUMP_TEMP_FILE={tmp_path}/logs/recorder.0/comm_lib_trace_rank_",
    ]


def test_an_older_torch_has_other_variables(tmp_path, header):
    header.unlink()
    header.with_name("NCCLUtils.hpp").write_text("TORCH_NCCL_TRACE_BUFFER_SIZE")
    variables = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert supervisor.recorder_variables(str(tmp_path / "torch"), {}, "") == variables
    assert supervisor.recorder_variables(str(tmp_path / "torch"), variables, "") == {}
    assert supervisor.recorder_variables(str(tmp_path), {}, "/x") == {}


# --- Errors of a GPU.


SHOW_GPU = """
import os
for name in sorted(os.environ):
    if name.endswith(("_VISIBLE_DEVICES", "_LAUNCH_BLOCKING", "_SERIALIZE_KERNEL", "_CACHING")):
        print(name + "=" + os.environ[name])
"""


@pytest.fixture
def shown(tmp_path, script, header):
    """What a rank has under these options and this version.py."""

    def start(*options, version="__version__ = '2.15.0'\ncuda = '13.2'\n", **more):
        (tmp_path / "torch/version.py").write_text(version)
        kept = {k: v for k, v in environment(**more).items() if not k.endswith("_VISIBLE_DEVICES")}
        done = run(sys.executable, script(SHOW_GPU), options=options,
                   env={**kept, "PYTHONPATH": str(tmp_path)})  # fmt: skip
        prefix = f"[{NODE}:3] "
        lines = done.stdout.decode().splitlines()
        return ([line.removeprefix(prefix) for line in lines], done.returncode,
                done.stderr.decode().removeprefix(prefix))  # fmt: skip

    return start


@with_table("version, nccl, wanted")
def test_each_launch_waits_where_nccl_does_not_hang_with_it(
    tmp_path, shown, version, nccl, wanted
):
    if nccl:
        (tmp_path / f"nvidia_nccl_cu11-{nccl}.dist-info").mkdir()
    lines, status, errors = shown("--sync-cuda", version=version + "\n")
    if wanted is not None:
        assert (lines, status, errors) == ([*wanted], 0, "")
        return
    assert (lines, status) == ([], supervisor.NOT_RUN)
    assert re.fullmatch(r"nodeready run: --sync-cuda: NCCL 2\.\d+\.\d hangs .+ newer\n", errors)


def test_the_range_that_hangs_is_that_of_the_table():
    row = knowledge.read("environment_values")["cuda-launch-blocking-hangs"]
    assert tuple(map(tuple, row["nccl"])) == supervisor.BLOCKING_HANGS
    for version, hangs in (("2.12.9", False), ("2.13", True), ("2.16.9", True), ("2.17.1", False)):
        assert bool(supervisor.sync_hazard("", version)) is hangs


def test_no_gpu_is_visible(shown):
    lines, status, _ = shown("--on-cpu", HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="0,1")
    hidden = ["CUDA_VISIBLE_DEVICES=", "HIP_VISIBLE_DEVICES=-1", "ROCR_VISIBLE_DEVICES="]
    assert (lines, status) == (hidden, 0)


def test_the_program_runs_below_the_sanitizer_or_a_line_says_what_is_missing(tmp_path, shown):
    lines, status, errors = shown("--sanitizer", PATH="/usr/bin:/bin", CUDA_HOME=str(tmp_path))
    assert (lines, status) == ([], supervisor.NOT_FOUND)
    assert errors == (
        "nodeready run: --sanitizer: compute-sanitizer is not found: install CUDA's toolkit, and "
        "put its bin into PATH\n"
    )
    script = 'echo "========= $1 $2"\nshift 2\nexec "$@"'
    executable(tmp_path / "bin/compute-sanitizer", script)
    lines, status, errors = shown("--sanitizer", PATH="/usr/bin:/bin", CUDA_HOME=str(tmp_path))
    wanted = ["========= --target-processes all", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    assert (lines, status, errors) == (wanted, 0, "")


# --- The watch beside a job.


@pytest.fixture
def watch(tmp_path):
    """A Python beside a `nodeready` that says how it was started, and waits."""
    link = tmp_path / "bin/python3"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    script = f'echo "$@" "${{RANK-none}}" $$ >{tmp_path}/said\necho there\nsleep 9'
    executable(link.with_name("nodeready"), script)
    return str(link), tmp_path / "said"


MASTER = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}


@with_table("variables, wanted")
def test_rank_0_starts_a_watch_that_ends_with_it(watch, variables, wanted):
    python, said = watch
    kept = {k: v for k, v in environment().items() if not k.startswith(("SLURM_", "MASTER_"))}
    with started("sleep", "1.5", options=("--watch",), python=python,
                 env={**kept, **variables}) as job:  # fmt: skip
        output, _ = job.communicate(timeout=20)
    assert job.returncode == 0
    assert output.decode() == ("" if wanted is None else f"[{NODE}:0] there\n")
    if wanted is None:
        assert not said.exists()
        return
    line, _, pid = said.read_text().rstrip().rpartition(" ")
    assert line == wanted
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_without_a_watch_a_line_says_why_and_the_job_goes_on(watch):
    python, _ = watch
    program = Path(python).with_name("nodeready")
    for change, variables, why in (
        (program.exists, {}, "the job has no name: set SLURM_JOB_ID, TORCH"),
        (lambda: program.write_text("#!/no/such/python\n"), MASTER,
         f"{program}: No such file or directory\n"),
        (program.unlink, {"SLURM_JOB_ID": "4711"}, "nodeready is not in PATH"),
    ):  # fmt: skip
        change()
        env = {"RANK": "0", "PATH": "/bin", **variables}
        done = run("echo", "on", options=("--watch",), python=python, env=env)
        assert done.stdout.endswith(b"on\n")
        assert f"no watch: {why}" in done.stderr.decode()


@pytest.mark.parametrize("variables", [
    {}, {"SLURM_JOB_ID": "7", **MASTER}, {"TORCHELASTIC_RUN_ID": "none", **MASTER}, MASTER,
    {"TORCHELASTIC_RUN_ID": "x"}, {"MASTER_ADDR": "gpu1"},
])  # fmt: skip
def test_the_jobs_name_is_that_of_stacks(variables):
    process = processes.ScannedProcess(7, 1, environment=variables)
    assert supervisor.job_of(variables) == next(iter(ranks.jobs(process)), "")


@pytest.mark.parametrize(("word", "status"), [("fine", 0), ("kill", 128 + 9)])
def test_pythons_own_trace_is_in_the_log_up_to_the_last_line(
    script, tmp_path, python, word, status
):
    """The command of docs/run.md: own lines of all threads, and none of the library."""
    path = script(
        """
        import json, os, sys, threading
        def step(number):
            return number + json.loads("1")
        thread = threading.Thread(target=step, args=(1,))
        thread.start()
        thread.join()
        if "kill" in sys.argv:
            os.kill(os.getpid(), 9)
        """
    )
    (line,) = re.findall(r"python (-m trace .*) train\.py", (DOCS / "run.md").read_text())
    log_dir = tmp_path / "logs"
    done = run(python, *shlex.split(line), path, word, python=python,
               options=("--log-dir", str(log_dir)))  # fmt: skip
    assert done.returncode == status
    (log,) = log_dir.glob("*.log")
    lines = log.read_text().splitlines()
    # Python 3.13 prints a row in parts, and another thread's part may stand between them.
    assert any("train.py(4)" in row for row in lines)
    assert any("return number + json.loads" in row for row in lines)
    assert not [row for row in lines if re.search(r" (decoder|threading)\.py\(", row)]
    assert ("os.kill" in lines[-1]) == bool(status)


def test_a_mistake_is_a_line_and_status_2(capsys):
    for line in ("", "--", "--nosuch -- true", "--signal KILL -- true", "--signal nosuch -- true"):
        with pytest.raises(SystemExit) as end:
            supervisor.main(line.split())
        assert end.value.code == supervisor.USAGE
        assert capsys.readouterr().err.count("error:") == 1, line


def test_the_command_is_the_file_and_imports_no_engine(script):
    path = script("import os; print(os.environ['PATH'], 'pyinfra' in os.environ)")
    odd = "relative:" + os.environ["PATH"]
    argv = [
        sys.executable, *["-X", "importtime", "-m", "nodeready", "run", "--"], sys.executable,
        path,
    ]  # fmt: skip
    done = subprocess.run(argv, env=environment(PATH=odd), capture_output=True, check=False)
    assert done.stdout.decode() == f"[{NODE}:3] {odd} False\n"
    engines = ("pyinfra", "gevent", "nodeready.agent.run")
    assert [name for name in engines if name in done.stderr.decode()] == ["nodeready.agent.run"]


def test_the_command_has_the_options_of_the_file(capsys):
    from nodeready.cli.run import run as command

    with pytest.raises(SystemExit):
        supervisor.main(["--help"])
    options = {name for one in command.params for name in one.opts if name.startswith("--")}
    assert options == set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help", "--"}


@pytest.mark.parametrize("deployed", [False, True])
def test_the_files_on_a_node_start_a_rank_too(tmp_path, deployed):
    """The bundle; and nodeready-run, which starts the first new enough Python."""
    if deployed:
        start = [executable(tmp_path / "nodeready-run", facts.content().decode())]
        executable(tmp_path / "python3", "exit 1")
        (tmp_path / "python3.9").symlink_to(sys.executable)
        path = str(tmp_path)
    else:
        program = tmp_path / "nodeready.pyz"
        program.write_bytes(bundle.build())
        start, path = [sys.executable, "-I", str(program), "run"], os.environ["PATH"]
    code = "import nodeready_run as r, sys; print(r.MAX_LINE_BYTES, sys.argv[1:]); sys.exit(7)"
    words = [*start, sys.executable, "-c", code, "--local"]
    env = environment(PATH=path)
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"[{NODE}:3] {supervisor.MAX_LINE_BYTES} ['--local']\n"


def test_without_a_new_enough_python_no_rank_starts():
    words = ["/bin/sh", "-c", facts.content().decode(), "nodeready-run", "true"]
    done = subprocess.run(words, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "nodeready run: no Python 3.9 or newer\n")
