"""Nodes that differ from their peers, a policy learnt from a majority, and their addresses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nodeready.agent.asking import SshPeer
from nodeready.agent.audit_document import NodeReport, Outlier
from nodeready.core.base import Unknown
from nodeready.core.outcome import Outcome
from nodeready.core.policy import make_policy
from nodeready.core.result import ALONE
from nodeready.fleet.inventory.host_data import addresses_of_nodes
from nodeready.runs.audit import answer_judge, learned
from nodeready.subjects import registry
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.snapshot import Snapshot
from tests.cases import read_table


@pytest.fixture
def subjects(monkeypatch):
    """Two subjects whose facts and settings are the observation itself; others learn nothing."""
    for name, subject in list(registry.SUBJECTS.items()):
        is_own = name in ("ptrace", "limits")
        compared = (lambda observed, fleet: dict(observed)) if is_own else subject.compared
        learned = dict if is_own else lambda observed: {}
        changed = replace(subject, compared=compared, learned=learned)
        monkeypatch.setitem(registry.SUBJECTS, name, changed)


# --- Outliers.


def node(name: str, observed: object, group: str = "h100", subject: str = "ptrace") -> NodeReport:
    return NodeReport.of(name, snapshot=Snapshot({subject: observed}), groups=(group,))


def find(*nodes: NodeReport) -> list[Outlier]:
    groups: dict[str, dict[str, answer_judge.Facts]] = {}
    same: dict[object, object] = {}
    for report in nodes:
        if report.snapshot is not None:
            facts = answer_judge.compared(report.snapshot, ALONE, ("ptrace", "limits"))
            groups.setdefault(",".join(report.groups) or answer_judge.ALL, {})[report.name] = {
                subject: same.setdefault((subject, answer_judge.key_of(value)), value)
                for subject, value in facts.items()
            }
    return list(answer_judge.find_outliers(groups))


@pytest.mark.usefixtures("subjects")
def test_a_node_that_differs_from_the_majority_of_its_group_is_an_outlier():
    nodes = [node(f"gpu{n}", {"driver": "535", "mtu": 9000}) for n in range(8)]
    nodes += [node("gpu8", {"driver": "550", "mtu": 9000}), node("gpu9", {"mtu": 1500})]
    # Peers are those of the same group: these are all alike.
    nodes += [node(f"cpu{n}", {"driver": "", "mtu": 1500}, "cpu") for n in range(3)]
    assert find(*nodes) == [
        Outlier("ptrace.driver", "h100", "535", 8, {"gpu8": "550"}),
        Outlier("ptrace.mtu", "h100", 9000, 9, {"gpu9": 1500}),
    ]
    alike = [node(f"gpu{n}", {"driver": "535"}) for n in range(3)]
    assert find(*alike, node("gpu3", Unknown("timed out")), NodeReport.of("gpu4")) == []


@pytest.mark.usefixtures("subjects")
def test_without_a_majority_no_node_differs():
    for values in ("a", "ab", "abc", "aabb", "aaa"):
        assert find(*(node(f"gpu{n}", {"driver": v}) for n, v in enumerate(values))) == []
    (outlier,) = find(*(node(f"gpu{n}", {"driver": v}) for n, v in enumerate("aab")))
    assert outlier.nodes == {"gpu2": "b"}


@pytest.mark.usefixtures("subjects")
def test_a_missing_device_is_reported_once():
    observed = {"devices": "mlx5_0 mlx5_1", "mlx5_1.rate_gbps": 400}
    nodes = [node(f"gpu{n}", observed) for n in range(3)]
    (outlier,) = find(*nodes, node("gpu3", {"devices": "mlx5_0"}))
    assert (outlier.fact, outlier.nodes) == ("ptrace.devices", {"gpu3": "mlx5_0"})


# --- A learnt policy.


@pytest.fixture
def learn(subjects):
    def learn(**nodes: object) -> tuple[str, dict[str, object]]:
        observed = {name: Snapshot({"ptrace": settings}) for name, settings in nodes.items()}
        text = learned.render(learned.majority(observed), list(nodes), "2026-01-01T00:00:00Z")
        settings: dict[str, object] = {}
        exec(text, {"__builtins__": {}}, settings)  # as pyinfra does with a group_data file
        make_policy(settings)
        return text, settings

    return learn


def test_the_majority_is_learnt_and_other_nodes_are_named(learn):
    most = {
        "gpu_count": 8,
        "gpu_vbios": ("96.00",),
        "nics": {"eth0": {"mtu": 9000, "driver": "mlx5_core"}, "eth1": {"mtu": 9000}},
    }
    odd = {"gpu_count": 7, "gpu_vbios": ("96.00",), "nics": {"eth0": {"mtu": 1500}}}
    text, settings = learn(gpu1=most, gpu2=most, gpu3=most, gpu4=odd)
    assert settings == most
    assert "# 3 of 4 nodes; gpu4: 7\ngpu_count = 8\n" in text
    assert "# 4 of 4 nodes\ngpu_vbios = ('96.00',)\n" in text
    assert "# eth0 mtu: 3 of 4 nodes; gpu4: 1500\n" in text
    assert "# eth1 is missing on gpu4\n" in text
    assert text.startswith("# What most of gpu[1-4] (4 nodes) had in common on 2026-")
    assert max(map(len, text.splitlines())) <= 88
    assert learn(gpu1=Unknown("timed out"), gpu2=most)[1] == most


def test_no_majority_sets_nothing_and_names_the_values(learn):
    text, settings = learn(gpu1={"gpu_driver": "535"}, gpu2={"gpu_driver": "550"})
    assert settings == {}
    assert "# no majority among 2 nodes: gpu1: '535'; gpu2: '550'\n" in text
    assert "# gpu_driver is not set.\n" in text


def test_a_device_of_few_nodes_is_left_out_and_a_flood_does_not_fill_the_file(learn):
    row = {"mtu": 1500}
    both, single = {"eth0": row, "eth1": row}, {"eth0": row}
    text, settings = learn(gpu1={"nics": both}, gpu2={"nics": single}, gpu3={"nics": single})
    assert settings == {"nics": single}
    assert "# eth1 is left out: only on gpu1\n" in text
    flood = {"nics": {f"eth{number}": {"mtu": 9000} for number in range(5000)}}
    most = {"nics": {"ib0": {"mtu": 4092}}}
    text, settings = learn(gpu1=most, gpu2=most, gpu3=most, gpu4=flood)
    assert settings == most
    assert "# and 4980 more that few nodes have are left out\n" in text
    assert len(text) < 5000


@pytest.mark.parametrize("settings", read_table(__file__, "hostile_settings"))
def test_a_hostile_node_writes_no_line_of_the_file(settings, learn):
    text, learnt = learn(gpu1=settings)
    assert {*learnt} <= {*settings}
    (key,) = settings
    assert all(line.startswith(("#", f"{key} = ")) for line in text.splitlines() if line)
    assert text.replace("\n", "").isprintable()


# --- Addresses: a node that lies has no more voice than each other.


def reply(name, *addresses):
    nics = object.__new__(Nics)
    shown = SimpleNamespace(addresses=tuple(f"{address}/24" for address in addresses))
    object.__setattr__(nics, "interfaces", {"eth0": shown})
    return Outcome(name, Snapshot({"nics": nics}))


def addresses(*replies, reached=None):
    peers_met = {name: SshPeer(address, "") for name, address in (reached or {}).items()}
    return addresses_of_nodes(replies, peers_met)


def test_an_address_of_several_nodes_leads_to_none():
    bridge = "172.17.0.1"
    pair = reply("a", "10.0.0.1", bridge), reply("b", "10.0.0.2", bridge)
    assert addresses(*pair) == ("10.0.0.1", "10.0.0.2")
    assert addresses(pair[0]) is None
    # An address at which a node was reached stays its own.
    sound, liar = (reply("a", "10.0.0.1"), reply("b", "10.0.0.2")), reply("bad", "10.0.0.1")
    assert addresses(*sound, liar) == ("10.0.0.2",)
    assert addresses(*sound, liar, reached={"a": "10.0.0.1"}) == ("10.0.0.1", "10.0.0.2")


def test_a_node_that_claims_many_addresses_has_one_voice():
    crowd = [f"10.9.{n // 200}.{n % 200}" for n in range(5000)]
    sound = reply("a", "10.0.0.1", "10.1.0.1"), reply("b", "10.0.0.2", "10.1.0.2")
    claimed = addresses(*sound, reply("bad", *crowd))
    assert len(claimed) == 6
    assert {"10.0.0.1", "10.0.0.2", "10.1.0.1", "10.1.0.2"} < {*claimed}
