"""docs/facts.md: every key of every fact has its meaning there."""

from __future__ import annotations

import facts_page
import pytest

from nodeready.subjects.registry import LOOKED_AT

KINDS = {kind for subject in LOOKED_AT for kind in facts_page.kinds(subject)}


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_every_field_of_a_fact_is_described_in_its_docstring(kind):
    assert [key for key, _, meaning in facts_page.fields(kind) if not meaning] == []


def test_each_class_has_a_heading_of_its_own():
    assert len({kind.__name__.lower() for kind in KINDS}) == len(KINDS)
