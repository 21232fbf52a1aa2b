"""The node's own check on real nodes: installed, kept, taken away, and never in the way."""

import json
import re

import pytest

from nodeready.core.policy import Policy
from nodeready.fleet.transport import bundle
from nodeready.subjects.gate import facts as probe
from nodeready.subjects.gate import files as wanted
from tests.cases import read_table
from tests.command import POLICY
from tests.helpers import nodeready

SETTINGS = {**POLICY, "gate": True}
ONLY = ("--only", "gate")
SITE_CHECK = '[[check]]\nid = "allowed"\nrun = "echo no jobs"\nequals = "jobs"\nin = ["gate"]\n'
LOGGER = '#!/bin/sh\necho "$*" >>/run/logged\n'


def left(node) -> list[str]:
    """What there is of the gate on the node."""
    find = (
        "ls -d /usr/local/lib/nodeready /usr/local/lib/nodeready/* /etc/nodeready/*"
        " /etc/cron.d/nodeready /etc/systemd/system/nodeready.*"
        " /etc/systemd/system/*.wants/nodeready.* /run/nodeready/*"
        " /var/lib/prometheus/node-exporter/nodeready.prom 2>/dev/null || :"
    )
    return node.run(find).stdout.split()


def logged(node) -> str:
    return node.run("cat /run/logged 2>/dev/null; rm -f /run/logged", check=False).stdout


@pytest.fixture
def node(fresh_nodes):
    """A node with a log that can be read, a Slurm that does not know us, and a node_exporter."""
    files = {"/usr/local/sbin/logger": (LOGGER, 0o755), "/etc/slurm/slurm.conf": "ClusterName=x\n"}
    (node,) = fresh_nodes(1, {**files, "/var/lib/prometheus/node-exporter/other.prom": ""})
    return node


def test_it_is_installed_once_kept_and_taken_away(node, inventory):
    where = inventory([node], **SETTINGS)
    (where.parent / "checks.d").mkdir()
    (where.parent / "checks.d/jobs.toml").write_text(SITE_CHECK)
    assert nodeready("deploy", where, "--yes", *ONLY).returncode == 0
    own = f"umask 077; flock -n /run/nodeready.record sh -c 'umask 022; exec {probe.RECORD}' "
    assert f"*/5 * * * * root {own}" in node.read(probe.CRON)
    modes = node.run(f"stat -c '%U %a' {' '.join(probe.PROGRAMS)}").stdout.splitlines()
    assert set(modes) == {"root 755"}
    policy = json.loads(node.read(probe.POLICY))
    assert (policy["gate"], policy["limit_nofile"]) == (True, 16384)
    sums = node.run(f"sha256sum {probe.BUNDLE} {probe.COMPILED}").stdout.split()
    assert node.read(probe.NOTE).split()[:2] == sums[::2]
    # What is compiled runs, whatever is beside it. What somebody changes, tests/attacks asks.
    node.run(f"mv {probe.BUNDLE} /root/away")
    assert "nodeready: no-go: " in node.run(f"env -i {probe.RECORD}", check=False).stdout
    node.run(f"mv /root/away {probe.BUNDLE}")
    verdict = json.loads(node.read(probe.VERDICT))
    (result,) = (row for row in verdict["results"] if row["check"] == "site.allowed")
    assert (result["status"], result["actual"]) == ("fail", "no jobs"), result
    assert node.run(f"env -i {probe.PROLOG}", check=False).returncode == 1
    assert "site.allowed: no jobs" in logged(node)
    assert "nodeready_" in node.read("/var/lib/prometheus/node-exporter/nodeready.prom")
    audit = nodeready("audit", where, "--format", "json", *ONLY)
    results = json.loads(audit.stdout)["nodes"][0]["results"]
    statuses = {result["check"]: result["status"] for result in results}
    assert "fail" not in statuses.values(), statuses
    assert statuses["gate.slurm_conf"] == "warn"

    # Off: all of it goes, but not a prolog that slurm.conf names.
    off = inventory([node], **{**SETTINGS, "gate": False})
    node.write("/etc/slurm/slurm.conf", f"Prolog={probe.PROLOG}\n")
    gone = nodeready("deploy", off, "--yes", *ONLY, status=0)
    assert left(node) == ["/usr/local/lib/nodeready", probe.PROLOG]
    assert "take the lines out of slurm.conf" in gone.stdout
    assert node.run(f"env -i {probe.PROLOG}", check=False).returncode == 0
    assert "the job starts" in logged(node)
    node.write("/etc/slurm/slurm.conf", "ClusterName=x\n")
    assert nodeready("deploy", off, "--yes", *ONLY).returncode == 0
    assert left(node) == []
    assert "0 changed" in nodeready("deploy", off, "--yes", *ONLY).stdout


@pytest.mark.nightly
def test_a_full_disk_leaves_nothing_half_compiled(node, inventory):
    where, place = inventory([node], **SETTINGS), probe.DIRECTORY
    node.run(f"mkdir -p {place}; mount -t tmpfs -o size=2500k,mode=755 x {place}")
    deployed = nodeready("deploy", where, "--yes", *ONLY, status=1)
    assert f"no space left on {probe.COMPILED}" in deployed.stdout + deployed.stderr
    assert not re.search("compiled|[.]nodeready", node.run(f"ls -A {place}").stdout)
    assert probe.POLICY not in left(node)
    # With the room that it needs, it all comes, and what a killed run left goes.
    node.run(f"mount -o remount,size=8m {place}; touch {place}/.nodeready.abcdef")
    assert nodeready("deploy", where, "--yes", *ONLY).returncode == 0
    assert probe.COMPILED in left(node)
    assert ".nodeready" not in node.run(f"ls -A {place}").stdout


SYSTEMCTL = """#!/bin/sh
echo "$*" >>/run/systemctl
case $1 in
enable | disable) exec /usr/bin/systemctl --root=/ "$1" nodeready.timer ;;
esac
"""


def test_where_systemd_runs_a_timer_of_its_own_starts_it(fresh_nodes, inventory):
    (node,) = fresh_nodes(1, files={"/usr/local/sbin/systemctl": (SYSTEMCTL, 0o755)})
    node.run("mkdir -p /run/systemd/system; echo left >/etc/cron.d/nodeready")
    where = inventory([node], **SETTINGS, gate_interval_s=120)
    assert nodeready("deploy", where, "--yes", *ONLY).returncode == 0
    said = node.read("/run/systemctl").splitlines()
    assert said == ["daemon-reload", "enable nodeready.timer", "restart nodeready.timer"]
    assert probe.CRON not in left(node)
    # systemd itself reads both units, and finds nothing to complain about.
    verify = node.run(f"systemd-analyze verify --man=no {probe.SERVICE} {probe.TIMER} 2>&1")
    assert "nodeready" not in verify.stdout, verify.stdout
    assert "OnUnitActiveSec=120\n" in node.read(probe.TIMER)
    assert "0 changed" in nodeready("deploy", where, "--yes", *ONLY).stdout
    # Another interval is taken at once.
    where = inventory([node], **SETTINGS, gate_interval_s=600)
    assert nodeready("deploy", where, "--yes", *ONLY).returncode == 0
    assert node.run("tail -n 1 /run/systemctl").stdout == "restart nodeready.timer\n"

    node.run("rm /run/systemctl; touch /etc/slurm/slurm.conf")
    off = inventory([node], **{**SETTINGS, "gate": False})
    assert nodeready("deploy", off, "--yes", *ONLY).returncode == 0
    said = node.read("/run/systemctl").splitlines()
    assert said == ["disable --now nodeready.timer", "daemon-reload"]
    assert left(node) == []


# What stands in the bundle's place, and: exit status of prolog and health check, is it logged.
TOOLS = read_table(__file__, "TOOLS")


def test_only_an_answer_keeps_a_job_away(node, inventory):
    programs = wanted.contents(Policy(gate=True, gate_budget_s=1), bundle.program)
    for path in (probe.PROLOG, probe.HEALTH_CHECK):
        # Less patience than Slurm has: this is about the end of it, not about its length.
        text = re.sub(r"timeout -k 2 \d+", "timeout -k 1 1", programs[path].decode())
        node.write(path, text, mode=0o755)
    for content, status, said in TOOLS:
        node.run(f"rm -f {probe.BUNDLE}")
        if content is not None:
            node.write(probe.BUNDLE, content)
            node.run(f"echo x $(sha256sum <{probe.BUNDLE}) >{probe.NOTE}")
        prolog = node.run(f"env -i {probe.PROLOG}", check=False)
        log = logged(node)
        assert (prolog.returncode, bool(log)) == (status, said), content
        assert not said or ("the job starts" in log) is not bool(status), content
        health = node.run(f"env -i {probe.HEALTH_CHECK}", check=False)
        assert (health.returncode, bool(logged(node))) == (0, said and not status), content
    node.run("rm -f /usr/bin/python3* /usr/libexec/platform-python /usr/local/bin/python3*")
    for path in (probe.PROLOG, probe.HEALTH_CHECK):
        assert node.run(f"env -i {path}", check=False).returncode == 0
        assert "no Python 3.9 or newer" in logged(node)
