"""The fields of /proc/PID/stat and /proc/PID/status, of a process or a thread (proc(5))."""

from __future__ import annotations


def stat_fields(path: str) -> tuple[str, list[str]]:
    """The name, and the fields from the state on (field 3). Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        name, _, fields = file.read().partition("(")[2].rpartition(")")
    return name, fields.split()


def status_fields(path: str) -> dict[str, str]:
    """The values by their names. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return dict(row.split(":", 1) for row in file if ":" in row)
