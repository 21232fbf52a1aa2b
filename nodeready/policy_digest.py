"""A short name for the policy that was judged by; a verdict is believed for no other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict

from nodeready.policy import Policy


def digest(policies: Iterable[Policy]) -> str:
    """A short name for these policies, whatever their order: equal policies, equal names."""
    texts = {json.dumps(asdict(policy), sort_keys=True) for policy in set(policies)}
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]
