"""The rank of each line of a log in which many ranks write, and the rank of a rank's own log.

The prefixes of launchers and loggers differ, so a reader learns them from the file's own lines::

    reader = learn_ranks(lines)             # of the file's beginning and its end
    if reader.is_mixed:
        host, rank, local_rank, text = reader.split(line)

A prefix that says what it is (``[rank3]:``, ``[1,3]<stdout>:``) counts at once. A bare number
(``3:``) counts if the numbers are ranks: from 0 on without large gaps, several lines each, the
same numbers at the beginning and at the end, in no order; or if srun itself reports these tasks.
Numbers that only grow are steps, dates or line numbers; numbers in turns may be GPUs. A
launcher's number outranks one ``[rank3]:``, which any program may print.

Pure, bounded by the lines that it is given; its patterns cannot backtrack without a bound.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from nodeready.agent.failure_rules import ranks_in

# --- The rank of a log file, by its path and its lines.


class FileRanks(NamedTuple):
    """The ranks of a log file; None: not known."""

    rank: int | None
    local_rank: int | None


_RANK_NAME = re.compile(r"(?i)(?<![a-z])(?:([a-z]+)[_-]|(local))?rank[._=-]?(\d{1,7})(?!\d)")
#: Words before "rank" for numbers that are not the global rank.
_LOCAL, _GROUP_WORDS = "local", ("node", "group", "dp", "tp", "pp", "cp", "ep", "mp", "sp")
#: torchrun --log-dir: RUN/attempt_0/LOCAL_RANK/stdout.log
_TORCHRUN = re.compile(r"/attempt_\d+/(\d{1,7})/(?:stdout\.log|stderr\.log|error\.json)$")
#: train.7.out; more digits are a date or a job.
_NUMBERED = re.compile(r"\.(\d{1,5})\.(?:out|err|log|txt)$")


def path_ranks(path: str) -> FileRanks:
    """The ranks in ``rank_7.log``, ``nccl_trace_rank_7``, ``rank.07/stdout``, ``local_rank3.err``,
    ``attempt_0/3/stdout.log`` (torchrun) and ``train.7.out``; of several, the last.
    """
    ranks = named_ranks(path)
    if ranks == FileRanks(None, None) and (match := _NUMBERED.search(path)):
        return FileRanks(int(match[1]), None)
    return ranks


def named_ranks(path: str) -> FileRanks:
    """The ranks of a path that says that they are ranks."""
    rank = local = None
    for before, joined, number in _RANK_NAME.findall(path):
        word = (before or joined).lower()
        if word == _LOCAL:
            local = int(number)
        elif word not in _GROUP_WORDS:
            rank = int(number)
    if match := _TORCHRUN.search(path):
        local = int(match[1])
    return FileRanks(rank, local)


# PyTorch's logging and its excepthook (2.2 on) put the global rank before each line.
GLOBAL_RANK = re.compile(r"\[rank(\d{1,7})\]:")


def file_ranks(path: str, lines: Iterable[str]) -> FileRanks:
    """The ranks of a file: by ``[rank7]:`` before its lines, if all lines have one rank, else by
    its path.

    With ``[rank7]:`` the rank in the path may be local: torchrun's directories have the local
    rank, and ``rank_0.log`` may be on each node.
    """
    by_path = path_ranks(path)
    global_ranks = {int(match[1]) for line in lines if (match := GLOBAL_RANK.search(line))}
    if len(global_ranks) != 1:
        return by_path
    (rank,) = global_ranks
    other = by_path.rank if by_path.rank != rank else None
    return FileRanks(rank, by_path.local_rank if by_path.local_rank is not None else other)


# --- The prefixes of lines, as data.


class LineOrigin(NamedTuple):
    """Where a line of a mixed log comes from."""

    # the node's name or address as the line has it; ``task 3``: the task of a launcher that starts
    # one process per node; ``gpu1 pid 7``, ``pid 7``: a process of unknown rank; "": not known
    host: str
    rank: int | None  # the global rank; None: not known
    local_rank: int | None  # the rank on its node; None: not known
    text: str  # the line without the prefixes

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the writer."""
        return bool(self.host) or self.rank is not None or self.local_rank is not None

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        """Equal for the lines of one rank: the rank alone if it is known."""
        return (self.host, None, self.local_rank) if self.rank is None else ("", self.rank, None)


_PROCESS = re.compile(r"(?:^| )(?:pid|task) \d{1,10}$")


def host_node(host: str) -> str:
    """The node of a `LineOrigin.host`; "": not known.

    >>> host_node("gpu1 pid 7")
    'gpu1'
    """
    return _PROCESS.sub("", host)


_NUMBER = r"\d{1,7}"
_COLOUR = r"(?:\x1b\[[\d;]{0,16}m)*"
_ONE_COLOUR = re.compile(_COLOUR[:-1])
#: A time before a prefix: ISO 8601 as log shippers write it, ctime(3) as Open MPI does, ts(1).
_TIME = (
    r"(?P<time>\[?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?:[A-Z][a-z]{2} ){1,2}[ \d]\d \d\d:\d\d:\d\d(?: \d{4})?)\]?(?: \|)? ?)?"
)
#: A node's name: with a digit, unlike a word or a file of a program.
_HOST = r"(?=[A-Za-z.-]{0,60}\d)(?=[\d.-]{0,60}[A-Za-z])[A-Za-z0-9][\w.-]{0,200}"
_NAME = r"(?=[\d.-]{0,60}[A-Za-z])[A-Za-z0-9][\w.-]{0,200}"
_NO_FILE = r"(?<!\.py)(?<!\.cc)(?<!\.cu)(?<!\.cpp)(?<!\.hpp)(?<!\.c)(?<!\.h)(?<!\.rs)(?<!\.go)"


class _Form(NamedTuple):
    """A form of prefix."""

    name: str
    # with the groups ``rank``; ``local``: the local rank; ``label``: a number that is the rank, or
    # the number of the node or on the node; ``host``; ``pid``; ``time``: stays before the text;
    # ``tag``: is removed from the text, too (Open MPI 4 tags each write)
    pattern: re.Pattern[str]
    # None: its text says what it is. Otherwise its numbers must be ranks, and these are the forms
    # that may stand before it
    within: tuple[str, ...] | None


def _form(name: str, pattern: str, within: tuple[str, ...] | None = None) -> _Form:
    return _Form(name, re.compile(_COLOUR + _TIME + pattern + _COLOUR), within)


_NODES, _TASKS = ("pdsh",), ("pdsh", "srun", "torchx")
#: PyTorch's logging and excepthook; a text before it would be quoted.
_TORCH = _form("torch", rf" ?\[rank(?P<rank>{_NUMBER})\]: ?")
#: Prefixes, which are removed from the text. A line may have several, the launcher's outermost.
_PREFIXES = (
    # Open MPI 1 to 4, Horovod: [1,3]<stdout>:  Thu Jan 23 11:55:50 2025[1,3]<stdout>:
    # SageMaker: [1,mpirank:3,algo-1]<stdout>:
    # Open MPI 5 (pmix_iof.c): [prterun-gpu1-7@1,3][gpu1:4711]<stdout>:  [3]<stdout>:
    _form("mpirun",
          rf"(?P<tag>\[(?:[^\]\[,\s]{{1,120}},)?(?:mpirank:)?(?P<rank>{_NUMBER})"
          r"(?:,(?P<instance>[\w.-]{1,200}))?\](?:\[(?P<host>[\w.-]{1,200}):\w{1,10}\])?"
          r"<std(?:out|err|diag)>:)(?: (?=\S))?"),
    # Ray: (RayTrainWorker pid=364, ip=10.0.0.1)  vLLM: (VllmWorker rank=1 pid=80)
    _form("ray",
          rf"\((?:[\w.:<>-]{{1,80}} )?(?:rank=(?P<rank>{_NUMBER}) )?pid=(?P<pid>\d{{1,10}})"
          rf"(?:, ip=(?P<host>[0-9A-Fa-f.:]{{2,45}}))?\){_COLOUR} ?"),
    # kubectl logs --prefix
    _form("kubectl", r"\[pod/(?P<host>[\w.-]{1,253})/[\w.-]{1,253}\] "),
    _TORCH,
    # torchrun --tee 3; of torch.distributed.launch and accelerate, too
    _form("torchrun", r"\[(?:default|default_role|trainer|worker)(?P<local>\d{1,4})\]:"),
    # torchrun --role ROLE --tee 3
    _form("role",
          r"\[(?!rank\d)(?P<role>[A-Za-z_](?:[\w.-]{0,40}[A-Za-z_.-])?)(?P<local>0|[1-9]\d{0,3})\]:",
          _TASKS),
    # torchrun --role $(hostname -s): --tee 3
    _form("host:local", rf"\[(?P<host>{_NAME}{_NO_FILE}):(?P<label>{_NUMBER})\]:", _TASKS),
    # nodeready run: [gpu1:3] , [gpu1:local3]
    _form("host:rank",
          rf"\[(?P<host>{_NAME}{_NO_FILE}):(?:local(?P<local>\d{{1,4}})|(?P<label>{_NUMBER}))\] ",
          _TASKS),
    # srun --label (write_labelled_message.c): "%*d: ", of a heterogeneous job "P%u %*d: "; flux
    _form("srun", rf"(?:P\d{{1,4}} )? {{0,6}}(?P<label>{_NUMBER}): ", _NODES),
    # MPICH's and Intel's -prepend-rank; torchrun with the template [${rank}]:
    _form("hydra", rf"\[(?P<label>{_NUMBER})\](?:: ?| )", _NODES),
    # PALS: mpiexec --label
    _form("pals", rf"(?P<host>{_HOST}) {{1,6}}(?P<label>{_NUMBER}): ", ()),
    _form("torchx", rf"[A-Za-z][\w.-]{{0,60}}/(?P<label>{_NUMBER}){_COLOUR} ", _NODES),
    # pdsh, clush, DeepSpeed's launcher
    _form("pdsh", rf"(?P<host>{_HOST}{_NO_FILE}): ", ()),
)  # fmt: skip

#: The own rank within a line, in the order of preference. These stay in the text.
_HEAD = 240
_FIELDS = (
    # Of the default group; other groups count their own ranks.
    re.compile(rf"\[PG (?:ID 0 PG )?(?:GUID )?0 ?\(default_pg\) Rank (?P<rank>{_NUMBER})\]"),
    # DeepSpeed: [INFO] [logging.py:96:log_dist] [Rank 3] ; Megatron: [Rank 3] (after 1 iterations)
    # [rank=3, world_size=8], [pid:17 rank:3], [rank 3/8]; not PyTorch's rank in a process group.
    re.compile(
        r"^(?!.{0,80}ProcessGroup\w{1,20}\.cpp)[^\"']{0,160}?"
        rf"\[(?:[^\]\[]{{0,60}}[ ,|])?(?:rank|Rank|RANK|R)[ =:_-]?(?P<rank>{_NUMBER})"
        r"(?:/\d{1,7})?(?:[ ,|][^\]\[]{0,60})?\]"
    ),
    # loguru: | rank:3/8 - , | R3 |
    re.compile(
        rf"^[^\"']{{0,160}}?\| {{0,4}}(?:rank|Rank|RANK|R)[ :=]?(?P<rank>{_NUMBER})(?:/\d{{1,7}})?"
        r" {0,4}(?:\||- )"
    ),
    # Composer: 2023-07-20 22:50:00,580: rank3[181][MainThread]: DEBUG:
    re.compile(rf"^[\d :,.-]{{0,40}}\brank(?P<rank>{_NUMBER})\[\d{{1,10}}\]\["),
    # Rank 0: Completed ..., rank=3 step=7
    re.compile(rf"^(?:rank|Rank|RANK)[ =:_]?(?P<rank>{_NUMBER})(?:/\d{{1,7}})?(?::| \||\]) "),
)
#: NCCL and RCCL: host:pid:thread [device] NCCL INFO
_NCCL = re.compile(
    r"(?P<host>[\w.-]{1,200}):(?P<pid>\d{1,10}):\d{1,10} \[(?P<local>\d{1,4})\] "
    r"(?:\S{1,80}:\d{1,6} )?NCCL "
)
_NCCL_RANK = re.compile(rf"\brank ({_NUMBER}) n[rR]anks ({_NUMBER})\b")
#: Ray Train's list of its workers, each with its process and its rank.
_RAY_WORKER = re.compile(
    rf"\((?:node_id=\w{{1,80}}, )?ip=([0-9A-Fa-f.:]{{2,45}}), pid=(\d{{1,10}})\) "
    rf"(?:world_)?rank=({_NUMBER}), local_rank=(\d{{1,4}})"
)
#: What srun reports of its tasks: srun: error: gpu[3-4]: tasks 2-3: Exited with exit code 1
_SRUN_TASKS = re.compile(r"srun: error: \S{1,255}: tasks? (\d{1,7}(?:[,-]\d{1,7}){0,100}): ")
#: What torchrun's agent writes, one for the ranks of a node.
_AGENT = re.compile(
    r"torch\.distributed\.elastic\.(?:agent|multiprocessing\.api)|ChildFailedError"
    r"|torch/distributed/(?:run|launch)\.py\"?[:,]|Root Cause \(first observed"
)
#: Lines of the launcher itself, which have no prefix.
_LAUNCHER = re.compile(r"(?:srun|slurmstepd|sbatch|pdsh@[\w.-]+|clush|mpirun|mpiexec|prterun)\b")


# --- Learning.

#: Maximum lines that are learned from, the first and the last; maximum prefixes of a line.
MAX_LINES, _MAX_DEPTH = 20_000, 3


class _Writer(NamedTuple):
    """What the prefixes of a line say of its process."""

    host: str = ""
    label: int | None = None
    local: int | None = None
    pid: int | None = None

    def is_node(self, label_kind: str) -> bool:
        """Whether it names no process, but at most a node."""
        is_process = self.label is not None and label_kind != "task"
        return not is_process and self.local is None and self.pid is None


_UNKNOWN = _Writer()


class _Prefixes(NamedTuple):
    """The prefixes of one line: its process, the global rank if they have one, and the rest."""

    writer: _Writer
    rank: int | None
    text: str


@dataclass(frozen=True)
class RankReader:
    """Reads the rank of each line; made by `learn_ranks`."""

    # several ranks, or several nodes, write into the file, or a launcher's prefixes say which do
    is_mixed: bool = False
    # the known origins of the lines that were learned, with an empty text, each with its number of
    # lines
    origins: Mapping[LineOrigin, int] = field(default_factory=dict)
    layers: tuple[tuple[_Form, ...], ...] = ()  # the forms of prefixes, the outermost first
    fields: tuple[re.Pattern[str], ...] = ()  # the patterns of the own rank within a line
    pattern: re.Pattern[str] | None = None  # of the user, in place of all others
    # the rank of each process that is known
    ranks: Mapping[_Writer, int] = field(default_factory=dict)
    # what a form's label is: "rank", "local" rank, or the number of a "task"
    label_kind: str = "rank"
    has_devices: bool = True  # whether NCCL's device tells the processes of a node apart

    def split(self, line: str) -> LineOrigin:
        """The origin of a line, and its text. A line without a prefix has no rank."""
        if self.pattern:
            return _split_by_pattern(self.pattern, line)
        writer, rank, text = _strip(self.layers, line)
        if writer.label is not None and self.label_kind == "rank":
            rank = writer.label
        elif rank is None and writer.is_node(self.label_kind):
            inner, rank = _within(self.fields, text)
            writer = inner if inner.host else writer
        if rank is None:
            rank = self.ranks.get(writer)
        host, label, local, pid = writer
        if pid is not None and not self.has_devices:
            local = None
        if label is not None and self.label_kind == "local":
            local = label
        elif label is not None and self.label_kind == "task" and not host:
            host = f"task {label}"
        if rank is None and local is None and pid is not None:
            host = f"{host} pid {pid}".lstrip()
        return LineOrigin(host, rank, local, text)


def learn_ranks(lines: Iterable[str], *, pattern: str = "", path: str = "") -> RankReader:
    """The reader for a file with these lines, such as those of its beginning and of its end.

    pattern: a regular expression that finds the rank in a line, in place of what is learned: its
             group ``rank``, else its first group; groups ``host`` and ``local_rank`` are optional
    path:    of the file: a path with a rank has the lines of one rank, whatever they quote, unless
             a launcher's prefixes say otherwise
    """
    lines = iter(lines)
    rows = [*islice(lines, MAX_LINES // 2), *deque(lines, MAX_LINES // 2)]
    if pattern:
        return _with_origins(RankReader(pattern=re.compile(pattern)), rows)
    is_of_rank = named_ranks(path) != FileRanks(None, None)
    layers = _learn_layers(rows, 0.9 if is_of_rank else 0.25)
    is_launchers = any(form.name not in ("torch", "ray") for layer in layers for form in layer)
    if not is_launchers and is_of_rank:
        return RankReader()
    # An exception may stand where nothing was learned.
    layers = layers if (_TORCH,) in layers else (*layers, (_TORCH,))
    stripped = [_strip(layers, row) for row in rows]
    reader = RankReader(is_launchers, layers=layers, fields=_learn_fields(stripped))
    return _with_origins(_learn_processes(reader, stripped), rows)


#: Of a file without prefixes but PyTorch's own.
_PLAIN = RankReader(layers=((_TORCH,),))


def split_plain(line: str) -> LineOrigin:
    """The origin of a line, and its text, in a file that is not mixed: by ``[rank3]:`` alone."""
    return _PLAIN.split(line) if "[rank" in line[:8] else LineOrigin("", None, None, line)


def _with_origins(reader: RankReader, rows: Sequence[str]) -> RankReader:
    """The reader, with the origins that these lines have."""
    counts = Counter(reader.split(row)._replace(text="") for row in rows)
    origins = {origin: count for origin, count in counts.items() if origin.is_known}
    ranks = {origin.rank for origin in origins if origin.rank is not None}
    rankless = [origin for origin in origins if origin.rank is None]
    local = {origin[:3] for origin in rankless if origin.local_rank is not None}
    hosts = {origin.host for origin in rankless if origin.host}
    is_mixed = reader.is_mixed or bool(reader.pattern and ranks)
    is_mixed = is_mixed or any(len(names) > 1 for names in (ranks, local, hosts))
    return replace(reader, is_mixed=is_mixed, origins=origins)


def _learn_layers(rows: Sequence[str], share: float) -> tuple[tuple[_Form, ...], ...]:
    """The forms of prefixes that the lines have, the outermost first.
    share: the minimum part of the lines that has a bare number; a batch script may write many
           lines before the launcher's
    """
    layers: list[tuple[_Form, ...]] = []
    outer: set[str] = set()
    texts = [row for row in rows if not _LAUNCHER.match(row)]
    tasks = {
        task
        for row in rows
        if (match := _SRUN_TASKS.match(row))
        for task in ranks_in(match[1])
    }  # fmt: skip
    while texts and len(layers) < _MAX_DEPTH:
        bare = (form for form in _PREFIXES if form.within is not None and outer <= {*form.within})
        layer = tuple(
            islice((form for form in bare if _are_ranks(form, texts, share, tasks)), 1)
        ) or tuple(
            form
            for form in _PREFIXES
            if form.within is None and any(form.pattern.match(text) for text in texts)
        )
        if not layer:
            break
        layers.append(layer)
        outer |= {form.name for form in layer}
        texts = [stripped.text for text in texts if (stripped := _strip_layer(layer, text))]
    return tuple(layers)


def _are_ranks(form: _Form, texts: Sequence[str], share: float, tasks: Set[int]) -> bool:
    """Whether the numbers that a form finds are ranks, or nodes' numbers.
    tasks: that srun itself reports
    """
    numbers: list[int] = []
    names: set[str] = set()
    is_word = False
    owners: dict[str, set[int]] = defaultdict(set)
    for text in texts:
        if match := form.pattern.match(text):
            groups = match.groupdict()
            digits = groups.get("label") or groups.get("local") or _host_number(groups["host"])
            numbers.append(number := int(digits))
            names.add(groups.get("role") or "")
            is_word = is_word or not re.search(r"\d", groups.get("host") or "0")
            owners[text[match.end() :]].add(number)
    distinct = set(numbers)
    changes = [pair for pair in zip(numbers, numbers[1:]) if pair[0] != pair[1]]
    falls = [after for before, after in changes if after < before]
    if form.name == "srun" and distinct and distinct <= tasks:
        # Three that only grow may be steps.
        return len(numbers) >= share * len(texts) and (len(distinct) < 3 or bool(falls))
    # pdsh writes all lines.
    share = max(share, 0.8) if form.name == "pdsh" else share
    is_frequent = len(numbers) >= max(2 * len(distinct), share * len(texts))
    # A word before a number may be a module, and the number that of its line.
    gaps = 1 if is_word else 4
    # A number of one line may be no rank's.
    counts = Counter(numbers)
    largest = max((number for number in distinct if counts[number] > 1), default=0)
    is_dense = form.name == "pdsh" or gaps * len(distinct) > largest
    if len(distinct) < 2 or not is_frequent or not is_dense or len(names) > 2:
        return False
    half = len(numbers) // 2
    first, last = set(numbers[:half]), set(numbers[half:])
    if 2 * len(first & last) < min(len(first), len(last)):
        return False
    turn = numbers[: len(distinct)]
    is_table = turn in (sorted(turn), sorted(turn, reverse=True)) and (
        numbers[len(turn) :] == numbers[: -len(turn)]
    )
    if is_table or (4 * len(falls) < len(changes) and {*falls} <= {min(distinct)}):
        # In turns: ranks, the steps of epochs, or the GPUs of a monitor. Ranks say the same words.
        shared = [text for text, numbers in owners.items() if len(numbers) > 1]
        return bool(falls) and 5 * sum(map(_is_sentence, shared)) >= len(owners)
    return bool(falls)


def _is_sentence(text: str) -> bool:
    """Whether a text has two words: more than a value and its unit."""
    return "%" not in text and len(re.findall(r"[A-Za-z]{3,}", text[:_HEAD])) > 1


def _host_number(host: str) -> str:
    """The last number in the first label of a node's name; "0": it has none."""
    *_, number = ("0", *re.findall(r"\d{1,9}", host.partition(".")[0]))
    return str(number)


def _learn_fields(stripped: Iterable[_Prefixes]) -> tuple[re.Pattern[str], ...]:
    """The fields with the own rank that lines without a rank have, with at least two ranks."""
    texts = [text for _, rank, text in stripped if rank is None]
    fields = []
    for pattern in _FIELDS:
        line_ranks = (_within((pattern,), text)[1] for text in texts)
        ranks = [rank for rank in line_ranks if rank is not None]
        distinct = set(ranks)
        falls = any(after < before for before, after in zip(ranks, ranks[1:]))
        if falls and 4 * len(distinct) > max(distinct):
            fields.append(pattern)
    return tuple(fields)


def _learn_processes(reader: RankReader, stripped: Sequence[_Prefixes]) -> RankReader:
    """The reader, with the meaning of labels and the ranks of processes that the lines tell."""
    kind = _label_kind(reader.layers, stripped)
    certain: dict[_Writer, set[int]] = defaultdict(set)
    likely: dict[_Writer, set[int]] = defaultdict(set)
    communicators: dict[int, dict[_Writer, set[int]]] = defaultdict(lambda: defaultdict(set))
    pids: dict[tuple[str, int | None], set[int | None]] = defaultdict(set)
    for outer, rank, text in stripped:
        if worker := _RAY_WORKER.search(text):
            for host in (worker[1], ""):
                certain[_Writer(host, pid=int(worker[2]))].add(int(worker[3]))
        inner, field_rank = _within(_FIELDS, text)
        writer = inner if outer.is_node(kind) else outer
        if inner.host:
            pids[inner.host, inner.local].add(inner.pid)
        if writer == _UNKNOWN:
            continue
        if rank is not None:
            certain[writer].add(rank)
        elif "NCCL" in text and (match := _NCCL_RANK.search(text)):
            communicators[int(match[2])][writer].add(int(match[1]))
        elif field_rank is not None:
            likely[writer].add(field_rank)
    # The largest communicator is that of the whole job.
    for writer, names in communicators.get(max(communicators, default=0), {}).items():
        certain[writer] |= names
    times_named = Counter(rank for names in likely.values() for rank in names)
    ranks = {}
    for writer in {*certain, *likely}:
        (rank, *further) = certain.get(writer) or likely[writer]
        if not further and (writer in certain or times_named[rank] == 1):
            ranks[writer] = rank
    # Several nodes may write the same local ranks into one file: their ranks are known if all
    # local ranks tell those of one node.
    local_only = {
        writer
        for writer in {prefixes.writer for prefixes in stripped}
        if writer == _Writer(local=writer.local) != _UNKNOWN
    }
    bases = {ranks[writer] - (writer.local or 0) for writer in local_only if writer in ranks}
    if len(bases) > 1 or not local_only <= {*ranks}:
        ranks = {writer: rank for writer, rank in ranks.items() if writer not in local_only}
    has_devices = all(len(numbers) == 1 for numbers in pids.values())
    return replace(reader, ranks=ranks, label_kind=kind, has_devices=has_devices)


def _label_kind(layers: Iterable[Iterable[_Form]], stripped: Iterable[_Prefixes]) -> str:
    """What the labels of the prefixes are; see `RankReader`."""
    hosts: dict[int, set[str]] = defaultdict(set)
    processes: dict[int, set[int | None]] = defaultdict(set)
    differ, same, is_agent = 0, 0, False
    for (host, label, local, _), rank, text in stripped:
        if label is None:
            continue
        hosts[label].add(host)
        is_agent = is_agent or bool(_AGENT.search(text))
        inner, _ = _within((), text)
        if local is not None or inner.host:
            processes[label].add(inner.local if local is None else local)
        # Task 0 of the nodes has rank 0, too. Any program may print one such line.
        differ, same = differ + (rank not in (None, label)), same + (rank == label != 0)
    names = set().union(*hosts.values()) - {""}
    if differ > max(1, same) or any(len(numbers) > 1 for numbers in processes.values()):
        return "local" if names else "task"
    if same:
        return "rank"
    if is_agent and not names:
        return "task"
    if len(names) == 1:
        # torchrun's prefix has the local rank, the others' the rank.
        is_local = any(form.name == "host:local" for layer in layers for form in layer)
    else:
        is_local = any(len(labelled) > 1 for labelled in hosts.values())
    return "local" if is_local else "rank"


# --- Reading a line.


def _strip_layer(layer: Iterable[_Form], text: str) -> _Prefixes | None:
    """The text without a prefix of these forms; None: it has none."""
    for form in layer:
        if match := form.pattern.match(text):
            groups = match.groupdict()
            label, local, pid, rank = (
                None if groups.get(name) is None else int(groups[name])
                for name in ("label", "local", "pid", "rank")
            )
            host = groups.get("host") or groups.get("instance") or ""
            writer = _Writer(host, label, local, pid)
            moment = f"{groups['time'].rstrip()} " if groups.get("time") else ""
            rest_of_line = text[match.end() :]
            if tag := groups.get("tag"):
                rest_of_line = rest_of_line.replace(tag, "")
            return _Prefixes(writer, rank, moment + rest_of_line)
    return None


def _strip(layers: Iterable[Iterable[_Form]], line: str) -> _Prefixes:
    """The line without its prefixes; an inner prefix knows more than an outer one."""
    values: list[Any] = [*_UNKNOWN, None]
    text = line
    for layer in layers:
        if stripped := _strip_layer(layer, text):
            text = stripped.text
            for index, value in enumerate((*stripped.writer, stripped.rank)):
                if value not in (None, ""):
                    values[index] = value
    return _Prefixes(_Writer(*values[:-1]), values[-1], text)


def _within(patterns: Iterable[re.Pattern[str]], text: str) -> tuple[_Writer, int | None]:
    """The process, or the rank, that a line names within itself."""
    # loguru colours each word.
    head = _ONE_COLOUR.sub("", text[: 2 * _HEAD])[:_HEAD] if "\x1b" in text else text[:_HEAD]
    if "NCCL " in head and (match := _NCCL.match(head)):
        return _Writer(match["host"], local=int(match["local"]), pid=int(match["pid"])), None
    for pattern in patterns:
        if match := pattern.search(head):
            return _UNKNOWN, int(match["rank"])
    return _UNKNOWN, None


def _split_by_pattern(pattern: re.Pattern[str], line: str) -> LineOrigin:
    """The origin by the user's pattern; a match at the beginning is removed from the text."""
    match = pattern.search(line)
    if match is None:
        return LineOrigin("", None, None, line)
    groups = match.groupdict()
    rank = groups.get("rank") if "rank" in groups or not pattern.groups else match[1]
    text = line[match.end() :] if match.start() == 0 and match.end() < len(line) else line
    return LineOrigin(
        groups.get("host") or "", _number(rank), _number(groups.get("local_rank")), text
    )


def _number(digits: str | None) -> int | None:
    is_number = digits and digits.isascii() and digits.isdigit() and len(digits) < 8
    return int(digits) if digits and is_number else None
