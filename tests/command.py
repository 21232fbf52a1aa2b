"""The command as a user runs it, and what it may and may not leave on a node.

tool       runs `nodeready …` in a home directory of its own; `tool.start` leaves it running
written    everything that was ever written on a node's disk: path -> (size, time, type)
ours       what is left of our own on a node: processes and temporary files
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nodeready.agent.cores.core_pattern import live_place
from nodeready.lab import LabNode
from tests.paths import ROOT

#: Long enough for the deadlines of a node that hangs, on a machine that is busy.
LIMIT_S = 90

#: A policy whose limits every machine can give its nodes.
POLICY = {"limit_memlock": 4096, "limit_nofile": 16384}

#: What a lab cannot show: nodes share this machine's kernel, and its core_pattern.
WAIVERS = {"proof.core": "shared kernel", "proof.backtrace": "shared kernel"}

#: What runs before the command to give its operations other limits on the node than their own.
SHORT = """
from nodeready.operations import STEPS
for step in STEPS:
    object.__setattr__(step, "timeout_s", {seconds})
"""
#: What runs before the command to leave its VmHWM (proc(5)), in KiB, in a file at its end.
_PEAK = """
import atexit, re
from pathlib import Path
def leave():
    status = Path("/proc/self/status").read_text()
    Path({path!r}).write_text(re.search("VmHWM:\\s+([0-9]+) kB", status)[1])
atexit.register(leave)
"""
_PATCH = "from nodeready.cli import patch\npatch()\n"
_MAIN = "import sys\nfrom nodeready.cli import main\nmain(sys.argv[1:])\n"


def cannot_run(reason: str) -> NoReturn:
    """Skip the test; in CI that is a failure."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    raise AssertionError


class Done:
    def __init__(self, status: int, out: str, err: str, peak_kb: int = 0) -> None:
        self.status, self.out, self.err, self.peak_kb = status, out, err, peak_kb
        self.lines = self.err.splitlines()
        assert "Traceback" not in out + err, out + err

    @property
    def document(self) -> Any:
        """What it printed, with --format json."""
        assert self.out, self
        return json.loads(self.out)

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """Node -> its row, of an audit or a `ready`."""
        return {row["name"]: row for row in self.document["nodes"]}

    @property
    def results(self) -> dict[str, dict[str, dict[str, str]]]:
        """Node -> check -> result."""
        return {
            name: {result["check"]: result for result in row["results"]}
            for name, row in self.nodes.items()
        }

    @property
    def reasons(self) -> dict[str, str]:
        """Node -> why nothing is known of it."""
        return {gap["node"]: gap["reason"] for gap in self.document["gaps"]}

    def __repr__(self) -> str:
        return f"\nexit {self.status}\n--- stdout\n{self.out}--- stderr\n{self.err}"


class Tool:
    """`nodeready`, in an empty home and away from this project's own files."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.running: list[subprocess.Popen[bytes]] = []

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("NODEREADY", "XDG_"))}
        for name in ("NO_COLOR", "CLICOLOR_FORCE", "SSH_AUTH_SOCK", "COLUMNS"):
            kept.pop(name, None)
        path = str(ROOT)
        return {**kept, "HOME": str(self.home), "PYTHONPATH": path, "TERM": "xterm", **more}

    def start(
        self,
        *words: object,
        first: str = "",
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        **how: Any,
    ) -> subprocess.Popen[bytes]:
        """first: code that runs before the command, in its process.
        prefix: words in front of the interpreter's, such as `setpriv ... --`.
        """
        argv = ["-c", _PATCH + first + _MAIN] if first else ["-m", "nodeready"]
        how = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": self.home,
            **how,
        }
        started = subprocess.Popen(
            [*prefix, sys.executable, *argv, *map(str, words)],
            env=self.environment(**(env or {})),
            **how,
        )
        self.running.append(started)
        return started

    def end(self, started: subprocess.Popen[bytes], status: int | None = None) -> Done:
        """Wait for its end; with this exit status, if one is given."""
        out, err = started.communicate(timeout=LIMIT_S)
        texts = [(text or b"").decode(errors="surrogateescape") for text in (out, err)]
        done = Done(started.returncode, *texts)
        assert status in (None, done.status), done
        return done

    def measured(self, *words: object) -> Done:
        """The same, with the most memory that the command had at once, as it tells at its end.

        Not ru_maxrss: a process inherits that of whoever started it, and of the tests' process
        that is what the largest test before this one needed.
        """
        peak = self.home / "peak"
        done = self.end(self.start(*words, first=_PEAK.format(path=str(peak))))
        done.peak_kb = int(peak.read_text())
        peak.unlink()
        return done

    def __call__(self, *words: object, status: int | None = None, **how: Any) -> Done:
        return self.end(self.start(*words, **how), status)

    def finish(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Tool]:
    home = tmp_path / "home"
    home.mkdir()
    tool = Tool(home)
    yield tool
    tool.finish()


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., Path]:
    """An inventory of these nodes and further hosts: `fleet(nodes, {name: data}, key=value)`."""

    def write(
        nodes: Sequence[LabNode], more: dict[str, dict[str, Any]] | None = None, **data: Any
    ) -> Path:
        hosts = [node.inventory_data() for node in nodes]
        hosts = [(name, {**own, **(more or {}).pop(name, {})}) for name, own in hosts]
        hosts += list((more or {}).items())
        path = tmp_path / "fleet" / "inventory.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"lab = ({hosts!r}, { ({**POLICY, **data})!r})\n")
        return path

    return write


#: What a login and the lab itself write.
_LOGIN = re.compile(r"upper\d+/(run|tmp|\.lab|var/log|root/\.cache|home/ml/\.cache)(/|$)")


def written(node: LabNode) -> dict[str, tuple[int, int, int]]:
    """Everything on the node's own layer of its disk by path, but for what a login writes."""
    disks = node.lab.directory / "fs" / "nodes" / node.name
    found = {}
    for path in disks.glob("g*/upper*/**/*"):
        if not _LOGIN.search(str(path)):
            known = path.lstat()
            found[re.sub(r"^.*?/upper\d+", "", str(path))] = (
                known.st_size,
                known.st_mtime_ns,
                known.st_mode,
            )
    return found


def ours(node: LabNode) -> list[str]:
    """Processes of ours that still run on the node, and temporary files that were left."""
    look = (
        "ps -eww -o pid,args | grep '[n]odeready:';"
        "find /etc /usr/local /home /root /var/crash -xdev -name '.nodeready.*'"
    )
    return node.enter(["sh", "-c", look], check=False).stdout.splitlines()


def hang(node: LabNode, before: str = "") -> None:
    """`sysctl -w` never ends on the node; `hangs` tells when it has begun."""
    script = f"""#!/bin/sh
[ "$1" = -w ] || exec /usr/sbin/sysctl "$@"
touch /run/hanging
{before}
sleep 600
"""
    node.write("/usr/local/sbin/sysctl", script, mode=0o755)


def hangs(node: LabNode) -> bool:
    return node.enter(["test", "-e", "/run/hanging"], check=False).returncode == 0


def wait_for(ready: Callable[[], bool]) -> None:
    """Until it is so. Raises AssertionError when it never is."""
    for _ in range(900):
        if ready():
            return
        time.sleep(0.1)
    raise AssertionError("it never came to that")


def kernel_cores(node: LabNode, directory: str) -> str:
    """A glob of the cores of all processes of the node that work in this directory.

    The kernel is this machine's, and so is its core_pattern. Anybody may write to the place. The
    test is skipped (in CI it fails) where the kernel gives cores to a program.
    """
    place = live_place()
    path = os.path.join(directory, place.shown)
    if place.handler or "*" in os.path.dirname(path):
        cannot_run(f"this machine's kernel writes no cores there: {place.pattern}")
    node.enter(["install", "-d", "-m", "1777", os.path.dirname(path)])
    return path


class Terminal:
    """The command as on a person's terminal: all of its input and output is this."""

    def __init__(self, tool: Tool, *words: object, columns: int = 80, **env: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

        def own() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        how: dict[str, Any] = {**streams, "start_new_session": True, "preexec_fn": own}
        self.text, self.heard = "", 0
        self.process = tool.start(*words, env=env, **how)
        os.close(slave)

    def _more(self) -> bool:
        """Whether the command said something more, or has not ended yet."""
        if not select.select([self.master], [], [], LIMIT_S)[0]:
            raise AssertionError(f"silent for {LIMIT_S} s: {self.text}")
        try:
            piece = os.read(self.master, 65536)
        except OSError:
            return False
        self.text += piece.decode(errors="surrogateescape").replace("\r\n", "\n")
        return bool(piece)

    def expect(self, words: str) -> None:
        """Until it has said this, after what was expected before. Raises AssertionError."""
        while words not in self.text[self.heard :]:
            assert self._more(), f"no {words!r} in {self.text}"
        self.heard = self.text.index(words, self.heard) + len(words)

    def asked(self, words: str) -> None:
        """Until it has asked this, and waits for the answer: a key that is pressed in between
        would interrupt nothing.
        """
        self.expect(words)
        call = Path("/proc", str(self.process.pid), "syscall")
        wait_for(lambda: call.read_text().split()[1:2] == ["0x0"])

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> Done:
        """To its end; all that it wrote is `out`, without colours and movements of the cursor."""
        while self._more():
            pass
        os.close(self.master)
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
        return Done(self.process.wait(), plain, "")
