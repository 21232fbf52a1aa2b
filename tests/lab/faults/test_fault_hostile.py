"""What a node says is data: no path, command or template of ours; and mistakes of ours."""

import re
from pathlib import Path

from tests.cases import read_table
from tests.command import written

#: Each would make a file, or become another text, if anything took it for more than data.
INJECTIONS = read_table(__file__, "INJECTIONS")

#: Mistakes that we do not know of: in judging a subject, and in planning a step.
_MISTAKES = """
from dataclasses import replace
from nodeready.subjects import registry
from nodeready.core.result import check
from nodeready.core.severity import loses_job
from nodeready.operations import core_dumps

def wrong(*words):
    raise IndexError("judging or planning")

checks = (check("limits.core", loses_job("inspect"))(wrong),)
registry.SUBJECTS["limits"] = replace(registry.SUBJECTS["limits"], checks=checks)
object.__setattr__(core_dumps.directory, "make_actions", wrong)
"""


def test_a_mistake_of_ours(fresh_node, fleet, tool):
    """It costs the subject or the step in which it shows; of one that costs a node, unit asks."""
    words = ("--yes", "--only", "ptrace,core_dumps,limits")
    done = tool("deploy", fleet([fresh_node]), *words, first=_MISTAKES)
    name = fresh_node.name
    planning = "core_dumps.directory: internal error: IndexError: judging or planning"
    assert (done.status, f"failed      {name}: {planning}\n" in done.out) == (1, True), done
    assert re.search(rf"unknown +limits\.core +{name}\n +makes no sense \(Ind", done.out)
    changed = rf"^changed +{name}: ptrace\.scope, core_dumps\.pattern$"
    assert re.search(changed, done.out, re.M), done


def test_a_fact_used_as_a_path_a_command_or_a_template(fresh_node, fleet, tool):
    """Names and contents of files that the probes read, and what they make of them."""
    node = fresh_node
    for number, text in enumerate(INJECTIONS):
        name = text.replace("/", "\\")
        node.write(f"/etc/sysctl.d/zzz{number}{name}.conf", f"kernel.core_pattern = {text}\n")
        node.write(f"/etc/security/limits.d/zzz{number}{name}.conf", f"{text} - core 0\n")
        node.write(f"/etc/tmpfiles.d/{number}{name}.conf", f"d /var/crash 0700 {text} root 1d\n")
        node.write(f"/etc/ssh/ssh_config.d/{number}{name}.conf", f"# {text}\n")
        node.write(f"/etc/profile.d/{number}{name}.sh", f"# PDSH_RCMD_TYPE={text}\n")
    values = "\n".join(f"X{n}={text}" for n, text in enumerate(INJECTIONS))
    node.write("/etc/environment", f"PDSH_RCMD_TYPE={INJECTIONS[0]}\n{values}\n")
    node.write("/etc/hostname", f"{INJECTIONS[0]}\n")
    # hostname(1) would refuse it.
    node.write("/proc/sys/kernel/hostname", f"{INJECTIONS[0]}\n")
    node.write("/proc/sys/kernel/core_pattern", f"|{INJECTIONS[0]}\n")
    before = set(written(node))
    done = tool("deploy", fleet([node]), "--yes", "--diff")
    assert done.status in (0, 3), done
    assert node.enter(["sh", "-c", "ls -d /tmp/pwned /etc/*/pwned"], check=False).stdout == ""
    assert not Path("/tmp/pwned").exists()
    assert not (tool.home / "pwned").exists()
    new = set(written(node)) - before
    assert new
    assert [path for path in new if "pwned" in path or "touch" in path] == []
    contents = node.enter(["sh", "-c", "cat /etc/*.d/*nodeready* /etc/*/*.d/*nodeready*"]).stdout
    assert "49" not in contents
    assert "pwned" not in contents


#: Scripts through any shell, tests/lab/test_units_login_shells asks.
LOGINS = read_table(__file__, "LOGINS")


def test_any_login_profile_and_environment(fresh_nodes, fleet, tool):
    nodes = dict(zip(LOGINS, fresh_nodes(len(LOGINS)), strict=True))
    for name, script in LOGINS.items():
        nodes[name].enter(["sh", "-c", f"RC=/root/.bashrc; {script}"])
    words = ("--only", "ptrace,core_dumps,limits,ssh_client,pdsh,iommu")
    where = fleet(list(nodes.values()))
    tool("deploy", where, "--yes", *words, status=0)
    again = tool("deploy", where, "--yes", *words)
    assert (again.status, "0 changed (0 changes)" in again.out) == (0, True), again
    for name, node in nodes.items():
        assert node.enter(["sysctl", "-n", "kernel.yama.ptrace_scope"]).stdout == "0\n", name


_NO_SHELL = "no answer from the node's shell: "
#: What a node lacks -> the reason that every subject of it is unknown.
MUTE = {
    "rm -f /usr/bin/timeout": f"{_NO_SHELL}.*timeout: command not found",
    "rm -f /usr/bin/base64": "base64 is not installed",
    "echo 'echo maintenance; exit 1' >/root/.bashrc": f"{_NO_SHELL}.*maintenance",
}


def test_a_missing_tool(fresh_nodes, fleet, tool):
    good, *others = fresh_nodes(1 + len(MUTE))
    for node, script in zip(others, MUTE, strict=True):
        node.enter(["sh", "-c", script])
    # -v: each reason on a row of its own.
    done = tool(
        "deploy", fleet([good, *others]), "-v", "--yes", "--only", "ptrace,limits", status=3
    )
    for node, reason in zip(others, MUTE.values(), strict=True):
        told = rf"unknown +ptrace\.observed +{node.name}\n +{reason}"
        assert re.search(told, done.out), (reason, done)
        assert not [path for path in written(node) if "nodeready" in path]
    assert re.search(rf"^changed +{good.name}: ptrace\.scope, limits\.logins$", done.out, re.M)
    assert f"1 changed (2 changes), 0 ok, 0 failed, 0 unreachable, {len(MUTE)} unknown" in done.out
