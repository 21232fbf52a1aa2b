"""The options on nodes whose ssh configuration somebody else has been at."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from nodeready.lab import Node
from nodeready.operations import ssh_client
from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import judge
from tests.builders.ssh_client import content, deploy, inside
from tests.helpers import apply, observe, plan
from tests.lab.rows import rows

CONFIG = "/etc/ssh/ssh_config"
DROPIN = "/etc/ssh/ssh_config.d/00-nodeready.conf"
INCLUDE = "Include /etc/ssh/ssh_config.d/*.conf\n"
ASK = "Host *\n  StrictHostKeyChecking ask\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPMge49R5xZnSKQi68nmYKDm/BQBwRuSAbFPfIB6IQYf"
HOSTS = ("gpu*", "!gpu-login", "10.1.?.*")
WANT = Policy(ssh_client_hosts=HOSTS, ssh_known_hosts=(f"login {KEY}",))
OFF = Policy(ssh_client_mode="no")
MEANT, NOT_MEANT = ("gpu001", "10.1.0.7"), ("other", "gpu-login", "10.2.0.1")


def options(node: Node, want: Policy) -> Result:
    results = judge(observe(inside(node), want, ["ssh_client"]), want)
    return next(result for result in results if result.check == "ssh_client.options")


def effective(
    node: Node, hosts: Iterable[str] = (*MEANT, *NOT_MEANT)
) -> dict[str, dict[str, str]]:
    """What ssh itself says to the user ml about each host."""
    script = 'for host; do echo "host= $host"; ssh -GT "$host"; done'
    login = ["setpriv", "--reuid=2000", "--regid=2000", "--clear-groups"]
    said: dict[str, dict[str, str]] = {}
    for line in node.enter([*login, "sh", "-c", script, "sh", *hosts]).stdout.splitlines():
        option, _, value = line.partition(" ")
        if option == "host=":
            current = said[value] = {}
        elif option != "hostname":
            current[option] = value
    return said


# What is there before, as one file and its content, and where ours goes. Which line wins, and what
# a block leaves of a file, tests/unit asks.
DISTRIBUTION = INCLUDE + "Host *\n    SendEnv LANG\n    HashKnownHosts yes\n"
TRAPS = {
    "the distribution's file": (CONFIG, DISTRIBUTION, DROPIN),
    "a drop-in that comes later": ("50-x.conf", "StrictHostKeyChecking ask\n", DROPIN),
    "an Include by relative name": (CONFIG, f"# x\nInclude ssh_config.d/*\n{ASK}", DROPIN),
    "no Include": (CONFIG, f"ForwardX11 yes\n{ASK}", CONFIG),
    "Host * before the Include": (CONFIG, ASK + INCLUDE, CONFIG),
    "a drop-in that sorts before ours": ("00-aaa.conf", "StrictHostKeyChecking ask\n", CONFIG),
    "a file elsewhere": (CONFIG, f"Include /etc/ssh/site.conf\n{INCLUDE}{ASK}", CONFIG),
    "bytes that are no UTF-8": (CONFIG, b"# caf\xe9\n" + ASK.encode(), CONFIG),
}


@pytest.mark.parametrize(
    "case",
    rows(TRAPS, "the distribution's file", "Host * before the Include", "bytes that are no UTF-8"),
)
def test_ours_wins_and_the_rest_stays(fresh_node: Node, case: str) -> None:
    path, text, place = TRAPS[case]
    node = fresh_node
    path = path if path.startswith("/") else f"/etc/ssh/ssh_config.d/{path}"
    node.write("/etc/ssh/site.conf", "Host gpu*\n  StrictHostKeyChecking no\n")
    node.write(path, text)
    before, was = effective(node), content(node, path)
    assert options(node, WANT).fixable

    assert deploy(node, WANT) == 2

    now = effective(node)
    for host in MEANT:
        assert now[host]["stricthostkeychecking"] == "true"
        assert now[host]["globalknownhostsfile"].startswith("/etc/ssh/ssh_known_hosts ")
    for host in NOT_MEANT:
        # Nothing that follows ours has become part of it.
        assert now[host] == before[host]
    assert managed_block.remove(content(node, path)) == was
    there = node.enter(
        ["find", DROPIN, CONFIG, "-exec", "grep", "-l", "gpu", "{}", "+"], check=False
    )
    assert there.stdout.split() == [place]

    # Another policy, then none: what is there follows, and in the end all is as it was.
    assert deploy(node, Policy(ssh_client_hosts=("gpu*",), ssh_client_mode="accept-new"))
    now = effective(node)
    assert now["gpu001"]["stricthostkeychecking"] == "accept-new"
    assert now["10.1.0.7"] == before["10.1.0.7"]
    assert deploy(node, OFF) == 1
    assert effective(node) == before
    assert node.enter(["grep", "-rl", "nodeready", "/etc/ssh"], check=False).stdout == ""
    if was:
        assert content(node, path) == was


def test_a_link_stays_a_link_and_a_missing_file_is_made_and_goes_again(fresh_node: Node) -> None:
    node, theirs = fresh_node, "/srv/site/ssh_config"
    node.write(theirs, ASK, mode=0o664)
    node.enter(["ln", "-sf", theirs, CONFIG])
    deploy(node, WANT)
    found = node.run(f"readlink {CONFIG}; stat -c %a {theirs}").stdout
    assert found == f"{theirs}\n664\n"
    assert managed_block.remove(content(node, theirs)) == ASK.encode()
    node.enter(["rm", "-r", CONFIG, "/etc/ssh/ssh_config.d"])
    deploy(node, WANT)
    assert effective(node)["gpu001"]["stricthostkeychecking"] == "true"
    deploy(node, OFF)
    assert node.enter(["test", "-e", CONFIG], check=False).returncode == 1


@pytest.mark.nightly
def test_what_was_changed_by_hand_is_set_again(fresh_node: Node) -> None:
    node = fresh_node
    deploy(node, WANT)

    def is_set_again(path: str, text: str | bytes) -> str:
        node.write(path, text)
        found = options(node, WANT)
        assert found.fixable
        deploy(node, WANT)
        assert effective(node)["gpu001"]["stricthostkeychecking"] == "true"
        return found.source

    is_set_again(DROPIN, "Nonsense yes\n")
    # Somebody overrides us later, from a place where ours cannot win as it is.
    assert is_set_again(CONFIG, ASK + INCLUDE) == f"{CONFIG}:2"
    assert node.enter(["test", "-e", DROPIN], check=False).returncode == 1
    # Lines that somebody puts above our block are no loss: it goes to the top again.
    is_set_again(CONFIG, ASK.encode() + content(node, CONFIG))
    assert content(node, CONFIG).count(managed_block.BEGIN) == 1


def test_roots_own_file_is_named_and_left_alone(fresh_node: Node) -> None:
    node = fresh_node
    node.write("/root/.ssh/config", "Host gpu*\n    StrictHostKeyChecking no\n", mode=0o600)
    deploy(node, WANT)
    found = options(node, WANT)
    assert (found.status, found.source) == ("warn", "/root/.ssh/config:2")
    assert found.actual == "root's own file wins: stricthostkeychecking false"
    assert effective(node)["gpu001"]["stricthostkeychecking"] == "true"


def test_no_strict_check_without_keys(fresh_node: Node) -> None:
    node = fresh_node
    seen = observe(inside(node), WANT, ["ssh_client"])
    with pytest.raises(AssertionError, match="the host keys are not in /etc/ssh/ssh_known_hosts"):
        apply(inside(node), plan(seen, WANT, [ssh_client.options]))
    assert effective(node)["gpu001"]["stricthostkeychecking"] == "ask"
