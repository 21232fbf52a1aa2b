"""Hints on stacks: what a known place waits for, what to look at, and whose code a frame is.

A row names a function and the end of its file, as py-spy prints them, and stands below the name of
the project whose sources it was read from: PyTorch 1.13 to 2.15, DeepSpeed 0.19, Lightning 2.6,
Ray 2.60, JAX 0.10, torchdata 0.11, filelock 4.2, CPython 3.9 to 3.14. Places in public reports of
hung jobs: pytorch/pytorch issues 87995 and 75147 (data loader) and 131781 (store), the chronicles
of bigscience-workshop/bigscience (broadcast, barrier, data loader), huggingface/accelerate issue
3104. Native symbols: PyTorch's ProcessGroupNCCL.cpp, Work.cpp and TCPStore.cpp, gloo's
unbound_buffer.cc, the CUDA runtime's API, CPython's Python/ceval_gil. Wait channels: the functions
of Linux's sources and of the drivers and file systems beside them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from nodeready.runs.stacks.document import Frame

_T = TypeVar("_T")


class Hint(NamedTuple):
    """What a stack waits for. activity: one word; text: one line, with what to look at"""

    activity: str
    text: str


COLLECTIVE = Hint(
    "collective",
    "waits in a collective for the ranks that have not called it: look at the groups that are "
    "elsewhere; when all are here, at the network",
)
_PEER = Hint(
    "peer", "waits for one other rank to send or to receive: look at the stack of that rank"
)
_START = Hint(
    "start",
    "waits for all ranks to come together (MASTER_ADDR:MASTER_PORT): look for ranks that never "
    "started, and try `nodeready ready INVENTORY --ports PORTS`",
)
_STORE = Hint(
    "store",
    "waits for a key in the job's store, which another rank or launcher has not written: look at "
    "the groups that are elsewhere, and at the process behind MASTER_ADDR:MASTER_PORT",
)
_END = Hint(
    "end",
    "is ending: destroying the process group waits for work that the other ranks have not done",
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
_DATA = Hint(
    "data",
    "waits for its data loader's workers: look where those stand, then at the file system, "
    "/dev/shm and memory",
)
_IDLE_WORKER = Hint(
    "worker",
    "is a data loader's worker that waits for its rank to ask for the next batch: not the cause",
)
_IDLE = Hint("idle", "waits for tasks, and has none: look at the process that should give it some")
_AGENT = Hint("agent", "is the launcher of ranks and watches them: look at the ranks")
_COMPILE = Hint(
    "compile",
    "compiles a model (torch.compile, Triton, an extension): the first time takes minutes; look "
    "at its compiler processes and at the cache directory's file system",
)
_CHECKPOINT = Hint(
    "checkpoint", "saves or loads a checkpoint: look at the file system (space, quota, mount)"
)
_IMPORT = Hint(
    "import", "imports Python modules: on many nodes at once that is a shared file system's load"
)
_CHILD = Hint(
    "child", "waits for a process that it started: look at the state and stack of that process"
)
_LOCK = Hint(
    "lock", "waits for a lock or for another thread: look at its other threads (--all-threads)"
)
_EXIT = Hint(
    "exit",
    "is at the end of its program, and Python waits for its other threads, which are no "
    "daemons: look where those stand (--all-threads)",
)
_CHILD_EXIT = Hint(
    "exit",
    "is at the end of its program, and Python waits for the processes that it started: look "
    "where those stand",
)
_DEBUGGER = Hint(
    "debugger",
    "waits in a Python debugger for keyboard input: the code has a breakpoint() or set_trace()",
)
_INPUT = Hint("input", "waits for keyboard input (input(), or a read of its standard input)")
_FILE_LOCK = Hint(
    "file-lock",
    "waits for a lock file: find its holder (another rank, or a dead process: then remove the "
    "file), and whether the file system has locks",
)
_FILE = Hint("file", "reads or writes a file: look at the file system's mount and dmesg")
_OUTPUT = Hint(
    "output",
    "writes into a full pipe that no process reads: find the reader of its output (the launcher, "
    "tee, srun, a logger)",
)
_PIPE = Hint(
    "pipe",
    "waits for data out of a pipe (its standard input may be one): look at the process that "
    "should write there",
)
_NETWORK = Hint(
    "network", "waits for an answer over the network: find the peer that should answer"
)
_SLEEP = Hint("sleep", "sleeps: a pause, or a loop that polls")
_LOOP = Hint(
    "asyncio",
    "waits in asyncio's loop: py-spy does not see the coroutines that are suspended there; look "
    "at its other threads (--all-threads) and at what they talk to",
)
_RANK = Hint(
    "rank",
    "waits for another rank, which has the other end of its connection, pipe or shared memory: "
    "look where that rank stands",
)
_ANSWER = Hint(
    "rank",
    "waits for another rank to answer a call of its (RPC): look where that rank's threads stand",
)
_NATIVE = Hint(
    "native",
    "waits below its own code in C or C++: for a lock, a thread, or the wait() of an asynchronous "
    "collective (--native tells)",
)
_GIL = Hint(
    "gil",
    "waits for Python's global lock, which another thread of this process holds: look at its "
    "other threads (--all-threads)",
)
_CORE = Hint("core", "has crashed, and the kernel writes its core: look at the core's file system")
_RUN = Hint("", "")

#: Activities of ranks that wait for other ranks.
FOR_RANKS = frozenset({"collective", "peer", "start", "store", "end", "backward", "gpu", "rank"})
#: Vague hints, which any more exact source overrides.
_VAGUE_ACTIVITIES = frozenset({"backward", "lock", "asyncio"})

# --- Places in Python: function, end of its file -> what it means. "*": any function of it.

_C10D = "torch/distributed/distributed_c10d.py"
_FSDP2 = "torch/distributed/fsdp/_fully_shard"
_LOADER = "torch/utils/data/dataloader.py"
#: The calls of a loader, PyTorch's or torchdata's, that wait for its workers.
_LOADER_WAITS = (
    "_try_get_data", "_get_data", "_next_data", "_shutdown_workers",
    "_clean_up_persistent_workers_atexit",
)  # fmt: skip
_DDP = "torch/nn/parallel/distributed.py"


def _rows(file: str, hint: Hint, *functions: str) -> dict[tuple[str, str], Hint]:
    return {(function, file): hint for function in functions or ("*",)}


_FUNCTION_HINTS: dict[tuple[str, str], Hint] = {
    # PyTorch: torch/distributed/distributed_c10d.py (`*_multigpu` and `_base` of 1.13,
    # `*_single` of 2.13 and newer).
    **_rows(
        _C10D, COLLECTIVE,
        "all_reduce", "all_reduce_coalesced", "all_reduce_multigpu", "all_gather",
        "all_gather_coalesced", "all_gather_into_tensor", "all_gather_multigpu",
        "all_gather_object", "all_gather_single", "_all_gather_base", "all_to_all",
        "all_to_all_single", "barrier", "broadcast", "broadcast_multigpu", "broadcast_object_list",
        "gather", "gather_into_tensor", "gather_object", "gather_single", "monitored_barrier",
        "reduce", "reduce_multigpu", "reduce_scatter", "reduce_scatter_multigpu",
        "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base", "scatter",
        "scatter_object_list", "_coalescing_manager", "_object_to_tensor", "_tensor_to_object",
    ),
    **_rows(
        _C10D, _PEER,
        "send", "recv", "isend", "irecv", "send_object_list", "recv_object_list",
        "batch_isend_irecv",
    ),
    **_rows(
        _C10D, _START,
        "init_process_group", "new_group", "_new_group_with_tag", "_new_process_group_helper",
        "new_subgroups", "new_subgroups_by_enumeration", "_store_based_barrier", "split_group",
        "shrink_group", "_create_process_group_wrapper",
    ),
    **_rows(_C10D, _END, "destroy_process_group", "_abort_process_group", "_shutdown_backend"),
    **_rows("torch/distributed/_functional_collectives.py", COLLECTIVE),
    **_rows("torch/distributed/nn/functional.py", COLLECTIVE),
    **_rows("torch/distributed/collective_utils.py", COLLECTIVE),
    **_rows("torch/distributed/algorithms/join.py", COLLECTIVE),
    **_rows("torch/distributed/_nccl4py/backend.py", COLLECTIVE),
    **_rows("torch/distributed/_transport/_work.py", _PEER),
    **_rows("torch/distributed/rendezvous.py", _START),
    **_rows("torch/distributed/rpc/api.py", _ANSWER),
    **_rows(
        "torch/distributed/utils.py", COLLECTIVE,
        "_verify_param_shape_across_processes", "_sync_module_states", "_sync_params_and_buffers",
    ),
    # DDP, ZeRO, FSDP 1 and 2, DTensor and symmetric memory: where C++ or the work of an
    # asynchronous collective is waited for.
    **_rows(
        _DDP, COLLECTIVE,
        "_default_broadcast_coalesced", "_distributed_broadcast_coalesced", "_sync_buffers",
        "_sync_module_buffers", "_sync_params_and_buffers", "_ddp_init_helper", "_pre_forward",
        "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce", "_find_common_rank",
    ),
    **_rows(
        "torch/distributed/optim/zero_redundancy_optimizer.py", COLLECTIVE,
        "_sync_params", "wait_for_broadcasts",
    ),
    **_rows("torch/distributed/fsdp/sharded_grad_scaler.py", COLLECTIVE, "unscale_"),
    **_rows(
        "torch/distributed/fsdp/_runtime_utils.py", _GPU,
        "_unshard", "_wait_for_computation_stream",
    ),
    **_rows(
        f"{_FSDP2}/_fsdp_collectives.py", COLLECTIVE,
        "foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce", "all_gather",
        "reduce_scatter", "_get_gradient_divide_factors", "__call__",
    ),
    **_rows(
        f"{_FSDP2}/_fsdp_param_group.py", COLLECTIVE,
        "wait_for_unshard", "_wait_all_gather_streams_on_event", "finalize_backward",
        "_reset_iter_state", "wait_for_post_backward",
    ),
    **_rows(f"{_FSDP2}/_fsdp_param.py", COLLECTIVE, "_get_grad_inner_tensor"),
    **_rows(f"{_FSDP2}/_fully_shard.py", COLLECTIVE, "wait"),
    **_rows("torch/distributed/tensor/_collective_utils.py", COLLECTIVE),
    **_rows("torch/distributed/tensor/_redistribute.py", COLLECTIVE, "redistribute_local_tensor"),
    **_rows("torch/distributed/_symmetric_memory/__init__.py", COLLECTIVE,
            "rendezvous", "barrier"),
    # Pipelines.
    **_rows("torch/distributed/pipelining/_p2p.py", _PEER),
    **_rows(
        "torch/distributed/pipelining/schedules.py", _PEER,
        "_wait_batch_p2p", "_batch_p2p", "_sorted_batch_p2p", "_wait_and_release_fwd_send",
        "_assert_unsharded",
    ),
    # Stores and launchers: torch/distributed/elastic.
    **_rows("torch/distributed/elastic/utils/store.py", _STORE),
    **_rows("torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", _START),
    **_rows("torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", _START),
    **_rows("torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py", _START),
    **_rows("torch/distributed/elastic/rendezvous/etcd_rendezvous.py", _START),
    ("_exit_barrier", "torch/distributed/elastic/agent/server/api.py"): _STORE,
    **_rows("torch/distributed/elastic/agent/server/api.py", _AGENT, "_invoke_run", "run"),
    ("join", "torch/multiprocessing/spawn.py"): _CHILD,
    # The data loader: the rank waits for its workers, a worker for its rank.
    **_rows(_LOADER, _DATA, *_LOADER_WAITS),
    **_rows("torchdata/stateful_dataloader/stateful_dataloader.py", _DATA, *_LOADER_WAITS),
    # Autograd and the GPU.
    ("_engine_run_backward", "torch/autograd/graph.py"): _BACKWARD,
    ("backward", "torch/autograd/__init__.py"): _BACKWARD,
    ("grad", "torch/autograd/__init__.py"): _BACKWARD,
    **_rows("torch/cuda/__init__.py", _GPU, "synchronize"),
    **_rows("torch/cuda/streams.py", _GPU, "synchronize", "wait_stream", "wait_event"),
    **_rows("torch/accelerator/__init__.py", _GPU, "synchronize"),
    **_rows("torch/xpu/__init__.py", _GPU, "synchronize"),
    # Files of models.
    **_rows("torch/serialization.py", _CHECKPOINT, "save", "_save", "load", "_load",
            "_legacy_load", "_legacy_save", "load_tensor"),
    **_rows("safetensors/torch.py", _CHECKPOINT),
    **_rows("torch/utils/file_baton.py", _FILE_LOCK, "wait"),
    **_rows("torch/utils/cpp_extension.py", _COMPILE, "_run_ninja_build", "_jit_compile",
            "_write_ninja_file_and_build_library"),
    # DeepSpeed.
    **_rows("deepspeed/comm/comm.py", _START, "init_distributed", "mpi_discovery",
            "initialize_mesh_device", "new_group"),
    ("destroy_process_group", "deepspeed/comm/comm.py"): _END,
    **_rows("deepspeed/comm/comm.py", COLLECTIVE),
    **_rows("deepspeed/comm/torch.py", COLLECTIVE),
    **_rows("deepspeed/comm/ccl.py", COLLECTIVE),
    **_rows("deepspeed/comm/mori.py", COLLECTIVE),
    **_rows("deepspeed/runtime/zero/partition_parameters.py", COLLECTIVE, "wait"),
    **_rows("deepspeed/runtime/pipe/p2p.py", _PEER),
    # Megatron.
    **_rows("megatron/core/pipeline_parallel/p2p_communication.py", _PEER),
    # Horovod.
    **_rows("horovod/torch/mpi_ops.py", COLLECTIVE, "synchronize", "join", "barrier"),
    # Ray: the main thread of a worker takes tasks; a training runs in a thread beside it.
    ("main_loop", "ray/_private/worker.py"): _IDLE,
    **_rows("ray/train/collective/collectives.py", COLLECTIVE),
    **_rows("ray/train/v2/_internal/execution/collective_impl.py", COLLECTIVE),
    **_rows("ray/util/collective/collective.py", COLLECTIVE),
    # JAX: jax/_src/distributed.py, array.py, api.py, and experimental/multihost_utils.py.
    **_rows("jax/_src/distributed.py", _START, "initialize"),
    **_rows("jax/_src/xla_bridge.py", _START, "make_cpu_client", "make_gpu_client",
            "_init_backend"),
    **_rows("jax/_src/distributed.py", _END, "shutdown"),
    **_rows("jax/experimental/multihost_utils.py", COLLECTIVE),
    **_rows("jax/_src/api.py", _GPU, "block_until_ready"),
    **_rows("jax/_src/array.py", _GPU, "_value", "block_until_ready"),
    # CPython: children, the end of the program, debuggers, a keyboard.
    ("_exit_function", "multiprocessing/util.py"): _CHILD_EXIT,
    ("_shutdown", "threading.py"): _EXIT,
    ("_python_exit", "concurrent/futures/thread.py"): _EXIT,
    **_rows("pdb.py", _DEBUGGER),
    **_rows("bdb.py", _DEBUGGER),
    **_rows("cmd.py", _DEBUGGER, "cmdloop"),
    **_rows("pudb/debugger.py", _DEBUGGER),
    **_rows("IPython/terminal/debugger.py", _DEBUGGER),
    **_rows("debugpy/_vendored/pydevd/pydevd.py", _DEBUGGER,
            "do_wait_suspend", "_do_wait_suspend"),
    **_rows("code.py", _INPUT, "interact", "raw_input"),
    **_rows("getpass.py", _INPUT),
    # filelock: filelock/_api.py and its kin; fasteners and portalocker have the same purpose.
    **_rows("filelock/_api.py", _FILE_LOCK, "acquire", "_acquire", "__enter__"),
    **_rows("filelock/_unix.py", _FILE_LOCK),
    **_rows("filelock/_soft.py", _FILE_LOCK),
    **_rows("fasteners/process_lock.py", _FILE_LOCK),
    **_rows("portalocker/utils.py", _FILE_LOCK),
}  # fmt: skip

#: Files below a directory of this name, the first that fits; _RUN: runs compiled code.
_DIRECTORY_HINTS: tuple[tuple[str, Hint], ...] = (
    ("torch/distributed/checkpoint/_pg_transport.py", _PEER),
    ("torch/distributed/checkpoint/", _CHECKPOINT),
    ("lightning/pytorch/plugins/io/", _CHECKPOINT),
    ("orbax/checkpoint/", _CHECKPOINT),
    ("deepspeed/runtime/checkpoint_engine/", _CHECKPOINT),
    ("deepspeed/runtime/swap_tensor/", _FILE),
    ("deepspeed/ops/op_builder/", _COMPILE),
    # Modules that run compiled code, and that compile it (torch 2.15: eval_frame.py and
    # output_code.py call compiled code).
    ("torch/_dynamo/eval_frame.py", _RUN),
    ("torch/_dynamo/external_utils.py", _RUN),
    ("torch/_inductor/output_code.py", _RUN),
    ("torch/_inductor/cudagraph_trees.py", _RUN),
    ("torch/_inductor/utils.py", _RUN),
    ("torch/_inductor/runtime/", _RUN),
    ("torch/_inductor/", _COMPILE),
    ("torch/_dynamo/", _COMPILE),
    ("triton/compiler/", _COMPILE),
    ("triton/backends/", _COMPILE),
    ("triton/runtime/build.py", _COMPILE),
    ("importlib._bootstrap", _IMPORT),
)

#: Places that wait only as the last call: their calls are the program's work.
_LAST_ACTIVITIES = frozenset({_BACKWARD.activity, _GPU.activity})

#: Places at which any code waits: their caller is more informative, if known.
_COMMON_FUNCTION_HINTS: dict[tuple[str, str], Hint] = {
    **_rows("threading.py", _LOCK, "wait", "wait_for", "acquire", "join",
            "_wait_for_tstate_lock", "_join_thread", "__enter__"),
    **_rows("queue.py", _LOCK, "get", "put", "join"),
    **_rows("subprocess.py", _CHILD, "wait", "_wait", "_try_wait", "communicate",
            "_communicate", "run", "call", "check_call", "check_output", "__exit__",
            "_execute_child", "__init__"),
    **_rows("multiprocessing/queues.py", _CHILD, "get", "put"),
    **_rows("multiprocessing/connection.py", _CHILD, "wait", "poll", "_poll", "recv",
            "recv_bytes", "_recv", "_recv_bytes", "_send", "_send_bytes", "send_bytes", "send"),
    **_rows("multiprocessing/synchronize.py", _CHILD, "wait", "__enter__", "acquire"),
    **_rows("multiprocessing/process.py", _CHILD, "join"),
    **_rows("multiprocessing/popen_fork.py", _CHILD, "poll", "wait"),
    **_rows("multiprocess/popen_fork.py", _CHILD, "poll", "wait"),
    **_rows("ray/_private/worker.py", _NETWORK, "get", "get_objects", "wait"),
    **_rows("ray/_private/client_mode_hook.py", _RUN, "wrapper"),
    **_rows("ray/_private/auto_init_hook.py", _RUN, "auto_init_wrapper"),
    **_rows("multiprocessing/pool.py", _CHILD, "get", "wait", "next", "join"),
    **_rows("concurrent/futures/_base.py", _LOCK, "result", "wait", "as_completed"),
    **_rows("concurrent/futures/thread.py", _LOCK, "shutdown"),
    **_rows("asyncio/base_events.py", _LOOP, "_run_once", "run_forever", "run_until_complete"),
    **_rows("asyncio/runners.py", _LOOP, "run"),
    **_rows("selectors.py", _NETWORK, "select", "poll"),
    **_rows("socket.py", _NETWORK, "readinto", "recv", "accept", "create_connection",
            "getaddrinfo"),
    **_rows("ssl.py", _NETWORK, "read", "recv", "recv_into", "do_handshake"),
    **_rows("urllib3/connectionpool.py", _NETWORK),
    **_rows("http/client.py", _NETWORK),
    **_rows("asyncio/streams.py", _NETWORK),
    **_rows("multiprocessing/managers.py", _NETWORK),
    **_rows("zmq/sugar/socket.py", _NETWORK),
    **_rows("zmq/sugar/poll.py", _NETWORK),
    **_rows("grpc/_channel.py", _NETWORK), **_rows("grpc/_common.py", _LOCK),
    **_rows("pathlib.py", _FILE, "open", "read_text", "read_bytes", "stat", "exists", "iterdir"),
    **_rows("pathlib/_local.py", _FILE, "open", "read_text", "read_bytes", "stat", "exists",
            "iterdir"),
    **_rows("pathlib/__init__.py", _FILE, "open", "read_text", "read_bytes", "stat", "exists",
            "iterdir"),
    **_rows("genericpath.py", _FILE),
    **_rows("shutil.py", _FILE),
    **_rows("numpy/lib/_npyio_impl.py", _FILE, "load", "save"),
    **_rows("numpy/lib/npyio.py", _FILE, "load", "save"),
    ("wrapper", "torch/distributed/c10d_logger.py"): COLLECTIVE,
    ("__call__", "torch/_ops.py"): _RUN,
    ("decorate_context", "torch/utils/_contextlib.py"): _RUN,
    ("wrapped_fn", "deepspeed/utils/nvtx.py"): _RUN,
    ("_fn", "torch/_dynamo/eval_frame.py"): _RUN,
}  # fmt: skip

_LOADER_WORKER = ("worker", "is a data loader's worker, in the data set's own code")
_LIGHTNING_CALLBACK = ("hook", "is in a callback, which Lightning calls")
_BACKWARD_HOOK = (
    "hook", "is in the program's own code that the backward pass calls (a hook, a Function)",
)  # fmt: skip

#: Libraries that call the user's code: the caller, named before the awaited object. The first row
#: counts that has a call on the stack, from the user's code outwards.
_CALLER_TEXTS: dict[tuple[str, str], tuple[str, str]] = {
    ("_worker_loop", "torch/utils/data/_utils/worker.py"): _LOADER_WORKER,
    ("_worker_loop", "torchdata/stateful_dataloader/worker.py"): _LOADER_WORKER,
    ("fetch", "torch/utils/data/_utils/fetch.py"): (
        "dataset", "is in the data set's own code, which the data loader calls in this very "
        "process (num_workers=0)",
    ),
    ("_next_index", _LOADER): (
        "dataset", "is in the sampler's own code, which the data loader calls",
    ),
    ("_pin_memory_loop", "torch/utils/data/_utils/pin_memory.py"): (
        "dataset", "is in the data set's own pin_memory()",
    ),
    ("_engine_run_backward", "torch/autograd/graph.py"): _BACKWARD_HOOK,
    ("backward", "torch/autograd/__init__.py"): _BACKWARD_HOOK,
    ("apply", "torch/autograd/function.py"): _BACKWARD_HOOK,
    ("_call_callback_hooks", "lightning/pytorch/trainer/call.py"): _LIGHTNING_CALLBACK,
    ("_call_callback_hooks", "pytorch_lightning/trainer/call.py"): _LIGHTNING_CALLBACK,
    ("call_event", "transformers/trainer_callback.py"): (
        "hook", "is in a callback, which the trainer calls",
    ),
    ("save", "torch/serialization.py"): (
        "hook", "is in the program's own code that is called while a checkpoint is saved",
    ),
    ("load", "torch/serialization.py"): (
        "hook", "is in the program's own code that is called while a checkpoint is loaded",
    ),
    ("_find_and_load", "importlib._bootstrap>"): (
        "import", "is in code that runs while a module is imported",
    ),
    ("_run_once", "asyncio/base_events.py"): (
        "asyncio", "is in a callback or coroutine, and asyncio's loop stands meanwhile",
    ),
}  # fmt: skip

#: Words in a native symbol, the first match from the innermost frame on.
_NATIVE_HINTS: tuple[tuple[str, Hint], ...] = (
    ("take_gil", _GIL),
    ("ncclCommInitRank", _START),
    ("ncclCommInit", _START),
    ("TCPStore::", _STORE),
    ("TCPClient::", _STORE),
    ("FileStore::", _STORE),
    ("PrefixStore::", _STORE),
    ("ProcessGroupNCCL::broadcastUniqueNCCLID", _START),
    ("ncclCommAbort", _END),
    ("ncclCommDestroy", _END),
    ("ncclCommFinalize", _END),
    ("ProcessGroupNCCL::", COLLECTIVE),
    ("ProcessGroupGloo::", COLLECTIVE),
    ("ProcessGroupMPI::", COLLECTIVE),
    ("ProcessGroupUCC::", COLLECTIVE),
    ("ProcessGroupXCCL::", COLLECTIVE),
    ("gloo::", COLLECTIVE),
    ("MPI_", COLLECTIVE),
    ("c10d::Work::wait", COLLECTIVE),
    ("c10d::Reducer::", COLLECTIVE),
    ("c10d::wait_tensor", COLLECTIVE),
    ("nccl", COLLECTIVE),
    ("StreamSynchronize", _GPU),
    ("DeviceSynchronize", _GPU),
    ("EventSynchronize", _GPU),
    ("CtxSynchronize", _GPU),
    ("hipMemcpy", _GPU),
    ("cudaMemcpy", _GPU),
    ("torch::autograd::Engine::", _BACKWARD),
)

#: Maximum frames of libraries without a row between the innermost frame and a known one: a library
#: has helpers below a known call, but at a larger distance the call is unrelated.
_MAX_DISTANCE = 4
#: Number of innermost frames that are searched.
_MAX_DEPTH = 64

# --- Whose code a frame is.

#: Packages that are no user's program, by the names under which py-spy prints their files.
_LIBRARIES = frozenset((
    "IPython", "PIL", "absl", "accelerate", "aiohttp", "anyio", "apex", "attr", "av", "awscli",
    "bitsandbytes", "boto3", "botocore", "certifi", "chex", "click", "cloudpickle",
    "colossalai", "composer", "cupy", "cv2", "dask", "datasets", "debugpy", "decord",
    "deepspeed", "dill", "diffusers", "distributed", "einops", "etils", "fasteners", "filelock",
    "fire", "flash_attn", "flax", "fsspec", "functorch", "gcsfs", "gevent", "google", "grain",
    "grpc", "h5py", "horovod", "httpcore", "httpx", "huggingface_hub", "hydra",
    "importlib_metadata", "ipykernel", "jax", "jaxlib", "joblib", "keras", "kornia",
    "lightning", "lightning_fabric", "lightning_utilities", "litdata", "loguru", "lz4",
    "megatron", "mlflow", "mpi4py", "msgpack", "multiprocess", "neptune", "nest_asyncio",
    "numba", "numpy", "nvidia", "omegaconf", "optax", "orbax", "orjson", "packaging", "pandas",
    "peft", "pkg_resources", "pluggy", "polars", "portalocker", "psutil", "pudb", "pyarrow",
    "pydantic", "pydantic_core", "pydevd", "pymongo", "pytest", "pytorch_lightning", "ray",
    "redis", "regex", "requests", "rich", "s3fs", "s3transfer", "safetensors", "scipy",
    "sentencepiece", "sglang", "site-packages", "six", "sklearn", "smart_open", "soundfile",
    "spacy", "sqlalchemy", "starlette", "streaming", "sympy", "tensorboard", "tensorboardX",
    "tensorflow", "tensorstore", "tiktoken", "timm", "tokenizers", "torch", "torchao",
    "torchaudio", "torchdata", "torchgen", "torchmetrics", "torchrec", "torchtext",
    "torchvision", "tornado", "tqdm", "transformer_engine", "transformers", "triton", "trl",
    "typing_extensions", "urllib3", "uvicorn", "uvloop", "vllm", "wandb", "webdataset", "wrapt",
    "xarray", "xformers", "yaml", "yarl", "zarr", "zmq", "zstandard",
))  # fmt: skip
#: With modules that older versions of Python have.
_STANDARD_MODULES = sys.stdlib_module_names | {"lib2to3", "asyncore", "distutils", "imp"}
#: Directories in which users keep no programs.
_INSTALLED_PATH = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python\d[\d.]*|lib-dynload|lib64/python\d[\d.]*)/"
)
#: Files whose code was typed in by a user (IPython, ``python -``).
_INTERACTIVE_FILE = re.compile(
    r"<(stdin|ipython-input[^>]*|ipython[^>]*)>|.*/?ipykernel_\d+/\d+\.py"
)
#: Python's calls outside of a script that lead to it.
_RUNNERS = frozenset({"runpy.py", "<frozen runpy>", "<string>"})


def _is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package, by its name.

    py-spy prints a file from its outermost package on (`torch/nn/modules/module.py`), or whole
    where it cannot see the packages.
    """
    if _INTERACTIVE_FILE.fullmatch(file):
        return False
    if file.startswith("<") or not file.endswith(".py") or _INSTALLED_PATH.search(file):
        return True
    top = file.lstrip("/").partition("/")[0]
    if top == file:
        return top[:-3] in _STANDARD_MODULES or top[:-3] in _LIBRARIES
    # The whole path of a user's program is no package.
    return not file.startswith("/") and (top in _LIBRARIES or top in _STANDARD_MODULES)


_MAIN_MODULE = "<module>"


def _program_file(frames: Sequence[Frame]) -> str:
    """The file of the started program, which is the user's even if it is called `queue.py`.

    "": the program is a part of Python or of a library.
    """
    for frame in frames[:6]:
        if frame.function == _MAIN_MODULE and frame.file not in _RUNNERS:
            installed = _INSTALLED_PATH.search(frame.file) or frame.file.startswith("<frozen")
            is_library = frame.file.partition("/")[0] in _LIBRARIES
            return "" if installed or is_library else frame.file
        if frame.file == "<string>" and frame.function == _MAIN_MODULE:
            # ``python -c``; in a process of multiprocessing it is the starter's, not the user's.
            after = frames[1:2]
            return "" if after and after[0].file.startswith("multiprocess") else "<string>"
        if frame.file not in _RUNNERS:
            return ""
    return ""


def is_own(frame: Frame, program_file: str) -> bool:
    """Whether a frame is the user's own code. program_file: the file of the started program"""
    return frame.file == program_file != "" or not _is_library(frame.file)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost call of the user's own code; None: the stack has none."""
    program_file = _program_file(frames)
    for frame in reversed(frames):
        if frame.function != "..." and is_own(frame, program_file):
            return frame
    return None


def call_site(frames: Sequence[Frame]) -> tuple[int, ...]:
    """The lines of the user's calls: ranks that wait at other lines wait in another call."""
    program_file = _program_file(frames)
    return tuple(frame.line for frame in frames if is_own(frame, program_file))


#: Activities of polling loops: locks of filelock and of torch's file_baton.py, and
#: a child with a time limit (subprocess.py).
_POLLING_ACTIVITIES = frozenset({"file-lock", "child"})


def polls(frames: Sequence[Frame]) -> int:
    """Number of frames that lead to a polling call; 0: none does."""
    program_file = _program_file(frames)
    depth = 0
    for at in range(len(frames) - 1, max(-1, len(frames) - 9), -1):
        if is_own(frames[at], program_file):
            break
        hint = _find(frames[at], _FUNCTION_HINTS) or _find(frames[at], _COMMON_FUNCTION_HINTS)
        if hint and hint.activity in _POLLING_ACTIVITIES:
            depth = at + 1
    return depth


#: Files of pipelines' engines and schedules.
_PIPELINES = (
    "torch/distributed/pipelining/", "torch/distributed/pipeline/", "deepspeed/runtime/pipe/",
    "megatron/core/pipeline_parallel/", "fairscale/nn/pipe/",
)  # fmt: skip


def is_idle_worker(text: str) -> bool:
    """Whether a hint says that a loader's worker has nothing to do."""
    return text == _IDLE_WORKER.text


def in_pipeline(frames: Sequence[Frame]) -> bool:
    """Whether a stack belongs to a stage of a pipeline."""
    return any(word in frame.file for frame in frames for word in _PIPELINES)


# --- Main threads that only wait for another thread, whose stack shows the awaited object.

#: Last calls of a main thread that waits for threads of its process.
_DELEGATES: dict[tuple[str, str], bool] = dict.fromkeys(
    [
        ("main_loop", "ray/_private/worker.py"),
        ("join", "threading.py"),
        ("wait", "threading.py"),
        ("wait_for", "threading.py"),
        ("_wait_for_tstate_lock", "threading.py"),
        ("_shutdown", "threading.py"),
        ("get", "queue.py"),
        ("put", "queue.py"),
        ("join", "queue.py"),
        ("result", "concurrent/futures/_base.py"),
        ("exception", "concurrent/futures/_base.py"),
        ("as_completed", "concurrent/futures/_base.py"),
        ("wait", "concurrent/futures/_base.py"),
        ("shutdown", "concurrent/futures/thread.py"),
        ("_python_exit", "concurrent/futures/thread.py"),
        ("get", "multiprocessing/pool.py"),
        ("wait", "multiprocessing/pool.py"),
        ("next", "multiprocessing/pool.py"),
        ("serve_forever", "socketserver.py"),
        ("_run_once", "asyncio/base_events.py"),
        ("_engine_run_backward", "torch/autograd/graph.py"),
        ("backward", "torch/autograd/__init__.py"),
    ],
    True,
)
#: Callers of the program's code in a thread that serves requests over a connection.
_DISPATCHERS: dict[tuple[str, str], bool] = dict.fromkeys(
    [
        ("_run_function", "rpc/internal.py"),
        # py-spy has no package for a thread that C++ has started.
        ("_run_function", "internal.py"),
        ("process_request_thread", "socketserver.py"),
        ("_call_behavior", "grpc/_server.py"),
    ],
    True,
)
#: Threads of multiprocessing's pools that pass on work, and the place where its threads wait.
_HANDLERS = dict.fromkeys(
    ((f"_handle_{role}", "multiprocessing/pool.py") for role in ("workers", "tasks", "results")),
    True,
)
_IDLE_WORKERS = {
    ("worker", "multiprocessing/pool.py"): True, ("_worker", "concurrent/futures/thread.py"): True,
    # Threads of gRPC that pass on requests.
    ("_serve", "grpc/_server.py"): True, ("channel_spin", "grpc/_channel.py"): True,
}  # fmt: skip
#: Frame of a working thread of a pool.
_POOL = {("run", "concurrent/futures/thread.py"): True}
#: Serving threads, for which no program waits.
_SERVERS = re.compile(
    r"tqdm/_monitor\.py|torch/_inductor/compile_worker|wandb/|mlflow/"
    r"|tensorboard|prometheus|ray/_private|logging/handlers\.py|multiprocessing/queues\.py"
    r"|multiprocessing/resource_sharer\.py|torch/distributed/_watchdog\.py|_monitor_target"
    r"|torch/distributed/elastic/|IPython|ipykernel|zmq"
    r"|debugpy|pydevd"
)


def delegates(frames: Sequence[Frame]) -> bool:
    """Whether a main thread with this stack only waits for another thread of its process."""
    last = frames[-1:]
    if last and last[0].function.endswith("select") and last[0].file == "selectors.py":
        last = frames[-2:-1]
    return bool(last and _find(last[0], _DELEGATES))


def pooled(frames: Sequence[Frame]) -> bool:
    """Whether a stack waits for a pool of threads, or works in one."""
    if any(frame.file.endswith("concurrent/futures/_base.py") for frame in frames[-3:]):
        return True
    return any(_find(frame, _POOL) for frame in frames[:5])


def dispatched(frames: Sequence[Frame]) -> bool:
    """Whether a thread with this stack runs the user's code on request of another rank."""
    at = next((at for at, frame in enumerate(frames) if _find(frame, _DISPATCHERS)), None)
    return at is not None and user_frame(frames[at:]) is not None


def serves(frames: Sequence[Frame]) -> bool:
    """Whether a thread with this stack only serves, so that its program does not wait for it."""
    if not frames:
        return True
    leaf = frames[-1]
    words = [f"{frame.file} {frame.function}" for frame in frames[:4]]
    if any(frame.function == "_pin_memory_loop" for frame in frames[:4]):
        # The batch is at the place that requested it, or in the user's pin_memory().
        return leaf.function == "_pin_memory_loop" or leaf.file.startswith("multiprocessing/")
    if any(_find(frame, _HANDLERS) for frame in frames[:5]) or _find(leaf, _IDLE_WORKERS):
        return True
    return any(map(_SERVERS.search, words[:-1] if len(frames) > 4 else words)) or bool(
        _SERVERS.search(f"{leaf.file} {leaf.function}")
    )


# --- Wait channels of the kernel, and the system call in /proc.

#: Beginning of a kernel function -> what a process waits for in it, and what to look at.
#: Sources: fs/fuse/dev.c, net/sunrpc/sched.c, fs/nfs, Lustre's ptlrpc and ldlm, fs/ceph, fs/smb,
#: GPFS's portability layer (cxi), mm/filemap.c, block, fs/jbd2, fs/xfs, mm/page-writeback.c,
#: NVIDIA's kernel-open (os_*, nv_*, uvm_*), drivers/gpu/drm/amd, drivers/dma-buf,
#: drivers/infiniband, fs/pipe.c, fs/locks.c, drivers/tty/n_tty.c, kernel/time, kernel/exit.c.
_CHANNEL_HINTS: tuple[tuple[str, Hint], ...] = (
    (r"request_wait_answer|__?fuse_|fuse_", Hint(
        "storage", "waits for the server of a FUSE file system (sshfs, s3fs, gcsfuse, ...), which "
        "does not answer: look whether that process lives, and at its log")),
    (r"rpc_wait_bit_killable|rpc_|__?rpc_|nfs\d?_|__?nfs|nfs", Hint(
        "storage", "waits for an NFS server that does not answer: look at the mount, the server, "
        "and dmesg for 'not responding'")),
    (r"ptlrpc_|ldlm_|ll_|osc_|cl_|lov_|mdc_|lustre_|obd_", Hint(
        "storage", "waits for Lustre: look at dmesg for lost servers and evictions "
        "(`lfs check servers`)")),
    (r"cxi|gpfs|mmfs|kxWait|cxiWait", Hint(
        "storage", "waits for GPFS (Storage Scale): look at `mmdiag --waiters` on that node")),
    (r"ceph_|__?ceph", Hint("storage", "waits for Ceph: look at the mount and `ceph health`")),
    (r"cifs_|smb2?_|SendReceive|compound_send_recv|wait_for_response", Hint(
        "storage", "waits for an SMB server: look at the mount and at dmesg")),
    (r"beegfs|Fhgfs|weka|afs_|orangefs|p9_|virtio_fs|v9fs", Hint(
        "storage", "waits for a network file system: look at the mount and at dmesg")),
    (r"balance_dirty_pages|wb_wait|wait_on_page_writeback|folio_wait_writeback", Hint(
        "storage", "waits until data that it wrote is on disk: the file system is slower than the "
        "job writes")),
    (r"io_schedule|folio_wait|wait_on_page|__?wait_on_bit|__?lock_page|blk_|submit_bio|jbd2|xfs_"
     r"|ext4_|btrfs_|wait_on_buffer|__?wait_on_buffer|bit_wait_io|md_|raid|nvme_|iomap_", Hint(
        "storage", "waits for a disk or a file system: look at dmesg for I/O errors, and at the "
        "device")),
    (r"os_acquire_|os_wait_|os_|nv_|nvidia|_nv\d+rm|rm_|uvm_|__?uvm", Hint(
        "driver", "waits in NVIDIA's driver: look at dmesg for Xid and at `nvidia-smi` (which may "
        "hang as well)")),
    (r"amdgpu|kfd_|svm_range|dma_fence|drm_|ttm_", Hint(
        "driver", "waits in the GPU's driver: look at dmesg for amdgpu and `amd-smi`")),
    (r"ib_|mlx[45]_|rdma_|uverbs|ucma_|efa_|cxip|hfi1_|bnxt_re|irdma", Hint(
        "driver", "waits in the driver of an RDMA adapter: look at dmesg and at its ports")),
    (r"rwsem_down|down_read|down_write|__?down_|mutex_lock|__?mutex", Hint(
        "driver", "waits for a lock in the kernel that another process holds: look at dmesg for "
        "hung tasks")),
    (r"mem_cgroup|shrink_|throttle_direct_reclaim|try_to_free|do_try_to_free|swap_", Hint(
        "memory", "waits for memory: the node or its cgroup has none left; look at dmesg and the "
        "job's limit")),
    (r"do_coredump|coredump_|vfs_coredump|dump_emit|elf_core_dump", _CORE),
)  # fmt: skip
_CHANNELS_COMPILED = tuple((re.compile(pattern), hint) for pattern, hint in _CHANNEL_HINTS)
#: The same for a process that sleeps: any call may wait here, so a known place overrides it.
_SLEEPING_HINTS: tuple[tuple[str, Hint], ...] = (
    (r"(anon_)?pipe_write|anon_pipe_write", _OUTPUT),
    (r"(anon_)?pipe_read|anon_pipe_read|wait_for_partner|fifo_open", _PIPE),
    (r"n_tty_read|tty_read|tty_", _INPUT),
    (r"flock_lock_inode_wait|locks_lock_inode_wait|posix_lock_inode_wait|fcntl_setlk|__?flock"
     r"|locks_", _FILE_LOCK),
    (r"hrtimer_nanosleep|do_nanosleep|clock_nanosleep|common_nsleep", _SLEEP),
    (r"do_wait|kernel_wait4|do_wait4|wait4|kernel_waitid", _CHILD),
    (r"(sk|unix|tcp|inet)_|unix_stream|skb_wait|__?skb_wait|wait_woken_sock", _NETWORK),
    (r"futex_", _NATIVE),
)  # fmt: skip
_SLEEPING_COMPILED = tuple((re.compile(pattern), hint) for pattern, hint in _SLEEPING_HINTS)
#: First words of a thread's wait (`nodeready.agent.stacks.waits`) -> the same.
_SYSTEM_CALL_HINTS: tuple[tuple[str, Hint], ...] = (
    (r"read of /dev/(pts|tty)", _INPUT),
    (r"write of a pipe", _OUTPUT),
    (r"(read|open) of a pipe", _PIPE),
    (r"flock|lock ", _FILE_LOCK),
    (r"sleep\b", _SLEEP),
    (r"wait for (any )?child", _CHILD),
    # A library's thread, as in zmq, has the connections, and wakes the caller by eventfd(2).
    (r"(recv|send|connect|accept)\b|(read|poll|select|epoll) of eventfd$", _NETWORK),
    (r"(read|write|open|stat|access|fsync|fdatasync|getdents|rename|unlink|mkdir) of /", _FILE),
    (r"futex\b", _NATIVE),
)  # fmt: skip
_CALLS_COMPILED = tuple((re.compile(pattern), hint) for pattern, hint in _SYSTEM_CALL_HINTS)


def in_kernel(channel: str) -> Hint | None:
    """What a process in state D waits for in this function of the kernel; None: not known."""
    name = channel.partition("+")[0].strip()
    for pattern, hint in _CHANNELS_COMPILED:
        if pattern.match(name):
            return hint
    return next((hint for pattern, hint in _SLEEPING_COMPILED[:4] if pattern.match(name)), None)


def _sleeping_hint(channel: str, waits_on: str, master: str) -> Hint | None:
    """The kernel's hint on a thread that waits below the user's code; see `find`."""
    port = master.rpartition(":")[2]
    if port.isdigit() and re.match(rf"(recv|poll|read|connect|send)\b.*:{port}\b", waits_on):
        return _STORE
    # The name of a file may look like that of a pipe.
    piped = next(
        (hint for pattern, hint in _SLEEPING_COMPILED[:3] if pattern.match(channel)), None
    )
    if piped:
        return piped
    for pattern, hint in _CALLS_COMPILED:
        if pattern.match(waits_on):
            return hint
    for pattern, hint in (*_SLEEPING_COMPILED, *_CHANNELS_COMPILED):
        if pattern.match(channel):
            return hint
    return None


# --- The hint of a stack.


def for_rank(ranks: str) -> Hint:
    """The hint on a wait for these ranks (``rank 3``), from the peers of its connections."""
    return _RANK._replace(text=_RANK.text.replace("another rank, which has", f"{ranks}, at"))


def _find(frame: Frame, table: Mapping[tuple[str, str], _T]) -> _T | None:
    parts = frame.file.split("/")
    # From Python 3.11 on py-spy prints a method with its class.
    function = frame.function.rpartition(".")[2]
    # py-spy prints a file from its package on, or whole where it cannot see the packages.
    for length in range(1, min(len(parts), 6) + 1):
        end = "/".join(parts[-length:])
        value = table.get((function, end)) or table.get(("*", end))
        if value:
            return value
    return None


class _PythonStack(NamedTuple):
    """The hints of Python's frames."""

    called: Hint | None = None  # hint of a known call
    common: Hint | None = None  # hint of the place itself, where any program waits
    # library that calls the innermost code of the user: (activity, words)
    caller: tuple[str, str] | None = None


def _caller(frames: Sequence[Frame]) -> tuple[str, str] | None:
    """The library that calls the user's code, from the user's code outwards."""
    caller = None
    for frame in reversed(frames[-_MAX_DEPTH:]):
        candidate = _find(frame, _CALLER_TEXTS)
        # A worker has `fetch` on its stack as well, and is more informative.
        if candidate and (caller is None or candidate[0] == "worker"):
            caller = candidate
    return caller


def _in_python(frames: Sequence[Frame]) -> _PythonStack:
    common: Hint | None = None
    unknown = known_frames = 0
    program_file = _program_file(frames)
    worker = any(frame.function == "_worker_loop" for frame in frames)
    for at in range(len(frames) - 1, max(-1, len(frames) - 1 - _MAX_DEPTH), -1):
        frame = frames[at]
        is_users = is_own(frame, program_file)
        hint = None if is_users else _find(frame, _FUNCTION_HINTS)
        if hint is None and not is_users:
            hint = next((hint for word, hint in _DIRECTORY_HINTS if word in frame.file), None)
        if hint and hint.text:
            if hint.activity in _LAST_ACTIVITIES and at < len(frames) - 1 and unknown:
                return _PythonStack(None, common)
            return _PythonStack(_IDLE_WORKER if worker and hint is _DATA else hint, common)
        if worker and frame.function == "_worker_loop":
            return _PythonStack(_IDLE_WORKER if known_frames or not unknown else None, common)
        if is_users:
            return _PythonStack(None, common, _caller(frames[:at]))
        place = _find(frame, _COMMON_FUNCTION_HINTS)
        if place is None and hint is None:
            caller = _find(frame, _CALLER_TEXTS)
            if caller and caller[0] == "dataset":
                return _PythonStack(None, common, _caller(frames[: at + 1]))
            unknown += 1
            if unknown > _MAX_DISTANCE:
                break
        else:
            known_frames += 1
            if common is None and place is not None and place.text and not unknown:
                common = place
            elif (common is _NETWORK and place in (_LOOP, _CHILD)) or (
                common is _LOCK and place in (_CHILD, _NETWORK)
            ):
                # It waits in select(), or at a lock, for another thread or process.
                common = place
    return _PythonStack(None, common)


def of_native(frames: Sequence[Frame]) -> Hint | None:
    """The hint of native frames; None: not known."""
    for frame in reversed(frames[-_MAX_DEPTH:]):
        for word, hint in _NATIVE_HINTS:
            if word in frame.function:
                return hint
    return None


def of_thread(
    main: Sequence[Frame],
    other: Sequence[Frame],
    native: Sequence[Frame] = (),
    *,
    lock: bool = False,
) -> Hint | None:
    """The hint on a thread for which the main thread waits. lock: it holds Python's lock"""
    hint, main_hint = find(other, native), find(main)
    if main_hint and main_hint.activity in ("compile", "checkpoint", "data") and (
        hint is None or hint.activity in ("lock", "child", "native", "network")
    ):  # fmt: skip
        return main_hint
    if lock:
        text = (
            "waits for Python's global lock, which this thread keeps: a call of C that does not "
            "give it back, or a loop"
        )
        return Hint("gil", text)
    if main_hint and main_hint.activity == "exit":
        text = "is at the end of its program, and Python waits for this thread, which is no daemon"
        return Hint(hint.activity if hint else "exit", f"{text}: it {hint.text}" if hint else text)
    return hint


def find(
    frames: Sequence[Frame],
    native: Sequence[Frame] = (),
    *,
    channel: str = "",
    waits_on: str = "",
    master: str = "",
) -> Hint | None:
    """The hint of a stack; None: it ends at no known place.

    frames, native: root to leaf. A wait for Python's lock comes first: the call of the Python
    frames is then not the awaited one.
    channel, waits_on: the wait in the kernel of all main threads with this stack; "": none, or
    different waits. They show the wait of a call of C below the user's code, which the frames
    do not
    master: MASTER_ADDR:MASTER_PORT, where the job's store is
    """
    native_hint = of_native(native)
    if native_hint is _GIL:
        return native_hint
    python_stack = _in_python(frames)
    if python_stack.called and not (
        native_hint and python_stack.called.activity in _VAGUE_ACTIVITIES
    ):
        return python_stack.called
    if native_hint:
        return native_hint
    hint = python_stack.called or python_stack.common
    if hint is None and frames:
        hint = _sleeping_hint(channel, waits_on, master)
    if python_stack.caller:
        activity, words = python_stack.caller
        return Hint(
            hint.activity if hint else activity, f"{words}: it {hint.text}" if hint else words
        )
    return hint
