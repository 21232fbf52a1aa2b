"""CARRY: one script to many nodes, one answer back from each. No parsing, no judging."""
