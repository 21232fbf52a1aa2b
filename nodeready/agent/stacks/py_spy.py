"""py-spy's dump of one process: the command, its output, and its errors in plain words.

Without native frames it stops nothing (``--nonblocking``); with them it stops its target while it
unwinds, seconds for a large one. It opens the files that its target has mapped, so root's py-spy
has the rights of its target's user, and in addition only the right to read any memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready.agent.cores import gdb
from nodeready.agent.runtime import Ended, ProcessSupervisor, changeable_by_root_only
from nodeready.agent.secrets import redact
from nodeready.agent.stacks.processes import contents, stat

#: A call: function, short file, line. Stacks of them are root to leaf.
Frame = tuple[str, str, int]

#: Seconds of a dump; a native one reads the symbols of all libraries: up to 14 s cold.
LIMIT_S, NATIVE_LIMIT_S = 10, 25
#: Maximum bytes of a dump. Only 200 threads that are all 4096 calls deep need more (150 MB).
MAX_BYTES = 32 * 1024 * 1024
#: Frames that are kept at each end of a longer stack, with CUT between them.
KEPT_FRAMES = 500
CUT: Frame = ("...", "", 0)
_MAX_THREADS = 1000
# Maximum address space: py-spy maps the program and libraries of a user's process.
_MEMORY_BYTES = 16 << 30
_MAX_WORD = 300
# A line of py-spy's log, whose level is set to warnings.
_LOGGED = re.compile(r"\[\S+ +[A-Z]+ +[a-z_:]+\] ")
#: Maximum calls whose variables are kept, variables of a call, characters of a name or value.
_LOCAL_FRAMES, _LOCAL_NAMES, _LOCAL_TEXT = 3, 20, 120
#: Innermost calls in which a counter of a loop is looked for.
_NUMBER_FRAMES = 8
# Files of Python and of installed packages; a frozen module has no file.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*/|^<frozen ")

#: How a dump is taken, and py-spy's options for it.
PLAIN, NATIVE, LOCALS, LOCK = "plain", "native", "locals", "lock file"
_OPTIONS = {
    PLAIN: ["--nonblocking"], NATIVE: ["--native"], LOCALS: ["--nonblocking", "--locals"],
    LOCK: ["--nonblocking", "-llll"],  # 128 characters of a value for each letter
}  # fmt: skip

HUNG = "py-spy did not finish in time"
#: A finalised interpreter; since then the process runs only C or C++.
ENDED_INTERPRETER = "its interpreter has ended: it hangs in C or C++ on its way out"
#: The main thread has no call of Python's: C's functions of atexit, the end of modules.
NO_CALL = "no call of Python is left in its main thread: its interpreter is about to end"
ENDED = "it has ended"
NO_FILE = "py-spy does not find its files: they lie in a container, or are replaced by now"
NOT_PYTHON = "not Python, or one that py-spy does not know"
# Pattern of py-spy's message -> the reason to report, and whether a retry may succeed.
_FAILURES: tuple[tuple[str, str, bool], ...] = (
    # py-spy warns of it (python_process_info.rs): the runtime's list of interpreters is empty.
    (r"Interpreter address from symbol is invalid 0+\b", ENDED_INTERPRETER, False),
    (r"os error 2\b|No such process|os error 3\b", NO_FILE, True),
    (r"os error 13\b|elevated permissions", "not permitted", False),
    (r"os error 1\b|EPERM|Operation not permitted", "not permitted, or traced by another", False),
    (r"Failed to find python version", NOT_PYTHON, False),
    (r"Unsupported version of Python", "py-spy does not know the version of its Python", False),
    # py-spy prints this, too, when it cannot read the stack of the first thread that it tries.
    (r"Failed to find a python interpreter",
     "py-spy cannot read it: a Python that it does not know, or more than 4096 calls deep", True),
    (r"[Mm]ax frame recursion depth", "more than 4096 calls deep: py-spy reads no more", False),
)  # fmt: skip


@dataclass(frozen=True)
class PySpyThread:
    """A thread's name and stack."""

    name: str
    frames: tuple[Frame, ...]
    number: int = 0  # of the kernel; 0: not known


@dataclass(frozen=True)
class Dump:
    """All threads of a process at one moment."""

    main: tuple[Frame, ...] | None = None  # the main thread's stack; None: not read
    threads: tuple[PySpyThread, ...] = ()  # all further threads, the newest first
    gil: str = ""  # the name of the thread that holds the interpreter's lock; "": no thread does
    error: str = ""  # why there is no stack; "": there is one
    # variables of the innermost calls of the user's code in the main thread, on request:
    # ``function: name = value``, without secrets
    locals: tuple[str, ...] = ()
    holds_gil: bool = False  # the main thread holds the interpreter's lock
    # number of the thread that is shown in place of the main thread; 0: the main thread is shown.
    # A worker of Ray Train trains in another thread
    thread: int = 0
    # index of the process among those that torch.multiprocessing started; else -1
    spawned: int = -1
    # processes that it has started by torch.multiprocessing and waits for; else -1
    spawns: int = -1
    # path of the lock file that its innermost calls use, by their variables; "": none
    lock_file: str = ""
    # `function: name` -> value of the whole numbers among those variables
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def characters(self) -> int:
        """The characters of all names in its stacks, and 100 for each frame and each thread."""
        stacks = (self.main or (), *(thread.frames for thread in self.threads))
        frames = sum(100 + len(frame[0]) + len(frame[1]) for rows in stacks for frame in rows)
        return frames + sum(100 + len(thread.name) for thread in self.threads)


def find(path: str) -> str:
    """The path of py-spy: this one, or the session's; "": none that is only root's."""
    for candidate in (path, shutil.which("py-spy") or ""):
        if candidate and os.access(candidate, os.X_OK) and changeable_by_root_only(candidate):
            return candidate
    return ""


def _frame(data: Any) -> Frame:
    name, line = str(data["name"]), data["line"]
    file = str(data.get("short_filename") or os.path.basename(str(data.get("filename") or "")))
    if not isinstance(line, int) or isinstance(line, bool):
        raise ValueError(line)
    if re.fullmatch(r"0x[0-9a-fA-F]+", name):
        # An address differs between processes for the same function.
        name = "?"
    return name[:_MAX_WORD], file[:_MAX_WORD], max(0, min(line, 2**31 - 1))


def _stack(data: Any) -> tuple[Frame, ...]:
    """py-spy's frames, innermost first, as root to leaf."""
    if not isinstance(data, list):
        raise TypeError(data)
    if len(data) <= 2 * KEPT_FRAMES:
        return tuple(_frame(frame) for frame in reversed(data))
    root, leaf = data[: -KEPT_FRAMES - 1 : -1], data[KEPT_FRAMES - 1 :: -1]
    return (*map(_frame, root), CUT, *map(_frame, leaf))


def parse(text: str, pid: int) -> Dump:
    """The dump that ``py-spy dump --json`` printed; never raises."""
    try:
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise TypeError(rows)
        threads = [
            PySpyThread(
                str(row["thread_name"] or "")[:100],
                _stack(row["frames"]),
                _number(row.get("os_thread_id")),
            )
            for row in rows
        ]
        main_candidates = [
            [number for number, row in enumerate(rows) if row["thread_name"] == "MainThread"],
            [number for number, row in enumerate(rows) if row.get("os_thread_id") == pid],
            # The newest thread comes first, and a program may rename its main thread.
            [len(rows) - 1],
        ]
        owners = [row.get("owns_gil") is True for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Dump(error="py-spy's output cannot be parsed")
    if not threads:
        return Dump(error="py-spy found no thread")
    main = next(numbers[-1] for numbers in main_candidates if numbers)
    function, file, _ = threads[main].frames[-1] if threads[main].frames else CUT
    # The main thread only waits for calls from Ray.
    is_ray_loop = function.rpartition(".")[2] == _RAY_LOOP[0] and file.endswith(_RAY_LOOP[1])
    trainer = _trainer(threads) if is_ray_loop else None
    if trainer is not None:
        main = trainer
    other_threads = tuple([*threads[:main], *threads[main + 1 :]][:_MAX_THREADS])
    gil = threads[owners.index(True)].name if True in owners else ""
    if not threads[main].frames:
        return Dump(threads=other_threads, gil=gil, error=NO_CALL)
    return Dump(
        threads[main].frames,
        other_threads,
        gil,
        locals=_locals(rows[main]["frames"]),
        holds_gil=owners[main],
        thread=0 if trainer is None else _number(rows[main].get("os_thread_id")),
        spawned=_count(rows[main]["frames"], "_wrap", "i"),
        spawns=_count(rows[main]["frames"], "start_processes", "nprocs"),
        lock_file=_lock_file(rows[main]["frames"]),
        numbers=_numbers(rows[main]["frames"]),
    )


# Ray Train's workers: the main thread executes Ray's calls, and the training runs in a thread
# (ray/train/v2/_internal/execution/worker_group/thread_runner.py; before that, `RunnerThread` of
# ray/air/_internal/util.py).
_RAY_LOOP = ("main_loop", "ray/_private/worker.py")
_RAY_RUNS = ("ray/air/_internal/util.py", "worker_group/thread_runner.py")


def _trainer(threads: Sequence[PySpyThread]) -> int | None:
    """Index of the thread in which Ray Train trains; None: not found."""
    for number, thread in enumerate(threads):
        for function, file, _ in thread.frames:
            name = function.rpartition(".")[2]
            if file.endswith(_RAY_RUNS) and "run" in name and "monitor" not in name:
                return number
    return None


def _number(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 22 else 0


_SPAWN = "torch/multiprocessing/spawn.py"


def _variables(
    frames: Sequence[Any], maximum: int | None = None
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Call, name and value of the variables of these calls, at most ``maximum`` of each call."""
    for frame in frames:
        rows = frame.get("locals")
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        for row in rows[:maximum]:
            yield frame, str(row.get("name")), str(row.get("repr"))


def _count(frames: Sequence[Any], function: str, name: str) -> int:
    """A small number of a call in torch/multiprocessing/spawn.py; -1: no such call or variable."""
    for frame, variable, value in _variables(frames[-KEPT_FRAMES:]):
        is_call = frame["name"] == function and variable == name
        if is_call and str(frame.get("short_filename")).endswith(_SPAWN):
            return int(value) if re.fullmatch(r"[0-9]{1,5}", value) else -1
    return -1


#: Names of variables with the path of a lock file (filelock: `lock_filename`), and of such files.
_LOCK_VARIABLE = re.compile(r"_?lock_?(file)?_?(name|path)?", re.I)
_LOCK_NAME = re.compile(r"(.*/)?([^/]*[^a-zA-Z/])?lock([^a-zA-Z/][^/]*)?")


def _lock_file(frames: Sequence[Any]) -> str:
    """The path of a lock file among the variables of the innermost calls; "": none."""
    for _, name, text in _variables(frames[:_LOCAL_FRAMES]):
        # torch/utils/cpp_extension.py has its lock file in this directory.
        path = text[1:-1] + "/lock" * (name == "build_directory")
        is_text = text[:1] in ("'", '"') and "\\" not in text and "..." not in text
        if is_text and (_LOCK_NAME.fullmatch(path) or _LOCK_VARIABLE.fullmatch(name)):
            return path
    return ""


def _place(frame: dict[str, Any], name: str) -> str:
    return f"{str(frame.get('name'))[:_LOCAL_TEXT]}: {name[:_LOCAL_TEXT]}"


def _numbers(frames: Sequence[Any]) -> dict[str, int]:
    return {
        _place(frame, name): int(value)
        for frame, name, value in _variables(frames[:_NUMBER_FRAMES], _LOCAL_NAMES)
        if re.fullmatch(r"-?[0-9]{1,18}", value)
    }


def _locals(frames: Sequence[Any]) -> tuple[str, ...]:
    """Variables of the innermost calls: of the user's code, else of any."""
    with_locals = [frame for frame in frames if isinstance(frame, dict) and frame.get("locals")]
    user_frames = [row for row in with_locals if not _LIBRARY.search(str(row.get("filename")))]
    variables = []
    innermost = (user_frames or with_locals)[:_LOCAL_FRAMES]
    for frame, name, value in _variables(innermost, _LOCAL_NAMES):
        # An address differs between processes.
        plain = re.sub(r" at 0x[0-9a-fA-F]+", "", value[:_MAX_WORD])
        text = redact(name[:_LOCAL_TEXT], plain)
        text = text if len(text) <= _LOCAL_TEXT else text[: _LOCAL_TEXT - 3] + "..."
        variables.append(f"{_place(frame, name)} = {text}")
    return tuple(variables)


def failure_reason(ended: Ended) -> tuple[str, bool]:
    """Why a dump failed, on one line, and whether a retry may succeed."""
    for pattern, message, is_retriable in _FAILURES:
        if re.search(pattern, ended.err):
            return message, is_retriable
    lines = [row for row in ended.err.splitlines() if row.strip() and not _LOGGED.match(row)]
    message = re.sub(r"^Error: ", "", lines[0].strip()[:200] if lines else "")
    ending = f"exit status {ended.rc}" if (ended.rc or 0) >= 0 else f"signal {-(ended.rc or 0)}"
    return f"py-spy: {message or ending}", True


#: Variables of py-spy: English messages, no backtrace of a panic, only warnings in its log.
_VARIABLES = {"LC_ALL": "C", "RUST_BACKTRACE": "0", "RUST_LOG": "py_spy=warn"}


def _run(
    supervisor: ProcessSupervisor, argv: Sequence[str], limit_s: float
) -> tuple[Ended, bytearray]:
    """How py-spy ended, and its output, which may be longer than MAX_BYTES. Raises OSError."""
    output = bytearray()

    def on_output(process: subprocess.Popen[bytes], stream: int, chunk: bytes) -> None:
        if stream == 1 and len(output) <= MAX_BYTES:
            output.extend(chunk)

    return supervisor.run(argv, limit_s, on_output, env={**os.environ, **_VARIABLES}), output


def _start_s(pid: int) -> float:
    """When a process started, in seconds since boot; 0: it has ended, or is a zombie."""
    parsed = stat(contents(f"/proc/{pid}/stat", 4096))
    return parsed.start_s if parsed and parsed.state not in "ZXx" else 0.0


def take(
    supervisor: ProcessSupervisor, path: str, pid: int, limit_s: float, mode: str = PLAIN
) -> Dump:
    """A dump of this process; its `error` tells why there is no stack. limit_s: seconds left of
    the run. mode: NATIVE: py-spy stops its target, which must not be in state D or T; LOCALS: with
    variables; LOCK: with the path of the lock file that it may poll for. If no process has its pid
    and start time any more, the error is that it has ended, for any message of py-spy.
    """
    if not path:
        return Dump(error="py-spy is not installed (nodeready deploy installs it)")
    limit_s = min(limit_s, NATIVE_LIMIT_S if mode == NATIVE else LIMIT_S)
    argv = [path, "dump", "--json", *_OPTIONS[mode], "--pid", str(pid)]
    error, started_s = "", _start_s(pid)
    # Without a stop, py-spy may read a process while it changes; a retry often succeeds.
    for _ in range(1 if mode == NATIVE else 2):
        try:
            confined = gdb.memory_reader_command(pid, _MEMORY_BYTES, argv, by_maps=True)
        except (OSError, KeyError, ValueError, IndexError):
            return Dump(error=ENDED)
        try:
            ended, output = _run(supervisor, confined, limit_s)
        except OSError as problem:
            return Dump(error=f"py-spy cannot be started: {problem.strerror}")
        if ended.rc is None:
            return Dump(error=HUNG)
        if len(output) > MAX_BYTES:
            return Dump(error=f"its stacks are more than {MAX_BYTES >> 20} MB")
        if ended.rc == 0:
            dump = parse(output.decode("utf-8", "replace"), pid)
            return replace(dump, locals=()) if mode == LOCK else dump
        error, is_retriable = failure_reason(ended)
        if _start_s(pid) != started_s or not started_s:
            return Dump(error=ENDED)
        if not is_retriable or supervisor.left_s < 1:
            break
    return Dump(error=error)
