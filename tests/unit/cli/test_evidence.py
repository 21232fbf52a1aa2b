"""A verdict needs its evidence: no node is ready, ok, changed or empty by default.

A whole command asks three nodes. Each may have its trouble after some answers: it is away, dies,
hangs, answers nonsense or too late, or Ctrl-C comes while it is asked. A node that is called good
then has given every answer that it gives in a run without trouble.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeready.agent.asking import LATE_WORDS, Answer, Request
from nodeready.agent.cores.program import CoreSummary, ReadTotals
from nodeready.agent.tail import LogTail, NodeTail
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import LATE
from tests.builders.proof import WELL
from tests.fake import Does, fails, hangs, interrupts
from tests.unit.cli.test_troubled_nodes import MAD, core, cores, packed, rank
from tests.unit.commands import AWAY, DIES, looks, program

Document = Mapping[str, Any]
TROUBLES: dict[str, Does] = {
    "away": AWAY,
    "dies": DIES,
    "hangs": hangs,
    "nonsense": MAD,
    "late": fails(LATE, LATE_WORDS),
    "interrupt": interrupts,
}
PROVEN = program(
    lambda nonce: "".join(
        f"{nonce} {name} {json.dumps(asdict(getattr(WELL, name)))}\n"
        for name in ("user", "limits", "control", "attach", "tracers")
    )
)
TAIL = NodeTail("x", (LogTail("/log/1", 9, 1.6e9, 5.0, ("step 1",), None),), (), 0, 0, "")
LOGS = program(lambda nonce: f'{nonce} tail "{packed(json.dumps(asdict(TAIL)))}"\n')


def crashed(request: Request) -> Answer | None:
    if "'selected': ()" in (request.payload or ""):
        return cores(core())(request)
    text = packed("#0 f () at a.c:3")
    row = asdict(CoreSummary(0, pid=7, signal=11, user="ada", comm="sh", text=text))
    end = json.dumps(asdict(ReadTotals(0, 0)))
    return program(lambda nonce: f"{nonce} core {json.dumps(row)}\n{nonce} done {end}\n")(request)


class Command(NamedTuple):
    """good: the nodes that its document calls good."""

    words: str
    sound: Does
    good: Callable[[Document], set[str]]


def nodes_with(*statuses: str) -> Callable[[Document], set[str]]:
    return lambda found: {node["name"] for node in found["nodes"] if node["status"] in statuses}


def answering(found: Document) -> set[str]:
    return {"a", "b", "c"} - {gap["node"] for gap in found["gaps"]}


COMMANDS = {
    "audit": Command(
        "audit --only limits --format json", looks(hangs), nodes_with("ok", "warn", "fail", "na")
    ),
    "ready": Command(
        "ready --only proof.user,proof.limits,proof.attach --format json",
        looks(PROVEN),
        lambda found: {*found["go"]},
    ),
    "deploy": Command(
        "deploy --only limits --check --format json", looks(hangs), nodes_with("ok", "to-change")
    ),
    "stacks": Command(
        "stacks --format json",
        rank(0),
        lambda found: {process["node"] for process in found["processes"]},
    ),
    "cores": Command(
        "cores --format json",
        crashed,
        lambda found: (
            answering(found) - {core["node"] for core in found["cores"] if core["unread"]}
        ),
    ),
    "tail": Command("tail /log/* --format json", LOGS, answering),
}


class Node:
    """Sound until it has answered ``count`` times; then its trouble."""

    def __init__(self, sound: Does, trouble: str = "", count: int = 0) -> None:
        self.sound, self.trouble, self.count, self.answered = sound, trouble, count, 0

    def __call__(self, request: Request) -> Answer | None:
        if self.trouble and self.answered == self.count:
            return TROUBLES[self.trouble](request)
        self.answered += 1
        return self.sound(request)


@pytest.mark.parametrize("name", COMMANDS)
def test_who_is_called_good_has_answered_everything(name, run):
    words, sound, good = COMMANDS[name]

    def ask(nodes: dict[str, Node]) -> tuple[int, set[str]]:
        try:
            done = run(nodes, *words.split())
        except Refused:
            return 2, set()
        return done.code, good(json.loads(done.out)) if done.out else set()

    whole = {node: Node(sound) for node in "abc"}
    code, called = ask(whole)
    assert called == {*"abc"}, code
    needed = {node: each.answered for node, each in whole.items()}
    trouble = st.tuples(st.sampled_from([*TROUBLES]), st.integers(0, 3))

    @settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.dictionaries(st.sampled_from("abc"), trouble, min_size=1))
    def check(troubles: dict[str, tuple[str, int]]) -> None:
        nodes = {node: Node(sound) for node in "abc"}
        for node, (kind, count) in troubles.items():
            nodes[node] = Node(sound, kind, count % needed[node])
        code, called = ask(nodes)
        unproven = {node for node in nodes if nodes[node].answered < needed[node]}
        assert not called & unproven, (troubles, called)
        assert code != 0, troubles

    check()
