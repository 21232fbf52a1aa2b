"""gdb's words, as recorded from gdb 13, and which crashes are the same."""

from __future__ import annotations

import pytest

from nodeready.triage import cores as backtraces
from nodeready.triage.cores import Frame

# A program in C++ that aborts, with and without its symbols, and one in Python.
BOX = "(anonymous namespace)::Box<std::vector<int, std::allocator<int> > >"
FRAMES = [
    (
        "#0  __pthread_kill_implementation (threadid=<optimized out>, signo=signo@entry=6, "
        "no_tid=no_tid@entry=0) at ./nptl/pthread_kill.c:44",
        Frame("__pthread_kill_implementation", "./nptl/pthread_kill.c", 44),
    ),
    (
        f"#4  0x00005613e6f0a4a9 in {BOX}::operator() (this=0x7fff56dd6ed0, f=0x0, "
        's=0x5613e6f0c020 "a (b) <c") at a.cc:5',
        Frame(f"{BOX}::operator()", "a.cc", 5),
    ),
    (
        f"#5  0x00005613e6f0a33c in {BOX}::operator< (this=0x7fff56dd6ed0, o=...) at a.cc:5",
        Frame(f"{BOX}::operator<", "a.cc", 5),
    ),
    (
        "#8  0x00005613e6f0a840 in std::__invoke_impl<int, main()::<lambda(int)>&, int>"
        "(std::__invoke_other, struct {...} &) (__f=...) at /usr/include/c++/12/bits/invoke.h:61",
        Frame(
            "std::__invoke_impl<int, main()::<lambda(int)>&, int>"
            "(std::__invoke_other, struct {...} &)",
            "/usr/include/c++/12/bits/invoke.h",
            61,
        ),
    ),
    (
        "#11 0x00005613e6f0ad4a in std::function<int (int)>::operator()(int) const "
        "(this=0x7fff56dd6ff0, __args#0=3) at /usr/include/c++/12/bits/std_function.h:591",
        Frame(
            "std::function<int (int)>::operator()(int) const",
            "/usr/include/c++/12/bits/std_function.h",
            591,
        ),
    ),
    (
        "#3  0x00007f6ca1adc40e in ?? () from /lib/x86_64-linux-gnu/libffi.so.8",
        Frame("??", library="libffi.so.8", offset=0x40E),
    ),
    ("#9  0x00000000005236bb in PyEval_EvalCode ()", Frame("PyEval_EvalCode")),
    ("#3  <signal handler called>", Frame("<signal handler called>")),
    # Nothing to do.
    ("", None),
    ("Backtrace stopped: Cannot access memory at address 0x7fff77d01b28", None),
    ("[Current thread is 1 (Thread 0x7f0758e99740 (LWP 22591))]", None),
    # Malformed and hostile.
    ("#", None),
    ("#1", None),
    ("#1 (((((((((", Frame("(((((((((")),
    ('#1 f (s="x at y:9") at z.c:' + "9" * 30, Frame("f", "z.c", 999999999)),
    ("#1 \x1b[31mf (a=1) at \x1b]0;x\x07:3", Frame("\x1b[31mf", "\x1b]0;x\x07", 3)),
]


@pytest.mark.parametrize(("row", "expected"), FRAMES)
def test_a_frame_is_what_does_not_change_from_crash_to_crash(row, expected):
    assert backtraces.frame(row) == expected


TEXT = """[New LWP 22591]
Program terminated with signal SIGABRT, Aborted.
#0  __pthread_kill_implementation () at ./nptl/pthread_kill.c:44

== the thread of the signal
#0  __pthread_kill_implementation () at ./nptl/pthread_kill.c:44
#1  0x00007f0758a44472 in __GI_abort () at ./stdlib/abort.c:79
#2  0x00005613e6f0a4a9 in ?? ()
#3  0x00005613e6f0a218 in g (x=3) at a.cc:6

== every thread

Thread 2 (Thread 0x7f0758a1d6c0 (LWP 22592)):
#0  0x00007f0758b278ec in clone3 () at clone3.S:81

Thread 1 (LWP 22591):
#0  __pthread_kill_implementation () at ./nptl/pthread_kill.c:44

== Python
Traceback (most recent call first):
  File "train.py", line 8, in step
"""


def test_all_of_gdbs_words_become_threads_and_pythons_lines():
    found = backtraces.parse(TEXT)
    assert [frame.function for frame in found.crashed] == [
        "__pthread_kill_implementation", "__GI_abort", "??", "g",
    ]  # fmt: skip
    assert [(thread.number, thread.lwp, len(thread.frames)) for thread in found.threads] == [
        (2, 22592, 1),
        (1, 22591, 1),
    ]
    assert found.python == (
        "Traceback (most recent call first):",
        '  File "train.py", line 8, in step',
    )
    top = backtraces.headline(found.crashed)
    assert top == Frame("g", "a.cc", 6)
    assert not backtraces.crashed_in(found.crashed, top)
    assert backtraces.crashed_in((*found.crashed[:2], top), top)
    assert backtraces.parse("") == backtraces.Backtrace()
    assert backtraces.headline(()) is None


def crashed(*rows: str) -> tuple[Frame, ...]:
    text = "\n".join(f"#{number} {row}" for number, row in enumerate(rows))
    return backtraces.crash_key(backtraces.parse(f"== the thread of the signal\n{text}").crashed)


def test_the_same_crash_elsewhere_has_other_addresses_arguments_and_cpus():
    here = crashed(
        "__strlen_evex () at ../sysdeps/x86_64/multiarch/strlen-evex.S:79",
        "0x00005613e6f0a4a9 in ?? ()",
        "0x00007f0758a44472 in g (x=3) at a.cc:6",
    )
    there = crashed(
        "__strlen_avx2 () at ../sysdeps/x86_64/multiarch/strlen-avx2.S:65",
        "0x00007f1111f0a4a9 in ?? ()",
        "0x00007f0758a44472 in g (x=4) at a.cc:6",
    )
    assert here == there
    elsewhere = crashed(
        "__strlen_avx2 () at ../sysdeps/x86_64/multiarch/strlen-avx2.S:65",
        "0x00007f1111f0a4b0 in ?? ()",
        "0x00007f0758a44472 in g (x=4) at a.cc:6",
    )
    assert here != elsewhere


def test_a_name_that_can_be_read_in_many_ways_is_read_in_one():
    # A careless pattern tries as many ways as a number of 150 digits tells.
    name = "f" + 500 * "_sse" + "X"
    (known,) = backtraces.crash_key((backtraces.Frame(name),))
    assert known.function == name
    (known,) = backtraces.crash_key((backtraces.Frame("memcpy_avx_unaligned_erms"),))
    assert known.function == "memcpy"
