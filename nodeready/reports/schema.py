"""The JSON Schema of every document, generated from dataclasses: docs/schema/.

Where the JSON is a document's own dataclass, that class is the schema; else a dataclass of this
file says what the JSON holds. A field's meaning is the line of its name in the docstring of its
class. What a type does not say (a minimum, the words that a field takes) stands beside the type
in the words of JSON Schema: ``Annotated[int, {"minimum": 0}]``. `scripts/make_docs.py` writes the
files; the tests hold real documents against them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union

from nodeready.audit.document import FAILED, NODE_STATUSES, UNREACHABLE, Outlier, Recorded
from nodeready.deploy import document as deploy
from nodeready.smoke import document as smoke
from nodeready.smoke import search
from nodeready.subjects.result import STATUSES, Result
from nodeready.triage import incident, logs
from nodeready.triage.stacks import debuggable
from nodeready.triage.stacks import document as stacks

_SECOND = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}"
#: A moment, UTC. Perhaps: also "", for stacks that were read from files.
Moment = Annotated[str, {"format": "date-time", "pattern": rf"^{_SECOND}(\.[0-9]+)?Z$"}]
Perhaps = Annotated[str, {"pattern": f"^$|^{_SECOND}Z$"}]
Number = Annotated[int, {"minimum": 0}]
Name = Annotated[str, {"minLength": 1}]
Names = Annotated[tuple[Name, ...], {"minItems": 1}]
#: A field that is only there where it says something.
OPTIONAL = {"optional": True}
#: What was observed of one subject.
Observed = Annotated[Any, {"type": ["object", "array", "string", "number", "boolean", "null"]}]


@dataclass(frozen=True)
class Node:
    """One node.

    status:  the worst of its results, in this order; unreachable: it was not reached, or was lost
             on the way; failed: it could not be looked at for another reason
    seconds: wall time of its look, connection included; 0: there was none
    error:   why it could not be looked at; empty when it could
    age_seconds: how old its verdict is, by the clock of the machine that collected it; only in an
             audit of recorded verdicts, where there is one
    facts:   subject -> what was observed. The fields are those of the subject's observation; a
             subject that could not be observed has the field unknown alone, with the reason
    """

    name: Name
    status: Annotated[str, {"enum": NODE_STATUSES}]
    seconds: Annotated[float, {"minimum": 0}]
    error: str
    age_seconds: Annotated[float, OPTIONAL]
    facts: Annotated[Mapping[str, Observed], {"propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"}}]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Summary:
    """Counts.

    nodes:   nodes by status
    results: results by status
    """

    nodes: Annotated[Mapping[str, Number], {"keys": NODE_STATUSES}]
    results: Annotated[Mapping[str, Number], {"keys": STATUSES}]


@dataclass(frozen=True)
class Audit:
    """What `nodeready audit --format json` prints. Text is one line without control characters;
    bytes that are no UTF-8 stand in it as \\xNN. Units are in the names of fields.

    started:       when the audit began, UTC
    finished:      when it ended, UTC
    policy_digest: of the nodes' policies: equal digests, equal expectations
    complete:      false when it was interrupted: some nodes were not looked at
    recorded:      from where the verdicts are; only in an audit of recorded verdicts
    outliers:      facts in which some nodes differ from most of their group
    """

    started: Moment
    finished: Moment
    policy_digest: Annotated[str, {"pattern": "^[0-9a-f]*$"}]
    complete: bool
    recorded: Annotated[Recorded, OPTIONAL]
    nodes: tuple[Node, ...]
    outliers: tuple[Outlier, ...]
    summary: Summary


@dataclass(frozen=True)
class Ready(Audit):
    """What `nodeready ready --format json` prints: the fields of nodeready.audit/1, the proofs
    among the results, and who is ready.

    started:  when it began, UTC
    budget_s: seconds that it was allowed to take
    needed:   nodes that had to be ready; null: all of them
    enough:   whether the job can start
    go:       the nodes that are ready, in the inventory's order
    no_go:    the others, each with its reasons: `CHECK: what is`, or why it could not be looked at
    """

    budget_s: Annotated[int, {"minimum": 1}]
    needed: Annotated[int | None, {"minimum": 1}]
    enough: bool
    go: tuple[str, ...]
    no_go: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Suspect:
    """Who spoils the collective. scale: no node alone, only so many of them together.

    gpus:     of kind gpu, its numbers on the one node
    evidence: one sentence each, the strongest first
    """

    kind: Annotated[str, {"enum": search.KINDS}]
    nodes: tuple[Name, ...]
    gpus: tuple[Number, ...]
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class TestedNode(smoke.Node):
    """One node.

    status: suspect: it is named by a suspect; unreachable: it was lost or not reached; untested:
            nothing could be tested there; warned: it passed, and something got worse meanwhile
    """

    status: Annotated[str, {"enum": smoke.NODE_STATUSES}]


@dataclass(frozen=True)
class Smoke:
    """What `nodeready smoke --format json` prints. Text is one line without control characters;
    bytes that are no UTF-8 stand in it as \\xNN.

    started:  when it began, UTC
    finished: when it ended, UTC
    verdict:  GO: every test was made, and all passed
    complete: false when it was interrupted
    stopped:  why it ended before it was through, such as the budget; "": it was
    engine:   that made the collectives; "": none was found
    proves:   what its pass proves
    control:  the engine of the control arm; "": there was none
    budget_s: seconds that it was allowed to take
    tests:    collectives of several nodes
    alone:    tests of one node
    rounds:   of tests that ran side by side
    go:       the nodes that are not excluded, in the inventory's order
    exclude:  few nodes without which nothing of what was found is left: those that are suspects,
              were not reached or not tested, and of pairs the nodes in which most of them meet
    links:    the bandwidth of each class of links
    summary:  nodes by status
    """

    started: Moment
    finished: Moment
    verdict: Annotated[str, {"enum": ("GO", "NO-GO")}]
    complete: bool
    stopped: str
    engine: str
    proves: str
    control: str
    budget_s: Annotated[int, {"minimum": 1}]
    tests: Number
    alone: Number
    rounds: Number
    go: tuple[Name, ...]
    exclude: tuple[Name, ...]
    suspects: tuple[Suspect, ...]
    nodes: tuple[TestedNode, ...]
    links: tuple[smoke.Link, ...]
    summary: Annotated[Mapping[str, Number], {"keys": smoke.NODE_STATUSES}]


@dataclass(frozen=True)
class DeployedNode:
    """One node of a deploy.

    status:       unreachable: not reached, or lost on the way; failed: not looked at for another
                  reason, or a step failed, or did not repair what it should; to-change: a change
                  is planned and was not made; changed: all were made. Where nothing is planned,
                  unknown: a check could not be observed; for-a-person: one is bad that no
                  operation of ours repairs; ok: as the policy wants it
    error:        why it could not be looked at or was lost; else empty
    changes:      the plan, in order
    refused:      steps that cannot be planned -> one line why
    outcome:      null: nothing was changed, because only the plan was asked for, or there is none
    for_a_person: bad results of the latest look that no operation of ours repairs
    results:      how many results of the latest look have each status; empty where there was none
    """

    name: str
    status: Annotated[str, {"enum": deploy.STATUSES}]
    error: str
    changes: tuple[deploy.Change, ...]
    refused: Mapping[str, str]
    outcome: deploy.Outcome | None
    for_a_person: tuple[Result, ...]
    results: Annotated[Mapping[str, Number], {"propertyNames": {"enum": STATUSES}}]


@dataclass(frozen=True)
class Deploy:
    """What `nodeready deploy --format json` prints: the plan of every node and, without --check,
    what became of it.

    started:  when it began, UTC
    finished: when it ended, UTC
    check:    only the plan: nothing was to be changed, or somebody said no
    complete: false when it was interrupted
    subjects: those that were chosen
    summary:  nodes by status
    """

    started: Moment
    finished: Moment
    check: bool
    complete: bool
    subjects: tuple[str, ...]
    nodes: tuple[DeployedNode, ...]
    summary: Annotated[Mapping[str, Number], {"keys": deploy.STATUSES}]


@dataclass(frozen=True)
class Stacks:
    """What `nodeready stacks --format json` prints: where every rank of a job stands, grouped, the
    most suspicious group first.

    started:    UTC
    finished:   UTC
    job:        empty where the processes name none
    user:       whose job it is; empty: not told
    world_size: what the ranks say; null: nobody says, or they disagree
    complete:   false: interrupted; ranks that were not found then do not count as missing
    verdict:    null: no rank was found
    errors:     node -> why it gave no answer, or only a part of it
    others:     the jobs that are not shown, the largest first
    advice:     what to look at next
    """

    started: Perhaps
    finished: Perhaps
    job: str
    user: str
    world_size: int | None
    complete: bool
    verdict: stacks.Verdict | None
    groups: tuple[stacks.Group, ...]
    witnesses: tuple[stacks.Witness, ...]
    processes: tuple[stacks.Rank, ...]
    errors: Mapping[str, str]
    others: tuple[stacks.OtherJob, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Debuggable:
    """What `nodeready stacks --check --format json` prints. Text is one line without control
    characters.

    started:  when the capture began, UTC
    finished: when it ended, UTC
    job:      the job; empty: not told, or several
    complete: false when it was interrupted
    findings: by item, the worst of each first
    errors:   node -> why it gave no answer
    """

    started: Perhaps
    finished: Perhaps
    job: str
    complete: bool
    findings: tuple[debuggable.Finding, ...]
    errors: Mapping[str, str]


@dataclass(frozen=True)
class Call:
    """One call of a backtrace.

    function: `??` where gdb has no name
    file:     of the source; "": no debug information
    line:     0: none
    library:  the shared library's file name; "": the program itself, or not told
    """

    function: str
    file: str
    line: Number
    library: str


@dataclass(frozen=True)
class CrashGroup:
    """Crashes of the same program by the same signal in the same place.

    signal:   0: copies of live processes; null: not known
    program:  without its directory
    function: the first function with a name that is not only how a program ends itself: where it
              crashed, or what called that
    cores:    indexes into `cores`, the first to crash first
    frames:   of the thread that got the signal, innermost first, as gdb numbers them
    """

    signal: int | None
    signal_name: str
    program: str
    function: str
    cores: tuple[Number, ...]
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    frames: tuple[Call, ...]


@dataclass(frozen=True)
class Core:
    """One core file, however many nodes see it.

    node:        where it crashed, by the file's name; else the node that read it
    seen_on:     the nodes that see this file
    written:     ISO 8601, UTC
    age_s:       by the node's clock
    whole_bytes: the size that its own headers give
    command:     the first 80 characters
    threads:     0: not known
    unread:      why there is no backtrace; "": there is one
    text_file:   of `-o DIR`: what gdb said; "": nothing
    python:      the lines of py-bt
    """

    node: str
    seen_on: tuple[str, ...]
    path: str
    written: str
    age_s: float
    size_bytes: int
    whole_bytes: int | None
    truncated: bool
    signal: int | None
    pid: int | None
    uid: int | None
    user: str
    comm: str
    program: str
    command: str
    threads: int
    rank: int | None
    job: str
    unread: str
    warning: str
    text_file: str
    python: tuple[str, ...]


@dataclass(frozen=True)
class Cores:
    """What `nodeready cores --format json` prints, and DIR/cores.json: where every core's program
    crashed, equal crashes together, the group that began first in front.

    started:  ISO 8601, UTC
    finished: ISO 8601, UTC
    complete: false: interrupted
    errors:   node -> why it gave no answer
    notes:    node -> what kept it from looking somewhere
    more:     node -> how many older cores were not read
    """

    started: str
    finished: str
    complete: bool
    groups: tuple[CrashGroup, ...]
    cores: tuple[Core, ...]
    errors: Mapping[str, str]
    notes: Mapping[str, tuple[str, ...]]
    more: Mapping[str, int]


@dataclass(frozen=True)
class Tail:
    """What `nodeready tail --format json` prints. Text is without control characters: they stand
    in it as visible escapes.

    started:     ISO 8601, UTC
    finished:    ISO 8601, UTC
    grep:        the regular expression, or empty
    complete:    false when it was interrupted
    left_out:    files that match, too, on nodes that have more than --max-files
    groups:      by kind, within a kind the smallest first
    reports:     of PyTorch's watchdogs: of each process group the rank that is least far first
    notes:       node -> what is wrong with its whole answer
    unreachable: node -> why it could not be reached
    failed:      node -> why it gave no answer although it was reached
    """

    started: str
    finished: str
    pattern: str
    grep: str
    complete: bool
    left_out: Number
    groups: tuple[logs.LogGroup, ...]
    reports: tuple[logs.LogReport, ...]
    notes: Mapping[str, str]
    unreachable: Mapping[str, str]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class Missing:
    """Nodes that could not be looked at, by the reason."""

    error: Name
    nodes: Names


@dataclass(frozen=True)
class Share:
    """Nodes that suggest the same value.

    value: null: these nodes need none
    """

    value: str | None
    nodes: Names


@dataclass(frozen=True)
class Untold:
    """Nodes of which it could not be found out, by the reason."""

    reason: Name
    nodes: Names


@dataclass(frozen=True)
class Variable:
    """A variable of a job's environment.

    value:          what to export; null: nothing
    reason:         why this value, or why none
    settled:        false when somebody has to look: nodes differ or do not tell, or no port is
                    free
    nodes_by_value: which nodes suggest which value, the most common first
    unknown:        the nodes of which it could not be found out, by the reason
    notes:          further lines about it, such as who has the ports that were passed over
    """

    name: Annotated[str, {"pattern": "^[A-Z][A-Z0-9_]*$"}]
    value: Annotated[str | None, {"pattern": "^[A-Za-z0-9=/][A-Za-z0-9_.:,=/%-]*$"}]
    reason: Name
    settled: bool
    nodes_by_value: tuple[Share, ...]
    unknown: tuple[Untold, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Env:
    """What `nodeready env --format json` prints. Text is one line without control characters.

    taken:   when the nodes were looked at, UTC
    nodes:   the nodes that were looked at
    missing: the nodes that could not be looked at, by the reason
    """

    taken: Annotated[str, {"format": "date-time", "pattern": f"^{_SECOND}Z$"}]
    nodes: Names
    missing: tuple[Missing, ...]
    variables: tuple[Variable, ...]


@dataclass(frozen=True)
class Incident:
    """What `nodeready incident --format json` prints, and DIR/incident.json: what was kept of a
    job that hangs. No text has a secret that can be known as one.

    started:  UTC
    finished: UTC
    job:      as it was asked for
    user:     whose job it is; empty: not told
    reason:   why it was taken: somebody asked, or what was watched
    complete: false: interrupted; the parts that are missing say so
    verdict:  of the stacks and all witnesses; null: there is none
    advice:   what to look at next
    parts:    in the order in which they were taken
    archive:  the path of the one file with all of it; empty: it could not be written
    """

    started: Moment
    finished: Moment
    job: str
    user: str
    reason: str
    complete: bool
    verdict: stacks.Verdict | None
    advice: tuple[str, ...]
    archive: str
    parts: tuple[incident.Part, ...]


#: The document of `nodeready.reports.registry.Format` -> the class that says what its JSON holds.
DOCUMENTS: dict[str, type] = {
    "audit": Audit,
    "ready": Ready,
    "smoke": Smoke,
    "deploy": Deploy,
    "stacks": Stacks,
    "debuggable": Debuggable,
    "cores": Cores,
    "tail": Tail,
    "env": Env,
    "incident": Incident,
}


def _when(field: str, values: tuple[str, ...], then: object, other: object) -> dict[str, Any]:
    rule = {"if": {"properties": {field: {"enum": list(values)}}}, "then": {"properties": then}}
    return rule if other is None else {**rule, "else": {"properties": other}}


#: The rules between the fields of one object.
_RULES: dict[type, list[dict[str, Any]]] = {
    Node: [
        _when(
            "status", (UNREACHABLE, FAILED), {"error": {"minLength": 1}}, {"error": {"const": ""}}
        )
    ],
    stacks.Group: [
        _when(
            *("kind", ("stack",), {"processes": {"minimum": 1}, "nodes": {"minItems": 1}}),
            {"verdict": {"const": None}},
        ),
        _when(
            *("kind", ("missing",), {"processes": {"const": 0}, "ranks": {"minItems": 1}}), None
        ),
    ],
}
_PLAIN: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _sentence(text: str) -> str:
    """A docstring's words in the terms of JSON; "" for words that only repeat an enum."""
    words = " ".join(text.split()).rstrip(";.").replace("``", "`")
    words = re.sub(r"\bNone\b", "null", words).replace("() ", "empty ")
    if not words or re.fullmatch(r"one of [A-Z_]+", words):
        return ""
    named = words.split()[0].endswith(":")
    return f"{words if named else words[0].upper() + words[1:]}."


def _meanings(kind: type, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The meaning of a class and of its fields, from its docstring and those of its bases."""
    field = re.compile(rf"((?:{'|'.join(names)})(?:, [a-z_]+)*):\s+(.*)")
    found: dict[str, str] = {}
    about = ""
    for one in reversed(kind.__mro__):
        about, *rows = inspect.cleandoc(one.__dict__.get("__doc__") or "").split("\n\n")
        # A field's lines: its own, and those that are indented below it.
        for row in re.sub(r"\n\s+", " ", "\n".join(rows)).splitlines():
            if match := field.fullmatch(row):
                found |= dict.fromkeys(match[1].split(", "), _sentence(match[2]))
    return _sentence(about), found


def _hints(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass or a named tuple with their types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = (
        [field.name for field in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else kind._fields
    )
    # Words of Python's cannot be names there: they have an underscore, which JSON needs not.
    return {name.rstrip("_"): hints[name] for name in names}


class _Writer:
    """One document's schema while its parts are collected."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type. Raises TypeError for one that JSON does not have."""
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return self._annotated(inside[0], inside[1:])
        if kind is Any:
            return {}
        if isinstance(kind, type) and kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if origin in (Union, types.UnionType):
            return self._either([self.of(one) for one in inside])
        if origin is tuple and inside[1:] == (...,):
            return {"type": "array", "items": self.of(inside[0])}
        if origin is Mapping:
            return {"type": "object", "additionalProperties": self.of(inside[1])}
        if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
            name = kind.__name__.lower()
            if name not in self.parts:
                self.parts[name] = {}
                self.parts[name] = self.object(kind)
            return {"$ref": f"#/$defs/{name}"}
        raise TypeError(f"{kind}: no type of JSON")

    def _annotated(self, kind: Any, more: tuple[Any, ...]) -> dict[str, Any]:
        found = self.of(kind)
        for given in more:
            words = json.loads(json.dumps(given))
            keys = words.pop("keys", None)
            if keys is not None:
                each = found.pop("additionalProperties")
                found["properties"] = dict.fromkeys(keys, each)
                found |= {"required": keys, "additionalProperties": False}
            if "enum" in words:
                found.pop("type", None)
            found |= words
        return found

    def _either(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        types_ = [row["type"] for row in rows if set(row) == {"type"}]
        if len(types_) == len(rows):
            return {"type": types_}
        return {"anyOf": rows}

    def object(self, kind: Any, schema: str = "") -> dict[str, Any]:
        """The schema of a dataclass: all of its fields, and no other."""
        hints = _hints(kind)
        about, meanings = _meanings(kind, hints)
        fields: dict[str, Any] = {"schema": {"const": schema}} if schema else {}
        optional = set()
        for name, hint in hints.items():
            fields[name] = self.of(hint)
            if fields[name].pop("optional", False):
                optional.add(name)
            if meanings.get(name):
                fields[name]["description"] = meanings[name]
        rules = _RULES.get(kind, [])
        return {
            **({"description": about} if about else {}),
            "type": "object",
            "properties": fields,
            "required": [name for name in fields if name not in optional],
            "additionalProperties": False,
            **({"allOf": rules} if rules else {}),
        }


def schema(document: str) -> dict[str, Any]:
    """The JSON Schema of ``nodeready.DOCUMENT/1``. Raises KeyError for what is no document."""
    writer, name = _Writer(), f"nodeready.{document}/1"
    whole = writer.object(DOCUMENTS[document], name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nodeready:{document}:1",
        "title": name,
        **whole,
        **({"$defs": writer.parts} if writer.parts else {}),
    }


def text(document: str) -> str:
    """The content of the file docs/schema/DOCUMENT-1.json."""
    return json.dumps(schema(document), indent=2) + "\n"
