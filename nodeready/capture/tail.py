"""The program on the node that reads the last lines of the files that match a pattern.

Nothing is asked of a file system but in a fork (`tail_reader.py`): when it comes no further, it is
left behind, and another one goes on without that mount. The answer is one line, ``NONCE tail
"..."``: `Tail` as JSON, compressed, in base64.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
import zlib
from dataclasses import asdict
from typing import Any

from nodeready.capture import mounts
from nodeready.capture.aside import Aside, Tell
from nodeready.capture.tail_reader import Reader
from nodeready.capture.tail_seen import Config, File, Tail, Unread

__all__ = ["Config", "main"]

#: Bytes of all lines of a node; paths that are told of without having been read.
MAX_ANSWER, MAX_TOLD = 900_000, 64
#: Seconds for one question to a file system, or for the expression on one file.
PATIENCE_S = 4


class _Gathered:
    """What the forks told."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.files: dict[str, File] = {}
        self.unread: dict[str, Unread] = {}
        self.chosen: list[str] = []
        self.told = {"left_out": 0, "older": 0}
        self.error = ""
        self.done = False
        self.room = MAX_ANSWER

    def take(self, said: dict[str, Any]) -> None:
        if "file" in said:
            self.add(File(**said["file"]))
        elif "unread" in said:
            one = Unread(**said["unread"])
            if len(self.unread) < MAX_TOLD or one.path in self.unread:
                self.unread[one.path] = one
            elif one.fault:
                self.error = f"more than {MAX_TOLD} paths were not read"
        elif "chosen" in said:
            self.chosen = said["chosen"]
            self.told = {name: said[name] for name in self.told}
        elif "error" in said:
            self.error = said["error"]
        self.done = self.done or "done" in said

    def add(self, file: File) -> None:
        """Within what is left of the answer: the last lines are the ones that count."""
        kept: list[str] = []
        for text in reversed(file.lines):
            self.room -= len(json.dumps(text)) + 1
            if self.room < 0:
                self.error = f"more than {MAX_ANSWER:,} bytes: lines are missing; take less"
                break
            kept.insert(0, text)
        self.files[file.path] = File(**{**asdict(file), "lines": tuple(kept)})

    def tail(self) -> Tail:
        for path in self.chosen:
            if path not in self.files and path not in self.unread:
                self.unread[path] = Unread(path, f"not read within {self.config.limit_s} s", True)
        return Tail(
            os.uname().nodename,
            tuple(self.files.values()),
            tuple(one for one in self.unread.values() if one.path not in self.files),
            self.told["left_out"],
            self.told["older"],
            self.error,
        )


def gather(config: Config) -> Tail:
    """What the pattern finds here, within config.limit_s."""
    found = _Gathered(config)
    deadline = time.monotonic() + config.limit_s - 1
    dead, slow = mounts.dead(), set[str]()
    while (left := deadline - time.monotonic()) > 0:

        def work(tell: Tell) -> None:
            Reader(config, tell, dead, slow | {*found.files}).work()

        one, device, searching, ended = Aside(work, left + 1), "", "", True
        for said in one.hear(PATIENCE_S, deadline):
            if said is None:
                ended = False
                break
            searching = said.get("search", "")
            device = said.get("at", device)
            found.take(said)
        one.end()
        if ended:
            if not found.done:
                found.error = "its own reader broke off"
            break
        if searching:
            slow.add(searching)
            why = f"--grep takes longer than {PATIENCE_S} s on its lines"
            found.unread[searching] = Unread(searching, why, True)
        elif device:
            dead.add(device)
    else:
        found.error = found.error or f"not done within {config.limit_s} s"
    return found.tail()


def packed(config: Config, tail: Tail) -> str:
    """The program's line."""
    text = json.dumps(asdict(tail), separators=(",", ":")).encode("ascii")
    return f'{config.nonce} tail "{base64.b64encode(zlib.compress(text)).decode("ascii")}"'


def main(config: Config) -> None:
    """The program."""
    try:
        if config.grep:
            re.compile(config.grep)
        found = gather(config)
    except re.error as error:
        found = Tail(os.uname().nodename, (), (), 0, 0, f"--grep: {error}")
    print(packed(config, found), flush=True)
