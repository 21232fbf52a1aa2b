"""A policy that cannot be right is refused before any node is touched, with the likely meaning."""

import pytest

from nodeready.core.policy import Policy, PolicyError, check_settings, make_policy
from tests.cases import as_tuples, cases


@pytest.mark.parametrize("case", cases(__file__, "data/sound.json"))
def test_a_sound_policy_is_taken_as_it_is_written(case):
    made = make_policy(case["data"])
    assert "policy" not in case or made == Policy(**as_tuples(case["policy"]))


@pytest.mark.parametrize("case", cases(__file__, "data/refused.json"))
def test_a_wrong_setting_is_named_with_its_file_and_what_is_right(case):
    with pytest.raises(PolicyError) as refused:
        check_settings(case["data"], "group_data/h100.py", frozenset({"ssh_hostname"}))
    (problem,) = refused.value.problems
    assert problem.startswith("group_data/h100.py: ")
    assert "\n" not in problem
    for word in case["words"]:
        assert word in problem
