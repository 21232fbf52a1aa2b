"""What NCCL, RCCL and gloo say in a log about each rank: its network, its GPUs' links, its errors.

The lines are those of NCCL_DEBUG=INFO and WARN, of NCCL 2.4 to 2.32 and of RCCL:

    host:pid:tid [dev] NCCL INFO comm 0x… rank 3 nranks 8 cudaDev 3 … - Init START
    host:pid:tid [dev] file:line (function) NCCL WARN …

A line names its process. The line with ``rank`` joins the process with a rank: the rank in the
process's largest communicator, which is the global rank unless the log shows only parts of a job.

Sources: NVIDIA/nccl src/debug.cc, init.cc, enqueue.cc, transport/net.cc, net_ib.cc, net_socket.cc,
graph/topo.cc, plugin/; ROCm/rccl src/init.cc; aws/aws-ofi-nccl src/nccl_ofi_net.cpp; recorded
lines beside the test.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready.agent.witnesses import nccl_errors

#: Maximum ranks of a log, errors of a rank, HCAs of a rank; characters of a text.
MAX_RANKS, MAX_ERRORS, MAX_HCAS, MAX_TEXT = 1024, 12, 32, 200
#: The last calls of a rank that are kept; maximum choices of an algorithm.
KEPT_CALLS, _MAX_CHOICES = 64, 16
#: The states of a rank's largest communicator, in order.
STATES = ("", "init", "ready", "aborted", "ended")


@dataclass(frozen=True)
class NcclError:
    key: str  # of `nccl_errors.ERRORS`
    text: str  # the line without its prefix
    peer: str = ""  # the address or name of the peer that the line names; "": none


@dataclass(frozen=True)
class NcclRank:
    """What the log says about a rank. "" and None: nothing."""

    rank: int | None = None  # in the largest communicator of the process
    world_size: int | None = None  # likewise
    host: str = ""  # of the process, in its own namespaces; pid 0: unknown
    pid: int = 0  # likewise
    device: int | None = None  # number of the GPU in the process
    version: str = ""  # ``NCCL 2.21.5+cuda12.4``, ``RCCL 2.21.5-HEAD:9a0e6a1``
    driver: str = ""  # ``CUDA 12.4``, ``HIP 6.3.42134``
    network: str = ""  # ``IB``, ``Socket``, ``OFI``, or the name of another plugin's network
    plugin: str = ""  # the plugin of the network; "": NCCL's own
    provider: str = ""  # of libfabric (``efa``, ``tcp;ofi_rxm``)
    interface: str = ""  # of the sockets (``eth0``); address: of this interface
    address: str = ""
    hcas: tuple[str, ...] = ()  # ``mlx5_0:1/IB``, ``mlx5_1:1/RoCE``
    gid: str = ""  # index of the GID of a RoCE connection (NCCL_DEBUG_SUBSYS with NET)
    gdr: bool | None = None  # GPUDirect RDMA is used
    # of the channels to other ranks: ``P2P/IPC``, ``SHM``, ``NET/IB/GDRDMA``
    transports: tuple[str, ...] = ()
    channels: int | None = None  # number of the collectives' channels; nvls: of NVLink SHARP's
    nvls: int | None = None
    tuner: str = ""  # the name of the plugin
    profiler: str = ""  # likewise
    state: str = ""  # of the communicator, one of STATES
    completed: str = ""  # the last collective, by the NCCL Inspector (`last_collective`)
    # the last collectives of its largest communicator (NCCL_DEBUG_SUBSYS with COLL): opCount,
    # which call of that opCount, and the call: ``AllReduce of 1024 float32``; and its number of
    # ranks. () where several communicators are as large
    calls: tuple[tuple[int, int, str], ...] = ()
    calls_size: int = 0
    # collective, algorithm and protocol (NCCL_DEBUG_SUBSYS with TUNING): ``AllReduce RING LL128``
    choices: tuple[str, ...] = ()
    errors: tuple[NcclError, ...] = ()  # the first of each kind, in order


@dataclass(frozen=True)
class NcclLog:
    ranks: tuple[NcclRank, ...] = ()  # by host, process and device, in the order of the ranks
    # of lines that name no process, such as PyTorch's and gloo's
    errors: tuple[NcclError, ...] = ()


# --- A line.

#: "NCCL INFO ", with what stands before it: host:pid:tid [device] file:line (function)
_MARK = re.compile(r"\bNCCL (?:INFO|WARN) ?")
_PREFIX = re.compile(
    r"(?:([\w.<>-]{1,255}):(\d{1,9}):\d{1,9} )?\[(-?\d{1,10})\] "
    r"(?:\S{1,300}:\d{1,7} (?:\([^()]{1,200}\) )?)?$"
)
_NUMBER = r"(\d{1,7})"
_COMM = re.compile(
    rf"\bcomm \S{{1,40}} rank {_NUMBER} n[rR]anks {_NUMBER}(?: cudaDev (\d{{1,4}}))?"
)
_CHANNEL = re.compile(
    rf"(?:Channel|Ring) \d{{1,4}}(?:/\d{{1,4}})? : {_NUMBER}(?:\[\w{{1,16}}\])? -> {_NUMBER}"
    r"(?:\[\w{1,16}\])? (?:\[(send|receive)\] )?via (.{1,120})"
)
_CHANNELS = re.compile(rf"\b{_NUMBER} coll channels(?:.{{0,60}} {_NUMBER} nvls channels)?")
#: "eth0:10.0.0.4<0>", "[0]ib0:fe80::1%ib0<0>"
_INTERFACE = (
    r"(?:\[\d{1,3}\])?(?P<interface>[^\s:\[\]<>]{1,32}):(?P<address>[0-9a-fA-F.:]{2,45})"
    r"(?:%[^<\s]{1,32})?<"
)
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using " + _INTERFACE)
_OUT_OF_BAND = re.compile(r"\bOOB " + _INTERFACE)
_HCAS = re.compile(r"NET/IB ?: Using ")
_HCA = re.compile(r"\[\d{1,3}\]([\w.+-]{1,64}:\d{1,3}/[A-Za-z]{1,16})")
_CALL = re.compile(
    r"(\w{1,40}): opCount ([0-9a-f]{1,16}) sendbuff \S{1,40} recvbuff \S{1,40} count (\d{1,18}) "
    r"datatype (\d{1,3}) op \d{1,10} root (-?\d{1,7}) comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,7})\]"
)
#: The names of ncclDataType_t (nccl.h.in), by number.
_TYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8e4m3", "float8e5m2",
)  # fmt: skip
#: With a name from NCCL 2.24 on; before that, the numbers of the algorithm and protocol.
_CHOICE = re.compile(r"(?:(\w{1,40}): )?\d{1,18} Bytes -> Algo (\w{1,20}) proto (\w{1,20})\b")
_BEST = re.compile(r"Best tuning, algorithm, (\w{1,20}), protocol, (\w{1,20})")
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_GDR = re.compile(r"GPU Direct RDMA (Enabled|Disabled)\b")
_VERSION = re.compile(r"\b([NR]CCL) version ?:? ?(\d[\w.+:-]{1,60})")
_HIP = re.compile(r"\bHIP version *: *([\w.]{1,40})")
_DRIVER = re.compile(r"\bcudaDriverVersion (\d{4,6})\b")
#: Lines whose groups are facts of the process; the network that a line shows in use; "": none.
_FACTS = tuple((re.compile(pattern), network) for pattern, network in (
    (r"NET/Socket ?: Using " + _INTERFACE, "Socket"),
    (r"(?:Using network|Assigned NET plugin) (?P<network>.{1,60}?)(?: to comm)?\s*$", ""),
    (r"NET/IB: .{1,120}\bGID (?P<gid>\d{1,3}) \(", ""),
    (r"NET/OFI Selected [Pp]rovider is (?P<provider>\S{1,60}?)(?:,| |$)", "OFI"),
    (r"\bTUNER/Plugin ?: (?:Loaded|Using)(?: tuner plugin)? (?!internal)(?P<tuner>[\w.-]{1,60})",
     ""),
    (r"\bPROFILER/Plugin ?: (?:Loaded|Using)(?: profiler plugin)? (?!internal)"
     r"(?P<profiler>[\w.-]{1,60})", ""),
    (r"NET/Plugin ?: (?:Loaded net plugin|Using) (?!internal)(?P<plugin>.{1,60}?)"
     r"(?: \(v\d{1,3}\))?\s*$", ""),
))  # fmt: skip
_PEER = re.compile(
    r"(?:peer|remote|[Cc]onnect to|connect|from) \[?([\w.:%-]{2,80}?)(?:\]:\d{1,5}|<\d{1,5}>)"
)

#: Names of networks that belong to one family: NCCL's own and the plugins' for the same wires.
_FAMILIES = (
    (re.compile(r"IB(?:ext)?(?:_\w{1,16})?$"), "IB"),
    (re.compile(r"(?:AWS )?Libfabric|OFI$"), "OFI"),
)


def network_family(name: str) -> str:
    """The family of a network's name: ``IB`` for ``IBext_v8``, ``OFI`` for ``AWS Libfabric``.

    >>> network_family("Socket")
    'Socket'
    """
    return next((family for pattern, family in _FAMILIES if pattern.match(name)), name)


def transport(words: str) -> str:
    """The transport of a channel, without numbers and hints.

    >>> transport("NET/IBext_v8/0(8)/GDRDMA/Shared")
    'NET/IB/GDRDMA'
    """
    words = words.strip()
    if words.startswith("direct shared memory"):
        return "SHM"
    kind, *parts = words.split("/")
    if kind in ("NET", "COLLNET") and parts:
        gdr = "/GDRDMA" if "GDRDMA" in parts else ""
        return f"{kind}/{network_family(parts[0])}{gdr}"
    if kind == "P2P" and parts:
        return f"P2P/{parts[0].split()[0]}" if parts[0].strip() else "P2P"
    return kind[:20]


def read_log(lines: Iterable[str]) -> NcclLog:
    """What these lines say, in the order of the log. Other lines are passed over."""
    reader = _LogReader()
    for line in lines:
        reader.read(line[: nccl_errors.MAX_LINE])
    return reader.result()


# --- What was read.


@dataclass
class _ProcessFacts:
    """What the lines of one process say, of one of its devices."""

    texts: dict[str, str] = field(default_factory=dict)
    networks: set[str] = field(default_factory=set)
    hcas: dict[str, None] = field(default_factory=dict)
    transports: dict[str, None] = field(default_factory=dict)
    # the ranks that the process's channels start or end at
    speakers: set[int] = field(default_factory=set)
    gdr: bool | None = None
    channels: int | None = None
    nvls: int | None = None
    errors: dict[str, NcclError] = field(default_factory=dict)
    # (ranks of the communicator, its address) -> the last calls
    calls: dict[tuple[int, str], deque[tuple[int, int, str]]] = field(default_factory=dict)
    choices: dict[str, None] = field(default_factory=dict)

    def merged(self, other: _ProcessFacts) -> _ProcessFacts:
        """Both; this one's values come first."""

        def joined(value: Any, other_value: Any) -> Any:
            if isinstance(value, dict):
                return {**value, **other_value, **value}
            if isinstance(value, set):
                return value | other_value
            return other_value if value is None else value

        return _ProcessFacts(**{k: joined(v, getattr(other, k)) for k, v in vars(self).items()})

    def add_call(self, match: re.Match[str]) -> None:
        """Add a call of a collective. Sends and receives differ between ranks."""
        name, number, count, kind, root, comm, size = match.groups()
        key = int(size), comm
        if name in ("Send", "Recv") or (key not in self.calls and len(self.calls) >= 64):
            return
        calls = self.calls.setdefault(key, deque(maxlen=KEPT_CALLS))
        operation = int(number, 16)
        place = calls[-1][1] + 1 if calls and calls[-1][0] == operation else 0
        type_name = _TYPES[int(kind)] if int(kind) < len(_TYPES) else f"type {kind}"
        text = f"{name} of {count} {type_name}"
        if name in ("Broadcast", "Reduce", "Gather", "Scatter"):
            text += f", root {root}"
        calls.append((operation, place, text))

    def add_choice(self, name: str, algorithm: str, protocol: str) -> None:
        """Add an algorithm and a protocol, by name or number."""
        words = [name] if name else []
        for word, names in ((algorithm, _ALGORITHMS), (protocol, _PROTOCOLS)):
            is_number = word.isdecimal() and int(word) < len(names)
            words.append(names[int(word)] if is_number else word.upper())
        if len(self.choices) < _MAX_CHOICES:
            self.choices.setdefault(" ".join(words))


@dataclass
class _LargestCommunicator:
    """The largest communicator of a process on one device."""

    rank: int
    size: int
    state: str = ""


#: In the line of a communicator -> its state.
_STATE_WORDS = {
    "Init START": "init", "Init COMPLETE": "ready", "Abort COMPLETE": "aborted",
    "Destroy COMPLETE": "ended",
}  # fmt: skip


@dataclass
class _Process:
    facts: dict[int, _ProcessFacts] = field(default_factory=dict)
    communicators: dict[int, _LargestCommunicator] = field(default_factory=dict)

    def add_communicator(self, rank: int, size: int, device: int, text: str) -> None:
        largest = self.communicators.get(device)
        if rank >= size or (largest is not None and size < largest.size):
            return
        if largest is None or (rank, size) != (largest.rank, largest.size):
            if largest is None and len(self.communicators) >= 64:
                return
            largest = self.communicators[device] = _LargestCommunicator(rank, size)
        for word in filter(text.__contains__, _STATE_WORDS):
            largest.state = _STATE_WORDS[word]


class _LogReader:
    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], _Process] = {}
        self.errors: dict[str, NcclError] = {}
        self.version = self.driver = ""

    def read(self, line: str) -> None:
        mark = _MARK.search(line) if "NCCL " in line else None
        if mark is None:
            self._read_other(line)
            return
        prefix = _PREFIX.search(line, max(0, mark.start() - 600), mark.start())
        host, pid, device = prefix.groups() if prefix else ("", "0", "0")
        key = host or "", int(pid or 0)
        process = self.processes.get(key)
        if process is None:
            if len(self.processes) >= MAX_RANKS:
                return
            process = self.processes[key] = _Process()
        number = int(device)
        if number not in process.facts and len(process.facts) >= 64:
            return
        facts = process.facts.setdefault(number, _ProcessFacts())
        text = line[mark.end() :]
        if (error := _error(line, text)) and len(facts.errors) < MAX_ERRORS:
            facts.errors.setdefault(error.key, error)
        self._read_text(process, facts, number, text)

    def _read_other(self, line: str) -> None:
        """A line without a process: a version, or an error."""
        if "CCL version" in line and (match := _VERSION.search(line)):
            self.version = self.version or f"{match[1]} {match[2]}"
        elif "HIP version" in line and (match := _HIP.search(line)):
            self.driver = self.driver or f"HIP {match[1]}"
        elif len(self.errors) < MAX_ERRORS and (error := _error(line, line)):
            self.errors.setdefault(error.key, error)

    def _read_text(self, process: _Process, facts: _ProcessFacts, device: int, text: str) -> None:
        texts = facts.texts
        if ": opCount " in text:
            if match := _CALL.search(text):
                facts.add_call(match)
        elif match := _CHOICE.search(text):
            facts.add_choice(match[1] or "", match[2], match[3])
        elif match := _BEST.search(text):
            facts.add_choice("", match[1], match[2])
        elif match := _CHANNEL.search(text):
            source, target, direction, words = match.groups()
            if len(facts.transports) < 16:
                facts.transports.setdefault(transport(words))
            if len(facts.speakers) < 2:
                facts.speakers.add(int(target if direction == "receive" else source))
        elif match := _COMM.search(text):
            device = int(match[3]) if match[3] else device
            process.add_communicator(int(match[1]), int(match[2]), device, text)
        elif match := _CHANNELS.search(text):
            facts.channels = int(match[1])
            facts.nvls = int(match[2]) if match[2] else facts.nvls
        elif match := _BOOTSTRAP.search(text):
            texts["bootstrap"], texts["bootstrap address"] = match.groups()
        elif _HCAS.search(text):
            hcas = _HCA.findall(text)[:MAX_HCAS]
            facts.hcas.update(dict.fromkeys(hcas))
            facts.networks |= {"IB"} if hcas else set()
            if match := _OUT_OF_BAND.search(text):
                texts |= match.groupdict()
        elif match := _GDR.search(text):
            facts.gdr = facts.gdr or match[1] == "Enabled"
        elif match := _VERSION.search(text):
            texts["version"] = f"{match[1]} {match[2]}"
        elif match := _DRIVER.search(text):
            number = int(match[1])
            texts["driver"] = f"CUDA {number // 1000}.{number % 1000 // 10}"
        else:
            for pattern, network in _FACTS:
                if match := pattern.search(text):
                    texts |= {name: words.strip() for name, words in match.groupdict().items()}
                    facts.networks |= {network} - {""}
                    break

    def result(self) -> NcclLog:
        places = self.processes.items()
        ranks = [rank for (host, pid), row in places for rank in self._ranks(host, pid, row)]
        ranks.sort(key=lambda rank: (rank.rank is None, rank.rank or 0))
        return NcclLog(tuple(ranks[:MAX_RANKS]), tuple(self.errors.values()))

    def _ranks(self, host: str, pid: int, process: _Process) -> Iterator[NcclRank]:
        """The ranks of a process: one for each device of its communicators."""
        common = _ProcessFacts()
        for facts in process.facts.values():
            common = common.merged(facts)
        devices = process.communicators
        if not devices:
            device = next(iter(process.facts)) if len(process.facts) == 1 else None
            rank = next(iter(common.speakers)) if len(common.speakers) == 1 else None
            yield self._described(NcclRank(rank, host=host, pid=pid, device=device), common)
        for device, communicator in devices.items():
            facts = common
            if len(devices) > 1:
                # One process with many GPUs: the links are the device's, the network is common.
                facts = process.facts.get(device, _ProcessFacts())
                facts = replace(facts, texts={**common.texts, **facts.texts}, hcas=common.hcas)
                facts.networks = common.networks
            rank, size, state = communicator.rank, communicator.size, communicator.state
            yield self._described(NcclRank(rank, size, host, pid, device, state=state), facts)

    def _described(self, rank: NcclRank, facts: _ProcessFacts) -> NcclRank:
        texts, network, gdr = facts.texts, _network(facts), facts.gdr
        nets = [name for name in facts.transports if name.startswith(("NET/", "COLLNET/"))]
        gdr = any("GDRDMA" in name for name in nets) if nets else gdr
        interface, address = texts.get("interface", ""), texts.get("address", "")
        own_name = texts.get("network", "")
        plugin = texts.get("plugin", "") or ("" if own_name in ("IB", "Socket") else own_name)
        size = max((ranks for ranks, _ in facts.calls), default=0)
        calls = [calls for (ranks, _), calls in facts.calls.items() if ranks == size]
        names = ("provider", "gid", "tuner", "profiler")
        further: dict[str, Any] = {name: texts.get(name, "") for name in names}
        return replace(
            rank, version=texts.get("version", self.version),
            driver=texts.get("driver", self.driver), network=network,
            plugin=plugin if network != "Socket" else "",
            interface=interface or texts.get("bootstrap", ""),
            address=address if interface else texts.get("bootstrap address", ""),
            hcas=tuple(facts.hcas)[:MAX_HCAS], gdr=gdr, transports=tuple(facts.transports),
            channels=facts.channels, nvls=facts.nvls, **further,
            calls=tuple(calls[0]) if len(calls) == 1 else (), calls_size=size,
            choices=tuple(facts.choices), errors=tuple(facts.errors.values())[:MAX_ERRORS],
        )  # fmt: skip


def _network(facts: _ProcessFacts) -> str:
    """The network in use: by NCCL's own word, else by the channels, else the best one found."""
    if name := facts.texts.get("network", ""):
        return network_family(name)
    for name in facts.transports:
        if name.startswith("NET/"):
            return name.split("/")[1]
    return next((name for name in ("OFI", "IB", "Socket") if name in facts.networks), "")


def _error(line: str, text: str) -> NcclError | None:
    """The error in a line; text: the line without its prefix."""
    meaning = nccl_errors.meaning(line)
    if meaning is None:
        return None
    peer = _PEER.search(text)
    return NcclError(meaning.key, text.strip()[:MAX_TEXT], peer[1][:80] if peer else "")


# --- The NCCL Inspector: the last collective of a process, as JSON or for Prometheus.
#
# Source: NVIDIA/nccl ext-profiler/inspector (README.md, inspector.cc, inspector_prom.cc) of NCCL
# 2.28 and newer. A process writes ``DIR/HOST-pidPID.log``, an object a line, or for each GPU
# ``DIR/nccl_inspector_metrics_UUID.prom``, and keeps the file open.

#: The names of its files.
INSPECTOR_FILES = re.compile(r"-pid\d{1,9}\.log$|/nccl_inspector_metrics_[\w-]{1,64}\.prom$")

# A verbose object has thousands of characters of events behind these keys.
_INSPECTOR_JSON = re.compile(
    r'^\{ ?"header": ?\{ ?"id": ?"(?P<id>0x[0-9a-f]{1,16})".{0,80}?'
    r'"n_ranks": ?(?P<ranks>\d{1,7})\b.{0,600}?"coll": ?"(?P<name>\w{1,40})", ?'
    r'"coll_sn": ?(?P<number>\d{1,18})\b'
)
_INSPECTOR_PROMETHEUS = re.compile(
    r'^nccl_\w{1,40}\{comm_id="(?P<id>0x[0-9a-f]{1,16})".{0,400}?"?n_?ranks="(?P<ranks>\d{1,7})"'
    r'.{0,200}?collective="(?P<name>\w{1,40})".{0,80}?coll_sn="(?P<number>\d{1,18})"'
)


def last_collective(lines: Iterable[str]) -> str:
    """The last completed collective of the largest communicator; "": none.

    >>> last_collective(['nccl_bus_bandwidth_gbs{comm_id="0xd1",rank="4",nranks="8",'
    ...                  'collective="AllReduce",coll_sn="42"} 1.5'])
    'AllReduce #42 of communicator 0xd1'
    """
    best, words = (0, 0), ""
    for line in lines:
        if match := _INSPECTOR_JSON.match(line) or _INSPECTOR_PROMETHEUS.match(line):
            key = int(match["ranks"]), int(match["number"])
            if key >= best:
                best = key
                words = f"{match['name']} #{key[1]} of communicator {match['id']}"
    return words
