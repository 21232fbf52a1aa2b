"""Root writes through nobody's links, into nobody's pipes, and keeps nobody's file."""

import pytest

from tests.attacks import links
from tests.attacks.links import ATTACKS, Machine, attack
from tests.command import ours
from tests.lab.rows import rows


@pytest.fixture
def machine(mallory, fresh_node) -> Machine:
    return Machine(
        lambda script, given: fresh_node.enter(["sh", "-c", script], given, check=False)
    )


def test_what_somebody_planted_is_neither_followed_nor_written_to(machine, fresh_node):
    for one in ATTACKS:
        said = attack(machine, one)
        assert one.told in said, (one.name, said)
        assert ours(fresh_node) == [], one.name


@pytest.mark.parametrize("what", rows(links.UNDER_SWAP, "a change"))
def test_a_component_that_is_exchanged_redirects_nothing(what, machine, mallory):
    machine.fresh()
    before = machine.state()
    mallory.python(links.SWAP)
    machine.root(links.UNDER_SWAP[what], "")
    assert machine.state() == before


def test_nobody_in_a_group_that_may_write_there_gets_a_file_of_roots(machine, mallory):
    machine.fresh()
    machine.done(f"install -d -m 2775 -g {links.MALLORY} /srv/team")
    before = machine.state()
    mallory.run("echo hers >/srv/team/site.conf")
    mallory.python(links.HUNT)
    said = machine.root(links.HUNTED, "").stderr
    assert machine.state() == before
    assert "/srv/team, a directory of root: others can write there" in said
