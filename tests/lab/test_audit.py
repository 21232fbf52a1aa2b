"""`nodeready audit` and `nodeready learn` on real nodes: what they say; and they only look."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodeready.subjects.registry import LOOKED_AT
from tests.command import ours, written
from tests.helpers import project

#: Subjects that a fresh node of the lab passes without a deploy.
HEALTHY = "gpus,nics,rdma,ports,host"


def told(done) -> dict[str, dict[str, dict[str, str]]]:
    """Node -> check -> result, of a run with --format json."""
    return {
        node["name"]: {result["check"]: result for result in node["results"]}
        for node in json.loads(done.out)["nodes"]
    }


def test_every_format_of_one_fleet(fresh_nodes, fleet, tool, tmp_path):
    """One failing check on one node: the same truth, each in its own form and exit status."""
    good, bad = fresh_nodes(2)
    where = fleet([good, bad], nics={"eth0": {"mtu": 1500}})
    bad.run("ip link set eth0 mtu 1400")
    words = ("audit", where, "--only", "nics")
    table = tool(*words)
    assert table.status == 3, table
    assert re.search(rf"^fail +nics\.mtu +{bad.name}$", table.out, re.M), table
    assert re.search(rf"^ok +{good.name} ", table.out, re.M), table
    for form, status in (("json", 3), ("junit", 3), ("prometheus", 3), ("nagios", 2)):
        done = tool(*words, "--format", form)
        assert (done.status, done.err) == (status, ""), done
        path = tmp_path / form
        into = tool(*words, "--format", form, "-o", path)
        assert (into.status, into.out, into.err) == (status, "", ""), into
        if form == "json":
            assert told(done)[bad.name]["nics.mtu"]["status"] == "fail"
            assert json.loads(path.read_text())["summary"] == json.loads(done.out)["summary"]
        elif form == "junit":
            failures = ElementTree.fromstring(path.read_text()).iter("failure")
            assert len(list(failures)) == 1
        elif form == "prometheus":
            families = text_string_to_metric_families(path.read_text())
            samples = [sample for family in families for sample in family.samples]
            assert any(
                sample.labels.get("node") == bad.name and sample.labels.get("check") == "nics.mtu"
                for sample in samples
            )
        else:
            assert done.out.startswith("NODEREADY CRITICAL"), done
            assert len(done.out.partition("|")[0]) < 100


def test_nothing_is_written_on_a_node(fresh_nodes, fleet, tool):
    """Neither by a look at everything, nor where nothing could be written; and nothing is left."""
    nodes = fresh_nodes(2)
    shut = nodes[1]
    shut.enter(["sh", "-c", "for d in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o ro x $d; done"])
    before = [written(node) for node in nodes]
    done = tool("audit", fleet(nodes), "--format", "json", "--skip", "host")
    assert done.status == 3, done
    assert [written(node) for node in nodes] == before
    found = told(done)
    statuses = [
        {check: result["status"] for check, result in found[node.name].items()} for node in nodes
    ]
    assert statuses[0] == statuses[1]
    assert "unknown" not in statuses[0].values(), done
    assert {check.partition(".")[0] for check in statuses[0]} == set(LOOKED_AT) - {"host"}
    assert all(ours(node) == [] for node in nodes)


def test_a_waiver_accepts_a_finding_with_its_reason(fresh_nodes, fleet, tool):
    (node,) = fresh_nodes(1)
    reason = "until the next image, ticket 4711"
    where = fleet([node], waivers={"ptrace.scope": reason})
    done = tool("audit", where, "--only", "ptrace")
    assert done.status == 0, done
    assert re.search(r"^waived +ptrace\.scope$", done.out, re.M), done
    assert reason in done.out
    # What is accepted is not changed either: deploy and audit cannot disagree.
    assert tool("deploy", where, "--only", "ptrace", "--yes").status == 0
    assert node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "1\n"
    done = tool("audit", fleet([node], waivers={"ptrace.scop": reason}))
    assert (done.status, done.out) == (2, ""), done
    assert "did you mean ptrace.scope?" in done.err


def test_who_differs_from_its_peers_without_any_policy(fresh_nodes, fleet, tool):
    *alike, odd = fresh_nodes(4)
    odd.run("ip link set eth0 mtu 1400")
    where = fleet([*alike, odd])
    done = tool("audit", where, "--only", "nics", "--format", "json")
    assert done.status == 0, done
    (outlier,) = json.loads(done.out)["outliers"]
    assert outlier["fact"] == "nics.eth0.mtu"
    assert (outlier["majority"], outlier["nodes"]) == (1500, {odd.name: 1400})
    shown = tool("audit", where, "--only", "nics", "--fail-on", "warn")
    assert shown.status == 3, shown
    assert re.search(rf"nics\.eth0\.mtu.*{odd.name}|{odd.name}.*1400", shown.out), shown


def test_a_policy_is_learnt_reviewed_and_held(fresh_nodes, fleet, tool, tmp_path):
    """learn writes what most have; put into group_data, the odd node is who fails."""
    nodes = fresh_nodes(3)
    odd = nodes[-1]
    odd.run("ip link set eth0 mtu 1400")
    where = fleet(nodes)
    # pyinfra reads the group's file beside the inventory; its name is that of the group.
    learned = where.parent / "group_data" / "lab.py"
    learned.parent.mkdir()
    done = tool("learn", where, "-o", learned)
    assert (done.status, done.out) == (0, ""), done
    text = learned.read_text()
    assert "'eth0': {'mtu': 1500}" in text
    assert f"# eth0 mtu: 2 of 3 nodes; {odd.name}: 1400\n" in text
    again = tool("learn", where, "-o", learned)
    assert (again.status, learned.read_text()) == (2, text), again
    assert "exists" in again.err
    to_stdout = tool("learn", where)
    assert "'eth0': {'mtu': 1500}" in to_stdout.out
    done = tool("audit", where, "--only", HEALTHY, "--format", "json")
    assert done.status == 3, done
    bad = {
        (name, check)
        for name, results in told(done).items()
        for check, result in results.items()
        if result["status"] not in ("ok", "na")
    }
    assert bad == {(odd.name, "nics.mtu")}


def test_counters_are_judged_by_their_change(fresh_nodes, fleet, tool):
    """The first look has nothing to compare with; a flap between two looks is told; a reboot
    begins anew."""
    (node,) = fresh_nodes(1)
    where = fleet([node])
    words = ("audit", where, "--only", "nics.flaps", "--format", "json")

    def flaps():
        done = tool(*words)
        return told(done)[node.name]["nics.flaps"]

    assert flaps()["status"] == "na"
    assert flaps()["status"] == "ok"
    node.enter(["sh", "-c", "ip link set eth0 down; sleep 0.1; ip link set eth0 up"])
    assert flaps()["status"] in ("warn", "fail")
    assert flaps()["status"] == "ok"


@pytest.mark.parametrize("profile", ["cpu", "h100", "mi300x"])
def test_without_root(profile, fresh_nodes, fleet, tool):
    """Complete, and what needs root is unknown with that reason, or does not apply."""
    (node,) = fresh_nodes(1, profile=profile)
    done = tool("audit", fleet([node], {node.name: {"ssh_user": "ml"}}), "--format", "json")
    assert done.status == 3, done
    results = told(done)[node.name].values()
    assert {result["check"].partition(".")[0] for result in results} == set(LOOKED_AT)
    unseen = [result for result in results if result["status"] == "unknown"]
    assert all(re.search("root|permi", result["actual"], re.I) for result in unseen), unseen
    bad = {result["check"] for result in results if result["status"] in ("fail", "warn")}
    assert {check for check in bad if check.partition(".")[0] in HEALTHY.split(",")} == set()


def test_this_machine_without_an_inventory(tool, tmp_path):
    done = tool("audit", "@local", "--format", "json", cwd=tmp_path)
    assert (done.status, done.err) in ((0, ""), (3, "")), done
    (results,) = told(done).values()
    assert {check.partition(".")[0] for check in results} == set(LOOKED_AT)


def test_each_subject_is_a_fact_for_pyinfra(lab, fleet):
    """`pyinfra INVENTORY fact nodeready.deploy.pyinfra.Gpus`: plain data of every subject."""
    names = {name: "".join(word.capitalize() for word in name.split("_")) for name in LOOKED_AT}
    where = fleet(lab.nodes[:1])
    facts = [f"nodeready.deploy.pyinfra.{name}" for name in names.values()]
    done = project(Path(sys.executable).with_name("pyinfra"), where, "fact", *facts)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    for name in names.values():
        assert f"nodeready.deploy.pyinfra.{name}" in shown or f"Fact data for: {name}" in shown, (
            shown
        )
    assert '"unknown":' not in shown
    assert '"boot_id"' in shown
    assert '"nccl_socket_ifname"' in shown


def test_a_kernel_unlike_its_peers_shows_without_a_policy(fresh_nodes, fleet, tool):
    *_, odd = nodes = fresh_nodes(3)
    odd.lab.restart([odd], keep_disk=True, fault="other-kernel")
    done = tool("audit", fleet(nodes), "--only", "host", "--format", "json")
    assert done.status == 0, done
    found = {outlier["fact"]: outlier["nodes"] for outlier in json.loads(done.out)["outliers"]}
    assert list(found) == ["host.kernel"]
    assert list(found["host.kernel"]) == [odd.name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "gpus.nosuch"], "--only gpus.nosuch: no such check or subject"),
        (["--only", ""], "--only: no check or subject named"),
        (["--skip", "*"], "--skip leaves no check to make"),
        (["--format", "yaml"], "'yaml' is not one of"),
        (["--fail-on", "ok"], "'ok' is not one of"),
        (["--timeout", "0"], "0 is not in the range"),
        (["-o", "/nosuch/report"], "-o /nosuch/report: no directory /nosuch"),
        (["-o", "/tmp"], "-o /tmp: is a directory"),
    ],
)
def test_a_mistake_costs_one_line_and_no_look(words, said, lab, fleet, tool):
    done = tool("audit", fleet(lab.nodes), *words)
    assert (done.status, done.out) == (2, ""), done
    assert said in done.err, done


def test_a_look_that_takes_too_long(fresh_nodes, fleet, tool):
    """--timeout ends it: the node is unknown with that reason, the other is complete."""
    good, slow = fresh_nodes(2)
    slow.write("/root/.bashrc", "sleep 60\n")
    done = tool(
        "audit", fleet([good, slow]), "--only", "nics", "--timeout", "10", "--format", "json"
    )
    assert done.status in (1, 3, 4), done
    found = told(done)
    assert found[good.name]["nics.link"]["status"] == "ok"
    assert {result["status"] for result in found[slow.name].values()} <= {"unknown"}
