"""How much is tried: a few examples each in `make test`, many in `make test-all`.

NODEREADY_FUZZ=10000 tries so many in both.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

for _name, _examples in (("short", 20), ("long", 300)):
    settings.register_profile(
        _name,
        max_examples=int(os.environ.get("NODEREADY_FUZZ", _examples)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(params=["short", pytest.param("long", marks=pytest.mark.nightly)])
def effort(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test that tries examples runs twice: "short" and, in `make test-all`, "long"."""
    before = settings.get_current_profile_name()
    settings.load_profile(request.param)
    yield request.param
    settings.load_profile(before)
