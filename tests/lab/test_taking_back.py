"""`deploy --undo` leaves on a node what was there before the deploys."""

import os
import signal
import subprocess
import sys

import pytest

from tests.cases import read_data, read_table
from tests.command import wait_for
from tests.helpers import nodeready
from tests.paths import ROOT

#: Lines of somebody else's, which have to come back as they were; one has no last newline.
THEIRS = read_table(__file__, "THEIRS")
SUBJECTS = "ptrace,core_dumps,limits,ssh_client,pdsh,debug_tools"
SETTINGS = read_table(__file__, "SETTINGS")
#: Owner, mode and content of what a deploy may touch, and the kernel's values. The locks and
#: backups of /etc/passwd and the like are of the machine below, whose users other tests add.
STATE = read_data(__file__, "taking_back_state.sh")


@pytest.fixture
def node(fresh_nodes):
    (node,) = fresh_nodes(1, files=THEIRS)
    node.run(
        "chmod 0640 /etc/environment; chown ml: /home/ml/.pdshrc; chmod 0600 /home/ml/.pdshrc;"
        "chmod 0700 /usr/local/bin/py-spy; chown 4001 /usr/local/bin/py-spy; mkdir -p /var/crash"
        "; sysctl -qw kernel.yama.ptrace_scope=2"
    )
    return node


def deploy(where, *words):
    done = nodeready("deploy", where, "--yes", "--only", SUBJECTS, *words)
    return done.returncode, done.stdout + done.stderr


def test_an_undo_restores_content_owner_mode_and_values(node, inventory):
    where = inventory([node], **SETTINGS)
    before = node.run(STATE).stdout
    code, said = deploy(where, "--undo")
    assert (code, node.run(STATE).stdout) == (0, before), said
    code, said = deploy(where)
    assert code == 0, said
    assert node.run(STATE).stdout != before
    # A second deploy keeps what was before the first one.
    other = inventory([node], **{**SETTINGS, "limit_nofile": 20000, "ssh_client_hosts": ["b*"]})
    assert deploy(other)[0] == 0
    after = node.run(STATE).stdout
    code, said = deploy(where, "--undo", "--check", "--diff")
    assert (code, node.run(STATE).stdout) == (3, after)
    for row in ("restore /etc/pdsh/rcmd_default", "-ssh", "+rsh", "remove /etc/security/limits.d"):
        assert row in said
    assert "cannot be planned" not in said
    code, said = deploy(where, "--undo")
    assert code == 0, said
    assert node.run(STATE).stdout == before
    code, said = deploy(where, "--undo", "--check")
    assert code == 0, said
    assert "0 to change, 1 ok" in said


def test_what_a_person_has_changed_since_stays_and_is_named(node, inventory):
    where = inventory([node], **SETTINGS)
    assert deploy(where)[0] == 0
    limits, cores = "/etc/security/limits.d/zz-nodeready.conf", "/etc/ssh/ssh_known_hosts"
    node.run(f"echo '* - nofile 1' >>{limits}; echo 'new.example ssh-rsa BB' >>{cores}")
    content = node.read(limits)
    for changes in (1, 0):
        code, said = deploy(where, "--undo")
        assert code == 3, said
        assert limits in said
        assert f"{changes} changed" in said
        assert node.read(limits) == content
        assert node.read(cores) == f"{THEIRS[cores]}new.example ssh-rsa BB\n"
        assert node.read("/etc/pdsh/rcmd_default") == "rsh\n"


def test_a_part_is_taken_back(node, inventory):
    where = inventory([node], **SETTINGS)
    assert deploy(where)[0] == 0
    nodeready("deploy", where, "--yes", "--only", "pdsh", "--undo", status=0)
    assert node.read("/etc/environment") == THEIRS["/etc/environment"]
    others = SUBJECTS.replace("pdsh,", "")
    assert nodeready("deploy", where, "--check", "--only", others).returncode == 0


def test_a_deploy_that_was_killed_in_the_middle_is_undone(node, inventory):
    where = inventory([node], **SETTINGS)
    before = node.run(STATE).stdout
    words = [sys.executable, "-m", "nodeready", "deploy", where, "--yes", "--only", SUBJECTS]
    kept = "cat /var/lib/nodeready/undo/list"
    with subprocess.Popen([*map(str, words)], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: "pdsh" in node.run(kept, check=False).stdout)
        os.kill(process.pid, signal.SIGKILL)
    assert node.run(STATE).stdout != before
    wait_for(lambda: deploy(where, "--undo")[0] == 0)
    assert node.run(STATE).stdout == before


def test_an_earlier_release_kept_nothing_and_its_files_are_removed(node, inventory):
    where = inventory([node], **SETTINGS)
    assert deploy(where)[0] == 0
    node.run("rm -r /var/lib/nodeready/undo")
    code, said = deploy(where, "--undo")
    assert code == 0, said
    find = "find /etc /usr/local -name '*nodeready*'; grep -rls nodeready /etc"
    assert node.run(find, check=False).stdout == ""
    for path in ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_config"):
        assert node.read(path) == THEIRS[path]


def test_the_gate_goes_as_with_gate_false(node, inventory):
    where = inventory([node], **SETTINGS, gate=True)
    find = "find /etc /usr/local /var/lib -name '*nodeready*'"
    before = node.run(find).stdout
    nodeready("deploy", where, "--yes", "--only", "gate,limits", status=0)
    assert "nodeready.pyz" in node.run(find).stdout
    nodeready("deploy", where, "--yes", "--undo", status=0)
    assert node.run(find).stdout == before
    done = nodeready("deploy", where, "--undo", "--check")
    assert "0 to change, 1 ok" in done.stdout
