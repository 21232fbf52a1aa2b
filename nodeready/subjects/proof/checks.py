"""The checks of what was proved by acting, as one subject; also those of no session."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.subjects.fact_kinds import FactKinds
from nodeready.subjects.proof import facts
from nodeready.subjects.proof.debugging import (
    attach,
    attach_native,
    attach_nonblocking,
    backtrace,
    core,
    gdb,
    strace,
)
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.peers import mesh, pdsh, ports, ssh
from nodeready.subjects.proof.session import observation, resources, user
from nodeready.subjects.proof.session_limits import limits
from nodeready.subjects.result import (
    Result,
    Subject,
    check,
    fail,
    join_first,
    na,
    ok,
    unknown,
    warn,
)
from nodeready.subjects.severity import LEMONS, loses_job

_SMOKE_FIX = (
    "nodeready smoke INVENTORY --exclude-out FILE looks longer, and writes who is left out"
)
_COUNTERS_FIX = "look at what these count with gpus.*, nics.* and rdma.*"


@check(
    "proof.collective",
    loses_job("inspect"),
    proof=facts.COLLECTIVE,
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
    result = observation(check, observed, "collective", facts.ProvedCollective)
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


_FIX = (
    "nodeready lemons shows the evidence: replace the node or the GPU; after a repair, waive "
    "proof.history for the node until its old failures are forgotten"
)


@check(
    "proof.history",
    loses_job("inspect", "replace", source=LEMONS),
    settings=("lemon_nodes",),
    proof=facts.HISTORY,
    fix=(_FIX,),
)
def history(observed: Proved, policy: Policy) -> Result:
    """The node and its GPUs did not fail far more often than their peers in the last 90 days.

    The looks that this machine has kept are read (`nodeready lemons`). A node that passes today
    and failed on many days is the likeliest to end the next job: three of 63 nodes caused more
    than half of all exclusions in one fleet (arXiv 2605.09370). A GPU is known by its serial
    number, and its earlier nodes count when it fails here, too. It is `na` where no look was
    kept, and on the node itself.
    """
    check = "proof.history"
    if policy.lemon_nodes == "ignore":
        return na(check, "the policy ignores it (lemon_nodes)")
    if not isinstance(observed.history, facts.ProvedHistory):
        return na(check, "not proved")
    expected = "fails no more often than its peers"
    if not observed.history.lemons:
        return ok(check, expected)
    actual = join_first(observed.history.lemons)
    judge = fail if policy.lemon_nodes == "fail" else warn
    return judge(check, expected, actual, "the memory of earlier looks", _FIX)


#: In the order of the reports.
_CHECKS = (
    user, limits, attach, attach_nonblocking, attach_native, gdb, strace, core, backtrace,
    resources, ssh, pdsh, ports, mesh, collective, history,
)  # fmt: skip

SUBJECT = Subject(
    "proof",
    "The session in which the proofs ran: whose it is, and its limits.",
    checks=_CHECKS,
    kinds=FactKinds(
        # The proofs act: their results are compared.
        volatile="""
            user limits attach control logins ssh shell login step tracers core resources peers
            reach mesh collective history
        """
    ),
)
