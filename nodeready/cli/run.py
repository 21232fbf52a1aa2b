"""`nodeready run`: replace this process by nodeready.agent.run, which starts one rank of a job."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import click

from nodeready.agent import run as supervisor
from nodeready.cli.options import command
from nodeready.runs.options import flag, opt


def _read_signal(name: str) -> str:
    """The value of ``--signal``. Raises BadParameter."""
    try:
        supervisor.signal_number(name)
    except ValueError as error:
        raise click.BadParameter(
            str(error), click.get_current_context(), param_hint="'--signal'"
        ) from None
    return name


@dataclass(kw_only=True)
class RunWords:
    log_dir: str = opt(
        "--log-dir DIR",
        "Directory for the output (NODE-rankN.RESTART.log) and the flight recorder's dumps.",
        general=False, default="", show_default=False,
    )  # fmt: skip
    signal: str = opt(
        "--signal NAME",
        "Signal on which each Python process writes its stacks; none: no handler.",
        default="URG", general=False, read=_read_signal,
    )  # fmt: skip
    debug_rank: int | None = opt(
        "--debug-rank N", "Rank that stacks --attach N can debug.", bounds=(0, None), general=False
    )
    sync_cuda: bool = flag(
        "--sync-cuda",
        "Each launch waits for its kernel, so that a GPU's error has the right stack.",
        general=False,
    )
    on_cpu: bool = flag(
        "--on-cpu", "Hide all GPUs, so that COMMAND runs on the CPU.", general=False
    )
    sanitizer: bool = flag("--sanitizer", "Run COMMAND under compute-sanitizer.", general=False)
    watch: bool = flag(
        "--watch", "Keep the evidence of a hang before the job's timeout.", general=False
    )


# Options end at the first word of COMMAND: its options are not nodeready's.
@command(RunWords, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(command: tuple[str, ...], options: RunWords) -> None:
    """Start COMMAND, one rank of a job, so that its hang can be debugged.

    Put it in front of the program: `srun nodeready run python train.py`, `torchrun --no-python
    nodeready run python train.py`. Lines of the output are never mixed, and begin with
    [node:rank]; SIGURG writes all stacks; core files and PyTorch's flight recorder are on. Signals
    reach COMMAND, and its exit status is returned: 128 plus the number of the signal that ended
    it, 127 if it is not found, 126 if it cannot be run.
    """
    words = ["--signal", options.signal, "--log-dir", options.log_dir]
    if options.debug_rank is not None:
        words += ["--debug-rank", str(options.debug_rank)]
    for name in ("sync_cuda", "on_cpu", "sanitizer", "watch"):
        words += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    environment = {name: value for name, value in os.environ.items() if name != "PATH"}
    if (path := click.get_current_context().obj) is not None:
        environment["PATH"] = path
    # exec frees the memory of this program: the supervisor lives as long as the job.
    words = [sys.executable, "-I", "-S", supervisor.__file__, *words, "--", *command]
    os.execve(sys.executable, words, environment)
