"""`nodeready ready`, `env`: may the job start, on which nodes, and with which environment?"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from nodeready.audit.document import Audit, Ready, ready_code, slots
from nodeready.audit.run import combined, looked_at
from nodeready.cli.audit import document
from nodeready.cli.options import (
    Refused,
    asking,
    format_option,
    hostfile_options,
    option,
    output_file,
    policy_settings,
    read_ports,
    report,
    steps_option,
)
from nodeready.cli.screen import Screen, refuse_unwritable, show, write_hostfile
from nodeready.cli.start import (
    Common,
    Nodes,
    ask_with_progress,
    look,
    nodes_of,
    password,
    remember_failed,
)
from nodeready.exit_codes import exit_code
from nodeready.policy.policy import PolicyError
from nodeready.ready import job_env
from nodeready.reports import exports
from nodeready.reports.monitoring import nagios_code
from nodeready.reports.plan import show_errors
from nodeready.reports.registry import names
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS, Selection, SelectionError, select
from nodeready.text import counted, now
from nodeready.transport.base import INTERRUPTED, Request, new_nonce
from nodeready.transport.look import Look

if TYPE_CHECKING:
    from nodeready.ready.run import Task, Wanted
    from nodeready.subjects.proof.facts import ProvedCollective

#: Seconds of the budget for ending what is left over on the nodes and for the report.
_RESERVE_S = 3


def _selected(only: str | None, skip: str | None) -> Selection:
    try:
        chosen = select(only, skip, SUBJECTS)
    except SelectionError as error:
        raise Refused(str(error)) from None
    checks = chosen.checks
    if any(check.startswith("proof.") for check in checks) and "proof.user" not in checks:
        # Without the user's session the others do not apply: that must not look like success.
        checks = (*checks, "proof.user")
    return Selection(checks)


def _fleet(
    nodes: Nodes, screen: Screen, selection: Selection, wanted: Wanted, budget_s: int
) -> Audit:
    """Look and prove until the budget is spent, and judge what there is."""
    from nodeready.inventory.load import given_addresses
    from nodeready.ready.run import Task, prove

    started, time_s = now(), budget_s - min(_RESERVE_S, budget_s / 4)
    subjects = tuple(name for name in looked_at(selection) if name in LOOKED_AT)
    deadline = time.monotonic() + time_s
    given = given_addresses(nodes.all) if nodes.inventory is not None else {}
    left = {"look": set(nodes.policies), "proofs": set(nodes.policies)}
    with ExitStack() as after:
        done = {"look": after.enter_context(screen.progress("looking", left["look"]))}

        def heard(name: str, what: str) -> None:
            left[what].discard(name)
            if what in done:
                done[what](name)
            if what == "look" and not left["look"] and "proofs" not in done:
                after.close()
                done["proofs"] = after.enter_context(screen.progress("proving", left["proofs"]))

        def ask(names: list[str]) -> bool:
            after.close()
            return password(nodes.carrier, names)

        def together(names: tuple[str, ...]) -> Mapping[str, ProvedCollective]:
            after.close()
            return _collective(task, names, screen)

        task = Task(
            nodes.carrier, nodes.policies, subjects, wanted, budget_s, deadline, given, together
        )
        looks = prove(task, heard, ask)
    audit = document(nodes, screen, selection, looks, started)
    if nodes.carrier.interrupted:
        screen.say_partial(
            node.name
            for node in audit.nodes
            if node.error or any(result.actual == INTERRUPTED for result in node.results)
        )
    return audit


def _collective(
    task: Task, names: tuple[str, ...], screen: Screen
) -> Mapping[str, ProvedCollective]:
    """What a smoke test of these nodes shows of each, until the same deadline."""
    from nodeready.smoke import judge, run

    policies = {name: task.policies[name] for name in names}
    wanted = run.Task(task.carrier, policies, task.deadline, task.budget_s, given=task.given)
    return judge.proved(run.smoke(wanted, screen.note, screen.progress))


def _here(given: dict[str, Any], selection: Selection, budget_s: int) -> Audit:
    """The same on this machine, without any connection."""
    from nodeready.healthcheck import here

    try:
        policy = replace(here.load(None), **given)
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None
    return here.ready(policy, selection, budget_s).audit


@click.command()
@click.argument("inventory", required=False)
@option("--local", is_flag=True, help="This machine, without any connection.")
@option("--budget", type=click.IntRange(1, 3600), default=60, metavar="S", help="Seconds for all.")
@option("--user", metavar="NAME", help="Prove it as this user: the one whose job will run.")
@option("--ports", metavar="FIRST-LAST", help="The ports on which the job meets.")
@option("--gpus", type=click.IntRange(0, 64), metavar="N", help="GPUs that every node must have.")
@option(
    "--nodes-needed",
    type=click.IntRange(1),
    metavar="N",
    help="Enough when so many are ready; without it, all have to be.",
)
@hostfile_options("ready")
@option("--full-mesh", is_flag=True, help="Every node connects to every other, not to some.")
@option("--only", metavar="CHECK,...", help="Only these checks or subjects: proof,gpus.present.")
@option("--skip", metavar="CHECK,...", help="Not these.")
@report(*names("ready"))
@steps_option
@asking
def ready(
    inventory: str | None,
    *,
    local: bool,
    budget: int,
    user: str | None,
    ports: str | None,
    gpus: int | None,
    nodes_needed: int | None,
    hostfile_out: str | None,
    hostfile_format: str,
    full_mesh: bool,
    only: str | None,
    skip: str | None,
    format: str,
    output: str | None,
    job: str | None,
    **shared: Any,
) -> int:
    """Say go or no-go for every node of INVENTORY, proven, before the job starts.

    The audit, and beside it: stacks are taken and a core is made as the job's user, ssh and pdsh
    go from node to node, and the nodes connect over the job's ports. Only processes, files and
    listeners of its own are touched. What does not finish within the budget is unknown: no-go.

    \b
    Examples:
      nodeready ready inventories/prod.py --user ada
      nodeready ready 'gpu[001-064]' --gpus 8 --nodes-needed 60 --hostfile-out job.hosts
      nodeready ready inventories/prod.py --hostfile-out bad --hostfile-format exclude
      nodeready ready inventories/prod.py --only proof.mesh --full-mesh
      nodeready ready --local
    """
    options = Common(**shared)
    given = policy_settings(ports, user)
    if gpus is not None:
        given["gpu_count"] = gpus
    selection = _selected(only, skip)
    if local == (inventory is not None):
        raise Refused("an INVENTORY or --local, one of both")
    for name, path in (("-o", output), ("--hostfile-out", hostfile_out)):
        refuse_unwritable(path, name)
    screen = options.screen()
    own_slots: dict[str, int] = {}
    if inventory is None:
        if options.limit is not None:
            raise Refused("--limit: --local is about this machine alone")
        found = Ready(_here(given, selection, budget), budget, nodes_needed)
    else:
        from nodeready.ready.run import Wanted

        over = nodes_of(inventory, options, given, job=job, tell=screen.note)
        with over.carrier:
            if nodes_needed is not None and nodes_needed > len(over.policies):
                have = len(over.policies)
                raise Refused(
                    f"--nodes-needed {nodes_needed}: {counted(have, 'node')} "
                    f"{'is' if have == 1 else 'are'} selected"
                )
            wanted = Wanted.of(selection.checks, full=full_mesh)
            found = Ready(_fleet(over, screen, selection, wanted, budget), budget, nodes_needed)
            own_slots = over.slots
            remember_failed(over, found.no_go)
    if hostfile_out is not None:
        seen = {node.name: slots(node) for node in found.audit.nodes}
        rows = {name: own_slots.get(name, seen[name]) for name in found.go}
        complete = found.audit.complete
        problem = write_hostfile(
            hostfile_out, hostfile_format, rows, found.no_go, complete=complete
        )
        if problem:
            screen.say(problem)
    silent = screen.quiet and found.enough and not found.no_go
    show("ready", format, found, screen, output=output, silent=silent)
    return nagios_code(found.audit) if format == "nagios" else ready_code(found)


# --- `env`.


def _installed(
    nodes: Nodes, screen: Screen, looks: list[Look], python: str
) -> dict[str, job_env.Installed]:
    """Node -> what is installed there for jobs, of the nodes that were looked at."""
    nonce = new_nonce()
    names = [one.name for one in looks if one.reached]
    asked = {
        name: Request(name, job_env.question(python, nonce), job_env.ASK_S + 5) for name in names
    }
    answers = ask_with_progress(nodes.carrier, screen)("versions", asked)
    return {
        name: job_env.read_installed(answer.stdout, nonce)
        if answer.ok
        else job_env.Installed(why=answer.reason() or "no answer")
        for name, answer in answers.items()
    }


def _environment(
    looks: list[Look], nodes: Nodes, taken: str, more: tuple[job_env.Variable, ...]
) -> job_env.Environment:
    from nodeready.subjects.context import FleetContext

    declared = nodes.policies
    context = combined(FleetContext(declared), looks, nodes.carrier.met())
    seen = {
        one.name: context.completed(one.name, one.snapshot)
        for one in looks
        if one.snapshot and not one.error
    }
    return job_env.Environment(
        taken,
        tuple(seen),
        job_env.grouped({one.name: one.error for one in looks if one.error}),
        (*job_env.variables(seen, {name: declared[name] for name in seen}), *more) if seen else (),
    )


@click.command()
@click.argument("inventory")
# Its output is evaluated by shells: NODEREADY_FORMAT=json of the other commands is not for it.
@format_option(*names("env"), help="Lines for a shell, or a form for programs.", general=False)
@output_file("Write them to FILE, whole or not at all.")
@option(
    "--ports",
    metavar="FIRST-LAST",
    help="Choose MASTER_PORT from these, not from the policy's port_range.",
)
@option("--debug", is_flag=True, help="Also what makes the job debuggable.")
@option(
    "--python",
    default="python3",
    metavar="PATH",
    help="The job's Python on the nodes, whose version of PyTorch counts for --debug.",
)
@option(
    "--directory",
    default="",
    metavar="DIR",
    help="With --debug: where the ranks write their flight recorders.",
)
@steps_option
@asking
def env(
    inventory: str,
    *,
    format: str,
    output: str | None,
    ports: str | None,
    debug: bool,
    python: str,
    directory: str,
    job: str | None,
    **shared: Any,
) -> int:
    """Print the exports for a job on the nodes of INVENTORY, each with its reason.

    NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA, PDSH_RCMD_TYPE and MASTER_PORT, as the
    nodes' networks, adapters and ports suggest. What the nodes do not agree on is not exported:
    comments say who has what, and the exit status is 3. Never writes to a node.

    With --debug also the variables that make the job debuggable (flight recorder, NCCL's
    warnings, Python's stacks, the GPU's cores), under the names of the PyTorch that --python has.

    \b
    Examples:
      eval "$(nodeready env 'gpu[001-064]')"
      nodeready env inventories/prod.py --limit h100 -o job.env
      nodeready env inventories/prod.py --ports 29600-29700 --format json
      nodeready env 'gpu[001-064]' --debug --python /opt/train/bin/python
    """
    options = Common(**shared)
    given = {} if ports is None else {"port_range": read_ports(ports)}
    refuse_unwritable(output)
    if directory and not re.fullmatch(r"/[A-Za-z0-9_.,:=/%-]{1,200}", directory):
        raise Refused(f"--directory {directory}: an absolute path of plain characters")
    screen = options.screen()
    taken = now()
    nodes = nodes_of(inventory, options, given, job=job, tell=screen.note)
    with nodes.carrier:
        looks = look(nodes, screen, job_env.SUBJECTS)
        if nodes.carrier.interrupted:
            screen.say("interrupted: nothing is exported")
            return exit_code(interrupted=True)
        more: tuple[job_env.Variable, ...] = ()
        if debug and any(one.reached for one in looks):
            more = job_env.debug_variables(_installed(nodes, screen, looks, python), directory)
        found = _environment(looks, nodes, taken, more)
        screen.tell(show_errors(looks))
        remember_failed(nodes, [one.name for one in looks if one.error], lost=True)
    if found.nodes:
        show("env", format, found, screen, output=output)
    for line in exports.troubles(found):
        screen.say(line)
    return exit_code(
        failed=any(one.error and not one.unreachable for one in looks),
        unreachable=any(one.unreachable for one in looks),
        check=not all(one.settled for one in found.variables),
    )
