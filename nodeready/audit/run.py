"""From the looks at all nodes to the document that the reports show, and the counters of the last
look at each node, kept on this machine for the next look.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from nodeready.audit import peers
from nodeready.audit.document import Audit, NodeReport
from nodeready.files import make_directory, write_atomically
from nodeready.policy import Policy
from nodeready.policy.policy import digest
from nodeready.subjects import wire
from nodeready.subjects.context import Counted, addresses_of, counted
from nodeready.subjects.registry import COUNTING, CheckSelection
from nodeready.text import now
from nodeready.transport.base import Met
from nodeready.transport.look import NOT_LOOKED_AT, Look

if TYPE_CHECKING:
    from pyinfra.api import Inventory

    from nodeready.subjects.context import FleetContext, Judged


def looked_at(selection: CheckSelection) -> tuple[str, ...]:
    """The subjects that have to be observed to judge these checks."""
    subjects = selection.subjects
    counting = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if counting else subjects


def combined(
    context: FleetContext, looks: Iterable[Look], met: Mapping[str, Met] = MappingProxyType({})
) -> FleetContext:
    """The context with the nodes' addresses, and with the counters of the looks before these.

    met: what this run's connections saw; an address there stays its node's, whoever claims it
    """
    counting, told = [], []
    for one in looks:
        if one.snapshot is not None:
            if any(name in one.snapshot.subjects for name in COUNTING):
                counting.append(one.name)
            addresses = addresses_of(one.snapshot)
            if addresses is not None:
                told.append(addresses)
    return replace(completed_by(context, told, met), earlier=previous(counting))


def completed_by(
    context: FleetContext, told: Sequence[Set[str]], met: Mapping[str, Met]
) -> FleetContext:
    """The context of this moment, with the addresses that the nodes told, each node's own."""
    return replace(
        context,
        addresses=_addresses(told, met) if len(told) > 1 else None,
        moment=time.time(),
    )


def _addresses(told: Sequence[Set[str]], met: Mapping[str, Met]) -> tuple[str, ...]:
    """The addresses that exactly one of the nodes has.

    told: what each node says that it has. An address that several have, such as a container
          bridge's, leads to none of them. A node that says more than most do has no more voice in
          where the others' ways lead.
    """
    most = statistics.median_high(map(len, told))
    counts = Counter(one for own in told for one in sorted(own)[:most])
    reached = {one.address for one in met.values()} & counts.keys()
    return tuple(sorted({one for one, count in counts.items() if count == 1} | reached))


def remember(looks: Iterable[Look], context: FleetContext) -> str:
    """Keep the counters of these looks, on this machine; no node is written to.

    Returns a line about what could not be kept, or "".
    """
    kept = {}
    for one in looks:
        if one.snapshot and any(name in one.snapshot.subjects for name in COUNTING):
            found = counted(one.snapshot, context.moment)
            if found is not None:
                kept[one.name] = found
    return keep(kept)


def groups(inventory: Inventory, name: str, total: int) -> tuple[str, ...]:
    """The groups that tell this node from others: not those that hold every node."""
    found = inventory.get_host(name).groups
    return tuple(group for group in found if len(inventory.get_group(group)) < total)


def audit_of(
    nodes: Iterable[Judged],
    selection: CheckSelection,
    started: str,
    inventory: Inventory,
    declared: Mapping[str, Policy],
    *,
    complete: bool = True,
) -> Audit:
    """The audit of nodes that were looked at and judged. declared: their policies as written."""
    total = len(inventory)
    reports = []
    for node in nodes:
        error = node.error or ("" if node.reached else NOT_LOOKED_AT)
        reports.append(
            NodeReport.of(
                node.name,
                selection.of(node.results),
                snapshot=node.snapshot,
                seconds=round(node.seconds, 3),
                error=error,
                unreachable=node.unreachable,
                groups=groups(inventory, node.name, total),
            )
        )
    return Audit(
        started,
        now(),
        digest(declared.values()),
        tuple(reports),
        peers.find(reports, selection.subjects),
        complete,
    )


# --- The counters of the last look.
#
# Totals say when a driver was loaded, not what happened today: `nics.errors` and `rdma.errors`
# judge the change since the last look, at the same boot. The looks are kept in
# ``$XDG_STATE_HOME/nodeready/counters`` in 64 files, so that a look at one node does not rewrite
# ten thousand. In a file, a line is a node: its name as JSON, the time, the counters as JSON, with
# tabs between. A node's name is data: the file is found by its hash. Files are replaced whole; two
# runs at once may lose one of two looks, never a file. What cannot be read is as if it were not
# there.

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


def _opened(path: Path) -> IO[bytes] | None:
    """The file; None when it is no such file. Raises OSError."""
    # Not even the opening may wait: somebody could have put a pipe here.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = open(handle, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES:
        return file
    file.close()
    return None


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """The (name as JSON, time, counters as JSON) of a file; none when it is no such file."""
    try:
        file = _opened(path)
        if file is None:
            return
        with file:
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
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


def read_counted(text: str) -> Counted | None:
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


class Earlier:
    """The last looks at these nodes, as far as there are any, in the files that held them when
    they were asked for. Use as a context manager. Never raises.
    """

    def __init__(self, names: Iterable[str]) -> None:
        directory = _directory()
        self._files: list[IO[bytes]] = []
        self._places: dict[str, tuple[int, int, int]] = {}
        for shard, here in _shards(names).items():
            with contextlib.suppress(OSError):
                file = _opened(directory / shard)
                if file is not None:
                    self._files.append(file)
                    self._find(file, {json.dumps(name).encode(): name for name in here})

    def _find(self, file: IO[bytes], wanted: Mapping[bytes, str]) -> None:
        at = 0
        for line in file.read(MAX_FILE_BYTES).split(b"\n")[:-1]:
            parts = line.split(b"\t")
            if len(parts) == 3 and parts[0] in wanted:
                start = at + len(line) - len(parts[2])
                self._places[wanted[parts[0]]] = len(self._files) - 1, start, len(parts[2])
            at += len(line) + 1

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

    def __enter__(self) -> Earlier:
        return self

    def __exit__(self, *problem: object) -> None:
        for file in self._files:
            file.close()


def previous(names: Iterable[str]) -> dict[str, Counted]:
    """The last looks at these nodes, as far as there are any. Never raises."""
    directory, found = _directory(), {}
    for shard, here in _shards(names).items():
        wanted = {json.dumps(name): name for name in here}
        for key, _, text in _lines(directory / shard):
            earlier = read_counted(text) if key in wanted else None
            if earlier is not None:
                found[wanted[key]] = earlier
    return found


def counted_text(one: Counted) -> str:
    """The look as JSON, as its line has it."""
    return json.dumps({"boot_id": one.boot_id, "taken": one.taken}, separators=(",", ":"))


def _joined(new: str, old: str) -> str:
    """The new look, with the subjects of an old one at the same boot that it lacks."""
    # Nothing else in it is a list.
    if all(f'"{subject}":[' in new for subject in COUNTING):
        return new
    earlier, later = read_counted(old), read_counted(new)
    if earlier is None or later is None or earlier.boot_id != later.boot_id:
        return new
    return counted_text(Counted(later.boot_id, {**earlier.taken, **later.taken}))


def keep(looks: Mapping[str, Counted]) -> str:
    """Keep these looks. Returns why some could not be kept (a full home is no error), or ""."""
    newest = max((one.time for one in looks.values()), default=0.0)
    return keep_texts(looks, lambda name: counted_text(looks[name]), newest)


def keep_texts(names: Iterable[str], text: Callable[[str], str], moment: float) -> str:
    """The same, of looks at this time whose texts are elsewhere, as `counted_text` makes them."""
    directory, problem = _directory(), ""
    oldest = moment - KEPT_S
    try:
        make_directory(directory, 0o700)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    for shard, here in _shards(names).items():
        path = directory / shard
        new = {json.dumps(name): text(name) for name in sorted(here)}
        kept = []
        for key, when, old in _lines(path):
            if key in new:
                new[key] = _joined(new[key], old)
            elif _time(when) >= oldest:
                kept.append(f"{key}\t{when}\t{old}\n")
        kept += [f"{key}\t{moment:.0f}\t{one}\n" for key, one in new.items()]
        try:
            if path.exists() and not path.is_file():
                raise FileExistsError(17, "is no file of ours", str(path))
            write_atomically(path, kept, 0o600)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
    return problem
