"""The bundle on nodes: the same judgement as from outside, the verdict, and what goes wrong."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nodeready.agent.gate import gate
from nodeready.core.policy import make_policy
from nodeready.fleet.transport import bundle
from nodeready.lab import LabNode
from nodeready.subjects.snapshot import judge
from tests.cases import read_table
from tests.command import POLICY, ours, wait_for, written
from tests.helpers import Done, observe, on
from tests.lab.test_proof_active import put as put_tools
from tests.paths import ROOT

#: Where the bundle is on a node.
PLACE = "/opt/site/nodeready.pyz"
#: What a lab's root can have, and what a lab does not have; a node is fine by it once deployed.
LAB = {**POLICY, "clock": "any"}
TEXTFILE = "/var/lib/prometheus/node-exporter/nodeready.prom"


@pytest.fixture
def put() -> Callable[..., Callable[..., Done]]:
    """Puts a bundle on a node: `put(node, gate_budget_s=5)` returns its runner."""

    def on(node: LabNode, **settings: Any) -> Callable[..., Done]:
        node.write(PLACE, bundle.build(make_policy({**LAB, **settings})), 0o755)

        def run(words: str, user: str = "root") -> Done:
            line = f"exec env -i /usr/bin/python3 -I {PLACE} {words}"
            argv = ["su", user, "-s", "/bin/sh", "-c", line]
            done = node.enter(argv, check=False, timeout=120)
            assert "Traceback" not in done.stdout + done.stderr, done
            return done

        return run

    return on


def statuses(document):
    (node,) = document["nodes"]
    return {result["check"]: result["status"] for result in node["results"]}


def test_it_judges_as_an_audit_from_outside_does_and_writes_nothing(fresh_node, put):
    run = put(fresh_node)
    before = written(fresh_node)
    done = run("audit --local --format json")
    assert (written(fresh_node), ours(fresh_node)) == (before, [])
    document = json.loads(done.stdout)
    assert document["schema"] == "nodeready.audit/2"
    assert document["nodes"][0]["name"] == fresh_node.name
    policy = make_policy(LAB)
    outside = {r.check: r.status for r in judge(observe(on(fresh_node), policy), policy)}
    here = statuses(document)
    # Of the others' host keys an audit of this node alone knows nothing either.
    differing = {check for check in here if here[check] != outside.get(check)}
    assert differing <= {"ssh_client.known_hosts", "limits.running"}
    assert {*here} == {check for check in outside if not check.startswith("gate.")}
    assert done.returncode == 3


def test_any_user_may_look_and_the_sites_policy_counts(fresh_node, put):
    fresh_node.write("/etc/sysctl.d/99-site.conf", "kernel.yama.ptrace_scope = 1\n")
    run = put(fresh_node, ptrace_scope=1)
    done = run("audit --only ptrace.scope", user="ml")
    text = f"ok       {fresh_node.name}  1 check passed\n1 node: 1 ok\n1 result: 1 ok\n"
    assert (done.returncode, done.stdout) == (0, text), done
    fresh_node.write("/etc/nodeready/policy.json", '{"ptrace_scope": 2}')
    assert run("audit --only ptrace.scope").returncode == 3
    fresh_node.write("/etc/nodeready/policy.json", '{"ptrace_scope": 9}')
    for command in ("audit", "ready", "record", "prolog"):
        done = run(command)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert line.startswith("nodeready: /etc/nodeready/policy.json: ptrace_scope = 9: must be")


def test_the_weekly_line_of_the_docs_tests_the_idle_gpus(fresh_node, put):
    (line,) = re.findall(r"^0 4 \* \* 0 root (.*)$", (ROOT / "docs/ready.md").read_text(), re.M)
    put(fresh_node)
    fresh_node.run(f"cp {PLACE} /usr/local/lib/nodeready.pyz")
    line = line.replace("/usr/local/lib/nodeready/nodeready.pyz", "/usr/local/lib/nodeready.pyz")
    put_tools(fresh_node, "touch /run/dcgmi; exit 7", "")
    done = fresh_node.run(f"{line} --budget 40", check=False)
    assert done.returncode == 3, done
    assert "dcgmi diag -r 1: exit status 7" in done.stdout
    assert ours(fresh_node) == []
    assert fresh_node.run("ls /run/dcgmi").stdout


def test_the_prolog_answers_from_the_record(fresh_node, put):
    """Which record is stale, tests/unit asks."""
    fresh_node.enter(["mkdir", "-p", TEXTFILE.rpartition("/")[0]])
    run = put(fresh_node)
    done = run("record")
    assert done.returncode == 3
    kept = gate.parse(fresh_node.read(gate.PATH).encode())
    assert not kept.go
    assert done.stdout == f"nodeready: no-go: {'; '.join(kept.costed_reasons)}\n"
    series = fresh_node.read(TEXTFILE)
    for reason in kept.reasons:
        assert f'check="{reason.partition(":")[0]}",status="fail"' in series
    assert run("prolog").stdout == done.stdout
    # A no-go is looked at again: what it said is not what a look says.
    fresh_node.write(gate.PATH, kept.text().replace(kept.reasons[0], "a.b: from the record"))
    assert run("prolog").stdout == done.stdout
    # A go is believed: a look would say something else.
    fresh_node.write(gate.PATH, replace(kept, go=True, reasons=()).text())
    assert run("prolog").stdout == "nodeready: go\n"


def test_a_node_that_is_fine_gets_its_job_and_several_at_once_leave_one_verdict(fresh_node, put):
    first = json.loads(put(fresh_node)("audit --format json").stdout)
    bad = {check: "lab" for check, status in statuses(first).items() if status == "fail"}
    assert bad
    expired = {check: {"reason": "lab", "owner": "bob", "until": "2000-01-01"} for check in bad}
    done = put(fresh_node, waivers=expired)("prolog")
    assert (done.returncode, "waiver of bob expired" in done.stdout) == (3, True), done
    run = put(fresh_node, waivers=bad)
    done = run("record")
    assert (done.returncode, done.stdout) == (0, "nodeready: go\n"), done
    assert run("prolog").stdout == "nodeready: go\n"
    fresh_node.enter(["rm", "-r", "/run/nodeready"])
    assert run("prolog").stdout == "nodeready: go\n", "by a look of its own"
    line = f"python3 -I {PLACE} record"
    all_three = fresh_node.enter(["sh", "-c", f"{line} & {line} & {line}; wait"])
    assert all_three.stdout == "nodeready: go\n" * 3
    assert gate.parse(fresh_node.read(gate.PATH).encode()) is not None
    assert fresh_node.enter(["ls", "-A", "/run/nodeready"]).stdout == "verdict.json\n"


def test_a_full_disk_keeps_the_old_verdict_and_is_one_line(fresh_node, put):
    run = put(fresh_node)
    run("record")
    old = fresh_node.read(gate.PATH)
    full = (
        "rm -rf /var/lib/prometheus; cp -a /run/nodeready /tmp/keep; "
        "mount -t tmpfs -o size=64k,mode=755 none /run/nodeready; "
        "cp -a /tmp/keep/. /run/nodeready; cat /dev/zero >/run/nodeready/fill 2>/dev/null; :"
    )
    fresh_node.enter(["sh", "-c", full])
    done = run("record")
    assert done.returncode == 1
    assert done.stderr == f"nodeready: No space left on device: {gate.PATH}\n"
    assert done.stdout.startswith("nodeready: no-go: ")
    assert fresh_node.read(gate.PATH) == old
    listed = fresh_node.enter(["ls", "-A", "/run/nodeready"]).stdout.split()
    assert listed == ["fill", "verdict.json"]
    done = run("record", user="ml")
    assert done.returncode == 1
    assert done.stderr == f"nodeready: Permission denied: {gate.PATH}\n"


def test_a_tool_that_hangs_holds_no_job_and_an_interrupt_ends_it(fresh_nodes, put):
    (node,) = fresh_nodes(1, profile="h100")
    node.reboot(fault="nvidia-smi-hangs")
    done = put(node, gate_budget_s=3)("prolog")
    assert done.returncode == 3
    assert done.stdout.startswith("nodeready: no-go: ")
    assert done.stdout.count("\n") == 1
    assert "no answer within 2 s" in done.stdout or "nvidia-smi" in done.stdout
    assert ours(node) == []
    # In the background a shell ignores Ctrl-C for its children; Python takes that over.
    start = (
        f"env --default-signal=INT python3 -I {PLACE} audit >/tmp/out 2>/tmp/err & "
        "echo $! >/tmp/pid; wait $!; echo $? >/tmp/status"
    )
    node.enter(["sh", "-c", f"setsid sh -c '{start}' >/dev/null 2>&1 &"])
    wait_for(lambda: bool(ours(node)))
    node.enter(["sh", "-c", "kill -INT $(cat /tmp/pid)"])
    wait_for(lambda: node.enter(["test", "-s", "/tmp/status"], check=False).returncode == 0)
    said = [node.read(f"/tmp/{name}") for name in ("status", "err", "out")]
    assert said == ["130\n", "nodeready: interrupted\n", ""]
    wait_for(lambda: not ours(node))


#: What is done to the verdict, and whether it is believed.
HANDS = read_table(__file__, "HANDS")


def test_only_roots_own_file_is_read(tmp_path):
    """Others could write it, or put an older one in its place; written anew, it is root's."""
    made = gate.NodeVerdict(time.time() - 1, gate.boot_id(), "policy", True)
    for number, (hand, believed) in enumerate(HANDS.items()):
        place = tmp_path / f"{number}" / "verdict"
        assert gate.read("policy", 60, str(place)) is None
        gate.write(made, str(place))
        subprocess.run(["sh", "-c", hand], cwd=place.parent, check=True)
        assert (gate.read("policy", 60, str(place)) is not None) is believed, hand
    place = tmp_path / "1" / "verdict"
    gate.write(made, str(place))
    assert gate.read("policy", 60, str(place)).boot_id == made.boot_id


def test_the_weekly_jobs_of_the_docs_hold_their_nodes_meanwhile(slurm_lab):
    (line,) = re.findall(r"^sinfo -hN (?:.*\\\n)?.*$", (ROOT / "docs/ready.md").read_text(), re.M)
    first, *_ = nodes = slurm_lab.nodes
    for node in nodes:
        put_tools(node, "squeue -h -w $(hostname) -o %i:%T >/run/jobs; exit 7", "")
        node.write("/usr/local/lib/nodeready/nodeready.pyz", bundle.build(make_policy(LAB)), 0o755)
    try:
        first.run(f"cd /; {line}")
        wait_for(lambda: not first.run("squeue -h").stdout)
        for node in nodes:
            assert re.fullmatch(r"\d+:RUNNING\n", node.read("/run/jobs"))
            assert "dcgmi diag -r 1: exit status 7" in node.read("/var/tmp/nodeready.log")
            assert ours(node) == []
    finally:
        tools = "nvidia-smi dcgmi nvbandwidth"
        for node in nodes:
            node.run(f"cd /usr/local/bin; rm -rf {tools} ../lib/nodeready /var/tmp/nodeready.log")
