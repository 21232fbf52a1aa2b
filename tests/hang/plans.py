"""What the ranks of a generated job do: `plan.json` says for whom each waits, and how.

Acts for `acts.py`; `tests/hang/generated.py` makes the plans.
"""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import os
import queue
import select
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from protocols import touch, wait_for_file
from talks import clients, connect, listen, rank

#: What `set_up` has made, kept until the end; the connections of those that wait for this rank;
#: and the one call that waits.
_KEPT = []
_BELOW = []
_WAIT = []


def plan():
    with open("plan.json") as file:
        return json.load(file)


def set_up():
    """Make all connections of this rank, and what stands beside its work."""
    waits = plan()["waits"]
    below = {int(child): way for child, (parent, way) in waits.items() if parent == rank()}
    parent, way = waits.get(str(rank()), (None, ""))
    groups = sorted({parent for parent, way in waits.values() if way == "collective"})
    if groups:
        dist.init_process_group("gloo", timeout=timedelta(hours=1))
    for first in groups:
        ranks = sorted(int(r) for r, row in waits.items() if row == [first, "collective"])
        group = dist.new_group([first, *ranks])
        if way == "collective" and parent == first:
            _WAIT.append(lambda group=group: dist.all_reduce(torch.ones(4), group=group))
    _serve(below)
    if way in _CONNECTS:
        _WAIT.append(_CONNECTS[way](parent))
    for name in plan()["beside"][rank()]:
        _BESIDE[name]()


def _serve(below):
    """The ends of all that wait for this rank."""
    by_way = {way: [child for child, other in below.items() if other == way] for way in _CONNECTS}
    if over_tcp := [child for way in _TCP for child in by_way[way]]:
        server = listen()
        _KEPT.append(server)
        _BELOW.extend(clients(server, len(over_tcp)).values())
    if by_way["unix"]:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"unix-{rank()}.new")
        server.listen(16)
        os.rename(f"unix-{rank()}.new", f"unix-{rank()}")
        _KEPT.append(server)
        _BELOW.extend(server.accept()[0] for _ in by_way["unix"])
    for child in by_way["pipe"]:
        os.mkfifo(f"pipe-{child}.new")
        _KEPT.append(os.open(f"pipe-{child}.new", os.O_RDWR))
        os.rename(f"pipe-{child}.new", f"pipe-{child}")
    if by_way["flock"]:
        _KEPT.append(os.open(f"lock-{rank()}", os.O_CREAT | os.O_WRONLY))
        fcntl.flock(_KEPT[-1], fcntl.LOCK_EX)
        touch(f"locked-{rank()}")


def _ask_tcp(parent):
    connection = connect(parent)
    return lambda: connection.recv(1)


def _look_at_tcp(parent):
    """Looks again and again, as a loop does that also wants to hear of its end."""
    connection = connect(parent)
    connection.settimeout(0.7)

    def look():
        while True:
            with contextlib.suppress(TimeoutError):
                return connection.recv(1)

    return look


def _select_tcp(parent):
    connection = connect(parent)

    def look():
        while not select.select([connection], [], [], 0.7)[0]:
            pass
        return connection.recv(1)

    return look


def _await_tcp(parent):
    connection = connect(parent)
    connection.setblocking(False)

    async def fetch():
        await asyncio.get_running_loop().sock_recv(connection, 1)

    return lambda: asyncio.run(fetch())


def _ask_unix(parent):
    wait_for_file(f"unix-{parent}")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"unix-{parent}")
    return lambda: connection.recv(1)


def _read_pipe(parent):
    wait_for_file(f"pipe-{rank()}")
    end = os.open(f"pipe-{rank()}", os.O_RDONLY)
    return lambda: os.read(end, 1)


def _take_lock(parent):
    wait_for_file(f"locked-{parent}")
    lock = os.open(f"lock-{parent}", os.O_RDONLY)
    return lambda: fcntl.flock(lock, fcntl.LOCK_SH)


_TCP = {"tcp": _ask_tcp, "timeout": _look_at_tcp, "select": _select_tcp, "asyncio": _await_tcp}
_CONNECTS = {**_TCP, "unix": _ask_unix, "pipe": _read_pipe, "flock": _take_lock}


# --- What stands beside a rank's work, and is no fault.


def _heartbeat():
    stop = threading.Event()

    def beat():
        while not stop.wait(5):
            pass

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()


def _idle_pool():
    pool = concurrent.futures.ThreadPoolExecutor(2)
    list(pool.map(abs, (1, 2)))
    _KEPT.append(pool)


def _helper():
    _KEPT.append(subprocess.Popen(["sleep", "3600"]))


def _writer():
    lines = queue.Queue()

    def write_lines():
        while True:
            lines.get()

    threading.Thread(target=write_lines, daemon=True, name="writer").start()
    _KEPT.append(lines)


def _repeat(act, seconds):
    def repeat():
        for number in itertools.count(1):
            act(number)
            time.sleep(seconds)

    threading.Thread(target=repeat, daemon=True).start()


def _watchdog():
    line = "[watchdog] rank {}: still at step 45, {}/1800 s"
    _repeat(lambda number: print(line.format(rank(), number)), 0.5)


def _monitor():
    _repeat(lambda number: Path("/proc/self/status").read_text(), 0.02)


_BESIDE = {
    "heartbeat": _heartbeat, "pool": _idle_pool, "helper": _helper, "writer": _writer,
    "watchdog": _watchdog, "monitor": _monitor,
}  # fmt: skip


# --- What the first rank does in a step of a job that is well.


def _pieces(seconds, act, pause=0.1):
    for number in range(int(seconds / pause)):
        act(number)
        time.sleep(pause)


def _bar(seconds):
    total = int(seconds / 0.1)
    show = "\r{0:3}%|####    | {0}/{1} [00:30<00:36,  1.50it/s]"
    _pieces(seconds, lambda number: print(show.format(number, total), end="", flush=True))


def _lines(seconds):
    _pieces(seconds, lambda number: print(f"{{'loss': 0.5, 'epoch': {1 + number / 100}}}"))


def _own_file(seconds):
    with open("train.log", "a") as file:
        _pieces(seconds, lambda number: print(f"Epoch: [0][{number}/9000]", file=file, flush=True))


def _read(seconds):
    with open("data.bin", "wb") as file:
        file.truncate(512 << 20)
    with open("data.bin", "rb") as file:
        _pieces(seconds, lambda number: file.read(1 << 20))


def _write(seconds):
    with open("checkpoint.bin", "wb") as file:
        _pieces(seconds, lambda number: (file.write(b"x" * (1 << 18)), file.flush()))


def _child(seconds):
    words = ["timeout", str(seconds), "gzip", "-c", "/dev/zero"]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=False)


def _compute(seconds):
    until = time.monotonic() + seconds
    values = list(range(1000))
    while time.monotonic() < until:
        for part in (_sort, _scale, _count):
            part(values)


def _sort(values):
    return sorted(value * 7919 % 1000 for value in values)


def _scale(values):
    return [value / 7 for value in values]


def _count(values):
    return {value % 9: value for value in values}


_WORK = {
    "nap": time.sleep, "bar": _bar, "lines": _lines, "own_file": _own_file, "read": _read,
    "write": _write, "child": _child, "compute": _compute,
}  # fmt: skip


# --- Faults that look like work.


def spin_on_lock():
    lock = threading.Lock()
    lock.acquire()
    while not lock.acquire(blocking=False):
        pass


def poll_file():
    while not os.path.exists("ready"):
        pass


def poll_files():
    while not (os.path.exists("ready") or os.path.islink("failed")):
        pass


def retry():
    for number in itertools.count(1):
        try:
            socket.create_connection(("127.0.0.1", 1), timeout=1).close()
        except OSError as problem:
            print(f"Retry {number}/1000 in 0.3 s: {problem}")
            time.sleep(0.3)


# --- The wait.


def steps():
    """The first rank gives a word every few seconds, and each passes it on: a job that is well."""
    for step in itertools.count(1):
        if _WAIT:
            _PLACES[plan()["where"][rank()]](_WAIT[0])
        else:
            _WORK[plan()["work"]](plan()["step_s"])
        for connection in _BELOW:
            connection.sendall(b"x")
        yield step


def exchange():
    """Wait for the rank above, in the main thread or in one that the main thread awaits."""
    with contextlib.suppress(OSError):
        _PLACES[plan()["where"][rank()]](_WAIT[0])


def _in_thread(wait):
    thread = threading.Thread(target=wait, daemon=True, name="exchange")
    thread.start()
    thread.join()


def _in_future(wait):
    concurrent.futures.ThreadPoolExecutor(1).submit(wait).result()


def _in_queue(wait):
    results = queue.Queue()
    threading.Thread(target=lambda: results.put(wait()), daemon=True, name="exchange").start()
    results.get()


_PLACES = {
    "main": lambda wait: wait(), "thread": _in_thread, "future": _in_future, "queue": _in_queue,
}  # fmt: skip
