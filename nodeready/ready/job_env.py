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

What a node says is data: a name that no interface or device has is not taken.
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
from nodeready.subjects.ports.netfilter import range_text
from nodeready.subjects.rdma.facts import Rdma, hcas
from nodeready.subjects.snapshot import Snapshot

# --- MASTER_PORT: a port on which a job can rendezvous.
#
# Which node will be the first of a job is not known yet: the port must be free on all of them.

#: At most so many reasons are told why other ports are not taken.
_MOST = 6

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Choice:
    """The port for a job, or why there is none.

    port:    None when none is free on all nodes
    reason:  why this port, or why none
    notes:   which nodes stand against other ports, or will against this one
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
    return tuple(one for one in cut if one[0] <= one[1])


def _holder(one: Socket) -> str:
    who = f"{one.process or 'a process'} of {one.user or f'uid {one.uid}'}"
    return f"{who} listens" if one.state == "listening" else f"a connection of {who}"


def _taken(seen: Ports, first: int, last: int) -> dict[str, Ranges]:
    """Why -> the ports of the range that a job of any user cannot use on this node."""
    held: dict[int, str] = {}
    for one in (*(seen.listeners or ()), *(seen.connections or ())):
        if first <= one.port <= last:
            held.setdefault(one.port, _holder(one))
    ports: dict[str, list[int]] = {}
    for port, why in held.items():
        ports.setdefault(why, []).append(port)
    found = {why: _runs(some) for why, some in ports.items()}
    if seen.privileged_below > 0:
        found["for root alone"] = _within(((0, seen.privileged_below - 1),), first, last)
    if seen.firewall.verdict == "dropped":
        dropped = parse_ranges(seen.firewall.ports) or ()
        found["the firewall drops it"] = _within(dropped, first, last)
    return {why: ranges for why, ranges in found.items() if ranges}


def _lent(seen: Ports) -> Ranges:
    """The ports that the kernel gives to outgoing connections: ephemeral and not reserved."""
    left = [seen.ephemeral] if seen.ephemeral else []
    for first, last in seen.reserved or ():
        left = [
            part
            for low, high in left
            for part in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if part[0] <= part[1]
        ]
    return tuple(left)


def _unseen(seen: Ports | Unknown, first: int, last: int) -> str:
    """Why nobody knows all ports of the range that are held on this node, or ""."""
    if isinstance(seen, Unknown):
        return seen.reason
    if seen.listeners is None or seen.connections is None:
        return "/proc/net/tcp cannot be read"
    inside = [one for one in (*seen.listeners, *seen.connections) if first <= one.port <= last]
    cut = seen.more and len(inside) >= ports_facts.MOST
    return "more sockets in the range than are looked at" if cut else ""


#: (reason, ports) -> the nodes that stand against these ports.
Objections = dict[tuple[str, Ranges], list[str]]


def _objection_lines(groups: Objections, first: int, last: int) -> tuple[str, ...]:
    """``29500-29502 on gpu017: python3 of ada listens``, as far as the ports are in the range."""
    texts = []
    for (why, ranges), names in groups.items():
        inside = _within(ranges, first, last)
        if inside:
            ports = ", ".join(range_text(*one) for one in inside[:4])
            more = ", ..." if len(inside) > 4 else ""
            texts.append(f"not {ports}{more} on {fold(names)}: {why}")
    rest = f"and {len(texts) - _MOST} more reasons against ports"
    return (*texts[:_MOST], rest) if len(texts) > _MOST else tuple(texts)


def choose(seen: Mapping[str, Ports | Unknown], ranges: Mapping[str, Range]) -> Choice:
    """The first port that is free on every node; one that stays free rather than one that the
    kernel may give to an outgoing connection.

    seen:   node -> its ports, looked at with its range
    ranges: node -> the range of its policy; a port must be in all of them

    Free is a port on which nobody listens, which is no connection's local port, which any user
    may take, and which the packet filter does not drop. A node that could not be looked at is
    named, and stands against nothing.
    """
    first, last = max(r[0] for r in ranges.values()), min(r[1] for r in ranges.values())
    if first > last:
        wanted: dict[Range, list[str]] = {}
        for name, span in ranges.items():
            wanted.setdefault(span, []).append(name)
        notes = tuple(f"{range_text(*span)} on {fold(names)}" for span, names in wanted.items())
        reason = "the nodes' policies have no port in common: --ports FIRST-LAST"
        return Choice(None, reason, notes[:_MOST], {})
    unknown = {name: why for name, one in seen.items() if (why := _unseen(one, first, last))}
    taken: Objections = {}
    lent: Objections = {}
    for name, one in seen.items():
        if isinstance(one, Unknown):
            continue
        for why, ports in _taken(one, first, last).items():
            taken.setdefault((why, ports), []).append(name)
        if inside := _within(_lent(one), first, last):
            lent.setdefault(("outgoing connections may get it", inside), []).append(name)
    if len(unknown) == len(seen):
        return Choice(None, "no node tells which of its ports are free", (), unknown)
    free = _free(first, last, taken)
    lasting = _free(first, last, {**taken, **lent})
    every = range_text(first, last)
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
    """The ports of the range that none of these stand against, ascending."""
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
    """The devices, and why those; without the network (None) as far as RDMA alone tells."""
    return hcas(rdma, () if nics is None else _management(nics))


def variable(devices: tuple[str, ...]) -> str:
    """The value of NCCL_IB_HCA that means these devices and no other; "" for none."""
    return f"={','.join(devices)}" if devices else ""


def _management(nics: Nics) -> set[str]:
    """The interfaces of the default route and of the way to the other nodes, with their ports."""
    ends = {nics.default_interface, *nics.peers_via[:1]} - {None}
    below = {
        name for name, one in nics.interfaces.items() if one.master in ends or ends & {*one.upper}
    }
    return {name for name in ends | below if name}


# --- The variables, from all nodes' suggestions.

#: The subjects that have to be looked at.
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
    settled:        nobody has to look at it: no node differs, and all are known
    nodes_by_value: which nodes suggest which value; "" of those that need none
    unknown:        reason -> the nodes of which it could not be found out
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
    """What `nodeready env` found.

    taken:     when the nodes were looked at, UTC
    nodes:     those that were
    missing:   error -> the nodes that could not be
    """

    taken: str
    nodes: tuple[str, ...]
    missing: Groups
    variables: tuple[Variable, ...]


@dataclass(frozen=True)
class _Suggestion:
    """What one node suggests: a value, "" for none, or None when it cannot be told; and why."""

    value: str | None
    reason: str = field(default="", compare=False)


def grouped(pairs: Mapping[str, str]) -> Groups:
    """Node -> text, as text -> nodes, the most common first."""
    found: dict[str, list[str]] = {}
    for name, text in pairs.items():
        found.setdefault(text, []).append(name)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return tuple((text, tuple(names)) for text, names in ranked)


def _reason(seen: object, what: str) -> str:
    return f"{what}: {seen.reason if isinstance(seen, Unknown) else 'not looked at'}"


def _interface(snapshot: Snapshot) -> _Suggestion:
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return _Suggestion(None, _reason(nics, "its network"))
    name, why = socket_ifname(nics)
    if name is not None and not _INTERFACE.fullmatch(name):
        return _Suggestion(None, f"{name!a} is no plausible name of an interface")
    return _Suggestion(name, why)


def _exactly(snapshot: Snapshot) -> _Suggestion:
    said = _interface(snapshot)
    return _Suggestion(f"={said.value}", said.reason) if said.value else said


def _hca(snapshot: Snapshot) -> _Suggestion:
    rdma, nics = snapshot.subjects.get("rdma"), snapshot.subjects.get("nics")
    if not isinstance(rdma, Rdma):
        return _Suggestion(None, _reason(rdma, "its RDMA devices"))
    devices, why = ib_hca(rdma, nics if isinstance(nics, Nics) else None)
    if devices and not isinstance(nics, Nics):
        # Which of them are the management's is not known.
        return _Suggestion(None, _reason(nics, "its network"))
    strange = [name for name in devices if not _DEVICE.fullmatch(name)]
    if strange:
        return _Suggestion(None, f"{strange[0]!a} is no plausible name of an RDMA device")
    return _Suggestion(variable(devices), why)


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
    """What the nodes suggest, when they agree.

    harmless: the variable means nothing where a node needs none
    """
    suggestions = {node: ask(snapshot) for node, snapshot in snapshots.items()}
    values = grouped(
        {node: one.value for node, one in suggestions.items() if one.value is not None}
    )
    unknown = grouped({node: one.reason for node, one in suggestions.items() if one.value is None})
    needed = [value for value, _ in values if value or not harmless] or [""]
    if not values:
        return Variable(name, None, "no node tells", False, (), unknown)
    if len(needed) > 1:
        return Variable(name, None, "the nodes differ", False, values, unknown)
    reasons = Counter(one.reason for one in suggestions.values() if one.value == needed[0])
    reason = reasons.most_common(1)[0][0]
    return Variable(name, needed[0] or None, reason, not unknown, values, unknown)


def _sockets(snapshots: Mapping[str, Snapshot]) -> Variable:
    found = _variable("NCCL_SOCKET_IFNAME", _exactly, snapshots)
    names = [value[1:] for value, _ in found.nodes_by_value]
    if found.value is not None or len(names) < 2:
        return found
    # NCCL takes what it finds of a list: where every node has one of them alone, that is the one.
    for _, nodes in found.nodes_by_value:
        for node in nodes:
            if len({*names} & snapshots[node]["nics"].interfaces.keys()) > 1:
                return found
    return replace(
        found, notes=(f"={','.join(names)} means the right one on each: no node has two of them",)
    )


def _port(snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]) -> Variable:
    seen: dict[str, Ports | Unknown] = {}
    for node, snapshot in snapshots.items():
        ports = snapshot.subjects.get("ports")
        seen[node] = ports if isinstance(ports, (Ports, Unknown)) else Unknown("not looked at")
    choice = choose(seen, {node: policies[node].port_range for node in snapshots})
    value = None if choice.port is None else str(choice.port)
    known = tuple(node for node in snapshots if node not in choice.unknown)
    return Variable(
        "MASTER_PORT",
        value,
        choice.reason,
        value is not None and not choice.unknown,
        ((value, known),) if value else (),
        grouped(choice.unknown),
        choice.notes,
    )


def variables(
    snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]
) -> tuple[Variable, ...]:
    """The variables, in the order of this module's list.

    snapshots: node -> what it showed, at least one
    policies:  node -> its policy
    """
    return (
        _sockets(snapshots),
        _variable("GLOO_SOCKET_IFNAME", _interface, snapshots),
        _variable("NCCL_IB_HCA", _hca, snapshots),
        _variable("PDSH_RCMD_TYPE", _pdsh, snapshots, harmless=True),
        _port(snapshots, policies),
    )


# --- ``--debug``: what makes a job debuggable, under the names of the installed versions.


@dataclass(frozen=True)
class Installed:
    """What is installed on a node for jobs.

    torch: its version; "": not known
    cuda:  it was built for NVIDIA's GPUs; None: not known
    why:   why the version is not known, one line; "": it is
    """

    torch: str = ""
    cuda: bool | None = None
    why: str = ""


# Without importing torch, which takes seconds: Python finds where it is, and its version is in a
# file of its own.
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
#: Seconds for it on a node: a Python on a file system that many nodes read at once.
ASK_S = 20


def question(python: str, nonce: str) -> str:
    """The POSIX sh text that asks a node's Python for its torch.

    python: its path, or a name that the node finds. Root runs none that others can change.
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


def read_installed(said: str, nonce: str) -> Installed:
    """What a node's answer says; other lines are passed over."""
    values: dict[str, str] = {}
    for row in said.splitlines():
        mark, _, rest = row.partition(" ")
        name, _, value = rest.partition(" ")
        if mark == nonce:
            values.setdefault(name, value.strip()[:200])
    torch = values.get("version", "none")
    if release(torch) is None:
        return Installed(why=values.get("why") or "it does not tell its version of torch")
    return Installed(torch, values.get("cuda", "none") != "none")


#: What holds the records and where they are written: the name until `RECORDER_RENAMED`, and since.
_BUFFERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_FILES = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: Where pipes are made: on the node itself, and in every distribution.
_LOCAL = "/dev/shm"


def new_word() -> str:
    """A random word for names of files that nobody can have made before the job."""
    return os.urandom(4).hex()


def _recorder(one: Installed, directory: str, word: str) -> Iterable[tuple[str, str, str]]:
    """(name, value, reason) of the flight recorder's variables."""
    torch = release(one.torch)
    if torch is not None and torch < RECORDER:
        return
    names = slice(0, 2) if torch is None else slice(0, 1)
    if torch is not None and torch >= RECORDER_RENAMED:
        names = slice(1, 2)
    both = "" if torch else " (both names: the version of torch is not known)"
    # Where it is on anyway, nothing is missing.
    if torch is None or torch < RECORDER_ON:
        for name in _BUFFERS[names]:
            reason = "the flight recorder keeps the last 2,000 collectives of each rank"
            yield name, "2000", reason + both
        reason = "when a collective times out, each rank writes its records"
        yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason
    for name in _FILES[names] if directory else ():
        value = f"{directory.rstrip('/')}/comm_lib_trace_rank_"
        yield name, value, f"where each rank writes its records{both}"
    reason = "nodeready stacks --dump has a rank write its records, and the job goes on"
    yield _PIPE, f"{_LOCAL}/nodeready-{word}-", reason


def _debugging(one: Installed, directory: str, word: str) -> dict[str, tuple[str, str]]:
    """Name -> value and reason of all variables of a node."""
    found = {name: (value, why) for name, value, why in _recorder(one, directory, word)}
    found["NCCL_DEBUG"] = ("WARN", "NCCL says what fails, and is quiet else")
    if one.cuda is not False:
        on = "the core of a GPU whose kernel hangs can be asked for"
        found["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] = ("1", on)
        pipe = f"{_LOCAL}/nodeready-{word}-cuda.%h.%p"
        found["CUDA_COREDUMP_PIPE"] = (pipe, "whoever writes to it gets that core")
        small = "that core is without the memory of the GPU, which may be 80 GB and more"
        found["CUDA_COREDUMP_GENERATION_FLAGS"] = ("skip_global_memory", small)
    handler = "a rank that dies by a signal prints the stacks of Python"
    found["PYTHONFAULTHANDLER"] = ("1", handler)
    found["PYTHONUNBUFFERED"] = ("1", "what a rank printed last is in its log, not in its memory")
    return found


def debug_variables(
    installed: Mapping[str, Installed], directory: str = "", word: str = ""
) -> tuple[Variable, ...]:
    """What makes a job on these nodes debuggable, each with its reason.

    installed: node -> what is installed there, at least one
    directory: where the ranks write their records; "": where PyTorch writes them by itself
    word:      of the names of pipes; "": a random one

    Where nobody knows the version of PyTorch, both names of a variable are exported: the one that
    a version does not know means nothing to it.
    """
    word = word or new_word()
    suggested = {node: _debugging(one, directory, word) for node, one in installed.items()}
    names = dict.fromkeys(name for one in suggested.values() for name in one)
    unknown = grouped({node: one.why for node, one in installed.items() if one.why})
    found = []
    for name in names:
        given = {node: one[name] for node, one in suggested.items() if name in one}
        value, reason = next(iter(given.values()))
        lacking = [node for node in installed if node not in given]
        notes = (f"{fold(lacking)}: not needed there, and harmless",) if lacking else ()
        of_torch = name.startswith("TORCH_")
        found.append(
            Variable(
                name,
                value,
                reason,
                True,
                ((value, tuple(given)),),
                (),
                (*notes, *(f"{fold(some)}: {why}" for why, some in unknown if of_torch)),
            )
        )
    return tuple(found)
