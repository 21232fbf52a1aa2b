"""Hardening recipes as they are published, and a deploy over them: all of it is repaired, and the
second run changes nothing. A node without them stands beside it for what a lab cannot have.
"""

import pytest

from tests.cases import cases

#: The settings, as the node itself tells them in a user's login shell.
LOOK = """su - ml -c 'ulimit -Sc; ulimit -Hc'
cat /proc/sys/kernel/yama/ptrace_scope /proc/sys/kernel/core_pattern"""


@pytest.mark.parametrize("case", cases(__file__, "hardening.json"))
def test_a_hardened_node_is_repaired_like_any_other(fresh_nodes, fleet, tool, case):
    """`source`: the file, rule or finding that has the lines. What is a person's: `left`, the
    checks that warn of it; `core`, the soft limit of cores that a profile sets.
    """
    (plain,), (hardened,) = fresh_nodes(1), fresh_nodes(1, case["files"])
    assert hardened.run("cat /proc/sys/kernel/yama/ptrace_scope").stdout == "1\n"
    where = fleet([plain, hardened])
    tool("deploy", where, "--yes")
    again = tool("deploy", where, "--yes")
    assert "0 changed (0 changes)" in again.out, again
    audit = tool("audit", where, "--format", "json").document
    one, other = (
        {(row["check"], row["status"]) for row in node["results"] if row["status"] != "ok"}
        for node in audit["nodes"]
    )
    assert other - one == {(check, "warn") for check in case.get("left", ())}
    assert one <= other
    wanted = [case.get("core", "unlimited"), "unlimited", "0", "/var/crash/core.%e.%P.%h.%t"]
    assert hardened.run(LOOK).stdout.split() == wanted
