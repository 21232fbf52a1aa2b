"""The index of an incident on a terminal: its verdict, and its parts with their files."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.reports.lines import STYLES, StyledLine, line, nodes
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.similar_texts import reasons
from nodeready.text import counted
from nodeready.triage import incident as kept

#: The style of a part's status, by that of other reports.
_STYLES = {"kept": "ok", "partial": "warn", "empty": "na", "missing": "fail"}
#: Columns of the words on the left.
_PART = 10
#: Files of a part that are named without -v.
_FILES = 4
#: How each part is read.
_READ = {
    "stacks": "nodeready stacks --from {directory}/stacks, or stacks.html in a browser",
    "logs": "the last lines of the ranks' logs; the newest last",
    "cores": "cores.json, and a backtrace per file",
    "audit": "audit.txt, and audit.json for a program",
}


def incident_index(incident: kept.Incident, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The index."""
    owner = f" of {incident.user}" if incident.user else ""
    yield line((f"job {incident.job}{owner}", "bold"), f", {incident.started}: {incident.reason}")
    if not incident.complete:
        yield line(("PARTIAL: it was interrupted", STYLES["warn"]))
    verdict = incident.verdict
    if verdict is None:
        yield line("no verdict: there are no stacks")
    else:
        yield line((f"{verdict.kind}: ", "bold"), verdict.text)
        for suspect in verdict.suspects[:4]:
            suspected = ranks(suspect.ranks) or "no rank"
            place = f" on {nodes(suspect.nodes)}" if suspect.nodes else ""
            reason = f": {suspect.for_[0]}" if suspect.for_ else ""
            yield line(f"{'':<{_PART}}suspect: {suspected}{place}{reason}")
    for row in incident.advice:
        yield line(f"{'':<{_PART}}{row}")
    yield line("")
    directory = incident.archive.rpartition("/")[2].removesuffix(".tar.gz") or "DIR"
    for part in incident.parts:
        yield from _part(part, directory, options)
    yield line("")
    if incident.archive:
        yield line("all of it: ", (incident.archive, "bold"))
    else:
        yield line(("there is no archive", STYLES["fail"]))


def _part(part: kept.Part, directory: str, options: Options) -> Iterator[StyledLine]:
    text = "; ".join(filter(None, (part.found, part.why)))
    yield line((f"{part.name:<{_PART}}", "bold"), (part.status, STYLES[_STYLES[part.status]]),
               f": {text}" if text else "")  # fmt: skip
    if part.files:
        yield line(f"{'':<{_PART}}{_READ[part.name].format(directory=directory)}")
        few = part.files if options.verbose else part.files[:_FILES]
        hidden = len(part.files) - len(few)
        yield line(
            " " * _PART,
            ", ".join(name.partition("/")[2] for name in few),
            f" and {counted(hidden, 'more file')}" if hidden else "",
        )
    for reason, names in reasons(part.errors.items(), options.verbose):
        yield line(" " * _PART, (nodes(names), "bold"), f": {reason}")
