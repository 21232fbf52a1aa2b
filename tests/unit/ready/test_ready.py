"""Which proofs run, which nodes are then ready, in every form, and the exit code that follows."""

from dataclasses import fields

from nodeready.agent.audit_document import Ready, ready_code, slots
from nodeready.agent.proofs import active
from nodeready.agent.proofs.program import _PROVE
from nodeready.fleet.inventory import hostfile
from nodeready.reports.audit_table import show_ready
from nodeready.reports.registry import Options
from nodeready.runs.ready.run import WantedProofs
from nodeready.subjects.proof.active import NETWORK_CHECKS
from nodeready.subjects.proof.facts import ACTIVE, COLLECTIVE, HISTORY, MESH, RDMA, SESSION, Proved
from nodeready.subjects.registry import SUBJECTS
from tests.builders.fleets import audit, lost, node
from tests.builders.results import fail, ok, unknown, warn
from tests.cases import read_table

CHECKS = SUBJECTS["proof"].checks


def test_a_proof_is_a_row_of_the_program_a_field_of_the_facts_and_judged():
    assert list(SESSION) == list(_PROVE)
    assert list(ACTIVE) == list(active._PROVE)
    proofs = {*SESSION, *ACTIVE}
    assert proofs <= {field.name for field in fields(Proved)}
    assert {check.proof for check in CHECKS} - {""} == {*proofs, MESH, COLLECTIVE, HISTORY, RDMA}


def test_only_the_proofs_of_the_chosen_checks_run():
    assert WantedProofs.of(["proof.gdb", "proof.backtrace", "ptrace.scope"]) == WantedProofs(
        ("tracers", "core"), mesh=False, history=False
    )
    assert WantedProofs.of(["proof.mesh", "proof.user"]) == WantedProofs((), history=False)
    every = WantedProofs(collective=True, active=tuple(ACTIVE), rdma=True)
    assert WantedProofs.of(check.id for check in CHECKS) == every
    assert WantedProofs.of(check.id for check in CHECKS if not check.opt_in) == WantedProofs()
    assert WantedProofs.of(["proof.collective"]) == WantedProofs(
        (), mesh=False, collective=True, history=False
    )
    assert WantedProofs.of(["proof.history"]) == WantedProofs((), mesh=False)
    assert WantedProofs.of(NETWORK_CHECKS) == WantedProofs(
        (), mesh=False, history=False, rdma=True
    )


FINE = node("n1", ok("proof.attach", "a stack"))
WARNED = node("n2", warn("proof.user", "the job's user", "root", fix="--user NAME"))
REFUSED = node("n3", fail("proof.attach", "a stack", "refused: Yama's ptrace_scope is 1"))
LATE = node("n4", unknown("proof.core", "did not finish in time"))
AWAY = lost("n5")
NODES = {"FINE": FINE, "WARNED": WARNED, "REFUSED": REFUSED, "LATE": LATE, "AWAY": AWAY}


def test_the_ready_nodes_and_whether_they_are_enough():
    for words, needed, go, code in read_table(__file__, "enough"):
        nodes = [NODES[word] for word in words.split()]
        ready = Ready(audit(*nodes), 60, needed)
        assert tuple(ready.go) == go
        assert sorted((*ready.go, *ready.no_go)) == sorted(item.name for item in nodes)
        assert ready_code(ready) == code


def test_an_interrupted_run_is_never_enough():
    ready = Ready(audit(FINE, complete=False), 60, 1)
    assert not ready.enough
    assert ready_code(ready) == 130


def test_the_table_has_the_answer_first_and_the_reasons_with_their_nodes():
    ready = Ready(audit(FINE, WARNED, REFUSED, LATE, AWAY), 60, 4)
    lines = [line.plain.rstrip() for line in show_ready(ready, Options(0, 80))]
    assert lines[0].split() == ["GO", "n[1-2]", "2", "nodes"]
    assert lines[1].split() == ["NO-GO", "n[3-5]", "3", "nodes"]
    for name, check in (("n3", "proof.attach"), ("n4", "proof.core"), ("n5", "")):
        assert any(name in line and check in line for line in lines[2:5])
    assert lines[5].split() == ["too", "few", "4", "needed"]
    assert max(map(len, lines)) <= 80


def test_launchers_get_the_ready_nodes():
    ready = {"gpu1": 8, "gpu3": 4}
    for form, others, text in (
        ("hostfile", ["gpu2"], "gpu1 slots=8\ngpu3 slots=4\n"),
        ("list", ["gpu2"], "gpu1\ngpu3\n"),
        ("exclude", ["gpu2", "gpu3", "x"], "gpu[2-3],x\n"),
        ("exclude", [], ""),
    ):
        assert hostfile.text(form, ready, others) == text
    # A node without GPUs has one slot.
    assert slots(FINE.snapshot) == slots(AWAY.snapshot) == 1
