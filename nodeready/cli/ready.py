"""`nodeready ready`: prove which nodes are ready for a job.

Its run is imported only when the command runs, so that --help and completion are quick.
"""

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
from nodeready.runs.options import ReadyOptions


@dataclass(kw_only=True)
class ReadyWords(ScreenOptions, ReadyOptions):
    hostfile_out: str | None = hostfile_out("ready")
    hostfile_format: str = hostfile_format()
    format: str = format_option("ready")
    output: tuple[str, ...] = report_files()


@command(ReadyWords)
@inventory_argument
def ready(inventory: str | None, options: ReadyWords) -> int:
    """Prove for every node of INVENTORY whether a job may start: go or no-go.

    The audit, and these proofs: as the job's user, nodeready takes stacks and makes a core; ssh
    and pdsh work between nodes; the nodes connect over the job's ports. nodeready touches only its
    own processes, files and listeners. A check without a result within the budget is unknown:
    no-go.

    \b
    Examples:
      nodeready ready inventories/prod.py --user ada
      nodeready ready 'gpu[001-064]' --gpus 8 --nodes-needed 60 --hostfile-out job.hosts
      nodeready ready inventories/prod.py --hostfile-out bad --hostfile-format exclude
      nodeready ready inventories/prod.py --only proof.mesh --full-mesh
      nodeready ready inventories/prod.py --wait 600 && sbatch job.sh
      nodeready ready --local
    """
    from nodeready.agent.audit_document import nagios_code, ready_code
    from nodeready.cli.outputs import read_outputs
    from nodeready.cli.screen import refuse_unwritable, write_hostfile
    from nodeready.reports.registry import Options
    from nodeready.runs.ready.command import run

    inventory = find_inventory(inventory, options, elsewhere=options.local)
    outputs = read_outputs("ready", options)
    refuse_unwritable(options.hostfile_out, "--hostfile-out")
    screen = options.screen()
    with run(inventory, options, screen, write_facts=outputs.write_facts) as look:
        document = look.document
        write_hostfile(
            options.hostfile_out,
            options.hostfile_format,
            {name: look.slots[name] for name in document.go},
            document.no_go,
            screen,
            complete=document.audit.complete,
        )
        silent = screen.quiet and document.enough and not document.no_go
        shown = Options(inventory=options.words(inventory), looks=look.keeper.looks)
        outputs.show(document, screen, silent=silent, options=shown)
        return nagios_code(document.audit) if outputs.form == "nagios" else ready_code(document)
