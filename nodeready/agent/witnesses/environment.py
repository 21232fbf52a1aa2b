"""The environment of ranks, and the facts of their node that decide whether it can work.

Only variables that decide how ranks find each other and communicate are read, without secrets.
Interfaces and addresses come from /sys and /proc, without the kernel's network lock. The control
machine judges them (`nodeready.subjects.environment_rules`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from nodeready.agent.proc import all_listeners, holder_text, list_directory, socket_inodes
from nodeready.agent.resolver import resolve
from nodeready.agent.secrets import redact
from nodeready.agent.stacks import processes
from nodeready.agent.users_file import opened_path
from nodeready.core import wire
from nodeready.core.base import Output
from nodeready.subjects.environment_table import (
    JOB,
    EnvironmentFacts,
    HcaPort,
    NcclFile,
    NodeInterface,
    RankVariables,
    Rendezvous,
)
from nodeready.subjects.nics import nic

#: The variables that are read, beside all NCCL_*.
NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL",
    "OMP_NUM_THREADS", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include",
    "UCX_NET_DEVICES", "FI_PROVIDER",
)  # fmt: skip
#: Maximum variables of a process, and bytes of a value.
_MAX_VARIABLES, _MAX_VALUE = 64, 200
_VARIABLE = re.compile(
    rb"\0(NCCL_[A-Z0-9_]{1,48}|%b)=([^\0]{0,%d})" % ("|".join(NAMES).encode(), _MAX_VALUE)
)
_TABLE_BYTES, _CONF_BYTES = 1 << 20, 1 << 16  # bytes of a table of the kernel, and of NCCL's file
#: Maximum interfaces, RDMA ports, addresses of a name, and rendezvous addresses of a node.
_MAX_PORTS, _MAX_ADDRESSES, _MAX_MASTERS = 128, 16, 4
#: Maximum processes of a job that may hold its port, and descriptors of each.
_MAX_HOLDERS, _MAX_DESCRIPTORS = 256, 4096

Variables = tuple[tuple[str, str], ...]


def select_variables(data: bytes) -> Variables:
    """The variables that decide, in an environment of ``NAME=VALUE`` that end in NUL."""
    values: dict[str, str] = {}
    for match in islice(_VARIABLE.finditer(b"\0" + data), 4 * _MAX_VARIABLES):
        name = match[1].decode("ascii")
        # Of a repeated variable the first counts, like getenv.
        values.setdefault(name, redact(name, match[2].decode("utf-8", "replace")))
    return tuple(sorted(values.items())[:_MAX_VARIABLES])


def variables_of(environment: Mapping[str, str]) -> Variables:
    """The variables that decide, in an environment as a mapping."""
    rows = (f"{name}={value}" for name, value in environment.items())
    return select_variables("\0".join(rows).encode("utf-8", "replace"))


def network_pid(pids: Sequence[int]) -> int:
    """The process whose network the node's facts show: one outside of containers, if there is."""
    own_namespace = _namespace("self", "net")
    return next((pid for pid in pids if _namespace(pid, "net") == own_namespace), pids[0])


def observe_rank(pid: int, network: int) -> RankVariables:
    """The environment of a process; for a fork. network: process whose network the facts show"""
    data = processes.environment_bytes(pid)
    if data is None:
        return RankVariables("its environment is not readable")
    cpus = 0
    with contextlib.suppress(OSError):
        cpus = len(os.sched_getaffinity(pid))
    contained = _namespace(pid, "net") != _namespace(network, "net")
    return RankVariables("", select_variables(data), cpus, contained)


def _namespace(pid: int | str, kind: str) -> int:
    """The number of a process's namespace; 0: not readable."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    return 0


def observe_node(
    pid: int, masters: Mapping[tuple[str, str], Sequence[int]], deadline: float,
    variables: Mapping[str, str] | None = None,
) -> EnvironmentFacts:  # fmt: skip
    """The facts of this node. pid: of `network_pid`. variables: of the ranks, where they do not
    run yet; None: those of the process. masters: MASTER_ADDR and MASTER_PORT -> the ranks of this
    node that have them. deadline: a moment of time.monotonic()
    """
    rows = [*masters][:_MAX_MASTERS]

    def probe(number: int) -> object:
        if number < len(rows):
            return _listener(pid, rows[number][1], masters[rows[number]])
        return wire.plain(_local_facts(pid, variables))

    answers = processes.probe_each(probe, [len(rows), *range(len(rows))], deadline)
    local = answers.get(len(rows), processes.HANGS)
    if local is processes.HANGS:
        return EnvironmentFacts("reading its interfaces hangs")
    # Another file system may have another resolver.
    names = {os.uname().nodename, *(address for address, _ in rows)}
    if _namespace(pid, "mnt") != _namespace("self", "mnt"):
        names = set()
    with ThreadPoolExecutor(_MAX_MASTERS + 1) as pool:
        resolved_names = dict(zip(names, pool.map(resolve, names)))
    rendezvous = []
    for number, (address, port) in enumerate(rows):
        resolved, error = resolved_names.get(address, ((), ""))
        answer = answers.get(number, processes.HANGS)
        listener, is_users = ("", False) if answer is processes.HANGS else answer
        addresses = resolved[:_MAX_ADDRESSES]
        rendezvous.append(Rendezvous(address, port, addresses, error, listener, is_users))
    own_addresses = resolved_names.get(os.uname().nodename, ((), ""))[0]
    facts, own_addresses = wire.decode(EnvironmentFacts, local), own_addresses[:_MAX_ADDRESSES]
    return replace(facts, rendezvous=tuple(rendezvous), own_addresses=own_addresses)


def _local_facts(pid: int, variables: Mapping[str, str] | None) -> EnvironmentFacts:
    """The facts that need no other machine."""
    gpus = "/proc/driver/nvidia/gpus"
    if variables is None:
        variables = dict(select_variables(processes.environment_bytes(pid) or b""))
    return EnvironmentFacts(
        interfaces=tuple(islice(_interfaces(pid), _MAX_PORTS)),
        hca_ports=tuple(islice(_hca_ports(), _MAX_PORTS)),
        gpus=len(list_directory(gpus)) if os.path.isdir(gpus) else None, cpus=os.cpu_count() or 0,
        machine=os.uname().machine,
        nccl_conf=tuple(_nccl_files(pid, variables.get("NCCL_CONF_FILE", ""))),
    )  # fmt: skip


def _nccl_files(pid: int, chosen: str) -> Iterator[NcclFile]:
    """The files with variables that NCCL reads in a process (initEnv of its src/misc/param.cc).
    They are opened with the rights of the process's user, below its own root.
    chosen: NCCL_CONF_FILE, which replaces the file in the user's home directory
    """
    uid = os.stat(f"/proc/{pid}").st_uid
    home = ""
    if not chosen:
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(uid).pw_dir
    for path in (chosen or f"{home}/.nccl.conf", "/etc/nccl.conf"):
        data = b""
        with contextlib.suppress(OSError), opened_path(pid, uid, path) as (number, _):
            data = os.read(number, _CONF_BYTES)
        rows = (row.strip() for row in data.split(b"\n") if row.startswith(b"NCCL_"))
        if variables := select_variables(b"\0".join(rows)):
            yield NcclFile(path[:_MAX_VALUE], variables)


def _interfaces(pid: int) -> Iterator[NodeInterface]:
    """The interfaces in the order of their numbers, which is getifaddrs(3)'s."""
    rows = processes.contents(f"/proc/{pid}/net/dev").splitlines()[2:]
    names = [row.partition(":")[0].strip() for row in rows]
    shows_states = _namespace(pid, "net") == _namespace("self", "net")
    lines = []
    for file in ("if_inet6", "route", "ipv6_route", "fib_trie"):
        text = processes.contents(f"/proc/{pid}/net/{file}", _TABLE_BYTES)
        lines += [f"/proc/net/{file}:{line}" for line in text.splitlines()]
    _, own_addresses = nic.parse_section(Output("\n".join(lines), 0))
    addresses = nic.addresses(own_addresses)
    for name in names:
        state = ""
        if shows_states:
            state = processes.contents(f"/sys/class/net/{name}/operstate").strip()[:20]
        listed = ["127.0.0.1/8"] if name == "lo" else addresses.get(name, [])
        shown = None if listed is None else tuple(listed[:_MAX_ADDRESSES])
        yield NodeInterface(name, state, shown)


def _hca_ports() -> Iterator[HcaPort]:
    root = "/sys/class/infiniband"
    for device in list_directory(root, _MAX_PORTS):
        for port in list_directory(f"{root}/{device}/ports", _MAX_PORTS):
            if port.isdecimal():
                # ``4: ACTIVE``
                state = processes.contents(f"{root}/{device}/ports/{port}/state", 64)
                yield HcaPort(device, int(port), state.partition(":")[2].strip().lower()[:20])


def _listener(pid: int, port: str, job_pids: Sequence[int]) -> tuple[str, bool]:
    """The process that listens on a port, and whether it is the user's: as of a `Rendezvous`."""
    sockets = [row for row in all_listeners(pid) if str(row.port) == port]
    if not sockets:
        return "", False
    inodes = {str(row.inode) for row in sockets}
    if any(inodes & socket_inodes(holder, _MAX_DESCRIPTORS) for holder in _family(job_pids)):
        return JOB, True
    # The table shows the owner. Only root sees the descriptors of another user's process.
    job_uid = os.stat(f"/proc/{pid}").st_uid
    is_users = sockets[0].uid == job_uid
    if is_users and os.geteuid() not in (0, job_uid):
        return "", False
    return holder_text(sockets[0]), is_users


def _family(pids: Sequence[int]) -> list[int]:
    """Processes with their ancestors, such as torchrun, which may serve the store."""
    family = dict.fromkeys(pids)
    for pid in pids:
        ancestor = pid
        while len(family) < _MAX_HOLDERS:
            parsed = processes.stat(processes.contents(f"/proc/{ancestor}/stat"))
            ancestor = parsed.parent if parsed else 0
            if ancestor <= 1 or ancestor in family:
                break
            family[ancestor] = None
    return [*family][:_MAX_HOLDERS]
