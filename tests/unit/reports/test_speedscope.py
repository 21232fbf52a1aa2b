"""What speedscope reads: the rules of its file-format-spec.ts that are ours."""

from __future__ import annotations

import json

import jsonschema
import pytest

from nodeready.reports.exports import speedscope
from tests.builders.stack_fleets import FLEETS

NUMBER = {"type": "integer", "minimum": 0}
SAMPLED = {
    "type": "object",
    "properties": {
        "type": {"const": "sampled"},
        "name": {"type": "string"},
        "unit": {"const": "none"},
        "startValue": {"type": "number"},
        "endValue": {"type": "number"},
        "samples": {"type": "array", "items": {"type": "array", "items": NUMBER}},
        "weights": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
    "additionalProperties": False,
}  # fmt: skip
FRAME = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "file": {"type": "string"}, "line": NUMBER},
    "required": ["name"],
    "additionalProperties": False,
}
FILE = {
    "type": "object",
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "type": "object",
            "properties": {"frames": {"type": "array", "items": FRAME}},
            "required": ["frames"],
        },
        "profiles": {"type": "array", "items": SAMPLED, "minItems": 1},
        "name": {"type": "string"},
        "activeProfileIndex": NUMBER,
        "exporter": {"type": "string"},
    },
    "required": ["$schema", "shared", "profiles"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", FLEETS)
def test_a_fleet_is_a_sampled_profile_that_adds_up(name):
    stacks = FLEETS[name]()
    document = json.loads("".join(speedscope(stacks)))
    jsonschema.validate(document, FILE)
    (profile,) = document["profiles"]
    assert len(profile["samples"]) == len(profile["weights"])
    assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
    placed = [group for group in stacks.groups if group.frames]
    assert profile["weights"] == [group.processes for group in placed]
    frames = document["shared"]["frames"]
    for group, sample in zip(placed, profile["samples"], strict=True):
        *path, label = [frames[index] for index in sample]
        assert len(path) == len(group.frames)
        assert label["name"].startswith("[")


def test_the_flame_says_which_ranks_stand_there():
    document = json.loads("".join(speedscope(FLEETS["one"]())))
    assert [frame["name"] for frame in document["shared"]["frames"] if "[" in frame["name"]] == [
        "[blocked: rank 7]",
        "[blocked: ranks 0-6,8-511]",
    ]
