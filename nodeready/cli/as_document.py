"""A command whose document is sent to the process that asked for it (`nodeready.api`).

`main` with the arguments FD COMMAND … does what `nodeready COMMAND …` does, but writes the
document to the file descriptor FD in place of the report.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from nodeready.core.exit_codes import handle_signals, leave


def portable(document: Any) -> Any:
    """The document without what only this process has: snapshots, and files of workers."""
    from nodeready.agent.audit_document import Audit, NodeReport, Ready
    from nodeready.reports import json_report

    def portable_node(node: NodeReport) -> NodeReport:
        subjects = node.snapshot.subjects if node.snapshot else {}
        facts = json_report.facts(subjects) if node.read_facts is None else node.read_facts()
        return replace(node, snapshot=None, read_facts=partial(str, facts))

    if isinstance(document, Ready):
        return replace(document, audit=portable(document.audit))
    if isinstance(document, Audit):
        return replace(document, nodes=tuple(map(portable_node, document.nodes)))
    return document


def main() -> None:
    """Run the command line; ends the process with the documented exit code."""
    handle_signals(leave)
    # End with the caller, also when it is killed: nobody would read the document.
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    from nodeready import cli
    from nodeready.cli import screen

    def send(document: Any) -> None:
        with open(descriptor, "wb") as answers:
            pickle.dump(portable(document), answers, pickle.HIGHEST_PROTOCOL)

    screen.show_documents_by(send)
    try:
        cli.main(sys.argv[2:])
    finally:
        handle_signals(signal.SIG_IGN)
