"""The counters of each node's last audit, kept on this machine for the next audit.

A total also counts errors of long ago: `nics.errors` and `rdma.errors` judge the change since the
last audit, at the same boot. The counters are kept in ``$XDG_STATE_HOME/nodeready/counters`` in 64
files, so that an audit of one node does not rewrite ten thousand. The hash of a node's name
chooses the file, in which a line is a node: its name as JSON, the time, the counters as JSON, with
tabs between. Files are replaced whole. Two runs at once may lose one of two samples, never a file.
A file that cannot be read counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from nodeready.files import make_directory, write_atomically
from nodeready.subjects import wire
from nodeready.subjects.context import CounterSample
from nodeready.subjects.registry import COUNTING

FILES = 64
#: A larger file is foreign: ten thousand nodes make some 400 kB in each file.
MAX_FILE_BYTES = 64 << 20
#: Seconds after which the counters of a node are forgotten: it is gone or was renamed.
KEPT_S = 90 * 86400


def _directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "nodeready" / "counters"


def _names_by_file(names: Iterable[str]) -> dict[str, set[str]]:
    """File name -> the nodes whose counters it has."""
    files: dict[str, set[str]] = {}
    for name in names:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        files.setdefault(f"{digest[0] % FILES:02x}", set()).add(name)
    return files


def _open(path: Path) -> IO[bytes] | None:
    """The file; None: it is foreign. Raises OSError."""
    # O_NONBLOCK: opening a named pipe could block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES:
        return file
    file.close()
    return None


def _rows(path: Path) -> Iterator[tuple[str, str, str]]:
    """The (name as JSON, time, counters as JSON) of a file; none when it cannot be read."""
    try:
        file = _open(path)
        if file is None:
            return
        with file:
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return
    # A last line without a newline was cut off.
    for line in text.split("\n")[:-1]:
        fields = line.split("\t")
        if len(fields) == 3:
            yield fields[0], fields[1], fields[2]


def _time(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def parse_sample(text: str) -> CounterSample | None:
    """The inverse of `sample_text`; None when any part of the text differs from its format."""
    try:
        data = wire.load_json(text)
        taken = {
            name: (float(seconds), {str(key): value for key, value in values.items()})
            for name, (seconds, values) in data["taken"].items()
        }
        boot_id = data["boot_id"]
    except (wire.DecodeError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    is_valid = isinstance(boot_id, str) and all(
        math.isfinite(seconds) and all(type(value) is int for value in values.values())
        for seconds, values in taken.values()
    )
    return CounterSample(boot_id, taken) if is_valid else None


def sample_text(sample: CounterSample) -> str:
    return json.dumps({"boot_id": sample.boot_id, "taken": sample.taken}, separators=(",", ":"))


class EarlierCounters:
    """The earlier counters of these nodes. A context manager that closes the files. Never raises.

    The texts stay in the files, which may be replaced meanwhile.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._files: list[IO[bytes]] = []
        self._places: dict[str, tuple[int, int, int]] = {}
        for file_name, file_nodes in _names_by_file(names).items():
            with contextlib.suppress(OSError):
                file = _open(_directory() / file_name)
                if file is not None:
                    self._files.append(file)
                    self._find(file, {json.dumps(name).encode(): name for name in file_nodes})

    def _find(self, file: IO[bytes], names: dict[bytes, str]) -> None:
        offset = 0
        for line in file.read(MAX_FILE_BYTES).split(b"\n")[:-1]:
            fields = line.split(b"\t")
            if len(fields) == 3 and fields[0] in names:
                size = len(fields[2])
                start = offset + len(line) - size
                self._places[names[fields[0]]] = len(self._files) - 1, start, size
            offset += len(line) + 1

    def text(self, name: str) -> str:
        """The counters of this node as JSON, or ""."""
        if name not in self._places:
            return ""
        file, start, size = self._places[name]
        try:
            data = os.pread(self._files[file].fileno(), size, start)
        except OSError:
            return ""
        return data.decode("utf-8", "replace")

    def __enter__(self) -> EarlierCounters:
        return self

    def __exit__(self, *problem: object) -> None:
        for file in self._files:
            file.close()


def _merge(new: str, old: str) -> str:
    """The new sample, and the subjects that only the old sample of the same boot has."""
    # A subject's value is the only list in the text, so this needs no parsing.
    if all(f'"{subject}":[' in new for subject in COUNTING):
        return new
    earlier, later = parse_sample(old), parse_sample(new)
    if earlier is None or later is None or earlier.boot_id != later.boot_id:
        return new
    return sample_text(CounterSample(later.boot_id, {**earlier.taken, **later.taken}))


def keep(names: Iterable[str], text: Callable[[str], str], moment: float) -> str:
    """Keep the counters of these nodes; returns why some could not be kept, or "".

    text:   gives the `sample_text` of a node
    moment: of the samples, in seconds since 1970
    """
    directory, problem = _directory(), ""
    oldest = moment - KEPT_S
    try:
        make_directory(directory, 0o700)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    for file_name, file_nodes in _names_by_file(names).items():
        path = directory / file_name
        new = {json.dumps(name): text(name) for name in sorted(file_nodes)}
        rows = []
        for key, seconds, old in _rows(path):
            if key in new:
                new[key] = _merge(new[key], old)
            elif _time(seconds) >= oldest:
                rows.append(f"{key}\t{seconds}\t{old}\n")
        rows += [f"{key}\t{moment:.0f}\t{sample}\n" for key, sample in new.items()]
        try:
            if path.exists() and not path.is_file():
                raise FileExistsError(errno.EEXIST, "is no file of ours", str(path))
            write_atomically(path, rows, 0o600)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
    return problem
