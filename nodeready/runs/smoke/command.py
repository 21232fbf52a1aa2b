"""The run of `nodeready smoke`: the nodes of its options, and what the memory keeps of it."""

from __future__ import annotations

import time
from dataclasses import replace

from nodeready.core.exit_codes import Refused
from nodeready.fleet.inventory.host_data import given_addresses
from nodeready.runs import targets
from nodeready.runs.conversations import ask_password
from nodeready.runs.memory.kept_looks import LookKeeper
from nodeready.runs.options import SmokeOptions
from nodeready.runs.smoke import run as smoke_run
from nodeready.runs.smoke.document import SmokeReport, code
from nodeready.runs.smoke.participants import SmokeTask
from nodeready.runs.tell import Tell
from nodeready.runs.values import policy_settings

#: Seconds of the budget to end the processes that still run on the nodes, and to report.
_RESERVE_S = 3


def run(
    inventory: str | None, options: SmokeOptions, tell: Tell
) -> tuple[SmokeReport, dict[str, int]]:
    """The report, and the slots of each good node. Raises Refused.

    inventory: None: the nodes of the job
    """
    settings = policy_settings(options.ports, options.user)
    job, budget_s = options.job, options.budget
    if job is None and inventory is None:
        raise Refused("give an INVENTORY or --job ID")
    if job is not None and options.via == "ssh":
        if inventory is not None:
            raise Refused("--job: with an INVENTORY, add --via srun")
        options = replace(options, via="srun")
    nodes = targets.select_targets(
        inventory, options, settings, job=job, tell=tell.note, works=True
    )
    with nodes.transport as transport:
        task = SmokeTask(
            transport=transport,
            policies=nodes.policies,
            deadline=time.monotonic() + budget_s - min(_RESERVE_S, budget_s / 4),
            budget_s=budget_s,
            engine="" if options.engine == "auto" else options.engine,
            gpus=options.gpus,
            ranks=options.ranks,
            busy=options.busy,
            full=options.full,
            python=options.python,
            prefix=options.prefix,
            environment=options.env,
            inventory_addresses=given_addresses(nodes.inventory) if nodes.inventory else {},
        )
        report = smoke_run.smoke(
            task, tell.note, tell.progress, lambda names: ask_password(transport, names, tell)
        )
    LookKeeper(tell, "smoke", inventory or "").keep_smoke(report, code(report))
    nodes.remember_failed(report.exclude)
    # The slots that the inventory declares, else the node's own number, else its GPUs, else 1.
    declared, smoked = nodes.slots, {node.name: node for node in report.nodes}
    slots = {
        name: declared.get(name) or smoked[name].slots or len(smoked[name].gpus) or 1
        for name in report.go
    }
    return report, slots
