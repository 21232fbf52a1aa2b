"""LOGS: the last lines of the files on a node whose paths match a pattern; only read."""
