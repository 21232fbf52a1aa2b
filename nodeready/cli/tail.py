"""`nodeready tail`: the last lines of every rank's log, over all nodes, grouped when equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from nodeready.agent.asking import Conversation, new_nonce
from nodeready.agent.tail import TailConfig
from nodeready.cli.conversations import converse, remember_gaps
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.options import (
    MAX_SPAN_S,
    Refused,
    candidates_of,
    command,
    option,
    rank_pattern_option,
    report_options,
    since_option,
    span_option,
    srun_job_option,
    transport_options,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.targets import TargetOptions, Targets, local_targets, select_targets
from nodeready.cli.values import (
    checked_pattern,
    checked_regex,
    epoch_seconds,
    past,
    read_ranks,
)
from nodeready.core.outcome import gaps_code
from nodeready.core.policy import Policy
from nodeready.core.text import utc_now
from nodeready.reports.lines import node_set
from nodeready.runs.tail import Grouping, TailDocument, fetch_tail


def _fetch(nodes: Targets, options: TargetOptions, config: TailConfig) -> TailDocument:
    """The document of all nodes' answers; after an interrupt, of the answers so far."""
    grouping, started, screen = Grouping(), utc_now(), options.screen()
    transport = nodes.transport
    if transport.one_text:
        config = replace(config, nonce=new_nonce())

    def converse_with(name: str) -> Conversation[None]:
        tail = yield from fetch_tail(name, config, transport.tag)
        # Grouped now, so that equal lines of many nodes are in memory only once.
        grouping.add(name, tail)

    outcomes = converse(transport, screen, "reading", converse_with)
    gaps = remember_gaps(nodes, screen, outcomes.values(), grouping.gaps)
    return grouping.document(
        started=started,
        finished=utc_now(),
        pattern=config.pattern,
        grep=config.grep,
        gaps=gaps,
        complete=not transport.interrupted,
    )


def _no_file_reason(tail: TailDocument) -> str:
    """One line that says why no node has a file; "" if a node has one, or may have one."""
    kinds = {group.kind for group in tail.groups}
    if tail.gaps or not tail.complete:
        return ""
    if kinds & {"lines", "stopped", "unreadable"}:
        return ""
    skipped = [group for group in tail.groups if group.kind == "skipped"]
    if skipped:
        return f"{tail.pattern}: no file to read: {skipped[0].example} {skipped[0].reason}"
    reasons = {group.reason for group in tail.groups if group.kind == "no-file"}
    names = node_set([node for group in tail.groups for node in group.nodes])
    return f"{tail.pattern}: {' or '.join(sorted(reasons))}, on {names}"


@command()
@click.argument(
    "words",
    nargs=-1,
    metavar="[INVENTORY] PATTERN",
    shell_complete=candidates_of("inventories"),
)
@option("--local", is_flag=True, help="This machine, without any connection; no INVENTORY.")
@option(
    *("-n", "--lines"),
    type=click.IntRange(1, 1000),
    default=10,
    metavar="LINES",
    help="Lines per file.",
)
@option("--grep", metavar="REGEX", help="Only lines that match REGEX, and their number.")
@option("--rank", metavar="RANKS", help="Only lines of these ranks: 3,5-7 or 0-504/8.")
@rank_pattern_option
@span_option(
    *("--newer", "newer_s"),
    minimum_s=1,
    maximum_s=MAX_SPAN_S,
    is_whole=True,
    help="Only files written in the last 90s, 10m, 2h, 3d.",
)
@since_option("files written")
@option(
    "--max-files",
    type=click.IntRange(1, 1000),
    default=64,
    metavar="N",
    help="Maximum files per node, the most recently written first.",
)
@report_options("tail", general=False)
@srun_job_option
@transport_options
def tail(
    words: tuple[str, ...],
    *,
    local: bool,
    lines: int,
    grep: str | None,
    rank: str | None,
    rank_pattern: str | None,
    newer_s: int | None,
    since: str | None,
    max_files: int,
    format: str,
    output: tuple[str, ...],
    job: str | None,
    **shared: Any,
) -> int:
    """Show the last lines of all files that match PATTERN on the nodes of INVENTORY.

    Files with equal lines are shown once, the odd one out first; times, ranks, process numbers,
    addresses and the node's name count as equal. Files that were last written more than a minute
    before most files come first. A file with lines of many ranks counts as a file for each rank;
    the prefixes of launchers are recognised. The messages of PyTorch's watchdogs follow, the rank
    with the least progress first. PATTERN is an absolute path with *, ?, [...] and **,
    quoted so that the nodes expand it, and not your shell. Reads only, at most the last 256 KB of
    a file, or 16 MB of a file of many ranks.

    \b
    Examples:
      nodeready tail inventories/prod.py '/var/log/train/rank_*.log'
      nodeready tail 'gpu[001-064]' '~/logs/**/*.err' -n 1 --newer 2h
      nodeready tail inventories/prod.py '/scratch/trace*' --grep backward
      nodeready tail login1 '/scratch/slurm-4711.out' -n 1 --rank 0-7
      nodeready tail --local '/tmp/torchelastic_*/**/stderr.log'
    """
    options = TargetOptions(**shared)
    if len(words) == 1 and not local and (default := find_inventory(None, options)):
        words = (default, *words)
    expected_count = 1 if local else 2
    if len(words) < expected_count:
        raise click.UsageError("Missing PATTERN." if local else "Missing INVENTORY or PATTERN.")
    if len(words) > expected_count:
        raise Refused(
            f"{len(words) - expected_count + 1} PATTERNs: quote it, so that the nodes expand it"
        )
    if local and options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    config = TailConfig(
        *(
            "",
            "",
            checked_pattern(words[-1]),
            lines,
            checked_regex("--grep", grep),
            newer_s or 0,
        ),
        since_s=past(since, epoch_seconds),
        max_files=max_files,
        ranks=read_ranks(rank),
        rank_pattern=checked_regex("--rank-pattern", rank_pattern),
    )
    outputs = read_outputs("tail", format, output)
    if local:
        nodes = local_targets(Policy(), sudo=options.sudo)
    else:
        nodes = select_targets(words[0], options, job=job, tell=options.screen().note)
    with nodes.transport:
        document = _fetch(nodes, options, config)
    if reason := _no_file_reason(document):
        raise Refused(reason)
    outputs.show(document, options.screen(), mode=0o600)
    return gaps_code(document.gaps, complete=document.complete, check=not document.has_all_files)
