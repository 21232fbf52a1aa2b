"""`nodeready env`: the environment for a job."""

from __future__ import annotations

import re
from typing import Any

from nodeready.agent.asking import Request, new_nonce
from nodeready.cli.conversations import ask_with_progress, keep_gaps, probe_nodes
from nodeready.cli.default_inventory import require_inventory
from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    option,
    report_options,
    srun_job_option,
    transport_options,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets, select_targets
from nodeready.cli.values import read_ports
from nodeready.core.exit_codes import INTERRUPTED
from nodeready.core.fleet import FleetFacts
from nodeready.core.outcome import Outcome, gaps_code, gaps_of
from nodeready.core.text import utc_now
from nodeready.reports import env_script
from nodeready.reports.table_layout import show_gaps
from nodeready.runs.ready import debug_variables, job_env
from nodeready.subjects.snapshot import Snapshot


def _installed(
    nodes: Targets, screen: Screen, names: list[str], python: str
) -> dict[str, debug_variables.InstalledTorch]:
    """Node -> what is installed there for jobs, for the nodes that were probed."""
    nonce = new_nonce()
    requests = {
        name: Request(name, debug_variables.question(python, nonce), debug_variables.ASK_S + 5)
        for name in names
    }
    answers = ask_with_progress(nodes.transport, screen)("versions", requests)
    return {
        name: debug_variables.read_installed(answer.stdout, nonce)
        if answer.ok
        else debug_variables.InstalledTorch(reason=answer.reason() or "no answer")
        for name, answer in answers.items()
    }


def _environment(
    outcomes: list[Outcome[Snapshot]],
    nodes: Targets,
    taken: str,
    debugging: tuple[job_env.JobVariable, ...],
) -> job_env.Environment:
    snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value}
    # Imported only here, because it imports pyinfra, which is slow, and --help must be quick.
    from nodeready.fleet.transport.fleet_context import addresses_of_nodes

    fleet = FleetFacts(addresses=addresses_of_nodes(outcomes, nodes.transport.ssh_peers()))
    return job_env.Environment(
        taken,
        tuple(snapshots),
        gaps_of(outcomes),
        (*job_env.variables(snapshots, nodes.policies, fleet), *debugging) if snapshots else (),
    )


@command()
@inventory_argument
# A shell evaluates the output, so NODEREADY_FORMAT=json, which is meant for reports, is ignored.
@report_options("env", general=False)
@option(
    "--ports",
    metavar="FIRST-LAST",
    help="Port range for MASTER_PORT; default: the policy's port_range.",
)
@option("--debug", is_flag=True, help="Also the variables that make the job debuggable.")
@option(
    "--python",
    default="python3",
    metavar="PATH",
    help="With --debug: the job's Python on the nodes, for its version of PyTorch.",
)
@option(
    "--directory",
    default="",
    show_default=False,
    metavar="DIR",
    help="With --debug: directory for the ranks' flight recorders.",
)
@srun_job_option
@transport_options
def env(
    inventory: str | None,
    *,
    format: str,
    output: tuple[str, ...],
    ports: str | None,
    debug: bool,
    python: str,
    directory: str,
    job: str | None,
    **shared: Any,
) -> int:
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
    options = TargetOptions(**shared)
    inventory = require_inventory(inventory, options)
    settings = {} if ports is None else {"port_range": read_ports(ports)}
    outputs = read_outputs("env", format, output)
    if directory and not re.fullmatch(r"/[A-Za-z0-9_.,:=/%-]{1,200}", directory):
        raise Refused(f"--directory {directory}: must be an absolute path of plain characters")
    screen = options.screen()
    taken = utc_now()
    nodes = select_targets(inventory, options, settings, job=job, tell=screen.note)
    with nodes.transport:
        outcomes = probe_nodes(nodes, screen, job_env.SUBJECTS)
        if nodes.transport.interrupted:
            screen.say("interrupted: nothing is exported")
            return INTERRUPTED
        debugging: tuple[job_env.JobVariable, ...] = ()
        reached = [outcome.node for outcome in outcomes if outcome.value]
        if debug and reached:
            debugging = debug_variables.debug_variables(
                _installed(nodes, screen, reached, python), directory
            )
        environment = _environment(outcomes, nodes, taken, debugging)
        screen.show_on_stderr(show_gaps(environment.gaps))
        keep_gaps(nodes, screen, environment.gaps)
    if environment.nodes:
        outputs.show(environment, screen)
    for line in env_script.troubles(environment):
        screen.say(line)
    return gaps_code(
        environment.gaps,
        complete=True,
        check=not all(variable.settled for variable in environment.variables),
    )
