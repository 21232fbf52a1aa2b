"""`nodeready audit` and `nodeready learn` on real nodes: results, and that they change nothing."""

import re
import sys
from pathlib import Path

from nodeready.subjects.registry import LOOKED_AT
from tests.command import ours, written
from tests.helpers import project

#: Subjects that a fresh node of the lab passes without a deploy.
HEALTHY = "gpus,nics,rdma,ports,host"
#: For the subject of a site's own checks.
SITE_CHECKS = [{"id": "name", "run": "uname -s", "equals": "Linux"}]


def test_nothing_is_written_on_a_node(fresh_nodes, fleet, tool):
    """Neither by a look at everything, nor where nothing could be written; and nothing is left."""
    nodes = fresh_nodes(2)
    shut = nodes[1]
    shut.enter(["sh", "-c", "for d in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o ro x $d; done"])
    before = [written(node) for node in nodes]
    where = fleet(nodes, site_checks=SITE_CHECKS)
    done = tool("audit", where, "--format", "json", "--skip", "host", status=3)
    assert [written(node) for node in nodes] == before
    first, second = (
        {check: result["status"] for check, result in results.items()}
        for results in done.results.values()
    )
    assert first == second
    assert "unknown" not in first.values(), done
    assert {check.partition(".")[0] for check in first} == set(LOOKED_AT) - {"host"}
    assert all(ours(node) == [] for node in nodes)


def test_waivers_are_listed_with_what_they_hide_and_the_expired_hides_nothing(
    fresh_node, fleet, tool
):
    waivers = {
        "ptrace.scope": {"reason": "ticket 4711", "until": "9999-12-31", "nodes": fresh_node.name},
        "limits.core": {"reason": "batch", "owner": "bob", "until": "2000-01-01"},
    }
    where = fleet([fresh_node], waivers=waivers)
    assert tool("waivers", where, "--offline").status == 3
    done = tool("waivers", where, "--format", "json")
    expired, holds = done.document["waivers"]
    assert (done.status, expired["state"], holds["state"]) == (3, "expired", "holds"), done
    (finding,) = holds["findings"]
    assert (finding["status"], finding["actual"]) == ("waived", "1, next boot unset")
    assert expired["findings"][0]["actual"].endswith("the waiver of bob expired after 2000-01-01")
    done = tool("audit", where, "--only", "ptrace.scope,limits.core")
    assert (done.status, "the waiver of bob expired" in done.out) == (3, True), done
    # What is accepted is not changed either: deploy and audit cannot disagree.
    assert tool("deploy", where, "--only", "ptrace", "--yes").status == 0
    assert fresh_node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "1\n"


def test_an_odd_node_is_an_outlier_and_fails_once_the_policy_is_learned(fresh_nodes, fleet, tool):
    nodes = fresh_nodes(3)
    odd = nodes[-1]
    odd.run("ip link set eth0 mtu 1400")
    where = fleet(nodes)
    words = ("audit", where, "--only", HEALTHY, "--format", "json")
    done = tool(*words, status=0)
    (outlier,) = done.document["outliers"]
    assert (outlier["fact"], outlier["nodes"]) == ("nics.eth0.mtu", {odd.name: 1400})

    # pyinfra reads the group's file beside the inventory; its name is that of the group.
    learned = where.parent / "group_data" / "lab.py"
    learned.parent.mkdir()
    done = tool("learn", where, "-o", learned)
    assert (done.status, done.out) == (0, ""), done
    text = learned.read_text()
    assert f"# eth0 mtu: 2 of 3 nodes; {odd.name}: 1400\n" in text
    again = tool("learn", where, "-o", learned)
    assert (again.status, learned.read_text(), "exists" in again.err) == (2, text, True), again
    done = tool(*words, status=3)
    bad = {
        name: [check for check, result in results.items() if result["status"] not in ("ok", "na")]
        for name, results in done.results.items()
    }
    assert bad == {node.name: ["nics.mtu"] * (node is odd) for node in nodes}


def test_counters_are_judged_by_their_change(fresh_node, fleet, tool):
    """The first audit has nothing to compare with; a flap between two audits is reported once."""
    words = ("audit", fleet([fresh_node]), "--only", "nics.flaps", "--format", "json")

    def flaps() -> str:
        return tool(*words).results[fresh_node.name]["nics.flaps"]["status"]

    assert [flaps(), flaps()] == ["na", "ok"]
    fresh_node.enter(["sh", "-c", "ip link set eth0 down; ip link set eth0 up"])
    assert flaps() in ("warn", "fail")
    assert flaps() == "ok"


def test_without_root(fresh_nodes, fleet, tool):
    """Complete, and what needs root is unknown with that reason, or does not apply."""
    (node,) = fresh_nodes(1, profile="h100")
    where = fleet([node], {node.name: {"ssh_user": "ml"}}, site_checks=SITE_CHECKS)
    done = tool("audit", where, "--format", "json", status=3)
    results = done.results[node.name].values()
    assert {result["check"].partition(".")[0] for result in results} == set(LOOKED_AT)
    unknown = [result for result in results if result["status"] == "unknown"]
    assert all(re.search("root|permi", result["actual"], re.I) for result in unknown), unknown
    bad = {result["check"] for result in results if result["status"] in ("fail", "warn")}
    assert not {check for check in bad if check.partition(".")[0] in HEALTHY.split(",")}


def test_each_subject_is_a_fact_for_pyinfra(lab, fleet):
    """`pyinfra INVENTORY fact nodeready.facts.Gpus`: plain data of every subject."""
    names = ["".join(map(str.capitalize, name.split("_"))) for name in LOOKED_AT]
    facts = [f"nodeready.facts.{name}" for name in names]
    pyinfra = Path(sys.executable).with_name("pyinfra")
    done = project(pyinfra, fleet(lab.nodes[:1]), "fact", *facts, status=0)
    shown = done.stdout + done.stderr
    for name in names:
        assert re.search(rf"nodeready\.facts\.{name}|Fact data for: {name}", shown), name
    assert '"unknown":' not in shown
    assert '"boot_id"' in shown
    assert '"nccl_socket_ifname"' in shown
