"""The schemas of the documents: generated, strict, and valid for real documents."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from nodeready.audit.document import Ready
from nodeready.reports import schema
from nodeready.reports.registry import FORMATS, Options, find
from nodeready.text import sanitise
from tests.builders.deploys import DEPLOYS
from tests.builders.environments import ENVIRONMENTS
from tests.builders.fleets import fleet, outcomes
from tests.builders.stack_fleets import FLEETS as STACKS
from tests.cases import cases
from tests.paths import DOCS
from tests.unit.reports.test_smoke_table import SMOKES
from tests.unit.triage.test_cores import FULL as CORES
from tests.unit.triage.test_stacks_debuggable import judged, rank

AUDITS = outcomes()
MADE: dict[str, dict[str, Any]] = {
    "audit": {**AUDITS, "fleet": fleet(40)},
    "ready": {name: Ready(audit, 60, 2) for name, audit in AUDITS.items()},
    "deploy": {name: make() for name, make in DEPLOYS.items()},
    "stacks": {name: make() for name, make in STACKS.items()},
    "cores": {"full": CORES},
    "env": ENVIRONMENTS,
    "smoke": dict(SMOKES),
    "debuggable": {"mixed": judged(rank(0), rank(1, main=None), rank(None))},
}
CASES = [(document, name) for document, found in MADE.items() for name in found]


def valid(document: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema.schema(document))


def read(document: str, name: str) -> dict[str, Any]:
    text = "".join(find(document, "json").render(MADE[document][name], Options(diff=True)))
    return json.loads(text)


@pytest.mark.parametrize("document", schema.DOCUMENTS)
def test_the_file_is_generated_from_the_dataclasses(document):
    path = DOCS / "schema" / f"{document}-1.json"
    assert path.read_text() == schema.text(document), "run scripts/make_docs.py"
    made = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["$id"] == f"urn:nodeready:{document}:1"
    assert made["properties"]["schema"] == {"const": f"nodeready.{document}/1"}


def test_every_document_has_a_json_format_and_a_schema():
    assert set(schema.DOCUMENTS) == {name for name, rows in FORMATS.items() if "json" in rows}


@pytest.mark.parametrize(("document", "name"), CASES)
def test_a_real_document_is_valid(document, name):
    text = "".join(find(document, "json").render(MADE[document][name], Options(diff=True)))
    made = json.loads(text)
    valid(document).validate(made)
    nodes = getattr(MADE[document][name], "nodes", ())
    if nodes and hasattr(nodes[0], "name"):
        assert [node["name"] for node in made["nodes"]] == [sanitise(node.name) for node in nodes]


def objects(node: Any, whole: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a document of which the schema lists the fields."""
    while "$ref" in part:
        part = whole["$defs"][part["$ref"].rpartition("/")[2]]
    for one in part.get("anyOf", []):
        if "$ref" in one and node is not None:
            yield from objects(node, whole, one)
    if isinstance(node, dict):
        if "properties" in part:
            yield node
        for key, value in node.items():
            inside = part.get("properties", {}).get(key, part.get("additionalProperties"))
            yield from objects(value, whole, inside or {})
    elif isinstance(node, list):
        for value in node:
            yield from objects(value, whole, part.get("items", {}))


@pytest.mark.parametrize(
    ("document", "name", "parts"),
    [
        ("audit", "outliers", 5),
        ("ready", "outliers", 5),
        ("deploy", "result", 6),
        ("stacks", "prefix", 4),
        ("cores", "full", 4),
        ("env", "differs", 4),
        ("smoke", "mixed", 4),
    ],
)
def test_no_object_has_an_unknown_field_or_lacks_one(document, name, parts):
    good, holds = read(document, name), valid(document)
    whole = schema.schema(document)
    kinds = set()
    for at, found in enumerate(list(objects(good, whole, whole))):
        keys = frozenset(found)
        if keys in kinds:
            continue
        kinds.add(keys)
        more = copy.deepcopy(good)
        list(objects(more, whole, whole))[at]["more"] = 1
        assert not holds.is_valid(more), keys
        for key in keys:
            less = copy.deepcopy(good)
            del list(objects(less, whole, whole))[at][key]
            assert not holds.is_valid(less), key
    assert len(kinds) >= parts


@pytest.mark.parametrize("case", cases(__file__, "data/invalid.json"))
def test_a_wrong_value_is_invalid(case):
    document = read(case["document"], case["of"])
    *path, key = case["at"]
    place = document
    for step in path:
        place = place[step]
    place[key] = case["value"]
    assert not valid(case["document"]).is_valid(document)


def test_a_fields_meaning_is_the_line_of_its_docstring():
    made = schema.schema("deploy")["$defs"]["outcome"]["properties"]
    assert made["failed"]["description"] == "Step -> one line why."
    tail = schema.schema("tail")["$defs"]["file"]["properties"]
    assert tail["rank"]["description"] == tail["local_rank"]["description"]
    assert tail["matches"]["description"].endswith("null without one.")
    kind = schema.schema("tail")["$defs"]["group"]["properties"]["kind"]
    assert kind["description"].endswith("such as a directory.")
    assert "stopped" in kind["enum"]


def test_a_type_that_json_lacks_is_refused():
    with pytest.raises(TypeError, match="no type of JSON"):
        schema._Writer().of(set)
