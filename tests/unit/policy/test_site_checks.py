"""Checks of a site's own, as a file of checks.d declares them."""

import json

import pytest

from nodeready.core.policy import MOMENTS, PolicyError, as_data, make_policy, parse
from nodeready.core.settings import Invalid
from tests.cases import cases


@pytest.mark.parametrize("case", cases(__file__, "data/site_checks.toml"))
def test_a_wrong_check_says_which_key_and_what_it_takes(case):
    with pytest.raises(Invalid) as problem:
        parse(case["check"])
    assert case["words"] in str(problem.value)
    assert "\n" not in str(problem.value)


CHECK = {"id": "a", "run": "printf 'é\n'", "range": [0, 1.5], "in": ["gate"], "groups": ["h100"]}


@pytest.mark.parametrize("table", [
    CHECK,
    {"id": "a", "file": "/a", "json": "a[0]", "equals": "", "severity": "warn", "fix": "b"},
    {"id": "a", "run": "a", "status": 0, "timeout_s": 7, "reason": "c"},
    {"id": "a", "run": "a", "matches": "b", "in": list(MOMENTS)},
])  # fmt: skip
def test_a_policy_brings_its_checks_to_a_node_as_json(table):
    policy = make_policy({"site_checks": [table]})
    assert make_policy(json.loads(json.dumps(as_data(policy)))) == policy
    assert policy.site_checks[0].table().items() <= {**table, "source": ""}.items()


def test_a_moment_has_its_own_checks_alone():
    policy = make_policy({"site_checks": [CHECK, {"id": "b", "run": "b", "status": 0}]})
    assert [check.name for check in policy.at("audit").site_checks] == ["b"]
    assert policy.at("gate") is policy


def test_a_wrong_list_of_checks_names_the_one():
    with pytest.raises(PolicyError, match='check 2: id = "a": there are two'):
        make_policy({"site_checks": [CHECK, CHECK]})
    with pytest.raises(PolicyError, match="must be a list of tables"):
        make_policy({"site_checks": "a"})
