"""--only and --skip: ids, subjects, globs; a word that means nothing is an error."""

from __future__ import annotations

import pytest

from nodeready.subjects.registry import (
    CHANGED,
    LOOKED_AT,
    SUBJECTS,
    SelectionError,
    check_ids,
    select,
    select_whole,
)
from nodeready.subjects.result import fail, unknown
from tests.cases import cases


def test_nothing_said_is_everything_in_the_order_of_the_reports():
    named = {"proof.collective"}
    assert select(subjects=SUBJECTS).checks == tuple(id for id in check_ids() if id not in named)
    assert select().checks == tuple(id for id in check_ids() if not id.startswith("proof."))
    assert select().subjects == LOOKED_AT


@pytest.mark.parametrize("case", cases(__file__, "data/selection.json", "select"))
def test_words_select(case):
    assert list(select(case["only"], case.get("skip")).checks) == case["checks"]


@pytest.mark.parametrize("case", cases(__file__, "data/selection.json", "minutes"))
def test_what_takes_minutes_is_made_where_it_is_named_alone(case):
    chosen = select(case.get("only"), case.get("skip"), SUBJECTS).checks
    assert ("proof.collective" in chosen) == case["there"]
    assert ("proof.user" in chosen) == (case.get("only") != "proof.collective")


def test_a_subject_that_could_not_be_observed_stays_with_any_of_its_checks():
    observed = [
        fail("ptrace.scope", "0", "1"),
        unknown("ptrace.observed", "timed out"),
        unknown("limits.observed", "timed out"),
        fail("limits.core", "unlimited", "0"),
    ]
    selected = select("ptrace.selinux,limits.core").of(observed)
    assert selected == observed[1:]


def test_subjects_that_are_changed_as_a_whole():
    assert select_whole(None, CHANGED) == CHANGED
    assert select_whole("limits, ptrace", CHANGED) == ("ptrace", "limits")
    assert select_whole("ptrace.*,p*", CHANGED) == ("ptrace", "pdsh")


NONE_NAMED = "--only: no check or subject named"


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda: select("ptrace.scop"), "--only ptrace.scop: no such check or subject; did you"),
        (lambda: select("gpu"), "did you mean"),
        (lambda: select("proof.attach"), "--only proof.attach: is proved, by nodeready ready"),
        (lambda: select("proof.coll*", None, SUBJECTS),
         "proof.coll*: name it whole: proof.collective"),
        (lambda: select(None, "zzzz"), "--skip zzzz: no such check or subject; there are pt"),
        (lambda: select(""), NONE_NAMED),
        (lambda: select("ptrace", "ptrace"), "--skip leaves no check to make"),
        (lambda: select(None, "*"), "--skip leaves no check to make"),
        (lambda: select_whole("ptrace.scope", CHANGED),
         "--only ptrace.scope: a subject is changed as a whole: ptrace"),
        (lambda: select_whole("limits,*.scope", CHANGED), "is changed as a whole: ptrace"),
        (lambda: select_whole("ptrase", CHANGED), "no such check or subject; did you mean ptrace"),
        (lambda: select_whole("gpus", CHANGED), "gpus: is only looked at, by nodeready audit"),
        (lambda: select_whole("proof", CHANGED), "--only proof: is proved, by nodeready ready"),
        (lambda: select_whole(",", CHANGED), NONE_NAMED),
    ],
)  # fmt: skip
def test_words_that_mean_nothing(choose, words):
    with pytest.raises(SelectionError) as problem:
        choose()
    assert words in str(problem.value)
