"""The last lines when nodes fail, hang, die half-way or talk nonsense, and after an interrupt."""

from __future__ import annotations

import base64
import json
import zlib

from tests.fake import hangs, interrupts, says
from tests.unit.commands import AWAY, DIES, program


def answer(nonce: str) -> str:
    tail = {
        "host": "x", "files": [], "unread": [], "left_out": 0, "older": 0, "error": "",
    }  # fmt: skip
    raw = base64.b64encode(zlib.compress(json.dumps(tail).encode())).decode()
    return f'a motd\n{nonce} tail "{raw}"\n'


WORDS = ("tail", "/log/*")


def test_each_nodes_trouble_is_its_own(run):
    nodes = {
        "good": program(answer),
        "away": AWAY,
        "hung": hangs,
        "dead": DIES,
        "mad": says("\x1b[31mwelcome"),
        "old": program(lambda nonce: f"{nonce} no Python 3.9 or newer\n"),
        "bomb": program(lambda nonce: f'{nonce} tail "{"A" * 1000}"\n'),
    }
    done = run(nodes, *WORDS)
    assert done.code == 1
    for words in (
        "away", "no answer in 15 s", "connection lost", "no answer in ", "the node gave no answer",
        "no Python 3.9 or newer", "makes no sense",
    ):  # fmt: skip
        assert words in done.out
    assert "\x1b" not in done.out


def test_an_interrupt_leaves_what_came_until_then(run):
    done = run({"a": program(answer), "b": interrupts, "c": program(answer)}, *WORDS)
    assert done.code == 130
    assert "interrupted: the results are partial; not b,c" in done.err
    assert done.carrier.ended == 1
