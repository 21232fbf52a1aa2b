"""What `nodeready waivers` lists: the state of each waiver, and what it hides."""

from dataclasses import replace

from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.core.outcome import UNREACHABLE, NodeGap
from nodeready.core.result import Result
from nodeready.core.settings import Waiver
from nodeready.reports.registry import find_format
from nodeready.runs.audit.waiver_list import WaiverList, list_waivers, waivers_code
from tests.builders.results import fail, ok, unknown
from tests.cases import read_data

DAY, MOMENT = "2027-01-20", "2027-01-20T08:00:00Z"
WAIVED = Result("nics.mtu", "waived", "9000", "1500", "", "waived: cable")
#: Node -> its results.
NODES = {
    "gpu1": (WAIVED, fail("limits.core", "x", "0; the waiver of bob expired after 2027-01-19")),
    "gpu2": (WAIVED, ok("limits.core", "x"), unknown("ptrace.scope", "?")),
    "gpu3": (ok("nics.mtu", "9000"), ok("ptrace.scope", "0"), ok("host.swap", "off")),
}
#: Waiver -> its nodes, in the order of the list.
DECLARED = {
    Waiver("limits.core", "old", "bob", "2027-01-19"): ["gpu1", "gpu2"],
    Waiver("rdma.rate", "moved", nodes="ib[1-2]"): [],
    Waiver("host.swap", "swap"): ["gpu3"],
    # A waiver that ends later makes this one needless.
    Waiver("nics.mtu", "cable", "", "2027-06-30", "gpu2"): ["gpu2"],
    Waiver("ptrace.scope", "ticket 4711", "ana", "2027-02-03"): ["gpu2", "gpu3"],
    Waiver("nics.mtu", "cable"): ["gpu1", "gpu2", "gpu3"],
    # An audit does not judge it: nobody knows what it hides.
    Waiver("proof.core", "shared", "", "2027-02-04"): ["gpu3"],
}


def document(selected=("gpu1", "gpu2", "gpu3"), audited=True) -> WaiverList:
    nodes = tuple(NodeReport.of(name, results) for name, results in NODES.items())
    audit = Audit(MOMENT, MOMENT, "", nodes) if audited else None
    gaps = (NodeGap("gpu9", UNREACHABLE, "connection refused"),)
    return WaiverList(MOMENT, MOMENT, True, 3, list_waivers(DECLARED, selected, audit, DAY), gaps)


TABLE = read_data(__file__, "waivers.txt")


def test_each_waiver_is_listed_with_its_state_and_what_it_hides():
    assert "".join(find_format("waivers", "table").render(document())) == TABLE
    assert waivers_code(replace(document(), gaps=())) == 3
    assert waivers_code(document()) == 4


def test_a_selection_and_an_unasked_node_accuse_no_waiver():
    rows = document(("gpu3",)).waivers
    assert [(row.waiver.check, row.nodes, row.state) for row in rows] == [
        ("rdma.rate", (), "no node"),
        ("host.swap", ("gpu3",), "unused"),
        ("ptrace.scope", ("gpu3",), "ends"),
        # It hides findings of other nodes, which were not selected.
        ("nics.mtu", ("gpu3",), "holds"),
        ("proof.core", ("gpu3",), "holds"),
    ]
    offline = [row.state for row in document(audited=False).waivers]
    assert offline == ["expired", "no node", "unused", "ends", "holds", "holds", "holds"]
