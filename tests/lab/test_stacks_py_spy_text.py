"""What `py-spy dump` prints becomes traces: dumps/ holds what py-spy 0.4.3 printed."""

import json
import subprocess
import sys
import time
from pathlib import Path

from nodeready.runs.stacks.trace import parse_dump

PROGRAM = """
import threading, time
def waits(): print('up', flush=True); time.sleep(60)
class Loader:
    def run(self): waits()
threading.Thread(target=Loader().run, daemon=True, name='a b').start()
[time.sleep(60) for _ in range(1)]
"""
Calls = dict[str, list[list[object]]]


def dumped(pid: int) -> tuple[Calls, Calls]:
    """Thread -> its calls, by the text and by the JSON."""
    dump = [Path(sys.executable).parent / "py-spy", "dump", "--pid", str(pid)]
    text, data = (
        subprocess.run([*dump, *more], check=True, capture_output=True, text=True).stdout
        for more in ((), ("--json",))
    )
    (trace,) = parse_dump(text, "gpu1")
    sample = trace.processes[0].samples[0]
    stacks = {"MainThread": sample.main, **dict(sample.threads)}
    said = {
        name: [list(trace.frames[frame]) for frame in trace.stacks[stack]]
        for name, stack in stacks.items()
    }
    keys = ("name", "short_filename", "line")
    return said, {
        thread["thread_name"]: [[frame[k] for k in keys] for frame in reversed(thread["frames"])]
        for thread in json.loads(data)
    }


def test_the_text_says_what_py_spy_says_in_json():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == b"up\n"
            for _ in range(100):  # until both threads sleep
                said, wanted = dumped(job.pid)
                if said == wanted and len(said) == 2:
                    break
                time.sleep(0.05)
        finally:
            job.kill()
    assert set(said) == {"MainThread", "a b"}
    assert said == wanted
