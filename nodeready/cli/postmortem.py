"""`nodeready postmortem`: who failed first in a job that is dead or dying, and of what."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nodeready.agent.asking import new_nonce
from nodeready.agent.postmortem import PostmortemConfig
from nodeready.cli.conversations import converse, remember_gaps
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    local_option,
    option,
    rank_pattern_option,
    report_options,
    since_option,
    timeout_option,
    transport_options,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.targets import (
    TargetOptions,
    Targets,
    local_targets,
    targets_of_ended_job,
)
from nodeready.cli.values import checked_pattern, checked_regex, epoch_seconds, past
from nodeready.core.policy import Policy
from nodeready.core.text import utc_now
from nodeready.reports.lines import node_set
from nodeready.runs.postmortem.collect import EvidenceBuilder, fetch_failures, postmortem_of
from nodeready.runs.postmortem.document import Postmortem, postmortem_code
from nodeready.runs.postmortem.evidence import JobEvidence, SlurmRecords

#: Age of the kernel's messages that are read, where the job's start is not known.
_KERNEL_S = 24 * 3600


def _read_directory(source: str, rank_pattern: str) -> Postmortem:
    """The document of a directory. Raises Refused."""
    from nodeready.runs.postmortem.directory import NoEvidenceError, read_directory

    started = utc_now()
    try:
        evidence = read_directory(Path(source), rank_pattern)
    except NoEvidenceError as problem:
        raise Refused(f"--from {problem}") from None
    except OSError as problem:
        raise Refused(f"--from {problem.filename or source}: {problem.strerror}") from None
    return postmortem_of(evidence, started=started, source=source)


def _ask_nodes(
    nodes: Targets,
    options: TargetOptions,
    config: PostmortemConfig,
    job: str,
    records: SlurmRecords,
) -> Postmortem:
    """The document of all nodes' answers."""
    evidence = JobEvidence(
        steps=records.steps, sources=records.sources, missing=records.missing, nodes=records.nodes
    )
    evidence.add_script("the batch script", records.script)
    config = replace(config, variables=tuple(evidence.script_variables.items()))
    builder, started, screen = EvidenceBuilder(evidence), utc_now(), options.screen()
    transport = nodes.transport
    if transport.one_text:
        config = replace(config, nonce=new_nonce())
    outcomes = converse(
        transport, screen, "reading", lambda name: fetch_failures(name, config, transport.tag)
    )
    for name, outcome in outcomes.items():
        if outcome.value is not None:
            builder.add(name, outcome.value)
    gaps = remember_gaps(nodes, screen, outcomes.values(), builder.gaps)
    return postmortem_of(
        builder.complete(),
        started=started,
        job=job,
        source=" ".join(config.patterns),
        gaps=gaps,
        complete=not transport.interrupted,
    )


@command()
@inventory_argument
@local_option
@option("--job", metavar="ID", help="The Slurm job; its logs are found by scontrol and sacct.")
@option(
    "--logs",
    "patterns",
    metavar="PATTERN",
    multiple=True,
    help="The job's logs on the nodes, quoted; may be repeated.",
)
@option(
    "--from",
    "source",
    metavar="DIR",
    help="Read the logs in this directory, or one file; ask no node.",
)
@rank_pattern_option
@since_option("logs written")
@option(
    "--max-files",
    type=click.IntRange(1, 1000),
    default=256,
    metavar="N",
    help="Maximum files per node, the most recently written first.",
)
@timeout_option()
@report_options("postmortem", general=False)
@transport_options
def postmortem(
    inventory: str | None,
    *,
    local: bool,
    job: str | None,
    patterns: tuple[str, ...],
    source: str | None,
    rank_pattern: str | None,
    since: str | None,
    max_files: int,
    timeout: int,
    format: str,
    output: tuple[str, ...],
    **shared: Any,
) -> int:
    """Show who failed first in a job that has died, of what, and who only lost a peer.

    Reads the beginning and the end of the logs, torchrun's error files, the kernel's log and
    Slurm's records. An error of a rank's own outranks every lost connection; equal failures are
    shown once. Reads only. Exit status 3: the cause is unclear, or evidence is missing.

    \b
    Examples:
      nodeready postmortem inventories/prod.py --job 4711
      nodeready postmortem 'gpu[001-064]' --logs '/scratch/logs/4711/**'
      nodeready postmortem --local --logs '/tmp/torchelastic_*/**'
      nodeready postmortem --from crash-4711
    """
    options = TargetOptions(**shared)
    outputs = read_outputs("postmortem", format, output)
    regex = checked_regex("--rank-pattern", rank_pattern)
    if source is not None:
        if local or job or patterns or inventory is not None:
            raise Refused("--from: asks no node; remove INVENTORY, --local, --job and --logs")
        return _show(outputs, options, _read_directory(source, regex))
    by_job = options.via != "ssh" and job is not None
    inventory = find_inventory(inventory, options, elsewhere=local or by_job)
    if local == (inventory is not None) and not by_job:
        raise Refused("give an INVENTORY, --local or --from DIR")
    if local and (options.via != "ssh" or options.limit is not None):
        raise Refused("--local: cannot be combined with --via or --limit")
    if not job and not patterns:
        raise Refused("give --job ID, --logs PATTERN or --from DIR")
    # Imported only here, because it imports pyinfra, and --help must be quick.
    from nodeready.cli.kept_looks import LookKeeper
    from nodeready.runs.postmortem.slurm_records import slurm_records

    records = slurm_records(job or "")
    logs = [*map(checked_pattern, patterns), *([] if patterns else records.logs)]
    screen = options.screen()
    if not logs:
        reasons = "; ".join(
            reason if reason.startswith(name) else f"{name} {reason}"
            for name, reason in records.missing.items()
        )
        raise Refused(
            f"--job {job}: its logs are not known ({reasons or 'Slurm has no job of this name'}): "
            "give --logs PATTERN"
        )
    if records.is_running:
        screen.note(f"Slurm says that job {job} still runs: nodeready stacks shows where")
    if records.since_s and not patterns:
        # PyTorch's watchdog dumps its flight recorder there, unless the job says another place.
        logs.append("/tmp/nccl_trace_rank_*")
    now = time.time()
    config = PostmortemConfig(
        *("", "", ""),
        patterns=tuple(dict.fromkeys(logs)),
        since_s=past(since, epoch_seconds) or records.since_s,
        max_files=max_files,
        limit_s=timeout,
        rank_pattern=regex,
        job=job or "",
        uid=-1 if patterns or records.uid is None else records.uid,
        kernel_s=int(max(60, now - records.since_s)) if records.since_s else _KERNEL_S,
    )
    if local:
        nodes = local_targets(Policy(), sudo=options.sudo)
    else:
        nodes = targets_of_ended_job(inventory, options, job, screen)
    with nodes.transport:
        document = _ask_nodes(nodes, options, config, job or "", records)
    if not document.logs and not document.gaps:
        raise Refused(f"{document.source}: no file matches, on {node_set(nodes.policies)}")
    keeper = LookKeeper(screen, "postmortem", inventory or "")
    keeper.keep_postmortem(document, postmortem_code(document), nodes.policies, records.uid)
    return _show(outputs, options, document)


def _show(outputs: Any, options: TargetOptions, document: Postmortem) -> int:
    outputs.show(document, options.screen(), mode=0o600)
    return postmortem_code(document)
