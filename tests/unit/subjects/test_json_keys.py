"""The keys of the facts in JSON, which readers of reports rely on: data/json_keys.txt.

For a deliberate change: NODEREADY_GOLDEN=write .venv/bin/python -m pytest
tests/unit/subjects/test_json_keys.py, then read the difference.
"""

import dataclasses
import os
import sys
import types
import typing
from pathlib import Path
from types import MappingProxyType

import pytest

from nodeready.core.wire import shown_keys
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.registry import SUBJECTS

GOLDEN = Path(__file__).parent / "data/json_keys.txt"


def observed_type(subject):
    """What a subject's parser returns; the proofs have none."""
    if subject.probe is None:
        return Proved
    parse = subject.probe.parse
    return eval(parse.__annotations__["return"], vars(sys.modules[parse.__module__]))


def derived_facts(subject):
    """The facts of the subject that need the fleet, by name, with their types."""
    derived = subject.derived
    returned = eval(derived.__annotations__["return"], vars(sys.modules[derived.__module__]))
    return typing.get_type_hints(returned) if typing.is_typeddict(returned) else {}


def rows(kind, path, seen, derived=MappingProxyType({})):
    """``PATH: keys`` of each dataclass within a type, where it stands first."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        yield from rows(typing.get_args(kind)[0], path, seen)
    elif origin is not None or isinstance(kind, types.UnionType):
        for inner in typing.get_args(kind):
            yield from rows(inner, path, seen)
    elif dataclasses.is_dataclass(kind) and kind not in seen:
        seen.add(kind)
        keys = {**shown_keys(kind), **{name: name for name in derived}}
        yield f"{path}: {' '.join(sorted(keys.values()))}"
        hints = typing.get_type_hints(kind, localns=vars(sys.modules[kind.__module__]))
        hints |= derived
        for name, key in sorted(keys.items(), key=lambda item: item[1]):
            yield from rows(hints[name], f"{path}.{key}", seen)


def test_the_keys_of_the_facts_stay():
    seen: set[type] = set()
    lines = [
        line
        for name, subject in SUBJECTS.items()
        for line in rows(observed_type(subject), name, seen, derived_facts(subject))
    ]
    text = "\n".join(lines) + "\n"
    if os.environ.get("NODEREADY_GOLDEN") == "write" and text != GOLDEN.read_text():
        GOLDEN.write_text(text)
        pytest.fail("the keys are written anew: read the difference")
    known = GOLDEN.read_text().splitlines()
    changed = [line for line in (*lines, *known) if (line in lines) != (line in known)]
    assert not changed, f"data/json_keys.txt: {changed[0]} (its change: see above)"
