"""CHANGE: what a deploy would do to each node, what it did, and what is left for a person."""
