"""Sections of the one round trip, run on this machine as a node runs them."""

import base64
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodeready.core import shell
from nodeready.core.base import Section
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script
from nodeready.core.shell import library, minify

NONCE = "0123456789abcdef"
SHELLS = (["dash", "-c"], ["busybox", "sh", "-c"], ["bash", "-c"])


def section(name: str, script: str, **limits: Any) -> Section:
    return Section(name, lambda policy: script, **limits)


def run(sections: list[Section], runner: list[str] = SHELLS[0], before: str = "") -> str:
    command = shell.command(make_script(sections, Policy(), NONCE), 30, "nodeready:test")
    return subprocess.run(
        [*runner, before + command.line], input=command.stdin, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip


def run_on(
    root: Path, script: str, shell: list[str], files: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A section's script where /proc, /sys and /dev are below `root`, and root/bin is in PATH.

    files: written there first. A test fails when the script writes to stderr.
    """
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(0o755 if path.startswith("bin/") else 0o644)
    for name in ("proc", "sys", "dev/nvidia["):
        script = script.replace(f"/{name}", f"{root}/{name}")
    done = subprocess.run(
        [*shell, "-c", f"{library('answer')}{library('probe')}\n{minify(script)}"],
        env={"PATH": f"{root}/bin:{os.environ['PATH']}", "NR": NONCE, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="surrogateescape",
        check=False, **more,
    )  # fmt: skip
    assert done.stderr == ""
    done.stdout = done.stdout.replace(str(root), "")
    return done


def exact(path: str, content: str | bytes, nonce: str = NONCE) -> str:
    """A file as nr_exact prints it: a small one by its size and its lines."""
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    shown = base64.encodebytes(raw).decode("ascii")
    if len(raw) <= 8192:
        text = raw.decode("utf-8", "surrogateescape")
        lines = text.removesuffix("\n").split("\n") if raw else []
        numbered = (f"{path}:{at}:{line}\n" for at, line in enumerate(lines, 1))
        shown = f"size={len(raw)}\n{''.join(numbered)}"
    return f"\n@{nonce} file {path}\n{shown}\n@{nonce} eof\n"


def home(name: str, answer: str | bytes, path: str = "") -> str:
    """What the section pdshrc prints about a user whose process printed this."""
    raw = answer.encode("utf-8", "surrogateescape") if isinstance(answer, str) else answer
    packed = base64.encodebytes(raw).decode("ascii")
    user = f"uid={name} {0 if name == 'root' else 1000}\nuser={name} {path or f'/home/{name}'}"
    return f"{user}\nread={name}\n{packed}"
