"""ssh from node to node, by real ssh and sshd: its modes, other people's lines, its options."""

import re
from collections.abc import Iterable

import pytest

from nodeready.core import own_files
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.lab import LabNode
from nodeready.operations import ssh_client
from nodeready.subjects.snapshot import judge
from nodeready.subjects.ssh_client.facts import KNOWN_HOSTS, SENT_BYTES, NodeIdentity, SshClient
from nodeready.subjects.ssh_client.known_hosts import (
    READ_BLOCK,
    Endpoint,
    FleetHostKeys,
    lines_of_nodes,
    read_block,
    unsent,
)
from tests.builders.ssh_client import content, deploy, inside, key
from tests.helpers import apply, observe, on, plan
from tests.lab.rows import rows


@pytest.fixture
def deployed(fleet, tool):
    """Deploy the subject to these nodes of a fleet; how many changes that took."""

    def run(nodes: list[LabNode], *words: str, **policy: object) -> int:
        done = tool(
            "deploy", fleet(nodes, **policy), "--yes", "--only", "ssh_client", *words, status=0
        )
        return int(re.search(r"\((\d+) changes?\)", done.out)[1])

    return run


def ssh(node: LabNode, target: str, user: str = "root") -> str:
    """The host name at the other end, or ssh's last word when it refuses."""
    done = node.run(f"ssh -o BatchMode=yes {target} hostname", user=user, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


REFUSED = "Host key verification failed."


def test_known_hosts_lets_every_node_reach_every_node(fresh_nodes, deployed):
    nodes = fresh_nodes(3)
    first, second, third = nodes
    assert ssh(first, second.name) == REFUSED
    assert deployed(nodes) == 3
    assert deployed(nodes) == 0
    names = {name: other.name for other in nodes for name in (other.name, other.address)}
    each = "ssh -o BatchMode=yes {0} echo {0} '$(hostname)' &\n"
    logins = "".join(map(each.format, names))
    answers = {f"{name} {hostname}" for name, hostname in names.items()}
    for node in nodes:
        for user in ("root", "ml"):
            assert set(node.run(f"{logins}wait", user=user).stdout.splitlines()) == answers
    own = first.run("ls -A /home/ml/.ssh", user="ml").stdout.split()
    assert own == ["authorized_keys", "id_ed25519", "id_ed25519.pub"]

    # A limited run keeps the keys of the nodes that it did not see.
    assert deployed(nodes, "--limit", f"{first.name},{second.name}") == 0
    assert ssh(second, third.name) == third.name

    third.reset(new_host_key=True)
    assert ssh(first, third.name) == REFUSED
    assert deployed(nodes) == 3
    assert ssh(first, third.name, "ml") == third.name
    assert ssh(third, first.address, "ml") == first.name


@pytest.mark.parametrize(
    ("mode", "other_key"),
    rows([("known_hosts", REFUSED), ("accept-new", REFUSED), ("no", None)], "accept-new"),
)
def test_a_mode_answers_the_question_for_its_hosts_only(fresh_nodes, deployed, mode, other_key):
    nodes = first, second = fresh_nodes(2)
    deployed(nodes, ssh_client_mode=mode, ssh_client_hosts=(second.name, "10.*"))
    assert ssh(first, second.name, "ml") == second.name
    if mode != "known_hosts":
        # Another name of the same node, outside the patterns.
        first.run(f"echo {second.address} elsewhere >>/etc/hosts")
        assert ssh(first, "elsewhere", "ml") == REFUSED
    second.reset(new_host_key=True)
    assert ssh(first, second.name, "ml") == (other_key or second.name)
    # Switched off again, nothing of ours stays in ssh's configuration.
    deployed(nodes, ssh_client_mode="no")
    listing = first.run("ls -A /etc/ssh /etc/ssh/ssh_config.d").stdout
    assert not re.search("nodeready|ssh_known_hosts", listing)


def test_a_node_tells_who_it_is(fresh_node):
    node, name = fresh_node, fresh_node.name
    (ours,) = identity(node).keys
    assert identity(node).addresses == (node.address,)
    node.write("/usr/local/bin/hostname", f"#!/bin/sh\necho {name}.dns.example\n", 0o755)
    node.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1\t{name}.files.example\t{name}\n")
    assert identity(node).names == (name, f"{name}.files.example")
    node.write("/etc/hosts", f"127.0.0.1 localhost\n10.0.0.9 x{name} {name}-ib # {name}\n")
    assert identity(node).names == (name, f"{name}.dns.example")
    node.write("/etc/ssh/site_key.pub", f"{key(3)} root@site\n")
    node.write("/etc/ssh/sshd_config.d/site.conf", "hostkey /etc/ssh/site_key\n")
    assert identity(node).keys == (ours, key(3))


def identity(node: LabNode) -> NodeIdentity:
    seen: SshClient = observe(on(node), Policy(), ["ssh_client"])["ssh_client"]
    return seen.identity


# --- Lines of other people, and sizes.


def checked(node: LabNode, want: Policy, check: str) -> Result:
    seen = observe(inside(node), want, ["ssh_client"])
    return next(one for one in judge(seen, want) if one.check == f"ssh_client.{check}")


def fleet(size: int) -> Policy:
    return Policy(
        ssh_known_hosts=tuple(f"gpu{n:05},10.0.{n // 250}.{n % 250} {key(n)}" for n in range(size))
    )


def known(node: LabNode, host: str) -> str:
    """The key that ssh-keygen finds for a host, as ssh would."""
    said = node.enter(["ssh-keygen", "-F", host, "-f", KNOWN_HOSTS], check=False).stdout
    return " ".join(said.splitlines()[-1].split()[1:3]) if said else ""


#: What their lines can be beside, tests/unit asks of the block.
OTHERS = {
    "lines and bytes": b"# ours\n@revoked * ssh-rsa AAAA\r\nlogin ssh-ed25519 AAAA \xe9\xff",
    "more than is sent": b"".join(b"x%d ssh-rsa AAAA\n" % n for n in range(6000)),
}


@pytest.mark.parametrize("case", rows(OTHERS, "lines and bytes"))
def test_other_peoples_lines_stay(fresh_node, case):
    others, node = OTHERS[case], fresh_node
    node.write(KNOWN_HOSTS, others)
    for want in (fleet(3), fleet(2000), fleet(1999), fleet(4)):
        deploy(node, want)
        last = len(want.ssh_known_hosts) - 1
        assert known(node, f"gpu{last:05}") == key(last)
        rest = own_files.remove_block(content(node, KNOWN_HOSTS))
        assert rest in (others, others + b"\n")
    deploy(node, Policy(ssh_client_mode="no"))
    assert content(node, KNOWN_HOSTS) in (others, others + b"\n")


def test_a_block_too_large_to_send_is_told_by_its_digest(fresh_node):
    node = fresh_node
    want = fleet(4000)
    deploy(node, want)
    assert len(content(node, KNOWN_HOSTS)) > SENT_BYTES
    seen = observe(inside(node), want, ["ssh_client"])
    assert seen["ssh_client"].known_hosts.lines is None

    # A run that saw a part of the fleet must not throw the others' keys away.
    few = fleet(100)
    result = checked(node, few, "known_hosts")
    assert (result.status, result.fixable) == ("warn", False)
    # It asks one node for its block instead, and keeps what that knows.
    ((digest, names),) = unsent({"x": seen}, few.ssh_known_hosts).items()
    printed = node.enter(["sh", "-c", READ_BLOCK]).stdout
    fetched = {digest: read_block(printed, digest)}
    assert names == ("x",)
    others = {f"gpu{n:05}": Endpoint() for n in range(4000)}
    whole = FleetHostKeys({"x": seen}, (), {"x": Endpoint(), **others})
    assert set(want.ssh_known_hosts) < set(lines_of_nodes(whole, {"x": seen}, fetched)["x"])


def test_too_many_lines_of_others_are_a_persons(fresh_node):
    node = fresh_node
    node.write(KNOWN_HOSTS, b"x ssh-rsa AAAA\n" * (SENT_BYTES // 15 + 10))
    want = fleet(3)
    result = checked(node, want, "known_hosts")
    assert (result.status, result.fixable) == ("fail", False)
    assert "outside our block" in result.actual


# --- Options, where somebody else has been at the configuration.

CONFIG = "/etc/ssh/ssh_config"
DROPIN = "/etc/ssh/ssh_config.d/00-nodeready.conf"
INCLUDE = "Include /etc/ssh/ssh_config.d/*.conf\n"
ASK = "Host *\n  StrictHostKeyChecking ask\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPMge49R5xZnSKQi68nmYKDm/BQBwRuSAbFPfIB6IQYf"
HOSTS = ("gpu*", "!gpu-login", "10.1.?.*")
WANT = Policy(ssh_client_hosts=HOSTS, ssh_known_hosts=(f"login {KEY}",))
OFF = Policy(ssh_client_mode="no")
MEANT, NOT_MEANT = ("gpu001", "10.1.0.7"), ("other", "gpu-login", "10.2.0.1")


def effective(
    node: LabNode, hosts: Iterable[str] = (*MEANT, *NOT_MEANT)
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
def test_ours_wins_and_the_rest_stays(fresh_node, case):
    path, text, place = TRAPS[case]
    node = fresh_node
    path = path if path.startswith("/") else f"/etc/ssh/ssh_config.d/{path}"
    node.write("/etc/ssh/site.conf", "Host gpu*\n  StrictHostKeyChecking no\n")
    node.write(path, text)
    before, was = effective(node), content(node, path)
    assert checked(node, WANT, "options").fixable

    assert deploy(node, WANT) == 2

    now = effective(node)
    for host in MEANT:
        assert now[host]["stricthostkeychecking"] == "true"
        assert now[host]["globalknownhostsfile"].startswith("/etc/ssh/ssh_known_hosts ")
    for host in NOT_MEANT:
        # Nothing that follows ours has become part of it.
        assert now[host] == before[host]
    assert own_files.remove_block(content(node, path)) == was
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


def test_a_link_stays_a_link_and_a_missing_file_is_made_and_goes_again(fresh_node):
    node, theirs = fresh_node, "/srv/site/ssh_config"
    node.write(theirs, ASK, mode=0o664)
    node.enter(["ln", "-sf", theirs, CONFIG])
    deploy(node, WANT)
    found = node.run(f"readlink {CONFIG}; stat -c %a {theirs}").stdout
    assert found == f"{theirs}\n664\n"
    assert own_files.remove_block(content(node, theirs)) == ASK.encode()
    node.enter(["rm", "-r", CONFIG, "/etc/ssh/ssh_config.d"])
    deploy(node, WANT)
    assert effective(node)["gpu001"]["stricthostkeychecking"] == "true"
    deploy(node, OFF)
    assert node.enter(["test", "-e", CONFIG], check=False).returncode == 1


@pytest.mark.nightly
def test_what_was_changed_by_hand_is_set_again(fresh_node):
    node = fresh_node
    deploy(node, WANT)

    def is_set_again(path: str, text: str | bytes) -> str:
        node.write(path, text)
        found = checked(node, WANT, "options")
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
    assert content(node, CONFIG).count(own_files.BEGIN) == 1


def test_roots_own_file_is_named_and_left_alone(fresh_node):
    node = fresh_node
    node.write("/root/.ssh/config", "Host gpu*\n    StrictHostKeyChecking no\n", mode=0o600)
    deploy(node, WANT)
    found = checked(node, WANT, "options")
    assert (found.status, found.source) == ("warn", "/root/.ssh/config:2")
    assert found.actual == "root's own file wins: stricthostkeychecking false"
    assert effective(node)["gpu001"]["stricthostkeychecking"] == "true"


def test_no_strict_check_without_keys(fresh_node):
    node = fresh_node
    seen = observe(inside(node), WANT, ["ssh_client"])
    with pytest.raises(AssertionError, match="the host keys are not in /etc/ssh/ssh_known_hosts"):
        apply(inside(node), plan(seen, WANT, [ssh_client.options]))
    assert effective(node)["gpu001"]["stricthostkeychecking"] == "ask"
