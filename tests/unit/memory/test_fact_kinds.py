"""The kind of each fact: data/fact_kinds.txt, so that the kind of a new fact is chosen.

For a deliberate change: NODEREADY_GOLDEN=write .venv/bin/python -m pytest
tests/unit/memory/test_fact_kinds.py, then read the difference.
"""

import dataclasses
import os
import sys
import types
import typing
from collections import defaultdict
from pathlib import Path

import pytest

from nodeready.core.wire import shown_keys
from nodeready.runs.memory.look import compared_facts, is_unique, kind_of, shown_value
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.registry import SUBJECTS
from tests.cases import cases, with_table

GOLDEN = Path(__file__).parent / "data/fact_kinds.txt"


def observed_type(subject):
    """What a subject's parser returns; the proofs have none."""
    if subject.probe is None:
        return Proved
    parse = subject.probe.parse
    return eval(parse.__annotations__["return"], vars(sys.modules[parse.__module__]))


def derived_facts(subject):
    """The names of the subject's facts that need the fleet."""
    derived = subject.derived
    returned = eval(derived.__annotations__["return"], vars(sys.modules[derived.__module__]))
    return [*typing.get_type_hints(returned)] if typing.is_typeddict(returned) else []


def paths(subject, kind, path=""):
    """(path, whether it is of a list or mapping of objects) of each fact of a type.

    A volatile fact stands for all facts below it.
    """
    origin = typing.get_origin(kind)
    if path and kind_of(f"{subject}.{path}") == "volatile":
        yield path, False
    elif dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, localns=vars(sys.modules[kind.__module__]))
        for name, key in shown_keys(kind).items():
            yield from paths(subject, hints[name], f"{path}.{key}" if path else key)
    elif origin is typing.Annotated:
        yield from paths(subject, typing.get_args(kind)[0], path)
    elif origin is typing.Union or isinstance(kind, types.UnionType):
        for inner in typing.get_args(kind):
            yield from paths(subject, inner, path)
    elif origin is not None:
        inner = [type_ for type_ in typing.get_args(kind) if dataclasses.is_dataclass(type_)]
        yield path, bool(inner) or origin not in (tuple, list)
        for type_ in inner:
            yield from paths(subject, type_, path)
    else:
        yield path, False


def test_each_fact_has_a_kind():
    lines = []
    for name, subject in SUBJECTS.items():
        shown: dict[str, set[str]] = defaultdict(set)
        used = set()
        every = {
            *paths(name, observed_type(subject)),
            *((key, False) for key in derived_facts(subject)),
        }
        for path, is_collection in every:
            kind, unique = kind_of(f"{name}.{path}"), is_unique(f"{name}.{path}")
            if path in subject.kinds.elements:
                kind, used = f"elements by {subject.kinds.elements[path]!r}", {*used, path}
            elif is_collection and kind != "volatile":
                kind = f"{kind}, one text"
            shown[f"{kind}, unique" if unique and kind != "volatile" else kind].add(path)
        assert used == {*subject.kinds.elements}, f"{name}: no such list or mapping"
        for kind in sorted(shown):
            lines.append(f"{name}: {kind}: {' '.join(sorted(shown[kind]))}")
    text = "\n".join(lines) + "\n"
    if os.environ.get("NODEREADY_GOLDEN") == "write" and text != GOLDEN.read_text():
        GOLDEN.write_text(text)
        pytest.fail("the kinds are written anew: read the difference")
    assert text == GOLDEN.read_text()


@with_table("key, value, words")
def test_a_value_is_shown_as_administrators_write_it(key, value, words):
    assert shown_value(key, value) == words


def test_known_hosts_are_a_count():
    def value(*keys):
        lines = [f"gpu{number} ssh-ed25519 {key}" for number, key in enumerate(keys)]
        facts = {"known_hosts": {"lines": lines, "digest": "".join(keys), "content": "9 bytes"}}
        ((key, text),) = compared_facts("ssh_client", facts).stable.items()
        assert (key, text[:3]) == ("ssh_client.known_hosts.lines", f"{len(keys)} (")
        return text

    assert value("A", "B") == value("A", "B") != value("A", "C")


@pytest.mark.parametrize("case", cases(__file__, "data/compared_facts.json"))
def test_the_names_of_facts(case):
    facts = compared_facts(case["subject"], case["facts"])
    assert (facts.stable, facts.counters) == (case["stable"], case["counters"])


def test_a_long_value_is_bounded():
    assert len(compared_facts("gpus", {"driver": "9" * 500}).stable["gpus.driver"]) < 410
