"""Real pdsh between nodes, from every kind of shell, and ~/.pdshrc files that belong to users."""

import base64

import pytest

from nodeready.core import own_files
from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.operations import pdsh as steps
from tests.cases import read_table
from tests.helpers import observe, on
from tests.lab.looks import deploy, judged, statuses

POLICY = Policy()
STEPS = (steps.rcmd, steps.pdshrc)
ENVIRONMENT = "/etc/environment"
PDSHRC = "/home/ml/.pdshrc"
# Not our subject here: whether the host's key is known.
NO_QUESTION = "export PDSH_SSH_ARGS_APPEND='-oStrictHostKeyChecking=no -oBatchMode=yes';"
BLOCK = own_files.put_block(b"", b"PDSH_RCMD_TYPE=ssh\n", "end")


def reads(node: LabNode, path: str) -> bytes:
    """A file's bytes: what comes over a text connection loses its CRs."""
    return base64.b64decode(node.run(f"base64 {path}").stdout)


@pytest.mark.parametrize("wrapper", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_pdsh_uses_ssh_in_every_kind_of_shell(fresh_nodes, wrapper):
    node, other = fresh_nodes(2)
    ways = read_table(__file__, "WAYS")

    def answers(*users: str) -> set[str]:
        lines = [NO_QUESTION + command.format(other.name) for command in ways.values()]
        return {node.run(line, user, check=False).stdout for user in users for line in lines}

    # Root's rsh would wait for a minute.
    assert answers("ml") == {""}
    assert statuses(node, POLICY, "pdsh")["pdsh.rcmd"] == "fail"
    assert deploy(node, POLICY, STEPS, "pdsh") == ["pdsh.rcmd"]
    if not wrapper:
        # As on a distribution whose pdsh takes the environment alone.
        node.run("rm /etc/pdsh/rcmd_default")
        del ways["a shell without PAM"]
    assert answers("ml", "root") == {f"{other.name}: {other.name}\n"}
    if wrapper:
        assert set(statuses(node, POLICY, "pdsh").values()) == {"ok", "na"}
        assert deploy(node, POLICY, STEPS, "pdsh") == []


#: Changes of the module's directory DIR, and whether pdsh still loads its ssh module.
MODULES = read_table(__file__, "MODULES")


def test_a_module_that_pdsh_refuses_is_a_failure_with_its_repair(fresh_node):
    folder = fresh_node.run("dirname /usr/lib/*/pdsh/sshcmd.so").stdout.strip()
    deploy(fresh_node, POLICY, STEPS, "pdsh")

    def has_ssh() -> bool:
        return "ssh" in fresh_node.run("pdsh -V", check=False).stdout.partition("rcmd modules")[2]

    for change, is_loaded in MODULES.items():
        fresh_node.run(change.replace("DIR", folder))
        result = judged(fresh_node, POLICY, "pdsh")["pdsh.installed"]
        assert (result.status, has_ssh()) == ("ok" if is_loaded else "fail", is_loaded), change
        fresh_node.run(result.fix or f"chmod 755 {folder}")
        assert has_ssh()
        assert statuses(fresh_node, POLICY, "pdsh")["pdsh.installed"] == "ok"


#: /etc/environment before a deploy.
ENVIRONMENTS = (
    b"PATH=/usr/bin:/bin\r\nLANG=C\r\n",
    b"NAME=caf\xe9\xff\nPATH=/usr/bin:/bin",
    BLOCK + b"PDSH_RCMD_TYPE=rsh\n",
)


def test_etc_environment_keeps_the_lines_of_others(fresh_node):
    node = fresh_node
    node.write("/etc/pdsh/rcmd_default", "rsh\n")
    node.run(f"mv {ENVIRONMENT} /srv/environment; ln -s /srv/environment {ENVIRONMENT}")
    for old in ENVIRONMENTS:
        node.write("/srv/environment", old, 0o640)
        deploy(node, POLICY, STEPS, "pdsh")
        rest = old.replace(BLOCK, b"")
        newline = b"" if rest.endswith(b"\n") else b"\n"
        assert reads(node, ENVIRONMENT) == rest + newline + BLOCK
        file = node.testinfra().file("/srv/environment")
        assert (node.testinfra().file(ENVIRONMENT).linked_to, file.mode) == (file.path, 0o640)
        for user in ("root", "ml"):
            assert node.run("printenv PDSH_RCMD_TYPE", user=user).stdout == "ssh\n"
        assert deploy(node, POLICY, STEPS, "pdsh") == []
    assert reads(node, "/etc/pdsh/rcmd_default") == b"ssh\n"


def test_a_profile_that_sorts_behind_loses_and_bashrc_is_named(fresh_nodes):
    rsh = "export PDSH_RCMD_TYPE=rsh\n"
    node = fresh_nodes(1, files={"/etc/profile.d/zzz-site.sh": rsh})[0]
    node.run("echo 'export PDSH_RCMD_TYPE=exec' >>/etc/bash.bashrc")
    deploy(node, POLICY, STEPS, "pdsh")
    assert node.run("bash -lc 'printenv PDSH_RCMD_TYPE'").stdout == "ssh\n"
    assert node.read("/etc/profile.d/zzz-site.sh") == rsh
    result = judged(node, POLICY, "pdsh")["pdsh.conflicts"]
    assert (result.status, result.source.partition(":")[0]) == ("warn", "/etc/bash.bashrc")
    assert deploy(node, POLICY, STEPS, "pdsh") == []


RC = Policy(
    pdshrc_users=("ml", "root", "nobody-here"),
    pdshrc_path=("/opt/job tools/bin",),
    pdshrc_activate="echo welcome",
    pdshrc_lines=("JOB=1; export JOB",),
)


@pytest.mark.parametrize("own", [None, b"# caf\xe9\r\nMINE=1"], ids=["none", "of a user"])
def test_a_users_own_pdshrc_is_kept(fresh_nodes, own):
    node = fresh_nodes(1)[0]
    if own is not None:
        node.write(PDSHRC, own)
        node.run(f"chown ml: {PDSHRC}; chmod 600 {PDSHRC}")
    assert statuses(node, RC, "pdsh")["pdsh.pdshrc"] == "fail"

    deploy(node, RC, STEPS, "pdsh")

    content = reads(node, PDSHRC)
    newline = b"\n" if own and not own.endswith(b"\n") else b""
    assert own_files.remove_block(content) == (own or b"") + newline
    file = node.testinfra().file(PDSHRC)
    assert (file.user, file.mode) == ("ml", 0o644 if own is None else 0o600)
    shown = node.run(f'. {PDSHRC}; . {PDSHRC}; echo "$JOB $PATH"', user="ml")
    assert (shown.stdout.startswith("1 /opt/job tools/bin:"), shown.stderr) == (True, "")
    assert shown.stdout.count("/opt/job tools/bin") == 1
    assert statuses(node, RC, "pdsh")["pdsh.pdshrc"] == "ok"
    assert statuses(node, RC, "pdsh")["pdsh.users"] == "warn"
    assert deploy(node, RC, STEPS, "pdsh") == []

    # What the user adds behind our block is the user's; what is done to the block is not.
    node.run(f"echo AFTER=1 >>{PDSHRC}; sed -i s/JOB=1/JOB=2/ {PDSHRC}")
    assert deploy(node, RC, STEPS, "pdsh") == ["pdsh.pdshrc"]
    assert reads(node, PDSHRC) == content + b"AFTER=1\n"


def test_a_link_in_a_home_leads_nowhere_new(fresh_node):
    policy = Policy(pdshrc_users=("ml",))
    fresh_node.run("cp -a /etc/shadow /srv/shadow; ln -s /etc/shadow /home/ml/.pdshrc")
    seen = observe(on(fresh_node), policy, ("pdsh",))
    assert seen["pdsh"].users[0].pdshrc is None
    assert statuses(fresh_node, policy, "pdsh")["pdsh.users"] == "warn"
    assert deploy(fresh_node, policy, STEPS, "pdsh") == ["pdsh.rcmd"]
    fresh_node.run("cmp /etc/shadow /srv/shadow")

    # A link of the user's own to a file of the user's own is followed, and stays.
    fresh_node.run("ln -sf dot/pdshrc .pdshrc; mkdir dot; echo A=1 >dot/pdshrc", user="ml")
    assert deploy(fresh_node, policy, STEPS, "pdsh") == ["pdsh.pdshrc"]
    assert fresh_node.testinfra().file(PDSHRC).linked_to == "/home/ml/dot/pdshrc"
    assert fresh_node.read("/home/ml/dot/pdshrc").startswith("A=1\n# >>> nodeready")
    # A home that is missing, and one that is not the user's.
    fresh_node.run("mv /home/ml /home/gone")
    for make in (":", "mkdir /home/ml"):
        fresh_node.run(make)
        assert statuses(fresh_node, policy, "pdsh")["pdsh.users"] == "warn"
    assert deploy(fresh_node, policy, STEPS, "pdsh") == []
    assert fresh_node.run("ls -A /home/ml").stdout == ""
