"""What ordinary users read and run of a node, closed to them or gone: seen, repaired, or named."""

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.lab import LabNode
from nodeready.operations import debug_tools, pdsh, ssh_client
from tests.builders.ssh_client import key
from tests.cases import read_table
from tests.lab import looks
from tests.lab.test_debug_tools import own_mirror

SUBJECTS = ("debug_tools", "ssh_client", "pdsh")
STEPS = (*ssh_client.STEPS, *pdsh.STEPS, *debug_tools.STEPS)
INCLUDE = "Include /etc/ssh/ssh_config.d/*.conf\n"
WANT = Policy(
    py_spy_version="",
    package_lock_wait_s=5,
    packages=("gdb", "strace", "pdsh", "nr-alpha"),
    ssh_client_hosts=("gpu*", "!gpu-login"),
    ssh_known_hosts=(f"gpu001 {key(1)}", f"gpu002 {key(2)}"),
)
KNOWN, DROPIN = "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_config.d/00-nodeready.conf"
PROFILE, MODULES = "/etc/profile.d/zz-nodeready-pdsh.sh", "/usr/lib/*/pdsh"


def bad(node: LabNode, *subjects: str) -> dict[str, Result]:
    results = looks.judged(node, WANT, *(subjects or SUBJECTS))
    return {check: result for check, result in results.items() if result.bad}


def deploy(node: LabNode, *subjects: str) -> dict[str, Result]:
    """As `nodeready deploy` does: until nothing is left, or three times. What is bad then."""
    for _ in range(3):
        if not looks.deploy(node, WANT, STEPS, *(subjects or SUBJECTS)):
            break
    return bad(node, *subjects)


def as_user(node: LabNode, command: str) -> int:
    words = ["setpriv", "--reuid=2000", "--regid=2000", "--clear-groups", "sh", "-c", command]
    return node.enter(words, check=False).returncode


@pytest.fixture
def node(fresh_node: LabNode) -> LabNode:
    """A node as the policy wants it, with one package whose mirror is the node itself."""
    own_mirror(fresh_node, "nr-alpha")
    fresh_node.write("/etc/ssh/ssh_config", INCLUDE)
    assert deploy(fresh_node) == {}
    return fresh_node


#: fault -> the check that fails first, a word of its result, what a user can do after a deploy
#: (path_resolution(7), ssh_config(5), readconf.c).
CLOSED = read_table(__file__, "CLOSED")


def test_what_is_closed_to_users_or_gone_is_named_and_a_deploy_repairs_it(node):
    for fault, (check, words, user) in CLOSED.items():
        node.enter(["sh", "-c", fault])
        # The programs are opened by the step of the tools.
        subjects = {check.partition(".")[0], *(["debug_tools"] if "pdsh" in check else [])}
        result = bad(node, *subjects)[check]
        assert result.fixable, fault
        assert words in result.actual, fault
        assert deploy(node, *subjects) == {}, fault
        assert as_user(node, f"{user} >/dev/null 2>&1") == 0, fault


def test_what_a_deploy_cannot_mend_names_node_check_and_reason(node, inventory, tool):
    # A library of nobody's mirror.
    library = node.enter(["sh", "-c", "readlink -f /usr/lib/*/libmpfr.so.6"]).stdout.strip()
    node.enter(["mv", library, "/root/away"])
    result = bad(node, "debug_tools")["debug_tools.packages"]
    assert result.fixable
    assert "/usr/bin/gdb does not start: libmpfr.so.6: " in result.actual
    with pytest.raises(AssertionError, match=r"gdb still does not start: libmpfr\.so\.6"):
        deploy(node, "debug_tools")
    node.enter(["mv", "/root/away", library])
    node.enter(["mv", "/usr/bin/strace", "/root/strace"])
    with pytest.raises(AssertionError, match=r"/usr/bin/strace is still gone: Reinstallation of"):
        deploy(node, "debug_tools")
    node.enter(["mv", "/root/strace", "/usr/bin/strace"])
    # A program of nobody's package in front of the package's.
    node.write("/usr/local/bin/gdb", "", 0o755)
    path = inventory([node], py_spy_version="")
    quiet = tool("deploy", path, "--only", "debug_tools", "--yes", "-q", status=3)
    assert f"debug_tools.packages  {node.name}" in quiet.out
    assert "/usr/local/bin/gdb is empty" in quiet.out
    # Repaired by a step of another subject, which was not chosen.
    node.enter(["sh", "-c", "rm /usr/local/bin/gdb; chmod 700 /usr/bin/pdsh"])
    done = tool("deploy", path, "--only", "pdsh", "--yes", "-q")
    assert f"pdsh.installed  {node.name}" in done.out
    assert "/usr/bin/pdsh has mode 700" in done.out
