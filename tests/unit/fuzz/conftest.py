"""How much is tried: in CI the same few examples each time; NODEREADY_FUZZ=10000 tries so many."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "nodeready",
    max_examples=int(os.environ.get("NODEREADY_FUZZ", "40")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("nodeready")
