"""The run of `nodeready env`: the variables for a job, from the nodes' facts."""

from __future__ import annotations

from nodeready.agent.asking import Request, new_nonce
from nodeready.core.outcome import gaps_of
from nodeready.core.result import FleetFacts
from nodeready.core.text import utc_now
from nodeready.fleet.transport.fleet_context import addresses_of_nodes
from nodeready.runs import targets
from nodeready.runs.conversations import ask_with_progress, keep_gaps, probe_nodes
from nodeready.runs.options import EnvOptions
from nodeready.runs.ready import debug_variables, job_env
from nodeready.runs.targets import Targets
from nodeready.runs.tell import Tell
from nodeready.runs.values import policy_settings


def run(inventory: str, options: EnvOptions, tell: Tell) -> job_env.Environment | None:
    """The environment for a job on the nodes; None: interrupted. Raises Refused."""
    taken, settings = utc_now(), policy_settings(options.ports, None)
    nodes = targets.select_targets(inventory, options, settings, job=options.job, tell=tell.note)
    with nodes.transport as transport:
        outcomes = probe_nodes(nodes, tell, job_env.SUBJECTS)
        if transport.interrupted:
            return None
        snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value}
        variables: list[job_env.JobVariable] = []
        if snapshots:
            fleet = FleetFacts(addresses=addresses_of_nodes(outcomes, transport.ssh_peers()))
            variables += job_env.variables(snapshots, nodes.policies, fleet)
        if options.debug and snapshots:
            installed = _installed(nodes, [*snapshots], options.python, tell)
            variables += debug_variables.debug_variables(installed, options.directory)
        gaps = gaps_of(outcomes)
        keep_gaps(nodes, tell, gaps)
    return job_env.Environment(taken, tuple(snapshots), gaps, tuple(variables))


def _installed(
    nodes: Targets, names: list[str], python: str, tell: Tell
) -> dict[str, debug_variables.InstalledTorch]:
    """Node -> what is installed there for jobs, for the nodes that were probed."""
    nonce = new_nonce()
    requests = {
        name: Request(name, debug_variables.question(python, nonce), debug_variables.ASK_S + 5)
        for name in names
    }
    answers = ask_with_progress(nodes.transport, tell)("versions", requests)
    return {
        name: debug_variables.read_installed(answer.stdout, nonce)
        if answer.ok
        else debug_variables.InstalledTorch(reason=answer.reason() or "no answer")
        for name, answer in answers.items()
    }
