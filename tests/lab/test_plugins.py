"""The example plugin on a node: in an audit, in a deploy, and in the node's own check."""

from __future__ import annotations

import json

from nodeready.subjects.gate import facts as gate
from tests.builders.plugins import install_example
from tests.paths import ROOT


def test_a_plugin_is_audited_deployed_and_judged_by_the_node_itself(
    fresh_node, fleet, tool, tmp_path
):
    node = fresh_node
    env = {"PYTHONPATH": f"{ROOT}:{install_example(tmp_path / 'site')}"}
    where = fleet([node], gate=True)
    only = ("--only", "scratch")
    audit = tool("audit", where, *only, env=env)
    assert audit.status == 3, audit
    assert "no directory (want 1777)" in audit.out

    deployed = tool("deploy", where, "--yes", "--only", "scratch,gate", env=env)
    assert deployed.status == 0, deployed
    directory = node.testinfra().file("/scratch")
    assert (directory.is_directory, directory.mode) == (True, 0o1777)
    rule = node.testinfra().file("/etc/tmpfiles.d/nodeready-scratch.conf")
    assert rule.content_string.endswith("d /scratch 1777 root root -\n")
    again = tool("deploy", where, "--yes", *only, env=env)
    assert "0 changed (0 changes), 1 ok" in again.out, again
    audit = tool("audit", where, *only, "--format", "json", env=env)
    (row,) = json.loads(audit.out)["nodes"]
    assert row["facts"]["scratch"]["mode"] == "1777"

    node.run("rmdir /scratch")
    own = node.run(f"env -i {gate.RECORD}", check=False)
    assert "scratch.directory" in own.stdout, own
    # A control machine without the plugin notices that the node's program has more.
    assert tool("audit", where, "--only", "gate.bundle").status == 3
