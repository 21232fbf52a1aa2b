"""The author of a policy gets words refused: no setting reaches beyond what it is for."""

from __future__ import annotations

from nodeready.core.managed_block import END
from tests.lab.batch import Line, run_batch

#: A line of group_data with which root would do more than the setting says, or break off.
BEYOND = {
    "everybody may write to /etc": "core_pattern = '/etc/core.%p'",
    "a system directory, spelt otherwise": "core_pattern = '//usr/./lib/core.%p'",
    "what is old in /home is removed": "core_pattern = '/home/core.%p'",
    "a word of its own in tmpfiles.d": "core_pattern = '/var/crash\"x/core.%p'",
    "a file that is none of Prometheus'": "gate_textfile = '/etc/hosts'",
    "a file elsewhere": "gate_textfile = '/srv/../etc/x.prom'",
    "verdicts among the system's own": "gate_directory = '/etc/cron.d'",
    "verdicts elsewhere": "gate_directory = '/srv/x/../../etc'",
    "a package is removed": "packages = ['openssh-server-']",
    "a line more, for some reader": r"ssh_known_hosts = ['gpu001 x AAAA\x85* x BBBB']",
    "a line more, for another": r"pdshrc_lines = ['true\u2028rm -rf x']",
    "no character": r"pdshrc_activate = '\udc80'",
    "no character, in a path": r"core_pattern = '/var/crash/\ud800/core'",
    "a number that Python does not write": "limit_memlock = 10**5000",
    "such a number in a list": "xid_ignore = [10**5000]",
    "such a number for a list": "packages = 10**5000",
    "such a number as a name": "nics = {10**5000: {'mtu': 1500}}",
    "a file name that no file system takes": "limit_services = ['a' * 300]",
    "a word that no process takes": "pdshrc_lines = ['a' * 200_000]",
}


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
