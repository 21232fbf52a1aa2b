"""What all contenders set: one policy, for nodeready and for those that write the same by hand.

The defaults of the policy, and a value for each setting whose default is to do nothing.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from nodeready.lab.image import USER
from nodeready.lab.needs import can_raise_limits
from nodeready.policy import Policy


def _limit(kind: int, unit: int, default: str | int) -> str | int:
    """The policy's limit, or what a lab on this machine can have: more would break its logins."""
    hard = resource.getrlimit(kind)[1]
    if can_raise_limits() or hard == resource.RLIM_INFINITY:
        return default
    return hard // unit


def policy_data(host_pattern: str) -> dict[str, Any]:
    """Group data for an inventory of nodes whose names match ``host_pattern``."""
    default = Policy()
    return {
        "limit_core": _limit(resource.RLIMIT_CORE, 1024, default.limit_core),
        "limit_memlock": _limit(resource.RLIMIT_MEMLOCK, 1024, default.limit_memlock),
        "limit_nofile": _limit(resource.RLIMIT_NOFILE, 1, default.limit_nofile),
        "pdshrc_users": (USER,),
        "pdshrc_path": ("/opt/train/bin",),
        "ssh_client_hosts": (host_pattern,),
    }


def by_hand(data: dict[str, Any], py_spy: Path) -> dict[str, Any]:
    """The same for those who write files by hand: every value of the policy, prefixed."""
    policy = Policy(**data)
    values = {f"nr_{name}": getattr(policy, name) for name in policy.__dataclass_fields__}
    cores = Path(policy.core_pattern).parent
    return {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
        "nr_core_directory": str(cores),
        "nr_py_spy": str(py_spy),
    }
