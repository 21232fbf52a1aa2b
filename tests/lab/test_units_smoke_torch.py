"""The engines of a node over real torch: ranks that pass, hang, die and sum wrongly.

A fault is Python that each forked process runs first (`sitecustomize`), beside the real torch.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.smoke import engines
from nodeready.agent.smoke.orders import (
    PAIRS,
    TORCH,
    CollectiveOrder,
    Engine,
    RankNetwork,
    RankResult,
    SmokeConfig,
    SmokePeer,
)
from nodeready.agent.smoke.pair import SmokeListeners
from tests.cases import cases
from tests.command import wait_for
from tests.hang import pythons
from tests.unit.node.smoke.running_program import free_port

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch")]

HOST = ("127.0.0.1", "::1")
SITE = """
import os

def after():
    path = os.environ.get("NODEREADY_TEST_FAULT", "")
    if os.path.exists(path):
        with open(path) as file:
            exec(file.read(), {})

os.register_at_fork(after_in_child=after)
"""
#: `wrap(name, before, after)`: what else rank 1 does around a function of torch.distributed.
PRELUDE = """
import os, signal, time
import torch
import torch.distributed as dist

def wrap(name, before=lambda *a: None, after=lambda *a: None):
    real = getattr(dist, name)
    def function(*args, **how):
        if dist.get_rank() == 1:
            before(*args)
        found = real(*args, **how)
        if dist.get_rank() == 1:
            after(*args)
        return found
    setattr(dist, name, function)

"""
STAY = """
def stay(*a):
    open(os.environ["NODEREADY_TEST_FAULT"] + ".here", "w").close()
    time.sleep(60)
wrap("barrier", stay)
"""


def order(ranks: int = 2, limit_s: float = 20.0, **changed: object) -> CollectiveOrder:
    given = {
        "number": 7, "engine": TORCH, "backend": "gloo", "world": ranks, "first": 0,
        "ranks": ranks, "gpus": (), "head": SmokePeer("localhost", HOST, free_port(), "token"),
        "small": 4096, "large": 1 << 20, "limit_s": limit_s,
    }  # fmt: skip
    return CollectiveOrder(**{**given, **changed})  # type: ignore[arg-type]


class TorchNode:
    """A node's engines over real torch, and where the faults lie."""

    def __init__(self, path: Path, supervisor: ProcessSupervisor) -> None:
        self.file, self.mark = path / "fault.py", path / "fault.py.here"
        (path / "sitecustomize.py").write_text(SITE)
        self.words = (f"PYTHONPATH={path}", f"NODEREADY_TEST_FAULT={self.file}")
        self.path = pythons.found()[0].path
        config = SmokeConfig("n", "tag", limit_s=600, python=self.path, environment=self.words)
        self.engines = engines.Engines(supervisor, config)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.engines._python is not None
        return self.engines._python.process

    def processes(self) -> set[int]:
        pids = set()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(self.words[1]) in (path / "environ").read_bytes():
                    pids.add(int(path.name))
        return pids

    def run(
        self, asked: CollectiveOrder, fault: str = "", stop: threading.Event | None = None
    ) -> tuple[RankResult, ...]:
        """The ranks of one test, after which no process of it is left."""
        self.mark.unlink(missing_ok=True)
        self.file.write_text(PRELUDE + fault)
        try:
            began = time.monotonic()
            ranks = self.engines.run(asked, stop or threading.Event())
        finally:
            self.file.write_text("")
        assert time.monotonic() - began < asked.limit_s + 2
        assert self.processes() <= {self.process.pid}
        assert [rank.rank for rank in ranks] == [asked.first + n for n in range(asked.ranks)]
        return ranks


@pytest.fixture(scope="module")
def supervisor() -> Iterator[ProcessSupervisor]:
    if not pythons.found():
        pythons.needed()
    with ProcessSupervisor("nodeready:test", 900) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, supervisor: ProcessSupervisor
) -> Iterator[TorchNode]:
    node = TorchNode(tmp_path_factory.mktemp("site"), supervisor)
    yield node
    node.engines.close()
    assert not node.processes()


def passed(ranks: tuple[RankResult, ...]) -> bool:
    return all(rank.ok for rank in ranks)


def texts(ranks: tuple[RankResult, ...]) -> list[str]:
    """Of each rank its phase, and what is wrong or why it failed."""
    return [f"{rank.phase}: {rank.mismatch or rank.error}" for rank in ranks]


@pytest.mark.parametrize("case", cases(__file__, "smoke_torch.json"))
def test_what_ranks_answer(node, case):
    asked = order(case.get("ranks", 2), case.get("limit_s", 20.0), **case.get("order", {}))
    ranks = node.run(asked, case.get("fault", ""))
    # One pattern is that of all ranks.
    patterns = case["expect"] * (len(ranks) // len(case["expect"]))
    for text, pattern in zip(texts(ranks), patterns, strict=True):
        assert re.fullmatch(pattern, text, re.S), texts(ranks)
    for rank in (rank for rank in ranks if rank.ok):
        assert rank.ms > 0
        assert (rank.gbps > 0) == (len(ranks) > 1)


def test_an_engine_names_its_versions(node):
    nccl, gloo, _, pairs = node.engines.engines
    assert (gloo.name, gloo.backend, gloo.reason) == (TORCH, "gloo", "")
    ask = [node.path, "-c", "import torch; print(torch.__version__)"]
    assert gloo.version == nccl.version == subprocess.check_output(ask, text=True).strip()
    assert "send/recv" in gloo.proves
    assert nccl.reason.startswith("PyTorch ") or not nccl.reason
    assert pairs == Engine(PAIRS, "tcp", "", "", pairs.proves, "")


def test_tests_one_after_the_other_leave_nothing(node):
    def held() -> tuple[int, list[int]]:
        return len(os.listdir(f"/proc/{node.process.pid}/fd")), sorted(node.processes())

    assert passed(node.run(order(1)))
    before = held()
    for _ in range(10):
        assert passed(node.run(order(2, small=64, large=4096)))
    assert held() == before


def test_a_rank_that_reads_the_port_before_the_store_is_there_waits(node, supervisor, tmp_path):
    """The head's listener has the port until its order comes, and sends its mark."""
    other = TorchNode(tmp_path, supervisor)
    try:
        listeners = SmokeListeners([port := free_port()])
        head = SmokePeer("localhost", HOST, port, listeners.token)
        threading.Thread(target=listeners.serve, daemon=True).start()
        answers: list[tuple[RankResult, ...]] = []
        late = order(1, world=2, first=1, head=head)
        thread = threading.Thread(target=lambda: answers.append(other.run(late)))
        thread.start()
        wait_for(lambda: listeners.accepted_count > 2)
        assert not answers
        listeners.lend(port)
        assert passed(node.run(order(1, world=2, head=head)))
        thread.join(20)
        assert passed(answers[0])
    finally:
        other.engines.close()


# --- Ends.


def test_a_test_is_ended_when_it_is_told_to(node):
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    ranks = node.run(order(1, world=2, limit_s=60), stop=stop)
    assert texts(ranks) == ["init: ended: others had passed in less time"]
    assert passed(node.run(order(2)))


@pytest.mark.parametrize(("number", "limit_s", "error"), [
    (signal.SIGSTOP, 8, "did not answer, and was ended"),
    (signal.SIGKILL, 60, "ended in the test"),
])  # fmt: skip
def test_a_python_that_hangs_or_dies_ends_with_its_ranks(node, number, limit_s, error):
    pid = node.process.pid
    node.mark.unlink(missing_ok=True)
    when = lambda: (wait_for(node.mark.exists), os.kill(pid, number))  # noqa: E731
    threading.Thread(target=when, daemon=True).start()
    ranks = node.run(order(2, limit_s=limit_s), STAY)
    assert texts(ranks) == [f"init: {os.path.basename(node.path)} {error}"] * 2
    # The next test has another one.
    assert passed(node.run(order(2, limit_s=60)))
    assert node.process.pid != pid


def test_shared_memory_of_a_killed_rank_is_removed_and_no_other(node):
    mine, other = (Path(f"/dev/shm/nccl-nodeready-{name}-{os.getpid()}") for name in "ab")
    other.write_bytes(b"x" * 4096)
    fault = f"""
import mmap
def hold(number):
    with open({str(mine)!r}, "w+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096)
    time.sleep(60)
torch.set_num_threads = hold
"""
    try:
        (text,) = texts(node.run(order(1, limit_s=3), fault))
        assert text.startswith("start: no end after")
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        for path in (mine, other):
            path.unlink(missing_ok=True)


# --- GPUs: torch's functions for them, over its processor and gloo.

GPUS = """
cuda, real_device, processor = torch.cuda, torch.device, torch.device("cpu")
cuda.device_count = lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))
cuda.set_device = cuda.synchronize = lambda device=None: None

class Device:
    def __new__(cls, kind, index=None):
        return processor

real_init, real_barrier = dist.init_process_group, dist.barrier
def init(backend, *, store, rank, world_size, timeout, device_id=None):
    assert backend == "nccl" and timeout.total_seconds() > 3000
    real_init("gloo", store=store, rank=rank, world_size=world_size)
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
        for words in ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.4<0>",
                      "Using network IB",
                      "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA"):
            file.write("gpu1:7:9 [0] NCCL INFO " + words + "\\n")
dist.init_process_group = init
def barrier(device_ids):
    os.write(2, ("NCCL WARN %s %s %s\\n" % (os.environ["CUDA_VISIBLE_DEVICES"],
             os.environ["CUDA_DEVICE_ORDER"], os.environ["NCCL_DEBUG"])).encode())
    real_barrier()
dist.barrier = barrier
torch.device = Device
"""


def test_ranks_have_the_gpus_of_their_order(node, monkeypatch):
    """Of the copy to a GPU's memory and its product only the numbers are tried here."""
    nccl = Engine(TORCH, "nccl", "", "", "", "")
    monkeypatch.setattr(node.engines, "engines", (nccl, *node.engines.engines[1:]))
    asked = {"backend": "nccl", "limit_s": 60.0}
    ranks = node.run(order(2, gpus=(3, 1), **asked), GPUS)
    assert passed(ranks), ranks
    network = RankNetwork("IB", "eth0", ("mlx5_0:1/IB",), gdr=True)
    assert [rank.network for rank in ranks] == [network, network]
    ranks = node.run(order(2, gpus=(3, 1), **asked), GPUS + "dist.all_gather = lambda *a: 1 / 0")
    error = "ZeroDivisionError: division by zero (3,1 PCI_BUS_ID INFO)"
    assert {rank.error for rank in ranks} == {error}
    fault = GPUS + "cuda.init = lambda: None\ncuda.device_count = lambda: 1"
    ranks = node.run(order(2, gpus=(0, 7), **asked), fault)
    wanted = [f"compute: GPU {gpu}: PyTorch sees 1 of 2 GPUs" for gpu in (0, 7)]
    assert texts(ranks) == wanted
