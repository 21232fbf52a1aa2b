"""This machine, without any connection: the transport of ``--local`` and of the node's program.

Only Python's standard library. Every command runs in a new session, at most until its limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from select import PIPE_BUF
from typing import IO, Protocol, cast

from nodeready.agent import asking
from nodeready.agent.asking import Answer, Conversation, Exchange, Key, Request, ResultT, Transport
from nodeready.core import shell
from nodeready.core.outcome import HUNG, LATE, OUTPUT, REFUSED, SUDO, TIMEOUT, Gap

# --- sudo on a node: a command as root, and what its answer means.


def with_sudo(command: str, password: str) -> str:
    """``command`` as root. In English, so that a refusal can be recognised.

    The password is the first line of the input, never on a command line. Where sudo wants no
    password, the shell reads that line, so that the command does not.
    """
    if not password:
        return f"env LC_ALL=C sudo -n -H {command}"
    line = (
        "LC_ALL=C; export LC_ALL; "
        "if sudo -n -k -H true </dev/null 2>/dev/null; "
        'then read -r nr_password; exec sudo -n -H "$@"; fi; '
        'exec sudo -k -S -p "" -H "$@"'
    )
    return f"sh -c {shell.quote(line)} sh {command}"


def as_root(command: shell.ShellCommand, password: str) -> shell.ShellCommand:
    stdin = f"{password}\n{command.stdin}" if password else command.stdin
    return shell.ShellCommand(with_sudo(command.line, password), stdin)


def judge_reply(reply: Answer, limit_s: float, sudo: bool) -> Answer:
    """The reply, with a gap if its limit ended the script or (``sudo``) sudo refused it."""
    if reply.rc in asking.TIMED_OUT and reply.seconds >= limit_s:
        return replace(reply, gap=Gap(TIMEOUT, f"ended after {limit_s:.0f} s"))
    error, kind = sudo_error(reply.stderr) if sudo and reply.rc else ("", "")
    return replace(reply, gap=Gap(kind, error)) if error else reply


def sudo_error(stderr: str) -> tuple[str, str]:
    """The error of sudo's own words (in English), and its kind; "" twice when it has not refused.
    After a warning (``unable to resolve host``) the command ran: that is no error.
    """
    for line in stderr.splitlines():
        is_sudo = re.match(r"sudo(-rs)?: ", line)
        if is_sudo and re.search(r"(password|interactive authentication) is required", line):
            return "sudo wants a password: run on a terminal to be asked, or allow NOPASSWD", SUDO
        if is_sudo and re.search(r"incorrect (password|authentication)|no password was", line):
            return "sudo refused the password", REFUSED
        if re.search(r" is not (in the sudoers file|allowed to )|may not run sudo", line):
            return f"sudo: {line.strip()}", REFUSED
        if re.search(r"^env: .*sudo.*No such file|^sh: .*sudo: not found", line):
            return "sudo is not installed", REFUSED
        if is_sudo and re.search(r"must have a tty|terminal is required", line):
            return line.strip(), REFUSED
    return "", ""


# --- The exchange of lines with a running script on a node.
#
# Only lines that begin with the mark are the script's; other lines are a login's and are skipped.
# Each wait has a time limit, and the output has a size limit. The script's input ends when the
# channel is closed or this machine dies, so the script must end with its input.

#: Maximum bytes of one line, and of all lines.
_LINE_BYTES = 256 << 10
_ALL_BYTES = 16 << 20
_NOISE_BYTES = 4 << 10  # of lines without the mark, which may tell why the script ended
READ_BYTES = 64 << 10  # maximum bytes of one read
_LAST_S = 2.0  # seconds for the last output of a script that takes no more input
SEND_S = 15.0  # maximum seconds to send a line, or to open a channel


class Stream(Protocol):
    """The input and the output of a running command.

    `read` and `write` raise TimeoutError after ``limit_s``, and OSError or EOFError when the
    connection is lost. `read` raises ValueError if the command ended for a known reason.
    """

    def read(self, limit_s: float) -> bytes: ...
    def write(self, data: bytes, limit_s: float) -> None: ...
    def close(self) -> None: ...


class LineChannel(asking.NodeChannel):
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
        while (line := self._next()) is None:
            remaining_s = deadline - time.monotonic()
            if self._stream is None or remaining_s <= 0:
                break
            self._read_more(remaining_s)
        return line

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


# --- The transport.

PATIENCE_S = 2.0  # seconds from a TERM to a KILL
#: A prolog of Slurm's has no PATH.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _start(line: str, stderr: int) -> subprocess.Popen[bytes]:
    path, pipe = shell.search_path(f"{_PATH}:{os.environ.get('PATH', '')}"), subprocess.PIPE
    # In a new session, because Ctrl-C must not reach the command: this process ends it.
    return subprocess.Popen(
        ["/bin/sh", "-c", line], stdin=pipe, stdout=pipe, stderr=stderr, cwd="/",
        env={**os.environ, "PATH": path}, start_new_session=True,
    )  # fmt: skip


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Wait a second for a process that leads a session, then end all of the session."""
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class LocalProcess:
    """A command that runs on this machine, until `end`."""

    def __init__(self, command: shell.ShellCommand, limit_s: int, max_bytes: int) -> None:
        self._began, self.limit_s = time.monotonic(), limit_s
        # The end of the wait here, of time.monotonic(): a little after its own limit.
        self.until = self._began + limit_s + 2 * shell.KILL_AFTER_S
        self._process = _start(command.line, subprocess.PIPE)
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = cast("tuple[IO[bytes], ...]", streams)
        self._input = memoryview(command.stdin.encode("utf-8", "surrogateescape"))
        self._max_bytes = max_bytes
        self._stdout, self._stderr, self._stderr_bytes = bytearray(), bytearray(), 0
        self.is_flood = False  # it printed more than the maximum
        self.is_whole = False  # its output has ended, or is_flood
        self._unfinished = [self._out, self._err]
        self._feed()

    def files(self) -> tuple[list[IO[bytes]], list[IO[bytes]]]:
        """The files to read and the files to write, for select."""
        return self._unfinished, [self._in] if not self._in.closed else []

    def transfer(self, ready: Iterable[IO[bytes]]) -> None:
        """Read from and write to those of its files that are ready."""
        for file in ready:
            if file is self._in:
                self._feed()
            elif not file.closed:
                self._take(file)

    def _feed(self) -> None:
        """Write as much input as the pipe takes; a command may end without reading it."""
        try:
            written = os.write(self._in.fileno(), self._input[:PIPE_BUF]) if self._input else 0
            self._input = self._input[written:]
        except OSError:
            self._input = self._input[:0]
        if not self._input:
            with contextlib.suppress(OSError):
                self._in.close()

    def _take(self, file: IO[bytes]) -> None:
        data = os.read(file.fileno(), READ_BYTES)
        if file is self._err:
            self._stderr += data[: asking.ERROR_BYTES - len(self._stderr)]
            self._stderr_bytes += len(data)
            if not data:
                self._unfinished.remove(file)
        else:
            self._stdout += data
            self.is_whole = self.is_whole or not data
        self.is_flood = max(len(self._stdout), self._stderr_bytes) > self._max_bytes
        self.is_whole = self.is_whole or self.is_flood

    def answer(self) -> Answer:
        """The command's answer, with a gap if it did not end."""
        seconds = time.monotonic() - self._began
        while not self.is_flood and self._err in self._unfinished:
            if not select.select([self._err], [], [], 0)[0]:
                break
            self._take(self._err)
        rc: int | None = None
        if self.is_whole and not self.is_flood:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rc = self._process.wait(timeout=PATIENCE_S)
        stdout = self._stdout.decode("utf-8", "surrogateescape")
        stderr = self._stderr.decode("utf-8", "surrogateescape")
        if self.is_flood:
            first = bytes((self._stdout or self._stderr)[:40]).decode("utf-8", "replace")
            gap = Gap(OUTPUT, f"too much output, beginning with {first!r}")
            return Answer("", stderr, seconds, gap=gap)
        if not self.is_whole:
            gap = Gap(HUNG, f"no answer in {self.limit_s} s")
            return Answer(stdout, stderr, seconds, gap=gap)
        return Answer(stdout, stderr, seconds, rc if rc is None or rc >= 0 else None)

    def end(self) -> None:
        """End all processes; one that no signal ends (state D) is not waited for."""
        kill_time = time.monotonic() + PATIENCE_S
        number = signal.SIGTERM
        while (self.is_flood or not self.is_whole) and (pids := self._session_pids()):
            if number is not signal.SIGKILL:
                _signal(pids, number)
                number = signal.SIGCONT
            if time.monotonic() > kill_time:
                _signal(pids, signal.SIGKILL)
                break
            time.sleep(0.02)
        for file in (self._in, self._out, self._err):
            with contextlib.suppress(OSError):
                file.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)

    def _session_pids(self) -> list[int]:
        """The processes of the command's session that have not ended. The session keeps its number
        until the command is waited for.
        """
        pids = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    words = file.read().rpartition(")")[2].split()
                if int(words[3]) == self._process.pid and words[0] not in "ZX":
                    pids.append(int(name))
        return pids


def run(command: shell.ShellCommand, limit_s: int, max_bytes: int) -> Answer:
    """Run a command here and wait for its answer."""
    child = LocalProcess(command, limit_s, max_bytes)
    try:
        while not child.is_whole and (remaining_s := child.until - time.monotonic()) > 0:
            ready = select.select(*child.files(), [], remaining_s)
            child.transfer([*ready[0], *ready[1]])
        return child.answer()
    finally:
        child.end()


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


class Local(Transport):
    """This machine. name: "": its host name; sudo: scripts run as root"""

    def __init__(self, name: str = "", *, sudo: bool = False) -> None:
        super().__init__([name or os.uname().nodename])
        self._sudo, self._password = sudo, ""

    def _command(self, request: Request) -> shell.ShellCommand:
        command = shell.command(request.script, request.limit_s, self.tag, request.payload)
        return as_root(command, self._password) if self._sudo else command

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        self._password = password

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> asking.Outcomes[ResultT]:
        exchanges = asking.exchanges_of(conversations)
        running: dict[Key, LocalProcess] = {}
        try:
            for key, exchange in exchanges.items():
                exchange.start()
                self._ask(key, exchange, running)
            while exchanges:
                over = [key for key, exchange in exchanges.items() if exchange.is_over]
                for key in over:
                    yield key, exchanges.pop(key).outcome
                if running and not over:
                    self._wait(exchanges, running, deadline)
        except KeyboardInterrupt:
            self.interrupted = True
            self._end(running)
            yield from asking.end_all(exchanges, lambda key: asking.INTERRUPT)
        finally:
            self._end(running)

    def _ask(
        self, key: Key, exchange: Exchange[ResultT], running: dict[Key, LocalProcess]
    ) -> None:
        request = exchange.request
        if not exchange.is_over and request is not None:
            command = self._command(request)
            running[key] = LocalProcess(command, request.limit_s, request.max_bytes)

    def _wait(
        self,
        exchanges: dict[Key, Exchange[ResultT]],
        running: dict[Key, LocalProcess],
        deadline: float | None,
    ) -> None:
        """Read until a command has ended its output or has no time left; answer for it."""
        until = {key: child.until for key, child in running.items()}
        if deadline is not None:
            until = {key: min(moment, deadline) for key, moment in until.items()}
        reading = [file for child in running.values() for file in child.files()[0]]
        writing = [file for child in running.values() for file in child.files()[1]]
        remaining_s = min(until.values()) - time.monotonic()
        ready = select.select(reading, writing, [], max(0.0, remaining_s))
        for key, child in list(running.items()):
            files = [*child.files()[0], *child.files()[1]]
            child.transfer([file for file in (*ready[0], *ready[1]) if file in files])
            is_late = time.monotonic() >= until[key]
            if not child.is_whole and not is_late:
                continue
            answer, exchange = child.answer(), exchanges[key]
            if answer.gap is None:
                answer = judge_reply(answer, child.limit_s, self._sudo)
            del running[key]
            child.end()
            if is_late and until[key] == deadline and answer.gap:
                exchange.end(replace(answer, gap=Gap(LATE, answer.gap.reason)))
            else:
                exchange.answer(answer)
            self._ask(key, exchange, running)

    def _end(self, running: dict[Key, LocalProcess]) -> None:
        for child in running.values():
            child.end()
        running.clear()

    def open(self, request: Request) -> LineChannel:
        command, sudo = self._command(request), self._sudo
        return LineChannel(lambda: piped(command.line), command.stdin, request.mark, sudo=sudo)


class Pipes:
    """A command on this machine as a Stream. process: leads a session, and has pipes"""

    select = staticmethod(select.select)

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.stdin, self.stdout = cast("tuple[IO[bytes], ...]", (process.stdin, process.stdout))

    def read(self, limit_s: float | None) -> bytes:
        """See Stream; None: without a limit. Raises TimeoutError, OSError."""
        return self.read_from(self.stdout, limit_s)

    def read_from(self, file: IO[bytes], limit_s: float | None) -> bytes:
        """As `read`, from one of its outputs. Raises TimeoutError, OSError."""
        if not self.select([file], [], [], limit_s)[0]:
            raise TimeoutError
        return os.read(file.fileno(), READ_BYTES)

    def write(self, data: bytes, limit_s: float | None) -> None:
        """See Stream; None: without a limit. Raises TimeoutError, OSError."""
        until = None if limit_s is None else time.monotonic() + limit_s
        remaining = memoryview(data)
        while remaining:
            wait = None if until is None else max(0.0, until - time.monotonic())
            if not self.select([], [self.stdin], [], wait)[1]:
                raise TimeoutError
            remaining = remaining[os.write(self.stdin.fileno(), remaining[:PIPE_BUF]) :]

    def close(self) -> None:
        """End its input, and a second later the command."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        end_session(self.process)
        with contextlib.suppress(OSError):
            self.stdout.close()


def piped(line: str) -> Pipes:
    return Pipes(_start(line, subprocess.STDOUT))
