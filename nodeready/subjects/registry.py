"""The registry of the subjects, a line for each, and the choice among their checks.

A subject declares itself (`Subject`, in its checks), and no other list names it. The order of the
lines is that of the reports and of a deploy. In a deploy, debug_tools comes after the subjects
that need no network, so that a package mirror that is down stops nothing else. The gate comes
last: a node judges itself when all other subjects are in place.
"""

# ruff: noqa: F401, I001, PLC0414 - the imports are the registry, and their order is its order

from __future__ import annotations

from nodeready.subjects.ptrace.checks import SUBJECT as ptrace
from nodeready.subjects.core_dumps.checks import SUBJECT as core_dumps
from nodeready.subjects.limits.checks import SUBJECT as limits
from nodeready.subjects.ssh_client.checks import SUBJECT as ssh_client
from nodeready.subjects.pdsh.checks import SUBJECT as pdsh
from nodeready.subjects.iommu.checks import SUBJECT as iommu
from nodeready.subjects.debug_tools.checks import SUBJECT as debug_tools
from nodeready.subjects.gate.checks import SUBJECT as gate
from nodeready.subjects.gpus.checks import SUBJECT as gpus
from nodeready.subjects.nics.checks import SUBJECT as nics
from nodeready.subjects.rdma.checks import SUBJECT as rdma
from nodeready.subjects.ports.checks import SUBJECT as ports
from nodeready.subjects.host.checks import SUBJECT as host
from nodeready.subjects.site.checks import SUBJECT as site
from nodeready.subjects.proof.checks import SUBJECT as proof

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from nodeready.core.result import OBSERVED as OBSERVED, Page, Subject
from nodeready.core.policy import Policy
from nodeready.core.settings import closest_word
from nodeready.core.base import Probe
from nodeready.core.exit_codes import Refused
from nodeready.core.own_files import own_files
from nodeready.core.result import Result

SUBJECTS: dict[str, Subject] = {
    subject.name: subject for subject in list(vars().values()) if isinstance(subject, Subject)
}

#: The subjects that a snapshot observes; proofs need actions.
LOOKED_AT = tuple(name for name, subject in SUBJECTS.items() if subject.probe)

#: The subjects that operations change, in the order of a deploy.
CHANGED = tuple(
    sorted(
        (name for name, subject in SUBJECTS.items() if subject.changed),
        key=lambda name: name == gate.name,
    )
)

#: The subjects from which a policy can be learnt.
LEARNED = tuple(name for name, subject in SUBJECTS.items() if subject.learnable)

#: The subjects with a check that needs the fleet.
NEEDS_FLEET = frozenset(name for name, subject in SUBJECTS.items() if subject.needs_fleet)

#: The subjects with counters, which are compared with those of an earlier audit at the same boot.
#: The subject "host" has the boot's id.
COUNTING = tuple(name for name, subject in SUBJECTS.items() if subject.counters)

#: The probes of a snapshot: each subject's, and the probe of nodeready's own files.
PROBES: tuple[Probe, ...] = (
    *(subject.probe for subject in SUBJECTS.values() if subject.probe),
    own_files(path for subject in SUBJECTS.values() for path in subject.files),
)


def check_ids(policies: Iterable[Policy] = ()) -> list[str]:
    """The id of every check, also of those that these policies declare, in reports' order."""
    return _ids(SUBJECTS, policies)


def page(check: str, policies: Iterable[Policy] = ()) -> Page:
    """The page of a check, or of ``SUBJECT.observed``. Raises KeyError for any other id."""
    subject = SUBJECTS[check.partition(".")[0]]
    entries: tuple[Page, ...] = (*subject.declared(policies), subject.observed)
    return {entry.id: entry for entry in entries}[check]


def meant(word: str, policies: Iterable[Policy] = ()) -> str:
    """The id or subject that an unknown word was probably meant to be; "" when none is close."""
    candidates: Iterable[str] = [*SUBJECTS, *check_ids(policies)]
    subject, _, noun = word.partition(".")
    if noun and subject not in SUBJECTS:
        near = closest_word(subject, SUBJECTS)
        candidates = [
            candidate for candidate in candidates if near and candidate.startswith(near)
        ] or candidates
    return closest_word(word, candidates, cutoff=0.5)


# --- Which checks a command makes: ``--only`` and ``--skip``, with ids, subjects and globs.


class SelectionError(Refused):
    """A word that selects no check, or words that leave none."""


@dataclass(frozen=True)
class CheckSelection:
    """The ids of the chosen checks, in the order of the reports."""

    checks: tuple[str, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check.partition(".")[0] for check in self.checks))

    def of(self, results: Iterable[Result]) -> list[Result]:
        """The results of these checks. A subject that could not be observed stays."""
        ids = self.results
        return [result for result in results if result.check in ids]

    @cached_property
    def results(self) -> frozenset[str]:
        return frozenset((*self.checks, *(f"{subject}.{OBSERVED}" for subject in self.subjects)))


def _matching(option: str, words: str, subjects: Iterable[str], ids: Iterable[str]) -> set[str]:
    """The ids that the words of an option, with commas, select. Raises SelectionError."""
    selected: set[str] = set()
    for word in (part.strip() for part in words.split(",")):
        if not word:
            continue
        pattern = f"{word}.*" if word in subjects else word
        matched = {check for check in ids if fnmatchcase(check, pattern)}
        if option == "--only" and word not in matched:
            opt_in_ids = matched & _opt_in(subjects)
            matched -= opt_in_ids
            if opt_in_ids and not matched:
                raise SelectionError(
                    f"--only {word}: name it whole: {', '.join(sorted(opt_in_ids))}"
                )
        if not matched and word in subjects:
            raise SelectionError(
                f"{option} {word}: no policy of these nodes declares such a check"
            )
        if not matched:
            named = SUBJECTS.get(word.partition(".")[0])
            if named is not None and named.name not in (*subjects, *CHANGED):
                by = "proved, by nodeready ready"
                if named.probe is not None:
                    by = "only looked at, by nodeready audit"
                raise SelectionError(f"{option} {word}: is {by}")
            close = closest_word(word, [*subjects, *ids])
            meant = f"did you mean {close}?" if close else "there are " + ", ".join(subjects)
            raise SelectionError(f"{option} {word}: no such check or subject; {meant}")
        selected |= matched
    if not selected:
        raise SelectionError(f"{option}: no check or subject named")
    return selected


def _opt_in(subjects: Iterable[str]) -> set[str]:
    """The ids of the checks that are only made when they are named."""
    return {check.id for name in subjects for check in SUBJECTS[name].checks if check.opt_in}


def _ids(subjects: Iterable[str], policies: Iterable[Policy] = ()) -> list[str]:
    # Thousands of nodes share a few policies.
    policies = tuple({id(policy): policy for policy in policies}.values())
    return [
        check
        for name, subject in SUBJECTS.items()
        if name in subjects
        for check in subject.ids(policies)
    ]


def select(
    policies: Iterable[Policy],
    only: str | None = None,
    skip: str | None = None,
    subjects: Iterable[str] = LOOKED_AT,
    named: Iterable[str] = (),
) -> CheckSelection:
    """The selection of ``--only`` and ``--skip``: ids, subjects or globs, with commas.

    A check that is `Check.opt_in` must be named by its whole id, or be in ``named``.

    policies: of the nodes, which may declare further checks
    subjects: those that the command can judge
    Raises SelectionError for a word that means nothing, and when nothing is left.
    """
    subjects = tuple(subjects)
    ids = _ids(subjects, policies)
    chosen = {*ids} - _opt_in(subjects)
    if only is not None:
        chosen = _matching("--only", only, subjects, ids)
    chosen.update(named)
    if skip is not None:
        chosen -= _matching("--skip", skip, subjects, ids)
    if not chosen:
        raise SelectionError("--skip leaves no check to make")
    return CheckSelection(tuple(check for check in ids if check in chosen))


def select_whole(only: str | None, subjects: Iterable[str]) -> tuple[str, ...]:
    """The subjects of ``--only`` for a command that can do no part of one, in order.

    subjects: those that the command can do
    Raises SelectionError as ``select`` does, and for words that mean a part of a subject.
    """
    subjects = tuple(subjects)
    chosen = select((), only, subjects=subjects)
    if parts := [name for name in chosen.subjects if not {*_ids([name])} <= {*chosen.checks}]:
        raise SelectionError(f"--only {only}: a subject is changed as a whole: {', '.join(parts)}")
    return chosen.subjects
