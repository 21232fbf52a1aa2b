"""What root runs on a node is what root has put there: nobody else's program, and no other one."""

import hashlib

import pytest

from nodeready.subjects.debug_tools.facts import PY_SPY
from nodeready.subjects.gate import facts as gate
from tests.cases import read_table
from tests.lab.rows import rows
from tests.lab.targets import WAIT, start

#: Says that it is the right one, and leaves a mark where it runs as root.
FALSE = '#!/bin/sh\n[ "$(id -u)" != 0 ] || echo "$0 $*" >>/run/ran-as-root\necho py-spy 0.4.3\n'


def ran(node) -> str:
    """What of hers has run as root."""
    return node.run("cat /run/ran-as-root 2>/dev/null; rm -f /run/ran-as-root", check=False).stdout


def found(tool, inventory, *checks: str) -> dict[str, tuple[str, str]]:
    """check -> its status and what was seen, by an audit."""
    done = tool("audit", inventory, "--only", ",".join(checks), "--format", "json")
    (results,) = done.results.values()
    return {check: (row["status"], row["actual"]) for check, row in results.items()}


#: How a py-spy that mallory can change comes to stand there: root's own mistakes.
HERS = read_table(__file__, "HERS")


@pytest.mark.parametrize("how", rows(HERS, "a link into her directory"))
def test_root_never_runs_a_py_spy_that_she_can_change(mallory, fleet, tool, how):
    """Neither looking nor for stacks; it is a finding, and the next deploy puts root's there."""
    node, inventory = mallory.node, fleet([mallory.node])
    mallory.run('printf %s "$1" >py-spy; chmod 755 py-spy', FALSE)
    node.run(f"rm -f {PY_SPY}; {HERS[how]}")
    status, actual = found(tool, inventory, "debug_tools.py_spy")["debug_tools.py_spy"]
    assert (ran(node), status) == ("", "fail"), actual
    pid = start(node, "python3", "-c", WAIT, RANK="0")
    tool("stacks", inventory, "--pid", pid)
    tool("ready", inventory, "--only", "proof.attach,proof.tracers")
    assert ran(node) == ""
    deployed = tool("deploy", inventory, "--yes", "--only", "debug_tools")
    assert f"changed     {node.name}: debug_tools.py_spy" in deployed.out, deployed
    assert node.run(f"stat -c '%F %U %a' {PY_SPY}").stdout == "regular file root 755\n"
    assert found(tool, inventory, "debug_tools.py_spy")["debug_tools.py_spy"][0] == "ok"
    assert ran(node) == ""
    assert mallory.run(f"{PY_SPY} --version").stdout.startswith("py-spy ")


def test_another_program_under_py_spy_s_name_is_found(mallory, fleet, tool):
    """Root's own, of the right version by its own words, and another program all the same."""
    node, inventory = mallory.node, fleet([mallory.node])
    node.write(PY_SPY, FALSE, mode=0o755)
    status, actual = found(tool, inventory, "debug_tools.py_spy")["debug_tools.py_spy"]
    assert (status, "another program" in actual) == ("fail", True), actual
    deployed = tool("deploy", inventory, "--yes", "--only", "debug_tools")
    assert f"changed     {node.name}: debug_tools.py_spy" in deployed.out, deployed
    assert found(tool, inventory, "debug_tools.py_spy")["debug_tools.py_spy"][0] == "ok"
    # The same size, and the time of before.
    byte = f"printf X | dd of={PY_SPY} bs=1 seek=100000 conv=notrunc 2>/dev/null"
    node.run(f"touch -r {PY_SPY} /root/then; {byte}; touch -r /root/then {PY_SPY}")
    assert found(tool, inventory, "debug_tools.py_spy")["debug_tools.py_spy"][0] == "fail"


def test_her_directory_is_a_finding_for_a_person(mallory, fleet, tool):
    """What stands in a directory of hers is whatever she wants, whatever we write there."""
    node, inventory = mallory.node, fleet([mallory.node])
    node.run("chown mallory /usr/local/bin")
    mallory.run(f'rm -f {PY_SPY}; printf %s "$1" >{PY_SPY}; chmod 755 {PY_SPY}', FALSE)
    status, actual = found(tool, inventory, "debug_tools.py_spy")["debug_tools.py_spy"]
    assert (status, "/usr/local/bin" in actual) == ("fail", True), actual
    deployed = tool("deploy", inventory, "--yes", "--only", "debug_tools")
    assert "chown root /usr/local/bin" in deployed.out, deployed
    assert ran(node) == ""


# --- The node's own check.

SETTINGS = {"gate": True, "packages": (), "py_spy_version": ""}
#: Another program in the place of ours.
OTHER = "open('/run/ran-as-root', 'a').write('gate\\n'); print('nodeready: go')\n"


@pytest.fixture
def gated(mallory, fleet, tool):
    """Her node with its own check installed, and its inventory."""
    inventory = fleet([mallory.node], **SETTINGS)
    mallory.node.run("mkdir -p /etc/slurm; touch /etc/slurm/slurm.conf")
    deployed = tool("deploy", inventory, "--yes", "--only", "gate")
    assert deployed.status in {0, 3}, deployed
    return mallory.node, inventory


def test_mallory_can_write_nothing_of_the_gate_s(gated, mallory):
    for path in (*gate.FILES, gate.DIRECTORY, gate.VERDICT, "/run/nodeready", "/etc/nodeready"):
        done = mallory.run('[ ! -w "$1" ] && ! (: >>"$1/x") 2>/dev/null', path, check=False)
        assert done.returncode == 0, path


def test_another_program_in_the_gate_s_place_never_runs(gated, tool):
    """Not by the timer, not by a job's prolog; the audit finds it, and the deploy repairs it."""
    node, inventory = gated
    right = node.run(f"sha256sum <{gate.COMPILED}").stdout
    node.run("rm -f /run/nodeready/verdict.json")
    node.write(gate.COMPILED, OTHER)
    said = [node.run(f"env -i {program}", check=False) for program in (gate.RECORD, gate.PROLOG)]
    assert ran(node) == "", said
    status, actual = found(tool, inventory, "gate.bundle")["gate.bundle"]
    assert (status, gate.COMPILED in actual) == ("fail", True), actual
    # What is compiled is not what lies there, but what this machine wants.
    deployed = tool("deploy", inventory, "--yes", "--only", "gate")
    assert f"changed     {node.name}: gate.program\n" in deployed.out, deployed
    assert node.run(f"sha256sum <{gate.COMPILED}").stdout == right
    assert "nodeready: " in node.run(f"env -i {gate.RECORD}").stdout
    assert ran(node) == ""


def test_a_program_that_does_not_run_is_replaced_by_none_of_hers(gated):
    """Without the compiled one, the one file runs: by the digest that root wrote, or none."""
    node, _ = gated
    note = node.run(f"cat {gate.NOTE}").stdout.split()
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    node.write(gate.COMPILED, OTHER)
    assert "nodeready: " in node.run(f"env -i {gate.RECORD}").stdout
    node.run(f"rm {gate.COMPILED} /run/nodeready/verdict.json")
    node.write(gate.BUNDLE, OTHER)
    said = [node.run(f"env -i {program}", check=False) for program in (gate.RECORD, gate.PROLOG)]
    # Nothing is left to run. A mistake of ours must not drain a cluster: the job starts.
    assert [done.returncode for done in said] == [1, 0], said
    # A note of hers says nothing.
    node.write(gate.COMPILED, OTHER)
    node.write(gate.NOTE, f"{note[0]} {digest} {note[2]}\n")
    node.run(f"chown mallory {gate.NOTE}")
    node.run(f"env -i {gate.RECORD}", check=False)
    assert ran(node) == ""


def test_what_she_could_change_later_is_a_finding_now(gated, tool):
    """The content is right today; root's again after a deploy."""
    node, inventory = gated
    paths = [gate.RECORD, gate.PROLOG, gate.POLICY, gate.CRON, "/etc/nodeready"]
    for path in paths:
        node.run(f"chown mallory {path}")
    status, actual = found(tool, inventory, "gate.bundle")["gate.bundle"]
    assert status == "fail"
    assert [path for path in paths if f"{path} can be written by others" not in actual] == []
    tool("deploy", inventory, "--yes", "--only", "gate")
    assert node.run(f"stat -c %U {' '.join(paths)}").stdout == "root\n" * len(paths)
    assert found(tool, inventory, "gate.bundle")["gate.bundle"][0] == "ok"
