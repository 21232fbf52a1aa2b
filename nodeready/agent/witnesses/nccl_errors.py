"""The errors of NCCL, RCCL and gloo: what a line means, and what to look at next.

>>> meaning("NET/IB : Got completion from peer 10.0.0.2<4711> with error 12, opcode 0").key
'ib-retry'

Sources: NVIDIA/nccl and its issues, NCCL's and RCCL's documentation, ibv_poll_cq(3) and
ibv_get_async_event(3), pytorch's ProcessGroupNCCL and ProcessGroupGloo, gloo's transport/tcp.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

#: The rank (its process, node, GPU or port) failed itself.
CAUSE = "cause"
#: The rank lost a peer, or does not reach it. Its own line says no more.
VICTIM = "victim"
#: The line repeats the error of another line of the same process.
FOLLOWS = "follows"
#: No failure: why NCCL chose what it uses.
NOTE = "note"

#: Characters of a line that are searched.
MAX_LINE = 2000


class NcclMeaning(NamedTuple):
    """What a line of a log means."""

    key: str  # stable: ``ib-retry``
    needles: str  # one of these words is in the line, ``|`` between them
    pattern: str  # matches in the line; "": a needle is enough
    role: str  # CAUSE, VICTIM, FOLLOWS or NOTE
    # of the failure: ``exception``, ``gpu``, ``network``, ``oom``, ``storage``, ``timeout``
    kind: str
    meaning: str  # in one line
    step: str  # what to look at next, in one line
    source: str  # where this is documented or was seen


def _completion(*statuses: int) -> str:
    """A completion with one of these statuses of ibv_wc_status, in the forms of all versions."""
    numbers = "|".join(str(status) for status in statuses)
    name = r"\(?[A-Z]\w{1,40}\)?\(?"
    return rf"Got completion .{{0,160}}?(?:error |status=)(?:{name})?(?:{numbers})\b"


#: The beginning of a line about NCCL's sockets; PyTorch repeats it without "NCCL WARN".
_SOCKET = r"(?:NCCL.|\b\w{0,12}[sS]ocket[A-Z]\w{1,30}:)"
_PERFTEST = "test the pair of ports with ib_write_bw"
#: The first row that matches is the meaning of a line; a general row stands below special rows.
ERRORS = tuple(NcclMeaning(*row) for row in (
    ("hint", "HINT: In many cases this error", "", FOLLOWS, "network",
     "NCCL's own hint about the error before it", "the line itself", "NCCL 2.32"),
    # --- InfiniBand and RoCE.
    ("ib-retry", "Got completion", _completion(12), VICTIM, "network",
     "the peer's port does not answer: it cannot be reached, or the peer's process has ended",
     "state of both ports, partition (PKey), subnet manager; on RoCE the GID index; " + _PERFTEST,
     "ibv_poll_cq(3) IBV_WC_RETRY_EXC_ERR; NVIDIA/nccl 426, 1814"),
    ("ib-flush", "Got completion", _completion(5), FOLLOWS, "network",
     "an operation was cancelled after another error of the same connection",
     "the completion before it, and the peer's log",
     "ibv_poll_cq(3) IBV_WC_WR_FLUSH_ERR; NVIDIA/nccl 1405"),
    ("ib-local-protection", "Got completion", _completion(4), CAUSE, "network",
     "the NIC may not access the buffer: PCIe ACS or an IOMMU breaks GPUDirect RDMA",
     "turn ACS off (lspci -vvv | grep ACSCtl), `nodeready explain iommu.args`; to confirm: "
     "NCCL_NET_GDR_LEVEL=0",
     "ibv_poll_cq(3) IBV_WC_LOC_PROT_ERR; NVIDIA/nccl 928, 1052"),
    ("ib-remote-access", "Got completion", _completion(9, 10), VICTIM, "network",
     "the peer's NIC refused the access to its memory",
     "the peer's log for an access violation; ACS, IOMMU and nvidia-peermem there",
     "ibv_poll_cq(3) IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR; NVIDIA/nccl 1710"),
    ("ib-remote-operation", "Got completion", _completion(11), VICTIM, "network",
     "the peer's NIC could not complete the operation",
     "the peer's log and kernel log; ACS and PCIe errors there",
     "ibv_poll_cq(3) IBV_WC_REM_OP_ERR; NVIDIA/nccl 214"),
    ("ib-rnr", "Got completion", _completion(13), VICTIM, "network",
     "the peer offered no buffer in time: its process is stopped, slow or gone",
     "the peer's process: `nodeready stacks`",
     "ibv_poll_cq(3) IBV_WC_RNR_RETRY_EXC_ERR"),
    ("ib-local", "Got completion", _completion(1, 2, 3, 6, 8, 19, 21), CAUSE, "network",
     "this node's NIC rejected the operation",
     "the kernel's log, the NIC's firmware and counters on this node",
     "ibv_poll_cq(3)"),
    ("ib-completion", "Got completion", "", VICTIM, "network",
     "an RDMA operation with the peer failed",
     "state and counters of both ports; " + _PERFTEST, "ibv_poll_cq(3)"),
    ("ib-port-down", "port error", r"async (?:fatal )?event.{0,160}port error", CAUSE, "network",
     "a port of this node went down",
     "its cable, switch port and counters: `nodeready audit --only rdma`",
     "ibv_get_async_event(3) IBV_EVENT_PORT_ERR"),
    ("ib-device", "catastrophic error|CQ error", r"async (?:fatal )?event.{0,160}error", CAUSE,
     "network",
     "a NIC of this node failed",
     "the kernel's log for its driver (mlx5_core); reset or replace it",
     "ibv_get_async_event(3) IBV_EVENT_DEVICE_FATAL; NVIDIA/nccl 230"),
    ("ib-access", "work queue error", r"async (?:fatal )?event.{0,160}error", CAUSE, "network",
     "a NIC of this node refused an access to memory",
     "ACS, IOMMU and nvidia-peermem on this node",
     "ibv_get_async_event(3) IBV_EVENT_QP_ACCESS_ERR; NVIDIA/nccl 1710"),
    ("ib-fatal", "async fatal event", "", CAUSE, "network",
     "a NIC of this node reported a fatal event",
     "the line itself; the kernel's log of this node", "NCCL 2.32"),
    ("ib-stall", "WQE stall", "", VICTIM, "network",
     "the peer's port has not answered for some time",
     "state and counters of both ports; the peer's process", "NCCL 2.32"),
    ("ib-mixed", "incompatible devices|device is incompatible with the local", "", CAUSE,
     "network",
     "ports of InfiniBand and RoCE are used together",
     "NCCL_IB_HCA with the ports of one link type", "NCCL 2.32"),
    ("ib-event", "async event|GID table changed|speed change detected", "", NOTE, "network",
     "the fabric changed under the job: subnet manager, LID, PKey or GID",
     "the subnet manager's log; on RoCE the address of the interface",
     "ibv_get_async_event(3); NVIDIA/nccl 1819"),
    ("ib-memlock", "Cannot allocate memory", r"ibv_reg_\w{1,30} failed", CAUSE, "network",
     "the NIC may not lock the memory: the limit of locked memory is too small",
     "ulimit -l in the job must say unlimited: `nodeready explain limits.memlock`",
     "NCCL docs, InfiniBand; NVIDIA/nccl-tests 206"),
    ("ib-register", "ibv_reg_", r"ibv_reg_\w{1,30} failed", CAUSE, "network",
     "the NIC cannot map the GPU's memory",
     "load nvidia-peermem; else NCCL_DMABUF_ENABLE=0, or a newer driver of the NIC",
     "NCCL docs, GPU Direct; NVIDIA/nccl 778"),
    ("ib-connect", "ibv_modify_qp", r"ibv_modify_qp failed(?!.{0,300}retrying)", CAUSE, "network",
     "no RDMA connection to the peer: no route between these two ports, or a wrong GID",
     "NCCL_IB_GID_INDEX and show_gids; rails: NCCL_CROSS_NIC=0; " + _PERFTEST,
     "NVIDIA/nccl 925, 2013; NVIDIA/nccl-tests 185, 227"),
    ("ib-open", "Unable to open device|ibv_open_device", "", NOTE, "network",
     "an RDMA device cannot be opened, and is not used",
     "in a container: --device /dev/infiniband, --ulimit memlock=-1", "NVIDIA/nccl 451"),
    ("ib-call", "Call to ibv_", r"Call to ibv_\w{1,40} failed(?!.{0,300}retrying)", CAUSE,
     "network",
     "a call into the RDMA library failed",
     "`nodeready audit --only rdma`, and the kernel's log", "NVIDIA/nccl src/misc/ibvwrap.cc"),
    ("ib-none", "NET/IB : No device found", "", NOTE, "network",
     "NCCL sees no InfiniBand or RoCE device",
     "in a container: --device /dev/infiniband; else `nodeready audit --only rdma`",
     "NVIDIA/nccl 941, 952"),
    ("ib-library", "Failed to open libibverbs|Failed to load libibverbs", "", NOTE, "network",
     "the job's environment has no libibverbs, so NCCL uses no RDMA",
     "install libibverbs1 and ibverbs-providers in the job's environment",
     "NVIDIA/nccl 229; dstackai/dstack 2712"),
    # --- Networks of plugins.
    ("ofi", "NCCL WARN NET/OFI", "", CAUSE, "network",
     "the libfabric plugin failed",
     "`fi_info -p efa` in the job's environment; /dev/infiniband in the container; versions",
     "aws/aws-ofi-nccl 1020, 161, 889"),
    ("network-missing", "Error: network |any NET plugin",
     r"Error: network .{1,80} not found|Failed to initialize any NET plugin", CAUSE, "network",
     "the network that NCCL_NET or NCCL_NET_PLUGIN names is missing",
     "unset them, or install the plugin in the job's environment",
     "NVIDIA/nccl src/plugin/net.cc; getainode/ainode 87"),
    # --- Sockets.
    ("no-interface", "interface found", r"(?i)\bno (?:\w{1,40} ){0,3}interface found", CAUSE,
     "network",
     "NCCL found no network interface that it may use",
     "unset NCCL_SOCKET_IFNAME, or name an interface that is up on every node",
     "NCCL docs, NCCL_SOCKET_IFNAME; NVIDIA/nccl 1837"),
    ("address-family", "is neither AF_INET", "", CAUSE, "network",
     "there is no address to connect to: the interface of NCCL_SOCKET_IFNAME is missing",
     "unset NCCL_SOCKET_IFNAME, or name an interface that is up on every node",
     "NVIDIA/nccl 1267, 1837"),
    ("connect-retry", "retrying", r"(?i)connect.{1,120}\bretrying", NOTE, "network",
     "the peer does not accept a connection yet",
     "the peer: is its process there, does the address lead to it?", "wenet-e2e/wenet 959"),
    ("connect-refused", "Connection refused|connection abort",
     _SOCKET + r".{0,200}[cC]onnect(?: to)? .{1,120}(?:Connection refused|connection abort)",
     VICTIM, "network",
     "no process listens at the peer's address: it has ended, or the address is another's",
     "the peer's process; NCCL_SOCKET_IFNAME on both nodes", "NVIDIA/nccl 1515"),
    ("connect-timeout", "timed out", _SOCKET + r".{0,200}[cC]onnect(?: to)? .{1,120}timed out",
     VICTIM, "network",
     "the peer's address does not answer: a firewall, or an interface that leads elsewhere",
     "`nodeready ready`; NCCL_SOCKET_IFNAME on both nodes",
     "NCCL docs, IP Network Interfaces; Oneflow-Inc/oneflow 3586"),
    ("connect-no-route", "No route to host|Network is unreachable",
     _SOCKET + r".{0,200}[cC]onnect", VICTIM, "network",
     "no route leads to the peer's address",
     "`nodeready ready`; NCCL_SOCKET_IFNAME on both nodes",
     "sgl-project/sglang 3820; pytorch/pytorch 68893"),
    ("open-files", "Too many open files", r"NCCL WARN.{0,200}Too many open files", CAUSE,
     "exception",
     "the process may open no more files",
     "ulimit -n in the job: `nodeready explain limits.nofile`",
     "NVIDIA/nccl src/include/checks.h"),
    ("foreign-connection", "socketFinalizeAccept|Socket magic mismatch",
     r"wrong (?:type|magic)|magic mismatch", CAUSE, "network",
     "another program connected to NCCL's port",
     "another job or a port scan on this network", "NVIDIA/nccl-tests 188; NVIDIA/nccl 1612"),
    ("peer-closed", "Connection closed by remote peer", "", VICTIM, "network",
     "a peer's process has ended, or the connection to it broke",
     "the peer that the line names, and the first failure of the job",
     "NVIDIA/nccl 795, 1235"),
    ("peer-reset", "Connection reset by peer|Broken pipe",
     _SOCKET + r".{0,200}(?:Connection reset by peer|Broken pipe)", VICTIM, "network",
     "a peer's process has ended, or the connection to it broke",
     "the peer that the line names, and the first failure of the job", "NVIDIA/nccl 795"),
    # --- Shared memory and the node.
    ("shm-full", "/dev/shm/|posix_fallocate",
     r"posix_fallocate failed ?: No space|/dev/shm/.{0,160}No space left|extend /dev/shm/",
     CAUSE, "storage",
     "/dev/shm is full or too small",
     "a larger /dev/shm (docker run --shm-size); remove /dev/shm/nccl-* that no job uses",
     "NCCL docs, Shared memory; NVIDIA/nccl 290, 525"),
    ("shm-attach", "attaching to shared memory segment", "", CAUSE, "storage",
     "the shared memory of a rank on the same node cannot be opened",
     "one container and user for all ranks of a node (--ipc=host); NCCL_CUMEM_HOST_ENABLE=0",
     "NVIDIA/nccl 2190"),
    ("shm", "creating shared memory segment", "", CAUSE, "storage",
     "a segment of shared memory cannot be created",
     "space and rights of /dev/shm; limits of the container", "NVIDIA/nccl 342, 1518"),
    ("iommu", 'Missing "amd_iommu=on"|Missing "iommu=pt"', "", NOTE, "gpu",
     "the kernel's command line lacks the IOMMU's pass-through mode",
     "`nodeready explain iommu.args`", "ROCm/rccl 1026, 2188"),
    # --- The GPU and its driver.
    ("duplicate-gpu", "Duplicate GPU detected|Multiple Ranks are using the same GPU", "", CAUSE,
     "exception",
     "two ranks use the same GPU",
     "torch.cuda.set_device(LOCAL_RANK) before the first collective; CUDA_VISIBLE_DEVICES",
     "horovod/horovod 3929; verl-project/verl 161"),
    ("peer-mapping", "peer mapping resources exhausted", "", CAUSE, "gpu",
     "the process maps more GPUs at once than the driver allows (8 peers)",
     "at most 8 GPUs for a process, or one process for each GPU; else NCCL_P2P_DISABLE=1",
     "CUDA cudaErrorTooManyPeers; NVIDIA/nccl 1874; NVIDIA/nccl-tests 324"),
    ("gpu-memory", "out of memory|CUDA calloc|CUDA malloc",
     r"(?:Cuda|CUDA|HIP) failure.{0,40}out of memory|Failed to CUDA (?:calloc|malloc)", CAUSE,
     "oom",
     "the GPU has no memory left for NCCL's buffers",
     "another process on this GPU (nvidia-smi); else less memory for the job",
     "NVIDIA/nccl 1235; rwth-i6/returnn 1626"),
    ("fabric-manager", "system not yet initialized", "", CAUSE, "gpu",
     "the NVSwitch fabric is not ready",
     "nvidia-fabricmanager: does it run, in the driver's version?",
     "CUDA cudaErrorSystemNotReady; NVIDIA/nccl 1231"),
    ("nvls", "NVLink SHARP|transport/nvls",
     r"Failed to bind NVLink SHARP|transport/nvls\.cc:\d{1,6} (?:\(\w{1,80}\) )?NCCL WARN", CAUSE,
     "gpu",
     "NVLink SHARP cannot be set up: fabric manager or NVSwitch",
     "nvidia-fabricmanager; reset the GPUs after its restart; NCCL_NVLS_ENABLE=0 without it",
     "NVIDIA/nccl 1672, 1788; NVIDIA/nccl-tests 276; pytorch/pytorch 177472"),
    ("gpu-ecc", "uncorrectable ECC error", "", CAUSE, "gpu",
     "the GPU's memory has an error that cannot be corrected",
     "Xid in the kernel's log: `nodeready audit --only gpus`", "CUDA cudaErrorECCUncorrectable"),
    ("gpu-access", "illegal memory access", "", CAUSE, "gpu",
     "a kernel on this GPU accessed memory that it does not have",
     "the frame may be another's: once with CUDA_LAUNCH_BLOCKING=1; Xid in the kernel's log",
     "CUDA cudaErrorIllegalAddress"),
    ("driver", "driver version is insufficient", "", CAUSE, "gpu",
     "the GPU's driver is missing, or older than the CUDA of NCCL",
     "nvidia-smi in the job's environment; in a container --gpus all",
     "CUDA cudaErrorInsufficientDriver; NCCL 2.14 and 2.32 on a node without a driver"),
    ("gpu", "Cuda failure|CUDA failure|HIP failure", "", CAUSE, "gpu",
     "a call into the GPU's driver failed",
     "the words in quotes; Xid in the kernel's log: `nodeready audit --only gpus`",
     "NVIDIA/nccl 1029, 1647; ROCm/rocm-systems 8178"),
    # --- The program.
    ("mismatch", "ismatched collective|collective mismatch|essage truncated", "", CAUSE,
     "exception",
     "ranks call different collectives, or the same collective with different sizes",
     "TORCH_DISTRIBUTED_DEBUG=DETAIL names them; the same NCCL_* variables for all ranks",
     "NVIDIA/nccl 296, 531, 969, 1176, 1328"),
    ("version-mismatch", "Mismatched NCCL version|NCCL version mismatch", "", CAUSE, "exception",
     "ranks have different versions of NCCL",
     "one environment or image for all ranks; LD_LIBRARY_PATH", "NCCL 2.32"),
    ("environment-mismatch", "NCCL environment: mismatch", "", NOTE, "exception",
     "ranks have different NCCL_* variables",
     "the same environment for all ranks", "NCCL 2.32"),
    # --- gloo.
    ("gloo-hostname", "resolve hostname", r"(?i)unable to resolve hostname", CAUSE, "network",
     "the node's own name has no address, so gloo uses loopback",
     "the name in DNS or /etc/hosts; else GLOO_SOCKET_IFNAME", "ProcessGroupGloo.cpp"),
    ("gloo-interface", "Unable to find address for", "", CAUSE, "network",
     "the interface of GLOO_SOCKET_IFNAME is missing or has no address",
     "unset GLOO_SOCKET_IFNAME, or name an interface that is up on every node",
     "gloo transport/tcp/device.cc"),
    ("gloo-loopback", "connect [127.", "", CAUSE, "network",
     "a peer announced a loopback address: its name leads to 127.x",
     "GLOO_SOCKET_IFNAME, or the node's name in /etc/hosts", "pytorch/pytorch 15592"),
    ("gloo-connect", "connectFullMesh failed|pair.cc|pair.h",
     r"connectFullMesh failed|pair\.\w{1,3}:\d{1,6}\] (?:Connect timeout|connect \[)", VICTIM,
     "network",
     "not all ranks reach each other over gloo's interface",
     "GLOO_SOCKET_IFNAME on all nodes; `nodeready ready`",
     "pytorch/pytorch 108732; sgl-project/sglang 3226"),
    ("gloo-closed", "Connection closed by peer|Connection reset by peer|Broken pipe",
     r"gloo.{0,80}\.(?:cc|h):\d{1,6}\] .{0,160}"
     r"(?:Connection closed by peer|Connection reset by peer|Broken pipe)",
     VICTIM, "network",
     "a peer's process has ended, or the connection to it broke",
     "the peer that the line names, and the first failure of the job",
     "gloo transport/tcp/pair.cc"),
    ("gloo-mismatch", "op.preamble.length", "", CAUSE, "exception",
     "two ranks exchange different sizes",
     "TORCH_DISTRIBUTED_DEBUG=DETAIL names them; the collectives of both ranks",
     "gloo transport/tcp/pair.cc"),
    ("gloo-timeout", "Timed out waiting", r"Timed out waiting \d{1,9}ms for (?:send|recv)", VICTIM,
     "timeout",
     "a peer did not take part in time",
     "the rank that lags: `nodeready stacks`", "gloo transport/tcp/unbound_buffer.cc"),
    # --- Words that only repeat an error. The line before them says more.
    ("watchdog", "Watchdog caught collective", "", VICTIM, "timeout",
     "a collective did not end in time: a rank did not come, or the network hangs",
     "the rank with the lowest number of completed collectives", "ProcessGroupNCCL.cpp"),
    ("remote", "ncclRemoteError|remote process exited or there was a network error", "", VICTIM,
     "network",
     "a peer's process has ended, or the network to it broke",
     "the first failure of the job, on another rank", "NCCL docs, ncclResult_t"),
    ("proxy", "Failed to execute operation|Socket recv failed while polling", "", FOLLOWS,
     "network",
     "NCCL's network thread of this process had failed",
     "the NCCL WARN before it", "NVIDIA/nccl src/proxy.cc"),
    ("usage", "ncclInvalidUsage|ncclInvalidArgument|invalid usage (run with", "", FOLLOWS,
     "exception",
     "NCCL was called in a way that it does not allow",
     "the NCCL WARN before it (NCCL_DEBUG=WARN)", "NCCL docs, Errors"),
    ("cuda", "ncclUnhandledCudaError|unhandled cuda error", "", FOLLOWS, "gpu",
     "a call into the GPU's driver failed in this process",
     "the NCCL WARN before it (NCCL_DEBUG=WARN); Xid in the kernel's log", "NCCL docs, Errors"),
    ("system", "ncclSystemError|unhandled system error", "", FOLLOWS, "network",
     "a system call or a library failed in this process, often a connection to a peer",
     "the NCCL WARN before it (NCCL_DEBUG=WARN)", "NCCL docs, Errors"),
    ("internal", "ncclInternalError|internal error - please report", "", FOLLOWS, "network",
     "NCCL failed after another error, often of a peer",
     "the NCCL WARN before it (NCCL_DEBUG=WARN)", "NCCL docs, Errors; NVIDIA/nccl 795"),
    ("warning", "NCCL WARN", "", NOTE, "network",
     "NCCL reports a problem that is not in this table",
     "the line itself", "NVIDIA/nccl src/debug.cc"),
))  # fmt: skip

#: Only that a peer is lost: the cause stands elsewhere.
LOST_PEER = (
    "watchdog", "gloo-timeout", "gloo-closed", "peer-closed", "peer-reset", "remote",
)  # fmt: skip
#: Why NCCL uses no InfiniBand or RoCE.
FALLBACKS = ("ib-open", "ib-none", "ib-library")

_BY_KEY = {error.key: error for error in ERRORS}
_ROWS = tuple((error, tuple(error.needles.split("|"))) for error in ERRORS)
_NEEDLES = tuple(dict.fromkeys(needle for _, needles in _ROWS for needle in needles))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def meaning(line: str) -> NcclMeaning | None:
    """The meaning of a line of a log; None: no error of NCCL, RCCL or gloo."""
    line = line[:MAX_LINE]
    # Most lines of a log have none of them: a loop costs a third of an expression here.
    for needle in _NEEDLES:
        if needle in line:
            break
    else:
        return None
    for error, needles in _ROWS:
        if any(needle in line for needle in needles) and (
            not error.pattern or _compiled(error.pattern).search(line)
        ):
            return error
    return None


def by_key(key: str) -> NcclMeaning:
    """The row with this key. Raises KeyError."""
    return _BY_KEY[key]
