"""A batch script says that all is done, whether its program has ended well or not."""

import pytest

from tests.unit.triage.test_blind import cause_of

STEPS = [f"step {number} | loss {3 / (1 + number):.3f} | 812 ms" for number in range(60)]
TIMES = [
    f"Time = {number / 100:.2f}  ExecutionTime = {number * 1.7:.1f} s" for number in range(45)
]
HEAD = ["+ cd /scratch/run", "loading the cache ... done", "NCCL version 2.21.5+cuda12.4"]
MPIRUN = [
    "-" * 70,
    "mpirun noticed that process rank 5 with PID 47 on node n2 exited on signal 11 (Segmentation"
    " fault).",
    "-" * 70,
]
LIMIT = (
    "slurmstepd: error: *** JOB 47 ON n1 CANCELLED AT 2026-03-01T12:00:00 DUE TO TIME LIMIT ***"
)
TORCHRUN = [
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "=" * 60,
    "train.py FAILED",
    "-" * 60,
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-03-01_12:00:40",
    "  host      : gpu1",
    "  rank      : 2 (local_rank: 2)",
    "  exitcode  : 1 (pid: 583)",
    "  error_file: <N/A>",
    "=" * 60,
]
AGENT = "INFO:torch.distributed.elastic.agent.server.api:[default] "


def traceback(error, prefix="", function="<module>"):
    lines = "Traceback (most recent call last):", f'  File "/w/train.py", line 9, in {function}'
    return [prefix + line for line in (*lines, "    run()", error)]


SHAPE = traceback("ValueError: wrong shape")
SPAWNED = [
    "-- Process 2 terminated with the following error:",
    *traceback("IndexError: 9", "", "f"),
]

DEAD = {
    "a tail of torchrun": (
        [*STEPS, *traceback("ValueError: x", "[rank2]: "), *TORCHRUN, "Training finished", "OK"],
        "exception", (2,),
    ),
    "or true": ([*STEPS, *SHAPE, "Training complete!"], "exception", ()),
    "a status of tee": ([*STEPS, *SHAPE, "train done, rc=0"], "exception", ()),
    "mpirun": ([*TIMES, *MPIRUN, "archived 3 files", "job done"], "segfault", (5,)),
    "bash, a crash": (
        [*STEPS, "./job.sh: line 12:  47 Segmentation fault  (core dumped) ./solver", "job done"],
        "segfault", (),
    ),
    "bash, a kill": (
        [*STEPS, "./run.sh: line 31: 29 Killed  python train.py", "Training done.", "exit code 0"],
        "signal", (),
    ),
    "a limit": ([*STEPS, LIMIT, "cleaning /tmp ... done", "Job completed"], "limit", ()),
    "an entry point": (
        [*STEPS, *SHAPE, "2026-03-01 12:00:09 INFO entrypoint: Job finished"], "exception", (),
    ),
    "a container": (
        ["FATAL:   container creation failed: no such image", "Job done, results in /out"],
        "environment", (),
    ),
    "a spawned process": (
        [*STEPS, *traceback("torch.multiprocessing.spawn.ProcessRaisedException: "), *SPAWNED,
         "Training finished"],
        "exception", (2,),
    ),
}  # fmt: skip

HEALTHY = {
    "an elastic restart": [
        *STEPS, *traceback("ValueError: x", "[rank2]: "),
        f"{AGENT}Worker group FAILED. 3/3 attempts left; will restart worker group",
        *STEPS, f"{AGENT}worker group successfully finished. Waiting 300 seconds", "Done.",
    ],
    "a second attempt": [
        *TIMES[:20], *MPIRUN, "attempt 1 failed, retrying with a smaller time step",
        *TIMES, "job done",
    ],
    "steps after it": [*SHAPE, *STEPS, "Training finished"],
    "lines without a word of steps after it": [*SHAPE, *TIMES, "Training finished"],
    "a caught error": [*STEPS, *traceback("OSError: x", "", "load"), "Training complete!"],
    "a helper's crash": [
        *STEPS, "Training finished",
        "./job.sh: line 12:  47 Segmentation fault  (core dumped) ./plot out.nc", "job done",
    ],
    "a helper that is stopped": [
        *STEPS, "Training finished",
        "slurmstepd: error: *** STEP 47.1 ON n1 CANCELLED AT 2026-03-01T12:00:00 ***",
        "srun: error: n1: task 0: Terminated", "Done.",
    ],
    "a monitor that is stopped": [
        *STEPS, "./job.sh: line 30: 22 Terminated  tensorboard --logdir runs", "Training finished",
    ],
    "a kill of a helper": [
        *STEPS[:30], "./run.sh: line 9: 29 Killed  ./prefetch.sh", *STEPS[30:], "Training done.",
    ],
    "the words of the program itself": [
        *STEPS, *SHAPE, "Training completed. Do not forget to share your model",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", DEAD)
def test_the_good_words_of_a_script_do_not_hide_an_end(name, tmp_path):
    lines, kind, ranks = DEAD[name]
    cause = cause_of({"files": {"slurm-47.out": [*HEAD, *lines]}}, tmp_path)
    assert (cause.kind, cause.ranks) == (kind, ranks), cause


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_job_survives_is_no_failure(name, tmp_path):
    cause = cause_of({"files": {"slurm-47.out": [*HEAD, *HEALTHY[name]]}}, tmp_path)
    assert (cause.kind, "no failure" in cause.text) == ("unclear", True), cause
