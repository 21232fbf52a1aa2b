"""Whether a variable of the job's environment explains its end. Pure.

The variables come from the logs, the batch script and the ranks that still run. They are judged as
those of a hanging job are (`nodeready.subjects.environment_rules`). Only a fault that lets no job
work, and that fits the failure, is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from nodeready.runs.postmortem.evidence import JobEvidence, LiveRank, RankFinder, place_text
from nodeready.subjects.environment_rules import EnvironmentFinding, RankEnvironment, judge
from nodeready.subjects.environment_table import RankVariables

#: Variable of a fault -> the words of a failure that it explains: those of the library that uses
#: the variable, or of an address or a GPU.
_EXPLAINED = (
    (r"GLOO_", r"(?i)gloo|connectFullMesh"),
    (r"TP_", r"(?i)tensorpipe|rpc"),
    (r"OMPI_|UCX_", r"MPI|ORTE|PRTE|UCX|\bBTL\b|mpirun"),
    (r"NCCL_|$", r"(?i)nccl|no socket interface found"),
    (r"MASTER_ADDR", r"(?i)client socket|store\b|connect|rendezvous|resol|timed out"),
    (r"MASTER_PORT", r"(?i)address already in use|EADDRINUSE|client socket|store\b|rendezvous"),
    (r"CUDA_|HIP_|ROCR_", r"(?i)device ordinal|capable device|duplicate gpu|No \w+ GPUs"),
)
#: Kinds of a cause that a fault may explain.
_KINDS = ("network", "timeout", "gpu", "exception", "unclear")


class _ShownEnvironment(NamedTuple):
    """The environment of a rank, or of ranks of a node that are not known."""

    variables: dict[str, str]
    origins: dict[str, str]  # variable -> where it is shown
    # a rank that still runs, whose whole environment is known; None: variables are missing
    live: LiveRank | None = None


class EnvironmentFault(NamedTuple):
    """A fault of the environment. origins: where its variable is shown, one line each"""

    finding: EnvironmentFinding
    origins: tuple[str, ...]


def explaining_faults(
    evidence: JobEvidence,
    finder: RankFinder,
    node_of: Mapping[int, str],
    kind: str,
    texts: Iterable[str],
) -> Iterator[EnvironmentFault]:
    """The faults of the environment that explain a cause of this kind with these texts.

    node_of: rank -> its node
    """
    words = "\n".join(texts)
    if kind not in _KINDS or not words:
        return
    environments = _environments(evidence, finder, node_of)
    ranks = []
    for (node, rank), (variables, _, live) in environments.items():
        observed = live.variables if live else RankVariables()
        place = rank, live.local_rank if live else None, observed.cpus, observed.contained
        ranks.append(RankEnvironment(node, variables, *place))
    versions = {file.failures.facts.nccl for file in evidence.files} - {""}
    findings = judge(ranks, evidence.environment_facts, nccl=min(versions, default=""))
    if not all(environment.live for environment in environments.values()):
        # A variable that no line shows may be set.
        findings = tuple(f for f in findings if f.value and "not set on" not in f.problem)
    for finding in (*evidence.environment_findings, *findings):
        if finding.weight > 1 and any(
            re.match(variable, finding.variable) and re.search(pattern, words)
            for variable, pattern in _EXPLAINED
        ):
            ranks_named, nodes_named = set(finding.ranks), set(finding.nodes)
            origins = [
                environment.origins.get(finding.variable, "")
                for (node, rank), environment in environments.items()
                if (rank in ranks_named if ranks_named else node in nodes_named)
            ]
            yield EnvironmentFault(finding, tuple(dict.fromkeys(filter(None, origins)))[:3])


def _environments(
    evidence: JobEvidence, finder: RankFinder, node_of: Mapping[int, str]
) -> dict[tuple[str, int | None], _ShownEnvironment]:
    """Node and rank -> environment."""
    shown: dict[tuple[str, int | None], _ShownEnvironment] = {}

    def environment(node: str, rank: int | None) -> _ShownEnvironment:
        script = evidence.script_variables
        origins = dict.fromkeys(script, evidence.script)
        return shown.setdefault((node, rank), _ShownEnvironment(dict(script), origins))

    for rank, node in node_of.items():
        environment(node, rank)
    for file in evidence.files:
        for variable in file.failures.facts.variables:
            node, number = finder.node_of(file, variable.host), variable.rank
            if number is None and variable.local_rank is not None:
                number = finder.global_rank(node, variable.local_rank)
            elif number is None:
                number = finder.file_rank(file)
            if number is not None:
                node = node_of.get(number, node)
            variables, origins, _ = environment(node, number)
            variables[variable.name] = variable.value
            path = file.failures.path
            origins[variable.name] = f"in {place_text(file.node, path, variable.line)}"
    nodes = {node for node, _ in shown}
    # Slurm may know the only node by another name than its logs.
    of_slurm = evidence.nodes if len(evidence.nodes) > 1 else ()
    for node in {*of_slurm, *(file.node for file in evidence.files)} - nodes:
        environment(node, None)
    for live in evidence.live_ranks:
        variables = dict(live.variables.variables)
        origins = dict.fromkeys(
            variables, f"in the environment of {live.node}'s process {live.pid}"
        )
        shown[live.node, live.rank] = _ShownEnvironment(variables, origins, live)
    is_placed = any(node for node, _ in shown)
    return {key: value for key, value in shown.items() if key[0] or not is_placed}
