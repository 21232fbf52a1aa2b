"""The run of `nodeready postmortem`: the evidence on a dead job, from its nodes or a directory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from nodeready.agent.asking import new_nonce
from nodeready.agent.postmortem import PostmortemConfig
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import node_gaps
from nodeready.core.policy import Policy
from nodeready.core.text import utc_now
from nodeready.fleet.inventory.nodeset import folded
from nodeready.runs import targets
from nodeready.runs.memory.kept_looks import LookKeeper
from nodeready.runs.options import PostmortemOptions
from nodeready.runs.postmortem.collect import EvidenceBuilder, fetch_failures, postmortem_of
from nodeready.runs.postmortem.directory import NoEvidenceError, read_directory
from nodeready.runs.postmortem.document import Postmortem, postmortem_code
from nodeready.runs.postmortem.evidence import JobEvidence, SlurmRecords
from nodeready.runs.postmortem.slurm_records import slurm_records
from nodeready.runs.targets import Targets, converse, keep_gaps
from nodeready.runs.tell import Tell
from nodeready.runs.values import checked_pattern

#: Age of the kernel's messages that are read, where the job's start is not known.
_KERNEL_S = 24 * 3600


def run(inventory: str | None, options: PostmortemOptions, tell: Tell) -> Postmortem:
    """Who failed first. Raises Refused.

    inventory: None: this machine, the job's nodes, or the directory of ``--from``
    """
    if options.source is not None:
        return _read_directory(options.source, options.rank_pattern)
    job, patterns = options.job, options.patterns
    by_job = options.via != "ssh" and job is not None
    if options.local == (inventory is not None) and not by_job:
        raise Refused("give an INVENTORY, --local or --from DIR")
    if options.local and (options.via != "ssh" or options.limit is not None):
        raise Refused("--local: cannot be combined with --via or --limit")
    if not job and not patterns:
        raise Refused("give --job ID, --logs PATTERN or --from DIR")
    records = slurm_records(job or "")
    config = _search(options, records, tell)
    if options.local:
        nodes = targets.local_targets(Policy(), sudo=options.sudo)
    else:
        nodes = targets.targets_of_ended_job(inventory, options, job, tell)
    with nodes.transport:
        document = _ask_nodes(nodes, config, records, tell)
    if not document.logs and not document.gaps:
        raise Refused(f"{document.source}: no file matches, on {folded(nodes.policies)}")
    keeper = LookKeeper(tell, "postmortem", inventory or "")
    keeper.keep_postmortem(document, postmortem_code(document), nodes.policies, records.uid)
    return document


def _read_directory(source: str, rank_pattern: str) -> Postmortem:
    started = utc_now()
    try:
        evidence = read_directory(Path(source), rank_pattern)
    except NoEvidenceError as problem:
        raise Refused(f"--from {problem}") from None
    except OSError as problem:
        raise Refused(f"--from {problem.filename or source}: {problem.strerror}") from None
    return postmortem_of(evidence, started=started, source=source)


def _search(options: PostmortemOptions, records: SlurmRecords, tell: Tell) -> PostmortemConfig:
    """What the program on the nodes has to read. Raises Refused."""
    job, patterns = options.job, options.patterns
    logs = [*map(checked_pattern, patterns), *([] if patterns else records.logs)]
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
        tell.note(f"Slurm says that job {job} still runs: nodeready stacks shows where")
    if records.since_s and not patterns:
        # PyTorch's watchdog dumps its flight recorder there, unless the job says another place.
        logs.append("/tmp/nccl_trace_rank_*")
    kernel_s = int(max(60, time.time() - records.since_s)) if records.since_s else _KERNEL_S
    return PostmortemConfig(
        *("", "", ""),
        patterns=tuple(dict.fromkeys(logs)),
        since_s=options.since_s or records.since_s,
        max_files=options.max_files,
        limit_s=options.timeout,
        rank_pattern=options.rank_pattern,
        job=job or "",
        uid=-1 if patterns or records.uid is None else records.uid,
        kernel_s=kernel_s,
    )


def _ask_nodes(
    nodes: Targets, config: PostmortemConfig, records: SlurmRecords, tell: Tell
) -> Postmortem:
    """The document of all nodes' answers."""
    evidence = JobEvidence(
        steps=records.steps, sources=records.sources, missing=records.missing, nodes=records.nodes
    )
    evidence.add_script("the batch script", records.script)
    config = replace(config, variables=tuple(evidence.script_variables.items()))
    builder, started, transport = EvidenceBuilder(evidence), utc_now(), nodes.transport
    if transport.one_text:
        config = replace(config, nonce=new_nonce())
    outcomes = converse(
        transport, tell, "reading", lambda name: fetch_failures(name, config, transport.tag)
    )
    for name, outcome in outcomes.items():
        if outcome.value is not None:
            builder.add(name, outcome.value)
    lost = {name: outcome.gap for name, outcome in outcomes.items() if outcome.gap}
    gaps, complete = node_gaps({**builder.gaps, **lost}), not transport.interrupted
    keep_gaps(nodes, tell, gaps, complete=complete)
    return postmortem_of(
        builder.complete(),
        started=started,
        job=config.job,
        source=" ".join(config.patterns),
        gaps=gaps,
        complete=complete,
    )
