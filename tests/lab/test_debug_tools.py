"""Packages on real nodes: a real apt with a repository of the test's own, dnf and zypper by their
arguments and words; and the control machine's py-spy.
"""

import json
import re
from pathlib import Path
from shlex import quote

import pytest

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.operations import debug_tools
from nodeready.runs.deploy import py_spy_binary
from tests.cases import read_data, read_table
from tests.lab import looks
from tests.lab.rows import rows

NAMES = ("nr-alpha", "nr-beta")

#: Counts the refreshes of the index; does not try a dead mirror again and again.
APT_CONF = """
APT::Update::Pre-Invoke { "echo refreshed >>/var/log/refreshed"; };
Acquire::Retries "0";
"""


def want(*packages: str, wait_s: int = 30) -> Policy:
    return Policy(packages=packages, package_lock_wait_s=wait_s)


def deploy(node: LabNode, policy: Policy) -> int:
    """Of the packages; the number of changes."""
    return len(looks.deploy(node, policy, [debug_tools.packages], "debug_tools"))


def status(node: LabNode, policy: Policy) -> str:
    return looks.statuses(node, policy, "debug_tools")["debug_tools.packages"]


def refused(node: LabNode, policy: Policy) -> str:
    """The one line with which a deploy of the packages fails."""
    with pytest.raises(AssertionError) as failure:
        deploy(node, policy)
    message = str(failure.value)
    assert "\n" not in message
    return message


#: Makes package $1, whose control file gets the line $2, and puts it into the repository.
MAKE_DEB = read_data(__file__, "make_deb.sh")


def make_deb(node: LabNode, name: str, extra: str = "") -> None:
    """A package with one command of its name, in the node's own repository."""
    node.enter(["sh", "-c", MAKE_DEB, "sh", name, extra])


def own_mirror(node: LabNode, *names: str) -> None:
    """These packages, and no mirror but the node itself."""
    node.run("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
    for name in names:
        make_deb(node, name)
    node.write("/etc/apt/sources.list", "deb [trusted=yes] file:///srv/repo ./\n")
    node.write("/etc/apt/apt.conf.d/99test", APT_CONF)


@pytest.fixture
def apt(fresh_node: LabNode) -> LabNode:
    """A node with an apt repository of its own, and a count of the refreshes of the index."""
    own_mirror(fresh_node, *NAMES)
    return fresh_node


def refreshes(node: LabNode) -> int:
    return node.run("cat /var/log/refreshed 2>/dev/null || :").stdout.count("refreshed")


#: Takes a lock as apt does, says its pid, and keeps it.
HOLD = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
os.close(1)
os.close(2)
time.sleep(int(sys.argv[2]))
"""


def hold(node: LabNode, path: str, seconds: int) -> int:
    """A process on the node holds apt's lock on a file, for so many seconds; its pid."""
    node.write("/usr/local/bin/unattended.py", HOLD)
    words = f"python3 /usr/local/bin/unattended.py {path} {seconds} </dev/null &"
    return int(node.run(words).stdout)


def test_missing_packages_are_installed_with_one_refresh_and_none_afterwards(apt):
    policy = want(*NAMES)
    assert status(apt, policy) == "fail"
    assert deploy(apt, policy) == 1
    assert apt.run("nr-alpha; nr-beta").stdout == "here\nhere\n"
    assert status(apt, policy) == "ok"
    assert deploy(apt, policy) == 0
    assert refreshes(apt) == 1
    # A command that is gone, test_access asks; this one is elsewhere, on purpose (dpkg-divert(1)).
    apt.run("dpkg-divert --rename --divert /usr/bin/nr-alpha.real --add /usr/bin/nr-alpha")
    assert deploy(apt, policy) == 0
    # A package that would push another out is not installed.
    make_deb(apt, "nr-gamma", extra="Conflicts: nr-beta\n")
    message = refused(apt, want("nr-gamma"))
    assert "not installed: nr-gamma: Packages need to be removed" in message
    assert apt.run("nr-beta").stdout == "here\n"


def test_what_can_be_installed_is_and_the_rest_is_named(apt):
    # What was installed by hand counts.
    apt.write("/usr/local/bin/nr-hand", "#!/bin/sh\n", 0o755)
    message = refused(apt, want("nr-alpha", "nr-nowhere", "nr-beta", "nr-hand"))
    assert message.endswith("not installed: nr-nowhere: Unable to locate package nr-nowhere")
    assert apt.run("nr-alpha; nr-beta").stdout == "here\nhere\n"
    assert refreshes(apt) == 1

    # A name is no pattern of other packages.
    apt.run("rm /usr/bin/nr-alpha /usr/bin/nr-beta; dpkg -P nr-alpha nr-beta 2>&1")
    for name in ("nr.alpha", "nr-al"):
        assert f"not installed: {name}: Unable to locate package" in refused(apt, want(name))
    assert apt.run("command -v nr-alpha nr-beta", check=False).stdout == ""


MIRRORS = read_table(__file__, "MIRRORS")


@pytest.mark.parametrize(("mirror", "cause"), rows(MIRRORS, "file:/nowhere"))
def test_an_unreachable_mirror_is_the_cause(apt, mirror, cause):
    line = f"deb {mirror} bookworm main\n"
    whole = apt.read("/etc/apt/sources.list")
    apt.write("/etc/apt/sources.list", line)
    message = refused(apt, want(*NAMES))
    assert f"not installed: nr-alpha nr-beta: {mirror}: " in message
    assert cause in message
    # Beside a mirror that has it all it is no failure; what nobody has is named with it.
    apt.write("/etc/apt/sources.list", whole + line)
    assert deploy(apt, want(*NAMES)) == 1
    message = refused(apt, want("nr-nowhere"))
    assert mirror in message
    assert "; then Unable to locate package nr-nowhere" in message


LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")


@pytest.mark.parametrize("path", rows(LOCKS, LOCKS[0]))
def test_a_lock_is_waited_for_and_reported_with_its_holder(apt, path):
    pid = hold(apt, path, 600)
    message = refused(apt, want("nr-alpha", wait_s=1))
    assert f"{path} is locked by process {pid} (python3 /usr/local/bin/unattended.py" in message
    assert message.endswith("waited 1 s")
    apt.run(f"kill {pid}")
    if path != "/var/lib/dpkg/lock":
        hold(apt, path, 3)
    assert deploy(apt, want("nr-alpha", wait_s=60)) == 1
    assert apt.run("nr-alpha").stdout == "here\n"


# What the others do and say: test_distributions.py holds the rows of dnf 4.14 and zypper 1.14
# against the real ones; yum's are from its source.
INSTALLS = 'for x; do :; done; printf "#!/bin/sh\\n" >/usr/bin/$x; chmod 755 /usr/bin/$x'
CALLS = read_table(__file__, "CALLS")
#: What a manager says, its exit status, and the end of the failure; `case` is what made it so.
FAILURES = json.loads((Path(__file__).parent / "data/package_managers.json").read_text())


@pytest.mark.parametrize("manager", rows(CALLS, "dnf"))
def test_other_package_managers_are_called_and_read_in_their_own_way(fresh_node, manager):
    """With a stand-in that notes how it was called."""
    node, policy = fresh_node, want(f"nr-{manager}")
    node.run("rm -rf /usr/bin/apt-get /usr/bin/pdsh /var/lib/dpkg/info")
    # Without any, the packages are a person's work.
    assert status(node, policy) == "fail"
    assert deploy(node, policy) == 0

    def stand_in(does: str) -> None:
        text = f'#!/bin/sh\necho "$ZYPP_LOCK_TIMEOUT:$*" >>/run/called\n{does}\n'
        node.write(f"/usr/bin/{manager}", text, 0o755)

    # Hints of zypper are no failures.
    stand_in(f"{INSTALLS}\nexit {102 if manager == 'zypper' else 0}")
    assert deploy(node, policy) == 1
    assert node.read("/run/called") == CALLS[manager] + "\n"
    assert deploy(node, policy) == 0
    assert status(node, policy) == "ok"
    for failure in FAILURES[manager]:
        node.enter(["rm", "-f", "/run/called"])
        stand_in(f"printf '%s\\n' {quote(failure['says'])} >&2; exit {failure['status']}")
        message = refused(node, want("pdsh", wait_s=2))
        assert message.endswith(failure["end"]), message
        if "waited" in failure["end"]:
            names_holder = re.search(r"\b(by|pid) 1\b", failure["says"]) is not None
            assert ("locked by process 1 (" in message) == names_holder
            assert len(node.read("/run/called").splitlines()) > 1


#: Of another version by its own words, and then it hangs.
OLD = "#!/bin/sh\necho py-spy 0.3.14\nsleep 600\n"


def test_py_spy_lands_whole_or_the_old_one_stays(fresh_node, monkeypatch):
    """What else may stand in its place, tests/attacks asks."""
    node, path, behind = fresh_node, "/usr/local/bin/py-spy", "/opt/tools/py-spy"
    node.run(f"mkdir -p /opt/tools; ln -sf {behind} {path}")
    node.write(behind, OLD, 0o755)

    def put() -> int:
        return len(looks.deploy(node, want(), [debug_tools.py_spy], "debug_tools"))

    # By its digest; a link stays a link.
    assert (put(), put(), node.run(f"readlink {path}").stdout) == (1, 0, f"{behind}\n")
    # Only a missing permission is given.
    inode = node.run(f"chmod 700 {behind}; stat -c %i {behind}").stdout
    assert (put(), node.run(f"stat -c %i {behind}").stdout) == (1, inode)
    said = node.run(f"stat -c '%a %U' {behind}; {path} --version", user="ml").stdout
    assert said == f"755 root\npy-spy {want().py_spy_version}\n"
    node.enter(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", "/usr/local/bin"])
    node.write(path, OLD, 0o755)
    with pytest.raises(AssertionError, match=f"no space left on {path}$"):
        put()
    # What does not run on the node is not put in place either.
    monkeypatch.setattr(py_spy_binary, "binary", lambda version, machine: b"\x7fELF of another")
    with pytest.raises(AssertionError, match=f"{path}: the new file is not valid"):
        put()
    assert (node.read(path), node.run("ls -A /usr/local/bin").stdout) == (OLD, "py-spy\n")
