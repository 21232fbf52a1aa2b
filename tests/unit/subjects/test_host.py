"""What a node's own files say of it, and what is made of that."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.policy.policy import check_settings
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.host import facts as host
from tests.builders.host import FILES, judged, node, wrong

PCI = "device=0x74a1"


def test_a_healthy_node_fails_nothing() -> None:
    seen = node()
    assert wrong(seen) == {}
    assert (seen.os_release, seen.kernel_release) == ("ubuntu 22.04", "5.15.0-113-generic")
    assert (seen.cpus, seen.numa_nodes, seen.pids, seen.pids_max) == (192, 2, 2594, 4194304)
    assert (seen.memory_total_mb, seen.hugepage_size_kb) == (2063897, 2048)
    assert (seen.lsm, seen.transparent_hugepage, seen.uptime_s) == ("apparmor", "madvise", 86400)


@pytest.mark.parametrize(
    ("policy", "files", "check", "status", "actual"),
    [
        (Policy(kernel_release="5.15.0-113-generic"), {}, "kernel", "ok", "5.15.0-113-generic"),
        (Policy(kernel_release="6.8.0-1"), {}, "kernel", "fail", "5.15.0-113-generic"),
        (Policy(os_release="ubuntu 22.04"), {}, "os", "ok", "ubuntu 22.04"),
        (Policy(os_release="ubuntu 22.04"), {"/etc/os-release": "ID=arch"}, "os", "fail", "arch"),
        (Policy(timezone="UTC"), {}, "timezone", "ok", "Etc/UTC"),
        (Policy(timezone="Europe/Berlin"), {}, "timezone", "fail", "Etc/UTC"),
        (Policy(memory_min_mb=2063897), {}, "memory", "ok", "2063897 MiB"),
        (Policy(memory_min_mb=2063898), {}, "memory", "fail", "2063897 MiB"),
        (Policy(memory_min_mb=1), {"/proc/meminfo": "x"}, "memory", "unknown", None),
        (Policy(hugepages=1024), {}, "hugepages", "fail", "0 of 2048 KiB"),
        (Policy(hugepages=0), {}, "hugepages", "ok", "0 of 2048 KiB"),
        (Policy(hugepages=8), {"/proc/meminfo": ""}, "hugepages", "fail", None),
        (Policy(swap="off"), {}, "swap", "ok", "off"),
        (Policy(swap="off"), {"/proc/meminfo": "SwapTotal: 8388604 kB"}, "swap", "fail",
         "8191 MiB"),
        (Policy(swap="off"), {"/proc/meminfo": ""}, "swap", "unknown", None),
        (Policy(), {"/proc/sys/fs/file-nr": "91\t0\t100"}, "file_handles", "warn", "91 of 100"),
        (Policy(), {"/proc/sys/fs/file-nr": "90\t0\t100"}, "file_handles", "ok", "90 of 100"),
        (Policy(), {"/proc/sys/fs/file-nr": ""}, "file_handles", "unknown", None),
        (Policy(), {"/proc/sys/kernel/threads-max": "2600"}, "pids", "fail", "2594 of 2600"),
    ],
)  # fmt: skip
def test_what_the_policy_names(
    policy: Policy, files: dict[str, str], check: str, status: str, actual: str | None
) -> None:
    result = judged(node(files, policy=policy), policy)[check]
    assert result.status == status
    assert actual in (None, result.actual)
    assert status in ("ok", "unknown") or result.fix or "no hugetlbfs" in result.actual


SYSCTL = "file=/etc/sysctl.d/9.conf\n/etc/sysctl.d/9.conf:3:kernel.numa_balancing = {}\n"


@pytest.mark.parametrize(
    ("pci", "policy", "live", "boot", "status"),
    [
        ("", Policy(), "1", "", "ok"),
        (PCI, Policy(), "1", "", "warn"),
        (PCI, Policy(), "0", "", "ok"),
        (PCI, Policy(), "0", "1", "warn"),
        (PCI, Policy(numa_balancing=1), "1", "1", "ok"),
        ("", Policy(numa_balancing=0), "1", "0", "fail"),
        ("device=0x744c", Policy(), "1", "", "ok"),
        (PCI, Policy(), "", "", "ok"),
        ("", Policy(numa_balancing=2), "", "", "fail"),
    ],
)
def test_numa_balancing_now_and_at_the_next_boot(
    pci: str, policy: Policy, live: str, boot: str, status: str
) -> None:
    files = {"/proc/sys/kernel/numa_balancing": live}
    seen = node(files, pci, sysctl=SYSCTL.format(boot) if boot else "", policy=policy)
    result = judged(seen, policy)["numa_balancing"]
    assert result.status == status
    if result.bad and boot:
        assert result.source == "/etc/sysctl.d/9.conf:3"


@pytest.mark.parametrize(
    ("localtime", "file", "zone"),
    [
        ("../usr/share/zoneinfo/Europe/Berlin", "", "Europe/Berlin"),
        ("/usr/share/zoneinfo/posix/UTC", "Europe/Berlin", "UTC"),
        ("", "America/New_York", "America/New_York"),
        ("", "", ""),
        ("Etc/UTC", "", "Etc/UTC"),
        ("/nowhere", "", ""),
    ],
)
def test_the_time_zone_is_where_localtime_leads(localtime: str, file: str, zone: str) -> None:
    text = f"localtime={localtime}\n/proc/meminfo:1:x\n/etc/timezone:1:{file}\n"
    outputs = {"host": Output(text, 0), "sysctl": Output("", 0)}
    assert host.parse(outputs, Policy()).timezone == zone


def test_peers_share_what_is_not_one_machines_own() -> None:
    facts = host.compared(node())
    assert facts["cmdline"] == "ro iommu=pt console=ttyS0"
    assert (facts["memory_gib"], facts["network_mounts"]) == (2016, "/home")
    assert facts["glibc"] == "2.35-0ubuntu3.8"
    assert "gdb" not in facts
    empty = dict.fromkeys(FILES, "") | {"/proc/meminfo": "x"}
    assert "kernel" not in host.compared(node(empty, packages="", mounts="", slow_rc=None))


def test_what_is_learnt_fits_the_node() -> None:
    seen = node()
    data = host.learned(seen)
    assert data["mounts"] == ["/home"]
    assert data["memory_min_mb"] == 2015 * 1024
    policy = Policy(**check_settings(data, "learned"))
    assert wrong(seen, policy) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nothing of /proc"),
        ("\x1b[31m" * 999, "nothing"),
        ("/proc/self/mounts:1:x", "nothing"),
    ],
)
def test_a_node_that_shows_nothing_is_unknown(text: str, reason: str) -> None:
    outputs = {"host": Output(text, 0), "host_slow": Output("", 0), "sysctl": Output("", 0)}
    with pytest.raises(ProbeError, match=reason):
        host.parse(outputs, Policy())


def test_files_that_make_no_sense_cost_only_what_they_say() -> None:
    evil = "$(reboot)\x1b[2J\udcff [x] 9" + "9" * 5000
    seen = node(dict.fromkeys(FILES, evil), evil, policy=Policy(swap="off"))
    assert (seen.cpus, seen.memory_total_mb, seen.pids_max, seen.load) == (None,) * 4
    assert {"memory", "file_handles", "pids", "swap"} <= wrong(seen, Policy(swap="off")).keys()
    host.compared(seen)
    host.learned(seen)
