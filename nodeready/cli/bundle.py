"""`nodeready bundle`: the node's own program as one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from nodeready.cli.options import command, inventory_argument, output_file
from nodeready.cli.screen import Screen, refuse_unwritable
from nodeready.core.exit_codes import OK, Refused
from nodeready.core.files import write_atomically
from nodeready.core.policy import Policy, as_data, digest
from nodeready.core.text import counted
from nodeready.fleet.transport.bundle import build
from nodeready.reports.lines import grouped, node_set
from nodeready.runs.options import ConnectionOptions, limit, trust
from nodeready.runs.targets import load_targets


def _common_policy(policies: Mapping[str, Policy]) -> Policy:
    """The policy that all of these nodes have. Raises Refused, with the keys, if they differ."""
    if len({*policies.values()}) == 1:
        return next(iter(policies.values()))
    data = {name: as_data(policy) for name, policy in policies.items()}
    differences = []
    for key in next(iter(data.values())):
        values = grouped((repr(settings[key]), name) for name, settings in data.items())
        if len(values) > 1:
            texts = (f"{node_set(names)}: {value}" for value, names in values)
            differences.append(f"{key} ({', '.join(texts)})")
    raise Refused(
        f"a bundle has one policy, and these nodes differ: {'; '.join(differences)}: "
        "choose by --limit"
    )


@dataclass(kw_only=True)
class BundleWords:
    output: str = output_file("File of the program.", default="nodeready.pyz")
    limit: str | None = limit("The policy of these nodes: gpu[001-004], a group.")
    trust_inventory: bool = trust()


@command(BundleWords)
@inventory_argument
def bundle(inventory: str | None, options: BundleWords) -> int:
    """Write the node's own program: one file that needs only Python 3.9 on the node.

    The program audits the node on which it runs, proves it, keeps a verdict and answers a job's
    prolog. It judges by the policy of INVENTORY, or by the default policy. The same version and
    policy make the same bytes. No node is contacted.

    \b
    Examples:
      nodeready bundle inventories/prod.py --limit h100 -o nodeready.pyz
      scp nodeready.pyz gpu001: && ssh gpu001 ./nodeready.pyz audit
    """
    output = options.output
    refuse_unwritable(output)
    policy, source = None, "the default policy"
    if inventory is not None:
        targeted = ConnectionOptions(limit=options.limit, trust_inventory=options.trust_inventory)
        _, _, policies = load_targets(inventory, targeted, Screen().note)
        policy = _common_policy(policies)
        source = f"the policy of {counted(len(policies), 'node')}"
    elif options.limit is not None:
        raise Refused("--limit: needs an INVENTORY")
    program = build(policy)
    write_atomically(Path(output), [program], 0o755)
    policy_digest = digest([policy or Policy()])
    click.echo(
        f"nodeready: {output}: {len(program) / 1e6:.1f} MB, {source} ({policy_digest})", err=True
    )
    return OK
