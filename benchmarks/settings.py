"""The policy that all contenders of a deploy set: defaults, and a value where those do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nodeready.core.policy import Policy
from nodeready.lab.image import USER
from nodeready.lab.needs import reachable_limits


def policy_data(host_pattern: str) -> dict[str, Any]:
    """Group data for an inventory of nodes whose names match ``host_pattern``."""
    return {
        **reachable_limits(),
        "pdshrc_users": (USER,),
        "pdshrc_path": ("/opt/train/bin",),
        "ssh_client_hosts": (host_pattern,),
    }


def by_hand(data: dict[str, Any], py_spy: Path) -> dict[str, Any]:
    """The same data for contenders without a policy: every value of it, with a prefix."""
    policy = Policy(**data)
    values = {f"nr_{name}": getattr(policy, name) for name in policy.__dataclass_fields__}
    cores = Path(policy.core_pattern).parent
    return {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
        "nr_core_directory": str(cores),
        "nr_py_spy": str(py_spy),
    }
