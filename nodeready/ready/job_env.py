"""The variables that the nodes' facts suggest for a job's environment, each with its reason.

Pure: the snapshots of all nodes go in, completed by the addresses of the other nodes
(`nodeready.audit.run.combined`).

NCCL_SOCKET_IFNAME  ``=eth1``: exactly this interface; without "=" it would be a prefix, so that
                    eth1 meant eth10 as well (NCCL user guide, environment variables)
GLOO_SOCKET_IFNAME  the same interface by its plain name: Gloo opens what stands between commas
                    (PyTorch, ProcessGroupGloo)
NCCL_IB_HCA         the RDMA devices that are not the management's: see `ib_hca`
PDSH_RCMD_TYPE      ssh, where there is pdsh: its own default may be rsh; where ssh is the default
                    already, it changes nothing
MASTER_PORT         a port that is free on every node: see `choose`

With ``--debug`` also what makes the job debuggable, under the names that the installed PyTorch
has for it: see `debug_variables`.

A node's answer is data: an implausible name of an interface or device is rejected.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nodeready import shell
from nodeready.inventory.nodeset import fold
from nodeready.node.stacks.beside import (
    RECORDER,
    RECORDER_ON,
    RECORDER_RENAMED,
    release,
)
from nodeready.policy import Policy
from nodeready.subjects.base import Unknown
from nodeready.subjects.nics.facts import Nics, socket_interface
from nodeready.subjects.pdsh.facts import Pdsh
from nodeready.subjects.ports import facts as ports_facts
from nodeready.subjects.ports.facts import Ports, Range, Socket, parse_ranges
from nodeready.subjects.ports.firewall import shown
from nodeready.subjects.rdma.facts import Rdma, hcas
from nodeready.subjects.snapshot import Snapshot

# --- MASTER_PORT: a port on which a job can rendezvous.
#
# Which node will be the first of a job is not known yet: the port must be free on all of them.

#: The maximum of reasons why other ports are not chosen.
_MOST = 6

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Choice:
    """The port for a job, or why there is none.

    port:    None when none is free on all nodes
    reason:  why this port, or why none
    notes:   the nodes that exclude other ports, or may exclude this one later
    unknown: node -> why its ports are not known
    """

    port: int | None
    reason: str
    notes: tuple[str, ...]
    unknown: Mapping[str, str]


def _runs(ports: Iterable[int]) -> Ranges:
    runs: list[Range] = []
    for port in sorted({*ports}):
        if runs and runs[-1][1] + 1 == port:
            runs[-1] = (runs[-1][0], port)
        else:
            runs.append((port, port))
    return tuple(runs)


def _within(ranges: Ranges, first: int, last: int) -> Ranges:
    """The parts of ``ranges`` from ``first`` to ``last``."""
    cut = ((max(first, low), min(last, high)) for low, high in ranges)
    return tuple(part for part in cut if part[0] <= part[1])


def _holder(socket: Socket) -> str:
    holder = f"{socket.process or 'a process'} of {socket.user or f'uid {socket.uid}'}"
    return f"{holder} listens" if socket.state == "listening" else f"a connection of {holder}"


def _taken(observed: Ports, first: int, last: int) -> dict[str, Ranges]:
    """Reason -> the ports of the range that a job of any user cannot use on this node."""
    held: dict[int, str] = {}
    for socket in (*(observed.listeners or ()), *(observed.connections or ())):
        if first <= socket.port <= last:
            held.setdefault(socket.port, _holder(socket))
    ports: dict[str, list[int]] = {}
    for port, reason in held.items():
        ports.setdefault(reason, []).append(port)
    taken = {reason: _runs(numbers) for reason, numbers in ports.items()}
    if observed.privileged_below > 0:
        taken["for root alone"] = _within(((0, observed.privileged_below - 1),), first, last)
    if observed.firewall.verdict == "dropped":
        dropped = parse_ranges(observed.firewall.ports) or ()
        taken["the firewall drops it"] = _within(dropped, first, last)
    return {reason: ranges for reason, ranges in taken.items() if ranges}


def _lent(observed: Ports) -> Ranges:
    """The ports that the kernel gives to outgoing connections: ephemeral and not reserved."""
    ranges = [observed.ephemeral] if observed.ephemeral else []
    for first, last in observed.reserved or ():
        ranges = [
            part
            for low, high in ranges
            for part in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if part[0] <= part[1]
        ]
    return tuple(ranges)


def _unseen(observed: Ports | Unknown, first: int, last: int) -> str:
    """Why the used ports of the range are not all known on this node; "": they are."""
    if isinstance(observed, Unknown):
        return observed.reason
    if observed.listeners is None or observed.connections is None:
        return "/proc/net/tcp cannot be read"
    inside = [
        socket
        for socket in (*observed.listeners, *observed.connections)
        if first <= socket.port <= last
    ]
    cut = observed.more and len(inside) >= ports_facts.MOST
    return "more sockets in the range than are looked at" if cut else ""


#: (reason, ports) -> the nodes that exclude these ports.
Objections = dict[tuple[str, Ranges], list[str]]


def _objection_lines(groups: Objections, first: int, last: int) -> tuple[str, ...]:
    """``29500-29502 on gpu017: python3 of ada listens``, as far as the ports are in the range."""
    texts = []
    for (reason, ranges), names in groups.items():
        inside = _within(ranges, first, last)
        if inside:
            ports = ", ".join(shown(*part) for part in inside[:4])
            suffix = ", ..." if len(inside) > 4 else ""
            texts.append(f"not {ports}{suffix} on {fold(names)}: {reason}")
    remainder = f"and {len(texts) - _MOST} more reasons against ports"
    return (*texts[:_MOST], remainder) if len(texts) > _MOST else tuple(texts)


def choose(observed: Mapping[str, Ports | Unknown], ranges: Mapping[str, Range]) -> Choice:
    """The first port that is free on every node; one that stays free rather than one that the
    kernel may give to an outgoing connection.

    observed: node -> its ports, probed with its range
    ranges:   node -> the range of its policy; a port must be in all of them

    A free port has no listener, is no connection's local port, is open to any user, and is not
    dropped by the packet filter. A node that could not be probed is named, and excludes no port.
    """
    first, last = max(r[0] for r in ranges.values()), min(r[1] for r in ranges.values())
    if first > last:
        by_range: dict[Range, list[str]] = {}
        for name, span in ranges.items():
            by_range.setdefault(span, []).append(name)
        notes = tuple(f"{shown(*span)} on {fold(names)}" for span, names in by_range.items())
        reason = "the nodes' policies have no port in common: --ports FIRST-LAST"
        return Choice(None, reason, notes[:_MOST], {})
    unknown = {
        name: reason
        for name, observation in observed.items()
        if (reason := _unseen(observation, first, last))
    }
    taken: Objections = {}
    lent: Objections = {}
    for name, observation in observed.items():
        if isinstance(observation, Unknown):
            continue
        for why, ports in _taken(observation, first, last).items():
            taken.setdefault((why, ports), []).append(name)
        if inside := _within(_lent(observation), first, last):
            lent.setdefault(("outgoing connections may get it", inside), []).append(name)
    if len(unknown) == len(observed):
        return Choice(None, "no node tells which of its ports are free", (), unknown)
    free = _free(first, last, taken)
    lasting = _free(first, last, {**taken, **lent})
    every = shown(first, last)
    if not free:
        reason = f"no port of {every} is free on all nodes"
        return Choice(None, reason, _objection_lines(taken, first, last), unknown)
    port = (lasting or free)[0]
    notes = _objection_lines({**taken, **lent} if lasting else taken, first, port - 1)
    if not lasting:
        lenders = fold(name for names in lent.values() for name in names)
        notes += (f"outgoing connections may get it on {lenders}: see ports.ephemeral",)
    return Choice(port, f"the first of {every} that is free on all nodes", notes, unknown)


def _free(first: int, last: int, against: Objections) -> list[int]:
    """The ports of the range that none of these exclude, ascending."""
    held = {
        port
        for ranges in {ranges for _, ranges in against}
        for low, high in ranges
        for port in range(low, high + 1)
    }
    return [port for port in range(first, last + 1) if port not in held]


# --- NCCL_SOCKET_IFNAME: the interface of NCCL's sockets.
#
# Left alone, NCCL takes an interface whose name begins with ``ib``, else the first that is neither
# loopback nor Docker's (NVIDIA's NCCL user guide, NCCL_SOCKET_IFNAME): on a node with a management
# network, a virtual bridge or an unused port that is often one that reaches no other node, and the
# job hangs or stops in its first collective.


def socket_ifname(nics: Nics) -> tuple[str | None, str]:
    """The name of the interface, or None, and the reason.

    In this order: the interface whose routes lead to the most of the other nodes (what
    `nodeready.subjects.nics.facts.with_peers` found); the one of the default route; the only one
    that is configured. Never loopback, a bridge or wire of containers or virtual machines, or one
    without a link; a bond rather than its slaves, because it is the bond that has the routes.

    NCCL takes the value as a prefix, so that ``eth1`` also means ``eth10``: write ``=eth1``.
    """
    return socket_interface(nics)


# --- NCCL_IB_HCA: the RDMA devices that NCCL should use.
#
# NCCL takes every active device when nothing tells it otherwise, that of the management too, and
# a job then waits for the slowest. A name in NCCL_IB_HCA is a prefix, so that mlx5_1 means mlx5_10
# as well; with "=" in front it is exact (NCCL's documentation, environment variables).


def ib_hca(rdma: Rdma, nics: Nics | None) -> tuple[tuple[str, ...], str]:
    """The devices, and the reason; without the network (None) as far as RDMA alone tells."""
    return hcas(rdma, () if nics is None else _management(nics))


def variable(devices: tuple[str, ...]) -> str:
    """The value of NCCL_IB_HCA that means these devices and no other; "" for none."""
    return f"={','.join(devices)}" if devices else ""


def _management(nics: Nics) -> set[str]:
    """The interfaces of the default route and of the routes to other nodes, with their ports."""
    ends = {nics.default_interface, *nics.peers_via[:1]} - {None}
    members = {
        name
        for name, interface in nics.interfaces.items()
        if interface.master in ends or ends & {*interface.upper}
    }
    return {name for name in ends | members if name}


# --- The variables, from all nodes' suggestions.

#: The subjects to probe.
SUBJECTS = ("nics", "rdma", "ports", "pdsh")

# The kernel allows more in names (dev_valid_name), but no driver, udev rule or person uses it,
# and a comma, "=" or "^" would mean something to NCCL.
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(:[0-9]{1,3})?")

#: Value or reason with the names of the nodes that have it, the most common first.
Groups = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Variable:
    """A variable of a job's environment.

    value:          what to export; None: it is not exported
    reason:         why this value, or why none
    settled:        no node differs, and all are known
    nodes_by_value: value -> the nodes that suggest it; "" of those that need none
    unknown:        reason -> the nodes without a known value
    notes:          further lines about it
    """

    name: str
    value: str | None
    reason: str
    settled: bool
    nodes_by_value: Groups = ()
    unknown: Groups = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """The document of `nodeready env`.

    taken:     when the nodes were probed, UTC
    nodes:     that were probed
    missing:   error -> the nodes that could not be probed
    """

    taken: str
    nodes: tuple[str, ...]
    missing: Groups
    variables: tuple[Variable, ...]


@dataclass(frozen=True)
class _Suggestion:
    """A node's suggestion: a value, "" for none, or None when it is unknown; and the reason."""

    value: str | None
    reason: str = field(default="", compare=False)


def grouped(pairs: Mapping[str, str]) -> Groups:
    """Node -> text, as text -> nodes, the most common first."""
    by_text: dict[str, list[str]] = {}
    for name, text in pairs.items():
        by_text.setdefault(text, []).append(name)
    ranked = sorted(by_text.items(), key=lambda item: -len(item[1]))
    return tuple((text, tuple(names)) for text, names in ranked)


def _reason(observation: object, noun: str) -> str:
    return f"{noun}: {observation.reason if isinstance(observation, Unknown) else 'not looked at'}"


def _interface(snapshot: Snapshot) -> _Suggestion:
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return _Suggestion(None, _reason(nics, "its network"))
    name, reason = socket_ifname(nics)
    if name is not None and not _INTERFACE.fullmatch(name):
        return _Suggestion(None, f"{name!a} is no plausible name of an interface")
    return _Suggestion(name, reason)


def _exactly(snapshot: Snapshot) -> _Suggestion:
    suggestion = _interface(snapshot)
    return (
        _Suggestion(f"={suggestion.value}", suggestion.reason) if suggestion.value else suggestion
    )


def _hca(snapshot: Snapshot) -> _Suggestion:
    rdma, nics = snapshot.subjects.get("rdma"), snapshot.subjects.get("nics")
    if not isinstance(rdma, Rdma):
        return _Suggestion(None, _reason(rdma, "its RDMA devices"))
    devices, reason = ib_hca(rdma, nics if isinstance(nics, Nics) else None)
    if devices and not isinstance(nics, Nics):
        # The management's devices among them are not known.
        return _Suggestion(None, _reason(nics, "its network"))
    strange = [name for name in devices if not _DEVICE.fullmatch(name)]
    if strange:
        return _Suggestion(None, f"{strange[0]!a} is no plausible name of an RDMA device")
    return _Suggestion(variable(devices), reason)


def _pdsh(snapshot: Snapshot) -> _Suggestion:
    pdsh = snapshot.subjects.get("pdsh")
    if not isinstance(pdsh, Pdsh):
        return _Suggestion(None, _reason(pdsh, "pdsh"))
    if not pdsh.installed:
        return _Suggestion("", "pdsh is not installed")
    return _Suggestion("ssh", "pdsh is installed, and its own default may be rsh")


def _variable(
    name: str,
    ask: Callable[[Snapshot], _Suggestion],
    snapshots: Mapping[str, Snapshot],
    *,
    harmless: bool = False,
) -> Variable:
    """The nodes' suggestion, if they agree.

    harmless: the variable has no effect on a node that needs none
    """
    suggestions = {node: ask(snapshot) for node, snapshot in snapshots.items()}
    values = grouped(
        {
            node: suggestion.value
            for node, suggestion in suggestions.items()
            if suggestion.value is not None
        }
    )
    unknown = grouped(
        {
            node: suggestion.reason
            for node, suggestion in suggestions.items()
            if suggestion.value is None
        }
    )
    needed = [value for value, _ in values if value or not harmless] or [""]
    if not values:
        return Variable(name, None, "no node tells", False, (), unknown)
    if len(needed) > 1:
        return Variable(name, None, "the nodes differ", False, values, unknown)
    reasons = Counter(
        suggestion.reason for suggestion in suggestions.values() if suggestion.value == needed[0]
    )
    reason = reasons.most_common(1)[0][0]
    return Variable(name, needed[0] or None, reason, not unknown, values, unknown)


def _sockets(snapshots: Mapping[str, Snapshot]) -> Variable:
    sockets = _variable("NCCL_SOCKET_IFNAME", _exactly, snapshots)
    names = [value[1:] for value, _ in sockets.nodes_by_value]
    if sockets.value is not None or len(names) < 2:
        return sockets
    # NCCL takes the first interface of a list that exists: unique where a node has only one.
    for _, nodes in sockets.nodes_by_value:
        for node in nodes:
            if len({*names} & snapshots[node]["nics"].interfaces.keys()) > 1:
                return sockets
    return replace(
        sockets,
        notes=(f"={','.join(names)} means the right one on each: no node has two of them",),
    )


def _port(snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]) -> Variable:
    observed: dict[str, Ports | Unknown] = {}
    for node, snapshot in snapshots.items():
        ports = snapshot.subjects.get("ports")
        observed[node] = ports if isinstance(ports, (Ports, Unknown)) else Unknown("not looked at")
    choice = choose(observed, {node: policies[node].port_range for node in snapshots})
    value = None if choice.port is None else str(choice.port)
    tested = tuple(node for node in snapshots if node not in choice.unknown)
    return Variable(
        "MASTER_PORT",
        value,
        choice.reason,
        value is not None and not choice.unknown,
        ((value, tested),) if value else (),
        grouped(choice.unknown),
        choice.notes,
    )


def variables(
    snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]
) -> tuple[Variable, ...]:
    """The variables, in the order of this module's list.

    snapshots: of each node, at least one
    policies:  node -> its policy
    """
    return (
        _sockets(snapshots),
        _variable("GLOO_SOCKET_IFNAME", _interface, snapshots),
        _variable("NCCL_IB_HCA", _hca, snapshots),
        _variable("PDSH_RCMD_TYPE", _pdsh, snapshots, harmless=True),
        _port(snapshots, policies),
    )


# --- ``--debug``: variables that make a job debuggable, under the names of the installed versions.


@dataclass(frozen=True)
class Installed:
    """The PyTorch that is installed on a node.

    torch: its version; "": not known
    cuda:  it was built for NVIDIA's GPUs; None: not known
    why:   why the version is not known, one line; "": it is
    """

    torch: str = ""
    cuda: bool | None = None
    why: str = ""


# Without importing torch, which takes seconds: Python finds its directory, and version.py has its
# version.
_ASK = """
import importlib.util, os, re, sys
spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no torch")
path = os.path.join(list(spec.submodule_search_locations)[0], "version.py")
with open(path, "rb") as file:
    text = file.read(4096).decode("utf-8", "replace")
for name in ("__version__", "cuda", "hip"):
    pattern = "^%s *(?::[^=]*)?= *['\\"]([0-9][0-9A-Za-z.+_-]{0,40})['\\"]"
    found = re.search(pattern % name, text, re.M)
    print(sys.argv[1], name.strip("_"), found.group(1) if found else "none")
"""
#: Seconds on a node: a Python on a file system that many nodes read at once.
ASK_S = 20


def question(python: str, nonce: str) -> str:
    """The POSIX sh text that asks a node's Python for its torch.

    python: its path, or a name in PATH. Root runs none that other users can change.
    """
    return f"""
    nr_python=$(command -v {shell.quote(python)}) || {{
        printf '%s why there is no %s\\n' {shell.quote(nonce)} {shell.quote(python)}
        exit 0
    }}
    nr_owner=$(stat -Lc %u -- "$nr_python")
    if [ "$(id -u)" = 0 ] && [ "$nr_owner" != 0 ]; then
        printf '%s why root does not run %s, which is not root\\047s\\n' \
            {shell.quote(nonce)} {shell.quote(python)}
        exit 0
    fi
    cd /
    timeout -k 2 {ASK_S} "$nr_python" -B -c {shell.quote(_ASK)} {shell.quote(nonce)} 2>/dev/null ||
        printf '%s why %s finds no torch\\n' {shell.quote(nonce)} {shell.quote(python)}
    """


def read_installed(output: str, nonce: str) -> Installed:
    """The PyTorch in a node's answer; lines without the nonce are ignored."""
    values: dict[str, str] = {}
    for row in output.splitlines():
        mark, _, tail = row.partition(" ")
        name, _, value = tail.partition(" ")
        if mark == nonce:
            values.setdefault(name, value.strip()[:200])
    torch = values.get("version", "none")
    if release(torch) is None:
        return Installed(why=values.get("why") or "it does not tell its version of torch")
    return Installed(torch, values.get("cuda", "none") != "none")


#: The size of the records and the files for them: the names before `RECORDER_RENAMED`, and since.
_BUFFERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_FILES = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: The directory of pipes: on the node itself, and in every distribution.
_LOCAL = "/dev/shm"


def new_word() -> str:
    """A random word for file names, so that no file with the name exists before the job."""
    return os.urandom(4).hex()


def _recorder(installed: Installed, directory: str, word: str) -> Iterable[tuple[str, str, str]]:
    """(name, value, reason) of the flight recorder's variables."""
    torch = release(installed.torch)
    if torch is not None and torch < RECORDER:
        return
    names = slice(0, 2) if torch is None else slice(0, 1)
    if torch is not None and torch >= RECORDER_RENAMED:
        names = slice(1, 2)
    note = "" if torch else " (both names: the version of torch is not known)"
    # Newer versions have it on.
    if torch is None or torch < RECORDER_ON:
        for name in _BUFFERS[names]:
            reason = "the flight recorder keeps the last 2,000 collectives of each rank"
            yield name, "2000", reason + note
        reason = "when a collective times out, each rank writes its records"
        yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason
    for name in _FILES[names] if directory else ():
        value = f"{directory.rstrip('/')}/comm_lib_trace_rank_"
        yield name, value, f"where each rank writes its records{note}"
    reason = "nodeready stacks --dump has a rank write its records, and the job goes on"
    yield _PIPE, f"{_LOCAL}/nodeready-{word}-", reason


def _debugging(installed: Installed, directory: str, word: str) -> dict[str, tuple[str, str]]:
    """Name -> value and reason of a node's variables."""
    by_name = {
        name: (value, reason) for name, value, reason in _recorder(installed, directory, word)
    }
    by_name["NCCL_DEBUG"] = ("WARN", "NCCL says what fails, and is quiet else")
    if installed.cuda is not False:
        on = "the core of a GPU whose kernel hangs can be asked for"
        by_name["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] = ("1", on)
        pipe = f"{_LOCAL}/nodeready-{word}-cuda.%h.%p"
        by_name["CUDA_COREDUMP_PIPE"] = (pipe, "whoever writes to it gets that core")
        small = "that core is without the memory of the GPU, which may be 80 GB and more"
        by_name["CUDA_COREDUMP_GENERATION_FLAGS"] = ("skip_global_memory", small)
    handler = "a rank that dies by a signal prints the stacks of Python"
    by_name["PYTHONFAULTHANDLER"] = ("1", handler)
    by_name["PYTHONUNBUFFERED"] = (
        "1",
        "what a rank printed last is in its log, not in its memory",
    )
    return by_name


def debug_variables(
    installed: Mapping[str, Installed], directory: str = "", word: str = ""
) -> tuple[Variable, ...]:
    """The variables that make a job on these nodes debuggable, each with its reason.

    installed: of each node, at least one
    directory: where the ranks write their records; "": PyTorch's default
    word:      of the names of pipes; "": a random one

    Where the version of PyTorch is unknown, both names of a variable are exported: a version
    ignores the name that it does not know.
    """
    word = word or new_word()
    suggested = {node: _debugging(on_node, directory, word) for node, on_node in installed.items()}
    names = dict.fromkeys(name for by_name in suggested.values() for name in by_name)
    unknown = grouped({node: on_node.why for node, on_node in installed.items() if on_node.why})
    suggestions = []
    for name in names:
        by_node = {node: by_name[name] for node, by_name in suggested.items() if name in by_name}
        value, reason = next(iter(by_node.values()))
        lacking = [node for node in installed if node not in by_node]
        notes = (f"{fold(lacking)}: not needed there, and harmless",) if lacking else ()
        of_torch = name.startswith("TORCH_")
        suggestions.append(
            Variable(
                name,
                value,
                reason,
                True,
                ((value, tuple(by_node)),),
                (),
                (*notes, *(f"{fold(nodes)}: {reason}" for reason, nodes in unknown if of_torch)),
            )
        )
    return tuple(suggestions)
