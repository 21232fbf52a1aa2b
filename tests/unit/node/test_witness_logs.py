"""What the files, pipes and devices behind a process's output show."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from nodeready.node.witnesses import logs

WATCHDOG = (
    "[rank1]:[E1 P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at "
    "work sequence id: 7 PG status: last enqueued work: 9, last completed work: 6\n"
)


@pytest.fixture(autouse=True)
def _forget():
    logs._known.clear()


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


def seen(process):
    return logs.observe(process.pid, os.getuid())


def test_the_file_behind_standard_output(run, tmp_path):
    path = tmp_path / "rank_1.log"
    path.write_text("".join(f"step {n}\n" for n in range(9)) + WATCHDOG)
    os.utime(path, (time.time() - 100,) * 2)
    with path.open("a") as file:
        found = seen(run(stdout=file))
    assert (found.absent, found.path) == ("", str(path))
    assert found.lines[:4] == ("step 5", "step 6", "step 7", "step 8")
    assert 100 <= found.age_s < 160
    (report,) = found.reports
    assert (report.rank, report.enqueued, report.completed) == (1, 9, 6)


def test_of_two_files_the_last_lines_are_of_the_one_written_last(run, tmp_path):
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    out.write_text("step 7\n")
    err.write_text(WATCHDOG)
    os.utime(err, (time.time() - 100,) * 2)
    with out.open("a") as one, err.open("a") as other:
        found = seen(run(stdout=one, stderr=other))
    assert (found.path, found.lines) == (str(out), ("step 7",))
    assert len(found.reports) == 1


def test_an_empty_file_hides_no_other(run, tmp_path):
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    err.write_text("Traceback\n")
    os.utime(err, (time.time() - 100,) * 2)
    out.touch()
    with out.open("a") as one, err.open("a") as other:
        found = seen(run(stdout=one, stderr=other))
    assert (found.path, found.lines) == (str(err), ("Traceback",))


def test_a_log_of_a_hundred_gigabytes_is_read_at_its_end(run, tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"begin\n")
        file.truncate(100 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast \x1b[31mline\x1b]0;title\x07\n" + b"x" * 5000 + b"\n")
        file.flush()
        found = seen(run(stdout=file))
    # Escapes are data here; whoever shows them makes them visible.
    assert found.lines[-2] == "last \x1b[31mline\x1b]0;title\x07"
    assert found.lines[-1] == "x" * logs.MOST_CHARACTERS


def test_what_tee_writes_is_the_log(run, tmp_path):
    path = tmp_path / "tee.log"
    tee = run(stdout=subprocess.DEVNULL, argv=["tee", str(path)], stdin=subprocess.PIPE)
    rank = run(stdout=tee.stdin, stderr=tee.stdin)
    tee.stdin.write(b"step 3\n")
    tee.stdin.flush()
    until = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    found = seen(rank)
    assert (found.path, found.lines) == (str(path), ("step 3",))


def test_the_errors_of_tee_are_not_its_log(run, tmp_path):
    """Its standard error is a file, too, where the shell's is."""
    path, errors = tmp_path / "tee.log", tmp_path / "shell.err"
    with errors.open("w") as error:
        argv = ["tee", str(path)]
        tee = run(stdout=subprocess.DEVNULL, stderr=error, argv=argv, stdin=subprocess.PIPE)
    rank = run(stdout=tee.stdin, stderr=tee.stdin)
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert seen(rank).path == str(path)


def test_filters_between_are_followed(run, tmp_path):
    """train | cat | tee log"""
    path = tmp_path / "tee.log"
    tee = run(stdout=subprocess.DEVNULL, argv=["tee", str(path)], stdin=subprocess.PIPE)
    between = run(stdout=tee.stdin, argv=["cat"], stdin=subprocess.PIPE)
    rank = run(stdout=between.stdin, stderr=between.stdin)
    between.stdin.write(b"step 3\n")
    between.stdin.flush()
    until = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    found = seen(rank)
    assert (found.path, found.lines) == (str(path), ("step 3",))


def test_errors_go_to_the_launchers_errors(run, tmp_path):
    out, err = tmp_path / "job.out", tmp_path / "job.err"
    out.write_text("step 1\n")
    err.write_text(WATCHDOG)
    reading, writing = os.pipe()
    with out.open("a") as one, err.open("a") as other:
        run(stdout=one, stderr=other, pass_fds=[reading], argv=["sleep", "60"])
    os.close(reading)
    found = seen(run(stdout=subprocess.DEVNULL, stderr=writing))
    os.close(writing)
    assert found.path == str(err)
    assert len(found.reports) == 1


def test_what_a_launcher_redirects_is_the_log(run, tmp_path):
    """mpirun and others take the ranks' output through pipes, and write it to their own."""
    path = tmp_path / "job.log"
    path.write_text("[1,0]<stdout>: step 3\n")
    with path.open("a") as file:
        launcher = run(stdout=file, argv=["sleep", "60"], stdin=subprocess.PIPE)
    assert seen(run(stdout=launcher.stdin)).path == str(path)


def named(place, name):
    """A program that sleeps under another's name."""
    shutil.copy("/bin/sleep", place / name)
    return str(place / name)


@pytest.fixture
def step(run, tmp_path):
    """A rank two processes below slurmstepd, which reads its output as nobody of its user's."""
    made = shutil.copy("/bin/bash", tmp_path / "slurmstepd")
    told, telling = os.pipe()
    unread, output = os.pipe()
    script = f"exec 3>&{telling}; bash -c 'echo $$ >&3; sleep 60; :'; :"
    environment = {**os.environ, "SLURM_JOB_ID": "88"}
    how = {"pass_fds": [telling], "env": environment}
    run(stdout=output, stderr=output, argv=[made, "-c", script], **how)
    rank = int(os.read(told, 16))
    for number in (told, telling, unread, output):
        os.close(number)
    yield rank
    os.kill(rank, signal.SIGKILL)


def test_srun_writes_the_log_of_a_step_on_its_first_node(run, step, tmp_path):
    def look():
        logs._known.clear()
        return logs.observe(step, os.getuid())

    def srun(job, output):
        environment = {**os.environ, "SLURM_JOB_ID": job}
        with batch.open("a") as own, output.open("a") as file:
            run(stdout=own, argv=argv, pass_fds=[file.fileno()], env=environment)

    argv = [named(tmp_path, "srun"), "60"]
    out, batch = tmp_path / "train.out", tmp_path / "slurm-88.out"
    out.write_text("0: step 3\n")
    batch.write_text("module load\n")
    srun("87", tmp_path / "other.out")
    assert look().absent == "srun takes its output to another node: look at srun's --output"
    # srun has a second process, which ends the step where the first is killed.
    srun("88", out)
    srun("88", out)
    assert (look().path, look().lines) == (str(out), ("0: step 3",))
    srun("88", batch)
    assert look().absent == "srun takes its output, and its job has 2 sruns here"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda _: os.open("/dev/null", os.O_WRONLY), "its output goes to /dev/null"),
        (lambda _: os.open("/dev/full", os.O_WRONLY), "its output goes to a device"),
        (lambda _: os.openpty()[1], "its output goes to a terminal (/dev/pts/"),
        (lambda _: socket.socketpair()[0].detach(), "its output goes to a socket"),
        (lambda at: _deleted(at / "gone.log"), "the file that it writes was deleted: "),
        (lambda at: _fifo(at / "fifo"), "a pipe that no process of its user reads"),
        (lambda at: _binary(at / "binary"), "what it writes is no text: "),
    ],
    ids=["null", "device", "terminal", "socket", "deleted", "fifo", "binary"],
)
def test_where_there_is_no_log_it_is_told_why(run, tmp_path, make, why):
    number = make(tmp_path)
    found = seen(run(stdout=number, stderr=number))
    os.close(number)
    assert why in found.absent
    assert (found.path, found.lines, found.reports) == ("", (), ())


def test_a_reader_that_writes_no_file_is_named(run):
    reader = run(stdout=subprocess.DEVNULL, argv=["cat"], stdin=subprocess.PIPE)
    found = seen(run(stdout=reader.stdin, stderr=reader.stdin))
    assert f"through a pipe to cat ({reader.pid}), which writes no file" in found.absent


def test_a_search_that_was_cut_off_does_not_say_that_nobody_reads(run, monkeypatch):
    monkeypatch.setattr(logs, "_SEARCH_S", -1)
    reading, writing = os.pipe()
    found = seen(run(stdout=writing, stderr=writing))
    os.close(reading)
    os.close(writing)
    assert "whose reader -1 s did not find" in found.absent


def _deleted(path):
    number = os.open(path, os.O_CREAT | os.O_WRONLY)
    path.unlink()
    return number


def _fifo(path):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    number = os.open(path, os.O_WRONLY)
    os.close(reader)
    return number


def _binary(path):
    path.write_bytes(b"ab\0cd\nef\0\1gh\n")
    return os.open(path, os.O_WRONLY)


def test_a_process_that_has_ended_or_closed_its_output_has_no_log(run):
    ended = run(stdout=subprocess.DEVNULL, argv=["true"])
    ended.wait()
    assert seen(ended).absent == "it has ended"
    closed = run(stdout=subprocess.DEVNULL, argv=["sh", "-c", "exec >&- 2>&-; exec sleep 60"])
    until = time.monotonic() + 20
    while seen(closed).absent != "it has closed its output":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_no_link_and_no_other_users_file_is_opened_for_anybody(run, tmp_path):
    """The descriptor counts, and not what has the name of its file by now."""
    if os.getuid():
        pytest.skip("only root looks at others")
    secret, path = tmp_path / "secret", tmp_path / "log"
    secret.write_text("root's own\n")
    secret.chmod(0o600)
    tmp_path.chmod(0o777)
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o1 == 0:
            above.chmod(above.stat().st_mode | 0o1)
    path.write_text("the user's\n")
    os.chown(path, 65534, 65534)
    with path.open("a") as file:
        rank = run(stdout=file, user=65534, group=65534, extra_groups=[])
    path.unlink()
    path.symlink_to(secret)
    assert "deleted" in logs.observe(rank.pid, 65534).absent
    # Root's file, that a process of the user's has been given for writing.
    with secret.open("a") as file:
        given = run(stdout=file, user=65534, group=65534, extra_groups=[])
    found = logs.observe(given.pid, 65534)
    assert "permission denied" in found.absent
    assert found.lines == ()


def test_python_of_a_node_reads_it(run, tmp_path):
    """No other module than the standard library's is needed."""
    path = tmp_path / "log"
    path.write_text("step 1\n")
    with path.open("a") as file:
        rank = run(stdout=file)
    code = f"from nodeready.node.witnesses import logs; print(logs.observe({rank.pid}, 0).lines)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "('step 1',)\n"
