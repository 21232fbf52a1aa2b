"""Judges a job's environment against the facts of its nodes: what keeps its ranks apart.

Pure: the ranks' variables and the nodes' facts (`nodeready.subjects.environment_table`) go in,
before the job starts, while it hangs, or when it is gone:

>>> ranks = [RankEnvironment(node, {"NCCL_SOCKET_IFNAME": "lo"}) for node in ("gpu1", "gpu2")]
>>> [finding.text for finding in judge(ranks)]
['NCCL_SOCKET_IFNAME=lo leads to the node itself']

A fact that is not known makes no finding. A program may change its environment after its start,
which /proc does not show.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, Union

from nodeready.core.base import grouped
from nodeready.core.text import counted, sanitise
from nodeready.subjects import environment_table
from nodeready.subjects.environment_table import JOB, EnvironmentFacts, JobRule, NodeInterface

_T = TypeVar("_T")
_RULE = {rule.name: rule for rule in environment_table.RULES}
_UNKNOWN_FACTS = EnvironmentFacts("not known")
#: Variables that must be equal on all ranks: a difference alone keeps a job from working. Each
#: rank chooses by them how it communicates.
_MUST_AGREE = frozenset(
    (
        "MASTER_PORT", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE",
        "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "NCCL_BUFFSIZE",
    )
)  # fmt: skip
#: Variables of NCCL that differ rightly, or are judged by another rule.
_MAY_DIFFER = re.compile(
    r"NCCL_(SOCKET_IFNAME|IB_HCA|IB_GID_INDEX|OOB_NET_IFNAME|HOSTID|CONF_FILE|DEBUG\w*|RAS_\w+"
    r"|TOPO_\w+|GRAPH_\w+|\w*FILE|\w*PLUGIN\w*|INSPECTOR_\w+|TUNER_\w+|NET_GDR_LEVEL)"
)


@dataclass(frozen=True)
class RankEnvironment:
    """The environment of one rank, or of all ranks of a node (``rank`` None)."""

    node: str
    variables: Mapping[str, str]  # by `agent.witnesses.environment`; ranks may share the object
    rank: int | None = None
    local_rank: int | None = None
    cpus: int = 0  # the CPUs that it may use; 0: not known
    contained: bool = False  # it has another network than the node's facts show


class EnvironmentFinding(NamedTuple):
    """Something wrong with the environment of some ranks. Text is one line."""

    rule: str  # its name in `RULES`; ``value`` of an `BadValue`
    variable: str  # "": a version, which is the value: of NCCL if it is a bare number
    value: str
    problem: str  # what is wrong, after the variable and its value
    advice: str
    source: str
    weight: int  # as of an `JobRule`
    ranks: tuple[int, ...] = ()  # () where no rank is known
    nodes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """``NCCL_SOCKET_IFNAME=lo leads to the node itself``."""
        if not self.variable:
            return f"{'NCCL ' * self.value[:1].isdigit()}{self.value} {self.problem}"
        return f"{self.variable}{'=' * bool(self.value)}{self.value} {self.problem}"


#: Maximum characters of a value, and of a name of a node's, in a finding.
_MAX_VALUE, _MAX_NAME = 60, 40


def judge(
    ranks: Iterable[RankEnvironment],
    facts: Mapping[str, EnvironmentFacts] | None = None,
    *,
    nccl: str | None = "",
) -> tuple[EnvironmentFinding, ...]:
    """What is wrong with the environment of a job, the gravest first.

    facts: node -> its facts; a node may be missing
    nccl:  the version of NCCL; "": not known; None: no rank has loaded it
    """
    job = _Job(tuple(ranks), facts or {}, nccl)
    for judge_part in _JUDGES:
        judge_part(job)
    return job.folded()


class _RankRow(NamedTuple):
    node: str
    variables: Mapping[str, str]
    ranks: tuple[RankEnvironment, ...]
    facts: EnvironmentFacts  # absent where they are not known for these ranks
    files: Mapping[str, str]  # variable -> NCCL's file that sets it, in place of the environment


@dataclass
class _Job:
    ranks: Sequence[RankEnvironment]
    facts: Mapping[str, EnvironmentFacts]
    nccl: str | None
    findings: dict[EnvironmentFinding, tuple[list[int], list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        members = grouped(
            ((rank.node, id(rank.variables), rank.contained), rank) for rank in self.ranks
        )
        self.rows = [
            self._row(node, tuple(group), is_contained=contained)
            for (node, _, contained), group in members.items()
        ]
        self.nodes = grouped((row.node, row) for row in self.rows)
        self.spans_nodes = len(self.nodes) > 1 or any(map(_has_other_nodes, self.rows))
        self.head = next((rank.node for rank in self.ranks if rank.rank == 0), "")

    def facts_of(self, node: str) -> EnvironmentFacts:
        """The facts of a node; absent where they are not known."""
        facts = self.facts.get(node, _UNKNOWN_FACTS)
        return _UNKNOWN_FACTS if facts.absent else facts

    def _row(
        self, node: str, ranks: tuple[RankEnvironment, ...], *, is_contained: bool
    ) -> _RankRow:
        """The ranks; the variables of NCCL's files on the node count where no rank sets them."""
        facts, variables, files = self.facts_of(node), dict(ranks[0].variables), {}
        for file in facts.nccl_conf:
            for name, value in file.variables:
                if variables.setdefault(name, value) is value:
                    files[name] = file.path
        return _RankRow(node, variables, ranks, _UNKNOWN_FACTS if is_contained else facts, files)

    def add(
        self,
        rule: str | environment_table.BadValue,
        row: _RankRow,
        variable: str,
        value: str | None = None,
        detail: str = "",
        *,
        weight: int | None = None,
        ranks: Iterable[RankEnvironment] = (),
    ) -> None:
        """Add a finding. ranks: of the row; (): all of them; detail: after the problem"""
        about = _RULE[rule] if isinstance(rule, str) else rule
        text = row.variables.get(variable, "") if value is None else value
        details = f": {sanitise(detail, 3 * _MAX_VALUE)}" if detail else ""
        if variable in row.files:
            details += f" (in {sanitise(row.files[variable], _MAX_VALUE)})"
        finding = EnvironmentFinding(
            about.name if isinstance(about, JobRule) else "value",
            sanitise(variable, _MAX_VALUE),
            sanitise(text, _MAX_VALUE),
            about.problem + details,
            about.advice,
            about.source,
            about.weight if weight is None else weight,
        )
        numbers, nodes = self.findings.setdefault(finding, ([], []))
        numbers += [rank.rank for rank in ranks or row.ranks if rank.rank is not None]
        nodes.append(row.node)

    def folded(self) -> tuple[EnvironmentFinding, ...]:
        """Equal findings once, with the ranks and nodes of all."""
        findings = [
            finding._replace(ranks=tuple(sorted({*ranks})), nodes=tuple(dict.fromkeys(nodes)))
            for finding, (ranks, nodes) in self.findings.items()
        ]
        return tuple(sorted(findings, key=lambda finding: -finding.weight))


def _has_other_nodes(row: _RankRow) -> bool:
    """Whether the job has ranks on nodes that are not known, by torchrun's variables."""
    sizes = [row.variables.get(name, "")[:9] for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    return all(map(str.isdecimal, sizes)) and int(sizes[0]) < int(sizes[1])


# --- Interfaces.


def _matches(name: str, port: int, text: str) -> bool:
    """Whether NCCL's list of prefixes means an interface or a port of a device.

    ``eth,ib``: prefixes; ``=eth0``: names; ``^``: all others; ``mlx5_0:1``: a port
    (parseStringList and matchIfList of NCCL's src/misc/utils.cc).
    """
    excludes = text.startswith("^")
    exact = text[excludes:].startswith("=")
    is_listed = False
    for word in text.lstrip("^=").split(","):
        prefix, _, number = word.partition(":")
        fits = name == prefix if exact else name.startswith(prefix)
        is_listed |= (
            bool(prefix) and fits and (not number.isdecimal() or port in (-1, int(number)))
        )
    return is_listed != excludes


def _named_interfaces(text: str, interfaces: Sequence[NodeInterface]) -> list[NodeInterface]:
    names = [word.strip() for word in text.split(",")]
    return [interface for interface in interfaces if interface.name in names]


def _mpi_interfaces(text: str, interfaces: Sequence[NodeInterface]) -> list[NodeInterface]:
    words = [word.strip() for word in text.split(",")]
    networks = [network for word in words if (network := _network(word)) is not None]
    return [
        interface
        for interface in interfaces
        if interface.name in words
        or any(local.overlaps(network) for local in _networks(interface) for network in networks
               if local.version == network.version)
    ]  # fmt: skip


_Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
_CHOICES: dict[str, Callable[[str, Sequence[NodeInterface]], list[NodeInterface]]] = {
    "NCCL_SOCKET_IFNAME": lambda text, interfaces: [
        interface for interface in interfaces if _matches(interface.name, -1, text)
    ],
    "GLOO_SOCKET_IFNAME": _named_interfaces,
    "TP_SOCKET_IFNAME": _named_interfaces, "OMPI_MCA_btl_tcp_if_include": _mpi_interfaces,
    "OMPI_MCA_oob_tcp_if_include": _mpi_interfaces,
}  # fmt: skip
_LO = NodeInterface("lo", "", ("127.0.0.1/8",))


def _network(text: str) -> _Network | None:
    try:
        return ipaddress.ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        return None


def _networks(interface: NodeInterface) -> frozenset[_Network]:
    parsed = (_network(text) for text in interface.addresses or ())
    return frozenset(network for network in parsed if network is not None)


_DOWN = ("down", "lowerlayerdown")


def _judge_interfaces(job: _Job) -> None:
    if not job.spans_nodes:
        # Ranks of one node may use loopback.
        return
    for variable, choose in _CHOICES.items():
        chosen: list[tuple[_RankRow, NodeInterface]] = []
        for row in job.rows:
            value = row.variables.get(variable, "")
            # NCCL takes a single character for none.
            if not value or (variable == "NCCL_SOCKET_IFNAME" and len(value) < 2):
                continue
            interfaces = row.facts.interfaces
            named = choose(value, interfaces or (_LO,))
            # NCCL and Open MPI pass over interfaces that do not work; Gloo takes each.
            works = [i for i in named if i.state not in _DOWN and i.addresses != ()]
            first = next(iter(named if choose is _named_interfaces else works or named), None)
            if first is None:
                if interfaces:
                    names = ", ".join(interface.name for interface in interfaces[:8])
                    job.add("no-interface", row, variable, detail=f"it has {names}")
            elif first.name == "lo":
                job.add("loopback", row, variable)
            elif first.state in _DOWN:
                job.add("down", row, variable, detail=first.name)
            elif first.addresses == ():
                job.add("no-address", row, variable, detail=first.name)
            elif first.addresses:
                chosen.append((row, first))
        _judge_networks(job, variable, chosen)


def _judge_networks(
    job: _Job, variable: str, chosen: Sequence[tuple[_RankRow, NodeInterface]]
) -> None:
    """Find nodes whose interface is in another network than most nodes', and that have another
    interface in that network. Without one, a router may connect the networks.
    """
    nodes_of = Counter(network for _, interface in chosen for network in _networks(interface))
    of_head = [_networks(interface) for row, interface in chosen if row.node == job.head]
    usual = _usual(nodes_of, {network for networks in of_head for network in networks})
    for row, interface in chosen if usual else ():
        local = _networks(interface)
        better = [
            other.name
            for other in row.facts.interfaces
            if other.name != interface.name and usual in _networks(other)
        ]
        if usual not in local and better:
            detail = f"{interface.name} is in {min(map(str, local))}, {better[0]} in {usual}"
            job.add("network", row, variable, detail=detail)


def _usual(counts: Mapping[_T, int], preferred: Collection[_T] = ()) -> _T | None:
    """The most common of these, of several the preferred one; None: there are none."""
    return max(counts, key=lambda value: (counts[value], value in preferred), default=None)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _judge_own_names(job: _Job) -> None:
    if not job.spans_nodes:
        return
    rows = [
        (row, address)
        for row in job.rows
        for address in row.facts.own_addresses[:1]
        if _is_loopback(address) and "GLOO_SOCKET_IFNAME" not in row.variables
    ]
    # Of two nodes, one connects: only a second one with such a name cannot be reached by the
    # first. Where NCCL is loaded, the job may not use Gloo.
    several = len({row.node for row, _ in rows}) > 1
    weight = 0 if job.nccl is not None else 2 if several else 1
    for row, address in rows:
        job.add("own-name", row, "GLOO_SOCKET_IFNAME", "", address, weight=weight)


# --- RDMA.


def _judge_hcas(job: _Job) -> None:
    variable = "NCCL_IB_HCA"
    without: list[_RankRow] = []
    for row in job.rows:
        value = row.variables.get(variable, "")
        if row.facts.absent or not value:
            continue
        named = [port for port in row.facts.hca_ports if _matches(port.device, port.port, value)]
        down = [f"{port.device}:{port.port} is {port.state}" for port in named
                if port.state != "active"]  # fmt: skip
        if len(down) == len(named):
            without.append(row)
        elif down and not value.startswith("^"):
            job.add("hca-down", row, variable, detail=", ".join(down[:4]))
    # Where no node has one, all use sockets: slow. A job of both kinds does not work.
    weight = 2 if len(without) < len(job.rows) and len(job.nodes) > 1 else 1
    for row in without:
        ports = [f"{port.device}:{port.port} {port.state}" for port in row.facts.hca_ports[:8]]
        job.add("no-hca", row, variable, detail=", ".join(ports) or "it has none", weight=weight)


def _judge_ucx(job: _Job) -> None:
    for row in job.rows:
        value = row.variables.get("UCX_NET_DEVICES", "")
        if not value or value.startswith("^") or "all" in value.split(","):
            continue
        names = {interface.name for interface in row.facts.interfaces}
        names |= {f"{port.device}:{port.port}" for port in row.facts.hca_ports}
        if row.facts.interfaces and not names & {*value.split(",")}:
            job.add("ucx-device", row, "UCX_NET_DEVICES")


# --- The rendezvous.


def _rendezvous(row: _RankRow) -> environment_table.Rendezvous | None:
    key = row.variables.get("MASTER_ADDR", ""), row.variables.get("MASTER_PORT", "")
    listed = row.facts.rendezvous
    return next((entry for entry in listed if (entry.address, entry.port) == key), None)


def _own_addresses(facts: EnvironmentFacts) -> set[str]:
    """The addresses of a node that others can reach; empty: not all are known."""
    if any(interface.addresses is None for interface in facts.interfaces):
        return set()
    texts = (text for interface in facts.interfaces for text in interface.addresses or ())
    return {text.partition("/")[0] for text in texts if not text.startswith("127.")}


def _master_nodes(job: _Job) -> set[str]:
    entries = filter(None, map(_rendezvous, job.rows))
    addresses = {text for entry in entries for text in entry.resolved if not _is_loopback(text)}
    return {node for node in job.nodes if _own_addresses(job.facts_of(node)) & addresses}


def _judge_master(job: _Job) -> None:
    variable = "MASTER_ADDR"
    head, masters = job.head, _master_nodes(job)
    resolved: list[tuple[_RankRow, frozenset[str]]] = []
    for row in job.rows:
        value, rendezvous = row.variables.get(variable, ""), _rendezvous(row)
        if not value or not job.spans_nodes:
            continue
        addresses = rendezvous.resolved if rendezvous else (value,) if _is_loopback(value) else ()
        if rendezvous and rendezvous.error:
            job.add("master-name", row, variable, detail=rendezvous.error)
        elif any(map(_is_loopback, addresses[:1])):
            if row.node != head and not (not head and row.node in masters):
                job.add("master-loopback", row, variable)
        elif addresses:
            resolved.append((row, frozenset(addresses)))
    counts = Counter(address_set for _, address_set in resolved)
    of_head = {address_set for row, address_set in resolved if row.node == head}
    usual = _usual(counts, of_head) or frozenset()
    for row, address_set in resolved:
        if not address_set & usual:
            detail = f"{min(address_set)}, elsewhere {min(usual)}"
            job.add("master-differs", row, variable, detail=detail)
    knows_all = all(_own_addresses(job.facts_of(node)) for node in job.nodes)
    if knows_all and not masters and not any(map(_has_other_nodes, job.rows)):
        for row, address_set in resolved:
            detail = "" if row.variables[variable] in address_set else min(address_set)
            job.add("master-nowhere", row, variable, detail=detail)
    served = (_rendezvous(row) for row in job.rows if row.node in masters)
    listens = any(entry.listener == JOB for entry in served if entry)
    is_elsewhere = head and masters and head not in masters and not listens
    if is_elsewhere and _own_addresses(job.facts_of(head)):
        for row, address_set in resolved:
            if address_set & usual:
                node = next(name for name in job.nodes if name in masters)
                job.add("master-node", row, variable, detail=f"{node}, not {head}")


def _judge_port(job: _Job) -> None:
    variable = "MASTER_PORT"
    places = {job.head} if job.head else _master_nodes(job)
    for row in job.rows:
        value, rendezvous = row.variables.get(variable, ""), _rendezvous(row)
        if variable in row.variables and not (value.isdecimal() and 0 < int(value[:6]) < 65536):
            job.add("no-port", row, variable)
        elif rendezvous and rendezvous.listener not in ("", JOB) and (
            row.node in places or len(job.nodes) == 1
        ):  # fmt: skip
            # With rank 0 alive, the user may run a store of the job apart from its ranks.
            weight = 1 if rendezvous.is_users and job.head else 2
            job.add("port-taken", row, variable, detail=rendezvous.listener, weight=weight)


# --- GPUs and CPUs.

_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _judge_gpus(job: _Job) -> None:
    for node_rows in job.nodes.values():
        for variable in _GPU_VARIABLES:
            rows = [row for row in node_rows if variable in row.variables]
            if rows and rows[0].facts.gpus != 0:
                _judge_node_gpus(job, variable, rows)


def _judge_node_gpus(job: _Job, variable: str, rows: Sequence[_RankRow]) -> None:
    users: dict[str, list[tuple[_RankRow, RankEnvironment]]] = {}
    for row in rows:
        words = [word.strip() for word in row.variables[variable].split(",")]
        count = row.facts.gpus if variable == "CUDA_VISIBLE_DEVICES" else None
        if words[0] in ("", "-1", "NoDevFiles"):
            job.add("hidden-gpus", row, variable, weight=1 if count else 0)
            continue
        unknown = [word for word in words if word.isdecimal() and count and int(word) >= count]
        if unknown and count:
            job.add("no-gpu", row, variable, detail=f"{unknown[0]} of {counted(count, 'GPU')}")
            continue
        for rank in row.ranks:
            if rank.rank is None:
                continue
            # With one GPU each, LOCAL_RANK is no index.
            if (at := 0 if len(words) == 1 else rank.local_rank) is None:
                continue
            if at >= len(words):
                detail = f"LOCAL_RANK {at} of {counted(len(words), 'GPU')}"
                job.add("few-gpus", row, variable, detail=detail, ranks=[rank])
            else:
                users.setdefault(words[at], []).append((row, rank))
    for word, pairs in users.items():
        for row, rank in pairs if len(pairs) > 1 else ():
            job.add("same-gpu", row, variable, detail=word, ranks=[rank])


def _judge_threads(job: _Job) -> None:
    variable = "OMP_NUM_THREADS"
    for rows in job.nodes.values():
        facts, total = rows[0].facts, 0
        numbered = [(row, rank) for row in rows for rank in row.ranks if rank.rank is not None]
        for row, rank in numbered:
            value = row.variables.get(variable, "").partition(",")[0]
            total += int(value) if value.isdecimal() and len(value) < 6 else rank.cpus
        if 0 < facts.cpus < total and len(numbered) > 1:
            for row in rows:
                job.add("threads", row, variable, detail=f"{total} threads, {facts.cpus} CPUs")


# --- Values that are wrong by themselves, and values that differ.


def _version(text: str | None) -> tuple[int, ...]:
    """The numbers of a version; (): not known."""
    match = re.match(r"(\d{1,3})\.(\d{1,4})(?:\.(\d{1,4}))?", text or "")
    return tuple(int(number or 0) for number in match.groups()) if match else ()


def _cuda(torch: str) -> tuple[int, ...]:
    """The CUDA for which a PyTorch was built; (): not known.

    >>> _cuda("2.7.0+cu126")
    (12, 6)
    """
    match = re.search(r"\+cu(\d\d)(\d)$", torch)
    return (int(match[1]), int(match[2])) if match else ()


def _judge_values(job: _Job) -> None:
    nccl = _version(job.nccl)
    for row in job.rows:
        facts = row.facts
        active = any(port.state == "active" for port in facts.hca_ports)
        versions = {
            "nccl": nccl, "torch": _version(facts.torch), "cuda": _cuda(facts.torch),
            "driver": _version(facts.driver),
        }  # fmt: skip
        judged = set[str]()
        for bad in environment_table.BAD_VALUES:
            value = row.variables.get(bad.variable) if bad.variable else ""
            name, _, avoiding = bad.unless.partition("=")
            if (
                value is None
                or bad.variable in judged
                or not re.fullmatch(bad.values, value)
                or not all(getattr(bad, part).includes(versions[part]) for part in versions)
                or (bad.only_rdma and not active)
                or bad.machine not in ("", facts.machine)
                or (name and row.variables.get(name) == avoiding)
            ):
                continue
            # The first that applies is the gravest.
            judged |= {bad.variable} - {""}
            shown = value or ".".join(map(str, nccl))
            if bad.driver != environment_table.ANY:
                shown = f"driver {facts.driver}"
            elif bad.torch != environment_table.ANY:
                shown = f"PyTorch {facts.torch}"
            job.add(bad, row, bad.variable, shown)


def _judge_versions(job: _Job) -> None:
    rows = [(row, row.facts.nccl) for row in job.rows if row.facts.nccl]
    usual = _usual(Counter(version for _, version in rows))
    for row, version in rows:
        if version != usual:
            job.add("versions", row, "", version, usual or "")


def _judge_other_nccl(job: _Job) -> None:
    for row in job.rows:
        facts = row.facts
        loaded, expected = _version(facts.nccl), _version(facts.nccl_own)
        if facts.nccl_by and loaded and expected and loaded != expected:
            detail = f"{facts.nccl}, not {facts.nccl_own}"
            # PyTorch may call what an older one lacks; a newer one is often wanted.
            weight = 1 if loaded < expected else 0
            job.add("other-nccl", row, facts.nccl_by, facts.nccl_path, detail, weight=weight)


def _judge_differences(job: _Job) -> None:
    names = {name for row in job.rows for name in row.variables}
    for name in sorted(names):
        must = name in _MUST_AGREE
        if not must and (not name.startswith("NCCL_") or _MAY_DIFFER.fullmatch(name)):
            continue
        counts: Counter[str | None] = Counter()
        for row in job.rows:
            counts[row.variables.get(name)] += len(row.ranks)
        if len(counts) < 2:
            continue
        usual, count = counts.most_common(1)[0]
        shown = "not set" if usual is None else sanitise(usual, _MAX_NAME)
        for row in job.rows:
            value = row.variables.get(name)
            if value != usual or 2 * count <= counts.total():
                detail = "" if value == usual else f"{shown} on most ranks"
                job.add("differs", row, name, value or "", detail, weight=2 if must else 1)


_JUDGES = (
    _judge_interfaces, _judge_own_names, _judge_hcas, _judge_ucx, _judge_master, _judge_port,
    _judge_gpus, _judge_threads, _judge_values, _judge_other_nccl, _judge_versions,
    _judge_differences,
)  # fmt: skip
