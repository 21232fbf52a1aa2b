"""Secrets are left out by their name, their form and their place; all else is kept as it was."""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from nodeready.agent.secrets import LEFT_OUT, redact, redacted

#: A secret stands between « and ».
TEXTS = [
    (variable, text)
    for row in json.loads(Path(__file__).with_name("cases").joinpath("redact.json").read_text())
    for variable, text in [
        *((row.get("variable", ""), text) for text in row.get("texts", ())),
        *(text.split("=", 1) for text in row.get("variables", ())),
    ]
]
S = "s3cr3tvalue"


@pytest.mark.parametrize(("variable", "text"), TEXTS)
def test_of_a_text_the_secrets_are_left_out(variable, text):
    expected = re.sub("«.*?»", LEFT_OUT, text, flags=re.DOTALL)
    assert redact(variable, re.sub("[«»]", "", text)) == expected
    assert redact("", expected) == expected


HARMLESS = ["a" * 50_000, "step=" * 30_000, "name: '" * 9_000, "--" * 50_000, "--x " * 50_000]


@pytest.mark.parametrize("text", HARMLESS, ids=lambda text: text[:8])
def test_a_long_text_without_a_secret_is_kept_whole(text):
    assert redact("x", text) == text


SLOW = [
    *("a_" * 20_000 + "=x", "token " * 10_000, "https://" + "a" * 60_000, "eyJ" * 20_000),
    *("-----BEGIN PRIVATE KEY-----" * 2000, "pass-" * 10_000, "'" * 60_000 + "token"),
    *("token='" + "\\" * 60_000, "curl " * 12_000, "mysql -u " * 9000, "$1$" * 20_000),
]


@pytest.mark.parametrize("text", SLOW, ids=lambda text: text[:12])
def test_no_text_makes_it_slow(text):
    """Each of these would take hours where one repetition is inside of another."""
    assert len(redact("", text)) < 100_000


class Frame(NamedTuple):
    function: str
    line: int


@dataclasses.dataclass(frozen=True)
class Process:
    frames: tuple[Frame, ...]
    more: dict[str, object]
    rank: int | None = None


def test_a_document_keeps_its_shape():
    def document(secret: str) -> Process:
        more = {"api_key": secret, "lr": 0.1, "env": [f"train --token {secret}", None, 7]}
        return Process((Frame(f"password={secret}", 3),), more, 3)

    assert redacted(document(S)) == document(LEFT_OUT)
    # A private key in lines of its own has no line left.
    key = ["-----BEGIN OPENSSH PRIVATE KEY-----", S, f"{S}=", "-----END OPENSSH PRIVATE KEY-----"]
    assert redacted(["loading", *key, "step 1"]) == ["loading", *[LEFT_OUT] * 4, "step 1"]
    # A text grows no longer than a trace can hold.
    assert len(redacted("a" * 4080 + " token=abc")) <= 4096
