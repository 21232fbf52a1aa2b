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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nodeready.files import make_directory, write_atomically
from nodeready.subjects import wire
from nodeready.subjects.context import Counted
from nodeready.subjects.registry import COUNTING

FILES = 64
#: A file that is larger is none of ours: ten thousand nodes make some 400 kB each.
MAX_FILE_BYTES = 64 << 20
#: Seconds after which a look is forgotten: the node is gone or was renamed.
KEPT_S = 90 * 86400


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


def _read(text: str) -> Counted | None:
    """The look of its JSON; None when anything in it is not as we write it."""
    try:
        data = wire.load_json(text)
        taken = {
            name: (float(seen), {str(key): value for key, value in values.items()})
            for name, (seen, values) in data["taken"].items()
        }
        boot_id = data["boot_id"]
    except (wire.DecodeError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    sound = isinstance(boot_id, str) and all(
        math.isfinite(seen) and all(type(value) is int for value in values.values())
        for seen, values in taken.values()
    )
    return Counted(boot_id, taken) if sound else None


def previous(names: Iterable[str]) -> dict[str, Counted]:
    """The last looks at these nodes, as far as there are any. Never raises."""
    directory, found = _directory(), {}
    for shard, here in _shards(names).items():
        wanted = {json.dumps(name): name for name in here}
        for key, _, text in _lines(directory / shard):
            earlier = _read(text) if key in wanted else None
            if earlier is not None:
                found[wanted[key]] = earlier
    return found


def _joined(new: Counted, old: str) -> Counted:
    """The new look, with the subjects of an old one at the same boot that it lacks."""
    earlier = None if {*COUNTING} <= {*new.taken} else _read(old)
    if earlier is None or earlier.boot_id != new.boot_id:
        return new
    return Counted(new.boot_id, {**earlier.taken, **new.taken})


def remember(looks: Mapping[str, Counted]) -> str:
    """Keep these looks. Returns why some could not be kept (a full home is no error), or ""."""
    directory, problem = _directory(), ""
    oldest = max((one.time for one in looks.values()), default=0.0) - KEPT_S
    try:
        make_directory(directory, 0o700)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
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
            problem = f"{error.filename}: {error.strerror}"
    return problem
