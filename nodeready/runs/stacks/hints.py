"""Hints on stacks: what a known place waits for, what to look at, and whose code a frame is.

The places are in knowledge/hints.toml, with their sources.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from nodeready import knowledge
from nodeready.runs.stacks.document import Frame

_T = TypeVar("_T")


class Hint(NamedTuple):
    """What a stack waits for. activity: one word; text: one line, with what to look at"""

    activity: str
    text: str


_TABLES = knowledge.rows("hints")
_HINTS = {name: Hint(name.partition(" ")[0], text) for name, text in _TABLES["hints"].items()}
_GIL, _DATA, _RANK, _IDLE_WORKER = (_HINTS[name] for name in ("gil", "data", "rank", "worker"))
_NETWORK, _LOCK, _CHILD, _LOOP = (_HINTS[name] for name in ("network", "lock", "child", "asyncio"))
_CLIENT = _HINTS["idle client"]
#: A vague wait -> the waits that say more, in calls further out.
_AWAITED_BY = {_NETWORK: (_LOOP, _CHILD, _CLIENT), _LOCK: (_CHILD, _NETWORK)}
#: A wait in C, which may be for other ranks.
NATIVE = _HINTS["native"]
STORE = _HINTS["store"]
#: Activities of ranks that wait for other ranks.
FOR_RANKS = frozenset({"collective", "peer", "start", "store", "end", "backward", "gpu", "rank"})
#: Vague hints, which any more exact source overrides.
_VAGUE_ACTIVITIES = frozenset({"backward", "lock", "asyncio"})
#: Places that wait only as the last call: their calls are the program's work.
_LAST_ACTIVITIES = frozenset({"backward", "gpu"})
#: Maximum frames of libraries without a row between the innermost frame and a known one: a library
#: has helpers below a known call, but at a larger distance the call is unrelated.
_MAX_DISTANCE = 4
#: Number of innermost frames that are searched.
_MAX_DEPTH = 64


def _functions(table: str) -> dict[tuple[str, str], Hint]:
    """(Function, end of its file) -> hint. "*": any function"""
    return {
        (function, file): _HINTS[name]
        for name, file, *functions in _TABLES[table]
        for function in (functions[0].split() if functions else ("*",))
    }


def _places(table: str) -> dict[tuple[str, str], bool]:
    return {(name, file): True for file, names in _TABLES[table] for name in names.split()}


def _kinds(table: str) -> dict[tuple[str, str], str]:
    return {(name, file): kind for kind, file, names in _TABLES[table] for name in names.split()}


def _patterns(table: str) -> tuple[tuple[re.Pattern[str], Hint], ...]:
    rows = ((re.sub(r"(^|\n)\s+", "", pattern), hint) for pattern, *hint in _TABLES[table])
    return tuple((re.compile(p), Hint(*h) if h[1:] else _HINTS[h[0]]) for p, h in rows)


_FUNCTION_HINTS, _COMMON_FUNCTION_HINTS = _functions("functions"), _functions("common")
_DIRECTORY_HINTS = tuple((part, _HINTS[name]) for name, part in _TABLES["directories"])
_NATIVE_HINTS = tuple(
    (word, _HINTS[name]) for name, words in _TABLES["native"] for word in words.split()
)
#: Place of a library that calls the user's code -> (activity, text).
_CALLER_TEXTS = {
    (function, file): (activity, text) for activity, file, function, text in _TABLES["callers"]
}
_CHANNEL_HINTS, _SLEEPING_HINTS = _patterns("channels"), _patterns("sleeping")
_SYSTEM_CALL_HINTS = _patterns("calls")


class Cause(NamedTuple):
    """What a rank does that waits for no rank."""

    kind: str  # of the verdict
    action: str  # ``stands in {place}``
    advice: str


#: Kind of a group, result of its samples or activity -> its cause
CAUSES = {key: Cause(*words) for key, *words in _TABLES["causes"]}
#: Kind of a group without a stack -> (reason of its role, what to look at)
STANDING = {kind: (reason, advice) for kind, reason, advice in _TABLES["standing"]}
#: Wait channels and files of file systems and block devices.
STORAGE_WORDS = re.compile("".join(_TABLES["storage_words"].split()))
#: What to look at next: a name -> the sentence; an activity -> the noun for it.
ADVICE, NOUNS = _TABLES["advice"], _TABLES["nouns"]
#: Ends of the files with the collectives' functions.
COLLECTIVE_FILES = tuple(_TABLES["collective_files"].split())
#: Collectives in which sizes rightly differ between ranks; and those that need equal ones.
UNEVEN_OPERATIONS = frozenset(_TABLES["uneven_operations"].split())
EVEN_OPERATIONS = frozenset(_TABLES["even_operations"].split())

# --- Whose code a frame is.

#: Packages that are no user's program.
_LIBRARIES = frozenset(_TABLES["libraries"].split())
#: With modules that older versions of Python have.
_STANDARD_MODULES = sys.stdlib_module_names | {"lib2to3", "asyncore", "distutils", "imp"}
#: Directories in which users keep no programs.
_INSTALLED_PATH = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python\d[\d.]*|lib-dynload|lib64/python\d[\d.]*)/"
)
#: Files whose code was typed in by a user (IPython, ``python -``).
_INTERACTIVE_FILE = re.compile(
    r"<(stdin|ipython-input[^>]*|ipython[^>]*)>|.*/?ipykernel_\d+/\d+\.py"
)
#: Python's calls outside of a script that lead to it.
_RUNNERS = frozenset({"runpy.py", "<frozen runpy>", "<string>"})


_ROLES = {role: re.compile(row["pattern"]) for role, row in knowledge.rows("roles").items()}


def role_of(command: str) -> str:
    """The role of a process of an inference engine or a trainer; "": not known."""
    return next((role for role, words in _ROLES.items() if words.search(command)), "")


def _is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package. py-spy prints it from its
    outermost package on (`torch/nn/modules/module.py`), or whole where it cannot see the packages.
    """
    if _INTERACTIVE_FILE.fullmatch(file):
        return False
    if file.startswith("<") or not file.endswith(".py") or _INSTALLED_PATH.search(file):
        return True
    top = file.lstrip("/").partition("/")[0]
    if top == file:
        return top[:-3] in _STANDARD_MODULES or top[:-3] in _LIBRARIES
    # The whole path of a user's program is no package.
    return not file.startswith("/") and (top in _LIBRARIES or top in _STANDARD_MODULES)


_MAIN_MODULE = "<module>"


def _program_file(frames: Sequence[Frame]) -> str:
    """The file of the started program, the user's even if called `queue.py`; "": a library's."""
    for frame in frames[:6]:
        if frame.function == _MAIN_MODULE and frame.file not in _RUNNERS:
            installed = _INSTALLED_PATH.search(frame.file) or frame.file.startswith("<frozen")
            is_library = frame.file.partition("/")[0] in _LIBRARIES
            return "" if installed or is_library else frame.file
        if frame.file == "<string>" and frame.function == _MAIN_MODULE:
            # ``python -c``; in a process of multiprocessing it is the starter's, not the user's.
            after = frames[1:2]
            return "" if after and after[0].file.startswith("multiprocess") else "<string>"
        if frame.file not in _RUNNERS:
            return ""
    return ""


def is_own(frame: Frame, program_file: str) -> bool:
    """Whether a frame is the user's own code. program_file: the file of the started program"""
    return frame.file == program_file != "" or not _is_library(frame.file)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost call of the user's own code; None: the stack has none."""
    program_file = _program_file(frames)
    for frame in reversed(frames):
        if frame.function != "..." and is_own(frame, program_file):
            return frame
    return None


def call_site(frames: Sequence[Frame]) -> tuple[int, ...]:
    """The lines of the user's calls: ranks that wait at other lines wait in another call."""
    program_file = _program_file(frames)
    return tuple(frame.line for frame in frames if is_own(frame, program_file))


#: Activities of polling loops: locks of filelock and of torch's file_baton.py, and
#: a child with a time limit (subprocess.py).
_POLLING_ACTIVITIES = frozenset({"file-lock", "child"})


def polls(frames: Sequence[Frame]) -> int:
    """Number of frames that lead to a polling call; 0: none does."""
    program_file = _program_file(frames)
    depth = 0
    for at in range(len(frames) - 1, max(-1, len(frames) - 9), -1):
        if is_own(frames[at], program_file):
            break
        hint = _find(frames[at], _FUNCTION_HINTS) or _find(frames[at], _COMMON_FUNCTION_HINTS)
        if hint and hint.activity in _POLLING_ACTIVITIES:
            depth = at + 1
    return depth


#: Files of pipelines' engines and schedules.
_PIPELINES = tuple(_TABLES["pipelines"].split())


def is_idle_worker(text: str) -> bool:
    """Whether a hint says that a loader's worker has nothing to do."""
    return text == _IDLE_WORKER.text


def in_pipeline(frames: Sequence[Frame]) -> bool:
    """Whether a stack belongs to a stage of a pipeline."""
    return any(word in frame.file for frame in frames for word in _PIPELINES)


def is_at_exit(frames: Sequence[Frame]) -> bool:
    """Whether a stack is past its program's end: exit handlers have no module as a caller."""
    known_hints = (_find(frame, _FUNCTION_HINTS) for frame in frames)
    if any(hint and hint.activity == "exit" for hint in known_hints):
        return True
    # A process that a thread has forked begins with that thread's calls.
    roots = (*_RUNNERS, "threading.py")
    return bool(frames) and frames[0].function != _MAIN_MODULE and frames[0].file not in roots


# --- Main threads that only wait for another thread, whose stack shows the awaited object.

_DELEGATES = _places("delegates")
_DISPATCHERS, _HANDLERS = _places("dispatchers"), _places("handlers")
_IDLE_WORKERS = _places("idle_workers")
_LOCK_WAITS, _LOCK_HOLDERS = _kinds("lock_waits"), _kinds("lock_holders")
#: Frame of a working thread of a pool.
_POOL = {("run", "concurrent/futures/thread.py"): True}
#: Serving threads, for which no program waits.
_SERVERS = re.compile("".join(_TABLES["servers"].split()))


def delegates(frames: Sequence[Frame]) -> bool:
    """Whether a main thread with this stack only waits for another thread of its process."""
    last = frames[-1:]
    if last and last[0].function.endswith("select") and last[0].file == "selectors.py":
        last = frames[-2:-1]
    return bool(last and _find(last[0], _DELEGATES))


def locks(frames: Sequence[Frame]) -> tuple[str, frozenset[str]]:
    """The kind of lock that a stack waits for, and those that it holds, by Python's calls."""
    awaited = _find(frames[-1], _LOCK_WAITS) if frames else None
    outer = frames[:-1] if awaited else frames
    held = {_find(frame, _LOCK_HOLDERS) for frame in outer} - {None, awaited}
    return awaited or "", frozenset(filter(None, held))


def pooled(frames: Sequence[Frame]) -> bool:
    """Whether a stack waits for a pool of threads, or works in one."""
    if any(frame.file.endswith("concurrent/futures/_base.py") for frame in frames[-3:]):
        return True
    return any(_find(frame, _POOL) for frame in frames[:5])


def dispatched(frames: Sequence[Frame]) -> bool:
    """Whether a thread with this stack runs the user's code on request of another rank."""
    at = next((at for at, frame in enumerate(frames) if _find(frame, _DISPATCHERS)), None)
    return at is not None and user_frame(frames[at:]) is not None


def serves(frames: Sequence[Frame]) -> bool:
    """Whether a thread with this stack only serves, so that its program does not wait for it."""
    if not frames:
        return True
    leaf = frames[-1]
    words = [f"{frame.file} {frame.function}" for frame in frames[:4]]
    if any(frame.function == "_pin_memory_loop" for frame in frames[:4]):
        # The batch is at the place that requested it, or in the user's pin_memory().
        return leaf.function == "_pin_memory_loop" or leaf.file.startswith("multiprocessing/")
    if any(_find(frame, _HANDLERS) for frame in frames[:5]) or _find(leaf, _IDLE_WORKERS):
        return True
    words = [*(words[:-1] if len(frames) > 4 else words), f"{leaf.file} {leaf.function}"]
    return any(map(_SERVERS.search, words))


# --- Wait channels of the kernel, and the system call in /proc.


def in_kernel(channel: str) -> Hint | None:
    """What a process in state D waits for in this function of the kernel; None: not known."""
    name = channel.partition("+")[0].strip()
    for pattern, hint in _CHANNEL_HINTS:
        if pattern.match(name):
            return hint
    return next((hint for pattern, hint in _SLEEPING_HINTS[:4] if pattern.match(name)), None)


def _sleeping_hint(channel: str, waits_on: str, master: str) -> Hint | None:
    """The kernel's hint on a thread that waits below the user's code; see `find`."""
    port = master.rpartition(":")[2]
    if port.isdigit() and re.match(rf"(recv|poll|read|connect|send)\b.*:{port}\b", waits_on):
        return STORE
    # The name of a file may look like that of a pipe.
    piped = next((hint for pattern, hint in _SLEEPING_HINTS[:3] if pattern.match(channel)), None)
    if piped:
        return piped
    for pattern, hint in _SYSTEM_CALL_HINTS:
        if pattern.match(waits_on):
            return hint
    for pattern, hint in (*_SLEEPING_HINTS, *_CHANNEL_HINTS):
        if pattern.match(channel):
            return hint
    return None


# --- The hint of a stack.


def for_rank(ranks: str) -> Hint:
    """The hint on a wait for these ranks (``rank 3``), from the peers of its connections."""
    return _RANK._replace(text=_RANK.text.replace("another rank", ranks))


def _find(frame: Frame, table: Mapping[tuple[str, str], _T]) -> _T | None:
    parts = frame.file.split("/")
    # From Python 3.11 on py-spy prints a method with its class.
    function = frame.function.rpartition(".")[2]
    # py-spy prints a file from its package on, or whole where it cannot see the packages.
    for length in range(1, min(len(parts), 6) + 1):
        end = "/".join(parts[-length:])
        value = table.get((function, end)) or table.get(("*", end))
        if value:
            return value
    return None


class _PythonStack(NamedTuple):
    """The hints of Python's frames."""

    called: Hint | None = None  # hint of a known call
    common: Hint | None = None  # hint of the place itself, where any program waits
    # library that calls the innermost code of the user: (activity, words)
    caller: tuple[str, str] | None = None


def _caller(frames: Sequence[Frame]) -> tuple[str, str] | None:
    """The library that calls the user's code, from the user's code outwards."""
    caller = None
    for frame in reversed(frames[-_MAX_DEPTH:]):
        candidate = _find(frame, _CALLER_TEXTS)
        # A worker has `fetch` on its stack as well, and is more informative.
        if candidate and (caller is None or candidate[0] == "worker"):
            caller = candidate
    return caller


def _in_python(frames: Sequence[Frame]) -> _PythonStack:
    common: Hint | None = None
    unknown = known_frames = 0
    program_file = _program_file(frames)
    worker = any(frame.function == "_worker_loop" for frame in frames)
    for at in range(len(frames) - 1, max(-1, len(frames) - 1 - _MAX_DEPTH), -1):
        frame = frames[at]
        is_users = is_own(frame, program_file)
        hint = None if is_users else _find(frame, _FUNCTION_HINTS)
        if hint is None and not is_users:
            hint = next((hint for word, hint in _DIRECTORY_HINTS if word in frame.file), None)
        if hint and hint.text:
            if hint.activity in _LAST_ACTIVITIES and at < len(frames) - 1 and unknown:
                return _PythonStack(None, common)
            return _PythonStack(_IDLE_WORKER if worker and hint is _DATA else hint, common)
        if worker and frame.function == "_worker_loop":
            return _PythonStack(_IDLE_WORKER if known_frames or not unknown else None, common)
        if is_users:
            return _PythonStack(None, common, _caller(frames[:at]))
        place = _find(frame, _COMMON_FUNCTION_HINTS)
        if place is None and hint is None:
            caller = _find(frame, _CALLER_TEXTS)
            if caller and caller[0] == "dataset":
                return _PythonStack(None, common, _caller(frames[: at + 1]))
            unknown += 1
            if unknown > _MAX_DISTANCE:
                break
        else:
            known_frames += 1
            if common is None and place is not None and place.text and not unknown:
                common = place
            elif common and place in _AWAITED_BY.get(common, ()):
                # It waits in select(), or at a lock, for another thread or process.
                common = place
    return _PythonStack(None, common)


def of_native(frames: Sequence[Frame]) -> Hint | None:
    """The hint of native frames; None: not known."""
    for frame in reversed(frames[-_MAX_DEPTH:]):
        for word, hint in _NATIVE_HINTS:
            if word in frame.function:
                return hint
    return None


def of_thread(
    main: Sequence[Frame],
    other: Sequence[Frame],
    native: Sequence[Frame] = (),
    *,
    lock: bool = False,
) -> Hint | None:
    """The hint on a thread for which the main thread waits. lock: it holds Python's lock"""
    hint, main_hint = find(other, native), find(main)
    if main_hint and main_hint.activity in ("compile", "checkpoint", "data") and (
        hint is None or hint.activity in ("lock", "child", "native", "network")
    ):  # fmt: skip
        return main_hint
    if lock:
        text = "waits for Python's global lock, which this thread keeps"
        return Hint("gil", f"{text}: a call of C that does not give it back, or a loop")
    if main_hint and main_hint.activity == "exit":
        text = "is at the end of its program, and Python waits for this thread, which is no daemon"
        return Hint(hint.activity if hint else "exit", f"{text}: it {hint.text}" if hint else text)
    return hint


def find(
    frames: Sequence[Frame],
    native: Sequence[Frame] = (),
    *,
    channel: str = "",
    waits_on: str = "",
    master: str = "",
) -> Hint | None:
    """The hint of a stack; None: it ends at no known place. frames, native: root to leaf. A wait
    for Python's lock comes first: the call of the Python frames is then not the awaited one.
    channel, waits_on: how all main threads with this stack wait in the kernel, below a call of C
    that the frames do not show; "": none, or different waits. master: MASTER_ADDR:MASTER_PORT of
    the job's store
    """
    native_hint = of_native(native)
    if native_hint is _GIL:
        return native_hint
    python_stack = _in_python(frames)
    if python_stack.called and not (
        native_hint and python_stack.called.activity in _VAGUE_ACTIVITIES
    ):
        return python_stack.called
    if native_hint:
        return native_hint
    hint = python_stack.called or python_stack.common
    if hint in (None, _NETWORK, _LOOP) and _SYSTEM_CALL_HINTS[0][0].match(waits_on):
        # Python only knows that it waits for any of its sockets.
        hint = _CLIENT
    if hint is None and frames:
        hint = _sleeping_hint(channel, waits_on, master)
    if python_stack.caller:
        activity, words = python_stack.caller
        return Hint(hint.activity, f"{words}: it {hint.text}") if hint else Hint(activity, words)
    return hint
