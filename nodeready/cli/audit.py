"""`nodeready audit`: what differs from the policy, on every node. Never changes a node.

Its run is imported only when the command runs, so that --help and completion are quick.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing
from dataclasses import dataclass

import click
from click.core import ParameterSource

from nodeready.cli.defaults import require_inventory
from nodeready.cli.options import (
    ScreenOptions,
    command,
    format_option,
    inventory_argument,
    report_files,
)
from nodeready.core.exit_codes import INTERRUPTED, OK, Refused
from nodeready.runs.options import AuditOptions

#: The options that say how a node is contacted.
_CONTACT_OPTIONS = (
    *("sudo", "ssh_user", "ssh_key"),
    *("via", "job", "salloc", "topology", "ssh_processes"),
)


@dataclass(kw_only=True)
class AuditWords(ScreenOptions, AuditOptions):
    format: str = format_option("audit")
    output: tuple[str, ...] = report_files()


def refuse_with_recorded(directory: str) -> None:
    """Raises Refused if ``--recorded`` names no directory, or for options of a connection."""
    context = click.get_current_context()
    for name in _CONTACT_OPTIONS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise Refused(f"--{name.replace('_', '-')}: no node is asked with --recorded")
    # The text is not shown: a URL may hold a password.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", directory):
        raise Refused("--recorded: must be a directory, not a URL")


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
    from nodeready.cli.outputs import read_outputs
    from nodeready.reports.audit_table import changes, findings_of
    from nodeready.reports.registry import Options
    from nodeready.runs.audit.command import run

    named = require_inventory(inventory, options)
    if options.recorded:
        refuse_with_recorded(options.recorded)
    outputs = read_outputs("audit", options)
    if options.every is not None:
        if options.recorded:
            raise Refused("--watch: asks the nodes; remove --recorded")
        if outputs.form != "table" or outputs.files:
            raise Refused("--watch: prints lines; remove --format and -o")
    screen, code, findings = options.screen(), OK, None
    with closing(run(named, options, screen, write_facts=outputs.write_facts)) as looks:
        try:
            for look in looks:
                document = look.audit
                if findings is None:
                    code = nagios_code(document) if outputs.form == "nagios" else look.code
                    outputs.show(
                        document,
                        screen,
                        silent=screen.quiet and not look.failing,
                        options=Options(
                            fail_on=options.fail_on,
                            inventory=options.words(named),
                            looks=look.keeper.looks,
                            history=look.keeper.history,
                        ),
                    )
                    if options.every is None or not document.complete:
                        return code
                    findings = findings_of(document, {})
                    continue
                before, findings = findings, findings_of(document, findings)
                if lines := [*changes(before, findings, document.finished)]:
                    look.keep()
                    screen.show(lines)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if findings is None:
                raise
    return INTERRUPTED
