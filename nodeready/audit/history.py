"""The counters of the last look at each node, kept on this machine for the next look.

Totals say when a driver was loaded, not what happened today: `nics.errors` and `rdma.errors` judge
the change since the last look, at the same boot. The looks are kept in
``$XDG_STATE_HOME/nodeready/counters`` in 64 files, so that a look at one node does not rewrite
ten thousand. In a file, a line is a node: its name as JSON, the time, the counters as JSON, with
tabs between. A node's name is data: the file is found by its hash. Files are replaced whole; two
runs at once may lose one of two looks, never a file. What cannot be read is as if it were not
there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nodeready.files import write_atomically
from nodeready.subjects.base import Counters, Unknown
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot

FILES = 64
#: A file that is larger is none of ours: ten thousand nodes make some 400 kB each.
MAX_FILE_BYTES = 64 << 20
#: Seconds after which a look is forgotten: the node is gone or was renamed.
KEPT_S = 90 * 86400

# Subject -> what reads the counters of its observation, which has a field "before".
_COUNTING: dict[str, Callable[[Any], dict[str, int]]] = {
    name: subject.counters for name, subject in SUBJECTS.items() if subject.counters
}


@dataclass(frozen=True)
class Look:
    """What is kept of a node: subject -> (time of the look, its counters), all of one boot."""

    boot_id: str
    taken: Mapping[str, tuple[float, Mapping[str, int]]]

    @property
    def time(self) -> float:
        """When the newest of it was seen, in seconds since 1970."""
        return max((seen for seen, _ in self.taken.values()), default=0.0)


def _boot_id(snapshot: Snapshot) -> str:
    """The boot that the node is in, or "" when the look did not tell."""
    boot_id = getattr(snapshot.subjects.get("host"), "boot_id", None)
    return boot_id if isinstance(boot_id, str) else ""


def _observed(snapshot: Snapshot, subject: str) -> Any:
    """What was observed of a subject; None when nothing was."""
    found = snapshot.subjects.get(subject)
    return None if isinstance(found, Unknown) else found


def look(snapshot: Snapshot, now: float) -> Look | None:
    """What of this snapshot is to be kept; None when nothing can be compared with it later."""
    boot_id = _boot_id(snapshot)
    taken = {
        name: (now, values)
        for name, counters in _COUNTING.items()
        if (observed := _observed(snapshot, name)) is not None and (values := counters(observed))
    }
    return Look(boot_id, taken) if boot_id and taken else None


def with_history(snapshot: Snapshot, earlier: Look | None, now: float) -> Snapshot:
    """The snapshot with the counters of an earlier look at the same boot beside its own.

    A look that lies in the future (a clock was set back) tells no rate, and is passed over.
    """
    if earlier is None or not earlier.boot_id or earlier.boot_id != _boot_id(snapshot):
        return snapshot
    subjects = dict(snapshot.subjects)
    for name, (seen, values) in earlier.taken.items():
        observed = _observed(snapshot, name) if name in _COUNTING else None
        if observed is not None and now > seen:
            subjects[name] = replace(observed, before=Counters(now - seen, values))
    return replace(snapshot, subjects=subjects)


def _directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "nodeready" / "counters"


def _shards(names: Iterable[str]) -> dict[str, set[str]]:
    """File name -> those of the nodes whose looks are in it."""
    found: dict[str, set[str]] = {}
    for name in names:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        found.setdefault(f"{digest[0] % FILES:02x}", set()).add(name)
    return found


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """The (name as JSON, time, counters as JSON) of a file; none when it is no such file."""
    try:
        # Not even the opening may wait: somebody could have put a pipe here.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, encoding="utf-8", errors="replace", newline="\n") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
                return
            text = file.read(MAX_FILE_BYTES)
    except OSError:
        return
    # A last line without its end was cut off.
    for line in text.split("\n")[:-1]:
        parts = line.split("\t")
        if len(parts) == 3:
            yield parts[0], parts[1], parts[2]


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _read(text: str) -> Look | None:
    """The look of its JSON; None when anything in it is not as we write it."""
    try:
        data = json.loads(text)
        taken = {
            name: (float(seen), {str(key): value for key, value in values.items()})
            for name, (seen, values) in data["taken"].items()
        }
        boot_id = data["boot_id"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    sound = isinstance(boot_id, str) and all(
        math.isfinite(seen) and all(type(value) is int for value in values.values())
        for seen, values in taken.values()
    )
    return Look(boot_id, taken) if sound else None


def previous(names: Iterable[str]) -> dict[str, Look]:
    """The last looks at these nodes, as far as there are any. Never raises."""
    directory, found = _directory(), {}
    for shard, here in _shards(names).items():
        wanted = {json.dumps(name): name for name in here}
        for key, _, text in _lines(directory / shard):
            earlier = _read(text) if key in wanted else None
            if earlier is not None:
                found[wanted[key]] = earlier
    return found


def _joined(new: Look, old: str) -> Look:
    """The new look, with the subjects of an old one at the same boot that it lacks."""
    earlier = None if {*_COUNTING} <= {*new.taken} else _read(old)
    if earlier is None or earlier.boot_id != new.boot_id:
        return new
    return Look(new.boot_id, {**earlier.taken, **new.taken})


def remember(looks: Mapping[str, Look]) -> str:
    """Keep these looks. Returns why some could not be kept (a full home is no error), or ""."""
    directory, problem = _directory(), ""
    oldest = max((one.time for one in looks.values()), default=0.0) - KEPT_S
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    for shard, names in _shards(looks).items():
        path = directory / shard
        new = {json.dumps(name): looks[name] for name in names}
        kept = []
        for key, time, text in _lines(path):
            if key in new:
                new[key] = _joined(new[key], text)
            elif _time(time) >= oldest:
                kept.append(f"{key}\t{time}\t{text}\n")
        for key, one in new.items():
            data = {"boot_id": one.boot_id, "taken": one.taken}
            kept.append(f"{key}\t{one.time:.0f}\t{json.dumps(data, separators=(',', ':'))}\n")
        try:
            if path.exists() and not path.is_file():
                raise FileExistsError(17, "is no file of ours", str(path))
            write_atomically(path, kept, 0o600)
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    return problem
