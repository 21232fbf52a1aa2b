"""What docs/deploy.md says about taking a deploy back is true on a node."""

import re

from tests.helpers import nodeready
from tests.unit.docs.pages import DOCS


def test_the_commands_of_the_page_take_a_deploy_back(fresh_nodes, inventory):
    page = (DOCS / "deploy.md").read_text()
    script = re.search(r"^## Taking it back\n.*?```sh\n(.*?)```", page, re.M | re.S)[1]
    # Lines of somebody else's, which have to come back as they were.
    theirs = {
        "/etc/environment": "LANG=C.UTF-8\n",
        "/etc/ssh/ssh_known_hosts": "old.example ssh-ed25519 AAAA\n",
        "/etc/ssh/ssh_config": "Host *\n    StrictHostKeyChecking ask\n",
    }
    (node,) = fresh_nodes(1, files=theirs)
    limits = {"limit_memlock": 4096, "limit_nofile": 16384}
    tools = {"packages": (), "py_spy_version": ""}
    where = inventory([node], ssh_client_hosts=["a*"], **limits, **tools)
    find = "find /etc /usr/local -name '*nodeready*'; grep -rls nodeready /etc"
    before = node.run(find, check=False).stdout
    subjects = "ptrace,limits,ssh_client,pdsh,debug_tools"
    deployed = nodeready("deploy", where, "--yes", "--only", subjects)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    assert node.run(find, check=False).stdout != before
    # The page's systemctl line is for nodes with systemd, which a node of the lab is not.
    node.run(script.replace("systemctl daemon-reload", ":"))
    assert node.run(find, check=False).stdout == before
    assert {path: node.read(path) for path in theirs} == theirs
    assert nodeready("deploy", where, "--check", "--only", "limits").returncode == 3
