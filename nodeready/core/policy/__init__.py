"""DECLARE the required state of a group's nodes: each setting with its kind, default and reason.

Reads no file and contacts no node: callers pass group_data as a mapping.
"""

from nodeready.core.policy.policy import Policy

__all__ = ["Policy"]
