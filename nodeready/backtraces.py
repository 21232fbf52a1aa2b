"""gdb's backtraces: from its words to frames, and which crashes are the same one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nodeready.capture.backtrace import CRASHED, EVERY, PYTHON

#: Characters of a name that are kept.
_NAME = 2000
_FRAME = re.compile(r"#[0-9]+ +(?:0x([0-9a-f]+) in )?(.+)")
_PLACE = re.compile(r"(.*) at (.+?):([0-9]+)")
_LIBRARY = re.compile(r"(.*) from (/.*|[^ ]*\.so[^ ]*)")
_THREAD = re.compile(r"Thread ([0-9]+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP ([0-9]+)\)?.*")
# glibc chooses one of these by the CPU: on two kinds of nodes, the same crash has two names.
_BY_CPU = re.compile(r"(?:_(?:sse|avx|evex|erms|rtm|unaligned)[0-9_a-z]*|_asimd|_sve|_mte)+$")
#: Functions through which a program ends itself: what called them is where it crashed.
_ENDING = frozenset(
    (
        "__pthread_kill_implementation", "__pthread_kill_internal", "__GI___pthread_kill",
        "pthread_kill", "__GI_raise", "raise", "__GI_abort", "abort", "kill", "__libc_message",
        "__libc_message_impl", "malloc_printerr", "__GI___fortify_fail", "__fortify_fail",
        "__GI___chk_fail", "__stack_chk_fail", "__assert_fail_base", "__GI___assert_fail",
        "__assert_fail", "__gnu_cxx::__verbose_terminate_handler()", "std::terminate()",
        "__cxxabiv1::__terminate(void (*)())", "__cxa_throw", "__cxa_rethrow",
        "<signal handler called>",
    )
)  # fmt: skip


class Frame(NamedTuple):
    """One call, without addresses and values.

    function: ``??`` where gdb has no name
    file:     of the source, as gdb has it; "": no debug information
    line:     0: none
    library:  the file's name of the shared library; "": the program itself, or not told
    offset:   of a function without a name, the address within its page: it is the same wherever
              the program was loaded
    """

    function: str
    file: str = ""
    line: int = 0
    library: str = ""
    offset: int = 0

    @property
    def place(self) -> str:
        """``strlen.S:79``, or ``libc.so.6``; "": nobody knows."""
        if self.file:
            return f"{self.file.rpartition('/')[2]}:{self.line}"
        return self.library


class Thread(NamedTuple):
    """One thread: its number by gdb, its id in the kernel, and where it stood."""

    number: int
    lwp: int
    frames: tuple[Frame, ...]


class Backtrace(NamedTuple):
    """What gdb said of one core; frames innermost first, as gdb numbers them.

    crashed: of the thread that got the signal
    python:  the lines of ``py-bt``, where gdb has that
    """

    crashed: tuple[Frame, ...] = ()
    threads: tuple[Thread, ...] = ()
    python: tuple[str, ...] = ()


def _function(text: str) -> str:
    """``f`` of ``f (x=1)``: what stands before the arguments, which begin at the first `` (`` that
    is in no bracket. C++ has both in names, and operators that look like brackets."""
    depth = at = 0
    while at < len(text):
        if text.startswith("operator", at):
            at += 8
            while at < len(text) and text[at] in "<>=!+-*/%&|^~[],":
                at += 1
            if text.startswith("()", at):
                at += 2
            continue
        begins = depth == 0 and text.startswith(" (", at)
        if begins and not text.startswith(" (anonymous namespace)", at):
            return text[:at]
        if text[at] in "(<{":
            depth += 1
        elif text[at] in ")}" or (text[at] == ">" and text[at - 1 : at] != "-"):
            depth = max(0, depth - 1)
        at += 1
    return text


def frame(row: str) -> Frame | None:
    """One line of a backtrace; None: it is none."""
    match = _FRAME.fullmatch(row.rstrip())
    if match is None:
        return None
    text, file, line, library = match[2], "", 0, ""
    if place := _PLACE.fullmatch(text):
        text, file, line = place[1], place[2], int(place[3][:9])
    elif within := _LIBRARY.fullmatch(text):
        text, library = within[1], within[2].rpartition("/")[2]
    function = _function(text)[:_NAME]
    offset = int(match[1] or "0", 16) & 0xFFF if function == "??" else 0
    return Frame(function, file[:_NAME], line, library[:_NAME], offset)


def parse(text: str) -> Backtrace:
    """All that gdb said, by our headings; a line that is no frame is passed over."""
    section, found = "", Backtrace()
    crashed: list[Frame] = []
    threads: list[tuple[int, int, list[Frame]]] = []
    python: list[str] = []
    for row in text.splitlines():
        if row in (CRASHED, EVERY, PYTHON):
            section = row
        elif section == PYTHON and row.strip():
            python.append(row)
        elif section == EVERY and (head := _THREAD.match(row)):
            threads.append((int(head[1][:9]), int(head[2][:9]), []))
        elif one := frame(row):
            if section == CRASHED:
                crashed.append(one)
            elif section == EVERY and threads:
                threads[-1][2].append(one)
    return found._replace(
        crashed=tuple(crashed),
        threads=tuple(Thread(number, lwp, tuple(rows)) for number, lwp, rows in threads),
        python=tuple(python),
    )


def key(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """What two equal crashes have in common."""
    return tuple(
        Frame(short) if (short := _BY_CPU.sub("", one.function)) != one.function else one
        for one in frames
    )


def headline(frames: Sequence[Frame]) -> Frame | None:
    """The frame to name a crash by: the first with a name that is not only how it ended."""
    named = [f for f in frames if f.function != "??"]
    return next((f for f in named if f.function not in _ENDING), named[0] if named else None)


def crashed_in(frames: Sequence[Frame], top: Frame) -> bool:
    """Whether it crashed in this very frame, and not in one without a name that it called."""
    before = frames[: frames.index(top)]
    return all(frame.function in _ENDING for frame in before)
