"""Which checks a command makes: ``--only`` and ``--skip``, with ids, subjects and globs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nodeready.policy.fields import closest
from nodeready.subjects.registry import CHANGED, LOOKED_AT, OBSERVED, SUBJECTS
from nodeready.subjects.result import Result


class SelectionError(ValueError):
    """A word that selects no check, or words that leave none."""


@dataclass(frozen=True)
class Selection:
    """The chosen checks.

    checks: their ids, in the order of the reports
    """

    checks: tuple[str, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        """Their subjects, in order."""
        return tuple(dict.fromkeys(check.partition(".")[0] for check in self.checks))

    def of(self, results: Iterable[Result]) -> list[Result]:
        """The results of these checks. A subject that could not be observed stays."""
        ids = {*self.checks, *(f"{subject}.{OBSERVED}" for subject in self.subjects)}
        return [result for result in results if result.check in ids]


def _matching(option: str, words: str, subjects: Iterable[str]) -> set[str]:
    """The ids that one option's words, separated by commas, select. Raises SelectionError."""
    ids = _ids(subjects)
    found: set[str] = set()
    for word in (part.strip() for part in words.split(",")):
        if not word:
            continue
        pattern = f"{word}.*" if word in subjects else word
        matched = {check for check in ids if fnmatchcase(check, pattern)}
        if not matched:
            named = SUBJECTS.get(word.partition(".")[0])
            if named is not None and named.name not in (*subjects, *CHANGED):
                by = "proved, by nodeready ready"
                if named.probe is not None:
                    by = "only looked at, by nodeready audit"
                raise SelectionError(f"{option} {word}: is {by}")
            close = closest(word, [*subjects, *ids])
            meant = f"did you mean {close}?" if close else "there are " + ", ".join(subjects)
            raise SelectionError(f"{option} {word}: no such check or subject; {meant}")
        found |= matched
    if not found:
        raise SelectionError(f"{option}: no check or subject named")
    return found


def _ids(subjects: Iterable[str]) -> list[str]:
    return [check for name, one in SUBJECTS.items() if name in subjects for check in one.ids()]


def select(
    only: str | None = None, skip: str | None = None, subjects: Iterable[str] = LOOKED_AT
) -> Selection:
    """The selection of ``--only`` and ``--skip``: ids, subjects or globs, with commas.

    subjects: those that the command can judge
    Raises SelectionError for a word that means nothing, and when nothing is left.
    """
    subjects = tuple(subjects)
    chosen = set(_ids(subjects)) if only is None else _matching("--only", only, subjects)
    if skip is not None:
        chosen -= _matching("--skip", skip, subjects)
    if not chosen:
        raise SelectionError("--skip leaves no check to make")
    return Selection(tuple(check for check in _ids(subjects) if check in chosen))


def select_whole(only: str | None, subjects: Iterable[str]) -> tuple[str, ...]:
    """The subjects of ``--only`` for a command that can do no part of one, in order.

    subjects: those that the command can do
    Raises SelectionError as ``select`` does, and for words that mean a part of a subject.
    """
    subjects = tuple(subjects)
    chosen = select(only, subjects=subjects)
    parts = [name for name in chosen.subjects if not {*_ids([name])} <= {*chosen.checks}]
    if parts:
        raise SelectionError(f"--only {only}: a subject is changed as a whole: {', '.join(parts)}")
    return chosen.subjects
