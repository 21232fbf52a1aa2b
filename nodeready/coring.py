"""Look at the cores of all nodes: the way to the nodes and back.

Two rounds: what files there are, which only looks at names; then each core once, on the node that
wrote it, however many nodes see it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

from nodeready.asking import Nodes, Said, nonce, nothing, rows_of
from nodeready.audit import now
from nodeready.capture import core_program
from nodeready.capture.core_seen import Core, Done, Listing
from nodeready.cores import Cores, Crash, Found, once
from nodeready.policy import Policy
from nodeready.probes.base import ProbeError

#: Cores that are read on one node.
MOST = 20
#: Cores among which those of one job are looked for, on one node.
_AMONG = 60
#: Seconds to list them; a directory on a mount that hangs takes all of it.
_LIST_S = 30
#: Seconds to read one, beside the first, and all of a node's.
_READ_S, _FIRST_S, _ALL_S = 60, 20, 1200
#: Bytes of a backtrace that are unpacked: the node caps its text at 1 MiB of characters.
_TEXT_BYTES = 8 << 20


def look(nodes: Nodes, since_s: float = 0, job: str = "") -> Cores:
    """List the cores of these nodes, and read each once.

    since_s: only those of the last so many seconds; 0: all
    job:     only those of this job; "": all
    """
    started, policies = now(), nodes.policies()
    errors: dict[str, str] = {}
    asked = {name: _list_config(nodes, policy, since_s) for name, policy in policies.items()}
    said = nodes.ask("looking", {n: (core_program.__name__, c) for n, c in asked.items()})
    listings = {}
    for name, answer in said.items():
        try:
            rows = rows_of(answer, asked[name], {"listing": Listing})
            listings[name] = rows[0] if rows else None
        except ProbeError as problem:
            errors[name] = problem.reason
            continue
        if listings[name] is None:
            errors[name] = nothing(answer, asked[name])
    known = {name: listing for name, listing in listings.items() if listing is not None}
    more = {name: listing.more for name, listing in known.items()}
    reading: dict[str, list[Found]] = {}
    for found in once(known):
        reading.setdefault(found.reader, []).append(found)
    crashes: list[Crash] = []
    gone = {name for name, answer in said.items() if answer.unreachable and name in errors}
    notes = {name: list(listing.notes) for name, listing in known.items()}
    if reading and not nodes.interrupted:
        crashes, lost = _read(nodes, reading, job, more, notes)
        errors |= lost
        gone |= lost.keys()
    return Cores(
        started=started,
        finished=now(),
        asked=tuple(policies),
        crashes=tuple(crashes),
        errors=errors,
        unreachable=frozenset(gone),
        notes={name: tuple(rows) for name, rows in notes.items() if rows},
        more={name: number for name, number in more.items() if number},
        complete=not nodes.interrupted,
    )


def _list_config(nodes: Nodes, policy: Policy, since_s: float) -> core_program.Config:
    patterns = (policy.core_pattern,) if policy.core_handler == "path" else ()
    return core_program.Config(nonce(), nodes.tag, _LIST_S, patterns, since_s)


def _read(
    nodes: Nodes,
    reading: Mapping[str, list[Found]],
    job: str,
    more: dict[str, int],
    notes: dict[str, list[str]],
) -> tuple[list[Crash], dict[str, str]]:
    """Every core with its backtrace, and the nodes that were lost meanwhile, each with the reason.

    Counts in ``more`` what is not read.
    """
    chosen = {name: rows[: _AMONG if job else MOST] for name, rows in reading.items()}
    asked = {}
    for name, rows in chosen.items():
        more[name] += len(reading[name]) - len(rows)
        limit_s = min(_ALL_S, _FIRST_S + _READ_S * min(len(rows), MOST))
        asked[name] = core_program.Config(
            nonce(),
            nodes.tag,
            limit_s,
            wanted=tuple(
                (f.file.path, f.file.inode, f.file.modified_ns, f.file.size_bytes) for f in rows
            ),
            job=job,
            most=MOST,
        )
    said = nodes.ask("reading", {n: (core_program.__name__, c) for n, c in asked.items()})
    crashes = []
    for name, rows in chosen.items():
        answer = said.get(name, Said("", "interrupted"))
        try:
            seen = rows_of(answer, asked[name], {"core": Core, "done": Done})
        except ProbeError as problem:
            seen, answer = [], Said("", problem.reason)
        told = {core.number: core for core in seen if isinstance(core, Core)}
        for end in (row for row in seen if isinstance(row, Done)):
            more[name] += end.left
            if end.unknown:
                notes.setdefault(name, []).append(f"{end.unknown} cores do not tell their job")
            break
        else:
            why = f"no answer: {nothing(answer, asked[name])}"
            missing = (number for number in range(len(rows)) if number not in told)
            told |= {number: Core(number, unread=why) for number in missing}
        for number, core in told.items():
            if 0 <= number < len(rows):
                crashes.append(Crash(rows[number], core, _unpacked(core.text)))
    return crashes, {name: answer.error for name, answer in said.items() if answer.unreachable}


def _unpacked(text: str) -> str:
    """gdb's words; "" for what makes no sense."""
    try:
        opened = zlib.decompressobj().decompress(base64.b64decode(text), _TEXT_BYTES)
    except (ValueError, zlib.error):
        return ""
    return opened.decode("utf-8", "replace")
