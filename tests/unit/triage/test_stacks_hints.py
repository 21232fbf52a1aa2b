"""What known places wait for: the call that tells most, not the lock at the end of it."""

from __future__ import annotations

import pytest

from nodeready.triage.stacks import hints
from nodeready.triage.stacks.document import Frame
from tests.builders.traces import C10D, TRAIN, frames


def find(text, native=""):
    made = [Frame(*row) for row in frames(text)], [Frame(*row) for row in frames(native)]
    found = hints.find(*made)
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
    ],
)  # fmt: skip
def test_native_frames_tell_what_python_frames_do_not(python, native, about):
    assert find(python, native) == about


def test_every_hint_is_one_line_that_says_something():
    tables = [*hints._PLACES.values(), *hints._COMMON.values()]
    found = {*tables, *(one for _, one in (*hints._BELOW, *hints._SYMBOLS))}
    for hint in found - {hints.Hint("", "")}:
        assert hint.text.isprintable()
        assert hint.text.startswith(("waits", "is ", "compiles", "saves", "imports", "reads"))


def test_no_stack_has_no_hint_and_a_hostile_one_is_looked_at_with_a_bound():
    assert find("") is None
    assert hints.find([Frame("wait", "threading.py", 1)] * 100_000).about == "lock"
    assert hints.find([Frame("f", "a/" * 100_000, 1)] * 10) is None
