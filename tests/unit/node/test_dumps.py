"""What py-spy and /proc print, read: as they are, empty, damaged and made to harm."""

from __future__ import annotations

import base64
import gzip
import json
import os
import time
from pathlib import Path

import pytest

from nodeready.node.runtime import Ended
from nodeready.node.stacks import processes, py_spy
from nodeready.node.stacks import program as answer
from nodeready.node.stacks.processes import HANGS, each, environment, facts, kernel_stack, stat
from nodeready.node.stacks.py_spy import (
    CUT,
    ENDED_INTERPRETER,
    KEPT_FRAMES,
    NO_CALL,
    Dump,
    parse,
    words,
)
from nodeready.subjects.base import ProbeError


def frame(name, line=1, **more):
    return {"name": name, "filename": f"/x/{name}.py", "short_filename": f"{name}.py",
            "module": None, "line": line, "locals": None, **more}  # fmt: skip


def thread(name, *frames, gil=False, tid=7):
    return {"pid": 5, "thread_id": 1, "thread_name": name, "os_thread_id": tid, "active": False,
            "owns_gil": gil, "frames": list(frames), "process_info": None}  # fmt: skip


def read(*threads) -> Dump:
    return parse(json.dumps(threads), 5)


def test_a_dump_is_turned_round():
    seen = read(
        thread("Thread-2", frame("b")),
        thread("Thread-1", frame("a")),
        thread("MainThread", frame("wait", 9), frame("main"), gil=True),
    )
    assert seen.main == (("main", "main.py", 1), ("wait", "wait.py", 9))
    assert [one.name for one in seen.threads] == ["Thread-2", "Thread-1"]
    assert (seen.gil, seen.error) == ("MainThread", "")


def test_a_main_thread_by_any_name():
    assert read(thread("x", frame("a"), tid=5), thread("y", frame("b"))).main[0][0] == "a"
    assert read(thread("x", frame("a")), thread(None, frame("b"))).main[0][0] == "b"


def test_a_main_thread_without_a_call_is_told_as_that():
    """As while the functions that atexit has registered are called."""
    seen = read(thread("Thread-1", frame("a")), thread("MainThread"))
    assert (seen.main, seen.error) == (None, NO_CALL)
    assert [one.name for one in seen.threads] == ["Thread-1"]


def test_addresses_are_no_places():
    main = read(thread("MainThread", frame("0x7f11d5ca71f5"), frame("0xfun"))).main
    assert [name for name, *_ in main] == ["0xfun", "?"]
    assert read(thread("MainThread", {"name": "f", "filename": "/a/libc.so", "line": 0})).main == (
        ("f", "libc.so", 0),
    )


def test_a_stack_as_deep_as_memory_is_cut_in_the_middle():
    deep = [frame("recurse" * 1000, number) for number in range(12_000)]
    text = json.dumps([thread("MainThread", *deep)])
    assert len(text) > 10_000_000
    main = parse(text, 5).main
    assert len(main) == 2 * KEPT_FRAMES + 1
    assert [main[place][2] for place in (0, KEPT_FRAMES - 1, -KEPT_FRAMES, -1)] == [
        11_999, 11_500, 499, 0,
    ]  # fmt: skip
    assert main[KEPT_FRAMES] == CUT
    assert max(len(name) for name, *_ in main) == 300
    whole = read(thread("MainThread", *deep[: 2 * KEPT_FRAMES])).main
    assert [line for *_, line in whole] == list(range(2 * KEPT_FRAMES))[::-1]


@pytest.mark.parametrize(
    "text",
    [
        "", "Process 5: python", "[", "{}", "null", "[1]", "[{}]", "[[]]", '"x"', "[" * 100_000,
        json.dumps([thread("MainThread", {"name": "f"})]),
        json.dumps([thread("MainThread", frame("f", "1"))]),
        json.dumps([thread("MainThread", frame("f", True))]),
        json.dumps([thread("MainThread", "f")]),
        json.dumps([{**thread("MainThread"), "frames": {}}]),
        '[{"thread_name": "MainThread", "frames": [{"name": "f", "line": NaN}]}]',
    ],
)  # fmt: skip
def test_what_is_no_dump(text):
    seen = parse(text, 5)
    assert seen.error == "py-spy's output makes no sense"
    assert seen.main is None


def test_nothing_in_a_dump():
    assert read().error == "py-spy found no thread"
    assert len(read(*[thread(f"t{n}") for n in range(200)]).threads) == 199


@pytest.mark.parametrize(
    ("said", "expected", "again"),
    [
        (
            "Error: Failed to get process executable name. Check that the process is running.\n\n"
            "Caused by:\n    0: No such file or directory (os error 2)\n",
            "it has ended",
            False,
        ),
        (
            "Error: Failed to open process 7\n\nCaused by: Permission denied (os error 13)",
            "not permitted",
            False,
        ),
        (
            "Permission Denied: Try running again with elevated permissions by going 'sudo'",
            "not permitted",
            False,
        ),
        (
            "Error: EPERM: Operation not permitted",
            "not permitted, or traced by another",
            False,
        ),
        (
            "Error: Failed to find python version from target process",
            "not Python, or one that py-spy does not know",
            False,
        ),
        (
            "Error: Failed to find a python interpreter in the .data section",
            "py-spy cannot read it: a Python that it does not know, or more than 4096 calls deep",
            True,
        ),
        ("Error: Failed to copy PyThreadState", "py-spy: Failed to copy PyThreadState", True),
        ("", "py-spy: exit status 1", True),
    ],
)
def test_errors_by_their_words(said, expected, again):
    assert words(Ended(1, "", said, 0.1)) == (expected, again)


_WARNS = (
    "[2026-11-22T15:53:48.782550745Z WARN  py_spy::python_process_info] Interpreter address from "
    "symbol is invalid {}\n"
    "Error: Failed to find a python interpreter in the .data section\n"
)


def test_an_interpreter_that_has_ended_is_told_from_one_that_cannot_be_read():
    """What py-spy 0.4.3 says with RUST_LOG=py_spy=warn."""
    ended = Ended(1, "", _WARNS.format("0000000000000000"), 0.1)
    assert words(ended) == (ENDED_INTERPRETER, False)
    other = Ended(1, "", _WARNS.format("00007f471114e540"), 0.1)
    assert words(other)[0].startswith("py-spy cannot read it")
    logged = Ended(1, "", _WARNS.split("\n", 1)[0] + "\nError: odd\n", 0.1)
    assert words(logged)[0] == "py-spy: odd"


def local(name, value):
    return {"name": name, "addr": 1, "arg": False, "repr": value}


def test_variables_of_the_users_innermost_calls_without_secrets():
    rows = [local("self", "<Trainer at 0x7f00>"), local("api_key", '"k"'), *[local("x", "1")] * 99]
    library = "/opt/lib/python3.11/site-packages/torch/nn.py"
    seen = read(
        thread(
            "MainThread",
            frame("wait", locals=[local("y", "2")], filename=library),
            frame("step", locals=rows),
            frame("none", locals=[]),
            *[frame(f"f{number}", locals=[local("s", '"' + "a " * 200)]) for number in range(5)],
        )
    )
    assert seen.locals[:3] == (
        "step: self = <Trainer>",
        "step: api_key = (left out)",
        "step: x = 1",
    )
    assert len(seen.locals) == 20 + 2
    assert seen.locals[-1].startswith('f1: s = "a a')
    assert len(seen.locals[-1]) <= 130
    assert "".join(seen.locals).count("wait:") == 0
    alone = read(thread("MainThread", frame("wait", locals=[local("y", "2")], filename=library)))
    assert alone.locals == ("wait: y = 2",)


@pytest.mark.parametrize("bad", [7, "x", [7], [{}], [{"name": 1, "repr": None}], {"a": 1}])
def test_variables_that_make_no_sense_cost_no_stack(bad):
    seen = read(thread("MainThread", frame("a", locals=bad)))
    assert seen.main == (("a", "a.py", 1),)


def test_py_spy_that_was_killed():
    assert words(Ended(-11, "", "", 0.1))[0] == "py-spy: signal 11"


STAT = "4711 (a) R (b)) S 10 4711 4711 0 -1 4194304 1 0 0 0 150 50 0 0 20 0 37 0 2770550 1 1"


def test_how_often_the_main_thread_has_waited_and_its_time():
    status = "Name:\ta\nvoluntary_ctxt_switches:\t163\nnonvoluntary_ctxt_switches:\t9\n"
    seen = facts(STAT, status, "0", "", ("1500000000 77 12\n", STAT))
    assert (seen.switches, seen.main_cpu_s) == (163, 1.5)
    # A kernel without CONFIG_SCHED_INFO has no such file, or only zeros that say nothing.
    assert facts(STAT, status, "0", "", ("", STAT)).main_cpu_s == 2.0
    assert facts(STAT, "", "0", "").switches == 0


def test_how_often_it_has_read_and_written():
    io = "rchar: 9000\nwchar: 800\nsyscr: 7\nsyscw: 2\nread_bytes: 4096\n"
    assert facts(STAT, "", "0", "", io=io).calls == 9
    # Another user's process does not tell.
    assert facts(STAT, "", "0", "").calls is None


def test_a_process_that_leaves_is_told():
    leaves = STAT.replace(" 4194304 ", " 4194308 ")
    assert facts(leaves, "", "", "").exiting
    assert not facts(STAT, "", "", "").exiting


def test_the_facts_of_a_process():
    status = "Name:\ta\nState:\tS\nTracerPid:\t12\nUid:\t1000\t0\t0\t0\n"
    stack = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x105/0x260\n[<0>] 0xffffffff\n"
    seen = facts(STAT, status, "futex_wait_queue", stack)
    assert (seen.state, seen.threads, seen.tracer, seen.uid) == ("S", 37, 12, 1000)
    assert (seen.cpu_s, seen.start_s) == (2.0, 27705.5)
    assert seen.kernel_stack == ("futex_wait_queue", "do_futex")
    assert stat(STAT).name == "a) R (b)"
    assert stat(STAT).parent == 10
    assert facts(STAT, "", "0", "").wait_channel == ""
    assert facts("", status, "", "") is None


@pytest.mark.parametrize("text", ["", "x", "1 (a S 1", "1 (a) S 1 2 3", "1 (a) S" + " x" * 40])
def test_what_is_no_process(text):
    assert stat(text) is None


def test_the_environment_but_for_what_is_nobodys_business():
    data = b"RANK=3\0AWS_SECRET=RANK=9\0RANK=4\0\0=x\0WORLD_SIZE=\xff8\0MASTER_ADDR=" + b"a" * 999
    seen = environment(data)
    assert seen == {"RANK": "3", "WORLD_SIZE": "\ufffd8", "MASTER_ADDR": "a" * 256}
    assert environment(b"") == {}
    assert environment(b"\0" * 5000) == {}
    assert kernel_stack("") == ()
    assert len(kernel_stack("[<0>] f+0x1/0x2\n" * 1000)) == 64


def test_a_look_that_hangs_costs_itself(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(processes, "_NEXT_PATIENCE_S", 0.1)

    def look(number):
        if number in (2, 4):
            time.sleep(600)
        if number == 5:
            os._exit(3)
        return None if number == 3 else number * 10

    found = each(look, range(1, 8), time.monotonic() + 60)
    assert found == {1: 10, 2: HANGS, 3: None, 4: HANGS, 5: HANGS, 6: 60, 7: 70}
    assert each(look, [1], time.monotonic() - 1) == {}


def test_this_process_is_found_as_it_is():
    found = {p.pid: p for p in processes.scan(time.monotonic() + 60)[0]}
    mine = found[os.getpid()]
    assert mine.python
    assert mine.parent == os.getppid()
    argv = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    assert mine.command.startswith(argv[0].decode())
    assert 2 not in found  # kthreadd, or nobody
    standing = processes.observe([os.getpid(), 2**22 + 1], time.monotonic() + 60)
    assert standing[os.getpid()].start_s == mine.start_s
    assert standing[2**22 + 1] is None


def test_a_process_that_hangs_in_execve_costs_what_its_lock_guards(monkeypatch):
    """Where execve(2) waits for a file system, the files that wait for its lock wait with it."""
    here, contents = os.getpid(), processes.contents

    def locked(path, most=65536):
        if path.endswith(("/stack", "/io")):
            assert os.getpid() != here, f"{path} is read where nobody ends it"
            time.sleep(600)
        return contents(path, most)

    monkeypatch.setattr(processes, "contents", locked)
    seen = processes.observe([here], time.monotonic() + 60)[here]
    assert (seen.kernel_stack, seen.calls) == ((), None)
    assert seen.state


def test_there_and_back():
    trace = {"processes": [{"note": "ü\n\u2028"}], "error": ""}
    line = f"noise N1 trace x\nmotd N1 {answer.pack(trace)}\nbye"
    assert answer.unpack(line, "N1") == trace


def packed(data: bytes) -> str:
    return f"N trace {base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no answer"),
        ("N2 trace x", "no answer"),
        ("N trace %%%", "damaged"),
        (packed(b"no gzip at all"), "damaged"),
        (packed(b""), "cut off"),
        (packed(gzip.compress(b"{}" * 99, mtime=0)[:-9]), "cut off"),
        (packed(gzip.compress(b"[" * 100_000, mtime=0)), "nested too deep"),
        (
            packed(gzip.compress(b" " * (answer.MOST_BYTES + 1), mtime=0)),
            "more than 64 MiB",
        ),
    ],
)
def test_what_is_no_answer(text, why):
    with pytest.raises(ProbeError, match=why):
        answer.unpack(text, "N")


def test_py_spy_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert py_spy.find("/none") == ""
    mine = tmp_path / "py-spy"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    assert py_spy.find("/none") == str(mine)
    assert py_spy.find("/bin/sh") == "/bin/sh"
