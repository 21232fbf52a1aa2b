"""Whole commands on three nodes, one of which answers nonsense: it costs itself alone.

The exit code is a documented one, nobody sees a traceback or an escape sequence, the other nodes'
rows are what they are beside a sound node, byte for byte, and memory has a bound.
"""

import base64
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.asking import Answer, NodeChannel, Request
from nodeready.agent.proofs import mesh
from nodeready.core.base import Unknown
from nodeready.runs.ready.run import run_mesh
from nodeready.subjects.proof.facts import Mesh
from tests.builders.hostile import envelope, look, recorded
from tests.cases import read_table
from tests.fake import Does, Fake
from tests.unit.commands import SOUND
from tests.unit.fuzz.alone import alone, bounded

#: Bytes by which a command's memory may grow for one node that answers nonsense.
GROWN_BYTES = 512 << 20

ESCAPES = "\x1b[31m\x1b]0;owned\x07\u202e<b>&[/]"
#: What one value of an answer is replaced by, as JSON.
VALUES = {
    "nan": "NaN", "infinity": "-Infinity", "huge": "1e400", "digits": "9" * 100_000,
    "large": str(10**400), "below": "-1", "null": "null", "text": '"x"', "list": "[]",
    "long": json.dumps("x" * (3 << 20)), "numbers": json.dumps("9" * 6000),
    "escapes": json.dumps(ESCAPES), "surrogate": '"\\ud800"', "other": '"good1"',
    "deep": "[" * 100_000, "wide": "[" + "[]," * 1_000_000 + "0]",
    "objects": "[" + '{"":0},' * 700_000 + "0]", "commas": "," * (8 << 20),
}  # fmt: skip


def command(run: Any, nodes: dict[str, Does], words: Iterable[str]) -> str:
    # Of each run the counters are kept, and the next one compares with them.
    shutil.rmtree(Path(os.environ["XDG_STATE_HOME"]), ignore_errors=True)
    done = run(nodes, *words)
    assert done.code in (0, 1, 3, 4), done
    for text in (done.out, done.err):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "Traceback" not in text
        assert "internal error" not in text
        text.encode()
    return done.out


def drawn(first: Iterable[str], second: Iterable[str]) -> list[Any]:
    """Every pair for `make test-all`; for `make test` each word of `second` once."""
    names, words = [*first], [*second]
    few = [pytest.param(names[at % len(names)], w, "short") for at, w in enumerate(words)]
    return few + [
        pytest.param(name, word, "long", marks=pytest.mark.nightly)
        for name in names
        for word in words
    ]


def within_bounds(work: Callable[[], object], effort: str) -> None:
    """The ceiling of memory is for `make test-all`: it needs a fork, which is slow."""
    if effort == "short":
        bounded(work, 60)
        return
    ended = alone(work, 60, 2 * GROWN_BYTES)
    assert ended.status == 0, ended.said[-3000:]
    assert ended.grown_bytes < GROWN_BYTES


#: What a section's values are replaced by, as they are.
WORDS = {
    "nan": "nan", "infinity": "-inf", "huge": "1e400", "digits": "9" * 5000, "below": "-1",
    "nothing": "", "long": "x" * 300_000, "escapes": ESCAPES, "bytes": "\udcff\udcfe",
    "path": "/etc/../../etc/passwd", "other": "good1", "shell": "$(reboot);`reboot`",
    "deep": "[" * 100_000 + "{" * 100_000, "commas": "," * 300_000, "rows": "a=1\n" * 100_000,
    "tags": "<a>" * 100_000,
}  # fmt: skip


def in_values(text: str, word: str) -> str:
    """Each line with its value replaced; a long word stands in some lines alone."""
    lines = text.split("\n")
    step = 1 if len(word) < 100 else max(1, len(lines) // 2)
    for at in range(0, len(lines), step):
        head, mark, value = lines[at].rpartition("=" if "=" in lines[at] else ":")
        if mark and not value.startswith((" begin", " eof")):
            lines[at] = f"{head}{mark}{word}"
    return "\n".join(lines)


def liar(change: Callable[[str], str]) -> Does:
    """A node whose look is hostile, and that says the same to everything else that it is asked."""

    def does(request: Request) -> Answer:
        nonce = request.mark.rpartition(" ")[2]
        if request.mark:
            return Answer(look({name: change(text) for name, text in SECTIONS.items()}, nonce))
        return Answer(change("a=1\n"), change("nodeready: no\n"), rc=1)

    return does


SECTIONS = recorded("h100")


LOOKS = read_table(__file__, "LOOKS")


def results(out: str) -> dict[str, list[str]]:
    """Every result of the sound nodes, but for the known hosts, which have every node's keys."""
    return {
        node["name"]: [
            json.dumps(row) for row in node["results"] if row["check"] != "ssh_client.known_hosts"
        ]
        for node in json.loads(out)["nodes"]
        if node["name"] != "bad"
    }


def bomb(request: Request) -> Answer:
    text = base64.b64encode(b"A" * (12 << 20)).decode()
    return Answer(envelope(text, request.mark.rpartition(" ")[2]))


def zeros(request: Request) -> Answer:
    return Answer(look({"host": "\0" * (64 << 20)}, request.mark.rpartition(" ")[2]))


BOMBS = {"noise": bomb, "zeros": zeros}


@pytest.mark.parametrize(("name", "kind", "effort"), drawn(LOOKS, {**WORDS, **BOMBS}))
def test_a_node_whose_look_is_nonsense_costs_itself(run, name, kind, effort):
    words, word = LOOKS[name], WORDS.get(kind, "")
    bad = [liar(lambda text: in_values(text, word)), liar(lambda text: word)]
    bad, effort = ([BOMBS[kind]], "long") if kind in BOMBS else (bad, effort)
    nodes = {"good1": SOUND, "bad": SOUND, "good2": SOUND}
    wanted = results(command(run, nodes, words)) if "json" in words else None

    def all_of_them() -> None:
        for node in bad:
            out = command(run, {**nodes, "bad": node}, words)
            if wanted is not None:
                rows = results(out)
                assert rows.keys() == wanted.keys()
                for good in wanted:
                    pairs = zip(rows[good], wanted[good], strict=True)
                    assert [pair for pair in pairs if pair[0] != pair[1]] == []

    within_bounds(all_of_them, effort)


class Peer(NodeChannel):
    """A node of the mesh that reaches every other at once. says: its answer to every round."""

    error = ""

    def __init__(self, name: str, says: str | None = None, first: str | None = None) -> None:
        self.name, self.says, self.nonce, self.begun = name, says, "", False
        row = mesh.Listening(name, (29500,), (), (ADDRESSES[name],))
        self.lines = [first or f"listening {json.dumps(asdict(row))}"]

    def send_line(self, line: str) -> None:
        order = json.loads(line)
        address = ADDRESSES[order["target"]]
        tried = tuple(mesh.Try(port, mesh.OK, 0.5, "") for port in order["ports"])
        row = mesh.MeshRound(order["round"], order["target"], (address,), "", address, tried, 1)
        self.lines.append(self.says or f"round {json.dumps(asdict(row))}")

    def read_line(self, limit_s: float) -> str | None:
        return f"{self.nonce} {self.lines.pop(0)}" if self.lines else None

    def close(self) -> None:
        return


ADDRESSES = {"good1": "10.0.0.1", "bad": "10.0.0.2", "good2": "10.0.0.3"}


class Meshed(Fake):
    """Nodes that are spoken with, each by the nonce that it was told."""

    def open(self, request: Request) -> NodeChannel:
        channel = super().open(request)
        channel.nonce = request.mark  # type: ignore[attr-defined]
        return channel


def meshed(bad: Peer) -> dict[str, Any]:
    channels: dict[str, NodeChannel] = {name: Peer(name) for name in ADDRESSES}
    channels["bad"] = bad
    transport = Meshed(dict.fromkeys(ADDRESSES, SOUND), channels)
    return run_mesh(transport, ADDRESSES, (29500, 29500), time.monotonic() + 30)


#: A node that stops making sense at its first line, or in a round.
SILENT = cache(
    lambda: {
        "listening": meshed(Peer("bad", first="listening {}")),
        "round": meshed(Peer("bad", says="round {}")),
    }
)


@pytest.mark.parametrize("kind", VALUES)
def test_a_node_that_says_nonsense_in_the_mesh_is_out_of_it(kind):
    """The rows of the others are as if it had been silent from the same moment on."""
    value = VALUES[kind][: 250 << 10]
    peers = {
        "listening": Peer("bad", first=f"listening {value}"),
        "round": Peer("bad", says=f"round {value}"),
    }
    for when, bad in peers.items():
        rows, wanted = meshed(bad), SILENT()[when]
        assert isinstance(wanted["good1"], Mesh)
        assert isinstance(rows["bad"], Unknown)
        assert "makes no sense" in rows["bad"].reason
        assert (rows["good1"], rows["good2"]) == (wanted["good1"], wanted["good2"])
