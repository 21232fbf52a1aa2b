"""docs/checks.md, a row for what each check declares; `nodeready explain` has the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tables import markdown, plain

from nodeready.core.result import Check
from nodeready.core.severity import ACTIONS, SEVERITIES, words
from nodeready.subjects.registry import SUBJECTS

_HEAD = """\
# Checks

What nodeready judges: a table for each subject. `nodeready explain CHECK` prints why a check must
hold, the default and the meaning of each setting, the operation that repairs it, and what a person
does. This page is made from the code by `scripts/make_docs.py`.

An id never changes its meaning. What each status says:

| Status | Meaning |
| --- | --- |
| ok | as the policy wants it, now and at the next boot |
| fail | not so: jobs, or the people who debug them, will run into it |
| warn | a person should know or do something; it stops no job |
| unknown | could not be observed, for the reason given; never counts as ok |
| waived | a fail or warn that the policy accepts, for its reason (`waivers`); always listed |
| na | does not apply to this node, for the reason given |

A subject that could not be observed at all gives one result, `SUBJECT.observed`, with the status
unknown and the reason.

The severity is what a failure costs a job. Reports list the findings of one status by it, the
worst first:

SEVERITIES
Each finding has the actions that repair it, the mildest first: each is for what the one before
left. A finding can begin further up, as an Xid with the action of NVIDIA's catalog. The first
action for what is unknown is to inspect.

ACTIONS"""


def _meanings(title: str, meanings: Mapping[str, str]) -> str:
    rows = ((f"{words(name)} (`{name}`)", text) for name, text in meanings.items())
    return markdown((title, "Meaning"), rows)


def page() -> str:
    """The whole page."""
    head = _HEAD.replace("SEVERITIES", _meanings("Severity", SEVERITIES))
    parts = [head.replace("ACTIONS", _meanings("Action", ACTIONS))]
    for name, subject in SUBJECTS.items():
        parts.append(f"\n## {name}\n\n{plain(subject.about)}\n\n")
        rows = map(_row, subject.checks)
        table = markdown(("Check", "A failure", "Settings", "What must hold"), rows)
        parts.append(table if subject.checks else "See [checks of your own](site-checks.md).\n")
    return "".join(parts)


def _row(check: Check) -> tuple[str, ...]:
    settings = ", ".join(f"`{key}`" for key in check.settings)
    meaning = re.split(r"(?<=\.)\s", check.meaning.strip(), maxsplit=1)[0]
    meaning = re.sub(r"``(.+?)``", r"`\1`", " ".join(meaning.split()))
    return f"`{check.id}`", words(check.cost.severity), settings, plain(meaning)
