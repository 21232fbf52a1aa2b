"""What a node printed, and what is made of it."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.ssh_client import checks
from nodeready.subjects.ssh_client import facts as ssh_client
from nodeready.subjects.ssh_client.checks import options
from nodeready.subjects.ssh_client.facts import (
    DROPIN,
    MAIN,
    SshClient,
    samples,
    speaks_first,
    winner,
)
from tests.builders.judging import judge_all
from tests.builders.nics import proc, v4
from tests.builders.sections import exact
from tests.builders.ssh_client import key

WANT = Policy(ssh_client_hosts=("gpu*",), ssh_known_hosts=("x y",))

RECORDED = f"""\
host=GPU001
/etc/hosts:127.0.1.1 gpu001.cluster.example gpu001 # ours
/etc/hosts:10.0.0.1 gpu001.other.example gpu001
/etc/ssh/ssh_host_ed25519_key.pub:{key(1)} root@gpu001
key={key(1)} the same again
/etc/ssh/ssh_config.d/50-site.conf:1:Host *
/etc/ssh/ssh_config.d/50-site.conf:2:  StrictHostKeyChecking ask
size=20
have=ssh
ask=own gpux
|user root
|stricthostkeychecking ask
|globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
rc=0
{exact("/etc/ssh/ssh_known_hosts", "login ssh-rsa AAAA" + chr(10), "abc")}
{exact("/etc/ssh/ssh_config", "Include /etc/ssh/ssh_config.d/*.conf" + chr(10), "abc")}"""


ROUTES = (v4("eth0", "10.0.0.0/24"), v4("ib0", "10.9.0.0/16"), v4("docker0", "172.17.0.0/16"))
NETWORK = (
    proc(ROUTES, ("10.0.0.1", "10.9.0.1", "172.17.0.1", "10.64.0.9"))
    + """\
/proc/net/if_inet6:20010db8000000000000000000000001 02 40 00 80     eth0
/proc/net/if_inet6:20010db800000000000000000000abcd 02 40 00 01     eth0
/proc/net/if_inet6:20010db800000000000000000000abce 02 40 00 40     eth0
/proc/net/if_inet6:fd000000000000000000000000000001 04 40 00 80  docker0
"""
)


def parse(text: str, rc: int | None = 0, truncated: bool = False, network: str = "") -> SshClient:
    outputs = {
        "ssh_client": Output(text, rc, truncated, "abc"),
        "nic_routes": Output(network, 0),
    }
    return ssh_client.parse(outputs, WANT)


def test_a_recorded_node() -> None:
    seen = parse(RECORDED, network=NETWORK)
    assert seen.identity.names == ("gpu001", "gpu001.cluster.example")
    assert seen.identity.addresses == ("10.0.0.1", "10.9.0.1", "2001:db8::1", "10.64.0.9")
    assert seen.identity.keys == (key(1),)
    assert seen.known_hosts.content == b"login ssh-rsa AAAA\n"
    assert seen.known_hosts.lines is None
    found = options(seen, WANT)
    assert found.fixable
    assert found.source == "/etc/ssh/ssh_config.d/50-site.conf:2"
    assert [result.status for result in judge_all(checks, seen, WANT)] == [
        "ok",
        "fail",
        "na",
        "fail",
        "na",
    ]


def test_a_node_with_nothing() -> None:
    seen = parse("host=gpu001\nfqdn=gpu001.example\nsize=0\n")
    assert seen.identity.names == ("gpu001", "gpu001.example")
    assert seen.identity.addresses == ()
    assert seen.known_hosts.content is None
    assert [result.status for result in judge_all(checks, seen, Policy())] == [
        "warn",
        "na",
        "na",
        "na",
        "na",
    ]


def test_the_addresses_of_a_balancer_are_not_the_nodes() -> None:
    services = tuple(f"10.96.0.{number}" for number in range(40))
    seen = parse("host=gpu001\n", network=proc(ROUTES, ("10.0.0.1", *services)))
    assert seen.identity.addresses == ("10.0.0.1",)


def test_a_file_cannot_speak_for_the_node() -> None:
    evil = f"key={key(6)}\nhave=ssh\nask=own gpux\nstricthostkeychecking true\nrc=0\n"
    evil += f"@xyz file /etc/ssh/ssh_config\n1: eth0 inet 10.6.6.6/8 x\n{MAIN}:1:Host *\n"
    seen = parse(f"host=gpu001\n{exact('/etc/ssh/ssh_known_hosts', evil, 'abc')}")
    assert seen.identity.keys == seen.identity.addresses == seen.asked == ()
    assert seen.files == {}
    assert seen.installed is False


HOSTILE = {
    "escape sequences": "host=gpu\x1b[31m001\nfqdn=\x1b]0;x\x07\nkey=\x1b[2J\n",
    "patterns": "host=*\nfqdn=*.*\n/etc/hosts:10.0.0.1 *.example *\n",
    "shell characters": "host=$(reboot)\nfqdn=`x`.y\nkey=ssh-rsa $(x)\n",
    "more lines": f"host=a b\nkey=x {key(1)}\nkey=ssh-ed25519 AAAA\nkey=ssh-rsa {'A' * 9000}\n",
    "somebody else's full name": "host=\nfqdn=github.com\n",
    "bytes that are no text": "host=\udcff\udcfe\nkey=\udcff\n/etc/hosts:\udcff\n",
    "10 MB": "host=" + "a" * 10_000_000 + "\nkey=" + "A" * 1_000_000 + "\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_nothing_hostile_becomes_a_name_a_key_or_an_address(text: str) -> None:
    identity = parse(text).identity
    assert (identity.names, identity.addresses, identity.keys) == ((), (), ())


@pytest.mark.parametrize(("rc", "truncated"), [(1, False), (None, False), (None, True)])
def test_an_answer_that_did_not_end_well_is_none(rc: int | None, truncated: bool) -> None:
    with pytest.raises(ProbeError):
        parse(RECORDED, rc, truncated)


def test_each_pattern_is_tried_by_a_host_that_it_means() -> None:
    want = Policy(ssh_client_hosts=("!login", "gpu*", "10.1.?.*", "n?", "never"))
    assert samples(want) == ("gpux", "10.1.0.x", "n0")
    for host, pattern in zip(samples(want), want.ssh_client_hosts[1:], strict=False):
        assert ssh_client.matches([pattern], host)
    only = Policy(ssh_client_hosts=("!gpu*",), ssh_known_hosts=("x y",))
    found = options(parse(RECORDED), only)
    assert (found.status, found.fixable) == ("fail", False)


def test_an_old_openssh_has_no_accept_new() -> None:
    want = Policy(ssh_client_hosts=("gpu*",), ssh_client_mode="accept-new")
    version = "version=OpenSSH_7.4p1, OpenSSL 1.0.2k-fips\n"
    found = options(parse(RECORDED.replace("\nsize=", f"\n{version}size=", 1)), want)
    assert (found.status, found.fixable) == ("fail", False)
    assert "OpenSSH 7.4 has no accept-new" in found.actual


OPTION = ("stricthostkeychecking",)
# Files as path and text; then the line that wins for gpu1, and whether a drop-in of ours would.
FILES = [
    ({MAIN: "Include /etc/ssh/ssh_config.d/*.conf"}, None, True),
    ({MAIN: "StrictHostKeyChecking no\nInclude /etc/ssh/ssh_config.d/*.conf"}, f"{MAIN}:1", False),
    ({MAIN: "Host a !gpu1 gpu*\nStrictHostKeyChecking no"}, None, False),
    ({MAIN: 'Host "gpu*"\n\tStrictHostKeyChecking = no'}, f"{MAIN}:2", False),
    ({MAIN: "Match host gpu*\nstricthostkeychecking no"}, f"{MAIN}:2", False),
    ({MAIN: "Match exec false\nstricthostkeychecking no\nMatch all\n\n"}, None, False),
    (
        {MAIN: "Include ssh_config.d/*\nHost *", "/etc/ssh/ssh_config.d/1": "Host x"},
        None,
        True,
    ),
    (
        {
            MAIN: "# x\nInclude /etc/ssh/ssh_config.d/*.conf",
            "/etc/ssh/ssh_config.d/00-a.conf": "Host g*\n  StrictHostKeyChecking no",
        },
        "/etc/ssh/ssh_config.d/00-a.conf:2",
        False,
    ),
    (
        {
            MAIN: "Include /etc/ssh/ssh_config.d/*.conf",
            "/etc/ssh/ssh_config.d/9.conf": "Host none",
            "/etc/ssh/ssh_config.d/99.conf": "StrictHostKeyChecking no",
        },
        "/etc/ssh/ssh_config.d/99.conf:1",
        True,
    ),
    ({MAIN: "Include /etc/ssh/ssh_config"}, None, False),
    ({MAIN: "Include /srv/x\nInclude /etc/ssh/ssh_config.d/*.conf"}, None, False),
    ({DROPIN: "Host *"}, None, False),
]


@pytest.mark.parametrize(("texts", "where", "first"), FILES)
def test_the_first_value_wins(texts: dict[str, str], where: str | None, first: bool) -> None:
    files = {path: ssh_client.lines_of(path, text.encode()) for path, text in texts.items()}
    found = winner(MAIN, files, "gpu1", *OPTION)
    assert (found.where if found else None) == where
    assert speaks_first(MAIN, files, OPTION) is first


def test_options_that_begin_again_and_again_are_read_once():
    # Looking for the end of each beginning would take minutes.
    head = "ask=own a\n" * 100_000 + "ask=system node001\n|user ml\nrc=0\n|user root\nrc=1\n"
    (asked,) = ssh_client._asked(head)
    assert (asked.host, asked.own, asked.values) == ("node001", False, {"user": "ml"})
