"""The proof of a core: where a pattern sends it, which file is ours, and what is made of it."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.subjects.proof import checks as proof_core
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import Config, Core
from tests.builders.proof import line

WANT = Policy()


def test_a_pattern_that_is_not_the_kernels_is_found_out(fresh_node) -> None:
    """A lab node has a /proc/sys of its own, as a container may; its crashes are the host's."""
    fresh_node.write("/etc/security/limits.d/zz.conf", "ml - core unlimited\n")
    fresh_node.run(f"sysctl -qw kernel.core_pattern={WANT.core_pattern}; mkdir -m 1777 /var/crash")
    config = Config("nodeready-0badcafe", "nodeready:test", "ml", ("core",))
    command = line(config)
    said = fresh_node.run(command.line, input=command.stdin).stdout
    seen = proved.read(said, config)
    assert isinstance(seen.core, Core)
    assert seen.core.dumped
    result = proof_core.core(seen, WANT)
    assert result.status == "fail"
    assert "core_pattern" in result.actual
    assert "host" in result.fix
    assert fresh_node.run("ls -A /var/crash; ls -d /tmp/nodeready-*", check=False).stdout == ""
