"""Which names of a directory of a node are opened: what inotify(7) tells root there."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodeready.lab import LabNode
from nodeready.lab.processes import nsenter

# Prints the name for each time that a file of the directory is opened, until its input ends.
# O_PATH opens nothing: it tells of no such event.
_WATCH = """
import ctypes, os, select, struct, sys
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, sys.argv[1].encode(), 0x20) >= 0
print("ready", flush=True)
over = False
while not over:
    ready = select.select([watch, 0], [], [])[0]
    over = 0 in ready
    while select.select([watch], [], [], 0)[0]:
        data = os.read(watch, 1 << 16)
        while data:
            size = struct.unpack_from("iIII", data)[3]
            name = data[16 : 16 + size].rstrip(b"\\0")
            if name:
                print(ascii(name.decode(errors="replace")), flush=True)
            data = data[16 + size :]
"""


class Opened(set[str]):
    """The names; complete when the block of `opened` has ended."""


@contextmanager
def opened(node: LabNode, directory: str) -> Iterator[Opened]:
    """The names of the directory that anybody on the node opens within the block."""
    with _opened([*nsenter(node.pid), "python3", "-c", _WATCH, directory]) as names:
        yield names


@contextmanager
def opened_here(directory: Path) -> Iterator[Opened]:
    """The same, on this machine."""
    with _opened([sys.executable, "-c", _WATCH, str(directory)]) as names:
        yield names


@contextmanager
def _opened(into: list[str]) -> Iterator[Opened]:
    names = Opened()
    with subprocess.Popen(into, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline() == b"ready\n"
        try:
            yield names
        finally:
            said = watch.communicate(timeout=30)[0].decode()
            names.update(row.strip("'") for row in said.splitlines())
