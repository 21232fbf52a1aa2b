"""`nodeready incident`: keep the evidence of a hang before the job is ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.agent.gate import here
from nodeready.agent.secrets import redact, redacted
from nodeready.cli.audit_run import audit_document
from nodeready.cli.conversations import ask_with_progress, converse, keep_gaps, probe_nodes
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.jobs import IF_ENDED, running_lines
from nodeready.cli.options import (
    Refused,
    command,
    format_option,
    inventory_argument,
    local_option,
    option,
    output_directory,
    timeout_option,
    transport_options,
)
from nodeready.cli.screen import Screen, show
from nodeready.cli.targets import (
    TargetOptions,
    Targets,
    local_policy,
    local_targets,
    select_targets,
)
from nodeready.core.outcome import Outcome, node_gaps
from nodeready.core.policy.policy import digest
from nodeready.core.text import utc_now
from nodeready.reports.registry import FORMATS, Options, find_format
from nodeready.runs.collector import EvidenceCollector
from nodeready.runs.incident import Directory, ForeignDirectory, incident_code, prepare
from nodeready.runs.stacks.collect import SearchError, program_config
from nodeready.subjects.registry import CheckSelection, select
from nodeready.subjects.snapshot import Snapshot


def collector(
    targets: Targets, screen: Screen, job: str, user: str, timeout_s: int, *, owner: str = ""
) -> EvidenceCollector:
    """The EvidenceCollector of this job on these nodes."""
    transport = targets.transport

    @contextmanager
    def audit_nodes(names: list[str]) -> Iterator[Audit]:
        started = utc_now()
        selection = select(targets.policies.values(), subjects=here.LOCAL_SUBJECTS)
        outcomes = probe_nodes(targets, screen, selection.subjects, names=names)
        if targets.inventory is not None:
            from nodeready.runs.audit.workers import AuditWorkers

            write_facts = find_format("audit", "json").write_facts
            with AuditWorkers(targets.policies, write_facts, 0) as workers:
                yield audit_document(
                    targets, screen, selection, outcomes, started=started, workers=workers
                )
        else:
            yield _audit_without_fleet(outcomes, targets, selection, started)

    return EvidenceCollector(
        transport,
        targets.policies,
        job,
        user,
        timeout_s,
        ask_with_progress(transport, screen),
        lambda activity, conversation, names: converse(
            transport, screen, activity, conversation, names
        ),
        render,
        audit_nodes,
        owner,
    )


def _audit_without_fleet(
    outcomes: list[Outcome[Snapshot]], targets: Targets, selection: CheckSelection, started: str
) -> Audit:
    """The audit of nodes without an inventory: without peers and the fleet's host keys."""
    reports = []
    for outcome in outcomes:
        policy = targets.policies[outcome.node]
        results = here.judge_alone(outcome.value, policy) if outcome.value else []
        reports.append(
            NodeReport.of(
                outcome.node,
                selection.of(results),
                snapshot=outcome.value,
                seconds=round(outcome.seconds, 3),
                gap=outcome.gap,
            )
        )
    policies = {targets.policies[outcome.node] for outcome in outcomes}
    complete = not targets.transport.interrupted
    return Audit(started, utc_now(), digest(policies), tuple(reports), complete=complete)


def render(kind: str, document: Any) -> dict[str, Iterable[str]]:
    """File extension -> the text of the document in that format; of an audit, without secrets."""
    options = Options(verbose=1)
    if kind == "audit":
        data = json.loads("".join(find_format("audit", "json").render(document)))
        table = find_format("audit", "table").render(document, options)
        return {
            ".json": [json.dumps(redacted(data), indent=1), "\n"],
            ".txt": (redact("", line) for line in table),
        }
    return {form.extension: form.render(document, options) for form in FORMATS[kind].values()}


def nodes_of_job(
    inventory: str | None, job: str, options: TargetOptions, *, local: bool
) -> tuple[Targets, str]:
    """The nodes, and the job's id as its processes have it. Raises Refused."""
    if local and (inventory is not None or options.via != "ssh"):
        raise Refused("--local: cannot be combined with an INVENTORY or --via")
    if not local and inventory is None and options.via == "ssh":
        raise Refused("give an INVENTORY, --local, or --via srun")
    if local and options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    if local:
        return local_targets(local_policy(options), sudo=options.sudo), job
    srun_job = job if options.via == "srun" or inventory is None else None
    targets = select_targets(inventory, options, job=srun_job, tell=options.screen().note)
    return targets, targets.job or job


def _make_directory(path: Path) -> Directory:
    """Make the directory of ``-o``. Raises Refused."""
    try:
        return prepare(path)
    except ForeignDirectory as problem:
        raise Refused(f"-o {problem}") from None
    except OSError as problem:
        raise Refused(f"-o {problem.filename}: {problem.strerror}") from None


def refuse_bad_search(timeout: int, job: str, user: str | None) -> None:
    """Raises Refused for values with which no rank can be searched for."""
    try:
        program_config(timeout, job=job, user=user or "")
    except SearchError as problem:
        raise Refused(str(problem)) from None


# --- Options of `incident` and `watch`.

JOB = option(
    "--job", metavar="ID", required=True, help="The job: of Slurm, torchrun, or ADDRESS:PORT."
)
USER = option("--user", metavar="NAME", help="Only ranks of this user.")
TIMEOUT = timeout_option("Maximum time for the stacks of one node, after it is connected.")


@command()
@inventory_argument
@local_option
@JOB
@USER
@TIMEOUT
@output_directory("New directory for the evidence; DIR.tar.gz gets the same.", general=False)
@format_option("incident", help="Output format of the index.", general=False)
@transport_options
def incident(
    inventory: str | None,
    *,
    local: bool,
    job: str,
    user: str | None,
    timeout: int,
    output: str | None,
    format: str,
    **shared: Any,
) -> int:
    """Keep the evidence of a job that hangs in one archive. Changes nothing on the nodes.

    The stacks of all ranks in every form, all witnesses, the ends of the job's logs, backtraces of
    its cores, and the audit of its nodes: in a new directory and one archive, without secrets. A
    part that fails is named in the index, and the other parts are still kept.

    \b
    Examples:
      nodeready incident inventories/prod.py --job 4711 -o hang-4711
      nodeready incident --via srun --job 4711 -o hang-4711   # no ssh, no root
      nodeready incident --local --job 4711 -o hang-4711
      nodeready stacks --from hang-4711/stacks
    """
    options = TargetOptions(**shared)
    if output is None:
        raise Refused("-o is missing: name a new directory with -o DIR")
    refuse_bad_search(timeout, job, user)
    screen = options.screen()
    inventory = find_inventory(inventory, options, elsewhere=local or options.via != "ssh")
    nodes, name = nodes_of_job(inventory, job, options, local=local)
    directory = _make_directory(Path(output))
    with nodes.transport:
        evidence = collector(nodes, screen, name, user or "", timeout)
        incident, problem = evidence.collect(directory, "taken on request")
        is_empty = incident.complete and evidence.is_empty(incident)
        running = running_lines(nodes, screen) if is_empty else []
    gaps = {gap.node: gap.gap for part in incident.parts for gap in part.gaps}
    keep_gaps(nodes, screen, node_gaps(gaps), complete=incident.complete)
    if is_empty:
        directory.remove()
        stacks = next(part for part in incident.parts if part.name == "stacks")
        text = f"{stacks.reason}; the job has no core file either: nothing is kept"
        raise Refused("\n".join([text, *running, IF_ENDED]))
    if problem:
        screen.say(f"no archive: {problem}")
    code = incident_code(incident)
    shown = Options(inventory=options.words(inventory))
    show("incident", format, incident, screen, silent=screen.quiet and not code, options=shown)
    return code
