"""`nodeready postmortem`: who failed first in a job that is dead or dying, and of what."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.defaults import find_inventory
from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    report_files,
)
from nodeready.cli.outputs import read_outputs
from nodeready.core.exit_codes import Refused
from nodeready.runs.options import PostmortemOptions
from nodeready.runs.postmortem.document import postmortem_code


@dataclass(kw_only=True)
class PostmortemWords(ScreenOptions, PostmortemOptions):
    format: str = format_option("postmortem", general=False)
    output: tuple[str, ...] = report_files()


@command(PostmortemWords)
@inventory_argument
def postmortem(inventory: str | None, options: PostmortemWords) -> int:
    """Show who failed first in a job that has died, of what, and who only lost a peer.

    Reads the beginning and the end of the logs, torchrun's error files, the kernel's log and
    Slurm's records. An error of a rank's own outranks every lost connection; equal failures are
    shown once. Reads only. Exit status 3: the cause is unclear, or evidence is missing.

    \b
    Examples:
      nodeready postmortem inventories/prod.py --job 4711
      nodeready postmortem 'gpu[001-064]' --logs '/scratch/logs/4711/**'
      nodeready postmortem --local --logs '/tmp/torchelastic_*/**'
      nodeready postmortem --from crash-4711
    """
    # Imported only here, because it imports pyinfra, and --help must be quick.
    from nodeready.runs.postmortem.command import run

    outputs = read_outputs("postmortem", options)
    if options.source is None:
        by_job = options.via != "ssh" and options.job is not None
        inventory = find_inventory(inventory, options, elsewhere=options.local or by_job)
    elif options.local or options.job or options.patterns or inventory is not None:
        raise Refused("--from: asks no node; remove INVENTORY, --local, --job and --logs")
    screen = options.screen()
    document = run(inventory, options, screen)
    outputs.show(document, screen, mode=0o600)
    return postmortem_code(document)
