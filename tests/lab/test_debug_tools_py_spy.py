"""The control machine's py-spy on real nodes."""

from __future__ import annotations

import hashlib

import pytest

from nodeready.deploy import py_spy_binary
from nodeready.lab import Node
from nodeready.operations import debug_tools
from nodeready.policy import Policy
from tests.lab.looks import deploy
from tests.lab.rows import rows

PATH = "/usr/local/bin/py-spy"
WANT = Policy(packages=())
STEPS, DONE = (debug_tools.py_spy,), ["debug_tools.py_spy"]


@pytest.fixture(autouse=True)
def without(fresh_node: Node) -> None:
    """What this machine itself has there is not on the node."""
    fresh_node.run(f"rm -f {PATH}")


def in_place(node: Node) -> bool:
    """Whole, of the version, and for everybody: asked of the node, as another user."""
    machine = node.run("uname -m").stdout.strip()
    wanted = hashlib.sha256(py_spy_binary.binary(WANT.py_spy_version, machine)).hexdigest()
    shown = node.run(f"sha256sum {PATH}; stat -c '%a %U' {PATH}").stdout.split()
    said = node.run("setpriv --reuid 65534 --clear-groups /usr/local/bin/py-spy --version").stdout
    files = node.run("ls -A /usr/local/bin | grep -c '^.nodeready' || :").stdout.strip()
    version = f"py-spy {WANT.py_spy_version}\n"
    return [shown[0], *shown[2:], said, files] == [wanted, "755", "root", version, "0"]


#: What stands in its place before.
BROKEN = {
    "another version": ("#!/bin/sh\necho py-spy 0.3.14\n", 0o755),
    "an empty file": ("", 0o644),
    "no program": ("no program at all\n", 0o755),
    "another machine's": ("\x7fELF\x02\x01 of another machine", 0o755),
    "endless words": ("#!/bin/sh\nprintf '\\033[2J%0100000d' 1\n", 0o755),
    "it hangs": ("#!/bin/sh\nsleep 600\n", 0o755),
}


@pytest.mark.parametrize("name", rows(BROKEN, "another version"))
def test_what_is_no_py_spy_is_replaced(fresh_node, name):
    fresh_node.write(PATH, *BROKEN[name])
    assert deploy(fresh_node, WANT, STEPS, "debug_tools") == DONE
    assert in_place(fresh_node)


def test_it_lands_whole_with_its_bits_and_through_a_link(fresh_node):
    assert deploy(fresh_node, WANT, STEPS, "debug_tools") == DONE
    assert in_place(fresh_node)
    assert deploy(fresh_node, WANT, STEPS, "debug_tools") == []
    # Only a missing permission is given.
    fresh_node.run(f"chmod 700 {PATH}; stat -c %i {PATH} >/tmp/inode")
    assert deploy(fresh_node, WANT, STEPS, "debug_tools") == DONE
    assert in_place(fresh_node)
    assert fresh_node.run(f"stat -c %i {PATH}").stdout == fresh_node.read("/tmp/inode")
    # A link stays a link.
    fresh_node.run(f"mkdir -p /opt/tools && ln -sf /opt/tools/py-spy {PATH}")
    fresh_node.write("/opt/tools/py-spy", "#!/bin/sh\necho py-spy 0.1.0\n", 0o755)
    assert deploy(fresh_node, WANT, STEPS, "debug_tools") == DONE
    assert fresh_node.run(f"readlink {PATH}").stdout == "/opt/tools/py-spy\n"
    assert fresh_node.run(f"{PATH} --version").stdout == f"py-spy {WANT.py_spy_version}\n"


def test_where_it_cannot_be_put_the_old_one_stays_whole(fresh_node, monkeypatch):
    old = "#!/bin/sh\necho py-spy 0.3.14\n"
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", "/usr/local/bin"]
    fresh_node.enter(mount)
    fresh_node.write(PATH, old, 0o755)
    with pytest.raises(AssertionError, match=f"no space left on {PATH}$"):
        deploy(fresh_node, WANT, STEPS, "debug_tools")
    # What does not run on the node is not put in place either.
    monkeypatch.setattr(py_spy_binary, "binary", lambda version, machine: b"\x7fELF of another")
    with pytest.raises(AssertionError, match=f"{PATH}: the new file is not valid"):
        deploy(fresh_node, WANT, STEPS, "debug_tools")
    assert fresh_node.read(PATH) == old
    assert fresh_node.run("ls -A /usr/local/bin").stdout == "py-spy\n"
