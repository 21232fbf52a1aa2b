"""Looks at nodes from the documents of `audit` and `ready` in files."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from nodeready.core import wire
from nodeready.core.exit_codes import Refused
from nodeready.core.files import only_regular
from nodeready.core.result import STATUSES, Result
from nodeready.runs.memory.facts import compared_facts
from nodeready.runs.memory.look import NodeLook, Value

#: Bytes of a file; 30,000 nodes have some 1 GB.
_MAX_FILE = 2 << 30
#: Bytes of memory for a document without a line for each node; a node has another bound.
_MAX_WHOLE = 1 << 30
_SCHEMA = re.compile(r"nodeready\.(audit|ready)/[12]\Z")
#: A node in the layout in which the reports write JSON, and the rows around the nodes.
_ROW = re.compile(rb'\{"name":("(?:[^"\\]|\\.)*")')
_FIRST, _LAST = b'"nodes": [', b"],"


class DocumentError(Refused):
    """A file that is no document of audit or ready: one line."""


class AuditFile:
    """The nodes of a JSON file of `audit` or `ready`. A node is read when it is asked for.

    started: when the audit began, UTC
    names:   of the nodes, in the order of the file

    Raises DocumentError.
    """

    def __init__(self, source: str, data: bytes) -> None:
        self._source = source
        self._rows: dict[str, Any] = {}
        document = self._decoded(self._without_rows(data), _MAX_WHOLE)
        if not isinstance(document, dict) or not _SCHEMA.match(str(document.get("schema"))):
            raise DocumentError(
                f"{source}: no document of audit or ready: make it with --format json -o FILE"
            )
        nodes = document.get("nodes")
        for row in nodes if isinstance(nodes, list) else ():
            if isinstance(row, dict):
                self._rows[str(row.get("name"))] = row
        gaps = document.get("gaps")
        #: Node -> why it gave no answer; a document of version 1 has it in the node's row.
        self._reasons = {
            str(gap.get("node")): str(gap.get("reason"))
            for gap in (gaps if isinstance(gaps, list) else ())
            if isinstance(gap, dict)
        }
        self.started = str(document.get("started"))
        self.names = tuple(self._rows)
        try:
            moment = datetime.fromisoformat(self.started.replace("Z", "+00:00"))
            self._time_s = moment.timestamp()
        except (ValueError, OverflowError):
            raise self._defect("started") from None

    @classmethod
    def read(cls, path: Path) -> AuditFile:
        """The document of this file. Raises DocumentError."""
        try:
            with open(path, "rb", opener=only_regular) as file:
                data = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise DocumentError(f"{path}: {error.strerror}") from None
        if len(data) > _MAX_FILE:
            raise DocumentError(f"{path}: larger than {_MAX_FILE >> 30} GiB")
        return cls(str(path), data)

    def _without_rows(self, data: bytes) -> bytes:
        """The document without the nodes that have a line each: these are kept as lines."""
        lines = data.split(b"\n")
        if _FIRST not in lines:
            return data
        first = lines.index(_FIRST) + 1
        last = lines.index(_LAST, first) if _LAST in lines[first:] else first
        for row in lines[first:last]:
            if match := _ROW.match(row):
                self._rows[str(self._decoded(match[1], wire.MAX_COST))] = row.rstrip(b",")
        return b"\n".join((*lines[:first], *lines[last:]))

    def _decoded(self, data: bytes, max_cost: int) -> Any:
        try:
            return wire.load_json(data, max_cost)
        except wire.DecodeError as error:
            raise self._defect(error.defect) from None

    def _defect(self, defect: str) -> DocumentError:
        return DocumentError(f"{self._source}: is no document of audit or ready ({defect})")

    def look(self, name: str) -> NodeLook:
        """The look at one of ``names``. Raises DocumentError."""
        row = self._rows[name]
        if isinstance(row, bytes):
            row = self._decoded(row, wire.MAX_COST)
        facts, results = row.get("facts"), row.get("results")
        if not isinstance(facts, dict) or not isinstance(results, list):
            raise self._defect(f"node {name[:80]}")
        stable: dict[str, Value] = {}
        totals: dict[str, int] = {}
        for subject, subject_facts in facts.items():
            compared = compared_facts(subject, subject_facts)
            stable.update(compared.stable)
            totals.update(compared.counters)
        by_check = {
            result["check"]: Result(
                result["check"], result["status"], actual=str(result.get("actual", ""))
            )
            for result in results
            if isinstance(result, dict)
            and isinstance(result.get("check"), str)
            and result.get("status") in STATUSES
        }
        host = facts.get("host")
        boot_id = host.get("boot_id") if isinstance(host, dict) else None
        error = self._reasons.get(name) or str(row.get("error", ""))
        return NodeLook(name, self._time_s, str(boot_id or ""), 0, error, stable, totals, by_check)
