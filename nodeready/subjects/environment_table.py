"""A job's environment as data: its facts, and the rules about it with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nodeready import knowledge
from nodeready.core import wire

# --- The environment of a job's ranks, and the facts of their nodes that decide about it.
#
# `nodeready.agent.witnesses.environment` reads them, `environment_rules` judges them.


@dataclass(frozen=True)
class RankVariables:
    """The environment of one rank."""

    absent: wire.Line = ""  # why it could not be read; "": it could
    variables: tuple[tuple[wire.Name, wire.Name], ...] = ()  # (name, value), sorted by name
    cpus: wire.Count = 0  # the CPUs that it may use; 0: not known
    contained: bool = False  # its network is not that of the node's facts


@dataclass(frozen=True)
class NodeInterface:
    """A network interface, in the kernel's order."""

    name: wire.Name
    state: wire.Name = ""  # of the kernel (``up``, ``down``, ``unknown``); "": not known
    # as in ``10.0.0.1/24``; None: it shares a network with another interface
    addresses: tuple[wire.Name, ...] | None = ()


@dataclass(frozen=True)
class HcaPort:
    """A port of an RDMA device. state: ``active``, ``down``, ..."""

    device: wire.Name
    port: wire.Count
    state: wire.Name


@dataclass(frozen=True)
class Rendezvous:
    """MASTER_ADDR and MASTER_PORT of ranks, as this node sees them."""

    address: wire.Name
    port: wire.Name
    resolved: tuple[wire.Name, ...] = ()  # addresses of MASTER_ADDR here; (): not known, or none
    error: wire.Line = ""  # why it has none
    listener: wire.Line = ""  # who listens on the port: `JOB`, another one in words; "": none
    is_users: bool = False  # the listener belongs to the user of the ranks


#: The listener is a process of the job.
JOB = "the job"


@dataclass(frozen=True)
class NcclFile:
    """The variables that a configuration file of NCCL has."""

    path: wire.Path
    variables: tuple[tuple[wire.Name, wire.Name], ...]


@dataclass(frozen=True)
class EnvironmentFacts:
    """The facts of a node that decide about an environment."""

    absent: wire.Line = ""  # why there are none; "": there are
    interfaces: tuple[NodeInterface, ...] = ()  # () when not known: every node has lo
    hca_ports: tuple[HcaPort, ...] = ()  # of its RDMA devices
    rendezvous: tuple[Rendezvous, ...] = ()  # of its ranks
    own_addresses: tuple[wire.Name, ...] = ()  # of the node's own name, which Gloo tells its peers
    gpus: wire.Count | None = None  # number of NVIDIA's GPUs; None: not known
    cpus: wire.Count = 0  # number of CPUs
    machine: wire.Name = ""  # such as ``x86_64``
    # the user's file (NCCL_CONF_FILE, else ~/.nccl.conf), then /etc/nccl.conf; the environment
    # outranks the first, the first the second
    nccl_conf: tuple[NcclFile, ...] = ()
    nccl: wire.Name | None = ""  # version of NCCL in a rank; "": not known; None: not loaded
    torch: wire.Name = ""  # version of PyTorch in a rank, ``2.7.0+cu126``; "": not known
    driver: wire.Name = ""  # version of NVIDIA's driver that a rank has; "": not known
    nccl_path: wire.Path = ""  # of the library of NCCL in a rank; "": not known
    nccl_by: wire.Name = ""  # LD_PRELOAD or LD_LIBRARY_PATH if it brings it; "": it does not
    nccl_own: wire.Name = ""  # of the NCCL that came with the rank's PyTorch; "": not known


class JobRule(NamedTuple):
    """A rule about an environment: a row of knowledge/environment_rules.toml."""

    name: str
    variables: str  # as in the page; problem: what is wrong; advice: what to do
    problem: str
    weight: int  # 2: the job cannot work, or is known to hang; 1: a sign; 0: slow, or good to know
    advice: str
    source: str


#: The rules whose problems are not those of `BAD_VALUES`, in the order of the page.
RULES = tuple(JobRule(name, **row) for name, row in knowledge.rows("environment_rules").items())


class VersionRange(NamedTuple):
    """first: the first version with the fault; fixed: the first one without it; (): any"""

    first: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()

    def includes(self, version: tuple[int, ...]) -> bool:
        """Whether a version has the fault; one that is not known, (), has none."""
        return self == ANY or (bool(version) and self.first <= version < self.fixed)


ANY = VersionRange()


class BadValue(NamedTuple):
    """A wrong value, or versions that do not fit: knowledge/environment_values.toml."""

    key: str
    problem: str
    weight: int
    advice: str
    source: str
    variable: str = ""  # "": of any environment
    values: str = ""  # a pattern of the whole value
    nccl: VersionRange = ANY
    machine: str = ""  # of the node; "": any
    only_rdma: bool = False  # it matters only where the node has an active RDMA port
    torch: VersionRange = ANY  # versions of PyTorch, of the CUDA of its build, of the driver
    cuda: VersionRange = ANY  # likewise
    driver: VersionRange = ANY  # likewise
    unless: str = ""  # ``NAME=VALUE`` that avoids the fault; "": nothing does


def _bad_value(key: str, row: Mapping[str, Any]) -> BadValue:
    ranges = {
        name: VersionRange(*map(tuple, row[name]))
        for name in ("nccl", "torch", "cuda", "driver")
        if name in row
    }
    return BadValue(key, **{**row, **ranges})


#: The values, of one variable the gravest first.
BAD_VALUES = tuple(
    _bad_value(key, row) for key, row in knowledge.rows("environment_values").items()
)
