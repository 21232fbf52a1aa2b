"""What a check and a subject say of themselves: everything that others have to know about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nodeready.policy import Policy
from nodeready.subjects.base import Probe
from nodeready.subjects.result import Result

#: What stands for a subject that could not be observed: ``SUBJECT.observed``.
OBSERVED = "observed"

Judge = Callable[[Any, Policy], Result]

PERSON = "By a person"
DEPLOY = "Repaired by"


class Act(NamedTuple):
    """What repairs a finding, and who does it. What the node shows stands there in capitals."""

    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"


def deploy(command: str) -> Act:
    """A ``fix`` that is no operation of the check's own subject: ``nodeready deploy`` does it."""
    return Act(DEPLOY, command)


@dataclass(frozen=True)
class Page:
    """What is to be known about one check.

    id:       ``SUBJECT.NOUN``; an id never changes its meaning
    meaning:  what it judges, why, and where the rule comes from
    settings: the fields of Policy that decide what it wants, in the order of Policy
    fixed_by: the operation that makes it pass, ``SUBJECT.NOUN``; "": none does
    acts:     what else repairs what it finds, one for each way to fail
    """

    id: str
    meaning: str
    settings: tuple[str, ...]
    fixed_by: str
    acts: tuple[Act, ...]

    @property
    def subject(self) -> str:
        """The name of its subject."""
        return self.id.partition(".")[0]

    @property
    def brief(self) -> str:
        """The first sentence of the meaning, on one line."""
        first = " ".join(self.meaning.split("\n\n", 1)[0].split())
        return first.split(". ", 1)[0].rstrip(".")


@dataclass(frozen=True)
class Check(Page):
    """A check: its page, and the pure function that judges.

    proof: what has to run on the node before this check can judge: one of
           `proof.facts.SESSION`, or `proof.facts.MESH`; "": the look alone
    """

    judge: Judge
    proof: str = ""

    def __call__(self, seen: Any, want: Policy) -> Result:
        """The result for what was observed of the subject on one node."""
        return self.judge(seen, want)


def check(
    id: str,
    *,
    settings: tuple[str, ...] = (),
    fixed_by: str = "",
    fix: Iterable[str | Act] = (),
    proof: str = "",
) -> Callable[[Judge], Check]:
    """Make a Check of a function whose docstring is the check's page.

    fix: what a person does, or, with `deploy`, what a deploy of another subject does
    """
    acts = tuple(Act(PERSON, one) if isinstance(one, str) else one for one in fix)

    def wrap(judge: Judge) -> Check:
        meaning = inspect.cleandoc(judge.__doc__ or "")
        return Check(id, meaning, settings, fixed_by, acts, judge, proof)

    return wrap


def _nothing(seen: Any) -> Mapping[str, Any]:
    return {}


_OBSERVED = """\
The subject could not be observed on the node as a whole, so none of its checks was judged.

The reason stands in the result, with the first bytes of what the node answered. It is given by
the reading, not by a setting: a command that hung or is missing, output that makes no sense, or a
file that cannot be read. It never counts as ok, and cannot be waived."""
_LOOK = "run the audit with --only {} on that node, and repair what the reason names"


@dataclass(frozen=True)
class Subject:
    """One subject: everything that the commands, the reports and the docs have to know of it.

    doc:      the docstring of its checks' module; its first line says what is judged
    checks:   in the order of the reports
    probe:    how it is observed; None: by acting, before a job (node/proofs)
    compared: what the nodes of a group should have in common: fact -> number or text. The fact's
              name is relative to the subject (``driver``, ``eth0.mtu``); a value that could not be
              observed is left out
    learned:  the policy that this node would fit: key of Policy -> value as group_data holds it
    counters: totals that say something only beside those of an earlier look at the same boot,
              which the observation has in its field ``before``; None: it counts nothing
    files:    shell patterns of the files that its operations own outright on a node. They contain
              the project's name
    alone:    whether a node that audits itself judges it
    """

    name: str
    doc: str
    checks: tuple[Check, ...]
    probe: Probe | None = None
    compared: Callable[[Any], Mapping[str, Any]] = _nothing
    learned: Callable[[Any], Mapping[str, Any]] = _nothing
    counters: Callable[[Any], dict[str, int]] | None = None
    files: tuple[str, ...] = ()
    alone: bool = True

    @property
    def about(self) -> str:
        """What is judged, in one sentence."""
        words = (self.doc or self.name).splitlines()[0].removeprefix("Judge ")
        return words[:1].upper() + words[1:]

    @property
    def changed(self) -> bool:
        """Whether an operation repairs anything of it; else it is only looked at."""
        return any(check.fixed_by for check in self.checks)

    @property
    def learnable(self) -> bool:
        """Whether a part of a policy can be learnt from it."""
        return self.learned is not _nothing

    @property
    def observed(self) -> Page:
        """The page of the result that stands for all checks when nothing could be observed."""
        act = Act(PERSON, _LOOK.format(self.name))
        return Page(f"{self.name}.{OBSERVED}", _OBSERVED, (), "", (act,))

    def ids(self) -> list[str]:
        """The ids of its checks."""
        return [check.id for check in self.checks]
