"""The author of a policy gets words refused: no setting reaches beyond what it is for."""

from __future__ import annotations

from nodeready.core.own_files import END
from tests.cases import read_table
from tests.lab.batch import Line, run_batch

#: A line of group_data with which root would do more than the setting says, or break off.
BEYOND = read_table(__file__, "BEYOND")


ONLY = ("--yes", "--only", "core_dumps,ssh_client,debug_tools,pdsh,limits,gate")


def test_no_setting_reaches_further_than_it_says(lab, fleet, tool, tmp_path):
    """One line names the setting, before a node is asked."""
    inventory, lines = fleet(lab.nodes[:1], packages=(), py_spy_version=""), []
    for number, setting in enumerate(BEYOND.values()):
        place = tmp_path / f"case{number}"
        (place / "group_data").mkdir(parents=True)
        (place / "inventory.py").write_text(inventory.read_text())
        (place / "group_data" / "all.py").write_text(setting)
        lines.append(Line(["deploy", place / "inventory.py", *ONLY]))
    for (case, setting), done in zip(BEYOND.items(), run_batch(tool, lines), strict=True):
        assert (done.status, len(done.lines), done.out) == (2, 1, ""), (case, done)
        assert f" {setting.partition(' ')[0]} = " in done.err, (case, done)
        assert len(done.err) < 1000


def test_no_line_of_a_fleet_ends_our_block(fresh_node, fleet, tool):
    """The lines of a fleet come together on the way to the nodes."""
    lines = [f"{END.decode()}"]
    inventory = fleet([fresh_node], packages=(), py_spy_version="", ssh_known_hosts=lines)
    before = fresh_node.read("/etc/hosts")
    done = tool("deploy", inventory, *ONLY)
    assert (done.status, "ssh_known_hosts: the block's own lines" in done.out) == (1, True), done
    assert fresh_node.read("/etc/hosts") == before
