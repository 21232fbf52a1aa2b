"""`deploy --batch` on nodes: the third fails, the others stay as they were; then it goes on."""

import json
import signal
import subprocess
import sys

from tests.command import wait_for
from tests.helpers import nodeready
from tests.paths import ROOT

OURS = "/etc/security/limits.d/zz-nodeready.conf"
#: Another run's lock, whose process lives.
LOCKED = """
umask 077; read -r pid comm rest </proc/1/stat; set -- $(sed 's/.*) //' /proc/1/stat)
echo "other 1 ${20} 1 ${20} somebody@elsewhere now" >/run/nodeready.lock
"""


def test_a_deploy_in_waves_stops_and_goes_on_with_the_untouched(fresh_nodes, inventory):
    nodes = sorted(fresh_nodes(4), key=lambda node: node.name)
    where = inventory(nodes, lock_wait_s=1)
    nodes[2].run(LOCKED)
    words = ("deploy", where, "--only", "limits", "--yes", "--batch", "1")
    done = nodeready(*words, "--format", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert [node["status"] for node in document["nodes"]] == [
        *("changed", "changed", "failed", "to-change"),
    ]
    assert document["untouched"] == [nodes[3].name]
    assert "3 of 4: 1 node failed, --max-fail is 0" in document["stopped"]
    assert f"--limit {nodes[3].name} --batch 1" in done.stderr
    there = f"test -e {OURS}"
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 0, 1, 1]
    assert not nodes[2].run("ls -A /etc/security/limits.d | grep nodeready", check=False).stdout
    # What goes on: the failed node counts again.
    done = nodeready(*words, "--limit", "@last-failed", "--max-fail", "1")
    assert done.returncode == 1
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 0, 1, 0]
    nodes[2].run("rm /run/nodeready.lock")
    assert nodeready(*words).returncode == 0
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 0, 0, 0]
    done = nodeready(*words, "--undo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [node.run(there, check=False).returncode for node in nodes] == [1, 1, 1, 1]


def test_an_interrupt_within_a_wave_names_the_untouched(fresh_nodes, inventory):
    nodes = sorted(fresh_nodes(3), key=lambda node: node.name)
    where = inventory(nodes, lock_wait_s=60)
    nodes[1].run(LOCKED)
    words = ("deploy", where, "--only", "limits", "--yes", "--batch", "1")
    there = f"test -e {OURS}"
    with subprocess.Popen(
        [sys.executable, "-m", "nodeready", *map(str, words)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_for(lambda: nodes[0].run(there, check=False).returncode == 0)
        wait_for(lambda: nodes[1].run("pgrep -f [n]odeready:", check=False).stdout)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"changed     {nodes[0].name}" in out
    assert f"untouched: {nodes[2].name}; continue: nodeready deploy" in err
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 1, 1]
    nodes[1].run("rm /run/nodeready.lock")
    assert nodeready(*words, "--limit", "@last-failed").returncode == 0
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 0, 0]
