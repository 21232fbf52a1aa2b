"""A run whose documents are sent to the process that asked for it (`nodeready.api`).

`main` with the arguments FD COMMAND … reads the words as `nodeready COMMAND …` does, and writes
the documents to the file descriptor FD.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import click

from nodeready import cli
from nodeready.cli.options import values_of
from nodeready.core.exit_codes import handle_signals, leave
from nodeready.core.text import sanitise
from nodeready.runs.tell import Tell


class StandardError(Tell):
    """Lines go to standard error."""

    def say(self, text: str) -> None:
        click.echo(f"nodeready: {sanitise(text)}", err=True)


def documents_of(command: str, inventory: str | None, options: Any) -> Iterator[Any]:
    """The documents of a run, without what only this process has. Raises Refused."""
    from nodeready.cli.options import find_inventory, require_inventory
    from nodeready.reports.registry import find_format

    tell = StandardError()
    if command == "stacks":
        from nodeready.cli.stacks import kept_forms, stacks_inventory
        from nodeready.runs.stacks import command as stacks

        yield stacks.run(stacks_inventory(inventory, options), options, tell, kept_forms)
        return
    if command == "deploy":
        from nodeready.runs.deploy import command as deploy

        yield deploy.run(require_inventory(inventory, options), options, tell)
        return
    write_facts = find_format(command, "json").write_facts
    if command == "ready":
        from nodeready.runs.ready import command as ready

        inventory = find_inventory(inventory, options, elsewhere=options.local)
        with ready.run(inventory, options, tell, write_facts=write_facts) as ready_look:
            document = ready_look.document
            yield replace(document, audit=_portable(document.audit))
        return
    from nodeready.cli.audit import changed_lines, refuse_with_recorded
    from nodeready.runs.audit import command as audit

    named = require_inventory(inventory, options)
    refuse_with_recorded(options)
    if options.every is not None:
        # A node that is not judged again has the facts of an earlier look.
        write_facts = None
    with closing(audit.run(named, options, tell, write_facts=write_facts)) as looks:
        for look, _ in changed_lines(looks):
            yield _portable(look.audit)
            if options.every is None:
                return


def _portable(audit: Any) -> Any:
    """The audit without snapshots, and with the facts that files of workers have."""
    from nodeready.reports import json_report

    def portable_node(node: Any) -> Any:
        subjects = node.snapshot.subjects if node.snapshot else {}
        facts = json_report.facts(subjects) if node.read_facts is None else node.read_facts()
        return replace(node, snapshot=None, read_facts=partial(str, facts))

    return replace(audit, nodes=tuple(map(portable_node, audit.nodes)))


def main() -> None:
    """Run the command line; ends the process with the documented exit code."""
    handle_signals(leave)
    # End with the caller, also when it is killed: the document would have no reader.
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # Before the import of a command: what talks to nodes is imported into a patched library.
    cli.patch()
    name = sys.argv[2]
    command = getattr(importlib.import_module(f"nodeready.cli.{name}"), name)

    def send(**params: Any) -> None:
        options = values_of(command.kind, params, click.get_current_context())
        with open(descriptor, "wb") as answers:
            for document in documents_of(name, params["inventory"], options):
                pickle.dump(document, answers, pickle.HIGHEST_PROTOCOL)
                answers.flush()

    command.callback = send
    try:
        cli.main(sys.argv[2:])
    finally:
        handle_signals(signal.SIG_IGN)
