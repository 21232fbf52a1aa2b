"""A job's environment as data: its facts, and the rules about it with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


_NCCL_GUIDE = "NCCL user guide, environment variables"
_TORCH_GUIDE = "PyTorch, torch.distributed"


class JobRule(NamedTuple):
    """A rule of `nodeready.subjects.environment_rules`."""

    name: str
    variables: str  # as in the page; problem: what is wrong; advice: what to do
    problem: str
    weight: int  # 2: the job cannot work, or is known to hang; 1: a sign; 0: slow, or good to know
    advice: str
    source: str


_SAME = "give the variable the same value on all ranks"
_INTERFACE_ADVICE = "nodeready env prints the interface that leads to its peers"
_INTERFACES = (
    "`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`, `TP_SOCKET_IFNAME`, "
    "`OMPI_MCA_btl_tcp_if_include`, `OMPI_MCA_oob_tcp_if_include`"
)
_DEVICES = "`CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES`"
#: The rules whose problems are not those of a table below, in the order of the page.
RULES = (
    JobRule("loopback", _INTERFACES, "leads to the node itself", 2, _INTERFACE_ADVICE,
            "NCCL src/misc/socket.cc (a list that excludes names includes lo), Gloo's tcp device"),
    JobRule("no-interface", _INTERFACES, "names no interface of the node", 2, _INTERFACE_ADVICE,
            f"{_NCCL_GUIDE}; {_TORCH_GUIDE}; Open MPI, TCP"),
    JobRule("down", _INTERFACES, "names an interface that is down", 2,
            "bring the interface up, or name another one: nodeready env", "the same"),
    JobRule("no-address", _INTERFACES, "names an interface without an address", 2,
            "give the interface an address, or name another one: nodeready env", "the same"),
    JobRule("network", _INTERFACES, "leads to another network than on most nodes, in which the "
            "node has another interface", 2, _INTERFACE_ADVICE, "the same"),
    JobRule("own-name", "`GLOO_SOCKET_IFNAME`", "is not set, and the node's own name leads to "
            "loopback, which Gloo tells its peers", 2,
            "export GLOO_SOCKET_IFNAME (nodeready env), or mend /etc/hosts",
            "pytorch/gloo#223; PyTorch ProcessGroupGloo::createDefaultDevice"),
    JobRule("no-hca", "`NCCL_IB_HCA`", "names no RDMA port of the node that is active", 2,
            "nodeready env prints the active devices", _NCCL_GUIDE),
    JobRule("hca-down", "`NCCL_IB_HCA`", "names RDMA ports that are not active", 1,
            "see nodeready audit (rdma), or take the port out", _NCCL_GUIDE),
    JobRule("ucx-device", "`UCX_NET_DEVICES`", "names no device of the node", 2,
            "see ucx_info -d, or take the variable out", "OpenUCX, UCX_NET_DEVICES"),
    JobRule("master-loopback", "`MASTER_ADDR`", "leads to the node itself, and rank 0 is "
            "elsewhere", 2, "use an address of rank 0's node: nodeready env prints it",
            "pytorch/pytorch#67547"),
    JobRule("master-name", "`MASTER_ADDR`", "has no address on the node", 2,
            "mend the name service or /etc/hosts there, or use an address", "pytorch/elastic#31"),
    JobRule("master-differs", "`MASTER_ADDR`", "leads to another address than on most nodes", 2,
            "mend /etc/hosts there, or use an address", _TORCH_GUIDE),
    JobRule("master-node", "`MASTER_ADDR`", "is an address of another node than rank 0's, and the "
            "job does not listen there", 2,
            "use an address of rank 0's node: nodeready env prints it",
            "huggingface/accelerate#2362"),
    JobRule("master-nowhere", "`MASTER_ADDR`", "is an address of none of these nodes", 1,
            "use an address of rank 0's node: nodeready env prints it", _TORCH_GUIDE),
    JobRule("port-taken", "`MASTER_PORT`", "is not free", 2,
            "choose a free port: nodeready env prints one", "pytorch/pytorch#129367"),
    JobRule("no-port", "`MASTER_PORT`", "is no port", 2, "set a number from 1 to 65535",
            _TORCH_GUIDE),
    JobRule("same-gpu", _DEVICES, "gives several ranks of a node the same GPU", 2,
            "give each rank a GPU of its own", "NCCL src/init.cc: Duplicate GPU detected"),
    JobRule("few-gpus", _DEVICES, "shows a node's ranks fewer GPUs than there are ranks", 2,
            "start as many ranks as GPUs, or name more GPUs", "the same"),
    JobRule("no-gpu", _DEVICES, "names a GPU that the node does not have: CUDA ignores it and all "
            "that follow", 2, "nvidia-smi -L lists the GPUs", "CUDA programming guide"),
    JobRule("hidden-gpus", _DEVICES, "hides all GPUs of the node", 1,
            "take the variable out, or name the GPUs", "CUDA programming guide"),
    JobRule("threads", "`OMP_NUM_THREADS`", "lets the ranks of a node start more threads than it "
            "has CPUs", 0, "set it to the CPUs of the node divided by its ranks",
            "torchrun's warning"),
    JobRule("other-nccl", "`LD_PRELOAD`, `LD_LIBRARY_PATH`",
            "brings another NCCL than this PyTorch came with", 1,
            "take that NCCL out, or install the PyTorch that was built with it",
            "ld.so(8); pytorch/pytorch#119932"),
    JobRule("versions", "NCCL", "is not the version of most nodes", 2,
            "give all nodes one version", "NCCL src/init.cc: Mismatched NCCL version detected"),
    JobRule("differs", "`NCCL_*`, `MASTER_PORT`", "differs between the ranks", 1, _SAME,
            _NCCL_GUIDE),
)  # fmt: skip


class VersionRange(NamedTuple):
    """first: the first version with the fault; fixed: the first one without it; (): any"""

    first: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()


ANY = VersionRange()


class BadValue(NamedTuple):
    """A value that is wrong by itself, or versions that are wrong together."""

    variable: str  # "": of any environment
    values: str  # a pattern of the whole value
    problem: str
    weight: int
    advice: str
    source: str
    first: tuple[int, ...] = ()  # of NCCL, as of a `VersionRange`
    fixed: tuple[int, ...] = ()  # likewise
    machine: str = ""  # of the node; "": any
    only_rdma: bool = False  # it matters only where the node has an active RDMA port
    # versions of PyTorch, of the CUDA that it was built for, of the driver
    torch: VersionRange = ANY
    cuda: VersionRange = ANY  # likewise
    driver: VersionRange = ANY  # likewise
    unless: str = ""  # ``NAME=VALUE`` that avoids the fault; "": nothing does


_ON = r"[1-9]\d*"
_OUT = "take it out, unless it works around a fault that you know"
_DEBUGGING = "take it out: it is for debugging"
_NO_P2P = "keeps the GPUs of a node from using NVLink or PCI directly: slow"
_SOCKETS = "chooses sockets, though the node has an active RDMA port: slow"
_BLOCKING = "makes each collective wait on the CPU: slow"
#: The values, of one variable the gravest first.
BAD_VALUES = (
    BadValue("CUDA_LAUNCH_BLOCKING", _ON, "hangs with this NCCL: a launch waits for a kernel that "
           "waits for NCCL's own thread", 2, "take it out, or NCCL 2.17 or newer",
           "NVIDIA/nccl#750, #774", (2, 13), (2, 17)),
    BadValue("CUDA_LAUNCH_BLOCKING", _ON, "makes each launch wait for its kernel: slow, and a "
           "rank with several GPUs may hang", 1, _DEBUGGING,
           "NVIDIA/nccl#774; pytorch/pytorch#121788"),
    BadValue("HIP_LAUNCH_BLOCKING", _ON, "makes each launch wait for its kernel: slow", 1,
           _DEBUGGING, "HIP, environment variables"),
    BadValue("AMD_SERIALIZE_KERNEL", _ON, "makes each launch wait for its kernel: slow", 1,
           _DEBUGGING, "HIP, environment variables"),
    BadValue("NCCL_P2P_DISABLE", _ON, _NO_P2P, 0, _OUT, _NCCL_GUIDE),
    BadValue("NCCL_P2P_LEVEL", r"0|LOC", _NO_P2P, 0, _OUT, _NCCL_GUIDE),
    BadValue("NCCL_SHM_DISABLE", _ON, "makes the ranks of a node use the network instead of its "
           "memory: slow", 0, _OUT, _NCCL_GUIDE),
    BadValue("NCCL_IB_DISABLE", _ON, _SOCKETS, 0, _OUT, _NCCL_GUIDE, only_rdma=True),
    BadValue("NCCL_NET", r"(?i)socket", _SOCKETS, 0, _OUT, _NCCL_GUIDE, only_rdma=True),
    BadValue("FI_PROVIDER", r"tcp|sockets", _SOCKETS, 0, _OUT, "libfabric, fi_provider(7)",
           only_rdma=True),
    BadValue("NCCL_ALGO", r".+", "leaves NCCL no choice: slow, or an error of a collective "
           "without that algorithm", 0, _OUT, _NCCL_GUIDE),
    BadValue("NCCL_PROTO", r"(?i).*LL128.*", "corrupts data where the platform does not support "
           "LL128", 1, _OUT, _NCCL_GUIDE),
    BadValue("NCCL_BLOCKING_WAIT", _ON, _BLOCKING, 0, _OUT, _TORCH_GUIDE),
    BadValue("TORCH_NCCL_BLOCKING_WAIT", _ON, _BLOCKING, 0, _OUT, _TORCH_GUIDE),
    BadValue("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "lets a collective that hangs wait for ever",
           0, "take it out", _TORCH_GUIDE),
    BadValue("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "checks each collective by another one: slow", 0,
           _DEBUGGING, _TORCH_GUIDE),
    BadValue("", "", "may hang: it sometimes does not end a connection", 1, "NCCL 2.18 or newer",
           "pytorch/pytorch#97843", (2, 17), (2, 18)),
    BadValue("", "", "is known to hang (a regression)", 1, "NCCL 2.29.3 or newer",
           "pytorch/pytorch#174338", (2, 29, 2), (2, 29, 3)),
    BadValue("", "", "is known to hang on ARM: its proxy loses slots", 1, "NCCL 2.29.3 or newer",
           "NCCL, release notes of 2.29.3", (2, 12), (2, 29, 3), "aarch64"),
    BadValue("", "", "may fail at its start with: invalid argument", 0, "NCCL 2.18.6 or newer",
           "NVIDIA/nccl#1024", (2, 18), (2, 18, 6)),
    BadValue("", "", "may hang while all-to-all connects", 1, "NCCL 2.20.3 or newer, or "
           "NCCL_CUMEM_ENABLE=0", "NVIDIA/nccl#1116; NCCL 2.20.3: Fix hang during A2A connection",
           (2, 19), (2, 20), unless="NCCL_CUMEM_ENABLE=0"),
    BadValue("NCCL_IB_ROCE_VERSION_NUM", r".+", "crashes this NCCL", 2,
           "NCCL_IB_GID_INDEX in its place, or a newer NCCL", "NVIDIA/nccl#1538", (2, 22, 3),
           (2, 22, 4)),
    BadValue("NCCL_RAS_ADDR", r".+", "opens RAS, whose questions can crash this NCCL", 1,
           "ask nothing while it runs, or NCCL 2.29.2 or newer",
           "NVIDIA/nccl#1669, #1718, #1762", (2, 26), (2, 29, 2), unless="NCCL_RAS_ENABLE=0"),
    BadValue("", "", "may hang between nodes over InfiniBand", 1,
           "NCCL 2.30.7 or newer, or NCCL_PXN_DISABLE=1", "cuBLASMp, known issues", (2, 29, 7),
           (2, 30, 7), only_rdma=True, unless="NCCL_PXN_DISABLE=1"),
    BadValue("", "", "may hang if init_process_group has a device_id", 1,
           "PyTorch 2.7.1 or newer, or TORCH_NCCL_USE_COMM_NONBLOCKING=0",
           "pytorch/pytorch#153960, #154055", (2, 26), (2, 27),
           torch=VersionRange((2, 7, 0), (2, 7, 1)), unless="TORCH_NCCL_USE_COMM_NONBLOCKING=0"),
    BadValue("", "", "fails in collectives with an NCCL before 2.13", 2, "NCCL 2.13 or newer",
           "pytorch/pytorch#130414", (2,), (2, 13), torch=VersionRange((2, 3), (2, 4))),
    *(
        BadValue("", "", f"is older than the CUDA {cuda} of this PyTorch needs: it sees no GPU", 1,
               f"a driver {driver} or newer, or a PyTorch for an older CUDA",
               "CUDA Compatibility, minor version compatibility",
               cuda=VersionRange((cuda,), (cuda + 1,)), driver=VersionRange((1,), (driver,)))
        for cuda, driver in ((11, 450), (12, 525), (13, 580))
    ),
)  # fmt: skip
