"""The engines of a node: ranks of real torch that pass, hang, die and sum wrongly; and the reasons
why there is none.

A fault is Python that each forked process runs first (`sitecustomize`), beside the real torch.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeready.node.proofs.mesh import Listeners
from nodeready.node.runtime import Supervisor
from nodeready.node.smoke import engines, torch_ranks
from nodeready.node.smoke.orders import NCCL_TESTS, RING, TORCH, Collective, Config, Engine, Peer
from nodeready.node.smoke.orders import Rank as Ended
from tests.command import wait_for
from tests.hang import pythons

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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def order(ranks: int = 2, limit_s: float = 20.0, **more: object) -> Collective:
    given = {
        "number": 7, "engine": TORCH, "backend": "gloo", "world": ranks, "first": 0,
        "ranks": ranks, "gpus": (), "head": Peer("localhost", HOST, free_port(), "token"),
        "next": None, "small": 4096, "large": 1 << 20, "limit_s": limit_s,
    }  # fmt: skip
    return Collective(**{**given, **more})  # type: ignore[arg-type]


class Place:
    """Where the faults lie."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path / "fault.py"
        (path / "sitecustomize.py").write_text(SITE)
        self.words = (f"PYTHONPATH={path}", f"NODEREADY_TEST_FAULT={self.file}")

    def left(self) -> set[int]:
        """The processes that run with it."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.fsencode(self.words[1]) in Path(f"/proc/{name}/environ").read_bytes():
                    found.add(int(name))
        return found


class Node:
    """A node's engines over real torch."""

    def __init__(self, place: Place, supervisor: Supervisor) -> None:
        self.place = place
        config = Config("nonce", "tag", limit_s=600, python=pythons.found()[0].path,
                        environment=place.words)  # fmt: skip
        self.engines = engines.find(supervisor, config)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.engines._python is not None
        return self.engines._python.process

    def run(
        self, fault: str, asked: Collective, stop: threading.Event | None = None
    ) -> tuple[Ended, ...]:
        """The ranks of one test; it takes no longer than its limit, and leaves no process."""
        self.place.file.write_text(textwrap.dedent(fault))
        began = time.monotonic()
        try:
            ranks = self.engines.run(asked, (), stop or threading.Event())
        finally:
            self.place.file.write_text("")
        assert time.monotonic() - began < asked.limit_s + 1
        assert self.place.left() <= {self.process.pid}
        assert [one.rank for one in ranks] == [asked.first + at for at in range(asked.ranks)]
        return ranks


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with Supervisor("nodeready:test", 900) as made:
        yield made


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, supervisor: Supervisor) -> Iterator[Node]:
    pythons.needed()
    place = Place(tmp_path_factory.mktemp("site"))
    made = Node(place, supervisor)
    yield made
    made.engines.close()
    assert not place.left()


def whole(ranks: tuple[Ended, ...]) -> None:
    assert [(one.phase, one.wrong, one.said) for one in ranks] == [("done", "", "")] * len(ranks)


# --- Ranks that pass.


def test_it_says_what_it_found(node):
    nccl, gloo, _, ring = node.engines.engines
    assert (gloo.name, gloo.backend, gloo.why) == (TORCH, "gloo", "")
    assert gloo.where == pythons.found()[0].path
    said = subprocess.run(
        [gloo.where, "-c", "import torch; print(torch.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert gloo.version == nccl.version == said.stdout.strip()
    assert "send/recv" in gloo.proves
    if node.engines.gpus == 0:
        assert nccl.why.startswith(("PyTorch sees no GPU", "PyTorch "))
    assert ring == Engine(RING, "tcp", "", "", "", ring.proves, "")


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_healthy_ranks_pass(node, ranks):
    seen = node.run("", order(ranks))
    whole(seen)
    assert all(one.ms > 0 and one.retransmits >= 0 and one.waits_for == -1 for one in seen)
    assert all((one.gbps > 0) == (ranks > 1) for one in seen)
    assert all(one.ok and one.gpu == -1 and 0 < one.seconds < 20 for one in seen)


def test_one_test_after_the_other_leaves_nothing(node):
    def held() -> tuple[int, list[int]]:
        return len(os.listdir(f"/proc/{node.process.pid}/fd")), sorted(node.place.left())

    whole(node.run("", order(1)))
    before = held()
    for _ in range(20):
        whole(node.run("", order(2, small=64, large=4096)))
    assert held() == before


def test_whoever_reads_the_port_before_the_store_is_there_waits(node, supervisor, tmp_path):
    """The head's listener has the port until its order comes, and sends its token."""
    other = Node(Place(tmp_path), supervisor)
    try:
        port = free_port()
        listeners = Listeners([port])
        head = Peer("localhost", HOST, port, listeners.token)
        threading.Thread(target=listeners.serve, daemon=True).start()
        seen: list[tuple[Ended, ...]] = []
        late = order(1, world=2, first=1, head=head)
        thread = threading.Thread(target=lambda: seen.append(other.run("", late)))
        thread.start()
        wait_for(lambda: listeners.came > 2)
        listeners.sockets[port].shutdown(socket.SHUT_RDWR)
        listeners.sockets[port].close()
        whole(node.run("", order(1, world=2, head=head)))
        thread.join(20)
        whole(seen[0])
    finally:
        other.engines.close()


# --- Ranks that do not.

#: `wrap(name, before, after)`: what else rank 1 does around a function of torch.distributed.
WRAP = """
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


def test_ranks_that_die_at_start_are_told_with_their_status(node):
    fault = """
        import os, torch
        torch.set_num_threads = lambda number: os._exit(7)
    """
    seen = node.run(fault, order(3))
    assert {(one.phase, one.said) for one in seen} == {("start", "ended with status 7")}
    assert {one.retransmits for one in seen} == {-1}


def test_a_library_that_aborts_is_told_with_its_last_word(node):
    fault = """
        import os, torch
        def abort(number):
            os.write(1, b"n1:2:3 [0] NCCL INFO fine\\n")
            os.write(2, b"n1:2:3 [0] misc/socket.cc:1 NCCL WARN Connect to 10.0.0.2<4> failed\\n")
            os.abort()
        torch.set_num_threads = abort
    """
    (seen,) = node.run(fault, order(1))
    assert seen.said == "ended by SIGABRT: Connect to 10.0.0.2<4> failed"


def test_when_one_dies_the_others_do_not_wait_for_the_limit(node):
    """Nobody can come to a store whose node has lost a rank; each says what it saw."""
    began = time.monotonic()
    fault = """
        import os, torch
        import torch.distributed as dist
        real = dist.TCPStore
        def store(host, port, world, main, **how):
            if not main:
                os._exit(3)
            return real(host, port, world, main, **how)
        dist.TCPStore = store
    """
    first, second = node.run(fault, order(2, limit_s=60))
    assert time.monotonic() - began < 30
    assert (second.phase, second.said) == ("init", "ended with status 3")
    assert (first.phase, first.said, first.waits_for) == ("init", "ended: rank 1 had failed", 1)


def test_a_rank_that_is_stopped_is_told_from_those_that_wait_for_it(node):
    fault = WRAP + "wrap('barrier', lambda *a: os.kill(os.getpid(), signal.SIGSTOP))"
    first, second, third = node.run(fault, order(3, limit_s=5))
    assert second.phase == first.phase == third.phase == "barrier"
    assert "it is stopped" in second.said
    assert second.retransmits == -1
    for one in (first, third):
        assert "stopped" not in one.said
        assert "Timed out" in one.said or one.said.startswith("no end after")
        assert one.waits_for == -1


def test_a_rank_that_holds_its_interpreter_is_told_too(node):
    fault = WRAP + "import ctypes\nwrap('all_gather', lambda *a: ctypes.PyDLL(None).sleep(60))"
    _, second = node.run(fault, order(2, limit_s=5))
    assert (second.phase, second.said[-18:]) == ("all_gather", "it does not answer")


def test_a_rank_that_waits_in_the_ring_says_for_whom(node):
    fault = WRAP + "wrap('isend', lambda *a: time.sleep(60))"
    ranks = node.run(fault, order(3, limit_s=5))
    assert {one.phase for one in ranks} == {"send_recv"}
    assert ranks[2].waits_for == 1


def test_rank_0_says_who_did_not_come(node):
    began = time.monotonic()
    (seen,) = node.run("", order(1, world=4, limit_s=4))
    assert time.monotonic() - began > 2
    assert (seen.phase, seen.waits_for) == ("init", 1)
    assert seen.said == "timed out: ranks 1, 2, 3 did not come"


def test_a_head_without_a_store_is_told(node):
    asked = order(1, world=2, first=1, limit_s=4)
    (seen,) = node.run("", asked)
    assert (seen.phase, seen.waits_for) == ("init", 0)
    assert seen.said == f"localhost:{asked.head.port}: Connection refused"


def test_an_error_is_its_last_line(node):
    fault = "import torch\ndef fail(*a, **k):\n    raise MemoryError('no\\nroom left\\n')\n"
    (seen,) = node.run(fault + "torch.arange = fail", order(1))
    assert (seen.phase, seen.said) == ("compute", "MemoryError: room left")


def test_a_rank_that_prints_much_is_not_held_up(node):
    fault = WRAP + "wrap('barrier', lambda *a: os.write(2, b'x' * 3000000))"
    whole(node.run(fault, order(2)))


def test_a_test_is_ended_when_it_is_told_to(node):
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    began = time.monotonic()
    (seen,) = node.run("", order(1, world=2, limit_s=60), stop)
    assert time.monotonic() - began < 10
    assert (seen.phase, seen.said) == ("init", "ended: others had passed in less time")
    whole(node.run("", order(2)))


# --- Wrong results.


def test_a_wrong_sum_on_one_rank_is_told_by_that_rank_alone(node):
    fault = WRAP + "wrap('all_reduce', after=lambda tensor, *a: tensor.add_(1))"
    first, second, third = node.run(fault, order(3))
    whole((first, third))
    assert (
        second.wrong == "all_reduce of int64: 512 of 512 numbers are wrong, number 0 is 7, not 6"
    )
    assert (second.phase, second.said) == ("done", "")
    assert not second.ok


def test_a_rank_whose_part_is_missing_is_named_by_all(node):
    fault = WRAP + "wrap('all_reduce', lambda tensor, *a: tensor.zero_())"
    seen = node.run(fault, order(3))
    assert {one.wrong for one in seen} == {"all_reduce of int64: as if rank 1 were missing"}


@pytest.mark.parametrize(
    ("call", "position", "said"),
    [
        ("all_gather", "tensor[1][3] += 1",
         "all_gather, the part of rank 1: 1 of 512 numbers are wrong, number 3 is 1000007, not "
         "1000006"),
        ("all_reduce", "tensor.numel() > 9999 and tensor[5].add_(1)",
         "the large all_reduce: 1 of 262144 numbers are wrong, number 5 is 19.0, not 18.0"),
        ("all_reduce", "tensor.is_floating_point() and tensor[0].add_(1)",
         "all_reduce of float32: 1 of 1024 numbers are wrong, number 0 is 4.0, not 3.0"),
    ],
)  # fmt: skip
def test_one_wrong_number_is_found(node, call, position, said):
    fault = WRAP + f"def spoil(tensor, *a):\n    {position}\nwrap({call!r}, after=spoil)"
    first, second = node.run(fault, order(2))
    assert (first.wrong, second.wrong) == ("", said)


def test_a_wrong_product_is_found(node):
    fault = """
        import torch
        real = torch.Tensor.__matmul__
        def product(left, right):
            found = real(left, right)
            found[2, 1] += 1
            return found
        torch.Tensor.__matmul__ = product
    """
    (seen,) = node.run(fault, order(1))
    assert seen.wrong.startswith(
        "the product of matrices: 1 of 4096 numbers are wrong, number 129"
    )


# --- Ends.


def test_a_python_that_hangs_is_ended_and_the_next_test_has_another(node):
    fault = WRAP + "wrap('barrier', lambda *a: time.sleep(60))"
    pid = node.process.pid
    threading.Timer(1.5, os.kill, (pid, signal.SIGSTOP)).start()
    seen = node.run(fault, order(2, limit_s=5))
    assert {one.phase for one in seen} == {"barrier"}
    assert {one.said for one in seen} == {"python did not answer, and was ended"}
    whole(node.run("", order(2, limit_s=60)))
    assert node.process.pid != pid


def test_ranks_end_with_the_python_that_forked_them(node):
    fault = WRAP + "wrap('barrier', lambda *a: time.sleep(60))"
    threading.Timer(1.5, node.process.kill).start()
    began = time.monotonic()
    seen = node.run(fault, order(2, limit_s=60))
    assert time.monotonic() - began < 30
    assert {(one.phase, one.said) for one in seen} == {("barrier", "python ended in the test")}
    whole(node.run("", order(2, limit_s=60)))


def state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""


def test_nothing_is_left_when_the_program_is_killed(tmp_path):
    """Its ranks are stopped, so that they hear no end of any pipe."""
    pythons.needed()
    place = Place(tmp_path)
    place.file.write_text(WRAP + "wrap('barrier', lambda *a: os.kill(os.getpid(), 19))")
    text = f"""
        import threading
        from nodeready.node.runtime import Supervisor
        from nodeready.node.smoke import engines
        from nodeready.node.smoke.orders import *
        supervisor = Supervisor("nodeready:test", 100)
        config = Config("nonce", "tag", python={pythons.found()[0].path!r},
                        environment={place.words!r})
        found = engines.find(supervisor, config)
        head = Peer("localhost", {HOST!r}, {free_port()}, "")
        print("begun", flush=True)
        found.run(Collective(1, "torch", "gloo", 2, 0, 2, (), head, None, 64, 64, 60.0), (),
                  threading.Event())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"begun\n"

        def stopped() -> bool:
            states = [state_of(pid) for pid in place.left()]
            return states.count("T") == 1

        wait_for(stopped)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    wait_for(lambda: not place.left())


def test_shared_memory_of_a_killed_rank_is_removed_and_nobody_elses(node):
    mine, other = (Path(f"/dev/shm/nccl-nodeready-{name}-{os.getpid()}") for name in "ab")
    other.write_bytes(b"x" * 4096)
    fault = f"""
        import mmap, time, torch
        def hold(number):
            with open({str(mine)!r}, "w+b") as file:
                file.truncate(4096)
                kept = mmap.mmap(file.fileno(), 4096)
            time.sleep(60)
        torch.set_num_threads = hold
    """
    try:
        (seen,) = node.run(fault, order(1, limit_s=3))
        assert (seen.phase, seen.said[:12]) == ("start", "no end after")
        assert not mine.exists()
        assert other.exists()
    finally:
        for path in (mine, other):
            path.unlink(missing_ok=True)


# --- GPUs: torch's functions for them, over its processor and gloo.

GPUS = """
import os, torch
import torch.distributed as dist
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
dist.init_process_group = init
def barrier(device_ids):
    os.write(2, ("NCCL WARN %s %s %s\\n" % (os.environ["CUDA_VISIBLE_DEVICES"],
             os.environ["CUDA_DEVICE_ORDER"], os.environ["NCCL_DEBUG"])).encode())
    real_barrier()
dist.barrier = barrier
torch.device = Device
"""


def on_gpus(ranks: int, gpus: tuple[int, ...], **more: object) -> Collective:
    return order(ranks, backend="nccl", gpus=gpus, **more)


@pytest.fixture
def gpus(node) -> Iterator[Node]:
    """The node, as if its PyTorch saw GPUs."""
    before = node.engines.engines
    nccl = Engine(TORCH, "nccl", "", "", "", "", "")
    node.engines.engines = (nccl, *before[1:])
    yield node
    node.engines.engines = before


def test_ranks_have_the_gpus_of_their_order(gpus):
    """Of the copy to a GPU's memory and its product only the numbers are tried here."""
    seen = gpus.run(GPUS, on_gpus(2, (3, 1)))
    whole(seen)
    assert [one.gpu for one in seen] == [3, 1]
    fault = GPUS + "dist.all_gather = lambda *a: 1 / 0"
    seen = gpus.run(fault, on_gpus(2, (3, 1)))
    assert {one.said for one in seen} == {
        "ZeroDivisionError: division by zero (3,1 PCI_BUS_ID WARN)"
    }


def test_a_gpu_that_is_not_there_is_told(gpus):
    fault = GPUS + "cuda.init = lambda: None\ncuda.device_count = lambda: 1"
    seen = gpus.run(fault, on_gpus(2, (0, 7)))
    assert {(one.phase, one.gpu, one.said) for one in seen} == {
        ("compute", 0, "GPU 0: PyTorch sees 1 of 2 GPUs"),
        ("compute", 7, "GPU 7: PyTorch sees 1 of 2 GPUs"),
    }


@pytest.mark.parametrize(
    ("wanted", "given", "found"),
    [([0, 3], "", "0,3"), ([2], "2, 3", "2"), ([1], "GPU-a,GPU-b", "GPU-b")],
)
def test_the_gpus_of_a_session_have_its_names(wanted, given, found):
    assert torch_ranks.visible(wanted, given) == found


@pytest.mark.parametrize(("wanted", "given"), [(0, "2,3"), (2, "GPU-a,GPU-b")])
def test_no_gpu_is_taken_that_is_not_the_sessions(wanted, given):
    why = f"GPU {wanted} is not this session's: CUDA_VISIBLE_DEVICES={given}"
    with pytest.raises(RuntimeError, match=why):
        torch_ranks.visible([wanted], given)


# --- The name of the head.


@pytest.mark.parametrize(
    ("resolved", "error", "why"),
    [
        (("10.0.0.1",), "", ""),
        (("10.0.0.9", "10.0.0.1"), "", ""),
        (("10.0.0.9",), "", "gpu01 resolves to 10.0.0.9, which is not gpu01's"),
        (("127.0.1.1",), "", "gpu01 resolves to 127.0.1.1, which is not gpu01's"),
        ((), "Name or service not known", "gpu01: Name or service not known"),
    ],
)
def test_a_name_that_leads_elsewhere_is_told(resolved, error, why):
    assert engines.misled("gpu01", ("10.0.0.1",), resolved, error) == why


def test_no_rank_starts_when_the_name_leads_elsewhere(node):
    head = Peer("localhost", ("10.99.99.99",), free_port(), "")
    began = time.monotonic()
    seen = node.run("raise SystemExit", order(2, world=4, first=2, head=head))
    assert time.monotonic() - began < 10
    assert {one.phase for one in seen} == {"init"}
    assert {one.said.split(",")[-1] for one in seen} == {" which is not localhost's"}
    # The head itself may have its own name at the loopback.
    whole(node.run("", order(2, head=head)))


# --- Why there is no engine.


def found(supervisor: Supervisor, **how: object) -> tuple[Engine, Engine]:
    """Torch's two engines."""
    config = Config("nonce", "tag", engines=(TORCH,), **how)  # type: ignore[arg-type]
    made = engines.find(supervisor, config)
    made.close()
    first, second, ring = made.engines
    assert ring.name == RING
    return first, second


def executable(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def package(tmp_path) -> Callable[[str], tuple[str, ...]]:
    """A torch that is this text; the words of the environment for it."""

    def make(text: str) -> tuple[str, ...]:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text(textwrap.dedent(text))
        return (f"PYTHONPATH={tmp_path}",)

    return make


def test_a_python_that_is_not_there(supervisor, tmp_path):
    for one in found(supervisor, python=f"{tmp_path}/python"):
        assert one.why == f"{tmp_path}/python: No such file or directory"
        assert one.where == f"{tmp_path}/python"


def test_a_python_that_nobody_may_run(supervisor, tmp_path):
    (tmp_path / "python").write_text("")
    one, _ = found(supervisor, python=f"{tmp_path}/python")
    assert one.why == f"{tmp_path}/python: Permission denied"
    path = executable(tmp_path / "other", "#!/no/such/python\n")
    one, _ = found(supervisor, python=path)
    assert one.why == f"{path}: its interpreter is not there"


def test_a_session_without_python3_and_a_prefix_that_is_not_there(supervisor, tmp_path):
    one, _ = found(supervisor, environment=(f"PATH={tmp_path}",))
    assert one.why == "python3: command not found"
    one, _ = found(supervisor, prefix=("apptainer", "exec", "--nv", "image.sif"))
    assert one.why == "apptainer: command not found"
    assert one.where == "apptainer exec --nv image.sif python3"


def test_a_python_without_torch(supervisor, tmp_path):
    executable(tmp_path / "python3", f'#!/bin/sh\nexec {sys.executable} -I "$@"\n')
    one, two = found(supervisor, environment=(f"PATH={tmp_path}:{os.environ['PATH']}",))
    assert one.why == two.why == "python3: No module named 'torch'"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('libcudnn.so.9: cannot open shared object file: No such file')",
         "libcudnn.so.9: cannot open shared object file: No such file"),
        ("raise OSError('first\\n/opt/libnccl.so: undefined symbol: ncclX')",
         "/opt/libnccl.so: undefined symbol: ncclX"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('wrong node')", "SystemExit: wrong node"),
        ("import os; os.kill(os.getpid(), 11)", "ended with SIGSEGV"),
        ("import os; os.write(2, b'Illegal thing\\n'); os._exit(4)", "Illegal thing"),
        ("import os; os._exit(4)", "ended with status 4"),
    ],
)  # fmt: skip
def test_a_torch_that_cannot_be_imported(supervisor, package, text, why):
    words = package(text)
    name = os.path.basename(sys.executable)
    one, _ = found(supervisor, python=sys.executable, environment=words)
    assert one.why in (f"{name}: {why}", f"{sys.executable}: {why}")


def test_a_torch_that_hangs_is_waited_for_no_longer_than_its_share(package):
    words = package("import time; time.sleep(60)")
    with Supervisor("nodeready:test", 4) as short:
        began = time.monotonic()
        one, _ = found(short, python=sys.executable, environment=words)
        assert time.monotonic() - began < 20
    assert one.why == f"{sys.executable}: no import of torch in 2 s"


def test_a_driver_that_hangs_is_told_from_an_import_that_does(package):
    words = package(
        TORCH_OF_TEXT.format(**{**BUILT, "cuda": "13.0", "gpus": "__import__('time').sleep(60)"})
    )
    with Supervisor("nodeready:test", 6) as short:
        one, _ = found(short, python=sys.executable, environment=words)
    assert one.why == f"{sys.executable}: the GPUs' driver did not answer in 3 s"


def test_a_python_that_is_too_old_says_its_version(supervisor, pythons):
    old = {version: path for version, path in pythons.items() if version < (3, 8)}
    if not old:
        pytest.skip("no Python older than 3.8 is here")
    for version, path in old.items():
        one, _ = found(supervisor, python=path)
        name = os.path.basename(path)
        assert one.why == f"{name}: Python {version[0]}.{version[1]}: older than 3.8"


TORCH_OF_TEXT = """
    import sys, types
    __version__ = "2.9.0+cpu"
    class version:
        cuda = {cuda!r}
        hip = None
    distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
    distributed.is_available = lambda: {there}
    distributed.is_nccl_available = lambda: {nccl}
    distributed.is_gloo_available = lambda: {gloo}
    class cuda:
        is_initialized = staticmethod(lambda: {early})
        device_count = staticmethod(lambda: {gpus})
        @staticmethod
        def init():
            raise RuntimeError("The NVIDIA driver is too old (found version 11040). Please check "
                               "that it is new")
    print("noise of an import")
"""
BUILT = {"cuda": None, "there": True, "nccl": True, "gloo": True, "early": False, "gpus": 0}


@pytest.mark.parametrize(
    ("built", "nccl", "gloo"),
    [
        ({"cuda": None}, "PyTorch 2.9.0+cpu is built without CUDA and ROCm", ""),
        ({"cuda": "13.0", "nccl": False}, "PyTorch 2.9.0+cpu is built without NCCL", ""),
        ({"cuda": "13.0"}, "PyTorch sees no GPU: The NVIDIA driver is too old (found version "
         "11040)", ""),
        ({"cuda": "13.0", "gpus": 4, "gloo": False}, "",
         "PyTorch 2.9.0+cpu is built without gloo"),
        ({"there": False}, "PyTorch 2.9.0+cpu is built without torch.distributed",
         "PyTorch 2.9.0+cpu is built without torch.distributed"),
        ({"cuda": "13.0", "gpus": 4, "early": True}, "PyTorch sees no GPU: the import of torch "
         "initialises CUDA: no rank can be forked", ""),
    ],
)  # fmt: skip
def test_a_torch_that_has_not_everything(supervisor, package, built, nccl, gloo):
    words = package(TORCH_OF_TEXT.format(**{**BUILT, **built}))
    one, two = found(supervisor, python=sys.executable, environment=words)
    assert (one.why, two.why) == (nccl, gloo)
    assert one.version == two.version == "2.9.0+cpu"


def test_a_prefix_that_prints_is_passed_over(supervisor, package, tmp_path):
    words = package(TORCH_OF_TEXT.format(**BUILT))
    prefix = executable(
        tmp_path / "container", '#!/bin/sh\necho "INFO: mounting"\necho {}\nexec "$@"\n'
    )
    one, two = found(supervisor, python=sys.executable, prefix=(prefix, "env"), environment=words)
    assert two.why == ""
    assert one.where == f"{prefix} env {sys.executable}"


def test_the_program_runs_on_python_3_8(pythons):
    text = Path(torch_ranks.__file__).read_text()
    ast.parse(text, feature_version=(3, 8))
    for version, path in pythons.items():
        if version >= (3, 8):
            ask = "import sys; exec(sys.stdin.read()); print(last_line('a\\nb'))"
            done = subprocess.run([path, "-c", ask], input=text, capture_output=True, text=True,
                                  check=False)  # fmt: skip
            assert done.stdout == "b\n", done.stderr


# --- What a rank waits for.

WAITING = """
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=0)
name = listener.getsockname()
kept = []
for _ in range(4):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(name)
    kept.append(one)
print(waiting())
"""


def test_a_connection_that_nobody_answers_is_told_with_its_address():
    """A listener whose queue is full does not answer: the kernel drops what comes (listen(2))."""
    text = Path(torch_ranks.__file__).read_text() + WAITING
    done = subprocess.run(
        [sys.executable, "-"], input=text, capture_output=True, text=True, check=True
    )
    assert ast.literal_eval(done.stdout) == {"late": "127.0.0.1 does not answer", "retransmits": 0}


@pytest.mark.parametrize(
    ("row", "address"),
    [("0200A00A", "10.160.0.2"), ("B80D01200000000000000000 01000000".replace(" ", ""),
      "2001:db8::1")],
)  # fmt: skip
def test_addresses_of_the_kernels_table(row, address):
    number = bytes.fromhex(row)
    if sys.byteorder == "big":
        number = b"".join(number[at : at + 4][::-1] for at in range(0, len(number), 4))
    assert torch_ranks.address(number) == address


# --- Errors of libraries, in one line.


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("NCCL error in: ../torch/csrc/NCCLUtils.hpp:317, unhandled system error, NCCL version "
         "2.18.5\nncclSystemError: System call failed.\nLast error:\nConnect to 10.0.0.2<4> "
         "failed",
         "Connect to 10.0.0.2<4> failed"),
        ("NCCL error in: x:317, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA "
         "function failed.\nLast error:\n",
         "ncclUnhandledCudaError: Call to CUDA function failed."),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
         "other API call, so the stacktrace below might be incorrect.\nFor debugging consider "
         "passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
         "device-side assertions.\n", "CUDA error: out of memory"),
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
         "[10.0.0.2]:3456", "Connection closed by peer [10.0.0.2]:3456"),
        ("Connection was likely closed.\nException raised from recvBytes at /x.cpp:5 (most recent "
         "call first):\nframe #0: c10::Error", "Connection was likely closed."),
        ("", ""),
    ],
)  # fmt: skip
def test_an_error_of_many_lines_is_the_one_that_says_what_happened(text, line):
    assert torch_ranks.last_line(text) == line


# --- nccl-tests: recorded outputs.

HEAD = """\
# nccl-tests version 2.17.6 nccl-headers=22808 nccl-library=22808
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 4096 maxBytes 268435456 step: 65536(factor) warmup iters: 2 iters: 5 \
agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid     52 on      gpu01 device  0 [0000:18:00] NVIDIA H200 NVL
#  Rank  1 Group  0 Pid     52 on      gpu01 device  1 [0000:67:00] NVIDIA H200 NVL
#
#                                                              out-of-place                       \
in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   \
algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  \
(GB/s)  (GB/s)
"""
GOOD = (
    HEAD
    + """\
        4096          1024     float     sum      -1    19.25    0.21    0.21      0    18.43    \
0.22    0.22      0
   268435456      67108864     float     sum      -1   1555.75  172.54  172.54      0  1558.13  \
172.28  172.28      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 86.3125
#
# Collective test concluded: all_reduce_perf
"""
)
WRONG = GOOD.replace("172.54      0", "172.54     24").replace(": 0 OK", ": 1 FAILED")
FAILED = (
    HEAD
    + """\
gpu01:5068:5080 [1] misc/nvmlwrap.cc:183 NCCL WARN nvmlDeviceGetHandleByPciBusId() failed: \
Not Found
gpu01: Test NCCL failure common.cu:392 'unhandled cuda error (run with NCCL_DEBUG=INFO for \
details) / '
 .. gpu01 pid 5068: Test failure common.cu:590
 .. gpu01 pid 5068: Test failure all_reduce.cu:90
"""
)
RCCL = """\
# rccl-tests version 2.17.9-develop:2596ca5f71 rccl-headers=22803 rccl-library=22707
       65536         16384     float     sum      -1    18.95    3.46    6.05    N/A    18.63    \
3.52    6.16    N/A
# Out of bounds values : 0 OK
"""
OLD = """\
       size         count    type   redop     time   algbw   busbw  error     time   algbw   \
busbw  error
        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
    33554432       8388608   float     sum   3241.9   10.35   18.11  4e-07   3227.2   10.40   \
18.20  4e-07
 Out of bounds values : 0 OK
 Avg bus bandwidth    : 18.155
"""


def test_a_good_run_of_nccl_tests():
    assert engines.performance(GOOD) == engines.Performance(
        "2.17.6", "NCCL 2.28.8", True, "", 0.01843, 172.54 * 8, ""
    )


def test_wrong_sums_of_nccl_tests():
    seen = engines.performance(WRONG)
    assert (seen.whole, seen.said) == (True, "")
    assert seen.wrong == "all_reduce of 268435456 bytes: 24 numbers are wrong"
    bounds = engines.performance(GOOD.replace(": 0 OK", ": 3 FAILED"))
    assert bounds.wrong == "all_reduce: out of bounds values: 3"


def test_a_failed_run_of_nccl_tests():
    seen = engines.performance(FAILED)
    assert not seen.whole
    assert seen.said == (
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details) "
        "(nvmlDeviceGetHandleByPciBusId() failed: Not Found)"
    )


def test_unchecked_and_old_runs_of_nccl_tests():
    seen = engines.performance(RCCL)
    assert (seen.version, seen.library) == ("2.17.9-develop:2596ca5f71", "RCCL 2.27.7")
    assert (seen.whole, seen.wrong, seen.gbps) == (False, "", 6.16 * 8)
    seen = engines.performance(OLD)
    assert (seen.whole, seen.wrong, seen.version) == (True, "", "")
    assert seen.gbps == pytest.approx(145.6)
    cut = GOOD[: GOOD.index("# Out of bounds")]
    assert not engines.performance(cut).whole


def vendor(supervisor: Supervisor, place: Path, text: str, environment: tuple[str, ...] = ()):
    """nccl-tests that is this shell text, on a node with two GPUs."""
    executable(place / "all_reduce_perf", f'#!/bin/sh\n[ "$1" = -h ] && exit 0\n{text}')
    executable(place / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\necho 'GPU 1: NVIDIA'")
    config = Config("nonce", "tag", engines=(NCCL_TESTS,), environment=environment)
    return engines.find(supervisor, config)


def alone(gpus: tuple[int, ...] = (1, 0), **more: object) -> Collective:
    return order(len(gpus), engine=NCCL_TESTS, backend="nccl", gpus=gpus, **more)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_nccl_tests_runs_over_the_gpus_of_the_order(supervisor, path):
    (path / "good").write_text(GOOD)
    text = f'echo "$CUDA_VISIBLE_DEVICES $*" >{path}/asked\ncat {path}/good'
    made = vendor(supervisor, path, text)
    first, ring = made.engines
    assert (first.name, first.why, first.where) == (NCCL_TESTS, "", f"{path}/all_reduce_perf")
    assert (made.gpus, ring.name) == (2, RING)
    seen = made.run(alone(large=256 << 20), (), threading.Event())
    whole(seen)
    assert [(one.gpu, one.ms, one.gbps) for one in seen] == [
        (1, 0.0184, 1380.32), (0, 0.0184, 1380.32),
    ]  # fmt: skip
    assert (
        path / "asked"
    ).read_text() == "1,0 -b 4096 -e 268435456 -f 65536 -g 2 -n 5 -w 2 -c 1\n"


def test_nccl_tests_that_fails_hangs_or_sums_wrongly(supervisor, path):
    for name, text in (("wrong", WRONG), ("failed", FAILED)):
        (path / name).write_text(text)
    made = vendor(supervisor, path, f"cat {path}/wrong; exit 1")
    (seen, _) = made.run(alone(), (), threading.Event())
    assert (seen.phase, seen.said) == ("done", "")
    assert seen.wrong == "all_reduce of 268435456 bytes: 24 numbers are wrong"
    made = vendor(supervisor, path, f"cat {path}/failed; exit 3")
    (seen, _) = made.run(alone(), (), threading.Event())
    assert (seen.phase, seen.said[:20], seen.gbps) == ("all_reduce", "unhandled cuda error", 0.0)
    made = vendor(supervisor, path, "echo no libcudart >&2; exit 127")
    (seen, _) = made.run(alone(), (), threading.Event())
    assert (seen.phase, seen.said) == (
        "init",
        "all_reduce_perf ended with status 127: no libcudart",
    )
    began = time.monotonic()
    made = vendor(supervisor, path, "sleep 4321 & sleep 4321")
    (seen, _) = made.run(alone(limit_s=2.0), (), threading.Event())
    assert time.monotonic() - began < 20
    assert seen.said.startswith("no end after")
    left = subprocess.run(["pgrep", "-f", "sleep 4321"], capture_output=True, check=False)
    assert not left.stdout


def test_nccl_tests_proves_one_node_alone(supervisor, path):
    made = vendor(supervisor, path, "exit 9")
    (seen, _) = made.run(alone(world=4), (), threading.Event())
    assert seen.said == "nccl-tests without MPI proves the GPUs of one node"


def test_no_nccl_tests_and_an_engine_that_nobody_has(supervisor, tmp_path):
    config = Config("nonce", "tag", engines=(NCCL_TESTS,), environment=(f"PATH={tmp_path}",))
    made = engines.find(supervisor, config)
    assert made.engines[0].why == "all_reduce_perf: not found"
    (seen, _) = made.run(alone(), (), threading.Event())
    assert (seen.phase, seen.said) == ("start", "all_reduce_perf: not found")
    (seen, _) = made.run(order(), (), threading.Event())
    assert seen.phase == "start"
