"""Answers are read and judged in processes beside the control process, and kept in files.

The control process talks to the nodes, and gives each answer to the next reader that is free; what
no reader is free for it reads itself. What came of an answer stays in a file of the reader's: of a
node, the control process keeps what all nodes together tell, and later its results. Once the
context is complete, the readers judge what it decides. So neither the time of one core nor its
memory bounds how many nodes an audit can have.

A reader is a fork of the control process, made before any connection: it has the policies and the
code, and no key, thread or socket of anybody's. It is spoken with through two pipes, without a
library that would need threads. A reader that dies costs the node whose answer it was reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import IO, Any, NamedTuple

from nodeready.audit import run
from nodeready.audit.document import Audit, NodeReport
from nodeready.audit.peers import ALL, compared, differing, key_of
from nodeready.exit_codes import SIGNALS
from nodeready.policy import Policy
from nodeready.policy.policy import digest
from nodeready.subjects import snapshot
from nodeready.subjects.context import COMPLETED, FleetContext, addresses_of, counted, identity_of
from nodeready.subjects.registry import COUNTING, PROBES, SUBJECTS, CheckSelection
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.text import now
from nodeready.transport.base import FAILED, Answer, Met, forget_others, own
from nodeready.transport.look import NOT_LOOKED_AT, Look, SnapshotQuestion

#: Fewer nodes than this are read by the control process alone: a reader takes longer to make.
FEWEST = 64
#: Characters of an answer that the control process reads itself when no reader is free: reading a
#: larger one would keep it from the nodes.
_LARGEST_OWN = 256 << 10
#: Seconds of CPU time after which the reading of a subject is ended, and after so many more that
#: of the next one: what a node says is bounded, and nothing of it takes a second.
_SLOW_S = 10.0
#: Seconds without a word of a reader that has something to do, after which it is ended.
_SILENT_S = 60
#: Nodes that a reader is given to judge before it has judged those before.
_AHEAD = 32
#: Bytes that a pipe should hold: some thirty answers (pipe(7)).
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

#: What stands in a Look for a snapshot that a reader has.
AWAITED = Snapshot()

#: Types of what may be large, and shared by many nodes; and how many of such are remembered.
_LARGE = (tuple, Mapping)
_MOST_PARTS = 1024

_PROBES = {probe.subject: probe for probe in PROBES}
_NAMES = tuple(SUBJECTS)
_NUMBERS = {name: number for number, name in enumerate(SUBJECTS)}
#: Makes the text of one subject's observation, as the run's format shows it.
Tell = Callable[[Any], str]


#: What a completed policy has beside the declared one: its class, and field -> whether the value
#: is one of those that were shared with all readers, and its number there or itself.
_More = tuple[type[Policy], dict[str, tuple[bool, Any]]]


class _Told(NamedTuple):
    """What the control process needs of an answer before all nodes have answered.

    place:     where the rest is in the reader's file
    addresses: of the node's interfaces; None: not observed
    counting:  whether a subject with counters was looked at
    identity:  the node's names, addresses and keys, for the fleet's known hosts
    """

    place: tuple[int, int]
    addresses: frozenset[str] | None
    counting: bool
    identity: Any


class _Node(NamedTuple):
    """What a reader needs to judge a node.

    file, place: where the record of its answer is
    policy:      number of the declared one
    more:        what the completed one has beside it
    earlier:     the counters of the last look, as JSON; "": there was none
    """

    name: str
    file: int
    place: tuple[int, int]
    policy: int
    more: _More | None
    earlier: str


class _Judged(NamedTuple):
    """What came of a node. A code is a number in the table of the reader ``by``, or the thing.

    results:  (reader, number of the subject, codes), in no order
    compared: (reader, number of the subject, code)
    told:     where the text of its facts is in the file of the reader that judged it
    counters: where the text of its counters is
    """

    results: list[tuple[int, int, tuple[Any, ...]]]
    compared: list[tuple[int, int, Any]]
    told: tuple[int, int] | None
    counters: tuple[int, int] | None


class _Part(NamedTuple):
    """Where a thing is that many nodes share."""

    file: int
    start: int
    size: int


class _Packed(NamedTuple):
    """An observation: its class, and its fields, of which some are a `_Part`."""

    kind: type
    fields: dict[str, Any]


@dataclass(frozen=True)
class _Boot:
    """What of the host's observation the counters need."""

    boot_id: str


class _Codes:
    """Numbers for what was met twice: the control process gets it once, and then its number."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.by_id: dict[int, int] = {}
        self.kept: list[Any] = []
        self.met: dict[int, None] = {}
        self.fresh: list[Any] = []

    def of(self, key: Any, thing: Any) -> Any:
        """The number of the thing, or itself when it was not met before."""
        number = self.by_id.get(id(thing))
        if number is None:
            number = self.numbers.get(key)
        if number is not None:
            return number
        mark = hash(key)
        if mark not in self.met:
            self.met[mark] = None
            if len(self.met) > 1 << 16:
                del self.met[next(iter(self.met))]
        elif len(self.kept) < 1 << 15:
            number = self.numbers[key] = self.by_id[id(thing)] = len(self.kept)
            self.kept.append(thing)
            self.fresh.append(thing)
            return number
        return thing


# --- A reader: in a process of its own, and one in the control process.


class _Reader:
    """Reads answers and judges nodes, and keeps what is large in a file.

    number: of this reader; the numbers of its tables are its own
    files:  of all readers
    tell:   None: the run's format shows no facts
    """

    def __init__(
        self, number: int, files: list[int], policies: Sequence[Policy], tell: Tell | None
    ) -> None:
        self.number, self.files, self.policies, self.tell = number, files, policies, tell
        self.size = 0
        self.results, self.compared = _Codes(), _Codes()
        # Observations that many nodes share -> what comes of them, by the policy.
        self.known: dict[tuple[int, int], tuple[Any, tuple[Any, ...], Any, str]] = {}
        # Parts of observations that many nodes share -> where they are, once they were met again.
        self.parts: dict[int, tuple[Any, _Part | None]] = {}
        self.loaded: dict[_Part, Any] = {}
        self.shared: list[Any] = []
        self.addresses: tuple[str, ...] | None = None
        self.moment = 0.0

    def _keep(self, data: bytes) -> tuple[int, int]:
        place, left = (self.size, len(data)), memoryview(data)
        while left:
            written = os.pwrite(self.files[self.number], left, self.size)
            self.size += written
            left = left[written:]
        return place

    def _codes(self, results: Iterable[Result]) -> tuple[Any, ...]:
        return tuple([self.results.of(one, one) for one in results])

    def _facts(self, seen: Snapshot, subject: str) -> Any:
        facts = compared(seen, (subject,)).get(subject)
        if not facts:
            return None
        return self.compared.of((subject, key_of(facts)), facts)

    def _alone(
        self, seen: Snapshot, subject: str, policy: int
    ) -> tuple[Any, tuple[Any, ...], Any, str]:
        """What comes of a subject that no other node decides."""
        observed = seen.subjects[subject]
        key = (id(observed), policy)
        known = self.known.get(key)
        if known is not None and not seen.refused:
            return known
        found = judge(seen, self.policies[policy], (subject,))
        text = self.tell(observed) if self.tell else ""
        made = (observed, self._codes(found), self._facts(seen, subject), text)
        if not seen.refused:
            if len(self.known) >= 512:
                del self.known[next(iter(self.known))]
            self.known[key] = made
        return made

    def _apart(self, thing: Any) -> Any:
        """Where this thing is kept, or itself when it was not met before."""
        known = self.parts.get(id(thing))
        if known is not None and known[0] is thing:
            if known[1] is None:
                start, size = self._keep(pickle.dumps(thing, 5))
                known = self.parts[id(thing)] = thing, _Part(self.number, start, size)
            return known[1]
        if len(self.parts) >= _MOST_PARTS:
            self.parts.clear()
        self.parts[id(thing)] = thing, None
        return thing

    def _packed(self, observed: Any) -> Any:
        """The observation for the file, without what many nodes share."""
        whole = self._apart(observed)
        if whole is not observed or not is_dataclass(observed):
            return whole
        fields = {
            name: self._apart(value) if isinstance(value, _LARGE) or is_dataclass(value) else value
            for name, value in vars(observed).items()
        }
        return _Packed(type(observed), fields)

    def _whole(self, packed: Any) -> Any:
        if isinstance(packed, _Part):
            found = self.loaded.get(packed)
            if found is None:
                data = os.pread(self.files[packed.file], packed.size, packed.start)
                found = pickle.loads(data)
                if len(self.loaded) >= _MOST_PARTS:
                    self.loaded.clear()
                self.loaded[packed] = found
            return found
        if isinstance(packed, _Packed):
            made: Any = object.__new__(packed.kind)
            for name, value in packed.fields.items():
                vars(made)[name] = self._whole(value) if isinstance(value, _Part) else value
            return made
        return packed

    def keep(self, seen: Snapshot, policy: int) -> _Told:
        """Judge what no other node decides, and keep the rest."""
        results, facts, texts = [], [], []
        later: dict[str, Any] = {}
        for subject in seen.subjects:
            if subject in COMPLETED:
                later[subject] = self._packed(seen.subjects[subject])
            elif subject in _NUMBERS:
                _, codes, said, text = self._alone(seen, subject, policy)
                number = _NUMBERS[subject]
                results.append((self.number, number, codes))
                if said is not None:
                    facts.append((self.number, number, said))
                texts.append((number, text))
        boot = getattr(seen.subjects.get("host"), "boot_id", "")
        record = (results, facts, texts, later, dict(seen.refused), boot)
        wants = self.policies[policy].ssh_client_mode == "known_hosts"
        return _Told(
            self._keep(pickle.dumps(record, 5)),
            addresses_of(seen),
            any(name in seen.subjects for name in COUNTING),
            identity_of(seen) if wants else None,
        )

    def _policy(self, number: int, more: _More | None) -> Policy:
        """The declared policy, completed by these fields."""
        declared = self.policies[number]
        if more is None:
            return declared
        kind, fields = more
        # Each node has its own. The values were checked when the policies were completed.
        made = object.__new__(kind)
        vars(made).update(vars(declared))
        for name, (shared, value) in fields.items():
            vars(made)[name] = self.shared[value] if shared else value
        return made

    def judge(self, node: _Node) -> _Judged:
        """Judge the rest of a node."""
        name, (start, size) = node.name, node.place
        data = os.pread(self.files[node.file], size, start)
        results, facts, texts, packed, refused, boot = pickle.loads(data)
        later = {subject: self._whole(one) for subject, one in packed.items()}
        want = self._policy(node.policy, node.more)
        before = run.read_counted(node.earlier) if node.earlier else None
        context = FleetContext(
            {name: want}, self.addresses, {name: before} if before else {}, self.moment
        )
        seen = context.completed(name, Snapshot({**later, "host": _Boot(boot)}, refused=refused))
        for subject in later:
            if subject not in _NUMBERS:
                continue
            number = _NUMBERS[subject]
            results.append((self.number, number, self._codes(judge(seen, want, (subject,)))))
            said = self._facts(seen, subject)
            if said is not None:
                facts.append((self.number, number, said))
            texts.append((number, self.tell(seen.subjects[subject]) if self.tell else ""))
        told = counters = None
        if self.tell:
            rows = [f'"{_NAMES[number]}":{text}' for number, text in sorted(texts)]
            told = self._keep(f"{{{','.join(rows)}}}".encode("ascii"))
        kept = counted(seen, self.moment)
        if kept is not None:
            counters = self._keep(run.counted_text(kept).encode("ascii"))
        return _Judged(results, facts, told, counters)

    def do(self, order: tuple[Any, ...]) -> Any:
        """One order of the control process; None: there is no answer to it."""
        what, *given = order
        if what == "read":
            policy, subjects, nonce, answer = given
            probes = tuple([_PROBES[subject] for subject in subjects])
            seen = snapshot.read(answer, probes, self.policies[policy], nonce)
            return self.keep(seen, policy)
        if what == "keep":
            return self.keep(*given)
        if what == "judge":
            return self.judge(*given)
        if what == "share":
            self.shared += given
        else:
            self.addresses, self.moment = given
        return None

    def fresh(self) -> tuple[list[Any], list[Any]]:
        """What has got a number since this was asked for."""
        found = self.results.fresh, self.compared.fresh
        self.results.fresh, self.compared.fresh = [], []
        return found


@dataclass(frozen=True)
class _Failed:
    """In place of an answer: why there is none."""

    why: str


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"its answer could not be kept in {tempfile.gettempdir()}: {error.strerror}"
    return f"its answer could not be read ({type(error).__name__}: {error})"


_LENGTH = struct.Struct("<I")


def _framed(message: Any) -> bytes:
    data = pickle.dumps(message, 5)
    return _LENGTH.pack(len(data)) + data


def _exactly(number: int, size: int) -> bytes:
    """So many bytes of a pipe. Raises EOFError at its end."""
    pieces = []
    while size:
        piece = os.read(number, size)
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _late(signum: int, frame: object) -> None:
    raise TimeoutError(f"took longer than {_SLOW_S:g} s")


def _serve(reader: _Reader, orders: int, answers: int) -> None:
    """What the process of a reader does until the control process closes the pipe."""
    # Nothing that is read has cycles: looking for them takes as long as reading.
    gc.freeze()
    gc.disable()
    # What ends the control process (a terminal tells the whole group) ends us by its pipe.
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _late)
    count = 0
    while True:
        (size,) = _LENGTH.unpack(_exactly(orders, _LENGTH.size))
        order = pickle.loads(_exactly(orders, size))
        try:
            signal.setitimer(signal.ITIMER_PROF, _SLOW_S, _SLOW_S)
            said = reader.do(order)
        except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
            said = _Failed(_why(error))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if order[0] in ("read", "judge"):
            data = memoryview(_framed((said, *reader.fresh())))
            while data:
                data = data[os.write(answers, data) :]
        count += 1
        if count % 1000 == 0:
            gc.collect()


# --- The control process's side.


@dataclass(eq=False)
class _Process:
    """A reader's process. waiting: what it has not answered yet, the oldest first."""

    number: int
    pid: int
    orders: int
    answers: int
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    waiting: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=deque)
    moment: float = field(default_factory=time.monotonic)
    gone: bool = False

    def forget(self) -> None:
        """See `transport.base.own`."""
        if not self.gone:
            self.gone = True
            os.close(self.orders)
            os.close(self.answers)


class _Row(NamedTuple):
    """A node of the document. told: which file, and where the text of its facts is in it."""

    name: str
    status: str
    seconds: float
    error: str
    groups: tuple[str, ...]
    results: array[int]
    told: tuple[int, int, int] | None


class _Rows(Sequence[NodeReport]):
    """The nodes of a document, each made when it is looked at."""

    def __init__(self, rows: list[_Row], table: list[Result], files: list[int]) -> None:
        self._rows, self._table, self._files = rows, table, files

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        found = self._rows[at]
        return [self._made(row) for row in found] if isinstance(at, slice) else self._made(found)

    def __iter__(self) -> Iterator[NodeReport]:
        return map(self._made, self._rows)

    def _made(self, row: _Row) -> NodeReport:
        results = tuple([self._table[number] for number in row.results])
        told = None
        if row.told is not None:
            file, start, size = row.told

            def told() -> str:
                return os.pread(self._files[file], size, start).decode("ascii")

        return NodeReport(
            row.name, row.status, row.seconds, row.error, row.groups, results, told=told
        )


def readers(nodes: int) -> int:
    """How many processes read the answers of so many nodes, beside the control process."""
    if nodes < FEWEST:
        return 0
    return max(1, len(os.sched_getaffinity(0)) - 1)


class Reading:
    """The readers of one run. Use as a context manager: the document is read from their files.

    policies: of the nodes, as declared
    tell:     makes the text of a subject's facts, where the run's format shows them
    count:    of processes; None: as many as are of use
    """

    def __init__(
        self, policies: Mapping[str, Policy], tell: Tell | None = None, count: int | None = None
    ) -> None:
        self._declared = policies
        unique = {id(policy): policy for policy in policies.values()}
        numbers = {key: number for number, key in enumerate(unique)}
        self._policies = {name: numbers[id(policy)] for name, policy in policies.items()}
        self.count = count = readers(len(policies)) if count is None else count
        # They have no name, so that nothing is left of them, however this process ends.
        self._open: list[IO[bytes]] = [
            tempfile.TemporaryFile(buffering=0, prefix="nodeready-")  # noqa: SIM115 - until close
            for _ in range(count + 1)
        ]
        self._files = [file.fileno() for file in self._open]
        each = [_Reader(n, self._files, list(unique.values()), tell) for n in range(count + 1)]
        #: The control process's own reader is the last one.
        self._own = each[-1]
        self._told: dict[str, tuple[int, _Told]] = {}
        self._failed: dict[str, str] = {}
        self._judged: dict[str, tuple[int, _Judged]] = {}
        self._results: list[Result] = []
        self._facts: list[Any] = []
        self._tables: list[tuple[list[int], list[int]]] = [([], []) for _ in each]
        self._ids: dict[int, int] = {}
        self._processes: list[_Process] = []
        # Nothing that is read has cycles, and looking for them takes a third of the time.
        self._threshold = gc.get_threshold()
        gc.set_threshold(100_000, 50, 100)
        try:
            for reader in each[:-1]:
                self._processes.append(self._fork(reader))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _fork(self, reader: _Reader) -> _Process:
        (orders, to), (back, answers) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                forget_others()
                os.close(to)
                os.close(back)
                _serve(reader, orders, answers)
            except (EOFError, BrokenPipeError):
                status = 0
            finally:
                # Without what the control process wanted to do at its end.
                os._exit(status)
        os.close(orders)
        os.close(answers)
        for number in (to, back):
            os.set_blocking(number, False)
            with contextlib.suppress(OSError):
                fcntl.fcntl(number, _F_SETPIPE_SZ, _PIPE_BYTES)
        return own(_Process(reader.number, pid, to, back))

    def close(self) -> None:
        """End the readers, and forget what they kept."""
        gc.set_threshold(*self._threshold)
        for one in self._processes:
            self._end(one)
        for file in self._open:
            file.close()

    def _end(self, one: _Process) -> str:
        """End a process; why it was no longer there."""
        if one.gone:
            return ""
        one.gone = True
        os.close(one.orders)
        os.close(one.answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
        try:
            _, status = os.waitpid(one.pid, 0)
        except ChildProcessError:
            return ""
        return str(signal.Signals(os.WTERMSIG(status)).name) if os.WIFSIGNALED(status) else ""

    # --- Orders and answers.

    def _send(self, one: _Process, name: str, order: tuple[Any, ...]) -> None:
        if not one.waiting:
            one.moment = time.monotonic()
        if order[0] in ("read", "judge"):
            one.waiting.append((name, order))
        one.unsent += _framed(order)
        self._flush(one)

    def _flush(self, one: _Process) -> None:
        try:
            while one.unsent and not one.gone:
                del one.unsent[: os.write(one.orders, one.unsent[:_PIPE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._lost(one)

    def _drain(self, one: _Process) -> None:
        """Take what a reader has answered; one that answers no more is gone."""
        ended = False
        try:
            while not ended:
                piece = os.read(one.answers, _PIPE_BYTES)
                one.unread += piece
                ended = not piece
        except BlockingIOError:
            pass
        self._frames(one)
        if ended:
            self._lost(one)

    def _frames(self, one: _Process) -> None:
        at = 0
        while len(one.unread) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(one.unread, at)
            if len(one.unread) - at - _LENGTH.size < size:
                break
            at += _LENGTH.size
            said, *fresh = pickle.loads(one.unread[at : at + size])
            at += size
            name, order = one.waiting.popleft()
            one.moment = time.monotonic()
            self._learn(one.number, fresh)
            self._take(one.number, name, order, said)
        del one.unread[:at]

    def _learn(self, reader: int, fresh: Sequence[list[Any]]) -> None:
        """Give numbers of our own to what a reader has given its own."""
        results, facts = self._tables[reader]
        for one in fresh[0]:
            results.append(self._number(one))
        for one in fresh[1]:
            facts.append(len(self._facts))
            self._facts.append(one)

    def _number(self, result: Result) -> int:
        self._results.append(
            Result(*(sys.intern(getattr(result, name)) for name in Result.__dataclass_fields__))
        )
        return len(self._results) - 1

    def _take(self, reader: int, name: str, order: tuple[Any, ...], said: Any) -> None:
        if isinstance(said, _Failed):
            self._failed[name] = said.why
        elif order[0] in ("read", "keep"):
            self._told[name] = (reader, said)
        else:
            self._judged[name] = (reader, said)

    def _lost(self, one: _Process) -> None:
        """A reader is gone: the node at which it was has failed, the others' turn comes again."""
        if one.gone:
            return
        # What it has answered before counts.
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(one.answers, _PIPE_BYTES):
                one.unread += piece
        self._frames(one)
        waiting, one.waiting = one.waiting, deque()
        signal_name = self._end(one)
        how = f" ({signal_name})" if signal_name else ""
        for place, (name, order) in enumerate(waiting):
            if place == 0:
                what = "read its answer" if order[0] == "read" else "judged it"
                self._failed[name] = f"the process that {what} ended{how}"
            else:
                self._give(name, order)

    def _do(self, name: str, order: tuple[Any, ...]) -> None:
        """Do it here."""
        number = len(self._files) - 1
        try:
            said = self._own.do(order)
        except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
            said = _Failed(_why(error))
        self._learn(number, self._own.fresh())
        self._take(number, name, order, said)

    def _now(self) -> None:
        """Read and write what can be at once."""
        for one in self._processes:
            if not one.gone:
                self._drain(one)
            if one.unsent and not one.gone:
                self._flush(one)

    def _wait(self, limit_s: float) -> None:
        """The same, and wait so long for the first of it."""
        # Under gevent, the other greenlets go on meanwhile.
        waiting = select.poll()
        by: dict[int, _Process] = {}
        for one in self._processes:
            if not one.gone:
                waiting.register(one.answers, select.POLLIN)
                by[one.answers] = by[one.orders] = one
                if one.unsent:
                    waiting.register(one.orders, select.POLLOUT)
        if not by:
            return
        for number, _ in waiting.poll(int(limit_s * 1000)):
            one = by[number]
            if one.gone:
                continue
            if number == one.answers:
                self._drain(one)
            else:
                self._flush(one)
        moment = time.monotonic()
        for one in self._processes:
            if not one.gone and one.waiting and moment - one.moment > _SILENT_S:
                self._lost(one)

    def _free(self, ahead: int) -> _Process | None:
        found = [
            one
            for one in self._processes
            if not one.gone and not one.unsent and len(one.waiting) < ahead
        ]
        return min(found, key=lambda one: len(one.waiting)) if found else None

    def _give(self, name: str, order: tuple[Any, ...], ahead: int = _AHEAD) -> None:
        """Have it done by whoever is free."""
        self._now()
        one = self._free(ahead)
        large = order[0] == "read" and len(order[-1]) > _LARGEST_OWN
        while one is None and large and any(not each.gone for each in self._processes):
            self._wait(1)
            one = self._free(ahead)
        if one is None:
            self._do(name, order)
        else:
            self._send(one, name, order)

    def _finish(self) -> None:
        while any(one.waiting for one in self._processes if not one.gone):
            self._wait(1)

    # --- First: every answer, as it comes.

    def read(self, asked: SnapshotQuestion, answer: Answer) -> Snapshot:
        """Have this answer read; the Snapshot stands for that which a reader has."""
        name = asked.request.node
        policy = self._policies[name]
        if answer.error or snapshot.mark(asked.nonce) not in answer.stdout:
            self._do(name, ("keep", asked.read(answer), policy))
        else:
            subjects = tuple(probe.subject for probe in asked.probes)
            self._give(name, ("read", policy, subjects, asked.nonce, answer.stdout))
        return AWAITED

    def settled(self, looks: Iterable[Look]) -> list[Look]:
        """The looks when all are read: each with what all nodes together need of it, or failed."""
        self._finish()
        found = []
        for look in looks:
            if look.snapshot is None:
                found.append(look)
            elif look.name in self._failed:
                why = self._failed.pop(look.name)
                found.append(Look(look.name, error=why, kind=FAILED, seconds=look.seconds))
            else:
                identity = self._told[look.name][1].identity
                seen = {} if identity is None else {"ssh_client": identity}
                found.append(replace(look, snapshot=Snapshot(seen)))
        return found

    def combined(self, context: FleetContext, met: Mapping[str, Met]) -> FleetContext:
        """As `run.combined`; the earlier counters stay in their files until a node is judged."""
        told = [one.addresses for _, one in self._told.values() if one.addresses is not None]
        return run.completed_by(context, told, met)

    # --- Then: every node, with the context.

    def _differences(self, declared: Policy, completed: Policy) -> _More | None:
        if completed is declared:
            return None
        was, more = vars(declared), dict[str, tuple[bool, Any]]()
        for name, value in vars(completed).items():
            if name in was and was[name] is value:
                continue
            if isinstance(value, tuple) and len(value) > 1:
                number = self._ids.get(id(value))
                if number is None:
                    number = self._ids[id(value)] = len(self._own.shared)
                    # Kept there, so that nothing else gets its id.
                    self._tell_all(("share", value))
                more[name] = True, number
            else:
                more[name] = False, value
        return type(completed), more

    def _tell_all(self, order: tuple[Any, ...]) -> None:
        self._own.do(order)
        for one in self._processes:
            if not one.gone:
                self._send(one, "", order)

    def audit(
        self,
        looks: Sequence[Look],
        context: FleetContext,
        selection: CheckSelection,
        started: str,
        groups: Callable[[str], tuple[str, ...]],
        *,
        complete: bool = True,
    ) -> tuple[Audit, str]:
        """The audit of these looks, and a line about counters that could not be kept, or ""."""
        self._tell_all(("context", context.addresses, context.moment))
        counting = [name for name, (_, told) in self._told.items() if told.counting]
        with run.Earlier(counting) as earlier:
            for look in looks:
                if look.snapshot is not None:
                    reader, told = self._told[look.name]
                    completed = context.policies[look.name]
                    more = self._differences(self._declared[look.name], completed)
                    number = self._policies[look.name]
                    text = earlier.text(look.name) if told.counting else ""
                    node = _Node(look.name, reader, told.place, number, more, text)
                    self._give(look.name, ("judge", node))
            self._finish()
        problem = self._remember(context.moment)
        rows, peers = [], dict[str, dict[str, Any]]()
        kept = {*selection.results}
        chosen = {_NUMBERS[name] for name in selection.subjects}
        for look in looks:
            row, facts = self._row(look, groups(look.name), kept, chosen)
            rows.append(row)
            if facts is not None:
                peers.setdefault(",".join(row.groups) or ALL, {})[look.name] = facts
        nodes = _Rows(rows, self._results, self._files)
        outliers = differing(peers)
        made = Audit(started, now(), digest(self._declared.values()), nodes, outliers, complete)
        return made, problem

    def _row(
        self, look: Look, groups: tuple[str, ...], kept: set[str], chosen: set[int]
    ) -> tuple[_Row, Any]:
        seconds = round(look.seconds, 3)
        error = look.error or ("" if look.reached else NOT_LOOKED_AT)
        found = self._judged.pop(look.name, None) if look.reached else None
        if look.reached and found is None:
            error = self._failed.get(look.name, "it was not judged")
        if found is None:
            made = NodeReport.of(
                look.name, error=error, unreachable=look.unreachable, seconds=seconds
            )
            return _Row(look.name, made.status, seconds, error, groups, array("I"), None), None
        reader, judged = found
        numbers = array("I")
        for by, _, codes in sorted(judged.results, key=lambda row: row[1]):
            table = self._tables[by][0]
            for code in codes:
                number = table[code] if type(code) is int else self._number(code)
                if self._results[number].check in kept:
                    numbers.append(number)
        facts = {}
        for by, subject, code in judged.compared:
            if subject in chosen:
                facts[_NAMES[subject]] = (
                    self._facts[self._tables[by][1][code]] if type(code) is int else code
                )
        made = NodeReport.of(
            look.name,
            [self._results[number] for number in numbers],
            error=error,
            unreachable=look.unreachable,
        )
        told = None if judged.told is None else (reader, *judged.told)
        return _Row(look.name, made.status, seconds, error, groups, numbers, told), facts

    def _remember(self, moment: float) -> str:
        places = {
            name: (reader, *judged.counters)
            for name, (reader, judged) in self._judged.items()
            if judged.counters is not None
        }

        def text(name: str) -> str:
            file, start, size = places[name]
            return os.pread(self._files[file], size, start).decode("ascii")

        return run.keep_texts(places, text, moment)
