"""Packages on real nodes: a real apt with a repository of the test's own, dnf and zypper by their
arguments and words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nodeready.lab import Node
from nodeready.operations import debug_tools
from nodeready.policy import Policy
from nodeready.subjects.snapshot import judge
from tests.helpers import apply, observe, on, plan

REPO = "/srv/repo"
NAMES = ("nr-alpha", "nr-beta")


#: Counts the refreshes of the index; does not try a dead mirror again and again.
APT_CONF = """
APT::Update::Pre-Invoke { "echo refreshed >>/var/log/refreshed"; };
Acquire::Retries "0";
"""


def want(*packages: str, wait_s: int = 30) -> Policy:
    return Policy(packages=packages, package_lock_wait_s=wait_s)


def deploy(node: Node, policy: Policy) -> int:
    """Apply what is planned for the packages; the number of changes."""
    seen = observe(on(node), policy, ["debug_tools"])
    todo = plan(seen, policy, [debug_tools.packages])
    apply(on(node), todo)
    return len(todo)


def status(node: Node, policy: Policy) -> str:
    seen = observe(on(node), policy, ["debug_tools"])
    (found,) = [r for r in judge(seen, policy) if r.check == "debug_tools.packages"]
    return found.status


#: Makes package $1, whose control file gets the line $2, and puts it into the repository.
MAKE_DEB = r"""
set -e
build=/tmp/build/$1
mkdir -p $build/DEBIAN $build/usr/bin /srv/repo
printf '#!/bin/sh\necho here\n' >$build/usr/bin/$1
chmod 755 $build/usr/bin/$1
{
    printf 'Package: %s\nVersion: 1.0\nArchitecture: all\n' $1
    printf 'Maintainer: nobody\nDescription: a command for a test\n%s' "$2"
} >$build/DEBIAN/control
cd /srv/repo
dpkg-deb -b $build $1.deb >/dev/null
{
    cat $build/DEBIAN/control
    printf 'Filename: ./%s.deb\nSize: %s\n' $1 $(stat -c %s $1.deb)
    printf 'SHA256: %s\n\n' $(sha256sum <$1.deb | head -c 64)
} >>Packages
printf 'Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n %s %s Packages\n' \
    $(sha256sum <Packages | head -c 64) $(stat -c %s Packages) >Release
"""


def make_deb(node: Node, name: str, extra: str = "") -> None:
    """A package with one command of its name, in the node's own repository."""
    node.enter(["sh", "-c", MAKE_DEB, "sh", name, extra])


@pytest.fixture
def apt(fresh_node: Node) -> Node:
    """A node with an apt repository of its own, and a count of the refreshes of the index."""
    fresh_node.run("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
    for name in NAMES:
        make_deb(fresh_node, name)
    fresh_node.write("/etc/apt/sources.list", f"deb [trusted=yes] file://{REPO} ./\n")
    fresh_node.write("/etc/apt/apt.conf.d/99test", APT_CONF)
    return fresh_node


def refreshes(node: Node) -> int:
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


@pytest.fixture
def hold(fresh_node: Node) -> Iterator[object]:
    """A factory: a process on the node that holds apt's lock on a file, for so many seconds."""
    held = []

    def start(path: str, seconds: int) -> int:
        fresh_node.write("/usr/local/bin/unattended.py", HOLD)
        command = f"python3 /usr/local/bin/unattended.py {path} {seconds} </dev/null &"
        started = fresh_node.run(command)
        held.append(int(started.stdout))
        return held[-1]

    yield start
    for pid in held:
        fresh_node.run(f"kill {pid} 2>/dev/null || :")


def test_missing_packages_are_installed_with_one_refresh_and_none_afterwards(apt):
    policy = want(*NAMES)
    assert status(apt, policy) == "fail"
    assert deploy(apt, policy) == 1
    assert apt.run("nr-alpha; nr-beta").stdout == "here\nhere\n"
    assert status(apt, policy) == "ok"
    assert deploy(apt, policy) == 0
    assert refreshes(apt) == 1


def test_a_command_that_was_installed_by_hand_counts(apt):
    apt.write("/usr/local/bin/nr-alpha", "#!/bin/sh\n", 0o755)
    assert deploy(apt, want("nr-alpha")) == 0


def test_a_package_whose_command_is_gone_is_installed_again(apt):
    apt.run("apt-get -q update && apt-get -q -y install nr-alpha && rm /usr/bin/nr-alpha")
    assert status(apt, want("nr-alpha")) == "fail"
    assert deploy(apt, want("nr-alpha")) == 1
    assert apt.run("nr-alpha").stdout == "here\n"
    assert deploy(apt, want("nr-alpha")) == 0
    # Another package has put it elsewhere, on purpose (dpkg-divert(1)).
    apt.run("dpkg-divert --rename --divert /usr/bin/nr-alpha.real --add /usr/bin/nr-alpha")
    assert deploy(apt, want("nr-alpha")) == 0


def test_what_can_be_installed_is_and_the_rest_is_named(apt):
    with pytest.raises(AssertionError) as failed:
        deploy(apt, want("nr-alpha", "nr-nowhere", "nr-beta"))
    said = str(failed.value)
    assert said.endswith("not installed: nr-nowhere: Unable to locate package nr-nowhere")
    assert "\n" not in said
    assert apt.run("nr-alpha; nr-beta").stdout == "here\nhere\n"
    assert refreshes(apt) == 1


@pytest.mark.parametrize("name", ["nr.alpha", "nr-al", "nr-alph.a"])
def test_a_name_is_no_pattern_of_other_packages(apt, name):
    with pytest.raises(AssertionError, match=f"not installed: {name}: Unable to locate package"):
        deploy(apt, want(name))
    assert apt.run("command -v nr-alpha nr-beta", check=False).stdout == ""


@pytest.mark.parametrize(
    ("mirror", "cause"),
    [
        ("http://mirror.invalid/debian", "resolv"),
        ("http://192.0.2.1/debian", "Cannot initiate the connection to 192.0.2.1:80"),
        ("file:/nowhere", "File not found - /nowhere"),
    ],
)
def test_an_unreachable_mirror_speaks_for_itself(apt, mirror, cause):
    apt.write("/etc/apt/sources.list", f"deb {mirror} bookworm main\n")
    with pytest.raises(AssertionError) as failed:
        deploy(apt, want(*NAMES))
    said = str(failed.value)
    assert f"not installed: nr-alpha nr-beta: {mirror}: " in said
    assert cause in said
    assert "\n" not in said
    # The tool that needs no mirror arrives all the same.
    policy = want(*NAMES)
    seen = observe(on(apt), policy, ["debug_tools"])
    apply(on(apt), plan(seen, policy, [debug_tools.py_spy]))
    assert apt.run("/usr/local/bin/py-spy --version").stdout == f"py-spy {policy.py_spy_version}\n"


def test_a_package_that_nobody_has_is_named_beside_the_mirror_that_is_down(apt):
    apt.run("echo 'deb http://mirror.invalid/debian bookworm main' >>/etc/apt/sources.list")
    with pytest.raises(AssertionError, match=r"mirror\.invalid.*; then Unable to locate package"):
        deploy(apt, want("nr-alpha", "nr-nowhere"))
    assert apt.run("nr-alpha").stdout == "here\n"


def test_an_unreachable_mirror_beside_one_that_has_it_all_is_no_failure(apt):
    apt.run("echo 'deb http://mirror.invalid/debian bookworm main' >>/etc/apt/sources.list")
    assert deploy(apt, want(*NAMES)) == 1
    assert status(apt, want(*NAMES)) == "ok"


@pytest.mark.parametrize(
    "path", ["/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock"]
)
def test_a_lock_that_stays_is_reported_with_its_holder(apt, hold, path):
    pid = hold(path, 600)
    with pytest.raises(AssertionError) as failed:
        deploy(apt, want("nr-alpha", wait_s=2))
    said = str(failed.value)
    assert f"{path} is locked by process {pid} (python3 /usr/local/bin/unattended.py" in said
    assert said.endswith("waited 2 s")
    assert "\n" not in said


@pytest.mark.parametrize("path", ["/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"])
def test_a_lock_that_goes_away_is_waited_for(apt, hold, path):
    hold(path, 3)
    assert deploy(apt, want("nr-alpha", wait_s=60)) == 1
    assert apt.run("nr-alpha").stdout == "here\n"


def test_a_package_that_would_push_another_out_is_not_installed(apt):
    deploy(apt, want("nr-alpha"))
    make_deb(apt, "nr-gamma", extra="Conflicts: nr-alpha\n")
    with pytest.raises(
        AssertionError, match="not installed: nr-gamma: Packages need to be removed"
    ):
        deploy(apt, want("nr-gamma"))
    assert apt.run("nr-alpha").stdout == "here\n"


# What the others say, from their sources and manuals: dnf 4 and zypper 1.14.
DNF_OK = 'for x; do :; done; printf "#!/bin/sh\\n" >/usr/bin/$x; chmod 755 /usr/bin/$x'
SAYS = "echo '{}' >&2; exit {}"


@pytest.fixture
def other(fresh_node: Node):
    """A factory: a node whose package manager is a stand-in that records how it was called."""

    def make(manager: str, body: str) -> Node:
        fresh_node.run("rm -rf /usr/bin/apt-get /usr/bin/pdsh /var/lib/dpkg/info")
        text = f'#!/bin/sh\necho "$ZYPP_LOCK_TIMEOUT:$*" >>/var/log/called\n{body}\n'
        fresh_node.write(f"/usr/bin/{manager}", text, 0o755)
        return fresh_node

    return make


@pytest.mark.parametrize(
    ("manager", "call"),
    [
        ("dnf", ":-y --setopt=exit_on_lock=1 --setopt=install_weak_deps=0 install -- nr-one"),
        ("yum", ":-y --setopt=exit_on_lock=1 install -- nr-one"),
        ("zypper", "30:--non-interactive install --no-recommends -- nr-one"),
    ],
)
def test_other_package_managers_are_called_as_they_want_it(other, manager, call):
    node = other(manager, DNF_OK)
    assert deploy(node, want("nr-one")) == 1
    assert node.read("/var/log/called") == call + "\n"
    assert deploy(node, want("nr-one")) == 0


@pytest.mark.parametrize(
    ("manager", "says", "rc", "told"),
    [
        (
            "dnf",
            "No match for argument: pdsh\nError: Unable to find a match: pdsh",
            1,
            "not installed: pdsh: No match for argument: pdsh (pdsh is in EPEL: enable it)",
        ),
        (
            "zypper",
            "No provider of pdsh found.",
            104,
            "not installed: pdsh: No provider of pdsh found. (pdsh is in PackageHub: enable it)",
        ),
        (
            "dnf",
            "Errors during downloading metadata for repository epel:\n"
            "  - Curl error (6): Could not resolve hostname for https://mirror.invalid/metalink\n"
            "Error: Failed to download metadata for repo epel",
            1,
            "not installed: pdsh: Curl error (6): Could not resolve hostname for "
            "https://mirror.invalid/metalink",
        ),
        (
            "zypper",
            "Error code: Connection failed\nError message: Could not resolve host: mirror.invalid",
            4,
            "not installed: pdsh: Error message: Could not resolve host: mirror.invalid",
        ),
        ("yum", "", 1, "not installed: pdsh: yum failed with exit status 1"),
    ],
)
def test_other_package_managers_failures_are_told_in_their_words(other, manager, says, rc, told):
    node = other(manager, SAYS.format(says, rc))
    with pytest.raises(AssertionError) as failed:
        deploy(node, want("pdsh"))
    assert str(failed.value).endswith(told)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("manager", "says", "rc"),
    [
        ("dnf", "metadata already locked by 1", 200),
        ("zypper", "System management is locked by the application with pid 1 (zypper).", 7),
        ("yum", "Existing lock /var/run/yum.pid: another copy is running as pid 1.", 200),
    ],
)
def test_other_package_managers_locks_are_waited_for_and_named(other, manager, says, rc):
    node = other(manager, SAYS.format(says, rc))
    with pytest.raises(AssertionError, match=r"locked by process 1 \(.*\); waited 2 s$"):
        deploy(node, want("pdsh", wait_s=2))
    assert len(node.read("/var/log/called").splitlines()) > 1


def test_zypper_s_hints_are_no_failures(other):
    node = other("zypper", f"{DNF_OK}\nexit 102")
    assert deploy(node, want("nr-one")) == 1
    assert status(node, want("nr-one")) == "ok"


def test_no_package_manager_is_a_person_s_work(fresh_node):
    fresh_node.run("rm -rf /usr/bin/apt-get /usr/bin/pdsh /var/lib/dpkg/info")
    assert status(fresh_node, want("nr-one")) == "fail"
    assert deploy(fresh_node, want("nr-one")) == 0
