"""A policy that cannot be right is refused before any node is touched, with the likely meaning."""

import pytest

from nodeready.core.policy import Policy, PolicyError, check_settings, make_policy
from tests.cases import cases

SMOKE = {"smoke_min_gbps": 370, "smoke_python": "/opt/conda/bin/python"}
WORDS = {
    "smoke_prefix": ["apptainer", "exec", "/images/a b.sif"],
    "smoke_environment": ["A==b", "B="],
}
GOOD = [
    ({}, {}),
    ({"ptrace_scope": 1, **SMOKE}, {"ptrace_scope": 1, **SMOKE}),
    ({"limit_core": 4096}, {"limit_core": "4096"}),
    ({"port_range": [29500, 29500]}, {"port_range": (29500, 29500)}),
    (WORDS, {name: tuple(words) for name, words in WORDS.items()}),
    ({"core_pattern": "/" + "a" * 120 + "/%e.%P"}, None),
    ({"gate_directory": "/srv/nodeready"}, None),
    ({"gate_directory": ""}, None),
    ({"_sudo": True, "our_own_data": {"x": 1}, "ssh_user": "root"}, {}),
]


@pytest.mark.parametrize(("data", "wanted"), GOOD)
def test_a_sound_policy_is_taken_as_it_is_written(data, wanted):
    made = make_policy(data)
    assert wanted is None or made == Policy(**wanted)


@pytest.mark.parametrize("case", cases(__file__, "data/refused.json"))
def test_a_wrong_setting_is_named_with_its_file_and_what_is_right(case):
    with pytest.raises(PolicyError) as refused:
        check_settings(case["data"], "group_data/h100.py", frozenset({"ssh_hostname"}))
    (problem,) = refused.value.problems
    assert problem.startswith("group_data/h100.py: ")
    assert "\n" not in problem
    for word in case["words"]:
        assert word in problem


def test_all_problems_are_told_at_once():
    with pytest.raises(PolicyError) as refused:
        make_policy({"ptrace_scope": 9, "core_handler": "none", "limit_cores": 1})
    assert len(refused.value.problems) == 3
