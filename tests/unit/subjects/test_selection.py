"""--only and --skip: ids, subjects, globs; a word that means nothing is an error."""

import pytest

from nodeready.subjects import registry
from nodeready.subjects.proof.active import ACTIVE_CHECKS, NETWORK_CHECKS
from nodeready.subjects.registry import CHANGED, SUBJECTS, SelectionError, select, select_whole
from tests.builders.results import fail, unknown
from tests.cases import cases


def test_nothing_said_is_everything_in_the_order_of_the_reports():
    named = {"proof.collective", *ACTIVE_CHECKS, *NETWORK_CHECKS}
    expected = tuple(id for id in registry.check_ids() if id not in named)
    assert select((), subjects=SUBJECTS).checks == expected
    default = tuple(id for id in registry.check_ids() if not id.startswith("proof."))
    assert select(()).checks == default
    # Only a policy declares checks of the site's own.
    assert (*select(()).subjects, "site") == registry.LOOKED_AT


@pytest.mark.parametrize("case", cases(__file__, "data/selection.json", "select"))
def test_words_select(case):
    assert list(select((), case["only"], case.get("skip")).checks) == case["checks"]


@pytest.mark.parametrize("case", cases(__file__, "data/selection.json", "minutes"))
def test_what_takes_minutes_is_made_where_it_is_named_alone(case):
    chosen = select((), case.get("only"), case.get("skip"), SUBJECTS).checks
    assert ("proof.collective" in chosen) == case["there"]
    assert ("proof.user" in chosen) == (case.get("only") != "proof.collective")


def test_a_subject_that_could_not_be_observed_stays_with_any_of_its_checks():
    observed = [fail("ptrace.scope", "0", "1"), fail("limits.core", "unlimited", "0")]
    observed[1:1] = [unknown(f"{name}.observed", "timed out") for name in ("ptrace", "limits")]
    selected = select((), "ptrace.selinux,limits.core").of(observed)
    assert selected == observed[1:]


def test_subjects_that_are_changed_as_a_whole():
    assert select_whole(None, CHANGED) == CHANGED
    assert select_whole("limits, ptrace", CHANGED) == ("ptrace", "limits")
    assert select_whole("ptrace.*,p*", CHANGED) == ("ptrace", "pdsh")


@pytest.mark.parametrize("case", cases(__file__, "data/selection.json", "refused"))
def test_words_that_mean_nothing(case):
    """whole: of subjects that are changed as a whole; all: proofs are made, too."""
    words = ((), case.get("only"), case.get("skip"), *((SUBJECTS,) if "all" in case else ()))
    choose, *given = (select_whole, words[1], CHANGED) if "whole" in case else (select, *words)
    with pytest.raises(SelectionError) as problem:
        choose(*given)
    assert case["words"] in str(problem.value)
