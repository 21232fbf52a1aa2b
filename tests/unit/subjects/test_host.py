"""What a node's own files say of it, and what is made of that."""

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy, check_settings
from nodeready.subjects.host import facts as host
from tests.builders.host import FILES, judged, node, wrong
from tests.cases import cases


def test_a_healthy_node_fails_nothing():
    observed = node()
    assert wrong(observed) == {}
    assert (observed.os_release, observed.kernel_release) == ("ubuntu 22.04", "5.15.0-113-generic")
    assert (observed.cpus, observed.numa_nodes) == (192, 2)
    assert (observed.pids, observed.pids_max) == (2594, 4194304)
    assert (observed.memory_total_mb, observed.hugepage_size_kb) == (2063897, 2048)
    assert (observed.lsm, observed.transparent_hugepage, observed.uptime_s) == (
        "apparmor", "madvise", 86400,
    )  # fmt: skip


@pytest.mark.parametrize("case", cases(__file__, "data/host/kernels.json"))
def test_what_a_file_says_of_the_kernel(case):
    policy = Policy(**case.get("policy", {}))
    observed = node(case.get("files"), policy=policy)
    status, _, actual = case["verdict"].partition(": ")
    result = judged(observed, policy)[case["check"]]
    assert (result.status, actual or result.actual) == (status, result.actual)
    assert wrong(observed, policy) == ({case["check"]: status} if result.bad else {})
    assert status in ("ok", "na", "unknown") or result.fix or "no hugetlbfs" in result.actual


SYSCTL = "file=/etc/sysctl.d/9.conf\n/etc/sysctl.d/9.conf:3:kernel.numa_balancing = {}\n"


@pytest.mark.parametrize("case", cases(__file__, "data/host/numa.json"))
def test_numa_balancing_now_and_at_the_next_boot(case):
    policy, boot = Policy(numa_balancing=case.get("wanted")), case["boot"]
    files = {"/proc/sys/kernel/numa_balancing": case["live"]}
    sysctl = SYSCTL.format(boot) if boot else ""
    result = judged(node(files, case["pci"], sysctl=sysctl, policy=policy), policy)
    assert result["numa_balancing"].status == case["status"]
    if result["numa_balancing"].bad and boot:
        assert result["numa_balancing"].source == "/etc/sysctl.d/9.conf:3"


@pytest.mark.parametrize("case", cases(__file__, "data/host/zones.json"))
def test_the_time_zone_is_where_localtime_leads(case):
    text = "localtime={localtime}\n/proc/meminfo:1:x\n/etc/timezone:1:{file}\n".format(**case)
    outputs = {"host": Output(text, 0), "sysctl": Output("", 0)}
    assert host.parse(outputs, Policy()).timezone == case["zone"]


def test_peers_share_what_is_not_one_machines_own():
    facts = host.compared(node())
    assert facts["cmdline"] == "ro iommu=pt console=ttyS0"
    assert (facts["memory_gib"], facts["network_mounts"]) == (2016, "/home")
    assert facts["glibc"] == "2.35-0ubuntu3.8"
    assert "gdb" not in facts
    empty = dict.fromkeys(FILES, "") | {"/proc/meminfo": "x"}
    assert "kernel" not in host.compared(node(empty, packages="", mounts="", slow_rc=None))


def test_what_is_learnt_fits_the_node():
    observed = node()
    data = host.learned(observed)
    assert data["mounts"] == ["/home"]
    assert data["memory_min_mb"] == 2015 * 1024
    policy = Policy(**check_settings(data, "learned"))
    assert wrong(observed, policy) == {}


@pytest.mark.parametrize("text", ["", "\x1b[31m" * 999, "/proc/self/mounts:1:x"])
def test_a_node_that_shows_nothing_is_unknown(text):
    outputs = {"host": Output(text, 0), "host_slow": Output("", 0), "sysctl": Output("", 0)}
    with pytest.raises(ProbeError, match="nothing"):
        host.parse(outputs, Policy())


def test_files_that_make_no_sense_cost_only_what_they_say():
    evil = "$(reboot)\x1b[2J\udcff [x] 9" + "9" * 5000
    observed = node(dict.fromkeys(FILES, evil), evil, policy=Policy(swap="off"))
    assert (observed.cpus, observed.memory_total_mb, observed.pids_max, observed.load) == (
        None,
    ) * 4
    assert {"memory", "file_handles", "pids", "swap"} <= wrong(observed, Policy(swap="off")).keys()
    host.compared(observed)
    host.learned(observed)


@pytest.mark.parametrize("case", cases(__file__, "data/host/packages.json"))
def test_versions_of_packages(case):
    assert host.parse_versions(case["printed"]) == case["versions"]
