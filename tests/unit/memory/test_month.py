"""A simulated month of 64 nodes: what was changed on which day is what `diff` names, and no more.

The nodes answer as a node of the lab did, with their own names and serial numbers, and with values
that change by themselves at each look.
"""

import re
from collections import defaultdict
from collections.abc import Callable

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.core.text import utc_moment
from nodeready.runs.memory.diff import (
    Side,
    compare,
    dated,
    looks_since,
    looks_since_good,
    since_changes,
)
from nodeready.runs.memory.look import Look, NodeSections, SectionText, SectionWriter, digest
from nodeready.runs.memory.store import Memory
from nodeready.subjects.registry import SUBJECTS, check_ids
from nodeready.subjects.snapshot import Snapshot, judge, shown_facts
from tests.builders import hostile
from tests.builders.nics import table

DAY, LOOKS_A_DAY, DAYS = 86400.0, 4, 30
NODES = tuple(f"gpu{number:03}" for number in range(1, 65))
POLICY = Policy(nics=table(ib0={"mtu": 4092}))
PROBES = tuple(
    SUBJECTS[name].probe for name in ("gpus", "nics", "rdma", "host", "ptrace", "ssh_client")
)
SECTIONS = {section.name for probe in PROBES for section in probe.sections}
TEXTS = {
    name: hostile.encoded(text)
    for name, text in hostile.recorded("h100").items()
    if name in SECTIONS
}
CHECKS = check_ids()


class SimulatedNode:
    def __init__(self, number: int) -> None:
        self.texts = dict(TEXTS)
        self.edit("nvidia_smi", r"(?<=<serial>)1650522", f"{1000000 + number}")
        for section in ("nvidia_smi", "nvlink"):
            self.edit(section, "GPU-5269", f"GPU-{number:04}")
        self.edit("nics", r"(?<=02:6e:72:76:00:)01", f"{number:02x}")
        self.edit("host", "gpu001", NODES[number])

    def edit(self, section: str, pattern: str, new: str | Callable[[re.Match[str]], str]) -> None:
        """Replace what a section prints; the pattern must be there."""
        self.texts[section], count = re.subn(pattern, new, self.texts[section])
        assert count, pattern

    def fluctuate(self, look: int) -> None:
        """Let time pass: what a node shows differently at each look."""
        self.edit("nvidia_smi", r"(?<=<gpu_temp>)\d+", str(30 + look % 40))
        self.edit("nvidia_smi", r"(?<=<performance_state>P)\d+", str(look % 9))
        self.edit("host", r"(?<=file-nr:1:)\d+", str(1600 + look))
        self.edit("host", r"(?<=loadavg:1:)\d+\.\d+", f"{look % 64}.17")
        self.edit("host", r"(?<=MemAvailable:)( +)\d+", rf"\g<1>{500000 + look}")
        self.edit("nics", r"(?<=eth0/statistics/rx_dropped:)\d+", str(look))

    def state(self, name: str):
        outputs = {
            section: Output(text, 0, nonce=hostile.RECORDED)
            for section, text in self.texts.items()
        }
        snapshot = Snapshot({probe.subject: probe.parse(outputs, POLICY) for probe in PROBES})
        results = defaultdict(list)
        for result in judge(snapshot, POLICY):
            results[result.check.partition(".")[0]].append(result)
        sections = [
            SectionText(section, text_digest, lambda packed=packed: packed)
            for subject, observation in snapshot.subjects.items()
            for section, text_digest, packed in SectionWriter(CHECKS, ())(
                subject, observation, shown_facts(subject, observation), results[subject], POLICY
            )
        ]
        state = digest(b"".join(section.digest for section in sections))
        return NodeSections(name, state, ("nics", "rdma"), lambda: sections)


def counter(node, name, total):
    node.edit("nics", rf"(?<=/{name}:)\d+", str(total))


def boot(node):
    node.edit("host", "3b3acd61", "00000001")
    node.edit("nics", r"(?<=statistics/rx_errors:)\d+", "0")


def gpu_texts(node, number):
    return re.findall(r"<gpu id.*?</gpu>", node.texts["nvidia_smi"], re.S)[number]


def move_gpu(source, target):
    """GPU 2 of one node into the slot of GPU 3 of another, whose GPU is taken out."""
    came, gone = gpu_texts(source, 2), gpu_texts(target, 3)
    for tag, section in (("serial", "nvidia_smi"), ("uuid", "nvidia_smi"), ("uuid", "nvlink")):
        new, old = (re.search(f"<{tag}>(.*?)<", text)[1] for text in (came, gone))
        target.edit(section, old, new)
    slot = re.search("pci_bus_id>0000(.*?)<", came)[1].lower()
    source.edit("nvidia_smi", re.escape(came), "")
    source.edit("pci_gpus", rf".*{re.escape(slot)}.*\n", "")


def rename(node):
    """ens1f1np1, a slave of bond0, becomes nic9; its counters and its routes go with it."""
    for section in ("nics", "nic_routes", "rdma", "host"):
        node.texts[section] = node.texts[section].replace("ens1f1np1", "nic9")


#: Day -> the nodes, what happens to them, and what `diff` names: the kind, the key, the values.
EVENTS = {
    3: ("gpu010", lambda n: n.edit("pci_gpus", r"535\.129\.03", "550.54.15"), [
        ("version", "gpus.driver", "535.129.03", "550.54.15")]),
    5: ("gpu011", lambda n: n.edit("nics", r"(?<=eth0/mtu:)1500", "9000"), [
        ("setting", "nics.interfaces[eth0].mtu", 1500, 9000)]),
    7: ("gpu012", lambda n: n.edit("ptrace", "live=0", "live=1"), [
        ("result", "ptrace.scope", "ok", "fail"), ("setting", "ptrace.live", 0, 1)]),
    9: ("gpu013", lambda n: n.edit("host_slow", "Version: 13.1-3", "Version: 13.2-1"), [
        ("version", "host.versions[gdb]", "13.1-3", "13.2-1")]),
    11: ("gpu014", lambda n: n.edit("nvidia_smi", "1000013003824", "9999999999999"), [
        ("hardware", "gpus.nvidia[0000:9d:00.0]", "1000013003824", "9999999999999")]),
    15: ("gpu017", rename, [
        ("setting", "nics.interfaces[nic9]", "ens1f1np1", "nic9")]),
    17: ("gpu018", boot, [("reboot", "host.boot_id", None, None)]),
    19: ("gpu019", lambda n: counter(n, "eth0/statistics/rx_errors", 4294967290), [
        ("counter", "nics.eth0.rx_errors", 0, 4294967290)]),
    21: ("gpu019", lambda n: counter(n, "eth0/statistics/rx_errors", 12), [
        ("counter", "nics.eth0.rx_errors", 4294967290, 12)]),
}  # fmt: skip
MOVE_DAY, CAUSE_DAY = 13, 25
FAILING = ("gpu030", "gpu041", "gpu052")


def moment(day, look=0):
    return (day + look / LOOKS_A_DAY) * DAY


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    path = tmp_path_factory.mktemp("month") / "memory.db"
    nodes = {name: SimulatedNode(number) for number, name in enumerate(NODES)}
    states = {name: node.state(name) for name, node in nodes.items()}
    with Memory.open(path, make=True) as memory:
        for look in range(DAYS * LOOKS_A_DAY):
            day, of_day = divmod(look, LOOKS_A_DAY)
            touched = set()
            if of_day == 1:
                touched.add(NODES[day])
                nodes[NODES[day]].fluctuate(look)
            if of_day == 2:
                if day in EVENTS:
                    name, happen, _ = EVENTS[day]
                    happen(nodes[name])
                    touched.add(name)
                elif day == MOVE_DAY:
                    move_gpu(nodes["gpu015"], nodes["gpu016"])
                    touched |= {"gpu015", "gpu016"}
                elif day == CAUSE_DAY:
                    for name in NODES[::2]:
                        nodes[name].edit("host_slow", "deb12u14", "deb12u15")
                    for name in FAILING:
                        nodes[name].edit("nics", r"(?<=ib0/mtu:)\d+", "1500")
                    touched |= {*NODES[::2], *FAILING}
            states.update({name: nodes[name].state(name) for name in touched})
            kept = Look(0, moment(day, of_day), "audit", "prod.py", "ab", True, 0, {})
            memory.keep(kept, states.values())
        yield memory


def compared(memory, looks, since_s, until_s):
    document = compare(
        since_changes(looks), Side("", ""), Side("", ""), only_before=(), only_after=()
    )
    return dated(document, memory, since_s, until_s)


def diff(memory, since_s, until_s):
    looks = looks_since(memory, NODES, since_s, until_s)
    return compared(memory, looks, since_s, until_s)


def rows(document):
    return [(change.kind, change.key, change.before, change.after) for change in document.changes]


@pytest.mark.parametrize("day", range(DAYS))
def test_each_day_names_its_changes_and_nothing_else(memory, day):
    if day in (MOVE_DAY, CAUSE_DAY):
        return
    document = diff(memory, moment(day), moment(day, LOOKS_A_DAY - 1))
    name, _, expected = EVENTS.get(day, ("", None, []))
    assert sorted(rows(document), key=repr) == sorted(expected, key=repr)
    assert {node for change in document.changes for node in change.nodes} <= {name}


def test_a_gpu_that_moved_is_one_change_and_the_one_that_it_replaced_another(memory):
    document = diff(memory, moment(MOVE_DAY), moment(MOVE_DAY, 3))
    moved, gone = (change for change in document.changes if change.part)
    assert moved.nodes == ("gpu015", "gpu016")
    assert moved.before == "gpu015 gpus.nvidia[0000:52:00.0]"
    assert moved.after == "gpu016 gpus.nvidia[0000:61:00.0]"
    assert moved.note.endswith(" moved")
    assert (gone.nodes, gone.after, gone.note) == (("gpu016",), None, "gone")


def test_the_cause_of_three_failing_nodes_comes_first(memory):
    document = diff(memory, moment(CAUSE_DAY), moment(CAUSE_DAY, 3))
    assert document.failing == FAILING
    assert [(change.key, change.suspect, change.nodes) for change in document.changes] == [
        ("nics.interfaces[ib0].mtu", True, FAILING),
        ("nics.mtu", False, FAILING),
        ("host.versions[glibc]", False, NODES[::2]),
    ]


def test_the_whole_month_names_the_day_of_each_change(memory):
    document = diff(memory, moment(0), moment(DAYS))
    days = {
        (change.kind, change.key, change.nodes[-1]): change.since for change in document.changes
    }
    rows = ((day, name, row) for day, (name, _, changes) in EVENTS.items() for row in changes)
    # The counter is dated from its first growth.
    expected = {(kind, key, name): day for day, name, (kind, key, *_) in rows if day != 21}
    assert {change: utc_moment(moment(day, 2)) for change, day in expected.items()} == {
        change: since for change, since in days.items() if change in expected
    }
    others = {change: since for change, since in days.items() if change not in expected}
    assert set(others.values()) == {utc_moment(moment(day, 2)) for day in (MOVE_DAY, CAUSE_DAY)}
    assert len(others) == 4


def test_nodes_are_compared_with_when_they_were_good(memory):
    looks = looks_since_good(memory, NODES, moment(DAYS))
    document = compared(memory, looks, moment(0), moment(DAYS))
    first, second = document.changes[:2]
    assert (first.key, first.nodes, first.suspect) == (
        "nics.interfaces[ib0].mtu", FAILING, True)  # fmt: skip
    assert (second.key, second.nodes, second.suspect) == ("ptrace.live", ("gpu012",), True)
    # The driver changed before any node failed.
    assert "gpus.driver" not in {change.key for change in document.changes}
