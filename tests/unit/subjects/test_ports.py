"""What a node's /proc says about the ports of the policy, and what is made of it."""

from functools import partial

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.subjects.ports import checks
from nodeready.subjects.ports import facts as ports
from nodeready.subjects.ports.facts import Ports
from tests.builders.judging import by_id
from tests.builders.verdicts import assert_says, policy_of
from tests.cases import cases

POLICY = Policy()
READ = ("read=tcp", "read=tcp6")


def setting(key: str, value: str) -> str:
    return f"/proc/sys/{key.replace('.', '/')}:1:{value}"


ephemeral = partial(setting, ports.EPHEMERAL)
reserved = partial(setting, ports.RESERVED)
privileged = partial(setting, "net.ipv4.ip_unprivileged_port_start")
SYSCTLS = (ephemeral("32768 60999"), reserved(""), privileged("1024"))


def listens(port: int, uid: int, inode: int) -> str:
    return f"held=tcp 00000000:{port:04X} 00000000:0000 0A {uid} {inode}"


def node(*printed: str, sysctls=SYSCTLS, read=READ, files="", policy=POLICY) -> Ports:
    text = "\n".join((*sysctls, *read, *printed))
    printed_of = {"ports": text, "sysctl": f"reader=systemd\n{files}", "firewall": ""}
    return ports.parse({name: Output(text, 0) for name, text in printed_of.items()}, policy)


def conf(line: str) -> str:
    return f"file=/etc/sysctl.d/a.conf\n/etc/sysctl.d/a.conf:3:{line}\n"


judged = partial(by_id, checks)


def test_a_fresh_node_is_good():
    observed = node("socket=tcp 00000000:0016 00000000:0000 0A 0 12")
    assert {r.status for r in judged(observed).values()} == {"ok"}
    assert ports.compared(observed) == {
        "ephemeral": "32768-60999", "reserved": "none", "firewall": "no drop",
    }  # fmt: skip
    (socket,) = observed.listeners or ()
    assert (socket.port, socket.process, socket.user) == (22, None, None)
    with pytest.raises(ProbeError, match="truncated"):
        ports.parse({"ports": Output("x", None, truncated=True)}, POLICY)


@pytest.mark.parametrize("case", cases(__file__, "data/ports/nodes.json", "held"))
def test_who_holds_a_port(case):
    results = judged(node(*case["printed"]))
    held = results.pop("ports.range")
    assert f"{held.status}: {held.actual}" == case["range"]
    assert {result.status for result in results.values()} == {"ok"}
    many = [listens(29500 + n, 2000 + n, n + 1) for n in range(9)]
    assert judged(node(*many))["ports.range"].actual.count("and 5 more") == 1


def test_addresses_are_read_as_the_kernel_writes_them():
    v6 = "B80D0120000000000000000005000000:733C"
    observed = node("socket=tcp 0100007F:1F90 00000000:0000 0A 0 1", f"held=tcp6 {v6} {v6} 01 0 1")
    sockets = (*(observed.listeners or ()), *(observed.connections or ()))
    assert [socket.address for socket in sockets] == ["127.0.0.1", "2001:db8::5"]


@pytest.mark.parametrize("case", cases(__file__, "data/ports/nodes.json", "ephemeral"))
def test_the_kernel_gives_no_port_of_the_range_away(case):
    sysctls = (ephemeral(case["range"]), reserved(case.get("reserved", "")))
    files = "".join(map(conf, case.get("files", ())))
    policy = policy_of(case)
    results = judged(node(sysctls=sysctls, files=files, policy=policy), policy)
    result = results.pop("ports.ephemeral")
    assert_says(result, case["verdict"])
    assert case.get("fix", "") in result.fix
    assert {result.status for result in results.values()} == {"ok"}


def test_a_range_of_privileged_ports_is_roots():
    policy = Policy(port_range=(1000, 1030))
    assert judged(node(policy=policy), policy)["ports.privileged"].status == "fail"
    lowered = node(sysctls=(*SYSCTLS[:2], privileged("80")), policy=policy)
    assert judged(lowered, policy)["ports.privileged"].status == "ok"
    raised = node(sysctls=(*SYSCTLS[:2], privileged("29505")))
    assert judged(raised)["ports.privileged"].status == "fail"


def test_what_cannot_be_read_is_unknown():
    observed = node(sysctls=(), read=())
    unknown = {check for check, result in judged(observed).items() if result.status == "unknown"}
    assert unknown == {"ports.range", "ports.ephemeral"}
    assert ports.compared(observed) == {"firewall": "no drop"}


@pytest.mark.parametrize("printed", [
    "held=tcp",
    "held=tcp 00000000:733C",
    "held=tcp XX000000:733C 00000000:0000 0A 0 7",
    "held=tcp 0000000000000000:733C 00000000:0000 0A 0 7",
    "held=tcp 00000000:733C 00000000:0000 0A 99999999999999999999999 7",
    "held=\x1b[31m\udcff",
    "socket=udp 00000000:733C 00000000:0000 0A 0 7",
    *(ephemeral(value) for value in ("", "1", "1 2 3", "one two", "-1 5", "1 999999")),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(printed):
    with pytest.raises(ProbeError, match="makes no sense"):
        node(printed, sysctls=(reserved(""),))
    with pytest.raises(ProbeError, match="no number"):
        node(sysctls=(privileged("many"),))
