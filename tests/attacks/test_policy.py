"""The author of a policy gets words refused: no setting reaches beyond what it is for."""

from __future__ import annotations

import pytest

from nodeready.subjects.managed_block import END
from tests.lab.rows import rows

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
    "a mark of ours": f"ssh_known_hosts = [{END.decode()!r}]",
}


@pytest.mark.parametrize("case", rows(BEYOND, "everybody may write to /etc", "a mark of ours"))
def test_no_setting_reaches_further_than_it_says(case, fresh_node, fleet, tool):
    inventory = fleet([fresh_node], packages=(), py_spy_version="")
    setting = BEYOND[case].partition(" ")[0]
    data = inventory.parent / "group_data"
    data.mkdir()
    (data / "all.py").write_text(BEYOND[case])
    seen = "stat -c '%a %n' /etc /usr/lib /home; cat /etc/hosts"
    before = fresh_node.run(seen).stdout
    only = "core_dumps,ssh_client,debug_tools,pdsh,limits,gate"
    done = tool("deploy", inventory, "--yes", "--only", only)
    assert fresh_node.run(seen).stdout == before
    if case == "a mark of ours":
        # The lines of a fleet come together on the way to the nodes.
        assert (done.status, f"{setting}: the block's own lines" in done.out) == (1, True), done
        return
    assert (done.status, len(done.lines), done.out) == (2, 1, ""), done
    assert f" {setting} = " in done.err, done
    assert len(done.err) < 1000
