"""`nodeready smoke`: one collective over all nodes; names the faulty node, GPU or link."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.defaults import find_inventory
from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    hostfile_format,
    hostfile_out,
    inventory_argument,
    report_files,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import refuse_unwritable, write_hostfile
from nodeready.runs.options import SmokeOptions, opt


@dataclass(kw_only=True)
class SmokeWords(ScreenOptions, SmokeOptions):
    exclude_out: str | None = opt(
        "--exclude-out FILE", "Write the nodes to exclude to FILE, for sbatch."
    )
    hostfile_out: str | None = hostfile_out("good")
    hostfile_format: str = hostfile_format()
    format: str = format_option("smoke")
    output: tuple[str, ...] = report_files()


@command(SmokeWords)
@inventory_argument
def smoke(inventory: str | None, options: SmokeWords) -> int:
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
    # Imported only here, because it imports pyinfra, which is slow, and --help must be quick.
    from nodeready.runs.smoke.command import run
    from nodeready.runs.smoke.document import code

    inventory = find_inventory(inventory, options, elsewhere=options.job is not None)
    outputs = read_outputs("smoke", options)
    exclude_out, hostfile_out = options.exclude_out, options.hostfile_out
    refuse_unwritable(exclude_out, "--exclude-out")
    refuse_unwritable(hostfile_out, "--hostfile-out")
    screen = options.screen()
    document, slots = run(inventory, options, screen)
    for out, form in ((exclude_out, "exclude"), (hostfile_out, options.hostfile_format)):
        write_hostfile(out, form, slots, document.exclude, screen, complete=document.complete)
    outputs.show(document, screen, silent=screen.quiet and document.good)
    return code(document)
