"""docs/checks.md from nodeready/catalog.py: what `nodeready explain` says, as a page."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tables import plain

from nodeready import catalog
from nodeready.catalog import Entry
from nodeready.subjects import SUBJECTS

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
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "\n", *_contents()]
    for name in SUBJECTS:
        parts.append(f"\n## {name}\n\n{plain(catalog.about(name))}\n")
        parts += [_entry(entry) for entry in catalog.entries(name)]
    return "".join(parts)


def _contents() -> Iterator[str]:
    for name, subject in SUBJECTS.items():
        links = ", ".join(f"[{one}](#{one.replace('.', '')})" for one in subject.ids())
        yield f"- **{name}**: {links}\n"


def _entry(entry: Entry) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", entry.meaning, flags=re.S)
    lines = [f"\n### {entry.id}\n", plain(text), ""]
    lines += [
        f"- Repaired by the operation `{name}`: {does[:1].lower()}{does[1:]}"
        for name, does in entry.repairs
    ]
    lines += [f"- {plain(act)}" for act in entry.acts]
    if entry.settings:
        keys = ", ".join(f"`{key}`" for key in entry.settings)
        lines.append(f"- Settings: {keys}")
    return "\n".join(lines).rstrip() + "\n"
