"""An incident: all evidence of a hang in one directory and one archive, without its secrets.

`nodeready.runs.collector` collects the parts from the nodes. This module takes them one at a
time, so that a part that fails costs no other; writes an index of the present and the missing
parts; and packs all files. Text from nodes and users goes through `agent.secrets.redacted` first.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, ClassVar

from nodeready.agent.secrets import redacted
from nodeready.core.exit_codes import Refused
from nodeready.core.files import make_directory, write_atomically
from nodeready.core.json_types import Moment
from nodeready.core.outcome import NodeGaps, gaps_code
from nodeready.core.text import utc_now
from nodeready.runs.stacks.document import Verdict
from nodeready.runs.user_files import output_directory

# --- The document.

#: Statuses of a part. `kept`: complete; `partial`: incomplete, with the reason; `empty`: the nodes
#: have nothing (no core of the job); `missing`: it could not be taken, with the reason.
STATUSES = ("kept", "partial", "empty", "missing")
#: The parts, in the order in which they are taken: the most volatile first.
PARTS = ("stacks", "logs", "cores", "audit")


@dataclass(frozen=True)
class Part:
    """One kind of evidence."""

    JSON_KEYS: ClassVar = {"content": "found", "reason": "why"}

    # `stacks`, `logs`, `cores` or `audit`: also the directory of its files
    name: Annotated[str, {"enum": PARTS}]
    status: Annotated[str, {"enum": STATUSES}]  # see STATUSES
    content: str = ""  # summary, one line
    reason: str = ""  # why it is incomplete; "": it is complete
    gaps: NodeGaps = ()  # the nodes that gave nothing, or only a part of it
    files: tuple[str, ...] = ()  # in the directory of the incident, sorted
    seconds: Annotated[float, {"minimum": 0}] = 0.0  # duration
    failed: bool = False  # it is missing by an error of nodeready or of this machine


@dataclass(frozen=True)
class Incident:
    """The document of `nodeready incident`, and DIR/incident.json: the evidence of a job that
    hangs. Known forms of secrets are removed from all texts.
    """

    SCHEMA: ClassVar = "incident"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "job", "user", "reason", "complete", "verdict", "advice"),
        *("archive", "parts"),
    )

    started: Moment  # UTC
    finished: Moment  # UTC
    job: str  # its name on the command line
    user: str  # the owner of the job; "": not known
    reason: str  # why it was taken: on request, or what `watch` saw
    complete: bool  # False when it was interrupted
    verdict: Verdict | None  # of the stacks and all witnesses; None: there are no stacks
    advice: tuple[str, ...]  # what to look at next, one line each
    parts: tuple[Part, ...]  # in the order in which they were taken
    archive: str  # path of the archive of all files; "": it could not be written


def incident_code(incident: Incident) -> int:
    """The exit code of ``incident``: 0 for an archive with every part complete."""
    parts = incident.parts
    gaps, complete = [gap for part in parts for gap in part.gaps], incident.complete
    failed = not incident.archive or any(part.failed for part in parts)
    check = any(part.status in ("partial", "missing") for part in parts)
    return gaps_code(gaps, complete=complete, failed=failed, check=check, failures=frozenset())


# --- The directory.

#: Modes of every file and directory: evidence of a job is for its owner alone.
_MODE, _DIRECTORY_MODE = 0o600, 0o700
README, DOCUMENT = "README.txt", "incident.json"  # the index for a person, and the document


@dataclass(frozen=True)
class Directory:
    path: Path

    @property
    def archive(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tar.gz")

    def make_part(self, name: str) -> Path:
        """Make the directory of a part. Raises OSError."""
        path = self.path / name
        make_directory(path, _DIRECTORY_MODE)
        return path

    def write(self, name: str, texts: Iterable[str]) -> None:
        """Write one file of the directory, completely or not at all. Raises OSError."""
        write_atomically(self.path / name, texts, _MODE, keep_mode=False)

    def remove(self) -> None:
        """Remove the directory and the archive. Raises OSError."""
        shutil.rmtree(self.path)
        self.archive.unlink(missing_ok=True)

    def files(self, name: str = "") -> tuple[str, ...]:
        """Paths of the files of a part, or of all parts, relative to the directory, sorted."""
        paths = (path for path in (self.path / name).rglob("*") if path.is_file())
        return tuple(sorted(path.relative_to(self.path).as_posix() for path in paths))


def prepare(path: Path, option: str = "-o ") -> Directory:
    """Make the directory of an incident. Raises Refused; its message begins with ``option``.

    Nothing may be in it: evidence is never overwritten.
    """
    path = Path(os.path.abspath(path))
    if not path.name:
        raise Refused(f"{option}{path}: is the root directory")
    output_directory(path, DOCUMENT, option=option)
    names = sorted(entry.name for entry in path.iterdir())
    if names:
        content = "an incident" if DOCUMENT in names else f"other files ({names[0]})"
        raise Refused(f"{option}{path}: holds {content} already: name a new directory")
    directory = Directory(path)
    if os.path.lexists(directory.archive):
        raise Refused(f"{option}{directory.archive}: is there already: name a new directory")
    return directory


def directory_name(job: str, moment: str) -> str:
    """A name for the directory of an incident: ``4711-20261121T030000Z``; never a path."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", job)[:100].lstrip(".-") or "job"
    return f"{plain}-{re.sub('[-:]', '', moment)}"


def log_name(node: str, ranks: Sequence[int], number: int) -> str:
    """A name for a log in the directory: ``gpu001-rank3-1.log``; never a path."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", node)[:100].lstrip(".-") or "node"
    if not ranks:
        return f"{plain}-{number}.log"
    span = f"rank{ranks[0]}" if len(ranks) == 1 else f"ranks{ranks[0]}-{ranks[-1]}"
    return f"{plain}-{span}-{number}.log"


def pack(directory: Directory, moment: str, names: Iterable[str]) -> None:
    """Write the archive: equal files, equal bytes. moment: ISO 8601. Raises OSError."""
    seconds = int(datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp())
    archive = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", mtime=seconds, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(names):
            content = (directory.path / name).read_bytes()
            entry = tarfile.TarInfo(f"{directory.path.name}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), _MODE, seconds
            tar.addfile(entry, io.BytesIO(content))
    write_atomically(directory.archive, [archive.getvalue()], _MODE, keep_mode=False)


# --- The parts, one at a time.

#: Takes one part: writes its files below the directory, and returns its description.
PartTaker = Callable[[Directory], Part]


class Interrupted(Exception):
    """The user interrupted a part. The argument is the Part so far."""


def take(
    directory: Directory, takers: Mapping[str, PartTaker], clock: Callable[[], float]
) -> tuple[tuple[Part, ...], bool]:
    """All parts, and whether none was interrupted. A part that fails costs no other."""
    parts: list[Part] = []
    is_complete = True
    for name, take_part in takers.items():
        if not is_complete:
            parts.append(Part(name, "missing", reason="interrupted"))
            continue
        began = clock()
        try:
            part = take_part(directory)
        except KeyboardInterrupt:
            is_complete, part = False, Part(name, "missing", reason="interrupted")
        except Interrupted as interrupt:
            is_complete, part = False, interrupt.args[0]
        except OSError as problem:
            words = problem.strerror or str(problem), problem.filename
            part = Part(name, "missing", reason=": ".join(filter(None, words)), failed=True)
        except Exception as problem:  # noqa: BLE001 - a bug of nodeready costs this part alone
            from nodeready.agent.runtime import bug_text

            part = Part(name, "missing", reason=bug_text(problem), failed=True)
        files = directory.files(name)
        if files and part.status == "missing":
            part = dataclasses.replace(part, status="partial")
        seconds = round(max(0.0, clock() - began), 1)
        parts.append(dataclasses.replace(redacted(part), files=files, seconds=seconds))
    return tuple(parts), is_complete


def finish(
    directory: Directory,
    incident: Incident,
    forms: Mapping[str, Callable[[Incident], Iterable[str]]],
) -> tuple[Incident, str]:
    """Write the index and the archive. Returns the incident; why there is no archive, or ""."""
    archive = os.fspath(directory.archive)
    incident = dataclasses.replace(redacted(incident), finished=utc_now(), archive=archive)
    try:
        for name, render in forms.items():
            directory.write(name, render(incident))
        pack(directory, incident.started, directory.files())
    except OSError as problem:
        reason = f"{problem.filename or directory.archive}: {problem.strerror or problem}"
        return dataclasses.replace(incident, archive=""), reason
    return incident, ""
