"""Mistakes in the words of `nodeready cores --local`."""

import pytest

from tests.cases import cases


@pytest.mark.parametrize("case", cases(__file__, "cases/cores_here.json"))
def test_a_users_mistake_is_one_line(tool, case):
    done = tool("cores", *case["name"].split())
    assert (done.status, done.out) == (2, ""), done
    assert case["error"] in done.err
