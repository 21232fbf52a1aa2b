"""`nodeready run`: one rank of a job, under nodeready.node.run, which takes our place."""

from __future__ import annotations

import os
import sys

import click

from nodeready.cli.options import option
from nodeready.node import run as supervisor


def _signal(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        supervisor.signal_number(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command()
@option(
    "--log-dir",
    metavar="DIR",
    general=False,
    default="",
    help="Directory for the output (NODE-rankN.RESTART.log) and the flight recorder's dumps.",
)
@option(
    "--signal",
    metavar="NAME",
    default="URG",
    general=False,
    callback=_signal,
    help="Signal on which each Python process writes its stacks; none: no handler.",
)
@option(
    "--trace-lines",
    metavar="N",
    general=False,
    type=click.IntRange(0, 1000000),
    default=0,
    help="Keep the last N executed lines of each thread, written on the signal, on SIGTERM and "
    "when it fails; makes Python slower.",
)
@option(
    "--trace-package",
    metavar="NAME",
    multiple=True,
    general=False,
    help="Also trace this installed package; may be repeated.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_obj
def run(
    path: str | None,
    /,
    *,
    log_dir: str,
    signal: str,
    trace_lines: int,
    trace_package: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    """Start COMMAND, one rank of a job, so that its hang can be debugged.

    It stands where the program stands: `srun nodeready run -- python train.py`, `torchrun
    --no-python nodeready run -- python train.py`. Every line of the output is whole, behind
    [node:rank]; all stacks are written on SIGURG; core files and PyTorch's flight recorder are on.
    Signals reach COMMAND, and the exit status is its own: 128 and the number of the signal that
    ended it, 127 where it is not found, 126 where it cannot be run.
    """
    words = ["--signal", signal, "--trace-lines", str(trace_lines), "--log-dir", log_dir]
    for name in trace_package:
        words += ["--trace-package", name]
    environment = {**os.environ}
    environment.pop("PATH", None)
    if path is not None:
        environment["PATH"] = path
    # Its own process, with nothing of this program in it: it lives as long as the job.
    words = [sys.executable, "-I", "-S", supervisor.__file__, *words, "--", *command]
    os.execve(sys.executable, words, environment)
