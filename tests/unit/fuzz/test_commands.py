"""Whole commands on three nodes, one of which answers nonsense: it costs itself alone.

The exit code is a documented one, nobody sees a traceback or an escape sequence, the other nodes'
rows are what they are beside a sound node, byte for byte, and memory has a bound.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from nodeready.node.cores import program as cores
from nodeready.node.cores.program import File, Listing
from nodeready.node.proofs import mesh
from nodeready.ready.run import run_mesh
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof.facts import Mesh
from nodeready.transport.base import Answer, Channel, Reply, Request
from tests.builders.hostile import envelope, look, recorded
from tests.builders.traces import LOAD, REDUCE, process
from tests.builders.traces import trace as made
from tests.fake import Does, Fake
from tests.unit.commands import program
from tests.unit.fuzz.alone import alone

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


def spoil(text: str, value: str) -> str:
    """The JSON text with this in place of each of some values, one row for each of them."""
    return text.replace('"@"', value)


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 1)).decode()


FILE = File("/c/core.1", 1, 7, 5, 0, 0.5, "", "", 4711, 11)
LISTING = Listing(("/c/*",), (FILE,))
CORE = cores.Core(0, pid=4711, signal=11, user="ada", comm="sh", text=packed("#0 f () at a.c:3"))


def cores_node(listing: str, core: str) -> Does:
    def said(nonce: str) -> str:
        return f"{nonce} listing {listing}\n{nonce} core {core}\n{nonce} done {DONE}\n"

    return program(said)


DONE = json.dumps(asdict(cores.Done(1, 0)))
TAIL = {
    "host": "x", "unread": [], "left_out": 0, "older": 0, "error": "",
    "files": [{"path": "/log/rank_1.log", "size_bytes": 9, "mtime_s": 1.6e9, "age_s": 5.0,
               "lines": ["step 1"], "matches": None,
               "reports": [{"rank": 1, "group": "tp", "kind": "timeout", "sequence": 7,
                            "operation": "ALLREDUCE", "enqueued": 9, "completed": 6}]}],
}  # fmt: skip


def tail_node(text: str) -> Does:
    return program(lambda nonce: f'{nonce} tail "{packed(text)}"\n')


def stacks_node(text: str) -> Does:
    return program(lambda nonce: f"{nonce} trace {packed(text)}\n")


def doc(rank: int) -> dict[str, Any]:
    return made("itself", process(rank, REDUCE, LOAD))


def with_marks(data: Any) -> list[str]:
    """The JSON texts of this data in each of which one value is marked."""
    texts = []

    def walk(place: Any) -> None:
        for key in list(place) if isinstance(place, dict) else range(min(len(place), 2)):
            before, place[key] = place[key], "@"
            texts.append(json.dumps(data))
            place[key] = before
            if isinstance(before, (dict, list)):
                walk(before)

    walk(data)
    return texts


def plainly(row: Any) -> Any:
    return json.loads(json.dumps(asdict(row)))


def hostile_cores(value: str) -> list[Does]:
    listing = plainly(replace(LISTING, files=(replace(FILE, inode=9),)))
    good, core = json.dumps(listing), json.dumps(plainly(CORE))
    found = [cores_node(spoil(text, value), core) for text in with_marks(listing)]
    return found + [cores_node(good, spoil(text, value)) for text in with_marks(plainly(CORE))]


#: command -> its words, a sound node, and nodes with this in place of a value.
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[int], Does], Callable[[str], list[Does]]]] = {
    "cores": (
        ("cores", "--format", "json"),
        lambda number: cores_node(
            json.dumps(plainly(replace(LISTING, files=(replace(FILE, inode=number),)))),
            json.dumps(plainly(CORE)),
        ),
        hostile_cores,
    ),
    "tail": (
        ("tail", "/log/*", "--format", "json"),
        lambda number: tail_node(json.dumps(TAIL)),
        lambda value: [tail_node(spoil(text, value)) for text in with_marks(TAIL)],
    ),
    "stacks": (
        ("stacks", "--format", "json"),
        lambda number: stacks_node(json.dumps(doc(number))),
        lambda value: [stacks_node(spoil(text, value)) for text in with_marks(doc(9))],
    ),
}


def rows_of(name: str, told: dict[str, Any]) -> Any:
    """What the document says of the sound nodes."""
    good = {"good1", "good2"}
    if name == "cores":
        return [c for c in told["cores"] if c["node"] in good]
    if name == "tail":
        return sorted(
            (f["node"], f["path"], f["size_bytes"]) for g in told["groups"] for f in g["files"]
            if f["node"] in good
        )  # fmt: skip
    if name == "stacks":
        return sorted(
            (p["node"], p["pid"], p["state"]) for p in told["processes"] if p["node"] in good
        )
    return [node for node in told["nodes"] if node["name"] in good]


def told(run: Any, nodes: dict[str, Does], words: tuple[str, ...]) -> tuple[int, str]:
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
    return done.code, done.out


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_node_whose_program_answers_nonsense_costs_itself(
    run: Any, name: str, kind: str
) -> None:
    words, good, bad = PROGRAMS[name]
    sound = {"good1": good(1), "bad": good(2), "good2": good(3)}
    _, out = told(run, sound, words)
    wanted = rows_of(name, json.loads(out))
    assert wanted

    def all_of_them() -> None:
        for node in bad(VALUES[kind])[:: 1 if len(VALUES[kind]) < 100_000 else 7]:
            _, said = told(run, {**sound, "bad": node}, words)
            assert rows_of(name, json.loads(said)) == wanted

    ended = alone(all_of_them, 60, 2 * GROWN_BYTES)
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
            return Reply(look({name: change(text) for name, text in SOUND.items()}, nonce))
        return Reply(change("a=1\n"), change("nodeready: no\n"), rc=1)

    return does


SOUND = recorded("h100")


def whole(request: Request) -> Answer:
    nonce = request.mark.rpartition(" ")[2]
    return Reply(look(SOUND, nonce)) if request.mark else Reply("")


def bomb(request: Request) -> Answer:
    text = base64.b64encode(b"A" * (12 << 20)).decode()
    return Reply(envelope(text, request.mark.rpartition(" ")[2]))


def zeros(request: Request) -> Answer:
    return Reply(look({"host": "\0" * (64 << 20)}, request.mark.rpartition(" ")[2]))


LOOKS = {
    "audit": ("audit", "--format", "json"),
    "audit table": ("audit", "-v"),
    "ready": ("ready", "--only", "limits,host,gpus,rdma,nics", "--format", "json"),
    "deploy": ("deploy", "--check", "--diff"),
    "env": ("env",),
    "learn": ("learn",),
}


def results(out: str) -> dict[str, list[str]]:
    """Every result of the sound nodes, but for the known hosts, which have every node's keys."""
    return {
        node["name"]: [
            json.dumps(one) for one in node["results"] if one["check"] != "ssh_client.known_hosts"
        ]
        for node in json.loads(out)["nodes"]
        if node["name"] != "bad"
    }


#: In CI an audit meets them all, each other command a fourth of them.
PAIRS = [
    (name, kind)
    for first, name in enumerate(LOOKS)
    for second, kind in enumerate(WORDS)
    if name == "audit" or "NODEREADY_FUZZ" in os.environ or (first + second) % 4 == 0
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_node_whose_look_is_nonsense_costs_itself(run: Any, name: str, kind: str) -> None:
    words, word = LOOKS[name], WORDS[kind]
    sound = {"good1": whole, "bad": whole, "good2": whole}
    wanted = results(told(run, sound, words)[1]) if "json" in words else None

    def all_of_them() -> None:
        for node in (liar(lambda text: in_values(text, word)), liar(lambda text: word)):
            _, said = told(run, {**sound, "bad": node}, words)
            if wanted is not None:
                found = results(said)
                assert found.keys() == wanted.keys()
                for good in wanted:
                    pairs = zip(found[good], wanted[good], strict=True)
                    assert [pair for pair in pairs if pair[0] != pair[1]] == []

    ended = alone(all_of_them, 60, 2 * GROWN_BYTES)
    assert ended.status == 0, ended.said[-3000:]
    assert ended.grown_bytes < GROWN_BYTES


@pytest.mark.parametrize("node", [bomb, zeros], ids=["noise", "a bomb"])
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_that_would_fill_the_memory_is_cut_off(run: Any, name: str, node: Does) -> None:
    nodes = {"good1": whole, "bad": node, "good2": whole}
    ended = alone(lambda: told(run, nodes, LOOKS[name]), 60, 2 * GROWN_BYTES)
    assert ended.status == 0, ended.said[-3000:]


class Peer(Channel):
    """A node of the mesh that reaches every other at once. says: its answer to every round."""

    error = ""

    def __init__(self, name: str, says: str | None = None, first: str | None = None) -> None:
        self.name, self.says, self.nonce, self.begun = name, says, "", False
        row = mesh.Listening(name, (29500,), (), (ADDRESSES[name],))
        self.lines = [first or f"listening {json.dumps(asdict(row))}"]

    def send_line(self, line: str) -> None:
        asked = json.loads(line)
        address = ADDRESSES[asked["target"]]
        tried = tuple(mesh.Try(port, mesh.OK, 0.5, "") for port in asked["ports"])
        seen = mesh.Round(asked["round"], asked["target"], (address,), "", address, tried, 1)
        self.lines.append(self.says or f"round {json.dumps(asdict(seen))}")

    def read_line(self, limit_s: float) -> str | None:
        return f"{self.nonce} {self.lines.pop(0)}" if self.lines else None

    def close(self) -> None:
        return


ADDRESSES = {"good1": "10.0.0.1", "bad": "10.0.0.2", "good2": "10.0.0.3"}


class Meshed(Fake):
    """Nodes that are spoken with, each by the nonce that it was told."""

    def open(self, request: Request) -> Channel:
        found = super().open(request)
        found.nonce = request.mark  # type: ignore[attr-defined]
        return found


def meshed(bad: Peer) -> dict[str, Any]:
    channels: dict[str, Channel] = {name: Peer(name) for name in ADDRESSES}
    channels["bad"] = bad
    carrier = Meshed(dict.fromkeys(ADDRESSES, whole), channels)
    return run_mesh(carrier, ADDRESSES, (29500, 29500), time.monotonic() + 30)


@pytest.mark.parametrize("kind", VALUES)
def test_a_node_that_says_nonsense_in_the_mesh_is_out_of_it(kind: str) -> None:
    """The others' rows are as if it had been silent from the same moment on."""
    value = VALUES[kind][: 250 << 10]
    quiet = {"a first line": meshed(Peer("bad", first="listening {}"))}
    quiet["a round"] = meshed(Peer("bad", says="round {}"))
    assert all(isinstance(one["good1"], Mesh) for one in quiet.values())
    spoilt = {
        "a first line": Peer("bad", first=f"listening {value}"),
        "a round": Peer("bad", says=f"round {value}"),
    }
    for when, bad in spoilt.items():
        found = meshed(bad)
        assert isinstance(found["bad"], Unknown)
        assert "makes no sense" in found["bad"].reason
        assert found["good1"] == quiet[when]["good1"]
        assert found["good2"] == quiet[when]["good2"]
