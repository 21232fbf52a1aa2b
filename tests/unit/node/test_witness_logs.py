"""A process's log as a witness: the file behind its output, and the watchdog's lines in it."""

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

from nodeready.agent.stacks import processes
from nodeready.agent.witnesses import logs
from nodeready.agent.witnesses.logs import MAX_REPORTS, WatchdogReport, reports
from tests.cases import cases, read_table
from tests.command import wait_for

WATCHDOG, INFO, LOST, JSON, PROMETHEUS = read_table(__file__, "LINES").values()


@pytest.fixture(autouse=True)
def _forget():
    logs._searches.clear()


@pytest.fixture
def run():
    """Starts sleepers with an output of their own."""
    started = []

    def start(*, stdout, stderr=subprocess.DEVNULL, argv=("sleep", "60"), **how):
        started.append(subprocess.Popen(argv, stdout=stdout, stderr=stderr, **how))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def observe(process, uid=None):
    return logs.observe(process.pid, os.getuid() if uid is None else uid)


def test_what_nccl_says_stands_at_the_beginning_and_the_end_of_the_log(run, tmp_path):
    """Among lines of other processes; those of PyTorch name no process."""
    path = tmp_path / "log"
    with path.open("w") as file:
        process = run(stdout=file)
    own = {"node": os.uname().nodename, "pid": process.pid}
    others = "other:1:1 [3] NCCL INFO Using network Socket\n"
    path.write_text(INFO.format(**own) + others + "step\n" * 200_000 + LOST.format(**own))
    nccl = observe(process).nccl
    assert (nccl.rank, nccl.world_size, nccl.network, nccl.state) == (3, 8, "IB", "init")
    assert [(error.key, error.peer) for error in nccl.errors] == [("peer-closed", "gpu2")]
    path.write_text("Last error:\nBootstrap : no socket interface found\n")
    assert [error.key for error in observe(process).nccl.errors] == ["no-interface"]
    path.write_text(others)
    assert observe(process).nccl is None


@pytest.mark.parametrize(("name", "text", "completed"), [
    ("gpu1-pid7.log", JSON % ("0xa", 8, 41) + JSON % ("0xb", 2, 99) + JSON % ("0xa", 8, 42) + "{",
     "AllReduce #42 of communicator 0xa"),
    ("nccl_inspector_metrics_ab-12.prom", PROMETHEUS, "ReduceScatter #9 of communicator 0xd1"),
    ("gpu1-pid7.log", "step\n" * 99_999 + JSON % ("0xa", 8, 43),
     "AllReduce #43 of communicator 0xa"),
    ("gpu1-pid7.log", '{"header":' * 9999 + "{" * 99, ""),
    ("other.log", JSON % ("0xa", 8, 41), ""),
], ids=["json", "prometheus", "large", "broken", "another file"])  # fmt: skip
def test_the_last_collective_of_the_inspector_that_the_process_has_open(
    run, tmp_path, name, text, completed
):
    (tmp_path / name).write_text(text)
    with (tmp_path / name).open("a") as file:
        process = run(stdout=subprocess.DEVNULL, pass_fds=[file.fileno()])
    wait_for(lambda: observe(process).absent == "its output goes to /dev/null")
    nccl = observe(process).nccl
    assert (nccl.completed if nccl else "") == completed


def test_the_file_of_nccls_own_lines_is_read(run, tmp_path):
    environment = {**os.environ, "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p"}
    process = run(stdout=subprocess.DEVNULL, env=environment)
    own = {"node": os.uname().nodename, "pid": process.pid}
    # The environment is set a moment after exec.
    wait_for(lambda: "NCCL_DEBUG_FILE" in (processes.environment_of(process.pid) or {}))
    path = tmp_path / "nccl.{node}.{pid}".format(**own)
    path.write_text(INFO.format(**own))
    assert observe(process).nccl.network == "IB"
    path.unlink()
    os.mkfifo(path)
    assert observe(process).nccl is None


def test_the_file_behind_standard_output(run, tmp_path):
    path = tmp_path / "rank_1.log"
    path.write_text("".join(f"step {n}\n" for n in range(9)) + WATCHDOG)
    os.utime(path, (time.time() - 100,) * 2)
    with path.open("a") as file:
        log = observe(run(stdout=file))
    assert (log.absent, log.path) == ("", str(path))
    assert log.lines[:4] == ("step 5", "step 6", "step 7", "step 8")
    assert 100 <= log.age_s < 160
    (report,) = log.reports
    assert (report.rank, report.enqueued, report.completed) == (1, 9, 6)


@pytest.mark.parametrize(
    ("out_text", "lines"), [("step 7\n", ("step 7",)), ("", (WATCHDOG.rstrip("\n"),))]
)
def test_of_two_files_the_lines_are_of_the_newest_that_has_some(run, tmp_path, out_text, lines):
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    out.write_text(out_text)
    err.write_text(WATCHDOG)
    os.utime(err, (0, 0))
    with out.open("a") as output, err.open("a") as errors:
        log = observe(run(stdout=output, stderr=errors))
    assert (log.path, log.lines) == (str(out if out_text else err), lines)
    assert len(log.reports) == 1


def test_a_log_of_a_hundred_gigabytes_is_read_once_at_its_end(run, tmp_path, monkeypatch):
    read, offsets = os.pread, []
    monkeypatch.setattr(os, "pread", lambda *args: offsets.append(args[2]) or read(*args))
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"begin\n")
        file.truncate(100 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast \x1b[31mline\x1b]0;title\x07\n" + b"x" * 5000 + b"\n")
        file.flush()
        log = observe(run(stdout=file))
    # Escapes are data here; whoever shows them makes them visible.
    assert log.lines[-2] == "last \x1b[31mline\x1b]0;title\x07"
    assert log.lines[-1] == "x" * logs.MAX_CHARACTERS
    assert [offset > 0 for offset in offsets].count(True) == 1


@pytest.mark.parametrize("filters", [0, 1])
def test_the_log_of_tee_is_followed_through_filters(run, tmp_path, filters):
    """train | cat | tee log 2>shell.err: the errors of tee are not its log."""
    path = tmp_path / "tee.log"
    with (tmp_path / "shell.err").open("w") as error:
        argv = ["tee", str(path)]
        tee = run(stdout=subprocess.DEVNULL, stderr=error, argv=argv, stdin=subprocess.PIPE)
    last = tee
    for _ in range(filters):
        last = run(stdout=last.stdin, argv=["cat"], stdin=subprocess.PIPE)
    rank = run(stdout=last.stdin, stderr=last.stdin)
    last.stdin.write(b"step 3\n")
    last.stdin.flush()
    wait_for(lambda: path.exists() and path.read_text() != "")
    log = observe(rank)
    assert (log.path, log.lines) == (str(path), ("step 3",))


def test_the_output_of_a_launcher_is_the_log(run, tmp_path):
    """mpirun and others take the ranks' output through pipes, and write it to their own."""
    out, err = tmp_path / "job.out", tmp_path / "job.err"
    out.write_text("[1,0]<stdout>: step 3\n")
    err.write_text(WATCHDOG)
    reading, writing = os.pipe()
    with out.open("a") as output, err.open("a") as errors:
        launcher = run(stdout=output, stderr=errors, stdin=subprocess.PIPE, pass_fds=[reading])
    os.close(reading)
    assert observe(run(stdout=launcher.stdin)).path == str(out)
    log = observe(run(stdout=subprocess.DEVNULL, stderr=writing))
    os.close(writing)
    assert (log.path, len(log.reports)) == (str(err), 1)


def test_a_rank_in_a_log_of_many_has_its_own_lines(run, tmp_path):
    path = tmp_path / "train.out"
    timeout = "[E P.cpp:1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
    lines = [f"{rank}: step {step} of {rank}" for step in range(4) for rank in (1, 0, 3, 2)]
    path.write_text("\n".join([*lines, f"2: {timeout}", "1: last", "srun: error: x", ""]))
    with path.open("a") as file:
        process = run(stdout=file)
    log = logs.observe(process.pid, os.getuid(), 3, 1)
    assert (log.lines, log.is_own) == (tuple(f"step {step} of 3" for step in range(4)), True)
    assert [(report.rank, report.sequence) for report in log.reports] == [(2, 7)]
    unknown = logs.observe(process.pid, os.getuid(), 9, 1)
    assert (unknown.lines[-1], unknown.is_own) == ("srun: error: x", False)


@pytest.fixture
def step(run, tmp_path):
    """A rank two processes below slurmstepd, which reads its output as nobody of its user's."""
    daemon = shutil.copy("/bin/sh", tmp_path / "slurmstepd")
    number, numbers = os.pipe()
    unread, output = os.pipe()
    environment = {**os.environ, "SLURM_JOB_ID": "88"}
    script = "sh -c 'echo $$ >&0; sleep 60; :'; :"
    run(stdin=numbers, stdout=output, stderr=output, argv=[daemon, "-c", script], env=environment)
    rank = int(os.read(number, 16))
    for end in (number, numbers, unread, output):
        os.close(end)
    yield rank
    os.kill(rank, signal.SIGKILL)


def test_srun_writes_the_log_of_a_step_on_its_first_node(run, step, tmp_path):
    def log():
        logs._searches.clear()
        return logs.observe(step, os.getuid())

    def srun(job, output):
        environment = {**os.environ, "SLURM_JOB_ID": job}
        with batch.open("a") as own, output.open("a") as file:
            run(stdout=own, argv=argv, pass_fds=[file.fileno()], env=environment)

    argv = [shutil.copy("/bin/sleep", tmp_path / "srun"), "60"]
    out, batch = tmp_path / "train.out", tmp_path / "slurm-88.out"
    out.write_text("0: step 3\n")
    batch.write_text("module load\n")
    srun("87", tmp_path / "other.out")
    assert log().absent == "srun takes its output to another node: look at srun's --output"
    # srun has a second process, which ends the step where the first is killed.
    srun("88", out)
    srun("88", out)
    assert (log().path, log().lines) == (str(out), ("0: step 3",))
    srun("88", batch)
    assert log().absent == "srun takes its output, and its job has 2 sruns here"


def _fifo(path):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    number = os.open(path, os.O_WRONLY)
    os.close(reader)
    return number


def _file(path, data):
    path.write_bytes(data)
    number = os.open(path, os.O_WRONLY)
    if not data:
        path.unlink()
    return number


@pytest.mark.parametrize(("why", "output"), [
    ("its output goes to /dev/null", lambda _: os.open("/dev/null", os.O_WRONLY)),
    ("its output goes to a device", lambda _: os.open("/dev/full", os.O_WRONLY)),
    ("its output goes to a terminal (/dev/pts/", lambda _: os.openpty()[1]),
    ("its output goes to a socket", lambda _: socket.socketpair()[0].detach()),
    ("the file that it writes was deleted: ", lambda path: _file(path, b"")),
    ("a pipe that no process of its user reads", _fifo),
    ("what it writes is no text: ", lambda path: _file(path, b"ab\0cd\nef\0\1gh\n")),
])  # fmt: skip
def test_why_there_is_no_log(run, tmp_path, why, output):
    number = output(tmp_path / "log")
    log = observe(run(stdout=number, stderr=number))
    os.close(number)
    assert why in log.absent
    assert (log.path, log.lines, log.reports) == ("", (), ())


def test_a_reader_that_writes_no_file_is_named_if_it_is_found(run, monkeypatch):
    reader = run(stdout=subprocess.DEVNULL, argv=["cat"], stdin=subprocess.PIPE)
    rank = run(stdout=reader.stdin, stderr=reader.stdin)
    words = f"through a pipe to cat ({reader.pid}), which writes no file"
    assert words in observe(rank).absent
    # A search that was cut off does not say that nobody reads.
    monkeypatch.setattr(logs, "_SEARCH_S", -1)
    logs._searches.clear()
    assert "whose reader -1 s did not find" in observe(rank).absent


def test_a_process_that_has_ended_or_closed_its_output_has_no_log(run):
    ended = run(stdout=subprocess.DEVNULL, argv=["true"])
    ended.wait()
    assert observe(ended).absent == "it has ended"
    closed = run(stdout=subprocess.DEVNULL, argv=["sh", "-c", "exec >&- 2>&-; exec sleep 60"])
    wait_for(lambda: observe(closed).absent == "it has closed its output")


@pytest.mark.skipif(os.getuid() != 0, reason="only root looks at others")
def test_no_link_and_no_other_users_file_is_opened_for_anybody(run, tmp_path):
    """The descriptor counts, and not what has the name of its file by now."""
    secret, path = tmp_path / "secret", tmp_path / "log"
    secret.write_text("root's own\n")
    secret.chmod(0o600)
    for above in (tmp_path, *tmp_path.parents):
        above.chmod(above.stat().st_mode | 0o1)
    path.write_text("the user's\n")
    os.chown(path, 65534, 65534)
    with path.open("a") as file:
        rank = run(stdout=file, user=65534, group=65534, extra_groups=[])
    path.unlink()
    path.symlink_to(secret)
    assert "deleted" in observe(rank, 65534).absent
    # Root's file, that a process of the user's has been given for writing.
    with secret.open("a") as file:
        receiver = run(stdout=file, user=65534, group=65534, extra_groups=[])
    log = observe(receiver, 65534)
    assert "permission denied" in log.absent
    assert log.lines == ()


#: What a row leaves out at its end: rank, group, kind, sequence, operation, enqueued, completed.
REST = (None, "", "", None, "", None, None)


@pytest.mark.parametrize("case", cases(__file__, "cases/watchdog_lines.json"))
def test_reports_in_lines_of_real_logs(case):
    """The name of a case is the source of its lines."""
    expected = [WatchdogReport(*row, *REST[len(row) :]) for row in case["reports"]]
    assert list(reports(case["lines"])) == expected


@pytest.mark.parametrize("line", [
    f"Ranks {'1, ' * 1300} failed to pass monitoredBarrie",
    f"[{'11111, ' * 600}] finished collective #",
    "Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=" + "9" * 3000,
    "[PG ID " * 600 + "watchdog",
    "[rank99999999999999999999]: Watchdog caught collective operation timeout: SeqNum=--1",
])  # fmt: skip
def test_a_line_that_is_made_to_take_long_takes_none(line):
    began = time.process_time()
    reports([line] * 20)
    assert time.process_time() - began < 5
    # No more are told than a node can tell.
    text = "[rank{0}]: Timed out waiting 1ms for recv operation to complete"
    assert len(reports(text.format(n) for n in range(2 * MAX_REPORTS))) == MAX_REPORTS
