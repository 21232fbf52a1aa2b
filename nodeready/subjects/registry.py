"""The registry of the subjects: a line for each, in the order of the reports and of a deploy.

A subject declares itself (`Subject`, in its checks), and no other list names it. In a deploy,
debug_tools needs the network and comes behind the subjects that do not: a package mirror that is
down stops nothing else. The gate comes last: a node judges itself when all the rest is in place.
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
from nodeready.subjects.base import Probe, own_files

SUBJECTS: dict[str, Subject] = {
    found.name: found for found in list(vars().values()) if isinstance(found, Subject)
}

#: The subjects that a look observes; the other ones are proved by acting.
LOOKED_AT = tuple(name for name, subject in SUBJECTS.items() if subject.probe)

#: The subjects that operations change; the other ones are only looked at.
CHANGED = tuple(name for name, subject in SUBJECTS.items() if subject.changed)

#: The subjects from which a policy can be learnt.
LEARNED = tuple(name for name, subject in SUBJECTS.items() if subject.learnable)

#: The subjects with counters, which are judged beside those of an earlier look at the same boot.
#: The subject "host" tells the boot.
COUNTING = tuple(name for name, subject in SUBJECTS.items() if subject.counters)

#: The probes of a snapshot: one of each subject, and the one that reads the files of ours.
PROBES: tuple[Probe, ...] = (
    *(subject.probe for subject in SUBJECTS.values() if subject.probe),
    own_files(path for subject in SUBJECTS.values() for path in subject.files),
)


def check_ids() -> list[str]:
    """The id of every check, in the order of the reports."""
    return [check for subject in SUBJECTS.values() for check in subject.ids()]


def page(check: str) -> Page:
    """The page of a check, or of ``SUBJECT.observed``. Raises KeyError for any other id."""
    subject = SUBJECTS[check.partition(".")[0]]
    return {one.id: one for one in (*subject.checks, subject.observed)}[check]


def meant(word: str) -> str:
    """The id or subject that an unknown word was probably meant to be; "" when none is close."""
    known: Iterable[str] = [*SUBJECTS, *check_ids()]
    subject, _, noun = word.partition(".")
    if noun and subject not in SUBJECTS:
        near = closest(subject, SUBJECTS)
        known = [one for one in known if near and one.startswith(near)] or known
    return closest(word, known, cutoff=0.5)
