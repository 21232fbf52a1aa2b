"""/etc/ssh/ssh_known_hosts on real nodes: other people's lines, and sizes."""

from __future__ import annotations

import pytest

from nodeready.lab import Node
from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client.facts import KNOWN_HOSTS, SENT_BYTES
from nodeready.subjects.ssh_client.known_hosts import (
    READ_BLOCK,
    Endpoint,
    Fleet,
    lines_of_nodes,
    read_block,
    unsent,
)
from tests.builders.ssh_client import content, deploy, inside, key
from tests.helpers import observe
from tests.lab.rows import rows


def fleet(size: int) -> Policy:
    return Policy(
        ssh_known_hosts=tuple(f"gpu{n:05},10.0.{n // 250}.{n % 250} {key(n)}" for n in range(size))
    )


def judged(seen: Snapshot, want: Policy) -> Result:
    return next(one for one in judge(seen, want) if one.check == "ssh_client.known_hosts")


def known(node: Node, host: str) -> str:
    """The key that ssh-keygen finds for a host, as ssh would."""
    said = node.enter(["ssh-keygen", "-F", host, "-f", KNOWN_HOSTS], check=False).stdout
    return " ".join(said.splitlines()[-1].split()[1:3]) if said else ""


#: What their lines can be beside, tests/unit asks of the block.
OTHERS = {
    "lines and bytes": b"# ours\n@revoked * ssh-rsa AAAA\r\nlogin ssh-ed25519 AAAA \xe9\xff",
    "more than is sent": b"".join(b"x%d ssh-rsa AAAA\n" % n for n in range(6000)),
}


@pytest.mark.parametrize("case", rows(OTHERS, "lines and bytes"))
def test_other_peoples_lines_stay(fresh_node: Node, case: str) -> None:
    others, node = OTHERS[case], fresh_node
    node.write(KNOWN_HOSTS, others)
    for want in (fleet(3), fleet(2000), fleet(1999), fleet(4)):
        deploy(node, want)
        last = len(want.ssh_known_hosts) - 1
        assert known(node, f"gpu{last:05}") == key(last)
        rest = managed_block.remove(content(node, KNOWN_HOSTS))
        assert rest in (others, others + b"\n")
    deploy(node, Policy(ssh_client_mode="no"))
    assert content(node, KNOWN_HOSTS) in (others, others + b"\n")


def test_a_block_too_large_to_send_is_told_by_its_digest(fresh_node: Node) -> None:
    node = fresh_node
    want = fleet(4000)
    deploy(node, want)
    assert len(content(node, KNOWN_HOSTS)) > SENT_BYTES
    seen = observe(inside(node), want, ["ssh_client"])
    assert seen["ssh_client"].known_hosts.lines is None

    # A run that saw a part of the fleet must not throw the others' keys away.
    few = fleet(100)
    result = judged(seen, few)
    assert (result.status, result.fixable) == ("warn", False)
    # It asks one node for its block instead, and keeps what that knows.
    ((digest, names),) = unsent({"x": seen}, few.ssh_known_hosts).items()
    printed = node.enter(["sh", "-c", READ_BLOCK]).stdout
    fetched = {digest: read_block(printed, digest)}
    assert names == ("x",)
    others = {f"gpu{n:05}": Endpoint() for n in range(4000)}
    whole = Fleet({"x": seen}, (), {"x": Endpoint(), **others})
    assert set(want.ssh_known_hosts) < set(lines_of_nodes(whole, {"x": seen}, fetched)["x"])

    # One key of 4000 is another: a node was re-imaged.
    lines = want.ssh_known_hosts
    changed = Policy(ssh_known_hosts=(*lines[:7], f"gpu00007,10.0.0.7 {key(-7)}", *lines[8:]))
    deploy(node, changed)
    assert known(node, "gpu00007") == key(-7)
    assert known(node, "gpu03999") == key(3999)


def test_too_many_lines_of_others_are_a_persons(fresh_node: Node) -> None:
    node = fresh_node
    node.write(KNOWN_HOSTS, b"x ssh-rsa AAAA\n" * (SENT_BYTES // 15 + 10))
    want = fleet(3)
    result = judged(observe(inside(node), want, ["ssh_client"]), want)
    assert (result.status, result.fixable) == ("fail", False)
    assert "outside our block" in result.actual
