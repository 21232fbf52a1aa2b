"""Which proofs run for which checks: each proof is named once, and nothing is left out."""

from __future__ import annotations

from dataclasses import fields

from nodeready.node.proofs.program import _PROVE
from nodeready.ready.run import Wanted
from nodeready.subjects.proof.facts import COLLECTIVE, MESH, SESSION, Proved
from nodeready.subjects.registry import SUBJECTS

CHECKS = SUBJECTS["proof"].checks


def test_a_proof_is_a_row_of_the_program_and_a_field_of_what_was_proved():
    assert list(SESSION) == list(_PROVE)
    assert {*SESSION} <= {field.name for field in fields(Proved)}


def test_every_proof_is_judged_and_no_check_names_another():
    named = {check.proof for check in CHECKS}
    assert named - {""} == {*SESSION, MESH, COLLECTIVE}


def test_only_what_the_chosen_checks_name_runs():
    assert Wanted.of(["proof.gdb", "proof.backtrace", "ptrace.scope"]) == Wanted(
        ("tracers", "core"), mesh=False
    )
    assert Wanted.of(["proof.mesh", "proof.user"]) == Wanted((), mesh=True)
    assert Wanted.of(check.id for check in CHECKS) == Wanted(collective=True)
    assert Wanted.of(check.id for check in CHECKS if not check.named) == Wanted()
    assert Wanted.of(["proof.collective"]) == Wanted((), mesh=False, collective=True)
