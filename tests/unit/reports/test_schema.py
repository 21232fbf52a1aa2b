"""The schemas of the documents: generated, strict, and valid for real documents."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from nodeready.agent.audit_document import Ready
from nodeready.core.text import sanitise
from nodeready.reports import schema
from nodeready.reports.registry import FORMATS, Options, find_format
from nodeready.runs.ready import batch_script
from tests.builders.deploys import DEPLOYS
from tests.builders.environments import ENVIRONMENTS
from tests.builders.fleets import fleet, outcomes
from tests.builders.stack_fleets import FLEETS as STACKS
from tests.cases import cases
from tests.paths import DOCS
from tests.unit.audit.test_waiver_list import document as waiver_list
from tests.unit.healthcheck.test_undrain import document as undrain
from tests.unit.memory.test_changes import document as node_diff
from tests.unit.memory.test_lemons import document as lemons
from tests.unit.reports.test_smoke_table import SMOKES
from tests.unit.triage.test_cores import FULL as CORES
from tests.unit.triage.test_jobs import document as running
from tests.unit.triage.test_stacks_debuggable import judged, rank

AUDITS = outcomes()
MADE: dict[str, dict[str, Any]] = {
    "audit": {**AUDITS, "fleet": fleet(40)},
    "ready": {name: Ready(audit, 60, 2) for name, audit in AUDITS.items()},
    "deploy": {name: make() for name, make in DEPLOYS.items()},
    "stacks": {name: make() for name, make in STACKS.items()},
    "cores": {"full": CORES}, "env": ENVIRONMENTS, "smoke": dict(SMOKES),
    "jobs": {"mixed": running()}, "undrain": {"mixed": undrain()}, "lemons": {"mixed": lemons()},
    "waivers": {"mixed": waiver_list()}, "diff": {"mixed": node_diff()},
    "script": {"wrong": batch_script.BatchScript("a", 2, batch_script.check("hostname"))},
    "debuggable": {"mixed": judged(rank(0), rank(1, main=None), rank(None))},
}  # fmt: skip
CASES = [(document, name) for document, reports in MADE.items() for name in reports]


def valid(document: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema.schema(document))


def read(document: str, name: str) -> dict[str, Any]:
    text = "".join(find_format(document, "json").render(MADE[document][name], Options(diff=True)))
    return json.loads(text)


@pytest.mark.parametrize("document", schema.DOCUMENTS)
def test_the_file_is_generated_from_the_dataclasses(document):
    name = schema.file_name(document)
    path, version = DOCS / "schema" / name, name[-6]
    assert path.read_text() == schema.text(document), "run scripts/make_docs.py"
    made = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["$id"] == f"urn:nodeready:{document}:{version}"
    assert made["properties"]["schema"] == {"const": f"nodeready.{document}/{version}"}


def test_every_document_has_a_json_format_and_a_schema():
    with_json = {name for name, rows in FORMATS.items() if "json" in rows}
    assert set(schema.DOCUMENTS) == with_json


@pytest.mark.parametrize(("document", "name"), CASES)
def test_a_real_document_is_valid(document, name):
    made = read(document, name)
    valid(document).validate(made)
    nodes = getattr(MADE[document][name], "nodes", ())
    if nodes and hasattr(nodes[0], "name"):
        assert [node["name"] for node in made["nodes"]] == [sanitise(node.name) for node in nodes]


def objects(part: Any) -> Iterator[dict[str, Any]]:
    """Every object of a schema whose fields are listed."""
    if isinstance(part, dict):
        if isinstance(part.get("properties"), dict) and "type" in part:
            yield part
        for inner in part.values():
            yield from objects(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from objects(inner)


@pytest.mark.parametrize("document", schema.DOCUMENTS)
def test_every_object_requires_its_fields_and_allows_no_other(document):
    parts = list(objects(schema.schema(document)))
    assert parts
    for part in parts:
        assert part["additionalProperties"] is False
        # Only an audit of recorded verdicts has the first two, and only a finding the others.
        optional = {"recorded", "age_seconds", "severity", "actions"}
        assert set(part["properties"]) - set(part["required"]) <= optional


@pytest.mark.parametrize("case", cases(__file__, "data/invalid.json"))
def test_a_wrong_value_is_invalid(case):
    document = read(case["document"], case["of"])
    *path, key = case["at"]
    place = document
    for step in path:
        place = place[step]
    place[key] = case["value"]
    assert not valid(case["document"]).is_valid(document)


def test_a_type_that_json_lacks_is_refused():
    with pytest.raises(TypeError, match="no type of JSON"):
        schema.SchemaWriter().of(set)
