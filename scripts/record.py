#!/usr/bin/env python3
"""What the commands print, on disk: whether a refactoring changes anything for users.

    scripts/record.py run CHECKOUT OUTDIR [--only PATTERN]
    scripts/record.py compare OUT1 OUT2
    scripts/record.py normalise OUTDIR

Before a refactoring, `run` records the commands of a checkout: what each of them prints, with
which exit code, and the files that it writes. After it, once more, with the other checkout;
`compare` shows the difference. The checkout's own Python (CHECKOUT/.venv) runs its own command in
it, on labs that this program starts and ends by itself (root, as for `nodeready lab up`).
The commands are listed in `record_table.py`.

A recording is one text file per command, NAME.txt. In it, what differs from run to run without any
change of the program (times, process numbers, keys, addresses of the lab) is replaced by a word in
capitals. OUTDIR/raw keeps what really was printed; `normalise` makes the texts from that again,
after a change of the rules here. With `--only` the commands whose name fits are recorded: the name
of a lane (`deploy`), or a pattern such as ``cpu.fault.*`` or ``*.audit.json``.

Nothing of nodeready is imported: the modules may have moved. What is known of it is what a user
knows: the commands, inventories/lab.py, and the files of a lab in /run/nodeready/lab.

Exit status of `run`: 0, or 1 when a lab or a command could not be started or did not end. Exit
status of `compare`: 0 the same, 1 different. Errors of usage: 2.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import difflib
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from record_table import LANES

#: No command takes so long; a node that hangs has shorter deadlines of its own.
LIMIT_S = 240
LABS = Path("/run/nodeready/lab")

# --- normalising ---------------------------------------------------------------------------------

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"

#: What is replaced in every text, in this order: (what, by what).
RULES: tuple[tuple[str, str], ...] = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:?\d\d| UTC)?", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d(?!\d)", "TIME"),
    (rf"(Mon|Tue|Wed|Thu|Fri|Sat|Sun) ({_MONTHS}) [ \d]\d \d\d:\d\d:\d\d \d{{4}}", "TIME"),
    # Keys of hosts, and their fingerprints.
    (r"AAAA[A-Za-z0-9+/]{40,}={0,2}", "KEY"),
    (r"SHA256:[A-Za-z0-9+/]{20,}", "FINGERPRINT"),
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"),
    (r"\b[0-9a-f]{64}\b", "SHA256"),
    (r"\b02(:[0-9a-f]{2}){5}\b", "MAC"),
    (r"\b0x[0-9a-f]{4,}\b", "0xADDRESS"),
    # A run's mark.
    (r"nodeready:[0-9a-f]{6,}", "nodeready:RUN"),
    (r"nodeready-[0-9a-f]{8,}", "nodeready-NONCE"),
    # Durations.
    (r'("[a-z_]*seconds":\s*)\d+(\.\d+)?(e-?\d+)?', r"\1S"),
    (r'(\btime=")\d+(\.\d+)?(")', r"\1S\3"),
    (r"(_seconds(\{[^}]*\})? )\d[\d.e+-]*", r"\1S"),
    (r"\b\d+\.\d+ ?s\b", "S s"),
    (r'("(mtime_s|age_s|behind_s)":\s*)-?\d[\d.e-]*', r"\1S"),
    (r"\bwritten [\d hmins]+ ago\b", "written SPAN ago"),
    # Of a node without power: whether the other nodes' kernels still ask for its address.
    (r"\b(no route to the node|no answer in 15 s)", "NO ANSWER"),
    (r'("start_s":)\d[\d.]*', r"\1S"),
    (r'("cpu_s":\[)[\d.,]+\]', r"\1S]"),
    (r'("(cpu_s|since_s)":)\d[\d.e-]*', r"\1S"),
    (r'("(median|worst|mean|best|offset)_ms":)\d[\d.e-]*', r"\1MS"),
    (r'("worst_peer":)"[^"]*"', r"\1PEER"),
    (r"\b(none|none that count) in \d+ s(econds)?\b", r"\1 in S s"),
    (r"(\(pid \d+\) in \w+ for )\d+ s\b", r"\1S s"),
    (r"\b(installed|kept) \d+ s ago\b", r"\1 S s ago"),
    # What the machine is busy with.
    (r'("(uptime_s|load|memory_available_mb|file_handles|pids)":)\d[\d.]*', r"\1LIVE"),
    (r'("free_(bytes|files|mb|percent)":)\d[\d.]*', r"\1LIVE"),
    (r'("zombies":)\d+,"zombie_parents":\[[^]]*\]', r"\1LIVE"),
    (r"(?m)(\bhost\.zombies +)\d+$", r"\1LIVE"),
    (r'("check":"host.zombies",[^{}]*?"actual":)"[^"]*"', r"\1LIVE"),
    (r'"\d+ of (\d+)"(,"source":"/proc/(loadavg|sys/fs/file-nr)")', r'"LIVE of \1"\2'),
    (r"\b\d+ of (\d+)(  \[/proc/(loadavg|sys/fs/file-nr)\])", r"LIVE of \1\2"),
    (r"(/tmp/nodeready-NONCE-)\w{8}\b", r"\1NAME"),
    # Process numbers.
    (r'("(pid|ppid|tracer|pgrp|parent)":\s*)[1-9]\d*', r"\1PID"),
    (r"\b(pid|PID|process|processes) \d+", r"\1 PID"),
    (r"\bLWP \d+", "LWP PID"),
    (r"\bcore\.(python3|sleep)\.\d+\.", r"core.\1.PID."),
    (r"(\bcore\.sleep\.PID\.[\w-]+)\.\d{10}\b", r"\1.TIME"),
    # A process's memory, as it is and as it was written.
    (r"\b\d+(\.\d+)? [KM]iB (to|in) ", r"SIZE \2 "),
)
#: What pdsh said, in JSON: each node's line as it came.
_ANSWERS = re.compile(r'\{"label":"[^"]*","text":"[^"]*"\}(,\{"label":"[^"]*","text":"[^"]*"\})+')
_COMPILED = [(re.compile(what), by) for what, by in RULES]


def _in_order(found: re.Match[str]) -> str:
    return "{" + "},{".join(sorted(found[0][1:-1].split("},{"))) + "}"


def normalise(text: str, known: dict[str, Any]) -> str:
    """The text without what differs from run to run; `known` is what this run calls its own."""
    text = text.replace(known["tmp"], "TMP").replace(known["checkout"], "CHECKOUT")
    for name in known["labs"]:
        text = text.replace(name, f"{name[:3]}{'N' * 7}{name[10:]}")
    # A lab has two such networks: its nodes' addresses follow the gateway's.
    text = re.sub(r"\b10\.213\.\d+\.(\d+)\b", r"10.213.LAB.\1", text)
    text = re.sub(r"\bnrlab\d+\b", "nrlabN", text)
    for number in sorted(known["pids"], key=len, reverse=True):
        text = re.sub(rf"(?<=[a-z0-9][ -]){number}\b(?!-)", "PID", text)
    for what, by in _COMPILED:
        text = what.sub(by, text)
    text = _ANSWERS.sub(_in_order, text)
    for what, by in known["more"]:
        text = re.sub(what, by, text, flags=re.M)
    return text


def shown(raw: dict[str, Any]) -> str:
    """One command as text, normalised."""
    command = normalise(raw["command"], raw["known"])
    pieces = [f"$ {command}\n", f"exit {raw['code']}\n"]
    streams = [(name, raw[name]) for name in ("stdout", "stderr")]
    for title, text in [*streams, *((f"file {k}", v) for k, v in sorted(raw["files"].items()))]:
        plain = normalise(text, raw["known"])
        if plain and not plain.endswith("\n"):
            plain += "\n(no newline at the end)\n"
        if raw["sort"]:
            plain = "".join(sorted(plain.splitlines(keepends=True)))
        named = normalise(title, {**raw["known"], "more": []})
        pieces.append(f"--- {named}\n{plain}")
    return "".join(pieces)


# --- running -------------------------------------------------------------------------------------


class RecordError(Exception):
    """Something that has to work before anything can be recorded does not."""


class Recorder:
    """One run: where it comes from and goes to, and what must be taken down at its end."""

    def __init__(self, checkout: Path, out: Path, only: str) -> None:
        self.checkout, self.out, self.only = checkout, out, only
        self.python = str(checkout / ".venv/bin/python")
        self.tmp = Path(tempfile.mkdtemp(prefix="rec-"))
        self.labs: list[str] = []
        self.written: list[str] = []
        self.seconds: list[tuple[float, str]] = []
        self.failures: list[str] = []
        self.stopped = threading.Event()
        (out / "raw").mkdir(parents=True)

    def wanted(self, name: str) -> bool:
        """Is the command of this name to be recorded? A lane's name is all of the lane."""
        return fnmatch.fnmatchcase(name, self.only) or name.partition(".")[0] == self.only

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        drop = ("NODEREADY", "XDG_", "PYTHON", "LC_", "PYINFRA", "SLURM")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
        for name in ("NO_COLOR", "CLICOLOR_FORCE", "SSH_AUTH_SOCK", "COLUMNS", "VIRTUAL_ENV"):
            kept.pop(name, None)
        fixed = {"HOME": str(home), "TERM": "xterm", "LANG": "C.UTF-8", "TZ": "UTC"}
        return {**kept, **fixed, **more}

    def down(self) -> None:
        """End all labs that are left."""
        for name in self.labs:
            argv = [self.python, "-m", "nodeready", "lab", "down", "--name", name]
            if (LABS / name).exists():
                subprocess.run(argv, cwd=self.checkout, capture_output=True, check=False)


class Lane:
    """Commands that run one after the other, and the labs that they need.

    `{out}` in a word is a new directory for each command, whose files are recorded with it;
    `{tmp}` one for the lane.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name
        self.tmp = recorder.tmp / name
        self.tmp.mkdir()
        self.lab = ""
        self.labs: list[str] = []
        self.pids: list[str] = []
        self.count = 0

    # labs

    def up(self, *words: str, suffix: str = "") -> None:
        """Start a lab, or change it; the commands that follow use it."""
        self.lab = f"rec{os.getpid():07d}{suffix or self.name}"
        if self.lab not in self.labs:
            self.labs.append(self.lab)
            self.recorder.labs.append(self.lab)
        argv = [self.recorder.python, "-m", "nodeready", "lab", "up", "--name", self.lab, *words]
        self.checked(argv)

    def down(self) -> None:
        argv = [self.recorder.python, "-m", "nodeready", "lab", "down", "--name", self.lab]
        self.checked(argv)

    def state(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((LABS / self.lab / "state.json").read_text())
        return loaded

    def node(self, number: int) -> str:
        """The name of a node, counted from 1."""
        return str(self.state()["nodes"][number - 1]["name"])

    def pid(self, number: int) -> int:
        return int(self.state()["nodes"][number - 1]["pid"])

    def inside(self, number: int) -> list[str]:
        """What runs a program on a node without ssh."""
        return ["nsenter", "-t", str(self.pid(number)), "-m", "-p", "-n", "-u", "-i", "--"]

    def on(self, number: int, script: str, stdin: str = "") -> str:
        """Run a shell script on a node as root, without ssh; what it printed."""
        return self.checked([*self.inside(number), "sh", "-c", script], stdin)

    def write(self, number: int, path: str, content: str) -> None:
        where = shlex.quote(path)
        self.on(number, f"mkdir -p $(dirname {where}) && cat >{where}", content)

    def checked(self, argv: Sequence[str], stdin: str = "") -> str:
        if self.recorder.stopped.is_set():
            raise KeyboardInterrupt
        done = subprocess.run(
            argv,
            cwd=self.recorder.checkout,
            input=stdin,
            env=self.recorder.environment(self.tmp),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RecordError(f"{shlex.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    # commands

    def __call__(
        self,
        name: str,
        *words: object,
        argv: Sequence[str] | None = None,
        home: str = "",
        stdin: str | None = None,
        sort: bool = False,
        more: Sequence[tuple[str, str]] = (),
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Record `nodeready WORDS`, or the program `argv`.

        home: commands with the same one know of each other (by what is in their home)
        sort: the lines come in any order
        more: rules for this command alone
        """
        name = f"{self.name}.{name}"
        if not self.recorder.wanted(name):
            return
        if self.recorder.stopped.is_set():
            raise KeyboardInterrupt
        self.count += 1
        where = self.tmp / f"home-{home or self.count}"
        where.mkdir(exist_ok=True)
        out = self.tmp / f"out-{self.count}"
        out.mkdir()
        begin = list(argv) if argv is not None else [self.recorder.python, "-m", "nodeready"]
        rest = [
            str(word).replace("{out}", str(out)).replace("{tmp}", str(self.tmp)) for word in words
        ]
        files = {"NODEREADY_LAB": self.lab} if self.lab else {}
        began = time.monotonic()
        code, texts = self._run(
            [*begin, *rest],
            self.recorder.environment(where, **files, **(env or {})),
            stdin,
            cwd or self.recorder.checkout,
        )
        self.recorder.seconds.append((time.monotonic() - began, name))
        words_shown = [*begin, *rest] if argv is not None else ["nodeready", *rest]
        raw = {
            "command": shlex.join(words_shown),
            "code": code,
            "stdout": texts[0],
            "stderr": texts[1],
            "files": dict(_files(out)),
            "sort": sort,
            "known": {
                "tmp": str(self.tmp),
                "checkout": str(self.recorder.checkout),
                "labs": [f"rec{os.getpid():07d}"],
                "pids": self.pids,
                "more": [(r"(?<=-t )\d+", "PID"), (r"TMP/(out|home)-\d+", r"TMP/\1"), *more],
            },
        }
        if name in self.recorder.written:
            raise RecordError(f"two commands are called {name}")
        self.recorder.written.append(name)
        (self.recorder.out / "raw" / f"{name}.json").write_text(json.dumps(raw))
        (self.recorder.out / f"{name}.txt").write_text(shown(raw))

    def _run(
        self, argv: list[str], env: dict[str, str], stdin: str | None, cwd: Path
    ) -> tuple[int, list[str]]:
        started = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            given = None if stdin is None else stdin.encode()
            texts = started.communicate(given, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            texts = started.communicate()
            self.recorder.failures.append(f"{shlex.join(argv)}: not done after {LIMIT_S} s")
        return started.returncode, [text.decode(errors="backslashreplace") for text in texts]


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    """The files that a command wrote, as text, each with its mode."""
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        name = f"{path.relative_to(directory)} {path.stat().st_mode & 0o7777:o}"
        if zipfile.is_zipfile(path):
            yield name, "a program, as one zip file\n"
        else:
            yield name, path.read_bytes().decode(errors="backslashreplace")


# --- the command ---------------------------------------------------------------------------------


def run_lane(recorder: Recorder, name: str) -> None:
    """All of a lane; one that fails costs itself."""
    first = recorder.only.partition(".")[0]
    if not (first.startswith("*") or fnmatch.fnmatchcase(name, first)):
        return
    lane = Lane(recorder, name)
    began = time.monotonic()
    try:
        LANES[name](lane)
    except KeyboardInterrupt:
        pass
    except (RecordError, OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
        recorder.failures.append(f"{name}: {error}")
    finally:
        if lane.lab and (LABS / lane.lab).exists():
            argv = [recorder.python, "-m", "nodeready", "lab", "down", "--name", lane.lab]
            subprocess.run(argv, cwd=recorder.checkout, capture_output=True, check=False)
    print(f"{name}: {lane.count} commands, {time.monotonic() - began:.0f} s", flush=True)


def _interrupted(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def run(checkout: Path, out: Path, only: str, jobs: int) -> int:
    """Record; the exit status."""
    recorder = Recorder(checkout, out, only)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    began = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(lambda name: run_lane(recorder, name), LANES))
            except BaseException:
                recorder.stopped.set()
                raise
    except KeyboardInterrupt:
        recorder.failures.append("interrupted")
    finally:
        recorder.down()
        shutil.rmtree(recorder.tmp, ignore_errors=True)
    slow = ", ".join(f"{name} {seconds:.0f} s" for seconds, name in sorted(recorder.seconds)[-8:])
    print(f"{len(recorder.written)} commands, {time.monotonic() - began:.0f} s; slowest: {slow}")
    for failure in recorder.failures:
        print(f"record: {failure}", file=sys.stderr)
    return 1 if recorder.failures or not recorder.written else 0


def again(out: Path) -> int:
    """Make the texts of a recording from what was printed, by the rules as they are now."""
    for path in sorted((out / "raw").glob("*.json")):
        (out / f"{path.stem}.txt").write_text(shown(json.loads(path.read_text())))
    return 0


def compare(first: Path, second: Path) -> int:
    """Print how two recordings differ; the exit status."""
    texts = [{path.name: path for path in out.glob("*.txt")} for out in (first, second)]
    different = 0
    for name in sorted({*texts[0], *texts[1]}):
        if name not in texts[0] or name not in texts[1]:
            print(f"only in {second if name in texts[1] else first}: {name}")
            different += 1
            continue
        one, two = (paths[name].read_text().splitlines() for paths in texts)
        if one != two:
            different += 1
            lines = difflib.unified_diff(
                one, two, str(texts[0][name]), str(texts[1][name]), lineterm=""
            )
            print("\n".join(lines))
    print(f"{len({*texts[0], *texts[1]})} commands, {different} of them different")
    return 1 if different or not texts[0] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Record what the commands print, and compare.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="record the commands of a checkout")
    running.add_argument("checkout", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--only", default="*", metavar="PATTERN", help="such as '*.audit.*'")
    running.add_argument("--jobs", type=int, default=3, help="so many at a time")
    comparing = commands.add_parser("compare", help="how two recordings differ")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    making = commands.add_parser("normalise", help="make a recording's texts again")
    making.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.first, given.second)
    if given.command == "normalise":
        return again(given.out)
    checkout = given.checkout.resolve()
    if not (checkout / ".venv/bin/python").exists():
        parser.error(f"{checkout}: has no .venv")
    if given.out.exists():
        parser.error(f"{given.out}: is there already")
    return run(checkout, given.out.resolve(), given.only, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
