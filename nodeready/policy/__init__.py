"""Policy: what every node of a group has to be. Declared here, and read from group_data."""

from nodeready.policy.policy import Expected, Policy

__all__ = ["Expected", "Policy"]
