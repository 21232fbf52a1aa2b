"""`nodeready diff` on real nodes: what was done to a node between two looks, and nothing else."""


def test_what_was_done_to_a_node_is_what_diff_names(fresh_nodes, fleet, tool, tmp_path):
    nodes = fresh_nodes(3)
    odd = nodes[-1]
    where = fleet(nodes)
    for _ in range(2):
        tool("audit", where, "--format", "json", "-o", tmp_path / "before.json")
    same = tool("diff", where, "--since", "2", "--format", "json")
    assert (same.status, same.document["changes"]) == (0, []), same
    odd.run("ip link set eth0 mtu 1400; sysctl -w kernel.pid_max=65536")
    done = tool("diff", where, "--since", "2", "--exit-code", "--format", "json")
    changes = done.document["changes"]
    assert done.status == 3, done
    assert [(change["key"], change["nodes"]) for change in changes] == [
        ("host.pids_max", [odd.name]),
        ("nics.interfaces[eth0].mtu", [odd.name]),
    ]
    tool("audit", where, "--format", "json", "-o", tmp_path / "after.json")
    files = tool("diff", tmp_path / "before.json", tmp_path / "after.json", "--format", "json")
    assert files.document["changes"] == [{**change, "since": ""} for change in changes]
    peer = tool("diff", where, "--limit", odd.name, "--against", nodes[0].name, "--format", "json")
    # The root of a node of the lab is mounted from a directory of its own.
    keys = {change["key"] for change in peer.document["changes"]}
    assert keys - {"host.mounts[/].options"} == {"nics.interfaces[eth0].mtu", "host.pids_max"}
