"""Exchanges lines with a running script on a node.

Only lines that begin with the mark are the script's; other lines are a login's and are skipped.
Each wait has a time limit, and the output has a size limit. The script's input ends when the
channel is closed or this machine dies, so the script must end with its input.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from nodeready.agent.asking import NodeChannel
from nodeready.agent.sudo import sudo_error

#: Maximum bytes of one line, and of all lines.
_LINE_BYTES = 256 << 10
_ALL_BYTES = 16 << 20
#: Kept bytes of the lines without the mark, which may have the reason why the script ended.
_NOISE_BYTES = 4 << 10
#: Maximum bytes of one read.
READ_BYTES = 64 << 10
#: Seconds for the last output of a script that takes no more input.
_LAST_S = 2.0
#: Maximum seconds to send a line, or to open a channel.
SEND_S = 15.0


class Stream(Protocol):
    """The input and the output of a running command.

    `read` and `write` raise TimeoutError after ``limit_s``, and OSError or EOFError when the
    connection is lost. `read` raises ValueError if the command ended for a known reason.
    """

    def read(self, limit_s: float) -> bytes: ...
    def write(self, data: bytes, limit_s: float) -> None: ...
    def close(self) -> None: ...


class LineChannel(NodeChannel):
    """A running script. A fault of the node raises nothing; ``error`` has it."""

    def __init__(
        self, open_stream: Callable[[], Stream], first_input: str, mark: str, *, sudo: bool = False
    ) -> None:
        """open_stream: starts the command. Raises as a Stream does, or ValueError with the reason
        first_input: a password, if any, and the script
        mark:        the beginning of every line of the script
        sudo:        the output may have sudo's error
        """
        self.error = ""
        self._mark, self._sudo = mark.encode(), sudo
        self._unread, self._noise, self._total = bytearray(), bytearray(), 0
        self._stream: Stream | None = None
        try:
            self._stream = open_stream()
        except TimeoutError:
            self._end(f"no channel in {SEND_S:.0f} s")
        except ValueError as problem:
            self._end(str(problem))
        except (OSError, EOFError) as problem:
            self._end_lost(problem)
        self._send(first_input)

    def _end_lost(self, problem: Exception) -> None:
        self._end(f"connection lost ({str(problem) or type(problem).__name__})")

    def _end(self, error: str) -> None:
        self.error = self.error or error
        self.close()

    def _send(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text.encode("utf-8", "surrogateescape"), SEND_S)
        except TimeoutError:
            self._end("takes no input")
        except (OSError, EOFError) as problem:
            # The script's last output has the reason why it takes no more input.
            deadline = time.monotonic() + _LAST_S
            while self._stream is not None and time.monotonic() < deadline:
                self._read_more(deadline - time.monotonic())
            if not self.error:
                self._end_lost(problem)

    def send_line(self, line: str) -> None:
        """Send a line. It must not contain an end of line."""
        self._send(f"{line}\n")

    def read_line(self, limit_s: float) -> str | None:
        """The next line with the mark; None: none within the limit, or the end (see ``error``)."""
        deadline = time.monotonic() + limit_s
        while True:
            line = self._next()
            if line is not None:
                return line
            remaining_s = deadline - time.monotonic()
            if self._stream is None or remaining_s <= 0:
                return None
            self._read_more(remaining_s)

    def _next(self) -> str | None:
        """The first complete line from the mark on; all bytes before the mark are noise."""
        mark_start = self._unread.find(self._mark)
        # Without the mark, the last line stays: it may begin with a part of the mark.
        start = mark_start if mark_start >= 0 else self._unread.rfind(b"\n") + 1
        self._noise = (self._noise + self._unread[:start])[-_NOISE_BYTES:]
        del self._unread[:start]
        end = self._unread.find(b"\n") if mark_start >= 0 else -1
        if end < 0:
            return None
        row = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return row.decode("utf-8", "replace")

    def _read_more(self, limit_s: float) -> None:
        assert self._stream is not None
        try:
            data = self._stream.read(limit_s)
        except TimeoutError:
            return
        except (OSError, EOFError) as problem:
            self._end_lost(problem)
            return
        except ValueError as problem:
            self._end(str(problem))
            return
        self._unread += data
        self._total += len(data)
        if not data:
            self._noise += self._unread
            self._end(self._end_reason())
        elif len(self._unread) > _LINE_BYTES + READ_BYTES or self._total > _ALL_BYTES:
            self._end("too much output")

    def _end_reason(self) -> str:
        """Why the script ended by itself."""
        text = self._noise[-_NOISE_BYTES:].decode("utf-8", "replace")
        if self._sudo and (error := sudo_error(text)[0]):
            return error
        rows = [row.strip() for row in text.splitlines() if row.strip()]
        return f"ended by itself: {rows[-1][:200]}" if rows else "ended by itself"

    def close(self) -> None:
        """Close the script's input, which ends the script."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()
