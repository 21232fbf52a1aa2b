"""The changes of a node between two looks, by rows; the order of a fleet's changes."""

from dataclasses import replace

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.runs.memory.changes import Change, changes, differences
from nodeready.runs.memory.diff import NodeChanges, Side, compare
from nodeready.runs.memory.look import NodeLook
from nodeready.runs.memory.sections import changed_words, policy_words


def interface(name, mac, slot, **values):
    facts = {"name": name, "mac": mac, "pci_address": slot, "kind": "ethernet", "mtu": 9000}
    return {f"nics.interfaces[{name}].{key}": value for key, value in (facts | values).items()}


def gpu(slot, serial, vbios="96.00.74", **values):
    facts = {"pci_address": slot, "serial": serial, "vbios": vbios, "model": "H100"} | values
    on_bus = {f"gpus.pci[{slot}].address": slot, f"gpus.pci[{slot}].device": "2330"}
    return on_bus | {f"gpus.nvidia[{slot}].{key}": value for key, value in facts.items()}


ETH0 = interface("eth0", "aa", "0000:01:00.0")
BOND = {"nics.bonds[bond0].slaves[eth0].mii": "up", "nics.default_interface": "eth0, eth0.100"}
BASE = {
    "host.memory_total_mb": 2000000,
    "gpus.driver": "570.1",
    **ETH0,
    **BOND,
    **gpu("0000:1a:00.0", "S1"),
    **gpu("0000:3b:00.0", "S2"),
}
COUNTERS = {"nics.eth0.rx_errors": 4, "nics.eth0.carrier_changes": 2}


def look(facts=BASE, *, boot="b1", error="", counters=COUNTERS, node="gpu001", **results):
    outcomes = {
        check.replace("__", "."): Result(check.replace("__", "."), status)
        for check, status in results.items()
    }
    return NodeLook(node, 0.0, boot, 1, error, facts, counters, outcomes)


def without(prefix, facts=BASE):
    return {key: value for key, value in facts.items() if not key.startswith(prefix)}


RENAMED = {
    **without("nics."),
    **interface("ens1", "aa", "0000:01:00.0"),
    "nics.bonds[bond0].slaves[ens1].mii": "up",
    "nics.default_interface": "ens1, ens1.100",
}
SLAVES = {**interface("eth0", "aa", "01:00.0"), **interface("eth1", "aa", "02:00.0")}
SWAPPED = {**interface("eth1", "aa", "01:00.0"), **interface("eth0", "aa", "02:00.0")}
DOCKER = interface("docker0", "d1", "", kind="bridge")

ROWS = {
    "nothing": (look(), look(), []),
    "a version": (
        look(),
        look(BASE | {"gpus.driver": "580.2"}),
        [Change("version", "gpus.driver", "570.1", "580.2")],
    ),
    "a little memory": (look(), look(BASE | {"host.memory_total_mb": 1999000}), []),
    "a memory module": (
        look(),
        look(BASE | {"host.memory_total_mb": 1937500}),
        [Change("hardware", "host.memory_total_mb", 2000000, 1937500)],
    ),
    "a setting, a result": (
        look(nics__mtu="ok"),
        look(BASE | {"nics.interfaces[eth0].mtu": 1500}, nics__mtu="fail"),
        [
            Change("result", "nics.mtu", "ok", "fail"),
            Change("setting", "nics.interfaces[eth0].mtu", 9000, 1500),
        ],
    ),
    "a check that applies now": (look(nics__errors="na"), look(nics__errors="ok"), []),
    "a check that was not made before": (look(), look(nics__mtu="fail"), []),
    "a replaced GPU": (
        look(),
        look(BASE | gpu("0000:1a:00.0", "S9", "96.00.99")),
        [
            Change(
                "hardware",
                "gpus.nvidia[0000:1a:00.0]",
                "S1",
                "S9",
                "replaced; vbios 96.00.74 -> 96.00.99",
                "GPU",
            )
        ],
    ),
    "a GPU that is gone from the bus": (
        look(),
        look(without("gpus.pci[0000:3b", without("gpus.nvidia[0000:3b"))),
        [Change("hardware", "gpus.nvidia[0000:3b:00.0]", "S2", None, "gone", "GPU")],
    ),
    "the number of a GPU": (
        look(BASE | {"gpus.nvidia[0000:3b:00.0].index": 1}),
        look(BASE | {"gpus.nvidia[0000:3b:00.0].index": 0}),
        [],
    ),
    "a GPU that only the tool lost": (
        look(),
        look(without("gpus.nvidia[0000:3b")),
        [Change("hardware", "gpus.nvidia[0000:3b:00.0]", "S2", None, "gone", "GPU")],
    ),
    "a subject that was not observed": (look(), look(without("gpus.")), []),
    "a renamed interface": (
        look(),
        look(RENAMED, counters={"nics.ens1.rx_errors": 5, "nics.ens1.carrier_changes": 2}),
        [
            Change("setting", "nics.interfaces[ens1]", "eth0", "ens1", "renamed"),
            Change("counter", "nics.ens1.rx_errors", 4, 5, "1 more"),
        ],
    ),
    "slaves with one address swap their names": (
        look(SLAVES),
        look(SWAPPED),
        [
            Change("setting", "nics.interfaces[eth1]", "eth0", "eth1", "renamed"),
            Change("setting", "nics.interfaces[eth0]", "eth1", "eth0", "renamed"),
        ],
    ),
    "a replaced adapter": (
        look(),
        look(BASE | {"nics.interfaces[eth0].mac": "bb"}),
        [Change("hardware", "nics.interfaces[eth0]", "aa", "bb", "replaced", "interface")],
    ),
    "a new interface without a part": (
        look(),
        look(BASE | DOCKER),
        [Change("setting", "nics.interfaces[docker0]", "absent", "present")],
    ),
    "a bridge draws a new address": (
        look(BASE | DOCKER),
        look(BASE | DOCKER | {"nics.interfaces[docker0].mac": "d2"}),
        [],
    ),
    "a package": (
        look(BASE | {"host.versions[gdb]": "13.1"}),
        look(BASE | {"host.versions[gdb]": "13.2", "host.versions[hwloc]": "2"}),
        [
            Change("version", "host.versions[gdb]", "13.1", "13.2"),
            Change("version", "host.versions[hwloc]", None, "2"),
        ],
    ),
    "a new kernel": (
        look(BASE | {"host.kernel_release": "6.1", "host.cmdline": "BOOT_IMAGE=/vm-6.1 ro"}),
        look(BASE | {"host.kernel_release": "6.2", "host.cmdline": "BOOT_IMAGE=/vm-6.2 ro"}),
        [Change("version", "host.kernel_release", "6.1", "6.2")],
    ),
    "a reboot": (
        look(),
        look(boot="b2", counters={"nics.eth0.rx_errors": 0, "nics.eth0.carrier_changes": 2}),
        [Change("reboot", "host.boot_id", None, None, "rebooted")],
    ),
    "errors since a reboot": (
        look(),
        look(boot="b2", counters={"nics.eth0.rx_errors": 3, "nics.eth0.carrier_changes": 9}),
        [
            Change("counter", "nics.eth0.rx_errors", 4, 3, "3 since the boot"),
            Change("counter", "nics.eth0.carrier_changes", 2, 9, "9 since the boot"),
            Change("reboot", "host.boot_id", None, None, "rebooted"),
        ],
    ),
    "a counter that wrapped": (
        look(),
        look(counters={"nics.eth0.rx_errors": 1}),
        [
            Change(
                "counter",
                "nics.eth0.rx_errors",
                4,
                1,
                "smaller in the same boot: it wrapped or was reset",
            )
        ],
    ),
    "an Xid that was not there before": (
        look(counters={"gpus.0000:1a:00.0.ecc_correctable_volatile": 0}),
        look(counters={"gpus.xid 79 0000:1a:00.0.count": 2}),
        [Change("counter", "gpus.xid 79 0000:1a:00.0.count", 0, 2, "2 more")],
    ),
    "GPUs that were not observed before": (
        look(),
        look(counters={"gpus.xid 79 0000:1a:00.0.count": 2}),
        [],
    ),
    "no answer": (
        look(),
        look({}, error="connection refused"),
        [Change("result", "answer", "answered", "no answer", "connection refused")],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_changes(row):
    before, after, expected = ROWS[row]
    assert list(changes(before, after)) == expected


def of_policy(words, facts=BASE, **results):
    """A look by a policy; words: as `sections.policy_words` makes them, for every subject."""
    return replace(look(facts, **results), policies=dict.fromkeys(("gpus", "host", "nics"), words))


OLD, NEW = "gpu_count=aa asked=11", "gpu_count=bb asked=11"
MOUNT = {"host.mounts[/scratch].path": "/scratch", "host.mounts[/scratch].device": "x"}
POLICY_ROWS = {
    "a result by another setting": (
        of_policy(OLD, gpus__count="ok", gpus__ecc="ok"),
        of_policy(NEW, gpus__count="fail", gpus__ecc="fail"),
        [
            Change("result", "gpus.ecc", "ok", "fail"),
            Change("policy", "gpu_count", None, None, "1 result follows"),
        ],
    ),
    "a setting that is the default again": (
        of_policy("gpu_count=aa gpu_ecc=cc", gpus__count="fail", gpus__driver="ok"),
        of_policy("gpu_ecc=cc", gpus__count="na", gpus__driver="ok"),
        [Change("policy", "gpu_count", None, None, "1 result follows")],
    ),
    "a waiver": (
        of_policy("", gpus__ecc="fail"),
        of_policy("waivers=aa", gpus__ecc="waived"),
        [Change("policy", "waivers", None, None, "1 result follows")],
    ),
    "no result follows": (of_policy(OLD, gpus__ecc="ok"), of_policy(NEW, gpus__ecc="ok"), []),
    "other questions": (of_policy("asked=11"), of_policy("asked=22", BASE | MOUNT), []),
    "the same questions": (
        of_policy(OLD),
        of_policy(NEW, BASE | MOUNT),
        [Change("setting", "host.mounts[/scratch]", "absent", "present")],
    ),
    "a value, and a part, whatever was asked": (
        of_policy("asked=11", without("gpus.pci[0000:3b", without("gpus.nvidia[0000:3b"))),
        of_policy("asked=22", BASE | {"gpus.driver": "580"}),
        [
            Change("hardware", "gpus.nvidia[0000:3b:00.0]", None, "S2", "new", "GPU"),
            Change("version", "gpus.driver", "570.1", "580"),
        ],
    ),
    "a memory without policies": (look(gpus__count="ok"), of_policy(NEW, gpus__count="fail"),
        [Change("result", "gpus.count", "ok", "fail")]),
}  # fmt: skip


@pytest.mark.parametrize("row", POLICY_ROWS)
def test_another_policy_is_no_change_of_the_node(row):
    before, after, expected = POLICY_ROWS[row]
    assert list(changes(before, after)) == expected


def test_a_policy_has_words_for_what_it_asks_and_decides():
    new = Policy(packages=("gdb", "htop"), gpu_count=8)
    differing = {
        subject: changed_words(
            policy_words(subject, Policy())[subject], policy_words(subject, new)[subject]
        )
        for subject in ("gpus", "nics", "pdsh", "debug_tools")
    }
    assert differing == {
        "gpus": {"gpu_count"},
        "nics": set(),
        "pdsh": {"packages", "asked"},
        "debug_tools": {"packages", "asked"},
    }


def test_a_peer_differs_by_no_serial_number():
    own = {"host.hostname": "gpu002", "host.fstab[/].device": "UUID=1234-ABCD"}
    peer = {"host.hostname": "gpu001", "host.fstab[/].device": "UUID=9876-ABCD"}
    node = look(
        {**own, **BASE, **gpu("0000:1a:00.0", "T1"), "nics.interfaces[eth0].mtu": 1500},
        boot="b7",
        counters={"nics.eth0.rx_errors": 99},
    )
    assert differences(look(BASE | peer), node) == (
        Change("setting", "nics.interfaces[eth0].mtu", 9000, 1500),
    )


# --- A fleet.


def fleet(*pairs, **values):
    every = [NodeChanges.of(before, after, changes(before, after)) for before, after in pairs]
    before, after = Side("monday.json", "2030-01-02T03:04:05Z"), Side("today.json", "")
    values = {"only_before": (), "only_after": (), **values}
    return compare(every, before, after, **values)


def on(node, facts=BASE, status="ok", **settings):
    return replace(look(facts, gpus__driver=status, **settings), node=node)


def document():
    """64 nodes; three fail since their MTU was changed; every second one has a new kernel.

    Beside them a replaced GPU, a reboot and a counter.
    """
    updated, other_mtu = {"host.kernel_release": "6.2"}, {"nics.interfaces[eth0].mtu": 1500}
    pairs = []
    for number in range(64):
        node, old = f"gpu{number:03}", BASE | {"host.kernel_release": "6.1"}
        new = old | updated if number % 2 else old
        is_failing = number in (5, 17, 40)
        if is_failing:
            new = new | other_mtu
        if number == 8:
            new = new | gpu("0000:1a:00.0", "S9", "96.00.99", model="<b>\x1b[31mH100")
        boot, errors = ("b2", 3) if number == 9 else ("b1", 4 + (number > 60))
        after = on(node, new, "fail" if is_failing else "ok", boot=boot)
        counters = {"nics.eth0.rx_errors": errors}
        pairs.append((on(node, old), replace(after, counters=counters)))
    return fleet(*pairs, only_before=("gpu099",))


def test_the_cause_of_three_failing_nodes_of_64_comes_first():
    assert document().failing == ("gpu005", "gpu017", "gpu040")
    assert [
        (change.kind, change.key, change.suspect, change.failing, change.healthy)
        for change in document().changes
    ] == [
        ("setting", "nics.interfaces[eth0].mtu", True, 3, 0),
        ("result", "gpus.driver", False, 3, 0),
        ("hardware", "gpus.nvidia[0000:1a:00.0]", False, 0, 1),
        ("version", "host.kernel_release", False, 2, 30),
        ("counter", "nics.eth0.rx_errors", False, 0, 3),
        ("counter", "nics.eth0.rx_errors", False, 0, 1),
        ("reboot", "host.boot_id", False, 0, 1),
    ]


def test_a_gpu_that_moves_between_nodes_is_one_change():
    empty = without("gpus.pci[0000:3b", without("gpus.nvidia[0000:3b"))
    other = BASE | gpu("0000:1a:00.0", "T1") | gpu("0000:3b:00.0", "T2")
    folded = fleet(
        (on("gpu001"), on("gpu001", empty)),
        (on("gpu002", other), on("gpu002", other | gpu("0000:3b:00.0", "S2"))),
        (on("gpu003", empty), on("gpu003", empty)),
    ).changes
    assert [(c.before, c.after, c.note, c.nodes) for c in folded] == [
        (
            "gpu001 gpus.nvidia[0000:3b:00.0]",
            "gpu002 gpus.nvidia[0000:3b:00.0]",
            "S2 moved",
            ("gpu001", "gpu002"),
        ),
        ("T2", None, "gone", ("gpu002",)),
    ]


def test_equal_elements_and_amounts_are_one_change():
    slots = ("0000:1a:00.0", "0000:3b:00.0")
    new = {f"gpus.nvidia[{slot}].vbios": "96.00.99" for slot in slots}
    pairs = [
        (on(f"n{errors}"), on(f"n{errors}", BASE | new, counters={"nics.eth0.rx_errors": errors}))
        for errors in (9, 14)
    ]
    folded = fleet(*pairs).changes
    assert [(c.key, c.elements, c.before, c.after, c.note, c.nodes) for c in folded] == [
        ("gpus.nvidia[*].vbios", slots, "96.00.74", "96.00.99", "", ("n9", "n14")),
        ("nics.eth0.rx_errors", (), None, None, "5 to 10 more", ("n9", "n14")),
    ]
