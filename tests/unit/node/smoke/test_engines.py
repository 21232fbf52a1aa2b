"""The engines of a node: why one cannot be used, and what nccl-tests print.

Real torch runs in tests/lab/test_units_smoke_torch.py; here a package of a few lines stands in.
"""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.smoke import engines, torch_ranks
from nodeready.agent.smoke.engines import Performance
from nodeready.agent.smoke.orders import (
    NCCL_TESTS,
    PAIRS,
    TORCH,
    CollectiveOrder,
    Engine,
    RankNetwork,
    SmokeConfig,
    SmokePeer,
)
from tests.cases import cases, with_table
from tests.helpers import executable
from tests.unit.node.smoke.running_program import within


@pytest.fixture(scope="module")
def supervisor() -> Iterator[ProcessSupervisor]:
    with ProcessSupervisor("nodeready:test", 900) as supervisor:
        yield supervisor


def torch_engines(supervisor: ProcessSupervisor, **config: object) -> tuple[Engine, Engine]:
    given = SmokeConfig("nonce", "tag", engines=(TORCH,), **config)  # type: ignore[arg-type]
    found = engines.Engines(supervisor, given)
    found.close()
    nccl, gloo, pairs = found.engines
    assert pairs.name == PAIRS
    return nccl, gloo


@pytest.fixture
def package(tmp_path) -> Callable[[str], tuple[str, ...]]:
    """A torch that is this text; the words of the environment for it."""

    def make(text: str) -> tuple[str, ...]:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text(textwrap.dedent(text))
        return (f"PYTHONPATH={tmp_path}",)

    return make


def test_a_command_that_cannot_run(supervisor, tmp_path):
    (tmp_path / "empty").write_text("")
    odd = executable(tmp_path / "odd", "#!/no/such/python\n")
    executable(tmp_path / "python3", f'exec {sys.executable} -I "$@"')
    for config, why in (
        ({"python": "/nosuch/python"}, "/nosuch/python: No such file or directory"),
        ({"python": f"{tmp_path}/empty"}, f"{tmp_path}/empty: Permission denied"),
        ({"python": odd}, f"{odd}: its interpreter is not there"),
        ({"environment": ("PATH=/nosuch",)}, "python3: command not found"),
        ({"prefix": ("nosuch", "exec")}, "nosuch: command not found"),
        ({"environment": (f"PATH={tmp_path}:{os.environ['PATH']}",)},
         "python3: No module named 'torch'"),
    ):  # fmt: skip
        nccl, gloo = torch_engines(supervisor, **config)
        assert nccl.reason == gloo.reason == why


@pytest.mark.parametrize("case", cases(__file__, "engines.json", "import"))
def test_a_torch_that_cannot_be_imported(supervisor, package, case):
    words = package(case["name"])
    nccl, _ = torch_engines(supervisor, python=sys.executable, environment=words)
    begins = (os.path.basename(sys.executable), sys.executable)
    assert nccl.reason in [f"{name}: {case['why']}" for name in begins]


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


@pytest.mark.parametrize(("row", "why"), [
    ("", "no import of torch in 90 s"),
    ("imported", "the GPUs' driver did not answer in 90 s"),
])  # fmt: skip
def test_what_hangs_is_waited_for_no_longer_than_its_share(
    supervisor, package, monkeypatch, row, why
):
    """The clock jumps when the Python has printed this row."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.more, sleep=time.sleep)
    clock.more, plain = 0, engines._TorchProcess.lines

    def lines(self, wait_s: float) -> list[dict[str, object]]:
        rows = plain(self, min(wait_s, 0.1))
        clock.more += 1000 if row in str(rows) else 0
        return rows

    monkeypatch.setattr(engines, "time", clock)
    monkeypatch.setattr(engines._TorchProcess, "lines", lines)
    hang = {"cuda": "13.0", "gpus": "__import__('time').sleep(60)"}
    text = TORCH_OF_TEXT.format(**{**BUILT, **hang})
    words = package(text if row else "import time; time.sleep(60)")
    nccl, _ = torch_engines(supervisor, python=sys.executable, environment=words)
    assert nccl.reason == f"{sys.executable}: {why}"


@pytest.mark.parametrize("case", cases(__file__, "engines.json", "built"))
def test_a_torch_that_has_not_everything(supervisor, package, tmp_path, case):
    """Behind a prefix that prints."""
    words = package(TORCH_OF_TEXT.format(**{**BUILT, **case["built"]}))
    text = 'echo "INFO: mounting"\necho {}\nexec "$@"'
    prefix = (executable(tmp_path / "container", text), "env")
    found = torch_engines(supervisor, python=sys.executable, prefix=prefix, environment=words)
    assert [engine.reason for engine in found] == case["whys"]
    assert {engine.version for engine in found} == {"2.9.0+cpu"}


@pytest.mark.nightly
def test_other_pythons(supervisor, pythons):
    """The program of the ranks runs on Python 3.8; an older one says its version."""
    text = Path(torch_ranks.__file__).read_text()
    for version, path in pythons.items():
        if version < (3, 8):
            name = f"{os.path.basename(path)}: Python {version[0]}.{version[1]}"
            assert torch_engines(supervisor, python=path)[0].reason == f"{name}: older than 3.8"
            continue
        ask = "import sys; exec(sys.stdin.read()); print(last_line('a\\nb'))"
        done = subprocess.run(
            [path, "-c", ask], input=text, capture_output=True, text=True, check=False
        )
        assert done.stdout == "b\n", done.stderr


@with_table("resolved, error, why")
def test_a_name_that_leads_elsewhere(resolved, error, why):
    assert engines.name_problem("gpu01", ("10.0.0.1",), resolved, error) == why


@with_table("wanted, given, visible")
def test_only_gpus_of_the_session_are_visible_by_its_names(wanted, given, visible):
    if visible:
        assert torch_ranks.visible_devices(wanted, given) == visible
    else:
        why = f"GPU {wanted[0]} is not this session's: CUDA_VISIBLE_DEVICES={given}"
        with pytest.raises(RuntimeError, match=why):
            torch_ranks.visible_devices(wanted, given)


@pytest.mark.parametrize("case", cases(__file__, "engines.json", "error"))
def test_an_error_of_many_lines_is_the_line_that_says_what_happened(case):
    line = torch_ranks.last_line(case["text"])
    assert line == (case["name"] if case["text"] else "")


OUTPUTS = Path(__file__).parents[1] / "data" / "nccl_tests"
FAILED, GOOD, OLD, RCCL = (path.read_text() for path in sorted(OUTPUTS.iterdir()))
WRONG = GOOD.replace("172.54      0", "172.54     24").replace(": 0 OK", ": 1 FAILED")


TEXTS = {
    "good": GOOD,
    "wrong": WRONG,
    "out of bounds": GOOD.replace(": 0 OK", ": 3 FAILED"),
    "failed": FAILED,
    "rccl": RCCL,
    "old": OLD,
    "cut off": GOOD[: GOOD.index("# Out of bounds")],
}


@with_table("text, expected")
def test_what_nccl_tests_print(text, expected):
    assert engines.performance(TEXTS[text]) == Performance(*expected)


INFO = (
    "gpu1:7:9 [{0}] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>\n"
    "gpu1:7:9 [{0}] NCCL INFO NET/IB : No device found.\n"
    "gpu1:7:9 [{0}] NCCL INFO NET/Socket : Using [0]eth1:10.1.0.4<0>\n"
    "gpu1:7:9 [{0}] NCCL INFO Using network Socket\n"
    "gpu1:7:9 [{0}] NCCL INFO comm 0x1 rank {0} nranks 2 cudaDev {0} - Init COMPLETE\n"
)
SOCKET = RankNetwork("Socket", "eth1", note="NCCL sees no InfiniBand or RoCE device")


def test_of_nccls_own_lines_those_about_the_network_are_kept():
    channels = "".join(
        f"gpu1:7:9 [0] NCCL INFO Channel {n:02}/0 : 0[0] -> {n}[0] [send] via NET/Socket/{n}\n"
        for n in range(5000)
    )
    noise = "gpu1:7:9 [0] NCCL INFO Ring 02 : 2 -> 0 -> 1\n" * 9000
    warning = "gpu1:7:9 [0] misc/socket.cc:1 NCCL WARN Connection closed by remote peer gpu2<1>"
    number = torch_ranks.open_debug_file()
    try:
        for text in (INFO.format(0), channels, noise, warning):
            os.write(number, text.encode())
        lines = torch_ranks.debug_lines(number)
    finally:
        os.close(number)
    assert len(lines) == 7
    assert lines[-1] == warning
    assert engines._network(lines, 0) == replace(SOCKET, gdr=False)


def test_an_answer_names_the_network_of_each_rank():
    rows = [
        {"rank": 0, "phase": "done", "mismatch": "", "error": "", "ms": 1, "gbps": 1, "nccl": [],
         "address": ["", ""], **more}
        for more in ({"nccl": INFO.format(0).splitlines()}, {"address": ["eth0", "10.0.0.4"]},
                     {"address": ["", "10.0.0.4"]}, {})
    ]  # fmt: skip
    networks = [engines.rank_result(row).network for row in rows]
    gloo = RankNetwork("gloo", "eth0")
    assert networks == [SOCKET, gloo, RankNetwork("gloo", "10.0.0.4"), None]


@pytest.fixture
def vendor(supervisor, tmp_path, monkeypatch, stand_ins) -> Callable[[str], engines.Engines]:
    """nccl-tests that is this shell text, on a node with two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, output in (("good", GOOD), ("wrong", WRONG), ("failed", FAILED)):
        (tmp_path / name).write_text(output)

    def make(text: str) -> engines.Engines:
        stand_ins(all_reduce_perf=f'[ "$1" = -h ] && exit 0\ncd {tmp_path}\n{text}')
        return engines.Engines(supervisor, SmokeConfig("nonce", "tag", engines=(NCCL_TESTS,)))

    return make


def order(**changed: object) -> CollectiveOrder:
    given = {
        "number": 7, "engine": NCCL_TESTS, "backend": "nccl", "world": 2, "first": 0, "ranks": 2,
        "gpus": (1, 0), "head": SmokePeer("localhost", ("127.0.0.1",), 1, "token"),
        "small": 4096, "large": 256 << 20, "limit_s": 20.0,
    }  # fmt: skip
    return CollectiveOrder(**{**given, **changed})  # type: ignore[arg-type]


def test_nccl_tests_tells_the_network_from_its_own_file(vendor):
    """One process has all GPUs, and its warning is the reason of a failure."""
    text = INFO.format(0) + INFO.format(1).replace("Socket", "IB").replace("eth1", "eth2")
    warning = "gpu1:7:9 [0] init.cc:1 NCCL WARN Duplicate GPU detected"
    found = vendor(f'cat good; cat >"$NCCL_DEBUG_FILE" <<END\n{text}END\n')
    ranks = found.run(order(), threading.Event())
    assert [rank.ok for rank in ranks] == [True, True]
    assert [rank.network.name for rank in ranks] == ["Socket", "IB"]
    found = vendor(f'cat failed; echo "{warning}" >"$NCCL_DEBUG_FILE"; exit 3')
    assert "(Duplicate GPU detected)" in found.run(order(), threading.Event())[0].error


def test_nccl_tests_runs_over_the_gpus_of_the_order(vendor, tmp_path, supervisor):
    found = vendor('echo "$CUDA_VISIBLE_DEVICES $*" >asked\ncat good')
    perf, pairs = found.engines
    assert (perf.name, perf.reason) == (NCCL_TESTS, "")
    assert pairs.name == PAIRS
    ranks = found.run(order(), threading.Event())
    assert [(rank.ok, rank.ms, rank.gbps) for rank in ranks] == 2 * [(True, 0.0184, 1380.32)]
    words = "1,0 -b 4096 -e 268435456 -f 65536 -g 2 -n 5 -w 2 -c 1\n"
    assert (tmp_path / "asked").read_text() == words
    nowhere = SmokeConfig("nonce", "tag", engines=(NCCL_TESTS,), environment=(f"PATH={OUTPUTS}",))
    found = engines.Engines(supervisor, nowhere)
    rank, _ = found.run(order(), threading.Event())
    assert found.engines[0].reason == rank.error == "all_reduce_perf: not found"
    assert rank.phase == "start"
    rank, _ = found.run(order(engine=TORCH), threading.Event())
    assert rank.phase == "start"


@with_table("text, changed, phase, error")
def test_nccl_tests_that_fails_hangs_or_sums_wrongly(vendor, text, changed, phase, error):
    # A number that no other test sleeps.
    own = str(1_000_000 + os.getpid())
    for rank in vendor(text.replace("NUMBER", own)).run(order(**changed), threading.Event()):
        assert (rank.phase, rank.ok) == (phase, False)
        assert (rank.mismatch or rank.error).startswith(error)
        assert (rank.gbps > 0) == (phase == "done")
    # A process that was killed may be seen for a moment.
    assert within(5, lambda: f"sleep\0{own}\0".encode() not in command_lines())


def command_lines() -> bytes:
    show = ["sh", "-c", "cat /proc/[0-9]*/cmdline"]
    return subprocess.run(show, capture_output=True, check=False).stdout
