"""`deploy --batch` on nodes: the third fails, the others stay as they were; then it goes on."""

import json

from tests.helpers import nodeready

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
    nodeready(*words, "--limit", "@last-failed", "--max-fail", "1", status=1)
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 0, 1, 0]
    nodes[2].run("rm /run/nodeready.lock")
    assert nodeready(*words).returncode == 0
    assert [node.run(there, check=False).returncode for node in nodes] == [0, 0, 0, 0]
