"""The changes of a node between two looks, by rows; the order of a fleet's changes."""

from dataclasses import replace

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.runs.memory.changes import Change, changes, differences
from nodeready.runs.memory.diff import NodeChanges, Side, compare
from nodeready.runs.memory.look import NodeLook, changed_words, policy_words
from tests.cases import cases


def interface(name, mac, slot, **values):
    facts = {"name": name, "mac": mac, "pci_address": slot, "kind": "ethernet", "mtu": 9000}
    return {f"nics.interfaces[{name}].{key}": value for key, value in (facts | values).items()}


def gpu(slot, serial, vbios="96.00.74", **values):
    facts = {"pci_address": slot, "serial": serial, "vbios": vbios, "model": "H100"} | values
    on_bus = {f"gpus.pci[{slot}].address": slot, f"gpus.pci[{slot}].device": "2330"}
    return on_bus | {f"gpus.nvidia[{slot}].{key}": value for key, value in facts.items()}


ETH0 = interface("eth0", "aa", "0000:01:00.0")
BOND = {"nics.bonds[bond0].slaves[eth0].mii": "up", "nics.default_interface": "eth0, eth0.100"}
BASE = {"host.memory_total_mb": 2000000, "gpus.driver": "570.1", **ETH0, **BOND}
BASE |= gpu("0000:1a:00.0", "S1") | gpu("0000:3b:00.0", "S2")
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
MOUNT = {"host.mounts[/scratch].path": "/scratch", "host.mounts[/scratch].device": "x"}

#: The facts of a look by a name, for rows of cases.
BASES = {
    "": BASE, "nothing": {}, "renamed": RENAMED, "slaves": SLAVES, "swapped": SWAPPED,
    "docker": BASE | DOCKER, "mount": BASE | MOUNT,
}  # fmt: skip


def look_of(row):
    """A look as the cases write it.

    base:    the facts, by a name of `BASES`; without: the beginnings of those that are not there
    gpu:     another GPU
    policy:  as `look.policy_words` makes it, for every subject; without it, none was kept
    """
    left_out = tuple(row.get("without", ()))
    facts = {
        key: v for key, v in BASES[row.get("base", "")].items() if not key.startswith(left_out)
    }
    facts |= row.get("facts", {}) | (gpu(*row["gpu"]) if "gpu" in row else {})
    known = {key: row[key] for key in ("boot", "error", "counters") if key in row}
    observed = look(facts, **known, **row.get("results", {}))
    words = row.get("policy")
    policies = dict.fromkeys(("gpus", "host", "nics"), words) if words is not None else {}
    return replace(observed, policies=policies)


@pytest.mark.parametrize("case", cases(__file__, "data/changes.json"))
def test_changes(case):
    """Those of the section `policy`: another policy is no change of the node."""
    before, after = look_of(case.get("before", {})), look_of(case.get("after", {}))
    assert list(changes(before, after)) == [Change(*row) for row in case["changes"]]


def test_a_policy_has_words_for_what_it_asks_and_decides():
    new = Policy(packages=("gdb", "htop"), gpu_count=8)
    packages = {"packages", "asked"}
    expected = {"gpus": {"gpu_count"}, "nics": set(), "pdsh": packages, "debug_tools": packages}
    for subject, settings in expected.items():
        words = [policy_words(subject, policy)[subject] for policy in (Policy(), new)]
        assert changed_words(*words) == settings, subject


def test_a_peer_differs_by_no_serial_number():
    own = {"host.hostname": "gpu002", "host.fstab[/].device": "UUID=1234-ABCD"}
    peer = {"host.hostname": "gpu001", "host.fstab[/].device": "UUID=9876-ABCD"}
    facts = {**own, **BASE, **gpu("0000:1a:00.0", "T1"), "nics.interfaces[eth0].mtu": 1500}
    node = look(facts, boot="b7", counters={"nics.eth0.rx_errors": 99})
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
