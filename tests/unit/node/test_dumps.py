"""What py-spy and /proc print, read: as it is, empty, damaged and made to harm."""

import base64
import gzip
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nodeready.agent.runtime import Ended, ProcessSupervisor
from nodeready.agent.stacks import processes, py_spy
from nodeready.agent.stacks import program as answer
from nodeready.agent.stacks.processes import (
    HANGS,
    Facts,
    environment,
    facts,
    kernel_stack,
    probe_each,
    stat,
)
from nodeready.agent.stacks.py_spy import CUT, KEPT_FRAMES, NO_CALL, Dump, failure_reason, parse
from nodeready.core.base import ProbeError
from tests.cases import cases, with_table
from tests.helpers import executable


def frame(name, line=1, **more):
    place = {"filename": f"/x/{name}.py", "short_filename": f"{name}.py", "module": None}
    return {"name": name, "line": line, "locals": None, **place, **more}


def thread(name, *frames, gil=False, tid=7):
    known = {"pid": 5, "thread_id": 1, "os_thread_id": tid, "active": False, "owns_gil": gil}
    return {**known, "thread_name": name, "frames": list(frames), "process_info": None}


def read(*threads) -> Dump:
    return parse(json.dumps(threads), 5)


def test_a_dump_is_turned_round():
    dump = read(
        thread("Thread-2", frame("b")),
        thread("Thread-1", frame("a")),
        thread("MainThread", frame("wait", 9), frame("main"), gil=True),
    )
    assert dump.main == (("main", "main.py", 1), ("wait", "wait.py", 9))
    assert [other.name for other in dump.threads] == ["Thread-2", "Thread-1"]
    assert (dump.gil, dump.error) == ("MainThread", "")
    assert read(thread("x", frame("a"), tid=5), thread("y", frame("b"))).main[0][0] == "a"
    assert read(thread("x", frame("a")), thread(None, frame("b"))).main[0][0] == "b"
    # Without a call, as while the functions that atexit has registered are called.
    dump = read(thread("Thread-1", frame("a")), thread("MainThread"))
    others = [other.name for other in dump.threads]
    assert (dump.main, dump.error, others) == (None, NO_CALL, ["Thread-1"])


def test_addresses_are_no_places():
    main = read(thread("MainThread", frame("0x7f11d5ca71f5"), frame("0xfun"))).main
    assert [name for name, *_ in main] == ["0xfun", "?"]
    library = {"name": "f", "filename": "/a/libc.so", "line": 0}
    assert read(thread("MainThread", library)).main == (("f", "libc.so", 0),)


def test_a_deep_stack_is_cut_in_the_middle():
    deep = [frame("r" * 400, number) for number in range(2 * KEPT_FRAMES + 1)]
    whole = read(thread("MainThread", *deep[:-1])).main
    assert [line for *_, line in whole] == list(range(2 * KEPT_FRAMES))[::-1]
    main = read(thread("MainThread", *deep)).main
    assert len(main) == 2 * KEPT_FRAMES + 1
    assert main[KEPT_FRAMES] == CUT
    lines = [main[place][2] for place in (0, KEPT_FRAMES - 1, -KEPT_FRAMES, -1)]
    assert lines == [2 * KEPT_FRAMES, KEPT_FRAMES + 1, KEPT_FRAMES - 1, 0]
    assert max(len(name) for name, *_ in main) == 300


FRAMES = [{"name": "f"}, frame("f", "1"), frame("f", True), "f"]
NO_DUMPS = [
    *("", "[", "{}", "null", "[1]", "[{}]", "[[]]", "[" * 100_000),
    *(json.dumps([thread("MainThread", wrong)]) for wrong in FRAMES),
    json.dumps([{**thread("MainThread"), "frames": {}}]),
    '[{"thread_name": "MainThread", "frames": [{"name": "f", "line": NaN}]}]',
]


@pytest.mark.parametrize("text", NO_DUMPS, ids=lambda text: text[-40:])
def test_what_is_no_dump(text):
    dump = parse(text, 5)
    assert (dump.main, dump.error) == (None, "py-spy's output cannot be parsed")


@pytest.mark.parametrize(("count", "others"), [(1001, 1000), (1002, 1000)])
def test_the_threads_of_a_dump_are_bounded(count, others):
    assert read().error == "py-spy found no thread"
    assert len(read(*[thread(f"t{n}") for n in range(count)]).threads) == others


@pytest.mark.parametrize("case", cases(__file__, "cases/py_spy_errors.json"))
def test_errors_by_their_words(case):
    """As py-spy 0.4.3 writes them with RUST_LOG=py_spy=warn."""
    ended = Ended(case.get("status", 1), "", case["stderr"], 0.1)
    assert failure_reason(ended) == (case.get("problem", case["name"]), case["again"])


def test_a_process_has_ended_only_when_it_is_gone(tmp_path):
    """py-spy says the same of a file that it does not find."""
    script = "echo 'Error: No such file or directory (os error 2)' >&2; exit 1"
    spy = executable(tmp_path / "py-spy", script)
    with (
        subprocess.Popen(["sleep", "60"]) as process,
        ProcessSupervisor("nodeready:test", 20) as one,
    ):
        living = py_spy.take(one, spy, process.pid, 9).error
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ended = py_spy.take(one, spy, process.pid, 9).error
    assert (living, ended) == (py_spy.NO_FILE, py_spy.ENDED)


def local(name, value):
    return {"name": name, "addr": 1, "arg": False, "repr": value}


def test_variables_of_the_users_innermost_calls_without_secrets():
    rows = [local("self", "<Trainer at 0x7f00>"), local("api_key", '"k"'), *[local("x", "1")] * 99]
    library = "/opt/lib/python3.11/site-packages/torch/nn.py"
    wait = frame("wait", locals=[local("y", "2")], filename=library)
    long = [frame(f"f{number}", locals=[local("s", '"' + "a " * 200)]) for number in range(5)]
    step = frame("step", locals=rows)
    names = read(thread("MainThread", wait, step, frame("none", locals=[]), *long)).locals
    assert names[:3] == ("step: self = <Trainer>", "step: api_key = (left out)", "step: x = 1")
    assert len(names) == 20 + 2
    assert names[-1].startswith('f1: s = "a a')
    assert len(names[-1]) <= 130
    assert "".join(names).count("wait:") == 0
    assert read(thread("MainThread", wait)).locals == ("wait: y = 2",)
    # Such that make no sense cost no stack.
    for bad in (7, "x", [7], [{}], [{"name": 1, "repr": None}], {"a": 1}):
        assert read(thread("MainThread", frame("a", locals=bad))).main == (("a", "a.py", 1),)


@with_table("name, value, path")
def test_the_lock_file_among_the_variables(name, value, path):
    frames = [
        frame("wait", locals=[local("self", "<B at 0x1>")]),
        frame("a", locals=[local(name, value)]),
    ]
    assert read(thread("MainThread", *frames)).lock_file == path


def test_py_spy_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert py_spy.find("/none") == ""
    mine = executable(tmp_path / "py-spy", "")
    assert py_spy.find("/none") == mine
    assert py_spy.find("/bin/sh") == "/bin/sh"


STAT = "4711 (a) R (b)) S 10 4711 4711 0 -1 4194304 1 0 0 0 150 50 0 0 20 0 37 0 2770550 1 1"
STATUS = "Name:\ta\nState:\tS\nTracerPid:\t12\nUid:\t1000\t0\t0\t0\n"
SWITCHES = "voluntary_ctxt_switches:\t163\nnonvoluntary_ctxt_switches:\t9\n"
STACK = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x105/0x260\n[<0>] 0xffffffff\n"
IO = "rchar: 9000\nwchar: 800\nsyscr: 7\nsyscw: 2\nread_bytes: 4096\n"


def test_the_facts_of_a_process():
    main = ("1500000000 77 12\n", STAT)
    seen = facts(STAT, STATUS + SWITCHES, "futex_wait_queue", STACK, main, io=IO, task_io=IO)
    stack = ("futex_wait_queue", "do_futex")
    assert seen == Facts(
        *("S", "futex_wait_queue", stack, 2.0, 27705.5, 37, 12, 1000),
        **{"main_cpu_s": 1.5, "switches": 163, "calls": 9, "io": (0, 9000, 7, 800, 2)},
    )
    assert (stat(STAT).name, stat(STAT).parent) == ("a) R (b)", 10)


def test_facts_that_the_kernel_does_not_tell():
    seen = facts(STAT, "", "0", "")
    # Another user's process does not tell how often it has read and written.
    assert (seen.wait_channel, seen.switches, seen.calls) == ("", 0, None)
    # A kernel without CONFIG_SCHED_INFO has no such file, or only zeros that say nothing.
    assert facts(STAT, STATUS, "0", "", ("", STAT)).main_cpu_s == 2.0
    assert facts(STAT.replace(" 4194304 ", " 4194308 "), "", "", "").exiting
    assert facts("", STATUS, "", "") is None
    for text in ("x", "1 (a S 1", "1 (a) S 1 2 3", "1 (a) S" + " x" * 40):
        assert stat(text) is None
    assert kernel_stack("") == ()
    assert len(kernel_stack("[<0>] f+0x1/0x2\n" * 1000)) == 64


def test_the_environment_but_for_what_is_nobodys_business():
    data = b"RANK=3\0AWS_SECRET=RANK=9\0RANK=4\0\0=x\0WORLD_SIZE=\xff8\0MASTER_ADDR=" + b"a" * 999
    kept = {"RANK": "3", "WORLD_SIZE": "\ufffd8", "MASTER_ADDR": "a" * 256}
    assert environment(data) == kept
    assert environment(b"") == {}
    assert environment(b"\0" * 5000) == {}


def hang(*_):
    threading.Event().wait()


def test_a_look_that_hangs_costs_itself(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(processes, "_NEXT_PATIENCE_S", 0.3)

    def look(number):
        if number in (2, 4):
            hang()
        if number == 5:
            os._exit(3)
        return None if number == 3 else number * 10

    results = probe_each(look, range(1, 8), time.monotonic() + 60)
    assert results == {1: 10, 2: HANGS, 3: None, 4: HANGS, 5: HANGS, 6: 60, 7: 70}
    assert probe_each(look, [1], time.monotonic() - 1) == {}


def test_this_process_is_shown_as_it_is():
    rows = {process.pid: process for process in processes.scan(time.monotonic() + 60)[0]}
    mine = rows[os.getpid()]
    assert (mine.python, mine.parent) == (True, os.getppid())
    argv = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    assert mine.command.startswith(argv[0].decode())
    assert 2 not in rows  # kthreadd, or nobody
    now = processes.observe([os.getpid(), 2**22 + 1], time.monotonic() + 60)
    assert now[os.getpid()].start_s == mine.start_s
    assert now[2**22 + 1] is None


def test_a_process_that_hangs_in_execve_costs_what_its_lock_guards(monkeypatch):
    """Where execve(2) waits for a file system, the files that wait for its lock wait with it."""
    here, contents = os.getpid(), processes.contents

    def locked(path, most=65536):
        if path.endswith(("/stack", "/io")):
            assert os.getpid() != here, f"{path} is read where nobody ends it"
            hang()
        return contents(path, most)

    monkeypatch.setattr(processes, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(processes, "_NEXT_PATIENCE_S", 0.3)
    monkeypatch.setattr(processes, "contents", locked)
    seen = processes.observe([here], time.monotonic() + 60)[here]
    assert (seen.kernel_stack, seen.calls) == ((), None)
    assert seen.state


@pytest.mark.parametrize(("data", "why"), [
    (b"no gzip at all", "damaged"),
    (b"", "cut off"),
    (gzip.compress(b"{}" * 99, mtime=0)[:-9], "cut off"),
    (gzip.compress(b"[" * 100_000, mtime=0), "nested too deep"),
    (gzip.compress(b" " * (1 << 20) + b" ", mtime=0), "more than 1 MiB"),
])  # fmt: skip
def test_an_answer_there_and_back_and_what_is_none(data, why, monkeypatch):
    trace = {"processes": [{"note": "ü\n\u2028"}], "error": ""}
    assert answer.unpack(f"noise N trace x\nmotd N {answer.pack(trace)}\nbye", "N") == trace
    monkeypatch.setattr(answer, "MAX_BYTES", 1 << 20)
    texts = {"": "no answer", "N2 trace x": "no answer", "N trace %%%": "damaged"}
    for text, known in {**texts, f"N trace {base64.b64encode(data).decode()}": why}.items():
        with pytest.raises(ProbeError, match=known):
            answer.unpack(text, "N")


def test_the_whole_numbers_among_the_variables():
    rows = [local("pos", "-260"), local("s", '"7"'), local("x", "0.5")]
    frames = [frame("build", locals=rows), frame("main", locals=[local("pos", "7")])]
    assert read(thread("MainThread", *frames)).numbers == {"build: pos": -260, "main: pos": 7}
