"""The environment of a job's ranks, and the facts of their nodes that decide about it.

`nodeready.node.witnesses.environment` reads them, `nodeready.subjects.environment_rules` judges.
"""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.subjects import wire


@dataclass(frozen=True)
class RankVariables:
    """The environment of one rank.

    absent:    why it could not be read; "": it could
    variables: (name, value), sorted by name
    cpus:      the CPUs that it may use; 0: not known
    contained: its network is not that of the node's facts
    """

    absent: wire.Line = ""
    variables: tuple[tuple[wire.Name, wire.Name], ...] = ()
    cpus: wire.Count = 0
    contained: bool = False


@dataclass(frozen=True)
class NodeInterface:
    """A network interface, in the kernel's order.

    state:     of the kernel (``up``, ``down``, ``unknown``); "": not known
    addresses: as in ``10.0.0.1/24``; None: it shares a network with another interface
    """

    name: wire.Name
    state: wire.Name = ""
    addresses: tuple[wire.Name, ...] | None = ()


@dataclass(frozen=True)
class HcaPort:
    """A port of an RDMA device. state: ``active``, ``down``, ..."""

    device: wire.Name
    port: wire.Count
    state: wire.Name


@dataclass(frozen=True)
class Rendezvous:
    """MASTER_ADDR and MASTER_PORT of ranks, as this node sees them.

    resolved: the addresses of MASTER_ADDR here; (): not known, or none
    error:    why it has none
    listener: the process that listens on the port: `JOB`, another one in words; "": none is seen
    is_users: the listener belongs to the user of the ranks
    """

    address: wire.Name
    port: wire.Name
    resolved: tuple[wire.Name, ...] = ()
    error: wire.Line = ""
    listener: wire.Line = ""
    is_users: bool = False


#: The listener is a process of the job.
JOB = "the job"


@dataclass(frozen=True)
class NcclFile:
    """The variables that a configuration file of NCCL has."""

    path: wire.Path
    variables: tuple[tuple[wire.Name, wire.Name], ...]


@dataclass(frozen=True)
class EnvironmentFacts:
    """The facts of a node that decide about an environment.

    absent:      why there are none; "": there are
    interfaces:  () when not known: every node has lo
    hca_ports:   of its RDMA devices
    rendezvous:  of its ranks
    own_addresses: of the node's own name, which Gloo tells its peers
    gpus:        number of NVIDIA's GPUs; None: not known
    cpus:        number of CPUs
    machine:     such as ``x86_64``
    nccl_conf:   the user's file (NCCL_CONF_FILE, else ~/.nccl.conf), then /etc/nccl.conf; the
                 environment outranks the first, the first the second
    nccl:        version of NCCL in a rank; "": not known; None: not loaded
    torch:       version of PyTorch in a rank, ``2.7.0+cu126``; "": not known
    driver:      version of NVIDIA's driver that a rank has; "": not known
    nccl_path:   of the library of NCCL in a rank; "": not known
    nccl_by:     LD_PRELOAD or LD_LIBRARY_PATH if it brings this library; "": it does not
    nccl_own:    version of the NCCL that was installed with the rank's PyTorch; "": not known
    """

    absent: wire.Line = ""
    interfaces: tuple[NodeInterface, ...] = ()
    hca_ports: tuple[HcaPort, ...] = ()
    rendezvous: tuple[Rendezvous, ...] = ()
    own_addresses: tuple[wire.Name, ...] = ()
    gpus: wire.Count | None = None
    cpus: wire.Count = 0
    machine: wire.Name = ""
    nccl_conf: tuple[NcclFile, ...] = ()
    nccl: wire.Name | None = ""
    torch: wire.Name = ""
    driver: wire.Name = ""
    nccl_path: wire.Path = ""
    nccl_by: wire.Name = ""
    nccl_own: wire.Name = ""
