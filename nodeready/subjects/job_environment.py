"""The environment of a job's ranks, and the facts of their nodes that decide about it.

`nodeready.agent.witnesses.environment` reads them, `nodeready.subjects.environment_rules` judges.
"""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.core import wire


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
    # the addresses of MASTER_ADDR here; (): not known, or none
    resolved: tuple[wire.Name, ...] = ()
    error: wire.Line = ""  # why it has none
    # the process that listens on the port: `JOB`, another one in words; "": none is seen
    listener: wire.Line = ""
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
    # LD_PRELOAD or LD_LIBRARY_PATH if it brings this library; "": it does not
    nccl_by: wire.Name = ""
    # version of the NCCL that was installed with the rank's PyTorch; "": not known
    nccl_own: wire.Name = ""
