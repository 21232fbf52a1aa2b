"""Which addresses count as other nodes': a node that lies has no more voice than each other."""

from __future__ import annotations

from types import SimpleNamespace

from nodeready.audit.run import combined
from nodeready.subjects.context import FleetContext
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport.base import Met
from nodeready.transport.look import Look


def node(name, *addresses):
    nics = object.__new__(Nics)
    shown = SimpleNamespace(addresses=tuple(f"{one}/24" for one in addresses))
    object.__setattr__(nics, "interfaces", {"eth0": shown})
    return Look(name, Snapshot({"nics": nics}))


def addresses(*looks, met=()):
    seen = {name: Met(address, "") for name, address in met}
    return combined(FleetContext({}), looks, seen).addresses


def test_what_several_nodes_have_leads_to_none():
    bridge = "172.17.0.1"
    pair = node("a", "10.0.0.1", bridge), node("b", "10.0.0.2", bridge)
    assert addresses(*pair) == ("10.0.0.1", "10.0.0.2")
    assert addresses(pair[0]) is None


def test_a_node_that_claims_many_addresses_has_one_voice():
    crowd = [f"10.9.{n // 200}.{n % 200}" for n in range(5000)]
    sound = node("a", "10.0.0.1", "10.1.0.1"), node("b", "10.0.0.2", "10.1.0.2")
    found = addresses(*sound, node("bad", *crowd))
    assert len(found) == 6
    assert {"10.0.0.1", "10.0.0.2", "10.1.0.1", "10.1.0.2"} < {*found}


def test_an_address_at_which_a_node_was_found_stays_its_own():
    sound = node("a", "10.0.0.1"), node("b", "10.0.0.2")
    liar = node("bad", "10.0.0.1")
    assert addresses(*sound, liar) == ("10.0.0.2",)
    assert addresses(*sound, liar, met=[("a", "10.0.0.1")]) == ("10.0.0.1", "10.0.0.2")
