"""The calls in what gdb prints of a live process; tests/lab/test_units_gdb.py has gdb itself."""

from unittest.mock import Mock

from nodeready.agent.cores import gdb
from tests.cases import read_data, read_table

# gdb 13 on a Python whose interpreter has ended.
TEXT = read_data(__file__, "gdb_of_a_process.txt")


def test_calls_are_root_to_leaf():
    assert tuple(gdb.calls(TEXT)) == read_table(__file__, "CALLS")
    for text in ("", "No stack.", "#x y", "#0", "#0  (" * 9, "#0 " + "a " * 9999):
        assert gdb.calls(text) == []


def test_a_gdb_that_does_not_start_is_named(monkeypatch):
    supervisor = Mock(left_s=9)
    supervisor.run.side_effect = PermissionError(13, "Permission denied")
    with open("/dev/null") as core:
        known = {"program": "", "threads": 1, "rights": None}
        said = gdb.backtrace(supervisor, "/x/gdb", core.fileno(), **known)
    assert said == ("", "/x/gdb: Permission denied", "", False)
