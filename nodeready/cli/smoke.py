"""`nodeready smoke`: one collective over all nodes; names the faulty node, GPU or link."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from nodeready.cli.conversations import ask_password
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.options import (
    Refused,
    command,
    hostfile_options,
    inventory_argument,
    option,
    report_options,
    span_option,
    transport_options,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import refuse_unwritable, write_hostfile
from nodeready.cli.targets import TargetOptions, select_targets
from nodeready.cli.values import policy_settings
from nodeready.runs.smoke.document import code

if TYPE_CHECKING:
    from nodeready.runs.smoke.document import SmokeReport

#: Seconds of the budget to end the processes that still run on the nodes, and to report.
_RESERVE_S = 3
#: What --engine takes; auto is the best that all nodes have.
_ENGINES = ("auto", "torch", "torch:gloo", "torch:nccl", "nccl-tests", "pairs")
#: More GPUs than any node has.
_MAX_GPUS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _gpus(words: str) -> tuple[int, ...] | int | None:
    """``--gpus``: None for all, a number of GPUs, or their indices. Raises Refused."""
    if words == "all":
        return None
    if re.fullmatch(r"[0-9]{1,3}", words) and int(words) <= _MAX_GPUS:
        return int(words)
    ranks: list[int] = []
    for part in words.split(",") if "," in words or "-" in words else ():
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MAX_GPUS:
            break
        ranks += range(first, last + 1)
    else:
        if ranks and len({*ranks}) == len(ranks):
            return tuple(ranks)
    raise Refused(
        f"--gpus {words}: must be all, a number of GPUs (4), or at least two different indices "
        "(0,3 or 0-3)"
    )


def _prefix(words: str) -> tuple[str, ...]:
    """``--prefix``, as a shell splits it. Raises Refused."""
    try:
        parts = tuple(shlex.split(words))
    except ValueError as error:
        raise Refused(f"--prefix {words}: {str(error).lower()}") from None
    if not parts:
        raise Refused("--prefix: names no command, such as 'apptainer exec --nv job.sif'")
    return parts


def _environment(rows: tuple[str, ...]) -> tuple[str, ...]:
    """The values of ``--env``. Raises Refused."""
    variables: dict[str, str] = {}
    for row in rows:
        name, equals, _ = row.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise Refused(f"--env {row}: must be NAME=VALUE")
        if "\n" in row or "\0" in row:
            raise Refused(f"--env {name}: its value must be one line")
        if name in variables:
            raise Refused(f"--env {name}: is given twice")
        variables[name] = row
    return tuple(variables.values())


def _python(path: str) -> str:
    """``--python``. Raises Refused."""
    if not re.fullmatch(r"/[^\x00-\x1f\x7f]*[^/\x00-\x1f\x7f]", path):
        raise Refused(
            f"--python {path}: must be an absolute path: it is started on the nodes, not here"
        )
    return path


def _good_slots(document: SmokeReport, declared_slots: dict[str, int]) -> dict[str, int]:
    """Good node -> its slots: as the inventory declares, as the node reports, its GPUs, or 1."""
    nodes = {node.name: node for node in document.nodes}
    return {
        name: declared_slots.get(name) or nodes[name].slots or len(nodes[name].gpus) or 1
        for name in document.go
    }


@command()
@inventory_argument
@option("--user", metavar="NAME", help="Run the tests as this user, who will run the job.")
@option(
    "--gpus",
    default="all",
    metavar="all|N|0,3",
    general=False,
    help="GPUs of each node: all, a number, or indices; 0: none.",
)
@option(
    "--ranks",
    type=click.IntRange(1, 256),
    default=2,
    metavar="N",
    help="Ranks per node without GPUs.",
)
@span_option(
    "--budget",
    minimum_s=10,
    maximum_s=86400,
    is_whole=True,
    default="5m",
    general=False,
    help="Maximum time in all.",
)
@option("--ports", metavar="FIRST-LAST", help="Port range of the ranks.")
@option(
    "--engine",
    type=click.Choice(_ENGINES),
    default="auto",
    help="Backend of the collective; auto: the best that the nodes have.",
)
@option(
    "--python",
    metavar="PATH",
    takes=lambda path: path.startswith("/"),
    help="The job's Python on the nodes; its PyTorch is used.",
)
@option(
    "--prefix",
    metavar="'WORDS'",
    general=False,
    help="Command in front of the job's Python: 'apptainer exec --nv job.sif'.",
)
@option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    general=False,
    help="Environment variable of the ranks, as the job sets it: NCCL_IB_HCA=mlx5.",
)
@option("--busy", is_flag=True, general=False, help="Also use GPUs that run other processes.")
@option("--full", is_flag=True, general=False, help="Also test every pair of nodes.")
@option("--job", metavar="ID", general=False, help="The nodes of this running job, by srun.")
@option("--exclude-out", metavar="FILE", help="Write the nodes to exclude to FILE, for sbatch.")
@hostfile_options("good")
@report_options("smoke")
@transport_options
def smoke(
    inventory: str | None,
    *,
    user: str | None,
    gpus: str,
    ranks: int,
    budget: int,
    ports: str | None,
    engine: str,
    python: str | None,
    prefix: str | None,
    env: tuple[str, ...],
    busy: bool,
    full: bool,
    job: str | None,
    exclude_out: str | None,
    hostfile_out: str | None,
    hostfile_format: str,
    format: str,
    output: tuple[str, ...],
    **shared: Any,
) -> int:
    """Run one collective over all nodes of INVENTORY; name the faulty node, GPU or link.

    The ranks meet, reduce, gather and send as the job's ranks will, with the job's own PyTorch
    where the nodes have one. When that fails, smaller tests locate the fault: a node, a GPU or a
    pair of nodes. It uses idle GPUs only and leaves nothing behind.

    \b
    Examples:
      nodeready smoke inventories/prod.py --user ada --python /opt/train/bin/python
      nodeready smoke 'gpu[001-064]' --exclude-out bad    # then sbatch --exclude="$(cat bad)"
      nodeready smoke 'gpu[001-064]' --prefix 'apptainer exec --nv job.sif' --budget 120
      nodeready smoke inventories/prod.py --gpus 0 --engine pairs   # the network alone
      nodeready smoke --job 4711                                    # in a job, without ssh
    """
    options = TargetOptions(**shared)
    inventory = find_inventory(inventory, options, elsewhere=job is not None)
    settings = policy_settings(ports, user)
    selected_gpus, environment = _gpus(gpus), _environment(env)
    prefix_words = () if prefix is None else _prefix(prefix)
    python_path = "" if python is None else _python(python)
    if job is None and inventory is None:
        raise Refused("give an INVENTORY or --job ID")
    if job is not None and options.via == "ssh":
        if inventory is not None:
            raise Refused("--job: with an INVENTORY, add --via srun")
        options = replace(options, via="srun")
    outputs = read_outputs("smoke", format, output)
    for name, file in (("--exclude-out", exclude_out), ("--hostfile-out", hostfile_out)):
        refuse_unwritable(file, name)
    screen = options.screen()
    nodes = select_targets(inventory, options, settings, job=job, tell=screen.note, works=True)
    # Imported only here, because they import pyinfra, which is slow, and --help must be quick.
    from nodeready.cli.kept_looks import LookKeeper
    from nodeready.fleet.inventory.endpoints import given_addresses
    from nodeready.runs.smoke import run
    from nodeready.runs.smoke.participants import SmokeTask

    with nodes.transport:
        task = SmokeTask(
            transport=nodes.transport,
            policies=nodes.policies,
            deadline=time.monotonic() + budget - min(_RESERVE_S, budget / 4),
            budget_s=budget,
            engine="" if engine == "auto" else engine,
            gpus=selected_gpus,
            ranks=ranks,
            busy=busy,
            full=full,
            python=python_path,
            prefix=prefix_words,
            environment=environment,
            inventory_addresses=given_addresses(nodes.inventory) if nodes.inventory else {},
        )
        document = run.smoke(
            task, screen.note, screen.progress, lambda names: ask_password(nodes.transport, names)
        )
    good = _good_slots(document, nodes.slots)
    for out, form in ((exclude_out, "exclude"), (hostfile_out, hostfile_format)):
        write_hostfile(out, form, good, document.exclude, screen, complete=document.complete)
    LookKeeper(screen, "smoke", inventory or "").keep_smoke(document, code(document))
    outputs.show(document, screen, silent=screen.quiet and document.good)
    nodes.remember_failed(document.exclude)
    return code(document)
