"""Keys of nobody, and the ssh client's files of lab nodes, changed and read without ssh."""

import base64
import hashlib

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.operations import ssh_client
from nodeready.subjects.snapshot import judge
from tests.helpers import Done, Runner, apply, observe, plan

STEPS = (ssh_client.known_hosts, ssh_client.options, ssh_client.leftover)


def key(number: int) -> str:
    """A well-formed ed25519 key of nobody."""
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0 " + hashlib.sha256(b"%d" % number).digest()
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def inside(node: LabNode) -> Runner:
    """A runner without ssh: these tests are about files."""

    def run(command: str, stdin: str = "") -> Done:
        return node.enter(["sh", "-c", command], input=stdin, check=False)

    return run


def deploy(node: LabNode, want: Policy) -> int:
    """How many actions it took; afterwards nothing is left to do."""
    changes = plan(observe(inside(node), want, ["ssh_client"]), want, STEPS)
    apply(inside(node), changes)
    seen = observe(inside(node), want, ["ssh_client"])
    assert [result for result in judge(seen, want) if result.fixable] == []
    assert plan(seen, want, STEPS) == []
    return sum(len(change.actions) for change in changes)


def content(node: LabNode, path: str) -> bytes:
    return base64.b64decode(node.enter(["base64", path]).stdout)
