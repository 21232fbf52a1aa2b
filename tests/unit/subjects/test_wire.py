"""Observations as lines: what the program prints is what is read, and nothing else is believed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nodeready.node.proofs.session import Broken
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError, Unknown
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import UNFINISHED, User
from tests.builders.proof import LIMITS, WELL, configured

NONCE = "nodeready-0123"


@dataclass(frozen=True)
class Inner:
    text: str


@dataclass(frozen=True)
class Outer:
    number: int
    real: float
    flag: bool
    maybe: Inner | None
    many: tuple[Inner, ...]


SEEN = Outer(1, 0.5, True, Inner("a\n\x1b[31m \udcff é"), (Inner(""), Inner("b")))
DATA = {"number": 1, "real": 2, "flag": False, "maybe": None, "many": []}


@pytest.mark.parametrize("seen", [SEEN, Outer(0, 1.0, False, None, ()), WELL.attach, LIMITS])
def test_what_was_seen_is_what_is_read(seen):
    line = wire.line(NONCE, "name", seen)
    assert "\n" not in line
    assert [(n, wire.decode(type(seen), d)) for n, d in wire.lines(line, NONCE)] == [
        ("name", seen)
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("welcome to the cluster\n", []),
        (f"motd without end of line{NONCE} a {{}}\n", ["a"]),
        (f"{NONCE} a {{}}\nnoise\n{NONCE} b [1]\n", ["a", "b"]),
        (f"{NONCE}\n{NONCE} \n{NONCE} a\n{NONCE} ../a {{}}\n{NONCE} cut {{", []),
        ("nodeready-9999 a {}\n", []),
        (f"{NONCE} a {'[' * 100_000}\n{NONCE} b {{}}\n", ["a", "b"]),
    ],
    ids=["nothing", "noise", "half a line", "between noise", "malformed", "forged", "deep"],
)
def test_lines(text, names):
    assert [name for name, _ in wire.lines(text, NONCE)] == names


@pytest.mark.parametrize(
    "change",
    [
        {"number": "1"},
        {"number": True},
        {"number": None},
        {"number": 1.5},
        {"real": "nan"},
        {"flag": 1},
        {"maybe": {"text": 1}},
        {"maybe": {"text": "", "more": ""}},
        {"maybe": "text"},
        {"many": {}},
        {"many": [None]},
        {"more": 1},
    ],
    ids=repr,
)
def test_what_has_another_shape_is_refused(change):
    assert wire.decode(Outer, DATA).real == 2
    with pytest.raises(ProbeError, match="makes no sense"):
        wire.decode(Outer, {**DATA, **change})


@pytest.mark.parametrize("data", [None, [], 1, "text", {}, {"__class__": "Outer"}])
def test_what_is_no_observation_is_refused(data):
    with pytest.raises(ProbeError, match="makes no sense"):
        wire.decode(Outer, data)


def test_an_answer_is_read_as_far_as_it_came():
    config = configured()
    user = User("ml", 2000, True, "")
    rows = [
        wire.line(config.nonce, "user", user),
        # A second one, as if a user had guessed the nonce, changes nothing.
        wire.line(config.nonce, "user", User("root", 0, True, "")),
        wire.line(config.nonce, "attach", Broken("KeyError: 'x' (attach.py:1)")),
        f'{config.nonce} limits {{"core": 1}}',
        wire.line(config.nonce, "what", user),
    ]
    seen = proved.read("\n".join(rows), config)
    assert seen.user == user
    assert seen.attach == Unknown("ended with an error", "KeyError: 'x' (attach.py:1)")
    assert isinstance(seen.limits, Unknown)
    assert seen.limits.evidence == "{'core': 1}"
    assert seen.tracers == Unknown(UNFINISHED)
    assert (seen.control, seen.core) == (None, None)


def test_without_a_session_nothing_else_is_read():
    config = configured()
    rows = [
        wire.line(config.nonce, "user", User("x", -1, True, "no such user: x")),
        wire.line(config.nonce, "limits", LIMITS),
    ]
    seen = proved.read("\n".join(rows), config)
    assert (seen.limits, seen.attach) == (None, None)
