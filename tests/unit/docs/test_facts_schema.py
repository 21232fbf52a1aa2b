"""docs/schema/facts-1.json: every key of every fact has its meaning there."""

import json
import typing

import make_docs
import pytest
from jsonschema import Draft202012Validator

from nodeready.core.json_types import json_fields
from nodeready.core.policy import Policy
from nodeready.core.wire import plain
from nodeready.reports.schema import meanings
from nodeready.subjects.registry import LOOKED_AT
from nodeready.subjects.snapshot import shown_facts
from tests.helpers import here, observe
from tests.paths import schema


def classes():
    found = {}
    todo = [kind for subject in LOOKED_AT for kind in make_docs.observations(subject)]
    while todo:
        kind = todo.pop()
        todo += typing.get_args(kind)
        if kind not in found and (json_fields(kind) or typing.is_typeddict(kind)):
            found[kind] = None
            todo += typing.get_type_hints(kind).values()
    return list(found)


CLASSES = sorted(classes(), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_of_a_fact_is_described_in_its_docstring(kind):
    names = [field.path for field in json_fields(kind)] or [*typing.get_type_hints(kind)]
    assert [name for name in names if not meanings(kind)[1].get(name)] == []


def test_each_class_has_a_name_of_its_own():
    assert len({kind.__name__.lower() for kind in CLASSES}) == len(CLASSES)


def test_the_facts_of_this_machine_are_valid():
    snapshot = observe(here, Policy())
    subjects = snapshot.subjects
    facts = {name: plain(shown_facts(name, subjects[name])) for name in LOOKED_AT}
    valid = Draft202012Validator(schema("facts"))
    assert list(valid.iter_errors(json.loads(json.dumps(facts)))) == []
