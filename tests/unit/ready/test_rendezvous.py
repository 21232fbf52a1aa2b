"""Which port is free for a job on every node, and who stands against the others."""

from __future__ import annotations

from typing import Any

import pytest

from nodeready.ready import job_env
from nodeready.ready.job_env import Choice
from nodeready.subjects.base import Unknown
from nodeready.subjects.ports import facts as sockets
from nodeready.subjects.ports.facts import Ports
from nodeready.subjects.ports.firewall import Firewall
from tests.builders.job_env import ports, socket

SPAN = (29500, 29510)
FIRST = "the first of 29500-29510 that is free on all nodes"
NONE = "no port of 29500-29510 is free on all nodes"


def choose(*nodes: Ports | Unknown, span: tuple[int, int] = SPAN) -> Choice:
    named = {f"gpu{number}": one for number, one in enumerate(nodes, 1)}
    return job_env.choose(named, dict.fromkeys(named, span))


def dropped(some: str) -> Ports:
    return ports(firewall=Firewall("dropped", some))


WIDE: dict[str, Any] = {"ephemeral": (15000, 61000)}

#: nodes, the port, the notes
CHOICES = [
    ([ports()], 29500, ()),
    ([ports(socket(22), socket(29499), socket(29511))] * 3, 29500, ()),
    (
        [ports(socket(29500)), ports(socket(29500))],
        29501,
        ("not 29500 on gpu[1-2]: python3 of ada listens",),
    ),
    (
        [ports(socket(29500)), ports(socket(29501, "etcd"), socket(29505))],
        29502,
        (
            "not 29500 on gpu1: python3 of ada listens",
            "not 29501 on gpu2: etcd of ada listens",
        ),
    ),
    (
        [ports(socket(29500, state="established"), socket(29501, state="close wait"))],
        29502,
        ("not 29500-29501 on gpu1: a connection of python3 of ada",),
    ),
    ([dropped("29500-29508")], 29509, ("not 29500-29508 on gpu1: the firewall drops it",)),
    (
        [dropped("29500, 29502-29510")],
        29501,
        ("not 29500 on gpu1: the firewall drops it",),
    ),
    # What depends on the peer, or cannot be read, stands against nothing.
    ([ports(firewall=Firewall("cannot tell", "29500-29510"))], 29500, ()),
    ([ports(firewall=Firewall("unknown", reason="needs root"))], 29500, ()),
    ([ports(privileged_below=29503)], 29503, ("not 29500-29502 on gpu1: for root alone",)),
    ([ports(privileged_below=0)], 29500, ()),
    # Ports that outgoing connections may get are the second choice.
    ([ports(**WIDE, reserved=((29500, 29510),))], 29500, ()),
    (
        [ports(), ports(**WIDE, reserved=((8080, 8080), (29504, 29506), (29510, 29999)))],
        29504,
        ("not 29500-29503 on gpu2: outgoing connections may get it",),
    ),
    (
        [ports(**WIDE), ports(), ports(**WIDE)],
        29500,
        ("outgoing connections may get it on gpu[1,3]: see ports.ephemeral",),
    ),
    ([ports(ephemeral=None, reserved=None)], 29500, ()),
]


@pytest.mark.parametrize(("nodes", "port", "notes"), CHOICES)
def test_the_first_port_that_is_free_everywhere(
    nodes: list[Ports], port: int, notes: tuple[str, ...]
) -> None:
    assert choose(*nodes) == Choice(port, FIRST, notes, {})


def test_a_port_that_stays_free_comes_before_one_that_is_free_now() -> None:
    found = choose(ports(socket(29509), **WIDE, reserved=((29508, 29510),)))
    assert found.port == 29508
    found = choose(ports(socket(29508), socket(29509), **WIDE, reserved=((29508, 29509),)))
    assert found.port == 29500


def test_nothing_free_says_why() -> None:
    holders = [socket(port) for port in range(29500, 29506)]
    found = choose(ports(*holders), dropped("29505-29510"))
    assert (found.port, found.reason) == (None, NONE)
    assert found.notes == (
        "not 29500-29505 on gpu1: python3 of ada listens",
        "not 29505-29510 on gpu2: the firewall drops it",
    )
    many = [ports(*(socket(p, f"job{n}") for p in range(29500, 29511))) for n in range(40)]
    found = choose(*many)
    assert found.port is None
    assert len(found.notes) == 7
    assert found.notes[-1] == "and 34 more reasons against ports"


def test_the_range_is_what_all_policies_have() -> None:
    named = {"a": ports(socket(29505)), "b": ports()}
    found = job_env.choose(named, {"a": (29500, 29510), "b": (29505, 29600)})
    assert (found.port, found.reason) == (
        29506, "the first of 29505-29510 that is free on all nodes",
    )  # fmt: skip
    found = job_env.choose(named, {"a": (29500, 29510), "b": (30000, 30010)})
    assert found.port is None
    assert found.reason == "the nodes' policies have no port in common: --ports FIRST-LAST"
    assert found.notes == ("29500-29510 on a", "30000-30010 on b")


def test_nodes_that_do_not_tell() -> None:
    lost, unread = Unknown("timed out"), ports(connections=None, listeners=None)
    found = choose(lost, ports(socket(29500)), unread)
    assert found.port == 29501
    assert found.unknown == {"gpu1": "timed out", "gpu3": "/proc/net/tcp cannot be read"}
    assert choose(lost, unread).port is None


def test_more_sockets_than_are_looked_at() -> None:
    """Only when those of the range were cut off: the others stand against nothing."""
    wide = (20000, 29999)
    held = [socket(port) for port in range(20000, 20000 + sockets.MOST)]
    found = choose(ports(*held, more=True), span=wide)
    assert "more sockets in the range than are looked at" in found.unknown["gpu1"]
    assert choose(ports(*held, more=False), span=wide).port == 20000 + sockets.MOST
    assert choose(ports(more=True)) == Choice(29500, FIRST, (), {})
