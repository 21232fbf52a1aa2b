"""A field that cannot be read is never healthy: each field by a wrong value by each error word.

The looks are recorded ones of healthy nodes. A row names a field, a wrong value of it, and the
check that says so: an expert's verdict. In place of the same field each word that the kernel or a
tool has for "I cannot tell" may make the check anything but ok and na. The words of the GPU tools
are judged with those tools' recordings, in tests/unit/subjects/test_gpus*.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeready.policy.policy import make_policy
from nodeready.subjects import snapshot
from nodeready.subjects.base import Output, Probe
from tests.builders.hostile import RECORDED, encoded, recorded
from tests.unit.fuzz.alone import DO

#: The policy with which the recorded nodes were deployed.
POLICY = make_policy({"limit_memlock": 4096, "limit_nofile": 16384})
PROBES = {probe.subject: probe for probe in snapshot.probes()}
GOOD = ("ok", "na")

#: What stands in place of a value that could not be read: errno(3) in the words of libc, sysfs's
#: and vendors' own words, what scripts make of nothing.
WORDS = (
    "", "Invalid argument", "Input/output error", "Permission denied", "No such device",
    "Operation not supported", "N/A", "<unknown>", "unknown", "Unknown Error", "ERR!",
    "[Not Supported]", "(null)", "null", "None", "nan", "?", "\x00", "\udcff",
)  # fmt: skip


class Field(NamedTuple):
    """pattern: a regular expression of the section's text, whose first group is the value."""

    subject: str
    section: str
    pattern: str
    wrong: str
    check: str
    status: str = "fail"


_BOND, _PORT = "/sys/class/net/bond0", "/sys/class/net/ens1f0np0"
_IB = "/sys/class/infiniband/mlx5_3"
_LIMITS = "/etc/security/limits.d/zz-nodeready.conf"

#: Sources: the tables of tests/unit/subjects/test_{nics,rdma,host}_verdicts.py, the subjects' own.
FIELDS = (
    # net/core/net-sysfs.c, drivers/net/bonding/bond_sysfs*.c
    Field("nics", "nics", f"{_BOND}/carrier:(.*)", "0", "nics.link"),
    Field("nics", "nics", f"{_BOND}/mtu:(.*)", "1500", "nics.mtu"),
    Field("nics", "nics", f"{_PORT}/carrier:(.*)", "0", "nics.link"),
    Field("nics", "nics", f"{_PORT}/mtu:(.*)", "1500", "nics.mtu"),
    Field("nics", "nics", f"{_PORT}/speed:(.*)", "10000", "nics.speed"),
    Field("nics", "nics", f"{_PORT}/duplex:(.*)", "half", "nics.duplex"),
    Field("nics", "nics", f"{_PORT}/bonding_slave/mii_status:(.*)", "down", "nics.bond"),
    Field("nics", "nics", f"{_BOND}/bonding/slaves:(.*)", "eth9 gone", "nics.bond", "unknown"),
    Field("nics", "nics", "/sys/class/net/eth0/carrier:(.*)", "0", "nics.link"),
    # drivers/infiniband/core/sysfs.c
    Field("rdma", "rdma", f"{_IB}/ports/1/state:(.*)", "1: DOWN", "rdma.state"),
    Field("rdma", "rdma", f"{_IB}/ports/1/state:4: (.*)", "INIT", "rdma.state"),
    Field("rdma", "rdma", f"{_IB}/ports/1/phys_state:(.*)", "2: Polling", "rdma.state"),
    Field("rdma", "rdma", f"{_IB}/ports/1/phys_state:5: (.*)", "Polling", "rdma.state"),
    Field("rdma", "rdma", f"{_IB}/ports/1/rate:(.*)", "200 Gb/sec (2X NDR)", "rdma.rate"),
    Field("rdma", "rdma", f"{_IB}/ports/1/rate:(400)", "200", "rdma.rate"),
    Field("rdma", "rdma", f"{_IB}/ports/1/link_layer:(.*)", "Ethernet", "rdma.gids"),
    # drivers/pci/pci-sysfs.c
    Field("rdma", "rdma", f"{_IB}/device/current_link_width:(.*)", "8", "rdma.pcie"),
    Field("rdma", "rdma", f"{_IB}/device/current_link_speed:(.*)", "16.0 GT/s PCIe", "rdma.pcie"),
    Field("rdma", "rdma", f"{_IB}/device/current_link_speed:(.*) GT", "8.0", "rdma.pcie"),
    Field("rdma", "rdma", f"{_IB}/device/max_link_width:(.*)", "32", "rdma.pcie"),
    Field("rdma", "rdma", f"{_IB}/device/max_link_speed:(.*)", "63", "rdma.pcie", "unknown"),
    Field("rdma", "rdma", f"{_IB}/fw_ver:(.*)", "28.39.1002", "rdma.firmware", "warn"),
    # proc(5), statfs(2)
    Field("host", "host", "/kernel/pid_max:1:(.*)", "10", "host.pids"),
    Field("host", "host", "/kernel/threads-max:1:(.*)", "10", "host.pids"),
    Field("host", "host", r"/proc/loadavg:1:\S+ \S+ \S+ \d+/(\d+)", "32767", "host.pids"),
    Field("host", "host", r"/fs/file-nr:1:(\d+)", "2466165", "host.file_handles"),
    Field("host", "host", r"/fs/file-nr:1:\d+\t0\t(\d+)", "1", "host.file_handles"),
    Field("host", "host", r"/proc/self/mounts:\d+:tmpfs (/dev/shm) ", "/x", "host.shm"),
    Field("host", "host", r"/proc/self/mounts:\d+:tmpfs /dev/shm (tmpfs) ", "ext4", "host.shm"),
    Field("host", "host_slow", r"\nzombies=(.*)", "99", "host.zombies", "warn"),
    Field("host", "host_slow", r"\nunseen=(.*)", "9", "host.stuck", "warn"),
    Field("host", "host_slow", r"\nprocesses=(end)", "2", "host.stuck", "unknown"),
    Field("host", "host_slow", r"\nmounts=(begin)", "x", "host.space", "unknown"),
    Field("host", "host_slow", r"nr_fs=(\d+)", "x", "host.dead_mounts"),
    Field("host", "host_slow", r"nr_fs=(?:\d+ ){3}(\d+)", "0", "host.space"),
    Field("host", "host_slow", r"nr_fs=(?:\d+ ){5}(\d+)", "0", "host.inodes"),
    Field("host", "host_slow", r"clock=timesyncd\n(.*)", "waiting", "host.clock"),
    # ptrace, core_dumps, limits, pdsh: what the next boot and the next login read
    Field("ptrace", "ptrace", "live=(.*)", "1", "ptrace.scope"),
    Field("ptrace", "sysctl", "ptrace_scope = (.*)", "1", "ptrace.scope"),
    Field("core_dumps", "core_dumps", "live=(.*)", "core", "core_dumps.pattern"),
    Field("core_dumps", "core_dumps", r"way=(\S+) \d+ /var/crash", "755", "core_dumps.directory"),
    Field("core_dumps", "core_dumps", "d /var/crash (1777)", "0755", "core_dumps.retention"),
    Field("core_dumps", "core_dumps", "d /var/crash .* (14d)", "1d", "core_dumps.retention"),
    Field("core_dumps", "sysctl", "core_pattern = (.*)", "core", "core_dumps.pattern"),
    Field("limits", "limits", f"{_LIMITS}:4:. - core (.*)", "0", "limits.core"),
    Field("limits", "limits", f"{_LIMITS}:5:. - memlock (.*)", "64", "limits.memlock"),
    Field("limits", "limits", f"{_LIMITS}:6:. - nofile (.*)", "1024", "limits.nofile"),
    Field("limits", "limits", f"{_LIMITS}:7:root - core (.*)", "0", "limits.core"),
    Field("limits", "limits", "/proc/sys/fs/nr_open:1:(.*)", "1024", "limits.nofile"),
    Field("pdsh", "pdsh", "file /etc/pdsh/rcmd_default\n(.*)", "rsh", "pdsh.rcmd"),
    Field("pdsh", "pdsh", "have=(pdsh)", "rsh", "pdsh.installed"),
    Field("ports", "ports", "ephemeral=(.*)", "20000 60999", "ports.ephemeral"),
    Field("ports", "ports", "privileged=(.*)", "30000", "ports.privileged"),
)  # fmt: skip


def sections(subject: str) -> dict[str, str]:
    one, other = recorded("h100"), recorded("mi300x")
    return {s.name: one.get(s.name) or other.get(s.name, "") for s in PROBES[subject].sections}


def verdicts(probe: Probe, texts: dict[str, str]) -> dict[str, str]:
    outputs = {n: Output(encoded(text), 0, nonce=RECORDED) for n, text in texts.items()}
    seen = snapshot.Snapshot({probe.subject: snapshot._observe(probe, outputs, POLICY)})
    return {result.check: result.status for result in snapshot.judge(seen, POLICY)}


def with_value(field: Field, value: str, texts: dict[str, str]) -> dict[str, str]:
    text = texts[field.section]
    match = re.search(field.pattern, text)
    assert match, field
    return {**texts, field.section: text[: match.start(1)] + value + text[match.end(1) :]}


def named(field: Field) -> str:
    return f"{field.check} {field.pattern[-40:]}"


@pytest.mark.parametrize("field", FIELDS, ids=named)
def test_a_field_that_cannot_be_read_is_not_healthy(field):
    probe, texts = PROBES[field.subject], sections(field.subject)
    assert verdicts(probe, texts)[field.check] in GOOD
    assert verdicts(probe, with_value(field, field.wrong, texts))[field.check] == field.status
    healthy = []
    for word in WORDS:
        found = verdicts(probe, with_value(field, word, texts))
        # A subject that cannot be read at all has one result, "observed".
        if found.get(field.check, "unknown") in GOOD:
            healthy.append(word)
    assert healthy == []


def values(text: str) -> Iterator[tuple[int, int]]:
    """Where the values are that a file gave: behind its path, and its line."""
    for match in re.finditer(r"^/[^:\n]*(?::\d+)?:(.*)$", text, re.M):
        yield match.span(1)


@pytest.mark.parametrize("subject", ["nics", "rdma", "host"])
def test_an_unreadable_field_beside_a_fault_hides_nothing(subject, effort):
    """The wrong field, and an error word in any other value of the same look.

    Another check of the subject may say so instead: a port whose state cannot be read has no rate.
    """
    probe, texts = PROBES[subject], sections(subject)
    mine = [field for field in FIELDS if field.subject == subject and field.status == "fail"]
    places = [(name, *span) for name, text in texts.items() for span in values(text)]

    @given(st.sampled_from(mine), st.sampled_from(places), st.sampled_from(WORDS))
    def each(field: Field, place: tuple[str, int, int], word: str) -> None:
        name, start, end = place
        faulty = with_value(field, "\x01", texts)
        if name == field.section and start <= faulty[name].find("\x01") <= end:
            return
        text = texts[name]
        spoilt = with_value(field, field.wrong, {**texts, name: text[:start] + word + text[end:]})
        found = verdicts(probe, spoilt)
        assert not {*found.values()} <= {*GOOD}, (field, text[start:end])

    DO[effort](each, 600)


def test_every_subject_of_the_audit_has_a_row_or_a_reason():
    """A new subject is asked for the fields on which its verdicts rest."""
    elsewhere = {
        "gpus": "tests/unit/subjects/test_gpus*.py: words of nvidia-smi, rocm-smi and amd-smi",
        "iommu": "boot loader and command line are texts of people: any is valid",
        "ssh_client": "the same: ssh_config(5) and known_hosts",
        "debug_tools": "modes and sums of files: tests/unit/subjects/test_debug_tools.py",
        "gate": "our own files, compared byte by byte",
        "proof": "programs of ours answer: test_answers.py",
        "ours": "files of ours, which are not judged",
    }
    rows = {field.subject for field in FIELDS}
    assert rows | elsewhere.keys() == PROBES.keys() | {"proof"}
    assert not rows & elsewhere.keys()
