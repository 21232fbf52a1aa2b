"""An incident: all evidence of a hang in one directory and one archive, without its secrets.

`nodeready.triage.collector` collects the parts from the nodes. This module keeps them, one at a
time, so that a failing part costs no other; writes an index of what is there, what is missing and
why; and packs all files. Text from nodes and users goes through `nodeready.text.redacted` first.
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

from nodeready.exit_codes import exit_code
from nodeready.files import make_directory, own_directory, write_atomically
from nodeready.node.secrets import redacted
from nodeready.subjects.json_types import Moment
from nodeready.text import now
from nodeready.triage.stacks.document import Verdict

# --- The document.

#: What became of a part. `kept`: all of it; `partial`: some of it, and why not more; `missing`:
#: nothing, and why; `empty`: it was looked for, and there is nothing (no core of the job).
STATUSES = ("kept", "partial", "empty", "missing")
#: The parts, in the order in which they are taken: what is soon gone comes first.
PARTS = ("stacks", "logs", "cores", "audit")


@dataclass(frozen=True)
class Part:
    """One kind of evidence.

    name:    `stacks`, `logs`, `cores` or `audit`: also the directory of its files
    status:  what became of it
    found:   what is in it, one line
    why:     why it is not all; "": it is
    errors:  node -> why there is nothing of it, one line
    files:   in the directory of the incident, sorted
    seconds: that it took
    unreached: nodes to which there was no way
    failed:  a mistake of ours, or of this machine's, has cost it
    """

    name: Annotated[str, {"enum": PARTS}]
    status: Annotated[str, {"enum": STATUSES}]
    found: str = ""
    why: str = ""
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    seconds: Annotated[float, {"minimum": 0}] = 0.0
    unreached: tuple[str, ...] = ()
    failed: bool = False


@dataclass(frozen=True)
class Incident:
    """The document of `nodeready incident`, and DIR/incident.json: the evidence of a job that
    hangs. Known forms of secrets are removed from all texts.

    started:  UTC
    finished: UTC
    job:      as it was asked for
    user:     the owner of the job; "": not known
    reason:   why it was taken: on request, or what was watched
    complete: False when it was interrupted; the missing parts say so
    verdict:  of the stacks and all witnesses; None: there is none
    advice:   what to look at next, one line each
    parts:    in the order in which they were taken
    archive:  the path of the one file that holds all of it; "": it could not be written
    """

    SCHEMA: ClassVar = "incident"
    JSON: ClassVar = (
        *("started", "finished", "job", "user", "reason", "complete", "verdict", "advice"),
        *("archive", "parts"),
    )

    started: Moment
    finished: Moment
    job: str
    user: str
    reason: str
    complete: bool
    verdict: Verdict | None
    advice: tuple[str, ...]
    parts: tuple[Part, ...]
    archive: str


def incident_code(incident: Incident) -> int:
    """The exit code of ``incident``: all good is an archive that has every part whole."""
    parts = incident.parts
    return exit_code(
        interrupted=not incident.complete,
        failed=not incident.archive or any(part.failed for part in parts),
        unreachable=any(part.unreached for part in parts),
        check=any(part.status in ("partial", "missing") for part in parts),
    )


# --- The directory.

#: Of every file and directory: what a job works on is for nobody else to read.
_MODE, _DIRECTORY_MODE = 0o600, 0o700
#: The index for a person, and the document.
README, DOCUMENT = "README.txt", "incident.json"


class ForeignDirectory(Exception):
    """A directory that cannot be an incident's, because something is there; one line."""


@dataclass(frozen=True)
class Directory:
    """The directory of one incident; from `prepare`."""

    path: Path

    @property
    def archive(self) -> Path:
        """The one file: DIR.tar.gz beside the directory."""
        return self.path.with_name(f"{self.path.name}.tar.gz")

    def part(self, name: str) -> Path:
        """The directory of a part, made. Raises OSError."""
        path = self.path / name
        make_directory(path, _DIRECTORY_MODE)
        return path

    def write(self, name: str, pieces: Iterable[str]) -> None:
        """Write one file of the directory, whole or not at all. Raises OSError."""
        write_atomically(self.path / name, pieces, _MODE, keep_mode=False)

    def remove(self) -> None:
        """Remove it and the archive. Raises OSError."""
        shutil.rmtree(self.path)
        self.archive.unlink(missing_ok=True)

    def files(self, name: str = "") -> tuple[str, ...]:
        """The files of a part, or of all, by their path in the directory, sorted."""
        found = (path for path in (self.path / name).rglob("*") if path.is_file())
        return tuple(sorted(path.relative_to(self.path).as_posix() for path in found))


def prepare(path: Path) -> Directory:
    """Make the directory where it is missing.

    Raises ForeignDirectory for one that holds anything, an older incident too: evidence is not
    overwritten. Raises OSError.
    """
    path = Path(os.path.abspath(path))
    if not path.name:
        raise ForeignDirectory(f"{path}: is the root directory")
    if os.path.lexists(path) and not path.is_dir():
        raise ForeignDirectory(f"{path}: is no directory")
    own_directory(path, DOCUMENT)
    there = sorted(one.name for one in path.iterdir())
    if there:
        what = "an incident" if DOCUMENT in there else f"other files ({there[0]})"
        raise ForeignDirectory(f"{path}: holds {what} already: name a new directory")
    found = Directory(path)
    if os.path.lexists(found.archive):
        raise ForeignDirectory(f"{found.archive}: is there already: name a new directory")
    return found


def directory_name(job: str, moment: str) -> str:
    """A name for the directory of an incident: ``4711-20261121T030000Z``; never a path.

    moment: ISO 8601, UTC, as `nodeready.text.now` writes it
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", job)[:100].lstrip(".-") or "job"
    return f"{plain}-{re.sub('[-:]', '', moment)}"


def log_name(node: str, ranks: Sequence[int], number: int) -> str:
    """A name for a log in the directory: ``gpu001-rank3-1.log``; never a path."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", node)[:100].lstrip(".-") or "node"
    who = f"rank{ranks[0]}" if len(ranks) == 1 else f"ranks{ranks[0]}-{ranks[-1]}" if ranks else ""
    return "-".join(filter(None, (plain, who, str(number)))) + ".log"


def pack(directory: Directory, moment: str, names: Iterable[str]) -> None:
    """Write the archive of these files: the same files make the same bytes, whoever packs them.

    moment: of all files in it, ISO 8601. Raises OSError.
    """
    seconds = int(datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp())
    made = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=made, mode="wb", mtime=seconds, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(names):
            content = (directory.path / name).read_bytes()
            entry = tarfile.TarInfo(f"{directory.path.name}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), _MODE, seconds
            tar.addfile(entry, io.BytesIO(content))
    write_atomically(directory.archive, [made.getvalue()], _MODE, keep_mode=False)


# --- Taking it: part after part.

#: Takes one part: writes its files below the directory, and says what became of it.
Taking = Callable[[Directory], Part]


class Interrupted(Exception):
    """The user has interrupted us in the middle of a part."""


def take(
    directory: Directory, takings: Mapping[str, Taking], clock: Callable[[], float]
) -> tuple[tuple[Part, ...], bool]:
    """All parts, and whether none was interrupted. A part that fails costs no other.

    takings: by the name of the part, in the order in which they are taken
    clock:   seconds, for how long each takes
    """
    parts: list[Part] = []
    complete = True
    for name, taking in takings.items():
        if not complete:
            parts.append(Part(name, "missing", why="interrupted"))
            continue
        began = clock()
        try:
            part = taking(directory)
        except KeyboardInterrupt:
            complete, part = False, Part(name, "missing", why="interrupted")
        except Interrupted as said:
            complete, part = False, said.args[0]
        except OSError as problem:
            where = f": {problem.filename}" if problem.filename else ""
            why = f"{problem.strerror or problem}{where}"
            part = Part(name, "missing", why=why, failed=True)
        except Exception as problem:  # noqa: BLE001 - a mistake of ours costs this part alone
            from nodeready.transport.base import bug_text

            part = Part(name, "missing", why=bug_text(problem), failed=True)
        files = directory.files(name)
        if files and part.status == "missing":
            part = dataclasses.replace(part, status="partial")
        parts.append(
            dataclasses.replace(
                redacted(part), files=files, seconds=round(max(0.0, clock() - began), 1)
            )
        )
    return tuple(parts), complete


def finish(
    directory: Directory,
    incident: Incident,
    forms: Mapping[str, Callable[[Incident], Iterable[str]]],
) -> tuple[Incident, str]:
    """Write the index and the archive, and return the incident with its archive's path.

    forms: file name -> what renders the incident into it
    The second value is why there is no archive, or "".
    """
    whole = dataclasses.replace(
        redacted(incident), finished=now(), archive=os.fspath(directory.archive)
    )
    try:
        for name, render in forms.items():
            directory.write(name, render(whole))
        pack(directory, whole.started, directory.files())
    except OSError as problem:
        why = f"{problem.filename or directory.archive}: {problem.strerror or problem}"
        return dataclasses.replace(whole, archive=""), why
    return whole, ""
