"""LOGS: the last lines of every rank's log; files with equal lines are shown once."""
