"""The index of an incident on a terminal: its verdict, and its parts with their files."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.outcome import reasons_of
from nodeready.core.text import counted
from nodeready.reports.lines import STYLES, StyledLine, line, node_set, with_inventory
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.similar_texts import reasons
from nodeready.runs.incident import Incident, Part

#: Status of a part -> its style in `STYLES`.
_STYLES = {"kept": "ok", "partial": "warn", "empty": "na", "missing": "fail"}
#: Columns of the names of parts.
_NAME_WIDTH = 10
#: Maximum files of a part without -v.
_MAX_FILES = 4
#: Part -> how to read it.
_READERS = {
    "stacks": "nodeready stacks --from {}/stacks, or stacks.html in a browser",
    "logs": "the last lines of the ranks' logs; the newest last",
    "cores": "cores.json, and a backtrace per file",
    "audit": "audit.txt, and audit.json for a program",
}


def incident_index(incident: Incident, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The job, the verdict, and each part with its files."""
    owner = f" of {incident.user}" if incident.user else ""
    yield line((f"job {incident.job}{owner}", "bold"), f", {incident.started}: {incident.reason}")
    if not incident.complete:
        yield line(("PARTIAL: interrupted", STYLES["warn"]))
    verdict = incident.verdict
    if verdict is None:
        yield line("no verdict: there are no stacks")
    else:
        yield line((f"{verdict.kind}: ", "bold"), verdict.text)
        for suspect in verdict.suspects[:4]:
            suspected = ranks(suspect.ranks) or "no rank"
            place = f" on {node_set(suspect.nodes)}" if suspect.nodes else ""
            reason = f": {suspect.for_[0]}" if suspect.for_ else ""
            yield line(f"{'':<{_NAME_WIDTH}}suspect: {suspected}{place}{reason}")
    for row in incident.advice:
        yield line(f"{'':<{_NAME_WIDTH}}{with_inventory(row, options.inventory)}")
    yield line("")
    directory = incident.archive.rpartition("/")[2].removesuffix(".tar.gz") or "DIR"
    for part in incident.parts:
        yield from _part(part, directory, options)
    yield line("")
    if incident.archive:
        yield line("archive of all files: ", (incident.archive, "bold"))
    else:
        yield line(("there is no archive", STYLES["fail"]))


def _part(part: Part, directory: str, options: Options) -> Iterator[StyledLine]:
    text = "; ".join(filter(None, (part.content, part.reason)))
    status = part.status, STYLES[_STYLES[part.status]]
    name = f"{part.name:<{_NAME_WIDTH}}", "bold"
    yield line(name, status, f": {text}" if text else "")
    if part.files:
        yield line(f"{'':<{_NAME_WIDTH}}{_READERS[part.name].format(directory)}")
        few = part.files if options.verbose else part.files[:_MAX_FILES]
        hidden = len(part.files) - len(few)
        yield line(
            " " * _NAME_WIDTH,
            ", ".join(name.partition("/")[2] for name in few),
            f" and {counted(hidden, 'more file')}" if hidden else "",
        )
    for reason, names in reasons(reasons_of(part.gaps).items(), options.verbose):
        yield line(" " * _NAME_WIDTH, (node_set(names), "bold"), f": {reason}")
