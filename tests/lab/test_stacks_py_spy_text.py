"""What `py-spy dump` prints becomes traces: dumps/ holds what py-spy 0.4.3 printed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from nodeready.triage.stacks.archive import parse_dump


def test_the_text_says_what_py_spy_says_in_json(tmp_path):
    """One process, both forms: the same threads, calls, files and lines."""
    program = tmp_path / "train.py"
    program.write_text(
        "import threading, time\n"
        "def waits(): print('up', flush=True); time.sleep(60)\n"
        "class Loader:\n"
        "    def run(self): waits()\n"
        "threading.Thread(target=Loader().run, daemon=True, name='a b').start()\n"
        "[time.sleep(60) for _ in range(1)]\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == b"up\n"
            for _ in range(100):  # until both threads sleep
                text = dumped(job.pid)
                threads = json.loads(dumped(job.pid, "--json"))
                if said(text) == wanted(threads) and len(threads) == 2:
                    break
                time.sleep(0.05)
        finally:
            job.kill()
    assert set(said(text)) == {"MainThread", "a b"}
    assert said(text) == wanted(threads)


def dumped(pid: int, *options: str) -> str:
    tool = Path(sys.executable).parent / "py-spy"
    command = [tool, "dump", "--pid", str(pid), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted(threads: list[dict]) -> dict[str, list]:
    return {
        thread["thread_name"]: [
            [frame["name"], frame["short_filename"], frame["line"]]
            for frame in reversed(thread["frames"])
        ]
        for thread in threads
    }


def said(text: str) -> dict[str, list]:
    (trace,) = parse_dump(text, "gpu1")
    sample = trace["processes"][0]["samples"][0]
    stacks = {"MainThread": sample["main"], **dict(sample["threads"])}
    return {
        name: [trace["frames"][frame] for frame in trace["stacks"][stack]]
        for name, stack in stacks.items()
    }
