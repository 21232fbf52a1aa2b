"""py-spy's dump of one process: the one command, what it prints, and its errors in our words.

Without native frames it stops nothing (``--nonblocking``); with them it stops its target while it
unwinds, seconds for a large one. It opens whatever the maps of its target name, so root's py-spy
has the rights of its target's user, and beside them only the right to read any memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nodeready.node import users_file
from nodeready.node.proofs.attach import environment
from nodeready.node.runtime import Ended, ProcessSupervisor, roots_alone
from nodeready.node.stacks.processes import contents, stat
from nodeready.text import redact

#: A call: function, short file, line. Stacks of them are root to leaf.
Frame = tuple[str, str, int]

#: Seconds of a dump; a native one reads the symbols of all libraries: up to 14 s cold.
LIMIT_S, NATIVE_LIMIT_S = 10, 25
#: What is read of a dump. 200 threads as deep as py-spy reads (4096 calls) are 150 MB: nobody's.
MOST_BYTES = 32 * 1024 * 1024
#: Of a longer stack the first and the last so many frames are kept, with CUT between them.
KEPT_FRAMES = 500
CUT: Frame = ("...", "", 0)
_MOST_THREADS = 1000
# Of address space: it maps the program and its libraries, which a user's process names.
_MEMORY_BYTES = 16 << 30
_MOST_WORD = 300
# A line of py-spy's own log, which is asked for its warnings.
_LOGGED = re.compile(r"\[\S+ +[A-Z]+ +[a-z_:]+\] ")
#: Calls whose variables are told, variables of each, and characters of a name or a value.
_LOCAL_FRAMES, _LOCAL_NAMES, _LOCAL_TEXT = 3, 20, 120
# Files of Python itself and of what is installed for it; a frozen module has no file.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*/|^<frozen ")

#: How a dump is taken, and py-spy's options for it.
PLAIN, NATIVE, LOCALS = "plain", "native", "locals"
_OPTIONS = {
    PLAIN: ("--nonblocking",), NATIVE: ("--native",), LOCALS: ("--nonblocking", "--locals"),
}  # fmt: skip

HUNG = "py-spy did not finish in time"
#: An interpreter that has been finalised; what the process does since is C or C++.
ENDED_INTERPRETER = "its interpreter has ended: it hangs in C or C++ on its way out"
#: The main thread has no call of Python's: functions of C that atexit registered, the end of
#: modules.
NO_CALL = "no call of Python is left in its main thread: its interpreter is about to end"
ENDED = "it has ended"
NO_FILE = "py-spy does not find its files: they lie in a container, or are replaced by now"
NOT_PYTHON = "not Python, or one that py-spy does not know"
# py-spy's words, whole or in part -> what to say, and whether another try may do better.
_WORDS: tuple[tuple[str, str, bool], ...] = (
    # py-spy warns of it (python_process_info.rs): the runtime's list of interpreters is empty.
    (r"Interpreter address from symbol is invalid 0+\b", ENDED_INTERPRETER, False),
    (r"os error 2\b|No such process|os error 3\b", NO_FILE, True),
    (r"os error 13\b|elevated permissions", "not permitted", False),
    (r"os error 1\b|EPERM|Operation not permitted", "not permitted, or traced by another", False),
    (r"Failed to find python version", NOT_PYTHON, False),
    # It says so, too, when the stack of the first thread that it tries cannot be read.
    (
        r"Failed to find a python interpreter",
        "py-spy cannot read it: a Python that it does not know, or more than 4096 calls deep",
        True,
    ),
    (r"[Mm]ax frame recursion depth", "more than 4096 calls deep: py-spy reads no more", False),
)


@dataclass(frozen=True)
class Thread:
    """A thread's name and stack. number: the kernel's; 0: not told"""

    name: str
    frames: tuple[Frame, ...]
    number: int = 0


@dataclass(frozen=True)
class Dump:
    """All threads of a process at one moment.

    main:    the main thread's stack; None: there is none
    threads: the others, the newest first
    gil:     the name of the thread that holds the interpreter's lock; "": none does
    error:   why there is nothing else here
    locals:  variables of the main thread's innermost calls of the user's own code, where asked
             for: ``function: name = value``, without secrets
    own:     the main thread holds the interpreter's lock
    thread:  number of the thread that is shown as the main one, where that only serves others: a
             worker of Ray Train's trains in a thread; 0: the main thread itself is
    spawned: where torch.multiprocessing has started the process, its place; else -1
    spawns:  how many processes it has started by torch.multiprocessing and waits for; else -1
    """

    main: tuple[Frame, ...] | None = None
    threads: tuple[Thread, ...] = ()
    gil: str = ""
    error: str = ""
    locals: tuple[str, ...] = ()
    own: bool = False
    thread: int = 0
    spawned: int = -1
    spawns: int = -1

    @property
    def characters(self) -> int:
        """About the memory that its frames take, however often a name is in them."""
        stacks = (self.main or (), *(thread.frames for thread in self.threads))
        frames = sum(100 + len(frame[0]) + len(frame[1]) for rows in stacks for frame in rows)
        return frames + sum(100 + len(thread.name) for thread in self.threads)


def find(path: str) -> str:
    """The program: this one, or whichever the session has; "": none that we may run."""
    for one in (path, shutil.which("py-spy") or ""):
        if one and os.access(one, os.X_OK) and roots_alone(one):
            return one
    return ""


def _frame(data: Any) -> Frame:
    name, line = str(data["name"]), data["line"]
    file = str(data.get("short_filename") or os.path.basename(str(data.get("filename") or "")))
    if not isinstance(line, int) or isinstance(line, bool):
        raise ValueError(line)
    if re.fullmatch(r"0x[0-9a-fA-F]+", name):
        # An address: every process has another one for the same place.
        name = "?"
    return name[:_MOST_WORD], file[:_MOST_WORD], max(0, min(line, 2**31 - 1))


def _stack(data: Any) -> tuple[Frame, ...]:
    """py-spy's frames, innermost first, as root to leaf."""
    if not isinstance(data, list):
        raise TypeError(data)
    if len(data) <= 2 * KEPT_FRAMES:
        return tuple(_frame(frame) for frame in reversed(data))
    root, leaf = data[: -KEPT_FRAMES - 1 : -1], data[KEPT_FRAMES - 1 :: -1]
    return (*map(_frame, root), CUT, *map(_frame, leaf))


def parse(text: str, pid: int) -> Dump:
    """What ``py-spy dump --json`` printed; never raises."""
    try:
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise TypeError(rows)
        threads = [
            Thread(
                str(row["thread_name"] or "")[:100],
                _stack(row["frames"]),
                _number(row.get("os_thread_id")),
            )
            for row in rows
        ]
        mains = [
            [number for number, row in enumerate(rows) if row["thread_name"] == "MainThread"],
            [number for number, row in enumerate(rows) if row.get("os_thread_id") == pid],
            # Threads come the newest first, and a program may rename its main thread.
            [len(rows) - 1],
        ]
        gil = [thread.name for thread, row in zip(threads, rows) if row.get("owns_gil") is True]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Dump(error="py-spy's output makes no sense")
    if not threads:
        return Dump(error="py-spy found no thread")
    main = next(found[-1] for found in mains if found)
    rest = threads[:main] + threads[main + 1 :]
    trainer = _trainer(threads) if _serves(threads[main]) else None
    if trainer is not None:
        main, rest = trainer, threads[:trainer] + threads[trainer + 1 :]
    if not threads[main].frames:
        return Dump(threads=tuple(rest[:_MOST_THREADS]), gil=(gil or [""])[0], error=NO_CALL)
    return Dump(
        threads[main].frames,
        tuple(rest[:_MOST_THREADS]),
        (gil or [""])[0],
        locals=_locals(rows[main]["frames"]),
        own=rows[main].get("owns_gil") is True,
        thread=0 if trainer is None else _number(rows[main].get("os_thread_id")),
        spawned=_count(rows[main]["frames"], "_wrap", "i"),
        spawns=_count(rows[main]["frames"], "start_processes", "nprocs"),
    )


# Ray Train's workers: the main thread executes Ray's calls, and the training runs in a thread
# (ray/train/v2/_internal/execution/worker_group/thread_runner.py; before that, `RunnerThread` of
# ray/air/_internal/util.py).
_RAY_LOOP = ("main_loop", "ray/_private/worker.py")
_RAY_RUNS = ("ray/air/_internal/util.py", "worker_group/thread_runner.py")


def _serves(thread: Thread) -> bool:
    """Whether a main thread only waits for what Ray tells it to do."""
    last = thread.frames[-1] if thread.frames else CUT
    return last[0].rpartition(".")[2] == _RAY_LOOP[0] and last[1].endswith(_RAY_LOOP[1])


def _trainer(threads: Sequence[Thread]) -> int | None:
    """The thread of Ray Train's that trains; None: there is none."""
    for number, thread in enumerate(threads):
        for function, file, _ in thread.frames:
            name = function.rpartition(".")[2]
            if file.endswith(_RAY_RUNS) and "run" in name and "monitor" not in name:
                return number
    return None


def _number(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 22 else 0


_SPAWN = "torch/multiprocessing/spawn.py"


def _count(frames: Sequence[Any], function: str, name: str) -> int:
    """A variable of a call in torch/multiprocessing/spawn.py that is a small number, where
    variables were asked for; else -1."""
    for frame in frames[-KEPT_FRAMES:]:
        if frame["name"] != function or not isinstance(frame.get("locals"), list):
            continue
        if str(frame.get("short_filename")).endswith(_SPAWN):
            for row in frame["locals"]:
                if isinstance(row, dict) and row.get("name") == name:
                    said = str(row.get("repr"))
                    return int(said) if re.fullmatch(r"[0-9]{1,5}", said) else -1
    return -1


def _locals(frames: Sequence[Any]) -> tuple[str, ...]:
    """Variables of the innermost calls, of the user's own where there are some."""
    told = [frame for frame in frames if isinstance(frame, dict) and frame.get("locals")]
    users = [frame for frame in told if not _LIBRARY.search(str(frame.get("filename")))]
    found = []
    for frame in (users or told)[:_LOCAL_FRAMES]:
        rows = frame["locals"] if isinstance(frame["locals"], list) else []
        for row in [row for row in rows if isinstance(row, dict)][:_LOCAL_NAMES]:
            name, value = str(row.get("name"))[:_LOCAL_TEXT], str(row.get("repr"))[:_MOST_WORD]
            # An address is another one in every process.
            value = redact(name, re.sub(r" at 0x[0-9a-fA-F]+", "", value))
            text = value if len(value) <= _LOCAL_TEXT else value[: _LOCAL_TEXT - 3] + "..."
            found.append(f"{str(frame.get('name'))[:_LOCAL_TEXT]}: {name} = {text}")
    return tuple(found)


def words(ended: Ended) -> tuple[str, bool]:
    """Why a dump failed, on one line, and whether another try may do better."""
    for pattern, said, again in _WORDS:
        if re.search(pattern, ended.err):
            return said, again
    told = [row for row in ended.err.splitlines() if row.strip() and not _LOGGED.match(row)]
    said = re.sub(r"^Error: ", "", told[0].strip()[:200] if told else "")
    ending = f"exit status {ended.rc}" if (ended.rc or 0) >= 0 else f"signal {-(ended.rc or 0)}"
    return f"py-spy: {said or ending}", True


_RUST = {"RUST_BACKTRACE": "0", "RUST_LOG": "py_spy=warn"}


def _run(
    supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float
) -> tuple[Ended, bytearray]:
    kept = bytearray()

    def on_output(process: subprocess.Popen[bytes], stream: int, piece: bytes) -> None:
        if stream == 1 and len(kept) <= MOST_BYTES:
            kept.extend(piece)

    return supervisor.run(argv, limit_s, on_output, env={**environment(), **_RUST}), kept


def _began(pid: int) -> float:
    """When a process began, in seconds since boot; 0: there is none, or a zombie."""
    known = stat(contents(f"/proc/{pid}/stat", 4096))
    return known.start_s if known and known.state not in "ZXx" else 0.0


def take(
    supervisor: ProcessSupervisor, path: str, pid: int, limit_s: float, how: str = PLAIN
) -> Dump:
    """A dump of this process; what came in the way is its `error`.

    limit_s: seconds that are left at all
    how:     NATIVE: with native frames: its target waits meanwhile, and it must not be in state D
             or T; LOCALS: with variables

    It has ended when no process has its number and its start (proc(5)): whatever py-spy says.
    """
    if not path:
        return Dump(error="py-spy is not installed (nodeready deploy installs it)")
    native = how == NATIVE
    argv = [path, "dump", "--json", *_OPTIONS[how], "--pid", str(pid)]
    error, began = "", _began(pid)
    # A process that runs changes under the eyes of whoever does not stop it.
    for _ in range(1 if native else 2):
        try:
            confined = users_file.with_rights_of(pid, _MEMORY_BYTES, argv, by_maps=True)
        except (OSError, KeyError, ValueError, IndexError):
            return Dump(error=ENDED)
        try:
            ended, kept = _run(
                supervisor, confined, min(limit_s, NATIVE_LIMIT_S if native else LIMIT_S)
            )
        except OSError as problem:
            return Dump(error=f"py-spy cannot be started: {problem.strerror}")
        if ended.rc is None:
            return Dump(error=HUNG)
        if len(kept) > MOST_BYTES:
            return Dump(error=f"its stacks are more than {MOST_BYTES >> 20} MB")
        if ended.rc == 0:
            return parse(kept.decode("utf-8", "replace"), pid)
        error, again = words(ended)
        if _began(pid) != began or not began:
            return Dump(error=ENDED)
        if not again or supervisor.left_s < 1:
            break
    return Dump(error=error)
