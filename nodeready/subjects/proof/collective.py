"""Judge the collective over all nodes that `nodeready smoke` makes."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, fail, join_first, na, ok, unknown, warn
from nodeready.core.severity import loses_job
from nodeready.subjects.proof.facts import COLLECTIVE, Proved, ProvedCollective
from nodeready.subjects.proof.preconditions import observation

_SMOKE_FIX = (
    "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"
)
_COUNTERS_FIX = "look at what these count with gpus.*, nics.* and rdma.*"


@check(
    "proof.collective",
    loses_job("inspect"),
    proof=COLLECTIVE,
    opt_in=True,
    fix=(_SMOKE_FIX, _COUNTERS_FIX),
)
def collective(observed: Proved, policy: Policy) -> Result:
    """A collective over all nodes passes, with right results, as `nodeready smoke` makes one.

    It takes minutes and the idle GPUs, so it runs only by its full name, ``--only
    proof.collective``, with a budget to match (``--budget 300``). The engine is the best that most
    nodes have: the job's own PyTorch (policy smoke_python, smoke_prefix, smoke_environment), else
    plain TCP between pairs of nodes. A node fails with the evidence against it, also when it fails
    only with one other node, or only together with several, and if NCCL chose another network
    there than the policy's nccl_network. A slower network than on most nodes, and new errors of a
    GPU or a port on a node that passed, are a warning.
    """
    check, expected = "proof.collective", "all nodes together pass"
    result = observation(check, observed, "collective", ProvedCollective)
    if isinstance(result, Result):
        return result
    if result.nodes < 2:
        return na(check, "one node alone")
    if result.against:
        return fail(check, expected, join_first(result.against), result.engine, _SMOKE_FIX)
    if result.untested:
        return (na if result.lacking else unknown)(check, result.untested)
    if result.warnings:
        return warn(check, expected, join_first(result.warnings), result.engine, _COUNTERS_FIX)
    network = f", network {result.network}" if result.network else ""
    return ok(check, expected, f"{result.engine}{network}: {result.proves}")
