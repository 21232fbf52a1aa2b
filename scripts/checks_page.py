"""docs/checks.md from what the checks declare: what `nodeready explain` says, as a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tables import plain

from nodeready.operations import STEPS
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Check
from nodeready.subjects.severity import ACTIONS, SEVERITIES, ladder_text, words

_HEAD = """\
# Checks

What nodeready looks at, and why. This page is made from the code by `scripts/make_docs.py`;
`nodeready explain CHECK` prints an entry of it.

An id never changes its meaning. What each status says:

| Status | Meaning |
| --- | --- |
| ok | as the policy wants it, now and at the next boot |
| fail | not so: jobs, or the people who debug them, will run into it |
| warn | a person should know or do something; it stops no job |
| unknown | could not be observed, for the reason given; never counts as ok |
| waived | a fail or warn that the policy accepts, for its reason (`waivers`); always listed |
| na | does not apply to this node, for the reason given |

A failure that an operation repairs is what `nodeready deploy` changes. Everything else stands
under "for a person" in its output, with what to do; words in capitals stand for what the node
shows. A subject that could not be observed at all gives one result, `SUBJECT.observed`, with the
status unknown and the reason.

"A failure" is the severity: what it costs a job. Reports list the findings of one status by it,
the worst first:

| Severity | Meaning |
| --- | --- |
SEVERITIES
"Actions" are the ladder that repairs a failure, the mildest first: each is for what the one before
left. A finding can begin further up: an Xid with the action of NVIDIA's catalog. The first action
for what is unknown is to inspect.

| Action | Meaning |
| --- | --- |
ACTIONS"""


def _rows(meanings: Mapping[str, str]) -> str:
    return "".join(f"| {words(name)} (`{name}`) | {text} |\n" for name, text in meanings.items())


#: In place of the checks of a subject that only policies declare.
_DECLARED = "[checks of your own](site-checks.md)"


def page() -> str:
    """The whole page."""
    head = _HEAD.replace("SEVERITIES\n", _rows(SEVERITIES) + "\n")
    parts = [head.replace("ACTIONS", _rows(ACTIONS)), "\n", *_contents()]
    for name, subject in SUBJECTS.items():
        parts.append(f"\n## {name}\n\n{plain(subject.about)}\n")
        parts += [_entry(check) for check in subject.checks]
        parts += [] if subject.checks else [f"\nSee {_DECLARED}.\n"]
    return "".join(parts)


def _contents() -> Iterator[str]:
    for name, subject in SUBJECTS.items():
        links = ", ".join(
            f"[{check_id}](#{check_id.replace('.', '')})" for check_id in subject.ids()
        )
        yield f"- **{name}**: {links or _DECLARED}\n"


def _entry(check: Check) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", check.meaning, flags=re.S)
    lines = [f"\n### {check.id}\n", plain(text), ""]
    lines += [
        f"- Repaired by the operation `{step.name}`: {step.does[:1].lower()}{step.does[1:]}"
        for step in STEPS
        if step.name == check.fixed_by
    ]
    lines.append(f"- A failure: {words(check.cost.severity)}")
    lines.append(f"- Actions: {plain(ladder_text(check.cost))}")
    lines += [f"- {plain(str(remedy))}" for remedy in check.remedies]
    if check.settings:
        keys = ", ".join(f"`{key}`" for key in check.settings)
        lines.append(f"- Settings: {keys}")
    return "\n".join(lines).rstrip() + "\n"
