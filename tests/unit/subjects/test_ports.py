"""What a node's /proc says about the ports of the policy, and what is made of it."""

from __future__ import annotations

from functools import partial

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.ports import checks
from nodeready.subjects.ports import facts as ports
from nodeready.subjects.ports.facts import Ports
from tests.builders.judging import by_id

POLICY = Policy()
NFT = "\n@ tool nft\n\n@ status 0\n"
DROP = """
@ tool nft
table inet filter {
	chain input {
		type filter hook input priority filter; policy accept;
		tcp dport 29500-29510 counter drop
	}
}
@ status 0
"""
ANY, ANY6 = "00000000:", "00000000000000000000000000000000:"
NOBODY = "00000000:0000"
READ = ("read=tcp", "read=tcp6")
SYSCTLS = ("ephemeral=32768 60999", "reserved=", "privileged=1024")


def listens(port: int, uid: int = 1001, inode: int = 7, state: str = "0A") -> str:
    return f"held=tcp {ANY}{port:04X} {NOBODY} {state} {uid} {inode}"


def node(
    *printed: str,
    sysctls: tuple[str, ...] = SYSCTLS,
    read: tuple[str, ...] = READ,
    files: str = "",
    rules: str = NFT,
    policy: Policy = POLICY,
) -> Ports:
    """The observation of a node on which the probe printed this."""
    text = "\n".join((*sysctls, "local=10.1.0.5", *read, *printed))
    outputs = {
        "ports": Output(text, 0),
        "sysctl": Output(f"reader=systemd\n{files}", 0),
        "firewall": Output(rules, 0),
    }
    return ports.parse(outputs, policy)


def conf(line: str) -> str:
    return f"file=/etc/sysctl.d/a.conf\n/etc/sysctl.d/a.conf:3:{line}\n"


judged = partial(by_id, checks)


def test_a_fresh_node_is_good() -> None:
    seen = node("socket=tcp 00000000:0016 00000000:0000 0A 0 12")
    assert {r.status for r in judged(seen).values()} == {"ok"}
    assert ports.compared(seen) == {
        "ephemeral": "32768-60999", "reserved": "none", "firewall": "open",
    }  # fmt: skip
    assert [(one.port, one.process, one.user) for one in seen.listeners or ()] == [
        (22, None, None)
    ]


@pytest.mark.parametrize(
    ("printed", "status", "actual"),
    [
        (
            (listens(29500), "owner=7 900 : python3", "owner=7 90 4711: python3", "user=1001 ada"),
            "warn",
            "29500 by python3 (pid 90, user ada, job 4711): a job may be running",
        ),
        (
            (listens(29501, 0), "owner=7 1 : node_exporter", "user=0 root"),
            "fail",
            "29501 by node_exporter (pid 1, user root)",
        ),
        ((listens(29502, 998),), "fail", "29502 by a process (user uid 998)"),
        ((listens(29502, 65534),), "fail", "29502 by a process (user uid 65534)"),
        ((listens(29502, 62000),), "fail", "29502 by a process (user uid 62000)"),
        (
            (listens(29500, inode=1), listens(29501, inode=2), listens(29501, 0, 3),
             "owner=1 90 : python3", "owner=2 90 : python3"),
            "fail",
            "29501 by a process (user uid 0)",
        ),
        (
            (listens(29500), listens(29501), listens(29503),
             f"held=tcp6 {ANY6}733C {ANY6}0000 0A 1001 8", "owner=7 9 : t", "owner=8 9 : t"),
            "warn",
            "29500-29501, 29503 by t (pid 9, user uid 1001): a job may be running",
        ),
        (
            ("held=tcp 0500010A:733C 0900010A:0016 01 0 7", "owner=7 80 : ssh", "user=0 root"),
            "warn",
            "29500 by ssh (pid 80, user root), established to 10.1.0.9 port 22",
        ),
        (("held=tcp 0500010A:733C 0900010A:0016 05 0 0",), "warn",
         "29500 by a process (user uid 0), fin wait 2 to 10.1.0.9 port 22"),
        ((), "ok", "29500-29510 free"),
    ],
)  # fmt: skip
def test_who_holds_a_port(printed: tuple[str, ...], status: str, actual: str) -> None:
    results = judged(node(*printed))
    assert (results["ports.range"].status, results["ports.range"].actual) == (status, actual)
    assert {r.status for check, r in results.items() if check != "ports.range"} == {"ok"}


def test_many_holders_are_counted() -> None:
    printed = [listens(29500 + n, 2000 + n, n + 1) for n in range(9)]
    assert judged(node(*printed))["ports.range"].actual.count("and 5 more") == 1


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    v6 = "B80D0120000000000000000005000000:733C"
    seen = node("socket=tcp 0100007F:1F90 00000000:0000 0A 0 1", f"held=tcp6 {v6} {v6} 01 0 1")
    assert [one.address for one in (*(seen.listeners or ()), *(seen.connections or ()))] == [
        "127.0.0.1", "2001:db8::5",
    ]  # fmt: skip


EPHEMERAL, RESERVED = ports.EPHEMERAL, ports.RESERVED


@pytest.mark.parametrize(
    ("live", "files", "status", "part"),
    [
        (("32768 60999", ""), "", "ok", "ephemeral 32768-60999"),
        (("1024 65535", ""), "", "fail", "ephemeral 1024-65535, reserved none; next boot 32768"),
        (("29505 60999", ""), "", "fail", ""),
        (("1024 29500", ""), "", "fail", ""),
        (("1024 29499", ""), "", "ok", ""),
        (("1024 65535", "29500-29510"), "", "ok", ""),
        (("1024 65535", "80,29400-29600"), "", "ok", ""),
        (("1024 65535", "29500-29505,29506,29507-29510"), "", "ok", ""),
        (("1024 65535", "29500-29505,29507-29510"), "", "fail", ""),
        (("32768 60999", ""), conf(f"{EPHEMERAL} = 1024 65535"), "fail", "next boot 1024-65535"),
        (("32768 60999", ""), conf(f"{EPHEMERAL} = 10000\t65535"), "fail", ""),
        (
            ("1024 65535", "29500-29510"),
            conf(f"{EPHEMERAL} = 1024 65535") + conf(f"{RESERVED} = 29500-29510"),
            "ok",
            "",
        ),
        (
            ("1024 65535", "29500-29510"),
            conf(f"{EPHEMERAL} = 1024 65535"),
            "fail",
            "next boot 1024-65535, reserved none",
        ),
        (("32768 60999", ""), conf(f"{EPHEMERAL} = nonsense"), "ok", ""),
    ],
)
def test_the_kernel_gives_no_port_of_the_range_away(
    live: tuple[str, str], files: str, status: str, part: str
) -> None:
    sysctls = (f"ephemeral={live[0]}", f"reserved={live[1]}")
    results = judged(node(sysctls=sysctls, files=files))
    result = results["ports.ephemeral"]
    assert result.status == status
    assert part in result.actual
    assert {r.status for check, r in results.items() if check != "ports.ephemeral"} == {"ok"}


def test_a_range_that_only_lives_until_the_next_boot_is_a_warning() -> None:
    policy = Policy(port_range=(40000, 40010))
    seen = node(sysctls=("ephemeral=50000 60000", "reserved="), policy=policy)
    result = judged(seen, policy)["ports.ephemeral"]
    assert (result.status, "no sysctl file keeps" in result.actual) == ("warn", True)


def test_the_fix_keeps_what_is_reserved_already() -> None:
    seen = node(sysctls=("ephemeral=1024 65535", "reserved=80,29490-29499,30000-30001"))
    fix = judged(seen)["ports.ephemeral"].fix
    assert fix.startswith(f"{RESERVED} = 80,29490-29510,30000-30001 in")


def test_a_drop_is_named_with_what_opens_it() -> None:
    results = judged(node(rules=DROP))
    result = results["ports.firewall"]
    assert (result.status, result.actual, result.source) == (
        "fail",
        "29500-29510 dropped by tcp dport 29500-29510 drop",
        "inet filter input (nftables)",
    )
    assert "tcp dport 29500-29510 accept" in result.fix
    assert {r.status for check, r in results.items() if check != "ports.firewall"} == {"ok"}
    doubt = node(rules=DROP.replace("tcp dport 29500-29510", "ip saddr 10.0.0.0/8"))
    result = judged(doubt)["ports.firewall"]
    assert (result.status, "ip saddr 10.0.0.0/8 drop" in result.actual) == ("warn", True)


def test_a_network_of_the_node_that_gets_in_is_named() -> None:
    rules = DROP.replace("accept;", "drop;").replace(
        "tcp dport 29500-29510 counter drop", "ip saddr 10.1.0.0/16 accept"
    )
    eth0, ib0, docker = (
        "eth0 0000010A 0000FFFF",
        "ib0 0007A8C0 00FFFFFF",
        "docker0 000011AC 0000FFFF",
    )
    seen = node(f"network={eth0}", f"network={docker}", "network=x", rules=rules)
    result = judged(seen)["ports.firewall"]
    assert (result.status, result.actual) == ("ok", "open to 10.1.0.0/16 on eth0 (nftables)")
    result = judged(node(f"network={eth0}", f"network={ib0}", rules=rules))["ports.firewall"]
    assert result.status == "warn"
    assert result.actual.endswith("ip saddr 10.1.0.0/16 accept, open to 10.1.0.0/16 on eth0")


def test_without_root_the_firewall_alone_is_unknown() -> None:
    seen = node(rules="\n@ tool nft\n@ status root\n")
    results = judged(seen)
    assert results["ports.firewall"].status == "unknown"
    assert "root" in results["ports.firewall"].actual
    assert {r.status for check, r in results.items() if check != "ports.firewall"} == {"ok"}
    assert "firewall" not in ports.compared(seen)


def test_a_range_of_privileged_ports_is_roots() -> None:
    policy = Policy(port_range=(1000, 1030))
    assert judged(node(policy=policy), policy)["ports.privileged"].status == "fail"
    lowered = node(sysctls=(*SYSCTLS[:2], "privileged=80"), policy=policy)
    assert judged(lowered, policy)["ports.privileged"].status == "ok"
    raised = node(sysctls=(*SYSCTLS[:2], "privileged=29505"))
    assert judged(raised)["ports.privileged"].status == "fail"


def test_what_cannot_be_read_is_unknown() -> None:
    seen = node(sysctls=(), read=())
    statuses = {check: result.status for check, result in judged(seen).items()}
    assert statuses == {
        "ports.range": "unknown",
        "ports.ephemeral": "unknown",
        "ports.firewall": "ok",
        "ports.privileged": "ok",
    }
    assert ports.compared(seen) == {"firewall": "open"}


@pytest.mark.parametrize(
    "printed",
    [
        "held=tcp",
        "held=tcp 00000000:733C",
        "held=tcp XX000000:733C 00000000:0000 0A 0 7",
        "held=tcp 0000000000000000:733C 00000000:0000 0A 0 7",
        "held=tcp 00000000:733C 00000000:0000 0A 99999999999999999999999 7",
        "held=\x1b[31m\udcff",
        "socket=udp 00000000:733C 00000000:0000 0A 0 7",
    ],
)
def test_a_socket_that_makes_no_sense_is_refused(printed: str) -> None:
    with pytest.raises(ProbeError, match="makes no sense"):
        node(printed)


@pytest.mark.parametrize("value", ["", "1", "1 2 3", "one two", "-1 5", "1 999999", "\x1b[2J"])
def test_a_setting_that_makes_no_sense_is_refused(value: str) -> None:
    with pytest.raises(ProbeError, match="makes no sense"):
        node(sysctls=(f"ephemeral={value}", "reserved="))
    with pytest.raises(ProbeError, match="no number"):
        node(sysctls=("privileged=many",))


def test_hostile_names_stay_data() -> None:
    seen = node(
        listens(29500), "owner=7 5 : [/red]\x1b[2J$(reboot)", "owner=x y", "owner=7", "user=1001"
    )
    assert "[/red]\x1b[2J$(reboot) (pid 5" in judged(seen)["ports.range"].actual


def test_a_section_that_was_cut_off_costs_the_subject() -> None:
    outputs = {"ports": Output("x", None, truncated=True), "sysctl": Output("", 0),
               "firewall": Output("", 0)}  # fmt: skip
    with pytest.raises(ProbeError, match="truncated"):
        ports.parse(outputs, POLICY)
