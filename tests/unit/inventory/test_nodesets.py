"""Node sets: they mean what ClusterShell means by them, and what they refuse."""

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeready.fleet.inventory import nodeset
from nodeready.fleet.inventory.nodeset import MAX_NAME, NodeSetError, expand, fold
from tests.cases import cases, read_table

#: A machine under load is no reason to fail.
_PATIENT = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
_SHAPES = ("n{}", "n{}m{}", "r{}-n{}.c", "{}.{}.{}", "c{}r{}n{}z")
#: Numbers of any width, some with zeros in front.
_NUMBER = st.text("0129", min_size=1, max_size=4)
_NAMES = st.builds(str.format, st.sampled_from(_SHAPES), _NUMBER, _NUMBER, _NUMBER)
_RANGE = r"\[(0[1-9]|[1-4]?[0-9])(-[5-9][0-9](/[1-7])?)?(,0?[1-9])?\]"
_SETS = st.from_regex(rf"((n|10\.){_RANGE}(z|r\[1-2\])?,){{1,3}}", fullmatch=True)


@_PATIENT
@given(_SETS)
def test_a_set_expands_to_the_names_of_clustershell(text):
    names = expand(text)
    assert {*names} == {*NodeSet(text.rstrip(","), resolver=RESOLVER_NOGROUP)}
    assert names == sorted({*names}, key=nodeset.natural)


@_PATIENT
@given(st.lists(_NAMES, max_size=40))
def test_what_is_folded_unfolds_to_the_same_names(names):
    folded = fold(names)
    assert {*expand(folded)} == {*names} == {*NodeSet(folded, resolver=RESOLVER_NOGROUP)}
    assert fold(reversed(names)) == folded


@pytest.mark.parametrize("case", cases(__file__, "data/folds.json"))
def test_folds_names(case):
    assert fold(case["names"]) == case["folded"]
    assert fold(reversed(case["names"])) == case["folded"] or "@" in case["folded"]


def test_splits_at_commas_outside_of_brackets_and_expands_each_part():
    assert nodeset.split("gpu[1,3],b, c[2,4-5]") == ["gpu[1,3]", "b", "c[2,4-5]"]
    for text, names in read_table(__file__, "expanded"):
        assert expand(text) == list(names)


@pytest.mark.parametrize("case", cases(__file__, "data/nodeset_errors.json"))
def test_refuses_what_names_no_nodes_in_one_line(case):
    with pytest.raises(NodeSetError) as caught:
        expand(case["text"])
    message = str(caught.value)
    assert case["why"] in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 200


def test_the_longest_name_and_the_largest_set(monkeypatch):
    assert nodeset.host_name("n" * MAX_NAME)
    with pytest.raises(NodeSetError, match="is no host name"):
        nodeset.host_name("n" * (MAX_NAME + 1))
    with pytest.raises(NodeSetError, match="more than 65,536 nodes"):
        expand("r[1-999]n[1-999]")
    monkeypatch.setattr(nodeset, "MAX_NODES", 100)
    assert len(expand("n[1-100]")) == len(expand("n[1-50],m[1-50]")) == 100
    for text in ("n[0-100]", "n[1-50],m[0-50]"):
        with pytest.raises(NodeSetError, match="more than 100 nodes"):
            expand(text)
