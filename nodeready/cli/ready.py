"""`nodeready ready`, `env`, `smoke` and `undrain`: what comes before a job."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.cli.options import (
    ReportOptions,
    command,
    find_inventory,
    format_option,
    hostfile_format,
    hostfile_out,
    inventory_argument,
    require_inventory,
)
from nodeready.core.exit_codes import INTERRUPTED, Refused, exit_code
from nodeready.runs.options import EnvOptions, ReadyOptions, SmokeOptions, UndrainOptions, opt


@dataclass(kw_only=True)
class ReadyWords(ReportOptions, ReadyOptions):
    hostfile_out: str | None = hostfile_out("ready")
    hostfile_format: str = hostfile_format()
    format: str = format_option("ready")


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
      nodeready ready inventories/prod.py --active 2 --budget 5m   # load idle GPUs
      nodeready ready --local
    """
    from nodeready.agent.audit_document import nagios_code, ready_code
    from nodeready.cli.screen import refuse_unwritable, write_hostfile
    from nodeready.reports.registry import Options
    from nodeready.runs.ready.command import run

    inventory = find_inventory(inventory, options, elsewhere=options.local)
    outputs = options.outputs("ready")
    refuse_unwritable(options.hostfile_out, "--hostfile-out")
    screen = options.screen()
    with run(inventory, options, screen, write_facts=outputs.write_facts) as look:
        document = look.document
        slots = {name: look.slots[name] for name in document.go}
        write_hostfile(
            options.hostfile_out, options.hostfile_format, slots, document.no_go, screen,
            complete=document.audit.complete,
        )  # fmt: skip
        silent = screen.quiet and document.enough and not document.no_go
        shown = Options(inventory=options.words(inventory), looks=look.keeper.looks)
        outputs.show(document, screen, silent=silent, options=shown)
        return nagios_code(document.audit) if outputs.form == "nagios" else ready_code(document)


# --- `nodeready env`: the environment for a job.


@dataclass(kw_only=True)
class EnvWords(ReportOptions, EnvOptions):
    # A shell evaluates the output: NODEREADY_FORMAT, which is meant for reports, is ignored.
    format: str = format_option("env", general=False)


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
    With --sync-cuda also those that make each launch wait for its kernel, if its NCCL allows that.

    With --check what is wrong in a batch script instead: a rank that is expanded too early, other
    nodes than #SBATCH has, no GPU.

    \b
    Examples:
      eval "$(nodeready env 'gpu[001-064]')"
      nodeready env inventories/prod.py --limit h100 -o job.env
      nodeready env inventories/prod.py --ports 29600-29700 --format json
      nodeready env 'gpu[001-064]' --debug --python /opt/train/bin/python
      nodeready env --check train.sbatch
    """
    from nodeready.core.outcome import gaps_code
    from nodeready.reports.env_script import troubles
    from nodeready.reports.lines import show_gaps

    if options.check is not None:
        from nodeready.runs.ready.batch_script import judge

        if inventory is not None:
            raise Refused("--check reads a script and asks no node: leave INVENTORY out")
        outputs, screen = options.outputs("script"), options.screen()
        document = judge(options.check)
        outputs.show(document, screen, silent=screen.quiet and not document.findings)
        return exit_code(check=bool(document.findings))

    # Imported only here, because it imports pyinfra, which is slow, and --help must be quick.
    from nodeready.runs.ready.environment import run

    inventory = require_inventory(inventory, options)
    outputs, screen = options.outputs("env"), options.screen()
    environment = run(inventory, options, screen)
    if environment is None:
        screen.say("interrupted: nothing is exported")
        return INTERRUPTED
    screen.show_on_stderr(show_gaps(environment.gaps))
    if environment.nodes:
        outputs.show(environment, screen)
    for line in troubles(environment):
        screen.say(line)
    is_settled = all(variable.settled for variable in environment.variables)
    return gaps_code(environment.gaps, complete=True, check=not is_settled)


# --- `nodeready smoke`: one collective over all nodes; names the faulty node, GPU or link.


@dataclass(kw_only=True)
class SmokeWords(ReportOptions, SmokeOptions):
    exclude_out: str | None = opt(
        "--exclude-out FILE", "Write the nodes to exclude to FILE, for sbatch."
    )
    hostfile_out: str | None = hostfile_out("good")
    hostfile_format: str = hostfile_format()
    format: str = format_option("smoke")


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
    from nodeready.cli.screen import refuse_unwritable, write_hostfile
    from nodeready.runs.smoke.document import code

    # Imported only here, because it imports pyinfra, which is slow, and --help must be quick.
    from nodeready.runs.smoke.run import run

    inventory = find_inventory(inventory, options, elsewhere=options.job is not None)
    outputs = options.outputs("smoke")
    exclude_out, hostfile_out = options.exclude_out, options.hostfile_out
    refuse_unwritable(exclude_out, "--exclude-out")
    refuse_unwritable(hostfile_out, "--hostfile-out")
    screen = options.screen()
    document, slots = run(inventory, options, screen)
    for out, form in ((exclude_out, "exclude"), (hostfile_out, options.hostfile_format)):
        write_hostfile(out, form, slots, document.exclude, screen, complete=document.complete)
    outputs.show(document, screen, silent=screen.quiet and document.good)
    return code(document)


# --- `nodeready undrain`: the way back into service.


@dataclass(kw_only=True)
class UndrainWords(ReportOptions, UndrainOptions):
    format: str = format_option("undrain")


@command(UndrainWords)
@inventory_argument
def undrain(inventory: str | None, options: UndrainWords) -> int:
    """Show which drained nodes of INVENTORY would return to service in Slurm, and why not.

    A node returns if the policy's undrain_reasons lists the exact reason of its drain (or
    nodeready drained it), no leftover of a job holds it, and `nodeready ready` proves it. A
    person's drain is never touched. Without INVENTORY: all nodes that Slurm has drained. Changes
    nothing without --yes or --end-leftovers.

    \b
    Examples:
      nodeready undrain inventories/prod.py
      nodeready undrain inventories/prod.py --limit 'gpu[001-004]' --yes
      nodeready undrain inventories/prod.py --end-leftovers --yes
    """
    from nodeready.reports.registry import Options
    from nodeready.runs.undrain import run, undrain_code

    inventory = find_inventory(inventory, options)
    outputs, screen = options.outputs("undrain"), options.screen()
    document = run(inventory, options, screen)
    shown = Options(inventory=options.words(inventory) if inventory else "")
    outputs.show(document, screen, silent=screen.quiet and not document.nodes, options=shown)
    return undrain_code(document)
