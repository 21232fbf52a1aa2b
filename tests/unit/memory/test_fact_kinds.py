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
from tests.cases import read_table

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


FACTS = {
    "nvidia": [
        {"pci_address": "0000:1a:00.0", "serial": "16]5", "temperature_c": 41, "processes": [{}]},
        {"pci_address": "0000:[bad]", "serial": None, "vbios": "", "links": []},
    ],
    "kernel_faults": [
        {"source": "xid", "code": 79, "pci_address": "0000:1a:00.0", "text": "a", "count": 2},
        {"source": "xid", "code": 79, "pci_address": "0000:1a:00.0", "text": "b", "count": 3},
    ],
    "driver": "9" * 500,
    "nvidia_tool": {"name": "nvidia-smi", "state": "ok", "detail": "580.65.06"},
}


@pytest.mark.parametrize(
    ("key", "value", "words"), read_table(__file__, "a_value_is_shown_as_administrators_write_it")
)
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


def test_the_facts_have_stable_names():
    facts, counters = compared_facts("gpus", FACTS)
    assert len(facts.pop("gpus.driver")) < 410
    assert facts == {
        "gpus.nvidia[0000:1a:00.0].pci_address": "0000:1a:00.0",
        "gpus.nvidia[0000:1a:00.0].serial": "16]5",
        "gpus.nvidia[0000:(bad)].pci_address": "0000:[bad]",
        "gpus.nvidia_tool.name": "nvidia-smi",
        "gpus.nvidia_tool.state": "ok",
    }
    assert counters == {
        "gpus.xid 79 0000:1a:00.0.count": 2,
        "gpus.xid 79 0000:1a:00.0#2.count": 3,
    }


def test_equal_elements_are_one():
    processes = [
        {"service": "sshd", "pid": pid, "limits": {"core": [0, hard]}}
        for pid, hard in ((1, 5), (2, 5), (3, 6))
    ]
    assert compared_facts("limits", {"running": processes}).stable == {
        "limits.running[sshd].service": "sshd",
        "limits.running[sshd].limits[core]": "0, 5",
        "limits.running[sshd#2].service": "sshd",
        "limits.running[sshd#2].limits[core]": "0, 6",
    }


def test_a_subject_that_was_not_observed_has_no_facts():
    assert compared_facts("nics", {"unknown": "timed out"}).stable == {}
