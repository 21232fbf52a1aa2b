"""What a node shows, what is judged, and what would be done: without a node."""

from __future__ import annotations

import dataclasses

import pytest

from nodeready.deploy.actions import PlanError, RemoveFile, Run, WriteFile
from nodeready.operations.iommu import args as step
from nodeready.operations.iommu import grub_piece
from nodeready.policy import Policy
from nodeready.subjects.base import Line, Output, ProbeError
from nodeready.subjects.iommu import checks
from nodeready.subjects.iommu import facts as probe
from nodeready.subjects.iommu.facts import Entry, Iommu
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import by_id, judge_all
from tests.builders.sections import exact

_GRUB = """GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=soft"
live=not an answer of ours
have=grubby
"""
_BESIDE_GRUB = """device=0x74a1
device=0x74a1
cpus=0-191
live=BOOT_IMAGE=/vmlinuz-6.8 root=UUID=4a3c ro quiet
cpu=AuthenticAMD
dropin=/etc/default/grub.d/50-cloud.cfg
have=update-grub
have=grub-mkconfig
/etc/os-release:1:NAME="Ubuntu"
/etc/os-release:2:ID=ubuntu
/etc/os-release:3:ID_LIKE=debian
/etc/default/grub:10:GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=soft"
/etc/default/grub:11:GRUB_CMDLINE_LINUX=""
/etc/default/grub.d/50-cloud.cfg:4:GRUB_CMDLINE_LINUX_DEFAULT="console=ttyS0 iommu=soft"
/boot/grub/grub.cfg:139:\tlinux\t/vmlinuz-6.8 root=UUID=4a3c ro  console=ttyS0 iommu=soft
/boot/grub/grub.cfg:158:\t\tlinux\t/vmlinuz-6.8 root=UUID=4a3c ro recovery nomodeset
"""
UBUNTU = _BESIDE_GRUB + exact("/etc/default/grub", _GRUB, "n")
ROCKY = """device=0x75a3
cpus=0-255
live=BOOT_IMAGE=(hd0,gpt2)/vmlinuz-5.14 root=/dev/mapper/r ro
cpu=GenuineIntel
have=grubby
have=grub2-mkconfig
/etc/os-release:1:ID="rocky"
/etc/os-release:2:ID_LIKE="rhel centos fedora"
/boot/grub2/grub.cfg:80:set kernelopts="root=/dev/mapper/r ro "
/boot/loader/entries/1-5.14.0-503.conf:5:options $kernelopts $tuned_params
/boot/loader/entries/1-0-rescue.conf:5:options root=/dev/mapper/r ro
/boot/grub2/grubenv:2:kernelopts=root=/dev/mapper/r ro amd_iommu=off crashkernel=1G
"""


def parse(text: str, policy: Policy | None = None) -> Iommu:
    return probe.parse({"iommu": Output(text, 0, nonce="n")}, policy or Policy())


def result(seen: Iommu, check: str, **policy: object):
    return by_id(checks, seen, Policy(**policy))[check]


def plan(seen: Iommu, files: dict[str, bytes] | None = None, **policy: object):
    change = step.plan(Snapshot({"iommu": seen}, files or {}), Policy(**policy))
    return change.actions if change else ()


def test_ubuntu_with_a_contradicting_token_in_a_later_file():
    seen = parse(UBUNTU)
    assert (seen.family, seen.cpus, seen.tools) == (
        "debian",
        192,
        ("update-grub", "grub-mkconfig"),
    )
    assert seen.live[-1] == "quiet"
    assert seen.default_grub is not None
    assert b"live=not an answer" in seen.default_grub
    judged = result(seen, "iommu.args")
    assert judged.fixable
    assert judged.expected == "iommu=pt"
    assert "iommu=soft contradicts" in judged.actual
    assert judged.source == "/etc/default/grub.d/50-cloud.cfg:4"
    write, run = plan(seen)
    assert isinstance(write, WriteFile)
    assert write.path == "/etc/default/grub.d/zz-nodeready.cfg"
    assert write.content == grub_piece(("iommu=pt",))
    assert run == Run(("update-grub",))


def test_rocky_with_variables_in_the_boot_loader_entries_on_an_intel_host():
    seen = parse(ROCKY)
    assert [entry.tokens[2:] for entry in seen.boot] == [("amd_iommu=off", "crashkernel=1G")]
    assert result(seen, "iommu.args").expected == "intel_iommu=on iommu=pt"
    assert plan(seen) == (
        Run(("grubby", "--update-kernel=ALL", "--args=intel_iommu=on iommu=pt")),
    )
    off = result(seen, "iommu.off")
    assert (off.status, off.actual) == ("warn", "amd_iommu=off")
    assert off.source == "/boot/loader/entries/1-5.14.0-503.conf:5"


def test_a_node_without_amd_hardware_prints_nothing_and_everything_is_na():
    assert {r.status for r in judge_all(checks, parse(""), Policy())} == {"na"}


@pytest.mark.parametrize(
    ("devices", "cpus", "policy", "wanted"),
    [
        (("0x74a1",), 192, None, ("iommu=pt",)),
        (("0x74a0",), 8, None, ("iommu=pt",)),
        (("0x75a3",), 8, None, ("iommu=pt",)),
        (("0x740c",), 256, None, ("iommu=pt",)),
        (("0x738c",), 255, None, ("iommu=pt",)),
        (("0x7408",), 254, None, "MI250X with 254 logical CPUs: needed from 256 on"),
        (("0x74b5",), 20, None, "virtual functions only: the IOMMU is the host's"),
        (("0x74a1", "0x74b5"), 20, None, ("iommu=pt",)),
        (("0x744c",), 256, None, "no AMD Instinct in this node"),
        ((), 256, None, "no AMD Instinct in this node"),
        (("0x74a1",), 192, (), "the policy manages none"),
        ((), 4, ("iommu=nopt",), ("iommu=nopt",)),
    ],
)
def test_what_is_wanted_for_the_hardware(devices, cpus, policy, wanted):
    seen = Iommu(devices=devices, cpus=cpus)
    assert checks.wanted(seen, Policy(iommu_args=policy)) == wanted


def good(**changes: object) -> Iommu:
    """An MI300X node on Debian whose next boot is right by hand-written configuration."""
    return dataclasses.replace(
        Iommu(
            devices=("0x74a1",),
            cpus=192,
            live=("ro", "iommu=pt"),
            boot=(Entry("/boot/grub/grub.cfg:5", ("ro", "iommu=pt")),),
            config=(Line("/etc/default/grub", 6, 'GRUB_CMDLINE_LINUX="iommu=pt"'),),
            family="debian",
            tools=("update-grub",),
        ),
        **changes,
    )


APPEND = 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=soft"'
SOFT = Line("/etc/default/grub.d/99-x.cfg", 1, APPEND)
SHELL = Line("/etc/default/grub.d/99-x.cfg", 1, "GRUB_CMDLINE_LINUX=$(cat /etc/args)")
OURS = Line("/etc/default/grub.d/zz-nodeready.cfg", 4, "nodeready_args=iommu=pt")
LAST = Line("/etc/default/grub.d/zz-nodeready.cfg", 40, "GRUB_CMDLINE_LINUX=$nodeready_kept")
WRONG = (Entry("/boot/grub/grub.cfg:5", ("ro",)),)


@pytest.mark.parametrize(
    ("seen", "args", "live", "actions"),
    [
        (good(), "ok", "ok", 0),
        (good(live=("ro",)), "ok", "warn", 0),
        (good(live=("ro",), boot=WRONG), "fail", "warn", 2),
        # Right today, wrong with the next kernel update.
        (good(config=(*good().config, SOFT)), "fail", "ok", 2),
        (good(config=(*good().config, SHELL)), "fail", "ok", 2),
        # Ours is read last: whatever stands before it.
        (good(config=(SOFT, OURS, LAST), ours=OURS), "ok", "ok", 0),
        # Something is read behind ours.
        (good(config=(OURS, LAST, SOFT), ours=OURS), "fail", "ok", 2),
        # Ours is there, but GRUB's own file was not made from it yet.
        (good(boot=WRONG, config=(OURS, LAST), ours=OURS), "fail", "ok", 2),
        # ... and was, in vain: nothing that we would do again.
        (good(boot=WRONG, config=(OURS, LAST), ours=OURS, generated=True), "fail", "ok", 0),
        # Another distribution, no boot loader, no tool: a person.
        (good(boot=WRONG, family="", live=()), "fail", "warn", 0),
        (good(boot=WRONG, tools=(), live=()), "fail", "warn", 0),
        (good(boot=(), live=()), "fail", "warn", 0),
        # Booted over the network with the right arguments.
        (good(boot=(), config=()), "ok", "ok", 0),
        (good(unreadable=("/boot/grub/grub.cfg",)), "unknown", "ok", 0),
    ],
)
def test_judged_and_planned(seen, args, live, actions):
    assert result(seen, "iommu.args").status == args
    assert result(seen, "iommu.live").status == live
    assert len(plan(seen)) == actions


def test_the_running_kernel_waits_for_a_reboot():
    judged = result(good(live=("ro", "iommu=soft")), "iommu.live")
    assert judged.actual.startswith("pending reboot: iommu=soft contradicts")
    assert (judged.fix, judged.owner) == ("reboot the node", "admin")


@pytest.mark.parametrize(
    ("seen", "policy", "actual", "source"),
    [
        (good(), None, "the IOMMU is not switched off", ""),
        (good(live=("amd_iommu=off",)), None, "pending reboot: amd_iommu=off", "/proc/cmdline"),
        (
            good(
                boot=(Entry("/boot/grub/grub.cfg:5", ("iommu=pt", "amd_iommu=off")),),
                config=(Line("/etc/default/grub", 9, 'GRUB_CMDLINE_LINUX="amd_iommu=off"'),),
            ),
            None,
            "amd_iommu=off",
            "/etc/default/grub:9",
        ),
        # What the policy itself asks for is no finding.
        (good(live=("amd_iommu=off",)), ("amd_iommu=off",), "the IOMMU is not switched off", ""),
    ],
)
def test_an_iommu_that_somebody_switched_off_is_reported_not_changed(seen, policy, actual, source):
    judged = result(seen, "iommu.off", iommu_args=policy)
    assert (judged.actual, judged.source) == (actual, source)
    assert not judged.fixable


def test_the_drop_in_sorts_behind_every_other_and_its_old_name_goes():
    later = Line("/etc/default/grub.d/zzz-x.cfg", 1, APPEND)
    seen = good(config=(OURS, LAST, later), ours=OURS)
    write, remove, _ = plan(seen, {OURS.path: b"old"})
    assert remove == RemoveFile(OURS.path, b"old")
    assert isinstance(write, WriteFile)
    assert write.path.rpartition("/")[2] > "zzz-x.cfg"
    assert "nodeready" in write.path


def test_suse_has_a_block_at_the_end_that_costs_no_other_byte():
    raw = b'GRUB_DEFAULT=saved\r\nGRUB_CMDLINE_LINUX="a iommu=soft \xff"'
    seen = good(
        boot=WRONG, family="suse", tools=("grub2-mkconfig",), default_grub=raw, config=(SOFT,)
    )
    write, run = plan(seen)
    assert isinstance(write, WriteFile)
    assert write.content.startswith(raw + b"\n# >>> nodeready")
    assert grub_piece(("iommu=pt",)) in write.content
    assert run == Run(("grub2-mkconfig", "-o", "/boot/grub2/grub.cfg"))


def test_grubby_removes_what_contradicts_in_any_entry():
    entries = (Entry("/a:1", ("iommu=soft",)), Entry("/b:1", ("iommu=pt", "iommu=off")))
    seen = good(boot=entries, family="redhat", tools=("grubby",))
    (run,) = plan(seen)
    assert run.argv[2:] == ("--remove-args=iommu=soft iommu=off", "--args=iommu=pt")


@pytest.mark.parametrize(
    "text",
    ["live=ro\ncpus=0-\n", "live=ro\ncpus=many\n", "live=ro\ncpus=0-99999999999\n"],
)
def test_a_list_of_cpus_that_makes_no_sense(text):
    with pytest.raises(ProbeError):
        parse("device=0x74a1\n" + text)


def test_hostile_values_stay_data():
    evil = '";reboot;\x1b[2J$(reboot)'
    words = f"x={evil} iommu={evil}"
    file = exact("/etc/default/grub", _GRUB.replace("iommu=soft", words), "n")
    seen = parse(_BESIDE_GRUB.replace("iommu=soft", words) + file)
    write, run = plan(seen)
    assert isinstance(write, WriteFile)
    assert evil.encode() not in write.content
    assert run == Run(("update-grub",))
    rocky = dataclasses.replace(parse(ROCKY), boot=(Entry("/a:1", (f"iommu={evil}",)),))
    with pytest.raises(PlanError, match="remove it by hand"):
        plan(rocky)
    plain = dataclasses.replace(rocky, boot=(Entry("/a:1", ("iommu=soft",)),))
    assert "--remove-args=iommu=soft" in plan(plain)[0].argv


def test_an_entry_of_somebodys_own_is_a_persons():
    own = Entry("/boot/grub/grub.cfg:90", ("ro",), "40_custom")
    judged = result(good(boot=(own,)), "iommu.args")
    assert (judged.status, judged.fixable) == ("fail", False)
    assert judged.fix == "look in /etc/grub.d for what writes /boot/grub/grub.cfg:90"
    generated = dataclasses.replace(own, script="10_linux")
    assert result(good(boot=(generated,)), "iommu.args").fixable


def test_grubs_tools_change_nothing_where_systemd_boot_boots():
    entry = Entry("/boot/loader/entries/abc.conf:4", ("ro",))
    judged = result(good(boot=(entry,)), "iommu.args")
    assert (judged.status, judged.fixable) == ("fail", False)
    assert "no supported boot loader" in judged.actual


def test_grubby_takes_contradictions_out_of_entries_that_do_not_boot():
    seen = good(
        boot=(Entry("/a:1", ("ro",)),), entries=(Entry("/b:1", ("iommu=soft",)),),
        family="redhat", tools=("grubby",),
    )  # fmt: skip
    (run,) = plan(seen)
    assert run.argv[2:] == ("--remove-args=iommu=soft", "--args=iommu=pt")


def test_what_another_spelling_sets_goes_too():
    assert b"iommu | iommu=* | iommu.passthrough=*" in grub_piece(("iommu=pt",))


@pytest.mark.parametrize(
    ("live", "status"),
    [("iommu=pt,off", "ok"), ("iommu=pt amd_iommu=off,fullflush", "warn"),
     ("iommu=pt intel_iommu=sm_on,off", "warn"), ("iommu=pt amd_iommu=fullflush", "ok")],
)  # fmt: skip
def test_a_word_of_a_list_that_switches_off(live, status):
    judged = result(good(live=tuple(live.split())), "iommu.off")
    # A word of an option that iommu.args sets is judged there.
    assert judged.status == status
