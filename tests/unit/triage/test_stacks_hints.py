"""What known places wait for: the call that tells most, not the lock at the end of it."""

from __future__ import annotations

import pytest

from nodeready.triage.stacks import hints
from nodeready.triage.stacks.document import Frame
from tests.builders.traces import C10D, TRAIN, frames

LOADER = "torch/utils/data/dataloader.py"
FETCH = "fetch torch/utils/data/_utils/fetch.py 54"
WORKER = "_worker_loop torch/utils/data/_utils/worker.py 348"


def stack(text):
    return [Frame(*row) for row in frames(text)]


def find(text, native="", **more):
    found = hints.find(stack(text), stack(native), **more)
    return found.about if found else None


@pytest.mark.parametrize(
    ("ends", "about"),
    [
        (f"wrapper torch/distributed/c10d_logger.py 81 > all_reduce {C10D} 2806", "collective"),
        (f"monitored_barrier {C10D} 4000", "collective"),
        (f"all_reduce /opt/venv/lib/python3.11/site-packages/{C10D} 2806", "collective"),
        ("barrier deepspeed/comm/comm.py 407 > barrier deepspeed/comm/torch.py 1", "collective"),
        (f"recv {C10D} 2100", "peer"),
        (f"init_process_group {C10D} 900 > _env_rendezvous_handler "
         "torch/distributed/rendezvous.py 281 > _create_c10d_store "
         "torch/distributed/rendezvous.py 200", "start"),
        (f"_store_based_barrier {C10D} 700", "start"),
        (f"destroy_process_group {C10D} 2000", "end"),
        ("_try_get_data torch/utils/data/dataloader.py 1011 > get queue.py 179 > "
         "wait threading.py 306", "data"),
        ("_try_get_data torch/utils/data/dataloader.py 1 > get multiprocessing/queues.py 113 > "
         "poll multiprocessing/connection.py 257 > _poll multiprocessing/connection.py 424 > "
         "wait multiprocessing/connection.py 931 > select selectors.py 415", "data"),
        ("backward torch/_tensor.py 630 > backward torch/autograd/__init__.py 364 > "
         "_engine_run_backward torch/autograd/graph.py 865", "backward"),
        ("synchronize torch/cuda/__init__.py 1219", "gpu"),
        ("synchronize torch/cuda/streams.py 227", "gpu"),
        ("compile torch/_inductor/async_compile.py 90 > result concurrent/futures/_base.py 451 > "
         "wait threading.py 320", "compile"),
        ("save torch/serialization.py 600 > _save torch/serialization.py 800", "checkpoint"),
        ("save torch/distributed/checkpoint/state_dict_saver.py 1", "checkpoint"),
        ("_find_and_load <frozen importlib._bootstrap> 1176", "import"),
        ("communicate subprocess.py 1209 > _communicate subprocess.py 2113", "child"),
        ("wait threading.py 320", "lock"),
        ("get queue.py 171 > wait threading.py 320", "lock"),
        ("select selectors.py 415", "network"),
        ("read_text pathlib.py 1059", "file"),
        ("helper mine.py 1", None),
        ("all_reduce mine.py 1", None),
        ("save torch/serialization.py 6 > a a.py 1 > b b.py 1 > c c.py 1", "hook"),
        ("get queue.py 171 > mine mine.py 3", None),
        # What torch 2.15 calls: each seen in a rank that hung there.
        (f"wrapper torch/distributed/c10d_logger.py 83 > all_gather_single {C10D} 5430",
         "collective"),
        (f"new_group {C10D} 7137 > _new_group_with_tag {C10D} 7270 > _new_process_group_helper "
         f"{C10D} 3121 > _create_gloo_process_group {C10D} 757", "start"),
        ("step torch/distributed/pipelining/schedules.py 1190 > ScheduleGPipe._step_microbatches "
         "torch/distributed/pipelining/schedules.py 1321 > _wait_batch_p2p "
         "torch/distributed/pipelining/schedules.py 958", "peer"),
        ("foreach_all_gather_copy_out torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py "
         "517", "collective"),
        ("AsyncCollectiveTensor.wait torch/distributed/_functional_collectives.py 1240 > "
         "wait_tensor torch/distributed/_functional_collectives.py 130 > __call__ "
         "torch/_ops.py 1255 > redispatch_no_grad torch/_library/autograd.py 43 > "
         "OpOverload.redispatch torch/_ops.py 926", "collective"),
        ("FileBaton.wait torch/utils/file_baton.py 50", "file-lock"),
        ("BaseFileLock.acquire filelock/_api.py 1037 > BaseFileLock._poll_until_acquired "
         "filelock/_api.py 1177", "file-lock"),
        ("Bdb.trace_dispatch bdb.py 90 > Pdb.interaction pdb.py 440 > Pdb._cmdloop pdb.py 397 > "
         "Cmd.cmdloop cmd.py 126", "debugger"),
        ("run asyncio/runners.py 190 > BaseEventLoop._run_once asyncio/base_events.py 1884 > "
         "EpollSelector.select selectors.py 468", "asyncio"),
        ("_exit_function multiprocessing/util.py 334 > join multiprocessing/process.py 149 > "
         "wait multiprocessing/popen_fork.py 43 > poll multiprocessing/popen_fork.py 27", "exit"),
        ("_shutdown threading.py 1590", "exit"),
        ("barrier ray/train/collective/collectives.py 60 > get ray/_private/worker.py 2800",
         "collective"),
        ("train mine.py 4 > get ray/_private/worker.py 2800", "network"),
        ("main_loop ray/_private/worker.py 1071", "idle"),
        ("_StatefulMultiProcessingDataLoaderIter._try_get_data "
         "torchdata/stateful_dataloader/stateful_dataloader.py 1217 > "
         "Queue.get multiprocessing/queues.py 113 > poll multiprocessing/connection.py 257",
         "data"),
        ("sync_global_devices jax/experimental/multihost_utils.py 165", "collective"),
        ("_invoke_run torch/distributed/elastic/agent/server/api.py 900", "agent"),
        ("barrier torch/distributed/elastic/utils/store.py 200", "store"),
        # A model that was compiled is no compiler.
        ("_fn torch/_dynamo/eval_frame.py 929 > forward torch/nn/modules/linear.py 120", None),
        ("_fn torch/_dynamo/eval_frame.py 929 > compile_inner torch/_dynamo/convert_frame.py 9",
         "compile"),
        # Computing below a backward pass is no waiting in it.
        ("backward torch/autograd/__init__.py 364 > _engine_run_backward torch/autograd/graph.py "
         "865 > apply torch/autograd/function.py 307 > backward torch/utils/checkpoint.py 311 > "
         "linear torch/nn/functional.py 9", None),
        # Who calls the user's code is not what hangs.
        (f"__next__ {LOADER} 720 > _next_data {LOADER} 783 > {FETCH} > collate mine.py 4",
         "dataset"),
        (f"__next__ {LOADER} 720 > _next_data {LOADER} 783 > {FETCH} > default_collate "
         "torch/utils/data/_utils/collate.py 398", "dataset"),
        ("_engine_run_backward torch/autograd/graph.py 865 > hook mine.py 3", "hook"),
        (f"{WORKER} > {FETCH} > __getitem__ mine.py 4", "worker"),
        (f"{WORKER} > {FETCH} > __getitem__ mine.py 4 > get queue.py 171", "lock"),
        (f"{WORKER} > get multiprocessing/queues.py 113 > poll multiprocessing/connection.py 257",
         "worker"),
    ],
)  # fmt: skip
def test_a_place_says_what_it_waits_for(ends, about):
    assert find(f"{TRAIN} > {ends}") == about


@pytest.mark.parametrize(
    ("python", "native", "about"),
    [
        ("step train.py 4", "c10d::ProcessGroupNCCL::WorkNCCL::wait x.so 0", "collective"),
        ("step train.py 4", "gloo::transport::tcp::UnboundBuffer::waitRecv x.so 0 > "
         "pthread_cond_wait libc.so 0", "collective"),
        ("step train.py 4", "cudaStreamSynchronize libcudart.so 0 > sched_yield libc.so 0", "gpu"),
        ("step train.py 4", "c10d::TCPStore::doWait x.so 0 > poll libc.so 0", "store"),
        (f"all_reduce {C10D} 4", "take_gil ceval_gil.h 0 > pthread_cond_wait libc.so 0", "gil"),
        ("wait threading.py 320", "c10d::ProcessGroupGloo::barrier x.so 0", "collective"),
        ("step train.py 4", "poll libc.so 0", None),
        ("step train.py 4", "c10d::Work::wait libtorch_cpu.so 0 > pthread_cond_wait libc.so 0",
         "collective"),
        ("_engine_run_backward torch/autograd/graph.py 865", "cudaStreamSynchronize x.so 0",
         "gpu"),
    ],
)  # fmt: skip
def test_native_frames_tell_what_python_frames_do_not(python, native, about):
    assert find(python, native) == about


def test_every_hint_is_one_line_that_says_something():
    tables = [*hints._PLACES.values(), *hints._COMMON.values()]
    rows = (hints._BELOW, hints._SYMBOLS, hints._CHANNELS, hints._SLEEPING, hints._CALLS)
    found = {*tables, *(one for table in rows for _, one in table)}
    for hint in found - {hints.Hint("", "")}:
        assert hint.text.isprintable()
        assert hint.text.startswith(
            ("waits", "is ", "compiles", "saves", "imports", "reads", "writes", "sleeps", "has ")
        )


@pytest.mark.parametrize(
    ("channel", "about"),
    [
        ("request_wait_answer", "storage"), ("fuse_dev_do_read", "storage"),
        ("rpc_wait_bit_killable+0x1a/0x30", "storage"), ("nfs4_proc_getattr", "storage"),
        ("ptlrpc_set_wait", "storage"), ("ldlm_completion_ast", "storage"),
        ("cxiWaitEventWait", "storage"), ("io_schedule", "storage"),
        ("folio_wait_bit_common", "storage"), ("balance_dirty_pages", "storage"),
        ("os_acquire_rwlock_write", "driver"), ("uvm_va_block_lock", "driver"),
        ("amdgpu_fence_wait", "driver"), ("kfd_wait_on_events", "driver"),
        ("dma_fence_default_wait", "driver"), ("mlx5_cmd_exec", "driver"),
        ("mem_cgroup_handle_over_high", "memory"), ("do_coredump", "core"),
        ("anon_pipe_write", "output"), ("hrtimer_nanosleep", None), ("", None),
    ],
)  # fmt: skip
def test_the_function_of_the_kernel_names_whom_state_d_waits_for(channel, about):
    found = hints.in_kernel(channel)
    assert (found.about if found else None) == about


@pytest.mark.parametrize(
    ("channel", "waits_on", "about"),
    [
        ("anon_pipe_write", "write of a pipe that pid 7 (tee) reads", "output"),
        ("pipe_write", "", "output"),
        ("anon_pipe_read", "read of /run/fifo (ext4)", "pipe"),
        ("n_tty_read", "read of /dev/pts/3", "input"),
        ("wait_woken", "read of /dev/pts/3", "input"),
        ("locks_lock_inode_wait", "flock of /data/x (nfs4), held by pid 7 (python)", "file-lock"),
        ("hrtimer_nanosleep", "sleep", "sleep"),
        ("do_wait", "wait for child 55 (gcc)", "child"),
        ("poll_schedule_timeout", "poll of 10.0.0.1:29500", "store"),
        ("poll_schedule_timeout", "recv from 10.0.0.1:443", "network"),
        ("folio_wait_bit_common", "read of /data/shard-5 (nfs4)", "file"),
        ("futex_do_wait", "futex", "native"),
        ("", "", None),
    ],
)
def test_the_kernel_tells_what_a_call_of_c_below_the_users_own_code_waits_for(
    channel, waits_on, about
):
    told = {"channel": channel, "waits_on": waits_on, "master": "gpu1:29500"}
    assert find(TRAIN, **told) == about
    # A known call says more.
    assert find(f"{TRAIN} > all_reduce {C10D} 4181", **told) == "collective"


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (f"{TRAIN} > all_reduce {C10D} 2806", "step"),
        ("<module> queue.py 1 > work queue.py 9 > all_reduce torch/x.py 3", "work"),
        ("<module> <string> 1 > work <string> 9", "work"),
        ("<module> <string> 1 > spawn_main multiprocessing/spawn.py 9 > run multiprocessing/"
         "process.py 108 > _wrap torch/multiprocessing/spawn.py 90 > main train.py 4", "main"),
        ("_run_module_as_main <frozen runpy> 198 > <module> mine/train.py 1 > get queue.py 1",
         "<module>"),
        ("<module> mine/loader.py 4 > load pandas/io/parsers.py 4", "<module>"),
        ("<module> <stdin> 4 > wait threading.py 4", "<module>"),
        ("f /home/ada/mine.py 4 > g /opt/venv/lib/python3.11/site-packages/x/y.py 4", "f"),
        ("f /home/ada/mine.py 4 > g <frozen importlib._bootstrap> 4 > h ext.cpp 0", "f"),
        ("_bootstrap threading.py 1 > run threading.py 2", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_innermost_call_of_the_users_own_code(text, own):
    found = hints.user_frame(stack(text))
    assert (found.function if found else None) == own


def test_no_stack_has_no_hint_and_a_hostile_one_is_looked_at_with_a_bound():
    assert find("") is None
    assert hints.find([Frame("wait", "threading.py", 1)] * 100_000).about == "lock"
    assert hints.find([Frame("f", "a/" * 100_000, 1)] * 10) is None
