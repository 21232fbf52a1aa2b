"""DECLARE the required state of a group's nodes: each setting with its kind, default and reason.

No file is read here and no node is asked: what group_data says comes in as a mapping.
"""

from nodeready.policy.policy import Policy

__all__ = ["Policy"]
