"""Judge the collective over all nodes that `nodeready smoke` makes."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.subjects.proof.facts import COLLECTIVE, Proved, ProvedCollective
from nodeready.subjects.proof.preconditions import observation
from nodeready.subjects.result import (
    Result,
    check,
    fail,
    join_first,
    na,
    ok,
    unknown,
    warn,
)


@check(
    "proof.collective",
    proof=COLLECTIVE,
    opt_in=True,
    fix=(
        "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out",
        "look at what these count with gpus.*, nics.* and rdma.*",
    ),
)
def collective(observed: Proved, policy: Policy) -> Result:
    """A collective over all nodes passes, with right results, as `nodeready smoke` makes one.

    It takes minutes and the idle GPUs, so it runs only by its full name, ``--only
    proof.collective``, with a budget to match (``--budget 300``). The engine is the best that most
    nodes have: the job's own PyTorch (policy smoke_python, smoke_prefix, smoke_environment), else
    a plain ring over TCP. A node fails with the evidence against it, also when it fails with one
    other node alone, or at that number of nodes alone. New errors of a GPU or a port on a node
    that passed are a warning.
    """
    check, expected = "proof.collective", "all nodes together pass"
    result = observation(check, observed, "collective", ProvedCollective)
    if isinstance(result, Result):
        return result
    if result.nodes < 2:
        return na(check, "one node alone")
    if result.against:
        fix = (
            "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"
        )
        return fail(check, expected, join_first(result.against), result.engine, fix)
    if result.untested:
        return (na if result.lacking else unknown)(check, result.untested)
    if result.warnings:
        fix = "look at what these count with gpus.*, nics.* and rdma.*"
        return warn(check, expected, join_first(result.warnings), result.engine, fix)
    return ok(check, expected, f"{result.engine}: {result.proves}")
