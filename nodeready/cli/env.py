"""`nodeready env`: the environment for a job."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.defaults import require_inventory
from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    report_files,
)
from nodeready.cli.outputs import read_outputs
from nodeready.core.exit_codes import INTERRUPTED
from nodeready.core.outcome import gaps_code
from nodeready.reports import env_script
from nodeready.reports.table_layout import show_gaps
from nodeready.runs.options import EnvOptions


@dataclass(kw_only=True)
class EnvWords(ScreenOptions, EnvOptions):
    # A shell evaluates the output, so NODEREADY_FORMAT=json, which is meant for reports, is
    # ignored.
    format: str = format_option("env", general=False)
    output: tuple[str, ...] = report_files()


@command(EnvWords)
@inventory_argument
def env(inventory: str | None, options: EnvWords) -> int:
    """Print the exports for a job on the nodes of INVENTORY, each with its reason.

    NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, OMPI_MCA_btl_tcp_if_include, NCCL_IB_HCA,
    PDSH_RCMD_TYPE, MASTER_ADDR and MASTER_PORT, as the nodes' networks, adapters and ports
    suggest. A variable on which the nodes differ is not exported: a comment lists its values and
    their nodes, and the exit status is 3. Never writes to a node.

    With --debug also the variables that make the job debuggable (flight recorder, NCCL's
    warnings, Python's stacks, the GPU's cores), under the names of the PyTorch that --python has.

    \b
    Examples:
      eval "$(nodeready env 'gpu[001-064]')"
      nodeready env inventories/prod.py --limit h100 -o job.env
      nodeready env inventories/prod.py --ports 29600-29700 --format json
      nodeready env 'gpu[001-064]' --debug --python /opt/train/bin/python
    """
    # Imported only here, because it imports pyinfra, which is slow, and --help must be quick.
    from nodeready.runs.ready.environment import run

    inventory = require_inventory(inventory, options)
    outputs, screen = read_outputs("env", options), options.screen()
    environment = run(inventory, options, screen)
    if environment is None:
        screen.say("interrupted: nothing is exported")
        return INTERRUPTED
    screen.show_on_stderr(show_gaps(environment.gaps))
    if environment.nodes:
        outputs.show(environment, screen)
    for line in env_script.troubles(environment):
        screen.say(line)
    return gaps_code(
        environment.gaps,
        complete=True,
        check=not all(variable.settled for variable in environment.variables),
    )
