"""Judge a node by its earlier failures."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, fail, join_first, na, ok, warn
from nodeready.core.severity import LEMONS, loses_job
from nodeready.subjects.proof.facts import HISTORY, Proved, ProvedHistory

_FIX = (
    "nodeready lemons shows the evidence: replace the node or the GPU; after a repair, waive "
    "proof.history for the node until its old failures are forgotten"
)


@check(
    "proof.history",
    loses_job("inspect", "replace", source=LEMONS),
    settings=("lemon_nodes",),
    proof=HISTORY,
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
    if not isinstance(observed.history, ProvedHistory):
        return na(check, "not proved")
    expected = "fails no more often than its peers"
    if not observed.history.lemons:
        return ok(check, expected)
    actual = join_first(observed.history.lemons)
    judge = fail if policy.lemon_nodes == "fail" else warn
    return judge(check, expected, actual, "the memory of earlier looks", _FIX)
