"""The registry of the subjects: a line for each, in the order of the reports and of a deploy.

A subject declares itself (`Subject`, in its checks); nothing else lists it. In a deploy, what
needs the network (debug_tools) comes behind what does not: a package mirror that is down stops
nothing else. Behind both comes the gate: a node judges itself when everything else is in place.
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
from nodeready.subjects.proof.checks import SUBJECT as proof

from collections.abc import Iterable

from nodeready.subjects.declare import OBSERVED as OBSERVED, Page, Subject
from nodeready.policy.fields import closest
from nodeready.subjects import base as ours
from nodeready.subjects.base import Probe

SUBJECTS: dict[str, Subject] = {
    found.name: found for found in list(vars().values()) if isinstance(found, Subject)
}

#: The subjects that a look observes. The others are proved by acting.
LOOKED_AT = tuple(name for name, subject in SUBJECTS.items() if subject.probe)

#: The subjects that operations change; the others are only looked at.
CHANGED = tuple(name for name, subject in SUBJECTS.items() if subject.changed)

#: The subjects from which a policy can be learnt.
LEARNED = tuple(name for name, subject in SUBJECTS.items() if subject.learnable)

#: Subjects whose counters say something only beside those of an earlier look at the same boot,
#: which the subject "host" tells.
COUNTING = tuple(name for name, subject in SUBJECTS.items() if subject.counters)

#: The probes of a snapshot: the subjects', and the one that reads the files of ours.
PROBES: tuple[Probe, ...] = (
    *(subject.probe for subject in SUBJECTS.values() if subject.probe),
    ours.probe(path for subject in SUBJECTS.values() for path in subject.files),
)


def check_ids() -> list[str]:
    """The id of every check, in the order of the reports."""
    return [check for subject in SUBJECTS.values() for check in subject.ids()]


def page(check: str) -> Page:
    """What is to be known about a check, or ``SUBJECT.observed``. Raises KeyError for another."""
    subject = SUBJECTS[check.partition(".")[0]]
    return {one.id: one for one in (*subject.checks, subject.observed)}[check]


def meant(word: str) -> str:
    """What an unknown id or subject was probably meant to be; "" when nothing is close."""
    known: Iterable[str] = [*SUBJECTS, *check_ids()]
    subject, _, noun = word.partition(".")
    if noun and subject not in SUBJECTS:
        near = closest(subject, SUBJECTS)
        known = [one for one in known if near and one.startswith(near)] or known
    return closest(word, known, cutoff=0.5)
