"""Ranks on lab nodes: started, looked at by the program as it travels, and found unharmed."""

import re
import secrets
import subprocess
from pathlib import Path
from typing import Any

from nodeready.agent import payload
from nodeready.agent.stacks import program as answer
from nodeready.core import shell
from nodeready.lab import LabNode
from nodeready.lab.processes import nsenter
from tests.builders.proof import processes
from tests.builders.traces import checked
from tests.command import wait_for

TAG = "nodeready:test"
SPY = "/usr/local/bin/py-spy"

#: Says that it is up, and waits in a function of its own.
WAITS = """
import os, time
def waits_here():
    open(os.environ["UP"], "w").close()
    time.sleep(600)
"""
WAIT = WAITS + "waits_here()"

#: Writes every command line and environment that its user can read to a file, each once.
WATCH = """
import glob, sys
seen = set()
with open(sys.argv[1], "ab", 0) as kept:
    while True:
        for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
            try:
                text = open(path, "rb").read()
            except OSError:
                continue
            if text not in seen:
                seen.add(text)
                kept.write(text.replace(b"\\n", b" ") + b"\\n")
"""


def start(node: LabNode, *argv: str, user: str = "root", up: bool = True, **values: object) -> int:
    """Start it in a session of its own, with these in its environment; its number on the node.

    up: it tells when it has come up, as WAIT does
    """
    file = f"/tmp/up-{secrets.token_hex(4)}"
    words = [f"{name}={value}" for name, value in {**values, "UP": file}.items()]
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    as_user = [] if user == "root" else become
    script = 'setsid "$@" >/dev/null 2>&1 </dev/null & echo $!'
    done = node.enter(["sh", "-c", script, "sh", *as_user, "env", *words, *argv])
    if up:
        wait_for(lambda: node.enter(["test", "-e", file], check=False).returncode == 0)
    return int(done.stdout)


def put_python(node: LabNode, version: str) -> str:
    """A Python of ~/.pyenv, without most of its library, on a node: where; "": there is none."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*"))
    if not found:
        return ""
    leave = ("test", "tests", "site-packages", "idlelib", "ensurepip", "config-*", "*.a")
    words = [f"--exclude={name}" for name in (*leave, "__pycache__", "include", "share")]
    pack = ["tar", "-C", str(found[0].parent), *words, "-c", found[0].name]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as packed:
        unpack = [*nsenter(node.pid), "tar", "-C", "/opt", "-x"]
        subprocess.run(unpack, stdin=packed.stdout, check=True)
    return f"/opt/{found[0].name}"


def status(node: LabNode, pid: int) -> tuple[str, int]:
    """The state of a process and who traces it; "": it is gone."""
    text = node.enter(["cat", f"/proc/{pid}/status"], check=False).stdout
    found = re.search(r"^State:\s+(\S).*^TracerPid:\s+(\d+)", text, re.M | re.S)
    return (found[1], int(found[2])) if found else ("", 0)


def configured(**how: Any) -> answer.StacksConfig:
    nonce = f"nodeready-{secrets.token_hex(8)}"
    return answer.StacksConfig(nonce, TAG, **{"limit_s": 40, "interval_s": 0.1, **how})


def line(config: answer.StacksConfig) -> shell.ShellCommand:
    """The command as it travels."""
    made = payload.program("nodeready.agent.stacks.program", config)
    return shell.command(made.script, config.limit_s + 2, TAG, made.text)


def capture(node: LabNode, login: str = "root", **how: Any) -> dict[str, Any]:
    """The node's trace; the program leaves nothing, and complains of nothing."""
    config = configured(**how)
    before = processes(node)
    command = line(config)
    done = node.run(command.line, user=login, input=command.stdin)
    assert not done.stderr, done.stderr
    assert set(processes(node)) <= set(before)
    trace = checked(answer.unpack(done.stdout, config.nonce), node.name)
    assert not trace["error"], trace["error"]
    return trace


def by_rank(trace: dict[str, Any]) -> dict[int | None, dict[str, Any]]:
    found = {process["rank"]: process for process in trace["processes"]}
    assert len(found) == len(trace["processes"])
    return found


def functions(trace: dict[str, Any], number: int) -> list[str]:
    """The functions of a stack, root to leaf."""
    return [trace["frames"][place][0] for place in trace["stacks"][number]]


def errors(process: dict[str, Any]) -> list[str]:
    return [sample["error"] for sample in process["samples"]]
