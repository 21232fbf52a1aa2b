"""What a stack that ends at a known place waits for, and what to look at.

Sources: the functions are those of the files that they name (PyTorch's, CPython's), as py-spy
prints them in public reports of hung jobs: pytorch/pytorch issues 87995 and 75147 (data loader)
and 131781 (store), the chronicles of bigscience-workshop/bigscience (broadcast, barrier, data
loader), huggingface/accelerate issue 3104. Native symbols: PyTorch's ProcessGroupNCCL.cpp and
TCPStore.cpp, gloo's unbound_buffer.cc, the CUDA runtime's API, CPython's Python/ceval_gil.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nodeready.triage.stacks.document import Frame


class Hint(NamedTuple):
    """What is waited for. about: one word for what it has to do with; text: one line."""

    about: str
    text: str


COLLECTIVE = Hint(
    "collective",
    "waits in a collective for the ranks that have not called it: look at the groups that are "
    "elsewhere; when all are here, at the network",
)
_PEER = Hint(
    "collective",
    "waits for one other rank to send or to receive: look where that rank stands",
)
_START = Hint(
    "start",
    "waits for all ranks to come together (MASTER_ADDR:MASTER_PORT): look for ranks that never "
    "started, and try `nodeready ready INVENTORY --ports PORTS`",
)
_END = Hint(
    "end",
    "is ending: destroying the process group waits for work that the other ranks have not done",
)
_DATA = Hint(
    "data",
    "waits for its data loader's workers: look at their stacks (py-spy dump --subprocesses), the "
    "file system, /dev/shm and memory",
)
_BACKWARD = Hint(
    "backward",
    "is in the backward pass, where DDP and FSDP start collectives from C++: with no progress it "
    "waits for other ranks or for the GPU (--native tells)",
)
_GPU = Hint(
    "gpu",
    "waits for the GPU to finish what was queued, often a collective (the CUDA runtime may spin "
    "meanwhile: CPU time is no progress): look at the other ranks, then at the GPU (Xid in dmesg)",
)
_COMPILE = Hint(
    "compile",
    "compiles a model (torch.compile, Triton): the first time takes minutes; look at its compiler "
    "processes and at the cache directory's file system",
)
_CHECKPOINT = Hint(
    "checkpoint",
    "saves or loads a checkpoint: look at the file system (space, quota, mount)",
)
_IMPORT = Hint(
    "import",
    "imports Python modules: on many nodes at once that is a shared file system's load",
)
_CHILD = Hint("child", "waits for a process that it started: look at that one's state and stack")
_LOCK = Hint(
    "lock",
    "waits for a lock or for another thread: look at its other threads (--all-threads)",
)
_FILE = Hint("file", "reads or writes a file: look at the file system's mount and dmesg")
_NETWORK = Hint("network", "waits for an answer over the network: look at who should give it")
_GIL = Hint(
    "gil",
    "waits for Python's global lock, which another thread of this process holds: look at its "
    "other threads (--all-threads)",
)

_C10D = "torch/distributed/distributed_c10d.py"

#: Function, end of its file -> what it means. "*": every function of that file.
_PLACES: dict[tuple[str, str], Hint] = {
    **{
        (name, _C10D): COLLECTIVE
        for name in (
            "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced",
            "all_gather_into_tensor", "all_gather_object", "_all_gather_base", "all_to_all",
            "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
            "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
            "reduce_scatter_tensor", "_reduce_scatter_base", "scatter", "scatter_object_list",
            "_object_to_tensor", "_tensor_to_object",
        )
    },
    **{
        (name, _C10D): _PEER
        for name in (
            "send", "recv", "isend", "irecv", "send_object_list", "recv_object_list",
            "batch_isend_irecv",
        )
    },
    **{
        (name, _C10D): _START
        for name in (
            "init_process_group", "new_group", "_new_group_with_tag", "_new_process_group_helper",
            "_store_based_barrier", "split_group",
        )
    },
    ("destroy_process_group", _C10D): _END,
    ("_abort_process_group", _C10D): _END,
    ("*", "torch/distributed/_functional_collectives.py"): COLLECTIVE,
    ("*", "torch/distributed/rendezvous.py"): _START,
    ("*", "torch/distributed/elastic/utils/store.py"): _START,
    ("*", "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py"): _START,
    ("_verify_param_shape_across_processes", "torch/distributed/utils.py"): COLLECTIVE,
    ("_sync_module_states", "torch/distributed/utils.py"): COLLECTIVE,
    ("init_distributed", "deepspeed/comm/comm.py"): _START,
    ("*", "deepspeed/comm/comm.py"): COLLECTIVE,
    ("*", "deepspeed/comm/torch.py"): COLLECTIVE,
    ("*", "deepspeed/runtime/pipe/p2p.py"): _PEER,
    ("*", "megatron/core/pipeline_parallel/p2p_communication.py"): _PEER,
    ("synchronize", "horovod/torch/mpi_ops.py"): COLLECTIVE,
    ("_try_get_data", "torch/utils/data/dataloader.py"): _DATA,
    ("_get_data", "torch/utils/data/dataloader.py"): _DATA,
    ("_next_data", "torch/utils/data/dataloader.py"): _DATA,
    ("_shutdown_workers", "torch/utils/data/dataloader.py"): _DATA,
    ("fetch", "torch/utils/data/_utils/fetch.py"): _DATA,
    ("_engine_run_backward", "torch/autograd/graph.py"): _BACKWARD,
    ("backward", "torch/autograd/__init__.py"): _BACKWARD,
    ("synchronize", "torch/cuda/__init__.py"): _GPU,
    ("synchronize", "torch/cuda/streams.py"): _GPU,
    ("wait_stream", "torch/cuda/streams.py"): _GPU,
    ("save", "torch/serialization.py"): _CHECKPOINT,
    ("_save", "torch/serialization.py"): _CHECKPOINT,
    ("load", "torch/serialization.py"): _CHECKPOINT,
    ("_load", "torch/serialization.py"): _CHECKPOINT,
    ("*", "safetensors/torch.py"): _CHECKPOINT,
    ("wait", "subprocess.py"): _CHILD,
    ("_wait", "subprocess.py"): _CHILD,
    ("_try_wait", "subprocess.py"): _CHILD,
    ("communicate", "subprocess.py"): _CHILD,
    ("poll", "multiprocessing/popen_fork.py"): _CHILD,
    ("wait", "multiprocessing/popen_fork.py"): _CHILD,
    ("join", "torch/multiprocessing/spawn.py"): _CHILD,
}  # fmt: skip

#: Files below a directory of this name.
_BELOW = (
    ("torch/distributed/checkpoint/", _CHECKPOINT),
    ("torch/_inductor/", _COMPILE),
    ("torch/_dynamo/", _COMPILE),
    ("triton/compiler/", _COMPILE),
    ("triton/runtime/build.py", _COMPILE),
    ("importlib._bootstrap", _IMPORT),
)

#: Places at which everything waits: whoever called them says more, if it is known.
_COMMON: dict[tuple[str, str], Hint] = {
    **{(name, "threading.py"): _LOCK for name in (
        "wait", "wait_for", "acquire", "join", "_wait_for_tstate_lock", "__enter__",
    )},
    **{(name, "queue.py"): _LOCK for name in ("get", "put", "join")},
    **{(name, "multiprocessing/queues.py"): _CHILD for name in ("get", "put")},
    **{(name, "multiprocessing/connection.py"): _CHILD for name in (
        "wait", "poll", "_poll", "recv", "recv_bytes", "_recv", "_recv_bytes", "_send",
    )},
    **{(name, "multiprocessing/synchronize.py"): _CHILD for name in ("wait", "__enter__")},
    **{(name, "concurrent/futures/_base.py"): _LOCK for name in ("result", "wait")},
    ("as_completed", "concurrent/futures/_base.py"): _LOCK,
    **{(name, "selectors.py"): _NETWORK for name in ("select", "poll")},
    **{(name, "socket.py"): _NETWORK for name in (
        "readinto", "recv", "accept", "create_connection", "getaddrinfo",
    )},
    **{(name, "ssl.py"): _NETWORK for name in ("read", "recv", "recv_into", "do_handshake")},
    **{(name, "pathlib.py"): _FILE for name in (
        "open", "read_text", "read_bytes", "stat", "exists", "iterdir",
    )},
    ("wrapper", "torch/distributed/c10d_logger.py"): COLLECTIVE,
    ("__call__", "torch/_ops.py"): Hint("", ""),
    ("decorate_context", "torch/utils/_contextlib.py"): Hint("", ""),
}  # fmt: skip

#: Words in a native symbol, the first match from the innermost frame on.
_SYMBOLS: tuple[tuple[str, Hint], ...] = (
    ("take_gil", _GIL),
    ("ncclCommInitRank", _START),
    ("ncclCommInit", _START),
    ("TCPStore::", _START),
    ("FileStore::", _START),
    ("ProcessGroupNCCL::broadcastUniqueNCCLID", _START),
    ("ProcessGroupNCCL::", COLLECTIVE),
    ("ProcessGroupGloo::", COLLECTIVE),
    ("ProcessGroupMPI::", COLLECTIVE),
    ("gloo::", COLLECTIVE),
    ("MPI_", COLLECTIVE),
    ("c10d::Reducer::", COLLECTIVE),
    ("nccl", COLLECTIVE),
    ("StreamSynchronize", _GPU),
    ("DeviceSynchronize", _GPU),
    ("EventSynchronize", _GPU),
    ("CtxSynchronize", _GPU),
    ("hipMemcpy", _GPU),
    ("cudaMemcpy", _GPU),
    ("torch::autograd::Engine::", _BACKWARD),
)

#: Frames that are in no table, between the innermost one and one that tells something: a library
#: below a known call has helpers of its own, but further away it is another story.
_UNKNOWN = 2
#: The innermost frames that are looked at.
_DEEP = 64


def _known(frame: Frame, table: dict[tuple[str, str], Hint]) -> Hint | None:
    parts = frame.file.split("/")
    # From Python 3.11 on it prints a method with its class.
    function = frame.function.rpartition(".")[2]
    # py-spy prints a file from its package on, or whole where it cannot see the packages.
    for length in range(1, min(len(parts), 6) + 1):
        end = "/".join(parts[-length:])
        found = table.get((function, end)) or table.get(("*", end))
        if found:
            return found
    return None


def _in_python(frames: Sequence[Frame]) -> tuple[Hint | None, Hint | None]:
    """What a known call says, and what the place itself says where that is none."""
    common: Hint | None = None
    unknown = 0
    for frame in reversed(frames[-_DEEP:]):
        found = _known(frame, _PLACES)
        found = found or next((hint for word, hint in _BELOW if word in frame.file), None)
        if found:
            return found, common
        place = _known(frame, _COMMON)
        if place is None:
            unknown += 1
            if unknown > _UNKNOWN:
                break
        elif common is None and place.text and not unknown:
            common = place
    return None, common


def _in_native(frames: Sequence[Frame]) -> Hint | None:
    for frame in reversed(frames[-_DEEP:]):
        for word, hint in _SYMBOLS:
            if word in frame.function:
                return hint
    return None


def find(frames: Sequence[Frame], native: Sequence[Frame] = ()) -> Hint | None:
    """What the stack waits for; None: it ends at no known place.

    frames, native: root to leaf. Waiting for Python's lock comes before all else: what the
    Python frames call is then not what is waited for.
    """
    below = _in_native(native)
    if below is _GIL:
        return below
    called, common = _in_python(frames)
    return called or below or common
