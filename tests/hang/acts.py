"""What the ranks of a scenario do, one act after the other: a training's code, by a user's names.

An act that hangs goes on when its rank gets SIGUSR1, or, where a signal cannot help, when the test
has undone the fault. `rank-RANK` has the rank's pid, the number of its act and of its step.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import pdb
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import plans
import protocols
import slowness
import talks
import torch
import torch.distributed as dist
import wrapped
from talks import LONG, rank, read_shard, world
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

with contextlib.suppress(ImportError):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Released(BaseException):
    """The test has looked: the act is over."""


def say(number, step):
    """At once: whoever reads beside us never sees half of it."""
    file = os.open(f"rank-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(file, f"{os.getpid()} {number} {step}".ljust(40).encode(), 0)
    os.close(file)


def last_rank():
    return world() - 1


# --- What a rank does that has not called what the others wait in: the user's own code.


def back_off():
    time.sleep(LONG)


def start_helper():
    """A process that lives on when the rank is killed, with its environment and sockets."""
    os.fork()
    time.sleep(LONG)


def wait_for_lock():
    lock = threading.Lock()

    def write_summary():
        with lock:
            held.set()
            time.sleep(LONG)

    held = threading.Event()
    threading.Thread(target=write_summary, daemon=True).start()
    held.wait()
    with lock:
        pass


def poll_queue():
    batches = queue.Queue()
    while True:
        try:
            batches.get(timeout=0.01)
        except queue.Empty:
            continue


def debug():
    read, _write = os.pipe()
    os.dup2(read, 0)
    pdb.Pdb(nosigint=True).set_trace()
    time.sleep(0)


def serve_metrics():
    async def metrics():
        await asyncio.sleep(LONG)

    asyncio.run(metrics())


def convert_images():
    with subprocess.Popen(["sleep", str(LONG)]) as child:
        try:
            child.wait()
        finally:
            child.kill()


def hold_gil():
    # A call that keeps the interpreter's lock, as an extension's can.
    ctypes.PyDLL(None).sleep(LONG)


def tokenize():
    count = 0
    while True:
        count += 1


def match_pattern():
    re.match(r"(a+)+$", "a" * 64 + "b")


def save_checkpoint():
    torch.save({"weight": torch.zeros(1000)}, f"fifo-{rank()}")


def list_dataset():
    # A file system whose server has died.
    with contextlib.suppress(OSError):
        os.stat("data/shard-5")


def build_extension():
    """A build that was killed long ago has left its lock file."""
    from torch.utils import cpp_extension

    os.makedirs("build", exist_ok=True)
    for name in ("build/lock", "build/ops.cpp"):
        with open(name, "w"):
            os.utime(name, (1, 1))
    cpp_extension.load("ops", ["build/ops.cpp"], build_directory=os.path.abspath("build"))


def compile_model():
    """torch.compile, with a C++ compiler that does not end."""
    import torch._inductor.config as inductor

    with open("g++", "w") as file:
        file.write(
            '#!/bin/sh\ncase "$*" in *--version*) exec /usr/bin/g++ "$@";; esac\nexec sleep 3600\n'
        )
    os.chmod("g++", 0o755)
    os.environ.update(
        TORCHINDUCTOR_CACHE_DIR=os.path.abspath("inductor"), TORCHINDUCTOR_COMPILE_THREADS="1"
    )
    # CXX is read when inductor's configuration is imported, which whoever forked us may have done.
    inductor.cpp.cxx = (None, os.path.abspath("g++"))
    inductor.compile_threads = 1
    torch.compile(lambda values: values.sin() * 2)(torch.rand(100))


def train_in_thread():
    """As Ray Train does: the main thread only waits."""
    thread = threading.Thread(target=read_shard, daemon=True)
    thread.start()
    try:
        thread.join()
    finally:
        # Its reader is there, so this opens and ends the read.
        os.close(os.open(f"fifo-{rank()}", os.O_WRONLY | os.O_NONBLOCK))


def reduce_in_thread():
    thread = threading.Thread(target=all_reduce, daemon=True)
    thread.start()
    thread.join()


# --- Data loaders.


LOCK = threading.Lock()


class Images(Dataset):
    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 2 and self.bad:
            self.bad()
        return float(index)


def decode():
    with open(f"fifo-{rank()}", "rb") as file:
        file.read()


def lock_cache():
    with LOCK:
        pass


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def collate(items):
    if 2.0 in items:
        decode()
    return torch.tensor(items)


def load(bad=decode, collate_fn=None, **how):
    loader = DataLoader(Images(bad), batch_size=1, collate_fn=collate_fn, **how)
    try:
        for _images in loader:
            pass
    finally:
        kill_children()


def load_deadlock():
    # The lock is held by a thread of this process when the workers are forked.
    with LOCK:
        load(bad=lock_cache, num_workers=1, multiprocessing_context="fork")


# --- Collectives of the whole job.


def all_reduce():
    dist.all_reduce(torch.ones(4))


def join_and_reduce(act=None):
    ACTS["join"]()
    if act:
        act()
    all_reduce()


def join_and_read():
    join_and_reduce(read_shard)


def large_all_reduce():
    dist.all_reduce(torch.ones(400_000))


def barrier():
    dist.barrier()


def recorded(work, number):
    """With a dump of the flight recorder, as a watchdog leaves it, while the call waits."""
    # gloo's own thread records a call when it comes to it. All acts but the first, to join, call.
    while len(pickle.loads(record()).get("entries", ())) < number:
        time.sleep(0.1)
    dump_recorder()
    work.wait()


def record():
    return torch._C._distributed_c10d._dump_fr_trace()


def dump_recorder():
    with open(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank()}", "wb") as file:
        file.write(record())


def sub_group():
    """Both halves make both groups, each uses its own."""
    half = world() // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world())))]
    dist.all_reduce(torch.ones(4), group=groups[rank() // half])


def send_large():
    dist.send(torch.ones(4_000_000), dst=(rank() + 1) % world())


def receive():
    dist.recv(torch.ones(4_000_000), src=(rank() - 1) % world())


def store():
    return dist.distributed_c10d._get_default_store()


def wait_for_key():
    store().wait(["tokenizer-is-ready"], timedelta(hours=1))


def start_rpc():
    from torch.distributed import rpc

    rpc.init_rpc(f"rank{rank()}", rank=rank(), world_size=world())
    return rpc


def join_by_file():
    """Beside RPC, which has the job's port."""
    place = f"file://{os.getcwd()}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank(), world_size=world())


def serve_rpc():
    """The main thread waits for the end of all, and others' calls come to threads."""
    start_rpc().shutdown()


def serve_rpc_and_reduce():
    """The main thread is in a collective, and others' calls come to threads."""
    start_rpc()
    join_by_file()
    dist.all_reduce(torch.ones(4))


def ask_rpc():
    start_rpc().rpc_sync("rank0", read_shard, timeout=0)


def ask_rpc_later():
    start_rpc().rpc_async("rank0", read_shard, timeout=0).wait()


def ask_rpc_in_chain(at=None):
    """Each asks the one before it; the first reads."""
    from torch.distributed import rpc

    at = start_rpc() and rank() if at is None else at
    if at:
        rpc.rpc_sync(f"rank{at - 1}", ask_rpc_in_chain, (at - 1,), timeout=0)
    else:
        read_shard()


def ask_own_store():
    """A second store of the job, beside torch's."""
    dist.TCPStore("127.0.0.1", talks.port_of(0), timeout=timedelta(hours=1)).get("vocabulary")


def serve_own_store():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    talks.publish(kept.port)
    read_shard()


def reduce_in_two_orders():
    """Two threads with a group each; rank 3 begins with the other one and waits for it."""
    groups = [dist.new_group(), dist.new_group()]
    if rank() == last_rank():
        groups.reverse()
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)


def wait_for_handles():
    """Rank 3 has issued one collective less, and waits in a barrier."""
    is_last = rank() == last_rank()
    calls = range(2 if is_last else 3)
    for handle in [dist.all_reduce(torch.ones(4), async_op=True) for _ in calls]:
        handle.wait()
    if is_last:
        dist.barrier()


def reduce_in_a_cycle():
    """Ranks 1 and 2 reduce in their second group first: each waits for the next one."""
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}

    def reduce_first():
        dist.all_reduce(torch.ones(4), group=pairs[(0, 1) if rank() < 2 else (2, 3)])

    def reduce_second():
        dist.all_reduce(torch.ones(4), group=pairs[(0, 2) if rank() in (0, 2) else (1, 3)])

    calls = [reduce_first, reduce_second]
    for call in reversed(calls) if rank() in (1, 2) else calls:
        call()


def import_beside_a_thread():
    """A thread imports what reads, and the main thread imports it, too."""
    with open("plugins.py", "w") as file:
        file.write("import talks\ntalks.read_shard()\n")
    sys.path.insert(0, os.getcwd())
    threading.Thread(target=__import__, args=("plugins",), name="warmup", daemon=True).start()
    time.sleep(0.5)
    __import__("plugins")


def ask_rpc_in_group():
    rpc = start_rpc()
    join_by_file()
    rpc.rpc_sync("rank0", read_shard, timeout=0)


# --- Parallel models.


class Layer(torch.nn.Module):
    def __init__(self, bad=None):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.bad = bad

    def forward(self, values):
        if self.bad:
            self.bad()
        return self.linear(values)


def sharded():
    model = Layer()
    fully_shard(model)
    return model


def train_once(model, bad=None):
    loss = model(torch.rand(4, 16)).sum()
    if bad:
        with contextlib.suppress(Released):
            bad()
    loss.backward()


def pipeline(bad=None):
    stage = PipelineStage(Layer(bad), rank(), world(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, world(), loss_fn=lambda out, target: out.sum())
    batch = torch.rand(4 * world(), 16)
    if rank() == 0:
        schedule.step(batch)
    elif rank() == last_rank():
        schedule.step(target=batch)
    else:
        schedule.step()


class Once:
    """Hangs in its first call."""

    def __init__(self, act):
        self.act = act

    def __call__(self):
        act, self.act = self.act, None
        if act:
            with contextlib.suppress(Released):
                act()


def save_distributed():
    dcp.save({"weight": torch.rand(100) + rank()}, checkpoint_id="checkpoint")


def save_distributed_blocked():
    """A file system that takes nothing: in place of the file there is a pipe without a reader."""
    os.makedirs("checkpoint", exist_ok=True)
    os.mkfifo(f"checkpoint/__{rank()}_0.distcp")
    save_distributed()


# --- Jobs that are healthy.


def steps(number, pause=lambda: None):
    """Steps until the test says so."""
    for step in itertools.count(1):
        pause()
        end = torch.tensor([float(rank() == 0 and os.path.exists("end"))])
        dist.all_reduce(end)
        say(number, step)
        if end:
            return


def busy_for(seconds):
    """Work in many places: it moves."""
    until = time.monotonic() + seconds
    values = torch.rand(64, 64)
    while time.monotonic() < until:
        values = normalise(project(values))


def normalise(values):
    return values / values.norm()


def project(values):
    return torch.mm(values, values) + sum(range(2000)) * 0


def loading(number, seconds=0.02):
    loader = iter(DataLoader(Slow(seconds), num_workers=1))
    steps(number, lambda: next(loader))
    kill_children()


class Slow(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return float(index)


def compiling(number):
    """A new graph at every step, traced and lowered for real."""
    count = iter(range(1, 1_000_000))

    def compile_one():
        many = next(count)

        def forward(values):
            for at in range(4):
                values = values.sin() * (many + at) + values.cos()
            return values

        torch._dynamo.reset()
        torch.compile(forward, backend="aot_eager")(torch.rand(100))

    steps(number, compile_one)


# --- The end of a rank.


def raise_error():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hang_at_exit():
    atexit.register(back_off)
    sys.exit(0)


def leave_thread():
    threading.Thread(target=back_off, name="uploader").start()
    sys.exit(0)


class Writer:
    def __del__(self, sleep=time.sleep):
        sleep(LONG)


def hang_in_destructor():
    # Of a module, which the interpreter clears at its very end; `stable.py` has kept it from that.
    gc.unfreeze()
    sys.modules["acts"].writer = Writer()
    sys.exit(0)


# --- The play.


#: Acts that are no function of the user's own.
ACTS = {
    "join": lambda: dist.init_process_group("gloo", timeout=timedelta(hours=1)),
    "load_fork": lambda: load(num_workers=2, multiprocessing_context="fork"),
    "load_spawn": lambda: load(num_workers=1, multiprocessing_context="spawn"),
    "load_forkserver": lambda: load(num_workers=1, multiprocessing_context="forkserver"),
    "load_here": lambda: load(num_workers=0),
    "load_collate": lambda: load(bad=None, num_workers=1, collate_fn=collate),
    "load_stopped": lambda: load(bad=stop_self, num_workers=1),
    "broadcast": lambda: dist.broadcast(torch.ones(4), src=0),
    "all_gather": lambda: dist.all_gather([torch.ones(4) for _ in range(world())], torch.ones(4)),
    "all_gather_single": lambda: dist.all_gather_into_tensor(
        torch.ones(4 * world()), torch.ones(4)
    ),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * world())),
    "all_to_all": lambda: dist.all_to_all_single(torch.ones(world()), torch.ones(world())),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=timedelta(hours=1)),
    "gather_objects": lambda: dist.all_gather_object([None] * world(), {"rank": rank()}),
    "broadcast_objects": lambda: dist.broadcast_object_list([rank()], src=last_rank()),
    "all_reduce_later": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "make_group": lambda: dist.new_group(timeout=timedelta(hours=1)),
    "set_key": lambda: store().set("tokenizer-is-ready", "1"),
    "ddp_backward": lambda: train_once(DistributedDataParallel(Layer())),
    "ddp_late": lambda: train_once(DistributedDataParallel(Layer()), read_shard),
    "fsdp_backward": lambda: train_once(sharded()),
    "fsdp_late": lambda: train_once(sharded(), read_shard),
    "stage_works": pipeline,
    "stage_hangs": lambda: pipeline(Once(read_shard)),
}
#: The same, told their number, counted from 0.
NUMBERED = {
    "recorded_all_reduce": lambda number: recorded(
        dist.all_reduce(torch.ones(4), async_op=True), number
    ),
    "recorded_broadcast": lambda number: recorded(
        dist.broadcast(torch.ones(4), src=0, async_op=True), number
    ),
    "fast": steps,
    "slow": lambda number: steps(number, lambda: busy_for(3)),
    "one_slow": lambda number: steps(number, lambda: rank() == last_rank() and busy_for(1)),
    "one_naps": lambda number: steps(number, lambda: rank() == last_rank() and time.sleep(0.5)),
    "napping": lambda number: steps(number, lambda: time.sleep(0.02)),
    "loading": loading,
    "compiling": compiling,
    "talk_slowly": lambda number: talk(number, talks.nap(3)),
    "talk_very_slowly": lambda number: talk(number, talks.nap(15)),
    "first_evaluates": lambda number: talk(number, talks.nap(6, of=0)),
    "talk_12": lambda number: talk(number, talks.nap(12), protocols.take_in_threads),
    "busy_15": lambda number: steps(number, lambda: busy_for(15)),
    "drawn_steps": lambda number: follow(number, plans.steps()),
    "slow_steps": lambda number: follow(number, slowness.steps()),
    "one_loads_slowly": lambda number: loading(number, 15 if rank() == last_rank() else 0.02),
}


def talk(number, *how):
    follow(number, talks.steps_over_tcp(*how))


def follow(number, steps_made):
    for step in steps_made:
        say(number, step)


def act_of_module(name):
    modules = talks, protocols, plans
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def kill_children():
    for child in multiprocessing.active_children():
        child.kill()


def release(number, frame):
    raise Released


def play(names):
    """Each act, and at the end three steps that all ranks make together."""
    signal.signal(signal.SIGUSR1, release)
    torch.manual_seed(0)
    for number, name in enumerate(names):
        say(number, 0)
        try:
            try:
                if name in NUMBERED:
                    NUMBERED[name](number)
                elif ":" in name:
                    wrapped.play(name)
                else:
                    (ACTS.get(name) or globals().get(name) or act_of_module(name))()
            except Exception:
                # A call that the signal has cut off, in a library that tells it in its own words.
                if not os.path.exists("end"):
                    raise
        except Released:
            pass
        kill_children()
    total = 0.0
    for step in range(3):
        mean = torch.tensor([float(rank() + step)])
        dist.all_reduce(mean)
        total += mean.item()
    with open(f"done-{rank()}", "w") as file:
        file.write(str(total))
    dist.barrier()
    dist.destroy_process_group()
