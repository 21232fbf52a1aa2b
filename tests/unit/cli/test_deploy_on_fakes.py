"""A deploy when nodes fail, hang, die half-way or talk nonsense, and when it is interrupted."""

from __future__ import annotations

from nodeready.policy import Policy
from tests.fake import hangs, interrupts, one_by_one, says
from tests.unit.commands import AWAY, DIES, looks

#: No machine has this, so that there is always a change to make.
POLICY = Policy(limit_nofile=16383)
WORDS = ("deploy", "--only", "limits", "--yes")


def test_each_nodes_trouble_is_its_own(run):
    nodes = {
        "good": looks(says("")),
        "away": AWAY,
        "full": looks(says("", 1, "nodeready: no space left on /etc\n")),
        "dead": looks(DIES),
        "hung": looks(hangs),
        "mad": looks(says(""), look=says("\x1b[31mwelcome")),
    }
    done = run(nodes, *WORDS, policy=POLICY)
    assert done.code == 1
    assert "unreachable away: n: no answer in 15 s\n" in done.out
    assert "full: limits.logins: no space left on /etc\n" in done.out
    assert "unreachable dead: connection lost in limits.logins\n" in done.out
    assert "hung: no answer in " in done.out
    assert "changed     good: limits.logins" in done.out
    # It was looked at again, and there is nothing of it on this machine.
    assert "not fixed   good: limits." in done.out
    assert "limits.observed  mad" in done.out
    assert "\x1b" not in done.out
    # Nobody was asked anything after its connection was lost.
    assert [one.node for one in done.carrier.asked].count("dead") == 2


def test_a_step_that_fails_does_not_stop_the_others(run):
    node = looks(one_by_one(says("", 1, "nodeready: busy\n"), says("")))
    done = run({"n": node}, *WORDS, policy=POLICY)
    assert done.code == 1
    assert "failed      n: limits.logins: busy\n" in done.out


def test_an_interrupt_while_changing_says_what_was_done(run):
    nodes = {"a": looks(says("")), "b": looks(interrupts), "c": looks(says(""))}
    done = run(nodes, *WORDS, policy=POLICY)
    assert done.code == 130
    assert "nodeready: interrupted: ending what runs on the nodes" in done.err
    assert "partial     b: stopped in limits.logins\n" in done.out
    assert "changed     a: limits.logins" in done.out
    assert "1 of 3 nodes were completed; not b,c (--limit @last-failed)" in done.err
    assert done.carrier.ended == 1
    changes = [one.node for one in done.carrier.asked if not one.mark]
    assert "c" not in changes


def test_an_interrupt_while_looking_changes_nothing(run):
    nodes = {"a": looks(says("")), "b": interrupts}
    done = run(nodes, *WORDS, policy=POLICY)
    assert (done.code, done.out) == (130, "")
    assert "nothing was changed" in done.err
    assert not [one for one in done.carrier.asked if not one.mark and one.node == "a"]
