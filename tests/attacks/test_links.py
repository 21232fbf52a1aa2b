"""Root writes through nobody's links, into nobody's pipes, and keeps nobody's file."""

from __future__ import annotations

import os

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


def test_a_deploy_makes_no_directory_of_others_writable(fresh_node, mallory, fleet, tool):
    fresh_node.enter(["sh", "-c", "mkdir -m 1777 /scratch; mkdir -m 700 /root/dir"])
    mallory.run("ln -s /root/dir /scratch/cores")
    where = fleet([fresh_node], core_pattern="/scratch/cores/core.%p")
    done = tool("deploy", where, "--yes", "--only", "core_dumps")
    assert done.status == 3, done
    assert "/scratch/cores: a link of uid 4001: not followed" in done.out, done
    assert "/root" not in done.out
    assert fresh_node.enter(["stat", "-c", "%a %U", "/root/dir"]).stdout == "700 root\n"


def test_the_command_writes_to_no_link_in_a_shared_directory(lab_machine, tool, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "out").symlink_to(tmp_path / "victim")
    os.chown(shared / "out", links.MALLORY, links.MALLORY, follow_symlinks=False)
    done = tool("bundle", "-o", shared / "out")
    assert (done.status, done.out) == (2, ""), done
    said = f"nodeready: -o {shared}/out: a link of uid {links.MALLORY}: not followed\n"
    assert done.err == said
    assert not (tmp_path / "victim").exists()
