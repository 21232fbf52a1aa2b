"""Operations through pyinfra's own command: each changes a node, then nothing, or is refused."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.operations import STEPS
from tests.helpers import Done, project
from tests.paths import DOCS

#: node:       what makes the node one on which every operation has something to do
#: programs:   stand-ins for those that a node of the lab lacks
#: operations: operation, its arguments, and what breaks the node for it
DATA = json.loads((Path(__file__).parent / "data/pyinfra_operations.json").read_text())
OPERATIONS = DATA["operations"]
UPDATE_GRUB = Path(__file__).parent / "iommu_tools/update-grub"
#: While ssh does not run, its options cannot be judged.
UNJUDGED = {"ssh_client.options": "No changes"}


@pytest.fixture
def pyinfra() -> Callable[..., Done]:
    """pyinfra's own command, as in a project of its user."""
    program = Path(sys.executable).with_name("pyinfra")
    return lambda *words: project(program, *words)


def outcomes(done: Done) -> list[tuple[str, str]]:
    """Operation, and what pyinfra says of it on the only node, in order."""
    pattern = (
        r"^--> Starting operation: (\S+).*\n(?:.*\n)*?    \[\S+\] +(Success|No changes|Error)"
    )
    return re.findall(pattern, done.stderr, re.M)


def test_every_operation_changes_a_node_once_or_is_refused(fresh_node, fleet, pyinfra, tmp_path):
    node, names = fresh_node, [name for name, _, _ in OPERATIONS]
    assert sorted(names) == sorted(step.name for step in STEPS)
    for name, text in DATA["programs"].items():
        node.write(f"/usr/local/sbin/{name}", f"#!/bin/sh\n{text}\n", 0o755)
    node.write("/usr/sbin/update-grub", UPDATE_GRUB.read_bytes(), 0o755)
    for line in (*DATA["node"], *(line for _, _, line in OPERATIONS if line)):
        node.enter(["sh", "-c", line])
    lines = ["from nodeready.operations import *"]
    for name, arguments, _ in OPERATIONS:
        # Like one's own operations beside them, each is followed by the next whatever it does.
        lines.append(f"{name}(_ignore_errors=True, **{arguments!r})")
    where, deploy = fleet([node]), tmp_path / "deploy.py"
    deploy.write_text("\n".join(lines))

    node.run("mkdir /run/nodeready.lock")
    refused = pyinfra("-y", where, deploy)
    assert outcomes(refused) == [(name, UNJUDGED.get(name, "Error")) for name in names]
    said = refused.stderr.count("nodeready: /run/nodeready.lock: is no regular file")
    assert said == len(names) - len(UNJUDGED), refused.stderr

    node.run("rmdir /run/nodeready.lock")
    deploy.write_text("\n".join([*lines[:1], *(line for line in lines[1:] for _ in range(2))]))
    done = pyinfra("-y", where, deploy)
    twice = [(name, outcome) for name in names for outcome in ("Success", "No changes")]
    assert outcomes(done) == twice, done.stderr


def test_an_operation_on_the_command_line_shows_what_it_would_write(lab, fleet, pyinfra):
    where, call = fleet(lab.nodes[:1]), "nodeready.operations.ptrace.scope"
    done = pyinfra("--dry", "--diff", where, call, "ptrace_scope=2")
    assert done.returncode == 0, done.stderr
    path = "/etc/sysctl.d/99-zz-nodeready-ptrace.conf"
    shown = re.search(
        rf"^    \[\S+\] +ptrace.scope will create {path}\n(?:  .*\n)*", done.stderr, re.M
    )
    assert shown, done.stderr
    assert "      +-kernel.yama.ptrace_scope = 2\n" in shown[0]
    assert lab.nodes[0].run(f"test -e {path}", check=False).returncode


def test_an_operation_says_what_a_person_has_to_do(lab, fleet, pyinfra):
    """On the command line and as a deploy: pyinfra itself says "No changes"."""
    where, install = fleet(lab.nodes[:1]), "fix: install the package systemd-coredump"
    for call in ("nodeready.operations.core_dumps.pattern", "nodeready.deploys.core_dumps"):
        done = pyinfra("--dry", where, call, "core_handler=systemd-coredump")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"[{lab.nodes[0].name}] fail core_dumps.pattern: ") == 1, done
        assert install in done.stderr, done


def test_an_operation_with_sudo_sees_what_root_sees(fresh_node, fleet, pyinfra):
    """The node's data has none: the first probe is that of a user who cannot read /root."""
    fresh_node.write("/etc/sudoers.d/ml", "ml ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    where = fleet([fresh_node], {fresh_node.name: {"ssh_user": "ml"}})
    words = ('pdshrc_users=["root"]', 'pdshrc_lines=["true"]', "_sudo=true")
    for outcome in ("Success", "No changes"):
        done = pyinfra("-y", where, "nodeready.operations.pdsh.pdshrc", *words)
        assert outcomes(done) == [("pdsh.pdshrc", outcome)], done.stderr
    assert "true\n" in fresh_node.read("/root/.pdshrc")


def test_the_deploy_file_of_the_page_stands_beside_ones_own_operations(
    lab, fleet, pyinfra, tmp_path
):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "pyinfra.md").read_text(), re.M | re.S)
    deploy = tmp_path / "deploy.py"
    deploy.write_text(blocks[0])
    done = pyinfra("--dry", fleet(lab.nodes[:1]), deploy)
    assert done.returncode == 0, done.stderr
    # Also what the one's own operation has not made yet.
    for name in ("Files Directory|files.directory", r"nodeready \| core_dumps.directory",
                 r"nodeready \| limits.logins", "Only root attaches"):  # fmt: skip
        assert re.search(rf"^    (?:{name}) ", done.stderr, re.M), (name, done.stderr)


def test_a_fact_shows_what_an_operation_of_the_run_has_changed(
    fresh_nodes, fleet, pyinfra, tmp_path
):
    """Before the change, and after it; on all nodes at once, each with its own."""
    nodes = fresh_nodes(2)
    nodes[0].run("echo kernel.yama.ptrace_scope = 0 >/etc/sysctl.d/99-z.conf; sysctl --system")
    deploy = tmp_path / "deploy.py"
    deploy.write_text(
        "from pyinfra import host\n"
        "from pyinfra.operations import python\n"
        "from nodeready.facts import Ptrace, Verdicts\n"
        "from nodeready.operations import ptrace\n"
        "def facts():\n"
        "    (row,) = host.get_fact(Verdicts, only='ptrace.scope')\n"
        "    return host.name, host.get_fact(Ptrace)['live'], row['status']\n"
        "before = facts()\n"
        "ptrace.scope()\n"
        "python.call(function=lambda: print('facts', *before, *facts()[1:]))\n"
    )
    done = pyinfra("-y", fleet(nodes), deploy)
    assert done.returncode == 0, done
    rows = re.findall(r"^facts (\S+) (.*)$", done.stdout, re.M)
    assert sorted(row for _, row in rows) == ["0 ok 0 ok", "1 fail 0 ok"], done
