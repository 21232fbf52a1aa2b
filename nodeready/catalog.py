"""Every check by its id: what it means, which settings decide it, who repairs what it finds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from nodeready import check_sources
from nodeready.operations import STEPS
from nodeready.policy.spelling import closest
from nodeready.subjects import OBSERVED, SUBJECTS, check_ids

_OBSERVED = """\
The subject could not be observed on the node as a whole, so none of its checks was judged.

The reason stands in the result, with the first bytes of what the node answered. It is given by
the reading, not by a setting: a command that hung or is missing, output that makes no sense, or a
file that cannot be read. It never counts as ok, and cannot be waived."""
_LOOK = "By a person: run the audit with --only {} on that node, and repair what the reason names"


@dataclass(frozen=True)
class Entry:
    """What is to be known about one check.

    meaning:  its docstring: what it judges, why, and where the rule comes from
    settings: the fields of Policy that decide what it wants
    repairs:  the operations of ours that make it pass: (name, what it does)
    acts:     what else repairs it, with who does it: ``By a person: …``; what the node shows is in
              capitals
    """

    id: str
    meaning: str
    settings: tuple[str, ...] = ()
    repairs: tuple[tuple[str, str], ...] = ()
    acts: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return self.id.partition(".")[0]

    @property
    def brief(self) -> str:
        """The first sentence of the meaning, on one line."""
        first = " ".join(self.meaning.split("\n\n", 1)[0].split())
        return first.split(". ", 1)[0].rstrip(".")


@cache
def about(subject: str) -> str:
    """What a subject is, in one sentence."""
    module = sys.modules[SUBJECTS[subject].checks[0].__module__]
    for check in SUBJECTS[subject].checks:
        if check.__module__ == f"nodeready.checks.{subject}":
            module = sys.modules[check.__module__]
    words = (inspect.getdoc(module) or subject).splitlines()[0].removeprefix("Judge ")
    return words[:1].upper() + words[1:]


@cache
def entry(check: str) -> Entry:
    """The entry of a check id, or of ``SUBJECT.observed``. Raises KeyError when there is none."""
    name, _, noun = check.partition(".")
    if noun == OBSERVED and name in SUBJECTS:
        return Entry(check, _OBSERVED, acts=(_LOOK.format(name),))
    function = {one.__name__: one for one in SUBJECTS[name].checks}[noun]
    repairs = tuple(
        (step.name, (step.act.__doc__ or "").split("\n")[0])
        for step in STEPS
        if check in step.fixes
    )
    return Entry(
        check,
        inspect.getdoc(function) or "",
        tuple(check_sources.settings(function)),
        repairs,
        tuple(check_sources.acts(function)),
    )


def entries(subject: str) -> list[Entry]:
    """The entries of a subject, in the order in which its checks are judged."""
    return [entry(check) for check in SUBJECTS[subject].ids()]


def meant(word: str) -> str:
    """What an unknown id or subject was probably meant to be; "" when nothing is close."""
    known: Iterable[str] = [*SUBJECTS, *check_ids()]
    subject, _, noun = word.partition(".")
    if noun and subject not in SUBJECTS:
        near = closest(subject, SUBJECTS)
        known = [one for one in known if near and one.startswith(near)] or known
    return closest(word, known, cutoff=0.5)
