"""`nodeready audit`, `waivers` and `learn`: the nodes and their policy."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from nodeready.cli.options import (
    ReportOptions,
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    output_file,
    require_inventory,
)
from nodeready.core.exit_codes import INTERRUPTED, Refused
from nodeready.core.files import write_atomically
from nodeready.runs.options import AuditOptions, LearnOptions, WaiversOptions, flag

if TYPE_CHECKING:
    from nodeready.reports.lines import StyledLine
    from nodeready.runs.audit.command import AuditLook

#: The options that say how a node is contacted.
_CONTACT_OPTIONS = (
    *("sudo", "ssh_user", "ssh_key"),
    *("via", "job", "salloc", "topology", "ssh_processes"),
)


@dataclass(kw_only=True)
class AuditWords(ReportOptions, AuditOptions):
    format: str = format_option("audit")


def refuse_with_recorded(options: AuditOptions) -> None:
    """Raises Refused if ``--recorded`` names no directory, or for options of a connection."""
    if not options.recorded:
        return
    context = click.get_current_context()
    for name in _CONTACT_OPTIONS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise Refused(f"--{name.replace('_', '-')}: no node is asked with --recorded")
    # The text is not shown: a URL may hold a password.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", options.recorded):
        raise Refused("--recorded: must be a directory, not a URL")
    if options.every is not None:
        raise Refused("--watch: asks the nodes; remove --recorded")


def changed_lines(looks: Iterator[AuditLook]) -> Iterator[tuple[AuditLook, list[StyledLine]]]:
    """Each look, and a line for each finding that was not in the look before; of the first look,
    none. A look with such lines is kept.
    """
    from nodeready.reports.audit_table import Findings, changes, findings_of

    findings: Findings | None = None
    for look in looks:
        if findings is None:
            yield look, []
            # Not of a single look.
            findings = findings_of(look.audit, {})
            continue
        before, findings = findings, findings_of(look.audit, findings)
        lines = [*changes(before, findings, look.audit.finished)]
        if lines:
            look.keep()
        yield look, lines


@command(AuditWords)
@inventory_argument
def audit(inventory: str | None, options: AuditWords) -> int:
    """Report what differs from the policy on every node of INVENTORY. Never writes to a node.

    \b
    Examples:
      nodeready audit @local
      nodeready audit inventories/prod.py --only ptrace,gpus.ecc_errors
      nodeready audit 'gpu[001-064]' --format json -o audit.json
      nodeready audit inventories/prod.py -q --fail-on warn        # from cron
      nodeready audit inventories/prod.py --format prometheus \\
          -o /var/lib/prometheus/node-exporter/nodeready.prom
      nodeready audit inventories/prod.py --watch 60
      nodeready audit inventories/prod.py --recorded /shared/nodeready
    """
    from nodeready.agent.audit_document import nagios_code
    from nodeready.reports.registry import Options
    from nodeready.runs.audit.command import run

    named = require_inventory(inventory, options)
    refuse_with_recorded(options)
    outputs = options.outputs("audit")
    if options.every is not None and (outputs.form != "table" or outputs.files):
        raise Refused("--watch: prints lines; remove --format and -o")
    screen, is_first = options.screen(), True
    with closing(run(named, options, screen, write_facts=outputs.write_facts)) as looks:
        try:
            for look, lines in changed_lines(looks):
                if is_first:
                    document = look.audit
                    code = nagios_code(document) if outputs.form == "nagios" else look.code
                    keeper, silent = look.keeper, screen.quiet and not look.failing
                    shown = Options(fail_on=options.fail_on, inventory=options.words(named))
                    shown = replace(shown, looks=keeper.looks, history=keeper.history)
                    outputs.show(document, screen, silent=silent, options=shown)
                    if options.every is None or not document.complete:
                        return code
                    is_first = False
                elif lines:
                    screen.show(lines)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if is_first:
                raise
    return INTERRUPTED


# --- `nodeready waivers`: each waiver of the policy, its end, and what it hides now.


@dataclass(kw_only=True)
class WaiversWords(ReportOptions, WaiversOptions):
    format: str = format_option("waivers")


@command(WaiversWords)
@inventory_argument
def waivers(inventory: str | None, options: WaiversWords) -> int:
    """List the waivers of INVENTORY, their ends, and the findings that they hide now.

    A waiver that has expired, that concerns no node of the inventory, or that hides nothing is a
    mistake (exit status 3). Only the waived checks are made. Never writes to a node.

    \b
    Examples:
      nodeready waivers inventories/prod.py
      nodeready waivers inventories/prod.py --offline
      nodeready waivers inventories/prod.py --format json -o waivers.json
    """
    from nodeready.runs.audit.waiver_list import MISTAKES, run, waivers_code

    inventory = require_inventory(inventory, options)
    outputs, screen = options.outputs("waivers"), options.screen()
    document = run(inventory, options, screen)
    has_mistakes = any(row.state in MISTAKES for row in document.waivers)
    silent = screen.quiet and not has_mistakes and not document.gaps
    outputs.show(document, screen, silent=silent)
    return waivers_code(document)


# --- `nodeready learn`: what most nodes share, as a policy to review.


@dataclass(kw_only=True)
class LearnWords(ScreenOptions, LearnOptions):
    output: str | None = output_file("Write the policy to FILE, which must not exist yet.")
    force: bool = flag("--force", "Replace FILE when it exists.")


@command(LearnWords)
@inventory_argument
def learn(inventory: str | None, options: LearnWords) -> int:
    """Write the values that most nodes of INVENTORY share as a group_data file to review.

    GPU model and count, driver, VBIOS, NIC names and speeds, RDMA ports, kernel, mounts: each
    with the number of nodes that agree, and the names of those that do not. Never writes to a
    node. Run it once for each kind of node, with --limit.

    \b
    Examples:
      nodeready learn inventories/prod.py --limit h100 -o inventories/group_data/h100.py
      nodeready learn 'gpu[001-064]'
    """
    from nodeready.core.outcome import gaps_code
    from nodeready.reports.lines import show_gaps
    from nodeready.runs.audit.learned import run

    inventory, output = require_inventory(inventory, options), options.output
    if output is not None and Path(output).exists() and not options.force:
        raise Refused(f"{output} exists: choose another name, or --force to replace it")
    screen = options.screen()
    text, gaps = run(inventory, options, screen)
    screen.show_on_stderr(show_gaps(gaps))
    if text and output is None:
        click.echo(text, nl=False)
    elif text:
        write_atomically(Path(str(output)), [text])
        screen.note(f"{output}: review it before you use it")
    return gaps_code(gaps, complete=True)
