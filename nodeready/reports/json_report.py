"""Every command's document as JSON: docs/schema/. One line per node, group or process.

The text is plain ASCII. Characters that a terminal obeys, and bytes that are no UTF-8, are visible
escapes (``\\x1b``), as in every other report; tabs stay.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nodeready.reports.registry import PLAIN, Options
from nodeready.subjects.base import Unknown
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.wire import field_names, plain
from nodeready.text import sanitise

if TYPE_CHECKING:
    # A node runs this module for its own audit and has no other document than the audit's.
    from nodeready.audit.document import Audit, NodeReport, Ready
    from nodeready.deploy.document import Deploy, Node
    from nodeready.ready.job_env import Environment, Groups
    from nodeready.smoke.document import Smoke
    from nodeready.triage.cores import CoreGroup as CrashGroup
    from nodeready.triage.cores import Cores, Crash
    from nodeready.triage.incident import Incident
    from nodeready.triage.logs import TailDocument
    from nodeready.triage.stacks.debuggable import Debuggable
    from nodeready.triage.stacks.document import Frame, Group, Stacks, Verdict, Witness

# One escape of a JSON text; a surrogate pair is one character.
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})|([bfnrt\"\\/]))"
)
_CONTROL = {"b": "\b", "f": "\f", "n": "\n", "r": "\r"}
_RESULT = tuple(f.name for f in fields(Result))


def _safe(match: re.Match[str]) -> str:
    if match[1]:
        return match[0]
    char = chr(int(match[3], 16)) if match[3] else _CONTROL.get(match[4], "")
    shown = sanitise(char)
    return match[0] if shown == char else shown.replace("\\", "\\\\")


def dump(data: Any) -> str:
    """Plain data as one line of JSON, without a character that a terminal obeys."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return _ESCAPE.sub(_safe, text) if "\\" in text else text


# --- Observations. Those of thousands of nodes are most of a document: their text is made at once,
# without plain data in between, and that of what many nodes share is made once.

_QUOTED: dict[str, str] = {}
_MOST_QUOTED, _LONGEST_QUOTED = 20_000, 160
#: What was met -> itself, and its text once it was met again. By its id: a part of an observation
#: is one object where nodes share it.
_SHARED: dict[int, tuple[Any, str]] = {}
_MOST_SHARED, _LEAST_SHARED = 512, 4
_Text = Callable[[Any], str]


def _quoted(text: str) -> str:
    known = _QUOTED.get(text)
    if known is not None:
        return known
    made = encode_basestring_ascii(text)
    made = _ESCAPE.sub(_safe, made) if "\\" in made else made
    if len(text) <= _LONGEST_QUOTED:
        if len(_QUOTED) >= _MOST_QUOTED:
            _QUOTED.clear()
        _QUOTED[text] = made
    return made


def _once(make: _Text) -> _Text:
    """The text of something that many nodes may share, and that nobody can change."""

    def text(seen: Any) -> str:
        if len(seen) < _LEAST_SHARED:
            return make(seen)
        known = _SHARED.get(id(seen))
        met = known is not None and known[0] is seen
        if known is not None and met and known[1]:
            return known[1]
        made = make(seen)
        if len(_SHARED) >= _MOST_SHARED:
            _SHARED.clear()
        _SHARED[id(seen)] = seen, made if met else ""
        return made

    return text


def _of_list(seen: Iterable[Any]) -> str:
    return f"[{','.join([shown(one) for one in seen])}]"


def _of_fields(names: tuple[str, ...]) -> _Text:
    (first, *more), texts = names, _TEXTS
    values = attrgetter(*names) if more else lambda seen: (getattr(seen, first),)
    # Each name, and room for its value.
    form = [part for name in names for part in (f',"{name}":', "")] + ["}"]
    form[0] = f'{{"{first}":'

    def text(seen: Any) -> str:
        row = form[:]
        row[1::2] = [texts.get(type(value), shown)(value) for value in values(seen)]
        return "".join(row)

    return text


def _of_mapping(seen: Mapping[Any, Any]) -> str:
    rows = [f"{_quoted(str(key))}:{shown(value)}" for key, value in seen.items()]
    return f"{{{','.join(rows)}}}"


_TEXTS: dict[type, _Text] = {
    str: _quoted,
    int: int.__repr__,
    bool: lambda seen: "true" if seen else "false",
    type(None): lambda seen: "null",
    float: lambda seen: float.__repr__(seen) if math.isfinite(seen) else "null",
    tuple: _once(_of_list),
    dict: _of_mapping,
    MappingProxyType: _once(_of_mapping),
}


def shown(seen: Any) -> str:
    """An observation as `dump` shows it as plain data."""
    made = _TEXTS.get(type(seen))
    if made is None:
        kind = type(seen)
        names = field_names(kind)
        if issubclass(kind, (str, int, Unknown)) or not names:
            return dump(plain(seen))
        made = _TEXTS[kind] = _of_fields(names)
    return made(seen)


@lru_cache(maxsize=8192)
def _result_text(result: Result) -> str:
    return dump(_result(result))


def facts(subjects: Mapping[str, Any]) -> str:
    """What was observed on one node, by subject, as the documents show it."""
    return _of_mapping({name: subjects[name] for name in SUBJECTS if name in subjects})


def _head(schema: str, **more: Any) -> str:
    """The document's beginning: its schema, and the fields that are one line each."""
    known = {"schema": f"nodeready.{schema}", **more}
    return "{\n" + "".join(f"{dump(key)}: {dump(value)},\n" for key, value in known.items())


def listed(rows: Iterator[str]) -> Iterator[str]:
    """A JSON list, a row per line."""
    yield "["
    before = "\n"
    for row in rows:
        yield before + row
        before = ",\n"
    yield "\n]" if before != "\n" else "]"


def _result(result: Result) -> dict[str, str]:
    return {name: getattr(result, name) for name in _RESULT}


def _node(node: NodeReport) -> str:
    seen = node.snapshot.subjects if node.snapshot else {}
    told = facts(seen) if node.told is None else node.told()
    head = {
        "name": node.name,
        "status": node.status,
        "seconds": round(node.seconds, 3),
        "error": node.error,
        **({} if node.age_s is None else {"age_seconds": node.age_s}),
    }
    results = ",".join(map(_result_text, node.results))
    return f'{dump(head)[:-1]},"facts":{told},"results":[{results}]}}'


def audit(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.audit/1``. A node's facts are in memory only while its line is written."""
    recorded = {} if audit.recorded is None else {"recorded": plain(audit.recorded)}
    return _audit("audit/1", audit, **recorded)


def ready(ready: Ready, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.ready/1``: the audit's fields, and which nodes are ready."""
    return _audit(
        "ready/1",
        ready.audit,
        budget_s=ready.budget_s,
        needed=ready.needed,
        enough=ready.enough,
        go=list(ready.go),
        no_go={name: list(reasons) for name, reasons in ready.no_go.items()},
    )


def _audit(schema: str, audit: Audit, **more: Any) -> Iterator[str]:
    yield _head(
        schema,
        started=audit.started,
        finished=audit.finished,
        policy_digest=audit.policy_digest,
        complete=audit.complete,
        **more,
    )
    yield '"nodes": '
    yield from listed(map(_node, audit.nodes))
    yield ',\n"outliers": '
    yield from listed(dump(plain(outlier)) for outlier in audit.outliers)
    yield f',\n"summary": {dump(audit.summary)}\n}}\n'


def _deployed(node: Node, diff: bool) -> dict[str, Any]:
    changes = [
        {**plain(change), "diff": list(change.diff) if diff else []} for change in node.changes
    ]
    return {
        "name": node.name,
        "status": node.status,
        "error": node.error,
        "changes": changes,
        "refused": dict(node.refused),
        "outcome": plain(node.outcome),
        "for_a_person": [_result(result) for result in node.for_a_person],
        "results": dict(node.results),
    }


def deploy(deploy: Deploy, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.deploy/1``: the plan, and the outcome of each of its changes."""
    yield _head(
        "deploy/1",
        started=deploy.started,
        finished=deploy.finished,
        check=deploy.check,
        complete=deploy.complete,
        subjects=list(deploy.subjects),
    )
    yield '"nodes": '
    yield from listed(dump(_deployed(node, options.diff)) for node in deploy.nodes)
    yield f',\n"summary": {dump(deploy.summary)}\n}}\n'


def _frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [frame._asdict() for frame in frames]


def _stack(group: Group) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "verdict": group.verdict,
        "ranks": list(group.ranks),
        "nodes": list(group.nodes),
        "frames": _frames(group.frames),
        "hint": group.hint,
        "why": group.why,
        "fork": group.fork,
        "processes": group.processes,
        "native": _frames(group.native),
        "threads": [
            {"name": thread.name, "frames": _frames(thread.frames)} for thread in group.threads
        ],
        "role": group.role,
        "reason": group.reason,
        "user_frame": group.user_frame._asdict() if group.user_frame else None,
        "states": list(group.states),
        "waits_on": list(group.waits_on),
        "below": [{**one._asdict(), "frames": _frames(one.frames)} for one in group.below],
        "locals": list(group.locals),
        "about": group.about,
        "woke": group.woke,
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "kind": verdict.kind,
        "text": verdict.text,
        "suspects": [
            {
                "ranks": list(one.ranks),
                "nodes": list(one.nodes),
                "for": list(one.for_),
                "against": list(one.against),
            }
            for one in verdict.suspects
        ],
        "missing": list(verdict.missing),
    }


def _witness(witness: Witness) -> dict[str, Any]:
    return {
        "name": witness.name,
        "absent": list(witness.absent),
        "says": [one._asdict() for one in witness.says],
    }


def stacks(stacks: Stacks, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.stacks/1``: groups in the order of suspicion, frames root to leaf."""
    yield _head(
        "stacks/1",
        started=stacks.started,
        finished=stacks.finished,
        job=stacks.job,
        user=stacks.user,
        world_size=stacks.world_size,
        complete=stacks.complete,
        verdict=_verdict(stacks.verdict),
    )
    yield '"groups": '
    yield from listed(dump(_stack(group)) for group in stacks.groups)
    yield ',\n"witnesses": '
    yield from listed(dump(_witness(witness)) for witness in stacks.witnesses)
    yield ',\n"processes": '
    yield from listed(dump(process._asdict()) for process in stacks.processes)
    yield f',\n"errors": {dump(dict(stacks.errors))}'
    yield f',\n"others": {dump([one._asdict() for one in stacks.others])}'
    yield f',\n"advice": {dump(list(stacks.advice))}\n}}\n'


def debuggable(found: Debuggable, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.debuggable/1``: by item, the worst first."""
    yield _head(
        "debuggable/1",
        started=found.started,
        finished=found.finished,
        job=found.job,
        complete=found.complete,
    )
    yield '"findings": '
    yield from listed(dump(one._asdict()) for one in found.findings)
    yield f',\n"errors": {dump(dict(found.errors))}\n}}\n'


def _crashes(group: CrashGroup, numbers: dict[int, int]) -> dict[str, Any]:
    top = group.headline
    return {
        "signal": group.signal,
        "signal_name": group.signal_name,
        "program": group.program,
        "function": top.function if top else "",
        "cores": [numbers[id(crash)] for crash in group.crashes],
        "nodes": list(dict.fromkeys(crash.node for crash in group.crashes)),
        "ranks": sorted({c.core.rank for c in group.crashes if c.core.rank is not None}),
        "frames": [
            {name: getattr(frame, name) for name in ("function", "file", "line", "library")}
            for frame in group.frames
        ],
    }


def _core(crash: Crash, text_file: str) -> dict[str, Any]:
    file, core = crash.found.file, crash.core
    return {
        "node": crash.node,
        "seen_on": list(crash.found.nodes),
        "path": file.path,
        "written": crash.when,
        "age_s": round(file.age_s, 1),
        "size_bytes": file.size_bytes,
        "whole_bytes": core.whole_bytes,
        "truncated": crash.truncated,
        "signal": crash.signal,
        "pid": crash.pid,
        "uid": core.uid,
        "user": core.user,
        "comm": core.comm,
        "program": core.program,
        "command": core.command,
        "threads": core.threads,
        "rank": core.rank,
        "job": core.job,
        "unread": core.unread,
        "warning": core.warning,
        "text_file": text_file if crash.text else "",
        "python": list(crash.backtrace.python),
    }


def cores(cores: Cores, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.cores/1``: frames innermost first, as gdb numbers them."""
    numbers = {id(crash): number for number, crash in enumerate(cores.crashes)}
    yield _head("cores/1", started=cores.started, finished=cores.finished, complete=cores.complete)
    yield '"groups": '
    yield from listed(dump(_crashes(group, numbers)) for group in cores.groups)
    yield ',\n"cores": '
    yield from listed(
        dump(_core(crash, name)) for crash, name in zip(cores.crashes, cores.file_names)
    )
    yield f',\n"errors": {dump(dict(cores.errors))}'
    yield f',\n"notes": {dump({node: list(rows) for node, rows in cores.notes.items()})}'
    yield f',\n"more": {dump(dict(cores.more))}\n}}\n'


def tail(tail: TailDocument, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.tail/1``: within each kind, the smallest group first."""
    yield _head(
        "tail/1",
        started=tail.started,
        finished=tail.finished,
        pattern=tail.pattern,
        grep=tail.grep,
        complete=tail.complete,
        left_out=tail.left_out,
    )
    yield '"groups": '
    yield from listed(dump(plain(group)) for group in tail.groups)
    yield ',\n"reports": '
    yield from listed(dump(plain(one)) for one in tail.reports)
    yield f',\n"notes": {dump(dict(tail.notes))}'
    yield f',\n"unreachable": {dump(dict(tail.unreachable))}'
    yield f',\n"failed": {dump(dict(tail.failed))}\n}}\n'


def incident(incident: Incident, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.incident/1``: what was kept, a part per line."""
    yield _head(
        "incident/1",
        started=incident.started,
        finished=incident.finished,
        job=incident.job,
        user=incident.user,
        reason=incident.reason,
        complete=incident.complete,
        verdict=_verdict(incident.verdict),
        advice=list(incident.advice),
        archive=incident.archive,
    )
    yield '"parts": '
    yield from listed(dump(plain(part)) for part in incident.parts)
    yield "\n}\n"


def _shares(groups: Groups, key: str) -> list[dict[str, Any]]:
    return [{key: text or None, "nodes": list(names)} for text, names in groups]


def env(found: Environment, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.env/1``, a variable per line."""
    yield _head(
        "env/1",
        taken=found.taken,
        nodes=found.nodes,
        missing=_shares(found.missing, "error"),
    )
    rows = (
        dump(
            {
                "name": one.name,
                "value": one.value,
                "reason": one.reason,
                "settled": one.settled,
                "nodes_by_value": _shares(one.nodes_by_value, "value"),
                "unknown": _shares(one.unknown, "reason"),
                "notes": one.notes,
            }
        )
        for one in found.variables
    )
    yield '"variables": [\n' + ",\n".join(rows) + "\n]\n}\n"


def smoke(found: Smoke, options: Options = PLAIN) -> Iterator[str]:
    """``nodeready.smoke/1``: the verdict, then a suspect, a node or a class of links per line."""
    yield _head(
        "smoke/1",
        started=found.started,
        finished=found.finished,
        verdict=found.verdict,
        complete=found.complete,
        stopped=found.stopped,
        engine=found.engine,
        proves=found.proves,
        control=found.control,
        budget_s=found.budget_s,
        tests=found.tests,
        alone=found.alone,
        rounds=found.rounds,
        go=list(found.go),
        exclude=list(found.exclude),
    )
    yield '"suspects": '
    yield from listed(dump(plain(one)) for one in found.suspects)
    yield ',\n"nodes": '
    yield from listed(dump(plain(node)) for node in found.nodes)
    yield ',\n"links": '
    yield from listed(dump(plain(link)) for link in found.links)
    yield f',\n"summary": {dump(found.summary)}\n}}\n'
