"""Observations as lines: what the program prints is what is read, and nothing else is believed.

What a node prints is opened within bounds: bytes, memory, depth, keys, numbers, texts.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from dataclasses import dataclass
from typing import Any

import pytest

from nodeready.agent.proofs.session import BrokenProof
from nodeready.core import wire
from nodeready.core.base import Unknown
from nodeready.core.wire import DecodeError, decode, lines, load_json, unpack
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import UNFINISHED, User
from tests.builders.proof import LIMITS, WELL, configured
from tests.cases import read_table

NONCE = "nodeready-0123"


@dataclass(frozen=True)
class Inner:
    port: wire.Port
    text: str = ""


@dataclass(frozen=True)
class Row:
    pid: wire.Pid
    port: wire.Port | None
    count: wire.Count
    after_s: wire.Seconds
    name: wire.Name
    size: int
    share: float
    text: str
    flag: bool
    maybe: Inner | None
    many: tuple[Inner, ...]


GOOD: dict[str, Any] = {
    "pid": 1, "port": None, "count": 0, "after_s": 0.5, "name": "n", "size": -1, "share": 2,
    "text": "", "flag": False, "maybe": None, "many": [{"port": 65535, "text": ""}],
}  # fmt: skip
TEXT = Inner(0, "a\n\x1b[31m \udcff é")
FULL = Row(1 << 22, 65535, (1 << 31) - 1, 0.5, "x" * 1024, 1 << 64, 0.5, "", True, TEXT, (TEXT,))


@pytest.mark.parametrize("observed", [FULL, WELL.attach, LIMITS], ids=["all", "attach", "limits"])
def test_what_was_seen_is_what_is_read(observed):
    line = wire.line(NONCE, "name", observed)
    assert "\n" not in line
    decoded = [(name, decode(type(observed), data)) for name, data in lines(line, NONCE)]
    assert decoded == [("name", observed)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("welcome to the cluster\n", []),
        (f"motd without end of line{NONCE} a {{}}\n", ["a"]),
        (f"{NONCE} a {{}}\nnoise\n{NONCE} b [1]\n", ["a", "b"]),
        (f"{NONCE}\n{NONCE} \n{NONCE} a\n{NONCE} ../a {{}}\n{NONCE} cut {{", []),
        ("nodeready-9999 a {}\n", []),
    ],
    ids=["nothing", "noise", "half a line", "between noise", "malformed", "forged"],
)
def test_lines(text, names):
    assert [name for name, _ in lines(text, NONCE)] == names


@pytest.mark.parametrize("change", [
    {"pid": -1}, {"pid": (1 << 22) + 1}, {"pid": 1.0}, {"pid": True}, {"pid": "1"},
    {"pid": None}, {"port": 65536}, {"count": -1}, {"count": 1 << 31}, {"after_s": -0.1},
    {"after_s": float("nan")}, {"after_s": float("inf")}, {"after_s": 10**400},
    {"after_s": True}, {"name": "x" * 1025}, {"size": (1 << 64) + 1}, {"size": 1.5},
    {"share": 1e300}, {"share": "nan"}, {"flag": 1}, {"text": "x" * 65537}, {"text": None},
    {"maybe": {"text": 1}}, {"maybe": {"port": 1, "text": "", "more": ""}}, {"maybe": "text"},
    {"many": [{"port": -1}]}, {"many": {"port": 1}}, {"many": [[]]}, {"many": [None]},
    {"more": 1},
], ids=lambda change: repr(change)[:30])  # fmt: skip
def test_a_value_that_its_field_cannot_have_is_refused(change):
    assert decode(Row, GOOD).many == (Inner(65535),)
    (field,) = change
    with pytest.raises(DecodeError, match="makes no sense") as problem:
        decode(Row, {**GOOD, **change})
    assert len(str(problem.value)) + len(problem.value.evidence) < 400
    assert any(words in str(problem.value) for words in (field, "no Inner", "no Row"))
    for data in (None, [], "text", {"__class__": "Row"}):
        with pytest.raises(DecodeError, match="makes no sense"):
            decode(Row, data)


def test_an_answer_is_read_as_far_as_it_came():
    config = configured()
    user = User("ml", 2000, True, "")
    rows = [
        wire.line(config.nonce, "user", user),
        # A second one, as if a user had guessed the nonce, changes nothing.
        wire.line(config.nonce, "user", User("root", 0, True, "")),
        wire.line(config.nonce, "attach", BrokenProof("KeyError: 'x' (attach.py:1)")),
        f'{config.nonce} limits {{"core": 1}}',
        wire.line(config.nonce, "what", user),
    ]
    observed = proved.read("\n".join(rows), config)
    assert observed.user == user
    assert observed.attach == Unknown("ended with an error", "KeyError: 'x' (attach.py:1)")
    assert isinstance(observed.limits, Unknown)
    assert observed.limits.evidence == "{'core': 1}"
    assert observed.tracers == Unknown(UNFINISHED)
    assert (observed.control, observed.core) == (None, None)


def test_without_a_session_nothing_else_is_read():
    config = configured()
    rows = [
        wire.line(config.nonce, "user", User("x", -1, True, "no such user: x")),
        wire.line(config.nonce, "limits", LIMITS),
    ]
    observed = proved.read("\n".join(rows), config)
    assert (observed.limits, observed.attach) == (None, None)


def packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


def test_what_is_ours_comes_back():
    raw = b'{"a": [1, 2.5, "x \\udcff", null, 18446744073709551615]}'
    wanted = {"a": [1, 2.5, "x \udcff", None, (1 << 64) - 1]}
    assert load_json(unpack(packed(raw), 100)) == wanted
    assert load_json(unpack(base64.b64encode(gzip.compress(raw)).decode(), 100)) == wanted


@pytest.mark.parametrize(("text", "what"), [
    ("!", "damaged"),
    ("", "cut off"),
    ("eHh4", "damaged"),
    (packed(b"x" * 101), "more than"),
    (packed(b"x" * 50)[:-8], "cut off"),
    (packed(bytes(99 << 20)), "more than"),
], ids=["no base64", "empty", "no zlib", "too large", "cut off", "a bomb"])  # fmt: skip
def test_what_is_packed_wrong_is_refused(text, what):
    with pytest.raises(DecodeError, match=what):
        unpack(text, 100)


@pytest.mark.parametrize(("text", "what"), [
    *read_table(__file__, "no_json"),
    ("1" + "0" * 400, "too large|is no number"),
    ("9" * 100_000, "too large|is no number"),
    (str(1 << 70), "too large|is no number"),
    ("[" * 100_000, "nested too deep"),
    ("[" * (wire.MAX_DEPTH + 1) + "]" * (wire.MAX_DEPTH + 1), "nested too deep"),
    ('{"a":' * 100_000, "nested too deep"),
    (b"\xff\xfe{", "no UTF-8"),
], ids=range(15))  # fmt: skip
def test_what_makes_no_sense_is_refused(text, what):
    with pytest.raises(DecodeError, match=what):
        load_json(text)


#: Texts, as JSON, of which each could be taken for a bracket, a colon or the end of a text.
HIDING = (
    '"]"', '"}"', '"["', '":"', r'"\""', r'"\\"', r'"\\\"]"', '"]","]"', '"","]"', r'"]\\","]"',
)  # fmt: skip


@pytest.mark.parametrize("hides", HIDING)
@pytest.mark.parametrize(("text", "what"), [
    ("[TEXT, " * wire.MAX_DEPTH + "[1]" + "]" * wire.MAX_DEPTH, "nested too deep"),
    ('[TEXT, {"a": 1, "b": 2, "a": 3}]', "twice"),
    ('[TEXT, {"a" : 1, "a" : {":": 2}}]', "twice"),
    ("[TEXT, 123456789012345678901]", "too large|is no number"),
], ids=["deep", "twice", "twice, apart", "large"])  # fmt: skip
def test_no_text_hides_what_stands_beside_it(hides, text, what):
    with pytest.raises(DecodeError, match=what):
        load_json(text.replace("TEXT", hides))


def test_texts_with_brackets_and_colons_are_texts():
    wanted = ["[", "]" * 99, '":', "\\", '\\"', {"a:": "{", "[": {":": "9" * 30}}, "", '"', [""]]
    assert load_json(json.dumps(wanted)) == wanted


@pytest.mark.parametrize("piece", ["[],", "[[", "{},", '{"":0},', "0,", '"",', "[[[]]],"])
def test_what_would_fill_the_memory_is_never_made(piece, monkeypatch):
    """The parser is not even called."""
    text = "[" + piece * (wire.MAX_COST // (20 * len(piece)))
    monkeypatch.setattr(wire, "_DECODER", None)
    with pytest.raises(DecodeError, match="too many members"):
        load_json(text)
    with pytest.raises(DecodeError, match="too many members"):
        list(lines(f"N a {text}\n", "N"))


def test_a_line_that_makes_no_sense_costs_itself():
    good = json.dumps(GOOD)
    text = f"N a {'[' * 100_000}\nN b {good}\nN c NaN\nN d {good[:-9]}"
    rows = dict(lines(text, "N"))
    assert list(rows) == ["a", "b", "c"]
    assert decode(Row, rows["b"]).pid == 1
    for name, why in (("a", "nested too deep"), ("c", "NaN is no number")):
        with pytest.raises(DecodeError, match=why):
            decode(Row, rows[name])
